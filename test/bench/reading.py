"""
reading.py: many events at once: published, drained, delivered; and pages, far
ahead and among many partitions.
"""
import time

from harness import PAYLOAD, Peak, plural

EVENTS = 596371         # what the requirements name


def timed(bench, statement):
    """How long a statement takes, to its commit."""
    began = time.monotonic()
    bench.sql(statement)
    return time.monotonic() - began


def bulk(bench):
    """6: one transaction of 596,371 events, time to commit and memory"""
    count = bench.many(EVENTS, 2000)
    memory = []
    bench.make_source(count)
    bench.sql("SELECT obix.create_outbox('o')")
    file = bench.server.folder / "events.copy"
    bench.sql(f"COPY source TO '{file}'")

    def publish():
        bench.sql("TRUNCATE o")
        with bench.server.connect(bench.database) as conn, Peak(conn.info.backend_pid) as peak:
            began = time.monotonic()
            conn.execute("SELECT count(obix.publish('o', payload, type, key)) FROM source")
            spent = time.monotonic() - began
        memory.append((peak.bytes - peak.begin) / 2**20)
        if bench.sql("SELECT count(*) FROM o") != count:
            raise RuntimeError("events are missing")
        return spent

    def into(table, statement):
        def run():
            if table:
                bench.sql(f"TRUNCATE {table}")
            return timed(bench, statement)
        return run

    figures = bench.compare({
        "bare": into("bare", "INSERT INTO bare (type, key, payload) SELECT * FROM source"),
        "obix": publish,
        "copy": into("bare", f"COPY bare (type, key, payload) FROM '{file}'")})
    peers = {
        "notify": into("notify", "INSERT INTO notify (type, key, payload) SELECT * FROM source"),
        "pgmq": into("pgmq", "INSERT INTO pgmq (vt, type, key, message) SELECT now(), * FROM source")}
    if bench.has_pgq():
        peers["PgQ"] = into(None, "SELECT count(pgq.insert_event('q', type, payload::text, key, NULL, NULL, NULL)) FROM source")
    else:
        bench.say("PgQ is not installed")
    # the peers are slow: twice
    figures |= bench.compare(peers, rounds=min(bench.rounds, 2))
    bench.ratio("6", f"{count:,} events in one transaction: obix / bare", figures["obix"],
                figures["bare"], "<= 1.0", "{} / {} s", "bulk obix")
    bench.line("6", "memory of the backend meanwhile, beyond what it had", memory, "MB", "< 36", "work_mem is 4 MB")
    for name in ("copy", *peers):
        label = "COPY into bare" if name == "copy" else name
        bench.ratio("", f"{count:,} events in one transaction: {label} / bare", figures[name],
                    figures["bare"], "", "{} / {} s", f"bulk {name}")


