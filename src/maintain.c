/*-------------------------------------------------------------------------
 *
 * maintain.c
 *	  Maintenance by hand: SQL functions that do what the worker does.
 *
 * A lock that is not to be had at once is given up and tried for again, a
 * little later each time, so publishers and readers wait for a call no longer
 * than for the worker.  What has been locked stays so to the end of the
 * caller's transaction, though, as for any DDL.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/syscache.h"
#include "utils/wait_event.h"

#include "compat.h"
#include "gapfill.h"
#include "maintain.h"
#include "obix.h"
#include "outbox.h"
#include "partition.h"
#include "registry.h"
#include "relation.h"
#include "xact.h"

#define MAX_TRIES			20
#define PAUSE_MS			10	/* before the second try; grows by as much */

PG_FUNCTION_INFO_V1(obix_ensure_partitions);
PG_FUNCTION_INFO_V1(obix_fill_gaps);
PG_FUNCTION_INFO_V1(obix_recover_default);

static int64
ensure_partitions(Oid relid, void *arg)
{
	int64		total = 0;
	int			made;

	while ((made = obix_premake(relid)) > 0)
	{
		total += made;
		CommandCounterIncrement();
	}
	return total;
}

static int64
fill_gaps(Oid relid, void *arg)
{
	return obix_fill(relid, true);
}

static int64
recover_default(Oid relid, void *arg)
{
	return obix_recover(relid, true);
}

/* Run a task in a subtransaction, again and again while locks are held. */
int64
obix_attempt(Oid relid, ObixTask task, void *arg)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile int64 result = 0;

	for (volatile int tries = 1;; tries++)
	{
		volatile bool busy = false;

		BeginInternalSubTransaction(NULL);
		MemoryContextSwitchTo(context);
		PG_TRY();
		{
			int			nestlevel = NewGUCNestLevel();

			result = task(relid, arg);
			AtEOXact_GUC(false, nestlevel);
			ReleaseCurrentSubTransaction();
		}
		PG_CATCH();
		{
			ErrorData  *error = obix_xact_roll_back_sub(context, owner);

			busy = obix_is_busy(error->sqlerrcode) && tries < MAX_TRIES;
			if (!busy)
				ReThrowError(error);
			FreeErrorData(error);
		}
		PG_END_TRY();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		if (!busy)
			return result;
		if (obix_no_wait)
			return 0;

		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 tries * PAUSE_MS, obix_wait_event(OBIX_WAIT_MAINTENANCE));
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

/* Run a task on one outbox. */
static int64
maintain(Oid relid, ObixTask task)
{
	ObixRelation *known;

	obix_check_owner(relid);
	table_close(obix_open(relid, AccessShareLock, &known), AccessShareLock);
	return obix_attempt(relid, task, NULL);
}

/*
 * Run a task on one outbox, or on each that the user owns.  Once one has been
 * locked, those that cannot be locked at once are passed over: somebody else is
 * at them, or the worker will be, and nobody is to wait for the one because of
 * the other.
 */
static int64
maintain_all(FunctionCallInfo fcinfo, ObixTask task)
{
	volatile int64 total = 0;
	ListCell   *cell;

	if (!PG_ARGISNULL(0))
		return maintain(PG_GETARG_OID(0), task);

	PG_TRY();
	{
		foreach(cell, obix_registry_list())
		{
			ObixRegistryRow *row = lfirst(cell);

			if (!SearchSysCacheExists1(RELOID, ObjectIdGetDatum(row->outbox)) ||
				!object_ownercheck(RelationRelationId, row->outbox, GetUserId()))
				continue;
			total += obix_attempt(row->outbox, task, NULL);
			obix_no_wait = total > 0;
		}
	}
	PG_FINALLY();
	{
		obix_no_wait = false;
	}
	PG_END_TRY();
	return total;
}

Datum
obix_ensure_partitions(PG_FUNCTION_ARGS)
{
	obix_check_writable("obix.ensure_partitions()");
	PG_RETURN_INT32((int32) maintain_all(fcinfo, ensure_partitions));
}

Datum
obix_fill_gaps(PG_FUNCTION_ARGS)
{
	obix_check_writable("obix.fill_gaps()");
	PG_RETURN_INT64(maintain_all(fcinfo, fill_gaps));
}

Datum
obix_recover_default(PG_FUNCTION_ARGS)
{
	obix_check_writable("obix.recover_default()");
	PG_RETURN_INT64(maintain(PG_GETARG_OID(0), recover_default));
}
