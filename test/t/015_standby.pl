
# A physical standby: reading and waiting work there, nothing is written; after
# promotion the workers come, and publishing goes on after what was delivered.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node('primary', init => { allows_streaming => 1 });
my ($result, $stdout, $stderr);

setup_database($primary, 'postgres');
$primary->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 20, premake => 2); SELECT obix.create_outbox('quiet'); SELECT obix.create_consumer('c', 'o')}
);
publish($primary, 'postgres', 'o', 30);
roll_back_inserts($primary, 'postgres', 'o', 2);
settle($primary, 'postgres', 'o');

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;
$primary->wait_for_catchup($standby);

#
# On the standby
#
is(walk($standby, 'postgres', 'o'), '32|2|32', 'everything can be read');
is( $standby->safe_psql(
		'postgres',
		q{SELECT obix.high_water_mark('o'), obix.high_water_mark('quiet')}),
	'32|0',
	'the high-water mark is of what was replayed');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM obix.read('o', 50)}),
	'0', 'beyond what it has there is nothing, and no error');
is( $standby->safe_psql(
		'postgres',
		q{SELECT head IS NULL, high_water_mark FROM obix.outbox_status WHERE outbox = 'o'::regclass}
	),
	't|32',
	'the status works');
foreach my $query (
	q{SELECT obix.publish('o', '1')},
	q{SELECT obix.next_sequence('o')},
	q{INSERT INTO o (payload) VALUES ('1')},
	q{SELECT obix.fill_gaps('o')},
	q{SELECT obix.ensure_partitions('o')},
	q{SELECT obix.recover_default('o')},
	q{SELECT obix.create_outbox('p')},
	q{SELECT * FROM obix.fetch('c')},
	q{SELECT obix.ack('c', 1)},
	q{CALL obix.wait_for('c', '1 s')})
{
	($result, $stdout, $stderr) = $standby->psql('postgres', $query);
	like($stderr, qr/ERROR:.*(recovery|read-only)/, "refused: $query");
}

my $waiter = start_wait($standby, 'postgres', 'o', 32);
poll_ok($standby, 'postgres',
	"SELECT backend_xmin IS NULL FROM pg_stat_activity WHERE pid = $waiter->{obix_pid}",
	'a session waiting there keeps no snapshot');
publish($primary, 'postgres', 'o', 1);
woken($waiter, 'and returns when an event arrives');
$standby->safe_psql('postgres', q{CALL obix.wait('o', 33, '200 ms')});
pass('or after the timeout');

# An outbox that is dropped on the primary while somebody waits for it here
$waiter = start_wait($standby, 'postgres', 'quiet', 0);
$primary->safe_psql('postgres', 'DROP TABLE quiet');
ok( pump_until(
		$waiter->{run}, $waiter->{timeout},
		\$waiter->{stderr}, qr/outbox with OID \d+ does not exist/),
	'who waits for an outbox that is dropped is told so');
$waiter->quit;

# Where an earlier transaction is open on the primary, readers of both stop.
my $open = $primary->background_psql('postgres');
$open->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1'), ('2')});
publish($primary, 'postgres', 'o', 10);
$primary->safe_psql('postgres',
	q{BEGIN; INSERT INTO o (payload) VALUES ('"prepared"'); PREPARE TRANSACTION 'p'}
);
publish($primary, 'postgres', 'o', 10);
$primary->wait_for_catchup($standby);
is(walk($standby, 'postgres', 'o'), '33|2|33', 'readers stop before a hole');
is( $standby->safe_psql('postgres', q{SELECT obix.high_water_mark('o')}),
	'33',
	'and so does the high-water mark');
is( $standby->safe_psql(
		'postgres',
		q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'obix worker'}
	),
	'0',
	'no worker runs there');

#
# Promotion
#
$waiter = start_wait($standby, 'postgres', 'o', 33);
crash($primary);
eval { $open->quit };
$standby->promote;
poll_ok($standby, 'postgres',
	'SELECT count(*) = 45 FROM o WHERE sequence < 46',
	'after promotion the worker fills what was lost, without being asked');
woken($waiter, 'a session that waited through the promotion is woken');
is(walk($standby, 'postgres', 'o'),
	'45|4|45', 'readers get up to the prepared transaction');
is( $standby->safe_psql(
		'postgres', q{INSERT INTO o (payload) VALUES ('1') RETURNING sequence}),
	'57',
	'new events come after those replicated');
$standby->safe_psql('postgres', q{COMMIT PREPARED 'p'});
is_settled($standby, 'postgres', 'o',
	'the prepared transaction can be committed');
is(walk($standby, 'postgres', 'o'), '57|4|57', 'then all is delivered');
publish($standby, 'postgres', 'o', 100);
is(walk($standby, 'postgres', 'o'), '157|4|157', 'publishing goes on');
poll_ok($standby, 'postgres',
	q{SELECT runway >= 40 AND stranded = 0 FROM obix.outbox_status WHERE outbox = 'o'::regclass},
	'and so does premaking');
unlike_log($standby, qr/PANIC|TRAP|obix worker.*exited with exit code/,
	'no fault in the log');

$standby->stop;
done_testing();
