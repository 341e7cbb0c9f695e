/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  What the current transaction has to do with outboxes.
 *
 * One ObixXact per outbox that the transaction has touched: which sequences it
 * allocated, which of those that it drew one by one it has not inserted yet,
 * and what has to be told to shared memory when it ends.  All of it lives in
 * TopTransactionContext and is used for the last time in the transaction
 * callback, which therefore allocates and raises nothing.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "replication/logicalworker.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "obix.h"
#include "turn.h"
#include "work.h"
#include "xact.h"

/* Contiguous sequences, from <= sequence <= to */
typedef struct ObixRange
{
	int64		from;
	int64		to;
} ObixRange;

/* Where the head was before this transaction gave out what it imports */
typedef struct ObixAdvance
{
	struct ObixAdvance *next;	/* of a lower level */
	int			level;			/* nesting level */
	int64		before;			/* next sequence */
} ObixAdvance;

struct ObixXact
{
	struct ObixXact *next;
	Oid			relid;
	ObixOutbox *outbox;

	int			lock_level;		/* nesting level that holds ROW EXCLUSIVE on
								 * the relation, 0: perhaps none does */

	int64		first;			/* sequences allocated, 0: none yet */
	int64		last;

	/*
	 * Drawn and not inserted: unused[head..count-1], ascending.  A sequence
	 * stays drawn when its subtransaction is rolled back.
	 */
	ObixRange  *unused;
	int			head;
	int			count;
	int			size;
	int			use_level;		/* deepest nesting level that used one */

	bool		may_leave_hole; /* something inserted may have gone again */
	bool		accepted;		/* rows came with sequences of their own */
	ObixAdvance *advances;		/* of imports, by descending level */
	uint32		work;			/* OBIX_WORK_* to ask for at commit */

	/* a walk from suspect_from, told to shared memory if it commits */
	int			walk_level;		/* nesting level, 0: no walk */
	int64		walked_to;
	int64		filled;
	int64		undecided;
};

/* A relation created or dropped here, for reclaiming its shared state */
typedef struct ObixFate
{
	struct ObixFate *next;
	Oid			database;
	Oid			relid;			/* InvalidOid: all of the database */
	int			level;			/* nesting level */
	bool		dropped;		/* else created */
} ObixFate;

/* A consumer about which something was changed here, see turn.h */
typedef struct ObixTouch
{
	struct ObixTouch *next;
	int32		id;
	int			level;			/* nesting level */
	bool		created;		/* its entry goes if this is rolled back */
	bool		dropped;		/* its entry goes if this is committed */
} ObixTouch;

bool		obix_in_worker = false;

static ObixXact *xacts = NULL;
static ObixFate *fates = NULL;
static ObixTouch *touches = NULL;
static int32 rebuild = 0;		/* waited for here, see turn.h */
static bool ends_prepared = false;
static bool database_news = false;
static bool changes_extension = false;	/* or creates some extension */
static bool updates_extension = false;
static List *visits = NIL;		/* of databases, to be requested at commit */

static ObixXact *
find_xact(Oid relid)
{
	ObixXact   *xact = xacts;

	while (xact != NULL && xact->relid != relid)
		xact = xact->next;
	return xact;
}

/*
 * This transaction's state for an outbox.  The caller holds a lock on the
 * relation that it keeps to the end of the transaction.
 */
ObixXact *
obix_xact(Relation parent, ObixOutbox *outbox)
{
	ObixXact   *xact = find_xact(RelationGetRelid(parent));

	if (xact == NULL)
	{
		xact = MemoryContextAllocZero(TopTransactionContext, sizeof(ObixXact));
		xact->relid = RelationGetRelid(parent);
		xact->outbox = outbox;
		xact->next = xacts;
		xacts = xact;
	}
	return xact;
}

/* The caller has taken ROW EXCLUSIVE on the relation, and keeps it. */
void
obix_xact_locked(ObixXact *xact)
{
	if (xact->lock_level == 0)
		xact->lock_level = GetCurrentTransactionNestLevel();
}

