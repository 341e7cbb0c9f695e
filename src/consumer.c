/*-------------------------------------------------------------------------
 *
 * consumer.c
 *	  The tables of consumers: definitions, and how far each consumer is.
 *
 * They belong to the extension, and users have no privilege to write there.
 * What is done for every event, looking up the definition and moving the
 * cursor, goes by way of the table access method; everything else is SQL, run
 * as the owner of the tables.
 *
 * States and what belongs to them are only changed under the mutex of the
 * consumer, a lock that is held to the end of the transaction.  So there is
 * one writer at a time, and rows are read as last committed.
 *
 * While some old snapshot keeps dead versions of a state from being removed,
 * a consumer that acknowledges a thousand times a second leaves as many behind.
 * Nothing here may cost more for that.  An index would lead to all of them, so
 * obix.consumer_state has none; instead shared memory remembers where a version
 * was, and the newest is found from there along the update chain.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "executor/tuptable.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "consumer.h"
#include "read.h"
#include "rebuild.h"
#include "registry.h"
#include "turn.h"
#include "xact.h"

/* Columns of obix.consumer, in the order of the SQL script */
enum
{
	Anum_consumer_id = 1,
	Anum_consumer_consumer,
	Anum_consumer_outbox,
	Anum_consumer_owner,
	Anum_consumer_version,
	Anum_consumer_paused,
	Anum_consumer_types,
	Anum_consumer_handler,
	Anum_consumer_batch_handler,
	Anum_consumer_ordering,
	Anum_consumer_batch_size,
	Anum_consumer_timeout,
	Anum_consumer_max_attempts,
	Anum_consumer_backoff,
	Anum_consumer_max_backoff,
	Anum_consumer_on_failure,
	Anum_consumer_hold_key,
	Anum_consumer_tables,
	Anum_consumer_gate,
	Anum_consumer_search_path,
	Natts_consumer = Anum_consumer_search_path
};

/* Columns of obix.consumer_state */
enum
{
	Anum_state_id = 1,
	Anum_state_position,
	Anum_state_scanned,
	Anum_state_state,
	Anum_state_fetched,
	Anum_state_late,
	Anum_state_parked,
	Anum_state_one_by_one,
	Anum_state_attempts,
	Anum_state_attempt_sequence,
	Anum_state_attempted_at,
	Anum_state_retry_at,
	Anum_state_token,
	Anum_state_lease_until,
	Anum_state_delivered,
	Anum_state_failed,
	Anum_state_dead_lettered,
	Anum_state_last_event_at,
	Anum_state_last_error,
	Natts_state = Anum_state_last_error
};

/* The arguments of many statements: a consumer and a sequence */
const Oid	obix_id_sequence_types[2] = {INT4OID, INT8OID};

static Oid	consumer_relid = InvalidOid;
static Oid	state_relid = InvalidOid;

/* Where this transaction has put the state that it changed last */
static int32 own_id = 0;
static ItemPointerData own_tid;

/* Syscache callback: some relation has changed.  Raises nothing. */
static void
forget_relids(Datum arg, int cache, uint32 hash)
{
	consumer_relid = InvalidOid;
	state_relid = InvalidOid;
}

void
obix_consumer_init(void)
{
	CacheRegisterSyscacheCallback(RELOID, forget_relids, (Datum) 0);
}

/* Transaction callback.  Raises nothing. */
void
obix_consumer_end(void)
{
	own_id = 0;
}

static void
report_not_installed(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("extension \"obix\" is not installed in this database"),
			 errhint("Use CREATE EXTENSION obix.")));
}

/* The oid of obix.consumer; InvalidOid where the extension is not installed. */
Oid
obix_consumer_relid(void)
{
	if (!OidIsValid(consumer_relid))
		consumer_relid = obix_member_relid("consumer");
	return consumer_relid;
}

static Relation
open_states(LOCKMODE lockmode)
{
	Relation	states;

	if (!OidIsValid(state_relid))
		state_relid = obix_member_relid("consumer_state");
	states = OidIsValid(state_relid) ? try_table_open(state_relid, lockmode) : NULL;
	if (states == NULL)
		report_not_installed();
	return states;
}

/*
 * Definitions
 */

static char *
text_or_null(Datum value, bool isnull)
{
	return isnull ? NULL : TextDatumGetCString(value);
}

