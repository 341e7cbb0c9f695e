/*-------------------------------------------------------------------------
 *
 * gapfill.h
 *	  Writing placeholders on proof.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_GAPFILL_H
#define OBIX_GAPFILL_H

extern int64 obix_fill(Oid relid, bool all);

#endif							/* OBIX_GAPFILL_H */
