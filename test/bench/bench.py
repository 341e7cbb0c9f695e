"""
bench.py: measures obix against its peers; see README.

    bench.py --bindir DIR --folder DIR [--quick] [NAME...|all]

Without names it lists the benchmarks.  "all" runs those of the requirements,
which are all but "scale".  --quick has everything small and once: it tells whether the
benchmarks work, and nothing else.

The folder is for the server and the results: table.txt, table.json and, with
what they need measured, chart.svg.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback

import chart
import harness
import latency
import publishing
import reading
import resources
import scale

ALL = {**publishing.BENCHMARKS, **reading.BENCHMARKS, **latency.BENCHMARKS, **resources.BENCHMARKS}
BENCHMARKS = {**ALL, **scale.BENCHMARKS}


class Tee:
    """Writes to several files."""

    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)

    def flush(self):
        for file in self.files:
            file.flush()


def list_benchmarks():
    """What there is, and what it measures."""
    for name, benchmark in BENCHMARKS.items():
        print(f"  {name:<14} {benchmark.__doc__}")
    print(f"  {'all':<14} all of them but scale, and the chart")


def used_elsewhere():
    """What share of the processors is used in the second in which we do nothing."""
    def look():
        with open("/proc/stat", encoding="ascii") as stat:
            times = [int(field) for field in stat.readline().split()[1:]]
        return sum(times), times[3] + times[4]  # all, idle

    total, idle = look()
    time.sleep(1)
    total, idle = (now - before for now, before in zip(look(), (total, idle)))
    return 1 - idle / total


def compile_client(bindir, folder):
    """Compile the client; None if that cannot be done."""
    program = folder / "client"
    try:
        include, lib = (subprocess.run([pathlib.Path(bindir) / "pg_config", option], check=True, text=True,
                                       stdout=subprocess.PIPE).stdout.strip() for option in ("--includedir", "--libdir"))
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-I", include,
                        harness.HERE / "client.c", "-o", program, "-L", lib, "-lpq", "-pthread"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the client could not be compiled: {error}", file=sys.stderr)
        return None
    return program


def run(bench, name):
    """Run a benchmark; false if it broke off."""
    print(f"\n{name} -- {BENCHMARKS[name].__doc__}", file=bench.output, flush=True)
    began = time.monotonic()
    try:
        with bench.benchmark(name):
            BENCHMARKS[name](bench)
    except harness.CannotRun as why:
        bench.cannot(BENCHMARKS[name].__doc__.partition(":")[0], name, why)
        return True
    except Exception:
        print(traceback.format_exc(), file=bench.output, flush=True)
        bench.broken.append(name)
        return False
    finally:
        bench.say(f"({time.monotonic() - began:.0f} s)")
    return True


def write_results(bench, folder, what):
    """The machine-readable table, and the chart if all that it shows was measured."""
    lines = [dataclasses.asdict(line) | {"verdict": line.verdict()} for line in bench.lines]
    (folder / "table.json").write_text(json.dumps({**what, "lines": lines}, indent=1) + "\n", encoding="utf-8")
    picture = chart.draw(bench.lines, f"PostgreSQL {what['version'].split()[2]}, {what['machine']}")
    (folder / "chart.svg").unlink(missing_ok=True)
    if picture:
        (folder / "chart.svg").write_text(picture, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="measure obix against its peers")
    parser.add_argument("--bindir", required=True, help="where the programs of PostgreSQL are")
    parser.add_argument("--folder", required=True, help="for the server and the results")
    parser.add_argument("--quick", action="store_true", help="small and once: does it work?")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()

    names = list(ALL) if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"there is no benchmark {', '.join(unknown)}; without a name they are listed")
    if not names:
        list_benchmarks()
        return

    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]
    folder = pathlib.Path(options.folder)
    place = folder / "server"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, mode=0o700)
    server = harness.Server(options.bindir, place)
    what = {"machine": harness.machine(), "date": time.strftime("%Y-%m-%d %H:%M %Z"),
            "version": server.run("postgres", "--version").strip(), "settings": harness.SETTINGS.split("\n")[1:-1]}
    with open(folder / "table.txt", "w", encoding="utf-8") as table:
        output = Tee(sys.stdout, table)
        bench = harness.Bench(server, compile_client(options.bindir, folder), options.quick, output)
        print(f"{what['date']}, {what['version']}, {what['machine']}\n{'; '.join(what['settings'])}\n\n{harness.HEADER}",
              file=output, flush=True)
        busy = used_elsewhere()
        if busy > 0.2:
            bench.say(f"others use {busy:.0%} of the processors as this begins: it is noise")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        try:
            server.create()
            server.start()
            for name in names:
                if not run(bench, name):
                    server.stop("immediate")        # whatever it was in the middle of
                    server.start()
        finally:
            server.stop("immediate")
            shutil.rmtree(place, ignore_errors=True)
        met = sum(line.met is True for line in bench.lines)
        missed = [line for line in bench.lines if line.met is False]
        print(f"\n{met} targets met, {len(missed)} missed", file=output)
        for line in missed:
            print(f"missed: {line.row} {line.what}: {harness.number(line.value)}{line.unit}, {line.target}", file=output)
        if bench.broken:
            print(f"broken off: {', '.join(bench.broken)}", file=output)
    write_results(bench, folder, what)
    sys.exit(1 if bench.broken else 0)


if __name__ == "__main__":
    main()
