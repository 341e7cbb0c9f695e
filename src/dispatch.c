/*-------------------------------------------------------------------------
 *
 * dispatch.c
 *	  The dispatcher: calls the handlers of consumers.
 *
 * Dispatchers run while there is something to do and share the consumers of
 * their database, one consumer a turn.  A turn is made of steps, and a step of
 * transactions, under the mutex of the consumer:
 *
 *	prepare		what is next?  The attempt at it is counted, and committed
 *				before anything is called: however the process ends, it counts.
 *	handle		move the cursor, call the handlers, commit both together.
 *	give_up		if that failed, what becomes of it.
 *
 * A batch comes first.  If it fails, or is not finished, its events go one by
 * one, so attempts, stop and dead letter are about the event that is at fault.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_class.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "consumer.h"
#include "delivery.h"
#include "handler.h"
#include "obix.h"
#include "rebuild.h"
#include "registry.h"
#include "turn.h"
#include "work.h"
#include "worker.h"
#include "xact.h"

/* How long a consumer goes on before others have their turn */
#define TURN_MS				50

/* Bytes in a batch, at most, but for one event */
#define BATCH_BYTES			(16 * 1024 * 1024)

/* Between asking a gate that is closed */
#define GATE_MS				1000

/* Between attempts to get at an outbox that somebody has locked */
#define LOCKED_MS			500

/* Between looks whether there is a standby that confirms commits */
#define STANDBY_MS			1000

/* Until a consumer whose mutex somebody holds is looked at again */
#define BUSY_MS				20

/* Between attempts to swap tables that somebody has locked */
#define SWAP_MS				1000

/* At least so long between looks at a consumer that is parked */
#define PARKED_MS			1000

/* The same where obix is disabled in the database */
#define DISABLED_MS			60000

/* What came of a step */
typedef enum ObixOutcome
{
	OUTCOME_DONE,				/* there may be more */
	OUTCOME_NOTHING,			/* nothing is left */
	OUTCOME_CAUGHT_UP,			/* a rebuild has nothing left */
	OUTCOME_GATE,				/* the gate is to be asked first */
	OUTCOME_LATER,				/* not before due_at */
	OUTCOME_NEVER,				/* not until it is touched */
	OUTCOME_GONE				/* there is no such consumer */
} ObixOutcome;

/* One step of a consumer; lives in step_context */
typedef struct ObixStep
{
	int32		id;
	ObixConsumer consumer;
	ObixFunctions functions;
	bool		gate_open;		/* it was asked in this turn */
	bool		locked;			/* we hold the mutex for the session */
	LOCKTAG		mutex;
	ObixOutcome outcome;
	TimestampTz due_at;

	/* what is to be handled */
	Tuplestorestate *events;
	TupleDesc	desc;
	int64		count;
	int64		last;
	TimestampTz last_at;
	bool		single;			/* one event, whose attempt was counted */

	/* of a part */
	int			nestlevel;		/* of the settings of our own */
	bool		called;			/* functions of users have been called */

	/* of a rebuild */
	bool		live_claimed;	/* nobody else serves the live consumer */
	bool		used_live;		/* its handlers have used a live table */

	/* why a part failed */
	const char *error;
	int			sqlerrcode;
} ObixStep;

static MemoryContext step_context;

static void
step_later(ObixStep *step, double ms)
{
	step->outcome = OUTCOME_LATER;
	step->due_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
											   (int64) Min(ms, 1e15));
}

/*
 * Hold the mutex of a consumer across transactions; false if somebody else
 * does.  A transaction that fails loses it.
 */
static bool
lock_for_session(ObixStep *step)
{
	if (!step->locked)
	{
		obix_set_consumer_tag(&step->mutex, step->id);
		step->locked = LockAcquire(&step->mutex, ExclusiveLock, true,
								   true) != LOCKACQUIRE_NOT_AVAIL;
	}
	return step->locked;
}

static void
unlock_for_session(ObixStep *step)
{
	if (step->locked)
		(void) LockRelease(&step->mutex, ExclusiveLock, true);
	step->locked = false;
}

