/*-------------------------------------------------------------------------
 *
 * define.c
 *	  Creating, altering, moving and dropping consumers.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "consumer.h"
#include "delivery.h"
#include "handler.h"
#include "parked.h"
#include "obix.h"
#include "read.h"
#include "rebuild.h"
#include "turn.h"
#include "xact.h"

/* Bounds of what a consumer can be set to */
#define MAX_NAME_BYTES		63
#define MAX_BATCH_SIZE		100000
#define MAX_BACKOFF_MS		(36525.0 * SECS_PER_DAY * 1000.0)

PG_FUNCTION_INFO_V1(obix_create_consumer);
PG_FUNCTION_INFO_V1(obix_alter_consumer);
PG_FUNCTION_INFO_V1(obix_drop_consumer);
PG_FUNCTION_INFO_V1(obix_pause);
PG_FUNCTION_INFO_V1(obix_resume);
PG_FUNCTION_INFO_V1(obix_seek);
PG_FUNCTION_INFO_V1(obix_requeue);
PG_FUNCTION_INFO_V1(obix_discard);

/*
 * A definition while it is being made: the columns of obix.consumer that can be
 * altered, as Datums for the statement that writes them.
 */
enum
{
	ID, OWNER, TYPES, HANDLER, BATCH_HANDLER, BATCH_SIZE, TIMEOUT, MAX_ATTEMPTS,
	BACKOFF, MAX_BACKOFF, ON_FAILURE, HOLD_KEY, TABLES, GATE, SEARCH_PATH,
	ALTERABLE,
	NAME = ALTERABLE, OUTBOX, ORDERING,
	COLUMNS
};

static const Oid column_types[COLUMNS] = {
	[ID] = INT4OID,
	[OWNER] = REGROLEOID,
	[TYPES] = TEXTARRAYOID,
	[HANDLER] = TEXTOID,
	[BATCH_HANDLER] = TEXTOID,
	[BATCH_SIZE] = INT4OID,
	[TIMEOUT] = INTERVALOID,
	[MAX_ATTEMPTS] = INT4OID,
	[BACKOFF] = INTERVALOID,
	[MAX_BACKOFF] = INTERVALOID,
	[ON_FAILURE] = TEXTOID,
	[HOLD_KEY] = BOOLOID,
	[TABLES] = REGCLASSARRAYOID,
	[GATE] = TEXTOID,
	[SEARCH_PATH] = TEXTOID,
	[NAME] = TEXTOID,
	[OUTBOX] = REGCLASSOID,
	[ORDERING] = TEXTOID,
};

typedef struct ObixDefinition
{
	Datum		values[COLUMNS];
	bool		isnull[COLUMNS];
	bool		given[COLUMNS]; /* by the user, in this call */
} ObixDefinition;

static void
check_array(const char *name, Datum value)
{
	ArrayType  *array = DatumGetArrayTypeP(value);

	if (ARR_NDIM(array) != 1 || array_contains_nulls(array))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a list of one element or more, without nulls",
						name)));
}

/* Error out unless an interval lies between a millisecond and a maximum. */
static void
check_interval(const char *name, Datum value, double max_ms)
{
	double		ms = obix_interval_ms(DatumGetIntervalP(value));

	if (ms < 1 || ms > max_ms)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s is out of range", name),
				 errdetail("It must be at least 1 ms and at most %.0f days.",
						   floor(max_ms / (SECS_PER_DAY * 1000.0)))));
}

static void
check_one_of(const char *name, Datum value, const char *first, const char *second)
{
	char	   *given = TextDatumGetCString(value);

	if (strcmp(given, first) != 0 && strcmp(given, second) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid value for %s: \"%s\"", name, given),
				 errhint("Valid values are \"%s\" and \"%s\".", first, second)));
}

