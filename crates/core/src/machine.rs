//! The state machine at rest, between two turns.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::batch::Batch;
use crate::capacity::{Fleet, FleetConfig};
use crate::decisions::Decisions;
use crate::fanout::Fanout;
use crate::ids::{CloseNo, Issue, LeaseId, RowNo, RunId, Term};
use crate::policy::{
    FIRST_ROUND_WAIT, PAUSE_AFTER, PAUSE_EVERY, PAUSE_HOLD_MAX, Policy, RESTART_GRACE, TALLY_EVERY,
};
use crate::presence::{Presence, Presences};
use crate::record::Record;
use crate::renewals::Renewals;
use crate::settings::Settings;
use crate::state::{LoadSum, Start, State};
use crate::store::Image;
use crate::tally::Tally;
use crate::ticket::{Stage, Ticket};
use crate::turn::{Turn, granted};
use crate::units::{Timestamp, Tokens};
use crate::view::{Notice, View};

/// What a start hands in besides the stored image.
#[derive(Clone, Debug)]
pub struct StartParams {
    /// Now, on kvgate's own line: not before the image's time (TIM1).
    pub now: Timestamp,
    /// Random part of the lease ids of this start (ID2).
    pub salt: u64,
    /// Spreads hash tables, so that chosen ids cannot pile up in one bucket.
    pub seed: u64,
    /// Settings as they are configured. What was set over them is in the image; together they were
    /// validated.
    pub policy: Policy,
    /// Whatever was set at run time is as configured again.
    pub reset_settings: bool,
    /// Where members come from.
    pub fleet: FleetConfig,
}

/// Grants that nobody was told of when the turn that made or claimed them failed (DUR4).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Untold(pub(crate) BTreeSet<LeaseId>);

impl Untold {
    /// The answer that carried the grant has arrived after all.
    pub fn told(&mut self, lease: LeaseId) {
        self.0.remove(&lease);
    }

    /// Adds those of a later failure.
    pub fn add(&mut self, more: Self) {
        self.0.extend(more.0);
    }
}

/// The gate's whole state. Owned by one writer; changed only through [`Turn`]s.
#[derive(Debug)]
pub struct Machine {
    pub(crate) state: State,
    pub(crate) fleet: Fleet,
    pub(crate) settings: Arc<Settings>,
    /// What of them is in force.
    pub(crate) policy: Arc<Policy>,
    pub(crate) presences: Presences,
    /// Grants whose answer is on its way: an admit each, once it arrives (CNT1).
    pub(crate) in_flight: Tally,
    /// The counters as last stored.
    pub(crate) stored_tally: Tally,
    pub(crate) tally_stored_at: Timestamp,
    pub(crate) renewals: Renewals,
    /// Forgotten rows that the store still has; removed with a later batch (section 9).
    pub(crate) forgotten: Vec<RowNo>,
    pub(crate) forgotten_closes: Vec<CloseNo>,
    pub(crate) fanout: Fanout,
    /// Windows whose peak was raised since they were last written.
    pub(crate) raised_windows: BTreeSet<Option<RunId>>,
    pub(crate) decisions: Decisions,
    pub(crate) hold: Option<Hold>,
    pub(crate) last_turn: Timestamp,
    /// No turn has begun since the take-over.
    fresh: bool,
    last_pause: Option<Timestamp>,
    /// The turn's bound on decisions was reached: another turn is due at once (DEC3).
    pub(crate) more_due: bool,
    pub(crate) notices: Vec<Notice>,
}

/// A time in which nothing ages, expires or goes stale (TIM3, and the start).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hold {
    /// Deadlines are judged as of this time.
    pub(crate) judged_at: Timestamp,
    /// A reading round that began at or after this time ends it.
    pub(crate) began_at: Timestamp,
    /// It ends by itself.
    pub(crate) until: Timestamp,
    /// Nothing was read yet: the queue does not move at all.
    pub(crate) starting: bool,
}

