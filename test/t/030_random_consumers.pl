
# Sessions that publish, consume and administer are interleaved at random, while
# dispatchers are terminated and the server crashes.  A ledger that is written
# with each acknowledgement, and the logs of handlers, tell in the end that no
# event was lost, duplicated or out of order for any consumer.
#
# OBIX_RANDOM_SEEDS="1 2 3" has other seeds, OBIX_RANDOM_STEPS more steps for
# each.  What sessions do depends on the seed alone; when dispatchers do it, not.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my @seeds = split ' ', $ENV{OBIX_RANDOM_SEEDS} // '1 2 3';
my $steps = $ENV{OBIX_RANDOM_STEPS} // 700;

my $max_consumers = 24;
my $node          = new_node(
	'main', conf => qq{
obix.max_consumers = $max_consumers
obix.dispatch_workers = 2
});

# Consumers that are fetched for.  shared: by several sessions, each time in one
# transaction; otherwise by one session, which acknowledges in another one.
# Those with types get type c now and then as well.
my %external = (
	stop       => { outbox => 'q1', shared => 1, options => 'max_attempts => 3' },
	dead       => { outbox => 'q2', types  => 1, options => q{on_failure => 'dead_letter', max_attempts => 2} },
	hold       => { outbox => 'q1', options => q{on_failure => 'dead_letter', hold_key => true, max_attempts => 1} },
	hold_tx    => { outbox => 'q2', shared => 1, options => q{on_failure => 'dead_letter', hold_key => true, max_attempts => 2} },
	early      => { outbox => 'q1', options => q{ordering => 'available', max_attempts => 2} },
	early_tx   => { outbox => 'q2', shared => 1, types => 1, options => q{ordering => 'available', on_failure => 'dead_letter', max_attempts => 2} },
	early_dead => { outbox => 'q1', types  => 1, options => q{ordering => 'available', on_failure => 'dead_letter', max_attempts => 1} });

# Those with handlers.  log: the table that the handlers write to.
my %handled = (
	h_one   => { outbox => 'q1', options => q{handler => 'one', on_failure => 'dead_letter', hold_key => true, max_attempts => 2} },
	h_batch => { outbox => 'q1', types => 1, options => q{batch_handler => 'many', ordering => 'available', batch_size => 20, on_failure => 'dead_letter', max_attempts => 2} },
	h_both  => { outbox => 'q2', options => q{handler => 'one', batch_handler => 'many', batch_size => 50, max_attempts => 3} },
	h_early => { outbox => 'q2', options => q{handler => 'one', batch_handler => 'many', ordering => 'available', batch_size => 7, max_attempts => 3} },
	h_new   => { outbox => 'q1', tables => 1, options => q{handler => 'one', batch_handler => 'many', on_failure => 'dead_letter', max_attempts => 2} },
	h_newer => { outbox => 'q2', tables => 1, types => 1, options => q{batch_handler => 'many', ordering => 'available', on_failure => 'dead_letter', max_attempts => 2} });

my @external = sort keys %external;
my @handled  = sort keys %handled;
my @shared   = grep { $external{$_}{shared} } @external;
my @own      = grep { !$external{$_}{shared} } @external;

# What may come of the interleaving; anything else is a fault.
my $expected_errors = join '|', (
	'canceling statement due to lock timeout',
	'deadlock detected',
	'could not serialize access',
	'consumer "\w+" has stopped at event',
	'is not being delivered to consumer',
	'is not the next of consumer',
	'cannot have been delivered to consumer',
	'may not be what consumer',
	'current transaction is aborted',
	'is held behind another of its key',
	'has no dead letter',
	'is being served',
	'division by zero',
	'rebuild of consumer "\w+" has stopped after',
	'cannot rebuild while obix.dispatch_workers is 0',
	'terminating connection due to administrator command');

my ($db, %session, %client, @prepared, @open_rebuilds, $gid, @unexpected, @log);

sub pick
{
	return $_[ int rand @_ ];
}

sub chance
{
	my ($percent) = @_;

	return rand(100) < $percent;
}

#
# Sessions: like BackgroundPsql's query, but without a note of each
#
my $asked = 0;

sub connect_session
{
	my ($name) = @_;
	my $psql = $node->background_psql($db, on_error_stop => 0);

	$session{$name} = { name => $name, psql => $psql };
	ask($name,
		q{SET lock_timeout = '100ms'; SET client_min_messages = error; SET search_path = app;}
	);
	return;
}