/* Why a consumer cannot be served as it is, NULL if it can. */
static const char *
why_not_served(ObixStep *step)
{
	ObixConsumer *consumer = &step->consumer;
	const char *why = obix_resolve_functions(consumer, &step->functions);

	if (why != NULL)
		return why;
	if (consumer->handler == NULL && consumer->batch_handler == NULL)
		return "it has no handler";
	(void) set_config_option("search_path", consumer->search_path,
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 false, 0, false);	/* only check it */
	if (get_rel_name(consumer->outbox) == NULL)
		return psprintf("outbox with OID %u does not exist", consumer->outbox);
	if (!obix_may_read(consumer->outbox, consumer->owner))
		return psprintf("role \"%s\" may not read outbox \"%s\"",
						GetUserNameFromId(consumer->owner, false),
						get_rel_name(consumer->outbox));
	return NULL;
}

/* Mark a consumer as one that is not to be served before due_at. */
static void
mark_parked(ObixStep *step, ObixConsumerState *state, const char *why)
{
	step_later(step, Max(step->consumer.max_backoff, PARKED_MS));
	state->state = OBIX_CONSUMER_PARKED;
	state->attempted_at = GetCurrentTimestamp();
	state->retry_at = step->due_at;
	obix_set_last_error(state, why);
	obix_set_state(state);
}

/* Record that a consumer cannot be served, unless that is known. */
static void
park(ObixStep *step, ObixConsumerState *state, const char *why)
{
	ObixConsumer *consumer = &step->consumer;

	step_later(step, Max(consumer->max_backoff, PARKED_MS));
	if (state->state == OBIX_CONSUMER_PARKED && state->last_error != NULL &&
		strncmp(state->last_error, why, OBIX_LAST_ERROR_LENGTH - 4) == 0)
		return;
	mark_parked(step, state, why);
	ereport(LOG,
			(errmsg("consumer \"%s\" is parked: %s", consumer->name, why),
			 errhint("It is looked at again later, or at once by obix.resume.")));
}

/*
 * Read what is next, and count the attempt at it.
 */
static void
prepare(ObixStep *step)
{
	ObixConsumer *consumer = &step->consumer;
	ObixConsumerState state;
	ObixDelivery delivery = {0};
	ObixReader *reader = &delivery.reader;
	const char *why;
	TimestampTz now;

	if (!lock_for_session(step))
	{
		step_later(step, BUSY_MS);
		return;
	}
	if (!obix_get_consumer(step->id, consumer))
	{
		step->outcome = OUTCOME_GONE;
		return;
	}
	step->outcome = OUTCOME_NEVER;
	if (consumer->paused ||
		!obix_find_state(step->id, consumer->outbox, &state) ||
		state.state == OBIX_CONSUMER_STOPPED)
		return;
	now = GetCurrentTimestamp();
	if (!obix_may_try(&state, now) ||
		(state.state == OBIX_CONSUMER_PARKED && state.retry_at > now &&
		 state.attempted_at <= now))
	{
		step->outcome = OUTCOME_LATER;
		step->due_at = state.retry_at;
		return;
	}
	why = why_not_served(step);
	if (why != NULL)
	{
		park(step, &state, why);
		return;
	}
	if (OidIsValid(step->functions.gate) && !step->gate_open)
	{
		/* in case that it ends the process, or the server */
		if (!obix_turn_gate_proved(step->id))
			mark_parked(step, &state, "the process ended while the gate was asked");
		step->outcome = OUTCOME_GATE;
		return;
	}
	if (state.state == OBIX_CONSUMER_PARKED)
	{
		state.state = OBIX_CONSUMER_ACTIVE;
		obix_set_state(&state);
	}

	step->desc = lookup_rowtype_tupdesc_copy(obix_event_type(), -1);
	step->events = tuplestore_begin_heap(true, true, work_mem);
	reader->store = step->events;
	reader->desc = step->desc;
	reader->max_events = state.one_by_one > 0 || state.attempts > 0 ? 1 :
		consumer->batch_size;
	reader->max_bytes = BATCH_BYTES;
	if (consumer->available && state.attempts > 0)
		delivery.again = state.attempt_sequence;
	obix_begin_delivery(&delivery, consumer, &state, "obix");
	obix_deliver_next(&delivery);
	step->count = reader->events;
	step->last = reader->last;
	step->last_at = reader->last_at;
	step->single = step->count == 1;
	if (delivery.more)
		step->outcome = OUTCOME_DONE;
	else if (step->count == 0)
		step->outcome = step->id < 0 ? OUTCOME_CAUGHT_UP : OUTCOME_NOTHING;
	else if (step->single && state.attempt_sequence == step->last &&
			 consumer->max_attempts != 0 &&
			 state.attempts >= consumer->max_attempts)
	{
		/* the last attempt was not finished, so nobody has recorded it */
		(void) obix_fail_event(&delivery, step->last,
							   "the process ended while the handler ran");
		step->count = 0;
		step->outcome = OUTCOME_DONE;
	}
	else
	{
		if (step->single)
			obix_count_attempt(consumer, &state, step->last);
		else
			state.one_by_one = (int32) step->count;
		obix_set_state(&state);
		step->outcome = OUTCOME_DONE;
	}
	obix_end_delivery(&delivery);
}

