/*-------------------------------------------------------------------------
 *
 * admin.c
 *	  Creating, altering and dropping outboxes.
 *
 * An outbox is an ordinary table of whoever creates it, made by ordinary DDL
 * with that user's rights, so privileges, pg_dump, publications and monitoring
 * treat it like any other.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/scansup.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/varlena.h"

#include "bounds.h"
#include "consumer.h"
#include "obix.h"
#include "partition.h"
#include "rebuild.h"
#include "registry.h"
#include "relation.h"
#include "work.h"
#include "xact.h"

/* Partitions to keep ready, at most; also in the SQL script */
#define MAX_PREMAKE		10000

/* Sequences in a partition; also in the SQL script */
#define DEFAULT_WIDTH	INT64CONST(2000000)

PG_FUNCTION_INFO_V1(obix_create_outbox);
PG_FUNCTION_INFO_V1(obix_adopt_outbox);
PG_FUNCTION_INFO_V1(obix_alter_outbox);
PG_FUNCTION_INFO_V1(obix_drop_outbox);

static void
check_width(int64 width)
{
	if (width < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("partition_width must be at least 1"),
				 errdetail("It is the number of sequences in a partition, and %lld was given.",
						   (long long) width)));
}

static void
check_premake(int32 premake)
{
	if (premake < 0 || premake > MAX_PREMAKE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("premake must be between 0 and %d", MAX_PREMAKE),
				 errdetail("It is the number of partitions to keep ready, and %d was given.",
						   premake)));
}

/* Find the schema in which the user means, and may, create a table. */
static Oid
creation_namespace(text *qualified_name, char **name)
{
	RangeVar   *range = makeRangeVarFromNameList(textToQualifiedNameList(qualified_name));
	Oid			namespace;

	namespace = RangeVarGetAndCheckCreationNamespace(range, NoLock, NULL);
	if (range->relpersistence == RELPERSISTENCE_TEMP ||
		isAnyTempNamespace(namespace))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TABLE_DEFINITION),
				 errmsg("an outbox cannot be a temporary table"),
				 errdetail("Other sessions and the workers could not see it.")));
	*name = range->relname;
	if (strlen(*name) >= NAMEDATALEN)
		truncate_identifier(*name, strlen(*name), true);
	return namespace;
}

/* Create the table, but for its partitions, and return its oid. */
static Oid
create_table(Oid namespace, const char *name)
{
	char	   *quoted = quote_qualified_identifier(get_namespace_name(namespace),
													name);
	Oid			relid;

	obix_execute("CREATE TABLE %s ("
				 "sequence pg_catalog.int8 NOT NULL PRIMARY KEY,"
				 " id pg_catalog.uuid NOT NULL DEFAULT obix.uuidv7(),"
				 " type pg_catalog.text,"
				 " key pg_catalog.text,"
				 " payload pg_catalog.jsonb,"
				 " headers pg_catalog.jsonb,"
				 " recorded_at pg_catalog.timestamptz NOT NULL"
				 " DEFAULT pg_catalog.statement_timestamp())"
				 " PARTITION BY RANGE (sequence)", quoted);
	relid = get_relname_relid(name, namespace);

	obix_execute("ALTER TABLE %s ALTER COLUMN sequence"
				 " SET DEFAULT obix.next_sequence(%s::pg_catalog.regclass)",
				 quoted, quote_literal_cstr(quoted));
	obix_execute("CREATE TRIGGER %s BEFORE INSERT OR UPDATE OR DELETE ON %s"
				 " FOR EACH ROW EXECUTE FUNCTION obix.guard()",
				 OBIX_GUARD_NAME, quoted);
	obix_execute("CREATE TRIGGER %s BEFORE TRUNCATE ON %s"
				 " FOR EACH STATEMENT EXECUTE FUNCTION obix.guard_truncate()",
				 OBIX_TRUNCATE_NAME, quoted);
	obix_execute("ALTER TABLE %s ENABLE ALWAYS TRIGGER %s,"
				 " ENABLE ALWAYS TRIGGER %s",
				 quoted, OBIX_GUARD_NAME, OBIX_TRUNCATE_NAME);
	obix_execute("COMMENT ON TABLE %s IS 'outbox of obix: publish with obix.publish, read with obix.read'",
				 quoted);
	return relid;
}

