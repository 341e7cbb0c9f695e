/*-------------------------------------------------------------------------
 *
 * gapfill.c
 *	  Writing placeholders on proof.
 *
 * The proof that nobody can fill a hole any more has no clock in it:
 *
 *	1. The frontier is read first.  Whoever allocated a sequence at or below it
 *	   has ended, or is a prepared transaction.
 *	2. Then the primary key is walked with a dirty snapshot, which sees rows in
 *	   progress too.  What has no row now was rolled back, or never inserted.
 *	3. The walk begins above the resolved position: what is missing at or below
 *	   was removed.
 *	4. This server gives out the sequences of the outbox: it is complete, no
 *	   subscription writes to it, and since rows last came with sequences of
 *	   their own it has given out one itself.
 *
 * So a live writer never loses its sequence, and the placeholder cannot meet
 * anybody else's row.
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
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bounds.h"
#include "compat.h"
#include "gapfill.h"
#include "progress.h"
#include "registry.h"
#include "relation.h"
#include "writer.h"
#include "xact.h"

/*
 * So many sequences missing in a row are filled by hand only: a stray row with a
 * sequence of its own may have raised the head.
 */
#define MAX_RUN				10000000

/* What one transaction does at most, so that it stays short */
#define MAX_PLACEHOLDERS	10000
#define MAX_ROWS			1000000

/* After so many of either, how far it is is noted */
#define PROGRESS_STEPS		1000

/* A walk along the primary key of all leaves */
typedef struct ObixWalk
{
	Relation	parent;
	int64		from;			/* where it began */
	int64		next;			/* everything below is settled */
	int64		to;				/* the frontier when the walk began */
	int64		undecided;		/* where somebody else decides, 0: nowhere */
	int64		rows;			/* looked at, and how many at most */
	int64		max_rows;
	int64		filled;			/* written, and how many at most */
	int64		max_filled;
	bool		allocates;		/* this server gives out the sequences */
	bool		busy;			/* a leaf was locked */
	MinimalTuple placeholder;
	ObixWriter *writer;			/* NULL until the first hole */
} ObixWalk;

/* Say how far it is, after so many steps of a kind: now and then. */
static void
note_progress(ObixWalk *walk, int64 steps)
{
	if (steps % PROGRESS_STEPS == 0)
		obix_progress_done(walk->next - walk->from);
}

/*
 * Fill the holes from walk->next up to but not including a sequence.  Returns
 * false if the walk has to stop before.
 */
static bool
fill_holes(ObixWalk *walk, const ObixLeaf *leaf, int64 end)
{
	TimestampTz now;

	if (walk->next >= end)
		return true;
	if (!walk->allocates || obix_is_subscribed(leaf->relid, NULL))
	{
		walk->undecided = walk->next;	/* it is for the publisher to fill */
		return false;
	}

	if (end - walk->next > MAX_RUN && walk->max_filled != PG_INT64_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("too many sequences are missing from outbox \"%s\"",
						RelationGetRelationName(walk->parent)),
				 errdetail("Sequences from %lld to %lld have no row.",
						   (long long) walk->next, (long long) end - 1),
				 errhint("If that is right, call obix.fill_gaps.")));

	now = GetCurrentTimestamp();
	while (walk->next < end)
	{
		if (walk->filled == walk->max_filled)
			return false;
		if (walk->writer == NULL)
		{
			walk->placeholder = obix_form_placeholder();
			walk->writer = obix_writer_begin(walk->parent, true, true);

			/*
			 * Readers go past it as soon as they see it, so it must not be
			 * lost, nor in a failover where events are not.
			 */
			ForceSyncCommit();
			if (obix_in_worker && obix_xact_lacks_standby())
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_IN_USE),
						 errmsg("no synchronous standby confirms commits")));
		}
		if (!obix_writer_put(walk->writer, walk->placeholder, walk->next, now))
		{
			walk->busy = true;	/* somebody has the leaf locked */
			return false;
		}
		walk->filled++;
		walk->next++;
		note_progress(walk, walk->filled);
	}
	return true;
}

/* The next sequence of a scan, and the row after it that has been read */
typedef struct ObixLookAhead
{
	ObixScan	scan;
	SnapshotData dirty;
	bool		has_next;
	int64		next;
	bool		next_pending;
} ObixLookAhead;

/*
 * The next sequence that has a row.  pending: every version of the row that
 * there is, is in progress; after an UPDATE there can be two.
 */
