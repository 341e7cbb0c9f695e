--
-- obix.fill_gaps: placeholders for what nobody can insert any more
--
-- A worker may be faster, so it is the outcome that is looked at.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_fill;
SET search_path = obix_fill, public;
CREATE VIEW nil AS SELECT '00000000-0000-0000-0000-000000000000'::uuid AS id;
SELECT obix.create_outbox('orders', 10, 2);

-- nothing to do
SELECT obix.fill_gaps('orders');

-- at the head, and what a placeholder looks like
BEGIN;
INSERT INTO orders (type, key, payload, headers) VALUES ('t', 'k', '1', '{}'), ('t', 'k', '2', '{}');
ROLLBACK;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, id, type, key, payload, headers, recorded_at <= clock_timestamp() AS recorded
FROM obix.read('orders') ORDER BY sequence;
SELECT obix.high_water_mark('orders');
SELECT obix.fill_gaps('orders');

-- in the middle, several, next to each other and apart
INSERT INTO orders (payload) VALUES ('3');
BEGIN;
INSERT INTO orders (payload) VALUES ('"gone"'), ('"gone"');
ROLLBACK;
INSERT INTO orders (payload) VALUES ('6');
SELECT obix.next_sequence('orders');
INSERT INTO orders (payload) VALUES ('8');
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, payload, id = (SELECT id FROM nil) AS placeholder FROM obix.read('orders', after => 2) ORDER BY sequence;

-- at the end of a partition, a whole one, at the beginning of the next
BEGIN;
INSERT INTO orders (payload) SELECT '"gone"' FROM generate_series(9, 20);
ROLLBACK;
INSERT INTO orders (payload) VALUES ('21');
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT count(*), min(sequence), max(sequence), bool_and((payload IS NULL) = (id = (SELECT id FROM nil))) AS consistent,
       count(*) FILTER (WHERE payload IS NULL) AS placeholders
FROM obix.read('orders', after => 8);
SELECT count(*) AS misplaced FROM orders e JOIN obix.partitions('orders') p ON p.partition = e.tableoid
WHERE e.sequence < p.from_sequence OR e.sequence >= p.to_sequence;

-- in DEFAULT
SELECT obix.create_outbox('strays', 10, 0);
BEGIN;
INSERT INTO strays (payload) SELECT to_jsonb(n) FROM generate_series(1, 15) n;
SAVEPOINT a;
INSERT INTO strays (payload) SELECT '"gone"' FROM generate_series(16, 30);
ROLLBACK TO a;
INSERT INTO strays (payload) VALUES ('31');
COMMIT;
SELECT obix.fill_gaps('strays') >= 0 AS filled;
SELECT obix.recover_default('strays') >= 0 AS recovered;
SELECT count(*), min(sequence), max(sequence), count(*) FILTER (WHERE payload IS NULL) AS placeholders FROM obix.read('strays');
SELECT count(*) AS left_in_default FROM strays_default;

-- many at once
BEGIN;
INSERT INTO strays (payload) SELECT '"gone"' FROM generate_series(32, 10031);
ROLLBACK;
SELECT obix.fill_gaps('strays') >= 0 AS filled;
SELECT count(*), min(sequence), max(sequence), count(*) FILTER (WHERE payload IS NULL) AS placeholders
FROM obix.read('strays', max_events => 100000);

-- not those that this transaction itself may still use
SELECT obix.create_outbox('own', 10, 2);
BEGIN;
SELECT obix.next_sequence('own') AS drawn \gset
SELECT obix.next_sequence('own') AS drawn_too \gset
SELECT obix.fill_gaps('own');
INSERT INTO own (sequence, payload) VALUES (:drawn, '"used after all"');
SELECT obix.fill_gaps('own');
INSERT INTO own (sequence, payload) VALUES (:drawn_too, '"this too"');
COMMIT;
SELECT obix.fill_gaps('own');
SELECT sequence, payload FROM obix.read('own') ORDER BY sequence;
BEGIN;
INSERT INTO own (payload) VALUES ('"kept"');
SAVEPOINT a;
INSERT INTO own (payload) VALUES ('"gone"');
ROLLBACK TO a;
SELECT obix.fill_gaps('own');
COMMIT;
SELECT obix.fill_gaps('own') >= 0 AS filled;
SELECT sequence, payload FROM obix.read('own', after => 2) ORDER BY sequence;

-- rolled back, it can be done again
SELECT obix.next_sequence('own');
BEGIN;
SELECT obix.fill_gaps('own') >= 0 AS filled;
ROLLBACK;
BEGIN;
SAVEPOINT a;
SELECT obix.fill_gaps('own') >= 0 AS filled;
ROLLBACK TO a;
COMMIT;
SELECT obix.fill_gaps('own') >= 0 AS filled;
SELECT sequence, payload FROM obix.read('own', after => 4) ORDER BY sequence;
SELECT obix.high_water_mark('own');

-- in one transaction with publishing, in any isolation level
SELECT obix.next_sequence('own');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT obix.publish('own', '7') IS NOT NULL AS published;
SELECT obix.fill_gaps('own') >= 0 AS filled;
COMMIT;
SELECT sequence, payload FROM obix.read('own', after => 5) ORDER BY sequence;

-- all outboxes that the caller owns, and no others
CREATE ROLE regress_obix_filler;
GRANT USAGE, CREATE ON SCHEMA obix_fill TO regress_obix_filler;
SET ROLE regress_obix_filler;
SELECT obix.fill_gaps();
SELECT obix.create_outbox('mine', 10, 1);
SELECT obix.create_outbox('mine_too', 10, 1);
SELECT obix.next_sequence('mine');
SELECT obix.next_sequence('mine_too');
SELECT obix.fill_gaps() >= 0 AS filled;
SELECT obix.fill_gaps(NULL);
SELECT obix.high_water_mark('mine'), obix.high_water_mark('mine_too');
SELECT obix.fill_gaps('orders');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
GRANT ALL ON orders TO regress_obix_filler;
SET ROLE regress_obix_filler;
SELECT obix.fill_gaps('orders');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;

-- for the superuser, those of everybody
SELECT obix.next_sequence('mine');
SELECT obix.fill_gaps() >= 0 AS filled;
SELECT obix.high_water_mark('mine');
SELECT m.sequence, m.tableoid::regclass AS partition, c.relowner::regrole AS owner FROM mine m JOIN pg_class c ON c.oid = m.tableoid ORDER BY m.sequence;

-- arguments and circumstances
SELECT obix.fill_gaps('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('orders_p0');
\echo :LAST_ERROR_SQLSTATE
BEGIN READ ONLY;
SELECT obix.fill_gaps('orders');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- user triggers see no placeholder, and cannot keep it out
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused %', NEW.payload; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION refuse();
INSERT INTO orders (payload) VALUES ('"refused"');
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, payload FROM obix.read('orders', after => 21) ORDER BY sequence;

DROP SCHEMA obix_fill CASCADE;
DROP ROLE regress_obix_filler;
