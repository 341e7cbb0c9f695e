
# Leases with real clients: one that is stopped past the end of its lease finds,
# when it goes on, that another has taken over: what it then says is refused.
# And all of it works with every statement through another session, as behind a
# transaction pooler.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $db   = 'postgres';
my $node = new_node('main');

setup_database($node, $db);
$node->safe_psql(
	$db, q{
SELECT obix.create_outbox('o');
SELECT obix.create_consumer('c', 'o', backoff => '1 ms', max_backoff => '1 ms')});
publish($node, $db, 'o', 100);

# A client: a psql that we can stop.
sub client
{
	my $session = $node->background_psql($db, on_error_stop => 0);

	$session->{obix_client} = $session->{run}->{KIDS}[0]{PID};
	return $session;
}

# Run a statement and return what it says, errors included.
sub ask
{
	my ($session, $statement) = @_;
	my $output = $session->query($statement);

	$output .= $session->{stderr};
	$session->{stderr} = '';
	return $output;
}

# One statement through a session of its own.
sub pooled
{
	my ($statement) = @_;
	my ($result, $stdout, $stderr) = $node->psql($db, $statement);

	return $stdout . $stderr;
}

sub sequences
{
	my ($token, $count) = @_;

	return
	  "SELECT string_agg(sequence::text, ' ') FROM obix.fetch('c', $count, token => $token)";
}

#
# Stopped past its lease
#
my $first  = client();
my $second = client();
my $token  = ask($first, q{SELECT obix.acquire('c', '1 min')});
is(ask($first,  sequences($token, 5)),                 '1 2 3 4 5', 'the holder fetches');
is(ask($second, q{SELECT obix.acquire('c', '1 min')}), '', 'nobody else can acquire it');
like(
	ask($second, q{SELECT obix.fetch('c')}),
	qr/consumer "c" is held by somebody else/,
	'or fetch without');
ask($first, "SELECT obix.renew('c', $token, '1 s')");
kill 'STOP', $first->{obix_client};
my $new_token = '';

