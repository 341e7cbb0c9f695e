--
-- Consumers: create, alter, drop, pause, resume, seek
--
-- Those with handlers have an outbox without events, so no worker does anything
-- for them.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_consumer;
SET search_path = obix_consumer, public;
SELECT obix.create_outbox('orders', 10, 2);
SELECT obix.create_outbox('empty', 10, 1);
CREATE VIEW definition AS
SELECT consumer, outbox, owner = current_user::regrole AS mine, version, paused, types, ordering, batch_size, timeout,
       max_attempts, backoff, max_backoff, on_failure, hold_key, search_path
FROM obix.consumer;
CREATE VIEW functions AS
SELECT consumer, version, handler, batch_handler, gate, tables, search_path FROM obix.consumer;
CREATE VIEW progress AS
SELECT consumer, state, "cursor", lag_events, attempts, attempt_sequence, delivered, failed, dead_lettered, late_ranges, last_error
FROM obix.consumer_status;

-- defaults
SELECT obix.create_consumer('plain', 'orders');
SELECT * FROM definition;
SELECT * FROM functions;
SELECT * FROM progress;
SELECT consumer, outbox, owner = current_user::regrole AS mine, state, "cursor", lag_events, lag, attempts, attempt_sequence, retry_at, lease_until,
       late_ranges, delivered, failed, dead_lettered, last_event_at, last_error, dispatcher_pid
FROM obix.consumer_status \gx

-- every option, by name and by position
SELECT obix.create_consumer(consumer => 'full', outbox => 'orders', start_after => 0, types => '{paid,"two words"}',
                            ordering => 'sequence', batch_size => 7, timeout => '3 s', max_attempts => 4, backoff => '20 ms',
                            max_backoff => '1 h', on_failure => 'dead_letter', hold_key => true);
SELECT obix.create_consumer('positional', 'orders', 0, '{paid}', NULL, NULL, 'available', 1, '1 ms', NULL, '1 ms', '1 ms', 'dead_letter', false,
                            NULL, NULL);
SELECT * FROM definition WHERE consumer <> 'plain' ORDER BY consumer;
SELECT * FROM progress ORDER BY consumer;

-- the bounds of each
SELECT obix.create_consumer('edge', 'orders', types => '{""}', batch_size => 100000, timeout => '2147483647 ms', max_attempts => 2147483647,
                            backoff => '36525 days', max_backoff => '100 years');
SELECT * FROM definition WHERE consumer = 'edge';
SELECT obix.alter_consumer('edge', batch_size => 1, timeout => '1 ms', max_attempts => 1, backoff => '1 ms', max_backoff => '1 ms');
SELECT * FROM definition WHERE consumer = 'edge';
SELECT obix.drop_consumer('edge');

-- what must not be null
SELECT obix.create_consumer(NULL, 'orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', ordering => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', batch_size => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', timeout => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', backoff => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', max_backoff => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', on_failure => NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', hold_key => NULL);
\echo :LAST_ERROR_SQLSTATE

-- names: any, of 1 to 63 bytes
SELECT obix.create_consumer('', 'orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer(repeat('x', 64), 'orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer(repeat('ä', 32), 'orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('plain', 'orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('plain', 'empty');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer(n, 'empty') FROM (VALUES (repeat('x', 63)), ('Plain'), ('it''s "odd" %s \ ; --'), (repeat('ä', 31)), (' ')) v (n);
SELECT consumer, state FROM obix.consumer_status WHERE outbox = 'empty'::regclass ORDER BY consumer COLLATE "C";
SELECT obix.drop_consumer(consumer) FROM obix.consumer WHERE outbox = 'empty'::regclass;
SELECT count(*) FROM obix.consumer WHERE outbox = 'empty'::regclass;

-- values
SELECT obix.create_consumer('bad', 'orders', types => '{}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', types => '{a,NULL}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', types => '{{a,b},{c,d}}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', ordering => 'Sequence');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', on_failure => 'skip');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', batch_size => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', batch_size => 100001);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', timeout => '0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', timeout => '25 days');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', max_attempts => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', max_attempts => -1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', backoff => '-1 s');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', backoff => '0.9 ms');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', backoff => '36526 days');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', max_backoff => '0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', max_backoff => '178000000 years');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', hold_key => true);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', hold_key => true, on_failure => 'dead_letter', ordering => 'available');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', tables => '{orders}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', gate => 'pg_catalog.pg_is_in_recovery');
\echo :LAST_ERROR_SQLSTATE

