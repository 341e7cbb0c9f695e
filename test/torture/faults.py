"""
faults.py: the harm that is done, and the maintenance that goes on meanwhile.
"""
import signal
import time

import psycopg

from actor import Actor

# what changes from start to start of the server
STARTS = {
    "max_worker_processes": (3, 4, 5, 8, 12),
    "obix.max_outboxes": (4, 5, 8),
    "obix.max_consumers": (12, 13, 20),
    "wal_level": ("replica", "logical", "minimal"),
    "obix.dispatch_workers": (1, 2, 3),
}

# what changes while it runs
RELOADS = {
    "obix.dispatch_workers": ("0", "1", "2", "4"),
    "obix.lock_timeout": ("1ms", "50ms", "200ms"),  # of which maintenance by hand takes up to 40
    "obix.premake_interval": ("1s", "1h"),
    "obix.auto_recover": ("on", "off"),
    "obix.notify": ("on", "off"),
    "obix.worker_linger": ("0", "100ms", "1s", "4s"),
    "deadlock_timeout": ("10ms", "200ms", "1s"),
    "max_parallel_workers_per_gather": ("0", "2"),
}


class Faults(Actor):
    """Does one kind of harm after another; the only one to restart the server."""

    kinds = {
        "cancel": 20, "terminate": 12, "terminate_obix": 8, "stop_process": 8, "kill_backend": 2.5, "kill_obix": 2.5,
        "kill_other": 0.7, "power_failure": 2.5, "immediate": 2, "fast": 1.5, "disk_full": 6, "connections": 3,
        "reload": 8,
    }

    def __init__(self, world):
        super().__init__(world, "faults", world.faults)
        if not self.server.small:
            self.kinds = {name: weight for name, weight in self.kinds.items() if name != "disk_full"}

    def connect(self):
        """It connects when it needs to."""

    def step(self):
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        self.ledger.write("fault", kind, time.strftime("%H:%M:%S"))
        try:
            done = getattr(self, "do_" + kind)()
        finally:
            if self.server.small:
                self.server.free_disk()
        if done is not False:
            self.world.count("faults", kind)
        self.pause(0.6)

    # ----------------------------------------------------------- processes

    def send(self, function, condition):
        """Cancel or terminate some session."""
        with self.server.superuser() as conn:
            pids = conn.execute(
                f"SELECT pid FROM pg_stat_activity WHERE application_name <> 'torture control' AND {condition} "
                "ORDER BY backend_type, application_name").fetchall()
            for (pid,) in self.random.sample(pids, min(len(pids), self.random.randint(1, 3))):
                conn.execute(f"SELECT {function}({pid})")
            return bool(pids)

    def do_cancel(self):
        """Cancel whatever it is at."""
        return self.send("pg_cancel_backend", self.random.choice(
            ("backend_type = 'client backend'", "backend_type LIKE 'obix%'",
             "backend_type IN ('client backend', 'autovacuum worker', 'parallel worker')",
             "state = 'active' AND (query ILIKE 'commit%' OR query ILIKE '%fetch%')")))

    def do_terminate(self):
        """End a session."""
        return self.send("pg_terminate_backend",
                         "backend_type IN ('client backend', 'autovacuum worker', 'autovacuum launcher')")

    def obix_processes(self):
        """The launcher, workers and dispatchers."""
        return sorted(pid for pid, title in self.server.children().items() if "obix" in title and "postgres: obix" in title)

    def do_terminate_obix(self):
        """End one of obix's own processes, the launcher too."""
        pids = self.obix_processes()
        return bool(pids) and self.server.signal(self.random.choice(pids), signal.SIGTERM)

    def do_stop_process(self):
        """Let a process sleep, whatever it holds."""
        pids = self.obix_processes()
        if self.chance(0.6):
            pids = sorted(pid for pid, title in self.server.children().items() if "torture" in title)
        if not pids:
            return False
        pid = self.random.choice(pids)
        self.server.signal(pid, signal.SIGSTOP)
        self.pause(1.0)
        return self.server.signal(pid, signal.SIGCONT)

    # ------------------------------------------------------------- crashes

    def kill(self, pids):
        """Kill one process, so that the postmaster restarts all, and await that."""
        if not pids:
            return False
        self.server.signal(self.random.choice(pids), signal.SIGKILL)
        self.await_server()
        return True

    def do_kill_backend(self):
        """One of a client."""
        return self.kill(sorted(pid for pid, title in self.server.children().items() if "torture_owner" in title))

    def do_kill_obix(self):
        """One of obix."""
        return self.kill(self.obix_processes())

    def do_kill_other(self):
        """One of PostgreSQL."""
        return self.kill(sorted(
            pid for pid, title in self.server.children().items()
            if any(name in title for name in ("checkpointer", "background writer", "walwriter", "autovacuum"))))

    def do_power_failure(self):
        """All processes at one moment."""
        self.server.crash()
        self.restart()

    def do_immediate(self):
        """Without a checkpoint."""
        self.server.stop("immediate")
        self.restart()

    def do_fast(self):
        """In good order."""
        if not self.server.stop("fast"):
            self.world.violations.add("restart", "a fast stop takes more than a minute")
            self.server.crash()
        self.restart()

    def restart(self):
        """Start the server with other settings."""
        self.server.free_disk()
        self.server.configure({name: self.random.choice(values) for name, values in STARTS.items()})
        if not self.server.start():
            self.world.violations.add("restart", "the server does not start")
            raise RuntimeError("the server does not start")
        self.await_server()

    def await_server(self):
        """Wait until it accepts connections."""
        end = time.monotonic() + 120
        while not self.server.is_up():
            if time.monotonic() > end:
                self.world.violations.add("restart", "the server does not come back")
                raise RuntimeError("the server does not come back")
            time.sleep(0.05)
        self.world.count("starts")

    # ----------------------------------------------------------- resources

    def do_disk_full(self):
        """No room, or next to none, for the outbox c and what belongs to it; sometimes with a crash."""
        self.server.fill_disk(self.random.choice((0, 8192, 65536, 300000)))
        self.pause(3)
        if self.chance(0.15):
            self.server.crash()
            self.restart()
        elif self.chance(0.1):
            with self.server.superuser() as conn:
                conn.execute("CHECKPOINT")

    def do_connections(self):
        """All connections that there are."""
        taken = []
        try:
            while len(taken) < 100:
                taken.append(self.server.connect(application_name="torture greedy"))
        except psycopg.OperationalError as error:
            self.world.error(self.name, error)
        self.pause(1.5)
        for conn in taken:
            conn.close()

    def do_reload(self):
        """Other settings, while it runs."""
        with self.server.superuser() as conn:
            for name in self.random.sample(sorted(RELOADS), 2):
                conn.execute(f"ALTER SYSTEM SET {name} = '{self.random.choice(RELOADS[name])}'")
            conn.execute("SELECT pg_reload_conf()")

    def undo(self):
        """As if nothing had been."""
        self.server.free_disk()
        for pid in self.server.children():
            self.server.signal(pid, signal.SIGCONT)
        with self.server.superuser() as conn:
            conn.execute("ALTER SYSTEM RESET ALL")
            conn.execute("SELECT pg_reload_conf()")


