--
-- obix.outbox_status and obix.partition_status
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_status;
SET search_path = obix_status, public;
SELECT count(*) FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');
SELECT count(*) FROM obix.partition_status WHERE outbox::text IN ('orders', 'strays');
SELECT obix.create_outbox('orders', 1000, 2);

-- untouched, and read without making anything
SELECT outbox, head, frontier, high_water_mark, resolved, suspect_from, in_flight, frontier_pid, frontier_xact_start,
       undecided, undecided_gids, partition_width, premake, partitions, runway, stranded
FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');

-- with events
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 5) n;
SELECT outbox, head, frontier, high_water_mark, suspect_from, in_flight, frontier_pid, partitions, runway, stranded
FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');

-- in flight: who holds the frontier; what is only buffered holds nothing
BEGIN;
SELECT obix.publish('orders', '"buffered"') IS NOT NULL AS published;
SELECT head, frontier, high_water_mark, in_flight, frontier_pid FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');
INSERT INTO orders (payload) VALUES ('"in flight"');
SELECT head, frontier, high_water_mark, in_flight, frontier_pid = pg_backend_pid() AS mine,
       frontier_xact_start = now() AS since
FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');
ROLLBACK;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT head, frontier, high_water_mark, suspect_from, in_flight, frontier_pid FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');

-- stranded rows and runway, in a transaction that no worker sees
BEGIN;
SELECT obix.create_outbox('strays', 10, 0);
INSERT INTO strays (payload) SELECT to_jsonb(n) FROM generate_series(1, 25) n;
SELECT outbox, head, partitions, runway, stranded FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays') ORDER BY outbox::text;
SELECT obix.recover_default('strays');
SELECT outbox, head, partitions, runway, stranded FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays') ORDER BY outbox::text;
ROLLBACK;

-- partitions
SELECT outbox, partition, from_sequence, to_sequence, estimated_rows >= -1 AS estimated, total_bytes > 0 AS measured
FROM obix.partition_status WHERE outbox::text IN ('orders', 'strays') ORDER BY outbox::text, from_sequence;

-- after an ordinary round of maintenance there is nothing to report
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
SELECT undecided, undecided_gids, stranded, runway FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');

-- what is gone is not shown
BEGIN;
DROP TABLE orders;
SELECT count(*) FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');
ROLLBACK;
SELECT count(*) FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');
DROP TABLE orders;
SELECT count(*) FROM obix.outbox_status WHERE outbox::text IN ('orders', 'strays');
SELECT count(*) FROM obix.partition_status WHERE outbox::text IN ('orders', 'strays');

-- every object of the extension and every column of its tables and views is commented
SELECT pg_describe_object(classid, objid, 0) AS not_commented
FROM pg_depend d
WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
      AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'obix')
      AND obj_description(objid, classid::regclass::text) IS NULL
      AND NOT (classid = 'pg_class'::regclass AND (SELECT relkind = 'S' FROM pg_class WHERE oid = objid))
      AND NOT (classid = 'pg_type'::regclass AND (SELECT typrelid <> 0 AND typname IN (SELECT relname FROM pg_class WHERE relkind IN ('r', 'v')) OR typelem <> 0
                                                  FROM pg_type WHERE oid = objid))
ORDER BY 1;
SELECT a.attrelid::regclass, a.attname AS not_commented
FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.objid AND d.classid = 'pg_class'::regclass
WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
      AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'obix')
      AND a.attnum > 0 AND (SELECT relkind <> 'S' FROM pg_class WHERE oid = a.attrelid)
      AND col_description(a.attrelid, a.attnum) IS NULL
ORDER BY 1, 2;

-- one that was dropped after the view has listed it
SELECT head, worker_pid FROM obix.outbox_state(1);
SELECT * FROM obix.partitions(1);

-- settings
SELECT name, boot_val, unit, vartype, context, min_val, max_val FROM pg_settings
WHERE name ~ '^obix\.' ORDER BY name;
SELECT name FROM pg_settings WHERE name ~ '^obix\.' AND (short_desc IS NULL OR short_desc = '') ORDER BY name;
SET obix.no_such_setting = 1;
\echo :LAST_ERROR_SQLSTATE

DROP SCHEMA obix_status CASCADE;
