"""
actor.py: what all actors have in common.  Each is a thread with a connection
and with its own random numbers, which follow from the seed and its name.
"""
import collections
import random
import re
import threading
import time
import traceback

import psycopg

# What clients have to expect while somebody does what the faults do.
EXPECTED = {
    None: "connection lost",
    "08006": "connection failure",
    "25P03": "idle in transaction",
    "40001": "serialization failure",
    "40P01": "deadlock",
    "53100": "disk full",
    "53300": "too many connections",
    "53400": "no place for an outbox or a consumer",
    "55P03": "lock not available",
    "57014": "cancelled, or timeout",
    "57P01": "terminated",
    "57P02": "crash of another process",
    "57P03": "cannot connect now",
    "57P05": "idle timeout",
}


class Retry(Exception):
    """The connection is of no use any more."""


def is_lost(conn, error):
    """Has this error ended the session?"""
    return conn.closed or error.sqlstate is None or error.diag.severity_nonlocalized in ("FATAL", "PANIC")


class World:
    """What the actors share."""

    def __init__(self, seed, server, ledger, violations):
        self.seed = seed
        self.server = server
        self.ledger = ledger
        self.violations = violations
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.errors = collections.Counter()
        self.publishing = threading.Event()     # publishers and maintenance go on
        self.consuming = threading.Event()      # readers and consumers go on
        self.faults = threading.Event()         # somebody does harm
        self.consumers = {}                     # name: ConsumerLedger
        self.handlers = {}                      # name: what verify.py wants to know
        self.lag = 0                            # of the slowest consumer, in events
        for event in (self.publishing, self.consuming, self.faults):
            event.set()

    def random(self, name):
        """The random numbers of an actor."""
        return random.Random(f"{self.seed} {name}")

    def count(self, *what):
        """Count something for the table of figures."""
        with self.lock:
            self.counts[what] += 1

    def error(self, who, error, also=()):
        """Note an error that a client got: one that nothing explains is a violation."""
        first = (str(error).splitlines() or [""])[0]
        message = re.sub(r"\d+", "N", first)
        state = error.sqlstate
        expected = state in EXPECTED
        for code, pattern in also:
            expected = expected or (state == code and re.search(pattern, first))
        if state is None:
            message = EXPECTED[None]
        elif state in EXPECTED:
            message = re.sub(r'"[^"]*"', '"..."', message)
        with self.lock:
            self.errors[(state or "-", message)] += 1
        if not expected:
            self.violations.add("unexpected error",
                                f"{who}: {state} {first} {error.diag.message_detail or ''} {error.diag.context or ''}")


class Actor(threading.Thread):
    """Something that goes on in steps, connecting again where that is needed."""

    also = ()                   # further errors it has to expect: (SQLSTATE, pattern)

    def __init__(self, world, name, going):
        super().__init__(name=name, daemon=True)
        self.world = world
        self.server = world.server
        self.ledger = world.ledger
        self.going = going      # an event that is set until it shall end
        self.random = world.random(name)
        self.conn = None
        self.alive = time.monotonic()

    def run(self):
        while self.going.is_set():
            try:
                self.alive = time.monotonic()
                self.connect()
                while self.going.is_set():
                    self.alive = time.monotonic()
                    self.step()
            except psycopg.Error as error:
                self.world.error(self.name, error, self.also)
            except Retry:
                pass
            except Exception:
                self.world.violations.add("harness", f"{self.name}: {traceback.format_exc()}")
            if self.conn is not None:
                self.conn.close()
            time.sleep(self.random.uniform(0, 0.05))
        self.alive = None

    def connect(self):
        """Have a connection."""
        self.conn = self.server.connect(application_name=f"torture {self.name}", options=self.options())

    def options(self):
        """Settings for its session."""
        return ""

    def step(self):
        """One piece of what it does."""
        raise NotImplementedError

    def execute(self, statement):
        """A statement, by the simple query protocol, so without parameters."""
        return self.conn.execute(statement)

    def rows(self, statement):
        """The rows of a query."""
        return self.conn.execute(statement).fetchall()

    def value(self, statement):
        """The one value of a query."""
        return self.conn.execute(statement).fetchone()[0]

    def chance(self, probability):
        """True so often."""
        return self.random.random() < probability

    def pause(self, longest):
        """Do nothing for up to so many seconds."""
        time.sleep(self.random.uniform(0, longest))

    def recover(self, error):
        """After an error: roll back and go on, or connect again."""
        if is_lost(self.conn, error):
            raise Retry
        try:
            self.execute("ROLLBACK")
        except psycopg.Error as second:
            self.world.error(self.name, second, self.also)
            raise Retry from second
