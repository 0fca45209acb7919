#!/usr/bin/env python3
"""Memory and disk of a lease, of a waiting ticket, and of a call that stays open while its ticket waits.

    cargo build --release && python3 benches/memory.py [PROGRAM]

A gate beside the fleet of `kvgate demo` is filled with LEASES leases and then with WAITERS waiting
tickets, with ids as long as a rollout's; then CALLS acquires wait, each on a connection of its own. Memory
is what the process holds (VmRSS) after each. Standard library only.
"""

import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

LEASES = 100_000
WAITERS = 50_000
CALLS = 9_000
BATCH = 1_000
PATIENCE_S = 60
ROOT = pathlib.Path(__file__).resolve().parents[1]


def start(program, arguments, log):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    environment["NO_COLOR"] = "1"
    return subprocess.Popen(
        [str(program), *arguments], stdin=subprocess.DEVNULL, stderr=log.open("w"), env=environment
    )


def until(what, look):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    sys.exit(f"{what} did not come about")


def call(address, method, path, body=None):
    connection = http.client.HTTPConnection(address, timeout=30)
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        connection.request(method, path, body and json.dumps(body), headers)
        return json.loads(connection.getresponse().read() or "{}")
    finally:
        connection.close()


def request(kind, number, tokens):
    return {
        "ticket_id": f"run-1/step-12/{kind}-{number:08}",
        "session_id": f"session-{number // 8:06}",
        "reservation_tokens": tokens,
        "request_id": f"rid-{number:012}",
        "client": "rollout-3",
        "ttl_s": 3600,
    }


def fill(address, kind, count, tokens):
    for first in range(0, count, BATCH):
        operations = [
            {"op": "acquire", **request(kind, number, tokens)} for number in range(first, first + BATCH)
        ]
        results = call(address, "POST", "/v1/batch", {"operations": operations})["results"]
        if any(result["body"].get("action") != kind for result in results):
            sys.exit(f"not every ticket was told {kind}: {results[0]}")


def open_calls(address, tokens):
    """Acquires that are held open: each on a connection of its own, as a client without a pool makes them."""
    host, port = address.rsplit(":", 1)
    connections = []
    for number in range(CALLS):
        body = json.dumps({**request("call", number, tokens), "wait_s": 60})
        head = f"POST /v1/leases HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        connection = socket.create_connection((host, int(port)))
        connection.sendall(f"{head}User-Agent: memory\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        connections.append(connection)
    until("all calls wait", lambda: waiting_calls(address) == CALLS)
    return connections


def waiting_calls(address):
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", "/metrics")
        return int(re.search(r"^kvgate_http_waiting_calls (\d+)", connection.getresponse().read().decode(), re.M)[1])
    finally:
        connection.close()


def resident(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024


def measure(program, folder, running):
    log = folder / "demo.log"
    running.append(start(program, ["demo", "--listen", "127.0.0.1:0", "--sessions", "0", "--data", folder / "demo"], log))
    router = until("a fleet", lambda: re.search(r'router="?(http://[0-9.:]+)', log.read_text()))[1]
    data = folder / "data"
    gate = start(
        program,
        ["serve", "--listen", "127.0.0.1:0", "--data", data, "--router", router, "--program-admission"]
        + ["--claim-grace-s", "60", "--admission-max-wait-s", "3600"],
        folder / "gate.log",
    )
    running.append(gate)
    address = until("a gate", lambda: (data / "address").exists() and (data / "address").read_text().split())[0]
    state = until("a reading", lambda: (found := call(address, "GET", "/v1/state")).get("budget", {}).get("ceiling") and found)
    empty = resident(gate)
    fill(address, "admit", LEASES, 1)
    leases = resident(gate)
    fill(address, "wait", WAITERS, state["budget"]["ceiling"])
    waiters = resident(gate)
    connections = open_calls(address, state["budget"]["ceiling"])
    calls = resident(gate)
    for connection in connections:
        connection.close()
    mib = 1 << 20
    print(f"empty {empty / mib:.0f} MiB, {LEASES} leases {leases / mib:.0f} MiB, and {WAITERS} waiters {waiters / mib:.0f} MiB,")
    print(f"and {CALLS} open calls {calls / mib:.0f} MiB: {(leases - empty) / LEASES:.0f} bytes a lease,")
    print(f"{(waiters - leases) / WAITERS:.0f} a waiter, {(calls - waiters) / CALLS:.0f} an open call; disk:")
    for path in sorted(data.iterdir()):
        print(f"  {path.name} {path.stat().st_size / mib:.1f} MiB")


def main():
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/kvgate").resolve()
    running = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        try:
            measure(program, pathlib.Path(name), running)
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(15)


if __name__ == "__main__":
    main()
