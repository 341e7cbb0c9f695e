
# Outboxes in databases that are created, copied, renamed, moved, closed and
# dropped, and in more databases than can have a worker at the same time.  The
# launcher knows of them without being told, never tries one that is closed, and
# leaves worker slots to others.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Half of the slots are for obix: the launcher, and three workers of databases.
my $node = new_node(
	'main',
	conf => q{
max_worker_processes = 8
max_parallel_workers = 8
allow_in_place_tablespaces = on
autovacuum = off
});

#
# A database to be copied: two events for a handler whose gate is closed here.
# No handler in a copy waits for anything but its own table.
#
$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');
make_handler($node, 'app', 'h',
	q{INSERT INTO test.applied VALUES (e.sequence, e.payload);
IF e.payload = '"wait"' THEN PERFORM pg_advisory_xact_lock(1); END IF;
IF e.payload = '"slow"' THEN PERFORM pg_sleep(0.02); END IF;});
make_handler($node, 'app', 'gate', q{RETURN current_database() <> 'app';}, kind => 'gate');
$node->safe_psql(
	'app', q{
CREATE TABLE test.applied (sequence bigint, payload jsonb);
SELECT obix.create_outbox('o', partition_width => 10, premake => 1);
SELECT obix.create_consumer('c', 'o', handler => 'test.h', gate => 'test.gate', timeout => '1 h', batch_size => 1);
SELECT obix.publish('o', '1'), obix.publish('o', '2');});

my $applied = 'SELECT count(*) = 2 FROM test.applied';
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE app');
poll_ok($node, 'copy', $applied, 'a copy is served without being used');
is($node->safe_psql('app', 'SELECT count(*) FROM test.applied'),
	'0', 'and the original is another thing');
publish($node, 'copy', 'o', 3);
publish($node, 'app',  'o', 1);
is(walk($node, 'copy', 'o'), '5|0|5', 'each has sequences of its own');
is(walk($node, 'app', 'o'), '3|0|3', 'from where they were');
roll_back_inserts($node, 'copy', 'o', 2);
roll_back_inserts($node, 'app',  'o', 1);
is_settled($node, $_, 'o', "and a worker of its own: $_") foreach ('copy', 'app');

#
# DDL of databases in motion
#
$node->safe_psql('copy', q{SELECT obix.publish('o', '"wait"')});    # no lock is held
consumer_ok($node, 'copy', 'c', 'lag_events = 0', 'a handler has run');
my $start = time;
$node->safe_psql('postgres', 'ALTER DATABASE copy RENAME TO renamed');
note sprintf('renamed after %.1f s', time - $start);
publish($node, 'renamed', 'o', 1);
consumer_ok($node, 'renamed', 'c', 'lag_events = 0', 'renamed, it is served');
$node->safe_psql('postgres', q{CREATE TABLESPACE regress_obix_space LOCATION ''});
$node->safe_psql('postgres', 'ALTER DATABASE renamed SET TABLESPACE regress_obix_space');
roll_back_inserts($node, 'renamed', 'o', 1);
publish($node, 'renamed', 'o', 1);
consumer_ok($node, 'renamed', 'c', 'lag_events = 0', 'moved to another tablespace as well');
is_settled($node, 'renamed', 'o', 'holes included');
$node->safe_psql('postgres', 'ALTER DATABASE renamed CONNECTION LIMIT 0');
roll_back_inserts($node, 'renamed', 'o', 1);
publish($node, 'renamed', 'o', 1);
consumer_ok($node, 'renamed', 'c', 'lag_events = 0', 'a connection limit does not concern workers');

# Closed, with a handler that runs, and a hole and an event to come.
my $holder = $node->background_psql('renamed');
$holder->set_query_timer_restart;
$holder->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('renamed', q{SELECT obix.publish('o', '"wait"')});
poll_ok(
	$node,
	'postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event_type = 'Lock'},
	'a handler waits');
no_workers($node);
my $publisher = $node->background_psql('renamed');
$publisher->set_query_timer_restart;
$publisher->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('"gone"'); SELECT obix.publish('o', '"gone"')});
$node->safe_psql('postgres', 'ALTER DATABASE renamed ALLOW_CONNECTIONS false');
my $offset = log_offset($node);
$node->safe_psql('postgres',
	q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = 'renamed' AND backend_type = 'client backend'}
);
poll_ok(
	$node, 'postgres',
	q{SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'renamed'},
	'all sessions of a closed database are ended');
