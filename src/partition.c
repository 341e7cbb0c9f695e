/*-------------------------------------------------------------------------
 *
 * partition.c
 *	  Making partitions ahead of the head.
 *
 * A partition is created by itself, with its index and trigger, before any lock
 * on the outbox is taken; attaching an empty table then costs a millisecond.
 *
 * Attaching needs DEFAULT locked exclusively.  A row that a running INSERT has
 * routed there by the bounds it began with would fail against the narrower
 * bounds of DEFAULT, so attaching must not happen under a statement that may
 * still reach the new range.  SHARE ROW EXCLUSIVE on the outbox excludes all of
 * them, and waits for open transactions that have drawn.  Prepared ones would
 * block that for ever, and run no statement any more: where only they are in
 * the way, and the new range is further off than a whole partition, SHARE
 * UPDATE EXCLUSIVE will do.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/heap.h"
#include "catalog/namespace.h"
#include "catalog/partition.h"
#include "catalog/pg_class.h"
#include "commands/defrem.h"
#include "commands/tablecmds.h"
#include "commands/tablespace.h"
#include "common/int.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "parser/parser.h"
#include "pgstat.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "bounds.h"
#include "compat.h"
#include "obix.h"
#include "partition.h"
#include "relation.h"
#include "work.h"

/* Partitions to attach under one lock, at most */
#define MAX_ATTACH		8

/*
 * A rush: so many partitions passed since the last look; partitions to keep
 * ready for it beyond premake, at most; and the time below which its speed is
 * not measured
 */
#define MIN_RUSH			2
#define MAX_RUSH			64
#define MIN_RUSH_SECONDS	0.05

/* Share of a second that making partitions may take in a rush */
#define RUSH_SHARE			5

/* The name of the constraint that spares DEFAULT a scan */
#define PROOF_NAME		"obix_proof"

/*
 * Run a utility statement.  Its text is made of keywords, numbers and quoted
 * identifiers only.
 */
void
obix_execute(const char *format,...)
{
	StringInfoData command;
	int			result;

	initStringInfo(&command);
	for (;;)
	{
		va_list		args;
		int			needed;

		va_start(args, format);
		needed = appendStringInfoVA(&command, format, args);
		va_end(args);
		if (needed == 0)
			break;
		enlargeStringInfo(&command, needed);
	}

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	result = SPI_execute(command.data, false, 0);
	if (result < 0)
		elog(ERROR, "SPI_execute failed: %s", SPI_result_code_string(result));
	SPI_finish();
	pfree(command.data);
}

/* The qualified and quoted name of a relation. */
char *
obix_quote_relation(Oid relid)
{
	char	   *name = get_rel_name(relid);

	if (name == NULL)
		elog(ERROR, "cache lookup failed for relation %u", relid);
	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relid)),
									  name);
}

/*
 * Can a table have this name?  It has a type of the same name, too, so somebody's
 * type can be in the way.
 */
static bool
is_free_name(const char *name, Oid namespace)
{
	return !OidIsValid(get_relname_relid(name, namespace)) &&
		!SearchSysCacheExists2(TYPENAMENSP, CStringGetDatum(name),
							   ObjectIdGetDatum(namespace));
}

/*
 * A name for a partition that is not in use: base_label, cut at a character
 * boundary where it would be too long, with a number where it is taken.
 */
char *
obix_free_name(const char *base, Oid namespace, const char *label)
{
	char	   *name = makeObjectName(base, NULL, label);

	for (int i = 1; !is_free_name(name, namespace); i++)
	{
		char	   *numbered = psprintf("%s_%d", label, i);

		pfree(name);
		name = makeObjectName(base, NULL, numbered);
		pfree(numbered);
	}
	return name;
}

/*
 * Create a table that can become a partition: like the outbox, with its
 * indexes and constraints, in its schema and tablespace.  The caller acts as
 * the owner.  Keeps no lock on the outbox, see obix_lock_outbox().
 */
