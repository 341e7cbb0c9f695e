/*-------------------------------------------------------------------------
 *
 * status.c
 *	  What the status views show.
 *
 * Whoever looks must not wait where somebody has an outbox, a partition or an
 * index of it locked, nor see an error because of one that is broken: it is for
 * the views to say so.  So everything that needs the table is done in a
 * subtransaction, with little patience; what shared memory knows comes first.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_authid.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bounds.h"
#include "compat.h"
#include "consumer.h"
#include "delivery.h"
#include "late.h"
#include "obix.h"
#include "parked.h"
#include "partition.h"
#include "read.h"
#include "relation.h"
#include "turn.h"
#include "work.h"
#include "xact.h"

/* How long a statement that looks waits for locks, altogether */
#define PATIENCE_MS		100

/* The time over which the rate of an outbox is told */
#define RATE_SECONDS	60

/* Dead letters are counted up to so many */
#define MAX_COUNT		1000

/* Columns of obix.outbox_state, and from STATE on of obix.outbox_condition */
enum
{
	OUTBOX_HEAD, OUTBOX_FRONTIER, OUTBOX_HIGH_WATER_MARK, OUTBOX_SUSPECT_FROM,
	OUTBOX_UNDECIDED, OUTBOX_IN_FLIGHT, OUTBOX_OLDEST_PID, OUTBOX_RUNWAY,
	OUTBOX_STRANDED, OUTBOX_WORKER_PID, OUTBOX_FAILURES, OUTBOX_RETRY_AT,
	OUTBOX_LAST_ERROR,
	OUTBOX_STATE, OUTBOX_PROBLEM, OUTBOX_WAITING_SINCE, OUTBOX_RATE, OUTBOX_PLACEHOLDERS,
	OUTBOX_FAILING_SINCE, OUTBOX_WORKER_STATE,
	OUTBOX_COLUMNS
};

/* The same of obix.consumer_progress and, from PROBLEM on, consumer_condition */
enum
{
	CONSUMER_STATE, CONSUMER_POSITION, CONSUMER_SCANNED, CONSUMER_LAG_EVENTS,
	CONSUMER_NEXT_RECORDED_AT, CONSUMER_ATTEMPTS, CONSUMER_ATTEMPT_SEQUENCE,
	CONSUMER_RETRY_AT, CONSUMER_LEASE_UNTIL, CONSUMER_LATE_RANGES,
	CONSUMER_DELIVERED, CONSUMER_FAILED, CONSUMER_DEAD_LETTERED,
	CONSUMER_LAST_EVENT_AT, CONSUMER_LAST_ERROR, CONSUMER_DISPATCHER_PID,
	CONSUMER_PROBLEM, CONSUMER_REACHABLE, CONSUMER_RATE,
	CONSUMER_DEAD_LETTERS,
	CONSUMER_COLUMNS
};

/* Columns of obix.server_state */
enum
{
	SERVER_LOADED, SERVER_LAUNCHER_PID, SERVER_WORKERS, SERVER_MAX_WORKERS,
	SERVER_SHORT_OF_WORKERS, SERVER_REFUSED_AT, SERVER_OUTBOXES,
	SERVER_MAX_OUTBOXES, SERVER_CONSUMERS, SERVER_MAX_CONSUMERS,
	SERVER_LACKS_STANDBY,
	SERVER_COLUMNS
};

/* What is looked at, and what has been found */
typedef struct ObixLook
{
	Oid			relid;			/* the outbox */
	bool		more;			/* by the views of 1.1 */
	TupleDesc	desc;			/* of the result */
	Datum	   *values;
	bool	   *isnull;
	const char *state;			/* of an outbox */
	const char *problem;

	/* of a consumer */
	ObixConsumer consumer;
	ObixConsumerState position;
} ObixLook;

/* Give a column of the result a value */
#define SET(look, column, datum) \
	((look)->values[column] = (datum), (look)->isnull[column] = false)

