/*-------------------------------------------------------------------------
 *
 * fetch.c
 *	  SQL functions of those who consume from outside: fetch, acknowledge, hold.
 *
 * All that is known of a consumer stands in its tables, so it does not matter
 * through which session any of these comes.  Fetching holds the mutex of the
 * consumer to the end of the transaction: two who fetch in transactions do not
 * get the same events.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "tcop/pquery.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "consumer.h"
#include "delivery.h"
#include "read.h"
#include "turn.h"
#include "waiters.h"

/* How often to look while shared memory cannot tell */
#define UNSURE_POLL_MS		1000

/* The same while somebody else fetches */
#define BUSY_POLL_MS		100

PG_FUNCTION_INFO_V1(obix_fetch);
PG_FUNCTION_INFO_V1(obix_ack);
PG_FUNCTION_INFO_V1(obix_fail);
PG_FUNCTION_INFO_V1(obix_acquire);
PG_FUNCTION_INFO_V1(obix_renew);
PG_FUNCTION_INFO_V1(obix_release_lease);
PG_FUNCTION_INFO_V1(obix_wait_for);

/*
 * Have shared memory know a consumer; false if there is no room.  It may have
 * been dropped since it was found, and then nobody would free its place.
 */
static bool
enter_turns(ObixConsumer *consumer)
{
	bool		entered = obix_turn_add(consumer->id, consumer->outbox, false,
										consumer->available);
	ObixConsumer found;

	if (!obix_get_consumer(consumer->id, &found))
		obix_turn_forget(MyDatabaseId, InvalidOid, consumer->id);
	obix_open_consumer(consumer->name, consumer);
	return entered;
}

/* Find the consumer in the first argument, which must be one without handlers. */
static void
get_consumer(FunctionCallInfo fcinfo, const char *function,
			 ObixConsumer *consumer)
{
	ItemPointerData tid;

	obix_check_writable(function);
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), consumer);
	if (consumer->handler != NULL || consumer->batch_handler != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("consumer \"%s\" has handlers", consumer->name),
				 errdetail("Its events are delivered to them, and to nobody else."),
				 errhint("Create another consumer to fetch the events of the same outbox.")));
	if (!obix_turn_get_tid(consumer->id, &tid))
		(void) enter_turns(consumer);
}

static bool
is_leased(const ObixConsumerState *state)
{
	return state->lease_until != 0 && state->lease_until > GetCurrentTimestamp();
}

/*
 * Error out unless whoever bears a token, or none, may use a consumer now.
 */
static void
check_token(FunctionCallInfo fcinfo, int argument, const ObixConsumer *consumer,
			const ObixConsumerState *state)
{
	bool		leased = is_leased(state);

	if (PG_ARGISNULL(argument))
	{
		if (leased)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("consumer \"%s\" is held by somebody else",
							consumer->name),
					 errdetail("Its lease lasts until %s.",
							   timestamptz_to_str(state->lease_until)),
					 errhint("Give the token that obix.acquire returned, or wait for the end of the lease.")));
	}
	else if (PG_GETARG_INT64(argument) != state->token || !leased)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("token %lld does not hold consumer \"%s\" any more",
						(long long) PG_GETARG_INT64(argument), consumer->name),
				 PG_GETARG_INT64(argument) != state->token ?
				 errdetail("The last token is %lld.", (long long) state->token) :
				 errdetail("Its lease has ended."),
				 errhint("What was fetched with it may have been delivered to somebody else; call obix.acquire for another token.")));
}

static void
unlock_consumer(int32 id)
{
	LOCKTAG		tag;

	obix_set_consumer_tag(&tag, id);
	(void) LockRelease(&tag, ExclusiveLock, false);
}

/*
 * obix.fetch(consumer, max_events, max_bytes, token, wait)
 */
