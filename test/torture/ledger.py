"""
ledger.py: what is known of the outboxes without asking the server.

A transaction has parts: so many events, from one statement or more, in one
outbox.  Every event bears the number of its part, p, and its place in there,
k; so each event that is met anywhere can be judged.  The kinds of ends:

    COMMITTED   the server has said so: all of it must be there, for ever
    ABORTED     the server has said so, or was never asked: nothing may be there
    UNKNOWN     the connection was lost during COMMIT: all of it, or nothing

Whatever is written here is written before a statement is sent, or after the
answer has come.  So an event that is seen has its part, and a time "sent"
precedes, and a time "acked" follows, what happened in the server.
"""
import array
import threading
import time

OPEN, COMMITTED, ABORTED, UNKNOWN, PREPARED = range(5)
STATUS = ("open", "committed", "aborted", "unknown", "prepared")
FOREVER = float("inf")
PLACEHOLDER = -1
TYPES, KEYS = 4, 50             # of events: (p + k) modulo these
NIL = "00000000-0000-0000-0000-000000000000"


def token(p, k):
    """An event as one number."""
    return p << 24 | k


def parse(text):
    """Half of a UUID, as a number."""
    return int(text.replace("-", "")[16:], 16)


def columns(e):
    """What readers and consumers ask for, of a row e."""
    return f"{e}.sequence, {e}.id::text, ({e}.payload ->> 'p')::bigint, ({e}.payload ->> 'k')::bigint"


class Violations:
    """What must not be; the first ones of each kind are kept."""

    def __init__(self, path):
        self.lock = threading.Lock()
        self.count = 0
        self.kinds = {}
        self.file = open(path, "w", encoding="utf-8", buffering=1)

    def add(self, kind, text):
        """Note one."""
        with self.lock:
            self.count += 1
            texts = self.kinds.setdefault(kind, [])
            if len(texts) < 20:
                texts.append(text)
                self.file.write(f"{time.strftime('%H:%M:%S')} {kind}: {text}\n")


class Delivered:
    """What any reader or consumer was ever given of one outbox, by sequence."""

    def __init__(self):
        self.tokens = array.array("q", [0])
        self.ids = array.array("Q", [0])
        self.top = 0                    # a reader has been given everything up to here


class Transaction:
    """One transaction of a publisher."""

    def __init__(self, ledger, number):
        self.ledger = ledger
        self.number = number
        self.parts = []

    def part(self, outbox, count, published):
        """Announce events; returns the number of the part."""
        return self.ledger.add_part(self, outbox, count, published)

    def roll_back_parts(self, parts):
        """A savepoint has been rolled back."""
        self.ledger.roll_back_parts(self, parts)

    def sending(self):
        """The transaction is about to be committed, or prepared."""
        self.ledger.sending(self)

    def end(self, status):
        """How it ended."""
        self.ledger.end(self, status)


