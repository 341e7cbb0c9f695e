
# Hot standbys, one behind the other: what they refuse, what readers there get
# while the first is promoted under load, and how soon everything is back.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# No reader is ever cancelled for being in the way of replay: if one was for longer
# than it reads, everything would stand still.
my ($result, $stdout, $stderr);
my $primary = new_node(
	'primary',
	init => { allows_streaming => 1 },
	conf => <<'CONF');
autovacuum = off
log_recovery_conflict_waits = on
max_standby_archive_delay = -1
max_standby_streaming_delay = -1
CONF

setup_database($primary, 'postgres');
$primary->safe_psql(
	'postgres', <<'SQL');
SELECT obix.create_outbox('o', partition_width => 500, premake => 2);
SELECT obix.create_outbox('quiet');

-- Follow an outbox up to an event of type 'stop', writing nothing: the setting
-- test.followed is how many events that were, and a digest of them in order.
CREATE PROCEDURE test.follow(outbox regclass)
LANGUAGE plpgsql AS $$
DECLARE
	e obix.event;
	after bigint := 0;
	digest text := '';
	stop boolean := false;
BEGIN
	WHILE NOT stop LOOP
		CALL obix.wait(outbox, after, '1 min');
		FOR e IN SELECT * FROM obix.read(outbox, after, 500) LOOP
			IF e.sequence <> after + 1 THEN
				RAISE EXCEPTION 'sequence % was delivered after %', e.sequence, after;
			END IF;
			digest := md5(digest || e.id || coalesce(e.payload::text, ''));
			after := e.sequence;
			stop := e.type IS NOT DISTINCT FROM 'stop';
		END LOOP;
		COMMIT;
		PERFORM set_config('test.followed', after || ' ' || digest, false);
	END LOOP;
END $$;

-- The same of the table.
CREATE FUNCTION test.digest(outbox regclass) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	e record;
	digest text := '';
	last bigint;
BEGIN
	FOR e IN EXECUTE format('SELECT * FROM %s ORDER BY sequence', outbox) LOOP
		digest := md5(digest || e.id || coalesce(e.payload::text, ''));
		last := e.sequence;
	END LOOP;
	RETURN last || ' ' || digest;
END $$;

CREATE TABLE test.effect (consumer text, sequence bigint, PRIMARY KEY (consumer, sequence));

-- Consume from outside, up to an event of type 'stop'.
CREATE PROCEDURE test.consume_external()
LANGUAGE plpgsql AS $$
DECLARE
	e obix.event;
	last bigint;
	stop boolean := false;
BEGIN
	WHILE NOT stop LOOP
		CALL obix.wait_for('external', '1 min');
		last := NULL;
		FOR e IN SELECT * FROM obix.fetch('external', wait => true) LOOP
			INSERT INTO test.effect VALUES ('external', e.sequence);
			last := e.sequence;
			stop := e.type IS NOT DISTINCT FROM 'stop';
		END LOOP;
		IF last IS NOT NULL THEN
			PERFORM obix.ack('external', last);
		END IF;
		COMMIT;
	END LOOP;
END $$;
SQL
make_handler($primary, 'postgres', 'handle',
	q{INSERT INTO test.effect VALUES ('handled', e.sequence);});
$primary->safe_psql(
	'postgres', q{
SELECT obix.create_consumer('handled', 'o', handler => 'test.handle');
SELECT obix.create_consumer('external', 'o');
SELECT obix.create_consumer('idle', 'o')});
publish($primary, 'postgres', 'o', 3);

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;
my $cascade = PostgreSQL::Test::Cluster->new('cascade');
$cascade->init_from_backup($primary, 'backup', has_streaming => 1);
$cascade->enable_streaming($standby);
$cascade->start;
$primary->wait_for_catchup($standby);
$standby->wait_for_catchup($cascade, 'replay', $primary->lsn('write'));

#
# What a standby refuses
#
my $waiter = start_wait($cascade, 'postgres', 'o', 3);

