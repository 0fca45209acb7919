//! The judge of a run: a book of its own, written from what the store kept and from nothing else,
//! and the invariants I1 to I11 that are held against it after every turn.
//!
//! | id | what holds |
//! |---|---|
//! | I1 | reserved is the sum of the leases |
//! | I2 | no ticket stands in two places |
//! | I3 | a life of a ticket is charged at most once, whatever is retried |
//! | I4 | grants come in the order of the line |
//! | I5 | a grant fits under the ceiling, without pressure, at that moment |
//! | I6 | every waiter leaves at its max wait, and no one is dropped who is there |
//! | I7 | leases end within 1 s after their end and never before |
//! | I8 | lease ids and seqs never repeat, over crashes too |
//! | I9 | the recovered state is the state after the last kept commit |
//! | I10 | nobody is told what the store has not kept |
//! | I11 | every acquire is accounted for, and at the end nothing is left |
//!
//! I12 to I15 are about closes and stand in [`crate::closings`], I16 is about step reports and stands
//! in [`crate::trackers`], I17 about settings and the audit and stands in [`crate::operators`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvgate_core::capacity::Measure;
use kvgate_core::close::CallWhat;
use kvgate_core::decision::{BypassReason, CancelReason, EndHow};
use kvgate_core::effect::{Answer, Effect, Outcome, Reply};
use kvgate_core::ids::{Epoch, LeaseId, RowNo, Seq, TicketId};
use kvgate_core::machine::Kept;
use kvgate_core::policy::{
    FINISHED_FOR, FIRST_ROUND_WAIT, PAUSE_AFTER, PAUSE_EVERY, PAUSE_HOLD_MAX, Policy, RESTART_GRACE,
};
use kvgate_core::record::Record;
use kvgate_core::tally::{LeaseEnd, Tally};
use kvgate_core::ticket::{Stage, Ticket};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::View;

use crate::closings::{Closings, Judged};
use crate::faults::KeptCommit;
use crate::operators::Operators;
use crate::readings::World;
use crate::trackers::Trackers;

/// An invariant that did not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Which: `I1` to `I17`.
    pub invariant: &'static str,
    /// What was seen.
    pub what: String,
}

pub(crate) type Held = Result<(), Violation>;

pub(crate) fn broken(invariant: &'static str, what: String) -> Held {
    Err(Violation { invariant, what })
}

/// Says what did not hold, with the words of a `format!`.
macro_rules! hold {
    ($id:literal, $holds:expr, $($words:tt)+) => {
        if !$holds {
            return broken($id, format!($($words)+));
        }
    };
}

/// What a turn could see when it decided.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    measure: Arc<Measure>,
    policy: Arc<Policy>,
    paced: bool,
}

impl Sight {
    pub(crate) fn of(view: &View) -> Self {
        Self {
            measure: Arc::clone(&view.measure),
            policy: Arc::clone(&view.policy),
            paced: view.paced,
        }
    }
}

/// What a turn did, for the judge.
#[derive(Clone, Debug)]
pub(crate) struct TurnSeen {
    pub(crate) now: Timestamp,
    /// Before the turn.
    pub(crate) before: Sight,
    /// After it; `None` when the machine is gone.
    pub(crate) after: Option<Sight>,
    /// A round or new settings stood among its commands: what arrivals saw is between the two.
    pub(crate) mixed: bool,
}

/// A time in which nothing ages (TIM3), as the rules say it.
#[derive(Clone, Copy, Debug)]
struct Hold {
    judged_at: Timestamp,
    began_at: Timestamp,
    until: Timestamp,
    starting: bool,
}

/// What the invariants are held against.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    tickets: BTreeMap<RowNo, Ticket>,
    rows: BTreeMap<TicketId, BTreeSet<RowNo>>,
    waiting: BTreeSet<RowNo>,
    ends: BTreeSet<(Timestamp, RowNo)>,
    /// Ends that renewals moved and that are not kept yet, and since when.
    renewed: BTreeMap<RowNo, (Timestamp, Timestamp)>,
    held: u64,
    reserved: u128,
    /// Every lease that was ever kept, with its row and ticket.
    leases: BTreeMap<LeaseId, (RowNo, TicketId)>,
    claimed: BTreeSet<LeaseId>,
    /// When the last call of a waiter ended.
    away: BTreeMap<TicketId, Timestamp>,
    /// Bypasses whose answer was written whole, and in which turn the core heard of it.
    told: BTreeMap<TicketId, u64>,
    turn: u64,
    /// Bypasses that live in memory only, and since when.
    immediate: BTreeMap<TicketId, Timestamp>,
    /// First enqueues that a dropped ticket, or one whose grant was taken back, brings back (TIC3).
    clocks: BTreeMap<TicketId, Timestamp>,
    /// Bypasses of earlier turns that were cancelled in this turn: its answers may be of before.
    marked: BTreeSet<TicketId>,
    seq: Seq,
    now: Timestamp,
    next_issue: u64,
    epoch: Option<Epoch>,
    tally: Tally,
    hold: Option<Hold>,
    last_turn: Timestamp,
    /// Up to here finished tickets were forgotten by age.
    forgot_at: Timestamp,
    last_pause: Option<Timestamp>,
    fresh: bool,
    /// Up to here the service could do nothing: what comes late is counted from here.
    blocked_until: Timestamp,
    round_tokens: u128,
    round_grants: u64,
    created: u64,
    enqueued: u64,
    granted: u64,
    waiters_cancelled: u64,
    waiters_bypassed: u64,
    leases_ended: u64,
    bypassed_at_once: u64,
    pub(crate) closings: Closings,
    trackers: Trackers,
    operators: Operators,
    /// How often each thing of the core occurred.
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

