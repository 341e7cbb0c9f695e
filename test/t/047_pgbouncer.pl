
# Everything works through a pooler that gives out connections for a
# transaction, or for a statement, at a time: PgBouncer, with far more clients
# than connections.  What waits takes a connection, and nothing else does.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($pgbouncer) =
  grep { -x $_ } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin', '/usr/local/sbin';
plan skip_all => 'PgBouncer is not installed' unless defined $pgbouncer;

my $node = new_node('main', conf => "client_connection_check_interval = '100 ms'\n");

$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');
$node->safe_psql(
	'app', q{
SELECT obix.create_outbox('o', partition_width => 1000);
SELECT obix.create_outbox('quiet');
CREATE TABLE test.applied (consumer text, sequence bigint, pid integer);
CREATE INDEX ON test.applied (consumer, sequence);
SELECT obix.create_consumer(c, 'o') FROM unnest('{transaction, lease, statement}'::text[]) c;});

# Pools of the same database: for work, for those who wait, and for single
# statements.
my $folder = PostgreSQL::Test::Utils::tempdir_short();
my $owner  = $node->safe_psql('postgres', 'SELECT current_user');
my ($version) = `$pgbouncer --version` =~ /PgBouncer (\d+\.\d+)/;
my $names_statements = $version =~ /^1\.(\d+)/ && $1 < 21 ? 0 : 1;
my $server = 'host=' . $node->host . ' port=' . $node->port . " dbname=app user=$owner";

append_to_file("$folder/pgbouncer.ini", <<INI);
[databases]
work = $server pool_size=4
waiters = $server pool_size=2
statements = $server pool_size=2 pool_mode=statement
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = $folder
auth_type = any
pool_mode = transaction
max_client_conn = 200
log_connections = 0
log_disconnections = 0
INI
append_to_file("$folder/pgbouncer.ini", "max_prepared_statements = 100\n") if $names_statements;
my $pooler_output = '';
my $pooler        = IPC::Run::start([ $pgbouncer, "$folder/pgbouncer.ini" ], '<', \undef, '>&', \$pooler_output);

END
{
	my $status = $?;

	$pooler->kill_kill if defined $pooler;
	$? = $status;
}

sub by_way_of
{
	my ($pool) = @_;

	return "host=$folder port=6432 dbname=$pool user=$owner";
}

sub pooled
{
	my ($pool, $query) = @_;
	my ($result, $stdout, $stderr) =
	  $node->psql('app', $query, connstr => by_way_of($pool), on_error_stop => 0);

	return ($stdout, $stderr);
}

