--
-- Ordinary table privileges govern: INSERT publishes, SELECT reads, ownership
-- administers.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_privileges;
CREATE ROLE regress_obix_owner;
CREATE ROLE regress_obix_publisher;
CREATE ROLE regress_obix_reader;
CREATE ROLE regress_obix_nobody;
GRANT USAGE ON SCHEMA obix_privileges TO regress_obix_owner, regress_obix_publisher, regress_obix_reader, regress_obix_nobody;
GRANT CREATE ON SCHEMA obix_privileges TO regress_obix_owner;
SET search_path = obix_privileges, public;

-- an owner without any other right does everything
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('orders', 10, 1);
SELECT obix.publish('orders', '1') IS NOT NULL AS published;
INSERT INTO orders (payload) VALUES ('2');
SELECT sequence, payload FROM obix.read('orders') ORDER BY sequence;
CALL obix.wait('orders', 0, '1 h');
SELECT obix.high_water_mark('orders');
SELECT obix.alter_outbox('orders', 20, 2);
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
SELECT obix.next_sequence('orders');
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT obix.recover_default('orders');
SELECT outbox, head, high_water_mark, frontier FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
GRANT INSERT ON orders TO regress_obix_publisher;
GRANT SELECT ON orders TO regress_obix_reader;

-- INSERT publishes, also into partitions made later, and does not read
SET ROLE regress_obix_publisher;
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(4, 45) n;
INSERT INTO orders (payload) VALUES ('46');
SELECT obix.next_sequence('orders');
SELECT count(*) FROM obix.read('orders');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders', 0, '1 h');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.high_water_mark('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.ensure_partitions('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.recover_default('orders');
\echo :LAST_ERROR_SQLSTATE
UPDATE orders SET headers = NULL;
\echo :LAST_ERROR_SQLSTATE

-- SELECT reads, and does not publish
RESET ROLE;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SET ROLE regress_obix_reader;
SELECT count(*), min(sequence), max(sequence) FROM obix.read('orders');
SELECT obix.high_water_mark('orders');
CALL obix.wait('orders', 46, '1 h');
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.next_sequence('orders');
\echo :LAST_ERROR_SQLSTATE
INSERT INTO orders (payload) VALUES ('1');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.fill_gaps('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.alter_outbox('orders', 30);
\echo :LAST_ERROR_SQLSTATE
SELECT obix.drop_outbox('orders');
\echo :LAST_ERROR_SQLSTATE

-- nothing gives nothing; everybody sees what outboxes there are, not how far they are
SET ROLE regress_obix_nobody;
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.next_sequence('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT obix.high_water_mark('orders');
\echo :LAST_ERROR_SQLSTATE
SELECT outbox, partition_width, premake FROM obix.outbox ORDER BY outbox::text;
SELECT outbox, head, high_water_mark, partition_width, premake FROM obix.outbox_status ORDER BY outbox::text;
SELECT count(*) > 0 AS partitions FROM obix.partition_status;
-- and nobody writes the registry
INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES ('orders', 1, 1);
\echo :LAST_ERROR_SQLSTATE
UPDATE obix.outbox SET resolved = 0;
\echo :LAST_ERROR_SQLSTATE
DELETE FROM obix.outbox;
\echo :LAST_ERROR_SQLSTATE
SET ROLE regress_obix_owner;
UPDATE obix.outbox SET resolved = 0;
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;

-- a privilege on some columns only is not enough: an event is written and read whole
GRANT INSERT (payload), SELECT (payload) ON orders TO regress_obix_nobody;
SET ROLE regress_obix_nobody;
SELECT obix.publish('orders', '1');
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM obix.read('orders');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
REVOKE ALL (payload) ON orders FROM regress_obix_nobody;

-- lent by a function that runs as its owner
CREATE FUNCTION order_paid(amount int) RETURNS uuid LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT obix.publish('obix_privileges.orders', to_jsonb(amount)) $$;
ALTER FUNCTION order_paid OWNER TO regress_obix_publisher;
SET ROLE regress_obix_nobody;
SELECT order_paid(48) IS NOT NULL AS paid;
RESET ROLE;
SELECT sequence, payload FROM obix.read('orders', after => 47) ORDER BY sequence;

-- taken away between publish and commit: what was allowed then is done
SET ROLE regress_obix_publisher;
BEGIN;
SELECT obix.publish('orders', '49') IS NOT NULL AS published;
RESET ROLE;
REVOKE INSERT ON orders FROM regress_obix_publisher;
COMMIT;
SET ROLE regress_obix_publisher;
SELECT obix.publish('orders', '50');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
SELECT sequence, payload FROM obix.read('orders', after => 48) ORDER BY sequence;

-- nothing in a partition is reachable but through the parent
SELECT p.partition, c.relacl FROM obix.partitions('orders') p JOIN pg_class c ON c.oid = p.partition WHERE c.relacl IS NOT NULL;
SET ROLE regress_obix_reader;
SELECT count(*) FROM orders_p0;
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;

-- a new owner administers, the old one does not
CREATE ROLE regress_obix_heir;
GRANT USAGE, CREATE ON SCHEMA obix_privileges TO regress_obix_heir;
ALTER TABLE orders OWNER TO regress_obix_heir;
SET ROLE regress_obix_owner;
SELECT obix.alter_outbox('orders', 30);
\echo :LAST_ERROR_SQLSTATE
SET ROLE regress_obix_heir;
SELECT obix.alter_outbox('orders', premake => 4);
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
-- also where partitions, DEFAULT among them, still belong to the old one
BEGIN;
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(50, 300) n;
COMMIT;
SELECT obix.recover_default('orders') >= 0 AS recovered;
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
RESET ROLE;
SELECT count(*) AS left_in_default FROM orders_default;
SET ROLE regress_obix_heir;
SELECT count(*), min(sequence), max(sequence) FROM obix.read('orders');
SELECT obix.drop_outbox('orders');
RESET ROLE;

-- maintenance lends its rights to nobody: what hangs on the table runs as its owner
SET ROLE regress_obix_owner;
CREATE FUNCTION spy(jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF current_user <> 'regress_obix_owner' THEN
        RAISE EXCEPTION 'ran as %', current_user;
    END IF;
    RETURN true;
END $$;
SELECT obix.create_outbox('spied', 10, 1);
CREATE INDEX ON spied (spy(payload));
SELECT obix.publish('spied', '1') IS NOT NULL AS published;
SELECT obix.next_sequence('spied');
RESET ROLE;
SELECT obix.fill_gaps('spied') >= 0 AS filled;
SELECT obix.ensure_partitions('spied') >= 0 AS ensured;
SELECT obix.recover_default('spied') >= 0 AS recovered;
SELECT sequence, payload FROM obix.read('spied') ORDER BY sequence;

DROP SCHEMA obix_privileges CASCADE;
DROP ROLE regress_obix_owner, regress_obix_publisher, regress_obix_reader, regress_obix_nobody, regress_obix_heir;