fn sum(counters: &[u64]) -> u64 {
    counters
        .iter()
        .fold(0, |sum, more| sum.saturating_add(*more))
}

fn reservation(ticket: &Ticket) -> Tokens {
    ticket
        .asked
        .as_ref()
        .map_or(Tokens::ZERO, |asked| asked.terms.reservation)
}

const fn bypass_name(reason: BypassReason) -> &'static str {
    match reason {
        BypassReason::Disabled => "bypass disabled",
        BypassReason::OutOfScope => "bypass out_of_scope",
        BypassReason::Protected => "bypass protected",
        BypassReason::Degraded => "bypass degraded",
        BypassReason::Oversize => "bypass oversize",
        BypassReason::QueueFull => "bypass queue_full",
        BypassReason::Aged => "bypass aged",
    }
}

const fn end_name(how: EndHow) -> &'static str {
    match how {
        EndHow::Bypassed(_) => "waiter bypassed",
        EndHow::Released => "ended released",
        EndHow::Cancelled => "ended cancelled",
        EndHow::SessionClosed => "ended session_closed",
        EndHow::Expired => "ended expired",
        EndHow::Revoked => "ended revoked",
        EndHow::Dropped => "ended dropped",
        EndHow::TakenBack => "ended taken_back",
    }
}

impl Audit {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    pub(crate) const fn seq(&self) -> Seq {
        self.seq
    }

    /// The service stood still up to now: nothing that is late by that is late.
    pub(crate) fn blocked(&mut self, until: Timestamp) {
        self.blocked_until = self.blocked_until.max(until);
    }

    /// Who waits.
    pub(crate) fn waiters(&self) -> impl Iterator<Item = &TicketId> {
        self.waiting
            .iter()
            .filter_map(|row| Some(&self.tickets.get(row)?.id))
    }

    /// `since`, or the time at which the service could act again.
    pub(crate) fn not_blocked(&self, since: Timestamp) -> Timestamp {
        since.max(self.blocked_until)
    }

    // ---- the time by which deadlines are judged ------------------------------------------------

    /// A turn begins (TIM3).
    pub(crate) fn turn_begins(&mut self, now: Timestamp, clock: u64) {
        self.turn += 1;
        self.closings.turn_begins(clock);
        let judged_at = self.judged_at();
        let gap = now.since(self.last_turn);
        let first = std::mem::take(&mut self.fresh);
        if self.hold.is_some_and(|hold| now.reached(hold.until)) {
            self.end_hold(now);
        }
        let rested = self
            .last_pause
            .is_none_or(|last| now.since(last) >= PAUSE_EVERY);
        if gap > PAUSE_AFTER && !first && self.hold.is_none() {
            self.blocked(now);
            if rested {
                self.count("hold after a pause");
                self.hold = Some(Hold {
                    judged_at,
                    began_at: now,
                    until: now.after(gap.min(PAUSE_HOLD_MAX)),
                    starting: false,
                });
                self.last_pause = Some(now);
            }
        }
        self.last_turn = now;
    }

    /// A round was applied in this turn.
    pub(crate) fn round(&mut self, began_at: Timestamp) {
        if self.hold.is_some_and(|hold| began_at >= hold.began_at) {
            self.end_hold(self.last_turn);
        }
        self.round_tokens = 0;
        self.round_grants = 0;
    }

    fn end_hold(&mut self, now: Timestamp) {
        self.hold = None;
        self.blocked(now);
    }

    fn judged_at(&self) -> Timestamp {
        self.hold.map_or(self.last_turn, |hold| hold.judged_at)
    }

    pub(crate) const fn holds(&self) -> bool {
        self.hold.is_some()
    }

    // ---- what callers did ------------------------------------------------------------------------

    /// The answer with this lease was written whole, or the lease was renewed.
    pub(crate) fn claimed(&mut self, lease: LeaseId) {
        self.claimed.insert(lease);
    }

    /// The answer with this bypass was written whole.
    pub(crate) fn told_bypass(&mut self, ticket: &TicketId) {
        self.told.entry(ticket.clone()).or_insert(self.turn);
    }

    /// A call of this ticket ended.
    pub(crate) fn away(&mut self, ticket: &TicketId, now: Timestamp) {
        self.away.insert(ticket.clone(), now);
    }

    // ---- what was kept ---------------------------------------------------------------------------

    /// One kept commit of a turn.
    pub(crate) fn kept(&mut self, commit: &KeptCommit, turn: &TurnSeen, world: &World) -> Held {
        self.numbers(commit)?;
        let policy = turn.after.as_ref().map(|after| Arc::clone(&after.policy));
        let seen = Judged {
            now: turn.now,
            judged_at: self.judged_at(),
            policy: policy.as_deref(),
            mixed: turn.mixed,
        };
        let mut touched = Vec::new();
        for record in &commit.records {
            self.operators.kept(record)?;
            match record {
                Record::Ticket(ticket) => {
                    touched.push(ticket.id.clone());
                    self.turned_over(ticket, Some(turn))?;
                }
                Record::Forgotten(row) => self.forgotten(*row, turn.now)?,
                other => self.other(other, seen, world)?,
            }
        }
        self.closings.whole()?;
        self.trackers.whole(&self.tally)?;
        self.operators.whole()?;
        self.clocks.clear();
        for id in touched {
            let rows = self.rows.get(&id).map_or(0, BTreeSet::len);
            hold!("I2", rows <= 1, "{id:?} has {rows} rows");
        }
        self.accounts()
    }

