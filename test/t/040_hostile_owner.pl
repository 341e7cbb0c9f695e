
# Who owns an outbox can attach functions to it: in constraints, indexes, columns,
# triggers and policies, of the outbox and of single partitions.  Maintenance, by
# the worker or by hand, and the commits of others who publish call some of them.
# They run as the owner then, who can neither leave that role nor leave anything
# behind.  The same for the tables of a rebuild.
#
# evil.shout() tells the log as whom it is called, and tries to be somebody else.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main', conf => "obix.auto_recover = off\nobix.worker_linger = '50 ms'\n");
my @as   = (extra_params => [ '-U', 'regress_obix_attacker' ]);

setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE ROLE regress_obix_attacker LOGIN;
CREATE ROLE regress_obix_publisher LOGIN;
CREATE ROLE regress_obix_nobody;
GRANT CREATE ON DATABASE postgres TO regress_obix_attacker;
CREATE SCHEMA evil AUTHORIZATION regress_obix_attacker;
GRANT USAGE ON SCHEMA evil TO regress_obix_publisher});
$node->safe_psql(
	$db, q{
SET search_path = evil;
CREATE TABLE queue (place text);
CREATE FUNCTION shout(place text) RETURNS integer LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	attempt text;
BEGIN
	RAISE LOG 'ran % as %', place, current_user;
	FOREACH attempt IN ARRAY ARRAY[
		'ALTER ROLE regress_obix_attacker SUPERUSER',
		'SELECT set_config(''role'', ''postgres'', false)', 'SELECT set_config(''role'', ''none'', true)',
		'SET LOCAL ROLE postgres', 'SET SESSION AUTHORIZATION postgres', 'RESET SESSION AUTHORIZATION',
		'ALTER SYSTEM SET work_mem = 1', 'COPY evil.queue TO PROGRAM ''true''',
		'SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = ''postgres''',
		'UPDATE obix.consumer SET owner = 10', 'INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES (''pg_class'', 1, 1)',
		'CREATE EXTENSION pg_prewarm SCHEMA evil']
	LOOP
		BEGIN
			EXECUTE attempt;
			IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) OR current_user <> 'regress_obix_attacker' THEN
				RAISE LOG 'escaped by %', attempt;
			END IF;
		EXCEPTION WHEN OTHERS THEN
			NULL;
		END;
	END LOOP;
	-- what would be run later, as whoever that is then
	IF current_setting('evil.later', true) = 'on' THEN
		BEGIN INSERT INTO evil.queue VALUES (place); EXCEPTION WHEN OTHERS THEN NULL; END;
		BEGIN CREATE TEMP TABLE dropped (n integer DEFAULT evil.shout('temporary')) ON COMMIT DROP; EXCEPTION WHEN OTHERS THEN NULL; END;
		BEGIN EXECUTE 'DECLARE held CURSOR WITH HOLD FOR SELECT evil.shout(''cursor'')'; EXCEPTION WHEN OTHERS THEN NULL; END;
	END IF;
	RETURN 1;
END $$;
CREATE FUNCTION on_queue() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM evil.shout('later'); RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER later AFTER INSERT ON queue DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION on_queue();
CREATE FUNCTION on_row() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM evil.shout('trigger'); RETURN new; END$$;
CREATE FUNCTION pass(place text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT evil.shout(place) > 0';
CREATE FUNCTION say(place text) RETURNS jsonb LANGUAGE sql IMMUTABLE AS 'SELECT to_jsonb(evil.shout(place))';
CREATE DOMAIN loud AS text DEFAULT 'x' || evil.shout('domain') CHECK (evil.pass('domain check'));

-- where everybody may publish, as far as obix.publish can honour it
SELECT obix.create_outbox('checked', 5, 1);
ALTER TABLE checked ADD CONSTRAINT loud CHECK (evil.pass('check'));
CREATE INDEX ON checked ((evil.shout('index')));
CREATE INDEX ON checked (type) WHERE evil.pass('predicate');
CREATE STATISTICS loud ON (evil.shout('statistics') + sequence), type FROM checked;
GRANT INSERT ON checked TO regress_obix_publisher;

-- and all else
SELECT obix.create_outbox('decorated', 200, 0);
ALTER TABLE decorated ADD a integer DEFAULT evil.shout('default'), ADD b loud, ADD c integer GENERATED ALWAYS AS (evil.shout('generated')) STORED;
CREATE TRIGGER loud BEFORE INSERT ON decorated FOR EACH ROW EXECUTE FUNCTION on_row();
CREATE TRIGGER loud_after AFTER INSERT OR DELETE ON decorated_default FOR EACH ROW EXECUTE FUNCTION on_row();
ALTER TABLE decorated ENABLE ROW LEVEL SECURITY;
CREATE POLICY loud ON decorated USING (evil.pass('policy'));}, @as);

# Everything that is not the attacker's own doing begins here.
my $offset = log_offset($node);

