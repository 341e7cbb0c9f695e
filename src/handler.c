/*-------------------------------------------------------------------------
 *
 * handler.c
 *	  Finding and calling the functions of consumers.
 *
 * A dispatcher has all rights, and these functions are anybody's.  So:
 *
 *	1. They run as the owner of the consumer, who can neither leave that role
 *	   nor take settings along.
 *	2. The identity is kept until the transaction has ended.  All that the
 *	   dispatcher has to do in it itself, it has done before.  So whatever a
 *	   function has left to be done later (deferred triggers, cursors WITH HOLD)
 *	   is done as the owner as well, if not at the end of the call.
 *	3. What a session keeps between transactions is thrown away before another
 *	   consumer has its turn: a temporary table would be found by the next
 *	   function, which may be somebody else's.
 *
 * It is no security-restricted operation, since functions may create temporary
 * tables and have deferred triggers fired.
 *
 * Functions are known by name and are looked up for every turn.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/prepare.h"
#include "commands/trigger.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "parser/parse_func.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "handler.h"

/* After so many timeouts, each ignored by the function, the process ends */
#define LAST_TIMEOUT		3

static TimeoutId timer;
static volatile sig_atomic_t timeouts = 0;
static bool in_time = false;	/* the timer is running */

/* The type obix.event. */
Oid
obix_event_type(void)
{
	Oid			namespace = get_namespace_oid("obix", false);
	Oid			type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
									   CStringGetDatum("event"),
									   ObjectIdGetDatum(namespace));

	if (!OidIsValid(type))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("type \"%s\" does not exist", "obix.event")));
	return type;
}

/* Find a function, InvalidOid if there is none. */
Oid
obix_function_by_name(const char *name, ObixFunctionKind kind)
{
	List	   *names = stringToQualifiedNameList(name, NULL);
	Oid			argument = InvalidOid;

	if (kind != OBIX_FUNCTION_GATE)
		argument = obix_event_type();
	if (kind == OBIX_FUNCTION_BATCH)
		argument = get_array_type(argument);
	return LookupFuncName(names, kind == OBIX_FUNCTION_GATE ? 0 : 1, &argument,
						  true);
}

/* How a function of a consumer is declared, for messages. */
static const char *
signature(const char *name, ObixFunctionKind kind)
{
	static const char *const arguments[] = {"obix.event", "obix.event[]", ""};

	return psprintf("%s(%s)", name, arguments[kind]);
}

/*
 * Why a function cannot be called for a consumer of a certain owner, NULL if it
 * can.  denied: for want of a privilege.
 */
static const char *
why_not_callable(Oid function, const char *name, ObixFunctionKind kind,
				 Oid owner, bool *denied)
{
	HeapTuple	tuple;
	Form_pg_proc form;
	Oid			namespace;
	const char *why = NULL;

	*denied = false;
	tuple = OidIsValid(function) ?
		SearchSysCache1(PROCOID, ObjectIdGetDatum(function)) : NULL;
	if (!HeapTupleIsValid(tuple))
		return psprintf("function %s does not exist", signature(name, kind));
	form = (Form_pg_proc) GETSTRUCT(tuple);
	namespace = form->pronamespace;
	if (isAnyTempNamespace(namespace))
		why = psprintf("function %s is temporary", signature(name, kind));
	else if (form->prokind != PROKIND_FUNCTION || form->proretset)
		why = psprintf("%s is not a function that returns one value",
					   signature(name, kind));
	else if (kind == OBIX_FUNCTION_GATE && form->prorettype != BOOLOID)
		why = psprintf("function %s does not return boolean",
					   signature(name, kind));
	ReleaseSysCache(tuple);

	if (why == NULL &&
		(object_aclcheck(NamespaceRelationId, namespace, owner,
						 ACL_USAGE) != ACLCHECK_OK ||
		 object_aclcheck(ProcedureRelationId, function, owner,
						 ACL_EXECUTE) != ACLCHECK_OK))
	{
		*denied = true;
		why = psprintf("role \"%s\" may not execute function %s",
					   GetUserNameFromId(owner, false), signature(name, kind));
	}
	return why;
}

/*
 * Check a function that a consumer is to have, and return its qualified name.
 */
