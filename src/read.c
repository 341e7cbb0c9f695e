/*-------------------------------------------------------------------------
 *
 * read.c
 *	  Contiguous reads, and waiting for something to read.
 *
 * A reader needs nothing but the table: it delivers n+1 after n and stops at
 * the first sequence that has no visible row.  Shared memory only tells it what
 * kind of hole that is, and which holes a worker should look at.
 *
 * A reader's snapshot is older than anything that it learns later, so a hole
 * is reported only if no row is there in any state; a row that is there now is
 * for the next read.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/heaptoast.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlogrecovery.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "tcop/pquery.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "bounds.h"
#include "read.h"
#include "registry.h"
#include "relation.h"
#include "uuid.h"
#include "waiters.h"

/* How often a standby looks, and a primary while holes are undecided */
#define STANDBY_POLL_MS		100
#define SUSPECT_POLL_MS		1000

PG_FUNCTION_INFO_V1(obix_read);
PG_FUNCTION_INFO_V1(obix_wait);
PG_FUNCTION_INFO_V1(obix_high_water_mark);

/* Error out on arguments that are null; names has NULL for those that may be. */
void
obix_check_not_null(FunctionCallInfo fcinfo, const char *const *names,
					int count)
{
	for (int i = 0; i < count; i++)
	{
		if (names[i] != NULL && PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("%s must not be null", names[i])));
	}
}

/*
 * Open an outbox for a user who may read all of it.  Returns NULL if a standby
 * does not get the lock.
 */
Relation
obix_open_for_reading(Oid relid, const char *function, ObixRelation **known)
{
	Relation	parent;

	obix_check_privilege(relid, ACL_SELECT);
	parent = obix_open_to_read(relid, known);
	if (parent != NULL)
		obix_check_row_security(relid, function);
	return parent;
}

/*
 * Register the snapshot with which to read an outbox that has been opened.  That
 * of the statement is older than the lock, and would not see rows that were
 * moved to another partition while we waited for it.
 */
Snapshot
obix_reading_snapshot(void)
{
	return RegisterSnapshot(IsolationUsesXactSnapshot() ?
							GetTransactionSnapshot() : GetLatestSnapshot());
}

/*
 * The resolved position.  After this the session knows the partitions in which
 * everything up to there is; one that was attached meanwhile could hold the row
 * that the caller is going to look for.
 */
int64
obix_resolved(Oid relid)
{
	ObixRegistryRow row;
	bool		found = obix_registry_find(relid, &row);

	AcceptInvalidationMessages();
	return found ? row.resolved : 0;
}

/* What is known of a row */
typedef enum
{
	ROW_MISSING,
	ROW_FOUND,
	ROW_LOCKED,					/* nothing: a standby does not get the lock */
} RowState;

/* Is there a row of this sequence for this snapshot?  Its id, if id is given. */
static RowState
find_row(Relation parent, Snapshot snapshot, int64 sequence, pg_uuid_t *id)
{
	ObixLeaf	leaf;
	Relation	rel;
	ObixScan	scan;
	int64		found;
	bool		exists;
	bool		isnull;

	obix_find_leaf(parent, sequence, &leaf);
	if (!OidIsValid(leaf.relid))
		return ROW_MISSING;
	if (!obix_lock_to_read(leaf.relid))
		return ROW_LOCKED;
	rel = table_open(leaf.relid, NoLock);
	obix_begin_scan(&scan, rel, snapshot, sequence, sequence + 1,
					ForwardScanDirection);
	exists = obix_next_row(&scan, &found);
	if (exists && id != NULL)
		*id = *DatumGetUUIDP(slot_getattr(scan.slot, Anum_event_id, &isnull));
	obix_end_scan(&scan);
	table_close(rel, AccessShareLock);
	return exists ? ROW_FOUND : ROW_MISSING;
}

/*
 * The first sequence that is not removed.  A row that the reader does not see
 * yet counts too, lest it be skipped.
 */
int64
obix_oldest_kept(Relation parent, int64 resolved)
{
	SnapshotData dirty;
	int64		oldest;

	InitDirtySnapshot(dirty);
	if (obix_oldest_row(parent, &dirty, 1, &oldest))
		return Min(oldest, resolved + 1);
	return resolved + 1;
}

