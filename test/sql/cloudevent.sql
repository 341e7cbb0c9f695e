--
-- obix.cloudevent: an event in the JSON format of CloudEvents 1.0
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;
SET TimeZone = 'America/Los_Angeles';
CREATE SCHEMA obix_cloudevent;
SET search_path = obix_cloudevent, public;
SELECT obix.create_outbox('orders', 10, 1);

-- what is wrong with an event, by the JSON schema of CloudEvents and by what its
-- specification says of attributes; nothing, if it is valid
CREATE FUNCTION faults(event jsonb) RETURNS SETOF text LANGUAGE sql AS $$
SELECT format('%s is missing', required)
FROM unnest('{id,source,specversion,type}'::text[]) required
WHERE NOT event ? required
UNION ALL
SELECT format('%s is not a string, or empty', key)
FROM jsonb_each(event)
WHERE key IN ('id', 'source', 'specversion', 'type', 'datacontenttype', 'dataschema', 'subject', 'time', 'sequence',
              'traceparent', 'tracestate')
      AND (jsonb_typeof(value) <> 'string' OR value = '""')
UNION ALL
SELECT format('%s is no name of an attribute', key) FROM jsonb_each(event) WHERE key !~ '^[a-z0-9]+$'
UNION ALL
SELECT format('%s has no value of an attribute', key)
FROM jsonb_each(event)
WHERE key <> 'data'
      AND CASE jsonb_typeof(value)
          WHEN 'number' THEN value::text ~ '[.e]' OR value::numeric NOT BETWEEN -2147483648 AND 2147483647
          ELSE jsonb_typeof(value) NOT IN ('string', 'boolean') END
UNION ALL
SELECT 'specversion is not 1.0' WHERE event ->> 'specversion' <> '1.0'
UNION ALL
SELECT 'source is no URI-reference'
WHERE event ->> 'source' !~ '^([A-Za-z0-9._~:/?#\[\]@!$&''()*+,;=-]|%[0-9A-F]{2})+$'
UNION ALL
SELECT 'time is not as in RFC 3339'
WHERE event ->> 'time' !~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$'
UNION ALL
SELECT 'sequence is no number that sorts as text' WHERE event ->> 'sequence' !~ '^\d{19}$'
$$;
-- such an event has all faults
SELECT f AS fault
FROM faults('{"id": "", "specversion": "2.0", "source": "a b", "time": "today", "Name": {}, "n": 1.5, "big": 2147483648, "sequence": "9"}') f
ORDER BY f COLLATE "C";

-- all that an event can have
CREATE FUNCTION event(type text, key text, payload jsonb, headers jsonb, sequence bigint DEFAULT 42,
                      recorded_at timestamptz DEFAULT '2026-03-04 05:06:07.08+02', id uuid DEFAULT '01890000-0000-7000-8000-000000000001')
RETURNS obix.event LANGUAGE sql IMMUTABLE
RETURN (sequence, id, type, key, payload, headers, recorded_at)::obix.event;
SELECT jsonb_pretty(obix.cloudevent(event('paid', 'account-1', '{"amount": 10, "note": null}',
    '{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "vendor=1", "tenant": 7}'),
    'https://shop.example/orders'));

-- what is empty
SELECT jsonb_pretty(obix.cloudevent(event(NULL, NULL, 'null', NULL)) - 'source');
SELECT obix.cloudevent(event('', '', '""', '{}'), 'urn:shop') = obix.cloudevent(event(NULL, NULL, '""', NULL), 'urn:shop') AS same;
SELECT obix.cloudevent(event('paid', NULL, '1', NULL), '') = obix.cloudevent(event('paid', NULL, '1', NULL)) AS same;
SELECT obix.cloudevent(NULL), obix.cloudevent(NULL, 'urn:shop'),
       obix.cloudevent(event(NULL, NULL, NULL, NULL, id => '00000000-0000-0000-0000-000000000000')) AS placeholder,
       obix.cloudevent(event('paid', NULL, '1', NULL, id => NULL)) AS no_id;

-- the database as source, in the characters of a URI
SELECT obix.cloudevent(event('paid', NULL, '1', NULL)) ->> 'source' = '/' || current_database() AS by_name
WHERE current_database() ~ '^\w+$';
CREATE DATABASE "regress obix/50% größer?#é" TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C';
\set previous :DBNAME
\c "regress obix/50% größer?#é"
SET client_min_messages = warning;
CREATE EXTENSION obix;
SELECT obix.cloudevent((1, '01890000-0000-7000-8000-000000000001', 'paid', NULL, '1', NULL, now())::obix.event) ->> 'source' AS source;
\c :previous
SET client_min_messages = warning;
SET TimeZone = 'America/Los_Angeles';
SET search_path = obix_cloudevent, public;
DROP DATABASE "regress obix/50% größer?#é" WITH (FORCE);

-- headers that are attributes, and others
SELECT header.key, header.value, obix.cloudevent(event('paid', 'a', '1', jsonb_build_object(header.key, header.value)), 'urn:shop') -> header.key AS attribute
FROM jsonb_each('{
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "", "dataschema": "https://shop.example/paid.json",
    "yes": true, "no": false, "nothing": null, "int": -2147483648, "int2": 2147483647, "big": 2147483648, "small": -2147483649, "float": 1.5,
    "one": 1.0, "huge": 1e30, "object": {"a": 1}, "array": [1], "Upper": "x", "with-dash": "x", "with_underscore": "x", "grün": "x", "": "x",
    "data_base64": "eA==", "id": "x", "source": "x", "type": "x", "subject": "x", "time": "x", "specversion": "9", "datacontenttype": "text/xml",
    "data": "x", "sequence": "x", "sequencetype": "Integer"}') header
