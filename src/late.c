/*-------------------------------------------------------------------------
 *
 * late.c
 *	  What the cursor of a consumer has passed and is still to be delivered.
 *
 * A consumer with ordering 'available' takes rows as they are committed.  What
 * it passes is recorded by the delivery that passes it: what was a hole then
 * may be an event when it is acknowledged.  A range ends when its sequences are
 * events, and have been delivered; are placeholders, whose proof thereby ends
 * the range too; or have been removed.  While one transaction has inserted the
 * rows of a range and is in progress, the range need not be looked at.
 *
 * The ranges are rows of obix.consumer_late.  Those that begin above the start
 * of the consumer only say what its last delivery saw ahead.  Dead letters that
 * are to be delivered again are ranges of one.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/subtrans.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/xid8.h"

#include "bounds.h"
#include "late.h"
#include "parked.h"

/* Pieces to break a late range into, at most */
#define MAX_PIECES			1000

/* Late ranges to read at a time: a consumer can have very many */
#define RANGES_AT_A_TIME	256

/* A range of obix.consumer_late */
typedef struct ObixLateRange
{
	int64		from;
	int64		to;
	bool		requeued;
	bool		handed_out;
	FullTransactionId holder;	/* invalid: none */
} ObixLateRange;

/* Is a transaction that was in progress once in progress still? */
static bool
is_in_progress(FullTransactionId holder)
{
	FullTransactionId next;

	if (!FullTransactionIdIsValid(holder))
		return false;
	next = ReadNextFullTransactionId();

	/* a restored row may name any */
	if (!FullTransactionIdPrecedes(holder, next) ||
		U64FromFullTransactionId(next) - U64FromFullTransactionId(holder) >
		(uint64) MaxTransactionId / 2)
		return false;
	return TransactionIdIsInProgress(XidFromFullTransactionId(holder));
}

static FullTransactionId
full_xid(TransactionId xid)
{
	FullTransactionId next = ReadNextFullTransactionId();
	uint32		epoch = EpochFromFullTransactionId(next);

	if (xid > XidFromFullTransactionId(next))
		epoch--;
	return FullTransactionIdFromEpochAndXid(epoch, xid);
}

/* Add a piece to a list of ObixLateRange, or to its last where they are alike. */
static void
add_piece(List **pieces, int64 from, int64 to, bool handed_out,
		  FullTransactionId holder)
{
	ObixLateRange *last = *pieces != NIL ? llast(*pieces) : NULL;

	if (from > to)
		return;
	if (last != NULL && last->to == from - 1 && last->handed_out == handed_out &&
		(handed_out || FullTransactionIdEquals(last->holder, holder) ||
		 list_length(*pieces) >= MAX_PIECES))
	{
		last->to = to;
		if (!FullTransactionIdEquals(last->holder, holder))
			last->holder = InvalidFullTransactionId;
		return;
	}
	last = palloc0(sizeof(ObixLateRange));
	last->from = from;
	last->to = to;
	last->handed_out = handed_out;
	last->holder = holder;
	*pieces = lappend(*pieces, last);
}

/*
 * Sequences that have no row in any state: a hole, unless they were removed.
 * Those may have been events, and have not been delivered.
 */
static void
add_hole(ObixDelivery *delivery, List **pieces, int64 from, int64 to)
{
	if (from <= to && from <= delivery->resolved && !delivery->counting)
	{
		delivery->reader.expected = from;
		obix_report_removed(&delivery->reader);
	}
	add_piece(pieces, from, to, false, InvalidFullTransactionId);
}

/*
 * Deliver what is committed of the rows with from <= sequence <= to, in the
 * order of the sequence.  What it passes is added to *pieces, a list of
 * ObixLateRange, and with record_delivered also what it delivers.  Returns the
 * sequence after the last that it has looked at: *complete says whether there
 * is no further row, or it has delivered all that it may.
 */
