
# Logical replication of an outbox: every event arrives once, whatever is done
# to its partitions; into another outbox, with readers and consumers there, and
# into a plain table, without placeholders.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($result, $stdout, $stderr);
my %logical = (init => { allows_streaming => 'logical' });
my $conf = "max_logical_replication_workers = 8\nmax_worker_processes = 16\n";
my $source =
  new_node('source', %logical, conf => $conf . "obix.auto_recover = off\n");
my $target = new_node('target', %logical, conf => $conf);

$source->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($source, 'app');
$target->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($target, 'app');
$target->safe_psql('postgres', 'CREATE DATABASE plain');
my $connstr = $source->connstr . ' dbname=app';

# Wait until there are no holes; rows may be stranded.
sub wait_until_filled
{
	my ($outbox) = @_;

	$source->poll_query_until('app',
		"SELECT high_water_mark = head FROM obix.outbox_status WHERE outbox = '$outbox'::regclass"
	) or die "outbox $outbox was not filled";
	return;
}

sub wait_for_targets
{
	$source->wait_for_catchup($_) foreach ('outbox', 'events');
	return;
}

# Strand rows in two gaps between partitions, some with payloads stored out of
# line, and recover them: those of one gap by making DEFAULT its partition, those
# of the other by moving them.
sub recover_two_gaps
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($outbox, $name) = @_;

	foreach my $count (30, 60)
	{
		publish_stranded($source, 'app', $outbox, $count);
		$source->safe_psql('app',
			"SELECT obix.publish('$outbox', (SELECT to_jsonb(string_agg(md5(g::text), '')) FROM generate_series(1, 1000) g))"
		);
		$source->safe_psql('app', "SELECT obix.ensure_partitions('$outbox')");
	}
	is( $source->safe_psql('app', qq{
SELECT count(DISTINCT (SELECT min(p.from_sequence) FROM obix.partition_status p WHERE p.outbox = '$outbox'::regclass AND p.from_sequence > sequence))
FROM ${outbox}_default}),
		'2',
		"$name: rows are stranded in two gaps");
	$source->safe_psql('app', "SELECT obix.recover_default('$outbox')");
	is($source->safe_psql('app', "SELECT count(*) FROM ${outbox}_default"),
		'0', "$name: and brought out of DEFAULT");
	return;
}

my $content =
  q{SELECT count(*), min(sequence), max(sequence), md5(string_agg(sequence || ':' || id || coalesce(payload::text, ''), ' ' ORDER BY sequence)) FROM o};
my $events = "$content WHERE payload IS NOT NULL";

sub is_same
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name) = @_;

	wait_for_targets();
	is( $target->safe_psql('app', $content),
		$source->safe_psql('app', $content),
		"$name: the outbox there has the same rows");
	is( $target->safe_psql('app', q{SELECT count(*), max(sequence) FROM obix.read('o', max_events => 100000)}),
		$source->safe_psql('app', q{SELECT count(*), max(sequence) FROM obix.read('o', max_events => 100000)}),
		"$name: readers there get as many");
	return;
}

#
# The initial copy, of an outbox whose first events have been removed
#
$source->safe_psql('app',
	q{SELECT obix.create_outbox('o', partition_width => 20, premake => 2)});
publish($source, 'app', 'o', 45);
roll_back_inserts($source, 'app', 'o', 2);
wait_until_filled('o');
$source->safe_psql('app', 'DROP TABLE o_p0');
my $resolved = $source->safe_psql('app',
	q{SELECT resolved FROM obix.outbox_status WHERE outbox = 'o'::regclass});
cmp_ok($resolved, '>=', 19, 'the publisher knows what it has removed');

$source->safe_psql(
	'app', q{
CREATE PUBLICATION outbox FOR TABLE o WITH (publish_via_partition_root = true);
CREATE PUBLICATION events FOR TABLE o WHERE (payload IS NOT NULL)
	WITH (publish = 'insert', publish_via_partition_root = true)});
