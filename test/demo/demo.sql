/*
 * demo.sql
 *	  What the demo works with: tables of an application that lists packages,
 *	  and the procedures that its sessions and its reader call.
 */
CREATE SCHEMA demo;

-- the package index, as it was read
CREATE TABLE demo.record (
	n integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	record jsonb NOT NULL
);

-- business transactions to run: each takes some records, some fail once
CREATE TABLE demo.job (
	job integer PRIMARY KEY,
	first integer NOT NULL,
	last integer NOT NULL,
	fails boolean NOT NULL
);

-- what they write: ordinary tables
CREATE TABLE demo.package (
	event uuid PRIMARY KEY,
	job integer NOT NULL,
	n integer NOT NULL,
	name text NOT NULL,
	version text NOT NULL
);

CREATE TABLE demo.shelf (
	shelf integer PRIMARY KEY,
	packages integer NOT NULL
);

INSERT INTO demo.shelf SELECT shelf, 0 FROM generate_series(0, 6) shelf;

CREATE TABLE demo.shelf_log (
	job integer PRIMARY KEY,
	shelf integer NOT NULL,
	packages integer NOT NULL
);

CREATE TABLE demo.note (
	event uuid PRIMARY KEY,
	outbox regclass NOT NULL,
	note jsonb NOT NULL
);

-- what transactions had published that then rolled back
CREATE TABLE demo.rolled_back (
	event uuid PRIMARY KEY
);

-- sequences that plain INSERTs had drawn, and then rolled back
CREATE TABLE demo.hole (
	sequence bigint PRIMARY KEY
);

-- what a reader was given, in this order
CREATE UNLOGGED TABLE demo.delivered (
	outbox regclass,
	place bigint,
	sequence bigint NOT NULL,
	event uuid NOT NULL,
	payload_hash bigint,
	PRIMARY KEY (outbox, place)
);

-- what an application fetched, in this order
CREATE TABLE demo.fetched (
	place bigint GENERATED ALWAYS AS IDENTITY,
	sequence bigint NOT NULL,
	event uuid PRIMARY KEY
);

-- what handlers keep: how many packages each section has
CREATE TABLE demo.section (
	section text PRIMARY KEY,
	packages bigint NOT NULL
);

-- partitions of 10,000 sequences, so that there is something to see
SELECT obix.create_outbox('demo.events', partition_width => 10000, premake => 3);

CREATE PROCEDURE demo.make_jobs()
LANGUAGE plpgsql
AS $$
DECLARE
	records integer := (SELECT max(n) FROM demo.record);
	job integer := 0;
	first integer := 1;
	last integer;
BEGIN
	PERFORM setseed(0.5);
	WHILE first <= records LOOP
		last := least(first + floor(400 * random() ^ 3)::integer, records);
		INSERT INTO demo.job VALUES (job, first, last, job % 10 = 9);
		job := job + 1;
		first := last + 1;
	END LOOP;
END
$$;

-- One business transaction, up to its end: list packages, publish that, and
-- count them on a shelf, for which it may have to wait for another session.
CREATE FUNCTION demo.run_job(work demo.job)
RETURNS uuid[]
LANGUAGE plpgsql
AS $$
DECLARE
	events uuid[];
BEGIN
	WITH published AS (
		SELECT r.n, r.record,
			   obix.publish('demo.events', r.record, type => 'package.listed', key => r.record ->> 'Package',
							headers => jsonb_build_object('job', work.job)) AS event
		FROM demo.record r
		WHERE r.n BETWEEN work.first AND work.last
		ORDER BY r.n
	), listed AS (
		INSERT INTO demo.package
		SELECT event, work.job, n, record ->> 'Package', record ->> 'Version' FROM published
		RETURNING event
	)
	SELECT array_agg(event) INTO events FROM listed;

	WITH counted AS (
		UPDATE demo.shelf SET packages = packages + cardinality(events)
		WHERE shelf = work.job % 7
		RETURNING shelf, packages
	)
	INSERT INTO demo.shelf_log SELECT work.job, shelf, packages FROM counted;

	RETURN events;
END
$$;

-- One session's share of the jobs.  A job that fails is rolled back after all
-- its work is done, and then tried again.
CREATE PROCEDURE demo.run_jobs(session integer, sessions integer)
LANGUAGE plpgsql
AS $$
DECLARE
	work demo.job;
	events uuid[];
BEGIN
	FOR work IN SELECT * FROM demo.job WHERE job % sessions = session ORDER BY job LOOP
		IF work.fails THEN
			events := demo.run_job(work);
			ROLLBACK;
			INSERT INTO demo.rolled_back SELECT unnest(events);
			COMMIT;
		END IF;
		PERFORM demo.run_job(work);
		COMMIT;
	END LOOP;
END
$$;

-- An application that consumes: fetch, do something, acknowledge, and that in
-- one transaction, up to an event of type "end".
CREATE PROCEDURE demo.follow(consumer text)
LANGUAGE plpgsql
AS $$
DECLARE
	event obix.event;
	delivered bigint := 0;
	turns integer := 0;
	delay interval;
BEGIN
	LOOP
		CALL obix.wait_for(consumer);
		event := NULL;
		FOR event IN SELECT * FROM obix.fetch(consumer, max_events => 500) LOOP
			EXIT WHEN event.type = 'end';
			INSERT INTO demo.fetched (sequence, event) VALUES (event.sequence, event.id);
			delivered := delivered + 1;
		END LOOP;
		CONTINUE WHEN event IS NULL;
		PERFORM obix.ack(consumer, event.sequence);
		COMMIT;
		turns := turns + 1;
		EXIT WHEN event.type = 'end';
	END LOOP;

	delay := clock_timestamp() - event.recorded_at;
	RAISE INFO 'An application fetched % of them meanwhile, in % turns; it was done % ms after the last',
		to_char(delivered, 'FM999,999,999'), turns, round(1000 * extract(epoch FROM delay), 1);
