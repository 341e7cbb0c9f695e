/*-------------------------------------------------------------------------
 *
 * work.c
 *	  Asking for maintenance of outboxes, and who does it.
 *
 * A request is a bit in shared memory that stays set until a worker takes it,
 * so it cannot be lost; the latch of the database's worker, or of the launcher
 * while there is none, is set so that it is seen at once.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "utils/timestamp.h"

#include "obix.h"
#include "work.h"

/*
 * Retries of failed maintenance: the first and the longest delay, in
 * milliseconds.  That somebody holds a lock is worth a log message only when
 * it has gone on for a while.
 */
#define FIRST_RETRY_MS		25
#define MAX_BUSY_RETRY_MS	5000
#define MAX_ERROR_RETRY_MS	60000
#define REPORT_BUSY_AFTER	8

/*
 * Ask for work on an outbox.  The bits stay set until a worker takes them, so
 * a request cannot be lost; who finds them set already need not wake anybody.
 * Raises nothing.
 */
void
obix_request_work(ObixOutbox *outbox, uint32 work)
{
	Latch	   *latch;

	if ((pg_atomic_fetch_or_u32(&outbox->work, work) & work) == work)
		return;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	latch = obix_shared->launcher;
	for (int i = 0; i < OBIX_MAX_MAINTAINERS; i++)
	{
		ObixWorker *worker = &obix_shared->workers[i];

		if (worker->latch != NULL && worker->database == outbox->database)
			latch = worker->latch;
	}
	if (latch != NULL)
		SetLatch(latch);
	LWLockRelease(obix_shared->worker_lock);
}

/* Have all outboxes of a database looked after, InvalidOid: of every database. */
void
obix_request_everything(Oid database)
{
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (OidIsValid(outbox->database) &&
			(!OidIsValid(database) || outbox->database == database))
			obix_request_work(outbox, OBIX_WORK_FILL | OBIX_WORK_RECOVER |
							  OBIX_WORK_PREMAKE);
	}
}

/*
 * A prepared transaction of this database may have ended: have the outboxes
 * looked at that wait for one.
 */
void
obix_request_undecided(void)
{
	if (likely(pg_atomic_read_u32(&obix_shared->undecided) == 0))
		return;

	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (outbox->database == MyDatabaseId && outbox->undecided != 0)
			obix_decided(outbox);
	}
}

void
obix_set_launcher(Latch *latch)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	obix_shared->launcher = latch;
	obix_shared->launcher_pid = latch != NULL ? MyProcPid : 0;
	LWLockRelease(obix_shared->worker_lock);
}

void
obix_wake_launcher(void)
{
	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	if (obix_shared->launcher != NULL)
		SetLatch(obix_shared->launcher);
	LWLockRelease(obix_shared->worker_lock);
}

/*
 * Have a worker look after all outboxes of a database, also those that shared
 * memory does not know.  Raises nothing.
 */
void
obix_request_visit(Oid database)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	if (obix_shared->visits < OBIX_MAX_REQUESTS)
		obix_shared->visit[obix_shared->visits] = database;
	obix_shared->visits = Min(obix_shared->visits, OBIX_MAX_REQUESTS) + 1;
	if (obix_shared->launcher != NULL)
		SetLatch(obix_shared->launcher);
	LWLockRelease(obix_shared->worker_lock);
}

static void
visit_my_database(int code, Datum arg)
{
	obix_request_visit(MyDatabaseId);
}

/*
 * This session seems to restore a dump.  When it ends, the restore is over:
 * nobody else may come to know of the outboxes, and of what their consumers have
 * still to be given.
 */
void
obix_visit_at_exit(void)
{
	static bool registered = false;

	if (!registered)
		before_shmem_exit(visit_my_database, (Datum) 0);
	registered = true;
}

/*
 * Take the requested visits: how many, and of which databases.  More than
 * OBIX_MAX_REQUESTS stands for all databases.
 */
int
obix_take_visits(Oid *databases)
{
	int			count;

	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	count = obix_shared->visits;
	memcpy(databases, obix_shared->visit, sizeof(obix_shared->visit));
	obix_shared->visits = 0;
	LWLockRelease(obix_shared->worker_lock);
	return count;
}

/* The extension of this database was created or updated.  Raises nothing. */
void
obix_extension_changed(void)
{
	pg_atomic_fetch_add_u32(&obix_shared->extension_changes, 1);
	obix_request_visit(MyDatabaseId);
}