/* From here on, what is called belongs to users. */
static void
end_own(ObixStep *step)
{
	AtEOXact_GUC(false, step->nestlevel);
	step->nestlevel = 0;
	step->called = true;
}

/*
 * Move the cursor, and call the handlers.  Nothing of ours comes after them:
 * from then on to the end of the transaction, the user is the owner of the
 * consumer.
 */
static void
handle(ObixStep *step)
{
	ObixConsumerState state;
	ObixDelivery delivery = {0};

	obix_get_state(&step->consumer, &state);
	if (!step->single)
		state.one_by_one = 0;
	else if (state.one_by_one > 0)
		state.one_by_one--;
	delivery.reader.desc = step->desc;
	delivery.count = step->count;
	delivery.last_at = step->last_at;
	obix_begin_delivery(&delivery, &step->consumer, &state, "obix");
	obix_acknowledge(&delivery, step->last);
	obix_end_delivery(&delivery);

	end_own(step);
	obix_call_handlers(&step->consumer, &step->functions, step->events,
					   step->desc, step->count);
	if (step->id < 0)
	{
		step->used_live = true;
		obix_check_rebuild(&step->consumer);
		step->used_live = false;
	}
}

/* The handlers could not be called: that was no attempt. */
static void
take_back(ObixStep *step)
{
	ObixConsumerState state;

	if (!lock_for_session(step))
		return;
	obix_get_state(&step->consumer, &state);
	if (!step->single)
		state.one_by_one = 0;
	else if (state.attempts > 0 && state.attempt_sequence == step->last)
	{
		state.attempts--;
		state.retry_at = 0;
	}
	obix_set_state(&state);
}

/* The handlers failed: decide what becomes of the event, if it was one. */
static void
give_up(ObixStep *step)
{
	ObixConsumer *consumer = &step->consumer;
	ObixConsumerState state;
	ObixDelivery delivery = {0};
	ObixVerdict verdict;

	if (!lock_for_session(step))
	{
		step_later(step, BUSY_MS);
		return;
	}
	obix_get_state(consumer, &state);
	if (!step->single)
	{
		/* that they go one by one now was recorded before */
		obix_set_last_error(&state, step->error);
		obix_set_state(&state);
		return;
	}
	if (state.attempts == 0 || state.attempt_sequence != step->last)
		return;					/* somebody has moved it meanwhile */
	delivery.reader.desc = step->desc;
	obix_begin_delivery(&delivery, consumer, &state, "obix");
	if (state.one_by_one > 0 && consumer->dead_letter &&
		consumer->max_attempts != 0 && state.attempts >= consumer->max_attempts)
		state.one_by_one--;
	verdict = obix_fail_event(&delivery, step->last, step->error);
	obix_end_delivery(&delivery);

	switch (verdict)
	{
		case OBIX_RETRY:
			step->outcome = OUTCOME_LATER;
			step->due_at = state.retry_at;
			break;
		case OBIX_STOP:
			step->outcome = OUTCOME_NEVER;
			break;
		case OBIX_DEAD_LETTER:
			break;
	}
	if (verdict != OBIX_RETRY)
		ereport(LOG,
				(verdict == OBIX_STOP ?
				 errmsg("consumer \"%s\" has stopped at event %lld: %s",
						consumer->name, (long long) step->last, step->error) :
				 errmsg("consumer \"%s\" has put event %lld into obix.dead_letter: %s",
						consumer->name, (long long) step->last, step->error)));
}

