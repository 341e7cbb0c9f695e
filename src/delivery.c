/*-------------------------------------------------------------------------
 *
 * delivery.c
 *	  What comes next for a consumer, and what becomes of it.
 *
 * Everything at or below the start of a consumer, the higher of its cursor and
 * of what was scanned for it, has been dealt with, but for
 *
 *	- late ranges (obix.consumer_late): holes that a consumer with ordering
 *	  'available' has passed, and dead letters to be delivered again;
 *	- dead letters (obix.parked_event).
 *
 * What is late is delivered before what lies ahead, and by itself, so that an
 * acknowledgement means either the one or the other.
 *
 * A consumer with ordering 'available' takes rows as they are committed.  What
 * it passes is recorded by the delivery that passes it: what was a hole then
 * may be an event when it is acknowledged.  A range ends when its sequences are
 * events, and have been delivered; are placeholders, whose proof thereby ends
 * the range too; or have been removed.  While one transaction has inserted the
 * rows of a range and is in progress, the range need not be looked at.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "access/htup_details.h"
#include "access/subtrans.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
#include "utils/xid8.h"

#include "bounds.h"
#include "compat.h"
#include "delivery.h"
#include "turn.h"

/*
 * So many sequences that are not for a consumer are looked at again rather than
 * its state be written.
 */
#define SCAN_STEP			1000

/* Pieces to break a late range into, at most */
#define MAX_PIECES			1000

/* A range of obix.consumer_late */
typedef struct ObixLateRange
{
	int64		from;
	int64		to;
	bool		requeued;
	bool		handed_out;
	FullTransactionId holder;	/* invalid: none */
} ObixLateRange;

static const Oid id_sequence_types[] = {INT4OID, INT8OID};

/* Where looking for what lies ahead begins, less one. */
int64
obix_delivery_start(const ObixConsumerState *state)
{
	return Max(state->position, state->scanned);
}

/*
 * What a consumer wants
 */

static int
compare_sequences(const void *a, const void *b)
{
	int64		x = *(const int64 *) a;
	int64		y = *(const int64 *) b;

	return x < y ? -1 : x > y;
}

static int
compare_keys(const void *a, const void *b)
{
	return strcmp(*(char *const *) a, *(char *const *) b);
}

/* The values of the one column of the rows that SPI has. */
static Datum
spi_value(uint64 row, int column, bool *isnull)
{
	return SPI_getbinval(SPI_tuptable->vals[row], SPI_tuptable->tupdesc, column,
						 isnull);
}

/*
 * Read which dead letters lie ahead, and which keys are held back; the latter
 * only to deliver.
 */
static void
read_dead_letters(ObixDelivery *delivery)
{
	MemoryContext context = CurrentMemoryContext;
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id),
		Int64GetDatum(obix_delivery_start(delivery->state))
	};
	ObixIdentity saved;
	bool		isnull;

	if (!delivery->state->parked)
		return;
	obix_begin_spi(&saved);
	(void) obix_run("SELECT sequence FROM obix.parked_event"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND sequence OPERATOR(pg_catalog.>) $2"
					" ORDER BY sequence",
					2, id_sequence_types, values, NULL);
	delivery->nparked = (int) SPI_processed;
	delivery->parked = MemoryContextAllocHuge(context,
											  (SPI_processed + 1) * sizeof(int64));
	for (uint64 i = 0; i < SPI_processed; i++)
		delivery->parked[i] = DatumGetInt64(spi_value(i, 1, &isnull));

	if (delivery->consumer->hold_key && !delivery->counting)
	{
		(void) obix_run("SELECT DISTINCT key FROM obix.parked_event"
						" WHERE id OPERATOR(pg_catalog.=) $1"
						" AND state OPERATOR(pg_catalog.=) ANY (ARRAY['failed', 'held'])"
						" AND key IS NOT NULL",
						1, id_sequence_types, values, NULL);
		delivery->nheld = (int) SPI_processed;
		delivery->held = MemoryContextAllocHuge(context,
												(SPI_processed + 1) * sizeof(char *));
		for (uint64 i = 0; i < SPI_processed; i++)
			delivery->held[i] =
				MemoryContextStrdup(context,
									TextDatumGetCString(spi_value(i, 1, &isnull)));
		qsort(delivery->held, delivery->nheld, sizeof(char *), compare_keys);
	}
	obix_end_spi(&saved);
}

static bool
is_held(const ObixDelivery *delivery, const char *key)
{
	return delivery->nheld > 0 &&
		bsearch(&key, delivery->held, delivery->nheld, sizeof(char *),
				compare_keys) != NULL;
}

