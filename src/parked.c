/*-------------------------------------------------------------------------
 *
 * parked.c
 *	  Events that were given up, or are held back: the table obix.parked_event.
 *
 * A row is a copy of its event, since the outbox may not keep that for as long.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "parked.h"

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
	return strcmp(((const ObixHeldKey *) a)->key, ((const ObixHeldKey *) b)->key);
}

/*
 * Read which dead letters lie ahead, and which keys are held back; the latter
 * only to deliver.
 */
void
obix_read_dead_letters(ObixDelivery *delivery)
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
					2, obix_id_sequence_types, values, NULL);
	delivery->nparked = (int) SPI_processed;
	delivery->parked = MemoryContextAllocHuge(context,
											  (SPI_processed + 1) * sizeof(int64));
	for (uint64 i = 0; i < SPI_processed; i++)
		delivery->parked[i] = DatumGetInt64(obix_spi_value(i, 1, &isnull));

	if (delivery->consumer->hold_key && !delivery->counting)
	{
		(void) obix_run("SELECT key, pg_catalog.min(sequence) FROM obix.parked_event"
						" WHERE id OPERATOR(pg_catalog.=) $1"
						" AND state OPERATOR(pg_catalog.=) ANY (ARRAY['failed', 'held'])"
						" AND key IS NOT NULL GROUP BY key",
						1, obix_id_sequence_types, values, NULL);
		delivery->nheld = (int) SPI_processed;
		delivery->held = MemoryContextAllocHuge(context,
												(SPI_processed + 1) * sizeof(ObixHeldKey));
		for (uint64 i = 0; i < SPI_processed; i++)
		{
			delivery->held[i].key =
				MemoryContextStrdup(context,
									TextDatumGetCString(obix_spi_value(i, 1, &isnull)));
			delivery->held[i].sequence =
				DatumGetInt64(obix_spi_value(i, 2, &isnull));
		}
		qsort(delivery->held, delivery->nheld, sizeof(ObixHeldKey), compare_keys);
	}
	obix_end_spi(&saved);
}

/* Is an event that lies ahead a dead letter? */
bool
obix_is_parked(const ObixDelivery *delivery, int64 sequence)
{
	return delivery->nparked > 0 &&
		bsearch(&sequence, delivery->parked, delivery->nparked, sizeof(int64),
				compare_sequences) != NULL;
}

/* Is an event one behind a dead letter of its key? */
bool
obix_is_held(const ObixDelivery *delivery, const char *key, int64 sequence)
{
	ObixHeldKey wanted = {.key = unconstify(char *, key)};
	ObixHeldKey *found;

	if (delivery->nheld == 0)
		return false;
	found = bsearch(&wanted, delivery->held, delivery->nheld, sizeof(ObixHeldKey),
					compare_keys);
	return found != NULL && found->sequence < sequence;
}

/*
 * Put an event into obix.dead_letter: error NULL means that it is held behind
 * another.  slot has its columns.
 */
void
obix_park_event(const ObixDelivery *delivery, TupleTableSlot *slot, int32 attempts,
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

/* Put the event of a dead letter into a slot; false if there is none. */
bool
obix_load_dead_letter(int32 id, int64 sequence, TupleTableSlot *slot)
{
	MemoryContext context = CurrentMemoryContext;
	Datum		values[] = {Int32GetDatum(id), Int64GetDatum(sequence)};
	ObixIdentity saved;
	bool		found;

	obix_begin_spi(&saved);
	found = obix_run("SELECT sequence, event_id, type, key, payload, headers, recorded_at"
					 " FROM obix.parked_event"
					 " WHERE id OPERATOR(pg_catalog.=) $1"
					 " AND sequence OPERATOR(pg_catalog.=) $2",
					 2, obix_id_sequence_types, values, NULL) > 0;
	if (found)
	{
		Datum		event[Natts_event];
		bool		isnull[Natts_event];
		MemoryContext old;

		for (int i = 0; i < Natts_event; i++)
			event[i] = obix_spi_value(0, i + 1, &isnull[i]);
		old = MemoryContextSwitchTo(context);
		obix_store_event(slot, event, isnull);
		MemoryContextSwitchTo(old);
	}
	obix_end_spi(&saved);
	return found;
}

/* Change the state of a dead letter. */
void
obix_set_dead_letter_state(int32 id, int64 sequence, const char *state)
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

/* Is a dead letter there, and in which state? */
char *
obix_dead_letter_state(int32 id, int64 sequence)
{
	Datum		values[] = {Int32GetDatum(id), Int64GetDatum(sequence)};
	bool		isnull;

	if (obix_run("SELECT state FROM obix.parked_event"
				 " WHERE id OPERATOR(pg_catalog.=) $1"
				 " AND sequence OPERATOR(pg_catalog.=) $2"
				 " AND state OPERATOR(pg_catalog.<>) 'discarded'",
				 2, obix_id_sequence_types, values, NULL) == 0)
		return NULL;
	return TextDatumGetCString(obix_spi_value(0, 1, &isnull));
}

/*
 * A consumer goes on from start: forget what was discarded ahead of that, and is
 * passed now.  The caller writes the state.
 */
void
obix_forget_discarded(int32 id, ObixConsumerState *state, int64 start)
{
	static const Oid types[] = {INT4OID, INT8OID, INT8OID};
	Datum		values[] = {
		Int32GetDatum(id), Int64GetDatum(start),
		Int64GetDatum(obix_delivery_start(state))
	};
	ObixIdentity saved;

	if (!state->parked || obix_delivery_start(state) == start)
		return;
	obix_begin_spi(&saved);
	if (obix_run("DELETE FROM obix.parked_event"
				 " WHERE id OPERATOR(pg_catalog.=) $1"
				 " AND sequence OPERATOR(pg_catalog.>) $2"
				 " AND sequence OPERATOR(pg_catalog.<=) $3"
				 " AND state OPERATOR(pg_catalog.=) 'discarded'",
				 lengthof(types), types, values, NULL) > 0)
		state->parked = obix_has_dead_letters(id);
	obix_end_spi(&saved);
}

/* Are there rows of a consumer in obix.parked_event? */
bool
obix_has_dead_letters(int32 id)
{
	Datum		value = Int32GetDatum(id);

	return obix_run("SELECT FROM obix.parked_event"
					" WHERE id OPERATOR(pg_catalog.=) $1 LIMIT 1",
					1, obix_id_sequence_types, &value, NULL) > 0;
}

/* How many dead letters of a consumer wait for somebody, counted up to max. */
int64
obix_count_dead_letters(int32 id, int64 max)
{
	Datum		values[] = {Int32GetDatum(id), Int64GetDatum(max)};
	ObixIdentity saved;
	int64		count;

	obix_begin_spi(&saved);
	count = (int64) obix_run("SELECT FROM obix.parked_event"
							 " WHERE id OPERATOR(pg_catalog.=) $1"
							 " AND state OPERATOR(pg_catalog.=) ANY ('{failed,held}')"
							 " LIMIT $2",
							 2, obix_id_sequence_types, values, NULL);
	obix_end_spi(&saved);
	return count;
}
