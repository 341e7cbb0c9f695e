
# What the TAP tests of obix share: servers that preload it, a schema "test"
# with a reader that checks contiguity, load by pgbench, waiting sessions, and
# a crash of the whole server.
#
# Every timer of obix is at an hour in these servers.  So whatever happens by
# itself happened because somebody was woken.

package ObixTest;

use strict;
use warnings;

use Exporter 'import';
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

our @EXPORT = qw(
  new_node base_conf setup_database publish publish_stranded roll_back_inserts
  is_settled settle walk no_workers poll_ok
  start_wait woken
  start_pgbench finish_pgbench max_latency
  start_psql finish_psql
  processes_of launcher_pid worker_pid crash
  make_handler consumer_ok consumers_ok dispatcher_pids no_dispatchers
  log_offset log_count unlike_log
  slowness
  time usleep
);

# How long a program may run, or a session be silent, that a test does other
# things beside: its timer begins when it does.
my $patience = 4 * $PostgreSQL::Test::Utils::timeout_default;

{
	no warnings 'redefine';
	my $background_psql = \&PostgreSQL::Test::Cluster::background_psql;

	*PostgreSQL::Test::Cluster::background_psql = sub {
		my ($node, $db, %params) = @_;
		my $session = $node->$background_psql($db, timeout => $patience, %params);

		$session->set_query_timer_restart();
		return $session;
	};
}

# PostgreSQL 15 and 16 do not know INITDB_TEMPLATE: a cluster to be copied, which
# costs a third of what initdb does.
if (PostgreSQL::Test::Utils::slurp_file($INC{'PostgreSQL/Test/Cluster.pm'}) !~ /INITDB_TEMPLATE/)
{
	no warnings 'redefine';
	my $system_or_bail = \&PostgreSQL::Test::Utils::system_or_bail;

	*PostgreSQL::Test::Utils::system_or_bail = sub {
		my ($program, @arguments) = @_;

		# initdb -D FOLDER -A trust -N, and nothing of a test's own
		if ($program eq 'initdb' && @arguments == 5 && defined $ENV{INITDB_TEMPLATE})
		{
			($program, @arguments) = ('cp', '-RPp', $ENV{INITDB_TEMPLATE}, $arguments[1]);
		}
		return $system_or_bail->($program, @arguments);
	};
}

# The settings of every server here; callers append their own after these.
sub base_conf
{
	return <<'CONF';
shared_preload_libraries = 'obix'
obix.premake_interval = '1h'
max_prepared_transactions = 20
max_connections = 100
shared_buffers = '32MB'
log_statement = none
log_min_duration_statement = -1
log_replication_commands = off
deadlock_timeout = '100ms'
CONF
}