END
$$;

-- Handlers.  They name their table without a schema, so that it can be rebuilt.
CREATE FUNCTION demo.count_package(event obix.event)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO section VALUES (coalesce(event.payload ->> 'Section', 'none'), 1)
	ON CONFLICT (section) DO UPDATE SET packages = section.packages + 1;
END
$$;

CREATE FUNCTION demo.count_packages(events obix.event[])
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO section
	SELECT coalesce(payload ->> 'Section', 'none'), count(*) FROM unnest(events) GROUP BY 1
	ON CONFLICT (section) DO UPDATE SET packages = section.packages + excluded.packages;
END
$$;

-- Wait until nothing is left for a consumer; returns how many events it had in
-- a second.
CREATE FUNCTION demo.await(consumer text)
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
	began timestamptz := clock_timestamp();
	status record;
BEGIN
	LOOP
		SELECT * INTO STRICT status FROM obix.consumer_status s WHERE s.consumer = await.consumer;
		EXIT WHEN status.lag_events = 0;
		IF status.last_error IS NOT NULL OR clock_timestamp() - began > '1 min' THEN
			RAISE EXCEPTION 'consumer "%" does not get on: %', consumer, status.last_error;
		END IF;
		PERFORM pg_sleep(0.01);
	END LOOP;
	RETURN to_char(status.delivered / extract(epoch FROM clock_timestamp() - began), 'FM999,999,999');
END
$$;

-- Plain INSERTs, most of which roll back; the last ones do, and silence
-- follows.  Then see how long it takes until a reader can get past them.
CREATE PROCEDURE demo.leave_holes(rounds integer, holes integer)
LANGUAGE plpgsql
AS $$
DECLARE
	drawn bigint[];
	began timestamptz;
BEGIN
	FOR turn IN 1 .. rounds LOOP
		WITH published AS (
			INSERT INTO demo.events (type, payload)
			VALUES ('note', jsonb_build_object('turn', turn))
			RETURNING id, payload
		)
		INSERT INTO demo.note SELECT id, 'demo.events', payload FROM published;
		INSERT INTO demo.hole SELECT unnest(drawn);
		COMMIT;

		WITH published AS (
			INSERT INTO demo.events (type, payload)
			SELECT 'note', jsonb_build_object('turn', turn, 'hole', hole) FROM generate_series(1, holes) hole
			RETURNING sequence
		)
		SELECT array_agg(sequence ORDER BY sequence) INTO drawn FROM published;
		ROLLBACK;
	END LOOP;

	began := clock_timestamp();
	CALL obix.wait('demo.events', drawn[holes] - 1);
	RAISE INFO '% INSERTs rolled back; readers could pass the last % ms after its ROLLBACK',
		rounds * holes, round(1000 * extract(epoch FROM clock_timestamp() - began), 1);
	INSERT INTO demo.hole SELECT unnest(drawn);
END
$$;

-- Read an outbox from its first event to its last, a page at a time, and
-- write down what was read.
CREATE PROCEDURE demo.catch_up(outbox regclass, page integer DEFAULT 1000)
LANGUAGE plpgsql
AS $$
DECLARE
	reached bigint := 0;
	delivered bigint := 0;
	pages integer := 0;
	events integer;
	last bigint;
	began timestamptz := clock_timestamp();
BEGIN
	LOOP
		WITH written AS (
			INSERT INTO demo.delivered
			SELECT outbox, delivered + e.n, e.sequence, e.id, jsonb_hash_extended(e.payload, 0)
			FROM obix.read(outbox, after => reached, max_events => page)
				 WITH ORDINALITY e (sequence, id, type, key, payload, headers, recorded_at, n)
			RETURNING sequence
		)
		SELECT count(*), max(sequence) INTO events, last FROM written;
		COMMIT;
		EXIT WHEN events = 0;

		reached := last;
		delivered := delivered + events;
		pages := pages + 1;
		IF pages % 10 = 0 OR events < page THEN
			RAISE INFO '% events in % pages, % events/s', to_char(delivered, 'FM999,999,999'), pages,
				to_char(delivered / extract(epoch FROM clock_timestamp() - began), 'FM999,999,999');
		END IF;
	END LOOP;
END
$$;

-- -------------------------------------------------------------- self-check

CREATE VIEW demo.committed AS
SELECT 'demo.events'::regclass AS outbox, p.event, r.record AS payload
FROM demo.package p JOIN demo.record r USING (n)
UNION ALL
SELECT outbox, event, note FROM demo.note;

CREATE VIEW demo.placeholder AS
SELECT outbox, sequence FROM demo.delivered WHERE event = '00000000-0000-0000-0000-000000000000';

-- What is wrong with what handlers keep.  This is no view, since a table that
-- views depend on cannot be rebuilt.
CREATE FUNCTION demo.wrong_sections()
RETURNS TABLE (section text, kept bigint, wanted bigint)
LANGUAGE sql
AS $$
	SELECT section, s.packages, q.packages
	FROM demo.section s
		 FULL JOIN (SELECT coalesce(record ->> 'Section', 'none') AS section, count(*) AS packages
					FROM demo.record
					GROUP BY 1) q USING (section)
	WHERE s.packages IS DISTINCT FROM q.packages
$$;

-- where each job's events are
CREATE VIEW demo.job_range AS
SELECT p.job, min(d.sequence) AS first, max(d.sequence) AS last,
	   count(DISTINCT d.sequence - p.n) AS offsets
FROM demo.package p JOIN demo.delivered d USING (event)
GROUP BY p.job;
