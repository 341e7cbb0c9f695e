/*-------------------------------------------------------------------------
 *
 * removal.c
 *	  What follows when events, partitions or outboxes are removed.
 *
 * Three things must not happen: that a sequence is given out twice because the
 * highest rows are gone, that placeholders are written for what was removed,
 * and that a registry row or shared state outlives its outbox.  For the first
 * two, whatever removes rows raises the resolved position over them in its own
 * transaction: a missing row at or below that position was removed.
 *
 * TRUNCATE is seen by statement triggers, on the outbox and on each leaf.
 * Dropping and detaching are seen by object_access_hook rather than an event
 * trigger: a leaf that is dropped or detached drops its clone of the guard, and
 * that clone still tells which outbox it belonged to.  It also works where
 * event triggers do not fire.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xlog.h"
#include "catalog/objectaccess.h"
#include "catalog/partition.h"
#include "catalog/pg_class.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_trigger.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bounds.h"
#include "compat.h"
#include "consumer.h"
#include "event.h"
#include "insert.h"
#include "obix.h"
#include "registry.h"
#include "relation.h"
#include "removal.h"
#include "writer.h"
#include "xact.h"

PG_FUNCTION_INFO_V1(obix_guard_truncate);

static object_access_hook_type next_object_access_hook = NULL;

/* The head of an outbox that the caller has locked. */
static int64
head_of(Relation parent, ObixRelation *known)
{
	ObixOutbox *shared = obix_find_outbox(RelationGetRelid(parent), known->id);
	ObixPosition position;
	ObixRegistryRow row;

	if (shared != NULL)
	{
		obix_get_position(shared, RelationGetRelid(parent), known->id, &position);
		return position.head;
	}
	if (!obix_registry_find(RelationGetRelid(parent), &row))
		return 0;
	if (obix_why_not_ready(parent) != NULL)
		return row.resolved;
	return Max(row.resolved, obix_newest_row(parent));
}

/*
 * Have a row at the head, where the last sequences are missing: a subscriber
 * that then sees TRUNCATE must not wait for them.  It knows the head by the rows
 * that it was sent.
 */
static void
send_head(Relation parent, int64 head)
{
	ObixWriter *writer;
	ObixIdentity saved;

	if (!XLogLogicalInfoActive() || !obix_enabled ||
		SessionReplicationRole == SESSION_REPLICATION_ROLE_REPLICA ||
		obix_why_not_ready(parent) != NULL || obix_newest_row(parent) >= head)
		return;
	obix_become_owner(parent, &saved);
	writer = obix_writer_begin(parent, true, false);
	(void) obix_writer_put(writer, obix_form_placeholder(), head,
						   GetCurrentTimestamp());
	obix_writer_end(writer);
	obix_become_self(&saved);
}

/*
 * All of an outbox is being emptied.  Its lock excludes every transaction that
 * has sequences in flight, prepared ones included, but for our own.
 */
static void
empty_outbox(Relation parent, ObixRelation *known)
{
	Oid			relid = RelationGetRelid(parent);
	int64		head = head_of(parent, known);
	ObixOutbox *shared = obix_find_outbox(relid, known->id);

	send_head(parent, head);
	obix_raise_resolved(relid, head, true);
	if (shared != NULL)
		obix_xact_walked(obix_xact(parent, shared), head + 1, 0, 0);
}

/*
 * The highest sequence in a leaf that cannot be walked any more: what belongs to
 * a table is dropped in no particular order, its primary key among it.
 */
static bool
search_highest(Relation leaf, Snapshot snapshot, int64 *highest)
{
	TupleTableSlot *slot = table_slot_create(leaf, NULL);
	TableScanDesc scan = table_beginscan(leaf, snapshot, 0, NULL, SO_NONE);
	bool		found = false;

	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		bool		isnull;
		int64		sequence = DatumGetInt64(slot_getattr(slot, Anum_event_sequence,
														  &isnull));

		CHECK_FOR_INTERRUPTS();
		if (!found || sequence > *highest)
			*highest = sequence;
		found = true;
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	return found;
}

/*
 * The rows of one leaf are being removed: what is missing there from now on is
 * no hole.  The leaf is locked exclusively.
 *
 * Where the leaf stays, sequences of it may still be in flight or be abandoned
 * and not yet filled, and would be passed over: that is refused.  Where it goes,
 * the outbox is locked too, so nothing is in flight; holes below that nobody
 * has filled yet count as removed along with it.
 */