$target->safe_psql(
	'app', qq{
SELECT obix.create_outbox('o', partition_width => 15, premake => 2);
SELECT obix.create_outbox('own')});
$target->safe_psql('app',
	qq{CREATE SUBSCRIPTION outbox CONNECTION '$connstr' PUBLICATION outbox WITH (enabled = false, two_phase = true, streaming = on)}
);
my $set_resolved = "SELECT obix.alter_outbox('o', resolved => $resolved)";
($result, $stdout, $stderr) = $target->psql('app', $set_resolved);
like( $stderr,
	qr/ERROR:  could not set the resolved position of outbox "o"\nDETAIL:  Its subscription has not copied yet what was there before\.\nHINT:  Try again later\./,
	'before the copy, the resolved position cannot be set');
$target->safe_psql('app', 'ALTER SUBSCRIPTION outbox ENABLE');

my $columns =
  'sequence bigint PRIMARY KEY, id uuid, type text, key text, payload jsonb, headers jsonb, recorded_at timestamptz';
$target->safe_psql('plain',
	"CREATE TABLE o ($columns, arrival bigint GENERATED ALWAYS AS IDENTITY)");
$target->safe_psql('plain',
	qq{CREATE SUBSCRIPTION events CONNECTION '$connstr' PUBLICATION events});
$target->wait_for_subscription_sync($source, 'outbox', 'app');
$target->wait_for_subscription_sync($source, 'events', 'plain');

is($target->safe_psql('app', $content), $source->safe_psql('app', $content),
	'what is there is copied');
is($target->safe_psql('plain', $events), $source->safe_psql('app', $events),
	'without placeholders into the plain table');
is( $target->safe_psql('app',
		q{SELECT count(*), obix.high_water_mark('o') FROM obix.read('o', max_events => 100000)}),
	'0|0',
	'the subscriber cannot know that the first events will not come');
$target->safe_psql('app', "BEGIN; $set_resolved; ROLLBACK");
is($target->safe_psql('app', q{SELECT count(*) FROM obix.read('o', max_events => 100000)}),
	'0', 'nor does it once that is rolled back');
$target->safe_psql('app', $set_resolved);
is( $target->safe_psql('app',
		q{SELECT min(sequence), max(sequence), obix.high_water_mark('o') FROM obix.read('o', max_events => 100000)}),
	'20|47|47',
	'until it is told');
($result, $stdout, $stderr) =
  $target->psql('app', q{SELECT obix.alter_outbox('o', resolved => 18)});
like( $stderr,
	qr/ERROR:  resolved must be between \d+ and 9223372036854775805\nDETAIL:  It only rises, and 18 was given\./,
	'the resolved position does not go back');
($result, $stdout, $stderr) =
  $target->psql('app', q{SELECT obix.alter_outbox('own', resolved => 18)});
like( $stderr,
	qr/ERROR:  cannot set the resolved position of outbox "own"\nDETAIL:  No subscription writes to it, so obix knows by itself what is still to come\./,
	'that of an outbox without a subscription cannot be set');

#
# Whoever reads there
#
$target->safe_psql('app', 'CREATE TABLE test.effect (sequence bigint PRIMARY KEY)');
make_handler($target, 'app', 'handle',
	q{INSERT INTO test.effect VALUES (e.sequence);});
$target->safe_psql('app',
	q{SELECT obix.create_consumer('handled', 'o', handler => 'test.handle')});
my $reader = start_psql($target, 'app', 'reader',
	"CALL test.consume('reader', 'o', 19);\n\\echo stopped\n");

#
# Load, through premade partitions, with rollbacks
#
finish_pgbench(
	start_pgbench(
		$source, 'app', 'load',
		'-c 4 -j 2 -t 60',
		{
			'publish@3' => "SELECT obix.publish('o', '1');\n",
			'insert@2'  => "INSERT INTO o (payload) VALUES ('1');\n",
			'rollback@1' =>
			  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
		}));
wait_until_filled('o');
is_same('load');

# What one session does one after the other arrives in that order.
my $serial = $source->safe_psql('app', 'SELECT max(sequence) FROM o');
$source->safe_psql('app',
	join("\n", map { "SELECT obix.publish('o', '$_');" } (1 .. 30)));
wait_for_targets();
is( $target->safe_psql('plain',
		"SELECT string_agg(payload::text, ' ' ORDER BY arrival) FROM o WHERE sequence > $serial"),
	join(' ', 1 .. 30),
	'events of one session after the other arrive in order');

#
# DEFAULT recovery
#
publish_stranded($source, 'app', 'o', 50);
cmp_ok($source->safe_psql('app', 'SELECT count(*) FROM o_default'),
	'>', 20, 'promotion: rows are stranded');
