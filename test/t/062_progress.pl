
# How far long operations are: obix.progress while they run, and messages to who
# has called them.  A recovery is stopped in the middle of moving rows by an index
# expression that waits for a lock, as long as it has to.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "obix.auto_recover = off\nobix.lock_timeout = '1h'\n");
my $columns = 'outbox, consumer, operation, phase, done, total';

setup_database($node, 'postgres');

#
# Recovery.  Rows are stranded in two gaps, so that the 5 of one are moved.
#
$node->safe_psql(
	'postgres', q{
CREATE FUNCTION test.hold(payload jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	IF payload = '"hold"' THEN
		PERFORM pg_catalog.pg_advisory_xact_lock(7);
	END IF;
	RETURN true;
END $$;
SELECT obix.create_outbox('o', partition_width => 10, premake => 0);
CREATE INDEX ON o (test.hold(payload));
BEGIN;              -- or a worker makes the partition that is missing
ALTER TABLE o DETACH PARTITION o_p0;
DROP TABLE o_p0;
SET session_replication_role = replica;
INSERT INTO o (sequence, payload) SELECT n, CASE n WHEN 4 THEN '"hold"' ELSE '"move"' END::jsonb FROM generate_series(1, 5) n;
CREATE TABLE o_p100 PARTITION OF o FOR VALUES FROM (100) TO (110);
INSERT INTO o (sequence, payload) SELECT n, '"stay"' FROM generate_series(110, 200) n;
COMMIT;});
is($node->safe_psql('postgres', 'SELECT stranded FROM obix.outbox_status'), '96', 'events are stranded in two gaps');

my $holder = $node->background_psql('postgres');
$holder->query_safe('SELECT pg_advisory_lock(7)');
my $caller = $node->background_psql('postgres');
my $pid    = $caller->query_safe('SELECT pg_backend_pid()');
$caller->{stdin} .= "SELECT obix.recover_default('o');\n\\echo recovered\n";
$caller->{run}->pump_nb;
poll_ok($node, 'postgres', "SELECT phase = 'moving rows' AND done = 3 FROM obix.progress WHERE pid = $pid",
	'a recovery that moves rows says how many');
is( $node->safe_psql('postgres', "SELECT $columns, started_at < now(), rate > 0, remaining > '0' FROM obix.progress"),
	'o||recovery|moving rows|3|5|t|t|t', 'of how many, and since when');
is($node->safe_psql('postgres', 'SELECT state FROM obix.outbox_status'), 'locked', 'while the outbox is locked');

# the message comes when a second has passed, by the clock
poll_ok($node, 'postgres', "SELECT clock_timestamp() > started_at + interval '1.1 s' FROM obix.progress", 'a second passes');
$holder->query_safe('SELECT pg_advisory_unlock(7)');
pump_until($caller->{run}, $caller->{timeout}, \$caller->{stdout}, qr/recovered/);
like($caller->{stderr}, qr/^psql.*NOTICE:  recovery of outbox "o": 4 of 5 rows moved$/m, 'who has called it is told');
like($caller->{stdout}, qr/^96$/m, 'all were recovered');
is($node->safe_psql('postgres', 'SELECT * FROM obix.progress'), '', 'then it is over');

# an operation that fails is over as well
$node->safe_psql(
	'postgres', q{
SELECT obix.create_outbox('p', partition_width => 10, premake => 0);
INSERT INTO p (payload) SELECT '1' FROM generate_series(1, 30);});
my ($result, $stdout, $stderr) = $node->psql('postgres', q{
CREATE FUNCTION test.fail() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;
BEGIN;
CREATE EVENT TRIGGER fail ON ddl_command_start EXECUTE FUNCTION test.fail();
SAVEPOINT s;
SELECT obix.recover_default('p');
ROLLBACK TO s;
SELECT count(*) FROM obix.operations();
ROLLBACK;
SELECT count(*) FROM obix.operations()}, on_error_stop => 0);
like($stderr, qr/not now/, 'a recovery fails');
like($stdout, qr/0$/, 'and is not shown any more');

#
# Filling, by the worker: it waits as the first placeholder is written.
#
$node->safe_psql(
	'postgres', q{
CREATE FUNCTION test.hold_placeholder(payload jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	IF payload IS NULL THEN
		PERFORM pg_catalog.pg_advisory_xact_lock(7);
	END IF;
	RETURN true;
END $$;
SELECT obix.create_outbox('r');
CREATE INDEX ON r (test.hold_placeholder(payload));});
$holder->query_safe('SELECT pg_advisory_lock(7)');
roll_back_inserts($node, 'postgres', 'r', 10);
my $worker = worker_pid($node, 'postgres');
poll_ok($node, 'postgres', "SELECT count(*) = 1 FROM obix.progress WHERE pid = $worker", 'the worker fills holes');
is($node->safe_psql('postgres', "SELECT $columns FROM obix.progress"), 'r||filling|looking for holes|0|10', 'and says how far it is');
$holder->query_safe('SELECT pg_advisory_unlock(7)');
is_settled($node, 'postgres', 'r', 'until they are filled');
is($node->safe_psql('postgres', 'SELECT * FROM obix.progress'), '', 'which is over then');

#
# A consumer that catches up, and a rebuild.  The handler waits at an event.
#
$node->safe_psql(
	'postgres', q{
SELECT obix.create_outbox('q');
CREATE TABLE test.seen (sequence bigint);
SELECT count(obix.publish('q', CASE WHEN n = 2501 THEN '"hold"' ELSE '"go"' END::jsonb)) FROM generate_series(1, 4000) n;});
make_handler($node, 'postgres', 'see', q{
	IF EXISTS (SELECT FROM unnest(e) WHERE payload = '"hold"') THEN PERFORM pg_advisory_xact_lock(7); END IF;
	INSERT INTO seen SELECT sequence FROM unnest(e);}, kind => 'batch');
$holder->query_safe('SELECT pg_advisory_lock(7)');
$node->safe_psql('postgres',
	q{SET search_path = test; SELECT obix.create_consumer('c', 'public.q', batch_handler => 'test.see', tables => '{seen}', batch_size => 500)});
poll_ok($node, 'postgres', q{SELECT done = 2500 AND pid IS NOT NULL FROM obix.progress WHERE consumer = 'c'}, 'a new consumer');
is($node->safe_psql('postgres', "SELECT $columns FROM obix.progress"), 'q|c|catch-up|delivering events|2500|4000', 'catches up');

# the screen that "./dev top" shows, again and again
my $screen = '';
my $watch  = IPC::Run::start(
	[ $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'), '-v', 'outbox=q', '-v', 'seconds=0.1', '-v', 'clear=',
		'-f', "$FindBin::RealBin/../monitoring/top.sql" ],
	'<', \undef, '>', \$screen, '2>&1', my $timer = IPC::Run::timer($PostgreSQL::Test::Utils::timeout_default));
ok(pump_until($watch, $timer, \$screen, qr/(?:^postgres, .*^q +ok +4000 +4000 .*^c +active +2500 +1500 .*^catch-up of c: delivering events, 2500 of 4000.*){2}/ms),
	'the screen shows it, and does so again');
$watch->kill_kill;
unlike($screen, qr/ERROR/, 'without an error');

$holder->query_safe('SELECT pg_advisory_unlock(7)');
consumer_ok($node, 'postgres', 'c', 'lag_events = 0', 'until it has');
is($node->safe_psql('postgres', 'SELECT * FROM obix.progress'), '', 'which is not shown any more');

$holder->query_safe('SELECT pg_advisory_lock(7)');
my $rebuild = start_psql($node, 'postgres', 'rebuild', "CALL obix.rebuild('c');\n");
poll_ok($node, 'postgres', q{SELECT done = 2500 AND pid IS NOT NULL FROM obix.progress WHERE operation = 'rebuild'}, 'a rebuild');
is($node->safe_psql('postgres', "SELECT $columns FROM obix.progress"), 'q|c|rebuild|applying events|2500|4000', 'goes on');
$holder->query_safe('SELECT pg_advisory_unlock(7)');
finish_psql($rebuild);
is($node->safe_psql('postgres', 'SELECT * FROM obix.progress'), '', 'to its end');

# the speed of a consumer is known once it has been seen twice, a second apart
$node->safe_psql('postgres', q{SELECT obix.create_consumer('d', 'q'); SELECT count(*) FROM obix.fetch('d', 1000)});
poll_ok($node, 'postgres', q{SELECT rate = 0 FROM obix.consumer_status WHERE consumer = 'd'}, 'a consumer that rests');
$node->safe_psql('postgres', q{SELECT obix.ack('d', 1000)});
poll_ok($node, 'postgres', q{SELECT rate > 0 AND remaining > '0' AND done = 1000 AND total = 4000 FROM obix.progress WHERE consumer = 'd'},
	'its speed when it goes on');

$_->quit foreach ($holder, $caller);
$node->stop;
done_testing();