/*
 * This transaction's state for an outbox on which it keeps ROW EXCLUSIVE, NULL
 * if it is not known to do so.
 */
ObixXact *
obix_xact_if_locked(Oid relid)
{
	ObixXact   *xact = find_xact(relid);

	return xact != NULL && xact->lock_level > 0 ? xact : NULL;
}

/*
 * Allocate count contiguous sequences that the caller will insert before the
 * transaction ends, and return the first.
 */
int64
obix_xact_allocate(ObixXact *xact, int64 count)
{
	int64		first;

	/* what is delivered must be durable, so the commit flushes */
	if (obix_force_sync_commit)
		ForceSyncCommit();

	first = obix_allocate(xact->outbox, count);
	if (xact->first == 0)
		xact->first = first;
	xact->last = first + count - 1;
	return first;
}

/* Allocate a sequence that somebody may insert in this transaction. */
int64
obix_xact_draw(ObixXact *xact)
{
	int64		sequence;

	if (xact->count == xact->size)
	{
		int			live = xact->count - xact->head;

		if (xact->size == 0)
		{
			xact->size = 8;
			xact->unused = MemoryContextAlloc(TopTransactionContext,
											  xact->size * sizeof(ObixRange));
		}
		else if (live <= xact->size / 2)
		{
			memmove(xact->unused, xact->unused + xact->head,
					live * sizeof(ObixRange));
			xact->count = live;
			xact->head = 0;
		}
		else
		{
			xact->unused = repalloc_huge(xact->unused,
										 (Size) xact->size * 2 * sizeof(ObixRange));
			xact->size *= 2;
		}
	}

	sequence = obix_xact_allocate(xact, 1);

	if (xact->count > xact->head &&
		xact->unused[xact->count - 1].to == sequence - 1)
		xact->unused[xact->count - 1].to = sequence;
	else
	{
		xact->unused[xact->count].from = sequence;
		xact->unused[xact->count].to = sequence;
		xact->count++;
	}
	return sequence;
}

/*
 * A drawn sequence is about to be inserted.  Returns false if this transaction
 * has not drawn it, or has inserted it already.
 */
bool
obix_xact_use(Oid relid, int64 sequence)
{
	ObixXact   *xact = find_xact(relid);
	ObixRange  *range;
	int			low;
	int			high;
	int			level;

	if (xact == NULL)
		return false;

	/* the last range that begins at or below the sequence */
	low = xact->head;
	high = xact->count;
	while (low < high)
	{
		int			middle = low + (high - low) / 2;

		if (xact->unused[middle].from <= sequence)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == xact->head || xact->unused[low - 1].to < sequence)
		return false;
	range = &xact->unused[low - 1];

	if (range->from == range->to)
	{
		if (low - 1 == xact->head)
			xact->head++;
		else
		{
			memmove(range, range + 1, (xact->count - low) * sizeof(ObixRange));
			xact->count--;
		}
		if (xact->head == xact->count)
			xact->head = xact->count = 0;
	}
	else if (range->from == sequence)
		range->from++;
	else if (range->to == sequence)
		range->to--;
	else
	{
		/* split: there is room, or drawing one more makes some */
		if (xact->count == xact->size)
		{
			xact->unused = repalloc_huge(xact->unused,
										 (Size) xact->size * 2 * sizeof(ObixRange));
			xact->size *= 2;
			range = &xact->unused[low - 1];
		}
		memmove(range + 1, range, (xact->count - low + 1) * sizeof(ObixRange));
		xact->count++;
		range[0].to = sequence - 1;
		range[1].from = sequence + 1;
	}

	level = GetCurrentTransactionNestLevel();
	if (level > xact->use_level)
		xact->use_level = level;
	return true;
}

/* A row is about to be inserted whose sequence was given elsewhere. */
void
obix_xact_accept(ObixXact *xact, int64 sequence)
{
	obix_accept(xact->outbox, sequence);
	xact->accepted = true;
	if (xact->first == 0 || sequence < xact->first)
		xact->first = sequence;
	if (sequence > xact->last)
		xact->last = sequence;
}