char *
obix_check_function(const char *name, ObixFunctionKind kind, Oid owner)
{
	static const char *const hints[] = {
		"A handler is a function of one argument of type obix.event.",
		"A batch handler is a function of one argument of type obix.event[].",
		"A gate is a function without arguments that returns boolean."
	};
	Oid			function = obix_function_by_name(name, kind);
	bool		denied;
	const char *why = why_not_callable(function, name, kind, owner, &denied);

	if (why != NULL && !denied)
		ereport(ERROR,
				(errcode(OidIsValid(function) ?
						 ERRCODE_INVALID_PARAMETER_VALUE : ERRCODE_UNDEFINED_FUNCTION),
				 errmsg_internal("%s", why),
				 errhint("%s It is given by its name alone.", hints[kind])));
	if (why != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg_internal("%s", why)));
	return quote_qualified_identifier(get_namespace_name(get_func_namespace(function)),
									  get_func_name(function));
}

/*
 * Find the functions of a consumer.  Returns why they cannot be called, NULL if
 * they can.
 */
const char *
obix_resolve_functions(const ObixConsumer *consumer, ObixFunctions *functions)
{
	struct
	{
		const char *name;
		ObixFunctionKind kind;
		Oid		   *function;
	}			wanted[] =
	{
		{consumer->handler, OBIX_FUNCTION_HANDLER, &functions->handler},
		{consumer->batch_handler, OBIX_FUNCTION_BATCH, &functions->batch_handler},
		{consumer->gate, OBIX_FUNCTION_GATE, &functions->gate},
	};

	if (!SearchSysCacheExists1(AUTHOID, ObjectIdGetDatum(consumer->owner)))
		return psprintf("role with OID %u does not exist", consumer->owner);
	for (int i = 0; i < lengthof(wanted); i++)
	{
		const char *why;
		bool		denied;

		*wanted[i].function = InvalidOid;
		if (wanted[i].name == NULL)
			continue;
		*wanted[i].function = obix_function_by_name(wanted[i].name,
													wanted[i].kind);
		why = why_not_callable(*wanted[i].function, wanted[i].name,
							   wanted[i].kind, consumer->owner, &denied);
		if (why != NULL)
			return why;
	}
	return NULL;
}

/*
 * Calling
 */

/*
 * Timeout handler: cancel what is running.  A function that catches this is
 * cancelled again, and in the end the process terminated.
 */
static void
on_timeout(void)
{
	if (++timeouts >= LAST_TIMEOUT)
		ProcDiePending = true;
	else
		QueryCancelPending = true;
	InterruptPending = true;
	SetLatch(MyLatch);
}

static void
report_timeout(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_QUERY_CANCELED),
			 errmsg("canceling a handler due to its timeout")));
}

/* Called once in a process that is to call functions. */
void
obix_handler_init(void)
{
	timer = RegisterTimeout(USER_TIMEOUT, on_timeout);
}

/* After the transaction of a call: nothing is to be cancelled any more. */
void
obix_stop_timeout(void)
{
	in_time = false;
	disable_timeout(timer, false);
	QueryCancelPending = false;
}

/*
 * At the end of PRE_COMMIT, of any transaction: the functions have had their
 * time.  What may come now is to wait for a standby, and to cancel that would
 * not undo the commit.
 */
void
obix_handler_commits(void)
{
	if (!in_time)
		return;
	in_time = false;
	disable_timeout(timer, false);
	if (timeouts > 0)
		report_timeout();
}

/* What comes now has not timed out. */
void
obix_forget_timeouts(void)
{
	timeouts = 0;
}

/* Did the last call, which failed, last too long? */
bool
obix_handler_timed_out(void)
{
	return timeouts > 0;
}

/*
 * Become the owner of a consumer until the transaction has ended, with settings
 * until leave_stage().  Returns the nest level of these.
 */
