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

/*
 * The partition that obix itself takes out of its outbox, and rows out of;
 * reset by whoever set it, also on error.
 */
extern Oid	obix_unguarded;

extern void obix_guard_init(void);

#endif							/* OBIX_INSERT_H */
