/*-------------------------------------------------------------------------
 *
 * xact.h
 *	  What the current transaction has to do with outboxes.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_XACT_H
#define OBIX_XACT_H

#include "access/xact.h"
#include "utils/rel.h"
#include "utils/resowner.h"

#include "outbox.h"

typedef struct ObixXact ObixXact;

/* Is this the worker of a database?  Set once, when it starts. */
extern bool obix_in_worker;

extern ObixXact *obix_xact(Relation parent, ObixOutbox *outbox);
extern void obix_xact_locked(ObixXact *xact);
extern ObixXact *obix_xact_if_locked(Oid relid);
extern int64 obix_xact_allocate(ObixXact *xact, int64 count);
extern int64 obix_xact_draw(ObixXact *xact);
extern bool obix_xact_use(Oid relid, int64 sequence);
extern void obix_xact_advance(ObixXact *xact, int64 last);
extern void obix_xact_accept(ObixXact *xact, int64 sequence);
extern ErrorData *obix_xact_roll_back_sub(MemoryContext context,
										  ResourceOwner owner);
extern void obix_xact_request_work(Oid relid, uint32 work);
extern void obix_xact_may_leave_hole(Oid relid);
extern void obix_xact_walked(ObixXact *xact, int64 next, int64 undecided,
							 int64 filled);

extern void obix_xact_touch_consumer(int32 id);
extern void obix_xact_created_consumer(int32 id);
extern void obix_xact_dropped_consumer(int32 id);
extern void obix_xact_ends_prepared(void);
extern void obix_xact_changes_extension(bool update);
extern void obix_xact_visit(Oid database);
extern void obix_xact_check_prepare(void);
extern void obix_xact_wait_for_rebuild(int32 id);
extern void obix_xact_created(Oid relid);
extern void obix_xact_commit_locally(void);
extern bool obix_xact_waits_for_standby(void);
extern bool obix_xact_lacks_standby(void);
extern void obix_xact_note_databases(void);
extern void obix_xact_dropped(Oid database, Oid relid);
extern bool obix_xact_has_dropped(Oid relid);

extern void obix_xact_end(XactEvent event);
extern void obix_xact_end_sub(SubXactEvent event, int level);

#endif							/* OBIX_XACT_H */
