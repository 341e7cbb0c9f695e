--
-- What can be in an event: of any size, of any kind, and never mistaken for a
-- placeholder
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_payload;
SET search_path = obix_payload, public;

-- sizes around 8,000 bytes, where a notification that carries the event would
-- fail; bytes of one character, of two, in every column
SELECT obix.create_outbox('sized', 1000, 1);
SELECT count(obix.publish('sized', to_jsonb(repeat('x', n)), type => repeat('ä', n / 2), key => repeat('k', n), headers => to_jsonb(repeat('ß', n / 2))))
FROM generate_series(7900, 8100) n;
INSERT INTO sized (payload, type, key, headers)
SELECT to_jsonb(repeat('x', n)), repeat('ä', n / 2), repeat('k', n), to_jsonb(repeat('ß', n / 2)) FROM generate_series(7900, 8100) n;
SELECT obix.publish('sized', '{"small": true}', headers => to_jsonb(repeat('h', 20000))) IS NOT NULL AS published;
SELECT obix.publish('sized', to_jsonb(repeat('€', 1000000))) IS NOT NULL AS published;
SELECT count(*), bool_and(length(payload #>> '{}') = 7900 + (sequence - 1) % 201) AS same_payload,
       bool_and(type = repeat('ä', length(payload #>> '{}') / 2)) AS same_type, bool_and(length(key) = length(payload #>> '{}')) AS same_key,
       bool_and(headers #>> '{}' = repeat('ß', length(payload #>> '{}') / 2)) AS same_headers
FROM obix.read('sized') WHERE sequence <= 402;
SELECT sequence, length(payload::text), octet_length(payload::text), length(headers::text) FROM obix.read('sized', after => 402) ORDER BY sequence;

-- what jsonb does not take, it does not take here either, and nothing is left behind
\set VERBOSITY sqlstate
SELECT obix.publish('sized', '"\u0000"');
SELECT obix.publish('sized', '"\ud800"');
INSERT INTO sized (payload) VALUES ('"\u0000"');
\set VERBOSITY default
SELECT obix.fill_gaps('sized') >= 0 AS filled;
SELECT obix.high_water_mark('sized') - (SELECT max(sequence) FROM sized) AS behind;

-- no body, an empty one, and a hole
SELECT obix.create_outbox('kinds', 100, 1);
SELECT obix.create_consumer('kinds', 'kinds');
SELECT obix.publish('kinds', NULL);
\echo :LAST_ERROR_SQLSTATE
INSERT INTO kinds (payload) VALUES (NULL);
\echo :LAST_ERROR_SQLSTATE
INSERT INTO kinds (type) VALUES ('without');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('kinds') >= 0 AS filled;
SELECT max(sequence) AS refused FROM obix.read('kinds') \gset
SELECT obix.publish('kinds', 'null', type => 'JSON null') IS NOT NULL AS published;
INSERT INTO kinds (payload, type) VALUES ('null', 'JSON null, inserted');
BEGIN;
INSERT INTO kinds (payload, type) VALUES ('"gone"', 'gone');
ROLLBACK;
SELECT obix.publish('kinds', '{}', type => 'empty') IS NOT NULL AS published;
SELECT obix.publish('kinds', '""', type => '', key => '', headers => 'null') IS NOT NULL AS published;
SELECT obix.fill_gaps('kinds') >= 0 AS filled;
-- read: the kind is told by the id, and every position is there
SELECT sequence - :refused AS n, id = '00000000-0000-0000-0000-000000000000' AS placeholder, payload IS NULL AS no_payload, payload, type, key, headers
FROM obix.read('kinds', after => :refused) ORDER BY sequence;
-- in an export as well
COPY (SELECT sequence - :refused, id = '00000000-0000-0000-0000-000000000000', payload, type, key, headers
      FROM obix.read('kinds', after => :refused) ORDER BY sequence) TO stdout;
-- fetched: events only; the placeholder counts in the cursor
SELECT sequence - :refused AS n, payload, payload IS NULL AS no_payload, type FROM obix.fetch('kinds') ORDER BY sequence;
SELECT obix.ack('kinds', :refused + 3);
SELECT "cursor" - :refused AS "cursor", delivered, lag_events FROM obix.consumer_status WHERE consumer = 'kinds';
SELECT obix.ack('kinds', :refused + 5);
SELECT "cursor" - :refused AS "cursor", delivered, lag_events FROM obix.consumer_status WHERE consumer = 'kinds';

-- when it was written is when the transaction ended, or the statement began,
-- however long the transaction had been open
SELECT obix.create_outbox('timed', 100, 1);
BEGIN;
SELECT obix.publish('timed', '1') IS NOT NULL AS published;
SELECT pg_sleep(0.05);
SELECT clock_timestamp() AS before \gset
INSERT INTO timed (payload) VALUES ('2');
SELECT clock_timestamp() AS between \gset
COMMIT;
SELECT payload, recorded_at >= :'before' AS after_the_sleep, recorded_at >= :'between' AS at_commit, recorded_at <= clock_timestamp() AS past
FROM obix.read('timed') ORDER BY payload;

DROP SCHEMA obix_payload CASCADE;
