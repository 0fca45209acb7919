//! One turn: commands in the order of their arrival, then expiries, then the queue pass (DEC3).

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::batch::Batch;
use crate::command::{Acquire, Command, Delivery};
use crate::decide::{Decision, Request, Situation};
use crate::decision::{CancelReason, EndHow, Scope, WaitReason};
use crate::decisions::{Decided, DecisionEntry, Moment};
use crate::effect::{
    AcquireRefused, Answer, CancelOutcome, Effect, LeaseGone, Outcome, ReleaseOutcome, Reply, Tag,
    Watched,
};
use crate::event::{Event, QueueEnd};
use crate::ids::{CloseNo, Issue, LeaseId, RowNo, Seq, TicketId};
use crate::machine::{Machine, is_remembered_in_memory_only};
use crate::presence::Presence;
use crate::reading::Round;
use crate::record::Record;
use crate::tally::{CancelledHow, LeaseEnd};
use crate::ticket::{Asked, Ended, Lease, Stage, Terms, Ticket};
use crate::units::{Span, Timestamp, Tokens};
use crate::view::Notice;

/// A turn under way. Commands see the changes of those before them.
#[derive(Debug)]
pub struct Turn {
    pub(crate) machine: Box<Machine>,
    pub(crate) now: Timestamp,
    pub(crate) records: Vec<Record>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) events: Vec<Event>,
    /// Calls that end with this turn: answered once the queue has moved (TIC2).
    pub(crate) leaving: Vec<Leaving>,
    /// Grants that an acquire of this turn claimed.
    pub(crate) claimed: Vec<LeaseId>,
    /// Close intents that changed: their rows are written at the end of the turn.
    pub(crate) dirty_closes: BTreeSet<CloseNo>,
    /// How often one changed.
    pub(crate) close_edits: usize,
    commands: usize,
}

/// A call that ends with the turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    pub(crate) tag: Tag,
    pub(crate) row: RowNo,
    pub(crate) seq: Option<Seq>,
    pub(crate) kind: LeavingKind,
    /// Its acquire used a closed session anew (CLO8).
    pub(crate) session_reopened: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LeavingKind {
    /// An acquire that does not stay.
    Acquire,
    /// The time-out of one that did.
    Leave,
}

impl Turn {
    pub(crate) fn begin(machine: Box<Machine>, now: Timestamp) -> Self {
        let mut turn = Self {
            machine,
            now,
            records: Vec::new(),
            effects: Vec::new(),
            events: Vec::new(),
            leaving: Vec::new(),
            claimed: Vec::new(),
            dirty_closes: BTreeSet::new(),
            close_edits: 0,
            commands: 0,
        };
        // Arrivals are decided by what is fresh now.
        turn.remeasure_when_due();
        turn
    }

