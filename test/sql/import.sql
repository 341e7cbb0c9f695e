--
-- obix.import: events of another table, with their sequences, ids and times
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA app;
SET search_path = app, public;
SET client_min_messages = notice;

--
-- The recipe for a table with bigserial, while it is in use
--
CREATE TABLE app.outbox (
    id bigserial PRIMARY KEY,
    event_type text NOT NULL,
    aggregate_id text,
    payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO app.outbox (event_type, aggregate_id, payload)
SELECT 'paid', 'account-' || n % 3, jsonb_build_object('amount', n) FROM generate_series(1, 10) n;
DELETE FROM app.outbox WHERE id IN (3, 4, 8);

-- beforehand
SELECT obix.create_outbox('app.orders');
CALL obix.import('app.orders', 'app.outbox');
INSERT INTO app.outbox (event_type, aggregate_id, payload) VALUES ('paid', 'account-1', '{"amount": 11}');

-- the switch
BEGIN;
LOCK TABLE app.outbox;
CALL obix.import('app.orders', 'app.outbox');
ALTER TABLE app.outbox RENAME TO outbox_old;
CREATE VIEW app.outbox AS
SELECT sequence AS id, type AS event_type, key AS aggregate_id, payload,
       recorded_at AS created_at
FROM app.orders WHERE payload IS NOT NULL;
COMMIT;
SELECT obix.create_consumer('mail', 'app.orders', start_after => 9);

-- applications go on as before
INSERT INTO app.outbox (event_type, aggregate_id, payload)
VALUES ('paid', 'account-2', '{"amount": 12}') RETURNING id;
SELECT obix.publish('app.orders', '{"amount": 13}', type => 'paid') IS NOT NULL AS published;
SELECT sequence, type, key, payload FROM obix.fetch('mail') ORDER BY sequence;

SELECT sequence, type, key, payload, headers, id = '00000000-0000-0000-0000-000000000000' AS placeholder
FROM obix.read('app.orders') ORDER BY sequence;
SELECT count(*) AS same FROM app.orders o JOIN app.outbox_old s ON s.id = o.sequence AND s.created_at = o.recorded_at AND s.payload = o.payload;
-- ids are new, and have the time of the event
SELECT count(DISTINCT id) AS ids,
       bool_and(substr(replace(id::text, '-', ''), 1, 12) = lpad(to_hex(floor(extract(epoch FROM recorded_at) * 1000)::bigint), 12, '0')) AS timed
FROM app.orders WHERE payload IS NOT NULL AND sequence < 12;
SELECT head, high_water_mark, suspect_from, resolved, in_flight, stranded FROM obix.outbox_status WHERE outbox = 'app.orders'::regclass;

--
-- The recipe for a table of the shape (id, sequence, payload, tracing_context,
-- recorded_at)
--
CREATE TABLE app.persistent_outbox_events (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    sequence bigserial UNIQUE,
    payload jsonb,
    tracing_context jsonb,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO app.persistent_outbox_events (sequence, payload, tracing_context, recorded_at)
SELECT n, CASE WHEN n <> 3 THEN to_jsonb(n) END,
       '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
       timestamptz '2024-01-01 00:00:00+00' + n * interval '1 s'
FROM generate_series(1, 5) n;
SELECT setval('app.persistent_outbox_events_sequence_seq', 5);
-- rows without a payload are placeholders there
CREATE VIEW app.to_import AS SELECT * FROM app.persistent_outbox_events WHERE payload IS NOT NULL;
SELECT obix.create_outbox('app.events');
CALL obix.import('app.events', 'app.to_import');
BEGIN;
LOCK TABLE app.persistent_outbox_events;
CALL obix.import('app.events', 'app.to_import');
DROP VIEW app.to_import;
ALTER TABLE app.persistent_outbox_events RENAME TO persistent_outbox_events_old;
CREATE VIEW app.persistent_outbox_events AS
SELECT id, sequence, payload, headers AS tracing_context, recorded_at FROM app.events;
COMMIT;
INSERT INTO app.persistent_outbox_events (payload) VALUES ('6') RETURNING sequence;
SELECT sequence, payload, headers IS NOT NULL AS traced, recorded_at < '2025-01-01' AS recorded_long_ago FROM obix.read('app.events') ORDER BY sequence;
SELECT count(*) AS same FROM app.events o JOIN app.persistent_outbox_events_old s ON s.id = o.id AND s.recorded_at = o.recorded_at AND s.sequence = o.sequence;

--
-- Which columns, and of what types
--
SET client_min_messages = warning;
DROP VIEW app.outbox, app.persistent_outbox_events;
SELECT obix.drop_outbox('orders', force => true), obix.drop_outbox('events');
DROP TABLE outbox_old, persistent_outbox_events_old;
CREATE DOMAIN number AS integer;
CREATE TABLE odd ("The Number" number PRIMARY KEY, "no ""; DROP" varchar(20), body bytea, meta json, happened timestamp, kind integer, uuid uuid,
                  data integer, headers text);
INSERT INTO odd VALUES (1, 'k"1', '{"a": 1}', '{"h": 1}', '2024-07-01 12:00', 17, '01890000-0000-7000-8000-000000000001', 1, 'no JSON'),
                       (2, NULL, 'null', NULL, '1960-01-01 00:00', NULL, NULL, 1, 'no JSON');
SET timezone = 'UTC';
SET client_min_messages = notice;
SELECT obix.create_outbox('taken', 10, 0);
CALL obix.import('taken', 'odd', sequence => 'The Number', key => 'no "; DROP', headers => 'meta', recorded_at => 'happened', type => 'kind', batch_size => 1);
SET timezone = 'America/New_York';
SELECT sequence, CASE sequence WHEN 1 THEN id ELSE NULL END AS id, substr(id::text, 1, 15) AS start, type, key, payload, headers, recorded_at AT TIME ZONE 'UTC' AS recorded_at FROM taken ORDER BY sequence;
-- none at all, though there are some
SELECT obix.create_outbox('bare', 10, 0);
CALL obix.import('bare', 'odd', sequence => 'The Number', id => '', type => '', key => '', headers => '', recorded_at => '');
SELECT sequence, type, key, payload, headers, recorded_at > now() - interval '1 h' AS recent FROM bare ORDER BY sequence;
RESET timezone;

-- nothing is there yet
CREATE TABLE source (id bigint, payload text, recorded_at timestamptz DEFAULT '2024-01-01');
SELECT obix.create_outbox('target', 10, 0);
CALL obix.import('target', 'source', batch_size => 3);
SET client_min_messages = warning;
ALTER TABLE source ADD PRIMARY KEY (id);
INSERT INTO source SELECT n, to_jsonb(n) FROM generate_series(1, 25) n;
CALL obix.import('target', 'source', batch_size => 3);
SELECT count(*), count(payload), max(sequence) FROM target;
SELECT partition, from_sequence, to_sequence FROM obix.partition_status WHERE outbox = 'target'::regclass AND from_sequence < 30 ORDER BY from_sequence NULLS FIRST;
SELECT count(*) AS in_default FROM target_default;
-- called again, it changes nothing
CALL obix.import('target', 'source');
SELECT count(*), count(payload), max(sequence) FROM target;

-- a hole that is wider than a batch, and partitions
INSERT INTO source VALUES (60, '"after a hole"');
CALL obix.import('target', 'source', batch_size => 7);
SELECT count(*), count(payload), max(sequence) FROM target;
SELECT count(*) AS in_default FROM target_default;
SELECT obix.high_water_mark('target');

--
-- In a transaction, rolled back, or to a savepoint: the sequences are given out
-- again, and nobody writes placeholders
--
INSERT INTO source SELECT n, to_jsonb(n) FROM generate_series(61, 70) n;
BEGIN;
CALL obix.import('target', 'source', batch_size => 4);
SELECT max(sequence) FROM target;
SELECT head, frontier, high_water_mark, in_flight FROM obix.outbox_status WHERE outbox = 'target'::regclass;
ROLLBACK;
SELECT obix.fill_gaps('target');
SELECT head, frontier, high_water_mark, suspect_from, resolved, in_flight FROM obix.outbox_status WHERE outbox = 'target'::regclass;
BEGIN;
SAVEPOINT a;
CALL obix.import('target', 'source', batch_size => 4);
INSERT INTO target (payload) VALUES ('"rolled back too"') RETURNING sequence;
ROLLBACK TO a;
SELECT head, frontier, high_water_mark, suspect_from, resolved, in_flight FROM obix.outbox_status WHERE outbox = 'target'::regclass;
SAVEPOINT b;
CALL obix.import('target', 'source');
RELEASE b;
SAVEPOINT c;
INSERT INTO source VALUES (71, '71');
CALL obix.import('target', 'source');
ROLLBACK TO c;
INSERT INTO target (payload) VALUES ('"my own"') RETURNING sequence;
SELECT obix.publish('target', '"published"') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM target WHERE sequence > 68 ORDER BY sequence;
SELECT obix.fill_gaps('target');
SELECT head, frontier, high_water_mark, suspect_from, in_flight FROM obix.outbox_status WHERE outbox = 'target'::regclass;
BEGIN;
SELECT obix.create_outbox('brief', 10, 0);
CALL obix.import('brief', 'source');
SELECT count(payload), max(sequence) FROM brief;
ROLLBACK;
-- in a procedure, it commits there
CREATE PROCEDURE import_twice() LANGUAGE plpgsql AS $$
BEGIN
    CALL obix.import('brief', 'source', batch_size => 10);
    INSERT INTO source VALUES (71, '71');
    CALL obix.import('brief', 'source', batch_size => 10);
END $$;
SELECT obix.create_outbox('brief', 10, 0);
CALL import_twice();
SELECT count(payload), max(sequence) FROM brief;
DROP TABLE brief;
DELETE FROM source WHERE id = 71;

--
-- What is not there before the first event
--
CREATE TABLE late (LIKE source INCLUDING DEFAULTS);
ALTER TABLE late ADD PRIMARY KEY (id);
INSERT INTO late VALUES (5000001, '1'), (5000003, '3');
SELECT obix.create_outbox('far', 1000, 0);
SELECT obix.create_consumer('early', 'far'), obix.create_consumer('asked', 'far', start_after => 0);
CALL obix.import('far', 'late');
SELECT sequence, payload FROM far ORDER BY sequence;
SELECT partition, from_sequence, to_sequence FROM obix.partition_status WHERE outbox = 'far'::regclass AND from_sequence BETWEEN 1 AND 5000000 ORDER BY from_sequence;
SELECT head, high_water_mark, suspect_from, resolved, stranded FROM obix.outbox_status WHERE outbox = 'far'::regclass;
SELECT sequence, payload FROM obix.read('far') ORDER BY sequence;
SELECT sequence, payload FROM obix.read('far', after => 5000000) ORDER BY sequence;
SELECT * FROM obix.read('far', after => 0);
SELECT consumer, "cursor", lag_events FROM obix.consumer_status WHERE outbox = 'far'::regclass ORDER BY consumer;
SELECT sequence, payload FROM obix.fetch('early') ORDER BY sequence;
SELECT sequence, payload FROM obix.fetch('asked') ORDER BY sequence;
SELECT obix.publish('far', '4') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.fetch('early') ORDER BY sequence;

--
-- Errors: what does not fit
--
CREATE TABLE bad (id bigint, payload text, recorded_at timestamptz DEFAULT '2024-01-01', event_id uuid);
CREATE INDEX ON bad (id);
SELECT obix.create_outbox('wrong', 10, 0);
\set SHOW_CONTEXT always
INSERT INTO bad VALUES (1, '1'), (2, 'no JSON');
CALL obix.import('wrong', 'bad');
UPDATE bad SET payload = NULL WHERE id = 2;
CALL obix.import('wrong', 'bad');
UPDATE bad SET payload = '2', recorded_at = NULL WHERE id = 2;
CALL obix.import('wrong', 'bad');
UPDATE bad SET recorded_at = '-infinity' WHERE id = 2;
CALL obix.import('wrong', 'bad');
UPDATE bad SET recorded_at = now(), event_id = '00000000-0000-0000-0000-000000000000' WHERE id = 2;
CALL obix.import('wrong', 'bad');
UPDATE bad SET event_id = NULL;
ALTER TABLE bad ALTER payload TYPE bytea USING '\xff';
CALL obix.import('wrong', 'bad');
\set SHOW_CONTEXT never
ALTER TABLE bad ALTER payload TYPE jsonb USING '1';
UPDATE bad SET id = 1;
CALL obix.import('wrong', 'bad');
UPDATE bad SET id = 0;
CALL obix.import('wrong', 'bad');
UPDATE bad SET id = 9223372036854775807;
CALL obix.import('wrong', 'bad');
UPDATE bad SET id = NULL;
CALL obix.import('wrong', 'bad');
SELECT count(*) FROM wrong;
SELECT head, suspect_from, resolved FROM obix.outbox_status WHERE outbox = 'wrong'::regclass;
TRUNCATE bad;

-- columns
CALL obix.import('wrong', 'bad', sequence => 'no_such');
CALL obix.import('wrong', 'bad', sequence => 'payload');
CALL obix.import('wrong', 'bad', recorded_at => 'id');
CALL obix.import('wrong', 'bad', payload => '');
CALL obix.import('wrong', 'bad', sequence => '');
ALTER TABLE bad RENAME id TO no;
CALL obix.import('wrong', 'bad');
ALTER TABLE bad RENAME no TO id;
DROP INDEX bad_id_idx;
CALL obix.import('wrong', 'bad');

-- sequences far above all others
CREATE TABLE stray (id bigint PRIMARY KEY, payload jsonb);
INSERT INTO stray VALUES (1, '1'), (10000010, '2');
SELECT obix.create_outbox('sparse', 1000, 0);
CALL obix.import('sparse', 'stray', batch_size => 5);
SELECT count(*), count(payload), max(sequence) FROM sparse;
CALL obix.import('sparse', 'stray', batch_size => 5);
UPDATE stray SET id = 9 WHERE id > 1;
CALL obix.import('sparse', 'stray', batch_size => 5);
SELECT count(*), count(payload), max(sequence) FROM sparse;
DROP TABLE sparse, stray;

-- arguments
CALL obix.import(NULL, 'bad');
CALL obix.import('wrong', NULL);
CALL obix.import('wrong', 'bad', batch_size => NULL);
CALL obix.import('wrong', 'bad', batch_size => 0);
CALL obix.import('wrong', 'bad', batch_size => 1000001);
CALL obix.import('bad', 'bad');
CALL obix.import('wrong', 'wrong');
CALL obix.import('wrong', 'wrong_pkey');
CALL obix.import('wrong', 4294967295::oid::regclass);
CALL obix.import(4294967295::oid::regclass, 'bad');

-- transactions
INSERT INTO bad VALUES (1, '1');
BEGIN ISOLATION LEVEL REPEATABLE READ;
CALL obix.import('wrong', 'bad');
ROLLBACK;
BEGIN READ ONLY;
CALL obix.import('wrong', 'bad');
ROLLBACK;
BEGIN;
CALL obix.import('wrong', 'bad');
PREPARE TRANSACTION 'regress_obix_import';
SELECT count(*) FROM wrong;
SET obix.enabled = off;
CALL obix.import('wrong', 'bad');
RESET obix.enabled;

-- other events in the outbox
ALTER TABLE bad ADD PRIMARY KEY (id);
SELECT obix.publish('wrong', '"mine"') IS NOT NULL AS published;
CALL obix.import('wrong', 'bad');
INSERT INTO bad VALUES (2, '2');
CALL obix.import('wrong', 'bad');
SELECT obix.drop_outbox('wrong'), obix.create_outbox('wrong', 10, 0);
-- sequences that were drawn
BEGIN;
INSERT INTO wrong (payload) VALUES ('1');
CALL obix.import('wrong', 'bad');
ROLLBACK;
SELECT obix.fill_gaps('wrong') IS NOT NULL AS filled;
CALL obix.import('wrong', 'bad');
SELECT obix.drop_outbox('wrong'), obix.create_outbox('wrong', 10, 0);
-- what comes to the source late, and what is removed there
INSERT INTO bad VALUES (4, '4');
CALL obix.import('wrong', 'bad');
INSERT INTO bad VALUES (3, '3');
CALL obix.import('wrong', 'bad');
UPDATE bad SET id = 5 WHERE id = 3;
DELETE FROM bad WHERE id = 1;
CALL obix.import('wrong', 'bad');
SELECT sequence, payload FROM wrong ORDER BY sequence;
-- another source
UPDATE bad SET event_id = '01890000-0000-7000-8000-000000000001';
CALL obix.import('wrong', 'bad');

-- what publishing refuses, for the same reasons
SELECT obix.create_outbox('ruled', 10, 0);
ALTER TABLE ruled ADD CHECK (type IS NOT NULL);
CALL obix.import('ruled', 'bad');
ALTER TABLE ruled DROP CONSTRAINT ruled_type_check;
ALTER TABLE ruled ADD CHECK (type IS NOT NULL OR payload IS NULL);
CALL obix.import('ruled', 'bad');
ALTER TABLE ruled DROP CONSTRAINT ruled_check;
ALTER TABLE ruled ADD COLUMN more integer;
CALL obix.import('ruled', 'bad');
SELECT count(*) FROM ruled;

--
-- Privileges: those of the caller on the source, and the outbox must be theirs
--
CREATE ROLE regress_obix_importer;
GRANT USAGE, CREATE ON SCHEMA app TO regress_obix_importer;
GRANT INSERT, SELECT ON target TO regress_obix_importer;
SET ROLE regress_obix_importer;
CALL obix.import('target', 'source');
SELECT obix.create_outbox('mine', 10, 0);
CALL obix.import('mine', 'source');
RESET ROLE;
GRANT SELECT ON source TO regress_obix_importer;
SET ROLE regress_obix_importer;
CALL obix.import('mine', 'source');
SELECT count(payload), max(sequence) FROM mine;
ALTER TABLE mine ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CALL obix.import('mine', 'source');
RESET ROLE;

--
-- The source's owner does not get to run a cast, and the owner of the outbox does
-- not get at the cursor with which the source is read
--
CREATE TYPE kind AS ENUM ('paid', 'sent');
CREATE FUNCTION cast_kind(kind) RETURNS text LANGUAGE sql AS $$SELECT 'cast by ' || current_user$$;
CREATE CAST (kind AS text) WITH FUNCTION cast_kind(kind);
CREATE TABLE kinds (seq bigint PRIMARY KEY, type kind, key kind, payload jsonb);
INSERT INTO kinds SELECT n, 'paid', CASE WHEN n % 2 = 0 THEN 'sent'::kind END, '{}' FROM generate_series(1, 3000) n;
CREATE FUNCTION close_all(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
DECLARE
    portal refcursor;
BEGIN
    FOR n IN 1..20 LOOP
        portal := format('<unnamed portal %s>', n);
        BEGIN
            CLOSE portal;
        EXCEPTION
            WHEN invalid_cursor_name OR invalid_cursor_state THEN NULL;
        END;
    END LOOP;
    RETURN $1;
END $$;
SELECT obix.create_outbox('kind_of');
CREATE INDEX ON kind_of (close_all(type));
CALL obix.import('kind_of', 'kinds');
SELECT type, key, count(*) FROM kind_of GROUP BY type, key ORDER BY key;

--
-- Many batches take no more memory than few
--
CREATE TABLE memory (n serial, seq bigint, used numeric);
CREATE FUNCTION note_memory(bigint) RETURNS text VOLATILE LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO memory (seq, used) SELECT $1, sum(used_bytes) FROM pg_backend_memory_contexts;
    RETURN 'noted';
END $$;
CREATE VIEW noted AS
SELECT n::bigint AS seq, CASE WHEN n IN (300, 1300) THEN note_memory(n) END AS type, '{}'::jsonb AS payload FROM generate_series(1, 1300) n;
SELECT obix.create_outbox('many');
CALL obix.import('many', 'noted', batch_size => 1);
SELECT b.used - a.used < 100000 AS same FROM (SELECT used FROM memory WHERE seq = 300 ORDER BY n DESC LIMIT 1) a, (SELECT used FROM memory WHERE seq = 1300 ORDER BY n DESC LIMIT 1) b;

-- as it was
SELECT count(obix.drop_consumer(consumer)) FROM obix.consumer WHERE outbox IN (SELECT outbox FROM obix.outbox WHERE outbox::text = 'far');
DROP SCHEMA app CASCADE;
DROP ROLE regress_obix_importer;
