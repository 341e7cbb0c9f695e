--
-- Plain INSERT, COPY and MERGE: the default of the column draws the sequence
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_insert;
SET search_path = obix_insert, public;
SELECT obix.create_outbox('orders', 100, 2);

-- one row, several, none
INSERT INTO orders (payload) VALUES ('1') RETURNING sequence, type, key, payload, headers, substr(id::text, 15, 1) AS version;
INSERT INTO orders (type, key, payload, headers) VALUES ('a', 'k', '2', '{}'), ('b', NULL, '3', NULL) RETURNING sequence, type, key;
INSERT INTO orders (payload) SELECT '4' WHERE false RETURNING sequence;
SELECT sequence, type, key, payload, headers, recorded_at <= clock_timestamp() AS recorded FROM obix.read('orders') ORDER BY sequence;

-- sequences follow the order of the query
INSERT INTO orders (payload) SELECT to_jsonb(n) FROM generate_series(1, 5) n ORDER BY n DESC;
SELECT sequence, payload FROM obix.read('orders', after => 3) ORDER BY sequence;

-- an id and a time of one's own
INSERT INTO orders (id, payload, recorded_at) VALUES ('01890000-0000-7000-8000-000000000001', '9', '2020-01-01 00:00+00') RETURNING sequence;
SELECT id, recorded_at = '2020-01-01 00:00+00' AS kept FROM obix.read('orders', after => 8) ORDER BY sequence;
-- a sequence drawn before, in the same transaction
BEGIN;
SELECT obix.next_sequence('orders') AS drawn \gset
SELECT obix.next_sequence('orders') AS drawn_too \gset
INSERT INTO orders (sequence, payload) VALUES (:drawn_too, '"second"'), (:drawn, '"first"');
COMMIT;
SELECT sequence, payload FROM obix.read('orders', after => 9) ORDER BY sequence;

-- COPY
COPY orders (type, key, payload) FROM stdin;
copied	k1	{"n": 1}
copied	\N	{"n": 2}
\.
SELECT sequence, type, key, payload FROM obix.read('orders', after => 11) ORDER BY sequence;
COPY orders (sequence, payload) FROM stdin;
500	{"n": 1}
\.
COPY orders (payload) FROM stdin;
{"n": 3}
not json
\.
INSERT INTO orders (payload) VALUES ('"after a failed COPY"');
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, payload, id = '00000000-0000-0000-0000-000000000000' AS placeholder
FROM obix.read('orders', after => 13) ORDER BY sequence;
COPY (SELECT sequence, payload FROM obix.read('orders', after => 11, max_events => 2) ORDER BY sequence) TO stdout;

-- rolled back, and rolled back to
SELECT obix.create_outbox('holes', 100, 2);
BEGIN;
INSERT INTO holes (payload) VALUES ('"gone"') RETURNING sequence;
ROLLBACK;
BEGIN;
INSERT INTO holes (payload) VALUES ('"kept"') RETURNING sequence;
SAVEPOINT a;
INSERT INTO holes (payload) VALUES ('"gone"'), ('"gone"') RETURNING sequence;
ROLLBACK TO a;
INSERT INTO holes (payload) VALUES ('"kept too"') RETURNING sequence;
COMMIT;
SELECT obix.fill_gaps('holes') >= 0 AS filled;
SELECT sequence, payload, id = '00000000-0000-0000-0000-000000000000' AS placeholder FROM obix.read('holes') ORDER BY sequence;
SELECT obix.high_water_mark('holes');

-- a sequence drawn under a savepoint survives its rollback, unless used there
BEGIN;
SAVEPOINT a;
SELECT obix.next_sequence('holes') AS drawn \gset
ROLLBACK TO a;
INSERT INTO holes (sequence, payload) VALUES (:drawn, '"drawn under a savepoint"') RETURNING sequence;
COMMIT;
SELECT sequence, payload FROM obix.read('holes', after => 5) ORDER BY sequence;

-- drawn and not used, committed
SELECT obix.next_sequence('holes');
BEGIN;
SELECT obix.next_sequence('holes');
INSERT INTO holes (payload) VALUES ('"used"');
COMMIT;
SELECT obix.fill_gaps('holes') >= 0 AS filled;
SELECT sequence, payload FROM obix.read('holes', after => 6) ORDER BY sequence;
SELECT obix.high_water_mark('holes');

-- drawn in a transaction that is over
INSERT INTO holes (sequence, payload) VALUES (7, '"late"');
\echo :LAST_ERROR_SQLSTATE

