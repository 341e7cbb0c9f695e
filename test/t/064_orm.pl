
# Publishing through an ORM: SQLAlchemy maps a class to an outbox as to any
# table, and what it does with objects of the class works, or is refused with an
# error that says what to do.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/../lib";
use IPC::Run ();
use ObixTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = "$FindBin::RealBin/../clients";
my $python  = '/usr/bin/python3';
my $output;

if (!IPC::Run::run([ $python, '-c', 'import sqlalchemy, psycopg2' ], '<', \undef, '>&', \$output))
{
	die "SQLAlchemy is not there: $output" if $ENV{CI};
	plan skip_all => "$python has no SQLAlchemy and psycopg2";
}

my $node = new_node('main');
my $db   = 'postgres';

$node->safe_psql($db, slurp_file("$clients/schema.sql"));
$ENV{PGHOST}     = $node->host;
$ENV{PGPORT}     = $node->port;
$ENV{PGDATABASE} = $db;
$ENV{PYTHONPATH} = $clients;
$ENV{PYTHONDONTWRITEBYTECODE} = 1;

# What to do with a session, and what that prints
my (@statements, @printed);
my $prologue = <<'PYTHON';
import uuid
from sqlalchemy import MetaData, Table, create_engine, delete, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from orm import OrderEvent, publish

engine = create_engine("postgresql+psycopg2://", future=True)
session = Session(engine, future=True)


def refused(work):
    try:
        work()
        session.flush()
        print("not refused")
    except DBAPIError as error:
        print(str(error.orig).split("\n")[0])
    session.rollback()


PYTHON

sub orm
{
	my ($statements, $printed, $name) = @_;

	push @statements, $statements . "print('--')\n";
	push @printed, [ $printed, $name ];
	return;
}

# Do all of it, in one process.
sub run_orm
{
	my $script = join '', $prologue, @statements;
	my ($stdout, $stderr) = ('', '');

	IPC::Run::run([ $python, '-' ], '<', \$script, '>', \$stdout, '2>', \$stderr,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default))
	  or diag $stderr;
	foreach my $part (split /^--\n/m, $stdout)
	{
		my ($printed, $name) = @{ shift @printed };

		is($part, "$printed\n", $name);
	}
	is(scalar @printed, 0, 'all has been done');
	return;
}

sub rows
{
	my ($query) = @_;

	return $node->safe_psql($db, $query);
}

# an object is an event
orm(<<'PYTHON', "1 7 True\n1 True", 'an object has what the server fills in');
event = OrderEvent(type="paid", key="account-1", payload={"amount": 1}, headers={"traceparent": "x"})
session.add(event)
session.flush()
print(event.sequence, uuid.UUID(str(event.id)).version, event.recorded_at is not None)
session.commit()
print(event.sequence, event.recorded_at.tzinfo is not None)
PYTHON

# None is JSON null in a payload, and NULL elsewhere; an id can be given
orm(<<'PYTHON', 'True', 'an id can be given');
id = str(uuid.uuid4())
event = OrderEvent(id=id, payload=None)
session.add(event)
session.commit()
print(str(event.id) == id)
PYTHON

# rolled back, whole or in part
orm(<<'PYTHON', '3 4 6', 'transactions and savepoints are rolled back');
first = OrderEvent(payload="rolled back")
session.add(first)
session.flush()
print(first.sequence, end=" ")
session.rollback()
second = OrderEvent(payload="stays")
session.add(second)
session.flush()
print(second.sequence, end=" ")
savepoint = session.begin_nested()
session.add(OrderEvent(payload="rolled back, too"))
session.flush()
savepoint.rollback()
third = OrderEvent(payload="stays, too")
session.add(third)
session.commit()
print(third.sequence)
PYTHON