    /// Handles one command. The returned tag marks its answer among the effects: the number of
    /// the command in this turn, from 0.
    pub fn handle(&mut self, command: Command) -> Tag {
        let tag = Tag(self.commands);
        self.commands = self.commands.saturating_add(1);
        match command {
            Command::Acquire(acquire) => self.acquire(tag, acquire),
            Command::Leave(ticket) => self.leave(tag, &ticket),
            Command::Gone(ticket) => self.gone(tag, &ticket),
            Command::Delivered(delivery) => self.delivered(tag, &delivery),
            Command::Undelivered(delivery) => self.undelivered(tag, &delivery),
            Command::Watch(tickets) => self.watch(tag, tickets),
            Command::Release(lease) => self.release(tag, lease),
            Command::Renew { lease, ttl } => self.renew(tag, lease, ttl),
            Command::Cancel(ticket) => {
                let (seq, outcome) = self.cancel(ticket);
                self.reply(tag, seq, Reply::Cancel(outcome));
            }
            Command::Close(request) => {
                let (seq, reply) = self.close(request);
                self.reply(tag, seq, Reply::Close(reply));
            }
            Command::RetryClose(close) => {
                let (seq, outcome) = self.retry_close(close);
                self.reply(tag, seq, Reply::RetryClose(outcome));
            }
            Command::Operate(operation) => self.operate(tag, operation),
            Command::Called(results) => self.called(tag, results),
            Command::Round(round) => self.round(tag, round),
            Command::LocalBypasses(counts) => {
                for (reason, count) in counts {
                    self.machine.state.tally.local_bypasses(reason, count);
                }
                self.reply(tag, None, Reply::Done);
            }
            Command::ReadLease(lease) => {
                let reply = Reply::Lease(self.machine.read_lease(lease));
                self.reply(tag, None, reply);
            }
            Command::ReadTicket(ticket) => {
                let reply = Reply::Ticket(self.machine.read_ticket(&ticket));
                self.reply(tag, None, reply);
            }
            Command::ListLeases(slice) => {
                let reply = Reply::Leases(self.machine.list_leases(slice));
                self.reply(tag, None, reply);
            }
            Command::ListQueue(slice) => {
                let reply = Reply::Queue(self.machine.list_queue(slice));
                self.reply(tag, None, reply);
            }
            Command::ReadClose(close) => {
                let close = self.machine.state.closes.find(close).cloned();
                self.reply(tag, None, Reply::ReadClose(close));
            }
            Command::ReadSession(session) => {
                let reply = Reply::Session(self.machine.read_session(&session));
                self.reply(tag, None, reply);
            }
            Command::ListSessions(slice) => {
                let reply = Reply::Sessions(self.machine.list_sessions(slice));
                self.reply(tag, None, reply);
            }
            Command::ListCloses(slice) => {
                let reply = Reply::Closes(self.machine.list_closes(slice));
                self.reply(tag, None, reply);
            }
            Command::TakeStep { run, step } => self.take_step(tag, run, step),
            Command::PeekStep(run) => {
                let reply = Reply::Step(Box::new(self.machine.look_at_window(run)));
                self.reply(tag, None, reply);
            }
            Command::ListSteps(slice) => {
                let reply = Reply::Steps(self.machine.list_steps(slice));
                self.reply(tag, None, reply);
            }
            Command::ListAudit(slice) => {
                let reply = Reply::Audit(self.machine.list_audit(slice));
                self.reply(tag, None, reply);
            }
            Command::ListDecisions(wanted) => {
                let reply = Reply::Decisions(self.machine.list_decisions(&wanted));
                self.reply(tag, None, reply);
            }
            Command::ListEpochs => {
                let epochs = self.machine.state.epochs().iter().rev().cloned().collect();
                self.reply(tag, None, Reply::Epochs(epochs));
            }
            Command::ReadImage => {
                let image = Box::new(self.machine.image());
                self.reply(tag, None, Reply::Image(image));
            }
        }
        tag
    }

    /// Whether an acquire of this ticket meets a decision or a place in line; otherwise it would be
    /// decided anew (TIC1).
    #[must_use]
    pub fn knows(&self, ticket: &TicketId) -> bool {
        let ticket = self.machine.state.ticket(ticket);
        ticket.is_some_and(
            |ticket| !matches!(&ticket.stage, Stage::Ended(ended) if ended.how.decided_afresh()),
        )
    }

    /// Ends the turn: expiries, queue pass, answers of calls that end with it.
    #[must_use]
    pub fn finish(mut self) -> Batch {
        self.expire_and_pass();
        self.answer_leaving();
        self.forget_finished();
        self.forget_closes();
        self.record_closes();
        self.seal(false)
    }

    /// Ends the last turn of an orderly stop: everything that rides along is written too.
    #[must_use]
    pub fn finish_last(mut self) -> Batch {
        self.answer_leaving();
        self.record_closes();
        self.seal(true)
    }

    /// Applies a fact and keeps it for the store.
    pub(crate) fn record(&mut self, record: Record) {
        self.machine.state.evolve(&record);
        self.records.push(record);
    }

    /// Turns a ticket over to a new stage.
    pub(crate) fn turn_over(&mut self, ticket: Ticket) {
        self.machine.renewals.forget(ticket.row);
        self.record(Record::Ticket(ticket));
    }

    pub(crate) fn next_seq(&mut self) -> Seq {
        let seq = Seq(self.machine.state.seq.0.saturating_add(1));
        self.machine.state.seq = seq;
        seq
    }

    pub(crate) fn reply(&mut self, tag: Tag, seq: Option<Seq>, reply: Reply) {
        self.effects.push(Effect::Reply { tag, seq, reply });
    }

    fn reply_acquire(&mut self, tag: Tag, seq: Option<Seq>, answer: Answer) {
        self.reply(tag, seq, Reply::Acquire(Ok(answer)));
    }

