
# Twenty consumers and some outboxes at the same time, of which most are broken
# in a way of their own: dropped, revoked, or written by hand.  Only these stop.
# And an outbox that its owner keeps locked is in nobody else's way.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main', conf => "obix.dispatch_workers = 1\nobix.lock_timeout = '300 ms'\n");

setup_database($node, $db);

# name => what breaks it, SQL or what to set in a table of obix; how it is to fare: a condition on its status
my $parked = sub { my ($error) = @_; return "state = 'parked' AND last_error ~ '$error'"; };
my %bad    = (
	owner_dropped   => [ 'DROP OWNED BY regress_obix_owner_dropped; DROP ROLE regress_obix_owner_dropped', $parked->('does not exist') ],
	handler_dropped => [ 'DROP FUNCTION test.handler_dropped', $parked->('does not exist') ],
	execute_revoked => [ 'REVOKE ALL ON FUNCTION test.execute_revoked FROM PUBLIC', $parked->('may not execute') ],
	select_revoked  => [ 'REVOKE SELECT ON o FROM regress_obix_select_revoked', $parked->('may not read outbox') ],
	schema_revoked  => [ 'REVOKE ALL ON SCHEMA test FROM regress_obix_schema_revoked', $parked->('may not execute') ],
	policy          => [ 'ALTER TABLE o ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON o USING (true)', $parked->('may not read outbox') ],
	no_handler      => [ q{consumer: handler = NULL}, $parked->('it has no handler') ],
	no_owner        => [ q{consumer: owner = 0}, $parked->('does not exist') ],
	no_outbox       => [ q{consumer: outbox = 0}, $parked->('does not exist') ],
	other_table     => [ q{consumer: outbox = 'test.partitioned'}, $parked->('is not an outbox') ],
	search_path     => [ q{consumer: search_path = 'a,,b'}, $parked->('search_path') ],
	handler_name    => [ q{consumer: handler = 'test.'}, $parked->('invalid name') ],
	types           => [ q{consumer: types = '{{a},{NULL}}'}, $parked->('null array element') ],
	beyond          => [ 'consumer_state: position = 1000000', $parked->('beyond the head') ],
	before          => [ 'consumer_state: position = -1000, scanned = -1000', $parked->('below the oldest kept event') ],
	no_state        => [ 'DELETE FROM obix.consumer_state WHERE id = (SELECT id FROM obix.consumer WHERE consumer = $$no_state$$)', 'state IS NULL' ],

	# these are odd, and do no harm
	batch_size => [ q{consumer: batch_size = 0}, q{state = 'active' AND lag_events = 0} ],
	big_batch  => [ q{consumer: batch_size = 2147483647}, q{state = 'active' AND lag_events = 0} ],
	timeout    => [ q{consumer: timeout = '-1 day', backoff = '-1 year', max_backoff = '178000000 years'}, 'true' ],
	counters   => [ 'consumer_state: scanned = -5, attempts = -7, one_by_one = -3, late = true, parked = true, fetched = -9', q{state = 'active' AND lag_events = 0} ]);

$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o', partition_width => 10, premake => 1);
CREATE TABLE test.applied (consumer text, sequence bigint);
CREATE TABLE test.partitioned (sequence bigint PRIMARY KEY) PARTITION BY HASH (sequence);
GRANT INSERT ON test.applied TO PUBLIC;
GRANT SELECT ON test.partitioned TO PUBLIC});
foreach my $name (sort(keys %bad), 'good1', 'good2')
{
	$node->safe_psql(
		$db, qq{
CREATE ROLE regress_obix_$name } . ($name eq 'policy' ? '' : 'BYPASSRLS') . qq{;
GRANT SELECT ON o TO regress_obix_$name;
GRANT USAGE ON SCHEMA test TO regress_obix_$name;
CREATE FUNCTION test.$name(e obix.event) RETURNS void LANGUAGE sql AS 'INSERT INTO test.applied VALUES (''$name'', e.sequence)';
SET ROLE regress_obix_$name;
SELECT obix.create_consumer('$name', 'o', handler => 'test.$name', backoff => '1 ms')});
}
publish($node, $db, 'o', 1);
consumers_ok($node, $db, 'true', 'lag_events = 0', 'all are served');
no_dispatchers($node);
foreach my $name (sort keys %bad)
{
	my ($break) = @{ $bad{$name} };

	$break = "UPDATE obix.$1 SET $2 WHERE id = (SELECT id FROM obix.consumer WHERE consumer = '$name')"
	  if $break =~ /^(\w+): (.*)/;
	$node->safe_psql($db, $break);
}

# Outboxes that are none, or are broken.
$node->safe_psql(
	$db, q{
CREATE TABLE test.list (sequence bigint PRIMARY KEY, id uuid, type text, key text, payload jsonb, headers jsonb, recorded_at timestamptz) PARTITION BY LIST (sequence);
CREATE TABLE test.by_text (sequence text PRIMARY KEY) PARTITION BY RANGE (sequence);
CREATE TABLE test.plain (sequence bigint PRIMARY KEY);
CREATE TABLE test.bare (LIKE o) PARTITION BY RANGE (sequence);
INSERT INTO obix.outbox (outbox, partition_width, premake) VALUES (0, 1, 1), ('test.list', 1, 1), ('test.by_text', 1, 1), ('test.plain', 1, 1), ('test.bare', 1, 1), ('test.partitioned', 1, 1), ('pg_class', 1, 1), ('obix.outbox_pkey', 1, 1)});