    fn numbers(&mut self, commit: &KeptCommit) -> Held {
        hold!(
            "I8",
            commit.seq >= self.seq && commit.next_issue >= self.next_issue,
            "numbers went back: seq {:?} to {:?}, issue {} to {}",
            self.seq,
            commit.seq,
            self.next_issue,
            commit.next_issue
        );
        hold!("I8", commit.now >= self.now, "the stored time went back");
        self.seq = commit.seq;
        self.now = commit.now;
        self.next_issue = commit.next_issue;
        Ok(())
    }

    fn other(&mut self, record: &Record, seen: Judged<'_>, world: &World) -> Held {
        match record {
            Record::Epoch(entry) => {
                hold!(
                    "I8",
                    self.epoch.is_none_or(|epoch| entry.epoch.0 == epoch.0 + 1),
                    "epoch {:?} after {:?}",
                    entry.epoch,
                    self.epoch
                );
                self.epoch = Some(entry.epoch);
                self.count("epoch");
            }
            Record::Tally(tally) => self.tally = (**tally).clone(),
            Record::Close(close) => {
                for met in self.closings.kept(close, seen, world)? {
                    self.count(met);
                }
            }
            Record::CloseForgotten(number) => {
                self.closings.forgotten(*number, seen.now)?;
                self.count("close forgotten");
            }
            Record::Ticket(_)
            | Record::Forgotten(_)
            | Record::Started(..)
            | Record::Engine(_)
            | Record::EngineLeft(_)
            | Record::SessionUsed(..)
            | Record::SessionForgotten(_)
            | Record::Settings(_)
            | Record::Audit(_)
            | Record::AuditForgotten(_) => {}
            Record::Step(_)
            | Record::StepForgotten(_)
            | Record::Window(..)
            | Record::WindowForgotten(_) => self.trackers.kept(record)?,
        }
        Ok(())
    }

    fn forgotten(&mut self, row: RowNo, now: Timestamp) -> Held {
        let Some(ticket) = self.tickets.remove(&row) else {
            return broken("I2", format!("{row:?} was forgotten twice"));
        };
        let Stage::Ended(ended) = &ticket.stage else {
            return broken("I2", format!("a live ticket was forgotten: {ticket:?}"));
        };
        hold!(
            "I3",
            ended.how.decided_afresh() || now.reached(ended.at.after(FINISHED_FOR)),
            "{:?} was forgotten too early",
            ticket
        );
        if let (EndHow::Dropped | EndHow::TakenBack, Some(since)) = (ended.how, ended.since) {
            self.clocks.insert(ticket.id.clone(), since);
        }
        if let Some(rows) = self.rows.get_mut(&ticket.id) {
            rows.remove(&row);
            if rows.is_empty() {
                self.rows.remove(&ticket.id);
            }
        }
        self.count("row forgotten");
        Ok(())
    }

    /// A row came to a new stage. `turn` is `None` for the take-over of a start.
    fn turned_over(&mut self, ticket: &Ticket, turn: Option<&TurnSeen>) -> Held {
        let row = ticket.row;
        let old = self.tickets.get(&row).cloned();
        if let Some(old) = &old {
            hold!(
                "I2",
                old.id == ticket.id,
                "{row:?} went from {:?} to {:?}",
                old.id,
                ticket.id
            );
            hold!(
                "I3",
                old.asked == ticket.asked || matches!(old.stage, Stage::Ended(_)),
                "what {:?} asked changed",
                ticket.id
            );
        }
        match (old.as_ref().map(|old| &old.stage), &ticket.stage) {
            (None, Stage::Waiting { since }) => {
                self.told.remove(&ticket.id);
                if let Some(first) = self.clocks.get(&ticket.id) {
                    hold!(
                        "I6",
                        first == since,
                        "{:?} came back and its time began again",
                        ticket.id
                    );
                }
                let last = self.waiting.last().copied();
                hold!("I4", last < Some(row), "{row:?} stands before {last:?}");
                self.created += 1;
                self.enqueued += 1;
                self.used(ticket);
            }
            (None, Stage::Held(lease)) => {
                let older = self.waiting.len();
                hold!("I4", older == 0, "{:?} overtook {older} waiters", ticket.id);
                self.created += 1;
                self.used(ticket);
                self.grant(ticket, lease.id, turn, false)?;
            }
            (None, Stage::Ended(ended)) => {
                hold!(
                    "I2",
                    ended.how == EndHow::Cancelled,
                    "{ticket:?} ended without a beginning"
                );
                self.count("cancel marker");
            }
            (Some(Stage::Waiting { .. }), Stage::Held(lease)) => {
                let head = self.waiting.first().copied();
                hold!("I4", head == Some(row), "{row:?} overtook {head:?}");
                self.grant(ticket, lease.id, turn, true)?;
            }
            (Some(Stage::Waiting { since }), Stage::Ended(ended)) => match ended.how {
                EndHow::Bypassed(reason) => {
                    self.waiters_bypassed += 1;
                    self.count(bypass_name(reason));
                    self.count(end_name(ended.how));
                    if reason == BypassReason::Aged
                        && let Some(turn) = turn
                    {
                        self.aged_in_time(*since, turn)?;
                    }
                }
                EndHow::Dropped => {
                    self.waiters_cancelled += 1;
                    self.count(end_name(ended.how));
                    self.dropped_in_time(ticket, turn)?;
                }
                EndHow::Cancelled => {
                    self.waiters_cancelled += 1;
                    self.count("waiter withdrawn");
                }
                EndHow::SessionClosed => {
                    self.waiters_cancelled += 1;
                    self.count("waiter withdrawn by a close");
                    self.closings.withdrawn(&ticket.id);
                }
                EndHow::Released | EndHow::Expired | EndHow::Revoked | EndHow::TakenBack => {
                    return broken("I3", format!("a waiter ended as {:?}", ended.how));
                }
            },
            (Some(Stage::Held(before)), Stage::Held(after)) => {
                hold!(
                    "I3",
                    before.id == after.id,
                    "{:?} was charged twice: {:?} and {:?}",
                    ticket.id,
                    before.id,
                    after.id
                );
            }
            (Some(Stage::Held(before)), Stage::Ended(ended)) => {
                let same = ended.lease == Some(before.id)
                    || (ended.lease.is_none() && ended.how == EndHow::Cancelled);
                hold!("I3", same, "{:?} ended another lease", ticket.id);
                self.lease_ended(row, ended.how, before.id)?;
            }
            (Some(Stage::Ended(before)), Stage::Ended(ended)) => {
                if matches!(before.how, EndHow::Bypassed(_)) {
                    self.marked.insert(ticket.id.clone());
                }
                hold!(
                    "I3",
                    ended.how == EndHow::Cancelled,
                    "an ended ticket ended again: {ticket:?}"
                );
                self.count("cancel after the end");
            }
            (Some(_), Stage::Waiting { .. }) | (Some(Stage::Ended(_)), Stage::Held(_)) => {
                return broken("I3", format!("a life began again: {old:?} to {ticket:?}"));
            }
        }
        self.put(ticket.clone());
        Ok(())
    }

