
# A server that does not preload obix, and one with room for few outboxes.
# pg_upgrade and pg_restore load the library in servers of the first kind, so
# loading it and making the extension must work there; using it must not.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
my ($result, $stdout, $stderr);

$node->init;
$node->append_conf('postgresql.conf', "log_statement = none\n");
$node->start;

#
# Without preload
#
is($node->psql('postgres', q{LOAD 'obix'}), 0, 'the library can be loaded');
is($node->psql('postgres', 'CREATE EXTENSION obix'),
	0, 'the extension can be made');

foreach my $query (
	q{SELECT obix.create_outbox('o')},
	q{SELECT obix.publish('pg_class', '1')},
	q{SELECT * FROM obix.read('pg_class')},
	q{SELECT obix.next_sequence('pg_class')},
	q{SELECT obix.high_water_mark('pg_class')},
	q{SELECT obix.fill_gaps()},
	q{SELECT obix.ensure_partitions()},
	q{SELECT obix.recover_default('pg_class')},
	q{CALL obix.wait('pg_class', 0, '1 s')})
{
	($result, $stdout, $stderr) = $node->psql('postgres', $query);
	like(
		$stderr,
		qr/ERROR:  obix is not loaded by the server.*DETAIL:  obix needs shared memory and background workers\..*HINT:  Add obix to shared_preload_libraries and restart the server\./s,
		"refused without preload: $query");
}
is( $node->safe_psql(
		'postgres',
		q{SELECT count(*) FROM obix.outbox_status; SELECT count(*) FROM obix.partition_status}
	),
	"0\n0",
	'the views work on an empty registry without preload');
is($node->psql('postgres', 'DROP EXTENSION obix'),
	0, 'the extension can be dropped without preload');

#
# With preload, and three outboxes where there is room for two
#
$node->append_conf('postgresql.conf', base_conf() . "obix.max_outboxes = 3\n");
$node->restart;
$node->safe_psql(
	'postgres', q{
CREATE EXTENSION obix;
SELECT obix.create_outbox(name, premake => 0) FROM unnest('{a, b, c}'::text[]) name;
SELECT obix.publish(o, '1') FROM unnest('{a, b, c}'::regclass[]) o;});
$node->append_conf('postgresql.conf', "obix.max_outboxes = 2\n");
$node->restart;

# Whichever come first have the room, and a worker may be the first.
my ($refused, @served);
foreach my $outbox ('a', 'b', 'c')
{
	($result, $stdout, $stderr) =
	  $node->psql('postgres', "SELECT count(obix.publish('$outbox', '1'))");
	push @served, $outbox if $result == 0;
	$refused = $stderr if $result != 0;
}
is(scalar @served, 2, 'there is room for two');
like(
	$refused,
	qr/ERROR:  too many outboxes are in use.*DETAIL:  Shared memory has room for 2 outboxes in all databases together\..*HINT:  Raise obix\.max_outboxes/s,
	'the third is refused, with a hint');
($result, $stdout, $stderr) = $node->psql('postgres',
	q{SELECT sum((SELECT count(*) FROM obix.read(o, 0))) FROM unnest('{a, b, c}'::regclass[]) o}
);
is("$stdout$stderr", '5', 'reading needs nothing but the table');
($result, $stdout, $stderr) = $node->psql('postgres',
	q{SELECT sum(obix.high_water_mark(o)) FROM unnest('{a, b, c}'::regclass[]) o}
);
is("$stdout$stderr", '5', 'and so does the high-water mark');
$node->safe_psql('postgres', "SELECT obix.drop_outbox('$served[0]')");
$node->safe_psql('postgres',
	"SELECT obix.publish(o, '1') FROM unnest('{a, b, c}'::text[]) t, to_regclass(t) o WHERE o IS NOT NULL"
);
pass('a dropped outbox makes room for another');

# The hint: a restart with room for more.
$node->append_conf('postgresql.conf', "obix.max_outboxes = 3\n");
$node->restart;
$node->safe_psql('postgres',
	"SELECT obix.create_outbox('d'); SELECT obix.publish(o, '1') FROM unnest('{a, b, c, d}'::text[]) t, to_regclass(t) o WHERE o IS NOT NULL"
);
pass('room for three outboxes after a restart');

$node->stop;
done_testing();
