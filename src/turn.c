/*-------------------------------------------------------------------------
 *
 * turn.c
 *	  Shared state of consumers: who has something to do, and who is at it.
 *
 * That a consumer has nothing to do is known by two numbers: how often its
 * outbox had moved when somebody last found nothing for it, and how often it
 * has moved now.  So an idle consumer costs nothing, not even a look at its
 * row.  The numbers only say when to look; what is delivered is decided by the
 * tables alone.
 *
 * Dispatchers share the consumers of their database by claiming one at a time,
 * the one that was served least recently.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "obix.h"
#include "turn.h"
#include "work.h"

/*
 * Marks by which the speed of a consumer is told: the time between them, at
 * least; that after which a speed can be told; and that of a rest
 */
#define MARK_MS			10000
#define MIN_MARK_MS		1000
#define REST_MS			60000

static ObixTurn *turns = NULL;	/* array of obix_max_consumers */

/* How often an outbox has moved, as read before the turns are looked at */
typedef struct ObixTide
{
	Oid			database;
	Oid			relation;
	int64		moves;
	int64		releases;
} ObixTide;

Size
obix_turn_shmem_size(void)
{
	return mul_size(obix_max_consumers, sizeof(ObixTurn));
}

void
obix_turn_shmem_init(void *space)
{
	turns = space;
}

/* Find the entry of a consumer, NULL if it has none.  Under the lock. */
static ObixTurn *
find_turn(Oid database, int32 id)
{
	for (int i = 0; i < obix_max_consumers; i++)
	{
		/* usually at the first place */
		ObixTurn   *turn = &turns[((uint32) id + i) % obix_max_consumers];

		if (turn->id == id && turn->database == database)
			return turn;
	}
	return NULL;
}

/* The same, or a new one; NULL if there is no room.  Under the lock. */
static ObixTurn *
make_turn(int32 id, Oid outbox)
{
	ObixTurn   *turn = find_turn(MyDatabaseId, id);

	for (int i = 0; turn == NULL && i < obix_max_consumers; i++)
	{
		ObixTurn   *free = &turns[((uint32) id + i) % obix_max_consumers];

		if (OidIsValid(free->database))
			continue;
		turn = free;
		memset(turn, 0, sizeof(ObixTurn));
		ItemPointerSetInvalid(&turn->tid);
		turn->database = MyDatabaseId;
		turn->id = id;
		turn->outbox = outbox;
	}
	return turn;
}

/* Have the outbox know who is to be woken when it moves.  Under the lock. */
static void
tell_outbox(Oid database, Oid outbox)
{
	bool		handled = false;
	bool		available = false;

	for (int i = 0; i < obix_max_consumers; i++)
	{
		if (turns[i].database == database && turns[i].outbox == outbox)
		{
			handled |= turns[i].handled;
			available |= turns[i].available;
		}
	}
	obix_set_audience(database, outbox, handled, available);
}

/*
 * Have an entry for a consumer.  Returns false if there is no room for it.
 */
bool
obix_turn_add(int32 id, Oid outbox, bool handled, bool available)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = make_turn(id, outbox);
	if (turn != NULL)
	{
		turn->handled = handled;
		turn->available = available;
		tell_outbox(MyDatabaseId, outbox);
	}
	LWLockRelease(obix_shared->turn_lock);
	return turn != NULL;
}

/* The same for those who cannot do without: errors out if there is no room. */
void
obix_turn_require(int32 id, Oid outbox, bool handled, bool available)
{
	if (!obix_turn_add(id, outbox, handled, available))
		ereport(ERROR,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("too many consumers are in use"),
				 errdetail("Shared memory has room for %d consumers in all databases together.",
						   obix_max_consumers),
				 errhint("Raise obix.max_consumers and restart the server.")));
}

/*
 * Free the entries of a database, or of one outbox, or of one consumer of it.
 * Raises nothing: runs at commit.
 */
