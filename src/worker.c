/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The worker of a database: does what is asked for its outboxes.
 *
 * It looks after all outboxes once when it starts, then does what it is asked
 * for in shared memory, and leaves when nothing was asked for a while.  Each
 * task is a transaction of its own, and one that fails is tried again later,
 * so a bad outbox does not hold up the others.  While it waits for that, no
 * worker need run: the launcher keeps the time.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "commands/async.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/procsignal.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "compat.h"
#include "consumer.h"
#include "gapfill.h"
#include "obix.h"
#include "outbox.h"
#include "partition.h"
#include "registry.h"
#include "relation.h"
#include "turn.h"
#include "version.h"
#include "work.h"
#include "worker.h"
#include "xact.h"

/* With obix.notify on, the worker stays as long as DROP DATABASE bears */
#define NOTIFY_LINGER_MS	4000

/* While others wait for a place, a worker leaves after so long */
#define SHARE_MS			250

/* Between attempts to get at an outbox that somebody has locked */
#define LOCKED_MS			5000

/* The channel of obix.notify */
#define CHANNEL				"obix"

int			obix_worker_place;	/* ours among ObixShared.workers */

static TimestampTz begun_at;	/* when we came on duty */
static TimestampTz visit_at = 0;	/* when to visit again, 0: no need */
static bool on_duty = false;
static bool version_checked = false;
static uint32 checked_changes;	/* extension_changes at the last check */
static char task_name[NAMEDATALEN]; /* the outbox of the last task */
static MemoryContext task_context;	/* of one task */
static MemoryContext visit_context; /* of the list of outboxes */

static void
leave_at_exit(int code, Datum arg)
{
	if (on_duty)
		obix_leave_worker(obix_worker_place, false);
	else
		obix_wake_launcher();
}

/*
 * Timeouts and defaults that were set for people must not hit a worker.
 */
