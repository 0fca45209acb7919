//! The delivery of closes: what goes out when, what an answer means, and when an intent is done
//! (CLO3 to CLO6).

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::close::{
    CallFailure, CallId, CallResult, CallWhat, CloseIntent, CloseMode, CloseReason, CloseStage,
    EngineCall, Target, TargetState,
};
use crate::effect::{Effect, Reply, Tag};
use crate::fanout::{Call, Job, Round};
use crate::ids::{CloseNo, EngineId, Label, RowNo};
use crate::lifecycle::Support;
use crate::policy::CLOSES_OPEN_MAX;
use crate::record::Record;
use crate::ticket::Stage;
use crate::turn::Turn;
use crate::units::Timestamp;

impl Turn {
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
                Some(self.failed_or_gone(engine))
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
        // Before the first reading the members may be old, and no call goes out. Open intents go on to
        // their end with the feature off too: they were promised.
        if self.machine.is_starting() {
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
        let Some(limit) = self.machine.idle_close() else {
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
            self.begin_close(session, CloseMode::Join, Some(CloseReason::Idle));
        }
    }

    /// An intent whose last lease may have ended, or that waited for a first member.
    fn go_on(&mut self, number: CloseNo) {
        let Some(close) = self.machine.state.closes.get(number) else {
            return;
        };
        let session = self.machine.state.sessions.get(&close.session);
        if session.is_some_and(|session| !session.held.is_empty()) {
            // The join time-out may have found no member.
            return self.look_again(number);
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
    pub(crate) fn send_close(&mut self, number: CloseNo, engine: &EngineId) {
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
                    let (number, request_id) = (*close, request_id.clone());
                    if !self.is_to_be_aborted(number, *row, &request_id) {
                        self.machine.fanout.abort_ended(&engine, &job);
                        continue;
                    }
                    CallWhat::Abort(request_id)
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
            let id = self
                .machine
                .fanout
                .begin(engine.clone(), job, probe, self.now);
            self.effects
                .push(Effect::Call(EngineCall { id, engine, what }));
        }
    }

    /// Whether the lease is still held, its close still wants it aborted, and no other session's
    /// request has come that an engine would abort with it.
    fn is_to_be_aborted(&mut self, number: CloseNo, row: RowNo, request_id: &Label) -> bool {
        let state = &self.machine.state;
        let held = state
            .row(row)
            .is_some_and(|ticket| matches!(ticket.stage, Stage::Held(_)));
        let Some(close) = state.closes.get(number).filter(|close| !close.is_done()) else {
            return false;
        };
        if held && state.is_foreign_prefix(request_id, &close.session) {
            self.next_seq();
            self.note_spared(number, BTreeSet::from([request_id.clone()]));
            return false;
        }
        held
    }

    // ---- changes of one intent -----------------------------------------------------------

    /// Changes an intent; its row is written at the end of the turn.
    pub(crate) fn edit_close(&mut self, number: CloseNo, change: impl FnOnce(&mut CloseIntent)) {
        if let Some(mut close) = self.machine.state.take_close(number) {
            change(&mut close);
            self.machine.state.put_close(close);
            self.dirty_closes.insert(number);
            self.close_edits = self.close_edits.saturating_add(1);
        }
    }

    /// One engine has come to its end. Of a delivery at the join time-out nothing is counted, since
    /// another one follows.
    pub(crate) fn settle_target(&mut self, number: CloseNo, engine: &EngineId, state: TargetState) {
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
    pub(crate) fn settle_close(&mut self, number: CloseNo) {
        self.finish_when_settled(number, false);
    }

    /// With `for_good` an intent ends whatever leases are held.
    pub(crate) fn finish_when_settled(&mut self, number: CloseNo, for_good: bool) {
        let Some(close) = self.machine.state.closes.get(number) else {
            return;
        };
        if close.is_done() || pending(close).next().is_some() {
            return;
        }
        let (only_early, joins_on) = match close.stage {
            CloseStage::Delivering { early, .. } => (early, early && close.reopened.is_none()),
            CloseStage::Joining { .. } if for_good => (close.timed_out, false),
            CloseStage::Joining { .. } | CloseStage::Done { .. } => return,
        };
        if joins_on {
            self.edit_close(number, |close| {
                close.stage = CloseStage::Joining { ready_since: None };
            });
            self.machine.fanout.note_joined(number);
            return;
        }
        let now = self.now;
        let mut failed_first = false;
        if only_early {
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
    pub(crate) fn look_again(&mut self, number: CloseNo) {
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
}

/// Engines that are not settled.
pub(crate) fn pending(close: &CloseIntent) -> impl Iterator<Item = &EngineId> {
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
