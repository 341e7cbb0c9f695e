
# Consumers are dumped and restored with their positions, states and dead
# letters, and go on where they were.  And what makes a consumer impossible to
# serve parks this one alone, with a reason: handlers that were renamed or
# dropped, privileges revoked, owners dropped, options written by hand.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my $dump = $node->basedir . '/dump';

sub dispatch_workers
{
	my ($count) = @_;

	$node->append_conf('postgresql.conf', "obix.dispatch_workers = $count");
	$node->reload;
	$node->poll_query_until('postgres',
		"SELECT current_setting('obix.dispatch_workers') = '$count'");
	no_dispatchers($node) if $count == 0;
	return;
}

#
# Dump and restore
#
$node->safe_psql('postgres', 'CREATE DATABASE source');
setup_database($node, 'source');
$node->safe_psql(
	'source', q{
CREATE ROLE regress_obix_owner;
CREATE SCHEMA "App";
GRANT ALL ON SCHEMA "App" TO regress_obix_owner;
SET ROLE regress_obix_owner;
SET search_path = "App";
SELECT obix.create_outbox('"App"."Orders"', partition_width => 100);
CREATE TABLE applied (consumer text, sequence bigint, PRIMARY KEY (consumer, sequence));
CREATE TABLE poisons (payload jsonb PRIMARY KEY);
INSERT INTO poisons VALUES ('7'), ('9');
CREATE FUNCTION apply(consumer text, e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF e.payload IN (SELECT payload FROM poisons) THEN RAISE EXCEPTION 'poison %', e.payload; END IF;
	INSERT INTO applied VALUES (consumer, e.sequence);
END $$;
CREATE FUNCTION "Handle"(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT apply('handled', e)$$;
CREATE FUNCTION batch(e obix.event[]) RETURNS void LANGUAGE sql AS $$SELECT apply('batched', x) FROM unnest(e) x$$;
CREATE FUNCTION available(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT apply('available', e)$$;
CREATE FUNCTION stopped(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT apply('stopped', e)$$;
CREATE FUNCTION gate() RETURNS boolean LANGUAGE sql AS 'SELECT true';
SELECT obix.create_consumer('Handled', '"Orders"', handler => '"Handle"', gate => 'gate', on_failure => 'dead_letter', hold_key => true,
	max_attempts => 2, backoff => '10 ms', max_backoff => '200 ms', tables => '{applied}');
SELECT obix.create_consumer('batched', '"Orders"', batch_handler => 'batch', batch_size => 7, on_failure => 'dead_letter',
	max_attempts => 1, backoff => '10 ms', max_backoff => '200 ms', types => '{a}');
SELECT obix.create_consumer('available', '"Orders"', handler => 'available', ordering => 'available', on_failure => 'dead_letter',
	max_attempts => 3, backoff => '10 ms', max_backoff => '200 ms');
SELECT obix.create_consumer('stopped', '"Orders"', handler => 'stopped', max_attempts => 2, backoff => '10 ms', max_backoff => '200 ms');
SELECT obix.create_consumer('external', '"Orders"', start_after => 0, backoff => '1 h', max_backoff => '1 h')}
);
my $publish =
  q{SELECT count(obix.publish('"App"."Orders"', to_jsonb(g), type => CASE g % 2 WHEN 0 THEN 'a' ELSE 'b' END, key => (g % 5)::text)) FROM generate_series(};
$node->safe_psql('source', $publish . '1, 20) g');
my $publisher = $node->background_psql('source');
$publisher->query_safe(
	q{BEGIN; INSERT INTO "App"."Orders" (payload) SELECT to_jsonb(g) FROM generate_series(21, 30) g}
);
$node->safe_psql('source', $publish . '31, 40) g');
consumer_ok(
	$node, 'source', 'Handled',
	'lag_events = 0 AND dead_lettered = 2',
	'a consumer with dead letters and what is held behind them');
consumer_ok($node, 'source', 'batched', 'lag_events = 0', 'one with types');
consumer_ok(
	$node, 'source', 'available',
	'"cursor" = 40 AND late_ranges > 0',
	'one that has passed a hole');
consumer_ok(
	$node, 'source', 'stopped',
	q{state = 'stopped' AND "cursor" = 6},
	'one that has stopped');
$node->safe_psql(
	'source', q{
SELECT obix.acquire('external', '1 h');
SELECT count(*) FROM obix.fetch('external', 5, token => 1);
SELECT obix.ack('external', 3, 1);
SELECT obix.fail('external', 4, 'not today', 1)});

# What follows is to be handled in the copies alone.
dispatch_workers(0);
$node->safe_psql('source', $publish . '41, 60) g');
my $picture = q{
SELECT consumer, outbox, owner, paused, types, handler, batch_handler, ordering, batch_size, timeout, max_attempts, backoff, max_backoff, on_failure, hold_key, tables, gate, search_path FROM obix.consumer ORDER BY 1;
SELECT c.consumer, s.position, s.state, s.attempts, s.attempt_sequence, s.retry_at, s.token, s.lease_until, s.delivered, s.failed, s.dead_lettered, s.last_error FROM obix.consumer_state s JOIN obix.consumer c USING (id) ORDER BY 1;
SELECT c.consumer, from_sequence, to_sequence, requeued, handed_out FROM obix.consumer_late JOIN obix.consumer c USING (id) ORDER BY 1, 2;
SELECT consumer, sequence, id, key, payload, state, attempts, error, parked_at FROM obix.dead_letter ORDER BY 1, 2;
SELECT consumer, count(*), sum(sequence) FROM "App".applied GROUP BY 1 ORDER BY 1;
};
my $expected = $node->safe_psql('source', $picture);
like($expected, qr/available\|21\|30\|f\|f/,                           'there is a late range');
like($expected, qr/Handled\|7\|[-0-9a-f]+\|2\|7\|failed\|2\|poison 7/, 'a dead letter');
like($expected, qr/Handled\|12\|[-0-9a-f]+\|2\|12\|held\|0\|\|/, 'and one held behind it');

my @cases = (
	[ 'parallel',    [ '-Fd', '-j2' ], ['-j4'],                  0 ],
	[ 'transaction', ['-Fc'],          ['--single-transaction'], 0 ],
	# dispatchers are at it while it is restored
	[ 'live', [ '-Fd', '-j2' ], ['-j2'], 2 ]);
foreach my $case (@cases)
{
	my ($name, $options) = @$case;

	$node->command_ok(
		[ 'pg_dump', @$options, '-f', "$dump-$name", '-d', $node->connstr('source') ],
		"$name: pg_dump");
	$node->safe_psql('postgres', "CREATE DATABASE copy_$name");
}
$publisher->query_safe('ROLLBACK');
$publisher->quit;
foreach my $case (@cases)
{
	my ($name, $options, $restore_options, $workers) = @$case;
	my $db     = "copy_$name";
	my $offset = log_offset($node);

	dispatch_workers($workers);
	$node->command_ok(
		[   'pg_restore',        '--exit-on-error', @$restore_options, '-d',
			$node->connstr($db), "$dump-$name" ],
		"$name: pg_restore");
	if ($workers == 0)
	{
		is($node->safe_psql($db, $picture), $expected, "$name: consumers are as they were");
		unlike_log($node, qr/ERROR|FATAL|PANIC/, "$name: nothing fails", $offset);
		dispatch_workers(2);
	}

	# where they were: 50 events but for 7, 9 and what is held behind them
	is_settled($node, $db, '"App"."Orders"', "$name: what was in flight then is nothing now");
	consumer_ok(
		$node, $db, 'Handled',
		q{state = 'active' AND lag_events = 0},
		"$name: it goes on");
	is( $node->safe_psql(
			$db,
			q{SELECT count(*), min(sequence) FILTER (WHERE sequence > 40) FROM "App".applied WHERE consumer = 'handled'}
		),
		$node->safe_psql(
			$db,
			q{SELECT count(*), 41 FROM "App"."Orders" o WHERE payload IS NOT NULL AND NOT EXISTS (SELECT FROM obix.dead_letter d WHERE d.consumer = 'Handled' AND d.sequence = o.sequence)}
		),
		"$name: with every event once");
	consumer_ok(
		$node, $db, 'batched',
		q{state = 'active' AND lag_events = 0 AND delivered = 25},
		"$name: also in batches");
	consumer_ok(
		$node, $db, 'available',
		q{state = 'active' AND lag_events = 0 AND late_ranges = 0 AND delivered = 48},
		"$name: a hole that nobody can fill any more is forgotten");
	consumer_ok(
		$node, $db, 'stopped',
		q{state = 'stopped' AND "cursor" = 6 AND last_error = 'poison 7'},
		"$name: what has stopped stays so");
	is( $node->safe_psql($db,
			q{DELETE FROM "App".poisons; SELECT obix.resume('stopped'); SELECT obix.requeue('Handled', 7)}
		) =~ s/\s//gr,
		'',
		"$name: it can be resumed, and a dead letter be requeued");
	consumer_ok(
		$node, $db, 'stopped',
		q{state = 'active' AND lag_events = 0 AND delivered = 50},
		"$name: and goes on");
	consumer_ok(
		$node, $db, 'Handled',
		q{late_ranges = 0 AND dead_lettered = 2},
		"$name: requeued events are delivered");
	is( $node->safe_psql(
			$db,
			q{SELECT count(*) FROM "App".applied WHERE consumer = 'handled' AND sequence IN (7, 12, 17)}
		),
		'3',
		"$name: with what was held behind them");
	is($node->safe_psql($db, q{SELECT sequence FROM obix.fetch('external', 1, token => 1)}),
		'', "$name: a lease and an attempt are kept");
	is( $node->safe_psql($db,
			q{SELECT obix.resume('external'); SELECT sequence FROM obix.fetch('external', 1, token => 1)}
		) =~ s/\s//r,
		'4',
		"$name: and the consumer goes on");
	is( $node->safe_psql($db,
			q{SELECT obix.create_consumer('new', '"App"."Orders"'); SELECT count(*), count(DISTINCT id) FROM obix.consumer}
		) =~ s/\s//r,
		'6|6',
		"$name: a new one gets a number of its own");
	no_dispatchers($node);
	$node->safe_psql('postgres', "DROP DATABASE $db");
}

#
# What parks a consumer
#
my $db = 'postgres';
setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE SCHEMA app;
GRANT ALL ON SCHEMA app, test TO regress_obix_owner;
CREATE SCHEMA helpers;
GRANT ALL ON SCHEMA helpers TO regress_obix_owner;
SELECT obix.create_outbox('app.o');
CREATE TABLE test.applied (consumer text, sequence bigint);
GRANT ALL ON test.applied TO PUBLIC;
CREATE FUNCTION test.good(e obix.event) RETURNS void LANGUAGE sql AS $$INSERT INTO test.applied VALUES ('good', e.sequence)$$;
SELECT obix.create_consumer('good', 'app.o', handler => 'test.good')});

my $make_handler =
  q{CREATE FUNCTION helpers.handle(e obix.event) RETURNS void LANGUAGE sql AS $$INSERT INTO test.applied VALUES ('bad', e.sequence)$$;};

# Change a definition, and change it back.
sub by_hand
{
	my ($what, $back) = @_;

	return (
		"UPDATE obix.consumer SET $what WHERE consumer = 'bad'",
		"UPDATE obix.consumer SET $back WHERE consumer = 'bad'");
}

# name => break, mend, error
my @breakages = (
	[   'handler renamed',
		'ALTER FUNCTION helpers.handle RENAME TO handle2',
		'ALTER FUNCTION helpers.handle2 RENAME TO handle',
		'function helpers\.handle\(obix\.event\) does not exist' ],
	[   'handler dropped',
		'DROP FUNCTION helpers.handle',
		$make_handler, 'function helpers\.handle\(obix\.event\) does not exist' ],
	[   'handler with other arguments',
		'DROP FUNCTION helpers.handle; CREATE FUNCTION helpers.handle(e obix.event, n integer) RETURNS void LANGUAGE sql AS $$$$',
		"DROP FUNCTION helpers.handle; $make_handler",
		'does not exist' ],
	[   'handler a procedure',
		'DROP FUNCTION helpers.handle; CREATE PROCEDURE helpers.handle(e obix.event) LANGUAGE sql AS $$$$',
		"DROP PROCEDURE helpers.handle; $make_handler",
		'does not exist' ],
	[   'handler that returns rows',
		'DROP FUNCTION helpers.handle; CREATE FUNCTION helpers.handle(e obix.event) RETURNS SETOF integer LANGUAGE sql AS $$SELECT 1$$',
		"DROP FUNCTION helpers.handle; $make_handler",
		'is not a function that returns one value' ],
	[   'schema renamed',
		'ALTER SCHEMA helpers RENAME TO assistants',
		'ALTER SCHEMA assistants RENAME TO helpers',
		'does not exist' ],
	[   'EXECUTE revoked',
		'REVOKE EXECUTE ON FUNCTION helpers.handle FROM PUBLIC',
		'GRANT EXECUTE ON FUNCTION helpers.handle TO PUBLIC',
		'role "regress_obix_owner" may not execute function' ],
	[   'USAGE revoked',
		'REVOKE ALL ON SCHEMA helpers FROM regress_obix_owner',
		'GRANT USAGE ON SCHEMA helpers TO regress_obix_owner',
		'role "regress_obix_owner" may not execute function' ],
	[   'SELECT revoked',
		'REVOKE SELECT ON app.o FROM regress_obix_owner',
		'GRANT SELECT ON app.o TO regress_obix_owner',
		'role "regress_obix_owner" may not read outbox "o"' ],
	[   'gate dropped',
		'DROP FUNCTION helpers.gate',
		'CREATE FUNCTION helpers.gate() RETURNS boolean LANGUAGE sql AS $$SELECT true$$',
		'function helpers\.gate\(\) does not exist' ],
	[   'gate of another type',
		'DROP FUNCTION helpers.gate; CREATE FUNCTION helpers.gate() RETURNS integer LANGUAGE sql AS $$SELECT 1$$',
		'DROP FUNCTION helpers.gate; CREATE FUNCTION helpers.gate() RETURNS boolean LANGUAGE sql AS $$SELECT true$$',
		'does not return boolean' ],
	[   'no such owner',
		by_hand(q{owner = 4294967294}, q{owner = 'regress_obix_owner'}),
		'role with OID 4294967294 does not exist' ],
	[   'no such batch handler',
		by_hand(q{batch_handler = 'helpers.none'}, q{batch_handler = NULL}),
		'does not exist' ],
	[   'handler with an invalid name',
		by_hand(q{handler = '"'}, q{handler = 'helpers.handle'}),
		'invalid name' ],
	[   'handler of another database',
		by_hand(q{handler = 'a.b.c.d'}, q{handler = 'helpers.handle'}),
		'improper qualified name' ],
	[   'gate with an invalid name',
		by_hand(q{gate = ''}, q{gate = 'helpers.gate'}),
		'invalid name' ],
	[   'types with a null',
		by_hand(q{types = '{NULL}'}, q{types = NULL}),
		'null array element' ],
	[   'outbox that is none',
		by_hand(q{outbox = 'pg_class'}, q{outbox = 'app.o'}),
		'is not an outbox' ],
	[   'outbox that is not there',
		by_hand(q{outbox = 4294967294}, q{outbox = 'app.o'}),
		'does not exist' ],
	[   'invalid search_path',
		by_hand(q{search_path = '"'}, q{search_path = 'public'}),
		'search_path' ]);

$node->safe_psql(
	$db, qq{
$make_handler
CREATE FUNCTION helpers.gate() RETURNS boolean LANGUAGE sql AS \$\$SELECT true\$\$;
REVOKE ALL ON app.o FROM regress_obix_owner;
GRANT SELECT ON app.o TO regress_obix_owner;
SET SESSION AUTHORIZATION regress_obix_owner;
SELECT obix.create_consumer('bad', 'app.o', handler => 'helpers.handle', gate => 'helpers.gate', max_attempts => 1, on_failure => 'dead_letter')}
);
my $offset = log_offset($node);
foreach my $breakage (@breakages)
{
	my ($name, $break, $mend, $error) = @$breakage;

	no_dispatchers($node);
	$node->safe_psql($db, $break);
	publish($node, $db, 'app.o', 1);
	consumer_ok(
		$node,
		$db,
		'bad',
		qq{state = 'parked' AND last_error ~ '$error' AND attempts = 0 AND lag_events IS DISTINCT FROM 0},
		"$name: the consumer is parked");
	consumer_ok($node, $db, 'good', 'lag_events = 0', "$name: others go on");
	$node->safe_psql($db, "$mend; SELECT obix.resume('bad')");
	consumer_ok(
		$node, $db, 'bad',
		q{state = 'active' AND lag_events = 0},
		"$name: mended and resumed, it goes on");
}
is( $node->safe_psql(
		$db,
		q{SELECT consumer, count(*) - count(DISTINCT sequence), count(*) - (SELECT count(*) FROM app.o) FROM test.applied GROUP BY 1 ORDER BY 1}
	),
	"bad|0|0\ngood|0|0",
	'each event was applied once by both');
is( $node->safe_psql(
		$db, q{SELECT failed, dead_lettered FROM obix.consumer_status WHERE consumer = 'bad'}),
	'0|0',
	'none was taken to have failed');
is( log_count($node, qr/consumer "bad" is parked/, $offset),
	scalar @breakages,
	'each reason was logged once');

# Its owner is dropped; only an administrator can give it to somebody else.
no_dispatchers($node);
$node->safe_psql('source', 'DROP OWNED BY regress_obix_owner CASCADE');
$node->safe_psql($db,      'DROP OWNED BY regress_obix_owner; DROP ROLE regress_obix_owner');
publish($node, $db, 'app.o', 1);
consumer_ok(
	$node, $db, 'bad',
	q{state = 'parked' AND last_error ~ 'role with OID \d+ does not exist'},
	'owner dropped: the consumer is parked');
consumer_ok($node, $db, 'good', 'lag_events = 0', 'owner dropped: others go on');
my ($result, $stdout, $stderr);
$node->safe_psql($db,
	'CREATE ROLE regress_obix_other; GRANT SELECT ON app.o TO regress_obix_other; GRANT USAGE ON SCHEMA helpers, test TO regress_obix_other'
);
($result, $stdout, $stderr) = $node->psql($db,
	q{SET ROLE regress_obix_other; SELECT obix.alter_consumer('bad', owner => 'regress_obix_other')}
);
like($stderr, qr/permission denied for consumer "bad"/, 'not anybody can have it');
$node->safe_psql($db,
	q{SELECT obix.alter_consumer('bad', owner => 'regress_obix_other'); SELECT obix.resume('bad')}
);
consumer_ok(
	$node, $db, 'bad',
	q{state = 'active' AND lag_events = 0 AND owner = 'regress_obix_other'::regrole},
	'with another owner it goes on');

# Without being resumed, it is looked at again after max_backoff.
$node->safe_psql($db,
	q{SELECT obix.alter_consumer('bad', max_backoff => '100 ms'); ALTER FUNCTION helpers.handle RENAME TO handle2}
);
$offset = log_offset($node);
publish($node, $db, 'app.o', 1);
consumer_ok($node, $db, 'bad', q{state = 'parked'}, 'parked once more');
$node->safe_psql($db, 'ALTER FUNCTION helpers.handle2 RENAME TO handle');
consumer_ok(
	$node, $db, 'bad',
	q{state = 'active' AND lag_events = 0},
	'it goes on by itself when it is mended');

# A role that is set for the database is no matter.
no_dispatchers($node);
$node->safe_psql($db, q{ALTER DATABASE postgres SET role = 'regress_obix_other'});
$node->safe_psql(
	$db, q{
SET ROLE postgres;
CREATE TABLE test.users (consumer text, usr text);
GRANT ALL ON test.users TO PUBLIC;
CREATE OR REPLACE FUNCTION helpers.handle(e obix.event) RETURNS void LANGUAGE sql AS $$INSERT INTO test.users VALUES ('bad', current_user)$$;
CREATE OR REPLACE FUNCTION test.good(e obix.event) RETURNS void LANGUAGE sql AS $$INSERT INTO test.users VALUES ('good', current_user)$$;
SELECT obix.publish('app.o', '1');
BEGIN; INSERT INTO app.o (payload) VALUES ('1'); ROLLBACK;
SELECT obix.publish('app.o', '1')});
consumers_ok(
	$node, $db, 'true',
	q{state = 'active' AND lag_events = 0},
	'with a role set for the database, consumers and the worker go on');
is( $node->safe_psql(
		$db, q{SELECT consumer, usr, count(*) FROM test.users GROUP BY 1, 2 ORDER BY 1}),
	"bad|regress_obix_other|2\ngood|postgres|2",
	'as their owners');

$node->stop;
done_testing();