/*
 * Sequences from this one on have been removed.  Who reads for a consumer moves
 * its cursor, others give another position.
 */
void
obix_report_removed(const ObixReader *reader)
{
	int64		removed = reader->expected;
	int64		next;
	bool		kept = obix_oldest_row(reader->parent, reader->snapshot, removed,
									   &next);

	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 reader->consumer != NULL ?
			 errmsg("consumer \"%s\" is below the oldest kept event of outbox \"%s\"",
					reader->consumer, RelationGetRelationName(reader->parent)) :
			 errmsg("position %lld is below the oldest kept event of outbox \"%s\"",
					(long long) removed - 1,
					RelationGetRelationName(reader->parent)),
			 kept ?
			 errdetail("Events from sequence %lld to %lld have been removed.",
					   (long long) removed, (long long) next - 1) :
			 errdetail("Events from sequence %lld on have been removed.",
					   (long long) removed),
			 reader->consumer != NULL ?
			 errhint("To go on without them, call obix.seek with after => NULL.") :
			 kept ?
			 errhint("To go on without them, read after %lld.",
					 (long long) next - 1) :
			 errhint("To go on without them, read with after => NULL.")));
}

/* Error out if the next event has been removed. */
void
obix_check_not_removed(const ObixReader *reader, int64 resolved)
{
	if (obix_oldest_kept(reader->parent, resolved) > reader->expected)
		obix_report_removed(reader);
}

/*
 * Error out on a position that this primary has never reached: where somebody
 * reads, or the cursor of a consumer.
 */
void
obix_check_not_beyond(Relation parent, const char *consumer, int64 after,
					  int64 head)
{
	if (after > head)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 consumer != NULL ?
				 errmsg("consumer \"%s\" is at position %lld, beyond the head of outbox \"%s\"",
						consumer, (long long) after,
						RelationGetRelationName(parent)) :
				 errmsg("position %lld is beyond the head of outbox \"%s\"",
						(long long) after, RelationGetRelationName(parent)),
				 errdetail("The highest sequence allocated is %lld. Events that were read up to that position have been lost in a restore or a failover.",
						   (long long) head),
				 consumer != NULL ?
				 errhint("Compare what it has dealt with with what is there, and call obix.seek with a position that both share.") :
				 errhint("Compare what was read with what is there, and read from a position that both share.")));
}

/* The reader stopped at a sequence that it does not see. */
static void
look_into_hole(ObixReader *reader)
{
	Relation	parent = reader->parent;
	int64		hole = reader->expected;
	SnapshotData dirty;
	ObixPosition position;
	int64		resolved;

	if (reader->shared != NULL)
	{
		obix_get_position(reader->shared, RelationGetRelid(parent),
						  reader->known->id, &position);
		if (hole > position.frontier)
			return;				/* still to come */
	}

	/* with events in hand the next call finds out */
	if (reader->events > 0)
		return;

	/* first what was resolved, then what is there: a row wins */
	resolved = obix_resolved(RelationGetRelid(parent));
	InitDirtySnapshot(dirty);
	if (find_row(parent, &dirty, hole, NULL) != ROW_MISSING)
		return;
	if (hole <= resolved)
		obix_report_removed(reader);
	if (reader->shared != NULL)
		obix_suspect(reader->shared, hole);
}

/*
 * Deliver a row.  Returns false, and does not, if it would exceed max_bytes.
 * Values stored out of line are fetched, since the lock that keeps them is
 * released at return; compression is kept.
 */
