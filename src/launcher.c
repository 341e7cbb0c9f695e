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
#include "utils/syscache.h"
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

/* After a database was made or opened, until it is visited: it may go again */
#define NEW_DATABASE_MS		1000

/* That workers are short is logged when it has lasted, and not too often */
#define SHORT_MS			10000
#define LOG_SHORT_MS		600000

/* Why a database is to have a worker */
typedef enum ObixNeed
{
	NEED_NONE,
	NEED_VISIT,					/* nobody has looked at its outboxes yet */
	NEED_WORK					/* something is asked for */
} ObixNeed;

/* What the launcher knows of a database */
typedef struct ObixDatabase
{
	Oid			oid;
	bool		present;		/* in the scan of pg_database going on */
	bool		open;			/* one can connect to it */
	bool		ordinary;		/* and it is no template */
	bool		visit;			/* its outboxes have yet to be looked at */
	TimestampTz visit_at;		/* but not before */
	int			misses;			/* visits that have not seen all of them */
	bool		outdated;		/* the extension has another version than the
								 * library: a visit may find that changed */
	ObixNeed	need[OBIX_WORKER_KINDS];	/* now */
	TimestampTz started_at[OBIX_WORKER_KINDS];	/* the last worker */
	int			failures;		/* of workers, since one was done */
	TimestampTz retry_at;		/* no worker before */
} ObixDatabase;

/* What came of the attempt to start a worker */
typedef enum ObixStart
{
	START_DONE,
	START_NO_NEED,				/* it has one, or cannot be connected to */
	START_NO_ROOM				/* others have to leave first */
} ObixStart;

/* What the launcher knows of the worker in each place */
typedef struct ObixStarted
{
	BackgroundWorkerHandle *handle; /* NULL: not ours, or free */
	Oid			database;
} ObixStarted;

static ObixStarted started[OBIX_MAX_WORKERS];
static ObixDatabase *databases; /* array, in TopMemoryContext */
static int	ndatabases = 0;
static int	max_databases = 16;
static TimestampTz no_worker_until = 0; /* when all worker slots were taken */
static TimestampTz no_worker_logged = 0;	/* when the log was told */
static TimestampTz short_since = 0; /* since when workers are short */
static TimestampTz short_logged = 0;

static ObixDatabase *
find_database(Oid oid)
{
	for (int i = 0; i < ndatabases; i++)
	{
		if (databases[i].oid == oid)
			return &databases[i];
	}
	return NULL;
}

static ObixDatabase *
add_database(Oid oid)
{
	if (ndatabases == max_databases)
	{
		max_databases *= 2;
		databases = repalloc(databases, max_databases * sizeof(ObixDatabase));
	}
	memset(&databases[ndatabases], 0, sizeof(ObixDatabase));
	databases[ndatabases].oid = oid;
	return &databases[ndatabases++];
}

static bool
is_open(Form_pg_database form)
{
	/* -2: DROP DATABASE was interrupted */
	return form->datallowconn && form->datconnlimit >= -1;
}

/*
 * Look which databases there are.  Those that can be connected to, are no
 * templates, and could not before, are to be visited: for instance one that was
 * copied from a database with outboxes.
 */
static void
read_databases(TimestampTz visit_at)
{
	Relation	catalog;
	TableScanDesc scan;
	HeapTuple	tuple;
	int			kept = 0;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	for (int i = 0; i < ndatabases; i++)
		databases[i].present = false;
	catalog = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(catalog, 0, NULL);
	while (HeapTupleIsValid(tuple = heap_getnext(scan, ForwardScanDirection)))
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);
		ObixDatabase *database = find_database(form->oid);
		bool		open = is_open(form);
		bool		ordinary = open && !form->datistemplate;

		if (database == NULL)
			database = add_database(form->oid);
		if (ordinary && !database->ordinary)
		{
			database->visit = true;
			database->failures = 0;
			database->retry_at = visit_at;
		}
		database->visit &= open;
		database->open = open;
		database->ordinary = ordinary;
		database->present = true;
	}
	table_endscan(scan);
	table_close(catalog, AccessShareLock);
	CommitTransactionCommand();

	for (int i = 0; i < ndatabases; i++)
	{
		if (databases[i].present)
			databases[kept++] = databases[i];
	}
	ndatabases = kept;
}

/*
 * Can a database be connected to, right now?  To try it would leave an error in
 * the log.
 */
static bool
still_open(ObixDatabase *database)
{
	HeapTuple	tuple;

	StartTransactionCommand();
	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database->oid));
	database->open = HeapTupleIsValid(tuple) &&
		is_open((Form_pg_database) GETSTRUCT(tuple));
	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	CommitTransactionCommand();
	if (!database->open)
		database->ordinary = database->visit = false;
	return database->open;
}

/*
 * Start a worker in a database.  There is no room only where that would be the
 * first of its kind there: others do not make way for a second.
 */
