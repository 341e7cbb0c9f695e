--
-- ensure_partitions and recover_default
--
-- A worker may be faster, so it is the outcome that is looked at, except in a
-- transaction that has created the outbox itself: no worker sees it yet.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_partitions;
SET search_path = obix_partitions, public;

-- how many are kept ready
BEGIN;
SELECT obix.create_outbox('orders', 10, 2);
SELECT * FROM obix.partitions('orders') ORDER BY from_sequence;
SELECT obix.ensure_partitions('orders');
-- the next sequence is within the first but one, so two more are due
INSERT INTO orders (payload) SELECT to_jsonb(n) FROM generate_series(1, 25) n;
SELECT obix.ensure_partitions('orders') >= 2 AS ensured;
SELECT obix.ensure_partitions('orders');
SELECT count(*) >= 2 AS ready, min(from_sequence) AS next FROM obix.partitions('orders') WHERE from_sequence > 25;
COMMIT;

-- none ahead
BEGIN;
SELECT obix.create_outbox('none_ahead', 10, 0);
SELECT obix.ensure_partitions('none_ahead');
SELECT * FROM obix.partitions('none_ahead') ORDER BY from_sequence;
COMMIT;

-- altered: more of them, wider, narrower; what exists stays
SELECT obix.create_outbox('altered', 10, 1);
SELECT obix.alter_outbox('altered', premake => 2);
SELECT obix.ensure_partitions('altered') >= 0 AS ensured;
SELECT * FROM obix.partitions('altered') ORDER BY from_sequence;
SELECT obix.alter_outbox('altered', partition_width => 100, premake => 4);
SELECT obix.ensure_partitions('altered') >= 0 AS ensured;
SELECT * FROM obix.partitions('altered') ORDER BY from_sequence;
SELECT obix.alter_outbox('altered', partition_width => 1, premake => 5);
SELECT obix.ensure_partitions('altered') >= 0 AS ensured;
SELECT * FROM obix.partitions('altered') ORDER BY from_sequence;
SELECT obix.alter_outbox('altered', partition_width => 10, premake => 0);
SELECT obix.ensure_partitions('altered');
SELECT count(obix.publish('altered', to_jsonb(n))) FROM generate_series(1, 200) n;
SELECT count(*), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('altered');
SELECT count(*) AS left_in_default FROM altered_default;

-- a head that moves fast always finds some
SELECT obix.create_outbox('fast', 10, 1);
DO $$
BEGIN
    FOR i IN 1 .. 30 LOOP
        PERFORM obix.publish('fast', to_jsonb(n)) FROM generate_series(1, 10) n;
        COMMIT;
        PERFORM obix.ensure_partitions('fast');
        COMMIT;
    END LOOP;
END $$;
SELECT count(*) > 0 AS ready FROM obix.partitions('fast') WHERE from_sequence > 300;
SELECT count(*) FROM obix.read('fast');

-- rolled back, it can be done again
SELECT obix.alter_outbox('none_ahead', premake => 1);
BEGIN;
SELECT obix.ensure_partitions('none_ahead') >= 0 AS ensured;
ROLLBACK;
SELECT obix.ensure_partitions('none_ahead') >= 0 AS ensured;
SELECT * FROM obix.partitions('none_ahead') ORDER BY from_sequence;

-- recover_default: nothing to do
SELECT obix.recover_default('orders');

-- rows in one gap
BEGIN;
SELECT obix.create_outbox('stranded', 10, 0);
INSERT INTO stranded (payload) SELECT to_jsonb(n) FROM generate_series(1, 34) n;
SELECT tableoid::regclass AS partition, count(*) FROM stranded GROUP BY 1 ORDER BY min(sequence);
SELECT obix.recover_default('stranded');
SELECT tableoid::regclass AS partition, count(*) FROM stranded GROUP BY 1 ORDER BY min(sequence);
SELECT * FROM obix.partitions('stranded') ORDER BY from_sequence;
SELECT obix.recover_default('stranded');
COMMIT;
SELECT count(*), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('stranded');
SELECT obix.publish('stranded', '35') IS NOT NULL AS published;
SELECT count(*) AS misplaced FROM stranded e JOIN obix.partitions('stranded') p ON p.partition = e.tableoid
WHERE e.sequence < p.from_sequence OR e.sequence >= p.to_sequence;
-- what has become a partition is one like the others, and so is the new DEFAULT
SELECT p.from_sequence, pg_get_expr(c.relpartbound, c.oid) AS bound, c.relowner = r.relowner AS same_owner,
       c.reloptions IS NOT DISTINCT FROM d.reloptions AS same_options, i.indisprimary AND i.indisvalid AS primary_key,
       (SELECT inhparent FROM pg_inherits WHERE inhrelid = i.indexrelid)::regclass AS part_of,
       (SELECT count(*) FROM pg_constraint WHERE conrelid = c.oid AND contype = 'c') AS checks,
       (SELECT string_agg(tgname, ', ' ORDER BY tgname) FROM pg_trigger WHERE tgrelid = c.oid) AS triggers
