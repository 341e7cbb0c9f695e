
# obix.notify: the worker, never a publisher, sends NOTIFY, one for a wave.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');

setup_database($node, 'postgres');
$node->safe_psql('postgres',
	q{CREATE SCHEMA "App"; SELECT obix.create_outbox('o'); SELECT obix.create_outbox('"App"."Other"')}
);

my $listener = $node->background_psql('postgres');
$listener->query_safe('LISTEN obix');

# What has arrived since the last call, as [ name, pid ]; psql prints what it
# has received when a query ends.
sub received
{
	my $output = $listener->query('SELECT 1');
	my @found;

	while ($output =~ /notification "obix" with payload "(.*)" received from server process with PID (\d+)/g)
	{
		push @found, [ $1, $2 ];
	}
	return @found;
}

# Wait for the first, and return all that have come by then.
sub wait_for_notification
{
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		my @found = received();

		return @found if @found;
		usleep(100_000);
	}
	die 'no notification came';
}

# Off, as it is by default: what would come, would come before this one's.
publish($node, 'postgres', 'o', 1);
no_workers($node);
$node->safe_psql('postgres', 'ALTER SYSTEM SET obix.notify = on');
$node->reload;
$node->poll_query_until('postgres', 'SHOW obix.notify', 'on');
publish($node, 'postgres', '"App"."Other"', 1);
my @found = wait_for_notification();
is(scalar @found, 1, 'one notification for one commit');
like($found[0][0], qr/^"App"\."Other"$/, 'it bears the name of the outbox');
is( $node->safe_psql(
		'postgres',
		"SELECT backend_type FROM pg_stat_activity WHERE pid = $found[0][1]"),
	'obix worker',
	'it comes from the worker');

# Plain INSERT, and events of a prepared transaction at its commit.
$node->safe_psql('postgres', q{INSERT INTO o (payload) VALUES ('1')});
@found = wait_for_notification();
like($found[0][0], qr/^(public\.)?o$/, 'a plain INSERT is notified');
$node->safe_psql('postgres',
	q{BEGIN; SELECT obix.publish('o', '1'); PREPARE TRANSACTION 'p'});
pass('PREPARE TRANSACTION works with obix.notify');
$node->safe_psql('postgres', q{COMMIT PREPARED 'p'});
@found = wait_for_notification();
ok(scalar @found, 'COMMIT PREPARED is notified');

# A wave: hold the worker, commit a hundred times, let it go.
$node->poll_query_until('postgres',
	q{SELECT wait_event IS NOT NULL AND state IS DISTINCT FROM 'active' FROM pg_stat_activity WHERE backend_type = 'obix worker'}
);
my $pid = worker_pid($node, 'postgres');
received();
kill 'STOP', $pid;
finish_pgbench(
	start_pgbench($node, 'postgres', 'wave', '-c 2 -t 50',
		{ 'publish' => "SELECT obix.publish('o', '1');\n" }));
kill 'CONT', $pid;
@found = wait_for_notification();
publish($node, 'postgres', '"App"."Other"', 1);
my $waves = 0;
while (1)
{
	$waves += grep { $_->[0] !~ /App/ } @found;
	last if grep { $_->[0] =~ /App/ } @found;
	@found = wait_for_notification();
}
cmp_ok($waves, '<=', 2, 'a hundred commits are one wave');

# Off again.
$node->safe_psql('postgres', 'ALTER SYSTEM RESET obix.notify');
$node->reload;
ok(no_workers($node), 'switched off, the worker leaves');

$listener->quit;
$node->stop;
done_testing();
