/*-------------------------------------------------------------------------
 *
 * removal.h
 *	  What follows when events, partitions or outboxes are removed.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_REMOVAL_H
#define OBIX_REMOVAL_H

#include "utils/rel.h"

extern void obix_removal_init(void);
extern bool obix_is_removed(Relation parent, int64 sequence, int64 resolved);

#endif							/* OBIX_REMOVAL_H */
