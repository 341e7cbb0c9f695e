/*-------------------------------------------------------------------------
 *
 * shadow.c
 *	  Making tables anew beside those in use, and swapping them.
 *
 * A rebuild makes empty copies of tables in a schema of its own, the shadow.
 * When they are filled, the old tables are dropped and the copies moved into
 * their place.  Which tables can be swapped, swappable.c knows.
 *
 * Expressions are copied as trees, by CREATE TABLE ... LIKE and what it uses
 * for indexes, and not by way of their text, which does not always come out
 * the same when it is parsed and printed again.  So at the swap the printed
 * definitions of table and copy are equal, unless the table was changed
 * meanwhile.  What can change without harm is no part of them, and taken over
 * then: privileges, comments, options and statistics targets.
 *
 * What is run for a table is run as its owner.  Where a statement would ask
 * for privileges that the owner may have lost since, or cannot express what is
 * to be copied, the catalogs are written directly, which evaluates nothing.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/attmap.h"
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/index.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_attrdef.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_sequence.h"
#include "catalog/pg_statistic_ext.h"
#include "catalog/pg_type.h"
#include "commands/comment.h"
#include "commands/defrem.h"
#include "commands/tablecmds.h"
#include "commands/tablespace.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/parse_utilcmd.h"
#include "storage/lmgr.h"
#include "tcop/dest.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/ruleutils.h"
#include "utils/syscache.h"

#include "compat.h"
#include "partition.h"
#include "relation.h"
#include "shadow.h"
#include "swappable.h"

/* Is this an index of a table?  One that was not finished is none. */
static bool
is_own_index(Oid object, Oid relid)
{
	Form_pg_index form;

	if (get_rel_relkind(object) != RELKIND_INDEX)
		return false;
	form = ROW(pg_index, INDEXRELID, object);
	return form->indrelid == relid && form->indisvalid;
}

/* The options of an identity sequence. */
static char *
sequence_text(Oid sequence)
{
	Form_pg_sequence form = ROW(pg_sequence, SEQRELID, sequence);

	return psprintf("START WITH " INT64_FORMAT " INCREMENT BY " INT64_FORMAT
					" MINVALUE " INT64_FORMAT " MAXVALUE " INT64_FORMAT
					" CACHE " INT64_FORMAT "%s",
					form->seqstart, form->seqincrement, form->seqmin,
					form->seqmax, form->seqcache,
					form->seqcycle ? " CYCLE" : "");
}

/*
 * A constraint, as in ADD CONSTRAINT.  Whether it holds for old rows does not
 * matter to a copy, which has none.
 */
static char *
constraint_text(Oid constraint)
{
	Datum		definition = DirectFunctionCall1(pg_get_constraintdef,
												 ObjectIdGetDatum(constraint));
	char	   *result = TextDatumGetCString(definition);
	int			length = strlen(result) - strlen(" NOT VALID");

	if (length > 0 && strcmp(result + length, " NOT VALID") == 0)
		result[length] = '\0';
	return result;
}

/* CREATE INDEX, without the name of the table. */
static char *
index_text(Oid index, Oid relid)
{
	Form_pg_index form = ROW(pg_index, INDEXRELID, index);
	char	   *definition = pg_get_indexdef_string(index);
	char	   *on = psprintf(" ON %s USING ", obix_quote_relation(relid));
	char	   *start = strstr(definition, on);

	if (start == NULL)
		elog(ERROR, "unexpected index definition: %s", definition);
	*start = '\0';
	return psprintf("%s USING %s%s%s", definition, start + strlen(on),
					form->indisclustered ? ", clustered on" : "",
					form->indisreplident ? ", replica identity" : "");
}