impl Machine {
    /// Takes over from what was stored. The batch must be committed before anything is answered.
    ///
    /// Lease ends are kept: a lease has at most its whole life left, and at least
    /// min(life, 30 s), the latter once until its next renewal (LEA4). Every lease counts as
    /// claimed (TIC4). Waiting tickets keep their order and have the claim grace to come back (DUR2).
    #[must_use]
    pub fn restore(image: Image, params: StartParams) -> Batch {
        Self::reload(image, params, &Untold::default())
    }

    /// The same for a writer that goes on after a failed commit: a grant that turns out to be stored
    /// although nobody was told of it is unclaimed, and ends after the claim grace (DUR4).
    #[must_use]
    pub fn reload(image: Image, params: StartParams, untold: &Untold) -> Batch {
        let StartParams {
            now,
            salt,
            seed,
            policy,
            reset_settings,
            fleet,
        } = params;
        let now = now.max(image.now);
        let stored_tally = image.tally.clone();
        let first_window = !image.windows.iter().any(|(run, _)| run.is_none());
        let (state, engines) = State::restore(image, seed, now);
        let settings = Settings {
            configured: policy,
            overrides: state.overrides.clone(),
        };
        let machine = Self {
            fleet: Fleet::restore(fleet, engines, now),
            policy: Arc::new(settings.effective()),
            settings: Arc::new(settings),
            presences: Presences::default(),
            in_flight: Tally::default(),
            stored_tally,
            tally_stored_at: now,
            renewals: Renewals::default(),
            forgotten: Vec::new(),
            forgotten_closes: Vec::new(),
            raised_windows: BTreeSet::new(),
            decisions: Decisions::new(now),
            fanout: Fanout::new(Term(state.term.0.saturating_add(1)), now),
            hold: Some(Hold {
                judged_at: now,
                began_at: now,
                until: now.after(FIRST_ROUND_WAIT),
                starting: true,
            }),
            last_turn: now,
            fresh: true,
            last_pause: None,
            more_due: false,
            notices: Vec::new(),
            state,
        };
        let mut turn = Turn::begin(Box::new(machine), now);
        let term = Term(turn.machine.state.term.0.saturating_add(1));
        let first_issue = Issue(turn.machine.state.next_issue);
        turn.record(Record::Started(
            term,
            Start {
                first_issue,
                salt,
                at: now,
            },
        ));
        if reset_settings {
            turn.reset_settings();
        }
        turn.bring_leases_into_range();
        if first_window {
            let window = turn.machine.state.reports.latest.clone();
            turn.record(Record::Window(None, window));
        }
        let grace_ends = now.after(turn.machine.policy.claim_grace);
        let waiting: Vec<RowNo> = turn.machine.state.queue.from(RowNo(0)).collect();
        for row in waiting {
            turn.machine.presences.set(row, Presence::Away(grace_ends));
        }
        for lease in &untold.0 {
            turn.take_for_untold(*lease, grace_ends);
        }
        turn.resume_closes();
        let closes_idle = turn.machine.idle_close().is_some();
        turn.machine.state.sessions.close_idle(closes_idle);
        turn.finish()
    }

    /// Begins a turn at `now`, which is never before the last one.
    #[must_use]
    pub fn turn(mut self: Box<Self>, now: Timestamp) -> Turn {
        let now = now.max(self.last_turn);
        let gap = now.since(self.last_turn);
        let judged_at = self.judged_at();
        // The time between the take-over and the first turn is no pause.
        let first = core::mem::take(&mut self.fresh);
        if self.hold.is_some_and(|hold| now.reached(hold.until)) {
            self.hold = None;
        }
        let rested = self
            .last_pause
            .is_none_or(|last| now.since(last) >= PAUSE_EVERY);
        if gap > PAUSE_AFTER && rested && !first && self.hold.is_none() {
            self.hold = Some(Hold {
                judged_at,
                began_at: now,
                until: now.after(gap.min(PAUSE_HOLD_MAX)),
                starting: false,
            });
            self.last_pause = Some(now);
        }
        self.last_turn = now;
        Turn::begin(self, now)
    }

