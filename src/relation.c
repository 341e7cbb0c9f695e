/*-------------------------------------------------------------------------
 *
 * relation.c
 *	  Opening an outbox: what it must look like, and attaching to its state.
 *
 * An outbox is an ordinary partitioned table, so its owner may do to it what
 * ALTER TABLE can do.  What a direct insertion could not honour is therefore
 * looked for here, once after every change of the relation, and refused by
 * name.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/indexing.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_class.h"
#include "catalog/pg_rewrite.h"
#include "catalog/pg_subscription_rel.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "rewrite/prs2lock.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/partcache.h"
#include "utils/rls.h"

#include "bounds.h"
#include "compat.h"
#include "obix.h"
#include "registry.h"
#include "relation.h"
#include "work.h"
#include "xact.h"

static HTAB *relations = NULL;	/* of ObixRelation */

/* Relation cache callback: forget what may have changed.  Raises nothing. */
static void
forget_relation(Datum arg, Oid relid)
{
	HASH_SEQ_STATUS status;
	ObixRelation *known;

	if (relations == NULL)
		return;
	if (OidIsValid(relid))
	{
		known = hash_search(relations, &relid, HASH_FIND, NULL);
		if (known != NULL)
			known->valid = known->attached = known->publishable = false;
		return;
	}
	hash_seq_init(&status, relations);
	while ((known = hash_seq_search(&status)) != NULL)
		known->valid = known->attached = known->publishable = false;
}

void
obix_relation_init(void)
{
	CacheRegisterRelcacheCallback(forget_relation, (Datum) 0);
}

/*
 * What this session knows of a relation if nothing has changed since it
 * looked, else NULL.  Takes no lock.
 */
ObixRelation *
obix_remember(Oid relid)
{
	ObixRelation *known;

	if (relations == NULL)
		return NULL;
	AcceptInvalidationMessages();
	known = hash_search(relations, &relid, HASH_FIND, NULL);
	return known != NULL && known->valid ? known : NULL;
}

/*
 * Is a relation partitioned as obix does it?  That never changes, but a row of
 * the registry that was written by hand can name any relation, so can who adopts
 * one, and looking for a leaf relies on it.
 */
bool
obix_is_partitioned(Relation parent)
{
	PartitionKey key;

	if (parent->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		return false;
	key = RelationGetPartitionKey(parent);
	return get_partition_strategy(key) == PARTITION_STRATEGY_RANGE &&
		get_partition_natts(key) == 1 &&
		get_partition_col_attnum(key, 0) == Anum_event_sequence &&
		get_partition_col_typid(key, 0) == INT8OID;
}

/*
 * What is known of a relation that the caller has open, looked up anew if it
 * has changed; NULL if it is no outbox.
 */
ObixRelation *
obix_get_relation(Relation parent)
{
	Oid			relid = RelationGetRelid(parent);
	ObixRelation *known;
	ObixRegistryRow row;
	bool		found;

	if (relations == NULL)
	{
		HASHCTL		ctl;

		ctl.keysize = sizeof(Oid);
		ctl.entrysize = sizeof(ObixRelation);
		relations = hash_create("obix relations", 16, &ctl,
								HASH_ELEM | HASH_BLOBS);
	}

	known = hash_search(relations, &relid, HASH_FIND, NULL);
	if (known != NULL && known->valid)
		return known;

	if (!obix_is_partitioned(parent) ||
		!obix_registry_find(relid, &row))
		return NULL;

	known = hash_search(relations, &relid, HASH_ENTER, &found);
	known->id = row.id;
	known->attached = false;
	known->publishable = false;
	known->valid = true;
	return known;
}

/*
 * Open an outbox.  Returns NULL if the relation does not exist, or is none.
 */
Relation
obix_try_open(Oid relid, LOCKMODE lockmode, ObixRelation **known)
{
	Relation	parent;

	obix_require_preload();
	parent = try_relation_open(relid, lockmode);	/* it can be an index */
	if (parent == NULL)
		return NULL;
	*known = obix_get_relation(parent);
	if (*known != NULL)
		return parent;
	relation_close(parent, lockmode);
	return NULL;
}

/* The same for those who cannot do without. */
Relation
obix_open(Oid relid, LOCKMODE lockmode, ObixRelation **known)
{
	Relation	parent = obix_try_open(relid, lockmode, known);
	char	   *name;
	bool		restored;

	if (parent != NULL)
		return parent;
	name = get_rel_name(relid);
	if (name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("outbox with OID %u does not exist", relid)));
	parent = try_relation_open(relid, lockmode);
	restored = parent != NULL && !parent->rd_rel->relispartition &&
		obix_has_guard(parent);
	ereport(ERROR,
			(errcode(ERRCODE_WRONG_OBJECT_TYPE),
			 errmsg("\"%s\" is not an outbox", name),
			 errdetail("The table obix.outbox of this database does not list it."),
			 restored ?
			 errhint("Use obix.adopt_outbox if it was restored without its row there.") :
			 errhint("Use obix.create_outbox to create an outbox.")));
	return NULL;				/* keep compiler quiet */
}

