//! The judge's book of closes: written from the rows that the store kept, the calls that went out
//! and what they came to; it knows nothing of how the core delivers.
//!
//! | id | what holds |
//! |---|---|
//! | I12 | a close goes out for a kept intent only, and while a lease of its session is held only after a join time-out; the last lease brings one more |
//! | I13 | at most 16 calls are under way to an engine, one while it is away; an abort hits nobody else |
//! | I14 | every intent ends in time, and each engine by what it answered to this delivery |
//! | I15 | closes, failures, outcomes and sessions used anew are counted once, and callers are told |

use std::collections::{BTreeMap, BTreeSet};

use kvgate_core::close::{
    CallFailure, CallId, CallResult, CallWhat, CloseIntent, CloseMode, CloseStage, EngineCall,
    TargetState,
};
use kvgate_core::ids::{CloseId, CloseNo, EngineId, Label, RowNo, SessionId, TicketId};
use kvgate_core::policy::{
    AWAY_AFTER, CALLS_PER_ENGINE_MAX, CLOSES_FOR, Policy, RESTART_GRACE, RETRY_MAX,
};
use kvgate_core::tally::Tally;
use kvgate_core::ticket::{Stage, Ticket};
use kvgate_core::units::{Span, Timestamp};

use crate::audit::{Held, Violation, broken};
use crate::readings::World;

macro_rules! hold {
    ($id:literal, $holds:expr, $($words:tt)+) => {
        if !$holds {
            return broken($id, format!($($words)+));
        }
    };
}

/// Longest time between two calls to an engine that is owed one: the longest back-off with its
/// jitter, and a second for the turn.
const CALLED_WITHIN: Span = Span::from_millis(RETRY_MAX.millis() + RETRY_MAX.millis() / 4 + 1_000);

/// Engines of a run.
const ENGINES_MAX: u64 = 4;

const ENDS: usize = TargetState::ENDS.len();

/// A delivery, and when it began in model time.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Delivery {
    since: Timestamp,
    early: bool,
    began: u64,
}

/// A call that is under way.
#[derive(Clone, Debug)]
struct Out {
    engine: EngineId,
    /// The intent and the delivery that it belongs to.
    of: Option<(CloseNo, Timestamp, bool)>,
}

/// What is known of the calls to an engine.
#[derive(Clone, Debug, Default)]
struct Lane {
    under_way: usize,
    /// Transport failures in a row.
    failures: u32,
    /// When the last call went out or ended.
    moved_at: Timestamp,
}

/// Times and settings by which a turn is judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judged<'a> {
    pub(crate) now: Timestamp,
    pub(crate) judged_at: Timestamp,
    /// `None` when the turn's machine is gone.
    pub(crate) policy: Option<&'a Policy>,
    /// Settings changed in this turn.
    pub(crate) mixed: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Closings {
    rows: BTreeMap<CloseNo, CloseIntent>,
    newest: BTreeMap<SessionId, CloseNo>,
    open: BTreeSet<CloseNo>,
    deliveries: BTreeMap<CloseNo, Delivery>,
    held: BTreeMap<SessionId, BTreeSet<RowNo>>,
    waiting: BTreeMap<SessionId, BTreeSet<RowNo>>,
    requests: BTreeMap<RowNo, (Label, SessionId)>,
    calls: BTreeMap<CallId, Out>,
    lanes: BTreeMap<EngineId, Lane>,
    failed: BTreeSet<CloseNo>,
    closes: u64,
    failures: u64,
    ended: [u64; ENDS],
    reopened: u64,
    absent_seen: BTreeSet<EngineId>,
    resumed_at: Timestamp,
    /// Model time.
    clock: u64,
    turn: InTurn,
}

/// What happened in the present turn.
#[derive(Debug, Default)]
struct InTurn {
    answered: Vec<(Out, CallResult)>,
    retried: BTreeSet<CloseId>,
    begun: BTreeSet<CloseNo>,
    reopened: BTreeMap<TicketId, CloseNo>,
    said: BTreeSet<TicketId>,
    withdrawn: BTreeSet<TicketId>,
    told: BTreeSet<TicketId>,
    used: BTreeSet<(SessionId, TicketId)>,
    /// Requests of leases that were held at some time of the turn.
    requests: Vec<(Label, SessionId)>,
}

const fn of_delivery(close: &CloseIntent) -> Option<(Timestamp, bool)> {
    match close.stage {
        CloseStage::Delivering { since, early } => Some((since, early)),
        CloseStage::Joining { .. } | CloseStage::Done { .. } => None,
    }
}

/// How many engines count as ended in each state.
fn totals(close: &CloseIntent) -> [u64; ENDS] {
    let early = of_delivery(close).is_some_and(|(_, early)| early);
    let mut totals = [0; ENDS];
    for ((state, kept), total) in TargetState::ENDS.iter().zip(&close.counts).zip(&mut totals) {
        let shown = close
            .targets
            .values()
            .filter(|target| target.state == *state)
            .count();
        let shown = u64::try_from(shown).unwrap_or(u64::MAX);
        let open = of_delivery(close).is_some() && !early;
        *total = u64::from(*kept) + if open { shown } else { 0 };
    }
    totals
}

fn has_failed(close: &CloseIntent) -> bool {
    let none = close.counts.iter().all(|count| *count == 0);
    close.count(TargetState::Failed) > 0
        || close.count(TargetState::Refused) > 0
        || (none && close.reopened.is_none())
}

