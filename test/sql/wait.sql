--
-- CALL obix.wait: what one session shows.  Waking is in the specs.
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
CREATE SCHEMA obix_wait;
SET search_path = obix_wait, public;
SELECT obix.create_outbox('orders', 10, 2);
SELECT count(obix.publish('orders', to_jsonb(n))) FROM generate_series(1, 3) n;

-- at once, where there is something to read
CALL obix.wait('orders', 0, '1 h');
CALL obix.wait('orders', after => 2, timeout => '1 h');
CALL obix.wait('orders', 2);
-- after the timeout, where there is not
CALL obix.wait('orders', 3, '1 ms');
CALL obix.wait('orders', 3, '0');
SELECT clock_timestamp() AS before \gset
CALL obix.wait('orders', 3, '200 ms');
SELECT clock_timestamp() - :'before'::timestamptz >= '200 ms' AS waited;

-- in a transaction block, in a DO block, in a procedure
BEGIN;
CALL obix.wait('orders', 2, '1 h');
SELECT 1 AS query;
CALL obix.wait('orders', 2, '1 h');
CALL obix.wait('orders', 3, '1 ms');
COMMIT;
BEGIN READ ONLY;
CALL obix.wait('orders', 2, '1 h');
CALL obix.wait('orders', 3, '1 ms');
COMMIT;
DO $$ BEGIN CALL obix.wait('orders', 2, '1 h'); CALL obix.wait('orders', 3, '1 ms'); END $$;
CREATE PROCEDURE follow(INOUT reached bigint) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. 3 LOOP
        CALL obix.wait('orders', reached, '1 ms');
        SELECT coalesce(max(sequence), reached) INTO reached FROM obix.read('orders', reached, 2);
        COMMIT;
    END LOOP;
END $$;
CALL follow(0);
-- in one go with a read
CALL obix.wait('orders', 2, '1 h')\; SELECT sequence, payload FROM obix.read('orders', 2) ORDER BY sequence;
-- not where a snapshot would be held: under REPEATABLE READ CALL itself takes one
BEGIN ISOLATION LEVEL REPEATABLE READ;
CALL obix.wait('orders', 2, '1 h');
CALL obix.wait('orders', 3, '1 h');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
CALL obix.wait('orders', 3, '1 h');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT 1 AS query;
CALL obix.wait('orders', 3, '1 h');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
BEGIN;
DECLARE c CURSOR FOR SELECT 1 UNION ALL SELECT 2;
FETCH 1 FROM c;
CALL obix.wait('orders', 3, '1 h');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
CREATE FUNCTION waiting() RETURNS void LANGUAGE plpgsql AS $$ BEGIN CALL obix.wait('orders', 3, '1 h'); END $$;
SELECT waiting();
\echo :LAST_ERROR_SQLSTATE
DO $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT * FROM generate_series(1, 2) LOOP
        CALL obix.wait('orders', 3, '1 h');
    END LOOP;
END $$;
\echo :LAST_ERROR_SQLSTATE
SELECT obix.wait('orders', 3, '1 h');
\echo :LAST_ERROR_SQLSTATE

-- one's own events are not there before the commit
BEGIN;
SELECT obix.publish('orders', '4') IS NOT NULL AS published;
CALL obix.wait('orders', 3, '1 ms');
INSERT INTO orders (payload) VALUES ('5') RETURNING sequence;
CALL obix.wait('orders', 3, '1 ms');
COMMIT;
CALL obix.wait('orders', 4, '1 h');

-- arguments
CALL obix.wait(NULL, 0, '1 h');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders', NULL, '1 h');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders', 0, NULL);
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders', -1, '1 h');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders', 0, '-1 s');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders', 0, '1000000 years');
CALL obix.wait('orders', 6, '1 h');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('obix.outbox', 0, '1 h');
\echo :LAST_ERROR_SQLSTATE
CALL obix.wait('orders_p0', 0, '1 h');
\echo :LAST_ERROR_SQLSTATE

-- privileges
CREATE ROLE regress_obix_waiter;
GRANT USAGE ON SCHEMA obix_wait TO regress_obix_waiter;
SET ROLE regress_obix_waiter;
CALL obix.wait('orders', 0, '1 h');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
GRANT SELECT ON orders TO regress_obix_waiter;
SET ROLE regress_obix_waiter;
CALL obix.wait('orders', 0, '1 h');
RESET ROLE;

-- statement_timeout ends it
SET statement_timeout = '50 ms';
CALL obix.wait('orders', 5, '1 h');
\echo :LAST_ERROR_SQLSTATE
RESET statement_timeout;

DROP SCHEMA obix_wait CASCADE;
DROP ROLE regress_obix_waiter;
