
# The owner of a database, who is no superuser, installs obix there, uses it,
# dumps and restores the database, and drops the extension.  That makes it no
# superuser: what the extension is made of belongs to the bootstrap superuser,
# what a restore could put into the tables of obix is checked, and privileges by
# default do not reach them.

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
my @as   = (extra_params => [ '-U', 'regress_obix_dba' ]);

# Run statements as the owner of the database; they must work.
sub dba
{
	my ($db, $sql) = @_;

	return $node->safe_psql($db, $sql, @as);
}

# Run statements as the owner of the database; they must fail with an error.
sub dba_fails
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($db, $sql, $error, $name) = @_;
	my ($result, $stdout, $stderr) = $node->psql($db, $sql, @as);

	return like($stderr, $error, $name // $sql);
}

# The bootstrap superuser has given rights on all that it will make to somebody,
# as administrators do for their own tables.
$node->safe_psql(
	'postgres', q{
CREATE ROLE regress_obix_dba LOGIN;
CREATE ROLE regress_obix_app LOGIN;
CREATE ROLE regress_obix_member;
CREATE ROLE regress_obix_foreign;
GRANT regress_obix_member TO regress_obix_dba;
CREATE DATABASE app OWNER regress_obix_dba});
my $default_privileges = q{
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO regress_obix_app, PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO regress_obix_app WITH GRANT OPTION;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO regress_obix_app;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TYPES TO regress_obix_app};
$node->safe_psql('app', $default_privileges);

#
# Installing
#

# What is there already is refused, and nothing of it is used.
dba('app', 'CREATE SCHEMA obix; CREATE TABLE obix.outbox (n integer)');
dba_fails(
	'app',
	'CREATE EXTENSION obix',
	qr/schema "obix" already exists/,
	'a schema that somebody has prepared is refused');
dba('app', 'DROP SCHEMA obix CASCADE');

# Objects in front of the path, and in temporary schemas, are not met.
dba(
	'app', q{
CREATE SCHEMA evil;
CREATE FUNCTION evil.shout() RETURNS boolean LANGUAGE plpgsql AS $$BEGIN
	IF current_user <> 'regress_obix_dba' THEN RAISE LOG 'ran as %', current_user; END IF; RETURN true; END$$;
CREATE FUNCTION evil.compare(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT evil.shout()';
CREATE FUNCTION evil.compare(oid, oid) RETURNS boolean LANGUAGE sql AS 'SELECT evil.shout()';
CREATE FUNCTION evil.compare(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT evil.shout()';
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.compare);
CREATE OPERATOR evil.= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = evil.compare);
CREATE OPERATOR evil.<> (LEFTARG = oid, RIGHTARG = oid, FUNCTION = evil.compare);
CREATE OPERATOR evil.>= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = evil.compare);
CREATE FUNCTION evil.aclexplode(aclitem[]) RETURNS SETOF boolean LANGUAGE sql AS 'SELECT evil.shout()'});
dba(
	'app', q{
CREATE DOMAIN evil.text AS pg_catalog.text CHECK (evil.shout());
CREATE DOMAIN evil.int8 AS pg_catalog.int8 CHECK (evil.shout());
CREATE DOMAIN evil.timestamptz AS pg_catalog.timestamptz CHECK (evil.shout());
CREATE DOMAIN evil.jsonb AS pg_catalog.jsonb CHECK (evil.shout());
CREATE DOMAIN pg_temp.uuid AS pg_catalog.uuid CHECK (evil.shout());
CREATE TEMP TABLE pg_class AS SELECT 1 AS n;
SET search_path = evil, pg_temp, pg_catalog;
CREATE EXTENSION obix});
is( $node->safe_psql(
		'app', q{
SELECT DISTINCT n.nspname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_namespace n ON n.oid = t.typnamespace WHERE c.relnamespace = 'obix'::regnamespace ORDER BY 1}),
	'pg_catalog',
	'the types of obix are those of PostgreSQL');

