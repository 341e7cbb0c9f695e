/*-------------------------------------------------------------------------
 *
 * owner.h
 *	  When an outbox is given to another role, its partitions go with it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_OWNER_H
#define OBIX_OWNER_H

extern void obix_owner_init(void);

#endif							/* OBIX_OWNER_H */
