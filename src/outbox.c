/*-------------------------------------------------------------------------
 *
 * outbox.c
 *	  Shared state of outboxes: who has which sequences in flight.
 *
 * This is to sequences what the ProcArray is to transaction ids.  A backend
 * that allocates puts the first sequence of its transaction into its slot, and
 * slots are listed in that order, so the frontier is one less than the head of
 * the list: constant time, whatever the number of sessions.
 *
 * All holes are one number, suspect_from: the lowest sequence that may be a
 * hole not yet dealt with.  Whoever may leave a hole lowers it, the walk of
 * gapfill.c moves it up.
 *
 * Nothing here outlives a restart, and nothing here decides what a reader is
 * given: that is the table alone.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "obix.h"
#include "outbox.h"
#include "progress.h"
#include "turn.h"
#include "waiters.h"
#include "work.h"

#define OBIX_TRANCHE_NAME	"obix"

ObixShared *obix_shared = NULL;
static char *obix_entries = NULL;	/* array of ObixOutbox, of entry_size() */

static Size
entry_size(void)
{
	return MAXALIGN(add_size(offsetof(ObixOutbox, slots),
							 mul_size(MaxBackends, sizeof(ObixSlot))));
}

/* The n-th entry, used or not, from 0 to obix_max_outboxes - 1. */
ObixOutbox *
obix_nth_outbox(int n)
{
	return (ObixOutbox *) (obix_entries + n * entry_size());
}

/* ObixShared, then the outboxes, the consumers, operations, and those who wait */
static Size
shmem_size(void)
{
	Size		size = MAXALIGN(sizeof(ObixShared));

	size = add_size(size, mul_size(obix_max_outboxes, entry_size()));
	size = add_size(size, MAXALIGN(obix_turn_shmem_size()));
	size = add_size(size, MAXALIGN(obix_progress_shmem_size()));
	return add_size(size, obix_waiters_shmem_size());
}

void
obix_shmem_request(void)
{
	RequestAddinShmemSpace(shmem_size());
	RequestNamedLWLockTranche(OBIX_TRANCHE_NAME, obix_max_outboxes + 4);
}

void
obix_shmem_startup(void)
{
	bool		found;
	char	   *space;
	LWLockPadded *locks;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);

	obix_shared = ShmemInitStruct("obix", shmem_size(), &found);
	obix_entries = (char *) obix_shared + MAXALIGN(sizeof(ObixShared));
	space = (char *) obix_nth_outbox(obix_max_outboxes);
	obix_turn_shmem_init(space);
	space += MAXALIGN(obix_turn_shmem_size());
	obix_progress_shmem_init(space);
	space += MAXALIGN(obix_progress_shmem_size());
	obix_waiters_shmem_init(space);

	if (!found)
	{
		locks = GetNamedLWLockTranche(OBIX_TRANCHE_NAME);
		memset(obix_shared, 0, shmem_size());
		obix_shared->lock = &(locks++)->lock;
		obix_shared->worker_lock = &(locks++)->lock;
		obix_shared->turn_lock = &(locks++)->lock;
		obix_shared->progress_lock = &(locks++)->lock;
		pg_atomic_init_u32(&obix_shared->undecided, 0);
		pg_atomic_init_u32(&obix_shared->short_of_workers, 0);
		pg_atomic_init_u32(&obix_shared->database_news, 0);
		pg_atomic_init_u32(&obix_shared->lacks_standby, 0);
		pg_atomic_init_u32(&obix_shared->extension_changes, 0);

		for (int i = 0; i < obix_max_outboxes; i++)
		{
			ObixOutbox *outbox = obix_nth_outbox(i);

			outbox->lock = &(locks++)->lock;
			pg_atomic_init_u32(&outbox->work, 0);
			pg_atomic_init_u32(&outbox->dispatch, 0);
			dlist_init(&outbox->waiters);
			dlist_init(&outbox->in_flight);
		}
	}

	LWLockRelease(AddinShmemInitLock);
}

/* How pg_stat_activity shows what is waited for, from PostgreSQL 17 on. */
uint32
obix_wait_event(ObixWaitEvent event)
{
	static const char *const names[OBIX_WAIT_EVENTS] = {
		[OBIX_WAIT_LAUNCHER] = "ObixLauncherMain",
		[OBIX_WAIT_WORKER] = "ObixWorkerMain",
		[OBIX_WAIT_EVENT] = "ObixWait",
		[OBIX_WAIT_MAINTENANCE] = "ObixMaintenance",
		[OBIX_WAIT_REBUILD] = "ObixRebuild",
	};
	static uint32 known[OBIX_WAIT_EVENTS];

	if (known[event] == 0)
		known[event] = WaitEventExtensionNew(names[event]);
	return known[event];
}

