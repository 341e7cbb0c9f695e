
# What is dropped leaves nothing behind: database, table, extension.  There is
# room for four outboxes only, so that whatever stayed behind would soon be
# missed.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# with lock waits in the log, for a deadlock in which a worker gave way
my $node = new_node('main', conf => "obix.max_outboxes = 4\nlog_lock_waits = on\n");
my ($result, $stdout, $stderr);

# All four entries must be free.
sub is_all_free
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($db, $name) = @_;

	my ($code, $out, $err) = $node->psql(
		$db, q{
SELECT obix.create_outbox('room_' || g, premake => 0) FROM generate_series(1, 4) g \g /dev/null
SELECT count(obix.publish(('room_' || g)::regclass, '1')) FROM generate_series(1, 4) g;
SELECT obix.drop_outbox(('room_' || g)::regclass) FROM generate_series(1, 4) g \g /dev/null
});
	is("$out$err", '4', $name);
}

#
# DROP DATABASE seconds after activity
#
my $slowest = 0;
foreach my $round (1 .. 6)
{
	$node->safe_psql('postgres', 'CREATE DATABASE busy');
	setup_database($node, 'busy');
	$node->safe_psql(
		'busy', q{
SELECT obix.create_outbox('o', partition_width => 10);
SELECT count(obix.publish('o', '1')) FROM generate_series(1, 100);
BEGIN; INSERT INTO o (payload) VALUES ('1'); ROLLBACK;});
	my $start = time;
	($result, $stdout, $stderr) = $node->psql('postgres', 'DROP DATABASE busy');
	is($stderr, '', "DROP DATABASE, time $round");
	$slowest = time - $start if time - $start > $slowest;
}
note sprintf('slowest DROP DATABASE: %.1f s', $slowest);
ok(no_workers($node), 'no worker stays behind');

# Idle workers must not keep a database either.
$node->safe_psql('postgres',
	q{ALTER SYSTEM SET obix.worker_linger = '4 s'; CREATE DATABASE busy});
$node->reload;
setup_database($node, 'busy');
$node->safe_psql('busy',
	q{SELECT obix.create_outbox('o'); SELECT obix.publish('o', '1')});
worker_pid($node, 'busy');
is($node->psql('postgres', 'DROP DATABASE busy'),
	0, 'DROP DATABASE with a worker running');
$node->safe_psql('postgres', 'ALTER SYSTEM RESET obix.worker_linger');
$node->reload;

# A template with an outbox: each copy has its own, from where it was.
$node->safe_psql('postgres', 'CREATE DATABASE original');
setup_database($node, 'original');
$node->safe_psql('original',
	q{SELECT obix.create_outbox('o', premake => 0); SELECT obix.publish('o', '1')});
no_workers($node);
$node->poll_query_until('postgres',
	q{SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'original'});
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE original');
$node->safe_psql($_, q{SELECT obix.publish('o', '2')})
  foreach ('original', 'copy', 'copy');
is(walk($node, 'original', 'o') . ' ' . walk($node, 'copy', 'o'),
	'2|0|2 3|0|3', 'a copied database numbers its own events');
$node->safe_psql('postgres', 'DROP DATABASE copy');
$node->safe_psql('postgres', 'DROP DATABASE original');

#
# DROP TABLE
#
setup_database($node, 'postgres');
is_all_free('postgres', 'the entries of dropped databases are free');
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('o'); SELECT obix.publish('o', '1')});
my $waiter = start_wait($node, 'postgres', 'o', 1);
$node->safe_psql('postgres', 'DROP TABLE o');
ok( pump_until(
		$waiter->{run},     $waiter->{timeout},
		\$waiter->{stdout}, qr/woken/),
	'DROP TABLE works while a session waits, and ends the waiting');
$waiter->quit;
is($node->safe_psql('postgres', 'SELECT count(*) FROM obix.outbox'),
	'0', 'and leaves no registry row');
$node->safe_psql(
	'postgres', q{
CREATE SCHEMA app;
SELECT obix.create_outbox('app.o'); SELECT obix.publish('app.o', '1');
CREATE ROLE regress_obix_owner;
GRANT CREATE ON SCHEMA public TO regress_obix_owner;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('public.o'); SELECT obix.publish('public.o', '1');
RESET ROLE;
DROP SCHEMA app CASCADE;
DROP OWNED BY regress_obix_owner;
DROP ROLE regress_obix_owner;});
is($node->safe_psql('postgres', 'SELECT count(*) FROM obix.outbox'),
	'0', 'nor do DROP SCHEMA and DROP OWNED');
is_all_free('postgres', 'their entries are free');

# Rolled back, a drop changes nothing.
$node->safe_psql(
	'postgres', q{
SELECT obix.create_outbox('o'); SELECT obix.publish('o', '1');
BEGIN; DROP TABLE o; ROLLBACK;
BEGIN; TRUNCATE o; ROLLBACK;
SELECT obix.publish('o', '2');});
is(walk($node, 'postgres', 'o'), '2|0|2', 'a drop that is rolled back');
$node->safe_psql('postgres', 'DROP TABLE o');