static bool
next_sequence(ObixLookAhead *look, int64 *sequence, bool *pending)
{
	if (!look->has_next)
		return false;
	*sequence = look->next;
	*pending = look->next_pending;

	while ((look->has_next = obix_next_row(&look->scan, &look->next)))
	{
		look->next_pending = TransactionIdIsValid(look->dirty.xmin);
		if (look->next != *sequence)
			break;
		*pending &= look->next_pending;
	}
	return true;
}

static void
begin_look(ObixLookAhead *look, Relation rel, int64 from, int64 to)
{
	InitDirtySnapshot(look->dirty);
	obix_begin_scan(&look->scan, rel, &look->dirty, from, to,
					ForwardScanDirection);
	look->has_next = obix_next_row(&look->scan, &look->next);
	look->next_pending = look->has_next &&
		TransactionIdIsValid(look->dirty.xmin);
}

/* Walk one leaf.  Returns whether to go on in the next. */
static bool
walk_leaf(ObixWalk *walk, const ObixLeaf *leaf)
{
	int64		end = walk->to < leaf->upper ? walk->to + 1 : leaf->upper;
	Relation	rel;
	ObixLookAhead look;
	int64		sequence;
	bool		pending;
	bool		complete = true;

	if (!OidIsValid(leaf->relid))
		return fill_holes(walk, leaf, end);

	rel = table_open(leaf->relid, AccessShareLock);
	begin_look(&look, rel, walk->next, end);
	while (complete && next_sequence(&look, &sequence, &pending))
	{
		CHECK_FOR_INTERRUPTS();
		complete = fill_holes(walk, leaf, sequence);
		if (!complete)
			break;
		if (pending)
		{
			walk->undecided = sequence;
			complete = false;
			break;
		}
		walk->next = sequence + 1;
		note_progress(walk, ++walk->rows);
		complete = walk->rows != walk->max_rows;
	}
	obix_end_scan(&look.scan);
	table_close(rel, AccessShareLock);

	return complete && fill_holes(walk, leaf, end);
}

/*
 * Walk from suspect_from to the frontier and fill what is proved abandoned.
 * Shared memory hears of it when the transaction commits.  Returns how many
 * placeholders were written.  Unless all, stops after so many that the
 * transaction stays short; the rest is asked for when it commits.
 *
 * Locks: the mutex, ROW EXCLUSIVE on the outbox, then leaves without waiting.
 * Errors out with ERRCODE_LOCK_NOT_AVAILABLE if it cannot begin.
 */
int64
obix_fill(Oid relid, bool all)
{
	ObixWalk	walk = {0};
	ObixRegistryRow row;
	ObixRelation *known;
	ObixOutbox *shared;
	ObixIdentity saved;
	ObixLeaf	leaf;
	Relation	parent;
	int64		from;

	parent = obix_open_to_maintain(relid, OBIX_MUTEX_FILL, RowExclusiveLock,
								   &row, &known);
	if (parent == NULL)
		return 0;
	shared = obix_attach(parent, known);

	obix_begin_walk(shared, &from, &walk.to, &walk.allocates);
	walk.next = walk.from = Max(from, row.resolved + 1);
	if (from != 0 && from <= walk.to)
	{
		obix_become_owner(parent, &saved);
		walk.parent = parent;
		walk.allocates &= !obix_is_subscribed(relid, NULL);
		walk.max_rows = all ? PG_INT64_MAX : MAX_ROWS;
		walk.max_filled = all ? PG_INT64_MAX : MAX_PLACEHOLDERS;
		if (walk.next <= walk.to)
		{
			obix_progress_begin(OBIX_OPERATION_FILL, relid, all);
			obix_progress_phase(OBIX_PHASE_WALKING, walk.to - walk.from + 1);
			obix_find_leaf(parent, walk.next, &leaf);
			while (walk_leaf(&walk, &leaf) && walk.next <= walk.to &&
				   obix_next_leaf(parent, &leaf))
				;
		}
		if (walk.writer != NULL)
			obix_writer_end(walk.writer);
		obix_progress_end();
		obix_become_self(&saved);

		if (walk.busy && (all || walk.filled == 0))
			ereport(ERROR,
					(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
					 errmsg("could not obtain lock on a partition of outbox \"%s\"",
							RelationGetRelationName(parent))));
		obix_xact_walked(obix_xact(parent, shared), walk.next, walk.undecided,
						 walk.filled);
	}
	table_close(parent, NoLock);
	return walk.filled;
}