/* A column, the nth of its table. */
static char *
column_text(Relation rel, Form_pg_attribute column, int n, List *context)
{
	TupleConstr *constr = RelationGetDescr(rel)->constr;
	StringInfoData item;

	initStringInfo(&item);
	appendStringInfo(&item, "column %d %s %s STORAGE %c", n,
					 quote_identifier(NameStr(column->attname)),
					 format_type_extended(column->atttypid, column->atttypmod,
										  FORMAT_TYPE_TYPEMOD_GIVEN |
										  FORMAT_TYPE_FORCE_QUALIFY),
					 column->attstorage);
	if (OidIsValid(column->attcollation))
		appendStringInfo(&item, " COLLATE %s",
						 generate_collation_name(column->attcollation));
	if (column->attcompression != '\0')
		appendStringInfo(&item, " COMPRESSION %c", column->attcompression);
	if (column->attnotnull)
		appendStringInfoString(&item, " NOT NULL");
	if (column->attidentity != '\0')
		appendStringInfo(&item, " IDENTITY %c", column->attidentity);
	if (column->attgenerated != '\0')
		appendStringInfo(&item, " GENERATED %c", column->attgenerated);
	for (int i = 0; column->atthasdef && i < constr->num_defval; i++)
	{
		AttrDefault *value = &constr->defval[i];

		if (value->adnum == column->attnum)
			appendStringInfo(&item, " DEFAULT %s",
							 deparse_expression(stringToNode(value->adbin),
												context, false, false));
	}
	return item.data;
}

/*
 * All that a table and its copy must have in common: a list of strings.  Names
 * in it are qualified, since the caller acts as the owner.
 */
static List *
describe_table(Relation rel, List *members)
{
	TupleDesc	desc = RelationGetDescr(rel);
	Form_pg_class form = rel->rd_rel;
	List	   *context = deparse_context_for(RelationGetRelationName(rel),
											  RelationGetRelid(rel));
	const char *tablespace = "default";
	const char *type = "none";
	List	   *items;
	char	   *item;
	int			n = 0;
	ListCell   *cell;

	if (OidIsValid(form->reltablespace))
		tablespace = get_tablespace_name(form->reltablespace);
	if (OidIsValid(form->reloftype))
		type = format_type_be(form->reloftype);
	item = psprintf("owner %s, access method %s, tablespace %s,"
					" persistence %c, replica identity %c, type %s",
					GetUserNameFromId(form->relowner, false),
					get_am_name(form->relam), tablespace,
					form->relpersistence, form->relreplident, type);
	items = list_make1(makeString(item));
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		if (column->attisdropped)
			continue;
		item = column_text(rel, column, ++n, context);
		items = lappend(items, makeString(item));
	}
	foreach(cell, members)
	{
		ObjectAddress *member = lfirst(cell);
		Oid			object = member->objectId;

		if (member->classId == ConstraintRelationId)
			item = psprintf("constraint %s %s", obix_member_name(member),
							constraint_text(object));
		else if (member->classId == StatisticExtRelationId)
			item = psprintf("statistics %s", obix_member_name(member));
		else if (member->classId != RelationRelationId)
			continue;
		else if (get_rel_relkind(object) == RELKIND_SEQUENCE)
			item = psprintf("sequence %s %s", obix_member_name(member),
							sequence_text(object));
		else if (is_own_index(object, RelationGetRelid(rel)))
			item = index_text(object, RelationGetRelid(rel));
		else
			continue;
		items = lappend(items, makeString(item));
	}
	return items;
}

/* The oid of the same member of the copy of a table, InvalidOid if none. */
static Oid
find_twin(const ObjectAddress *member, Oid relid, Oid copy)
{
	Oid			shadow = get_rel_namespace(copy);
	char	   *name = obix_member_name(member);

	switch (member->classId)
	{
		case RelationRelationId:
			return member->objectId == relid ? copy :
				get_relname_relid(name, shadow);
		case ConstraintRelationId:
			return get_relation_constraint_oid(copy, name, true);
		case StatisticExtRelationId:
			return GetSysCacheOid2(STATEXTNAMENSP, Anum_pg_statistic_ext_oid,
								   CStringGetDatum(name),
								   ObjectIdGetDatum(shadow));
	}
	return InvalidOid;
}