my @refused = (
	[ q{SELECT obix.publish('o', '1')},     'obix.publish()' ],
	[ q{SELECT obix.next_sequence('o')},    'obix.next_sequence()' ],
	[ q{INSERT INTO o (payload) VALUES ('1')},    'INSERT',   'in a read-only transaction' ],
	[ q{COPY o (payload) FROM '/dev/null'}, 'COPY' ],
	[ q{UPDATE o SET payload = '0'},              'UPDATE',   'in a read-only transaction' ],
	[ q{TRUNCATE o},                              'TRUNCATE TABLE', 'in a read-only transaction' ],
	[ q{SELECT obix.create_outbox('p')},          'obix.create_outbox()' ],
	[ q{SELECT obix.alter_outbox('o', 10)},       'obix.alter_outbox()' ],
	[ q{SELECT obix.drop_outbox('o')},            'obix.drop_outbox()' ],
	[ q{SELECT obix.fill_gaps('o')},              'obix.fill_gaps()' ],
	[ q{SELECT obix.fill_gaps()},                 'obix.fill_gaps()' ],
	[ q{SELECT obix.ensure_partitions('o')},      'obix.ensure_partitions()' ],
	[ q{SELECT obix.ensure_partitions()},         'obix.ensure_partitions()' ],
	[ q{SELECT obix.recover_default('o')},        'obix.recover_default()' ],
	[ q{SELECT obix.create_consumer('c', 'o')},   'obix.create_consumer()' ],
	[ q{SELECT obix.alter_consumer('idle', batch_size => 2)}, 'obix.alter_consumer()' ],
	[ q{SELECT obix.drop_consumer('idle')},       'obix.drop_consumer()' ],
	[ q{SELECT obix.pause('idle')},               'obix.pause()' ],
	[ q{SELECT obix.resume('idle')},              'obix.resume()' ],
	[ q{SELECT obix.seek('idle', 1)},             'obix.seek()' ],
	[ q{SELECT * FROM obix.fetch('idle')},        'obix.fetch()' ],
	[ q{SELECT obix.ack('idle', 1)},              'obix.ack()' ],
	[ q{SELECT obix.fail('idle', 1, 'no')},       'obix.fail()' ],
	[ q{SELECT obix.acquire('idle')},             'obix.acquire()' ],
	[ q{SELECT obix.renew('idle', 1)},            'obix.renew()' ],
	[ q{SELECT obix.release('idle', 1)},          'obix.release()' ],
	[ q{CALL obix.wait_for('idle', '0 s')},       'obix.wait_for()' ],
	[ q{SELECT obix.requeue('idle', 1)},          'obix.requeue()' ],
	[ q{SELECT obix.discard('idle', 1)},          'obix.discard()' ],
	[ q{CALL obix.rebuild('handled')},            'obix.rebuild()' ],
	[ q{SELECT obix.cancel_rebuild('handled')},   'obix.cancel_rebuild()' ]);
($result, $stdout, $stderr) = $cascade->psql(
	'postgres',
	join("\n", map { $_->[0] . ';' } @refused),
	on_error_stop => 0);
my @messages = grep { /ERROR:/ } split /\n/, $stderr;
foreach my $case (@refused)
{
	my ($query, $what, $when) = @$case;

	$when //= 'during recovery';
	like(shift(@messages), qr/ERROR:  cannot execute \Q$what\E $when$/, $query);
}
is("@messages", '', 'and there is no other error');

is( $cascade->safe_psql('postgres',
		q{SELECT count(*), obix.high_water_mark('o') FROM obix.read('o')}),
	'3|3', 'reading works');
is( $cascade->safe_psql('postgres',
		q{SELECT outbox, head, high_water_mark, in_flight, worker_pid FROM obix.outbox_status WHERE outbox = 'o'::regclass}),
	'o||3||', 'the status knows what can be read');
is( $cascade->safe_psql('postgres',
		q{SELECT count(*) > 2 FROM obix.partition_status}),
	't', 'and the partitions');
is( $cascade->safe_psql('postgres',
		q{SELECT consumer, state, "cursor" FROM obix.consumer_status WHERE consumer = 'idle'}),
	'idle|active|0', 'and the consumers');
is( $cascade->safe_psql('postgres',
		'SELECT count(*) FROM obix.rebuild_progress, obix.dead_letter'),
	'0', 'and rebuilds and dead letters');

