--
-- CREATE EXTENSION and DROP EXTENSION: nothing is lost unless it is asked for
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_extension;
SET search_path = obix_extension, public;
SELECT obix.create_outbox('orders', 10, 1);
SELECT count(obix.publish('orders', to_jsonb(n), key => 'k' || n)) FROM generate_series(1, 3) n;

-- where it lives is fixed
CREATE EXTENSION obix;
\echo :LAST_ERROR_SQLSTATE
ALTER EXTENSION obix SET SCHEMA public;
\echo :LAST_ERROR_SQLSTATE

-- refused while there are outboxes
\set VERBOSITY terse
DROP EXTENSION obix;
\echo :LAST_ERROR_SQLSTATE
DROP TABLE obix.outbox;
\echo :LAST_ERROR_SQLSTATE
DROP SCHEMA obix;
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY default
SELECT obix.publish('orders', '4') IS NOT NULL AS published;

-- rolled back, nothing has happened
BEGIN;
DROP EXTENSION obix CASCADE;
SELECT to_regclass('obix.outbox') IS NULL AS dropped;
ROLLBACK;
SELECT obix.publish('orders', '5') IS NOT NULL AS published;
SELECT sequence, key, payload FROM obix.read('orders') ORDER BY sequence;

-- with CASCADE the tables and their events stay, as plain tables
BEGIN;
SELECT obix.publish('orders', '"published, then without its extension"') IS NOT NULL AS published;
ROLLBACK;
DROP EXTENSION obix CASCADE;
SELECT to_regclass('obix.outbox') IS NULL AS dropped;
SELECT sequence, key, payload FROM orders ORDER BY sequence;
SELECT count(*) AS triggers FROM pg_trigger
WHERE tgrelid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'orders'::regclass) OR tgrelid = 'orders'::regclass;
SELECT attname, pg_get_expr(adbin, adrelid) AS default FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
WHERE adrelid = 'orders'::regclass ORDER BY attnum;
INSERT INTO orders (sequence, id, payload, recorded_at) VALUES (100, '01890000-0000-7000-8000-000000000001', '1', now());
DELETE FROM orders WHERE sequence = 1;
UPDATE orders SET sequence = 12 WHERE sequence = 2;
SELECT sequence, payload FROM orders ORDER BY sequence;

-- made again, it does not know them; new ones work
CREATE EXTENSION obix;
SELECT count(*) FROM obix.outbox;
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('orders_again', 10, 1);
SELECT obix.publish('orders_again', '1') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('orders_again') ORDER BY sequence;
DROP TABLE orders, orders_again;

-- without outboxes it can be dropped, and a creation be rolled back
DROP EXTENSION obix;
BEGIN;
CREATE EXTENSION obix;
SELECT obix.create_outbox('orders', 10, 1);
SELECT obix.publish('orders', '1') IS NOT NULL AS published;
INSERT INTO orders (payload) VALUES ('2') RETURNING sequence;
ROLLBACK;
SELECT to_regclass('obix.outbox') IS NULL AS gone, to_regclass('orders') IS NULL AS outbox_too;
BEGIN;
CREATE EXTENSION obix;
SELECT obix.create_outbox('orders', 10, 1);
SELECT obix.publish('orders', '1') IS NOT NULL AS published;
DROP EXTENSION obix CASCADE;
COMMIT;
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM orders;
\echo :LAST_ERROR_SQLSTATE
DROP TABLE IF EXISTS orders;
DROP EXTENSION IF EXISTS obix;

