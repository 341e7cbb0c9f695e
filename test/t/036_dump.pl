
# A database with outboxes, consumers in every state, dead letters and stranded
# events, dumped and restored in every way into a new server, whose transaction ids
# are small: it is the same there, and goes on.  Workers come by themselves, once
# the session that restores has ended.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $settings = "obix.auto_recover = off\nobix.dispatch_workers = 0\nobix.worker_linger = '100ms'\n";
my $node     = new_node('source', conf => $settings);
my $copy     = new_node('copy', conf => $settings);
my $dump     = $node->basedir . '/dump';
my ($result, $stdout, $stderr);

sub workers
{
	my ($count) = @_;

	$copy->append_conf('postgresql.conf', "obix.dispatch_workers = $count");
	$copy->reload;
	$copy->poll_query_until('postgres', "SELECT current_setting('obix.dispatch_workers') = '$count'");
	no_dispatchers($copy) if $count == 0;
	return;
}

#
# The source.  Everything belongs to a role without privileges of its own, who
# owns the database too.
#
my $roles = q{CREATE ROLE regress_obix_owner LOGIN; CREATE ROLE regress_obix_reader; CREATE ROLE regress_obix_other};
$node->safe_psql('postgres', $roles);
$node->safe_psql(
	'postgres', q{
CREATE TEMP TABLE t (i integer);
DO $$ BEGIN
	FOR i IN 1 .. 20000 LOOP	-- each takes a transaction id
		BEGIN INSERT INTO t VALUES (i); EXCEPTION WHEN division_by_zero THEN NULL; END;
	END LOOP;
END $$});
$copy->safe_psql('postgres', $roles);
$node->safe_psql('postgres', 'CREATE DATABASE source OWNER regress_obix_owner');
$node->safe_psql('source', 'CREATE EXTENSION obix');
my $as_owner = 'SET SESSION AUTHORIZATION regress_obix_owner; ';
$node->safe_psql(
	'source', $as_owner . q{
CREATE SCHEMA "App";
SET search_path = "App";
SELECT obix.create_outbox('"App"."Orders"', partition_width => 100, premake => 2);
SELECT obix.alter_outbox('"Orders"', partition_width => 200, premake => 3);
SELECT obix.create_outbox('"App".stranded', partition_width => 100, premake => 0);
SELECT obix.create_outbox('"App".gone');
GRANT SELECT ON "Orders" TO regress_obix_reader WITH GRANT OPTION;
GRANT INSERT (payload, key) ON "Orders" TO regress_obix_reader;
GRANT USAGE ON SCHEMA "App" TO regress_obix_reader;
ALTER TABLE "Orders_p0" SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.5);
ALTER TABLE "Orders" ADD CONSTRAINT small CHECK (octet_length(payload::text) < 100000);
CREATE INDEX by_key ON "Orders" (key);
COMMENT ON COLUMN "Orders".key IS 'the customer';
CREATE TABLE applied (consumer text, sequence bigint, PRIMARY KEY (consumer, sequence));
CREATE FUNCTION apply(c text, e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF c = 'handled' AND e.payload IN ('7', '9') THEN RAISE EXCEPTION 'poison %', e.payload; END IF;
	INSERT INTO "App".applied VALUES (c, e.sequence);
END $$;
CREATE FUNCTION handle(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT "App".apply('handled', e)$$;
CREATE FUNCTION batch(e obix.event[]) RETURNS void LANGUAGE sql AS $$SELECT "App".apply('batched', x) FROM unnest(e) x$$;
CREATE FUNCTION available(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT "App".apply('available', e)$$;
SELECT obix.create_consumer('handled', '"Orders"', handler => 'handle', on_failure => 'dead_letter', hold_key => true, max_attempts => 1,
	tables => '{applied}');
SELECT obix.create_consumer('batched', '"Orders"', batch_handler => 'batch', batch_size => 7, types => '{a}');
SELECT obix.create_consumer('available', '"Orders"', handler => 'available', ordering => 'available');
SELECT obix.create_consumer('external', '"Orders"', start_after => 0, backoff => '1 h', max_backoff => '1 h');
SELECT obix.create_consumer('late', '"Orders"', start_after => 0, ordering => 'available');
SELECT obix.create_consumer('paused', 'stranded', start_after => 0);
SELECT obix.pause('paused');
SELECT count(obix.publish('stranded', to_jsonb(g))) FROM generate_series(1, 350) g;
SELECT count(obix.publish('gone', to_jsonb(g))) FROM generate_series(1, 5) g;
TRUNCATE gone;});
my $publish =
  q{SELECT count(obix.publish('"App"."Orders"', to_jsonb(g), type => CASE g % 2 WHEN 0 THEN 'a' ELSE 'b' END, key => (g % 5)::text)) FROM generate_series(};
$node->safe_psql('source', $publish . '1, 250) g');
roll_back_inserts($node, 'source', '"App"."Orders"', 5);
$node->safe_psql('source', $publish . '251, 255) g');
settle($node, 'source', '"App"."Orders"');
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 2');
$node->reload;
consumers_ok($node, 'source', q{consumer IN ('handled', 'batched', 'available')}, 'lag_events = 0', 'the source is at work');
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 0');
$node->reload;
no_dispatchers($node);

$node->safe_psql('source', 'DROP TABLE "App"."Orders_p0"');

# What is in flight when it is dumped will be holes there; what was passed has a
# transaction id of the source.
my $publisher = $node->background_psql('source');
$publisher->query_safe(q{BEGIN; INSERT INTO "App"."Orders" (payload) SELECT to_jsonb(g) FROM generate_series(261, 263) g});
$node->safe_psql('source', $publish . '264, 290) g');
$node->safe_psql(
	'source', $as_owner . q{
SELECT obix.seek('external', 100), obix.seek('late', 100);
SELECT obix.acquire('external', '1 h');
SELECT count(*) FROM obix.fetch('external', 5, token => 1);
SELECT obix.ack('external', 103, 1);
SELECT obix.fail('external', 104, 'not today', 1);
SELECT count(*) FROM obix.fetch('late', 1000);
SELECT obix.ack('late', 280);});
like($node->safe_psql('source', q{SELECT from_sequence, to_sequence, holder > '0' FROM obix.consumer_late JOIN obix.consumer c USING (id) WHERE consumer = 'late'}),
	qr/261\|263\|t/, 'there is a late range with a transaction id');

# All that must be the same; what stands in the tables as they were restored.
my $structure = q{
SELECT c.oid::regclass, relkind, relowner::regrole, relacl, reloptions, pg_get_expr(relpartbound, c.oid), pg_get_partkeydef(c.oid), obj_description(c.oid, 'pg_class')
FROM pg_class c WHERE relnamespace = '"App"'::regnamespace ORDER BY relname;
SELECT attrelid::regclass, attnum, attname, atttypid::regtype, attnotnull, attacl, pg_get_expr(d.adbin, d.adrelid), col_description(attrelid, attnum)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_attrdef d ON (adrelid, adnum) = (attrelid, attnum)
WHERE relnamespace = '"App"'::regnamespace AND attnum > 0 ORDER BY relname, attnum;
SELECT conrelid::regclass, conname, contype, convalidated, pg_get_constraintdef(c.oid) FROM pg_constraint c WHERE connamespace = '"App"'::regnamespace ORDER BY conrelid::regclass::text, conname;
SELECT tgrelid::regclass, tgname, tgenabled, pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
WHERE relnamespace = '"App"'::regnamespace ORDER BY relname, tgname;
SELECT indexrelid::regclass, indisvalid, pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class c ON c.oid = indrelid
WHERE relnamespace = '"App"'::regnamespace ORDER BY indexrelid::regclass::text;
};
my $data = q{
SELECT tableoid::regclass, count(*), count(payload), min(sequence), max(sequence), md5(string_agg(sequence || ':' || id || coalesce(payload::text, '') || recorded_at, ' ' ORDER BY sequence))
FROM "App"."Orders" GROUP BY tableoid ORDER BY tableoid::regclass::text;
SELECT tableoid::regclass, count(*), md5(string_agg(sequence || ':' || id || coalesce(payload::text, '') || recorded_at, ' ' ORDER BY sequence))
FROM "App".stranded GROUP BY tableoid ORDER BY tableoid::regclass::text;
SELECT * FROM obix.outbox ORDER BY id;
SELECT * FROM obix.consumer ORDER BY id;
SELECT * FROM obix.consumer_state ORDER BY id;
SELECT * FROM obix.consumer_late ORDER BY id, from_sequence;
SELECT * FROM obix.parked_event ORDER BY id, sequence;
SELECT * FROM obix.rebuild_state ORDER BY id;
SELECT last_value, is_called FROM obix.outbox_id_seq;
SELECT last_value, is_called FROM obix.consumer_id_seq;
SELECT consumer, count(*), sum(sequence) FROM "App".applied GROUP BY 1 ORDER BY 1;
};
# The same, without what workers may have done already: fill what was in flight.
my $stable = $data =~ s/FROM "App"."Orders"/FROM "App"."Orders" WHERE sequence NOT BETWEEN 261 AND 263/r
  =~ s/SELECT \* FROM obix.outbox/SELECT outbox, id, partition_width, premake FROM obix.outbox/r;
no_workers($node);
my $expected_stable    = $node->safe_psql('source', $stable);
my $expected           = $node->safe_psql('source', $structure . $data);
my $expected_structure = $node->safe_psql('source', $structure);
my $head = q{SELECT outbox, head FROM obix.outbox_status ORDER BY outbox::text};
my $expected_head = $node->safe_psql('source', $head);

my $owner   = 'user=regress_obix_owner';
my @pg_dump = ('pg_dump', '-d', $node->connstr('source'));
$node->command_ok([ @pg_dump, '-Fc', '-f', "$dump.custom" ], 'pg_dump -Fc');
$node->command_ok([ @pg_dump, '-Fd', '-j4', '-f', "$dump.dir" ], 'pg_dump -Fd -j4');
$node->command_ok([ @pg_dump, '-Fp', '-f', "$dump.sql" ], 'pg_dump -Fp');
$node->command_ok([ @pg_dump, '-Fc', '-t', '"App"."Orders"*', '-f', "$dump.table" ], 'pg_dump of one outbox');
$node->command_ok(
	[ 'pg_dump', '-d', $node->connstr('source') . " $owner", '-Fc', '-f', "$dump.owner" ],
	'pg_dump as the owner');
$publisher->query_safe('ROLLBACK');
$publisher->quit;
$node->stop;

# Make a database, and restore a dump into it; which client, and its arguments.
sub restore
{
	my ($db, $name, @command) = @_;
	my $offset = log_offset($copy);

	$copy->safe_psql('postgres', "CREATE DATABASE $db OWNER regress_obix_owner")
	  unless $copy->safe_psql('postgres', "SELECT count(*) FROM pg_database WHERE datname = '$db'");
	$copy->command_ok([@command], "$name: " . (split m{/}, $command[0])[-1]);
	unlike_log($copy, qr/ERROR|FATAL|PANIC/, "$name: nothing fails", $offset);
	return;
}

# It is the same, and goes on.  Nobody but the test's own look at pg_catalog has
# touched anything.
sub check_copy
{
	my ($db, $name) = @_;

	is($copy->safe_psql($db, $structure), $expected_structure, "$name: it looks the same");
	is($copy->safe_psql($db, 'SELECT max(holder) > pg_snapshot_xmax(pg_current_snapshot()) FROM obix.consumer_late'),
		't', "$name: a late range names a transaction that is still to come here");
	# by themselves, workers fill what was in flight, and dispatchers go on
	workers(2);
	poll_ok($copy, $db, q{SELECT count(*) = 3 FROM "App"."Orders" WHERE sequence BETWEEN 261 AND 263 AND payload IS NULL},
		"$name: what was in flight is filled");
	poll_ok($copy, $db, q{SELECT max(sequence) = 290 FROM "App".applied WHERE consumer = 'batched'},
		"$name: handlers are called");
	is($copy->safe_psql($db, $head), $expected_head, "$name: the heads are the same");
	consumers_ok($copy, $db, q{consumer IN ('handled', 'batched', 'available')},
		q{state = 'active' AND lag_events = 0 AND late_ranges = 0}, "$name: to the end");
	is( $copy->safe_psql($db, q{SELECT sequence FROM obix.fetch('late', 1000) WHERE sequence <= 280; SELECT count(*) FROM obix.consumer_late WHERE holder IS NOT NULL}),
		'0', "$name: transaction ids of the source mean nothing");
	is( $copy->safe_psql($db, q{SELECT count(*) - count(DISTINCT sequence) FROM (SELECT sequence FROM "App".applied WHERE consumer = 'handled' UNION ALL SELECT sequence FROM obix.dead_letter WHERE consumer = 'handled') e}),
		'0', "$name: dead letters stay");
	is( $copy->safe_psql($db, q{SELECT max_attempts, state, attempts, attempt_sequence, retry_at > now() + '10 min' FROM obix.consumer_status JOIN obix.consumer USING (consumer) WHERE consumer = 'external'}),
		'10|retrying|1|104|t', "$name: attempts too");
	($result, $stdout, $stderr) = $copy->psql($db, q{SELECT obix.fetch('external')});
	like($stderr, qr/lease|held|token/, "$name: and leases");
	is( $copy->safe_psql($db, $as_owner . q{
INSERT INTO "App"."Orders" (payload) VALUES ('1') RETURNING sequence;
INSERT INTO "App".stranded (payload) VALUES ('1') RETURNING sequence;
INSERT INTO "App".gone (payload) VALUES ('1') RETURNING sequence;
SELECT obix.recover_default('"App".stranded');
SELECT obix.create_consumer('new', '"App".gone');
SELECT id FROM obix.consumer WHERE consumer = 'new';}),
		"291\n351\n6\n252\n\n7", "$name: publishing and administration go on");
	workers(0);
	return;
}

#
# DROP EXTENSION
#
my @pg_restore = ('pg_restore', '--exit-on-error');
sub check_drop
{
	my ($db) = @_;

	($result, $stdout, $stderr) = $copy->psql($db, 'DROP EXTENSION obix');
	like($stderr, qr/cannot drop extension obix because other objects depend on it/, 'DROP EXTENSION refuses');
	my $rows = $copy->safe_psql($db, q{SELECT count(*), max(sequence) FROM "App"."Orders"});
	$copy->safe_psql($db, 'DROP EXTENSION obix CASCADE');
	is($copy->safe_psql($db, q{SELECT count(*), max(sequence) FROM "App"."Orders"}), $rows, 'with CASCADE, events stay');
	is( $copy->safe_psql($db, q{
INSERT INTO "App"."Orders" (sequence, id, payload) VALUES (1000, gen_random_uuid(), '1');
DELETE FROM "App"."Orders" WHERE sequence = 1000 RETURNING sequence;
SELECT count(*) FROM pg_trigger WHERE tgname ~ 'obix'; SELECT count(*) FROM pg_namespace WHERE nspname = 'obix'}),
		"1000\n0\n0", 'in plain tables');
	return;
}

#
# The whole
#
$copy->safe_psql('postgres', 'CREATE DATABASE section OWNER regress_obix_owner; ALTER DATABASE section SET obix.enabled = off');
my @ways = (
	[ 'plain', [ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-f', "$dump.sql", '-d' ] ],
	[ 'custom', [ @pg_restore, "$dump.custom", '-d' ] ],
	[ 'parallel', [ @pg_restore, '-j4', "$dump.dir", '-d' ] ],
	[ 'section', map { [ @pg_restore, "--section=$_", "$dump.custom", '-d' ] } ('pre-data', 'data', 'post-data') ]);
foreach my $way (@ways)
{
	my ($db, @commands) = @$way;

	restore($db, $db, @$_, $copy->connstr($db)) foreach (@commands);
	if ($db eq 'section')
	{
		no_workers($copy);
		$copy->safe_psql('postgres', 'ALTER DATABASE section RESET obix.enabled');
	}
	else
	{
		is($copy->safe_psql($db, $stable), $expected_stable, "$db: everything is there");
	}
	check_copy($db, $db);
}
check_drop('custom');

#
# As the owner, who is no superuser: the extension is there, and what is said of
# it is left alone.
#
my ($list) = run_command([ 'pg_restore', '-l', "$dump.owner" ]);
append_to_file("$dump.list", join '', map { "$_\n" } grep { !/COMMENT - EXTENSION/ } split /\n/, $list);
$copy->safe_psql('postgres', 'CREATE DATABASE owner OWNER regress_obix_owner');
$copy->safe_psql('owner', 'CREATE EXTENSION obix');
restore('owner', 'owner', @pg_restore, '-j2', '-L', "$dump.list", "$dump.owner", '-d', $copy->connstr('owner') . " $owner");
check_copy('owner', 'owner');

# What is others' he cannot insert, though he may insert into these tables.
$copy->safe_psql('owner', q{
SELECT obix.create_outbox('theirs'); SELECT obix.create_consumer('theirs', 'theirs');
ALTER TABLE theirs OWNER TO regress_obix_other;
SELECT obix.alter_consumer('theirs', owner => 'regress_obix_other');});
my $id = $copy->safe_psql('owner', q{SELECT id FROM obix.consumer WHERE consumer = 'theirs'});
foreach my $statement (
	q{INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES ('theirs', 1, 1)},
	q{INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES ('pg_class', 1, 1)},
	q{INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES (1, 1, 1)},
	q{INSERT INTO obix.consumer SELECT id + 100, 'mine', outbox, 'regress_obix_other', version, paused, types, handler, batch_handler, ordering, batch_size, timeout,
	  max_attempts, backoff, max_backoff, on_failure, hold_key, tables, gate, search_path FROM obix.consumer WHERE consumer = 'handled'},
	"INSERT INTO obix.consumer_state (id, position, scanned) VALUES ($id, 0, 0)",
	"INSERT INTO obix.consumer_state (id, position, scanned) VALUES (-$id, 0, 0)",
	"INSERT INTO obix.consumer_late (id, from_sequence, to_sequence) VALUES ($id, 0, 0)",
	"INSERT INTO obix.parked_event (id, sequence, event_id, recorded_at, state, attempts, parked_at) VALUES ($id, 1, gen_random_uuid(), now(), 'requeued', 0, now())",
	"INSERT INTO obix.rebuild_state VALUES ($id, 'obix_rebuild_$id', false, now())")
{
	($result, $stdout, $stderr) = $copy->psql('owner', $as_owner . $statement);
	like($stderr, qr/permission denied for consumer|must be owner|OID 1 does not exist|must be member of role|must be able to SET ROLE/,
		"the owner of a database cannot: $statement" =~ s/\s+/ /gr);
}
foreach my $statement ('UPDATE obix.consumer SET paused = true', 'DELETE FROM obix.outbox', 'TRUNCATE obix.parked_event')
{
	($result, $stdout, $stderr) = $copy->psql('owner', $as_owner . $statement);
	like($stderr, qr/permission denied for table/, "nor: $statement");
}
# and what he has put there for a consumer that is still to come does not stay
$copy->safe_psql('owner', $as_owner . q{
INSERT INTO obix.consumer_state (id, position, scanned) SELECT s * (last_value + 1), 40, 40 FROM obix.consumer_id_seq, generate_series(-1, 1) s;
INSERT INTO obix.consumer_late (id, from_sequence, to_sequence) SELECT last_value + 1, 1, 2 FROM obix.consumer_id_seq;
INSERT INTO obix.parked_event (id, sequence, event_id, recorded_at, state, attempts, parked_at)
	SELECT last_value + 1, 1, gen_random_uuid(), now(), 'requeued', 0, now() FROM obix.consumer_id_seq;
INSERT INTO obix.rebuild_state SELECT last_value + 1, 'obix_rebuild_' || (last_value + 1), false, now() FROM obix.consumer_id_seq;});
is( $copy->safe_psql('owner', q{SELECT obix.create_consumer('fresh', 'theirs', start_after => 0);
SELECT id - (SELECT last_value FROM obix.consumer_id_seq), position, late, parked, (SELECT count(*) FROM obix.consumer_late l WHERE l.id = s.id), (SELECT count(*) FROM obix.parked_event p WHERE p.id = s.id),
	(SELECT count(*) FROM obix.rebuild_state r WHERE r.id = s.id) FROM obix.consumer_state s WHERE abs(id) = (SELECT id FROM obix.consumer WHERE consumer = 'fresh')}),
	"\n0|0|f|f|0|0|0", 'what lies about of another consumer is not used');

#
# Without rows of obix: the schema alone, and a table alone.  Both can be adopted.
#
sub check_adopted
{
	my ($db, $name, $status) = @_;

	($result, $stdout, $stderr) = $copy->psql($db, q{SELECT obix.publish('"App"."Orders"', '1')});
	like($stderr, qr/"Orders" is not an outbox\n.*\nHINT:  Use obix\.adopt_outbox if it was restored without its row there\./, "$name: it must be adopted");
	my $writer = $copy->background_psql($db);
	$writer->query_safe('BEGIN; LOCK TABLE "App"."Orders" IN ROW EXCLUSIVE MODE');
	($result, $stdout, $stderr) = $copy->psql($db,
		q{SELECT '"App"."Orders"'::regclass::oid AS o \gset
SET lock_timeout = 1; SET ROLE regress_obix_other; SELECT obix.adopt_outbox(:o)});
	like($stderr, qr/must be owner of table Orders/, "$name: by its owner, others do not even wait for a lock");
	$writer->query_safe('ROLLBACK');
	$writer->quit;
	$copy->safe_psql($db, 'BEGIN; ' . q{SELECT obix.adopt_outbox('"App"."Orders"'); ROLLBACK});
	is( $copy->safe_psql($db, $as_owner . q{BEGIN; SELECT obix.adopt_outbox('"App"."Orders"', premake => 3);
SELECT partition_width, premake, resolved FROM obix.outbox; SELECT head FROM obix.outbox_status; COMMIT}),
		"\n$status", "$name: with what can be known of it");
	($result, $stdout, $stderr) = $copy->psql($db, q{SELECT obix.adopt_outbox('"App"."Orders"')});
	like($stderr, qr/"Orders" is an outbox already/, "$name: once");
	roll_back_inserts($copy, $db, '"App"."Orders"', 2);
	publish($copy, $db, '"App"."Orders"', 1);
	poll_ok($copy, $db, 'SELECT high_water_mark = head FROM obix.outbox_status', "$name: then it works like any");
	# where the lowest partitions are gone, the first events have none
	$copy->safe_psql($db, q{SELECT obix.recover_default('"App"."Orders"')});
	is_settled($copy, $db, '"App"."Orders"', "$name: so does recovery");
	return;
}

$copy->safe_psql('postgres', 'CREATE DATABASE schema OWNER regress_obix_owner');
restore('schema', 'schema', @pg_restore, '--schema-only', "$dump.custom", '-d', $copy->connstr('schema'));
is($copy->safe_psql('schema', $structure), $expected_structure, 'schema: it looks the same');
check_adopted('schema', 'schema', "200|3|0\n0");

$copy->safe_psql('postgres', 'CREATE DATABASE one OWNER regress_obix_owner');
$copy->safe_psql('one', 'CREATE EXTENSION obix; CREATE SCHEMA "App" AUTHORIZATION regress_obix_owner');
restore('one', 'one', @pg_restore, "$dump.table", '-d', $copy->connstr('one'));
check_adopted('one', 'one', "200|3|99\n290");
is( $copy->safe_psql('one', q{SELECT count(*), count(payload), min(sequence), max(sequence) FROM "App"."Orders"}),
	'194|184|100|293',
	'one: with its events, and placeholders for what was in flight');

foreach my $case (
	[ q{SELECT obix.adopt_outbox(NULL)}, 'outbox must not be null' ],
	[ q{SELECT obix.adopt_outbox('obix.outbox', premake => NULL)}, 'premake must not be null' ],
	[ q{SELECT obix.adopt_outbox('"App"."Orders"', premake => -1)}, 'premake must be between 0 and 10000' ],
	[ q{SELECT obix.adopt_outbox(1)}, 'outbox with OID 1 does not exist' ],
	[ q{CREATE TABLE t (i int); SELECT obix.adopt_outbox('t')}, 'table "t" has never been an outbox' ])
{
	($result, $stdout, $stderr) = $copy->psql('one', $case->[0]);
	like($stderr, qr/$case->[1]/, "refused: $case->[1]");
}

#
# The data alone, into outboxes that exist
#
$copy->safe_psql('postgres', 'CREATE DATABASE data OWNER regress_obix_owner; ALTER DATABASE data SET obix.enabled = off');
restore('data', 'data: schema', @pg_restore, '--schema-only', "$dump.custom", '-d', $copy->connstr('data'));
restore('data', 'data', @pg_restore, '--data-only', '-j2', "$dump.dir", '-d', $copy->connstr('data'));
no_workers($copy);
is($copy->safe_psql('data', $structure . $data), $expected, 'data: everything is there');
$copy->safe_psql('postgres', 'ALTER DATABASE data RESET obix.enabled');
check_copy('data', 'data');

$copy->stop;
done_testing();
