/*-------------------------------------------------------------------------
 *
 * outbox.h
 *	  Shared state of outboxes: who has which sequences in flight.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_OUTBOX_H
#define OBIX_OUTBOX_H

#include "datatype/timestamp.h"
#include "lib/ilist.h"
#include "port/atomics.h"
#include "storage/latch.h"
#include "storage/lwlock.h"

/*
 * Work that fails is tried again later, but what holds up one kind must not
 * delay the other: readers wait for FILL.
 */
typedef enum ObixTroubleKind
{
	OBIX_TROUBLE_ROWS,			/* FILL and NOTIFY */
	OBIX_TROUBLE_PARTITIONS,	/* PREMAKE and RECOVER */
	OBIX_TROUBLE_KINDS
} ObixTroubleKind;

#define OBIX_ERROR_LENGTH	256

/* What is waited for */
typedef enum ObixWaitEvent
{
	OBIX_WAIT_LAUNCHER,			/* the launcher, for work */
	OBIX_WAIT_WORKER,			/* a worker or dispatcher, for work */
	OBIX_WAIT_EVENT,			/* obix.wait and obix.wait_for */
	OBIX_WAIT_MAINTENANCE,		/* a lock that somebody else holds */
	OBIX_WAIT_REBUILD,			/* obix.rebuild, for the dispatcher */
	OBIX_WAIT_EVENTS
} ObixWaitEvent;

typedef struct ObixTrouble
{
	int			failures;		/* since the last success */
	TimestampTz since;			/* when the first of them was, 0: none */
	TimestampTz retry_at;		/* when to try again, 0: no failure */
	bool		reported;		/* the log knows */
	char		last_error[OBIX_ERROR_LENGTH];
} ObixTrouble;

/* The oldest sequence that a backend's transaction has in flight. */
typedef struct ObixSlot
{
	dlist_node	node;			/* in ObixOutbox.in_flight while first > 0 */
	int64		first;			/* 0: nothing in flight */
	int			pid;			/* the backend */
} ObixSlot;

/* As long as no more than these wait, they are woken as fast as can be */
#define OBIX_FEW_WAITERS	4

/*
 * One outbox.  The key is written under both ObixShared.lock and lock, so
 * holding either is enough to read it.  Everything else is protected by lock,
 * but for the atomics.  Nothing but copying is
 * done under the lock.
 */
typedef struct ObixOutbox
{
	LWLock	   *lock;

	Oid			database;		/* key; InvalidOid: this entry is free */
	Oid			relation;
	int32		id;				/* obix.outbox.id, against oid reuse */

	int64		next_sequence;	/* the next to allocate */
	int64		suspect_from;	/* lowest that may be a hole, 0: none */
	int64		suspect_to;		/* highest that may be a hole */
	int64		undecided;		/* where a prepared transaction stopped the
								 * last walk from suspect_from, 0: nowhere */
	int64		premake_at;		/* allocating this asks for partitions */
	int64		premake_head;	/* head at the last look at partitions */
	TimestampTz premake_time;	/* when that was, 0: not yet */
	bool		accepting;		/* rows come with sequences of their own, and
								 * we have given out none since */
	bool		handled;		/* dispatchers serve consumers of it */
	bool		available;		/* consumers do not wait for the frontier */
	int64		moves;			/* times that the high-water mark rose, from 1 */
	int64		releases;		/* times that something may have committed */
	int64		placeholders;	/* written since this entry was made */
	uint32		rewinds;		/* times that the head went back */
	dlist_head	in_flight;		/* slots in the order of their first */
	int			in_flight_count;

	/* how maintenance fares, for back-off and obix.outbox_status */
	ObixTrouble troubles[OBIX_TROUBLE_KINDS];

	pg_atomic_uint32 work;		/* OBIX_WORK_*: level, cleared by the worker
								 * before it looks */
	pg_atomic_uint32 dispatch;	/* 1: dispatchers should look; cleared by one
								 * before it does */

	/* who waits until it moves, see waiters.c; times are of its clock */
	dlist_head	waiters;		/* the longest first */
	int64		wave;			/* grows when they are to look again */
	bool		waking;			/* one has been woken, and wakes the next */
	int64		woken_at;		/* when that was */
	int64		next_turn;		/* of those who are not */
	int			last_woken[OBIX_FEW_WAITERS];	/* among these: MyProcNumber +
												 * 1 */

	ObixSlot	slots[FLEXIBLE_ARRAY_MEMBER];	/* by MyProcNumber */
} ObixOutbox;

/* A consistent copy of the numbers of an outbox. */
typedef struct ObixPosition
{
	int64		head;			/* highest sequence allocated, 0: none */
	int64		frontier;		/* one less than the oldest in flight */
	int64		high_water_mark;	/* lower bound of what can be read now */
	int64		suspect_from;
	int64		undecided;
	int64		premake_head;
	TimestampTz premake_time;
	int64		placeholders;
	uint32		rewinds;
	int			in_flight;
	int			oldest_pid;		/* holder of the frontier, 0: none */
} ObixPosition;

