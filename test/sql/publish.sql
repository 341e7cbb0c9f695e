--
-- obix.publish: an event when, and only when, the transaction commits
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_publish;
SET search_path = obix_publish, public;
SELECT obix.create_outbox('orders');

-- one event, and what its columns hold
BEGIN;
SELECT obix.publish('orders', '{"amount": 10}', type => 'paid', key => 'account-1', headers => '{"trace": "t1"}') AS id \gset
SELECT count(*) AS before_commit FROM orders;
COMMIT;
SELECT sequence, id = :'id' AS same_id, type, key, payload, headers,
       recorded_at BETWEEN now() - interval '1 h' AND clock_timestamp() AS recorded
FROM obix.read('orders') ORDER BY sequence;

-- ids are UUIDs of version 7, those of one session ascend
SELECT obix.publish('orders', '1') AS first \gset
SELECT obix.publish('orders', '2') AS second \gset
SELECT substr(:'first', 15, 1) AS version, substr(:'first', 20, 1) IN ('8', '9', 'a', 'b') AS variant,
       :'first'::uuid < :'second'::uuid AS ascend;
SELECT bool_and(id > before) AS ascend FROM (SELECT id, lag(id) OVER (ORDER BY n) AS before
                                             FROM (SELECT n, obix.uuidv7() AS id FROM generate_series(1, 10000) n) a) b;

-- optional columns
SELECT obix.publish('orders', '{}') IS NOT NULL AS published;
SELECT sequence, type, key, payload, headers FROM obix.read('orders', after => 3) ORDER BY sequence;

