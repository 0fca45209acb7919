"""Tables of docs/performance.md from what was measured, and nothing else: no clock, no process, no network.

A figure is one JSON object. Ratios are taken within a round, from two measurements that were made one after the other,
and then the median over the rounds: rounds differ more than systems do.
"""

import dataclasses
import re
import statistics
import zlib

COUNTS = (1, 16, 64, 256, 1024)
CONTENDED = (64, 256)
SYSTEMS = {"kvgate": "kvgate", "redis": "Redis", "axum": "bare axum", "ray": "Ray actor"}
NOT_MEASURED = "–"


# What was measured


def cells(records, **wanted):
    """Measurements with these properties."""
    return [one for one in records if "pairs" in one and all(one.get(name) == value for name, value in wanted.items())]


def field(record, path):
    """A figure by the path of its names, such as `acquire_ms.p99`; None where it was not measured."""
    for name in path.split("."):
        record = record.get(name) if record is not None else None
    return record


def values(records, path, **wanted):
    found = (field(one, path) for one in cells(records, **wanted))
    return [value for value in found if value is not None]


def ratios(records, above, below, path="pairs_per_s", **wanted):
    """What `above` has for each one of `below`, round by round."""

    def by_round(system):
        return {one["round"]: field(one, path) for one in cells(records, system=system, **wanted)}

    tops, bottoms = by_round(above), by_round(below)
    both = sorted(set(tops) & set(bottoms))
    return [tops[number] / bottoms[number] for number in both if tops[number] is not None and bottoms[number]]


def commit_ratios(records):
    """The p50 of one caller's acquire against a bare commit of one row, taken right before it."""
    alone = cells(records, system="kvgate", scenario="open", transport="tcp", connections=1)
    return [field(one, "acquire_ms.p50") / one["machine"]["redb_commit_p50_ms"] for one in alone]


# What is asked


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure of the project's goals, and what was measured of it in each round."""

    figure: str
    must: float
    aim: float | None
    measured: list
    at_least: bool = True
    unit: str = ""
    noisy: bool = False

    def reaches(self, bound):
        middle = statistics.median(self.measured)
        return middle >= bound if self.at_least else middle <= bound

    def verdict(self):
        if not self.measured:
            return "not measured"
        if self.aim is not None and self.reaches(self.aim):
            word = "aim"
        else:
            word = "must" if self.reaches(self.must) else "**missed**"
        return f"{word}, noisy" if self.noisy else word

    def row(self):
        sign = "≥" if self.at_least else "≤"
        aim = NOT_MEASURED if self.aim is None else f"{sign} {number(self.aim)}{self.unit}"
        return [
            self.figure,
            f"{sign} {number(self.must)}{self.unit}",
            aim,
            spread(self.measured, self.unit),
            self.verdict(),
        ]


def goals(parts):
    """The goals table's rows, in its order."""
    redis, ray, kvgate = (parts.get(name, []) for name in ("redis", "ray", "kvgate"))
    found = []

    def ask(part, figure, must, aim, measured, **more):
        found.append(Goal(figure, must, aim, measured, noisy=bool(measured) and not is_quiet(part), **more))

    for count, must, aim in ((16, 1.0, 1.25), (64, 1.1, 1.35), (256, 1.1, 1.8), (1024, 0.7, 1.0)):
        measured = ratios(redis, "kvgate", "redis", scenario="open", transport="tcp", connections=count)
        ask(redis, f"pairs/s against Redis, {number(count)} connections", must, aim, measured)
    for count in CONTENDED:
        measured = ratios(redis, "kvgate", "redis", scenario="contended", transport="tcp", connections=count)
        ask(redis, f"the same with contention, {count} connections", 1.4, 1.9, measured)
    of_ray = {"scenario": "open", "connections": 64}
    ask(ray, "pairs/s against a Ray actor, 64 connections", 40, 70, ratios(ray, "kvgate", "ray", **of_ray))
    faster = ratios(ray, "ray", "kvgate", "acquire_ms.p50", **of_ray)
    ask(ray, "acquire p50 of a Ray actor against kvgate's, 64 connections", 40, 70, faster)
    share = ratios(redis, "kvgate", "axum", scenario="open", transport="tcp", connections=256)
    ask(redis, "share of bare axum's pairs/s, 256 connections", 0.55, 0.8, share)
    alone = commit_ratios(redis)
    ask(redis, "acquire p50 at 1 connection, in bare one-row commits", 1.6, 1.3, alone, at_least=False)
    ask(kvgate, "pairs/s in batches", 60_000, 150_000, best(kvgate, "pairs_per_s", system="kvgate", scenario="batch"))
    contended = {"system": "kvgate", "scenario": "contended", "transport": "tcp", "connections": 64}
    for since, path in (("is answered", "grant_after_commits.p99"), ("was sent", "grant_commits.p99")):
        figure = f"grant p99 after a release {since}, 64 callers on 16 leases, in commits"
        ask(redis, figure, 2, 1, values(redis, path, **contended), at_least=False)
    for name in ("core", "restart", "scale"):
        for one in figures(parts.get(name, [])):
            if one.get("must") is not None:
                at_least = one["sense"] == "at_least"
                unit = f" {one['unit']}".rstrip()
                ask(
                    parts[name],
                    one["figure"],
                    one["must"],
                    one.get("aim"),
                    [one["value"]],
                    at_least=at_least,
                    unit=unit,
                )
    return found