eval { $_->quit } foreach ($holder, $publisher);

# Each reload has the launcher ask for work everywhere.
foreach my $round (1 .. 3)
{
	$node->reload;
	roll_back_inserts($node, 'app', 'o', 1);
	is_settled($node, 'app', 'o', "others are served, round $round");
}
my $refused = qr/not currently accepting connections|invalid database|database \d+ does not exist|database "\w+" does not exist/;
unlike_log($node, $refused, 'no worker is sent to a closed database', $offset);
$node->safe_psql('postgres', 'ALTER DATABASE renamed ALLOW_CONNECTIONS true');
poll_ok($node, 'renamed',
	q{SELECT count(*) = 2 FROM test.applied WHERE payload = '"wait"'},
	'opened, it is served without being used');
poll_ok($node, 'renamed', q{SELECT count(*) = max(sequence) FROM o}, 'holes included');

# Invalid, as an interrupted DROP DATABASE leaves it (from 15.4 on).
no_workers($node);
no_dispatchers($node);
$publisher = $node->background_psql('renamed');
$publisher->set_query_timer_restart;
$publisher->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('"gone"')});
$offset = log_offset($node);
$node->safe_psql('postgres',
	q{UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'renamed'});
$node->safe_psql('postgres',
	q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = 'renamed' AND backend_type = 'client backend'}
);
eval { $publisher->quit };
foreach my $round (1 .. 3)
{
	$node->reload;
	roll_back_inserts($node, 'app', 'o', 1);
	is_settled($node, 'app', 'o', "others are served, round $round");
}
unlike_log($node, $refused, 'nor to an invalid one', $offset);
$node->safe_psql('postgres', 'DROP DATABASE renamed');
pass('which can be dropped');
$node->safe_psql('postgres', 'DROP TABLESPACE regress_obix_space');

#
# More databases than workers.  Two are all the dispatchers that there can be.
#
$node->safe_psql('postgres', "CREATE DATABASE busy$_ TEMPLATE app") foreach (1 .. 3);
poll_ok($node, "busy$_", 'SELECT count(*) >= 3 FROM test.applied', "busy$_ is served")
  foreach (1 .. 3);
my @holders;
foreach my $n (1 .. 2)
{
	push @holders, $node->background_psql("busy$n");
	$holders[-1]->set_query_timer_restart;
	$holders[-1]->query_safe('SELECT pg_advisory_lock(1)');
	$node->safe_psql("busy$n", q{SELECT obix.publish('o', '"wait"')});
}
my $waiting =
  q{SELECT count(*) = 2 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event_type = 'Lock'};
poll_ok($node, 'postgres', $waiting, 'all dispatchers are busy');
$offset = log_offset($node);
publish($node, 'busy3', 'o', 1);

# Meanwhile databases come and go, with all kinds of processes in motion: an
# idle worker, handlers that wait, an outbox in back-off.
$node->safe_psql(
	'app', q{
CREATE ROLE regress_obix_owner;
CREATE SCHEMA bad;
GRANT ALL ON SCHEMA bad TO regress_obix_owner;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('bad.o', partition_width => 10, premake => 1);
RESET ROLE;
REVOKE CREATE ON SCHEMA bad FROM regress_obix_owner;
SELECT count(obix.publish('bad.o', '1')) FROM generate_series(1, 15);});
poll_ok($node, 'app',
	q{SELECT failures > 0 FROM obix.outbox_status WHERE outbox = 'bad.o'::regclass},
	'an outbox is in back-off');
my $drop = start_psql($node, 'postgres', 'drop', 'DROP DATABASE busy1',
	timeout => 10 * $PostgreSQL::Test::Utils::timeout_default);