def drain(bench):
    """7: reading all of these in pages of 1,000, by read and by fetch and ack"""
    count = bench.many(EVENTS, 2000)
    bench.make_source(count)
    bench.sql("SELECT obix.create_outbox('o')")
    rounds = min(bench.rounds, 2)           # of those that are slow
    has_pgq = bench.has_pgq()
    if has_pgq:
        for n in range(bench.rounds):
            bench.sql("SELECT pgq.register_consumer('q', %s)", f"c{n}")
        bench.sql("SELECT count(pgq.insert_event('q', type, payload::text, key, NULL, NULL, NULL)) FROM source")
        bench.until("SELECT pgq.ticker() IS NOT NULL AND pgq.next_batch('q', 'c0') IS NOT NULL")
    else:
        bench.say("PgQ is not installed")
    bench.sql("INSERT INTO bare (type, key, payload) SELECT * FROM source")
    bench.sql("SELECT count(obix.publish('o', payload, type, key)) FROM source")
    bench.conn.execute("VACUUM")
    turn = iter(range(1000))

    def fetch():
        name = f"c{next(turn)}"
        bench.sql("SELECT obix.create_consumer(%s, 'o')", name)
        return bench.run_client("pages", "-s", 2, "-e", "ROLLBACK", f"SELECT obix.ack('{name}', $1)", "COMMIT",
                                "BEGIN", f"SELECT * FROM obix.fetch('{name}', 1000)", rows=count)[0]

    pgq_turn = iter(range(1000))

    def pgq():
        batch = bench.sql("SELECT pgq.next_batch('q', %s)", f"c{next(pgq_turn)}")
        return bench.run_client("pages", "-b", "BEGIN", "-b", f"SELECT * FROM pgq.get_batch_cursor({batch}, 'page', 0)",
                                "-e", f"SELECT pgq.finish_batch({batch})", "-e", "COMMIT",
                                "FETCH 1000 FROM page", rows=count)[0]

    def pgmq():
        bench.sql("TRUNCATE pgmq")
        bench.sql("INSERT INTO pgmq (vt, type, key, message) SELECT now(), * FROM source")
        bench.conn.execute("VACUUM ANALYZE pgmq")
        return bench.run_client(
            "pages", "-s", 1, "DELETE FROM pgmq WHERE msg_id = ANY ($2::bigint[]) AND $1::bigint IS NOT NULL RETURNING msg_id",
            "WITH page AS (SELECT msg_id FROM pgmq WHERE vt <= clock_timestamp() ORDER BY msg_id LIMIT 1000 FOR UPDATE SKIP LOCKED) "
            "UPDATE pgmq m SET vt = clock_timestamp() + '30 s', read_ct = read_ct + 1 FROM page WHERE m.msg_id = page.msg_id "
            "RETURNING m.msg_id, m.id, m.type, m.key, m.message, m.headers, m.enqueued_at", rows=count)[0]

    figures = bench.compare({
        "copy": lambda: bench.run_client("copy", "COPY bare TO STDOUT", rows=count)[0],
        "read": lambda: bench.run_client("pages", "SELECT * FROM obix.read('o', $1, 1000)", rows=count)[0],
        "fetch": fetch,
        **({"PgQ": pgq} if has_pgq else {}),
        "keyset": lambda: bench.run_client(
            "pages", "SELECT * FROM bare WHERE sequence > $1 ORDER BY sequence LIMIT 1000", rows=count)[0]})
    figures |= bench.compare({"pgmq": pgmq}, rounds)
    what = f"drain of {count:,} events: "
    bench.ratio("7", what + "obix.read / COPY out", figures["read"], figures["copy"], "<= 1.1", "{} / {} s", "drain read")
    bench.ratio("7", what + "fetch and ack / COPY out", figures["fetch"], figures["copy"], "<= 1.5", "{} / {} s",
                "drain fetch")
    bench.ratio("7", what + "pgmq read and delete / obix.read", figures["pgmq"], figures["read"], ">= 4", "{} / {} s")
    if has_pgq:
        bench.ratio("7", what + "obix.read / PgQ by cursor", figures["read"], figures["PgQ"], "<= 1.0", "{} / {} s")
        bench.ratio("", what + "PgQ by cursor / COPY out", figures["PgQ"], figures["copy"], "", "{} / {} s", "drain PgQ")
    else:
        bench.cannot("7", what + "obix.read / PgQ by cursor", "PgQ is not installed")
    bench.ratio("", what + "pgmq read and delete / COPY out", figures["pgmq"], figures["copy"], "", "{} / {} s", "drain pgmq")
    bench.ratio("", what + "keyset pages of bare / COPY out", figures["keyset"], figures["copy"], "", "{} / {} s",
                "drain keyset")


def delivery(bench):
    """8: from the commit of these to the last of them in the hands of a reader that waited"""
    count = bench.many(EVENTS, 2000)
    bench.make_source(count)
    bench.sql("SELECT obix.create_outbox('o')")
    start = [0]

    def deliver():
        start[0] = bench.sql("SELECT obix.high_water_mark('o')")
        client = bench.start_client("pages", "-n", count, "-a", start[0], "CALL obix.wait('o', $1, '10 min')",
                                    "SELECT * FROM obix.read('o', $1, 1000)")
        bench.sql("SELECT count(obix.publish('o', payload, type, key)) FROM source")
        committed = time.monotonic()
        return bench.end_client(client, rows=count)[1] - committed

    def alone():
        return bench.run_client("pages", "-n", count, "-a", start[0], "SELECT * FROM obix.read('o', $1, 1000)",
                                rows=count)[0]

    figures = bench.compare({"deliver": deliver, "alone": alone})
    bench.ratio("8", f"commit of {count:,} events to the last one delivered / drain alone", figures["deliver"],
                figures["alone"], "<= 1.2", "{} / {} s")


# ------------------------------------------------- pages in large outboxes

def fill(bench, outbox, first, last):
    """Put events into an outbox with these sequences, as a restore does; read after a restart."""
    bench.sql("SET obix.enabled = off")
    bench.sql(f"INSERT INTO {outbox} (sequence, type, key, payload) "
              "SELECT g, 'paid', 'account-' || g %% 1000, %s FROM generate_series(%s::bigint, %s) g", PAYLOAD, first, last)
    bench.sql("SET obix.enabled = on")