void
obix_set_own_values(void)
{
	static const char *const values[][2] = {
		{"role", "none"},
		{"statement_timeout", "0"},
		{"lock_timeout", "0"},
		{"idle_in_transaction_session_timeout", "0"},
		{"idle_session_timeout", "0"},
#ifdef OBIX_HAS_TRANSACTION_TIMEOUT
		{"transaction_timeout", "0"},
#endif
		{"default_transaction_read_only", "off"},
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_deferrable", "off"},
		{"session_replication_role", "origin"},
		{"row_security", "on"},
		{"search_path", "pg_catalog, pg_temp"},
		{"client_min_messages", "warning"},
		{"exit_on_error", "off"},	/* a task that fails is tried again */
	};

	for (int i = 0; i < lengthof(values); i++)
		SetConfigOption(values[i][0], values[i][1], PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * Tasks
 */

static void
task_fill(Oid relid)
{
	(void) obix_fill(relid, false);
}

static void
task_recover(Oid relid)
{
	(void) obix_recover(relid, false);
}

static void
task_premake(Oid relid)
{
	(void) obix_premake(relid);
}

static void
task_notify(Oid relid)
{
	char	   *name = get_rel_name(relid);

	if (name != NULL)
		Async_Notify(CHANNEL, obix_quote_relation(relid));
}

/*
 * Record how far everything is resolved, so that attaching after a restart need
 * not look at what came before.  Free the state of an outbox that is gone
 * without our having seen it go, after ROLLBACK PREPARED for instance.
 */
static void
task_resolve(Oid relid)
{
	Relation	parent;
	ObixRelation *known = NULL;
	ObixRegistryRow row;
	ObixPosition position;
	ObixOutbox *shared;

	if (!ConditionalLockRelationOid(relid, AccessShareLock))
		return;
	parent = try_table_open(relid, NoLock);
	if (parent != NULL)
	{
		known = obix_get_relation(parent);
		shared = known != NULL ? obix_try_attach(parent, known) : NULL;
		if (shared != NULL && obix_registry_find(relid, &row))
		{
			if (obix_get_position(shared, relid, known->id, &position) &&
				position.high_water_mark > row.resolved)
				(void) obix_raise_resolved(relid, position.high_water_mark, false);
		}
		table_close(parent, NoLock);
	}
	if (known == NULL)
		obix_forget_dropped(relid);
}

/*
 * Have shared memory know the consumers of an outbox that have handlers: after a
 * restart it knows none.
 */
static void
task_consumers(Oid relid)
{
	ListCell   *cell;

	foreach(cell, obix_list_consumers(relid))
	{
		ObixConsumer *consumer = lfirst(cell);

		if (consumer->handler == NULL && consumer->batch_handler == NULL)
			continue;
		obix_turn_require(consumer->id, relid, true, consumer->available);
		obix_xact_touch_consumer(consumer->id);
	}
}

/* A task failed: say so if it is news, and ask for it again. */
static void
report_failure(ObixOutbox *outbox, const char *name, ErrorData *error,
			   ObixTroubleKind kind, uint32 work)
{
	if (outbox == NULL ||
		obix_record_failure(outbox, kind, error->message,
							obix_is_busy(error->sqlerrcode)))
		ereport(LOG,
				(errcode(error->sqlerrcode),
				 errmsg("maintenance of outbox \"%s\" failed: %s",
						name, error->message),
				 error->detail ? errdetail_internal("%s", error->detail) : 0,
				 error->hint ? errhint("%s", error->hint) :
				 errhint("It is tried again; see obix.outbox_status.")));
	if (outbox != NULL)
		obix_request_work(outbox, work);
}

/*
 * Run a task in a transaction.  Returns false if it failed, in which case the
 * work has been asked for again, with a time before which it is not due.
 */
static bool
run_task(ObixOutbox *outbox, Oid relid, void (*task) (Oid),
		 ObixTroubleKind kind, uint32 work)
{
	volatile bool ok = true;

	MemoryContextSwitchTo(task_context);
	PG_TRY();
	{
		int			nestlevel;
		char	   *found;

		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		found = get_rel_name(relid);
		strlcpy(task_name, found ? found : "?", NAMEDATALEN);
		PushActiveSnapshot(GetTransactionSnapshot());
		if (task != task_fill)
			obix_xact_commit_locally();
		nestlevel = NewGUCNestLevel();
		obix_limit_lock_waits();
		(void) obix_keep_extension();	/* if it is gone, the task sees that */
		task(relid);
		AtEOXact_GUC(false, nestlevel);
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		HOLD_INTERRUPTS();
		MemoryContextSwitchTo(task_context);
		error = CopyErrorData();
		FlushErrorState();
		AbortCurrentTransaction();
		report_failure(outbox, task_name, error, kind, work);
		RESUME_INTERRUPTS();
		ok = false;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(task_context);
	MemoryContextReset(task_context);
	return ok;
}

/* Do the work that is due for an outbox. */
static void
serve_outbox(ObixOutbox *outbox, Oid relid, uint32 work)
{
	static const struct
	{
		uint32		work;
		ObixTroubleKind kind;
		void		(*task) (Oid relid);
	}			tasks[] =
	{
		{OBIX_WORK_FILL, OBIX_TROUBLE_ROWS, task_fill},
		{OBIX_WORK_NOTIFY, OBIX_TROUBLE_ROWS, task_notify},
		{OBIX_WORK_RECOVER, OBIX_TROUBLE_PARTITIONS, task_recover},
		{OBIX_WORK_PREMAKE, OBIX_TROUBLE_PARTITIONS, task_premake},
		{OBIX_WORK_PREMAKE, OBIX_TROUBLE_PARTITIONS, task_resolve},
		{OBIX_WORK_PREMAKE, OBIX_TROUBLE_PARTITIONS, task_consumers},
	};
	uint32		done[OBIX_TROUBLE_KINDS] = {0};
	bool		failed[OBIX_TROUBLE_KINDS] = {false};

	obix_take_work(outbox, work);
	if (!obix_enabled)
		return;					/* asked for again by the timer */
	for (int i = 0; i < lengthof(tasks); i++)
	{
		ObixTroubleKind kind = tasks[i].kind;

		if ((work & tasks[i].work) == 0)
			continue;
		done[kind] |= tasks[i].work;
		if (!run_task(outbox, relid, tasks[i].task, kind, tasks[i].work))
			failed[kind] = true;
	}

	for (int kind = 0; kind < OBIX_TROUBLE_KINDS; kind++)
	{
		if (done[kind] != 0 && !failed[kind] &&
			obix_record_success(outbox, kind))
			ereport(LOG,
					(errmsg("maintenance of outbox \"%s\" succeeded", task_name)));
	}
}

/*
 * Do what is due for the outboxes of this database.  Returns whether there was
 * anything.  retry_at: when something may be tried again, 0 for nothing.
 */
static bool
serve_outboxes(TimestampTz *retry_at)
{
	bool		busy = false;

	*retry_at = 0;

	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);
		Oid			database;
		Oid			relid;
		TimestampTz when;
		uint32		work;

		QueryCancelPending = false;
		CHECK_FOR_INTERRUPTS();
		work = obix_due_work(outbox, GetCurrentTimestamp(), &database, &relid,
							 &when);
		if (when != 0 && database == MyDatabaseId &&
			(*retry_at == 0 || when < *retry_at))
			*retry_at = when;
		if (work == 0 || database != MyDatabaseId)
			continue;
		serve_outbox(outbox, relid, work);
		busy = true;
	}
	return busy;
}

/*
 * Attach to an outbox, and ask for all that may be due there.  One that is
 * locked is visited later: what is due there may be older than the lock, and be
 * known to nobody, for instance where a prepared transaction has it.
 */
static void
visit_outbox(Oid relid)
{
	Relation	parent;
	ObixRelation *known;
	ObixOutbox *shared;

	if (!ConditionalLockRelationOid(relid, AccessShareLock))
	{
		visit_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), LOCKED_MS);
		return;
	}
	parent = try_table_open(relid, NoLock);
	if (parent == NULL)
		return;
	known = obix_get_relation(parent);
	shared = known != NULL ? obix_try_attach(parent, known) : NULL;
	if (shared != NULL)
		obix_request_work(shared, OBIX_WORK_FILL | OBIX_WORK_RECOVER |
						  OBIX_WORK_PREMAKE);
	table_close(parent, NoLock);
}