const fn code(result: &CallResult) -> Option<u16> {
    match result {
        CallResult::Status { code, .. } => Some(*code),
        CallResult::Failed(_) => None,
    }
}

impl Closings {
    pub(crate) fn turn_begins(&mut self, clock: u64) {
        self.clock = clock;
        let requests = self.requests.values().cloned().collect();
        self.turn = InTurn {
            requests,
            ..InTurn::default()
        };
    }

    // ---- what was handed in ----------------------------------------------------------------------

    /// A retry was asked for.
    pub(crate) fn retried(&mut self, close: CloseId) {
        self.turn.retried.insert(close);
    }

    /// An outcome was handed in; true when this writer made the call.
    pub(crate) fn called(&mut self, id: CallId, result: &CallResult, now: Timestamp) -> bool {
        let Some(out) = self.calls.remove(&id) else {
            return false;
        };
        let lane = self.lanes.entry(out.engine.clone()).or_default();
        lane.under_way = lane.under_way.saturating_sub(1);
        lane.moved_at = now;
        match result {
            CallResult::Status { .. } | CallResult::Failed(CallFailure::TooLarge) => {
                lane.failures = 0;
            }
            CallResult::Failed(CallFailure::Timeout | CallFailure::Refused) => lane.failures += 1,
            CallResult::Failed(CallFailure::NotAllowed) => {}
        }
        if matches!(code(result), Some(404 | 405 | 501)) {
            self.absent_seen.insert(out.engine.clone());
        }
        self.turn.answered.push((out, result.clone()));
        true
    }

    // ---- tickets ---------------------------------------------------------------------------------

    pub(crate) fn ticket_left(&mut self, ticket: &Ticket) {
        let Some(asked) = &ticket.asked else { return };
        for book in [&mut self.held, &mut self.waiting] {
            if let Some(rows) = book.get_mut(&asked.session) {
                rows.remove(&ticket.row);
                if rows.is_empty() {
                    book.remove(&asked.session);
                }
            }
        }
        self.requests.remove(&ticket.row);
    }

    pub(crate) fn ticket_put(&mut self, ticket: &Ticket) {
        let Some(asked) = &ticket.asked else { return };
        match &ticket.stage {
            Stage::Held(_) => {
                let rows = self.held.entry(asked.session.clone()).or_default();
                rows.insert(ticket.row);
                if let Some(request) = &asked.terms.request_id {
                    let request = (request.clone(), asked.session.clone());
                    self.turn.requests.push(request.clone());
                    self.requests.insert(ticket.row, request);
                }
            }
            Stage::Waiting { .. } => {
                let rows = self.waiting.entry(asked.session.clone()).or_default();
                rows.insert(ticket.row);
            }
            Stage::Ended(_) => {}
        }
    }

    /// A new life of a ticket, or a bypass at once: its session is used.
    pub(crate) fn used(&mut self, session: &SessionId, ticket: &TicketId) {
        self.turn.used.insert((session.clone(), ticket.clone()));
    }

    /// A waiter ended since its session was closed.
    pub(crate) fn withdrawn(&mut self, ticket: &TicketId) {
        self.turn.withdrawn.insert(ticket.clone());
    }

    fn holds(&self, session: &SessionId) -> bool {
        self.held.contains_key(session)
    }

    // ---- rows --------------------------------------------------------------------------------------

