/*-------------------------------------------------------------------------
 *
 * insert.c
 *	  Plain INSERT, UPDATE and DELETE on an outbox: the default of the column
 *	  sequence, and the guard.
 *
 * The default draws the sequence, for a BEFORE ROW trigger could not: it may
 * not move a row to another partition.  The guard, a row trigger that is cloned
 * to every leaf, then accepts what this transaction has drawn and nothing else.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/partition.h"
#include "catalog/pg_index.h"
#include "catalog/pg_trigger.h"
#include "commands/trigger.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "bounds.h"
#include "insert.h"
#include "obix.h"
#include "relation.h"
#include "uuid.h"
#include "work.h"
#include "writer.h"
#include "xact.h"

/* What obix.next_sequence keeps during a statement: this user may insert here */
typedef struct ObixDrawing
{
	Oid			relid;
	Oid			userid;
} ObixDrawing;

PG_FUNCTION_INFO_V1(obix_next_sequence);
PG_FUNCTION_INFO_V1(obix_guard);

Oid			obix_unguarded = InvalidOid;

/* The partition that the guard was called for last */
static struct
{
	Oid			relid;			/* InvalidOid: nothing is known */
	Oid			parent;
	bool		is_default;
	bool		may_refuse;		/* what the guard lets pass may yet be turned
								 * away, by ON CONFLICT or a later trigger */
	AttrNumber	attnums[Natts_event];
}			guarded;

/* Relation cache callback.  Raises nothing. */
static void
forget_guarded(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) || relid == guarded.relid ||
		relid == guarded.parent)
		guarded.relid = InvalidOid;
}

void
obix_guard_init(void)
{
	CacheRegisterRelcacheCallback(forget_guarded, (Datum) 0);
}

/* Error out unless the user may insert; asked once in a statement, like others. */
static void
check_drawing(FmgrInfo *flinfo, Oid relid)
{
	ObixDrawing *drawing = flinfo != NULL ? flinfo->fn_extra : NULL;

	if (drawing != NULL && drawing->relid == relid &&
		drawing->userid == GetUserId())
		return;
	obix_check_privilege(relid, ACL_INSERT);
	if (flinfo == NULL)
		return;
	if (drawing == NULL)
		flinfo->fn_extra = drawing = MemoryContextAlloc(flinfo->fn_mcxt,
														sizeof(ObixDrawing));
	drawing->relid = relid;
	drawing->userid = GetUserId();
}

/*
 * obix.next_sequence(outbox): draw a sequence.
 *
 * Keeps ROW EXCLUSIVE on the outbox to the end of the transaction: whoever
 * locks that out knows that no sequence is in flight.
 */
Datum
obix_next_sequence(PG_FUNCTION_ARGS)
{
	Oid			relid = PG_GETARG_OID(0);
	ObixRelation *known;
	ObixXact   *xact;

	obix_check_enabled("obix.next_sequence()");
	check_drawing(fcinfo->flinfo, relid);

	/* with the lock, and nothing changed, the shared state is what it was */
	xact = obix_xact_if_locked(relid);
	if (xact != NULL)
		known = obix_remember(relid);
	if (xact == NULL || known == NULL || !known->attached)
	{
		Relation	parent = obix_open(relid, RowExclusiveLock, &known);

		xact = obix_xact(parent, obix_attach(parent, known));
		obix_xact_locked(xact);
		table_close(parent, NoLock);
	}
	PG_RETURN_INT64(obix_xact_draw(xact));
}

/*
 * Learn about the partition that the guard is called for.  Returns false if it
 * does not belong to an outbox: anybody can put the trigger on a table of
 * theirs, and a restore may not have got to the registry yet.
 */
