"""The real binary as a child process: started, watched through its log, stopped and killed by its pid."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
"""Longest time for what a test waits for: far beyond what it needs."""
LOOK_S = 0.02
"""How often a condition that cannot tell by itself is looked at."""


def binary() -> Path:
    """The binary under test: the one that `KVGATE_BIN` names, else the debug build."""
    return Path(os.environ.get("KVGATE_BIN") or ROOT / "target" / "debug" / "kvgate").resolve()


def wait_until(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Waits until `condition` holds, and fails loudly when it does not."""
    ends_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(LOOK_S)


class Process:
    """A `kvgate` that runs. Killed at the end of the context."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
        self._child = subprocess.Popen(
            [binary(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"RUST_LOG": "info", "NO_COLOR": "1"},
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _read(self) -> None:
        assert self._child.stderr is not None
        with self._child.stderr as stderr:
            for line in stderr:
                with self._news:
                    self._lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def line_with(self, text: str) -> str:
        """The first line of the log that contains `text`."""

        def found() -> str | None:
            return next((line for line in self._lines if text in line), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or self._ended, PATIENCE_S)
            line = found()
        if line is None:
            raise AssertionError(f"no line {text!r} in the log:\n{''.join(self._lines)}")
        return line

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """SIGKILL, also to a process that stands still."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self._child.terminate()
        code = self._child.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def stand_still(self) -> None:
        """SIGSTOP; returns when the process stands still."""
        self._child.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: ") T " in stat.read_text(), "the process stands still")

    def go_on(self) -> None:
        self._child.send_signal(signal.SIGCONT)


class Fleet:
    """The demo's fleet, without its agents: a router and engines that speak real HTTP."""

    def __init__(self, data: Path, speed: float = 50.0) -> None:
        self._process = Process(
            "demo", "--listen", "127.0.0.1:0", "--data", str(data), "--sessions", "0", "--speed", str(speed)
        )
        line = self._process.line_with("the demo runs")
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        self.router = fields.get("router", "")
        self.page = fields["page"]

    def engines(self) -> dict[str, int]:
        """The engines' addresses and the tokens of their pools, the largest first."""

        def rows() -> list[dict[str, Any]]:
            try:
                items: list[dict[str, Any]] = get_json(f"{self.page}/v1/engines")["items"]
            except OSError:
                return []
            return [row for row in items if row.get("capacity")]

        wait_until(lambda: len(rows()) == 4, "the engines were read")
        return {row["url"]: int(row["capacity"]) for row in sorted(rows(), key=lambda row: -int(row["capacity"]))}

    def close(self) -> None:
        self._process.kill()


class Service:
    """`kvgate serve` at one address over several lives."""

    def __init__(self, data: Path, *arguments: str) -> None:
        # Bound and never listening: it keeps the port while no gate listens.
        self._hold = socket.socket()
        self._hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._hold.bind(("127.0.0.1", 0))
        port = self._hold.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = ["serve", "--listen", f"127.0.0.1:{port}", "--data", str(data)]
        self._arguments += ["--log-format", "json", *arguments]
        self.process: Process

    def start(self) -> None:
        """Starts and waits until it is ready and has read its fleet."""
        self.process = Process(*self._arguments)
        self.process.line_with('"message":"ready"')

    def close(self) -> None:
        self.process.kill()
        self._hold.close()

    def state(self) -> dict[str, Any]:
        return get_json(f"{self.url}/v1/state")

    def get(self, path: str) -> dict[str, Any]:
        return get_json(self.url + path)

    def wait_for_state(
        self, condition: Callable[[dict[str, Any]], bool], what: str, within_s: float = PATIENCE_S
    ) -> None:
        def holds() -> bool:
            try:
                return condition(self.state())
            except OSError:
                return False

        wait_until(holds, what, within_s)


def get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def serve_arguments(engines: Iterable[str], *more: str) -> list[str]:
    """Admission in front of these engines."""
    named = [part for engine in engines for part in ("--engine", engine)]
    return [*named, "--program-admission", *more]
