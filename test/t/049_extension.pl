
# The extension comes and goes while sessions and workers use it; a schema of
# its name is there without it; its creation is rolled back; workers are
# terminated while they start.  Never a crash, and each worker leaves quietly.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $cycles = $ENV{OBIX_TEST_CYCLES} // 100;
my $kills  = $ENV{OBIX_TEST_KILLS}  // 36;
my $node   = new_node('main', conf => "obix.worker_linger = '50 ms'\nmax_worker_processes = 40\nautovacuum = off\n");
my ($result, $stdout, $stderr);

#
# A schema obix that is somebody else's, with tables of the same names
#
$node->safe_psql('postgres', 'CREATE DATABASE theirs');
$node->safe_psql(
	'theirs', q{
CREATE SCHEMA obix;
CREATE TABLE obix.outbox (outbox text, id text);
INSERT INTO obix.outbox VALUES ('pg_class', 'x');
CREATE TABLE obix.consumer (id text);
CREATE TABLE obix.consumer_state (id text);
CREATE TABLE o (sequence bigint) PARTITION BY RANGE (sequence);
CREATE FUNCTION obix.guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER zz_obix_guard BEFORE INSERT ON o FOR EACH ROW EXECUTE FUNCTION obix.guard();});
my $offset = log_offset($node);
$node->restart;    # has every database visited
$node->safe_psql('theirs',
	q{CREATE TABLE o_default PARTITION OF o DEFAULT; INSERT INTO o VALUES (1); TRUNCATE o; DROP TABLE o_default; DROP TABLE o; UPDATE obix.outbox SET id = 'y'; DELETE FROM obix.outbox});
($result, $stdout, $stderr) = $node->psql('theirs', 'CREATE EXTENSION obix');
like($stderr, qr/ERROR:  schema "obix" already exists/,
	'where there is a schema of this name, the extension is refused');

#
# CREATE EXTENSION rolled back, with everything in use
#
$node->safe_psql('postgres', 'CREATE DATABASE app');
my $use = q{
CREATE EXTENSION obix;
SELECT obix.create_outbox('p', partition_width => 5, premake => 1);
CREATE FUNCTION h(e obix.event) RETURNS void LANGUAGE sql AS 'SELECT';
SELECT obix.create_consumer('c', 'p', handler => 'h', max_attempts => NULL, backoff => '1 ms', max_backoff => '10 ms');
SELECT count(obix.publish('p', '1')) FROM generate_series(1, 8);
INSERT INTO p (payload) VALUES ('1');
SAVEPOINT s;
INSERT INTO p (payload) VALUES ('1');
ROLLBACK TO s;};
$node->safe_psql('app', "BEGIN; $use ROLLBACK;" x 3);
$node->safe_psql('app', "BEGIN; SAVEPOINT a; $use ROLLBACK TO a; COMMIT;" x 3);
($result, $stdout, $stderr) = $node->psql('app', "BEGIN; $use SELECT 1 / 0; COMMIT;");
like($stderr, qr/division by zero/, 'and by an error');
is($node->safe_psql('app', q{SELECT count(*) FROM pg_extension WHERE extname = 'obix'}),
	'0', 'CREATE EXTENSION, rolled back');

#
# Created and dropped, while clients publish, read, wait and consume.  They get
# errors, of course; what they may not get is a lost connection.
#
my %scripts = (
	'publish' => "SELECT obix.publish('p', '1');\n",
	'insert'  => "INSERT INTO p (payload) VALUES ('1');\n",
	'read'    => "SELECT count(*) FROM obix.read('p', 0);\n",
	'wait'    => "CALL obix.wait('p', 100, '20 ms');\n",
	'status'  => "SELECT count(*) FROM obix.outbox_status, obix.consumer_status;\n");
my @clients = map {
	start_psql($node, 'app', $_,
		"\\set ON_ERROR_STOP off\n" . $scripts{$_} x (150 * $cycles) . "\\echo alive\n",
		timeout => 10 * $PostgreSQL::Test::Utils::timeout_default)
} sort keys %scripts;
my $start = time;
my $drop  = 'SET client_min_messages = error; DROP EXTENSION IF EXISTS obix CASCADE; DROP TABLE IF EXISTS p CASCADE; DROP FUNCTION IF EXISTS h;';
my ($done, $deadlocks) = (0, 0);
foreach my $cycle (1 .. $cycles)
{
	($result, $stdout, $stderr) = $node->psql('app', "BEGIN; $use COMMIT;");
	last unless $stderr eq '' || $stderr =~ /deadlock detected/;
	$deadlocks++ if $stderr ne '';

	foreach (1 .. 100)
	{
		($result, $stdout, $stderr) = $node->psql('app', $drop);
		last unless $stderr =~ /deadlock detected/;
		$deadlocks++;
	}
	last unless $stderr eq '';
	$done++;
}
note sprintf('%d cycles in %.1f s, %d deadlocks', $done, time - $start, $deadlocks);
is($done, $cycles, "$cycles times created and dropped under load") or diag($stderr);
my $alive = 0;
foreach my $client (@clients)
{
	$alive += grep { $_ eq 'alive' } finish_psql($client);
	unlike($client->{stderr}, qr/server closed the connection|internal|cache lookup|could not (open relation|find)|unrecognized/,
		"errors of \"$client->{name}\" are those of something that is not there");
}
is($alive, scalar @clients, 'all clients keep their connections');
ok(no_workers($node) && no_dispatchers($node), 'no worker stays behind');
$node->safe_psql('app', "BEGIN; $use COMMIT;");
is_settled($node, 'app', 'p', 'at last it works');
consumer_ok($node, 'app', 'c', 'lag_events = 0', 'handlers too');
unlike_log(
	$node,
	qr/PANIC|TRAP|was terminated by signal|obix (worker|dispatcher|launcher)" \(PID \d+\) exited with exit code [^01]|cache lookup failed|could not open relation with OID/,
	'nothing has crashed', $offset);

#
# Terminated while they start, 0 to 50 ms after.  Those that fail have their
# database wait, for longer each time: so there are several.
#
my @databases = map { "db$_" } (1 .. 12);
$node->safe_psql('postgres', join '', map { "CREATE DATABASE $_ TEMPLATE app;\n" } @databases);
my $poke = join '',
  map { "\\c $_\nSELECT obix.publish('p', '1');\nBEGIN; INSERT INTO p (payload) VALUES ('1'); ROLLBACK;\n" }
  @databases;
$offset = log_offset($node);
$start = time;
my $killed = 0;
my $deadline = $start + $PostgreSQL::Test::Utils::timeout_default;
while ($killed < $kills && time < $deadline)
{
	# from the process list, where a worker shows before it has connected
	my $processes = processes_of($node);
	my @pids = grep { $processes->{$_} =~ /obix (worker|dispatcher)/ } sort keys %$processes;

	if (@pids)
	{
		usleep(1000 * ($killed % 51)) if $killed % 2;
		$killed += kill 'TERM', @pids;
	}
	else
	{
		$node->safe_psql('app', $poke);
	}
}
note sprintf('%d workers terminated in %.1f s', $killed, time - $start);
cmp_ok($killed, '>=', $kills, "$kills workers terminated while they start");
foreach my $db (@databases)
{
	is_settled($node, $db, 'p', "$db: then another does the work");
	consumer_ok($node, $db, 'c', 'lag_events = 0', "$db: and another calls handlers");
}
unlike_log($node, qr/PANIC|TRAP|was terminated by signal/, 'nothing has crashed', $offset);

$node->stop;
done_testing();