static ArrayType *
array_or_null(Datum value, bool isnull)
{
	return isnull ? NULL : DatumGetArrayTypePCopy(value);
}

static void
read_consumer(HeapTuple tuple, TupleDesc desc, ObixConsumer *consumer)
{
	Datum		values[Natts_consumer];
	bool		isnull[Natts_consumer];

	heap_deform_tuple(tuple, desc, values, isnull);

#define VALUE(column) values[Anum_consumer_##column - 1]
#define NULLABLE(column) VALUE(column), isnull[Anum_consumer_##column - 1]
	consumer->id = DatumGetInt32(VALUE(id));
	consumer->name = TextDatumGetCString(VALUE(consumer));
	consumer->outbox = DatumGetObjectId(VALUE(outbox));
	consumer->owner = DatumGetObjectId(VALUE(owner));
	consumer->version = DatumGetInt32(VALUE(version));
	consumer->paused = DatumGetBool(VALUE(paused));
	consumer->types = array_or_null(NULLABLE(types));
	consumer->handler = text_or_null(NULLABLE(handler));
	consumer->batch_handler = text_or_null(NULLABLE(batch_handler));
	consumer->available =
		strcmp(TextDatumGetCString(VALUE(ordering)), "available") == 0;
	consumer->batch_size = DatumGetInt32(VALUE(batch_size));
	consumer->timeout = obix_interval_ms(DatumGetIntervalP(VALUE(timeout)));
	consumer->max_attempts = isnull[Anum_consumer_max_attempts - 1] ? 0 :
		DatumGetInt32(VALUE(max_attempts));
	consumer->backoff = obix_interval_ms(DatumGetIntervalP(VALUE(backoff)));
	consumer->max_backoff = obix_interval_ms(DatumGetIntervalP(VALUE(max_backoff)));
	consumer->dead_letter =
		strcmp(TextDatumGetCString(VALUE(on_failure)), "dead_letter") == 0;
	consumer->hold_key = DatumGetBool(VALUE(hold_key));
	consumer->tables = array_or_null(NULLABLE(tables));
	consumer->gate = text_or_null(NULLABLE(gate));
	consumer->search_path = TextDatumGetCString(VALUE(search_path));
	consumer->own =
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data));
#undef VALUE
#undef NULLABLE
}

/* The unique index on the name, InvalidOid if it cannot be told. */
static Oid
name_index(Relation consumers)
{
	List	   *indexes = RelationGetIndexList(consumers);	/* sets rd_pkindex */
	Oid			index = InvalidOid;

	indexes = list_delete_oid(indexes, consumers->rd_pkindex);
	if (list_length(indexes) == 1)
		index = linitial_oid(indexes);
	list_free(indexes);
	return index;
}

/*
 * Read the definition with a name, or if that is NULL with an id, as last
 * committed.  Returns false if there is none.
 */
static bool
read_definition(const char *name, int32 id, ObixConsumer *consumer)
{
	Oid			relid = obix_consumer_relid();
	Relation	consumers;
	Snapshot	snapshot;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			index;

	consumers = OidIsValid(relid) ? try_table_open(relid, AccessShareLock) : NULL;
	if (consumers == NULL)
		return false;
	index = name_index(consumers);
	if (name != NULL)
		ScanKeyEntryInitialize(&key, 0, Anum_consumer_consumer,
							   BTEqualStrategyNumber, InvalidOid,
							   DEFAULT_COLLATION_OID, F_TEXTEQ,
							   CStringGetTextDatum(name));
	else
	{
		index = consumers->rd_pkindex;
		ScanKeyInit(&key, Anum_consumer_id, BTEqualStrategyNumber, F_INT4EQ,
					Int32GetDatum(id));
	}
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan = systable_beginscan(consumers, index, OidIsValid(index), snapshot,
							  1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		read_consumer(tuple, RelationGetDescr(consumers), consumer);
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(consumers, AccessShareLock);
	return HeapTupleIsValid(tuple);
}

bool
obix_find_consumer(const char *name, ObixConsumer *consumer)
{
	return read_definition(name, 0, consumer);
}

/* Find a consumer, or with a negative number its rebuild. */
bool
obix_get_consumer(int32 id, ObixConsumer *consumer)
{
	if (!read_definition(NULL, abs(id), consumer))
		return false;
	return id > 0 || obix_as_rebuild(consumer);
}

/* May the user use a consumer? */
bool
obix_may_use(const ObixConsumer *consumer)
{
	return superuser() || has_privs_of_role(GetUserId(), consumer->owner);
}

/* Error out unless the user may use a consumer. */
void
obix_check_use(const ObixConsumer *consumer)
{
	if (!obix_may_use(consumer))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for consumer \"%s\"", consumer->name),
				 errdetail("Only its owner and members of that role may use it.")));
}

