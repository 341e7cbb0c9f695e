--
-- obix.health() and what the status views tell in one look
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_health;
SET search_path = obix_health, public;
CREATE VIEW findings AS SELECT * FROM obix.health() WHERE status <> 'ok' AND (object IS NULL OR object ~ '^(orders|mail|copies)');

-- a server in good order
SELECT "check", object, status, hint FROM obix.health();
SELECT loaded, library_version = extension_version AS same_version, launcher_pid > 0 AS launcher, workers <= max_workers AS workers, short_of_workers,
       refused_at, outboxes < max_outboxes AS outboxes, max_outboxes, consumers < max_consumers AS consumers, max_consumers, lacks_standby
FROM obix.server_status;

-- and an outbox
SELECT obix.create_outbox('orders', 1000, 2);
SELECT obix.create_consumer('mail', 'orders');
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 5) n;
SELECT "check", object, status, hint FROM obix.health(min_runway => '1 s') WHERE object IS NOT NULL;
SELECT state, problem, held_at, held_since, waiting_since, round(60 * rate) AS in_a_minute, runway_time > '1 h' AS lasts, placeholders, failing_since,
       worker_state IN ('idle', 'running', 'due') AS worker
FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT problem, reachable, dead_letters, lag_events, lag < '1 min' AS lag FROM obix.consumer_status WHERE consumer = 'mail';
SELECT * FROM obix.progress WHERE outbox = 'orders'::regclass;

-- the runway, by how long it lasts
SELECT runway_time * 2 AS twice, runway_time * 12 AS more FROM obix.outbox_status WHERE outbox = 'orders'::regclass \gset
SELECT status, regexp_replace(detail, 'for .* at', 'for ... at') AS detail, hint FROM obix.health(min_runway => :'twice') WHERE "check" = 'runway' AND object = 'orders';
SELECT status FROM obix.health(min_runway => :'more') WHERE "check" = 'runway' AND object = 'orders';

-- a transaction that holds up readers
BEGIN;
INSERT INTO orders (payload) VALUES ('6');
SELECT obix.publish('orders', '7') IS NOT NULL AS published;
SELECT state, held_at, held_since = now() AS since FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT status FROM obix.health() WHERE "check" = 'held_up' AND object = 'orders';
SELECT status, detail = format('readers have stopped before sequence 6 for session %s, in a transaction of %s', pg_backend_pid(), now()) AS detail, hint
FROM obix.health(max_age => '0') WHERE "check" = 'held_up' AND object = 'orders';
COMMIT;
SELECT state, held_at, held_since FROM obix.outbox_status WHERE outbox = 'orders'::regclass;

-- placeholders
SELECT placeholders AS before FROM obix.outbox_status WHERE outbox = 'orders'::regclass \gset
BEGIN;
INSERT INTO orders (payload) VALUES ('1'), ('2'), ('3');
ROLLBACK;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT placeholders - :before AS placeholders FROM obix.outbox_status WHERE outbox = 'orders'::regclass;

-- stranded rows, in a transaction that no worker sees
BEGIN;
SELECT obix.create_outbox('orders_short', 10, 1);
INSERT INTO orders_short (payload) SELECT to_jsonb(n) FROM generate_series(1, 25) n;
SELECT state FROM obix.outbox_status WHERE outbox = 'orders_short'::regclass;
SELECT "check", status, detail, hint FROM findings WHERE object = 'orders_short';
ROLLBACK;

-- an outbox that is not complete, and one with a partition that is no use
BEGIN;
ALTER TABLE orders DROP CONSTRAINT orders_pkey;
SELECT state, problem, head IS NOT NULL AS head FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT "check", status, detail, hint FROM findings WHERE object = 'orders';
ROLLBACK;
BEGIN;
ALTER TABLE orders DISABLE TRIGGER zz_obix_guard;
SELECT "check", status, detail, hint FROM findings WHERE object = 'orders';
ROLLBACK;
BEGIN;
UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'orders_p0_pkey'::regclass;
ALTER TABLE orders_p0 SET (fillfactor = 90);
SELECT state, problem FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT "check", status, detail, hint FROM findings WHERE object = 'orders';
SELECT "check", status, detail, hint FROM findings WHERE object = 'mail';
ROLLBACK;

-- consumers
SELECT obix.pause('mail');
SELECT "check", status, detail, hint FROM findings WHERE object = 'mail';
SELECT obix.resume('mail');
SELECT obix.alter_consumer('mail', max_attempts => 2, backoff => '1 h', max_backoff => '1 h');
SELECT count(*) FROM obix.fetch('mail', 1);
SELECT obix.fail('mail', 1, 'no such address');
SELECT "check", status, detail, hint FROM findings WHERE object = 'mail';
SELECT obix.resume('mail');
SELECT obix.alter_consumer('mail', max_attempts => 1);
SELECT count(*) FROM obix.fetch('mail', 1);
SELECT obix.fail('mail', 1, 'no such address');
SELECT "check", status, detail, hint FROM findings WHERE object = 'mail';
SELECT obix.resume('mail');
SELECT obix.alter_consumer('mail', on_failure => 'dead_letter');
SELECT count(*) FROM obix.fetch('mail', 1);
SELECT obix.fail('mail', 1, 'no such address');
SELECT dead_letters, dead_lettered FROM obix.consumer_status WHERE consumer = 'mail';
SELECT "check", status, detail, hint FROM findings WHERE object = 'mail';
SELECT obix.discard('mail', 1);
SELECT dead_letters, dead_lettered FROM obix.consumer_status WHERE consumer = 'mail';
SELECT "check", status, detail, hint FROM findings WHERE object = 'mail';

