/*-------------------------------------------------------------------------
 *
 * bounds.c
 *	  Which partition holds a sequence, and walking its primary key.
 *
 * Nothing here plans a query: a partition is found by a binary search in the
 * bounds that the relation cache keeps, and rows by walking one index.  So a
 * page costs the same with one partition or ten thousand.
 *
 * DEFAULT holds what lies in the gaps between the other partitions.  Walking
 * from leaf to leaf in the order of the sequence therefore visits DEFAULT once
 * for every gap.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xlog.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "miscadmin.h"
#include "partitioning/partbounds.h"
#include "partitioning/partdesc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/partcache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "bounds.h"
#include "compat.h"

/* How often a reader on a standby tries to lock what replay has locked */
#define STANDBY_LOCK_MS		5

/* The bound before a range of the descriptor, as a number. */
static int64
bound_value(PartitionBoundInfo bounds, int i)
{
	switch (bounds->kind[i][0])
	{
		case PARTITION_RANGE_DATUM_MINVALUE:
			return OBIX_NO_LOWER;
		case PARTITION_RANGE_DATUM_MAXVALUE:
			return OBIX_NO_UPPER;
		default:
			return DatumGetInt64(bounds->datums[i][0]);
	}
}

/*
 * Find the partition that holds a sequence.  relid is InvalidOid where there
 * is none.  The caller holds a lock on the parent.
 */
void
obix_find_leaf(Relation parent, int64 sequence, ObixLeaf *leaf)
{
	PartitionDesc desc = RelationGetPartitionDesc(parent, false);
	PartitionKey key = RelationGetPartitionKey(parent);
	PartitionBoundInfo bounds = desc->boundinfo;
	Datum		value = Int64GetDatum(sequence);
	bool		equal;
	int			offset;
	int			index;

	leaf->relid = InvalidOid;
	leaf->lower = OBIX_NO_LOWER;
	leaf->upper = OBIX_NO_UPPER;
	leaf->is_default = true;
	if (desc->nparts == 0)
		return;

	offset = partition_range_datum_bsearch(key->partsupfunc, key->partcollation,
										   bounds, 1, &value, &equal);
	index = bounds->indexes[offset + 1];
	if (offset >= 0)
		leaf->lower = bound_value(bounds, offset);
	if (offset + 1 < bounds->ndatums)
		leaf->upper = bound_value(bounds, offset + 1);

	leaf->is_default = index < 0;
	if (index < 0)
		index = bounds->default_index;
	if (index < 0)
		return;
	leaf->relid = desc->oids[index];
}

/*
 * Go on to the leaf after this one, in the order of the sequence; false if it
 * was the last.
 */
bool
obix_next_leaf(Relation parent, ObixLeaf *leaf)
{
	if (leaf->upper == OBIX_NO_UPPER)
		return false;
	obix_find_leaf(parent, leaf->upper, leaf);
	return true;
}

/* The DEFAULT partition, InvalidOid if there is none. */
Oid
obix_default_leaf(Relation parent)
{
	PartitionDesc desc = RelationGetPartitionDesc(parent, false);

	return get_default_oid_from_partdesc(desc);
}

/* The first sequence after all partitions but DEFAULT; 0 without any. */
int64
obix_partitions_end(Relation parent)
{
	PartitionDesc desc = RelationGetPartitionDesc(parent, false);
	PartitionBoundInfo bounds = desc->boundinfo;

	if (desc->nparts == 0 || bounds->ndatums == 0)
		return 0;
	return bound_value(bounds, bounds->ndatums - 1);
}

/*
 * Lock a table in order to read it.  Returns false if a standby does not get
 * the lock.
 *
 * There, replay has what it repeats locked until it comes to the end of that
 * transaction.  Should it meet a snapshot in its way before, ours perhaps, it
 * waits for that to go, while we wait for it.  Nobody detects such a deadlock:
 * everything would stand still for max_standby_streaming_delay, and then we
 * would be cancelled.  So we wait no longer than deadlock_timeout, or lock_timeout
 * where that is shorter; who reads goes no further then.
 */
bool
obix_lock_to_read(Oid relid)
{
	int			patience = DeadlockTimeout;
	TimestampTz end;

	if (!RecoveryInProgress())
	{
		LockRelationOid(relid, AccessShareLock);
		return true;
	}
	if (LockTimeout > 0 && LockTimeout < patience)
		patience = LockTimeout;
	end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), patience);
	while (!ConditionalLockRelationOid(relid, AccessShareLock))
	{
		CHECK_FOR_INTERRUPTS();
		if (GetCurrentTimestamp() >= end)
			return false;
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 STANDBY_LOCK_MS, PG_WAIT_LOCK | LOCKTAG_RELATION);
		ResetLatch(MyLatch);
	}
	return true;
}

/*
 * The primary key of an outbox or a leaf, if it is valid and on the sequence
 * alone, else InvalidOid.  That of an outbox is valid if those of all leaves
 * are.
 */
Oid
obix_primary_key(Relation rel)
{
	HeapTuple	tuple;
	Form_pg_index form;
	bool		valid;
	Oid			index;

	/* this sets rd_pkindex, and any invalidation resets it */
	list_free(RelationGetIndexList(rel));
	index = rel->rd_pkindex;
	if (!OidIsValid(index))
		return InvalidOid;
	tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
	if (!HeapTupleIsValid(tuple))
		return InvalidOid;
	form = (Form_pg_index) GETSTRUCT(tuple);
	valid = form->indisvalid && form->indnkeyatts == 1 &&
		form->indkey.values[0] == Anum_event_sequence;
	ReleaseSysCache(tuple);
	return valid ? index : InvalidOid;
}

