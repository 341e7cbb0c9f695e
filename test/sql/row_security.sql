--
-- Row-level security.  What reads or writes without the rewriter refuses where
-- a policy applies to the caller; what readers are given is contiguous, always.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_rls;
CREATE ROLE regress_obix_owner;
CREATE ROLE regress_obix_user;
CREATE ROLE regress_obix_bypass BYPASSRLS;
GRANT USAGE ON SCHEMA obix_rls TO regress_obix_user, regress_obix_bypass;
GRANT USAGE, CREATE ON SCHEMA obix_rls TO regress_obix_owner;
SET search_path = obix_rls, public;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('orders', 100, 1);
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 6) n;
GRANT SELECT, INSERT ON orders TO regress_obix_user, regress_obix_bypass;
SET ROLE regress_obix_user;
SELECT obix.create_consumer('orders', 'orders', start_after => 0);

-- who is subject to it gets an error, plain SQL what the policies say
SET ROLE regress_obix_owner;
CREATE POLICY even ON orders USING (sequence % 2 = 0);
ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
SET ROLE regress_obix_user;
SELECT sequence FROM orders ORDER BY 1;
SELECT * FROM obix.read('orders');
SELECT obix.high_water_mark('orders');
CALL obix.wait('orders', 0, '1 h');
SELECT obix.publish('orders', '7');
SELECT * FROM obix.fetch('orders');
SELECT obix.ack('orders', 1);
SELECT obix.seek('orders', 1);
CALL obix.wait_for('orders', '1 h');
INSERT INTO orders (payload) VALUES ('7');
RESET ROLE;
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SET ROLE regress_obix_user;
-- how far everything is, but nothing of rows that may be hidden
SELECT high_water_mark FROM obix.outbox_status WHERE outbox = 'orders'::regclass;
SELECT "cursor", lag_events, lag FROM obix.consumer_status WHERE consumer = 'orders';
-- with row_security off that is an error as for any query
SET row_security = off;
SELECT * FROM obix.read('orders');
SELECT obix.publish('orders', '7');
RESET row_security;

-- the owner, those with BYPASSRLS and superusers are not; others still get all
SET ROLE regress_obix_owner;
SELECT count(*), max(sequence) FROM obix.read('orders');
SELECT obix.publish('orders', '7') IS NOT NULL AS published;
INSERT INTO orders (payload) VALUES ('8') RETURNING payload;
SET ROLE regress_obix_bypass;
SELECT count(*) FROM obix.read('orders');
SELECT obix.publish('orders', '9') IS NOT NULL AS published;
SELECT obix.create_consumer('all', 'orders', start_after => 0);
SELECT count(*) FROM obix.fetch('all');
SELECT obix.drop_consumer('all');
RESET ROLE;
SELECT obix.high_water_mark('orders');

-- forced, the owner is as well; maintenance goes on
ALTER TABLE orders FORCE ROW LEVEL SECURITY;
SET ROLE regress_obix_owner;
SELECT * FROM obix.read('orders');
SELECT obix.publish('orders', '9');
SELECT obix.next_sequence('orders') IS NOT NULL AS left_unused FROM generate_series(1, 3);
SELECT obix.fill_gaps('orders') >= 0 AS filled;
SELECT obix.alter_outbox('orders', 10, 3);
SELECT obix.ensure_partitions('orders') >= 0 AS ensured;
RESET ROLE;
SELECT obix.high_water_mark('orders') = max(sequence) AS filled FROM orders;
SELECT count(*) = max(sequence) AS contiguous FROM obix.read('orders');
SET ROLE regress_obix_owner;
ALTER TABLE orders NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY;

-- policies of a partition hold for those who name it, as for any partition
ALTER TABLE orders_p0 ENABLE ROW LEVEL SECURITY;
ALTER TABLE orders_p0 FORCE ROW LEVEL SECURITY;
SELECT count(*) FROM orders_p0;
SELECT count(*) = max(sequence) AS contiguous FROM obix.read('orders');
SELECT obix.publish('orders', '10') IS NOT NULL AS published;
SET ROLE regress_obix_user;
SELECT count(*) = max(sequence) AS contiguous FROM obix.read('orders');
SELECT count(*) > 9 AS fetched FROM obix.fetch('orders');
RESET ROLE;

-- the tables of obix: what it does itself is not subject to any policy
BEGIN;
ALTER TABLE obix.outbox ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE obix.consumer ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE obix.consumer_state ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE obix.parked_event ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
SET ROLE regress_obix_user;
SELECT count(*) FROM obix.consumer;
SELECT obix.ack('orders', 2);
SELECT obix.alter_consumer('orders', on_failure => 'dead_letter', max_attempts => 1);
SELECT obix.fail('orders', 3, 'three');
SELECT sequence, error FROM obix.dead_letter;
SELECT sequence FROM obix.fetch('orders', 1);
SELECT obix.publish('orders', '11') IS NOT NULL AS published;
SELECT "cursor" FROM obix.consumer_status WHERE consumer = 'orders';
RESET ROLE;
ROLLBACK;

DROP SCHEMA obix_rls CASCADE;
DROP ROLE regress_obix_owner, regress_obix_user, regress_obix_bypass;