/*
 * Put an event into obix.dead_letter: error NULL means that it is held behind
 * another.  slot has its columns.
 */
static void
park_event(const ObixDelivery *delivery, TupleTableSlot *slot, int32 attempts,
		   const char *error)
{
	static const Oid types[] = {
		INT4OID, INT8OID, UUIDOID, TEXTOID, TEXTOID, JSONBOID, JSONBOID,
		TIMESTAMPTZOID, TEXTOID, INT4OID, TEXTOID, TIMESTAMPTZOID
	};
	Datum		values[lengthof(types)];
	bool		isnull[lengthof(types)] = {false};
	ObixIdentity saved;

	values[0] = Int32GetDatum(delivery->consumer->id);
	slot_getsomeattrs(slot, Natts_event);
	for (int i = 0; i < Natts_event; i++)
	{
		values[i + 1] = slot->tts_values[i];
		isnull[i + 1] = slot->tts_isnull[i];
	}
	values[8] = CStringGetTextDatum(error == NULL ? "held" : "failed");
	values[9] = Int32GetDatum(attempts);
	isnull[10] = error == NULL;
	values[10] = error == NULL ? (Datum) 0 : CStringGetTextDatum(error);
	values[11] = TimestampTzGetDatum(GetCurrentTimestamp());

	obix_begin_spi(&saved);
	(void) obix_run("INSERT INTO obix.parked_event VALUES"
					" ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)"
					" ON CONFLICT (id, sequence) DO UPDATE"
					" SET state = EXCLUDED.state, attempts = EXCLUDED.attempts,"
					" error = EXCLUDED.error, parked_at = EXCLUDED.parked_at",
					lengthof(types), types, values, isnull);
	obix_end_spi(&saved);
}

/*
 * Does the consumer want the event of a row?  An event that is held back is
 * parked and not wanted.
 */
static bool
is_wanted(void *arg, TupleTableSlot *slot)
{
	static const pg_uuid_t nil;
	ObixDelivery *delivery = arg;
	int64		sequence;
	Datum		value;
	bool		isnull;

	slot_getsomeattrs(slot, Natts_event);
	value = slot_getattr(slot, Anum_event_id, &isnull);
	if (memcmp(DatumGetUUIDP(value), &nil, sizeof(nil)) == 0)
		return false;

	if (delivery->types != NULL)
	{
		bool		match = false;

		value = slot_getattr(slot, Anum_event_type, &isnull);
		for (int i = 0; !isnull && !match && i < delivery->ntypes; i++)
		{
			text	   *type = DatumGetTextPP(delivery->types[i]);
			text	   *has = DatumGetTextPP(value);

			match = VARSIZE_ANY_EXHDR(type) == VARSIZE_ANY_EXHDR(has) &&
				memcmp(VARDATA_ANY(type), VARDATA_ANY(has),
					   VARSIZE_ANY_EXHDR(type)) == 0;
		}
		if (!match)
			return false;
	}

	sequence = DatumGetInt64(slot_getattr(slot, Anum_event_sequence, &isnull));
	if (delivery->nparked > 0 &&
		bsearch(&sequence, delivery->parked, delivery->nparked, sizeof(int64),
				compare_sequences) != NULL)
		return false;

	if (delivery->nheld > 0 && !delivery->counting)
	{
		value = slot_getattr(slot, Anum_event_key, &isnull);
		if (!isnull && is_held(delivery, TextDatumGetCString(value)))
		{
			park_event(delivery, slot, 0, NULL);
			delivery->has_parked = true;
			delivery->unsure = true;
			return false;
		}
	}
	return true;
}

/*
 * Begin to deliver to a consumer, for a user who may read the outbox.  Events
 * go to reader.store, if that is set, in the form of reader.desc.
 */
void
obix_begin_delivery(ObixDelivery *delivery, const ObixConsumer *consumer,
					ObixConsumerState *state, const char *function)
{
	ObixReader *reader = &delivery->reader;
	ObixPosition position;

	delivery->consumer = consumer;
	delivery->state = state;
	delivery->unsure = consumer->own || state->own;
	if (consumer->types != NULL)
		deconstruct_array(consumer->types, TEXTOID, -1, false, TYPALIGN_INT,
						  &delivery->types, NULL, &delivery->ntypes);
	reader->consumer = consumer->name;
	reader->wanted = is_wanted;
	reader->arg = delivery;
	reader->to = PG_INT64_MAX;
	reader->parent = obix_open_for_reading(consumer->outbox, function,
										   &reader->known);
	reader->shared = obix_attach(reader->parent, reader->known);
	obix_get_position(reader->shared, consumer->outbox, reader->known->id,
					  &position);
	obix_check_not_beyond(reader->parent, consumer->name, state->position,
						  position.head);
	delivery->resolved = obix_resolved(consumer->outbox);

	/* in READ COMMITTED everything is as of now, like the state */
	reader->snapshot = RegisterSnapshot(IsolationUsesXactSnapshot() ?
										GetTransactionSnapshot() :
										GetLatestSnapshot());
}