Oid
obix_create_leaf(Oid parent, const char *name)
{
	Oid			namespace = get_rel_namespace(parent);
	Oid			tablespace = get_rel_tablespace(parent);
	char	   *quoted = quote_qualified_identifier(get_namespace_name(namespace),
													name);

	/*
	 * Rows are only added, so what is worth a vacuum is a number of new rows
	 * and not a share of the old ones: it sets visibility map and hint bits.
	 */
	obix_execute("CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING DEFAULTS"
				 " EXCLUDING IDENTITY EXCLUDING STATISTICS EXCLUDING COMMENTS)"
				 " WITH (autovacuum_vacuum_insert_threshold = 100000,"
				 " autovacuum_vacuum_insert_scale_factor = 0)%s%s",
				 quoted, obix_quote_relation(parent),
				 OidIsValid(tablespace) ? " TABLESPACE " : "",
				 OidIsValid(tablespace) ?
				 quote_identifier(get_tablespace_name(tablespace)) : "");
	UnlockRelationOid(parent, AccessShareLock); /* LIKE has kept it */
	obix_execute("CREATE TRIGGER %s BEFORE TRUNCATE ON %s"
				 " FOR EACH STATEMENT EXECUTE FUNCTION obix.guard_truncate()",
				 OBIX_TRUNCATE_NAME, quoted);
	obix_execute("ALTER TABLE %s ENABLE ALWAYS TRIGGER %s",
				 quoted, OBIX_TRUNCATE_NAME);

	return get_relname_relid(name, namespace);
}

/* The replica identity of a table, with its index if that has one. */
char
obix_replica_identity(Oid relid, Oid *index)
{
	Relation	rel = table_open(relid, AccessShareLock);
	char		identity = rel->rd_rel->relreplident;

	*index = identity == REPLICA_IDENTITY_INDEX ?
		RelationGetReplicaIndex(rel) : InvalidOid;
	table_close(rel, NoLock);
	return identity;
}

void
obix_set_replica_identity(Oid relid, char identity, Oid index)
{
	char	   *quoted = obix_quote_relation(relid);

	if (identity == REPLICA_IDENTITY_FULL)
		obix_execute("ALTER TABLE %s REPLICA IDENTITY FULL", quoted);
	else if (identity == REPLICA_IDENTITY_NOTHING)
		obix_execute("ALTER TABLE %s REPLICA IDENTITY NOTHING", quoted);
	else if (identity == REPLICA_IDENTITY_INDEX && OidIsValid(index))
		obix_execute("ALTER TABLE %s REPLICA IDENTITY USING INDEX %s", quoted,
					 quote_identifier(get_rel_name(index)));
	else
		obix_execute("ALTER TABLE %s REPLICA IDENTITY DEFAULT", quoted);
}

/*
 * Give a partition the replica identity of the outbox, where that is not the
 * default.  ALTER TABLE does not.
 */
void
obix_follow_replica_identity(Oid parent, Oid leaf)
{
	Oid			index;
	Oid			leaf_index;
	char		identity = obix_replica_identity(parent, &index);
	char		leaf_identity = obix_replica_identity(leaf, &leaf_index);

	if (identity == REPLICA_IDENTITY_DEFAULT)
		return;
	if (identity == REPLICA_IDENTITY_INDEX)
	{
		Relation	rel = table_open(leaf, AccessShareLock);

		index = OidIsValid(index) ? index_get_partition(rel, index) : InvalidOid;
		table_close(rel, NoLock);
		if (!OidIsValid(index))
			return;
	}
	if (identity != leaf_identity || index != leaf_index)
		obix_set_replica_identity(leaf, identity, index);
}

/*
 * Give a partition to the owner of its outbox.  ALTER TABLE ... OWNER leaves
 * those behind that are there, and maintenance acts as the owner of the outbox.
 * The caller has locked the partition exclusively.
 */
void
obix_adopt(Oid parent, Oid leaf)
{
	Relation	rel = table_open(parent, AccessShareLock);
	Oid			owner = rel->rd_rel->relowner;

	table_close(rel, NoLock);
	ATExecChangeOwner(leaf, owner, true, AccessExclusiveLock);
	CommandCounterIncrement();
}

/*
 * Add a CHECK constraint to a table that the caller has proved and holds
 * locked against any change.  Nothing is scanned.
 */
static void
add_proved_check(Oid relid, const char *condition)
{
	Relation	rel = table_open(relid, AccessExclusiveLock);
	List	   *parsed = raw_parser(condition, RAW_PARSE_PLPGSQL_EXPR);
	SelectStmt *select = castNode(SelectStmt, linitial_node(RawStmt, parsed)->stmt);
	Constraint *check = makeNode(Constraint);

	check->contype = CONSTR_CHECK;
	check->conname = pstrdup(PROOF_NAME);
	check->location = -1;
	check->raw_expr = linitial_node(ResTarget, select->targetList)->val;
	check->skip_validation = true;
	check->initially_valid = true;
	(void) AddRelationNewConstraints(rel, NIL, list_make1(check),
									 false, true, true, NULL);
	table_close(rel, NoLock);
	CommandCounterIncrement();
}