PG_FUNCTION_INFO_V1(obix_partitions);
PG_FUNCTION_INFO_V1(obix_outbox_state);
PG_FUNCTION_INFO_V1(obix_consumer_progress);
PG_FUNCTION_INFO_V1(obix_server_state);

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
 * Looking
 */

/*
 * May the user see numbers about an outbox?  They say nothing of its events, so
 * those may who see what all sessions are at.
 */
static bool
may_look(Oid relid)
{
	return obix_may_select(relid, GetUserId()) ||
		has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS);
}

/* What a look runs into must not hide that the session is to end. */
static bool
must_be_raised(int sqlerrcode)
{
	switch (ERRCODE_TO_CATEGORY(sqlerrcode))
	{
		case ERRCODE_OPERATOR_INTERVENTION:
		case ERRCODE_INSUFFICIENT_RESOURCES:
			return true;
		default:
			return false;
	}
}

/*
 * Have a look at the table.  If that takes more than a moment because somebody
 * has something locked, or fails, the problem is told instead.  Returns false
 * then.
 */
static bool
try_look(void (*body) (ObixLook *look), ObixLook *look)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	long		elapsed = TimestampDifferenceMilliseconds(GetCurrentStatementStartTimestamp(),
														  GetCurrentTimestamp());
	char	   *patience = psprintf("%ld", Max(PATIENCE_MS - elapsed, 1));
	volatile bool done = false;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		int			nestlevel = NewGUCNestLevel();

		(void) set_config_option("lock_timeout", patience, PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
		body(look);
		AtEOXact_GUC(false, nestlevel);
		ReleaseCurrentSubTransaction();
		done = true;
	}
	PG_CATCH();
	{
		ErrorData  *error = obix_xact_roll_back_sub(context, owner);

		if (must_be_raised(error->sqlerrcode))
			ReThrowError(error);
		look->state = obix_is_busy(error->sqlerrcode) ? "locked" : "broken";
		look->problem = obix_is_busy(error->sqlerrcode) ?
			"somebody has it locked exclusively, or waits to do so" : error->message;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return done;
}

/* The result will have these columns, all of them NULL as yet. */
static void
begin_look(FunctionCallInfo fcinfo, ObixLook *look, Datum *values, bool *isnull,
		   int columns)
{
	memset(look, 0, sizeof(ObixLook));
	if (get_call_result_type(fcinfo, NULL, &look->desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	memset(isnull, true, columns * sizeof(bool));
	look->values = values;
	look->isnull = isnull;
}

static Datum
form_result(const ObixLook *look)
{
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(look->desc),
											 look->values, look->isnull));
}

/*
 * The row at a sequence, or with or_after the first from there on, for what is
 * committed now: its sequence and recorded_at; false if there is none.
 */
static bool
find_row(Relation parent, int64 from, bool or_after, int64 *sequence,
		 TimestampTz *recorded_at)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	bool		found = !or_after ||
		obix_oldest_row(parent, snapshot, from, &from);
	ObixLeaf	leaf;

	if (found)
		obix_find_leaf(parent, from, &leaf);
	if (found && OidIsValid(leaf.relid))
	{
		Relation	rel = table_open(leaf.relid, AccessShareLock);
		ObixScan	scan;
		bool		isnull;

		obix_begin_scan(&scan, rel, snapshot, from, from + 1,
						ForwardScanDirection);
		found = obix_next_row(&scan, sequence);
		if (found)
			*recorded_at = DatumGetTimestampTz(slot_getattr(scan.slot,
															Anum_event_recorded_at,
															&isnull));
		obix_end_scan(&scan);
		table_close(rel, AccessShareLock);
	}
	else
		found = false;
	UnregisterSnapshot(snapshot);
	return found;
}

/* Is there a row of this sequence that was recorded after a time? */
static bool
is_recent(Relation parent, int64 sequence, TimestampTz since)
{
	TimestampTz recorded_at;

	return find_row(parent, sequence, false, &sequence, &recorded_at) &&
		recorded_at > since;
}