static ObixStart
start_worker(ObixDatabase *database, ObixWorkerKind kind, TimestampTz now)
{
	bool		dispatch = kind == OBIX_WORKER_DISPATCH;
	BackgroundWorker worker = {0};
	int			place;
	bool		first;

	place = obix_reserve_worker(database->oid, kind, &first);
	if (place >= 0 && (now < no_worker_until || !still_open(database)))
	{
		obix_free_worker(place, NULL);
		place = -1;
	}
	if (place < 0)
		return first && database->open ? START_NO_ROOM : START_NO_NEED;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_main_arg = Int32GetDatum(place);
	memcpy(worker.bgw_extra, &database->oid, sizeof(database->oid));
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
		obix_free_worker(place, NULL);
		started[place].handle = NULL;
		obix_set_refused(now);
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
		return first ? START_NO_ROOM : START_NO_NEED;
	}
	no_worker_until = 0;
	obix_set_refused(0);
	started[place].database = database->oid;
	database->started_at[kind] = now;
	return START_DONE;
}

/*
 * Have the databases visited for which that was requested.  Where the extension
 * had another version than the library, that may have changed.
 */
static void
take_visits(TimestampTz now)
{
	Oid			requests[OBIX_MAX_REQUESTS];
	int			count = obix_take_visits(requests);
	bool		all = count > OBIX_MAX_REQUESTS;

	if (count == 0)
		return;
	read_databases(now);		/* one may be new */
	for (int i = 0; i < ndatabases; i++)
	{
		ObixDatabase *database = &databases[i];
		bool		requested = all && database->ordinary;

		for (int n = 0; n < count && !all; n++)
			requested |= requests[n] == database->oid;
		if (!requested)
			continue;
		database->visit = database->open;
		database->visit_at = 0;
		database->outdated = false;
	}
}

/*
 * A worker has left because the extension has another version than the library.
 * If the extension was changed after it had looked, the request to visit may have
 * been taken before.  Only those who maintain tell the log, so if it was another,
 * that is left to a visit.
 */
static void
note_outdated(ObixDatabase *database, bool told, uint32 looked_at)
{
	if (looked_at != pg_atomic_read_u32(&obix_shared->extension_changes))
	{
		database->visit = database->open;
		return;
	}
	if (told)
		database->visit = false;
	else if (!database->outdated)
		database->visit = database->open;
	database->outdated = true;
}

/* MIN_DELAY_MS, doubled with each failure, up to MAX_DELAY_MS */
static TimestampTz
after_failures(TimestampTz now, int failures)
{
	return TimestampTzPlusMilliseconds(now, Min(MIN_DELAY_MS << Min(failures, 6),
												MAX_DELAY_MS));
}

/* Has a worker that maintains seen all outboxes?  If not, another is to look. */
static void
note_visit(ObixDatabase *database, bool missed, TimestampTz now)
{
	if (!missed)
	{
		database->misses = 0;
		return;
	}
	database->visit = database->open;
	database->visit_at = after_failures(now, database->misses++);
}