def best(records, path, **wanted):
    """The rounds of the number of connections whose median is the highest."""
    counts = {one["connections"] for one in cells(records, **wanted)}
    rounds = (values(records, path, connections=count, **wanted) for count in counts)
    return max((measured for measured in rounds if measured), key=statistics.median, default=[])


def figures(records):
    return [one for one in records if "figure" in one]


def is_quiet(records):
    """Whether the machine was quiet when the first measurement of these began."""
    machine = machine_of(records)
    return machine is not None and bool(machine["quiet"])


def machine_of(records):
    return next((one["machine"] for one in records if one.get("machine")), None)


# What others print


def of_core(text):
    """Figures from the first table of the bench `core`: a row for each number of waiters, a column for each command."""
    table = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    if not table:
        return []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    names = rows[0][1:]
    by_size = {int(row[0].replace(",", "")): [first_number(cell) for cell in row[1:]] for row in rows[2:]}
    small, large = min(by_size), max(by_size)
    slowest = max(range(len(names)), key=lambda n: by_size[small][n])
    growth = [by_size[large][n] / by_size[small][n] for n in range(len(names))]
    steepest = max(range(len(names)), key=lambda n: growth[n])
    found = [
        {
            "figure": f"core, slowest command ({names[slowest]}) at {number(small)} waiters",
            "value": by_size[small][slowest] / 1e3,
            "unit": "µs",
            "sense": "at_most",
            "must": 1,
            "aim": 0.5,
        }
    ]
    if large > small:
        found.append(
            {
                "figure": f"core, steepest growth ({names[steepest]}) to {number(large)} waiters",
                "value": growth[steepest],
                "unit": "times",
                "sense": "at_most",
                "must": 4,
                "aim": 2,
            }
        )
    return found


def of_restart(text):
    """The figure of `cargo bench --bench restart`: the worst of its starts."""
    found = re.search(r"median ([0-9.]+) s, worst ([0-9.]+) s of ([0-9]+) starts", text)
    filled = re.search(r"filled with ([0-9]+) leases and ([0-9]+) waiting", text)
    if not found or not filled:
        return []
    leases, waiting = (number(int(count)) for count in filled.groups())
    figure = f"ready after `kill -9` with {leases} leases and {waiting} waiters, worst of {found[3]}"
    return [{"figure": figure, "value": float(found[2]), "unit": "s", "sense": "at_most", "must": 3, "aim": 1}]


def of_strace(text):
    """Calls that sync, from the summary of `strace -c`."""
    calls = 0
    for line in text.splitlines():
        words = line.split()
        if words and words[-1] in ("fsync", "fdatasync", "sync_file_range", "msync") and len(words) >= 5:
            calls += int(words[3])
    return calls


def first_number(text):
    return float(re.search(r"[0-9][0-9,.]*", text)[0].replace(",", ""))


# What is written


def number(value):
    """Three digits are more than such a figure has; whole from a hundred on."""
    if value is None:
        return NOT_MEASURED
    if value != 0 and abs(value) < 99.95:
        digits = 2 if abs(value) < 9.995 else 1
        text = f"{value:.{digits}f}" if abs(value) >= 0.0995 else f"{value:.2g}"
        return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
    return f"{round(value):,}"


def middle(measured):
    return number(statistics.median(measured)) if measured else NOT_MEASURED


def latency(records, kind, quantiles, **wanted):
    return " / ".join(middle(values(records, f"{kind}.{quantile}", **wanted)) for quantile in quantiles)