    // ---- acquire -------------------------------------------------------------------------

    fn acquire(&mut self, tag: Tag, acquire: Acquire) {
        if acquire.sent.reservation(None).is_none() {
            return self.refuse(tag, AcquireRefused::TooManyTokens);
        }
        let Some(known) = self.machine.state.ticket(&acquire.ticket) else {
            return self.acquire_new(tag, acquire, None);
        };
        let known = known.clone();
        if let Stage::Ended(ended) = &known.stage
            && ended.how.decided_afresh()
        {
            return self.acquire_new(tag, acquire, Some(known));
        }
        if let Some(asked) = &known.asked
            && (asked.session != acquire.session || asked.sent != acquire.sent)
        {
            return self.refuse(tag, AcquireRefused::TicketConflict);
        }
        match &known.stage {
            Stage::Waiting { .. } => {
                self.machine.presences.enter(known.row);
                self.park(tag, known.row, None, acquire.stays, false);
            }
            Stage::Held(_) | Stage::Ended(_) => {
                let answer = self.told_again(&known, Some(&acquire));
                self.reply_acquire(tag, None, answer);
            }
        }
    }

    fn refuse(&mut self, tag: Tag, why: AcquireRefused) {
        self.reply(tag, None, Reply::Acquire(Err(why)));
    }

    /// What a decided ticket is told when it asks again. An acquire claims a grant; the answer to a
    /// watch, or with a bypass, is on its way and may be lost yet (TIC4).
    fn told_again(&mut self, ticket: &Ticket, acquire: Option<&Acquire>) -> Answer {
        let mut answer = self.machine.answer(ticket);
        // A marker that stood before its acquire answers with what the acquire brought.
        if let (None, Some(acquire)) = (&ticket.asked, acquire) {
            answer.session = Some(acquire.session.clone());
            answer.reservation = self.reservation(acquire);
        }
        match &ticket.stage {
            Stage::Waiting { .. } => {}
            Stage::Held(lease) if acquire.is_some() => {
                if self.machine.presences.get(ticket.row).is_some() {
                    self.claimed.push(lease.id);
                }
                self.claim(ticket);
            }
            Stage::Held(_) | Stage::Ended(_) => {
                if self.machine.presences.get(ticket.row).is_some() {
                    self.machine.presences.set(ticket.row, Presence::InFlight);
                }
            }
        }
        answer
    }

    fn reservation(&self, acquire: &Acquire) -> Tokens {
        acquire
            .sent
            .reservation(self.machine.policy.expected_decode_cap)
            .unwrap_or(Tokens::MAX)
    }

    /// DEC1. `former` is an earlier life of the ticket that ended so that it is decided afresh.
    fn acquire_new(&mut self, tag: Tag, acquire: Acquire, former: Option<Ticket>) {
        let reservation = self.reservation(&acquire);
        let since = former.as_ref().and_then(kept_clock);
        let request = Request {
            reservation,
            scope: acquire.scope,
            protected: acquire.protected,
            since,
        };
        let judged_at = self.machine.judged_at();
        let moment = self.machine.moment();
        let decision = self
            .machine
            .situation(reservation)
            .decide(request, judged_at);
        self.note_size(reservation);
        self.events.push(Event::Asked {
            scope: acquire.scope,
            reservation,
        });
        let session_reopened = self.use_session(&acquire.session, &acquire.ticket);
        let stays = acquire.stays;
        let row = RowNo(self.machine.state.next_row);
        let mut ticket = Ticket {
            row,
            id: acquire.ticket,
            asked: Some(Asked {
                session: acquire.session,
                sent: acquire.sent,
                terms: Terms {
                    reservation,
                    scope: acquire.scope,
                    ttl: acquire.ttl,
                    client: acquire.client,
                    request_id: acquire.request_id,
                },
            }),
            stage: Stage::Waiting {
                since: since.unwrap_or(self.now),
            },
        };
        self.machine.state.share_names(&mut ticket);
        if let Some(former) = former {
            self.forget_now(&former);
        }
        let waited = since.map_or(Span::ZERO, |since| self.now.since(since));
        let decided = match decision {
            Decision::Admit => Decided::Admit,
            Decision::Wait(reason) => Decided::Wait(reason),
            Decision::Bypass(reason) => Decided::Bypass(reason),
        };
        self.note_decision(&ticket, waited, decided, moment);
        match decision {
            Decision::Admit => {
                let seq = self.next_seq();
                let granted = self.grant(ticket, since);
                self.machine.presences.set(row, Presence::InFlight);
                let answer = Answer {
                    session_reopened,
                    ..self.machine.first_answer(&granted)
                };
                self.reply_acquire(tag, Some(seq), answer);
            }
            Decision::Wait(reason) => {
                let seq = self.next_seq();
                self.machine.state.tally.wait(acquire.scope, reason);
                self.turn_over(ticket);
                self.machine.presences.enter(row);
                self.park(tag, row, Some(seq), stays, session_reopened);
            }
            Decision::Bypass(reason) => {
                self.machine.state.tally.bypass(acquire.scope, reason);
                self.left_queue(QueueEnd::Bypass, since.map(|since| self.now.since(since)));
                let bypassed = Ticket {
                    stage: Stage::Ended(Ended {
                        at: self.now,
                        how: EndHow::Bypassed(reason),
                        lease: None,
                        since: None,
                        waited,
                        epoch: self.machine.state.epoch,
                    }),
                    ..ticket
                };
                let answer = Answer {
                    session_reopened,
                    ..self.machine.first_answer(&bypassed)
                };
                // Remembered in memory only (section 9): no record, and no seq but for what it did to
                // a close.
                self.machine.state.put(bypassed);
                self.machine.presences.set(row, Presence::InFlight);
                let seq = session_reopened.then(|| self.next_seq());
                self.reply_acquire(tag, seq, answer);
            }
        }
    }