/* The work that is delayed by each kind of trouble */
static const uint32 work_of_kind[OBIX_TROUBLE_KINDS] = {
	[OBIX_TROUBLE_ROWS] = OBIX_WORK_FILL | OBIX_WORK_NOTIFY,
	[OBIX_TROUBLE_PARTITIONS] = OBIX_WORK_PREMAKE | OBIX_WORK_RECOVER,
};

/*
 * The work on an outbox that may be done now.  retry_at: when that changes by
 * itself because something else may be tried again, 0 if it does not.
 */
uint32
obix_due_work(ObixOutbox *outbox, TimestampTz now, Oid *database,
			  Oid *relation, TimestampTz *retry_at)
{
	uint32		work = pg_atomic_read_u32(&outbox->work);

	/* it waits until that is switched on, and whoever is here has read so */
	if (!obix_auto_recover)
		work &= ~OBIX_WORK_RECOVER;

	*retry_at = 0;
	if (work == 0)
		return 0;

	LWLockAcquire(outbox->lock, LW_SHARED);
	*database = outbox->database;
	*relation = outbox->relation;
	for (int kind = 0; kind < OBIX_TROUBLE_KINDS; kind++)
	{
		TimestampTz when = outbox->troubles[kind].retry_at;

		if (when <= now || (work & work_of_kind[kind]) == 0)
			continue;
		work &= ~work_of_kind[kind];
		if (*retry_at == 0 || when < *retry_at)
			*retry_at = when;
	}
	LWLockRelease(outbox->lock);
	return OidIsValid(*database) ? work : 0;
}

/* Take work on an outbox.  What is asked for from now on is new work. */
void
obix_take_work(ObixOutbox *outbox, uint32 work)
{
	pg_atomic_fetch_and_u32(&outbox->work, ~work);
}

/*
 * An outbox has moved, and consumers have handlers: have a dispatcher look.
 * Raises nothing: runs in the transaction callback of every publisher.
 */
void
obix_request_dispatch(ObixOutbox *outbox)
{
	if (pg_atomic_read_u32(&outbox->dispatch) == 0 &&
		pg_atomic_exchange_u32(&outbox->dispatch, 1) == 0)
		obix_wake_dispatcher(outbox->database);
}

/* A dispatcher is about to look: what happens from now on is news. */
void
obix_clear_dispatch(void)
{
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (outbox->database == MyDatabaseId)
			pg_atomic_write_u32(&outbox->dispatch, 0);
	}
	pg_memory_barrier();
}

/*
 * Have a dispatcher of a database look: one that is idle, or else the launcher,
 * which may start another.
 */
void
obix_wake_dispatcher(Oid database)
{
	Latch	   *latch;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	latch = obix_shared->launcher;
	for (int i = OBIX_MAX_MAINTAINERS; i < OBIX_MAX_WORKERS; i++)
	{
		ObixWorker *worker = &obix_shared->workers[i];

		if (worker->database == database && worker->latch != NULL &&
			!worker->busy)
			latch = worker->latch;
	}
	if (latch != NULL)
		SetLatch(latch);
	LWLockRelease(obix_shared->worker_lock);
}

/* Has a database a dispatcher that is idle, or is being started? */
bool
obix_has_idle_dispatcher(Oid database)
{
	bool		idle = false;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	for (int i = OBIX_MAX_MAINTAINERS; i < OBIX_MAX_WORKERS; i++)
	{
		ObixWorker *worker = &obix_shared->workers[i];

		idle |= worker->database == database && !worker->busy && !worker->done;
	}
	LWLockRelease(obix_shared->worker_lock);
	return idle;
}

void
obix_set_busy(int place, bool busy)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	obix_shared->workers[place].busy = busy;
	LWLockRelease(obix_shared->worker_lock);
}

/*
 * How many workers of databases may run at the same time: with the launcher half
 * of max_worker_processes, for the rest is for parallel queries, replication and
 * others, but one of each kind in any case.
 */
int
obix_worker_room(void)
{
	return Max(2, max_worker_processes / 2 - 1);
}

/*
 * Take a place for a worker of a database.  Returns -1 if all that it may have
 * are taken, or the database has as many as it may.  One of each kind can always
 * run: a place is left for the other kind.  first: the database has no other of
 * this kind.
 */