/*
 * Give a row of a catalog some values of another.  If it is that of a relation
 * or one of its columns, the first of them is the privileges.
 */
static void
take_over_values(Oid catalog, HeapTuple from, HeapTuple to,
				 const AttrNumber *columns, int count, Oid relid, int32 sub)
{
	Relation	rel = table_open(catalog, RowExclusiveLock);
	TupleDesc	desc = RelationGetDescr(rel);
	Datum	   *values = palloc0(desc->natts * sizeof(Datum));
	bool	   *isnull = palloc0(desc->natts * sizeof(bool));
	bool	   *replace = palloc0(desc->natts * sizeof(bool));
	bool		differs = false;

	for (int i = 0; i < count; i++)
	{
		int			n = columns[i] - 1;
		Form_pg_attribute column = TupleDescAttr(desc, n);
		bool		old_isnull;
		Datum		old = heap_getattr(to, columns[i], desc, &old_isnull);

		values[n] = heap_getattr(from, columns[i], desc, &isnull[n]);
		replace[n] = true;
		if (isnull[n] == old_isnull &&
			(old_isnull || datumIsEqual(old, values[n], column->attbyval,
										column->attlen)))
			continue;
		differs = true;
		if (i == 0 && OidIsValid(relid))
		{
			Oid		   *old_roles;
			Oid		   *roles;
			int			old_n = aclmembers(old_isnull ? NULL :
										   DatumGetAclP(old), &old_roles);
			int			roles_n = aclmembers(isnull[n] ? NULL :
											 DatumGetAclP(values[n]), &roles);

			updateAclDependencies(RelationRelationId, relid, sub,
								  ROW(pg_class, RELOID, relid)->relowner,
								  old_n, old_roles, roles_n, roles);
		}
	}
	if (differs)
	{
		to = heap_modify_tuple(to, desc, values, isnull, replace);
		CatalogTupleUpdate(rel, &to->t_self, to);
	}
	table_close(rel, RowExclusiveLock);
}

static void
take_over_comment(Oid class, Oid from, int32 from_sub, Oid to, int32 to_sub)
{
	char	   *comment = GetComment(from, class, from_sub);
	char	   *old = GetComment(to, class, to_sub);

	if (comment == NULL && old == NULL)
		return;
	if (comment == NULL || old == NULL || strcmp(comment, old) != 0)
		CreateComments(to, class, to_sub, comment);
}

/* Take over privileges and options of a relation and its columns. */
static void
take_over_relation(Oid from, Oid to)
{
	static const AttrNumber class_columns[] = {
		Anum_pg_class_relacl, Anum_pg_class_reloptions
	};
	static const AttrNumber columns[] = {
		Anum_pg_attribute_attacl, Anum_pg_attribute_attoptions,
		Anum_pg_attribute_attstattarget
	};
	HeapTuple	tuple = obix_copy_row(RELOID, from);
	int			natts = ((Form_pg_class) GETSTRUCT(tuple))->relnatts;

	LockRelationOid(to, AccessExclusiveLock);
	take_over_values(RelationRelationId, tuple, obix_copy_row(RELOID, to),
					 class_columns, lengthof(class_columns), to, 0);

	/* there can be privileges on system columns */
	for (int i = FirstLowInvalidHeapAttributeNumber + 1; i <= natts; i++)
	{
		Form_pg_attribute form;
		AttrNumber	twin;

		tuple = SearchSysCacheCopy2(ATTNUM, ObjectIdGetDatum(from),
									Int16GetDatum(i));
		if (!HeapTupleIsValid(tuple))
			continue;
		form = (Form_pg_attribute) GETSTRUCT(tuple);
		if (form->attisdropped)
			continue;
		twin = get_attnum(to, NameStr(form->attname));
		take_over_values(AttributeRelationId, tuple,
						 SearchSysCacheCopy2(ATTNUM, ObjectIdGetDatum(to),
											 Int16GetDatum(twin)),
						 columns, lengthof(columns), to, twin);
		take_over_comment(RelationRelationId, from, i, to, twin);
	}
}

