--
-- Groups, SET ROLE, owners that change or go, EXECUTE taken from PUBLIC; what
-- errors tell; and names.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_roles;
CREATE ROLE regress_obix_team;
CREATE ROLE regress_obix_one IN ROLE regress_obix_team;
CREATE ROLE regress_obix_two NOINHERIT IN ROLE regress_obix_team;
CREATE ROLE regress_obix_heir;
CREATE ROLE regress_obix_publisher;
GRANT USAGE ON SCHEMA obix_roles TO PUBLIC;
SET search_path = obix_roles, public;
CREATE VIEW leaves AS
SELECT o.outbox, pg_get_userbyid(c.relowner) AS owner, count(*) AS leaves FROM obix.outbox o, obix.partitions(o.outbox) p JOIN pg_class c ON c.oid = p.partition GROUP BY 1, 2;
GRANT SELECT ON leaves TO PUBLIC;

-- a team owns schema and outbox: members administer, those who do not inherit after SET ROLE
ALTER SCHEMA obix_roles OWNER TO regress_obix_team;
SET ROLE regress_obix_team;
SELECT obix.create_outbox('orders', 5, 1);
SET ROLE regress_obix_one;
SELECT obix.publish('orders', '1') IS NOT NULL AS published;
SELECT obix.alter_outbox('orders', premake => 2);
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
SELECT obix.create_consumer('one', 'orders');
SET SESSION AUTHORIZATION regress_obix_two;
SELECT obix.publish('orders', '2');
SELECT obix.alter_outbox('orders', premake => 1);
SELECT obix.ensure_partitions() AS none_of_mine;
SET ROLE regress_obix_team;
SELECT obix.publish('orders', '2') IS NOT NULL AS published;
SELECT obix.alter_outbox('orders', premake => 1);
SELECT obix.create_consumer('team', 'orders');
RESET ROLE;
SELECT count(*) FROM obix.fetch('team');
RESET SESSION AUTHORIZATION;
-- what a member makes is the member's
SELECT consumer, owner FROM obix.consumer WHERE consumer IN ('one', 'team') ORDER BY 1;
SET ROLE regress_obix_team;
SELECT count(*) FROM obix.fetch('one');
SET ROLE regress_obix_one;
SELECT count(*) FROM obix.fetch('team');
SELECT obix.alter_consumer('one', owner => 'regress_obix_team');
\set VERBOSITY sqlstate
SELECT obix.alter_consumer('one', owner => 'regress_obix_heir');
\set VERBOSITY default
RESET ROLE;

-- published as one role, committed as another
SET ROLE regress_obix_team;
GRANT INSERT ON orders TO regress_obix_publisher;
RESET ROLE;
BEGIN;
SET LOCAL ROLE regress_obix_publisher;
SELECT obix.publish('orders', '3') IS NOT NULL AS published;
SET LOCAL ROLE regress_obix_heir;
COMMIT;
SELECT max(sequence) FROM obix.read('orders');

-- an outbox changes hands with its partitions
SELECT owner, leaves > 2 AS all FROM leaves ORDER BY 1;
ALTER TABLE orders RENAME TO renamed;
ALTER TABLE renamed RENAME TO orders;
BEGIN;
ALTER TABLE orders OWNER TO regress_obix_heir;
SELECT owner, leaves > 2 AS all FROM leaves ORDER BY 1;
ROLLBACK;
SELECT owner FROM leaves;
ALTER TABLE orders OWNER TO regress_obix_heir;
SELECT owner FROM leaves;
SET ROLE regress_obix_team;
SELECT count(*) FROM orders_p0;
CREATE INDEX ON orders_default (key);
SELECT obix.alter_outbox('orders', premake => 1);
RESET ROLE;
-- but not those that somebody has given to another role
ALTER TABLE orders_p0 OWNER TO regress_obix_publisher;
ALTER TABLE orders OWNER TO regress_obix_team;
SELECT owner, leaves > 1 AS more FROM leaves ORDER BY 1;
ALTER TABLE orders_p0 OWNER TO regress_obix_team;
REASSIGN OWNED BY regress_obix_team TO regress_obix_heir;
SELECT owner FROM leaves;
SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'orders'::regclass;
-- no consumer goes with it: those who read are others
SELECT consumer, owner FROM obix.consumer WHERE consumer IN ('one', 'team') ORDER BY 1;
SET ROLE regress_obix_team;
SELECT count(*) FROM obix.fetch('team');
RESET ROLE;

-- roles that are gone: their consumers are left to superusers, and in nobody's way
CREATE ROLE regress_obix_gone;
GRANT SELECT ON orders TO regress_obix_gone;
SET ROLE regress_obix_gone;
SELECT obix.create_consumer('gone', 'orders', on_failure => 'dead_letter', max_attempts => 1);
SELECT obix.fail('gone', 1, 'secret');
RESET ROLE;
DROP OWNED BY regress_obix_gone;
DROP ROLE regress_obix_gone;
SET ROLE regress_obix_heir;
SELECT obix.create_consumer('heir', 'orders');
SELECT consumer, owner::text ~ '^\d+$' AS gone, last_error FROM obix.consumer_status WHERE consumer IN ('gone', 'heir') ORDER BY 1;
SELECT count(*) FROM obix.dead_letter;
SELECT obix.drop_consumer('gone');
RESET ROLE;
SELECT consumer, sequence, error FROM obix.dead_letter;
SELECT obix.drop_consumer('gone');
SET ROLE regress_obix_heir;
SELECT obix.drop_outbox('orders', true);
RESET ROLE;
SELECT count(*) FROM obix.consumer WHERE consumer IN ('one', 'team', 'heir');

