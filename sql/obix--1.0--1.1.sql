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