sub send_sql
{
	my ($name, $sql) = @_;
	my $psql = $session{$name}{psql};
	my $end  = 'asked ' . ++$asked . ':';

	push @log, "$name: $sql";
	$psql->{stdin} .= "$sql\n;\n\\echo '$end'\n\\warn '$end'\n";
	$session{$name}{end} = $end;
	$psql->{run}->pump_nb;
	return;
}

# The result of a statement, undef if it failed.
sub answer
{
	my ($name) = @_;
	my $psql   = $session{$name}{psql};
	my $end    = $session{$name}{end};
	my $start  = time;

	until ($psql->{stdout} =~ /\Q$end\E\n/ && $psql->{stderr} =~ /\Q$end\E\n/)
	{
		$psql->{run}->pump;
		die "no answer in session $name" if time - $start > 60;
	}
	my ($result, $errors) = ($psql->{stdout}, $psql->{stderr});
	$psql->{stdout} = '';
	$psql->{stderr} = '';
	$result =~ s/\n?\Q$end\E\n//;
	$errors =~ s/\Q$end\E\n//;
	push @log, "$name:   -> " . ($errors =~ /ERROR:/ ? $errors : $result);
	return $result unless $errors =~ /(ERROR|FATAL|PANIC):/;
	unexpected("$name: $errors") unless $errors =~ /$expected_errors/;
	return;
}

sub ask
{
	my ($name, $sql) = @_;

	send_sql($name, $sql);
	return answer($name);
}

sub unexpected
{
	my ($what) = @_;

	push @unexpected, $what;
	diag("$what\n" . join("\n", splice @log, -12)) if @unexpected < 5;
	return;
}

# Run statements as one transaction; true if it was committed.
sub transaction
{
	my ($name, @statements) = @_;

	foreach my $sql ('BEGIN', @statements)
	{
		next if defined ask($name, $sql);
		ask($name, 'ROLLBACK');
		return 0;
	}
	return defined ask($name, 'COMMIT');
}

sub restart_sessions
{
	foreach my $name (sort keys %session)
	{
		eval { $session{$name}{psql}->quit };
		connect_session($name);
	}
	delete $_->{state} foreach values %session;
	@open_rebuilds = ();
	$_ = [] foreach values %client;
	return;
}

