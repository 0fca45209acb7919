#!/usr/bin/env python3
"""Plants known bugs, one at a time, and shows that a named test fails for each.

Works in a copy of the tree below the target folder, never in place. A bug is a list of replacements, each of
which must find its text exactly once; so a bug that no longer applies is a failure and not a success. The named
tests must pass without any bug first.

    python3 tests/sabotage.py            all bugs
    python3 tests/sabotage.py seq grace  those whose name contains one of the words
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "target" / "sabotage" / "tree"
BUILD = ROOT / "target" / "sabotage" / "build"

SCENARIOS = ("-p", "kvgate-core", "--test", "scenarios")
PROCESS = ("-p", "kvgate", "--test", "it")
INSIDE = ("-p", "kvgate", "--lib")
SIMULATION = ("-p", "kvgate-sim", "--test", "seeds")

TORTURE = (PROCESS, "process::torture::every_acknowledged_promise_survives_any_kill")
KILL = (PROCESS, "process::kill::a_kill_loses_nothing_that_was_answered")
SEEDS = (SIMULATION, "the_promises_hold_on_every_seed")
ORDER = (PROCESS, "process::order::the_numbers_of_changes_explain_every_answer")

# What is wrong, the replacements (file, text, text), and the test that fails.
BUGS = [
    (
        "a row of a lease forgets that it had its grace",
        [("src/store/rows.rs", "            graced: lease.graced,", "            graced: false,")],
        (PROCESS, "store::keeps_what_the_reference_store_keeps"),
    ),
    (
        "a history file shows what is no figure",
        [
            (
                "src/history/ring.rs",
                "self.mean.is_finite() && self.min.is_finite() && self.max.is_finite()",
                "self.mean.is_finite()",
            )
        ],
        (INSIDE, "history::ring::fuzz::history_files"),
    ),
    (
        "a problem quotes a whole body",
        [("src/http/problem.rs", "const LETTERS_MAX: usize = 500;", "const LETTERS_MAX: usize = 1 << 20;")],
        (INSIDE, "http::fuzz::bodies"),
    ),
    (
        "what comes in while a caller does the turn is left to nobody",
        [("src/gate/inbox.rs", "if state.urgent > 0 || state.sleep.is_some_and(too_long)", "if state.sleep.is_some_and(too_long)")],
        (INSIDE, "gate::inbox::tests::among_several_nobody_is_lent_the_turn"),
    ),
    (
        "a small turn is answered before it is on disk",
        [("crates/core/src/batch.rs", "        if !self.records.is_empty() {\n            let commit", "        if self.records.len() > 2 {\n            let commit")],
        TORTURE,
    ),
    (
        "commits are not synced (Durability::None)",
        [
            (
                "src/store/redb.rs",
                "        transaction.set_durability(Durability::Immediate)?;\n        {",
                "        transaction.set_durability(Durability::None)?;\n        {",
            )
        ],
        TORTURE,
    ),
    (
        "the end of a close is not on disk",
        [
            (
                "src/store/redb.rs",
                "            Record::Close(close) => {",
                "            Record::Close(close) if close.is_done() => Ok(()),\n            Record::Close(close) => {",
            )
        ],
        (PROCESS, "store::keeps_what_the_reference_store_keeps"),
    ),
    (
        "a step report is answered and not on disk",
        [
            (
                "src/store/redb.rs",
                "            Record::Step(report) => {",
                "            Record::Step(report) if report.number.is_some() => Ok(()),\n            Record::Step(report) => {",
            )
        ],
        (PROCESS, "process::store::step_reports_outlive_the_process_and_a_restore"),
    ),
    (
        "a migration gives counters fewer fields than they have",
        [("migrations/m0002_closes.rs", "const TALLY_GAINS: &[u8] = &[0, 0, 0, 0];", "const TALLY_GAINS: &[u8] = &[0, 0, 0];")],
        (PROCESS, "durable::golden::stores_of_every_schema_open"),
    ),
    (
        "a migration begins before it is known that it can end",
        [("src/store/start.rs", "        self.foresee(&look, steps)?;\n", "")],
        (PROCESS, "durable::migration::a_migration_refuses_a_row_that_it_does_not_know"),
    ),
    (
        "a repeated acquire is charged again",
        [
            (
                "crates/core/src/turn.rs",
                "            Stage::Held(_) | Stage::Ended(_) => {\n                let answer = self.told_again(&known, Some(&acquire));",
                "            Stage::Held(_) => self.acquire_new(tag, acquire, None),\n            Stage::Ended(_) => {\n"
                "                let answer = self.told_again(&known, Some(&acquire));",
            )
        ],
        (SCENARIOS, "tickets::tic1_again_while_held"),
    ),
    (
        "the restart grace is given at every start",
        [("crates/core/src/machine.rs", "if !lease.graced && lease.ends_at < least", "if lease.ends_at < least")],
        (SCENARIOS, "leases::lea4_the_grace_is_given_once"),
    ),
    (
        "the life of a lease begins anew at a start",
        [
            (
                "crates/core/src/machine.rs",
                "lease.ends_at = lease.ends_at.min(now.after(lease.ttl));",
                "lease.ends_at = now.after(lease.ttl);",
            )
        ],
        (SCENARIOS, "leases::lea4_ends_after_a_restart"),
    ),
    (
        "the numbers of changes begin anew at a start",
        [("crates/core/src/state.rs", "            seq: image.seq,", "            seq: Seq(0),")],
        (SCENARIOS, "durable::dur2_the_same_after_a_restart"),
    ),
    (
        "lease ids begin anew at a start",
        [("crates/core/src/state.rs", "next_issue: image.next_issue.max(1),", "next_issue: 1,")],
        (SCENARIOS, "ids::id2_issue_numbers_outlive_their_tickets"),
    ),
    (
        "a start loses every waiter but the head",
        [
            (
                "crates/core/src/state.rs",
                "            state.put(ticket);\n        }\n        for close",
                "            if state.queue.len() == 0 || !matches!(ticket.stage, Stage::Waiting { .. }) {\n"
                "                state.put(ticket);\n            }\n        }\n        for close",
            )
        ],
        KILL,
    ),
    (
        "a start forgets what was released and cancelled",
        [
            (
                "crates/core/src/state.rs",
                "            state.put(ticket);\n        }\n        for close",
                "            if !matches!(ticket.stage, Stage::Ended(_)) {\n"
                "                state.put(ticket);\n            }\n        }\n        for close",
            )
        ],
        TORTURE,
    ),
    (
        "grants on their way are not counted at a start",
        [("crates/core/src/machine.rs", "        self.state.tally.with_admits_of(&self.in_flight)", "        self.state.tally.clone()")],
        (SCENARIOS, "leases::cnt1_unclaimed_grants_over_a_restart"),
    ),
    (
        "metrics show counters that a kill sets back",
        [
            (
                "crates/core/src/machine.rs",
                "            durable_tally: self.stored_tally.with_admits_from(&self.state.tally),",
                "            durable_tally: self.state.tally.clone(),",
            )
        ],
        (SCENARIOS, "measured::dur2_counters_of_readers_never_go_back"),
    ),
    (
        "metrics show a grant as an admit before it is claimed",
        [
            (
                "crates/core/src/machine.rs",
                "            durable_tally: self.stored_tally.with_admits_from(&self.state.tally),",
                "            durable_tally: self.stored_tally.clone(),",
            )
        ],
        (SCENARIOS, "measured::dur2_counters_of_readers_never_go_back"),
    ),
    (
        "an old lease id releases the newer lease of its ticket",
        [
            (
                "crates/core/src/turn.rs",
                "        let Some(ticket) = self.machine.state.lease(id).cloned() else {\n"
                "            let gone = self.machine.unknown_lease(id);\n            return self.reply(tag, None, Reply::Release(Err(gone)));",
                "        let state = &self.machine.state;\n"
                "        let Some(ticket) = state.lease(id).and_then(|old| state.ticket(&old.id)).cloned() else {\n"
                "            let gone = self.machine.unknown_lease(id);\n            return self.reply(tag, None, Reply::Release(Err(gone)));",
            ),
            (
                "crates/core/src/turn.rs",
                "        if let Some(former) = former {\n            self.forget_now(&former);\n        }",
                "        if let Some(former) = former.filter(|former| former.issue().is_none()) {\n"
                "            self.forget_now(&former);\n        }",
            ),
        ],
        (SCENARIOS, "tickets::tic6_release"),
    ),
    (
        "a request that can never fit waits",
        [
            (
                "crates/core/src/decide.rs",
                "        (reservation > self.measure.full_ceiling).then_some(BypassReason::Oversize)",
                "        (reservation == Tokens::MAX).then_some(BypassReason::Oversize)",
            )
        ],
        (SCENARIOS, "decision::dec1_oversize"),
    ),
    (
        "a small request overtakes the line",
        [
            (
                "crates/core/src/decide.rs",
                "        let blocked = if self.waiting > 0 {",
                "        let blocked = if self.waiting > 0 && request.reservation.get() > 1_000 {",
            )
        ],
        ORDER,
    ),
    (
        "a release has the number of the change before it",
        [
            (
                "crates/core/src/turn.rs",
                "                let seq = self.next_seq();\n                // Whoever gives back",
                "                let seq = self.machine.state.seq;\n                // Whoever gives back",
            )
        ],
        ORDER,
    ),
    (
        "a grant to a waiter is not charged against the next",
        [
            (
                "crates/core/src/decide.rs",
                "            .is_some_and(|sum| sum <= self.measure.ceiling);",
                "            .is_some_and(|_| self.reserved < self.measure.ceiling);",
            )
        ],
        ORDER,
    ),
    (
        "a grant that was taken back looks released",
        [
            (
                "crates/core/src/pass.rs",
                "                Stage::Held(_) => self.end_lease(ticket, EndHow::TakenBack),",
                "                Stage::Held(_) => self.end_lease(ticket, EndHow::Released),",
            )
        ],
        (SCENARIOS, "tickets::tic4_a_grant_in_a_gap"),
    ),
    (
        "deadlines follow the wall clock",
        [
            (
                "src/clock.rs",
                "        self.base.after(elapsed)",
                "        let _ = elapsed;\n        wall_now()",
            )
        ],
        (INSIDE, "clock::tests::tim1_the_line_is_never_below_the_stored_time"),
    ),
    (
        "a close goes out before the last lease of its session has ended",
        [
            (
                "crates/core/src/delivery.rs",
                "        if session.is_some_and(|session| !session.held.is_empty()) {",
                "        if session.is_some_and(|_| false) {",
            )
        ],
        SEEDS,
    ),
    (
        "a close that was sent at the join time-out is not sent after the last lease",
        [
            (
                "crates/core/src/delivery.rs",
                "(early, early && close.reopened.is_none())",
                "(early, false)",
            )
        ],
        (SCENARIOS, "closes::clo3_one_delivery_at_the_time_out_and_one_after_the_last_lease"),
    ),
    (
        "a start sends no close again to engines that are pending",
        [
            (
                "crates/core/src/lifecycle.rs",
                "                CloseStage::Delivering { .. } => pending(close).cloned().collect(),",
                "                CloseStage::Delivering { .. } => Vec::new(),",
            )
        ],
        (SCENARIOS, "delivery::clo6_a_start_sends_again_to_pending_engines_only"),
    ),
    (
        "a newer use of a session does not supersede its close",
        [
            (
                "crates/core/src/lifecycle.rs",
                "        let pending: Vec<EngineId> = pending(close).cloned().collect();\n        let reopened",
                "        let pending: Vec<EngineId> = Vec::new();\n        let reopened",
            )
        ],
        (SCENARIOS, "closes::clo8_a_newer_acquire_supersedes_what_is_pending"),
    ),
    (
        "an outcome of an earlier delivery of a close settles the new one",
        [
            (
                "crates/core/src/delivery.rs",
                "        if round_of(close) != Some(round) {",
                "        if round_of(close).is_none_or(|_| round.since > self.now) {",
            )
        ],
        (SCENARIOS, "closes::clo3_the_last_lease_ends_during_the_early_delivery"),
    ),
    (
        "a close that failed counts as a failure once more after a retry",
        [
            (
                "crates/core/src/delivery.rs",
                "            failed_first = close.has_failed() && !close.failure_counted;",
                "            failed_first = close.has_failed();",
            )
        ],
        (SCENARIOS, "closes::clo9_counts_per_intent_and_per_engine"),
    ),
    (
        "an abort that waited hits the request of another session that came meanwhile",
        [
            (
                "crates/core/src/delivery.rs",
                "        if held && state.is_foreign_prefix(request_id, &close.session) {",
                "        if !held && state.is_foreign_prefix(request_id, &close.session) {",
            )
        ],
        (SCENARIOS, "closes::clo3_an_abort_that_waits_is_judged_again"),
    ),
    (
        "an engine that is away gets a probe while another one is under way",
        [
            (
                "crates/core/src/fanout.rs",
                "            if !self.in_flight.is_empty() || !now.reached(away.next_probe) {",
                "            if !now.reached(away.next_probe) {",
            )
        ],
        (SCENARIOS, "delivery::clo6_an_engine_that_is_away_is_probed"),
    ),
    (
        "the waiters of a closed session stay in line",
        [
            (
                "crates/core/src/lifecycle.rs",
                "        self.withdraw_waiters(&session);\n",
                "        if self.effects.len() > 1_000_000 {\n            self.withdraw_waiters(&session);\n        }\n",
            )
        ],
        (SCENARIOS, "closes::clo3_waiting_tickets_are_withdrawn"),
    ),
    (
        "a revocation leaves no entry in the audit",
        [("crates/core/src/operate.rs", "        self.end_lease(ticket, EndHow::Revoked);\n        self.audit(who, act);", "        self.end_lease(ticket, EndHow::Revoked);\n        drop((who, act));")],
        (SCENARIOS, "settings::set3_revocations"),
    ),
    (
        "an act that changed nothing stands in the audit",
        [("crates/core/src/operate.rs", "        if changed == *settings {\n", "        if false {\n")],
        (SCENARIOS, "settings::set3_changes_of_settings"),
    ),
    (
        "settings that do not fit together are taken",
        [("crates/core/src/settings.rs", "        changed.validated()?;\n", "")],
        (SCENARIOS, "settings::set1_all_values_or_none"),
    ),
    (
        "what was set at run time is answered and not kept",
        [("src/store/redb.rs", "            Record::Settings(overrides) => {", "            Record::Settings(overrides) if overrides.paused.is_some() => Ok(()),\n            Record::Settings(overrides) => {")],
        (PROCESS, "process::settings::set2_settings_survive_a_kill"),
    ),
    (
        "a store that is opened again loses what was set",
        [("src/gate/writer.rs", "            reset_settings: std::mem::take(&mut self.config.reset_settings),", "            reset_settings: self.config.reset_settings,")],
        (PROCESS, "api_settings::set2_settings_and_a_store_that_fails"),
    ),
    (
        "a page of an origin called null may write",
        [("src/access/hosts.rs", "        let Some((its_scheme, its)) = parse_origin(origin) else {\n            return false;", "        let Some((its_scheme, its)) = parse_origin(origin) else {\n            return origin == \"null\";")],
        (PROCESS, "api_security::each_method_and_content_type_is_refused_across_sites"),
    ),
    (
        "whoever may look may act",
        [("src/web/actions.rs", "Right::Admin", "Right::View")],
        (PROCESS, "page_actions::acts_need_the_right_and_carry_its_name"),
    ),
    (
        "a page from before an act is shown again",
        [("src/web/actions.rs", "    web.acted();\n", "")],
        (PROCESS, "page_actions::nobody_sees_what_was_before_an_act"),
    ),
    (
        "a page that was kept loses its files",
        [("src/http/front.rs", "        headers.remove(CONTENT_SECURITY_POLICY);\n", "")],
        (PROCESS, "page::an_answer_that_nothing_changed_brings_no_policy"),
    ),
    (
        "a wrong token may be followed by the next guess",
        [("src/http/front.rs", "            headers.insert(CONNECTION, HeaderValue::from_static(\"close\"));\n", "")],
        (PROCESS, "api_rights::each_guess_costs_a_connection"),
    ),
    (
        "anybody may connect to a Unix socket",
        [("src/http/listener.rs", "    fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))?;\n", "    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;\n")],
        (PROCESS, "process::listen::a_unix_socket_beside_a_port"),
    ),
]


def tree():
    """Every file that belongs to the tree, committed or not."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE,
    ).stdout.decode()
    return [name for name in names.split("\0") if name and (ROOT / name).is_file()]


