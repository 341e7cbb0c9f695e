/*-------------------------------------------------------------------------
 *
 * event.h
 *	  The columns of an event.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_EVENT_H
#define OBIX_EVENT_H

#include "access/htup.h"
#include "executor/tuptable.h"
#include "utils/rel.h"

/* Columns of an outbox and of obix.event */
#define Anum_event_sequence		1
#define Anum_event_id			2
#define Anum_event_type			3
#define Anum_event_key			4
#define Anum_event_payload		5
#define Anum_event_headers		6
#define Anum_event_recorded_at	7
#define Natts_event				7

extern TupleDesc obix_event_desc(void);
extern bool obix_has_columns(Relation rel);
extern void obix_check_columns(Relation rel);
extern MinimalTuple obix_form_placeholder(void);
extern void obix_store_event(TupleTableSlot *slot, const Datum *values,
							 const bool *isnull);

#endif							/* OBIX_EVENT_H */
