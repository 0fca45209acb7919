#!/usr/bin/env python3
"""Real Prometheus on the demo: every panel and every rule gives data.

Starts `kvgate demo`, lets Prometheus scrape it for a minute, and then asks Prometheus for each query of
the dashboard and each expression of the rules, alerts without their bounds. It also holds that the
metrics pass the linter, that the rules and the configuration are read, that no scrape failed, and that
Prometheus saw no sample twice or out of order.

Prometheus comes from the machine, or else from the package of the distribution, which is unpacked below
the target folder and installs nothing. Standard library only.

    KVGATE_BIN                 the program; else a release build, else a debug build
    KVGATE_PROMETHEUS_SECONDS  how long is scraped, 60
"""

import json
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SECONDS = float(os.environ.get("KVGATE_PROMETHEUS_SECONDS", "60"))
DASHBOARD = ROOT / "deploy/grafana/kvgate.json"
RULES = [ROOT / "deploy/prometheus/rules.yml", ROOT / "deploy/prometheus/alerts.yml"]

# What Prometheus itself counts when a sample or a rule is not as it should be.
MUST_BE_ZERO = [
    "prometheus_target_scrapes_sample_duplicate_timestamp_total",
    "prometheus_target_scrapes_sample_out_of_bounds_total",
    "prometheus_target_scrapes_sample_out_of_order_total",
    "prometheus_rule_evaluation_failures_total",
    "prometheus_tsdb_out_of_order_samples_total",
]

# A query that stands for data when the case it looks for is absent.
STANDS_FOR = re.compile(r"absent\(([^()]*)\)")

COMPARISON = re.compile(r"==|!=|>=|<=|>|<")

# Lines of Prometheus' log that tell of its own start.
HARMLESS = ("out-of-order time window", "Failed to resize", "GOMAXPROCS", "disk quota")


class Failed(Exception):
    """A check did not hold."""


def say(text):
    print(text, flush=True)


def get(url, accept=None):
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    # Loopback only: a proxy of the environment has no part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return answer.read().decode()


def until(what, seconds, look):
    """The first true answer of `look`."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        try:
            found = look()
            if found:
                return found
        except (OSError, urllib.error.URLError):
            pass
        if time.monotonic() > deadline:
            raise Failed(f"{what} did not come about within {seconds:.0f} s")
        pause.wait(0.2)


def program():
    named = os.environ.get("KVGATE_BIN")
    places = [pathlib.Path(named)] if named else [TARGET / "release/kvgate", TARGET / "debug/kvgate"]
    for place in places:
        if place.is_file():
            return place
    raise Failed(f"there is no {places[0]}; build it with cargo build --release")


def tools():
    """Prometheus and promtool: of the machine, else unpacked from the distribution's package."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    if all(found):
        return found
    place = TARGET / "prometheus"
    unpacked = place / "usr/bin/prometheus", place / "usr/bin/promtool"
    if not all(tool.is_file() for tool in unpacked):
        unpack("prometheus", place)
    return tuple(str(tool) for tool in unpacked)


def unpack(name, place):
    """A package of the distribution, unpacked below `place`: nothing is installed."""
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise Failed(f"install {name}: this machine has no apt to take it from")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    download = ["download", name]
    if subprocess.run(["apt-get", *download], cwd=place, stdin=subprocess.DEVNULL).returncode != 0:
        # The machine's package lists are old or missing: lists of our own, so that no rights are needed.
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (place / folder).mkdir(parents=True)
        own = ["-o", f"Dir::State={place}/state", "-o", f"Dir::Cache={place}/cache"]
        subprocess.run(["apt-get", *own, "update"], cwd=place, check=True, stdin=subprocess.DEVNULL)
        subprocess.run(["apt-get", *own, *download], cwd=place, check=True, stdin=subprocess.DEVNULL)
    package = next(place.glob(f"{name}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", str(package), str(place)], check=True)
    package.unlink()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_tool(arguments, stdin=None):
    done = subprocess.run(arguments, input=stdin, capture_output=True, text=True)
    if done.returncode != 0 or (stdin and (done.stdout + done.stderr).strip()):
        raise Failed(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


class Prometheus:
    def __init__(self, binary, promtool, folder, target):
        self.folder = folder
        config = folder / "prometheus.yml"
        config.write_text(
            "global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n  evaluation_interval: 2s\n"
            f"rule_files: {json.dumps([str(rules) for rules in RULES])}\n"
            "scrape_configs:\n  - job_name: kvgate\n    static_configs:\n"
            f"      - targets: [{json.dumps(target)}]\n"
        )
        run_tool([promtool, "check", "config", str(config)])
        self.port = free_port()
        self.log = folder / "prometheus.log"
        self.process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.log.open("w"),
        )
        try:
            until("a ready Prometheus", 30, self.is_ready)
        except Failed as failed:
            raise Failed(f"{failed}:\n{self.log.read_text()}")

    def is_ready(self):
        if self.process.poll() is not None:
            raise Failed(f"Prometheus ended with {self.process.returncode}")
        return get(f"http://127.0.0.1:{self.port}/-/ready")

    def api(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        try:
            answer = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"))
        except urllib.error.HTTPError as error:
            raise Failed(f"{path} {parameters}: {error.read().decode()}")
        return answer["data"]

    def values(self, expression):
        """The samples of an expression that are numbers."""
        result = self.api("query", query=expression)["result"]
        values = [float(sample["value"][1]) for sample in result]
        return [value for value in values if not math.isnan(value)]


def without_bounds(expression):
    """The expression with its comparisons made sums, so that it has data whenever both sides have."""
    expression = STANDS_FOR.sub(r"\1", expression)
    parts = re.split(r'(\{[^}]*\}|"[^"]*")', expression)
    return "".join(part if part[:1] in ("{", '"') else COMPARISON.sub("+", part) for part in parts)


def panels():
    """Title and expression of each target of the dashboard, its variables replaced."""
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".+")
            if "$" in expression:
                raise Failed(f"panel {panel['title']!r}: unknown variable in {expression}")
            yield panel["title"], expression


