"""The makers of the tables and the rules of the Ray coordinator, without a process.

python3 benches/compare/test_tables.py
"""

import json
import pathlib
import unittest

import tables
from ledger import Ledger

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/performance.md"


def cell(system, number, rate, **more):
    machine = {"cores": 2, "load": 0.5, "fdatasync_p50_ms": 0.2, "redb_commit_p50_ms": 0.25, "quiet": True}
    latency = {"p50": 0.5, "p99": 1.5, "p999": 2.5}
    record = {
        "system": system,
        "round": number,
        "scenario": "open",
        "transport": "tcp",
        "connections": 64,
        "pairs": 1000,
        "pairs_per_s": rate,
        "acquire_ms": latency,
        "release_ms": latency,
        "server_cpu_us_per_pair": 30.0,
        "rss_bytes": 20 << 20,
        **more,
    }
    return {**record, "machine": machine} if system in ("kvgate", "axum") else record


# Three rounds, of which the last was slow for both; and a round of which one side is missing.
ROUNDS = [
    ("kvgate", 1, 3000),
    ("redis", 1, 2000),
    ("kvgate", 2, 3300),
    ("redis", 2, 2000),
    ("kvgate", 3, 400),
    ("redis", 3, 400),
]
PARTS = {"redis": [cell(*one) for one in [*ROUNDS, ("redis", 4, 9000)]]}


class Ratios(unittest.TestCase):
    def test_are_taken_within_a_round(self):
        self.assertEqual(tables.ratios(PARTS["redis"], "kvgate", "redis", connections=64), [1.5, 1.65, 1.0])
        self.assertEqual(tables.ratios(PARTS["redis"], "kvgate", "redis", connections=16), [])
        self.assertEqual(tables.ratios(PARTS["redis"], "kvgate", "redis", "acquire_ms.p99"), [1.0, 1.0, 1.0])

    def test_of_what_was_not_measured_are_left_out(self):
        records = [cell("kvgate", 1, 5, acquire_ms=None), cell("redis", 1, 5)]
        self.assertEqual(tables.ratios(records, "kvgate", "redis", "acquire_ms.p50"), [])
        self.assertEqual(tables.values(records, "acquire_ms.p50", system="kvgate"), [])

    def test_to_a_commit_are_those_of_one_caller(self):
        records = [cell("kvgate", 1, 5, connections=1), cell("kvgate", 1, 5)]
        self.assertEqual(tables.commit_ratios(records), [2.0])


class Grants(unittest.TestCase):
    def test_are_told_by_how_long_leases_are_held(self):
        common = {"scenario": "contended", "slots": 16, "commit_mean_ms": 0.25}
        records = []
        for number, p99 in ((1, 0.5), (2, 0.75), (3, 1.0)):
            figures = {"grant_ms": {"p50": 0.25, "p99": p99}, "grant_commits": {"p50": 1.0, "p99": p99 / 0.25}}
            figures |= {"grant_after_ms": {"p50": 0.0, "p99": 0.1}, "grant_after_commits": {"p50": 0.0, "p99": 0.4}}
            records.append(cell("kvgate", number, 700, hold_ms=20.0, **common, **figures))
            records.append(cell("kvgate", number, 20_000, hold_ms=0.0, **common))
        rows = tables.grants_part({"kvgate": records}).splitlines()
        self.assertEqual(rows[2], "| 64 | 16 | not at all | 20,000 | 0.25 | – / – | – / – | – / – | – / – |")
        self.assertEqual(rows[3], "| 64 | 16 | 20 ms | 700 | 0.25 | 0.25 / 0.75 | 1 / 3 | 0 / 0.1 | 0 / 0.4 |")


