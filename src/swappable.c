/*-------------------------------------------------------------------------
 *
 * swappable.c
 *	  What belongs to a table, and what is in the way of replacing it.
 *
 * A table is more than its row in pg_class: its members are the indexes,
 * constraints, defaults, identity sequences, statistics and types that go when
 * it is dropped.  They are found by their dependencies.  Anything else that
 * depends on the table or a member would be in the way of dropping it, or be
 * lost with it; then the table is refused, and that is named.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/transam.h"
#include "catalog/dependency.h"
#include "catalog/index.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_attrdef.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_publication.h"
#include "catalog/pg_seclabel.h"
#include "catalog/pg_sequence.h"
#include "catalog/pg_statistic_ext.h"
#include "catalog/pg_subscription.h"
#include "catalog/pg_subscription_rel.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "compat.h"
#include "registry.h"
#include "relation.h"
#include "swappable.h"

HeapTuple
obix_copy_row(int cache, Oid object)
{
	HeapTuple	tuple = SearchSysCacheCopy1(cache, ObjectIdGetDatum(object));

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for object %u", object);
	return tuple;
}

/* Copies of the rows of a catalog that one or two oids lead to. */
List *
obix_list_rows(Oid catalog, Oid index, AttrNumber column1, Oid value1,
			   AttrNumber column2, Oid value2)
{
	Relation	rel = table_open(catalog, AccessShareLock);
	List	   *rows = NIL;
	ScanKeyData key[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key[0], column1, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(value1));
	ScanKeyInit(&key[1], column2, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(value2));
	scan = systable_beginscan(rel, index, true, NULL,
							  OidIsValid(value2) ? 2 : 1, key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
		rows = lappend(rows, GETSTRUCT(heap_copytuple(tuple)));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return rows;
}

static char *
describe_object(Oid class, Oid object, int32 sub)
{
	ObjectAddress address;

	ObjectAddressSubSet(address, class, object, sub);
	return getObjectDescription(&address, false);
}

/* Refuse a table: why is a sentence. */
static void
refuse(Relation rel, int sqlerrcode, const char *why, const char *hint)
{
	ereport(ERROR,
			(errcode(sqlerrcode),
			 errmsg("cannot rebuild table \"%s\"",
					RelationGetRelationName(rel)),
			 errdetail_internal("%s", why),
			 errhint("%s", hint != NULL ? hint :
					 "Remove what is in the way, or take the table out of the tables of the consumer.")));
}

/* Refuse a table because of a dependency. */
static void
refuse_dependency(Relation rel, Form_pg_depend depend)
{
	bool		serial = depend->classid == RelationRelationId &&
		get_rel_relkind(depend->objid) == RELKIND_SEQUENCE;

	refuse(rel, ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
		   psprintf("%s depends on %s.",
					describe_object(depend->classid, depend->objid,
									depend->objsubid),
					describe_object(depend->refclassid, depend->refobjid,
									depend->refobjsubid)),
		   serial ? "Make the column an identity column instead." : NULL);
}

static List *
add_member(List *members, Oid class, Oid object)
{
	ObjectAddress *member = palloc(sizeof(ObjectAddress));

	ObjectAddressSet(*member, class, object);
	return lappend(members, member);
}

static bool
is_member(List *members, Oid class, Oid object)
{
	ListCell   *cell;

	foreach(cell, members)
	{
		ObjectAddress *member = lfirst(cell);

		if (member->classId == class && member->objectId == object)
			return true;
	}
	return false;
}

static int
compare_members(const ListCell *a, const ListCell *b)
{
	Oid			x = ((ObjectAddress *) lfirst(a))->objectId;
	Oid			y = ((ObjectAddress *) lfirst(b))->objectId;

	return x < y ? -1 : x > y;
}

/* Does what depends on a member of a table belong to that table? */
static bool
belongs(Form_pg_depend depend, Oid relid, List *members)
{
	Form_pg_constraint constraint;

	if (depend->deptype == DEPENDENCY_INTERNAL)
		return true;
	switch (depend->classid)
	{
		case RelationRelationId:
			/* a generated column, or an index */
			return depend->objid == relid ||
				(get_rel_relkind(depend->objid) == RELKIND_INDEX &&
				 is_member(members, RelationRelationId,
						   IndexGetRelation(depend->objid, false)));
		case AttrDefaultRelationId:
			return relid ==
				GetAttrDefaultColumnAddress(depend->objid).objectId;
		case ConstraintRelationId:
			constraint = ROW(pg_constraint, CONSTROID, depend->objid);
			return constraint->conrelid == relid &&
				constraint->confrelid != relid &&
				constraint->contype != CONSTRAINT_TRIGGER;
		case StatisticExtRelationId:
			return relid ==
				ROW(pg_statistic_ext, STATEXTOID, depend->objid)->stxrelid;
	}
	return false;
}

/*
 * The members of a table, itself among them, in the order of their oids: a
 * list of ObjectAddress.  Errors out if anything else depends on one of them,
 * if one of them belongs to an extension, or the table to a parent.
 */
List *
obix_find_members(Relation rel)
{
	Oid			relid = RelationGetRelid(rel);
	List	   *members = add_member(NIL, RelationRelationId, relid);

	/* the list grows while we go through it */
	for (int i = 0; i < list_length(members); i++)
	{
		ObjectAddress *member = list_nth(members, i);
		ListCell   *cell;

		foreach(cell, obix_list_rows(DependRelationId, DependDependerIndexId,
									 Anum_pg_depend_classid, member->classId,
									 Anum_pg_depend_objid, member->objectId))
		{
			Form_pg_depend depend = lfirst(cell);

			if (depend->refclassid == ExtensionRelationId ||
				(i == 0 && depend->refclassid == RelationRelationId &&
				 depend->refobjid != relid))
				refuse_dependency(rel, depend);
		}
		foreach(cell, obix_list_rows(DependRelationId, DependReferenceIndexId,
									 Anum_pg_depend_refclassid, member->classId,
									 Anum_pg_depend_refobjid, member->objectId))
		{
			Form_pg_depend depend = lfirst(cell);

			if (is_member(members, depend->classid, depend->objid))
				continue;
			if (!belongs(depend, relid, members))
				refuse_dependency(rel, depend);
			members = add_member(members, depend->classid, depend->objid);
		}
		if (obix_list_rows(SecLabelRelationId, SecLabelObjectIndexId,
						   Anum_pg_seclabel_objoid, member->objectId,
						   Anum_pg_seclabel_classoid, member->classId) != NIL)
			refuse(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
				   psprintf("There is a security label on %s.",
							describe_object(member->classId,
											member->objectId, 0)), NULL);
	}
	list_sort(members, compare_members);
	return members;
}

/* The members of a table; errors out if it cannot be swapped. */
List *
obix_check_table(Relation rel)
{
	Oid			relid = RelationGetRelid(rel);
	Form_pg_class form = rel->rd_rel;
	List	   *publications = GetSchemaPublications(form->relnamespace);
	List	   *subscriptions;
	ObixRegistryRow row;

	if (obix_registry_find(relid, &row))
		refuse(rel, ERRCODE_WRONG_OBJECT_TYPE, "It is an outbox.", NULL);
	if (form->relkind != RELKIND_RELATION)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("cannot rebuild relation \"%s\"",
						RelationGetRelationName(rel)),
				 errdetail_relkind_not_supported(form->relkind),
				 errhint("Take it out of the tables of the consumer.")));
	if (relid < FirstNormalObjectId)
		refuse(rel, ERRCODE_WRONG_OBJECT_TYPE,
			   "It is part of the system.", NULL);
	if (form->relpersistence == RELPERSISTENCE_TEMP)
		refuse(rel, ERRCODE_WRONG_OBJECT_TYPE,
			   "It is a temporary table.", NULL);
	if (form->relrowsecurity || form->relforcerowsecurity)
		refuse(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
			   "Row-level security is enabled for it.", NULL);
	if (publications != NIL)
		refuse(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
			   psprintf("Its schema is part of %s.",
						describe_object(PublicationRelationId,
										linitial_oid(publications), 0)), NULL);
	subscriptions = obix_list_rows(SubscriptionRelRelationId,
								   SubscriptionRelSrrelidSrsubidIndexId,
								   Anum_pg_subscription_rel_srrelid, relid,
								   InvalidAttrNumber, InvalidOid);
	if (subscriptions != NIL)
	{
		Form_pg_subscription_rel subscription = linitial(subscriptions);

		refuse(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
			   psprintf("It is part of %s.",
						describe_object(SubscriptionRelationId,
										subscription->srsubid, 0)), NULL);
	}
	return obix_find_members(rel);
}

