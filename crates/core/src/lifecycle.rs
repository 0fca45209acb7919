//! The session lifecycle: closes as they are asked for, and what other commands do to them (CLO1 to
//! CLO3, CLO5, CLO8, CLO11). Their way to the engines is in `delivery.rs`.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::close::{
    CloseIntent, CloseMode, CloseReason, CloseStage, Reopened, Target, TargetState,
};
use crate::command::CloseRequest;
use crate::decision::EndHow;
use crate::delivery::pending;
use crate::effect::{CloseReply, RetryRefused};
use crate::fanout::Job;
use crate::ids::{CloseId, CloseNo, EngineId, Label, RowNo, Seq, SessionId, TicketId};
use crate::machine::Machine;
use crate::policy::{
    CLOSE_EXCEPTIONS_MAX, CLOSES_OPEN_MAX, DECISIONS_PER_TURN, REOPENED_WITHIN, RESTART_GRACE,
};
use crate::tally::CancelledHow;
use crate::turn::Turn;
use crate::units::{Span, Timestamp};

/// An engine as the lifecycle sees it (CLO5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Support {
    /// It may have a session close.
    Assumed,
    /// It has none.
    Absent,
    /// It had none; time to find out whether that is still so.
    TriedAgain,
}

/// A member that is a new incarnation by its start time or its counters (CAP8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Restarted {
    pub(crate) engine: EngineId,
    /// The last time at which the old incarnation was seen.
    pub(crate) seen_at: Option<Timestamp>,
    /// The begin of the last reading that the engine did not answer.
    pub(crate) silent_at: Option<Timestamp>,
}

impl Turn {
    // ---- requests ------------------------------------------------------------------------

    /// CLO2.
    pub(crate) fn close(&mut self, request: CloseRequest) -> (Option<Seq>, CloseReply) {
        if !self.machine.policy.session_lifecycle {
            return (None, CloseReply::Disabled);
        }
        let CloseRequest {
            session,
            mode,
            reason,
        } = request;
        if let Some(open) = self.machine.state.open_close(&session) {
            let number = open.id.number;
            let upgrade = mode == CloseMode::Abort && open.mode == CloseMode::Join;
            let seq = upgrade.then(|| self.next_seq());
            if upgrade {
                self.edit_close(number, |close| close.mode = CloseMode::Abort);
                self.abort_leases(number);
            }
            return (seq, self.taken(number));
        }
        if self.machine.state.closes.open() >= CLOSES_OPEN_MAX {
            return (None, CloseReply::Full);
        }
        let (number, seq) = self.begin_close(session, mode, reason);
        (Some(seq), self.taken(number))
    }

    /// An intent that stands in the book.
    fn taken(&self, number: CloseNo) -> CloseReply {
        let close = self.machine.state.closes.get(number).cloned();
        close.map_or(CloseReply::Full, CloseReply::Taken)
    }

    /// A new intent; its waiters are withdrawn, its requests aborted if that is wanted (CLO3).
    pub(crate) fn begin_close(
        &mut self,
        session: SessionId,
        mode: CloseMode,
        reason: Option<CloseReason>,
    ) -> (CloseNo, Seq) {
        self.withdraw_waiters(&session);
        let seq = self.next_seq();
        if let Some(former) = self.machine.state.newest_close(&session) {
            let former = former.id.number;
            self.machine.fanout.forget_reopened(former);
        }
        let id = CloseId {
            number: self.machine.state.closes.next(),
            salt: self.machine.state.salt(),
        };
        let members = self.machine.fleet.members();
        let intent = CloseIntent {
            id,
            session,
            mode,
            reason,
            requested_at: self.now,
            stage: CloseStage::Joining { ready_since: None },
            targets: members
                .map(|engine| (engine.clone(), Target::PENDING))
                .collect(),
            counts: [0; TargetState::ENDS.len()],
            timed_out: false,
            failure_counted: false,
            reopened: None,
            not_aborted: BTreeSet::new(),
        };
        let tally = &mut self.machine.state.tally;
        tally.closes = tally.closes.saturating_add(1);
        self.machine.state.put_close(intent);
        self.dirty_closes.insert(id.number);
        if mode == CloseMode::Abort {
            self.abort_leases(id.number);
        }
        self.machine.fanout.note_joined(id.number);
        self.look_again(id.number);
        (id.number, seq)
    }