/* Check a function's name, and make it the qualified one. */
static void
check_function(ObixDefinition *definition, int column, ObixFunctionKind kind,
			   Oid owner)
{
	if (!definition->isnull[column] &&
		(definition->given[column] || definition->given[OWNER]))
		definition->values[column] =
			CStringGetTextDatum(obix_check_function(TextDatumGetCString(definition->values[column]),
													kind, owner));
}

/* Error out unless a definition is one that works. */
static void
check_definition(ObixDefinition *definition, bool available)
{
	Datum	   *values = definition->values;
	bool	   *isnull = definition->isnull;
	Oid			owner = DatumGetObjectId(values[OWNER]);
	bool		handled = !isnull[HANDLER] || !isnull[BATCH_HANDLER];
	int32		batch_size = DatumGetInt32(values[BATCH_SIZE]);

	if (!isnull[TYPES])
		check_array("types", values[TYPES]);
	if (batch_size < 1 || batch_size > MAX_BATCH_SIZE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("batch_size must be between 1 and %d", MAX_BATCH_SIZE)));
	check_interval("timeout", values[TIMEOUT], PG_INT32_MAX);
	check_interval("backoff", values[BACKOFF], MAX_BACKOFF_MS);
	check_interval("max_backoff", values[MAX_BACKOFF], MAX_BACKOFF_MS);
	if (!isnull[MAX_ATTEMPTS] && DatumGetInt32(values[MAX_ATTEMPTS]) < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be at least 1"),
				 errhint("NULL means that there is no limit.")));
	check_one_of("on_failure", values[ON_FAILURE], "stop", "dead_letter");
	if (DatumGetBool(values[HOLD_KEY]) &&
		(available ||
		 strcmp(TextDatumGetCString(values[ON_FAILURE]), "dead_letter") != 0))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("hold_key needs on_failure => 'dead_letter' and ordering => 'sequence'"),
				 errdetail("It keeps events behind a dead letter of their key, in order.")));
	if (!isnull[TABLES])
		check_array("tables", values[TABLES]);
	if (!handled && (!isnull[TABLES] || !isnull[GATE]))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s needs a handler", isnull[GATE] ? "tables" : "gate")));
	check_function(definition, HANDLER, OBIX_FUNCTION_HANDLER, owner);
	check_function(definition, BATCH_HANDLER, OBIX_FUNCTION_BATCH, owner);
	check_function(definition, GATE, OBIX_FUNCTION_GATE, owner);
}

static void
check_name(const char *name)
{
	if (name[0] == '\0' || strlen(name) > MAX_NAME_BYTES)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_NAME),
				 errmsg("invalid name of a consumer: \"%s\"", name),
				 errdetail("It must have 1 to %d bytes.", MAX_NAME_BYTES)));
}

/*
 * A position that a consumer can have: NULL is before the oldest kept event.
 */
static int64
check_position(Relation parent, ObixRelation *known, bool isnull, int64 after)
{
	ObixPosition position;

	if (isnull)
		return obix_oldest_kept(parent, obix_resolved(RelationGetRelid(parent))) - 1;
	if (after < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("position %lld is out of range", (long long) after),
				 errhint("The position before the first event is 0.")));
	obix_get_position(obix_attach(parent, known), RelationGetRelid(parent),
					  known->id, &position);
	if (after > position.head)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("position %lld is beyond the head of outbox \"%s\"",
						(long long) after, RelationGetRelationName(parent)),
				 errdetail("The highest sequence allocated is %lld.",
						   (long long) position.head)));
	return after;
}

/*
 * obix.create_consumer(consumer, outbox, start_after, types, handler,
 *		batch_handler, ordering, batch_size, timeout, max_attempts, backoff,
 *		max_backoff, on_failure, hold_key, tables, gate)
 */