# many
orm(<<'PYTHON', "7 106\n107 206\n207 208\n209 308", 'many at a time, each with its sequence');
events = [OrderEvent(key=str(n), payload=n) for n in range(100)]
session.add_all(events)
session.commit()
print(min(e.sequence for e in events), max(e.sequence for e in events))
session.execute(insert(OrderEvent), [{"key": str(n), "payload": n} for n in range(100)])
session.commit()
print(107, session.scalar(text("SELECT max(sequence) FROM app.orders")))
result = session.execute(insert(OrderEvent).values([{"payload": 1}, {"payload": 2}])
                         .returning(OrderEvent.sequence, OrderEvent.id))
print(*sorted(row.sequence for row in result))
session.commit()
session.bulk_insert_mappings(OrderEvent, [{"key": str(n), "payload": n} for n in range(100)])
session.commit()
print(209, session.scalar(text("SELECT max(sequence) FROM app.orders")))
PYTHON

# by obix.publish
orm(<<'PYTHON', "True\n0 1", 'publish() publishes at commit');
id = publish(session, "app.orders", {"amount": 2}, "sent", "account-2", {"traceparent": "y"})
print(uuid.UUID(str(id)).version == 7)
print(session.query(OrderEvent).filter_by(type="sent").count(), end=" ")
session.commit()
print(session.query(OrderEvent).filter_by(type="sent", id=str(id)).count())
PYTHON

# a class that is not written down, and queries
orm(<<'PYTHON', "sequence id type key payload headers recorded_at\nsequence\n309", 'tables are found by reflection');
table = Table("orders", MetaData(), schema="app", autoload_with=engine)
print(*table.columns.keys())
print(*table.primary_key.columns.keys())
session.execute(table.insert(), {"payload": 1})
session.rollback()
print(session.scalar(select(table.c.sequence).where(table.c.type == "sent")))
PYTHON

# what may be changed, and what is refused
orm(<<'PYTHON', 'True', 'a payload can be redacted');
event = session.get(OrderEvent, 1)
event.payload = {}
event.headers = None
session.commit()
print(event.payload == {} and event.headers is None)
PYTHON
orm(<<'PYTHON', <<'PRINTED' =~ s/\n\z//r, 'other changes are refused');
event = session.get(OrderEvent, 1)
refused(lambda: setattr(event, "key", "account-2"))
refused(lambda: setattr(event, "sequence", 1000))
refused(lambda: session.delete(event))
refused(lambda: session.execute(delete(OrderEvent)))
refused(lambda: session.add(OrderEvent(sequence=1000, payload=1)))
refused(lambda: session.execute(insert(OrderEvent), {"key": "x"}))
PYTHON
cannot update column "key" of outbox "orders"
cannot update column "sequence" of outbox "orders"
cannot delete from outbox "orders"
cannot delete from outbox "orders"
cannot insert sequence 1000 into outbox "orders"
payload of an event must not be null
PRINTED

run_orm();
is(rows('SELECT sequence, type, key, payload, headers FROM app.orders WHERE sequence IN (1, 1000)'),
	'1|paid|account-1|{}|', 'the first is in the outbox, redacted');
is(rows('SELECT sequence, type, key, payload, headers FROM app.orders WHERE sequence = 2'),
	'2|||null|', 'None is JSON null as payload, and NULL elsewhere');
poll_ok($node, $db, q{SELECT obix.high_water_mark('app.orders') >= 309}, 'readers pass what was rolled back');
is( rows(q{SELECT sequence, payload FROM obix.read('app.orders', 2, 4) ORDER BY 1}),
	qq{3|\n4|"stays"\n5|\n6|"stays, too"}, 'and get the rest');
is( rows(q{SELECT count(*) FROM obix.read('app.orders', 6, 302) WHERE key::bigint = (sequence - CASE WHEN sequence > 208 THEN 209 ELSE 7 END) % 100}),
	'300', 'in the order in which they were given');
is(rows('SELECT sequence, type, key, payload, headers FROM app.orders WHERE sequence = 309'),
	'309|sent|account-2|{"amount": 2}|{"traceparent": "y"}', 'with all that belongs to it');

$node->stop;
done_testing();