# Make and start a server.  init: parameters for Cluster->init; conf: settings.
sub new_node
{
	my ($name, %params) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(%{ $params{init} // {} });
	$node->append_conf('postgresql.conf', base_conf() . ($params{conf} // ''));
	$node->start;
	return $node;
}

# Install obix and the helpers in a database that exists.
sub setup_database
{
	my ($node, $db) = @_;

	$node->safe_psql($db, 'CREATE EXTENSION obix');
	$node->safe_psql(
		$db, <<'SQL');
CREATE SCHEMA test;

-- Read everything after a position in pages; raises unless it is contiguous.
CREATE FUNCTION test.walk(outbox regclass, after bigint DEFAULT 0, page integer DEFAULT 10000,
						  OUT events bigint, OUT placeholders bigint, OUT last bigint)
LANGUAGE plpgsql AS $$
DECLARE
	n bigint;
	empty bigint;
	wrong bigint;
BEGIN
	events := 0;
	placeholders := 0;
	last := after;
	LOOP
		SELECT count(*), count(*) FILTER (WHERE r.payload IS NULL), min(r.sequence) FILTER (WHERE r.sequence <> last + r.n)
		INTO n, empty, wrong
		FROM (SELECT e.*, row_number() OVER () AS n FROM obix.read(outbox, last, page) e) r;
		IF wrong IS NOT NULL THEN
			RAISE EXCEPTION 'sequence % is out of place in the page after %', wrong, last;
		END IF;
		EXIT WHEN n = 0;
		events := events + n;
		placeholders := placeholders + empty;
		last := last + n;
	END LOOP;
END $$;

CREATE TABLE test.delivered (reader text, sequence bigint, id uuid);

-- Follow an outbox up to an event of type 'stop', noting what was delivered.
CREATE PROCEDURE test.consume(reader text, outbox regclass, after bigint)
LANGUAGE plpgsql AS $$
DECLARE
	e obix.event;
	stop boolean := false;
BEGIN
	WHILE NOT stop LOOP
		CALL obix.wait(outbox, after, '1 min');
		FOR e IN SELECT * FROM obix.read(outbox, after, 500) LOOP
			IF e.sequence <> after + 1 THEN
				RAISE EXCEPTION 'sequence % was delivered after %', e.sequence, after;
			END IF;
			INSERT INTO test.delivered VALUES (reader, e.sequence, e.id);
			after := e.sequence;
			stop := e.type IS NOT DISTINCT FROM 'stop';
		END LOOP;
		COMMIT;
	END LOOP;
END $$;

-- A payload that takes its time: until the caller gets this advisory lock.
CREATE FUNCTION test.payload_after_lock(lock bigint) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
	PERFORM pg_advisory_xact_lock(lock);
	RETURN '"after lock"';
END $$;
SQL
	return;
}

# Publish a number of events in one transaction.
sub publish
{
	my ($node, $db, $outbox, $count) = @_;

	$node->safe_psql($db,
		"SELECT count(obix.publish('$outbox', to_jsonb(g))) FROM generate_series(1, $count) g"
	);
	return;
}

# Publish so many events beyond the runway, while a session keeps partitions from
# being attached: they are stranded in DEFAULT.
sub publish_stranded
{
	my ($node, $db, $outbox, $count) = @_;
	my $blocker = $node->background_psql($db);

	$blocker->query_safe("BEGIN; SELECT count(*) FROM ${outbox}_default");
	my $runway = $node->safe_psql($db,
		"SELECT runway FROM obix.outbox_status WHERE outbox = '$outbox'::regclass");
	publish($node, $db, $outbox, $runway + $count);
	$blocker->query_safe('COMMIT');
	$blocker->quit;
	return;
}

# Leave holes at the head: a number of plain INSERTs that are rolled back.
sub roll_back_inserts
{
	my ($node, $db, $outbox, $count) = @_;

	$node->safe_psql(
		$db, qq{
BEGIN;
INSERT INTO $outbox (payload) SELECT to_jsonb(g) FROM generate_series(1, $count) g;
ROLLBACK;});
	return;
}

# poll_query_until as a test of its own.
sub poll_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($node, $db, $query, $name) = @_;

	return ok($node->poll_query_until($db, $query), $name);
}

sub settled_query
{
	my ($outbox) = @_;

	return
	  "SELECT high_water_mark = head AND stranded = 0 FROM obix.outbox_status WHERE outbox = '$outbox'::regclass";
}

# Wait until an outbox has neither holes nor stranded rows.
sub settle
{
	my ($node, $db, $outbox) = @_;

	$node->poll_query_until($db, settled_query($outbox))
	  or die "outbox $outbox did not settle";
	return;
}

sub is_settled
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($node, $db, $outbox, $name) = @_;

	return poll_ok($node, $db, settled_query($outbox), $name);
}

# "events|placeholders|last" of a contiguous read of everything.
sub walk
{
	my ($node, $db, $outbox, $after) = @_;
	$after //= 0;

	return $node->safe_psql($db, "SELECT * FROM test.walk('$outbox', $after)");
}

# Wait until no database worker runs.
sub no_workers
{
	my ($node) = @_;

	return $node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'obix worker'"
	);
}

# How many times slower than one that has nothing else to do this machine is at the
# moment, going by how long it takes to ask something: limits of time are for such
# a machine.
sub slowness
{
	my ($node) = @_;
	my $start = time;

	$node->safe_psql('postgres', 'SELECT 1') foreach (1 .. 5);
	my $slowness = (time - $start) / 5 / 0.03;
	return $slowness > 1 ? $slowness : 1;
}

# Start a session that waits on an outbox, and return once it sleeps.
sub start_wait
{
	my ($node, $db, $outbox, $after, %params) = @_;
	my $timeout = $params{timeout} // '1 h';
	my $session = $node->background_psql($db, on_error_stop => 0);
	my $pid     = $session->query_safe('SELECT pg_backend_pid()');

	$session->query_safe($params{before}) if defined $params{before};
	$session->{stdin} .=
	  "CALL obix.wait('$outbox', $after, '$timeout');\n\\echo woken\n";
	$session->{run}->pump_nb;
	$node->poll_query_until('postgres',
		"SELECT wait_event_type = 'Extension' AND query LIKE 'CALL obix.wait%' FROM pg_stat_activity WHERE pid = $pid"
	) or die "session does not wait on $outbox";
	$session->{obix_pid} = $pid;
	return $session;
}

# Has a session of start_wait returned?  Waits for that, and ends it.
sub woken
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($session, $name) = @_;
	my $start  = time;
	my $result = pump_until($session->{run}, $session->{timeout},
		\$session->{stdout}, qr/woken/);

	ok($result, $name);
	note sprintf("woken after %.0f ms", 1000 * (time - $start));
	$session->quit if $result;
	return $result;
}

