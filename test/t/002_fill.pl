
# Holes become placeholders, by the worker, at once and only on proof.
# Progress is polled by plain SELECT on the tables: calling obix would wake
# the worker where nobody else did.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');

setup_database($node, 'postgres');

#
# Rolled back at the head, then silence
#
$node->safe_psql('postgres', q{SELECT obix.create_outbox('o')});
publish($node, 'postgres', 'o', 3);
no_workers($node);

my $waiter = start_wait($node, 'postgres', 'o', 3);

roll_back_inserts($node, 'postgres', 'o', 3);
woken($waiter, 'a reader waiting before the holes is woken');
poll_ok($node, 'postgres', 'SELECT count(*) = 6 FROM o',
	'the worker fills what was rolled back, without further traffic');
is( $node->safe_psql(
		'postgres',
		q{SELECT string_agg(sequence::text, ' ' ORDER BY sequence)
FROM o WHERE id = '00000000-0000-0000-0000-000000000000' AND payload IS NULL}),
	'4 5 6',
	'placeholders have the nil id and no payload');
is(walk($node, 'postgres', 'o'), '6|3|6', 'readers get past them');

# The same where it is a session that dies, or an error, that rolls back.
no_workers($node);
my $session = $node->background_psql('postgres', on_error_stop => 0);
my $pid = $session->query_safe('SELECT pg_backend_pid()');
$session->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1'), ('2')});
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
poll_ok($node, 'postgres', 'SELECT count(*) = 8 FROM o',
	'the worker fills what a terminated session had drawn');
$session->{run}->finish;
no_workers($node);
$node->psql('postgres',
	q{INSERT INTO o (payload) SELECT ('{1, x}'::text[])[g]::jsonb FROM generate_series(1, 2) g}
);
poll_ok($node, 'postgres', 'SELECT count(*) > 8 AND count(*) = max(sequence) FROM o',
	'the worker fills what a failing statement had drawn');
is_settled($node, 'postgres', 'o', 'the high-water mark is at the head');

#
# A writer that has drawn and not yet inserted, under traffic
#
my $owner = $node->background_psql('postgres');
my $slow  = $node->background_psql('postgres');
my $drawn = $node->background_psql('postgres');

$owner->query_safe('SELECT pg_advisory_lock(42)');

my $first = $node->safe_psql('postgres', 'SELECT max(sequence) + 1 FROM o');
my $slow_pid = $slow->query_safe('SELECT pg_backend_pid()');
$slow->{stdin} .=
  "INSERT INTO o (payload) VALUES (test.payload_after_lock(42)) RETURNING sequence;\n\\echo inserted\n";
$slow->{run}->pump_nb;
$node->poll_query_until('postgres',
	"SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $slow_pid AND locktype = 'advisory' AND NOT granted)"
) or die 'the slow writer does not wait';
is( $drawn->query_safe(q{BEGIN; SELECT obix.next_sequence('o')}),
	$first + 1,
	'another writer has drawn a sequence and idles');

my $load = start_pgbench(
	$node,
	'postgres',
	'traffic',
	'-c 5 -j 2 -t 300',
	{
		'publish@4' => "SELECT obix.publish('o', '1');\n",
		'insert@2'  => "INSERT INTO o (payload) VALUES ('1');\n",
		'rollback@2' =>
		  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n",
		'fill@4' => "SELECT obix.fill_gaps('o');\n",
		'read@2' => "SELECT count(*) FROM obix.read('o', $first - 1);\n"
	});
finish_pgbench($load);
is( $node->safe_psql(
		'postgres', q{SELECT count(*) FROM obix.read('o', } . ($first - 1) . ')'),
	'0',
	'readers stop before it all that time');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM o WHERE sequence IN ($first, $first + 1)"),
	'0',
	'no placeholder took its sequence');
is( $node->safe_psql(
		'postgres',
		"SELECT frontier = $first - 1 AND high_water_mark = $first - 1 AND frontier_pid = $slow_pid FROM obix.outbox_status"
	),
	't',
	'the status names the session that holds the frontier');
is( $node->safe_psql(
		'postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid <> $slow_pid"
	),
	'0',
	'nobody blocks on it');

$waiter = start_wait($node, 'postgres', 'o', $first - 1);
$owner->query_safe('SELECT pg_advisory_unlock(42)');
ok( pump_until(
		$slow->{run},     $slow->{timeout},
		\$slow->{stdout}, qr/^$first\ninserted/m),
	'the slow writer commits with its sequence');
woken($waiter, 'a reader of that position is woken');
$drawn->query_safe('INSERT INTO o (sequence, payload) VALUES ('
	  . ($first + 1)
	  . q{, '"drawn"'); COMMIT});
