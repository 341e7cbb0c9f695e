
# Waiting: no wake-up is lost, nothing is held, and it ends when it must.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my ($result, $stdout, $stderr, $start);

setup_database($node, 'postgres');
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox(o) FROM unnest('{ping, pong, o}'::text[]) o});

#
# Two sessions answer each other, each round a race of going to sleep against
# being woken.  A lost wake-up would take the whole timeout, which is longer
# than the round may take.
#
my $rounds = 50000;
$node->safe_psql(
	'postgres', q{
CREATE PROCEDURE test.wait_for(outbox regclass, target bigint) LANGUAGE plpgsql AS $$
DECLARE
	start timestamptz := clock_timestamp();
BEGIN
	CALL obix.wait(outbox, target - 1, '100 s');
	IF clock_timestamp() - start > '50 s' THEN
		RAISE EXCEPTION 'a wake-up was lost at %', target;
	END IF;
	IF obix.high_water_mark(outbox) < target THEN
		RAISE EXCEPTION 'woken before %', target;
	END IF;
END $$;
CREATE PROCEDURE test.serve(n integer) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. n LOOP
		PERFORM obix.publish('ping', '1');
		COMMIT;
		CALL test.wait_for('pong', i);
	END LOOP;
END $$;
CREATE PROCEDURE test.answer(n integer) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. n LOOP
		CALL test.wait_for('ping', i);
		PERFORM obix.publish('pong', '1');
		COMMIT;
	END LOOP;
END $$;});
$start = time;
my @players = map {
	start_psql($node, 'postgres', $_, "CALL test.$_($rounds);\n\\echo done\n")
} ('serve', 'answer');
is_deeply([ map { finish_psql($_) } @players ],
	[ 'done', 'done' ], 'no wake-up is lost by a single waiter')
  or diag map { $_->{stderr} } @players;
note sprintf('%d rounds in %.1f s', 2 * $rounds, time - $start);

# Many waiters, many publishers, holes among them; each reader gets to the end.
my @readers = map {
	start_psql($node, 'postgres', "reader$_",
		"CALL test.consume('reader$_', 'o', 0);\n\\echo done\n")
} (1 .. 12);
$start = time;
finish_pgbench(
	start_pgbench(
		$node,
		'postgres',
		'publishers',
		'-c 6 -j 2 -t 250',
		{
			'publish@4' => "SELECT obix.publish('o', '1');\n",
			'insert@2'  => "INSERT INTO o (payload) VALUES ('1');\n",
			'rollback@1' =>
			  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
		}));
$node->safe_psql('postgres', q{SELECT obix.publish('o', '1', 'stop')});
is_deeply([ map { finish_psql($_) } @readers ],
	[ ('done') x 12 ], 'nor by many')
  or diag map { $_->{stderr} } @readers;
note sprintf('all read in %.1f s', time - $start);
is( $node->safe_psql(
		'postgres',
		q{SELECT count(DISTINCT md5) FROM (SELECT md5(string_agg(sequence || ':' || id, ' ' ORDER BY sequence)) FROM test.delivered GROUP BY reader) d}
	),
	'1',
	'all were given the same');

#
# What a waiting session holds
#
my $head = $node->safe_psql('postgres', 'SELECT max(sequence) FROM o');
foreach my $before (
	q{}, q{BEGIN},
	q{BEGIN; SELECT count(*) FROM obix.read('ping', 0)})
{
	my $waiter = start_wait($node, 'postgres', 'o', $head, before => "$before;");
	my $pid = $waiter->{obix_pid};

	is( $node->safe_psql(
			'postgres',
			"SELECT backend_xmin IS NULL, backend_xid IS NULL FROM pg_stat_activity WHERE pid = $pid"
		),
		't|t',
		"a waiting session holds no snapshot ($before)");
	is( $node->safe_psql(
			'postgres',
			"SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype = 'relation' AND relation = 'o'::regclass"
		),
		'0',
		'and no lock on the outbox');
	publish($node, 'postgres', 'o', 1);
	woken($waiter, 'and is woken');
	$head++;
}
my $do = $node->background_psql('postgres');
my $do_pid = $do->query_safe('SELECT pg_backend_pid()');
$do->{stdin} .= "DO \$\$ BEGIN CALL obix.wait('o', $head, '1 h'); END \$\$;\n\\echo woken\n";
$do->{run}->pump_nb;
poll_ok($node, 'postgres',
	"SELECT wait_event_type = 'Extension' AND backend_xmin IS NULL FROM pg_stat_activity WHERE pid = $do_pid",
	'in a DO block it holds none either');