publish($primary, 'postgres', 'o', 1);
woken($waiter,
	'a session that waits there is woken when an event has come through both');

# Another waits through all of what follows.  To look ten times a second costs
# little, to look all the time would take all there is.  Its transaction does not
# last as long as that, or replay could have to wait for it.
sub cpu_seconds
{
	my ($pid) = @_;
	my @fields = split ' ', slurp_file("/proc/$pid/stat") =~ s/^.*\) //sr;

	return ($fields[11] + $fields[12]) / 100;
}
$waiter = start_wait($standby, 'postgres', 'quiet', 0);
my $transaction = $standby->safe_psql('postgres',
	"SELECT virtualtransaction FROM pg_locks WHERE pid = $waiter->{obix_pid} AND locktype = 'virtualxid'"
);
my $start     = time;
my $cpu_start = cpu_seconds($waiter->{obix_pid});

#
# Load on the primary; readers on both standbys
#
my %follower;
foreach my $node ($standby, $cascade)
{
	$follower{ $node->name } = start_psql($node, 'postgres', 'follow',
		"CALL test.follow('o');\nSELECT current_setting('test.followed');\n");
}
my $session = $standby->background_psql('postgres', on_error_stop => 0);
$session->query(q{SELECT obix.publish('o', '1')});
like($session->{stderr}, qr/cannot execute obix.publish\(\) during recovery/,
	'a session on the standby cannot publish');
$session->{stderr} = '';

my $load = start_pgbench(
	$primary,
	'postgres',
	'load',
	'-c 6 -j 2 -T 60',
	{
		'publish@4' => "SELECT obix.publish('o', '1');\n",
		'insert@2'  => "INSERT INTO o (payload) VALUES ('1');\n",
		'many@1' =>
		  "SELECT count(obix.publish('o', '2')) FROM generate_series(1, 20);\n",
		'rollback@1' => "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
	});
my $external = start_psql($primary, 'postgres', 'external',
	"CALL test.consume_external();\n");
$primary->poll_query_until('postgres',
	q{SELECT count(*) = 2 AND min("cursor") > 1500 FROM obix.consumer_status WHERE consumer <> 'idle'}
) or die 'the consumers do not get on';

# From here on readers stop: sequences that are drawn and not inserted, inserted
# and not committed, and prepared.
my $open = $primary->background_psql('postgres');
$open->query_safe(
	q{BEGIN; SELECT obix.next_sequence('o'), obix.next_sequence('o'); INSERT INTO o (payload) VALUES ('"lost"')}
);
$primary->safe_psql(
	'postgres', q{
BEGIN; INSERT INTO o (payload) VALUES ('"inserted"'); PREPARE TRANSACTION 'inserted';
BEGIN; SELECT obix.publish('o', '"published"'); PREPARE TRANSACTION 'published'});
my $prepared = $primary->safe_psql('postgres',
	q{SELECT head FROM obix.outbox_status WHERE outbox = 'o'::regclass});
$primary->poll_query_until('postgres', "SELECT max(sequence) > $prepared + 500 FROM o")
  or die 'the load does not get on';
$primary->wait_for_catchup($standby);

poll_ok($standby, 'postgres',
	"SELECT virtualtransaction <> '$transaction' FROM pg_locks WHERE pid = $waiter->{obix_pid} AND locktype = 'virtualxid'",
	'a session that waits goes from one transaction to the next');
my $elapsed = time - $start;
my $cpu     = cpu_seconds($waiter->{obix_pid}) - $cpu_start;
cmp_ok($cpu, '<', 0.05 + 0.02 * $elapsed,
	'a session that waits where nothing happens does next to nothing');
note sprintf('%.2f s of CPU in %.2f s', $cpu, $elapsed);

#
# Promotion
#
crash($primary);
my $offset = log_offset($standby);
is( $standby->safe_psql('postgres',
		q{SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ 'obix (worker|dispatcher)'}),
	'0', 'no worker runs on the standby');
unlike_log($standby, qr/ERROR.*obix worker|obix (worker|dispatcher).*(ERROR|exited)/, 'nor has one tried to');

$start = time;
my @back;