    /// Keeps a decision for readers, with the figures of its moment.
    pub(crate) fn note_decision(
        &mut self,
        ticket: &Ticket,
        waited: Span,
        decided: Decided,
        moment: Moment,
    ) {
        let asked = ticket.asked.as_ref();
        let held = if let (Decided::Ended(_), Stage::Held(lease)) = (decided, &ticket.stage) {
            Some(self.now.since(lease.granted_at))
        } else {
            None
        };
        self.machine.decisions.note(DecisionEntry {
            number: 0,
            at: self.now,
            ticket: ticket.id.clone(),
            session: asked.map(|asked| asked.session.clone()),
            client: asked.and_then(|asked| asked.terms.client.clone()),
            scope: asked.map_or(Scope::Train, |asked| asked.terms.scope),
            reservation: asked.map_or(Tokens::ZERO, |asked| asked.terms.reservation),
            waited,
            held,
            decided,
            moment,
        });
    }

    /// Removes an earlier life of a ticket, in the store too if it stands there.
    fn forget_now(&mut self, former: &Ticket) {
        self.machine.presences.clear(former.row);
        if is_remembered_in_memory_only(former) {
            self.machine.state.remove(former.row);
        } else {
            self.record(Record::Forgotten(former.row));
        }
    }

    /// A waiting call stays open, or is answered at the end of the turn.
    fn park(
        &mut self,
        tag: Tag,
        row: RowNo,
        seq: Option<Seq>,
        stays: bool,
        session_reopened: bool,
    ) {
        if stays {
            self.effects.push(Effect::Parked {
                tag,
                seq,
                session_reopened,
            });
        } else {
            self.leaving.push(Leaving {
                tag,
                row,
                seq,
                kind: LeavingKind::Acquire,
                session_reopened,
            });
        }
    }

    /// Charges the ledger and hands out a lease. `since` is the first enqueue of one that waited.
    pub(crate) fn grant(&mut self, ticket: Ticket, since: Option<Timestamp>) -> Ticket {
        let terms = ticket.asked.as_ref().map(|asked| &asked.terms);
        let ttl = terms.map_or(Span::ZERO, |terms| terms.ttl);
        let scope = terms.map_or(Scope::Train, |terms| terms.scope);
        let reservation = terms.map_or(Tokens::ZERO, |terms| terms.reservation);
        let waited = since.map(|since| self.now.since(since));
        let granted = Ticket {
            stage: Stage::Held(Lease {
                id: LeaseId {
                    issue: Issue(self.machine.state.next_issue),
                    salt: self.machine.state.salt(),
                },
                epoch: self.machine.state.epoch,
                granted_at: self.now,
                waited,
                ttl,
                ends_at: self.now.after(ttl),
                graced: false,
            }),
            ..ticket
        };
        self.machine.fleet.pace_admitted(reservation);
        self.machine.in_flight.admit(scope, waited);
        self.turn_over(granted.clone());
        granted
    }

