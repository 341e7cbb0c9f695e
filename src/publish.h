/*-------------------------------------------------------------------------
 *
 * publish.h
 *	  What the transaction callbacks need of publish.c.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_PUBLISH_H
#define OBIX_PUBLISH_H

#include "access/xact.h"

extern void obix_publish_flush(void);
extern void obix_publish_end(void);
extern void obix_publish_end_sub(SubXactEvent event, int level);

#endif							/* OBIX_PUBLISH_H */