    fn used(&mut self, ticket: &Ticket) {
        if let Some(asked) = &ticket.asked {
            self.closings.used(&asked.session, &ticket.id);
        }
    }

    fn put(&mut self, ticket: Ticket) {
        let row = ticket.row;
        if let Some(old) = self.tickets.remove(&row) {
            self.closings.ticket_left(&old);
            match &old.stage {
                Stage::Waiting { .. } => {
                    self.waiting.remove(&row);
                }
                Stage::Held(lease) => {
                    let end = self
                        .renewed
                        .remove(&row)
                        .map_or(lease.ends_at, |(end, _)| end);
                    self.ends.remove(&(end, row));
                    self.reserved = self
                        .reserved
                        .saturating_sub(u128::from(reservation(&old).get()));
                    self.held -= 1;
                }
                Stage::Ended(_) => {}
            }
        }
        match &ticket.stage {
            Stage::Waiting { .. } => {
                self.waiting.insert(row);
            }
            Stage::Held(lease) => {
                self.ends.insert((lease.ends_at, row));
                self.reserved = self
                    .reserved
                    .saturating_add(u128::from(reservation(&ticket).get()));
                self.held += 1;
            }
            Stage::Ended(_) => {}
        }
        self.closings.ticket_put(&ticket);
        if self.immediate.remove(&ticket.id).is_some() {
            self.marked.insert(ticket.id.clone());
        }
        self.rows.entry(ticket.id.clone()).or_default().insert(row);
        self.tickets.insert(row, ticket);
    }

    fn grant(
        &mut self,
        ticket: &Ticket,
        lease: LeaseId,
        turn: Option<&TurnSeen>,
        from_line: bool,
    ) -> Held {
        self.granted += 1;
        self.count(if from_line {
            "grant from the line"
        } else {
            "grant at once"
        });
        let of = (ticket.row, ticket.id.clone());
        if let Some((_, before)) = self.leases.insert(lease, of) {
            return broken(
                "I8",
                format!("lease {lease} was given to {before:?} before"),
            );
        }
        hold!("I5", turn.is_some(), "a start granted {:?}", ticket.id);
        let Some(turn) = turn else { return Ok(()) };
        let charged = self
            .reserved
            .saturating_add(u128::from(reservation(ticket).get()));
        let Some(after) = &turn.after else {
            return Ok(());
        };
        let ceiling_after = after.measure.ceiling;
        if turn.mixed && !from_line {
            let ceiling = ceiling_after.max(turn.before.measure.ceiling);
            hold!(
                "I5",
                charged <= u128::from(ceiling.get()),
                "{charged} reserved over a ceiling of {ceiling:?}"
            );
            return Ok(());
        }
        let pressed = after
            .measure
            .pressure
            .as_ref()
            .is_some_and(|(worst, _)| *worst >= after.policy.pressure_threshold);
        hold!("I5", !pressed, "{:?} was granted under pressure", ticket.id);
        hold!(
            "I5",
            charged <= u128::from(ceiling_after.get()),
            "{charged} reserved over a ceiling of {ceiling_after:?}"
        );
        hold!(
            "I5",
            after.policy.program_admission
                && !after.policy.paused
                && after.measure.degraded.is_none(),
            "{:?} was granted where nothing is admitted",
            ticket.id
        );
        self.round_grants += 1;
        self.round_tokens = self
            .round_tokens
            .saturating_add(u128::from(reservation(ticket).get()));
        if after.paced {
            self.count("grant while paced");
            let quota = u128::from(ceiling_after.share(Ppm::TENTH).get());
            hold!(
                "I5",
                self.round_grants == 1 || self.round_tokens <= quota || turn.mixed,
                "{} tokens in a paced round of {quota}",
                self.round_tokens
            );
        }
        Ok(())
    }