Datum
obix_create_consumer(PG_FUNCTION_ARGS)
{
	static const struct
	{
		const char *name;		/* of what must not be null */
		int			column;
	}			arguments[] =
	{
		{"consumer", NAME}, {"outbox", OUTBOX}, {NULL, -1}, {NULL, TYPES},
		{NULL, HANDLER}, {NULL, BATCH_HANDLER}, {"ordering", ORDERING},
		{"batch_size", BATCH_SIZE}, {"timeout", TIMEOUT},
		{NULL, MAX_ATTEMPTS}, {"backoff", BACKOFF},
		{"max_backoff", MAX_BACKOFF}, {"on_failure", ON_FAILURE},
		{"hold_key", HOLD_KEY}, {NULL, TABLES}, {NULL, GATE}
	};
	ObixDefinition definition = {0};
	ObixConsumerState state = {0};
	ObixConsumer existing;
	ObixRelation *known;
	ObixIdentity saved;
	Relation	parent;
	char	   *name;
	bool		available;
	bool		isnull;

	obix_check_enabled("obix.create_consumer()");
	for (int i = 0; i < lengthof(arguments); i++)
	{
		if (arguments[i].name != NULL && PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("%s must not be null", arguments[i].name)));
		if (arguments[i].column < 0)
			continue;
		definition.values[arguments[i].column] = PG_GETARG_DATUM(i);
		definition.isnull[arguments[i].column] = PG_ARGISNULL(i);
		definition.given[arguments[i].column] = true;
	}
	definition.values[ID] = (Datum) 0;
	definition.isnull[ID] = true;
	definition.values[OWNER] = ObjectIdGetDatum(GetUserId());
	definition.isnull[OWNER] = false;
	definition.values[SEARCH_PATH] =
		CStringGetTextDatum(GetConfigOption("search_path", false, false));
	definition.isnull[SEARCH_PATH] = false;

	name = TextDatumGetCString(definition.values[NAME]);
	check_name(name);
	check_one_of("ordering", definition.values[ORDERING], "sequence", "available");
	available = strcmp(TextDatumGetCString(definition.values[ORDERING]),
					   "available") == 0;
	check_definition(&definition, available);

	/* the lock keeps the outbox from being dropped under the new consumer */
	parent = obix_open_for_reading(DatumGetObjectId(definition.values[OUTBOX]),
								   "obix.create_consumer", &known);
	(void) obix_attach(parent, known);
	state.position = check_position(parent, known, PG_ARGISNULL(2),
									PG_ARGISNULL(2) ? 0 : PG_GETARG_INT64(2));
	state.scanned = state.position;
	state.state = OBIX_CONSUMER_ACTIVE;

	if (obix_find_consumer(name, &existing))
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("consumer \"%s\" already exists", name)));
	obix_begin_spi(&saved);
	(void) obix_run("INSERT INTO obix.consumer"
					" (owner, types, handler, batch_handler, batch_size,"
					" timeout, max_attempts, backoff, max_backoff, on_failure,"
					" hold_key, tables, gate, search_path, consumer, outbox, ordering)"
					" SELECT $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13,"
					" $14, $15, $16, $17, $18"
					" WHERE $1 IS NULL RETURNING id",
					COLUMNS, column_types, definition.values, definition.isnull);
	state.id = DatumGetInt32(SPI_getbinval(SPI_tuptable->vals[0],
										   SPI_tuptable->tupdesc, 1, &isnull));
	obix_end_spi(&saved);
	obix_clear_number(state.id);
	obix_add_state(&state);
	if (!definition.isnull[HANDLER] || !definition.isnull[BATCH_HANDLER])
		obix_turn_require(state.id, RelationGetRelid(parent), true, available);
	obix_xact_created_consumer(state.id);
	table_close(parent, NoLock);
	PG_RETURN_VOID();
}

