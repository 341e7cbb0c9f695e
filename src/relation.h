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

#include "outbox.h"

/* Columns of an outbox and of obix.event */
#define Anum_event_sequence		1
#define Anum_event_id			2
#define Anum_event_type			3
#define Anum_event_key			4
#define Anum_event_payload		5
#define Anum_event_headers		6
#define Anum_event_recorded_at	7
#define Natts_event				7

#define OBIX_GUARD_NAME		"zz_obix_guard"
#define OBIX_TRUNCATE_NAME	"zz_obix_truncate"

/* What a session remembers of an outbox, until the relation changes. */
typedef struct ObixRelation
{
	Oid			relid;			/* hash key */
	bool		valid;			/* nothing has changed since we looked */
	bool		publishable;	/* no objection to publishing */
	int32		id;				/* obix.outbox.id */
	ObixOutbox *shared;			/* a hint: check the key before use */
} ObixRelation;

extern void obix_relation_init(void);
extern ObixRelation *obix_remember(Oid relid);
extern ObixRelation *obix_get_relation(Relation parent);
extern Relation obix_open(Oid relid, LOCKMODE lockmode, ObixRelation **known);
extern ObixOutbox *obix_attach(Relation parent, ObixRelation *known);

extern const char *obix_why_not_ready(Relation parent);
extern void obix_check_ready(Relation parent);
extern void obix_check_writable(const char *function);
extern void obix_check_enabled(const char *function);
extern Oid	obix_guard_oid(void);
extern void obix_check_columns(Relation rel);
extern void obix_check_insertable(Relation rel);
extern void obix_check_privilege(Oid relid, AclMode mode);
extern void obix_check_owner(Oid relid);
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

extern TupleDesc obix_event_desc(void);

#endif							/* OBIX_RELATION_H */