-- its functions called without it: whoever may make functions in C can do that
CREATE TYPE event AS (sequence bigint, id uuid, type text, key text, payload jsonb, headers jsonb, recorded_at timestamptz);
CREATE FUNCTION create_outbox(text, bigint, integer) RETURNS regclass AS '$libdir/obix', 'obix_create_outbox' LANGUAGE C;
CREATE FUNCTION publish(regclass, jsonb, text, text, jsonb) RETURNS uuid AS '$libdir/obix', 'obix_publish' LANGUAGE C;
CREATE FUNCTION next_sequence(regclass) RETURNS bigint AS '$libdir/obix', 'obix_next_sequence' LANGUAGE C;
CREATE FUNCTION read(regclass, bigint, integer, bigint, uuid) RETURNS SETOF event AS '$libdir/obix', 'obix_read' LANGUAGE C;
CREATE FUNCTION fill_gaps(regclass) RETURNS bigint AS '$libdir/obix', 'obix_fill_gaps' LANGUAGE C;
CREATE FUNCTION create_consumer(text, regclass, bigint, text[], text, text, text, integer, interval, integer, interval, interval, text, boolean, regclass[], text)
RETURNS void AS '$libdir/obix', 'obix_create_consumer' LANGUAGE C;
CREATE FUNCTION fetch_stray(text, integer, bigint, bigint, boolean) RETURNS SETOF event AS '$libdir/obix', 'obix_fetch' LANGUAGE C;
CREATE FUNCTION ack(text, bigint, bigint) RETURNS void AS '$libdir/obix', 'obix_ack' LANGUAGE C;
CREATE FUNCTION acquire(text, interval) RETURNS bigint AS '$libdir/obix', 'obix_acquire' LANGUAGE C;
CREATE FUNCTION begin_rebuild(text, boolean) RETURNS void AS '$libdir/obix', 'obix_begin_rebuild' LANGUAGE C;
CREATE PROCEDURE wait_for(text, interval) AS '$libdir/obix', 'obix_wait_for' LANGUAGE C;
CREATE FUNCTION guard() RETURNS trigger AS '$libdir/obix', 'obix_guard' LANGUAGE C;
CREATE TABLE stray (sequence bigint PRIMARY KEY, payload jsonb);
CREATE TRIGGER stray BEFORE INSERT ON stray FOR EACH ROW EXECUTE FUNCTION guard();
\set VERBOSITY sqlstate
SELECT create_outbox('new', 10, 1);
\set VERBOSITY default
SELECT publish('stray', '1', NULL, NULL, NULL);
SELECT next_sequence('stray');
SELECT * FROM read('stray', 0, 10, 10, NULL);
SELECT fill_gaps('stray');
SELECT fill_gaps(NULL);
SELECT create_consumer('c', 'stray', NULL, NULL, NULL, NULL, 'sequence', 1, '1 s', 1, '1 s', '1 s', 'stop', false, NULL, NULL);
SELECT * FROM fetch_stray('c', 1, 1, NULL, false);
SELECT ack('c', 1, NULL);
SELECT acquire('c', '1 s');
SELECT begin_rebuild('c', false);
CALL wait_for('c', '1 s');
INSERT INTO stray VALUES (1, '1');
DROP TABLE stray;

-- not into a schema that belongs to somebody else: who owns it could add to it
DROP SCHEMA IF EXISTS obix CASCADE;
CREATE ROLE regress_obix_squatter;
CREATE SCHEMA obix AUTHORIZATION regress_obix_squatter;
\set VERBOSITY sqlstate
CREATE EXTENSION obix;
\set VERBOSITY default
SELECT count(*) FROM pg_extension WHERE extname = 'obix';
DROP EXTENSION IF EXISTS obix;
DROP SCHEMA obix CASCADE;
DROP ROLE regress_obix_squatter;

-- again and again
DO $$
BEGIN
    FOR i IN 1 .. 10 LOOP
        CREATE EXTENSION obix;
        PERFORM obix.create_outbox('brief', 10, 1);
        PERFORM obix.publish('brief', '1');
        COMMIT;
        DROP TABLE brief;
        DROP EXTENSION obix;
        COMMIT;
    END LOOP;
END $$;
SELECT to_regclass('obix.outbox') IS NULL AS gone;

-- as it was
DROP SCHEMA obix_extension CASCADE;
CREATE EXTENSION obix;