int
obix_reserve_worker(Oid database, ObixWorkerKind kind, bool *first)
{
	bool		dispatch = kind == OBIX_WORKER_DISPATCH;
	int			from = dispatch ? OBIX_MAX_MAINTAINERS : 0;
	int			to = dispatch ? OBIX_MAX_WORKERS : OBIX_MAX_MAINTAINERS;
	int			allowed = dispatch ? obix_dispatch_workers : 1;
	int			room = obix_worker_room();
	int			room_of_kind = room - 1;
	int			place = -1;

	*first = true;
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	for (int i = 0; i < OBIX_MAX_WORKERS; i++)
	{
		ObixWorker *worker = &obix_shared->workers[i];
		bool		same_kind = i >= from && i < to;

		if (!OidIsValid(worker->database))
		{
			if (same_kind && place < 0)
				place = i;
			continue;
		}
		room--;
		if (!same_kind)
			continue;
		room_of_kind--;
		if (worker->database == database)
		{
			*first = false;
			allowed--;
		}
	}
	if (allowed <= 0 || room <= 0 || room_of_kind <= 0)
		place = -1;
	if (place >= 0)
	{
		memset(&obix_shared->workers[place], 0, sizeof(ObixWorker));
		obix_shared->workers[place].database = database;
	}
	LWLockRelease(obix_shared->worker_lock);
	return place;
}

/*
 * Say whether databases need a worker that cannot have one.  Those that have
 * nothing to do then leave.
 */
void
obix_set_short_of_workers(bool is_short)
{
	if (pg_atomic_exchange_u32(&obix_shared->short_of_workers, is_short) == is_short ||
		!is_short)
		return;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	for (int i = 0; i < OBIX_MAX_WORKERS; i++)
	{
		if (obix_shared->workers[i].latch != NULL)
			SetLatch(obix_shared->workers[i].latch);
	}
	LWLockRelease(obix_shared->worker_lock);
}

bool
obix_short_of_workers(void)
{
	return pg_atomic_read_u32(&obix_shared->short_of_workers) != 0;
}

/* All worker slots of the server were taken then; 0: one could be had. */
void
obix_set_refused(TimestampTz when)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	obix_shared->refused_at = when;
	LWLockRelease(obix_shared->worker_lock);
}

/* Have the launcher look which databases there are.  Raises nothing. */
void
obix_tell_database_news(void)
{
	pg_atomic_write_u32(&obix_shared->database_news, 1);
	obix_wake_launcher();
}

/* Are there news of databases?  What comes from now on is more of them. */
bool
obix_take_database_news(void)
{
	return pg_atomic_exchange_u32(&obix_shared->database_news, 0) != 0;
}

/* Free the place of a worker; was, if given: how it stood there. */
void
obix_free_worker(int place, ObixWorker *was)
{
	ObixWorker *worker = &obix_shared->workers[place];

	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	if (was != NULL)
		*was = *worker;
	memset(worker, 0, sizeof(ObixWorker));
	LWLockRelease(obix_shared->worker_lock);
}

bool
obix_worker_on_duty(int place)
{
	bool		on_duty;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	on_duty = obix_shared->workers[place].pid != 0;
	LWLockRelease(obix_shared->worker_lock);
	return on_duty;
}

/* The database that a place is kept for, InvalidOid if it is free. */
Oid
obix_worker_database(int place)
{
	Oid			database;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	database = obix_shared->workers[place].database;
	LWLockRelease(obix_shared->worker_lock);
	return database;
}

/*
 * A worker reports for duty.  Returns false if its place is not kept for it any
 * more, because the launcher was restarted meanwhile.
 */
bool
obix_enter_worker(int place, Oid database)
{
	ObixWorker *worker = &obix_shared->workers[place];
	bool		kept;

	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	kept = worker->database == database && worker->pid == 0;
	if (kept)
	{
		worker->pid = MyProcPid;
		worker->entered = true;
		worker->latch = &MyProc->procLatch;
	}
	LWLockRelease(obix_shared->worker_lock);
	return kept;
}

/*
 * Have the one that maintains a database leave when it can: another is to look
 * at all outboxes, with the settings of the database as they are then.
 */
