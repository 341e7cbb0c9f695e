
# A rebuild replays every event into new tables while live delivery goes on, and
# puts them in the place of the live ones: the result is that of a fresh replay,
# each event being applied once on either side of the hand-over, also those
# whose publishers were in flight when it began.  It can be interrupted, by a
# cancel and by a crash, and goes on from there.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my $db   = 'postgres';

setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE SCHEMA app;
SET search_path = app;
SELECT obix.create_outbox('app.orders', partition_width => 1000000);

CREATE TABLE total (
	key text PRIMARY KEY,
	events bigint NOT NULL DEFAULT 0 CHECK (events > 0),
	amount bigint NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX total_amount ON total (amount);
GRANT SELECT ON total TO PUBLIC;

CREATE FUNCTION add_all(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO total AS t
	SELECT key, count(*), sum((payload)::bigint) FROM unnest(e) GROUP BY key
	ON CONFLICT (key) DO UPDATE SET events = t.events + EXCLUDED.events, amount = t.amount + EXCLUDED.amount;
END $$;

-- only a rebuild waits for the lock
CREATE FUNCTION add_all_slowly(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('search_path') LIKE 'obix_rebuild%' AND e[1].sequence > 1000 THEN
		PERFORM pg_advisory_xact_lock_shared(1);
	END IF;
	PERFORM add_all(e);
END $$;

SELECT obix.create_consumer('totals', 'app.orders', batch_handler => 'add_all', batch_size => 10000, tables => '{total}');
});

sub totals_query
{
	my ($outbox, $table) = @_;

	return qq{
SELECT count(*) = 0 FROM
(SELECT key, count(*), sum(payload::bigint) FROM $outbox WHERE payload IS NOT NULL GROUP BY key) a
FULL JOIN (SELECT * FROM $table) b (key, count, sum) USING (key, count, sum)
WHERE a.key IS NULL OR b.key IS NULL};
}

sub caught_up_query
{
	my ($consumer) = @_;

	return
	  "SELECT lag_events = 0 AND late_ranges = 0 FROM obix.consumer_status WHERE consumer = '$consumer'";
}

sub oid_of
{
	my ($table) = @_;

	return $node->safe_psql($db, "SELECT '$table'::regclass::oid");
}

# A million events, under load
$node->safe_psql($db,
	"SELECT count(obix.publish('app.orders', to_jsonb(g % 7), key => 'k' || g % 1000)) FROM generate_series(1, 1000000) g"
);
poll_ok($node, $db, caught_up_query('totals'), 'a million events are applied');

my $before  = oid_of('app.total');
my $publish = start_pgbench(
	$node, $db,
	'publish',
	'-c 4 -R 500 -T 12',
	{
		publish =>
		  "SELECT obix.publish('app.orders', to_jsonb(:client_id + 1), key => 'k' || (:client_id * 250));\n"
	});
my $read = start_pgbench($node, $db, 'read', '-c 2 -T 12',
	{ read => "SELECT sum(events) FROM app.total;\n" });
my $start = time;
my ($result, $stdout, $stderr) =
  $node->psql($db, "CALL obix.rebuild('totals')");
is($result, 0, 'a rebuild of a million events under load');
note sprintf('%.1f s; %s', time - $start, $stderr);
isnt(oid_of('app.total'), $before, 'the table is a new one');
finish_pgbench($publish);
finish_pgbench($read);
note sprintf('longest read %.0f ms, longest publish %.0f ms',
	max_latency($read), max_latency($publish));
poll_ok($node, $db, caught_up_query('totals'), 'live delivery goes on');
is($node->safe_psql($db, totals_query('app.orders', 'app.total')),
	't', 'the tables are those of a fresh replay');
is( $node->safe_psql(
		$db,
		"SELECT string_agg(indexrelid::regclass::text, ' ' ORDER BY indexrelid::regclass::text) FROM pg_index WHERE indrelid = 'app.total'::regclass"
	),
	'app.total_amount app.total_pkey',
	'indexes have their names');
is( $node->safe_psql(
		$db,
		"SELECT relacl IS NOT NULL AND reloptions = '{fillfactor=70}' AND reltuples > 0 FROM pg_class WHERE oid = 'app.total'::regclass"
	),
	't',
	'privileges and options are kept, and the planner knows the table');
is( $node->safe_psql(
		$db,
		"SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'obix_rebuild%'"),
	'0',
	'nothing is left behind');

# Interrupted by a cancel: nothing goes on by itself.  The handler waits for a
# lock, so the rebuild is known to be in the middle.
my $blocker = $node->background_psql($db);

sub start_rebuild
{
	my ($consumer, $options) = @_;
	my $session = $node->background_psql($db, on_error_stop => 0);
	my $pid     = $session->query_safe('SELECT pg_backend_pid()');

	$session->{stdin} .=
	  "CALL obix.rebuild('$consumer'$options);\n\\echo rebuilt\n";
	$session->{run}->pump_nb;
	return ($session, $pid);
}

sub finish_rebuild
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($session, $name) = @_;

	ok( pump_until(
			$session->{run}, $session->{timeout},
			\$session->{stdout}, qr/rebuilt/),
		$name);
	$session->quit;
	return;
}