static bool
look_at(Relation leaf)
{
	Oid			relid = RelationGetRelid(leaf);
	Oid			parent_relid;
	Relation	parent;
	List	   *indexes;
	ListCell   *cell;

	guarded.relid = InvalidOid;
	parent_relid = leaf->rd_rel->relispartition ?
		get_partition_parent(relid, true) : relid;

	parent = table_open(parent_relid, AccessShareLock);
	if (obix_get_relation(parent) == NULL)
	{
		table_close(parent, NoLock);
		return false;
	}
	guarded.parent = parent_relid;
	guarded.is_default = obix_default_leaf(parent) == relid;
	for (int i = 0; i < Natts_event; i++)
	{
		Form_pg_attribute column = TupleDescAttr(obix_event_desc(), i);

		guarded.attnums[i] = get_attnum(relid, NameStr(column->attname));
		if (guarded.attnums[i] == InvalidAttrNumber ||
			get_atttype(relid, guarded.attnums[i]) != column->atttypid)
			obix_check_columns(leaf);	/* says what is wrong */
	}

	obix_check_placeholder(parent);
	obix_check_placeholder_indexes(leaf);

	guarded.may_refuse = false;
	indexes = RelationGetIndexList(leaf);
	foreach(cell, indexes)
	{
		Oid			index = lfirst_oid(cell);
		HeapTuple	tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
		Form_pg_index form;

		if (!HeapTupleIsValid(tuple))
			continue;
		form = (Form_pg_index) GETSTRUCT(tuple);
		if (!form->indisprimary &&
			(form->indisunique || form->indisexclusion))
			guarded.may_refuse = true;
		ReleaseSysCache(tuple);
	}
	list_free(indexes);

	for (int i = 0; i < leaf->trigdesc->numtriggers; i++)
	{
		Trigger    *trigger = &leaf->trigdesc->triggers[i];

		if (strcmp(trigger->tgname, OBIX_GUARD_NAME) > 0 &&
			TRIGGER_FOR_BEFORE(trigger->tgtype) &&
			TRIGGER_FOR_INSERT(trigger->tgtype))
			guarded.may_refuse = true;
	}
	table_close(parent, NoLock);
	guarded.relid = relid;
	return true;
}

static Datum
get_column(TupleTableSlot *slot, int column, bool *isnull)
{
	return slot_getattr(slot, guarded.attnums[column - 1], isnull);
}

/*
 * A row comes with the sequence that another server, or this one before a
 * restore, gave it.
 */
static void
accept_row(TupleTableSlot *slot)
{
	bool		isnull;
	int64		sequence = DatumGetInt64(get_column(slot, Anum_event_sequence,
													&isnull));
	ObixRelation *known;
	ObixOutbox *shared;
	Relation	parent;

	if (isnull || sequence < 1)
		return;
	if (sequence >= PG_INT64_MAX - 1)
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("sequence %lld is out of range", (long long) sequence)));
	parent = obix_open(guarded.parent, RowExclusiveLock, &known);
	shared = obix_try_attach(parent, known);
	if (shared != NULL)
	{
		obix_xact_accept(obix_xact(parent, shared), sequence);
		if (guarded.is_default)
			obix_xact_request_work(guarded.parent, OBIX_WORK_RECOVER);
	}
	table_close(parent, NoLock);
}

static void
check_insert(TupleTableSlot *slot)
{
	bool		isnull;
	int64		sequence;
	Datum		id;

	(void) get_column(slot, Anum_event_payload, &isnull);
	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("payload of an event must not be null"),
				 errhint("An event without a body can have the payload 'null'::jsonb.")));

	id = get_column(slot, Anum_event_id, &isnull);
	if (!isnull && obix_uuid_is_nil(DatumGetUUIDP(id)))
		ereport(ERROR,
				(errcode(ERRCODE_CHECK_VIOLATION),
				 errmsg("id of an event must not be the nil UUID"),
				 errdetail("The nil UUID marks placeholders, which obix alone writes."),
				 errhint("Leave the column \"id\" to its default.")));

	sequence = DatumGetInt64(get_column(slot, Anum_event_sequence, &isnull));
	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("sequence of an event must not be null"),
				 errhint("Leave the column \"sequence\" to its default.")));
	if (!obix_xact_use(guarded.parent, sequence))
		ereport(ERROR,
				(errcode(ERRCODE_GENERATED_ALWAYS),
				 errmsg("cannot insert sequence %lld into outbox \"%s\"",
						(long long) sequence, get_rel_name(guarded.parent)),
				 errdetail("A sequence can be inserted once, by the transaction that drew it from obix.next_sequence."),
				 errhint("Leave the column \"sequence\" to its default.")));

	if (guarded.may_refuse)
		obix_xact_may_leave_hole(guarded.parent);
	if (guarded.is_default)
		obix_xact_request_work(guarded.parent, OBIX_WORK_RECOVER);
}