/* Error out unless obix has its shared memory. */
void
obix_require_preload(void)
{
	if (obix_shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("obix is not loaded by the server"),
				 errdetail("obix needs shared memory and background workers."),
				 errhint("Add obix to shared_preload_libraries and restart the server.")));
}

/*
 * The arithmetic of an entry.  The caller holds its lock.
 */

static int64
frontier_of(ObixOutbox *outbox)
{
	if (dlist_is_empty(&outbox->in_flight))
		return outbox->next_sequence - 1;
	return dlist_head_element(ObixSlot, node, &outbox->in_flight)->first - 1;
}

static int64
high_water_mark_of(ObixOutbox *outbox)
{
	int64		frontier = frontier_of(outbox);

	if (outbox->suspect_from != 0 && outbox->suspect_from <= frontier)
		return outbox->suspect_from - 1;
	return frontier;
}

static void
add_suspects(ObixOutbox *outbox, int64 from, int64 to)
{
	if (outbox->suspect_from == 0 || from < outbox->suspect_from)
		outbox->suspect_from = from;
	if (to > outbox->suspect_to)
		outbox->suspect_to = to;
}

/* Raise the head over sequences that were not given out here. */
static void
raise_next(ObixOutbox *outbox, int64 next)
{
	if (next > outbox->next_sequence + 1)
		add_suspects(outbox, outbox->next_sequence, next - 2);
	if (next > outbox->next_sequence)
		outbox->next_sequence = next;
}

static void
set_undecided(ObixOutbox *outbox, int64 undecided)
{
	if (outbox->undecided == 0 && undecided != 0)
		pg_atomic_fetch_add_u32(&obix_shared->undecided, 1);
	else if (outbox->undecided != 0 && undecided == 0)
		pg_atomic_fetch_sub_u32(&obix_shared->undecided, 1);
	outbox->undecided = undecided;
}

/* Is there something that a walk from suspect_from could settle? */
static bool
wants_walk(ObixOutbox *outbox)
{
	return outbox->suspect_from != 0 &&
		outbox->suspect_from != outbox->undecided &&
		outbox->suspect_from <= frontier_of(outbox);
}

/*
 * Count what has happened, under the lock: the high-water mark has moved, or
 * something may have been committed above it.  Returns whether anybody is
 * concerned, and who is to be woken.
 */
static bool
count_move(ObixOutbox *outbox, bool moved, Latch **waiter)
{
	outbox->releases++;
	if (moved)
		outbox->moves++;
	if (!moved && !outbox->available)
		return false;
	*waiter = obix_begin_wave(outbox);
	return true;
}

/*
 * After the lock is released: somebody is concerned by a move, one of those who
 * wait is to be woken, or there is something to walk for.  Raises nothing.
 */
static void
tell(ObixOutbox *outbox, bool moved, Latch *waiter, bool walk)
{
	if (waiter != NULL)
		SetLatch(waiter);
	if (moved)
	{
		if (outbox->handled)
			obix_request_dispatch(outbox);
		if (obix_notify)
			obix_request_work(outbox, OBIX_WORK_NOTIFY);
	}
	if (walk)
		obix_request_work(outbox, OBIX_WORK_FILL);
}

/*
 * Directory
 */

static bool
has_key(ObixOutbox *outbox, Oid relation, int32 id)
{
	return outbox->relation == relation && outbox->id == id &&
		outbox->database == MyDatabaseId;
}

/*
 * Find the entry of an outbox of this database, NULL if it has none.  It stays
 * valid as long as the caller holds any lock on the relation: who drops an
 * outbox has locked out everybody else.
 */
ObixOutbox *
obix_find_outbox(Oid relation, int32 id)
{
	ObixOutbox *found = NULL;

	LWLockAcquire(obix_shared->lock, LW_SHARED);
	for (int i = 0; i < obix_max_outboxes && found == NULL; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (has_key(outbox, relation, id))
			found = outbox;
	}
	LWLockRelease(obix_shared->lock);
	return found;
}

/*
 * Make the entry of an outbox of this database, unless another session was
 * faster, and return it.  head: the highest sequence that the table knows of;
 * nothing can have been allocated since the caller looked, for allocating
 * takes an entry.  resolved: where holes may begin.  Returns NULL if there is no
 * room for another entry.
 */