/* Find a consumer for a user who may use it, else error out. */
void
obix_open_consumer(const char *name, ObixConsumer *consumer)
{
	if (!OidIsValid(obix_consumer_relid()))
		report_not_installed();
	if (!obix_find_consumer(name, consumer))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("consumer \"%s\" does not exist", name),
				 errhint("Use obix.create_consumer to create a consumer.")));
	obix_check_use(consumer);
}

/* All consumers of an outbox: a list of ObixConsumer. */
List *
obix_list_consumers(Oid outbox)
{
	Oid			relid = obix_consumer_relid();
	List	   *list = NIL;
	Relation	consumers;
	Snapshot	snapshot;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	consumers = OidIsValid(relid) ? try_table_open(relid, AccessShareLock) : NULL;
	if (consumers == NULL)
		return NIL;
	ScanKeyInit(&key, Anum_consumer_outbox, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(outbox));
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan = systable_beginscan(consumers, InvalidOid, false, snapshot, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		ObixConsumer *consumer = palloc(sizeof(ObixConsumer));

		read_consumer(tuple, RelationGetDescr(consumers), consumer);
		list = lappend(list, consumer);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(consumers, AccessShareLock);
	return list;
}

/* A transaction that keeps its first snapshot cannot go on from what it sees. */
void
obix_report_moved(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to concurrent update"),
			 errdetail("The consumer has moved since this transaction began.")));
}

/*
 * States
 */

void
obix_set_consumer_tag(LOCKTAG *tag, int32 id)
{
	SET_LOCKTAG_OBJECT(*tag, MyDatabaseId, obix_consumer_relid(), (Oid) id,
					   OBIX_MUTEX_CONSUMER);
}

/*
 * Wait for the mutex of a consumer and hold it to the end of the transaction.
 */
void
obix_lock_consumer(int32 id)
{
	LockDatabaseObject(obix_consumer_relid(), (Oid) id, OBIX_MUTEX_CONSUMER,
					   ExclusiveLock);
}

/* The same without waiting; false if somebody else holds it. */
bool
obix_try_lock_consumer(int32 id)
{
	LOCKTAG		tag;

	obix_set_consumer_tag(&tag, id);
	return LockAcquire(&tag, ExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL;
}

static bool
is_state_of(TupleTableSlot *slot, int32 id)
{
	bool		isnull;

	return DatumGetInt32(slot_getattr(slot, Anum_state_id, &isnull)) == id;
}

/*
 * Find the newest version from a place where there was one.  Returns false if
 * that leads nowhere: vacuum may have been there, or the transaction that put
 * it there was rolled back.
 */
static bool
follow_chain(Relation states, Snapshot snapshot, int32 id, ItemPointer tid,
			 TupleTableSlot *slot)
{
	ItemPointerData newest = *tid;
	TableScanDesc scan = table_beginscan_tid(states, snapshot);
	bool		valid = table_tuple_tid_valid(scan, &newest);

	if (valid)
		table_tuple_get_latest_tid(scan, &newest);
	table_endscan(scan);
	return valid &&
		table_tuple_fetch_row_version(states, &newest, snapshot, slot) &&
		is_state_of(slot, id);
}

/* Look at all rows. */
static bool
search_state(Relation states, Snapshot snapshot, int32 id, TupleTableSlot *slot)
{
	TableScanDesc scan = table_beginscan(states, snapshot, 0, NULL, SO_NONE);
	ItemPointerData tid;
	bool		found = false;

	while (!found && table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		found = is_state_of(slot, id);
	}
	tid = slot->tts_tid;
	table_endscan(scan);

	/* what is in the slot points into the scan; visibility needs a buffer */
	return found && table_tuple_fetch_row_version(states, &tid, snapshot, slot);
}

static void
read_state(TupleTableSlot *slot, ObixConsumerState *state)
{
	slot_getallattrs(slot);

#define VALUE(column) slot->tts_values[Anum_state_##column - 1]
#define TIME(column) (slot->tts_isnull[Anum_state_##column - 1] ? 0 : \
					  DatumGetTimestampTz(VALUE(column)))
	state->id = DatumGetInt32(VALUE(id));
	state->position = DatumGetInt64(VALUE(position));
	state->scanned = DatumGetInt64(VALUE(scanned));
	state->state = DatumGetChar(VALUE(state));
	state->fetched = DatumGetInt64(VALUE(fetched));
	state->late = DatumGetBool(VALUE(late));
	state->parked = DatumGetBool(VALUE(parked));
	state->one_by_one = DatumGetInt32(VALUE(one_by_one));
	state->attempts = DatumGetInt32(VALUE(attempts));
	state->attempt_sequence = DatumGetInt64(VALUE(attempt_sequence));
	state->attempted_at = TIME(attempted_at);
	state->retry_at = TIME(retry_at);
	state->token = DatumGetInt64(VALUE(token));
	state->lease_until = TIME(lease_until);
	state->delivered = DatumGetInt64(VALUE(delivered));
	state->failed = DatumGetInt64(VALUE(failed));
	state->dead_lettered = DatumGetInt64(VALUE(dead_lettered));
	state->last_event_at = TIME(last_event_at);
	state->last_error = slot->tts_isnull[Anum_state_last_error - 1] ? NULL :
		TextDatumGetCString(VALUE(last_error));
#undef VALUE
#undef TIME
	state->tid = slot->tts_tid;
}