/*
 * All sequences up to last are about to be inserted, by somebody who has locked
 * out everybody else who allocates.  If that is rolled back they are given back,
 * rather than be holes.
 */
void
obix_xact_advance(ObixXact *xact, int64 last)
{
	int			level = GetCurrentTransactionNestLevel();
	bool		premake;
	int64		before;

	if (xact->advances == NULL || xact->advances->level < level)
	{
		ObixAdvance *advance = MemoryContextAlloc(TopTransactionContext,
												  sizeof(ObixAdvance));

		/* what follows can raise, until sequences are in flight */
		advance->level = level;
		advance->before = PG_INT64_MAX;
		advance->next = xact->advances;
		xact->advances = advance;
	}
	if (obix_force_sync_commit)
		ForceSyncCommit();
	before = obix_advance(xact->outbox, last, &premake);
	xact->advances->before = Min(xact->advances->before, before);
	if (xact->first == 0)
		xact->first = before;
	xact->last = last;
	if (premake)
		xact->work |= OBIX_WORK_PREMAKE;
}

/*
 * What was imported from a nesting level on is rolled back, and with it whatever
 * was drawn after that.  Returns whether this transaction had sequences before.
 */
static bool
rewind_advances(ObixXact *xact, int level)
{
	int64		before = PG_INT64_MAX;

	while (xact->advances != NULL && xact->advances->level >= level)
	{
		before = xact->advances->before;
		xact->advances = xact->advances->next;
	}
	obix_rewind(xact->outbox, before);

	while (xact->count > xact->head &&
		   xact->unused[xact->count - 1].from >= before)
		xact->count--;
	if (xact->count > xact->head && xact->unused[xact->count - 1].to >= before)
		xact->unused[xact->count - 1].to = before - 1;
	xact->last = Min(xact->last, before - 1);
	return xact->first < before;
}

/*
 * In PG_CATCH(): roll back the internal subtransaction, which was begun with this
 * context and this owner current, and return its error, of which nothing else is
 * left.
 */
ErrorData *
obix_xact_roll_back_sub(MemoryContext context, ResourceOwner owner)
{
	ErrorData  *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	FlushErrorState();
	RollbackAndReleaseCurrentSubTransaction();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return error;
}

/* When this transaction commits, ask for work on an outbox. */
void
obix_xact_request_work(Oid relid, uint32 work)
{
	ObixXact   *xact = find_xact(relid);

	if (xact != NULL)
		xact->work |= work;
}

/* A row that the guard has let pass may yet be turned away. */
void
obix_xact_may_leave_hole(Oid relid)
{
	ObixXact   *xact = find_xact(relid);

	if (xact != NULL)
		xact->may_leave_hole = true;
}

/*
 * Holes below next have been dealt with in this transaction, some of them filled:
 * shared memory is told if it commits.  See obix_end_walk().
 */
void
obix_xact_walked(ObixXact *xact, int64 next, int64 undecided, int64 filled)
{
	int			level = GetCurrentTransactionNestLevel();

	/* what a savepoint may undo does not add to what an earlier walk did */
	if (xact->walk_level != 0 && xact->walk_level < level)
		return;
	xact->filled = (xact->walk_level == 0 ? 0 : xact->filled) + filled;
	xact->walk_level = level;
	xact->walked_to = next;
	xact->undecided = undecided;
}

static ObixTouch *
add_touch(int32 id)
{
	ObixTouch  *touch = MemoryContextAllocZero(TopTransactionContext,
											   sizeof(ObixTouch));

	touch->id = id;
	touch->level = GetCurrentTransactionNestLevel();
	touch->next = touches;
	touches = touch;
	return touch;
}

/* When this transaction has ended, have a consumer looked at. */
void
obix_xact_touch_consumer(int32 id)
{
	(void) add_touch(id);
}

/* A consumer, or a rebuild, is being created, and has its entry already. */
void
obix_xact_created_consumer(int32 id)
{
	add_touch(id)->created = true;
}

/* A consumer, or a rebuild, is being dropped. */
void
obix_xact_dropped_consumer(int32 id)
{
	add_touch(id)->dropped = true;
}