/* Take over what is no part of the definition of a table. */
static void
take_over(Oid relid, Oid copy, List *members)
{
	static const AttrNumber columns[] = {Anum_pg_statistic_ext_stxstattarget};
	Oid			toast = ROW(pg_class, RELOID, relid)->reltoastrelid;
	Oid			copy_toast = ROW(pg_class, RELOID, copy)->reltoastrelid;
	ListCell   *cell;

	foreach(cell, members)
	{
		ObjectAddress *member = lfirst(cell);
		Oid			twin = find_twin(member, relid, copy);

		if (!OidIsValid(twin))
			continue;
		take_over_comment(member->classId, member->objectId, 0, twin, 0);
		if (member->classId == RelationRelationId)
			take_over_relation(member->objectId, twin);
		else if (member->classId == StatisticExtRelationId)
			take_over_values(StatisticExtRelationId,
							 obix_copy_row(STATEXTOID, member->objectId),
							 obix_copy_row(STATEXTOID, twin),
							 columns, lengthof(columns), InvalidOid, 0);
	}
	if (OidIsValid(toast) && OidIsValid(copy_toast))
		take_over_relation(toast, copy_toast);
	CommandCounterIncrement();
}

/* Make an index, and the constraint that it may be there for. */
static void
copy_index(Oid index, const char *schema, const char *table,
		   const AttrMap *map)
{
	Relation	rel = index_open(index, AccessShareLock);
	RangeVar   *range = makeRangeVar(pstrdup(schema), pstrdup(table), -1);
	IndexStmt  *statement = generateClonedIndexStmt(range, rel, map, NULL);
	PlannedStmt *planned = makeNode(PlannedStmt);

	statement->idxname = pstrdup(RelationGetRelationName(rel));
	planned->commandType = CMD_UTILITY;
	planned->utilityStmt = (Node *) statement;
	planned->stmt_location = -1;
	ProcessUtility(planned, "CREATE INDEX", false, PROCESS_UTILITY_SUBCOMMAND,
				   NULL, NULL, None_Receiver, NULL);
	CommandCounterIncrement();
	index_close(rel, NoLock);
}

/* Make a column of the copy an identity column. */
static void
copy_identity(Oid sequence, const char *schema, const char *quoted)
{
	Oid			relid;
	int32		attnum;
	HeapTuple	tuple;
	Form_pg_attribute form;

	if (!sequenceIsOwned(sequence, DEPENDENCY_INTERNAL, &relid, &attnum))
		elog(ERROR, "could not find column of sequence %u", sequence);
	tuple = SearchSysCacheCopy2(ATTNUM, ObjectIdGetDatum(relid),
								Int16GetDatum(attnum));
	form = (Form_pg_attribute) GETSTRUCT(tuple);
	obix_execute("ALTER TABLE %s ALTER COLUMN %s ADD GENERATED %s AS IDENTITY"
				 " (SEQUENCE NAME %s %s)",
				 quoted, quote_identifier(NameStr(form->attname)),
				 form->attidentity == ATTRIBUTE_IDENTITY_ALWAYS ?
				 "ALWAYS" : "BY DEFAULT",
				 quote_qualified_identifier(schema, get_rel_name(sequence)),
				 sequence_text(sequence));
}

