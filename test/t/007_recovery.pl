
# Rows stranded in DEFAULT end in proper partitions, with publishers and
# readers running.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "obix.auto_recover = off\n");

setup_database($node, 'postgres');

# Publish while a session keeps partitions from being attached, so that what
# passes the runway is stranded.
sub publish_blocked
{
	my ($outbox, $count) = @_;
	my $blocker = $node->background_psql('postgres');

	$blocker->query_safe("BEGIN; SELECT count(*) FROM ${outbox}_default");
	publish($node, 'postgres', $outbox, $count);
	$blocker->query_safe('COMMIT');
	$blocker->quit;
}

# Every row is where the bounds of its partition say, and none in DEFAULT.
sub is_in_place
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($outbox) = @_;

	is( $node->safe_psql(
			'postgres',
			"SELECT count(*) FROM $outbox o LEFT JOIN obix.partition_status p
ON p.partition = o.tableoid AND o.sequence >= p.from_sequence AND o.sequence < p.to_sequence
WHERE p.partition IS NULL"
		),
		'0',
		"every row of $outbox is in a proper partition");
	is( $node->safe_psql(
			'postgres',
			"SELECT count(*) FROM (SELECT from_sequence, lag(to_sequence) OVER (ORDER BY from_sequence) AS previous
FROM obix.partition_status WHERE outbox = '$outbox'::regclass AND from_sequence IS NOT NULL) p
WHERE from_sequence < previous"
		),
		'0',
		'no two partitions overlap');
	is( $node->safe_psql(
			'postgres',
			"SELECT count(*) FROM pg_constraint k JOIN pg_inherits i ON i.inhrelid = k.conrelid
WHERE i.inhparent = '$outbox'::regclass AND k.contype = 'c'
AND k.conname NOT IN (SELECT conname FROM pg_constraint WHERE conrelid = '$outbox'::regclass)"
		),
		'0',
		'no helper constraint stays behind');
}

#
# By the worker, switched on under load
#
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 20000, premake => 1)});
$node->poll_query_until('postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'o_p20000')});
publish_blocked('o', 100000);
my $stranded = $node->safe_psql('postgres', 'SELECT count(*) FROM o_default');
cmp_ok($stranded, '>=', 40000, 'two widths are stranded');
like(
	$node->safe_psql('postgres',
		q{SELECT stranded >= 40000, runway <= 0 FROM obix.outbox_status}),
	qr/^t\|/,
	'the status tells it');

my $reader = start_psql($node, 'postgres', 'reader',
	"CALL test.consume('reader', 'o', 0);\n\\echo stopped\n");
my %load = (
	'publish@4' => "SELECT obix.publish('o', '1');\n",
	'both@2' =>
	  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nSELECT obix.publish('o', '1');\nCOMMIT;\n",
	'rollback@1' => "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n",
	'select@1' =>
	  "SELECT count(*) FROM o WHERE sequence BETWEEN 79990 AND 80009;\n");
my $publishers =
  start_pgbench($node, 'postgres', 'publishers', '-c 6 -j 2 -T 8', \%load);

$node->poll_query_until('postgres', 'SELECT max(sequence) > 100100 FROM o');
my $start = time;
$node->safe_psql('postgres', 'ALTER SYSTEM SET obix.auto_recover = on');
$node->reload;
poll_ok($node, 'postgres', 'SELECT stranded = 0 FROM obix.outbox_status',
	'the worker recovers under load');
note sprintf('recovered after %.1f s', time - $start);
finish_pgbench($publishers);
note sprintf('longest transaction of the load: %.0f ms',
	max_latency($publishers));
is_settled($node, 'postgres', 'o', 'and all is settled after it');
$node->safe_psql('postgres', q{SELECT obix.publish('o', '1', 'stop')});
is_deeply([ finish_psql($reader) ],
	['stopped'], 'a reader saw no hole, no duplicate and no other order')
  or diag($reader->{stderr});
is( $node->safe_psql(
		'postgres',
		q{SELECT count(*), count(*) FILTER (WHERE o.id IS DISTINCT FROM d.id)
FROM o FULL JOIN test.delivered d ON d.sequence = o.sequence}
	  ) =~ s/^\d+//r,
	'|0',
	'and was given everything');
is_in_place('o');
unlike_log($node, qr/ERROR|PANIC|TRAP|deadlock/, 'no error in the log');

#
# By a call; and rows in two gaps
#
$node->safe_psql('postgres', 'ALTER SYSTEM SET obix.auto_recover = off');
$node->reload;
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('gaps', partition_width => 100, premake => 1)});
$node->poll_query_until('postgres',
	q{SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'gaps_p100')});
