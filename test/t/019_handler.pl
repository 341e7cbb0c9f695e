
# Handlers, called by dispatchers: every event once and in order; a batch
# first, then one by one; what counts as a failed attempt and what comes of it;
# pause, gate and the global switch; nothing that a function leaves in the
# session is met by the next one.
#
# What was called, whether it was rolled back or not, is counted by sequences.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node(
	'main', conf => q{
obix.worker_linger = '200 ms'
autovacuum = off
checkpoint_timeout = '1h'
});

setup_database($node, $db);
$node->safe_psql(
	$db, q{
CREATE TABLE test.applied (consumer text, sequence bigint, payload jsonb, n bigserial);
CREATE SEQUENCE test.calls;
CREATE FUNCTION test.note(consumer text, e obix.event) RETURNS void
LANGUAGE sql AS 'INSERT INTO test.applied (consumer, sequence, payload) VALUES (consumer, e.sequence, e.payload)';

-- how often a sequence was drawn from
CREATE FUNCTION test.drawn(name regclass) RETURNS bigint
LANGUAGE sql AS 'SELECT coalesce(pg_sequence_last_value(name), 0)'});

# What was applied by a consumer, in that order.
sub applied
{
	my ($consumer) = @_;

	return $node->safe_psql($db,
		"SELECT coalesce(string_agg(sequence::text, ' ' ORDER BY n), '') FROM test.applied WHERE consumer = '$consumer'"
	);
}

sub drawn
{
	my ($name) = @_;

	return $node->safe_psql($db, "SELECT test.drawn('test.$name')");
}

#
# Basics
#
$node->safe_psql($db, q{SELECT obix.create_outbox('o')});
make_handler($node, $db, 'one',   q{PERFORM test.note('one', e);});
make_handler($node, $db, 'typed', q{PERFORM test.note('typed', e);});
make_handler(
	$node, $db, 'many', q{
PERFORM nextval('test.calls');
PERFORM test.note('many', x) FROM unnest(e) x;}, kind => 'batch');
publish($node, $db, 'o', 3);
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('one', 'o', handler => 'test.one');
SELECT obix.create_consumer('many', 'o', batch_handler => 'test.many', start_after => 2);
SELECT obix.create_consumer('typed', 'o', handler => 'test.typed', types => '{a,b}')});
consumers_ok($node, $db, 'true', 'lag_events = 0', 'handlers get what was there');
roll_back_inserts($node, $db, 'o', 2);
$node->safe_psql(
	$db, q{
SELECT obix.publish('o', '"x"', type => 'a'), obix.publish('o', '"x"', type => 'c'), obix.publish('o', '"x"', type => 'b')}
);
consumers_ok($node, $db, 'true', 'lag_events = 0', 'and what comes');
is(applied('one'),   '1 2 3 6 7 8', 'each event once, in order, without placeholders');
is(applied('many'),  '3 6 7 8',     'a batch handler alone too, from its start on');
is(applied('typed'), '6 8',         'only those of the types');
is( $node->safe_psql(
		$db,
		q{SELECT consumer, state, delivered, failed, dead_lettered, lag_events, lag, attempts, last_error IS NULL, last_event_at = (SELECT recorded_at FROM o WHERE sequence = 8)
FROM obix.consumer_status ORDER BY consumer}),
	"many|active|4|0|0|0|00:00:00|0|t|t\none|active|6|0|0|0|00:00:00|0|t|t\ntyped|active|2|0|0|0|00:00:00|0|t|t",
	'the status counts them');

# An event of 1 MB, and JSON null, which is a payload.
$node->safe_psql($db,
	q{SELECT obix.publish('o', to_jsonb(repeat('x', 1000000))), obix.publish('o', 'null')});
consumers_ok($node, $db, 'true', 'lag_events = 0', 'a large event is delivered');
is( $node->safe_psql(
		$db,
		q{SELECT count(*), bool_and(a.payload = o.payload) FROM test.applied a JOIN o USING (sequence) WHERE consumer = 'one'}
	),
	'8|t',
	'payloads are what was published');