/*
 * Open an outbox in order to read it.  Returns NULL if a standby does not get
 * the lock.
 */
Relation
obix_open_to_read(Oid relid, ObixRelation **known)
{
	return obix_lock_to_read(relid) ? obix_open(relid, NoLock, known) : NULL;
}

/* The same for who can do without: also if it does not exist, or is none. */
Relation
obix_try_open_to_read(Oid relid, ObixRelation **known)
{
	Relation	parent;

	if (!obix_lock_to_read(relid))
		return NULL;
	parent = obix_try_open(relid, NoLock, known);
	if (parent == NULL)
		UnlockRelationOid(relid, AccessShareLock);
	return parent;
}

/*
 * Open an outbox for maintenance under one of its mutexes, and read its
 * registry row.  From here on locks are waited for only as long as publishers
 * may have to wait behind us.  Returns NULL where there is nothing to do: obix
 * is disabled, the outbox was dropped, or is not complete.
 */
Relation
obix_open_to_maintain(Oid relid, ObixMutex mutex, LOCKMODE lockmode,
					  ObixRegistryRow *row, ObixRelation **known)
{
	Relation	parent;

	if (!obix_enabled || !obix_keep_extension() ||
		!obix_registry_find(relid, row))
		return NULL;
	obix_lock_mutex(row->id, mutex);
	obix_limit_lock_waits();
	parent = obix_try_open(relid, lockmode, known);
	if (parent == NULL)
		return NULL;
	if (obix_why_not_ready(parent) != NULL)
	{
		table_close(parent, NoLock);
		return NULL;
	}
	if (!obix_registry_find(relid, row))
		elog(ERROR, "could not find registry row of outbox %u", relid);
	return parent;
}

/*
 * Free the shared state of an outbox of this database that is gone without our
 * having seen it go: by COMMIT PREPARED, which runs no hook, for instance.  One
 * that is just being created looks the same, but is locked.
 */
void
obix_forget_dropped(Oid relid)
{
	ObixRegistryRow row;

	if (!OidIsValid(relid) || obix_registry_find(relid, &row) ||
		!ConditionalLockRelationOid(relid, AccessExclusiveLock))
		return;
	if (!obix_registry_find(relid, &row))
		obix_free_outboxes(MyDatabaseId, relid);
	UnlockRelationOid(relid, AccessExclusiveLock);
}

/*
 * The shared state of an outbox, made on first use: the head is the highest
 * row of the table, including those of prepared transactions, or the resolved
 * position where that is higher; every sequence in between may be a hole.  The
 * pointer is good while the caller holds its lock on the parent.
 *
 * Returns NULL where there is none and none can be made: during recovery, while
 * obix is disabled or the outbox is not complete, and where room is lacking.
 */
ObixOutbox *
obix_try_attach(Relation parent, ObixRelation *known)
{
	Oid			relid = RelationGetRelid(parent);
	ObixOutbox *shared = known->shared;
	ObixRegistryRow row;
	ObixPosition position;
	int64		newest;

	if (known->attached && shared->relation == relid &&
		shared->id == known->id && shared->database == MyDatabaseId)
		return shared;

	if (RecoveryInProgress() || obix_why_not_ready(parent) != NULL)
		return NULL;
	shared = obix_find_outbox(relid, known->id);
	if (shared != NULL)
	{
		/* the relation has changed: perhaps its guard was disabled */
		do
		{
			obix_get_position(shared, relid, known->id, &position);
		} while (!obix_raise_head(shared, obix_newest_row(parent),
								  position.rewinds));
	}
	else
	{
		if (!obix_enabled)
			return NULL;
		newest = obix_newest_row(parent);
		if (!obix_registry_find(relid, &row))
			elog(ERROR, "could not find registry row of outbox %u", relid);
		shared = obix_make_outbox(relid, row.id, Max(newest, row.resolved),
								  row.resolved);
		if (shared == NULL)
		{
			for (int i = 0; i < obix_max_outboxes; i++)
				obix_forget_dropped(obix_outbox_relid(obix_nth_outbox(i)));
			shared = obix_make_outbox(relid, row.id, Max(newest, row.resolved),
									  row.resolved);
		}
		if (shared == NULL)
			return NULL;
		if (parent->rd_createSubid != InvalidSubTransactionId)
			obix_xact_created(relid);
	}
	known->shared = shared;
	known->attached = true;
	return shared;
}

