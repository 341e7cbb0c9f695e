#!/usr/bin/python3
"""
publish.py: a publisher, in Python with psycopg 3.

    publish.py < PAYMENTS

Each line of its input is a payment: a UUID that identifies it, an account, an
amount and, where there is one, the W3C trace context of the request that it
comes from, traceparent and tracestate.  A payment and the event that tells of
it are one transaction, so both are there or neither is.  libpq's environment
variables say where the database is: PGHOST and so on.

When the connection is lost, nobody knows whether the last transaction has been
committed.  So the payment is tried again, and it is its UUID that tells whether
it is there already.  Killed at any moment, it can be given the same input again.
"""
import logging
import random
import sys
import time

import psycopg
from psycopg.types.json import Jsonb

MAX_DELAY = 30.0    # seconds between attempts to connect, at most


def pay(conn, payment, account, amount, context):
    """Charge a payment to an account, and publish that; once, however often tried."""
    with conn.transaction():
        new = conn.execute("INSERT INTO app.payment (id, account, amount) VALUES (%s, %s, %s)"
                           " ON CONFLICT DO NOTHING", (payment, account, amount))
        if new.rowcount == 0:
            return
        conn.execute("UPDATE app.account SET balance = balance - %s WHERE id = %s", (amount, account))
        conn.execute("SELECT obix.publish('app.orders',"
                     " jsonb_build_object('payment', %s::uuid, 'amount', %s::numeric),"
                     " type => 'paid', key => %s, headers => %s)",
                     (payment, amount, f"account-{account}", Jsonb(context)))


def main():
    """Read payments; connect again when the connection is lost."""
    conn = None
    for line in sys.stdin:
        payment, account, amount, *trace = line.split()
        context = dict(zip(("traceparent", "tracestate"), trace))
        delay = 0.0
        while True:
            try:
                if conn is None or conn.closed:
                    conn = psycopg.connect(autocommit=True, prepare_threshold=None)
                pay(conn, payment, account, amount, context)
                break
            except (psycopg.DataError, psycopg.IntegrityError) as error:
                logging.warning("payment %s is refused: %s", payment, error)
                break
            except psycopg.OperationalError as error:
                if conn is not None and not conn.broken:
                    conn.close()    # a serialization failure, for instance
                delay = min(2 * delay + 0.1, MAX_DELAY)
                logging.warning("payment %s is tried again: %s", payment, error)
                time.sleep(delay * random.uniform(0.5, 1))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        main()
    except psycopg.Error as error:
        sys.exit(str(error))
