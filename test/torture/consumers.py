"""
consumers.py: readers, consumers outside of the server, and handlers.

Everything that is delivered goes to the ledger at once.
"""
import time

import psycopg

from actor import Actor, Retry, is_lost
from ledger import ConsumerLedger, columns

# name: outbox, types wanted, options, how it consumes, how many sessions do
CONSUMERS = {
    "e_order": ("a", None, "", "transaction", 2),
    "e_letters": ("a", (0, 2), "on_failure => 'dead_letter', max_attempts => 2, hold_key => true", "transaction", 1),
    "e_available": ("b", None, "ordering => 'available'", "transaction", 2),
    "e_lease": ("b", (1, 2, 3), "", "lease", 2),
    "e_small": ("c", None, "ordering => 'available', on_failure => 'dead_letter', max_attempts => 1", "lease", 1),
}

# name: outbox, types wanted, options, does it keep the order of a key only
HANDLERS = {
    "h_one": ("a", (1, 3), "handler => 'app.h_one', batch_size => 10, max_attempts => NULL", False),
    "h_batch": ("b", None, "handler => 'app.h_batch_one', batch_handler => 'app.h_batch', batch_size => 200, "
                           "max_attempts => NULL", False),
    "h_available": ("a", None, "batch_handler => 'app.h_available', ordering => 'available', batch_size => 50, "
                               "max_attempts => NULL", None),
    "h_letters": ("b", (0, 1), "handler => 'app.h_letters', max_attempts => 2, on_failure => 'dead_letter', "
                               "hold_key => true, batch_size => 20", True),
    "h_small": ("c", None, "batch_handler => 'app.h_small', max_attempts => NULL", False),
    "h_forward": ("b", None, "handler => 'app.h_forward', max_attempts => NULL", False),
}
BACKOFF = "backoff => '5 ms', max_backoff => '200 ms'"

# app.effect tells in which order handlers were called; some calls fail.
SETUP = """
CREATE SCHEMA app AUTHORIZATION torture_owner;
SET ROLE torture_owner;
CREATE TABLE app.counter (id integer PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE app.effect (n bigint GENERATED ALWAYS AS IDENTITY, consumer text, sequence bigint, p bigint, k bigint);
CREATE TABLE app.effect_small (LIKE app.effect INCLUDING IDENTITY) %(small)s;

CREATE FUNCTION app.noise(bytes bigint) RETURNS text LANGUAGE sql AS $$
SELECT string_agg(md5(random()::text), '') FROM generate_series(1, bytes / 32)
$$;

CREATE FUNCTION app.apply(consumer text, e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.effect (consumer, sequence, p, k)
    VALUES (consumer, e.sequence, (e.payload ->> 'p')::bigint, (e.payload ->> 'k')::bigint);
END $$;
CREATE FUNCTION app.apply(consumer text, e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.effect (consumer, sequence, p, k)
    SELECT consumer, x.sequence, (x.payload ->> 'p')::bigint, (x.payload ->> 'k')::bigint
    FROM unnest(e) WITH ORDINALITY x ORDER BY x.ordinality;
END $$;
CREATE FUNCTION app.h_one(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN PERFORM app.apply('h_one', e); END $$;
CREATE FUNCTION app.h_batch_one(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN PERFORM app.apply('h_batch', e); END $$;
CREATE FUNCTION app.h_batch(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM app.apply('h_batch', e);
    IF random() < 0.01 THEN RAISE 'torture: a batch fails'; END IF;
END $$;
CREATE FUNCTION app.h_available(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM app.apply('h_available', e);
    IF random() < 0.01 THEN RAISE 'torture: a batch fails'; END IF;
END $$;
CREATE FUNCTION app.h_letters(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM app.apply('h_letters', e);
    IF e.sequence %% 97 = 0 AND random() < 0.3 THEN RAISE 'torture: an event fails'; END IF;
END $$;
CREATE FUNCTION app.h_small(e obix.event[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.effect_small (consumer, sequence, p, k)
    SELECT 'h_small', x.sequence, (x.payload ->> 'p')::bigint, (x.payload ->> 'k')::bigint
    FROM unnest(e) WITH ORDINALITY x ORDER BY x.ordinality;
END $$;
CREATE FUNCTION app.h_forward(e obix.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM app.apply('h_forward', e);
    PERFORM obix.publish('d', jsonb_build_object('p', 0, 'k', e.sequence), type => 't0', key => e.key);
END $$;
RESET ROLE;
"""


def type_list(types):
    """Types as an argument."""
    return "" if types is None else ", types => '{%s}'" % ",".join(f"t{t}" for t in types)


def create_consumers(world, conn):
    """Create all of them, and begin their ledgers."""
    for name, (outbox, types, options, how, _) in CONSUMERS.items():
        conn.execute(f"SELECT obix.create_consumer('{name}', '{outbox}', start_after => 0{type_list(types)}, {BACKOFF}"
                     f"{', ' + options if options else ''})")
        by_key = None if "available" in options else "hold_key" in options
        world.consumers[name] = ConsumerLedger(world.ledger, name, outbox, types, by_key is False, by_key,
                                               how == "transaction")
    for name, (outbox, types, options, by_key) in HANDLERS.items():
        conn.execute(f"SELECT obix.create_consumer('{name}', '{outbox}', start_after => 0{type_list(types)}, {BACKOFF}, "
                     f"{options})")
        world.handlers[name] = (outbox, types, by_key)


def create_actors(world):
    """Those who read and consume."""
    actors = [Reader(world, f"reader {outbox}{i}", outbox) for outbox in "abcd" for i in (1, 2)]
    for name, (_, _, _, how, sessions) in CONSUMERS.items():
        kind = {"transaction": Consumer, "lease": LeaseConsumer}[how]
        actors += [kind(world, f"{name} {i}", name) for i in range(sessions)]
    return actors