static int64
deliver_range(ObixDelivery *delivery, int64 from, int64 to, List **pieces,
			  bool record_delivered, bool *complete)
{
	ObixReader *reader = &delivery->reader;
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "obix read",
												  ALLOCSET_DEFAULT_SIZES);
	int64		next = from;
	bool		full = false;
	ObixLeaf	leaf;

	obix_find_leaf(reader->parent, from, &leaf);
	do
	{
		Relation	rel;
		ObixScan	scan;
		SnapshotData dirty;
		int64		sequence;

		if (!OidIsValid(leaf.relid))
			continue;
		rel = table_open(leaf.relid, AccessShareLock);
		InitDirtySnapshot(dirty);
		obix_begin_scan(&scan, rel, &dirty, Max(next, leaf.lower),
						to < leaf.upper ? to + 1 : leaf.upper,
						ForwardScanDirection);
		while (!full && obix_next_row(&scan, &sequence))
		{
			TransactionId pending = dirty.xmin;
			MemoryContext old;
			bool		wanted = false;

			CHECK_FOR_INTERRUPTS();
			if (sequence < next)
				continue;		/* another version of the same row */
			if (!TransactionIdIsValid(pending) &&
				IsolationUsesXactSnapshot() &&
				!table_tuple_satisfies_snapshot(rel, scan.slot, reader->snapshot))
				pending = FrozenTransactionId;	/* not for this transaction */

			if (!TransactionIdIsValid(pending))
			{
				old = MemoryContextSwitchTo(context);
				wanted = reader->wanted(reader->arg, scan.slot);
				full = wanted && !obix_deliver(reader, scan.slot);
				MemoryContextSwitchTo(old);
				MemoryContextReset(context);
				if (full)
					break;
			}

			add_hole(delivery, pieces, next, sequence - 1);
			if (TransactionIdIsNormal(pending))
				add_piece(pieces, sequence, sequence, false,
						  full_xid(SubTransGetTopmostTransaction(pending)));
			else if (TransactionIdIsValid(pending))
				add_piece(pieces, sequence, sequence, false,
						  InvalidFullTransactionId);
			else if (wanted && record_delivered)
				add_piece(pieces, sequence, sequence, true,
						  InvalidFullTransactionId);
			next = sequence + 1;
			full = reader->events == reader->max_events;
		}
		obix_end_scan(&scan);
		table_close(rel, AccessShareLock);
	} while (!full && leaf.upper <= to && obix_next_leaf(reader->parent, &leaf));

	MemoryContextDelete(context);
	*complete = !full;
	return next;
}

/* Delete late ranges that begin from $2 to $3. */
void
obix_delete_ranges(int32 id, int64 from, int64 to)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID};
	Datum		values[] = {Int32GetDatum(id), Int64GetDatum(from), Int64GetDatum(to)};

	(void) obix_run("DELETE FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND from_sequence OPERATOR(pg_catalog.>=) $2"
					" AND from_sequence OPERATOR(pg_catalog.<=) $3",
					3, types, values, NULL);
}

/* Insert a list of ObixLateRange as late ranges. */
static void
insert_ranges(int32 id, List *ranges)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID, BOOLOID, BOOLOID, XID8OID};
	ListCell   *cell;

	foreach(cell, ranges)
	{
		ObixLateRange *range = lfirst(cell);
		Datum		values[] = {
			Int32GetDatum(id), Int64GetDatum(range->from),
			Int64GetDatum(range->to), BoolGetDatum(range->requeued),
			BoolGetDatum(range->handed_out),
			FullTransactionIdGetDatum(range->holder)
		};
		bool		isnull[lengthof(types)] = {false};

		isnull[5] = !FullTransactionIdIsValid(range->holder);
		(void) obix_run("INSERT INTO obix.consumer_late"
						" VALUES ($1, $2, $3, $4, $5, $6)",
						lengthof(types), types, values, isnull);
	}
}

/* Put pieces, a list of ObixLateRange, in the place of the range they are of. */
static void
replace_range(const ObixDelivery *delivery, int64 from, List *pieces)
{
	ObixIdentity saved;

	obix_begin_spi(&saved);
	obix_delete_ranges(delivery->consumer->id, from, from);
	insert_ranges(delivery->consumer->id, pieces);
	obix_end_spi(&saved);
}

