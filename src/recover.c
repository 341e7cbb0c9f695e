/*-------------------------------------------------------------------------
 *
 * recover.c
 *	  Recovering stranded rows, by making DEFAULT a proper partition.
 *
 * Nothing is moved: DEFAULT is detached, attached again for the gap that its
 * rows are in, and an empty table takes its place.  That its rows are all in
 * that gap is proved by its primary key under the lock, so nothing is scanned,
 * and logical decoding sees no row twice.
 *
 * The outbox is locked first, exclusively: so no publisher is on its way to
 * DEFAULT, and no reader sees the rows of one place gone and those of the other
 * not yet there.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/tupconvert.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_class.h"
#include "common/int.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "bounds.h"
#include "compat.h"
#include "insert.h"
#include "partition.h"
#include "progress.h"
#include "relation.h"
#include "work.h"

/* Stranded rows that the worker moves, where they are in several gaps */
#define MAX_MOVED		10000

/* Stranded rows between two partitions */
typedef struct ObixGap
{
	int64		lower;			/* bounds of the gap */
	int64		upper;
	int64		first;			/* its rows */
	int64		last;
} ObixGap;

#define GAP_ROWS(gap)	((gap)->last - (gap)->first + 1)

/*
 * The gaps in which DEFAULT has rows, in any state but rolled back: a list of
 * ObixGap.
 */
static List *
find_gaps(Relation parent)
{
	Oid			relid = obix_default_leaf(parent);
	List	   *gaps = NIL;
	SnapshotData dirty;
	Relation	rel;
	int64		from = PG_INT64_MIN;
	int64		first;

	if (!OidIsValid(relid))
		return NIL;
	InitDirtySnapshot(dirty);
	rel = table_open(relid, AccessShareLock);
	while (obix_lowest_in(rel, &dirty, from, PG_INT64_MAX, &first))
	{
		ObixGap    *gap = palloc(sizeof(ObixGap));
		ObixLeaf	leaf;

		CHECK_FOR_INTERRUPTS();
		obix_find_leaf(parent, first, &leaf);
		gap->lower = leaf.lower;
		gap->upper = leaf.upper;
		gap->first = gap->last = first;
		(void) obix_highest_in(rel, &dirty, first, leaf.upper, &gap->last);
		gaps = lappend(gaps, gap);
		if (leaf.upper == OBIX_NO_UPPER)
			break;
		from = leaf.upper;
	}
	table_close(rel, AccessShareLock);
	return gaps;
}

/*
 * How many sequences are stranded, counting from the first to the last row in
 * each gap; -1 if DEFAULT cannot be looked at.
 */
int64
obix_stranded(Relation parent)
{
	Oid			relid = obix_default_leaf(parent);
	Relation	rel = OidIsValid(relid) ? table_open(relid, AccessShareLock) : NULL;
	int64		count = 0;
	ListCell   *cell;

	if (rel != NULL)
	{
		bool		can_scan = obix_can_scan(rel);

		table_close(rel, AccessShareLock);
		if (!can_scan)
			return -1;
	}
	foreach(cell, find_gaps(parent))
		count += GAP_ROWS((ObixGap *) lfirst(cell));
	return count;
}

/*
 * The range of the partition that a gap becomes: the gap, or above the last
 * partition up to the first boundary above everything allocated.
 */
static void
choose_range(const ObixGap *gap, int64 head, int64 width,
			 int64 *lower, int64 *upper)
{
	int64		last = Max(head, gap->last);
	int64		widths;

	*lower = gap->lower;
	if (*lower == OBIX_NO_LOWER)
		*lower = Min(gap->first, gap->first < width ? 0 : gap->first);
	*upper = gap->upper;
	if (*upper != OBIX_NO_UPPER)
		return;
	widths = (last - *lower) / width + 1;
	if (pg_mul_s64_overflow(widths, width, &widths) ||
		pg_add_s64_overflow(*lower, widths, upper))
		*upper = OBIX_NO_UPPER;
}

/*
 * Move the rows of a gap from DEFAULT into a table, past logical decoding:
 * whoever follows the outbox by it has had these events.  What DELETE and INSERT
 * write would be sent in part, for the table is no partition yet, and take the
 * events away from a subscriber.
 *
 * So the copies are marked as not to be decoded.  Deletions cannot be, but
 * nothing is sent of one without a replica identity, which promote() has seen
 * to.  No triggers fire.  Locked out is everybody else.  Counts them in moved.
 */
