# packages.pl: from "apt-cache dumpavail" to JSON, a record a line, for COPY.
#
# A record is a paragraph of "Field: value" lines; a line that starts with a
# blank continues the field before.

use strict;
use warnings;

my %escape = (
	"\n" => '\n',
	"\t" => '\t',
	'"' => '\"',
	'\\' => '\\\\');

sub quote
{
	my ($text) = @_;

	$text =~ s/[^\x00-\x7f]/?/g unless utf8::decode(my $copy = $text);
	$text =~ s/([\n\t"\\])/$escape{$1}/g;
	$text =~ s/([\x00-\x1f\x7f])/sprintf '\u%04x', ord $1/ge;
	return "\"$text\"";
}

$/ = "";    # read by paragraph

while (my $paragraph = <STDIN>)
{
	my @fields;

	$paragraph =~ s/\n+\z//;
	$paragraph =~ s/\n[ \t]/\n /g;
	foreach my $field (split /\n(?! )/, $paragraph)
	{
		my ($name, $value) = split /:\s*/, $field, 2;

		$value =~ s/\n /\n/g;
		push @fields, quote($name) . ': ' . quote($value);
	}

	my $record = '{' . join(', ', @fields) . '}';

	$record =~ s/\\/\\\\/g;    # COPY takes a backslash as its own
	print "$record\n";
}