/* Nobody would be told at COMMIT PREPARED. */
void
obix_xact_check_prepare(void)
{
	if (touches != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction that has changed a consumer"),
				 errdetail("It has created, altered, moved or dropped one, or let one go on."),
				 errhint("Do that in a transaction of its own; obix.fetch, obix.ack and obix.fail can be prepared.")));
	for (ObixXact *xact = xacts; xact != NULL; xact = xact->next)
	{
		if (xact->advances != NULL)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("cannot PREPARE a transaction that has imported events"),
					 errhint("Commit it, or call obix.import outside of a transaction block.")));
	}
	if (updates_extension)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction that has altered the extension \"obix\"")));
}

/* This transaction creates, or with update alters, the extension. */
void
obix_xact_changes_extension(bool update)
{
	changes_extension = true;
	updates_extension |= update;
}

/* This transaction may end a prepared one. */
void
obix_xact_ends_prepared(void)
{
	ends_prepared = true;
}

/* Once this transaction has committed, a database is to be visited. */
void
obix_xact_visit(Oid database)
{
	MemoryContext old = MemoryContextSwitchTo(TopTransactionContext);

	visits = lappend_oid(visits, database);
	MemoryContextSwitchTo(old);
}

/* Should this transaction fail, a rebuild is not to go on. */
void
obix_xact_wait_for_rebuild(int32 id)
{
	rebuild = id;
}

static void
add_fate(Oid database, Oid relid, bool dropped)
{
	ObixFate   *fate = MemoryContextAlloc(TopTransactionContext,
										  sizeof(ObixFate));

	fate->database = database;
	fate->relid = relid;
	fate->level = GetCurrentTransactionNestLevel();
	fate->dropped = dropped;
	fate->next = fates;
	fates = fate;
}

/* An outbox has shared state that was created in this transaction. */
void
obix_xact_created(Oid relid)
{
	add_fate(MyDatabaseId, relid, false);
}

/*
 * Have this transaction wait for its flush here, whatever synchronous_commit
 * says, and for no standby: it is only about how things are kept.
 */