# A batch of more than work_mem waits in a file, also if there are no functions
# for batches.
make_handler($node, $db, 'heavy_one', q{PERFORM test.note('heavy_one', e);});
make_handler(
	$node, $db, 'heavy_many',
	q{PERFORM test.note('heavy_many', x) FROM unnest(e) x;},
	kind => 'batch');
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('heavy');
SELECT obix.create_consumer('heavy_one', 'heavy', handler => 'test.heavy_one');
SELECT obix.create_consumer('heavy_many', 'heavy', batch_handler => 'test.heavy_many');
});
$node->safe_psql(
	$db, q{
SELECT count(obix.publish('heavy', to_jsonb((SELECT string_agg(md5(h::text || g), '') FROM generate_series(1, 3000) h))))
FROM generate_series(1, 60) g;});
consumers_ok($node, $db, q{consumer LIKE 'heavy%'},
	'lag_events = 0', 'batches that do not fit into memory are delivered');
is( $node->safe_psql(
		$db,
		q{SELECT a.consumer, count(*), bool_and(a.payload = o.payload), min(s.failed)
FROM test.applied a JOIN heavy o USING (sequence) JOIN obix.consumer_status s USING (consumer)
WHERE consumer LIKE 'heavy%' GROUP BY 1 ORDER BY 1}
	),
	"heavy_many|60|t|0\nheavy_one|60|t|0",
	'at once, and as they are');
$node->safe_psql($db, q{SELECT obix.drop_outbox('heavy', force => true)});

# What a handler publishes follows in the same transaction.
$node->safe_psql($db, q{SELECT obix.create_outbox('next')});
make_handler($node, $db, 'chain',
	q{PERFORM obix.publish('next', e.payload, key => e.sequence::text); PERFORM obix.publish('next', '"more"');}
);
make_handler($node, $db, 'chained', q{PERFORM test.note('chained', e);});
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('chain', 'o', handler => 'test.chain');
SELECT obix.create_consumer('chained', 'next', handler => 'test.chained')});
publish($node, $db, 'o', 100);
consumer_ok(
	$node, $db, 'chain',
	'lag_events = 0 AND delivered = 108',
	'a handler that publishes');
consumer_ok(
	$node, $db, 'chained',
	'lag_events = 0 AND delivered = 216',
	'and one that gets its events');
is( $node->safe_psql(
		$db,
		q{SELECT count(*) FROM (SELECT key::bigint, lag(key::bigint) OVER (ORDER BY sequence) AS before FROM next WHERE key IS NOT NULL) k WHERE before >= key}
	),
	'0',
	'keep the order');

# A handler may use the consumer that it is called for.
make_handler(
	$node, $db, 'own', q{
PERFORM test.note('own', e);
IF e.sequence = 2 THEN PERFORM obix.pause('own'); END IF;
IF e.sequence = 3 THEN PERFORM obix.seek('own', 6); END IF;
IF e.sequence = 8 THEN PERFORM obix.drop_consumer('own'); END IF;});
$node->safe_psql($db,
	q{SELECT obix.create_consumer('own', 'o', handler => 'test.own', batch_size => 1)});
consumer_ok(
	$node, $db, 'own',
	q{state = 'paused' AND "cursor" = 2},
	'a handler can pause its consumer');
$node->safe_psql($db, q{SELECT obix.resume('own')});
poll_ok($node, $db, q{SELECT count(*) = 0 FROM obix.consumer WHERE consumer = 'own'},
	'and drop it');
is(applied('own'), '1 2 3 7 8', 'and move it');
$node->safe_psql($db, q{SELECT obix.drop_consumer(consumer) FROM obix.consumer});