bool
obix_deliver(ObixReader *reader, TupleTableSlot *slot)
{
	int64		bytes = 0;
	bool		external = false;
	bool		isnull;

	slot_getsomeattrs(slot, Natts_event);
	for (int i = 0; i < Natts_event; i++)
	{
		int			length = TupleDescAttr(reader->desc, i)->attlen;

		if (slot->tts_isnull[i])
			continue;
		if (length > 0)
			bytes += length;
		else
		{
			bytes += toast_raw_datum_size(slot->tts_values[i]);
			external |= VARATT_IS_EXTERNAL(DatumGetPointer(slot->tts_values[i]));
		}
	}
	if (reader->events > 0 && bytes > reader->max_bytes - reader->bytes)
		return false;

	if (reader->store == NULL)
		 /* only count */ ;
	else if (!external && slot->tts_tupleDescriptor->natts == Natts_event)
		tuplestore_puttupleslot(reader->store, slot);
	else
	{
		Datum		values[Natts_event];

		for (int i = 0; i < Natts_event; i++)
		{
			values[i] = slot->tts_values[i];
			if (!slot->tts_isnull[i] &&
				TupleDescAttr(reader->desc, i)->attlen == -1 &&
				VARATT_IS_EXTERNAL(DatumGetPointer(values[i])))
				values[i] = PointerGetDatum(detoast_external_attr((struct varlena *)
																  DatumGetPointer(values[i])));
		}
		tuplestore_putvalues(reader->store, reader->desc, values,
							 slot->tts_isnull);
	}
	reader->bytes += bytes;
	reader->last = DatumGetInt64(slot_getattr(slot, Anum_event_sequence, &isnull));
	reader->last_at = DatumGetTimestampTz(slot_getattr(slot, Anum_event_recorded_at,
													   &isnull));
	if (reader->events++ == 0)
		reader->first = reader->last;
	return true;
}

/*
 * Deliver the rows of a leaf from the expected on, and below upper.  Returns
 * whether the page is full.
 */
static bool
read_rows(ObixReader *reader, Relation leaf, int64 upper, MemoryContext context)
{
	ObixScan	scan;
	MemoryContext old;
	int64		sequence;
	bool		full = false;

	obix_begin_scan(&scan, leaf, reader->snapshot, reader->expected, upper,
					ForwardScanDirection);
	while (!full && obix_next_row(&scan, &sequence) &&
		   sequence == reader->expected)
	{
		CHECK_FOR_INTERRUPTS();
		old = MemoryContextSwitchTo(context);
		if (reader->wanted == NULL || reader->wanted(reader->arg, scan.slot))
			full = !obix_deliver(reader, scan.slot);
		MemoryContextSwitchTo(old);
		MemoryContextReset(context);
		if (full)
			break;
		reader->expected++;
		full = reader->events == reader->max_events;
	}
	obix_end_scan(&scan);
	return full;
}

/*
 * Deliver the rows of one leaf from the expected on.  Returns whether to go on
 * in the next leaf.
 */
static bool
read_leaf(ObixReader *reader, const ObixLeaf *leaf)
{
	Relation	rel;
	MemoryContext context;
	int64		end;
	int64		upper;
	bool		full;

	if (!OidIsValid(leaf->relid))
	{
		look_into_hole(reader);
		return false;
	}

	if (!obix_lock_to_read(leaf->relid))
		return false;
	rel = table_open(leaf->relid, NoLock);
	context = AllocSetContextCreate(CurrentMemoryContext, "obix read",
									ALLOCSET_DEFAULT_SIZES);

	/*
	 * A scan looks at all that lies within its bounds on a page of the index,
	 * which may be hundreds of entries.  So first no more than the events
	 * that are asked for; what is not wanted makes it necessary to go on.
	 */
	end = Min(leaf->upper, reader->to == PG_INT64_MAX ? reader->to : reader->to + 1);
	upper = reader->max_events - reader->events < end - reader->expected ?
		reader->expected + (reader->max_events - reader->events) : end;
	full = read_rows(reader, rel, upper, context);
	if (!full && reader->expected == upper && upper < end)
		full = read_rows(reader, rel, end, context);

	MemoryContextDelete(context);
	table_close(rel, AccessShareLock);

	if (full || reader->expected > reader->to)
		return false;
	if (reader->expected < leaf->upper)
	{
		look_into_hole(reader);
		return false;
	}
	return true;
}