Datum
obix_fetch(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"consumer", "max_events", "max_bytes", NULL, "wait"};
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	ObixConsumer consumer;
	ObixConsumerState state;
	ObixDelivery delivery = {0};
	ItemPointerData before;
	uint32		touched;
	int64		tide;

	obix_check_not_null(fcinfo, names, lengthof(names));
	delivery.reader.max_events = PG_GETARG_INT32(1);
	delivery.reader.max_bytes = PG_GETARG_INT64(2);
	obix_check_page(delivery.reader.max_events, delivery.reader.max_bytes);
	get_consumer(fcinfo, "obix.fetch()", &consumer);
	InitMaterializedSRF(fcinfo, 0);

	if (PG_GETARG_BOOL(4))
		obix_lock_consumer(consumer.id);
	else if (!obix_try_lock_consumer(consumer.id))
		return (Datum) 0;

	/* what it wants may have been altered while we waited */
	obix_open_consumer(consumer.name, &consumer);
	tide = obix_turn_tide(consumer.id, &touched);
	obix_get_state(&consumer, &state);
	before = state.tid;
	check_token(fcinfo, 3, &consumer, &state);
	if (state.state == OBIX_CONSUMER_STOPPED)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("consumer \"%s\" has stopped at event %lld",
						consumer.name, (long long) state.attempt_sequence),
				 errdetail("The last of %d attempts at it failed: %s",
						   state.attempts,
						   state.last_error ? state.last_error : "?"),
				 errhint("Call obix.resume to try again, or obix.seek to go on elsewhere.")));
	if (!consumer.paused && obix_may_try(&state, GetCurrentTimestamp()))
	{
		delivery.reader.store = result->setResult;
		delivery.reader.desc = result->setDesc;
		obix_begin_delivery(&delivery, &consumer, &state, "obix.fetch");
		obix_deliver_next(&delivery);
		obix_end_delivery(&delivery);
		if (delivery.reader.events == 0 && !IsolationUsesXactSnapshot() &&
			!delivery.unsure && !delivery.more)
			obix_turn_idle(consumer.id, touched, tide);
	}

	/* nothing to keep from others, or a lease does that */
	if ((delivery.reader.events == 0 || !PG_ARGISNULL(3)) && !state.own &&
		ItemPointerEquals(&before, &state.tid))
		unlock_consumer(consumer.id);
	return (Datum) 0;
}

/* Begin to acknowledge, or to report a failure: under the mutex. */
static void
begin_answer(FunctionCallInfo fcinfo, const char *function, int token,
			 ObixConsumer *consumer, ObixConsumerState *state,
			 ObixDelivery *delivery)
{
	if (PG_GETARG_INT64(1) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("sequence must not be negative")));
	get_consumer(fcinfo, function, consumer);
	obix_lock_consumer(consumer->id);
	obix_open_consumer(consumer->name, consumer);
	obix_get_state(consumer, state);
	check_token(fcinfo, token, consumer, state);
	delivery->reader.desc = obix_event_desc();
	obix_begin_delivery(delivery, consumer, state, function);
}

/*
 * obix.ack(consumer, sequence, token)
 */
Datum
obix_ack(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"consumer", "sequence"};
	ObixConsumer consumer;
	ObixConsumerState state;
	ObixDelivery delivery = {0};

	obix_check_not_null(fcinfo, names, lengthof(names));
	begin_answer(fcinfo, "obix.ack()", 2, &consumer, &state, &delivery);
	obix_acknowledge(&delivery, PG_GETARG_INT64(1));
	obix_end_delivery(&delivery);
	PG_RETURN_VOID();
}

/*
 * obix.fail(consumer, sequence, error, token)
 */
Datum
obix_fail(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"consumer", "sequence", "error"};
	ObixConsumer consumer;
	ObixConsumerState state;
	ObixDelivery delivery = {0};
	int64		sequence;

	obix_check_not_null(fcinfo, names, lengthof(names));
	sequence = PG_GETARG_INT64(1);
	begin_answer(fcinfo, "obix.fail()", 3, &consumer, &state, &delivery);
	obix_check_handed_out(&delivery, sequence);
	obix_count_attempt(&consumer, &state, sequence);
	(void) obix_fail_event(&delivery, sequence,
						   text_to_cstring(PG_GETARG_TEXT_PP(2)));
	obix_end_delivery(&delivery);
	PG_RETURN_VOID();
}

/* When a lease that begins now ends. */
static TimestampTz
lease_end(const Interval *lease)
{
	double		ms = obix_interval_ms(lease);

	if (ms <= 0 || ms > PG_INT32_MAX * 1000.0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("lease must be longer than 0 and not longer than 68 years")));
	return TimestampTzPlusMilliseconds(GetCurrentTimestamp(), (int64) ms);
}

/*
 * obix.acquire(consumer, lease)
 */
Datum
obix_acquire(PG_FUNCTION_ARGS)
{
	ObixConsumer consumer;
	ObixConsumerState state;
	TimestampTz until = lease_end(PG_GETARG_INTERVAL_P(1));

	get_consumer(fcinfo, "obix.acquire()", &consumer);
	if (!obix_try_lock_consumer(consumer.id))
		PG_RETURN_NULL();		/* somebody fetches in a transaction */
	obix_get_state(&consumer, &state);
	if (is_leased(&state))
	{
		unlock_consumer(consumer.id);	/* the holder needs it */
		PG_RETURN_NULL();
	}
	state.token++;
	state.lease_until = until;
	obix_set_state(&state);
	PG_RETURN_INT64(state.token);
}

/* Change the end of a lease for whoever bears the last token. */
static void
set_lease(FunctionCallInfo fcinfo, const char *function, TimestampTz until)
{
	ObixConsumer consumer;
	ObixConsumerState state;

	get_consumer(fcinfo, function, &consumer);
	obix_lock_consumer(consumer.id);
	obix_get_state(&consumer, &state);
	if (PG_GETARG_INT64(1) != state.token || state.lease_until == 0)
		check_token(fcinfo, 1, &consumer, &state);
	state.lease_until = until;
	obix_set_state(&state);
}

