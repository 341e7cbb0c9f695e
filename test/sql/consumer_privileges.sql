--
-- Who may do what with a consumer: its owner, members of that role, superusers
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_consumer_privileges;
CREATE ROLE regress_obix_publisher;
CREATE ROLE regress_obix_consumer;
CREATE ROLE regress_obix_member IN ROLE regress_obix_consumer;
CREATE ROLE regress_obix_member_by_name NOINHERIT IN ROLE regress_obix_consumer;
CREATE ROLE regress_obix_other;
GRANT USAGE, CREATE ON SCHEMA obix_consumer_privileges TO regress_obix_publisher;
GRANT USAGE ON SCHEMA obix_consumer_privileges TO regress_obix_consumer, regress_obix_other;
SET search_path = obix_consumer_privileges, public;
CREATE VIEW progress AS
SELECT consumer, owner, state, "cursor", lag_events, lag IS NULL AS no_lag, delivered, failed, dead_lettered, last_error FROM obix.consumer_status;
GRANT SELECT ON progress TO PUBLIC;

SET ROLE regress_obix_publisher;
SELECT obix.create_outbox('orders', 100, 1);
SELECT count(obix.publish('orders', to_jsonb(n), key => 'k' || n % 2)) FROM generate_series(1, 9) n;

-- a consumer is for those who may read the outbox
SET ROLE regress_obix_consumer;
SELECT obix.create_consumer('mail', 'orders');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
GRANT SELECT (sequence, payload) ON orders TO regress_obix_consumer;
SET ROLE regress_obix_consumer;
SELECT obix.create_consumer('mail', 'orders');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
REVOKE ALL (sequence, payload) ON orders FROM regress_obix_consumer;
GRANT SELECT ON orders TO regress_obix_consumer, regress_obix_other;

-- who needs no other right, and may do everything then
SET ROLE regress_obix_consumer;
SELECT obix.create_consumer('mail', 'orders', max_attempts => 1, on_failure => 'dead_letter', hold_key => true);
SELECT * FROM progress;
SELECT sequence FROM obix.fetch('mail', 3) ORDER BY sequence;
SELECT obix.fail('mail', 1, 'secret of event 1');
SELECT sequence FROM obix.fetch('mail', 3) ORDER BY sequence;
SELECT obix.ack('mail', 4);
SELECT obix.acquire('mail');
SELECT obix.renew('mail', 1);
SELECT obix.release('mail', 1);
SELECT obix.pause('mail');
SELECT obix.resume('mail');
SELECT obix.alter_consumer('mail', batch_size => 7);
CALL obix.wait_for('mail', '1 h');
SELECT sequence, key, payload, state, error FROM obix.dead_letter ORDER BY sequence;
SELECT obix.requeue('mail', 1);
SELECT sequence FROM obix.fetch('mail') ORDER BY sequence;
SELECT obix.fail('mail', 1, 'secret of event 1');
SELECT * FROM progress;
SELECT obix.create_consumer('brief', 'orders');
SELECT obix.seek('brief', 3);
SELECT obix.drop_consumer('brief');