/* The same for those who cannot do without: errors out where it is NULL. */
ObixOutbox *
obix_attach(Relation parent, ObixRelation *known)
{
	ObixOutbox *shared = obix_try_attach(parent, known);

	if (shared != NULL)
		return shared;

	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot use the shared state of outbox \"%s\" during recovery",
						RelationGetRelationName(parent))));
	obix_check_ready(parent);
	obix_check_enabled(NULL);
	ereport(ERROR,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("too many outboxes are in use"),
			 errdetail("Shared memory has room for %d outboxes in all databases together.",
					   obix_max_outboxes),
			 errhint("Raise obix.max_outboxes and restart the server.")));
	return NULL;				/* keep compiler quiet */
}

/* Has a table the trigger of an outbox, enabled or not? */
bool
obix_has_guard(Relation parent)
{
	Oid			guard = obix_guard_oid();
	TriggerDesc *triggers = parent->trigdesc;

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		if (triggers->triggers[i].tgfoid == guard)
			return true;
	}
	return false;
}

/*
 * What an outbox lacks, NULL if nothing.  pg_dump makes the primary key after
 * the data and the triggers last, so what a restore has not finished is not
 * touched.
 */
const char *
obix_why_not_ready(Relation parent)
{
	Oid			guard = obix_guard_oid();
	TriggerDesc *triggers;

	if (!OidIsValid(obix_primary_key(parent)))
		return "valid primary key on the sequence";

	triggers = parent->trigdesc;	/* good until the catalogs are looked at */
	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		if (triggers->triggers[i].tgfoid == guard &&
			triggers->triggers[i].tgenabled != TRIGGER_DISABLED)
			return NULL;
	}
	return "enabled trigger " OBIX_GUARD_NAME;
}

/* Error out if an outbox lacks something. */
void
obix_check_ready(Relation parent)
{
	const char *why = obix_why_not_ready(parent);

	if (why != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("outbox \"%s\" is not complete",
						RelationGetRelationName(parent)),
				 errdetail("It has no %s.", why),
				 errhint("If it is being restored, wait for the end; otherwise restore what it lacks.")));
}

/*
 * Error out where a function that writes to outboxes, or changes them, cannot
 * be used.
 */
void
obix_check_writable(const char *function)
{
	obix_require_preload();
	PreventCommandDuringRecovery(function);
	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
}

/* The same for one that needs obix to be enabled; NULL if that is all. */
void
obix_check_enabled(const char *function)
{
	if (function != NULL)
		obix_check_writable(function);
	if (!obix_enabled)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("obix is disabled"),
				 errdetail("Events are taken from a restore only while obix.enabled is off."),
				 errhint("Set obix.enabled to on.")));
}

static char *
rule_name(Oid rule)
{
	ObjectAddress address;

	ObjectAddressSet(address, RewriteRelationId, rule);
	return getObjectDescription(&address, false);
}

/*
 * Error out if rows cannot be inserted directly into this relation, an outbox
 * or a partition of one: name what would be passed over.  CHECK and NOT NULL
 * are honoured.
 */
void
obix_check_insertable(Relation rel)
{
	Oid			guard = obix_guard_oid();
	TupleDesc	desc;
	TriggerDesc *triggers;

	obix_check_columns(rel);
	desc = RelationGetDescr(rel);
	triggers = rel->trigdesc;	/* good until the catalogs are looked at */
	if (desc->natts > Natts_event)
	{
		Form_pg_attribute column = TupleDescAttr(desc, Natts_event);

		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot publish to outbox \"%s\" because of its column \"%s\"",
						RelationGetRelationName(rel),
						column->attisdropped ? "(dropped)" : NameStr(column->attname)),
				 errdetail("An outbox to which obix.publish writes has the columns of obix.event, and never had others."),
				 errhint("Put further data into payload or headers, or use INSERT.")));
	}

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		Trigger    *trigger = &triggers->triggers[i];

		if (trigger->tgfoid == guard ||
			!TRIGGER_FOR_INSERT(trigger->tgtype) ||
			trigger->tgenabled == TRIGGER_DISABLED)
			continue;
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot publish to outbox \"%s\" because of its %s \"%s\"",
						RelationGetRelationName(rel),
						OidIsValid(trigger->tgconstraint) ? "constraint" : "trigger",
						OidIsValid(trigger->tgconstraint) ?
						get_constraint_name(trigger->tgconstraint) : trigger->tgname),
				 errdetail("Events are inserted at commit, when no trigger can fire any more."),
				 errhint("Drop it, or use INSERT.")));
	}

	if (rel->rd_rules != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot publish to outbox \"%s\" because of its %s",
						RelationGetRelationName(rel),
						rule_name(rel->rd_rules->rules[0]->ruleId)),
				 errdetail("Events are inserted directly, past the rewriter."),
				 errhint("Drop it, or use INSERT.")));
}

