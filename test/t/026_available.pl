
# Ordering 'available': what is committed is delivered without waiting for those
# who are still at it, and what was passed is delivered when it commits.  With
# publishers that take long, roll back, use savepoints, prepare their
# transactions, and with a crash and a restart in the middle, every event that
# was committed is applied once, and nothing else.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main', conf => "max_wal_size = '4GB'\n");

setup_database($node, $db);
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o', partition_width => 1000);
SELECT obix.create_outbox('big', partition_width => 100000);
CREATE TABLE test.applied (consumer text, sequence bigint, id uuid, n bigserial);
CREATE SEQUENCE test.flaky});
foreach my $consumer ('one', 'typed', 'flaky', 'poisoned')
{
	make_handler(
		$node, $db,
		$consumer,
		"INSERT INTO test.applied VALUES ('$consumer', e.sequence, e.id);"
		  . (
			$consumer eq 'flaky'
			? q{IF e.sequence % 50 = 0 AND nextval('test.flaky') % 3 > 0 THEN RAISE EXCEPTION 'not yet'; END IF;}
			: '')
		  . (
			$consumer eq 'poisoned'
			? q{IF e.sequence % 40 = 0 AND NOT EXISTS (SELECT FROM test.healed) THEN RAISE EXCEPTION 'poison'; END IF;}
			: ''));
}
foreach my $consumer ('many', 'flaky', 'big')
{
	make_handler(
		$node, $db,
		$consumer,
		"INSERT INTO test.applied SELECT '$consumer', x.sequence, x.id FROM unnest(e) x;"
		  . (
			$consumer eq 'flaky'
			? q{IF nextval('test.flaky') % 3 > 0 THEN RAISE EXCEPTION 'not yet'; END IF;}
			: ''),
		kind => 'batch');
}
$node->safe_psql(
	$db, q{
CREATE TABLE test.healed ();
SELECT obix.create_consumer('one', 'o', handler => 'test.one', ordering => 'available');
SELECT obix.create_consumer('many', 'o', batch_handler => 'test.many', ordering => 'available', batch_size => 100);
SELECT obix.create_consumer('typed', 'o', handler => 'test.typed', ordering => 'available', types => '{rare}');
SELECT obix.create_consumer('flaky', 'o', handler => 'test.flaky', batch_handler => 'test.flaky', ordering => 'available',
	batch_size => 50, max_attempts => NULL, backoff => '1 ms', max_backoff => '5 ms');
SELECT obix.create_consumer('poisoned', 'o', handler => 'test.poisoned', ordering => 'available',
	on_failure => 'dead_letter', max_attempts => 1, backoff => '1 ms');
SELECT obix.create_consumer('outside', 'o', ordering => 'available')});

#
# Nobody waits for an open publisher
#
my $open = $node->background_psql($db);
$open->query_safe(
	q{BEGIN; INSERT INTO o (payload, type) VALUES ('"open"', 'rare'), ('"open"', 'rare')});
$node->safe_psql($db,
	q{BEGIN; INSERT INTO o (payload) VALUES ('"prepared"'); PREPARE TRANSACTION 'first'});
publish($node, $db, 'o', 3);
consumer_ok(
	$node, $db, 'one',
	q{"cursor" = 6 AND delivered = 3 AND late_ranges > 0},
	'with publishers open, what is committed is delivered');
is( $node->safe_psql($db, q{SELECT string_agg(sequence::text, ' ') FROM obix.fetch('outside')}),
	'4 5 6',
	'also to who fetches');
$node->safe_psql($db, q{SELECT obix.ack('outside', 6)});
ok(no_dispatchers($node), 'meanwhile nobody is kept busy');
$open->query_safe('COMMIT');
consumer_ok($node, $db, 'one', q{delivered = 5}, 'when one commits, its events are delivered');
consumer_ok($node, $db, 'typed', q{delivered = 2 AND lag_events = 0}, 'to whom they are for');
is( $node->safe_psql($db, q{SELECT string_agg(sequence::text, ' ') FROM obix.fetch('outside')}),
	'1 2',
	'also to who fetches');
is( $node->safe_psql($db,
		q{SELECT obix.ack('outside', 1); SELECT string_agg(sequence::text, ' ') FROM obix.fetch('outside')}
	) =~ s/^\n//r,
	'2',
	'and acknowledges one of them');
$node->safe_psql($db, q{SELECT obix.ack('outside', 2); COMMIT PREPARED 'first'});
consumer_ok(
	$node, $db, 'one',
	q{delivered = 6 AND late_ranges = 0},
	'so is that of a prepared transaction');
is( $node->safe_psql(
		$db,
		q{SELECT string_agg(sequence::text, ' ' ORDER BY n) FROM test.applied WHERE consumer = 'one'}
	),
	'4 5 6 1 2 3',
	'late, and once');

