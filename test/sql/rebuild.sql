-- What can be rebuilt.  Rebuilds themselves need workers: test/t/029_rebuild.pl.
SET client_min_messages = error;
CREATE ROLE regress_obix_rebuild;
CREATE SCHEMA reb;
SET search_path = reb, public;
SET client_min_messages = notice;
SELECT obix.create_outbox('reb.orders');
CREATE TABLE t (id int PRIMARY KEY, a int, b text);
CREATE FUNCTION handle(e obix.event) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
SELECT obix.create_consumer('reb', 'reb.orders', handler => 'handle');

--
-- Consumers and handlers
--
SELECT obix.begin_rebuild('reb', false);
CALL obix.rebuild('reb');
SELECT obix.cancel_rebuild('reb');
CALL obix.rebuild('nobody');
SELECT obix.alter_consumer('reb', tables => '{t}');

BEGIN;
ALTER FUNCTION handle(obix.event) SET search_path = reb;
SELECT obix.begin_rebuild('reb', false);
ROLLBACK;

BEGIN;
CREATE FUNCTION body(e obix.event) RETURNS void BEGIN ATOMIC SELECT 1; END;
SELECT obix.alter_consumer('reb', batch_handler => NULL, handler => 'body');
SELECT obix.begin_rebuild('reb', false);
ROLLBACK;

BEGIN;
DROP FUNCTION handle(obix.event);
SELECT obix.begin_rebuild('reb', false);
ROLLBACK;

SET ROLE regress_obix_rebuild;
SELECT obix.begin_rebuild('reb', false);
SELECT obix.continue_rebuild('reb');
SELECT obix.cancel_rebuild('reb');
RESET ROLE;

--
-- Tables
--
\set check 'SELECT obix.begin_rebuild(\'reb\', false)'

-- what depends on them
BEGIN; CREATE VIEW v AS SELECT a FROM t; :check; ROLLBACK;
BEGIN; CREATE MATERIALIZED VIEW mv AS SELECT t FROM t; :check; ROLLBACK;
BEGIN; CREATE TABLE o (t int REFERENCES t); :check; ROLLBACK;
BEGIN; ALTER TABLE t ADD FOREIGN KEY (a) REFERENCES t; :check; ROLLBACK;
BEGIN; CREATE RULE ru AS ON DELETE TO t DO INSTEAD NOTHING; :check; ROLLBACK;
BEGIN; CREATE FUNCTION f() RETURNS bigint BEGIN ATOMIC SELECT count(*) FROM t; END; :check; ROLLBACK;
BEGIN; CREATE FUNCTION f(t) RETURNS int LANGUAGE sql AS 'SELECT 1'; :check; ROLLBACK;
BEGIN; CREATE TABLE o (r t); :check; ROLLBACK;
BEGIN; CREATE TABLE o (r t[]); :check; ROLLBACK;
BEGIN; CREATE TABLE ch () INHERITS (t); :check; ROLLBACK;
BEGIN; ALTER TABLE t ADD s serial; :check; ROLLBACK;
BEGIN;
CREATE FUNCTION tf() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION tf();
:check;
ROLLBACK;

-- what applies to them
BEGIN; CREATE POLICY po ON t; :check; ROLLBACK;
BEGIN; ALTER TABLE t ENABLE ROW LEVEL SECURITY; :check; ROLLBACK;
SET client_min_messages = error;
BEGIN; CREATE PUBLICATION regress_obix_pub FOR TABLE t; :check; ROLLBACK;
BEGIN; CREATE PUBLICATION regress_obix_pub FOR TABLES IN SCHEMA reb; :check; ROLLBACK;
RESET client_min_messages;
BEGIN; ALTER EXTENSION obix ADD TABLE t; :check; ROLLBACK;

