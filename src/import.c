/*-------------------------------------------------------------------------
 *
 * import.c
 *	  obix.import: events of another table, with their sequences, ids and times.
 *
 * What an outbox holds after each batch is what would be there if the events had
 * always been: every sequence has a row, those that the source lacks have
 * placeholders, and all of it is resolved.  So it is interrupted and resumed
 * where it is, and readers need not know of it.
 *
 * A batch locks out whoever writes to the outbox, and in particular whoever
 * allocates.  That is why sequences can be given out as they come, and be given
 * back if the batch is rolled back: placeholders for an aborted batch would take
 * the places of events that are still to be imported.
 *
 * While the source is in use its last sequences are not all there yet.  So an
 * import goes up to the sequence that was highest when it began, and first waits
 * for those who were writing then.  The next call looks whether something has
 * come to the source that this one has passed, all the same.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "tcop/pquery.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bounds.h"
#include "consumer.h"
#include "maintain.h"
#include "partition.h"
#include "progress.h"
#include "read.h"
#include "registry.h"
#include "relation.h"
#include "source.h"
#include "writer.h"
#include "xact.h"

#define MAX_BATCH			1000000

/* Rows of the source to fetch at a time */
#define FETCH_ROWS			1000

/*
 * Sequences missing in a row that are filled with placeholders, at most: one row
 * with a stray sequence is not to fill the disk.
 */
#define MAX_HOLE			10000000

/* Partitions to make under one lock, at most */
#define MAX_PARTITIONS		8

/* Between messages about how far it is */
#define TELL_MS				1000

/* An id that no event has, as a literal */
#define NIL_UUID	"'00000000-0000-0000-0000-000000000000'::pg_catalog.uuid"

PG_FUNCTION_INFO_V1(obix_import);

/* A call.  It lasts longer than the transactions that it consists of. */
typedef struct ObixImport
{
	Oid			outbox;
	char	   *name;
	char	   *quoted;
	ObixSource	source;
	int32		batch_size;
	bool		atomic;			/* all in the caller's transaction */

	int64		start;			/* this call begins after here */
	int64		tail;			/* what the outbox has, up to here */
	int64		next;			/* to be written; above tail + 1 in the
								 * beginning: what is between is left out */
	int64		target;			/* go up to here */
	bool		in_hole;		/* the source may lack what is next */
	int64		events;			/* imported, and placeholders written */
	int64		placeholders;
	TimestampTz started_at;
	TimestampTz told_at;
} ObixImport;

/* End the transaction and begin another, where that is up to us. */
static void
commit(const ObixImport *import)
{
	if (import->atomic)
		CommandCounterIncrement();
	else
		SPI_commit();
}

/*
 * Run a query of one row at most, with a snapshot of its own.  Returns its first
 * column; false if there is no row, or if that is NULL.
 */
static bool
query_int64(const char *query, int64 *result)
{
	MemoryContext caller = CurrentMemoryContext;	/* SPI leaves another */
	bool		isnull = true;
	Datum		value = (Datum) 0;
	int			code;

	PushActiveSnapshot(GetTransactionSnapshot());
	code = SPI_execute(query, true, 1);
	if (code != SPI_OK_SELECT)
		elog(ERROR, "SPI_execute failed: %s", SPI_result_code_string(code));
	if (SPI_processed > 0)
		value = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1,
							  &isnull);
	*result = DatumGetInt64(value);
	SPI_freetuptable(SPI_tuptable);
	MemoryContextSwitchTo(caller);
	PopActiveSnapshot();
	return !isnull;
}

/*
 * Find out which sequences the source has.  Returns false if none.
 */