    fn aged_in_time(&self, since: Timestamp, turn: &TurnSeen) -> Held {
        let Some(after) = &turn.after else {
            return Ok(());
        };
        let end = since.after(after.policy.max_wait);
        hold!(
            "I6",
            self.judged_at().reached(end),
            "a waiter aged {:?} too early",
            end.since(self.judged_at())
        );
        Ok(())
    }

    fn dropped_in_time(&self, ticket: &Ticket, turn: Option<&TurnSeen>) -> Held {
        let (Some(turn), Some(left)) = (turn, self.away.get(&ticket.id)) else {
            return Ok(());
        };
        let until = left.after(turn.before.policy.claim_grace);
        hold!(
            "I6",
            turn.now.reached(until),
            "{:?} was dropped {:?} too early",
            ticket.id,
            until.since(turn.now)
        );
        Ok(())
    }

    fn lease_ended(&mut self, row: RowNo, how: EndHow, lease: LeaseId) -> Held {
        self.leases_ended += 1;
        self.count(end_name(how));
        match how {
            EndHow::Expired => {
                let kept = self
                    .tickets
                    .get(&row)
                    .and_then(|ticket| match &ticket.stage {
                        Stage::Held(lease) => Some(lease.ends_at),
                        Stage::Waiting { .. } | Stage::Ended(_) => None,
                    });
                let end = self.renewed.get(&row).map(|(end, _)| *end).or(kept);
                let Some(end) = end else {
                    return broken("I7", format!("{lease} expired without an end"));
                };
                let judged_at = self.judged_at();
                hold!(
                    "I7",
                    judged_at.reached(end),
                    "{lease} expired {:?} too early",
                    end.since(judged_at)
                );
                let late = self.last_turn.since(end.max(self.blocked_until));
                hold!("I7", late <= PAUSE_AFTER, "{lease} expired {late:?} late");
            }
            EndHow::TakenBack => {
                let claimed = self.claimed.contains(&lease);
                hold!("I6", !claimed, "{lease} was claimed and taken back");
            }
            EndHow::Released | EndHow::Cancelled | EndHow::Revoked => {}
            EndHow::Bypassed(_) | EndHow::SessionClosed | EndHow::Dropped => {
                return broken("I3", format!("a lease ended as {how:?}"));
            }
        }
        Ok(())
    }

    /// I11 on what was kept: waits are enqueues, every grant is an admit or cancelled, every end of
    /// a counted lease is counted.
    fn accounts(&mut self) -> Held {
        self.closings.accounts(&self.tally)?;
        let scopes = &self.tally.scopes;
        let add = |of: &dyn Fn(&kvgate_core::tally::ScopeTally) -> u64| {
            scopes
                .iter()
                .fold(0_u64, |all, scope| all.saturating_add(of(scope)))
        };
        let waits = add(&|scope| sum(&scope.wait));
        hold!(
            "I11",
            waits == self.enqueued,
            "{waits} waits counted of {}",
            self.enqueued
        );
        let decided = add(&|scope| scope.admit.saturating_add(sum(&scope.cancelled)));
        let waiting = u64::try_from(self.waiting.len()).unwrap_or(u64::MAX);
        let accounted = decided
            .saturating_add(self.waiters_bypassed)
            .saturating_add(waiting);
        hold!(
            "I11",
            accounted == self.created,
            "{accounted} lives accounted for of {}",
            self.created
        );
        let cancelled = add(&|scope| sum(&scope.cancelled));
        let unclaimed = cancelled.saturating_sub(self.waiters_cancelled);
        let counted = LeaseEnd::ALL
            .iter()
            .fold(0_u64, |all, how| all.saturating_add(self.tally.ends(*how)));
        hold!(
            "I11",
            counted.saturating_add(unclaimed) == self.leases_ended,
            "{counted} ends and {unclaimed} unclaimed of {}",
            self.leases_ended
        );
        Ok(())
    }

    // ---- what was told -----------------------------------------------------------------------------

    /// The effects of a committed turn. `before` is the last number kept before it.
    pub(crate) fn told(&mut self, effects: &[Effect], before: Seq, turn: &TurnSeen) -> Held {
        for effect in effects {
            let seq = match effect {
                Effect::Reply { seq, .. } | Effect::Parked { seq, .. } => *seq,
                Effect::Decided { seq, .. } => Some(*seq),
                Effect::Call(_) | Effect::CloseDone(_) => None,
            };
            if let Some(seq) = seq {
                hold!(
                    "I10",
                    seq <= self.seq,
                    "{seq:?} was told, kept is {:?}",
                    self.seq
                );
                hold!("I8", seq > before, "{seq:?} was told again");
            }
            match effect {
                Effect::Decided { answer, .. } => {
                    self.answer(answer)?;
                    if answer.outcome == Outcome::Cancelled(CancelReason::SessionClosed) {
                        self.closings.told_withdrawn(&answer.ticket);
                    }
                }
                Effect::Reply { reply, .. } => self.reply(reply, turn)?,
                Effect::Call(call) => {
                    let policy = turn.after.as_ref().map(|after| Arc::clone(&after.policy));
                    let seen = Judged {
                        now: turn.now,
                        judged_at: self.judged_at(),
                        policy: policy.as_deref(),
                        mixed: turn.mixed,
                    };
                    self.count(match call.what {
                        CallWhat::Close(_) => "close sent",
                        CallWhat::Abort(_) => "abort sent",
                    });
                    self.closings.sent(call, seen)?;
                }
                Effect::Parked { .. } | Effect::CloseDone(_) => {}
            }
        }
        let judged_at = self.judged_at();
        self.closings.all_told(judged_at)
    }

