
# One transaction of 596,371 events over three partitions: bounded memory,
# complete and in order.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $events = 596371;

# Highest resident size of a process so far in MB, shared buffers included.
sub peak_memory
{
	my ($pid) = @_;

	return undef unless -r "/proc/$pid/status";
	slurp_file("/proc/$pid/status") =~ /^VmHWM:\s+(\d+) kB/m or return undef;
	return $1 / 1024;
}

my $node =
  new_node('main', conf => "max_wal_size = '4GB'\nwork_mem = '4MB'\n");

setup_database($node, 'postgres');
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 200000)});

my $session = $node->background_psql('postgres');
my $pid     = $session->query_safe('SELECT pg_backend_pid()');

# These are some 150 MB in all, far more than is allowed.
my $publish =
  q{SELECT count(obix.publish('o', jsonb_build_object('n', g, 'text', repeat('obix ', 20)), 'type', 'key'))
FROM generate_series(1, COUNT) g};

$session->query_safe("BEGIN; $publish; ROLLBACK" =~ s/COUNT/1000/r);
my $before = peak_memory($pid);

my $start = time;
is($session->query_safe('BEGIN; ' . $publish =~ s/COUNT/$events/r),
	$events, 'published');
note sprintf('published in %.1f s', time - $start);
is($node->safe_psql('postgres', 'SELECT head FROM obix.outbox_status'),
	'0', 'no sequence is taken before the commit');
$start = time;
$session->query_safe('COMMIT');
note sprintf('committed in %.1f s', time - $start);

SKIP:
{
	skip 'no /proc/PID/status here', 1 unless defined $before;
	my $used = peak_memory($pid) - $before;

	note sprintf('memory grew by %.1f MB', $used);
	# shared_buffers (32) + work_mem (4) + a constant
	cmp_ok($used, '<', 80, 'memory is bounded');
}

is(walk($node, 'postgres', 'o'),
	"$events|0|$events", 'delivered whole, without a gap');
is( $node->safe_psql(
		'postgres',
		q{SELECT count(*) FROM o WHERE (payload->>'n')::bigint <> sequence}),
	'0',
	'in the order of publishing');
is( $node->safe_psql(
		'postgres',
		'SELECT DISTINCT tableoid::regclass::text FROM o ORDER BY 1'),
	"o_p0\no_p200000\no_p400000",
	'in three partitions');

# Rolled back, as much leaves nothing, neither sequences nor files.
$session->query_safe("BEGIN; $publish; ROLLBACK" =~ s/COUNT/$events/r);
is($node->safe_psql('postgres', 'SELECT head FROM obix.outbox_status'),
	$events, 'rolled back, it takes no sequence');
is( $node->safe_psql(
		'postgres', 'SELECT count(*) FROM pg_ls_tmpdir()'),
	'0',
	'no temporary file stays behind');

# The same by plain INSERT.
$session->query_safe(
	q{INSERT INTO o (payload) SELECT to_jsonb(g) FROM generate_series(1, 200000) g}
);
is(walk($node, 'postgres', 'o', $events),
	'200000|0|' . ($events + 200000), 'a large plain INSERT is delivered whole');
is( $node->safe_psql(
		'postgres',
		"SELECT count(*) FROM o WHERE sequence > $events AND payload::bigint + $events <> sequence"
	),
	'0',
	'and in order');

$session->quit;
$node->stop;
done_testing();