static HeapTuple
form_state(TupleDesc desc, const ObixConsumerState *state)
{
	Datum		values[Natts_state];
	bool		isnull[Natts_state] = {false};

#define SET(column, value) values[Anum_state_##column - 1] = (value)
#define SET_TIME(column) \
	(isnull[Anum_state_##column - 1] = state->column == 0, \
	 SET(column, TimestampTzGetDatum(state->column)))
	SET(id, Int32GetDatum(state->id));
	SET(position, Int64GetDatum(state->position));
	SET(scanned, Int64GetDatum(state->scanned));
	SET(state, CharGetDatum(state->state));
	SET(fetched, Int64GetDatum(state->fetched));
	SET(late, BoolGetDatum(state->late));
	SET(parked, BoolGetDatum(state->parked));
	SET(one_by_one, Int32GetDatum(state->one_by_one));
	SET(attempts, Int32GetDatum(state->attempts));
	SET(attempt_sequence, Int64GetDatum(state->attempt_sequence));
	SET_TIME(attempted_at);
	SET_TIME(retry_at);
	SET(token, Int64GetDatum(state->token));
	SET_TIME(lease_until);
	SET(delivered, Int64GetDatum(state->delivered));
	SET(failed, Int64GetDatum(state->failed));
	SET(dead_lettered, Int64GetDatum(state->dead_lettered));
	SET_TIME(last_event_at);
	isnull[Anum_state_last_error - 1] = state->last_error == NULL;
	SET(last_error, state->last_error == NULL ? (Datum) 0 :
		CStringGetTextDatum(state->last_error));
#undef SET
#undef SET_TIME
	return heap_form_tuple(desc, values, isnull);
}

/*
 * Read the state of a consumer as last committed; with to_change, for a
 * transaction that can go on from there only if its snapshot sees it.
 */
static bool
find_state(int32 id, Oid outbox, ObixConsumerState *state, bool to_change)
{
	Relation	states = open_states(AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	TupleTableSlot *slot = table_slot_create(states, NULL);
	ItemPointerData tid;
	bool		found;

	found = (own_id == id && follow_chain(states, snapshot, id, &own_tid, slot)) ||
		(obix_turn_get_tid(id, &tid) &&
		 follow_chain(states, snapshot, id, &tid, slot)) ||
		search_state(states, snapshot, id, slot);
	if (found)
	{
		bool		isnull;
		TransactionId xmin;

		xmin = DatumGetTransactionId(slot_getsysattr(slot,
													 MinTransactionIdAttributeNumber,
													 &isnull));
		if (to_change && IsolationUsesXactSnapshot() &&
			!table_tuple_satisfies_snapshot(states, slot, GetTransactionSnapshot()))
			obix_report_moved();

		read_state(slot, state);
		state->outbox = outbox;
		state->own = TransactionIdIsCurrentTransactionId(xmin);

		/* others can do nothing with what may be rolled back */
		if (!state->own &&
			!(obix_turn_get_tid(id, &tid) &&
			  ItemPointerEquals(&tid, &slot->tts_tid)))
			obix_turn_set_tid(id, &slot->tts_tid,
							  Max(state->position, state->scanned));
	}
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(snapshot);
	table_close(states, AccessShareLock);
	return found;
}

/*
 * Look at the state of a consumer, as last committed.  Returns false if there is
 * none.
 */
bool
obix_find_state(int32 id, Oid outbox, ObixConsumerState *state)
{
	return find_state(id, outbox, state, false);
}

/* Get the state of a consumer, to change it: under the mutex. */
void
obix_get_state(const ObixConsumer *consumer, ObixConsumerState *state)
{
	if (!find_state(consumer->id, consumer->outbox, state, true))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("consumer \"%s\" has no state", consumer->name),
				 errdetail("It has been dropped, or is being restored."),
				 errhint("If its row in obix.consumer_state is lost, drop and create it.")));
}