FROM obix.partitions('stranded') p
     JOIN pg_class c ON c.oid = p.partition
     JOIN pg_class r ON r.oid = 'stranded'::regclass
     JOIN pg_class d ON d.oid = 'stranded_p0'::regclass
     LEFT JOIN pg_index i ON i.indrelid = c.oid
WHERE p.from_sequence IS NULL OR p.from_sequence < 20
ORDER BY p.from_sequence;

-- rows in two gaps, most of them in the second, then most of them in the first
BEGIN;
SELECT obix.create_outbox('gaps', 10, 0);
INSERT INTO gaps (payload) SELECT to_jsonb(n) FROM generate_series(1, 14) n;
SELECT count(obix.next_sequence('gaps')) FROM generate_series(15, 29);
CREATE TABLE gaps_high (LIKE gaps INCLUDING ALL);
ALTER TABLE gaps ATTACH PARTITION gaps_high FOR VALUES FROM (30) TO (40);
INSERT INTO gaps (payload) SELECT to_jsonb(n) FROM generate_series(30, 62) n;
SELECT tableoid::regclass AS partition, count(*) FROM gaps GROUP BY 1 ORDER BY min(sequence);
SELECT obix.recover_default('gaps');
SELECT count(*) AS left_in_default FROM gaps_default;
SELECT from_sequence, to_sequence, (SELECT count(*) FROM gaps e WHERE e.tableoid = p.partition) AS events
FROM obix.partitions('gaps') p ORDER BY from_sequence;
SELECT count(*) AS misplaced FROM gaps e JOIN obix.partitions('gaps') p ON p.partition = e.tableoid
WHERE e.sequence < p.from_sequence OR e.sequence >= p.to_sequence;
COMMIT;
SELECT obix.fill_gaps('gaps') >= 0 AS filled;
SELECT obix.recover_default('gaps') >= 0 AS recovered;
SELECT count(*), count(payload), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('gaps');
SELECT count(*) AS left_in_default FROM gaps_default;
BEGIN;
SELECT obix.create_outbox('more_gaps', 10, 0);
INSERT INTO more_gaps (payload) SELECT to_jsonb(n) FROM generate_series(1, 29) n;
CREATE TABLE more_gaps_high (LIKE more_gaps INCLUDING ALL);
ALTER TABLE more_gaps ATTACH PARTITION more_gaps_high FOR VALUES FROM (30) TO (40);
INSERT INTO more_gaps (payload) SELECT to_jsonb(n) FROM generate_series(30, 43) n;
SELECT tableoid::regclass AS partition, count(*) FROM more_gaps GROUP BY 1 ORDER BY min(sequence);
SELECT obix.recover_default('more_gaps');
SELECT count(*) AS left_in_default FROM more_gaps_default;
COMMIT;
SELECT count(*), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('more_gaps');

-- rolled back, it can be done again
BEGIN;
SELECT obix.create_outbox('again', 10, 0);
INSERT INTO again (payload) SELECT to_jsonb(n) FROM generate_series(1, 34) n;
SAVEPOINT a;
SELECT obix.recover_default('again');
ROLLBACK TO a;
SELECT count(*) FROM again_default;
SELECT obix.recover_default('again');
SELECT count(*) FROM again_default;
COMMIT;
SELECT count(*) FROM obix.read('again');

