#!/usr/bin/perl
#
# meta.pl: does META.json keep to the PGXN Meta Spec, version 1.0.0?  PGXN
# refuses a distribution whose file does not; Debian has no package of its
# validator.  Also, what the file says of this tree must be true.
#
# Usage: meta.pl FOLDER; prints what is wrong.

use strict;
use warnings;
use JSON::PP;

my $top = shift // '.';
my @errors;

sub wrong
{
	my ($where, $what) = @_;
	push @errors, "META.json: $where $what";
}

# Kinds of values: each gets a value and its place.

sub string
{
	my ($value, $where) = @_;
	wrong($where, 'is not a string') if ref $value || !defined $value || $value eq '';
}

sub matching
{
	my ($pattern, $what) = @_;
	return sub {
		my ($value, $where) = @_;
		wrong($where, "is not $what")
		  if ref $value || !defined $value || $value !~ /\A(?:$pattern)\z/;
	};
}

my $number = qr/0|[1-9][0-9]*/;
my $semver = qr/$number\.$number\.$number(?:-?[A-Za-z][-0-9A-Za-z]*)?/;
my $version = matching($semver, 'a semantic version');
my $url = matching(qr{[a-z][-+.a-z0-9]*://[^/\s]+\S*}, 'a URL');
my $range = qr/(?:[<>]=?|[!=]=)?\s*$semver|0/;
my $required_version = matching(qr/$range(?:,\s*$range)*/, 'a range of semantic versions');
my $term = matching(qr{[^\s[:cntrl:]/\\]{2,}}, 'a term');
my $tag = matching(qr{[^[:cntrl:]/\\]{1,256}}, 'a tag');
my $license = matching(
	qr/(?:agpl_3|apache_(?:1_1|2_0)|artistic_[12]|bsd|freebsd|gfdl_1_[23]
		|gpl_[123]|lgpl_(?:2_1|3_0)|mit|mozilla_1_[01]|openssl|perl_5|postgresql
		|qpl_1_0|ssleay|sun|zlib|open_source|restricted|unrestricted|unknown)/x,
	'a license that PGXN knows');

sub file
{
	my ($value, $where) = @_;
	string($value, $where);
	wrong($where, "names $value, which is not there")
	  unless ref $value || -e "$top/" . ($value // '');
}

# One value does for a list of one.
sub list_of
{
	my ($kind) = @_;
	return sub {
		my ($value, $where) = @_;
		my @entries = ref $value eq 'ARRAY' ? @$value : ($value);
		wrong($where, 'is empty') unless @entries;
		$kind->($entries[$_], "$where\[$_]") foreach 0 .. $#entries;
	};
}

# A map whose keys are all of a kind.
sub map_of
{
	my ($key_kind, $kind) = @_;
	return sub {
		my ($value, $where) = @_;
		return wrong($where, 'is not a map') unless ref $value eq 'HASH';
		foreach my $key (sort keys %$value)
		{
			$key_kind->($key, "$where/$key (the key)");
			$kind->($value->{$key}, "$where/$key");
		}
	};
}

# A map with keys of its own, of which some ("!") must be there; those of the
# distribution's own begin with "x_".
sub map_with
{
	my (%kinds) = @_;
	my @mandatory = map { s/!$//r } grep { /!$/ } keys %kinds;
	my %kind = map { s/!$//r => $kinds{$_} } keys %kinds;
	return sub {
		my ($value, $where) = @_;
		return wrong($where, 'is not a map') unless ref $value eq 'HASH';
		wrong("$where/$_", 'is missing') foreach grep { !exists $value->{$_} } sort @mandatory;
		foreach my $key (sort keys %$value)
		{
			next if $key =~ /^x_/i;
			$kind{$key}
			  ? $kind{$key}->($value->{$key}, "$where/$key")
			  : wrong("$where/$key", 'is not known');
		}
	};
}

my $license_map = map_of(\&string, $url);
my $license_list = list_of($license);
my $check = map_with(
	'name!' => $term,
	'version!' => $version,
	'abstract!' => \&string,
	'maintainer!' => list_of(\&string),
	'license!' => sub { ref $_[0] eq 'HASH' ? $license_map->(@_) : $license_list->(@_) },
	'provides!' => map_of(
		$term,
		map_with(
			'file!' => \&file,
			'version!' => $version,
			abstract => \&string,
			docfile => \&file)),
	'meta-spec!' => map_with('version!' => matching(qr/1\.0\.0/, '1.0.0'), url => $url),
	description => \&string,
	generated_by => \&string,
	release_status => matching(qr/stable|testing|unstable/, 'stable, testing or unstable'),
	tags => list_of($tag),
	no_index => map_with(file => list_of(\&string), directory => list_of(\&string)),
	prereqs => map_of(
		matching(qr/configure|build|test|runtime|develop|x_.*/i, 'a phase'),
		map_of(
			matching(qr/requires|recommends|suggests|conflicts|x_.*/i, 'a relationship'),
			map_of($term, $required_version))),
	resources => map_with(
		homepage => $url,
		license => list_of($url),
		bugtracker => map_with(web => $url, mailto => matching(qr/\S+@\S+/, 'an address')),
		repository => map_with(
			web => $url,
			url => $url,
			type => matching(qr/[^A-Z]+/, 'in lower case'))));

open my $handle, '<:raw', "$top/META.json" or die "could not open META.json: $!\n";
my $meta = decode_json(do { local $/; <$handle> });
$check->($meta, '');

print "$_\n" foreach @errors;
exit(@errors ? 1 : 0);
