
# Dispatchers make way and stop when they are told to, also in the middle of a
# handler: DROP DATABASE, SIGTERM, pg_cancel_backend, fast stop.  They serve
# interrupts while they sleep and while a handler runs; settings that are meant
# for people do not hit them; they hold no snapshot while they are idle.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "obix.worker_linger = '4 s'\n");

sub setup_consumers
{
	my ($db) = @_;

	setup_database($node, $db);
	$node->safe_psql(
		$db, q{
SELECT obix.create_outbox('o');
CREATE TABLE test.applied (consumer text, sequence bigint)});
	make_handler($node, $db, 'quick',
		q{INSERT INTO test.applied VALUES ('quick', e.sequence);});
	make_handler(
		$node, $db, 'long', q{
INSERT INTO test.applied VALUES ('long', e.sequence);
IF e.payload = '"long"' THEN PERFORM pg_sleep(600); END IF;});
	$node->safe_psql(
		$db, q{
SELECT obix.create_consumer('quick', 'o', handler => 'test.quick');
SELECT obix.create_consumer('long', 'o', handler => 'test.long', timeout => '1 h', max_attempts => 2, backoff => '10 ms')}
	);
	return;
}

# Wait until a handler sleeps; returns the process that calls it.
sub sleeper
{
	my ($db) = @_;
	my $query =
	  "FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND datname = '$db' AND wait_event = 'PgSleep'";

	$node->poll_query_until('postgres', "SELECT count(*) = 1 $query")
	  or die 'no handler sleeps';
	return $node->safe_psql('postgres', "SELECT pid $query");
}

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_consumers('app');

#
# In a long handler
#
publish($node, 'app', 'o', 1);
consumers_ok($node, 'app', 'true', 'lag_events = 0', 'consumers are served');
$node->safe_psql('app', q{SELECT obix.publish('o', '"long"')});
my $pid = sleeper('app');
consumer_ok($node, 'app', 'quick', 'lag_events = 0', 'others do not wait for a long handler');
is( $node->safe_psql(
		'postgres',
		"SELECT backend_xmin IS NOT NULL, xact_start IS NOT NULL, state FROM pg_stat_activity WHERE pid = $pid"
	),
	't|t|active',
	'it shows as itself');
my $offset = log_offset($node);
$node->safe_psql('postgres', "SELECT pg_log_backend_memory_contexts($pid)");
$node->wait_for_log(qr/logging memory contexts of PID $pid/, $offset);
pass('it serves interrupts');
my $start = time;
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('postgres', 'DROP DATABASE other');
cmp_ok(time - $start, '<', 5 * slowness($node), 'other databases can be dropped meanwhile');

# The maintenance of the outbox goes on as well.
roll_back_inserts($node, 'app', 'o', 3);
is_settled($node, 'app', 'o', 'and holes be filled');

$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
consumer_ok(
	$node, 'app', 'long',
	q{failed = 1 AND attempts = 2 OR state = 'stopped'},
	'cancelled, the attempt has failed');
kill 'TERM', sleeper('app');
consumer_ok(
	$node, 'app', 'long',
	q{state = 'stopped' AND attempts = 2 AND last_error ~ 'process ended'},
	'terminated, the next as well');
publish($node, 'app', 'o', 1);
consumer_ok($node, 'app', 'quick', 'lag_events = 0', 'others go on');

#
# Idle
#
my ($idle) = dispatcher_pids($node, 'app');
ok($idle, 'a dispatcher lingers');
is( $node->safe_psql(
		'postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND (backend_xmin IS NOT NULL OR xact_start IS NOT NULL OR backend_xid IS NOT NULL)"
	),
	'0',
	'and holds no snapshot');
kill 'TERM', dispatcher_pids($node, 'app');
poll_ok(
	$node, 'postgres',
	"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $idle",
	'it can be terminated');
publish($node, 'app', 'o', 1);
consumer_ok(
	$node, 'app', 'quick',
	'lag_events = 0',
	'another comes when there is something to do');
$node->safe_psql('postgres', "SELECT pg_cancel_backend($_)")
  foreach (map { ($_) x 5 } dispatcher_pids($node, 'app'));
publish($node, 'app', 'o', 1);
consumer_ok($node, 'app', 'quick', 'lag_events = 0', 'cancelled, it goes on');

# DROP DATABASE with consumers that were served just now.
my $longest = 0;
foreach my $n (1 .. 2)
{
	$node->safe_psql('postgres', "CREATE DATABASE db$n");
	setup_consumers("db$n");
	publish($node, "db$n", 'o', 3);
	consumers_ok($node, "db$n", 'true', 'lag_events = 0', "db$n: consumers have been served");
	$start = time;
	$node->safe_psql('postgres', "DROP DATABASE db$n");
	$longest = time - $start if time - $start > $longest;
}
note sprintf('DROP DATABASE took up to %.1f s', $longest);
pass('databases can be dropped');

# With FORCE, in the middle of a handler.
$node->safe_psql('postgres', 'CREATE DATABASE db4');
setup_consumers('db4');
$node->safe_psql('db4', q{SELECT obix.publish('o', '"long"')});
sleeper('db4');
$start = time;
$node->safe_psql('postgres', 'DROP DATABASE db4 WITH (FORCE)');
cmp_ok(time - $start, '<', 5 * slowness($node), 'with FORCE also while a handler runs');

# And DROP EXTENSION, and a consumer that is dropped while its handler runs.
$node->safe_psql('app',
	q{SELECT obix.seek('long', (SELECT max(sequence) FROM o)); SELECT obix.publish('o', '"long"')}
);
$pid = sleeper('app');
my $drop = start_psql($node, 'app', 'drop', q{SELECT obix.drop_consumer('long')});
poll_ok(
	$node,
	'postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query ~ 'drop_consumer' AND wait_event_type = 'Lock'},
	'dropping a consumer waits for its handler');
