/*-------------------------------------------------------------------------
 *
 * event.c
 *	  The columns of an event.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/tupdesc.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "compat.h"
#include "event.h"

static const struct
{
	const char *name;
	Oid			type;
}			event_columns[Natts_event] =

{
	{"sequence", INT8OID},
	{"id", UUIDOID},
	{"type", TEXTOID},
	{"key", TEXTOID},
	{"payload", JSONBOID},
	{"headers", JSONBOID},
	{"recorded_at", TIMESTAMPTZOID},
};

/* The descriptor of obix.event, as rows are formed; lives for ever. */
TupleDesc
obix_event_desc(void)
{
	static TupleDesc event_desc = NULL;

	if (event_desc == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
		TupleDesc	desc = CreateTemplateTupleDesc(Natts_event);

		for (int i = 0; i < Natts_event; i++)
			TupleDescInitEntry(desc, i + 1, event_columns[i].name,
							   event_columns[i].type, -1, 0);
		event_desc = desc;
		MemoryContextSwitchTo(old);
	}
	return event_desc;
}

static bool
has_column(Relation rel, int i)
{
	TupleDesc	desc = RelationGetDescr(rel);
	Form_pg_attribute column;

	if (i >= desc->natts)
		return false;
	column = TupleDescAttr(desc, i);
	return !column->attisdropped && column->atttypid == event_columns[i].type &&
		strcmp(NameStr(column->attname), event_columns[i].name) == 0;
}

/*
 * Does a table begin with the columns of obix.event, as obix makes outboxes and
 * their partitions?  Whoever looks at a column by its number relies on it.
 */
bool
obix_has_columns(Relation rel)
{
	for (int i = 0; i < Natts_event; i++)
	{
		if (!has_column(rel, i))
			return false;
	}
	return true;
}

/* Error out unless it does. */
void
obix_check_columns(Relation rel)
{
	for (int i = 0; i < Natts_event; i++)
	{
		if (!has_column(rel, i))
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("column \"%s\" of outbox \"%s\" is not as obix made it",
							event_columns[i].name, RelationGetRelationName(rel)),
					 errdetail("It must be column %d and have type %s.", i + 1,
							   format_type_be(event_columns[i].type)),
					 errhint("Create a new outbox, and a table of its own for other data.")));
	}
}

/* A placeholder, but for its sequence and time. */
MinimalTuple
obix_form_placeholder(void)
{
	static const pg_uuid_t nil;
	Datum		values[Natts_event] = {0};
	bool		isnull[Natts_event];

	memset(isnull, true, sizeof(isnull));
	values[Anum_event_sequence - 1] = Int64GetDatum(0);
	isnull[Anum_event_sequence - 1] = false;
	values[Anum_event_id - 1] = UUIDPGetDatum(&nil);
	isnull[Anum_event_id - 1] = false;
	values[Anum_event_recorded_at - 1] = TimestampTzGetDatum(0);
	isnull[Anum_event_recorded_at - 1] = false;
	return heap_form_minimal_tuple(obix_event_desc(), values, isnull, 0);
}

/*
 * Store an event in a virtual slot, with copies of its values in the current
 * memory context.
 */
void
obix_store_event(TupleTableSlot *slot, const Datum *values, const bool *isnull)
{
	ExecClearTuple(slot);
	for (int i = 0; i < Natts_event; i++)
	{
		Form_pg_attribute column = TupleDescAttr(slot->tts_tupleDescriptor, i);

		slot->tts_isnull[i] = isnull[i];
		if (isnull[i])
			continue;
		slot->tts_values[i] = column->attlen == -1 ?
			PointerGetDatum(PG_DETOAST_DATUM_COPY(values[i])) :
			datumCopy(values[i], column->attbyval, column->attlen);
	}
	ExecStoreVirtualTuple(slot);
}
