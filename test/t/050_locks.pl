
# Maintenance among the locks of users: where it waits and the user needs a
# stronger lock, the user gets it, and is never told of a deadlock; what happens
# while it waits is noticed; who is in its way is named.  It may wait for a
# minute here, so that it can be found waiting.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node =
  new_node('main', conf => "obix.lock_timeout = '1min'\nobix.worker_linger = '10ms'\n");
my $db   = 'postgres';

setup_database($node, $db);

# Start a statement in a session of its own, which ends with a line "done".
sub start
{
	my ($session, $statement) = @_;

	$session->{stdin} .= "$statement;\n\\echo done\n";
	$session->{run}->pump_nb;
	return;
}

sub finish
{
	my ($session) = @_;

	pump_until($session->{run}, $session->{timeout},
		\$session->{stdout}, qr/^done$/m)
	  or die 'a statement does not end';
	my $result = $session->{stdout} =~ s/\n?done\n//r;
	$session->{stdout} = '';
	return $result;
}

# Wait until somebody waits for a lock on a table.
sub await_waiter
{
	my ($table, $mode) = @_;

	$node->poll_query_until($db,
		"SELECT count(*) = 1 FROM pg_locks WHERE relation = '$table'::regclass AND mode = '$mode' AND NOT granted"
	) or die "nobody waits for $mode on $table";
	return;
}

sub create
{
	my ($outbox, $premake) = @_;

	$node->safe_psql($db,
		"SELECT obix.create_outbox('$outbox', partition_width => 10, premake => $premake)");
	no_workers($node);
	return;
}

sub last_error_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($outbox, $error, $name) = @_;

	return poll_ok($node, $db,
		"SELECT last_error ~ '$error' AND failures > 0 FROM obix.outbox_status WHERE outbox = '$outbox'::regclass",
		$name);
}

my $user   = $node->background_psql($db, on_error_stop => 0);
my $second = $node->background_psql($db, on_error_stop => 0);
my $caller = $node->background_psql($db, on_error_stop => 0);

# A statement of the user's that must not fail.
sub user_can
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($statement, $name) = @_;

	$user->{stderr} = '';
	start($user, $statement);
	finish($user);
	return is($user->{stderr}, '', $name);
}

#
# A user who has used the outbox, and then needs it for himself
#
my %uses = (
	wrote => [ q{INSERT INTO OUTBOX (payload) VALUES ('1')}, 'ensure_partitions', 'ShareRowExclusiveLock' ],
	read  => [ q{SELECT count(*) FROM OUTBOX},               'recover_default',   'AccessExclusiveLock' ]);
foreach my $use (sort keys %uses)
{
	my ($first, $function, $mode) = @{ $uses{$use} };

	foreach my $by ('worker', 'call')
	{
		foreach my $then ('TRUNCATE', 'DROP TABLE', 'LOCK TABLE')
		{
			my $outbox = "${use}_${by}_" . lc($then =~ s/ .*//r);

			$node->safe_psql($db, 'ALTER SYSTEM SET obix.auto_recover = '
				  . ($by eq 'worker' ? 'on' : 'off'));
			$node->reload;
			create($outbox, $use eq 'wrote' ? 1 : 0);
			publish($node, $db, $outbox, 5);
			$user->query_safe('BEGIN; ' . $first =~ s/OUTBOX/$outbox/r);

			# have something to do for maintenance
			if ($use eq 'wrote')
			{
				$node->safe_psql($db,
					($by eq 'call' ? 'SET obix.enabled = off;' : '')
					. "UPDATE obix.outbox SET premake = 3 WHERE outbox = '$outbox'::regclass");
				$node->safe_psql($db, "SELECT obix.alter_outbox('$outbox')")
				  if $by eq 'worker';
			}
			else
			{
				publish($node, $db, $outbox, 10);
			}
			start($caller, "SELECT obix.$function('$outbox')") if $by eq 'call';
			await_waiter($outbox, $mode);
			user_can("$then $outbox",
				"a user who $use an outbox can $then it while maintenance ($by) waits");
			$user->query_safe('COMMIT');
			if ($by eq 'call')
			{
				my $result = finish($caller);

				if ($then eq 'DROP TABLE')
				{
					is($result, '0', 'the call finds nothing to do any more');
				}
				elsif ($then eq 'LOCK TABLE')
				{
					cmp_ok($result, '>', 0, 'the call does its work then');
				}
			}
			elsif ($then ne 'DROP TABLE')
			{
				is_settled($node, $db, $outbox, 'the worker goes on then');
			}
			else
			{
				ok(no_workers($node), 'the worker leaves then');
			}
		}
	}
}
is($caller->{stderr}, '', 'no call has failed');

#
# What becomes of the outbox while maintenance waits.  A call that comes next,
# for all outboxes, so that it does not wait for the outbox, keeps the worker from
# trying again.  So what it has found out can be seen.
#
sub start_next_call
{
	start($second, 'BEGIN; SELECT obix.ensure_partitions()');
	$node->poll_query_until($db,
		q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'object' AND NOT granted})
	  or die 'the call does not wait';
	return;
}