-- outboxes
SELECT obix.create_consumer('bad', 'obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders_p0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'definition');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 0);
\echo :LAST_ERROR_SQLSTATE

-- positions
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 5) n;
SELECT obix.create_consumer('from_' || p, 'orders', p) FROM generate_series(0, 5) p;
SELECT obix.create_consumer('from_null', 'orders', NULL);
SELECT consumer, "cursor", lag_events FROM obix.consumer_status WHERE consumer LIKE 'from%' ORDER BY consumer;
SELECT obix.create_consumer('bad', 'orders', 6);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', -1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'orders', 9223372036854775807);
\echo :LAST_ERROR_SQLSTATE
-- NULL: from the oldest kept event, not from 0
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(6, 12) n;
DROP TABLE orders_p0;
SELECT obix.create_consumer('from_oldest', 'orders');
SELECT consumer, "cursor", lag_events FROM obix.consumer_status WHERE consumer = 'from_oldest';
SELECT sequence, payload FROM obix.fetch('from_oldest') ORDER BY sequence;
TRUNCATE orders;
SELECT obix.create_consumer('from_nothing', 'orders');
SELECT consumer, "cursor", lag_events, lag FROM obix.consumer_status WHERE consumer = 'from_nothing';
SELECT obix.drop_consumer(consumer) FROM obix.consumer WHERE consumer LIKE 'from%';

-- handlers, by name; the qualified name is what is kept
CREATE SCHEMA "Odd schema";
CREATE TABLE seen (sequence bigint);
CREATE FUNCTION handle(event obix.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO seen VALUES (($1).sequence) $$;
CREATE FUNCTION handle(events obix.event[]) RETURNS void LANGUAGE sql AS $$ INSERT INTO seen SELECT sequence FROM unnest($1) $$;
CREATE FUNCTION "Odd schema"."Handle it"(obix.event) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION open() RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
CREATE FUNCTION open(obix.event) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
SELECT obix.create_consumer('handled', 'empty', handler => 'handle', batch_handler => 'handle', gate => 'open', tables => '{seen}');
SELECT obix.create_consumer('odd', 'empty', handler => '"Odd schema"."Handle it"');
SELECT obix.create_consumer('batches', 'empty', batch_handler => 'OBIX_Consumer.Handle', ordering => 'available');
SELECT * FROM functions WHERE consumer IN ('handled', 'odd', 'batches') ORDER BY consumer;
SELECT * FROM progress WHERE consumer IN ('odd', 'batches') ORDER BY consumer;

-- functions that will not do
CREATE PROCEDURE a_procedure(obix.event) LANGUAGE sql AS '';
CREATE FUNCTION a_set(obix.event) RETURNS SETOF int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION a_text(text) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION a_number() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION set_gate() RETURNS SETOF boolean LANGUAGE sql AS $$ SELECT true $$;
CREATE AGGREGATE an_aggregate(obix.event) (sfunc = array_append, stype = obix.event[]);
SELECT obix.create_consumer('bad', 'empty', handler => 'missing');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', batch_handler => 'missing.missing');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'handle', gate => 'missing');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'a_text');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'a_procedure');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'a_set');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'an_aggregate');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', batch_handler => 'open');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'handle', gate => 'a_number');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'handle', gate => 'set_gate');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => '');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'handle(obix.event)');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'a.b.c.d');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'handle', tables => '{}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('bad', 'empty', handler => 'handle', tables => '{seen,NULL}');
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM obix.consumer WHERE consumer = 'bad';