static void
ask_gate(ObixStep *step)
{
	end_own(step);
	step->gate_open = obix_ask_gate(&step->consumer, step->functions.gate);
}

/* The gate has answered for the first time. */
static void
note_answer(ObixStep *step)
{
	ObixConsumerState state;

	obix_get_state(&step->consumer, &state);
	state.state = OBIX_CONSUMER_ACTIVE;
	state.retry_at = 0;
	state.last_error = NULL;
	obix_set_state(&state);
	obix_turn_prove_gate(step->id);
}

static void
park_for_error(ObixStep *step)
{
	ObixConsumerState state;

	if (!lock_for_session(step))
	{
		step_later(step, BUSY_MS);
		return;
	}
	obix_get_state(&step->consumer, &state);
	park(step, &state, step->error);
	step->count = 0;
}

/*
 * A rebuild has caught up: let it take the place of the live consumer.  Where
 * that is ahead after all, it is claimed, and waits.
 */
static void
hand_over(ObixStep *step)
{
	bool		nothing_left = step->outcome == OUTCOME_CAUGHT_UP &&
		step->live_claimed;

	if (!obix_turn_claim_one(-step->id))
	{
		step_later(step, BUSY_MS);
		return;
	}
	step->live_claimed = true;
	step->outcome = obix_hand_over(&step->consumer, nothing_left) ?
		OUTCOME_GONE : OUTCOME_DONE;
}

static void
analyze(ObixStep *step)
{
	obix_analyze_rebuild(&step->consumer);
}

/* A rebuild cannot take its place. */
static void
stop_for_error(ObixStep *step)
{
	ObixConsumerState state;

	if (!lock_for_session(step))
	{
		step_later(step, BUSY_MS);
		return;
	}
	obix_get_state(&step->consumer, &state);
	state.state = OBIX_CONSUMER_STOPPED;
	obix_set_last_error(&state, step->error);
	obix_set_state(&state);
	step->outcome = OUTCOME_NEVER;
}

/*
 * Run a part of a step in a transaction.  Returns false if it failed, with why
 * in step->error.
 *
 * Anybody can have locked an outbox of theirs, or have a consumer of theirs
 * changed in a transaction that goes on: others must not wait for that.
 */
static bool
run_part(ObixStep *step, void (*part) (ObixStep *step))
{
	Oid			userid;
	int			sec_context;
	volatile bool ok = true;

	GetUserIdAndSecContext(&userid, &sec_context);
	MemoryContextSwitchTo(step_context);
	obix_forget_timeouts();
	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		MemoryContextSwitchTo(step_context);
		PushActiveSnapshot(GetTransactionSnapshot());
		if (part != handle && part != ask_gate)
			obix_xact_commit_locally();
		step->called = false;
		step->nestlevel = NewGUCNestLevel();
		obix_limit_lock_waits();
		(void) obix_keep_extension();	/* if it is gone, so is the consumer */
		part(step);
		if (!step->called)
			AtEOXact_GUC(false, step->nestlevel);
		PopActiveSnapshot();
		CommitTransactionCommand();
		obix_stop_timeout();
		SetUserIdAndSecContext(userid, sec_context);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		HOLD_INTERRUPTS();
		obix_stop_timeout();
		MemoryContextSwitchTo(step_context);
		error = CopyErrorData();
		FlushErrorState();
		AbortCurrentTransaction();
		SetUserIdAndSecContext(userid, sec_context);
		step->locked = false;
		step->error = obix_handler_timed_out() ?
			psprintf("handler ran longer than its timeout of %.0f ms",
					 step->consumer.timeout) : error->message;
		step->sqlerrcode = error->sqlerrcode;
		RESUME_INTERRUPTS();
		ok = false;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(step_context);
	return ok;
}

