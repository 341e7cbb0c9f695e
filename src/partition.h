/*-------------------------------------------------------------------------
 *
 * partition.h
 *	  Making partitions ahead of the head, and recovering DEFAULT.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_PARTITION_H
#define OBIX_PARTITION_H

#include "utils/rel.h"

#include "registry.h"

/* DDL as obix runs it */
extern void obix_execute(const char *format,...) pg_attribute_printf(1, 2);
extern char *obix_quote_relation(Oid relid);
extern char *obix_free_name(const char *base, Oid namespace, const char *label);
extern Oid	obix_create_leaf(Oid parent, const char *name);
extern char obix_replica_identity(Oid relid, Oid *index);
extern void obix_set_replica_identity(Oid relid, char identity, Oid index);
extern void obix_follow_replica_identity(Oid parent, Oid leaf);
extern void obix_adopt(Oid parent, Oid leaf);
extern void obix_attach_range(Oid parent, Oid leaf, int64 lower, int64 upper);

/* locks */
extern void obix_give_way(Oid relid, LOCKMODE mode);
extern void obix_lock_outbox(Oid parent, LOCKMODE mode);
extern void obix_lock_default(Oid default_relid);

/* maintenance */
extern int	obix_add_partitions(Oid parent, int64 lower, int64 width,
								int count, bool far);
extern int	obix_premake(Oid relid);
extern int64 obix_recover(Oid relid, bool by_hand);
extern int64 obix_stranded(Relation parent);

#endif							/* OBIX_PARTITION_H */
