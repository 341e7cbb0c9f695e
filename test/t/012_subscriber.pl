
# A subscriber by logical replication: it receives events out of order, and
# nothing there may take a hole for abandoned.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_replication_slots = 20\nmax_wal_senders = 20\nmax_logical_replication_workers = 8\nmax_worker_processes = 16\n";
my $publisher = new_node('publisher', init => { allows_streaming => 'logical' }, conf => $conf);
my $subscriber = new_node('subscriber', init => { allows_streaming => 'logical' }, conf => $conf);

# What reads in a database with a hole has a worker look at it, so what the
# tests poll elsewhere is polled in another one.
foreach my $node ($publisher, $subscriber)
{
	$node->safe_psql('postgres', 'CREATE DATABASE app');
	setup_database($node, 'app');
}
$publisher->safe_psql('app',
	q{SELECT obix.create_outbox('o', partition_width => 100, premake => 2)});
publish($publisher, 'app', 'o', 250);
roll_back_inserts($publisher, 'app', 'o', 5);
settle($publisher, 'app', 'o');

# The subscriber has partitions of another width.
$subscriber->safe_psql('app',
	q{SELECT obix.create_outbox('o', partition_width => 40, premake => 2)});
my $connstr = $publisher->connstr . ' dbname=app';
$publisher->safe_psql('app',
	'CREATE PUBLICATION p FOR TABLE o WITH (publish_via_partition_root = true)');
$subscriber->safe_psql('app',
	"CREATE SUBSCRIPTION s CONNECTION '$connstr' PUBLICATION p");
$subscriber->wait_for_subscription_sync($publisher, 's', 'app');
is(walk($subscriber, 'app', 'o'),
	'255|5|255', 'the events there before are copied');

#
# Out of order
#
my $open = $publisher->background_psql('app');
$open->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('"late"'), ('"late"')});
publish($publisher, 'app', 'o', 200);
$publisher->wait_for_catchup('s');
is($subscriber->safe_psql('app', 'SELECT count(*), max(sequence) FROM o'),
	'455|457', 'the later events arrive first');
is( $subscriber->safe_psql('app', q{SELECT obix.fill_gaps('o')}),
	'0', 'fill_gaps writes no placeholder on the subscriber');
is(walk($subscriber, 'app', 'o'),
	'255|5|255', 'readers there stop before the hole');
# its worker is made to look, and leaves
$subscriber->safe_psql('app', q{SELECT obix.ensure_partitions('o')});
ok(no_workers($subscriber), 'the worker there does not stay for it');
$subscriber->restart;
ok(no_workers($subscriber), 'nor after a restart');
is($subscriber->safe_psql('app', 'SELECT count(*), max(sequence) FROM o'),
	'455|457', 'the worker writes none, also after a restart');
$open->query_safe('COMMIT');
$publisher->wait_for_catchup('s');
is(walk($subscriber, 'app', 'o'), '457|5|457', 'then all can be read');

#
# Load
#
finish_pgbench(
	start_pgbench(
		$publisher,
		'app', 'load',
		'-c 6 -j 2 -t 300',
		{
			'publish@3' => "SELECT obix.publish('o', '1');\n",
			'insert@2'  => "INSERT INTO o (payload) VALUES ('1');\n",
			'rollback@1' =>
			  "BEGIN;\nINSERT INTO o (payload) VALUES ('1');\nROLLBACK;\n"
		}));
settle($publisher, 'app', 'o');
$publisher->wait_for_catchup('s');
my $digest =
  q{SELECT count(*), max(sequence), md5(string_agg(sequence || ':' || id || coalesce(payload::text, ''), ' ' ORDER BY sequence)) FROM o};
is( $subscriber->safe_psql('app', $digest),
	$publisher->safe_psql('app', $digest),
	'both have the same events and placeholders');
is(walk($subscriber, 'app', 'o'),
	walk($publisher, 'app', 'o'),
	'and readers the same view');

# A waiting reader there is woken by what is applied.
my $head   = $publisher->safe_psql('app', 'SELECT max(sequence) FROM o');
my $waiter = start_wait($subscriber, 'app', 'o', $head);
publish($publisher, 'app', 'o', 1);
woken($waiter, 'a session waiting on the subscriber is woken');

unlike_log($subscriber, qr/ERROR|PANIC|TRAP/, 'no error on the subscriber');
unlike_log($publisher,  qr/ERROR|PANIC|TRAP/, 'no error on the publisher');

#
# The subscriber takes over
#
$open->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('"lost"')});
publish($publisher, 'app', 'o', 3);
$publisher->wait_for_catchup('s');
$subscriber->safe_psql('app', 'DROP SUBSCRIPTION s');
is( $subscriber->safe_psql(
		'app', q{INSERT INTO o (payload) VALUES ('"own"') RETURNING sequence}),
	$head + 6,
	'without its subscription it goes on after what it received');
poll_ok($subscriber, 'app', 'SELECT count(*) = max(sequence) FROM o',
	'and fills what will never come');
$open->quit;

$subscriber->stop;
$publisher->stop;
done_testing();