/* A part failed that is not about an event: park the consumer. */
static void
cannot_serve(ObixStep *step)
{
	const char *error = step->error;

	if (obix_is_busy(step->sqlerrcode) && !step->called)
	{
		step_later(step, LOCKED_MS);
		return;
	}

	/* nothing is wrong with the consumer itself */
	switch (ERRCODE_TO_CATEGORY(step->sqlerrcode))
	{
		case MAKE_SQLSTATE('4', '0', '0', '0', '0'):	/* rollback */
		case MAKE_SQLSTATE('5', '3', '0', '0', '0'):	/* resources */
		case MAKE_SQLSTATE('5', '7', '0', '0', '0'):	/* intervention */
		case MAKE_SQLSTATE('5', '8', '0', '0', '0'):	/* system */
			break;
		default:
			if (run_part(step, park_for_error))
				return;
	}
	ereport(LOG,
			(errmsg("consumer %d cannot be served: %s", step->id, error)));
	step_later(step, GATE_MS);
}

/*
 * Would handlers have to wait for a standby at their commit, for as long as it
 * is not there?  Told to the log when it begins and when it ends, by those who
 * would wait for one: databases can differ in that.
 */
static bool
lacks_standby(void)
{
	bool		lacks = obix_xact_lacks_standby();

	if (obix_xact_waits_for_standby() &&
		pg_atomic_read_u32(&obix_shared->lacks_standby) != lacks &&
		pg_atomic_exchange_u32(&obix_shared->lacks_standby, lacks) != lacks)
		ereport(LOG,
				(lacks ?
				 errmsg("handlers are not called: no synchronous standby confirms commits") :
				 errmsg("handlers are called again: commits no longer lack a synchronous standby")));
	return lacks;
}

/* One step of a consumer: a batch, or one event. */
static ObixOutcome
run_step(ObixStep *step)
{
	if (lacks_standby())
	{
		step_later(step, STANDBY_MS);
		return step->outcome;
	}
	if (!run_part(step, prepare))
		cannot_serve(step);
	if (step->outcome == OUTCOME_GATE)
	{
		if (!run_part(step, ask_gate) ||
			(!obix_turn_gate_proved(step->id) && !run_part(step, note_answer)))
			cannot_serve(step);
		else if (!step->gate_open)
			step_later(step, GATE_MS);
		else if (!run_part(step, prepare))
			cannot_serve(step);
	}
	if (step->outcome == OUTCOME_DONE && step->count > 0)
	{
		pgstat_report_activity(STATE_RUNNING,
							   psprintf("consumer \"%s\": %s", step->consumer.name,
										step->consumer.batch_handler ?
										step->consumer.batch_handler :
										step->consumer.handler));
		if (!run_part(step, handle))
		{
			if (obix_is_busy(step->sqlerrcode) && !step->called)
			{
				(void) run_part(step, take_back);
				step_later(step, LOCKED_MS);
			}
			else if (!run_part(step, step->used_live ? stop_for_error : give_up))
				step_later(step, GATE_MS);
		}
		pgstat_report_activity(STATE_IDLE, NULL);
	}
	if (step->outcome == OUTCOME_CAUGHT_UP ||
		(step->outcome == OUTCOME_DONE && step->live_claimed))
	{
		if (!step->live_claimed)
			(void) run_part(step, analyze);
		if (!run_part(step, hand_over) &&
			(obix_is_busy(step->sqlerrcode) || !run_part(step, stop_for_error)))
			step_later(step, SWAP_MS);
	}
	return step->outcome;
}

