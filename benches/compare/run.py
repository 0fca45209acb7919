#!/usr/bin/env python3
"""kvgate beside Redis, bare axum and a Ray actor; writes the figures into docs/performance.md.

    python3 benches/compare/run.py                 all of it, about 15 minutes
    python3 benches/compare/run.py --only ray      one part anew; the others stand as they were measured
    python3 benches/compare/run.py --quick         a short look, which writes nothing
    python3 benches/compare/run.py --get           fetches Redis and Ray first, where they are missing

Parts: redis (with bare axum: open, contended, both transports), ray, kvgate (batches), syncs (the kernel's count of
syncs); and, only when named, core, restart and scale (the benches of those names). What is compared is measured in
turns, cell by cell, in rounds whose order changes. Everything stays on loopback and on the disk of the target folder,
and ends with the command. Standard library only, but for Ray, which has an environment of its own.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv

import tables

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
PAGE = ROOT / "docs/performance.md"
RAY = "ray==2.60.0"
PARTS = ("redis", "ray", "kvgate", "syncs", "core", "restart", "scale")
ON_REQUEST = ("core", "restart", "scale")
# What Redis needs beside the C library and what every Debian has: nothing is installed, so nothing is pulled in.
REDIS_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
RAY_CELLS = (("open", 1), ("open", 64), ("open", 256), ("contended", 64))
SYNC_CELLS = (1, 64)
# Callers, leases that fit, and how long each is held in ms.
GRANT_CELLS = ((4, 1, 0), (64, 16, 0), (64, 16, 20))

# How to fetch a package of the distribution and how to wait, as for Prometheus.
spec = importlib.util.spec_from_file_location("shared", ROOT / "tests/prometheus/check.py")
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
Failed = shared.Failed

PLACE = shared.TARGET / "compare"
RAY_PYTHON = PLACE / "ray/bin/python"


def say(text):
    print(text, file=sys.stderr, flush=True)


# What is needed


def redis_server():
    """The program: named, of the machine, or unpacked; None when there is none."""
    unpacked = PLACE / "redis/redis-tools/usr/bin/redis-server"
    named = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
    return named or (str(unpacked) if unpacked.is_file() else None)


def environment():
    """Of all programs: the libraries of an unpacked Redis, and no setting of a kvgate."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KVGATE_", "RAY_"))}
    own["RUST_BACKTRACE"] = "0"
    libraries = [str(path) for path in (PLACE / "redis").glob("*/usr/lib/*-linux-gnu")]
    if libraries:
        own["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *filter(None, [own.get("LD_LIBRARY_PATH")])])
    return own


def fetch():
    if redis_server() is None:
        for name in REDIS_PACKAGES:
            shared.unpack(name, PLACE / "redis" / name)
        # The server is the same program as a tool of the other package, under another name.
        tools = PLACE / "redis/redis-tools/usr/bin"
        (tools / "redis-server").unlink(missing_ok=True)
        (tools / "redis-server").symlink_to("redis-check-rdb")
    if not RAY_PYTHON.exists():
        venv.create(PLACE / "ray", with_pip=True)
        subprocess.run([RAY_PYTHON, "-m", "pip", "install", "--quiet", RAY], check=True, stdin=subprocess.DEVNULL)


def missing(parts):
    """What the parts need and is not here, with the way to get it."""
    found = []
    if {"redis", "syncs"} & set(parts) and redis_server() is None:
        found.append(
            "Redis: install the package redis-server, name the program by REDIS_SERVER, or let --get unpack it"
        )
    if "ray" in parts and not RAY_PYTHON.exists():
        found.append(f"Ray: let --get make an environment below target/ with {RAY} by pip")
    if "syncs" in parts and not shutil.which("strace"):
        found.append("strace: install the package strace")
    return found


def in_memory(folder):
    """Whether the folder lies on a file system that has no disk, where a sync costs nothing."""
    kinds = {}
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        kinds[place] = kind
    places = [str(folder), *map(str, folder.parents)]
    return next((kinds[place] for place in places if place in kinds), "") in ("tmpfs", "ramfs")


# Programs


def build(benches):
    """The programs by name. Cargo says where they are."""
    command = ["cargo", "bench", "--locked", "--no-run", "--message-format=json-render-diagnostics", "-p", "kvgate"]
    command += [word for name in benches for word in ("--bench", name)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
    if done.returncode != 0:
        raise Failed("the programs cannot be built: see above")
    found = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            message = json.loads(line)
            if message.get("executable"):
                found[message["target"]["name"]] = message["executable"]
    return found


def run(command, seconds, **more):
    """What a program prints. It and all that it started end with its time."""
    command = [str(word) for word in command]
    with tempfile.TemporaryFile("w+", dir=PLACE) as errors:
        process = subprocess.Popen(
            command,
            cwd=PLACE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**environment(), **more},
        )
        try:
            told, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"{' '.join(command)} did not end within {seconds:.0f} s") from error
            raise
        if process.returncode != 0:
            errors.seek(0)
            raise Failed(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()[-2000:]}")
    return told


