/*-------------------------------------------------------------------------
 *
 * relation.h
 *	  Opening an outbox: what it must look like, and attaching to its state.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_RELATION_H
#define OBIX_RELATION_H

#include "nodes/parsenodes.h"
#include "utils/rel.h"

#include "event.h"
#include "outbox.h"
#include "registry.h"

#define OBIX_GUARD_NAME		"zz_obix_guard"
#define OBIX_TRUNCATE_NAME	"zz_obix_truncate"

/* What a session remembers of an outbox, until the relation changes. */
typedef struct ObixRelation
{
	Oid			relid;			/* hash key */
	bool		valid;			/* nothing has changed since we looked */
	bool		publishable;	/* no objection to publishing */
	int32		id;				/* obix.outbox.id */
	bool		attached;		/* shared was good when we looked */
	ObixOutbox *shared;			/* check the key before use */
} ObixRelation;

extern void obix_relation_init(void);
extern ObixRelation *obix_remember(Oid relid);
extern ObixRelation *obix_get_relation(Relation parent);
extern Relation obix_try_open(Oid relid, LOCKMODE lockmode,
							  ObixRelation **known);
extern Relation obix_open(Oid relid, LOCKMODE lockmode, ObixRelation **known);
extern Relation obix_open_to_read(Oid relid, ObixRelation **known);
extern Relation obix_try_open_to_read(Oid relid, ObixRelation **known);
extern Relation obix_open_to_maintain(Oid relid, ObixMutex mutex,
									  LOCKMODE lockmode,
									  ObixRegistryRow *row,
									  ObixRelation **known);
extern void obix_forget_dropped(Oid relid);
extern ObixOutbox *obix_try_attach(Relation parent, ObixRelation *known);
extern ObixOutbox *obix_attach(Relation parent, ObixRelation *known);

extern bool obix_is_partitioned(Relation parent);
extern bool obix_has_guard(Relation parent);
extern const char *obix_why_not_ready(Relation parent);
extern void obix_check_ready(Relation parent);
extern void obix_check_writable(const char *function);
extern void obix_check_enabled(const char *function);
extern void obix_check_insertable(Relation rel);
extern bool obix_is_subscribed(Oid relid, bool *copied);
extern bool obix_subscribes(Relation parent, bool *copied);
extern void obix_check_privilege(Oid relid, AclMode mode);
extern void obix_check_owner(Oid relid);
extern bool obix_may_select(Oid relid, Oid role);
extern bool obix_may_read(Oid relid, Oid role);
extern void obix_check_row_security(Oid relid, const char *function);

/* Acting as the owner of an outbox */
typedef struct ObixIdentity
{
	Oid			userid;
	int			sec_context;
	int			nestlevel;
} ObixIdentity;

extern void obix_become_owner(Relation parent, ObixIdentity *saved);
extern void obix_become_self(const ObixIdentity *saved);

#endif							/* OBIX_RELATION_H */