/* Serve a consumer that we have claimed.  Returns whether handlers were called. */
static bool
serve_consumer(ObixClaim *claim)
{
	TimestampTz begun = GetCurrentTimestamp();
	int64		seen = 0;
	TimestampTz due_at = 0;
	bool		gate_open = false;
	bool		live_claimed = false;
	bool		worked = false;
	ObixOutcome outcome;

	do
	{
		ObixStep   *step;
		uint32		touched;
		int64		tide;

		QueryCancelPending = false;
		CHECK_FOR_INTERRUPTS();

		/* read before what it is to say something about */
		tide = obix_turn_tide(claim->id, &touched);
		MemoryContextReset(step_context);
		step = MemoryContextAllocZero(step_context, sizeof(ObixStep));
		step->id = claim->id;
		step->gate_open = gate_open;
		step->live_claimed = live_claimed;
		outcome = run_step(step);
		gate_open = step->gate_open;
		live_claimed = step->live_claimed;
		worked |= step->count > 0;
		unlock_for_session(step);
		if (step->events != NULL)
			tuplestore_end(step->events);
		if (outcome == OUTCOME_NOTHING)
		{
			seen = tide;
			claim->touched = touched;
		}
		due_at = outcome == OUTCOME_LATER ? step->due_at : 0;
	} while (outcome == OUTCOME_DONE && obix_turn_may_go_on(claim->id) &&
			 !TimestampDifferenceExceeds(begun, GetCurrentTimestamp(), TURN_MS));

	obix_clean_session();
	if (live_claimed)
		obix_turn_unclaim(-claim->id);

	/* one that is not there may just be being created, or dropped */
	obix_turn_end(claim, outcome == OUTCOME_NEVER || outcome == OUTCOME_GONE ?
				  OBIX_SEEN_ALL : seen, due_at);
	return worked;
}

/*
 * Serve the consumer whose turn it is.  Returns false if there is none: due_at
 * is when there will be one without anything happening, 0 for never.  worked is
 * set if handlers were called.
 */
static bool
serve_next(TimestampTz *due_at, bool *worked)
{
	ObixClaim	claim;

	obix_clear_dispatch();
	if (!obix_turn_claim(GetCurrentTimestamp(), &claim))
	{
		*due_at = claim.due_at;
		return false;
	}
	obix_set_busy(obix_worker_place, true);
	if (claim.more)
		obix_wake_dispatcher(MyDatabaseId);
	if (obix_enabled)
		*worked |= serve_consumer(&claim);
	else
		obix_turn_end(&claim, 0,
					  TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
												  DISABLED_MS));
	obix_set_busy(obix_worker_place, false);
	return true;
}

/* Before the process ends, whatever ends it. */
static void
end_turns(int code, Datum arg)
{
	obix_turn_end_all();
}

void
obix_dispatcher_main(Datum arg)
{
	TimestampTz last_busy = 0;
	bool		worked = false;

	obix_begin_worker(arg);
	before_shmem_exit(end_turns, (Datum) 0);
	step_context = AllocSetContextCreate(TopMemoryContext, "obix step",
										 ALLOCSET_DEFAULT_SIZES);
	obix_handler_init();

	for (;;)
	{
		TimestampTz due_at;
		TimestampTz leave_at;
		TimestampTz now;

		(void) obix_worker_interrupts();
		obix_leave_if_outdated();
		if (obix_dispatch_workers == 0)
			break;
		if (serve_next(&due_at, &worked))
		{
			if (obix_worker_makes_way())
				break;
			continue;
		}
		now = GetCurrentTimestamp();
		if (worked)
			last_busy = now;
		worked = false;

		/* who is only to ask gates need not stay in between */
		leave_at = TimestampTzPlusMilliseconds(last_busy, obix_worker_linger);
		if (now >= leave_at || obix_short_of_workers())
			break;
		if (due_at == 0 || due_at > leave_at)
			due_at = leave_at;
		obix_worker_sleep(TimestampDifferenceMilliseconds(now, due_at),
						  WL_LATCH_SET);
	}
	obix_end_worker();
}