# What it is made of belongs to the bootstrap superuser.
is( $node->safe_psql(
		'app', q{
SELECT DISTINCT o.owner::regrole, pg_get_userbyid(e.extowner) FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid AND d.deptype = 'e',
LATERAL (SELECT relowner AS owner FROM pg_class WHERE oid = d.objid UNION ALL SELECT proowner FROM pg_proc WHERE oid = d.objid
	UNION ALL SELECT typowner FROM pg_type WHERE oid = d.objid UNION ALL SELECT nspowner FROM pg_namespace WHERE oid = d.objid) o
WHERE e.extname = 'obix'}),
	'postgres|regress_obix_dba',
	'all that is in the extension belongs to the bootstrap superuser, the extension to who installed it');
is( $node->safe_psql(
		'app', q{
SELECT r.rolname, string_agg(DISTINCT a.privilege_type, ' ' ORDER BY a.privilege_type)
FROM (SELECT relacl AS acl FROM pg_class WHERE relnamespace = 'obix'::regnamespace
	UNION ALL SELECT nspacl FROM pg_namespace WHERE nspname = 'obix') o, aclexplode(o.acl) a
LEFT JOIN pg_roles r ON r.oid = a.grantee WHERE r.rolname IS DISTINCT FROM 'postgres' GROUP BY 1 ORDER BY 1}),
	"pg_database_owner|INSERT SELECT UPDATE\n|SELECT USAGE",
	'privileges by default have not reached it');
foreach my $case (
	[ 'CREATE OR REPLACE FUNCTION obix.uuidv7() RETURNS uuid LANGUAGE sql AS $$SELECT NULL::uuid$$',
		qr/permission denied for schema obix/ ],
	[ 'CREATE FUNCTION obix.publish(regclass, text) RETURNS uuid LANGUAGE sql AS $$SELECT NULL::uuid$$',
		qr/permission denied for schema obix/ ],
	[ 'ALTER FUNCTION obix.uuidv7() OWNER TO regress_obix_dba', qr/must be owner of function/ ],
	[ 'ALTER SCHEMA obix RENAME TO o',                         qr/must be owner of schema obix/ ],
	[ 'DROP SCHEMA obix CASCADE',                              qr/must be owner of schema obix/ ],
	[ 'ALTER EXTENSION obix SET SCHEMA evil',                  qr/does not support SET SCHEMA/ ],
	[ 'ALTER EXTENSION obix DROP TABLE obix.consumer',         qr/must be owner of table consumer/ ],
	[ 'ALTER EXTENSION obix DROP FUNCTION obix.guard()',       qr/must be owner of function/ ],
	[ 'ALTER TABLE obix.consumer DISABLE TRIGGER guard',       qr/must be owner of table consumer/ ],
	[ 'CREATE TRIGGER t BEFORE INSERT ON obix.consumer FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()',
		qr/permission denied for table consumer/ ],
	[ 'CREATE INDEX ON obix.consumer (id)', qr/must be owner of table consumer/ ],
	[ 'ALTER TABLE obix.outbox ENABLE ROW LEVEL SECURITY', qr/must be owner of table outbox/ ],
	[ 'UPDATE obix.consumer SET id = 1',  qr/permission denied for table consumer/ ],
	[ 'DELETE FROM obix.outbox',          qr/permission denied for table outbox/ ],
	[ 'TRUNCATE obix.consumer_state',     qr/permission denied for table consumer_state/ ],
	[ 'DROP TABLE obix.parked_event',     qr/must be owner of table parked_event/ ],
	[ 'SET obix.enabled = off',           qr/permission denied to set parameter/ ],
	[ 'ALTER DATABASE app SET obix.enabled = off',           qr/permission denied to set parameter/ ],
	[ 'ALTER DATABASE app SET obix.force_sync_commit = off', qr/permission denied to set parameter/ ],
	[ 'ALTER DATABASE app SET obix.dispatch_workers = 8',    qr/cannot be changed now/ ],
	[ 'CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION evil.shout()',
		qr/Must be superuser|permission denied to create event trigger/ ])
{
	dba_fails('app', @$case);
}

