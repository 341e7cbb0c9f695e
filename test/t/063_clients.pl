
# The clients in test/clients, in each language, side by side: publishers and
# consumers get through whatever happens to them and to the server.  In the end
# each payment that was not refused has one event, each event has had its effect
# once and in order, and the trace context has come along.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use Fcntl qw(O_NONBLOCK O_RDONLY);
use IPC::Run ();
use ObixTest;
use POSIX qw(mkfifo);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = "$FindBin::RealBin/../clients";
my $python  = '/usr/bin/python3';               # Debian's, which finds its packages
my $lease   = 2;                                # seconds
my $seconds = $PostgreSQL::Test::Utils::timeout_default;
# Sessions of clients that are gone end soon.
my $node = new_node('main', conf => "client_connection_check_interval = '100 ms'\n");

$ENV{LEASE}  = $lease;
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PATH} = $node->config_data('--bindir') . ":$ENV{PATH}";    # for the psql of scripts

# Each language has a database of its own.
my %languages = (
	python => {
		publishers => [ [ $python, "$clients/publish.py" ] ],
		consumer   => [ $python, "$clients/consume.py" ],
		needed     => [ $python, '-c', 'import psycopg' ]
	},
	node => {
		publishers => [ [ 'node', "$clients/publish.js" ] ],
		consumer   => [ 'node', "$clients/consume.js" ],
		needed     => [ 'node', '-e', 'require("pg")' ]
	},
	shell => {
		publishers => [ ["$clients/publish.sh"] ],
		consumer   => ["$clients/consume.sh"],
		needed     => [ 'bash', '-c', 'true' ]
	});

# Can this be run?
sub works
{
	my (@command) = @_;
	my $output;

	return eval { IPC::Run::run(\@command, '<', \undef, '>&', \$output) };
}

foreach my $language (sort keys %languages)
{
	my $missing = join ' ', @{ $languages{$language}{needed} };

	next if works(@{ $languages{$language}{needed} });
	delete $languages{$language};

  SKIP:
	{
		# ./dev says where it provides for Node.js
		skip "the clients in $language cannot be run: $missing", 1
		  unless $ENV{CI} && ($language ne 'node' || $ENV{OBIX_NEEDS_NODE});
		fail("the clients in $language can be run: $missing");
	}
}
push @{ $languages{python}{publishers} }, [ $python, "$clients/orm.py" ]
  if $languages{python} && works($python, '-c', 'import sqlalchemy, psycopg2');
my @languages = sort keys %languages;

#
# Clients as processes
#

my $started = 0;

sub client
{
	my ($language, $name, @command) = @_;
	my $client = { name => "$language $name", log => $node->basedir . '/client-' . ++$started . '.log' };
	local $ENV{PGDATABASE} = $language;

	# a pipe of our own, which servers that are started later do not inherit
	pipe my $read, $client->{input} or die "could not make a pipe: $!";
	$client->{input}->autoflush(1);
	$client->{handle} = IPC::Run::start(
		\@command, '<', $read, '>&', $client->{log},
		IPC::Run::timeout(4 * $seconds));
	close $read;
	$client->{pid} = $client->{handle}{KIDS}[0]{PID};
	return $client;
}

# A consumer of either kind: "receipts" or "messages".
sub start_consumer
{
	my ($language, $consumer) = @_;
	my $folder = $languages{$language}{folder};
	my @target =
		$consumer eq 'receipts' ? ()
	  : $language eq 'shell' ? ('sh', '-c', 'cd "$0" && { test -f $EVENT_ID.json || { cat >$EVENT_ID.json.new && mv $EVENT_ID.json.new $EVENT_ID.json; }; }', $folder)
	  : ($folder);
	my $client = client($language, $consumer, @{ $languages{$language}{consumer} }, $consumer, @target);

	push @{ $languages{$language}{$consumer} }, $client;
	return;
}

sub start_consumers
{
	my ($count) = @_;

	foreach my $language (@languages)
	{
		foreach (1 .. $count)
		{
			start_consumer($language, 'receipts');
			start_consumer($language, 'messages');
		}
	}
	return;
}

