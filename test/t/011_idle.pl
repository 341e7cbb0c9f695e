
# Idle costs nothing: with five outboxes and sessions waiting on them, nothing
# is written, no transaction runs, and nobody wakes up.  It is watched from
# another database.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $seconds = 20;
my $node    = new_node(
	'main',
	conf => q{
autovacuum = off
checkpoint_timeout = '1h'
bgwriter_lru_maxpages = 0
});

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');
foreach my $outbox (1 .. 5)
{
	$node->safe_psql('app',
		"SELECT obix.create_outbox('o$outbox', partition_width => 10)");
	publish($node, 'app', "o$outbox", 25);
	roll_back_inserts($node, 'app', "o$outbox", 2);
	settle($node, 'app', "o$outbox");
}
my @waiters = map { start_wait($node, 'app', "o$_", 27) } (1 .. 5);
ok(no_workers($node), 'the worker leaves');
$node->safe_psql('postgres', 'CHECKPOINT');

my $observe = q{SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot()),
xact_commit, xact_rollback, blks_read, blks_hit FROM pg_stat_database WHERE datname = 'app'};

# How often a process went to sleep: each time it had been awake.
sub wakeups
{
	my ($pid) = @_;

	return undef unless -r "/proc/$pid/status";
	slurp_file("/proc/$pid/status") =~ /^voluntary_ctxt_switches:\s+(\d+)/m
	  or return undef;
	return $1;
}

# Sessions report their statistics some time after they have ended: wait until
# nothing changes for a second.
my ($before, $last) = ('', '-');
foreach (1 .. 60)
{
	$before = $node->safe_psql('postgres', $observe);
	last if $before eq $last;
	$last = $before;
	usleep(1_000_000);
}
my %wakeups =
  map { $_ => wakeups($_) } launcher_pid($node), map { $_->{obix_pid} } @waiters;

usleep($seconds * 1_000_000);
my %later = map { $_ => wakeups($_) } keys %wakeups;
is($node->safe_psql('postgres', $observe),
	$before, "idle for $seconds s: no WAL, no transaction id, no query");
is( $node->safe_psql(
		'postgres',
		q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'app' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)}
	),
	'0',
	'nobody holds a snapshot');
SKIP:
{
	skip 'no /proc/PID/status here', 1 if grep { !defined } values %wakeups;

	is(scalar(grep { $later{$_} > $wakeups{$_} + 2 } keys %wakeups),
		0, 'neither the launcher nor a waiting session wakes up');
}

# They were not dead.
publish($node, 'app', "o$_", 1) foreach (1 .. 5);
woken($_, 'a waiting session is woken') foreach (@waiters);

$node->stop;
done_testing();