ObixOutbox *
obix_make_outbox(Oid relation, int32 id, int64 head, int64 resolved)
{
	ObixOutbox *free = NULL;

	LWLockAcquire(obix_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (has_key(outbox, relation, id))
		{
			LWLockRelease(obix_shared->lock);
			return outbox;
		}
		if (free == NULL && !OidIsValid(outbox->database))
			free = outbox;
	}

	if (free == NULL)
	{
		LWLockRelease(obix_shared->lock);
		return NULL;
	}

	LWLockAcquire(free->lock, LW_EXCLUSIVE);
	free->next_sequence = head + 1;
	free->suspect_from = head > resolved ? resolved + 1 : 0;
	free->suspect_to = head;
	free->premake_at = 0;		/* the first allocation asks */
	free->premake_time = 0;
	free->accepting = false;
	free->handled = false;
	free->available = false;
	free->moves = 1;
	free->releases = 1;
	free->placeholders = 0;
	free->rewinds = 0;
	memset(free->troubles, 0, sizeof(free->troubles));
	pg_atomic_write_u32(&free->work, 0);
	pg_atomic_write_u32(&free->dispatch, 0);
	free->relation = relation;
	free->id = id;
	free->database = MyDatabaseId;
	LWLockRelease(free->lock);
	LWLockRelease(obix_shared->lock);

	if (head > resolved)
		obix_request_work(free, OBIX_WORK_FILL);
	return free;
}

/*
 * Free the entry of a relation of a database, or with InvalidOid those of all.
 * The caller has locked everybody else out, so no slot is in use but perhaps
 * its own.  Waiters find the key gone.  Raises nothing: runs at commit.
 */
void
obix_free_outboxes(Oid database, Oid relation)
{
	LWLockAcquire(obix_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);
		bool		match = outbox->database == database &&
			(!OidIsValid(relation) || outbox->relation == relation);

		if (!match)
			continue;
		LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
		outbox->database = InvalidOid;
		outbox->relation = InvalidOid;
		outbox->id = 0;
		set_undecided(outbox, 0);
		while (!dlist_is_empty(&outbox->in_flight))
		{
			dlist_node *node = dlist_pop_head_node(&outbox->in_flight);

			dlist_container(ObixSlot, node, node)->first = 0;
		}
		outbox->in_flight_count = 0;
		obix_dismiss_waiters(outbox);
		LWLockRelease(outbox->lock);
	}
	LWLockRelease(obix_shared->lock);
	obix_turn_forget(database, relation, 0);
}

/*
 * Sequences
 */

/* Last resort for a session that ends without ending its transaction. */
static void
release_at_exit(int code, Datum arg)
{
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (outbox->slots[MyProcNumber].first != 0)
			obix_release(outbox, true, false, PG_INT64_MAX - 1);
	}
}

static void
use_slot(ObixOutbox *outbox, ObixSlot *slot, int64 first)
{
	slot->first = first;
	slot->pid = MyProcPid;
	outbox->in_flight_count++;
}

/* Prepare the session for its first slot; may raise, so not under a lock. */
static void
arrange_release(void)
{
	static bool arranged = false;

	if (!arranged)
	{
		on_shmem_exit(release_at_exit, (Datum) 0);
		arranged = true;
	}
}

/*
 * This transaction is given all sequences that are left below next; they are in
 * flight.  Returns whether there should be partitions made ahead.  The caller
 * holds the lock exclusively.
 */
static bool
give_out(ObixOutbox *outbox, int64 next)
{
	ObixSlot   *slot = &outbox->slots[MyProcNumber];
	int64		first = outbox->next_sequence;

	outbox->next_sequence = next;
	if (outbox->accepting)
	{
		/* what nobody has sent until now, nobody will */
		outbox->accepting = false;
		set_undecided(outbox, 0);
	}
	if (slot->first == 0)
	{
		use_slot(outbox, slot, first);
		dlist_push_tail(&outbox->in_flight, &slot->node);
	}
	return next > outbox->premake_at;
}

/*
 * Allocate count contiguous sequences and return the first.  They are in
 * flight until obix_release().  The caller holds a lock on the relation that
 * it keeps to the end of the transaction, and will call obix_release() then.
 */
int64
obix_allocate(ObixOutbox *outbox, int64 count)
{
	int64		first;
	bool		premake;

	arrange_release();

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	first = outbox->next_sequence;
	if (count > PG_INT64_MAX - 1 - first)
	{
		LWLockRelease(outbox->lock);
		ereport(ERROR,
				(errcode(ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED),
				 errmsg("no sequences are left in the outbox")));
	}
	premake = give_out(outbox, first + count);
	LWLockRelease(outbox->lock);

	if (premake)
		obix_request_work(outbox, OBIX_WORK_PREMAKE);
	return first;
}