class Reader(Actor):
    """Follows an outbox; now and then it reads again what it has read before."""

    def __init__(self, world, name, outbox):
        super().__init__(world, name, world.consuming)
        self.outbox = outbox
        self.after, self.after_id = 0, None
        self.top = 0

    def step(self):
        if self.chance(0.01) and self.after > 0:
            self.after = self.random.randrange(max(0, self.top - 5000), self.top)
            self.after_id = None
        timeout = self.random.choice(("50 ms", "300 ms", "1 s"))
        self.execute(f"CALL obix.wait('{self.outbox}', {self.after}, '{timeout}')")
        check = f", after_id => '{self.after_id}'" if self.after_id else ""
        size = self.random.choice((1, 10, 100, 1000))
        rows = self.rows(f"SELECT {columns('e')} FROM obix.read('{self.outbox}', {self.after}, {size}{check}) e")
        for sequence, uuid, p, k in rows:
            if sequence != self.after + 1:
                self.world.violations.add("not contiguous",
                                          f"{self.name} was given {sequence} after {self.after}")
            self.after, self.after_id = sequence, uuid
            self.ledger.deliver(self.name, self.outbox, sequence, uuid, p, k)
        self.top = max(self.top, self.after)
        self.ledger.delivered[self.outbox].top = max(self.ledger.delivered[self.outbox].top, self.top)
        self.world.count("reads", self.outbox)
        if self.chance(0.05):
            self.execute("SELECT * FROM obix.outbox_status")


class ConsumerActor(Actor):
    """A session of a consumer."""

    def __init__(self, world, name, consumer):
        super().__init__(world, name, world.consuming)
        self.consumer = consumer
        self.own = world.consumers[consumer]
        self.may_fail = "dead_letter" in CONSUMERS[consumer][2]

    def fetch(self, arguments):
        """Fetch and note what came; returns its rows."""
        sent = time.monotonic()
        count = self.random.choice((1, 20, 200, 1000))
        rows = self.rows(f"SELECT {columns('e')} FROM obix.fetch('{self.consumer}', {count}, {arguments}) e")
        self.own.fetched(self.name, rows, sent)
        self.world.count("deliveries", self.consumer)
        return rows

    def wait(self):
        """Until there may be something."""
        self.execute(f"CALL obix.wait_for('{self.consumer}', '{self.random.choice((50, 200, 1000))} ms')")

    def split(self, rows):
        """How many of them to acknowledge, and whether the next one fails."""
        done = len(rows) if self.chance(0.7) else self.random.randint(0, len(rows))
        return done, self.may_fail and done < len(rows) and self.chance(0.5)


class Consumer(ConsumerActor):
    """Fetches, has an effect, and acknowledges, in one transaction."""

    # what was fetched may have been put behind by a dead letter that came back
    also = (("55000", "fetch again"),)

    def step(self):
        committing = False
        acked = []
        try:
            self.execute("BEGIN")
            rows = self.fetch("wait => " + self.random.choice(("true", "false")))
            done, fails = self.split(rows)
            acked = [row[0] for row in rows[:done]]
            if acked:
                self.execute("INSERT INTO app.effect (consumer, sequence, p, k) VALUES " + ", ".join(
                    f"('{self.consumer}', {sequence}, {p}, {k})" for sequence, _, p, k in rows[:done]))
                self.execute(f"SELECT obix.ack('{self.consumer}', {acked[-1]})")
            if fails:
                self.execute(f"SELECT obix.fail('{self.consumer}', {rows[done][0]}, 'torture')")
            if self.chance(0.05):
                self.pause(0.3)
            if self.chance(0.05):
                self.execute("ROLLBACK")
                return
            committing = True
            self.execute("COMMIT")
        except psycopg.Error as error:
            self.world.error(self.name, error, self.also)
            self.world.count("acknowledgements", self.consumer,
                             "unknown" if committing and is_lost(self.conn, error) else "failed")
            self.recover(error)
            return
        if acked:
            self.own.acknowledged(acked)
            self.world.count("acknowledgements", self.consumer, "committed")
        if not rows:
            self.wait()


class LeaseConsumer(ConsumerActor):
    """Fetches and acknowledges in transactions of their own, under a lease."""

    also = (("55000", "does not hold consumer|fetch again"), ("55006", "lease|another"))

    def step(self):
        try:
            lease = self.random.choice(("100 ms", "1 s"))
            token = self.value(f"SELECT obix.acquire('{self.consumer}', '{lease}')")
            if token is None:
                self.pause(0.1)
                return
            for _ in range(self.random.randint(1, 5)):
                rows = self.fetch(f"token => {token}")
                if not rows:
                    self.wait()
                    continue
                self.pause(0.02 if self.chance(0.9) else 0.2)
                if self.chance(0.2):
                    self.execute(f"SELECT obix.renew('{self.consumer}', {token}, '{lease}')")
                done, fails = self.split(rows)
                if done:
                    acked = [row[0] for row in rows[:done]]
                    self.execute(f"SELECT obix.ack('{self.consumer}', {acked[-1]}, {token})")
                    self.own.acknowledged(acked)
                    self.world.count("acknowledgements", self.consumer, "committed")
                if fails:
                    self.execute(f"SELECT obix.fail('{self.consumer}', {rows[done][0]}, 'torture', {token})")
            if self.chance(0.8):
                self.execute(f"SELECT obix.release('{self.consumer}', {token})")
        except psycopg.Error as error:
            self.world.error(self.name, error, self.also)
            if is_lost(self.conn, error):
                raise Retry from error
