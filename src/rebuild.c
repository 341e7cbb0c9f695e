/*-------------------------------------------------------------------------
 *
 * rebuild.c
 *	  Rebuilding the tables that handlers maintain.
 *
 * A rebuild is a second consumer with the handlers of the first.  Its number
 * is the negative of the other's, and its handlers find new tables, in a schema
 * of their own, where they look for the live ones.  Dispatchers serve it like
 * any other, but only while somebody waits for it in obix.rebuild.
 *
 * When it has caught up with the live consumer, the new tables take the place of
 * the live ones, and its position that of the live cursor, in one transaction.
 * So each event is in the tables exactly once, whatever was in flight when the
 * rebuild began: the position that goes with a table is that of whoever filled
 * it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "compat.h"
#include "consumer.h"
#include "delivery.h"
#include "handler.h"
#include "obix.h"
#include "partition.h"
#include "read.h"
#include "rebuild.h"
#include "shadow.h"
#include "swappable.h"
#include "turn.h"
#include "xact.h"

/* How long a rebuild goes on without being asked for again */
#define EXTEND_MS			3000

/* How long obix.continue_rebuild waits */
#define WAIT_MS				100

PG_FUNCTION_INFO_V1(obix_begin_rebuild);
PG_FUNCTION_INFO_V1(obix_continue_rebuild);
PG_FUNCTION_INFO_V1(obix_cancel_rebuild);

/* The schema of a rebuild; false if there is no rebuild of the consumer. */
static bool
find_rebuild(int32 id, NameData *schema, bool *skip_errors)
{
	Datum		value = Int32GetDatum(id);
	ObixIdentity saved;
	bool		found;
	bool		isnull;

	obix_begin_spi(&saved);
	found = obix_run("SELECT schema, skip_errors FROM obix.rebuild_state"
					 " WHERE id OPERATOR(pg_catalog.=) $1",
					 1, obix_id_sequence_types, &value, NULL) > 0;
	if (found)
	{
		HeapTuple	row = SPI_tuptable->vals[0];
		TupleDesc	desc = SPI_tuptable->tupdesc;

		*schema = *DatumGetName(SPI_getbinval(row, desc, 1, &isnull));
		*skip_errors = DatumGetBool(SPI_getbinval(row, desc, 2, &isnull));
	}
	obix_end_spi(&saved);
	return found;
}

/*
 * Make the definition of a consumer that of its rebuild.  Returns false if it
 * has none.  The first event that fails ends it, or is skipped.
 */
bool
obix_as_rebuild(ObixConsumer *consumer)
{
	NameData	schema;
	bool		skip_errors;

	if (!find_rebuild(consumer->id, &schema, &skip_errors))
		return false;
	consumer->search_path = psprintf("%s, %s", quote_identifier(NameStr(schema)),
									 consumer->search_path);
	consumer->id = -consumer->id;
	consumer->paused = false;
	consumer->gate = NULL;
	consumer->max_attempts = 1;
	consumer->dead_letter = skip_errors;
	consumer->hold_key &= skip_errors;
	return true;
}

/* The tables of a consumer, as a list of oids. */
static List *
tables_of(const ObixConsumer *consumer)
{
	List	   *relids = NIL;
	Datum	   *elements;
	int			count;

	if (consumer->tables == NULL)
		return NIL;
	deconstruct_array(consumer->tables, REGCLASSOID, sizeof(Oid), true,
					  TYPALIGN_INT, &elements, NULL, &count);
	for (int i = 0; i < count; i++)
		relids = lappend_oid(relids, DatumGetObjectId(elements[i]));
	return relids;
}

/*
 * After the handlers of a rebuild were called: error out if they have locked a
 * live table, and so have written or read one.
 */
void
obix_check_rebuild(const ObixConsumer *rebuild)
{
	ListCell   *cell;

	foreach(cell, tables_of(rebuild))
	{
		LOCKTAG		tag;

		SET_LOCKTAG_RELATION(tag, MyDatabaseId, lfirst_oid(cell));
		for (LOCKMODE mode = AccessShareLock; mode <= MaxLockMode; mode++)
		{
			if (LockHeldByMe(&tag, mode, false))
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
						 errmsg("a handler of consumer \"%s\" has used the live table \"%s\" in a rebuild",
								rebuild->name, get_rel_name(lfirst_oid(cell))),
						 errhint("Have handlers name the tables without a schema.")));
		}
	}
}

