--
-- ordering => 'available': what is committed is delivered, what was passed as
-- soon as it commits
--
-- Prepared transactions stand for publishers that are still open.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_available;
SET search_path = obix_available, public;
CREATE VIEW progress AS
SELECT consumer, state, "cursor", late_ranges, delivered, failed, dead_lettered FROM obix.consumer_status;
CREATE TABLE got (n int GENERATED ALWAYS AS IDENTITY, consumer text, sequence bigint, payload jsonb);
-- fetch and acknowledge until nothing is left
CREATE PROCEDURE drain(consumer text, page int DEFAULT 100) LANGUAGE plpgsql AS $$
DECLARE
    found bigint[];
BEGIN
    FOR i IN 1 .. 10000 LOOP
        WITH f AS (INSERT INTO got (consumer, sequence, payload) SELECT drain.consumer, f.sequence, f.payload FROM obix.fetch(drain.consumer, page) f
                   RETURNING got.sequence)
        SELECT array_agg(f.sequence) INTO found FROM f;
        EXIT WHEN found IS NULL;
        PERFORM obix.ack(drain.consumer, (SELECT max(s) FROM unnest(found) s));
        COMMIT;
    END LOOP;
END $$;

SELECT obix.create_outbox('orders', 10, 3);
SELECT obix.create_consumer('eager', 'orders', ordering => 'available');
SELECT obix.create_consumer('patient', 'orders');
SELECT * FROM obix.fetch('eager');

-- it does not wait behind a publisher that is still open
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 2) n;
BEGIN;
INSERT INTO orders (payload) VALUES ('"open 3"'), ('"open 4"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO orders (payload) VALUES ('5') RETURNING sequence;
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT sequence, payload FROM obix.fetch('patient') ORDER BY sequence;
-- page by page, and the same until it is acknowledged
SELECT sequence FROM obix.fetch('eager', 2) ORDER BY sequence;
SELECT sequence FROM obix.fetch('eager', 3) ORDER BY sequence;
SELECT obix.ack('eager', 2);
SELECT sequence FROM obix.fetch('eager') ORDER BY sequence;
SELECT * FROM progress ORDER BY consumer;
-- what it has passed is one range
SELECT obix.ack('eager', 5);
SELECT * FROM obix.fetch('eager');
SELECT * FROM progress ORDER BY consumer;
SELECT from_sequence, to_sequence, requeued, handed_out, holder IS NOT NULL AS held FROM obix.consumer_late;
-- committed, it is delivered, until it is acknowledged
COMMIT PREPARED 'obix_available';
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT sequence, payload FROM obix.fetch('eager', 1) ORDER BY sequence;
SELECT obix.ack('eager', 3);
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 3);
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 4);
SELECT * FROM obix.fetch('eager');
SELECT obix.ack('eager', 5);
SELECT obix.fill_gaps('orders') >= 0 AS walked;
SELECT sequence, payload FROM obix.fetch('patient') ORDER BY sequence;
SELECT obix.ack('patient', 5);
SELECT * FROM progress ORDER BY consumer;

-- rolled back: placeholders are the proof that ends the range
BEGIN;
INSERT INTO orders (payload) VALUES ('"gone 6"'), ('"gone 7"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO orders (payload) VALUES ('8') RETURNING sequence;
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 8);
SELECT * FROM obix.fetch('eager');
SELECT late_ranges FROM progress WHERE consumer = 'eager';
ROLLBACK PREPARED 'obix_available';
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT * FROM obix.fetch('eager');
SELECT * FROM progress WHERE consumer = 'eager';
SELECT count(*) FROM obix.consumer_late;
-- what a worker has filled before is passed like any other placeholder
BEGIN;
INSERT INTO orders (payload) VALUES ('"gone 9"');
ROLLBACK;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT * FROM obix.fetch('eager');
INSERT INTO orders (payload) VALUES ('10');
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 10);
SELECT * FROM progress WHERE consumer = 'eager';