    /// A row was kept. Says what it shows.
    pub(crate) fn kept(
        &mut self,
        close: &CloseIntent,
        seen: Judged<'_>,
        world: &World,
    ) -> Result<Vec<&'static str>, Violation> {
        let number = close.id.number;
        let old = self.rows.get(&number).cloned();
        match &old {
            None => self.begun(close, seen)?,
            Some(old) => {
                let same = old.id == close.id
                    && old.session == close.session
                    && old.requested_at == close.requested_at
                    && old.reason == close.reason
                    && old.mode <= close.mode
                    && old.timed_out <= close.timed_out
                    && old.failure_counted <= close.failure_counted;
                if !same {
                    broken("I14", format!("{old:?} became {close:?}"))?;
                }
            }
        }
        self.used_anew(old.as_ref(), close)?;
        self.not_aborted(old.as_ref(), close)?;
        self.moved(old.as_ref(), close, seen)?;
        self.settled(old.as_ref(), close, seen, world)?;
        let before = old.as_ref().map_or([0; ENDS], totals);
        for (sum, (now, before)) in self
            .ended
            .iter_mut()
            .zip(totals(close).into_iter().zip(before))
        {
            *sum += now.saturating_sub(before);
        }
        // One that failed and was retried in the same turn is kept as counted only.
        let retried = close.failure_counted && self.turn.retried.contains(&close.id);
        if (close.is_done() && has_failed(close) || retried) && self.failed.insert(number) {
            self.failures += 1;
        }
        match of_delivery(close) {
            Some((since, early)) => {
                let known = self.deliveries.get(&number);
                if known.is_none_or(|known| known.since != since || known.early != early) {
                    let began = self.clock;
                    self.deliveries.insert(
                        number,
                        Delivery {
                            since,
                            early,
                            began,
                        },
                    );
                }
            }
            None => {
                self.deliveries.remove(&number);
            }
        }
        if close.is_done() {
            self.open.remove(&number);
        } else {
            self.open.insert(number);
        }
        let met = Self::met(old.as_ref(), close);
        self.rows.insert(number, close.clone());
        Ok(met)
    }

    fn begun(&mut self, close: &CloseIntent, seen: Judged<'_>) -> Held {
        let number = close.id.number;
        let last = self.rows.last_key_value().map(|(last, _)| *last);
        hold!("I14", last < Some(number), "{number:?} after {last:?}");
        if let Some(policy) = seen.policy {
            let allowed = policy.session_lifecycle || seen.mixed;
            hold!("I12", allowed, "an intent while closes are off: {close:?}");
        }
        let former = self
            .newest
            .get(&close.session)
            .and_then(|former| self.rows.get(former));
        hold!(
            "I14",
            former.is_none_or(CloseIntent::is_done),
            "{close:?} beside {former:?}"
        );
        self.newest.insert(close.session.clone(), number);
        self.turn.begun.insert(number);
        self.closes += 1;
        Ok(())
    }

    fn used_anew(&mut self, old: Option<&CloseIntent>, close: &CloseIntent) -> Held {
        let before = old.and_then(|old| old.reopened.as_ref());
        match (before, &close.reopened) {
            (None, Some(reopened)) => {
                self.reopened += 1;
                let number = close.id.number;
                self.turn.reopened.insert(reopened.ticket.clone(), number);
                // What is still pending is superseded at once (CLO8).
                hold!("I14", close.is_done(), "used anew and not over: {close:?}");
            }
            (before, after) => {
                hold!(
                    "I15",
                    before == after.as_ref(),
                    "used anew twice: {close:?}"
                );
            }
        }
        Ok(())
    }

    /// CLO3: left to the join are requests whose name begins one of another session, and no others.
    fn not_aborted(&self, old: Option<&CloseIntent>, close: &CloseIntent) -> Held {
        for label in &close.not_aborted {
            if old.is_some_and(|old| old.not_aborted.contains(label)) {
                continue;
            }
            let begins = self.turn.requests.iter().any(|(other, session)| {
                *session != close.session && other.as_str().starts_with(label.as_str())
            });
            hold!(
                "I13",
                begins && close.mode == CloseMode::Abort,
                "{label:?} was spared for nobody: {close:?}"
            );
        }
        Ok(())
    }

    /// The stages of an intent follow each other as they must.
    fn moved(&self, old: Option<&CloseIntent>, close: &CloseIntent, seen: Judged<'_>) -> Held {
        if let Some(old) = old
            && old.is_done()
            && old.stage != close.stage
        {
            hold!(
                "I14",
                self.turn.retried.contains(&close.id),
                "a close that was done began again by itself: {close:?}"
            );
        }
        let before = old.and_then(of_delivery);
        match close.stage {
            CloseStage::Delivering { since, early: true } if before != Some((since, true)) => {
                if let Some(policy) = seen.policy {
                    let due = seen.mixed
                        || policy.join_timeout.is_some_and(|timeout| {
                            seen.judged_at.reached(close.requested_at.after(timeout))
                        });
                    hold!("I12", due, "delivered before the join: {close:?}");
                }
                let first = old.is_none_or(|old| !old.timed_out);
                hold!("I12", first, "two deliveries at the time-out: {close:?}");
            }
            CloseStage::Delivering {
                since,
                early: false,
            } if before != Some((since, false)) => {
                let held = self.held.get(&close.session);
                hold!(
                    "I12",
                    held.is_none(),
                    "delivered with {held:?} held: {close:?}"
                );
            }
            CloseStage::Done { .. } => {
                // After a delivery at the time-out the last lease brings one more (CLO3).
                let early = before.is_some_and(|(_, early)| early);
                hold!(
                    "I12",
                    !early || close.reopened.is_some() || close.count(TargetState::Delivered) == 0,
                    "done without the delivery after the last lease: {close:?}"
                );
            }
            CloseStage::Joining { .. } | CloseStage::Delivering { .. } => {}
        }
        Ok(())
    }

    /// Each engine ended as it answered, to this very delivery.
    fn settled(
        &self,
        old: Option<&CloseIntent>,
        close: &CloseIntent,
        seen: Judged<'_>,
        world: &World,
    ) -> Held {
        let number = close.id.number;
        let Some(old) = old else { return Ok(()) };
        let Some((since, early)) = of_delivery(old) else {
            if close.is_done() && !old.is_done() {
                let delivered = close.count(TargetState::Delivered);
                // What was delivered at the time-out may be all that there will be (CLO8).
                let before = old
                    .targets
                    .values()
                    .filter(|target| target.state == TargetState::Delivered);
                let before = u32::try_from(before.count()).unwrap_or(u32::MAX);
                hold!(
                    "I14",
                    delivered == 0 || (close.reopened.is_some() && delivered == before),
                    "delivered without a call: {close:?}"
                );
            }
            return Ok(());
        };
        let same = of_delivery(close) == Some((since, early));
        if !same && !close.is_done() {
            return Ok(());
        }
        let began = self.deliveries.get(&number).map_or(0, |one| one.began);
        for (engine, target) in &old.targets {
            if target.state != TargetState::Pending {
                continue;
            }
            let now = close.targets.get(engine);
            let state = now.map_or(TargetState::Delivered, |target| target.state);
            let answers: Vec<&CallResult> = self
                .turn
                .answered
                .iter()
                .filter(|(out, _)| out.engine == *engine && out.of == Some((number, since, early)))
                .map(|(_, result)| result)
                .collect();
            let is = |wanted: &dyn Fn(u16) -> bool| {
                answers
                    .iter()
                    .any(|answer| code(answer).is_some_and(wanted))
            };
            let attempts = now.map_or(0, |target| target.attempts);
            let ok = match state {
                TargetState::Pending => true,
                TargetState::Delivered => {
                    let taken = world.took_close(engine, &close.session, began);
                    is(&|code| code < 300) && taken
                }
                TargetState::Refused => is(&|code| (300..500).contains(&code) || code == 501),
                TargetState::Unsupported => {
                    world.is_vllm(engine) || self.absent_seen.contains(engine)
                }
                TargetState::Restarted => world.restarted_since(engine, began),
                TargetState::Superseded => close.reopened.is_some(),
                TargetState::Failed | TargetState::Gone => seen.policy.is_none_or(|policy| {
                    attempts >= policy.close_attempts
                        || seen.judged_at.reached(since.after(policy.close_deadline))
                        || seen.mixed
                }),
            };
            hold!(
                "I14",
                ok,
                "{engine:?} ended as {state:?} by {answers:?}, since {began}: {close:?}"
            );
            // A start may find a lower limit than there were attempts: the next one is the last.
            let is_last = state != TargetState::Pending && attempts <= target.attempts + 1;
            if let Some(policy) = seen.policy {
                hold!(
                    "I14",
                    attempts <= policy.close_attempts.max(target.attempts) || is_last || seen.mixed,
                    "{attempts} attempts at {engine:?}: {close:?}"
                );
            }
        }
        Ok(())
    }

    pub(crate) fn forgotten(&mut self, number: CloseNo, now: Timestamp) -> Held {
        let Some(close) = self.rows.remove(&number) else {
            return broken("I14", format!("{number:?} was forgotten twice"));
        };
        self.deliveries.remove(&number);
        // A number comes again when all higher ones are forgotten.
        self.failed.remove(&number);
        if self.newest.get(&close.session) == Some(&number) {
            self.newest.remove(&close.session);
        }
        let CloseStage::Done { at } = close.stage else {
            return broken("I14", format!("an open intent was forgotten: {close:?}"));
        };
        let old = now.reached(at.after(CLOSES_FOR));
        hold!("I14", old, "forgotten too early: {close:?}");
        Ok(())
    }

    /// CLO9, on what was kept.
    pub(crate) fn accounts(&mut self, tally: &Tally) -> Held {
        // An engine that failed and was asked again in the same turn is kept as pending: of it there
        // is the count only.
        let again = u64::try_from(self.turn.retried.len()).unwrap_or(0);
        for (state, (own, counted)) in TargetState::ENDS
            .iter()
            .zip(self.ended.iter_mut().zip(tally.close_deliveries))
        {
            let more = counted.saturating_sub(*own);
            if state.is_retried() && more <= again.saturating_mul(ENGINES_MAX) {
                *own += more;
            }
        }
        let counted = (
            tally.closes,
            tally.close_failures,
            tally.close_deliveries,
            tally.sessions_reopened,
        );
        let own = (self.closes, self.failures, self.ended, self.reopened);
        hold!(
            "I15",
            counted == own,
            "counted are closes, failures, outcomes, used anew {counted:?}, kept are {own:?}"
        );
        Ok(())
    }

    /// All records of a commit are in the book.
    pub(crate) fn whole(&self) -> Held {
        for number in &self.turn.begun {
            let Some(close) = self.rows.get(number) else {
                continue;
            };
            let waiting = self.waiting.get(&close.session);
            hold!(
                "I15",
                close.reopened.is_some() || waiting.is_none(),
                "{waiting:?} wait for a session that was closed: {close:?}"
            );
        }
        Ok(())
    }

    // ---- effects -----------------------------------------------------------------------------------

    /// A call is to go out: its turn is kept and in the book.
    pub(crate) fn sent(&mut self, call: &EngineCall, seen: Judged<'_>) -> Held {
        let EngineCall { id, engine, what } = call;
        let lane = self.lanes.get(engine).cloned().unwrap_or_default();
        let most = if lane.failures >= AWAY_AFTER {
            1
        } else {
            CALLS_PER_ENGINE_MAX
        };
        hold!(
            "I13",
            lane.under_way < most,
            "{} calls are under way to {engine:?}, one more than {most}",
            lane.under_way + 1
        );
        let of = match what {
            CallWhat::Close(session) => Some(self.close_sent(engine, session)?),
            CallWhat::Abort(begin) => {
                self.abort_sent(begin)?;
                None
            }
        };
        let lane = self.lanes.entry(engine.clone()).or_default();
        lane.under_way += 1;
        lane.moved_at = seen.now;
        let out = Out {
            engine: engine.clone(),
            of: of.flatten(),
        };
        let known = self.calls.insert(*id, out);
        hold!("I13", known.is_none(), "{id:?} names two calls");
        Ok(())
    }

    fn close_sent(
        &self,
        engine: &EngineId,
        session: &SessionId,
    ) -> Result<Option<(CloseNo, Timestamp, bool)>, Violation> {
        let close = self
            .newest
            .get(session)
            .and_then(|number| self.rows.get(number));
        let Some(close) = close else {
            broken("I12", format!("{session:?} is closed without an intent"))?;
            return Ok(None);
        };
        let pending = close
            .targets
            .get(engine)
            .is_some_and(|target| target.state == TargetState::Pending);
        let Some((since, early)) = of_delivery(close).filter(|_| pending) else {
            broken(
                "I12",
                format!("{engine:?} is sent a close that is not kept as pending: {close:?}"),
            )?;
            return Ok(None);
        };
        if let (Some(held), false) = (self.held.get(session), early) {
            broken(
                "I12",
                format!("a close goes out with {held:?} held: {close:?}"),
            )?;
        }
        let of = Some((close.id.number, since, early));
        let twice = self
            .calls
            .values()
            .any(|out| out.engine == *engine && out.of == of);
        if twice {
            broken(
                "I13",
                format!("{engine:?} is sent what is on its way: {close:?}"),
            )?;
        }
        Ok(of)
    }

    /// CLO3: engines match by prefix, so nobody else's request may begin so.
    fn abort_sent(&self, begin: &Label) -> Held {
        let hit: BTreeSet<&SessionId> = self
            .requests
            .values()
            .filter(|(request, _)| request.as_str().starts_with(begin.as_str()))
            .map(|(_, session)| session)
            .collect();
        let mut owners = self
            .requests
            .values()
            .filter(|(request, _)| request == begin);
        let wanted = owners.any(|(_, session)| {
            let close = self
                .newest
                .get(session)
                .and_then(|number| self.rows.get(number));
            close.is_some_and(|close| !close.is_done() && close.mode == CloseMode::Abort)
        });
        hold!("I13", wanted, "{begin:?} is aborted for no close");
        hold!(
            "I13",
            hit.len() == 1,
            "the abort of {begin:?} hits the sessions {hit:?}"
        );
        Ok(())
    }

    /// An answer to an acquire of the ticket says that its session was used anew.
    pub(crate) fn said_reopened(&mut self, ticket: &TicketId) -> Held {
        let first = self.turn.said.insert(ticket.clone());
        hold!(
            "I15",
            first,
            "{ticket:?} was told twice of a session used anew"
        );
        Ok(())
    }

    /// The open calls of the ticket were told that its session was closed.
    pub(crate) fn told_withdrawn(&mut self, ticket: &TicketId) {
        self.turn.told.insert(ticket.clone());
    }

    /// What was to be told in this turn was told, and nothing else (CLO3, CLO8).
    pub(crate) fn all_told(&self, judged_at: Timestamp) -> Held {
        let turn = &self.turn;
        hold!(
            "I15",
            turn.said.iter().eq(turn.reopened.keys()),
            "told of a session used anew: {:?}, due to {:?}",
            turn.said,
            turn.reopened
        );
        hold!(
            "I15",
            turn.withdrawn == turn.told,
            "withdrawn by a close: {:?}, told so: {:?}",
            turn.withdrawn,
            turn.told
        );
        for (session, ticket) in &turn.used {
            let Some(number) = self.newest.get(session) else {
                continue;
            };
            let Some(close) = self.rows.get(number) else {
                continue;
            };
            let forgotten = matches!(close.stage, CloseStage::Done { at }
                if judged_at.reached(at.after(CLOSES_FOR)));
            hold!(
                "I15",
                close.reopened.is_some() || turn.begun.contains(number) || forgotten,
                "{ticket:?} used {session:?} anew and nothing says so: {close:?}"
            );
        }
        Ok(())
    }

    // ---- after a turn ------------------------------------------------------------------------------

    /// What must hold between two turns. `blocked` is the time up to which the
    /// service could do nothing.
    pub(crate) fn at_rest(
        &mut self,
        seen: Judged<'_>,
        blocked: Timestamp,
        members: &BTreeSet<EngineId>,
    ) -> Held {
        // What was learnt of an engine that left may be forgotten once it is sent nothing.
        for (engine, lane) in &mut self.lanes {
            if lane.under_way == 0 && !members.contains(engine) {
                lane.failures = 0;
            }
        }
        let Some(policy) = seen.policy else {
            return Ok(());
        };
        let limit = policy.close_deadline;
        let at_least = self.resumed_at.after(limit.min(RESTART_GRACE));
        for close in self.open() {
            let (deadline, what) = match close.stage {
                CloseStage::Joining { ready_since: None } => {
                    let held = self.holds(&close.session);
                    hold!("I14", held, "nobody holds, and it is not sent: {close:?}");
                    let timeout = policy.join_timeout.filter(|_| !close.timed_out);
                    (
                        timeout.map(|timeout| close.requested_at.after(timeout)),
                        "join",
                    )
                }
                CloseStage::Joining {
                    ready_since: Some(since),
                } => {
                    hold!(
                        "I14",
                        members.is_empty(),
                        "members and no delivery: {close:?}"
                    );
                    (Some(since.after(limit).max(at_least)), "time")
                }
                CloseStage::Delivering { since, early } => {
                    let joined = early && !self.holds(&close.session);
                    hold!("I12", !joined, "the last lease brought nothing: {close:?}");
                    (Some(since.after(limit).max(at_least)), "time")
                }
                CloseStage::Done { .. } => (None, "end"),
            };
            let over = deadline.is_some_and(|at| seen.judged_at.reached(at));
            hold!("I14", !over, "its {what} is over: {close:?}");
            self.somebody_calls(close, seen.now, blocked)?;
        }
        Ok(())
    }

    fn somebody_calls(&self, close: &CloseIntent, now: Timestamp, blocked: Timestamp) -> Held {
        let Some((since, _)) = of_delivery(close) else {
            return Ok(());
        };
        for (engine, target) in &close.targets {
            if target.state != TargetState::Pending {
                continue;
            }
            let lane = self.lanes.get(engine);
            let moved = lane.map_or(since, |lane| lane.moved_at.max(since));
            let moved = moved.max(blocked).max(self.resumed_at);
            let idle = lane.is_none_or(|lane| lane.under_way == 0);
            hold!(
                "I14",
                !idle || now.since(moved) <= CALLED_WITHIN,
                "{engine:?} was not called since {moved:?}: {close:?}"
            );
        }
        Ok(())
    }

    fn open(&self) -> impl Iterator<Item = &CloseIntent> {
        self.open.iter().filter_map(|number| self.rows.get(number))
    }

    /// A machine shows the same intents; old ones may be forgotten there before they are in the store.
    pub(crate) fn same(&self, shown: &[CloseIntent], now: Timestamp) -> Held {
        for close in shown {
            let own = self.rows.get(&close.id.number);
            hold!("I9", own == Some(close), "{close:?} is kept as {own:?}");
        }
        let old = self.rows.values().filter(|close| {
            matches!(close.stage, CloseStage::Done { at } if now.reached(at.after(CLOSES_FOR)))
        });
        let missing = self.rows.len().saturating_sub(shown.len());
        hold!("I9", missing <= old.count(), "{missing} closes are missing");
        Ok(())
    }

    // ---- starts ------------------------------------------------------------------------------------

    /// Another writer takes over: what the former one was told is nothing to it.
    pub(crate) fn starts(&mut self, now: Timestamp, clock: u64) {
        self.turn_begins(clock);
        self.calls.clear();
        self.lanes.clear();
        self.resumed_at = now;
    }

    /// All clients are gone and time has passed.
    pub(crate) fn at_the_end(&self) -> Held {
        let open: Vec<&CloseIntent> = self.open().collect();
        hold!("I14", open.is_empty(), "open at the end: {open:?}");
        Ok(())
    }

    /// How the rows of a commit and its outcomes count among what occurred.
    fn met(old: Option<&CloseIntent>, close: &CloseIntent) -> Vec<&'static str> {
        let mut met = Vec::new();
        if old.is_none() {
            met.push("close");
        }
        if old.is_some_and(|old| old.mode != close.mode) {
            met.push("close upgraded to abort");
        }
        if old.is_some_and(CloseIntent::is_done) && !close.is_done() {
            met.push("close retried");
        }
        if close.timed_out && old.is_some_and(|old| !old.timed_out) {
            met.push("close sent at the join time-out");
        }
        if close.reopened.is_some() && old.is_none_or(|old| old.reopened.is_none()) {
            met.push("session used anew");
        }
        if !close.not_aborted.is_empty() && old.is_none_or(|old| old.not_aborted.is_empty()) {
            met.push("abort spared");
        }
        if matches!(
            close.stage,
            CloseStage::Joining {
                ready_since: Some(_)
            }
        ) {
            met.push("close without a member");
        }
        if close.is_done() && old.is_none_or(|old| !old.is_done()) {
            for state in TargetState::ENDS {
                if close.count(state) > 0 {
                    met.push(match state {
                        TargetState::Pending | TargetState::Delivered => "close delivered",
                        TargetState::Refused => "close refused",
                        TargetState::Unsupported => "close unsupported",
                        TargetState::Restarted => "close moot by a restart",
                        TargetState::Superseded => "close superseded",
                        TargetState::Failed => "close failed",
                        TargetState::Gone => "close to one that left",
                    });
                }
            }
        }
        met
    }
}