class Goals(unittest.TestCase):
    def test_the_median_of_the_rounds_is_judged(self):
        by_figure = {goal.figure: goal for goal in tables.goals(PARTS)}
        goal = by_figure["pairs/s against Redis, 64 connections"]
        self.assertEqual(goal.row(), [goal.figure, "≥ 1.1", "≥ 1.35", "1.5 (1 to 1.65)", "aim"])
        self.assertEqual(by_figure["pairs/s against Redis, 256 connections"].verdict(), "not measured")
        self.assertEqual(by_figure["pairs/s against Redis, 256 connections"].row()[3], tables.NOT_MEASURED)

    def test_each_verdict(self):
        def verdict(measured, **more):
            return tables.Goal("f", **{"must": 1.0, "aim": 2.0, "measured": measured, **more}).verdict()

        self.assertEqual(verdict([2.0]), "aim")
        self.assertEqual(verdict([1.0, 1.5, 9.0]), "must")
        self.assertEqual(verdict([0.5, 0.9, 9.0]), "**missed**")
        self.assertEqual(verdict([0.9], noisy=True), "**missed**, noisy")
        self.assertEqual(verdict([9.0], aim=None), "must")
        at_most = {"must": 2.0, "aim": 1.0, "at_least": False}
        self.assertEqual([verdict([value], **at_most) for value in (0.9, 1.5, 2.5)], ["aim", "must", "**missed**"])

    def test_a_busy_machine_is_told(self):
        noisy = [json.loads(json.dumps(one)) for one in PARTS["redis"]]
        noisy[0]["machine"]["quiet"] = False
        [goal] = [goal for goal in tables.goals({"redis": noisy}) if "64 connections" in goal.figure and goal.measured]
        self.assertEqual(goal.verdict(), "aim, noisy")
        self.assertIn("**noisy**", tables.machine_part({"redis": noisy}))

    def test_figures_of_others_are_judged_by_their_own_bounds(self):
        lines = [
            {"machine": {"cores": 2, "load": 0.1, "fdatasync_p50_ms": 0.2, "quiet": True}},
            {
                "figure": "memory of a lease",
                "value": 580.0,
                "unit": "bytes",
                "sense": "at_most",
                "must": 600,
                "aim": 400,
            },
            {
                "figure": "told only",
                "value": 1.0,
                "unit": "s",
                "sense": None,
                "must": None,
                "aim": None,
                "detail": {"size": 5},
            },
        ]
        rows = [goal.row() for goal in tables.goals({"scale": lines}) if goal.measured]
        self.assertEqual(rows, [["memory of a lease", "≤ 600 bytes", "≤ 400 bytes", "580 bytes", "must"]])
        self.assertIn("| told only | 1 s | size 5 |", tables.scale_part({"scale": lines}))

    def test_the_best_number_of_connections_counts_for_batches(self):
        records = [
            cell("kvgate", number, rate, scenario="batch", connections=count)
            for number, count, rate in ((1, 1, 70), (1, 4, 90))
        ]
        self.assertEqual(tables.best(records, "pairs_per_s", scenario="batch"), [90])


class WhatOthersPrint(unittest.TestCase):
    def test_the_core_bench(self):
        text = "ns per command\n| waiters | a + b | renew |\n|---|---|---|\n| 1000 | 400 (1.0x) | 90 |\n| 100000 | 600 | 300 |\n"
        text += "\n| rows | all end |\n|---|---|\n| 1000 | 323, 0.3 |\n"
        slowest, steepest = tables.of_core(text)
        self.assertEqual((slowest["figure"], slowest["value"]), ("core, slowest command (a + b) at 1,000 waiters", 0.4))
        self.assertIn("(renew) to 100,000 waiters", steepest["figure"])
        self.assertAlmostEqual(steepest["value"], 300 / 90)
        self.assertEqual(tables.of_core("nothing"), [])

    def test_the_restart_bench(self):
        text = "load 1; filled with 100000 leases and 50000 waiting tickets in 3 s\nmedian 0.240 s, worst 0.310 s of 5 starts; goal 3 s: met\n"
        [figure] = tables.of_restart(text)
        self.assertEqual((figure["value"], figure["must"]), (0.31, 3))
        self.assertIn("100,000 leases and 50,000 waiters, worst of 5", figure["figure"])

    def test_the_summary_of_strace(self):
        text = (
            "% time     seconds  usecs/call     calls    errors syscall\n"
            "------ ----------- ----------- --------- --------- ----------------\n"
            " 99.00    0.500000         200      2500           fdatasync\n"
            "  1.00    0.001000         200         7         1 fsync\n"
            "------ ----------- ----------- --------- --------- ----------------\n"
            "100.00    0.501000         200      2507         1 total\n"
        )
        self.assertEqual(tables.of_strace(text), 2507)