-- never beyond what was fetched: what was a hole then may be an event now
INSERT INTO orders (payload) VALUES ('11'), ('12'), ('13');
SELECT obix.ack('eager', 11);
\echo :LAST_ERROR_SQLSTATE
SELECT sequence FROM obix.fetch('eager', 2) ORDER BY sequence;
SELECT obix.ack('eager', 13);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('eager', 11);
SELECT obix.ack('eager', 12);
SELECT obix.ack('eager', 14);
\echo :LAST_ERROR_SQLSTATE
BEGIN;
SELECT sequence FROM obix.fetch('eager') ORDER BY sequence;
ROLLBACK;
SELECT obix.ack('eager', 13);
\echo :LAST_ERROR_SQLSTATE
SELECT sequence FROM obix.fetch('eager') ORDER BY sequence;
-- never back
SELECT obix.ack('eager', 13);
SELECT obix.ack('eager', 5);
SELECT * FROM progress WHERE consumer = 'eager';

-- committed between fetch and acknowledgement: late, not lost
BEGIN;
INSERT INTO orders (payload) VALUES ('"open 14"'), ('"open 15"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO orders (payload) VALUES ('16');
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
COMMIT PREPARED 'obix_available';
SELECT obix.ack('eager', 16);
SELECT delivered FROM progress WHERE consumer = 'eager';
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 15);
SELECT * FROM progress WHERE consumer = 'eager';
-- between two fetches: in their place
BEGIN;
INSERT INTO orders (payload) VALUES ('"open 17"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO orders (payload) VALUES ('18');
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
COMMIT PREPARED 'obix_available';
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 18);
SELECT * FROM obix.fetch('eager');
SELECT * FROM progress WHERE consumer = 'eager';

-- acknowledged only as far as into what was passed: each once all the same
BEGIN;
INSERT INTO orders (payload) VALUES ('"open 19"'), ('"open 20"'), ('"open 21"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO orders (payload) VALUES ('22');
SELECT sequence FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 20);
SELECT sequence FROM obix.fetch('eager') ORDER BY sequence;
COMMIT PREPARED 'obix_available';
CALL drain('eager');
SELECT array_agg(sequence ORDER BY n) FROM got;
SELECT * FROM progress WHERE consumer = 'eager';

-- more than one open, committed in another order, rolled back in part
TRUNCATE got;
BEGIN;
INSERT INTO orders (payload) VALUES ('"a 23"'), ('"a 24"');
PREPARE TRANSACTION 'obix_available_a';
BEGIN;
INSERT INTO orders (payload) VALUES ('"b 25"');
SAVEPOINT a;
INSERT INTO orders (payload) VALUES ('"gone 26"');
ROLLBACK TO a;
INSERT INTO orders (payload) VALUES ('"b 27"');
PREPARE TRANSACTION 'obix_available_b';
INSERT INTO orders (payload) VALUES ('28');
BEGIN;
INSERT INTO orders (payload) VALUES ('"c 29"');
PREPARE TRANSACTION 'obix_available_c';
INSERT INTO orders (payload) VALUES ('30');
BEGIN;
SELECT obix.publish('orders', '"d 31"') IS NOT NULL AS published;
PREPARE TRANSACTION 'obix_available_d';
CALL drain('eager', 1);
SELECT * FROM progress WHERE consumer = 'eager';
COMMIT PREPARED 'obix_available_b';
CALL drain('eager', 1);
COMMIT PREPARED 'obix_available_d';
CALL drain('eager', 1);
ROLLBACK PREPARED 'obix_available_c';
CALL drain('eager', 1);
COMMIT PREPARED 'obix_available_a';
CALL drain('eager', 1);
SELECT array_agg(payload ORDER BY n) FROM got;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
CALL drain('eager', 1);
SELECT * FROM progress WHERE consumer = 'eager';
SELECT count(*) FROM obix.consumer_late;
SELECT obix.seek('patient', 22);
CALL drain('patient');
SELECT array_agg(sequence ORDER BY n) FROM got WHERE consumer = 'patient';
SELECT count(*) AS different FROM (SELECT sequence, payload FROM got WHERE consumer = 'eager'
                                   EXCEPT ALL SELECT sequence, payload FROM got WHERE consumer = 'patient') d;