static bool
look_at_source(ObixImport *import)
{
	const ObixSource *source = &import->source;
	const char *sequence = source->columns[Anum_event_sequence - 1];
	int64		lowest;
	int64		bad;

	if (source->may_lack_sequence &&
		query_int64(psprintf("SELECT 0::pg_catalog.int8 FROM %s s WHERE %s IS NULL LIMIT 1",
							 source->quoted, sequence), &bad))
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("column \"%s\" of relation \"%s\" contains null values",
						source->names[Anum_event_sequence - 1], source->name),
				 errdetail("It is to be the sequence of events."),
				 errhint("Import from a view that leaves out such rows.")));
	if (!query_int64(psprintf("SELECT pg_catalog.max(%s)::pg_catalog.int8 FROM %s s",
							  sequence, source->quoted), &import->target) ||
		!query_int64(psprintf("SELECT pg_catalog.min(%s)::pg_catalog.int8 FROM %s s",
							  sequence, source->quoted), &lowest))
		return false;
	if (lowest < 1 || import->target >= PG_INT64_MAX - 1)
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("sequence %lld of \"%s\" is out of range",
						(long long) (lowest < 1 ? lowest : import->target),
						source->name),
				 errdetail("Sequences of an outbox are between 1 and %lld.",
						   (long long) PG_INT64_MAX - 2),
				 errhint("Import from a view that leaves out such rows, or changes their sequences.")));
	return true;
}

/*
 * A condition for a row "o" of the outbox to be a row "s" of the source, as far as
 * what cannot be changed in either tells.
 */
static char *
same_event(const ObixSource *source)
{
	const char *id = source->columns[Anum_event_id - 1];
	StringInfoData condition;

	initStringInfo(&condition);
	appendStringInfo(&condition, "o.sequence OPERATOR(pg_catalog.=) %s",
					 source->columns[Anum_event_sequence - 1]);
	if (id != NULL)
		appendStringInfo(&condition,
						 " AND (%s IS NULL OR o.id OPERATOR(pg_catalog.=) %s)",
						 id, id);
	/* without a time zone, it depends on a setting */
	if (source->types[Anum_event_recorded_at - 1] == TIMESTAMPTZOID)
		appendStringInfo(&condition, " AND o.recorded_at OPERATOR(pg_catalog.=) %s",
						 source->columns[Anum_event_recorded_at - 1]);
	return condition.data;
}

/*
 * Error out unless what the outbox has is what an import from this source has
 * left: its last event is from there, and nothing is missing.
 */
static void
check_earlier(const ObixImport *import)
{
	const ObixSource *source = &import->source;
	char	   *same = same_event(source);
	const char *sequence = source->columns[Anum_event_sequence - 1];
	int64		found;

	if (query_int64(psprintf("SELECT o.sequence FROM"
							 " (SELECT * FROM %s e WHERE e.id OPERATOR(pg_catalog.<>) " NIL_UUID
							 " ORDER BY e.sequence DESC LIMIT 1) o"
							 " WHERE NOT EXISTS (SELECT FROM %s s WHERE %s)",
							 import->quoted, source->quoted, same), &found))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("outbox \"%s\" has events that are not from \"%s\"",
						import->name, source->name),
				 errdetail("Its last event, %lld, is not there, or is another.",
						   (long long) found),
				 errhint("Import into an outbox of its own, to which nobody publishes until the import is complete.")));
	if (query_int64(psprintf("SELECT %s::pg_catalog.int8 FROM %s s"
							 " WHERE %s OPERATOR(pg_catalog.<=) '" INT64_FORMAT "'::pg_catalog.int8"
							 " AND NOT EXISTS (SELECT FROM %s o WHERE %s"
							 " AND o.id OPERATOR(pg_catalog.<>) " NIL_UUID ")"
							 " ORDER BY 1 LIMIT 1",
							 sequence, source->quoted, sequence, import->tail,
							 import->quoted, same), &found))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("row %lld of \"%s\" is not in outbox \"%s\"",
						(long long) found, source->name, import->name),
				 errdetail("It came after the import had passed it, or another event has its sequence."),
				 errhint("Give it a sequence above all others in \"%s\", or import into a new outbox.",
						 source->name)));
}

