"""
latency.py: how soon readers have what was committed, and how long publishers
and readers wait at worst while maintenance is at work.
"""
import statistics
import subprocess
import time

import psycopg

from harness import PAYLOAD, PUBLISH

LOCK_TIMEOUT = 50       # obix.lock_timeout in milliseconds, as it is by default


def percentile(values, percent):
    """A percentile, of sorted values."""
    return values[min(len(values) - 1, len(values) * percent // 100)]


class Probes:
    """Runs the client with probes; remembers the latencies of each run."""

    def __init__(self, bench, table, *arguments):
        self.bench = bench
        self.table = table
        self.arguments = arguments
        self.runs = []
        self.lost = 0

    def __call__(self):
        start = self.bench.sql(f"SELECT coalesce(max(sequence), 0) FROM {self.table}")
        lines = self.bench.run_client("wake", "-n", self.bench.many(300, 20), "-a", start, *self.arguments)
        times = sorted(float(line) for line in lines if line != "lost")
        self.lost += len(lines) - len(times)
        self.runs.append(times)
        return statistics.median(times)

    def percentiles(self, percent):
        """A percentile of each run."""
        return [percentile(times, percent) for times in self.runs]


class Load:
    """Publishers at a steady rate, beside what is measured."""

    def __init__(self, bench, script, clients, rate):
        path = bench.server.folder / "load.sql"
        path.write_text(f"\\set n random(1, 1000)\n{script}\n", encoding="utf-8")
        self.process = subprocess.Popen(
            [bench.server.bin / "pgbench", *map(str, ["-n", "-M", "prepared", "-c", clients, "-j", 1, "-T", 3600,
                                                      "-R", rate, "-D", f"payload={PAYLOAD}", "-f", path])],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=bench.server.environment(bench.database))
        time.sleep(0.1 if bench.quick else 0.5)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait()


def wake(bench):
    """9: from the return of a COMMIT to the rows in the hands of somebody who waited"""
    bench.sql("SELECT obix.create_outbox('o')")
    rate = 1000
    for clients, how in ((0, "alone"), (8, "beside 8 publishers")):
        probes = {
            "obix": Probes(bench, "o", "SELECT obix.publish('o', '{}', 'probe', $1)", "CALL obix.wait('o', $1)",
                           "SELECT * FROM obix.read('o', $1, 1000)"),
            "notify": Probes(bench, "notify", "-l", "events",
                             "INSERT INTO notify (type, key, payload) VALUES ('probe', $1, '{}')",
                             "SELECT * FROM notify WHERE sequence > $1 ORDER BY sequence")}

        def beside(name):
            def run():
                if clients == 0:
                    return probes[name]()
                with Load(bench, PUBLISH[name], clients, rate):
                    return probes[name]()
            return run

        bench.compare({name: beside(name) for name in probes})
        for percent, label in ((50, "median"), (99, "99th percentile")):
            bench.ratio("9", f"commit to rows in hand, {label}, {how}: obix / notify", probes["obix"].percentiles(percent),
                        probes["notify"].percentiles(percent), "<= 0.4", "{} / {} us",
                        f"wake {percent} {clients}")
        if clients:
            bench.say(f"the publishers make {rate:,} events a second")
        for name, probe in probes.items():
            if probe.lost:
                bench.say(f"{probe.lost} probes by {name} never came: the reader had passed them, or it took a second")


def rollback(bench):
    """10: from the end of an INSERT that is rolled back to a reader past it"""
    bench.sql("SELECT obix.create_outbox('o')")
    probes = Probes(bench, "o", "-h", "BEGIN; INSERT INTO o (type, payload) VALUES ('paid', '{}')", "-r", "ROLLBACK",
                    "SELECT obix.publish('o', '{}', 'probe', $1)", "CALL obix.wait('o', $1)",
                    "SELECT * FROM obix.read('o', $1, 1000)")
    figures = bench.compare({"obix": probes})
    if probes.lost:
        raise RuntimeError(f"{probes.lost} holes were not filled in a second")
    bench.line("10", "end of a rolled back INSERT to a reader past it, median", [t / 1e3 for t in figures["obix"]], "ms",
               "< 5", f"99th percentile {statistics.median(probes.percentiles(99)) / 1e3:.2f} ms")


# --------------------------------------------------- maintenance at work

class Timed:
    """Clients whose latencies are noted, one by one."""

    def __init__(self, bench, name, script, clients, seconds):
        self.prefix = bench.server.folder / f"latency-{name}"
        for old in self.logs():
            old.unlink()
        path = bench.server.folder / f"{name}.sql"
        path.write_text(f"\\set n random(1, 1000)\n{script}\n", encoding="utf-8")
        self.process = subprocess.Popen(
            [bench.server.bin / "pgbench", *map(str, ["-n", "-M", "prepared", "-c", clients, "-j", 1, "-T", seconds, "-l",
                                                      f"--log-prefix={self.prefix}", "-D", f"payload={PAYLOAD}", "-f", path])],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=bench.server.environment(bench.database))

    def logs(self):
        return list(self.prefix.parent.glob(self.prefix.name + ".*"))

    def latencies(self):
        """Its transactions: (begin, end) in seconds of the clock."""
        _, errors = self.process.communicate()
        if self.process.returncode != 0:
            raise RuntimeError(errors)
        found = []
        for log in self.logs():
            for line in log.read_text(encoding="utf-8").splitlines():
                fields = line.split()
                end = int(fields[4]) + int(fields[5]) / 1e6
                found.append((end - int(fields[2]) / 1e6, end))
        return found


def strand(bench, outbox, count):
    """Have so many events in the DEFAULT partition."""
    bench.sql(f"SELECT obix.create_outbox('{outbox}', 1000, 0)")
    holder = bench.server.connect(bench.database)
    holder.execute(f"BEGIN; SELECT count(*) FROM {outbox}_default")
    bench.sql(f"SELECT obix.alter_outbox('{outbox}', 10000000)")
    bench.sql(f"SELECT count(obix.publish('{outbox}', %s::jsonb, 'paid', 'account-1')) FROM generate_series(1, %s)", PAYLOAD,
              count)
    if bench.sql(f"SELECT count(*) FROM {outbox}_default") < count - 1000:
        raise RuntimeError("the events are not stranded")
    holder.close()


def maintenance(bench):
    """14: longest latency of publishers and readers while partitions are made and stranded events recovered"""
    bench.configure(obix__auto_recover="off")
    try:
        strand(bench, "o", bench.many(5000000, 5000))
        bench.sql("CHECKPOINT")
        with bench.server.connect(bench.database) as reader:
            reader.execute("BEGIN; SELECT 1 FROM o LIMIT 1")
            attempt(bench, " behind a SELECT", True)
        if bench.sql("SELECT stranded FROM obix.outbox_status") == 0:
            raise RuntimeError("events were recovered in spite of a SELECT")
        attempt(bench, "", False)
        if bench.sql("SELECT stranded FROM obix.outbox_status") > 0:
            raise RuntimeError("events were not recovered")
    finally:
        bench.configure(obix__auto_recover=None)


def attempt(bench, how, behind):
    """Have maintenance done beside publishers and readers, for the lines of one case."""
    seconds = bench.many(16, 6)
    clients = {"publishers": Timed(bench, "publishers", PUBLISH["obix"], 4, seconds),
               "readers": Timed(bench, "readers", "SELECT * FROM obix.read('o', 500, 100);", 2, seconds)}
    time.sleep(seconds / 4)
    done = work(bench, behind, seconds / 2)
    for name, timed in clients.items():
        latencies = timed.latencies()
        usual = longest(latencies, done, among=False)
        for what in ("recovering", "making a partition"):
            bench.line("14", f"longest latency of {name}, {what}{how}",
                       [longest(latencies, [span for span in done if span[0] == what])], "ms",
                       f"< {LOCK_TIMEOUT + 50}", f"without maintenance {usual:.1f} ms")


def longest(latencies, spans, among=True):
    """The longest of the latencies that overlap with some spans of time, or with none; in milliseconds."""
    return max((1e3 * (end - begin) for begin, end in latencies
                if among == any(begin < until and end > since for _, since, until in spans)), default=0.0)


def work(bench, behind, seconds):
    """Do maintenance; returns what was done from when to when."""
    done = []
    premake = 0
    ends = time.monotonic() + seconds

    def step(label, statement):
        since = time.time()
        try:
            bench.sql(statement)
        except psycopg.errors.LockNotAvailable:
            if not behind:
                raise
        done.append((label, since, time.time()))

    # behind somebody, each of these calls tries for two seconds
    while not done or time.monotonic() < ends:
        if behind or not done:
            step("recovering", "SELECT obix.recover_default('o')")
        premake += 1
        bench.sql("SELECT obix.alter_outbox('o', premake => %s)", premake)
        step("making a partition", "SELECT obix.ensure_partitions('o')")
        time.sleep(0.2)
    return done


BENCHMARKS = {"wake": wake, "rollback": rollback, "maintenance": maintenance}