/*
 * Does a subscription write to this table?  copied, if given: whether it has
 * got what had been there before.
 */
bool
obix_is_subscribed(Oid relid, bool *copied)
{
	Relation	catalog = table_open(SubscriptionRelRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	if (copied != NULL)
		*copied = true;
	ScanKeyInit(&key, Anum_pg_subscription_rel_srrelid,
				BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(relid));
	scan = systable_beginscan(catalog, SubscriptionRelSrrelidSrsubidIndexId,
							  true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		char		state = ((Form_pg_subscription_rel) GETSTRUCT(tuple))->srsubstate;

		found = true;
		if (copied != NULL && state != SUBREL_STATE_SYNCDONE &&
			state != SUBREL_STATE_READY)
			*copied = false;
	}
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return found;
}

/* Does a subscription write to an outbox, or to one of its partitions? */
bool
obix_subscribes(Relation parent, bool *copied)
{
	ObixLeaf	leaf;

	if (obix_is_subscribed(RelationGetRelid(parent), copied))
		return true;
	obix_find_leaf(parent, PG_INT64_MIN, &leaf);
	do
	{
		if (OidIsValid(leaf.relid) && obix_is_subscribed(leaf.relid, copied))
			return true;
	} while (obix_next_leaf(parent, &leaf));
	return false;
}

/* Error out unless the user has a table privilege on an outbox. */
void
obix_check_privilege(Oid relid, AclMode mode)
{
	AclResult	result = pg_class_aclcheck(relid, GetUserId(), mode);

	if (result != ACLCHECK_OK)
		aclcheck_error(result, OBJECT_TABLE, get_rel_name(relid));
}

/* Error out unless the user owns an outbox. */
void
obix_check_owner(Oid relid)
{
	if (get_rel_name(relid) == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("outbox with OID %u does not exist", relid)));
	if (!object_ownercheck(RelationRelationId, relid, GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER, OBJECT_TABLE, get_rel_name(relid));
}

/* May a role SELECT from an outbox?  Nobody may from one that is gone. */
bool
obix_may_select(Oid relid, Oid role)
{
	bool		gone = false;

	return pg_class_aclcheck_ext(relid, role, ACL_SELECT, &gone) == ACLCHECK_OK;
}

/* May a role read all of an outbox? */
bool
obix_may_read(Oid relid, Oid role)
{
	return obix_may_select(relid, role) &&
		check_enable_rls(relid, role, true) != RLS_ENABLED;
}

/*
 * Error out if row-level security applies to the user: a function that does
 * not go through the rewriter can only pass over policies or refuse.
 */
void
obix_check_row_security(Oid relid, const char *function)
{
	if (check_enable_rls(relid, InvalidOid, false) == RLS_ENABLED)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot use %s on outbox \"%s\" because of row-level security",
						function, get_rel_name(relid)),
				 errdetail("Its policies apply to this role, and %s cannot honour them.",
						   function),
				 errhint("Use plain SQL on the table, or a role to which no policy applies.")));
}

/*
 * Act as the owner of an outbox, as CREATE INDEX and VACUUM do: whatever runs
 * on behalf of the table has its owner's rights only, finds nothing by way of
 * a search_path, and cannot change that.  An error restores the identity by
 * itself.
 */
void
obix_become_owner(Relation parent, ObixIdentity *saved)
{
	GetUserIdAndSecContext(&saved->userid, &saved->sec_context);
	SetUserIdAndSecContext(parent->rd_rel->relowner,
						   saved->sec_context | SECURITY_RESTRICTED_OPERATION);
	saved->nestlevel = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
	(void) set_config_option("default_tablespace", "",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
}

void
obix_become_self(const ObixIdentity *saved)
{
	AtEOXact_GUC(false, saved->nestlevel);
	SetUserIdAndSecContext(saved->userid, saved->sec_context);
}