#
# Everything at once
#
my %scripts = (
	'publish@6' => "SELECT obix.publish('o', '1'), obix.publish('o', '2');\n",
	'rare@1'    => "SELECT obix.publish('o', '1', type => 'rare');\n",
	'insert@4'  =>
	  "INSERT INTO o (payload, type) SELECT '1', 'common' FROM generate_series(1, 3);\n",
	'long_insert@2' => q{
\set ms random(1, 200)
BEGIN;
INSERT INTO o (payload, type) VALUES ('1', 'rare');
\sleep :ms ms
INSERT INTO o (payload, type) VALUES ('2', 'common');
COMMIT;
},
	'long_publish@2' => q{
\set ms random(1, 200)
BEGIN;
SELECT obix.publish('o', '1');
INSERT INTO o (payload) VALUES ('2');
\sleep :ms ms
SELECT obix.publish('o', '3');
COMMIT;
},
	'rollback@2' => q{
\set ms random(1, 100)
BEGIN;
INSERT INTO o (payload) SELECT '1' FROM generate_series(1, 5);
SELECT obix.publish('o', '1');
\sleep :ms ms
ROLLBACK;
},
	'savepoints@2' => q{
\set ms random(1, 50)
BEGIN;
INSERT INTO o (payload, type) VALUES ('"kept"', 'rare');
SAVEPOINT a;
INSERT INTO o (payload) VALUES ('"gone"');
SELECT obix.publish('o', '"gone"');
\sleep :ms ms
ROLLBACK TO a;
SELECT obix.publish('o', '"kept"');
SAVEPOINT b;
INSERT INTO o (payload) VALUES ('"kept"');
RELEASE b;
COMMIT;
},
	'prepared@2' => q{
\set ms random(1, 200)
\set r random(1, 1000000000)
BEGIN;
INSERT INTO o (payload) VALUES ('1'), ('2');
SELECT obix.publish('o', '3', type => 'rare');
PREPARE TRANSACTION 'kept :r';
\sleep :ms ms
COMMIT PREPARED 'kept :r';
},
	'forgotten@1' => q{
\set ms random(1, 200)
\set r random(1, 1000000000)
BEGIN;
INSERT INTO o (payload) VALUES ('1'), ('2');
PREPARE TRANSACTION 'gone :r';
\sleep :ms ms
ROLLBACK PREPARED 'gone :r';
});

# Someone who fetches, beside the handlers.
my $fetcher =
  q{SELECT coalesce(string_agg(sequence || ':' || id, ' '), '') AS events, max(sequence) AS last, count(*) > 0 AS found FROM obix.fetch('outside', 20) \gset
\if :found
BEGIN;
SELECT obix.ack('outside', :last) \gset
INSERT INTO test.applied SELECT 'outside', split_part(e, ':', 1)::bigint, split_part(e, ':', 2)::uuid FROM unnest(string_to_array(:'events', ' ')) e;
COMMIT;
\endif
};

foreach my $round ('restart', 'crash', 'end')
{
	my $head = $node->safe_psql($db, 'SELECT max(sequence) FROM o');
	my $load =
	  start_pgbench($node, $db, "load-$round", '-c 8 -j 2 ' . ($round eq 'end' ? '-t 150' : '-T 60'),
		\%scripts);
	my $outside = start_psql($node, $db, "outside-$round", $fetcher x 20000);

	$open = $node->background_psql($db, on_error_stop => 0);
	$open->query(
		q{BEGIN; INSERT INTO o (payload, type) SELECT '"open"', 'rare' FROM generate_series(1, 30)}
	);
	$node->poll_query_until($db, "SELECT max(sequence) > $head + 1000 FROM o");
	$node->restart if $round eq 'restart';
	if ($round eq 'crash')
	{
		crash($node);
		$node->start;
	}
	finish_pgbench($load, may_fail => $round ne 'end');
	$open->query('COMMIT') if $round eq 'end';
	eval { $open->quit };
	$outside->{handle}->kill_kill;

	# what was left prepared is ended either way
	foreach my $gid (split /\n/,
		$node->safe_psql($db, 'SELECT gid FROM pg_prepared_xacts ORDER BY 1'))
	{
		$node->safe_psql($db, ($gid =~ /kept/ ? 'COMMIT' : 'ROLLBACK') . " PREPARED '$gid'");
	}
}
is_settled($node, $db, 'o', 'everything has ended');
consumers_ok(
	$node, $db,
	q{consumer <> 'outside'},
	q{lag_events = 0 AND late_ranges = 0 AND state = 'active'},
	'everything is delivered, and no hole is remembered');
finish_psql(start_psql($node, $db, 'outside-rest', ($fetcher x 500)));
while (
	$node->safe_psql($db,
		q{SELECT lag_events + late_ranges FROM obix.consumer_status WHERE consumer = 'outside'})
	> 0)
{
	finish_psql(start_psql($node, $db, 'outside-rest', ($fetcher x 200)));
}
$node->safe_psql($db,
	q{ALTER TABLE test.healed ADD a integer; INSERT INTO test.healed VALUES (1)});
my $letters = $node->safe_psql($db,
	q{SELECT count(obix.requeue(consumer, sequence)) FROM obix.dead_letter});
cmp_ok($letters, '>', 10, 'there were dead letters');
consumer_ok(
	$node, $db, 'poisoned',
	q{late_ranges = 0 AND lag_events = 0},
	'which are delivered again');