/* Are there late ranges at or below the start? */
bool
obix_has_late(const ObixDelivery *delivery)
{
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id),
		Int64GetDatum(obix_delivery_start(delivery->state))
	};

	return obix_run("SELECT FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND from_sequence OPERATOR(pg_catalog.<=) $2"
					" LIMIT 1",
					2, obix_id_sequence_types, values, NULL) > 0;
}

/* How many late ranges a consumer has. */
int64
obix_count_late(const ObixConsumerState *state)
{
	Datum		values[] = {
		Int32GetDatum(state->id), Int64GetDatum(obix_delivery_start(state))
	};
	ObixIdentity saved;
	int64		count;

	obix_begin_spi(&saved);
	count = (int64) obix_run("SELECT FROM obix.consumer_late"
							 " WHERE id OPERATOR(pg_catalog.=) $1"
							 " AND from_sequence OPERATOR(pg_catalog.<=) $2",
							 2, obix_id_sequence_types, values, NULL);
	obix_end_spi(&saved);
	return count;
}

/* The late ranges that a query finds. */
static List *
select_ranges(const char *query, int nargs, const Oid *types, Datum *values)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *ranges = NIL;
	ObixIdentity saved;
	MemoryContext old;

	obix_begin_spi(&saved);
	(void) obix_run(query, nargs, types, values, NULL);
	old = MemoryContextSwitchTo(context);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		ObixLateRange *range = palloc0(sizeof(ObixLateRange));
		Datum		holder;
		bool		isnull;

		range->from = DatumGetInt64(obix_spi_value(i, 1, &isnull));
		range->to = DatumGetInt64(obix_spi_value(i, 2, &isnull));
		range->requeued = DatumGetBool(obix_spi_value(i, 3, &isnull));
		range->handed_out = DatumGetBool(obix_spi_value(i, 4, &isnull));
		holder = obix_spi_value(i, 5, &isnull);
		if (!isnull)
			range->holder = DatumGetFullTransactionId(holder);
		ranges = lappend(ranges, range);
	}
	MemoryContextSwitchTo(old);
	obix_end_spi(&saved);
	return ranges;
}

/*
 * The first late ranges of a consumer that begin above a sequence, and at or
 * below its start.
 */
static List *
read_ranges(const ObixDelivery *delivery, int64 above)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID, INT4OID};
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(above),
		Int64GetDatum(obix_delivery_start(delivery->state)),
		Int32GetDatum(RANGES_AT_A_TIME)
	};

	return select_ranges("SELECT from_sequence, to_sequence, requeued, handed_out, holder"
						 " FROM obix.consumer_late"
						 " WHERE id OPERATOR(pg_catalog.=) $1"
						 " AND from_sequence OPERATOR(pg_catalog.>) $2"
						 " AND from_sequence OPERATOR(pg_catalog.<=) $3"
						 " ORDER BY from_sequence LIMIT $4",
						 lengthof(types), types, values);
}

/* The late range that has a sequence, in a list; NIL if there is none. */
static List *
find_range(const ObixDelivery *delivery, int64 sequence)
{
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(sequence)
	};

	return select_ranges("SELECT from_sequence, to_sequence, requeued, handed_out, holder"
						 " FROM (SELECT * FROM obix.consumer_late"
						 " WHERE id OPERATOR(pg_catalog.=) $1"
						 " AND from_sequence OPERATOR(pg_catalog.<=) $2"
						 " ORDER BY from_sequence DESC LIMIT 1) r"
						 " WHERE to_sequence OPERATOR(pg_catalog.>=) $2",
						 2, obix_id_sequence_types, values);
}

/*
 * Deliver a dead letter again.  What becomes of its range: a list with itself,
 * or NIL where it is held back anew, or gone.
 */