-- lag, with events that another server has recorded, and a sequence that it has
-- not sent yet
BEGIN;
SELECT obix.create_outbox('copies', 10000, 1);
SELECT obix.create_consumer('copies_mail', 'copies');
SET LOCAL session_replication_role = replica;
INSERT INTO copies (sequence, payload, recorded_at) SELECT n, '1', now() - interval '10 min' FROM generate_series(1, 1500) n;
COMMIT;
SELECT obix.fill_gaps('copies');
SELECT lag_events, date_trunc('minute', lag) AS lag FROM obix.consumer_status WHERE consumer = 'copies_mail';
SELECT "check", status, regexp_replace(detail, ':\d\d$', ':..') AS detail, hint FROM findings WHERE object = 'copies_mail';
SELECT status FROM obix.health(max_lag => '1 min') WHERE "check" = 'lag' AND object = 'copies_mail';
SELECT status FROM obix.health(max_lag => '1 h') WHERE "check" = 'lag' AND object = 'copies_mail';
SELECT pid, outbox, consumer, operation, phase, done, total, started_at FROM obix.progress WHERE outbox = 'copies'::regclass;
BEGIN;
SET LOCAL session_replication_role = replica;
INSERT INTO copies (sequence, payload, recorded_at) VALUES (1502, '1', now() - interval '10 min');
COMMIT;
SELECT obix.fill_gaps('copies');
SELECT state, held_at, held_since = waiting_since AS since, rate FROM obix.outbox_status WHERE outbox = 'copies'::regclass;
SELECT "check", status, detail, hint FROM findings WHERE object = 'copies';

-- the rate is that of the last minute
BEGIN;
SELECT obix.create_outbox('copies_new', 100, 1);
SET LOCAL session_replication_role = replica;
INSERT INTO copies_new (sequence, payload, recorded_at)
SELECT n, '1', clock_timestamp() - CASE WHEN n <= 1000 THEN interval '61 s' ELSE '0' END FROM generate_series(1, 1234) n;
COMMIT;
SELECT obix.fill_gaps('copies_new');
SELECT high_water_mark, round(60 * rate) AS in_a_minute FROM obix.outbox_status WHERE outbox = 'copies_new'::regclass;
DROP TABLE copies_new;

-- a consumer whose next event is gone, and one that is beyond the head
TRUNCATE copies;
SELECT problem, lag_events FROM obix.consumer_status WHERE consumer = 'copies_mail';
SELECT obix.publish('copies', '1') IS NOT NULL AS published;
SELECT "check", status, detail, hint FROM findings WHERE object = 'copies_mail';
SELECT obix.seek('copies_mail', NULL);
SELECT "check", status, detail, hint FROM findings WHERE object = 'copies_mail';
BEGIN;
UPDATE obix.consumer_state SET position = 2000, scanned = 2000 WHERE id = (SELECT id FROM obix.consumer WHERE consumer = 'copies_mail');
SELECT "check", status, detail, hint FROM findings WHERE object = 'copies_mail';
ROLLBACK;

-- and one whose row was written by hand
BEGIN;
UPDATE obix.consumer SET outbox = 1 WHERE consumer = 'copies_mail';
SELECT "check", status, detail, hint FROM findings WHERE object = 'copies_mail';
ROLLBACK;

-- settings of this session
BEGIN;
SET LOCAL obix.enabled = off;
SET LOCAL obix.force_sync_commit = off;
UPDATE pg_extension SET extversion = '1.10' WHERE extname = 'obix';
SELECT "check", object, status, regexp_replace(detail, 'library version .*', 'library version ...') AS detail, hint FROM findings;
ROLLBACK;

-- who may see it: members of pg_monitor all, others what is theirs to see
CREATE ROLE regress_obix_monitor;
CREATE ROLE regress_obix_nobody;
GRANT pg_monitor TO regress_obix_monitor;
GRANT USAGE ON SCHEMA obix_health TO regress_obix_monitor, regress_obix_nobody;
ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
CREATE TABLE seen AS SELECT "check", object, status FROM obix.health();
GRANT SELECT ON seen TO regress_obix_monitor;
SET ROLE regress_obix_monitor;
SELECT "check", object, status FROM obix.health() EXCEPT SELECT * FROM seen;
SELECT * FROM seen EXCEPT SELECT "check", object, status FROM obix.health();
SELECT head, high_water_mark, state FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT lag_events IS NOT NULL AS lag, last_error FROM obix.consumer_status WHERE consumer = 'mail';
SELECT count(*) FROM orders;
\echo :LAST_ERROR_SQLSTATE
SET ROLE regress_obix_nobody;
SELECT "check", object, status, detail, hint FROM obix.health() WHERE object ~ '^(orders|mail|copies)' ORDER BY object, "check";
SELECT head, high_water_mark, state, problem FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT lag_events, last_error FROM obix.consumer_status WHERE consumer = 'mail';
RESET ROLE;

DROP TABLE orders, copies;
SELECT * FROM findings;
DROP SCHEMA obix_health CASCADE;
DROP ROLE regress_obix_monitor, regress_obix_nobody;
