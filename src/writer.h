/*-------------------------------------------------------------------------
 *
 * writer.h
 *	  Inserting rows with ascending sequences straight into the leaves.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_WRITER_H
#define OBIX_WRITER_H

#include "access/heapam.h"
#include "access/htup.h"
#include "nodes/execnodes.h"

#include "bounds.h"

#define OBIX_BATCH_ROWS		1000
#define OBIX_BATCH_BYTES	65536

typedef struct ObixWriter
{
	Relation	parent;
	bool		placeholders;	/* not events, see obix_writer_begin() */
	bool		bulk;			/* go through a small ring of buffers */
	bool		owner_code;		/* inserting evaluates expressions of the
								 * owner's */

	ObixLeaf	leaf;			/* of the rows in the batch */
	Relation	rel;			/* NULL: none is open */
	ResultRelInfo *info;
	EState	   *estate;
	BulkInsertState bistate;

	MemoryContext context;		/* of everything here */
	MemoryContext batch_context;	/* of the rows in the batch */
	TupleTableSlot **slots;		/* up to OBIX_BATCH_ROWS, made as needed */
	int			nslots;			/* slots made for this leaf */
	int			maxslots;
	int			nrows;			/* rows in the batch */
	Size		bytes;
} ObixWriter;

extern void obix_writer_init(void);
extern ObixWriter *obix_writer_begin(Relation parent, bool placeholders,
									 bool bulk);
extern bool obix_writer_put(ObixWriter *writer, MinimalTuple event,
							int64 sequence, TimestampTz recorded_at);
extern void obix_writer_end(ObixWriter *writer);
extern void obix_check_placeholder(Relation parent);
extern void obix_check_placeholder_indexes(Relation leaf);

#endif							/* OBIX_WRITER_H */
