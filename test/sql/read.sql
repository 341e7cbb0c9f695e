--
-- obix.read: contiguous, from any position, across partitions
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_read;
SET search_path = obix_read, public;
SELECT obix.create_outbox('orders', 10, 2);

-- an empty outbox
SELECT * FROM obix.read('orders');
SELECT * FROM obix.read('orders', after => 0);
SELECT obix.high_water_mark('orders');
SELECT * FROM obix.read('orders', after => 1);
\echo :LAST_ERROR_SQLSTATE

-- positions
SELECT count(obix.publish('orders', to_jsonb(n), type => 't' || n % 2)) FROM generate_series(1, 5) n;
SELECT obix.high_water_mark('orders');
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', NULL) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', 3) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', 5) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', 6) ORDER BY sequence;
\echo :LAST_ERROR_SQLSTATE
SELECT sequence, payload FROM obix.read('orders', 9223372036854775807) ORDER BY sequence;
\echo :LAST_ERROR_SQLSTATE

-- pages
SELECT sequence, payload FROM obix.read('orders', 0, 2) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', 2, 2) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', 4, 2) ORDER BY sequence;
SELECT sequence, payload FROM obix.read('orders', max_events => 1) ORDER BY sequence;
SELECT count(*) FROM obix.read('orders', max_events => 2147483647, max_bytes => 9223372036854775807);

-- arguments
SELECT * FROM obix.read(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', after => -1);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', max_events => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', max_events => -1);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', max_bytes => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', max_events => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', max_bytes => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders_p0');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read(0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.high_water_mark('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.high_water_mark(NULL) IS NULL AS nothing;

-- max_bytes: a page does not exceed it, but for one event, which is always given
SELECT obix.create_outbox('sized', 10, 2);
SELECT count(obix.publish('sized', to_jsonb(repeat('x', 10000)))) FROM generate_series(1, 8) n;
SELECT obix.publish('sized', to_jsonb(repeat('y', 1000000))) IS NOT NULL AS published;
SELECT obix.publish('sized', '1') IS NOT NULL AS published;
SELECT count(*) FROM obix.read('sized', max_bytes => 35000);
SELECT count(*) FROM obix.read('sized', max_bytes => 1);
SELECT sequence, length(payload::text) FROM obix.read('sized', after => 7, max_bytes => 35000) ORDER BY sequence;
SELECT sequence, length(payload::text) FROM obix.read('sized', after => 8, max_bytes => 35000) ORDER BY sequence;
SELECT sequence, length(payload::text) FROM obix.read('sized', after => 9, max_bytes => 35000) ORDER BY sequence;

-- after_id: the event at that position must bear it
SELECT id AS third FROM obix.read('orders', 2, 1) \gset
SELECT sequence, payload FROM obix.read('orders', after => 3, after_id => :'third') ORDER BY sequence;
DO $$
DECLARE
    message text;
    detail text;
    hint text;
BEGIN
    PERFORM * FROM obix.read('orders', after => 3, after_id => 'aaaaaaaa-aaaa-7aaa-8aaa-aaaaaaaaaaaa');
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RAISE WARNING '% %: % %', SQLSTATE, message, regexp_replace(detail, '[0-9a-f-]{36}', '(id)'), hint;
END $$;
\set VERBOSITY terse
SELECT * FROM obix.read('orders', after => 4, after_id => :'third');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', after => 6, after_id => :'third');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', after => 0, after_id => :'third');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders', after_id => :'third');
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY default
SELECT * FROM obix.read('orders', after => 0, after_id => '01890000-0000-7000-8000-000000000001');
SELECT * FROM obix.read('orders', after_id => '01890000-0000-7000-8000-000000000001');
SELECT id AS last FROM obix.read('orders', 4, 1) \gset
SELECT * FROM obix.read('orders', after => 5, after_id => :'last');

-- in its order by itself, across partitions
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(6, 29) n;
SELECT count(*), bool_and(r.sequence = r.n) AS ordered FROM obix.read('orders') WITH ORDINALITY
     AS r (sequence, id, type, key, payload, headers, recorded_at, n);
SELECT sequence FROM obix.read('orders', after => 8, max_events => 3) ORDER BY sequence;
SELECT sequence FROM obix.read('orders', after => 9, max_events => 1) ORDER BY sequence;
SELECT sequence FROM obix.read('orders', after => 19, max_events => 2) ORDER BY sequence;
SELECT sequence FROM obix.read('orders', after => 28) ORDER BY sequence;