# All consumers there are; they are to be ended.
sub take_consumers
{
	return map { (@{ delete $_->{receipts} // [] }, @{ delete $_->{messages} // [] }) } @languages{@languages};
}

# A process and all that come from it.
sub family
{
	my ($pid) = @_;
	my %children;

	foreach my $path (glob '/proc/[0-9]*/stat')
	{
		open my $file, '<', $path or next;
		push @{ $children{$2} }, $1 if (<$file> // '') =~ /^(\d+) \(.*\) \S (\d+) /;
		close $file;
	}
	my @all = ($pid);
	for (my $i = 0; $i < @all; $i++)
	{
		push @all, @{ $children{ $all[$i] } // [] };
	}
	return @all;
}

# The exit status of a client, "signal" if it has none.
sub status_of
{
	my ($client) = @_;

	close $client->{input};
	$client->{handle}->finish;
	my $status = $client->{handle}->full_result(0);
	note "$client->{name}:\n" . slurp_file($client->{log});
	return $status & 127 ? 'signal' : $status >> 8;
}

# Send SIGTERM to clients, and see that all end as they should.
sub ended_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name, @clients) = @_;

	return is(join(', ', grep { !/: 0$/ } map { "$_->{name}: " . status_of($_) } @clients), '', $name);
}

#
# What they do
#

# Payments as input of publishers: every seventh is refused, every fifth is given
# twice, two of three have a trace context.
my $payments = 0;

sub feed
{
	my ($count) = @_;

	foreach my $language (@languages)
	{
		foreach my $publisher (@{ $languages{$language}{running} })
		{
			foreach (1 .. $language eq 'shell' ? $count / 4 : $count)
			{
				my $payment = sprintf '00000000-0000-4000-8000-%012x', ++$payments;
				my $amount  = $payments % 7 == 0 ? 1_000_000_000 : 1 + $payments % 100;
				my $trace =
				  $payments % 3 == 0 ? '' : sprintf '00-%032x-%016x-01 vendor=%d', $payments, $payments, $payments;

				my $line = sprintf "%s %d %s %s\n", $payment, 1 + $payments % 10, $amount, $trace;

				$languages{$language}{wanted}{$payment} = $amount if $payments % 7;
				print { $publisher->{input} } $payments % 5 ? $line : $line x 2;
			}
		}
	}
	return;
}

# Run SQL in the database of each language.
sub in_each
{
	my ($sql) = @_;

	$node->safe_psql($_, $sql) foreach @languages;
	return;
}

# Wait until a query says true in the database of each language.
sub each_ok
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($query, $name) = @_;

	poll_ok($node, $_, $query, "$name: $_") foreach @languages;
	return;
}

my $idle = q{(SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'CALL obix.wait_for%' AND wait_event_type = 'Extension' AND state = 'active')};
my $behind = q{(SELECT sum(lag_events) FROM obix.consumer_status)};

sub caught_up
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name) = @_;

	# what publishers were given they have dealt with
	foreach my $language (@languages)
	{
		my $wanted = keys %{ $languages{$language}{wanted} };

		poll_ok($node, $language, "SELECT count(*) = $wanted FROM app.payment", "$name, publishers: $language");
	}
	each_ok("SELECT $behind = 0", $name);
	return;
}