void
obix_relieve_worker(Oid database)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	for (int i = 0; i < OBIX_MAX_MAINTAINERS; i++)
	{
		ObixWorker *worker = &obix_shared->workers[i];

		if (worker->database != database || worker->relieved)
			continue;
		worker->relieved = true;
		if (worker->latch != NULL)
			SetLatch(worker->latch);
	}
	LWLockRelease(obix_shared->worker_lock);
}

bool
obix_is_relieved(int place)
{
	bool		relieved;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	relieved = obix_shared->workers[place].relieved;
	LWLockRelease(obix_shared->worker_lock);
	return relieved;
}

/* A worker is about to leave, and has not got at every outbox. */
void
obix_mark_missed(int place)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	obix_shared->workers[place].missed = true;
	LWLockRelease(obix_shared->worker_lock);
}

/* A worker is about to leave because of the extension's version. */
void
obix_mark_outdated(int place, uint32 looked_at)
{
	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	obix_shared->workers[place].outdated = true;
	obix_shared->workers[place].looked_at = looked_at;
	LWLockRelease(obix_shared->worker_lock);
}

/* A worker goes off duty: from now on the launcher is woken in its stead. */
void
obix_leave_worker(int place, bool done)
{
	ObixWorker *worker = &obix_shared->workers[place];

	LWLockAcquire(obix_shared->worker_lock, LW_EXCLUSIVE);
	if (worker->pid == MyProcPid)
	{
		worker->pid = 0;
		worker->latch = NULL;
		worker->done = done;
	}
	LWLockRelease(obix_shared->worker_lock);
	obix_wake_launcher();
}

/* The process that maintains the outboxes of a database, 0 if none does. */
int
obix_worker_pid(Oid database)
{
	int			pid = 0;

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	for (int i = 0; i < OBIX_MAX_MAINTAINERS; i++)
	{
		if (obix_shared->workers[i].database == database)
			pid = obix_shared->workers[i].pid;
	}
	LWLockRelease(obix_shared->worker_lock);
	return pid;
}

/*
 * Maintenance of an outbox failed: it is tried again after a delay that doubles
 * with each failure.  busy: because somebody holds a lock.  Returns whether the
 * log should know.
 */
bool
obix_record_failure(ObixOutbox *outbox, ObixTroubleKind kind,
					const char *message, bool busy)
{
	ObixTrouble *trouble = &outbox->troubles[kind];
	TimestampTz now = GetCurrentTimestamp();
	char		clipped[OBIX_ERROR_LENGTH];
	bool		report;
	int			delay;

	strlcpy(clipped, message, OBIX_ERROR_LENGTH);
	clipped[pg_mbcliplen(clipped, strlen(clipped), OBIX_ERROR_LENGTH - 1)] = '\0';

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	delay = Min(FIRST_RETRY_MS << Min(trouble->failures, 16),
				busy ? MAX_BUSY_RETRY_MS : MAX_ERROR_RETRY_MS);
	if (trouble->failures++ == 0)
		trouble->since = now;
	trouble->retry_at = TimestampTzPlusMilliseconds(now, delay);
	report = busy ? trouble->failures == REPORT_BUSY_AFTER :
		strcmp(trouble->last_error, clipped) != 0;
	trouble->reported |= report;
	strlcpy(trouble->last_error, clipped, OBIX_ERROR_LENGTH);
	LWLockRelease(outbox->lock);
	return report;
}

/*
 * Maintenance of an outbox succeeded; returns whether the log knows that it had
 * failed.
 */
bool
obix_record_success(ObixOutbox *outbox, ObixTroubleKind kind)
{
	bool		reported;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	reported = outbox->troubles[kind].reported;
	memset(&outbox->troubles[kind], 0, sizeof(ObixTrouble));
	LWLockRelease(outbox->lock);
	return reported;
}

/* How maintenance fares. */
void
obix_get_trouble(ObixOutbox *outbox, ObixTroubleKind kind,
				 ObixTrouble *trouble)
{
	LWLockAcquire(outbox->lock, LW_SHARED);
	*trouble = outbox->troubles[kind];
	LWLockRelease(outbox->lock);
}

/* The relation of an entry, InvalidOid if it is not one of this database. */
Oid
obix_outbox_relid(ObixOutbox *outbox)
{
	Oid			relid;

	LWLockAcquire(outbox->lock, LW_SHARED);
	relid = outbox->database == MyDatabaseId ? outbox->relation : InvalidOid;
	LWLockRelease(outbox->lock);
	return relid;
}