static List *
deliver_requeued(ObixDelivery *delivery, ObixLateRange *range, TupleTableSlot *slot)
{
	ObixReader *reader = &delivery->reader;
	Datum		key;
	bool		isnull;

	if (!obix_load_dead_letter(delivery->consumer->id, range->from, slot))
		return NIL;
	key = slot_getattr(slot, Anum_event_key, &isnull);
	if (!isnull && obix_is_held(delivery, TextDatumGetCString(key), range->from))
	{
		ObixIdentity saved;

		obix_begin_spi(&saved);
		obix_set_dead_letter_state(delivery->consumer->id, range->from, "held");
		obix_end_spi(&saved);
		return NIL;
	}
	range->handed_out = obix_deliver(reader, slot);
	return list_make1(range);
}

static bool
same_ranges(List *pieces, const ObixLateRange *range)
{
	const ObixLateRange *piece = pieces != NIL ? linitial(pieces) : NULL;

	return list_length(pieces) == 1 && piece->from == range->from &&
		piece->to == range->to && piece->handed_out == range->handed_out &&
		FullTransactionIdEquals(piece->holder, range->holder);
}

/*
 * Deliver late ranges, a list.  Returns whether there may be more, which are to
 * be looked at as well.
 */
static bool
deliver_ranges(ObixDelivery *delivery, List *ranges, bool *changed)
{
	ObixReader *reader = &delivery->reader;
	TupleTableSlot *slot = MakeSingleTupleTableSlot(obix_event_desc(),
													&TTSOpsVirtual);
	ObixLateRange *open = NULL;
	bool		full = false;
	ListCell   *cell;
	ObixIdentity saved;

	foreach(cell, ranges)
	{
		ObixLateRange *range = lfirst(cell);
		ObixLateRange before = *range;
		List	   *pieces = NIL;

		CHECK_FOR_INTERRUPTS();
		full |= reader->events >= reader->max_events ||
			reader->bytes >= reader->max_bytes;
		if (full)
			break;
		if (is_in_progress(range->holder))
		{
			/* several deliveries may have passed parts of it */
			if (open != NULL && open->to == range->from - 1 &&
				FullTransactionIdEquals(open->holder, range->holder))
			{
				obix_begin_spi(&saved);
				obix_delete_ranges(delivery->consumer->id, open->from, range->from);
				open->to = range->to;
				insert_ranges(delivery->consumer->id, list_make1(open));
				obix_end_spi(&saved);
				*changed = true;
			}
			else
				open = range;
			continue;
		}
		if (range->requeued)
		{
			pieces = deliver_requeued(delivery, range, slot);
			full = pieces != NIL && !range->handed_out;
		}
		else
		{
			bool		complete;
			int64		next = deliver_range(delivery, range->from, range->to,
											 &pieces, true, &complete);

			if (complete)
				add_hole(delivery, &pieces, next, range->to);
			else
				add_piece(&pieces, next, range->to, false,
						  InvalidFullTransactionId);
			full = !complete;
		}
		if (same_ranges(pieces, &before))
			continue;
		*changed = true;
		replace_range(delivery, before.from, pieces);
	}
	ExecDropSingleTupleTableSlot(slot);
	return !full && list_length(ranges) == RANGES_AT_A_TIME;
}

/* Deliver what is late. */
void
obix_deliver_late(ObixDelivery *delivery)
{
	ObixConsumerState *state = delivery->state;
	int64		above = 0;
	bool		changed = false;
	bool		more;
	ObixIdentity saved;

	do
	{
		List	   *ranges = read_ranges(delivery, above);

		if (ranges != NIL)
			above = ((ObixLateRange *) llast(ranges))->to;
		more = deliver_ranges(delivery, ranges, &changed);
	} while (more);

	if (changed)
	{
		obix_begin_spi(&saved);
		state->late = obix_has_late(delivery);
		obix_end_spi(&saved);
		obix_set_state(state);
	}
}

/*
 * Deliver the event that is being tried, though others have become available
 * before it: its attempts are counted as long as it is tried alone.
 */