#
# Batch first, then one by one: event 37 of 100 is poison
#
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('hundred');
CREATE SEQUENCE test.batches;
CREATE SEQUENCE test.poison;
CREATE SEQUENCE test.batch_at;
CREATE SEQUENCE test.single_at MAXVALUE 1000000});
make_handler(
	$node, $db, 'hundred', q{
IF test.drawn('test.single_at') = 0 THEN PERFORM setval('test.single_at', nextval('test.calls')); END IF;
INSERT INTO test.applied (consumer, sequence) VALUES ('hundred', e.sequence);
IF e.payload = '37' THEN
	PERFORM nextval('test.poison');
	RAISE EXCEPTION 'poison';
END IF;});
make_handler(
	$node, $db, 'hundreds', q{
PERFORM nextval('test.batches'), setval('test.batch_at', nextval('test.calls'));
INSERT INTO test.applied (consumer, sequence) SELECT 'hundred', x.sequence FROM unnest(e) x;
IF EXISTS (SELECT FROM unnest(e) x WHERE x.payload = '37') THEN RAISE EXCEPTION 'poison among %', cardinality(e); END IF;},
	kind => 'batch');
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('hundred', 'hundred', handler => 'test.hundred', batch_handler => 'test.hundreds',
	on_failure => 'dead_letter', max_attempts => 3, backoff => '20 ms')});
no_dispatchers($node);
publish($node, $db, 'hundred', 100);
consumer_ok(
	$node, $db, 'hundred',
	'lag_events = 0 AND dead_lettered = 1',
	'event 37 of 100 is poison');
is( $node->safe_psql(
		$db,
		q{SELECT count(*), count(DISTINCT sequence), min(sequence), max(sequence), sum(sequence) FROM test.applied WHERE consumer = 'hundred'}
	),
	'99|99|1|100|5013',
	'99 others are applied once');
is(drawn('batches'), '1', 'the batch handler was called once');
ok(drawn('batch_at') < drawn('single_at'), 'before the handler');
is(drawn('poison'), '3', 'the poison was tried as often as it may');
is( $node->safe_psql(
		$db,
		q{SELECT consumer, sequence, payload, state, attempts, error, id = (SELECT id FROM hundred WHERE sequence = 37) FROM obix.dead_letter}
	),
	'hundred|37|37|failed|3|poison|t',
	'and is a dead letter');
is( $node->safe_psql(
		$db,
		q{SELECT delivered, failed, dead_lettered, attempts, last_error FROM obix.consumer_status WHERE consumer = 'hundred'}
	),
	'99|3|1|0|poison',
	'the status says so');
publish($node, $db, 'hundred', 30);
consumer_ok($node, $db, 'hundred', 'lag_events = 0 AND delivered = 129', 'then batches go on');
is(drawn('batches'), '2', 'as batches');

# Requeued, it has all its attempts again, goes before everything else, and to
# the handler.
make_handler($node, $db, 'hundred', q{PERFORM test.note('requeued', e);});
$node->safe_psql($db, q{SELECT obix.requeue('hundred', 37)});
consumer_ok(
	$node, $db, 'hundred',
	'delivered = 130 AND late_ranges = 0',
	'a dead letter is delivered again');
is($node->safe_psql($db, 'SELECT count(*) FROM obix.dead_letter'), '0', 'and is none any more');
is(applied('requeued'),                                            '37', 'it was that event');
$node->safe_psql($db, q{SELECT obix.drop_consumer('hundred')});

# Where there is a batch handler alone, it gets the events one by one.
$node->safe_psql($db, q{CREATE SEQUENCE test.sizes});
make_handler(
	$node, $db, 'lone_batch', q{
PERFORM nextval('test.sizes');
PERFORM test.note('lone_batch', x) FROM unnest(e) x;
IF EXISTS (SELECT FROM unnest(e) x WHERE x.payload = '3') THEN RAISE EXCEPTION 'poison'; END IF;},
	kind => 'batch');
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('lone');
SELECT obix.create_consumer('lone_batch', 'lone', batch_handler => 'test.lone_batch',
	on_failure => 'dead_letter', max_attempts => 1)});
publish($node, $db, 'lone', 5);
consumer_ok(
	$node, $db, 'lone_batch',
	'lag_events = 0 AND dead_lettered = 1',
	'a batch handler alone');
is(applied('lone_batch'), '1 2 4 5', 'gets events one by one after a failure');
is(drawn('sizes'),        '6',       'in one batch and five calls');
$node->safe_psql($db, q{SELECT obix.drop_consumer('lone_batch')});

