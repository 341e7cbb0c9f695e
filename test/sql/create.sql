--
-- create_outbox, alter_outbox, drop_outbox: names, arguments, ownership, and
-- what is left behind.  What depends on other sessions is in the specs.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_create;
SET search_path = obix_create, public;

-- what an outbox is made of
SELECT obix.create_outbox('orders', partition_width => 100, premake => 2);
SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull,
       pg_get_expr(d.adbin, d.adrelid) AS default
FROM pg_attribute a
     LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = 'orders'::regclass AND a.attnum > 0
ORDER BY a.attnum;
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = 'orders'::regclass AND contype <> 'n'
ORDER BY conname;
SELECT tgname, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger
WHERE tgrelid = 'orders'::regclass
ORDER BY tgname;
SELECT pg_get_partkeydef('orders'::regclass);
SELECT * FROM obix.partitions('orders') ORDER BY from_sequence;
SELECT p.partition, pg_get_expr(c.relpartbound, c.oid) AS bound
FROM obix.partitions('orders') p JOIN pg_class c ON c.oid = p.partition
ORDER BY p.from_sequence;
SELECT p.partition, string_agg(tgname, ', ' ORDER BY tgname) AS triggers
FROM obix.partitions('orders') p JOIN pg_trigger t ON t.tgrelid = p.partition
GROUP BY p.partition ORDER BY min(p.from_sequence);
SELECT outbox, partition_width, premake, resolved FROM obix.outbox ORDER BY outbox::text;

-- commented, so that a stranger finds the way
SELECT obj_description('orders'::regclass) IS NOT NULL AS table_is_commented;

-- defaults
SELECT obix.create_outbox('plain');
SELECT partition_width, premake FROM obix.outbox WHERE outbox = 'plain'::regclass;
SELECT count(*) AS partitions, min(from_sequence), max(to_sequence) FROM obix.partitions('plain');

-- qualified, quoted and upper-case names
CREATE SCHEMA "Obix "" Create";
SELECT obix.create_outbox('"Obix "" Create"."Order.Events %s"', 10, 1);
SELECT obix.create_outbox('ORDERS_UPPER', 10, 1);
SELECT obix.create_outbox('"ORDERS_UPPER"', 10, 1);
SELECT obix.create_outbox('"select"', 10, 1);
SELECT o.outbox, p.partition FROM obix.outbox o, obix.partitions(o.outbox) p
WHERE o.outbox::text ~ 'Events|UPPER|upper|select'
ORDER BY o.outbox::text COLLATE "C", p.from_sequence;
SELECT obix.publish('"Obix "" Create"."Order.Events %s"', '1') IS NOT NULL AS published;
SELECT obix.publish('"ORDERS_UPPER"', '2') IS NOT NULL AS published;
INSERT INTO "select" (payload) VALUES ('3') RETURNING sequence;
SELECT sequence, payload FROM obix.read('"Obix "" Create"."Order.Events %s"') ORDER BY sequence;
SELECT sequence, payload FROM obix.read('"ORDERS_UPPER"') ORDER BY sequence;
SELECT sequence, payload FROM obix.read('"select"') ORDER BY sequence;

-- multibyte names, cut at a character
SELECT obix.create_outbox(repeat('ä', 31), 10, 3) = repeat('ä', 31)::regclass AS created;
SELECT o.outbox, count(*) AS partitions, max(octet_length(c.relname)) <= 63 AS fit,
       bool_and(c.relname ~ '^ä+_(p[0-9]+|default)') AS whole
FROM obix.outbox o, obix.partitions(o.outbox) p JOIN pg_class c ON c.oid = p.partition
WHERE o.outbox = repeat('ä', 31)::regclass
GROUP BY o.outbox;

-- names of 63 bytes, and two that begin with the same 55
SELECT obix.create_outbox(repeat('l', 63), 10, 3) = repeat('l', 63)::regclass AS created;
SELECT obix.create_outbox(repeat('m', 55) || '_one', 1000000000000, 3) = (repeat('m', 55) || '_one')::regclass AS created;
SELECT obix.create_outbox(repeat('m', 55) || '_two', 1000000000000, 3) = (repeat('m', 55) || '_two')::regclass AS created;
SELECT left(o.outbox::text, 1) || '..' || right(o.outbox::text, 4) AS outbox,
       count(*) AS partitions, max(octet_length(c.relname)) <= 63 AS fit
