/*-------------------------------------------------------------------------
 *
 * delivery.h
 *	  What comes next for a consumer, and what becomes of it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_DELIVERY_H
#define OBIX_DELIVERY_H

#include "consumer.h"
#include "read.h"

/*
 * So many sequences that are not for a consumer are looked at again rather than
 * its state be written.
 */
#define OBIX_SCAN_STEP		1000

/* So many are looked at in one delivery, where none is for the consumer */
#define OBIX_SCAN_LIMIT		1000000

/* A key that is held back, and the lowest sequence of a dead letter of it */
typedef struct ObixHeldKey
{
	char	   *key;
	int64		sequence;
} ObixHeldKey;

/*
 * One delivery to a consumer.  The caller holds the mutex of the consumer and
 * a lock on the outbox.
 */
typedef struct ObixDelivery
{
	const ObixConsumer *consumer;
	ObixConsumerState *state;
	ObixReader	reader;			/* parent, known, shared, snapshot, store */

	Datum	   *types;			/* those it wants, as text; NULL: all */
	int			ntypes;
	int64	   *parked;			/* dead letters ahead, ascending */
	int			nparked;
	ObixHeldKey *held;			/* keys behind dead letters, ascending */
	int			nheld;
	int64		resolved;		/* of the outbox, read before its rows */
	bool		counting;		/* for an acknowledgement: park nothing */
	bool		has_parked;		/* events that are held back */
	int64		again;			/* event to be tried again before any other,
								 * 0: none in particular */
	bool		unsure;			/* what is found depends on what this
								 * transaction has changed */

	/* what was delivered */
	bool		more;			/* there may be more, though nothing was */

	/* what the caller knows to have been delivered before */
	int64		count;			/* up to what it acknowledges, 0: not known */
	TimestampTz last_at;
} ObixDelivery;

extern void obix_begin_delivery(ObixDelivery *delivery,
								const ObixConsumer *consumer,
								ObixConsumerState *state, const char *function);
extern void obix_end_delivery(ObixDelivery *delivery);
extern void obix_deliver_next(ObixDelivery *delivery);
extern void obix_acknowledge(ObixDelivery *delivery, int64 sequence);

/* What obix_fail_event() has decided */
typedef enum ObixVerdict
{
	OBIX_RETRY,
	OBIX_STOP,
	OBIX_DEAD_LETTER
} ObixVerdict;

extern void obix_count_attempt(const ObixConsumer *consumer,
							   ObixConsumerState *state, int64 sequence);
extern ObixVerdict obix_fail_event(ObixDelivery *delivery, int64 sequence,
								   const char *error);
extern bool obix_may_try(const ObixConsumerState *state, TimestampTz now);
extern int64 obix_delivery_start(const ObixConsumerState *state);
extern void obix_check_handed_out(ObixDelivery *delivery, int64 sequence);
extern const char *obix_release_dead_letter(const ObixConsumer *consumer,
											ObixConsumerState *state,
											int64 sequence, bool requeue);

#endif							/* OBIX_DELIVERY_H */
