
# A handler that takes the whole server down, with a C function that this test
# compiles: each time counts as an attempt, also the one of the batch, so it
# ends in a dead letter or in a stop, never in a crash loop; other consumers go
# on.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $directory = PostgreSQL::Test::Utils::tempdir;
my ($include, $errors);

append_to_file("$directory/segv.c", <<'C');
#include "postgres.h"
#include "fmgr.h"

PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(segv);

Datum
segv(PG_FUNCTION_ARGS)
{
	return *(volatile Datum *) NULL;
}
C
$include = `pg_config --includedir-server`;
chomp $include;
plan skip_all => 'no compiler or no headers of the server here'
  unless IPC::Run::run(
	[   $ENV{CC} // 'gcc', '-shared', '-fPIC',              '-O0',
		"-I$include",      '-o',      "$directory/segv.so", "$directory/segv.c" ],
	'<',
	\undef,
	'>',
	\$errors,
	'2>&1');

my $db   = 'postgres';
my $node = new_node('main', conf => "restart_after_crash = on\nlog_min_messages = warning\n");

setup_database($node, $db);
$node->safe_psql(
	$db, qq{
SELECT obix.create_outbox('o');
CREATE TABLE test.applied (consumer text, sequence bigint);
CREATE FUNCTION test.segv() RETURNS void LANGUAGE c AS '$directory/segv.so', 'segv'});
foreach my $consumer ('dead', 'stop', 'raw', 'good')
{
	my $poison =
	  $consumer eq 'good' ? '' : q{IF e.payload = '3' THEN PERFORM test.segv(); END IF;};

	make_handler($node, $db, $consumer,
		"INSERT INTO test.applied VALUES ('$consumer', e.sequence); $poison");
}
# this one is called directly
$node->safe_psql($db,
	qq{CREATE FUNCTION test.segv(obix.event) RETURNS void LANGUAGE c AS '$directory/segv.so', 'segv'}
);
my $postmaster = $node->{_pid};

# One after the other: a crash counts for whatever is being handled just then,
# and one that could not be helped must not be taken for the other's.
publish($node, $db, 'o', 4);
$node->safe_psql($db, q{SELECT obix.publish('o', '5', type => 'raw'), obix.publish('o', '6')});
foreach my $case (
	[   'dead',
		q{on_failure => 'dead_letter', max_attempts => 3},
		q{state = 'active' AND lag_events = 0 AND dead_lettered = 1 AND delivered = 5},
		'the event is a dead letter' ],
	[   'stop',
		q{max_attempts => 2},
		q{state = 'stopped' AND attempt_sequence = 3 AND attempts = 2 AND "cursor" = 2},
		'or the consumer stops' ],
	[   'raw',
		q{handler => 'test.segv', types => '{raw}', on_failure => 'dead_letter', max_attempts => 1},
		q{state = 'active' AND lag_events = 0 AND dead_lettered = 1},
		'also where nothing but C is called' ])
{
	my ($consumer, $options, $condition, $name) = @$case;
	$options .= ", handler => 'test.$consumer'" unless $options =~ /handler/;

	# this session may be ended by the crash that it causes
	$node->psql(
		$db, qq{
SELECT obix.create_consumer('good_$consumer', 'o', handler => 'test.good', backoff => '10 ms');
SELECT obix.create_consumer('$consumer', 'o', $options, backoff => '10 ms')});
	consumer_ok($node, $db, $consumer, $condition, $name);
}
consumers_ok(
	$node, $db,
	q{consumer ~ '^good'},
	q{state = 'active' AND lag_events = 0 AND delivered = 6},
	'others went on');
is( $node->safe_psql(
		$db,
		q{SELECT consumer, sequence, state, attempts, error FROM obix.dead_letter ORDER BY consumer}
	),
	"dead|3|failed|3|the process ended while the handler ran\nraw|5|failed|1|the process ended while the handler ran",
	'it says why');
is( $node->safe_psql(
		$db,
		q{SELECT consumer, string_agg(sequence::text, ' ' ORDER BY sequence) FROM test.applied GROUP BY 1 ORDER BY 1}
	),
	"dead|1 2 4 5 6\ngood|1 1 1 2 2 2 3 3 3 4 4 4 5 5 5 6 6 6\nstop|1 2",
	'everything else was applied once');

# At most one crash for each batch and for each attempt; no more come.
my $crashes = log_count($node, qr/terminated by signal 11/);
note "the server crashed $crashes times";
cmp_ok($crashes, '>=', 3,         'the server did crash');
cmp_ok($crashes, '<=', 4 + 3 + 2, 'no more often than attempts were allowed');
publish($node, $db, 'o', 2);
consumer_ok(
	$node, $db, 'dead',
	'lag_events = 0 AND delivered = 7',
	'the next events are delivered');
is(log_count($node, qr/terminated by signal 11/), $crashes,    'and there are no more crashes');
is($node->{_pid},                                 $postmaster, 'under the same postmaster');

$node->stop;
done_testing();