static void
remove_rows(Relation parent, ObixRelation *known, Relation leaf, bool stays)
{
	ObixRegistryRow row;
	SnapshotData dirty;
	int64		highest;
	bool		found;

	InitDirtySnapshot(dirty);
	if (obix_can_scan(leaf))
		found = obix_highest_in(leaf, &dirty, PG_INT64_MIN, PG_INT64_MAX, &highest);
	else if (obix_find_outbox(RelationGetRelid(parent), known->id) == NULL &&
			 leaf->rd_rel->relkind == RELKIND_RELATION && obix_has_columns(leaf))
		found = search_highest(leaf, &dirty, &highest);
	else
	{
		highest = head_of(parent, known);	/* it may have had the head */
		found = true;
	}
	if (!found)
		return;
	if (!obix_registry_find(RelationGetRelid(parent), &row) ||
		row.resolved >= highest)
		return;

	if (stays)
	{
		ObixPosition position;

		obix_get_position(obix_attach(parent, known), RelationGetRelid(parent),
						  known->id, &position);
		if (highest > position.high_water_mark)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("cannot truncate partition \"%s\" of outbox \"%s\" now",
							RelationGetRelationName(leaf),
							RelationGetRelationName(parent)),
					 errdetail("Sequences up to %lld are in flight or may have been abandoned.",
							   (long long) highest),
					 errhint("Try again later, call obix.fill_gaps, or TRUNCATE the outbox.")));
	}
	obix_raise_resolved(RelationGetRelid(parent), highest, true);
}

/*
 * obix.guard_truncate(): statement trigger BEFORE TRUNCATE.
 */
Datum
obix_guard_truncate(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;
	Relation	rel;
	Relation	parent;
	ObixRelation *known;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_BY_TRUNCATE(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired BEFORE TRUNCATE",
						"obix.guard_truncate")));

	obix_require_preload();
	rel = trigger->tg_relation;
	if (rel->rd_rel->relkind == RELKIND_PARTITIONED_TABLE)
	{
		known = obix_get_relation(rel);
		if (known != NULL)
			empty_outbox(rel, known);
	}
	else if (rel->rd_rel->relispartition)
	{
		parent = table_open(get_partition_parent(RelationGetRelid(rel), true),
							AccessShareLock);
		known = obix_get_relation(parent);

		/* where the outbox is truncated, its own trigger has done the work */
		if (known != NULL)
			remove_rows(parent, known, rel, true);
		table_close(parent, NoLock);
	}
	return PointerGetDatum(NULL);
}

/* A leaf leaves its outbox, dropped or detached. */
static void
lose_leaf(Oid leaf_relid, Oid parent_relid)
{
	Relation	parent = table_open(parent_relid, AccessShareLock);
	Relation	leaf = table_open(leaf_relid, AccessShareLock);
	ObixRelation *known = obix_get_relation(parent);

	if (known != NULL)
		remove_rows(parent, known, leaf, false);
	table_close(leaf, NoLock);
	table_close(parent, NoLock);
}

/* Read a row of pg_trigger; false if there is none. */
static bool
get_trigger(Oid trigger, Form_pg_trigger form)
{
	Relation	catalog = table_open(TriggerRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_pg_trigger_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(trigger));
	scan = systable_beginscan(catalog, TriggerOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		memcpy(form, GETSTRUCT(tuple), offsetof(FormData_pg_trigger, tgattr));
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return HeapTupleIsValid(tuple);
}

/* A trigger is about to be dropped. */
static void
trigger_dropped(Oid trigger)
{
	FormData_pg_trigger form;
	FormData_pg_trigger above;
	Oid			guard = obix_guard_oid();

	if (!OidIsValid(guard) || !get_trigger(trigger, &form) ||
		form.tgfoid != guard ||
		strcmp(NameStr(form.tgname), OBIX_GUARD_NAME) != 0)
		return;
	if (!OidIsValid(form.tgparentid))
		obix_xact_dropped(MyDatabaseId, form.tgrelid);
	else if (form.tgrelid != obix_unguarded && get_trigger(form.tgparentid, &above))
		lose_leaf(form.tgrelid, above.tgrelid);
}

/* A partitioned table is about to be dropped. */
static void
table_dropped(Oid relid)
{
	ObixRegistryRow row;
	ListCell   *cell;

	if (!obix_registry_find(relid, &row))
		return;
	foreach(cell, obix_list_consumers(relid))
		obix_delete_consumer(lfirst(cell));
	obix_registry_delete(relid);
	obix_xact_dropped(MyDatabaseId, relid);
}

/* An extension was created or altered: is it ours? */
static void
extension_changed(ObjectAccessType access, Oid extension)
{
	char	   *name;

	if (access != OAT_POST_CREATE && access != OAT_POST_ALTER)
		return;
	name = get_extension_name(extension);	/* NULL: not visible yet */
	if (name == NULL || strcmp(name, "obix") == 0)
		obix_xact_changes_extension(access == OAT_POST_ALTER);
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

	if (class == DatabaseRelationId)
		obix_xact_note_databases();
	if (class == ExtensionRelationId)
		extension_changed(access, object);
	if (access != OAT_DROP || subid != 0)
		return;
	if (class == RelationRelationId)
	{
		if (get_rel_relkind(object) == RELKIND_PARTITIONED_TABLE)
			table_dropped(object);
	}
	else if (class == TriggerRelationId)
		trigger_dropped(object);
	else if (class == DatabaseRelationId)
		obix_xact_dropped(object, InvalidOid);
}

void
obix_removal_init(void)
{
	next_object_access_hook = object_access_hook;
	object_access_hook = on_object_access;
}