    /// DEC5: fits on no engine; decided as always, with a notice.
    fn note_size(&mut self, reservation: Tokens) {
        let largest_pool = self.machine.fleet.measure().largest_pool;
        if largest_pool == Tokens::ZERO || reservation <= largest_pool {
            return;
        }
        let now = self.now;
        let notices = &mut self.machine.notices;
        let first = notices.iter().find_map(|notice| match notice {
            Notice::LargerThanAnyPool { since, .. } => Some(*since),
            Notice::UnknownLabel { .. }
            | Notice::SessionReopened { .. }
            | Notice::CallRefused { .. } => None,
        });
        notices.retain(|notice| !matches!(notice, Notice::LargerThanAnyPool { .. }));
        notices.push(Notice::LargerThanAnyPool {
            since: first.unwrap_or(now),
            last: now,
            reservation,
            largest_pool,
        });
    }

    // ---- who is there --------------------------------------------------------------------

    fn leave(&mut self, tag: Tag, ticket: &TicketId) {
        let waiting = self
            .machine
            .state
            .ticket(ticket)
            .filter(|ticket| matches!(ticket.stage, Stage::Waiting { .. }));
        match waiting.map(|ticket| ticket.row) {
            Some(row) => self.leaving.push(Leaving {
                tag,
                row,
                seq: None,
                kind: LeavingKind::Leave,
                // The open call knows it.
                session_reopened: false,
            }),
            None => self.reply(tag, None, Reply::Left(None)),
        }
    }

    /// The caller vanished: away at once (TIC4).
    fn gone(&mut self, tag: Tag, ticket: &TicketId) {
        let grace = self.machine.policy.claim_grace;
        if let Some(ticket) = self.machine.state.ticket(ticket) {
            self.machine.presences.leave(ticket.row, self.now, grace);
        }
        self.reply(tag, None, Reply::Done);
    }

    fn delivered(&mut self, tag: Tag, delivery: &Delivery) {
        if let Some(ticket) = self.decided(delivery) {
            match &ticket.stage {
                Stage::Held(_) => self.claim(&ticket),
                Stage::Waiting { .. } | Stage::Ended(_) => {
                    self.machine.presences.clear(ticket.row);
                }
            }
        }
        self.reply(tag, None, Reply::Done);
    }

    fn undelivered(&mut self, tag: Tag, delivery: &Delivery) {
        if let Some(ticket) = self.decided(delivery) {
            let presence = self.machine.presences.get(ticket.row);
            match &ticket.stage {
                Stage::Held(_) if presence == Some(Presence::InFlight) => {
                    let until = self.now.after(self.machine.policy.claim_grace);
                    self.machine
                        .presences
                        .set(ticket.row, Presence::Unclaimed(until));
                }
                // One that arrived before, by another call, stays told.
                Stage::Ended(_) if presence == Some(Presence::InFlight) => {
                    self.machine.presences.set(ticket.row, Presence::Untold);
                }
                Stage::Ended(_) | Stage::Held(_) | Stage::Waiting { .. } => {}
            }
        }
        self.reply(tag, None, Reply::Done);
    }

    /// The ticket, if it still stands where the delivered decision put it.
    fn decided(&self, delivery: &Delivery) -> Option<Ticket> {
        let ticket = self.machine.state.ticket(&delivery.ticket)?;
        let same = match &ticket.stage {
            Stage::Waiting { .. } => false,
            Stage::Held(lease) => delivery.lease == Some(lease.id),
            Stage::Ended(_) => delivery.lease.is_none(),
        };
        same.then(|| ticket.clone())
    }

    /// From here on the grant counts as an admit (CNT1).
    fn claim(&mut self, ticket: &Ticket) {
        if self.machine.presences.clear(ticket.row).is_none() {
            return;
        }
        if let Some((scope, waited)) = granted(ticket) {
            self.machine.in_flight.unadmit(scope, waited);
            self.machine.state.tally.admit(scope, waited);
            self.left_queue(QueueEnd::Admit, waited);
        }
    }

    /// A ticket was counted that had waited, or had not.
    pub(crate) fn left_queue(&mut self, outcome: QueueEnd, waited: Option<Span>) {
        let event = waited.map(|waited| Event::LeftQueue { outcome, waited });
        self.events.extend(event);
    }

