
# kill -9 of a dispatcher, fifty times, while it calls handlers.  The server
# restarts each time; what a counter projection says is how many events there
# are: the effect of a handler and the cursor are one transaction.
#
# The moments: in the middle of a batch (it waits for a lock that we hold), in
# the middle of an event that is handled alone after that, and any time.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $kills = 50;
my $db    = 'postgres';
my $node  = new_node(
	'main', conf => q{
restart_after_crash = on
max_connections = 20
shared_buffers = '4MB'
max_wal_size = '1GB'
wal_writer_delay = '10s'
autovacuum = off
});

setup_database($node, $db);
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o');
CREATE TABLE test.counter (consumer text PRIMARY KEY, events bigint, total bigint);
INSERT INTO test.counter VALUES ('batch', 0, 0), ('single', 0, 0), ('available', 0, 0);
CREATE TABLE test.applied (consumer text, sequence bigint);

CREATE FUNCTION test.count(consumer text, e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE test.counter c SET events = c.events + cardinality(e), total = c.total + (SELECT sum(x.payload::bigint) FROM unnest(e) x)
	WHERE c.consumer = count.consumer;
	-- half-way: the test may hold this
	PERFORM pg_advisory_xact_lock_shared(1);
	INSERT INTO test.applied SELECT count.consumer, x.sequence FROM unnest(e) x;
END $$});
make_handler($node, $db, 'batch_one', q{PERFORM test.count('batch', ARRAY[e]);});
make_handler($node, $db, 'batch',     q{PERFORM test.count('batch', e);}, kind => 'batch');
make_handler($node, $db, 'single',    q{PERFORM test.count('single', ARRAY[e]);});
make_handler($node, $db, 'available', q{PERFORM test.count('available', e);}, kind => 'batch');
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('batch', 'o', handler => 'test.batch_one', batch_handler => 'test.batch',
	batch_size => 20, max_attempts => NULL, backoff => '1 ms', max_backoff => '10 ms');
SELECT obix.create_consumer('single', 'o', handler => 'test.single',
	batch_size => 7, max_attempts => NULL, backoff => '1 ms', max_backoff => '10 ms');
SELECT obix.create_consumer('available', 'o', batch_handler => 'test.available', ordering => 'available',
	batch_size => 15, max_attempts => NULL, backoff => '1 ms', max_backoff => '10 ms')});

# A statement in a session that may be ended by the crash, until it succeeds.
sub insist
{
	my ($statement) = @_;

	foreach (1 .. 1000 * $PostgreSQL::Test::Utils::timeout_default)
	{
		# one that is refused may be gone before it is told the statement
		my ($result, $stdout) = eval { $node->psql($db, $statement) };

		return $stdout if defined $result && $result == 0;
		usleep(20_000);
	}
	die "the server does not come back";
}

# Wait until the server has restarted so many times.
sub await_restart
{
	my ($times) = @_;

	foreach (1 .. 1000 * $PostgreSQL::Test::Utils::timeout_default)
	{
		last if log_count($node, qr/all server processes terminated; reinitializing/) >= $times;
		usleep(5000);
	}
	insist('SELECT 1');
	return;
}

sub dispatchers
{
	my $processes = processes_of($node);

	return grep { $processes->{$_} =~ /obix dispatcher/ } keys %$processes;
}

my ($published, $total, $killed, %moments) = (0, 0, 0);
my $postmaster = $node->{_pid};
srand(42);
while ($killed < $kills)
{
	my $moment = ('batch', 'alone', 'any')[ $killed % 3 ];
	my $holder;
	my @pids;

	if ($moment ne 'any')
	{
		# the last crash may be still to come
		foreach (1 .. 100)
		{
			$holder = eval {
				my $session = $node->background_psql($db, on_error_stop => 0);

				$session->query('SELECT pg_advisory_lock(1)');
				$session;
			};
			last if $holder;
			usleep(50_000);
		}
		$holder or die 'no session holds the lock';
	}
	$published = insist(
		q{SELECT count(obix.publish('o', to_jsonb(g))) FROM generate_series(1, 60) g;
SELECT count(*) FROM o WHERE payload IS NOT NULL}) =~ s/.*\n//sr;

	if ($moment eq 'any')
	{
		usleep(int(rand(60_000)));
		foreach (1 .. 50)
		{
			@pids = dispatchers() and last;
			usleep(1000);
		}
	}
	else
	{
		# "alone" after "batch": what was begun and not finished goes one by one
		@pids = split /\n/,
		  insist(
			q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event = 'advisory'}
		  );
		foreach (1 .. 1000)
		{
			last if @pids;
			usleep(5000);
			@pids = split /\n/,
			  insist(
				q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event = 'advisory'}
			  );
		}
	}
	if (@pids && kill('KILL', $pids[ int(rand(@pids)) ]))
	{
		$killed++;
		$moments{$moment}++;
		await_restart($killed);
	}
	if ($holder)
	{
		eval { $holder->quit };
	}
}
note join ', ', map { "$_: $moments{$_}" } sort keys %moments;

foreach my $consumer ('batch', 'single', 'available')
{
	consumer_ok(
		$node, $db, $consumer,
		"lag_events = 0 AND delivered = $published AND late_ranges = 0",
		"$consumer: after $kills kills everything is delivered");
}
is( $node->safe_psql(
		$db,
		q{SELECT count(*), count(DISTINCT events), min(events) FROM test.counter WHERE total = (SELECT sum(payload::bigint) FROM o)}
	),
	"3|1|$published",
	'the counters equal the number of events');
is( $node->safe_psql(
		$db,
		q{SELECT consumer, count(*), count(DISTINCT sequence) FROM test.applied GROUP BY 1 ORDER BY 1}
	),
	join("\n", map { "$_|$published|$published" } ('available', 'batch', 'single')),
	'each event was applied once');
is( $node->safe_psql(
		$db,
		q{SELECT sum(dead_lettered), count(DISTINCT state), min(state) FROM obix.consumer_status}
	),
	'0|1|active',
	'none was given up');
is($node->{_pid}, $postmaster, 'the postmaster is the same');
cmp_ok(log_count($node, qr/all server processes terminated; reinitializing/),
	'>=', $kills, 'and restarted the server each time');

$node->stop;
done_testing();