FROM obix.outbox o, obix.partitions(o.outbox) p JOIN pg_class c ON c.oid = p.partition
WHERE o.outbox::text ~ '^(l{63}|m{55})'
GROUP BY o.outbox ORDER BY o.outbox::text COLLATE "C";
SELECT obix.publish((repeat('m', 55) || '_one')::regclass, '"one"') IS NOT NULL AS published;
SELECT obix.publish((repeat('m', 55) || '_two')::regclass, '"two"') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read((repeat('m', 55) || '_one')::regclass) ORDER BY sequence;
SELECT sequence, payload FROM obix.read((repeat('m', 55) || '_two')::regclass) ORDER BY sequence;

-- a table that has the name of a partition is in nobody's way
CREATE TABLE taken_p0 (x int);
CREATE TABLE taken_default (x int);
SELECT obix.create_outbox('taken', 10, 1);
SELECT count(*) AS partitions, count(*) FILTER (WHERE partition IN ('taken_p0'::regclass, 'taken_default'::regclass)) AS taken
FROM obix.partitions('taken');

-- the widest partitions there can be
SELECT obix.create_outbox('widest', 9223372036854775807, 5);
SELECT obix.publish('widest', '1') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('widest') ORDER BY sequence;
SELECT obix.create_outbox('wide', 4611686018427387904, 3);
SELECT obix.publish('wide', '1') IS NOT NULL AS published;
SELECT obix.ensure_partitions('wide');
SELECT sequence, payload FROM obix.read('wide') ORDER BY sequence;