class Maintenance(Actor):
    """What workers do, and administrators, at the same time."""

    kinds = {
        "ensure": 10, "fill": 10, "recover": 10, "alter": 6, "vacuum": 6, "analyze": 4, "hold": 4, "lock": 2,
        "status": 6, "extra_outbox": 4, "extra_consumer": 4, "pause_resume": 4, "requeue": 8, "reindex": 1.5, "parallel": 3,
        "alter_consumer": 3,
    }
    also = (
        ("55000", "x_.* has handlers"), ("42P07", "x_"), ("42P01", "x_"), ("42710", "x_"), ("42704", "x_"),
        ("42704", "dead letter"), ("55000", "dead letter"),
        ("55006", "busy|in use|being|another session"),
    )

    def __init__(self, world, name):
        super().__init__(world, name, world.publishing)

    def step(self):
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        try:
            getattr(self, "do_" + kind)()
            self.world.count("maintenance", kind)
        except psycopg.Error as error:
            self.world.error(f"{self.name} {kind}", error, self.also)
            self.recover(error)
        self.pause(0.1)

    def some_outbox(self):
        return self.random.choice("abcd")

    def do_ensure(self):
        self.execute(f"SELECT obix.ensure_partitions({self.random.choice(('', repr(self.some_outbox())))})")

    def do_fill(self):
        self.execute(f"SELECT obix.fill_gaps({self.random.choice(('', repr(self.some_outbox())))})")

    def do_recover(self):
        self.execute(f"SELECT obix.recover_default('{self.some_outbox()}')")

    def do_alter(self):
        """Narrow partitions, so that their ends are met all the time."""
        outbox = self.some_outbox()
        head = len(self.ledger.delivered[outbox].tokens)
        narrow = max(1, head // 100)
        width = self.random.choice((narrow, narrow + 6, 2 * narrow + 13, 5 * narrow + 101))
        self.execute(f"SELECT obix.alter_outbox('{outbox}', partition_width => {width}, "
                     f"premake => {self.random.choice((0, 1, 2, 5))})")

    def leaf(self):
        """One of the partitions."""
        return self.value("SELECT partition::text FROM obix.partition_status ORDER BY random() LIMIT 1")

    def do_vacuum(self):
        options = self.random.choice(("", "(FREEZE)", "(INDEX_CLEANUP ON)", "(ANALYZE)"))
        self.execute(f"VACUUM {options} {self.random.choice((self.leaf(), self.some_outbox() + '_default'))}")

    def do_analyze(self):
        self.execute(f"ANALYZE {self.random.choice((self.leaf(), self.some_outbox()))}")

    def do_hold(self):
        """A session that has read the table, and stays."""
        self.execute("BEGIN")
        self.execute(f"SELECT count(*) FROM {self.some_outbox()} WHERE sequence < 10")
        self.pause(1.5)
        self.execute("COMMIT")

    def do_lock(self):
        """Locks that keep maintenance, but nobody else, waiting."""
        self.execute("BEGIN")
        self.execute(f"LOCK TABLE ONLY {self.some_outbox()}_default IN ROW EXCLUSIVE MODE")
        self.pause(1)
        self.execute("COMMIT")

    def do_status(self):
        for view in ("outbox_status", "partition_status", "consumer_status", "dead_letter", "rebuild_progress"):
            self.execute(f"SELECT * FROM obix.{view}")

    def do_extra_outbox(self):
        """More outboxes than there is room for, some of them rolled back."""
        name = f"x_{self.random.randrange(6)}"
        what = self.random.random()
        if what < 0.5:
            self.execute("BEGIN")
            self.execute(f"SELECT obix.create_outbox('{name}', 5, 1)")
            self.execute(f"SELECT obix.publish('{name}', '{{}}')")
            self.execute(self.random.choice(("COMMIT", "ROLLBACK")))
        elif what < 0.8:
            self.execute(f"SELECT obix.drop_outbox('{name}', force => true)")
        else:
            self.execute(f"SELECT count(obix.publish('{name}', '{{}}')) FROM generate_series(1, 20)")

    def do_extra_consumer(self):
        """More consumers than there is room for."""
        name = f"x_{self.random.randrange(8)}"
        what = self.random.random()
        if what < 0.5:
            self.execute("BEGIN")
            handler = ", handler => 'app.x_none'" if self.chance(0.5) else ""
            self.execute(f"SELECT obix.create_consumer('{name}', '{self.some_outbox()}'{handler}, types => '{{none}}')")
            self.execute(self.random.choice(("COMMIT", "ROLLBACK")))
        elif what < 0.8:
            self.execute(f"SELECT obix.drop_consumer('{name}')")
        else:
            self.execute(f"SELECT * FROM obix.fetch('{name}', 10)")

    def some_consumer(self):
        return self.random.choice(sorted(self.world.handlers) + sorted(self.world.consumers))

    def do_pause_resume(self):
        name = self.some_consumer()
        self.execute(f"SELECT obix.pause('{name}')")
        try:
            self.pause(0.5)
        finally:
            self.execute(f"SELECT obix.resume('{name}')")

    def do_alter_consumer(self):
        self.execute(f"SELECT obix.alter_consumer('{self.random.choice(sorted(self.world.handlers))}', "
                     f"batch_size => {self.random.randint(1, 300)})")

    def do_requeue(self):
        """Let dead letters go."""
        for name, sequence in self.rows("SELECT consumer, sequence FROM obix.dead_letter WHERE state = 'failed' "
                                        "ORDER BY random() LIMIT 20"):
            self.execute(f"SELECT obix.requeue('{name}', {sequence})")

    def do_reindex(self):
        self.execute(f"REINDEX TABLE {self.random.choice(('', 'CONCURRENTLY'))} {self.leaf()}")

    def do_parallel(self):
        """Use up worker slots."""
        self.execute("BEGIN")
        for setting in ("parallel_setup_cost = 0", "parallel_tuple_cost = 0", "min_parallel_table_scan_size = 0",
                        "max_parallel_workers_per_gather = 4"):
            self.execute("SET LOCAL " + setting)
        self.execute("SELECT count(*), pg_sleep(0) FROM app.effect WHERE sequence % 3 = 1")
        self.execute("COMMIT")