$node->safe_psql($db, 'ALTER SYSTEM SET obix.auto_recover = on');
$node->reload;
$node->safe_psql($db, 'SELECT obix.drop_outbox(outbox) FROM obix.outbox');
create('replaced', 0);
$user->query_safe('BEGIN; LOCK TABLE replaced IN ROW EXCLUSIVE MODE');
publish($node, $db, 'replaced', 15);
await_waiter('replaced', 'AccessExclusiveLock');
start_next_call();
user_can(
	q{INSERT INTO replaced (payload) VALUES ('16');
ALTER TABLE replaced DETACH PARTITION replaced_default;
CREATE TABLE replaced_new (LIKE replaced INCLUDING ALL);
ALTER TABLE replaced ATTACH PARTITION replaced_default FOR VALUES FROM (10) TO (100);
ALTER TABLE replaced ATTACH PARTITION replaced_new DEFAULT},
	'a user replaces DEFAULT while the worker waits to recover it');
$user->query_safe('COMMIT');
finish($second);
last_error_ok('replaced', 'DEFAULT partition of outbox "replaced" was replaced concurrently',
	'the worker notices');
$second->query_safe('COMMIT');
poll_ok($node, $db, q{SELECT failures = 0 FROM obix.outbox_status WHERE outbox = 'replaced'::regclass},
	'and finds that there is nothing to do any more');
is(walk($node, $db, 'replaced'), '16|0|16', 'nothing is missing');

$node->safe_psql($db, 'DROP TABLE replaced');
create('passed', 1);
publish($node, $db, 'passed', 18);
is_settled($node, $db, 'passed', 'a partition is made ahead');
no_workers($node);
$user->query_safe(q{BEGIN; INSERT INTO passed (payload) VALUES ('19')});
$caller->query_safe(q{BEGIN; INSERT INTO passed (payload) VALUES ('20')});
$node->safe_psql($db, q{SELECT obix.alter_outbox('passed', premake => 3)});
await_waiter('passed', 'ShareRowExclusiveLock');
$node->safe_psql($db, q{SELECT obix.alter_outbox('passed', premake => 0)});
start_next_call();
$caller->query_safe(
	q{INSERT INTO passed (payload) SELECT to_jsonb(g) FROM generate_series(21, 32) g; COMMIT});
pass('a user goes on into the range for which the worker has made a partition');
$user->query_safe('COMMIT');
finish($second);
last_error_ok('passed', 'partition for sequence 30 of outbox "passed" cannot be attached',
	'the worker notices');
$second->query_safe('COMMIT');
is_settled($node, $db, 'passed', 'and recovers what has gone to DEFAULT');
is(walk($node, $db, 'passed'), '32|0|32', 'nothing is missing');