$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('app.small', partition_width => 100000);
CREATE TABLE app.small_total (LIKE app.total INCLUDING ALL);
SET search_path = app;
SELECT obix.create_consumer('small', 'app.small', batch_handler => 'add_all', batch_size => 500, tables => '{small_total}');
ALTER FUNCTION add_all(obix.event[]) RENAME TO add_to_total;
});
$node->safe_psql(
	$db, q{
SET search_path = app;
CREATE FUNCTION add_all(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO small_total AS t
	SELECT key, count(*), sum((payload)::bigint) FROM unnest(e) GROUP BY key
	ON CONFLICT (key) DO UPDATE SET events = t.events + EXCLUDED.events, amount = t.amount + EXCLUDED.amount;
END $$;
SELECT obix.alter_consumer('totals', batch_handler => 'add_to_total');
SELECT obix.alter_consumer('small', batch_handler => 'add_all_slowly');
SELECT count(obix.publish('app.small', to_jsonb(g % 7), key => 'k' || g % 100)) FROM generate_series(1, 10000) g;
});
poll_ok($node, $db, caught_up_query('small'), 'the consumer is caught up');

my $in_the_middle =
  q{SELECT p."cursor" = 1000 AND EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)
FROM obix.rebuild_progress p WHERE p.consumer = 'small'};

$blocker->query_safe('SELECT pg_advisory_lock(1)');
my ($session, $pid) = start_rebuild('small', '');
poll_ok($node, $db, $in_the_middle, 'a rebuild is in the middle');
is( $node->safe_psql(
		$db,
		"SELECT schema, state, events_done, events_left FROM obix.rebuild_progress"),
	'obix_rebuild_2|active|1000|9000',
	'its progress shows');
$node->safe_psql($db, "SELECT pg_cancel_backend($pid)");
ok( pump_until(
		$session->{run}, $session->{timeout},
		\$session->{stderr}, qr/canceling statement/),
	'it is cancelled');
$session->quit;
$blocker->query_safe('SELECT pg_advisory_unlock(1)');
publish($node, $db, 'app.small', 0);
poll_ok(
	$node,
	$db,
	q{SELECT dispatcher_pid IS NULL AND "cursor" < 10000 FROM obix.rebuild_progress},
	'it does not go on by itself');
my $cursor = $node->safe_psql($db, 'SELECT "cursor" FROM obix.rebuild_progress');
cmp_ok($cursor, '>=', 1000, 'and stands where it was');

# Interrupted by a crash, resumed
$blocker->query_safe('SELECT pg_advisory_lock(1)');
($session, $pid) = start_rebuild('small', '');
poll_ok(
	$node,
	$db,
	q{SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)},
	'it is resumed');
crash($node);
$session->{run}->kill_kill;
$blocker->{run}->kill_kill;
$node->start;
cmp_ok($node->safe_psql($db, 'SELECT "cursor" FROM obix.rebuild_progress'),
	'>=', $cursor, 'after a crash nothing is lost');
is( ($node->psql($db, "CALL obix.rebuild('small')"))[0],
	0, 'called again it finishes');
is($node->safe_psql($db, totals_query('app.small', 'app.small_total')),
	't', 'and has every event once');

# Cancelled for good
$blocker = $node->background_psql($db);
$blocker->query_safe('SELECT pg_advisory_lock(1)');
($session, $pid) = start_rebuild('small', '');
poll_ok($node, $db, $in_the_middle, 'another rebuild is in the middle');
$node->safe_psql($db, "SELECT pg_cancel_backend($pid)");
$blocker->query_safe('SELECT pg_advisory_unlock(1)');
$session->quit;
$node->safe_psql($db, "SELECT obix.cancel_rebuild('small')");
is( $node->safe_psql(
		$db,
		"SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'obix_rebuild%'"),
	'0',
	'obix.cancel_rebuild leaves nothing behind');
is($node->safe_psql($db, totals_query('app.small', 'app.small_total')),
	't', 'the live table is as it was');

# The live consumer goes on from where the rebuild was, not from where it had been
$node->safe_psql($db, "SELECT obix.pause('small')");
$node->safe_psql($db,
	"SELECT count(obix.publish('app.small', to_jsonb(g % 7), key => 'k' || g % 100)) FROM generate_series(1, 500) g"
);
is( ($node->psql($db, "CALL obix.rebuild('small')"))[0],
	0, 'a rebuild passes a consumer that is paused');
$node->safe_psql($db, "SELECT obix.resume('small')");
$node->safe_psql($db, "SELECT obix.publish('app.small', '1', key => 'k1')");
poll_ok($node, $db, caught_up_query('small'), 'which goes on then');
is($node->safe_psql($db, totals_query('app.small', 'app.small_total')),
	't', 'and applies nothing twice');