$node->safe_psql('postgres', 'GRANT SET ON PARAMETER obix.enabled TO regress_obix_dba');
dba('app', 'ALTER DATABASE app SET obix.enabled = off; ALTER DATABASE app RESET obix.enabled');
$node->safe_psql('postgres', 'REVOKE SET ON PARAMETER obix.enabled FROM regress_obix_dba');

# They would be part of the dump, which only a superuser could restore then.
$node->safe_psql('app', $default_privileges =~ s/GRANT/REVOKE/gr =~ s/ TO / FROM /gr =~ s/ WITH REVOKE OPTION//r);

#
# Using it
#
my $consume =
  q{SELECT consumer, state, "cursor", delivered, dead_lettered FROM obix.consumer_status ORDER BY 1};
dba(
	'app', q{
CREATE SCHEMA "App";
SET search_path = "App", public;
SELECT obix.create_outbox('orders', 100, 2);
CREATE TABLE applied (sequence bigint, usr text);
GRANT USAGE ON SCHEMA "App" TO regress_obix_member, regress_obix_foreign;
GRANT INSERT ON applied TO regress_obix_member;
GRANT SELECT ON orders TO regress_obix_member, regress_obix_foreign;
CREATE FUNCTION apply(e obix.event) RETURNS void LANGUAGE plpgsql AS $$BEGIN
	IF e.payload = '7' THEN RAISE EXCEPTION 'seven'; END IF;
	INSERT INTO applied VALUES (e.sequence, current_user); END$$;
SELECT obix.create_consumer('external', 'orders', on_failure => 'dead_letter', max_attempts => 1, backoff => '1 ms');
SELECT obix.create_consumer('handled', 'orders', handler => 'apply', on_failure => 'dead_letter', max_attempts => 1, backoff => '1 ms');
SELECT obix.create_consumer('lent', 'orders', handler => 'apply', types => '{lent}');
SELECT obix.alter_consumer('lent', owner => 'regress_obix_member');
SELECT count(obix.publish('orders', to_jsonb(g), type => CASE g WHEN 250 THEN 'lent' END)) FROM generate_series(1, 250) g;
BEGIN;
INSERT INTO orders (payload) VALUES ('1');
ROLLBACK;
SELECT obix.publish('orders', '1')});
consumers_ok($node, 'app', q{consumer <> 'external'}, q{lag_events = 0}, 'it works');
is_settled($node, 'app', '"App".orders', 'so does the worker');
is(dba('app', 'SELECT usr, count(*) FROM "App".applied GROUP BY 1 ORDER BY 1'),
	"regress_obix_dba|250\nregress_obix_member|1", 'handlers run as the owners');
dba(
	'app', q{
SELECT obix.ack('external', 5);
SELECT count(*) FROM obix.fetch('external', 1);
SELECT obix.fail('external', 6, 'six');
SELECT obix.acquire('external', '1 hour')});
no_dispatchers($node);
no_workers($node);
my $status = dba('app', $consume);
like($status, qr/external\|active\|5\|5\|1\nhandled\|active\|252\|250\|1\nlent\|active\|\d+\|1\|0/, 'status');

#
# Dumping and restoring it, as owner of both databases
#
$ENV{PGUSER} = 'regress_obix_dba';
foreach my $format ('custom', 'directory')
{
	my @jobs = $format eq 'directory' ? ('--jobs', '2') : ();

	$node->command_ok(
		[ 'pg_dump', '--format', $format, @jobs, '-f', "$dump.$format", $node->connstr('app') ],
		"$format: pg_dump");
	$node->safe_psql('postgres', "CREATE DATABASE $format OWNER regress_obix_dba",
		extra_params => [ '-U', 'postgres' ]);
	$node->safe_psql($format, $default_privileges, extra_params => [ '-U', 'postgres' ]);
	$node->command_ok(
		[
			'pg_restore', '--exit-on-error', @jobs, '-d', $node->connstr($format),
			"$dump.$format"
		],
		"$format: pg_restore");
	is(dba($format, $consume), $status, "$format: the consumers are where they were");
	is( dba($format, q{SELECT consumer, sequence, payload, state, error FROM obix.dead_letter ORDER BY 1}),
		"external|6|6|failed|six\nhandled|7|7|failed|seven",
		"$format: with their dead letters");
	dba(
		$format, q{
SELECT obix.publish('"App".orders', '1', type => 'lent');
SELECT obix.create_consumer('another', '"App".orders');
SELECT obix.create_outbox('another');
SELECT obix.publish('another', '1')});
	consumers_ok($node, $format, q{consumer IN ('handled', 'lent')}, 'lag_events = 0',
		"$format: handlers go on");
	is( dba($format, 'SELECT usr, count(*) FROM "App".applied GROUP BY 1 ORDER BY 1'),
		"regress_obix_dba|251\nregress_obix_member|2", "$format: as their owners");
}
delete $ENV{PGUSER};

#
# What a restore may not insert
#
my $consumer = sub {
	my ($owner, $id) = @_;

	return qq{INSERT INTO obix.consumer (id, consumer, outbox, owner, handler, ordering, batch_size, timeout, backoff, max_backoff, on_failure, hold_key, search_path)
VALUES ($id, 'planted$id', '"App".orders', $owner, 'evil.take', 'sequence', 1, '1 s', '1 s', '1 s', 'stop', false, 'evil')};
};
my $letter = sub {
	my ($id) = @_;

	return qq{INSERT INTO obix.parked_event (id, sequence, event_id, payload, recorded_at, state, attempts, parked_at)
VALUES ($id, 1, gen_random_uuid(), '"forged"', now(), 'failed', 1, now())};
};
$node->safe_psql(
	'app', q{
CREATE TABLE public.secret (sequence bigint PRIMARY KEY) PARTITION BY RANGE (sequence);
SET ROLE regress_obix_foreign;
SELECT obix.create_consumer('foreign', '"App".orders', start_after => 252, on_failure => 'dead_letter')});
my $foreign = $node->safe_psql('app', q{SELECT id FROM obix.consumer WHERE consumer = 'foreign'});
dba('app', 'CREATE FUNCTION evil.take(e obix.event) RETURNS void LANGUAGE sql AS $$ALTER ROLE regress_obix_dba SUPERUSER$$');
foreach my $case (
	[ $consumer->(q{'postgres'}, 90), qr/must be member of role "postgres"|must be able to SET ROLE "postgres"/ ],
	[ $consumer->(10,            90), qr/must be member of role|must be able to SET ROLE/ ],
	[ $consumer->(q{'regress_obix_foreign'}, 90), qr/must be member of role|must be able to SET ROLE/ ],
	[ $consumer->(4294967294,    90), qr/invalid role OID|must be able to SET ROLE|must be member/ ],
	[ $consumer->('NULL',        90), qr/violates not-null constraint/ ],
	[ "INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES ('secret', 1, 1)",
		qr/must be owner of table secret/ ],
	[ 'INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES (4294967294, 1, 1)',
		qr/does not exist/ ],
	[ $letter->($foreign),    qr/permission denied for consumer "foreign"/ ],
	[ $letter->("-$foreign"), qr/permission denied for consumer "foreign"/ ],
	[ "INSERT INTO obix.consumer_state (id, position, scanned) VALUES ($foreign, 0, 0)",
		qr/permission denied for consumer "foreign"/ ],
	[ "INSERT INTO obix.consumer_late (id, from_sequence, to_sequence) VALUES ($foreign, 1, 1)",
		qr/permission denied for consumer "foreign"/ ],
	[ "INSERT INTO obix.rebuild_state VALUES ($foreign, 'obix_rebuild_$foreign', false, now())",
		qr/permission denied for consumer "foreign"/ ],
	[ "INSERT INTO obix.rebuild_state VALUES (91, 'public', false, now())",
		qr/violates check constraint "rebuild_state_schema_check"/ ])
{
	dba_fails('app', @$case);
}

# A table that is no outbox can be entered by hand, and is none for that.
dba(
	'app', q{
CREATE TABLE list (sequence bigint PRIMARY KEY, id uuid, type text, key text, payload jsonb, headers jsonb, recorded_at timestamptz) PARTITION BY LIST (sequence);
CREATE TABLE list_1 PARTITION OF list FOR VALUES IN (1);
CREATE TRIGGER zz_obix_guard BEFORE INSERT OR UPDATE OR DELETE ON list FOR EACH ROW EXECUTE FUNCTION obix.guard();
CREATE TABLE plain (n integer);
INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES ('list', 1, 1), ('plain', 1, 1)});
foreach my $table ('list', 'plain')
{
	dba_fails('app', "SELECT obix.publish('$table', '1')", qr/"$table" is not an outbox/);
	dba_fails('app', "SELECT * FROM obix.read('$table')",  qr/"$table" is not an outbox/);
	dba_fails('app', "SELECT obix.ensure_partitions('$table')", qr/"$table" is not an outbox/);
}
dba('app', 'SELECT obix.fill_gaps(), obix.ensure_partitions()');
dba('app', 'DROP TABLE list, plain');

# What is put there for a consumer that is still to be made is not found by it.
my $next = $node->safe_psql('app', 'SELECT last_value + 1 FROM obix.consumer_id_seq');
dba(
	'app',
	join(';',
		$letter->($next),
		"INSERT INTO obix.consumer_state (id, position, scanned, parked, late) VALUES ($next, 252, 252, true, true), ($next, 1, 1, true, true), (-$next, 1, 1, false, false)",
		"INSERT INTO obix.consumer_late (id, from_sequence, to_sequence, requeued) VALUES ($next, 1, 1, true)",
		"INSERT INTO obix.rebuild_state VALUES ($next, 'obix_rebuild_$next', false, now())"));
# also where it is not committed yet
my $planter = $node->background_psql('app', extra_params => [ '-U', 'regress_obix_dba' ]);
$planter->query_safe('BEGIN; ' . $letter->("-$next"));
my $victim = start_psql(
	$node, 'app', 'victim', q{
SET ROLE regress_obix_foreign;
SELECT obix.create_consumer('victim', '"App".orders', start_after => 0);
SELECT count(*) FROM obix.dead_letter WHERE consumer = 'victim';
SELECT sequence FROM obix.fetch('victim', 1)});
$node->poll_query_until('app',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'create_consumer'});
$planter->query_safe('COMMIT');
$planter->quit;
is_deeply([ grep { $_ ne '' } finish_psql($victim) ], [ 0, 1 ], 'a new consumer has no past');
is( $node->safe_psql(
		'app', qq{
SELECT id, count(*) FROM (SELECT id FROM obix.consumer_state UNION ALL SELECT id FROM obix.consumer_late UNION ALL SELECT id FROM obix.parked_event
UNION ALL SELECT id FROM obix.rebuild_state) p WHERE abs(id) = $next GROUP BY 1}),
	"$next|1",
	'all that was there of it is gone');

#
# Dropping it
#
$node->safe_psql('app', q{SELECT obix.drop_consumer('foreign'), obix.drop_consumer('victim')});
dba_fails('app', 'DROP EXTENSION obix', qr/other objects depend on it/, 'it is not dropped while it is used');
dba('app', 'DROP EXTENSION obix CASCADE');
is( $node->safe_psql('app', q{SELECT count(*) FROM "App".orders; SELECT count(*) FROM pg_namespace WHERE nspname = 'obix'}),
	"252\n0",
	'with CASCADE it is, and leaves the events');
dba('app', 'CREATE EXTENSION obix; SELECT obix.create_outbox($$again$$)');
is( $node->safe_psql(
		'app', q{SELECT rolname FROM pg_roles WHERE rolsuper AND rolname ~ 'regress'}),
	'',
	'nobody has become a superuser');
unlike_log($node, qr/LOG:  ran as|PANIC|TRAP|terminated by signal/, 'and nothing ran as anybody else');

$node->stop;
done_testing();
