#!/usr/bin/env python3
"""Size of the program, and its time to ready with an empty store and without a fleet.

    cargo build --release && python3 benches/start.py [PROGRAM]

The time runs from the start of the process to the first 200 of /readyz. Standard library only.
"""

import http.client
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

STARTS = 21
PATIENCE_S = 30
ROOT = pathlib.Path(__file__).resolve().parents[1]


def stripped_bytes(program, folder):
    copy = folder / "stripped"
    shutil.copy(program, copy)
    done = subprocess.run(["strip", str(copy)], capture_output=True)
    return copy.stat().st_size if done.returncode == 0 else None


def is_ready(address):
    try:
        connection = http.client.HTTPConnection(address, timeout=1)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def start(program, data):
    """Seconds to ready of one start; the process is stopped in order afterwards."""
    address_file = data / "address"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    began = time.perf_counter()
    child = subprocess.Popen(
        [program, "serve", "--listen", "127.0.0.1:0", "--data", data],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        while True:
            if address_file.exists() and is_ready(address_file.read_text().split()[0]):
                return time.perf_counter() - began
            if child.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                sys.exit(f"{program} did not become ready")
            time.sleep(0.0005)
    finally:
        child.terminate()
        child.wait(15)


def main():
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/kvgate").resolve()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = pathlib.Path(name)
        size = stripped_bytes(program, folder)
        times = sorted(start(program, folder / f"data-{number}") for number in range(STARTS))
    mib = 1 << 20
    shown = "not known" if size is None else f"{size / mib:.1f} MiB"
    print(f"{program.stat().st_size / mib:.1f} MiB as built, {shown} without symbols")
    print(f"ready after {statistics.median(times) * 1e3:.0f} ms, at worst {times[-1] * 1e3:.0f} ms, of {STARTS} starts; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