sub ran
{
	my ($name, @places) = @_;
	my $log = slurp_file($node->logfile, $offset);
	my %seen;

	$seen{"$1 as $2"} = 1 while $log =~ /LOG:  ran ([\w ]+?) as (\w+)$/mg;
	is_deeply([ sort keys %seen ], [ map { "$_ as regress_obix_attacker" } sort @places ], $name);
	$offset = log_offset($node);
	return;
}

#
# The worker
#
$node->safe_psql($db, 'ALTER TABLE evil.decorated DISABLE TRIGGER loud', @as);
$node->safe_psql($db, q{SELECT obix.publish('evil.checked', '1') FROM generate_series(1, 3)}, @as);
$node->safe_psql($db,
	q{BEGIN; SELECT obix.next_sequence('evil.checked'), obix.next_sequence('evil.decorated') FROM generate_series(1, 8); COMMIT},
	@as);
poll_ok(
	$node, $db,
	q{SELECT bool_and(high_water_mark = head AND failures = 0) FROM obix.outbox_status},
	'the worker has filled what the attacker left');
poll_ok(
	$node, $db,
	q{SELECT count(*) >= 4 FROM obix.partitions('evil.checked')},
	'and made partitions');
ok(no_workers($node), 'and has left');
ran('for which it ran as the owner what belongs to rows without a payload',
	'check', 'index', 'predicate');

#
# A superuser, and somebody who may only publish
#
my $session = q{
SET search_path = evil, pg_temp, pg_catalog;
SET evil.later = on;
};
foreach my $user ('regress_obix_publisher', 'postgres')
{
	$node->safe_psql(
		$db, $session . q{
BEGIN;
SELECT obix.publish('evil.checked', '1') FROM generate_series(1, 7);
COMMIT},
		extra_params => [ '-U', $user ]);
	ok(no_workers($node), "$user has published");
	ran("what the commit of $user called, ran as the owner", 'check', 'index', 'predicate');
}
is($node->safe_psql($db, 'SELECT count(*) FROM evil.queue'),
	'0', 'nothing was left to be done later');
foreach my $sql (
	'obix.fill_gaps()', "obix.ensure_partitions('evil.checked')",
	"obix.alter_outbox('evil.checked', premake => 3)",
	'obix.ensure_partitions()', "obix.high_water_mark('evil.checked')")
{
	$node->safe_psql($db,
		"$session SELECT obix.next_sequence('evil.checked'); SELECT $sql; SELECT count(*) FROM obix.read('evil.checked'); SELECT count(*) FROM obix.outbox_status; SELECT count(*) FROM obix.partition_status; CALL obix.wait('evil.checked', 1, '1 ms')"
	);
}
ok(no_workers($node), 'a superuser has used all functions');
ran('maintenance by hand is no different', 'check', 'index', 'predicate');

# Stranded rows in two gaps, so that some of them have to be moved.
$node->safe_psql(
	$db, q{
SELECT obix.next_sequence('evil.decorated') FROM generate_series(9, 190);
CREATE TABLE evil.middle PARTITION OF evil.decorated FOR VALUES FROM (205) TO (207);
INSERT INTO evil.decorated (payload) SELECT '1' FROM generate_series(1, 25)}, @as);
$node->safe_psql($db,
	q{ALTER TABLE evil.decorated ENABLE TRIGGER loud; CREATE INDEX ON evil.decorated ((evil.shout('moved') + sequence))}, @as);
is($node->safe_psql($db, 'SELECT max(sequence) FROM evil.decorated', @as), '215', 'rows are stranded in two gaps');
no_workers($node);
$offset = log_offset($node);
is($node->safe_psql($db, "$session SELECT obix.recover_default('evil.decorated') > 10"),
	't', 'a superuser recovers DEFAULT');
ran('which runs as the owner, too', 'moved');
is( $node->safe_psql(
		$db, q{SELECT count(*), min(sequence), max(sequence), count(*) FILTER (WHERE tableoid = 'evil.decorated_default'::regclass) FROM evil.decorated}, @as),
	'215|1|215|0',
	'and all rows are there');

# A policy that hides some of them from the owner hides none from that.
$node->safe_psql(
	$db, q{
SELECT obix.next_sequence('evil.decorated') FROM generate_series(216, 400);
CREATE TABLE evil.late PARTITION OF evil.decorated FOR VALUES FROM (412) TO (414);
INSERT INTO evil.decorated (payload) SELECT '1' FROM generate_series(1, 25);
ALTER TABLE evil.decorated_default ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY even ON evil.decorated_default USING (sequence % 2 = 0)}, @as);
ok(no_workers($node), 'rows are stranded that a policy hides');
$node->safe_psql($db, q{SELECT obix.recover_default('evil.decorated')}, @as);
is( $node->safe_psql(
		$db, q{SELECT count(*), max(sequence), count(*) FILTER (WHERE tableoid = 'evil.decorated_default'::regclass) FROM evil.decorated}, @as),
	'425|425|0',
	'all of them are recovered');

