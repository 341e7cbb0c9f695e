
# The consumers that the README shows, at work: its loop in SQL, its handlers, and
# the client in Python, which has to get through whatever happens to it with every
# event applied once and in order.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use IPC::Run ();
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $top    = "$FindBin::RealBin/../..";
my $readme = slurp_file("$top/README.md");
my $client = "$top/test/clients/consume.py";
my $python = '/usr/bin/python3';             # Debian's, which finds its packages
my $node   = new_node('main');

# The block in a language in the README's part of this name, that has a text.
sub block
{
	my ($language, $part, $has) = @_;
	my ($text) = $readme =~ /^### \Q$part\E\n(.*?)^##/ms or die "README.md has no \"$part\"";
	my ($block) = grep { index($_, $has) >= 0 } $text =~ /^```$language\n(.*?)^```\n/msg;

	return $block // die "\"$part\" has no block with \"$has\"";
}

#
# Its loop, which runs until its session ends, and its handlers.  An event that
# fails is put aside.
#
my $db = 'readme';
$node->safe_psql('postgres', "CREATE DATABASE $db");
$node->safe_psql(
	$db, q{
CREATE EXTENSION obix;
CREATE SCHEMA app;
SELECT obix.create_outbox('app.orders');});
$node->safe_psql($db, $_)
  foreach block('sql', 'Consume with retries', 'CREATE TABLE app.receipt'),
  block('sql', 'Consume with retries', 'CREATE PROCEDURE app.write_receipts'),
  block('sql', 'Projections',          'CREATE TABLE app.total');
$node->safe_psql(
	$db, q{
SELECT obix.alter_consumer(c, max_attempts => 2, backoff => '10 ms', on_failure => 'dead_letter')
FROM unnest('{receipts, totals}'::text[]) c;});
my $loop = $node->background_psql($db);
$loop->{stdin} .= "CALL app.write_receipts();\n";
$loop->{run}->pump_nb;
$node->safe_psql(
	$db, q{
SELECT count(obix.publish('app.orders', CASE WHEN g = 37 THEN '{"amount": "much"}' ELSE '{"amount": 1}' END::jsonb,
						  type => CASE WHEN g % 3 = 0 THEN 'sent' ELSE 'paid' END, key => 'account-' || g % 2))
FROM generate_series(1, 300) g;});
my $wanted = q{SELECT sequence, key, (payload ->> 'amount')::numeric FROM app.orders WHERE type = 'paid' AND payload ->> 'amount' <> 'much'};
poll_ok(
	$node,
	$db,
	qq{SELECT count(*) = 199 AND NOT EXISTS (TABLE app.receipt EXCEPT $wanted) FROM app.receipt},
	'its loop applies what it should');
poll_ok(
	$node,
	$db,
	qq{SELECT count(*) = 0 FROM (SELECT key, sum(numeric), count(*) FROM ($wanted) w (sequence, key, numeric) GROUP BY key EXCEPT TABLE app.total) d},
	'and so do its handlers');
is( $node->safe_psql(
		$db,
		q{SELECT string_agg(consumer || ' ' || (payload ->> 'amount') || ' ' || attempts, ', ' ORDER BY consumer) FROM obix.dead_letter}
	),
	'receipts much 2, totals much 2',
	'with the failing event put aside');
$node->safe_psql($db,
	q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL app.write_receipts%'}
);

#
# The client
#
ok( index(
		slurp_file($client), block('python', 'Consume with retries', 'obix.ack')) >= 0,
	'the README shows the client as it is');

SKIP:
{
	skip "$python has no psycopg 3", 1
	  if system("$python -c 'import psycopg' 2>/dev/null") != 0;
	test_client();
}

# Start the client for a consumer of the database.
sub start_client
{
	my ($consumer) = @_;
	my $run = { stdout => '', stderr => '' };
	local $ENV{PGHOST}     = $node->host;
	local $ENV{PGPORT}     = $node->port;
	local $ENV{PGDATABASE} = 'postgres';

	$run->{handle} = IPC::Run::start([ $python, $client, $consumer ],
		'<', \undef, '>', \$run->{stdout}, '2>', \$run->{stderr},
		IPC::Run::timeout(4 * $PostgreSQL::Test::Utils::timeout_default));
	return $run;
}

# Wait for the end of a client and return its status, "signal" if it has none.
sub end_of_client
{
	my ($run) = @_;

	$run->{handle}->finish;
	my $status = $run->{handle}->full_result(0);
	note $run->{stderr};
	return $status & 127 ? 'signal' : $status >> 8;
}

# Publish: events for the client, others, and holes.
sub start_publishers
{
	my ($name, $seconds) = @_;

	return start_pgbench(
		$node,
		'postgres',
		$name,
		"-c 4 -j 2 -R 400 -T $seconds",
		{
			'paid@6' =>
			  "\\set n random(1, 100)\nSELECT obix.publish('app.orders', jsonb_build_object('amount', :n), type => 'paid', key => 'account-' || :n);\n",
			'sent@3'     => "SELECT obix.publish('app.orders', '{}', type => 'sent');\n",
			'rollback@1' =>
			  "BEGIN;\nINSERT INTO app.orders (type, payload) VALUES ('paid', '{\"amount\": 1}');\nROLLBACK;\n"
		});
}

