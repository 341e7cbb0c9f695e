
# Everything that leaves holes, and everything that has nothing to do with the
# outbox, under consumers of every kind that are live: readers, those who fetch,
# and handlers.  Each is given every event once and in order, and gets to the end
# by itself.  Also behind a transaction that is larger than any batch.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main', conf => "max_wal_size = '2GB'\n");

$node->safe_psql('postgres', 'CREATE DATABASE other');
setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE TABLE test.applied (n bigserial, sequence bigint, payload jsonb);
CREATE TABLE test.taken (n bigserial, sequence bigint);
CREATE TABLE test.ordinary (id integer, n bigint);
SELECT obix.create_outbox('o', partition_width => 500);
CREATE UNIQUE INDEX ON o_p0 (key);
ALTER TABLE o ADD CONSTRAINT positive CHECK (payload IS NULL OR payload <> '-1')});
make_handler(
	$node, $db, 'apply',
	q{INSERT INTO test.applied (sequence, payload) SELECT x.sequence, x.payload FROM unnest(e) x;},
	kind => 'batch');
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('handled', 'o', batch_handler => 'test.apply');
SELECT obix.create_consumer('fetched', 'o');
SELECT obix.create_consumer('behind', 'o');
SELECT obix.create_consumer('watched', 'o')});

# Fetch, apply and acknowledge in one transaction, until there is nothing left
my $take = q{DO $$
DECLARE
	list bigint[];
BEGIN
	LOOP
		list := ARRAY(SELECT sequence FROM obix.fetch('fetched', 500, wait => true));
		INSERT INTO test.taken (sequence) SELECT unnest(list);
		IF cardinality(list) > 0 THEN PERFORM obix.ack('fetched', list[cardinality(list)]); END IF;
		COMMIT;
		EXIT WHEN cardinality(list) = 0;
	END LOOP;
END $$;
};

# What was delivered: events, how many of them twice, how many out of order
sub faults
{
	my ($table) = @_;

	return $node->safe_psql(
		$db, qq{
SELECT count(*) = (SELECT count(*) FROM o WHERE payload IS NOT NULL), count(*) - count(DISTINCT sequence), count(*) FILTER (WHERE before > sequence)
FROM (SELECT sequence, lag(sequence) OVER (ORDER BY n) AS before FROM $table) t});
}

#
# Holes of all kinds, and transactions that have nothing to do with it: one with
# an old snapshot, one with an old transaction id, two in another database, of
# which one is prepared
#
my @unrelated = map { $node->background_psql($_) } ($db, $db, 'other');
$unrelated[0]->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM test.ordinary');
$unrelated[1]->query_safe('BEGIN; CREATE TEMP TABLE t (n integer); INSERT INTO test.ordinary VALUES (0, 0)');
$unrelated[2]->query_safe('BEGIN; CREATE TABLE t (n integer)');
$node->safe_psql('other', q{BEGIN; CREATE TABLE u (n integer); PREPARE TRANSACTION 'unrelated'});

my $reader = start_psql($node, $db, 'reader',
	"CALL test.consume('reader', 'o', 0);\n\\echo stopped\n");
finish_pgbench(
	start_pgbench(
		$node, $db,
		'holes',
		'-c 8 -j 2 -t 300',
		{
			'publish@6' => "SELECT obix.publish('o', '1', key => gen_random_uuid()::text);\n",
			'insert@4'  => "INSERT INTO o (payload) VALUES ('1'), ('2');\n",
			'rollback@6' =>
			  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nSELECT obix.publish('o', '1');\nROLLBACK;\n",
			'conflict@2' =>
			  "INSERT INTO o (key, payload) VALUES ('same', '1'), (gen_random_uuid()::text, '2') ON CONFLICT DO NOTHING;\n",
			# each of these fails, and is caught
			'unique@2' => q{DO $$ BEGIN
INSERT INTO o (key, payload) VALUES ('twice', '1'), ('twice', '2');
EXCEPTION WHEN unique_violation THEN END $$;
},
			'check@2' => q{DO $$ BEGIN
INSERT INTO o (payload) VALUES ('1'), ('-1');
EXCEPTION WHEN check_violation THEN END $$;
},
			'timeout@1' => q{DO $$ BEGIN
SET LOCAL statement_timeout = '5ms';
INSERT INTO o (payload) SELECT CASE WHEN g = 5 THEN to_jsonb(pg_sleep(10)::text) ELSE '1' END FROM generate_series(1, 10) g;
EXCEPTION WHEN query_canceled THEN END $$;
} =~ s/SET LOCAL statement_timeout = '5ms';\n/PERFORM pg_cancel_backend(pg_backend_pid());\n/r,
			'draw@1' => "SELECT obix.next_sequence('o');\n",
			'take@2' => $take
		}));