    fn watch(&mut self, tag: Tag, tickets: Vec<TicketId>) {
        let mut watched = Vec::with_capacity(tickets.len());
        for id in tickets {
            let Some(ticket) = self.machine.state.ticket(&id).cloned() else {
                watched.push((id, Watched::Unknown));
                continue;
            };
            let state = match &ticket.stage {
                Stage::Waiting { .. } => {
                    self.machine.presences.enter(ticket.row);
                    Watched::Waiting
                }
                Stage::Ended(ended) if ended.how.decided_afresh() => Watched::Unknown,
                Stage::Held(_) | Stage::Ended(_) => {
                    Watched::Decided(self.told_again(&ticket, None))
                }
            };
            // The name that the row has, so that the caller's copy of it ends with the call's body.
            watched.push((ticket.id, state));
        }
        self.reply(tag, None, Reply::Watch(watched));
    }

    // ---- leases --------------------------------------------------------------------------

    fn release(&mut self, tag: Tag, id: LeaseId) {
        let Some(ticket) = self.machine.state.lease(id).cloned() else {
            let gone = self.machine.unknown_lease(id);
            return self.reply(tag, None, Reply::Release(Err(gone)));
        };
        let (seq, outcome) = match &ticket.stage {
            Stage::Waiting { .. } => (None, Err(LeaseGone::NotFound)),
            Stage::Held(_) => {
                let seq = self.next_seq();
                // Whoever gives back a lease whose answer is on its way has read that answer.
                if self.machine.presences.get(ticket.row) == Some(Presence::InFlight) {
                    self.claim(&ticket);
                }
                self.end_lease(ticket, EndHow::Released);
                (Some(seq), Ok(ReleaseOutcome::Released))
            }
            Stage::Ended(ended) => match ended.how {
                EndHow::Released | EndHow::Cancelled => (None, Ok(ReleaseOutcome::AlreadyReleased)),
                EndHow::Bypassed(_)
                | EndHow::SessionClosed
                | EndHow::Expired
                | EndHow::Revoked
                | EndHow::Dropped
                | EndHow::TakenBack => (None, Err(LeaseGone::Expired)),
            },
        };
        self.reply(tag, seq, Reply::Release(outcome));
    }

    fn renew(&mut self, tag: Tag, id: LeaseId, ttl: Option<Span>) {
        let ticket = match self.machine.held(id) {
            Ok(ticket) => ticket.clone(),
            Err(gone) => return self.reply(tag, None, Reply::Lease(Err(gone))),
        };
        self.claim(&ticket);
        if let Stage::Held(lease) = &ticket.stage {
            let ttl = ttl.unwrap_or(lease.ttl);
            let renewed = Lease {
                ttl,
                ends_at: self.now.after(ttl),
                graced: false,
                ..lease.clone()
            };
            self.machine.renewals.note(ticket.row, self.now);
            self.machine.state.put(Ticket {
                stage: Stage::Held(renewed),
                ..ticket
            });
        }
        let reply = Reply::Lease(self.machine.read_lease(id));
        self.reply(tag, None, reply);
    }

    /// Ends a held lease and counts it: in `cancelled` when nobody had claimed it, else by how it ended (CNT1).
    pub(crate) fn end_lease(&mut self, ticket: Ticket, how: EndHow) {
        let Stage::Held(lease) = &ticket.stage else {
            return;
        };
        if let Some((scope, waited)) = granted(&ticket) {
            let unclaimed = self.machine.presences.clear(ticket.row).is_some();
            if unclaimed {
                self.machine.in_flight.unadmit(scope, waited);
                let cancelled = match how {
                    EndHow::Cancelled => CancelledHow::Withdrawn,
                    EndHow::SessionClosed => CancelledHow::SessionClosed,
                    EndHow::Bypassed(_)
                    | EndHow::Released
                    | EndHow::Expired
                    | EndHow::Revoked
                    | EndHow::Dropped
                    | EndHow::TakenBack => CancelledHow::TakenBack,
                };
                self.machine.state.tally.cancelled(scope, cancelled);
                self.left_queue(QueueEnd::Cancelled, waited);
                let moment = self.machine.moment();
                let waited = waited.unwrap_or(Span::ZERO);
                self.note_decision(&ticket, waited, Decided::Cancelled(cancelled), moment);
            } else if let Some(end) = lease_end(how) {
                self.machine.state.tally.lease_ended(end);
                self.lease_ended(&ticket, lease, end);
                let moment = self.machine.moment();
                let waited = waited.unwrap_or(Span::ZERO);
                self.note_decision(&ticket, waited, Decided::Ended(end), moment);
            }
        }
        let ended = Ended {
            at: self.now,
            how,
            lease: Some(lease.id),
            since: lease.waited.map(|waited| lease.granted_at.before(waited)),
            waited: lease.waited.unwrap_or(Span::ZERO),
            epoch: lease.epoch,
        };
        if let Some(asked) = &ticket.asked {
            self.lease_leaves(&asked.session);
        }
        self.turn_over(Ticket {
            stage: Stage::Ended(ended),
            ..ticket
        });
    }