my @times;
foreach my $n (1 .. 50)
{
	foreach my $command ('CREATE', 'DROP')
	{
		$start = time;
		$node->safe_psql('postgres', "$command DATABASE passing");
		push @times, time - $start;
	}
}
@times = sort { $a <=> $b } @times;
note sprintf('CREATE and DROP DATABASE took %.2f s, at most %.2f s', $times[50], $times[-1]);
cmp_ok($times[50], '<', 2, 'databases come and go');
unlike_log($node, $refused, 'and no worker is sent after one that has gone', $offset);
finish_psql($drop);
like(
	$drop->{stderr},
	qr/database "busy1" is being accessed by other users.*There are \d+ other sessions/s,
	'but not one in which a handler runs, as in any session');
$node->wait_for_log(qr/more databases need a worker of obix than can have one/, $offset);
is(log_count($node, qr/more databases need a worker/, $offset), 1, 'one line tells that workers are short');
like(
	slurp_file($node->logfile, $offset),
	qr/DETAIL:  Workers of obix take up to half of max_worker_processes, 4 of 8, and take turns.*HINT:  Consider raising max_worker_processes/s,
	'with a hint');
is($node->safe_psql('postgres', $waiting), 't', 'the handlers still wait');
$_->quit foreach (@holders);
consumer_ok($node, 'busy3', 'c', 'lag_events = 0', 'then the third has its turn');

# Where nobody has to wait that long, those that have much to do make way.
$node->safe_psql("busy$_",
	q{SELECT count(obix.publish('o', '"slow"')) FROM generate_series(1, 2000)}) foreach (1 .. 2);
consumer_ok($node, "busy$_", 'c', 'delivered > 10', "busy$_ is busy") foreach (1 .. 2);
foreach my $round (1 .. 3)
{
	publish($node, 'busy3', 'o', 1);
	consumer_ok($node, 'busy3', 'c', 'lag_events = 0', "busy3 has its turn, round $round");
}
is( $node->safe_psql($_, q{SELECT lag_events > 0 FROM obix.consumer_status}),
	't', "and $_ goes on being busy") foreach ('busy1', 'busy2');
$node->safe_psql('postgres', "DROP DATABASE busy$_ WITH (FORCE)") foreach (1 .. 3);

#
# Fifty databases that all have work at once, after a restart
#
$node->safe_psql('postgres', 'ALTER DATABASE app IS_TEMPLATE true');
$node->safe_psql('app', 'DROP SCHEMA bad CASCADE; DROP ROLE regress_obix_owner');
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 0');
$node->reload;
ok(no_dispatchers($node), 'handlers are switched off');
$node->safe_psql('postgres', join '',
	map { "CREATE DATABASE db$_ TEMPLATE app;\n" } (1 .. 50));
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 2');
$offset = log_offset($node);
$start = time;
$node->restart;

my %left = map { ("db$_" => 1) } (1 .. 50);
my ($samples, $least) = (0, 9);
my $deadline = time + $PostgreSQL::Test::Utils::timeout_default;
while (%left && time < $deadline)
{
	my $launched = $node->safe_psql(
		'postgres', q{
SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; SET enable_indexonlyscan = off; SET max_parallel_workers_per_gather = 2;
CREATE FUNCTION pg_temp.launched() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	line text;
BEGIN
	FOR line IN EXPLAIN (ANALYZE, COSTS off, TIMING off) SELECT count(*) FROM pg_class LOOP
		IF line ~ 'Workers Launched' THEN
			RETURN substring(line FROM '\d+');
		END IF;
	END LOOP;
END $$;
SELECT pg_temp.launched();});

	$samples++;
	$least = $launched if $launched < $least;
	foreach my $db (sort keys %left)
	{
		last
		  if $node->safe_psql($db, 'SELECT count(*) >= 3 FROM test.applied') ne 't';
		delete $left{$db};
	}
}
note sprintf('50 databases were served in %.1f s, %d samples', time - $start, $samples);
is(join(' ', sort keys %left), '', 'all are served');
is($least, 2, 'a parallel query always gets its workers');
is($node->safe_psql('app', 'SELECT count(*) FROM test.applied'), '0', 'a template is left alone');
cmp_ok(log_count($node, qr/could not start a worker|more databases need/, $offset),
	'<=', 1, 'one line of log at most');
ok(no_dispatchers($node) && no_workers($node), 'then no worker is left');
unlike_log($node, qr/PANIC|TRAP|terminated by signal \d+: (?!Terminated)/, 'nothing has crashed');

$node->stop;
done_testing();