my $offset = log_offset($node);
publish($node, $db, 'o', 30);
roll_back_inserts($node, $db, 'o', 2);
publish($node, $db, 'o', 8);
consumers_ok($node, $db, q{consumer ~ '^good'}, 'lag_events = 0 AND delivered = 39', 'the good ones get everything');
foreach my $name (sort keys %bad)
{
	consumer_ok($node, $db, $name, $bad{$name}[1], $name);
}
is_settled($node, $db, 'o', 'the good outbox is served');
is( $node->safe_psql(
		$db, q{SELECT consumer, count(*), count(DISTINCT sequence) FROM test.applied WHERE consumer ~ '^good' GROUP BY 1 ORDER BY 1}),
	"good1|39|39\ngood2|39|39",
	'once');
$node->restart;
publish($node, $db, 'o', 1);
consumers_ok($node, $db, q{consumer ~ '^good'}, 'lag_events = 0 AND delivered = 40', 'also after a restart');
is_settled($node, $db, 'o', 'when the worker has looked at all outboxes');
is( $node->safe_psql(
		$db, q{SELECT count(*) FROM obix.consumer_status; SELECT count(*) FROM obix.outbox_status WHERE head IS NOT NULL; SELECT count(*) FROM obix.dead_letter}),
	"22\n1\n0",
	'the views show them');
my ($result, $stdout, $stderr) = $node->psql($db, q{SELECT count(*) > 3, count(DISTINCT outbox) FROM obix.partition_status});
is($stdout, 't|1', 'and partitions');
unlike_log($node, qr/PANIC|TRAP|terminated by signal/, 'and the server is well');
foreach my $table ('test.list', 'test.by_text', 'test.plain', 'test.partitioned')
{
	($result, $stdout, $stderr) = $node->psql($db, "SELECT obix.fill_gaps('$table')");
	like($stderr, qr/is not an outbox/, "$table is none");
}
$node->safe_psql($db, 'SELECT obix.fill_gaps(), obix.ensure_partitions(); DROP TABLE test.list, test.by_text, test.bare');

#
# An outbox that somebody keeps locked: the one dispatcher there is goes on with
# others, and no attempt is lost to it.
#
sub state_of_locked
{
	return $node->safe_psql($db,
		q{SELECT s.position, s.attempts, s.failed, s.one_by_one FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'locked'}
	);
}

sub dispatcher_waits
{
	return $node->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event_type = 'Lock'});
}
make_handler($node, $db, 'locked', 'NULL;');
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('locked');
SELECT obix.create_consumer('locked', 'locked', handler => 'test.locked', max_attempts => 1, on_failure => 'dead_letter');
SELECT obix.pause('locked')});
no_dispatchers($node);
publish($node, $db, 'locked', 1);
my $locker = $node->background_psql($db);
$locker->query_safe('BEGIN; LOCK TABLE locked IN ACCESS EXCLUSIVE MODE');
$node->safe_psql($db, q{SELECT obix.resume('locked')});
ok(dispatcher_waits(), 'a dispatcher comes to a locked outbox');
publish($node, $db, 'o', 1);
consumers_ok($node, $db, q{consumer ~ '^good'}, 'lag_events = 0 AND delivered = 41', 'and goes on with others');
is(state_of_locked(), '0|0|0|0', 'that was no attempt');
$locker->query_safe('COMMIT');
consumer_ok($node, $db, 'locked', 'delivered = 1', 'when it is free again, its events are delivered');

# Locked between the transaction that counts the attempt and the one that makes it:
# the first is stopped where it writes the state.
$node->append_conf('postgresql.conf', "obix.lock_timeout = '3 s'");
$node->reload;
$node->safe_psql($db, q{SELECT obix.pause('locked')});
no_dispatchers($node);
publish($node, $db, 'locked', 1);
my $holder = $node->background_psql($db);
$holder->query_safe(q{BEGIN; SELECT s.id FROM obix.consumer_state s JOIN obix.consumer c USING (id) WHERE consumer = 'locked' FOR UPDATE OF s});
$node->safe_psql($db, q{SELECT obix.resume('locked')});
dispatcher_waits();
$locker->{stdin} .= "BEGIN;\nLOCK TABLE locked IN ACCESS EXCLUSIVE MODE;\n";
$locker->{run}->pump_nb;
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_locks WHERE relation = 'locked'::regclass AND mode = 'AccessExclusiveLock' AND NOT granted});
$holder->query_safe('COMMIT');
ok( $node->poll_query_until(
		$db,
		q{SELECT count(*) = 1 FROM pg_locks WHERE relation = 'locked'::regclass AND mode = 'AccessExclusiveLock' AND granted}),
	'an outbox is locked between two transactions of a step');
is(state_of_locked(), '1|1|0|0', 'the attempt is counted');
publish($node, $db, 'o', 1);
consumers_ok($node, $db, q{consumer ~ '^good'}, 'lag_events = 0 AND delivered = 42', 'others go on');
is(state_of_locked(), '1|0|0|0', 'the attempt has been taken back');
$locker->query_safe('COMMIT');
consumer_ok($node, $db, 'locked', 'delivered = 2 AND failed = 0 AND dead_lettered = 0', 'and is made when the outbox is free');
$_->quit foreach ($locker, $holder);

$node->stop;
done_testing();
