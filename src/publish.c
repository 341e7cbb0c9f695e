/*-------------------------------------------------------------------------
 *
 * publish.c
 *	  obix.publish: the transaction's buffer, and its flush at pre-commit.
 *
 * The buffer is a tuplestore per outbox, which spills by itself; a single event,
 * the most frequent case, does without.  A stack of
 * marks says at which event each subtransaction began: one that commits gives
 * its events to its parent by popping its mark, one that aborts turns them into
 * a range that the flush passes over.
 *
 * Between publish and flush there is no lock on the outbox, so the flush finds
 * out what has become of it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "obix.h"
#include "publish.h"
#include "relation.h"
#include "uuid.h"
#include "writer.h"
#include "xact.h"

/* Above this many events a flush goes through a ring of buffers. */
#define BULK_EVENTS		1000

/* Where the events of a subtransaction begin */
typedef struct ObixMark
{
	int			level;			/* nesting level */
	int64		start;			/* index of its first event */
} ObixMark;

/* Events of subtransactions that were rolled back: from <= index < to */
typedef struct ObixDiscarded
{
	int64		from;
	int64		to;
} ObixDiscarded;

/* What this transaction has published to one outbox */
typedef struct ObixBuffer
{
	struct ObixBuffer *next;
	Oid			relid;
	int32		id;
	char	   *name;			/* for messages, as of the first publish */
	int64		count;			/* events in the buffer */
	MinimalTuple single;		/* the only one, while there is no store */
	Tuplestorestate *store;		/* NULL: not needed yet */
	bool		broken;			/* an error left the store half-written */

	ObixMark   *marks;			/* levels ascend, starts do not descend */
	int			nmarks;
	int			maxmarks;
	ObixDiscarded *discarded;	/* ascending, disjoint */
	int			ndiscarded;
	int			maxdiscarded;
} ObixBuffer;

PG_FUNCTION_INFO_V1(obix_publish);

static ObixBuffer *buffers = NULL;
static bool flushed = false;	/* this transaction is being committed */

static ObixBuffer *
make_buffer(ObixRelation *known)
{
	MemoryContext old = MemoryContextSwitchTo(TopTransactionContext);
	ObixBuffer *buffer = palloc0(sizeof(ObixBuffer));

	buffer->relid = known->relid;
	buffer->id = known->id;
	buffer->name = get_rel_name(known->relid);
	MemoryContextSwitchTo(old);

	buffer->next = buffers;
	buffers = buffer;
	return buffer;
}

/* Put an event into a buffer. */
static void
put_event(ObixBuffer *buffer, Datum *values, bool *isnull)
{
	MemoryContext old = MemoryContextSwitchTo(TopTransactionContext);
	ResourceOwner owner = CurrentResourceOwner;

	if (buffer->count == 0 && buffer->store == NULL)
		buffer->single = heap_form_minimal_tuple(obix_event_desc(), values,
												 isnull, 0);
	else
	{
		buffer->broken = true;
		if (buffer->store == NULL)
		{
			TupleTableSlot *slot = MakeSingleTupleTableSlot(obix_event_desc(),
															&TTSOpsMinimalTuple);

			/* a spilled file must outlive the subtransaction and the portal */
			CurrentResourceOwner = TopTransactionResourceOwner;
			buffer->store = tuplestore_begin_heap(false, false, work_mem);
			CurrentResourceOwner = owner;
			ExecStoreMinimalTuple(buffer->single, slot, true);
			buffer->single = NULL;
			tuplestore_puttupleslot(buffer->store, slot);
			ExecDropSingleTupleTableSlot(slot);
		}
		tuplestore_putvalues(buffer->store, obix_event_desc(), values, isnull);
		buffer->broken = false;
	}
	buffer->count++;
	MemoryContextSwitchTo(old);
}

/*
 * The next event of a buffer, until it is asked for again: first is whether this
 * is the first time.  NULL at the end.
 */
static MinimalTuple
next_event(ObixBuffer *buffer, TupleTableSlot *slot, bool first)
{
	if (buffer->store == NULL)
		return first ? buffer->single : NULL;
	return tuplestore_gettupleslot(buffer->store, true, false, slot) ?
		ExecFetchSlotMinimalTuple(slot, NULL) : NULL;
}

/* Remember where the events of the current nesting level begin. */
static void
mark_level(ObixBuffer *buffer)
{
	int			level = GetCurrentTransactionNestLevel();

	if (buffer->nmarks > 0 &&
		buffer->marks[buffer->nmarks - 1].level == level)
		return;
	if (buffer->nmarks == buffer->maxmarks)
	{
		int			size = Max(8, buffer->maxmarks * 2);

		if (buffer->marks == NULL)
			buffer->marks = MemoryContextAlloc(TopTransactionContext,
											   size * sizeof(ObixMark));
		else
			buffer->marks = repalloc(buffer->marks, size * sizeof(ObixMark));
		buffer->maxmarks = size;
	}
	buffer->marks[buffer->nmarks].level = level;
	buffer->marks[buffer->nmarks].start = buffer->count;
	buffer->nmarks++;

	/* each mark may become a range, and then there must be room for it */
	if (buffer->ndiscarded + buffer->nmarks > buffer->maxdiscarded)
	{
		int			size = Max(8, buffer->maxdiscarded * 2);

		if (buffer->discarded == NULL)
			buffer->discarded = MemoryContextAlloc(TopTransactionContext,
												   size * sizeof(ObixDiscarded));
		else
			buffer->discarded = repalloc_huge(buffer->discarded,
											  (Size) size * sizeof(ObixDiscarded));
		buffer->maxdiscarded = size;
	}
}