/*
 * Take note of a row whose sequence another server gave it (replication apply,
 * a restore in the replica role): the head goes up to it, and it is in flight
 * like any other.
 */
void
obix_accept(ObixOutbox *outbox, int64 sequence)
{
	ObixSlot   *slot = &outbox->slots[MyProcNumber];
	bool		premake;

	arrange_release();

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	outbox->accepting = true;
	raise_next(outbox, sequence + 1);
	if (slot->first == 0 || sequence < slot->first)
	{
		dlist_iter	iter;
		dlist_node *after = &outbox->in_flight.head;

		if (slot->first != 0)
		{
			dlist_delete(&slot->node);
			outbox->in_flight_count--;
		}
		dlist_foreach(iter, &outbox->in_flight)
		{
			if (dlist_container(ObixSlot, node, iter.cur)->first > sequence)
				break;
			after = iter.cur;
		}
		use_slot(outbox, slot, sequence);
		dlist_insert_after(after, &slot->node);
	}
	premake = outbox->next_sequence > outbox->premake_at;
	LWLockRelease(outbox->lock);

	if (premake)
		obix_request_work(outbox, OBIX_WORK_PREMAKE);
}

/*
 * Give out all sequences up to last at once, and return the first.  The caller
 * has locked out everybody else who allocates, until the end of its transaction.
 * So it can give them back, by obix_rewind(), where others leave holes.
 */
int64
obix_advance(ObixOutbox *outbox, int64 last, bool *premake)
{
	int64		first;

	arrange_release();

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	first = outbox->next_sequence;
	*premake = give_out(outbox, Max(first, last + 1));
	LWLockRelease(outbox->lock);
	return first;
}

/*
 * The sequences from next on are to be given out again: what had them is being
 * rolled back, and nobody else has been given any since.  Raises nothing: runs
 * in the transaction callback.
 */
void
obix_rewind(ObixOutbox *outbox, int64 next)
{
	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	outbox->next_sequence = Min(outbox->next_sequence, next);
	outbox->rewinds++;
	LWLockRelease(outbox->lock);
}

/*
 * End of a transaction that had sequences in flight, up to last.  leaves_hole:
 * it did not, or perhaps did not, insert all of them.  prepared: what it
 * inserted is undecided.  Wakes the waiters if the high-water mark rises.
 * Raises nothing: runs in the transaction callback.
 */
void
obix_release(ObixOutbox *outbox, bool leaves_hole, bool prepared, int64 last)
{
	ObixSlot   *slot = &outbox->slots[MyProcNumber];
	int64		before;
	int64		frontier;
	bool		moved;
	bool		walk;
	Latch	   *waiter = NULL;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	if (slot->first == 0)
	{
		LWLockRelease(outbox->lock);
		return;
	}
	before = high_water_mark_of(outbox);
	frontier = frontier_of(outbox);
	dlist_delete(&slot->node);
	outbox->in_flight_count--;
	if (leaves_hole || prepared)
	{
		add_suspects(outbox, slot->first, Min(last, outbox->next_sequence - 1));
		/* set here already, lest COMMIT PREPARED comes before the worker */
		if (prepared && outbox->undecided == 0)
			set_undecided(outbox, slot->first);
	}
	slot->first = 0;
	moved = count_move(outbox, high_water_mark_of(outbox) > before, &waiter);

	/*
	 * What was undecided may have been decided while the frontier was below
	 * it, when no walk could get there.
	 */
	walk = leaves_hole || wants_walk(outbox) ||
		(outbox->suspect_from > frontier &&
		 outbox->suspect_from <= frontier_of(outbox));
	LWLockRelease(outbox->lock);

	tell(outbox, moved, waiter, walk);
}

/*
 * A prepared transaction that may have rows here may have ended.  Raises
 * nothing: runs in the transaction callback.
 */
void
obix_decided(ObixOutbox *outbox)
{
	bool		concerned;
	Latch	   *waiter = NULL;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	concerned = count_move(outbox, false, &waiter);
	LWLockRelease(outbox->lock);

	tell(outbox, concerned, waiter, true);
}

/* A reader met a hole at or below the frontier that nobody can fill. */
void
obix_suspect(ObixOutbox *outbox, int64 sequence)
{
	bool		walk;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	add_suspects(outbox, sequence, sequence);
	walk = wants_walk(outbox);
	LWLockRelease(outbox->lock);

	tell(outbox, false, NULL, walk);
}

/*
 * From where to where may there be holes?  from is 0 if nowhere.  What is at
 * or below to, and has no row now, will never have one, but for rows of
 * prepared transactions; and, unless allocates, for rows that are still to come
 * from wherever their sequences were given out.
 */
