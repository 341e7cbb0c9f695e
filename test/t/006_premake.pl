
# Partitions are made ahead, driven by the head: the timer is at an hour.
# Automatic recovery is off, so that a row that ever went to DEFAULT is still
# there at the end.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main',
	conf => "obix.auto_recover = off\nmax_wal_size = '4GB'\n");

setup_database($node, 'postgres');

#
# 50,000 events into partitions of 1,000
#
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 1000)});

# At a pace that no timer could follow, and that leaves a loaded machine time to
# run the worker at all: a partition every 200 ms.
my $start = time;
finish_pgbench(
	start_pgbench(
		$node, 'postgres', 'small', '-c 8 -j 2 -t 6250 -R 5000',
		{ 'publish' => "SELECT obix.publish('o', '1');\n" }));
note sprintf('50,000 events in %.1f s', time - $start);
is($node->safe_psql('postgres', 'SELECT count(*) FROM o_default'),
	'0', 'DEFAULT stays empty');
is(walk($node, 'postgres', 'o'), '50000|0|50000', 'nothing is missing');
poll_ok(
	$node, 'postgres',
	q{SELECT max(from_sequence) >= 55000 FROM obix.partition_status WHERE outbox = 'o'::regclass},
	'at least five partitions are ready ahead of that with the head');
ok(no_workers($node), 'the worker leaves when all is done');

# A new outbox gets its partitions without an event.
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('fresh', partition_width => 10, premake => 3)});
poll_ok(
	$node, 'postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'fresh_p30')},
	'a new outbox gets its runway');
no_workers($node);
publish($node, 'postgres', 'fresh', 10);
poll_ok(
	$node, 'postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'fresh_p40')},
	'a crossing, in silence after that, makes the next partition');
$node->safe_psql('postgres', q{SELECT obix.alter_outbox('fresh', premake => 5)});
poll_ok(
	$node, 'postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'fresh_p60')},
	'a longer runway is made when it is asked for');

#
# A session that has published and idles holds nobody up
#
foreach my $by ('call', 'worker')
{
	my $outbox  = "idle_$by";
	my $session = $node->background_psql('postgres');
	my $blocker = $node->background_psql('postgres');

	$node->safe_psql('postgres',
		"SELECT obix.create_outbox('$outbox', partition_width => 10, premake => 1)"
	);
	# who reads DEFAULT keeps partitions from being attached: strand some rows
	$node->poll_query_until('postgres',
		"SELECT EXISTS (SELECT FROM pg_class WHERE relname = '${outbox}_p10')");
	no_workers($node);
	$blocker->query_safe("BEGIN; SELECT count(*) FROM ${outbox}_default");
	$session->query_safe(
		"BEGIN; SELECT obix.publish('$outbox', '\"idle\"')");
	publish($node, 'postgres', $outbox, 34);
	is( $node->safe_psql(
			'postgres', "SELECT count(*) FROM ${outbox}_default"),
		'15',
		'rows are stranded in DEFAULT');
	$blocker->query_safe('COMMIT');

	if ($by eq 'call')
	{
		is( $node->safe_psql(
				'postgres',
				"SET statement_timeout = '20 s'; SELECT obix.recover_default('$outbox')"
			),
			'15',
			'recover_default works beside a session that has published');
		$node->safe_psql('postgres',
			"SET statement_timeout = '20 s'; SELECT obix.ensure_partitions('$outbox')"
		);
	}
	else
	{
		$node->safe_psql('postgres',
			q{ALTER SYSTEM SET obix.auto_recover = on});
		$node->reload;
	}
	poll_ok($node, 'postgres',
		"SELECT runway >= 10 AND stranded = 0 AND (SELECT count(*) = 0 FROM ${outbox}_default) FROM obix.outbox_status WHERE outbox = '$outbox'::regclass",
		"maintenance by $by is not held up");
	$session->query_safe('COMMIT');
	is( $node->safe_psql(
			'postgres',
			"SELECT sequence, payload, sequence >= from_sequence AND sequence < to_sequence, partition <> '${outbox}_default'::regclass
FROM $outbox o JOIN obix.partition_status p ON p.partition = o.tableoid WHERE payload = '\"idle\"'"
		),
		'35|"idle"|t|t',
		'its event lands in the right partition');
	is(walk($node, 'postgres', $outbox), '35|0|35', 'nothing is missing');
	$_->quit foreach ($session, $blocker);
}

$node->stop;
done_testing();