/*
 * obix.create_outbox(outbox, partition_width, premake)
 */
Datum
obix_create_outbox(PG_FUNCTION_ARGS)
{
	text	   *qualified_name = PG_GETARG_TEXT_PP(0);
	int64		width = PG_GETARG_INT64(1);
	int32		premake = PG_GETARG_INT32(2);
	char	   *name;
	Oid			namespace;
	Oid			relid;
	Oid			leaf;
	ObixRelation *known;
	Relation	parent;
	int			nestlevel;

	obix_check_enabled("obix.create_outbox()");
	check_width(width);
	check_premake(premake);
	namespace = creation_namespace(qualified_name, &name);

	/* the text below is resolved in pg_catalog, whatever the user's path */
	nestlevel = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);

	relid = create_table(namespace, name);
	obix_registry_insert(relid, width, premake);
	leaf = obix_create_leaf(relid, obix_free_name(name, namespace, "default"));
	obix_execute("ALTER TABLE %s ATTACH PARTITION %s DEFAULT",
				 obix_quote_relation(relid), obix_quote_relation(leaf));
	obix_add_partitions(relid, 0, width, premake + 1, false);

	/* where there is no room, it is the creator who hears of it */
	parent = obix_open(relid, AccessShareLock, &known);
	(void) obix_xact(parent, obix_attach(parent, known));
	obix_xact_request_work(relid, OBIX_WORK_PREMAKE);
	table_close(parent, NoLock);

	AtEOXact_GUC(false, nestlevel);
	PG_RETURN_OID(relid);
}

/*
 * obix.adopt_outbox(outbox, partition_width, premake): register a table that was
 * an outbox where it was dumped.
 *
 * What lies below its oldest row was removed there.  The holes above are those
 * of transactions that the dump does not have, so they will be filled.
 */
Datum
obix_adopt_outbox(PG_FUNCTION_ARGS)
{
	Oid			relid;
	Relation	parent;
	ObixRelation *known;
	ObixRegistryRow row;
	ObixLeaf	leaf;
	SnapshotData dirty;
	int64		width = DEFAULT_WIDTH;
	int64		end;
	int64		oldest;

	obix_check_enabled("obix.adopt_outbox()");
	if (PG_ARGISNULL(0) || PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", PG_ARGISNULL(0) ? "outbox" : "premake")));
	relid = PG_GETARG_OID(0);
	check_premake(PG_GETARG_INT32(2));

	/* nobody may lock others out of what belongs to somebody else */
	obix_check_owner(relid);
	parent = try_table_open(relid, ShareRowExclusiveLock);
	if (parent == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("outbox with OID %u does not exist", relid)));
	obix_check_owner(relid);
	if (!obix_is_partitioned(parent) || parent->rd_rel->relispartition ||
		!obix_has_guard(parent))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("table \"%s\" has never been an outbox",
						RelationGetRelationName(parent)),
				 errhint("Use obix.create_outbox to create an outbox.")));
	if (obix_registry_find(relid, &row))
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("\"%s\" is an outbox already",
						RelationGetRelationName(parent))));
	obix_check_columns(parent);
	obix_check_ready(parent);

	end = obix_partitions_end(parent);
	if (!PG_ARGISNULL(1))
		width = PG_GETARG_INT64(1);
	else if (end > 0)
	{
		obix_find_leaf(parent, end - 1, &leaf);
		width = end - leaf.lower;
	}
	check_width(width);
	CacheInvalidateRelcache(parent);	/* it may have had another id */
	obix_registry_insert(relid, width, PG_GETARG_INT32(2));
	InitDirtySnapshot(dirty);
	if (obix_oldest_row(parent, &dirty, 1, &oldest) && oldest > 1)
		(void) obix_raise_resolved(relid, oldest - 1, true);
	table_close(parent, NoLock);

	parent = obix_open(relid, AccessShareLock, &known);
	(void) obix_xact(parent, obix_attach(parent, known));
	obix_xact_created(relid);
	obix_xact_request_work(relid, OBIX_WORK_PREMAKE | OBIX_WORK_FILL | OBIX_WORK_RECOVER);
	table_close(parent, NoLock);
	PG_RETURN_VOID();
}

/*
 * Error out unless the owner of an outbox may say that nothing is still to come
 * up to a position.  Who gives out the sequences knows without.
 */