/*
 * Events a second in the last minute, up to a sequence.  Nobody counts them: the
 * first of that minute is found by looking at ever earlier ones, then in
 * between, so that the effort grows with the logarithm of their number.
 */
static double
recent_rate(Relation parent, int64 mark)
{
	TimestampTz since = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													-RATE_SECONDS * 1000);
	int64		recent = mark + 1;	/* from here on all are */
	int64		old = mark;		/* this is not */

	while (old > 0 && is_recent(parent, old, since))
	{
		int64		step = 2 * (mark + 1 - old);

		recent = old;
		old = Max(mark + 1 - step, 0);
	}
	while (recent - old > 1)
	{
		int64		middle = old + (recent - old) / 2;

		if (is_recent(parent, middle, since))
			recent = middle;
		else
			old = middle;
	}
	return (double) (mark + 1 - recent) / RATE_SECONDS;
}

/*
 * Outboxes
 */

/* What shared memory knows of an outbox; needs no lock. */
static void
look_at_shared(ObixLook *look)
{
	int			pid = obix_worker_pid(MyDatabaseId);
	TimestampTz now = GetCurrentTimestamp();
	const char *worker = "idle";
	ObixRegistryRow row;
	ObixOutbox *shared = NULL;
	ObixPosition position;
	ObixTrouble trouble = {0};

	if (obix_registry_find(look->relid, &row))
		shared = obix_find_outbox(look->relid, row.id);
	if (shared != NULL && obix_get_position(shared, look->relid, row.id, &position))
	{
		SET(look, OUTBOX_HEAD, Int64GetDatum(position.head));
		SET(look, OUTBOX_FRONTIER, Int64GetDatum(position.frontier));
		SET(look, OUTBOX_HIGH_WATER_MARK, Int64GetDatum(position.high_water_mark));
		if (position.suspect_from != 0)
			SET(look, OUTBOX_SUSPECT_FROM, Int64GetDatum(position.suspect_from));
		if (position.undecided != 0)
			SET(look, OUTBOX_UNDECIDED, Int64GetDatum(position.undecided));
		SET(look, OUTBOX_IN_FLIGHT, Int32GetDatum(position.in_flight));
		if (position.oldest_pid != 0)
			SET(look, OUTBOX_OLDEST_PID, Int32GetDatum(position.oldest_pid));
		SET(look, OUTBOX_PLACEHOLDERS, Int64GetDatum(position.placeholders));
		if (pid != 0)
			SET(look, OUTBOX_WORKER_PID, Int32GetDatum(pid));
		obix_get_trouble(shared, OBIX_TROUBLE_PARTITIONS, &trouble);
		if (trouble.failures == 0)
			obix_get_trouble(shared, OBIX_TROUBLE_ROWS, &trouble);
		SET(look, OUTBOX_FAILURES, Int32GetDatum(trouble.failures));
		if (trouble.failures > 0)
		{
			SET(look, OUTBOX_RETRY_AT, TimestampTzGetDatum(trouble.retry_at));
			SET(look, OUTBOX_LAST_ERROR, CStringGetTextDatum(trouble.last_error));
			SET(look, OUTBOX_FAILING_SINCE, TimestampTzGetDatum(trouble.since));
		}
	}

	if (RecoveryInProgress())
		return;
	if (obix_shared->launcher_pid == 0)
		worker = "no launcher";
	else if (pid != 0)
		worker = "running";
	else if (!obix_enabled)
		worker = "disabled";
	else if (trouble.retry_at > now)
		worker = "retrying";
	else if (shared != NULL && pg_atomic_read_u32(&shared->work) != 0)
		worker = "due";
	SET(look, OUTBOX_WORKER_STATE, CStringGetTextDatum(worker));
}

