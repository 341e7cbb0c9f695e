/*-------------------------------------------------------------------------
 *
 * obix.c
 *	  What is plugged in where: settings, hooks, callbacks, workers.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/ipc.h"
#include "tcop/utility.h"
#include "utils/guc.h"

#include "compat.h"
#include "consumer.h"
#include "handler.h"
#include "insert.h"
#include "obix.h"
#include "outbox.h"
#include "owner.h"
#include "progress.h"
#include "publish.h"
#include "registry.h"
#include "relation.h"
#include "removal.h"
#include "waiters.h"
#include "work.h"
#include "worker.h"
#include "writer.h"
#include "xact.h"

PG_MODULE_MAGIC_EXT(.name = "obix",.version = OBIX_VERSION);

void		_PG_init(void);

/* GUC variables */
int			obix_max_outboxes = 64;
int			obix_max_consumers = 1024;
int			obix_dispatch_workers = 2;
int			obix_premake_interval = 3600;
int			obix_lock_timeout = 50;
int			obix_worker_linger = 1000;
bool		obix_auto_recover = true;
bool		obix_notify = false;
bool		obix_force_sync_commit = true;
bool		obix_enabled = true;

static shmem_request_hook_type next_shmem_request_hook = NULL;
static shmem_startup_hook_type next_shmem_startup_hook = NULL;
static ProcessUtility_hook_type next_process_utility = NULL;

static void
request_shmem(void)
{
	if (next_shmem_request_hook)
		next_shmem_request_hook();
	obix_shmem_request();
}

static void
startup_shmem(void)
{
	if (next_shmem_startup_hook)
		next_shmem_startup_hook();
	obix_shmem_startup();
}

/*
 * Callback of every transaction of every session.  Raises nothing after
 * PRE_COMMIT and PRE_PREPARE.
 */
static void
end_transaction(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_PREPARE:
			obix_xact_check_prepare();
			pg_fallthrough;
		case XACT_EVENT_PRE_COMMIT:
			obix_publish_flush();
			obix_handler_commits();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_ABORT:
			obix_progress_end();
			obix_publish_end();
			obix_consumer_end();
			obix_xact_end(event);
			obix_leave_waiters();
			break;
		case XACT_EVENT_PARALLEL_PRE_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PARALLEL_ABORT:
			break;				/* parallel workers have nothing to end */
	}
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_COMMIT_SUB || event == SUBXACT_EVENT_ABORT_SUB)
	{
		int			level = GetCurrentTransactionNestLevel();

		obix_publish_end_sub(event, level);
		obix_xact_end_sub(event, level);
		if (event == SUBXACT_EVENT_ABORT_SUB)
			obix_leave_waiters();
	}
}

/* The database whose setting obix.enabled a statement may change, if any. */
static Oid
may_be_enabled(Node *statement)
{
	AlterDatabaseSetStmt *alter = (AlterDatabaseSetStmt *) statement;

	if (!IsA(statement, AlterDatabaseSetStmt) ||
		(alter->setstmt->kind != VAR_RESET_ALL &&
		 pg_strcasecmp(alter->setstmt->name, "obix.enabled") != 0))
		return InvalidOid;
	return get_database_oid(alter->dbname, true);
}

/* Is this a step of restoring a dump that completes an outbox? */
static bool
restores_guard(Node *statement, ProcessUtilityContext context)
{
	return context == PROCESS_UTILITY_TOPLEVEL && IsA(statement, CreateTrigStmt) &&
		strcmp(((CreateTrigStmt *) statement)->trigname, OBIX_GUARD_NAME) == 0;
}

/*
 * ProcessUtility_hook: see who ends a prepared transaction, and after what
 * statements there may be work of which shared memory does not know.
 */
