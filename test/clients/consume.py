#!/usr/bin/python3
"""
consume.py: a consumer of an outbox, in Python with psycopg 3.

    consume.py CONSUMER             writes a row to app.receipt for each event
    consume.py CONSUMER FOLDER      writes a file to a folder for each event

The row and the acknowledgement are one transaction, so each event has its
effect exactly once.  A file stands for whatever is not in this database, such
as a message to somebody else.  It is written before the acknowledgement, and
perhaps again after a crash, but under the name of the event's id: so it does
not matter how often.  libpq's environment variables say where the database is:
PGHOST and so on.

SIGTERM and SIGINT end it with status 0, when the batch in hand is done with and
acknowledged, or at once while it waits.  Killed at any moment, what it had not
acknowledged is delivered again to whoever comes next.  It ends with status 1
where a person has to look, for instance because the consumer has stopped.

What it knows is in the database, and nothing in the session.  So connections
may go by way of a pooler, and several of these may run: one has its turn, and
the others are ready to go on where it has left off.
"""
import logging
import os
import random
import re
import secrets
import signal
import sys
import time

import psycopg
from psycopg.rows import namedtuple_row

BATCH = 100         # events in a transaction or in one lease, at most
LEASE = float(os.environ.get("LEASE", "30"))    # seconds
MAX_DELAY = 30.0    # seconds between attempts to connect, at most

stopping = False
in_hand = False     # whether something is in hand that has to be finished first


def child_context(headers):
    """
    A trace context (W3C) for what is done about an event: the trace of whoever
    has published it, and a span of ours.  With OpenTelemetry, extract(headers)
    makes the publisher's context the current one.
    """
    parent = re.fullmatch("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2}).*",
                          str((headers or {}).get("traceparent")))
    return parent and f"00-{parent[2]}-{secrets.token_hex(8)}-{parent[4]}"


def hold(something):
    """Note whether something is in hand.  If nothing is, this may be the end."""
    global in_hand
    in_hand = something
    if stopping and not something:
        raise KeyboardInterrupt


# --- effects in this database, each in the transaction that acknowledges it

def fetch(conn, consumer, limit):
    """The next events.  While another fetches, waits until that has committed."""
    hold(False)
    events = conn.execute("SELECT * FROM obix.fetch(%s, %s, wait => true)",
                          (consumer, limit)).fetchall()
    hold(bool(events))
    return events


def apply(conn, event):
    """The effect of an event.  A setting has the trace context, for triggers for instance."""
    conn.execute("INSERT INTO app.receipt (sequence, account, amount)"
                 " SELECT %s, %s, %s FROM set_config('app.traceparent', %s, true)",
                 (event.sequence, event.key, event.payload["amount"], child_context(event.headers)))


def report(conn, consumer, event, error):
    """
    Say that an event could not be dealt with.  This can be said of what has
    been fetched, but that was rolled back; so it is fetched again.
    """
    logging.warning("event %s failed: %s", event.sequence, error)
    with conn.transaction():
        for again in fetch(conn, consumer, 1):
            if again.sequence == event.sequence:
                conn.execute("SELECT obix.fail(%s, %s, %s)",
                             (consumer, event.sequence, str(error)))


def consume(conn, consumer):
    """Deal with events, as long as the connection lasts."""
    limit = BATCH
    while True:
        events = []
        try:
            with conn.transaction():
                events = fetch(conn, consumer, limit)
                for event in events:
                    apply(conn, event)
                if events:
                    conn.execute("SELECT obix.ack(%s, %s)", (consumer, events[-1].sequence))
        except Exception as error:
            if not events or conn.closed:
                raise                   # no event is to blame
            if len(events) == 1:
                report(conn, consumer, events[0], error)
            limit = 1                   # see which of them it is
        else:
            if events:
                limit = min(2 * limit, BATCH)
            else:
                conn.execute("CALL obix.wait_for(%s, '30 s')", (consumer,))


# --- effects elsewhere, each before its acknowledgement, under a lease

def deliver(folder, event):
    """The effect of an event: idempotent, for it may have been delivered before."""
    path = os.path.join(folder, f"{event.id}.json")
    if not os.path.exists(path):
        with open(path + ".new", "w") as file:
            file.write(event.cloudevent + "\n")
        os.rename(path + ".new", path)


def forward(conn, consumer, folder):
    """Deliver events elsewhere, as long as the connection lasts."""
    while True:
        hold(True)
        token = conn.execute("SELECT obix.acquire(%s, make_interval(secs => %s))",
                             (consumer, LEASE)).fetchone()[0]
        if token is None:               # somebody else is at it
            hold(False)
            time.sleep(1)
            continue
        renewed = time.monotonic()
        events = conn.execute("SELECT sequence, id, obix.cloudevent(e)::text AS cloudevent"
                              " FROM obix.fetch(%s, %s, token => %s) e",
                              (consumer, BATCH, token)).fetchall()
        done = failed = None
        try:
            for event in events:
                if time.monotonic() > renewed + LEASE / 3:
                    conn.execute("SELECT obix.renew(%s, %s, make_interval(secs => %s))",
                                 (consumer, token, LEASE))
                    renewed = time.monotonic()
                try:
                    deliver(folder, event)
                except OSError as error:
                    logging.warning("event %s failed: %s", event.sequence, error)
                    failed = (consumer, event.sequence, str(error), token)
                    break
                done = (consumer, event.sequence, token)
            with conn.transaction():
                if done:
                    conn.execute("SELECT obix.ack(%s, %s, %s)", done)
                if failed:
                    conn.execute("SELECT obix.fail(%s, %s, %s, %s)", failed)
                conn.execute("SELECT obix.release(%s, %s)", (consumer, token))
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            # The lease has ended, or a dead letter was let go: what is not
            # acknowledged comes again.
            logging.warning("%s", error)
            events = []
        hold(False)
        if not events or failed:
            conn.execute("CALL obix.wait_for(%s, '30 s')", (consumer,))


def main(consumer, folder=None):
    """Connect, and connect again when the connection is lost."""
    delay = 0.0
    while True:
        conn = None
        try:
            # a pooler of transactions may know no prepared statements
            conn = psycopg.connect(autocommit=True, prepare_threshold=None,
                                   row_factory=namedtuple_row)
            logging.info("connected")
            delay = 0.0
            with conn:
                if folder is None:
                    consume(conn, consumer)
                else:
                    forward(conn, consumer, folder)
        except psycopg.OperationalError as error:
            if conn is not None and not conn.broken:
                raise
            hold(False)
            delay = min(2 * delay + 0.1, MAX_DELAY)
            logging.warning("no connection: %s", error)
            time.sleep(delay * random.uniform(0.5, 1))


def stop(signum, frame):
    """Go no further than what is in hand; psycopg cancels what the server is at."""
    global stopping
    stopping = True
    hold(in_hand)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: consume.py CONSUMER [FOLDER]")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
    except psycopg.Error as error:
        sys.exit(str(error))
    logging.info("stopped")
