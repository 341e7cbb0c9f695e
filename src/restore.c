/*-------------------------------------------------------------------------
 *
 * restore.c
 *	  Rows that somebody else than obix puts into its tables.
 *
 * pg_dump writes these tables like any other, so whoever restores a dump needs
 * the privilege INSERT on them: the owner of the database has it.  But obix
 * believes what they say.  Handlers run as the owner of their consumer, dead
 * letters are events.  So a trigger lets pass what the user could have brought
 * about by calling functions, and nothing else.
 *
 * Tables come in any order, those of parallel jobs at the same time.  What
 * belongs to a consumer that is not there yet is let pass, under the mutex of
 * its number; creating a consumer takes that mutex, and deletes what it finds.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "commands/trigger.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "compat.h"
#include "consumer.h"
#include "obix.h"
#include "relation.h"

PG_FUNCTION_INFO_V1(obix_guard_registry);

/* Error out unless the user may use the consumer with a number, if there is one. */
static void
check_use(int32 id)
{
	ObixConsumer consumer;

	obix_lock_consumer(id);
	if (obix_get_consumer(id, &consumer))
		obix_check_use(&consumer);
}

/*
 * obix.guard_registry(): row trigger BEFORE INSERT on the tables of obix, enabled
 * ALWAYS.
 */
Datum
obix_guard_registry(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;
	Relation	rel;
	const char *name;
	const char *column = "id";
	Datum		value;
	bool		isnull;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event) ||
		!TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired BEFORE INSERT FOR EACH ROW",
						"obix.guard_registry")));

	/* obix itself, and superusers */
	rel = trigger->tg_relation;
	if (GetUserId() == rel->rd_rel->relowner || superuser())
		return PointerGetDatum(trigger->tg_trigtuple);

	obix_require_preload();
	name = RelationGetRelationName(rel);
	if (RelationGetRelid(rel) != obix_member_relid(name))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("\"%s\" is not a table of obix", name),
				 errdetail("It has a trigger that calls obix.guard_registry."),
				 errhint("Drop the trigger.")));
	if (strcmp(name, "outbox") == 0)
		column = "outbox";
	else if (strcmp(name, "consumer") == 0)
		column = "owner";
	value = heap_getattr(trigger->tg_trigtuple,
						 get_attnum(RelationGetRelid(rel), column),
						 RelationGetDescr(rel), &isnull);
	if (isnull)
		 /* a constraint will see to it */ ;
	else if (strcmp(column, "outbox") == 0)
		obix_check_owner(DatumGetObjectId(value));
	else if (strcmp(column, "owner") == 0)
		check_can_set_role(GetUserId(), DatumGetObjectId(value));
	else
		check_use(abs(DatumGetInt32(value)));
	return PointerGetDatum(trigger->tg_trigtuple);
}
