
# obix.import from a table that is in use.  What was being written when it began
# is waited for; and the switch of applications that never stop loses nothing,
# repeats nothing, and fails nobody.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main', conf => "track_activities = on\n");

setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE SCHEMA app;
CREATE TABLE app.outbox (id bigserial PRIMARY KEY, event_type text NOT NULL, aggregate_id text,
	payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now());
CREATE VIEW test.as_view AS SELECT * FROM app.outbox;
INSERT INTO app.outbox (event_type, payload) SELECT 'old', '1' FROM generate_series(1, 10)});

sub import_waits
{
	my ($outbox) = @_;

	return poll_ok(
		$node, $db,
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'virtualxid' AND backend_xmin IS NULL AND query LIKE 'CALL%''$outbox''%'",
		"$outbox: the import waits for a writer, without a snapshot");
}

#
# A writer with a lower sequence commits later than one with a higher
#
foreach my $source ('app.outbox', 'test.as_view')
{
	my $outbox = $source =~ s/.*\.//r;
	my $writer = $node->background_psql($db);

	$node->safe_psql($db, "SELECT obix.create_outbox('$outbox')");
	$writer->query_safe(
		q{BEGIN; INSERT INTO app.outbox (event_type, payload) VALUES ('slow', '1')});
	$node->safe_psql($db,
		q{INSERT INTO app.outbox (event_type, payload) VALUES ('fast', '1')});
	my $run =
	  start_psql($node, $db, $outbox, "CALL obix.import('$outbox', '$source');\n");
	import_waits($outbox);

	# what comes now is not waited for, and others can write
	my $later = $node->background_psql($db);
	$later->query_safe(
		q{BEGIN; INSERT INTO app.outbox (event_type, payload) VALUES ('later', '1')});
	$writer->query_safe('COMMIT');
	finish_psql($run);
	is($run->{handle}->full_result(0), 0, "$outbox: then it ends");
	$later->query_safe('ROLLBACK');
	is( $node->safe_psql(
			$db,
			"SELECT (SELECT count(*) FROM $outbox WHERE payload IS NULL), (SELECT count(*) FROM app.outbox WHERE id <= (SELECT max(sequence) FROM $outbox)) - (SELECT count(payload) FROM $outbox), (SELECT string_agg(type, ' ' ORDER BY sequence) FROM (SELECT * FROM $outbox ORDER BY sequence DESC LIMIT 2) x)"
		),
		($source eq 'app.outbox' ? 0 : 1) . '|0|slow fast',
		"$outbox: the slow one is there");
	$_->quit foreach ($writer, $later);
}

# One that has been prepared is waited for as well.
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('prepared');
BEGIN; INSERT INTO app.outbox (event_type, payload) VALUES ('prepared', '1'); PREPARE TRANSACTION 'slow';
INSERT INTO app.outbox (event_type, payload) VALUES ('fast', '1')});
my $run = start_psql($node, $db, 'prepared', "CALL obix.import('prepared', 'app.outbox');\n");
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'CALL%prepared%'}
) or die 'the import does not wait';
$node->safe_psql($db, q{COMMIT PREPARED 'slow'});
finish_psql($run);
is( $node->safe_psql($db,
		q{SELECT string_agg(type, ' ' ORDER BY sequence) FROM (SELECT * FROM prepared ORDER BY sequence DESC LIMIT 2) x}),
	'prepared fast',
	'a prepared transaction is waited for');

#
# The switch, while applications write, and roll back, without a pause.  Each
# notes what it has written in the same transaction.
#
$node->safe_psql(
	$db, q{
DROP VIEW test.as_view;
CREATE TABLE test.written (token uuid PRIMARY KEY);
CREATE TABLE test.handled (sequence bigint PRIMARY KEY, token text);
TRUNCATE app.outbox;
SELECT obix.create_outbox('app.orders', partition_width => 500, premake => 2)});
make_handler($node, $db, 'handle', q{INSERT INTO test.handled VALUES (e.sequence, e.payload->>'token');});
$node->safe_psql($db, q{SELECT obix.create_consumer('live', 'app.orders', handler => 'test.handle')});
my $write = q{
BEGIN;
SELECT gen_random_uuid() AS token \gset
INSERT INTO app.outbox (event_type, aggregate_id, payload) VALUES ('t', 'a', jsonb_build_object('token', :token::text));
INSERT INTO test.written VALUES (:token::uuid);
};
my $load = start_pgbench($node, $db, 'load', '-c 4 -j 1 -T 3600 -M prepared',
	{ 'commit@9' => $write . "COMMIT;\n", 'rollback@1' => $write . "ROLLBACK;\n" });

# beforehand, a few times
foreach my $events (200, 500)
{
	$node->poll_query_until($db, "SELECT count(*) > $events FROM app.outbox")
	  or die 'nothing is written';
	$node->safe_psql($db, q{CALL obix.import('app.orders', 'app.outbox', batch_size => 100)});
}
$node->safe_psql(
	$db, q{
BEGIN;
LOCK TABLE app.outbox;
CALL obix.import('app.orders', 'app.outbox');
ALTER TABLE app.outbox RENAME TO outbox_old;
CREATE VIEW app.outbox AS
SELECT sequence AS id, type AS event_type, key AS aggregate_id, payload, recorded_at AS created_at
FROM app.orders WHERE payload IS NOT NULL;
COMMIT});
my $switched = $node->safe_psql($db, 'SELECT max(id) FROM app.outbox_old');
$node->poll_query_until($db, "SELECT max(sequence) > $switched + 200 FROM app.orders")
  or die 'nothing is published after the switch';
$load->{handle}->signal('INT');
finish_pgbench($load, may_fail => 1);
unlike($load->{stderr}, qr/error/i, 'no application has met an error');
$node->poll_query_until($db,
	q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pgbench'});
settle($node, $db, 'app.orders');

is( $node->safe_psql(
		$db,
		q{SELECT count(*), count(*) - count(w.token), count(*) - count(DISTINCT o.payload->>'token') FROM app.orders o FULL JOIN test.written w ON w.token::text = o.payload->>'token' WHERE o.payload IS NOT NULL OR w.token IS NOT NULL}
	),
	$node->safe_psql($db, q{SELECT count(*) FROM test.written}) . '|0|0',
	'every event is there once, and no other');
is( $node->safe_psql(
		$db,
		q{SELECT count(*) FROM app.outbox_old s LEFT JOIN app.orders o ON o.sequence = s.id AND o.payload = s.payload AND o.recorded_at = s.created_at WHERE o.sequence IS NULL}
	),
	'0',
	'those of the old table are where they were');
consumer_ok($node, $db, 'live', 'lag_events = 0', 'a consumer that was there before gets on');
is( $node->safe_psql($db, q{SELECT count(*), count(DISTINCT token) FROM test.handled}),
	$node->safe_psql($db, q{SELECT count(*), count(*) FROM test.written}),
	'and has been given all of them, once');

$node->stop;
done_testing();
