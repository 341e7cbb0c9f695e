/*-------------------------------------------------------------------------
 *
 * rebuild.h
 *	  Rebuilding the tables that handlers maintain.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_REBUILD_H
#define OBIX_REBUILD_H

#include "consumer.h"

extern bool obix_as_rebuild(ObixConsumer *consumer);
extern void obix_check_rebuild(const ObixConsumer *rebuild);
extern void obix_analyze_rebuild(const ObixConsumer *rebuild);
extern bool obix_hand_over(const ObixConsumer *rebuild, bool nothing_left);
extern bool obix_is_being_rebuilt(int32 id);
extern void obix_cancel_rebuild_of(const ObixConsumer *consumer);

#endif							/* OBIX_REBUILD_H */
