#!/usr/bin/env python3
"""What 500 connections that send one byte of a head every 5 s cost 20 callers that acquire and release.

    cargo build --release && python3 benches/slow_heads.py [PROGRAM]

Five rounds without and with them, in turn; loopback only. Standard library only.
"""

import http.client
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROUNDS, ROUND_S = 5, 10
CALLERS, SLOW, EVERY_S = 20, 500, 5
HEAD = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Pad: " + b"a" * 4096


def caller(address, name, until, times):
    """Pairs of acquire and release, with the time of each acquire."""
    connection = http.client.HTTPConnection(address, timeout=30)
    headers = {"Content-Type": "application/json"}
    number = 0
    while time.monotonic() < until:
        number += 1
        body = json.dumps({"ticket_id": f"{name}-{number}", "session_id": name, "reservation_tokens": 1, "wait_s": 0})
        began = time.perf_counter()
        connection.request("POST", "/v1/leases", body, headers)
        answer = json.loads(connection.getresponse().read())
        times.append(time.perf_counter() - began)
        if "lease_id" in answer:
            connection.request("POST", f"/v1/leases/{answer['lease_id']}/release")
            connection.getresponse().read()
        time.sleep(0.01)


def slow(address, until):
    """Opens the slow connections, and opens anew those that were closed."""
    host, port = address.split(":")
    open_ones = []
    sent = 0
    while time.monotonic() < until:
        while len(open_ones) < SLOW:
            one = socket.create_connection((host, int(port)))
            one.setblocking(False)
            open_ones.append(one)
        alive = []
        for one in open_ones:
            try:
                one.send(HEAD[sent % len(HEAD) : sent % len(HEAD) + 1])
                alive.append(one)
            except OSError:
                one.close()
        open_ones = alive
        sent += 1
        time.sleep(min(EVERY_S, max(0, until - time.monotonic())))
    for one in open_ones:
        one.close()


def one_round(address, number, with_slow):
    until = time.monotonic() + ROUND_S
    times = []
    threads = [threading.Thread(target=caller, args=(address, f"r{number}-{c}", until, times)) for c in range(CALLERS)]
    if with_slow:
        threads.append(threading.Thread(target=slow, args=(address, until)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.sort()
    return times[len(times) // 2] * 1e3, times[len(times) * 99 // 100] * 1e3, len(times)


def main():
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/kvgate").resolve()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    with tempfile.TemporaryDirectory(dir=".") as name:
        data = pathlib.Path(name)
        arguments = ["demo", "--sessions", "0", "--listen", "127.0.0.1:0", "--data", data]
        child = subprocess.Popen([program, *arguments], stderr=subprocess.DEVNULL, env=environment)
        try:
            while not (data / "address").exists():
                time.sleep(0.05)
            address = (data / "address").read_text().split()[0]
            time.sleep(3)
            print(f"load {os.getloadavg()[0]:.1f}")
            found = {False: [], True: []}
            for number in range(2 * ROUNDS):
                with_slow = number % 2 == 1
                p50, p99, pairs = one_round(address, number, with_slow)
                found[with_slow].append((p50, p99))
                print(f"{'with' if with_slow else 'without'}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, {pairs} acquires", flush=True)
            for with_slow, rounds in found.items():
                p50, p99 = (statistics.median(column) for column in zip(*rounds))
                print(f"medians {'with' if with_slow else 'without'}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
        finally:
            child.terminate()
            child.wait(15)


if __name__ == "__main__":
    main()