static char *
bound_literal(int64 bound)
{
	return bound == OBIX_NO_UPPER ? pstrdup("MAXVALUE") :
		psprintf("'" INT64_FORMAT "'", bound);
}

/*
 * Attach a table as the partition of a range.  The caller acts as the owner,
 * has locked the outbox, and has locked DEFAULT exclusively or detached it.
 *
 * DEFAULT must not be scanned under that lock.  If it has rows, that none is
 * in the range is proved by its primary key; the proof is given as a CHECK.
 * The same for the table itself, if it has rows.
 */
void
obix_attach_range(Oid parent, Oid leaf, int64 lower, int64 upper)
{
	Relation	rel = table_open(parent, AccessShareLock);
	Oid			default_relid = obix_default_leaf(rel);
	bool		proved_default = false;
	bool		proved_leaf = false;
	Oid			relids[2];

	table_close(rel, NoLock);
	relids[0] = default_relid;
	relids[1] = leaf;

	for (int i = 0; i < 2; i++)
	{
		SnapshotData dirty;
		int64		found;
		bool		has_rows;
		bool		excluded;

		if (!OidIsValid(relids[i]))
			continue;
		rel = table_open(relids[i], AccessShareLock);
		InitDirtySnapshot(dirty);
		has_rows = RelationGetNumberOfBlocks(rel) > 0;
		if (i == 0)
			excluded = !obix_lowest_in(rel, &dirty, lower, upper, &found);
		else
			excluded = !obix_lowest_in(rel, &dirty, PG_INT64_MIN, lower, &found) &&
				(upper == OBIX_NO_UPPER ||
				 !obix_lowest_in(rel, &dirty, upper, PG_INT64_MAX, &found));
		table_close(rel, NoLock);
		if (!excluded)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("partition for sequence %lld of outbox \"%s\" cannot be attached",
							(long long) lower, get_rel_name(parent)),
					 errdetail("Sequence %lld has gone to partition \"%s\" meanwhile.",
							   (long long) found, get_rel_name(relids[i])),
					 errhint("Call obix.recover_default, or leave it to the worker.")));
		if (!has_rows)
			continue;
		obix_adopt(parent, relids[i]);
		if (i == 0)
			add_proved_check(relids[i],
							 psprintf("sequence < '" INT64_FORMAT "'::pg_catalog.int8"
									  " OR sequence >= '" INT64_FORMAT "'::pg_catalog.int8",
									  lower, upper));
		else
			add_proved_check(relids[i],
							 psprintf("sequence >= '" INT64_FORMAT "'::pg_catalog.int8"
									  " AND sequence < '" INT64_FORMAT "'::pg_catalog.int8",
									  lower, upper));
		proved_default |= i == 0;
		proved_leaf |= i == 1;
	}

	obix_execute("ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM ('" INT64_FORMAT "') TO (%s)",
				 obix_quote_relation(parent), obix_quote_relation(leaf),
				 lower, bound_literal(upper));
	if (proved_default)
		obix_execute("ALTER TABLE %s DROP CONSTRAINT " PROOF_NAME,
					 obix_quote_relation(default_relid));
	if (proved_leaf)
		obix_execute("ALTER TABLE %s DROP CONSTRAINT " PROOF_NAME,
					 obix_quote_relation(leaf));
	obix_follow_replica_identity(parent, leaf);
}

/* What is known of those whose lock on an outbox is in the way */
typedef struct ObixHolders
{
	bool		sessions;		/* there is a session among them */
	bool		dawdling;		/* one has been idle for long */
} ObixHolders;

/*
 * Look at the other transactions with a lock on an outbox that conflicts with
 * a mode.  The others are prepared transactions.
 */
static ObixHolders
look_at_holders(Oid parent, LOCKMODE mode)
{
	ObixHolders holders = {false, false};
	LOCKTAG		tag;
	VirtualTransactionId *vxids;
	int			count;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, parent);
	vxids = GetLockConflicts(&tag, mode, &count);

	/* look at the sessions as they are now */
	pgstat_clear_backend_activity_snapshot();
	for (int i = 0; i < count; i++)
	{
		PGPROC	   *proc = NULL;
		PgBackendStatus *status;

		/* a prepared transaction keeps the virtual xid of its session */
		if (vxids[i].procNumber != INVALID_PROC_NUMBER)
			proc = ProcNumberGetProc(vxids[i].procNumber);
		if (proc == NULL || PROC_LXID(proc) != vxids[i].localTransactionId)
			continue;
		status = pgstat_get_beentry_by_proc_number(vxids[i].procNumber);
		holders.sessions = true;
		if (status != NULL && status->st_state == STATE_IDLEINTRANSACTION &&
			TimestampDifferenceExceeds(status->st_state_start_timestamp,
									   GetCurrentTimestamp(),
									   obix_lock_timeout))
			holders.dawdling = true;
	}
	pfree(vxids);
	return holders;
}

