
# Sessions that wait, and what happens to them: cancelled, terminated, left by
# their clients, deprived of the worker; and what outlives them: nothing.  No
# wake-up is lost, nobody spins.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "max_connections = 60\nobix.worker_linger = '4 s'\n");
my $waiting =
  q{SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%' AND state = 'active' AND wait_event_type = 'Extension'};

sub wait_until_waiting
{
	my ($count) = @_;

	$node->poll_query_until('postgres', $waiting, $count)
	  or die "there are not $count sessions waiting";
	return;
}

sub waiting_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($count, $name) = @_;

	return ok($node->poll_query_until('postgres', $waiting, $count), $name);
}

# Slots are free, and nothing is in flight.
sub nothing_left
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name) = @_;

	return is(
		$node->safe_psql(
			'app',
			q{SELECT in_flight, head = high_water_mark FROM obix.outbox_status WHERE outbox = 'o'::regclass}
		),
		'0|t',
		$name);
}

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');
$node->safe_psql(
	'app', q{
SELECT obix.create_outbox('o');});
publish($node, 'app', 'o', 1);

#
# Cancelled many times: by the shortest timeout there is, and from outside
#
my $times = $ENV{OBIX_TEST_CANCELS} // 2000;
my $start = time;
my @sessions = map {
	start_psql(
		$node, 'app', "timeout$_",
		"\\set ON_ERROR_STOP off\nSET statement_timeout = '1 ms';\n"
		  . "CALL obix.wait('o', 1, '1 h');\n" x ($times / 4))
} (1 .. 4);
finish_psql($_) foreach (@sessions);
my $cancelled = 0;
# a timeout that strikes as a statement begins is told as a request
$cancelled += () = $_->{stderr} =~ /canceling statement due to (?:statement timeout|user request)/g
  foreach (@sessions);
is($cancelled, $times, "cancelled $times times")
  or diag(grep { !/canceling statement due to/ }
	  map { split /^/, $_->{stderr} } @sessions);
note sprintf('in %.1f s', time - $start);

@sessions = map {
	start_psql($node, 'app', "cancel$_",
		"\\set ON_ERROR_STOP off\n" . "CALL obix.wait('o', 1, '1 h');\n" x 10)
} (1 .. 10);
foreach my $round (1 .. 10)
{
	wait_until_waiting(10);
	$node->safe_psql('postgres',
		q{SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%'});
}
finish_psql($_) foreach (@sessions);
$cancelled = 0;
$cancelled += () = $_->{stderr} =~ /canceling statement due to user request/g foreach (@sessions);
is($cancelled, 100, 'cancelled while they sleep, they wait again');
nothing_left('of all these, nothing is left');

#
# Terminated, and left by their clients
#
my @leaving = map { start_wait($node, 'app', 'o', 1, before => q{SET client_connection_check_interval = '50 ms'}) } (1 .. 5);
my @pids = map { $_->{obix_pid} } @leaving;
foreach my $session (@leaving)
{
	$session->{run}->kill_kill;
}
poll_ok($node, 'postgres',
	'SELECT count(*) = 0 FROM pg_stat_activity WHERE pid IN (' . join(', ', @pids) . ')',
	'clients that are gone are noticed');

my @terminated = map { start_wait($node, 'app', 'o', 1) } (1 .. 20);
my @kept = map { start_wait($node, 'app', 'o', 1) } (1 .. 3);
$node->safe_psql('postgres',
	'SELECT count(pg_terminate_backend(pid)) FROM unnest(ARRAY['
	  . join(', ', map { $_->{obix_pid} } @terminated)
	  . ']) pid');
waiting_ok(3, 'terminated waiters are gone, others wait on');
$_->{run}->finish foreach (@terminated);
publish($node, 'app', 'o', 1);
woken($_, 'who was not terminated is woken') foreach (@kept);
nothing_left('and nothing is left');

#
# Twenty sessions wait while the worker comes and goes; one who waits behind a
# hole is woken by what the next worker does.
#
my @waiters = map { start_wait($node, 'app', 'o', 2) } (1 .. 20);
my $switches = sub
{
	my $sum = 0;

	foreach my $pid (map { $_->{obix_pid} } @waiters)
	{
		$sum += $1
		  if slurp_file("/proc/$pid/status") =~ /^voluntary_ctxt_switches:\s+(\d+)/m;
	}
	return $sum;
};
foreach my $round (1 .. 2)
{
	$node->safe_psql('app', "SELECT obix.alter_outbox('o', premake => 5 + $round)");
	kill 'TERM', worker_pid($node, 'app');
}
is($node->safe_psql('postgres', $waiting), '20', 'workers that are killed do not wake those who wait');
my $before = $switches->();
usleep(500_000);
cmp_ok($switches->() - $before, '<', 20, 'nor do these spin');

my $hole = $node->background_psql('app');
$hole->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1')});
publish($node, 'app', 'o', 1);
is($node->safe_psql('postgres', $waiting), '20', 'behind an open transaction all wait');
$node->safe_psql('postgres',
	q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'obix worker'});
$hole->query_safe('ROLLBACK');
woken($_, 'woken by the placeholder') foreach (@waiters);
$hole->quit;

#
# As many sessions as the server lets in, each of which publishes and waits
#
my $all = start_pgbench(
	$node, 'app', 'all', '-c 54 -j 2 -t 20',
	{ 'both' => "SELECT obix.publish('o', '1');\nCALL obix.wait('o', 3, '1 h');\nBEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n" });
finish_pgbench($all);
is_settled($node, 'app', 'o', 'as many sessions as there can be');
like(walk($node, 'app', 'o'), qr/^(\d+)\|\d+\|\1$/, 'all is contiguous');
nothing_left('and nothing is left');
unlike_log($node, qr/PANIC|TRAP|was terminated by signal/, 'nothing has crashed');

$node->stop;
done_testing();