#[cfg(test)]
mod tests {
    use kvgate_core::close::{Reopened, Target};
    use kvgate_core::decision::Scope;
    use kvgate_core::ids::{Epoch, Issue, LeaseId, Term};
    use kvgate_core::ticket::{Asked, Lease, Sent, Terms};
    use kvgate_core::units::Tokens;

    use super::*;
    use crate::dice::Dice;

    const ENGINE: &str = "http://engine-0:30000";

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1_000)
    }

    fn policy() -> Policy {
        Policy {
            session_lifecycle: true,
            ..Policy::default()
        }
    }

    fn session(name: &str) -> SessionId {
        SessionId::new(name).unwrap()
    }

    fn label(name: &str) -> Label {
        Label::new(name).unwrap()
    }

    fn held(row: u64, of: &str, request: &str) -> Ticket {
        Ticket {
            row: RowNo(row),
            id: TicketId::new(&format!("t{row}")).unwrap(),
            asked: Some(Asked {
                session: session(of),
                sent: Sent::Sum(Tokens::ZERO),
                terms: Terms {
                    reservation: Tokens::ZERO,
                    scope: Scope::Train,
                    ttl: Span::from_secs(60),
                    client: None,
                    request_id: Some(label(request)),
                },
            }),
            stage: Stage::Held(Lease {
                id: LeaseId {
                    issue: Issue(row),
                    salt: 1,
                },
                granted_at: at(0),
                waited: None,
                epoch: Epoch(1),
                ttl: Span::from_secs(60),
                ends_at: at(60),
                graced: false,
            }),
        }
    }

    /// Close number 1 of the session `s`, at one engine.
    fn joining() -> CloseIntent {
        CloseIntent {
            id: CloseId {
                number: CloseNo(1),
                salt: 1,
            },
            session: session("s"),
            mode: CloseMode::Abort,
            reason: None,
            requested_at: at(1),
            stage: CloseStage::Joining { ready_since: None },
            targets: BTreeMap::from([(EngineId::new(ENGINE), Target::PENDING)]),
            counts: [0; ENDS],
            timed_out: false,
            failure_counted: false,
            reopened: None,
            not_aborted: BTreeSet::new(),
        }
    }

    fn delivering(early: bool) -> CloseIntent {
        CloseIntent {
            stage: CloseStage::Delivering {
                since: at(1),
                early,
            },
            timed_out: early,
            ..joining()
        }
    }

    fn done(state: TargetState) -> CloseIntent {
        let mut close = CloseIntent {
            stage: CloseStage::Done { at: at(2) },
            ..joining()
        };
        for (end, count) in TargetState::ENDS.iter().zip(&mut close.counts) {
            *count = u32::from(*end == state);
        }
        close.targets.clear();
        if state != TargetState::Delivered {
            let ended = Target {
                state,
                ..Target::PENDING
            };
            close.targets.insert(EngineId::new(ENGINE), ended);
        }
        close
    }

    fn call(number: u64, what: CallWhat) -> EngineCall {
        EngineCall {
            id: CallId {
                term: Term(1),
                number,
            },
            engine: EngineId::new(ENGINE),
            what,
        }
    }

    struct Book {
        own: Closings,
        world: World,
        policy: Policy,
    }

    impl Book {
        fn new() -> Self {
            Self {
                own: Closings::default(),
                world: World::new(0, &mut Dice::new(1, 1)),
                policy: policy(),
            }
        }

        fn with(rows: &[CloseIntent]) -> Self {
            let mut book = Self::new();
            for row in rows {
                assert_eq!(book.keep(row), None, "{row:?}");
                book.own.turn_begins(0);
            }
            book
        }

        fn keep(&mut self, close: &CloseIntent) -> Option<&'static str> {
            let seen = seen(&self.policy, 3);
            let kept = self.own.kept(close, seen, &self.world);
            kept.err().map(|violation| violation.invariant)
        }

        fn send(&mut self, call: &EngineCall) -> Option<&'static str> {
            let seen = seen(&self.policy, 3);
            by(self.own.sent(call, seen))
        }

        fn rests(&mut self, now: u64) -> Option<&'static str> {
            let members = BTreeSet::from([EngineId::new(ENGINE)]);
            let seen = seen(&self.policy, now);
            by(self.own.at_rest(seen, at(0), &members))
        }
    }

    const fn seen(policy: &Policy, now: u64) -> Judged<'_> {
        Judged {
            now: Timestamp::from_millis(now * 1_000),
            judged_at: Timestamp::from_millis(now * 1_000),
            policy: Some(policy),
            mixed: false,
        }
    }

    fn by(held: Held) -> Option<&'static str> {
        held.err().map(|violation| violation.invariant)
    }

    /// CLO2, CLO3, CLO5: rows that must not follow each other are noticed.
    #[test]
    fn rows_that_break_a_rule_are_noticed() {
        let second = CloseIntent {
            id: CloseId {
                number: CloseNo(2),
                salt: 1,
            },
            ..joining()
        };
        let spared = CloseIntent {
            not_aborted: BTreeSet::from([label("r")]),
            ..joining()
        };
        let used_anew = CloseIntent {
            reopened: Some(Reopened {
                at: at(2),
                ticket: TicketId::new("t").unwrap(),
            }),
            ..joining()
        };
        let cases: [(&str, &[CloseIntent], CloseIntent, &str); 10] = [
            ("two open", &[joining()], second, "I14"),
            ("no time-out", &[joining()], delivering(true), "I12"),
            (
                "unasked",
                &[delivering(false)],
                done(TargetState::Delivered),
                "I14",
            ),
            (
                "refused by none",
                &[delivering(false)],
                done(TargetState::Refused),
                "I14",
            ),
            (
                "given up",
                &[delivering(false)],
                done(TargetState::Failed),
                "I14",
            ),
            (
                "no restart",
                &[delivering(false)],
                done(TargetState::Restarted),
                "I14",
            ),
            (
                "no newer use",
                &[delivering(false)],
                done(TargetState::Superseded),
                "I14",
            ),
            (
                "no retry",
                &[joining(), done(TargetState::Unsupported)],
                delivering(false),
                "I14",
            ),
            ("spared for nobody", &[joining()], spared, "I13"),
            ("used and open", &[joining()], used_anew, "I14"),
        ];
        for (what, rows, last, invariant) in cases {
            let mut book = Book::with(rows);
            assert_eq!(book.keep(&last), Some(invariant), "{what}");
        }
        let mut book = Book::with(&[joining()]);
        book.own.ticket_put(&held(1, "s", "r"));
        assert_eq!(book.keep(&delivering(false)), Some("I12"), "with a lease");
        let mut book = Book::new();
        book.policy.join_timeout = Some(Span::from_secs(1));
        assert_eq!(book.keep(&joining()), None);
        assert_eq!(book.keep(&delivering(true)), None);
        let mut ended = done(TargetState::Delivered);
        ended.timed_out = true;
        assert_eq!(book.keep(&ended), Some("I12"), "not once more");
        let mut book = Book::with(&[joining()]);
        assert_eq!(by(book.own.forgotten(CloseNo(1), at(9_000))), Some("I14"));
        let mut book = Book::with(&[joining(), done(TargetState::Unsupported)]);
        assert_eq!(by(book.own.forgotten(CloseNo(1), at(9_000))), None);
        assert_eq!(by(book.own.forgotten(CloseNo(1), at(9_000))), Some("I14"));
        let mut book = Book::with(&[joining(), done(TargetState::Unsupported)]);
        assert_eq!(by(book.own.forgotten(CloseNo(1), at(9))), Some("I14"));
    }

    /// CLO3, CLO4, CLO6: calls that must not go out are noticed.
    #[test]
    fn calls_that_break_a_rule_are_noticed() {
        let close = CallWhat::Close(session("s"));
        let abort = CallWhat::Abort(label("r"));
        assert_eq!(Book::new().send(&call(1, close.clone())), Some("I12"));
        let mut book = Book::with(&[joining()]);
        assert_eq!(book.send(&call(1, close.clone())), Some("I12"), "joins");
        let mut book = Book::with(&[delivering(false)]);
        assert_eq!(book.send(&call(1, close.clone())), None);
        assert_eq!(book.send(&call(2, close.clone())), Some("I13"), "twice");
        let mut book = Book::with(&[delivering(false)]);
        book.own.ticket_put(&held(1, "s", "r"));
        assert_eq!(book.send(&call(1, close.clone())), Some("I12"), "a lease");
        let mut book = Book::with(&[delivering(false)]);
        book.policy.session_lifecycle = false;
        assert_eq!(book.send(&call(1, close)), None, "promised before");

        let mut book = Book::with(&[joining()]);
        assert_eq!(book.send(&call(1, abort.clone())), Some("I13"), "no lease");
        book.own.ticket_put(&held(1, "s", "r"));
        for number in 1..=16 {
            assert_eq!(book.send(&call(number, abort.clone())), None);
        }
        assert_eq!(book.send(&call(17, abort.clone())), Some("I13"), "too many");
        let refused = CallResult::Failed(CallFailure::Refused);
        for number in 1..=15 {
            let id = call(number, abort.clone()).id;
            assert!(book.own.called(id, &refused, at(3)));
            assert!(!book.own.called(id, &refused, at(3)), "once");
        }
        assert_eq!(book.send(&call(18, abort.clone())), Some("I13"), "away");
        let mut book = Book::with(&[joining()]);
        book.own.ticket_put(&held(1, "s", "r"));
        book.own.ticket_put(&held(2, "other", "r2"));
        assert_eq!(book.send(&call(1, abort)), Some("I13"), "two sessions");
    }

    /// CLO3, CLO6, CLO8, CLO9: what does not happen in time, is not told or not counted is noticed.
    #[test]
    fn what_is_missing_is_noticed() {
        let mut book = Book::with(&[joining()]);
        assert_eq!(book.rests(2), Some("I14"), "nobody holds");
        book.own.ticket_put(&held(1, "s", "r"));
        assert_eq!(book.rests(9_000), None, "no time-out");
        book.policy.join_timeout = Some(Span::from_secs(5));
        assert_eq!(book.rests(5), None);
        assert_eq!(book.rests(6), Some("I14"), "the join time-out");
        let mut book = Book::with(&[delivering(false)]);
        assert_eq!(book.rests(20), None);
        assert_eq!(book.rests(21), Some("I14"), "nobody calls");
        let close = CallWhat::Close(session("s"));
        assert_eq!(book.send(&call(1, close)), None);
        assert_eq!(book.rests(120), None);
        assert_eq!(book.rests(121), Some("I14"), "the deadline");
        assert_eq!(by(book.own.at_the_end()), Some("I14"), "open");

        let counted = Tally {
            closes: 1,
            ..Tally::default()
        };
        let mut book = Book::with(&[joining()]);
        assert_eq!(by(book.own.accounts(&counted)), None);
        assert_eq!(by(book.own.accounts(&Tally::default())), Some("I15"));
        assert_eq!(by(book.own.same(&[joining()], at(3))), None);
        assert_eq!(by(book.own.same(&[], at(3))), Some("I9"));
        assert_eq!(by(book.own.same(&[delivering(false)], at(3))), Some("I9"));

        let ticket = TicketId::new("t").unwrap();
        let mut book = Book::with(&[joining()]);
        assert_eq!(by(book.own.all_told(at(3))), None);
        book.own.used(&session("s"), &ticket);
        assert_eq!(by(book.own.all_told(at(3))), Some("I15"), "used anew");
        let mut book = Book::new();
        book.own.withdrawn(&ticket);
        assert_eq!(by(book.own.all_told(at(3))), Some("I15"), "withdrawn");
        let mut book = Book::new();
        assert_eq!(by(book.own.said_reopened(&ticket)), None);
        assert_eq!(by(book.own.said_reopened(&ticket)), Some("I15"), "twice");
        assert_eq!(by(book.own.all_told(at(3))), Some("I15"), "not due");
    }
}