static void
move_rows_between(Relation from, Relation to, const ObixGap *gap, int64 *moved)
{
	TupleConversionMap *map = convert_tuples_by_name(RelationGetDescr(from),
													 RelationGetDescr(to));
	TupleTableSlot *slot = table_slot_create(to, NULL);
	BulkInsertState bistate = GetBulkInsertState();
	EState	   *estate = CreateExecutorState();
	ResultRelInfo *info = makeNode(ResultRelInfo);
	CommandId	cid = GetCurrentCommandId(true);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	ObixScan	scan;
	int64		sequence;

	InitResultRelInfo(info, to, 0, NULL, 0);
	ExecOpenIndices(info, false);
	obix_begin_scan(&scan, from, snapshot, gap->first, gap->last + 1,
					ForwardScanDirection);
	while (obix_next_row(&scan, &sequence))
	{
		MemoryContext old = MemoryContextSwitchTo(GetPerTupleMemoryContext(estate));

		CHECK_FOR_INTERRUPTS();
		if (map != NULL)
			(void) execute_attr_map_slot(map->attrMap, scan.slot, slot);
		else
			ExecCopySlot(slot, scan.slot);
		table_tuple_insert(to, slot, cid, TABLE_INSERT_NO_LOGICAL, bistate);
		(void) ExecInsertIndexTuples(info, estate, 0, slot, NIL, NULL);
		simple_table_tuple_delete(from, &scan.slot->tts_tid, snapshot);
		MemoryContextSwitchTo(old);
		ResetPerTupleExprContext(estate);
		obix_progress_done(++*moved);
	}
	obix_end_scan(&scan);

	UnregisterSnapshot(snapshot);
	ExecCloseIndices(info);
	FreeExecutorState(estate);
	FreeBulkInsertState(bistate);
	ExecDropSingleTupleTableSlot(slot);
}

/* Move the rows of a gap out of DEFAULT into a table of their own. */
static Oid
move_rows(Oid parent, Oid default_relid, const ObixGap *gap, int64 lower,
		  int64 *moved)
{
	char		label[32];
	Oid			leaf;
	Relation	from;
	Relation	to;

	snprintf(label, sizeof(label), "p" INT64_FORMAT, lower);
	leaf = obix_create_leaf(parent,
							obix_free_name(get_rel_name(parent),
										   get_rel_namespace(parent), label));
	from = table_open(default_relid, AccessExclusiveLock);
	to = table_open(leaf, AccessExclusiveLock);
	move_rows_between(from, to, gap, moved);
	table_close(to, NoLock);
	table_close(from, NoLock);
	CommandCounterIncrement();
	return leaf;
}

static void
rename_relation(Oid relid, char *name)
{
	char		kind = get_rel_relkind(relid);

	obix_execute("ALTER %s %s RENAME TO %s",
				 kind == RELKIND_INDEX ? "INDEX" : "TABLE",
				 obix_quote_relation(relid), quote_identifier(name));
}

static Oid
primary_key_of(Oid relid)
{
	Relation	rel = table_open(relid, AccessShareLock);
	Oid			index;

	index = obix_primary_key(rel);
	table_close(rel, NoLock);
	return index;
}

/* Put a table, and its primary key, in the place of another in the schema. */
static void
rename_leaf(Oid relid, const char *name, const char *index_name)
{
	Oid			index = primary_key_of(relid);

	rename_relation(relid, pstrdup(name));
	if (OidIsValid(index))
		rename_relation(index, pstrdup(index_name));
}

/*
 * Make DEFAULT the partition of its largest gap, and an empty table DEFAULT.
 * The caller acts as the owner and has the locks.
 */
static void
promote(Oid parent, Oid old_default, Oid new_default, List *gaps,
		const ObixGap *largest, int64 head, int64 width)
{
	Oid			namespace = get_rel_namespace(parent);
	char	   *default_name = get_rel_name(old_default);
	char	   *default_index = get_rel_name(primary_key_of(old_default));
	char		label[32];
	char	   *name;
	Oid		   *leaves = palloc(list_length(gaps) * sizeof(Oid));
	Oid			identity_index;
	char		identity = obix_replica_identity(old_default, &identity_index);
	bool		hidden = list_length(gaps) > 1 && XLogLogicalInfoActive();
	int64		to_move = -GAP_ROWS(largest);
	int64		moved = 0;
	ListCell   *cell;
	int64		lower;
	int64		upper;

	obix_adopt(parent, old_default);
	foreach(cell, gaps)
		to_move += GAP_ROWS((ObixGap *) lfirst(cell));
	if (to_move > 0)
		obix_progress_phase(OBIX_PHASE_MOVING, to_move);
	if (hidden)
		obix_set_replica_identity(old_default, REPLICA_IDENTITY_NOTHING,
								  InvalidOid);
	for (int i = 0; i < list_length(gaps); i++)
	{
		ObixGap    *gap = list_nth(gaps, i);

		if (gap == largest)
			continue;
		choose_range(gap, head, width, &lower, &upper);
		leaves[i] = move_rows(parent, old_default, gap, lower, &moved);
	}
	if (hidden)
		obix_set_replica_identity(old_default, identity, identity_index);

	obix_progress_phase(OBIX_PHASE_ATTACHING, 0);
	choose_range(largest, head, width, &lower, &upper);
	snprintf(label, sizeof(label), "p" INT64_FORMAT, lower);
	name = obix_free_name(get_rel_name(parent), namespace, label);

	obix_execute("ALTER TABLE %s DETACH PARTITION %s",
				 obix_quote_relation(parent), obix_quote_relation(old_default));
	rename_leaf(old_default, name, obix_free_name(name, namespace, "pkey"));
	rename_leaf(new_default, default_name, default_index);
	obix_attach_range(parent, old_default, lower, upper);

	for (int i = 0; i < list_length(gaps); i++)
	{
		ObixGap    *gap = list_nth(gaps, i);

		if (gap == largest)
			continue;
		choose_range(gap, head, width, &lower, &upper);
		obix_attach_range(parent, leaves[i], lower, upper);
	}
	obix_execute("ALTER TABLE %s ATTACH PARTITION %s DEFAULT",
				 obix_quote_relation(parent), obix_quote_relation(new_default));
	obix_follow_replica_identity(parent, new_default);
}

