"""
resources.py: handlers in the database, what idle consumers cost, and memory.
"""
import time

from harness import PAYLOAD, cpu_seconds, private_memory
from reading import timed


def handler(bench):
    """15: a batch handler that maintains a counter table"""
    count = bench.many(300000, 1000)
    bench.make_source(count)
    bench.sql("SELECT obix.create_outbox('o')")
    bench.sql("SELECT count(obix.publish('o', payload, type, key)) FROM source")
    bench.conn.execute("VACUUM o")

    def handle(batch_size):
        def run():
            bench.sql("TRUNCATE counter")
            bench.configure(obix__dispatch_workers=0)
            bench.sql("SELECT obix.create_consumer('c', 'o', batch_handler => 'count_events', batch_size => %s)", batch_size)
            began = time.monotonic()
            bench.configure(obix__dispatch_workers=2)
            bench.until('SELECT "cursor" = %s FROM obix.consumer_status WHERE consumer = %s', count, "c")
            rate = count / (time.monotonic() - began)
            if bench.sql("SELECT sum(events) FROM counter") != count:
                raise RuntimeError("events were not counted")
            bench.sql("SELECT obix.drop_consumer('c')")
            return rate
        return run

    def one_statement():
        bench.sql("TRUNCATE counter")
        return count / timed(bench, "INSERT INTO counter SELECT key, count(*), sum((payload ->> 'amount')::numeric) "
                                    "FROM o WHERE type = 'paid' GROUP BY key")

    figures = bench.compare({"large": handle(5000), "default": handle(500), "statement": one_statement})
    bench.configure(obix__dispatch_workers=None)
    bench.ratio("15", "batch handler, batches of 5,000 / INSERT ... SELECT in one statement", figures["large"],
                figures["statement"], ">= 0.5", "{} / {} events a second")
    bench.ratio("", "batch handler, batches of 500 / INSERT ... SELECT in one statement", figures["default"],
                figures["statement"], "", "{} / {} events a second")


def idle(bench):
    """16: a minute of 200 idle consumers, of which some are waited for"""
    count = bench.many(200, 10)
    seconds = bench.many(60, 1)
    waiting = min(count // 4, 20)
    for n in range(4):
        bench.sql(f"SELECT obix.create_outbox('o{n}')")
    for n in range(count):
        bench.sql("SELECT obix.create_consumer(%s, %s, batch_handler => %s)", f"c{n}", f"o{n % 4}",
                  None if n % 2 else "count_events")
    for n in range(4):
        bench.sql("SELECT count(obix.publish(%s, %s::jsonb, 'paid', 'k')) FROM generate_series(1, 100)", f"o{n}", PAYLOAD)
    for n in range(1, count, 2):
        bench.sql("SELECT obix.ack(%s, 100)", f"c{n}")
    bench.until("SELECT count(*) = %s FROM obix.consumer_status WHERE lag_events = 0", count)
    clients = [bench.start_client("pages", "-x", f"CALL obix.wait_for('c{2 * n + 1}', '1 h')",
                                  f"SELECT * FROM obix.fetch('c{2 * n + 1}')") for n in range(waiting)]
    bench.until("SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type LIKE 'obix%%'")
    bench.conn.execute("CHECKPOINT")
    settle(bench)
    before = usage(bench)
    time.sleep(seconds)
    after = usage(bench)
    for client in clients:
        client.kill()
        client.communicate()
    what = f"{count} idle consumers, {waiting} of them waited for, {seconds} s: "
    bench.line("16", what + "WAL", [after["wal"] - before["wal"]], "B", "<= 0", "of the whole server")
    bench.line("16", what + "transaction ids", [after["xids"] - before["xids"]], "", "<= 0", "of the whole server")
    spent = {pid: seconds - before["cpu"].get(pid, 0) for pid, seconds in after["cpu"].items()}
    obix = sum(spent[pid] for pid, title in after["titles"].items() if pid in spent and "obix" in title)
    bench.line("16", what + "CPU", [sum(spent.values())], "s", "< 0.1", f"of all processes; obix's own {obix:.4f} s")


def settle(bench):
    """Wait until the server writes nothing any more: it notes the end of activity a while later."""
    position = None
    calm = bench.many(20, 1)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        now = bench.sql("SELECT pg_current_wal_insert_lsn()")
        if now == position:
            return
        position = now
        time.sleep(calm)


def usage(bench):
    """What the server has used so far; of its processes without the session that asks."""
    titles = bench.server.processes()
    titles.pop(bench.conn.info.backend_pid, None)
    return {"wal": bench.sql("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"),
            "xids": bench.sql("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"),
            "cpu": {pid: cpu_seconds(pid) for pid in titles}, "titles": titles}


def memory(bench):
    """17: shared memory for an outbox and a connection; memory of sessions and workers, over a million operations"""
    def shared():
        return bench.sql("SELECT allocated_size FROM pg_shmem_allocations WHERE name = 'obix'")

    sizes = {}
    for name, settings in (("base", {}), ("outboxes", {"obix.max_outboxes": 128}), ("consumers", {"obix.max_consumers": 2048}),
                           ("connections", {"max_connections": 400})):
        bench.restart(**settings)
        sizes[name] = shared()
    bench.restart()
    bench.line("17", "shared memory in all, of 64 outboxes, 1,024 consumers, 300 connections", [sizes["base"] / 2**20], "MB")
    bench.line("17", "shared memory for each outbox, with 300 connections", [(sizes["outboxes"] - sizes["base"]) / 64], "B")
    bench.line("17", "shared memory for each outbox and connection", [(sizes["connections"] - sizes["base"]) / 100 / 64], "B")
    bench.line("17", "shared memory for each consumer", [(sizes["consumers"] - sizes["base"]) / 1024], "B")

    step = bench.many(100000, 1000)
    bench.sql("SELECT obix.create_outbox('o')")
    bench.sql("SET synchronous_commit = off")
    bench.sql("SET obix.force_sync_commit = off")
    publish = f"DO $$ BEGIN FOR i IN 1 .. {step} LOOP PERFORM obix.publish('o', '{PAYLOAD}', 'paid'); COMMIT; END LOOP; END $$"
    insert = f"DO $$ BEGIN FOR i IN 1 .. {step} LOOP INSERT INTO o (type, payload) VALUES ('paid', '{PAYLOAD}'); ROLLBACK; END LOOP; END $$"
    read = f"DO $$ BEGIN FOR i IN 1 .. {step} LOOP PERFORM 1 FROM obix.read('o', i %% 1000, 1); END LOOP; END $$".replace("%%", "%")
    own = lambda: bench.conn.info.backend_pid
    worker = lambda: bench.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'obix worker' AND datname = current_database()")
    for what, statement, pid in (("a publisher", publish, own), ("a reader", read, own), ("a worker that fills", insert, worker)):
        flat(bench, what, statement, pid, step)


def flat(bench, what, statement, pid_of, step):
    """Repeat a statement ten times; compare the memory of a process after the first with that at the end."""
    sizes = []
    for _ in range(10):
        bench.conn.execute(statement)
        pid = pid_of()
        if pid is not None:
            sizes.append(private_memory(pid))
    if not sizes:
        raise RuntimeError(f"there is no {what}")
    bench.line("17", f"memory of {what} after {10 * step:,} operations / after {step:,}", [sizes[-1] / sizes[0]], "", "<= 1.05",
               f"{max(sizes) / 2**20:.1f} MB at most")


BENCHMARKS = {"handler": handler, "idle": idle, "memory": memory}
