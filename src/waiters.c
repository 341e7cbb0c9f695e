/*-------------------------------------------------------------------------
 *
 * waiters.c
 *	  Sessions that wait until an outbox moves, and how they are woken.
 *
 * To wake a hundred of them would cost a publisher more than its own
 * transaction, and what they do then takes the processors away from all
 * publishers.  So whoever moves the outbox wakes one session at most, the one
 * that has waited longest; who has been woken wakes the next two before it does
 * anything else: with one, a hundred would have to get hold of a processor one
 * after the other.  One such chain is under way at a time.
 *
 * That an outbox has moved is a wave.  Who joins the queue notes the last wave
 * and looks at the outbox after that, so nobody has to be woken for a wave that
 * it has noted.  Sessions join at the end, so the chain has come to its end when
 * the first in the queue has noted the last wave; one that begins while the
 * chain is under way is carried by the same chain.
 *
 * Where many wait and the outbox moves all the time, those who have been woken
 * go on no faster than processors can bear: then everybody gets more events at a
 * time.  Each waits for a turn of its own, after it has woken the next.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <unistd.h>

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/ipc.h"
#include "storage/proc.h"

#include "compat.h"
#include "waiters.h"

/*
 * Each processor is good for so many wake-ups a second, each of which makes a
 * session and its client read.  What was not used up for a second is to be had at
 * once.
 */
#define WAKEUPS_PER_SECOND	500

/*
 * Nobody waits for a turn longer than this, in microseconds: turns are ahead, and
 * nobody's, where sessions that took one were cancelled.
 */
#define LONGEST_TURN		USECS_PER_SEC

/*
 * When somebody has not woken the next for so long, in microseconds, another
 * chain is begun: it may have been stopped, or have died.
 */
#define LATE				50000

/*
 * A session.  Everything but the latch is protected by the lock of the outbox
 * that it waits for.
 */
typedef struct ObixWaiter
{
	dlist_node	node;			/* in ObixOutbox.waiters while queued */
	Latch	   *latch;
	int64		wave;			/* the last when it joined */
	bool		queued;
	bool		asleep;			/* or about to sleep: it has looked */
	bool		woken;			/* it was taken out, and is to wake the next */
	int64		end;			/* it waits no longer than this */
	int64		due;			/* when it may go on, once woken */
} ObixWaiter;

static ObixWaiter *waiters = NULL;	/* by MyProcNumber */
static ObixOutbox *waits_for = NULL;	/* queued or woken there */

Size
obix_waiters_shmem_size(void)
{
	return mul_size(MaxBackends, sizeof(ObixWaiter));
}

void
obix_waiters_shmem_init(void *space)
{
	waiters = space;
}