void
obix_xact_commit_locally(void)
{
	(void) set_config_option("synchronous_commit", "local", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
}

/* Does synchronous_commit say that commits here wait for a standby, if any? */
bool
obix_xact_waits_for_standby(void)
{
	return SyncRepRequested();
}

/*
 * Would this transaction, committed now, wait for a standby that is not there?
 * Workers rather try again later than wait.
 */
bool
obix_xact_lacks_standby(void)
{
	SyncRepStandbyData *standbys;
	bool		lacks;

	if (!obix_xact_waits_for_standby() || SyncRepConfig == NULL ||
		SyncRepConfig->num_sync <= 0)
		return false;
	lacks = SyncRepGetCandidateStandbys(&standbys) < SyncRepConfig->num_sync;
	pfree(standbys);
	return lacks;
}

/* A database is being created, altered or dropped. */
void
obix_xact_note_databases(void)
{
	database_news = true;
}

/* An outbox, or with InvalidOid a whole database, is being dropped. */
void
obix_xact_dropped(Oid database, Oid relid)
{
	add_fate(database, relid, true);
}

bool
obix_xact_has_dropped(Oid relid)
{
	for (ObixFate *fate = fates; fate != NULL; fate = fate->next)
	{
		if (fate->dropped && fate->relid == relid)
			return true;
	}
	return false;
}

/*
 * Transaction callback at COMMIT, PREPARE and ABORT.  Allocates and raises
 * nothing.
 */
void
obix_xact_end(XactEvent event)
{
	bool		commit = event == XACT_EVENT_COMMIT;
	bool		prepare = event == XACT_EVENT_PREPARE;

	for (ObixXact *xact = xacts; xact != NULL; xact = xact->next)
	{
		bool		unused = xact->head < xact->count;

		if (xact->first != 0)
		{
			bool		leaves_hole = unused || xact->may_leave_hole ||
				!(commit || prepare);

			if (xact->advances != NULL && !commit)
				leaves_hole = rewind_advances(xact, 0);
			obix_release(xact->outbox, leaves_hole, prepare, xact->last);
			if (xact->accepted)
				obix_request_work(xact->outbox, OBIX_WORK_FILL);
		}
		if (xact->work != 0 && (commit || prepare))
			obix_request_work(xact->outbox, xact->work);
		if (xact->walk_level > 0)
		{
			if (commit)
				obix_end_walk(xact->outbox, xact->walked_to, xact->undecided,
							  xact->filled);
			else
				obix_request_work(xact->outbox, OBIX_WORK_FILL);
		}
	}
	xacts = NULL;

	/*
	 * What was created goes with an abort.  With a prepare it can only be
	 * seen again after COMMIT PREPARED, and is attached anew then.
	 */
	for (ObixFate *fate = fates; fate != NULL; fate = fate->next)
	{
		if (fate->dropped ? commit : !commit)
			obix_free_outboxes(fate->database, fate->relid);
	}
	fates = NULL;

	for (ObixTouch *touch = touches; touch != NULL; touch = touch->next)
	{
		if (commit ? touch->dropped : touch->created)
			obix_turn_forget(MyDatabaseId, InvalidOid, touch->id);
		else
			obix_turn_touch(MyDatabaseId, touch->id);
	}
	touches = NULL;
	if (rebuild != 0 && event == XACT_EVENT_ABORT)
		obix_turn_extend(rebuild, DT_NOBEGIN);
	rebuild = 0;
	if (database_news)
		obix_tell_database_news();
	database_news = false;

	if (changes_extension && commit)
		obix_extension_changed();
	changes_extension = updates_extension = false;
	for (int i = 0; i < list_length(visits) && commit; i++)
		obix_request_visit(list_nth_oid(visits, i));
	visits = NIL;

	/*
	 * The end of a prepared transaction calls no callback of its own.  It may
	 * have come even if this transaction failed after that.  Logical
	 * replication ends prepared ones without a statement.
	 */
	if (ends_prepared ||
		(IsLogicalWorker() && !TransactionIdIsValid(GetTopTransactionIdIfAny())))
		obix_request_undecided();
	ends_prepared = false;
}

/* Subtransaction callback at the end of nesting level level. */
void
obix_xact_end_sub(SubXactEvent event, int level)
{
	bool		abort = event == SUBXACT_EVENT_ABORT_SUB;
	ObixFate  **link = &fates;

	for (ObixXact *xact = xacts; xact != NULL; xact = xact->next)
	{
		ObixAdvance *advance = xact->advances;

		if (advance != NULL && advance->level >= level)
		{
			if (abort)
				(void) rewind_advances(xact, level);
			else if (advance->next != NULL && advance->next->level == level - 1)
				xact->advances = advance->next;
			else
				advance->level = level - 1;
		}
		if (xact->use_level >= level)
		{
			xact->use_level = level - 1;
			xact->may_leave_hole |= abort;
		}
		if (xact->lock_level >= level)
			xact->lock_level = abort ? 0 : level - 1;
		if (xact->walk_level >= level)
		{
			if (!abort)
				xact->walk_level = level - 1;
			else
			{
				xact->walk_level = 0;
				obix_request_work(xact->outbox, OBIX_WORK_FILL);
			}
		}
	}

	for (ObixTouch *touch = touches; touch != NULL; touch = touch->next)
	{
		if (touch->level < level)
			continue;
		touch->level = level - 1;
		if (abort)
		{
			if (touch->created)
				obix_turn_forget(MyDatabaseId, InvalidOid, touch->id);
			touch->created = touch->dropped = false;
		}
	}

	while (*link != NULL)
	{
		ObixFate   *fate = *link;

		if (fate->level >= level)
		{
			fate->level = level - 1;
			if (abort)
			{
				*link = fate->next;
				if (!fate->dropped)
				{
					ObixXact  **x = &xacts;

					while (*x != NULL && (*x)->relid != fate->relid)
						x = &(*x)->next;
					if (*x != NULL)
						*x = (*x)->next;
					obix_free_outboxes(fate->database, fate->relid);
				}
				continue;
			}
		}
		link = &fate->next;
	}
}
