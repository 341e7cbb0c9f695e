--
-- Consuming from outside: fetch, acknowledge, fail, dead letters, leases
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_fetch;
SET search_path = obix_fetch, public;
CREATE VIEW progress AS
SELECT consumer, state, "cursor", lag_events, attempts, attempt_sequence, delivered, failed, dead_lettered, late_ranges, last_error
FROM obix.consumer_status;
CREATE VIEW dead AS
SELECT consumer, sequence, type, key, payload, headers, state, attempts, error FROM obix.dead_letter;
-- change what is known of a consumer behind its back
CREATE PROCEDURE tamper(consumer text, settings text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('UPDATE obix.consumer_state SET %s WHERE id = (SELECT id FROM obix.consumer c WHERE c.consumer = $1)', settings)
    USING consumer;
END $$;
-- messages without times and ids
CREATE PROCEDURE try(command text) LANGUAGE plpgsql AS $$
DECLARE
    message text;
    detail text;
    hint text;
BEGIN
    EXECUTE command;
    RAISE WARNING 'no error';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RAISE WARNING '%: % % %', SQLSTATE, message, regexp_replace(detail, '\d{4}-\d\d-\d\d .*\.$', '(time).'), hint;
END $$;

-- nothing to fetch
SELECT obix.create_outbox('orders', 10, 2);
SELECT obix.create_consumer('mail', 'orders');
SELECT * FROM obix.fetch('mail');
SELECT * FROM progress;

-- the same until it is acknowledged
SELECT count(obix.publish('orders', to_jsonb(n), type => 't' || n % 2, key => 'k' || n, headers => jsonb_build_object('n', n)))
FROM generate_series(1, 5) n;
SELECT sequence, type, key, payload, headers FROM obix.fetch('mail') ORDER BY sequence;
SELECT count(*) AS different FROM (TABLE orders EXCEPT SELECT * FROM obix.fetch('mail')) d;
SELECT count(*) FROM obix.fetch('mail');
SELECT * FROM progress;

-- acknowledged it moves, forward only
SELECT obix.ack('mail', 2);
SELECT sequence FROM obix.fetch('mail') ORDER BY sequence;
SELECT obix.ack('mail', 1);
SELECT obix.ack('mail', 2);
SELECT obix.ack('mail', 0);
SELECT sequence FROM obix.fetch('mail') ORDER BY sequence;
SELECT * FROM progress;
SELECT c.last_event_at = o.recorded_at AS last_event FROM obix.consumer_status c, orders o WHERE o.sequence = 2;
SELECT c.lag BETWEEN '0' AND clock_timestamp() - o.recorded_at AS age_of_the_next FROM obix.consumer_status c, orders o WHERE o.sequence = 3;
-- never past what could be delivered
SELECT obix.ack('mail', 6);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', 9223372036854775807);
\echo :LAST_ERROR_SQLSTATE
SELECT "cursor" FROM progress;
-- what was not fetched, but could have been, can be acknowledged
SELECT obix.publish('orders', '6', type => 't0') IS NOT NULL AS published;
SELECT obix.ack('mail', 6);
SELECT * FROM obix.fetch('mail');
SELECT * FROM progress;

-- pages, across partitions, in order by themselves
SELECT count(obix.publish('orders', to_jsonb(n), type => 't' || n % 2)) FROM generate_series(7, 34) n;
SELECT sequence FROM obix.fetch('mail', 3) ORDER BY sequence;
SELECT sequence FROM obix.fetch('mail', max_events => 1) ORDER BY sequence;
SELECT count(*), min(sequence), max(sequence), bool_and(f.sequence = f.n + 6) AS ordered FROM obix.fetch('mail', 2147483647) WITH ORDINALITY
     AS f (sequence, id, type, key, payload, headers, recorded_at, n);
DO $$
DECLARE
    page int;
    seen bigint[];
    found bigint[];
BEGIN
    FOREACH page IN ARRAY ARRAY[1, 2, 3, 7, 10, 11, 50] LOOP
        seen := '{}';
        PERFORM obix.seek('mail', 6);
        LOOP
            SELECT array_agg(sequence) INTO found FROM obix.fetch('mail', page);
            EXIT WHEN found IS NULL;
            seen := seen || found;
            PERFORM obix.ack('mail', found[cardinality(found)]);
            COMMIT;
        END LOOP;
        IF seen IS DISTINCT FROM (SELECT array_agg(n::bigint) FROM generate_series(7, 34) n) THEN
            RAISE EXCEPTION 'pages of % gave %', page, seen;
        END IF;
    END LOOP;
END $$;
SELECT "cursor", lag_events, delivered FROM progress;
SELECT obix.seek('mail', 30);
SELECT sequence FROM obix.fetch('mail') LIMIT 1;
SELECT EXISTS (SELECT FROM obix.fetch('mail'));
SELECT (obix.fetch('mail', 2)).sequence;
SELECT obix.ack('mail', 34);

-- bytes bound a page too, but for one event
SELECT obix.create_outbox('sized', 10, 2);
SELECT obix.create_consumer('bytes', 'sized');
SELECT count(obix.publish('sized', to_jsonb(repeat('x', 10000)))) FROM generate_series(1, 4) n;
SELECT obix.publish('sized', (SELECT to_jsonb(string_agg(md5(n::text), '')) FROM generate_series(1, 30000) n)) IS NOT NULL AS published;
SELECT obix.publish('sized', '1') IS NOT NULL AS published;
SELECT sequence FROM obix.fetch('bytes', max_bytes => 35000) ORDER BY sequence;
SELECT sequence FROM obix.fetch('bytes', max_bytes => 1) ORDER BY sequence;
SELECT sequence FROM obix.fetch('bytes', 2, 35000) ORDER BY sequence;
SELECT obix.ack('bytes', 4);
SELECT sequence, length(payload::text) FROM obix.fetch('bytes', max_bytes => 35000) ORDER BY sequence;
SELECT obix.ack('bytes', 5);
SELECT sequence, length(payload::text) FROM obix.fetch('bytes', max_bytes => 35000) ORDER BY sequence;
SELECT count(*) FROM obix.fetch('bytes', max_bytes => 9223372036854775807);

-- arguments
SELECT * FROM obix.fetch(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('mail', NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('mail', max_bytes => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('mail', wait => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('mail', 0);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('mail', -1);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('mail', max_bytes => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack(NULL, 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', -1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail(NULL, 1, 'no');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('mail', NULL, 'no');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('mail', 1, NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('mail', -1, 'no');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire(NULL) IS NULL AS nothing, obix.renew('mail', NULL) IS NULL AS nothing, obix.release('mail', NULL) IS NULL AS nothing,
       obix.requeue('mail', NULL) IS NULL AS nothing, obix.discard(NULL, 1) IS NULL AS nothing;

-- those with handlers are not fetched for
CREATE FUNCTION handle(obix.event) RETURNS void LANGUAGE sql AS '';
SELECT obix.create_consumer('handled', 'orders', 34, handler => 'handle');
SELECT * FROM obix.fetch('handled');
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY terse
SELECT obix.ack('handled', 34);
SELECT obix.fail('handled', 34, 'no');
SELECT obix.acquire('handled');
SELECT obix.renew('handled', 1);
SELECT obix.release('handled', 1);
CALL obix.wait_for('handled', '1 h');
\set VERBOSITY default
SELECT obix.drop_consumer('handled');

--
-- What is not for the consumer
--
SELECT obix.create_outbox('mixed', 100000, 1);
SELECT obix.create_consumer('rare', 'mixed', types => '{rare,"two words"}');
SELECT count(obix.publish('mixed', to_jsonb(n), type => t)) FROM (VALUES (1, 'common'), (2, 'rare'), (3, NULL), (4, 'Rare'), (5, ''), (6, 'two words')) v (n, t);
SELECT sequence, type FROM obix.fetch('rare') ORDER BY sequence;
SELECT sequence, type FROM obix.fetch('rare', 1) ORDER BY sequence;
SELECT obix.ack('rare', 4);
SELECT "cursor", lag_events, delivered FROM progress WHERE consumer = 'rare';
SELECT sequence, type FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.ack('rare', 6);
-- placeholders are for nobody
BEGIN;
INSERT INTO mixed (type, payload) SELECT 'rare', to_jsonb(n) FROM generate_series(7, 9) n;
ROLLBACK;
INSERT INTO mixed (type, payload) VALUES ('rare', '10');
SELECT obix.fill_gaps('mixed') >= 0 AS filled;
SELECT sequence, type, payload FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.create_consumer('all', 'mixed');
SELECT sequence, payload FROM obix.fetch('all') ORDER BY sequence;
SELECT obix.ack('all', 8);
SELECT sequence, payload FROM obix.fetch('all') ORDER BY sequence;
SELECT obix.ack('all', 10);
SELECT obix.ack('rare', 10);
SELECT consumer, "cursor", lag_events, delivered FROM progress WHERE consumer IN ('rare', 'all') ORDER BY consumer;
-- nothing but placeholders: no lag
BEGIN;
INSERT INTO mixed (payload) VALUES ('11');
ROLLBACK;
SELECT obix.fill_gaps('mixed') >= 0 AS filled;
SELECT * FROM obix.fetch('all');
SELECT "cursor", lag_events, lag FROM obix.consumer_status WHERE consumer = 'all';
-- a few are looked at again, and nothing is written
SELECT count(obix.publish('mixed', to_jsonb(n), type => 'common')) FROM generate_series(12, 900) n;
BEGIN;
SELECT * FROM obix.fetch('rare');
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
COMMIT;
SELECT position, scanned FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'rare';
SELECT "cursor", lag_events, lag FROM obix.consumer_status WHERE consumer = 'rare';
-- many only once: how far was looked is kept
SELECT count(obix.publish('mixed', to_jsonb(n), type => 'common')) FROM generate_series(901, 3000) n;
SELECT * FROM obix.fetch('rare');
SELECT position, scanned FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'rare';
SELECT "cursor", lag_events, lag FROM obix.consumer_status WHERE consumer = 'rare';
BEGIN;
SELECT * FROM obix.fetch('rare');
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
COMMIT;
-- also before an event
SELECT count(obix.publish('mixed', to_jsonb(n), type => 'common')) FROM generate_series(3001, 5000) n;
SELECT obix.publish('mixed', '5001', type => 'rare') IS NOT NULL AS published;
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
SELECT position, scanned FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'rare';
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.ack('rare', 4000);
SELECT "cursor", lag_events, delivered FROM progress WHERE consumer = 'rare';
SELECT obix.ack('rare', 5001);
SELECT "cursor", lag_events, delivered FROM progress WHERE consumer = 'rare';
-- rolled back, it is looked for again
SELECT count(obix.publish('mixed', to_jsonb(n), type => 'common')) FROM generate_series(5002, 7000) n;
SELECT obix.publish('mixed', '7001', type => 'rare') IS NOT NULL AS published;
BEGIN;
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.ack('rare', 7001);
SELECT * FROM obix.fetch('rare');
ROLLBACK;
SELECT position, scanned FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'rare';
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
-- a change of types holds for what comes, and is not mixed up with what was found before
SELECT obix.ack('rare', 7001);
SELECT count(obix.publish('mixed', to_jsonb(n), type => t)) FROM (VALUES (7002, 'common'), (7003, 'rare')) v (n, t);
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
BEGIN;
SELECT obix.alter_consumer('rare', types => '{common}');
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
ROLLBACK;
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.alter_consumer('rare', types => '{common}');
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.alter_consumer('rare', clear => '{types}');
SELECT sequence FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.ack('rare', 7003);
SELECT "cursor", lag_events, delivered FROM progress WHERE consumer = 'rare';

-- one's own events, before they are committed
BEGIN;
INSERT INTO mixed (type, payload) VALUES ('rare', '"own"');
SELECT sequence, payload FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.publish('mixed', '"not yet"') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.fetch('rare') ORDER BY sequence;
SELECT obix.ack('rare', 7005);
ROLLBACK;
SELECT obix.fill_gaps('mixed') >= 0 AS filled;
SELECT sequence, payload FROM obix.fetch('rare') ORDER BY sequence;
BEGIN;
INSERT INTO mixed (type, payload) VALUES ('rare', '"own"') RETURNING sequence AS own \gset
SELECT obix.ack('rare', :own);
COMMIT;
SELECT "cursor" = :own AS at_own, lag_events, delivered FROM progress WHERE consumer = 'rare';

--
-- Positions that cannot be
--
-- beyond the head: after a restore or a failover
CALL tamper('mail', 'position = 1000, scanned = 1000');
SELECT * FROM obix.fetch('mail');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', 35);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('mail', 1001);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('mail', 35, 'no');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('mail', '0');
SELECT state, "cursor", lag_events, lag FROM obix.consumer_status WHERE consumer = 'mail';
SELECT obix.seek('mail', 34);
SELECT * FROM obix.fetch('mail');
SELECT obix.publish('orders', '35') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.fetch('mail') ORDER BY sequence;

-- below the oldest kept event
SELECT obix.create_outbox('kept', 10, 2);
SELECT obix.create_consumer('slow', 'kept');
SELECT count(obix.publish('kept', to_jsonb(n), type => 't')) FROM generate_series(1, 25) n;
SELECT sequence FROM obix.fetch('slow', 3) ORDER BY sequence;
SELECT obix.ack('slow', 3);
DROP TABLE kept_p0;
SELECT * FROM obix.fetch('slow');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('slow', 12);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('slow', 12, 'no');
\echo :LAST_ERROR_SQLSTATE
SELECT "cursor" FROM progress WHERE consumer = 'slow';
SELECT obix.seek('slow', NULL);
SELECT sequence FROM obix.fetch('slow', 3) ORDER BY sequence;
SELECT obix.ack('slow', 10);
-- what lies in hand is given first
DROP TABLE kept_p20;
SELECT count(*), min(sequence), max(sequence) FROM obix.fetch('slow');
SELECT obix.ack('slow', 19);
SELECT obix.publish('kept', '26') IS NOT NULL AS published;
SELECT * FROM obix.fetch('slow');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('slow', NULL);
SELECT "cursor" FROM progress WHERE consumer = 'slow';
SELECT obix.seek('slow', 25);
SELECT sequence FROM obix.fetch('slow') ORDER BY sequence;
-- all of them
TRUNCATE kept;
SELECT * FROM obix.fetch('slow');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('slow', NULL);
SELECT * FROM obix.fetch('slow');
SELECT obix.publish('kept', '27') IS NOT NULL AS published;
SELECT sequence FROM obix.fetch('slow') ORDER BY sequence;
-- up to date when it happens, a consumer does not notice
SELECT obix.ack('slow', 27);
TRUNCATE kept;
SELECT * FROM obix.fetch('slow');
SELECT obix.publish('kept', '28') IS NOT NULL AS published;
SELECT sequence FROM obix.fetch('slow') ORDER BY sequence;

--
-- Failing
--
SELECT obix.create_outbox('jobs', 1000, 1);
SELECT count(obix.publish('jobs', to_jsonb(n), type => 't' || n % 2, key => 'k' || n % 2)) FROM generate_series(1, 6) n;
SELECT obix.create_consumer('worker', 'jobs', max_attempts => 3, backoff => '1 h', max_backoff => '3 h');
-- of the next event only
SELECT obix.fail('worker', 2, 'not the next');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('worker', 7, 'not there');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('worker', 0, 'before the first');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('worker', 2);
SELECT obix.fail('worker', 2, 'acknowledged');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM progress WHERE consumer = 'worker';
-- it waits
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
SELECT obix.fail('worker', 3, 'first failure');
SELECT * FROM progress WHERE consumer = 'worker';
SELECT retry_at - clock_timestamp() BETWEEN '29 min' AND '1 h' AS retry_in_time FROM obix.consumer_status WHERE consumer = 'worker';
SELECT * FROM obix.fetch('worker');
-- until it is resumed: that gives it all its attempts
SELECT obix.resume('worker');
SELECT * FROM progress WHERE consumer = 'worker';
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
-- delays double, up to a maximum
DO $$
DECLARE
    delay interval;
BEGIN
    FOR i IN 1 .. 2 LOOP
        PERFORM obix.fail('worker', 3, 'failure ' || i);
        SELECT retry_at - attempted_at INTO delay FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'worker';
        IF delay NOT BETWEEN i * interval '30 min' AND i * interval '1 h' THEN
            RAISE EXCEPTION 'failure % is tried again after %', i, delay;
        END IF;
    END LOOP;
END $$;
SELECT * FROM progress WHERE consumer = 'worker';
-- the last attempt stops it
SELECT obix.fail('worker', 3, 'last failure');
SELECT * FROM progress WHERE consumer = 'worker';
SELECT * FROM obix.fetch('worker');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('worker', '1 h');
SELECT obix.resume('worker');
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
-- acknowledged, it is forgotten
SELECT obix.fail('worker', 3, 'once more');
SELECT obix.ack('worker', 3);
SELECT * FROM progress WHERE consumer = 'worker';
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
-- also by what comes after it; counts are per event
SELECT obix.fail('worker', 4, 'fourth');
SELECT obix.fail('worker', 4, 'fourth again');
SELECT attempts, attempt_sequence FROM progress WHERE consumer = 'worker';
SELECT obix.ack('worker', 4);
SELECT obix.fail('worker', 5, 'fifth');
SELECT attempts, attempt_sequence FROM progress WHERE consumer = 'worker';
SELECT obix.ack('worker', 6);
SELECT * FROM progress WHERE consumer = 'worker';
-- stopped, acknowledging takes it on as well
SELECT obix.alter_consumer('worker', max_attempts => 1);
SELECT obix.seek('worker', 0);
SELECT obix.fail('worker', 1, 'stop');
SELECT state FROM progress WHERE consumer = 'worker';
SELECT obix.ack('worker', 1);
SELECT state, "cursor", attempts FROM progress WHERE consumer = 'worker';
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
-- paused, nothing is fetched, but what was fetched can be answered
SELECT obix.seek('worker', 0);
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
SELECT obix.pause('worker');
SELECT * FROM obix.fetch('worker');
SELECT obix.ack('worker', 1);
SELECT obix.fail('worker', 2, 'while paused');
SELECT state, "cursor" FROM progress WHERE consumer = 'worker';
SELECT obix.resume('worker');
SELECT state, "cursor" FROM progress WHERE consumer = 'worker';
SELECT sequence FROM obix.fetch('worker', 2) ORDER BY sequence;
-- messages of any length, cut at a character
SELECT obix.fail('worker', 2, repeat('ä', 1000));
SELECT octet_length(last_error), last_error = repeat('ä', length(last_error)) AS whole FROM progress WHERE consumer = 'worker';
SELECT obix.resume('worker');
SELECT obix.fail('worker', 2, '');
SELECT state, last_error FROM progress WHERE consumer = 'worker';
-- of an event that is for it: neither of another type, nor a placeholder
SELECT obix.create_consumer('picky', 'jobs', types => '{t0}');
SELECT obix.fail('picky', 1, 'other type');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('picky', 2, 'next for it');
SELECT attempts, attempt_sequence FROM progress WHERE consumer = 'picky';

-- backoff, at its bounds: never in the past, never beyond the maximum
CREATE PROCEDURE fail_often(consumer text, times int, max_backoff interval) LANGUAGE plpgsql AS $$
DECLARE
    s record;
    longest interval := '0';
BEGIN
    FOR i IN 1 .. times LOOP
        PERFORM obix.fail(consumer, 1, 'failure ' || i);
        SELECT attempts, attempted_at, retry_at INTO STRICT s FROM obix.consumer_state s JOIN obix.consumer c USING (id)
        WHERE c.consumer = fail_often.consumer;
        longest := greatest(longest, s.retry_at - s.attempted_at);
        IF s.attempts <> i OR s.retry_at <= s.attempted_at OR s.retry_at > s.attempted_at + max_backoff
           OR s.attempted_at NOT BETWEEN now() AND clock_timestamp() THEN
            RAISE EXCEPTION 'attempt %: %', i, s;
        END IF;
    END LOOP;
    IF longest < max_backoff / 2 THEN
        RAISE EXCEPTION 'the longest delay was %', longest;
    END IF;
END $$;
SELECT obix.create_consumer('quick', 'jobs', max_attempts => NULL, backoff => '1 ms', max_backoff => '1 ms');
SELECT obix.create_consumer('growing', 'jobs', max_attempts => NULL, backoff => '1 ms', max_backoff => '100 years');
SELECT obix.create_consumer('yearly', 'jobs', max_attempts => NULL, backoff => '1 year', max_backoff => '2 s');
SELECT obix.create_consumer('longest', 'jobs', max_attempts => NULL, backoff => '100 years', max_backoff => '100 years');
CALL fail_often('quick', 100, '1 ms');
CALL fail_often('growing', 100, '36500 days');
CALL fail_often('yearly', 100, '2 s');
CALL fail_often('longest', 100, '36500 days');
-- 10,000 times
SELECT obix.resume('yearly');
CALL fail_often('yearly', 10000, '2 s');
SELECT consumer, state, attempts, attempt_sequence, failed, last_error FROM progress
WHERE consumer IN ('quick', 'growing', 'yearly', 'longest') ORDER BY consumer;
-- there is an end to counting
CALL tamper('quick', 'attempts = 2147483647');
SELECT obix.fail('quick', 1, 'one too many');
SELECT state, attempts FROM progress WHERE consumer = 'quick';
-- after the delay it is there again
CALL obix.wait_for('quick', '1 h');
SELECT sequence FROM obix.fetch('quick', 2) ORDER BY sequence;
-- the clock was moved back: it is tried at once, and from then on the new clock counts
CALL tamper('yearly', $$attempted_at = clock_timestamp() + interval '1 h', retry_at = clock_timestamp() + interval '2 h'$$);
SELECT sequence FROM obix.fetch('yearly', 2) ORDER BY sequence;
CALL obix.wait_for('yearly', '1 h');
SELECT obix.alter_consumer('yearly', max_backoff => '1 h');
SELECT obix.fail('yearly', 1, 'after the change');
SELECT sequence FROM obix.fetch('yearly', 2) ORDER BY sequence;
SELECT retry_at - clock_timestamp() BETWEEN '29 min' AND '1 h' AS retry_in_time FROM obix.consumer_status WHERE consumer = 'yearly';
-- moved forward: no longer than until then
CALL tamper('yearly', $$attempted_at = clock_timestamp() - interval '2 h', retry_at = clock_timestamp() - interval '1 h'$$);
SELECT sequence FROM obix.fetch('yearly', 2) ORDER BY sequence;
SELECT obix.drop_consumer(c) FROM (VALUES ('worker'), ('picky'), ('quick'), ('growing'), ('yearly'), ('longest')) v (c);

--
-- Dead letters
--
SELECT obix.create_consumer('parker', 'jobs', max_attempts => 2, backoff => '1 h', on_failure => 'dead_letter');
SELECT sequence FROM obix.fetch('parker', 3) ORDER BY sequence;
SELECT obix.fail('parker', 1, 'first');
SELECT * FROM dead;
SELECT * FROM obix.fetch('parker');
SELECT obix.fail('parker', 1, 'second');
SELECT * FROM dead;
SELECT e.id = d.id AND e.recorded_at = d.recorded_at AS same, d.parked_at BETWEEN now() - interval '1 min' AND now() AS parked
FROM obix.dead_letter d JOIN jobs e USING (sequence);
SELECT * FROM progress WHERE consumer = 'parker';
-- the next without a delay
SELECT sequence FROM obix.fetch('parker', 3) ORDER BY sequence;
SELECT obix.fail('parker', 1, 'it is dead');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('parker', 3);
SELECT * FROM progress WHERE consumer = 'parker';
-- the rest of an error that was cut elsewhere
SELECT obix.alter_consumer('parker', max_attempts => 1);
SELECT obix.fail('parker', 4, repeat('long ', 1000));
SELECT sequence, length(error) FROM dead ORDER BY sequence;
SELECT octet_length(last_error) FROM progress WHERE consumer = 'parker';
-- it outlives its event
DELETE FROM jobs WHERE sequence = 4;
\echo :LAST_ERROR_SQLSTATE
-- requeue: before any other, with all attempts
SELECT obix.requeue('parker', 2);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.requeue('parker', 1);
SELECT sequence, state, attempts FROM dead ORDER BY sequence;
SELECT state, "cursor", attempts, late_ranges FROM progress WHERE consumer = 'parker';
SELECT sequence, type, key, payload FROM obix.fetch('parker') ORDER BY sequence;
SELECT obix.requeue('parker', 1);
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
-- it can fail again
SELECT obix.alter_consumer('parker', max_attempts => 2);
SELECT obix.fail('parker', 1, 'again');
SELECT * FROM obix.fetch('parker');
SELECT sequence, state, attempts, left(error, 20) AS error FROM dead ORDER BY sequence;
SELECT state, attempts, attempt_sequence FROM progress WHERE consumer = 'parker';
SELECT obix.fail('parker', 1, 'and again');
SELECT sequence, state, attempts, left(error, 10) AS error FROM dead ORDER BY sequence;
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
-- acknowledged it is gone, and counts as dealt with
SELECT obix.requeue('parker', 1);
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
SELECT obix.ack('parker', 1);
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT * FROM progress WHERE consumer = 'parker';
SELECT obix.ack('parker', 1);
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
-- fetched before, and acknowledged after: only what was handed out
SELECT obix.ack('parker', 6);
SELECT obix.requeue('parker', 4);
SELECT obix.ack('parker', 6);
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
-- discarded it is gone
SELECT obix.discard('parker', 4);
SELECT count(*) FROM dead;
SELECT * FROM obix.fetch('parker');
SELECT obix.discard('parker', 4);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.requeue('parker', 4);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.discard('parker', -1);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM progress WHERE consumer = 'parker';
SELECT count(*) FROM obix.consumer_late;
SELECT count(*) FROM obix.parked_event;
-- several, requeued in any order, come in theirs
SELECT obix.seek('parker', 0);
SELECT obix.alter_consumer('parker', max_attempts => 1);
SELECT obix.fail('parker', n, 'number ' || n) FROM generate_series(1, 5) n;
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT obix.requeue('parker', n) FROM (VALUES (4), (1), (3)) v (n);
SELECT f.sequence FROM obix.fetch('parker') WITH ORDINALITY AS f (sequence, id, type, key, payload, headers, recorded_at, n) ORDER BY n;
SELECT sequence FROM obix.fetch('parker', 2) ORDER BY sequence;
SELECT obix.ack('parker', 1);
SELECT obix.fail('parker', 3, 'once more');
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
SELECT sequence, state, error FROM dead ORDER BY sequence;
SELECT obix.ack('parker', 4);
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
-- also when the event itself has gone meanwhile
SELECT obix.ack('parker', 6);
TRUNCATE jobs;
SELECT obix.requeue('parker', 5);
SELECT sequence, payload FROM obix.fetch('parker') ORDER BY sequence;
SELECT obix.fail('parker', 5, 'too late');
SELECT sequence, state, error FROM dead ORDER BY sequence;
-- seek: those that lie ahead are met again, those behind stay
SELECT count(obix.publish('jobs', to_jsonb(n))) FROM generate_series(7, 9) n;
SELECT obix.fail('parker', n, 'number ' || n) FROM generate_series(7, 8) n;
SELECT obix.seek('parker', 7);
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
SELECT obix.requeue('parker', 7);
SELECT obix.seek('parker', 6);
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT sequence FROM obix.fetch('parker') ORDER BY sequence;
-- a consumer takes its dead letters with it
SELECT obix.drop_consumer('parker');
SELECT count(*) FROM dead;
SELECT count(*) FROM obix.parked_event;
SELECT obix.create_consumer('parker', 'jobs', 6);
SELECT count(*) FROM dead;
SELECT obix.drop_consumer('parker');

--
-- hold_key: the order of each key survives a dead letter
--
SELECT obix.create_outbox('keyed', 1000, 1);
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => nullif(k, '-')))
FROM unnest('{a,a,b,-,a,b,-,a}'::text[]) WITH ORDINALITY v (k, n);
SELECT sequence, key FROM keyed ORDER BY sequence;
SELECT obix.create_consumer('holder', 'keyed', max_attempts => 1, on_failure => 'dead_letter', hold_key => true);
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.fail('holder', 1, 'bad a');
SELECT sequence, key FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, key, state, attempts, error FROM dead ORDER BY sequence;
SELECT * FROM progress WHERE consumer = 'holder';
SELECT sequence, key FROM obix.fetch('holder') ORDER BY sequence;
-- without a key nothing is held
SELECT obix.ack('holder', 3);
SELECT obix.fail('holder', 4, 'bad one without a key');
SELECT sequence, key FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 8);
SELECT * FROM progress WHERE consumer = 'holder';
-- later ones are held too
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => k)) FROM (VALUES ('a', 9), ('b', 10)) v (k, n);
SELECT sequence, key FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 10);
SELECT sequence, key, state FROM dead ORDER BY sequence;
-- one that is held is not requeued by itself
SELECT obix.requeue('holder', 5);
\echo :LAST_ERROR_SQLSTATE
-- but can be discarded
SELECT obix.discard('holder', 5);
SELECT sequence, key, state FROM dead ORDER BY sequence;
-- requeued, those behind it follow, in order and before what is new
SELECT obix.publish('keyed', '"a11"', key => 'a') IS NOT NULL AS published;
SELECT obix.requeue('holder', 1);
SELECT sequence, key, state FROM dead ORDER BY sequence;
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
-- failed again, they are held again
SELECT obix.fail('holder', 1, 'still bad');
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, key, state, error FROM dead ORDER BY sequence;
-- dealt with, they follow
SELECT obix.requeue('holder', 1);
SELECT sequence, payload FROM obix.fetch('holder', 2) ORDER BY sequence;
SELECT obix.ack('holder', 1);
SELECT sequence, payload FROM obix.fetch('holder', 2) ORDER BY sequence;
-- the next of the same key fails: what is behind it is held, what is before it is not
SELECT obix.fail('holder', 2, 'bad too');
SELECT * FROM obix.fetch('holder');
SELECT sequence, key, state, error FROM dead ORDER BY sequence;
-- discarded: those behind it follow as well
SELECT obix.discard('holder', 2);
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 9);
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 11);
SELECT sequence, key, state FROM dead ORDER BY sequence;
SELECT * FROM progress WHERE consumer = 'holder';
-- released before its followers were met: they are met in their place
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => k)) FROM (VALUES ('a', 12), ('a', 13), ('b', 14)) v (k, n);
SELECT obix.fail('holder', 12, 'bad');
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT obix.requeue('holder', 12);
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 12);
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 14);
-- discarded while it lies ahead: passed over
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => k)) FROM (VALUES ('a', 15), ('a', 16), ('b', 17)) v (k, n);
SELECT obix.fail('holder', 15, 'bad');
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.discard('holder', 16);
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT obix.discard('holder', 15);
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 17);
SELECT count(*) FROM dead WHERE sequence > 4;
SELECT count(*) AS remembered FROM obix.parked_event WHERE state = 'discarded';
-- rolled back, nothing has happened
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => k)) FROM (VALUES ('a', 18), ('a', 19), ('b', 20)) v (k, n);
BEGIN;
SELECT obix.fail('holder', 18, 'bad');
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 20);
ROLLBACK;
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.fail('holder', 18, 'bad');
BEGIN;
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, state FROM dead WHERE sequence > 4 ORDER BY sequence;
ROLLBACK;
SELECT sequence, state FROM dead WHERE sequence > 4 ORDER BY sequence;
SELECT sequence, payload FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, state FROM dead WHERE sequence > 4 ORDER BY sequence;
SELECT obix.ack('holder', 20);
-- two of one key have failed, which were fetched together: each can be requeued, the followers wait for both
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => k)) FROM (VALUES ('c', 21), ('c', 22), ('c', 23), ('d', 24)) v (k, n);
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.fail('holder', 21, 'bad');
SELECT obix.fail('holder', 22, 'bad');
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 24);
SELECT sequence, state FROM dead WHERE key = 'c' ORDER BY sequence;
SELECT obix.requeue('holder', 21);
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, state FROM dead WHERE key = 'c' ORDER BY sequence;
SELECT obix.ack('holder', 21);
SELECT obix.requeue('holder', 22);
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 23);
SELECT sequence, state FROM dead WHERE key = 'c' ORDER BY sequence;
-- of what was requeued, nothing overtakes what does not fit
SELECT obix.publish('keyed', '"e25"', key => 'e') IS NOT NULL AS published;
SELECT obix.publish('keyed', to_jsonb(repeat('e26', 1000)), key => 'e') IS NOT NULL AS published;
SELECT obix.publish('keyed', '"e27"', key => 'e') IS NOT NULL AS published;
SELECT obix.publish('keyed', '"f28"', key => 'f') IS NOT NULL AS published;
SELECT obix.fail('holder', 25, 'bad');
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 28);
SELECT obix.requeue('holder', 25);
SELECT sequence FROM obix.fetch('holder', max_bytes => 1000) ORDER BY sequence;
SELECT obix.ack('holder', 25);
SELECT sequence FROM obix.fetch('holder', max_bytes => 1000) ORDER BY sequence;
SELECT obix.ack('holder', 26);
SELECT sequence FROM obix.fetch('holder', max_bytes => 1000) ORDER BY sequence;
SELECT obix.ack('holder', 27);
-- after a seek, those that were held and lie ahead are met again
SELECT count(obix.publish('keyed', to_jsonb(k || n), key => k)) FROM (VALUES ('g', 29), ('g', 30), ('h', 31)) v (k, n);
SELECT obix.fail('holder', 29, 'bad');
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.seek('holder', 29);
SELECT sequence, state FROM dead WHERE key = 'g' ORDER BY sequence;
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT sequence, state FROM dead WHERE key = 'g' ORDER BY sequence;
SELECT obix.ack('holder', 31);
SELECT obix.requeue('holder', 29);
SELECT sequence FROM obix.fetch('holder') ORDER BY sequence;
SELECT obix.ack('holder', 30);
-- everything of each key was delivered in its order, or is a dead letter that failed or was discarded
SELECT * FROM progress WHERE consumer = 'holder';
SELECT sequence, key, state FROM dead ORDER BY sequence;
SELECT obix.drop_consumer('holder');