/* Set to NULL what is named in an argument of alter_consumer. */
static void
clear_settings(ObixDefinition *definition, ArrayType *names)
{
	static const struct
	{
		const char *name;
		int			column;
	}			clearable[] =
	{
		{"types", TYPES}, {"handler", HANDLER}, {"batch_handler", BATCH_HANDLER},
		{"max_attempts", MAX_ATTEMPTS}, {"tables", TABLES}, {"gate", GATE}
	};
	Datum	   *elements;
	int			count;

	deconstruct_array(names, TEXTOID, -1, false, TYPALIGN_INT, &elements, NULL,
					  &count);
	for (int i = 0; i < count; i++)
	{
		char	   *name = TextDatumGetCString(elements[i]);
		int			found = -1;

		for (int j = 0; j < lengthof(clearable); j++)
		{
			if (strcmp(name, clearable[j].name) == 0)
				found = clearable[j].column;
		}
		if (found < 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("cannot clear \"%s\"", name),
					 errhint("What can be cleared is: types, handler, batch_handler, max_attempts, tables, gate.")));
		definition->isnull[found] = true;
	}
}

/* Read the definition of a consumer, to change some of it. */
static void
read_definition(int32 id, ObixDefinition *definition)
{
	MemoryContext context = CurrentMemoryContext;
	Datum		key = Int32GetDatum(id);
	ObixIdentity saved;
	MemoryContext old;

	obix_begin_spi(&saved);
	if (obix_run("SELECT id, owner, types, handler, batch_handler, batch_size,"
				 " timeout, max_attempts, backoff, max_backoff, on_failure,"
				 " hold_key, tables, gate, search_path"
				 " FROM obix.consumer WHERE id OPERATOR(pg_catalog.=) $1"
				 " FOR UPDATE",
				 1, column_types, &key, NULL) != 1)
		obix_report_moved();
	old = MemoryContextSwitchTo(context);
	for (int i = 0; i < ALTERABLE; i++)
	{
		int16		length;
		bool		byval;

		get_typlenbyval(column_types[i], &length, &byval);
		definition->values[i] = SPI_getbinval(SPI_tuptable->vals[0],
											  SPI_tuptable->tupdesc, i + 1,
											  &definition->isnull[i]);
		if (!definition->isnull[i])
			definition->values[i] = datumCopy(definition->values[i], byval,
											  length);
	}
	MemoryContextSwitchTo(old);
	obix_end_spi(&saved);
}