def copy():
    """Brings the copy to the state of the tree; what is the same keeps its time, so that builds are reused."""
    names = tree()
    for name in names:
        source, target = ROOT / name, COPY / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    wanted = set(names)
    for target in list(COPY.rglob("*")):
        if target.is_file() and str(target.relative_to(COPY)) not in wanted:
            target.unlink()


def test(where, names):
    """Runs exactly these tests; gives back the status and the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    environment.update(CARGO_TARGET_DIR=str(BUILD), CARGO_INCREMENTAL="1", RUST_BACKTRACE="0")
    ran = subprocess.run(
        ["cargo", "test", "--locked", *where, "--", "--exact", *names],
        cwd=COPY, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    return ran.returncode, ran.stdout.decode(errors="replace")


def plant(changes):
    """Applies a bug to the copy, or says why it does not apply."""
    for name, old, new in changes:
        path = COPY / name
        text = path.read_text()
        if text.count(old) != 1:
            return f"`{old.strip().splitlines()[0]}` stands {text.count(old)} times in {name}"
        path.write_text(text.replace(old, new))
    return None


def why(output):
    """The first line of what the test had to say."""
    lines = output.splitlines()
    for number, line in enumerate(lines):
        if "panicked at" in line and number + 1 < len(lines):
            return lines[number + 1].strip()
    return ""


def main():
    words = sys.argv[1:]
    bugs = [bug for bug in BUGS if not words or any(word in bug[0] for word in words)]
    copy()
    wanted = {}
    for _, _, (where, name) in bugs:
        wanted.setdefault(where, set()).add(name)
    for where, names in wanted.items():
        status, output = test(where, sorted(names))
        if status != 0 or f"{len(names)} passed" not in output:
            print(output[-4000:])
            sys.exit(f"without any bug, {', '.join(sorted(names))} must pass")
    rows, missed = [], 0
    for bug, changes, (where, name) in bugs:
        copy()
        began = time.monotonic()
        fault = plant(changes)
        if fault is None:
            status, output = test(where, [name])
            caught = status != 0 and f"test {name} ... FAILED" in output
            if not caught:
                fault = "the test passed" if status == 0 else "it does not compile:\n" + output[-2000:]
        missed += fault is not None
        verdict = "caught" if fault is None else f"MISSED: {fault}"
        rows.append(f"| {bug} | `{name}` | {verdict} |")
        said = why(output)[:160] if fault is None else ""
        print(f"{verdict}: {bug} ({time.monotonic() - began:.0f} s) {said}", flush=True)
    copy()
    print("\n| planted bug | test | verdict |\n|---|---|---|")
    print("\n".join(rows))
    print(f"\n{len(bugs) - missed} of {len(bugs)} planted bugs caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