/*
 * Error out if an error while the store spilled, caught by a subtransaction, has
 * left it in pieces: then no event of it may be written as if all were there.
 */
static void
check_buffer(ObixBuffer *buffer)
{
	if (buffer->broken)
		ereport(ERROR,
				(errcode(ERRCODE_IN_FAILED_SQL_TRANSACTION),
				 errmsg("events of outbox \"%s\" have been lost in this transaction",
						buffer->name),
				 errdetail("They could not be written to a temporary file when obix.publish failed."),
				 errhint("Roll back the transaction.")));
}

/* Events of the buffer that were not rolled back */
static int64
live_events(ObixBuffer *buffer)
{
	int64		count = buffer->count;

	for (int i = 0; i < buffer->ndiscarded; i++)
		count -= buffer->discarded[i].to - buffer->discarded[i].from;
	return count;
}

/*
 * Fetch a value that is stored out of line: at commit the row that it belongs
 * to may be gone.  Compression is kept.
 */
static Datum
fetch_external(Datum value)
{
	struct varlena *attribute = (struct varlena *) DatumGetPointer(value);

	if (!VARATT_IS_EXTERNAL(attribute))
		return value;
	return PointerGetDatum(detoast_external_attr(attribute));
}

/* What this session knows of an outbox to which the user may publish. */
static ObixRelation *
check_publish(Oid relid)
{
	ObixRelation *known;

	obix_check_privilege(relid, ACL_INSERT);
	known = obix_remember(relid);
	if (known == NULL || !known->publishable)
	{
		Relation	parent = obix_open(relid, AccessShareLock, &known);

		obix_check_ready(parent);
		obix_check_insertable(parent);
		obix_check_placeholder(parent);
		known->publishable = true;
		table_close(parent, AccessShareLock);
	}
	obix_check_row_security(relid, "obix.publish");
	return known;
}

/*
 * obix.publish(outbox, payload, type, key, headers): publish an event when this
 * transaction commits.
 */
Datum
obix_publish(PG_FUNCTION_ARGS)
{
	Oid			relid;
	ObixRelation *known;
	ObixBuffer *buffer;
	Datum		values[Natts_event];
	bool		isnull[Natts_event];
	pg_uuid_t  *id;

	obix_check_enabled("obix.publish()");
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("outbox must not be null")));
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("payload of an event must not be null"),
				 errhint("An event without a body can have the payload 'null'::jsonb.")));
	if (flushed)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_STATE),
				 errmsg("cannot publish while the transaction is being committed"),
				 errdetail("The events of the transaction have their sequences already.")));

	relid = PG_GETARG_OID(0);
	known = check_publish(relid);

	id = obix_make_uuid();
	values[Anum_event_sequence - 1] = Int64GetDatum(0);
	isnull[Anum_event_sequence - 1] = false;
	values[Anum_event_id - 1] = UUIDPGetDatum(id);
	isnull[Anum_event_id - 1] = false;
	values[Anum_event_recorded_at - 1] = TimestampTzGetDatum(0);
	isnull[Anum_event_recorded_at - 1] = false;

	isnull[Anum_event_payload - 1] = false;
	values[Anum_event_payload - 1] = fetch_external(PG_GETARG_DATUM(1));
	isnull[Anum_event_type - 1] = PG_ARGISNULL(2);
	if (!PG_ARGISNULL(2))
		values[Anum_event_type - 1] = fetch_external(PG_GETARG_DATUM(2));
	isnull[Anum_event_key - 1] = PG_ARGISNULL(3);
	if (!PG_ARGISNULL(3))
		values[Anum_event_key - 1] = fetch_external(PG_GETARG_DATUM(3));
	isnull[Anum_event_headers - 1] = PG_ARGISNULL(4);
	if (!PG_ARGISNULL(4))
		values[Anum_event_headers - 1] = fetch_external(PG_GETARG_DATUM(4));

	buffer = buffers;
	while (buffer != NULL &&
		   (buffer->relid != relid || buffer->id != known->id))
		buffer = buffer->next;
	if (buffer == NULL)
		buffer = make_buffer(known);

	/* a loop that tries again and again must not pile up what it dropped */
	if ((buffer->count > 0 || buffer->broken) && live_events(buffer) == 0)
	{
		if (buffer->store != NULL)
			tuplestore_clear(buffer->store);
		else if (buffer->single != NULL)
			pfree(buffer->single);
		buffer->single = NULL;
		buffer->count = 0;
		buffer->nmarks = 0;
		buffer->ndiscarded = 0;
		buffer->broken = false;
	}
	check_buffer(buffer);
	mark_level(buffer);
	put_event(buffer, values, isnull);

	PG_RETURN_UUID_P(id);
}