    /// When the next turn is due at the latest, inputs or not.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        if self.more_due {
            return Some(self.last_turn);
        }
        let tally_dirty = self.tally_to_store() != self.stored_tally || self.has_riders();
        let writes = [
            tally_dirty.then(|| self.tally_stored_at.after(TALLY_EVERY)),
            self.renewals.due_at(),
        ];
        if let Some(hold) = self.hold {
            let writes = writes.into_iter().flatten().min();
            return Some(writes.map_or(hold.until, |at| at.min(hold.until)));
        }
        let clock = self.state.clocks.first().map(|((since, _), ())| *since);
        let deadlines = [
            self.state.forget_at(),
            self.state.ledger.first_end().map(|(at, _)| at),
            self.presences.first_deadline().map(|(at, _)| at),
            clock.map(|since| since.after(self.policy.max_wait)),
            self.fleet.valid_until(),
            self.closes_due(),
            self.state.closes.forget_at(),
            self.state.sessions.forget_at(self.idle_close()),
        ];
        writes.into_iter().chain(deadlines).flatten().min()
    }

    /// Whether nothing was read since the start, and the queue stands still for it (DUR3).
    #[must_use]
    pub fn is_starting(&self) -> bool {
        self.hold.is_some_and(|hold| hold.starting)
    }

    /// Whether something waits to ride along with a batch (section 9).
    pub(crate) fn has_riders(&self) -> bool {
        !self.forgotten.is_empty()
            || !self.forgotten_closes.is_empty()
            || !self.raised_windows.is_empty()
            || self.state.sessions.has_unsaved()
    }

    /// Counters as a restart must find them: it will count every unclaimed grant as an admit.
    pub(crate) fn tally_to_store(&self) -> Tally {
        self.state.tally.with_admits_of(&self.in_flight)
    }

    /// The time by which deadlines are judged.
    pub(crate) fn judged_at(&self) -> Timestamp {
        self.hold.map_or(self.last_turn, |hold| hold.judged_at)
    }

    /// A picture for readers.
    #[must_use]
    pub fn view(&self) -> View {
        let waiting_since = self.state.clocks.first().map(|((since, _), ())| *since);
        let oldest_lease = self
            .state
            .ledger
            .oldest()
            .and_then(|row| self.state.row(row))
            .and_then(|ticket| match &ticket.stage {
                Stage::Held(lease) => Some(lease.granted_at),
                Stage::Waiting { .. } | Stage::Ended(_) => None,
            });
        View {
            now: self.last_turn,
            seq: self.state.seq,
            epoch: self.state.epoch,
            policy: Arc::clone(&self.policy),
            settings: Arc::clone(&self.settings),
            measure: self.fleet.measure_shared(),
            paced: self.fleet.paced(),
            router_failure: self.fleet.router_failure(),
            reserved: self.state.ledger.reserved(),
            leases: u64::try_from(self.state.ledger.len()).unwrap_or(u64::MAX),
            oldest_lease,
            waiting: self.state.queue.len(),
            waiting_tokens: Tokens::clamped(self.state.queue.tokens()),
            loads: self.state.loads.map(LoadSum::load),
            oldest_waiter: waiting_since,
            closes_pending: u64::try_from(self.state.closes.open()).unwrap_or(u64::MAX),
            closes_failed: self.state.closes.failed(),
            engines: self.fleet.view(),
            tally: self.state.tally.clone(),
            durable_tally: self.stored_tally.with_admits_from(&self.state.tally),
            notices: self.notices(),
        }
    }

    /// Everything that is kept, as a store that had just written it would load it (DUR2). It costs
    /// one look at each ticket.
    #[must_use]
    pub fn image(&self) -> Image {
        let (windows, steps) = self.state.reports.kept();
        Image {
            term: self.state.term.0,
            seq: self.state.seq,
            now: self.last_turn,
            next_issue: self.state.next_issue,
            starts: self.state.starts().iter().cloned().collect(),
            tickets: self.kept_tickets(),
            epochs: self.state.epochs().iter().cloned().collect(),
            engines: self.fleet.rows(),
            closes: self.state.closes.iter().cloned().collect(),
            sessions: self.state.sessions.stored(),
            windows,
            steps,
            overrides: self.state.overrides.clone(),
            audit: self.state.audit.kept(),
            tally: self.tally_to_store(),
        }
    }

    fn notices(&self) -> Vec<Notice> {
        let mut notices = self.notices.clone();
        if let Some((count, close, since)) = self.fanout.reopened()
            && let Some(close) = self.state.closes.get(close)
            && let Some(reopened) = &close.reopened
        {
            notices.push(Notice::SessionReopened {
                count,
                session: close.session.clone(),
                ticket: reopened.ticket.clone(),
                since,
            });
        }
        let refusals = self.fanout.refusals().iter();
        notices.extend(
            refusals.map(|((engine, abort), refusal)| Notice::CallRefused {
                engine: engine.clone(),
                abort: *abort,
                status: refusal.status,
                text: refusal.text.clone(),
                since: refusal.since,
                last: refusal.last,
            }),
        );
        notices
    }

    fn kept_tickets(&self) -> Vec<Ticket> {
        self.state
            .tickets(|ticket| !is_remembered_in_memory_only(ticket))
    }

    /// Everything that a restart must bring back, for tests: the image that a store should hold.
    #[cfg(any(test, feature = "check"))]
    #[must_use]
    pub fn kept(&self) -> Kept {
        Kept {
            reserved: self.state.ledger.reserved(),
            queue: self.state.queue.from(RowNo(0)).collect(),
            tickets: self.kept_tickets(),
            closes: self.state.closes.iter().cloned().collect(),
            overrides: self.state.overrides.clone(),
            audit: self.state.audit.kept(),
            epoch: self.state.epoch,
            tally: self.tally_to_store(),
            next_issue: self.state.next_issue,
            seq: self.state.seq,
        }
    }
}

