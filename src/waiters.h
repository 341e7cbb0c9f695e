/*-------------------------------------------------------------------------
 *
 * waiters.h
 *	  Sessions that wait until an outbox moves.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_WAITERS_H
#define OBIX_WAITERS_H

#include "storage/latch.h"

#include "outbox.h"

extern Size obix_waiters_shmem_size(void);
extern void obix_waiters_shmem_init(void *space);

/* for whoever moves the outbox, under its lock */
extern Latch *obix_begin_wave(ObixOutbox *outbox);
extern void obix_dismiss_waiters(ObixOutbox *outbox);

/* for who waits */
extern bool obix_join_waiters(ObixOutbox *outbox);
extern bool obix_sleep(long timeout);
extern long obix_take_turn(ObixOutbox *outbox, long timeout);
extern void obix_await_turn(long timeout);
extern void obix_leave_waiters(void);

#endif							/* OBIX_WAITERS_H */