/* Give the events of a buffer their sequences and insert them. */
static void
flush_buffer(ObixBuffer *buffer)
{
	int64		count = live_events(buffer);
	int64		found = 0;
	TimestampTz now = GetCurrentTimestamp();
	ObixRelation *known = NULL;
	Relation	parent;
	ObixWriter *writer;
	TupleTableSlot *slot = NULL;
	MinimalTuple event;
	int64		sequence;
	int			skip = 0;

	check_buffer(buffer);
	if (count == 0)
		return;

	parent = try_table_open(buffer->relid, RowExclusiveLock);
	if (parent == NULL && obix_xact_has_dropped(buffer->relid))
		return;					/* they go with it, like its other rows */
	if (parent != NULL)
		known = obix_get_relation(parent);
	if (known == NULL || known->id != buffer->id)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("outbox \"%s\" does not exist any more", buffer->name),
				 errdetail("It was dropped after this transaction published to it.")));
	if (!known->publishable)
	{
		obix_check_insertable(parent);
		known->publishable = true;
	}

	sequence = obix_xact_allocate(obix_xact(parent, obix_attach(parent, known)),
								  count);

	writer = obix_writer_begin(parent, false, count >= BULK_EVENTS);
	if (buffer->store != NULL)
		slot = MakeSingleTupleTableSlot(obix_event_desc(), &TTSOpsMinimalTuple);
	for (int64 i = 0; (event = next_event(buffer, slot, i == 0)) != NULL; i++)
	{
		if (skip < buffer->ndiscarded && i >= buffer->discarded[skip].from)
		{
			if (i == buffer->discarded[skip].to - 1)
				skip++;
			continue;
		}
		(void) obix_writer_put(writer, event, sequence++, now);
		found++;
	}
	if (found != count)
		elog(ERROR, "found " INT64_FORMAT " of " INT64_FORMAT " events in the buffer",
			 found, count);
	if (slot != NULL)
		ExecDropSingleTupleTableSlot(slot);
	obix_writer_end(writer);
	table_close(parent, NoLock);
}

/*
 * PRE_COMMIT and PRE_PREPARE: write what was published.  An error here aborts
 * the transaction.
 */
void
obix_publish_flush(void)
{
	ResourceOwner owner = CurrentResourceOwner;
	MemoryContext old;

	flushed = true;
	if (buffers == NULL)
		return;

	/* in a procedure that commits, this is that of the SPI procedure */
	CurrentResourceOwner = TopTransactionResourceOwner;
	old = MemoryContextSwitchTo(TopTransactionContext);
	PushActiveSnapshot(GetTransactionSnapshot());

	for (ObixBuffer *buffer = buffers; buffer != NULL; buffer = buffer->next)
	{
		flush_buffer(buffer);
		if (buffer->store != NULL)
			tuplestore_end(buffer->store);
		buffer->store = NULL;
	}

	PopActiveSnapshot();
	MemoryContextSwitchTo(old);
	CurrentResourceOwner = owner;
}

/* The transaction has ended, in whatever way.  Its memory and files go too. */
void
obix_publish_end(void)
{
	buffers = NULL;
	flushed = false;
}

/* Subtransaction callback at the end of nesting level level. */
void
obix_publish_end_sub(SubXactEvent event, int level)
{
	for (ObixBuffer *buffer = buffers; buffer != NULL; buffer = buffer->next)
	{
		ObixMark   *mark;
		ObixDiscarded *last;

		if (buffer->nmarks == 0 ||
			buffer->marks[buffer->nmarks - 1].level < level)
			continue;
		mark = &buffer->marks[--buffer->nmarks];

		if (event == SUBXACT_EVENT_COMMIT_SUB)
		{
			/* the parent has a mark of its own, or takes this one over */
			if (buffer->nmarks == 0 ||
				buffer->marks[buffer->nmarks - 1].level < level - 1)
			{
				mark->level = level - 1;
				buffer->nmarks++;
			}
			continue;
		}

		if (mark->start == buffer->count)
			continue;
		while (buffer->ndiscarded > 0 &&
			   buffer->discarded[buffer->ndiscarded - 1].from >= mark->start)
			buffer->ndiscarded--;
		last = buffer->ndiscarded > 0 ?
			&buffer->discarded[buffer->ndiscarded - 1] : NULL;
		if (last != NULL && last->to == mark->start)
			last->to = buffer->count;
		else
		{
			last = &buffer->discarded[buffer->ndiscarded++];
			last->from = mark->start;
			last->to = buffer->count;
		}

	}
}
