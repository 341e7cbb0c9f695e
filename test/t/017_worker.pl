
# The workers: bad outboxes, many databases, signals, settings meant for
# people, stopping.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Fewer slots for background workers than there will be databases with work.
my $node = new_node('main', conf => "max_worker_processes = 8\nobix.worker_linger = '100 ms'\n");

setup_database($node, 'postgres');

#
# A bad outbox does not stop the others
#
$node->safe_psql(
	'postgres', q{
CREATE ROLE regress_obix_owner;
CREATE SCHEMA bad;
GRANT ALL ON SCHEMA bad TO regress_obix_owner;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('bad.o', partition_width => 10, premake => 1);
RESET ROLE;
SELECT obix.create_outbox('good', partition_width => 10, premake => 1);});
$node->poll_query_until('postgres',
	q{SELECT count(*) = 2 FROM pg_class WHERE relname IN ('o_p10', 'good_p10')});
no_workers($node);
my $offset = log_offset($node);
$node->safe_psql('postgres',
	'REVOKE CREATE ON SCHEMA bad FROM regress_obix_owner');
foreach (1 .. 5)
{
	publish($node, 'postgres', 'bad.o', 10);
	publish($node, 'postgres', 'good',  10);
}
poll_ok(
	$node, 'postgres',
	q{SELECT failures >= 3 AND last_error ~ 'permission denied' AND retry_at IS NOT NULL FROM obix.outbox_status WHERE outbox = 'bad.o'::regclass},
	'the status tells what is wrong with the bad one');
poll_ok(
	$node, 'postgres',
	q{SELECT runway >= 10 AND stranded = 0 AND failures = 0 FROM obix.outbox_status WHERE outbox = 'good'::regclass},
	'the good one is served');
$node->wait_for_log(
	qr/maintenance of outbox "o" failed: permission denied for schema bad.*HINT:  It is tried again; see obix\.outbox_status\./s,
	$offset);
is(log_count($node, qr/permission denied/, $offset), 1, 'it is logged once');
roll_back_inserts($node, 'postgres', $_, 1) foreach ('bad.o', 'good');
poll_ok($node, 'postgres',
	'SELECT (SELECT count(*) FROM bad.o) = 51 AND (SELECT count(*) FROM good) = 51',
	'holes are filled in both');
$node->safe_psql('postgres',
	'GRANT CREATE ON SCHEMA bad TO regress_obix_owner');
poll_ok(
	$node, 'postgres',
	q{SELECT runway >= 10 AND stranded = 0 AND failures = 0 AND last_error IS NULL FROM obix.outbox_status WHERE outbox = 'bad.o'::regclass},
	'put right, the bad one recovers by itself');
is( $node->safe_psql(
		'postgres',
		q{SELECT string_agg(DISTINCT r.rolname, ' ') FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'bad'}
	),
	'regress_obix_owner',
	'and its owner owns what is made');

#
# Signals
#
my $launcher = launcher_pid($node);
ok(defined $launcher, 'a launcher runs');
$node->safe_psql('postgres', q{ALTER SYSTEM SET obix.worker_linger = '4 s'});
$node->reload;
roll_back_inserts($node, 'postgres', 'good', 1);
my $worker = worker_pid($node, 'postgres');
kill 'TERM', $worker;
poll_ok($node, 'postgres',
	"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $worker",
	'the worker can be terminated');
roll_back_inserts($node, 'postgres', 'good', 1);
poll_ok($node, 'postgres', 'SELECT count(*) = 53 FROM good',
	'another comes when there is work');

kill 'TERM', $launcher;
foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	my $pid = launcher_pid($node);
	last if defined $pid && $pid != $launcher;
	usleep(100_000);
}
my $new_launcher = launcher_pid($node) // 0;
ok($new_launcher && $new_launcher != $launcher, 'the launcher is started again');
no_workers($node);
roll_back_inserts($node, 'postgres', 'good', 1);
poll_ok($node, 'postgres', 'SELECT count(*) = 54 FROM good',
	'and starts workers');