/* Microseconds on a clock that all processes share and nobody sets. */
static int64
clock_now(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/* How long a wake-up keeps the processors busy, in microseconds. */
static int64
wakeup_cost(void)
{
	static int64 cost = 0;

	if (cost == 0)
		cost = Max(1, USECS_PER_SEC / WAKEUPS_PER_SECOND /
				   Max(1, sysconf(_SC_NPROCESSORS_ONLN)));
	return cost;
}

/*
 * When a session may go on, which it does at end in any case.  The few that came
 * last need no turn; there may be only they.  Nor does one take a turn that comes
 * too late for it: who looks again and again, and hardly waits, would take more
 * of them than there are.  The caller holds the lock of the outbox.
 */
static int64
take_turn(ObixOutbox *outbox, int session, int64 now, int64 end)
{
	int			i = 0;
	int64		turn = now;

	while (i < OBIX_FEW_WAITERS - 1 && outbox->last_woken[i] != session + 1)
		i++;
	if (outbox->last_woken[i] != session + 1)
	{
		turn = Min(Max(outbox->next_turn, now - USECS_PER_SEC),
				   now + LONGEST_TURN);
		if (turn > end)
			return end;
		outbox->next_turn = turn + wakeup_cost();
	}
	for (; i > 0; i--)
		outbox->last_woken[i] = outbox->last_woken[i - 1];
	outbox->last_woken[0] = session + 1;
	return turn;
}

/*
 * The next in the queue is to be woken: returns its latch, for when the lock is
 * released, or NULL where the chain has come to its end.
 */
static Latch *
wake_next(ObixOutbox *outbox, int64 now)
{
	while (!dlist_is_empty(&outbox->waiters))
	{
		ObixWaiter *next = dlist_head_element(ObixWaiter, node,
											  &outbox->waiters);

		if (next->wave == outbox->wave)
			break;
		dlist_delete(&next->node);
		next->queued = false;
		next->woken = true;
		next->due = 0;

		/* who is still looking finds out; it may be held up before that */
		if (!next->asleep)
			continue;

		next->due = take_turn(outbox, next - waiters, now, next->end);
		outbox->woken_at = now;
		return next->latch;
	}
	return NULL;
}

/* Who has been woken wakes the next two. */
static void
go_on(ObixOutbox *outbox, int64 now, Latch *next[2])
{
	next[0] = wake_next(outbox, now);
	next[1] = next[0] != NULL ? wake_next(outbox, now) : NULL;
	outbox->waking = next[0] != NULL;
}

static void
set_latches(Latch *next[2])
{
	for (int i = 0; i < 2; i++)
	{
		if (next[i] != NULL)
			SetLatch(next[i]);
	}
}

/*
 * Have those who wait look again.  The caller holds the lock of the outbox
 * exclusively, and sets the latch, if one is returned, after it.  Raises nothing.
 */
Latch *
obix_begin_wave(ObixOutbox *outbox)
{
	int64		now;
	Latch	   *first;

	outbox->wave++;
	if (likely(dlist_is_empty(&outbox->waiters)))
		return NULL;
	now = clock_now();
	if (outbox->waking && now < outbox->woken_at + LATE)
		return NULL;
	first = wake_next(outbox, now);
	outbox->waking = first != NULL;
	return first;
}

/*
 * The entry of an outbox is being freed: nobody waits for it any more.  The
 * caller holds its lock exclusively.  Raises nothing.
 */
void
obix_dismiss_waiters(ObixOutbox *outbox)
{
	while (!dlist_is_empty(&outbox->waiters))
	{
		ObixWaiter *waiter = dlist_container(ObixWaiter, node,
											 dlist_pop_head_node(&outbox->waiters));

		waiter->queued = false;
		waiter->woken = true;
		waiter->due = 0;
		SetLatch(waiter->latch);
	}
	outbox->waking = false;
}

static void
leave_at_exit(int code, Datum arg)
{
	obix_leave_waiters();
}

/*
 * Join the queue, unless this session is in it, and then look whether there is
 * still something to wait for: a wave from now on wakes it.  Returns false if it
 * was there.
 */
bool
obix_join_waiters(ObixOutbox *outbox)
{
	static bool arranged = false;
	ObixWaiter *self = &waiters[MyProcNumber];

	if (waits_for == outbox)
		return false;
	obix_leave_waiters();
	if (!arranged)
		on_shmem_exit(leave_at_exit, (Datum) 0);
	arranged = true;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	waits_for = outbox;
	self->latch = MyLatch;
	self->wave = outbox->wave;
	self->asleep = false;
	self->woken = false;
	self->queued = true;
	dlist_push_tail(&outbox->waiters, &self->node);
	LWLockRelease(outbox->lock);
	return true;
}

/*
 * If this session has been woken, it wakes the next, and waits no longer, but for
 * its turn at due; else it is going to sleep, until end.
 */
static bool
pass_on(int64 now, int64 end, int64 *due)
{
	ObixOutbox *outbox = waits_for;
	ObixWaiter *self = &waiters[MyProcNumber];
	Latch	   *next[2] = {NULL, NULL};
	bool		woken;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	woken = self->woken;
	self->asleep = true;
	self->end = end;
	*due = self->due;
	if (woken)
	{
		self->woken = false;
		waits_for = NULL;
		go_on(outbox, now, next);
	}
	LWLockRelease(outbox->lock);
	set_latches(next);
	return woken;
}

/*
 * Sleep until this session, which has joined the queue of an outbox, is woken.
 * Returns whether the timeout, in milliseconds, has come before that.  In any
 * case it is no longer in the queue then.
 */
bool
obix_sleep(long timeout)
{
	int64		now = clock_now();
	int64		end = now + timeout * INT64CONST(1000);
	int64		due;

	while (!pass_on(now, end, &due))
	{
		if (now >= end)
		{
			obix_leave_waiters();
			return true;
		}

		/* after the next has been woken: to report an error can take long */
		CHECK_FOR_INTERRUPTS();
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 (long) ((end - now + 999) / 1000),
						 obix_wait_event(OBIX_WAIT_EVENT));
		ResetLatch(MyLatch);
		now = clock_now();
	}

	/* a turn is measured in less than milliseconds: rather too early */
	obix_await_turn((long) ((due - now) / 1000));
	return false;
}

/*
 * There is something to read for a session that has just asked, so it need not
 * wait; but it comes round no sooner than if it had been woken.  Returns how many
 * milliseconds it is to sleep before that, at most timeout.
 */
long
obix_take_turn(ObixOutbox *outbox, long timeout)
{
	int64		now = clock_now();
	int64		turn;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	turn = take_turn(outbox, MyProcNumber, now,
					 now + timeout * INT64CONST(1000));
	LWLockRelease(outbox->lock);
	return (long) (Max(turn - now, 0) / 1000);
}

/* Sleep for so many milliseconds, whatever happens but an interrupt. */
void
obix_await_turn(long timeout)
{
	int64		end = clock_now() + timeout * INT64CONST(1000);

	for (;;)
	{
		timeout = (long) ((end - clock_now() + 999) / 1000);
		if (timeout <= 0)
			break;
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 timeout, obix_wait_event(OBIX_WAIT_EVENT));
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

/*
 * Leave the queue.  Who has been woken wakes the next in any case.  Raises
 * nothing: runs in the transaction callback.
 */
void
obix_leave_waiters(void)
{
	ObixOutbox *outbox = waits_for;
	ObixWaiter *self;
	Latch	   *next[2] = {NULL, NULL};

	if (likely(outbox == NULL))
		return;
	waits_for = NULL;
	self = &waiters[MyProcNumber];
	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	if (self->queued)
	{
		dlist_delete(&self->node);
		self->queued = false;
	}
	else if (self->woken)
		go_on(outbox, clock_now(), next);
	self->woken = false;
	LWLockRelease(outbox->lock);
	set_latches(next);
}