/* The same, with the guard letting rows and DEFAULT itself go. */
static void
promote_unguarded(Oid parent, Oid old_default, Oid new_default, List *gaps,
				  const ObixGap *largest, int64 head, int64 width)
{
	obix_unguarded = old_default;
	PG_TRY();
	{
		promote(parent, old_default, new_default, gaps, largest, head, width);
	}
	PG_FINALLY();
	{
		obix_unguarded = InvalidOid;
	}
	PG_END_TRY();
}

/*
 * Bring stranded rows into proper partitions.  Returns how many there were,
 * see obix_stranded().  Unless by hand, does not move more than a few rows.
 *
 * Locks: the mutex, then the outbox exclusively, waiting for both; DEFAULT
 * without waiting.
 */
int64
obix_recover(Oid relid, bool by_hand)
{
	ObixRegistryRow row;
	ObixRelation *known;
	ObixOutbox *shared;
	ObixPosition position;
	ObixIdentity saved;
	Relation	parent;
	const char *name;
	Oid			namespace;
	Oid			old_default;
	Oid			new_default;
	List	   *gaps;
	ObixGap    *largest = NULL;
	int64		count = 0;
	ListCell   *cell;

	parent = obix_open_to_maintain(relid, OBIX_MUTEX_PARTITIONS, AccessShareLock,
								   &row, &known);
	if (parent == NULL)
		return 0;
	if (find_gaps(parent) == NIL)
	{
		table_close(parent, NoLock);
		return 0;
	}
	shared = obix_attach(parent, known);
	obix_progress_begin(OBIX_OPERATION_RECOVERY, relid, by_hand);

	/* all that can be done before locking anybody out */
	obix_become_owner(parent, &saved);
	old_default = obix_default_leaf(parent);
	name = pstrdup(RelationGetRelationName(parent));
	namespace = RelationGetNamespace(parent);
	table_close(parent, AccessShareLock);
	obix_give_way(old_default, AccessExclusiveLock);
	obix_give_way(relid, AccessExclusiveLock);
	new_default = obix_create_leaf(relid,
								   obix_free_name(name, namespace, "default"));

	obix_lock_outbox(relid, AccessExclusiveLock);

	parent = table_open(relid, NoLock);
	if (obix_default_leaf(parent) != old_default)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("DEFAULT partition of outbox \"%s\" was replaced concurrently",
						RelationGetRelationName(parent))));
	obix_lock_default(old_default);
	obix_get_position(shared, relid, known->id, &position);
	gaps = find_gaps(parent);
	table_close(parent, NoLock);	/* ALTER TABLE wants it for itself */

	foreach(cell, gaps)
	{
		ObixGap    *gap = lfirst(cell);

		count += GAP_ROWS(gap);
		if (largest == NULL || GAP_ROWS(gap) > GAP_ROWS(largest))
			largest = gap;
	}
	if (largest == NULL)
	{
		obix_execute("DROP TABLE %s", obix_quote_relation(new_default));
		obix_become_self(&saved);
		obix_progress_end();
		return 0;
	}
	if (!by_hand && count - GAP_ROWS(largest) > MAX_MOVED)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("stranded rows of outbox \"%s\" are in several gaps between partitions",
						get_rel_name(relid)),
				 errdetail("%lld rows would have to be moved.",
						   (long long) (count - GAP_ROWS(largest))),
				 errhint("Call obix.recover_default when writers can wait for it.")));

	promote_unguarded(relid, old_default, new_default, gaps, largest,
					  position.head, row.partition_width);

	obix_become_self(&saved);
	obix_progress_end();
	obix_request_work(shared, OBIX_WORK_PREMAKE);
	return count;
}