-- DROP OWNED takes outboxes like any table
ALTER SCHEMA obix_roles OWNER TO regress_obix_heir;
SET ROLE regress_obix_heir;
SELECT obix.create_outbox('owned');
RESET ROLE;
DROP OWNED BY regress_obix_team;
SELECT count(*) FROM obix.outbox WHERE outbox = 'owned'::regclass;

-- functions are for those who may execute them
BEGIN;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA obix FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA obix FROM PUBLIC;
GRANT EXECUTE ON FUNCTION obix.publish TO regress_obix_publisher;
GRANT INSERT ON owned TO regress_obix_publisher;
SET LOCAL ROLE regress_obix_publisher;
SELECT obix.publish('owned', '1') IS NOT NULL AS published;
SAVEPOINT s;
SELECT * FROM obix.read('owned');
ROLLBACK TO s;
INSERT INTO owned (payload) VALUES ('1');
ROLLBACK TO s;
RESET ROLE;
GRANT EXECUTE ON FUNCTION obix.next_sequence, obix.uuidv7 TO regress_obix_publisher;
SET LOCAL ROLE regress_obix_publisher;
INSERT INTO owned (payload) VALUES ('2');
SAVEPOINT s;
SELECT obix.create_outbox('mine');
ROLLBACK;
-- also where a single function is to be kept from all but some
BEGIN;
REVOKE EXECUTE ON FUNCTION obix.create_outbox FROM PUBLIC;
SET LOCAL ROLE regress_obix_heir;
SELECT obix.create_outbox('more');
ROLLBACK;

-- who may only publish is not told of the rows of others
SET ROLE regress_obix_heir;
SELECT obix.create_outbox('slots', 100, 0);
CREATE UNIQUE INDEX slot ON slots_p0 ((payload ->> 'slot')) WHERE payload IS NOT NULL;
ALTER TABLE slots_p0 ADD CONSTRAINT alone EXCLUDE USING btree (((payload -> 'n')::int) WITH =) WHERE (payload ? 'n');
GRANT INSERT ON slots TO regress_obix_publisher;
SELECT obix.publish('slots', '{"slot": "secret", "n": 7}') IS NOT NULL AS published;
SELECT obix.publish('slots', '{"slot": "secret"}');
SELECT obix.publish('slots', '{"n": 7}');
SET ROLE regress_obix_publisher;
SELECT obix.publish('slots', '{"slot": "secret"}');
SELECT obix.publish('slots', '{"n": 7}');
INSERT INTO slots (payload) VALUES ('{"n": 7}');
RESET ROLE;

-- whatever could be in the way of a partition's name
SET ROLE regress_obix_heir;
CREATE TYPE busy_default AS ENUM ('a');
CREATE DOMAIN busy_p0 AS int;
CREATE SEQUENCE busy_p3;
CREATE TYPE busy_p6 AS (n int);
CREATE VIEW busy_p9 AS SELECT 1 AS n;
SELECT obix.create_outbox('busy', 3, 1);
SELECT count(obix.publish('busy', to_jsonb(n))) FROM generate_series(1, 7) n;
SELECT obix.ensure_partitions('busy') >= 0 AS ensured;
SELECT obix.recover_default('busy') >= 0 AS recovered;
SELECT partition, from_sequence FROM obix.partitions('busy') WHERE from_sequence < 9 OR from_sequence IS NULL ORDER BY 2;
-- and names that have to be quoted, or are as long as can be
SELECT obix.create_outbox(quote_ident(n), 3, 1) IS NOT NULL AS created
FROM unnest(ARRAY['a"b', 'a.b', E'a\nb', 'a%sb%n', E'a\\b''c', '"; DROP TABLE owned; --', repeat('x', 63), repeat(U&'\00e4', 31) || 'x', repeat(U&'\+01f600', 15) || 'xyz']) n;
SELECT count(*) FROM (SELECT outbox, obix.publish(outbox, '1') FROM obix.outbox o JOIN pg_class c ON c.oid = o.outbox, generate_series(1, 7) WHERE relowner = 'regress_obix_heir'::regrole AND relname NOT IN ('busy', 'owned', 'slots') OFFSET 0) p;
SELECT obix.ensure_partitions() >= 0 AS ensured;
SELECT obix.create_consumer(left(relname, 60), oid, types => ARRAY[relname]) FROM pg_class WHERE oid IN (SELECT outbox FROM obix.outbox) AND octet_length(relname) < 60 AND relowner = 'regress_obix_heir'::regrole;
SELECT count(*), min(m), max(m) FROM (SELECT obix.high_water_mark(outbox) AS m FROM obix.outbox o JOIN pg_class c ON c.oid = o.outbox WHERE relowner = 'regress_obix_heir'::regrole AND relname NOT IN ('busy', 'owned', 'slots') OFFSET 0) h;
SELECT obix.drop_outbox(outbox, true) FROM obix.outbox o JOIN pg_class c ON c.oid = o.outbox WHERE relowner = 'regress_obix_heir'::regrole;
RESET ROLE;

DROP SCHEMA obix_roles CASCADE;
DROP ROLE regress_obix_one, regress_obix_two, regress_obix_team, regress_obix_heir, regress_obix_publisher;