is($node->safe_psql($db, 'SELECT count(*) FROM obix.dead_letter'), '0', 'so there are none');
note $node->safe_psql($db,
	q{SELECT count(*), count(payload), count(*) FILTER (WHERE type = 'rare') FROM o});

# the checksums
my $sum  = 'count(*), count(DISTINCT sequence), sum(sequence), sum(hashtext(id::text)::bigint)';
my $all  = $node->safe_psql($db, "SELECT $sum FROM o WHERE payload IS NOT NULL");
my $rare = $node->safe_psql($db, "SELECT $sum FROM o WHERE type = 'rare'");
is($node->safe_psql($db, q{SELECT count(*) FROM o WHERE payload = '"gone"'}),
	'0', 'what was rolled back is not there');
is( $node->safe_psql($db, "SELECT $sum FROM test.applied WHERE consumer = '$_'"),
	$_ eq 'typed' ? $rare : $all,
	"$_: what was applied is what was committed, each once"
) foreach ('one', 'many', 'typed', 'flaky', 'poisoned');
# five it had fetched before
is( $node->safe_psql(
		$db,
		"SELECT $sum FROM (SELECT sequence, id FROM test.applied WHERE consumer = 'outside' UNION ALL SELECT sequence, id FROM o WHERE sequence IN (1, 2, 4, 5, 6)) x"
	),
	$all,
	'outside: what was fetched and acknowledged too');
is( $node->safe_psql(
		$db,
		q{SELECT string_agg(DISTINCT (delivered = (SELECT count(*) FROM o WHERE payload IS NOT NULL))::text, ' ') FROM obix.consumer_status WHERE consumer <> 'typed'}
	),
	'true',
	'and the status has counted each once');
is( $node->safe_psql(
		$db,
		'SELECT count(*) FROM obix.consumer_late l JOIN obix.consumer_state s USING (id) WHERE l.from_sequence <= s.position'
	),
	'0',
	'no range is left behind the cursors');
no_dispatchers($node);
$node->safe_psql($db,
	q{SELECT obix.drop_consumer(consumer) FROM obix.consumer; TRUNCATE test.applied});

#
# Many holes of one transaction are one row, however many; so they are for
# those who are the first to pass them, and for those who have passed others.
#
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('big', 'big', batch_handler => 'test.big', ordering => 'available', batch_size => 10000)}
);
my $ranges = q{SELECT count(*), min(from_sequence), max(to_sequence) FROM obix.consumer_late};
$open = $node->background_psql($db);
$node->safe_psql($db, q{SELECT obix.pause('big')});
$open->query_safe(
	q{BEGIN; INSERT INTO big (payload) SELECT '1' FROM generate_series(1, 200000)});
publish($node, $db, 'big', 5);
$node->safe_psql($db, q{SELECT obix.resume('big')});
consumer_ok($node, $db, 'big', q{delivered = 5 AND late_ranges = 1}, 'past 200,000 holes');
is($node->safe_psql($db, $ranges), '1|1|200000', 'which are one row');
publish($node, $db, 'big', 5);
consumer_ok($node, $db, 'big', q{delivered = 10 AND late_ranges = 1}, 'and stay one');
$open->query_safe('COMMIT');
consumer_ok(
	$node, $db, 'big',
	q{delivered = 200010 AND late_ranges = 0 AND lag_events = 0},
	'when they commit, they are delivered');
is( $node->safe_psql(
		$db, q{SELECT count(*), count(DISTINCT sequence), max(sequence) FROM test.applied}),
	'200010|200010|200010',
	'each once');

# Alone, with nothing committed behind them: they are passed before anything is
# delivered, so they are late before the cursor has got there.
$open->query_safe(
	q{BEGIN; INSERT INTO big (payload) SELECT '1' FROM generate_series(1, 30000)});
$node->safe_psql($db, q{SELECT obix.resume('big')});
poll_ok(
	$node, $db,
	'SELECT scanned = 230010 AND position = 200010 FROM obix.consumer_state',
	'at the head they are passed as well');
$open->query_safe('COMMIT');
consumer_ok(
	$node, $db, 'big',
	q{delivered = 230010 AND late_ranges = 0 AND lag_events = 0},
	'and delivered when they commit');
is( $node->safe_psql(
		$db, q{SELECT count(*), count(DISTINCT sequence), max(sequence) FROM test.applied}),
	'230010|230010|230010',
	'each once');
$open->query_safe(
	q{BEGIN; INSERT INTO big (payload) SELECT '1' FROM generate_series(1, 30000)});
publish($node, $db, 'big', 1);
consumer_ok(
	$node, $db, 'big',
	q{delivered = 230011 AND late_ranges > 0},
	'past some that will be rolled back');
$open->query_safe('ROLLBACK');
is_settled($node, $db, 'big', 'they become placeholders');
consumer_ok(
	$node, $db, 'big',
	q{delivered = 230011 AND late_ranges = 0 AND lag_events = 0},
	'and are forgotten');
is($node->safe_psql($db, q{SELECT count(*), count(DISTINCT sequence) FROM test.applied}),
	'230011|230011', 'nothing else was applied');
$open->quit;

$node->stop;
done_testing();
