
# Change data capture: what readers of the log get of an outbox, by pgoutput and
# by wal2json, and that it is what the documentation says.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'main',
	init => { allows_streaming => 'logical' },
	conf => "obix.auto_recover = off\n");

# Newer releases load no plug-in of others unless told so.
if ($node->safe_psql('postgres',
		q{SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'}))
{
	$node->append_conf('postgresql.conf', "output_plugin_libraries = 'pgoutput, wal2json'");
	$node->restart;
}
my $has_wal2json = -e $node->config_data('--pkglibdir') . '/wal2json.so';

# The messages of a slot, by pgoutput: [ kind, table, row ] each, as far as they
# have these; the row of an insertion is a reference to { column => value }.
sub pgoutput
{
	my ($slot, $publication) = @_;
	my @messages;
	my %relations;

	foreach my $line (
		split /\n/,
		$node->safe_psql('postgres',
			"SELECT encode(data, 'hex') FROM pg_logical_slot_get_binary_changes('$slot', NULL, NULL, 'proto_version', '1', 'publication_names', '$publication')"
		))
	{
		my ($kind, $rest) = unpack 'a a*', pack 'H*', $line;

		if ($kind eq 'R')
		{
			my ($oid, $schema, $name, $identity, $count, $columns) =
			  unpack 'N Z* Z* a n a*', $rest;
			my @fields = unpack '(C Z* N N)*', $columns;

			$relations{$oid} = {
				name    => "$schema.$name",
				columns => [ map { $fields[ 4 * $_ + 1 ] } (0 .. $count - 1) ]
			};
			push @messages, [$kind];
		}
		elsif ($kind eq 'I')
		{
			my ($oid, $new, $count, $values) = unpack 'N a n a*', $rest;
			my %row;

			foreach my $column (@{ $relations{$oid}->{columns} })
			{
				(my $format, $values) = unpack 'a a*', $values;
				$row{$column} = undef;
				($row{$column}, $values) = unpack 'N/a a*', $values
				  if $format eq 't';
			}
			push @messages, [ $kind, $relations{$oid}->{name}, \%row ];
		}
		elsif ($kind =~ /[UD]/)
		{
			push @messages, [ $kind, $relations{ unpack 'N', $rest }->{name} ];
		}
		else
		{
			push @messages, [$kind];
		}
	}
	return @messages;
}

sub slot
{
	my ($name, $plugin) = @_;

	$node->safe_psql('postgres',
		"SELECT pg_create_logical_replication_slot('$name', '$plugin')");
	return;
}

# What the documentation tells to do
my $readme = slurp_file("$FindBin::RealBin/../../README.md");
my ($sql) = $readme =~ /```sql\n(CREATE PUBLICATION orders_events.*?)```/s;
my %debezium = $readme =~ /```properties\n(.*?)```/s
  ? map { split /=/, $_, 2 } grep { /=/ } split /\n/, $1
  : ();

setup_database($node, 'postgres');
$node->safe_psql(
	'postgres', qq{
CREATE SCHEMA app;
SELECT obix.create_outbox('app.orders', partition_width => 20, premake => 2);
$sql});
$node->safe_psql('postgres', 'CREATE PUBLICATION everything FOR ALL TABLES');
slot('pgoutput',   'pgoutput');
slot('everything', 'pgoutput');
slot('wal2json', 'wal2json') if $has_wal2json;

#
# Everything that can happen to an outbox
#
$node->safe_psql('postgres',
	q{SELECT obix.publish('app.orders', '{"amount": 10}', type => 'paid', key => 'account-1', headers => '{"trace": "abc"}')}
);
$node->safe_psql('postgres',
	q{INSERT INTO app.orders (payload, type) VALUES ('null', 'nothing')});
roll_back_inserts($node, 'postgres', 'app.orders', 3);
publish($node, 'postgres', 'app.orders', 50);
foreach my $count (30, 60)
{
	publish_stranded($node, 'postgres', 'app.orders', $count);
	$node->safe_psql('postgres',
		q{SELECT obix.ensure_partitions('app.orders')});
}
cmp_ok(
	$node->safe_psql('postgres', q{SELECT obix.recover_default('app.orders')}),
	'>', 90, 'rows in two gaps are brought out of DEFAULT');
publish($node, 'postgres', 'app.orders', 1);
$node->poll_query_until('postgres',
	'SELECT high_water_mark = head FROM obix.outbox_status');
my $events = $node->safe_psql('postgres',
	q{SELECT string_agg(sequence || ' ' || id, E'\n' ORDER BY sequence) FROM app.orders WHERE payload IS NOT NULL}
);
my $placeholders = $node->safe_psql('postgres',
	'SELECT count(*) FROM app.orders WHERE payload IS NULL');
$node->safe_psql('postgres',
	q{SELECT obix.create_consumer('c', 'app.orders'); SELECT count(*) FROM obix.fetch('c', 2); SELECT obix.ack('c', 2)}
);
$node->safe_psql('postgres', 'DROP TABLE app.orders_p0');
$node->safe_psql('postgres',
	q{UPDATE app.orders SET payload = '"redacted"' WHERE sequence = 30; TRUNCATE app.orders}
);

#
# By pgoutput
#
my @messages = pgoutput('pgoutput', 'orders_events');
my @inserted = map { $_->[2] } grep { $_->[0] eq 'I' } @messages;
my %names    = map { $_->[1] => 1 } grep { $_->[0] eq 'I' } @messages;

is(join("\n", map { "$_->{sequence} $_->{id}" } @inserted),
	$events, 'every event comes once, in order, and no placeholder');
is_deeply([ grep { $_->[0] !~ /[BCRI]/ } @messages ],
	[], 'nothing else does, whatever was done to partitions');
is_deeply([ keys %names ], ['app.orders'], 'all in the name of the outbox');
is_deeply([ sort keys %{ $inserted[0] } ],
	[ sort qw(sequence id type key payload headers recorded_at) ],
	'with the columns of obix.event');

# A publication of all tables names partitions, and would have what is done to
# tables before they are attached.
@messages = pgoutput('everything', 'everything');
is( join(
		"\n",
		map { "$_->{sequence} $_->{id}" } grep { defined $_->{payload} }
		  map { $_->[2] } grep { $_->[0] eq 'I' && $_->[1] =~ /^app\.orders_/ } @messages),
	$events,
	'in a publication of all tables, every event comes once too');
is_deeply([ grep { $_->[0] eq 'D' && $_->[1] =~ /^app/ } @messages ],
	[], 'and none is deleted');

my %first = %{ $inserted[0] };
my ($id, $recorded_at) = (delete $first{id}, delete $first{recorded_at});
like($id, qr/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/, 'an event has its id');
like($recorded_at, qr/^\d{4}-\d\d-\d\d /, 'and its time');
is_deeply(
	\%first,
	{
		sequence => '1',
		type     => 'paid',
		key      => 'account-1',
		payload  => '{"amount": 10}',
		headers  => '{"trace": "abc"}'
	},
	'and all that was published');
is($inserted[1]->{payload}, 'null', 'JSON null is a payload');

#
# What the outbox event router of Debezium makes of that, by the configuration
# in the documentation
#
sub route
{
	my ($row) = @_;
	my $option = sub { $debezium{"transforms.outbox.$_[0]"} };
	my $topic  = $option->('route.topic.replacement');
	my %message;

	foreach my $column ($option->('route.by.field'),
		map { $option->("table.field.event.$_") } qw(id key payload))
	{
		die "there is no column \"$column\"" unless exists $row->{$column};
	}
	$topic =~ s/\$\{routedByValue\}/$row->{$option->('route.by.field')}/;
	%message = (
		topic   => $topic,
		key     => $row->{ $option->('table.field.event.key') },
		value   => $row->{ $option->('table.field.event.payload') },
		headers => { id => $row->{ $option->('table.field.event.id') } });
	foreach my $placement (split /,/,
		$option->('table.fields.additional.placement'))
	{
		my ($column, $where, $alias) = split /:/, $placement;

		die "there is no column \"$column\"" unless exists $row->{$column};
		$message{headers}->{ $alias // $column } = $row->{$column}
		  if $where eq 'header';
	}
	return \%message;
}
is_deeply(
	route($inserted[0]),
	{
		topic   => 'orders.paid',
		key     => 'account-1',
		value   => '{"amount": 10}',
		headers => {
			id          => $id,
			headers     => '{"trace": "abc"}',
			sequence    => '1',
			recorded_at => $recorded_at
		}
	},
	'the outbox event router finds what it needs');
is($debezium{'publication.name'}, 'orders_events', 'in this publication');
is($debezium{'table.include.list'}, 'app.orders', 'and table');
publish($node, 'postgres', 'app.orders', 5);
roll_back_inserts($node, 'postgres', 'app.orders', 1);
$node->poll_query_until('postgres',
	'SELECT high_water_mark = head FROM obix.outbox_status');
is( $node->safe_psql('postgres',
		'SELECT count(*) FROM ('
		  . $debezium{'snapshot.select.statement.overrides.app.orders'}
		  . ') s'),
	'5',
	'and its snapshot leaves out placeholders');

#
# Order: that of the commits
#
pgoutput('pgoutput', 'orders_events');
my $open = $node->background_psql('postgres');
$open->query_safe(
	q{BEGIN; INSERT INTO app.orders (payload) VALUES ('"drawn first"')});
$node->safe_psql('postgres',
	q{SELECT obix.publish('app.orders', '"committed first"')});
$open->query_safe('COMMIT');
$open->quit;
is_deeply(
	[
		map { $_->[2]->{payload} }
		grep { $_->[0] eq 'I' } pgoutput('pgoutput', 'orders_events')
	],
	[ '"committed first"', '"drawn first"' ],
	'what commits first comes first');
is( $node->safe_psql('postgres',
		q{SELECT string_agg(payload::text, ' ') FROM (SELECT payload FROM app.orders ORDER BY sequence DESC LIMIT 2) s}
	),
	'"committed first" "drawn first"',
	'though it has the higher sequence');

#
# By wal2json
#
SKIP:
{
	skip 'wal2json is not installed', 4 unless $has_wal2json;

	my $changes = q{
SELECT c->>'action' AS action, c->>'schema' AS schema, c->>'table' AS "table",
	   (SELECT jsonb_object_agg(k->>'name', k->'value') FROM jsonb_array_elements(c->'columns') k) AS event
FROM (SELECT data::jsonb AS c FROM pg_logical_slot_get_changes('wal2json', NULL, NULL,
	  'format-version', '2', 'add-tables', 'app.*', 'actions', 'insert', 'include-transaction', 'false')) s};

	$node->safe_psql('postgres', "CREATE TABLE public.captured AS $changes");
	is( $node->safe_psql('postgres',
			q{SELECT DISTINCT action, schema, "table" ~ '^orders_(p\d+|default)$' FROM captured}),
		'I|app|t',
		'wal2json gives the names of partitions');
	my $list =
	  q{SELECT string_agg(concat_ws(' ', event->>'sequence', event->>'id'), E'\n' ORDER BY (event->>'sequence')::bigint) FROM captured};
	my $last = (split / /, (split /\n/, $events)[-1])[0];
	is( $node->safe_psql('postgres',
			"$list WHERE (event->>'sequence')::bigint <= $last AND event->>'payload' IS NOT NULL"),
		$events,
		'every event, once');
	is( $node->safe_psql('postgres',
			"SELECT count(*) FROM captured WHERE (event->>'sequence')::bigint <= $last AND event->>'payload' IS NULL"),
		$placeholders,
		'and placeholders, which have no payload');
	is( $node->safe_psql('postgres',
			q{SELECT event - 'id' - 'recorded_at' FROM captured WHERE (event->>'sequence') = '1'}),
		'{"key": "account-1", "type": "paid", "headers": "{\"trace\": \"abc\"}", "payload": "{\"amount\": 10}", "sequence": 1}',
		'with all that was published');
}

$node->stop;
done_testing();
