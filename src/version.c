/*-------------------------------------------------------------------------
 *
 * version.c
 *	  The version of the library, and that of the extension in a database.
 *
 * A package upgrade brings a new library, which the server loads when it is
 * restarted, and new SQL objects, which a database has after ALTER EXTENSION
 * obix UPDATE.  In between, what sessions call goes on working: functions of
 * the library keep the signatures that older SQL objects have.  Workers do not
 * act where the two differ, since nobody would see what they run into.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_extension.h"
#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"

#include "version.h"

PG_FUNCTION_INFO_V1(obix_library_version);

/* The version of the extension in this database, NULL if it is not there. */
char *
obix_extension_version(void)
{
	Relation	catalog = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	char	   *version = NULL;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
				CStringGetDatum("obix"));
	scan = systable_beginscan(catalog, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		value = heap_getattr(tuple, Anum_pg_extension_extversion,
										 RelationGetDescr(catalog), &isnull);

		version = TextDatumGetCString(value);
	}
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return version;
}

/* Is a version, "MAJOR.MINOR", before that of the library? */
bool
obix_is_before_library(const char *version)
{
	const char *library = OBIX_VERSION;
	char	   *end;

	for (;;)
	{
		long		theirs = strtol(version, &end, 10);
		long		ours;

		version = *end == '.' ? end + 1 : end;
		ours = strtol(library, &end, 10);
		library = *end == '.' ? end + 1 : end;
		if (theirs != ours || *version == '\0' || *library == '\0')
			return theirs < ours || (theirs == ours && *library != '\0');
	}
}

/*
 * obix.library_version()
 */
Datum
obix_library_version(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text(OBIX_VERSION));
}
