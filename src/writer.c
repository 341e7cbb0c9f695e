/*-------------------------------------------------------------------------
 *
 * writer.c
 *	  Inserting rows with ascending sequences straight into the leaves.
 *
 * This bypasses the executor: no plan, no routing of single rows, no triggers.
 * What it would pass over without a word is refused by relation.c; CHECK and
 * NOT NULL constraints and all indexes are honoured here.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "relation.h"
#include "work.h"
#include "writer.h"
#include "xact.h"

/*
 * The leaf into which this session wrote events last: it need not be looked at
 * for every transaction.
 */
static struct
{
	Oid			relid;			/* InvalidOid: it has changed since */
	bool		checked;		/* events can be inserted into it */
	bool		owner_code;		/* see ObixWriter */
}			checked_leaf;

/* Relation cache callback.  Raises nothing. */
static void
forget_leaf(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) || relid == checked_leaf.relid)
		checked_leaf.relid = InvalidOid;
}

void
obix_writer_init(void)
{
	CacheRegisterRelcacheCallback(forget_leaf, (Datum) 0);
}

/*
 * Begin to write into an outbox.  The caller holds ROW EXCLUSIVE on it, has an
 * active snapshot, and has checked the outbox if it writes events.
 *
 * placeholders: rows that the user's triggers have no business with, so they
 * are no objection, and columns that the user has added stay NULL; and whoever
 * writes them does not wait for the lock on a leaf.
 */
ObixWriter *
obix_writer_begin(Relation parent, bool placeholders, bool bulk)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "obix writer",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	ObixWriter *writer = palloc0(sizeof(ObixWriter));

	writer->parent = parent;
	writer->placeholders = placeholders;
	writer->bulk = bulk;
	writer->context = context;
	writer->batch_context = AllocSetContextCreate(context, "obix writer batch",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(old);
	return writer;
}

static void
insert_batch(ObixWriter *writer)
{
	CommandId	cid = GetCurrentCommandId(true);

	if (RelationGetDescr(writer->rel)->constr != NULL)
	{
		for (int i = 0; i < writer->nrows; i++)
			ExecConstraints(writer->info, writer->slots[i], writer->estate);
	}

	if (writer->nrows == 1)
		table_tuple_insert(writer->rel, writer->slots[0], cid, 0,
						   writer->bistate);
	else
		table_multi_insert(writer->rel, writer->slots, writer->nrows, cid, 0,
						   writer->bistate);

	for (int i = 0; i < writer->nrows; i++)
	{
		(void) ExecInsertIndexTuples(writer->info, writer->estate, 0,
									 writer->slots[i], NIL, NULL);
		ExecClearTuple(writer->slots[i]);
		ResetPerTupleExprContext(writer->estate);
	}
}

/*
 * Error context callback: who may not read the outbox is not told what the row
 * in the way looks like, though the owner is, as whom it was met.
 */
static void
hide_row(void *arg)
{
	if (ERRCODE_TO_CATEGORY(geterrcode()) ==
		ERRCODE_INTEGRITY_CONSTRAINT_VIOLATION)
		errdetail("The user may not read outbox \"%s\".", (char *) arg);
}

/*
 * Insert the rows of the batch.  This can be long after the call of
 * obix.publish and in another context, so what belongs to the owner of the
 * outbox runs as the owner, as in maintenance commands.
 */
