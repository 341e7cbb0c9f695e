
# 200 consumers, three of which fail in different ways: the others hardly lag.
# With nothing to do, all of them cost nothing.  And an acknowledgement costs no
# more where an old snapshot keeps what a great many before it have left behind.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'app';
my $node = new_node(
	'main', conf => q{
autovacuum = off
checkpoint_timeout = '1h'
max_wal_size = '4GB'
bgwriter_lru_maxpages = 0
});

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, $db);
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o');
CREATE TABLE test.counter (consumer integer PRIMARY KEY, events bigint) WITH (fillfactor = 20);
INSERT INTO test.counter SELECT g, 0 FROM generate_series(1, 197) g;

-- a handler for each, as they do not know for whom they are called
DO $$
BEGIN
	FOR i IN 1 .. 197 LOOP
		EXECUTE format('CREATE FUNCTION test.count%s(e obix.event[]) RETURNS void LANGUAGE sql AS
			''UPDATE test.counter SET events = events + cardinality(e) WHERE consumer = %1$s''', i);
		PERFORM obix.create_consumer('good' || i, 'o', batch_handler => 'test.count' || i);
	END LOOP;
END $$});
make_handler($node, $db, 'error',   q{RAISE EXCEPTION 'never';});
make_handler($node, $db, 'slow',    q{PERFORM pg_sleep(60);});
make_handler($node, $db, 'missing', q{NULL;});
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('error', 'o', handler => 'test.error', max_attempts => NULL, backoff => '10 ms', max_backoff => '100 ms');
SELECT obix.create_consumer('slow', 'o', handler => 'test.slow', timeout => '500 ms', max_attempts => NULL, backoff => '10 ms', max_backoff => '100 ms');
SELECT obix.create_consumer('missing', 'o', handler => 'test.missing');
DROP FUNCTION test.missing});

#
# Under load.  A machine that is busy otherwise may hold them up once, so there is
# more than one chance.
#
my ($samples, $worst);
foreach my $chance (1 .. 4)
{
	my $load = start_pgbench(
		$node, $db, 'load',
		'-c 1 -T 8 -R 20',
		{ publish => "SELECT obix.publish('o', '1');\n" });

	$node->poll_query_until($db, "SELECT count(*) >= 40 * $chance FROM o");
	($samples, $worst) = (0, 0);
	while ($load->{handle}->pumpable)
	{
		# NULL: the first event of its lag is younger than this statement
		my $lag = $node->safe_psql($db,
			q{SELECT max(extract(epoch FROM coalesce(lag, '0'))) FROM obix.consumer_status WHERE consumer ~ '^good'}
		);

		$worst = $lag if $lag > $worst;
		$samples++;
		usleep(200_000);
		$load->{handle}->pump_nb;
	}
	finish_pgbench($load);
	note sprintf('worst lag in %d samples: %.3f s', $samples, $worst);
	last if $samples >= 5 && $worst < 1;
}
cmp_ok($samples, '>=', 5, 'lags were looked at while events were published');
cmp_ok($worst,   '<',  1, 'with three that fail, the 197 others lag by less than a second');
consumers_ok(
	$node, $db,
	q{consumer ~ '^good'},
	q{lag_events = 0 AND lag = '0' AND failed = 0},
	'they get everything');
is( $node->safe_psql(
		$db, 'SELECT count(*) FROM test.counter WHERE events <> (SELECT count(*) FROM o)'),
	'0', 'once');
consumer_ok(
	$node, $db, 'error',
	q{state = 'retrying' AND "cursor" = 0 AND last_error = 'never'},
	'one fails all the time');
consumer_ok(
	$node, $db, 'slow',
	q{state = 'retrying' AND "cursor" = 0 AND last_error ~ 'timeout'},
	'one takes too long');
consumer_ok(
	$node, $db, 'missing',
	q{state = 'parked' AND "cursor" = 0 AND last_error ~ 'does not exist'},
	'one has no handler');

# A rush: no consumer waits for another to be done with all of it.
publish($node, $db, 'o', 3000);
consumers_ok(
	$node, $db,
	q{consumer ~ '^good'},
	'lag_events = 0',
	'after a rush all have caught up');
is( $node->safe_psql(
		$db, q{SELECT count(*) FROM test.counter WHERE events <> (SELECT count(*) FROM o)}),
	'0',
	'with everything once');

#
# Idle: the three that fail are put right
#
make_handler($node, $db, $_, 'NULL;') foreach ('error', 'slow', 'missing');
$node->safe_psql($db,
	q{SELECT obix.resume(consumer) FROM obix.consumer WHERE consumer !~ '^good'});
consumers_ok(
	$node, $db, 'true',
	q{lag_events = 0 AND state = 'active'},
	'put right, the three catch up');
ok(no_dispatchers($node), 'no dispatcher is left');
ok(no_workers($node),     'nor a worker');
$node->safe_psql('postgres', 'CHECKPOINT');

my $observe = q{SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot()),
xact_commit, xact_rollback, blks_read, blks_hit FROM pg_stat_database WHERE datname = 'app'};
my ($before, $last) = ('', '-');
foreach (1 .. 60)
{
	$before = $node->safe_psql('postgres', $observe);
	last if $before eq $last;
	$last = $before;
	usleep(1_000_000);
}

# The process ids of obix.
sub obix_processes
{
	my $processes = processes_of($node);

	return [ sort grep { $processes->{$_} =~ /obix/ } keys %$processes ];
}

# How often the launcher went to sleep.
sub launcher_sleeps
{
	my $file = '/proc/' . launcher_pid($node) . '/status';

	return undef unless -r $file;
	return slurp_file($file) =~ /^voluntary_ctxt_switches:\s+(\d+)/m ? $1 : undef;
}

my $processes = obix_processes();
my $slept     = launcher_sleeps();
my $seconds   = 10;
usleep($seconds * 1_000_000);
my $slept_later = launcher_sleeps();
is($node->safe_psql('postgres', $observe),
	$before, "idle for $seconds s with 200 consumers: no WAL, no transaction id, no query");
is_deeply($processes, [ launcher_pid($node) ], 'no process of obix runs but the launcher');
is_deeply(obix_processes(), $processes,        'none came or went');
SKIP:
{
	skip 'no /proc/PID/status here', 1 unless defined $slept;
	cmp_ok($slept_later - $slept, '<=', 2, 'which does not wake up');
}
publish($node, $db, 'o', 1);
consumers_ok($node, $db, 'true', 'lag_events = 0', 'they were not dead');
$node->safe_psql($db, q{SELECT obix.drop_consumer(consumer) FROM obix.consumer});

#
# Acknowledgements under an old snapshot
#
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('acks');
SELECT obix.create_consumer('c', 'acks');
CREATE TABLE test.times (n bigint, ms float8);

-- each in a transaction of its own
CREATE PROCEDURE test.acks(upto bigint, timed boolean) LANGUAGE plpgsql AS $$
DECLARE
	n bigint := (SELECT "cursor" FROM obix.consumer_status WHERE consumer = 'c');
	begun timestamptz;
BEGIN
	COMMIT;
	WHILE n < upto LOOP
		n := n + 1;
		begun := clock_timestamp();
		PERFORM obix.ack('c', n);
		COMMIT;
		IF timed THEN
			INSERT INTO test.times VALUES (n, 1000 * extract(epoch FROM clock_timestamp() - begun));
			COMMIT;
		END IF;
	END LOOP;
END $$});
publish($node, $db, 'acks', 32000);
my $snapshot = $node->background_psql($db);
$snapshot->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM o');
my $updates =
  q{SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = 'obix.consumer_state'::regclass};

sub updates
{
	$node->safe_psql($db, 'SELECT pg_stat_force_next_flush()');
	return split /\|/, $node->safe_psql($db, $updates);
}
my ($updated, $hot) = updates();

# bursts of a hundred, with time between them for pruning by others: none can
$node->safe_psql($db, "CALL test.acks($_ * 100, false)") foreach (1 .. 10);
my ($updated_later, $hot_later) = updates();
note sprintf('%d updates, %d of them HOT', $updated_later - $updated, $hot_later - $hot);
cmp_ok($updated_later - $updated, '>=', 1000,
	'a thousand acknowledgements are as many updates');
cmp_ok(
	$hot_later - $hot,
	'>',
	0.9 * ($updated_later - $updated),
	'most of them HOT, though nothing can be pruned');
# not so many that a sequential scan of the table would begin where the last ended
$node->safe_psql($db, q{CALL test.acks(1200, true)});
$node->safe_psql($db, q{CALL test.acks(31200, false)});
$node->safe_psql($db, q{CALL test.acks(31400, true)});
my ($early, $late) = split /\|/, $node->safe_psql(
	$db, q{
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY ms) FILTER (WHERE n <= 1200),
	percentile_cont(0.5) WITHIN GROUP (ORDER BY ms) FILTER (WHERE n > 31200) FROM test.times});
note sprintf('an acknowledgement took %.3f ms, and %.3f ms after 30,000 more', $early, $late);
cmp_ok($late, '<', 3 * $early,
	'an acknowledgement takes no three times as long after 30,000 others');
$snapshot->query_safe('COMMIT');
$snapshot->quit;
consumer_ok($node, $db, 'c', '"cursor" = 31400 AND delivered = 31400', 'all were counted');

$node->stop;
done_testing();
