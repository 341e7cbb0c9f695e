/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  The launcher: starts a worker in each database that has work.
 *
 * It is connected to no database, so it never keeps one from being dropped,
 * and starts once recovery has finished: at start-up and after promotion alike
 * it has every database visited once, since shared memory knows of no outbox
 * yet.  After that it starts workers for what is asked for in shared memory,
 * and otherwise sleeps.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/procsignal.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "obix.h"
#include "outbox.h"
#include "turn.h"
#include "work.h"
#include "worker.h"

/* Visits at the same time: the rest is for databases that ask */
#define MAX_VISITS			2

/* After a worker could not be started, or failed: first and longest delay */
#define MIN_DELAY_MS		1000
#define MAX_DELAY_MS		60000

/* A database whose workers fail */
typedef struct ObixUnwell
{
	Oid			database;		/* InvalidOid: free */
	int			failures;
	TimestampTz retry_at;
} ObixUnwell;

/* What the launcher knows of the worker in each place */
typedef struct ObixStarted
{
	BackgroundWorkerHandle *handle; /* NULL: not ours, or free */
	Oid			database;
} ObixStarted;

static ObixStarted started[OBIX_MAX_WORKERS];
static ObixUnwell *unwell;		/* array of obix_max_outboxes */
static List *visits = NIL;		/* databases still to be visited */
static TimestampTz no_worker_until = 0; /* when all worker slots were taken */
static TimestampTz no_worker_logged = 0;	/* when the log was told */

static ObixUnwell *
find_unwell(Oid database, bool add)
{
	ObixUnwell *free = NULL;

	for (int i = 0; i < obix_max_outboxes; i++)
	{
		if (unwell[i].database == database)
			return &unwell[i];
		if (free == NULL && !OidIsValid(unwell[i].database))
			free = &unwell[i];
	}
	if (!add || free == NULL)
		return NULL;
	free->database = database;
	free->failures = 0;
	return free;
}

/* List the databases that can be connected to and are no templates. */
static void
list_visits(void)
{
	Relation	catalog;
	TableScanDesc scan;
	HeapTuple	tuple;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	catalog = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(catalog, 0, NULL);
	while (HeapTupleIsValid(tuple = heap_getnext(scan, ForwardScanDirection)))
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);
		MemoryContext old;

		if (!form->datallowconn || form->datistemplate ||
			form->datconnlimit < -1)	/* -2: DROP DATABASE was interrupted */
			continue;
		old = MemoryContextSwitchTo(TopMemoryContext);
		visits = lappend_oid(visits, form->oid);
		MemoryContextSwitchTo(old);
	}
	table_endscan(scan);
	table_close(catalog, AccessShareLock);
	CommitTransactionCommand();
}

/*
 * Start a worker in a database.  Returns false if it has one already, or none
 * can be had now.
 */
static bool
start_worker(Oid database, ObixWorkerKind kind, TimestampTz now)
{
	bool		dispatch = kind == OBIX_WORKER_DISPATCH;
	BackgroundWorker worker = {0};
	ObixUnwell *sick = find_unwell(database, false);
	int			place;
	bool		entered;

	if (now < no_worker_until || (sick != NULL && now < sick->retry_at))
		return false;
	place = obix_reserve_worker(database, kind);
	if (place < 0)
		return false;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_main_arg = Int32GetDatum(place);
	memcpy(worker.bgw_extra, &database, sizeof(database));
	worker.bgw_notify_pid = MyProcPid;
	strlcpy(worker.bgw_library_name, "obix", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name,
			dispatch ? "obix_dispatcher_main" : "obix_worker_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, dispatch ? "obix dispatcher" : "obix worker",
			BGW_MAXLEN);
	strlcpy(worker.bgw_type, worker.bgw_name, BGW_MAXLEN);

	/* the handle must outlive any transaction */
	MemoryContextSwitchTo(TopMemoryContext);
	if (!RegisterDynamicBackgroundWorker(&worker, &started[place].handle))
	{
		(void) obix_free_worker(place, &entered);
		started[place].handle = NULL;
		if (no_worker_logged == 0 ||
			TimestampDifferenceExceeds(no_worker_logged, now, MAX_DELAY_MS))
		{
			no_worker_logged = now;
			ereport(LOG,
					(errmsg("obix could not start a worker"),
					 errdetail("All background worker slots are in use."),
					 errhint("Consider raising max_worker_processes.")));
		}
		no_worker_until = TimestampTzPlusMilliseconds(now, MIN_DELAY_MS);
		return false;
	}
	no_worker_until = 0;
	started[place].database = database;
	return true;
}