-- and through DEFAULT: these rows are seen by no worker yet
BEGIN;
SELECT obix.create_outbox('strays', 10, 0);
INSERT INTO strays (payload) SELECT to_jsonb(n) FROM generate_series(1, 29) n;
CREATE TABLE strays_high (LIKE strays INCLUDING ALL);
ALTER TABLE strays ATTACH PARTITION strays_high FOR VALUES FROM (30) TO (40);
INSERT INTO strays (payload) SELECT to_jsonb(n) FROM generate_series(30, 55) n;
SELECT tableoid::regclass AS partition, count(*), min(sequence), max(sequence) FROM strays GROUP BY 1 ORDER BY min(sequence);
SELECT count(*), bool_and(r.sequence = r.n) AS ordered FROM obix.read('strays') WITH ORDINALITY
     AS r (sequence, id, type, key, payload, headers, recorded_at, n);
SELECT sequence FROM obix.read('strays', after => 28, max_events => 3) ORDER BY sequence;
SELECT sequence FROM obix.read('strays', after => 38, max_events => 3) ORDER BY sequence;
COMMIT;
SELECT count(*), bool_and(r.sequence = r.n) AS ordered FROM obix.read('strays') WITH ORDINALITY
     AS r (sequence, id, type, key, payload, headers, recorded_at, n);

-- one's own uncommitted rows
BEGIN;
INSERT INTO orders (payload) VALUES ('30');
SELECT sequence, payload FROM obix.read('orders', after => 28) ORDER BY sequence;
SELECT obix.publish('orders', '31') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('orders', after => 28) ORDER BY sequence;
SELECT obix.high_water_mark('orders');
COMMIT;
SELECT sequence, payload FROM obix.read('orders', after => 28) ORDER BY sequence;

-- isolation levels, read-only transactions
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM obix.read('orders');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY;
SELECT count(*) FROM obix.read('orders');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE;
SELECT count(*) FROM obix.read('orders');
COMMIT;
BEGIN READ ONLY;
SELECT count(*) FROM obix.read('orders');
SELECT obix.high_water_mark('orders');
COMMIT;
SET default_transaction_read_only = on;
SELECT count(*) FROM obix.read('orders');
RESET default_transaction_read_only;

-- a cursor goes on with what it began; and so does a loop that publishes meanwhile
BEGIN;
DECLARE c SCROLL CURSOR FOR SELECT sequence, payload FROM obix.read('orders', after => 20) ORDER BY sequence;
FETCH 2 FROM c;
INSERT INTO orders (payload) VALUES ('32');
FETCH 2 FROM c;
FETCH BACKWARD 1 FROM c;
COMMIT;
DO $$
DECLARE
    e obix.event;
BEGIN
    FOR e IN SELECT * FROM obix.read('orders', after => 30) ORDER BY sequence LOOP
        PERFORM obix.publish('orders', jsonb_build_object('seen', e.sequence));
        COMMIT;
    END LOOP;
END $$;
SELECT sequence, payload FROM obix.read('orders', after => 32) ORDER BY sequence;

-- ended early, in a subquery, in a join, in a LATERAL loop, in a function
SELECT sequence FROM obix.read('orders') LIMIT 1;
SELECT EXISTS (SELECT FROM obix.read('orders', after => 3));
SELECT a.after, count(e.sequence), min(e.sequence)
FROM (VALUES (0), (15), (33)) a (after), LATERAL obix.read('orders', a.after, 3) e
GROUP BY a.after ORDER BY a.after;
CREATE FUNCTION page(after bigint) RETURNS SETOF obix.event LANGUAGE sql AS $$ SELECT * FROM obix.read('orders', after, 2) $$;
SELECT sequence FROM page(11) ORDER BY sequence;
SELECT (obix.read('orders', 1, 1)).sequence;

-- in pages of every size, everything once
DO $$
DECLARE
    page int;
    position bigint;
    seen bigint[];
    found bigint[];