/* What a worker does */
typedef enum ObixWorkerKind
{
	OBIX_WORKER_MAINTAIN,		/* looks after outboxes; one in a database */
	OBIX_WORKER_DISPATCH,		/* serves consumers; as many as
								 * obix.dispatch_workers */
	OBIX_WORKER_KINDS
} ObixWorkerKind;

/*
 * A worker of a database.  The launcher takes a place before it starts one, and
 * frees it when that has stopped.
 */
typedef struct ObixWorker
{
	Oid			database;		/* InvalidOid: the place is free */
	int			pid;			/* 0 unless it is on duty */
	Latch	   *latch;			/* NULL unless it is on duty */
	bool		busy;			/* a dispatcher that serves a consumer */
	bool		entered;		/* it has been on duty */
	bool		done;			/* it left of its own accord */
	bool		relieved;		/* it is to leave, another will look at all */
	bool		missed;			/* it could not look at all outboxes */
	bool		outdated;		/* because of the extension's version */
	uint32		looked_at;		/* extension_changes before it read that */
} ObixWorker;

/* Places for those who maintain come first, then those for dispatchers */
#define OBIX_MAX_MAINTAINERS	8
#define OBIX_MAX_DISPATCHERS	24
#define OBIX_MAX_WORKERS	(OBIX_MAX_MAINTAINERS + OBIX_MAX_DISPATCHERS)

/* Databases to be visited that the launcher is told at a time; else it visits all */
#define OBIX_MAX_REQUESTS	16

/* What all outboxes share */
typedef struct ObixShared
{
	LWLock	   *lock;			/* protects which entries are in use */
	LWLock	   *worker_lock;	/* protects launcher, workers and visits */
	LWLock	   *turn_lock;		/* protects consumers, see turn.h */
	LWLock	   *progress_lock;	/* protects operations, see progress.c */
	Latch	   *launcher;		/* NULL while there is none */
	int			launcher_pid;	/* 0 while there is none */
	TimestampTz refused_at;		/* when all worker slots of the server were
								 * taken, 0: not at the last attempt */
	ObixWorker	workers[OBIX_MAX_WORKERS];
	int			visits;			/* requested, may exceed the array */
	Oid			visit[OBIX_MAX_REQUESTS];
	pg_atomic_uint32 undecided; /* entries whose undecided is not 0 */
	pg_atomic_uint32 short_of_workers;	/* 1: others wait for a place */
	pg_atomic_uint32 database_news; /* 1: the launcher should look at
									 * pg_database; cleared before it does */
	pg_atomic_uint32 lacks_standby; /* 1: the log knows that handlers are not
									 * called for want of a standby */
	pg_atomic_uint32 extension_changes; /* times that the extension was
										 * created or updated in some database */
} ObixShared;

extern ObixShared *obix_shared;

extern void obix_shmem_request(void);
extern void obix_shmem_startup(void);
extern uint32 obix_wait_event(ObixWaitEvent event);
extern void obix_require_preload(void);

/* directory */
extern ObixOutbox *obix_find_outbox(Oid relation, int32 id);
extern ObixOutbox *obix_make_outbox(Oid relation, int32 id, int64 head,
									int64 resolved);
extern void obix_free_outboxes(Oid database, Oid relation);
extern ObixOutbox *obix_nth_outbox(int n);

/* sequences */
extern int64 obix_allocate(ObixOutbox *outbox, int64 count);
extern void obix_accept(ObixOutbox *outbox, int64 sequence);
extern int64 obix_advance(ObixOutbox *outbox, int64 last, bool *premake);
extern void obix_rewind(ObixOutbox *outbox, int64 next);
extern void obix_release(ObixOutbox *outbox, bool leaves_hole, bool prepared,
						 int64 last);
extern void obix_decided(ObixOutbox *outbox);
extern void obix_suspect(ObixOutbox *outbox, int64 sequence);
extern void obix_begin_walk(ObixOutbox *outbox, int64 *from, int64 *to,
							bool *allocates);
extern bool obix_raise_head(ObixOutbox *outbox, int64 head, uint32 rewinds);
extern void obix_end_walk(ObixOutbox *outbox, int64 next, int64 undecided,
						  int64 filled);
extern bool obix_get_position(ObixOutbox *outbox, Oid relation, int32 id,
							  ObixPosition *position);
extern void obix_set_audience(Oid database, Oid relation, bool handled,
							  bool available);
extern void obix_wake_waiters(Oid database, Oid relation);
extern void obix_premake_done(ObixOutbox *outbox, int64 head, int64 next);

#endif							/* OBIX_OUTBOX_H */
