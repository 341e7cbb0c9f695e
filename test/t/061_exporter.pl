
# Monitoring by Prometheus: what test/monitoring/queries.yaml has the exporter
# tell, as a role that is a member of pg_monitor and nothing else, and that the
# dashboard and the alerting rules beside it ask for nothing that is not there.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use HTTP::Tiny;
use JSON::PP;
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $exporter = '/usr/bin/prometheus-postgres-exporter';
plan skip_all => "$exporter is not installed" unless -x $exporter;

my $folder = "$FindBin::RealBin/../monitoring";
my $node   = new_node('main');

setup_database($node, 'postgres');
$node->safe_psql(
	'postgres', q{
CREATE ROLE exporter LOGIN;
GRANT pg_monitor TO exporter;
SELECT obix.create_outbox('orders', partition_width => 1000000);
SELECT obix.create_consumer('mail', 'orders', max_attempts => 1, on_failure => 'dead_letter');
SELECT obix.create_consumer('stopped', 'orders', max_attempts => 1);});
publish($node, 'postgres', 'orders', 3000);
roll_back_inserts($node, 'postgres', 'orders', 2);
publish($node, 'postgres', 'orders', 1);
settle($node, 'postgres', 'orders');
$node->safe_psql(
	'postgres', q{
SELECT count(*) FROM obix.fetch('mail', 2);
SELECT obix.ack('mail', 1);
SELECT obix.fail('mail', 2, 'no such address');
SELECT count(*) FROM obix.fetch('stopped', 1);
SELECT obix.fail('stopped', 1, 'enough');});

# A publisher that holds up readers, and something behind it.
my $publisher = $node->background_psql('postgres');
$publisher->query_safe(q{BEGIN; INSERT INTO orders (payload) VALUES ('1')});
publish($node, 'postgres', 'orders', 9);

#
# The exporter
#
my $port   = PostgreSQL::Test::Cluster::get_free_port();
my $log    = $node->basedir . '/exporter.log';
local $ENV{DATA_SOURCE_NAME} =
  'user=exporter dbname=postgres sslmode=disable host=' . $node->host . ' port=' . $node->port;
my $run = IPC::Run::start(
	[ $exporter, "--web.listen-address=127.0.0.1:$port", "--extend.query-path=$folder/queries.yaml",
	  '--disable-default-metrics', '--disable-settings-metrics' ],
	'<', \undef, '>', $log, '2>&1');

my $http = HTTP::Tiny->new(timeout => 10);
my $response;
foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	$response = $http->get("http://127.0.0.1:$port/metrics");
	last if $response->{success};
	usleep(100_000);
}
ok($response->{success}, 'the exporter can be scraped') or diag($response->{content}, slurp_file($log));
my $scrape = $response->{content};
unlike(slurp_file($log), qr/level=(?:warn|error)/, 'and has no complaint');

# { name => [ [ { label => value }, value ] ... ] } and { name => type }
my (%samples, %type);
foreach my $line (split /\n/, $scrape)
{
	$type{$1} = $2 if $line =~ /^# TYPE (obix_\w+) (\w+)/;
	next unless $line =~ /^(obix_\w+)\{(.*)\} (\S+)$/;
	my ($name, $labels, $value) = ($1, $2, $3);
	my %labels = $labels =~ /(\w+)="([^"]*)"/g;

	push @{ $samples{$name} }, [ \%labels, $value ];
}