-- JSON null is a payload, SQL NULL is none
SELECT obix.publish('orders', 'null') IS NOT NULL AS published;
SELECT sequence, payload, payload IS NULL AS missing, jsonb_typeof(payload) AS json FROM obix.read('orders', after => 4) ORDER BY sequence;
SELECT obix.publish('orders', NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.publish(NULL, '1');
\echo :LAST_ERROR_SQLSTATE

-- what is no outbox
CREATE TABLE ordinary (sequence bigint, payload jsonb);
CREATE VIEW looking AS SELECT * FROM orders;
SELECT obix.publish('ordinary', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.publish('looking', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.publish('orders_p0', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.publish('missing', '1');
\echo :LAST_ERROR_SQLSTATE

-- read-only transactions
BEGIN READ ONLY;
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- switched off
SET obix.enabled = off;
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.next_sequence('orders');
\echo :LAST_ERROR_SQLSTATE
RESET obix.enabled;

-- rolled back: nothing, and no hole
BEGIN;
SELECT obix.publish('orders', '"rolled back"') IS NOT NULL AS published;
ROLLBACK;
BEGIN;
SELECT obix.publish('orders', '"failed"') IS NOT NULL AS published;
SELECT 1 / 0;
COMMIT;
SELECT obix.publish('orders', '"next"') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('orders', after => 5) ORDER BY sequence;

-- savepoints: exactly what survives, contiguous (case c)
SELECT obix.create_outbox('saved');
BEGIN;
SELECT obix.publish('saved', '1') IS NOT NULL AS published;
SAVEPOINT a;
SELECT obix.publish('saved', '"gone"') IS NOT NULL AS published;
ROLLBACK TO a;
SELECT obix.publish('saved', '2') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM obix.read('saved') ORDER BY sequence;
SELECT obix.high_water_mark('saved');

-- nested, released, rolled back to twice, to an outer one after a release
BEGIN;
SAVEPOINT a;
SELECT obix.publish('saved', '3') IS NOT NULL AS published;
SAVEPOINT b;
SELECT obix.publish('saved', '4') IS NOT NULL AS published;
RELEASE b;
SAVEPOINT c;
SELECT obix.publish('saved', '"gone"') IS NOT NULL AS published;
SAVEPOINT d;
SELECT obix.publish('saved', '"gone"') IS NOT NULL AS published;
RELEASE d;
ROLLBACK TO c;
SELECT obix.publish('saved', '"gone too"') IS NOT NULL AS published;
ROLLBACK TO c;
RELEASE c;
RELEASE a;
SELECT obix.publish('saved', '5') IS NOT NULL AS published;
SAVEPOINT e;
SAVEPOINT f;
SELECT obix.publish('saved', '"gone"') IS NOT NULL AS published;
RELEASE f;
SELECT obix.publish('saved', '"gone"') IS NOT NULL AS published;
ROLLBACK TO e;
SAVEPOINT g;
SELECT obix.publish('saved', '6') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM obix.read('saved', after => 2) ORDER BY sequence;

-- everything rolled back to a savepoint, then committed: no sequence is used
BEGIN;
SAVEPOINT a;
SELECT obix.publish('saved', '"gone"') IS NOT NULL AS published;
ROLLBACK TO a;
COMMIT;
SELECT obix.publish('saved', '7') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('saved', after => 6) ORDER BY sequence;

-- 2000 exception blocks, of which every other fails
DO $$
BEGIN
    FOR i IN 1 .. 2000 LOOP
        BEGIN
            PERFORM obix.publish('saved', to_jsonb(i));
            IF i % 2 = 0 THEN
                RAISE EXCEPTION 'undo';
            END IF;
        EXCEPTION WHEN raise_exception THEN
        END;
    END LOOP;
END $$;
SELECT count(*), min(sequence), max(sequence), bool_and(payload::int = (sequence - 8) * 2 + 1) AS right_order
FROM obix.read('saved', after => 7, max_events => 10000);

-- one block that fails after many, and many that fail within one that survives
DO $$
BEGIN
    BEGIN
        FOR i IN 1 .. 500 LOOP
            BEGIN
                PERFORM obix.publish('saved', to_jsonb(i));
            EXCEPTION WHEN raise_exception THEN
            END;
        END LOOP;
        RAISE EXCEPTION 'undo';
    EXCEPTION WHEN raise_exception THEN
    END;
    BEGIN
        FOR i IN 1 .. 500 LOOP
            BEGIN
                PERFORM obix.publish('saved', to_jsonb(i));
                RAISE EXCEPTION 'undo';
            EXCEPTION WHEN raise_exception THEN
            END;
        END LOOP;
        PERFORM obix.publish('saved', '"survivor"');
    END;
END $$;
SELECT sequence, payload FROM obix.read('saved', after => 1007) ORDER BY sequence;

-- from a trigger, and from a deferred one that fires at commit
SELECT obix.create_outbox('fired');
CREATE TABLE account (id int PRIMARY KEY, balance int);
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM obix.publish('fired', to_jsonb(NEW), type => TG_NAME);
    RETURN NULL;
END $$;
CREATE TRIGGER at_once AFTER INSERT OR UPDATE ON account FOR EACH ROW EXECUTE FUNCTION tell();
CREATE CONSTRAINT TRIGGER deferred AFTER INSERT OR UPDATE ON account
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION tell();
BEGIN;
INSERT INTO account VALUES (1, 10), (2, 20);
SELECT obix.publish('fired', '"between"', type => 'statement') IS NOT NULL AS published;
UPDATE account SET balance = 15 WHERE id = 1;
COMMIT;
SELECT sequence, type, payload FROM obix.read('fired') ORDER BY sequence;

-- an update that fails takes its event with it
BEGIN;
SAVEPOINT a;
INSERT INTO account VALUES (3, 30), (1, 10);
ROLLBACK TO a;
INSERT INTO account VALUES (4, 40);
COMMIT;
SELECT sequence, type, payload FROM obix.read('fired', after => 7) ORDER BY sequence;

-- from a function, a DO block, a CTE, INSERT ... SELECT, a cursor
SELECT obix.create_outbox('called');
CREATE FUNCTION pay(amount int) RETURNS uuid LANGUAGE sql AS $$ SELECT obix.publish('called', to_jsonb(amount)) $$;
SELECT pay(1) IS NOT NULL AS paid;
DO $$ BEGIN PERFORM pay(2); PERFORM obix.publish('called', '3'); END $$;
WITH told AS MATERIALIZED (SELECT obix.publish('called', to_jsonb(n)) AS id FROM generate_series(4, 5) n)
SELECT count(*) FROM told;
CREATE TABLE sent AS SELECT n, pay(n) AS id FROM generate_series(6, 7) n;
INSERT INTO sent SELECT n, obix.publish('called', to_jsonb(n)) FROM generate_series(8, 9) n;
BEGIN;
DECLARE c CURSOR FOR SELECT pay(n) IS NOT NULL AS paid FROM generate_series(10, 100) n;
FETCH 2 FROM c;
COMMIT;
BEGIN;
DECLARE c CURSOR WITH HOLD FOR SELECT pay(n) IS NOT NULL AS paid FROM generate_series(12, 13) n;
COMMIT;
CLOSE c;
SELECT sequence, payload FROM obix.read('called') ORDER BY sequence;
SELECT count(*) FROM sent JOIN called USING (id);

-- from a procedure that commits in a loop
CREATE PROCEDURE pay_often(from_amount int, to_amount int) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN from_amount .. to_amount LOOP
        PERFORM obix.publish('called', to_jsonb(i));
        IF i % 3 = 0 THEN
            ROLLBACK;
        ELSE
            COMMIT;
        END IF;
    END LOOP;
END $$;
CALL pay_often(14, 20);
SELECT sequence, payload FROM obix.read('called', after => 13) ORDER BY sequence;

-- and one that spills before it commits
SET work_mem = '64kB';
CREATE PROCEDURE pay_much() LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. 3 LOOP
        FOR n IN 1 .. 3000 LOOP
            PERFORM obix.publish('called', to_jsonb(i * 10000 + n));
        END LOOP;
        COMMIT;
    END LOOP;
END $$;
CALL pay_much();
RESET work_mem;
SELECT count(*), min(payload::int), max(payload::int), bool_and(ascends) AS ascend
FROM (SELECT payload, coalesce(payload::int > lag(payload::int) OVER (ORDER BY sequence), true) AS ascends
      FROM obix.read('called', after => 18, max_events => 10000)) r;

-- where a parallel plan would be possible
CREATE TABLE many AS SELECT n FROM generate_series(1, 1000) n;
ANALYZE many;
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
SELECT obix.create_outbox('parallel');
SELECT count(obix.publish('parallel', to_jsonb(n))) FROM many WHERE n % 100 = 0;
CREATE FUNCTION wrong_label(n int) RETURNS uuid LANGUAGE plpgsql PARALLEL SAFE AS $$
BEGIN
    RETURN obix.publish('parallel', to_jsonb(n));
END $$;
SELECT count(wrong_label(n)) FROM many WHERE n % 100 = 0;
\echo :LAST_ERROR_SQLSTATE
CREATE FUNCTION wrong_draw(n int) RETURNS bigint LANGUAGE plpgsql PARALLEL SAFE AS $$
BEGIN
    RETURN obix.next_sequence('parallel');
END $$;
SELECT count(wrong_draw(n)) FROM many WHERE n % 100 = 0;
\echo :LAST_ERROR_SQLSTATE
RESET parallel_setup_cost;
RESET parallel_tuple_cost;
RESET min_parallel_table_scan_size;
SELECT sequence, payload FROM obix.read('parallel') ORDER BY sequence;

-- with temporary tables that go at commit
SELECT obix.create_outbox('temporary');
BEGIN;
CREATE TEMP TABLE basket (payload jsonb) ON COMMIT DROP;
CREATE TEMP TABLE basket_rows (payload jsonb) ON COMMIT DELETE ROWS;
INSERT INTO basket VALUES ('"from a dropped table"');
INSERT INTO basket_rows VALUES ('"from deleted rows"');
SELECT obix.publish('temporary', payload) IS NOT NULL AS published FROM basket;
SELECT obix.publish('temporary', payload) IS NOT NULL AS published FROM basket_rows;
COMMIT;
SELECT sequence, payload FROM obix.read('temporary') ORDER BY sequence;

-- large payloads, keys and headers, whose source is gone before the commit
SELECT obix.create_outbox('large');
CREATE TABLE source (n int, payload jsonb, key text);
ALTER TABLE source ALTER payload SET STORAGE EXTERNAL;
INSERT INTO source SELECT n, jsonb_build_object('n', n, 'text', string_agg(md5(n || ':' || i), '' ORDER BY i)),
                          string_agg(md5(i || ':' || n), '' ORDER BY i)
FROM generate_series(1, 3) n, generate_series(1, 10000) i GROUP BY n;
CREATE TABLE compressed (n int, payload jsonb);
INSERT INTO compressed SELECT 4, jsonb_build_object('n', 4, 'text', repeat('compress me ', 100000));
CREATE TABLE digests AS SELECT n, md5(payload::text) AS digest, md5(key) AS key_digest FROM source
UNION ALL SELECT n, md5(payload::text), NULL FROM compressed;
BEGIN;
SELECT obix.publish('large', payload, key => key, headers => payload) IS NOT NULL AS published FROM source ORDER BY n;
SELECT obix.publish('large', payload) IS NOT NULL AS published FROM compressed;
DELETE FROM source WHERE n = 1;
TRUNCATE source;
DROP TABLE source, compressed;
COMMIT;
SELECT e.sequence, octet_length(e.payload::text) AS size, md5(e.payload::text) = d.digest AS same_payload,
       md5(e.headers::text) = d.digest AS same_headers, octet_length(e.key) AS key_size, md5(e.key) = d.key_digest AS same_key
FROM obix.read('large') e JOIN digests d ON d.n = (e.payload ->> 'n')::int
ORDER BY e.sequence;
-- 20 MB in one event
SELECT obix.publish('large', to_jsonb(repeat('x', 20000000))) IS NOT NULL AS published;
SELECT sequence, octet_length(payload #>> '{}') FROM obix.read('large', after => 4) ORDER BY sequence;

-- beyond work_mem, over three partitions: whole, in order, in the right leaves
SELECT obix.create_outbox('spilled', partition_width => 8000, premake => 2);
SET work_mem = '64kB';
BEGIN;
SELECT count(obix.publish('spilled', to_jsonb(n), key => repeat('k', n % 50))) FROM generate_series(1, 20000) n;
COMMIT;
SELECT count(*), min(sequence), max(sequence), bool_and(payload::bigint = sequence AND length(key) = sequence % 50) AS right_order
FROM obix.read('spilled', max_events => 100000);
SELECT p.partition, count(*), min(e.sequence), max(e.sequence)
FROM spilled e JOIN obix.partitions('spilled') p ON p.partition = e.tableoid
GROUP BY p.partition ORDER BY min(e.sequence);

-- the same with savepoints, some rolled back
BEGIN;
SELECT count(obix.publish('spilled', to_jsonb(20000 + n))) FROM generate_series(1, 3000) n;
SAVEPOINT a;
SELECT count(obix.publish('spilled', '"gone"')) FROM generate_series(1, 3000) n;
ROLLBACK TO a;
SELECT count(obix.publish('spilled', to_jsonb(20000 + n))) FROM generate_series(3001, 6000) n;
SAVEPOINT b;
SELECT count(obix.publish('spilled', '"gone"')) FROM generate_series(1, 3000) n;
SAVEPOINT c;
SELECT count(obix.publish('spilled', '"gone"')) FROM generate_series(1, 3000) n;
RELEASE c;
ROLLBACK TO b;
COMMIT;
SELECT count(*), min(sequence), max(sequence), bool_and(payload::bigint = sequence) AS right_order
FROM obix.read('spilled', after => 20000, max_events => 100000);
BEGIN;
SELECT count(obix.publish('spilled', '"gone"')) FROM generate_series(1, 20000) n;
ROLLBACK;
SELECT obix.high_water_mark('spilled');

-- and beyond the last partition, into DEFAULT
SELECT obix.create_outbox('stranded', partition_width => 5000, premake => 1);
BEGIN;
SELECT count(obix.publish('stranded', to_jsonb(n))) FROM generate_series(1, 20000) n;
COMMIT;
RESET work_mem;
SELECT count(*), min(sequence), max(sequence), bool_and(payload::bigint = sequence) AS right_order
FROM obix.read('stranded', max_events => 100000);
SELECT obix.recover_default('stranded') >= 0 AS recovered;
SELECT count(*) AS left_in_default FROM stranded_default;
SELECT count(*), min(sequence), max(sequence), bool_and(payload::bigint = sequence) AS right_order
FROM obix.read('stranded', max_events => 100000);
SELECT count(*) AS misplaced FROM stranded e JOIN obix.partitions('stranded') p ON p.partition = e.tableoid
WHERE e.sequence < p.from_sequence OR e.sequence >= p.to_sequence;

-- several outboxes in one transaction, one range in each
SELECT obix.create_outbox('left_hand', 10, 2);
SELECT obix.create_outbox('right_hand', 10, 2);
BEGIN;
SELECT count(obix.publish(CASE WHEN n % 3 = 0 THEN 'left_hand' ELSE 'right_hand' END, to_jsonb(n))) FROM generate_series(1, 15) n;
SAVEPOINT a;
SELECT count(obix.publish(CASE WHEN n % 3 = 0 THEN 'left_hand' ELSE 'right_hand' END, '"gone"')) FROM generate_series(1, 15) n;
ROLLBACK TO a;
SELECT count(obix.publish(CASE WHEN n % 3 = 0 THEN 'left_hand' ELSE 'right_hand' END, to_jsonb(n))) FROM generate_series(16, 18) n;
COMMIT;
SELECT sequence, payload FROM obix.read('left_hand') ORDER BY sequence;
SELECT sequence, payload FROM obix.read('right_hand') ORDER BY sequence;

-- published and inserted in one transaction: the published events are one range
BEGIN;
INSERT INTO left_hand (payload) VALUES ('"inserted first"');
SELECT obix.publish('left_hand', '"published first"') IS NOT NULL AS published;
INSERT INTO left_hand (payload) VALUES ('"inserted second"');
SELECT obix.publish('left_hand', '"published second"') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM obix.read('left_hand', after => 6) ORDER BY sequence;

-- published, then dropped: the events go with it
BEGIN;
SELECT obix.publish('right_hand', '"lost"') IS NOT NULL AS published;
DROP TABLE right_hand;
COMMIT;
SELECT to_regclass('right_hand') IS NULL AS dropped;
-- unless the drop is rolled back
BEGIN;
SELECT obix.publish('left_hand', '"kept"') IS NOT NULL AS published;
SAVEPOINT a;
DROP TABLE left_hand;
ROLLBACK TO a;
COMMIT;
SELECT sequence, payload FROM obix.read('left_hand', after => 10) ORDER BY sequence;
-- dropped and made anew under the same name
BEGIN;
SELECT obix.publish('left_hand', '"of the old one"') IS NOT NULL AS published;
SELECT obix.drop_outbox('left_hand');
SELECT obix.create_outbox('left_hand', 10, 2);
SELECT obix.publish('left_hand', '"of the new one"') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM obix.read('left_hand') ORDER BY sequence;

-- published, then truncated: publishing happens at commit, so after it
BEGIN;
SELECT obix.publish('left_hand', '"after the truncate"') IS NOT NULL AS published;
TRUNCATE left_hand;
COMMIT;
SELECT sequence, payload FROM obix.read('left_hand') ORDER BY sequence;

-- as asynchronous as the session likes: the commit of events is flushed
SET synchronous_commit = off;
SELECT obix.publish('left_hand', '"durable"') IS NOT NULL AS published;
RESET synchronous_commit;
SELECT sequence, payload FROM obix.read('left_hand', after => 2) ORDER BY sequence;

-- SET CONSTRAINTS and NOTIFY in the same transaction
BEGIN;
NOTIFY obix_publish_channel;
SELECT obix.publish('fired', '"with notify"') IS NOT NULL AS published;
SET CONSTRAINTS ALL IMMEDIATE;
COMMIT;
SELECT sequence, payload FROM obix.read('fired', after => 9) ORDER BY sequence;

-- COMMIT AND CHAIN
BEGIN;
SELECT obix.publish('fired', '"first of the chain"') IS NOT NULL AS published;
COMMIT AND CHAIN;
SELECT obix.publish('fired', '"second of the chain"') IS NOT NULL AS published;
ROLLBACK AND CHAIN;
SELECT obix.publish('fired', '"third of the chain"') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM obix.read('fired', after => 10) ORDER BY sequence;

-- a spill that fails, and is caught, leaves a buffer of which nothing is written
SELECT obix.create_outbox('unspilled');
CREATE FUNCTION publish_caught(n int) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. n LOOP
        BEGIN
            PERFORM obix.publish('unspilled', to_jsonb(repeat('x', 100)));
        EXCEPTION WHEN configuration_limit_exceeded THEN
            RETURN 'the temporary file is refused';
        END;
    END LOOP;
    RETURN 'all published';
END $$;
SET work_mem = '64kB';
SET temp_file_limit = 0;
BEGIN;
SELECT publish_caught(10000);
SET LOCAL temp_file_limit = -1;
SAVEPOINT a;
SELECT obix.publish('unspilled', '"after"') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
ROLLBACK TO a;
COMMIT;
\echo :LAST_ERROR_SQLSTATE
RESET temp_file_limit;
BEGIN;
SELECT publish_caught(10000);
COMMIT;
RESET work_mem;
SELECT count(*), max(sequence) FROM obix.read('unspilled', max_events => 100000);

-- what runs while events are written comes too late to publish more
SELECT obix.create_outbox('echoing');
CREATE FUNCTION echo(jsonb) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM obix.publish('obix_publish.saved', '"echo"');
    RETURN true;
END $$;
ALTER TABLE echoing ADD CONSTRAINT echo CHECK (payload IS NULL OR echo(payload));
SELECT obix.publish('echoing', '1') IS NOT NULL AS published;
\echo :LAST_ERROR_SQLSTATE
BEGIN;
SELECT obix.publish('echoing', '1') IS NOT NULL AS published;
SELECT obix.publish('called', '"in the same transaction"') IS NOT NULL AS published;
PREPARE TRANSACTION 'obix_publish';
\echo :LAST_ERROR_SQLSTATE
-- an INSERT is before the commit, so it can
INSERT INTO echoing (payload) VALUES ('1');
SELECT obix.fill_gaps('echoing') >= 0 AS filled;
SELECT count(*) FROM obix.read('echoing') WHERE payload IS NOT NULL;
SELECT payload FROM saved ORDER BY sequence DESC LIMIT 1;
ALTER TABLE echoing DROP CONSTRAINT echo;
SELECT obix.publish('echoing', '"goes on"') IS NOT NULL AS published;

DROP SCHEMA obix_publish CASCADE;