# Start pgbench with scripts: { "name" or "name@weight" => text }.  The database
# can also be given as a connection string, to go by way of a pooler.
sub start_pgbench
{
	my ($node, $db, $name, $options, $scripts) = @_;
	my @files;

	foreach my $script (sort keys %$scripts)
	{
		my ($base, $weight) = split /@/, $script;
		my $path = $node->basedir . "/$name-$base.sql";

		open my $file, '>', $path or die "could not write $path: $!";
		print $file $scripts->{$script};
		close $file;
		push @files, '-f', $path . (defined $weight ? "\@$weight" : '');
	}

	my $run = {
		name   => $name,
		stdout => '',
		stderr => '',
		prefix => $node->basedir . "/$name-log"
	};
	my @command = (
		$node->installed_command('pgbench'), '-n', '-l', "--log-prefix=$run->{prefix}",
		split(' ', $options), @files,
		$db =~ /=/ ? $db : $node->connstr($db));

	$run->{handle} = IPC::Run::start(\@command, '<', \undef, '>',
		\$run->{stdout}, '2>', \$run->{stderr}, IPC::Run::timeout($patience));
	return $run;
}

# Wait for the end of pgbench: no client may have failed, unless told so.
sub finish_pgbench
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($run, %params) = @_;

	$run->{handle}->finish;
	return 1 if $params{may_fail};

	my $good = $run->{handle}->full_result(0) == 0
	  && $run->{stdout} =~ /number of failed transactions: 0 /;
	ok($good, "pgbench \"$run->{name}\" ran without an error");
	diag($run->{stdout} . $run->{stderr}) unless $good;
	return $good;
}

# The longest transaction of a finished pgbench, in milliseconds.
sub max_latency
{
	my ($run) = @_;
	my $max = 0;

	foreach my $path (glob("$run->{prefix}.*"))
	{
		open my $file, '<', $path or die "could not read $path: $!";
		while (my $line = <$file>)
		{
			my $latency = (split ' ', $line)[2];

			$max = $latency if $latency > $max;
		}
		close $file;
	}
	return $max / 1000;
}

# Start psql on a script, its output going to a file; it stops at an error.  The
# database is given as to start_pgbench.
sub start_psql
{
	my ($node, $db, $name, $script, %params) = @_;
	my $path = $node->basedir . "/$name.sql";
	my $run  = { name => $name, stdout => $node->basedir . "/$name.out", stderr => '' };

	open my $file, '>', $path or die "could not write $path: $!";
	print $file $script;
	close $file;
	$run->{handle} = IPC::Run::start(
		[
			$node->installed_command('psql'), '-XAtq', '-v', 'ON_ERROR_STOP=1',
			'-d', $db =~ /=/ ? $db : $node->connstr($db), '-f', $path
		],
		'<', \undef, '>', $run->{stdout}, '2>', \$run->{stderr},
		IPC::Run::timeout($params{timeout} // $patience));
	return $run;
}

# Wait for the end of such a psql and return the lines of its output.
sub finish_psql
{
	my ($run) = @_;

	$run->{handle}->finish;
	return split /\n/, slurp_file($run->{stdout});
}

# { pid => command line } of the children of the postmaster.
sub processes_of
{
	my ($node) = @_;
	my $postmaster = $node->{_pid};
	my %result;

	foreach my $directory (glob('/proc/[0-9]*'))
	{
		open my $file, '<', "$directory/stat" or next;
		my $line = <$file>;
		close $file;
		next unless defined $line && $line =~ /\) \S (\d+) /;
		next unless $1 == $postmaster;

		open $file, '<', "$directory/cmdline" or next;
		my $command = <$file> // '';
		close $file;
		$command =~ s/\0.*//s;
		$directory =~ /(\d+)$/;
		$result{$1} = $command;
	}
	return \%result;
}

# The launcher shows in no view, for it is connected to no database.
sub launcher_pid
{
	my ($node) = @_;
	my $processes = processes_of($node);
	my ($pid) = grep { $processes->{$_} =~ /obix launcher/ } keys %$processes;

	return $pid;
}

# The process id of the worker of a database; waits until one runs.
sub worker_pid
{
	my ($node, $db) = @_;

	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		my $pid = $node->safe_psql('postgres',
			"SELECT pid FROM pg_stat_activity WHERE backend_type = 'obix worker' AND datname = '$db'"
		);

		return $pid if $pid ne '';
		usleep(10_000);
	}
	die "no worker runs in $db";
}