my $up = 0;
foreach (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
{
	last if $up = (pooled('work', 'SELECT 1'))[0] eq '1';
	usleep(10_000);
}
ok($up, "PgBouncer $version answers") or diag($pooler_output);

#
# Twenty-four clients on four connections, by each protocol
#
my $apply =
  q{WITH e AS MATERIALIZED (SELECT sequence FROM %s), i AS (INSERT INTO test.applied SELECT '%s', sequence, pg_backend_pid() FROM e) SELECT count(*) AS n, coalesce(max(sequence), 0) AS last FROM e \gset};
my %scripts = (
	'publish@4' => "SELECT obix.publish('o', '1');\n",
	'insert@2' =>
	  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nSELECT obix.publish('o', '2');\nCOMMIT;\n",
	'roll_back@1' =>
	  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nSAVEPOINT s;\nSELECT obix.publish('o', '1');\nROLLBACK TO s;\nROLLBACK;\n",
	'read@1' =>
	  "SELECT count(*) FROM obix.read('o', greatest((SELECT max(sequence) - 20 FROM o), 0));\n",
	'transaction@3' => "BEGIN;\n"
	  . sprintf($apply, q{obix.fetch('transaction', 20, wait => true)}, 'transaction')
	  . "\n\\if :n > 0\nSELECT obix.ack('transaction', :last);\n\\endif\nCOMMIT;\n",
	'lease@3' => "SELECT coalesce(obix.acquire('lease', '10 min'), 0) AS token \\gset\n\\if :token > 0\n"
	  . sprintf($apply, q{obix.fetch('lease', 20, token => :token)}, 'lease')
	  . "\n\\if :n > 0\nSELECT obix.ack('lease', :last, token => :token);\n\\endif\n"
	  . "SELECT obix.release('lease', :token);\n\\endif\n");
my @protocols = ('simple', 'extended', $names_statements ? 'prepared' : ());

# A thread of pgbench that prepares a statement stands still, and with it those of
# its clients that have the connections: so each has its own then.
foreach my $protocol (@protocols)
{
	my $clients = $protocol eq 'prepared' ? '-c 4 -j 4 -t 100' : '-c 24 -j 2 -t 40';

	finish_pgbench(
		start_pgbench($node, by_way_of('work'), "clients_$protocol", "$clients -M $protocol",
			\%scripts));
}
my ($stdout, $stderr) = pooled('work',
	q{BEGIN; PREPARE p AS SELECT obix.publish('o', $1); EXECUTE p('1'); EXECUTE p('2'); DEALLOCATE p; COMMIT}
);
is($stderr, '', 'prepared statements of a transaction');

is_settled($node, 'app', 'o', 'holes are filled');

# Whoever comes last, on whichever connection, gets what is left.
my $drain = {
	'transaction' => $scripts{'transaction@3'},
	'lease'       => $scripts{'lease@3'}
};
foreach my $consumer (sort keys %$drain)
{
	foreach (1 .. 50)
	{
		last
		  if $node->safe_psql('app',
			"SELECT lag_events = 0 FROM obix.consumer_status WHERE consumer = '$consumer'") eq 't';
		finish_pgbench(
			start_pgbench($node, by_way_of('work'), 'drain', '-c 1 -t 20',
				{ $consumer => $drain->{$consumer} }));
	}
}
like(walk($node, 'app', 'o'), qr/^(\d+)\|\d+\|\1$/, 'all is contiguous');
foreach my $consumer (sort keys %$drain)
{
	is( $node->safe_psql(
			'app',
			"SELECT count(*) - count(DISTINCT sequence), count(*) - (SELECT count(*) FROM o WHERE payload IS NOT NULL) FROM test.applied WHERE consumer = '$consumer'"
		),
		'0|0',
		"each event once, to the consumer by $consumer");
}
my $connections = $node->safe_psql('app',
	"SELECT count(*) FROM pg_stat_activity WHERE datname = 'app' AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
);
ok($connections > 1 && $connections <= 4, "over $connections connections");

#
# Waiting takes a connection.  So it has a pool of its own.
#
my @waiting = map {
	start_psql($node, by_way_of('waiters'), "waiter$_",
		"CALL obix.wait('quiet', 0, '1 h');\nSELECT count(*) FROM obix.read('quiet', 0);\n")
} (1 .. 3);
my $waiting =
  q{SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait%' AND wait_event_type = 'Extension'};
$node->poll_query_until('postgres', $waiting, '2') or die 'nobody waits';
($stdout, $stderr) = pooled('work', q{SELECT obix.high_water_mark('quiet')});
is("$stdout$stderr", '0', 'others go on while all waiters wait');
is($node->safe_psql('postgres', $waiting), '2', 'two of three, for the pool has two');
pooled('work', q{SELECT obix.publish('quiet', '1')});
is_deeply([ map { finish_psql($_) } @waiting ], [ '1', '1', '1' ], 'all are woken, and read');
my $wait_for = start_psql($node, by_way_of('waiters'), 'wait_for', q{CALL obix.wait_for('statement', '1 h')});
finish_psql($wait_for);
is($wait_for->{handle}->full_result(0), 0, 'so are consumers');

# The connection of a client that goes away while it waits is ended as well, as
# soon as the server looks: client_connection_check_interval.
my $gone = start_psql($node, by_way_of('waiters'), 'gone', q{CALL obix.wait('quiet', 1, '1 h')});
$node->poll_query_until('postgres', $waiting, '1') or die 'nobody waits';
$gone->{handle}->kill_kill;
poll_ok($node, 'postgres', "SELECT ($waiting) = 0",
	'a client that goes away does not leave its connection waiting');

#
# A statement at a time
#
($stdout, $stderr) = pooled('statements', q{SELECT count(obix.publish('o', '1')) FROM generate_series(1, 3)});
is("$stdout$stderr", '3', 'publishing by single statements');
($stdout, $stderr) = pooled('statements', q{INSERT INTO o (payload) VALUES ('1')});
is($stderr, '', 'and by INSERT');
($stdout, $stderr) = pooled('statements',
	q{SELECT coalesce(obix.acquire('statement'), 0) AS token \gset
SELECT max(sequence) AS last, count(*) AS n FROM obix.fetch('statement', 100000, token => :token) \gset
SELECT obix.ack('statement', :last, token => :token);
SELECT obix.release('statement', :token);
SELECT :n = (SELECT count(*) FROM o WHERE payload IS NOT NULL);});
is($stderr, '', 'consuming with a lease by single statements');
like($stdout, qr/^t$/m, 'all events');
($stdout, $stderr) = pooled('statements', q{CALL obix.wait('o', 0, '1 h'); CALL obix.wait_for('statement', '10 ms')});
is($stderr, '', 'waiting as well');
consumer_ok($node, 'app', 'statement', 'lag_events = 0', 'which the database remembers');

unlike_log($node, qr/ERROR|PANIC|TRAP|was terminated by signal/, 'no error in the log');
$pooler->kill_kill;
undef $pooler;
$node->stop;
done_testing();