/* Free the places of workers that have stopped. */
static void
reap_workers(TimestampTz now)
{
	for (int i = 0; i < OBIX_MAX_WORKERS; i++)
	{
		ObixDatabase *database;
		pid_t		pid;
		ObixWorker	was;

		if (started[i].handle == NULL)
		{
			/* started by an earlier launcher, if by any */
			if (OidIsValid(obix_worker_database(i)) && !obix_worker_on_duty(i))
				obix_free_worker(i, NULL);
			continue;
		}
		if (GetBackgroundWorkerPid(started[i].handle, &pid) != BGWH_STOPPED)
			continue;
		pfree(started[i].handle);
		started[i].handle = NULL;
		obix_free_worker(i, &was);
		database = find_database(started[i].database);
		if (database == NULL)
			continue;
		if (was.done)
		{
			database->failures = 0;
			database->retry_at = 0;
			if (was.outdated)
				note_outdated(database, i < OBIX_MAX_MAINTAINERS, was.looked_at);
			else if (i < OBIX_MAX_MAINTAINERS)
				note_visit(database, was.missed, now);
			continue;
		}

		/*
		 * A handler may end the process that calls it.  That counts as an
		 * attempt of its consumer, and is no reason to have others wait.
		 */
		if (i >= OBIX_MAX_MAINTAINERS && was.entered)
			continue;

		/* it may have taken work that it has not done: look at everything */
		database->visit = database->open;
		database->retry_at = after_failures(now, database->failures++);
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

static void
earlier(TimestampTz *when, TimestampTz candidate)
{
	if (candidate != 0 && (*when == 0 || candidate < *when))
		*when = candidate;
}

static void
note_need(Oid oid, ObixWorkerKind kind)
{
	ObixDatabase *database = find_database(oid);

	if (database != NULL && database->open && !database->outdated)
		database->need[kind] = NEED_WORK;
}

/*
 * See which databases are to have a worker.  wake_at becomes when that changes
 * by itself, if it is earlier.
 */
static void
find_needs(TimestampTz now, TimestampTz *wake_at)
{
	Oid			oid;
	int			n = 0;

	for (int i = 0; i < ndatabases; i++)
	{
		memset(databases[i].need, 0, sizeof(databases[i].need));
		if (databases[i].visit && databases[i].visit_at <= now)
			databases[i].need[OBIX_WORKER_MAINTAIN] = NEED_VISIT;
		else if (databases[i].visit)
			earlier(wake_at, databases[i].visit_at);
	}
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		Oid			relation;
		TimestampTz retry_at;

		if (obix_due_work(obix_nth_outbox(i), now, &oid, &relation,
						  &retry_at) != 0)
			note_need(oid, OBIX_WORKER_MAINTAIN);
		earlier(wake_at, retry_at);
	}
	if (obix_dispatch_workers == 0)
		return;
	while (OidIsValid(oid = obix_turn_next(&n, now, wake_at)))
	{
		if (!obix_has_idle_dispatcher(oid))
			note_need(oid, OBIX_WORKER_DISPATCH);
	}
}

/*
 * Start workers of one kind where they are needed, in the order in which the
 * databases had their last one.  Of dispatchers one at a time: it has the next
 * one started if there is more than it can do.  Returns whether all could be
 * had.  wake_at becomes when to try again, if it is earlier.
 */
static bool
start_workers(ObixWorkerKind kind, TimestampTz now, TimestampTz *wake_at)
{
	bool		enough = true;

	for (;;)
	{
		ObixDatabase *next = NULL;
		ObixNeed	need;

		for (int i = 0; i < ndatabases; i++)
		{
			if (databases[i].need[kind] != NEED_NONE &&
				(next == NULL ||
				 databases[i].started_at[kind] < next->started_at[kind]))
				next = &databases[i];
		}
		if (next == NULL)
			break;
		need = next->need[kind];
		next->need[kind] = NEED_NONE;
		if (next->retry_at > now)
		{
			earlier(wake_at, next->retry_at);
			continue;
		}
		if (need == NEED_VISIT && running_workers() >= MAX_VISITS)
		{
			enough = false;
			continue;
		}
		switch (start_worker(next, kind, now))
		{
			case START_DONE:
				if (kind == OBIX_WORKER_MAINTAIN)
					next->visit = false;
				break;
			case START_NO_NEED:
				if (need == NEED_VISIT)
					obix_relieve_worker(next->oid);
				break;
			case START_NO_ROOM:
				enough = false;
				break;
		}
	}
	if (no_worker_until > now)
		earlier(wake_at, no_worker_until);
	return enough;
}

/*
 * Have workers make way for others while there are too few.  That goes by the
 * way where many databases have little work, and is worth a message where it
 * lasts.
 */
static void
note_shortage(bool enough, TimestampTz now, TimestampTz *wake_at)
{
	obix_set_short_of_workers(!enough);
	if (enough)
	{
		short_since = 0;
		return;
	}
	if (short_since == 0)
		short_since = now;
	if (!TimestampDifferenceExceeds(short_since, now, SHORT_MS))
		earlier(wake_at, TimestampTzPlusMilliseconds(short_since, SHORT_MS + 1));
	else if (short_logged == 0 ||
			 TimestampDifferenceExceeds(short_logged, now, LOG_SHORT_MS))
	{
		short_logged = now;
		ereport(LOG,
				(errmsg("more databases need a worker of obix than can have one"),
				 errdetail("Workers of obix take up to half of max_worker_processes, %d of %d, and take turns.",
						   obix_worker_room() + 1, max_worker_processes),
				 errhint("Consider raising max_worker_processes.")));
	}
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
	obix_set_own_values();

	databases = MemoryContextAlloc(TopMemoryContext,
								   max_databases * sizeof(ObixDatabase));
	before_shmem_exit(forget_launcher, (Datum) 0);
	obix_set_launcher(MyLatch);
	(void) obix_take_database_news();
	read_databases(0);

	premake_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
											 obix_premake_interval * INT64CONST(1000));
	for (;;)
	{
		TimestampTz now = GetCurrentTimestamp();
		TimestampTz wake_at;
		bool		enough;

		if (obix_worker_interrupts())
			premake_at = now;	/* what was switched on has work to do */

		take_visits(now);
		reap_workers(now);
		if (obix_take_database_news() || now >= premake_at)
			read_databases(TimestampTzPlusMilliseconds(now, NEW_DATABASE_MS));
		if (now >= premake_at)
		{
			obix_request_everything(InvalidOid);
			premake_at = TimestampTzPlusMilliseconds(now,
													 obix_premake_interval * INT64CONST(1000));
		}
		wake_at = premake_at;
		find_needs(now, &wake_at);
		enough = start_workers(OBIX_WORKER_MAINTAIN, now, &wake_at);
		enough &= start_workers(OBIX_WORKER_DISPATCH, now, &wake_at);
		note_shortage(enough, now, &wake_at);

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