-- what they are
CREATE FUNCTION try(relations regclass[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
BEGIN
	PERFORM obix.alter_consumer('reb', tables => relations);
	PERFORM obix.begin_rebuild('reb', false);
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RAISE NOTICE E'% %\n%\n%', SQLSTATE, SQLERRM, detail, hint;
END $$;
SELECT try('{reb.orders}');
SELECT try(ARRAY[min(inhrelid)]::regclass[]) FROM pg_inherits WHERE inhparent = 'reb.orders'::regclass AND inhrelid = 'orders_p0'::regclass;
SELECT try('{pg_class}');
SELECT try('{obix.outbox}');
SELECT try('{t_pkey}');
SELECT try('{t, t}');
BEGIN; CREATE VIEW v AS SELECT 1; SELECT try('{v}'); ROLLBACK;
BEGIN; CREATE TEMP TABLE tmp (i int); SELECT try('{tmp}'); ROLLBACK;
BEGIN; CREATE TABLE p (i int) PARTITION BY LIST (i); SELECT try('{p}'); ROLLBACK;
BEGIN; CREATE TABLE p (i int) PARTITION BY LIST (i); CREATE TABLE p1 PARTITION OF p DEFAULT; SELECT try('{p1}'); ROLLBACK;
BEGIN; CREATE SCHEMA reb2; CREATE TABLE reb2.t (i int); SELECT try('{t, reb2.t}'); ROLLBACK;
BEGIN; CREATE TABLE gone (i int); SELECT obix.alter_consumer('reb', tables => '{gone}'); DROP TABLE gone;
DO $$ BEGIN PERFORM obix.begin_rebuild('reb', false); EXCEPTION WHEN undefined_table THEN RAISE NOTICE '%', regexp_replace(SQLERRM, '\d+', 'N'); END $$;
ROLLBACK;

-- an error of ours in full
CREATE PROCEDURE tell(command text) LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
BEGIN
	EXECUTE command;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RAISE NOTICE E'% %\n%\n%', SQLSTATE, regexp_replace(SQLERRM, '\d+', 'N'), detail, hint;
END $$;
BEGIN; CREATE TABLE gone (i int); SELECT obix.alter_consumer('reb', tables => '{gone}'); DROP TABLE gone;
CALL tell($$SELECT obix.begin_rebuild('reb', false)$$);
ROLLBACK;

-- a schema that is in the way
BEGIN;
DO $$ BEGIN EXECUTE format('CREATE SCHEMA obix_rebuild_%s', (SELECT id FROM obix.consumer WHERE consumer = 'reb')); END $$;
CALL tell($$SELECT obix.begin_rebuild('reb', false)$$);
ROLLBACK;

-- the owner of the consumer must have the rights of the owner of the table
BEGIN;
GRANT SELECT ON orders TO regress_obix_rebuild;
GRANT USAGE ON SCHEMA reb TO regress_obix_rebuild;
SELECT obix.alter_consumer('reb', owner => 'regress_obix_rebuild');
:check;
ROLLBACK;

--
-- Begun and given up, all in one transaction, so that no worker sees it
--
BEGIN;
SELECT obix.begin_rebuild('reb', true);
SELECT consumer, skip_errors, state, "cursor", events_done, events_left FROM obix.rebuild_progress;
SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname LIKE 'obix\_rebuild\_%' AND relname IN ('t', 't_pkey');
-- what would have the tables not be those of the consumer any more
CALL tell($$SELECT obix.alter_consumer('reb', owner => 'regress_obix_rebuild')$$);
CALL tell($$SELECT obix.alter_consumer('reb', tables => '{orders}')$$);
CALL tell($$SELECT obix.alter_consumer('reb', clear => '{tables}')$$);
SELECT obix.alter_consumer('reb', batch_size => 7);
SELECT obix.cancel_rebuild('reb');
SELECT count(*) FROM obix.rebuild_progress;
SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'obix\_rebuild\_%';
ROLLBACK;

SELECT obix.drop_outbox('reb.orders', force => true);
SET client_min_messages = error;
DROP SCHEMA reb CASCADE;
DROP ROLE regress_obix_rebuild;