/* Locks are kept, as far as they are not released by the caller. */
void
obix_end_delivery(ObixDelivery *delivery)
{
	UnregisterSnapshot(delivery->reader.snapshot);
	table_close(delivery->reader.parent, AccessShareLock);
}

/*
 * Late ranges
 */

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

/* Sequences that have no row in any state: a hole, unless they were removed. */
static void
add_hole(ObixDelivery *delivery, List **pieces, int64 from, int64 to)
{
	add_piece(pieces, Max(from, delivery->resolved + 1), to, false,
			  InvalidFullTransactionId);
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
				wanted = is_wanted(delivery, scan.slot);
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
static void
delete_ranges(int32 id, int64 from, int64 to)
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

/* Are there late ranges at or below the start? */
static bool
has_late(const ObixDelivery *delivery)
{
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id),
		Int64GetDatum(obix_delivery_start(delivery->state))
	};

	return obix_run("SELECT FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND from_sequence OPERATOR(pg_catalog.<=) $2"
					" LIMIT 1",
					2, id_sequence_types, values, NULL) > 0;
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
							 2, id_sequence_types, values, NULL);
	obix_end_spi(&saved);
	return count;
}

/* The late ranges of a consumer that begin at or below its start. */
static List *
read_ranges(const ObixDelivery *delivery)
{
	MemoryContext context = CurrentMemoryContext;
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id),
		Int64GetDatum(obix_delivery_start(delivery->state))
	};
	List	   *ranges = NIL;
	ObixIdentity saved;
	MemoryContext old;

	obix_begin_spi(&saved);
	(void) obix_run("SELECT from_sequence, to_sequence, requeued, handed_out, holder"
					" FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND from_sequence OPERATOR(pg_catalog.<=) $2"
					" ORDER BY from_sequence",
					2, id_sequence_types, values, NULL);
	old = MemoryContextSwitchTo(context);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		ObixLateRange *range = palloc0(sizeof(ObixLateRange));
		Datum		holder;
		bool		isnull;

		range->from = DatumGetInt64(spi_value(i, 1, &isnull));
		range->to = DatumGetInt64(spi_value(i, 2, &isnull));
		range->requeued = DatumGetBool(spi_value(i, 3, &isnull));
		range->handed_out = DatumGetBool(spi_value(i, 4, &isnull));
		holder = spi_value(i, 5, &isnull);
		if (!isnull)
			range->holder = DatumGetFullTransactionId(holder);
		ranges = lappend(ranges, range);
	}
	MemoryContextSwitchTo(old);
	obix_end_spi(&saved);
	return ranges;
}

/* Put the event of a dead letter into a slot; false if there is none. */
static bool
load_dead_letter(int32 id, int64 sequence, TupleTableSlot *slot)
{
	MemoryContext context = CurrentMemoryContext;
	Datum		values[] = {Int32GetDatum(id), Int64GetDatum(sequence)};
	ObixIdentity saved;
	bool		found;

	ExecClearTuple(slot);
	obix_begin_spi(&saved);
	found = obix_run("SELECT sequence, event_id, type, key, payload, headers, recorded_at"
					 " FROM obix.parked_event"
					 " WHERE id OPERATOR(pg_catalog.=) $1"
					 " AND sequence OPERATOR(pg_catalog.=) $2",
					 2, id_sequence_types, values, NULL) > 0;
	if (found)
	{
		MemoryContext old = MemoryContextSwitchTo(context);

		for (int i = 0; i < Natts_event; i++)
		{
			Form_pg_attribute column = TupleDescAttr(slot->tts_tupleDescriptor, i);
			Datum		value = spi_value(0, i + 1, &slot->tts_isnull[i]);

			if (slot->tts_isnull[i])
				continue;
			if (column->attlen == -1)
				value = PointerGetDatum(PG_DETOAST_DATUM_COPY(value));
			else
				value = datumCopy(value, column->attbyval, column->attlen);
			slot->tts_values[i] = value;
		}
		MemoryContextSwitchTo(old);
		ExecStoreVirtualTuple(slot);
	}
	obix_end_spi(&saved);
	return found;
}

