
# Settings: those of obix, with good and bad values and wherever they can be
# set; and those of the server that are meant for people, or are hostile, which
# must not hit workers.  And the signals that administrators send.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "obix.worker_linger = '100 ms'\n");
my ($result, $stdout, $stderr, $offset);

sub refused
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($query, $pattern) = @_;

	($result, $stdout, $stderr) = $node->psql('postgres', $query);
	like($stderr, $pattern, "refused: $query");
	return;
}

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');
$node->safe_psql(
	'app', q{
SELECT obix.create_outbox('o', partition_width => 10, premake => 1);
CREATE TABLE test.applied (sequence bigint, told text);
CREATE ROLE regress_obix_nobody;
CREATE ROLE regress_obix_admin LOGIN;});
make_handler(
	$node, 'app', 'h', q{
IF e.payload = '"slow"' THEN PERFORM pg_sleep(1.2); END IF;
INSERT INTO test.applied VALUES (e.sequence, concat_ws(', ', current_setting('transaction_isolation'), current_setting('transaction_read_only'),
	current_setting('statement_timeout'), current_setting('session_replication_role'), current_setting('role'), current_setting('search_path')));});
$node->safe_psql('app',
	q{SELECT obix.create_consumer('c', 'o', handler => 'test.h', max_attempts => 1)});

#
# Settings of obix.  Those at the start of the server:
#
foreach my $name ('obix.max_outboxes', 'obix.max_consumers')
{
	foreach my $value ('0', '-1', '100000000', 'many', '64kB')
	{
		refused("ALTER SYSTEM SET $name = '$value'",
			qr/ERROR:  (invalid value for parameter "$name"|.* is outside the valid range)/);
	}
	refused("SET $name = 100",                    qr/cannot be changed without restarting the server/);
	refused("ALTER DATABASE app SET $name = 100", qr/cannot be changed without restarting the server/);
}
is( $node->safe_psql(
		'postgres', q{
ALTER SYSTEM SET obix.max_outboxes = 100; SELECT pg_reload_conf();
SELECT pg_sleep(0.01) FROM generate_series(1, 1000) WHERE NOT (SELECT pending_restart FROM pg_settings WHERE name = 'obix.max_outboxes');
SHOW obix.max_outboxes; ALTER SYSTEM RESET obix.max_outboxes; SELECT pg_reload_conf();}
	) =~ /^64$/m ? 'kept' : 'changed',
	'kept',
	'a reload does not change what needs a restart');

# Those of the configuration file: [ name, [ set, shown ]..., [ refused ]... ]
foreach my $case (
	[ 'obix.dispatch_workers', [ 0, 0 ], [ 24, 24 ], [25], [-1], ['two'], ['2 s'] ],
	[ 'obix.premake_interval', [ 1, '1s' ], [ '90 min', '90min' ], [ '2 d', '2d' ], [0], ['25000 d'], ['1 GB'] ],
	[ 'obix.lock_timeout', [ 1, '1ms' ], [ '2 s', '2s' ], [0], [-5], ['long'] ],
	[ 'obix.worker_linger', [ 0, 0 ], [ '0.5 s', '500ms' ], [ 4000, '4s' ], ['5 s'], [-1], ['1 MB'] ],
	[ 'obix.auto_recover', [ 'off', 'off' ], [ 1, 'on' ], ['maybe'], [2] ],
	[ 'obix.notify', [ 'yes', 'on' ], [ 'false', 'off' ], ['sometimes'] ])
{
	my ($name, @values) = @$case;

	foreach my $value (@values)
	{
		my ($set, $shown) = @$value;

		if (!defined $shown)
		{
			refused("ALTER SYSTEM SET $name = '$set'",
				qr/ERROR:  (invalid value for parameter "$name"|.* is outside the valid range|parameter "$name" requires a Boolean value)/
			);
			next;
		}
		$node->safe_psql('postgres', "ALTER SYSTEM SET $name = '$set'");
		$node->reload;
		poll_ok($node, 'postgres', "SELECT current_setting('$name') = '$shown'",
			"$name = $set is taken");
	}
	refused("SET $name = DEFAULT",                qr/parameter "$name" cannot be changed now/);
	refused("ALTER DATABASE app SET $name = '1'", qr/parameter "$name" cannot be changed now/);
	refused("ALTER ROLE regress_obix_admin SET $name = '1'",
		qr/parameter "$name" cannot be changed now/);
	$node->safe_psql('postgres', "ALTER SYSTEM RESET $name");
}
refused('ALTER SYSTEM SET obix.no_such_thing = 1',
	qr/unrecognized configuration parameter|reserved prefix/);