    fn reply(&mut self, reply: &Reply, turn: &TurnSeen) -> Held {
        match reply {
            Reply::Acquire(Ok(answer)) => {
                self.answer(answer)?;
                self.once_finished(answer, turn)?;
                if let Outcome::Bypass(reason) = answer.outcome {
                    self.bypassed(answer, reason, turn.now)?;
                }
                if answer.repeated {
                    self.count("repeated answer");
                }
            }
            Reply::Acquire(Err(_)) => self.count("acquire refused"),
            Reply::Left(Some(answer)) => self.answer(answer)?,
            Reply::Step(report) => {
                self.trackers.told(report)?;
                self.count("step report");
            }
            Reply::Lease(Ok(view)) => {
                let known = self.leases.contains_key(&view.lease.id);
                hold!("I10", known, "{} is not kept", view.lease.id);
            }
            _ => {}
        }
        Ok(())
    }

    /// TIC1: while a released or cancelled ticket is remembered, nothing else is answered.
    fn once_finished(&self, answer: &Answer, turn: &TurnSeen) -> Held {
        let Some(Stage::Ended(ended)) = self.live(&answer.ticket).map(|ticket| &ticket.stage)
        else {
            return Ok(());
        };
        let finished = matches!(ended.how, EndHow::Released | EndHow::Cancelled)
            && ended.at < turn.now
            && turn.now.since(ended.at) < FINISHED_FOR;
        hold!(
            "I3",
            !finished || answer.outcome == Outcome::Cancelled(CancelReason::TicketFinished),
            "a finished ticket was answered {:?}",
            answer.outcome
        );
        Ok(())
    }

    fn bypassed(&mut self, answer: &Answer, reason: BypassReason, now: Timestamp) -> Held {
        let from_line = self.marked.contains(&answer.ticket)
            || self.live(&answer.ticket).is_some_and(|ticket| {
                matches!(&ticket.stage, Stage::Ended(ended)
                if matches!(ended.how, EndHow::Bypassed(_))
                    && self.forgot_at.since(ended.at) < FINISHED_FOR)
            });
        let known = from_line
            || self
                .immediate
                .get(&answer.ticket)
                .is_some_and(|at| self.forgot_at.since(*at) < FINISHED_FOR);
        let told = self
            .told
            .get(&answer.ticket)
            .is_some_and(|at| *at < self.turn);
        hold!(
            "I3",
            answer.repeated || !known || !told,
            "{:?} was told {reason:?} for the first time, and was told before",
            answer.ticket
        );
        if !known && !answer.repeated {
            self.told.remove(&answer.ticket);
            self.bypassed_at_once += 1;
            if let Some(session) = &answer.session {
                self.closings.used(session, &answer.ticket);
            }
            self.count(bypass_name(reason));
            self.immediate.insert(answer.ticket.clone(), now);
        }
        Ok(())
    }

    fn live(&self, id: &TicketId) -> Option<&Ticket> {
        let row = self.rows.get(id)?.last()?;
        self.tickets.get(row)
    }

    /// How the row of a ticket ended, if it did.
    pub(crate) fn ended(&self, id: &TicketId) -> Option<EndHow> {
        match &self.live(id)?.stage {
            Stage::Ended(ended) => Some(ended.how),
            Stage::Waiting { .. } | Stage::Held(_) => None,
        }
    }

    /// I10: an answer says what is kept.
    fn answer(&self, answer: &Answer) -> Held {
        let ticket = self.live(&answer.ticket);
        match &answer.outcome {
            Outcome::Admit { lease, .. } => {
                let of = self.leases.get(lease).map(|(_, ticket)| ticket);
                hold!(
                    "I10",
                    of == Some(&answer.ticket),
                    "{:?} was told of {lease}, which belongs to {of:?}",
                    answer.ticket
                );
            }
            Outcome::Wait(status) => {
                let row = ticket.map(|ticket| ticket.row);
                let place = row.filter(|row| self.waiting.contains(row));
                let Some(place) = place else {
                    return broken(
                        "I10",
                        format!("{:?} was told to wait and is not in line", answer.ticket),
                    );
                };
                let before = u64::try_from(self.waiting.range(..place).count()).unwrap_or(0);
                hold!(
                    "I4",
                    status.position == before + 1,
                    "position {} with {before} before",
                    status.position
                );
            }
            Outcome::Cancelled(reason) => {
                let ended = self.ended(&answer.ticket);
                hold!(
                    "I10",
                    ended.is_some(),
                    "{:?} was told {reason:?} and lives",
                    answer.ticket
                );
            }
            Outcome::Bypass(_) => {
                let lives = matches!(
                    ticket.map(|ticket| &ticket.stage),
                    Some(Stage::Waiting { .. } | Stage::Held(_))
                );
                hold!("I2", !lives, "{:?} bypassed and lives", answer.ticket);
            }
        }
        Ok(())
    }

    /// A release was answered as done.
    pub(crate) fn told_released(&self, lease: LeaseId) -> Held {
        let row = self
            .leases
            .get(&lease)
            .and_then(|(row, _)| self.tickets.get(row));
        let holds = row
            .is_some_and(|ticket| matches!(&ticket.stage, Stage::Held(held) if held.id == lease));
        hold!("I10", !holds, "{lease} was told as released and is held");
        Ok(())
    }

    /// A cancel was answered as done.
    pub(crate) fn told_cancelled(&self, ticket: &TicketId) -> Held {
        let ended = self.ended(ticket);
        let again = self.immediate.contains_key(ticket);
        hold!(
            "I10",
            ended.is_some() || again,
            "{ticket:?} was told as cancelled and lives"
        );
        Ok(())
    }

