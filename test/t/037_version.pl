
# Versions of the extension and of the library: updating equals installing;
# where they differ, sessions go on working and workers do nothing, which the log
# is told once; workers come by themselves when that has changed, and leave when
# it changes under them.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $seconds = 10;
my $node    = new_node('main', conf => "log_min_messages = debug1\nobix.worker_linger = '4s'");
my $idles   = qr/no worker of obix acts in database/;
my $started = qr/starting background worker process "obix (?:worker|dispatcher)"/;
my ($result, $stdout, $stderr);

# Everything that belongs to the extension, with all that can be said of it.
my $catalog = q{
WITH member AS (
	SELECT classid, objid, objsubid FROM pg_depend d
	WHERE refclassid = 'pg_extension'::regclass AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'obix') AND deptype = 'e'
), part AS (
	SELECT * FROM member
	UNION SELECT 'pg_class'::regclass, indexrelid, 0 FROM pg_index WHERE indrelid IN (SELECT objid FROM member WHERE classid = 'pg_class'::regclass)
	UNION SELECT 'pg_constraint'::regclass, oid, 0 FROM pg_constraint WHERE conrelid IN (SELECT objid FROM member WHERE classid = 'pg_class'::regclass)
	UNION SELECT 'pg_trigger'::regclass, oid, 0 FROM pg_trigger WHERE tgrelid IN (SELECT objid FROM member WHERE classid = 'pg_class'::regclass)
	UNION SELECT 'pg_class'::regclass, attrelid, attnum FROM pg_attribute
	WHERE attnum > 0 AND attrelid IN (SELECT objid FROM member WHERE classid = 'pg_class'::regclass
									  UNION SELECT typrelid FROM pg_type WHERE oid IN (SELECT objid FROM member WHERE classid = 'pg_type'::regclass))
), line AS (
	SELECT 'extension' AS what, concat_ws('|', extname, extnamespace::regnamespace, extrelocatable, extversion,
		(SELECT array_agg(c::regclass || ':' || extcondition[n] ORDER BY n) FROM unnest(extconfig) WITH ORDINALITY u(c, n)),
		obj_description(oid, 'pg_extension')) AS line FROM pg_extension WHERE extname = 'obix'
	UNION ALL
	SELECT 'comment', concat_ws('|', i.type, i.identity,
		CASE WHEN objsubid = 0 THEN obj_description(objid, classid::regclass::name) ELSE col_description(objid, objsubid) END)
	FROM part, pg_identify_object(classid, objid, objsubid) i
	UNION ALL
	SELECT 'function', concat_ws('|', pg_get_functiondef(objid), (SELECT concat_ws('|', p.proacl, p.proowner::regrole, p.procost) FROM pg_proc p WHERE p.oid = objid))
	FROM member WHERE classid = 'pg_proc'::regclass
	UNION ALL
	SELECT 'relation', concat_ws('|', c.oid::regclass, c.relkind, c.relowner::regrole, c.relacl, c.reloptions, c.relpersistence, c.relrowsecurity,
		CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) WHEN c.relkind = 'i' THEN pg_get_indexdef(c.oid) END)
	FROM part JOIN pg_class c ON c.oid = objid WHERE classid = 'pg_class'::regclass AND objsubid = 0
	UNION ALL
	SELECT 'column', concat_ws('|', a.attrelid::regclass, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
		a.attisdropped, a.attstorage, a.attacl, (SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum))
	FROM part JOIN pg_attribute a ON a.attrelid = objid AND a.attnum = objsubid
	UNION ALL
	SELECT 'constraint', concat_ws('|', conrelid::regclass, conname, convalidated, pg_get_constraintdef(c.oid))
	FROM part JOIN pg_constraint c ON c.oid = objid WHERE classid = 'pg_constraint'::regclass
	UNION ALL
	SELECT 'trigger', concat_ws('|', pg_get_triggerdef(t.oid), tgenabled)
	FROM part JOIN pg_trigger t ON t.oid = objid WHERE classid = 'pg_trigger'::regclass
	UNION ALL
	SELECT 'schema', concat_ws('|', nspname, nspowner::regrole, nspacl) FROM member JOIN pg_namespace n ON n.oid = objid WHERE classid = 'pg_namespace'::regclass
	UNION ALL
	SELECT 'initial privileges', concat_ws('|', pg_describe_object(i.classoid, i.objoid, i.objsubid), i.privtype, i.initprivs)
	FROM pg_init_privs i JOIN member m ON (i.classoid, i.objoid) = (m.classid, m.objid)
	UNION ALL
	SELECT 'dependency', concat_ws('|', pg_describe_object(d.classid, d.objid, d.objsubid), d.deptype, pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid))
	FROM pg_depend d JOIN part p ON (d.classid, d.objid) = (p.classid, p.objid)
)
SELECT DISTINCT what, line FROM line ORDER BY 1, 2};