/* Error out on bounds of a page that no page has. */
void
obix_check_page(int64 max_events, int64 max_bytes)
{
	if (max_events < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_events must be at least 1")));
	if (max_bytes < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_bytes must be at least 1")));
}

/* Deliver what can be read from reader->expected on. */
void
obix_read_on(ObixReader *reader)
{
	ObixLeaf	leaf;

	obix_find_leaf(reader->parent, reader->expected, &leaf);
	while (read_leaf(reader, &leaf) && obix_next_leaf(reader->parent, &leaf))
		;
}

/*
 * obix.read(outbox, after, max_events, max_bytes, after_id)
 *
 * Locks are released at return: a client that keeps its transaction open does
 * not hold up maintenance.
 */
Datum
obix_read(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"outbox", NULL, "max_events", "max_bytes"};
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	ObixReader	reader = {0};
	ObixPosition position;
	Oid			relid;
	int64		after;

	obix_check_not_null(fcinfo, names, lengthof(names));
	relid = PG_GETARG_OID(0);
	after = PG_ARGISNULL(1) ? -1 : PG_GETARG_INT64(1);
	reader.max_events = PG_GETARG_INT32(2);
	reader.max_bytes = PG_GETARG_INT64(3);
	if ((!PG_ARGISNULL(1) && after < 0) || after == PG_INT64_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("position %lld is out of range", (long long) after),
				 errhint("The position before the first event is 0; after => NULL reads from the oldest kept.")));
	obix_check_page(reader.max_events, reader.max_bytes);
	if (!PG_ARGISNULL(4) && PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("after_id needs a position"),
				 errhint("Give the position of the event in after.")));

	InitMaterializedSRF(fcinfo, 0);
	reader.store = result->setResult;
	reader.desc = result->setDesc;
	reader.to = PG_INT64_MAX;
	reader.parent = obix_open_for_reading(relid, "obix.read", &reader.known);
	if (reader.parent == NULL)
		return (Datum) 0;
	reader.snapshot = obix_reading_snapshot();
	reader.shared = obix_try_attach(reader.parent, reader.known);

	if (PG_ARGISNULL(1))
		after = obix_oldest_kept(reader.parent, obix_resolved(relid)) - 1;
	else if (reader.shared != NULL)
	{
		obix_get_position(reader.shared, relid, reader.known->id, &position);
		obix_check_not_beyond(reader.parent, NULL, after, position.head);
	}
	reader.expected = after + 1;

	if (!PG_ARGISNULL(4))
	{
		pg_uuid_t	id;
		SnapshotData dirty;
		RowState	state;

		/* who has read it may now have a snapshot that is older */
		InitDirtySnapshot(dirty);
		state = find_row(reader.parent, &dirty, after, &id);
		if (state == ROW_LOCKED ||
			(state == ROW_MISSING && reader.shared == NULL &&
			 after > obix_resolved(relid)))
		{
			/* a standby that cannot tell, or has not got so far yet */
			UnregisterSnapshot(reader.snapshot);
			table_close(reader.parent, AccessShareLock);
			return (Datum) 0;
		}
		if (state == ROW_MISSING || memcmp(&id, PG_GETARG_UUID_P(4), sizeof(id)) != 0)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("event %lld of outbox \"%s\" does not have the expected id",
							(long long) after,
							RelationGetRelationName(reader.parent)),
					 state == ROW_FOUND ?
					 errdetail("Its id is %s: history has diverged in a restore or a failover.",
							   DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(&id)))) :
					 errdetail("There is no event at that position."),
					 errhint("Compare what was read with what is there, and read from a position that both share.")));
	}

	obix_read_on(&reader);
	UnregisterSnapshot(reader.snapshot);
	table_close(reader.parent, AccessShareLock);
	return (Datum) 0;
}

/* The last of the contiguous visible rows from a sequence on, or one less. */
static int64
walk_visible(Relation parent, Snapshot snapshot, int64 from, int64 to)
{
	ObixLeaf	leaf;
	int64		expected = from;

	obix_find_leaf(parent, expected, &leaf);
	do
	{
		Relation	rel;
		ObixScan	scan;
		int64		sequence;
		int64		upper = to < leaf.upper ? to + 1 : leaf.upper;

		if (!OidIsValid(leaf.relid))
			break;
		if (!obix_lock_to_read(leaf.relid))
			break;
		rel = table_open(leaf.relid, NoLock);
		obix_begin_scan(&scan, rel, snapshot, expected, upper,
						ForwardScanDirection);
		while (obix_next_row(&scan, &sequence) && sequence == expected)
		{
			CHECK_FOR_INTERRUPTS();
			expected++;
		}
		obix_end_scan(&scan);
		table_close(rel, AccessShareLock);
		if (expected < leaf.upper)
			break;
	} while (obix_next_leaf(parent, &leaf));

	return expected - 1;
}

