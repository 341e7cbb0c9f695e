
# Handlers are anybody's functions, called by a process that has all rights.
# Here the owner of a consumer, an ordinary user, tries to get at these rights:
# in a handler, in triggers that are fired at its end and at commit, in cursors,
# in temporary objects, and by objects that stand in the way of obix's own
# statements.
#
# evil.record() notes as whom it is called; as a superuser it would make the
# attacker one.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db          = 'postgres';
my $node        = new_node('main', conf => "obix.dispatch_workers = 1\n");
my $as_attacker = [ '-U', 'regress_obix_attacker' ];

setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE ROLE regress_obix_attacker LOGIN;
CREATE ROLE regress_obix_victim LOGIN;
CREATE SCHEMA evil AUTHORIZATION regress_obix_attacker;
GRANT CREATE ON SCHEMA public TO regress_obix_attacker;
GRANT USAGE, CREATE ON SCHEMA evil TO regress_obix_victim;
SELECT obix.create_outbox('o');
SELECT obix.create_outbox('v');
GRANT SELECT, INSERT ON o TO regress_obix_attacker;
GRANT SELECT ON v TO regress_obix_victim;
CREATE TABLE test.secret (n integer);
CREATE TABLE test.good (n bigint);
SET ROLE regress_obix_victim;
CREATE TABLE evil.victims (n bigint);
RESET ROLE;
SET SESSION AUTHORIZATION regress_obix_victim;
CREATE FUNCTION evil.victim(e obix.event) RETURNS void LANGUAGE sql AS 'INSERT INTO evil.victims VALUES (e.sequence)';
SELECT obix.create_consumer('victim', 'v', handler => 'evil.victim');
RESET SESSION AUTHORIZATION});
$node->safe_psql(
	$db, q{
CREATE TABLE evil.seen (place text, usr text, what text, n bigserial);
GRANT ALL ON evil.seen TO PUBLIC;
GRANT ALL ON SEQUENCE evil.seen_n_seq TO PUBLIC;

CREATE FUNCTION evil.record(place text, what text DEFAULT NULL) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
	INSERT INTO evil.seen VALUES (place, current_user, what);
	IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN
		ALTER ROLE regress_obix_attacker SUPERUSER;
	END IF;
	RETURN 'recorded';
END $$;

-- the same without a trace in tables, for where nothing can be written
CREATE FUNCTION evil.shout(place text) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	RAISE LOG 'shout % %', place, current_user;
	RETURN 1;
END $$;

-- try everything to become somebody else, or to do what only others may
CREATE FUNCTION evil.escape(place text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	attempt text;
BEGIN
	PERFORM evil.record(place);
	FOREACH attempt IN ARRAY ARRAY[
		'RESET ROLE', 'SET ROLE NONE', 'SET ROLE postgres', 'SET LOCAL ROLE postgres', 'SET ROLE regress_obix_victim',
		'RESET SESSION AUTHORIZATION', 'SET SESSION AUTHORIZATION DEFAULT', 'SET SESSION AUTHORIZATION postgres',
		'SET LOCAL SESSION AUTHORIZATION postgres',
		'SELECT set_config(''role'', ''postgres'', false)', 'SELECT set_config(''role'', ''none'', true)',
		'SELECT set_config(''session_authorization'', ''postgres'', false)',
		'UPDATE pg_settings SET setting = ''postgres'' WHERE name OPERATOR(pg_catalog.=) ''session_replication_role''',
		'DISCARD ALL',
		'ALTER ROLE regress_obix_attacker SUPERUSER', 'GRANT regress_obix_victim TO regress_obix_attacker',
		'GRANT pg_read_all_data TO regress_obix_attacker',
		'SELECT rolpassword FROM pg_authid', 'SELECT pg_read_file(''PG_VERSION'')', 'COPY evil.seen TO PROGRAM ''true''',
		'SET session_replication_role = replica', 'SET log_statement = ''all''', 'SET obix.enabled = off',
		'SET obix.force_sync_commit = off',
		'CREATE FUNCTION evil.c(text) RETURNS text LANGUAGE internal AS ''textout''',
		'ALTER SYSTEM SET obix.enabled = off', 'CREATE EXTENSION plperlu', 'LOAD ''dummy''',
		'INSERT INTO test.secret VALUES (1)', 'SELECT * FROM public.v',
		'UPDATE obix.consumer SET owner = ''postgres''', 'UPDATE obix.consumer_state SET position = 0',
		'INSERT INTO obix.consumer_late VALUES (1, 1, 1)', 'DELETE FROM obix.parked_event',
		'SELECT obix.pause(''victim'')', 'SELECT obix.drop_consumer(''victim'')', 'SELECT obix.seek(''victim'', 0)',
		'SELECT obix.alter_consumer(''victim'', handler => ''evil.handler'')',
		'SELECT obix.alter_consumer(''attack'', owner => ''postgres'')',
		'SELECT obix.alter_consumer(''attack'', owner => ''regress_obix_victim'')',
		'SELECT pg_terminate_backend(pg_backend_pid())', 'SELECT pg_cancel_backend(pg_backend_pid())']
	LOOP
		BEGIN
			EXECUTE attempt;
			PERFORM evil.record(place, attempt);
		EXCEPTION WHEN OTHERS THEN
			NULL;
		END;
		PERFORM evil.record(place);
	END LOOP;
END $$;
ALTER FUNCTION evil.record OWNER TO regress_obix_attacker;
ALTER FUNCTION evil.shout OWNER TO regress_obix_attacker;
ALTER FUNCTION evil.escape OWNER TO regress_obix_attacker});

# What the attacker makes.
$node->safe_psql(
	$db, q{
CREATE TABLE evil.queue (place text, again boolean);
CREATE FUNCTION evil.on_queue() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
	IF new.again THEN
		SET CONSTRAINTS ALL DEFERRED;
		INSERT INTO evil.queue VALUES (new.place, false);
		RETURN NULL;
	END IF;
	PERFORM evil.escape('trigger ' || new.place);
	CASE new.place
		WHEN 'cursor' THEN
			EXECUTE 'DECLARE held_at_commit CURSOR WITH HOLD FOR SELECT evil.record(''cursor at commit'')';
		WHEN 'temporary' THEN
			EXECUTE 'CREATE TEMP TABLE at_commit (n integer) ON COMMIT DELETE ROWS';
			EXECUTE 'CREATE INDEX ON at_commit ((n + evil.shout(''index at commit'')))';
		WHEN 'notify' THEN
			PERFORM pg_notify('evil', 'x');
			PERFORM obix.publish('public.o', '"published at commit"', type => 'other');
		WHEN 'error' THEN
			RAISE EXCEPTION 'error at commit';
		ELSE NULL;
	END CASE;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER escape AFTER INSERT ON evil.queue DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION evil.on_queue();

CREATE FUNCTION evil.gate() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	PERFORM evil.escape('gate');
	INSERT INTO evil.queue VALUES ('gate', true);
	RETURN true;
END $$;

CREATE FUNCTION evil.handler(e obix.event) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
	PERFORM evil.escape('handler');
	CASE e.payload #>> '{}'
		WHEN 'trigger' THEN INSERT INTO evil.queue VALUES ('trigger', false);
		WHEN 'again' THEN INSERT INTO evil.queue VALUES ('again', true);
		WHEN 'cursor' THEN
			EXECUTE 'DECLARE held CURSOR WITH HOLD FOR SELECT evil.record(''cursor'')';
			INSERT INTO evil.queue VALUES ('cursor', true);
		WHEN 'temporary' THEN
			CREATE TEMP TABLE emptied (n integer) ON COMMIT DELETE ROWS;
			CREATE INDEX ON emptied ((n + evil.shout('index')));
			INSERT INTO emptied VALUES (1);
			CREATE TEMP TABLE dropped (n integer DEFAULT evil.shout('default')) ON COMMIT DROP;
			INSERT INTO dropped VALUES (DEFAULT);
			INSERT INTO evil.queue VALUES ('temporary', true);
		WHEN 'notify' THEN INSERT INTO evil.queue VALUES ('notify', true);
		WHEN 'error' THEN INSERT INTO evil.queue VALUES ('error', true);
		WHEN 'raise' THEN RAISE EXCEPTION 'error in the handler';
		WHEN 'caught' THEN
			BEGIN
				PERFORM evil.escape('subtransaction');
				RAISE EXCEPTION 'caught';
			EXCEPTION WHEN OTHERS THEN
				PERFORM evil.escape('after a subtransaction');
			END;
		WHEN 'shadow' THEN
			-- what obix's own statements name, for the next step in this session
			EXECUTE 'CREATE TEMP VIEW consumer AS SELECT evil.record(''temporary view'')';
			EXECUTE 'CREATE TEMP VIEW consumer_state AS SELECT evil.record(''temporary view'')';
			EXECUTE 'CREATE TEMP VIEW consumer_late AS SELECT evil.record(''temporary view'')';
			EXECUTE 'CREATE TEMP VIEW parked_event AS SELECT evil.record(''temporary view'')';
			EXECUTE 'CREATE TEMP VIEW followers AS SELECT evil.record(''temporary view'')';
			EXECUTE 'CREATE TEMP VIEW pg_class AS SELECT evil.record(''temporary view'')';
			EXECUTE 'CREATE DOMAIN pg_temp.int8 AS pg_catalog.int8 CHECK (evil.record(''temporary domain'') IS NOT NULL)';
			EXECUTE 'CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (evil.record(''temporary domain'') IS NOT NULL)';
		ELSE NULL;
	END CASE;
END $$;
CREATE FUNCTION evil.batch(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM evil.escape('batch');
	RAISE EXCEPTION 'one by one';
END $$;

SET search_path = evil, pg_catalog, pg_temp;
SELECT obix.create_consumer('attack', 'public.o', handler => 'evil.handler', batch_handler => 'evil.batch', gate => 'evil.gate',
	on_failure => 'dead_letter', max_attempts => 2, backoff => '10 ms', types => '{attack}');
}, extra_params => $as_attacker);

# In the way of statements that are not qualified: operators of exactly the
# types that obix compares, for the attacker's search_path and in public.
foreach my $schema ('evil', 'public')
{
	foreach my $type (
		'integer',     'bigint', 'text', 'uuid', 'oid', 'boolean',
		'timestamptz', 'name',   'jsonb')
	{
		$node->safe_psql(
			$db, qq{
CREATE FUNCTION $schema.compare($type, $type) RETURNS boolean LANGUAGE plpgsql AS
	'BEGIN PERFORM evil.record(''operator of $type in $schema''); RETURN true; END';
CREATE OPERATOR $schema.= (LEFTARG = $type, RIGHTARG = $type, FUNCTION = $schema.compare);
CREATE OPERATOR $schema.<> (LEFTARG = $type, RIGHTARG = $type, FUNCTION = $schema.compare);
CREATE OPERATOR $schema.< (LEFTARG = $type, RIGHTARG = $type, FUNCTION = $schema.compare);
CREATE OPERATOR $schema.<= (LEFTARG = $type, RIGHTARG = $type, FUNCTION = $schema.compare);
CREATE OPERATOR $schema.> (LEFTARG = $type, RIGHTARG = $type, FUNCTION = $schema.compare);
CREATE OPERATOR $schema.>= (LEFTARG = $type, RIGHTARG = $type, FUNCTION = $schema.compare)},
			extra_params => $as_attacker);
	}
	$node->safe_psql(
		$db, qq{
CREATE FUNCTION $schema.minus(bigint, integer) RETURNS bigint LANGUAGE plpgsql AS
	'BEGIN PERFORM evil.record(''minus in $schema''); RETURN \$1 OPERATOR(pg_catalog.-) \$2; END';
CREATE OPERATOR $schema.- (LEFTARG = bigint, RIGHTARG = integer, FUNCTION = $schema.minus);
CREATE OPERATOR $schema.+ (LEFTARG = bigint, RIGHTARG = integer, FUNCTION = $schema.minus);
CREATE FUNCTION $schema.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS
	'BEGIN PERFORM evil.record(''function in $schema''); RETURN pg_catalog.now(); END';
CREATE FUNCTION $schema.pg_has_role(oid, text) RETURNS boolean LANGUAGE plpgsql AS
	'BEGIN PERFORM evil.record(''function in $schema''); RETURN true; END';
CREATE VIEW $schema.consumer AS SELECT evil.record('view in $schema');
CREATE VIEW $schema.parked_event AS SELECT evil.record('view in $schema');
CREATE VIEW $schema.consumer_late AS SELECT evil.record('view in $schema')},
		extra_params => $as_attacker);
}

#
# In a dispatcher
#
my $offset = log_offset($node);
my @places = (
	'nothing', 'trigger', 'again',  'cursor', 'temporary', 'notify',
	'error',   'raise',   'caught', 'shadow', 'nothing',   'nothing');
$node->safe_psql(
	$db,
	join(', ',
		'SELECT ' . "obix.publish('o', '\"start\"', type => 'attack')",
		map { "obix.publish('o', '\"$_\"', type => 'attack', key => '$_')" } @places));
consumer_ok(
	$node, $db, 'attack',
	q{lag_events = 0 AND dead_lettered = 2 AND delivered = 11},
	'the attack has ended');
is( $node->safe_psql(
		$db,
		q{SELECT string_agg(key || ': ' || error, ', ' ORDER BY sequence) FROM obix.dead_letter}
	),
	'error: error at commit, raise: error in the handler',
	'what fails is a dead letter');

# A cursor may be closed unread.
sub places
{
	return $node->safe_psql($db,
		q{SELECT string_agg(DISTINCT place, ', ' ORDER BY place) FROM evil.seen WHERE place !~ '^cursor'}
	);
}
is( places(),
	'after a subtransaction, gate, handler, trigger again, trigger cursor, trigger gate, trigger notify, trigger temporary, trigger trigger',
	'it ran everywhere, and no operator, function, table or type of its own was met');
like(
	slurp_file($node->logfile, $offset),
	qr/shout index regress_obix_attacker.*shout default regress_obix_attacker.*shout index at commit regress_obix_attacker/s,
	'also where it left no trace');
unlike_log($node, qr/shout .* (?!regress_obix_attacker)\w+$/, 'never as anybody else', $offset);
is($node->safe_psql($db, q{SELECT string_agg(DISTINCT usr, ', ') FROM evil.seen}),
	'regress_obix_attacker', 'always as the owner of the consumer');
is( $node->safe_psql(
		$db, q{SELECT string_agg(DISTINCT what, ', ') FROM evil.seen WHERE what IS NOT NULL}),
	'',
	'no attempt to escape succeeded');

# The session is as it was: somebody else's handler runs in it as its owner.
$node->safe_psql($db, q{SELECT obix.publish('v', '1')});
consumer_ok(
	$node, $db, 'victim',
	q{state = 'active' AND delivered = 1 AND "cursor" = 1},
	'others are served as before');

#
# A handler that is somebody else's SECURITY DEFINER function: it runs as its
# owner, and what it has left for later as that of the consumer; from PostgreSQL 18
# on triggers run as who has caused them, then or later.
#
my $later = $node->pg_version->major >= 18 ? 'regress_obix_victim' : 'regress_obix_attacker';
$node->safe_psql(
	$db, q{
TRUNCATE evil.seen;
GRANT ALL ON evil.queue TO regress_obix_victim;
CREATE OR REPLACE FUNCTION evil.handler(e obix.event) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
	PERFORM evil.record('definer');
	INSERT INTO evil.queue VALUES ('definer', false), ('definer again', true);
END $$;
ALTER FUNCTION evil.handler OWNER TO regress_obix_victim;
SELECT obix.alter_consumer('attack', clear => '{gate,batch_handler}');
SELECT obix.publish('o', '1', type => 'attack')});
consumer_ok(
	$node, $db, 'attack',
	q{lag_events = 0 AND delivered = 12},
	'a handler with SECURITY DEFINER');
is( $node->safe_psql(
		$db, q{SELECT string_agg(DISTINCT place || ' as ' || usr, ', ') FROM evil.seen}),
	"definer as regress_obix_victim, trigger definer again as $later, trigger definer as $later",
	'runs as its owner, its triggers as the owner of the consumer');
# As the victim they have dropped its consumer.
$node->safe_psql($db, q{SELECT obix.create_consumer('victim', 'v', handler => 'evil.victim')},
	extra_params => [ '-U', 'regress_obix_victim' ])
  if $later eq 'regress_obix_victim';

#
# In sessions: statements of obix as the owner of its tables, and those of a
# superuser with a search_path of the attacker's
#
$node->safe_psql($db, 'TRUNCATE evil.seen');
foreach my $user ('regress_obix_attacker', 'postgres')
{
	foreach
	  my $path ('evil, pg_catalog', 'public, pg_catalog, pg_temp', 'pg_temp, evil, pg_catalog')
	{
		my ($result, $stdout, $stderr) = $node->psql(
			$db, qq{
SET search_path = $path;
CREATE TEMP VIEW consumer AS SELECT evil.record('temporary view in a session');
CREATE TEMP VIEW parked_event AS SELECT evil.record('temporary view in a session');
SELECT obix.create_consumer('session', 'public.o', types => '{none}', on_failure => 'dead_letter', hold_key => true, max_attempts => 2);
SELECT * FROM obix.fetch('session');
SELECT obix.alter_consumer('session', clear => '{types}', backoff => '1 ms');
SELECT * FROM obix.fetch('session', 3);
SELECT obix.ack('session', 1);
SELECT obix.fail('session', 2, 'once');
SELECT pg_sleep(0.01);
SELECT obix.fail('session', 2, 'twice');
SELECT * FROM obix.fetch('session', 3);
SELECT obix.requeue('session', 2);
SELECT * FROM obix.fetch('session', 3);
SELECT obix.ack('session', 2);
SELECT obix.release('session', obix.acquire('session'));
CALL obix.wait_for('session', '1 ms');
SELECT obix.pause('session'), obix.resume('session'), obix.seek('session', 0);
SELECT * FROM obix.consumer_status, obix.dead_letter, obix.rebuild_progress;
SELECT obix.drop_consumer('session');},
			extra_params => [ '-U', $user ]);
		is($result . $stderr, '0', "$user uses obix with search_path $path");
	}
}
is(places(), '', 'and meets nothing of the attacker');

#
# Nobody makes or gets a consumer of another role
#
foreach my $case (
	[   q{SELECT obix.alter_consumer('attack', owner => 'postgres')},
		qr/must be able to SET ROLE|must be member of role/ ],
	[   q{SELECT obix.alter_consumer('attack', owner => 'regress_obix_victim')},
		qr/must be able to SET ROLE|must be member of role/ ],
	[   q{SELECT obix.alter_consumer('victim', handler => 'evil.handler')},
		qr/permission denied for consumer "victim"/ ],
	[   q{SELECT obix.alter_consumer('victim', owner => 'regress_obix_attacker')},
		qr/permission denied for consumer "victim"/ ],
	[   q{UPDATE obix.consumer SET owner = 'postgres' WHERE consumer = 'attack'},
		qr/permission denied for table consumer/ ],
	[   q{INSERT INTO obix.consumer SELECT 99, 'x', outbox, 'postgres' FROM obix.consumer LIMIT 1},
		qr/permission denied for table consumer/ ],
	[   q{SELECT obix.create_consumer('more', 'v', handler => 'evil.handler')},
		qr/permission denied for table v/ ],
	[   q{SELECT obix.create_consumer('more', 'o', handler => 'test.record')},
		qr/does not exist|permission denied/ ])
{
	my ($statement, $error) = @$case;
	my ($result, $stdout, $stderr) = $node->psql($db, $statement, extra_params => $as_attacker);

	like($stderr, $error, $statement);
}
# A member may, and it then runs as that role.
$node->safe_psql($db,
	q{GRANT regress_obix_victim TO regress_obix_attacker; TRUNCATE evil.seen});
$node->safe_psql(
	$db,
	q{SELECT obix.create_consumer('member', 'o', handler => 'evil.handler', start_after => (SELECT max(sequence) FROM o))},
	extra_params => $as_attacker);
$node->safe_psql(
	$db, q{
GRANT SELECT ON o TO regress_obix_victim;
CREATE OR REPLACE FUNCTION evil.handler(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT evil.record('member')$$}
);
$node->safe_psql(
	$db,
	q{SELECT obix.alter_consumer('member', owner => 'regress_obix_victim'); SELECT obix.publish('o', '1')},
	extra_params => $as_attacker);
consumer_ok(
	$node, $db, 'member',
	q{lag_events = 0 AND owner = 'regress_obix_victim'::regrole},
	'a member of a role can give it a consumer');
is($node->safe_psql($db, q{SELECT string_agg(DISTINCT usr, ', ') FROM evil.seen}),
	'regress_obix_victim', 'which runs as that role');

#
# An owner who may not read the outbox gets nothing
#
my %revocations = (
	'SELECT on the outbox' => [
		'REVOKE SELECT ON o FROM regress_obix_attacker',
		'GRANT SELECT ON o TO regress_obix_attacker',
		'may not read outbox "o"' ],
	'EXECUTE of the handler' => [
		'REVOKE EXECUTE ON FUNCTION evil.handler FROM PUBLIC',
		'GRANT EXECUTE ON FUNCTION evil.handler TO PUBLIC',
		'may not execute function evil.handler' ],
	'USAGE of its schema' => [
		'ALTER SCHEMA evil OWNER TO postgres; REVOKE ALL ON SCHEMA evil FROM regress_obix_attacker',
		'GRANT ALL ON SCHEMA evil TO regress_obix_attacker',
		'may not execute function evil.handler' ],
	'rows by a policy' => [
		'ALTER TABLE o ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON o FOR SELECT USING (false)',
		'DROP POLICY p ON o; ALTER TABLE o DISABLE ROW LEVEL SECURITY',
		'may not read outbox "o"' ]);
$node->safe_psql($db, q{REVOKE regress_obix_victim FROM regress_obix_attacker});
$node->safe_psql(
	$db, q{
CREATE FUNCTION test.good(e obix.event) RETURNS void LANGUAGE sql AS 'INSERT INTO test.good VALUES (e.sequence)';
SELECT obix.create_consumer('good', 'o', handler => 'test.good')});
foreach my $name (sort keys %revocations)
{
	my ($revoke, $grant, $error) = @{ $revocations{$name} };

	$node->safe_psql($db,
		"$revoke; TRUNCATE evil.seen; SELECT obix.publish('o', '1', type => 'attack')");
	consumer_ok(
		$node, $db, 'attack',
		"state = 'parked' AND last_error ~ '$error' AND lag_events = 1 AND attempts = 0",
		"without $name the consumer is parked");
	consumer_ok($node, $db, 'good', 'lag_events = 0', "without $name: others go on");
	$node->safe_psql($db, "$grant; SELECT obix.resume('attack')");
	consumer_ok(
		$node, $db, 'attack',
		"state = 'active' AND lag_events = 0",
		"$name granted, it goes on");
}

is( $node->safe_psql(
		$db, q{SELECT rolsuper FROM pg_roles WHERE rolname = 'regress_obix_attacker'}),
	'f',
	'after all this the attacker is an ordinary user');
unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'and the server is well');

$node->stop;
done_testing();