#
# What counts as a failed attempt: event 2 of 3 is poison
#
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('three');
CREATE TABLE test.deferred (n integer, CONSTRAINT deferred_key UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)}
);
my %poisons = (
	error   => [ q{RAISE EXCEPTION 'this fails';},                          'this fails' ],
	long    => [ q{RAISE EXCEPTION '%', repeat('é', 10000);},               '(é){100,}' ],
	null    => [ q{RAISE EXCEPTION USING ERRCODE = 'P0001', MESSAGE = '';}, '' ],
	timeout => [ q{PERFORM pg_sleep(600);}, 'longer than its timeout of 200 ms' ],
	# each timeout is caught, until the process is terminated
	stubborn => [
		q{LOOP BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP;},
		'process ended' ],
	# caught once: it has been too long all the same
	catching => [
		q{BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN NULL; END;},
		'longer than its timeout' ],
	deferred      => [ q{INSERT INTO test.deferred VALUES (1), (1);}, 'deferred_key' ],
	slow_deferred => [ q{INSERT INTO test.slow VALUES (1);}, 'longer than its timeout' ],
	# the trigger defers itself once more, to the commit
	slow_commit => [ q{INSERT INTO test.slow_commit VALUES (1);}, 'longer than its timeout' ],
	commits     => [ q{COMMIT;},   'invalid transaction termination' ],
	rolls_back  => [ q{ROLLBACK;}, 'invalid transaction termination' ],
	suicide     => [
		q{PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(600);},
		'process ended' ],
	cancel =>
	  [ q{PERFORM pg_cancel_backend(pg_backend_pid()); PERFORM pg_sleep(600);}, 'cancel' ],
	memory        => [ q{RAISE out_of_memory;},                          'out_of_memory' ],
	allocation    => [ q{PERFORM array_fill(1, ARRAY[100000000, 100]);}, '' ],
	stack         => [ q{PERFORM test.deeper();},                        'stack depth' ],
	serialization => [ q{RAISE serialization_failure;}, 'serialization_failure' ]);
$node->safe_psql(
	$db, q{
CREATE FUNCTION test.deeper() RETURNS void LANGUAGE plpgsql AS 'BEGIN PERFORM test.deeper(); END';
CREATE TABLE test.slow (n integer);
CREATE FUNCTION test.sleep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(600); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER sleep AFTER INSERT ON test.slow DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION test.sleep();
CREATE TABLE test.slow_commit (n integer);
CREATE FUNCTION test.sleep_again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF new.n = 1 THEN
		SET CONSTRAINTS ALL DEFERRED;
		INSERT INTO test.slow_commit VALUES (2);
	ELSE
		PERFORM pg_sleep(600);
	END IF;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER sleep AFTER INSERT ON test.slow_commit DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION test.sleep_again()}
);
foreach my $name (sort keys %poisons)
{
	$node->safe_psql($db, "CREATE SEQUENCE test.p_${name}_calls");
	make_handler($node, $db, "p_$name",
		"IF e.payload = '2' THEN PERFORM nextval('test.p_${name}_calls'); $poisons{$name}[0] END IF; PERFORM test.note('p_$name', e);"
	);
	$node->safe_psql($db,
		"SELECT obix.create_consumer('p_$name', 'three', handler => 'test.p_$name', timeout => '200 ms', max_attempts => 2, backoff => '20 ms', on_failure => 'dead_letter')"
	);
}
make_handler($node, $db, 'good', q{PERFORM test.note('good', e);});
$node->safe_psql($db, q{SELECT obix.create_consumer('good', 'three', handler => 'test.good')});
publish($node, $db, 'three', 3);
consumers_ok(
	$node, $db,
	q{consumer ~ '^p_'},
	'lag_events = 0 AND dead_lettered = 1',
	'every way to fail ends in a dead letter');