    /// Each is a change of its own, since the calls of each are answered (DUR6).
    fn withdraw_waiters(&mut self, session: &SessionId) {
        let known = self.machine.state.sessions.get(session);
        let waiting: Vec<RowNo> =
            known.map_or_else(Vec::new, |known| known.waiting.iter().collect());
        for row in waiting {
            if let Some(ticket) = self.machine.state.row(row).cloned() {
                let seq = self.next_seq();
                self.withdraw(
                    ticket,
                    EndHow::SessionClosed,
                    CancelledHow::SessionClosed,
                    seq,
                );
            }
        }
    }

    /// CLO3: aborts the requests of the leases that the session holds, on every engine. An engine
    /// matches by prefix, so one that begins the name of another session's request is left to the join.
    fn abort_leases(&mut self, number: CloseNo) {
        let machine = &mut *self.machine;
        let Some(close) = machine.state.closes.get(number) else {
            return;
        };
        let Some(session) = machine.state.sessions.get(&close.session) else {
            return;
        };
        let mut spared: BTreeSet<Label> = BTreeSet::new();
        for row in session.held.iter() {
            let asked = machine.state.row(row).and_then(|row| row.asked.as_ref());
            let Some(request_id) = asked.and_then(|asked| asked.terms.request_id.as_ref()) else {
                continue;
            };
            if machine.state.is_foreign_prefix(request_id, &close.session) {
                spared.insert(request_id.clone());
                continue;
            }
            for engine in machine.fleet.members() {
                if !machine.fleet.takes_calls(engine) {
                    continue;
                }
                let job = Job::Abort {
                    close: number,
                    row,
                    request_id: request_id.clone(),
                };
                machine.fanout.push(engine, job);
            }
        }
        if !spared.is_empty() {
            self.note_spared(number, spared);
        }
    }

    /// Requests that are left to the join (CLO3).
    pub(crate) fn note_spared(&mut self, number: CloseNo, mut spared: BTreeSet<Label>) {
        self.edit_close(number, |close| {
            close.not_aborted.append(&mut spared);
            while close.not_aborted.len() > CLOSE_EXCEPTIONS_MAX {
                close.not_aborted.pop_last();
            }
        });
    }

    /// Failed engines once more. A close that comes late must not hit a newer use of the session (CLO8).
    pub(crate) fn retry_close(
        &mut self,
        id: CloseId,
    ) -> (Option<Seq>, Result<CloseIntent, RetryRefused>) {
        let refused = match self.machine.state.closes.find(id) {
            None => Some(RetryRefused::NotFound),
            Some(_) if !self.machine.policy.session_lifecycle => Some(RetryRefused::Disabled),
            Some(close) => {
                let newest = self.machine.state.newest_close(&close.session);
                let is_newest = newest.is_some_and(|newest| newest.id == id);
                (!is_newest || close.reopened.is_some()).then_some(RetryRefused::Superseded)
            }
        };
        if let Some(refused) = refused {
            return (None, Err(refused));
        }
        let seq = self.retry_failed(id.number);
        let close = self.machine.state.closes.get(id.number).cloned();
        (seq, close.ok_or(RetryRefused::NotFound))
    }

