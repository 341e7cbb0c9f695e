/*-------------------------------------------------------------------------
 *
 * source.c
 *	  Tables from which events are imported.
 *
 * What they look like differs, so the columns are given by name, or found by the
 * names that are usual.  Whoever has something else makes a view.  The table is
 * read as the user who calls, by SQL, in which nothing is the user's but quoted
 * identifiers; casts in it see to it that values have the types that are expected
 * here, whatever is done to the table meanwhile.  JSON is parsed here, so that an
 * error can tell the row.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/transam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "pgtime.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "partition.h"
#include "source.h"
#include "uuid.h"

#define MAX_NAMES	6

/* What a column of an event is called elsewhere, best first */
static const char *const usual_names[Natts_event][MAX_NAMES] = {
	[Anum_event_sequence - 1] = {"sequence", "seq", "position", "global_position", "id"},
	[Anum_event_id - 1] = {"id", "event_id", "message_id", "uuid"},
	[Anum_event_type - 1] = {"type", "event_type", "topic"},
	[Anum_event_key - 1] = {"key", "aggregate_id", "aggregateid", "partition_key"},
	[Anum_event_payload - 1] = {"payload", "data", "body", "event"},
	[Anum_event_headers - 1] = {"headers", "metadata", "tracing_context", "trace_context"},
	[Anum_event_recorded_at - 1] = {"recorded_at", "created_at", "occurred_at", "inserted_at", "timestamp"},
};

static const char *
event_column(int i)
{
	return NameStr(TupleDescAttr(obix_event_desc(), i)->attname);
}

/* Can a column of a type be this column of events? */
static bool
suits(int i, Oid type)
{
	switch (i + 1)
	{
		case Anum_event_sequence:
			return type == INT8OID || type == INT4OID || type == INT2OID;
		case Anum_event_id:
			return type == UUIDOID;
		case Anum_event_payload:
		case Anum_event_headers:
			return type == JSONBOID || type == JSONOID || type == TEXTOID ||
				type == VARCHAROID || type == BYTEAOID;
		case Anum_event_recorded_at:
			return type == TIMESTAMPTZOID || type == TIMESTAMPOID;
		default:
			return true;		/* as text */
	}
}

/* A column, NULL if there is none of this name. */
static Form_pg_attribute
find_column(Relation rel, const char *name)
{
	TupleDesc	desc = RelationGetDescr(rel);

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		if (!column->attisdropped && strcmp(NameStr(column->attname), name) == 0)
			return column;
	}
	return NULL;
}

/* Has a column been taken for another one of events already? */
static bool
is_taken(const ObixSource *source, const char *name)
{
	for (int i = 0; i < Natts_event; i++)
	{
		if (source->names[i] != NULL && strcmp(source->names[i], name) == 0)
			return true;
	}
	return false;
}

/* The column that the user means. */
static Form_pg_attribute
given_column(const ObixSource *source, Relation rel, int i, const char *name)
{
	Form_pg_attribute column = find_column(rel, name);

	if (column == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" of relation \"%s\" does not exist",
						name, source->name)));
	if (!suits(i, getBaseType(column->atttypid)))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" of \"%s\" cannot be imported as %s",
						name, source->name, event_column(i)),
				 errdetail("It has type %s.",
						   format_type_with_typemod(column->atttypid,
													column->atttypmod)),
				 errhint("Import from a view that converts it.")));
	return column;
}

/* The column that is meant by its name, NULL if there is none. */
static Form_pg_attribute
usual_column(const ObixSource *source, Relation rel, int i)
{
	for (int n = 0; n < MAX_NAMES && usual_names[i][n] != NULL; n++)
	{
		Form_pg_attribute column = find_column(rel, usual_names[i][n]);

		if (column != NULL && !is_taken(source, usual_names[i][n]) &&
			suits(i, getBaseType(column->atttypid)))
			return column;
	}
	return NULL;
}

/* The type in which a column is read: JSON that is to be parsed as it is. */
static const char *
read_as(int i, Oid type)
{
	switch (i + 1)
	{
		case Anum_event_sequence:
			return "int8";
		case Anum_event_id:
			return "uuid";
		case Anum_event_payload:
		case Anum_event_headers:
			return type == JSONBOID ? "jsonb" : type == BYTEAOID ? "bytea" : "text";
		case Anum_event_recorded_at:
			return "timestamptz";
		default:
			return "text";
	}
}