-- one's own events
BEGIN;
INSERT INTO orders (payload) VALUES ('"own"');
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 32);
ROLLBACK;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT * FROM obix.fetch('eager');
BEGIN;
SAVEPOINT a;
INSERT INTO orders (payload) VALUES ('"own, gone"');
ROLLBACK TO a;
INSERT INTO orders (payload) VALUES ('"own"');
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 34);
COMMIT;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT * FROM obix.fetch('eager');
SELECT "cursor", late_ranges FROM progress WHERE consumer = 'eager';
-- in another isolation level
BEGIN ISOLATION LEVEL REPEATABLE READ;
INSERT INTO orders (payload) VALUES ('35');
SELECT sequence, payload FROM obix.fetch('eager') ORDER BY sequence;
SELECT obix.ack('eager', 35);
COMMIT;
SELECT "cursor", late_ranges FROM progress WHERE consumer = 'eager';

-- types: what was passed is for it or not
SELECT obix.create_outbox('mixed', 1000000, 1);
SELECT obix.create_consumer('choosy', 'mixed', types => '{wanted}', ordering => 'available');
BEGIN;
INSERT INTO mixed (type, payload) VALUES ('other', '1'), ('wanted', '2'), (NULL, '3');
PREPARE TRANSACTION 'obix_available';
INSERT INTO mixed (type, payload) VALUES ('other', '4'), ('wanted', '5'), ('other', '6');
SELECT sequence, type FROM obix.fetch('choosy') ORDER BY sequence;
SELECT obix.ack('choosy', 5);
SELECT * FROM obix.fetch('choosy');
COMMIT PREPARED 'obix_available';
SELECT sequence, type FROM obix.fetch('choosy') ORDER BY sequence;
SELECT obix.ack('choosy', 2);
SELECT * FROM obix.fetch('choosy');
SELECT * FROM progress WHERE consumer = 'choosy';
-- much that is not for it is not looked at again, and what was passed there is not forgotten
BEGIN;
INSERT INTO mixed (type, payload) VALUES ('wanted', '7');
PREPARE TRANSACTION 'obix_available';
INSERT INTO mixed (type, payload) SELECT 'other', to_jsonb(n) FROM generate_series(8, 3000) n;
SELECT * FROM obix.fetch('choosy');
SELECT position, scanned, fetched, late FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'choosy';
BEGIN;
SELECT * FROM obix.fetch('choosy');
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
COMMIT;
COMMIT PREPARED 'obix_available';
SELECT sequence, type FROM obix.fetch('choosy') ORDER BY sequence;
SELECT obix.ack('choosy', 7);
SELECT * FROM obix.fetch('choosy');
SELECT delivered, late_ranges FROM progress WHERE consumer = 'choosy';
INSERT INTO mixed (type, payload) VALUES ('wanted', '3001');
SELECT sequence, type FROM obix.fetch('choosy') ORDER BY sequence;
SELECT obix.ack('choosy', 3001);
SELECT delivered, late_ranges FROM progress WHERE consumer = 'choosy';
-- a large hole is one row, also when it lies in many pieces
BEGIN;
INSERT INTO mixed (type, payload) SELECT 'wanted', '"large"' FROM generate_series(1, 20000);
PREPARE TRANSACTION 'obix_available';
INSERT INTO mixed (type, payload) VALUES ('wanted', '"after"');
SELECT sequence, type FROM obix.fetch('choosy') ORDER BY sequence;
SELECT obix.ack('choosy', 23002);
SELECT * FROM obix.fetch('choosy');
SELECT from_sequence, to_sequence, handed_out FROM obix.consumer_late;
COMMIT PREPARED 'obix_available';
TRUNCATE got;
CALL drain('choosy', 3000);
SELECT count(*), count(DISTINCT sequence), min(sequence), max(sequence) FROM got;
SELECT delivered, late_ranges FROM progress WHERE consumer = 'choosy';