/* Free the places of workers that have stopped. */
static void
reap_workers(TimestampTz now)
{
	for (int i = 0; i < OBIX_MAX_WORKERS; i++)
	{
		ObixUnwell *sick;
		pid_t		pid;
		Oid			database = started[i].database;
		bool		entered;
		MemoryContext old;

		if (started[i].handle == NULL)
		{
			/* started by an earlier launcher, if by any */
			if (OidIsValid(obix_worker_database(i)) && !obix_worker_on_duty(i))
				(void) obix_free_worker(i, &entered);
			continue;
		}
		if (GetBackgroundWorkerPid(started[i].handle, &pid) != BGWH_STOPPED)
			continue;
		pfree(started[i].handle);
		started[i].handle = NULL;
		if (obix_free_worker(i, &entered))
		{
			sick = find_unwell(database, false);
			if (sick != NULL)
				sick->database = InvalidOid;
			continue;
		}

		/*
		 * A handler may end the process that calls it.  That counts as an
		 * attempt of its consumer, and is no reason to have others wait.
		 */
		if (i >= OBIX_MAX_MAINTAINERS && entered)
			continue;

		/* it may have taken work that it has not done: look at everything */
		old = MemoryContextSwitchTo(TopMemoryContext);
		visits = list_append_unique_oid(visits, database);
		MemoryContextSwitchTo(old);
		sick = find_unwell(database, true);
		if (sick != NULL)
		{
			int			delay = MIN_DELAY_MS << Min(sick->failures, 6);

			sick->failures++;
			sick->retry_at = TimestampTzPlusMilliseconds(now,
														 Min(delay, MAX_DELAY_MS));
		}
	}
}

static int
running_workers(void)
{
	int			count = 0;

	for (int i = 0; i < OBIX_MAX_MAINTAINERS; i++)
		count += started[i].handle != NULL;
	return count;
}

/* Start workers in the databases that have yet to be visited. */
static void
start_visits(TimestampTz now)
{
	ListCell   *cell;

	foreach(cell, visits)
	{
		if (running_workers() >= MAX_VISITS)
			break;
		if (start_worker(lfirst_oid(cell), OBIX_WORKER_MAINTAIN, now))
			visits = foreach_delete_current(visits, cell);
	}
}

static void
earlier(TimestampTz *when, TimestampTz candidate)
{
	if (candidate != 0 && (*when == 0 || candidate < *when))
		*when = candidate;
}

/*
 * Start workers in the databases that have work.  Returns when to look again
 * without being woken, 0 for never.
 */
static TimestampTz
start_workers(TimestampTz now)
{
	TimestampTz wake_at = 0;

	for (int i = 0; i < obix_max_outboxes; i++)
	{
		Oid			database;
		Oid			relation;
		TimestampTz retry_at;
		ObixUnwell *sick;

		uint32		work = obix_due_work(obix_nth_outbox(i), now, &database,
										 &relation, &retry_at);

		earlier(&wake_at, retry_at);
		if (work == 0)
			continue;
		(void) start_worker(database, OBIX_WORKER_MAINTAIN, now);
		sick = find_unwell(database, false);
		if (sick != NULL && sick->retry_at > now)
			earlier(&wake_at, sick->retry_at);
		if (no_worker_until > now)
			earlier(&wake_at, no_worker_until);
	}
	if (visits != NIL)
		earlier(&wake_at, no_worker_until > now ? no_worker_until :
				TimestampTzPlusMilliseconds(now, MIN_DELAY_MS));
	return wake_at;
}

/*
 * Start dispatchers in the databases that have consumers to be served, one at a
 * time: it has the next one started if there is more than it can do.  Returns
 * when to look again without being woken, 0 for never.
 */
static TimestampTz
start_dispatchers(TimestampTz now)
{
	TimestampTz wake_at = 0;
	int			n = 0;
	Oid			database;

	if (obix_dispatch_workers == 0)
		return 0;
	while (OidIsValid(database = obix_turn_next(&n, now, &wake_at)))
	{
		ObixUnwell *sick;

		if (obix_has_idle_dispatcher(database))
			continue;
		(void) start_worker(database, OBIX_WORKER_DISPATCH, now);
		sick = find_unwell(database, false);
		if (sick != NULL && sick->retry_at > now)
			earlier(&wake_at, sick->retry_at);
		if (no_worker_until > now)
			earlier(&wake_at, no_worker_until);
	}
	return wake_at;
}

static void
forget_launcher(int code, Datum arg)
{
	obix_set_launcher(NULL);
}

void
obix_launcher_main(Datum arg)
{
	TimestampTz premake_at;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	unwell = MemoryContextAllocZero(TopMemoryContext,
									obix_max_outboxes * sizeof(ObixUnwell));
	before_shmem_exit(forget_launcher, (Datum) 0);
	obix_set_launcher(MyLatch);
	list_visits();

	premake_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
											 obix_premake_interval * INT64CONST(1000));
	for (;;)
	{
		TimestampTz now = GetCurrentTimestamp();
		TimestampTz wake_at;

		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			premake_at = now;	/* what was switched on has work to do */
		}

		reap_workers(now);
		if (now >= premake_at)
		{
			obix_request_everything(InvalidOid);
			premake_at = TimestampTzPlusMilliseconds(now,
													 obix_premake_interval * INT64CONST(1000));
		}
		start_visits(now);
		wake_at = start_workers(now);
		earlier(&wake_at, premake_at);
		earlier(&wake_at, start_dispatchers(now));

		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 TimestampDifferenceMilliseconds(GetCurrentTimestamp(),
														 wake_at),
						 obix_wait_event(OBIX_WAIT_LAUNCHER));
	}
}

void
obix_register_launcher(void)
{
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 5;
	strlcpy(worker.bgw_library_name, "obix", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "obix_launcher_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "obix launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "obix launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}
