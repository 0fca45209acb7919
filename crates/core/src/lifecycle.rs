//! The session lifecycle: closes from the request to the last engine (CLO1 to CLO11).

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::close::{
    CallFailure, CallId, CallResult, CallWhat, CloseIntent, CloseMode, CloseReason, CloseStage,
    EngineCall, Reopened, Target, TargetState,
};
use crate::command::CloseRequest;
use crate::decision::EndHow;
use crate::effect::{CloseReply, Effect, Reply, RetryRefused, Tag};
use crate::fanout::{Call, Job, Round};
use crate::ids::{CloseId, CloseNo, EngineId, Label, RowNo, Seq, SessionId, TicketId};
use crate::machine::Machine;
use crate::policy::{
    CLOSE_EXCEPTIONS_MAX, CLOSES_OPEN_MAX, DECISIONS_PER_TURN, REOPENED_WITHIN, RESTART_GRACE,
};
use crate::record::Record;
use crate::tally::CancelledHow;
use crate::ticket::Stage;
use crate::turn::Turn;
use crate::units::Timestamp;

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
    /// The last time at which the engine did not answer a reading.
    pub(crate) silent_at: Option<Timestamp>,
}

impl Turn {
    // ---- requests ------------------------------------------------------------------------

    /// CLO2.
    pub(crate) fn close(&mut self, tag: Tag, request: CloseRequest) {
        if !self.machine.policy.session_lifecycle {
            return self.reply(tag, None, Reply::Close(CloseReply::Disabled));
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
            return self.reply_close(tag, seq, number);
        }
        if self.machine.state.closes.open() >= CLOSES_OPEN_MAX {
            return self.reply(tag, None, Reply::Close(CloseReply::Full));
        }
        let seq = self.next_seq();
        let number = self.begin_close(session, mode, reason, seq);
        self.reply_close(tag, Some(seq), number);
    }

    fn reply_close(&mut self, tag: Tag, seq: Option<Seq>, number: CloseNo) {
        if let Some(close) = self.machine.state.closes.get(number) {
            let reply = Reply::Close(CloseReply::Taken(close.clone()));
            self.reply(tag, seq, reply);
        }
    }

    /// A new intent; its waiters are withdrawn, its requests aborted if that is wanted (CLO3).
    fn begin_close(
        &mut self,
        session: SessionId,
        mode: CloseMode,
        reason: Option<CloseReason>,
        seq: Seq,
    ) -> CloseNo {
        let waiting: Vec<RowNo> = match self.machine.state.sessions.get(&session) {
            Some((_, known)) => known.waiting.iter().copied().collect(),
            None => Vec::new(),
        };
        for row in waiting {
            if let Some(ticket) = self.machine.state.row(row).cloned() {
                self.withdraw(
                    ticket,
                    EndHow::SessionClosed,
                    CancelledHow::SessionClosed,
                    seq,
                );
            }
        }
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
        id.number
    }

    /// CLO3: aborts the requests of the leases that the session holds, on every engine. An engine
    /// matches by prefix, so one that begins the name of another session's request is left to the join.
    fn abort_leases(&mut self, number: CloseNo) {
        let machine = &mut *self.machine;
        let Some(close) = machine.state.closes.get(number) else {
            return;
        };
        let Some((_, session)) = machine.state.sessions.get(&close.session) else {
            return;
        };
        let mut spared: BTreeSet<Label> = BTreeSet::new();
        for row in &session.held {
            let asked = machine.state.row(*row).and_then(|row| row.asked.as_ref());
            let Some(request_id) = asked.and_then(|asked| asked.terms.request_id.as_ref()) else {
                continue;
            };
            if machine.state.is_foreign_prefix(request_id, &close.session) {
                spared.insert(request_id.clone());
                continue;
            }
            for engine in machine.fleet.members() {
                if machine.fleet.close_support(engine, self.now) == Support::Absent {
                    continue;
                }
                let job = Job::Abort {
                    close: number,
                    row: *row,
                    request_id: request_id.clone(),
                };
                machine.fanout.push(engine, job);
            }
        }
        if !spared.is_empty() {
            self.edit_close(number, |close| {
                close.not_aborted.append(&mut spared);
                while close.not_aborted.len() > CLOSE_EXCEPTIONS_MAX {
                    close.not_aborted.pop_last();
                }
            });
        }
    }