/* Make a statistics object. */
static void
copy_statistics(Oid statistics, Oid relid, const char *schema,
				const char *quoted)
{
	Form_pg_statistic_ext form = ROW(pg_statistic_ext, STATEXTOID, statistics);
	char	   *namespace = get_namespace_name(form->stxnamespace);
	char	   *name = NameStr(form->stxname);
	char	   *definition = pg_get_statisticsobjdef_string(statistics);
	char	   *before = psprintf("CREATE STATISTICS %s ",
								  quote_qualified_identifier(namespace, name));
	char	   *after = psprintf(" FROM %s", obix_quote_relation(relid));
	int			length = strlen(definition) - strlen(before) - strlen(after);

	if (length < 0 || strncmp(definition, before, strlen(before)) != 0 ||
		strcmp(definition + strlen(before) + length, after) != 0)
		elog(ERROR, "unexpected statistics definition: %s", definition);
	obix_execute("CREATE STATISTICS %s %.*s FROM %s",
				 quote_qualified_identifier(schema, name),
				 length, definition + strlen(before), quoted);
}

/* Make an empty copy of a table in a schema. */
static void
copy_table(Oid relid, const char *schema, Oid schema_owner)
{
	Relation	rel = relation_open(relid, NoLock);
	TupleDesc	desc = RelationGetDescr(rel);
	Form_pg_class form = rel->rd_rel;
	const char *name = RelationGetRelationName(rel);
	char	   *quoted = quote_qualified_identifier(schema, name);
	const char *owner = GetUserNameFromId(form->relowner, false);
	AttrMap    *map = make_attrmap(desc->natts);
	int			n = 0;
	List	   *members = obix_find_members(rel);
	ListCell   *cell;
	ObixIdentity saved;

	/* LIKE leaves dropped columns out */
	for (int i = 0; i < desc->natts; i++)
		map->attnums[i] = TupleDescAttr(desc, i)->attisdropped ? 0 : ++n;

	if (form->relowner != schema_owner)
		obix_execute("GRANT USAGE, CREATE ON SCHEMA %s TO %s",
					 quote_identifier(schema), quote_identifier(owner));
	obix_become_owner(rel, &saved);
	obix_execute("CREATE %sTABLE %s (LIKE %s INCLUDING DEFAULTS"
				 " INCLUDING GENERATED INCLUDING CONSTRAINTS"
				 " INCLUDING STORAGE INCLUDING COMPRESSION) USING %s%s%s",
				 form->relpersistence == RELPERSISTENCE_UNLOGGED ?
				 "UNLOGGED " : "",
				 quoted, obix_quote_relation(relid),
				 quote_identifier(get_am_name(form->relam)),
				 OidIsValid(form->reltablespace) ? " TABLESPACE " : "",
				 OidIsValid(form->reltablespace) ?
				 quote_identifier(get_tablespace_name(form->reltablespace)) :
				 "");
	if (OidIsValid(form->reloftype))
		obix_execute("ALTER TABLE %s OF %s", quoted,
					 format_type_be_qualified(form->reloftype));

	foreach(cell, members)
	{
		ObjectAddress *member = lfirst(cell);
		Oid			object = member->objectId;

		if (member->classId == StatisticExtRelationId)
			copy_statistics(object, relid, schema, quoted);
		else if (member->classId == ConstraintRelationId &&
				 ROW(pg_constraint, CONSTROID, object)->contype ==
				 CONSTRAINT_FOREIGN)
			obix_execute("ALTER TABLE %s ADD CONSTRAINT %s %s", quoted,
						 quote_identifier(obix_member_name(member)),
						 constraint_text(object));
		else if (member->classId != RelationRelationId)
			continue;
		else if (get_rel_relkind(object) == RELKIND_SEQUENCE)
			copy_identity(object, schema, quoted);
		else if (is_own_index(object, relid))
		{
			Form_pg_index index = ROW(pg_index, INDEXRELID, object);
			const char *index_name = quote_identifier(obix_member_name(member));

			copy_index(object, schema, name, map);
			if (index->indisclustered)
				obix_execute("ALTER TABLE %s CLUSTER ON %s",
							 quoted, index_name);
			if (index->indisreplident)
				obix_execute("ALTER TABLE %s REPLICA IDENTITY USING INDEX %s",
							 quoted, index_name);
		}
	}
	if (form->relreplident == REPLICA_IDENTITY_FULL)
		obix_execute("ALTER TABLE %s REPLICA IDENTITY FULL", quoted);
	else if (form->relreplident == REPLICA_IDENTITY_NOTHING)
		obix_execute("ALTER TABLE %s REPLICA IDENTITY NOTHING", quoted);

	take_over(relid, get_relname_relid(name, get_namespace_oid(schema, false)),
			  members);
	obix_become_self(&saved);
	relation_close(rel, NoLock);
}

