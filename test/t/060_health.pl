
# obix.health() and the status views where it takes other sessions, settings and
# servers: who holds up readers or maintenance, what is locked, what the server
# lacks.  Nobody who looks waits for a lock.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'main',
	init => { allows_streaming => 1 },
	conf => "obix.max_outboxes = 4\nobix.max_consumers = 20\nobix.worker_linger = '100ms'\n");
my ($session, $pid, $result);

setup_database($node, 'postgres');
$node->safe_psql(
	'postgres', q{
CREATE ROLE monitor LOGIN;
GRANT pg_monitor TO monitor;
SELECT obix.create_outbox('o', partition_width => 1000, premake => 2);
SELECT obix.create_consumer('c', 'o');});
publish($node, 'postgres', 'o', 5);

# "status|detail" of a check, as a role sees it that has nothing but pg_monitor.
sub health
{
	my ($check, %params) = @_;
	my $object = $params{object} // '';
	my $on     = $params{node}   // $node;

	return $on->safe_psql(
		'postgres', qq{
SET ROLE monitor;
SELECT status, detail FROM obix.health(@{[ $params{arguments} // '' ]})
WHERE "check" = '$check' AND coalesce(object, '') = '$object'});
}

# Wait until a check has a status.
sub health_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($check, $object, $status, $name) = @_;

	return poll_ok($node, 'postgres',
		qq{SELECT status = '$status' FROM obix.health() WHERE "check" = '$check' AND coalesce(object, '') = '$object'},
		$name);
}

# A session in a transaction that has run some statements.
sub open_transaction
{
	my ($statements) = @_;

	$session = $node->background_psql('postgres');
	$pid     = $session->query_safe('SELECT pg_backend_pid()');
	$session->query_safe("BEGIN; $statements");
	return;
}

sub close_transaction
{
	my ($statement) = @_;

	$session->query_safe($statement // 'ROLLBACK');
	$session->quit;
	return;
}

# Have new sessions, and all workers that come from now on, know new settings.
sub change_settings
{
	my ($settings) = @_;

	my $loaded = $node->safe_psql('postgres', 'SELECT pg_conf_load_time()');

	$node->append_conf('postgresql.conf', $settings);
	$node->reload;
	$node->poll_query_until('postgres', "SELECT pg_conf_load_time() > '$loaded'");
	no_workers($node);
	return;
}

is($node->safe_psql('postgres', q{SET ROLE monitor; SELECT * FROM obix.health() WHERE status <> 'ok'}),
	'', 'all is well at first');

#
# Who holds up readers
#
open_transaction(q{INSERT INTO o (payload) VALUES ('1')});
publish($node, 'postgres', 'o', 3);
is( health('held_up', object => 'o', arguments => q{'1 h'}), 'ok|', 'an open transaction may hold up readers for a while');
like(
	health('held_up', object => 'o', arguments => q{'0'}),
	qr/^critical\|readers have stopped before sequence 6 for session $pid, in a transaction of \d/,
	'then the session is named');
is( $node->safe_psql(
		'postgres',
		q{SELECT state, held_at, held_since = frontier_xact_start, waiting_since >= held_since, head - high_water_mark FROM obix.outbox_status}),
	'held|6|t|t|4', 'as the status does');
$session->query_safe(q{PREPARE TRANSACTION 'a b'});
is( $node->safe_psql(
		'postgres',
		q{SELECT state, held_at, held_since = (SELECT prepared FROM pg_prepared_xacts), undecided_gids FROM obix.outbox_status}),
	'held|6|t|{"a b"}', 'and a prepared transaction');
like(
	health('held_up', object => 'o', arguments => q{'0'}),
	qr/^critical\|readers have stopped before sequence 6 for prepared transaction "a b" of \d/,
	'which is named');
is( $node->safe_psql('postgres', q{SELECT hint FROM obix.health('0') WHERE "check" = 'held_up'}),
	'Use COMMIT PREPARED or ROLLBACK PREPARED.', 'with what to do');
$session->query_safe(q{COMMIT PREPARED 'a b'});
$session->quit;
is_settled($node, 'postgres', 'o', 'until it is decided');
is(health('held_up', object => 'o', arguments => q{'0'}), 'ok|', 'then it is over');

#
# Who is in the way of maintenance
#
open_transaction('SELECT count(*) FROM o_default');
publish($node, 'postgres', 'o', 3100);
health_ok('maintenance', 'o', 'warning', 'maintenance that cannot go on');
like(health('maintenance', object => 'o'),
	qr/^warning\|\d+ attempts have failed since \d.*: could not obtain lock on .*; locks: session .*\b$pid\b/,
	'and who is in the way');
like(health('maintenance', object => 'o', arguments => q{'0'}), qr/^critical\|/, 'it is worse when it lasts');
like(health('stranded', object => 'o'), qr/^warning\|up to \d+ events are in the DEFAULT partition$/, 'stranded events');
like(health('runway', object => 'o'), qr/^critical\|0 sequences are left/, 'no runway');
is( $node->safe_psql('postgres', q{SELECT state, worker_state IN ('running', 'retrying', 'due'), failing_since < now() FROM obix.outbox_status}),
	'failing|t|t', 'the status says so');
close_transaction();
is_settled($node, 'postgres', 'o', 'it goes on by itself');
health_ok('maintenance', 'o', 'ok', 'and is well again');

$session = $node->background_psql('postgres');
$session->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1'); SELECT count(*) FROM o_default; PREPARE TRANSACTION 'p'});
$session->quit;
publish($node, 'postgres', 'o', 6000);
health_ok('maintenance', 'o', 'warning', 'a prepared transaction is in the way as well');
like(health('maintenance', object => 'o'), qr/; locks: prepared transaction "p"/, 'and is named');
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'p'});
is_settled($node, 'postgres', 'o', 'until it is decided');

change_settings("obix.auto_recover = off\n");
publish_stranded($node, 'postgres', 'o', 10);
is($node->safe_psql('postgres', q{SELECT hint FROM obix.health() WHERE "check" = 'stranded'}),
	'obix.auto_recover is off: call obix.recover_default.', 'where events are not recovered by themselves');
change_settings("obix.auto_recover = on\n");
is_settled($node, 'postgres', 'o', 'they are again');

#
# What is locked
#
foreach my $lock ('LOCK TABLE o IN ACCESS EXCLUSIVE MODE', 'LOCK TABLE ONLY o IN ACCESS EXCLUSIVE MODE',
	'LOCK TABLE o_default IN ACCESS EXCLUSIVE MODE', 'REINDEX INDEX o_default_pkey')
{
	open_transaction($lock);
	is(health('outbox', object => 'o'), "warning|somebody has it locked exclusively, or waits to do so; locks: session $pid", "not waited for: $lock");
	is( $node->safe_psql('postgres', q{SELECT state, head > 0, stranded FROM obix.outbox_status}),
		'locked|t|', 'what shared memory knows is told');
	close_transaction();
}
open_transaction('LOCK TABLE o IN ACCESS EXCLUSIVE MODE');
is(health('consumer', object => 'c'), 'warning|its outbox is locked: somebody has it locked exclusively, or waits to do so', 'nor do consumers wait');
is($node->safe_psql('postgres', q{SELECT state, lag_events FROM obix.consumer_status}), 'active|', 'whose own state is told');
close_transaction();
is($node->safe_psql('postgres', q{SELECT state FROM obix.outbox_status}), 'ok', 'unlocked');

#
# Consumers with handlers
#
make_handler($node, 'postgres', 'fail', q{RAISE 'not today';});
$node->safe_psql('postgres',
	q{SELECT obix.create_consumer('h', 'o', handler => 'test.fail', max_attempts => 1, start_after => (SELECT head - 1 FROM obix.outbox_status))});
consumer_ok($node, 'postgres', 'h', q{state = 'stopped'}, 'a handler fails');
like(health('consumer', object => 'h'), qr/^critical\|it is stopped, event \d+: not today/, 'its consumer is stopped');
$node->safe_psql('postgres', q{SELECT obix.alter_consumer('h', on_failure => 'dead_letter'); SELECT obix.resume('h')});
consumer_ok($node, 'postgres', 'h', 'dead_letters = 1', 'or has a dead letter');
is(health('dead_letters', object => 'h'), 'warning|1 events wait in obix.dead_letter', 'which is said');
$node->safe_psql('postgres', 'DROP FUNCTION test.fail(obix.event)');
publish($node, 'postgres', 'o', 1);
consumer_ok($node, 'postgres', 'h', q{state = 'parked'}, 'a handler is gone');
like(health('consumer', object => 'h'), qr/^critical\|it is parked: function "?test\.fail/, 'its consumer is parked');
change_settings("obix.dispatch_workers = 0\n");
is(health('dispatchers'), 'critical|obix.dispatch_workers is 0, and 1 consumers have handlers', 'nobody calls handlers');
$node->safe_psql('postgres', q{SELECT obix.pause('h')});
is(health('dispatchers'), 'ok|', 'which does not matter while they are paused');
$node->safe_psql('postgres', q{SELECT obix.drop_consumer('h')});

#
# What the server lacks
#
change_settings("synchronous_standby_names = 'nobody'\n");
poll_ok($node, 'postgres', 'SELECT lacks_standby FROM obix.server_status', 'a standby that is not there');
is(health('synchronous_standby'), 'critical|commits wait for a synchronous standby that is not connected', 'is missed');
change_settings("synchronous_standby_names = ''\nobix.force_sync_commit = off\n");
poll_ok($node, 'postgres', 'SELECT NOT lacks_standby FROM obix.server_status', 'until none is to be there');
like(health('force_sync_commit'), qr/^warning\|/, 'commits that are not flushed');
change_settings("obix.force_sync_commit = on\n");

$node->safe_psql('postgres', q{SELECT obix.create_outbox('o' || n, premake => 0) FROM generate_series(2, 4) n});
is(health('max_outboxes'), 'critical|4 of 4 outboxes are in use', 'there is no room for another outbox');
# those that are fetched for take a place when they first are
my $take = q{SELECT obix.create_consumer('c' || n, 'o') FROM generate_series(%1$d, %2$d) n;
SELECT count(*) FROM generate_series(%1$d, %2$d) n, obix.fetch('c' || n, 1)};
$node->safe_psql('postgres', sprintf($take, 2, 19));
is(health('max_consumers'), 'warning|18 of 20 consumers are in use', 'and hardly for another consumer');
$node->safe_psql('postgres', sprintf($take, 20, 21));
is(health('max_consumers'), 'critical|20 of 20 consumers are in use', 'or none');
$node->safe_psql('postgres', q{SELECT obix.drop_consumer('c' || n) FROM generate_series(2, 21) n});

#
# A standby
#
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
is( $standby->safe_psql('postgres', q{SET ROLE monitor; SELECT * FROM obix.health() WHERE status <> 'ok' AND "check" NOT IN ('max_outboxes', 'lag')}),
	'', 'a standby is well');
is( $standby->safe_psql(
		'postgres', q{SELECT head, high_water_mark > 0, state, worker_state, stranded FROM obix.outbox_status WHERE outbox = 'o'::regclass}),
	'|t|standby||', 'as far as it knows');
is($standby->safe_psql('postgres', q{SELECT lag_events = reachable, lag > '0' FROM obix.consumer_status WHERE consumer = 'c'}),
	't|t', 'which includes the lag');
$standby->safe_psql('postgres', 'SELECT * FROM obix.progress');
$standby->stop;

#
# A VACUUM that prevents wraparound: of DEFAULT, slowly, after transactions enough
# have gone by.  That is a matter of a counter.
#
change_settings("obix.auto_recover = off\nautovacuum_naptime = 1\n");
publish_stranded($node, 'postgres', 'o', 30000);
$node->safe_psql('postgres',
	'ALTER TABLE o_default SET (autovacuum_freeze_max_age = 100000, autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1)');
$node->stop;
open my $file, '>>', $node->data_dir . '/pg_xact/0000' or die "could not open pg_xact: $!";
print $file "\0" x (32 * 8192 - -s $file);
close $file;
system_or_bail($node->installed_command('pg_resetwal'), '-x', 200000, $node->data_dir);
$node->start;
poll_ok($node, 'postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'autovacuum worker' AND query LIKE '%o_default (to prevent wraparound)'},
	'a VACUUM that prevents wraparound runs');
change_settings("obix.auto_recover = on\n");
health_ok('wraparound', 'o', 'warning', 'it is in the way');
$pid = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'autovacuum worker' AND query LIKE '%o_default%'});
is(health('wraparound', object => 'o'), "warning|a VACUUM that prevents wraparound keeps maintenance from its lock, process $pid", 'and is named');
$node->append_conf('postgresql.conf', "autovacuum = off\n");