-- alter: what is not named stays
SELECT obix.alter_consumer('plain');
SELECT * FROM definition WHERE consumer = 'plain';
SELECT obix.alter_consumer('plain', types => '{a,b}');
SELECT obix.alter_consumer('plain', batch_size => 8);
SELECT obix.alter_consumer('plain', timeout => '8 s');
SELECT obix.alter_consumer('plain', max_attempts => 8);
SELECT obix.alter_consumer('plain', backoff => '8 ms');
SELECT obix.alter_consumer('plain', max_backoff => '8 h');
SELECT obix.alter_consumer('plain', on_failure => 'dead_letter');
SELECT obix.alter_consumer('plain', hold_key => true);
SELECT obix.alter_consumer('plain', search_path => 'pg_catalog, "Odd schema"');
SELECT * FROM definition WHERE consumer = 'plain';
SELECT obix.alter_consumer('plain', '{c}', NULL, NULL, 9, '9 s', 9, '9 ms', '9 h', 'stop', false, NULL, NULL, 'public', current_user::regrole, NULL);
SELECT * FROM definition WHERE consumer = 'plain';
-- clear: all that can be null
SELECT obix.alter_consumer('plain', clear => '{types,max_attempts}');
SELECT * FROM definition WHERE consumer = 'plain';
SELECT obix.alter_consumer('plain', clear => '{}');
SELECT obix.alter_consumer('handled', clear => '{batch_handler,gate,tables}');
SELECT * FROM functions WHERE consumer = 'handled';
SELECT obix.alter_consumer('handled', batch_handler => 'handle', gate => 'open', tables => '{seen,empty}', clear => '{handler}');
SELECT * FROM functions WHERE consumer = 'handled';
-- names are resolved in the search_path that the consumer has, or is given
SELECT obix.alter_consumer('handled', handler => '"Handle it"');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('handled', handler => '"Handle it"', search_path => '"Odd schema"');
SELECT * FROM functions WHERE consumer = 'handled';
-- the other handler can take the place of one
SELECT obix.alter_consumer('odd', batch_handler => 'handle', clear => '{handler}');
SELECT * FROM functions WHERE consumer = 'odd';
-- what is wrong is refused here too, and nothing is changed then
SELECT obix.alter_consumer(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', types => '{}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', batch_size => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', timeout => '-1 ms');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', max_attempts => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', backoff => '0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', max_backoff => '102 years');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', on_failure => '');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', hold_key => true);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('full', on_failure => 'stop');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('positional', hold_key => true);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', clear => '{types,batch_size}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', clear => '{NULL}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', search_path => '"unbalanced');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', tables => '{seen}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', gate => 'obix_consumer.open');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', handler => 'obix_consumer.handle');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('batches', clear => '{batch_handler}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('batches', handler => 'missing');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('batches', tables => '{}');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_consumer('plain', owner => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM definition WHERE consumer = 'plain';
-- what stays is not checked again
BEGIN;
DROP FUNCTION handle(obix.event[]);
SELECT obix.alter_consumer('batches', batch_size => 3);
ROLLBACK;

-- pause and resume
SELECT obix.pause('plain');
SELECT obix.pause('plain');
SELECT consumer, state FROM progress WHERE consumer = 'plain';
SELECT paused FROM definition WHERE consumer = 'plain';
SELECT obix.resume('plain');
SELECT obix.resume('plain');
SELECT consumer, state FROM progress WHERE consumer = 'plain';
SELECT obix.pause(NULL) IS NULL AS nothing, obix.resume(NULL) IS NULL AS nothing;
BEGIN;
SELECT obix.pause('odd');
SELECT consumer, state FROM progress WHERE consumer = 'odd';
ROLLBACK;
SELECT consumer, state FROM progress WHERE consumer = 'odd';
-- paused, it can be altered, moved and dropped
SELECT obix.create_consumer('brief', 'orders');
SELECT obix.pause('brief');
SELECT obix.alter_consumer('brief', batch_size => 2);
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(13, 15) n;
SELECT obix.seek('brief', 14);
SELECT consumer, state, "cursor", lag_events FROM progress WHERE consumer = 'brief';
SELECT obix.drop_consumer('brief');

