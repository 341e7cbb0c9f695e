
# pg_upgrade of a server with outboxes, consumers and handlers, by copying and
# with --link: nothing of obix acts meanwhile, all is there afterwards, and goes
# on.
#
# OBIX_OLD_INSTALLS names installations of older releases, in ascending order and
# separated by colons, each a folder whose bin/ has the server and where obix is
# installed.  A server of the first is then upgraded to the others in turn, and to
# the release that is tested; "./dev upgrade" does that.  Without it, the release
# is upgraded to itself, which goes the same way as from one to the next.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my @installs = (split(/:/, $ENV{OBIX_OLD_INSTALLS} // ''), undef);
unshift @installs, undef if @installs == 1;

# With what an older release wants and this system does not have
$ENV{LD_LIBRARY_PATH} = join ':',
  (map { "$_/lib" } grep { defined } @installs),
  $ENV{LD_LIBRARY_PATH} // ();

# Make a server of an installation, not yet started.
sub make_node
{
	my ($name, $install) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name,
		defined $install ? (install_path => $install) : ());
	my @options = ('--locale=C', '--encoding=UTF8');

	push @options, '--no-data-checksums' if $node->{_pg_version} >= 18;
	$node->init(extra => \@options);
	$node->append_conf('postgresql.conf',
		base_conf() . "log_min_messages = debug1\nobix.auto_recover = off\nobix.worker_linger = '100ms'\n");
	return $node;
}

sub bindir
{
	my ($node) = @_;

	return defined $node->install_path ? $node->install_path . '/bin' : $node->config_data('--bindir');
}

# Late releases of a major version note in pg_attribute when a column was made.
# An early one of the next does not know that, and cannot restore any table.
sub forget_versions
{
	my ($node) = @_;

	$node->safe_psql($_,
		q{UPDATE pg_attribute SET attoptions = NULL WHERE attoptions::text ~ '^{pg_attver=[^,]*}$'})
	  foreach ('postgres', 'older');
	return;
}

# What must be the same before and after.
my $picture = q{
SELECT c, count(*), count(payload), min(sequence), max(sequence), md5(string_agg(sequence || ':' || id || coalesce(payload::text, '') || recorded_at, ' ' ORDER BY sequence))
FROM (SELECT 'o' AS c, * FROM o UNION ALL SELECT 's', * FROM s) e GROUP BY c ORDER BY c;
SELECT count(*) FROM s_default;
SELECT outbox, id, partition_width, premake, resolved FROM obix.outbox ORDER BY id;
SELECT c.oid::regclass, relowner::regrole, has_table_privilege('regress_obix_reader', c.oid, 'SELECT'), reloptions, pg_get_expr(relpartbound, c.oid) FROM pg_class c
WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace ORDER BY relname;
SELECT tgrelid::regclass, tgname, tgenabled FROM pg_trigger WHERE tgname ~ '^zz_obix' ORDER BY 1, 2;
SELECT * FROM obix.consumer ORDER BY id;
SELECT * FROM obix.consumer_state ORDER BY id;
SELECT * FROM obix.consumer_late ORDER BY id, from_sequence;
SELECT * FROM obix.parked_event ORDER BY id, sequence;
SELECT last_value, is_called FROM obix.outbox_id_seq;
SELECT last_value, is_called FROM obix.consumer_id_seq;
SELECT extversion FROM pg_extension WHERE extname = 'obix';
SELECT consumer, count(*), sum(sequence) FROM applied GROUP BY consumer ORDER BY consumer;
};

# Publish, leave holes, and wait until everything that can be handled was.
sub work
{
	my ($node, $name) = @_;
	my $before = $node->safe_psql('postgres', 'SELECT coalesce(max(sequence), 0) FROM o');

	$node->safe_psql('postgres',
		q{SELECT count(obix.publish('o', to_jsonb(g), key => (g % 10)::text)) FROM generate_series(1, 250) g});
	roll_back_inserts($node, 'postgres', 'o', 3);
	is( $node->safe_psql('postgres', q{INSERT INTO o (payload) VALUES ('0') RETURNING sequence}),
		$before + 254, "$name: sequences go on");
	is_settled($node, 'postgres', 'o', "$name: the worker fills holes");
	poll_ok($node, 'postgres',
		q{SELECT runway >= 200 FROM obix.outbox_status WHERE outbox = 'o'::regclass},
		"$name: and makes partitions");
	consumers_ok(
		$node, 'postgres',
		q{consumer IN ('handled', 'batched', 'available')},
		q{state = 'active' AND lag_events = 0},
		"$name: handlers are called");
	return;
}