foreach my $name (sort keys %poisons)
{
	is(applied("p_$name"), '1 3', "$name: the others are applied once");
	# one call in the batch, and each attempt
	is(drawn("p_${name}_calls"), '3', "$name: it was tried as often as it may");
	like(
		$node->safe_psql(
			$db,
			"SELECT sequence, attempts, error FROM obix.dead_letter WHERE consumer = 'p_$name'"
		),
		qr/^2\|2\|.*$poisons{$name}[1]/s,
		"$name: the dead letter says why");
}
consumer_ok($node, $db, 'good', 'lag_events = 0 AND delivered = 3', 'others go on');
$node->safe_psql($db, q{SELECT obix.drop_consumer(consumer) FROM obix.consumer});

#
# Stop and resume
#
make_handler(
	$node, $db, 'stop', q{
IF e.payload = '2' THEN PERFORM nextval('test.stop_calls'); RAISE EXCEPTION 'no'; END IF;
PERFORM test.note('stop', e);});
make_handler(
	$node, $db, 'suicidal', q{
IF e.payload = '2' THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(600); END IF;
PERFORM test.note('suicidal', e);});
$node->safe_psql(
	$db, q{
CREATE SEQUENCE test.stop_calls;
SELECT obix.create_consumer('stop', 'three', handler => 'test.stop', max_attempts => 2, backoff => '20 ms');
SELECT obix.create_consumer('suicidal', 'three', handler => 'test.suicidal', max_attempts => 2, backoff => '20 ms')}
);
consumers_ok(
	$node, $db, 'true',
	q{state = 'stopped' AND attempts = 2 AND attempt_sequence = 2 AND "cursor" = 1},
	'after max_attempts it stops');
is( $node->safe_psql(
		$db, q{SELECT last_error FROM obix.consumer_status WHERE consumer = 'stop'}),
	'no',
	'and says why');
publish($node, $db, 'three', 1);
no_dispatchers($node);
is(drawn('stop_calls'), '3', 'and is not called any more');
$node->safe_psql($db, q{SELECT obix.resume('stop')});
consumer_ok($node, $db, 'stop', q{state = 'stopped'}, 'resumed in vain, it stops again');
is(drawn('stop_calls'), '5', 'after as many attempts');
make_handler($node, $db, $_, qq{PERFORM test.note('$_', e);}) foreach ('stop', 'suicidal');
$node->safe_psql($db, q{SELECT obix.resume(consumer) FROM obix.consumer});
consumers_ok(
	$node, $db, 'true',
	q{state = 'active' AND lag_events = 0},
	'mended and resumed, it goes on');
is(applied($_), '1 2 3 4', 'where it was') foreach ('stop', 'suicidal');

# max_attempts NULL never gives up; it waits longer each time.
make_handler($node, $db, 'stop',
	q{IF e.payload = '5' THEN PERFORM nextval('test.forever'); RAISE EXCEPTION 'no'; END IF;});
$node->safe_psql(
	$db, q{
CREATE SEQUENCE test.forever;
SELECT obix.alter_consumer('stop', backoff => '1 ms', max_backoff => '2 ms', clear => '{max_attempts}');
SELECT obix.publish('three', '5')});
consumer_ok(
	$node, $db, 'stop',
	q{state = 'retrying' AND attempts > 100 AND failed > 100 AND retry_at IS NOT NULL},
	'without max_attempts it tries for ever');
$node->safe_psql($db,
	q{SELECT obix.alter_consumer('stop', backoff => '1 h', max_backoff => '1 h')});
consumer_ok(
	$node,
	$db,
	'stop',
	q{state = 'retrying' AND retry_at > now() + interval '20 min' AND retry_at < now() + interval '61 min'},
	'and waits as long as it is told');
no_dispatchers($node);
my $forever = drawn('forever');
publish($node, $db, 'three', 1);
consumer_ok($node, $db, 'suicidal', 'lag_events = 0', 'which holds up nobody');
no_dispatchers($node);
is(drawn('forever'), $forever, 'nor does it wake up for another event');
$node->safe_psql($db, q{SELECT obix.drop_consumer(consumer) FROM obix.consumer});

