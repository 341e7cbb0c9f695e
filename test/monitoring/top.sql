/*
 * What ./dev top shows: outboxes, consumers, long operations and what is not well,
 * again and again.  Also by itself:
 *
 *     psql -v outbox=app.orders -v seconds=2 -v clear= -f top.sql
 *
 * One query makes the screen, since \watch repeats one.
 */
\set QUIET on
\pset pager off
\pset tuples_only on
\pset format unaligned
WITH chosen AS (
	SELECT * FROM obix.outbox_status WHERE :'outbox' IN ('', outbox::text)
), line (part, n, line) AS (
	SELECT 0, 0, :'clear' || format(E'%s, %s\n', current_database(), clock_timestamp()::timestamptz(0))
	UNION ALL
	SELECT 1, 0, format('%-24s %-9s %14s %14s %9s %9s %12s %9s %6s %s', 'outbox', 'state', 'head', 'readable', 'events/s', 'held for',
						'runway', 'lasts', 'strand', 'worker')
	UNION ALL
	SELECT 1, row_number() OVER (ORDER BY outbox::text),
		   format('%-24s %-9s %14s %14s %9s %9s %12s %9s %6s %s', left(outbox::text, 24), state, head, high_water_mark, round(rate::numeric, 1),
				  CASE WHEN held_at IS NOT NULL THEN date_trunc('second', clock_timestamp() - held_since) END, runway,
				  CASE WHEN runway_time < '99 hours' THEN to_char(runway_time, 'HH24:MI:SS') WHEN runway_time IS NOT NULL THEN '> 99 h' END,
				  stranded, worker_state)
		   || coalesce(E'\n  held at ' || held_at || coalesce(' by session ' || CASE WHEN high_water_mark = frontier THEN frontier_pid END, '')
					   || coalesce(' by prepared ' || array_to_string(undecided_gids, ', '), ''), '')
		   || coalesce(E'\n  ' || last_error || coalesce('; locks: session ' || array_to_string(blocking_pids, ', '), '')
					   || coalesce('; prepared ' || array_to_string(blocking_gids, ', '), ''), '')
		   || coalesce(E'\n  ' || problem, '')
	FROM chosen
	UNION ALL
	SELECT 2, 0, format(E'\n%-24s %-9s %14s %14s %9s %9s %12s %9s %6s %s', 'consumer', 'state', 'cursor', 'behind', 'events/s', 'lag', 'delivered',
						'failed', 'dead', 'dispatcher')
	WHERE EXISTS (SELECT FROM obix.consumer WHERE outbox IN (SELECT outbox FROM chosen))
	UNION ALL
	SELECT 2, row_number() OVER (ORDER BY consumer),
		   format('%-24s %-9s %14s %14s %9s %9s %12s %9s %6s %s', left(consumer, 24), state, "cursor", lag_events, round(rate::numeric, 1),
				  date_trunc('second', lag), delivered, failed, dead_letters, dispatcher_pid)
		   || CASE WHEN state <> 'active' AND last_error IS NOT NULL THEN E'\n  ' || last_error ELSE '' END
		   || coalesce(E'\n  ' || problem, '')
	FROM obix.consumer_status WHERE outbox IN (SELECT outbox FROM chosen)
	UNION ALL
	SELECT 3, row_number() OVER (),
		   format(E'\n%s of %s: %s, %s of %s%s', operation, coalesce(consumer, outbox::text), phase, done, total,
				  ', ' || date_trunc('second', remaining) || ' left')
	FROM obix.progress WHERE outbox IN (SELECT outbox FROM chosen)
	UNION ALL
	SELECT 4, row_number() OVER (), format(E'\n%s: %s%s: %s', upper(status), "check", ' of ' || object, detail)
	FROM obix.health() WHERE status <> 'ok'
)
SELECT line FROM line ORDER BY part, n \watch :seconds
