--
-- TRUNCATE: empties, keeps the head, and what is gone stays gone
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_truncate;
SET search_path = obix_truncate, public;
SELECT obix.create_outbox('orders', 10, 5);
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 25) n;

-- the whole outbox
TRUNCATE orders;
SELECT count(*) FROM orders;
SELECT obix.high_water_mark('orders');
SELECT resolved FROM obix.outbox WHERE outbox = 'orders'::regclass;
SELECT * FROM obix.read('orders');
SELECT * FROM obix.read('orders', after => 25);
SELECT * FROM obix.read('orders', after => 24);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', after => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('orders');
SELECT count(*) FROM orders;

-- goes on where it was
SELECT obix.publish('orders', '26') IS NOT NULL AS published;
INSERT INTO orders (payload) VALUES ('27') RETURNING sequence;
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', after => 25) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', after => 24) ORDER BY sequence;
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('orders');
SELECT count(*) FROM orders;

-- holes in what was truncated are not filled either
BEGIN;
INSERT INTO orders (payload) VALUES ('"gone"');
ROLLBACK;
TRUNCATE orders;
SELECT obix.fill_gaps('orders');
SELECT count(*) FROM orders;
SELECT obix.publish('orders', '29') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;

-- rolled back
BEGIN;
TRUNCATE orders;
SELECT count(*) FROM orders;
ROLLBACK;
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;
BEGIN;
INSERT INTO orders (payload) VALUES ('30');
SAVEPOINT a;
TRUNCATE orders;
ROLLBACK TO a;
INSERT INTO orders (payload) VALUES ('31');
COMMIT;
SELECT obix.fill_gaps('orders');
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;

-- together with events of the same transaction
BEGIN;
INSERT INTO orders (payload) VALUES ('"before"') RETURNING sequence;
SELECT obix.next_sequence('orders');
SELECT obix.publish('orders', '"published before"') IS NOT NULL AS published;
TRUNCATE orders;
INSERT INTO orders (payload) VALUES ('"after"') RETURNING sequence;
COMMIT;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, payload, id = '00000000-0000-0000-0000-000000000000' AS placeholder FROM obix.read('orders') ORDER BY sequence;
SELECT obix.high_water_mark('orders');

-- with other tables, RESTART IDENTITY, CASCADE
CREATE TABLE ordinary (x int GENERATED ALWAYS AS IDENTITY);
TRUNCATE orders, ordinary RESTART IDENTITY CASCADE;
SELECT obix.publish('orders', '36') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;
TRUNCATE ONLY orders;
\echo :LAST_ERROR_SQLSTATE

-- one partition: the oldest
SELECT obix.create_outbox('parted', 10, 5);
SELECT count(obix.publish('parted', to_jsonb(n))) FROM generate_series(1, 35) n;
SELECT obix.fill_gaps('parted');
TRUNCATE parted_p0;
SELECT obix.fill_gaps('parted');
SELECT count(*), min(sequence), max(sequence) FROM parted;
SELECT count(*), min(sequence), max(sequence) FROM obix.read('parted');
SELECT count(*), min(sequence), max(sequence) FROM obix.read('parted', after => 9);
SELECT * FROM obix.read('parted', after => 8);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.high_water_mark('parted');
-- one in the middle: a reader is told, not stopped for ever
TRUNCATE parted_p20;
SELECT obix.fill_gaps('parted');
SELECT count(*), min(sequence), max(sequence) FROM parted;
SELECT count(*), min(sequence), max(sequence) FROM obix.read('parted', after => 15);
SELECT count(*), min(sequence), max(sequence) FROM obix.read('parted', after => 19);
\echo :LAST_ERROR_SQLSTATE
SELECT count(*), min(sequence), max(sequence) FROM obix.read('parted', after => 25);
\echo :LAST_ERROR_SQLSTATE
SELECT count(*), min(sequence), max(sequence) FROM obix.read('parted', after => 29);
-- one that holds the head
TRUNCATE parted_p30;
SELECT obix.publish('parted', '36') IS NOT NULL AS published;
SELECT obix.fill_gaps('parted');
SELECT sequence, payload FROM obix.read('parted', after => 35) ORDER BY sequence;
-- not while events of it may be on their way: these are of this very transaction
BEGIN;
INSERT INTO parted (payload) VALUES ('"in flight"');
TRUNCATE parted_p30;
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
SELECT obix.fill_gaps('parted') >= 0 AS filled;
TRUNCATE parted_p30;
SELECT obix.publish('parted', '38') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('parted', after => 37) ORDER BY sequence;