/* Replace the state that was read, under the mutex. */
void
obix_set_state(ObixConsumerState *state)
{
	Relation	states = open_states(RowExclusiveLock);
	HeapTuple	tuple = form_state(RelationGetDescr(states), state);

	CatalogTupleUpdate(states, &state->tid, tuple);
	state->tid = tuple->t_self;
	own_id = state->id;
	own_tid = tuple->t_self;
	heap_freetuple(tuple);
	table_close(states, NoLock);
	CommandCounterIncrement();
}

void
obix_add_state(ObixConsumerState *state)
{
	Relation	states = open_states(RowExclusiveLock);
	HeapTuple	tuple = form_state(RelationGetDescr(states), state);

	CatalogTupleInsert(states, tuple);
	state->tid = tuple->t_self;
	table_close(states, NoLock);
	CommandCounterIncrement();
}

/*
 * What was tried has been dealt with, if it is not above a sequence; who had
 * stopped there goes on.
 */
void
obix_settle_attempts(ObixConsumerState *state, int64 sequence)
{
	if (state->attempt_sequence > sequence)
		return;
	state->attempts = 0;
	if (state->state == OBIX_CONSUMER_STOPPED)
		state->state = OBIX_CONSUMER_ACTIVE;
}

/* Keep an error message, cut to what a narrow row can bear. */
void
obix_set_last_error(ObixConsumerState *state, const char *error)
{
	int			length = pg_mbcliplen(error, strlen(error),
									  OBIX_LAST_ERROR_LENGTH - 1);

	state->last_error = pnstrdup(error, length);
}

/*
 * SQL on the tables of consumers
 */

/*
 * Begin to run SQL as the owner of the tables.  It finds nothing by way of a
 * search_path that could be anybody else's.
 */
void
obix_begin_spi(ObixIdentity *saved)
{
	Relation	consumers = try_table_open(obix_consumer_relid(), AccessShareLock);

	if (consumers == NULL)
		report_not_installed();
	obix_become_owner(consumers, saved);
	table_close(consumers, NoLock);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
}

/*
 * Run a statement between obix_begin_spi() and obix_end_spi().  Returns how
 * many rows there were; they are in SPI_tuptable if it returns any.
 */
uint64
obix_run(const char *sql, int nargs, const Oid *types, Datum *values,
		 const bool *isnull)
{
	char		nulls[FUNC_MAX_ARGS] = {0};
	int			result;

	for (int i = 0; i < nargs; i++)
		nulls[i] = isnull != NULL && isnull[i] ? 'n' : ' ';
	result = SPI_execute_with_args(sql, nargs, unconstify(Oid *, types), values,
								   nulls, false, 0);
	if (result < 0)
		elog(ERROR, "SPI_execute failed: %s", SPI_result_code_string(result));
	return SPI_processed;
}

/* A value of the rows that a statement has returned. */
Datum
obix_spi_value(uint64 row, int column, bool *isnull)
{
	return SPI_getbinval(SPI_tuptable->vals[row], SPI_tuptable->tupdesc, column,
						 isnull);
}