/* Why an outbox has no shared state, or is not complete. */
static void
find_problem(ObixLook *look, Relation parent, ObixOutbox *shared)
{
	const char *lacks = obix_why_not_ready(parent);

	look->state = "ok";
	if (lacks != NULL)
	{
		look->state = "incomplete";
		look->problem = psprintf("it has no %s", lacks);
	}
	else if (RecoveryInProgress())
		look->state = "standby";
	else if (shared == NULL && !obix_enabled)
	{
		look->state = "disabled";
		look->problem = "obix is disabled";
	}
	else if (shared == NULL)
	{
		look->state = "no room";
		look->problem = "too many outboxes are in use";
	}
}

/* What has to be looked up in the table. */
static void
look_at_outbox(ObixLook *look)
{
	ObixRelation *known;
	Relation	parent = obix_try_open(look->relid, AccessShareLock, &known);
	ObixOutbox *shared;
	int64		stranded;
	int64		mark;
	int64		next;
	TimestampTz recorded_at;

	if (parent == NULL)
		return;
	shared = obix_try_attach(parent, known);
	look_at_shared(look);
	find_problem(look, parent, shared);
	if (strcmp(look->state, "incomplete") == 0)
	{
		table_close(parent, AccessShareLock);
		return;
	}

	if (RecoveryInProgress())
		SET(look, OUTBOX_HIGH_WATER_MARK,
			Int64GetDatum(obix_exact_high_water_mark(parent, known)));
	if (shared != NULL)
	{
		int64		head = DatumGetInt64(look->values[OUTBOX_HEAD]);
		int64		end = obix_partitions_end(parent);

		SET(look, OUTBOX_RUNWAY, Int64GetDatum(Max(end - 1 - head, 0)));
		stranded = obix_stranded(parent);
		if (stranded >= 0)
			SET(look, OUTBOX_STRANDED, Int64GetDatum(stranded));
	}
	if (look->more && !look->isnull[OUTBOX_HIGH_WATER_MARK])
	{
		mark = DatumGetInt64(look->values[OUTBOX_HIGH_WATER_MARK]);
		SET(look, OUTBOX_RATE, Float8GetDatum(recent_rate(parent, mark)));
		if (shared != NULL &&
			mark < DatumGetInt64(look->values[OUTBOX_HEAD]) &&
			find_row(parent, mark + 1, true, &next, &recorded_at))
			SET(look, OUTBOX_WAITING_SINCE, TimestampTzGetDatum(recorded_at));
	}
	table_close(parent, AccessShareLock);
}

/*
 * obix.outbox_state(outbox), obix.outbox_condition(outbox)
 *
 * The former has fewer columns.
 */
Datum
obix_outbox_state(PG_FUNCTION_ARGS)
{
	Datum		values[OUTBOX_COLUMNS];
	bool		isnull[OUTBOX_COLUMNS];
	ObixLook	look;

	begin_look(fcinfo, &look, values, isnull, OUTBOX_COLUMNS);
	look.relid = PG_GETARG_OID(0);
	look.more = look.desc->natts > OUTBOX_STATE;

	/* NULLs for an outbox that is being dropped */
	if (obix_shared == NULL)
	{
		look.state = "not loaded";
		look.problem = "obix is not loaded by the server";
	}
	else if (get_rel_name(look.relid) != NULL && !may_look(look.relid))
	{
		look.state = "denied";
		look.problem = "the user may not look at it";
	}
	else if (!try_look(look_at_outbox, &look))
		look_at_shared(&look);
	if (look.state != NULL)
		SET(&look, OUTBOX_STATE, CStringGetTextDatum(look.state));
	if (look.problem != NULL)
		SET(&look, OUTBOX_PROBLEM, CStringGetTextDatum(look.problem));
	PG_RETURN_DATUM(form_result(&look));
}

/*
 * Consumers
 */

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