    /// Failed engines once more. A close that comes late must not hit a newer use of the session (CLO8).
    pub(crate) fn retry_close(&mut self, tag: Tag, id: CloseId) {
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
            return self.reply(tag, None, Reply::RetryClose(Err(refused)));
        }
        let seq = self.retry_failed(id.number);
        if let Some(close) = self.machine.state.closes.get(id.number) {
            let reply = Reply::RetryClose(Ok(close.clone()));
            self.reply(tag, seq, reply);
        }
    }

    fn retry_failed(&mut self, number: CloseNo) -> Option<Seq> {
        let close = self.machine.state.closes.get(number)?;
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

    /// A lease of the session ended: the last one lets its close go on (CLO3).
    pub(crate) fn lease_left(&mut self, session: &SessionId) {
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

    // ---- outcomes of calls ---------------------------------------------------------------

    pub(crate) fn called(&mut self, tag: Tag, results: Vec<(CallId, CallResult)>) {
        let before = self.close_edits;
        for (id, result) in results {
            if let Some(call) = self.machine.fanout.end(id) {
                self.call_ended(&call, result);
            }
        }
        let seq = (self.close_edits != before).then(|| self.next_seq());
        self.reply(tag, seq, Reply::Done);
    }

    fn call_ended(&mut self, call: &Call, result: CallResult) {
        match &result {
            CallResult::Status { .. } | CallResult::Failed(CallFailure::TooLarge) => {
                self.machine.fanout.answered(&call.engine);
            }
            CallResult::Failed(CallFailure::Timeout | CallFailure::Refused) => {
                self.machine.fanout.silent(call, self.now);
            }
            CallResult::Failed(CallFailure::NotAllowed) => {}
        }
        let is_abort = matches!(call.job, Job::Abort { .. });
        if let CallResult::Status { code, text } = &result {
            let fanout = &mut self.machine.fanout;
            match Answered::by(*code) {
                Answered::Done => fanout.accepted(&call.engine, is_abort),
                Answered::Absent | Answered::Refused => {
                    fanout.refused(&call.engine, is_abort, *code, text.clone(), self.now);
                }
                Answered::Later => {}
            }
        }
        match &call.job {
            Job::Abort { .. } => self.abort_ended(call, &result),
            Job::Close {
                close,
                round,
                trial,
            } => self.close_ended(call, *close, *round, *trial, result),
        }
    }

    fn abort_ended(&mut self, call: &Call, result: &CallResult) {
        let again = match result {
            CallResult::Status { code, .. } => Answered::by(*code) == Answered::Later,
            CallResult::Failed(failure) => *failure != CallFailure::NotAllowed,
        };
        let fanout = &mut self.machine.fanout;
        let engine = &call.engine;
        if again {
            let attempts = if call.probe {
                1
            } else {
                fanout.abort_attempt(engine, &call.job)
            };
            if attempts < self.machine.policy.close_attempts {
                fanout.again(engine, call.job.clone(), attempts, self.now);
                return;
            }
        }
        fanout.abort_ended(engine, &call.job);
    }

    fn close_ended(
        &mut self,
        call: &Call,
        number: CloseNo,
        round: Round,
        trial: bool,
        result: CallResult,
    ) {
        let engine = &call.engine;
        let answered = match &result {
            CallResult::Status { code, .. } => Some(Answered::by(*code)),
            CallResult::Failed(_) => None,
        };
        // What the engine can do is learnt whatever became of the intent.
        let state = match answered {
            Some(Answered::Done) => {
                self.learn(engine, true);
                Some(TargetState::Delivered)
            }
            Some(Answered::Absent) => Some(self.learn(engine, false)),
            Some(Answered::Refused) => Some(TargetState::Refused),
            Some(Answered::Later) => None,
            None if result == CallResult::Failed(CallFailure::NotAllowed) => {
                Some(TargetState::Failed)
            }
            None => None,
        };
        let Some(target) = self.pending_target(number, round, engine) else {
            return;
        };
        let attempts = if call.probe && answered.is_none() {
            target.attempts
        } else {
            target.attempts.saturating_add(1)
        };
        self.edit_close(number, |close| {
            if let Some(target) = close.targets.get_mut(engine) {
                target.attempts = attempts;
                target.last = Some(result);
            }
        });
        let used_up = attempts >= self.machine.policy.close_attempts;
        let state = match state {
            None if trial => Some(TargetState::Unsupported),
            None if used_up => Some(self.failed_or_gone(engine)),
            state => state,
        };
        match state {
            Some(state) => {
                self.settle_target(number, engine, state);
                self.settle_close(number);
            }
            None => self
                .machine
                .fanout
                .again(engine, call.job.clone(), attempts, self.now),
        }
    }

    /// CLO5: the first few answers as of an engine without session close are refusals; then it has none.
    fn learn(&mut self, engine: &EngineId, has_close: bool) -> TargetState {
        let (state, changed) = self.machine.fleet.learn_close(engine, has_close, self.now);
        if let Some(row) = changed {
            self.record(Record::Engine(row));
        }
        state
    }

    fn failed_or_gone(&self, engine: &EngineId) -> TargetState {
        if self.machine.fleet.is_member(engine) {
            TargetState::Failed
        } else {
            TargetState::Gone
        }
    }

    /// The engine's target, when it is still pending in this very delivery.
    fn pending_target(&self, number: CloseNo, round: Round, engine: &EngineId) -> Option<&Target> {
        let close = self.machine.state.closes.get(number)?;
        if round_of(close) != Some(round) {
            return None;
        }
        let target = close.targets.get(engine)?;
        (target.state == TargetState::Pending).then_some(target)
    }

    // ---- the pass ------------------------------------------------------------------------

    /// What closes do by themselves: after expiries and the queue, so that a newer use of the
    /// session in the same turn comes first.
    pub(crate) fn pass_closes(&mut self, left: &mut usize) {
        if !self.machine.policy.session_lifecycle {
            return;
        }
        let judged_at = self.machine.judged_at();
        self.close_idle(judged_at, left);
        while *left > 0 {
            let Some(number) = self.machine.fanout.take_joined() else {
                break;
            };
            *left = left.saturating_sub(1);
            self.go_on(number);
        }
        if self.machine.hold.is_some_and(|hold| hold.starting) {
            return;
        }
        while *left > 0 {
            let Some(number) = self.machine.fanout.take_reached(judged_at) else {
                break;
            };
            *left = left.saturating_sub(1);
            self.deadline_reached(number, judged_at);
        }
        self.send_calls();
    }

    /// CLO11.
    fn close_idle(&mut self, judged_at: Timestamp, left: &mut usize) {
        let Some(limit) = self.machine.policy.session_idle_close else {
            return;
        };
        while *left > 0 && self.machine.state.closes.open() < CLOSES_OPEN_MAX {
            let Some((since, session)) = self.machine.state.sessions.longest_idle() else {
                return;
            };
            if !judged_at.reached(since.after(limit)) {
                return;
            }
            let session = session.clone();
            *left = left.saturating_sub(1);
            let seq = self.next_seq();
            self.begin_close(session, CloseMode::Join, Some(CloseReason::Idle), seq);
        }
    }

    /// An intent whose last lease may have ended, or that waited for a first member.
    fn go_on(&mut self, number: CloseNo) {
        let Some(close) = self.machine.state.closes.get(number) else {
            return;
        };
        let session = self.machine.state.sessions.get(&close.session);
        if session.is_some_and(|(_, session)| !session.held.is_empty()) {
            return;
        }
        match close.stage {
            CloseStage::Joining { .. } | CloseStage::Delivering { early: true, .. } => {
                self.begin_delivery(number, false);
            }
            CloseStage::Delivering { early: false, .. } | CloseStage::Done { .. } => {}
        }
    }

    /// CLO4: to the members of now and those known at the request.
    fn begin_delivery(&mut self, number: CloseNo, early: bool) {
        let Some(close) = self.machine.state.closes.get(number) else {
            return;
        };
        let now = self.now;
        let engines: BTreeSet<EngineId> = close
            .targets
            .keys()
            .chain(self.machine.fleet.members())
            .cloned()
            .collect();
        if engines.is_empty() {
            // CLO2: there is nobody to tell yet.
            let waits = matches!(
                close.stage,
                CloseStage::Joining {
                    ready_since: Some(_)
                }
            );
            self.machine.fanout.note_memberless(number);
            if !early && !waits {
                self.next_seq();
                self.edit_close(number, |close| {
                    close.stage = CloseStage::Joining {
                        ready_since: Some(now),
                    };
                });
                self.look_again(number);
            }
            return;
        }
        self.next_seq();
        self.edit_close(number, |close| {
            close.stage = CloseStage::Delivering { since: now, early };
            close.timed_out |= early;
            close.targets = engines
                .iter()
                .map(|engine| (engine.clone(), Target::PENDING))
                .collect();
        });
        for engine in &engines {
            self.send_close(number, engine);
        }
        self.look_again(number);
        self.settle_close(number);
    }

    /// Puts a close into an engine's lane, unless it is known to have no session close.
    fn send_close(&mut self, number: CloseNo, engine: &EngineId) {
        let Some(round) = self.machine.state.closes.get(number).and_then(round_of) else {
            return;
        };
        let support = self.machine.fleet.close_support(engine, self.now);
        let trial = match support {
            Support::Assumed => false,
            Support::TriedAgain => {
                if let Some(row) = self.machine.fleet.tried_again(engine, self.now) {
                    self.record(Record::Engine(row));
                }
                true
            }
            Support::Absent => {
                return self.settle_target(number, engine, TargetState::Unsupported);
            }
        };
        let job = Job::Close {
            close: number,
            round,
            trial,
        };
        self.machine.fanout.push(engine, job);
    }

    fn deadline_reached(&mut self, number: CloseNo, judged_at: Timestamp) {
        let Some(close) = self.machine.state.closes.get(number) else {
            return;
        };
        let Some(deadline) = self.machine.close_deadline(close) else {
            return;
        };
        if !judged_at.reached(deadline) {
            self.machine.fanout.look_at(number, deadline);
            return;
        }
        match close.stage {
            CloseStage::Joining { ready_since: None } => self.begin_delivery(number, true),
            CloseStage::Joining {
                ready_since: Some(_),
            }
            | CloseStage::Delivering { .. } => {
                let pending: Vec<EngineId> = pending(close).cloned().collect();
                self.next_seq();
                for engine in pending {
                    let state = self.failed_or_gone(&engine);
                    self.settle_target(number, &engine, state);
                }
                self.finish_when_settled(number, true);
            }
            CloseStage::Done { .. } => {}
        }
    }

    /// Gives out the calls that may go now.
    fn send_calls(&mut self) {
        while let Some((engine, job, probe)) = self.machine.fanout.take_due(self.now) {
            let what = match &job {
                Job::Abort {
                    close,
                    row,
                    request_id,
                } => {
                    if !self.is_to_be_aborted(*close, *row) {
                        self.machine.fanout.abort_ended(&engine, &job);
                        continue;
                    }
                    CallWhat::Abort(request_id.clone())
                }
                Job::Close {
                    close,
                    round,
                    trial,
                } => {
                    if self.pending_target(*close, *round, &engine).is_none() {
                        continue;
                    }
                    // It may have turned out meanwhile that the engine has no session close.
                    let support = self.machine.fleet.close_support(&engine, self.now);
                    if support == Support::Absent && !trial {
                        let number = *close;
                        self.next_seq();
                        self.settle_target(number, &engine, TargetState::Unsupported);
                        self.settle_close(number);
                        continue;
                    }
                    let Some(close) = self.machine.state.closes.get(*close) else {
                        continue;
                    };
                    CallWhat::Close(close.session.clone())
                }
            };
            let id = self.machine.fanout.begin(engine.clone(), job, probe);
            self.effects
                .push(Effect::Call(EngineCall { id, engine, what }));
        }
    }

    /// Whether the lease is still held and its close still wants it aborted.
    fn is_to_be_aborted(&self, number: CloseNo, row: RowNo) -> bool {
        let held = self
            .machine
            .state
            .row(row)
            .is_some_and(|ticket| matches!(ticket.stage, Stage::Held(_)));
        let close = self.machine.state.closes.get(number);
        held && close.is_some_and(|close| !close.is_done())
    }

    // ---- changes of one intent -----------------------------------------------------------

    /// Changes an intent; its row is written at the end of the turn.
    fn edit_close(&mut self, number: CloseNo, change: impl FnOnce(&mut CloseIntent)) {
        if let Some(mut close) = self.machine.state.take_close(number) {
            change(&mut close);
            self.machine.state.put_close(close);
            self.dirty_closes.insert(number);
            self.close_edits = self.close_edits.saturating_add(1);
        }
    }

    /// One engine has come to its end. Of a delivery at the join time-out nothing is counted, since
    /// another one follows.
    fn settle_target(&mut self, number: CloseNo, engine: &EngineId, state: TargetState) {
        let mut counts = false;
        self.edit_close(number, |close| {
            counts = !matches!(close.stage, CloseStage::Delivering { early: true, .. })
                || state == TargetState::Superseded;
            if let Some(target) = close.targets.get_mut(engine) {
                target.state = state;
            }
        });
        if counts {
            self.machine.state.tally.close_ended(state);
        }
    }

    /// Looks whether the delivery is over.
    fn settle_close(&mut self, number: CloseNo) {
        self.finish_when_settled(number, false);
    }

    /// With `for_good` an intent ends whatever leases are held.
    fn finish_when_settled(&mut self, number: CloseNo, for_good: bool) {
        let Some(close) = self.machine.state.closes.get(number) else {
            return;
        };
        if close.is_done() || pending(close).next().is_some() {
            return;
        }
        let early = match close.stage {
            CloseStage::Delivering { early, .. } => early,
            CloseStage::Joining { .. } if for_good => false,
            CloseStage::Joining { .. } | CloseStage::Done { .. } => return,
        };
        let reopened = close.reopened.is_some();
        if early && !reopened {
            self.edit_close(number, |close| {
                close.stage = CloseStage::Joining { ready_since: None };
            });
            self.machine.fanout.note_joined(number);
            return;
        }
        let now = self.now;
        let mut failed_first = false;
        if early {
            // What was delivered at the join time-out is all that there will be.
            let delivered = close.targets.values().map(|target| target.state);
            let delivered: Vec<TargetState> = delivered
                .filter(|state| *state != TargetState::Superseded)
                .collect();
            for state in delivered {
                self.machine.state.tally.close_ended(state);
            }
        }
        self.edit_close(number, |close| {
            close.finish(now);
            failed_first = close.has_failed() && !close.failure_counted;
            close.failure_counted |= failed_first;
        });
        if failed_first {
            let tally = &mut self.machine.state.tally;
            tally.close_failures = tally.close_failures.saturating_add(1);
        }
        if let Some(close) = self.machine.state.closes.get(number) {
            self.effects.push(Effect::CloseDone(close.clone()));
        }
    }

    /// Makes sure that the intent is looked at when its present deadline is reached.
    fn look_again(&mut self, number: CloseNo) {
        let machine = &mut *self.machine;
        let close = machine.state.closes.get(number);
        if let Some(deadline) = close.and_then(|close| machine.close_deadline(close)) {
            machine.fanout.look_at(number, deadline);
        }
    }

    /// Intents as they stand at the end of the turn are written.
    pub(crate) fn record_closes(&mut self) {
        for number in core::mem::take(&mut self.dirty_closes) {
            if let Some(close) = self.machine.state.closes.get(number) {
                self.records.push(Record::Close(Box::new(close.clone())));
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
    }

    // ---- a start -------------------------------------------------------------------------

    /// Fills the lanes from the intents that are open: after a start, and when the feature is turned
    /// on again. Deadlines leave them some time from here.
    pub(crate) fn resume_closes(&mut self) {
        self.machine.fanout.resumed_at = self.now;
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
    fn close_deadline(&self, close: &CloseIntent) -> Option<Timestamp> {
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
    pub(crate) fn idle_close(&self) -> Option<crate::units::Span> {
        let wanted = self.policy.session_idle_close;
        wanted.filter(|_| self.policy.session_lifecycle)
    }

    /// When closes move by themselves.
    pub(crate) fn closes_due(&self) -> Option<Timestamp> {
        if !self.policy.session_lifecycle {
            return None;
        }
        let idle = self.idle_close().and_then(|limit| {
            let (since, _) = self.state.sessions.longest_idle()?;
            Some(since.after(limit))
        });
        let joined = self.fanout.has_joined().then_some(self.last_turn);
        let due = self.fanout.next_due();
        idle.into_iter().chain(joined).chain(due).min()
    }
}

/// Engines that are not settled.
fn pending(close: &CloseIntent) -> impl Iterator<Item = &EngineId> {
    close
        .targets
        .iter()
        .filter(|(_, target)| target.state == TargetState::Pending)
        .map(|(engine, _)| engine)
}

fn round_of(close: &CloseIntent) -> Option<Round> {
    match close.stage {
        CloseStage::Delivering { since, early } => Some(Round { since, early }),
        CloseStage::Joining { .. } | CloseStage::Done { .. } => None,
    }
}

/// What a status means (CLO5, CLO6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answered {
    /// Taken.
    Done,
    /// Perhaps another time.
    Later,
    /// There is no such call.
    Absent,
    /// Final.
    Refused,
}

impl Answered {
    const fn by(code: u16) -> Self {
        match code {
            200..=299 => Self::Done,
            404 | 405 | 501 => Self::Absent,
            408 | 425 | 429 | 500..=599 => Self::Later,
            _ => Self::Refused,
        }
    }
}