static void
process_utility(PlannedStmt *statement, const char *source, bool read_only,
				ProcessUtilityContext context, ParamListInfo params,
				QueryEnvironment *environment, DestReceiver *receiver,
				QueryCompletion *completion)
{
	Node	   *node = statement->utilityStmt;

	/* the statement may not outlive its execution */
	Oid			enabled = may_be_enabled(node);
	bool		restores = restores_guard(node, context);

	if (IsA(node, TransactionStmt))
	{
		TransactionStmtKind kind = ((TransactionStmt *) node)->kind;

		if (kind == TRANS_STMT_COMMIT_PREPARED ||
			kind == TRANS_STMT_ROLLBACK_PREPARED)
			obix_xact_ends_prepared();
	}
	if (next_process_utility)
		next_process_utility(statement, source, read_only, context, params,
							 environment, receiver, completion);
	else
		standard_ProcessUtility(statement, source, read_only, context, params,
								environment, receiver, completion);
	if (OidIsValid(enabled))
		obix_xact_visit(enabled);
	if (restores)
		obix_visit_at_exit();
}

static void
define_settings(void)
{
	DefineCustomIntVariable("obix.max_outboxes",
							"Outboxes, in all databases together, that can be in use at the same time.",
							"Each takes some shared memory for every connection slot.",
							&obix_max_outboxes,
							64, 1, 10000,
							PGC_POSTMASTER, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("obix.max_consumers",
							"Consumers, in all databases together, that can be in use at the same time.",
							"Those that are fetched for from outside work without a place, but slower.",
							&obix_max_consumers,
							1024, 1, 1000000,
							PGC_POSTMASTER, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("obix.dispatch_workers",
							"Processes in a database that call the handlers of consumers.",
							"0 switches handlers off, in all databases.",
							&obix_dispatch_workers,
							2, 0, OBIX_MAX_DISPATCHERS,
							PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("obix.premake_interval",
							"Time between checks for partitions that fall due.",
							"Partitions are made when the head comes near; this is a second line.",
							&obix_premake_interval,
							3600, 1, INT_MAX / 1000,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
	DefineCustomIntVariable("obix.lock_timeout",
							"Longest time that maintenance waits for a lock on an outbox.",
							"Publishers and readers may have to wait behind it for as long.",
							&obix_lock_timeout,
							50, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);
	DefineCustomIntVariable("obix.worker_linger",
							"Time that the worker of a database stays without work.",
							"DROP DATABASE waits for it to leave, for at most five seconds.",
							&obix_worker_linger,
							1000, 0, 4000,
							PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);
	DefineCustomBoolVariable("obix.auto_recover",
							 "Brings events out of the DEFAULT partition without being asked.",
							 NULL,
							 &obix_auto_recover,
							 true,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	DefineCustomBoolVariable("obix.notify",
							 "Sends NOTIFY on channel \"obix\" when there are new events.",
							 "The worker sends it, once for a wave of commits; the payload is the name of the outbox.",
							 &obix_notify,
							 false,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	DefineCustomBoolVariable("obix.force_sync_commit",
							 "Flushes the commit of a transaction that publishes, whatever synchronous_commit says.",
							 "Without it, an event that was read can be gone after a crash, and its sequence be given to another.",
							 &obix_force_sync_commit,
							 true,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);
	DefineCustomBoolVariable("obix.enabled",
							 "Lets obix work in this session or database.",
							 "Off for a data-only restore: rows are taken as they come, publishing is refused, and no worker acts.",
							 &obix_enabled,
							 true,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);
	MarkGUCPrefixReserved("obix");
}

/*
 * Outside shared_preload_libraries this does nothing: pg_upgrade, for one,
 * loads the library into a server that may not preload it.  The functions then
 * say what is missing.
 */
void
_PG_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;

	define_settings();
	if (IsBinaryUpgrade)
		return;

	next_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shmem;
	next_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = startup_shmem;

	next_process_utility = ProcessUtility_hook;
	ProcessUtility_hook = process_utility;
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
	obix_registry_init();
	obix_relation_init();
	obix_consumer_init();
	obix_guard_init();
	obix_writer_init();
	obix_removal_init();
	obix_owner_init();
	obix_register_launcher();
}