/* List the outboxes of this database, in the visit context. */
static List *
list_outboxes(void)
{
	List	   *rows;
	List	   *relids = NIL;
	ListCell   *cell;

	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	rows = obix_registry_list();
	MemoryContextSwitchTo(visit_context);
	foreach(cell, rows)
		relids = lappend_oid(relids, ((ObixRegistryRow *) lfirst(cell))->outbox);
	PopActiveSnapshot();
	CommitTransactionCommand();
	return relids;
}

/*
 * Visit every outbox of this database.  One that cannot be attached to has
 * nowhere to keep its trouble, so that is only logged.  Returns whether there
 * was any.
 */
static bool
visit_outboxes(void)
{
	List	   *outboxes = obix_enabled ? list_outboxes() : NIL;
	bool		any = outboxes != NIL;
	ListCell   *cell;

	visit_at = 0;
	foreach(cell, outboxes)
		(void) run_task(NULL, lfirst_oid(cell), visit_outbox,
						OBIX_TROUBLE_PARTITIONS, 0);
	MemoryContextReset(visit_context);
	return any;
}

/* Before leaving: record for each outbox how far it is resolved. */
static void
resolve_outboxes(void)
{
	if (!obix_enabled)
		return;
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);
		Oid			relid = obix_outbox_relid(outbox);

		if (OidIsValid(relid))
			(void) run_task(outbox, relid, task_resolve,
							OBIX_TROUBLE_PARTITIONS, 0);
	}
}

/*
 * What all workers of databases have in common
 */

/* Leave; from now on the launcher is woken. */
void
obix_end_worker(void)
{
	obix_leave_worker(obix_worker_place, true);
	on_duty = false;
	proc_exit(0);
}

/*
 * Leave if the extension has another version here than the library.  The
 * launcher then starts no worker in this database until that has changed.  One
 * kind of worker tells the log.
 */