# Publishers in flight when it begins, with both orderings.  Those of the outbox
# with ordering 'available' have been passed by the live consumer.
foreach my $ordering ('sequence', 'available')
{
	$node->safe_psql(
		$db, qq{
SELECT obix.create_outbox('app.flight_$ordering', partition_width => 100000);
CREATE TABLE app.flight_total_$ordering (key text, sequence bigint);
SET search_path = app;
CREATE FUNCTION note_$ordering(e obix.event) RETURNS void LANGUAGE sql AS
'INSERT INTO flight_total_$ordering VALUES ((e).key, (e).sequence)';
SELECT obix.create_consumer('flight_$ordering', 'app.flight_$ordering', handler => 'note_$ordering',
	ordering => '$ordering', tables => '{flight_total_$ordering}');
SELECT count(obix.publish('app.flight_$ordering', '0', key => 'before')) FROM generate_series(1, 10);
});
	my @flights = map { $node->background_psql($db) } (1 .. 3);

	$_->query_safe(
		"BEGIN; INSERT INTO app.flight_$ordering (key, payload) SELECT 'flight', '0' FROM generate_series(1, 5)"
	) foreach @flights;
	$flights[2]->query_safe("PREPARE TRANSACTION 'flight'");
	publish($node, $db, "app.flight_$ordering", 10);
	poll_ok(
		$node,
		$db,
		"SELECT count(*) = "
		  . ($ordering eq 'available' ? 20 : 10)
		  . " FROM app.flight_total_$ordering",
		"$ordering: what is there is applied");
	is( ($node->psql($db, "CALL obix.rebuild('flight_$ordering')"))[0],
		0, "$ordering: a rebuild with publishers in flight");
	$flights[0]->query_safe('COMMIT');
	$flights[1]->query_safe('ROLLBACK');
	$node->safe_psql($db, "COMMIT PREPARED 'flight'");
	$_->quit foreach @flights;
	publish($node, $db, "app.flight_$ordering", 1);
	poll_ok($node, $db, caught_up_query("flight_$ordering"),
		"$ordering: it catches up");
	is( $node->safe_psql(
			$db, qq{
SELECT count(*), count(DISTINCT sequence), count(*) = (SELECT count(*) FROM app.flight_$ordering WHERE payload IS NOT NULL)
FROM app.flight_total_$ordering}),
		'31|31|t',
		"$ordering: every event is applied once");
}

# Events that fail
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('app.failing', partition_width => 100000);
CREATE TABLE app.failing_total (sequence bigint PRIMARY KEY);
SET search_path = app;
CREATE FUNCTION may_fail(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('search_path') LIKE 'obix_rebuild%' AND e.sequence IN (4, 7) THEN
		RAISE EXCEPTION 'event % fails', e.sequence;
	END IF;
	INSERT INTO failing_total VALUES (e.sequence);
END $$;
SELECT obix.create_consumer('failing', 'app.failing', handler => 'may_fail', tables => '{failing_total}');
SELECT count(obix.publish('app.failing', '0')) FROM generate_series(1, 10);
});
poll_ok($node, $db, caught_up_query('failing'), 'all events are applied');
($result, $stdout, $stderr) = $node->psql($db, "CALL obix.rebuild('failing')");
isnt($result, 0, 'a rebuild stops at the first event that fails');
like(
	$stderr,
	qr/rebuild of consumer "failing" has stopped after event 3: event 4 fails.*HINT:  Call obix\.rebuild again to go on, with skip_errors => true to skip events that fail, or obix\.cancel_rebuild to give up\./s,
	'and says which');
is($node->safe_psql($db, 'SELECT count(*) FROM app.failing_total'),
	10, 'the live table stays');
is( ($node->psql($db, "CALL obix.rebuild('failing', skip_errors => true)"))[0],
	0, 'with skip_errors it goes on');
is( $node->safe_psql(
		$db,
		"SELECT string_agg(sequence || ' ' || state || ' ' || error, ', ' ORDER BY sequence) FROM obix.dead_letter"
	),
	'4 failed event 4 fails, 7 failed event 7 fails',
	'what fails becomes dead letters');
is($node->safe_psql($db, 'SELECT count(*) FROM app.failing_total'),
	8, 'and is not in the new table');
$node->safe_psql($db, "SELECT obix.requeue('failing', 4)");
poll_ok($node, $db, 'SELECT count(*) = 9 FROM app.failing_total',
	'it can be delivered to the live handler');

# A handler that reaches past the search_path
$node->safe_psql(
	$db, q{
SET search_path = app;
CREATE FUNCTION qualified(e obix.event) RETURNS void LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO app.failing_total VALUES (-e.sequence); END $$;
SELECT obix.alter_consumer('failing', handler => 'qualified');
});
($result, $stdout, $stderr) = $node->psql($db, "CALL obix.rebuild('failing')");
like(
	$stderr,
	qr/a handler of consumer "failing" has used the live table "failing_total" in a rebuild/,
	'a handler that writes to the live table is found out');
is($node->safe_psql($db, 'SELECT count(*) FROM app.failing_total'),
	9, 'and what it did is undone');

done_testing();