    fn lease_ended(&mut self, ticket: &Ticket, lease: &Lease, how: LeaseEnd) {
        let held = self.now.since(lease.granted_at);
        self.events.push(Event::LeaseEnded { how, held });
        if how == LeaseEnd::Expired {
            let asked = ticket.asked.as_ref();
            self.events.push(Event::Expired {
                lease: lease.id,
                ticket: ticket.id.clone(),
                session: asked.map(|asked| asked.session.clone()),
                reservation: asked.map_or(Tokens::ZERO, |asked| asked.terms.reservation),
            });
        }
    }

    // ---- cancel --------------------------------------------------------------------------

    pub(crate) fn cancel(&mut self, id: TicketId) -> (Option<Seq>, CancelOutcome) {
        let Some(ticket) = self.machine.state.ticket(&id).cloned() else {
            let seq = self.next_seq();
            let row = RowNo(self.machine.state.next_row);
            let marker = Ticket {
                row,
                id,
                asked: None,
                stage: Stage::Ended(self.cancelled_now()),
            };
            self.turn_over(marker);
            return (Some(seq), CancelOutcome::Unknown);
        };
        match &ticket.stage {
            Stage::Waiting { .. } => {
                let seq = self.next_seq();
                self.withdraw(ticket, EndHow::Cancelled, CancelledHow::Withdrawn, seq);
                (Some(seq), CancelOutcome::Withdrawn)
            }
            Stage::Held(_) => {
                let seq = self.next_seq();
                self.end_lease(ticket, EndHow::Cancelled);
                (Some(seq), CancelOutcome::Released)
            }
            Stage::Ended(ended) => match ended.how {
                EndHow::Released | EndHow::Cancelled | EndHow::SessionClosed => {
                    (None, CancelOutcome::AlreadyFinished)
                }
                EndHow::Bypassed(_) => (Some(self.mark_cancelled(ticket)), CancelOutcome::Bypassed),
                EndHow::Expired | EndHow::Revoked | EndHow::Dropped | EndHow::TakenBack => (
                    Some(self.mark_cancelled(ticket)),
                    CancelOutcome::AlreadyFinished,
                ),
            },
        }
    }

    /// An ended ticket keeps the marker: a late acquire is refused (TIC5).
    fn mark_cancelled(&mut self, ticket: Ticket) -> Seq {
        let seq = self.next_seq();
        self.machine.presences.clear(ticket.row);
        let stage = Stage::Ended(self.cancelled_now());
        self.turn_over(Ticket { stage, ..ticket });
        seq
    }

    fn cancelled_now(&self) -> Ended {
        Ended {
            at: self.now,
            how: EndHow::Cancelled,
            lease: None,
            since: None,
            waited: Span::ZERO,
            epoch: self.machine.state.epoch,
        }
    }

    /// Takes a waiter out of line and tells its open calls.
    pub(crate) fn withdraw(
        &mut self,
        ticket: Ticket,
        how: EndHow,
        counted: CancelledHow,
        seq: Seq,
    ) {
        let Stage::Waiting { since } = ticket.stage else {
            return;
        };
        self.machine.presences.clear(ticket.row);
        if let Some(asked) = &ticket.asked {
            self.machine
                .state
                .tally
                .cancelled(asked.terms.scope, counted);
        }
        let moment = self.machine.moment();
        let waited = self.now.since(since);
        self.left_queue(QueueEnd::Cancelled, Some(waited));
        self.note_decision(&ticket, waited, Decided::Cancelled(counted), moment);
        let withdrawn = Ticket {
            stage: Stage::Ended(Ended {
                at: self.now,
                how,
                lease: None,
                since: Some(since),
                waited,
                epoch: self.machine.state.epoch,
            }),
            ..ticket
        };
        let mut answer = self.machine.first_answer(&withdrawn);
        // An open call is told what happened, not that the ticket was used before.
        if how != EndHow::SessionClosed {
            answer.outcome = Outcome::Cancelled(CancelReason::Cancelled);
        }
        self.turn_over(withdrawn);
        self.effects.push(Effect::Decided { seq, answer });
    }

