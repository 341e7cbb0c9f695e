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
