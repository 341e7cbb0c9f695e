
# A failover to a standby that lacked the last events: nobody is given other
# events under positions that were read before without being told; and the old
# primary, rewound, is as good a standby as any.  With a synchronous standby,
# nobody reads what that does not have.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($result, $stdout, $stderr);
my $old = new_node(
	'old',
	init => { allows_streaming => 1 },
	conf => "wal_log_hints = on\nwal_keep_size = '64MB'\n");

setup_database($old, 'postgres');
$old->safe_psql(
	'postgres', q{
SELECT obix.create_outbox('o', partition_width => 10, premake => 2);
CREATE TABLE test.effect (sequence bigint, id uuid)});
make_handler($old, 'postgres', 'handle',
	q{INSERT INTO test.effect VALUES (e.sequence, e.id);});
$old->safe_psql('postgres',
	q{SELECT obix.create_consumer('mail', 'o'); SELECT obix.create_consumer('handled', 'o', handler => 'test.handle')}
);

$old->backup('backup');
my $new = PostgreSQL::Test::Cluster->new('new');
$new->init_from_backup($old, 'backup', has_streaming => 1);
$new->start;

# What both have: 10 events, 6 of them acknowledged.
publish($old, 'postgres', 'o', 10);
$old->safe_psql('postgres',
	q{SELECT count(*) FROM obix.fetch('mail', 6); SELECT obix.ack('mail', 6)});
consumer_ok($old, 'postgres', 'handled', 'lag_events = 0', 'handlers are called');
$old->wait_for_catchup($new);
$new->stop;

# What only the old primary has: events 11 to 15, which everybody there has
# dealt with.
publish($old, 'postgres', 'o', 5);
$old->safe_psql('postgres',
	q{SELECT count(*) FROM obix.fetch('mail'); SELECT obix.ack('mail', 15)});
consumer_ok($old, 'postgres', 'handled', 'lag_events = 0',
	'handlers are called for the last events too');
my ($id5, $id10, $id15) =
  map { $old->safe_psql('postgres', "SELECT id FROM o WHERE sequence = $_") }
  (5, 10, 15);
$old->stop;

$new->start;
is($new->safe_psql('postgres', "SELECT count(*) FROM obix.read('o', 15, after_id => '$id15')"),
	'0', 'a standby that has not got so far says nothing, whoever asks');
$new->promote;

# Run a query that fails, and compare how.
sub fails
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($node, $query, $message, $detail, $hint, $name) = @_;

	($result, $stdout, $stderr) = $node->psql('postgres', $query);
	is( $stderr =~ s/^psql:<stdin>:\d+: //r =~ s/\nCONTEXT:.*//sr,
		"ERROR:  $message\nDETAIL:  $detail\nHINT:  $hint", $name);
	return;
}
my $compare =
  'Compare what was read with what is there, and read from a position that both share.';
my @beyond = (
	'position 15 is beyond the head of outbox "o"',
	'The highest sequence allocated is %d. Events that were read up to that position have been lost in a restore or a failover.',
	$compare);

#
# A reader that is ahead
#
sub beyond
{
	my ($head) = @_;

	return ($beyond[0], sprintf($beyond[1], $head), $beyond[2]);
}
fails($new, q{SELECT * FROM obix.read('o', 15)},
	beyond(10), 'reading beyond the head is an error');
fails($new, q{CALL obix.wait('o', 15)}, beyond(10), 'and so is waiting');
fails($new, "SELECT * FROM obix.read('o', 15, after_id => '$id15')",
	beyond(10), 'with or without an id');
publish($new, 'postgres', 'o', 3);
fails($new, q{SELECT * FROM obix.read('o', 15)},
	beyond(13), 'also when there are new events');
publish($new, 'postgres', 'o', 4);

# Now other events bear the sequences that it knows.
my $other = $new->safe_psql('postgres', 'SELECT id FROM o WHERE sequence = 15');
isnt($other, $id15, 'another event has the sequence');
fails(
	$new, "SELECT * FROM obix.read('o', 15, after_id => '$id15')",
	'event 15 of outbox "o" does not have the expected id',
	"Its id is $other: history has diverged in a restore or a failover.",
	$compare, 'with the id of what was read, that is an error');
is( $new->safe_psql('postgres',
		"SELECT min(sequence), count(*) FROM obix.read('o', 10, after_id => '$id10')"),
	'11|7',
	'from a position that both share, everything new is delivered');
is($new->safe_psql('postgres', q{SELECT min(sequence) FROM obix.read('o', 15)}),
	'16', 'without an id, nobody could tell');

# A transaction that ends meanwhile leaves a placeholder, which is no event.
roll_back_inserts($new, 'postgres', 'o', 1);
settle($new, 'postgres', 'o');
fails(
	$new, "SELECT * FROM obix.read('o', 18, after_id => '$id15')",
	'event 18 of outbox "o" does not have the expected id',
	'Its id is 00000000-0000-0000-0000-000000000000: history has diverged in a restore or a failover.',
	$compare, 'a placeholder in its place is an error too');

#
# Consumers go back along with the events: their cursors are in the same log
#
is( $new->safe_psql('postgres',
		q{SELECT "cursor" FROM obix.consumer_status WHERE consumer = 'mail'}),
	'6', 'the cursor is where it was for the standby');