kill 'TERM', $pid;
finish_psql($drop);
is($drop->{handle}->full_result(0), 0, 'and is done when that ends');
is($node->safe_psql('app', q{SELECT count(*) FROM obix.consumer WHERE consumer = 'long'}),
	'0', 'the consumer is gone');
is( $node->safe_psql(
		'app',
		q{SELECT count(*) FROM obix.consumer_state WHERE id NOT IN (SELECT id FROM obix.consumer)}
	),
	'0',
	'with its state');
make_handler($node, 'app', 'long', q{PERFORM pg_sleep(600);});
$node->safe_psql('app',
	q{SELECT obix.create_consumer('long', 'o', handler => 'test.long', timeout => '1 h', backoff => '10 ms', start_after => (SELECT max(sequence) FROM o))}
);

#
# Settings meant for people
#
my @settings = (
	'default_transaction_read_only = on',
	q{default_transaction_isolation = 'serializable'},
	q{statement_timeout = '1 ms'},
	q{lock_timeout = '1 ms'},
	q{idle_session_timeout = '1 ms'},
	q{idle_in_transaction_session_timeout = '1 ms'},
	q{search_path = 'nowhere'},
	q{session_replication_role = 'replica'},
	q{synchronous_commit = off},
	q{row_security = off});
$node->safe_psql('postgres', 'CREATE DATABASE people');
setup_consumers('people');
make_handler(
	$node, 'people', 'slow', q{
PERFORM pg_sleep(0.05);
INSERT INTO test.applied VALUES (current_setting('transaction_isolation') || ', ' || current_setting('transaction_read_only') || ', '
	|| current_setting('statement_timeout') || ', ' || current_setting('session_replication_role') || ', ' || current_setting('search_path'), e.sequence);}
);
$node->safe_psql('people', q{SELECT obix.create_consumer('slow', 'o', handler => 'test.slow')});
kill 'TERM', dispatcher_pids($node, 'people');
$node->safe_psql('postgres', join '', map { "ALTER DATABASE people SET $_;" } @settings);
{
	local $ENV{PGOPTIONS} =
	  '-c default_transaction_read_only=off -c default_transaction_isolation=read\ committed -c statement_timeout=0 -c lock_timeout=0 -c idle_session_timeout=0 -c idle_in_transaction_session_timeout=0 -c search_path=public -c session_replication_role=origin';
	publish($node, 'people', 'o', 20);
	consumers_ok(
		$node, 'people',
		q{consumer IN ('slow', 'quick')},
		'lag_events = 0 AND failed = 0',
		'handlers run under settings meant for people');
	is( $node->safe_psql(
			'people',
			q{SELECT DISTINCT consumer FROM test.applied WHERE consumer <> 'quick' AND consumer <> 'long'}
		),
		'read committed, off, 0, origin, "$user", public',
		'with values of their own');
}

#
# Fast stop, with everything in motion
#
$node->safe_psql('app', q{SELECT obix.publish('o', '"long"')});
sleeper('app');
my $load = start_pgbench($node, 'app', 'load', '-c 2 -T 60',
	{ publish => "SELECT obix.publish('o', '1');\n" });
$node->poll_query_until('app', 'SELECT max(sequence) > 100 FROM o');
my $limit = 10 * slowness($node);
my $stop  = time;
$node->stop('fast');
note sprintf('stopped in %.1f s', time - $stop);
cmp_ok(time - $stop, '<', $limit, 'a fast stop is fast, whatever a handler does');
finish_pgbench($load, may_fail => 1);
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 0');
$node->start;
make_handler($node, 'app', 'long', q{INSERT INTO test.applied VALUES ('long', e.sequence);});
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 2');
$node->reload;
consumers_ok(
	$node, 'app', 'true',
	q{lag_events = 0 AND state = 'active'},
	'after it everything is delivered');
is( $node->safe_psql(
		'app',
		q{SELECT count(*) - count(DISTINCT sequence), count(*) - (SELECT count(*) FROM o WHERE payload IS NOT NULL) FROM test.applied WHERE consumer = 'quick'}
	),
	'0|0', 'once');
unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'nothing has crashed');
$node->stop;

#
# More databases than there are slots for background workers
#
my $small =
  new_node('small', conf => "max_worker_processes = 4\nobix.worker_linger = '100 ms'\n");
my @databases = map { "db$_" } (1 .. 6);

foreach my $db (@databases)
{
	$small->safe_psql('postgres', "CREATE DATABASE $db");
	setup_database($small, $db);
	$small->safe_psql($db,
		q{SELECT obix.create_outbox('o'); CREATE TABLE test.applied (sequence bigint)});
	make_handler($small, $db, 'h',
		q{INSERT INTO test.applied VALUES (e.sequence); PERFORM pg_sleep(0.002);});
	$small->safe_psql($db,
		q{SELECT obix.create_consumer('c' || g, 'o', handler => 'test.h') FROM generate_series(1, 3) g}
	);
}
$small->restart;
publish($small, $_, 'o', 100) foreach (@databases);
consumers_ok(
	$small, $_, 'true',
	'lag_events = 0 AND delivered = 100',
	"$_: consumers are served, though slots are few") foreach (@databases);
is($small->safe_psql($_, 'SELECT count(*), count(DISTINCT sequence) FROM test.applied'),
	'300|100', "$_: with everything once")
  foreach (@databases);
ok(no_dispatchers($small), 'then no dispatcher is left');
cmp_ok(log_count($small, qr/could not start a worker/),
	'<', 10, 'that slots are few is not logged all the time');
$small->stop;
done_testing();
