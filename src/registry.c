/*-------------------------------------------------------------------------
 *
 * registry.c
 *	  The table obix.outbox, and the heavyweight locks named after its rows.
 *
 * The table belongs to the extension; who owns an outbox has no privilege to
 * write there and needs none, since obix writes the rows by way of the table
 * access method.  It is found by extension membership, not by name alone:
 * anybody may have a schema called obix.
 *
 * Rows are read as last committed, whatever the transaction's own snapshot:
 * they describe what is, like a catalog.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_proc.h"
#include "commands/extension.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "obix.h"
#include "registry.h"

/* Columns of obix.outbox, in the order of the SQL script */
#define Anum_outbox_outbox			1
#define Anum_outbox_id				2
#define Anum_outbox_partition_width 3
#define Anum_outbox_premake			4
#define Anum_outbox_resolved		5
#define Natts_outbox				5

/* A table of this name in schema obix, if it belongs to the extension. */
Oid
obix_member_relid(const char *name)
{
	Oid			extension = get_extension_oid("obix", true);
	Oid			namespace;
	Oid			relid;

	if (!OidIsValid(extension))
		return InvalidOid;
	namespace = get_namespace_oid("obix", true);
	if (!OidIsValid(namespace))
		return InvalidOid;
	relid = get_relname_relid(name, namespace);
	if (!OidIsValid(relid) ||
		getExtensionOfObject(RelationRelationId, relid) != extension)
		return InvalidOid;
	return relid;
}

static Oid	registry_relid = InvalidOid;

/* Syscache callback: some relation or schema has changed.  Raises nothing. */
static void
forget_registry(Datum arg, int cache, uint32 hash)
{
	registry_relid = InvalidOid;
}

/* The oid of obix.outbox, InvalidOid where the extension is not installed. */
Oid
obix_registry_relid(void)
{
	Oid			found;

	if (OidIsValid(registry_relid))
		return registry_relid;

	found = obix_member_relid("outbox");
	registry_relid = found;
	return found;
}

/*
 * Set while maintenance must not wait for anything, because it has locked
 * another outbox already.  Reset by whoever set it, also on error.
 */
bool		obix_no_wait = false;

static Oid	guard_oid = InvalidOid;

/* Syscache callback: some function has changed.  Raises nothing. */
static void
forget_guard(Datum arg, int cache, uint32 hash)
{
	guard_oid = InvalidOid;
}

void
obix_registry_init(void)
{
	CacheRegisterSyscacheCallback(PROCOID, forget_guard, (Datum) 0);
	CacheRegisterSyscacheCallback(RELOID, forget_registry, (Datum) 0);
	CacheRegisterSyscacheCallback(NAMESPACEOID, forget_registry, (Datum) 0);
}

/* The oid of obix.guard(), InvalidOid where the extension is not installed. */
Oid
obix_guard_oid(void)
{
	Oid			extension;
	Oid			namespace;
	Oid			found;

	if (OidIsValid(guard_oid))
		return guard_oid;
	extension = get_extension_oid("obix", true);
	namespace = get_namespace_oid("obix", true);
	if (!OidIsValid(extension) || !OidIsValid(namespace))
		return InvalidOid;
	found = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
							CStringGetDatum("guard"),
							PointerGetDatum(buildoidvector(NULL, 0)),
							ObjectIdGetDatum(namespace));
	if (!OidIsValid(found) ||
		getExtensionOfObject(ProcedureRelationId, found) != extension)
		return InvalidOid;
	guard_oid = found;
	return found;
}

/* Open obix.outbox; NULL where the extension is not, or no longer, installed. */
static Relation
try_open_registry(LOCKMODE lockmode)
{
	Oid			relid = obix_registry_relid();

	return OidIsValid(relid) ? try_table_open(relid, lockmode) : NULL;
}

static Relation
open_registry(LOCKMODE lockmode)
{
	Relation	registry = try_open_registry(lockmode);

	if (registry == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"obix\" is not installed in this database"),
				 errhint("Use CREATE EXTENSION obix.")));
	return registry;
}