#
# What is consumed
#
sub set_up
{
	my ($seed) = @_;

	$db = "seed_$seed";
	$node->safe_psql('postgres', "CREATE DATABASE $db");
	setup_database($node, $db);
	$node->safe_psql(
		$db, q{
CREATE SCHEMA app;
SET search_path = app;
SELECT obix.create_outbox('app.q1');
SELECT obix.create_outbox('app.q2', partition_width => 400, premake => 3);

-- sessions: what was acknowledged, between two seeks of a consumer each
CREATE TABLE ledger (n bigint GENERATED ALWAYS AS IDENTITY, consumer text, epoch integer, sequence bigint);
CREATE TABLE control (consumer text PRIMARY KEY, epoch integer NOT NULL DEFAULT 0);

-- what need not have been acknowledged, or not in order
CREATE TABLE excused (consumer text, first bigint, last bigint);
CREATE TABLE requeued (consumer text, sequence bigint);

-- handlers: what was applied, and whether they still fail
CREATE TABLE calm (yes boolean);
INSERT INTO calm VALUES (false);
CREATE SEQUENCE attempt;
CREATE TABLE parent (id bigint PRIMARY KEY);
CREATE TABLE child (id bigint REFERENCES parent DEFERRABLE INITIALLY DEFERRED);

CREATE FUNCTION pass(e obix.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.005); END $$;
CREATE FUNCTION dice(salt bigint, sides integer) RETURNS integer LANGUAGE sql AS $$
	SELECT (hashint8extended($1, 42) & 1048575)::integer % $2 $$;

-- fail by event and attempt, and always for some events, if there is a way on
CREATE FUNCTION fail_now_and_then(events bigint[], poison boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	try bigint := nextval('attempt');
BEGIN
	IF (SELECT yes FROM calm) THEN
		RETURN;
	END IF;
	IF (poison AND EXISTS (SELECT FROM unnest(events) s WHERE dice(s, 61) = 0)) OR dice(events[1] * 1000 + try, 12) = 0 THEN
		RAISE EXCEPTION 'poison';
	ELSIF dice(events[1] * 1000 + try, 25) = 1 THEN
		INSERT INTO child VALUES (-1);
	ELSIF dice(events[1] * 1000 + try, 200) = 2 THEN
		PERFORM pg_sleep(1);
	END IF;
END $$;});

	foreach my $name (@handled)
	{
		my $consumer = $handled{$name};
		my $types    = $consumer->{types}  ? q{, types => '{a,b}'}          : '';
		my $tables   = $consumer->{tables} ? ", tables => '{log_of_$name}'" : '';
		my $options  = $consumer->{options};
		my $poison   = $options =~ /dead_letter/ ? 'true' : 'false';

		$options =~ s/handler => '(\w+)'/handler => '$name\_$1'/g;
		$node->safe_psql(
			$db, qq{
SET search_path = app;
CREATE TABLE log_of_$name (n bigint GENERATED ALWAYS AS IDENTITY, sequence bigint, key text);
CREATE FUNCTION $name\_one(e obix.event) RETURNS void LANGUAGE plpgsql AS \$\$
BEGIN
	INSERT INTO log_of_$name (sequence, key) VALUES (e.sequence, e.key);
	PERFORM fail_now_and_then(ARRAY[e.sequence], $poison);
END \$\$;
CREATE FUNCTION $name\_many(e obix.event[]) RETURNS void LANGUAGE plpgsql AS \$\$
DECLARE
	one obix.event;
BEGIN
	FOREACH one IN ARRAY e LOOP
		INSERT INTO log_of_$name (sequence, key) VALUES (one.sequence, one.key);
	END LOOP;
	PERFORM fail_now_and_then(ARRAY(SELECT x.sequence FROM unnest(e) x), $poison);
END \$\$;
SELECT obix.create_consumer('$name', 'app.$consumer->{outbox}', $options$types$tables,
							backoff => '1 ms', max_backoff => '20 ms', timeout => '300 ms');
});
	}
	foreach my $name (@external)
	{
		my $consumer = $external{$name};
		my $types    = $consumer->{types} ? q{, types => '{a,b}'} : '';

		$node->safe_psql(
			$db, qq{
INSERT INTO app.control VALUES ('$name');
SELECT obix.create_consumer('$name', 'app.$consumer->{outbox}', $consumer->{options}$types,
							backoff => '1 ms', max_backoff => '20 ms');
});
	}

	%session       = ();
	%client        = map { $_ => [] } @own;
	@prepared      = ();
	@open_rebuilds = ();
	$gid           = 0;
	connect_session($_)
	  foreach (map { "publisher_$_" } 1 .. 4),
	  (map { "consumer_$_" } 1 .. 3), 'client', 'admin', 'rebuild';
	return;
}

#
# Publishers
#
sub publish_sql
{
	my $outbox = pick('q1', 'q2');
	my $count  = chance(2) ? 1200 : chance(20) ? int rand 40 : pick(1, 1, 2, 5);
	my $key    = pick(q{'k' || g % 5}, q{'k' || g % 2}, 'NULL');
	my $type   = $count > 1000 ? q{'c'} : pick(q{'a'}, q{'b'}, q{'c'}, q{chr(97 + g % 3)}, 'NULL');

	return "INSERT INTO $outbox (payload, type, key) SELECT to_jsonb(g), $type, $key FROM generate_series(1, $count) g"
	  if chance(50);
	return "SELECT count(obix.publish('app.$outbox', to_jsonb(g), $type, $key)) FROM generate_series(1, $count) g";
}

sub publisher_step
{
	my ($name) = @_;
	my $state  = $session{$name}{state};

	if (!$state)
	{
		if (chance(50))
		{
			ask($name, publish_sql());
			return;
		}
		ask($name, 'BEGIN' . (chance(20) ? ' ISOLATION LEVEL REPEATABLE READ' : ''));
		$session{$name}{state} = { savepoints => 0 };
		return;
	}

	my $what = rand 100;
	my $ok   = 1;

	if ($what < 45)
	{
		$ok = defined ask($name, publish_sql());
	}
	elsif ($what < 60)
	{
		ask($name, 'SAVEPOINT s' . ++$state->{savepoints});
	}
	elsif ($what < 72 && $state->{savepoints})
	{
		ask($name, "ROLLBACK TO s$state->{savepoints}; RELEASE s$state->{savepoints}");
		$state->{savepoints}--;
	}
	elsif ($what < 86)
	{
		end_transaction($name, $what < 80 ? 'COMMIT' : 'ROLLBACK');
	}
	elsif ($what < 92)
	{
		prepare_transaction($name);
	}
	end_transaction($name, 'ROLLBACK') unless $ok;
	return;
}

sub end_transaction
{
	my ($name, $how) = @_;

	delete $session{$name}{state};
	return defined ask($name, $how);
}

sub prepare_transaction
{
	my ($name) = @_;

	return if @prepared > 5;
	$gid++;
	push @prepared, "$db $name $gid" if end_transaction($name, "PREPARE TRANSACTION '$db $name $gid'");
	return;
}

sub end_prepared
{
	my ($name) = @_;

	return unless @prepared;
	my ($one) = grep { /consumer/ } @prepared;

	# one that has fetched keeps others from it
	$one = pick(@prepared) unless defined $one && chance(70);
	@prepared = grep { $_ ne $one } @prepared;
	ask($name, (chance(70) ? 'COMMIT' : 'ROLLBACK') . " PREPARED '$one'");
	return;
}

#
# Consumers
#
sub fetch_sql
{
	my ($consumer) = @_;
	my $events = pick(1, 2, 3, 10, 10, 100, 3000);
	my $bytes  = pick(1, 300, 3000, 1000000, 1000000);

	return
	  "SELECT string_agg(sequence::text, ',') FROM obix.fetch('$consumer', $events, $bytes)";
}

# To be run after the acknowledgement, under the mutex.
sub ledger_sql
{
	my ($consumer, @events) = @_;

	return sprintf q{INSERT INTO ledger (consumer, epoch, sequence) SELECT consumer, epoch, s FROM control, unnest('{%s}'::bigint[]) WITH ORDINALITY u (s, o) WHERE consumer = '%s' ORDER BY o},
	  join(',', @events), $consumer;
}

# How much of what was fetched is acknowledged.
sub some_of
{
	my ($events) = @_;

	return chance(60) ? scalar @$events : 1 + int rand @$events;
}

# A position that acknowledges the first events of what was fetched, and no more:
# the last of them, or one between that and the next.
sub position_of
{
	my ($count, $events) = @_;
	my $last  = $events->[ $count - 1 ];
	my $space = $count < @$events ? $events->[$count] - $last : 1;

	return $last + (chance(30) ? int rand $space : 0);
}

# One transaction with fetch and acknowledgement, a statement at a time
sub consumer_step
{
	my ($name) = @_;
	my $state  = $session{$name}{state};
	my $ok     = 1;

	if (!$state)
	{
		my $consumer = pick(@shared);

		$session{$name}{state} = { consumer => $consumer, events => [], savepoint => undef };
		ask($name, 'BEGIN' . (chance(30) ? ' ISOLATION LEVEL REPEATABLE READ' : ''));
		return;
	}

	my $consumer = $state->{consumer};
	my $what     = rand 100;

	if (!@{ $state->{events} } && $what < 60)
	{
		my $result = ask($name, fetch_sql($consumer));

		$ok = defined $result;
		$state->{events} = [ split /,/, $result // '' ];
		$state->{acked} = 0;
	}
	elsif ($what < 12 && !$state->{savepoint})
	{
		ask($name, 'SAVEPOINT s');
		$state->{savepoint} = [ @{ $state->{events} } ];
	}
	elsif ($what < 22 && $state->{savepoint})
	{
		ask($name, 'ROLLBACK TO s; RELEASE s');

		# the mutex may have gone with it, if it was taken there
		$state->{events}    = [];
		$state->{savepoint} = undef;
	}
	elsif ($what < 60 && @{ $state->{events} })
	{
		my $count    = some_of($state->{events});
		my $position = position_of($count, $state->{events});
		my @acked    = splice @{ $state->{events} }, 0, $count;

		$ok = defined ask($name, "SELECT obix.ack('$consumer', $position)")
		  && defined ask($name, ledger_sql($consumer, @acked));
		$ok &&= defined ask($name, "SELECT obix.ack('$consumer', $acked[0])")
		  if chance(20);
	}
	elsif ($what < 68 && @{ $state->{events} })
	{
		$ok = defined ask($name, "SELECT obix.fail('$consumer', $state->{events}[0], 'no')");
		$state->{events} = [];
	}
	elsif ($what < 70 && @{ $state->{events} })
	{
		$ok = 0;
		unexpected("$name: acknowledged what does not exist")
		  if defined ask($name, "SELECT obix.ack('$consumer', 1000000)");
	}
	elsif ($what < 96)
	{
		end_transaction($name, chance(85) ? 'COMMIT' : 'ROLLBACK');
	}
	elsif (!grep { /consumer/ } @prepared)
	{
		prepare_transaction($name);
	}
	end_transaction($name, 'ROLLBACK') unless $ok;
	return;
}

# Fetch, and later acknowledge in another transaction
sub client_step
{
	my $consumer = chance(25) ? 'hold' : pick(@own);
	my $events   = $client{$consumer};
	my $what     = rand 100;

	if (!@$events || $what < 8)
	{
		my $result = ask('client', fetch_sql($consumer));

		$client{$consumer} = [ split /,/, $result // '' ] if defined $result;
	}
	elsif ($what < 62)
	{
		my @acked      = @$events[ 0 .. some_of($events) - 1 ];
		my $position   = position_of(scalar @acked, $events);
		my @statements = ("SELECT obix.ack('$consumer', $position)", ledger_sql($consumer, @acked));

		if (chance(10))
		{
			ask('client', $_) foreach 'BEGIN', @statements, 'ROLLBACK';
		}
		elsif (transaction('client', chance(20) ? ('SAVEPOINT s', @statements, 'ROLLBACK TO s') : (), @statements))
		{
			splice @$events, 0, scalar @acked;
		}
		else
		{
			$client{$consumer} = [];
		}
	}
	elsif ($what < 84)
	{
		ask('client', "SELECT obix.fail('$consumer', $events->[0], 'no')");
		$client{$consumer} = [];
	}
	elsif ($what < 88)
	{
		unexpected("acknowledged what does not exist")
		  if defined ask('client', "SELECT obix.ack('$consumer', 1000000)");
	}
	elsif ($what < 92)
	{
		ask('client', "SELECT obix.ack('$consumer', 1)") if $events->[0] > 1;
	}
	elsif ($what < 96)
	{
		my $none = ask('client',
			"SELECT sequence FROM $external{$consumer}{outbox} WHERE payload IS NULL ORDER BY sequence DESC LIMIT 1");

		unexpected("the failure of a placeholder was accepted")
		  if $none && defined ask('client', "SELECT obix.fail('$consumer', $none, 'no')");
	}
	return;
}

#
# Administration
#
sub letters_of
{
	my ($consumer, $states) = @_;

	return split /\n/, $node->safe_psql($db,
		"SELECT sequence FROM obix.dead_letter WHERE consumer = '$consumer' AND state IN ($states) ORDER BY sequence"
	);
}

sub seek_consumer
{
	my ($consumer) = @_;
	my $cursor = $node->safe_psql($db,
		"SELECT \"cursor\" FROM obix.consumer_status WHERE consumer = '$consumer'");
	my $head = $node->safe_psql($db,
		"SELECT head FROM obix.outbox_status WHERE outbox = 'app.$external{$consumer}{outbox}'::regclass");
	my $to = $cursor + pick(-300, -30, -10, -5, -2, -1, 0, 1, 4);

	$to = 0     if $to < 0;
	$to = $head if $to > $head;

	# the first takes the mutex and changes nothing
	my $done = transaction(
		'admin',
		"SELECT obix.ack('$consumer', 0)",
		qq{INSERT INTO excused SELECT '$consumer', from_sequence, least(to_sequence, $to) FROM obix.consumer_late
		   WHERE id = (SELECT id FROM obix.consumer WHERE consumer = '$consumer') AND NOT requeued AND from_sequence <= $to},
		qq{INSERT INTO excused SELECT '$consumer', position + 1, $to FROM obix.consumer_state
		   WHERE id = (SELECT id FROM obix.consumer WHERE consumer = '$consumer') AND position < $to},
		"UPDATE control SET epoch = epoch + 1 WHERE consumer = '$consumer'",
		"SELECT obix.seek('$consumer', $to)",
		chance(10) ? 'SELECT 1 / 0' : ());
	$client{$consumer} = [] if $done && exists $client{$consumer};
	return;
}

sub admin_step
{
	my $what     = rand 100;
	my $consumer = chance(20) ? 'hold' : pick(@external, @handled);
	my $any      = $external{$consumer} // $handled{$consumer};

	if ($what < 30)
	{
		my $requeue  = chance(70);
		my ($letter) = pick(letters_of($consumer, $requeue ? q{'failed'} : q{'failed', 'held'}));
		my $function = $requeue ? 'requeue' : 'discard';

		return unless defined $letter;
		my $note = $requeue ? "INSERT INTO requeued VALUES ('$consumer', $letter)" :
		  "INSERT INTO excused VALUES ('$consumer', $letter, $letter)";
		my $sql = "SELECT obix.$function('$consumer', $letter)";

		if (chance(20))
		{
			transaction('admin', 'SAVEPOINT s', $sql, 'ROLLBACK TO s');
		}
		elsif (chance(20))
		{
			ask('admin', $_) foreach 'BEGIN', $sql, 'ROLLBACK';
		}
		else
		{
			transaction('admin', $sql, $note);
		}
	}
	elsif ($what < 34)
	{
		ask('admin', "SELECT obix.pause('$consumer')");
	}
	elsif ($what < 58)
	{
		ask('admin', "SELECT obix.resume(consumer) FROM obix.consumer_status WHERE state IN ('stopped', 'paused')");
	}
	elsif ($what < 64)
	{
		ask('admin', sprintf "SELECT obix.alter_consumer('%s', types => '{%s}')", $consumer, pick('a,b', 'b,a,c'))
		  if $any->{types};
	}
	elsif ($what < 70)
	{
		seek_consumer($consumer) if $external{$consumer};
	}
	elsif ($what < 77)
	{
		ask('admin', q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'obix dispatcher' AND datname = current_database()});
	}
	elsif ($what < 82)
	{
		ask('admin', 'ALTER SYSTEM SET obix.dispatch_workers = ' . pick(0, 2, 2, 4));
		ask('admin', 'SELECT pg_reload_conf()');
	}
	elsif ($what < 86)
	{
		my $name = 'passing';

		ask('admin', $_)
		  foreach "SELECT obix.create_consumer('$name', 'app.q1', handler => 'pass')",
		  'SELECT pg_sleep(0.01)', "SET lock_timeout = '5s'",
		  "SELECT obix.drop_consumer('$name')", "SET lock_timeout = '100ms'";
	}
	else
	{
		end_prepared('admin');
	}
	return;
}

# A rebuild runs beside everything else.
sub rebuild_step
{
	if (@open_rebuilds)
	{
		my $psql = $session{rebuild}{psql};
		$psql->{run}->pump_nb;
		return unless $psql->{stderr} =~ /\Q$session{rebuild}{end}\E/;
		answer('rebuild');
		@open_rebuilds = ();
		return;
	}
	my $consumer = pick(grep { $handled{$_}{tables} } @handled);
	my $skip     = chance(80) ? 'true' : 'false';

	ask('admin', 'ALTER SYSTEM SET obix.dispatch_workers = 2');
	ask('admin', 'SELECT pg_reload_conf()');

	send_sql('rebuild', "CALL obix.rebuild('$consumer', $skip)");
	@open_rebuilds = ($consumer);
	return;
}

sub random_steps
{
	my ($seed) = @_;
	my %crash = map { int(rand $steps) => 1 } 1 .. 1 + $seed % 2;

	foreach my $step (1 .. $steps)
	{
		my $what = rand 100;

		if ($crash{$step})
		{
			crash($node);
			$node->start;
			restart_sessions();
		}
		if    ($what < 25) { publisher_step('publisher_' . pick(1 .. 4)) }
		elsif ($what < 65) { consumer_step('consumer_' . pick(1 .. 3)) }
		elsif ($what < 85) { client_step() }
		elsif ($what < 97) { admin_step() }
		else               { rebuild_step() }
	}
	return;
}

#
# The end
#

# What a consumer gets in any case
sub wanted
{
	my ($consumer) = @_;

	return $consumer->{types} ? q{AND type IN ('a', 'b')} : '';
}

sub check_empty
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($query, $name) = @_;

	return is($node->safe_psql($db, "SET search_path = app; $query"), '', $name);
}

sub drain
{
	foreach my $name (sort keys %session)
	{
		next if $name eq 'rebuild';
		end_transaction($name, 'COMMIT') if $session{$name}{state};
	}
	end_prepared('admin') while @prepared;
	ask('admin', 'UPDATE calm SET yes = true');
	ask('admin', 'ALTER SYSTEM SET obix.dispatch_workers = 3');
	ask('admin', 'SELECT pg_reload_conf()');
	if (@open_rebuilds)
	{
		answer('rebuild');
	}
	ask('admin', 'SELECT obix.cancel_rebuild(consumer) FROM obix.rebuild_progress');
	$_->{psql}->quit foreach values %session;

	is_settled($node, $db, "app.$_", "$_ settles") foreach 'q1', 'q2';

	# everything that failed gets another chance
	foreach my $name (@external, @handled)
	{
		$node->safe_psql($db, "SELECT obix.resume('$name')");
		foreach my $letter (letters_of($name, q{'failed'}))
		{
			$node->safe_psql($db,
				"INSERT INTO app.requeued VALUES ('$name', $letter); SELECT obix.requeue('$name', $letter)"
			);
		}
	}
	my $missing = join ' UNION ALL ',
	  map { "SELECT '$_', sequence FROM app.$handled{$_}{outbox} e WHERE payload IS NOT NULL "
		  . wanted($handled{$_})
		  . " AND NOT EXISTS (SELECT FROM app.log_of_$_ l WHERE l.sequence = e.sequence)"
		  . " AND NOT EXISTS (SELECT FROM app.excused x WHERE x.consumer = '$_' AND e.sequence BETWEEN x.first AND x.last)"
	  } @handled;
	poll_ok(
		$node,
		$db,
		qq{SELECT NOT EXISTS ($missing)
		   AND NOT EXISTS (SELECT FROM obix.consumer_status WHERE late_ranges > 0 AND consumer LIKE 'h\\_%')
		   AND NOT EXISTS (SELECT FROM obix.dead_letter WHERE consumer LIKE 'h\\_%')},
		'handlers get through')
	  or diag($node->safe_psql($db,
			"SELECT * FROM obix.consumer_status WHERE consumer LIKE 'h%'; SELECT consumer, sequence, key, state FROM obix.dead_letter WHERE consumer LIKE 'h%'; $missing"
	  ));

	foreach my $name (@external)
	{
		my $rounds = 0;

		while ($rounds++ < 1000)
		{
			my $events = $node->safe_psql($db, "SELECT string_agg(sequence::text, ',') FROM obix.fetch('$name', 500)");

			last if $events eq '';
			my @events = split /,/, $events;

			$node->safe_psql($db,
				"SET search_path = app; BEGIN; SELECT obix.ack('$name', $events[-1]); "
				  . ledger_sql($name, @events)
				  . '; COMMIT');
		}
		cmp_ok($rounds, '<', 1000, "consumer $name gets to an end");
	}
	return;
}

sub check_ledgers
{
	check_empty(
		q{SELECT consumer, epoch, sequence, count(*) FROM ledger GROUP BY 1, 2, 3 HAVING count(*) > 1 LIMIT 10},
		'nothing was acknowledged twice');
	foreach my $name (@external, @handled)
	{
		my $consumer = $external{$name} // $handled{$name};
		my $outbox   = $consumer->{outbox};
		my $wanted   = wanted($consumer);
		my $possible = $consumer->{types} ? q{AND type IN ('a', 'b', 'c')} : '';
		my $ledger = $external{$name} ?
		  "(SELECT l.n, l.epoch, l.sequence, e.key FROM ledger l LEFT JOIN $outbox e USING (sequence) WHERE l.consumer = '$name')" :
		  "(SELECT n, 0 AS epoch, sequence, key FROM log_of_$name)";
		my $order = $consumer->{options} =~ /available/ ? '' :
		  $consumer->{options} =~ /hold_key/ ? 'epoch, key' : 'epoch';

		check_empty(
			qq{SELECT sequence, type, key FROM $outbox e WHERE payload IS NOT NULL $wanted
			   AND NOT EXISTS (SELECT FROM $ledger l WHERE l.sequence = e.sequence)
			   AND NOT EXISTS (SELECT FROM excused x WHERE x.consumer = '$name' AND e.sequence BETWEEN x.first AND x.last)
			   ORDER BY 1 LIMIT 10},
			"consumer $name has missed nothing");
		check_empty(
			qq{SELECT sequence FROM $ledger l WHERE NOT EXISTS
			   (SELECT FROM $outbox e WHERE e.sequence = l.sequence AND payload IS NOT NULL $possible) LIMIT 10},
			"and has got nothing else");
		check_empty(
			qq{SELECT sequence, count(*) FROM $ledger l GROUP BY epoch, sequence HAVING count(*) > 1 LIMIT 10},
			"nor anything twice");
		next if $order eq '';
		my $in_order = $order =~ /key/ ? 'key IS NOT NULL' :
		  "NOT EXISTS (SELECT FROM requeued r WHERE r.consumer = '$name' AND r.sequence = l.sequence)";
		check_empty(
			qq{SELECT n, before, sequence FROM
			   (SELECT n, sequence, lag(sequence) OVER (PARTITION BY $order ORDER BY n) AS before
				FROM $ledger l WHERE $in_order) o
			   WHERE before > sequence ORDER BY n LIMIT 10},
			"nor out of order");
	}
	check_empty(
		q{SELECT consumer, delivered, dead_lettered, failed FROM obix.consumer_status
		  WHERE delivered < (SELECT count(*) FROM ledger l WHERE l.consumer = consumer_status.consumer)
				OR failed < dead_lettered},
		'counters are plausible');

	# holes that were seen ahead of the cursor may be remembered
	check_empty(
		'SELECT l.* FROM obix.consumer_late l JOIN obix.consumer_state s USING (id) WHERE from_sequence <= greatest(position, scanned)',
		'nothing is late any more');
	check_empty(q{SELECT id, sequence, state FROM obix.parked_event}, 'no dead letter is left');
	check_empty('SELECT id FROM obix.rebuild_state', 'no rebuild is left');
	check_empty(q{SELECT nspname FROM pg_namespace WHERE nspname LIKE 'obix_rebuild%'}, 'nor its tables');
	poll_ok($node, $db,
		q{SELECT count(*) = 0 FROM pg_locks WHERE locktype = 'object' AND classid = 'obix.consumer'::regclass AND objsubid = 1},
		'no mutex is held');
	poll_ok(
		$node,
		$db,
		q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'obix dispatcher'},
		'dispatchers leave');
	return;
}