/* Change the state of a dead letter. */
static void
set_dead_letter_state(int32 id, int64 sequence, const char *state)
{
	static const Oid types[] = {INT4OID, INT8OID, TEXTOID};
	Datum		values[] = {
		Int32GetDatum(id), Int64GetDatum(sequence), CStringGetTextDatum(state)
	};

	(void) obix_run("UPDATE obix.parked_event SET state = $3"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND sequence OPERATOR(pg_catalog.=) $2",
					3, types, values, NULL);
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

	if (!load_dead_letter(delivery->consumer->id, range->from, slot))
		return NIL;
	key = slot_getattr(slot, Anum_event_key, &isnull);
	if (!isnull && is_held(delivery, TextDatumGetCString(key)))
	{
		ObixIdentity saved;

		obix_begin_spi(&saved);
		set_dead_letter_state(delivery->consumer->id, range->from, "held");
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

/* Deliver what is late. */
static void
deliver_late(ObixDelivery *delivery)
{
	ObixReader *reader = &delivery->reader;
	ObixConsumerState *state = delivery->state;
	TupleTableSlot *slot = MakeSingleTupleTableSlot(obix_event_desc(),
													&TTSOpsVirtual);
	bool		changed = false;
	ListCell   *cell;
	ObixIdentity saved;

	foreach(cell, read_ranges(delivery))
	{
		ObixLateRange *range = lfirst(cell);
		ObixLateRange before = *range;
		List	   *pieces = NIL;

		CHECK_FOR_INTERRUPTS();
		if (reader->events >= reader->max_events ||
			reader->bytes >= reader->max_bytes)
			break;
		if (is_in_progress(range->holder))
			continue;
		if (range->requeued)
			pieces = deliver_requeued(delivery, range, slot);
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
		}
		if (same_ranges(pieces, &before))
			continue;
		changed = true;
		obix_begin_spi(&saved);
		delete_ranges(delivery->consumer->id, before.from, before.from);
		insert_ranges(delivery->consumer->id, pieces);
		obix_end_spi(&saved);
	}
	ExecDropSingleTupleTableSlot(slot);
	delivery->late = reader->events > 0;

	if (changed)
	{
		obix_begin_spi(&saved);
		state->late = has_late(delivery);
		obix_end_spi(&saved);
		obix_set_state(state);
	}
}

/*
 * What lies ahead
 */

/* Remember for all sessions what has been found, if it is so for them too. */
static void
remember_found(ObixDelivery *delivery, int64 start)
{
	ObixReader *reader = &delivery->reader;
	ObixPosition position;
	ObixFound	found = {0};

	if (delivery->unsure)
		return;
	obix_get_position(reader->shared, delivery->consumer->outbox,
					  reader->known->id, &position);
	if (reader->expected - 1 > position.high_water_mark)
		return;
	found.version = delivery->consumer->version;
	found.nothing_after = start;
	found.nothing_to = reader->events > 0 ? reader->first - 1 :
		reader->expected - 1;
	if (reader->events > 0)
	{
		found.after = delivery->state->position;
		found.to = reader->last;
		found.count = reader->events;
		found.last_at = reader->last_at;
	}
	obix_turn_set_found(delivery->consumer->id, &found);
}

/* Deliver what lies ahead, contiguously. */
static void
deliver_in_sequence(ObixDelivery *delivery)
{
	ObixReader *reader = &delivery->reader;
	ObixConsumerState *state = delivery->state;
	int64		start = obix_delivery_start(state);
	int64		nothing_to;
	ObixFound	found;

	reader->expected = start + 1;
	if (obix_turn_get_found(delivery->consumer->id, &found) &&
		found.version == delivery->consumer->version && !delivery->unsure &&
		found.nothing_after <= start && found.nothing_to > start)
		reader->expected = found.nothing_to + 1;

	obix_read_on(reader);
	remember_found(delivery, start);

	nothing_to = reader->events > 0 ? reader->first - 1 : reader->expected - 1;
	if (nothing_to - start >= SCAN_STEP)
		state->scanned = nothing_to;

	/*
	 * What was parked is not certain before this transaction commits; that
	 * the state was changed by it tells those who look next.
	 */
	if (nothing_to - start >= SCAN_STEP || delivery->has_parked)
		obix_set_state(state);
}

/* Deliver what lies ahead and is committed, and record what is passed. */
static void
deliver_available(ObixDelivery *delivery)
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
	if (reader->events == 0 && next - 1 - start < SCAN_STEP)
		return;

	/* the last delivery may have seen other holes */
	obix_begin_spi(&saved);
	if (state->fetched > start)
		delete_ranges(delivery->consumer->id, start + 1, PG_INT64_MAX);
	insert_ranges(delivery->consumer->id, holes);
	obix_end_spi(&saved);
	state->fetched = next - 1;
	if (reader->events == 0)
	{
		state->scanned = next - 1;
		state->late |= holes != NIL;
	}
	obix_set_state(state);
}