void
obix_turn_forget(Oid database, Oid outbox, int32 id)
{
	Oid			woken = InvalidOid;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	for (int i = 0; i < obix_max_consumers; i++)
	{
		ObixTurn   *turn = &turns[i];

		if (turn->database != database ||
			(OidIsValid(outbox) && turn->outbox != outbox) ||
			(id != 0 && turn->id != id))
			continue;
		turn->database = InvalidOid;
		woken = turn->outbox;
		if (id != 0)
			tell_outbox(database, turn->outbox);
	}
	LWLockRelease(obix_shared->turn_lock);
	if (id != 0 && OidIsValid(woken))
		obix_wake_waiters(database, woken);
}

/*
 * Something about a consumer has changed: look at it, whatever is known.
 * Raises nothing: runs at commit.
 */
void
obix_turn_touch(Oid database, int32 id)
{
	ObixTurn   *turn;
	Oid			outbox = InvalidOid;
	bool		handled = false;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(database, id);
	if (turn != NULL)
	{
		turn->touched++;
		turn->seen = 0;
		turn->due_at = 0;
		outbox = turn->outbox;
		handled = turn->handled;
	}
	LWLockRelease(obix_shared->turn_lock);

	if (handled)
		obix_wake_dispatcher(database);
	if (OidIsValid(outbox))
		obix_wake_waiters(database, outbox);
}

/*
 * Let a consumer be served until then; DT_NOBEGIN: no longer.  Raises nothing:
 * runs at abort.
 */
void
obix_turn_extend(int32 id, TimestampTz until)
{
	ObixTurn   *turn;
	bool		wake = false;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
	{
		turn->until = until;
		wake = turn->pid == 0 && turn->seen != OBIX_SEEN_ALL &&
			until != DT_NOBEGIN;
	}
	LWLockRelease(obix_shared->turn_lock);
	if (wake)
		obix_wake_dispatcher(MyDatabaseId);
}

/* Has the gate of a consumer ever answered since the server was started? */
bool
obix_turn_gate_proved(int32 id)
{
	ObixTurn   *turn;
	bool		proved;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	proved = turn != NULL && turn->gate_proved;
	LWLockRelease(obix_shared->turn_lock);
	return proved;
}

void
obix_turn_prove_gate(int32 id)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
		turn->gate_proved = true;
	LWLockRelease(obix_shared->turn_lock);
}

/* May a consumer that is being served be served further? */
bool
obix_turn_may_go_on(int32 id)
{
	TimestampTz now = GetCurrentTimestamp();
	ObixTurn   *turn;
	bool		may;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	may = turn != NULL && (turn->until == 0 || turn->until > now);
	LWLockRelease(obix_shared->turn_lock);
	return may;
}

/*
 * Whose turn it is
 */

/* Read how often outboxes have moved: of one database, or of all. */
static int
read_tides(Oid database, ObixTide **result)
{
	static ObixTide *tides = NULL;
	int			count = 0;

	if (tides == NULL)
		tides = MemoryContextAlloc(TopMemoryContext,
								   obix_max_outboxes * sizeof(ObixTide));
	for (int i = 0; i < obix_max_outboxes; i++)
	{
		ObixOutbox *outbox = obix_nth_outbox(i);
		ObixTide   *tide = &tides[count];

		if (!OidIsValid(outbox->database))
			continue;
		LWLockAcquire(outbox->lock, LW_SHARED);
		tide->database = outbox->database;
		tide->relation = outbox->relation;
		tide->moves = outbox->moves;
		tide->releases = outbox->releases;
		LWLockRelease(outbox->lock);
		if (OidIsValid(database) ? tide->database == database :
			OidIsValid(tide->database))
			count++;
	}
	*result = tides;
	return count;
}

/*
 * The tide of a consumer's outbox, the lowest there is if that is not in use
 * yet: looking will tell.
 */
static int64
tide_of(const ObixTurn *turn, const ObixTide *tides, int ntides)
{
	for (int i = 0; i < ntides; i++)
	{
		if (tides[i].relation == turn->outbox &&
			tides[i].database == turn->database)
			return turn->available ? tides[i].releases : tides[i].moves;
	}
	return 1;
}

/*
 * Is a consumer to be served?  due_at becomes the time from which it is, if
 * that is earlier.
 */
static bool
is_due(const ObixTurn *turn, int64 tide, TimestampTz now, TimestampTz *due_at)
{
	if (!turn->handled || turn->pid != 0 || turn->seen >= tide ||
		(turn->until != 0 && turn->until <= now))
		return false;
	if (turn->due_at <= now)
		return true;
	if (*due_at == 0 || turn->due_at < *due_at)
		*due_at = turn->due_at;
	return false;
}

