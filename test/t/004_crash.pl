
# kill -9 of the whole server with publishers in flight.
#
# The ledger of acknowledged events is what psql printed after each commit; it
# survives the server.  The reader writes nothing to the database: its own
# commits would flush the publishers' WAL.  The WAL writer sleeps for ten
# seconds, so that what is not flushed at commit is lost in the crash.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "wal_writer_delay = '10s'\n");

setup_database($node, 'postgres');
$node->safe_psql('postgres',
	q{SELECT obix.create_outbox('o', partition_width => 3000, premake => 2)});

my $rounds = 30000;
my %scripts = (
	deferred => qq{SELECT 'acknowledged ' || obix.publish('o', '"deferred"');\n},
	plain =>
	  qq{INSERT INTO o (payload) VALUES ('"plain"') RETURNING 'acknowledged ' || id;\n},
	# the line after COMMIT is printed only if that succeeded
	both => q{BEGIN;
SELECT obix.publish('o', '"both"') AS a, obix.publish('o', '"both"') AS b \gset
INSERT INTO o (payload) VALUES ('"both"') RETURNING id AS c \gset
COMMIT;
\echo acknowledged :a :b :c
},
	rollback => qq{BEGIN;\nINSERT INTO o (payload) VALUES ('"rollback"');\nSELECT obix.publish('o', '"rollback"') \\gset\nROLLBACK;\n}
);

# One page of a reader; "delivered" lists sequence:id.
my $page = q{CALL obix.wait('o', :position, '10 s');
SELECT coalesce(string_agg(sequence || ':' || id, ' '), '') AS events, coalesce(max(sequence), :position) AS position
FROM obix.read('o', :position, 200) \gset
\echo delivered :events
};

# Run everything until enough is acknowledged, crash, restart, compare.
sub crash_round
{
	my ($name, $setting, $stop, @publishers) = @_;
	my $start = $node->safe_psql('postgres',
		'SELECT coalesce(max(sequence), 0) FROM o');
	my (@runs, $reader, %acknowledged, %delivered);

	foreach my $script (@publishers)
	{
		push @runs,
		  start_psql($node, 'postgres', $script,
			"$setting\n" . $scripts{$script} x $rounds);
	}
	$reader = start_psql($node, 'postgres', 'reader',
		"\\set position $start\n" . $page x $rounds);
	$node->poll_query_until('postgres',
		"SELECT max(sequence) > $start + 4000 FROM o")
	  or die 'the publishers do not publish';
	$stop->();

	foreach my $run (@runs)
	{
		foreach my $line (finish_psql($run))
		{
			next unless $line =~ s/^acknowledged //;
			$acknowledged{$_}++ foreach split ' ', $line;
		}
	}
	foreach my $line (finish_psql($reader))
	{
		next unless $line =~ s/^delivered //;
		foreach my $event (split ' ', $line)
		{
			my ($sequence, $id) = split /:/, $event;

			$delivered{$sequence} = $id;
		}
	}
	note sprintf('%s: %d acknowledged, %d delivered',
		$name, scalar keys %acknowledged, scalar keys %delivered);
	cmp_ok(scalar keys %acknowledged, '>', 1000,
		"$name: events were acknowledged before the crash");
	cmp_ok(scalar keys %delivered, '>', 100,
		"$name: events were delivered before the crash");

	$node->start;
	poll_ok(
		$node, 'postgres',
		'SELECT count(*) = max(sequence) FROM o',
		"$name: the worker fills all holes after the restart");
	is_settled($node, 'postgres', 'o', "$name: and the status agrees");

	my (%sequence_of, %times, $last);
	foreach my $line (
		split /\n/,
		$node->safe_psql('postgres', 'SELECT sequence, id FROM o'))
	{
		my ($sequence, $id) = split /\|/, $line;

		$times{$id}++;
		$sequence_of{$id} = $sequence;
		$last = $sequence if !defined $last || $sequence > $last;
	}
	delete $times{'00000000-0000-0000-0000-000000000000'};
	is(scalar(grep { !$times{$_} } keys %acknowledged),
		0, "$name: every acknowledged event is there");
	is(scalar(grep { $times{$_} > 1 } keys %times),
		0, "$name: no event is there twice");
	is( scalar(
			grep {
				!$times{ $delivered{$_} }
				  || $sequence_of{ $delivered{$_} } != $_
			  }
			  grep { $delivered{$_} ne '00000000-0000-0000-0000-000000000000' }
			  keys %delivered),
		0,
		"$name: every delivered event is where it was");
	my ($furthest) = sort { $b <=> $a } keys %delivered;
	cmp_ok($last, '>=', $furthest, "$name: the head did not go back");
	like(
		walk($node, 'postgres', 'o'),
		qr/^$last\|\d+\|$last$/,
		"$name: the outbox is contiguous");
	is( $node->safe_psql(
			'postgres',
			q{INSERT INTO o (payload) VALUES ('"after the crash"') RETURNING sequence}
		),
		$last + 1,
		"$name: and goes on after its last event");
}

my @all = sort keys %scripts;

crash_round('synchronous', 'SET synchronous_commit = on;',
	sub { crash($node) }, @all);
crash_round('immediate stop', 'SET synchronous_commit = off;',
	sub { $node->stop('immediate') }, @all);

# Here nobody rolls back, for placeholders are flushed, and what was before
# them with them.
crash_round('asynchronous', 'SET synchronous_commit = off;',
	sub { crash($node) }, grep { $_ ne 'rollback' } @all);

#
# Committed asynchronously, delivered, and at once the crash
#
my $asynchronous = $node->background_psql('postgres');
my $before = $node->safe_psql('postgres', 'SELECT max(sequence) FROM o');
my $tail = "SELECT sequence, id, payload FROM obix.read('o', $before)";

$asynchronous->query_safe(
	q{SET synchronous_commit = off; SELECT obix.publish('o', '"deferred"'); INSERT INTO o (payload) VALUES ('"plain"')}
);
my $delivered = $node->safe_psql('postgres', $tail);
crash($node);
eval { $asynchronous->quit };
$node->start;
like($delivered, qr/deferred.*plain/s, 'two events were delivered');
is($node->safe_psql('postgres', $tail),
	$delivered, 'and are there after the crash');

#
# A plain INSERT and a publish open at the crash, others committed above
#
my $plain    = $node->background_psql('postgres');
my $deferred = $node->background_psql('postgres');
my $head = $node->safe_psql('postgres', 'SELECT max(sequence) FROM o');

$plain->query_safe(q{BEGIN; INSERT INTO o (payload) VALUES ('1'), ('2')});
$deferred->query_safe(q{BEGIN; SELECT obix.publish('o', '1')});
publish($node, 'postgres', 'o', 2);
is( $node->safe_psql(
		'postgres', "SELECT count(*) FROM obix.read('o', $head)"),
	'0',
	'readers stop before an open INSERT');
crash($node);
eval { $_->quit } foreach ($plain, $deferred);
$node->start;
poll_ok($node, 'postgres', "SELECT count(*) = 4 FROM o WHERE sequence > $head",
	'after the restart the worker fills it without anybody asking');
is( $node->safe_psql(
		'postgres',
		"SELECT string_agg(coalesce(payload::text, 'none'), ' ' ORDER BY sequence) FROM obix.read('o', $head)"
	),
	'none none 1 2',
	'and readers get past it');

$node->stop;
done_testing();