static void
check_resolved(Relation parent, int64 before, int64 resolved)
{
	bool		copied;

	if (!obix_subscribes(parent, &copied))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot set the resolved position of outbox \"%s\"",
						RelationGetRelationName(parent)),
				 errdetail("No subscription writes to it, so obix knows by itself what is still to come.")));
	if (!copied)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("could not set the resolved position of outbox \"%s\"",
						RelationGetRelationName(parent)),
				 errdetail("Its subscription has not copied yet what was there before."),
				 errhint("Try again later.")));
	if (resolved < before || resolved >= PG_INT64_MAX - 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("resolved must be between %lld and %lld",
						(long long) before, (long long) PG_INT64_MAX - 2),
				 errdetail("It only rises, and %lld was given.",
						   (long long) resolved)));
}

/*
 * obix.alter_outbox(outbox, partition_width, premake, resolved)
 */
Datum
obix_alter_outbox(PG_FUNCTION_ARGS)
{
	Oid			relid;
	ObixRelation *known;
	ObixOutbox *shared;
	Relation	parent;
	ObixRegistryRow row;

	obix_check_writable("obix.alter_outbox()");
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("outbox must not be null")));
	relid = PG_GETARG_OID(0);
	obix_check_owner(relid);
	if (!PG_ARGISNULL(1))
		check_width(PG_GETARG_INT64(1));
	if (!PG_ARGISNULL(2))
		check_premake(PG_GETARG_INT32(2));

	/* no walk may begin where nothing is to be looked for any more */
	if (!PG_ARGISNULL(3) && obix_registry_find(relid, &row))
		obix_lock_mutex(row.id, OBIX_MUTEX_FILL);

	parent = obix_open(relid, AccessShareLock, &known);
	obix_lock_mutex(known->id, OBIX_MUTEX_ROW);
	if (!obix_registry_find(relid, &row))
		elog(ERROR, "could not find registry row of outbox %u", relid);
	if (!PG_ARGISNULL(3))
	{
		check_resolved(parent, row.resolved, PG_GETARG_INT64(3));
		row.resolved = PG_GETARG_INT64(3);
	}
	if (!PG_ARGISNULL(1))
		row.partition_width = PG_GETARG_INT64(1);
	if (!PG_ARGISNULL(2))
		row.premake = PG_GETARG_INT32(2);
	obix_registry_update(&row);

	/* attaching could wait for whoever is attaching partitions */
	shared = obix_find_outbox(relid, known->id);
	if (shared != NULL)
	{
		ObixXact   *xact = obix_xact(parent, shared);

		if (!PG_ARGISNULL(3))
		{
			ObixPosition position;

			obix_get_position(shared, relid, known->id, &position);
			(void) obix_raise_head(shared, row.resolved, position.rewinds);
			obix_xact_walked(xact, row.resolved + 1, 0, 0);
		}
		obix_xact_request_work(relid, OBIX_WORK_PREMAKE);
	}
	table_close(parent, NoLock);

	PG_RETURN_VOID();
}

/*
 * obix.drop_outbox(outbox, force): what else follows is done by removal.c, as
 * for DROP TABLE.
 */
Datum
obix_drop_outbox(PG_FUNCTION_ARGS)
{
	Oid			relid = PG_GETARG_OID(0);
	bool		force = PG_GETARG_BOOL(1);
	ObixRelation *known;
	List	   *consumers;
	ListCell   *cell;

	obix_check_writable("obix.drop_outbox()");
	obix_check_owner(relid);
	table_close(obix_open(relid, AccessExclusiveLock, &known), NoLock);
	consumers = obix_list_consumers(relid);
	if (consumers != NIL && !force)
		ereport(ERROR,
				(errcode(ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST),
				 errmsg("cannot drop outbox \"%s\" because consumers depend on it",
						get_rel_name(relid)),
				 errdetail("One of them is \"%s\".",
						   ((ObixConsumer *) linitial(consumers))->name),
				 errhint("Drop them first, or use force => true to drop them too.")));
	foreach(cell, consumers)
		obix_cancel_rebuild_of(lfirst(cell));
	obix_execute("DROP TABLE %s %s", obix_quote_relation(relid),
				 force ? "CASCADE" : "RESTRICT");
	PG_RETURN_VOID();
}