#
# pause and resume
#
$node->safe_psql($db, q{SELECT obix.create_outbox('p')});
make_handler(
	$node, $db, 'paused', q{
IF e.payload = '"lock"' THEN PERFORM pg_advisory_xact_lock(1); END IF;
PERFORM test.note('paused', e);});
make_handler($node, $db, 'not_paused', q{PERFORM test.note('not_paused', e);});
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('paused', 'p', handler => 'test.paused');
SELECT obix.create_consumer('not_paused', 'p', handler => 'test.not_paused');
SELECT obix.pause('paused')});
publish($node, $db, 'p', 2);
consumer_ok($node, $db, 'not_paused', 'lag_events = 0', 'one of two is paused');
no_dispatchers($node);
is( $node->safe_psql(
		$db,
		q{SELECT state, "cursor", lag_events, lag > '0' FROM obix.consumer_status WHERE consumer = 'paused'}
	),
	'paused|0|2|t',
	'it keeps its place');
$node->safe_psql($db, q{SELECT obix.resume('paused')});
consumer_ok($node, $db, 'paused', q{state = 'active' AND lag_events = 0},
	'resumed, it goes on');

# What is being delivered when it is paused may end.
my $holder = $node->background_psql($db);
$holder->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql($db, q{SELECT obix.publish('p', '"lock"')});
poll_ok(
	$node,
	$db,
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event = 'advisory'},
	'a handler is running');
like(
	$node->safe_psql(
		$db,
		q{SELECT query FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event = 'advisory'}
	),
	qr/consumer "paused": test.paused/,
	'pg_stat_activity shows which');
is( $node->safe_psql(
		$db,
		q{SELECT dispatcher_pid = (SELECT pid FROM pg_stat_activity WHERE wait_event = 'advisory') FROM obix.consumer_status WHERE consumer = 'paused'}
	),
	't',
	'and the status in which process');
$node->safe_psql($db, q{SELECT obix.pause('paused'); SELECT obix.publish('p', '4')});
consumer_ok(
	$node, $db, 'not_paused',
	'lag_events = 0',
	'pausing it waits for nobody, and others go on');
$holder->query_safe('SELECT pg_advisory_unlock(1)');
no_dispatchers($node);
is(applied('paused'), '1 2 3', 'what was being delivered is, and no more');
$node->safe_psql($db, q{SELECT obix.resume('paused')});
consumer_ok($node, $db, 'paused', 'lag_events = 0', 'resumed again');
is(applied('paused'), '1 2 3 4', 'each event came once');

#
# The global switch
#
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 0');
$node->reload;
$node->poll_query_until($db, q{SELECT current_setting('obix.dispatch_workers') = '0'});
publish($node, $db, 'p', 5);
ok(no_dispatchers($node), 'switched off, no dispatcher runs');
is( $node->safe_psql(
		$db, q{SELECT DISTINCT "cursor", lag_events, state FROM obix.consumer_status}),
	'4|5|active',
	'and nothing is delivered');
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 2');
$node->reload;
consumers_ok($node, $db, 'true', 'lag_events = 0', 'switched on, everything is');

# Off while a handler runs: it ends, and then the dispatcher leaves.
$holder->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql($db, q{SELECT obix.publish('p', '"lock"')});
$node->poll_query_until($db,
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND wait_event = 'advisory'}
);
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 0');
$node->reload;
$holder->query_safe('SELECT pg_advisory_unlock(1)');
ok(no_dispatchers($node), 'switched off while a handler runs, the dispatcher leaves');
is(applied('paused'), '1 2 3 4 5 6 7 8 9 10', 'after it has ended');
publish($node, $db, 'p', 1);
$node->append_conf('postgresql.conf', 'obix.dispatch_workers = 2');
$node->reload;
consumers_ok($node, $db, 'true', 'lag_events = 0', 'and then goes on');
$holder->quit;
$node->safe_psql($db, q{SELECT obix.drop_consumer(consumer) FROM obix.consumer});

