"""
publishers.py: transactions of every kind that put events into outboxes.

A kind is a method kind_NAME: it gets a transaction of the ledger, announces
each part before it sends the statement, and returns how the transaction ended.
An error leaves it for step(), which knows whether COMMIT had been sent.
"""
import time

import psycopg

from actor import Actor, Retry, is_lost
from ledger import ABORTED, COMMITTED, KEYS, OPEN, PREPARED, TYPES, UNKNOWN

COUNTERS = 5
MAX_LAG = 10000                 # events that consumers may be behind before publishers slow down
MAX_PREPARED = 8                # at the same time
PREPARED_TIME = 3.0             # seconds until they are decided, at most


def event(p, k, size):
    """The columns of an event, as SQL expressions: type, key, payload."""
    filler = f", 'x', repeat('x', {size})" if size < 4000 else \
        f", 'x', app.noise({size} + 0 * {k})"
    return (f"'t' || ({p} + {k}) % {TYPES}", f"'k' || ({p} + {k}) % {KEYS}",
            f"jsonb_build_object('p', {p}, 'k', {k}{filler if size else ''})")


class Publisher(Actor):
    """Runs transactions of random kinds."""

    kinds = {
        "single": 20, "many": 12, "insert": 12, "rows": 8, "copy": 6, "savepoints": 10, "rollback": 6,
        "prepare": 5, "serializable": 6, "repeatable": 5, "async": 6, "two": 6, "large": 0.3, "counter": 12,
        "timeout": 5, "vanish": 2, "exception": 3, "drawn": 8,
    }

    def __init__(self, world, name):
        super().__init__(world, name, world.publishing)
        self.committing = False
        self.serial = 0

    def options(self):
        return f"-c synchronous_commit={self.random.choice(('off', 'off', 'on', 'local'))}"

    def step(self):
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        tx = self.ledger.begin(kind)
        self.committing = False
        lost = failure = None
        try:
            status = getattr(self, "kind_" + kind)(tx)
        except psycopg.Error as error:
            failure = error
            lost = is_lost(self.conn, error)
            status = UNKNOWN if self.committing and lost else ABORTED
            if not (kind == "vanish" and self.conn.closed):
                self.world.error(f"{self.name} {kind}", error, self.also)
        if self.ledger.tx_status[tx.number] == OPEN:
            self.ledger.end(tx, status)
        self.world.count("transactions", kind, status)
        if lost or self.conn.closed:
            raise Retry
        if failure:
            self.recover(failure)
        self.pause(0.01 if self.world.lag < MAX_LAG else 0.3)

    # -------------------------------------------------------------- pieces

    def outbox(self):
        """One of those that clients publish to."""
        return self.random.choices("abc", (45, 40, 15))[0]

    def size(self):
        """How much an event carries besides its number."""
        return self.random.choices((0, 50, 1000, 3000, 9000), (50, 40, 7, 2, 1))[0]

    def few(self):
        """A small number of events."""
        return self.random.choices((1, self.random.randint(2, 10), self.random.randint(11, 60)), (50, 40, 10))[0]

    def begin(self, how=""):
        self.execute("BEGIN " + how)

    def commit(self, tx):
        """Commit; if the connection is lost now, nobody knows."""
        tx.sending()
        self.committing = True
        self.execute("COMMIT")
        return COMMITTED

    def rollback(self):
        self.execute("ROLLBACK")
        return ABORTED

    def finish(self, tx):
        """Commit, rarely roll back."""
        return self.rollback() if self.chance(0.1) else self.commit(tx)

    def publish(self, tx, outbox, count):
        """Publish events; returns their part."""
        size = 0 if count > 500 else self.size()
        part = tx.part(outbox, count, True)
        kind, key, payload = event(part, "g", size)
        self.execute(f"SELECT count(obix.publish('{outbox}', {payload}, type => {kind}, key => {key})) "
                     f"FROM generate_series(0, {count - 1}) g")
        return part

    def insert(self, tx, outbox, count):
        """Insert events by one statement."""
        size = 0 if count > 500 else self.size()
        part = tx.part(outbox, count, False)
        kind, key, payload = event(part, "g", size)
        self.execute(f"INSERT INTO {outbox} (type, key, payload) SELECT {kind}, {key}, {payload} "
                     f"FROM generate_series(0, {count - 1}) g")
        return part

    def copy(self, tx, outbox, count):
        """Insert events by COPY."""
        part = tx.part(outbox, count, False)
        lines = "".join(f't{(part + k) % TYPES}\tk{(part + k) % KEYS}\t{{"p": {part}, "k": {k}}}\n' for k in range(count))
        with self.conn.cursor() as cursor, cursor.copy(f"COPY {outbox} (type, key, payload) FROM STDIN") as copy:
            copy.write(lines)
        return part

    def some(self, tx, outbox=None, count=None):
        """Events in one way or another."""
        way = self.random.choices((self.publish, self.insert, self.copy), (6, 3, 1))[0]
        return way(tx, outbox or self.outbox(), count or self.few())

    # --------------------------------------------------------------- kinds

    def kind_single(self, tx):
        """One event, in a transaction by itself."""
        outbox = self.outbox()
        part = tx.part(outbox, 1, True)
        kind, key, payload = event(part, 0, self.size())
        tx.sending()
        self.committing = True
        uuid = self.value(f"SELECT obix.publish('{outbox}', {payload}, type => {kind}, key => {key})")
        self.ledger.set_id(part, str(uuid))
        return COMMITTED

    def kind_many(self, tx):
        """Several statements that publish."""
        outbox = self.outbox()
        self.begin()
        for _ in range(self.random.randint(1, 4)):
            self.publish(tx, outbox, self.few())
        return self.finish(tx)

    def kind_insert(self, tx):
        """One row."""
        outbox = self.outbox()
        part = tx.part(outbox, 1, False)
        kind, key, payload = event(part, 0, self.size())
        self.begin()
        uuid = self.value(f"INSERT INTO {outbox} (type, key, payload) VALUES ({kind}, {key}, {payload}) RETURNING id")
        self.ledger.set_id(part, str(uuid))
        if self.chance(0.3):
            self.pause(0.03)
        return self.finish(tx)

    def kind_drawn(self, tx):
        """A sequence that is drawn first, and used later, or not."""
        outbox = self.outbox()
        self.begin()
        part = tx.part(outbox, 1, False)
        sequence = self.value(f"SELECT obix.next_sequence('{outbox}')")
        if self.chance(0.3):
            self.insert(tx, outbox, 2)
        self.pause(0.3)
        if self.chance(0.2):
            tx.roll_back_parts([part])
        else:
            kind, key, payload = event(part, 0, 0)
            self.execute(f"INSERT INTO {outbox} (sequence, type, key, payload) "
                         f"VALUES ({sequence}, {kind}, {key}, {payload})")
        return self.finish(tx)

    def kind_rows(self, tx):
        """Many rows, by a statement."""
        self.begin()
        self.insert(tx, self.outbox(), self.random.randint(2, 60))
        return self.finish(tx)

    def kind_copy(self, tx):
        """Many rows, by COPY."""
        self.begin()
        self.copy(tx, self.outbox(), self.random.randint(1, 60))
        return self.finish(tx)

    def kind_savepoints(self, tx):
        """Savepoints, nested, some of them rolled back."""
        self.begin()
        stack = []                      # [parts of each savepoint that is open]
        outbox = self.outbox()
        parts = [self.some(tx, outbox)]
        for _ in range(self.random.randint(1, 8)):
            what = self.random.random()
            if what < 0.4 or not stack:
                self.execute(f"SAVEPOINT s{len(stack)}")
                stack.append([])
            elif what < 0.6:
                gone = stack.pop()
                self.execute(f"ROLLBACK TO s{len(stack)}")
                if gone:
                    tx.roll_back_parts(gone)
                if self.chance(0.5):
                    stack.append([])    # it is still there
                else:
                    self.execute(f"RELEASE s{len(stack)}")
            elif what < 0.75:
                kept = stack.pop()
                self.execute(f"RELEASE s{len(stack)}")
                (stack[-1] if stack else parts).extend(kept)
            (stack[-1] if stack else parts).append(self.some(tx, outbox if self.chance(0.8) else None))
        return self.finish(tx)

    def kind_exception(self, tx):
        """Blocks with exceptions, in PL/pgSQL."""
        outbox = self.outbox()
        kept, gone = tx.part(outbox, 3, True), tx.part(outbox, 3, self.chance(0.5))
        tx.roll_back_parts([gone])
        kind, key, payload = event(kept, "g", 0)
        _, _, other = event(gone, "g", 0)
        lose = f"PERFORM obix.publish('{outbox}', {other});" if self.ledger.part_published[gone] else \
            f"INSERT INTO {outbox} (payload) VALUES ({other});"
        tx.sending()
        self.committing = True
        self.execute(f"""DO $$ BEGIN FOR g IN 0 .. 2 LOOP
            PERFORM obix.publish('{outbox}', {payload}, type => {kind}, key => {key});
            BEGIN {lose} PERFORM 1 / (g - g); EXCEPTION WHEN division_by_zero THEN NULL; END;
            END LOOP; END $$""")
        return COMMITTED

    def kind_rollback(self, tx):
        """Rolled back, or left behind by a client that goes away."""
        self.begin()
        for _ in range(self.random.randint(1, 3)):
            self.some(tx)
        if self.chance(0.2):
            self.conn.close()
            return ABORTED
        if self.chance(0.5):
            self.pause(0.2)             # others draw meanwhile, and are in flight still
        return self.rollback()

    def kind_prepare(self, tx):
        """Prepared; the Decider ends it."""
        if len(self.ledger.prepared) >= MAX_PREPARED:
            return self.kind_many(tx)
        self.serial += 1
        gid = f"{self.name} {self.serial}"
        self.begin()
        for _ in range(self.random.randint(1, 3)):
            self.some(tx)
        tx.gid = gid
        tx.decision = COMMITTED if self.chance(0.6) else ABORTED
        tx.attempts = 0
        tx.due = time.monotonic() + self.random.uniform(0, PREPARED_TIME)
        tx.was_prepared = False
        tx.sending()
        self.committing = True
        try:
            self.execute(f"PREPARE TRANSACTION '{gid}'")
        except psycopg.Error as error:
            if is_lost(self.conn, error):
                self.ledger.end(tx, UNKNOWN)
                self.ledger.prepared[gid] = tx
            raise
        tx.was_prepared = True
        self.ledger.end(tx, PREPARED)
        self.ledger.prepared[gid] = tx
        return PREPARED

    def kind_serializable(self, tx):
        """Reads and writes of which some cannot be serialized."""
        return self.kind_counter(tx, "ISOLATION LEVEL SERIALIZABLE")

    def kind_repeatable(self, tx):
        """A snapshot that is older than other publishers' commits."""
        return self.kind_counter(tx, "ISOLATION LEVEL REPEATABLE READ")

    def kind_counter(self, tx, how=""):
        """
        Waits for a row that others change: who changes it later must have the
        higher sequences.
        """
        outbox = self.outbox()
        counter = self.random.randrange(COUNTERS)
        self.begin(how)
        if how:
            self.execute("SELECT sum(n) FROM app.counter")
        early = self.publish(tx, outbox, self.few()) if self.chance(0.5) else None
        value = self.value(f"UPDATE app.counter SET n = n + 1 WHERE id = {counter} RETURNING n")
        part = early or self.publish(tx, outbox, self.few())
        self.ledger.count_up(outbox, counter, value, part)
        if self.chance(0.2):
            self.insert(tx, outbox, 1)  # it does not belong to what is published
        return self.finish(tx)

    def kind_async(self, tx):
        """
        Asks at the last moment not to wait for its flush, as most sessions do
        from their beginning.  What publishes is flushed all the same.
        """
        self.begin()
        for _ in range(self.random.randint(1, 2)):
            self.some(tx)
        self.execute("SET LOCAL synchronous_commit = off")
        return self.finish(tx)

    def kind_two(self, tx):
        """Events in two outboxes."""
        self.begin()
        for outbox in self.random.sample("abc", 2):
            self.some(tx, outbox)
        return self.finish(tx)

    def kind_large(self, tx):
        """More than work_mem holds."""
        self.begin()
        self.some(tx, count=self.random.randint(1000, 5000))
        return self.finish(tx)

    def kind_timeout(self, tx):
        """Timeouts that strike anywhere, at COMMIT too."""
        self.begin()
        setting = self.random.choice(("statement_timeout", "lock_timeout", "statement_timeout",
                                      "idle_in_transaction_session_timeout"))
        self.execute(f"SET LOCAL {setting} = '{self.random.randint(1, 20)} ms'")
        for _ in range(self.random.randint(1, 3)):
            self.some(tx)
            self.pause(0.01)
        return self.finish(tx)

    def kind_vanish(self, tx):
        """Goes away without waiting for the answer to COMMIT."""
        self.begin()
        self.some(tx)
        tx.sending()
        self.conn.pgconn.send_query(b"COMMIT")
        self.conn.close()
        return UNKNOWN


class Decider(Actor):
    """Commits or rolls back what has been prepared."""

    def step(self):
        for gid, tx in list(self.ledger.prepared.items()):
            if tx.due < time.monotonic():
                self.decide(gid, tx)
        time.sleep(0.02)

    def decide(self, gid, tx, final=False):
        """End one, if it can be."""
        tx.attempts += 1
        try:
            self.execute(f"{'COMMIT' if tx.decision == COMMITTED else 'ROLLBACK'} PREPARED '{gid}'")
        except psycopg.Error as error:
            if error.sqlstate == "42704":
                # its end was not confirmed, or nor was its beginning
                if tx.was_prepared and tx.attempts == 1:
                    self.world.violations.add("prepared transaction lost", gid)
                if tx.was_prepared:
                    self.end(gid, tx, tx.decision)
                elif final:
                    del self.ledger.prepared[gid]
                return
            if error.sqlstate == "55000" and "busy" in str(error):
                return                  # the session that prepared it is not done yet
            raise
        self.end(gid, tx, tx.decision)

    def end(self, gid, tx, status):
        self.ledger.end(tx, status)
        self.world.count("transactions", "decided", status)
        del self.ledger.prepared[gid]