static bool
is_btree(Oid index)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(index));
	bool		result;

	if (!HeapTupleIsValid(tuple))
		return false;
	result = ((Form_pg_class) GETSTRUCT(tuple))->relam == BTREE_AM_OID;
	ReleaseSysCache(tuple);
	return result;
}

/* Can rows be read in the order of a column without sorting all of them? */
static bool
has_index_on(Relation rel, AttrNumber attnum)
{
	List	   *indexes;
	ListCell   *cell;
	bool		found = false;

	if (rel->rd_rel->relkind != RELKIND_RELATION &&
		rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		return true;			/* who knows */
	indexes = RelationGetIndexList(rel);
	foreach(cell, indexes)
	{
		HeapTuple	tuple = SearchSysCache1(INDEXRELID,
											ObjectIdGetDatum(lfirst_oid(cell)));

		if (!HeapTupleIsValid(tuple))
			continue;
		found |= ((Form_pg_index) GETSTRUCT(tuple))->indisvalid &&
			((Form_pg_index) GETSTRUCT(tuple))->indkey.values[0] == attnum &&
			heap_attisnull(tuple, Anum_pg_index_indpred, NULL) &&
			is_btree(lfirst_oid(cell));
		ReleaseSysCache(tuple);
	}
	list_free(indexes);
	return found;
}

/* Tell what is imported as what, since names may mislead. */
static void
report_columns(const ObixSource *source, Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);
	StringInfoData used;
	StringInfoData unused;
	bool		local = source->types[Anum_event_recorded_at - 1] == TIMESTAMPOID;

	initStringInfo(&used);
	initStringInfo(&unused);
	for (int i = 0; i < Natts_event; i++)
	{
		if (source->names[i] != NULL)
			appendStringInfo(&used, "%s%s from \"%s\"", used.len > 0 ? ", " : "",
							 event_column(i), source->names[i]);
	}
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		if (!column->attisdropped && !is_taken(source, NameStr(column->attname)))
			appendStringInfo(&unused, "%s\"%s\"", unused.len > 0 ? ", " : "",
							 NameStr(column->attname));
	}
	ereport(NOTICE,
			(errmsg("importing %s", used.data),
			 unused.len > 0 && local ?
			 errdetail("Columns that are not imported: %s. Times are taken to be in time zone \"%s\".",
					   unused.data, pg_get_timezone_name(session_timezone)) :
			 unused.len > 0 ?
			 errdetail("Columns that are not imported: %s.", unused.data) :
			 local ?
			 errdetail("Times are taken to be in time zone \"%s\".",
					   pg_get_timezone_name(session_timezone)) : 0));
}

/*
 * Find out how events are to be read.  given: names of columns, NULL for one of
 * a usual name, empty for none.
 */
void
obix_source_open(ObixSource *source, Oid relid, char *const *given)
{
	Relation	rel = try_relation_open(relid, AccessShareLock);

	if (rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation with OID %u does not exist", relid)));
	if (rel->rd_rel->relkind != RELKIND_RELATION &&
		rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE &&
		rel->rd_rel->relkind != RELKIND_VIEW &&
		rel->rd_rel->relkind != RELKIND_MATVIEW &&
		rel->rd_rel->relkind != RELKIND_FOREIGN_TABLE)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("cannot import from \"%s\"", RelationGetRelationName(rel)),
				 errdetail("It is neither a table nor a view.")));

	source->relid = relid;
	source->name = pstrdup(RelationGetRelationName(rel));
	source->quoted = obix_quote_relation(relid);
	for (int i = 0; i < Natts_event; i++)
	{
		Form_pg_attribute column = NULL;
		const char *type;

		if (given[i] == NULL)
			column = usual_column(source, rel, i);
		else if (given[i][0] != '\0')
			column = given_column(source, rel, i, given[i]);
		if (column == NULL &&
			(i + 1 == Anum_event_sequence || i + 1 == Anum_event_payload))
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("no column of \"%s\" is known to be the %s of events",
							source->name, event_column(i)),
					 errhint("Name it in the argument %s.", event_column(i))));

		if (column == NULL)
		{
			source->values[i] = psprintf("NULL::pg_catalog.%s", read_as(i, InvalidOid));
			continue;
		}
		source->names[i] = pstrdup(NameStr(column->attname));
		source->columns[i] = psprintf("s.%s", quote_identifier(source->names[i]));
		source->types[i] = getBaseType(column->atttypid);
		type = read_as(i, source->types[i]);

		/* a cast of somebody's type is somebody's function */
		source->values[i] = source->types[i] < FirstNormalObjectId ?
			psprintf("%s::pg_catalog.%s", source->columns[i], type) :
			psprintf("CASE WHEN %s IS NOT NULL THEN pg_catalog.format('%%s', %s) END",
					 source->columns[i], source->columns[i]);
		if (i + 1 == Anum_event_sequence)
		{
			source->may_lack_sequence = !column->attnotnull;
			if (!has_index_on(rel, column->attnum))
				ereport(WARNING,
						(errmsg("there is no index on column \"%s\" of \"%s\"",
								source->names[i], source->name),
						 errdetail("The whole table is read for each batch."),
						 errhint("Create an index, or import in larger batches.")));
		}
	}
	report_columns(source, rel);
	relation_close(rel, AccessShareLock);
}

