/*-------------------------------------------------------------------------
 *
 * late.h
 *	  What the cursor of a consumer has passed and is still to be delivered.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_LATE_H
#define OBIX_LATE_H

#include "delivery.h"

/* delivering */
extern void obix_deliver_late(ObixDelivery *delivery);
extern void obix_deliver_again(ObixDelivery *delivery);
extern void obix_deliver_available(ObixDelivery *delivery);

/* acknowledging, and failing */
extern void obix_count_available(ObixDelivery *delivery, int64 sequence);
extern bool obix_cut_range(ObixDelivery *delivery, int64 start,
						   int64 sequence);
extern void obix_acknowledge_late(ObixDelivery *delivery, int64 sequence);
extern bool obix_is_late(ObixDelivery *delivery, int64 sequence);
extern void obix_remove_late(ObixDelivery *delivery, int64 sequence);

/* the ranges themselves; all but the second between obix_begin_spi() and
 * obix_end_spi() */
extern bool obix_has_late(const ObixDelivery *delivery);
extern int64 obix_count_late(const ObixConsumerState *state);
extern void obix_add_requeued(int32 id, int64 sequence);
extern void obix_delete_ranges(int32 id, int64 from, int64 to);

#endif							/* OBIX_LATE_H */