/* The role that a consumer is to belong to from now on. */
static void
check_new_owner(Oid owner)
{
	char	   *name = GetUserNameFromId(owner, true);

	if (name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role with OID %u does not exist", owner)));
	check_can_set_role(GetUserId(), owner);
}

/* What it was parked for may have been mended: under the mutex. */
static void
unpark(const ObixConsumer *consumer)
{
	ObixConsumerState state;

	obix_get_state(consumer, &state);
	if (state.state != OBIX_CONSUMER_PARKED)
		return;
	state.state = OBIX_CONSUMER_ACTIVE;
	obix_set_state(&state);
}

/*
 * obix.alter_consumer(consumer, types, handler, batch_handler, batch_size,
 *		timeout, max_attempts, backoff, max_backoff, on_failure, hold_key,
 *		tables, gate, search_path, owner, clear)
 */
Datum
obix_alter_consumer(PG_FUNCTION_ARGS)
{
	static const int arguments[] = {
		-1, TYPES, HANDLER, BATCH_HANDLER, BATCH_SIZE, TIMEOUT, MAX_ATTEMPTS,
		BACKOFF, MAX_BACKOFF, ON_FAILURE, HOLD_KEY, TABLES, GATE, SEARCH_PATH,
		OWNER
	};
	ObixDefinition definition = {0};
	ObixConsumer consumer;
	ObixIdentity saved;
	int			nestlevel;

	obix_check_writable("obix.alter_consumer()");
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("consumer must not be null")));
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	obix_lock_consumer(consumer.id);
	read_definition(consumer.id, &definition);
	for (int i = 0; i < lengthof(arguments); i++)
	{
		if (arguments[i] < 0 || PG_ARGISNULL(i))
			continue;
		definition.values[arguments[i]] = PG_GETARG_DATUM(i);
		definition.isnull[arguments[i]] = false;
		definition.given[arguments[i]] = true;
	}
	if (!PG_ARGISNULL(lengthof(arguments)))
		clear_settings(&definition, PG_GETARG_ARRAYTYPE_P(lengthof(arguments)));
	if ((definition.given[OWNER] || definition.given[TABLES] ||
		 definition.isnull[TABLES]) &&
		obix_is_being_rebuilt(consumer.id))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("cannot change owner or tables of consumer \"%s\" while it is rebuilt",
						consumer.name),
				 errhint("Finish it with obix.rebuild, or give it up with obix.cancel_rebuild.")));
	if (definition.given[OWNER])
		check_new_owner(DatumGetObjectId(definition.values[OWNER]));
	if (definition.isnull[HANDLER] && definition.isnull[BATCH_HANDLER] &&
		(consumer.handler != NULL || consumer.batch_handler != NULL))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot take its last handler from consumer \"%s\"",
						consumer.name),
				 errhint("Create another consumer that starts after its cursor.")));
	if (consumer.handler == NULL && consumer.batch_handler == NULL &&
		!(definition.isnull[HANDLER] && definition.isnull[BATCH_HANDLER]))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot give a handler to consumer \"%s\", which is fetched for from outside",
						consumer.name),
				 errhint("Create another consumer that starts after its cursor.")));
	nestlevel = NewGUCNestLevel();
	(void) set_config_option("search_path",
							 TextDatumGetCString(definition.values[SEARCH_PATH]),
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
	check_definition(&definition, consumer.available);
	AtEOXact_GUC(false, nestlevel);

	obix_begin_spi(&saved);
	(void) obix_run("UPDATE obix.consumer SET"
					" version = version OPERATOR(pg_catalog.+) 1, owner = $2,"
					" types = $3, handler = $4, batch_handler = $5,"
					" batch_size = $6, timeout = $7, max_attempts = $8,"
					" backoff = $9, max_backoff = $10, on_failure = $11,"
					" hold_key = $12, tables = $13, gate = $14, search_path = $15"
					" WHERE id OPERATOR(pg_catalog.=) $1",
					ALTERABLE, column_types, definition.values, definition.isnull);
	obix_end_spi(&saved);
	unpark(&consumer);
	obix_xact_touch_consumer(consumer.id);
	PG_RETURN_VOID();
}

/*
 * obix.drop_consumer(consumer)
 */
