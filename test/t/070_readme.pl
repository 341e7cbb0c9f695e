
# Every SQL block of README.md, run in the order in which it stands there, and
# its output compared with what README.md shows below it.
#
# A block that begins with ```sql is run through psql.  What psql prints is what
# the ```text block after it has; command tags, blank lines and what functions
# without a result print may be left out.  Where nothing else is printed, there
# need be no such block.  Comments, which do not show where README.md is read as
# a page, tell more, each on lines of its own:
#
#	<!-- test: empty -->		from here on in a new, empty database
#	<!-- test: example -->		from here on in one that has the example
#	<!-- test: setup SQL -->	run this, which a reader need not see
#	<!-- test: until QUERY -->	go on when this query gives t
#
# and about the next block alone:
#
#	<!-- test: quiet -->		its output is not shown
#	<!-- test: session NAME -->	it is run by another session
#	<!-- test: waits NAME -->	the same, and it waits for something until later,
#	<!-- test: output NAME -->	when it has ended: the next ```text block is what it printed
#	<!-- test: vary NAME, ... -->	what these columns show is not compared
#	<!-- test: elsewhere FILE REASON -->	it is run by that test only
#
# "./dev readme" writes into README.md what was printed, where it differs.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use IPC::Run ();
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $top    = "$FindBin::RealBin/../..";
my $readme = slurp_file("$top/README.md");
my $result = $ENV{OBIX_README};              # where to write a corrected one
my $node   = new_node('main', conf => "obix.max_outboxes = 200\n");

my ($db, %sessions);
my $databases = 0;

# What is not shown, and what is not the same twice
my $tag =
  qr/(?:BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SET|RESET|CALL|DO|GRANT(?: ROLE)?|REVOKE(?: ROLE)?|LISTEN|LOCK TABLE|ANALYZE|VACUUM|(?:CREATE|ALTER|DROP|TRUNCATE)(?: [A-Z]+)+|PREPARE TRANSACTION|COMMIT PREPARED|ROLLBACK PREPARED|(?:INSERT 0|UPDATE|DELETE|SELECT|COPY|MERGE) \d+)/;
my $volatile = qr/pid|xid|lag|.*_(?:pid|at|start|bytes)|.*duration.*/;
my @patterns = (
	[ qr/\b[0-9a-f]{8}-[0-9a-f]{4}-[1-9a-f][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\b/, 'UUID' ],
	[ qr/\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d(?::\d\d)?)?/, 'TIME' ],
	[ qr/\b[0-9A-F]{1,8}\/[0-9A-F]{1,8}\b/,                                   'LSN' ]);

#
# Databases and sessions
#

# A new database; "example" has the example of README.md.
sub new_database
{
	my ($template) = @_;

	$_->{handle}->finish foreach values %sessions;
	%sessions = ();
	$db       = 'readme_' . ++$databases;
	$node->safe_psql('postgres', "CREATE DATABASE $db TEMPLATE $template");
	return;
}

sub make_example
{
	$node->safe_psql('postgres', 'CREATE DATABASE example');
	$node->safe_psql(
		'example', q{
CREATE EXTENSION obix;
CREATE SCHEMA app;
CREATE TABLE app.account (id bigint PRIMARY KEY, balance numeric NOT NULL);
INSERT INTO app.account VALUES (1, 100), (2, 100);
SELECT obix.create_outbox('app.orders');
SELECT obix.publish('app.orders', '{"amount": 10}', type => 'paid', key => 'account-1');
SELECT obix.publish('app.orders', '{"amount": 25}', type => 'paid', key => 'account-2');
SELECT obix.publish('app.orders', '{"parcel": 7}', type => 'sent', key => 'account-1');});

	# nobody may be connected to what is copied
	$node->safe_psql('postgres',
		'ALTER DATABASE example ALLOW_CONNECTIONS false IS_TEMPLATE true');
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'example'})
	  or die 'a worker stays in the example';
	return;
}

# Give SQL to a session, as somebody would who types it.
sub begin_sql
{
	my ($name, $sql) = @_;
	my $session = $sessions{$name};

	if (!$session)
	{
		$session = $sessions{$name} = {
			in    => '',
			out   => '',
			timer => IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default)
		};
		$session->{handle} = IPC::Run::start(
			[
				$node->installed_command('psql'), '-X', '-d',
				$node->connstr($db)
			],
			'<',
			\$session->{in},
			'>&',
			\$session->{out},
			$session->{timer});
	}
	$session->{out} = '';
	$session->{timer}->start;
	$session->{in} .= "$sql\n\\echo\n\\echo -- end of block\n";
	$session->{handle}->pump while length $session->{in};
	return;
}