#
# The tables of a rebuild
#
$node->safe_psql(
	$db, q{
SET search_path = evil;
SELECT obix.create_outbox('r');
CREATE TABLE t (sequence bigint);
CREATE TABLE dates (d date);
CREATE FUNCTION apply(e obix.event) RETURNS void LANGUAGE sql AS 'INSERT INTO t VALUES (e.sequence)';
SELECT obix.create_consumer('r', 'r', handler => 'apply', tables => '{t}');
SELECT obix.publish('r', '1') FROM generate_series(1, 5)}, @as);
consumer_ok($node, $db, 'r', 'lag_events = 0', 'a consumer to rebuild');
my $schema = 'obix_rebuild_' . $node->safe_psql($db, q{SELECT id FROM obix.consumer WHERE consumer = 'r'});
my %changes = (
	'an index'  => ["CREATE INDEX ON $schema.t ((evil.shout('index of the copy')))", 'was changed while it was rebuilt' ],
	'a trigger' => ["CREATE TRIGGER loud AFTER INSERT ON $schema.t FOR EACH STATEMENT EXECUTE FUNCTION evil.on_row()", 'cannot rebuild table "t"' ],
	'a view'    => ["ALTER TABLE $schema.t RENAME TO base; CREATE VIEW $schema.t AS SELECT * FROM $schema.base", 'cannot rebuild relation "t"' ],
	'a default' => ["ALTER TABLE $schema.t ALTER sequence SET DEFAULT evil.shout('default of the copy')", 'was changed while it was rebuilt' ],
	'another schema' => ["ALTER SCHEMA $schema RENAME TO renamed; CREATE SCHEMA $schema; CREATE TABLE $schema.t (sequence bigint, more date)", 'was changed while it was rebuilt' ]);
foreach my $what (sort keys %changes)
{
	my ($change, $error) = @{ $changes{$what} };

	$node->safe_psql($db, "BEGIN; SELECT obix.begin_rebuild('r', false); $change; COMMIT", @as);
	ok( $node->poll_query_until(
			$db, "SELECT state = 'stopped' AND last_error ~ '$error' FROM obix.rebuild_progress"),
		"$what: the rebuild stops");
	# for everything that a superuser may be asked to do
	$node->safe_psql($db, "$session SELECT obix.cancel_rebuild('r')");
	$node->safe_psql($db, 'DROP SCHEMA IF EXISTS renamed CASCADE', @as);
}
$offset = log_offset($node);
$node->safe_psql(
	$db, q{
CREATE DOMAIN evil.timestamptz AS pg_catalog.timestamptz CHECK (evil.pass('type timestamptz'));
CREATE DOMAIN evil.record AS pg_catalog.text CHECK (evil.pass('type record'));
CREATE FUNCTION evil.clock_timestamp() RETURNS pg_catalog.timestamptz LANGUAGE sql AS 'SELECT pg_catalog.clock_timestamp() WHERE evil.pass(''clock'')';
CREATE TABLE evil.rebuild_progress (n integer)}, @as);
$node->safe_psql($db, "$session CALL obix.rebuild('r')");
is($node->safe_psql($db, 'SELECT count(*) FROM evil.t'), '5', 'a superuser can rebuild it');
ran('without meeting what is in front of the search_path');

#
# A role that is set for the database, even one without any right, is no matter
#
no_workers($node);
no_dispatchers($node);
$node->safe_psql($db, q{ALTER DATABASE postgres SET role = 'regress_obix_nobody'});
$ENV{PGOPTIONS} = '-c role=postgres';
$node->safe_psql(
	$db, q{
SELECT obix.publish('evil.r', '1');
BEGIN; SELECT obix.next_sequence('evil.r'); ROLLBACK;
SELECT obix.publish('evil.r', '1')});
consumer_ok($node, $db, 'r', q{state = 'active' AND lag_events = 0 AND "cursor" >= 7},
	'with a role set for the database, dispatchers go on');
is_settled($node, $db, 'evil.r', 'and so does the worker');
$node->safe_psql($db, 'ALTER DATABASE postgres RESET role');
delete $ENV{PGOPTIONS};

$node->safe_psql($db, qq{$session SELECT obix.drop_outbox('evil.r', true), obix.drop_outbox('evil.checked'), obix.drop_outbox('evil.decorated')});
is( $node->safe_psql(
		$db, q{SELECT rolsuper FROM pg_roles WHERE rolname = 'regress_obix_attacker'}),
	'f',
	'after all this the attacker is an ordinary user');
unlike_log($node, qr/LOG:  escaped|LOG:  ran .* as (?!regress_obix_attacker)\w+$/, 'and nothing ever ran as anybody else');
unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'and the server is well');

$node->stop;
done_testing();
