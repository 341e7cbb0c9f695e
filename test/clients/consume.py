#!/usr/bin/python3
"""
consume.py: a consumer of an outbox, in Python with psycopg 3.

    consume.py CONSUMER

For each event of a consumer it writes a row to app.receipt, exactly once.
libpq's environment variables say where the database is: PGHOST and so on.

SIGTERM and SIGINT end it at any moment, with status 0: what is not committed
is rolled back, and delivered again to whoever comes next.  It ends with status
1 where a person has to look, for instance because the consumer has stopped.

What it knows is in the database, and nothing in the session.  So connections
may go by way of a pooler, and several of these may run: one has its turn, and
the others are ready to go on where it has left off.
"""
import logging
import random
import signal
import sys
import time

import psycopg
from psycopg.rows import namedtuple_row

BATCH = 100         # events in a transaction, at most
MAX_DELAY = 30.0    # seconds between attempts to connect, at most

stopping = False


def fetch(conn, consumer, limit):
    """The next events.  While another fetches, waits until that has committed."""
    return conn.execute("SELECT * FROM obix.fetch(%s, %s, wait => true)",
                        (consumer, limit)).fetchall()


def apply(conn, event):
    """The effect of an event, in the transaction that acknowledges it."""
    conn.execute("INSERT INTO app.receipt (sequence, account, amount) VALUES (%s, %s, %s)",
                 (event.sequence, event.key, event.payload["amount"]))


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


def main(consumer):
    """Connect, and connect again when the connection is lost."""
    delay = 0.0
    while not stopping:
        conn = None
        try:
            # a pooler of transactions may know no prepared statements
            conn = psycopg.connect(autocommit=True, prepare_threshold=None,
                                   row_factory=namedtuple_row)
            logging.info("connected")
            delay = 0.0
            with conn:
                consume(conn, consumer)
        except psycopg.OperationalError as error:
            if conn is not None and not conn.broken:
                raise
            delay = min(2 * delay + 0.1, MAX_DELAY)
            logging.warning("no connection: %s", error)
            time.sleep(delay * random.uniform(0.5, 1))


def stop(signum, frame):
    """Interrupt whatever is going on; psycopg cancels what the server is at."""
    global stopping
    stopping = True
    raise KeyboardInterrupt


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: consume.py CONSUMER")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        logging.info("stopped")
    except psycopg.Error as error:
        sys.exit(str(error))