class Ledger:
    """All transactions and all deliveries."""

    def __init__(self, path, outboxes, violations):
        self.lock = threading.Lock()
        self.file = open(path, "w", encoding="utf-8", buffering=1 << 16)
        self.outboxes = list(outboxes)
        self.violations = violations
        self.delivered = {outbox: Delivered() for outbox in outboxes}

        # of transactions; number 0 is nobody's
        self.tx_status = array.array("b", [ABORTED])
        self.tx_kinds = [""]
        self.tx_sent = array.array("d", [FOREVER])
        self.tx_acked = array.array("d", [FOREVER])
        self.tx_events = array.array("l", [0])

        # of parts
        self.part_tx = array.array("q", [0])
        self.part_outbox = array.array("b", [0])
        self.part_count = array.array("l", [0])
        self.part_published = array.array("b", [0])
        self.part_gone = array.array("b", [0])      # by a rolled back savepoint
        self.part_sent = array.array("d", [FOREVER])
        self.part_id = array.array("Q", [0])        # of the first event; 0: not known

        self.pending = {}               # number: Transaction, not yet seen as a whole
        self.prepared = {}              # gid: Transaction
        self.counters = {}              # (outbox, counter): [(value, part)]

    def write(self, *fields):
        """A line for whoever has to find out what happened."""
        self.file.write(" ".join(map(str, fields)) + "\n")

    # --------------------------------------------------------- transactions

    def begin(self, kind):
        """A new transaction."""
        with self.lock:
            tx = Transaction(self, len(self.tx_status))
            self.tx_status.append(OPEN)
            self.tx_kinds.append(kind)
            self.tx_sent.append(FOREVER)
            self.tx_acked.append(FOREVER)
            self.tx_events.append(0)
            self.pending[tx.number] = tx
            return tx

    def add_part(self, tx, outbox, count, published):
        with self.lock:
            part = len(self.part_tx)
            self.part_tx.append(tx.number)
            self.part_outbox.append(self.outboxes.index(outbox))
            self.part_count.append(count)
            self.part_published.append(published)
            self.part_gone.append(0)
            self.part_sent.append(FOREVER if published else time.monotonic())
            self.part_id.append(0)
            self.tx_events[tx.number] += count
            tx.parts.append(part)
            self.write("part", part, "tx", tx.number, self.tx_kinds[tx.number], outbox, count,
                       "published" if published else "inserted")
            return part

    def roll_back_parts(self, tx, parts):
        with self.lock:
            for part in parts:
                self.part_gone[part] = 1
                self.tx_events[tx.number] -= self.part_count[part]
                self.write("gone", part)

    def set_id(self, part, text):
        """The id that the server has told for the first event of a part."""
        self.part_id[part] = parse(text)

    def count_up(self, outbox, counter, value, part):
        """The transaction of a part has brought a counter, a row, to a value."""
        with self.lock:
            self.counters.setdefault((outbox, counter), []).append((value, part))

    def sending(self, tx):
        now = time.monotonic()
        self.tx_sent[tx.number] = now
        for part in tx.parts:
            if self.part_published[part]:
                self.part_sent[part] = now

    def end(self, tx, status):
        with self.lock:
            if status == COMMITTED:
                self.tx_acked[tx.number] = time.monotonic()
            self.tx_status[tx.number] = status
            self.write("tx", tx.number, STATUS[status])

    # ----------------------------------------------------------- deliveries

    def deliver(self, who, outbox, sequence, uuid, p, k):
        """
        Somebody has been given an event, or a placeholder.  Whoever is given
        this sequence, at any time, must be given the same.
        """
        seen = self.delivered[outbox]
        value = PLACEHOLDER if p is None else token(p, k)
        number = parse(uuid)
        with self.lock:
            self.write("given", who, outbox, sequence, uuid, p, k)
            while len(seen.tokens) <= sequence:
                seen.tokens.append(0)
                seen.ids.append(0)
            if seen.tokens[sequence] == 0:
                seen.tokens[sequence] = value
                seen.ids[sequence] = number
            elif seen.tokens[sequence] != value or seen.ids[sequence] != number:
                self.violations.add("delivered differently",
                                    f"{who} was given {outbox} {sequence} as {p} {k} {uuid}, "
                                    f"others as {self.describe(seen.tokens[sequence])}")
        if p is None:
            if uuid != NIL:
                self.violations.add("wrong placeholder", f"{outbox} {sequence} {uuid}")
        elif p > 0:
            self.judge(who, outbox, sequence, p, k)

    def judge(self, who, outbox, sequence, p, k):
        """May an event be seen at all?"""
        if p >= len(self.part_tx) or self.outboxes[self.part_outbox[p]] != outbox or \
           not 0 <= k < self.part_count[p]:
            self.violations.add("unknown event", f"{who} saw {outbox} {sequence}: {p} {k}")
            return
        tx = self.part_tx[p]
        if self.part_gone[p] or self.tx_status[tx] == ABORTED:
            self.violations.add("aborted event visible",
                                f"{who} saw {outbox} {sequence}: {self.describe(token(p, k))}")
        elif self.tx_sent[tx] == FOREVER:
            self.violations.add("event visible before its commit",
                                f"{who} saw {outbox} {sequence}: {self.describe(token(p, k))}")

    def describe(self, value):
        """An event in words."""
        if value == PLACEHOLDER:
            return "a placeholder"
        if value == 0:
            return "nothing"
        p, k = value >> 24, value & 0xffffff
        if not 0 < p < len(self.part_tx):
            return f"p {p} k {k}"
        tx = self.part_tx[p]
        return (f"p {p} k {k} of {self.part_count[p]}, transaction {tx} ({self.tx_kinds[tx]}, "
                f"{STATUS[self.tx_status[tx]]})")


class ConsumerLedger:
    """What one consumer that runs outside of the server was given, and acknowledged."""

    def __init__(self, ledger, name, outbox, types, in_order, by_key, has_effects):
        self.ledger = ledger
        self.name = name
        self.outbox = outbox
        self.types = types              # None: all
        self.in_order = in_order        # each event comes for the first time in order
        self.by_key = by_key            # order of effects: within a key; None: no order
        self.has_effects = has_effects  # in the database
        self.lock = threading.Lock()
        self.given = bytearray(1)
        self.acked = array.array("d", [FOREVER])    # when it was known to be acknowledged
        self.discarded = set()          # dead letters that may have been deleted
        self.last = 0
        self.deliveries = 0

    def wants(self, value):
        """Is an event for this consumer?"""
        return value > 0 and (self.types is None or
                              ((value >> 24) + (value & 0xffffff)) % TYPES in self.types)

    def fetched(self, who, rows, sent):
        """Rows of obix.fetch, which was called no earlier than "sent"."""
        for sequence, uuid, p, k in rows:
            self.ledger.deliver(who, self.outbox, sequence, uuid, p, k)
            with self.lock:
                self.deliveries += 1
                missing = sequence + 1 - len(self.given)
                if missing > 0:
                    self.given.extend(bytes(missing))
                    self.acked.extend([FOREVER] * missing)
                if p is None or not self.wants(token(p, k)):
                    self.fault("not for this consumer", sequence)
                if self.acked[sequence] < sent:
                    self.fault("delivered again after its acknowledgement", sequence)
                if not self.given[sequence]:
                    self.given[sequence] = 1
                    if self.in_order and sequence < self.last:
                        self.fault(f"delivered after {self.last}", sequence)
                    self.last = max(self.last, sequence)
        sequences = [row[0] for row in rows]
        if sequences != sorted(set(sequences)):
            self.fault("not in order", sequences)

    def acknowledged(self, sequences):
        """The server has confirmed an acknowledgement of these."""
        now = time.monotonic()
        with self.lock:
            for sequence in sequences:
                self.acked[sequence] = now
        self.ledger.write("acked", self.name, *sequences[:1], *sequences[-1:])

    def fault(self, kind, what):
        self.ledger.violations.add("consumer", f"{self.name}: {kind}: {what}")