-- refusals make nothing
SELECT count(*) AS relations_before FROM pg_class \gset
SELECT count(*) AS outboxes_before FROM obix.outbox \gset
CREATE TABLE exists_already (x int);
SELECT obix.create_outbox('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('exists_already');
\echo :LAST_ERROR_SQLSTATE
DROP TABLE exists_already;
SELECT obix.create_outbox('obix_missing.orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('new', partition_width => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('new', partition_width => -5);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('new', premake => -1);
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY sqlstate
SELECT obix.create_outbox('new', 10, 2147483647);
\set VERBOSITY default
SELECT obix.create_outbox('');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('new.');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('other_database.obix_create.new');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('a.b.c.d');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('pg_temp.new');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.create_outbox('pg_catalog.new');
\echo :LAST_ERROR_SQLSTATE
SET search_path = '';
SELECT obix.create_outbox('new');
\echo :LAST_ERROR_SQLSTATE
SET search_path = obix_create, public;
SELECT obix.create_outbox(NULL) IS NULL AS nothing;
BEGIN READ ONLY;
SELECT obix.create_outbox('new');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
SELECT count(*) - :relations_before AS more_relations FROM pg_class;
SELECT count(*) - :outboxes_before AS more_outboxes FROM obix.outbox;

-- a rolled back creation leaves nothing, whatever was done with it
BEGIN;
SELECT obix.create_outbox('undone', 10, 1);
SELECT obix.publish('undone', '1') IS NOT NULL AS published;
INSERT INTO undone (payload) VALUES ('2') RETURNING sequence;
SELECT sequence, payload FROM obix.read('undone') ORDER BY sequence;
ROLLBACK;
BEGIN;
SAVEPOINT a;
SELECT obix.create_outbox('undone', 10, 1);
SELECT obix.publish('undone', '1') IS NOT NULL AS published;
INSERT INTO undone (payload) VALUES ('2') RETURNING sequence;
ROLLBACK TO a;
SELECT obix.create_outbox('undone', 10, 1);
SELECT obix.publish('undone', '"kept"') IS NOT NULL AS published;
COMMIT;
SELECT sequence, payload FROM obix.read('undone') ORDER BY sequence;
DROP TABLE undone;
SELECT count(*) - :relations_before AS more_relations FROM pg_class;
SELECT count(*) - :outboxes_before AS more_outboxes FROM obix.outbox;

-- the narrowest, without any ahead
SELECT obix.create_outbox('narrow', 1, 0);
SELECT obix.publish('narrow', to_jsonb(n)) IS NOT NULL AS published FROM generate_series(1, 3) n;
SELECT sequence, payload FROM obix.read('narrow') ORDER BY sequence;

-- created, used and dropped in one transaction
BEGIN;
SELECT obix.create_outbox('brief', 10, 1);
SELECT obix.publish('brief', '1') IS NOT NULL AS published;
INSERT INTO brief (payload) VALUES ('2') RETURNING sequence;
SELECT obix.drop_outbox('brief');
COMMIT;
SELECT count(*) FROM obix.outbox WHERE outbox::text ~ 'brief' OR outbox NOT IN (SELECT oid FROM pg_class);

-- shared entries of what was dropped or rolled back are reclaimed
DO $$
BEGIN
    FOR i IN 1 .. 2 * current_setting('obix.max_outboxes')::int LOOP
        PERFORM obix.create_outbox('cycle', 10, 0);
        PERFORM obix.next_sequence('cycle');
        COMMIT;
        DROP TABLE cycle;
        COMMIT;
        PERFORM obix.create_outbox('cycle', 10, 0);
        PERFORM obix.next_sequence('cycle');
        ROLLBACK;
    END LOOP;
END $$;
DO $$
BEGIN
    FOR i IN 1 .. 2 * current_setting('obix.max_outboxes')::int LOOP
        BEGIN
            PERFORM obix.create_outbox('cycle', 10, 0);
            PERFORM obix.next_sequence('cycle');
            RAISE EXCEPTION 'undo';
        EXCEPTION WHEN raise_exception THEN
        END;
    END LOOP;
END $$;

-- but there is room for so many at a time
DO $$
DECLARE
    message text;
    hint text;
BEGIN
    FOR i IN 1 .. current_setting('obix.max_outboxes')::int + 1 LOOP
        PERFORM obix.create_outbox('many' || i, 10, 0);
        PERFORM obix.next_sequence(('many' || i)::regclass);
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
    RAISE WARNING '% %: %', SQLSTATE, message, hint;
END $$;
SELECT obix.publish('orders', '"room again"') IS NOT NULL AS published;

-- alter_outbox: width of the partitions made from now on, how many to keep ready
SELECT obix.alter_outbox('orders', partition_width => 50);
SELECT obix.alter_outbox('orders', premake => 3);
SELECT obix.alter_outbox('orders');
SELECT obix.alter_outbox('orders', NULL, NULL);
SELECT partition_width, premake FROM obix.outbox WHERE outbox = 'orders'::regclass;
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
SELECT partition, from_sequence, to_sequence FROM obix.partitions('orders') ORDER BY from_sequence;
BEGIN;
SELECT obix.alter_outbox('orders', 7, 7);
ROLLBACK;
SELECT partition_width, premake FROM obix.outbox WHERE outbox = 'orders'::regclass;
SELECT obix.alter_outbox('orders', partition_width => 0);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox('orders', premake => -1);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox('orders_p0', 10);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox('obix.outbox', 10);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox('obix_create.missing', 10);
\echo :LAST_ERROR_SQLSTATE
BEGIN READ ONLY;
SELECT obix.alter_outbox('orders', 10);
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- renamed and moved, an outbox goes on; its own name is what later partitions get
ALTER TABLE orders RENAME TO purchases;
CREATE SCHEMA obix_create_moved;
ALTER TABLE purchases SET SCHEMA obix_create_moved;
SELECT obix.alter_outbox('obix_create_moved.purchases', premake => 4);
SELECT obix.ensure_partitions('obix_create_moved.purchases') >= 0 AS ensured;
SELECT obix.publish('obix_create_moved.purchases', '"moved"') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('obix_create_moved.purchases') ORDER BY sequence;
SELECT partition, from_sequence, to_sequence FROM obix.partitions('obix_create_moved.purchases') ORDER BY from_sequence;

-- the caller owns what is made
CREATE ROLE regress_obix_owner;
CREATE ROLE regress_obix_other;
GRANT USAGE, CREATE ON SCHEMA obix_create TO regress_obix_owner;
GRANT USAGE ON SCHEMA obix_create TO regress_obix_other;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('owned', 10, 2);
RESET ROLE;
SELECT DISTINCT relowner::regrole FROM pg_class
WHERE oid = 'owned'::regclass OR oid IN (SELECT partition FROM obix.partitions('owned'))
ORDER BY 1;

-- nobody else may change or drop it
SET ROLE regress_obix_other;
SELECT obix.create_outbox('obix_create.mine');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox('owned', 20);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_outbox('owned');
\echo :LAST_ERROR_SQLSTATE
DROP TABLE owned;
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;

-- drop_outbox: refuses what depends on it, unless forced
CREATE VIEW owned_view AS SELECT payload FROM owned;
SET ROLE regress_obix_owner;
SELECT obix.drop_outbox('owned');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_outbox('owned', force => true);
RESET ROLE;
SELECT to_regclass('owned') IS NULL AS dropped, to_regclass('owned_view') IS NULL AS view_too,
       to_regclass('owned_p0') IS NULL AND to_regclass('owned_default') IS NULL AS partitions_too;
SELECT obix.drop_outbox('taken_p0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_outbox('taken', NULL) IS NULL AS nothing;
BEGIN;
SELECT obix.drop_outbox('taken');
ROLLBACK;
SELECT obix.publish('taken', '"still here"') IS NOT NULL AS published;
SELECT sequence, payload FROM obix.read('taken') ORDER BY sequence;
BEGIN READ ONLY;
SELECT obix.drop_outbox('taken');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- nothing is adopted that looks like an outbox, but is partitioned in another way
CREATE TABLE listed (LIKE taken) PARTITION BY LIST (sequence);
CREATE TABLE hashed (LIKE taken) PARTITION BY HASH (sequence);
CREATE TABLE ranged (LIKE taken) PARTITION BY RANGE (sequence, id);
CREATE TABLE outer_one (LIKE taken) PARTITION BY RANGE (sequence);
CREATE TABLE inner_one PARTITION OF outer_one DEFAULT PARTITION BY RANGE (sequence);
CREATE TABLE listed_1 PARTITION OF listed FOR VALUES IN (1);
CREATE TABLE hashed_1 PARTITION OF hashed FOR VALUES WITH (MODULUS 1, REMAINDER 0);
CREATE TABLE ranged_1 PARTITION OF ranged FOR VALUES FROM (0, MINVALUE) TO (10, MINVALUE);
ALTER TABLE listed ADD PRIMARY KEY (sequence);
ALTER TABLE hashed ADD PRIMARY KEY (sequence);
ALTER TABLE outer_one ADD PRIMARY KEY (sequence);
CREATE TRIGGER zz_obix_guard BEFORE INSERT ON listed FOR EACH ROW EXECUTE FUNCTION obix.guard();
CREATE TRIGGER zz_obix_guard BEFORE INSERT ON hashed FOR EACH ROW EXECUTE FUNCTION obix.guard();
CREATE TRIGGER zz_obix_guard BEFORE INSERT ON ranged FOR EACH ROW EXECUTE FUNCTION obix.guard();
CREATE TRIGGER zz_obix_guard BEFORE INSERT ON outer_one FOR EACH ROW EXECUTE FUNCTION obix.guard();
SELECT obix.adopt_outbox('listed');
SELECT obix.adopt_outbox('hashed');
SELECT obix.adopt_outbox('ranged');
SELECT obix.adopt_outbox('inner_one');
DROP TABLE listed, hashed, ranged, outer_one;

-- dropped by whatever command, it leaves nothing behind
SELECT obix.drop_outbox('taken');
DROP TABLE widest, wide;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('owned', 10, 2);
SELECT obix.publish('owned', '1') IS NOT NULL AS published;
RESET ROLE;
DROP OWNED BY regress_obix_owner;
DROP SCHEMA "Obix "" Create", obix_create_moved CASCADE;
SELECT count(*) FROM obix.outbox o WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = o.outbox);
DROP SCHEMA obix_create CASCADE;
DROP ROLE regress_obix_owner, regress_obix_other;
SELECT count(*) AS outboxes_left FROM obix.outbox;