#
# gate
#
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('g');
CREATE TABLE test.flag (open boolean);
INSERT INTO test.flag VALUES (false)});
make_handler(
	$node, $db, 'gate', q{
RAISE LOG 'gate asked';
RETURN (SELECT open FROM test.flag);}, kind => 'gate');
make_handler($node, $db, 'gated',   q{PERFORM test.note('gated', e);});
make_handler($node, $db, 'ungated', q{PERFORM test.note('ungated', e);});
no_workers($node);
my $offset = log_offset($node);
$node->safe_psql(
	$db, q{
SELECT obix.create_consumer('gated', 'g', handler => 'test.gated', gate => 'test.gate');
SELECT obix.create_consumer('ungated', 'g', handler => 'test.ungated')});
publish($node, $db, 'g', 3);
consumer_ok($node, $db, 'ungated', 'lag_events = 0', 'one of two has a gate that is closed');
$node->wait_for_log(qr/(gate asked.*){2}/s, $offset);
no_workers($node);
$offset = log_offset($node);
my $row =
  q{SELECT ctid, xmin FROM obix.consumer_state WHERE id = (SELECT id FROM obix.consumer WHERE consumer = 'gated')};
publish($node, $db, 'g', 1);
consumer_ok($node, $db, 'ungated', 'lag_events = 0', 'more events come');
my $asked  = log_count($node, qr/gate asked/, $offset);
my $before = $node->safe_psql($db, "SELECT pg_current_wal_insert_lsn(); $row");
$node->wait_for_log(qr/(gate asked.*){@{[$asked + 3]}}/s, $offset);
is($node->safe_psql($db, "SELECT pg_current_wal_insert_lsn(); $row"),
	$before, 'asking costs nothing but the call');
is( $node->safe_psql(
		$db,
		q{SELECT state, "cursor", lag_events FROM obix.consumer_status WHERE consumer = 'gated'}
	),
	'active|0|4',
	'the consumer keeps its place');