-- next_sequence: what it refuses
SELECT obix.next_sequence('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.next_sequence('holes_p0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.next_sequence(NULL) IS NULL AS nothing;
BEGIN READ ONLY;
SELECT obix.next_sequence('holes');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- ON CONFLICT DO NOTHING draws for rows that it does not insert
SELECT obix.create_outbox('conflicts', 100, 2);
CREATE UNIQUE INDEX ON conflicts_p0 (key);
INSERT INTO conflicts (key, payload) VALUES ('a', '1') RETURNING sequence;
INSERT INTO conflicts (key, payload) VALUES ('a', '"conflict"'), ('b', '2'), ('a', '"conflict"') ON CONFLICT DO NOTHING RETURNING sequence;
INSERT INTO conflicts (key, payload) VALUES ('b', '"conflict"');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('conflicts') >= 0 AS filled;
SELECT sequence, key, payload, id = '00000000-0000-0000-0000-000000000000' AS placeholder FROM obix.read('conflicts') ORDER BY sequence;
SELECT obix.high_water_mark('conflicts');
-- publish honours the index of a partition
SELECT obix.publish('conflicts', '3', key => 'c') IS NOT NULL AS published;
SELECT obix.publish('conflicts', '"conflict"', key => 'a') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('conflicts') >= 0 AS filled;
SELECT sequence, key, payload FROM obix.read('conflicts', after => 5) ORDER BY sequence;

-- a trigger that swallows the row, or changes it
SELECT obix.create_outbox('filtered', 100, 2);
CREATE FUNCTION filter() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.type = 'drop' THEN
        RETURN NULL;
    END IF;
    NEW.headers = '{"seen": true}';
    RETURN NEW;
END $$;
CREATE TRIGGER filter BEFORE INSERT ON filtered FOR EACH ROW EXECUTE FUNCTION filter();
INSERT INTO filtered (type, payload) VALUES ('keep', '1'), ('drop', '"gone"'), ('keep', '2') RETURNING sequence;
SELECT obix.fill_gaps('filtered') >= 0 AS filled;
SELECT sequence, type, payload, headers FROM obix.read('filtered') ORDER BY sequence;
SELECT obix.high_water_mark('filtered');

-- MERGE
SELECT obix.create_outbox('merged', 100, 2);
CREATE TABLE news (key text, payload jsonb);
INSERT INTO news VALUES ('a', '1'), ('b', '2'), ('c', '3');
INSERT INTO merged (key, payload) VALUES ('b', '"here already"');
MERGE INTO merged m USING (SELECT * FROM news ORDER BY key) n ON m.key = n.key
WHEN NOT MATCHED THEN INSERT (key, payload) VALUES (n.key, n.payload)
WHEN MATCHED THEN UPDATE SET payload = n.payload;
SELECT count(*), count(DISTINCT key) FROM merged;
MERGE INTO merged m USING news n ON m.key = n.key
WHEN MATCHED THEN DELETE;
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('merged') >= 0 AS filled;
SELECT key, payload FROM obix.read('merged') ORDER BY key;
SELECT obix.high_water_mark('merged');

-- payload and headers can be redacted
UPDATE orders SET payload = '"redacted"', headers = NULL WHERE sequence <= 2;
UPDATE orders SET payload = payload, type = type, key = key, sequence = sequence, id = id, recorded_at = recorded_at WHERE sequence = 3;
SELECT sequence, type, payload, headers FROM obix.read('orders', max_events => 3) ORDER BY sequence;

-- across partitions, beyond the last, in one statement and in many
SELECT obix.create_outbox('crossing', 10, 1);
INSERT INTO crossing (payload) SELECT to_jsonb(n) FROM generate_series(1, 35) n;
DO $$
BEGIN
    FOR i IN 36 .. 60 LOOP
        INSERT INTO crossing (payload) VALUES (to_jsonb(i));
        COMMIT;
    END LOOP;
END $$;
SELECT obix.recover_default('crossing') >= 0 AS recovered;
SELECT count(*), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('crossing');
SELECT count(*) AS left_in_default FROM crossing_default;

-- into a partition by its own name: the partition constraint decides
BEGIN;
SELECT obix.next_sequence('orders') AS drawn \gset
INSERT INTO orders_p0 (sequence, id, payload, recorded_at) VALUES (:drawn, obix.uuidv7(), '"by its own name"', now());
SAVEPOINT a;
SELECT obix.next_sequence('orders') AS drawn \gset
\set VERBOSITY terse
INSERT INTO orders_p100 (sequence, id, payload, recorded_at) VALUES (:drawn, obix.uuidv7(), '"wrong place"', now());
\set VERBOSITY default
\echo :LAST_ERROR_SQLSTATE
ROLLBACK TO a;
COMMIT;
INSERT INTO orders_p0 (sequence, id, payload, recorded_at) VALUES (50, obix.uuidv7(), '"not drawn"', now());
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT sequence, payload FROM obix.read('orders', after => 15) ORDER BY sequence;

-- whoever draws keeps the outbox locked, also where an earlier lock is gone again
SELECT obix.create_outbox('locked');
BEGIN;
SAVEPOINT a;
SELECT obix.next_sequence('locked');
SAVEPOINT b;
SELECT obix.next_sequence('locked');
RELEASE b;
ROLLBACK TO a;
SELECT obix.next_sequence('locked');
SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'locked'::regclass ORDER BY mode;
RELEASE a;
SELECT obix.next_sequence('locked');
SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'locked'::regclass ORDER BY mode;
ROLLBACK;

DROP SCHEMA obix_insert CASCADE;
