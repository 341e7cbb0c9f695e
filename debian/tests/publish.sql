-- What debian/tests/publish and ./dev deb run in an empty database: a mistake
-- in what was installed ends it with an error.

CREATE EXTENSION obix;
SELECT obix.library_version();
CREATE SCHEMA app;
SELECT obix.create_outbox('app.orders', partition_width => 1000, premake => 2);

-- publish: events of a transaction that rolls back do not exist
BEGIN;
SELECT obix.publish('app.orders', '{"amount": 1}', type => 'lost');
ROLLBACK;
BEGIN;
SELECT obix.publish('app.orders', jsonb_build_object('amount', amount),
					type => 'paid', key => 'account-' || amount % 3)
FROM generate_series(1, 2500) amount;
COMMIT;

-- read: all of them, in order and without a gap
DO $$
BEGIN
	ASSERT obix.high_water_mark('app.orders') = 2500, 'high-water mark';
	ASSERT (SELECT array_agg(sequence) = array_agg(amount ORDER BY amount)
			FROM (SELECT sequence, (payload ->> 'amount')::bigint amount
				  FROM obix.read('app.orders', after => 0, max_events => 10000)) event),
		'events in order';
	ASSERT (SELECT stranded = 0 FROM obix.outbox_status), 'no stranded events';
END
$$;
CALL obix.wait('app.orders', after => 2499);

-- consume: what was acknowledged does not come again
SELECT obix.create_consumer('mail', 'app.orders');
CALL obix.wait_for('mail');
BEGIN;
SELECT count(*), max(sequence) FROM obix.fetch('mail', max_events => 100);
SELECT obix.ack('mail', 100);
COMMIT;
DO $$
BEGIN
	ASSERT (SELECT min(sequence) = 101 FROM obix.fetch('mail', max_events => 1)),
		'the event after the one acknowledged';
END
$$;

-- a handler: a dispatcher comes by itself, and calls it once for each event
CREATE TABLE app.account (key text PRIMARY KEY, amount bigint);
CREATE FUNCTION app.add_amount(event obix.event) RETURNS void
BEGIN ATOMIC
	INSERT INTO app.account VALUES (event.key, (event.payload ->> 'amount')::bigint)
	ON CONFLICT (key) DO UPDATE SET amount = account.amount + excluded.amount;
END;
SELECT obix.create_consumer('accounts', 'app.orders', handler => 'app.add_amount');
DO $$
BEGIN
	FOR attempt IN 1 .. 600 LOOP
		EXIT WHEN (SELECT lag_events = 0 FROM obix.consumer_status WHERE consumer = 'accounts');
		COMMIT;
		PERFORM pg_sleep(0.1);
	END LOOP;
	ASSERT (SELECT sum(amount) = 2500 * 2501 / 2 FROM app.account), 'sum of all amounts';
END
$$;

-- nothing is left of it
SELECT obix.drop_consumer('mail'), obix.drop_consumer('accounts');
DROP FUNCTION app.add_amount;
SELECT obix.drop_outbox('app.orders');
DROP EXTENSION obix;
DO $$
BEGIN
	ASSERT to_regnamespace('obix') IS NULL, 'the schema is gone';
	ASSERT (SELECT count(*) = 1 FROM pg_class WHERE relnamespace = 'app'::regnamespace AND relkind IN ('r', 'p')),
		'the tables are gone';
END
$$;
