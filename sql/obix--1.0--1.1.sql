/* sql/obix--1.0--1.1.sql */

-- complain if script is sourced in psql, rather than via ALTER EXTENSION
\echo Use "ALTER EXTENSION obix UPDATE TO '1.1'" to load this file. \quit

/* ---------------------------------------------------------------- version */

CREATE FUNCTION obix.library_version()
RETURNS text
AS 'MODULE_PATHNAME', 'obix_library_version'
LANGUAGE C STABLE PARALLEL SAFE;

COMMENT ON FUNCTION obix.library_version() IS
'the version of the library that the server has loaded. After a package upgrade, restart the server and then run ALTER EXTENSION obix UPDATE in each database; workers act where the extension has this version';

/* ---------------------------------------------------------------- restore */

CREATE FUNCTION obix.adopt_outbox(outbox regclass, partition_width bigint DEFAULT NULL, premake integer DEFAULT 5)
RETURNS void
AS 'MODULE_PATHNAME', 'obix_adopt_outbox'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION obix.adopt_outbox(regclass, bigint, integer) IS
'make an outbox again of a table that was one where it was dumped, and was restored without its row in obix.outbox: alone, or without data. partition_width NULL takes that of its last partition';

/* ---------------------------------------------------------------- clients */

/*
 * CloudEvents 1.0 in JSON.  What is required there is never empty here, so that
 * every event has a valid form; what is optional is left out when it is empty.
 * Headers that have a name of CloudEvents and a plain value are its extension
 * attributes, but for names that the columns of the event stand for.
 */