void
obix_begin_walk(ObixOutbox *outbox, int64 *from, int64 *to, bool *allocates)
{
	LWLockAcquire(outbox->lock, LW_SHARED);
	*from = outbox->suspect_from;
	*to = frontier_of(outbox);
	*allocates = !outbox->accepting;
	LWLockRelease(outbox->lock);
}

/*
 * The table has been found to have rows up to here, which may have come while
 * the guard was disabled.  rewinds: as it was before the caller looked; returns
 * false if the head has gone back since, for then what it saw is gone.
 */
bool
obix_raise_head(ObixOutbox *outbox, int64 head, uint32 rewinds)
{
	bool		walk;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	if (outbox->rewinds != rewinds)
	{
		LWLockRelease(outbox->lock);
		return false;
	}
	if (head >= outbox->next_sequence)
		add_suspects(outbox, head, head);
	raise_next(outbox, head + 1);
	walk = wants_walk(outbox);
	LWLockRelease(outbox->lock);

	tell(outbox, false, NULL, walk);
	return true;
}

/*
 * The walk has settled everything below next, and stopped there for a row of a
 * prepared transaction if undecided is not 0.  It has written so many
 * placeholders.  Only one walk at a time.  Raises nothing: runs in the
 * transaction callback.
 *
 * undecided is set after the walk saw the row in progress, so the transaction
 * may have ended in between: asking for one more walk closes that window.
 */
void
obix_end_walk(ObixOutbox *outbox, int64 next, int64 undecided, int64 filled)
{
	int64		before;
	bool		moved;
	bool		walk;
	Latch	   *waiter = NULL;

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	before = high_water_mark_of(outbox);
	outbox->placeholders += filled;
	if (outbox->suspect_from != 0 && outbox->suspect_from < next)
		outbox->suspect_from = next <= outbox->suspect_to ? next : 0;
	walk = wants_walk(outbox);
	set_undecided(outbox, undecided);
	walk |= wants_walk(outbox);
	moved = high_water_mark_of(outbox) > before;
	if (moved)
		(void) count_move(outbox, true, &waiter);
	LWLockRelease(outbox->lock);

	tell(outbox, moved, waiter, walk);
}

/*
 * Copy the numbers of an outbox.  Returns false if the entry is not, or no
 * longer, that of this outbox: for callers that hold no lock on the relation.
 */
bool
obix_get_position(ObixOutbox *outbox, Oid relation, int32 id,
				  ObixPosition *position)
{
	bool		valid;

	LWLockAcquire(outbox->lock, LW_SHARED);
	valid = has_key(outbox, relation, id);
	position->head = outbox->next_sequence - 1;
	position->frontier = frontier_of(outbox);
	position->high_water_mark = high_water_mark_of(outbox);
	position->suspect_from = outbox->suspect_from;
	position->undecided = outbox->undecided;
	position->premake_head = outbox->premake_head;
	position->premake_time = outbox->premake_time;
	position->placeholders = outbox->placeholders;
	position->rewinds = outbox->rewinds;
	position->in_flight = outbox->in_flight_count;
	position->oldest_pid = 0;
	if (!dlist_is_empty(&outbox->in_flight))
		position->oldest_pid = dlist_head_element(ObixSlot, node,
												  &outbox->in_flight)->pid;
	LWLockRelease(outbox->lock);
	return valid;
}

/*
 * Partitions have been looked after when the head was here.  Ask again when the
 * sequence next has been allocated.
 */
void
obix_premake_done(ObixOutbox *outbox, int64 head, int64 next)
{
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
	outbox->premake_at = next;
	outbox->premake_head = head;
	outbox->premake_time = now;
	LWLockRelease(outbox->lock);
}

/*
 * Who is to be told when an outbox moves: dispatchers, and those who do not
 * wait for the frontier.
 */
void
obix_set_audience(Oid database, Oid relation, bool handled, bool available)
{
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);

		if (outbox->relation != relation || outbox->database != database)
			continue;
		LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
		if (outbox->relation == relation && outbox->database == database)
		{
			outbox->handled = handled;
			outbox->available = available;
		}
		LWLockRelease(outbox->lock);
	}
}

/* Have those who wait on an outbox look again.  Raises nothing. */
void
obix_wake_waiters(Oid database, Oid relation)
{
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);
		Latch	   *waiter;

		if (outbox->relation != relation || outbox->database != database)
			continue;
		LWLockAcquire(outbox->lock, LW_EXCLUSIVE);
		waiter = obix_begin_wave(outbox);
		LWLockRelease(outbox->lock);
		if (waiter != NULL)
			SetLatch(waiter);
	}
}