# What is wrong with what a language has done; '' if nothing.
sub faults
{
	my ($language) = @_;
	my $folder = $languages{$language}{folder};
	my @faults = split /\n/, $node->safe_psql(
		$language, q{
WITH o AS (SELECT sequence, payload, headers, payload ->> 'payment' AS payment, ('x' || substr(payload ->> 'payment', 25))::bit(48)::bigint AS n
		   FROM app.orders
		   WHERE type = 'paid' AND payload ? 'amount')
SELECT format('event %s is applied %s times', sequence, count(r.sequence))
FROM o FULL JOIN app.receipt r USING (sequence)
GROUP BY sequence
HAVING count(r.sequence) <> 1 OR count(o.sequence) <> 1
UNION ALL
SELECT format('event %s comes after %s', sequence, before)
FROM (SELECT sequence, lag(sequence) OVER (ORDER BY place) AS before FROM app.receipt) r
WHERE before > sequence
UNION ALL
SELECT format('the context %s is left of %s', r.traceparent, o.headers)
FROM o JOIN app.receipt r USING (sequence)
WHERE CASE WHEN o.headers ->> 'traceparent' IS NULL THEN r.traceparent IS NOT NULL
	  ELSE r.traceparent !~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-01$'
		   OR substr(r.traceparent, 4, 32) <> substr(o.headers ->> 'traceparent', 4, 32)
		   OR substr(r.traceparent, 37, 16) = substr(o.headers ->> 'traceparent', 37, 16) END IS NOT false
UNION ALL
SELECT format('payment %s has %s events', p.id, count(o))
FROM app.payment p LEFT JOIN o ON o.payment = p.id::text AND (o.payload ->> 'amount')::numeric = p.amount
GROUP BY p.id
HAVING count(o) <> 1
UNION ALL
SELECT format('event %s has no payment', o.sequence)
FROM o
WHERE o.payment IS NOT NULL AND NOT EXISTS (SELECT FROM app.payment p WHERE p.id::text = o.payment)
UNION ALL
SELECT format('payment %s is published with %s', payment, headers)
FROM o
WHERE n IS NOT NULL
	  AND (headers ->> 'traceparent' IS DISTINCT FROM CASE WHEN n % 3 <> 0 THEN format('00-%s-%s-01', lpad(to_hex(n), 32, '0'), lpad(to_hex(n), 16, '0')) END
		   OR headers ->> 'tracestate' IS DISTINCT FROM CASE WHEN n % 3 <> 0 THEN 'vendor=' || n END)
UNION ALL
SELECT format('accounts have %s', sum(balance))
FROM app.account
HAVING sum(balance) <> 10000000 - (SELECT coalesce(sum(amount), 0) FROM app.payment);});
	my %payments = map { split /\|/ } split /\n/, $node->safe_psql($language, 'SELECT id, amount FROM app.payment');
	my $wanted   = $languages{$language}{wanted};

	push @faults, map { "payment $_ is there, but was refused" } grep { !exists $wanted->{$_} } keys %payments;
	push @faults, map { "payment $_ is not there" } grep { ($payments{$_} // 0) != $wanted->{$_} } keys %$wanted;

	# the messages, each under the id of its event
	my %events = map { split /\|/, $_, 2 } split /\n/,
	  $node->safe_psql($language,
		q{SELECT r.id, obix.cloudevent(r) FROM obix.read('app.orders', max_events => 100000) r WHERE type = 'paid' ORDER BY sequence});
	my %files = map { m{([^/]+)\.json$} ? ($1 => slurp_file($_)) : ($_ => '') } glob "$folder/*";

	push @faults, map { "message $_ has no event" } grep { !exists $events{$_} } keys %files;
	push @faults, map { "event $_ has no message" } grep { !exists $files{$_} } keys %events;
	push @faults, map { "message $_ is $files{$_}" } grep { exists $files{$_} && $files{$_} ne "$events{$_}\n" } keys %events;
	return @faults > 10 ? (@faults[0 .. 9], @faults . ' in all') : @faults;
}

sub no_faults
{
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($name) = @_;

	is(join("\n", faults($_)), '', "$name: $_") foreach @languages;
	return;
}

# Publish three events such that the consumers come to a halt with them in hand:
# receipts cannot be written, and the second message would go into a pipe that
# nobody reads.  Returns what let_go wants.
sub halt
{
	my @halted;

	foreach my $language (@languages)
	{
		my $session = $node->background_psql($language);
		my @ids     = split /\n/, $node->safe_psql($language, 'SELECT obix.uuidv7() FROM generate_series(1, 3)');
		my @files   = map { "$languages{$language}{folder}/$_.json" } @ids;

		mkfifo("$files[1].new", 0600) or die "could not make $files[1].new: $!";
		$session->query_safe('BEGIN; LOCK TABLE app.receipt IN SHARE MODE');
		$node->safe_psql($language,
			'INSERT INTO app.orders (id, type, key, payload) VALUES '
			  . join ', ', map { qq{('$_', 'paid', 'account-1', '{"amount": 1}')} } @ids);
		push @halted, { language => $language, session => $session, files => \@files };
	}
	foreach my $halted (@halted)
	{
		$node->poll_query_until($halted->{language},
			q{SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%INTO app.receipt%' AND wait_event_type = 'Lock'}
		) or die "the receipts in $halted->{language} do not halt";
		await_file($halted->{files}[0]);
		ok(!-e $halted->{files}[2], "consumers halt at work: $halted->{language}");
	}
	return @halted;
}

sub await_file
{
	my ($file) = @_;

	foreach (1 .. 100 * $seconds)
	{
		return if -e $file;
		usleep(10_000);
	}
	die "there is no $file";
}

# A line from a pipe; '' if nobody writes to it.
sub read_pipe
{
	my ($path) = @_;
	my $line = '';

	sysopen my $pipe, $path, O_RDONLY | O_NONBLOCK or die "could not open $path: $!";
	foreach (1 .. 20 * $seconds)
	{
		sysread $pipe, $line, 65536, length $line;
		last if $line =~ /\n\z/;
		usleep(10_000);
	}
	close $pipe;
	return $line;
}

# Have what is in hand go on; if somebody still has it in hand, read what comes
# through the pipe.
sub let_go
{
	my ($read, @halted) = @_;

	foreach my $halted (@halted)
	{
		my $file = $halted->{files}[1];

		if ($read)
		{
			my $message = read_pipe("$file.new");

			ok($message ne '', "a message is still in hand: $halted->{language}");
			if ($message ne '')
			{
				# it has been moved to its place
				await_file($file);
				unlink $file or die "could not remove $file: $!";
				append_to_file($file, $message);
			}
		}
		else
		{
			unlink "$file.new" or die "could not remove $file.new: $!";
		}
		$halted->{session}->query_safe('COMMIT');
		$halted->{session}->quit;
	}
	return;
}

#
# The databases
#
foreach my $language (@languages)
{
	my $folder = $languages{$language}{folder} = $node->basedir . "/$language-messages";

	mkdir $folder or die "could not make $folder: $!";
	$node->safe_psql('postgres', "CREATE DATABASE $language TEMPLATE template0 ENCODING 'UTF8'");
	$node->safe_psql($language, slurp_file("$clients/schema.sql"));
	$node->safe_psql(
		$language, q{
ALTER TABLE app.receipt DROP CONSTRAINT receipt_pkey, ADD place bigint GENERATED ALWAYS AS IDENTITY;
SELECT obix.alter_consumer('receipts', max_attempts => 2, backoff => '10 ms');
SELECT obix.alter_consumer('messages', max_attempts => 1000, backoff => '10 ms', max_backoff => '100 ms');});

	foreach my $command (@{ $languages{$language}{publishers} })
	{
		my ($name) = $command->[-1] =~ m{([^/]+)$};

		push @{ $languages{$language}{running} }, client($language, $name, @$command);
	}
}

#
# Killed at work, with three events in hand: the others that are there go on
#
start_consumers(1);
feed(40);
caught_up('consumers keep up');
my @halted = halt();
my @killed = map { family($_->{pid}) } map { (@{ $_->{receipts} }, @{ $_->{messages} }) } @languages{@languages};
start_consumers(1);
kill 'KILL', @killed;
is(join(', ', map { status_of($_) } map { (shift @{ $_->{receipts} }, shift @{ $_->{messages} }) } @languages{@languages}),
	join(', ', ('signal') x (2 * @languages)), 'consumers are killed');
let_go(0, @halted);
start_consumers(1);
caught_up('killed at work, others take over');
no_faults('killed at work');

#
# Sessions are ended, the server is restarted and crashes, while all are at work
#
foreach my $how ('end', 'restart', 'crash')
{
	feed(80);
	foreach my $language (@languages)
	{
		$node->poll_query_until($language, "SELECT $behind > 0 OR (SELECT count(*) FROM app.payment) >= " . keys %{ $languages{$language}{wanted} })
		  or die "nothing happens in $language";
	}
	if ($how eq 'end')
	{
		foreach (1 .. 5)
		{
			$node->safe_psql('postgres',
				q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()}
			);
			usleep(100_000);
		}
	}
	$node->restart if $how eq 'restart';
	crash($node)   if $how eq 'crash';
	$node->start   if $how eq 'crash';
	feed(20);
	caught_up("after $how, all get on");
}
no_faults('after all that');

#
# SIGTERM: at work, what is in hand is finished and acknowledged
#
each_ok("SELECT $idle = 4", 'all wait');
@halted = halt();
my @clients = take_consumers();
kill 'TERM', map { $_->{pid} } @clients;
let_go(1, @halted);
ended_ok('SIGTERM ends consumers at work', @clients);
each_ok(
	q{SELECT min("cursor") = max(sequence) FROM obix.consumer_status, app.orders},
	'what was in hand is acknowledged');
no_faults('after SIGTERM');

# waiting, they end at once
start_consumers(1);
each_ok("SELECT $idle = 2", 'consumers wait');
@clients = take_consumers();
my $start = time;
kill 'TERM', map { $_->{pid} } @clients;
ended_ok('SIGTERM ends consumers that wait', @clients);
cmp_ok(time - $start, '<', 10, 'and at once');
each_ok("SELECT $idle = 0", 'no session stays behind');

#
# What fails is put aside, or tried again until it does not
#
start_consumers(1);
my %blocked;
foreach my $language (@languages)
{
	my $id = $node->safe_psql($language, 'SELECT obix.uuidv7()');

	$blocked{$language} = "$languages{$language}{folder}/$id.json.new";
	mkdir $blocked{$language} or die "could not make $blocked{$language}: $!";
	$node->safe_psql($language,
		qq{INSERT INTO app.orders (id, type, key, payload) SELECT CASE WHEN n = 7 THEN '$id' ELSE obix.uuidv7() END, 'paid', 'account-1', CASE WHEN n = 5 THEN '{"total": 1}' ELSE '{"amount": 1}' END::jsonb FROM generate_series(1, 9) n}
	);
}
each_ok(q{SELECT failed >= 2 AND lag_events = 3 FROM obix.consumer_status WHERE consumer = 'messages'},
	'messages stop at an event that fails');
rmdir $_ or die "could not remove $_: $!" foreach values %blocked;
caught_up('what fails is not in the way of the rest');
no_faults('after failures');
is( $node->safe_psql($_, q{SELECT consumer, payload, attempts, error <> '' FROM obix.dead_letter}),
	'receipts|{"total": 1}|2|t', "an event that always fails is a dead letter: $_")
  foreach @languages;

#
# At the end of their input, publishers end.
#
ended_ok('publishers end', map { @{ $_->{running} } } @languages{@languages});

#
# A consumer that has stopped is for a person to look at
#
in_each(q{
SELECT obix.alter_consumer('receipts', on_failure => 'stop');
SELECT obix.publish('app.orders', '{"total": 2}', type => 'paid');});
foreach my $client (map { @{ delete $_->{receipts} } } @languages{@languages})
{
	is(status_of($client), '1', "a consumer that stops ends the client: $client->{name}");
	like(
		slurp_file($client->{log}),
		qr/consumer "receipts" has stopped at event \d+/,
		'and it says why');
}
@clients = map { @{ delete $_->{messages} } } @languages{@languages};
kill 'TERM', map { $_->{pid} } @clients;
ended_ok('others go on until they are ended', @clients);

#
# README.md shows the clients as they are.
#
my $readme = slurp_file("$clients/../../README.md");
while ($readme =~ /^<!-- from (\S+) -->\n+```\w+\n(.*?)^```$/msg)
{
	my ($file, $block) = ($1, $2);
	my $text = slurp_file("$clients/../../$file");

	# parts of it, in their order
	$text =~ s/^\s+//mg;
	$block =~ s/^\s+//mg;
	my $at = 0;
	foreach my $part (split /^\.\.\.\n/m, $block)
	{
		$at = index $text, $part, $at;
		last if $at < 0;
	}
	cmp_ok($at, '>=', 0, "README.md shows $file as it is");
}

$node->stop;
done_testing();