/* What its outbox says of how far a consumer is. */
static void
look_at_lag(ObixLook *look)
{
	ObixConsumer *consumer = &look->consumer;
	ObixConsumerState *state = &look->position;
	ObixRelation *known;
	Relation	parent = obix_try_open(consumer->outbox, AccessShareLock, &known);
	int64		mark;
	int64		start;
	int64		next = 0;
	TimestampTz recorded_at;
	ObixOutbox *shared;
	bool		found;

	if (parent == NULL)
		return;
	mark = obix_exact_high_water_mark(parent, known);

	/* what was found not to be for it does not make it late */
	start = obix_turn_nothing_to(consumer->id, consumer->version,
								 obix_delivery_start(state));

	/* what it may get does not end at the high-water mark */
	shared = obix_try_attach(parent, known);
	if (shared != NULL)
	{
		ObixPosition position;

		obix_get_position(shared, consumer->outbox, known->id, &position);
		if (consumer->available)
			mark = position.head;
		if (state->position > position.head)
			look->problem = "its cursor is beyond the head of the outbox";
	}
	SET(look, CONSUMER_REACHABLE, Int64GetDatum(mark));

	/* nothing has happened since nothing was found for it */
	if (obix_turn_is_idle(consumer->id) && state->position <= mark)
		start = mark;
	if (state->position <= mark)
		SET(look, CONSUMER_LAG_EVENTS, Int64GetDatum(Max(mark - start, 0)));
	if (mark > start)
	{
		/* first what was resolved, then what is there */
		int64		resolved = obix_resolved(consumer->outbox);

		found = find_row(parent, start + 1, true, &next, &recorded_at);
		if (found)
			SET(look, CONSUMER_NEXT_RECORDED_AT, TimestampTzGetDatum(recorded_at));
		if (start < resolved && (!found || next > start + 1))
			look->problem = "its next event has been removed from the outbox";
	}
	table_close(parent, AccessShareLock);
}

/* What the tables of consumers say; also of one that is being dropped. */
static void
look_at_consumer(ObixLook *look, int32 id)
{
	ObixConsumer *consumer = &look->consumer;
	ObixConsumerState *state = &look->position;
	double		rate;
	int			pid;

	SET(look, CONSUMER_STATE, CStringGetTextDatum(state_of(consumer, state)));
	SET(look, CONSUMER_POSITION, Int64GetDatum(state->position));
	SET(look, CONSUMER_SCANNED, Int64GetDatum(state->scanned));
	SET(look, CONSUMER_ATTEMPTS, Int32GetDatum(state->attempts));
	if (state->attempts > 0)
	{
		SET(look, CONSUMER_ATTEMPT_SEQUENCE, Int64GetDatum(state->attempt_sequence));
		if (state->retry_at != 0)
			SET(look, CONSUMER_RETRY_AT, TimestampTzGetDatum(state->retry_at));
	}
	if (state->lease_until != 0)
		SET(look, CONSUMER_LEASE_UNTIL, TimestampTzGetDatum(state->lease_until));
	SET(look, CONSUMER_LATE_RANGES,
		Int64GetDatum(state->late ? obix_count_late(state) : 0));
	SET(look, CONSUMER_DELIVERED, Int64GetDatum(state->delivered));
	SET(look, CONSUMER_FAILED, Int64GetDatum(state->failed));
	SET(look, CONSUMER_DEAD_LETTERED, Int64GetDatum(state->dead_lettered));
	if (state->last_event_at != 0)
		SET(look, CONSUMER_LAST_EVENT_AT, TimestampTzGetDatum(state->last_event_at));

	/* error messages may quote events */
	if (state->last_error != NULL &&
		(obix_may_use(consumer) ||
		 has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS)))
		SET(look, CONSUMER_LAST_ERROR, CStringGetTextDatum(state->last_error));
	pid = obix_turn_pid(id);
	if (pid != 0)
		SET(look, CONSUMER_DISPATCHER_PID, Int32GetDatum(pid));
	if (!look->more)
		return;
	rate = obix_turn_rate(id, obix_delivery_start(state));
	if (rate >= 0)
		SET(look, CONSUMER_RATE, Float8GetDatum(rate));
	SET(look, CONSUMER_DEAD_LETTERS,
		Int64GetDatum(state->parked ? obix_count_dead_letters(id, MAX_COUNT) : 0));
}