sub back
{
	my ($what) = @_;

	push @back, sprintf('%s after %.2f s', $what, time - $start);
	return;
}
$standby->promote;
back('promoted');

# before that, it may have been locked by what was cut off
my $replicated = $standby->safe_psql('postgres', 'SELECT max(sequence) FROM o');
$session->query_safe(q{SELECT obix.publish('o', '"again"')});
back('published in a session that was there before');
my $again = $standby->safe_psql('postgres',
	q{SELECT sequence FROM o WHERE payload = '"again"'});
$external = start_psql($standby, 'postgres', 'external',
	"CALL test.consume_external();\n");
$standby->poll_query_until('postgres',
	q{SELECT undecided IS NOT NULL AND high_water_mark = undecided - 1 FROM obix.outbox_status WHERE outbox = 'o'::regclass}
) or die 'not filled';
back('filled up to what is prepared');
$standby->safe_psql('postgres', q{COMMIT PREPARED 'inserted'});
$standby->safe_psql('postgres', q{COMMIT PREPARED 'published'});
settle($standby, 'postgres', 'o');
back('everything can be read');
$standby->poll_query_until('postgres',
	qq{SELECT count(*) = 2 AND min("cursor") >= $again FROM obix.consumer_status WHERE consumer <> 'idle'}
) or die 'the consumers do not get on';
back('both consumers have it');
$elapsed = time - $start;
my $slowness = slowness($standby);
cmp_ok($elapsed, '<', 5 * $slowness,
	'head, holes, worker and consumers are back within five seconds');
note sprintf('the machine is %.1f times slower than it can be', $slowness);
note join("\n", @back);

woken($waiter, 'a session that waited through the promotion begins anew');
cmp_ok($again, '>', $replicated, 'the head is above all that was replicated');
is( $standby->safe_psql('postgres',
		q{SELECT count(*) FROM o WHERE payload IN ('"inserted"', '"published"')}),
	'2', 'what was prepared is there');
is( $standby->safe_psql('postgres',
		q{SELECT count(*) FROM o WHERE payload = '"lost"'}),
	'0', 'what was open is not');

#
# Life goes on, on the new time line
#
finish_pgbench($load, may_fail => 1);
eval { $open->quit };
finish_pgbench(
	start_pgbench(
		$standby,
		'postgres', 'load',
		'-c 4 -j 2 -t 100',
		{
			'publish@4' => "SELECT obix.publish('o', '1');\n",
			'rollback@1' =>
			  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
		}));
is_settled($standby, 'postgres', 'o', 'publishing and filling go on');
poll_ok($standby, 'postgres',
	q{SELECT runway >= 1000 FROM obix.outbox_status WHERE outbox = 'o'::regclass}, 'and so does premaking');
$session->query_safe(q{SELECT obix.publish('o', '0', 'stop')});
$session->quit;
consumers_ok($standby, 'postgres', q{consumer <> 'idle'}, 'lag_events = 0',
	'both consumers get to the end');
is_deeply([ finish_psql($external) ], [], 'the one outside without an error')
  or diag($external->{stderr});
is( $standby->safe_psql(
		'postgres', q{
SELECT count(*)
FROM (SELECT c, sequence FROM o CROSS JOIN (VALUES ('handled'), ('external')) v (c) WHERE payload IS NOT NULL) o
	 FULL JOIN test.effect e ON e.consumer = o.c AND e.sequence = o.sequence
WHERE o.sequence IS NULL OR e.sequence IS NULL}),
	'0',
	'each event has had its effect once, and nothing else had any');

my $digest = $standby->safe_psql('postgres', q{SELECT test.digest('o')});
foreach my $node ($standby, $cascade)
{
	my $run = $follower{ $node->name };

	is(join("\n", finish_psql($run)),
		$digest, 'a reader on ' . $node->name . ' was given everything, in order, through the promotion')
	  or diag($run->{stderr});
}
unlike_log($_, qr/PANIC|TRAP|obix (worker|dispatcher).*exited with exit code/,
	'no fault in the log of ' . $_->name)
  foreach ($standby, $cascade);

$cascade->stop;
$standby->stop;
done_testing();
