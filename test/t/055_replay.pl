
# Readers on a standby do not stand in the way of replay: what they cannot lock
# they do without, for replay may be waiting for their snapshot.
#
# Whoever is in its way would be cancelled only after max_standby_streaming_delay;
# here that is for ever, so nothing but what is tested lets replay go on.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($result, $stdout, $stderr);
my $primary = new_node(
	'primary',
	init => { allows_streaming => 1 },
	conf => <<'CONF');
autovacuum = off
max_standby_archive_delay = -1
max_standby_streaming_delay = -1
statement_timeout = '1min'
CONF

setup_database($primary, 'postgres');
$primary->safe_psql(
	'postgres', q{
SELECT obix.create_outbox(name, partition_width => 10, premake => 1) FROM unnest('{o,cut}'::text[]) name;
SELECT obix.create_consumer('c', 'o');
CREATE TABLE test.t AS SELECT 1 AS n;});
publish($primary, 'postgres', 'o',   8);
publish($primary, 'postgres', 'cut', 15);
settle($primary, 'postgres', 'cut');
$primary->safe_psql('postgres', 'DROP TABLE cut_p0');

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

my $writer     = $primary->background_psql('postgres');
my $maintainer = $primary->background_psql('postgres');

# This transaction flushes what has been written.
sub replayed
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name) = @_;

	$primary->safe_psql('postgres', q{SELECT pg_logical_emit_message(true, '', '')});
	$primary->wait_for_catchup($standby);
	pass($name);
	return;
}

# Lock something on the primary, as maintenance does.
sub lock_there
{
	my ($table) = @_;

	$maintainer->query_safe("BEGIN; LOCK TABLE $table IN ACCESS EXCLUSIVE MODE");
	replayed("$table is locked");
	return;
}

sub unlock_there
{
	my ($table) = @_;

	$maintainer->query_safe('COMMIT');
	replayed("$table is no longer locked");
	return;
}

sub given
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($query, $expected, $name) = @_;

	return is($standby->safe_psql('postgres', $query), $expected, $name);
}

# Replay comes across the snapshot of a query that waits for a lock which replay
# has.  A query that has given up before that is begun again, with more patience.
sub met_by_replay
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($table, $query, $expected, $name) = @_;
	my $waiting = q{SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'reader' AND wait_event_type = 'Lock'),
	EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'startup' AND wait_event = 'RecoveryConflictSnapshot')};
	my ($reader, $state);

	for (my $patience = 1;; $patience *= 2)
	{
		$writer->query_safe('BEGIN; UPDATE test.t SET n = n + 1');
		lock_there($table);
		$reader = start_psql($standby, 'postgres', 'reader',
			"SET application_name = 'reader'; SET deadlock_timeout = '$patience s';\n$query;\n");
		do
		{
			$reader->{handle}->pump_nb;
			$state = $standby->safe_psql('postgres', $waiting);
		} while ($state ne 't|f' && $reader->{handle}->pumpable);

		# remove the row from under it
		$writer->query_safe('COMMIT');
		$primary->safe_psql('postgres', 'VACUUM test.t');
		do
		{
			$reader->{handle}->pump_nb;
			$state = $standby->safe_psql('postgres', $waiting);
		} while ($state eq 't|f' && $reader->{handle}->pumpable);
		last if $state eq 't|t';

		finish_psql($reader);
		note("not met within $patience s");
		unlock_there($table);
	}
	is(join("\n", finish_psql($reader)), $expected, $name) or diag($reader->{stderr});
	replayed('replay has gone on');
	return;
}

#
# The outbox is locked
#
my $waiter = start_wait($standby, 'postgres', 'o', 8);
met_by_replay('o', q{SELECT count(*) FROM obix.read('o', 0)}, '0', 'reading does without');
given(q{SELECT count(*) FROM obix.read('o')}, '0', 'so does reading from the oldest');
given("SET deadlock_timeout = '1 h'; SET lock_timeout = '10 ms'; SET statement_timeout = '${PostgreSQL::Test::Utils::timeout_default}s'; SELECT count(*) FROM obix.read('o', 0)",
	'0', 'also with little patience for locks');
given(q{SELECT obix.high_water_mark('o') <= 8}, 't', 'the high-water mark');
given(q{SELECT high_water_mark IS NULL FROM obix.outbox_status WHERE outbox = 'o'::regclass},
	't', 'the status of the outbox');
given(q{SELECT count(*) FROM obix.partition_status WHERE outbox = 'o'::regclass}, '0', 'of its partitions');
given(q{SELECT consumer, state, lag_events IS NULL FROM obix.consumer_status}, 'c|active|t', 'and of its consumers');
given(q{CALL obix.wait('o', 0, '300 ms')}, '', 'waiting has its timeout');
unlock_there('o');
given(q{SELECT count(*), max(sequence) FROM obix.read('o', 0)}, '8|8', 'then everything can be read');
publish($primary, 'postgres', 'o', 1);
woken($waiter, 'a session that waited all the time is woken');

#
# DEFAULT is locked
#
$maintainer->query_safe('BEGIN; SELECT count(*) FROM o_default');
publish($primary, 'postgres', 'o', 12);
$maintainer->query_safe('SAVEPOINT s; LOCK TABLE o_default IN ACCESS EXCLUSIVE MODE');
replayed('o_default is locked');
my $last = q{SELECT count(*), max(sequence) FROM obix.read('o', 0)};
given($last, '19|19', 'reading goes as far as it can');
given(q{SELECT count(*) FROM obix.read('o', 19)}, '0', 'which can be nowhere');
given(q{SELECT count(*) FROM obix.read('o', 20, after_id => gen_random_uuid())}, '0', 'ids that are there cannot be compared');
given(q{SELECT obix.high_water_mark('o') >= 19}, 't', 'the high-water mark can be had');
given(q{CALL obix.wait('o', 19, '300 ms')}, '', 'nothing can be seen to have come');
unlock_there('o_default');
poll_ok($standby, 'postgres', "SELECT max(sequence) = 21 FROM obix.read('o', 0)", 'then everything can be read');

# Without knowing all that is kept nobody can tell the oldest.
lock_there('cut_default');
($result, $stdout, $stderr) = $standby->psql('postgres', q{SELECT * FROM obix.read('cut')});
like($stderr, qr/ERROR:  could not lock partition "cut_default" during recovery\n.*DETAIL:  Replay has locked it, and may be waiting for this session\.\n.*HINT:  Try again\./s,
	'reading from the oldest kept event');
unlock_there('cut_default');
given(q{SELECT min(sequence), count(*) FROM obix.read('cut')}, '10|6', 'later it can be told');

$standby->stop;
done_testing();