/* Error out if a handler does not look for tables by search_path. */
static void
check_handler(const char *name, ObixFunctionKind kind)
{
	Oid			function = obix_function_by_name(name, kind);
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	bool		pinned = false;
	Datum		value;
	bool		isnull;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", function);
	(void) SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_prosqlbody, &isnull);
	pinned |= !isnull;
	value = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_proconfig, &isnull);
	if (!isnull)
	{
		Datum	   *elements;
		int			count;

		deconstruct_array(DatumGetArrayTypeP(value), TEXTOID, -1, false,
						  TYPALIGN_INT, &elements, NULL, &count);
		for (int i = 0; i < count; i++)
			pinned |= pg_strncasecmp(TextDatumGetCString(elements[i]),
									 "search_path=", 12) == 0;
	}
	ReleaseSysCache(tuple);
	if (pinned)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot rebuild with function %s, which does not look for its tables when it is called",
						name),
				 errdetail("A rebuild has it find new tables by search_path, but it sets its own, or has a body in standard SQL."),
				 errhint("Declare it without SET search_path and with its body as a string, and set search_path by obix.alter_consumer.")));
}

/* Error out unless a consumer can be rebuilt. */
static void
check_rebuildable(const ObixConsumer *consumer)
{
	ObixFunctions functions;
	const char *why;

	if (consumer->tables == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("consumer \"%s\" has no tables to rebuild", consumer->name),
				 errhint("Name the tables that its handlers maintain with obix.alter_consumer.")));
	if (obix_dispatch_workers == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot rebuild while obix.dispatch_workers is 0")));
	why = obix_resolve_functions(consumer, &functions);
	if (why != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("cannot rebuild with the handlers of consumer \"%s\": %s",
						consumer->name, why)));
	if (consumer->handler != NULL)
		check_handler(consumer->handler, OBIX_FUNCTION_HANDLER);
	if (consumer->batch_handler != NULL)
		check_handler(consumer->batch_handler, OBIX_FUNCTION_BATCH);
}

static void
add_rebuild_turn(const ObixConsumer *consumer)
{
	obix_turn_require(-consumer->id, consumer->outbox, true, consumer->available);
	obix_turn_extend(-consumer->id,
					 TimestampTzPlusMilliseconds(GetCurrentTimestamp(), EXTEND_MS));
}

/* Begin a rebuild: make the tables, and the second consumer. */
static void
begin_rebuild(const ObixConsumer *consumer, bool skip_errors)
{
	static const Oid types[] = {INT4OID, NAMEOID, BOOLOID, TIMESTAMPTZOID};
	List	   *relids = tables_of(consumer);
	ObixConsumerState state = {0};
	ObixRelation *known;
	ObixIdentity saved;
	Relation	parent;
	NameData	schema;
	Datum		values[4];

	obix_check_swappable(relids, consumer->owner);
	memset(&schema, 0, sizeof(schema));
	snprintf(NameStr(schema), NAMEDATALEN, "obix_rebuild_%d", consumer->id);
	obix_make_shadow(NameStr(schema), relids, consumer->owner);

	parent = obix_open_for_reading(consumer->outbox, "obix.rebuild", &known);
	(void) obix_attach(parent, known);
	state.id = -consumer->id;
	state.position = obix_oldest_kept(parent, obix_resolved(consumer->outbox)) - 1;
	state.scanned = state.position;
	state.state = OBIX_CONSUMER_ACTIVE;
	table_close(parent, NoLock);
	obix_add_state(&state);

	values[0] = Int32GetDatum(consumer->id);
	values[1] = NameGetDatum(&schema);
	values[2] = BoolGetDatum(skip_errors);
	values[3] = TimestampTzGetDatum(GetCurrentTimestamp());
	obix_begin_spi(&saved);
	(void) obix_run("INSERT INTO obix.rebuild_state VALUES ($1, $2, $3, $4)",
					4, types, values, NULL);
	obix_end_spi(&saved);
}