static void
check_update(TupleTableSlot *before, TupleTableSlot *after)
{
	static const int fixed[] = {
		Anum_event_sequence, Anum_event_id, Anum_event_type, Anum_event_key,
		Anum_event_recorded_at
	};
	bool		isnull[2];
	Datum		id;

	id = get_column(before, Anum_event_id, &isnull[0]);
	if (!isnull[0] && obix_uuid_is_nil(DatumGetUUIDP(id)))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot update a placeholder of outbox \"%s\"",
						get_rel_name(guarded.parent)),
				 errdetail("It stands for a sequence that no event has.")));

	for (int i = 0; i < lengthof(fixed); i++)
	{
		Form_pg_attribute column = TupleDescAttr(obix_event_desc(), fixed[i] - 1);
		Datum		value[2];

		value[0] = get_column(before, fixed[i], &isnull[0]);
		value[1] = get_column(after, fixed[i], &isnull[1]);
		if (isnull[0] && isnull[1])
			continue;
		if (isnull[0] == isnull[1] &&
			datum_image_eq(value[0], value[1], column->attbyval, column->attlen))
			continue;
		ereport(ERROR,
				(errcode(fixed[i] == Anum_event_sequence ?
						 ERRCODE_GENERATED_ALWAYS : ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot update column \"%s\" of outbox \"%s\"",
						NameStr(column->attname), get_rel_name(guarded.parent)),
				 errdetail("Events are append-only: readers may have seen this one."),
				 errhint("Only payload and headers can be updated, to redact them; publish a new event instead.")));
	}

	(void) get_column(after, Anum_event_payload, &isnull[0]);
	if (isnull[0])
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("payload of an event must not be null"),
				 errhint("To redact an event, update its payload to 'null'::jsonb.")));
}

/*
 * obix.guard(): row trigger BEFORE INSERT OR UPDATE OR DELETE, enabled ALWAYS.
 */
Datum
obix_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;
	HeapTuple	result;
	bool		as_it_comes;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired BEFORE ROW",
						"obix.guard")));

	result = TRIGGER_FIRED_BY_UPDATE(trigger->tg_event) ?
		trigger->tg_newtuple : trigger->tg_trigtuple;

	obix_require_preload();
	if (RelationGetRelid(trigger->tg_relation) == obix_unguarded)
		return PointerGetDatum(result);

	as_it_comes = SessionReplicationRole == SESSION_REPLICATION_ROLE_REPLICA ||
		!obix_enabled;
	if (guarded.relid != RelationGetRelid(trigger->tg_relation) &&
		!look_at(trigger->tg_relation))
	{
		if (as_it_comes)
			return PointerGetDatum(result);
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("\"%s\" is not a partition of an outbox",
						RelationGetRelationName(trigger->tg_relation)),
				 errdetail("It has a trigger that calls obix.guard."),
				 errhint("Drop the trigger.")));
	}

	if (as_it_comes)
	{
		if (TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
			accept_row(trigger->tg_trigslot);
	}
	else if (TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
		check_insert(trigger->tg_trigslot);
	else if (TRIGGER_FIRED_BY_UPDATE(trigger->tg_event))
		check_update(trigger->tg_trigslot, trigger->tg_newslot);
	else
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot delete from outbox \"%s\"",
						get_rel_name(guarded.parent)),
				 errdetail("Events are append-only: a reader would take the place for an event that is still to come."),
				 errhint("To redact an event, update its payload; to remove old events, drop the oldest partition or use TRUNCATE.")));

	return PointerGetDatum(result);
}
