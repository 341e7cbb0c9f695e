#!/usr/bin/python3
"""
torture.py: crashes and faults, and whether obix keeps its promises meanwhile.

    torture.py [--seconds N] [--seed N] [--bindir DIRECTORY] [--folder DIRECTORY] [--keep]

makes a private server, has publishers, readers, consumers, handlers and
maintenance at work, does harm to them for so many seconds, and says whether
anything went wrong: see README beside it.  The status is 1 then, and the folder
is kept.
"""
import argparse
import collections
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

import psycopg

import consumers
import faults
import ledger
import publishers
import server
import verify
from actor import EXPECTED, World

OUTBOXES = "abcd"               # c is on the small file system; handlers write to d
PUBLISHERS = 5
SMALL = 256                     # megabytes of the small file system
BOUND = 60                      # seconds until all has settled when the harm has ended
SMALL_TABLES = ("obix.consumer_state", "obix.consumer_late", "obix.parked_event")

# What a server may say in its log besides what clients may be told.
LOG_EXPECTED = (
    ("P0001", "^torture: "),
    ("57000", "^"), ("42704", "prepared transaction .* does not exist"),
    ("53400", "obix.max_"), ("53000", "background worker"),
)


def private_mount(arguments, folder):
    """
    Run again as the user postgres, in a mount namespace of our own that has a
    small file system; without it where that is not allowed.  Returns the status.
    """
    small = folder / "small"
    mount = f"mount -t tmpfs -o size={SMALL}m,mode=700,uid=UID,gid=GID obix {small}"
    again = [sys.executable, os.path.abspath(__file__), *arguments, "--folder", str(folder)]
    if os.geteuid() == 0:
        import pwd
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        drop = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--",
                "env", f"HOME={folder}"]
        mount = mount.replace("UID", str(user.pw_uid)).replace("GID", str(user.pw_gid))
        with_mount = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *drop]
        probe, without = with_mount, drop
    else:
        # in a user namespace everybody may mount; the second one gives the user id back
        mount = mount.replace("UID", "0").replace("GID", "0")
        back = f"unshare --user --map-user={os.geteuid()} --map-group={os.getegid()}"
        probe = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec {back} "$@"', "sh"]
        without = []
    small.mkdir(mode=0o700)
    works = subprocess.run([*probe, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    environment = dict(os.environ, OBIX_TORTURE="again")
    if works.returncode == 0:
        environment["OBIX_TORTURE_SMALL"] = str(small)
        command = [*probe, *again]
    else:
        print(f"no small file system, so disks do not fill up: {works.stderr.decode().strip()}")
        command = [*without, *again]
    sys.stdout.flush()
    return subprocess.run(command, env=environment, check=False).returncode


class Torture:
    """One run."""

    def __init__(self, seed, seconds, bindir, folder, small):
        self.seconds = seconds
        self.folder = folder
        self.violations = ledger.Violations(folder / "violations")
        self.ledger = ledger.Ledger(folder / "ledger", OUTBOXES, self.violations)
        self.server = server.Server(bindir, folder, small)
        self.world = World(seed, self.server, self.ledger, self.violations)
        self.verifier = verify.Verifier(self.world)
        self.actors = []

    def set_up(self):
        """The server, its outboxes and consumers."""
        self.server.create()
        if not self.server.start():
            raise RuntimeError(f"the server does not start: see {self.server.log}")
        with self.server.superuser(dbname="postgres") as conn:
            conn.execute(f"CREATE DATABASE {server.DATABASE}")
        with self.server.superuser() as conn:
            conn.execute("CREATE EXTENSION obix")
            conn.execute(f"CREATE ROLE {server.OWNER} LOGIN")
            conn.execute(f"GRANT CREATE ON SCHEMA public TO {server.OWNER}")
            tablespace = ""
            if self.server.small:
                (self.server.small / "space").mkdir(mode=0o700)
                conn.execute(f"CREATE TABLESPACE small OWNER {server.OWNER} LOCATION '{self.server.small}/space'")
                tablespace = "TABLESPACE small"
                for table in SMALL_TABLES:
                    conn.execute(f"ALTER TABLE {table} SET TABLESPACE small")
            conn.execute(consumers.SETUP % {"small": tablespace})
        with self.server.connect() as conn:
            for outbox in OUTBOXES:
                conn.execute(f"SELECT obix.create_outbox('{outbox}', partition_width => 50, premake => 2)")
            if self.server.small:
                self.move("c", conn)
            conn.execute("CREATE FUNCTION app.x_none(e obix.event) RETURNS void LANGUAGE sql AS 'SELECT'")
            conn.execute(f"INSERT INTO app.counter SELECT g, 0 FROM generate_series(0, {publishers.COUNTERS - 1}) g")
            consumers.create_consumers(self.world, conn)

    @staticmethod
    def move(outbox, conn):
        """Put an outbox, with all that it will have, into the small tablespace."""
        for kind, name in conn.execute(
                "SELECT CASE WHEN relkind IN ('r', 'p') THEN 'TABLE' ELSE 'INDEX' END, oid::regclass::text "
                "FROM pg_class WHERE oid IN (SELECT relid FROM pg_partition_tree(%s::regclass) "
                f"UNION ALL SELECT relid FROM pg_partition_tree('{outbox}_pkey'))", (outbox,)).fetchall():
            conn.execute(f"ALTER {kind} {name} SET TABLESPACE small")

    def run(self):
        """Harm, for as long as was asked."""
        world = self.world
        self.actors = [publishers.Publisher(world, f"publisher {i}") for i in range(PUBLISHERS)]
        self.actors += [publishers.Decider(world, "decider", world.publishing)]
        self.actors += [faults.Maintenance(world, f"maintenance {i}") for i in range(2)]
        self.actors += consumers.create_actors(world)
        harm = faults.Faults(world)
        for actor in [*self.actors, harm]:
            actor.start()
        end = time.monotonic() + self.seconds
        shown = time.monotonic()
        while time.monotonic() < end and harm.is_alive():
            time.sleep(1)
            self.check()
            if time.monotonic() > shown + 60:
                shown = time.monotonic()
                print(f"{self.seconds - (end - shown):.0f} s: {len(self.ledger.tx_status) - 1} transactions, "
                      f"{self.world.counts['starts',]} starts, {self.violations.count} violations", flush=True)
        world.faults.clear()
        harm.join()
        harm.undo()

    def check(self):
        """A quick check, if the server lets us."""
        try:
            with self.server.superuser() as conn:
                self.verifier.quick(conn)
                self.world.lag = conn.execute("SELECT coalesce(max(lag_events), 0) FROM obix.consumer_status").fetchone()[0]
        except psycopg.Error as error:
            self.world.error("check", error)

    def join(self, actors, seconds, what):
        """Wait for the end of some actors."""
        end = time.monotonic() + seconds
        for actor in actors:
            actor.join(max(0.0, end - time.monotonic()))
            if actor.is_alive():
                self.violations.add("hangs", f"{what}: {actor.name}\n{self.activity()}")

    def activity(self):
        """What sessions are at."""
        with self.server.superuser() as conn:
            return "\n".join("  " + " | ".join(map(str, row)) for row in conn.execute(
                "SELECT pid, backend_type, application_name, state, wait_event_type, wait_event, "
                "pg_blocking_pids(pid), left(query, 60) FROM pg_stat_activity ORDER BY 1"))

    def settle(self):
        """Publishers end; what has begun comes to its end."""
        world = self.world
        world.publishing.clear()
        self.join([actor for actor in self.actors if actor.going is world.publishing], 60, "publishing")
        decider = publishers.Decider(world, "last decider", world.publishing)
        decider.connect()
        for gid, tx in list(self.ledger.prepared.items()):
            decider.decide(gid, tx, final=True)
        with self.server.superuser() as conn:
            left = conn.execute("SELECT gid FROM pg_prepared_xacts").fetchall()
            if left:
                self.violations.add("harness", f"prepared transactions are left: {left}")
            conn.execute("SELECT obix.resume(consumer) FROM obix.consumer")
            for name, in conn.execute("SELECT outbox::text FROM obix.outbox WHERE outbox::text LIKE 'x%'").fetchall():
                conn.execute(f"SELECT obix.drop_outbox('{name}', force => true)")
            for name, in conn.execute("SELECT consumer FROM obix.consumer WHERE consumer LIKE 'x%'").fetchall():
                conn.execute(f"SELECT obix.drop_consumer('{name}')")
        start = time.monotonic()
        left = ["nothing was looked at"]
        while left and time.monotonic() < start + BOUND:
            time.sleep(0.5)
            try:
                with self.server.superuser() as conn:
                    left = self.unsettled(conn)
                    conn.execute("SELECT obix.requeue(consumer, sequence) FROM obix.dead_letter WHERE state = 'failed'")
                    # too much for a worker: it has said so, and left it to a call
                    conn.execute("SELECT obix.recover_default(outbox) FROM obix.outbox_status"
                                 " WHERE last_error LIKE 'stranded rows%several gaps%'")
            except psycopg.Error as error:
                world.error("settling", error)
            self.ledger.write("unsettled", round(time.monotonic() - start, 1), left)
        world.counts["seconds to settle",] = round(time.monotonic() - start, 1)
        if left:
            self.violations.add("does not settle", "\n".join(map(str, left)) + "\n" + self.activity())
        world.consuming.clear()
        self.join(self.actors, 30, "consuming")

    def unsettled(self, conn):
        """What has not come to its end."""
        left = conn.execute(
            "SELECT outbox::text, head, high_water_mark, stranded, suspect_from, undecided, last_error "
            "FROM obix.outbox_status WHERE NOT (high_water_mark = head AND stranded = 0)").fetchall()
        left += conn.execute(
            "SELECT consumer, state, lag_events, late_ranges, attempts, last_error FROM obix.consumer_status "
            "WHERE lag_events IS DISTINCT FROM 0 OR late_ranges > 0 OR state <> 'active'").fetchall()
        left += conn.execute("SELECT consumer, sequence, state, error FROM obix.dead_letter LIMIT 5").fetchall()
        for outbox, head in conn.execute("SELECT outbox::text, head FROM obix.outbox_status").fetchall():
            if self.ledger.delivered[outbox].top < head:
                left.append(("readers", outbox, self.ledger.delivered[outbox].top, head))
        return left

    def read_log(self):
        """Look for what the server should not have had to say."""
        unexpected = collections.Counter()
        for _, process, state, severity, message in server.log_lines(self.server.log):
            text = re.sub(r"\d+", "N", message)
            if severity in ("ERROR", "FATAL"):
                self.world.counts["log", f"{severity} {state}"] += 1
            if severity in ("PANIC", "TRAP") or state == "XX000":
                unexpected[process, severity, state, text] += 1
            elif severity in ("ERROR", "FATAL", "WARNING") and process.startswith("obix") and \
                    state not in EXPECTED and state != "01000" and \
                    not any(state == code and re.search(pattern, message) for code, pattern in LOG_EXPECTED):
                unexpected[process, severity, state, text] += 1
            found = re.search(r"terminated by signal (\d+)", message)
            if found and found[1] != "9":
                unexpected[process, severity, state, message] += 1
        for what, count in unexpected.items():
            self.violations.add("log", f"{count} times {' '.join(what)}")

    def report(self):
        """The table of figures."""
        counts = self.world.counts
        kinds = collections.defaultdict(dict)
        for what, count in sorted(counts.items(), key=str):
            kinds[what[0]][what[1:]] = count

        print("\ntransactions         committed   aborted   unknown  prepared")
        for kind in sorted({key[0] for key in kinds.pop("transactions", {})}):
            by = [counts["transactions", kind, status]
                  for status in (ledger.COMMITTED, ledger.ABORTED, ledger.UNKNOWN, ledger.PREPARED)]
            print(f"  {kind:<18}" + "".join(f"{count:>10}" for count in by))
        for kind, rows in kinds.items():
            print(f"{kind:<20} " + ", ".join(f"{' '.join(map(str, key))} {count}".strip() for key, count in rows.items()))
        print("errors that clients got")
        for (state, message), count in sorted(self.world.errors.items()):
            print(f"{count:>8} {state:<6} {message[:110]}")
        print(f"totals               transactions {len(self.ledger.tx_status) - 1}, "
              f"events {sum(kinds.get('events', {}).values())}, "
              f"faults {sum(kinds.get('faults', {}).values())}, starts {counts['starts',]}, "
              f"checks {self.verifier.passes}, violations {self.violations.count}")
        for kind, texts in self.violations.kinds.items():
            print(f"VIOLATION {kind}")
            for text in texts[:5]:
                print(f"    {text}")
        sys.stdout.flush()


def main():
    """Arguments, run, verdict."""
    parser = argparse.ArgumentParser(description="crash and fault test of obix")
    parser.add_argument("--seconds", type=int, default=60, help="how long harm is done")
    parser.add_argument("--seed", type=int, help="from which all choices follow")
    parser.add_argument("--bindir", default="/usr/lib/postgresql/15/bin", help="PostgreSQL's programs")
    parser.add_argument("--folder", help="an empty folder to work in")
    parser.add_argument("--keep", action="store_true", help="keep the folder in any case")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1000000)
    if os.environ.get("OBIX_TORTURE") != "again":
        folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="obix-torture-"))
        status = private_mount(["--seconds", str(options.seconds), "--seed", str(options.seed),
                                "--bindir", options.bindir], folder)
        if status == 0 and not options.keep:
            shutil.rmtree(folder)
        sys.exit(status)

    os.environ["LC_ALL"] = "C.UTF-8"
    folder = pathlib.Path(options.folder)
    print(f"torture: seed {options.seed}, {options.seconds} s, in {folder}", flush=True)
    server.adopt_orphans()
    torture = Torture(options.seed, options.seconds, options.bindir, folder,
                      os.environ.get("OBIX_TORTURE_SMALL"))
    try:
        torture.set_up()
        torture.run()
        torture.settle()
        with torture.server.superuser() as conn:
            torture.verifier.full(conn)
        torture.server.stop("fast")
        torture.read_log()
        torture.report()
    except BaseException:
        torture.violations.add("harness", traceback.format_exc())
        traceback.print_exc()
        torture.server.stop("immediate")
    if torture.violations.count > 0:
        torture.ledger.file.flush()
        if torture.server.small:
            shutil.copytree(torture.server.small, folder / "small.copy", dirs_exist_ok=True)
        print(f"torture: FAILED with seed {options.seed}: see {folder}", flush=True)
        os._exit(1)                     # whoever hangs cannot be waited for
    print(f"torture: all is well with seed {options.seed}", flush=True)


if __name__ == "__main__":
    main()
