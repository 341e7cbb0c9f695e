/*-------------------------------------------------------------------------
 *
 * bounds.h
 *	  Which partition holds a sequence, and walking its primary key.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_BOUNDS_H
#define OBIX_BOUNDS_H

#include "access/genam.h"
#include "access/sdir.h"
#include "executor/tuptable.h"
#include "utils/rel.h"
#include "utils/snapshot.h"

#include "event.h"

#define OBIX_NO_LOWER	PG_INT64_MIN
#define OBIX_NO_UPPER	PG_INT64_MAX

/*
 * The partition that holds a sequence.  For DEFAULT, lower and upper are the
 * bounds of the gap between the other partitions in which the sequence lies.
 */
typedef struct ObixLeaf
{
	Oid			relid;
	int64		lower;			/* first sequence, or OBIX_NO_LOWER */
	int64		upper;			/* first after it, or OBIX_NO_UPPER */
	bool		is_default;
} ObixLeaf;

/* A walk along the primary key of one partition. */
typedef struct ObixScan
{
	Relation	index;
	IndexScanDesc scan;
	TupleTableSlot *slot;		/* the row found */
	ScanDirection direction;
} ObixScan;

extern void obix_find_leaf(Relation parent, int64 sequence, ObixLeaf *leaf);
extern bool obix_next_leaf(Relation parent, ObixLeaf *leaf);
extern Oid	obix_default_leaf(Relation parent);
extern bool obix_can_scan(Relation leaf);
extern int64 obix_partitions_end(Relation parent);

extern bool obix_lock_to_read(Oid relid);
extern Oid	obix_primary_key(Relation rel);
extern void obix_begin_scan(ObixScan *scan, Relation leaf, Snapshot snapshot,
							int64 from, int64 to, ScanDirection direction);
extern bool obix_next_row(ObixScan *scan, int64 *sequence);
extern void obix_end_scan(ObixScan *scan);

extern bool obix_lowest_in(Relation leaf, Snapshot snapshot,
						   int64 from, int64 to, int64 *sequence);
extern bool obix_highest_in(Relation leaf, Snapshot snapshot,
							int64 from, int64 to, int64 *sequence);
extern bool obix_oldest_row(Relation parent, Snapshot snapshot,
							int64 from, int64 *sequence);
extern int64 obix_newest_row(Relation parent);

#endif							/* OBIX_BOUNDS_H */