Datum
obix_drop_consumer(PG_FUNCTION_ARGS)
{
	ObixConsumer consumer;

	obix_check_writable("obix.drop_consumer()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	obix_cancel_rebuild_of(&consumer);
	obix_lock_consumer(consumer.id);
	obix_delete_consumer(&consumer);
	PG_RETURN_VOID();
}

/* Set or reset that a consumer is paused. */
static void
set_paused(ObixConsumer *consumer, bool paused)
{
	static const Oid types[] = {INT4OID, BOOLOID};
	Datum		values[] = {Int32GetDatum(consumer->id), BoolGetDatum(paused)};
	ObixIdentity saved;

	obix_begin_spi(&saved);
	if (obix_run("UPDATE obix.consumer SET paused = $2"
				 " WHERE id OPERATOR(pg_catalog.=) $1",
				 2, types, values, NULL) != 1 && IsolationUsesXactSnapshot())
		obix_report_moved();
	obix_end_spi(&saved);
	obix_xact_touch_consumer(consumer->id);
}

/*
 * obix.pause(consumer): waits for nobody.
 */
Datum
obix_pause(PG_FUNCTION_ARGS)
{
	ObixConsumer consumer;

	obix_check_writable("obix.pause()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	if (!consumer.paused)
		set_paused(&consumer, true);
	PG_RETURN_VOID();
}

/*
 * obix.resume(consumer)
 */
Datum
obix_resume(PG_FUNCTION_ARGS)
{
	ObixConsumer consumer;
	ObixConsumerState state;

	obix_check_writable("obix.resume()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	if (!obix_find_state(consumer.id, consumer.outbox, &state) ||
		state.state != OBIX_CONSUMER_ACTIVE || state.attempts > 0)
	{
		obix_lock_consumer(consumer.id);
		obix_get_state(&consumer, &state);
		state.state = OBIX_CONSUMER_ACTIVE;
		state.attempts = 0;
		state.retry_at = 0;
		obix_set_state(&state);
	}
	if (consumer.paused)
		set_paused(&consumer, false);
	obix_xact_touch_consumer(consumer.id);
	PG_RETURN_VOID();
}

/*
 * obix.seek(consumer, after)
 */
Datum
obix_seek(PG_FUNCTION_ARGS)
{
	static const Oid types[] = {INT4OID, INT8OID};
	ObixConsumer consumer;
	ObixConsumerState state;
	ObixRelation *known;
	ObixIdentity saved;
	Relation	parent;
	Datum		values[2];

	obix_check_writable("obix.seek()");
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("consumer must not be null")));
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	parent = obix_open_for_reading(consumer.outbox, "obix.seek", &known);
	obix_lock_consumer(consumer.id);
	obix_get_state(&consumer, &state);

	state.position = check_position(parent, known, PG_ARGISNULL(1),
									PG_ARGISNULL(1) ? 0 : PG_GETARG_INT64(1));
	table_close(parent, AccessShareLock);
	state.scanned = state.position;
	state.fetched = 0;
	state.one_by_one = 0;
	state.attempts = 0;
	state.state = OBIX_CONSUMER_ACTIVE;

	/* dead letters that lie ahead now will be met again */
	values[0] = Int32GetDatum(consumer.id);
	values[1] = Int64GetDatum(state.position);
	obix_begin_spi(&saved);
	(void) obix_run("DELETE FROM obix.consumer_late"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND NOT (requeued AND from_sequence OPERATOR(pg_catalog.<=) $2)",
					2, types, values, NULL);
	(void) obix_run("DELETE FROM obix.parked_event"
					" WHERE id OPERATOR(pg_catalog.=) $1"
					" AND (sequence OPERATOR(pg_catalog.>) $2"
					" OR state OPERATOR(pg_catalog.=) 'discarded')",
					2, types, values, NULL);
	obix_grow_version(consumer.id);
	state.late = obix_run("SELECT FROM obix.consumer_late"
						  " WHERE id OPERATOR(pg_catalog.=) $1 LIMIT 1",
						  1, types, values, NULL) > 0;
	state.parked = obix_has_dead_letters(consumer.id);
	obix_end_spi(&saved);
	obix_set_state(&state);
	obix_xact_touch_consumer(consumer.id);
	PG_RETURN_VOID();
}

/* Deliver a dead letter again, or delete it. */
static void
release_dead_letter(FunctionCallInfo fcinfo, bool requeue)
{
	int64		sequence = PG_GETARG_INT64(1);
	ObixConsumer consumer;
	ObixConsumerState state;
	const char *was;

	obix_check_writable(requeue ? "obix.requeue()" : "obix.discard()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	obix_lock_consumer(consumer.id);
	obix_get_state(&consumer, &state);
	was = obix_release_dead_letter(&consumer, &state, sequence, requeue);
	if (was == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("consumer \"%s\" has no dead letter %lld", consumer.name,
						(long long) sequence),
				 errhint("The view obix.dead_letter lists them.")));
	if (requeue && strcmp(was, "held") == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("event %lld is held behind another of its key",
						(long long) sequence),
				 errhint("Requeue or discard the failed event of that key.")));
	obix_xact_touch_consumer(consumer.id);
}

/*
 * obix.requeue(consumer, sequence)
 */
Datum
obix_requeue(PG_FUNCTION_ARGS)
{
	release_dead_letter(fcinfo, true);
	PG_RETURN_VOID();
}

/*
 * obix.discard(consumer, sequence)
 */
Datum
obix_discard(PG_FUNCTION_ARGS)
{
	release_dead_letter(fcinfo, false);
	PG_RETURN_VOID();
}