/*
 * Claim the consumer of this database whose turn it is.  Returns false if
 * there is none.
 */
bool
obix_turn_claim(TimestampTz now, ObixClaim *claim)
{
	ObixTide   *tides;
	int			ntides = read_tides(MyDatabaseId, &tides);
	ObixTurn   *best = NULL;

	claim->due_at = 0;
	claim->more = false;
	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	for (int i = 0; i < obix_max_consumers; i++)
	{
		ObixTurn   *turn = &turns[i];

		if (turn->database != MyDatabaseId ||
			!is_due(turn, tide_of(turn, tides, ntides), now, &claim->due_at))
			continue;
		claim->more |= best != NULL;
		if (best == NULL || turn->served_at < best->served_at)
			best = turn;
	}
	if (best != NULL)
	{
		best->pid = MyProcPid;
		claim->id = best->id;
		claim->touched = best->touched;
	}
	LWLockRelease(obix_shared->turn_lock);
	return best != NULL;
}

/* Claim a certain consumer; false if somebody serves it. */
bool
obix_turn_claim_one(int32 id)
{
	ObixTurn   *turn;
	bool		claimed;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	claimed = turn == NULL || turn->pid == 0 || turn->pid == MyProcPid;
	if (turn != NULL && claimed)
		turn->pid = MyProcPid;
	LWLockRelease(obix_shared->turn_lock);
	return claimed;
}

/* Give it back as it was. */
void
obix_turn_unclaim(int32 id)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL && turn->pid == MyProcPid)
		turn->pid = 0;
	LWLockRelease(obix_shared->turn_lock);
	obix_wake_dispatcher(MyDatabaseId);
}

/*
 * Give back a claim.  Unless it was touched meanwhile: it need not be looked at
 * until its outbox has moved from seen, and not before due_at.
 */
void
obix_turn_end(ObixClaim *claim, int64 seen, TimestampTz due_at)
{
	TimestampTz now = GetCurrentTimestamp();
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, claim->id);
	if (turn != NULL && turn->pid == MyProcPid)
	{
		turn->pid = 0;
		turn->served_at = now;
		if (turn->touched == claim->touched)
		{
			turn->seen = seen;
			turn->due_at = due_at;
		}
	}
	LWLockRelease(obix_shared->turn_lock);
}

/* Give back whatever this process has claimed.  Raises nothing. */
void
obix_turn_end_all(void)
{
	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	for (int i = 0; i < obix_max_consumers; i++)
	{
		if (turns[i].pid == MyProcPid)
			turns[i].pid = 0;
	}
	LWLockRelease(obix_shared->turn_lock);
}

/* The process that serves a consumer, 0 if none does. */
int
obix_turn_pid(int32 id)
{
	ObixTurn   *turn;
	int			pid;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	pid = turn != NULL ? turn->pid : 0;
	LWLockRelease(obix_shared->turn_lock);
	return pid;
}

/*
 * For the launcher: the database of the next consumer from *n on that is due,
 * InvalidOid at the end.  due_at becomes when another will be, if it is earlier.
 */
Oid
obix_turn_next(int *n, TimestampTz now, TimestampTz *due_at)
{
	static ObixTide *tides;
	static int	ntides;
	Oid			database = InvalidOid;

	if (*n == 0)
		ntides = read_tides(InvalidOid, &tides);

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	for (; *n < obix_max_consumers && !OidIsValid(database); (*n)++)
	{
		ObixTurn   *turn = &turns[*n];

		if (OidIsValid(turn->database) &&
			is_due(turn, tide_of(turn, tides, ntides), now, due_at))
			database = turn->database;
	}
	LWLockRelease(obix_shared->turn_lock);
	return database;
}

/*
 * For those who fetch from outside
 */

/*
 * The tide of a consumer's outbox now, 0 if it has no entry.  To be read before
 * the snapshot with which to look for events.
 */