--
-- Leases
--
SELECT obix.create_consumer('leased', 'keyed', 28);
SELECT obix.acquire('leased');
SELECT obix.acquire('leased');
SELECT lease_until - clock_timestamp() BETWEEN '20 s' AND '30 s' AS lease FROM obix.consumer_status WHERE consumer = 'leased';
SELECT sequence FROM obix.fetch('leased', 2, token => 1) ORDER BY sequence;
SELECT obix.ack('leased', 29, 1);
SELECT obix.fail('leased', 30, 'no', 1);
SELECT obix.resume('leased');
-- nobody without the token
CALL try($$SELECT * FROM obix.fetch('leased')$$);
CALL try($$SELECT obix.ack('leased', 30)$$);
CALL try($$SELECT obix.fail('leased', 30, 'no')$$);
CALL try($$SELECT * FROM obix.fetch('leased', token => 2)$$);
CALL try($$SELECT obix.ack('leased', 30, 0)$$);
CALL try($$SELECT obix.fail('leased', 30, 'no', -1)$$);
CALL try($$SELECT obix.renew('leased', 2)$$);
CALL try($$SELECT obix.release('leased', 2)$$);
SELECT "cursor", attempts FROM progress WHERE consumer = 'leased';
-- renewed, for longer or shorter
SELECT obix.renew('leased', 1, '1 h');
SELECT lease_until - clock_timestamp() BETWEEN '59 min' AND '1 h' AS lease FROM obix.consumer_status WHERE consumer = 'leased';
SELECT obix.renew('leased', 1);
SELECT lease_until - clock_timestamp() BETWEEN '20 s' AND '30 s' AS lease FROM obix.consumer_status WHERE consumer = 'leased';
-- those who administer need no token
SELECT obix.pause('leased');
SELECT * FROM obix.fetch('leased', token => 1);
SELECT obix.resume('leased');
SELECT obix.seek('leased', 28);
SELECT sequence FROM obix.fetch('leased', 2, token => 1) ORDER BY sequence;
SELECT lease_until IS NOT NULL AS leased FROM obix.consumer_status WHERE consumer = 'leased';
-- released
SELECT obix.release('leased', 1);
SELECT lease_until FROM obix.consumer_status WHERE consumer = 'leased';
SELECT * FROM obix.fetch('leased', token => 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.release('leased', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.renew('leased', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT sequence FROM obix.fetch('leased', 2) ORDER BY sequence;
-- another holder has another token; the first is refused
SELECT obix.acquire('leased', '1 h');
SELECT * FROM obix.fetch('leased', token => 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('leased', 29, 1);
\echo :LAST_ERROR_SQLSTATE
SELECT sequence FROM obix.fetch('leased', 2, token => 2) ORDER BY sequence;
-- ended: fenced off even if nobody else came, but it can be renewed then
CALL tamper('leased', $$lease_until = clock_timestamp() - interval '1 ms'$$);
SELECT * FROM obix.fetch('leased', token => 2);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('leased', 29, 2);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.renew('leased', 2);
SELECT obix.ack('leased', 29, 2);
CALL tamper('leased', $$lease_until = clock_timestamp() - interval '1 ms'$$);
SELECT sequence FROM obix.fetch('leased', 2) ORDER BY sequence;
SELECT obix.acquire('leased');
SELECT obix.renew('leased', 2);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.release('leased', 2);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.release('leased', 3);
-- rolled back, it was not acquired, and its token not given
BEGIN;
SELECT obix.acquire('leased');
SELECT sequence FROM obix.fetch('leased', 2, token => 4) ORDER BY sequence;
ROLLBACK;
SELECT * FROM obix.fetch('leased', token => 4);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire('leased');
SELECT obix.release('leased', 4);
-- bounds
SELECT obix.acquire('leased', '0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire('leased', '-1 s');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire('leased', '100 years');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire('leased', '60 years');
SELECT obix.renew('leased', 5, '0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_consumer('leased');
SELECT obix.create_consumer('leased', 'keyed', 28);
SELECT obix.acquire('leased');
-- nothing of it is kept in the session
DISCARD ALL;
SET client_min_messages = warning;
SET search_path = obix_fetch, public;
SELECT sequence FROM obix.fetch('leased', 2, token => 1) ORDER BY sequence;
DISCARD ALL;
SET client_min_messages = warning;
SET search_path = obix_fetch, public;
SELECT obix.ack('leased', 30, 1);
SELECT obix.drop_consumer('leased');

--
-- Transactions
--
SELECT obix.create_consumer('careful', 'keyed', 20, max_attempts => 2, on_failure => 'dead_letter');
-- rolled back, acknowledging has not happened
BEGIN;
SELECT sequence FROM obix.fetch('careful', 2) ORDER BY sequence;
SELECT obix.ack('careful', 22);
SELECT sequence FROM obix.fetch('careful', 2) ORDER BY sequence;
ROLLBACK;
SELECT sequence FROM obix.fetch('careful', 2) ORDER BY sequence;
-- to a savepoint
BEGIN;
SELECT obix.ack('careful', 21);
SAVEPOINT a;
SELECT obix.ack('careful', 22);
SELECT obix.fail('careful', 23, 'no');
SELECT obix.fail('careful', 23, 'no');
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT sequence FROM obix.fetch('careful', 1) ORDER BY sequence;
ROLLBACK TO a;
SELECT sequence, state FROM dead ORDER BY sequence;
SELECT sequence FROM obix.fetch('careful', 1) ORDER BY sequence;
SELECT obix.fail('careful', 22, 'no');
RELEASE a;
SAVEPOINT b;
SELECT obix.resume('careful');
ROLLBACK TO b;
COMMIT;
SELECT * FROM progress WHERE consumer = 'careful';
-- in a block that fails
DO $$
BEGIN
    PERFORM obix.fail('careful', 22, 'no');
    RAISE 'undo this';
EXCEPTION WHEN raise_exception THEN
    PERFORM obix.resume('careful');
END $$;
SELECT * FROM progress WHERE consumer = 'careful';
SELECT sequence FROM obix.fetch('careful', 2) ORDER BY sequence;
-- prepared
BEGIN;
SELECT obix.ack('careful', 22);
PREPARE TRANSACTION 'obix_careful';
SELECT * FROM obix.fetch('careful', 2);
SELECT "cursor" FROM progress WHERE consumer = 'careful';
COMMIT PREPARED 'obix_careful';
SELECT sequence FROM obix.fetch('careful', 2) ORDER BY sequence;
BEGIN;
SELECT obix.ack('careful', 23);
PREPARE TRANSACTION 'obix_careful';
ROLLBACK PREPARED 'obix_careful';
SELECT sequence FROM obix.fetch('careful', 2) ORDER BY sequence;
-- other isolation levels
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT sequence FROM obix.fetch('careful', 1) ORDER BY sequence;
SELECT obix.ack('careful', 23);
SELECT sequence FROM obix.fetch('careful', 1) ORDER BY sequence;
SELECT obix.fail('careful', 24, 'no');
SELECT obix.fail('careful', 24, 'no');
SELECT sequence FROM obix.fetch('careful', 1) ORDER BY sequence;
COMMIT;
SELECT sequence, state FROM dead ORDER BY sequence;
-- many consumers, turn by turn, in one transaction
SELECT obix.create_consumer('many' || n, 'keyed', 20) FROM generate_series(1, 5) n;
BEGIN;
SELECT obix.ack('many' || n % 5 + 1, 20 + n / 5) FROM generate_series(5, 24) n;
SAVEPOINT a;
SELECT obix.ack('many' || n % 5 + 1, 20 + n / 5) FROM generate_series(25, 49) n;
ROLLBACK TO a;
SELECT obix.ack('many' || n % 5 + 1, 20 + n / 5) FROM generate_series(25, 34) n;
COMMIT;
SELECT consumer, "cursor", delivered FROM progress WHERE consumer LIKE 'many%' ORDER BY consumer;

--
-- Acknowledging rewrites one narrow row, in its page
--
SELECT obix.create_outbox('quiet', 10000, 1);
SELECT count(obix.publish('quiet', to_jsonb(n))) FROM generate_series(1, 1000) n;
SELECT obix.create_consumer('narrow', 'quiet');
DO $$
DECLARE
    updated bigint := pg_stat_get_xact_tuples_updated('obix.consumer_state'::regclass);
    hot bigint := pg_stat_get_xact_tuples_hot_updated('obix.consumer_state'::regclass);
BEGIN
    FOR i IN 1 .. 1000 LOOP
        PERFORM obix.ack('narrow', i);
        COMMIT;
    END LOOP;
    -- these count until the session is idle
    updated := pg_stat_get_xact_tuples_updated('obix.consumer_state'::regclass) - updated;
    hot := pg_stat_get_xact_tuples_hot_updated('obix.consumer_state'::regclass) - hot;
    IF updated <> 1000 OR hot < 900 THEN
        RAISE EXCEPTION '% updates, % of them HOT', updated, hot;
    END IF;
END $$;
SELECT "cursor", delivered FROM progress WHERE consumer = 'narrow';
SELECT count(*) AS indexes FROM pg_index WHERE indrelid = 'obix.consumer_state'::regclass;
-- wherever it has been moved to
VACUUM FULL obix.consumer_state;
SELECT obix.publish('quiet', '1001') IS NOT NULL AS published;
SELECT sequence FROM obix.fetch('narrow') ORDER BY sequence;
SELECT obix.ack('narrow', 1001);
VACUUM obix.consumer_state;
SELECT obix.publish('quiet', '1002') IS NOT NULL AS published;
SELECT sequence FROM obix.fetch('narrow') ORDER BY sequence;
UPDATE obix.consumer_state SET delivered = delivered;
SELECT obix.ack('narrow', 1002);
SELECT "cursor", delivered FROM progress WHERE consumer = 'narrow';

--
-- wait_for
--
-- at once, where there is something to fetch
SELECT obix.publish('quiet', '1003') IS NOT NULL AS published;
CALL obix.wait_for('narrow', '1 h');
CALL obix.wait_for('narrow');
CALL obix.wait_for(consumer => 'narrow', timeout => '1 h')\; SELECT sequence FROM obix.fetch('narrow') ORDER BY sequence;
SELECT obix.ack('narrow', 1003);
-- after the timeout, where there is not
SELECT * FROM obix.fetch('narrow');
CALL obix.wait_for('narrow', '1 ms');
CALL obix.wait_for('narrow', '0');
SELECT clock_timestamp() AS before \gset
CALL obix.wait_for('narrow', '200 ms');
SELECT clock_timestamp() - :'before'::timestamptz >= '200 ms' AS waited;
-- paused, it is not for now; stopped, fetching says so; waiting for an attempt, it is when that is due
SELECT obix.publish('quiet', '1004') IS NOT NULL AS published;
SELECT obix.pause('narrow');
SELECT clock_timestamp() AS before \gset
CALL obix.wait_for('narrow', '100 ms');
SELECT clock_timestamp() - :'before'::timestamptz >= '100 ms' AS waited;
SELECT obix.resume('narrow');
CALL obix.wait_for('narrow', '1 h');
SELECT obix.alter_consumer('narrow', backoff => '100 ms', max_attempts => 2);
SELECT obix.fail('narrow', 1004, 'no');
SELECT retry_at FROM obix.consumer_status WHERE consumer = 'narrow' \gset
CALL obix.wait_for('narrow', '1 h');
SELECT clock_timestamp() >= :'retry_at'::timestamptz AS due;
SELECT sequence FROM obix.fetch('narrow') ORDER BY sequence;
SELECT obix.fail('narrow', 1004, 'no');
CALL obix.wait_for('narrow', '1 h');
SELECT obix.seek('narrow', 1003);
CALL obix.wait_for('narrow', '1 h');
-- in a transaction block, in a DO block, in a procedure
BEGIN;
CALL obix.wait_for('narrow', '1 h');
SELECT sequence FROM obix.fetch('narrow') ORDER BY sequence;
SELECT obix.ack('narrow', 1004);
SELECT * FROM obix.fetch('narrow');
CALL obix.wait_for('narrow', '1 ms');
COMMIT;
SELECT * FROM obix.fetch('narrow');
DO $$ BEGIN CALL obix.wait_for('narrow', '1 ms'); END $$;
-- not where a snapshot would be held
BEGIN ISOLATION LEVEL REPEATABLE READ;
CALL obix.wait_for('narrow', '1 h');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
CREATE FUNCTION waiting() RETURNS void LANGUAGE plpgsql AS $$ BEGIN CALL obix.wait_for('narrow', '1 h'); END $$;
SELECT waiting();
\echo :LAST_ERROR_SQLSTATE
SELECT obix.wait_for('narrow', '1 h');
\echo :LAST_ERROR_SQLSTATE
-- arguments
CALL obix.wait_for(NULL, '1 h');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('narrow', NULL);
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('narrow', '-1 s');
\echo :LAST_ERROR_SQLSTATE
SET statement_timeout = '50 ms';
CALL obix.wait_for('narrow', '1000000 years');
\echo :LAST_ERROR_SQLSTATE
RESET statement_timeout;

--
-- A dead letter is let go between a fetch and its acknowledgement: what it had
-- held back comes before what was fetched
--
SELECT obix.create_outbox('letgo', 100, 1);
SELECT obix.create_consumer('letgo', 'letgo', on_failure => 'dead_letter', hold_key => true, max_attempts => 1);
SELECT count(obix.publish('letgo', to_jsonb(g), key => CASE WHEN g IN (1, 3) THEN 'k' ELSE 'x' || g END)) FROM generate_series(1, 4) g;
SELECT sequence FROM obix.fetch('letgo');
SELECT obix.fail('letgo', 1, 'fails');
SELECT sequence FROM obix.fetch('letgo');
SELECT obix.requeue('letgo', 1);
SELECT obix.ack('letgo', 4);
SELECT sequence FROM obix.fetch('letgo');
SELECT obix.ack('letgo', 1);
SELECT sequence FROM obix.fetch('letgo');
SELECT obix.ack('letgo', 4);
SELECT * FROM progress WHERE consumer = 'letgo';

DROP SCHEMA obix_fetch CASCADE;
SELECT count(*) FROM obix.consumer;
SELECT count(*) FROM obix.consumer_late;
SELECT count(*) FROM obix.parked_event;