sub caught_up
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name) = @_;

	return poll_ok($node, 'postgres',
		q{SELECT lag_events = 0 FROM obix.consumer_status WHERE consumer = 'receipts'},
		$name);
}

# What is wrong with what was applied; '' if nothing.
sub faults
{
	return $node->safe_psql(
		'postgres', q{
SELECT format('%s is there %s times', sequence, count(r.sequence))
FROM (SELECT sequence FROM app.orders WHERE type = 'paid' AND payload ? 'amount') o FULL JOIN app.receipt r USING (sequence)
GROUP BY sequence
HAVING count(r.sequence) <> 1 OR count(o.sequence) <> 1
UNION ALL
SELECT format('%s comes after %s', sequence, before)
FROM (SELECT sequence, lag(sequence) OVER (ORDER BY place) AS before FROM app.receipt) r
WHERE before > sequence;});
}

sub test_client
{
	setup_database($node, 'postgres');
	$node->safe_psql(
		'postgres', q{
CREATE SCHEMA app;
CREATE TABLE app.receipt (place bigint GENERATED ALWAYS AS IDENTITY, sequence bigint, account text, amount numeric);
SELECT obix.create_outbox('app.orders');
SELECT obix.create_consumer('receipts', 'app.orders', types => '{paid}', max_attempts => 2, backoff => '10 ms', on_failure => 'dead_letter');}
	);

	# Two of them share the work; each is interrupted in every way.
	my $first  = start_client('receipts');
	my $second = start_client('receipts');
	my $load   = start_publishers('load', 6);
	foreach my $round (1 .. 15)
	{
		$node->safe_psql('postgres',
			q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query ~ 'obix\.(fetch|ack|wait_for)|app\.receipt' AND pid <> pg_backend_pid()}
		);
		usleep(200_000);
	}
	finish_pgbench($load);
	caught_up('clients whose sessions are terminated get on');
	is(faults(), '', 'each event is applied once, and in order');

	# The server is restarted, and crashes, while there is something to do.
	foreach my $how ('restart', 'crash')
	{
		$load = start_publishers($how, 3);
		usleep(1_500_000);
		$node->restart if $how eq 'restart';
		crash($node) if $how eq 'crash';
		$node->start if $how eq 'crash';
		finish_pgbench($load, may_fail => 1);
		publish($node, 'postgres', 'app.orders', 10);
		caught_up("clients get on after a $how");
		is(faults(), '', 'each event is applied once, and in order');
	}

	# One is ended at work, the other goes on, until it is ended while it waits.
	$load = start_publishers('end', 3);
	usleep(1_500_000);
	$first->{handle}->signal('TERM');
	is(end_of_client($first), '0', 'SIGTERM ends the client at work');
	finish_pgbench($load);
	caught_up('the other goes on');
	is(faults(), '', 'each event is applied once, and in order');

	# An event that fails in the client is put aside.
	$node->safe_psql(
		'postgres', q{
SELECT count(obix.publish('app.orders', CASE WHEN g = 70 THEN '{"total": 1}' ELSE '{"amount": 1}' END::jsonb, type => 'paid')) FROM generate_series(1, 150) g;}
	);
	caught_up('the client gets past an event that fails');
	is(faults(), '', 'each other event is applied once, and in order');
	is( $node->safe_psql(
			'postgres',
			q{SELECT payload, attempts, error FROM obix.dead_letter WHERE consumer = 'receipts'}
		),
		q({"total": 1}|2|'amount'),
		'and it is a dead letter');

	# Requeued it fails again, in a transaction that fetches it again.
	$node->safe_psql('postgres',
		q{SELECT obix.requeue(consumer, sequence) FROM obix.dead_letter});
	poll_ok(
		$node,
		'postgres',
		q{SELECT d.state = 'failed' AND s.dead_lettered = 2 FROM obix.dead_letter d JOIN obix.consumer_status s USING (consumer)},
		'requeued, it fails again');

	$node->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait_for%' AND wait_event_type = 'Extension'}
	) or die 'the client does not wait';
	my $start = time;
	$second->{handle}->signal('TERM');
	is(end_of_client($second), '0', 'SIGTERM ends the client while it waits');
	cmp_ok(time - $start, '<', 20, 'and does not wait for the end of obix.wait_for');
	poll_ok($node, 'postgres',
		q{SELECT count(*) = 0 FROM pg_stat_activity WHERE query ~ 'obix\.(fetch|wait_for)' AND pid <> pg_backend_pid()},
		'no session stays behind');

	# A consumer that has stopped is for a person to look at.
	$node->safe_psql(
		'postgres', q{
SELECT obix.alter_consumer('receipts', on_failure => 'stop');
SELECT obix.publish('app.orders', '{"total": 2}', type => 'paid');});
	my $third = start_client('receipts');
	is(end_of_client($third), '1', 'a consumer that stops ends the client');
	like($third->{stderr}, qr/consumer "receipts" has stopped at event \d+/,
		'and it says why');
	return;
}

$node->stop;
done_testing();