/* What was found for a consumer does not hold any more. */
void
obix_grow_version(int32 id)
{
	Datum		value = Int32GetDatum(id);

	(void) obix_run("UPDATE obix.consumer"
					" SET version = version OPERATOR(pg_catalog.+) 1"
					" WHERE id OPERATOR(pg_catalog.=) $1",
					1, obix_id_sequence_types, &value, NULL);
}

void
obix_end_spi(const ObixIdentity *saved)
{
	SPI_finish();
	obix_become_self(saved);
}

/*
 * Delete what is known of a consumer, or of its rebuild, but its definition.
 *
 * The state has no key by which it could be replicated, for which reason DELETE
 * would be refused where a publication has all tables.
 */
void
obix_delete_state(int32 id)
{
	static const char *const statements[] = {
		"DELETE FROM obix.consumer_late WHERE id OPERATOR(pg_catalog.=) $1",
		"DELETE FROM obix.parked_event WHERE id OPERATOR(pg_catalog.=) $1",
	};
	Relation	states = open_states(RowExclusiveLock);
	Datum		value = Int32GetDatum(id);
	ObixConsumerState state;
	ObixIdentity saved;

	/* whoever drops the outbox has not got the mutex */
	obix_begin_spi(&saved);
	(void) obix_run("SELECT FROM obix.consumer_state"
					" WHERE id OPERATOR(pg_catalog.=) $1 FOR UPDATE",
					1, obix_id_sequence_types, &value, NULL);
	obix_end_spi(&saved);
	if (obix_find_state(id, InvalidOid, &state))
		CatalogTupleDelete(states, &state.tid);
	table_close(states, NoLock);
	obix_begin_spi(&saved);
	for (int i = 0; i < lengthof(statements); i++)
		(void) obix_run(statements[i], 1, obix_id_sequence_types, &value, NULL);
	obix_end_spi(&saved);
}

/*
 * A new consumer has this number: delete what rows are there of it already,
 * which somebody has inserted by hand.  See restore.c.
 */
void
obix_clear_number(int32 id)
{
	static const char *const statements[] = {
		"DELETE FROM obix.consumer_late WHERE id OPERATOR(pg_catalog.=)"
		" ANY (ARRAY[$1, OPERATOR(pg_catalog.-) $1])",
		"DELETE FROM obix.parked_event WHERE id OPERATOR(pg_catalog.=)"
		" ANY (ARRAY[$1, OPERATOR(pg_catalog.-) $1])",
		"DELETE FROM obix.rebuild_state WHERE id OPERATOR(pg_catalog.=) $1",
	};
	Datum		value = Int32GetDatum(id);
	Relation	states;
	ObixConsumerState state;
	ObixIdentity saved;

	obix_lock_consumer(id);
	states = open_states(RowExclusiveLock);
	while (obix_find_state(id, InvalidOid, &state) ||
		   obix_find_state(-id, InvalidOid, &state))
	{
		CatalogTupleDelete(states, &state.tid);
		CommandCounterIncrement();
	}
	table_close(states, NoLock);
	obix_begin_spi(&saved);
	for (int i = 0; i < lengthof(statements); i++)
		(void) obix_run(statements[i], 1, obix_id_sequence_types, &value, NULL);
	obix_end_spi(&saved);
}

/*
 * Delete a consumer.  Who has not got its mutex waits for whoever is changing
 * its state.
 */
void
obix_delete_consumer(const ObixConsumer *consumer)
{
	Datum		value = Int32GetDatum(consumer->id);
	ObixIdentity saved;

	obix_delete_state(consumer->id);
	obix_delete_state(-consumer->id);
	obix_begin_spi(&saved);
	(void) obix_run("DELETE FROM obix.rebuild_state"
					" WHERE id OPERATOR(pg_catalog.=) $1",
					1, obix_id_sequence_types, &value, NULL);
	if (obix_run("DELETE FROM obix.consumer"
				 " WHERE id OPERATOR(pg_catalog.=) $1",
				 1, obix_id_sequence_types, &value, NULL) != 1 && IsolationUsesXactSnapshot())
		obix_report_moved();
	obix_end_spi(&saved);
	obix_xact_dropped_consumer(consumer->id);
	obix_xact_dropped_consumer(-consumer->id);
}
