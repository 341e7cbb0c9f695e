/*-------------------------------------------------------------------------
 *
 * status.c
 *	  What the status views show.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/xlog.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bounds.h"
#include "compat.h"
#include "consumer.h"
#include "delivery.h"
#include "late.h"
#include "partition.h"
#include "read.h"
#include "relation.h"
#include "turn.h"
#include "work.h"

/* Give a column of the result a value */
#define SET(column, datum) \
	(values[column] = (datum), isnull[column] = false)

PG_FUNCTION_INFO_V1(obix_partitions);
PG_FUNCTION_INFO_V1(obix_outbox_state);
PG_FUNCTION_INFO_V1(obix_consumer_progress);

/*
 * obix.partitions(outbox)
 */
Datum
obix_partitions(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	ObixRelation *known;
	Relation	parent;
	ObixLeaf	leaf;
	Oid			default_leaf;
	ObixRegistryRow row;
	Datum		values[3];
	bool		isnull[3] = {false, false, false};

	InitMaterializedSRF(fcinfo, 0);
	parent = obix_try_open_to_read(PG_GETARG_OID(0), &known);
	if (parent == NULL)
	{
		/* dropped just now, locked on a standby, listed by hand, or no outbox */
		if (get_rel_name(PG_GETARG_OID(0)) != NULL &&
			!obix_registry_find(PG_GETARG_OID(0), &row))
			(void) obix_open(PG_GETARG_OID(0), AccessShareLock, &known);
		return (Datum) 0;
	}

	obix_find_leaf(parent, OBIX_NO_LOWER, &leaf);
	do
	{
		if (leaf.is_default)
			continue;
		values[0] = ObjectIdGetDatum(leaf.relid);
		values[1] = Int64GetDatum(leaf.lower);
		values[2] = Int64GetDatum(leaf.upper);
		tuplestore_putvalues(result->setResult, result->setDesc, values, isnull);
	} while (obix_next_leaf(parent, &leaf));

	default_leaf = obix_default_leaf(parent);
	if (OidIsValid(default_leaf))
	{
		values[0] = ObjectIdGetDatum(default_leaf);
		isnull[1] = isnull[2] = true;
		tuplestore_putvalues(result->setResult, result->setDesc, values, isnull);
	}
	table_close(parent, AccessShareLock);
	return (Datum) 0;
}

/*
 * obix.outbox_state(outbox)
 */
Datum
obix_outbox_state(PG_FUNCTION_ARGS)
{
	enum
	{
		HEAD, FRONTIER, HIGH_WATER_MARK, SUSPECT_FROM, UNDECIDED, IN_FLIGHT,
		OLDEST_PID, RUNWAY, STRANDED, WORKER_PID, FAILURES, RETRY_AT, LAST_ERROR,
		COLUMNS
	};
	Oid			relid = PG_GETARG_OID(0);
	ObixRelation *known;
	Relation	parent = NULL;
	ObixOutbox *shared = NULL;
	TupleDesc	desc;
	Datum		values[COLUMNS];
	bool		isnull[COLUMNS];

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	memset(isnull, true, sizeof(isnull));

	/*
	 * NULLs for who may not know, for an outbox that is being dropped, and
	 * for one that is locked on a standby
	 */
	if (obix_may_select(relid, GetUserId()))
		parent = obix_try_open_to_read(relid, &known);
	if (parent != NULL)
		shared = obix_try_attach(parent, known);

	if (parent != NULL && RecoveryInProgress())
		SET(HIGH_WATER_MARK,
			Int64GetDatum(obix_exact_high_water_mark(parent, known)));
	if (shared != NULL)
	{
		ObixPosition position;
		int64		end;
		int64		stranded;
		int			pid = obix_worker_pid(MyDatabaseId);
		ObixTrouble trouble;

		obix_get_position(shared, relid, known->id, &position);
		SET(HEAD, Int64GetDatum(position.head));
		SET(FRONTIER, Int64GetDatum(position.frontier));
		SET(HIGH_WATER_MARK, Int64GetDatum(position.high_water_mark));
		if (position.suspect_from != 0)
			SET(SUSPECT_FROM, Int64GetDatum(position.suspect_from));
		if (position.undecided != 0)
			SET(UNDECIDED, Int64GetDatum(position.undecided));
		SET(IN_FLIGHT, Int32GetDatum(position.in_flight));
		if (position.oldest_pid != 0)
			SET(OLDEST_PID, Int32GetDatum(position.oldest_pid));
		end = obix_partitions_end(parent);
		SET(RUNWAY, Int64GetDatum(Max(end - 1 - position.head, 0)));
		stranded = obix_stranded(parent);
		if (stranded >= 0)
			SET(STRANDED, Int64GetDatum(stranded));
		if (pid != 0)
			SET(WORKER_PID, Int32GetDatum(pid));
		obix_get_trouble(shared, OBIX_TROUBLE_PARTITIONS, &trouble);
		if (trouble.failures == 0)
			obix_get_trouble(shared, OBIX_TROUBLE_ROWS, &trouble);
		SET(FAILURES, Int32GetDatum(trouble.failures));
		if (trouble.failures > 0)
		{
			SET(RETRY_AT, TimestampTzGetDatum(trouble.retry_at));
			SET(LAST_ERROR, CStringGetTextDatum(trouble.last_error));
		}
	}

	if (parent != NULL)
		table_close(parent, AccessShareLock);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, isnull)));
}