/* The lowest sequence of the source that is still to come; false if none is. */
static bool
find_next(const ObixImport *import, int64 *first)
{
	const ObixSource *source = &import->source;
	const char *sequence = source->columns[Anum_event_sequence - 1];

	return query_int64(psprintf("SELECT pg_catalog.min(%s)::pg_catalog.int8 FROM %s s"
								" WHERE %s OPERATOR(pg_catalog.>=) '" INT64_FORMAT "'::pg_catalog.int8",
								sequence, source->quoted, sequence, import->next), first);
}

/* Find out what the outbox has, and where to go on. */
static void
look_at_outbox(ObixImport *import)
{
	ObixRelation *known;
	Relation	parent = obix_open(import->outbox, AccessShareLock, &known);
	int64		newest;
	int64		first;

	obix_check_ready(parent);
	newest = obix_newest_row(parent);
	table_close(parent, AccessShareLock);
	import->tail = Max(newest, obix_resolved(import->outbox));
	import->next = import->tail + 1;
	import->in_hole = true;
	if (import->tail > 0)
		check_earlier(import);

	/* what is missing before the first event is not worth so many rows */
	if (newest == 0 && find_next(import, &first) &&
		first - import->next > import->batch_size)
		import->next = first;	/* sequences begin here */
	import->start = import->next - 1;
}

/* Error out if too much is missing from the source. */
static void
check_hole(const ObixImport *import)
{
	const ObixSource *source = &import->source;
	int64		first;

	if (find_next(import, &first) &&
		first - import->next > MAX_HOLE)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("too many sequences are missing from \"%s\"", source->name),
				 errdetail("It has no rows from %lld to %lld, and for up to %d in a row placeholders are written.",
						   (long long) import->next, (long long) first - 1,
						   MAX_HOLE),
				 errhint("Import from a view that gives the rows after that lower sequences, or leaves them out.")));
}

/* Task: make partitions from one sequence up to another, if they are missing. */
static int64
make_partitions(Oid relid, void *arg)
{
	int64		from = ((int64 *) arg)[0];
	int64		last = ((int64 *) arg)[1];
	ObixRegistryRow row;
	ObixRelation *known;
	ObixIdentity saved;
	Relation	parent;
	int64		lower;
	int			made;

	parent = obix_open_to_maintain(relid, OBIX_MUTEX_PARTITIONS, AccessShareLock,
								   &row, &known);
	if (parent == NULL)
		return 0;
	lower = obix_partitions_end(parent);
	if (lower > last)
	{
		table_close(parent, AccessShareLock);
		return 0;
	}
	if (from > lower)
		lower += (from - lower) / row.partition_width * row.partition_width;

	obix_become_owner(parent, &saved);
	table_close(parent, AccessShareLock);
	made = obix_add_partitions(relid, lower, row.partition_width,
							   Min((last - lower) / row.partition_width + 1,
								   MAX_PARTITIONS),
							   false);
	obix_become_self(&saved);
	return made;
}

/* Have consumers begin after what is left out before the first event. */
static void
move_consumers(const ObixImport *import, int64 position)
{
	ListCell   *cell;

	foreach(cell, obix_list_consumers(import->outbox))
	{
		ObixConsumer *consumer = lfirst(cell);
		ObixConsumerState state;

		obix_lock_consumer(consumer->id);
		obix_get_state(consumer, &state);
		if (state.position >= position)
			continue;
		state.position = state.scanned = position;
		obix_set_state(&state);
		obix_xact_touch_consumer(consumer->id);
	}
}

