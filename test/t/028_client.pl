
# The consumers that the README shows, at work: its loop in SQL and its handlers.
# Its clients are at work in 063_clients.pl.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $top    = "$FindBin::RealBin/../..";
my $readme = slurp_file("$top/README.md");
my $client = "$top/test/clients/consume.py";
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

$node->stop;
done_testing();