static void
read_row(HeapTuple tuple, TupleDesc desc, ObixRegistryRow *row)
{
	Datum		values[Natts_outbox];
	bool		isnull[Natts_outbox];

	heap_deform_tuple(tuple, desc, values, isnull);
	row->outbox = DatumGetObjectId(values[Anum_outbox_outbox - 1]);
	row->id = DatumGetInt32(values[Anum_outbox_id - 1]);
	row->partition_width = DatumGetInt64(values[Anum_outbox_partition_width - 1]);
	row->premake = DatumGetInt32(values[Anum_outbox_premake - 1]);
	row->resolved = DatumGetInt64(values[Anum_outbox_resolved - 1]);
}

/*
 * Visit the row of one outbox, or with InvalidOid all.  The scan holds a
 * snapshot of its own, the newest.
 */
static SysScanDesc
begin_scan(Relation registry, Oid outbox, ScanKey key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());

	if (!OidIsValid(outbox))
		return systable_beginscan(registry, InvalidOid, false, snapshot, 0, NULL);

	/* DROP EXTENSION may have taken the index before the table */
	RelationGetIndexList(registry); /* sets rd_pkindex */
	ScanKeyInit(key, Anum_outbox_outbox, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(outbox));
	return systable_beginscan(registry, registry->rd_pkindex,
							  OidIsValid(registry->rd_pkindex), snapshot,
							  1, key);
}

static void
end_scan(SysScanDesc scan)
{
	Snapshot	snapshot = scan->iscan ? scan->iscan->xs_snapshot :
		scan->scan->rs_snapshot;

	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
}

/*
 * Find the row of an outbox.  Returns false if the relation is none, also
 * where the extension is not installed.  Keeps no lock.
 */
