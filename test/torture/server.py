"""
server.py: a private server, and what can be done to its processes.

Everything is in one folder: data, socket, log, and the small file system.
"""
import ctypes
import os
import pathlib
import re
import signal
import subprocess
import time

import psycopg

DATABASE = "torture"
OWNER = "torture_owner"         # not a superuser: creates the outboxes, publishes, reads

# wal_writer_delay: what is not flushed by whoever commits is lost in a crash.
SETTINGS = """
shared_preload_libraries = 'obix'
listen_addresses = ''
fsync = off
wal_writer_delay = '10s'
max_wal_senders = 0
max_prepared_transactions = 20
max_connections = 40
max_locks_per_transaction = 256
shared_buffers = '16MB'
work_mem = '64kB'
deadlock_timeout = '200ms'
checkpoint_timeout = '30s'
max_wal_size = '512MB'
autovacuum_naptime = '1s'
autovacuum_vacuum_threshold = 20
autovacuum_vacuum_insert_threshold = 100
log_line_prefix = '%m [%p] %b %e '
log_statement = none
log_min_duration_statement = -1
log_checkpoints = off
log_autovacuum_min_duration = -1
log_lock_waits = off
obix.max_outboxes = 8
obix.max_consumers = 20
"""


class Server:
    """The server; a folder of its own, and the programs of one installation."""

    def __init__(self, bindir, folder, small):
        self.bin = pathlib.Path(bindir)
        self.folder = pathlib.Path(folder)
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.small = pathlib.Path(small) if small else None     # a small file system
        self.postmaster = None

    def run(self, program, *arguments, check=True):
        """Run a program of PostgreSQL, its output going to a file."""
        with open(self.folder / "programs.log", "ab") as output:
            return subprocess.run([self.bin / program, *map(str, arguments)], check=check,
                                  stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def create(self):
        """Make the cluster."""
        self.run("initdb", "-D", self.data, "-U", "postgres", "--auth=trust", "--no-sync",
                 "--locale=C", "--encoding=UTF8")
        with open(self.data / "postgresql.conf", "a", encoding="utf-8") as conf:
            conf.write(SETTINGS)
            conf.write(f"unix_socket_directories = '{self.folder}'\n")
            conf.write("include = 'chance.conf'\n")
        self.configure({})

    def configure(self, settings):
        """Set what changes from start to start."""
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        (self.data / "chance.conf").write_text("".join(lines), encoding="utf-8")

    def start(self):
        """Start it; false if it does not come up."""
        done = self.run("pg_ctl", "-D", self.data, "-l", self.log, "-w", "-t", "120", "start",
                        check=False)
        if done.returncode != 0:
            return False
        with open(self.data / "postmaster.pid", encoding="utf-8") as file:
            self.postmaster = int(file.readline())
        return True

    def stop(self, mode):
        """Stop it; false if that takes too long."""
        if self.run("pg_ctl", "-D", self.data, "-m", mode, "-w", "-t", "60", "stop",
                    check=False).returncode != 0:
            return False
        await_end(self.postmaster)
        self.postmaster = None
        return True

    def connect(self, user=OWNER, dbname=DATABASE, **options):
        """A connection; no statement is prepared unless somebody asks for it."""
        return psycopg.connect(host=str(self.folder), user=user, dbname=dbname, autocommit=True,
                               connect_timeout=30, prepare_threshold=None, **options)

    def superuser(self, **options):
        """A superuser's connection, for which slots are reserved."""
        return self.connect(user="postgres", application_name="torture control", **options)

    # ------------------------------------------------------------ processes

    def children(self):
        """The processes of the server: {pid: title}, without the postmaster."""
        found = {}
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(fields[1]) != self.postmaster or fields[0] == "Z":
                    continue
                title = (stat.parent / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue                # it has ended
            found[int(stat.parent.name)] = title.partition(b"\0")[0].decode(errors="replace")
        return found

    def signal(self, pid, number):
        """Send a signal to a process; false if it is gone."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def crash(self):
        """
        Kill every process at one moment, as a power failure would.  The
        postmaster is stopped first, so that it starts nobody meanwhile.
        """
        self.signal(self.postmaster, signal.SIGSTOP)
        pids = list(self.children())
        self.signal(self.postmaster, signal.SIGKILL)
        for pid in pids:
            self.signal(pid, signal.SIGKILL)
        for pid in [self.postmaster, *pids]:
            await_end(pid)

    def is_up(self):
        """Does it accept connections?"""
        try:
            with self.superuser(dbname="postgres"):
                return True
        except psycopg.Error:
            return False

    # ---------------------------------------------------- the small file system

    def fill_disk(self, leave=0):
        """Let a file take all the room, but for some bytes."""
        ballast = self.small / "ballast"
        with open(ballast, "ab") as file:
            try:
                while True:
                    os.posix_fallocate(file.fileno(), file.tell(), 65536)
                    file.seek(0, os.SEEK_END)
            except OSError:
                pass
            file.truncate(max(0, file.tell() - leave))

    def free_disk(self):
        """Give the room back."""
        if self.small:
            (self.small / "ballast").unlink(missing_ok=True)


def adopt_orphans():
    """
    Become the parent of the postmaster and, when it dies, of its children.
    Whoever else would be may leave them as zombies, which count as running.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)     # PR_SET_CHILD_SUBREAPER


def await_end(pid):
    """Wait until a process is gone, and reap it if it is ours."""
    while True:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.002)


def log_lines(path):
    """The messages of a log: (process id, kind of process, SQLSTATE, severity, message)."""
    pattern = re.compile(r"^\S+ \S+ \S+ \[(\d+)\] (.*?) ([0-9A-Z]{5}) (\w+):  (.*)$")
    with open(path, encoding="utf-8", errors="replace") as log:
        for line in log:
            found = pattern.match(line)
            if found:
                yield int(found[1]), found[2], found[3], found[4], found[5]
            elif line.startswith("TRAP"):
                yield 0, "", "", "TRAP", line.rstrip()