def spread(measured, unit=""):
    """The median, and the lowest and highest round."""
    if not measured:
        return NOT_MEASURED
    text = f"{middle(measured)}{unit}"
    return f"{text} ({number(min(measured))} to {number(max(measured))})" if len(measured) > 1 else text


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def machine_part(parts):
    facts = next((one["about"] for records in parts.values() for one in records if "about" in one), {})
    text = ""
    if facts:
        named = "; ".join(f"{name} {value}" for name, value in facts.items())
        text = f"Measured with {named}.\n\n"
    rows = []
    for name, records in parts.items():
        machine = machine_of(records)
        if machine is None:
            continue
        all_of_it = [one["machine"] for one in records if one.get("machine")]
        syncs = [one["fdatasync_p50_ms"] for one in all_of_it]
        commits = [one["redb_commit_p50_ms"] for one in all_of_it if one.get("redb_commit_p50_ms")]
        rounds = len({one["round"] for one in cells(records)})
        rows.append(
            [
                name,
                str(rounds or 1),
                str(machine["cores"]),
                number(machine["load"]),
                spread(syncs),
                spread(commits),
                "quiet" if is_quiet(records) else "**noisy**",
            ]
        )
    head = [
        "part",
        "rounds",
        "cores",
        "load at its start",
        "fdatasync p50, ms",
        "one-row redb commit p50, ms",
        "the run was",
    ]
    return text + table(head, rows)


def goals_part(parts):
    return table(["figure", "must", "aim", "measured (rounds)", "verdict"], [goal.row() for goal in goals(parts)])


def pairs_part(parts):
    """Pairs a second, by scenario, transport and number of callers."""
    records = parts.get("redis", [])
    rows = []
    for scenario, transport, count in load_cells(records):
        same = {"scenario": scenario, "transport": transport, "connections": count}
        rows.append(
            [
                f"{scenario}, {transport}",
                number(count),
                *(
                    middle(values(records, "pairs_per_s", system=system, **same))
                    for system in ("kvgate", "redis", "axum")
                ),
                spread(ratios(records, "kvgate", "redis", **same)),
                spread(ratios(records, "kvgate", "axum", **same)),
            ]
        )
    head = [
        "callers",
        "connections",
        "kvgate pairs/s",
        "Redis pairs/s",
        "bare axum pairs/s",
        "kvgate / Redis",
        "kvgate / axum",
    ]
    return table(head, rows)


def load_cells(records):
    found = {(one["scenario"], one["transport"], one["connections"]) for one in cells(records)}
    return sorted(found, key=lambda cell: (cell[0] != "open", cell[1] != "tcp", cell[2]))


def latency_part(parts):
    records = parts.get("redis", [])
    rows = []
    for scenario, transport, count in load_cells(records):
        row = [f"{scenario}, {transport}", number(count)]
        for system in ("kvgate", "redis", "axum"):
            same = {"system": system, "scenario": scenario, "transport": transport, "connections": count}
            row += [latency(records, kind, ("p50", "p99", "p999"), **same) for kind in ("acquire_ms", "release_ms")]
        rows.append(row)
    head = ["callers", "connections"]
    head += [f"{SYSTEMS[system]} {kind}" for system in ("kvgate", "redis", "axum") for kind in ("acquire", "release")]
    return table(head, rows)


def cost_part(parts):
    records = parts.get("redis", [])
    rows = []
    for scenario, transport, count in load_cells(records):
        same = {"scenario": scenario, "transport": transport, "connections": count}
        row = [f"{scenario}, {transport}", number(count)]
        row += [
            middle(values(records, "server_cpu_us_per_pair", system=system, **same))
            for system in ("kvgate", "redis", "axum")
        ]
        row += [
            middle(values(records, "load_cpu_us_per_pair", system=system, **same)) for system in ("kvgate", "redis")
        ]
        row.append(middle(values(records, "operations_per_commit", system="kvgate", **same)))
        row.append(middle(values(records, "commits_per_s", system="kvgate", **same)))
        for system in ("kvgate", "redis"):
            row.append(middle([size / (1 << 20) for size in values(records, "rss_bytes", system=system, **same)]))
        rows.append(row)
    head = ["callers", "connections", "kvgate CPU µs/pair", "Redis CPU µs/pair", "bare axum CPU µs/pair"]
    head += ["load tool at kvgate", "load tool at Redis"]
    head += ["kvgate operations/commit", "kvgate commits/s", "kvgate MiB", "Redis MiB"]
    return table(head, rows)


