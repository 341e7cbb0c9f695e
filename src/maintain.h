/*-------------------------------------------------------------------------
 *
 * maintain.h
 *	  Maintenance by hand.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_MAINTAIN_H
#define OBIX_MAINTAIN_H

/* Something to do on an outbox that gives way rather than wait */
typedef int64 (*ObixTask) (Oid relid, void *arg);

extern int64 obix_attempt(Oid relid, ObixTask task, void *arg);

#endif							/* OBIX_MAINTAIN_H */