/*
 * obix.renew(consumer, token, lease): also after the lease has ended, as long
 * as nobody else has acquired the consumer.
 */
Datum
obix_renew(PG_FUNCTION_ARGS)
{
	set_lease(fcinfo, "obix.renew()", lease_end(PG_GETARG_INTERVAL_P(2)));
	PG_RETURN_VOID();
}

/*
 * obix.release(consumer, token)
 */
Datum
obix_release_lease(PG_FUNCTION_ARGS)
{
	set_lease(fcinfo, "obix.release()", 0);
	PG_RETURN_VOID();
}

/*
 * How long to wait for a consumer, in milliseconds: 0 if there may be something
 * to fetch.  Takes a snapshot, and gives it back.
 */
static long
how_long(const ObixConsumer *before, ObixOutbox *shared, int32 outbox_id,
		 bool known, long left)
{
	TimestampTz now = GetCurrentTimestamp();
	ObixConsumer consumer;
	ObixConsumerState state;
	ObixPosition position;

	if (!obix_get_position(shared, before->outbox, outbox_id, &position))
		return 0;				/* dropped: fetching says so */
	PushActiveSnapshot(GetTransactionSnapshot());
	obix_open_consumer(before->name, &consumer);
	obix_get_state(&consumer, &state);
	PopActiveSnapshot();
	InvalidateCatalogSnapshot();

	if (consumer.paused)
		return left;
	if (state.state == OBIX_CONSUMER_STOPPED)
		return 0;
	if (!obix_may_try(&state, now))
	{
		/* a further failure may settle it sooner, and tells nobody */
		left = Min(left, UNSURE_POLL_MS);
		return Min(left, TimestampDifferenceMilliseconds(now, state.retry_at) + 1);
	}
	if (!known)
		return Min(left, UNSURE_POLL_MS);
	if (obix_turn_is_idle(consumer.id))
		return left;

	/* somebody fetches for it in a transaction: there would be nothing */
	if (!obix_try_lock_consumer(consumer.id))
		return Min(left, BUSY_POLL_MS);
	unlock_consumer(consumer.id);
	return 0;
}

/*
 * CALL obix.wait_for(consumer, timeout)
 *
 * Sleeps in the queue of the outbox (waiters.c) while nothing has happened
 * since somebody last fetched and found nothing.  Where shared memory cannot
 * tell, while holes have yet to be dealt with, returns after a second.
 */
Datum
obix_wait_for(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"consumer", "timeout"};
	ObixConsumer consumer;
	ObixRelation *known;
	ObixOutbox *shared;
	Relation	parent;
	TimestampTz end;
	int32		outbox_id;
	MemoryContext scratch;
	bool		in_turns;
	bool		dropped = false;
	bool		slept = false;

	obix_check_not_null(fcinfo, names, lengthof(names));
	end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
									  obix_get_timeout(PG_GETARG_INTERVAL_P(1)));
	get_consumer(fcinfo, "obix.wait_for()", &consumer);
	parent = obix_open_for_reading(consumer.outbox, "obix.wait_for", &known);
	shared = obix_attach(parent, known);
	outbox_id = known->id;
	table_close(parent, AccessShareLock);
	in_turns = enter_turns(&consumer);
	scratch = AllocSetContextCreate(CurrentMemoryContext, "obix wait",
									ALLOCSET_SMALL_SIZES);

	for (;;)
	{
		MemoryContext caller;
		ObixPosition position;
		long		left;
		bool		unsure;

		CHECK_FOR_INTERRUPTS();

		/* join the queue before looking, lest a wake-up come in between */
		(void) obix_join_waiters(shared);
		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), end);
		if (left <= 0)
			break;
		caller = MemoryContextSwitchTo(scratch);
		left = how_long(&consumer, shared, outbox_id, in_turns, left);
		MemoryContextSwitchTo(caller);
		MemoryContextReset(scratch);
		if (left <= 0)
			break;

		if (!dropped)
			obix_drop_snapshot("obix.wait_for");
		dropped = true;

		unsure = !in_turns ||
			(obix_get_position(shared, consumer.outbox, outbox_id, &position) &&
			 position.suspect_from != 0);
		if (unsure)
			left = Min(left, UNSURE_POLL_MS);
		if (!obix_sleep(left))
			slept = true;
		else if (unsure)
			break;
	}
	obix_leave_waiters();
	if (dropped)
		EnsurePortalSnapshotExists();
	if (!slept)
		obix_return_in_turn(shared, TimestampDifferenceMilliseconds(GetCurrentTimestamp(), end));
	PG_RETURN_VOID();
}