/*
 * Deliver the next events.  Writes to the tables of the consumer what has to
 * be known later; nothing if there is nothing to deliver, but now and then how
 * far was looked.
 */
void
obix_deliver_next(ObixDelivery *delivery)
{
	delivery->late = false;
	read_dead_letters(delivery);
	if (delivery->state->late)
		deliver_late(delivery);
	if (delivery->reader.events > 0)
		return;
	if (delivery->consumer->available)
		deliver_available(delivery);
	else
		deliver_in_sequence(delivery);
}

/*
 * Acknowledging
 */

/* Acknowledge what was handed out at or below a sequence behind the cursor. */
static void
acknowledge_late(ObixDelivery *delivery, int64 sequence)
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
					2, id_sequence_types, values, NULL);
	{
		SPITupleTable *rows = SPI_tuptable;
		uint64		nrows = SPI_processed;

		for (uint64 i = 0; i < nrows; i++)
		{
			int64		from;
			int64		to;
			bool		requeued;

			SPI_tuptable = rows;
			from = DatumGetInt64(spi_value(i, 1, &isnull));
			to = DatumGetInt64(spi_value(i, 2, &isnull));
			requeued = DatumGetBool(spi_value(i, 3, &isnull));
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
								2, id_sequence_types, letter, NULL);
			}
		}
	}
	state->late = has_late(delivery);
	if (state->parked && !state->late)
		state->parked = obix_has_dead_letters(delivery->consumer->id);
	obix_end_spi(&saved);
	if (count == 0)
		return;					/* it has been acknowledged before */
	state->delivered += count;
	if (state->attempt_sequence <= sequence)
		state->attempts = 0;
	obix_set_state(state);
}

/*
 * Count the events that the last delivery of what is available had: those that
 * were no holes then.
 */
static void
count_available(ObixDelivery *delivery, int64 sequence)
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
					2, id_sequence_types, values, NULL);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext old = MemoryContextSwitchTo(context);
		ObixLateRange *hole = palloc0(sizeof(ObixLateRange));

		hole->from = DatumGetInt64(spi_value(i, 1, &isnull));
		hole->to = DatumGetInt64(spi_value(i, 2, &isnull));
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
 * Count the events for the consumer from its start up to a sequence, all of
 * which must be there to be delivered.
 */
static int64
count_ahead(ObixDelivery *delivery, int64 sequence, TimestampTz *last_at)
{
	ObixReader *reader = &delivery->reader;
	ObixConsumerState *state = delivery->state;
	ObixFound	found;
	int64		reached;

	if (delivery->count > 0)
	{
		*last_at = delivery->last_at;
		return delivery->count;
	}

	/* usually the fetch has counted them */
	if (!IsolationUsesXactSnapshot() && !delivery->unsure &&
		obix_turn_get_found(delivery->consumer->id, &found) &&
		found.version == delivery->consumer->version &&
		found.after == state->position && found.to == sequence)
	{
		*last_at = found.last_at;
		return found.count;
	}

	reader->expected = obix_delivery_start(state) + 1;
	reader->to = sequence;
	reader->max_events = PG_INT64_MAX;
	reader->max_bytes = PG_INT64_MAX;
	reader->store = NULL;
	delivery->counting = true;
	read_dead_letters(delivery);
	if (delivery->consumer->available)
	{
		count_available(delivery, sequence);
		reached = state->fetched;
	}
	else
	{
		if (reader->expected <= sequence)
			obix_read_on(reader);
		reached = reader->expected - 1;
	}
	delivery->counting = false;
	if (reached < sequence)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("event %lld cannot have been delivered to consumer \"%s\"",
						(long long) sequence, delivery->consumer->name),
				 errdetail("What could be delivered ends at %lld.",
						   (long long) reached),
				 errhint("Acknowledge events that were fetched; to skip others use obix.seek.")));
	*last_at = reader->events > 0 ? reader->last_at : 0;
	return reader->events;
}

/*
 * The cursor moves to a sequence: if that lies within holes that were recorded
 * ahead, those above it are still ahead, and will be recorded anew.
 */
static bool
cut_range(ObixDelivery *delivery, int64 start, int64 sequence)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID};
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(start),
		Int64GetDatum(sequence)
	};

	return obix_run("UPDATE obix.consumer_late SET to_sequence = $3"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND from_sequence OPERATOR(pg_catalog.>) $2"
					" AND from_sequence OPERATOR(pg_catalog.<=) $3"
					" AND to_sequence OPERATOR(pg_catalog.>) $3",
					3, types, values, NULL) > 0;
}

