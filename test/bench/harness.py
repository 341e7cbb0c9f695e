"""
harness.py: the server, the programs that are measured, and what is made of
their figures.

Everything is compared within one run: the sides take turns, A B A B, and each
ratio is that of neighbours.  A line of the table is the median of these ratios,
with the lowest and the highest.
"""
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import threading
import time

import psycopg

HERE = pathlib.Path(__file__).resolve().parent

# No checkpoint and no vacuum while something is measured; WAL goes to the disk.
SETTINGS = """
shared_preload_libraries = 'obix'
listen_addresses = ''
max_connections = 300
max_locks_per_transaction = 256
shared_buffers = '1GB'
work_mem = '4MB'
maintenance_work_mem = '256MB'
fsync = on
synchronous_commit = on
wal_compression = off
checkpoint_timeout = '1h'
max_wal_size = '16GB'
autovacuum = off
jit = off
log_checkpoints = off
obix.max_outboxes = 64
obix.max_consumers = 1024
"""

# A payload of 258 bytes
PAYLOAD = json.dumps({
    "order": "5f0c9f4e-6d1f-4a07-9d59-3c1d4a4f1f62", "customer": "account-4711", "currency": "EUR",
    "amount": 129.95, "lines": [{"article": "A-10023", "count": 2, "price": 49.95},
                                {"article": "B-20417", "count": 1, "price": 30.05}],
    "note": "leave at the door"})

PUBLISH = {
    "obix": "SELECT obix.publish('o', :payload, 'paid', 'account-' || :n);",
    "insert": "INSERT INTO o (type, key, payload) VALUES ('paid', 'account-' || :n, :payload);",
    "bare": "INSERT INTO bare (type, key, payload) VALUES ('paid', 'account-' || :n, :payload);",
    "notify": "INSERT INTO notify (type, key, payload) VALUES ('paid', 'account-' || :n, :payload);",
    "PgQ": "SELECT pgq.insert_event('q', 'paid', :payload, 'account-' || :n, NULL, NULL, NULL);",
    "pgmq": "INSERT INTO pgmq (vt, type, key, message) VALUES (now(), 'paid', 'account-' || :n, :payload);",
}


class CannotRun(Exception):
    """What this benchmark needs is not there."""


# ------------------------------------------------------------------- server

class Server:
    """A throwaway server on a socket in its own folder."""

    def __init__(self, bindir, folder):
        self.bin = pathlib.Path(bindir)
        self.folder = pathlib.Path(folder)
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.postmaster = None

    def run(self, program, *arguments, **options):
        """Run a program of PostgreSQL; returns what it prints."""
        done = subprocess.run([self.bin / program, *map(str, arguments)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
                              **options)
        if done.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def create(self):
        """Make the cluster."""
        self.run("initdb", "-D", self.data, "-U", "postgres", "--auth=trust", "--no-sync",
                 "--locale=C", "--encoding=UTF8")
        with open(self.data / "postgresql.conf", "a", encoding="utf-8") as conf:
            conf.write(SETTINGS + f"unix_socket_directories = '{self.folder}'\n")

    def start(self, **settings):
        """Start it, with settings for this time."""
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        # not by a pipe, which the server would keep open
        subprocess.run([self.bin / "pg_ctl", "-D", self.data, "-l", self.log, "-w", "-t", "300",
                        "-o", options, "start"], check=True, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.postmaster = int((self.data / "postmaster.pid").read_text(encoding="utf-8").split()[0])

    def stop(self, mode="fast"):
        """Stop it, if it runs."""
        if self.postmaster:
            self.run("pg_ctl", "-D", self.data, "-m", mode, "-w", "-t", "300", "stop")
            self.postmaster = None

    def environment(self, database, options=""):
        """What libpq's programs find it by."""
        return {**os.environ, "PGHOST": str(self.folder), "PGUSER": "postgres", "PGDATABASE": database,
                "PGOPTIONS": options}

    def connect(self, database="postgres"):
        """A superuser's connection."""
        return psycopg.connect(host=str(self.folder), user="postgres", dbname=database,
                               autocommit=True, prepare_threshold=None)

    def processes(self):
        """The processes of the server: {pid: title}."""
        found = {self.postmaster: "postmaster"}
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):          # it may have ended
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.postmaster:
                    title = (stat.parent / "cmdline").read_bytes().partition(b"\0")[0]
                    found[int(stat.parent.name)] = title.decode(errors="replace")
        return found


def cpu_seconds(pid):
    """CPU time of a process, 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    with contextlib.suppress(OSError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def ended_cpu_seconds(postmaster):
    """CPU time of the processes of a server that have ended."""
    fields = pathlib.Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def private_memory(pid):
    """Bytes of memory that a process has for itself, 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


class Peak:
    """Watches the private memory of a process."""

    def __init__(self, pid):
        self.pid = pid
        self.begin = self.bytes = private_memory(pid)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self):
        while not self.ended.wait(0.005):
            self.bytes = max(self.bytes, private_memory(self.pid))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()
        self.bytes = max(self.bytes, private_memory(self.pid))