#
# Room for fewer outboxes than there are, and for no background worker
#
$node->append_conf('postgresql.conf', "obix.max_outboxes = 1\nmax_worker_processes = 0\nmax_logical_replication_workers = 0\n");
$node->restart;
is(health('launcher'), 'critical|no launcher runs, so no worker can be started', 'a server without the launcher');
is($node->safe_psql('postgres', q{SELECT DISTINCT worker_state FROM obix.outbox_status}), 'no launcher', 'tells it of each outbox');
$result = $node->safe_psql('postgres', q{SELECT object, status, detail FROM obix.health() WHERE "check" = 'outbox' AND status <> 'ok'});
is(scalar(() = $result =~ /^o\d?\|critical\|too many outboxes are in use$/mg), 3, 'and those that find no room');

# with the launcher, but no place for any worker
$node->safe_psql('postgres', 'ALTER DATABASE postgres SET obix.enabled = off');
$node->append_conf('postgresql.conf', "obix.max_outboxes = 4\nmax_worker_processes = 1\n");
$node->restart;
poll_ok($node, 'postgres', 'SELECT refused_at <= now() FROM obix.server_status', 'a worker finds no place');
is(health('launcher'), 'ok|', 'though the launcher does');
is(health('workers'), 'warning|all background worker slots of the server are taken', 'which is said');
is( $node->safe_psql('postgres', q{SELECT DISTINCT state, problem, worker_state FROM obix.outbox_status}),
	'disabled|obix is disabled|disabled', 'where obix is disabled, its outboxes are');
is(health('outbox', object => 'o'), 'warning|obix is disabled', 'which is said, too');
$node->safe_psql('postgres', 'ALTER DATABASE postgres RESET obix.enabled');

#
# Nothing preloaded
#
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$node->restart;
is( $node->safe_psql('postgres', q{SET ROLE monitor; SELECT "check", status, detail FROM obix.health()}),
	"preload|critical|obix is not loaded by the server\nversion|ok|", 'obix is not loaded');
is($node->safe_psql('postgres', q{SELECT DISTINCT state, head, problem FROM obix.outbox_status}),
	'not loaded||obix is not loaded by the server', 'the views say so');
is( $node->safe_psql(
		'postgres', q{SELECT state, "cursor", problem FROM obix.consumer_status; SELECT * FROM obix.progress; SELECT * FROM obix.rebuild_progress}),
	'||obix is not loaded by the server', 'of consumers, too');

$node->stop;
done_testing();