void
obix_leave_if_outdated(void)
{
	uint32		changes = pg_atomic_read_u32(&obix_shared->extension_changes);
	char	   *version;

	if (version_checked && changes == checked_changes)
		return;
	version_checked = true;
	checked_changes = changes;
	pg_memory_barrier();		/* read before what it says something about */

	StartTransactionCommand();
	version = obix_extension_version();
	if (version == NULL || strcmp(version, OBIX_VERSION) == 0)
	{
		CommitTransactionCommand();
		return;
	}
	if (obix_worker_place < OBIX_MAX_MAINTAINERS)
		ereport(LOG,
				(errmsg("no worker of obix acts in database \"%s\" for now",
						get_database_name(MyDatabaseId)),
				 errdetail("The extension has version %s there, and the library version %s.",
						   version, OBIX_VERSION),
				 obix_is_before_library(version) ?
				 errhint("Run ALTER EXTENSION obix UPDATE in that database.") :
				 errhint("Install that version of the library, and restart the server.")));
	CommitTransactionCommand();
	obix_mark_outdated(obix_worker_place, changes);
	obix_end_worker();
}

/* Connect to the database, and report for duty; does not return otherwise. */
void
obix_begin_worker(Datum arg)
{
	Oid			database;

	obix_worker_place = DatumGetInt32(arg);
	memcpy(&database, MyBgworkerEntry->bgw_extra, sizeof(database));
	before_shmem_exit(leave_at_exit, (Datum) 0);

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	obix_set_own_values();
	obix_in_worker = true;
	begun_at = GetCurrentTimestamp();
	on_duty = obix_enter_worker(obix_worker_place, database);
	if (!on_duty)
		proc_exit(0);
	obix_leave_if_outdated();
}

/*
 * Before looking for work: what is asked for from now on wakes us.  Returns
 * whether settings have been read.
 */
bool
obix_worker_interrupts(void)
{
	ResetLatch(MyLatch);
	QueryCancelPending = false; /* there is nothing to be cancelled */
	CHECK_FOR_INTERRUPTS();
	if (!ConfigReloadPending)
		return false;
	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
	return true;
}

/* Has this worker, between tasks, to make way for those of other databases? */
bool
obix_worker_makes_way(void)
{
	return obix_short_of_workers() &&
		TimestampDifferenceExceeds(begun_at, GetCurrentTimestamp(), SHARE_MS);
}

void
obix_worker_sleep(long ms, int events)
{
	(void) WaitLatch(MyLatch, events | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, ms,
					 obix_wait_event(OBIX_WAIT_WORKER));
}

void
obix_worker_main(Datum arg)
{
	TimestampTz last_busy = 0;

	obix_begin_worker(arg);
	task_context = AllocSetContextCreate(TopMemoryContext, "obix worker task",
										 ALLOCSET_DEFAULT_SIZES);
	visit_context = AllocSetContextCreate(TopMemoryContext, "obix worker visit",
										  ALLOCSET_SMALL_SIZES);

	if (visit_outboxes())
		last_busy = GetCurrentTimestamp();
	for (;;)
	{
		TimestampTz now;
		TimestampTz leave_at;
		TimestampTz retry_at;

		/* the launcher may have asked before we knew what is switched on */
		if (obix_worker_interrupts())
			obix_request_everything(MyDatabaseId);
		obix_leave_if_outdated();
		if (obix_is_relieved(obix_worker_place))
			break;
		if (visit_at != 0 && visit_at <= GetCurrentTimestamp())
			(void) visit_outboxes();
		if (serve_outboxes(&retry_at))
		{
			if (obix_worker_makes_way())
				break;
			last_busy = GetCurrentTimestamp();
			continue;
		}

		now = GetCurrentTimestamp();
		leave_at = TimestampTzPlusMilliseconds(last_busy, obix_notify ?
											   Max(obix_worker_linger, NOTIFY_LINGER_MS) :
											   obix_worker_linger);
		if (now >= leave_at || obix_short_of_workers())
			break;
		if (retry_at == 0 || retry_at > leave_at)
			retry_at = leave_at;
		obix_worker_sleep(TimestampDifferenceMilliseconds(now, retry_at),
						  WL_LATCH_SET);
	}

	resolve_outboxes();
	if (visit_at != 0)
		obix_mark_missed(obix_worker_place);
	obix_end_worker();
}