void
obix_deliver_again(ObixDelivery *delivery)
{
	ObixReader *reader = &delivery->reader;
	ObixConsumerState *state = delivery->state;
	int64		again = delivery->again;
	ListCell   *cell;
	List	   *ignored = NIL;
	bool		complete;

	if (again > obix_delivery_start(state))
	{
		/* what was passed before it has been recorded */
		if (again <= state->fetched)
			(void) deliver_range(delivery, again, again, &ignored, false,
								 &complete);
		return;
	}

	foreach(cell, find_range(delivery, again))
	{
		ObixLateRange *range = lfirst(cell);
		ObixLateRange before = *range;
		List	   *pieces = NIL;

		/* a dead letter that was requeued waits its turn */
		if (range->requeued)
			continue;
		add_piece(&pieces, range->from, again - 1, range->handed_out,
				  range->holder);
		(void) deliver_range(delivery, again, again, &pieces, true, &complete);
		if (reader->events == 0)
			return;
		add_piece(&pieces, again + 1, range->to, range->handed_out,
				  range->holder);
		if (!same_ranges(pieces, &before))
		{
			replace_range(delivery, before.from, pieces);
			obix_set_state(state);
		}
	}
}

/* Deliver what lies ahead and is committed, and record what is passed. */
void
obix_deliver_available(ObixDelivery *delivery)
{
	ObixReader *reader = &delivery->reader;
	ObixConsumerState *state = delivery->state;
	int64		start = obix_delivery_start(state);
	List	   *holes = NIL;
	ObixIdentity saved;
	bool		complete;
	int64		next;

	reader->expected = start + 1;
	obix_check_not_removed(reader, delivery->resolved);
	next = deliver_range(delivery, start + 1, PG_INT64_MAX - 1, &holes, false,
						 &complete);
	if (reader->events == 0 && next - 1 - start < OBIX_SCAN_STEP)
		return;

	/* the last delivery may have seen other holes */
	obix_begin_spi(&saved);
	if (state->fetched > start)
		obix_delete_ranges(delivery->consumer->id, start + 1, PG_INT64_MAX);
	insert_ranges(delivery->consumer->id, holes);
	obix_end_spi(&saved);
	state->fetched = next - 1;
	if (reader->events == 0)
	{
		state->scanned = next - 1;
		state->late |= holes != NIL;
		obix_forget_discarded(delivery->consumer->id, state, start);
	}
	obix_set_state(state);
}

/* Acknowledge what was handed out at or below a sequence behind the cursor. */
void
obix_acknowledge_late(ObixDelivery *delivery, int64 sequence)
{
	ObixConsumerState *state = delivery->state;
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(sequence)
	};
	int64		count = 0;
	ObixIdentity saved;
	bool		isnull;

	obix_begin_spi(&saved);
	(void) obix_run("DELETE FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND handed_out"
					" AND from_sequence OPERATOR(pg_catalog.<=) $2"
					" RETURNING from_sequence, to_sequence, requeued",
					2, obix_id_sequence_types, values, NULL);
	{
		SPITupleTable *rows = SPI_tuptable;
		uint64		nrows = SPI_processed;

		for (uint64 i = 0; i < nrows; i++)
		{
			int64		from;
			int64		to;
			bool		requeued;

			SPI_tuptable = rows;
			from = DatumGetInt64(obix_spi_value(i, 1, &isnull));
			to = DatumGetInt64(obix_spi_value(i, 2, &isnull));
			requeued = DatumGetBool(obix_spi_value(i, 3, &isnull));
			if (to > sequence)
			{
				ObixLateRange rest = {.from = sequence + 1,.to = to,.handed_out = true};

				insert_ranges(delivery->consumer->id, list_make1(&rest));
				to = sequence;
			}
			count += to - from + 1;
			if (requeued)
			{
				Datum		letter[] = {values[0], Int64GetDatum(from)};

				(void) obix_run("DELETE FROM obix.parked_event"
								" WHERE id OPERATOR(pg_catalog.=) $1"
								" AND sequence OPERATOR(pg_catalog.=) $2",
								2, obix_id_sequence_types, letter, NULL);
			}
		}
	}
	state->late = obix_has_late(delivery);
	if (state->parked && !state->late)
		state->parked = obix_has_dead_letters(delivery->consumer->id);
	obix_end_spi(&saved);
	if (count == 0)
		return;					/* it has been acknowledged before */
	state->delivered += count;
	obix_settle_attempts(state, sequence);
	obix_set_state(state);
}