def ray_part(parts):
    records = parts.get("ray", [])
    found = {(one["scenario"], one["connections"]) for one in cells(records)}
    rows = []
    for scenario, count in sorted(found, key=lambda cell: (cell[0] != "open", cell[1])):
        same = {"scenario": scenario, "connections": count}
        row = [scenario, number(count)]
        for system in ("kvgate", "ray"):
            row.append(middle(values(records, "pairs_per_s", system=system, **same)))
            row.append(latency(records, "acquire_ms", ("p50", "p99"), system=system, **same))
            row.append(middle(values(records, "server_cpu_us_per_pair", system=system, **same)))
        row.append(spread(ratios(records, "kvgate", "ray", **same)))
        row.append(spread(ratios(records, "ray", "kvgate", "acquire_ms.p50", **same)))
        rows.append(row)
    head = ["callers", "connections"]
    for system in ("kvgate", "ray"):
        head += [f"{SYSTEMS[system]} pairs/s", "acquire p50 / p99 ms", "CPU µs/pair"]
    return table([*head, "pairs/s, kvgate / Ray", "acquire p50, Ray / kvgate"], rows)


def batch_part(parts):
    records = parts.get("kvgate", [])
    rows = []
    for count in sorted({one["connections"] for one in cells(records, scenario="batch")}):
        same = {"system": "kvgate", "scenario": "batch", "connections": count}
        rows.append(
            [
                number(count),
                spread(values(records, "pairs_per_s", **same)),
                latency(records, "acquire_ms", ("p50", "p99"), **same),
                middle(values(records, "operations_per_commit", **same)),
                middle(values(records, "server_cpu_us_per_pair", **same)),
            ]
        )
    return table(
        ["connections", "pairs/s", "a batch of acquires, p50 / p99 ms", "operations/commit", "CPU µs/pair"], rows
    )


GRANTS = ("grant_ms", "grant_commits", "grant_after_ms", "grant_after_commits")


def grants_part(parts):
    """What a waiter waits for once its place is given back."""
    records = cells(parts.get("kvgate", []), scenario="contended")
    found = {(one["connections"], one["slots"], one["hold_ms"]) for one in records}
    rows = []
    for count, slots, hold_ms in sorted(found, key=lambda cell: (cell[2], -cell[0])):
        same = {"connections": count, "slots": slots, "hold_ms": hold_ms}
        row = [number(count), number(slots), f"{number(hold_ms)} ms" if hold_ms else "not at all"]
        row += [middle(values(records, path, **same)) for path in ("pairs_per_s", "commit_mean_ms")]
        row += [latency(records, kind, ("p50", "p99"), **same) for kind in GRANTS]
        rows.append(row)
    head = ["callers", "leases that fit", "each is held", "pairs/s", "commit, mean ms"]
    sent, answered = "grant p50 / p99 ms after a release was sent", "after it was answered"
    return table([*head, sent, "in commits", answered, "in commits"], rows)


def syncs_part(parts):
    """Both sides are counted in the same way, by the kernel's calls."""
    rows = []
    for one in parts.get("syncs", []):
        if "syncs" not in one:
            continue
        pairs = one["pairs"]
        changes = 2 * pairs
        commits = "" if one.get("commits") is None else f"{number(one['commits'])} commits"
        if one.get("log_bytes") is not None:
            commits = f"{number(one['log_bytes'] / pairs)} bytes of log a pair"
        rows.append(
            [
                SYSTEMS[one["system"]],
                number(one["connections"]),
                number(pairs),
                number(one["syncs"]),
                number(changes / one["syncs"]) if one["syncs"] else "no sync",
                commits,
            ]
        )
    return table(
        ["system", "connections", "pairs", "fdatasync and fsync calls", "changes a sync", "what it says itself"], rows
    )


def scale_part(parts):
    rows = []
    for name in ("core", "restart", "scale"):
        for one in figures(parts.get(name, [])):
            detail = one.get("detail") or {}
            told = ", ".join(f"{key} {value}" for key, value in detail.items() if not isinstance(value, (dict, list)))
            rows.append([one["figure"], f"{number(one['value'])} {one['unit']}".rstrip(), told or NOT_MEASURED])
    return table(["figure", "value", "detail"], rows)


WRITERS = {
    "machine": machine_part,
    "grants": grants_part,
    "goals": goals_part,
    "pairs": pairs_part,
    "latency": latency_part,
    "cost": cost_part,
    "syncs": syncs_part,
    "ray": ray_part,
    "batch": batch_part,
    "scale": scale_part,
}


def document(text, parts):
    """The page with its generated parts written anew. The sum at the end of each tells an edit by hand."""
    for name, write in WRITERS.items():
        body = f"\n{write(parts)}\n"
        pattern = re.compile(rf"(<!-- figures: {name} -->\n).*?<!-- end of {name}[^>]*-->", re.S)
        end = f"<!-- end of {name}: {zlib.crc32(body.encode()):08x} -->"
        # No backslash is ever in a figure.
        text, found = pattern.subn(rf"\g<1>{body}{end}", text)
        if found != 1:
            raise ValueError(f"the page has {found} places for {name}, instead of one")
    return text