#
# Many cycles.  Of those that do not free their entry the fifth would fail, so a
# few hundred are plenty.
#
my $cycles = 100;
$node->safe_psql(
	'postgres', qq{
CREATE PROCEDURE test.cycles(n integer) LANGUAGE plpgsql AS \$\$
BEGIN
	FOR i IN 1 .. n LOOP
		PERFORM obix.create_outbox('o', premake => 0);
		PERFORM obix.publish('o', '1');
		COMMIT;
		DROP TABLE o;
		COMMIT;
		PERFORM obix.create_outbox('o', premake => 0);
		PERFORM obix.next_sequence('o');
		ROLLBACK;
		PERFORM obix.create_outbox('o', premake => 0);
		PERFORM obix.publish('o', '1');
		DROP TABLE o;
		COMMIT;
		BEGIN
			PERFORM obix.create_outbox('o', premake => 0);
			INSERT INTO o (payload) VALUES ('1');
			RAISE EXCEPTION 'back';
		EXCEPTION WHEN raise_exception THEN
			NULL;
		END;
		COMMIT;
	END LOOP;
END \$\$});
my $start = time;
$node->safe_psql('postgres', "CALL test.cycles($cycles)");
note sprintf('%d cycles in %.1f s', 4 * $cycles, time - $start);
is_all_free('postgres', 'many create and drop cycles leave the entries free');

#
# DROP EXTENSION
#
$node->safe_psql(
	'postgres', q{
SELECT obix.create_outbox('o', partition_width => 10);
SELECT count(obix.publish('o', '1')) FROM generate_series(1, 15);});
($result, $stdout, $stderr) = $node->psql('postgres', 'DROP EXTENSION obix');
like($stderr, qr/ERROR:  cannot drop/, 'DROP EXTENSION is refused while an outbox exists');
publish($node, 'postgres', 'o', 1);
($result, $stdout, $stderr) =
  $node->psql('postgres', 'SET client_min_messages = warning; DROP EXTENSION obix CASCADE');
is($stderr, '', 'DROP EXTENSION CASCADE works');
is($node->safe_psql('postgres', 'SELECT count(*), max(sequence) FROM o'),
	'16|16', 'the events stay');
is( $node->safe_psql(
		'postgres', q{
INSERT INTO o (sequence, id, payload) VALUES (100, gen_random_uuid(), '1');
UPDATE o SET sequence = 17 WHERE sequence = 100;
DELETE FROM o WHERE sequence = 1;
SELECT count(*), max(sequence) FROM o;
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'o'::regclass;
SELECT count(*) FROM pg_event_trigger WHERE evtname LIKE '%obix%';}),
	"16|17\n0\n0",
	'in a plain table');
ok(no_workers($node), 'no worker stays behind');
$node->safe_psql('postgres', 'DROP SCHEMA test CASCADE');

#
# CREATE EXTENSION rolled back
#
$node->safe_psql(
	'postgres', q{
BEGIN;
CREATE EXTENSION obix;
SELECT obix.create_outbox('p'); SELECT obix.publish('p', '1');
ROLLBACK;
BEGIN;
CREATE EXTENSION obix;
SAVEPOINT a;
SELECT obix.create_outbox('p'); INSERT INTO p (payload) VALUES ('1');
ROLLBACK TO a;
COMMIT;
DROP TABLE o;});
is_all_free('postgres', 'CREATE EXTENSION rolled back leaves nothing');

# 200 cycles of the extension, with a worker at its heels.
$start = time;
$node->safe_psql(
	'postgres', q{
DROP EXTENSION obix;
CREATE EXTENSION obix;
SELECT obix.create_outbox('p', partition_width => 5, premake => 1);
SELECT count(obix.publish('p', '1')) FROM generate_series(1, 8);
BEGIN; INSERT INTO p (payload) VALUES ('1'); ROLLBACK;
DROP TABLE p;
} x 200);
note sprintf('200 cycles of the extension in %.1f s', time - $start);
is_all_free('postgres', '200 cycles of the extension leave nothing');
ok(no_workers($node), 'and no worker');

# The extension alone, dropped with outboxes in place.
$node->safe_psql(
	'postgres', q{
SET client_min_messages = warning;
DROP EXTENSION obix CASCADE;
CREATE EXTENSION obix;
SELECT obix.create_outbox('p', partition_width => 5, premake => 1);
SELECT count(obix.publish('p', '1')) FROM generate_series(1, 8);
DROP EXTENSION obix CASCADE;
DROP TABLE p;
CREATE EXTENSION obix;
} x 20);
is_all_free('postgres', 'nor does dropping it with outboxes in place');
unlike_log($node, qr/PANIC|TRAP|terminated by signal|deadlock/,
	'no crash in the log');
unlike_log(
	$node,
	qr/ERROR(?!:  cannot drop|:  the outbox was dropped while waiting)/,
	'and no error but those provoked');

#
# What belongs to a table is dropped in no particular order: its primary keys may
# be gone first, and shared memory may not know where the head is.
#
$node->safe_psql(
	'postgres', q{
SET client_min_messages = warning;
SELECT obix.create_outbox('unknown', partition_width => 10, premake => 1);
SELECT obix.publish('unknown', '1') FROM generate_series(1, 35);
ALTER DATABASE postgres SET obix.enabled = off});
$node->restart;
my $invalid =
  q{UPDATE pg_index SET indisvalid = false WHERE indrelid IN (SELECT relid FROM pg_partition_tree('unknown') WHERE isleaf)};
is( $node->safe_psql(
		'postgres',
		"BEGIN; $invalid; UPDATE obix.outbox SET resolved = 0; DROP TABLE unknown_p0, unknown_p10; SELECT resolved FROM obix.outbox WHERE outbox = 'unknown'::regclass; ROLLBACK"
	),
	'19',
	'partitions are dropped whose primary key is gone, and what they had counts as removed');
$node->safe_psql('postgres', "BEGIN; $invalid; DROP TABLE unknown; COMMIT");
is($node->safe_psql('postgres', q{SELECT count(*) FROM obix.outbox}),
	'0', 'and so is the whole outbox');

$node->stop;
done_testing();