sub populate
{
	my ($node) = @_;

	setup_database($node, 'postgres');
	$node->safe_psql(
		'postgres', q{
CREATE ROLE regress_obix_reader;
SELECT obix.create_outbox('o', partition_width => 100, premake => 2);
SELECT obix.create_outbox('empty');
SELECT obix.create_outbox('s', partition_width => 100, premake => 0);
GRANT SELECT ON o TO regress_obix_reader;
CREATE TABLE removed (LIKE o);
CREATE TABLE applied (consumer text, sequence bigint, PRIMARY KEY (consumer, sequence));
CREATE FUNCTION apply(c text, e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF c = 'handled' AND e.payload IN ('7', '9') THEN RAISE EXCEPTION 'poison %', e.payload; END IF;
	INSERT INTO applied VALUES (c, e.sequence);
END $$;
CREATE FUNCTION handle(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT apply('handled', e)$$;
CREATE FUNCTION batch(e obix.event[]) RETURNS void LANGUAGE sql AS $$SELECT apply('batched', x) FROM unnest(e) x$$;
CREATE FUNCTION available(e obix.event) RETURNS void LANGUAGE sql AS $$SELECT apply('available', e)$$;
SELECT obix.create_consumer('handled', 'o', handler => 'handle', on_failure => 'dead_letter', hold_key => true, max_attempts => 1,
	tables => '{applied}');
SELECT obix.create_consumer('batched', 'o', batch_handler => 'batch', batch_size => 7);
SELECT obix.create_consumer('available', 'o', handler => 'available', ordering => 'available');
SELECT obix.create_consumer('external', 'o', start_after => 0, types => '{x}');
SELECT obix.create_consumer('paused', 's', start_after => 0);
SELECT obix.pause('paused');
SELECT obix.acquire('external', '1 h');
SELECT count(obix.publish('s', to_jsonb(g))) FROM generate_series(1, 350) g;});
	work($node, 'before');
	$node->safe_psql('postgres',
		q{INSERT INTO removed SELECT * FROM o WHERE sequence < 100; DROP TABLE o_p0; TRUNCATE empty});

	# a database where the extension is of an older version, with work to do
	$node->safe_psql('postgres', 'CREATE DATABASE older');
	$node->safe_psql('older', q{CREATE EXTENSION obix VERSION '1.0'; SELECT obix.create_outbox('o', 10)});
	roll_back_inserts($node, 'older', 'o', 5);
	publish($node, 'older', 'o', 1);
	return;
}

my $launcher = qr/registering background worker "obix launcher"/;
foreach my $mode (@installs > 2 ? ('copy', 'link') : ('link'))
{
	my $old = make_node("old_$mode", $installs[0]);

	$old->start;
	is(log_count($old, $launcher), 1, "$mode: the log says what is started");
	populate($old);
	foreach my $n (1 .. $#installs)
	{
		my $new  = make_node("new_${mode}_$n", $installs[$n]);
		my $name = "$mode, $old->{_pg_version} to $new->{_pg_version}";

		no_workers($old);
		no_dispatchers($old);
		my $expected = $old->safe_psql('postgres', $picture);
		forget_versions($old) unless slurp_file(bindir($new) . '/postgres') =~ /pg_attver/;
		$old->stop;
		chdir $PostgreSQL::Test::Utils::tmp_check or die $!;
		command_ok(
			[
				bindir($new) . '/pg_upgrade', '--no-sync', '--retain',
				($mode eq 'link' ? '--link' : ()),
				'-d', $old->data_dir, '-D', $new->data_dir,
				'-b', bindir($old), '-B', bindir($new),
				'-s', $new->host,
				'-p', $old->port, '-P', $new->port
			],
			"$name: pg_upgrade");
		my $log = join '', map { slurp_file($_) }
		  glob($new->data_dir . '/pg_upgrade_output.d/*/log/pg_upgrade_server.log');
		like($log, qr/loaded library "obix"/, "$name: its servers had the library");
		unlike($log, qr/background worker "obix|no worker of obix/, "$name: and no worker");

		$new->append_conf('postgresql.conf', 'obix.dispatch_workers = 0');
		$new->start;
		$new->wait_for_log(qr/no worker of obix acts in database "older"/);
		no_workers($new);
		is($new->safe_psql('postgres', $picture), $expected, "$name: nothing has changed");
		$new->append_conf('postgresql.conf', 'obix.dispatch_workers = 2');
		$new->reload;

		is( walk($new, 'postgres', 'o', 99),
			$new->safe_psql('postgres', 'SELECT max(sequence) - 99, count(*) - count(payload), max(sequence) FROM o'),
			"$name: events can be read from the oldest kept");
		work($new, $name);
		is( $new->safe_psql('postgres', q{SELECT obix.recover_default('s'); SELECT count(*) FROM s_default}),
			$n == 1 ? "251\n0" : "0\n0", "$name: stranded events can be recovered");
		unlike_log($new, qr/PANIC|TRAP|FATAL|ERROR:  (?!poison)/, "$name: no error in the log");
		$old = $new;
	}

	# In the end: the dead letters are delivered, and the older extension goes on.
	is( $old->safe_psql('postgres', q{
CREATE OR REPLACE FUNCTION apply(c text, e obix.event) RETURNS void LANGUAGE sql AS $$INSERT INTO applied VALUES (c, e.sequence)$$;
SELECT count(obix.requeue('handled', sequence)) FROM obix.dead_letter WHERE consumer = 'handled' AND state = 'failed';}),
		'2', "$mode: there are dead letters");
	poll_ok($old, 'postgres', 'SELECT count(*) = 0 FROM obix.dead_letter',
		"$mode: they can be requeued, with what is held behind them");
	is( $old->safe_psql(
			'postgres', q{
SELECT consumer, count(*), count(*) - (SELECT count(*) FROM (SELECT * FROM removed UNION ALL SELECT * FROM o) e WHERE payload IS NOT NULL)
FROM applied GROUP BY 1 ORDER BY 1}),
		join("\n", map { "$_|" . 251 * @installs . '|0' } ('available', 'batched', 'handled')),
		"$mode: each event was handled once");
	is($old->safe_psql('older', q{SELECT high_water_mark FROM obix.outbox_status}), '0',
		"$mode: no worker has acted where the version is another");
	$old->safe_psql('older', 'ALTER EXTENSION obix UPDATE');
	is_settled($old, 'older', 'o', "$mode: they do once it is updated");
	$old->stop;
}

done_testing();
