
# The benchmarks work: some of them, small and once, which says nothing about
# speed.  See test/bench/README.

use strict;
use warnings;
use FindBin;
use IPC::Run ();
use JSON::PP ();
use PostgreSQL::Test::Utils;
use Test::More;

my $python = '/usr/bin/python3';             # Debian's, which finds its packages
my $bench  = "$FindBin::RealBin/../bench";
my $folder = PostgreSQL::Test::Utils::tempdir_short();

plan skip_all => "$python has no psycopg 3"
  if system("$python -c 'import psycopg' 2>/dev/null") != 0;

my ($bindir)     = run_command([ 'pg_config', '--bindir' ]);
my ($includedir) = run_command([ 'pg_config', '--includedir' ]);
plan skip_all => 'libpq-dev is not installed'
  if !-e "$includedir/libpq-fe.h";

# Run bench.py; returns whether it succeeded, and its output.
sub bench
{
	my $output = '';

	IPC::Run::run(
		[
			$python,  '-B',      "$bench/bench.py", '--bindir',
			$bindir, '--folder', $folder,           @_
		],
		'<',
		\undef,
		'>&',
		\$output,
		IPC::Run::timeout(4 * $PostgreSQL::Test::Utils::timeout_default));
	return ($? == 0, $output);
}

my ($good, $output) = bench();
my %rows = map { $_ => 1 } map { split /, / } $output =~ /^  [\w-]+ +([\d, ]+):/mg;
is_deeply([ sort { $a <=> $b } keys %rows ],
	[ 1 .. 17 ], 'there is a benchmark for every requirement');

($good, $output) = bench('nothing');
ok(!$good && $output =~ /^there is no benchmark nothing;/, 'there is no other');

($good, $output) = bench('--quick', 'publish', 'drain', 'wake');
ok($good, 'benchmarks run to their end') ? note($output) : diag($output);

my $table = JSON::PP::decode_json(slurp_file("$folder/table.json"));
my @lines = @{ $table->{lines} };
my %found;
push @{ $found{ $_->{row} } }, $_ foreach @lines;
is_deeply(
	[ map { scalar @{ $found{$_} // [] } } 1, 3, 7, 9 ],
	[ 3,                                   3, 4, 4 ],
	'each requirement has its lines');
is( scalar(
		grep { $_->{target} ne '' && $_->{verdict} !~ /^(met|missed)$/ } @lines),
	0,
	'what has a target is met or missed');

# What cannot be run is not met.
my ($peer) = grep { $_->{what} =~ m{/ PgQ by cursor} } @lines;
is( $peer->{verdict} eq '' ? 'none' : 'some',
	-e "$bindir/../lib/pgq_lowlevel.so" ? 'some' : 'none',
	'a verdict needs the peer');

my $chart = slurp_file("$folder/chart.svg");
like($chart, qr/^<svg .*commit.*<\/svg>\n\z/is, 'there is a picture');
unlike($chart, qr/nan|\Q$folder\E/i, 'of figures, which does not tell where it was made');
ok(!-e "$folder/server", 'nothing is left of the server');

done_testing();