/*
 * Acknowledge what was delivered, up to and including a sequence.
 */
void
obix_acknowledge(ObixDelivery *delivery, int64 sequence)
{
	ObixConsumerState *state = delivery->state;
	int64		start = obix_delivery_start(state);
	TimestampTz last_at;

	if (sequence <= start)
	{
		if (state->late)
			acknowledge_late(delivery, sequence);
		return;
	}

	state->delivered += count_ahead(delivery, sequence, &last_at);
	if (last_at != 0)
		state->last_event_at = last_at;
	state->position = sequence;
	if (state->attempt_sequence <= sequence)
		state->attempts = 0;
	if (delivery->consumer->available && state->fetched > 0)
	{
		ObixIdentity saved;

		obix_begin_spi(&saved);
		if (cut_range(delivery, start, sequence))
			state->fetched = sequence;
		state->late = has_late(delivery);
		obix_end_spi(&saved);
	}
	obix_set_state(state);
}

/*
 * Failing
 */

/* Count the attempt at an event that is about to be delivered. */
void
obix_count_attempt(const ObixConsumer *consumer, ObixConsumerState *state,
				   int64 sequence)
{
	TimestampTz now = GetCurrentTimestamp();
	double		delay;

	if (state->attempt_sequence != sequence)
		state->attempts = 0;
	state->attempt_sequence = sequence;
	if (state->attempts < PG_INT32_MAX)
		state->attempts++;

	/*
	 * Somewhere in the upper half of the delay, so that consumers which
	 * failed together do not try again together.
	 */
	delay = consumer->backoff * pow(2, Min(state->attempts - 1, 64));
	delay = Min(delay, consumer->max_backoff);
	delay *= 0.5 + 0.5 * pg_prng_double(&pg_global_prng_state);
	state->attempted_at = now;
	state->retry_at = TimestampTzPlusMilliseconds(now, (int64) Max(delay, 1));
}

/*
 * May the next event be tried?  Where the clock was moved back behind the last
 * attempt, there is no telling how long to wait, and it may; that sets a new
 * time.
 */
bool
obix_may_try(const ObixConsumerState *state, TimestampTz now)
{
	return state->attempts == 0 || now >= state->retry_at ||
		now < state->attempted_at;
}

/* Put the event with a sequence into a slot, wherever it is to come from. */
static bool
load_event(ObixDelivery *delivery, int64 sequence, TupleTableSlot *slot)
{
	ObixReader *reader = &delivery->reader;
	ObixLeaf	leaf;
	Relation	rel;
	ObixScan	scan;
	int64		found;
	bool		exists;

	if (load_dead_letter(delivery->consumer->id, sequence, slot))
		return true;
	obix_find_leaf(reader->parent, sequence, &leaf);
	if (!OidIsValid(leaf.relid))
		return false;
	rel = table_open(leaf.relid, AccessShareLock);
	obix_begin_scan(&scan, rel, reader->snapshot, sequence, sequence + 1,
					ForwardScanDirection);
	exists = obix_next_row(&scan, &found);
	if (exists)
	{
		ExecClearTuple(slot);
		slot_getsomeattrs(scan.slot, Natts_event);
		for (int i = 0; i < Natts_event; i++)
		{
			Form_pg_attribute column = TupleDescAttr(slot->tts_tupleDescriptor, i);
			Datum		value = scan.slot->tts_values[i];

			slot->tts_isnull[i] = scan.slot->tts_isnull[i];
			if (slot->tts_isnull[i])
				continue;
			slot->tts_values[i] = column->attlen == -1 ?
				PointerGetDatum(PG_DETOAST_DATUM_COPY(value)) :
				datumCopy(value, column->attbyval, column->attlen);
		}
		ExecStoreVirtualTuple(slot);
	}
	obix_end_scan(&scan);
	table_close(rel, AccessShareLock);
	return exists;
}

static void
report_not_delivered(ObixDelivery *delivery, int64 sequence)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("event %lld is not being delivered to consumer \"%s\"",
					(long long) sequence, delivery->consumer->name),
			 errdetail("It has been acknowledged, or is not for this consumer."),
			 errhint("Report failures of events that were fetched and not acknowledged.")));
}

/* Is a sequence behind the cursor still to be acknowledged? */
static bool
is_late(ObixDelivery *delivery, int64 sequence)
{
	Datum		values[] = {
		Int32GetDatum(delivery->consumer->id), Int64GetDatum(sequence)
	};

	return obix_run("SELECT FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND $2 OPERATOR(pg_catalog.>=) from_sequence"
					" AND $2 OPERATOR(pg_catalog.<=) to_sequence",
					2, id_sequence_types, values, NULL) > 0;
}

