
# A session that has read the parent and idles in its transaction keeps
# partitions from being attached.  Publishers and other readers go on, the
# status names it, and maintenance catches up by itself when it ends.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');

setup_database($node, 'postgres');
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 500, premake => 2)});
$node->poll_query_until('postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'o_p1000')});
no_workers($node);

my $idler = $node->background_psql('postgres');
my $pid   = $idler->query_safe('SELECT pg_backend_pid()');
$idler->query_safe('BEGIN; SELECT count(*) FROM o');

# It never ends while these run: had they to wait for it, they would not end.
my $reader = start_psql($node, 'postgres', 'reader',
	"CALL test.consume('reader', 'o', 0);\n\\echo stopped\n");
my $load = start_pgbench(
	$node,
	'postgres',
	'blocked',
	'-c 4 -j 2 -t 1500',
	{
		'publish@3' => "SELECT obix.publish('o', '1');\n",
		'insert@1'  => "INSERT INTO o (payload) VALUES ('1');\n",
		'read@1' =>
		  "SELECT count(*) FROM o WHERE sequence BETWEEN 1400 AND 1600;\n",
		'walk@1' => "SELECT count(*) FROM obix.read('o', 0, 200);\n"
	});
$node->poll_query_until('postgres', 'SELECT max(sequence) > 1500 FROM o');
poll_ok(
	$node, 'postgres',
	"SELECT failures > 0 AND $pid = ANY (blocking_pids) AND retry_at IS NOT NULL FROM obix.outbox_status",
	'the status names the session that blocks');
note $node->safe_psql('postgres', 'SELECT last_error FROM obix.outbox_status');
$node->wait_for_log(qr/maintenance of outbox "o" failed/);
finish_pgbench($load);
note sprintf('longest transaction: %.0f ms', max_latency($load));
cmp_ok($node->safe_psql('postgres', 'SELECT count(*) FROM o_default'),
	'>', 0, 'past the runway events went to DEFAULT');
is( $node->safe_psql(
		'postgres', q{SELECT count(*) FROM obix.partition_status WHERE from_sequence > 1000}),
	'0',
	'no partition was made');

# A call gives up after a while, and leaves its session as any error does.
my ($result, $stdout, $stderr) = $node->psql(
	'postgres',
	q{SELECT obix.recover_default('o');
SELECT 'next'},
	on_error_stop => 0);
like($stderr, qr/ERROR:  could not obtain lock|ERROR:  canceling statement due to lock timeout/,
	'recover_default says what is in its way');
is($stdout, 'next', 'and its session goes on after the error');

# It ends; nobody publishes, nobody calls obix.
$idler->query_safe('COMMIT');
poll_ok(
	$node, 'postgres',
	q{SELECT (SELECT count(*) FROM o_default) = 0
AND EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
	WHERE pg_get_expr(c.relpartbound, c.oid) ~ 'FROM' AND
	(regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(\d+)'))[1]::bigint > (SELECT max(sequence) FROM o))},
	'premaking and recovery catch up by themselves');
is_settled($node, 'postgres', 'o', 'all is settled');
poll_ok($node, 'postgres',
	'SELECT failures = 0 AND blocking_pids IS NULL FROM obix.outbox_status',
	'and the status says so');
$node->safe_psql('postgres', q{SELECT obix.publish('o', '1', 'stop')});
is_deeply([ finish_psql($reader) ],
	['stopped'], 'a reader was given everything in order')
  or diag($reader->{stderr});

my $failures = log_count($node, qr/maintenance of outbox "o" failed/);
cmp_ok($failures, '<=', 2, 'failing again and again is logged once a kind');

#
# A prepared transaction
#
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('p', partition_width => 100, premake => 3)});
publish($node, 'postgres', 'p', 10);
$node->safe_psql('postgres',
	q{BEGIN; INSERT INTO p (payload) VALUES ('"prepared"'); PREPARE TRANSACTION 'holder'}
);
publish($node, 'postgres', 'p', 100);
poll_ok($node, 'postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'p_p400')},
	'it does not keep partitions from being made');
is($node->safe_psql('postgres', 'SELECT count(*) FROM p_default'),
	'0', 'so nothing goes to DEFAULT');

is(walk($node, 'postgres', 'p'), '10|0|10', 'readers stop there');
$node->safe_psql('postgres', q{COMMIT PREPARED 'holder'});
is_settled($node, 'postgres', 'p', 'and go on when it is committed');
is(walk($node, 'postgres', 'p'), '111|0|111', 'nothing is missing');

# One that has written to DEFAULT keeps that from being promoted.
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('q', partition_width => 100, premake => 3)});
$idler->query_safe('BEGIN; SELECT count(*) FROM q_default');
publish($node, 'postgres', 'q', 510);
$node->safe_psql('postgres',
	q{BEGIN; INSERT INTO q (payload) VALUES ('"prepared"'); PREPARE TRANSACTION 'stranded'}
);
$idler->query_safe('COMMIT');
poll_ok(
	$node, 'postgres',
	q{SELECT failures > 0 AND 'stranded' = ANY (blocking_gids) AND stranded > 0 FROM obix.outbox_status WHERE outbox = 'q'::regclass},
	'one that wrote to DEFAULT blocks, and the status names it');
publish($node, 'postgres', 'q', 10);
$node->safe_psql('postgres', q{COMMIT PREPARED 'stranded'});
is_settled($node, 'postgres', 'q', 'when it is committed, recovery catches up');
is(walk($node, 'postgres', 'q'), '521|0|521', 'and nothing is missing');

unlike_log($node, qr/PANIC|FATAL|deadlock detected/, 'no fault in the log');

$idler->quit;
$node->stop;
done_testing();