publish($node, 'postgres', 'o', 1);
woken($do, 'and is woken there');
$head++;

# Where the snapshot belongs to the transaction, waiting is refused.
($result, $stdout, $stderr) = $node->psql('postgres',
	"BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1; CALL obix.wait('o', $head, '1 h')");
like($stderr, qr/ERROR:.*snapshot|ERROR:.*isolation/,
	'refused under a snapshot that cannot be given up');

#
# When it returns
#
$start = time;
$node->safe_psql('postgres', "CALL obix.wait('o', $head - 1, '1 h')");
pass('at once where there is something to read');
$start = time;
$node->safe_psql('postgres', "CALL obix.wait('o', $head, '300 ms')");
cmp_ok(time - $start, '>=', 0.3, 'after the timeout where there is not');
$node->safe_psql('postgres', "CALL obix.wait('o', $head, '0')");
pass('at once with a timeout of zero');

# An unrelated open transaction, even one that has drawn in another outbox,
# delays nothing; a later sequence of an earlier open one is no reason to wake.
my $open = $node->background_psql('postgres');
$open->query_safe(
	q{BEGIN; CREATE TEMPORARY TABLE t (a int); INSERT INTO ping (payload) VALUES ('1')}
);
my $waiter = start_wait($node, 'postgres', 'o', $head);
publish($node, 'postgres', 'o', 1);
woken($waiter, 'an unrelated transaction does not delay delivery');
$open->query_safe('ROLLBACK');
$head++;
$open->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1')});
$waiter = start_wait($node, 'postgres', 'o', $head);
publish($node, 'postgres', 'o', 1);
is( $node->safe_psql(
		'postgres',
		"SELECT wait_event_type, wait_event FROM pg_stat_activity WHERE pid = $waiter->{obix_pid}"
	),
	'Extension|' . ($node->pg_version->major >= 17 ? 'ObixWait' : 'Extension'),
	'it waits on while an earlier event is open');
$open->query_safe('COMMIT');
woken($waiter, 'and is woken by its commit');
$open->quit;
$head += 2;

#
# Cancelled and terminated: nothing stays behind
#
my $script = "SET statement_timeout = '1 ms';\n"
  . "CALL obix.wait('o', $head, '1 h');\n" x 500;
($result, $stdout, $stderr) =
  $node->psql('postgres', $script, on_error_stop => 0);
my @cancelled = $stderr =~ /canceling statement due to statement timeout/g;
is(scalar @cancelled, 500, 'cancelled 500 times');

foreach my $round (1 .. 5)
{
	my $waiters = start_pgbench($node, 'postgres', "waiters$round", '-c 40 -j 2 -t 1',
		{ 'wait' => "CALL obix.wait('o', $head, '1 h');\n" });

	$node->poll_query_until('postgres',
		q{SELECT count(*) = 40 FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%' AND wait_event_type = 'Extension'}
	) or die 'the clients do not wait';
	$node->safe_psql('postgres',
		q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%'}
	);
	finish_pgbench($waiters, may_fail => 1);
}
poll_ok($node, 'postgres',
	q{SELECT count(*) = 0 FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%'},
	'200 waiting sessions are terminated');
is( $node->safe_psql(
		'postgres',
		q{SELECT in_flight, head = high_water_mark FROM obix.outbox_status WHERE outbox = 'o'::regclass}
	),
	'0|t',
	'no slot stays behind');
$waiter = start_wait($node, 'postgres', 'o', $head);
publish($node, 'postgres', 'o', 1);
woken($waiter, 'and the next one is woken');
unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'no fault in the log');

# A cancelled publisher, with sequences drawn, leaves none in flight.
$node->psql('postgres',
	q{SET statement_timeout = '50 ms'; INSERT INTO o (payload) SELECT to_jsonb(g) FROM generate_series(1, 100000000) g}
);
is_settled($node, 'postgres', 'o', 'nor does a cancelled publisher leave one');

$node->stop;
done_testing();