# Wait for its end and return what is printed.
sub end_sql
{
	my ($name) = @_;
	my $session = $sessions{$name};

	$session->{handle}->pump until $session->{out} =~ s/\n-- end of block\n\z//;
	return $session->{out};
}

sub run_sql
{
	my ($name, $sql) = @_;

	begin_sql($name, $sql);
	return end_sql($name);
}

#
# What is compared
#

# The lines of an output without what may be left out, and as they are compared.
sub lines_of
{
	my ($output, @vary) = @_;
	my (@columns, @lines);

	# A function without a result, a procedure with one row and one empty cell
	$output =~ s/^ \S+ *\n-+\n *\n\(1 row\)\n//mg;
	my @rest = grep { !/^(?:$tag)?\s*$/ } split /\n/, $output;

	while (defined(my $line = shift @rest))
	{
		if (@rest && $rest[0] =~ /^-[-+]*$/)
		{
			@columns = map { s/^\s+|\s+$//gr } split /\|/, $line;
		}
		elsif ($line =~ /^\(\d+ rows?\)$/)
		{
			@columns = ();
		}
		elsif (@columns && $line !~ /^-[-+]*$/)
		{
			my @cells = split /\|/, $line, -1;

			foreach my $i (0 .. $#cells)
			{
				next unless defined $columns[$i];
				$cells[$i] = ' (varies) '
				  if $cells[$i] =~ /\S/ && $columns[$i] =~ /^$volatile$/
				  || grep { $_ eq $columns[$i] } @vary;
			}
			$line = join '|', @cells;
		}
		elsif ($line =~ /^(\w+) +\| *\S/
			&& ($1 =~ /^$volatile$/ || grep { $_ eq $1 } @vary))
		{
			$line = "$1 | (varies)";
		}
		$line =~ s/$_->[0]/$_->[1]/g foreach @patterns;
		$line =~ s/ +/ /g;
		$line =~ s/-+/-/g;
		$line =~ s/ $//;
		push @lines, $line;
	}
	return @lines;
}

# What README.md can show of an output
sub shown_of
{
	my ($output) = @_;

	$output =~ s/^ \S+ *\n-+\n *\n\(1 row\)\n\n?//mg;
	my @lines = map { s/\s+$//r } split /\n/, $output;
	@lines = grep { !/^$tag$/ } @lines;
	shift @lines while @lines && $lines[0] eq '';
	pop @lines   while @lines && $lines[-1] eq '';
	return join "\n", @lines;
}

#
# The file: comments, blocks, and lines of text
#
my @parts;
while (
	$readme =~ /\G(?:<!-- test: (?<comment>.*?)\s*-->\n|```(?<language>\w*)\n(?<body>.*?)^```\n|[^\n]*\n)/msgc
  )
{
	push @parts, { %+, text => $&, line => 1 + (substr($readme, 0, $-[0]) =~ tr/\n//) };
}

# The part that has the output of the one before it, undef if there is none.
sub output_after
{
	my ($i) = @_;

	$i++ until $i == $#parts || $parts[ $i + 1 ]{text} ne "\n";
	my $part = $parts[ $i + 1 ];
	return defined $part && ($part->{language} // '') eq 'text' ? $part : undef;
}

# Compare what a block has printed with what is shown, which is put right.
sub check_output
{
	my ($i, $output, @vary) = @_;
	my $shown = output_after($i);
	my $got   = join "\n", lines_of($output, @vary);
	my $wanted = join "\n", lines_of(defined $shown ? $shown->{body} : '', @vary);

	is($got, $wanted, "line $parts[$i]{line}: the output is as shown")
	  or diag("It is:\n$output");
	if ($got ne $wanted)
	{
		my $block = $got eq '' ? '' : "```text\n" . shown_of($output) . "\n```\n";

		$shown->{text} = $block if defined $shown;
		$parts[$i]{text} .= "\n$block" if !defined $shown;
	}
	return;
}

sub check_no_error
{
	my ($line, $output) = @_;

	unlike($output, qr/^(?:ERROR|FATAL|WARNING|psql)/m, "line $line: no error");
	return;
}

make_example();
my $number = 0;
my %next;

foreach my $i (0 .. $#parts)
{
	my $part = $parts[$i];
	my $line = $part->{line};
	my ($word, $rest) = ($part->{comment} // '') =~ /^(\w+)\s*(.*)\z/s;

	if (defined $word)
	{
		if ($word eq 'empty')
		{
			new_database('template0');
		}
		elsif ($word eq 'example')
		{
			new_database('example');
		}
		elsif ($word eq 'setup')
		{
			check_no_error($line, run_sql('main', $rest));
		}
		elsif ($word eq 'until')
		{
			ok($node->poll_query_until($db, $rest), "line $line: $rest");
		}
		elsif ($word eq 'output')
		{
			check_output($i, end_sql($rest));
		}
		elsif ($word =~ /^(?:quiet|session|waits|vary|elsewhere)$/)
		{
			$next{$word} = $rest;
		}
		else
		{
			fail("line $line: no such directive: $word");
		}
	}
	next unless ($part->{language} // '') eq 'sql';

	my %this = %next;
	my @vary = split /\s*,\s*/, $this{vary} // '';
	%next = ();
	$number++;
	if (defined $this{elsewhere})
	{
		my ($file, $why) = split ' ', $this{elsewhere}, 2;

		ok(-e "$top/$file" && $why, "line $line: is run by $file");
	}
	elsif (defined $this{waits})
	{
		begin_sql($this{waits}, $part->{body});
		$node->poll_query_until($db,
			q{SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Extension' AND query LIKE 'CALL %'}
		) or die "line $line: it does not wait: ",
		  $node->safe_psql($db, 'SELECT wait_event_type, wait_event, state, query FROM pg_stat_activity WHERE datname = current_database()'),
		  $sessions{$this{waits}}{out};
	}
	else
	{
		my $output = run_sql($this{session} || 'main', $part->{body});

		if (defined $this{quiet})
		{
			check_no_error($line, $output);
		}
		else
		{
			check_output($i, $output, @vary);
		}
	}
}
cmp_ok($number, '>', 20, 'README.md has SQL');
is(join(' ', keys %next), '', 'each directive has its block');

#
# Every message that is an error has its place under "Errors"
#
my ($errors) = $readme =~ /^## Errors\n(.*?)^## /ms or die 'README.md has no errors';
my @missing;
$errors =~ s/\s+/ /g;
foreach my $path (glob("$top/src/*.c"))
{
	my $source = slurp_file($path);

	while ($source =~ /\bereport\(ERROR,(.*?)\)\);/sg)
	{
		my $report = $1;

		while ($report =~ /\berrmsg\("((?:[^"\\]|\\.)*)"/g)
		{
			my $message = $1 =~ s/\\"/"/gr;

			$message =~ s/%(?:ll?)?[dsuX]/…/g;
			push @missing, $message unless index($errors, $message) >= 0;
		}
	}
}
is(join("\n", @missing), '', 'README.md has every error');

#
# So has everything that can be used
#
new_database('example');
is( join("\n",
		grep { index($readme, $_) < 0 } split /\n/,
		$node->safe_psql(
			$db, q{
SELECT 'obix.' || proname FROM pg_proc WHERE pronamespace = 'obix'::regnamespace
UNION
SELECT 'obix.' || relname FROM pg_class WHERE relnamespace = 'obix'::regnamespace AND relkind IN ('r', 'v')
UNION
SELECT name FROM pg_settings WHERE name LIKE 'obix.%'})),
	'',
	'README.md has every function, view, table and setting');

#
# Links lead somewhere
#
my $prose   = $readme =~ s/^```.*?^```$//msgr;
my %heading = map { (lc =~ s/[^\w\- ]//gr =~ tr/ /-/r) => 1 } $prose =~ /^#+ (.*)$/mg;
is( join("\n",
		grep { /^#(.*)/ ? !$heading{$1} : !/^https?:/ && !-e "$top/$_" } $prose =~ /\]\(([^)]*)\)/g),
	'',
	'its links lead somewhere');

if (defined $result)
{
	open my $file, '>', $result or die "could not write $result: $!";
	print $file map { $_->{text} } @parts;
	close $file;
}

$_->{handle}->finish foreach values %sessions;
$node->stop;
done_testing();
