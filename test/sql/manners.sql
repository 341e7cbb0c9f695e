--
-- What psql shows: names and comments, and errors that say where the user is
--
\set SHOW_CONTEXT never
SET client_min_messages = warning;

-- the objects of the extension
CREATE TEMPORARY VIEW member AS
SELECT classid, objid FROM pg_depend
WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
      AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'obix');

-- \dx+ and \d+: each has a comment, and so has each column
SELECT pg_describe_object(classid, objid, 0) AS not_commented FROM member
WHERE coalesce(obj_description(objid, classid::regclass::text), '') = ''
      -- the types of tables and of arrays
      AND NOT (classid = 'pg_type'::regclass AND (SELECT typelem <> 0 OR (SELECT relkind <> 'c' FROM pg_class WHERE oid = typrelid)
                                                  FROM pg_type WHERE oid = objid))
ORDER BY 1;
SELECT attrelid::regclass, attname AS not_commented FROM pg_attribute
WHERE attrelid IN (SELECT objid FROM member WHERE classid = 'pg_class'::regclass
                   UNION ALL SELECT typrelid FROM member JOIN pg_type t ON t.oid = objid WHERE classid = 'pg_type'::regclass AND typtype = 'c')
      AND attnum > 0 AND NOT attisdropped AND coalesce(col_description(attrelid, attnum), '') = ''
      AND (SELECT relkind <> 'S' FROM pg_class WHERE oid = attrelid)
ORDER BY attrelid::regclass::text, attnum;

-- \df+: each argument has a name, and that of an input stands in the comment
SELECT p.oid::regprocedure AS argument_without_name FROM member JOIN pg_proc p ON p.oid = objid
WHERE classid = 'pg_proc'::regclass
      AND (cardinality(coalesce(proargnames, '{}')) <> cardinality(coalesce(proallargtypes, proargtypes::oid[]))
           OR '' = ANY (proargnames))
ORDER BY 1;
SELECT p.oid::regprocedure AS function, name AS argument_not_in_comment
FROM member JOIN pg_proc p ON p.oid = objid CROSS JOIN LATERAL unnest(proargnames) WITH ORDINALITY a (name, n)
WHERE classid = 'pg_proc'::regclass AND n <= pronargs
      AND obj_description(p.oid, 'pg_proc') !~ ('\m' || name || '\M')
ORDER BY p.oid::regprocedure::text, n;

-- comments begin in lower case, or with a name, and have no full stop
SELECT pg_describe_object(classoid, objoid, objsubid) AS object, description AS not_in_style
FROM pg_description JOIN member ON objid = objoid AND classid = classoid
WHERE description ~ '^[A-Z][a-z ]|\.$|\s\s|^\s|\s$' ORDER BY 1;

-- those who are not meant to be called say so
SELECT p.proname FROM member JOIN pg_proc p ON p.oid = objid
WHERE classid = 'pg_proc'::regclass AND obj_description(p.oid, 'pg_proc') ~ '^internal: ' ORDER BY 1;

-- settings: a sentence each
SELECT name FROM pg_settings WHERE name ~ '^obix\.' AND (short_desc !~ '^[A-Z].*\.$' OR extra_desc !~ '^[A-Z0-9].*\.$') ORDER BY 1;

-- the guard of obix's own tables on somebody else's
CREATE TABLE stray (id integer);
CREATE TRIGGER guard AFTER INSERT ON stray FOR EACH ROW EXECUTE FUNCTION obix.guard_registry();
INSERT INTO stray VALUES (1);
\echo :LAST_ERROR_SQLSTATE
DROP TRIGGER guard ON stray;
CREATE TRIGGER guard BEFORE INSERT ON stray FOR EACH ROW EXECUTE FUNCTION obix.guard_registry();
CREATE ROLE regress_obix_stray;
GRANT INSERT ON stray TO regress_obix_stray;
SET ROLE regress_obix_stray;
INSERT INTO stray VALUES (1);
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
DROP TABLE stray;
DROP ROLE regress_obix_stray;