# Make a function test.NAME for a consumer to call, from the statements of its
# PL/pgSQL body.  kind: "handler", with an event "e", "batch", with an array
# "e", or "gate".
sub make_handler
{
	my ($node, $db, $name, $body, %params) = @_;
	my $kind = $params{kind} // 'handler';
	my %declared = (
		handler => [ 'e obix.event',   'void' ],
		batch   => [ 'e obix.event[]', 'void' ],
		gate    => [ '',               'boolean' ]);
	my ($argument, $result) = @{ $declared{$kind} };

	$node->safe_psql($db,
		"CREATE OR REPLACE FUNCTION test.$name($argument) RETURNS $result LANGUAGE plpgsql AS \$handler\$ BEGIN $body END \$handler\$"
	);
	return;
}

# Wait until the status of a consumer satisfies a condition.
sub consumer_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($node, $db, $consumer, $condition, $name) = @_;

	return consumers_ok($node, $db, "consumer = '$consumer'", $condition, $name);
}

# The same for all consumers that a WHERE clause selects.
sub consumers_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($node, $db, $where, $condition, $name) = @_;
	my $good = $node->poll_query_until($db,
		"SELECT count(*) > 0 AND bool_and($condition) FROM obix.consumer_status WHERE $where"
	);

	ok($good, $name);
	diag(
		$node->safe_psql($db,
			"SELECT * FROM obix.consumer_status WHERE $where AND ($condition) IS NOT TRUE LIMIT 10"
		)) unless $good;
	return $good;
}

# The process ids of the dispatchers of a database.
sub dispatcher_pids
{
	my ($node, $db) = @_;

	return split /\n/,
	  $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND datname = '$db' ORDER BY pid"
	  );
}

# Wait until no dispatcher runs: every consumer has been served.
sub no_dispatchers
{
	my ($node) = @_;

	return $node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher'"
	);
}

# Kill every process of the server at one moment, as a power failure would:
# what only shared memory held is gone.
sub crash
{
	my ($node) = @_;
	my $postmaster = $node->{_pid};

	kill 'STOP', $postmaster;
	my @children = keys %{ processes_of($node) };
	$node->kill9;
	kill 'KILL', @children;

	# Until its parent has reaped it, the postmaster counts as running.
	foreach my $pid ($postmaster, @children)
	{
		foreach (1 .. 1000 * $PostgreSQL::Test::Utils::timeout_default)
		{
			last unless kill 0, $pid;
			usleep(1000);
		}
	}
	return;
}

sub log_offset
{
	my ($node) = @_;

	return -s $node->logfile;
}

# How often a pattern stands in the server log after an offset.
sub log_count
{
	my ($node, $pattern, $offset) = @_;
	my $log   = slurp_file($node->logfile, $offset // 0);
	my @found = $log =~ /$pattern/g;

	return scalar @found;
}

# The server log after an offset must not have this.
sub unlike_log
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($node, $pattern, $name, $offset) = @_;
	my @lines =
	  grep { /$pattern/ } split /\n/, slurp_file($node->logfile, $offset // 0);

	return is(join("\n", @lines), '', $name);
}

1;