BEGIN
    FOREACH page IN ARRAY ARRAY[1, 2, 3, 7, 10, 11, 50] LOOP
        position := 0;
        seen := '{}';
        LOOP
            SELECT array_agg(sequence) INTO found FROM obix.read('orders', position, page);
            EXIT WHEN found IS NULL;
            seen := seen || found;
            position := found[cardinality(found)];
        END LOOP;
        IF seen IS DISTINCT FROM (SELECT array_agg(n::bigint) FROM generate_series(1, 34) n) THEN
            RAISE EXCEPTION 'pages of % gave %', page, seen;
        END IF;
    END LOOP;
END $$;

-- 1,000 partitions
SELECT obix.create_outbox('thousand', 3, 999);
SELECT count(*) FROM obix.partitions('thousand');
SELECT obix.alter_outbox('thousand', premake => 0);
SELECT count(obix.publish('thousand', to_jsonb(n))) FROM generate_series(1, 2999) n;
SELECT count(*), bool_and(r.sequence = r.n) AS ordered FROM obix.read('thousand', max_events => 10000) WITH ORDINALITY
     AS r (sequence, id, type, key, payload, headers, recorded_at, n);
SELECT sequence, payload FROM obix.read('thousand', after => 2990, max_events => 4) ORDER BY sequence;
-- a page locks what it reads and nothing else, and lets go
BEGIN;
SELECT count(*) FROM obix.read('thousand', after => 1500, max_events => 10);
SELECT count(*) < 10 AS few_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation';
COMMIT;

-- so does whoever publishes, fetches or acknowledges, also in a prepared statement
-- whose plan does not know where it reads
SET plan_cache_mode = force_generic_plan;
SELECT obix.create_consumer('late', 'thousand', 2980);
PREPARE page(bigint) AS SELECT count(*), min(sequence), max(sequence) FROM obix.read('thousand', $1, 5);
CREATE VIEW locked AS
SELECT count(*) < 10 AS few_locks FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.pid = pg_backend_pid() AND c.relname ~ '^thousand';
BEGIN;
EXECUTE page(2990);
EXECUTE page(10);
SELECT * FROM locked;
SELECT count(*), min(sequence) FROM obix.fetch('late', 5);
SELECT obix.ack('late', 2985);
SELECT * FROM locked;
INSERT INTO thousand (payload) VALUES ('3000');
SELECT obix.publish('thousand', '3001') IS NOT NULL AS published;
SET CONSTRAINTS ALL IMMEDIATE;
SELECT * FROM locked;
PREPARE TRANSACTION 'obix_read';
SELECT count(*) < 10 AS few_locks FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE l.pid IS NULL AND c.relname ~ '^thousand';
COMMIT PREPARED 'obix_read';
RESET plan_cache_mode;
SELECT obix.drop_consumer('late');

-- row-level security is refused where it applies
CREATE ROLE regress_obix_reader;
CREATE ROLE regress_obix_bypass BYPASSRLS;
GRANT USAGE ON SCHEMA obix_read TO regress_obix_reader, regress_obix_bypass;
GRANT SELECT, INSERT ON orders TO regress_obix_reader, regress_obix_bypass;
CREATE POLICY some_types ON orders USING (type = 't1') WITH CHECK (type = 't1');
ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
SELECT count(*) FROM obix.read('orders');
SET ROLE regress_obix_reader;
SELECT count(*) FROM orders;
SELECT count(*) FROM obix.read('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
SET ROLE regress_obix_bypass;
SELECT count(*) FROM obix.read('orders');
SELECT obix.publish('orders', '35') IS NOT NULL AS published;
RESET ROLE;
-- also for an owner who forces it on himself
CREATE ROLE regress_obix_forced;
ALTER TABLE orders FORCE ROW LEVEL SECURITY;
GRANT CREATE ON SCHEMA obix_read TO regress_obix_forced;
GRANT USAGE ON SCHEMA obix_read TO regress_obix_forced;
ALTER TABLE orders OWNER TO regress_obix_forced;
SET ROLE regress_obix_forced;
SELECT count(*) FROM obix.read('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
-- maintenance is not hindered by policies
BEGIN;
SELECT obix.next_sequence('orders');
COMMIT;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
RESET ROLE;
SELECT sequence, payload FROM obix.read('orders', after => 34) ORDER BY sequence;
ALTER TABLE orders NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY;
SET ROLE regress_obix_reader;
SELECT count(*) FROM obix.read('orders');
RESET ROLE;

DROP SCHEMA obix_read CASCADE;
DROP ROLE regress_obix_reader, regress_obix_bypass, regress_obix_forced;