class Writing(unittest.TestCase):
    def test_numbers(self):
        told = [
            tables.number(value) for value in (0, 0.0012, 0.12, 1.0, 1.234, 9.996, 12.34, 99.96, 150, 28930.4, None)
        ]
        self.assertEqual(
            told, ["0", "0.0012", "0.12", "1", "1.23", "10", "12.3", "100", "150", "28,930", tables.NOT_MEASURED]
        )

    def test_every_part_is_written_from_nothing_and_from_something(self):
        for name, write in tables.WRITERS.items():
            for parts in ({}, PARTS):
                lines = [line for line in write(parts).splitlines() if line.startswith("|")]
                self.assertGreaterEqual(len(lines), 2, name)
                self.assertEqual(len({line.count("|") for line in lines}), 1, name)

    def test_the_page_has_a_place_for_each_and_keeps_what_is_around_them(self):
        page = PAGE.read_text()
        once = tables.document(page, PARTS)
        self.assertEqual(tables.document(once, PARTS), once)
        self.assertIn("| open, tcp | 64 | 3,000 | 2,000 | – | 1.5 (1 to 1.65) | – |", once)
        hand_written = [
            line for line in page.splitlines() if line and not line.startswith(("|", "<!--", "Measured with"))
        ]
        self.assertEqual([line for line in hand_written if line not in once.splitlines()], [])
        with self.assertRaises(ValueError):
            tables.document(page.replace("<!-- figures: ray -->", ""), PARTS)


class RayRules(unittest.TestCase):
    def setUp(self):
        self.ledger = Ledger(100)

    def acquire(self, ticket, tokens, now=0.0, ttl_s=600):
        return self.ledger.acquire(now, ticket, "session", tokens, 0, "train", False, ttl_s, "rid", "client")

    def test_a_ticket_is_charged_once_and_the_head_comes_first(self):
        self.assertEqual(self.acquire("a", 60), ("admit", "1-1"))
        self.assertEqual(self.acquire("a", 60), ("admit", "1-1"))
        self.assertEqual(self.acquire("a", 61), ("conflict",))
        self.assertEqual(self.acquire("large", 101), ("bypass", "oversize"))
        self.assertEqual(self.acquire("b", 60), ("wait",))
        self.assertEqual(self.acquire("c", 10), ("wait",))
        self.assertEqual(self.ledger.release(1.0, "a", "1-7"), ("lease_expired", []))
        self.assertEqual(self.ledger.release(1.0, "a", "1-1"), ("released", [("b", "1-2"), ("c", "1-3")]))
        self.assertEqual(self.ledger.release(1.0, "a", "1-1"), ("already_released", []))
        self.assertEqual(self.ledger.release(1.0, "d", "1-9"), ("lease_not_found", []))
        self.assertEqual(self.acquire("a", 60), ("cancelled",))
        session = self.ledger.sessions["session"]
        self.assertEqual((session.leases, session.tokens, session.waiting), (2, 70, 0))

    def test_leases_end_and_waiters_leave(self):
        self.acquire("a", 60, ttl_s=1)
        self.acquire("b", 60)
        self.acquire("c", 60)
        self.assertEqual(self.ledger.cancel(0.5, "b"), [])
        self.assertEqual(self.ledger.sweep(0.9), [])
        self.assertEqual(self.ledger.sweep(1.0), [("c", "1-2")])
        self.assertEqual((self.ledger.reserved, self.ledger.expired), (60, 1))
        self.assertEqual(self.ledger.release(2.0, "c", "1-2"), ("released", []))
        self.assertEqual((self.ledger.reserved, len(self.ledger.tickets), len(self.ledger.queue)), (0, 0, 0))


if __name__ == "__main__":
    unittest.main()