    /// A renewal was answered with this end. It may be kept up to 5 s later (LEA2).
    pub(crate) fn renewed(&mut self, lease: LeaseId, ends_at: Timestamp, now: Timestamp) {
        self.claimed.insert(lease);
        self.count("renewal");
        let Some((row, _)) = self.leases.get(&lease).cloned() else {
            return;
        };
        let Some(Stage::Held(held)) = self.tickets.get(&row).map(|ticket| &ticket.stage) else {
            return;
        };
        if held.id != lease {
            return;
        }
        let (old, since) = self
            .renewed
            .get(&row)
            .copied()
            .unwrap_or((held.ends_at, now));
        self.ends.remove(&(old, row));
        self.ends.insert((ends_at, row));
        self.renewed.insert(row, (ends_at, since));
    }

    // ---- after a turn ------------------------------------------------------------------------------

    /// What must hold between two turns.
    pub(crate) fn at_rest(&mut self, view: &View) -> Held {
        hold!(
            "I1",
            view.reserved == Tokens::clamped(self.reserved) && view.leases == self.held,
            "reserved {:?} of {} leases, kept are {} of {}",
            view.reserved,
            view.leases,
            self.reserved,
            self.held
        );
        let waiting = u64::try_from(self.waiting.len()).unwrap_or(u64::MAX);
        hold!(
            "I2",
            view.waiting == waiting,
            "{} wait, kept are {waiting}",
            view.waiting
        );
        let judged_at = self.judged_at();
        self.forgot_at = judged_at;
        self.marked.clear();
        if let Some((end, row)) = self.ends.first() {
            hold!(
                "I7",
                !judged_at.reached(*end),
                "the lease of {row:?} is over since {:?}",
                judged_at.since(*end)
            );
        }
        let starting = self.hold.is_some_and(|hold| hold.starting);
        if let (Some(since), false) = (view.oldest_waiter, starting) {
            let end = since.after(view.policy.max_wait);
            hold!(
                "I6",
                !judged_at.reached(end),
                "a waiter is over its time since {:?}",
                judged_at.since(end)
            );
        }
        let bypassed = view
            .tally
            .scopes
            .iter()
            .fold(0_u64, |all, scope| all.saturating_add(sum(&scope.bypass)));
        let expected = self.waiters_bypassed.saturating_add(self.bypassed_at_once);
        hold!(
            "I11",
            bypassed == expected,
            "{bypassed} bypasses counted of {expected}"
        );
        let seen = Judged {
            now: self.last_turn,
            judged_at,
            policy: Some(&view.policy),
            mixed: false,
        };
        let members = view
            .engines
            .iter()
            .map(|engine| engine.id.clone())
            .collect();
        let blocked = self.blocked_until;
        if self.hold.is_none() {
            self.closings.at_rest(seen, blocked, &members)?;
        }
        // LEA2; a turn is at most a second away.
        let late = Span::from_secs(5);
        if let Some((_, since)) = self.renewed.values().min_by_key(|(_, since)| *since) {
            let waited = self.last_turn.since((*since).max(self.blocked_until));
            hold!(
                "I9",
                waited <= late,
                "a renewal was not kept for {waited:?}"
            );
        }
        Ok(())
    }

    /// The live machine against the book: what memory may have ahead of it are renewals, rows that
    /// were forgotten by age, and counters.
    pub(crate) fn live_state(&self, kept: &Kept) -> Held {
        hold!(
            "I9",
            kept.queue.iter().eq(self.waiting.iter()),
            "the line is {:?}, kept is {:?}",
            kept.queue,
            self.waiting
        );
        for ticket in &kept.tickets {
            let Some(own) = self.tickets.get(&ticket.row) else {
                return broken("I9", format!("{ticket:?} was never kept"));
            };
            let same = match (&own.stage, &ticket.stage) {
                (Stage::Held(own), Stage::Held(live)) => {
                    let end = self
                        .renewed
                        .get(&ticket.row)
                        .map_or(own.ends_at, |(end, _)| *end);
                    own.id == live.id && live.ends_at == end
                }
                (own, live) => own == live,
            };
            hold!("I9", same, "{ticket:?} is kept as {own:?}");
        }
        let forgotten = self.tickets.len().saturating_sub(kept.tickets.len());
        let old = self
            .tickets
            .values()
            .filter(|ticket| {
                matches!(&ticket.stage, Stage::Ended(ended)
                if self.last_turn.since(ended.at) >= FINISHED_FOR)
            })
            .count();
        hold!("I9", forgotten <= old, "{forgotten} rows are missing");
        self.closings.same(&kept.closes, self.last_turn)?;
        self.same_numbers(kept)
    }

    fn same_numbers(&self, kept: &Kept) -> Held {
        hold!(
            "I1",
            kept.reserved == Tokens::clamped(self.reserved),
            "reserved {:?}, kept is {}",
            kept.reserved,
            self.reserved
        );
        hold!(
            "I9",
            kept.seq == self.seq && kept.next_issue == self.next_issue,
            "seq {:?} issue {}, kept are {:?} and {}",
            kept.seq,
            kept.next_issue,
            self.seq,
            self.next_issue
        );
        hold!(
            "I9",
            kept.epoch == self.epoch.unwrap_or(Epoch(1)),
            "epoch {:?}, kept is {:?}",
            kept.epoch,
            self.epoch
        );
        Ok(())
    }

    // ---- starts --------------------------------------------------------------------------------------

