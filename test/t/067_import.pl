
# obix.import while it is interrupted, by whatever and whenever: what it has done
# stays, what it was doing leaves nothing behind, least of all placeholders where
# events are still to come, and it goes on when it is called again.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main');

setup_database($node, $db);

# Sequence 25 takes until an advisory lock is free.  Those before it that belong
# to another partition are written then, so there are rows in progress.
$node->safe_psql(
	$db, q{
CREATE TABLE test.source (id bigint PRIMARY KEY, payload jsonb, recorded_at timestamptz DEFAULT now());
INSERT INTO test.source SELECT n, to_jsonb(n) FROM generate_series(1, 100) n WHERE n % 10 <> 0;
CREATE FUNCTION test.pass(sequence bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF sequence = 25 THEN
		PERFORM pg_catalog.pg_advisory_xact_lock(1);
	END IF;
	RETURN true;
END $$});

sub create_outbox
{
	my ($outbox, $width) = @_;

	$node->safe_psql($db,
		"SELECT obix.create_outbox('$outbox', partition_width => $width, premake => 0);
ALTER TABLE $outbox ADD CHECK (test.pass(sequence));
SELECT obix.create_consumer('$outbox', '$outbox')");
	return;
}

# Start an import and return when it is in the middle of its second batch.
sub start_import
{
	my ($name, $outbox) = @_;
	my $run = start_psql($node, $db, $name,
		"CALL obix.import('$outbox', 'test.source', batch_size => 20);\n");

	$node->poll_query_until($db,
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE '%''$outbox''%' AND pid <> pg_backend_pid()"
	) or die 'the import does not get to its second batch';
	return $run;
}

sub import_pid
{
	my ($outbox) = @_;

	return $node->safe_psql($db,
		"SELECT pid FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE '%''$outbox''%'"
	);
}

sub position_of
{
	my ($outbox) = @_;

	return $node->safe_psql($db,
		"SELECT head, high_water_mark, suspect_from, resolved, in_flight FROM obix.outbox_status WHERE outbox = '$outbox'::regclass"
	);
}

foreach my $end ('terminated', 'crashed', 'failed')
{
	my $outbox = "o_$end";
	my $holder = $node->background_psql($db, on_error_stop => 0);
	my $run;

	create_outbox($outbox, 12);
	$node->safe_psql($db,
		'UPDATE test.source SET recorded_at = NULL WHERE id = 39')
	  if $end eq 'failed';
	$holder->query_safe('SELECT pg_advisory_lock(1)');
	$run = start_import($end, $outbox);

	# whoever comes now attaches, and finds rows in progress in the table
	is( $node->safe_psql(
			$db,
			"SELECT count(*), max(sequence) FROM obix.read('$outbox'); SELECT count(*), max(sequence) FROM obix.fetch('$outbox')"
		),
		"20|20\n18|19",
		"$end: readers and consumers have the first batch");
	is(position_of($outbox), '40|20||20|1', "$end: the second is in flight");

	if ($end eq 'crashed')
	{
		crash($node);
		eval { $holder->quit };
		$node->start;
	}
	else
	{
		my $pid = import_pid($outbox);

		$node->safe_psql($db, "SELECT pg_terminate_backend($pid)") if $end eq 'terminated';
		$holder->query_safe('SELECT pg_advisory_unlock(1)') if $end eq 'failed';
	}
	finish_psql($run);
	isnt($run->{handle}->full_result(0), 0, "$end: the call has failed");
	eval { $holder->quit } unless $end eq 'crashed';
	if ($end eq 'failed')
	{
		like($run->{stderr}, qr/import of row 39 of "source"/, "$end: the error names the row");
		$node->safe_psql($db,
			'UPDATE test.source SET recorded_at = now() WHERE id = 39');
	}

	is($node->safe_psql($db, "SELECT obix.fill_gaps('$outbox')"),
		'0', "$end: nothing is to be filled");
	is(position_of($outbox), '20|20||20|0', "$end: as if it had ended after the first batch");
	is($node->safe_psql($db, "SELECT count(*), max(sequence) FROM $outbox"),
		'20|20', "$end: the table has no more");

	$node->safe_psql($db, "CALL obix.import('$outbox', 'test.source', batch_size => 7)");
	is(walk($node, $db, $outbox), '99|9|99', "$end: called again, it goes on to the end");
	is( $node->safe_psql(
			$db,
			"SELECT count(*) FROM $outbox o JOIN test.source s ON o.sequence = s.id AND o.payload = s.payload AND o.recorded_at = s.recorded_at"
		),
		'90',
		"$end: every event is what it was");
	is( $node->safe_psql(
			$db,
			"SELECT count(*) FROM ${outbox}_default"
		),
		'0',
		"$end: no row went to DEFAULT");
	is( $node->safe_psql($db, "SELECT count(*), max(sequence) FROM obix.fetch('$outbox', 1000)"),
		'90|99',
		"$end: the consumer has them all");
	is( $node->safe_psql($db, "SELECT obix.publish('$outbox', '100') IS NOT NULL; SELECT max(sequence) FROM obix.read('$outbox')"),
		"t\n100",
		"$end: what is published comes after that");
}

#
# Somebody publishes in the midst of it: he waits for the batch, and the import is
# told.  Nothing is lost of either.
#
my $holder = $node->background_psql($db);
create_outbox('o', 1000);
$holder->query_safe('SELECT pg_advisory_lock(1)');
my $run       = start_import('published', 'o');
my $publisher = start_psql($node, $db, 'publisher', "SELECT obix.publish('o', '1') IS NOT NULL;\n");
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'relation' AND query LIKE '%publish%' AND pid <> pg_backend_pid()}
) or die 'the publisher does not wait';
$node->poll_query_until($db,
	q{SELECT query_start < clock_timestamp() - interval '1 s' FROM pg_stat_activity WHERE wait_event = 'advisory'}
);
is( $node->safe_psql(
		$db,
		q{SELECT outbox, operation, phase, done, total, started_at < clock_timestamp() - interval '1 s' FROM obix.progress WHERE operation = 'import'}
	),
	'o|import|copying rows|39|99|t',
	'a view shows how far the import is');
$holder->query_safe('SELECT pg_advisory_unlock(1)');
is(join('', finish_psql($publisher)), 't', 'a publisher waits for a batch');
finish_psql($run);
like(
	$run->{stderr},
	qr/ERROR:  outbox "o" is published to while it is imported into\n.*DETAIL:  Sequences up to 41 have been given out.\n.*HINT:  Import into an outbox of its own/s,
	'and the import is told');
like(
	$run->{stderr},
	qr/NOTICE:  import into outbox "o": sequence 40 of 99/,
	'whoever calls is told once a second how far it is');
is(walk($node, $db, 'o'), '41|4|41', 'nothing is lost');
$holder->quit;

# A subscriber has its events from elsewhere.
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('s', partition_width => 1000, premake => 0);
CREATE PUBLICATION p FOR TABLE s WITH (publish_via_partition_root = true);
CREATE SUBSCRIPTION sub CONNECTION 'dbname=postgres' PUBLICATION p WITH (connect = false)});
$node->safe_psql(
	$db, q{
INSERT INTO pg_subscription_rel SELECT oid, 's'::regclass, 'i', NULL FROM pg_subscription WHERE subname = 'sub'});
my ($result, $stdout, $stderr) = $node->psql($db, q{CALL obix.import('s', 'test.source')});
like($stderr, qr/ERROR:  cannot import into outbox "s"\n.*DETAIL:  A subscription writes to it\./s, 'not where a subscription writes');

$node->stop;
done_testing();
