
# pg_dump and pg_restore, in parallel and not, on a server whose workers run:
# what is restored is what was dumped, and it goes on from there.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my $dump = $node->basedir . '/dump';

$node->safe_psql('postgres', 'CREATE DATABASE source');
setup_database($node, 'source');
$node->safe_psql(
	'source', q{
CREATE SCHEMA "App";
CREATE ROLE regress_obix_owner;
CREATE ROLE regress_obix_reader;
GRANT ALL ON SCHEMA "App" TO regress_obix_owner;
SET ROLE regress_obix_owner;
SELECT obix.create_outbox('"App"."Orders"', partition_width => 1000, premake => 3);
GRANT SELECT ON "App"."Orders" TO regress_obix_reader;
RESET ROLE;
SELECT obix.create_outbox('kept', partition_width => 100, premake => 1);
SELECT obix.create_outbox('cut', partition_width => 100, premake => 1);
SELECT obix.create_outbox('empty');
SELECT obix.create_outbox('truncated');});
publish($node, 'source', '"App"."Orders"', 15000);
roll_back_inserts($node, 'source', '"App"."Orders"', 3);
publish($node, 'source', '"App"."Orders"', 4997);
publish($node, 'source', $_, 350) foreach ('kept', 'cut', 'truncated');
settle($node, 'source', $_)
  foreach ('"App"."Orders"', 'kept', 'cut', 'truncated');
$node->safe_psql('source',
	'DROP TABLE cut_p0, cut_p100; TRUNCATE truncated');
no_workers($node);

# Everything that must be the same, by table alone.
my $picture = q{
SELECT count(*), count(payload), min(sequence), max(sequence), md5(string_agg(sequence || ':' || id || coalesce(payload::text, '') || recorded_at, ' ' ORDER BY sequence)) FROM "App"."Orders";
SELECT count(*), min(sequence), max(sequence) FROM kept;
SELECT count(*), min(sequence), max(sequence) FROM cut;
SELECT count(*) FROM empty;
SELECT count(*) FROM truncated;
SELECT outbox, partition_width, premake FROM obix.outbox ORDER BY outbox::text;
SELECT c.relname, r.rolname, pg_get_expr(c.relpartbound, c.oid) FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
WHERE c.relname ~ '^Orders' AND c.relkind IN ('r', 'p') ORDER BY 1;
SELECT has_table_privilege('regress_obix_reader', '"App"."Orders"', 'SELECT');
};
my $expected = $node->safe_psql('source', $picture);

# What works in the source works in a copy.
sub check_copy
{
	my ($db, $name) = @_;

	is($node->safe_psql($db, $picture), $expected, "$name: the same events");
	# the worker has looked and left, and has written nothing
	$node->safe_psql($db, 'SELECT obix.fill_gaps()');
	no_workers($node);
	is($node->safe_psql($db, $picture),
		$expected, "$name: no placeholder is written later");
	is(walk($node, $db, '"App"."Orders"'),
		'20000|3|20000', "$name: everything can be read");
	is($node->safe_psql($db, q{SELECT min(sequence) FROM obix.read('cut')}),
		'200', "$name: also where the oldest partitions are gone");
	is( $node->safe_psql(
			$db,
			q{INSERT INTO "App"."Orders" (payload) VALUES ('1') RETURNING sequence;
INSERT INTO kept (payload) VALUES ('1') RETURNING sequence;
INSERT INTO cut (payload) VALUES ('1') RETURNING sequence;
INSERT INTO empty (payload) VALUES ('1') RETURNING sequence;
INSERT INTO truncated (payload) VALUES ('1') RETURNING sequence;}),
		"20001\n351\n351\n1\n351",
		"$name: events go on after the last");
	roll_back_inserts($node, $db, 'kept', 200);
	poll_ok($node, $db, 'SELECT max(sequence) = 551 AND count(*) = 551 FROM kept',
		"$name: the worker fills holes");
	poll_ok($node, $db,
		q{SELECT count(*) > 0 FROM obix.partition_status WHERE outbox = 'kept'::regclass AND from_sequence > 551},
		"$name: and makes partitions");
	my ($result, $stdout, $stderr) =
	  $node->psql($db, 'DELETE FROM kept WHERE sequence = 1');
	like($stderr, qr/ERROR/, "$name: the guard is there");
	$node->safe_psql($db, 'DROP TABLE empty');
	is($node->safe_psql($db, 'SELECT count(*) FROM obix.outbox'),
		'4', "$name: the registry follows a drop");
	$node->safe_psql('postgres', "DROP DATABASE $db");
}

foreach my $case (
	[ 'parallel',  [ '-Fd', '-j2' ], ['-j4'] ],
	[ 'custom',    ['-Fc'],          ['--single-transaction'] ],
	[ 'rewritten', [ '-Fd', '--load-via-partition-root' ], ['-j4'] ])
{
	my ($name, $dump_options, $restore_options) = @$case;
	my $offset = log_offset($node);

	$node->command_ok(
		[
			'pg_dump', @$dump_options, '-f', "$dump-$name", '-d',
			$node->connstr('source')
		],
		"$name: pg_dump");
	$node->safe_psql('postgres', "CREATE DATABASE copy_$name");
	$node->command_ok(
		[
			'pg_restore', '--exit-on-error', @$restore_options, '-d',
			$node->connstr("copy_$name"), "$dump-$name"
		],
		"$name: pg_restore");
	unlike_log($node, qr/ERROR|FATAL|PANIC/, "$name: nothing fails", $offset);
	check_copy("copy_$name", $name);
}

#
# Schema first, data later, with obix disabled in that database meanwhile
#
$node->safe_psql('postgres',
	'CREATE DATABASE copy_sections; ALTER DATABASE copy_sections SET obix.enabled = off');
my $offset = log_offset($node);
foreach my $part ('--schema-only', '--data-only')
{
	$node->command_ok(
		[
			'pg_restore', '--exit-on-error', $part, '-d',
			$node->connstr('copy_sections'), "$dump-custom"
		],
		"sections: pg_restore $part");
	no_workers($node);
}
unlike_log($node, qr/ERROR|FATAL|PANIC/, 'sections: nothing fails', $offset);
my ($result, $stdout, $stderr) =
  $node->psql('copy_sections', q{SELECT obix.publish('kept', '1')});
like($stderr, qr/ERROR/, 'sections: publishing is refused while disabled');
$node->safe_psql('postgres', 'ALTER DATABASE copy_sections RESET obix.enabled');
check_copy('copy_sections', 'sections');

$node->stop;
done_testing();