    fn retry_failed(&mut self, number: CloseNo) -> Option<Seq> {
        let close = self.machine.state.closes.get(number)?;
        // Before the last lease has ended every engine is still to be asked for good.
        let goes_on = match close.stage {
            CloseStage::Joining { .. } | CloseStage::Delivering { early: true, .. } => true,
            CloseStage::Delivering { early: false, .. } | CloseStage::Done { .. } => false,
        };
        if goes_on {
            return None;
        }
        let named: Vec<EngineId> = close
            .targets
            .iter()
            .filter(|(_, target)| target.state.is_retried())
            .map(|(engine, _)| engine.clone())
            .collect();
        let failed: u32 = TargetState::ENDS
            .iter()
            .filter(|state| state.is_retried())
            .fold(0, |sum, state| sum.saturating_add(close.count(*state)));
        // Of many failed engines only some are named: all members are asked then, since a close that
        // comes twice does no harm. An intent that never found an engine has none either.
        let unnamed = close.has_failed()
            && (failed == 0 || u32::try_from(named.len()).is_ok_and(|named| named < failed));
        let again: Vec<EngineId> = if unnamed {
            self.machine.fleet.members().cloned().collect()
        } else {
            named
        };
        if again.is_empty() && !unnamed {
            return None;
        }
        let now = self.now;
        let was_done = close.is_done();
        let seq = self.next_seq();
        self.edit_close(number, |close| {
            if was_done {
                if unnamed {
                    close.counts = [0; TargetState::ENDS.len()];
                    close.targets.clear();
                }
                // What stands among the targets is counted when the intent is done again.
                let states = close.targets.values().map(|target| target.state);
                for state in states.collect::<Vec<_>>() {
                    for (candidate, count) in TargetState::ENDS.iter().zip(&mut close.counts) {
                        if *candidate == state {
                            *count = count.saturating_sub(1);
                        }
                    }
                }
                close.stage = CloseStage::Delivering {
                    since: now,
                    early: false,
                };
            }
            for engine in &again {
                close.targets.insert(engine.clone(), Target::PENDING);
            }
        });
        if again.is_empty() {
            // There is still no engine to ask.
            self.edit_close(number, |close| {
                close.stage = CloseStage::Joining { ready_since: None };
            });
            self.machine.fanout.note_joined(number);
        }
        for engine in &again {
            self.send_close(number, engine);
        }
        self.look_again(number);
        self.settle_close(number);
        Some(seq)
    }

    // ---- what other commands do to closes ------------------------------------------------

    /// An acquire that is decided anew uses its session. True when that session was closed and not
    /// used since: what is still pending of its close is superseded (CLO8).
    pub(crate) fn use_session(&mut self, session: &SessionId, ticket: &TicketId) -> bool {
        let Some(close) = self.machine.state.newest_close(session) else {
            return false;
        };
        if close.reopened.is_some() {
            return false;
        }
        let number = close.id.number;
        let soon = self.now.since(close.requested_at) <= REOPENED_WITHIN;
        let pending: Vec<EngineId> = pending(close).cloned().collect();
        let reopened = Reopened {
            at: self.now,
            ticket: ticket.clone(),
        };
        self.edit_close(number, |close| close.reopened = Some(reopened));
        for engine in pending {
            self.settle_target(number, &engine, TargetState::Superseded);
        }
        self.finish_when_settled(number, true);
        let tally = &mut self.machine.state.tally;
        tally.sessions_reopened = tally.sessions_reopened.saturating_add(1);
        if soon {
            self.machine.fanout.note_reopened(number, self.now);
        }
        true
    }

    /// A lease of the session ends: the last one lets its close go on (CLO3).
    pub(crate) fn lease_leaves(&mut self, session: &SessionId) {
        if let Some(close) = self.machine.state.open_close(session) {
            let number = close.id.number;
            self.machine.fanout.note_joined(number);
        }
    }

    /// CLO5: the KV of an old incarnation is gone. Only what was ready for delivery while that one
    /// still ran, or before the engine fell silent, is settled by it; the new one may hold the rest.
    pub(crate) fn engines_restarted(&mut self, restarted: &[Restarted]) {
        for restarted in restarted {
            let engine = &restarted.engine;
            let silent_at = restarted.silent_at.max(self.machine.fanout.down_at(engine));
            let ended_before = restarted.seen_at.max(silent_at);
            let moot: Vec<CloseNo> = self
                .machine
                .state
                .closes
                .iter()
                .filter(|close| match close.stage {
                    CloseStage::Delivering { since, .. } => {
                        let target = close.targets.get(engine).map(|target| target.state);
                        ended_before.is_some_and(|at| at >= since)
                            && target == Some(TargetState::Pending)
                    }
                    CloseStage::Joining { .. } | CloseStage::Done { .. } => false,
                })
                .map(|close| close.id.number)
                .collect();
            for number in moot {
                self.next_seq();
                self.settle_target(number, engine, TargetState::Restarted);
                self.settle_close(number);
            }
        }
    }