# ------------------------------------------------------------------ figures

@dataclasses.dataclass
class Line:
    """A line of the table."""
    benchmark: str
    row: str            # of the requirements; "" if this is for comparison only
    what: str
    value: float        # the median
    low: float
    high: float
    pairs: int
    unit: str           # "" for ratios
    target: str         # such as "<= 1.1", or ""
    figures: str        # what was measured, in absolute terms
    met: bool = None
    key: str = ""       # how the chart finds it
    upper: float = None # of a ratio: the medians of both sides
    lower: float = None

    def verdict(self):
        """The last column."""
        return {True: "met", False: "missed", None: ""}[self.met]


def judge(value, target):
    """Is a target met?"""
    sign, bound = target.split()
    return value >= float(bound) if sign == ">=" else value < float(bound) if sign == "<" else value <= float(bound)


def plural(count, thing):
    """So many things."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def number(value):
    """A number with as many digits as make sense."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


FORMAT = "{:<3} {:<76} {:>8}  {:>8}  {:<19} {:>2}  {:<33} {}"
HEADER = FORMAT.format("row", "what", "target", "median", "lowest .. highest", "n", "figures", "")


def text(line):
    """A line of the table as text."""
    unit = f" {line.unit}" if line.unit else ""
    spread = f"{number(line.low)} .. {number(line.high)}" if line.pairs > 1 else ""
    return FORMAT.format(line.row, line.what, line.target, number(line.value) + unit, spread,
                         line.pairs, line.figures, line.verdict()).rstrip()