/* The statement that reads the events of a range, in order. */
char *
obix_source_query(const ObixSource *source, int64 from, int64 to)
{
	StringInfoData query;
	const char *sequence = source->columns[Anum_event_sequence - 1];

	initStringInfo(&query);
	for (int i = 0; i < Natts_event; i++)
		appendStringInfo(&query, "%s %s", i == 0 ? "SELECT" : ",", source->values[i]);
	appendStringInfo(&query, " FROM %s s"
					 " WHERE %s OPERATOR(pg_catalog.>=) '" INT64_FORMAT "'::pg_catalog.int8"
					 " AND %s OPERATOR(pg_catalog.<=) '" INT64_FORMAT "'::pg_catalog.int8"
					 " ORDER BY %s",
					 source->quoted, sequence, from, sequence, to, sequence);
	return query.data;
}

/* Where an error happened */
typedef struct ObixSourceContext
{
	const ObixSource *source;
	int64		sequence;
	const char *column;			/* NULL: none in particular */
} ObixSourceContext;

/* Error context callback: tell the row. */
static void
tell_row(void *arg)
{
	ObixSourceContext *context = arg;

	if (context->column == NULL)
		errcontext("import of row %lld of \"%s\"",
				   (long long) context->sequence, context->source->name);
	else
		errcontext("import of row %lld of \"%s\", column \"%s\"",
				   (long long) context->sequence, context->source->name,
				   context->column);
}

/* A value as jsonb. */
static Datum
parse(Datum value, Oid type)
{
	char	   *string;

	if (type == JSONBOID)
		return value;
	if (type == BYTEAOID)
		value = DirectFunctionCall2(pg_convert_from, value,
									DirectFunctionCall1(namein, CStringGetDatum("UTF8")));
	string = TextDatumGetCString(value);
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(string));
}

/*
 * Make an event of a row that obix_source_query() has read, in the current
 * memory context.  Ids and times that are missing are new.
 */