bool
obix_registry_find(Oid outbox, ObixRegistryRow *row)
{
	Relation	registry = try_open_registry(AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	if (registry == NULL)
		return false;
	scan = begin_scan(registry, outbox, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		read_row(tuple, RelationGetDescr(registry), row);
	end_scan(scan);
	table_close(registry, AccessShareLock);
	return HeapTupleIsValid(tuple);
}

static int
compare_ids(const ListCell *a, const ListCell *b)
{
	int32		ids[2] = {((ObixRegistryRow *) lfirst(a))->id,
	((ObixRegistryRow *) lfirst(b))->id};

	return ids[0] < ids[1] ? -1 : ids[0] > ids[1];
}

/*
 * All rows in the order of their ids, which is that of locking more than one: a
 * list of ObixRegistryRow in the current memory context.
 */
List *
obix_registry_list(void)
{
	List	   *rows = NIL;
	Relation	registry = try_open_registry(AccessShareLock);
	SysScanDesc scan;
	HeapTuple	tuple;

	if (registry == NULL)
		return NIL;
	scan = begin_scan(registry, InvalidOid, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		ObixRegistryRow *row = palloc(sizeof(ObixRegistryRow));

		read_row(tuple, RelationGetDescr(registry), row);
		rows = lappend(rows, row);
	}
	end_scan(scan);
	table_close(registry, AccessShareLock);
	list_sort(rows, compare_ids);
	return rows;
}

void
obix_registry_insert(Oid outbox, int64 partition_width, int32 premake)
{
	Relation	registry = open_registry(RowExclusiveLock);
	Oid			sequence = obix_member_relid("outbox_id_seq");
	Datum		values[Natts_outbox];
	bool		isnull[Natts_outbox] = {false};
	HeapTuple	tuple;

	if (!OidIsValid(sequence))
		elog(ERROR, "could not find sequence of obix.outbox");

	values[Anum_outbox_outbox - 1] = ObjectIdGetDatum(outbox);
	values[Anum_outbox_id - 1] =
		Int32GetDatum((int32) nextval_internal(sequence, false));
	values[Anum_outbox_partition_width - 1] = Int64GetDatum(partition_width);
	values[Anum_outbox_premake - 1] = Int32GetDatum(premake);
	values[Anum_outbox_resolved - 1] = Int64GetDatum(0);

	tuple = heap_form_tuple(RelationGetDescr(registry), values, isnull);
	CatalogTupleInsert(registry, tuple);
	table_close(registry, NoLock);
	CommandCounterIncrement();
}

/*
 * Replace the row of an outbox.  The caller has read it under
 * OBIX_MUTEX_ROW, so nobody else is changing it.
 */
void
obix_registry_update(const ObixRegistryRow *row)
{
	Relation	registry = open_registry(RowExclusiveLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	scan = begin_scan(registry, row->outbox, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		Datum		values[Natts_outbox] = {0};
		bool		isnull[Natts_outbox] = {false};
		bool		replace[Natts_outbox] = {false};
		HeapTuple	copy;

		values[Anum_outbox_partition_width - 1] = Int64GetDatum(row->partition_width);
		values[Anum_outbox_premake - 1] = Int32GetDatum(row->premake);
		values[Anum_outbox_resolved - 1] = Int64GetDatum(row->resolved);
		replace[Anum_outbox_partition_width - 1] = true;
		replace[Anum_outbox_premake - 1] = true;
		replace[Anum_outbox_resolved - 1] = true;
		copy = heap_modify_tuple(tuple, RelationGetDescr(registry),
								 values, isnull, replace);
		CatalogTupleUpdate(registry, &copy->t_self, copy);
	}
	end_scan(scan);
	table_close(registry, NoLock);
	CommandCounterIncrement();
}

/* Delete the row of an outbox, if there is one. */
void
obix_registry_delete(Oid outbox)
{
	Relation	registry = try_open_registry(RowExclusiveLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	if (registry == NULL)
		return;
	scan = begin_scan(registry, outbox, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		CatalogTupleDelete(registry, &tuple->t_self);
	end_scan(scan);
	table_close(registry, NoLock);
	CommandCounterIncrement();
}

/*
 * Within the caller's GUC nest level, wait for a lock no longer than publishers
 * may have to wait behind us.  Deadlocks are looked for sooner than anybody
 * else does: that cancels an autovacuum in the way, and where we are part of
 * one it is we who give way.
 */
void
obix_limit_lock_waits(void)
{
	char		buffer[32];

	snprintf(buffer, sizeof(buffer), "%d", obix_no_wait ? 1 : obix_lock_timeout);
	(void) set_config_option("lock_timeout", buffer, PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	(void) set_config_option("deadlock_timeout", "10ms", PGC_SUSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
}

/* Does an error only say that somebody else is in the way for now? */
bool
obix_is_busy(int sqlerrcode)
{
	return sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE ||
		sqlerrcode == ERRCODE_T_R_DEADLOCK_DETECTED ||
		sqlerrcode == ERRCODE_OBJECT_IN_USE;
}

/*
 * Keep the extension to the end of the transaction.  Whoever drops it takes
 * this lock before any other; so who has it does not meet objects that are half
 * gone, nor ends in a deadlock over them.  Returns false if it is gone.
 */
bool
obix_keep_extension(void)
{
	Oid			extension = get_extension_oid("obix", true);

	if (!OidIsValid(extension))
		return false;
	LockDatabaseObject(ExtensionRelationId, extension, 0, AccessShareLock);
	return get_extension_oid("obix", true) == extension;
}

/*
 * Wait for a mutex of an outbox and hold it to the end of the transaction.  No
 * publisher or reader ever waits for one.
 */
void
obix_lock_mutex(int32 id, ObixMutex mutex)
{
	if (!obix_no_wait)
		LockDatabaseObject(obix_registry_relid(), (Oid) id, mutex, ExclusiveLock);
	else if (!obix_try_mutex(id, mutex))
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("maintenance of an outbox is being done by another session")));
}

/* The same without waiting; false if somebody else holds it. */
bool
obix_try_mutex(int32 id, ObixMutex mutex)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, obix_registry_relid(), (Oid) id,
					   mutex);
	return LockAcquire(&tag, ExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * Raise the resolved position of an outbox, if it is lower.  Without wait,
 * gives way to whoever is changing the row and returns false.
 */
bool
obix_raise_resolved(Oid outbox, int64 resolved, bool wait)
{
	ObixRegistryRow row;

	if (!obix_registry_find(outbox, &row) || row.resolved >= resolved)
		return true;
	if (wait)
		obix_lock_mutex(row.id, OBIX_MUTEX_ROW);
	else if (!obix_try_mutex(row.id, OBIX_MUTEX_ROW))
		return false;
	if (obix_registry_find(outbox, &row) && row.resolved < resolved)
	{
		row.resolved = resolved;
		obix_registry_update(&row);
	}
	return true;
}
