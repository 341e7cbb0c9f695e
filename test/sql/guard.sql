--
-- The guard: what an outbox refuses, and what publish refuses to pass over
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_guard;
SET search_path = obix_guard, public;
SELECT obix.create_outbox('orders', 100, 1);
SELECT obix.publish('orders', to_jsonb(n), type => 't', key => 'k') IS NOT NULL AS published FROM generate_series(1, 3) n;

-- sequences that obix did not give out in this transaction
INSERT INTO orders (sequence, payload) VALUES (4, '1');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (sequence, payload) VALUES (2, '1');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (sequence, payload) VALUES (0, '1');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (sequence, payload) VALUES (-1, '1');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (sequence, payload) VALUES (9223372036854775807, '1');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (sequence, payload) VALUES (NULL, '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('others', 100, 1);
BEGIN;
SELECT obix.next_sequence('others') AS drawn \gset
INSERT INTO orders (sequence, payload) VALUES (:drawn, '"drawn from another outbox"');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
-- or that are used up
BEGIN;
SELECT obix.next_sequence('orders') AS drawn \gset
INSERT INTO orders (sequence, payload) VALUES (:drawn, '"once"');
INSERT INTO orders (sequence, payload) VALUES (:drawn, '"twice"');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
-- also where the row is gone again
BEGIN;
SELECT obix.next_sequence('orders') AS drawn \gset
SAVEPOINT a;
INSERT INTO orders (sequence, payload) VALUES (:drawn, '"rolled back"');
ROLLBACK TO a;
INSERT INTO orders (sequence, payload) VALUES (:drawn, '"again"');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- what only a placeholder may have
INSERT INTO orders (payload) VALUES (NULL);
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (id, payload) VALUES ('00000000-0000-0000-0000-000000000000', '1');
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY terse
INSERT INTO orders (id, payload) VALUES (NULL, '1');
\set VERBOSITY default
\echo :LAST_ERROR_SQLSTATE

-- UPDATE of what was delivered
UPDATE orders SET sequence = 10 WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET sequence = 150 WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET id = obix.uuidv7() WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET type = 'u' WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET key = NULL WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET recorded_at = recorded_at + interval '1 s' WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET payload = NULL WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
UPDATE orders_p0 SET type = 'u' WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (payload) VALUES ('1') ON CONFLICT (sequence) DO UPDATE SET type = 'u';

-- a placeholder stays one
SELECT obix.fill_gaps('orders') >= 0 AS filled;
UPDATE orders SET payload = '1' WHERE id = '00000000-0000-0000-0000-000000000000' AND sequence = 4;
\echo :LAST_ERROR_SQLSTATE

-- DELETE
DELETE FROM orders WHERE sequence = 1;
\echo :LAST_ERROR_SQLSTATE
DELETE FROM orders_p0;
\echo :LAST_ERROR_SQLSTATE
DELETE FROM orders WHERE false;

SELECT sequence, type, key, payload FROM obix.read('orders') ORDER BY sequence;

-- what another server has decided: sequences are taken as they come
SET session_replication_role = replica;
BEGIN;
INSERT INTO orders (sequence, payload) VALUES (13, '"applied"');
INSERT INTO orders (sequence, payload) VALUES (11, '"applied"'), (20, '"applied"'), (15, '"applied"');
COMMIT;
UPDATE orders SET type = 'u' WHERE sequence = 13;
BEGIN;
DELETE FROM orders WHERE sequence = 15;
INSERT INTO orders (sequence, payload) VALUES (22, '"rolled back"');
ROLLBACK;
RESET session_replication_role;
SELECT obix.publish('orders', '"published"') IS NOT NULL AS published;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, type, payload, id = '00000000-0000-0000-0000-000000000000' AS placeholder
FROM obix.read('orders', after => 9) ORDER BY sequence;
SELECT obix.high_water_mark('orders');

-- but not those that could not be counted on from
SET session_replication_role = replica;
INSERT INTO orders (sequence, payload) VALUES (9223372036854775807, '"applied"');
\echo :LAST_ERROR_SQLSTATE
RESET session_replication_role;
BEGIN;
SELECT obix.create_outbox('"full"', 100, 1);
SET LOCAL session_replication_role = replica;
INSERT INTO "full" (sequence, payload) VALUES (9223372036854775805, '"applied"');
SET LOCAL session_replication_role = origin;
SELECT obix.next_sequence('"full"');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- switched off, as for a restore of data only: the same, and no sequence is given out again
SET obix.enabled = off;
INSERT INTO orders (sequence, payload) VALUES (26, '"restored"');
UPDATE orders SET type = 'u' WHERE sequence = 26;
BEGIN;
DELETE FROM orders WHERE sequence = 26;
ROLLBACK;
RESET obix.enabled;
SELECT obix.publish('orders', '"published"') IS NOT NULL AS published;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, type, payload, id = '00000000-0000-0000-0000-000000000000' AS placeholder
FROM obix.read('orders', after => 23) ORDER BY sequence;
DELETE FROM orders WHERE sequence = 26;
\echo :LAST_ERROR_SQLSTATE

-- the functions of the triggers cannot be used elsewhere
CREATE TABLE ordinary (sequence bigint PRIMARY KEY, payload jsonb);
CREATE TRIGGER guard BEFORE INSERT ON ordinary FOR EACH ROW EXECUTE FUNCTION obix.guard();
INSERT INTO ordinary VALUES (1, '1');
\echo :LAST_ERROR_SQLSTATE
DROP TRIGGER guard ON ordinary;
CREATE TRIGGER guard AFTER INSERT ON ordinary FOR EACH STATEMENT EXECUTE FUNCTION obix.guard();
INSERT INTO ordinary VALUES (1, '1');
\echo :LAST_ERROR_SQLSTATE
DROP TRIGGER guard ON ordinary;
CREATE TRIGGER guard BEFORE TRUNCATE ON ordinary FOR EACH STATEMENT EXECUTE FUNCTION obix.guard_truncate();
TRUNCATE ordinary;
DROP TRIGGER guard ON ordinary;
CREATE TRIGGER guard BEFORE INSERT ON ordinary FOR EACH ROW EXECUTE FUNCTION obix.guard_truncate();
INSERT INTO ordinary VALUES (1, '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.guard();
\echo :LAST_ERROR_SQLSTATE
SELECT obix.guard_truncate();
\echo :LAST_ERROR_SQLSTATE

-- without guard or primary key an outbox is not complete
ALTER TABLE others DISABLE TRIGGER zz_obix_guard;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ALTER TABLE others ENABLE ALWAYS TRIGGER zz_obix_guard;
SELECT obix.publish('others', '"guarded"') IS NOT NULL AS published;
BEGIN;
DROP TRIGGER zz_obix_guard ON others;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others DROP CONSTRAINT others_pkey;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others DROP CONSTRAINT others_pkey;
SELECT * FROM obix.read('others');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others DROP CONSTRAINT others_pkey;
SELECT obix.fill_gaps('others');
ROLLBACK;
-- nor without a partition for the sequence
BEGIN;
SELECT obix.create_outbox('lacking', 10, 0);
DROP TABLE lacking_p0, lacking_default;
SAVEPOINT a;
INSERT INTO lacking (payload) VALUES ('1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK TO a;
SELECT obix.publish('lacking', '1') IS NOT NULL AS published;
COMMIT;
\echo :LAST_ERROR_SQLSTATE

-- publish refuses by name what it would pass over, and INSERT goes on
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER audit AFTER INSERT ON others FOR EACH ROW EXECUTE FUNCTION nothing();
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO others (payload) VALUES ('"inserted"');
ALTER TABLE others DISABLE TRIGGER audit;
SELECT obix.publish('others', '"trigger disabled"') IS NOT NULL AS published;
DROP TRIGGER audit ON others;
CREATE TRIGGER audit BEFORE INSERT ON others FOR EACH STATEMENT EXECUTE FUNCTION nothing();
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
DROP TRIGGER audit ON others;
CREATE TRIGGER audit AFTER UPDATE ON others FOR EACH ROW EXECUTE FUNCTION nothing();
SELECT obix.publish('others', '"trigger for UPDATE only"') IS NOT NULL AS published;
-- on a partition
CREATE TRIGGER audit_leaf BEFORE INSERT ON others_p0 FOR EACH ROW EXECUTE FUNCTION nothing();
SELECT obix.publish('others', '1') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
DROP TRIGGER audit_leaf ON others_p0;
-- a foreign key
CREATE TABLE keys (key text PRIMARY KEY);
ALTER TABLE others ADD CONSTRAINT others_key_fkey FOREIGN KEY (key) REFERENCES keys;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ALTER TABLE others DROP CONSTRAINT others_key_fkey;
-- a rule
CREATE RULE silence AS ON INSERT TO others DO INSTEAD NOTHING;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
DROP RULE silence ON others;
SELECT obix.publish('others', '"back to normal"') IS NOT NULL AS published;
-- what arrives between publish and commit
BEGIN;
SELECT obix.publish('others', '1') IS NOT NULL AS published;
CREATE TRIGGER late BEFORE INSERT ON others FOR EACH ROW EXECUTE FUNCTION nothing();
COMMIT;
\echo :LAST_ERROR_SQLSTATE
-- a column more, or of another type
BEGIN;
ALTER TABLE others ADD COLUMN tenant int DEFAULT 5;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others ADD COLUMN tenant int;
INSERT INTO others (payload, tenant) VALUES ('"inserted"', 1);
SELECT obix.fill_gaps('others') >= 0 AS filled;
ALTER TABLE others DROP COLUMN tenant;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others ALTER COLUMN key TYPE varchar(10);
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others DROP COLUMN headers;
SELECT obix.publish('others', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE others DROP COLUMN headers;
SELECT * FROM obix.read('others');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
SELECT obix.fill_gaps('others') >= 0 AS filled;
SELECT payload FROM obix.read('others') WHERE payload IS NOT NULL ORDER BY sequence;

-- a partition attached by hand, with its columns in another order: no value may
-- end in the wrong column
SELECT obix.create_outbox('attached', 10, 0);
CREATE TABLE attached_swapped (sequence bigint NOT NULL, id uuid NOT NULL, key text, type text, payload jsonb, headers jsonb,
                               recorded_at timestamptz NOT NULL, PRIMARY KEY (sequence));
BEGIN;
LOCK TABLE attached;
INSERT INTO attached (payload) SELECT to_jsonb(n) FROM generate_series(1, 9) n;
ALTER TABLE attached ATTACH PARTITION attached_swapped FOR VALUES FROM (10) TO (20);
COMMIT;
SELECT obix.publish('attached', '10', type => 'the type', key => 'the key') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
INSERT INTO attached (payload, type, key) VALUES ('"inserted"', 'the type', 'the key');
SELECT type, key, payload FROM obix.read('attached', after => 10) WHERE payload IS NOT NULL ORDER BY sequence;
\echo :LAST_ERROR_SQLSTATE
SELECT type, key, payload FROM attached WHERE sequence > 9 AND payload IS NOT NULL ORDER BY sequence;

-- CHECK is honoured, at commit
SELECT obix.create_outbox('checked', 100, 1);
ALTER TABLE checked ADD CONSTRAINT amount CHECK (payload ? 'amount');
SELECT obix.publish('checked', '{"amount": 1}', key => 'a') IS NOT NULL AS published;
\set VERBOSITY terse
SELECT obix.publish('checked', '{}', key => 'a') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
INSERT INTO checked (payload, key) VALUES ('{}', 'a');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('checked') >= 0 AS filled;
SELECT payload FROM obix.read('checked') ORDER BY sequence;
SELECT obix.high_water_mark('checked');
-- what a placeholder would violate is refused, also by INSERT: no reader would ever get past a hole
SELECT obix.create_outbox('demanding', 100, 1);
ALTER TABLE demanding ALTER COLUMN key SET NOT NULL;
SELECT obix.publish('demanding', '1', key => 'a') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
INSERT INTO demanding (payload, key) VALUES ('"inserted"', 'a');
ALTER TABLE demanding ALTER COLUMN key DROP NOT NULL;
SELECT obix.publish('demanding', '"published"', key => 'a') IS NOT NULL AS published;
SELECT obix.fill_gaps('demanding') >= 0 AS filled;
SELECT payload FROM obix.read('demanding') WHERE payload IS NOT NULL ORDER BY sequence;
SELECT obix.create_outbox('bodily', 100, 1);
ALTER TABLE bodily ADD CONSTRAINT body CHECK (payload IS NOT NULL);
SELECT obix.publish('bodily', '1') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
-- it says which
\set VERBOSITY default
SELECT obix.publish('bodily', '1');
SELECT obix.create_outbox('strict', 100, 1);
ALTER TABLE strict ALTER COLUMN key SET NOT NULL;
SELECT obix.publish('strict', '1', key => 'a');
\set VERBOSITY terse
INSERT INTO bodily (payload) VALUES ('"inserted"');
ALTER TABLE bodily DROP CONSTRAINT body;
SELECT obix.publish('bodily', '"published"') IS NOT NULL AS published;
SELECT obix.fill_gaps('bodily') >= 0 AS filled;
SELECT payload FROM obix.read('bodily') WHERE payload IS NOT NULL ORDER BY sequence;
\set VERBOSITY default

-- an index of a partition that would keep placeholders out
SELECT obix.create_outbox('unique_ids', 100, 1);
CREATE UNIQUE INDEX unique_ids_p0_id ON unique_ids_p0 (id);
SELECT obix.publish('unique_ids', '1') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
DROP INDEX unique_ids_p0_id;
CREATE UNIQUE INDEX unique_ids_p0_id ON unique_ids_p0 (id) WHERE payload IS NOT NULL;
SELECT obix.publish('unique_ids', '1') IS NOT NULL AS published;

-- indexes of the parent, also on expressions and for a part, are kept up
SELECT obix.create_outbox('indexed', 10, 1);
CREATE INDEX ON indexed (key);
CREATE INDEX ON indexed ((payload ->> 'amount')) WHERE type = 'paid';
SELECT count(obix.publish('indexed', jsonb_build_object('amount', n), type => CASE WHEN n % 2 = 0 THEN 'paid' END, key => 'k' || n))
FROM generate_series(1, 15) n;
SET enable_seqscan = off;
SELECT sequence, key FROM indexed WHERE key = 'k12' ORDER BY sequence;
SELECT sequence, key FROM indexed WHERE type = 'paid' AND payload ->> 'amount' = '14' ORDER BY sequence;
RESET enable_seqscan;

-- a partition that is itself partitioned
SELECT obix.create_outbox('nested', 10, 0);
CREATE TABLE nested_sub (LIKE nested INCLUDING ALL) PARTITION BY RANGE (sequence);
BEGIN;
LOCK TABLE nested;
INSERT INTO nested (payload) SELECT to_jsonb(n) FROM generate_series(1, 9) n;
ALTER TABLE nested ATTACH PARTITION nested_sub FOR VALUES FROM (10) TO (20);
COMMIT;
SELECT obix.publish('nested', '10') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM obix.read('nested');
\echo :LAST_ERROR_SQLSTATE
DROP TABLE nested;

DROP SCHEMA obix_guard CASCADE;