-- failing: of the next, or of what is late
SELECT obix.create_outbox('jobs', 10, 3);
SELECT obix.create_consumer('worker', 'jobs', ordering => 'available', max_attempts => 2, backoff => '1 h', on_failure => 'dead_letter');
BEGIN;
INSERT INTO jobs (payload) VALUES ('"open 1"'), ('"open 2"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO jobs (payload) VALUES ('3'), ('4');
SELECT obix.fail('worker', 3, 'not fetched');
\echo :LAST_ERROR_SQLSTATE
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.fail('worker', 1, 'not there');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('worker', 4, 'not the next');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('worker', 3, 'first');
SELECT * FROM obix.fetch('worker');
SELECT * FROM progress WHERE consumer = 'worker';
SELECT obix.fail('worker', 3, 'second');
SELECT * FROM progress WHERE consumer = 'worker';
SELECT sequence, state, error FROM obix.dead_letter WHERE consumer = 'worker';
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 4);
COMMIT PREPARED 'obix_available';
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.fail('worker', 1, 'late and bad');
SELECT * FROM obix.fetch('worker');
SELECT state, attempts, attempt_sequence FROM obix.consumer_status WHERE consumer = 'worker';
SELECT obix.fail('worker', 1, 'late and bad');
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 2);
SELECT sequence, state, error FROM obix.dead_letter WHERE consumer = 'worker' ORDER BY sequence;
SELECT obix.requeue('worker', 3);
SELECT obix.requeue('worker', 1);
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 3);
SELECT * FROM obix.fetch('worker');
SELECT count(*) FROM obix.dead_letter WHERE consumer = 'worker';
SELECT * FROM progress WHERE consumer = 'worker';
-- what was passed before a dead letter is not lost
BEGIN;
INSERT INTO jobs (payload) VALUES ('"open 5"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO jobs (payload) VALUES ('6');
SELECT obix.alter_consumer('worker', max_attempts => 1);
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.fail('worker', 6, 'bad');
COMMIT PREPARED 'obix_available';
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 5);
SELECT * FROM obix.fetch('worker');
SELECT obix.discard('worker', 6);
-- stop at one that is late, and go on
SELECT obix.alter_consumer('worker', on_failure => 'stop');
BEGIN;
INSERT INTO jobs (payload) VALUES ('"open 7"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO jobs (payload) VALUES ('8');
CALL drain('worker');
COMMIT PREPARED 'obix_available';
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.fail('worker', 7, 'bad');
SELECT * FROM obix.fetch('worker');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.resume('worker');
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 7);
SELECT * FROM progress WHERE consumer = 'worker';

-- seek: what was passed is forgotten, forward and back
BEGIN;
INSERT INTO jobs (payload) VALUES ('"open 9"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO jobs (payload) VALUES ('10'), ('11');
CALL drain('worker');
SELECT late_ranges FROM progress WHERE consumer = 'worker';
SELECT obix.seek('worker', 8);
SELECT late_ranges FROM progress WHERE consumer = 'worker';
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 11);
SELECT obix.seek('worker', 11);
SELECT late_ranges FROM progress WHERE consumer = 'worker';
COMMIT PREPARED 'obix_available';
SELECT * FROM obix.fetch('worker');
SELECT obix.seek('worker', 8);
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 11);
SELECT * FROM progress WHERE consumer = 'worker';