# Entries in shared memory come free again: of consumers that are dropped, and
# of those whose creation was rolled back.
sub check_entries
{
	my $create = q{PERFORM obix.create_consumer('entry_' || i, 'app.q1', start_after => 0, types => '{none}', handler => 'app.h_one_one')};
	my $left   = $max_consumers - @external - @handled;

	my ($result, $stdout, $stderr) = $node->psql(
		$db, qq{
DO \$\$
BEGIN
	FOR i IN 1 .. 50 LOOP
		$create;
		IF i % 3 = 0 THEN
			ROLLBACK;
		ELSE
			COMMIT;
			IF i % 3 = 1 THEN
				BEGIN
					PERFORM obix.drop_consumer('entry_' || i);
					RAISE division_by_zero;
				EXCEPTION WHEN division_by_zero THEN NULL;
				END;
			END IF;
			PERFORM obix.drop_consumer('entry_' || i);
			COMMIT;
		END IF;
	END LOOP;
	FOR i IN 1 .. $left LOOP
		$create;
	END LOOP;
END \$\$});

	is("$result $stderr", '0 ', 'entries of consumers are free again');
	return;
}

foreach my $seed (@seeds)
{
	my $start = time;

	note "seed $seed";
	srand $seed;
	@unexpected = ();
	@log        = ();
	set_up($seed);
	random_steps($seed);
	note sprintf 'steps took %.1f s', time - $start;
	drain();
	is(join("\n", @unexpected), '', 'no unexpected error');
	check_ledgers();
	check_entries();
	note $node->safe_psql($db, 'SELECT consumer, delivered, failed, dead_lettered FROM obix.consumer_status');
	$node->safe_psql('postgres', "DROP DATABASE $db WITH (FORCE)");
	note sprintf 'all took %.1f s', time - $start;
}

unlike_log($node, qr/PANIC|TRAP|was terminated by signal (?!9)/, 'no process has crashed');
$node->stop;
done_testing();
