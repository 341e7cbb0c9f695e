/*-------------------------------------------------------------------------
 *
 * handler.h
 *	  Finding and calling the functions of consumers.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_HANDLER_H
#define OBIX_HANDLER_H

#include "access/tupdesc.h"
#include "utils/tuplestore.h"

#include "consumer.h"

/* What a function of a consumer is called with */
typedef enum ObixFunctionKind
{
	OBIX_FUNCTION_HANDLER,		/* an obix.event */
	OBIX_FUNCTION_BATCH,		/* an array of obix.event */
	OBIX_FUNCTION_GATE			/* nothing; returns boolean */
} ObixFunctionKind;

/* The functions of a consumer, resolved; InvalidOid: it has none */
typedef struct ObixFunctions
{
	Oid			handler;
	Oid			batch_handler;
	Oid			gate;
} ObixFunctions;

extern Oid	obix_event_type(void);
extern char *obix_check_function(const char *name, ObixFunctionKind kind,
								 Oid owner);
extern Oid	obix_function_by_name(const char *name, ObixFunctionKind kind);
extern const char *obix_resolve_functions(const ObixConsumer *consumer,
										  ObixFunctions *functions);

extern void obix_handler_init(void);
extern bool obix_ask_gate(const ObixConsumer *consumer, Oid gate);
extern void obix_call_handlers(const ObixConsumer *consumer,
							   const ObixFunctions *functions,
							   Tuplestorestate *events, TupleDesc desc,
							   int64 count);
extern void obix_stop_timeout(void);
extern void obix_handler_commits(void);
extern void obix_forget_timeouts(void);
extern bool obix_handler_timed_out(void);
extern void obix_clean_session(void);

#endif							/* OBIX_HANDLER_H */
