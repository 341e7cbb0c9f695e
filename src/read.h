/*-------------------------------------------------------------------------
 *
 * read.h
 *	  Contiguous reads, for whoever delivers events.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_READ_H
#define OBIX_READ_H

#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "utils/snapshot.h"
#include "utils/tuplestore.h"

#include "relation.h"

/* Who reads from where to where, and what came of it */
typedef struct ObixReader
{
	Relation	parent;
	ObixRelation *known;
	ObixOutbox *shared;			/* NULL on a standby, for instance */
	Snapshot	snapshot;
	const char *consumer;		/* for whom, NULL: for a session */
	Tuplestorestate *store;		/* NULL: only count */
	TupleDesc	desc;
	bool		(*wanted) (void *arg, TupleTableSlot *slot);	/* NULL: all */
	void	   *arg;
	int64		to;				/* nothing above this */
	int64		max_events;
	int64		max_bytes;

	int64		expected;		/* the next sequence to look at */
	int64		events;			/* delivered */
	int64		bytes;
	int64		first;			/* the first and last delivered */
	int64		last;
	TimestampTz last_at;		/* recorded_at of the last */
} ObixReader;

extern void obix_check_not_null(FunctionCallInfo fcinfo,
								const char *const *names, int count);
extern Relation obix_open_for_reading(Oid relid, const char *function,
									  ObixRelation **known);
extern Snapshot obix_reading_snapshot(void);
extern int64 obix_resolved(Oid relid);
extern int64 obix_oldest_kept(Relation parent, int64 resolved);
extern void obix_check_not_beyond(Relation parent, const char *consumer,
								  int64 after, int64 head);
extern void obix_report_removed(const ObixReader *reader);
extern void obix_check_not_removed(const ObixReader *reader, int64 resolved);
extern void obix_check_page(int64 max_events, int64 max_bytes);
extern bool obix_deliver(ObixReader *reader, TupleTableSlot *slot);
extern void obix_read_on(ObixReader *reader);
extern int64 obix_exact_high_water_mark(Relation parent, ObixRelation *known);

/* for procedures that wait */
extern double obix_interval_ms(const Interval *interval);
extern long obix_get_timeout(Interval *timeout);
extern void obix_drop_snapshot(const char *function);
extern void obix_return_in_turn(ObixOutbox *outbox, long timeout);

#endif							/* OBIX_READ_H */