is_same('promotion, before');
$source->safe_psql('app', q{SELECT obix.recover_default('o')});
is($source->safe_psql('app', 'SELECT count(*) FROM o_default'),
	'0', 'promotion: and brought out of DEFAULT');
publish($source, 'app', 'o', 3);
is_same('promotion');
recover_two_gaps('o', 'move');
publish($source, 'app', 'o', 3);
is_same('move');

#
# A transaction that is prepared on both
#
my $before = $source->safe_psql('app', 'SELECT max(sequence) FROM o');
$source->safe_psql('app',
	q{BEGIN; SELECT obix.publish('o', '"prepared"'); PREPARE TRANSACTION 'p'});
publish($source, 'app', 'o', 2);
wait_for_targets();
is($target->safe_psql('app', 'SELECT count(*) FROM pg_prepared_xacts'),
	'1', 'it is prepared there too');
is( $target->safe_psql('app',
		q{SELECT max(sequence), obix.high_water_mark('o') FROM obix.read('o', max_events => 100000)}),
	"$before|$before",
	'readers there stop before it');
$source->safe_psql('app', q{COMMIT PREPARED 'p'});
is_same('prepared');

#
# UPDATE, to redact
#
$source->safe_psql('app',
	"UPDATE o SET payload = '\"redacted\"' WHERE sequence = $before");
wait_for_targets();
is($target->safe_psql('app', "SELECT payload FROM o WHERE sequence = $before"),
	'"redacted"', 'a payload that is redacted is so there');
isnt($target->safe_psql('plain', "SELECT payload FROM o WHERE sequence = $before"),
	'"redacted"', 'but where only insertions are published');

#
# The end
#
$source->safe_psql('app', q{SELECT obix.publish('o', '0', 'stop')});
is_deeply([ finish_psql($reader) ], ['stopped'],
	'a reader there saw no hole, no duplicate and no other order')
  or diag($reader->{stderr});
is( $target->safe_psql('app',
		q{SELECT count(*) FROM o FULL JOIN test.delivered d USING (sequence, id) WHERE o.recorded_at IS NULL OR d.reader IS NULL}),
	'0', 'and was given everything');
consumer_ok($target, 'app', 'handled', 'lag_events = 0',
	'handlers there are called');
is( $target->safe_psql('app',
		q{SELECT count(*) FROM (SELECT * FROM o WHERE payload IS NOT NULL) o FULL JOIN test.effect e USING (sequence) WHERE o.id IS NULL OR e IS NULL}),
	'0', 'for every event');
is( $target->safe_psql('plain', 'SELECT count(*), count(DISTINCT id) FROM o'),
	$source->safe_psql('app', 'SELECT count(*), count(*) FROM o WHERE payload IS NOT NULL'),
	'the plain table has every event');

#
# TRUNCATE, with sequences at the head that nobody will ever fill
#
$source->safe_psql(
	'app', q{
BEGIN;
SAVEPOINT s;
INSERT INTO o (payload) VALUES ('1'), ('2');
ROLLBACK TO s;
TRUNCATE o;
COMMIT});
my $head = $source->safe_psql('app',
	q{SELECT head FROM obix.outbox_status WHERE outbox = 'o'::regclass});
wait_for_targets();
is( $target->safe_psql('app',
		q{SELECT count(*), (SELECT head FROM obix.outbox_status WHERE outbox = 'o'::regclass) FROM o}),
	"0|$head",
	'TRUNCATE empties it there too, and the head is the same');
publish($source, 'app', 'o', 3);
is_same('after TRUNCATE');
is( $target->safe_psql('app', q{SELECT min(sequence), count(*) FROM obix.read('o', max_events => 100000)}),
	($head + 1) . '|3', 'readers there go on with what follows');
cmp_ok($target->safe_psql('plain', 'SELECT count(*) FROM o'),
	'>', 200, 'where only insertions are published, nothing is removed');

unlike_log($_, qr/ERROR.*(obix|logical)|PANIC|TRAP/, 'no error on ' . $_->name)
  foreach ($source, $target);