# The value of the sample with these labels.
sub value_of
{
	my ($name, %wanted) = @_;
	my @found = grep {
		my $labels = $_->[0];
		!grep { ($labels->{$_} // '') ne $wanted{$_} } keys %wanted
	} @{ $samples{$name} // [] };

	return join ',', map { $_->[1] } @found;
}

my %orders = (datname => 'postgres', outbox => 'orders');
my %mail   = (datname => 'postgres', outbox => 'orders', consumer => 'mail');

is(value_of('obix_server_up',                      datname => 'postgres'), 1,    'obix is loaded');
is(value_of('obix_server_launcher_up',             datname => 'postgres'), 1,    'the launcher runs');
is(value_of('obix_outbox_sequences_total',         %orders),               3013, 'the head');
is(value_of('obix_outbox_high_water_mark_sequence', %orders),              3003, 'the high-water mark');
is(value_of('obix_outbox_held_sequences',          %orders),               10,   'what is held up');
cmp_ok(value_of('obix_outbox_held_seconds', %orders), '>', 0, 'for how long');
is(value_of('obix_outbox_placeholders_total', %orders), 2, 'placeholders');
is(value_of('obix_outbox_in_flight_sessions', %orders), 1, 'who is in flight');
cmp_ok(value_of('obix_outbox_events_per_second', %orders), '>', 0, 'the rate');
cmp_ok(value_of('obix_outbox_runway_seconds', %orders), '>', 0, 'the runway');
is(value_of('obix_outbox_state_info', %orders, state => 'held'), 1, 'the state of the outbox');
is(value_of('obix_consumer_lag_events', %mail), 3001, 'the lag of a consumer');
cmp_ok(value_of('obix_consumer_lag_seconds', %mail), '>', 0, 'in time as well');
is(value_of('obix_consumer_delivered_total', %mail), 1, 'what it has dealt with');
is(value_of('obix_consumer_dead_letters',    %mail), 1, 'its dead letters');
is(value_of('obix_consumer_state_info', %mail, consumer => 'stopped', state => 'stopped'), 1, 'the state of a consumer');
is(value_of('obix_progress_total', %mail, operation => 'catch-up'), 3003, 'progress');
is(value_of('obix_health_status', datname => 'postgres', check => 'launcher', object => ''), 0, 'a check of the server');
is(value_of('obix_health_status', datname => 'postgres', check => 'dead_letters', object => 'mail'), 1, 'a check of a consumer');
is(value_of('obix_health_status', datname => 'postgres', check => 'consumer', object => 'stopped'), 2, 'a critical one');
is(scalar @{ $samples{obix_health_status} }, $node->safe_psql('postgres', 'SELECT count(*) FROM obix.health()'), 'all checks');
is(join(' ', sort grep { ($type{$_} eq 'counter') != /_total$/ && !/^obix_progress_total$/ } keys %type),
	'', 'counters end in _total');

#
# What asks for these metrics
#
my $dashboard = slurp_file("$folder/grafana-dashboard.json");
my $parsed    = eval { decode_json($dashboard) };
ok($parsed && $parsed->{title} eq 'obix' && $parsed->{schemaVersion} && !defined $parsed->{id}, 'the dashboard can be imported');
my @panels = grep { $_->{type} ne 'row' } @{ $parsed->{panels} };
cmp_ok(scalar @panels, '>', 15, 'the dashboard has panels');
is(scalar(grep { my $p = $_; grep { $_->{expr} !~ /obix_/ } @{ $p->{targets} } } @panels), 0, 'which all ask for something');
my %ids = map { $_->{id} => 1 } @{ $parsed->{panels} };
is(scalar keys %ids, scalar @{ $parsed->{panels} }, 'and have ids of their own');

my $alerts = slurp_file("$folder/alerts.yaml");
is( scalar(() = $alerts =~ /^      - alert: Obix\w+$/mg),
	scalar(() = $alerts =~ /^        expr: .*\bobix_\w+/mg),
	'every alert has an expression');
my %asked;
$asked{$_} = 1 foreach ($alerts =~ /\b(obix_\w+)/g, $dashboard =~ /\b(obix_\w+)/g);
is(join(' ', grep { !defined $type{$_} } sort keys %asked), '', 'everything that is asked for is there');
cmp_ok(scalar keys %asked, '>', 20, 'which is a lot');

$publisher->query_safe('ROLLBACK');
$publisher->quit;
$run->kill_kill;
$node->stop;
done_testing();