    /// The process or its machine is gone: what was in memory only is forgotten.
    pub(crate) fn lost(&mut self) {
        for (row, (end, _)) in std::mem::take(&mut self.renewed) {
            self.ends.remove(&(end, row));
            if let Some(Stage::Held(lease)) = self.tickets.get(&row).map(|ticket| &ticket.stage) {
                self.ends.insert((lease.ends_at, row));
            }
        }
        self.immediate.clear();
        self.marked.clear();
        self.told.clear();
        let bypassed = self
            .tally
            .scopes
            .iter()
            .fold(0_u64, |all, scope| all.saturating_add(sum(&scope.bypass)));
        self.bypassed_at_once = bypassed.saturating_sub(self.waiters_bypassed);
    }

    /// A take-over was kept: LEA4 for each lease, and nothing else may have changed.
    pub(crate) fn took_over(
        &mut self,
        commit: &KeptCommit,
        now: Timestamp,
        clock: u64,
        world: &World,
    ) -> Held {
        self.numbers(commit)?;
        self.closings.starts(now, clock);
        let seen = Judged {
            now,
            judged_at: now,
            policy: None,
            mixed: false,
        };
        self.hold = None;
        self.last_turn = now;
        self.blocked(now);
        for record in &commit.records {
            self.operators.kept(record)?;
            match record {
                Record::Ticket(ticket) => self.graced(ticket, now)?,
                Record::Forgotten(row) => self.forgotten(*row, now)?,
                other => self.other(other, seen, world)?,
            }
        }
        self.closings.whole()?;
        self.trackers.whole(&self.tally)?;
        self.operators.whole()?;
        self.accounts()?;
        for (end, row) in &self.ends {
            let Some(Stage::Held(lease)) = self.tickets.get(row).map(|ticket| &ticket.stage) else {
                return broken("I7", format!("{row:?} has an end and no lease"));
            };
            let most = now.after(lease.ttl);
            let least = now.after(lease.ttl.min(RESTART_GRACE));
            hold!(
                "I7",
                *end <= most && (*end >= least || lease.graced),
                "after a start {} ends at {end:?}, now is {now:?}, its life {:?}",
                lease.id,
                lease.ttl
            );
        }
        Ok(())
    }

    fn graced(&mut self, ticket: &Ticket, now: Timestamp) -> Held {
        let old = self.tickets.get(&ticket.row).map(|ticket| &ticket.stage);
        // One that had its grace before this start may be over by now.
        if let (Some(Stage::Held(before)), Stage::Ended(ended)) = (old, &ticket.stage) {
            hold!(
                "I7",
                before.graced && ended.how == EndHow::Expired,
                "a start ended {}",
                before.id
            );
            return self.turned_over(ticket, None);
        }
        let (Some(Stage::Held(before)), Stage::Held(after)) = (old, &ticket.stage) else {
            return broken("I9", format!("a start changed {ticket:?}"));
        };
        // Another start does not extend it again (S03).
        hold!(
            "I7",
            !before.graced || after.ends_at <= before.ends_at,
            "{} was given the grace of a start twice",
            after.id
        );
        hold!(
            "I7",
            after.ends_at <= before.ends_at || after.graced,
            "{} was moved without the mark",
            after.id
        );
        hold!("I7", after.ends_at >= now, "{} was cut short", after.id);
        if after.graced && !before.graced {
            self.count("restart grace");
        }
        self.turned_over(ticket, None)
    }

    /// The machine that took over, against the book: exactly the same.
    pub(crate) fn recovered(&mut self, kept: &Kept, now: Timestamp) -> Held {
        hold!(
            "I9",
            kept.queue.iter().eq(self.waiting.iter()),
            "the line is {:?} after a start, kept was {:?}",
            kept.queue,
            self.waiting
        );
        hold!(
            "I9",
            kept.tickets.iter().eq(self.tickets.values()),
            "{} tickets after a start, kept were {}",
            kept.tickets.len(),
            self.tickets.len()
        );
        self.closings.same(&kept.closes, now)?;
        self.operators.same(kept)?;
        hold!(
            "I9",
            kept.tally == self.tally,
            "other counters after a start"
        );
        self.same_numbers(kept)?;
        self.hold = Some(Hold {
            judged_at: now,
            began_at: now,
            until: now.after(FIRST_ROUND_WAIT),
            starting: true,
        });
        self.blocked(now);
        self.last_turn = now;
        self.forgot_at = now;
        self.last_pause = None;
        self.fresh = true;
        self.round_tokens = 0;
        self.round_grants = 0;
        // After a start every lease counts as claimed, and every waiter is away from now on.
        self.away.clear();
        for row in &self.waiting {
            if let Some(ticket) = self.tickets.get(row) {
                self.away.insert(ticket.id.clone(), now);
            }
        }
        for (lease, (row, _)) in &self.leases {
            if matches!(
                self.tickets.get(row).map(|ticket| &ticket.stage),
                Some(Stage::Held(_))
            ) {
                self.claimed.insert(*lease);
            }
        }
        Ok(())
    }

    /// All clients are gone and time has passed (liveness).
    pub(crate) fn at_the_end(&self, view: &View) -> Held {
        hold!(
            "I11",
            view.reserved == Tokens::ZERO && view.leases == 0 && self.held == 0,
            "{} leases are left at the end",
            view.leases
        );
        hold!(
            "I11",
            view.waiting == 0 && self.waiting.is_empty(),
            "{} waiters are left at the end",
            view.waiting
        );
        self.closings.at_the_end()
    }
}