static void
flush_batch(ObixWriter *writer)
{
	MemoryContext old;
	ObixIdentity saved;

	if (writer->nrows == 0)
		return;

	old = MemoryContextSwitchTo(writer->batch_context);
	if (!writer->owner_code)
		insert_batch(writer);
	else
	{
		ErrorContextCallback callback = {
			.previous = error_context_stack,
			.callback = hide_row,
			.arg = RelationGetRelationName(writer->parent)
		};

		if (!obix_may_read(RelationGetRelid(writer->parent), GetUserId()))
			error_context_stack = &callback;
		obix_become_owner(writer->parent, &saved);
		insert_batch(writer);
		obix_become_self(&saved);
		error_context_stack = callback.previous;
	}

	writer->nrows = 0;
	writer->bytes = 0;
	MemoryContextSwitchTo(old);
	MemoryContextReset(writer->batch_context);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Does inserting into a leaf evaluate expressions of its owner?  Even to open
 * such an index does: constant parts of them are folded.
 */
static bool
has_owner_code(Relation rel)
{
	TupleConstr *constraints = RelationGetDescr(rel)->constr;
	bool		found = constraints != NULL && constraints->num_check > 0;
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *cell;

	foreach(cell, indexes)
	{
		HeapTuple	tuple = SearchSysCache1(INDEXRELID,
											ObjectIdGetDatum(lfirst_oid(cell)));

		if (!HeapTupleIsValid(tuple))
			continue;
		found |= !heap_attisnull(tuple, Anum_pg_index_indexprs, NULL) ||
			!heap_attisnull(tuple, Anum_pg_index_indpred, NULL);
		ReleaseSysCache(tuple);
	}
	list_free(indexes);
	return found;
}

/*
 * Error out if what we are to write cannot be inserted into the leaf that was
 * opened, and find out whether that runs code of its owner.
 */
static void
check_leaf(ObixWriter *writer)
{
	Relation	rel = writer->rel;

	if (writer->placeholders)
	{
		obix_check_columns(rel);
		writer->owner_code = has_owner_code(rel);
		return;
	}
	if (checked_leaf.relid == RelationGetRelid(rel) && checked_leaf.checked)
	{
		writer->owner_code = checked_leaf.owner_code;
		return;
	}

	/* it may be forgotten while we look, so first say what we look at */
	checked_leaf.checked = false;
	checked_leaf.relid = RelationGetRelid(rel);
	obix_check_insertable(rel);
	obix_check_placeholder_indexes(rel);
	writer->owner_code = has_owner_code(rel);
	checked_leaf.owner_code = writer->owner_code;
	checked_leaf.checked = true;
}

/* Open the indexes of the leaf that was opened. */
static void
open_indexes(ObixWriter *writer)
{
	ObixIdentity saved;

	if (writer->owner_code)
		obix_become_owner(writer->parent, &saved);
	ExecOpenIndices(writer->info, false);
	if (writer->owner_code)
		obix_become_self(&saved);
}

static void
close_leaf(ObixWriter *writer)
{
	if (writer->rel == NULL)
		return;
	flush_batch(writer);
	for (int i = 0; i < writer->nslots; i++)
		ExecDropSingleTupleTableSlot(writer->slots[i]);
	writer->nslots = 0;
	if (writer->bistate != NULL)
		FreeBulkInsertState(writer->bistate);
	writer->bistate = NULL;
	ExecCloseIndices(writer->info);
	FreeExecutorState(writer->estate);
	table_close(writer->rel, NoLock);
	writer->rel = NULL;
}

/*
 * Lock the leaf of a sequence.  Who attaches a partition may have had DEFAULT
 * locked while we waited, so the sequence may belong elsewhere now.  Returns
 * false if the lock is not to be had without waiting.
 */
static bool
lock_leaf(ObixWriter *writer, int64 sequence)
{
	for (;;)
	{
		ObixLeaf	again;

		obix_find_leaf(writer->parent, sequence, &writer->leaf);
		if (!OidIsValid(writer->leaf.relid))
			ereport(ERROR,
					(errcode(ERRCODE_CHECK_VIOLATION),
					 errmsg("no partition of outbox \"%s\" found for sequence %lld",
							RelationGetRelationName(writer->parent),
							(long long) sequence),
					 errdetail("The outbox has lost its DEFAULT partition."),
					 errhint("Attach a DEFAULT partition.")));

		if (!writer->placeholders)
			LockRelationOid(writer->leaf.relid, RowExclusiveLock);
		else if (!ConditionalLockRelationOid(writer->leaf.relid,
											 RowExclusiveLock))
			return false;

		obix_find_leaf(writer->parent, sequence, &again);
		if (again.relid == writer->leaf.relid)
		{
			writer->leaf = again;
			return true;
		}
		UnlockRelationOid(writer->leaf.relid, RowExclusiveLock);
	}
}

static bool
open_leaf(ObixWriter *writer, int64 sequence)
{
	MemoryContext old;

	if (!lock_leaf(writer, sequence))
		return false;

	old = MemoryContextSwitchTo(writer->context);
	writer->rel = table_open(writer->leaf.relid, NoLock);
	if (writer->rel->rd_rel->relkind != RELKIND_RELATION)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("partition \"%s\" is not an ordinary table",
						RelationGetRelationName(writer->rel)),
				 errhint("Detach it, and attach tables that hold rows.")));
	check_leaf(writer);

	writer->estate = CreateExecutorState();
	writer->info = makeNode(ResultRelInfo);
	InitResultRelInfo(writer->info, writer->rel, 0, NULL, 0);
	open_indexes(writer);
	if (writer->bulk)
		writer->bistate = GetBulkInsertState();
	MemoryContextSwitchTo(old);

	if (writer->leaf.is_default)
		obix_xact_request_work(RelationGetRelid(writer->parent),
							   OBIX_WORK_RECOVER);
	return true;
}

/*
 * Write an event under a sequence higher than all before.  Sequence and time
 * are patched into the row as it was formed by obix_event_desc(): sequence is
 * the first column, and recorded_at the last, 8 bytes each and never NULL.
 * Returns false if the leaf is locked and we do not wait.
 */