/* The name of a member, NULL if it has none that its table does not give. */
char *
obix_member_name(const ObjectAddress *member)
{
	switch (member->classId)
	{
		case RelationRelationId:
			return get_rel_name(member->objectId);
		case ConstraintRelationId:
			return get_constraint_name(member->objectId);
		case StatisticExtRelationId:
			return NameStr(ROW(pg_statistic_ext, STATEXTOID,
							   member->objectId)->stxname);
	}
	return NULL;
}

/*
 * Error out if tables cannot be rebuilt together, for a consumer that belongs
 * to owner.  Locks them against being dropped or altered.
 */
void
obix_check_swappable(List *relids, Oid owner)
{
	List	   *seen = NIL;
	List	   *named = NIL;
	ListCell   *cell;

	foreach(cell, relids)
	{
		Oid			relid = lfirst_oid(cell);
		Relation	rel;
		ListCell   *m;

		if (list_member_oid(seen, relid))
			ereport(ERROR,
					(errcode(ERRCODE_DUPLICATE_TABLE),
					 errmsg("table \"%s\" is listed more than once",
							get_rel_name(relid))));
		seen = lappend_oid(seen, relid);
		if (get_rel_name(relid) != NULL &&
			!object_ownercheck(RelationRelationId, relid, owner))
			ereport(ERROR,
					(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					 errmsg("cannot rebuild table \"%s\"",
							get_rel_name(relid)),
					 errdetail("Role \"%s\", which owns the consumer, must have the privileges of the owner of the table.",
							   GetUserNameFromId(owner, false))));
		rel = try_relation_open(relid, AccessShareLock);
		if (rel == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_TABLE),
					 errmsg("table with OID %u does not exist", relid),
					 errhint("Set the tables of the consumer with obix.alter_consumer.")));

		foreach(m, obix_check_table(rel))
		{
			ObjectAddress *member = lfirst(m);
			ListCell   *o;

			/* constraints have no names of their own in a schema */
			if (obix_member_name(member) == NULL ||
				member->classId == ConstraintRelationId)
				continue;
			foreach(o, named)
			{
				ObjectAddress *other = lfirst(o);

				if (other->classId == member->classId &&
					strcmp(obix_member_name(other), obix_member_name(member)) == 0)
					refuse(rel, ERRCODE_DUPLICATE_OBJECT,
						   psprintf("%s and %s would meet in the schema of the rebuild.",
									describe_object(other->classId,
													other->objectId, 0),
									describe_object(member->classId,
													member->objectId, 0)),
						   "Rename one of them.");
			}
			named = lappend(named, member);
		}
		relation_close(rel, NoLock);
	}
}
