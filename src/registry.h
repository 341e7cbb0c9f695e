/*-------------------------------------------------------------------------
 *
 * registry.h
 *	  The table obix.outbox, and the heavyweight locks named after its rows.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_REGISTRY_H
#define OBIX_REGISTRY_H

#include "nodes/pg_list.h"
#include "storage/lockdefs.h"

/* A row of obix.outbox */
typedef struct ObixRegistryRow
{
	Oid			outbox;
	int32		id;
	int64		partition_width;
	int32		premake;
	int64		resolved;
} ObixRegistryRow;

/*
 * What is serialised per outbox, across sessions, until the end of the
 * transaction.  In this order where one transaction takes several.
 */
typedef enum ObixMutex
{
	OBIX_MUTEX_PARTITIONS = 1,	/* making partitions, recovering DEFAULT */
	OBIX_MUTEX_FILL = 2,		/* walking from suspect_from */
	OBIX_MUTEX_ROW = 3			/* updating the registry row */
} ObixMutex;

extern void obix_registry_init(void);
extern Oid	obix_member_relid(const char *name);
extern Oid	obix_registry_relid(void);
extern Oid	obix_guard_oid(void);
extern bool obix_registry_find(Oid outbox, ObixRegistryRow *row);
extern List *obix_registry_list(void);
extern void obix_registry_insert(Oid outbox, int64 partition_width,
								 int32 premake);
extern void obix_registry_update(const ObixRegistryRow *row);
extern void obix_registry_delete(Oid outbox);
extern bool obix_keep_extension(void);
extern void obix_lock_mutex(int32 id, ObixMutex mutex);
extern PGDLLIMPORT bool obix_no_wait;

extern void obix_limit_lock_waits(void);
extern bool obix_is_busy(int sqlerrcode);
extern bool obix_try_mutex(int32 id, ObixMutex mutex);
extern bool obix_raise_resolved(Oid outbox, int64 resolved, bool wait);

#endif							/* OBIX_REGISTRY_H */