foreach (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
{
	$new_token = ask($second, q{SELECT obix.acquire('c', '1 min')});
	last if $new_token ne '';
	usleep(10_000);
}
cmp_ok($new_token, '>', $token,
	'stopped past the end of its lease, it is replaced, with a higher token');
is(ask($second, sequences($new_token, 3)), '1 2 3', 'what it did not acknowledge comes again');
is(ask($second, "SELECT obix.ack('c', 2, $new_token)"), '', 'and is acknowledged');
kill 'CONT', $first->{obix_client};
like(
	ask($first, "SELECT obix.ack('c', 5, $token)"),
	qr/token $token does not hold consumer "c" any more/,
	'going on, its ack is refused');
like(
	ask($first, sequences($token, 5)),
	qr/token $token does not hold consumer "c" any more/,
	'its fetch too');
like(
	ask($first, "SELECT obix.fail('c', 3, 'x', $token)"),
	qr/token $token does not hold consumer "c" any more/,
	'its fail');
like(
	ask($first, "SELECT obix.renew('c', $token, '1 min')"),
	qr/token $token does not hold consumer "c" any more/,
	'its renewal');
like(
	ask($first, "SELECT obix.release('c', $token)"),
	qr/token $token does not hold consumer "c" any more/,
	'its release');
like(
	ask($first, q{SELECT obix.ack('c', 5)}),
	qr/consumer "c" is held by somebody else/,
	'and its ack without token');
consumer_ok(
	$node, $db, 'c',
	q{"cursor" = 2 AND delivered = 2 AND failed = 0 AND lease_until > now()},
	'the cursor is where the new holder has put it');
is(ask($second, sequences($new_token, 2)), '3 4', 'the new holder goes on');

#
# Stopped with the statement under way: the server process of the holder is
# stopped before it gets the acknowledgement.
#
ask($second, "SELECT obix.renew('c', $new_token, '1 s')");
my $pid = ask($second, 'SELECT pg_backend_pid()');
kill 'STOP', $pid;
$second->{stdin} .= "SELECT obix.ack('c', 4, $new_token);\n\\echo answered\n";
$second->{run}->pump_nb;
foreach (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
{
	$token = ask($first, q{SELECT obix.acquire('c', '1 min')});
	last if $token ne '';
	usleep(10_000);
}
is(ask($first, sequences($token, 3)),
	'3 4 5', 'a holder whose server process is stopped is replaced');
is(ask($first, "SELECT obix.ack('c', 3, $token)"), '', 'and the new one goes on');
kill 'CONT', $pid;
pump_until($second->{run}, $second->{timeout}, \$second->{stdout}, qr/answered/);
like(
	$second->{stderr},
	qr/token $new_token does not hold consumer "c" any more/,
	'its ack, sent before, is refused');
consumer_ok($node, $db, 'c', q{"cursor" = 3}, 'and has changed nothing');
$second->quit;

#
# A holder that dies is replaced when its lease ends; one that was fetching in
# a transaction gives up the mutex at once, but not its lease.
#
$second = client();
ask($first, "SELECT obix.renew('c', $token, '3 s')");
ask($first, 'BEGIN');
is(ask($first, sequences($token, 2)), '4 5', 'a holder fetches in a transaction');
$pid = ask($first, 'SELECT pg_backend_pid()');
kill 'KILL', $first->{obix_client};
eval { $first->{run}->finish };

foreach (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
{
	$new_token = ask($second, q{SELECT obix.acquire('c', '1 min')});
	last if $new_token ne '';
	usleep(10_000);
}
is(ask($second, sequences($new_token, 3)), '4 5 6', 'its client killed, it is replaced');
ask($second, "SELECT obix.release('c', $new_token)");
$second->quit;

#
# Every statement through another session
#
$token = pooled(q{SELECT obix.acquire('c', '1 min')});
is(pooled(sequences($token, 3)),                          '4 5 6', 'pooled: fetch');
is(pooled("SELECT obix.ack('c', 5, $token)"),             '',      'pooled: ack');
is(pooled("SELECT obix.renew('c', $token, '2 min')"),     '',      'pooled: renew');
is(pooled(sequences($token, 2)),                          '6 7',   'pooled: fetch again');
is(pooled("SELECT obix.fail('c', 6, 'not now', $token)"), '',      'pooled: fail');
is(pooled("CALL obix.wait_for('c', '10 s')"),  '',    'pooled: wait for the next attempt');
is(pooled(sequences($token, 2)),               '6 7', 'pooled: it comes again');
is(pooled("SELECT obix.ack('c', 7, $token)"),  '',    'pooled: and is acknowledged');
is(pooled(q{SELECT obix.acquire('c')}),        '',    'pooled: it is held');
is(pooled("SELECT obix.release('c', $token)"), '',    'pooled: release');
like(
	pooled("SELECT obix.ack('c', 8, $token)"),
	qr/token $token does not hold consumer "c" any more/,
	'pooled: a token is good until its release');
$new_token = pooled(q{SELECT obix.acquire('c')});
cmp_ok($new_token, '>', $token, 'pooled: another acquires it');
is(pooled("SELECT obix.ack('c', 100, $new_token)"), '', 'pooled: everything is acknowledged');

# One statement through each of two sessions in turn, in transactions; a restart
# of the server in the middle forgets nothing.
publish($node, $db, 'o', 10);
$node->restart;
is(pooled(q{SELECT obix.acquire('c')}), '',            'after a restart the lease is there');
is(pooled(sequences($new_token, 3)),    '101 102 103', 'and the token is good');
consumer_ok($node, $db, 'c', q{"cursor" = 100 AND delivered = 100}, 'what was acknowledged is');
pooled("SELECT obix.release('c', $new_token)");

# Two clients that acquire, fetch, acknowledge and release, each statement
# through whatever session there is: no event twice, none left out.
$node->safe_psql($db, 'CREATE TABLE test.got (sequence bigint)');
publish($node, $db, 'o', 390);
my $scripts = {
	'holder' => q{DO $$
DECLARE
	held bigint;
	list bigint[];
BEGIN
	held := obix.acquire('c', '1 min');
	IF held IS NULL THEN RETURN; END IF;
	list := ARRAY(SELECT sequence FROM obix.fetch('c', 3, token => held));
	INSERT INTO test.got SELECT unnest(list);
	IF cardinality(list) > 0 THEN PERFORM obix.ack('c', list[cardinality(list)], held); END IF;
	PERFORM obix.release('c', held);
END $$;
}
};
finish_pgbench(start_pgbench($node, $db, 'holders', '-C -c 4 -j 2 -t 100', $scripts));
while ($node->safe_psql($db, q{SELECT lag_events FROM obix.consumer_status}) > 0)
{
	$node->safe_psql($db, $scripts->{holder});
}
is( $node->safe_psql(
		$db,
		'SELECT count(*), count(DISTINCT sequence), min(sequence), max(sequence) FROM test.got'
	),
	'400|400|101|500',
	'with four at it, each event comes once');

$node->stop;
done_testing();