publish_blocked('gaps', 350);
# past the stranded rows partitions can be made again; how far depends on the
# speed of the head
$node->safe_psql('postgres', q{SELECT obix.ensure_partitions('gaps')});
is( $node->safe_psql(
		'postgres',
		q{SELECT min(from_sequence) >= 400 FROM obix.partition_status WHERE outbox = 'gaps'::regclass AND from_sequence > 100}
	),
	't',
	'partitions are made past the stranded rows');
no_workers($node);
my $more = 150 + $node->safe_psql('postgres',
	q{SELECT runway FROM obix.outbox_status WHERE outbox = 'gaps'::regclass});
publish_blocked('gaps', $more);
is( $node->safe_psql(
		'postgres', q{SELECT count(DISTINCT (SELECT count(*) FROM obix.partition_status p
WHERE outbox = 'gaps'::regclass AND from_sequence <= d.sequence)) FROM gaps_default d}
	),
	'2',
	'rows are stranded in two gaps between partitions');
$stranded = $node->safe_psql('postgres', 'SELECT count(*) FROM gaps_default');

# Those who began to read before it commits do not see rows that it has moved,
# but see that they are there.
my @positions = split /\n/,
  $node->safe_psql('postgres',
	q{SELECT sequence || '|' || id FROM gaps_default WHERE sequence IN (SELECT min(sequence) FROM gaps_default UNION SELECT max(sequence) FROM gaps_default)}
  );
my $recovery = $node->background_psql('postgres');
is($recovery->query_safe(q{BEGIN; SELECT obix.recover_default('gaps')}),
	$stranded, 'recover_default brings back both');
my @readers;
foreach my $position (@positions)
{
	my ($sequence, $id) = split /\|/, $position;

	push @readers,
	  start_psql($node, 'postgres', "reader-$sequence",
		"SELECT count(*) >= 0 FROM obix.read('gaps', $sequence, after_id => '$id');\n");
}
poll_ok($node, 'postgres',
	q{SELECT count(*) = 2 FROM pg_stat_activity WHERE query LIKE '%after_id%' AND wait_event_type = 'Lock'},
	'readers wait for it');
$recovery->query_safe('COMMIT');
$recovery->quit;
is(join(' ', map { finish_psql($_) } @readers), 't t', 'then they read on')
  or diag(map { $_->{stderr} } @readers);
is($node->safe_psql('postgres', q{SELECT obix.recover_default('gaps')}),
	'0', 'and finds nothing more');
my $all = 350 + $more;
is(walk($node, 'postgres', 'gaps'), "$all|0|$all", 'nothing is missing');
is_in_place('gaps');
publish($node, 'postgres', 'gaps', 500);
$all += 500;
is(walk($node, 'postgres', 'gaps'), "$all|0|$all", 'publishing goes on');

# A row of a prepared transaction among the stranded ones: nothing is lost.
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('prepared', partition_width => 10, premake => 0)}
);
my $blocker = $node->background_psql('postgres');
$blocker->query_safe('BEGIN; SELECT count(*) FROM prepared_default');
publish($node, 'postgres', 'prepared', 20);
$node->safe_psql('postgres',
	q{BEGIN; INSERT INTO prepared (payload) VALUES ('"prepared"'); PREPARE TRANSACTION 'stranded'}
);
publish($node, 'postgres', 'prepared', 5);
$blocker->query_safe('COMMIT');
$blocker->quit;
$node->psql('postgres',
	q{SET statement_timeout = '2 s'; SELECT obix.recover_default('prepared')});
is(walk($node, 'postgres', 'prepared'),
	'20|0|20', 'readers stop at the prepared row');
$node->safe_psql('postgres', q{COMMIT PREPARED 'stranded'});
$node->safe_psql('postgres', q{SELECT obix.recover_default('prepared')});
is(walk($node, 'postgres', 'prepared'),
	'26|0|26', 'which is delivered once it is committed');
is_in_place('prepared');

$node->stop;
done_testing();
