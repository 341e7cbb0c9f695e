
# pg_upgrade of a server with outboxes: to a server that preloads obix, and
# with the old one preloading it or not.  pg_upgrade of one release to itself
# goes the same way as from one to the next.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $old = new_node('old');
my $new = PostgreSQL::Test::Cluster->new('new');

setup_database($old, 'postgres');
$old->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 100, premake => 2); SELECT obix.create_outbox('empty')}
);
publish($old, 'postgres', 'o', 250);
roll_back_inserts($old, 'postgres', 'o', 3);
publish($old, 'postgres', 'o', 3);
settle($old, 'postgres', 'o');
$old->safe_psql('postgres', 'DROP TABLE o_p0; TRUNCATE empty');

my $picture =
  q{SELECT count(*), min(sequence), max(sequence), md5(string_agg(sequence || ':' || id, ' ' ORDER BY sequence)) FROM o;
SELECT outbox, id, partition_width, premake, resolved FROM obix.outbox ORDER BY id};
no_workers($old);
my $expected = $old->safe_psql('postgres', $picture);
$old->stop;

$new->init;
$new->append_conf('postgresql.conf', base_conf());

# The library is looked for in the new server; the test schema goes along.
my $bindir = $old->config_data('--bindir');
chdir $PostgreSQL::Test::Utils::tmp_check or die $!;
command_ok(
	[
		'pg_upgrade', '--no-sync',
		'-d', $old->data_dir, '-D', $new->data_dir,
		'-b', $bindir, '-B', $bindir,
		'-s', $new->host,
		'-p', $old->port, '-P', $new->port
	],
	'pg_upgrade');

$new->start;
is($new->safe_psql('postgres', $picture), $expected, 'everything is there');
is(walk($new, 'postgres', 'o', 99),
	'157|3|256', 'it can be read from the oldest kept');
$new->safe_psql('postgres', q{SELECT obix.fill_gaps()});
is( $new->safe_psql(
		'postgres', q{INSERT INTO o (payload) VALUES ('1') RETURNING sequence}),
	'257',
	'events go on after the last');
roll_back_inserts($new, 'postgres', 'o', 100);
is_settled($new, 'postgres', 'o', 'the worker works');
poll_ok(
	$new, 'postgres',
	q{SELECT runway >= 200 FROM obix.outbox_status WHERE outbox = 'o'::regclass},
	'and makes partitions');
unlike_log($new, qr/PANIC|TRAP|ERROR/, 'no error in the log');

$new->stop;
done_testing();