/*
 * obix.consumer_progress(id), obix.consumer_condition(id)
 *
 * The former has fewer columns.
 */
Datum
obix_consumer_progress(PG_FUNCTION_ARGS)
{
	int32		id = PG_GETARG_INT32(0);
	Datum		values[CONSUMER_COLUMNS];
	bool		isnull[CONSUMER_COLUMNS];
	ObixLook	look;

	begin_look(fcinfo, &look, values, isnull, CONSUMER_COLUMNS);
	look.more = look.desc->natts > CONSUMER_PROBLEM;

	/* NULLs for one that is being dropped, or restored */
	if (obix_shared == NULL)
		look.problem = "obix is not loaded by the server";
	else if (obix_get_consumer(id, &look.consumer) &&
			 obix_find_state(id, look.consumer.outbox, &look.position))
	{
		Oid			outbox = look.consumer.outbox;

		look_at_consumer(&look, id);
		if (get_rel_name(outbox) == NULL)
			look.problem = "its outbox does not exist";
		else if ((obix_may_read(outbox, GetUserId()) ||
				  has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS)) &&
				 !try_look(look_at_lag, &look))
			look.problem = psprintf("its outbox is %s: %s", look.state,
									look.problem);
	}
	if (look.problem != NULL)
		SET(&look, CONSUMER_PROBLEM, CStringGetTextDatum(look.problem));
	PG_RETURN_DATUM(form_result(&look));
}

/*
 * obix.server_state()
 */
Datum
obix_server_state(PG_FUNCTION_ARGS)
{
	Datum		values[SERVER_COLUMNS];
	bool		isnull[SERVER_COLUMNS];
	ObixLook	look;
	int			workers = 0;
	int			outboxes = 0;
	TimestampTz refused_at;

	begin_look(fcinfo, &look, values, isnull, SERVER_COLUMNS);

	SET(&look, SERVER_LOADED, BoolGetDatum(obix_shared != NULL));
	if (obix_shared == NULL)
		PG_RETURN_DATUM(form_result(&look));

	LWLockAcquire(obix_shared->worker_lock, LW_SHARED);
	for (int i = 0; i < OBIX_MAX_WORKERS; i++)
		workers += OidIsValid(obix_shared->workers[i].database);
	if (obix_shared->launcher_pid != 0)
		SET(&look, SERVER_LAUNCHER_PID, Int32GetDatum(obix_shared->launcher_pid));
	refused_at = obix_shared->refused_at;
	LWLockRelease(obix_shared->worker_lock);
	LWLockAcquire(obix_shared->lock, LW_SHARED);
	for (int i = 0; i < obix_max_outboxes; i++)
		outboxes += OidIsValid(obix_nth_outbox(i)->database);
	LWLockRelease(obix_shared->lock);

	SET(&look, SERVER_WORKERS, Int32GetDatum(workers));
	SET(&look, SERVER_MAX_WORKERS, Int32GetDatum(obix_worker_room()));
	SET(&look, SERVER_SHORT_OF_WORKERS, BoolGetDatum(obix_short_of_workers()));
	if (refused_at != 0)
		SET(&look, SERVER_REFUSED_AT, TimestampTzGetDatum(refused_at));
	SET(&look, SERVER_OUTBOXES, Int32GetDatum(outboxes));
	SET(&look, SERVER_MAX_OUTBOXES, Int32GetDatum(obix_max_outboxes));
	SET(&look, SERVER_CONSUMERS, Int32GetDatum(obix_count_turns()));
	SET(&look, SERVER_MAX_CONSUMERS, Int32GetDatum(obix_max_consumers));
	SET(&look, SERVER_LACKS_STANDBY,
		BoolGetDatum(!RecoveryInProgress() && obix_xact_lacks_standby()));
	PG_RETURN_DATUM(form_result(&look));
}