is( $new->safe_psql('postgres',
		q{SELECT string_agg(sequence::text, ' ' ORDER BY sequence) FROM obix.fetch('mail')}),
	'7 8 9 10 11 12 13 14 15 16 17',
	'what had been acknowledged after that comes again, and what is new');
$new->safe_psql('postgres', q{SELECT obix.ack('mail', 17)});
consumer_ok($new, 'postgres', 'handled', 'lag_events = 0',
	'handlers are called for what is new');
is( $new->safe_psql('postgres',
		q{SELECT count(*) FROM o FULL JOIN test.effect e USING (sequence, id) WHERE o.payload IS NOT NULL AND e.sequence IS NULL OR o.sequence IS NULL}
	),
	'0',
	'what they did is what is there');
($result, $stdout, $stderr) =
  $new->psql('postgres', q{SELECT obix.seek('mail', 20)});
like($stderr, qr/ERROR:  .*20.* beyond the head/,
	'a consumer cannot be moved to where nothing has been');
$new->safe_psql('postgres', q{SELECT obix.seek('mail', 10)});
is($new->safe_psql('postgres', q{SELECT min(sequence) FROM obix.fetch('mail')}),
	'11', 'to a position that both share it can');

# A cursor from elsewhere, of a dump for instance, can be ahead.
$new->safe_psql('postgres',
	q{UPDATE obix.consumer_state SET position = 25 WHERE id = (SELECT id FROM obix.consumer WHERE consumer = 'mail')}
);
fails(
	$new, q{SELECT * FROM obix.fetch('mail')},
	'consumer "mail" is at position 25, beyond the head of outbox "o"',
	'The highest sequence allocated is 18. Events that were read up to that position have been lost in a restore or a failover.',
	'Compare what it has dealt with with what is there, and call obix.seek with a position that both share.',
	'fetching for a consumer that is ahead is an error');
$new->safe_psql('postgres', q{SELECT obix.seek('mail', 17)});
is($new->safe_psql('postgres', q{SELECT count(*) FROM obix.fetch('mail')}),
	'0', 'which obix.seek ends');

#
# The old primary comes back, by pg_rewind
#
# pg_rewind reads the time line from the last checkpoint
$new->safe_psql('postgres', 'CHECKPOINT');
command_ok(
	[
		'pg_rewind',       '--target-pgdata',
		$old->data_dir,    '--source-server',
		$new->connstr('postgres') ],
	'the old primary is rewound');
$old->append_conf('postgresql.conf', 'port = ' . $old->port);
$old->append_conf('postgresql.conf',
	"primary_conninfo = '" . $new->connstr . " application_name=old'\nsynchronous_standby_names = 'absent'");
$old->set_standby_mode;
my $offset = log_offset($old);
$old->start;
$new->wait_for_catchup('old');
is(walk($old, 'postgres', 'o'), walk($new, 'postgres', 'o'),
	'it serves what the new one has');
fails(
	$old, "SELECT * FROM obix.read('o', 15, after_id => '$id15')",
	'event 15 of outbox "o" does not have the expected id',
	"Its id is $other: history has diverged in a restore or a failover.",
	$compare, 'and tells a reader that was ahead as well');
my $waiter = start_wait($old, 'postgres', 'o', 18);
publish($new, 'postgres', 'o', 1);
woken($waiter, 'it goes on with what follows');
unlike_log($old, qr/obix (launcher|worker|dispatcher).*(ERROR|exited)|ERROR.*obix worker/,
	'no worker of obix does anything there', $offset);
is( $old->safe_psql('postgres',
		q{SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ 'obix (worker|dispatcher)'}),
	'0', 'or runs');

#
# And back again, in good order: it has everything
#
$new->wait_for_catchup('old');
my $last = $new->safe_psql('postgres', 'SELECT id FROM o WHERE sequence = 19');
$new->stop;
$old->promote;
is( $old->safe_psql('postgres',
		"SELECT count(*) FROM obix.read('o', 19, after_id => '$last')"),
	'0', 'a reader that has read everything goes on');

#
# Here a standby is synchronous, and absent
#
my $readable =
  "SELECT string_agg(payload::text, ' ') FROM obix.read('o', 19, after_id => '$last')";
my $publisher = start_psql($old, 'postgres', 'publisher',
	qq{SELECT obix.publish('o', '"waits"');\n});
poll_ok($old, 'postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE '%publish%waits%' AND wait_event = 'SyncRep'},
	'a publisher waits for a synchronous standby');
$old->safe_psql('postgres',
	q{SET synchronous_commit = local; SELECT obix.publish('o', '"local"')});
is($old->safe_psql('postgres', $readable), '',
	'until then nobody reads its event, nor those that follow');
$old->safe_psql('postgres',
	q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE '%publish%waits%' AND wait_event = 'SyncRep'}
);
is(scalar(finish_psql($publisher)), 1, 'it can give up waiting');
is($old->safe_psql('postgres', $readable),
	'"waits" "local"', 'which makes both readable');
$old->safe_psql('postgres',
	q{ALTER SYSTEM SET synchronous_standby_names = ''});
$old->reload;
consumer_ok($old, 'postgres', 'handled', 'lag_events = 0',
	'and handlers are called');
unlike_log($_, qr/PANIC|TRAP/, 'no fault in the log of ' . $_->name)
  foreach ($old, $new);

$old->stop;
done_testing();