def make_partitions(bench, outbox, width, count):
    """
    An outbox with so many partitions, made in small transactions and without
    DEFAULT: each has PostgreSQL look at all that are there already.
    """
    bench.sql(f"SELECT obix.create_outbox('{outbox}', {width}, 0)")
    bench.sql(f"ALTER TABLE {outbox} DETACH PARTITION {outbox}_default")
    bench.sql("SET synchronous_commit = off")
    bench.sql(f"""DO $$ BEGIN
        FOR i IN 1 .. {count - 1} LOOP
            EXECUTE format('CREATE TABLE {outbox}_p%s PARTITION OF {outbox} FOR VALUES FROM (%s) TO (%s)',
                           i * {width}, i * {width}, (i + 1) * {width});
            IF i % 100 = 0 THEN COMMIT; END IF;
        END LOOP;
    END $$""")
    bench.sql("RESET synchronous_commit")
    bench.sql(f"ALTER TABLE {outbox} ATTACH PARTITION {outbox}_default DEFAULT")


def page_rate(bench, outbox, after, clients, *options, warm=True):
    """How many pages of 1,000 events a second are read."""
    def run():
        return bench.pgbench(f"SELECT * FROM obix.read('{outbox}', {after}, 1000);", clients, 2, *options, warm=warm)[0]
    return run


def partitions(bench):
    """11, 12: pages, and publishing, with 10,000 partitions and with one"""
    count = bench.many(10000, 20)
    width = 2000
    last = count * width - 1
    bench.sql(f"SELECT obix.create_outbox('one', {100 * count * width}, 0)")
    began = time.monotonic()
    make_partitions(bench, "many", width, count)
    bench.say(f"{count:,} partitions were made in {time.monotonic() - began:.0f} s; events are in the first and in the "
              "last 20,000 sequences")
    for outbox in ("one", "many"):
        fill(bench, outbox, 1, min(20000, last))
        fill(bench, outbox, max(last - 20000, 1 + min(20000, last)), last)
        # what lies between was there and has been removed
        bench.sql(f"UPDATE obix.outbox SET resolved = {last} WHERE outbox = '{outbox}'::regclass")
    bench.restart()
    # publishing goes on in a partition as wide as they are by default
    bench.sql("SELECT obix.alter_outbox('many', 2000000, 2)")
    bench.sql("SELECT obix.ensure_partitions('many')")
    for where, after in (("from the start", 0), ("at the tail", last - 1000)):
        for clients in (1, 8):
            figures = bench.compare({name: page_rate(bench, name, after, clients) for name in ("one", "many")})
            bench.ratio("11", f"page of 1,000 {where}, {plural(clients, 'reader')}: {count:,} partitions / one",
                        [1e3 * clients / rate for rate in figures["many"]],
                        [1e3 * clients / rate for rate in figures["one"]], "<= 1.1", "{} / {} ms")
    figures = bench.compare({name: page_rate(bench, name, last - 1000, 1, "-C", warm=False) for name in ("one", "many")},
                            rounds=min(bench.rounds, 3))
    bench.ratio("", f"first page of a new connection: {count:,} partitions / one",
                [1e3 / rate for rate in figures["many"]], [1e3 / rate for rate in figures["one"]], "",
                "{} / {} ms")

    def publish(outbox):
        return lambda: bench.pgbench(f"SELECT obix.publish('{outbox}', :payload, 'paid', 'account-' || :n);", clients, 3,
                                     warm=True)[0]

    for clients in (1, 8):
        figures = bench.compare({name: publish(name) for name in ("one", "many")})
        bench.ratio("12", f"publish, {plural(clients, 'client')}: {count:,} partitions / one", figures["many"], figures["one"],
                    ">= 0.95", "{} / {} a second")


def position(bench):
    """13: a page at event 10 and at event 100 million"""
    count = bench.many(200000, 2000)
    deep = 100000000
    bench.sql("SELECT obix.create_outbox('o', premake => 51)")
    fill(bench, "o", 1, count)
    fill(bench, "o", deep, deep + count)
    bench.sql(f"UPDATE obix.outbox SET resolved = {deep + count}")
    bench.restart()
    figures = bench.compare({"low": page_rate(bench, "o", 9, 1), "high": page_rate(bench, "o", deep + 9, 1)})
    bench.ratio("13", "page of 1,000 at event 100 million / at event 10", [1e3 / rate for rate in figures["high"]],
                [1e3 / rate for rate in figures["low"]], "<= 1.1", "{} / {} ms")
    bench.say(f"what lies between is missing but for {count:,} events at each, as if it had been removed")


BENCHMARKS = {"bulk": bulk, "drain": drain, "delivery": delivery, "partitions": partitions, "position": position}