# Cancelling a worker harms nothing.
$worker = worker_pid($node, 'postgres');
$node->safe_psql('postgres',
	"SELECT pg_cancel_backend($worker) FROM generate_series(1, 20)");
roll_back_inserts($node, 'postgres', 'good', 1);
poll_ok($node, 'postgres', 'SELECT count(*) = 55 FROM good',
	'a cancelled worker goes on');
$worker = worker_pid($node, 'postgres');
$node->safe_psql('postgres', "SELECT pg_log_backend_memory_contexts($worker)");
$node->wait_for_log(qr/logging memory contexts of PID $worker/, $offset);
pass('a sleeping worker serves interrupts');

# SIGHUP reaches the launcher: with a short timer it sends workers again.
no_workers($node);
$node->safe_psql('postgres', q{ALTER SYSTEM SET obix.premake_interval = '1 s'});
$node->reload;
ok(worker_pid($node, 'postgres'), 'the timer wakes a worker');
$node->safe_psql('postgres', 'ALTER SYSTEM RESET obix.premake_interval');
$node->safe_psql('postgres', 'ALTER SYSTEM RESET obix.worker_linger');
$node->reload;
ok(no_workers($node), 'and no longer where it is long');

#
# Settings meant for people
#
my @settings = (
	'default_transaction_read_only = on',
	q{default_transaction_isolation = 'serializable'},
	q{statement_timeout = '1 ms'},
	q{idle_session_timeout = '1 ms'},
	q{idle_in_transaction_session_timeout = '1 ms'},
	q{search_path = 'nowhere'},
	q{session_replication_role = 'replica'},
	q{row_security = off});
no_workers($node);
$node->safe_psql('postgres', join '',
	map { "ALTER DATABASE postgres SET $_;" } @settings);
$ENV{PGOPTIONS} =
  '-c default_transaction_read_only=off -c statement_timeout=0 -c idle_session_timeout=0 -c idle_in_transaction_session_timeout=0 -c search_path=public -c session_replication_role=origin';
roll_back_inserts($node, 'postgres', 'good', 1);
publish($node, 'postgres', 'good', 44);
poll_ok($node, 'postgres', 'SELECT count(*) = 100 FROM good',
	'the worker fills under settings meant for people');
is_settled($node, 'postgres', 'good', 'and its numbers agree');
poll_ok(
	$node, 'postgres',
	q{SELECT runway >= 10 AND failures = 0 FROM obix.outbox_status WHERE outbox = 'good'::regclass},
	'and makes partitions');
$node->safe_psql('postgres', 'ALTER DATABASE postgres RESET ALL');
delete $ENV{PGOPTIONS};

#
# Many databases
#
my @databases = map { "db$_" } (1 .. 10);
foreach my $db (@databases, 'closed')
{
	$node->safe_psql('postgres', "CREATE DATABASE $db");
	setup_database($node, $db);
	$node->safe_psql($db,
		q{SELECT obix.create_outbox('o', partition_width => 10, premake => 1)});
}
$node->safe_psql('postgres', 'CREATE DATABASE without');
$node->safe_psql('closed',
	q{BEGIN; INSERT INTO o (payload) VALUES ('1'); PREPARE TRANSACTION 'closed'; SELECT obix.publish('o', '1')});
$node->safe_psql('postgres', 'ALTER DATABASE closed ALLOW_CONNECTIONS false');
foreach my $db (@databases)
{
	$node->safe_psql($db,
		q{BEGIN; INSERT INTO o (payload) VALUES ('1'); ROLLBACK; SELECT count(obix.publish('o', '1')) FROM generate_series(1, 8)}
	);
}
poll_ok($node, $_, 'SELECT count(*) = 9 AND min(sequence) = 1 FROM o', "holes in $_ are filled")
  foreach (@databases);
ok(no_workers($node), 'then no worker is left');

# After a crash each database is looked after, whoever connects there or not.
my @open;
foreach my $db (@databases)
{
	my $session = $node->background_psql($db);

	$session->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1'), ('2')});
	publish($node, $db, 'o', 1);
	push @open, $session;
}
$offset = log_offset($node);
crash($node);
foreach my $session (@open)
{
	eval { $session->quit };
}
$node->start;
poll_ok($node, $_, 'SELECT count(*) = 12 FROM o', "after a crash holes in $_ are filled")
  foreach (@databases);