# An outbox with a consumer that has handlers, and load on it.
sub make_outbox
{
	my ($db) = @_;

	$node->safe_psql(
		$db, q{
SELECT obix.create_outbox('o', partition_width => 100, premake => 2);
CREATE TABLE applied (sequence bigint PRIMARY KEY, n integer);
CREATE FUNCTION apply(e obix.event) RETURNS void LANGUAGE sql AS $$INSERT INTO public.applied VALUES (e.sequence, (e.payload ->> 'n')::integer)$$;
SELECT obix.create_consumer('handled', 'o', handler => 'public.apply');
SELECT obix.create_consumer('external', 'o', start_after => 0);
CREATE TABLE sent (n integer);});
	return;
}

my %load = (
	'publish@4' => q{SELECT obix.publish('o', jsonb_build_object('n', :client_id));
},
	'insert@4' => q{INSERT INTO o (payload) VALUES (jsonb_build_object('n', :client_id));
},
	'rollback@1' => q{BEGIN;
INSERT INTO o (payload) VALUES (jsonb_build_object('n', :client_id));
ROLLBACK;
},
	'read@1' => q{SELECT count(*) FROM obix.read('o', max_events => 10);
SELECT head >= high_water_mark FROM obix.outbox_status;
BEGIN;
SELECT coalesce(max(sequence), 0) AS last FROM obix.fetch('external', 10, wait => true) \gset
SELECT CASE WHEN :last > 0 THEN obix.ack('external', :last) END;
COMMIT;
});

# Everything was handled once, and nothing is left to be done.
sub is_handled
{
	my ($db, $name) = @_;

	is_settled($node, $db, 'o', "$name: no hole is left");
	consumer_ok($node, $db, 'handled', q{state = 'active' AND lag_events = 0}, "$name: handlers are called");
	is( $node->safe_psql($db, 'SELECT (SELECT count(*) FROM o WHERE payload IS NOT NULL) - (SELECT count(*) FROM applied)'),
		'0', "$name: once for each event");
	poll_ok($node, $db, q{SELECT runway >= 200 FROM obix.outbox_status}, "$name: there are partitions ahead");
	return;
}

#
# Updating equals installing
#
my $default = $node->safe_psql('postgres',
	q{SELECT default_version FROM pg_available_extensions WHERE name = 'obix'});
is($default, '1.1', 'this test knows the newest version');
$node->safe_psql('postgres', "CREATE DATABASE $_") foreach ('fresh', 'one', 'two');
$node->safe_psql('fresh', 'CREATE EXTENSION obix');
is($node->safe_psql('fresh', 'SELECT obix.library_version()'), $default,
	'the library has the version that is installed');
my $fresh = $node->safe_psql('fresh', $catalog);
cmp_ok(scalar(split /\n/, $fresh), '>', 500, 'the catalog says much of the extension');

#
# A newer library with older SQL objects
#
my $offset = log_offset($node);
foreach my $db ('one', 'two')
{
	$node->safe_psql($db, q{CREATE EXTENSION obix VERSION '1.0'});
	make_outbox($db);
}
$node->wait_for_log(qr/$idles "$_"/, $offset) foreach ('one', 'two');
like(
	slurp_file($node->logfile, $offset),
	qr/LOG:  no worker of obix acts in database "one" for now\n.*DETAIL:  The extension has version 1\.0 there, and the library version 1\.1\.\n.*HINT:  Run ALTER EXTENSION obix UPDATE in that database\./,
	'the log is told what to do');
poll_ok($node, 'postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type ~ '^obix (worker|dispatcher)'},
	'no worker stays');

# before the first sequence that is rolled back, and that nobody fills here
publish($node, $_, 'o', 10) foreach ('one', 'two');
my $busy = log_offset($node);
my @runs = map { start_pgbench($node, $_, "idle-$_", "-c 4 -R 200 -T $seconds", \%load) } ('one', 'two');
finish_pgbench($_) foreach @runs;
is(log_count($node, $idles, $offset), 2, "$seconds s later: one message for each database");
is(log_count($node, $started, $busy), 0, 'no worker was started meanwhile');
unlike_log($node, qr/ERROR|FATAL|PANIC/, 'nothing fails', $busy);
is($node->safe_psql('one', 'SELECT count(*) FROM applied'), '0', 'no handler was called');
cmp_ok($node->safe_psql('one', q{SELECT "cursor" FROM obix.consumer_status WHERE consumer = 'external'}),
	'>', 0, 'those who fetch are served');
$node->safe_psql('one', q{SELECT obix.fill_gaps(), obix.recover_default('o'), obix.ensure_partitions()});
is($node->safe_psql('one', q{SELECT high_water_mark = head FROM obix.outbox_status}),
	't', 'maintenance works where it is called');