-- seek: forward, back, to the ends
SELECT obix.create_consumer('mover', 'orders', 12, max_attempts => 1);
SELECT sequence FROM obix.fetch('mover') ORDER BY sequence;
SELECT obix.seek('mover', 14);
SELECT sequence FROM obix.fetch('mover') ORDER BY sequence;
SELECT obix.seek('mover', 12);
SELECT sequence FROM obix.fetch('mover') ORDER BY sequence;
SELECT obix.seek('mover', 15);
SELECT sequence FROM obix.fetch('mover') ORDER BY sequence;
SELECT obix.seek('mover', NULL);
SELECT "cursor" FROM progress WHERE consumer = 'mover';
SELECT sequence FROM obix.fetch('mover') ORDER BY sequence;
SELECT obix.seek('mover', 16);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('mover', -1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek(NULL, 1);
\echo :LAST_ERROR_SQLSTATE
SELECT "cursor" FROM progress WHERE consumer = 'mover';
-- below what is kept it is taken, and fetching says so
SELECT obix.seek('mover', 3);
SELECT * FROM obix.fetch('mover');
\echo :LAST_ERROR_SQLSTATE
-- it takes a consumer on that has stopped
SELECT obix.seek('mover', 12);
SELECT obix.fail('mover', 13, 'no');
SELECT consumer, state, attempts, attempt_sequence, failed, last_error FROM progress WHERE consumer = 'mover';
SELECT obix.seek('mover', 13);
SELECT consumer, state, attempts, attempt_sequence, failed, last_error FROM progress WHERE consumer = 'mover';
SELECT sequence FROM obix.fetch('mover') ORDER BY sequence;
BEGIN;
SELECT obix.seek('mover', 15);
ROLLBACK;
SELECT "cursor" FROM progress WHERE consumer = 'mover';

-- with a handler, moved while it is paused
SELECT obix.create_consumer('moved', 'orders', 15, handler => 'handle');
SELECT obix.pause('moved');
SELECT obix.seek('moved', 13);
SELECT consumer, state, "cursor", lag_events FROM progress WHERE consumer = 'moved';

-- drop: the name is free again, and what was known is gone
SELECT obix.drop_consumer('mover');
SELECT count(*) FROM obix.consumer_status WHERE consumer = 'mover';
SELECT * FROM obix.fetch('mover');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_consumer('mover', 'orders', 12);
SELECT * FROM progress WHERE consumer = 'mover';
SELECT obix.drop_consumer(NULL) IS NULL AS nothing;
BEGIN;
SELECT obix.drop_consumer('mover');
SELECT obix.create_consumer('mover', 'empty');
SELECT consumer, outbox FROM obix.consumer WHERE consumer = 'mover';
SAVEPOINT a;
SELECT obix.drop_consumer('mover');
ROLLBACK TO a;
SELECT consumer, outbox FROM obix.consumer WHERE consumer = 'mover';
ROLLBACK;
SELECT consumer, outbox FROM obix.consumer WHERE consumer = 'mover';
BEGIN;
SELECT obix.create_consumer('never', 'orders');
SELECT count(*) > 0 AS fetched FROM obix.fetch('never');
ROLLBACK;
SELECT * FROM obix.fetch('never');
\echo :LAST_ERROR_SQLSTATE

-- consumers that do not exist
SELECT obix.alter_consumer('nobody');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_consumer('nobody');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.pause('nobody');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.resume('nobody');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.seek('nobody', 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ack('nobody', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fail('nobody', 1, 'no');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.acquire('nobody');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.renew('nobody', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.release('nobody', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.requeue('nobody', 1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.discard('nobody', 1);
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait_for('nobody', '1 h');
\echo :LAST_ERROR_SQLSTATE

-- shared memory has to be told when the transaction ends, so it is not prepared
BEGIN;
SELECT obix.create_consumer('prepared', 'orders');
PREPARE TRANSACTION 'obix_consumer';
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.fetch('prepared');
\set VERBOSITY terse
BEGIN;
SELECT obix.alter_consumer('plain', batch_size => 1);
PREPARE TRANSACTION 'obix_consumer';
BEGIN;
SELECT obix.seek('plain', 15);
PREPARE TRANSACTION 'obix_consumer';
BEGIN;
SELECT obix.pause('plain');
PREPARE TRANSACTION 'obix_consumer';
BEGIN;
SELECT obix.resume('plain');
PREPARE TRANSACTION 'obix_consumer';
BEGIN;
SELECT obix.drop_consumer('plain');
PREPARE TRANSACTION 'obix_consumer';
\set VERBOSITY default
SELECT consumer, state, "cursor" FROM progress WHERE consumer = 'plain';

-- read-only transactions
BEGIN READ ONLY;
SELECT consumer, state FROM obix.consumer_status WHERE consumer = 'plain';
SAVEPOINT a;
SELECT obix.create_consumer('bad', 'orders');
ROLLBACK TO a;
SELECT obix.alter_consumer('plain');
ROLLBACK TO a;
SELECT obix.drop_consumer('plain');
ROLLBACK TO a;
SELECT obix.pause('plain');
ROLLBACK TO a;
SELECT obix.resume('plain');
ROLLBACK TO a;
SELECT obix.seek('plain', 15);
ROLLBACK TO a;
SELECT * FROM obix.fetch('plain');
ROLLBACK TO a;
SELECT obix.ack('plain', 15);
ROLLBACK TO a;
SELECT obix.fail('plain', 15, 'no');
ROLLBACK TO a;
SELECT obix.acquire('plain');
ROLLBACK TO a;
SELECT obix.renew('plain', 1);
ROLLBACK TO a;
SELECT obix.release('plain', 1);
ROLLBACK TO a;
SELECT obix.requeue('plain', 1);
ROLLBACK TO a;
SELECT obix.discard('plain', 1);
ROLLBACK TO a;
COMMIT;

-- while obix is disabled
SET obix.enabled = off;
SELECT obix.create_consumer('bad', 'orders');
\echo :LAST_ERROR_SQLSTATE
RESET obix.enabled;

-- a state that is lost is not taken for a new one
CREATE TABLE lost AS SELECT s.* FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'plain';
DELETE FROM obix.consumer_state WHERE id IN (SELECT id FROM lost);
SELECT * FROM obix.fetch('plain');
\echo :LAST_ERROR_SQLSTATE
SELECT state, "cursor", lag_events, lag, attempts, attempt_sequence, retry_at, lease_until, late_ranges, delivered, failed, dead_lettered,
       last_event_at, last_error, dispatcher_pid
FROM obix.consumer_status WHERE consumer = 'plain' \gx
INSERT INTO obix.consumer_state SELECT * FROM lost;
SELECT consumer, state, "cursor" FROM progress WHERE consumer = 'plain';

-- consumers go with the outbox: with force, or with the table
\set VERBOSITY terse
SELECT obix.drop_outbox('empty');
\set VERBOSITY default
\echo :LAST_ERROR_SQLSTATE
BEGIN;
SELECT obix.drop_outbox('empty', force => true);
SELECT count(*) FROM obix.consumer WHERE consumer IN ('handled', 'odd', 'batches');
ROLLBACK;
SELECT count(*) FROM obix.consumer WHERE consumer IN ('handled', 'odd', 'batches');
SELECT obix.drop_outbox('empty', true);
SELECT consumer FROM obix.consumer ORDER BY consumer;
SELECT count(*) FROM obix.consumer_state s WHERE NOT EXISTS (SELECT FROM obix.consumer c WHERE c.id = s.id);
SELECT obix.create_outbox('brief', 10, 1);
SELECT obix.create_consumer('brief', 'brief');
SELECT obix.drop_outbox('brief');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_consumer('brief');
SELECT obix.drop_outbox('brief');
BEGIN;
DROP TABLE orders;
SELECT * FROM obix.fetch('plain');
ROLLBACK;
SELECT consumer FROM obix.consumer ORDER BY consumer;
DROP TABLE orders;
SELECT count(*) FROM obix.consumer;
SELECT count(*) FROM obix.consumer_state;
SELECT count(*) FROM obix.consumer_status;

DROP SCHEMA obix_consumer CASCADE;
DROP SCHEMA "Odd schema" CASCADE;