ORDER BY header.key COLLATE "C";
SELECT obix.cloudevent(event('paid', NULL, '1', '{"type": "x", "subject": "x", "dataschema": "x:y", "time": "x"}', recorded_at => 'infinity'), 'urn:shop');
SELECT obix.cloudevent(event('paid', NULL, '1', '{"traceparent": 1, "tracestate": true, "dataschema": {}}'), 'urn:shop')
       = obix.cloudevent(event('paid', NULL, '1', NULL), 'urn:shop') AS ignored;
-- anything can be in headers
SELECT headers, obix.cloudevent(event('paid', NULL, '1', headers), 'urn:shop') = obix.cloudevent(event('paid', NULL, '1', NULL), 'urn:shop') AS ignored
FROM unnest('{"null", "[]", "[{\"a\": 1}]", "1", "\"a\"", "{}"}'::jsonb[]) headers;

-- time: in UTC, whatever the session has; none where RFC 3339 has none
SELECT t AS recorded_at, obix.cloudevent(event('paid', NULL, '1', NULL, recorded_at => t), 'urn:shop') -> 'time' AS time
FROM unnest('{2026-07-01 12:00:00.000001+00, 0001-01-01 00:00:00+00, 9999-12-31 23:59:59.999999+00, 10000-01-01 00:00:00+00,
    0001-12-31 23:59:59+00 BC, infinity, -infinity, NULL}'::timestamptz[]) t;
SET DateStyle = 'German';
SELECT obix.cloudevent(event('paid', NULL, '1', NULL), 'urn:shop') -> 'time' AS time;
RESET DateStyle;

-- sequence sorts as text
SELECT s AS sequence, obix.cloudevent(event('paid', NULL, '1', NULL, sequence => s), 'urn:shop') -> 'sequence' AS attribute
FROM unnest('{9, 10, 9223372036854775807}'::bigint[]) s
ORDER BY 2;

-- of an outbox, read, fetched, and of its rows; what is not an event is left out
SELECT count(obix.publish('orders', jsonb_build_object('n', n), type => 'paid', key => 'k' || n, headers => '{"traceparent": "x"}')) FROM generate_series(1, 3) n;
BEGIN;
INSERT INTO orders (payload) VALUES ('4');
ROLLBACK;
SELECT obix.fill_gaps('orders') BETWEEN 0 AND 1 AS filled;
SELECT obix.publish('orders', '"last"') IS NOT NULL AS published;
SELECT obix.create_consumer('events', 'orders');
SELECT e ->> 'subject' AS subject, e -> 'data' AS data, e ->> 'sequence' AS sequence, e ->> 'traceparent' AS traceparent
FROM obix.read('orders') r CROSS JOIN obix.cloudevent(r) e
ORDER BY r.sequence;
SELECT count(*), bool_and(obix.cloudevent(f) = obix.cloudevent(r)) AS same FROM obix.fetch('events') f JOIN obix.read('orders') r USING (sequence);
SELECT count(*) FROM orders o CROSS JOIN obix.cloudevent(ROW(o.*)::obix.event) e WHERE e ->> 'id' = o.id::text;
SELECT jsonb_array_length(jsonb_agg(obix.cloudevent(f) ORDER BY f.sequence)) AS batch FROM obix.fetch('events') f;

-- whatever is published, the result is valid
SELECT count(*) AS events, count(f) AS faults, min(f)
FROM unnest('{NULL, "", paid, com.example.paid}'::text[]) type
     CROSS JOIN unnest('{NULL, "", account-1}'::text[]) key
     CROSS JOIN unnest(ARRAY['null', '{"a": null}', '[]', '1', '"x"']::jsonb[]) payload
     CROSS JOIN unnest(ARRAY[NULL, 'null', '[1]', '"x"', '{"id": 1, "data": {}, "Type": 1, "traceparent": 1, "a": {}, "b": 1.5, "c": 12345678901, "time": 1}',
                             '{"tracestate": true, "dataschema": "", "specversion": 2, "sequence": 1, "source": null, "d": -1, "é": 1, "e f": 1}']::jsonb[]) headers
     CROSS JOIN unnest('{NULL, infinity, 2026-01-01 00:00:00.1+14}'::timestamptz[]) recorded_at
     CROSS JOIN unnest('{NULL, "", urn:shop}'::text[]) source
     LEFT JOIN LATERAL faults(obix.cloudevent(event(type, key, payload, headers, recorded_at => recorded_at), source)) f ON true;

-- a search_path does not change what it does; it needs no privilege
CREATE FUNCTION lower(text) RETURNS text LANGUAGE sql RETURN 'trap';
CREATE FUNCTION jsonb_build_object(VARIADIC text[]) RETURNS jsonb LANGUAGE sql RETURN '{"trap": true}'::jsonb;
CREATE FUNCTION is_not(uuid, uuid) RETURNS boolean LANGUAGE sql RETURN false;
CREATE OPERATOR <> (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = is_not);
CREATE ROLE regress_obix_events;
GRANT USAGE ON SCHEMA obix_cloudevent TO regress_obix_events;
SET ROLE regress_obix_events;
SET search_path = obix_cloudevent, pg_catalog;
SELECT obix.cloudevent(event('paid', NULL, '1', '{"a": 1}'), 'urn:shop');
RESET ROLE;
SELECT provolatile, proparallel, prosecdef, prosqlbody IS NOT NULL AS standard_body FROM pg_proc WHERE oid = 'obix.cloudevent(obix.event,text)'::regprocedure;
DROP SCHEMA obix_cloudevent CASCADE;
DROP ROLE regress_obix_events;
