
# Where there is too little of something, or something is not what it was: what
# obix says then, and that everything else goes on.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main', conf => "obix.max_consumers = 4\nobix.worker_linger = '100ms'\n");
my ($result, $stdout, $stderr, $offset);

setup_database($node, $db);
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o');
CREATE TABLE test.applied (consumer text, sequence bigint)});
make_handler($node, $db, 'good', q{INSERT INTO test.applied VALUES ('good', e.sequence);});
make_handler($node, $db, 'bad',  q{RAISE EXCEPTION 'bad';});

#
# Room for four consumers
#
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('good', 'o', handler => 'test.good');
SELECT obix.create_consumer('stops', 'o', handler => 'test.bad', max_attempts => 1);
SELECT obix.create_consumer('puts_aside', 'o', handler => 'test.bad', max_attempts => 1, on_failure => 'dead_letter');
SELECT obix.create_consumer('parks', 'o', handler => 'test.good')});
($result, $stdout, $stderr) =
  $node->psql($db, q{SELECT obix.create_consumer('more', 'o', handler => 'test.good')});
like(
	$stderr,
	qr/ERROR:  too many consumers are in use.*DETAIL:  Shared memory has room for 4 consumers in all databases together\..*HINT:  Raise obix\.max_consumers and restart the server\./s,
	'a fifth consumer with a handler is refused, with a hint');
publish($node, $db, 'o', 3);
is( $node->safe_psql(
		$db, q{
SELECT obix.create_consumer('outside', 'o') \g /dev/null
CALL obix.wait_for('outside', '1 h');
SELECT count(*) FROM obix.fetch('outside');
SELECT obix.ack('outside', 3) \g /dev/null
SELECT count(*) FROM obix.fetch('outside');
CALL obix.wait_for('outside', '10 ms');}),
	"3\n0",
	'one that is fetched for works without room');
consumer_ok($node, $db, 'good', 'lag_events = 0 AND delivered = 3', 'those that have room are served');

#
# What the log of the server says about consumers
#
$node->wait_for_log(qr/LOG: .*consumer "stops" has stopped at event 1: bad/);
$node->wait_for_log(qr/LOG: .*consumer "puts_aside" has put event 3 into obix\.dead_letter: bad/);
$offset = log_offset($node);
no_dispatchers($node);
$node->safe_psql($db,
	q{CREATE FUNCTION test.gone(e obix.event) RETURNS void LANGUAGE sql AS ''; SELECT obix.alter_consumer('parks', handler => 'test.gone'); DROP FUNCTION test.gone}
);
publish($node, $db, 'o', 1);
$node->wait_for_log(
	qr/LOG: .*consumer "parks" is parked: .*does not exist.*HINT:  It is looked at again later, or at once by obix\.resume\./s,
	$offset);
pass('a consumer that stops, puts events aside or is parked is in the log');
consumer_ok($node, $db, 'good', 'lag_events = 0', 'and others go on');
$node->safe_psql($db,
	q{SELECT obix.drop_consumer(consumer) FROM obix.consumer WHERE consumer <> 'good'});

#
# No room for a batch on disk: nothing is wrong with the consumer
#
no_dispatchers($node);
$node->safe_psql($db,
	q{ALTER DATABASE postgres SET temp_file_limit = 0; ALTER DATABASE postgres SET work_mem = '64kB'});
$offset = log_offset($node);
$node->safe_psql($db,
	q{SET work_mem = '4MB'; SELECT count(obix.publish('o', (SELECT to_jsonb(string_agg(md5(g + i / 1000.0 || ''), '')) FROM generate_series(1, 1000) i))) FROM generate_series(1, 20) g}
);
$node->wait_for_log(qr/LOG: .*consumer \d+ cannot be served: temporary file size exceeds/, $offset);
consumer_ok(
	$node, $db, 'good',
	q{state = 'active' AND failed = 0 AND lag_events = 20},
	'a consumer that cannot be served for want of something waits');
$node->safe_psql($db, 'ALTER DATABASE postgres RESET ALL');
kill 'TERM', dispatcher_pids($node, $db);
consumer_ok($node, $db, 'good', 'lag_events = 0', 'and goes on when there is some');