-- the next partitions follow what was recovered without a gap
SELECT obix.alter_outbox('again', premake => 2);
SELECT obix.ensure_partitions('again') >= 0 AS ensured;
SELECT from_sequence, to_sequence, to_sequence - from_sequence AS width FROM obix.partitions('again') ORDER BY from_sequence;

-- nothing is scanned, however many rows there are in DEFAULT: neither to attach
-- another partition, nor to make it one itself
BEGIN;
SELECT obix.create_outbox('unscanned', 10, 0);
INSERT INTO unscanned (payload) SELECT to_jsonb(n) FROM generate_series(1, 5000) n;
SELECT obix.alter_outbox('unscanned', premake => 2);
CREATE VIEW scans AS SELECT pg_stat_get_xact_numscans(oid) AS scans FROM pg_class WHERE oid = 'unscanned_default'::regclass::oid;
SELECT scans AS before FROM scans \gset
SELECT obix.ensure_partitions('unscanned') >= 2 AS ensured;
SELECT scans - :before AS scans FROM scans;
SELECT obix.recover_default('unscanned');
SELECT scans - :before AS scans FROM scans;
SELECT count(*) FROM unscanned_p10;
SELECT scans - :before AS counted FROM scans;
SELECT p.from_sequence, count(*) FROM unscanned e JOIN obix.partitions('unscanned') p ON p.partition = e.tableoid GROUP BY 1 ORDER BY 1;
DROP VIEW scans;
COMMIT;

-- long names: recovered, and numbered where they had to be cut
DO $$
DECLARE
    name text;
    outbox regclass;
BEGIN
    FOREACH name IN ARRAY ARRAY[repeat('l', 50), repeat('l', 56), repeat('l', 63), repeat('ü', 31), 'x' || repeat('ü', 31), repeat('L.%" ', 12)] LOOP
        outbox := obix.create_outbox(quote_ident(name), 10, 0);
        EXECUTE format('INSERT INTO %s (payload) SELECT to_jsonb(n) FROM generate_series(1, 34) n', outbox);
        PERFORM obix.recover_default(outbox);
        PERFORM obix.alter_outbox(outbox, premake => 3);
        PERFORM obix.ensure_partitions(outbox);
        EXECUTE format('INSERT INTO %s (payload) SELECT to_jsonb(n) FROM generate_series(35, 120) n', outbox);
        PERFORM obix.recover_default(outbox);
    END LOOP;
END $$;
SELECT left(o.outbox::text, 2) AS outbox, octet_length(c.relname) AS length, count(*) > 6 AS partitions, max(octet_length(l.relname)) <= 63 AS fit,
       (SELECT count(*) FROM obix.read(o.outbox)) AS events
FROM obix.outbox o JOIN pg_class c ON c.oid = o.outbox, LATERAL obix.partitions(o.outbox) p JOIN pg_class l ON l.oid = p.partition
WHERE octet_length(c.relname) >= 50 GROUP BY o.outbox, c.relname ORDER BY c.relname COLLATE "C";