class Bench:
    """What a benchmark works with: a database of its own, and the results."""

    def __init__(self, server, client, quick, output):
        self.server = server
        self.client = client        # the program, or None
        self.quick = quick          # small sizes and one round: does it work at all?
        self.rounds = 1 if quick else 5
        self.lines = []
        self.broken = []            # names of benchmarks that broke off
        self.output = output
        self.name = ""
        self.database = ""
        self.conn = None
        self.cpu = 0.0

    # ------------------------------------------------------------- sizes

    def many(self, count, quick=100):
        """A size, or that of a quick run."""
        return quick if self.quick else count

    # ---------------------------------------------------------- database

    @contextlib.contextmanager
    def benchmark(self, name):
        """A database with obix and the peers."""
        self.name = name
        self.database = "bench_" + name.replace("-", "_")
        with self.server.connect() as control:
            control.execute(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")
            control.execute("CHECKPOINT")
            control.execute(f"CREATE DATABASE {self.database}")
        self.conn = self.server.connect(self.database)
        try:
            self.sql("CREATE EXTENSION obix")
            self.server.run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", HERE / "peers.sql",
                            env=self.server.environment(self.database))
            yield self
        finally:
            self.conn.close()
        with self.server.connect() as control:
            control.execute(f"DROP DATABASE {self.database} WITH (FORCE)")

    def restart(self, **settings):
        """Restart the server."""
        self.conn.close()
        self.server.stop()
        self.server.start(**settings)
        self.conn = self.server.connect(self.database)

    def sql(self, statement, *parameters):
        """Run a statement; returns the first value of its result."""
        cursor = self.conn.execute(statement, parameters or None)
        return cursor.fetchone()[0] if cursor.description and cursor.rowcount else None

    def until(self, condition, *parameters, timeout=120):
        """Wait until a query says true."""
        deadline = time.monotonic() + timeout
        while not self.sql(condition, *parameters):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not true in time: {condition}")
            time.sleep(0.005)

    def configure(self, **settings):
        """Change settings of the server; None resets."""
        for name, value in settings.items():
            name = name.replace("__", ".")
            self.sql(f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = '{value}'")
        self.sql("SELECT pg_reload_conf()")

    def has_pgq(self):
        """Have PgQ in this database, if it is installed."""
        if not self.sql("SELECT count(*) FROM pg_available_extensions WHERE name = 'pgq'"):
            return False
        self.sql("SET client_min_messages = error")
        self.sql("CREATE EXTENSION IF NOT EXISTS pgq")
        self.sql("SELECT pgq.create_queue('q')")
        return True

    def make_source(self, count):
        """A table of events to be published at once."""
        self.sql("CREATE UNLOGGED TABLE source (type text, key text, payload jsonb)")
        self.sql("INSERT INTO source SELECT 'paid', 'account-' || g %% 1000, %s FROM generate_series(1, %s) g",
                 PAYLOAD, count)
        self.conn.execute("VACUUM ANALYZE source")

    # ---------------------------------------------------------- programs

    def pgbench(self, script, clients, seconds, *options, pgoptions="", warm=False):
        """
        Run a script by pgbench; returns (transactions a second, transactions).
        With warm, the first second does not count.  Notes in self.cpu how many
        seconds of CPU the sessions have used.
        """
        path = self.server.folder / f"script-{threading.get_ident()}.sql"
        path.write_text(f"\\set n random(1, 1000)\n{script}\n", encoding="utf-8")
        length = ["-t", 5] if self.quick else ["-T", seconds + (1 if warm else 0)]
        threads = min(clients, os.cpu_count())
        before = ended_cpu_seconds(self.server.postmaster)
        if warm:
            options = ("-P", 1, *options)
        done = subprocess.run(
            [self.server.bin / "pgbench", *map(str, ["-n", "-M", "prepared", "-c", clients, "-j", threads,
                                                     "-D", f"payload={PAYLOAD}", *length, *options, "-f", path])],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
            cwd=self.server.folder, env=self.server.environment(self.database, pgoptions))
        found = {}
        for line in done.stdout.splitlines():
            if line.startswith("tps = "):
                found["tps"] = float(line.split()[2])
            elif line.startswith("number of transactions actually processed: "):
                found["transactions"] = int(line.split()[5].partition("/")[0])
            elif line.startswith("number of failed transactions: "):
                found["failed"] = int(line.split()[4])
        self.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pgbench'")
        time.sleep(0.02)                # for the postmaster to see their end
        self.cpu = ended_cpu_seconds(self.server.postmaster) - before
        if done.returncode != 0 or found.get("failed") != 0:
            raise RuntimeError(f"pgbench: {script}\n{done.stdout}{done.stderr}")
        rates = [float(line.split()[3]) for line in done.stderr.splitlines() if line.startswith("progress: ")]
        if warm and len(rates) > 1:
            found["tps"] = statistics.mean(rates[1:])
        return found["tps"], found["transactions"]

    def start_client(self, mode, *arguments):
        """Start the client; returns when it is ready."""
        if self.client is None:
            raise CannotRun("there is no C compiler or no libpq-dev")
        process = subprocess.Popen([self.client, mode, *map(str, arguments)], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=self.server.environment(self.database))
        if mode != "wake" and process.stderr.readline() != "ready\n":
            self.end_client(process)
        return process

    def end_client(self, process, rows=None):
        """Its results: (seconds, end), after a check that it got all rows; or lines."""
        output, errors = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(errors)
        if process.args[1] == "wake":
            return output.split()
        found = output.split()
        if rows is not None and int(found[0]) != rows:
            raise RuntimeError(f"{found[0]} rows instead of {rows}: {process.args}")
        return float(found[2]), float(found[3])

    def run_client(self, mode, *arguments, rows=None):
        """Run the client; returns what end_client() does."""
        return self.end_client(self.start_client(mode, *arguments), rows)

    # ----------------------------------------------------------- results

    def compare(self, sides, rounds=None):
        """Have the sides take turns; returns the figures of each."""
        figures = {name: [] for name in sides}
        for _ in range(rounds or self.rounds):
            for name, side in sides.items():
                figures[name].append(side())
        return figures

    def ratio(self, row, what, upper, lower, target="", figures="", key=""):
        """A line from the ratios of two lists of figures; rounds that one lacks are left out."""
        ratios = [a / b for a, b in zip(upper, lower)]
        upper, lower = (statistics.median(side[:len(ratios)]) for side in (upper, lower))
        self.line(row, what, ratios, "", target, figures.format(number(upper), number(lower)), key, upper, lower)

    def line(self, row, what, values, unit="", target="", figures="", key="", upper=None, lower=None):
        """A line from measured values."""
        median = statistics.median(values)
        line = Line(self.name, row, what, median, min(values), max(values), len(values), unit, target,
                    figures, judge(median, target) if target else None, key, upper, lower)
        self.lines.append(line)
        print(text(line), file=self.output, flush=True)

    def cannot(self, row, what, why):
        """A row that could not be run: that is not met."""
        line = Line(self.name, row, what, None, None, None, 0, "", "", f"cannot be run: {why}")
        self.lines.append(line)
        print(f"{row:<3} {what}: cannot be run: {why}", file=self.output, flush=True)

    def say(self, remark):
        """Something to be known about the figures."""
        print(f"    {remark}", file=self.output, flush=True)


def machine():
    """What this was measured on."""
    model = "unknown processor"
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GB, {platform.system()} {platform.release().partition('-')[0]}"