void
obix_source_row(const ObixSource *source, HeapTuple tuple, TupleDesc desc,
				ObixSourceRow *row)
{
	ObixSourceContext context = {.source = source};
	ErrorContextCallback callback = {
		.previous = error_context_stack,
		.callback = tell_row,
		.arg = &context
	};
	Datum		values[Natts_event];
	bool		isnull[Natts_event];

	heap_deform_tuple(tuple, desc, values, isnull);
	context.sequence = row->sequence = DatumGetInt64(values[Anum_event_sequence - 1]);
	error_context_stack = &callback;

	if (isnull[Anum_event_payload - 1])
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("payload of an event must not be null"),
				 errhint("Import from a view that leaves out such rows, or gives them the payload 'null'::jsonb.")));
	for (int i = Anum_event_payload - 1; i <= Anum_event_headers - 1; i++)
	{
		context.column = source->names[i];
		if (!isnull[i])
			values[i] = parse(values[i], source->types[i]);
	}
	context.column = NULL;

	if (!isnull[Anum_event_recorded_at - 1])
		row->recorded_at = DatumGetTimestampTz(values[Anum_event_recorded_at - 1]);
	else if (source->names[Anum_event_recorded_at - 1] == NULL)
		row->recorded_at = GetCurrentTimestamp();
	else
		ereport(ERROR,
				(errcode(ERRCODE_NOT_NULL_VIOLATION),
				 errmsg("recorded_at of an event must not be null"),
				 errhint("Import from a view that gives such rows a time, or with recorded_at => ''.")));
	if (TIMESTAMP_NOT_FINITE(row->recorded_at))
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("recorded_at of an event must be finite")));
	values[Anum_event_recorded_at - 1] = TimestampTzGetDatum(row->recorded_at);
	isnull[Anum_event_recorded_at - 1] = false;

	if (isnull[Anum_event_id - 1])
		values[Anum_event_id - 1] = UUIDPGetDatum(obix_make_uuid_at(row->recorded_at));
	else if (obix_uuid_is_nil(DatumGetUUIDP(values[Anum_event_id - 1])))
		ereport(ERROR,
				(errcode(ERRCODE_CHECK_VIOLATION),
				 errmsg("id of an event must not be the nil UUID"),
				 errdetail("The nil UUID marks placeholders, which obix alone writes."),
				 errhint("Import from a view that leaves out such rows, or with id => ''.")));
	isnull[Anum_event_id - 1] = false;

	row->event = heap_form_minimal_tuple(obix_event_desc(), values, isnull, 0);
	error_context_stack = callback.previous;
}

/*
 * The tables from which a source gets its rows: itself, its partitions and
 * children, what a view reads.  What is in another server or behind a function
 * is not known.  Called within SPI, with an active snapshot.
 */
List *
obix_source_tables(const ObixSource *source)
{
	static const char *query =
		"WITH RECURSIVE tables (relid) AS ("
		"SELECT $1 UNION"
		" SELECT o.relid FROM tables t CROSS JOIN LATERAL ("
		"SELECT i.inhrelid FROM pg_catalog.pg_inherits i"
		" WHERE i.inhparent OPERATOR(pg_catalog.=) t.relid"
		" UNION ALL"
		" SELECT d.refobjid FROM pg_catalog.pg_rewrite r JOIN pg_catalog.pg_depend d"
		" ON d.objid OPERATOR(pg_catalog.=) r.oid"
		" WHERE r.ev_class OPERATOR(pg_catalog.=) t.relid"
		" AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_rewrite'::pg_catalog.regclass"
		" AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass"
		") o (relid))"
		" SELECT t.relid FROM tables t JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) t.relid"
		" WHERE c.relkind OPERATOR(pg_catalog.=) 'r' OR c.relkind OPERATOR(pg_catalog.=) 'p'";
	Oid			type = OIDOID;
	Datum		value = ObjectIdGetDatum(source->relid);
	List	   *tables = NIL;
	int			result = SPI_execute_with_args(query, 1, &type, &value, NULL, true, 0);

	if (result != SPI_OK_SELECT)
		elog(ERROR, "SPI_execute failed: %s", SPI_result_code_string(result));
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		bool		isnull;

		tables = lappend_oid(tables,
							 DatumGetObjectId(SPI_getbinval(SPI_tuptable->vals[i],
															SPI_tuptable->tupdesc,
															1, &isnull)));
	}
	return tables;
}

/*
 * Wait for the end of all transactions that have written to these tables, without
 * keeping others from it.  A value that one of them has drawn from a sequence
 * before is a row after that, or never will be; but for values that are kept for
 * later, by CACHE or by an application.
 */
void
obix_source_wait_for_writers(List *tables)
{
	ListCell   *cell;

	foreach(cell, tables)
	{
		LOCKTAG		tag;
		VirtualTransactionId *vxids;

		SET_LOCKTAG_RELATION(tag, MyDatabaseId, lfirst_oid(cell));
		vxids = GetLockConflicts(&tag, ShareLock, NULL);
		for (; VirtualTransactionIdIsValid(*vxids); vxids++)
		{
			PGPROC	   *proc = NULL;

			if (vxids->procNumber != INVALID_PROC_NUMBER)
				proc = ProcNumberGetProc(vxids->procNumber);
			if (proc != NULL && PROC_LXID(proc) == vxids->localTransactionId &&
				(proc->statusFlags & PROC_IN_VACUUM) != 0)
				continue;		/* it writes no row */
			(void) VirtualXactLock(*vxids, true);
		}
	}
}