    /// Section 9: finished closes and idle sessions are remembered for a while.
    pub(crate) fn forget_closes(&mut self) {
        let judged_at = self.machine.judged_at();
        let machine = &mut *self.machine;
        for _ in 0..DECISIONS_PER_TURN {
            let Some(number) = machine.state.closes.too_old(judged_at) else {
                break;
            };
            machine.state.remove_close(number);
            machine.fanout.forget_reopened(number);
            machine.forgotten_closes.push(number);
        }
        let idle_close = machine.idle_close();
        for _ in 0..DECISIONS_PER_TURN {
            if !machine.state.sessions.forget_one(judged_at, idle_close) {
                break;
            }
        }
        machine.fanout.forget_notices(self.now);
        let fleet = &machine.fleet;
        machine
            .fanout
            .forget_lanes(|engine| fleet.is_member(engine));
    }

    // ---- a start, and new settings --------------------------------------------------------

    /// The settings changed: last uses of sessions are kept while idle sessions are closed.
    pub(crate) fn closes_configured(&mut self) {
        let closes_idle = self.machine.idle_close().is_some();
        self.machine.state.sessions.close_idle(closes_idle);
    }

    /// After a start: fills the lanes from the intents that are open. Deadlines leave them some time
    /// from here.
    pub(crate) fn resume_closes(&mut self) {
        self.machine.fanout.resume(self.now);
        let mut open: Vec<CloseNo> = Vec::new();
        let mut reopened: BTreeMap<CloseNo, Timestamp> = BTreeMap::new();
        for close in self.machine.state.closes.iter() {
            let number = close.id.number;
            if !close.is_done() {
                open.push(number);
            }
            let newest = self.machine.state.newest_close(&close.session);
            if let Some(again) = &close.reopened
                && newest.is_some_and(|newest| newest.id == close.id)
                && again.at.since(close.requested_at) <= REOPENED_WITHIN
            {
                reopened.insert(number, again.at);
            }
        }
        for (number, at) in reopened {
            self.machine.fanout.note_reopened(number, at);
        }
        for number in open {
            let Some(close) = self.machine.state.closes.get(number) else {
                continue;
            };
            let aborts = close.mode == CloseMode::Abort;
            let pending: Vec<EngineId> = match close.stage {
                CloseStage::Delivering { .. } => pending(close).cloned().collect(),
                CloseStage::Joining { .. } | CloseStage::Done { .. } => Vec::new(),
            };
            if aborts {
                self.abort_leases(number);
            }
            for engine in pending {
                self.send_close(number, &engine);
            }
            self.machine.fanout.note_joined(number);
            self.look_again(number);
            self.settle_close(number);
        }
    }
}

impl Machine {
    /// When an open intent must be looked at: the join time-out (CLO3), or the end of its time (CLO6).
    /// A start leaves at least a while, so that what was promised is tried.
    pub(crate) fn close_deadline(&self, close: &CloseIntent) -> Option<Timestamp> {
        let limit = self.policy.close_deadline;
        let at_least = self.fanout.resumed_at.after(limit.min(RESTART_GRACE));
        match close.stage {
            CloseStage::Joining { ready_since: None } => {
                let timeout = self.policy.join_timeout.filter(|_| !close.timed_out)?;
                Some(close.requested_at.after(timeout))
            }
            CloseStage::Joining {
                ready_since: Some(since),
            }
            | CloseStage::Delivering { since, .. } => Some(since.after(limit).max(at_least)),
            CloseStage::Done { .. } => None,
        }
    }

    /// How long a session may be idle before it is closed, when that is wanted (CLO11).
    pub(crate) fn idle_close(&self) -> Option<Span> {
        let wanted = self.policy.session_idle_close;
        wanted.filter(|_| self.policy.session_lifecycle)
    }

    /// When closes move by themselves.
    pub(crate) fn closes_due(&self) -> Option<Timestamp> {
        let has_room = self.state.closes.open() < CLOSES_OPEN_MAX;
        let idle = self.idle_close().filter(|_| has_room).and_then(|limit| {
            let (since, _) = self.state.sessions.longest_idle()?;
            Some(since.after(limit))
        });
        let joined = self.fanout.has_joined().then_some(self.last_turn);
        let due = self.fanout.next_due();
        idle.into_iter().chain(joined).chain(due).min()
    }
}