/*
 * Error out if a session has held a lock on an outbox or its DEFAULT partition
 * that is in the way, and has been idle for so long that waiting is no use.
 */
void
obix_give_way(Oid relid, LOCKMODE mode)
{
	if (look_at_holders(relid, mode).dawdling)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("could not obtain lock on table \"%s\"",
						get_rel_name(relid)),
				 errdetail("A session that has used it idles in its transaction."),
				 errhint("See blocking_pids in obix.outbox_status.")));
}

/* The outbox cannot be locked now, or is not what it was. */
static void
report_busy(Oid parent)
{
	char	   *name = get_rel_name(parent);

	ereport(ERROR,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("could not obtain lock on table \"%s\"", name ? name : "?")));
}

/*
 * Lock an outbox for maintenance.  Publishers queue up behind whoever waits for
 * such a lock, so we wait only if it may help, and not for long; and then for
 * nothing else.
 *
 * The caller must not hold a weaker lock on it.  Who has used the outbox and
 * then wants to truncate, drop or alter it would have to wait for that, and be
 * told of a deadlock at once.  So the outbox may be gone when we have the lock.
 */
void
obix_lock_outbox(Oid parent, LOCKMODE mode)
{
	ObixRegistryRow row;

	if (!ConditionalLockRelationOid(parent, mode))
	{
		obix_give_way(parent, mode);
		if (obix_no_wait)
			report_busy(parent);
		LockRelationOid(parent, mode);
	}
	if (!obix_registry_find(parent, &row))
		report_busy(parent);
}

/* Lock DEFAULT of an outbox that is locked, without waiting. */
void
obix_lock_default(Oid default_relid)
{
	if (!ConditionalLockRelationOid(default_relid, AccessExclusiveLock))
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("could not obtain lock on partition \"%s\"",
						get_rel_name(default_relid)),
				 errdetail("A transaction that has read or written it, perhaps by way of the outbox, is still open."),
				 errhint("See blocking_pids in obix.outbox_status.")));
}

/*
 * Lock an outbox so that a range can be attached, see at the top.  Returns
 * whether no session may have come to use it when it is done.
 */
static bool
lock_for_attach(Oid parent, Oid default_relid, bool far)
{
	bool		shared = false;

	if (!ConditionalLockRelationOid(parent, ShareRowExclusiveLock))
		shared = far &&
			!look_at_holders(parent, ShareRowExclusiveLock).sessions;
	obix_lock_outbox(parent, shared ? ShareUpdateExclusiveLock :
					 ShareRowExclusiveLock);
	if (OidIsValid(default_relid))
		obix_lock_default(default_relid);
	return shared;
}

/* The end of a range of width sequences, where the sequences do not end. */
static int64
range_end(int64 start, int64 width)
{
	int64		end;

	return pg_add_s64_overflow(start, width, &end) ? OBIX_NO_UPPER : end;
}

/*
 * Make count partitions of width sequences from lower on.  The caller acts as
 * the owner and holds OBIX_MUTEX_PARTITIONS.  far: the range begins more than a
 * partition above the head.  Returns how many were made: fewer where the
 * sequences end.
 */
int
obix_add_partitions(Oid parent, int64 lower, int64 width, int count,
					bool far)
{
	Oid		   *leaves = palloc(count * sizeof(Oid));
	Oid			namespace = get_rel_namespace(parent);
	Relation	rel;
	const char *name;
	Oid			default_relid;
	int64		start;
	bool		shared;
	MemoryContext scratch;

	/* unlocked, it may be dropped */
	rel = table_open(parent, AccessShareLock);
	name = pstrdup(RelationGetRelationName(rel));
	default_relid = obix_default_leaf(rel);
	table_close(rel, AccessShareLock);
	if (OidIsValid(default_relid))
		obix_give_way(default_relid, AccessExclusiveLock);

	start = lower;
	for (int i = 0; i < count; i++)
	{
		char		label[32];

		snprintf(label, sizeof(label), "p" INT64_FORMAT, start);
		leaves[i] = obix_create_leaf(parent,
									 obix_free_name(name, namespace, label));
		start = range_end(start, width);
		if (start == OBIX_NO_UPPER)
			count = i + 1;
	}

	shared = lock_for_attach(parent, default_relid, far);

	/* the relation cache leaves behind what it read about each partition */
	scratch = AllocSetContextCreate(CurrentMemoryContext, "obix attach",
									ALLOCSET_DEFAULT_SIZES);
	start = lower;
	for (int i = 0; i < count; i++)
	{
		int64		end = range_end(start, width);
		MemoryContext caller = MemoryContextSwitchTo(scratch);

		obix_attach_range(parent, leaves[i], start, end);
		MemoryContextSwitchTo(caller);
		MemoryContextReset(scratch);
		start = end;
	}
	MemoryContextDelete(scratch);

	if (shared && look_at_holders(parent, ShareRowExclusiveLock).sessions)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("could not attach a partition to outbox \"%s\" while it is being written to",
						get_rel_name(parent))));
	return count;
}

