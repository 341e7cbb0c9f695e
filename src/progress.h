/*-------------------------------------------------------------------------
 *
 * progress.h
 *	  How far long operations are.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_PROGRESS_H
#define OBIX_PROGRESS_H

#include "datatype/timestamp.h"

/* What takes long, and is done within one transaction, or in one after another */
typedef enum ObixOperation
{
	OBIX_OPERATION_NONE,
	OBIX_OPERATION_RECOVERY,	/* counts rows to be moved */
	OBIX_OPERATION_FILL,		/* counts sequences walked */
	OBIX_OPERATION_IMPORT,		/* counts sequences imported */
	OBIX_OPERATIONS
} ObixOperation;

typedef enum ObixPhase
{
	OBIX_PHASE_LOCKING,			/* waiting for locks */
	OBIX_PHASE_MOVING,			/* moving rows */
	OBIX_PHASE_ATTACHING,		/* attaching partitions */
	OBIX_PHASE_WALKING,			/* walking along the primary key */
	OBIX_PHASE_COPYING,			/* copying rows */
	OBIX_PHASES
} ObixPhase;

extern Size obix_progress_shmem_size(void);
extern void obix_progress_shmem_init(void *space);

extern void obix_progress_begin(ObixOperation operation, Oid relation,
								bool by_hand);
extern void obix_progress_since(TimestampTz started_at);
extern void obix_progress_phase(ObixPhase phase, int64 total);
extern void obix_progress_done(int64 done);
extern void obix_progress_end(void);

#endif							/* OBIX_PROGRESS_H */
