/*-------------------------------------------------------------------------
 *
 * parked.h
 *	  Events that were given up, or are held back.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_PARKED_H
#define OBIX_PARKED_H

#include "delivery.h"

extern void obix_read_dead_letters(ObixDelivery *delivery);
extern bool obix_is_parked(const ObixDelivery *delivery, int64 sequence);
extern bool obix_is_held(const ObixDelivery *delivery, const char *key, int64 sequence);
extern void obix_park_event(const ObixDelivery *delivery, TupleTableSlot *slot,
							int32 attempts, const char *error);
extern bool obix_load_dead_letter(int32 id, int64 sequence,
								  TupleTableSlot *slot);
extern void obix_set_dead_letter_state(int32 id, int64 sequence,
									   const char *state);
extern char *obix_dead_letter_state(int32 id, int64 sequence);
extern void obix_forget_discarded(int32 id, ObixConsumerState *state, int64 start);
extern bool obix_has_dead_letters(int32 id);
extern int64 obix_count_dead_letters(int32 id, int64 max);

#endif							/* OBIX_PARKED_H */