refused('SET obix.no_such_thing = 1', qr/"obix" is a reserved prefix/);

# A bad value in the file is reported and changes nothing.
$offset = log_offset($node);
$node->append_conf('postgresql.conf', "obix.lock_timeout = 'soon'\n");
$node->reload;
$node->wait_for_log(qr/invalid value for parameter "obix.lock_timeout": "soon"/, $offset);
is($node->safe_psql('postgres', 'SHOW obix.lock_timeout'), '50ms', 'a bad value in the file changes nothing');
$node->append_conf('postgresql.conf', "obix.lock_timeout = '50 ms'\n");
$node->reload;
publish($node, 'app', 'o', 1);
consumer_ok($node, 'app', 'c', 'lag_events = 0', 'after all this, consumers are served');

# Those of a superuser, or whoever he lets.
foreach my $name ('obix.enabled', 'obix.force_sync_commit')
{
	refused("SET SESSION AUTHORIZATION regress_obix_admin; SET $name = off",
		qr/permission denied to set parameter "$name"/);
	refused("ALTER SYSTEM SET $name = 'perhaps'", qr/requires a Boolean value/);
	$node->safe_psql('postgres',
		"GRANT SET ON PARAMETER $name TO regress_obix_admin; SET SESSION AUTHORIZATION regress_obix_admin; SET $name = off; RESET $name"
	);
	foreach my $where ('ROLE regress_obix_admin', 'DATABASE app', 'ROLE regress_obix_admin IN DATABASE app')
	{
		$node->safe_psql('postgres', "ALTER $where SET $name = off");
		is( $node->safe_psql(
				'app', "SHOW $name",
				extra_params => [ '-U', 'regress_obix_admin' ]),
			'off',
			"$name can be set for $where");
		$node->safe_psql('postgres', "ALTER $where RESET $name");
	}
}

# Off in the database, no worker acts; on again, all is done.
no_workers($node);
no_dispatchers($node);
$node->safe_psql('postgres', 'ALTER DATABASE app SET obix.enabled = off');
refused("\\c app\nSELECT obix.publish('o', '1')", qr/obix is disabled|obix.enabled/);
{
	local $ENV{PGOPTIONS} = '-c obix.enabled=on';

	roll_back_inserts($node, 'app', 'o', 1);
	publish($node, 'app', 'o', 1);
	no_workers($node);
	no_dispatchers($node);
	is($node->safe_psql('app', 'SELECT count(*), max(sequence) FROM o'),
		'2|3', 'off, holes are not filled');
	is($node->safe_psql('app', 'SELECT count(*) FROM test.applied'), '1', 'nor handlers called');
}
$node->safe_psql('postgres', 'ALTER DATABASE app RESET obix.enabled');
publish($node, 'app', 'o', 1);
roll_back_inserts($node, 'app', 'o', 1);
is_settled($node, 'app', 'o', 'on again, holes are filled');
$node->safe_psql('app', q{SELECT obix.resume('c')});
consumer_ok($node, 'app', 'c', 'lag_events = 0', 'and handlers called');

#
# Signals
#
$node->append_conf('postgresql.conf', "obix.worker_linger = '4 s'\n");
$node->reload;
my $launcher = launcher_pid($node);
publish($node, 'app', 'o', 1);
roll_back_inserts($node, 'app', 'o', 1);
my $worker = worker_pid($node, 'app');
my ($dispatcher) = dispatcher_pids($node, 'app');
$offset = log_offset($node);
foreach my $pid ($launcher, $worker, $dispatcher)
{
	my $contexts = log_offset($node);

	# in one session, for the worker leaves after some seconds
	$node->safe_psql('postgres',
		"SELECT pg_cancel_backend($pid), pg_sleep(0.01) FROM generate_series(1, 3); SELECT pg_log_backend_memory_contexts($pid)"
	);
	$node->wait_for_log(qr/logging memory contexts of PID $pid/, $contexts);
}
publish($node, 'app', 'o', 1);
roll_back_inserts($node, 'app', 'o', 1);
is_settled($node, 'app', 'o', 'cancelled, they go on');
consumer_ok($node, 'app', 'c', 'lag_events = 0', 'all of them');
is( launcher_pid($node) . ' ' . worker_pid($node, 'app') . ' ' . (dispatcher_pids($node, 'app'))[0],
	"$launcher $worker $dispatcher",
	'as the same processes');
unlike_log($node, qr/ERROR|FATAL|obix.*exited/, 'and there was no error', $offset);

# A storm of SIGHUP while events are published.
my $load = start_pgbench($node, 'app', 'load', '-c 2 -t 200',
	{
		'publish'  => "SELECT obix.publish('o', '1');\n",
		'rollback' => "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
	});