#
# More sequences missing than a worker fills: here by a stray row
#
$node->safe_psql($db, q{SELECT obix.create_outbox('stray', partition_width => 100000000)});
publish($node, $db, 'stray', 2);
no_workers($node);
$offset = log_offset($node);
$node->safe_psql(
	$db, q{
SET session_replication_role = replica;
INSERT INTO stray (sequence, payload) VALUES (20000000, '"stray"');
RESET session_replication_role;
SELECT obix.publish('stray', '"after"')});
$node->wait_for_log(
	qr/maintenance of outbox "stray" failed: too many sequences are missing from outbox "stray".*DETAIL:  Sequences from 3 to 19999999 have no row\..*HINT:  If that is right, call obix\.fill_gaps\./s,
	$offset);
poll_ok($node, $db,
	q{SELECT failures > 0 AND last_error ~ 'too many sequences are missing' FROM obix.outbox_status WHERE outbox = 'stray'::regclass},
	'the worker does not fill twenty million sequences by itself');
is($node->safe_psql($db, q{SELECT count(*), max(sequence) FROM obix.read('stray')}),
	'2|2', 'readers stop before them');
is($node->safe_psql($db, 'SELECT count(*) FROM stray'), '4', 'no placeholder is written');
roll_back_inserts($node, $db, 'o', 2);
is_settled($node, $db, 'o', 'other outboxes are served');
$node->safe_psql($db, q{TRUNCATE stray; SELECT obix.publish('stray', '"new"')});
is($node->safe_psql($db, q{SELECT sequence, payload FROM obix.read('stray')}),
	'20000002|"new"', 'emptied, the outbox goes on');
poll_ok($node, $db,
	q{SELECT failures = 0 AND last_error IS NULL FROM obix.outbox_status WHERE outbox = 'stray'::regclass},
	'and nothing is wrong any more');
$node->wait_for_log(qr/LOG: .*maintenance of outbox "stray" succeeded/, $offset);

#
# Settings of the database that change how numbers and times are printed
#
no_workers($node);
no_dispatchers($node);
$node->safe_psql($db, join '',
	map { "ALTER DATABASE postgres SET $_;" } (
		q{timezone = 'America/St_Johns'}, q{datestyle = 'SQL, DMY'},
		q{intervalstyle = 'sql_standard'}, 'quote_all_identifiers = on',
		q{extra_float_digits = -15}, 'array_nulls = off',
		'enable_indexscan = off'));
