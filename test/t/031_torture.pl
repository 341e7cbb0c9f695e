
# Less than a minute of test/torture: everything at work, and crashes and faults
# of every kind meanwhile.  See test/torture/README.
#
# OBIX_TORTURE_SEED and OBIX_TORTURE_SECONDS have another run.

use strict;
use warnings;
use FindBin;
use IPC::Run ();
use PostgreSQL::Test::Utils;
use Test::More;

my $python  = '/usr/bin/python3';             # Debian's, which finds its packages
my $torture = "$FindBin::RealBin/../torture/torture.py";
my $seconds = $ENV{OBIX_TORTURE_SECONDS} // 45;
my $seed    = $ENV{OBIX_TORTURE_SEED};

plan skip_all => "$python has no psycopg 3"
  if system("$python -c 'import psycopg' 2>/dev/null") != 0;

my ($bindir) = run_command([ 'pg_config', '--bindir' ]);
my @command = (
	$python, '-B', $torture, '--seconds', $seconds, '--bindir', $bindir,
	defined $seed ? ('--seed', $seed) : ());
my $output = '';

IPC::Run::run(\@command, '<', \undef, '>&', \$output,
	IPC::Run::timeout(10 * $PostgreSQL::Test::Utils::timeout_default + $seconds));
my $good = ok($? == 0, 'nothing was lost, doubled, reordered or taken back');
$good ? note($output) : diag($output);
like($output, qr/^totals +transactions [1-9].* starts [1-9].* violations 0$/m,
	'with something done, and something harmed');

done_testing();