/*
 * Make empty copies of tables in a new schema, which will belong to the owner
 * of a consumer.  The current user must be able to create it.
 */
void
obix_make_shadow(const char *schema, List *relids, Oid owner)
{
	ListCell   *cell;

	obix_check_swappable(relids, owner);
	if (OidIsValid(get_namespace_oid(schema, true)))
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_SCHEMA),
				 errmsg("schema \"%s\" already exists", schema),
				 errdetail("The tables of the rebuild would be made in it."),
				 errhint("Drop or rename it.")));
	obix_execute("CREATE SCHEMA %s AUTHORIZATION %s", quote_identifier(schema),
				 quote_identifier(GetUserNameFromId(owner, false)));
	foreach(cell, relids)
		copy_table(lfirst_oid(cell), schema, owner);

	/* a copy may depend on its original, by a default that names it */
	obix_check_swappable(relids, owner);
}

/* The copy of a table, InvalidOid if either is gone. */
static Oid
find_copy(Oid relid, Oid shadow)
{
	char	   *name = get_rel_name(relid);

	return name == NULL ? InvalidOid : get_relname_relid(name, shadow);
}

/*
 * Lock tables, their copies, and those that their foreign keys refer to, since
 * dropping a foreign key takes triggers from these: all in one order.
 */
static void
lock_tables(List *relids, List *copies)
{
	List	   *locks = list_concat_unique_oid(list_copy(relids), copies);
	ListCell   *cell;

	foreach(cell, relids)
	{
		ListCell   *c;

		foreach(c, obix_list_rows(ConstraintRelationId,
								  ConstraintRelidTypidNameIndexId,
								  Anum_pg_constraint_conrelid, lfirst_oid(cell),
								  InvalidAttrNumber, InvalidOid))
		{
			Form_pg_constraint constraint = lfirst(c);

			locks = list_append_unique_oid(locks, constraint->confrelid);
		}
	}
	list_sort(locks, list_oid_cmp);
	foreach(cell, locks)
	{
		if (OidIsValid(lfirst_oid(cell)))
			LockRelationOid(lfirst_oid(cell), AccessExclusiveLock);
	}
}

/* The name of the type of arrays of a table's rows. */
static char *
array_name(Oid relid)
{
	return NameStr(ROW(pg_type, TYPEOID,
					   get_array_type(get_rel_type_id(relid)))->typname);
}

/*
 * Drop a table and move its copy into its place, if it is still one.  Both are
 * locked, and nothing stands in the way.
 */