-- partitions that are dropped, or detached
SELECT obix.create_outbox('retained', 10, 5);
SELECT count(obix.publish('retained', to_jsonb(n))) FROM generate_series(1, 35) n;
SELECT obix.fill_gaps('retained');
DROP TABLE retained_p0;
ALTER TABLE retained DETACH PARTITION retained_p10;
SELECT obix.fill_gaps('retained');
SELECT count(*), min(sequence), max(sequence) FROM retained;
SELECT count(*), min(sequence), max(sequence) FROM obix.read('retained');
SELECT * FROM obix.read('retained', after => 5);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.high_water_mark('retained');
-- what was detached is a table of its own, and no outbox
SELECT count(*) FROM retained_p10;
BEGIN;
DELETE FROM retained_p10 WHERE sequence = 10;
INSERT INTO retained_p10 (sequence, id, recorded_at) VALUES (10, obix.uuidv7(), now());
ROLLBACK;
-- and can come back
ALTER TABLE retained ATTACH PARTITION retained_p10 FOR VALUES FROM (10) TO (20);
SELECT obix.publish('retained', '36') IS NOT NULL AS published;
SELECT sequence FROM obix.read('retained', after => 34) ORDER BY sequence;
SELECT count(*), min(sequence), max(sequence) FROM obix.read('retained');
-- the one that holds the head: what it held is not given out again
DROP TABLE retained_p30;
SELECT obix.high_water_mark('retained');
SELECT obix.fill_gaps('retained');
SELECT obix.publish('retained', '37') IS NOT NULL AS published;
INSERT INTO retained (payload) VALUES ('38') RETURNING sequence;
SELECT obix.recover_default('retained') >= 0 AS recovered;
SELECT obix.fill_gaps('retained');
SELECT sequence, payload FROM obix.read('retained', after => 36) ORDER BY sequence;
SELECT * FROM obix.read('retained', after => 29);
\echo :LAST_ERROR_SQLSTATE
SELECT count(*), min(sequence), max(sequence) FROM retained;
-- all of them
BEGIN;
DO $$
DECLARE
    p regclass;
BEGIN
    FOR p IN SELECT partition FROM obix.partitions('retained') WHERE from_sequence IS NOT NULL LOOP
        EXECUTE format('DROP TABLE %s', p);
    END LOOP;
END $$;
COMMIT;
SELECT * FROM obix.read('retained');
SELECT obix.publish('retained', '39') IS NOT NULL AS published;
SELECT obix.fill_gaps('retained');
SELECT obix.recover_default('retained') >= 0 AS recovered;
SELECT sequence, payload FROM obix.read('retained') ORDER BY sequence;

-- privileges: TRUNCATE is one of its own
CREATE ROLE regress_obix_truncate;
GRANT USAGE ON SCHEMA obix_truncate TO regress_obix_truncate;
GRANT SELECT, INSERT ON orders TO regress_obix_truncate;
SET ROLE regress_obix_truncate;
TRUNCATE orders;
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
GRANT TRUNCATE ON orders TO regress_obix_truncate;
SET ROLE regress_obix_truncate;
TRUNCATE orders;
SELECT obix.publish('orders', '37') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;
RESET ROLE;

-- in the replica role, as replication does it
SET session_replication_role = replica;
TRUNCATE orders;
RESET session_replication_role;
SELECT obix.publish('orders', '38') IS NOT NULL AS published;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;

DROP SCHEMA obix_truncate CASCADE;
DROP ROLE regress_obix_truncate;
