/*-------------------------------------------------------------------------
 *
 * delivery.c
 *	  What comes next for a consumer, and what becomes of it.
 *
 * Everything at or below the start of a consumer, the higher of its cursor and
 * of what was scanned for it, has been dealt with, but for late ranges (late.c)
 * and dead letters (parked.c).
 *
 * What is late is delivered before what lies ahead, and by itself, so that an
 * acknowledgement means either the one or the other.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "bounds.h"
#include "delivery.h"
#include "late.h"
#include "parked.h"
#include "turn.h"

/* Where looking for what lies ahead begins, less one. */
int64
obix_delivery_start(const ObixConsumerState *state)
{
	return Max(state->position, state->scanned);
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
	if (obix_is_parked(delivery, sequence))
		return false;

	if (delivery->nheld > 0 && !delivery->counting)
	{
		value = slot_getattr(slot, Anum_event_key, &isnull);
		if (!isnull && obix_is_held(delivery, TextDatumGetCString(value), sequence))
		{
			obix_park_event(delivery, slot, 0, NULL);
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
	reader->snapshot = obix_reading_snapshot();
}

/* Locks are kept, as far as they are not released by the caller. */
void
obix_end_delivery(ObixDelivery *delivery)
{
	UnregisterSnapshot(delivery->reader.snapshot);
	table_close(delivery->reader.parent, AccessShareLock);
}

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

	reader->expected = 1 + (delivery->unsure ? start :
							obix_turn_nothing_to(delivery->consumer->id,
												 delivery->consumer->version,
												 start));
	reader->to = reader->expected + OBIX_SCAN_LIMIT;
	obix_read_on(reader);
	delivery->more = reader->events == 0 && reader->expected > reader->to;
	remember_found(delivery, start);

	nothing_to = reader->events > 0 ? reader->first - 1 : reader->expected - 1;
	if (nothing_to - start >= OBIX_SCAN_STEP)
		state->scanned = nothing_to;

	/*
	 * What was parked is not certain before this transaction commits; that
	 * the state was changed by it tells those who look next.
	 */
	if (nothing_to - start >= OBIX_SCAN_STEP || delivery->has_parked ||
		state->fetched < 0)
	{
		obix_forget_discarded(delivery->consumer->id, state, start);
		state->fetched = 0;
		obix_set_state(state);
	}
}

/*
 * Deliver the next events.  Writes to the tables of the consumer what has to
 * be known later; nothing if there is nothing to deliver, but now and then how
 * far was looked.
 */
void
obix_deliver_next(ObixDelivery *delivery)
{
	obix_read_dead_letters(delivery);
	if (delivery->again != 0)
		obix_deliver_again(delivery);
	if (delivery->state->late && delivery->reader.events == 0)
		obix_deliver_late(delivery);
	if (delivery->reader.events > 0)
		return;
	if (delivery->consumer->available)
		obix_deliver_available(delivery);
	else
		deliver_in_sequence(delivery);
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
	if (state->fetched < 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("event %lld may not be what consumer \"%s\" is to have next",
						(long long) sequence, delivery->consumer->name),
				 errdetail("A dead letter was let go after the last fetch, and events that it had held back come before."),
				 errhint("Fetch again.")));

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
	obix_read_dead_letters(delivery);
	if (delivery->consumer->available)
	{
		obix_count_available(delivery, sequence);
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
			obix_acknowledge_late(delivery, sequence);
		return;
	}

	state->delivered += count_ahead(delivery, sequence, &last_at);
	if (last_at != 0)
		state->last_event_at = last_at;
	state->position = sequence;
	obix_settle_attempts(state, sequence);
	if (delivery->consumer->available && state->fetched > 0)
	{
		ObixIdentity saved;

		obix_begin_spi(&saved);
		if (obix_cut_range(delivery, start, sequence))
			state->fetched = sequence;
		state->late = obix_has_late(delivery);
		obix_end_spi(&saved);
	}
	obix_forget_discarded(delivery->consumer->id, state, start);
	obix_set_state(state);
}

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

	if (obix_load_dead_letter(delivery->consumer->id, sequence, slot))
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
		slot_getsomeattrs(scan.slot, Natts_event);
		obix_store_event(slot, scan.slot->tts_values, scan.slot->tts_isnull);
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
	int64		start;

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
		obix_park_event(delivery, slot, state->attempts, error);
		ExecDropSingleTupleTableSlot(slot);
		if (state->late)
		{
			obix_begin_spi(&saved);
			obix_remove_late(delivery, sequence);
			obix_end_spi(&saved);
		}
		state->dead_lettered++;
		state->parked = true;
		state->attempts = 0;

		/* it was the next, so nothing is left before it */
		start = obix_delivery_start(state);
		if (sequence > start)
			state->scanned = sequence;
		obix_forget_discarded(consumer->id, state, start);
		if (consumer->available)
		{
			obix_begin_spi(&saved);
			state->late = obix_has_late(delivery);
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
			const char *was;
			bool		requeued;

			obix_begin_spi(&saved);
			was = obix_dead_letter_state(delivery->consumer->id, sequence);
			requeued = was != NULL && strcmp(was, "requeued") == 0;
			handed_out = obix_is_late(delivery, sequence);
			obix_end_spi(&saved);
			delivery->counting = true;
			handed_out = handed_out && load_event(delivery, sequence, slot) &&
				(requeued || is_wanted(delivery, slot));
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
 * Let go what is held behind a dead letter, unless there is another of its key
 * in between.  Returns how many of those lie ahead: what was fetched of what
 * lies behind them cannot be acknowledged.
 */
static uint64
release_followers(const ObixConsumer *consumer, ObixConsumerState *state,
				  int64 sequence)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID};
	Datum		values[] = {
		Int32GetDatum(consumer->id), Int64GetDatum(sequence),
		Int64GetDatum(obix_delivery_start(state))
	};

	/* those ahead will be met anyway; those behind are late now */
	return obix_run("WITH followers AS (SELECT f.sequence FROM obix.parked_event f"
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
					" AND o.sequence OPERATOR(pg_catalog.<>) $2"
					" AND o.sequence OPERATOR(pg_catalog.<) f.sequence)),"
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
	was = obix_dead_letter_state(consumer->id, sequence);
	if (was != NULL)
		was = MemoryContextStrdup(context, was);
	if (was != NULL && !(requeue && strcmp(was, "failed") != 0))
	{
		if (release_followers(consumer, state, sequence) > 0)
			state->fetched = -1;
		if (requeue)
		{
			(void) obix_run("UPDATE obix.parked_event SET state = 'requeued', attempts = 0"
							" WHERE id OPERATOR(pg_catalog.=) $1"
							" AND sequence OPERATOR(pg_catalog.=) $2",
							2, obix_id_sequence_types, values, NULL);
			obix_add_requeued(consumer->id, sequence);
		}
		else
		{
			/* one that lies ahead has to be known until it is passed */
			obix_set_dead_letter_state(consumer->id, sequence, "discarded");
			obix_delete_ranges(consumer->id, sequence, sequence);
		}
		values[1] = Int64GetDatum(start);
		(void) obix_run("DELETE FROM obix.parked_event"
						" WHERE id OPERATOR(pg_catalog.=) $1"
						" AND state OPERATOR(pg_catalog.=) 'discarded'"
						" AND sequence OPERATOR(pg_catalog.<=) $2",
						2, obix_id_sequence_types, values, NULL);

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