make_handler($node, $db, 'slow_start',
	q{IF (SELECT count(*) FROM test.applied WHERE consumer = 'tried') < 3 THEN PERFORM test.tried(); RAISE EXCEPTION 'not yet'; END IF; INSERT INTO test.applied VALUES ('slow_start', e.sequence);}
);
$node->safe_psql(
	$db, q{
CREATE SEQUENCE test.tries;
CREATE FUNCTION test.tried() RETURNS void LANGUAGE sql AS $$SELECT nextval('test.tries')$$;
CREATE OR REPLACE FUNCTION test.slow_start(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF nextval('test.tries') < 4 THEN RAISE EXCEPTION 'not yet'; END IF;
	INSERT INTO test.applied VALUES ('slow_start', e.sequence);
END $$;
SELECT obix.create_outbox('"It''s \\\\ odd"', partition_width => 10, premake => 1);
SELECT obix.create_consumer('it''s odd', '"It''s \\\\ odd"', handler => 'test.slow_start', max_attempts => 10, backoff => '0:00:00.02', max_backoff => '0:00:00.05');
SELECT count(obix.publish('"It''s \\\\ odd"', '1')) FROM generate_series(1, 34)});
consumer_ok($node, $db, q{it''s odd}, 'lag_events = 0 AND delivered = 34 AND failed = 2',
	'settings of the database: a handler is tried again and called');
poll_ok($node, $db,
	q{SELECT high_water_mark = 34 AND stranded = 0 AND runway >= 6 AND failures = 0 FROM obix.outbox_status WHERE outbox::text ~ 'odd'},
	'settings of the database: partitions are made and DEFAULT is recovered');
$node->safe_psql($db, q{ALTER DATABASE postgres RESET ALL});
$node->safe_psql($db, q{SELECT obix.drop_outbox(outbox, true) FROM obix.outbox WHERE outbox::text ~ 'odd'});

#
# A worker that has nothing to do
#
$node->safe_psql($db, q{ALTER SYSTEM SET obix.worker_linger = '4s'});
$node->reload;
roll_back_inserts($node, $db, 'o', 1);
my $pid = worker_pid($node, $db);
poll_ok($node, $db,
	"SELECT wait_event_type = 'Extension' AND xact_start IS NULL AND backend_xmin IS NULL AND backend_xid IS NULL FROM pg_stat_activity WHERE pid = $pid",
	'a worker that lingers has no transaction and no snapshot');

# Lag is known without one: launcher and workers are stopped
my @stopped = (launcher_pid($node), $pid, dispatcher_pids($node, $db));
kill 'STOP', @stopped;
my $lag = q{SELECT consumer, lag_events, lag > '0' FROM obix.consumer_status WHERE consumer = 'outside'};
$node->safe_psql($db, q{SELECT obix.create_consumer('outside', 'o', start_after => (SELECT max(sequence) FROM o))});
is($node->safe_psql($db, 'SELECT lag_events, lag FROM obix.consumer_status WHERE consumer = $$outside$$'),
	'0|00:00:00', 'no lag while no worker runs');
publish($node, $db, 'o', 3);
is($node->safe_psql($db, $lag), 'outside|3|t', 'and some, when there are events');
is($node->safe_psql($db, q{SELECT head - high_water_mark FROM obix.outbox_status WHERE outbox = 'o'::regclass}),
	'0', 'the outbox has none');
kill 'CONT', @stopped;
$node->safe_psql($db, 'ALTER SYSTEM RESET obix.worker_linger');
$node->reload;

#
# A consumer that is terminated between effect and acknowledgement
#
my $first  = $node->background_psql($db, on_error_stop => 0);
my $second = $node->background_psql($db, on_error_stop => 0);
my $first_pid = $first->query_safe('SELECT pg_backend_pid()');
$first->query_safe(
	q{BEGIN; INSERT INTO test.applied SELECT 'first', sequence FROM obix.fetch('outside')});
$second->{stdin} .=
  "BEGIN;\nINSERT INTO test.applied SELECT 'second', sequence FROM obix.fetch('outside', wait => true);\nSELECT obix.ack('outside', (SELECT max(sequence) FROM test.applied WHERE consumer = 'second'));\nCOMMIT;\n\\echo done\n";
$second->{run}->pump_nb;
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE 'INSERT INTO test.applied SELECT ''second''%' AND wait_event_type = 'Lock'}
) or die 'the second consumer does not wait';
$node->safe_psql($db, "SELECT pg_terminate_backend($first_pid)");
pump_until($second->{run}, $second->{timeout}, \$second->{stdout}, qr/^done/m);
is( $node->safe_psql(
		$db,
		q{SELECT consumer, count(*) FROM test.applied WHERE consumer IN ('first', 'second') GROUP BY 1}),
	'second|3',
	'a consumer that is terminated before it acknowledges is replaced at once, and its effect is gone');
is($node->safe_psql($db, $lag =~ s/, lag > '0'//r), 'outside|0', 'nothing is left to do');
eval { $first->{run}->finish };

#
# Consumers that are passed by retention
#
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('kept', partition_width => 10, premake => 3);
SELECT obix.drop_consumer('outside');
SELECT obix.create_consumer('paused', 'kept');
SELECT obix.create_consumer('handled', 'kept', handler => 'test.good')});
publish($node, $db, 'kept', 5);
consumer_ok($node, $db, 'handled', 'lag_events = 0', 'a consumer gets what there is');
$node->safe_psql($db, q{SELECT obix.ack('paused', 3), obix.pause('paused'), obix.pause('handled')});
publish($node, $db, 'kept', 20);
is_settled($node, $db, 'kept', 'more comes while it is paused');
$node->safe_psql($db, q{DROP TABLE kept_p0; SELECT obix.resume('paused'), obix.resume('handled')});
($result, $stdout, $stderr) = $node->psql($db, q{SELECT * FROM obix.fetch('paused')});
like(
	$stderr,
	qr/ERROR:  consumer "paused" is below the oldest kept event of outbox "kept".*DETAIL:  Events from sequence 4 to 9 have been removed/s,
	'one that is passed by retention is told so');