CREATE FUNCTION obix.cloudevent(event obix.event, source text DEFAULT NULL)
RETURNS jsonb
LANGUAGE SQL STABLE PARALLEL SAFE
RETURN CASE WHEN (event).id <> '00000000-0000-0000-0000-000000000000' THEN
	CASE WHEN pg_catalog.jsonb_typeof((event).headers) = 'object' THEN
		coalesce((SELECT pg_catalog.jsonb_object_agg(h.key,
						 CASE WHEN pg_catalog.jsonb_typeof(h.value) <> 'number' THEN h.value
							  WHEN h.value #>> '{}' ~ '^-?[0-9]{1,10}$' AND h.value BETWEEN '-2147483648' AND '2147483647' THEN h.value
							  ELSE pg_catalog.to_jsonb(h.value #>> '{}') END)
				  FROM pg_catalog.jsonb_each((event).headers) h
				  WHERE h.key ~ '^[a-z0-9]+$'
						AND h.key <> ALL (ARRAY['specversion', 'id', 'source', 'type', 'subject', 'time', 'datacontenttype', 'data',
												'sequence', 'sequencetype'])
						AND (pg_catalog.jsonb_typeof(h.value) = 'string' AND h.value <> '""'
							 OR pg_catalog.jsonb_typeof(h.value) IN ('number', 'boolean')
								AND h.key <> ALL (ARRAY['traceparent', 'tracestate', 'dataschema']))), '{}')
	ELSE '{}' END
	|| pg_catalog.jsonb_strip_nulls(pg_catalog.jsonb_build_object(
		'specversion', '1.0',
		'id', (event).id,
		'source', coalesce(nullif(source, ''),
			CASE WHEN pg_catalog.current_database() ~ '^[A-Za-z0-9._~-]+$' THEN '/' || pg_catalog.current_database()
			ELSE (SELECT '/' || pg_catalog.string_agg(
						 CASE WHEN c.c ~ '[A-Za-z0-9._~-]' THEN c.c
							  ELSE pg_catalog.regexp_replace(pg_catalog.upper(pg_catalog.encode(pg_catalog.convert_to(c.c, 'UTF8'), 'hex')),
															 '(..)', '%\1', 'g') END, '' ORDER BY c.n)
				  FROM pg_catalog.regexp_split_to_table(pg_catalog.current_database(), '') WITH ORDINALITY c (c, n)) END),
		'type', coalesce(nullif((event).type, ''), 'obix.event'),
		'subject', nullif((event).key, ''),
		'time', CASE WHEN (event).recorded_at >= '0001-01-01 00:00:00+00' AND (event).recorded_at < '10000-01-01 00:00:00+00'
				THEN pg_catalog.to_char((event).recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') END,
		'datacontenttype', 'application/json',
		'sequence', pg_catalog.lpad((event).sequence::text, 19, '0')))
	|| pg_catalog.jsonb_build_object('data', (event).payload)
END;

COMMENT ON FUNCTION obix.cloudevent(obix.event, text) IS
'the event in the JSON format of CloudEvents 1.0; NULL for a placeholder. source (NULL or empty: "/" and the name of the database) and type (NULL or empty: obix.event) are required there; subject is the key, time is recorded_at in UTC, data the payload, and sequence has 19 digits, so that it sorts as text. Headers whose names are lower-case letters and digits become attributes if they are strings, booleans or numbers (beyond 32-bit integers as strings): traceparent and tracestate, for instance; others are left out';

/* ------------------------------------------------------------- monitoring */

/*
 * What is looked at by monitoring never waits for long: where somebody has an
 * outbox locked, the views say so.
 */
CREATE FUNCTION obix.server_state(OUT loaded boolean, OUT launcher_pid integer, OUT workers integer, OUT max_workers integer,
								  OUT short_of_workers boolean, OUT refused_at timestamptz, OUT outboxes integer,
								  OUT max_outboxes integer, OUT consumers integer, OUT max_consumers integer,
								  OUT lacks_standby boolean)
RETURNS record
AS 'MODULE_PATHNAME', 'obix_server_state'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION obix.server_state() IS
'internal: what obix is in the whole server, for obix.server_status; all but loaded are NULL where the server has not loaded it';

CREATE VIEW obix.server_status AS
SELECT s.loaded,
	   obix.library_version() AS library_version,
	   (SELECT e.extversion FROM pg_catalog.pg_extension e WHERE e.extname = 'obix') AS extension_version,
	   s.launcher_pid,
	   s.workers,
	   s.max_workers,
	   s.short_of_workers,
	   s.refused_at,
	   s.outboxes,
	   s.max_outboxes,
	   s.consumers,
	   s.max_consumers,
	   s.lacks_standby
FROM obix.server_state() s;

COMMENT ON VIEW obix.server_status IS 'one row: how obix fares in the whole server';
COMMENT ON COLUMN obix.server_status.loaded IS 'whether the server has loaded obix at its start; if not, what follows is NULL';
COMMENT ON COLUMN obix.server_status.library_version IS 'version of the library';
COMMENT ON COLUMN obix.server_status.extension_version IS 'version of the extension in this database; workers act where it is that of the library';
COMMENT ON COLUMN obix.server_status.launcher_pid IS 'the process that starts workers; NULL on a standby, where there is none';
COMMENT ON COLUMN obix.server_status.workers IS 'workers and dispatchers that run, in all databases';
COMMENT ON COLUMN obix.server_status.max_workers IS 'how many may: half of max_worker_processes, without the launcher';
COMMENT ON COLUMN obix.server_status.short_of_workers IS 'whether databases wait for a worker because all that may run do';
COMMENT ON COLUMN obix.server_status.refused_at IS 'when a worker could not be started, because all worker slots of the server were taken; NULL if the last one could';
COMMENT ON COLUMN obix.server_status.outboxes IS 'outboxes in use, in all databases';
COMMENT ON COLUMN obix.server_status.max_outboxes IS 'how many can be: obix.max_outboxes';
COMMENT ON COLUMN obix.server_status.consumers IS 'consumers in use, in all databases';
COMMENT ON COLUMN obix.server_status.max_consumers IS 'how many can be: obix.max_consumers';
COMMENT ON COLUMN obix.server_status.lacks_standby IS 'whether commits here wait for a synchronous standby that is not connected';

CREATE FUNCTION obix.outbox_condition(outbox regclass, OUT head bigint, OUT frontier bigint, OUT high_water_mark bigint,
									  OUT suspect_from bigint, OUT undecided bigint, OUT in_flight integer, OUT oldest_pid integer,
									  OUT runway bigint, OUT stranded bigint, OUT worker_pid integer, OUT failures integer,
									  OUT retry_at timestamptz, OUT last_error text, OUT state text, OUT problem text,
									  OUT waiting_since timestamptz, OUT rate double precision, OUT placeholders bigint,
									  OUT failing_since timestamptz, OUT worker_state text)
RETURNS record
AS 'MODULE_PATHNAME', 'obix_outbox_state'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION obix.outbox_condition(regclass) IS
'internal: what shared memory and a short look at the table tell of an outbox, for obix.outbox_status';

CREATE OR REPLACE VIEW obix.outbox_status AS
SELECT o.outbox,
	   s.head,
	   s.frontier,
	   s.high_water_mark,
	   o.resolved,
	   s.suspect_from,
	   s.in_flight,
	   s.oldest_pid AS frontier_pid,
	   a.xact_start AS frontier_xact_start,
	   s.undecided,
	   CASE WHEN s.undecided IS NOT NULL THEN h.gids END AS undecided_gids,
	   o.partition_width,
	   o.premake,
	   (SELECT pg_catalog.count(*)::integer FROM pg_catalog.pg_inherits i
		WHERE i.inhparent = o.outbox AND i.inhrelid IS DISTINCT FROM p.partdefid) AS partitions,
	   s.runway,
	   s.stranded,
	   s.worker_pid,
	   s.failures,
	   s.last_error,
	   s.retry_at,
	   CASE WHEN s.failures > 0 OR s.state = 'locked' THEN h.pids END AS blocking_pids,
	   CASE WHEN s.failures > 0 OR s.state = 'locked' THEN h.gids END AS blocking_gids,
	   CASE WHEN s.state IS DISTINCT FROM 'ok' THEN s.state
			WHEN s.failures > 0 THEN 'failing'
			WHEN s.stranded > 0 THEN 'stranded'
			WHEN s.undecided IS NOT NULL THEN 'held'
			WHEN s.high_water_mark < s.frontier THEN 'filling'
			WHEN s.frontier < s.head THEN 'held'
			ELSE 'ok' END AS state,
	   s.problem,
	   CASE WHEN s.high_water_mark < s.head THEN s.high_water_mark + 1 END AS held_at,
	   CASE WHEN s.high_water_mark >= s.head THEN NULL
			WHEN s.undecided IS NOT NULL THEN coalesce(h.prepared_at, s.waiting_since)
			WHEN s.high_water_mark < s.frontier THEN s.waiting_since
			ELSE coalesce(a.xact_start, s.waiting_since) END AS held_since,
	   s.waiting_since,
	   s.rate,
	   CASE WHEN s.rate > 0 THEN pg_catalog.make_interval(secs => LEAST(s.runway / s.rate, 1e9)) END AS runway_time,
	   s.placeholders,
	   s.failing_since,
	   s.worker_state
FROM obix.outbox o
	 JOIN pg_catalog.pg_class c ON c.oid = o.outbox
	 LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = o.outbox
	 CROSS JOIN LATERAL obix.outbox_condition(o.outbox) s
	 LEFT JOIN LATERAL (SELECT t.xact_start FROM pg_catalog.pg_stat_activity t WHERE t.pid = s.oldest_pid) a ON true
	 CROSS JOIN LATERAL (SELECT pg_catalog.array_agg(DISTINCT l.pid) FILTER (WHERE l.pid IS NOT NULL) AS pids,
								pg_catalog.array_agg(DISTINCT x.gid) FILTER (WHERE x.gid IS NOT NULL) AS gids,
								pg_catalog.min(x.prepared) AS prepared_at
						 FROM pg_catalog.pg_locks l
							  -- a prepared transaction is known by the lock on its own xid
							  LEFT JOIN pg_catalog.pg_locks t
							  ON l.pid IS NULL AND t.pid IS NULL AND t.locktype = 'transactionid'
								 AND t.virtualtransaction = l.virtualtransaction
							  LEFT JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = t.transactionid
						 WHERE (s.undecided IS NOT NULL OR s.failures > 0 OR s.state = 'locked')
							   AND l.locktype = 'relation'
							   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
							   AND l.relation IN (o.outbox, p.partdefid)
							   AND l.granted
							   AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
							   AND (l.pid IS NULL OR l.pid IS DISTINCT FROM s.worker_pid)) h;

COMMENT ON COLUMN obix.outbox_status.blocking_pids IS 'after a failed attempt, or where the outbox is locked: sessions that hold locks on the outbox or its DEFAULT partition now';
COMMENT ON COLUMN obix.outbox_status.blocking_gids IS 'after a failed attempt, or where the outbox is locked: prepared transactions that hold such locks now';
COMMENT ON COLUMN obix.outbox_status.state IS 'ok; held: readers wait for a transaction that is open or prepared; filling: they wait for placeholders; stranded: events are in DEFAULT; failing: maintenance is tried again; standby; locked, broken, incomplete, disabled, no room, denied, not loaded: see problem';
COMMENT ON COLUMN obix.outbox_status.problem IS 'why the outbox could not be looked at, or is no use as it is; NULL in good order';
COMMENT ON COLUMN obix.outbox_status.held_at IS 'sequence at which readers stop although later ones were allocated; NULL where they do not';
COMMENT ON COLUMN obix.outbox_status.held_since IS 'when the transaction began, or was prepared, that readers wait for; without one, as waiting_since';
COMMENT ON COLUMN obix.outbox_status.waiting_since IS 'recorded_at of the first event that readers cannot reach yet; NULL when there is none';
COMMENT ON COLUMN obix.outbox_status.rate IS 'events a second in the last minute, by their recorded_at';
COMMENT ON COLUMN obix.outbox_status.runway_time IS 'how long the runway lasts at that rate, at most 1e9 s; NULL while nothing is published';
COMMENT ON COLUMN obix.outbox_status.placeholders IS 'placeholders written since the server has had the outbox in use';
COMMENT ON COLUMN obix.outbox_status.failing_since IS 'when the first of the failures was';
COMMENT ON COLUMN obix.outbox_status.worker_state IS 'running; idle: nothing is to be done; due: a worker is about to come; retrying: one comes at retry_at; disabled: obix.enabled is off; no launcher: none can come; NULL on a standby';

CREATE FUNCTION obix.consumer_condition(id integer, OUT state text, OUT "position" bigint, OUT scanned bigint, OUT lag_events bigint,
										OUT next_recorded_at timestamptz, OUT attempts integer, OUT attempt_sequence bigint,
										OUT retry_at timestamptz, OUT lease_until timestamptz, OUT late_ranges bigint,
										OUT delivered bigint, OUT failed bigint, OUT dead_lettered bigint,
										OUT last_event_at timestamptz, OUT last_error text, OUT dispatcher_pid integer,
										OUT problem text, OUT reachable bigint, OUT rate double precision,
										OUT dead_letters bigint)
RETURNS record
AS 'MODULE_PATHNAME', 'obix_consumer_progress'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION obix.consumer_condition(integer) IS
'internal: how far the consumer with this id, or with a negative id its rebuild, is and how it fares; for obix.consumer_status and obix.progress';

CREATE OR REPLACE VIEW obix.consumer_status AS
SELECT c.consumer,
	   c.outbox,
	   c.owner,
	   p.state,
	   p.position AS "cursor",
	   p.lag_events,
	   CASE WHEN p.lag_events = 0 THEN interval '0'
			ELSE pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) p.next_recorded_at END AS lag,
	   p.attempts,
	   p.attempt_sequence,
	   p.retry_at,
	   p.lease_until,
	   p.late_ranges,
	   p.delivered,
	   p.failed,
	   p.dead_lettered,
	   p.last_event_at,
	   p.last_error,
	   p.dispatcher_pid,
	   p.problem,
	   p.reachable,
	   p.rate,
	   p.dead_letters
FROM obix.consumer c
	 CROSS JOIN LATERAL obix.consumer_condition(c.id) p;

COMMENT ON COLUMN obix.consumer_status.problem IS 'why it cannot go on, or how far it is cannot be told: its next event was removed, its cursor is beyond the head, its outbox is locked; NULL in good order';
COMMENT ON COLUMN obix.consumer_status.reachable IS 'the position up to which it can be given events now: the high-water mark of its outbox, or with ordering available the head';
COMMENT ON COLUMN obix.consumer_status.rate IS 'sequences a second that it has passed of late; NULL when unknown';
COMMENT ON COLUMN obix.consumer_status.dead_letters IS 'its events in obix.dead_letter that wait to be requeued or discarded, or behind such, counted up to 1000';

/* --------------------------------------------------------------- progress */

CREATE FUNCTION obix.operations(OUT pid integer, OUT outbox regclass, OUT operation text, OUT phase text, OUT done bigint,
								OUT total bigint, OUT started_at timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'obix_operations'
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10;

COMMENT ON FUNCTION obix.operations() IS
'internal: long operations that run in this database, for obix.progress';

CREATE VIEW obix.progress AS
SELECT p.pid,
	   p.outbox,
	   p.consumer,
	   p.operation,
	   p.phase,
	   p.done,
	   p.total,
	   p.started_at,
	   p.rate,
	   CASE WHEN p.rate > 0 THEN pg_catalog.make_interval(secs => LEAST(GREATEST(p.total - p.done, 0) / p.rate, 1e9)) END AS remaining
FROM (SELECT o.pid,
			 o.outbox,
			 NULL::text AS consumer,
			 o.operation,
			 o.phase,
			 o.done,
			 o.total,
			 o.started_at,
			 CASE WHEN o.done > 0
				  THEN o.done / GREATEST(EXTRACT(epoch FROM pg_catalog.clock_timestamp() - o.started_at)::double precision, 0.001)
			 END AS rate
	  FROM obix.operations() o
	  UNION ALL
	  SELECT s.dispatcher_pid,
			 c.outbox,
			 c.consumer,
			 'rebuild',
			 CASE WHEN s.state = 'active' THEN 'applying events' ELSE s.state END,
			 s.delivered,
			 s.delivered + s.lag_events,
			 r.started_at,
			 s.rate
	  FROM obix.rebuild_state r
		   JOIN obix.consumer c ON c.id = r.id
		   CROSS JOIN LATERAL obix.consumer_condition(- r.id) s
	  UNION ALL
	  SELECT s.dispatcher_pid,
			 s.outbox,
			 s.consumer,
			 'catch-up',
			 CASE WHEN s.state = 'active' THEN 'delivering events' ELSE s.state END,
			 s.reachable - s.lag_events,
			 s.reachable,
			 NULL,
			 s.rate
	  FROM obix.consumer_status s
	  WHERE s.lag_events >= 1000) p;

COMMENT ON VIEW obix.progress IS 'one row per long operation: recovery, filling and imports that run, rebuilds that are not finished, and the catch-up of consumers that are 1000 sequences or more behind';
COMMENT ON COLUMN obix.progress.pid IS 'the process that is at it now; NULL for a consumer that no dispatcher serves';
COMMENT ON COLUMN obix.progress.outbox IS 'the outbox';
COMMENT ON COLUMN obix.progress.consumer IS 'the consumer, of a rebuild or a catch-up';
COMMENT ON COLUMN obix.progress.operation IS 'recovery: stranded events are brought into proper partitions; filling: holes get placeholders; import; rebuild; catch-up';
COMMENT ON COLUMN obix.progress.phase IS 'what it is at; of a consumer also its state, as in obix.consumer_status';
COMMENT ON COLUMN obix.progress.done IS 'how much has been done: rows moved, sequences looked at or imported, events applied, position reached';
COMMENT ON COLUMN obix.progress.total IS 'of how much, as far as is known; 0 in a phase that counts nothing';
COMMENT ON COLUMN obix.progress.started_at IS 'when it began; NULL for a catch-up';
COMMENT ON COLUMN obix.progress.rate IS 'how much is done in a second; NULL when unknown';
COMMENT ON COLUMN obix.progress.remaining IS 'how long the rest takes at that rate; NULL when unknown';

/* ----------------------------------------------------------------- health */

/*
 * One query, so that each thing is looked at once.  Its estimates are far too high,
 * and compiling it would take many times what it takes to run it.
 */
CREATE FUNCTION obix.health(max_age interval DEFAULT '5 min', min_runway interval DEFAULT '10 min', max_lag interval DEFAULT '5 min',
							OUT "check" text, OUT object text, OUT status text, OUT detail text, OUT hint text)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE ROWS 100
SET jit = off
BEGIN ATOMIC
WITH server AS MATERIALIZED (
	SELECT s.*, pg_catalog.pg_is_in_recovery() AS standby FROM obix.server_status s
), outbox AS MATERIALIZED (
	SELECT s.*, s.outbox::text AS name, pg_catalog.clock_timestamp() - s.held_since AS held_for,
		   pg_catalog.clock_timestamp() - s.failing_since AS failing_for
	FROM obix.outbox_status s
), consumer_status AS MATERIALIZED (	-- each is looked at once, and then joined
	SELECT s.* FROM obix.consumer_status s
), consumer AS MATERIALIZED (
	SELECT s.*, coalesce(c.handler, c.batch_handler) IS NOT NULL AND NOT c.paused AS handled
	FROM consumer_status s JOIN obix.consumer c USING (consumer)
), finding (part, n, "check", object, status, detail, hint) AS (
	SELECT 1, 1, 'preload', NULL::text, CASE WHEN s.loaded THEN 'ok' ELSE 'critical' END,
		   CASE WHEN NOT s.loaded THEN 'obix is not loaded by the server' END,
		   'Add obix to shared_preload_libraries and restart the server.'
	FROM server s
	UNION ALL
	SELECT 1, 2, 'version', NULL, CASE WHEN s.extension_version = s.library_version THEN 'ok' ELSE 'critical' END,
		   pg_catalog.format('the extension has version %s here, and the library version %s', s.extension_version, s.library_version),
		   'Run ALTER EXTENSION obix UPDATE in this database; if the library is the older one, install the newer and restart the server.'
	FROM server s
	UNION ALL
	SELECT 1, 3, 'enabled', NULL, CASE WHEN pg_catalog.current_setting('obix.enabled')::boolean THEN 'ok' ELSE 'warning' END,
		   CASE WHEN NOT pg_catalog.current_setting('obix.enabled')::boolean THEN 'obix.enabled is off here' END,
		   'Once the data is restored: ALTER DATABASE ... RESET obix.enabled.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 1, 4, 'launcher', NULL, CASE WHEN s.launcher_pid IS NOT NULL OR s.standby THEN 'ok' ELSE 'critical' END,
		   CASE WHEN s.launcher_pid IS NULL AND NOT s.standby THEN 'no launcher runs, so no worker can be started' END,
		   'See the log of the server. If the launcher found no place when the server was started, raise max_worker_processes.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 1, 5, 'workers', NULL, CASE WHEN s.short_of_workers OR s.refused_at IS NOT NULL THEN 'warning' ELSE 'ok' END,
		   CASE WHEN s.refused_at IS NOT NULL THEN 'all background worker slots of the server are taken'
				ELSE pg_catalog.format('%s of %s workers run', s.workers, s.max_workers) END,
		   'Raise max_worker_processes.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 1, 6, 'dispatchers', NULL,
		   CASE WHEN pg_catalog.current_setting('obix.dispatch_workers')::integer = 0 AND h.n > 0 THEN 'critical' ELSE 'ok' END,
		   CASE WHEN pg_catalog.current_setting('obix.dispatch_workers')::integer = 0 AND h.n > 0
				THEN pg_catalog.format('obix.dispatch_workers is 0, and %s consumers have handlers', h.n) END,
		   'Set obix.dispatch_workers, or pause these consumers.'
	FROM server s, (SELECT pg_catalog.count(*) AS n FROM consumer c WHERE c.handled) h WHERE s.loaded AND NOT s.standby
	UNION ALL
	SELECT 1, 7, 'synchronous_standby', NULL, CASE WHEN s.lacks_standby THEN 'critical' ELSE 'ok' END,
		   CASE WHEN s.lacks_standby THEN 'commits wait for a synchronous standby that is not connected' END,
		   'Have the standby connect, or change synchronous_standby_names. Until then holes are not filled and handlers are not called.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 1, 8, 'force_sync_commit', NULL,
		   CASE WHEN pg_catalog.current_setting('obix.force_sync_commit')::boolean THEN 'ok' ELSE 'warning' END,
		   CASE WHEN NOT pg_catalog.current_setting('obix.force_sync_commit')::boolean
				THEN 'obix.force_sync_commit is off: a crash can take away events that were read' END,
		   'Set it to on.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 1, 9, 'max_outboxes', NULL,
		   CASE WHEN s.outboxes >= s.max_outboxes THEN 'critical' WHEN s.outboxes >= 0.9 * s.max_outboxes THEN 'warning' ELSE 'ok' END,
		   pg_catalog.format('%s of %s outboxes are in use', s.outboxes, s.max_outboxes),
		   'Raise obix.max_outboxes and restart the server.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 1, 10, 'max_consumers', NULL,
		   CASE WHEN s.consumers >= s.max_consumers THEN 'critical' WHEN s.consumers >= 0.9 * s.max_consumers THEN 'warning' ELSE 'ok' END,
		   pg_catalog.format('%s of %s consumers are in use', s.consumers, s.max_consumers),
		   'Raise obix.max_consumers and restart the server.'
	FROM server s WHERE s.loaded
	UNION ALL
	SELECT 2, 1, 'outbox', o.name,
		   CASE WHEN o.state IN ('broken', 'incomplete', 'no room') THEN 'critical'
				WHEN o.state IN ('locked', 'disabled', 'denied') THEN 'warning' ELSE 'ok' END,
		   CASE WHEN o.state = 'locked'
				THEN pg_catalog.concat(o.problem, '; locks: session ' || pg_catalog.array_to_string(o.blocking_pids, ', '),
									   '; locks: prepared transaction "' || pg_catalog.array_to_string(o.blocking_gids, '", "') || '"')
				ELSE o.problem END,
		   CASE o.state WHEN 'locked' THEN 'See pg_locks; publishers and readers wait as well.'
						WHEN 'broken' THEN 'Repair or detach the partition that is named.'
						WHEN 'incomplete' THEN 'If it is being restored, wait for the end; otherwise restore what it lacks.'
						WHEN 'no room' THEN 'Raise obix.max_outboxes and restart the server.'
						WHEN 'denied' THEN 'Grant pg_monitor to the role that monitors, or SELECT on the outbox.'
						ELSE 'See the check "enabled".' END
	FROM outbox o WHERE o.state <> 'not loaded'
	UNION ALL
	SELECT 2, 2, 'held_up', o.name,
		   CASE WHEN o.held_for > 6 * $1 THEN 'critical' WHEN o.held_for > $1 THEN 'warning' ELSE 'ok' END,
		   CASE WHEN o.held_at IS NULL THEN NULL
				WHEN o.undecided IS NOT NULL AND o.undecided_gids IS NULL
				THEN pg_catalog.format('readers have stopped before sequence %s, which another server has given out and not sent', o.held_at)
				WHEN o.undecided IS NOT NULL
				THEN pg_catalog.format('readers have stopped before sequence %s for prepared transaction "%s" of %s',
									   o.held_at, pg_catalog.array_to_string(o.undecided_gids, '", "'), o.held_since)
				WHEN o.high_water_mark < o.frontier
				THEN pg_catalog.format('readers have stopped before sequence %s, which has no row', o.held_at)
				ELSE pg_catalog.format('readers have stopped before sequence %s for session %s, in a transaction of %s',
									   o.held_at, o.frontier_pid, coalesce(o.held_since::text, '?')) END,
		   CASE WHEN o.undecided IS NOT NULL AND o.undecided_gids IS NULL
				THEN 'See the subscription. If what is missing there had been removed, use obix.alter_outbox(resolved => ...).'
				WHEN o.undecided IS NOT NULL THEN 'Use COMMIT PREPARED or ROLLBACK PREPARED.'
				WHEN o.high_water_mark < o.frontier THEN 'See the checks "launcher", "workers", "maintenance" and "synchronous_standby".'
				ELSE 'Have that session end its transaction, or use pg_terminate_backend.' END
	FROM outbox o WHERE o.head IS NOT NULL
	UNION ALL
	SELECT 2, 3, 'runway', o.name,
		   CASE WHEN o.premake = 0 THEN 'ok' WHEN o.runway = 0 OR o.runway_time < $2 / 6 THEN 'critical'
				WHEN o.runway_time < $2 THEN 'warning' ELSE 'ok' END,
		   pg_catalog.format('%s sequences are left', o.runway)
		   || coalesce(', for ' || pg_catalog.date_trunc('second', o.runway_time) || ' at the present rate', ''),
		   'See the check "maintenance". If it is in order, raise partition_width or premake by obix.alter_outbox.'
	FROM outbox o WHERE o.runway IS NOT NULL
	UNION ALL
	SELECT 2, 4, 'stranded', o.name, CASE WHEN o.stranded > 0 THEN 'warning' ELSE 'ok' END,
		   CASE WHEN o.stranded > 0 THEN pg_catalog.format('up to %s events are in the DEFAULT partition', o.stranded) END,
		   CASE WHEN pg_catalog.current_setting('obix.auto_recover')::boolean
				THEN 'They are delivered from there, and recovered when maintenance gets its lock: see the check "maintenance".'
				ELSE 'obix.auto_recover is off: call obix.recover_default.' END
	FROM outbox o WHERE o.runway IS NOT NULL
	UNION ALL
	SELECT 2, 5, 'maintenance', o.name,
		   CASE WHEN o.failures >= 5 AND o.failing_for > 6 * $1 THEN 'critical' WHEN o.failures >= 5 THEN 'warning' ELSE 'ok' END,
		   CASE WHEN o.failures > 0
				THEN pg_catalog.concat(pg_catalog.format('%s attempts have failed since %s: %s', o.failures, o.failing_since, o.last_error),
									   '; locks: session ' || pg_catalog.array_to_string(o.blocking_pids, ', '),
									   '; locks: prepared transaction "' || pg_catalog.array_to_string(o.blocking_gids, '", "') || '"') END,
		   'If somebody is in the way, have the transaction end; otherwise do what the error message says. It is tried again by itself.'
	FROM outbox o WHERE o.head IS NOT NULL
	UNION ALL
	SELECT 2, 6, 'wraparound', o.name, CASE WHEN v.pid IS NOT NULL THEN 'warning' ELSE 'ok' END,
		   CASE WHEN v.pid IS NOT NULL
				THEN pg_catalog.format('a VACUUM that prevents wraparound keeps maintenance from its lock, process %s', v.pid) END,
		   'Let it come to its end; if it would start again, VACUUM FREEZE the partition when nothing else needs it.'
	FROM outbox o
		 LEFT JOIN LATERAL (SELECT pg_catalog.min(a.pid) AS pid FROM pg_catalog.pg_stat_activity a
							WHERE a.pid = ANY (o.blocking_pids) AND a.backend_type = 'autovacuum worker'
								  AND a.query LIKE '%(to prevent wraparound)') v ON true
	WHERE o.head IS NOT NULL
	UNION ALL
	SELECT 3, 1, 'consumer', c.consumer,
		   CASE WHEN c.state IN ('stopped', 'parked') THEN 'critical'
				WHEN c.problem LIKE 'its outbox is %' THEN 'warning'
				WHEN c.problem IS NOT NULL THEN 'critical'
				WHEN c.state IN ('paused', 'retrying') THEN 'warning' ELSE 'ok' END,
		   CASE WHEN c.state IN ('stopped', 'parked', 'retrying')
				THEN pg_catalog.concat('it is ', c.state, ', event ' || c.attempt_sequence, ': ' || c.last_error)
				WHEN c.problem IS NOT NULL THEN c.problem
				WHEN c.state = 'paused' THEN 'it is paused' END,
		   CASE WHEN c.state = 'stopped' THEN 'Remove the cause and call obix.resume, or pass over the event by obix.seek.'
				WHEN c.state = 'parked' THEN 'Remove the cause; it is looked at again by itself, or at once by obix.resume.'
				WHEN c.problem LIKE 'its outbox is %' THEN 'See the check "outbox".'
				WHEN c.problem LIKE 'its outbox does not exist' THEN 'Drop it by obix.drop_consumer.'
				WHEN c.problem IS NOT NULL THEN 'Move it by obix.seek.'
				WHEN c.state = 'paused' THEN 'Call obix.resume.'
				ELSE 'It is tried again by itself.' END
	FROM consumer c WHERE c.state IS NOT NULL
	UNION ALL
	SELECT 3, 2, 'lag', c.consumer, CASE WHEN c.lag > 6 * $3 THEN 'critical' WHEN c.lag > $3 THEN 'warning' ELSE 'ok' END,
		   pg_catalog.format('%s sequences behind', c.lag_events)
		   || coalesce(', the oldest for ' || pg_catalog.date_trunc('second', c.lag), ''),
		   CASE WHEN c.handled THEN 'If it is not held up, make its handlers faster, or raise obix.dispatch_workers if others keep them busy.'
				ELSE 'Have a client fetch and acknowledge its events, or drop it if it is not needed.' END
	FROM consumer c WHERE c.lag_events IS NOT NULL
	UNION ALL
	SELECT 3, 3, 'dead_letters', c.consumer, CASE WHEN c.dead_letters > 0 THEN 'warning' ELSE 'ok' END,
		   CASE WHEN c.dead_letters > 0
				THEN pg_catalog.concat(c.dead_letters, CASE WHEN c.dead_letters >= 1000 THEN ' or more' END, ' events wait in obix.dead_letter') END,
		   'See obix.dead_letter, then call obix.requeue or obix.discard.'
	FROM consumer c WHERE c.dead_letters IS NOT NULL
)
SELECT f."check", f.object, f.status, CASE WHEN f.status <> 'ok' OR f."check" IN ('max_outboxes', 'max_consumers', 'workers', 'runway', 'lag') THEN f.detail END,
	   CASE WHEN f.status <> 'ok' THEN f.hint END
FROM finding f
ORDER BY f.part, f.object, f.n;
END;

COMMENT ON FUNCTION obix.health(interval, interval, interval) IS
'checks for alerting: one row for each check of the server, of an outbox or of a consumer, with status ok, warning or critical. max_age: a transaction that holds readers up, or failing maintenance, is a warning when older, and critical at six times that; min_runway: a runway is a warning when it lasts shorter at the present rate, and critical at a sixth; max_lag: a consumer whose next event is older, and critical at six times that';

/* What ALTER DEFAULT PRIVILEGES has given on these views is taken back, too. */
DO $$
DECLARE
	command pg_catalog.text;
BEGIN
	FOR command IN
		SELECT pg_catalog.format('REVOKE ALL ON obix.%I FROM %s', c.relname,
								 CASE WHEN r.oid IS NULL THEN 'PUBLIC' ELSE pg_catalog.quote_ident(r.rolname) END)
		FROM pg_catalog.pg_class c
			 CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
			 LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
		WHERE c.relnamespace = 'obix'::pg_catalog.regnamespace AND c.relname IN ('server_status', 'progress') AND a.grantee <> c.relowner
	LOOP
		EXECUTE command;
	END LOOP;
END $$;

GRANT SELECT ON obix.server_status, obix.progress TO PUBLIC;
/* ----------------------------------------------------------------- import */

CREATE PROCEDURE obix.import(outbox regclass, source regclass, sequence text DEFAULT NULL, id text DEFAULT NULL, type text DEFAULT NULL,
							 key text DEFAULT NULL, payload text DEFAULT NULL, headers text DEFAULT NULL, recorded_at text DEFAULT NULL,
							 batch_size integer DEFAULT 10000)
AS 'MODULE_PATHNAME', 'obix_import'
LANGUAGE C;

COMMENT ON PROCEDURE obix.import(regclass, regclass, text, text, text, text, text, text, text, integer) IS
'copy the events of source, a table or view, into an outbox of the caller: in order, with their sequences, ids and times, and placeholders where sequences are missing. Called again, goes on. sequence, id, type, key, payload, headers and recorded_at name columns of source: NULL looks for one of a usual name, an empty name is for none. Commits after batch_size sequences (1 to 1000000), unless in a transaction block';

/* --------------------------------------------------------------- comments */

/*
 * What psql shows of functions names every argument, with what it may be.  This is
 * for what obix--1.0.sql creates, and replaces the comments there.
 */
COMMENT ON SEQUENCE obix.outbox_id_seq IS 'internal: numbers for obix.outbox';
COMMENT ON SEQUENCE obix.consumer_id_seq IS 'internal: numbers for obix.consumer';

COMMENT ON FUNCTION obix.create_outbox(text, bigint, integer) IS
'create an outbox, a partitioned table owned by the caller, under the name outbox. partition_width is the number of sequences in a partition (at least 1), premake the number of partitions to keep ready ahead (0 to 10000)';
COMMENT ON FUNCTION obix.alter_outbox(regclass, bigint, integer, bigint) IS
'change an outbox: partition_width of the partitions made from now on, premake, how many are kept ready; NULL leaves a setting as it is. resolved is for an outbox that a subscription writes to: no event is still to come up to this position, so what is missing there had been removed where they come from';
COMMENT ON FUNCTION obix.adopt_outbox(regclass, bigint, integer) IS
'make an outbox again of a table that was one where it was dumped, and was restored without its row in obix.outbox: alone, or without data. partition_width NULL takes that of its last partition; premake is the number of partitions to keep ready ahead (0 to 10000)';

COMMENT ON FUNCTION obix.publish(regclass, jsonb, text, text, jsonb) IS
'publish an event to an outbox when, and only when, this transaction commits; returns its id. payload must not be NULL (JSON null is allowed); type, key and headers are the publisher''s own. The sequence is given at commit, so it follows every transaction whose effects this one saw';
COMMENT ON FUNCTION obix.read(regclass, bigint, integer, bigint, uuid) IS
'the events of an outbox after a position (NULL: from the oldest kept), in order and without a gap, up to the first that is not there yet: at most max_events, and max_bytes of uncompressed column data, though one event is returned whatever its size. With after_id, an error unless the event at that position bears this id';
COMMENT ON PROCEDURE obix.wait(regclass, bigint, interval) IS
'return as soon as there is something to read in an outbox after a position, or after the timeout; holds no snapshot and no lock while it waits';
COMMENT ON FUNCTION obix.high_water_mark(regclass) IS
'the position up to which a reader can read an outbox now; on a standby, of what has been replayed there';
COMMENT ON FUNCTION obix.recover_default(regclass) IS
'bring the events stranded in the DEFAULT partition of an outbox into proper partitions; returns how many. The worker does this by itself while obix.auto_recover is on';

COMMENT ON FUNCTION obix.create_consumer(text, regclass, bigint, text[], text, text, text, integer, interval, integer, interval, interval, text, boolean, regclass[], text) IS
'create a consumer, a named, durable cursor on an outbox, that belongs to the caller and begins with the event after start_after (NULL: the oldest kept). types: the types of events that it gets (NULL: all). handler, a function of one obix.event, and batch_handler, a function of obix.event[]: dispatchers call these for every event, up to batch_size (1 to 100000) in a transaction, for as long as timeout, while the function gate returns true; tables are those that they maintain. ordering: sequence or available. After a failure the event is tried again up to max_attempts (NULL: for ever), first after backoff, twice that each time, up to max_backoff; on_failure then says stop or dead_letter, and hold_key whether later events of its key are held back';
COMMENT ON FUNCTION obix.alter_consumer(text, text[], text, text, integer, interval, integer, interval, interval, text, boolean, regclass[], text, text, regrole, text[]) IS
'change a consumer: types, handler, batch_handler, batch_size, timeout, max_attempts, backoff, max_backoff, on_failure, hold_key, tables and gate as in obix.create_consumer; search_path, with which its functions run; owner. NULL leaves a setting as it is, and clear names those to set to NULL: types, handler, batch_handler, max_attempts, tables, gate';
COMMENT ON FUNCTION obix.seek(text, bigint) IS
'set the cursor of a consumer to any position, forward or back: the event after it comes next; with after NULL, the oldest kept. What it had still to deliver from before the old position is forgotten';
COMMENT ON FUNCTION obix.fetch(text, integer, bigint, bigint, boolean) IS
'the next events for a consumer, until they are acknowledged: at most max_events, and max_bytes of uncompressed column data, but at least one if there is any. Until the transaction ends nobody else fetches for it: wait says whether to wait for that or return nothing. token: that of the lease, if there is one';
COMMENT ON FUNCTION obix.ack(text, bigint, bigint) IS
'acknowledge what was fetched for a consumer, up to the event with this sequence: the cursor moves forward to it, when this transaction commits. token: that of the lease, if there is one';
COMMENT ON FUNCTION obix.fail(text, bigint, text, bigint) IS
'report that the next event for a consumer, the one with this sequence, could not be dealt with because of an error: it is delivered again after a delay that doubles with each failure, or after max_attempts stops the consumer or becomes a dead letter. token: that of the lease, if there is one';
COMMENT ON FUNCTION obix.acquire(text, interval) IS
'become the only holder of a consumer for the time of the lease, on the clock of the database: returns a token that fetch, ack and fail must bear, or NULL while somebody else holds it';
COMMENT ON FUNCTION obix.renew(text, bigint, interval) IS
'hold a consumer for the time of another lease, from now, with the token of the last one; an error if somebody else has acquired it';
COMMENT ON FUNCTION obix.release(text, bigint) IS
'end the lease with this token, so that others can acquire the consumer at once; an error if somebody else has acquired it';
COMMENT ON FUNCTION obix.requeue(text, bigint) IS
'deliver the dead letter of a consumer with this sequence again, before any other event, with all its attempts; what is held behind it follows';
COMMENT ON FUNCTION obix.discard(text, bigint) IS
'delete the dead letter of a consumer with this sequence; what is held behind it is delivered';
COMMENT ON FUNCTION obix.cancel_rebuild(text) IS
'give up a rebuild of a consumer that was interrupted, and drop what it has made';

COMMENT ON FUNCTION obix.guard() IS
'internal: row trigger of every outbox; refuses sequences that obix did not give out, DELETE, and UPDATE of anything but payload and headers';
COMMENT ON FUNCTION obix.guard_truncate() IS
'internal: statement trigger of every outbox and partition; records at TRUNCATE what was removed, so that no sequence is given out twice';
COMMENT ON FUNCTION obix.guard_registry() IS
'internal: row trigger of the tables of obix; lets those who restore a dump without being superusers insert what they could have made themselves';
COMMENT ON FUNCTION obix.outbox_state(regclass) IS
'internal: what shared memory knows of an outbox, for obix.outbox_status; on a standby only the high-water mark is known';
COMMENT ON FUNCTION obix.partitions(regclass) IS
'internal: the partitions of an outbox with the sequences each holds, from the first up to but not including the last, both NULL for the DEFAULT partition; for obix.partition_status';
COMMENT ON FUNCTION obix.consumer_progress(integer) IS
'internal: how far the consumer with this id, or with a negative id its rebuild, is; for obix.consumer_status and obix.rebuild_progress';
COMMENT ON FUNCTION obix.begin_rebuild(text, boolean) IS
'internal: first step of obix.rebuild; makes the tables anew, unless a rebuild of the consumer is to be resumed, which takes skip_errors again';
COMMENT ON FUNCTION obix.continue_rebuild(text) IS
'internal: further steps of obix.rebuild; has the rebuild of the consumer go on for some seconds, and returns false when it has ended';