is_settled($node, $db, 'o', 'all holes are filled, without further traffic');
consumer_ok($node, $db, 'handled', 'lag_events = 0 AND failed = 0', 'the handler gets to the end');
$node->safe_psql($db, $take);
is(faults('test.applied'), 't|0|0', 'it was given each event once and in order');
is(faults('test.taken'),   't|0|0', 'so was who fetched');
cmp_ok($node->safe_psql($db, 'SELECT count(*) FROM o WHERE payload IS NULL'),
	'>', 1000, 'there were many holes');
is( $node->safe_psql(
		$db, q{SELECT lag_events FROM obix.consumer_status WHERE consumer = 'fetched'}),
	'0',
	'and no lag is left');
foreach my $session (@unrelated)
{
	$session->query_safe('ROLLBACK');
	$session->quit;
}
$node->safe_psql('other', q{ROLLBACK PREPARED 'unrelated'});

#
# One transaction of 100,000 events, with one consumer a thousand behind, one
# that sleeps, and a reader
#
$node->safe_psql($db, q{SELECT obix.ack('watched', (SELECT max(sequence) FROM o)); SELECT count(*) FROM obix.fetch('watched')});
my $head    = $node->safe_psql($db, 'SELECT max(sequence) FROM o');
my $sleeper = $node->background_psql($db);
$sleeper->{stdin} .= "CALL obix.wait_for('watched', '1 h');\n\\echo woken\n";
$sleeper->{run}->pump_nb;
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait_for%' AND wait_event_type = 'Extension'}
) or die 'nobody waits';
$node->safe_psql($db, "SELECT obix.seek('behind', $head - 1000)");
publish($node, $db, 'o', 100000);
woken($sleeper, 'who waits is woken by 100,000 events in one transaction');
consumer_ok($node, $db, 'handled', 'lag_events = 0', 'the handler gets all of them');
$node->safe_psql($db, $take);
is(faults('test.applied'), 't|0|0', 'once and in order');
is(faults('test.taken'),   't|0|0', 'so does who fetches');
is( $node->safe_psql(
		$db,
		qq{SELECT count(*) FROM o JOIN test.applied a USING (sequence) WHERE sequence > $head AND o.payload::bigint = sequence - $head AND a.payload = o.payload}
	),
	'100000',
	'as they were published');
is( $node->safe_psql(
		$db,
		q{SELECT lag_events FROM obix.consumer_status WHERE consumer = 'behind'}),
	'101000',
	'one that was behind knows how far it is');
$node->safe_psql($db, $take =~ s/'fetched'/'behind'/gr =~ s/INSERT INTO test.taken.*?;//r);
consumer_ok($node, $db, 'behind', qq{lag_events = 0 AND "cursor" = $head + 100000},
	'and gets there');
SKIP:
{
	my ($pid) = dispatcher_pids($node, $db);

	skip 'no dispatcher lingers', 1 unless defined $pid && -r "/proc/$pid/status";
	slurp_file("/proc/$pid/status") =~ /^VmHWM:\s+(\d+) kB/m;
	note sprintf('memory of the dispatcher: %.0f MB', $1 / 1024);
	cmp_ok($1 / 1024, '<', 150, 'the memory of the dispatcher is bounded');
}
$node->safe_psql($db, q{SELECT obix.publish('o', '1', 'stop')});
is_deeply([ finish_psql($reader) ],
	['stopped'], 'the reader was given everything in order, without a gap')
  or diag($reader->{stderr});
$sleeper->quit;

#
# 32 serializable publishers, with all maintenance and readers: obix is no reason
# for a serialization failure
#
$node->safe_psql($db, q{SELECT obix.create_outbox('s', partition_width => 200, premake => 1)});
{
	local $ENV{PGOPTIONS} = '-c default_transaction_isolation=serializable';
	finish_pgbench(
		start_pgbench(
			$node, $db,
			'serializable',
			'-c 32 -j 2 -t 40',
			{
				'publish@4' =>
				  "BEGIN;\nINSERT INTO test.ordinary VALUES (:client_id, 1);\nSELECT obix.publish('s', '1');\nCOMMIT;\n",
				'insert@4'   => "INSERT INTO s (payload) VALUES ('1');\n",
				'rollback@1' => "BEGIN;\nINSERT INTO s (payload) VALUES ('1');\nROLLBACK;\n",
				'read@2'     => "SELECT count(*) FROM obix.read('s', 0, 200);\n",
				'fill@1'     => "SELECT obix.fill_gaps('s');\n",
				'ensure@1'   => "SELECT obix.ensure_partitions('s');\n"
			}));
}
is_settled($node, $db, 's', 'serializable publishers: all is settled');
like(walk($node, $db, 's'), qr/^(\d+)\|\d+\|\1$/, 'and contiguous');
unlike_log($node, qr/could not serialize|deadlock|PANIC|TRAP/, 'no serialization failure');

$node->stop;
done_testing();