# It is asked once a second at most.  Any line may have come late into the log, so
# what counts is how many there are.
my @times;
foreach my $line (grep { /gate asked/ } split /\n/, slurp_file($node->logfile, $offset))
{
	$line =~ /^\S+ (\d+):(\d+):(\d+\.\d+) / or next;
	push @times, 3600 * $1 + 60 * $2 + $3;
}
my $span = $times[-1] - $times[0];
$span += 24 * 3600 if $span < 0;
note sprintf('the gate was asked %d times in %.1f s', scalar @times, $span);
cmp_ok($#times, '<=', $span + 1, 'the gate is asked once a second at most');
$node->safe_psql($db, 'UPDATE test.flag SET open = NULL');
$asked = log_count($node, qr/gate asked/, $offset);
$node->wait_for_log(qr/(gate asked.*){@{[$asked + 2]}}/s, $offset);
is(applied('gated'), '', 'NULL is closed');
$node->safe_psql($db, 'UPDATE test.flag SET open = true');
consumer_ok($node, $db, 'gated', 'lag_events = 0', 'it opens');
is(applied('gated'), '1 2 3 4', 'and everything comes');
no_dispatchers($node);
$asked = log_count($node, qr/gate asked/, $offset);
publish($node, $db, 'g', 500);
consumer_ok($node, $db, 'gated', 'lag_events = 0 AND delivered = 504', 'an open gate');
cmp_ok(log_count($node, qr/gate asked/, $offset) - $asked,
	'<', 100, 'is not asked for every event');

# One that fails parks the consumer.
make_handler($node, $db, 'gate', q{RAISE EXCEPTION 'gate is stuck';}, kind => 'gate');
publish($node, $db, 'g', 1);
consumer_ok(
	$node, $db, 'gated',
	q{state = 'parked' AND last_error = 'gate is stuck' AND attempts = 0 AND lag_events = 1},
	'a gate that fails parks the consumer');
make_handler($node, $db, 'gate', q{RETURN true;}, kind => 'gate');
$node->safe_psql($db, q{SELECT obix.resume('gated')});
consumer_ok($node, $db, 'gated', q{state = 'active' AND lag_events = 0}, 'until it is mended');
$node->safe_psql($db, q{SELECT obix.drop_consumer(consumer) FROM obix.consumer});

#
# What a handler leaves in its session is gone for the next one: here at the
# end of its call, and where a deferred trigger defers itself once more, at
# commit.  One dispatcher serves both.
#
no_dispatchers($node);
$node->append_conf('postgresql.conf',
	"obix.dispatch_workers = 1\nobix.worker_linger = '4 s'\n");
$node->reload;
$node->poll_query_until($db, q{SELECT current_setting('obix.dispatch_workers') = '1'});
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('first');
SELECT obix.create_outbox('second');
CREATE TABLE test.pids (consumer text, pid integer);
CREATE TABLE test.seen (name text, value text);
CREATE SEQUENCE test.session_sequence;
CREATE FUNCTION test.leave() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	SET search_path = nowhere;
	SET LOCAL statement_timeout = '1 h';
	SET work_mem = '64 kB';
	SET default_transaction_read_only = on;
	SET default_transaction_isolation = 'serializable';
	SET synchronous_commit = off;
	PERFORM pg_catalog.set_config('my.setting', 'leaked', false);
	CREATE TEMP TABLE leaked (n integer);
	EXECUTE 'PREPARE leaked AS SELECT 1';
	PERFORM pg_catalog.pg_advisory_lock(4711);
	EXECUTE 'DECLARE leaked CURSOR WITH HOLD FOR SELECT 1';
END $$;
CREATE TABLE test.again (n integer);
CREATE FUNCTION test.defer_again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF new.n = 1 THEN
		SET CONSTRAINTS ALL DEFERRED;
		INSERT INTO test.again VALUES (2);
	ELSE
		PERFORM test.leave();
	END IF;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER again AFTER INSERT ON test.again DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION test.defer_again()}
);
make_handler(
	$node, $db, 'leave', q{
INSERT INTO test.pids VALUES ('first', pg_backend_pid());
IF e.payload = '"call"' THEN PERFORM test.leave(); ELSE INSERT INTO test.again VALUES (1); END IF;}
);
make_handler(
	$node, $db, 'look', q{
INSERT INTO test.pids VALUES ('second', pg_backend_pid());
INSERT INTO test.seen
SELECT name, setting FROM pg_settings
WHERE name IN ('search_path', 'statement_timeout', 'work_mem', 'default_transaction_read_only', 'default_transaction_isolation', 'synchronous_commit')
UNION ALL SELECT 'my.setting', coalesce(current_setting('my.setting', true), '')
UNION ALL SELECT 'table', relname FROM pg_class WHERE relname = 'leaked'
UNION ALL SELECT 'statement', name FROM pg_prepared_statements WHERE from_sql
UNION ALL SELECT 'cursor', name FROM pg_cursors WHERE name = 'leaked'
UNION ALL SELECT 'lock', objid::text FROM pg_locks WHERE locktype = 'advisory';});
$node->safe_psql($db,
	q{SELECT obix.create_consumer('second', 'second', handler => 'test.look')});
$node->safe_psql($db, q{SELECT obix.publish('second', '1')});
consumer_ok($node, $db, 'second', 'delivered = 1', 'what a clean session looks like');
my $clean = $node->safe_psql($db, 'SELECT * FROM test.seen ORDER BY name, value');
$node->safe_psql($db,
	q{SELECT obix.create_consumer('first', 'first', handler => 'test.leave', max_attempts => 1)}
);
foreach my $when ('call', 'commit')
{
	$node->safe_psql($db,
		qq{TRUNCATE test.seen, test.pids; SELECT obix.publish('first', '"$when"')});
	consumer_ok(
		$node, $db, 'first',
		q{lag_events = 0},
		"$when: a handler leaves things in its session");
	$node->safe_psql($db, q{SELECT obix.publish('second', '1')});
	consumer_ok($node, $db, 'second', 'lag_events = 0', "$when: another is called");
	is($node->safe_psql($db, 'SELECT count(*), count(DISTINCT pid) FROM test.pids'),
		'2|1', "$when: by the same process");
	is($node->safe_psql($db, 'SELECT * FROM test.seen ORDER BY name, value'),
		$clean, "$when: and finds nothing of it");
}

$node->stop;
done_testing();
