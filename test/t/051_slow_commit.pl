
# Commits that take long, because they wait for a standby that does not come: the
# transaction has its sequences, and has flushed its commit, and nobody may see
# or replace its events yet.  However long it takes, it is no reason to give up
# on it; others commit meanwhile; who waits is woken when the events are visible.
#
# That publishers can be in this state at the same time also shows that they take
# no lock that makes commits wait for each other, as NOTIFY does.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', init => { allows_streaming => 1 });
my $db   = 'postgres';

# What must not wait
my $local = 'SET synchronous_commit = local;';

setup_database($node, $db);
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o', partition_width => 100);
SELECT obix.create_consumer('c', 'o');
CREATE TABLE test.business (n integer)});
publish($node, $db, 'o', 1);
settle($node, $db, 'o');

sub standbys
{
	my ($names) = @_;

	$node->safe_psql($db, "ALTER SYSTEM SET synchronous_standby_names = '$names'");
	$node->reload;
	return;
}

sub hanging_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($count, $name) = @_;

	return poll_ok($node, $db,
		"SELECT count(*) = $count FROM pg_stat_activity WHERE wait_event = 'SyncRep'", $name);
}

standbys('nobody');

my $waiter = $node->background_psql($db);
$waiter->query_safe($local);
$waiter->{stdin} .= "CALL obix.wait('o', 1, '1 h');\n\\echo woken\n";
$waiter->{run}->pump_nb;

# Ten who publish, each with rows of its own table, and two who insert
my @publishers;
foreach my $n (1 .. 12)
{
	my $session = $node->background_psql($db, on_error_stop => 0);
	my $statement =
	  $n <= 10
	  ? "SELECT obix.publish('o', '$n') \\g /dev/null"
	  : "INSERT INTO o (payload) VALUES ('$n');";

	$session->{stdin} .= "BEGIN;\nINSERT INTO test.business VALUES ($n);\n$statement\nCOMMIT;\n\\echo committed\n";
	$session->{run}->pump_nb;
	push @publishers, $session;
}
hanging_ok(12, 'twelve publishers are in their commit at the same time');
is( $node->safe_psql(
		$db,
		q{SELECT count(*) FROM pg_locks WHERE locktype = 'object' AND mode = 'AccessExclusiveLock' AND classid = 'pg_database'::regclass}
	),
	'0',
	'none has the lock that a NOTIFY takes');
is($node->safe_psql($db, 'SELECT count(*) FROM pg_locks WHERE NOT granted'),
	'0', 'nobody waits for a lock');

# Traffic beside them, with rolled-back sequences, filling all the time
{
	local $ENV{PGOPTIONS} = '-c synchronous_commit=local';
	finish_pgbench(
		start_pgbench(
			$node, $db,
			'traffic',
			'-c 4 -t 100',
			{
				'publish'  => "SELECT obix.publish('o', '\"traffic\"');\n",
				'rollback' => "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n",
				'fill'     => "SELECT obix.fill_gaps('o');\n",
				'read'     => "SELECT count(*) FROM obix.read('o', 1);\n"
			}));
}
is($node->safe_psql($db, "$local SELECT obix.fill_gaps('o')"),
	'0', 'nothing is filled that they may hold');
is( $node->safe_psql($db, "$local SELECT count(*) FROM o WHERE sequence BETWEEN 2 AND 13"),
	'0', 'neither their events nor placeholders are there');
is($node->safe_psql($db, q{SELECT count(*), max(sequence) FROM obix.read('o')}),
	'1|1', 'readers stop before them');
is( $node->safe_psql($db, "$local SELECT count(*), max(sequence) FROM obix.fetch('c')"),
	'1|1', 'consumers as well');
is( $node->safe_psql(
		$db,
		q{SELECT in_flight, frontier, high_water_mark, frontier_pid IN (SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'), frontier_xact_start < now() FROM obix.outbox_status}
	),
	'12|1|1|t|t',
	'the status names who is in the way, and since when');
is( $node->safe_psql(
		$db,
		q{SELECT wait_event_type FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%' AND state = 'active'}
	),
	'Extension',
	'who waits is not woken before the events can be seen');

# The wait for the standby is given up
standbys('');
foreach my $session (@publishers)
{
	pump_until($session->{run}, $session->{timeout}, \$session->{stdout}, qr/^committed/m)
	  or die 'a publisher does not commit';
}
pass('they commit');
woken($waiter, 'who waits is woken');
is_settled($node, $db, 'o', 'all is settled');
is( $node->safe_psql(
		$db,
		q{SELECT count(*), count(payload), count(DISTINCT payload) FROM obix.read('o', 1, 12)}),
	'12|12|12',
	'their events have their places');
is( $node->safe_psql(
		$db,
		q{SELECT count(*) FROM obix.read('o', 1, 12) r JOIN test.business b ON r.payload = to_jsonb(b.n)}
	),
	'12',
	'and go with their rows');
like(walk($node, $db, 'o'), qr/^(\d+)\|\d+\|\1$/, 'the outbox is contiguous');

#
# One whose client gives up: it has committed, as the warning says
#
standbys('nobody');
my $head      = $node->safe_psql($db, 'SELECT max(sequence) FROM o');
my $cancelled = $node->background_psql($db, on_error_stop => 0);
my $pid       = $cancelled->query_safe('SELECT pg_backend_pid()');
$cancelled->{stdin} .= "SELECT obix.publish('o', '\"cancelled\"');\n\\echo done\n";
$cancelled->{run}->pump_nb;
hanging_ok(1, 'another is in its commit');
$node->safe_psql($db, "SELECT pg_cancel_backend($pid)");
pump_until($cancelled->{run}, $cancelled->{timeout}, \$cancelled->{stdout}, qr/^done/m);
like(
	$cancelled->{stderr},
	qr/WARNING:  canceling wait for synchronous replication/,
	'its client is told that it has committed locally');
is($node->safe_psql($db, "SELECT payload FROM obix.read('o', $head)"),
	'"cancelled"', 'so the event is there');
standbys('');

unlike_log($node, qr/PANIC|TRAP|deadlock/, 'no fault in the log');
$_->quit foreach (@publishers, $cancelled);
$node->stop;
done_testing();
