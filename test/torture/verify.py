"""
verify.py: compares the ledger with what the server has.

A quick check can be made at any time, for it asks only what must hold at any
time: what was acknowledged, or delivered, before the check began is there; of
each transaction there is all or nothing.  A full check is for the end.
"""
import array
import collections

from ledger import (ABORTED, COMMITTED, FOREVER, KEYS, OPEN, PLACEHOLDER, PREPARED, STATUS, TYPES, UNKNOWN, columns, parse,
                    token)


def lines(conn, query):
    """The rows of a query, as lists of strings, NULL being None."""
    rest = b""
    with conn.cursor() as cursor, cursor.copy(f"COPY ({query}) TO STDOUT") as copy:
        for block in copy:
            parts = (rest + bytes(block)).split(b"\n")
            rest = parts.pop()
            for line in parts:
                yield [None if field == "\\N" else field for field in line.decode().split("\t")]


class Verifier:
    """Goes through the outboxes, again and again."""

    def __init__(self, world):
        self.world = world
        self.ledger = world.ledger
        self.base = dict.fromkeys(self.ledger.outboxes, 0)  # checked, and without a hole
        self.seen = array.array("l")                        # events of each part up to there
        self.tokens = {}                # of the full check: what the table has, by sequence
        self.passes = 0

    def fault(self, kind, text):
        self.world.violations.add(kind, text)

    def rows(self, conn, outbox, base):
        """What the table has above a sequence."""
        for sequence, uuid, p, k in lines(
                conn, f"SELECT {columns('o')} FROM {outbox} o WHERE sequence > {base} ORDER BY sequence"):
            yield int(sequence), parse(uuid), None if p is None else int(p), None if k is None else int(k)

    # ---------------------------------------------------------- quick check

    def quick(self, conn):
        """Check what is new.  The connection runs no transaction."""
        ledger = self.ledger
        with ledger.lock:
            committed = [number for number in ledger.pending if ledger.tx_status[number] == COMMITTED]
            delivered = {outbox: ledger.delivered[outbox].tokens[self.base[outbox] + 1:] for outbox in ledger.outboxes}
        above = collections.Counter()   # events of each part above a hole
        with conn.transaction():
            # rows that recovery moves out of DEFAULT are not seen by older snapshots
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            conn.execute(f"LOCK TABLE ONLY {', ONLY '.join(ledger.outboxes)} IN ACCESS SHARE MODE")
            rows = {outbox: list(self.rows(conn, outbox, self.base[outbox])) for outbox in ledger.outboxes}
        for outbox in ledger.outboxes:
            self.quick_outbox(outbox, rows[outbox], delivered[outbox], above)

        with ledger.lock:
            pending = dict(ledger.pending)
        committed = set(committed)
        for number, tx in pending.items():
            status = ledger.tx_status[number]
            live = [part for part in tx.parts if not ledger.part_gone[part]]
            settled = sum(self.seen_of(part) for part in live)
            there = settled + sum(above[part] for part in live)
            if there != ledger.tx_events[number] and (number in committed or there > 0):
                self.fault("acknowledged transaction lost" if there == 0 else "part of a transaction",
                           f"transaction {number} ({ledger.tx_kinds[number]}, {STATUS[status]}): "
                           f"{there} of {ledger.tx_events[number]} events are there, parts {live}")
            if status == ABORTED or (settled == ledger.tx_events[number] and status in (COMMITTED, UNKNOWN)):
                with ledger.lock:
                    del ledger.pending[number]
        self.passes += 1

    def seen_of(self, part):
        """Events of a part that quick checks have seen for good."""
        return self.seen[part] if part < len(self.seen) else 0

    def quick_outbox(self, outbox, rows, delivered, above):
        """One outbox of a quick check."""
        base = begin = self.base[outbox]
        where = {}
        for sequence, _, p, k in rows:
            value = PLACEHOLDER if p is None else token(p, k)
            where[sequence] = value
            if p is not None and p > 0:
                self.ledger.judge("check", outbox, sequence, p, k)
                known = self.seen_of(p) + above[p]
                if k != known:
                    self.fault("event twice or out of order",
                               f"{outbox} {sequence} has {self.ledger.describe(value)} after {known} of them")
            if sequence == base + 1:
                base = sequence
                if p:
                    self.seen.extend([0] * (p + 1 - len(self.seen)))
                    self.seen[p] += 1
            elif p:
                above[p] += 1
        for sequence, value in enumerate(delivered, begin + 1):
            if value not in (0, where.get(sequence)):
                self.fault("delivered and then missing",
                           f"{outbox} {sequence} was {self.ledger.describe(value)}, now it has "
                           f"{self.ledger.describe(where.get(sequence, 0))}")
        self.base[outbox] = base

    # ----------------------------------------------------------- full check

    def full(self, conn):
        """Check everything, when all has settled."""
        ledger = self.ledger
        seen = array.array("l", bytes(8 * len(ledger.part_tx)))
        for outbox in ledger.outboxes:
            self.full_outbox(conn, outbox, seen)
        total = collections.Counter()
        for part in range(1, len(ledger.part_tx)):
            tx = ledger.part_tx[part]
            total[tx] += seen[part]
            if ledger.tx_status[tx] == COMMITTED and not ledger.part_gone[part] and \
               seen[part] != ledger.part_count[part]:
                self.fault("acknowledged event lost", f"{seen[part]} of part {part}: {ledger.describe(token(part, 0))}")
        resolved = collections.Counter()
        for tx in range(1, len(ledger.tx_status)):
            status = ledger.tx_status[tx]
            if status in (OPEN, PREPARED):
                self.fault("harness", f"transaction {tx} is {STATUS[status]}")
            if status == UNKNOWN:
                resolved["committed" if total[tx] else "aborted"] += 1
                if total[tx] not in (0, ledger.tx_events[tx]):
                    self.fault("part of a transaction", f"{total[tx]} of {ledger.tx_events[tx]} events of {tx}")
        for how, count in resolved.items():
            self.world.counts["unknown transactions", how] = count
        self.counters(total)
        self.consumers()
        self.effects(conn)
        self.forwarded()

    def full_outbox(self, conn, outbox, seen):
        """All rows of one outbox, and what obix.read makes of them."""
        ledger = self.ledger
        table = array.array("q", [0])
        published = {}                  # transaction: the sequence of its last published event
        for sequence, number, p, k in self.rows(conn, outbox, 0):
            if sequence != len(table):
                self.fault("hole", f"{outbox} has {sequence} after {len(table) - 1}")
                table.extend([0] * (sequence - len(table)))
            value = PLACEHOLDER if p is None else token(p, k)
            table.append(value)
            self.world.counts["events" if p is not None else "placeholders", outbox] += 1
            if not p:
                continue
            ledger.judge("check", outbox, sequence, p, k)
            if p >= len(seen):
                continue
            if k != seen[p]:
                self.fault("event twice or out of order",
                           f"{outbox} {sequence} has {ledger.describe(value)} after {seen[p]} of them")
            seen[p] += 1
            if k == 0 and ledger.part_id[p] not in (0, number):
                self.fault("wrong id", f"{outbox} {sequence}")
            if ledger.part_published[p]:
                last = published.get(ledger.part_tx[p])
                if last is not None and last != sequence - 1:
                    self.fault("transaction not contiguous",
                               f"{outbox} {sequence} comes after {last}: {ledger.describe(value)}")
                published[ledger.part_tx[p]] = sequence
        self.tokens[outbox] = table

        delivered = ledger.delivered[outbox].tokens
        for sequence, value in enumerate(delivered):
            if value != 0 and (sequence >= len(table) or table[sequence] != value):
                there = table[sequence] if sequence < len(table) else 0
                self.fault("delivered and then missing",
                           f"{outbox} {sequence} was {ledger.describe(value)}, now it has {ledger.describe(there)}")
        if ledger.delivered[outbox].top != len(table) - 1:
            self.fault("not delivered",
                       f"readers of {outbox} got to {ledger.delivered[outbox].top} of {len(table) - 1}")
        self.causality(outbox, table)
        self.read(conn, outbox, table)

    def causality(self, outbox, table):
        """What was sent after an acknowledgement has the higher sequence."""
        ledger = self.ledger
        earliest, which = FOREVER, 0    # acknowledgement of what lies above
        for sequence in range(len(table) - 1, 0, -1):
            p = table[sequence] >> 24
            if table[sequence] <= 0 or not 0 < p < len(ledger.part_tx):
                continue
            if ledger.part_sent[p] > earliest:
                self.fault("causality", f"{outbox} {sequence} ({ledger.describe(table[sequence])}) was sent after "
                                        f"{which} ({ledger.describe(table[which])}) was acknowledged")
            acked = ledger.tx_acked[ledger.part_tx[p]]
            if acked < earliest:
                earliest, which = acked, sequence

    def read(self, conn, outbox, table):
        """A walk by obix.read gives what the table has."""
        after = 0
        while True:
            last = after
            for sequence, _, p, k in lines(
                    conn, f"SELECT {columns('e')} FROM obix.read('{outbox}', {after}, 10000) e"):
                after += 1
                value = PLACEHOLDER if p is None else token(int(p), int(k))
                if int(sequence) != after or after >= len(table) or table[after] != value:
                    self.fault("read", f"obix.read of {outbox} returned {sequence} at {after}")
                    return
            if last == after:
                break
        if after != len(table) - 1:
            self.fault("read", f"obix.read of {outbox} ends at {after}, the table at {len(table) - 1}")

    def counters(self, total):
        """Who changed a row later has the higher sequences."""
        ledger = self.ledger
        first = collections.defaultdict(dict)
        for outbox, table in self.tokens.items():
            for sequence, value in enumerate(table):
                if value > 0 and value & 0xffffff == 0:
                    first[outbox][value >> 24] = sequence
        for (outbox, counter), changes in ledger.counters.items():
            there = sorted((value, part) for value, part in changes if total[ledger.part_tx[part]] > 0)
            for (value, part), (_, later) in zip(there, there[1:]):
                if first[outbox].get(part, 0) > first[outbox].get(later, 0):
                    self.fault("order of effects", f"counter {counter}, value {value}: {outbox} "
                                                   f"{first[outbox].get(part)}, the next {first[outbox].get(later)}")

    # ------------------------------------------------------------ consumers

    def consumers(self):
        """Each consumer outside of the server was given everything, and nothing else."""
        for name, own in self.world.consumers.items():
            table = self.tokens[own.outbox]
            for sequence in range(1, max(len(table), len(own.given))):
                wanted = sequence < len(table) and own.wants(table[sequence])
                given = sequence < len(own.given) and own.given[sequence]
                if wanted and not given and sequence not in own.discarded:
                    self.fault("consumer", f"{name} was not given {sequence}")
                elif given and not wanted:
                    self.fault("consumer", f"{name} was given {sequence}, which is not there")

    def effects(self, conn):
        """Each event had its effect once, and in order."""
        found = {name: {} for name in [*self.world.handlers, *self.world.consumers]}
        last = {}
        for table in ("app.effect", "app.effect_small"):
            for consumer, sequence, p, k in lines(
                    conn, f"SELECT consumer, sequence, p, k FROM {table} ORDER BY n"):
                sequence, value = int(sequence), token(int(p), int(k))
                self.world.counts["effects", consumer] += 1
                if sequence in found[consumer]:
                    self.fault("effect twice", f"{consumer} {sequence}")
                found[consumer][sequence] = value
                by_key = self.by_key(consumer)
                if by_key is not None:
                    key = (consumer, ((value >> 24) + (value & 0xffffff)) % KEYS if by_key else None)
                    if sequence < last.get(key, 0):
                        self.fault("effect out of order", f"{consumer} {sequence} after {last[key]}")
                    last[key] = sequence
        for consumer, effects in found.items():
            own = self.world.consumers.get(consumer)
            if own and not own.has_effects:
                continue
            outbox, types = (own.outbox, own.types) if own else self.world.handlers[consumer][:2]
            table = self.tokens[outbox]
            for sequence in range(1, len(table)):
                value = table[sequence]
                wanted = value > 0 and (types is None or ((value >> 24) + (value & 0xffffff)) % TYPES in types)
                if wanted and sequence not in effects:
                    self.fault("effect missing", f"{consumer} {sequence}")
                elif sequence in effects and (not wanted or effects[sequence] != value):
                    self.fault("effect of nothing", f"{consumer} {sequence}")
            for sequence in effects:
                if sequence >= len(table):
                    self.fault("effect of nothing", f"{consumer} {sequence}")

    def by_key(self, consumer):
        """Is the order kept within keys only; None: not at all."""
        own = self.world.consumers.get(consumer)
        if own:
            return own.by_key
        return self.world.handlers[consumer][2]

    def forwarded(self):
        """The outbox d has an event for each of b, in the same order."""
        source = [sequence for sequence, value in enumerate(self.tokens["b"]) if value > 0]
        copies = [value for value in self.tokens["d"] if value > 0]
        if source != copies:
            wrong = next((pair for pair in zip(source, copies) if pair[0] != pair[1]), ("the end", "the end"))
            self.fault("forwarded", f"{len(copies)} events in d, {len(source)} in b; they differ at {wrong}")