def check_data(prometheus):
    empty = []
    count = 0
    for title, expression in panels():
        count += 1
        if not prometheus.values(expression):
            empty.append(f"panel {title!r}: {expression}")
    for group in prometheus.api("rules")["groups"]:
        for rule in group["rules"]:
            count += 1
            if rule["health"] != "ok":
                empty.append(f"rule {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
            expression = without_bounds(rule["query"]) if rule["type"] == "alerting" else rule["name"]
            if not prometheus.values(expression):
                empty.append(f"rule {rule['name']}: {expression}")
    if empty:
        raise Failed("without data:\n  " + "\n  ".join(empty))
    return count


def check_scrapes(prometheus):
    for target in prometheus.api("targets")["activeTargets"]:
        if target["health"] != "up" or target["lastError"]:
            raise Failed(f"{target['scrapeUrl']} is {target['health']}: {target['lastError']}")
    window = f"{max(10, int(SECONDS) - 10)}s"
    if prometheus.values(f'min_over_time(up{{job="kvgate"}}[{window}])') != [1.0]:
        raise Failed("a scrape failed")
    own = get(f"http://127.0.0.1:{prometheus.port}/metrics")
    for name in MUST_BE_ZERO:
        for line in own.splitlines():
            if re.match(rf"{name}[ {{]", line) and float(line.split()[-1]) != 0:
                raise Failed(f"Prometheus counts {line}")
    for line in prometheus.log.read_text().splitlines():
        if re.search(r"level=(warn|error)", line) and not any(words in line for words in HARMLESS):
            raise Failed(f"Prometheus says: {line}")
    figures = [
        prometheus.values(query)[0]
        for query in (
            f'count_over_time(up{{job="kvgate"}}[{window}])',
            f'max_over_time(scrape_samples_scraped{{job="kvgate"}}[{window}])',
            f'max_over_time(scrape_duration_seconds{{job="kvgate"}}[{window}])',
        )
    ]
    say("%d scrapes in %s, %d samples each, the longest %.0f ms" % (figures[0], window, figures[1], figures[2] * 1e3))


def lint(promtool, target):
    """The linter knows the older format only; the names are the same."""
    run_tool([promtool, "check", "metrics"], get(f"http://{target}/metrics", "text/plain;version=0.0.4"))


def stop(process):
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check():
    binary, promtool = tools()
    for rules in RULES:
        run_tool([promtool, "check", "rules", str(rules)])
    run_tool([promtool, "test", "rules", str(ROOT / "tests/prometheus/alerts_test.yml")])
    say("the rules are read, and alerts come when they should")
    running = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        data = folder / "data"
        log = folder / "demo.log"
        try:
            demo = subprocess.Popen(
                [str(program()), "demo", "--listen", "127.0.0.1:0", "--data", str(data)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log.open("w"),
                env={key: value for key, value in os.environ.items() if not key.startswith("KVGATE_")},
            )
            running.append(demo)
            address = data / "address"
            until("a demo that listens", 30, lambda: address.exists() and address.read_text().strip())
            target = address.read_text().split()[0]
            until("a demo that is ready", 30, lambda: get(f"http://{target}/readyz"))
            lint(promtool, target)
            prometheus = Prometheus(binary, promtool, folder, target)
            running.append(prometheus.process)
            say(f"Prometheus scrapes the demo for {SECONDS:.0f} s")
            threading.Event().wait(SECONDS)
            if demo.poll() is not None:
                raise Failed(f"the demo ended with {demo.returncode}:\n{log.read_text()}")
            lint(promtool, target)
            say(f"{check_data(prometheus)} queries and rules have data")
            check_scrapes(prometheus)
        finally:
            for process in reversed(running):
                stop(process)


if __name__ == "__main__":
    try:
        check()
    except (Failed, subprocess.CalledProcessError, OSError) as failed:
        print(f"tests/prometheus/check.py: {failed}", file=sys.stderr)
        sys.exit(1)