static void
swap_table(Oid relid, Oid copy, Oid shadow)
{
	static const AttrNumber columns[] = {Anum_pg_statistic_ext_stxnamespace};
	Relation	rel = table_open(relid, NoLock);
	Relation	copied = relation_open(copy, NoLock);
	Oid			schema = RelationGetNamespace(rel);
	List	   *members = obix_find_members(rel);
	char	   *array = array_name(relid);
	List	   *statistics = NIL;
	List	   *old;
	List	   *new;
	ObixIdentity saved;
	ListCell   *cell;

	/* nobody drops the schema while the copy is on its way */
	LockDatabaseObject(NamespaceRelationId, schema, 0, AccessShareLock);

	obix_become_owner(rel, &saved);
	old = describe_table(rel, members);
	new = describe_table(copied, obix_check_table(copied));
	old = list_concat(list_difference(old, new), list_difference(new, old));
	if (old != NIL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" was changed while it was rebuilt",
						RelationGetRelationName(rel)),
				 errdetail("The table and its copy do not both have this: %s.",
						   strVal(linitial(old))),
				 errhint("Use obix.cancel_rebuild and begin anew.")));

	take_over(relid, copy, members);
	foreach(cell, members)
	{
		ObjectAddress *member = lfirst(cell);
		Oid			twin;

		if (member->classId != StatisticExtRelationId)
			continue;
		twin = find_twin(member, relid, copy);
		statistics = lappend(statistics,
							 obix_copy_row(STATEXTOID, member->objectId));
		statistics = lappend(statistics, obix_copy_row(STATEXTOID, twin));
	}
	table_close(rel, NoLock);
	obix_execute("DROP TABLE %s RESTRICT", obix_quote_relation(relid));

	/* differs where the schema has a table of this name and an underscore */
	if (strcmp(array, array_name(copy)) != 0)
	{
		RenameTypeInternal(get_array_type(get_rel_type_id(copy)), array,
						   shadow);
		CommandCounterIncrement();
	}
	AlterTableNamespaceInternal(copied, shadow, schema,
								new_object_addresses());
	for (int i = 0; i < list_length(statistics); i += 2)
	{
		HeapTuple	from = list_nth(statistics, i);
		HeapTuple	to = list_nth(statistics, i + 1);
		Form_pg_statistic_ext form = (Form_pg_statistic_ext) GETSTRUCT(from);
		Oid			twin = ((Form_pg_statistic_ext) GETSTRUCT(to))->oid;

		take_over_values(StatisticExtRelationId, from, to, columns,
						 lengthof(columns), InvalidOid, 0);
		changeDependencyFor(StatisticExtRelationId, twin,
							NamespaceRelationId, shadow, form->stxnamespace);
	}
	relation_close(copied, NoLock);
	CommandCounterIncrement();
	obix_become_self(&saved);
}

/*
 * Swap tables for their copies and drop the schema of these, for a consumer that
 * belongs to owner.  Returns the new oids in the order of the old.  Waits for
 * each lock as long as lock_timeout says, and then does nothing that takes time.
 */
List *
obix_swap_shadow(const char *schema, List *relids, Oid owner)
{
	Oid			shadow = get_namespace_oid(schema, false);
	List	   *copies = NIL;
	ListCell   *cell;
	ListCell   *c;

	foreach(cell, relids)
		copies = lappend_oid(copies, find_copy(lfirst_oid(cell), shadow));
	lock_tables(relids, copies);
	obix_check_swappable(relids, owner);
	forboth(cell, relids, c, copies)
	{
		Oid			relid = lfirst_oid(cell);
		Oid			copy = lfirst_oid(c);

		/* now that it is locked, is it still that? */
		if (!OidIsValid(copy) || copy != find_copy(relid, shadow))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("table \"%s\" was changed while it was rebuilt",
							get_rel_name(relid)),
					 errdetail("Schema \"%s\" has no table of this name.",
							   schema),
					 errhint("Use obix.cancel_rebuild and begin anew.")));
		swap_table(relid, copy, shadow);
	}
	obix_execute("DROP SCHEMA %s RESTRICT", quote_identifier(schema));
	return copies;
}

/* Drop the schema of a rebuild and whatever is in it, if it exists. */
void
obix_drop_shadow(const char *schema)
{
	int			nestlevel = NewGUCNestLevel();

	/* no notices of what goes with it */
	(void) set_config_option("client_min_messages", "warning", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	if (OidIsValid(get_namespace_oid(schema, true)))
		obix_execute("DROP SCHEMA %s CASCADE", quote_identifier(schema));
	AtEOXact_GUC(false, nestlevel);
}
