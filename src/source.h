/*-------------------------------------------------------------------------
 *
 * source.h
 *	  Tables from which events are imported.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_SOURCE_H
#define OBIX_SOURCE_H

#include "datatype/timestamp.h"
#include "executor/spi.h"

#include "event.h"

/*
 * A table or view with events.  Arrays have a place for each column of an event,
 * from 0; what has no column here is NULL in all rows.
 */
typedef struct ObixSource
{
	Oid			relid;
	char	   *name;			/* for messages */
	char	   *quoted;			/* for statements, qualified */
	char	   *names[Natts_event]; /* of the columns, NULL: none */
	char	   *columns[Natts_event];	/* for statements: of "s" */
	char	   *values[Natts_event];	/* the same, of the types that
										 * obix_source_row() expects */
	Oid			types[Natts_event]; /* of the columns, but for domains */
	bool		may_lack_sequence;	/* there can be NULLs */
} ObixSource;

/* An event, and what the writer wants to know besides */
typedef struct ObixSourceRow
{
	int64		sequence;
	TimestampTz recorded_at;
	MinimalTuple event;
} ObixSourceRow;

extern void obix_source_open(ObixSource *source, Oid relid,
							 char *const *given);
extern char *obix_source_query(const ObixSource *source, int64 from, int64 to);
extern void obix_source_row(const ObixSource *source, HeapTuple tuple,
							TupleDesc desc, ObixSourceRow *row);
extern List *obix_source_tables(const ObixSource *source);
extern void obix_source_wait_for_writers(List *tables);

#endif							/* OBIX_SOURCE_H */
