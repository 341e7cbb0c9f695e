/*-------------------------------------------------------------------------
 *
 * consumer.h
 *	  The tables of consumers: definitions, and how far each consumer is.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_CONSUMER_H
#define OBIX_CONSUMER_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"
#include "storage/lock.h"
#include "utils/array.h"

#include "relation.h"

/* A row of obix.consumer, or what a rebuild makes of it */
typedef struct ObixConsumer
{
	int32		id;				/* negative: the rebuild of a consumer */
	char	   *name;
	Oid			outbox;
	Oid			owner;
	int32		version;
	bool		paused;
	ArrayType  *types;			/* NULL: all */
	char	   *handler;		/* NULL: none */
	char	   *batch_handler;	/* NULL: none */
	bool		available;		/* ordering */
	int32		batch_size;
	double		timeout;		/* in milliseconds, like the next */
	int32		max_attempts;	/* 0: no limit */
	double		backoff;
	double		max_backoff;
	bool		dead_letter;	/* on_failure */
	bool		hold_key;
	ArrayType  *tables;			/* NULL: none */
	char	   *gate;			/* NULL: none */
	char	   *search_path;
	bool		own;			/* changed by this transaction */
} ObixConsumer;

/* obix.consumer_state.state */
#define OBIX_CONSUMER_ACTIVE	'a'
#define OBIX_CONSUMER_STOPPED	's'
#define OBIX_CONSUMER_PARKED	'p'

/* A row of obix.consumer_state */
typedef struct ObixConsumerState
{
	int32		id;
	int64		position;		/* the cursor */
	int64		scanned;
	char		state;
	int64		fetched;		/* holes up to here have been recorded; -1:
								 * fetch again before acknowledging */
	bool		late;			/* there is more to deliver than what lies
								 * ahead */
	bool		parked;			/* there are dead letters */
	int32		one_by_one;
	int32		attempts;
	int64		attempt_sequence;
	TimestampTz attempted_at;	/* 0: NULL, for all times here */
	TimestampTz retry_at;
	int64		token;
	TimestampTz lease_until;
	int64		delivered;
	int64		failed;
	int64		dead_lettered;
	TimestampTz last_event_at;
	char	   *last_error;		/* NULL: none */

	Oid			outbox;			/* of the consumer */
	bool		own;			/* changed by this transaction */
	ItemPointerData tid;		/* where the row was read */
} ObixConsumerState;

/* The mutex of a consumer, among the locks on (obix.consumer, id) */
#define OBIX_MUTEX_CONSUMER		1

/* What obix keeps of an error message, in bytes */
#define OBIX_LAST_ERROR_LENGTH	256

extern void obix_consumer_init(void);
extern void obix_consumer_end(void);

/* definitions */
extern Oid	obix_consumer_relid(void);
extern bool obix_find_consumer(const char *name, ObixConsumer *consumer);
extern bool obix_get_consumer(int32 id, ObixConsumer *consumer);
extern void obix_open_consumer(const char *name, ObixConsumer *consumer);
extern List *obix_list_consumers(Oid outbox);
extern void obix_check_use(const ObixConsumer *consumer);
extern bool obix_may_use(const ObixConsumer *consumer);
extern void obix_report_moved(void);

/* states */
extern void obix_set_consumer_tag(LOCKTAG *tag, int32 id);
extern void obix_lock_consumer(int32 id);
extern bool obix_try_lock_consumer(int32 id);
extern bool obix_find_state(int32 id, Oid outbox, ObixConsumerState *state);
extern void obix_get_state(const ObixConsumer *consumer,
						   ObixConsumerState *state);
extern void obix_set_state(ObixConsumerState *state);
extern void obix_add_state(ObixConsumerState *state);
extern void obix_settle_attempts(ObixConsumerState *state, int64 sequence);
extern void obix_set_last_error(ObixConsumerState *state, const char *error);

/* SQL on the tables of consumers, as their owner */
extern const Oid obix_id_sequence_types[2];

extern void obix_begin_spi(ObixIdentity *saved);
extern uint64 obix_run(const char *sql, int nargs, const Oid *types,
					   Datum *values, const bool *isnull);
extern Datum obix_spi_value(uint64 row, int column, bool *isnull);
extern void obix_grow_version(int32 id);
extern void obix_end_spi(const ObixIdentity *saved);

extern void obix_delete_state(int32 id);
extern void obix_clear_number(int32 id);
extern void obix_delete_consumer(const ObixConsumer *consumer);

#endif							/* OBIX_CONSUMER_H */
