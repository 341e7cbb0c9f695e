/*-------------------------------------------------------------------------
 *
 * read.h
 *	  What the status views need of read.c.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_READ_H
#define OBIX_READ_H

#include "relation.h"

extern int64 obix_exact_high_water_mark(Relation parent, ObixRelation *known);

#endif							/* OBIX_READ_H */