consumer_ok(
	$node, $db, 'handled',
	q{state = 'parked' AND "cursor" = 5 AND last_error ~ 'is below the oldest kept event of outbox "kept"'},
	'one with a handler is parked');
$node->safe_psql($db, q{SELECT obix.create_consumer('new', 'kept')});
is($node->safe_psql($db, q{SELECT min(sequence) FROM obix.fetch('new')}),
	'10', 'a new one begins with the oldest kept event');
$node->safe_psql($db, q{SELECT obix.seek('handled', NULL), obix.resume('handled')});
consumer_ok($node, $db, 'handled', q{state = 'active' AND lag_events = 0 AND delivered = 21},
	'moved past what is gone, it goes on');
$node->safe_psql($db, q{SELECT obix.drop_outbox('kept', true)});

#
# Tables that are changed while they are rebuilt
#
$node->safe_psql(
	$db, q{
CREATE TABLE public.total (sequence bigint);
SELECT obix.create_outbox('r');
CREATE FUNCTION test.rebuild(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('search_path') LIKE 'obix_rebuild%' THEN PERFORM pg_advisory_xact_lock_shared(7); END IF;
	INSERT INTO total VALUES (e.sequence);
END $$;
SELECT obix.create_consumer('rebuilt', 'r', handler => 'test.rebuild', tables => '{total}')});
publish($node, $db, 'r', 3);
consumer_ok($node, $db, 'rebuilt', 'lag_events = 0', 'a consumer with a table');
my $schema = 'obix_rebuild_' . $node->safe_psql($db, q{SELECT id FROM obix.consumer WHERE consumer = 'rebuilt'});
foreach my $change ('ALTER TABLE total ADD COLUMN more integer',
	"ALTER TABLE $schema.total ADD COLUMN other integer")
{
	$second->query_safe('SELECT pg_advisory_lock(7)');
	my $run = start_psql($node, $db, 'rebuild', q{CALL obix.rebuild('rebuilt');});
	$node->poll_query_until($db,
		q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted})
	  or die 'the rebuild does not begin';
	$node->safe_psql($db, $change);
	$second->query_safe('SELECT pg_advisory_unlock(7)');
	finish_psql($run);
	like($run->{stderr}, qr/table "total" was changed while it was rebuilt/,
		"a rebuild ends, and says so, after $change");
	is($node->safe_psql($db, 'SELECT count(*) FROM total'), '3', 'the live table is as it was');
	$node->safe_psql($db, q{SELECT obix.cancel_rebuild('rebuilt')});
}
$second->quit;

unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'no fault in the log');
$node->stop;

#
# No slot for a worker: everything but what workers do works, and that by calls
#
my $small =
  new_node('small', conf => "max_worker_processes = 1\nmax_logical_replication_workers = 0\n");
setup_database($small, $db);
$small->safe_psql($db,
	q{SELECT obix.create_outbox('o', partition_width => 10, premake => 1)});
publish($small, $db, 'o', 34);
roll_back_inserts($small, $db, 'o', 2);
$small->wait_for_log(
	qr/LOG: .*obix could not start a worker.*DETAIL:  All background worker slots are in use\..*HINT:  Consider raising max_worker_processes\./s
);
is(walk($small, $db, 'o'), '34|0|34', 'without a slot for a worker readers get on');
is( $small->safe_psql(
		$db,
		q{SELECT obix.fill_gaps('o'), obix.recover_default('o') > 0, obix.ensure_partitions('o') >= 0}),
	'2|t|t',
	'and maintenance is done by calls');
is(walk($small, $db, 'o'), '36|2|36', 'so all can be read');
cmp_ok(log_count($small, qr/could not start a worker/), '<=', 2, 'the log is not filled');
$small->stop;
done_testing();