/* Take one event out of what is late. */
static void
remove_late(ObixDelivery *delivery, int64 sequence)
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
					2, id_sequence_types, values, NULL);
	delivery->state->late = has_late(delivery);
}

/*
 * An attempt at an event, which has been counted, has failed: wait for the
 * next, or give up as the consumer says.
 */
ObixVerdict
obix_fail_event(ObixDelivery *delivery, int64 sequence, const char *error)
{
	const ObixConsumer *consumer = delivery->consumer;
	ObixConsumerState *state = delivery->state;
	ObixVerdict verdict = OBIX_RETRY;
	ObixFound	nothing = {0};
	ObixIdentity saved;
	TupleTableSlot *slot;

	state->failed++;
	obix_set_last_error(state, error);
	if (consumer->max_attempts != 0 && state->attempts >= consumer->max_attempts)
		verdict = consumer->dead_letter ? OBIX_DEAD_LETTER : OBIX_STOP;
	if (verdict == OBIX_STOP)
		state->state = OBIX_CONSUMER_STOPPED;
	else if (verdict == OBIX_DEAD_LETTER)
	{
		slot = MakeSingleTupleTableSlot(obix_event_desc(), &TTSOpsVirtual);
		if (!load_event(delivery, sequence, slot))
			report_not_delivered(delivery, sequence);
		park_event(delivery, slot, state->attempts, error);
		ExecDropSingleTupleTableSlot(slot);
		if (state->late)
		{
			obix_begin_spi(&saved);
			remove_late(delivery, sequence);
			obix_end_spi(&saved);
		}
		state->dead_lettered++;
		state->parked = true;
		state->attempts = 0;

		/* it was the next, so nothing is left before it */
		if (sequence > obix_delivery_start(state))
			state->scanned = sequence;
		if (consumer->available)
		{
			obix_begin_spi(&saved);
			state->late = has_late(delivery);
			obix_end_spi(&saved);
		}
		obix_turn_set_found(consumer->id, &nothing);
	}
	obix_set_state(state);
	return verdict;
}

/*
 * Error out unless an event has been handed out, and none that was handed out
 * before it is unacknowledged: a failure is reported of the next event.
 */
void
obix_check_handed_out(ObixDelivery *delivery, int64 sequence)
{
	ObixConsumerState *state = delivery->state;
	ObixReader *reader = &delivery->reader;
	TupleTableSlot *slot = MakeSingleTupleTableSlot(obix_event_desc(),
													&TTSOpsVirtual);
	bool		handed_out = false;

	if (sequence <= obix_delivery_start(state))
	{
		ObixIdentity saved;

		if (state->late)
		{
			obix_begin_spi(&saved);
			handed_out = is_late(delivery, sequence);
			obix_end_spi(&saved);
			handed_out = handed_out && load_event(delivery, sequence, slot);
		}
	}
	else
	{
		TimestampTz last_at;
		bool		unsure = delivery->unsure;

		delivery->unsure = true;	/* count, whatever is remembered */
		(void) count_ahead(delivery, sequence, &last_at);
		delivery->unsure = unsure;
		handed_out = reader->events > 0 && reader->last == sequence;
		if (handed_out && reader->events > 1)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("event %lld is not the next of consumer \"%s\"",
							(long long) sequence, delivery->consumer->name),
					 errdetail("Event %lld before it has not been acknowledged.",
							   (long long) reader->first),
					 errhint("Acknowledge what has been dealt with first.")));
	}
	ExecDropSingleTupleTableSlot(slot);
	if (!handed_out)
		report_not_delivered(delivery, sequence);
}

/*
 * Dead letters
 */