#
# REPLICA IDENTITY: partitions have that of the outbox, and no maintenance needs
# one, not even with a row filter that forbids UPDATE and DELETE
#
$source->safe_psql(
	'app', q{
SELECT obix.create_outbox('i', partition_width => 20, premake => 2);
CREATE UNIQUE INDEX i_key ON i (sequence, id);
CREATE PUBLICATION awkward FOR TABLE i WHERE (payload IS NOT NULL) WITH (publish_via_partition_root = true)}
);
publish($source, 'app', 'i', 1);
($result, $stdout, $stderr) =
  $source->psql('app', q{UPDATE i SET payload = '0'});
like($stderr, qr/ERROR:  cannot update table "i_p0"/,
	'with such a filter, UPDATE is refused');
foreach my $case (
	[ 'd', 'DEFAULT' ],
	[ 'f', 'FULL' ],
	[ 'i', 'USING INDEX i_key' ],
	[ 'n', 'NOTHING' ])
{
	my ($letter, $identity) = @$case;
	my $there = $source->safe_psql('app',
		q{SELECT array_agg(partition::oid) FILTER (WHERE from_sequence IS NOT NULL) FROM obix.partition_status WHERE outbox = 'i'::regclass}
	);

	$source->safe_psql('app', "ALTER TABLE i REPLICA IDENTITY $identity");
	recover_two_gaps('i', $identity);
	is( $source->safe_psql(
			'app', qq{
SELECT string_agg(DISTINCT c.relreplident::text, ''), count(*) FILTER (WHERE p.from_sequence IS NULL), count(*) > 4,
	   count(*) FILTER (WHERE c.relreplident = 'i' AND NOT EXISTS (SELECT FROM pg_index x JOIN pg_inherits h ON h.inhrelid = x.indexrelid WHERE x.indrelid = c.oid AND x.indisreplident AND h.inhparent = 'i_key'::regclass))
FROM obix.partition_status p JOIN pg_class c ON c.oid = p.partition
WHERE p.outbox = 'i'::regclass AND p.partition::oid <> ALL ('$there')}),
		"$letter|1|t|0",
		"$identity: so is that of partitions that are new, promoted, filled, and of DEFAULT");
}

#
# Without publish_via_partition_root, partitions are replicated one by one
#
$source->safe_psql(
	'app', q{
SELECT obix.create_outbox('w', partition_width => 10, premake => 1);
CREATE PUBLICATION partitions FOR TABLE w});
publish($source, 'app', 'w', 5);

my %known = map { $_ => 1 } split /\n/,
  $source->safe_psql('app',
	q{SELECT partition FROM obix.partition_status WHERE outbox = 'w'::regclass});
$target->safe_psql('plain', "CREATE TABLE $_ ($columns)") foreach keys %known;
$target->safe_psql('plain',
	qq{CREATE SUBSCRIPTION partitions CONNECTION '$connstr' PUBLICATION partitions});
$target->wait_for_subscription_sync($source, 'partitions', 'plain');
publish($source, 'app', 'w', 5);
$source->wait_for_catchup('partitions');
is( $target->safe_psql('plain',
		'SELECT (SELECT count(*) FROM w_p0), (SELECT count(*) FROM w_p10)'),
	'9|1',
	'without publish_via_partition_root, events go to tables named as the partitions');

my $offset = log_offset($target);
$source->poll_query_until('app',
	q{SELECT runway >= 10 FROM obix.outbox_status WHERE outbox = 'w'::regclass});
publish($source, 'app', 'w', 30);
$target->wait_for_log(
	qr/logical replication target relation "public.w_p\d+" does not exist/,
	$offset);
pass('replication stops at a partition that has no such table');

# more than there are, for more are made meanwhile
my @new = grep { !$known{$_} } map { 'w_p' . 10 * $_ } (0 .. 100);
$target->safe_psql('plain',
	join("\n", map { "CREATE TABLE $_ ($columns);" } @new));
$target->safe_psql('plain', 'ALTER SUBSCRIPTION partitions REFRESH PUBLICATION');
$target->wait_for_subscription_sync($source, 'partitions', 'plain');
$source->wait_for_catchup('partitions');
is( $target->safe_psql(
		'plain',
		'SELECT count(*), count(DISTINCT id), max(sequence) FROM ('
		  . join(' UNION ALL ', map { "SELECT * FROM $_" } keys %known, @new)
		  . ') w'),
	'40|40|40',
	'and goes on when it is there');

$target->stop;
$source->stop;
done_testing();