static int
enter_stage(const ObixConsumer *consumer)
{
	Oid			userid;
	int			sec_context;
	int			nestlevel;
	int			ms = (int) Min(Max(consumer->timeout, 1), INT_MAX);

	GetUserIdAndSecContext(&userid, &sec_context);
	SetUserIdAndSecContext(consumer->owner,
						   sec_context | SECURITY_LOCAL_USERID_CHANGE);
	nestlevel = NewGUCNestLevel();
	(void) set_config_option("search_path", consumer->search_path,
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
	timeouts = 0;
	in_time = true;
	enable_timeout_every(timer,
						 TimestampTzPlusMilliseconds(GetCurrentTimestamp(), ms),
						 ms);
	return nestlevel;
}

/*
 * End what a function may have left to be done at commit, while its settings
 * are still in force.  Its time goes on to the end of the commit, where what it
 * has published is written.
 */
static void
leave_stage(int nestlevel)
{
	AfterTriggerFireDeferred();
	PortalHashTableDeleteAll();

	if (timeouts > 0)
		report_timeout();
	AtEOXact_GUC(false, nestlevel);
}

static Datum
call_function(FmgrInfo *function, int nargs, Datum argument)
{
	LOCAL_FCINFO(fcinfo, 1);
	Datum		result;

	CHECK_FOR_INTERRUPTS();
	InitFunctionCallInfoData(*fcinfo, function, nargs, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = argument;
	fcinfo->args[0].isnull = false;
	PushActiveSnapshot(GetTransactionSnapshot());
	result = FunctionCallInvoke(fcinfo);
	PopActiveSnapshot();
	CommandCounterIncrement();
	return fcinfo->isnull ? (Datum) 0 : result;
}

/*
 * Ask the gate of a consumer, in a transaction that does nothing else: the user
 * is the owner of the consumer until it ends.
 */
bool
obix_ask_gate(const ObixConsumer *consumer, Oid gate)
{
	FmgrInfo	function;
	int			nestlevel;
	bool		open;

	InvokeFunctionExecuteHook(gate);
	nestlevel = enter_stage(consumer);
	fmgr_info(gate, &function);
	open = DatumGetBool(call_function(&function, 0, (Datum) 0));
	leave_stage(nestlevel);
	return open;
}

/*
 * Call the handlers of a consumer: the batch handler with all events, or where
 * there is none the handler with each.  desc is that of obix.event.  The user
 * is the owner of the consumer until the transaction ends.
 */
void
obix_call_handlers(const ObixConsumer *consumer, const ObixFunctions *functions,
				   Tuplestorestate *events, TupleDesc desc, int64 count)
{
	bool		batch = OidIsValid(functions->batch_handler) &&
		(count > 1 || !OidIsValid(functions->handler));
	Oid			oid = batch ? functions->batch_handler : functions->handler;
	TupleTableSlot *slot = MakeSingleTupleTableSlot(desc, &TTSOpsMinimalTuple);
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "obix handler",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	Datum	   *array = batch ? palloc_extended(count * sizeof(Datum), MCXT_ALLOC_HUGE) : NULL;
	int64		n = 0;
	FmgrInfo	function;
	int			nestlevel;

	InvokeFunctionExecuteHook(oid);
	nestlevel = enter_stage(consumer);
	fmgr_info_cxt(oid, &function, old);
	tuplestore_rescan(events);
	while (n < count && tuplestore_gettupleslot(events, true, false, slot))
	{
		Datum		event = ExecFetchSlotHeapTupleDatum(slot);

		/* a tuple from a file is the slot's, but in the current context */
		ExecClearTuple(slot);
		if (batch)
			array[n] = event;
		else
		{
			(void) call_function(&function, 1, event);
			MemoryContextReset(context);
		}
		n++;
	}
	if (batch)
		(void) call_function(&function, 1,
							 PointerGetDatum(construct_array(array, n,
															 desc->tdtypeid, -1,
															 false,
															 TYPALIGN_DOUBLE)));
	leave_stage(nestlevel);

	MemoryContextSwitchTo(old);
	MemoryContextDelete(context);
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * Throw away what functions can leave in a session.  Called outside of a
 * transaction.
 */
void
obix_clean_session(void)
{
	Oid			temp_namespace;
	Oid			temp_toast;

	StartTransactionCommand();
	LockReleaseSession(USER_LOCKMETHOD);
	DropAllPreparedStatements();
	ResetAllOptions();
	GetTempNamespaceState(&temp_namespace, &temp_toast);
	if (OidIsValid(temp_namespace))
	{
		PushActiveSnapshot(GetTransactionSnapshot());
		ResetTempTableNamespace();
		PopActiveSnapshot();
	}
	CommitTransactionCommand();
}
