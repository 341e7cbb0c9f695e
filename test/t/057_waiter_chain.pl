
# Whoever is woken wakes the next.  The chain does not break where one of those
# who wait is terminated or cancelled before it could, and does not wait for one
# that is held up.  Turns are taken by those who wait for them.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "max_connections = 60\n");
my $head = 0;

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');
$node->safe_psql('app', q{SELECT obix.create_outbox('o')});

# Publish an event, so that waiters have something to be woken for.
sub move
{
	publish($node, 'app', 'o', 1);
	$head++;
	return;
}

sub start_waiters
{
	my ($count) = @_;

	return map { start_wait($node, 'app', 'o', $head) } (1 .. $count);
}

move();

#
# Many
#
my @sessions = start_waiters(30);
move();
woken($_, 'woken by one of the others') foreach (@sessions);

#
# The one that is woken first ends before it can wake the next: the signal finds
# it stopped, and is the first thing that it deals with
#
foreach my $function ('pg_terminate_backend', 'pg_cancel_backend')
{
	my ($first, @others) = start_waiters(3);

	kill 'STOP', $first->{obix_pid};
	move();
	$node->safe_psql('postgres', "SELECT $function($first->{obix_pid})");
	kill 'CONT', $first->{obix_pid};
	woken($_, "woken although the one before was ended by $function") foreach (@others);
	if ($function eq 'pg_cancel_backend')
	{
		woken($first, 'and that one has returned');
		like($first->{stderr}, qr/canceling statement due to user request/, 'with an error');
	}
	else
	{
		$first->{run}->kill_kill;
	}
}

#
# The one that is woken first is stopped: further events begin another chain
#
my ($first, @others) = start_waiters(3);
kill 'STOP', $first->{obix_pid};
my $waiting = q{SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'CALL obix.wait%' AND pid IN (}
  . join(', ', map { $_->{obix_pid} } @others) . ')';
for (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	move();
	last if $node->safe_psql('postgres', $waiting) eq '0';
}
woken($_, 'woken although the one before is stopped') foreach (@others);
kill 'CONT', $first->{obix_pid};
woken($first, 'and that one is woken when it goes on');

#
# Who looks again and again, and does not wait, takes no turns that others wait for
#
finish_pgbench(
	start_pgbench(
		$node, 'app', 'looking', '-c 20 -t 2000',
		{ look => "CALL obix.wait('o', 0, '0');\n" }));
my $patient = start_wait($node, 'app', 'o', $head);
my $still_waits = "SELECT state = 'active' FROM pg_stat_activity WHERE pid = $patient->{obix_pid}";
my $waits = 't';
for (1 .. 20)
{
	move();
	$waits = $node->safe_psql('app', $still_waits);
	last if $waits eq 'f';
}
is($waits, 'f', 'who waits is not put to sleep by sessions that do not wait');
$patient->{run}->kill_kill;

#
# The first in the queue has joined it, and is held up while it looks
#
$node->safe_psql('app', q{SELECT obix.create_consumer('c', 'o')});
my $looking = $node->background_psql('app', on_error_stop => 0);
my $pid = $looking->query_safe('SELECT pg_backend_pid()');
$looking->query_safe("SELECT max(sequence) FROM obix.fetch('c', 1000)");
$looking->query_safe("SELECT obix.ack('c', $head); SELECT count(*) FROM obix.fetch('c')");
$looking->query_safe("SELECT obix.pause('c')");
$looking->{stdin} .= "CALL obix.wait_for('c', '1 h');\n\\echo woken\n";
$looking->{run}->pump_nb;
my $held_up = "SELECT wait_event_type = '%s' AND query LIKE 'CALL obix.wait_for%%' FROM pg_stat_activity WHERE pid = $pid";
$node->poll_query_until('postgres', sprintf($held_up, 'Extension'))
  or die 'session does not wait';

my $locker = $node->background_psql('app');
$locker->query_safe('BEGIN; LOCK TABLE obix.consumer IN ACCESS EXCLUSIVE MODE');
move();
poll_ok($node, 'postgres', sprintf($held_up, 'Lock'), 'somebody looks, and is held up');
my @behind = start_waiters(2);
move();
woken($_, 'woken although the one before is held up') foreach (@behind);
$locker->query_safe('COMMIT');
$locker->quit;
$node->safe_psql('app', q{SELECT obix.resume('c')});
woken($looking, 'that one finds something in the end');

done_testing();
