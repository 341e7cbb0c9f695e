/*-------------------------------------------------------------------------
 *
 * swappable.h
 *	  What belongs to a table, and what is in the way of replacing it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_SWAPPABLE_H
#define OBIX_SWAPPABLE_H

#include "access/htup.h"
#include "catalog/objectaddress.h"
#include "nodes/pg_list.h"
#include "utils/rel.h"

/* A copy of the row of an object that exists, found by its oid */
#define ROW(catalog, cache, object) \
	((Form_##catalog) GETSTRUCT(obix_copy_row(cache, object)))

extern HeapTuple obix_copy_row(int cache, Oid object);
extern List *obix_list_rows(Oid catalog, Oid index, AttrNumber column1,
							Oid value1, AttrNumber column2, Oid value2);
extern List *obix_find_members(Relation rel);
extern List *obix_check_table(Relation rel);
extern char *obix_member_name(const ObjectAddress *member);
extern void obix_check_swappable(List *relids, Oid owner);

#endif							/* OBIX_SWAPPABLE_H */
