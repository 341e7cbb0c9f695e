/*-------------------------------------------------------------------------
 *
 * turn.h
 *	  Shared state of consumers: who has something to do, and who is at it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_TURN_H
#define OBIX_TURN_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"

#include "outbox.h"

/* ObixTurn.seen: nothing to do until the consumer is touched */
#define OBIX_SEEN_ALL		PG_INT64_MAX

/*
 * What somebody who fetched knows.  It stays true whatever happens, as long as
 * the definition has this version: facts about the table, not about the cursor.
 */
typedef struct ObixFound
{
	int32		version;		/* of the definition, 0: nothing is known */
	int64		nothing_after;	/* no event for it with */
	int64		nothing_to;		/* nothing_after < sequence <= nothing_to */
	int64		after;			/* the events for it with */
	int64		to;				/* after < sequence <= to */
	int64		count;			/* are so many */
	TimestampTz last_at;		/* and this is recorded_at of the last */
} ObixFound;

/* Where a consumer was at some time */
typedef struct ObixMark
{
	int64		position;
	TimestampTz at;				/* 0: no mark */
} ObixMark;

/*
 * One consumer.  Everything is protected by ObixShared.turn_lock.  Entries are
 * made on first use, and nothing in them is needed after a restart.
 */
typedef struct ObixTurn
{
	Oid			database;		/* key; InvalidOid: this entry is free */
	int32		id;				/* obix.consumer.id, negative: its rebuild */
	Oid			outbox;

	bool		handled;		/* dispatchers serve it */
	bool		available;		/* it does not wait for what is in flight */
	int			pid;			/* the dispatcher that serves it, 0: none */
	uint32		touched;		/* grows when something has changed */
	int64		seen;			/* outbox->moves, or releases, when nothing
								 * was left to do */
	TimestampTz due_at;			/* not to be served before this */
	TimestampTz until;			/* nor after this, 0: no limit */
	TimestampTz served_at;		/* when it was served last */

	ObixMark	marks[2];		/* where it was a while ago, and since */

	bool		gate_proved;	/* its gate has been asked, and has answered */
	ItemPointerData tid;		/* a place in the update chain of its state */
	ObixFound	found;
} ObixTurn;

/* What a dispatcher takes with it */
typedef struct ObixClaim
{
	int32		id;
	uint32		touched;
	bool		more;			/* others are due as well */
	TimestampTz due_at;			/* when one is due next, 0: none */
} ObixClaim;

extern Size obix_turn_shmem_size(void);
extern void obix_turn_shmem_init(void *space);

extern bool obix_turn_add(int32 id, Oid outbox, bool handled, bool available);
extern void obix_turn_require(int32 id, Oid outbox, bool handled,
							  bool available);
extern void obix_turn_forget(Oid database, Oid outbox, int32 id);
extern void obix_turn_touch(Oid database, int32 id);
extern bool obix_turn_gate_proved(int32 id);
extern void obix_turn_prove_gate(int32 id);
extern bool obix_turn_may_go_on(int32 id);
extern void obix_turn_extend(int32 id, TimestampTz until);

extern bool obix_turn_claim(TimestampTz now, ObixClaim *claim);
extern bool obix_turn_claim_one(int32 id);
extern void obix_turn_unclaim(int32 id);
extern void obix_turn_end(ObixClaim *claim, int64 seen, TimestampTz due_at);
extern void obix_turn_end_all(void);
extern int	obix_turn_pid(int32 id);
extern Oid	obix_turn_next(int *n, TimestampTz now, TimestampTz *due_at);

extern int64 obix_turn_tide(int32 id, uint32 *touched);
extern void obix_turn_idle(int32 id, uint32 touched, int64 tide);
extern bool obix_turn_is_idle(int32 id);

extern bool obix_turn_get_tid(int32 id, ItemPointer tid);
extern void obix_turn_set_tid(int32 id, ItemPointer tid, int64 position);
extern double obix_turn_rate(int32 id, int64 position);
extern int	obix_count_turns(void);
extern bool obix_turn_get_found(int32 id, ObixFound *found);
extern int64 obix_turn_nothing_to(int32 id, int32 version, int64 start);
extern void obix_turn_set_found(int32 id, const ObixFound *found);

#endif							/* OBIX_TURN_H */