ok(no_workers($node), 'then no worker is left');
unlike_log($node, qr/not currently accepting connections|PANIC|TRAP|terminated by signal/,
	'nothing tries to connect to the closed database', $offset);
$node->safe_psql('postgres', 'ALTER DATABASE closed ALLOW_CONNECTIONS true');
$node->safe_psql('closed', q{ROLLBACK PREPARED 'closed'});
poll_ok($node, 'closed', q{SELECT count(*) = 2 FROM obix.read('o', 0)},
	'opened, it is served from its first use on');

#
# What is switched on while the worker is busy, before it can know, is done
#
$node->append_conf('postgresql.conf', "obix.auto_recover = off\nobix.lock_timeout = '5 min'\n");
$node->reload;
$node->safe_psql('postgres', 'CREATE DATABASE settings');
setup_database($node, 'settings');
$node->safe_psql(
	'settings', q{
SELECT obix.create_outbox(o, partition_width => 10, premake => 1) FROM unnest('{busy,stranded}'::text[]) o;});
my $reader = $node->background_psql('settings');
$reader->query_safe('BEGIN; SELECT count(*) FROM stranded');
publish($node, 'settings', 'stranded', 50);
poll_ok($node, 'settings',
	q{SELECT count(*) = 1 FROM pg_locks WHERE relation = 'stranded_default'::regclass AND mode = 'AccessShareLock'},
	'a reader keeps partitions from being attached');
$reader->query_safe('COMMIT');
$reader->quit;
poll_ok(
	$node, 'settings',
	q{SELECT stranded > 0 AND runway > 0 FROM obix.outbox_status WHERE outbox = 'stranded'::regclass},
	'and events stay where they are');

my $writer = $node->background_psql('settings');
$writer->query_safe('BEGIN; LOCK TABLE busy IN ROW EXCLUSIVE MODE');
publish($node, 'settings', 'busy', 10);
poll_ok($node, 'settings',
	q{SELECT count(*) = 1 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT granted AND backend_type = 'obix worker' AND relation = 'busy'::regclass},
	'the worker waits');
$node->poll_query_until('postgres',
	q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'obix worker' AND datname <> 'settings'}
) or die 'other workers stay';
$node->append_conf('postgresql.conf', "obix.auto_recover = on\n");
$node->reload;
# the launcher asks everywhere; where workers are short they do not linger to be seen
roll_back_inserts($node, 'db1', 'o', 1);
settle($node, 'db1', 'o');
$writer->query_safe('COMMIT');
$writer->quit;
is_settled($node, 'settings', 'stranded', 'then the other outbox is recovered');
$node->append_conf('postgresql.conf', "obix.lock_timeout = '50 ms'\n");
$node->reload;
ok(no_workers($node), 'and no worker is left');

#
# Fast stop, with everything in motion
#
$node->append_conf('postgresql.conf', "obix.worker_linger = '4 s'\n");
$node->reload;
my @waiters = map { start_wait($node, $_, 'o', 12) } ('db2', 'db3');
my $load = start_pgbench($node, 'db1', 'load', '-c 4 -j 2 -T 60',
	{
		'publish'  => "SELECT obix.publish('o', '1');\n",
		'rollback' => "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
	});
$node->poll_query_until('db1', 'SELECT max(sequence) > 50 FROM o');
worker_pid($node, 'db1');
my $limit = 10 * slowness($node);
my $start = time;
$node->stop('fast');
note sprintf('stopped in %.1f s', time - $start);
cmp_ok(time - $start, '<', $limit, 'a fast stop is fast');
finish_pgbench($load, may_fail => 1);
$_->{run}->finish foreach (@waiters);
$node->start;
is_settled($node, 'db1', 'o', 'after it all is settled');
like(walk($node, 'db1', 'o'), qr/^(\d+)\|\d+\|\1$/, 'and contiguous');

$node->stop;
done_testing();