/* How a consumer fares, in one word. */
static const char *
state_of(const ObixConsumer *consumer, const ObixConsumerState *state)
{
	if (consumer->paused)
		return "paused";
	switch (state->state)
	{
		case OBIX_CONSUMER_STOPPED:
			return "stopped";
		case OBIX_CONSUMER_PARKED:
			return "parked";
		default:
			return state->attempts > 0 && state->last_error != NULL ?
				"retrying" : "active";
	}
}

/* recorded_at of the first event after a position; false if there is none. */
static bool
next_recorded_at(Relation parent, int64 after, TimestampTz *recorded_at)
{
	Snapshot	snapshot = GetActiveSnapshot();
	ObixLeaf	leaf;
	Relation	rel;
	ObixScan	scan;
	int64		sequence;
	bool		found;
	bool		isnull;

	if (!obix_oldest_row(parent, snapshot, after + 1, &sequence))
		return false;
	obix_find_leaf(parent, sequence, &leaf);
	if (!obix_lock_to_read(leaf.relid))
		return false;
	rel = table_open(leaf.relid, NoLock);
	obix_begin_scan(&scan, rel, snapshot, sequence, sequence + 1,
					ForwardScanDirection);
	found = obix_next_row(&scan, &sequence);
	if (found)
		*recorded_at = DatumGetTimestampTz(slot_getattr(scan.slot,
														Anum_event_recorded_at,
														&isnull));
	obix_end_scan(&scan);
	table_close(rel, AccessShareLock);
	return found;
}

/*
 * obix.consumer_progress(id)
 */
Datum
obix_consumer_progress(PG_FUNCTION_ARGS)
{
	enum
	{
		STATE, POSITION, SCANNED, LAG_EVENTS, NEXT_RECORDED_AT, ATTEMPTS,
		ATTEMPT_SEQUENCE, RETRY_AT, LEASE_UNTIL, LATE_RANGES, DELIVERED, FAILED,
		DEAD_LETTERED, LAST_EVENT_AT, LAST_ERROR, DISPATCHER_PID,
		COLUMNS
	};
	int32		id = PG_GETARG_INT32(0);
	ObixConsumer consumer;
	ObixConsumerState state;
	ObixRelation *known;
	Relation	parent = NULL;
	TupleDesc	desc;
	Datum		values[COLUMNS];
	bool		isnull[COLUMNS];
	int			pid;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	memset(isnull, true, sizeof(isnull));

	/* NULLs for one that is being dropped, or restored */
	if (obix_get_consumer(id, &consumer) &&
		obix_find_state(id, consumer.outbox, &state))
	{
		SET(STATE, CStringGetTextDatum(state_of(&consumer, &state)));
		SET(POSITION, Int64GetDatum(state.position));
		SET(SCANNED, Int64GetDatum(state.scanned));
		SET(ATTEMPTS, Int32GetDatum(state.attempts));
		if (state.attempts > 0)
		{
			SET(ATTEMPT_SEQUENCE, Int64GetDatum(state.attempt_sequence));
			if (state.retry_at != 0)
				SET(RETRY_AT, TimestampTzGetDatum(state.retry_at));
		}
		if (state.lease_until != 0)
			SET(LEASE_UNTIL, TimestampTzGetDatum(state.lease_until));
		SET(LATE_RANGES, Int64GetDatum(state.late ? obix_count_late(&state) : 0));
		SET(DELIVERED, Int64GetDatum(state.delivered));
		SET(FAILED, Int64GetDatum(state.failed));
		SET(DEAD_LETTERED, Int64GetDatum(state.dead_lettered));
		if (state.last_event_at != 0)
			SET(LAST_EVENT_AT, TimestampTzGetDatum(state.last_event_at));
		if (state.last_error != NULL && obix_may_use(&consumer))
			SET(LAST_ERROR, CStringGetTextDatum(state.last_error));
		pid = obix_turn_pid(id);
		if (pid != 0)
			SET(DISPATCHER_PID, Int32GetDatum(pid));

		if (get_rel_name(consumer.outbox) != NULL &&
			obix_may_read(consumer.outbox, GetUserId()))
			parent = obix_try_open_to_read(consumer.outbox, &known);
	}
	if (parent != NULL)
	{
		int64		mark = obix_exact_high_water_mark(parent, known);
		int64		start = obix_delivery_start(&state);
		ObixOutbox *shared;
		TimestampTz recorded_at;

		/* what was found not to be for it does not make it late */
		start = obix_turn_nothing_to(id, consumer.version, start);

		/* what it may get does not end at the high-water mark */
		shared = obix_try_attach(parent, known);
		if (consumer.available && shared != NULL)
		{
			ObixPosition position;

			obix_get_position(shared, consumer.outbox, known->id, &position);
			mark = position.head;
		}
		/* nothing has happened since nothing was found for it */
		if (obix_turn_is_idle(id) && state.position <= mark)
			start = mark;
		if (state.position <= mark)
			SET(LAG_EVENTS, Int64GetDatum(Max(mark - start, 0)));
		if (mark > start && next_recorded_at(parent, start, &recorded_at))
			SET(NEXT_RECORDED_AT, TimestampTzGetDatum(recorded_at));
		table_close(parent, AccessShareLock);
	}

	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, isnull)));
}
