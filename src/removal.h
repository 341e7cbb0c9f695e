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

extern void obix_removal_init(void);

#endif							/* OBIX_REMOVAL_H */