-- removed: below the oldest kept event as for any consumer; ranges end
INSERT INTO jobs (payload) SELECT to_jsonb(n) FROM generate_series(12, 25) n;
SELECT obix.fill_gaps('jobs') >= 0 AS walked;
DROP TABLE jobs_p0, jobs_p10;
SELECT * FROM obix.fetch('worker');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('worker', NULL);
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 25);
BEGIN;
INSERT INTO jobs (payload) VALUES ('"gone 26"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO jobs (payload) VALUES ('27');
CALL drain('worker');
ROLLBACK PREPARED 'obix_available';
TRUNCATE jobs;
-- what was passed may have been an event
SELECT * FROM obix.fetch('worker');
SELECT obix.seek('worker', NULL);
SELECT * FROM obix.fetch('worker');
SELECT * FROM progress WHERE consumer = 'worker';
SELECT count(*) FROM obix.consumer_late l JOIN obix.consumer c USING (id) WHERE consumer = 'worker';
INSERT INTO jobs (payload) VALUES ('28');
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;

-- rolled back, what was passed is found again
SELECT obix.ack('worker', 28);
BEGIN;
INSERT INTO jobs (payload) VALUES ('"open 29"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO jobs (payload) VALUES ('30');
BEGIN;
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SAVEPOINT a;
SELECT obix.ack('worker', 30);
ROLLBACK TO a;
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
SELECT obix.ack('worker', 30);
ROLLBACK;
COMMIT PREPARED 'obix_available';
SELECT sequence FROM obix.fetch('worker') ORDER BY sequence;
BEGIN;
SELECT obix.ack('worker', 30);
PREPARE TRANSACTION 'obix_available';
SELECT * FROM obix.fetch('worker');
COMMIT PREPARED 'obix_available';
SELECT * FROM obix.fetch('worker');
SELECT "cursor", late_ranges FROM progress WHERE consumer = 'worker';

-- how far behind it is: to it, all that is committed can be read
SELECT obix.create_outbox('lagging', 100, 1);
SELECT obix.create_consumer('behind', 'lagging', ordering => 'available');
SELECT obix.create_consumer('waiting', 'lagging');
BEGIN;
INSERT INTO lagging (payload) VALUES ('"open 1"');
PREPARE TRANSACTION 'obix_available';
INSERT INTO lagging (payload) SELECT to_jsonb(n) FROM generate_series(2, 11) n;
SELECT consumer, lag_events > 0 AS behind, lag > '0' AS aged FROM obix.consumer_status WHERE outbox = 'lagging'::regclass ORDER BY consumer;
CALL obix.wait_for('behind', '1 h');
CALL drain('behind');
SELECT consumer, lag_events, lag FROM obix.consumer_status WHERE outbox = 'lagging'::regclass ORDER BY consumer;
COMMIT PREPARED 'obix_available';

--
-- Acknowledging within holes, with further ones ahead: these are recorded anew
--
SELECT obix.create_outbox('cut', 100, 1);
SELECT obix.create_consumer('cut', 'cut', ordering => 'available');
BEGIN;
INSERT INTO cut (payload) VALUES ('1'), ('2'), ('3');
PREPARE TRANSACTION 'obix_available';
INSERT INTO cut (payload) VALUES ('4');
BEGIN;
INSERT INTO cut (payload) VALUES ('5');
PREPARE TRANSACTION 'obix_available_b';
INSERT INTO cut (payload) VALUES ('6');
SELECT sequence FROM obix.fetch('cut');
SELECT obix.ack('cut', 2);
SELECT sequence FROM obix.fetch('cut');
SELECT obix.ack('cut', 6);
COMMIT PREPARED 'obix_available';
COMMIT PREPARED 'obix_available_b';
SELECT sequence FROM obix.fetch('cut');
SELECT obix.ack('cut', 5);
SELECT sequence FROM obix.fetch('cut');
SELECT "cursor", late_ranges, delivered FROM obix.consumer_status WHERE consumer = 'cut';

--
-- Only what may be delivered can fail
--
SELECT obix.create_outbox('failing', 100, 1);
SELECT obix.create_consumer('failing', 'failing', types => '{a}', ordering => 'available', on_failure => 'dead_letter', max_attempts => 1);
BEGIN;
INSERT INTO failing (payload, type) VALUES ('1', 'b');
SAVEPOINT s;
INSERT INTO failing (payload, type) VALUES ('2', 'a');
ROLLBACK TO s;
INSERT INTO failing (payload, type) VALUES ('3', 'a');
PREPARE TRANSACTION 'obix_available';
INSERT INTO failing (payload, type) VALUES ('4', 'a');
SELECT sequence FROM obix.fetch('failing');
SELECT obix.ack('failing', 4);
COMMIT PREPARED 'obix_available';
SELECT obix.fill_gaps('failing') >= 0 AS filled;
SELECT obix.fail('failing', 1, 'of another type');
SELECT obix.fail('failing', 2, 'a placeholder');
SELECT obix.fail('failing', 3, 'fails');
SELECT sequence, type, payload FROM obix.dead_letter WHERE consumer = 'failing';

--
-- More late ranges than are read at a time
--
SELECT obix.create_outbox('ranges', 5000, 1);
SELECT obix.create_consumer('ranges', 'ranges', ordering => 'available', on_failure => 'dead_letter', max_attempts => 1);
BEGIN;
DO $$
BEGIN
    FOR i IN 1 .. 600 LOOP
        BEGIN
            INSERT INTO ranges (payload) VALUES ('"gone"');
            RAISE division_by_zero;
        EXCEPTION WHEN division_by_zero THEN NULL;
        END;
        INSERT INTO ranges (payload) VALUES (to_jsonb(i));
    END LOOP;
END $$;
PREPARE TRANSACTION 'obix_available';
INSERT INTO ranges (payload) VALUES ('"first"');
SELECT sequence, payload FROM obix.fetch('ranges');
SELECT obix.ack('ranges', 1201);
SELECT sequence, payload FROM obix.fetch('ranges');
SELECT late_ranges > 256 AS many FROM progress WHERE consumer = 'ranges';
COMMIT PREPARED 'obix_available';
CALL drain('ranges', 250);
SELECT obix.fill_gaps('ranges') >= 0 AS filled;
CALL drain('ranges', 250);
SELECT count(*), count(DISTINCT sequence), bool_and((payload::bigint) = row) FROM
(SELECT sequence, payload, row_number() OVER (ORDER BY n) AS row FROM got WHERE consumer = 'ranges') g;
SELECT "cursor", late_ranges, delivered FROM progress WHERE consumer = 'ranges';
-- and as many dead letters
TRUNCATE got;
SELECT count(obix.publish('ranges', to_jsonb(n))) FROM generate_series(1, 600) n;
DO $$
BEGIN
    FOR i IN 1202 .. 1801 LOOP
        PERFORM obix.fetch('ranges', 1);
        PERFORM obix.fail('ranges', i, 'fails');
    END LOOP;
END $$;
SELECT * FROM obix.fetch('ranges');
SELECT count(obix.requeue('ranges', sequence)) FROM (SELECT sequence FROM obix.dead_letter WHERE consumer = 'ranges' ORDER BY 1) d;
SELECT count(*), min(sequence), max(sequence) FROM obix.fetch('ranges', 1000);
SELECT obix.fail('ranges', 1202, 'fails again');
CALL drain('ranges', 500);
SELECT count(*), count(DISTINCT sequence), bool_and((payload::bigint) = row + 1) FROM
(SELECT sequence, payload, row_number() OVER (ORDER BY n) AS row FROM got WHERE consumer = 'ranges') g;
SELECT "cursor", late_ranges, delivered, dead_lettered FROM progress WHERE consumer = 'ranges';

DROP SCHEMA obix_available CASCADE;
SELECT count(*) FROM obix.consumer_late;