-- large payloads move with the partition, TOAST and all
BEGIN;
SELECT obix.create_outbox('toasted', 2, 0);
INSERT INTO toasted (payload) SELECT to_jsonb(string_agg(md5(n || ':' || i), '')) FROM generate_series(1, 5) n, generate_series(1, 2000) i GROUP BY n ORDER BY n;
SELECT obix.recover_default('toasted');
COMMIT;
SELECT sequence, length(payload #>> '{}') FROM obix.read('toasted') ORDER BY sequence;

-- what the owner adds to the parent is carried to new partitions and to a new DEFAULT
SELECT obix.create_outbox('dressed', 10, 1);
CREATE INDEX dressed_key ON dressed (key) INCLUDE (type);
CREATE INDEX dressed_amount ON dressed ((payload ->> 'amount')) WHERE type = 'paid';
ALTER TABLE dressed ADD CONSTRAINT amount CHECK (payload IS NULL OR payload ? 'amount');
ALTER TABLE dressed ALTER COLUMN headers SET DEFAULT '{}';
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER audit AFTER UPDATE ON dressed FOR EACH ROW EXECUTE FUNCTION nothing();
SELECT count(obix.publish('dressed', '{"amount": 1}')) FROM generate_series(1, 39) n;
SELECT obix.recover_default('dressed') >= 0 AS recovered;
SELECT obix.ensure_partitions('dressed') >= 0 AS ensured;
SELECT count(*) AS left_in_default FROM dressed_default;
-- per partition: indexes, of which attached to those of the parent; checks; triggers
SELECT DISTINCT (SELECT count(*) FROM pg_index i WHERE i.indrelid = p.partition) AS indexes,
       (SELECT count(*) FROM pg_index i JOIN pg_inherits h ON h.inhrelid = i.indexrelid WHERE i.indrelid = p.partition) AS attached,
       (SELECT string_agg(pg_get_constraintdef(oid), '; ') FROM pg_constraint c WHERE c.conrelid = p.partition AND contype = 'c') AS checks,
       (SELECT string_agg(tgname, ', ' ORDER BY tgname) FROM pg_trigger t WHERE t.tgrelid = p.partition) AS triggers
FROM obix.partitions('dressed') p;
\set VERBOSITY sqlstate
INSERT INTO dressed (payload) VALUES ('{}');
\set VERBOSITY default

-- owner, tablespace and persistence follow the parent
CREATE ROLE regress_obix_maker;
CREATE ROLE regress_obix_member IN ROLE regress_obix_maker;
CREATE ROLE regress_obix_stranger;
GRANT USAGE, CREATE ON SCHEMA obix_partitions TO regress_obix_maker;
GRANT USAGE ON SCHEMA obix_partitions TO regress_obix_stranger;
SET allow_in_place_tablespaces = on;
CREATE TABLESPACE regress_obix_space LOCATION '';
GRANT CREATE ON TABLESPACE regress_obix_space TO regress_obix_maker;
SELECT obix.create_outbox('owned', 10, 1);
ALTER TABLE owned OWNER TO regress_obix_maker;
ALTER TABLE owned SET TABLESPACE regress_obix_space;
SELECT obix.alter_outbox('owned', premake => 2);
SELECT obix.ensure_partitions('owned') >= 0 AS ensured;
SELECT p.from_sequence, c.relowner::regrole, t.spcname
FROM obix.partitions('owned') p JOIN pg_class c ON c.oid = p.partition LEFT JOIN pg_tablespace t ON t.oid = c.reltablespace
WHERE p.from_sequence >= 20 ORDER BY p.from_sequence;
-- whoever calls
SET ROLE regress_obix_member;
SELECT obix.alter_outbox('owned', premake => 3);
SELECT obix.ensure_partitions('owned') >= 0 AS ensured;
RESET ROLE;
SELECT p.from_sequence, c.relowner::regrole, t.spcname
FROM obix.partitions('owned') p JOIN pg_class c ON c.oid = p.partition LEFT JOIN pg_tablespace t ON t.oid = c.reltablespace
WHERE p.from_sequence >= 20 ORDER BY p.from_sequence;

-- all outboxes that the caller owns, and no others
SET ROLE regress_obix_maker;
SELECT obix.create_outbox('mine', 10, 1);
SELECT obix.alter_outbox('mine', premake => 2);
SELECT obix.ensure_partitions() >= 0 AS ensured;
SELECT obix.ensure_partitions(NULL);
SELECT count(*) FROM obix.partitions('mine') WHERE from_sequence IS NOT NULL;
RESET ROLE;
GRANT ALL ON owned TO regress_obix_stranger;
SET ROLE regress_obix_stranger;
SELECT obix.ensure_partitions();
SELECT obix.ensure_partitions('owned');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.recover_default('owned');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
-- an owner who may not create in the schema any more is told so
SET ROLE regress_obix_maker;
SELECT obix.publish('owned', '1') IS NOT NULL AS published;
RESET ROLE;
REVOKE CREATE ON SCHEMA obix_partitions FROM regress_obix_maker;
SET ROLE regress_obix_maker;
SELECT obix.alter_outbox('owned', premake => 4);
\set VERBOSITY sqlstate
SELECT obix.ensure_partitions('owned');
\set VERBOSITY default
SELECT obix.publish('owned', '2') IS NOT NULL AS published;
RESET ROLE;
SELECT sequence, payload FROM obix.read('owned') ORDER BY sequence;

-- what shadows functions, operators or tables in the caller's schemas is not used
CREATE SCHEMA obix_partitions_evil;
CREATE FUNCTION obix_partitions_evil.int8ge(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'shadowed'; END $$;
CREATE OPERATOR obix_partitions_evil.>= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = obix_partitions_evil.int8ge);
CREATE TABLE obix_partitions_evil.pg_class (oid oid);
SET search_path = obix_partitions_evil, pg_catalog, obix_partitions;
SELECT obix.create_outbox('obix_partitions.unshadowed', 10, 1);
INSERT INTO obix_partitions.unshadowed (payload) SELECT '1' FROM pg_catalog.generate_series(1, 45);
SELECT obix.fill_gaps('obix_partitions.unshadowed');
SELECT obix.recover_default('obix_partitions.unshadowed') OPERATOR(pg_catalog.>=) 0 AS recovered;
SELECT obix.ensure_partitions('obix_partitions.unshadowed') OPERATOR(pg_catalog.>=) 0 AS ensured;
SELECT pg_catalog.count(*) FROM obix.read('obix_partitions.unshadowed');
SET search_path = obix_partitions, public;
DROP SCHEMA obix_partitions_evil CASCADE;

-- names: one that is taken is left alone
BEGIN;
SELECT obix.create_outbox('taken', 10, 1);
CREATE TABLE taken_p20 (x int);
SELECT obix.alter_outbox('taken', premake => 2);
SELECT obix.ensure_partitions('taken');
SELECT from_sequence, to_sequence, partition = 'taken_p20'::regclass AS taken FROM obix.partitions('taken') ORDER BY from_sequence;
INSERT INTO taken (payload) SELECT to_jsonb(n) FROM generate_series(1, 45) n;
CREATE TABLE taken_p30 (x int);
SELECT obix.recover_default('taken');
COMMIT;
SELECT count(*) FROM obix.read('taken');

-- a partition of one's own where the next would be: nothing fails, nothing is hidden
SELECT obix.create_outbox('custom', 10, 1);
CREATE TABLE custom_wide (LIKE custom INCLUDING ALL);
ALTER TABLE custom ATTACH PARTITION custom_wide FOR VALUES FROM (25) TO (75);
SELECT count(obix.publish('custom', to_jsonb(n))) FROM generate_series(1, 80) n;
SELECT obix.recover_default('custom') >= 0 AS recovered;
SELECT obix.ensure_partitions('custom') >= 0 AS ensured;
SELECT count(*), bool_and(payload::bigint = sequence) AS right_order FROM obix.read('custom');
SELECT count(*) AS left_in_default FROM custom_default;
SELECT count(*) AS misplaced FROM custom e JOIN obix.partitions('custom') p ON p.partition = e.tableoid
WHERE e.sequence < p.from_sequence OR e.sequence >= p.to_sequence;

-- without a DEFAULT partition
SELECT obix.create_outbox('bare', 10, 1);
DROP TABLE bare_default;
SELECT obix.recover_default('bare');
SELECT obix.alter_outbox('bare', premake => 2);
SELECT obix.ensure_partitions('bare') >= 0 AS ensured;
SELECT * FROM obix.partitions('bare') ORDER BY from_sequence;

-- arguments and circumstances
SELECT obix.ensure_partitions('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ensure_partitions('orders_p0');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.recover_default('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.recover_default(NULL) IS NULL AS nothing;
SELECT * FROM obix.partitions('obix.outbox');
\echo :LAST_ERROR_SQLSTATE
BEGIN READ ONLY;
SELECT obix.ensure_partitions('orders');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN READ ONLY;
SELECT obix.recover_default('orders');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- while a cursor of this session has the outbox open
BEGIN;
SELECT obix.create_outbox('opened', 10, 0);
INSERT INTO opened (payload) SELECT to_jsonb(n) FROM generate_series(1, 34) n;
DECLARE c CURSOR FOR SELECT sequence FROM opened ORDER BY sequence;
FETCH 1 FROM c;
SAVEPOINT a;
\set VERBOSITY sqlstate
SELECT obix.recover_default('opened');
\set VERBOSITY default
ROLLBACK TO a;
FETCH 1 FROM c;
COMMIT;

DROP SCHEMA obix_partitions CASCADE;
DROP TABLESPACE regress_obix_space;
DROP ROLE regress_obix_member, regress_obix_maker, regress_obix_stranger;