foreach (1 .. 300)
{
	kill 'HUP', $node->{_pid}, keys %{ processes_of($node) } if $_ % 10 == 0;
	kill 'HUP', $node->{_pid};
	usleep(2000);
}
finish_pgbench($load);
is_settled($node, 'app', 'o', 'a storm of SIGHUP harms nothing');
consumer_ok($node, 'app', 'c', 'lag_events = 0', 'nor consumers');
is(launcher_pid($node), $launcher, 'and the launcher is the same');

# A worker goes by what was set for the database when it began.  One that always
# has something to do makes way when that is changed.
$load = start_pgbench($node, 'app', 'busy', '-c 1 -R 50 -T 300',
	{ 'rollback' => "BEGIN;\nINSERT INTO o (payload) VALUES ('2');\nROLLBACK;\n" });
$worker = worker_pid($node, 'app');
$node->safe_psql('postgres', 'ALTER DATABASE app RESET obix.enabled');
poll_ok(
	$node, 'postgres',
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'obix worker' AND datname = 'app' AND pid <> $worker",
	'another worker comes while there is work');
$load->{handle}->signal('TERM');
finish_pgbench($load, may_fail => 1);
is_settled($node, 'app', 'o', 'and does it');
$node->append_conf('postgresql.conf', "obix.worker_linger = '100 ms'\n");
$node->reload;

#
# Settings that are meant for people, or hostile.  All that a worker does that
# takes its time takes longer than any of these timeouts.
#
my @hostile = (
	[ 'default_transaction_read_only',       'on',           'off' ],
	[ 'default_transaction_isolation',       'serializable', 'read committed' ],
	[ 'default_transaction_deferrable',      'on',           'off' ],
	[ 'row_security',                        'off',          'on' ],
	[ 'session_replication_role',            'replica',      'origin' ],
	[ 'statement_timeout',                   '1s',           '0' ],
	[ 'lock_timeout',                        '1s',           '0' ],
	[ 'idle_in_transaction_session_timeout', '1s',           '0' ],
	[ 'idle_session_timeout',                '1s',           '0' ],
	[ 'transaction_timeout',                 '1s',           '0' ],
	[ 'search_path',                         'nowhere',      'public' ],
	[ 'TimeZone',                            'Antarctica/Troll', 'UTC' ],
	[ 'DateStyle',                           'German',       'ISO' ],
	[ 'IntervalStyle',                       'sql_standard', 'postgres' ],
	[ 'quote_all_identifiers',               'on',           'off' ],
	# not from PostgreSQL 19 on
	($node->pg_version->major < 19 ? [ 'standard_conforming_strings', 'off', 'on' ] : ()),
	[ 'backslash_quote',                     'off',          'safe_encoding' ],
	[ 'bytea_output',                        'escape',       'hex' ],
	[ 'extra_float_digits',                  '-15',          '1' ],
	[ 'array_nulls',                         'off',          'on' ],
	[ 'transform_null_equals',               'on',           'off' ],
	[ 'check_function_bodies',               'off',          'on' ],
	[ 'exit_on_error',                       'on',           'off' ],
	[ 'synchronous_commit',                  'off',          'on' ],
	[ 'jit_above_cost',                      '0',            '100000' ],
	[ 'debug_parallel_query',                'on',           'off' ],
	[ 'force_parallel_mode',                 'on',           'off' ],
	[ 'plan_cache_mode',                     'force_generic_plan', 'auto' ],
	[ 'enable_indexscan',                    'off',          'on' ],
	[ 'enable_seqscan',                      'off',          'on' ],
	[ 'restrict_nonsystem_relation_kind',    'view',         '' ],
	[ 'work_mem',                            '64kB',         '4MB' ],
	[ 'log_min_duration_statement',          '0',            '-1' ],
	[ 'client_min_messages',                 'error',        'notice' ],
	[ 'role',                                'regress_obix_nobody', 'none' ]);
my %known = map { $_ => 1 } split /\n/, $node->safe_psql('postgres', 'SELECT name FROM pg_settings');
@hostile = grep { $known{ $_->[0] } || $_->[0] eq 'role' } @hostile;

