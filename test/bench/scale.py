"""
scale.py: how throughput grows with the number of publishers, and why.

The model is a closed network: clients, processors, and a disk that serves all
who wait for it at once.  It is solved by exact mean value analysis, with a
station of several servers taken for a fast one and a delay (Seidmann).
"""
import os
import statistics

from harness import PUBLISH, cpu_seconds, plural
from publishing import publish_by


def predict(clients, cores, cpu, flush):
    """Transactions a second, of which each takes so much CPU time and a flush."""
    demand = cpu / cores
    queue = rate = 0.0
    for n in range(1, clients + 1):
        # Who commits while a flush is under way waits for its end: half of it while
        # flushes are rare, all of it when one follows upon the other.
        busy = min(1.0, rate * flush)
        delay = flush * (1 + busy * (1 + busy) / 2) + cpu * (cores - 1) / cores
        response = demand * (1 + queue)
        rate = n / (delay + response)
        queue = rate * response
    return rate


def fit(cores, one, many_clients, many):
    """CPU and flush time of a transaction, from the rates of one client and of many."""
    cpu = cores / many
    flush = 0.0
    for _ in range(100):
        flush = max(1 / one - cpu, 0.0)
        cpu *= predict(many_clients, cores, cpu, flush) / many
    return cpu, flush


def scale(bench):
    """the curve of 1 to 64 clients, what the model predicts, and what the outbox's lock allows"""
    cores = os.cpu_count()
    counts = [1, 2, 4] if bench.quick else [1, 2, 4, 8, 16, 32, 64]
    measured = {}
    bench.sql("SELECT obix.create_outbox('o')")
    for clients in counts:
        figures = publish_by(bench, ["bare", "obix"], clients, rounds=min(bench.rounds, 3))
        for name in figures:
            measured[name, clients] = statistics.median(figures[name])
        bench.ratio("", f"publish, {plural(clients, 'client')}: obix / bare", figures["obix"], figures["bare"], "",
                    "{} / {} a second", f"scale {clients}")
    for name in ("bare", "obix"):
        cpu, flush = fit(cores, measured[name, counts[0]], counts[-1], measured[name, counts[-1]])
        bench.say(f"model of {name}: {cpu * 1e6:.0f} us of CPU for a transaction, client included, and "
                  f"{flush * 1e6:.0f} us for a flush, on {cores} cores")
        for clients in counts:
            rate = predict(clients, cores, cpu, flush)
            bench.line("", f"model of {name}, {plural(clients, 'client')}: predicted / measured",
                       [rate / measured[name, clients]], "", "",
                       f"{rate:,.0f} / {measured[name, clients]:,.0f} a second", f"model {name} {clients}")
    wal(bench)
    lock(bench)


def wal(bench):
    """What a transaction with one event writes to the WAL."""
    def side(name):
        def run():
            before = bench.sql("SELECT pg_current_wal_insert_lsn()")
            _, transactions = bench.pgbench(PUBLISH[name], 8, 1)
            return float(bench.sql("SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", before)) / transactions
        return run

    # the first write to a page after a checkpoint is of the whole page: that has been
    figures = bench.compare({"obix": side("obix"), "bare": side("bare")})
    bench.ratio("", "WAL of a transaction with one event: obix / bare", figures["obix"], figures["bare"], "", "{} / {} B", "wal")


def lock(bench):
    """How long the lock of an outbox is held for a sequence, at most: as long as it takes to draw one."""
    count = bench.many(2000000, 1000)

    def draw(function):
        def run():
            pid = bench.conn.info.backend_pid
            before = cpu_seconds(pid)
            with bench.conn.transaction(force_rollback=True):
                bench.sql(f"SELECT count({function}) FROM generate_series(1, {count})")
            return (cpu_seconds(pid) - before) / count * 1e9
        return run

    spent = bench.compare({"draw": draw("obix.next_sequence('o')"), "other": draw("pg_backend_pid()")})
    held = [max(a - b, 0.1) for a, b in zip(spent["draw"], spent["other"])]
    bench.line("", "the outbox's lock is held for a sequence no longer than", held, "ns", "",
               f"{1e3 / statistics.median(held):.1f} million a second", "lock")


BENCHMARKS = {"scale": scale}