/*
 * The position up to which a reader can read now; exact, also while holes have
 * yet to be dealt with, for then the table is asked.
 */
int64
obix_exact_high_water_mark(Relation parent, ObixRelation *known)
{
	Oid			relid = RelationGetRelid(parent);
	ObixOutbox *shared = obix_try_attach(parent, known);
	ObixPosition position;
	Snapshot	snapshot;
	int64		mark;

	if (shared != NULL)
		obix_get_position(shared, relid, known->id, &position);
	else
	{
		position.frontier = PG_INT64_MAX - 1;
		position.high_water_mark = obix_resolved(relid);
	}
	if (position.high_water_mark >= position.frontier)
		return position.high_water_mark;

	snapshot = RegisterSnapshot(GetLatestSnapshot());
	mark = walk_visible(parent, snapshot, position.high_water_mark + 1,
						position.frontier);
	UnregisterSnapshot(snapshot);
	return mark;
}

/*
 * obix.high_water_mark(outbox)
 */
Datum
obix_high_water_mark(PG_FUNCTION_ARGS)
{
	ObixRelation *known;
	Relation	parent = obix_open_for_reading(PG_GETARG_OID(0),
											   "obix.high_water_mark", &known);
	int64		mark;

	if (parent == NULL)
		PG_RETURN_INT64(obix_resolved(PG_GETARG_OID(0)));
	mark = obix_exact_high_water_mark(parent, known);
	table_close(parent, AccessShareLock);
	PG_RETURN_INT64(mark);
}

/*
 * Give up the snapshot that CALL holds.  Returns false if the transaction keeps
 * one.
 */
static bool
drop_snapshot(void)
{
	if (ActivePortal != NULL && ActivePortal->portalSnapshot != NULL &&
		ActiveSnapshotSet() &&
		GetActiveSnapshot() == ActivePortal->portalSnapshot)
	{
		ActivePortal->portalSnapshot = NULL;
		PopActiveSnapshot();
	}
	InvalidateCatalogSnapshot();
	return !IsSubTransaction() && !HaveRegisteredOrActiveSnapshot();
}

/* The same for those who cannot do without: errors out where it is false. */
void
obix_drop_snapshot(const char *function)
{
	if (!drop_snapshot())
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("cannot wait while the transaction keeps a snapshot"),
				 errdetail("An old snapshot would hold back VACUUM for as long as it waits."),
				 errhint("Call %s by itself, under READ COMMITTED, with no savepoint or cursor open, and not from within a function.",
						 function)));
}

/*
 * Return from waiting, since there is something to do, but take turns with others
 * who ask for it again and again.  Who keeps a snapshot does not wait for that.
 */
void
obix_return_in_turn(ObixOutbox *outbox, long timeout)
{
	timeout = obix_take_turn(outbox, timeout);
	if (timeout <= 0)
		return;
	if (drop_snapshot())
		obix_await_turn(timeout);
	EnsurePortalSnapshotExists();
}

/* Is the next row visible to a new snapshot? */
static bool
next_is_visible(Oid relid, int64 after)
{
	ObixRelation *known;
	Relation	parent;
	bool		visible = false;

	PushActiveSnapshot(GetTransactionSnapshot());
	parent = obix_open_to_read(relid, &known);
	if (parent != NULL)
	{
		visible = find_row(parent, GetActiveSnapshot(), after + 1, NULL) == ROW_FOUND;
		table_close(parent, AccessShareLock);
	}
	PopActiveSnapshot();
	InvalidateCatalogSnapshot();
	return visible;
}

/* Milliseconds of an interval, which may be very many. */
double
obix_interval_ms(const Interval *interval)
{
	return interval->time / 1000.0 +
		((double) interval->month * DAYS_PER_MONTH + interval->day) *
		SECS_PER_DAY * 1000.0;
}