bool
obix_writer_put(ObixWriter *writer, MinimalTuple event, int64 sequence,
				TimestampTz recorded_at)
{
	MemoryContext old;
	HeapTuple	tuple;
	char	   *start;

	if (writer->rel == NULL || sequence < writer->leaf.lower ||
		sequence >= writer->leaf.upper)
	{
		close_leaf(writer);
		if (!open_leaf(writer, sequence))
			return false;
	}
	if (writer->nrows == OBIX_BATCH_ROWS || writer->bytes >= OBIX_BATCH_BYTES)
		flush_batch(writer);

	if (writer->nrows == writer->nslots)
	{
		old = MemoryContextSwitchTo(writer->context);
		if (writer->nslots == writer->maxslots)
		{
			int			size = writer->maxslots == 0 ? 8 :
				Min(writer->maxslots * 2, OBIX_BATCH_ROWS);

			writer->slots = writer->slots == NULL ?
				palloc(size * sizeof(TupleTableSlot *)) :
				repalloc(writer->slots, size * sizeof(TupleTableSlot *));
			writer->maxslots = size;
		}
		writer->slots[writer->nslots++] =
			MakeSingleTupleTableSlot(RelationGetDescr(writer->rel),
									 &TTSOpsHeapTuple);
		MemoryContextSwitchTo(old);
	}

	old = MemoryContextSwitchTo(writer->batch_context);
	tuple = heap_tuple_from_minimal_tuple(event);
	MemoryContextSwitchTo(old);

	start = (char *) tuple->t_data;
	memcpy(start + tuple->t_data->t_hoff, &sequence, sizeof(sequence));
	memcpy(start + tuple->t_len - sizeof(recorded_at), &recorded_at,
		   sizeof(recorded_at));

	ExecStoreHeapTuple(tuple, writer->slots[writer->nrows++], false);
	writer->bytes += tuple->t_len;
	return true;
}

/* Insert what is left and release everything but the locks. */
void
obix_writer_end(ObixWriter *writer)
{
	close_leaf(writer);
	MemoryContextDelete(writer->context);
}

/*
 * Error out if an index of a partition allows only one placeholder.  All their
 * columns but the sequence are the same, so what tells them apart is that, or a
 * NULL, or that a partial index leaves them out.
 */
void
obix_check_placeholder_indexes(Relation leaf)
{
	List	   *indexes = RelationGetIndexList(leaf);
	ListCell   *cell;

	foreach(cell, indexes)
	{
		HeapTuple	tuple = SearchSysCache1(INDEXRELID,
											ObjectIdGetDatum(lfirst_oid(cell)));
		Form_pg_index form;
		bool		apart;

		if (!HeapTupleIsValid(tuple))
			continue;
		form = (Form_pg_index) GETSTRUCT(tuple);
		apart = (!form->indisunique && !form->indisexclusion) ||
			!heap_attisnull(tuple, Anum_pg_index_indpred, NULL);
		for (int i = 0; i < form->indnkeyatts && !apart; i++)
		{
			AttrNumber	attnum = form->indkey.values[i];

			apart = attnum == Anum_event_sequence ||
				(attnum != Anum_event_id && attnum != Anum_event_recorded_at &&
				 !form->indnullsnotdistinct);
		}
		ReleaseSysCache(tuple);
		if (!apart)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("index \"%s\" would keep placeholders out of partition \"%s\"",
							get_rel_name(lfirst_oid(cell)),
							RelationGetRelationName(leaf)),
					 errdetail("Placeholders for abandoned sequences all have the same id."),
					 errhint("Create it with WHERE payload IS NOT NULL.")));
	}
	list_free(indexes);
}

/*
 * Error out if a constraint of an outbox would keep placeholders out: then one
 * rolled-back INSERT would stop all readers for good, so it is the writer who
 * has to hear of it.
 */
void
obix_check_placeholder(Relation parent)
{
	TupleDesc	desc = RelationGetDescr(parent);
	MemoryContext context = CurrentMemoryContext;
	ObixIdentity saved;
	EState	   *estate;
	ResultRelInfo *info;
	TupleTableSlot *slot;

	if (desc->constr == NULL)
		return;

	estate = CreateExecutorState();
	info = makeNode(ResultRelInfo);
	InitResultRelInfo(info, parent, 0, NULL, 0);
	slot = MakeSingleTupleTableSlot(desc, &TTSOpsMinimalTuple);
	ExecStoreMinimalTuple(obix_form_placeholder(), slot, true);

	obix_become_owner(parent, &saved);
	PG_TRY();
	{
		ExecConstraints(info, slot, estate);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (ERRCODE_TO_CATEGORY(error->sqlerrcode) !=
			ERRCODE_INTEGRITY_CONSTRAINT_VIOLATION)
			PG_RE_THROW();
		FlushErrorState();
		ereport(ERROR,
				(errcode(error->sqlerrcode),
				 errmsg("a constraint of outbox \"%s\" would keep placeholders out",
						RelationGetRelationName(parent)),
				 error->constraint_name ?
				 errdetail("Constraint \"%s\" must accept the row for an abandoned sequence, whose only values are in the columns sequence, id and recorded_at.",
						   error->constraint_name) :
				 errdetail("Column \"%s\" must accept NULL, for the row for an abandoned sequence has values in the columns sequence, id and recorded_at only.",
						   error->column_name ? error->column_name : "?"),
				 errhint("Drop the constraint, or add OR payload IS NULL to it.")));
	}
	PG_END_TRY();
	obix_become_self(&saved);

	ExecDropSingleTupleTableSlot(slot);
	FreeExecutorState(estate);
}