# Beside a prepared transaction, held in the middle by an event trigger
$node->safe_psql(
	$db, q{
CREATE FUNCTION test.hold() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM pg_catalog.pg_locks WHERE pid = pg_catalog.pg_backend_pid() AND granted
			   AND relation = 'public.beside'::pg_catalog.regclass AND mode = 'ShareUpdateExclusiveLock') THEN
		PERFORM pg_catalog.pg_advisory_xact_lock_shared(7);
	END IF;
END $$;
SELECT obix.create_outbox('beside', partition_width => 10, premake => 1);
BEGIN; INSERT INTO beside (payload) VALUES ('1'); PREPARE TRANSACTION 'beside';
CREATE EVENT TRIGGER hold ON ddl_command_start EXECUTE FUNCTION test.hold()});
no_workers($node);
$second->query_safe(q{SELECT obix.high_water_mark('beside')});
$user->query_safe('SELECT pg_advisory_lock(7)');
$node->safe_psql($db, q{SELECT obix.alter_outbox('beside', premake => 3)});
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted})
  or die 'the worker is not held';
$second->query_safe(q{BEGIN; INSERT INTO beside (payload) VALUES ('2')});
$user->query_safe('SELECT pg_advisory_unlock(7)');
last_error_ok('beside', 'could not attach a partition to outbox "beside" while it is being written to',
	'a session that comes to write while a partition is attached beside a prepared transaction');
$second->query_safe('COMMIT');
$node->safe_psql($db, q{COMMIT PREPARED 'beside'; DROP EVENT TRIGGER hold});
poll_ok($node, $db,
	q{SELECT failures = 0 AND runway >= 30 FROM obix.outbox_status WHERE outbox = 'beside'::regclass},
	'has that undone, and done again');
is(walk($node, $db, 'beside'), '2|0|2', 'nothing is missing');

#
# Who uses DEFAULT by its name, at work and idle
#
create('used', 0);
$second->query_safe('BEGIN; SELECT count(*) FROM used_default');
$user->query_safe('SELECT pg_advisory_lock(7)');
start($second, 'SELECT pg_advisory_lock_shared(7)');
publish($node, $db, 'used', 15);
my ($result, $stdout, $stderr) = $node->psql($db, q{SELECT obix.recover_default('used')});
like(
	$stderr,
	qr/ERROR:  could not obtain lock on partition "used_default".*DETAIL:  A transaction that has read or written it, perhaps by way of the outbox, is still open\..*HINT:  See blocking_pids in obix\.outbox_status\./s,
	'a call says what keeps it from recovering DEFAULT');
$user->query_safe('SELECT pg_advisory_unlock(7)');
finish($second);
$node->safe_psql($db, q{ALTER SYSTEM SET obix.lock_timeout = '1ms'});
$node->reload;
$node->poll_query_until($db, q{SELECT current_setting('obix.lock_timeout') = '1ms'});
($result, $stdout, $stderr) = $node->psql($db, q{SELECT obix.recover_default('used')});
like(
	$stderr,
	qr/ERROR:  could not obtain lock on table "used_default".*DETAIL:  A session that has used it idles in its transaction\..*HINT:  See blocking_pids in obix\.outbox_status\./s,
	'and that waiting is no use');
$node->safe_psql($db, 'ALTER SYSTEM RESET obix.lock_timeout');
$node->reload;
$second->query_safe('COMMIT');
is_settled($node, $db, 'used', 'then it is recovered');

unlike_log($node, qr/deadlock/, 'nobody was told of a deadlock');
$_->quit foreach ($user, $second, $caller);

#
# All of it at once: 16 who write and read, some of them DEFAULT by its name and
# before the outbox, one who removes old partitions, one who locks the outbox
# after having used it, and maintenance by calls and by workers.
#
$node->safe_psql($db,
	q{ALTER SYSTEM SET obix.lock_timeout = '50ms'});
$node->reload;
create($_, 1) foreach ('backward', 'removed');
my %load = map {
	(   "publish_$_\@4" => "SELECT obix.publish('$_', '1') FROM generate_series(1, 3);\n",
		"insert_$_\@4"  => "INSERT INTO $_ (payload) SELECT '1' FROM generate_series(1, 5);\n",
		"rollback_$_\@2" =>
		  "BEGIN;\nSELECT count(*) FROM $_;\nINSERT INTO $_ (payload) VALUES ('1');\nROLLBACK;\n",
		"both_$_\@2" =>
		  "BEGIN;\nSELECT max(sequence) FROM $_;\nINSERT INTO $_ (payload) VALUES ('1');\nSELECT obix.publish('$_', '1');\nCOMMIT;\n",
		"read_$_\@2" => "SELECT count(*) FROM obix.read('$_', max_events => 100);\n")
} ('backward', 'removed');
$load{'default_read@3'} =
  "BEGIN;\nSELECT count(*) FROM backward_default;\nSELECT max(sequence) FROM backward;\nCOMMIT;\n";
