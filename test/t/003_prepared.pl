
# Events of prepared transactions: readers stop there, across restarts, until
# it is decided; then they are delivered, or filled by the worker.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');

# The tests look at other things in another database: what reads in this one
# has the worker look after the prepared transactions.
$node->safe_psql('postgres', 'CREATE DATABASE app');
setup_database($node, 'app');

# For each way to publish, one to be committed and one to be rolled back; and
# in each a prepared transaction at the head.
my %insert = (
	publish => q{SELECT count(obix.publish('OUTBOX', '"prepared"')) FROM generate_series(1, 3)},
	plain   => q{INSERT INTO OUTBOX (payload) SELECT '"prepared"' FROM generate_series(1, 3)});
my @outboxes;

foreach my $way (sort keys %insert)
{
	foreach my $end ('commit', 'rollback')
	{
		my $outbox = "${way}_$end";
		my $insert = $insert{$way} =~ s/OUTBOX/$outbox/r;

		push @outboxes, $outbox;
		$node->safe_psql('app', "SELECT obix.create_outbox('$outbox')");
		publish($node, 'app', $outbox, 5);
		$node->safe_psql('app',
			"BEGIN; $insert; PREPARE TRANSACTION '$outbox'");
		publish($node, 'app', $outbox, 5);
		$node->safe_psql('app',
			"BEGIN; $insert; PREPARE TRANSACTION '$outbox at head'");
	}
}

# A sequence drawn and not inserted is no part of a prepared transaction.
$node->safe_psql(
	'app', q{
SELECT obix.create_outbox('bare');
SELECT obix.publish('bare', '1');
BEGIN;
SELECT obix.next_sequence('bare');
PREPARE TRANSACTION 'bare'});
poll_ok($node, 'app', 'SELECT count(*) = 2 FROM bare',
	'a sequence that a prepared transaction did not use is filled');
$node->safe_psql('app', q{COMMIT PREPARED 'bare'});

sub readers_stop
{
	my ($when) = @_;

	foreach my $outbox (@outboxes)
	{
		is( $node->safe_psql(
				'app', "SELECT count(*), max(sequence) FROM obix.read('$outbox', 0)"),
			'5|5',
			"readers of $outbox stop before the prepared events $when");
	}
	is( $node->safe_psql(
			'app',
			'SELECT DISTINCT obix.high_water_mark(outbox) FROM obix.outbox WHERE outbox <> $$bare$$::regclass'
		),
		'5',
		"the high-water marks stand there $when");
	is($node->safe_psql('app', 'SELECT obix.fill_gaps()'),
		'0', "nothing is filled $when");
	is( $node->safe_psql(
			'app',
			q{SELECT undecided, array_to_string(undecided_gids, ',') FROM obix.outbox_status WHERE outbox = 'plain_commit'::regclass}
		),
		'6|plain_commit,plain_commit at head',
		"the status names sequence and prepared transactions $when");
}

readers_stop('at first');
ok(no_workers($node), 'the worker does not stay for what is prepared');
$node->restart;
readers_stop('after a restart');
crash($node);
$node->start;
readers_stop('after a crash');

# New events come after the prepared ones, also those at the head.
foreach my $outbox (@outboxes)
{
	publish($node, 'app', $outbox, 1);
	is($node->safe_psql('app', "SELECT max(sequence) FROM $outbox"),
		'17', "an event published to $outbox follows what is prepared");
}

ok(no_workers($node), 'nor after a crash');
foreach my $outbox (@outboxes)
{
	my $commits = $outbox =~ /commit/;
	my $verb = $commits ? 'COMMIT' : 'ROLLBACK';
	my $waiter = start_wait($node, 'app', $outbox, 5);

	$node->safe_psql('app', "$verb PREPARED '$outbox'");
	woken($waiter, "a reader of $outbox is woken by $verb PREPARED");
	$waiter = start_wait($node, 'app', $outbox, 13);
	$node->safe_psql('app', "$verb PREPARED '$outbox at head'");
	woken($waiter, 'and by that of the second');
	poll_ok($node, 'app', "SELECT count(*) = 17 FROM $outbox",
		'the table is complete without further traffic');
	is( walk($node, 'app', $outbox),
		$commits ? '17|0|17' : '17|6|17',
		$commits ? 'everything is delivered' : 'all of it was filled');
	is_settled($node, 'app', $outbox, 'and the status agrees');
}

$node->stop;
done_testing();
