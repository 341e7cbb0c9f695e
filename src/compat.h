/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  What differs between the PostgreSQL releases that obix supports.
 *
 * The newest spelling is used everywhere; older servers get it from here.
 * Dropping a release is dropping its block.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_COMPAT_H
#define OBIX_COMPAT_H

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/tableam.h"
#include "executor/executor.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/sinvaladt.h"
#include "utils/acl.h"
#include "utils/backend_status.h"
#include "utils/regproc.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM < 150000
#error "obix needs PostgreSQL 15 or later"
#endif

/* PG19: scans have flags, insertion into indexes has them in one argument */
#if PG_VERSION_NUM < 190000
#define SO_NONE				0
#define table_beginscan(rel, snapshot, nkeys, key, flags) \
	table_beginscan(rel, snapshot, nkeys, key)
#if PG_VERSION_NUM >= 180000
#define index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys, flags) \
	index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys)
#endif
#if PG_VERSION_NUM >= 160000
#define ExecInsertIndexTuples(info, estate, flags, slot, arbiters, spec_conflict) \
	ExecInsertIndexTuples(info, slot, estate, false, false, spec_conflict, arbiters, false)
#endif
#ifndef pg_fallthrough
#if __has_attribute(fallthrough)
#define pg_fallthrough		__attribute__((fallthrough))
#else
#define pg_fallthrough
#endif
#endif
#endif

/* PG18: name and version of a module; more arguments, of which obix needs none */
#if PG_VERSION_NUM < 180000
#define PG_MODULE_MAGIC_EXT(...)	PG_MODULE_MAGIC
#define index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys, flags) \
	index_beginscan(heap, index, snapshot, nkeys, norderbys)
#define heap_form_minimal_tuple(desc, values, isnull, extra) \
	heap_form_minimal_tuple(desc, values, isnull)
#endif

/* PG17: what extensions wait for has names */
#if PG_VERSION_NUM < 170000
#define WaitEventExtensionNew(name) ((void) (name), PG_WAIT_EXTENSION)
#endif

/* PG17: ProcNumber, from 0, replaces BackendId, from 1 */
#if PG_VERSION_NUM < 170000
#include "storage/backendid.h"
#define MyProcNumber		(MyBackendId - 1)
#define INVALID_PROC_NUMBER InvalidBackendId
#define procNumber			backendId	/* of a VirtualTransactionId */
#define ProcNumberGetProc	BackendIdGetProc
#define pgstat_get_beentry_by_proc_number	pgstat_fetch_stat_beentry
#define PROC_LXID(proc)		((proc)->lxid)
#define LockHeldByMe(tag, mode, or_stronger) \
	LockHeldByMe(tag, mode)
#else
#define PROC_LXID(proc)		((proc)->vxid.lxid)
#define OBIX_HAS_TRANSACTION_TIMEOUT
#endif

/* PG16 */
#if PG_VERSION_NUM < 160000
#define object_ownercheck(class, object, role) \
	pg_class_ownercheck(object, role)
#define stringToQualifiedNameList(string, escontext) \
	stringToQualifiedNameList(string)
#define check_can_set_role(member, role)	check_is_member_of_role(member, role)
#define object_aclcheck(class, object, role, mode) \
	((class) == NamespaceRelationId ? \
	 pg_namespace_aclcheck(object, role, mode) : \
	 pg_proc_aclcheck(object, role, mode))
#define ExecInsertIndexTuples(info, estate, flags, slot, arbiters, spec_conflict) \
	ExecInsertIndexTuples(info, slot, estate, false, false, spec_conflict, arbiters)
#endif

#endif							/* OBIX_COMPAT_H */