# The update waits for no publisher, and no publisher for it.
my $publisher = $node->background_psql('one');
$publisher->query_safe(q{BEGIN; SELECT obix.publish('o', '{"n": 1}'); INSERT INTO o (payload) VALUES ('{"n": 2}')});
my $reader = $node->background_psql('one');
$reader->query_safe(q{BEGIN; SELECT count(*) FROM obix.read('o')});
$offset = log_offset($node);
my $run = start_pgbench($node, 'one', 'update', '-c 4 -R 200 -T 2', \%load);
$node->safe_psql('one', q{SET lock_timeout = '20s'; ALTER EXTENSION obix UPDATE});
$publisher->query_safe('COMMIT');
$reader->query_safe(q{SELECT count(*) FROM obix.read('o'); COMMIT});
$_->quit foreach ($publisher, $reader);
finish_pgbench($run);
is_handled('one', 'after the update');
is($node->safe_psql('one', $catalog), $fresh, 'an update equals an installation');
is($node->safe_psql('one', 'SELECT obix.library_version()'), $default, 'with the new functions');
unlike_log($node, $idles, 'the other database is not mentioned again', $offset);
is($node->safe_psql('two', 'SELECT count(*) FROM applied'), '0', 'and still has no workers');

# Nor can an update be prepared: nobody would be told at COMMIT PREPARED.
($result, $stdout, $stderr) = $node->psql('two', q{BEGIN; ALTER EXTENSION obix UPDATE; PREPARE TRANSACTION 'update'});
like($stderr, qr/cannot PREPARE a transaction that has altered the extension "obix"/, 'an update cannot be prepared');
is($node->safe_psql('two', q{SELECT extversion FROM pg_extension WHERE extname = 'obix'}), '1.0', 'it is rolled back then');

# After a restart, each database is looked at anew.
$offset = log_offset($node);
$node->restart;
$node->wait_for_log(qr/$idles "two"/, $offset);
is_handled('one', 'after a restart');
is(log_count($node, $idles, $offset), 1, 'after a restart: one message');

# An update that is rolled back changes nothing; one that is not does, also for
# what has been published since.
$node->safe_psql('two', 'BEGIN; ALTER EXTENSION obix UPDATE; ROLLBACK');
publish($node, 'two', 'o', 10);
is($node->safe_psql('two', 'SELECT count(*) FROM applied'), '0', 'an update that is rolled back changes nothing');
$node->safe_psql('two', 'ALTER EXTENSION obix UPDATE');
is_handled('two', 'after another update');
is($node->safe_psql('two', $catalog), $fresh, 'which equals an installation as well');

#
# SQL objects that are newer than the library, which comes about while workers run
#
my $change = q{
BEGIN;
UPDATE pg_extension SET extversion = '%s' WHERE extname = 'obix';
CREATE FUNCTION public.news() RETURNS integer LANGUAGE sql AS 'SELECT 1';
ALTER EXTENSION obix ADD FUNCTION public.news();
ALTER EXTENSION obix DROP FUNCTION public.news();
DROP FUNCTION public.news();
COMMIT;};
roll_back_inserts($node, 'two', 'o', 1);    # which is work for one
my $pid = worker_pid($node, 'two');
$offset = log_offset($node);
$node->safe_psql('two', sprintf($change, '1.10'));
$node->wait_for_log($idles, $offset);
like(slurp_file($node->logfile, $offset), qr/\[$pid\].*$idles "two"/, 'a worker that runs leaves');
like(
	slurp_file($node->logfile, $offset),
	qr/DETAIL:  The extension has version 1\.10 there, and the library version 1\.1\.\n.*HINT:  Install that version of the library, and restart the server\./,
	'the log is told which is the older one');
$run = start_pgbench($node, 'two', 'newer', '-c 4 -t 50', \%load);
finish_pgbench($run);
no_dispatchers($node);
is(log_count($node, $idles, $offset), 1, 'once');
$offset = log_offset($node);
$node->restart;
$node->wait_for_log(qr/$idles "two"/, $offset);
is(log_count($node, $idles, $offset), 1, 'and once after a restart');
$node->safe_psql('two', sprintf($change, '1.1'));
is_handled('two', 'with the version of the library');

# Anew instead of updated
$node->safe_psql('postgres', 'CREATE DATABASE anew');
$offset = log_offset($node);
$node->safe_psql('anew', q{CREATE EXTENSION obix VERSION '1.0'; SELECT obix.create_outbox('o')});
$node->wait_for_log(qr/$idles "anew"/, $offset);
$node->safe_psql('anew', 'DROP TABLE o; DROP EXTENSION obix; CREATE EXTENSION obix');
make_outbox('anew');
roll_back_inserts($node, 'anew', 'o', 2);
publish($node, 'anew', 'o', 1);
is_handled('anew', 'created anew');

# Back and forth under load
$offset = log_offset($node);
$run = start_pgbench($node, 'two', 'flap', '-c 4 -R 200 -T 3', \%load);
foreach my $n (1 .. 3)
{
	$node->safe_psql('two', sprintf($change, '1.10'));
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'two' AND backend_type ~ '^obix'});
	$node->safe_psql('two', sprintf($change, '1.1'));
	worker_pid($node, 'two');
}
finish_pgbench($run);
is_handled('two', 'back and forth');
is(log_count($node, $idles, $offset), 3, 'one message each time');
unlike_log($node, qr/ERROR|FATAL|PANIC/, 'and nothing fails', $offset);

$node->stop;
done_testing();