/*
 * Count the events that the last delivery of what is available had: those that
 * were no holes then.
 */
void
obix_count_available(ObixDelivery *delivery, int64 sequence)
{
	MemoryContext context = CurrentMemoryContext;
	int64		next = obix_delivery_start(delivery->state) + 1;
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(next)
	};
	List	   *holes = NIL;
	List	   *pieces = NIL;
	ListCell   *cell;
	ObixLateRange *end = palloc0(sizeof(ObixLateRange));
	ObixIdentity saved;
	bool		isnull;
	bool		complete;

	obix_begin_spi(&saved);
	(void) obix_run("SELECT from_sequence, to_sequence FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND from_sequence OPERATOR(pg_catalog.>=) $2"
					" ORDER BY from_sequence",
					2, obix_id_sequence_types, values, NULL);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext old = MemoryContextSwitchTo(context);
		ObixLateRange *hole = palloc0(sizeof(ObixLateRange));

		hole->from = DatumGetInt64(obix_spi_value(i, 1, &isnull));
		hole->to = DatumGetInt64(obix_spi_value(i, 2, &isnull));
		holes = lappend(holes, hole);
		MemoryContextSwitchTo(old);
	}
	obix_end_spi(&saved);

	end->from = PG_INT64_MAX;
	foreach(cell, lappend(holes, end))
	{
		ObixLateRange *hole = lfirst(cell);

		if (next <= Min(hole->from - 1, sequence))
			(void) deliver_range(delivery, next, Min(hole->from - 1, sequence),
								 &pieces, false, &complete);
		next = hole->to + 1;
		if (hole->from > sequence)
			break;
	}
}

/*
 * The cursor moves to a sequence: if that lies within holes that were recorded
 * ahead, those above it are still ahead, and will be recorded anew.
 */
bool
obix_cut_range(ObixDelivery *delivery, int64 start, int64 sequence)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID};
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(start),
		Int64GetDatum(sequence)
	};

	bool		cut;

	cut = obix_run("UPDATE obix.consumer_late SET to_sequence = $3"
				   " WHERE id OPERATOR(pg_catalog.=) $1"
				   " AND from_sequence OPERATOR(pg_catalog.>) $2"
				   " AND from_sequence OPERATOR(pg_catalog.<=) $3"
				   " AND to_sequence OPERATOR(pg_catalog.>) $3",
				   3, types, values, NULL) > 0;
	if (cut)
		obix_delete_ranges(delivery->consumer->id, sequence + 1, PG_INT64_MAX);
	return cut;
}

/* Is a sequence behind the cursor still to be acknowledged? */
bool
obix_is_late(ObixDelivery *delivery, int64 sequence)
{
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(sequence)
	};

	return obix_run("SELECT FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND $2 OPERATOR(pg_catalog.>=) from_sequence"
					" AND $2 OPERATOR(pg_catalog.<=) to_sequence",
					2, obix_id_sequence_types, values, NULL) > 0;
}

/* Take one event out of what is late. */
void
obix_remove_late(ObixDelivery *delivery, int64 sequence)
{
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(sequence)
	};

	(void) obix_run("WITH old AS (DELETE FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND $2 OPERATOR(pg_catalog.>=) from_sequence"
					" AND $2 OPERATOR(pg_catalog.<=) to_sequence"
					" RETURNING *)"
					" INSERT INTO obix.consumer_late"
					" SELECT id, f, t, requeued, handed_out, holder FROM old,"
					" LATERAL (VALUES (from_sequence, $2 OPERATOR(pg_catalog.-) 1),"
					" ($2 OPERATOR(pg_catalog.+) 1, to_sequence)) v(f, t)"
					" WHERE f OPERATOR(pg_catalog.<=) t",
					2, obix_id_sequence_types, values, NULL);
	delivery->state->late = obix_has_late(delivery);
}

/* Have a dead letter delivered again. */
void
obix_add_requeued(int32 id, int64 sequence)
{
	ObixLateRange range = {.from = sequence,.to = sequence,.requeued = true};

	insert_ranges(id, list_make1(&range));
}
