"""
publishing.py: throughput of publishers, one event in a transaction.
"""
import time

from harness import PUBLISH, plural

COUNT = {       # how many events each side has, for a check that it did the work
    "obix": "SELECT count(*) FROM o",
    "insert": "SELECT count(*) FROM o",
    "bare": "SELECT count(*) FROM bare",
    "notify": "SELECT count(*) FROM notify",
    "PgQ": "SELECT count(*) FROM pgq.event_template",
    "pgmq": "SELECT count(*) FROM pgmq",
}
ASYNC = "-c synchronous_commit=off -c obix.force_sync_commit=off"


def publish_by(bench, sides, clients, seconds=2, rounds=None, cpu=None, **options):
    """
    Have the sides publish in turn; returns events a second of each, all checked.
    Into cpu goes for each the CPU time of its sessions for an event.
    """
    done = dict.fromkeys(map(COUNT.get, sides), 0)
    before = {count: bench.sql(count) for count in done}

    def side(name):
        def run():
            rate, transactions = bench.pgbench(PUBLISH[name], clients, seconds, **options)
            done[COUNT[name]] += transactions
            if cpu is not None:
                cpu.setdefault(name, []).append(max(bench.cpu, 0.01) / transactions * 1e6)
            return rate
        return run

    figures = bench.compare({name: side(name) for name in sides}, rounds)
    for count, transactions in done.items():
        if bench.sql(count) - before[count] != transactions:
            raise RuntimeError(f"{count}: {bench.sql(count) - before[count]} instead of {transactions}")
    return figures


def publish(bench):
    """1, 3: one event in a transaction, by obix.publish and by INSERT, and the peers"""
    bench.sql("SELECT obix.create_outbox('o')")
    sides = ["bare", "obix", "insert", "notify", "PgQ", "pgmq"]
    if not bench.has_pgq():
        bench.say("PgQ is not installed")
        sides.remove("PgQ")
    for clients in (1, 8, 16):
        figures = publish_by(bench, sides, clients)
        for name in sides[1:]:
            row, target = {"obix": ("1", ">= 0.95"), "insert": ("3", ">= 0.85")}.get(name, ("", ""))
            bench.ratio(row, f"publish, {plural(clients, 'client')}: {name} / bare", figures[name], figures["bare"], target,
                        "{} / {} a second", f"publish {name} {clients}")


def publish_async(bench):
    """2: the same without waiting for the disk: what it costs in CPU"""
    bench.sql("SELECT obix.create_outbox('o')")
    for clients in (1, 8, 16):
        cpu = {}
        figures = publish_by(bench, ["bare", "obix", "insert"], clients, cpu=cpu, pgoptions=ASYNC)
        for name in ("obix", "insert"):
            bench.ratio("2" if name == "obix" else "",
                        f"publish, asynchronous, {plural(clients, 'client')}: {name} / bare", figures[name], figures["bare"],
                        ">= 0.95" if name == "obix" else "", "{} / {} a second")
            bench.ratio("", f"CPU of the sessions for an event: {name} / bare", cpu[name], cpu["bare"], "", "{} / {} us")


def follow(bench, table, publish_stop, *arguments):
    """Publish while a client follows; returns the rate, after that client got the last event."""
    def run():
        client = bench.start_client("pages", "-x", "-a", bench.sql(f"SELECT coalesce(max(sequence), 0) FROM {table}"),
                                    *arguments)
        name = "obix" if table == "o" else table
        rate, _ = bench.pgbench(PUBLISH[name], 16, 2)
        bench.sql(publish_stop)
        bench.end_client(client)
        return rate
    return run


def notify(bench):
    """4: publishers at 16 clients, while somebody is woken and reads what is new"""
    bench.sql("SELECT obix.create_outbox('o')")
    stop = "SELECT obix.publish('o', '{}', 'stop')"
    read = "SELECT * FROM obix.read('o', $1, 100000)"
    bench.configure(obix__notify="on")
    time.sleep(0.2)
    try:
        figures = bench.compare({
            "notify": follow(bench, "notify", "INSERT INTO notify (type, payload) VALUES ('stop', '{}')",
                             "-l", "events", "SELECT * FROM notify WHERE sequence > $1 ORDER BY sequence"),
            "listen": follow(bench, "o", stop, "-l", "obix", read),
            "wait": follow(bench, "o", stop, "CALL obix.wait('o', $1)", read),
        })
    finally:
        bench.configure(obix__notify=None)
    bench.ratio("4", "publish, 16 clients, one who LISTENs: obix (obix.notify) / notify", figures["listen"],
                figures["notify"], ">= 4", "{} / {} a second", "listen")
    bench.ratio("", "publish, 16 clients, one in obix.wait / one who LISTENs to notify", figures["wait"],
                figures["notify"], "", "{} / {} a second")


def waiters(bench):
    """5: publishers at 8 clients, with 100 sessions in obix.wait and with none"""
    sessions = bench.many(100, 10)
    bench.sql("SELECT obix.create_outbox('o')")
    bench.sql("SELECT obix.publish('o', '{}')")
    newest = "SELECT * FROM obix.read('o', obix.high_water_mark('o') - 1, 1)"
    page = "SELECT * FROM obix.read('o', $1, 1000)"

    def beside(*statements):
        def run():
            clients = bench.start_client("pages", "-x", "-t", sessions, "-a", bench.sql("SELECT obix.high_water_mark('o')"),
                                         "CALL obix.wait('o', $1)", *statements)
            bench.until("SELECT count(*) >= %s FROM pg_stat_activity WHERE query LIKE 'CALL obix.wait(%%' "
                        "AND wait_event_type = 'Extension'", sessions)
            rate, _ = bench.pgbench(PUBLISH["obix"], 8, 2)
            bench.sql("SELECT obix.publish('o', '{}', 'stop')")
            bench.end_client(clients)
            return rate
        return run

    figures = bench.compare({"none": lambda: bench.pgbench(PUBLISH["obix"], 8, 2)[0],
                             "newest": beside(newest), "all": beside(page)})
    bench.ratio("5", f"publish, 8 clients, {sessions} waiting, woken for the newest event / none", figures["newest"],
                figures["none"], ">= 0.8", "{} / {} a second")
    bench.ratio("", f"publish, 8 clients, {sessions} waiting who read every event / none", figures["all"],
                figures["none"], "", "{} / {} a second")


BENCHMARKS = {"publish": publish, "publish-async": publish_async, "notify": notify, "waiters": waiters}