/// What must be the same before and after a restart (DUR2).
#[cfg(any(test, feature = "check"))]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kept {
    /// Sum of the held leases.
    pub reserved: Tokens,
    /// The line.
    pub queue: Vec<RowNo>,
    /// All tickets but immediate bypasses.
    pub tickets: Vec<Ticket>,
    /// Close intents, by number.
    pub closes: Vec<crate::close::CloseIntent>,
    /// What was set at run time.
    pub overrides: crate::settings::Overrides,
    /// What operators did, by number.
    pub audit: Vec<crate::audit::AuditEntry>,
    /// Worker-set generation.
    pub epoch: crate::ids::Epoch,
    /// Counters, with grants on their way as admits.
    pub tally: Tally,
    /// Number of the next grant.
    pub next_issue: u64,
    /// Number of the last change.
    pub seq: crate::ids::Seq,
}

/// An immediate bypass is not kept (section 9): one that never was in line.
pub(crate) fn is_remembered_in_memory_only(ticket: &Ticket) -> bool {
    matches!(&ticket.stage, Stage::Ended(ended)
        if ended.since.is_none() && matches!(ended.how, crate::decision::EndHow::Bypassed(_)))
}

impl Turn {
    /// The stored counters call the grant an admit; it becomes one when it is claimed (CNT1).
    fn take_for_untold(&mut self, lease: LeaseId, until: Timestamp) {
        let Some(ticket) = self.machine.state.lease(lease) else {
            return;
        };
        let row = ticket.row;
        let Some((scope, waited)) = granted(ticket) else {
            return;
        };
        self.machine.presences.set(row, Presence::Unclaimed(until));
        self.machine.state.tally.unadmit(scope, waited);
        self.machine.in_flight.admit(scope, waited);
    }

    /// LEA4.
    fn bring_leases_into_range(&mut self) {
        let now = self.now;
        let leases: Vec<RowNo> = self
            .machine
            .state
            .ledger
            .from(Issue(0))
            .map(|(_, row)| row)
            .collect();
        for row in leases {
            let Some(ticket) = self.machine.state.row(row) else {
                continue;
            };
            let Stage::Held(lease) = &ticket.stage else {
                continue;
            };
            let mut lease = lease.clone();
            let least = now.after(lease.ttl.min(RESTART_GRACE));
            if !lease.graced && lease.ends_at < least {
                lease.ends_at = least;
                lease.graced = true;
            }
            lease.ends_at = lease.ends_at.min(now.after(lease.ttl));
            if ticket.stage != Stage::Held(lease.clone()) {
                let ticket = Ticket {
                    stage: Stage::Held(lease),
                    ..ticket.clone()
                };
                self.record(Record::Ticket(ticket));
            }
        }
    }
}