/* Let go what is held behind a dead letter, unless there is another of its key. */
static void
release_followers(const ObixConsumer *consumer, ObixConsumerState *state,
				  int64 sequence)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID};
	Datum		values[] = {
		Int32GetDatum(consumer->id), Int64GetDatum(sequence),
		Int64GetDatum(obix_delivery_start(state))
	};

	/* those ahead will be met anyway; those behind are late now */
	(void) obix_run("WITH followers AS (SELECT f.sequence FROM obix.parked_event f"
					" WHERE f.id OPERATOR(pg_catalog.=) $1"
					" AND f.state OPERATOR(pg_catalog.=) 'held'"
					" AND f.key OPERATOR(pg_catalog.=)"
					" (SELECT p.key FROM obix.parked_event p"
					" WHERE p.id OPERATOR(pg_catalog.=) $1"
					" AND p.sequence OPERATOR(pg_catalog.=) $2)"
					" AND f.sequence OPERATOR(pg_catalog.>) $2"
					" AND NOT EXISTS (SELECT FROM obix.parked_event o"
					" WHERE o.id OPERATOR(pg_catalog.=) $1"
					" AND o.key OPERATOR(pg_catalog.=) f.key"
					" AND o.state OPERATOR(pg_catalog.=) 'failed'"
					" AND o.sequence OPERATOR(pg_catalog.<>) $2)),"
					" late AS (INSERT INTO obix.consumer_late (id, from_sequence, to_sequence, requeued)"
					" SELECT $1, sequence, sequence, true FROM followers"
					" WHERE sequence OPERATOR(pg_catalog.<=) $3),"
					" requeued AS (UPDATE obix.parked_event SET state = 'requeued', attempts = 0"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND sequence OPERATOR(pg_catalog.=) ANY (SELECT sequence FROM followers)"
					" AND sequence OPERATOR(pg_catalog.<=) $3)"
					" DELETE FROM obix.parked_event"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND sequence OPERATOR(pg_catalog.=) ANY (SELECT sequence FROM followers)"
					" AND sequence OPERATOR(pg_catalog.>) $3",
					3, types, values, NULL);
}

/* Are there rows of a consumer in obix.parked_event? */
bool
obix_has_dead_letters(int32 id)
{
	Datum		value = Int32GetDatum(id);

	return obix_run("SELECT FROM obix.parked_event"
					" WHERE id OPERATOR(pg_catalog.=) $1 LIMIT 1",
					1, id_sequence_types, &value, NULL) > 0;
}

/* Is a dead letter there, and in which state? */
static char *
dead_letter_state(int32 id, int64 sequence)
{
	Datum		values[] = {Int32GetDatum(id), Int64GetDatum(sequence)};
	bool		isnull;

	if (obix_run("SELECT state FROM obix.parked_event"
				 " WHERE id OPERATOR(pg_catalog.=) $1"
				 " AND sequence OPERATOR(pg_catalog.=) $2"
				 " AND state OPERATOR(pg_catalog.<>) 'discarded'",
				 2, id_sequence_types, values, NULL) == 0)
		return NULL;
	return TextDatumGetCString(spi_value(0, 1, &isnull));
}

/*
 * Deliver a dead letter again, or delete it; what is held behind it follows.
 * Returns the state that it was in, NULL if there is none.  One that is held
 * can only be deleted.  Under the mutex of the consumer.
 */
const char *
obix_release_dead_letter(const ObixConsumer *consumer, ObixConsumerState *state,
						 int64 sequence, bool requeue)
{
	MemoryContext context = CurrentMemoryContext;
	int64		start = obix_delivery_start(state);
	Datum		values[] = {Int32GetDatum(consumer->id), Int64GetDatum(sequence)};
	ObixIdentity saved;
	char	   *was;

	obix_begin_spi(&saved);
	was = dead_letter_state(consumer->id, sequence);
	if (was != NULL)
		was = MemoryContextStrdup(context, was);
	if (was != NULL && !(requeue && strcmp(was, "failed") != 0))
	{
		if (strcmp(was, "failed") == 0)
			release_followers(consumer, state, sequence);
		if (requeue)
		{
			ObixLateRange range = {.from = sequence,.to = sequence,.requeued = true};

			(void) obix_run("UPDATE obix.parked_event SET state = 'requeued', attempts = 0"
							" WHERE id OPERATOR(pg_catalog.=) $1"
							" AND sequence OPERATOR(pg_catalog.=) $2",
							2, id_sequence_types, values, NULL);
			insert_ranges(consumer->id, list_make1(&range));
		}
		else
		{
			/* one that lies ahead has to be known until it is passed */
			set_dead_letter_state(consumer->id, sequence, "discarded");
			delete_ranges(consumer->id, sequence, sequence);
		}
		values[1] = Int64GetDatum(start);
		(void) obix_run("DELETE FROM obix.parked_event"
						" WHERE id OPERATOR(pg_catalog.=) $1"
						" AND state OPERATOR(pg_catalog.=) 'discarded'"
						" AND sequence OPERATOR(pg_catalog.<=) $2",
						2, id_sequence_types, values, NULL);

		obix_grow_version(consumer->id);
		if (state->attempt_sequence == sequence)
			state->attempts = 0;
		state->late = true;
		state->parked = obix_has_dead_letters(consumer->id);
		obix_set_state(state);
	}
	obix_end_spi(&saved);
	return was;
}