/* Go on with a rebuild that was interrupted, or had stopped. */
static void
resume_rebuild(const ObixConsumer *consumer, bool skip_errors)
{
	static const Oid types[] = {INT4OID, BOOLOID};
	Datum		values[] = {Int32GetDatum(consumer->id), BoolGetDatum(skip_errors)};
	ObixConsumerState state;
	ObixIdentity saved;

	obix_begin_spi(&saved);
	(void) obix_run("UPDATE obix.rebuild_state SET skip_errors = $2"
					" WHERE id OPERATOR(pg_catalog.=) $1",
					2, types, values, NULL);
	obix_end_spi(&saved);
	if (!obix_find_state(-consumer->id, consumer->outbox, &state))
		elog(ERROR, "rebuild of consumer \"%s\" has no state", consumer->name);
	state.state = OBIX_CONSUMER_ACTIVE;
	state.attempts = 0;
	state.last_error = NULL;
	obix_set_state(&state);
}

/*
 * obix.begin_rebuild(consumer, skip_errors)
 */
Datum
obix_begin_rebuild(PG_FUNCTION_ARGS)
{
	bool		skip_errors = PG_GETARG_BOOL(1);
	ObixConsumer consumer;
	NameData	schema;
	bool		before;

	obix_check_enabled("obix.rebuild()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	check_rebuildable(&consumer);
	obix_lock_consumer(-consumer.id);
	if (find_rebuild(consumer.id, &schema, &before))
		resume_rebuild(&consumer, skip_errors);
	else
	{
		begin_rebuild(&consumer, skip_errors);
		obix_xact_created_consumer(-consumer.id);
	}
	add_rebuild_turn(&consumer);
	obix_xact_touch_consumer(-consumer.id);
	PG_RETURN_VOID();
}

/*
 * obix.continue_rebuild(consumer)
 */
Datum
obix_continue_rebuild(PG_FUNCTION_ARGS)
{
	ObixConsumer consumer;
	ObixConsumerState state;
	NameData	schema;
	bool		skip_errors;

	obix_check_writable("obix.rebuild()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	if (!find_rebuild(consumer.id, &schema, &skip_errors) ||
		!obix_find_state(-consumer.id, consumer.outbox, &state))
		PG_RETURN_BOOL(false);
	if (state.state != OBIX_CONSUMER_ACTIVE)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("rebuild of consumer \"%s\" has stopped after event %lld: %s",
						consumer.name, (long long) obix_delivery_start(&state),
						state.last_error ? state.last_error : "?"),
				 errhint("Call obix.rebuild again to go on, with skip_errors => true to skip events that fail, or obix.cancel_rebuild to give up.")));
	obix_xact_wait_for_rebuild(-consumer.id);
	add_rebuild_turn(&consumer);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 WAIT_MS, obix_wait_event(OBIX_WAIT_REBUILD));
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	PG_RETURN_BOOL(true);
}

bool
obix_is_being_rebuilt(int32 id)
{
	NameData	schema;
	bool		skip_errors;

	return find_rebuild(id, &schema, &skip_errors);
}

/* Give up the rebuild of a consumer, if there is one. */
void
obix_cancel_rebuild_of(const ObixConsumer *consumer)
{
	Datum		value = Int32GetDatum(consumer->id);
	ObixIdentity saved;
	NameData	schema;
	bool		skip_errors;

	if (!find_rebuild(consumer->id, &schema, &skip_errors))
		return;
	obix_lock_consumer(-consumer->id);
	obix_delete_state(-consumer->id);
	obix_begin_spi(&saved);
	(void) obix_run("DELETE FROM obix.rebuild_state"
					" WHERE id OPERATOR(pg_catalog.=) $1",
					1, obix_id_sequence_types, &value, NULL);
	obix_end_spi(&saved);
	obix_drop_shadow(NameStr(schema));
	obix_xact_dropped_consumer(-consumer->id);
}

/*
 * obix.cancel_rebuild(consumer)
 */
Datum
obix_cancel_rebuild(PG_FUNCTION_ARGS)
{
	ObixConsumer consumer;
	NameData	schema;
	bool		skip_errors;

	obix_check_writable("obix.cancel_rebuild()");
	obix_open_consumer(text_to_cstring(PG_GETARG_TEXT_PP(0)), &consumer);
	if (!find_rebuild(consumer.id, &schema, &skip_errors))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("consumer \"%s\" is not being rebuilt", consumer.name)));
	obix_cancel_rebuild_of(&consumer);
	PG_RETURN_VOID();
}

/*
 * Before new tables take the place of the live ones: have the planner know them,
 * unless it does.
 */
