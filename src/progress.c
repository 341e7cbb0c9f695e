/*-------------------------------------------------------------------------
 *
 * progress.c
 *	  How far long operations are.
 *
 * PostgreSQL has such views for commands of its own, and no extension can add
 * one.  So each backend has a place in the shared memory of obix where it says
 * what it is at, and who calls an operation by hand is told once a second.
 * Nothing but the view depends on it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "outbox.h"
#include "progress.h"

/* Between messages to who has called an operation */
#define TELL_MS			1000

PG_FUNCTION_INFO_V1(obix_operations);

/*
 * What a backend is at.  Written by that backend alone, under progress_lock but
 * for done.
 */
typedef struct ObixProgress
{
	int			pid;
	Oid			database;
	Oid			relation;		/* the outbox */
	ObixOperation operation;
	ObixPhase	phase;
	int64		total;			/* in this phase, 0: there is nothing to count */
	TimestampTz started_at;
	pg_atomic_uint64 done;
} ObixProgress;

/* What users call it, and what it counts */
static const char *const operations[OBIX_OPERATIONS][2] = {
	[OBIX_OPERATION_RECOVERY] = {"recovery", "rows moved"},
	[OBIX_OPERATION_FILL] = {"filling", "sequences looked at"},
	[OBIX_OPERATION_IMPORT] = {"import", "sequences imported"},
};

static const char *const phases[OBIX_PHASES] = {
	[OBIX_PHASE_LOCKING] = "waiting for locks",
	[OBIX_PHASE_MOVING] = "moving rows",
	[OBIX_PHASE_ATTACHING] = "attaching partitions",
	[OBIX_PHASE_WALKING] = "looking for holes",
	[OBIX_PHASE_COPYING] = "copying rows",
};

static ObixProgress *places = NULL; /* by MyProcNumber */
static ObixProgress *mine = NULL;	/* NULL: nothing is going on */
static TimestampTz told_at;		/* when the caller was told, 0: never do */

Size
obix_progress_shmem_size(void)
{
	return mul_size(MaxBackends, sizeof(ObixProgress));
}

void
obix_progress_shmem_init(void *space)
{
	places = space;
}

/*
 * An operation on an outbox begins.  It ends with the transaction, if not
 * before.  by_hand: tell the caller how far it is.
 */
void
obix_progress_begin(ObixOperation operation, Oid relation, bool by_hand)
{
	TimestampTz now = GetCurrentTimestamp();

	mine = &places[MyProcNumber];
	told_at = by_hand ? now : 0;
	LWLockAcquire(obix_shared->progress_lock, LW_EXCLUSIVE);
	mine->pid = MyProcPid;
	mine->database = MyDatabaseId;
	mine->relation = relation;
	mine->operation = operation;
	mine->phase = OBIX_PHASE_LOCKING;
	mine->total = 0;
	mine->started_at = now;
	pg_atomic_init_u64(&mine->done, 0);
	LWLockRelease(obix_shared->progress_lock);
}

/* It has begun earlier, in another transaction. */
void
obix_progress_since(TimestampTz started_at)
{
	LWLockAcquire(obix_shared->progress_lock, LW_EXCLUSIVE);
	mine->started_at = started_at;
	LWLockRelease(obix_shared->progress_lock);
}

/* It enters a phase in which so much is to be done. */
void
obix_progress_phase(ObixPhase phase, int64 total)
{
	if (mine == NULL)
		return;
	LWLockAcquire(obix_shared->progress_lock, LW_EXCLUSIVE);
	mine->phase = phase;
	mine->total = total;
	pg_atomic_write_u64(&mine->done, 0);
	LWLockRelease(obix_shared->progress_lock);
}

/* So much of it has been done. */
void
obix_progress_done(int64 done)
{
	TimestampTz now;
	char	   *name;

	if (mine == NULL)
		return;
	pg_atomic_write_u64(&mine->done, done);
	if (told_at == 0)
		return;
	now = GetCurrentTimestamp();
	if (!TimestampDifferenceExceeds(told_at, now, TELL_MS))
		return;
	told_at = now;
	name = get_rel_name(mine->relation);
	ereport(NOTICE,
			(errmsg("%s of outbox \"%s\": %lld of %lld %s",
					operations[mine->operation][0], name ? name : "?",
					(long long) done, (long long) mine->total,
					operations[mine->operation][1])));
}

/* It has ended; also called at the end of every transaction.  Raises nothing. */
void
obix_progress_end(void)
{
	if (likely(mine == NULL))
		return;
	LWLockAcquire(obix_shared->progress_lock, LW_EXCLUSIVE);
	mine->operation = OBIX_OPERATION_NONE;
	LWLockRelease(obix_shared->progress_lock);
	mine = NULL;
}

/*
 * obix.operations()
 *
 * Tells how far they are and on which outboxes, to everybody, as PostgreSQL's
 * views of progress do.
 */
Datum
obix_operations(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; places != NULL && i < MaxBackends; i++)
	{
		ObixProgress *place = &places[i];
		Datum		values[7];
		bool		isnull[7] = {false};
		bool		ours;

		if (place->operation == OBIX_OPERATION_NONE)
			continue;
		LWLockAcquire(obix_shared->progress_lock, LW_SHARED);
		ours = place->operation != OBIX_OPERATION_NONE &&
			place->database == MyDatabaseId;
		values[0] = Int32GetDatum(place->pid);
		values[1] = ObjectIdGetDatum(place->relation);
		values[2] = PointerGetDatum(operations[place->operation][0]);
		values[3] = PointerGetDatum(phases[place->phase]);
		values[4] = Int64GetDatum((int64) pg_atomic_read_u64(&place->done));
		values[5] = Int64GetDatum(place->total);
		values[6] = TimestampTzGetDatum(place->started_at);
		LWLockRelease(obix_shared->progress_lock);
		if (!ours)
			continue;
		values[2] = CStringGetTextDatum(DatumGetPointer(values[2]));
		values[3] = CStringGetTextDatum(DatumGetPointer(values[3]));
		tuplestore_putvalues(result->setResult, result->setDesc, values, isnull);
	}
	return (Datum) 0;
}