/* Partitions above the one that holds a sequence. */
static int
partitions_above(Relation parent, const ObixLeaf *current)
{
	ObixLeaf	leaf = *current;
	int			count = 0;

	while (obix_next_leaf(parent, &leaf))
		count += !leaf.is_default;
	return count;
}

/*
 * How many partitions the head will pass within a second if it goes on as it
 * did since the last look: so many more are kept ready.  0 while maintenance
 * keeps up with it.
 */
static int
partitions_in_a_rush(const ObixPosition *position, int64 width)
{
	int64		passed = (position->head - position->premake_head) / width;
	double		seconds;

	if (position->premake_time == 0 || passed < MIN_RUSH)
		return 0;
	seconds = Max(GetCurrentTimestamp() - position->premake_time, 0) / 1e6;
	return (int) Min(passed / Max(seconds, MIN_RUSH_SECONDS), MAX_RUSH);
}

/*
 * Make the partitions that are due ahead of the head, and say when to ask
 * again.  Returns how many were made; what is due beyond a few is asked for
 * again, so that the lock is short.
 *
 * Where events have gone to DEFAULT beyond the last partition, the new ones
 * begin at the first boundary above the head and leave a gap, which recovery
 * closes.
 */
int
obix_premake(Oid relid)
{
	ObixRegistryRow row;
	ObixRelation *known;
	ObixOutbox *shared;
	ObixPosition position;
	ObixIdentity saved;
	ObixLeaf	current;
	Relation	parent;
	int64		next;
	int64		lower;
	int			due;
	int			rush;
	int			made = 0;

	parent = obix_open_to_maintain(relid, OBIX_MUTEX_PARTITIONS, AccessShareLock,
								   &row, &known);
	if (parent == NULL)
		return 0;
	shared = obix_attach(parent, known);
	obix_get_position(shared, relid, known->id, &position);

	next = position.head + 1;
	lower = obix_partitions_end(parent);
	obix_find_leaf(parent, next, &current);
	due = row.premake - partitions_above(parent, &current);
	rush = partitions_in_a_rush(&position, row.partition_width);
	due += rush;

	if (current.is_default && current.upper == OBIX_NO_UPPER)
	{
		int64		missing = (next - lower) / row.partition_width + 1;
		bool		stranded = false;

		if (OidIsValid(current.relid))
		{
			Relation	rel = table_open(current.relid, AccessShareLock);
			SnapshotData dirty;
			int64		found;

			InitDirtySnapshot(dirty);
			stranded = obix_lowest_in(rel, &dirty, lower, PG_INT64_MAX, &found);
			table_close(rel, AccessShareLock);
		}
		/* in a rush the head will have gone on by the time this is done */
		if (stranded)
			missing += rush / RUSH_SHARE;

		if (!stranded)
			due = Min(missing + due, INT_MAX / 2);
		else if (pg_mul_s64_overflow(missing, row.partition_width, &missing) ||
				 pg_add_s64_overflow(lower, missing, &lower))
			due = 0;
	}

	if (due > 0 && lower != OBIX_NO_UPPER)
	{
		bool		far = lower - next > row.partition_width;
		int			count = Min(due, MAX_ATTACH);

		obix_become_owner(parent, &saved);
		table_close(parent, AccessShareLock);
		made = obix_add_partitions(relid, lower, row.partition_width, count, far);
		obix_become_self(&saved);
		parent = table_open(relid, NoLock);
	}

	if (due > MAX_ATTACH)
		obix_request_work(shared, OBIX_WORK_PREMAKE);
	obix_find_leaf(parent, next, &current);
	obix_premake_done(shared, position.head, current.is_default ?
					  next + Min(row.partition_width, PG_INT64_MAX - next) :
					  current.upper);
	table_close(parent, NoLock);
	return made;
}