/* Copy what the source has up to a sequence, and fill what it has not. */
static void
copy_rows(ObixImport *import, Relation parent, int64 last)
{
	ObixWriter *writer = obix_writer_begin(parent, false, true);
	MinimalTuple placeholder = obix_form_placeholder();
	TimestampTz now = GetCurrentTimestamp();
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "obix import",
												  ALLOCSET_DEFAULT_SIZES);
	int64		next = import->next;
	uint64		rows;
	Portal		portal;

	portal = SPI_cursor_open_with_args(NULL, obix_source_query(&import->source, next, last),
									   0, NULL, NULL, NULL, true,
									   CURSOR_OPT_NO_SCROLL);

	/* index expressions are the owner's, and may close what they can name */
	PinPortal(portal);
	do
	{
		SPI_cursor_fetch(portal, true, FETCH_ROWS);
		rows = SPI_processed;
		for (uint64 i = 0; i < rows; i++)
		{
			MemoryContext old = MemoryContextSwitchTo(context);
			ObixSourceRow row;

			obix_source_row(&import->source, SPI_tuptable->vals[i],
							SPI_tuptable->tupdesc, &row);
			if (row.sequence < next)
				ereport(ERROR,
						(errcode(ERRCODE_UNIQUE_VIOLATION),
						 errmsg("sequence %lld is in \"%s\" more than once",
								(long long) row.sequence, import->source.name),
						 errhint("Import from a view that leaves out such rows.")));
			for (; next < row.sequence; next++)
			{
				(void) obix_writer_put(writer, placeholder, next, now);
				import->placeholders++;
			}
			(void) obix_writer_put(writer, row.event, next++, row.recorded_at);
			import->events++;
			MemoryContextSwitchTo(old);
			MemoryContextReset(context);
		}
		SPI_freetuptable(SPI_tuptable);
		obix_progress_done(next - 1 - import->start);
	} while (rows > 0);
	UnpinPortal(portal);
	SPI_cursor_close(portal);
	MemoryContextSwitchTo(caller);
	import->in_hole = next <= last;
	for (; next <= last; next++)
	{
		(void) obix_writer_put(writer, placeholder, next, now);
		import->placeholders++;
	}
	obix_writer_end(writer);
	MemoryContextDelete(context);
}

/*
 * Import the sequences up to last, in this transaction.  Locks, in the order of
 * all of obix: consumers, where they have to be moved; the outbox; leaves.
 */
static void
import_batch(ObixImport *import, int64 last)
{
	bool		leaves_out = import->next > import->tail + 1;
	ObixRelation *known;
	ObixOutbox *shared;
	ObixPosition position;
	ObixRegistryRow row;
	Relation	parent;

	PushActiveSnapshot(GetTransactionSnapshot());
	obix_progress_begin(OBIX_OPERATION_IMPORT, import->outbox, false);
	obix_progress_since(import->started_at);
	obix_check_owner(import->outbox);
	if (leaves_out)
		move_consumers(import, import->next - 1);
	parent = obix_open(import->outbox, ShareRowExclusiveLock, &known);
	if (obix_subscribes(parent, NULL))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot import into outbox \"%s\"", import->name),
				 errdetail("A subscription writes to it.")));
	obix_check_insertable(parent);
	obix_check_placeholder(parent);
	shared = obix_attach(parent, known);
	obix_get_position(shared, import->outbox, known->id, &position);
	if (!obix_registry_find(import->outbox, &row))
		elog(ERROR, "could not find registry row of outbox %u", import->outbox);
	if (Max(Max(obix_newest_row(parent), row.resolved), position.head) != import->tail)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("outbox \"%s\" is published to while it is imported into",
						import->name),
				 errdetail("Sequences up to %lld have been given out.",
						   (long long) position.head),
				 errhint("Import into an outbox of its own, to which nobody publishes until the import is complete.")));

	obix_progress_phase(OBIX_PHASE_COPYING, import->target - import->start);
	obix_progress_done(import->next - 1 - import->start);
	obix_xact_advance(obix_xact(parent, shared), last);
	copy_rows(import, parent, last);

	/* holes from before, if any, are for the worker to look at */
	if (leaves_out || position.suspect_from == 0)
		(void) obix_raise_resolved(import->outbox, last, true);
	import->tail = last;
	import->next = last + 1;
	table_close(parent, NoLock);
	obix_progress_end();
	PopActiveSnapshot();
}

/* Tell now and then how far it is. */
static void
tell_progress(ObixImport *import)
{
	TimestampTz now = GetCurrentTimestamp();

	if (import->tail == import->target ||
		!TimestampDifferenceExceeds(import->told_at, now, TELL_MS))
		return;
	import->told_at = now;
	ereport(NOTICE,
			(errmsg("import into outbox \"%s\": sequence %lld of %lld",
					import->name, (long long) import->tail,
					(long long) import->target)));
}

