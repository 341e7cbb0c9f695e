/*-------------------------------------------------------------------------
 *
 * shadow.h
 *	  Making tables anew beside those in use, and swapping them.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_SHADOW_H
#define OBIX_SHADOW_H

#include "nodes/pg_list.h"

extern void obix_make_shadow(const char *schema, List *relids, Oid owner);
extern List *obix_swap_shadow(const char *schema, List *relids, Oid owner);
extern void obix_drop_shadow(const char *schema);

#endif							/* OBIX_SHADOW_H */