# A worker takes its time: for placeholders, and for handlers.
$node->safe_psql(
	'app', q{
CREATE FUNCTION test.slowly() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$ BEGIN PERFORM pg_sleep(1.2); RETURN true; END $$;
ALTER TABLE o ADD CONSTRAINT slowly CHECK (payload IS NOT NULL OR test.slowly()) NOT VALID;});
my $owner = $node->safe_psql('postgres', 'SELECT current_user');
foreach my $where ('SYSTEM', 'DATABASE app', qq{ROLE "$owner"})
{
	my @settings =
	  grep { $where ne 'SYSTEM' || ($_->[0] ne 'role' && $_->[0] ne 'transaction_timeout') }
	  @hostile;

	no_workers($node);
	no_dispatchers($node);
	$offset = log_offset($node);
	$node->safe_psql('postgres', join '',
		map { "ALTER $where SET $_->[0] = '$_->[1]';\n" } @settings);
	my @options = map { my $value = $_->[2]; $value =~ s/ /\\ /g; "-c $_->[0]=$value" } @settings;
	local $ENV{PGOPTIONS} = join ' ', @options;
	if ($where eq 'SYSTEM')
	{
		# the launcher, too, begins under them
		$node->restart;
	}
	my $before = $node->safe_psql('app', 'SELECT count(*) FROM test.applied');
	roll_back_inserts($node, 'app', 'o', 1);
	publish($node, 'app', 'o', 25);
	$node->safe_psql('app', q{SELECT obix.publish('o', '"slow"')});
	is_settled($node, 'app', 'o', "hostile settings of $where: holes are filled");
	$node->safe_psql('app', 'ALTER TABLE o DROP CONSTRAINT IF EXISTS slowly');
	poll_ok(
		$node, 'app',
		q{SELECT runway >= 10 AND failures = 0 AND last_error IS NULL FROM obix.outbox_status},
		'partitions made');
	consumer_ok($node, 'app', 'c', q{state = 'active' AND lag_events = 0 AND failed = 0}, 'handlers called');
	is( $node->safe_psql(
			'app',
			"SELECT DISTINCT told FROM (SELECT told FROM test.applied OFFSET $before) t"),
		'read committed, off, 0, origin, none, "$user", public',
		'with values of their own');
	is( $node->safe_psql('app',
			'SELECT count(*) - count(DISTINCT sequence) FROM test.applied'), '0', 'once');
	unlike_log(
		$node,
		qr/(ERROR|FATAL):  (?!terminating (connection|background worker ".*") due to administrator command)/,
		'without an error', $offset);

	if ($where ne 'SYSTEM')
	{
		$node->safe_psql('postgres', join '', map { "ALTER $where RESET $_->[0];\n" } @settings);
		next;
	}

	# What a session that waits meets, when it does not reset them.
	$ENV{PGOPTIONS} =~ s/-c (statement_timeout)=\S+//;
	my $head = $node->safe_psql('app', 'SELECT max(sequence) FROM o');
	($result, $stdout, $stderr) = $node->psql('app', "CALL obix.wait('o', $head, '1 h')");
	like(
		$stderr,
		qr/canceling statement due to statement timeout/,
		'the statement timeout ends waits of sessions');
	$ENV{PGOPTIONS} = join ' ', map { /^-c idle/ ? () : $_ } @options;
	is( $node->safe_psql('app', "CALL obix.wait('o', $head, '1.2 s'); SELECT 'returned'"),
		'returned',
		'timeouts of idle sessions do not');
	$ENV{PGOPTIONS} = join ' ', @options;
	$node->safe_psql('postgres', join '', map { "ALTER $where RESET $_->[0];\n" } @settings);
	$node->restart;
}

# Event triggers fire for what workers do, as for any DDL.  One that fails is in
# the way of new partitions, and of nothing else.
$node->safe_psql(
	'app', q{
SELECT obix.create_outbox('events', partition_width => 10, premake => 1);
SELECT obix.create_consumer('e', 'events', handler => 'test.h');
CREATE FUNCTION test.forbid() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no DDL on %', tg_event; END $$;
CREATE EVENT TRIGGER forbid ON ddl_command_end EXECUTE FUNCTION test.forbid();});
$offset = log_offset($node);
publish($node, 'app', 'events', 35);
poll_ok(
	$node, 'app',
	q{SELECT failures > 2 AND last_error = 'no DDL on ddl_command_end' AND stranded > 0 FROM obix.outbox_status WHERE outbox = 'events'::regclass},
	'the status tells that an event trigger is in the way');
consumer_ok($node, 'app', 'e', 'lag_events = 0', 'of partitions, not of delivery');
is(log_count($node, qr/no DDL on/, $offset), 1, 'it is logged once');
$node->safe_psql('app', 'DROP EVENT TRIGGER forbid');
poll_ok($node, 'app',
	q{SELECT runway >= 10 AND stranded = 0 AND failures = 0 FROM obix.outbox_status WHERE outbox = 'events'::regclass},
	'without it, partitions are made');

like(walk($node, 'app', 'o'), qr/^(\d+)\|\d+\|\1$/, 'all is contiguous');
unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'nothing has crashed');
$node->stop;
done_testing();