/* Import all that the source has now.  Called within SPI. */
static void
import_all(ObixImport *import)
{
	List	   *tables;
	MemoryContext scratch;

	if (!look_at_source(import))
	{
		ereport(NOTICE, (errmsg("there is nothing to import from \"%s\"",
								import->source.name)));
		return;
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	tables = obix_source_tables(&import->source);
	PopActiveSnapshot();
	commit(import);				/* wait without a snapshot */
	obix_source_wait_for_writers(tables);

	look_at_outbox(import);
	scratch = AllocSetContextCreate(CurrentMemoryContext, "obix import batch",
									ALLOCSET_DEFAULT_SIZES);
	while (import->tail < import->target)
	{
		MemoryContext caller = MemoryContextSwitchTo(scratch);
		int64		range[2];

		if (import->in_hole)
			check_hole(import);
		range[0] = import->next;
		range[1] = import->target - import->next < import->batch_size ?
			import->target : import->next + import->batch_size - 1;
		while (obix_attempt(import->outbox, make_partitions, range) > 0)
			commit(import);
		import_batch(import, range[1]);
		commit(import);
		tell_progress(import);
		MemoryContextSwitchTo(caller);
		MemoryContextReset(scratch);
	}
	ereport(NOTICE,
			(errmsg("imported into outbox \"%s\" up to sequence %lld",
					import->name, (long long) import->tail),
			 errdetail("Events: %lld, placeholders: %lld.",
					   (long long) import->events,
					   (long long) import->placeholders)));
}

/*
 * CALL obix.import(outbox, source, sequence, id, type, key, payload, headers,
 * recorded_at, batch_size)
 */
Datum
obix_import(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {
		"outbox", "source", NULL, NULL, NULL, NULL, NULL, NULL, NULL, "batch_size"
	};
	CallContext *call = (CallContext *) fcinfo->context;
	MemoryContext context;
	MemoryContext old;
	ObixImport *import;
	char	   *given[Natts_event];

	obix_check_not_null(fcinfo, names, lengthof(names));
	obix_check_enabled("obix.import()");
	if (PG_GETARG_INT32(9) < 1 || PG_GETARG_INT32(9) > MAX_BATCH)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("batch_size must be between 1 and %d", MAX_BATCH),
				 errdetail("It is the number of sequences in a transaction, and %d was given.",
						   PG_GETARG_INT32(9))));
	if (IsolationUsesXactSnapshot())
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("cannot import in a transaction that keeps its snapshot"),
				 errdetail("What the source has got meanwhile would be missed."),
				 errhint("Call obix.import under READ COMMITTED.")));

	/* it has to outlive transactions, as the portal does */
	context = AllocSetContextCreate(PortalContext, "obix import",
									ALLOCSET_DEFAULT_SIZES);
	old = MemoryContextSwitchTo(context);
	import = palloc0(sizeof(ObixImport));
	import->outbox = PG_GETARG_OID(0);
	import->batch_size = PG_GETARG_INT32(9);
	import->atomic = call == NULL || !IsA(call, CallContext) || call->atomic;
	import->started_at = import->told_at = GetCurrentTimestamp();
	obix_check_owner(import->outbox);
	obix_check_row_security(import->outbox, "obix.import");
	import->name = get_rel_name(import->outbox);
	import->quoted = obix_quote_relation(import->outbox);
	if (PG_GETARG_OID(1) == import->outbox)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("cannot import outbox \"%s\" into itself", import->name)));
	for (int i = 0; i < Natts_event; i++)
		given[i] = PG_ARGISNULL(2 + i) ? NULL :
			text_to_cstring(PG_GETARG_TEXT_PP(2 + i));
	obix_source_open(&import->source, PG_GETARG_OID(1), given);

	if (SPI_connect_ext(import->atomic ? 0 : SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	import_all(import);
	SPI_finish();
	MemoryContextSwitchTo(old);
	MemoryContextDelete(context);
	EnsurePortalSnapshotExists();
	PG_RETURN_VOID();
}