is_settled($node, 'postgres', 'o', 'then everything can be read');
is( $node->safe_psql(
		'postgres',
		"SELECT payload FROM obix.read('o', $first - 1, 2)"),
	qq{"after lock"\n"drawn"},
	'both slow events are delivered at their place');
like(
	walk($node, 'postgres', 'o'),
	qr/^(\d+)\|\d+\|\1$/,
	'and the outbox is contiguous');
$_->quit foreach ($owner, $slow, $drawn);

#
# Committed without using what was drawn, then a restart
#
# A prepared transaction below keeps the worker from dealing with these before
# the server goes down.
$node->safe_psql(
	'postgres', q{
SELECT obix.create_outbox('s');
SELECT obix.create_outbox('t');
SELECT obix.publish('s', '1');
SELECT obix.publish('t', '1');
CREATE UNIQUE INDEX ON s_p0 (key);
INSERT INTO s (key, payload) VALUES ('a', '1');
CREATE FUNCTION test.skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER a_skip BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.type = 'skip') EXECUTE FUNCTION test.skip();
BEGIN;
INSERT INTO s (payload) VALUES ('"prepared"');
PREPARE TRANSACTION 'holds s';
BEGIN;
INSERT INTO t (payload) VALUES ('"prepared"');
PREPARE TRANSACTION 'holds t';

INSERT INTO s (key, payload) VALUES ('a', '2'), ('b', '2') ON CONFLICT DO NOTHING;
SELECT obix.next_sequence('s');
BEGIN;
INSERT INTO s (payload) VALUES ('3');
SAVEPOINT a;
INSERT INTO s (payload) VALUES ('4'), ('5');
ROLLBACK TO a;
INSERT INTO s (payload) VALUES ('6');
COMMIT;
MERGE INTO s USING (VALUES (1), (2)) v (n) ON false
WHEN NOT MATCHED AND v.n = 1 THEN INSERT (payload) VALUES ('7')
WHEN NOT MATCHED THEN DO NOTHING;
INSERT INTO t (type, payload) VALUES ('skip', '1'), ('keep', '1'), ('skip', '1');
INSERT INTO t (type, payload) VALUES ('skip', '1');});

# s: 1 2, 3 prepared, 4 hole, 5, 6 hole, 7, 8 9 holes, 10, 11
# t: 1, 2 prepared, 3 hole, 4, 5 6 holes
my $sequences =
  q{SELECT (SELECT string_agg(sequence::text, ' ' ORDER BY sequence) FROM s), (SELECT string_agg(sequence::text, ' ' ORDER BY sequence) FROM t)};

is($node->safe_psql('postgres', $sequences),
	'1 2 5 7 10 11|1 4', 'committed with holes behind a prepared transaction');
foreach my $how ('before', 'after')
{
	is( $node->safe_psql(
			'postgres',
			q{SELECT obix.high_water_mark('s'), obix.high_water_mark('t')}),
		'2|1',
		"the high-water mark stands before the prepared sequence $how the restart");
	$node->restart if $how eq 'before';
}
is($node->safe_psql('postgres', 'SELECT obix.fill_gaps()'),
	'0', 'nothing behind it is filled');
$node->safe_psql('postgres', q{COMMIT PREPARED 'holds s'});
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'holds t'});
poll_ok($node, 'postgres',
	'SELECT (SELECT count(*) FROM s) = 11 AND (SELECT count(*) = max(sequence) FROM t)',
	'the worker fills them once it is decided');
is(walk($node, 'postgres', 's'), '11|4|11', 'readers get past them');
# that 5 and 6 of t had been drawn was forgotten: nothing stands above them
is(walk($node, 'postgres', 't'),
	'4|2|4', 'and those that a trigger suppressed');

# Holes and a restart, with nothing that holds the worker back.
$node->safe_psql(
	'postgres', q{
BEGIN;
INSERT INTO s (payload) SELECT to_jsonb(g) FROM generate_series(1, 10) g;
SAVEPOINT a;
INSERT INTO s (payload) SELECT to_jsonb(g) FROM generate_series(1, 10) g;
ROLLBACK TO a;
SELECT obix.publish('s', '"last"');
COMMIT});
$node->restart;
is( $node->safe_psql('postgres', q{SELECT obix.high_water_mark('s') >= 21}),
	't', 'the high-water mark is right at once after a restart');
is_settled($node, 'postgres', 's', 'and reaches the head by itself');
is(walk($node, 'postgres', 's'),
	'32|14|32', 'everything is there after the restart');

$node->stop;
done_testing();