    // ---- readings ------------------------------------------------------------------------

    fn round(&mut self, tag: Tag, round: Round) {
        if let Some(hold) = self.machine.hold
            && round.began_at >= hold.began_at
        {
            self.machine.hold = None;
        }
        let judged_at = self.machine.judged_at();
        let machine = &mut *self.machine;
        let first_set = machine.state.epochs().is_empty();
        let applied = machine.fleet.apply(
            round,
            self.now,
            judged_at,
            &machine.policy,
            machine.state.epoch,
            first_set,
        );
        let seq = (!applied.records.is_empty()).then(|| self.next_seq());
        for record in applied.records {
            self.record(record);
        }
        if !applied.answered.is_empty() {
            self.sample_usage();
        }
        for engine in &applied.answered {
            self.machine.fanout.seen(engine, self.now);
        }
        self.engines_restarted(&applied.restarted);
        let machine = &mut *self.machine;
        if machine.fleet.members().next().is_some() {
            machine.fanout.members_known();
        }
        machine.fanout.members_may_have_left();
        self.note_labels();
        self.reply(tag, seq, Reply::Done);
    }

    /// CAP2: rows that differ by an unknown label are a notice while they last.
    fn note_labels(&mut self) {
        let unknown = self.machine.fleet.unknown_label();
        let notices = &mut self.machine.notices;
        let noted = notices
            .iter()
            .any(|notice| matches!(notice, Notice::UnknownLabel { .. }));
        if unknown && !noted {
            notices.push(Notice::UnknownLabel { since: self.now });
        }
        if !unknown {
            notices.retain(|notice| !matches!(notice, Notice::UnknownLabel { .. }));
        }
    }
}

impl Machine {
    /// What a decision about a request of this size reads.
    pub(crate) fn situation(&self, reservation: Tokens) -> Situation<'_> {
        Situation {
            policy: &self.policy,
            measure: self.fleet.measure(),
            reserved: self.state.ledger.reserved(),
            waiting: self.state.queue.len(),
            pace_allows: self.fleet.pace_allows(reservation),
        }
    }

    /// What holds a waiter up now (TIC2).
    pub(crate) fn wait_reason(&self, reservation: Tokens, position: u64) -> WaitReason {
        if position > 1 {
            return WaitReason::BehindOlder;
        }
        self.situation(reservation)
            .blocked(reservation)
            .unwrap_or(WaitReason::CapacityExhausted)
    }
}

/// Scope and queue time of a held ticket.
pub(crate) fn granted(ticket: &Ticket) -> Option<(Scope, Option<Span>)> {
    let Stage::Held(lease) = &ticket.stage else {
        return None;
    };
    let asked = ticket.asked.as_ref()?;
    Some((asked.terms.scope, lease.waited))
}

/// The max-wait clock that a ticket brings back: one that was dropped, or whose grant was taken back (TIC3).
fn kept_clock(former: &Ticket) -> Option<Timestamp> {
    match &former.stage {
        Stage::Ended(ended) if matches!(ended.how, EndHow::Dropped | EndHow::TakenBack) => {
            ended.since
        }
        Stage::Waiting { .. } | Stage::Held(_) | Stage::Ended(_) => None,
    }
}

/// How a counted lease ended; `None` for what no held lease ends by.
const fn lease_end(how: EndHow) -> Option<LeaseEnd> {
    match how {
        EndHow::Released => Some(LeaseEnd::Released),
        EndHow::Expired => Some(LeaseEnd::Expired),
        EndHow::Revoked => Some(LeaseEnd::Revoked),
        EndHow::Cancelled => Some(LeaseEnd::Cancelled),
        EndHow::Bypassed(_) | EndHow::SessionClosed | EndHow::Dropped | EndHow::TakenBack => None,
    }
}