int64
obix_turn_tide(int32 id, uint32 *touched)
{
	ObixTide   *tides;
	int			ntides = read_tides(MyDatabaseId, &tides);
	ObixTurn   *turn;
	int64		tide = 0;

	*touched = 0;
	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
	{
		tide = tide_of(turn, tides, ntides);
		*touched = turn->touched;
	}
	LWLockRelease(obix_shared->turn_lock);
	return tide;
}

/* Nothing was found for a consumer when the tide was this. */
void
obix_turn_idle(int32 id, uint32 touched, int64 tide)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL && turn->touched == touched)
		turn->seen = tide;
	LWLockRelease(obix_shared->turn_lock);
}

/* Has nothing happened since nothing was found for a consumer? */
bool
obix_turn_is_idle(int32 id)
{
	ObixTide   *tides;
	int			ntides = read_tides(MyDatabaseId, &tides);
	ObixTurn   *turn;
	bool		idle;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	idle = turn != NULL && turn->seen != OBIX_SEEN_ALL &&
		turn->seen >= tide_of(turn, tides, ntides);
	LWLockRelease(obix_shared->turn_lock);
	return idle;
}

/*
 * What is remembered for all sessions
 */

bool
obix_turn_get_tid(int32 id, ItemPointer tid)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
		*tid = turn->tid;
	else
		ItemPointerSetInvalid(tid);
	LWLockRelease(obix_shared->turn_lock);
	return ItemPointerIsValid(tid);
}

/*
 * Note where a consumer is now, so that its speed can be told: by two marks,
 * one of them MARK_MS old at least.  What is older than a rest begins anew.
 */
static void
set_marks(ObixTurn *turn, int64 position, TimestampTz now)
{
	ObixMark   *marks = turn->marks;

	if (marks[1].at == 0 || position < marks[1].position ||
		TimestampDifferenceExceeds(marks[1].at, now, REST_MS))
		marks[0].at = 0;
	else if (!TimestampDifferenceExceeds(marks[1].at, now, MARK_MS))
		return;
	else
		marks[0] = marks[1];
	marks[1].position = position;
	marks[1].at = now;
}

/*
 * A version of the state of a consumer, as committed, is there and has this
 * position.  Without an entry, this is not remembered.
 */
void
obix_turn_set_tid(int32 id, ItemPointer tid, int64 position)
{
	TimestampTz now = GetCurrentTimestamp();
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
	{
		turn->tid = *tid;
		set_marks(turn, position, now);
	}
	LWLockRelease(obix_shared->turn_lock);
}

/*
 * Sequences a second that a consumer has passed of late, now that it is at a
 * position; -1 if that cannot be told yet.
 */
double
obix_turn_rate(int32 id, int64 position)
{
	TimestampTz now = GetCurrentTimestamp();
	ObixMark	mark = {0};
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
		mark = turn->marks[turn->marks[0].at != 0 ? 0 : 1];
	LWLockRelease(obix_shared->turn_lock);
	if (mark.at == 0 || position < mark.position ||
		!TimestampDifferenceExceeds(mark.at, now, MIN_MARK_MS))
		return -1;
	return (position - mark.position) / ((now - mark.at) / 1e6);
}

/* How many consumers have an entry, in all databases. */
int
obix_count_turns(void)
{
	int			count = 0;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	for (int i = 0; i < obix_max_consumers; i++)
		count += OidIsValid(turns[i].database);
	LWLockRelease(obix_shared->turn_lock);
	return count;
}

bool
obix_turn_get_found(int32 id, ObixFound *found)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_SHARED);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
		*found = turn->found;
	else
		found->version = 0;
	LWLockRelease(obix_shared->turn_lock);
	return found->version != 0;
}

/* Up to where, from a position on, is nothing for a consumer known to be? */
int64
obix_turn_nothing_to(int32 id, int32 version, int64 start)
{
	ObixFound	found;

	if (obix_turn_get_found(id, &found) && found.version == version &&
		found.nothing_after <= start && found.nothing_to > start)
		return found.nothing_to;
	return start;
}

void
obix_turn_set_found(int32 id, const ObixFound *found)
{
	ObixTurn   *turn;

	LWLockAcquire(obix_shared->turn_lock, LW_EXCLUSIVE);
	turn = find_turn(MyDatabaseId, id);
	if (turn != NULL)
		turn->found = *found;
	LWLockRelease(obix_shared->turn_lock);
}