def end(process):
    """A process that is a session of its own, and all others of that session: first asked, then made to."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    # Workers of Ray have groups of their own, and outlive it when it is ended while it starts them.
    for pid in [int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait(10)


def objects(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


class Programs:
    """The load tools, each for one cell and one round."""

    def __init__(self, built, seconds):
        self.built = built
        self.seconds = seconds

    def kvgate(self, number, scenario, connections, systems=("kvgate",), transport="tcp", **flags):
        connections = connections if isinstance(connections, str) else str(connections)
        command = [
            self.built["kvgate"],
            "bench",
            "--json",
            "--rounds=1",
            f"--seconds={self.seconds}",
            f"--data={PLACE}",
        ]
        command += [f"--scenario={scenario}", f"--connections={connections}", f"--transport={transport}"]
        command += [f"--systems={','.join(systems)}", *(f"--{name}={value}" for name, value in flags.items())]
        lines = objects(run(command, 60 + 20 * self.seconds))
        machine = next(line["machine"] for line in lines if "machine" in line)
        cells = [{**line, "round": number, "machine": machine} for line in lines if "pairs" in line]
        if any(cell.get("refused") or cell.get("bypassed") for cell in cells):
            raise Failed(f"callers were refused or told to go on without a lease: {cells}")
        return cells

    def redis(self, number, scenario, connections, transport="tcp", **flags):
        command = [self.built["redis"], "--bench", "--rounds=1", f"--first-round={number}", f"--seconds={self.seconds}"]
        command += [f"--server={redis_server()}", f"--scenario={scenario}", f"--connections={connections}"]
        command += [f"--transport={transport}", *(f"--{name}={value}" for name, value in flags.items())]
        # A server that is ended from outside leaves its files.
        with tempfile.TemporaryDirectory(dir=PLACE) as folder:
            return objects(run([*command, f"--data={folder}"], 60 + 10 * self.seconds))

    def ray(self, number, cells):
        # A short path, since Ray keeps sockets there; its home, too, so that nothing is left behind.
        with tempfile.TemporaryDirectory(prefix="ray-") as folder:
            command = [RAY_PYTHON, HERE / "ray_load.py", f"--folder={folder}", f"--round={number}"]
            command += [
                f"--seconds={1.5 * self.seconds}",
                "--cells=" + ",".join(f"{name}:{count}" for name, count in cells),
            ]
            # A single node that keeps to loopback, and tells nobody.
            own = {"HOME": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
            return objects(run(command, 120 + 10 * self.seconds, **own))


# Parts


def rounds(count, deadline):
    """Numbers of rounds, until the time is over; the first always runs."""
    for number in range(1, count + 1):
        if number > 1 and time.monotonic() > deadline:
            say(f"the time is over after {number - 1} of {count} rounds")
            return
        say(f"  round {number} of {count}")
        yield number


def measure_redis(programs, plan):
    records = [{"about": about(programs)}]
    run([programs.built["redis"], "--check", f"--server={redis_server()}"], 60)
    cells = [("open", "tcp", count) for count in plan.counts]
    cells += [("contended", "tcp", count) for count in plan.contended]
    cells += [("open", "unix", count) for count in plan.unix]
    for number in rounds(plan.rounds, plan.deadline):
        for place, (scenario, transport, count) in enumerate(cells):
            # Bare handlers know no queue.
            systems = ["kvgate", "axum"] if scenario == "open" else ["kvgate"]
            ordered = systems[:: 1 if number % 2 else -1]
            turns = [
                functools.partial(programs.kvgate, number, scenario, count, ordered, transport),
                functools.partial(programs.redis, number, scenario, count, transport),
            ]
            # Nobody is always the first.
            for turn in turns[:: 1 if (number + place) % 2 else -1]:
                records += turn()
    return records


def measure_ray(programs, plan):
    records = []
    for number in rounds(plan.rounds, plan.deadline):
        if number % 2 == 0:
            records += programs.ray(number, plan.ray)
        for scenario, count in plan.ray:
            records += programs.kvgate(number, scenario, count)
        if number % 2 == 1:
            records += programs.ray(number, plan.ray)
    return records


def measure_kvgate(programs, plan):
    records = []
    for number in rounds(plan.rounds, plan.deadline):
        records += programs.kvgate(number, "batch", plan.batch)
        for callers, slots, hold_ms in plan.grants:
            records += programs.kvgate(number, "contended", callers, slots=slots, **{"hold-ms": hold_ms})
    return records


def machine(programs):
    """What the machine can do now, for benches that do not look themselves."""
    command = [programs.built["kvgate"], "bench", "--json", "--rounds=1", "--seconds=0.5", "--connections=1"]
    lines = objects(run([*command, "--scenario=open", "--systems=axum", f"--data={PLACE}"], 60))
    return [line for line in lines if "machine" in line]


def measure_syncs(programs, plan):
    """Both servers under strace, which counts the calls that sync; their starts and ends are in the count."""
    records = []
    with tempfile.TemporaryDirectory(dir=PLACE) as name:
        folder = pathlib.Path(name)
        counts = folder / "counts"
        under = f"strace -f --seccomp-bpf -c -e trace=fsync,fdatasync,msync,sync_file_range -o {counts}"
        for connections in plan.syncs:
            [redis] = programs.redis(1, "open", connections, under=under)
            log_bytes = redis["log_bytes_per_pair"] * redis["pairs"]
            records.append({**redis, "syncs": tables.of_strace(counts.read_text()), "log_bytes": log_bytes})
            with traced_gate(programs, folder / f"gate-{connections}", under.split()) as (url, pid):
                [kvgate] = programs.kvgate(1, "open", connections, url=url, pid=pid)
            commits = kvgate["commits_per_s"] * kvgate["seconds"]
            records.append({**kvgate, "syncs": tables.of_strace(counts.read_text()), "commits": commits})
    for one in records:
        # What answers before it syncs has no place in the comparison. Two changes of one caller cannot share a sync.
        least = 2 * one["pairs"] if one["connections"] == 1 else 2 * one["pairs"] / one["connections"]
        if one["syncs"] < least:
            raise Failed(f"{one['system']} made {one['pairs']} pairs with {one['syncs']} syncs: too few to be durable")
    return records


@contextlib.contextmanager
def traced_gate(programs, folder, under):
    """A gate below a tracer, beside the fleet of the demo."""
    folder.mkdir()
    running = []

    def start(name, command):
        log = folder / f"{name}.log"
        running.append(
            subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log.open("w"),
                env={**environment(), "NO_COLOR": "1"},
                cwd=folder,
                start_new_session=True,
            )
        )
        return log

    try:
        kvgate = programs.built["kvgate"]
        demo = start("demo", [kvgate, "demo", "--listen=127.0.0.1:0", "--sessions=0", f"--data={folder / 'demo'}"])
        router = shared.until("a fleet", 30, lambda: re.search(r'router="?(http://[0-9.:]+)', demo.read_text()))[1]
        data = folder / "data"
        flags = ["serve", "--listen=127.0.0.1:0", f"--data={data}", f"--router={router}", "--program-admission"]
        start("gate", [*under, kvgate, *flags])
        address = data / "address"
        told = shared.until("a gate that listens", 30, lambda: address.exists() and address.read_text().split())
        url = told[0] if "://" in told[0] else f"http://{told[0]}"
        shared.until("a gate that is ready", 30, lambda: shared.get(f"{url}/readyz"))
        children = pathlib.Path(f"/proc/{running[-1].pid}/task/{running[-1].pid}/children").read_text().split()
        yield url, children[0]
    finally:
        for process in reversed(running):
            end(process)


def measure_core(programs, plan):
    return machine(programs) + tables.of_core(run([programs.built["core"], *plan.bench_flag], 300))


def measure_restart(programs, plan):
    return machine(programs) + tables.of_restart(run([programs.built["restart"], *plan.bench_flag], 300))


def measure_scale(programs, plan):
    return objects(run([programs.built["scale"], *plan.bench_flag, "--json"], 1800))


MEASURES = {
    "redis": measure_redis,
    "ray": measure_ray,
    "kvgate": measure_kvgate,
    "syncs": measure_syncs,
    "core": measure_core,
    "restart": measure_restart,
    "scale": measure_scale,
}


def about(programs):
    """What was measured with."""
    redis = run([redis_server(), "--version"], 10).split()
    version = next(word[2:] for word in redis if word.startswith("v="))
    kvgate = run([programs.built["kvgate"], "--version"], 10).split()[-1]
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    commit = f" ({done.stdout.strip()})" if done.returncode == 0 else ""
    day = time.strftime("%Y-%m-%d")
    return {
        "kvgate": kvgate + commit,
        "Redis": version,
        "Ray": RAY.split("==")[1],
        "Linux": platform.release(),
        "on": day,
    }


# The whole


class Plan:
    """How much is measured."""

    def __init__(self, arguments):
        quick = arguments.quick
        self.rounds = arguments.rounds or (1 if quick else 5)
        self.seconds = arguments.seconds or (0.5 if quick else 2.0)
        self.counts = (1, 64) if quick else tables.COUNTS
        self.contended = (64,) if quick else tables.CONTENDED
        self.unix = (64,) if quick else (64, 256)
        self.ray = (("open", 64),) if quick else RAY_CELLS
        self.batch = "4" if quick else "1,4,16"
        self.syncs = SYNC_CELLS
        self.grants = GRANT_CELLS[:1] if quick else GRANT_CELLS
        # Without it a bench of the project is a short look.
        self.bench_flag = [] if quick else ["--bench"]
        self.deadline = time.monotonic() + 60 * arguments.minutes


def kept(folder):
    """What was measured before, by part."""
    found = {}
    for name in PARTS:
        with contextlib.suppress(FileNotFoundError):
            found[name] = objects((folder / f"{name}.jsonl").read_text())
    return found


def settle(load_max=2.0, seconds=100):
    """Waits until what was built or measured before no longer shows in the load, but not for others for ever."""
    end_of_it = time.monotonic() + seconds
    while (load := os.getloadavg()[0]) > load_max and time.monotonic() < end_of_it:
        say(f"  waits for a quiet machine: load {load:.1f}")
        time.sleep(10)


def measure(arguments, folder):
    """Whether every part was measured. One that fails does not end the others."""
    parts = [name for name in PARTS if name in arguments.only]
    benches = ["redis", *(name for name in ON_REQUEST if name in parts)]
    built = build(benches)
    plan = Plan(arguments)
    programs = Programs(built, plan.seconds)
    failed = []
    for name in parts:
        say(f"{name}:")
        if not arguments.quick:
            settle()
        try:
            records = MEASURES[name](programs, plan)
            if not records:
                raise Failed("nothing was measured")
        except (Failed, OSError, ValueError, KeyError) as error:
            say(f"{name} failed: {error}")
            failed.append(name)
            continue
        whole = folder / f"{name}.jsonl"
        whole.with_suffix(".new").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        whole.with_suffix(".new").replace(whole)
    if failed:
        say(f"not measured: {', '.join(failed)}; run again with --only {','.join(failed)}")
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PART,..", help="parts to measure", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, help="5; 1 with --quick")
    parser.add_argument("--seconds", type=float, help="length of one measurement: 2; 0.5 with --quick")
    parser.add_argument("--minutes", type=float, default=16, help="no round begins later than this (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short look: prints the tables, writes nothing")
    parser.add_argument("--get", action="store_true", help="fetch what is missing")
    parser.add_argument("--write", action="store_true", help="only write the page, from what was measured before")
    arguments = parser.parse_args()
    arguments.only = arguments.only or [name for name in PARTS if name not in ON_REQUEST]
    for name in set(arguments.only) - set(PARTS):
        parser.error(f"there is no part {name}; parts are {', '.join(PARTS)}")
    folder = PLACE / ("quick" if arguments.quick else "figures")
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.get:
        fetch()
    good = True
    if not arguments.write:
        lacks = missing(arguments.only)
        if lacks:
            sys.exit("\n".join(["This is missing:", *lacks]))
        if in_memory(PLACE):
            sys.exit(f"{PLACE} lies in memory, where a sync costs nothing: set CARGO_TARGET_DIR to a folder on a disk")
        good = measure(arguments, folder)
    parts = kept(folder)
    if arguments.quick:
        print("\n".join(f"{name}\n\n{write(parts)}" for name, write in tables.WRITERS.items()))
    else:
        PAGE.write_text(tables.document(PAGE.read_text(), parts))
        say(f"written: {PAGE.relative_to(ROOT)}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    # An end that is asked for is one that cleans up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (Failed, subprocess.CalledProcessError) as error:
        sys.exit(f"run.py: {error}")