-- so may members
SET ROLE regress_obix_member;
SELECT sequence FROM obix.fetch('mail', 3) ORDER BY sequence;
SELECT obix.ack('mail', 6);
SELECT sequence, state, error FROM obix.dead_letter ORDER BY sequence;
SELECT obix.pause('mail');
SELECT obix.resume('mail');
-- and not those who would have to become the role first
SET ROLE regress_obix_member_by_name;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM obix.dead_letter;
-- the publisher, who owns the outbox, and others who may read it may not
SET ROLE regress_obix_publisher;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SET ROLE regress_obix_other;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', 9);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('mail', 7, 'no');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.renew('mail', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.release('mail', 1);
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('mail', '1 h');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.pause('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.resume('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('mail', 9);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.requeue('mail', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.discard('mail', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('mail', owner => 'regress_obix_other');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_consumer('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('mail', 'orders');
\echo :LAST_ERROR_SQLSTATE

-- everybody sees what consumers there are and how they fare, not what is in events
SELECT * FROM progress;
SELECT * FROM obix.dead_letter;
SELECT consumer, outbox, owner, on_failure, hold_key FROM obix.consumer;
SELECT position FROM obix.consumer_state;
SELECT last_error FROM obix.consumer_state;
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM obix.consumer_late;
SELECT count(*) FROM obix.rebuild_state;
SELECT count(*) FROM obix.rebuild_progress;
SELECT * FROM obix.parked_event;
\echo :LAST_ERROR_SQLSTATE
-- also not by a function that is evaluated first
CREATE FUNCTION pg_temp.tell(text) RETURNS boolean LANGUAGE plpgsql COST 0.0001 AS $$ BEGIN RAISE WARNING 'told %', $1; RETURN true; END $$;
SELECT consumer FROM obix.dead_letter WHERE pg_temp.tell(error);
-- how far behind is for those who may read the outbox
RESET ROLE;
REVOKE SELECT ON orders FROM regress_obix_other;
SET ROLE regress_obix_other;
SELECT * FROM progress;

-- nobody writes the tables
INSERT INTO obix.consumer SELECT * FROM obix.consumer;
\echo :LAST_ERROR_SQLSTATE
UPDATE obix.consumer SET owner = 'regress_obix_other';
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.consumer;
\echo :LAST_ERROR_SQLSTATE
UPDATE obix.consumer_state SET position = 0;
\echo :LAST_ERROR_SQLSTATE
INSERT INTO obix.consumer_state (id, position, scanned) VALUES (1, 0, 0);
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.consumer_late;
\echo :LAST_ERROR_SQLSTATE
INSERT INTO obix.consumer_late (id, from_sequence, to_sequence) VALUES (1, 1, 1);
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.parked_event;
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.rebuild_state;
\echo :LAST_ERROR_SQLSTATE
TRUNCATE obix.consumer_state;
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.consumer FOR UPDATE;
\echo :LAST_ERROR_SQLSTATE
SELECT nextval('obix.consumer_id_seq');
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.dead_letter;
\echo :LAST_ERROR_SQLSTATE
-- the owner of a consumer neither
SET ROLE regress_obix_consumer;
UPDATE obix.consumer_state SET position = 0;
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.parked_event;
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;

-- what the owner may not read any more is not delivered; the rest stays possible
REVOKE SELECT ON orders FROM regress_obix_consumer;
SET ROLE regress_obix_consumer;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', 9);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('mail', 7, 'no');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('mail', '1 h');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('mail', 0);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM progress;
SELECT obix.pause('mail');
SELECT obix.resume('mail');
SELECT obix.alter_consumer('mail', batch_size => 8);
SELECT obix.discard('mail', 3);
RESET ROLE;
GRANT SELECT ON orders TO regress_obix_consumer;

-- row-level security would hide events, so it is refused
CREATE POLICY some_events ON orders USING (sequence % 2 = 0);
ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
SET ROLE regress_obix_consumer;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
ALTER TABLE orders DISABLE ROW LEVEL SECURITY;

-- lent by a function that runs as the owner
CREATE FUNCTION next_mail() RETURNS SETOF bigint LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT sequence FROM obix.fetch('mail', 1) $$;
ALTER FUNCTION next_mail OWNER TO regress_obix_consumer;
SET ROLE regress_obix_other;
SELECT next_mail();
RESET ROLE;

-- superusers may use every consumer
SELECT sequence FROM obix.fetch('mail', 1) ORDER BY sequence;
SELECT obix.ack('mail', 7);
SELECT sequence, state, error FROM obix.dead_letter ORDER BY sequence;
SELECT error IS NOT NULL AS read FROM obix.parked_event WHERE state = 'failed';

-- a new owner: one that the user could become
SET ROLE regress_obix_consumer;
\set VERBOSITY sqlstate
SELECT obix.alter_consumer('mail', owner => 'regress_obix_other');
\set VERBOSITY default
RESET ROLE;
GRANT regress_obix_other TO regress_obix_consumer;
SET ROLE regress_obix_consumer;
SELECT obix.alter_consumer('mail', owner => 'regress_obix_other');
SELECT consumer, owner FROM progress;
-- who then needs the right to read himself
SET ROLE regress_obix_other;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SET ROLE regress_obix_member;
SELECT sequence FROM obix.fetch('mail') ORDER BY sequence;
RESET ROLE;
REVOKE regress_obix_other FROM regress_obix_consumer;
SET ROLE regress_obix_consumer;
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('mail', owner => 'regress_obix_consumer');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
SELECT obix.alter_consumer('mail', owner => 'regress_obix_consumer');

-- a role that is dropped leaves its consumers to superusers
CREATE ROLE regress_obix_leaver;
SELECT obix.create_consumer('orphan', 'orders');
SELECT obix.alter_consumer('orphan', owner => 'regress_obix_leaver');
DROP ROLE regress_obix_leaver;
SELECT consumer, state, "cursor" FROM obix.consumer_status WHERE consumer = 'orphan';
SELECT sequence FROM obix.fetch('orphan', 2) ORDER BY sequence;
SET ROLE regress_obix_consumer;
SELECT * FROM obix.fetch('orphan');
\echo :LAST_ERROR_SQLSTATE
SELECT consumer, state, "cursor" FROM obix.consumer_status WHERE consumer = 'orphan';
SELECT count(*) FROM obix.dead_letter WHERE consumer = 'orphan';
RESET ROLE;
SELECT obix.alter_consumer('orphan', owner => 'regress_obix_consumer');
SELECT consumer, owner FROM obix.consumer WHERE consumer = 'orphan';
SELECT obix.drop_consumer('orphan');

-- handlers: what the owner of the consumer may execute
CREATE SCHEMA obix_consumer_closed;
CREATE FUNCTION handle(obix.event) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION obix_consumer_closed.handle(obix.event) RETURNS void LANGUAGE sql AS '';
REVOKE EXECUTE ON FUNCTION handle(obix.event) FROM PUBLIC;
SET ROLE regress_obix_consumer;
SELECT obix.create_consumer('handled', 'orders', 9, handler => 'handle');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('handled', 'orders', 9, handler => 'obix_consumer_closed.handle');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
GRANT EXECUTE ON FUNCTION handle(obix.event) TO regress_obix_consumer;
SET ROLE regress_obix_consumer;
SELECT obix.create_consumer('handled', 'orders', 9, handler => 'handle');
RESET ROLE;
SELECT obix.alter_consumer('handled', owner => 'regress_obix_other');
\echo :LAST_ERROR_SQLSTATE
-- what counts is whether the new owner may, not whether the user may
SELECT obix.alter_consumer('handled', handler => 'obix_consumer_closed.handle');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_consumer('handled');

-- a name is bound when it is given: whoever can create functions elsewhere gains nothing
CREATE SCHEMA obix_consumer_trap;
GRANT USAGE, CREATE ON SCHEMA obix_consumer_trap TO PUBLIC;
SET ROLE regress_obix_consumer;
SET search_path = obix_consumer_trap, obix_consumer_privileges;
SELECT obix.create_consumer('trapped', 'orders', 9, handler => 'handle');
SET ROLE regress_obix_other;
CREATE FUNCTION obix_consumer_trap.handle(obix.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$;
SET ROLE regress_obix_consumer;
SELECT handler, search_path FROM obix.consumer WHERE consumer = 'trapped';
SELECT obix.alter_consumer('trapped', batch_size => 1);
SELECT handler, search_path FROM obix.consumer WHERE consumer = 'trapped';
SELECT obix.drop_consumer('trapped');

-- nothing of what obix does is found by way of the search_path of its caller
SET ROLE regress_obix_other;
SET search_path = obix_consumer_trap, pg_catalog;
DO $$
DECLARE
    type regtype;
    operator text;
BEGIN
    FOREACH type IN ARRAY '{integer,bigint,text,boolean,oid}'::regtype[] LOOP
        EXECUTE format('CREATE FUNCTION obix_consumer_trap.trap(%s, %1$s) RETURNS boolean LANGUAGE plpgsql AS %L', type,
                       $f$ BEGIN RAISE EXCEPTION 'trapped'; END $f$);
        FOREACH operator IN ARRAY '{=,<>,<,<=,>,>=,+,-}'::text[] LOOP
            EXECUTE format('CREATE OPERATOR obix_consumer_trap.%s (leftarg = %s, rightarg = %2$s, function = obix_consumer_trap.trap)', operator, type);
        END LOOP;
    END LOOP;
END $$;
CREATE FUNCTION obix_consumer_trap.pg_has_role(oid, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$;
CREATE FUNCTION obix_consumer_trap.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$;
CREATE TABLE obix_consumer_trap.consumer ();
CREATE TEMP TABLE consumer_state (id int);
CREATE TEMP TABLE parked_event (id int);
RESET ROLE;
SET search_path = pg_temp, obix_consumer_trap, pg_catalog;
SELECT 1 = 1 AS trap;
SELECT obix.create_consumer('trapped', 'obix_consumer_privileges.orders', max_attempts => 1, on_failure => 'dead_letter', hold_key => true);
SELECT count(*) FROM obix.fetch('trapped');
SELECT obix.fail('trapped', 1, 'bad');
SELECT count(*) FROM obix.fetch('trapped');
SELECT obix.ack('trapped', 9);
SELECT obix.requeue('trapped', 1);
SELECT count(*) FROM obix.fetch('trapped');
SELECT obix.fail('trapped', 1, 'bad');
SELECT obix.discard('trapped', 1);
SELECT obix.alter_consumer('trapped', batch_size => 1);
SELECT obix.pause('trapped');
SELECT obix.resume('trapped');
SELECT obix.acquire('trapped');
SELECT obix.renew('trapped', 1);
SELECT obix.release('trapped', 1);
SELECT obix.seek('trapped', 0);
CALL obix.wait_for('trapped', '1 h');
SELECT count(*) FROM obix.consumer_status;
SELECT count(*) FROM obix.dead_letter;
SELECT count(*) FROM obix.rebuild_progress;
SELECT obix.alter_consumer('trapped', clear => '{types}');
SELECT obix.create_consumer('trapped_too', 'obix_consumer_privileges.orders', ordering => 'available');
SELECT count(*) FROM obix.fetch('trapped_too');
SELECT obix.ack('trapped_too', 9);
SELECT obix.drop_consumer('trapped');
SELECT obix.drop_consumer('trapped_too');
RESET search_path;

-- who drops an outbox by force drops the consumers of others with it
SET search_path = obix_consumer_privileges, public;
SET ROLE regress_obix_publisher;
SELECT obix.drop_outbox('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_outbox('orders', force => true);
RESET ROLE;
SELECT count(*) FROM obix.consumer;
SELECT count(*) FROM obix.parked_event;

DROP TABLE pg_temp.consumer_state, pg_temp.parked_event;
DROP FUNCTION pg_temp.tell(text);
DROP SCHEMA obix_consumer_privileges, obix_consumer_closed, obix_consumer_trap CASCADE;
DROP ROLE regress_obix_publisher, regress_obix_consumer, regress_obix_member, regress_obix_member_by_name, regress_obix_other;
