/*-------------------------------------------------------------------------
 *
 * insert.h
 *	  What others need of the guard of plain INSERTs.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_INSERT_H
#define OBIX_INSERT_H

/* Set while obix itself moves rows; reset by whoever set it, also on error. */
extern bool obix_guard_suspended;

extern void obix_guard_init(void);

#endif							/* OBIX_INSERT_H */
