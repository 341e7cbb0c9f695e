
# Recovery of DEFAULT, interrupted at each of its steps: by kill -9 of the whole
# server, or by a timeout.  It is one transaction, so it has happened or it has
# not; readers are given the same either way, and the worker does it again.
#
# An event trigger stops it: before the command whose turn it is, the session that
# runs it waits for an advisory lock.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node(
	'main', conf => q{
obix.worker_linger = '10ms'
obix.auto_recover = off
obix.lock_timeout = '1min'
max_wal_size = '1GB'
});

setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE SEQUENCE test.commands;
CREATE TABLE test.stop_at (command bigint);
INSERT INTO test.stop_at VALUES (0);
CREATE FUNCTION test.stop() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM test.stop_at WHERE command > 0)
	   AND (SELECT backend_type FROM pg_catalog.pg_stat_activity WHERE pid = pg_catalog.pg_backend_pid()) = 'client backend'
	   AND pg_catalog.nextval('test.commands') = (SELECT command FROM test.stop_at) THEN
		PERFORM pg_catalog.pg_advisory_xact_lock_shared(7);
	END IF;
END $$;
CREATE EVENT TRIGGER stop ON ddl_command_start EXECUTE FUNCTION test.stop();
SELECT obix.create_outbox('o', partition_width => 100, premake => 0)});
no_workers($node);

my $published = 0;

# Publish 50 events past the partitions that there are, with DEFAULT in use, so
# that no other is made.
sub strand
{
	my $blocker = $node->background_psql($db);
	my $count;

	no_workers($node);
	$blocker->query_safe('BEGIN; SELECT count(*) FROM o_default');
	$count = 50 + $node->safe_psql($db,
		q{SELECT greatest(runway, 0) FROM obix.outbox_status WHERE outbox = 'o'::regclass});
	publish($node, $db, 'o', $count);
	$published += $count;
	$blocker->query_safe('COMMIT');
	$blocker->quit;
	return;
}

sub count_commands
{
	return $node->safe_psql($db,
		q{TRUNCATE test.stop_at; INSERT INTO test.stop_at VALUES (1000); SELECT setval('test.commands', 1, false) \g /dev/null
SELECT obix.recover_default('o') \g /dev/null
SELECT last_value FROM test.commands});
}

# How many commands are there?
strand();
my $commands = count_commands();
note "recovery runs $commands commands";
cmp_ok($commands, '>', 5, 'recovery runs several commands');
cmp_ok($commands, '<', 25, 'but not many');

foreach my $step (1 .. $commands)
{
	my $holder = $node->background_psql($db, on_error_stop => 0);
	my $caller = $node->background_psql($db, on_error_stop => 0);

	$node->safe_psql($db, 'TRUNCATE test.stop_at; INSERT INTO test.stop_at VALUES (0)');
	strand();
	$holder->query_safe(
		"TRUNCATE test.stop_at; INSERT INTO test.stop_at VALUES ($step); SELECT setval('test.commands', 1, false); SELECT pg_advisory_lock(7)"
	);
	my $timeout = $step % 5 == 1 ? '' : q{SET statement_timeout = '200ms';};
	$caller->{stdin} .= "$timeout SELECT obix.recover_default('o');\n\\echo done\n";
	$caller->{run}->pump_nb;
	if ($timeout)
	{
		pump_until($caller->{run}, $caller->{timeout}, \$caller->{stdout}, qr/^done/m);
		like($caller->{stderr}, qr/statement timeout/, "step $step: ended by a timeout");
		$holder->query_safe('SELECT pg_advisory_unlock(7)');
	}
	else
	{
		$node->poll_query_until($db,
			q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted})
		  or die "recovery does not stop at step $step";
		crash($node);
		$node->start;
	}
	foreach my $session ($holder, $caller)
	{
		eval { $session->quit };
	}
	is( walk($node, $db, 'o'),
		"$published|0|$published",
		"step $step: everything can be read after it");
	is( $node->safe_psql($db, 'SELECT count(*) > 0 FROM o_default'),
		't', "step $step: nothing has happened");
	$node->safe_psql($db,
		'TRUNCATE test.stop_at; INSERT INTO test.stop_at VALUES (0)');
	cmp_ok($node->safe_psql($db, q{SELECT obix.recover_default('o')}),
		'>', 0, "step $step: it can be done again");
	is( $node->safe_psql(
			$db,
			q{SELECT (SELECT count(*) FROM o_default), count(*) FROM o LEFT JOIN obix.partition_status p ON p.partition = o.tableoid AND o.sequence >= p.from_sequence AND o.sequence < p.to_sequence WHERE p.partition IS NULL}
		),
		'0|0',
		"step $step: and every row is in its partition");
}
is(walk($node, $db, 'o'), "$published|0|$published", 'nothing is missing or there twice');
is($node->safe_psql($db, q{SELECT count(*) FROM pg_class WHERE relname ~ '^o_default'  AND relkind = 'r'}),
	'1', 'no half-made table is left behind');
$node->safe_psql($db, 'DROP EVENT TRIGGER stop');

#
# In several gaps, with more rows to be moved than a worker moves: it says so, and
# a call does it.  Readers go on meanwhile.
#
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('gaps', partition_width => 10, premake => 0)});
no_workers($node);
my $blocker = $node->background_psql($db);
$blocker->query_safe('BEGIN; SELECT count(*) FROM gaps_default');
publish($node, $db, 'gaps', 10015);
$blocker->query_safe('COMMIT');
$node->safe_psql(
	$db, q{
CREATE TABLE gaps_middle (LIKE gaps INCLUDING ALL);
ALTER TABLE gaps ATTACH PARTITION gaps_middle FOR VALUES FROM (10016) TO (10020)});
publish($node, $db, 'gaps', 12000);
no_workers($node);
$node->append_conf('postgresql.conf', "obix.auto_recover = on\n");
$node->reload;
poll_ok(
	$node, $db,
	q{SELECT failures > 0 AND stranded > 20000 AND last_error = 'stranded rows of outbox "gaps" are in several gaps between partitions' FROM obix.outbox_status WHERE outbox = 'gaps'::regclass},
	'the worker leaves a great move to a call');
$node->wait_for_log(
	qr/maintenance of outbox "gaps" failed: stranded rows of outbox "gaps" are in several gaps.*DETAIL:  \d+ rows would have to be moved\..*HINT:  Call obix\.recover_default when writers can wait for it\./s
);
is(walk($node, $db, 'gaps'), '22015|0|22015', 'everything can be read');
publish($node, $db, 'gaps', 5);
cmp_ok($node->safe_psql($db, q{SELECT obix.recover_default('gaps')}),
	'>', 20000, 'which does it');
is(walk($node, $db, 'gaps'), '22020|0|22020', 'nothing is missing');
poll_ok($node, $db,
	q{SELECT failures = 0 AND stranded = 0 FROM obix.outbox_status WHERE outbox = 'gaps'::regclass},
	'and the worker has nothing to complain of');
$blocker->quit;

unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'no fault in the log');
$node->stop;
done_testing();
