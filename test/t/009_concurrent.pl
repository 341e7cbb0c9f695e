
# Twenty sessions do the worker's work at once, beside the worker, with
# publishers: no error, no deadlock.

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
	qq{SELECT obix.create_outbox('$_', partition_width => 150, premake => 1)})
  foreach ('a', 'b');

my $maintenance = start_pgbench(
	$node,
	'postgres',
	'maintenance',
	'-c 20 -j 2 -t 40',
	{
		'ensure'   => "SELECT obix.ensure_partitions('a');\n",
		'ensure_b' => "SELECT obix.ensure_partitions('b');\n",
		'all@8'    => "SELECT obix.ensure_partitions();\n",
		'recover'  => "SELECT obix.recover_default('a');\n",
		'recover_b' => "SELECT obix.recover_default('b');\n",
		'fill'     => "SELECT obix.fill_gaps('a');\n",
		'fill_all' => "SELECT obix.fill_gaps();\n",
		'status' => "SELECT count(*) FROM obix.outbox_status, obix.partition_status;\n"
	});
my $publishers = start_pgbench(
	$node,
	'postgres',
	'publishers',
	'-c 6 -j 2 -t 800',
	{
		'publish@3' => "SELECT obix.publish('a', '1'), obix.publish('b', '1');\n",
		'insert@2'  => "INSERT INTO a (payload) VALUES ('1');\n",
		'rollback@2' =>
		  "BEGIN;\nINSERT INTO a (payload) VALUES ('1'), ('2');\nINSERT INTO b (payload) VALUES ('1');\nROLLBACK;\n",
		'mixed@2' =>
		  "BEGIN;\nINSERT INTO b (payload) VALUES ('1');\nSELECT obix.publish('a', '1');\nCOMMIT;\n",
		'read@1' =>
		  "SELECT count(*) FROM obix.read('a', 0) a, obix.read('b', 0, 1) b;\n"
	});
finish_pgbench($publishers);
finish_pgbench($maintenance);
note sprintf('longest transaction of a publisher: %.0f ms',
	max_latency($publishers));
note sprintf('longest call of maintenance: %.0f ms',
	max_latency($maintenance));

foreach my $outbox ('a', 'b')
{
	is_settled($node, 'postgres', $outbox, "outbox $outbox is settled");
	like(
		walk($node, 'postgres', $outbox),
		qr/^(\d+)\|\d+\|\1$/,
		'and contiguous');
	is($node->safe_psql('postgres', "SELECT count(*) FROM ${outbox}_default"),
		'0', 'its DEFAULT is empty');
	is( $node->safe_psql(
			'postgres',
			"SELECT count(*) FROM obix.partition_status p JOIN obix.partition_status q
ON q.outbox = p.outbox AND q.partition <> p.partition AND q.from_sequence < p.to_sequence AND p.from_sequence < q.to_sequence
WHERE p.outbox = '$outbox'::regclass"
		),
		'0',
		'no two partitions overlap');
}
unlike_log($node, qr/ERROR|FATAL|PANIC|deadlock/, 'no error, no deadlock');

$node->stop;
done_testing();
