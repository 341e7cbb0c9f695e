/*-------------------------------------------------------------------------
 *
 * owner.c
 *	  When an outbox is given to another role, its partitions go with it.
 *
 * ALTER TABLE ... OWNER leaves them behind: the old owner could go on to read
 * the events there, and to attach functions to a partition, in an index for
 * instance, that publishers and maintenance then call as the new owner.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "commands/tablecmds.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "owner.h"
#include "registry.h"

static object_access_hook_type next_object_access_hook = NULL;

/* The owner of a relation before the current command, or in the midst of it. */
static Oid
owner_of(Oid relid, bool now)
{
	Oid			owner = InvalidOid;
	Relation	catalog;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	if (!now)
	{
		tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
		if (!HeapTupleIsValid(tuple))
			return InvalidOid;
		owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
		ReleaseSysCache(tuple);
		return owner;
	}

	catalog = table_open(RelationRelationId, AccessShareLock);
	ScanKeyInit(&key, Anum_pg_class_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(catalog, ClassOidIndexId, true, SnapshotSelf, 1,
							  &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return owner;
}

/* Something about a partitioned table has been altered. */
static void
table_altered(Oid relid)
{
	Oid			before = owner_of(relid, false);
	Oid			owner = owner_of(relid, true);
	ObixRegistryRow row;
	ListCell   *cell;

	if (!OidIsValid(before) || !OidIsValid(owner) || before == owner ||
		!obix_registry_find(relid, &row))
		return;
	foreach(cell, find_all_inheritors(relid, AccessExclusiveLock, NULL))
	{
		Oid			leaf = lfirst_oid(cell);

		if (leaf != relid && owner_of(leaf, false) == before)
			ATExecChangeOwner(leaf, owner, true, AccessExclusiveLock);
	}
}

/*
 * object_access_hook
 */
static void
on_object_access(ObjectAccessType access, Oid class, Oid object, int subid,
				 void *arg)
{
	if (next_object_access_hook)
		next_object_access_hook(access, class, object, subid, arg);

	if (access == OAT_POST_ALTER && class == RelationRelationId && subid == 0 &&
		get_rel_relkind(object) == RELKIND_PARTITIONED_TABLE)
		table_altered(object);
}

void
obix_owner_init(void)
{
	next_object_access_hook = object_access_hook;
	object_access_hook = on_object_access;
}