/* Milliseconds of the argument, capped at what a timer can take. */
long
obix_get_timeout(Interval *timeout)
{
	double		ms = obix_interval_ms(timeout);

	if (ms < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("timeout must not be negative")));
	return (long) Min(ms, INT_MAX);
}

/*
 * End the transaction that has just looked, on a standby, and begin another,
 * where that is possible.  Should replay have met the snapshot in its way, it
 * waits for the end of this transaction, although the snapshot is gone by then:
 * everything would stand still until the transaction is cancelled.
 */
static void
begin_anew(FunctionCallInfo fcinfo)
{
	/* elsewhere, what the caller has written would be committed */
	if (!RecoveryInProgress() || fcinfo->context == NULL || !IsA(fcinfo->context, CallContext) ||
		((CallContext *) fcinfo->context)->atomic)
		return;
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	SPI_commit();
	SPI_finish();
}

/*
 * CALL obix.wait(outbox, after, timeout)
 *
 * Sleeps in the queue of the outbox (waiters.c).  Where shared memory cannot
 * tell, on a standby and while holes have yet to be dealt with, the table is
 * looked at now and then, so a waiter does not depend on any worker.  On a
 * standby that is when something has been replayed.
 */
Datum
obix_wait(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"outbox", "after", "timeout"};
	Oid			relid;
	int64		after;
	long		timeout;
	TimestampTz end;
	ObixRelation *known;
	Relation	parent;
	ObixOutbox *shared = NULL;
	int32		id = 0;
	bool		dropped = false;
	bool		slept = false;
	XLogRecPtr	looked_at = InvalidXLogRecPtr;

	obix_check_not_null(fcinfo, names, lengthof(names));
	relid = PG_GETARG_OID(0);
	after = PG_GETARG_INT64(1);
	timeout = obix_get_timeout(PG_GETARG_INTERVAL_P(2));
	if (after < 0 || after == PG_INT64_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("position %lld is out of range", (long long) after),
				 errhint("The position before the first event is 0.")));
	end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), timeout);

	parent = obix_open_for_reading(relid, "obix.wait", &known);
	if (parent != NULL)
	{
		shared = obix_try_attach(parent, known);
		id = known->id;
		if (shared != NULL)
		{
			ObixPosition position;

			obix_get_position(shared, relid, id, &position);
			obix_check_not_beyond(parent, NULL, after, position.head);
		}
		table_close(parent, AccessShareLock);
	}

	for (;;)
	{
		ObixPosition position = {0};
		long		left;

		CHECK_FOR_INTERRUPTS();

		if (shared != NULL)
		{
			if (!obix_get_position(shared, relid, id, &position))
				ereport(ERROR,
						(errcode(ERRCODE_UNDEFINED_TABLE),
						 errmsg("the outbox was dropped while waiting for it")));
			if (position.high_water_mark > after)
				break;
		}

		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), end);
		if (left <= 0)
			break;

		/* look once more, lest it has moved before we joined */
		if (shared != NULL && obix_join_waiters(shared))
			continue;

		if (!dropped)
			obix_drop_snapshot("obix.wait");
		dropped = true;

		if (shared == NULL)
		{
			XLogRecPtr	replayed = GetXLogReplayRecPtr(NULL);

			if (replayed != looked_at)
			{
				looked_at = replayed;
				if (next_is_visible(relid, after))
					break;
				begin_anew(fcinfo);
			}
			left = Min(left, STANDBY_POLL_MS);
		}
		else if (position.suspect_from != 0)
		{
			if (next_is_visible(relid, after))
				break;
			left = Min(left, SUSPECT_POLL_MS);
		}

		if (shared != NULL)
			slept |= !obix_sleep(left);
		else
		{
			(void) WaitLatch(MyLatch,
							 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
							 left, obix_wait_event(OBIX_WAIT_EVENT));
			ResetLatch(MyLatch);
			if (!RecoveryInProgress())
				break;			/* promoted: begin anew */
		}
	}
	obix_leave_waiters();
	if (dropped)
		EnsurePortalSnapshotExists();
	if (shared != NULL && !slept)
		obix_return_in_turn(shared, TimestampDifferenceMilliseconds(GetCurrentTimestamp(), end));

	PG_RETURN_VOID();
}