void
obix_analyze_rebuild(const ObixConsumer *rebuild)
{
	NameData	schema;
	bool		skip_errors;
	ListCell   *cell;

	if (!find_rebuild(-rebuild->id, &schema, &skip_errors))
		return;
	foreach(cell, tables_of(rebuild))
	{
		char	   *name = get_rel_name(lfirst_oid(cell));
		Oid			relid = name == NULL ? InvalidOid :
			get_relname_relid(name, get_namespace_oid(NameStr(schema), true));
		HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
		bool		known;

		if (!HeapTupleIsValid(tuple))
			continue;			/* the swap will say what is the matter */
		known = ((Form_pg_class) GETSTRUCT(tuple))->reltuples >= 0;
		ReleaseSysCache(tuple);
		if (!known)
			obix_execute("ANALYZE %s", obix_quote_relation(relid));
	}
}

/* Give the live consumer what belongs to its rebuild. */
static void
take_over(const ObixConsumer *rebuild, List *relids)
{
	static const char *const statements[] = {
		"DELETE FROM obix.consumer_late WHERE id OPERATOR(pg_catalog.=) $1",
		"DELETE FROM obix.parked_event WHERE id OPERATOR(pg_catalog.=) $1",
		"UPDATE obix.consumer_late SET id = $1"
		" WHERE id OPERATOR(pg_catalog.=) (OPERATOR(pg_catalog.-) $1)",
		"UPDATE obix.parked_event SET id = $1"
		" WHERE id OPERATOR(pg_catalog.=) (OPERATOR(pg_catalog.-) $1)",
		"DELETE FROM obix.rebuild_state WHERE id OPERATOR(pg_catalog.=) $1",
		"UPDATE obix.consumer SET tables = $2,"
		" version = version OPERATOR(pg_catalog.+) 1"
		" WHERE id OPERATOR(pg_catalog.=) $1",
	};
	static const Oid types[] = {INT4OID, REGCLASSARRAYOID};
	Datum	   *elements = palloc(list_length(relids) * sizeof(Datum));
	Datum		values[2];
	int			count = 0;
	ObixIdentity saved;
	ListCell   *cell;

	foreach(cell, relids)
		elements[count++] = ObjectIdGetDatum(lfirst_oid(cell));
	values[0] = Int32GetDatum(-rebuild->id);
	values[1] = PointerGetDatum(construct_array(elements, count, REGCLASSOID,
												sizeof(Oid), true, TYPALIGN_INT));
	obix_begin_spi(&saved);
	for (int i = 0; i < lengthof(statements); i++)
		(void) obix_run(statements[i],
						i == lengthof(statements) - 1 ? 2 : 1, types, values, NULL);
	obix_end_spi(&saved);
	obix_delete_state(rebuild->id);
}

/*
 * Let a rebuild take the place of the live consumer, which the caller keeps from
 * being served.  Returns false if the live one is ahead: unless nothing is left
 * for the rebuild, it has to catch up first.
 */
bool
obix_hand_over(const ObixConsumer *rebuild, bool nothing_left)
{
	int32		id = -rebuild->id;
	ObixConsumerState live;
	ObixConsumerState done;
	NameData	schema;
	bool		skip_errors;
	List	   *relids;
	int			nestlevel;

	if (!find_rebuild(id, &schema, &skip_errors))
		return true;
	if (!obix_try_lock_consumer(id))
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("consumer \"%s\" is being served", rebuild->name)));
	if (!obix_find_state(id, rebuild->outbox, &live) ||
		!obix_find_state(-id, rebuild->outbox, &done))
		elog(ERROR, "could not find state of consumer %d", id);
	if (!nothing_left && obix_delivery_start(&done) < live.position)
		return false;

	nestlevel = NewGUCNestLevel();
	obix_limit_lock_waits();
	relids = obix_swap_shadow(NameStr(schema), tables_of(rebuild),
							  rebuild->owner);
	AtEOXact_GUC(false, nestlevel);

	live.position = done.position;
	live.scanned = done.scanned;
	live.fetched = done.fetched;
	live.late = done.late;
	live.state = OBIX_CONSUMER_ACTIVE;
	live.one_by_one = 0;
	live.attempts = 0;
	live.parked = done.parked;
	live.dead_lettered += done.dead_lettered;
	live.failed += done.failed;
	live.last_event_at = done.last_event_at;
	obix_set_state(&live);
	take_over(rebuild, relids);
	obix_xact_touch_consumer(id);
	obix_xact_dropped_consumer(-id);
	return true;
}
