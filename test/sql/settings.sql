--
-- Settings of a session that change how numbers, times and names are printed and
-- understood make no difference, for the session nor for what others find
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_settings;
CREATE ROLE regress_obix_settings;
GRANT USAGE, CREATE ON SCHEMA obix_settings TO regress_obix_settings;
SET search_path = obix_settings, public;
SET ROLE regress_obix_settings;

-- a zone half an hour off, with daylight saving, and days before months
SET timezone = 'America/St_Johns';
SET datestyle = 'SQL, DMY';
SET intervalstyle = 'sql_standard';
SET extra_float_digits = -15;
SET bytea_output = 'escape';
SET xmlbinary = 'hex';
SET quote_all_identifiers = on;
SET backslash_quote = off;
SET transform_null_equals = on;
SET check_function_bodies = off;
SET enable_indexscan = off;
SET enable_bitmapscan = off;
SET jit = on;
SET jit_above_cost = 0;
SET plan_cache_mode = force_generic_plan;
SELECT set_config(name, 'on', false) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SET constraint_exclusion = off;
SET enable_partition_pruning = off;
SET row_security = off;
SET array_nulls = off;

SELECT obix.create_outbox('"Or''d\ers %s"', 10, 1) IS NOT NULL AS created;
SELECT count(obix.publish('"Or''d\ers %s"', to_jsonb(n), key => 'k' || n % 2)) FROM generate_series(1, 15) n;
BEGIN;
SELECT obix.create_outbox('strays', 10, 0);
INSERT INTO strays (payload) SELECT to_jsonb(n) FROM generate_series(1, 34) n;
SELECT obix.recover_default('strays');
SELECT obix.alter_outbox('strays', premake => 2);
SELECT obix.ensure_partitions('strays') >= 2 AS ensured;
SELECT from_sequence, to_sequence FROM obix.partitions('strays') WHERE to_sequence <= 40 ORDER BY from_sequence;
COMMIT;
BEGIN;
INSERT INTO "Or'd\ers %s" (payload) VALUES ('"gone"');
ROLLBACK;
SELECT obix.fill_gaps('"Or''d\ers %s"') >= 0 AS filled;
SELECT count(*), max(sequence), count(payload), bool_and(payload IS NULL OR payload::bigint = sequence) AS right_order FROM obix.read('"Or''d\ers %s"');
SELECT count(*), max(sequence), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('strays');

-- consumers: definitions, delays and leases are times on the clock
CREATE FUNCTION handle(obix.event) RETURNS void LANGUAGE sql AS '';
SELECT obix.create_consumer('it''s "odd" \ %', '"Or''d\ers %s"', types => NULL, timeout => '0:01:30', max_attempts => 3,
                            backoff => '0 12:00:00', max_backoff => '1 12:00:00', on_failure => 'dead_letter', hold_key => true);
SELECT obix.fail('it''s "odd" \ %', 1, 'it''s \ "bad" %s');
SELECT attempts, attempt_sequence, last_error, retry_at - clock_timestamp() BETWEEN '0 05:59:00' AND '0 12:00:00' AS delayed
FROM obix.consumer_status WHERE consumer = 'it''s "odd" \ %';
SELECT obix.acquire('it''s "odd" \ %', '1 00:00:00');
SELECT lease_until - clock_timestamp() BETWEEN '0 23:59:00' AND '1 00:00:00' AS leased FROM obix.consumer_status WHERE consumer = 'it''s "odd" \ %';
-- in another zone they are as far away: intervals are so many milliseconds
SET timezone = 'UTC';
SET datestyle = 'ISO, MDY';
SELECT retry_at - clock_timestamp() BETWEEN '5:59:00' AND '12:00:00' AS delayed,
       lease_until - clock_timestamp() BETWEEN '23:59:00' AND '24:00:00' AS leased FROM obix.consumer_status WHERE consumer = 'it''s "odd" \ %';
SET timezone = 'America/St_Johns';
SET datestyle = 'SQL, DMY';
SELECT obix.release('it''s "odd" \ %', 1);
SELECT obix.resume('it''s "odd" \ %');
SELECT obix.alter_consumer('it''s "odd" \ %', types => NULL, max_attempts => 1, max_backoff => '0:00:02', search_path => 'obix_settings, pg_catalog');
SELECT sequence, key FROM obix.fetch('it''s "odd" \ %', 3) ORDER BY sequence;
SELECT obix.fail('it''s "odd" \ %', 1, 'it''s \ "bad" %s');
SELECT sequence, key FROM obix.fetch('it''s "odd" \ %', 3) ORDER BY sequence;
SELECT sequence, state, error FROM obix.dead_letter ORDER BY sequence;
SELECT obix.ack('it''s "odd" \ %', 6);
SELECT obix.requeue('it''s "odd" \ %', 1);
SELECT sequence, key FROM obix.fetch('it''s "odd" \ %', 3) ORDER BY sequence;
SELECT consumer, state, "cursor", dead_lettered FROM obix.consumer_status;
CALL obix.wait_for('it''s "odd" \ %', '0:00:10');
CALL obix.wait('strays', 33, '0:00:10');
SELECT obix.create_consumer('handled', 'strays', 34, handler => 'handle');
SELECT handler, search_path FROM obix.consumer WHERE consumer = 'handled';

-- seen by others it is all the same
RESET ALL;
SET client_min_messages = warning;
SET search_path = obix_settings, public;
SELECT consumer, timeout, max_attempts, backoff, max_backoff, types FROM obix.consumer ORDER BY consumer;
SELECT outbox, partition_width, premake FROM obix.outbox ORDER BY outbox::text;
SELECT sequence, payload FROM obix.read('strays', after => 32) ORDER BY sequence;
SELECT obix.drop_outbox('strays', force => true);
DROP TABLE "Or'd\ers %s";
SELECT count(*) FROM obix.consumer;
RESET ROLE;
DROP SCHEMA obix_settings CASCADE;
DROP ROLE regress_obix_settings;