/*
 * Can a partition be walked?  Its owner may have attached something else.
 */
bool
obix_can_scan(Relation leaf)
{
	return leaf->rd_rel->relkind == RELKIND_RELATION &&
		obix_has_columns(leaf) && OidIsValid(obix_primary_key(leaf));
}

/* The index by which a partition can be walked; errors out if it cannot be. */
static Oid
check_scan(Relation leaf)
{
	Oid			index;

	if (leaf->rd_rel->relkind != RELKIND_RELATION)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("partition \"%s\" is not an ordinary table",
						RelationGetRelationName(leaf)),
				 errhint("Detach it, and attach tables that hold rows.")));
	obix_check_columns(leaf);
	index = obix_primary_key(leaf);
	if (!OidIsValid(index))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("partition \"%s\" has no valid primary key on the sequence",
						RelationGetRelationName(leaf)),
				 errhint("REINDEX it, or add the primary key on the sequence.")));
	return index;
}

/*
 * Begin a walk over the rows of a leaf with from <= sequence < to, in either
 * direction.  The caller holds a lock on the leaf.
 */
void
obix_begin_scan(ObixScan *scan, Relation leaf, Snapshot snapshot,
				int64 from, int64 to, ScanDirection direction)
{
	ScanKeyData keys[2];
	Oid			index = check_scan(leaf);

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_INT8GE,
				Int64GetDatum(from));
	ScanKeyInit(&keys[1], 1, BTLessStrategyNumber, F_INT8LT,
				Int64GetDatum(to));

	scan->index = index_open(index, AccessShareLock);
	scan->slot = table_slot_create(leaf, NULL);
	scan->direction = direction;
	scan->scan = index_beginscan(leaf, scan->index, snapshot, NULL, 2, 0, SO_NONE);
	index_rescan(scan->scan, keys, 2, NULL, 0);
}

/* The next row of a walk, in scan->slot; false at the end. */
bool
obix_next_row(ObixScan *scan, int64 *sequence)
{
	bool		isnull;

	if (!index_getnext_slot(scan->scan, scan->direction, scan->slot))
		return false;
	*sequence = DatumGetInt64(slot_getattr(scan->slot, 1, &isnull));
	return true;
}

void
obix_end_scan(ObixScan *scan)
{
	index_endscan(scan->scan);
	ExecDropSingleTupleTableSlot(scan->slot);
	index_close(scan->index, AccessShareLock);
}

static bool
first_row(Relation leaf, Snapshot snapshot, int64 from, int64 to,
		  ScanDirection direction, int64 *sequence)
{
	ObixScan	scan;
	bool		found;

	obix_begin_scan(&scan, leaf, snapshot, from, to, direction);
	found = obix_next_row(&scan, sequence);
	obix_end_scan(&scan);
	return found;
}

/* The lowest sequence of a leaf with from <= sequence < to. */
bool
obix_lowest_in(Relation leaf, Snapshot snapshot, int64 from, int64 to,
			   int64 *sequence)
{
	return first_row(leaf, snapshot, from, to, ForwardScanDirection, sequence);
}

/* The highest sequence of a leaf with from <= sequence < to. */
bool
obix_highest_in(Relation leaf, Snapshot snapshot, int64 from, int64 to,
				int64 *sequence)
{
	return first_row(leaf, snapshot, from, to, BackwardScanDirection, sequence);
}

/*
 * The lowest sequence at or above from in all the outbox; false if it has no
 * row there.  Errors out if a standby does not get a lock.
 */
bool
obix_oldest_row(Relation parent, Snapshot snapshot, int64 from,
				int64 *sequence)
{
	ObixLeaf	leaf;
	bool		found = false;

	obix_find_leaf(parent, from, &leaf);
	do
	{
		CHECK_FOR_INTERRUPTS();
		if (OidIsValid(leaf.relid))
		{
			Relation	rel;

			if (!obix_lock_to_read(leaf.relid))
				ereport(ERROR,
						(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
						 errmsg("could not lock partition \"%s\" during recovery",
								get_rel_name(leaf.relid)),
						 errdetail("Replay has locked it, and may be waiting for this session."),
						 errhint("Try again.")));
			rel = table_open(leaf.relid, NoLock);
			found = obix_lowest_in(rel, snapshot, Max(from, leaf.lower),
								   leaf.upper, sequence);
			table_close(rel, AccessShareLock);
		}
	} while (!found && obix_next_leaf(parent, &leaf));

	return found;
}

/*
 * The highest sequence that any transaction ever inserted and did not roll
 * back, prepared ones included; 0 if there is none.
 */
int64
obix_newest_row(Relation parent)
{
	SnapshotData dirty;
	ObixLeaf	leaf;
	int64		end = OBIX_NO_UPPER;
	int64		sequence = 0;

	InitDirtySnapshot(dirty);
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		obix_find_leaf(parent, end == OBIX_NO_UPPER ? end : end - 1, &leaf);
		if (OidIsValid(leaf.relid))
		{
			Relation	rel = table_open(leaf.relid, AccessShareLock);
			bool		found;

			found = obix_highest_in(rel, &dirty, leaf.lower, leaf.upper,
									&sequence);
			table_close(rel, AccessShareLock);
			if (found)
				return sequence;
		}
		if (leaf.lower == OBIX_NO_LOWER)
			return 0;
		end = leaf.lower;
	}
}