$load{'default_write@3'} =
  "BEGIN;\nSELECT count(*) FROM backward_default;\nINSERT INTO backward (payload) VALUES ('1');\nCOMMIT;\n";
my @runs = (
	start_pgbench($node, $db, 'users', '-c 16 -j 2 -T 3', \%load),
	start_pgbench(
		$node, $db,
		'maintenance',
		'-c 4 -T 3',
		{   map {
				my $outbox = $_;

				# a call may give up after a while, but not for a deadlock
				map {
					$_ . "_$outbox" =>
					  "DO \$\$ BEGIN PERFORM obix.$_('$outbox'); EXCEPTION WHEN lock_not_available OR object_in_use THEN END \$\$;\n"
				} ('ensure_partitions', 'recover_default', 'fill_gaps')
			} ('backward', 'removed')
		}),
	start_pgbench(
		$node, $db,
		'removal',
		'-c 1 -T 3 -R 20',
		{   drop => q{DO $$
DECLARE
	oldest regclass;
	below bigint;
BEGIN
	SET LOCAL lock_timeout = '80ms';
	SELECT partition, to_sequence INTO oldest, below FROM obix.partitions('removed') WHERE from_sequence IS NOT NULL ORDER BY from_sequence LIMIT 1;
	IF below < obix.high_water_mark('removed') THEN EXECUTE format('DROP TABLE %s', oldest); END IF;
EXCEPTION WHEN lock_not_available OR undefined_table THEN
END $$;
},
			lock => "BEGIN;\nINSERT INTO removed (payload) VALUES ('1');\nLOCK TABLE removed;\nINSERT INTO removed (payload) VALUES ('1');\nCOMMIT;\n"
		}));
finish_pgbench($_) foreach (@runs);
foreach my $outbox ('backward', 'removed')
{
	is_settled($node, $db, $outbox, "$outbox: all is settled");
	like(
		$node->safe_psql($db,
			"SELECT * FROM test.walk('$outbox', (SELECT min(sequence) - 1 FROM $outbox))"),
		qr/^\d+\|\d+\|\d+$/, "$outbox: and contiguous");
}
note 'the oldest event is ' . $node->safe_psql($db, q{SELECT min(sequence) FROM removed});
unlike_log($node, qr/deadlock|40P01|PANIC|TRAP/, 'nobody was told of a deadlock');

#
# An outbox that is locked when the server starts, by a prepared transaction
# that then ends: nobody else knows that its consumer has an event to come.
#
make_handler($node, $db, 'h', 'INSERT INTO test.applied VALUES (e.sequence);');
create('kept', 1);
$node->safe_psql(
	$db, q{
CREATE TABLE test.applied (sequence bigint);
ALTER SYSTEM SET obix.dispatch_workers = 0;
SELECT pg_reload_conf();
SELECT obix.create_consumer('h', 'kept', handler => 'test.h');});
no_dispatchers($node);
publish($node, $db, 'kept', 1);
$node->safe_psql($db, q{BEGIN; LOCK TABLE kept IN ACCESS EXCLUSIVE MODE; PREPARE TRANSACTION 'keeper'});
is($node->safe_psql($db, 'SELECT count(*) FROM test.applied'), '0', 'an event is left for after the start');
$node->stop;
$node->append_conf('postgresql.auto.conf', "obix.dispatch_workers = 1\nlog_min_messages = debug1\n");
my $offset = log_offset($node);
$node->start;
$node->wait_for_log(qr/background worker "obix worker" \(PID \d+\) exited with exit code 0/, $offset);
$node->safe_psql($db, q{COMMIT PREPARED 'keeper'});
poll_ok($node, $db, 'SELECT count(*) = 1 FROM test.applied', 'it is handled when the lock is gone');

$node->stop;
done_testing();
