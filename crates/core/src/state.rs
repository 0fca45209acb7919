//! Durable state. `evolve` is the only thing that changes it, live and on recovery, so
//! the two cannot differ.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashSet;

use crate::arena::Place;
use crate::audit::Audit;
use crate::close::CloseIntent;
use crate::closes::Closes;
use crate::decision::Scope;
use crate::ids::{
    CloseNo, EngineId, Epoch, Issue, Label, LeaseId, RowNo, Seq, SessionId, Term, TicketId,
};
use crate::ledger::Ledger;
use crate::ordered::Ordered;
use crate::policy::{CLIENTS_SHARED_MAX, EPOCHS_MAX, FINISHED_FOR, FINISHED_MAX, STARTS_MAX};
use crate::queue::Queue;
use crate::reading::{Role, StartMark};
use crate::record::Record;
use crate::report::Reports;
use crate::sessions::Sessions;
use crate::settings::Overrides;
use crate::store::Image;
use crate::tally::Tally;
use crate::ticket::{Lease, Stage, Ticket};
use crate::tickets::Tickets;
use crate::units::{Timestamp, Tokens};
use crate::view::Load;

/// A process that wrote: the random part of the lease ids it issued (ID2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Start {
    /// The first issue number of this start.
    pub first_issue: Issue,
    /// Random part of its lease ids.
    pub salt: u64,
    /// When it began.
    pub at: Timestamp,
}

/// What is remembered of a member over a restart (CAP7, CAP8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineRow {
    /// Base URL.
    pub id: EngineId,
    /// Its part in the fleet.
    pub role: Role,
    /// Worker ids of its router rows.
    pub worker_ids: BTreeSet<Arc<str>>,
    /// It was called healthy at least once (CAP3).
    pub seen_healthy: bool,
    /// Last known capacity.
    pub capacity: Option<Tokens>,
    /// Last known start time.
    pub start_mark: Option<StartMark>,
    /// Generation in which it joined.
    pub joined: Epoch,
    /// Closes in a row that this incarnation answered as one that has no such call (CLO5).
    pub close_refusals: u32,
    /// Since when it counts as having no session close, or was last tried again.
    pub unsupported_at: Option<Timestamp>,
}

impl EngineRow {
    /// What was learnt of closes does not hold for a new incarnation, or was wrong (CLO5).
    pub(crate) fn forget_refusals(&mut self) {
        self.close_refusals = 0;
        self.unsupported_at = None;
    }
}

/// One generation of the worker set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpochEntry {
    /// The generation.
    pub epoch: Epoch,
    /// Since when.
    pub at: Timestamp,
    /// What began it.
    pub cause: EpochCause,
}

/// What began a generation (CAP8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EpochCause {
    /// The first non-empty member set.
    First,
    /// Engines joined or left.
    MembersChanged {
        /// How many joined.
        joined: u32,
        /// How many left.
        left: u32,
    },
    /// An engine is a new incarnation.
    Restarted(EngineId),
    /// The router gave an engine's rows other ids.
    WorkerIdChanged(EngineId),
    /// The store was made from a copy: what came after the copy is not known any more.
    Restored,
}

/// Running sums of one scope; the tokens of many waiters can exceed 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LoadSum {
    leases: u64,
    waiting: u64,
    waiting_tokens: u128,
}

impl LoadSum {
    const fn hold(&mut self) {
        self.leases = self.leases.saturating_add(1);
    }

    const fn unhold(&mut self) {
        self.leases = self.leases.saturating_sub(1);
    }

    fn wait(&mut self, tokens: Tokens) {
        self.waiting = self.waiting.saturating_add(1);
        self.waiting_tokens = self.waiting_tokens.saturating_add(u128::from(tokens.get()));
    }

    fn unwait(&mut self, tokens: Tokens) {
        self.waiting = self.waiting.saturating_sub(1);
        self.waiting_tokens = self.waiting_tokens.saturating_sub(u128::from(tokens.get()));
    }

    pub(crate) fn load(self) -> Load {
        Load {
            leases: self.leases,
            waiting: self.waiting,
            waiting_tokens: Tokens::clamped(self.waiting_tokens),
        }
    }
}

/// Tickets and closes with their indexes, starts, epochs, counters, settings and audit.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) term: Term,
    pub(crate) seq: Seq,
    pub(crate) epoch: Epoch,
    pub(crate) next_row: u64,
    pub(crate) next_issue: u64,
    pub(crate) tally: Tally,
    starts: VecDeque<Start>,
    epochs: VecDeque<EpochEntry>,
    tickets: Tickets,
    /// Names of callers, which are few: a name is kept once for all tickets.
    clients: HashSet<Label, FixedState>,
    /// Leases that ended and whose ticket is remembered.
    ended: Ordered<Issue, RowNo>,
    pub(crate) queue: Queue,
    /// Waiters by first enqueue: the max-wait clock (TIC3).
    pub(crate) clocks: Ordered<(Timestamp, RowNo)>,
    pub(crate) ledger: Ledger,
    /// By [`Scope`]: what stands in ledger and queue, so that no reader counts rows.
    pub(crate) loads: [LoadSum; Scope::ALL.len()],
    /// Ended tickets in the order in which they are forgotten.
    finished: Ordered<(Timestamp, RowNo)>,
    pub(crate) closes: Closes,
    pub(crate) sessions: Sessions,
    /// Engine requests of held leases, in the order of their bytes: engines match by prefix (CLO3).
    request_ids: Ordered<(Label, RowNo)>,
    pub(crate) reports: Reports,
    /// What was set at run time (SET2).
    pub(crate) overrides: Overrides,
    pub(crate) audit: Audit,
}

impl State {
    /// Loads what was stored. `seed` only spreads hash tables; nothing is ever iterated in hash order.
    pub(crate) fn restore(image: Image, seed: u64, now: Timestamp) -> (Self, Vec<EngineRow>) {
        let first_start = image.starts.first().map_or(now, |start| start.at);
        let mut state = Self {
            term: Term(image.term),
            seq: image.seq,
            epoch: image.epochs.last().map_or(Epoch(1), |entry| entry.epoch),
            next_row: 1,
            next_issue: image.next_issue.max(1),
            tally: image.tally,
            starts: image.starts.into(),
            epochs: image.epochs.into(),
            tickets: Tickets::new(seed),
            clients: HashSet::with_hasher(FixedState::with_seed(seed)),
            ended: Ordered::default(),
            queue: Queue::default(),
            clocks: Ordered::default(),
            ledger: Ledger::default(),
            loads: Default::default(),
            finished: Ordered::default(),
            closes: Closes::new(),
            sessions: Sessions::new(seed),
            request_ids: Ordered::default(),
            reports: Reports::new(first_start, seed),
            overrides: image.overrides,
            audit: Audit::new(),
        };
        for entry in image.audit {
            state.audit.put(entry);
        }
        for (run, window) in image.windows {
            state.reports.put_window(run.as_ref(), window);
        }
        for report in image.steps {
            state.reports.put_step(report);
        }
        for (session, used) in &image.sessions {
            state.sessions.restore_use(session, *used, image.now);
        }
        for mut ticket in image.tickets {
            state.share_names(&mut ticket);
            state.put(ticket);
        }
        for close in image.closes {
            state.put_close(close);
        }
        (state, image.engines)
    }

    /// The only mutator of what is kept.
    pub(crate) fn evolve(&mut self, record: &Record) {
        match record {
            Record::Started(term, start) => {
                self.term = *term;
                self.starts.push_back(start.clone());
                if self.starts.len() > STARTS_MAX {
                    self.starts.pop_front();
                }
            }
            Record::Ticket(ticket) => self.put(ticket.clone()),
            Record::Forgotten(row) => self.remove(*row),
            Record::Epoch(entry) => {
                self.epoch = entry.epoch;
                self.epochs.push_back(entry.clone());
                if self.epochs.len() > EPOCHS_MAX {
                    self.epochs.pop_front();
                }
            }
            // The fleet keeps its members; counters are kept as they are counted.
            Record::Engine(_) | Record::EngineLeft(_) | Record::Tally(_) => {}
            Record::Close(close) => self.put_close((**close).clone()),
            Record::CloseForgotten(close) => self.remove_close(*close),
            Record::Step(report) => self.reports.put_step((**report).clone()),
            Record::StepForgotten(number) => self.reports.remove_step(*number),
            Record::Window(run, window) => self.reports.put_window(run.as_ref(), window.clone()),
            Record::WindowForgotten(run) => self.reports.remove_window(run),
            Record::Settings(overrides) => self.overrides = (**overrides).clone(),
            Record::Audit(entry) => self.audit.put((**entry).clone()),
            Record::AuditForgotten(no) => self.audit.remove(*no),
            // The book of sessions follows tickets and closes, and knows what of it is stored.
            Record::SessionUsed(..) | Record::SessionForgotten(_) => {}
        }
    }

    /// Turns a ticket's row over.
    pub(crate) fn put(&mut self, ticket: Ticket) {
        let row = ticket.row;
        self.next_row = self.next_row.max(row.0.saturating_add(1));
        if let Some(issue) = ticket.issue() {
            self.next_issue = self.next_issue.max(issue.0.saturating_add(1));
        }
        let Some(place) = self.tickets.place(row) else {
            let place = self.tickets.insert(ticket);
            return self.index(None, place);
        };
        let Some(former) = self.tickets.replace(place, ticket) else {
            return;
        };
        self.index(Some(&former), place);
    }

    /// Brings the indexes in line with what became of a row.
    fn index(&mut self, former: Option<&Ticket>, place: Place) {
        let Some(ticket) = self.tickets.at(place) else {
            return;
        };
        if let (Some(former), Some(lease)) = (former.and_then(lease), lease(ticket))
            && former.id == lease.id
        {
            // Renewals are many, and change nothing else.
            let issue = lease.id.issue;
            self.ledger.renew(issue, former.ends_at, lease.ends_at);
        } else {
            if let Some(former) = former {
                self.unindex(former);
            }
            self.index_anew(place);
        }
        if let Some(ticket) = self.tickets.at(place) {
            self.sessions.ticket_put(former, ticket);
        }
    }

    fn index_anew(&mut self, place: Place) {
        let Some(ticket) = self.tickets.at(place) else {
            return;
        };
        let (row, reservation) = (ticket.row, reservation(ticket));
        match &ticket.stage {
            Stage::Waiting { since } => {
                self.queue.insert(row, reservation);
                self.clocks.insert((*since, row), ());
                load_of(&mut self.loads, ticket).wait(reservation);
            }
            Stage::Held(lease) => {
                self.ledger
                    .charge(lease.id.issue, row, reservation, lease.ends_at);
                load_of(&mut self.loads, ticket).hold();
                if let Some(request_id) = request_id(ticket) {
                    self.request_ids.insert((request_id.clone(), row), ());
                }
            }
            Stage::Ended(ended) => {
                self.finished.insert((ended.at, row), ());
                if let Some(lease) = ended.lease {
                    self.ended.insert(lease.issue, row);
                }
            }
        }
    }

    /// A new ticket takes the names of its session and its client from those that are here already.
    pub(crate) fn share_names(&mut self, ticket: &mut Ticket) {
        let Some(asked) = &mut ticket.asked else {
            return;
        };
        if let Some(session) = self.sessions.get(&asked.session) {
            asked.session = session.id.clone();
        }
        let Some(client) = &mut asked.terms.client else {
            return;
        };
        if let Some(known) = self.clients.get(client) {
            *client = known.clone();
            return;
        }
        if self.clients.len() >= CLIENTS_SHARED_MAX {
            self.clients.clear();
        }
        self.clients.insert(client.clone());
    }

    fn unindex(&mut self, ticket: &Ticket) {
        let reservation = reservation(ticket);
        match &ticket.stage {
            Stage::Waiting { since } => {
                self.queue.remove(ticket.row);
                self.clocks.remove(&(*since, ticket.row));
                load_of(&mut self.loads, ticket).unwait(reservation);
            }
            Stage::Held(lease) => {
                self.ledger
                    .settle(lease.id.issue, ticket.row, reservation, lease.ends_at);
                load_of(&mut self.loads, ticket).unhold();
                if let Some(request_id) = request_id(ticket) {
                    self.request_ids.remove(&(request_id.clone(), ticket.row));
                }
            }
            Stage::Ended(ended) => {
                self.finished.remove(&(ended.at, ticket.row));
                if let Some(lease) = ended.lease {
                    self.ended.remove(&lease.issue);
                }
            }
        }
    }

    pub(crate) fn remove(&mut self, row: RowNo) {
        if let Some(ticket) = self.tickets.remove(row) {
            self.unindex(&ticket);
            self.sessions.ticket_left(&ticket);
        }
    }

    /// Turns a close's row over.
    pub(crate) fn put_close(&mut self, close: CloseIntent) {
        self.sessions.close_put(
            &close.session,
            close.id.number,
            close.requested_at,
            close.reopened.is_some(),
        );
        self.closes.put(close);
    }

    /// Takes a close out of the book, to be changed and put back.
    pub(crate) fn take_close(&mut self, number: CloseNo) -> Option<CloseIntent> {
        self.closes.take(number)
    }

    pub(crate) fn remove_close(&mut self, number: CloseNo) {
        if let Some(close) = self.closes.take(number) {
            self.sessions.close_left(&close.session, number);
        }
    }

    /// The newest close of a session that is remembered.
    pub(crate) fn newest_close(&self, session: &SessionId) -> Option<&CloseIntent> {
        if self.closes.is_empty() {
            return None;
        }
        let session = self.sessions.get(session)?;
        self.closes.get(session.closes.last()?)
    }

    /// The close of a session that is not done.
    pub(crate) fn open_close(&self, session: &SessionId) -> Option<&CloseIntent> {
        if self.closes.open() == 0 {
            return None;
        }
        self.newest_close(session).filter(|close| !close.is_done())
    }

    /// Whether a request id begins the request id of a lease that another session holds (CLO3).
    pub(crate) fn is_foreign_prefix(&self, request_id: &Label, session: &SessionId) -> bool {
        self.request_ids
            .from((request_id.clone(), RowNo(0)))
            .map(|(entry, ())| entry)
            .take_while(|(other, _)| other.as_str().starts_with(request_id.as_str()))
            .filter_map(|(_, row)| self.tickets.get(*row)?.asked.as_ref())
            .any(|asked| asked.session != *session)
    }

    pub(crate) fn row(&self, row: RowNo) -> Option<&Ticket> {
        self.tickets.get(row)
    }

    pub(crate) fn ticket(&self, id: &TicketId) -> Option<&Ticket> {
        self.tickets.find(id)
    }

    /// The ticket that holds or held this very lease, as long as it is remembered.
    pub(crate) fn lease(&self, id: LeaseId) -> Option<&Ticket> {
        let row = self
            .ledger
            .row(id.issue)
            .or_else(|| self.ended.get(&id.issue).copied())?;
        let ticket = self.tickets.get(row)?;
        let found = match &ticket.stage {
            Stage::Waiting { .. } => None,
            Stage::Held(lease) => Some(lease.id),
            Stage::Ended(ended) => ended.lease,
        };
        (found == Some(id)).then_some(ticket)
    }

    /// Whether this lease id was ever issued, as far as starts are remembered (ID2, TIC6).
    pub(crate) fn was_issued(&self, id: LeaseId) -> bool {
        let after = self
            .starts
            .partition_point(|start| start.first_issue <= id.issue);
        let last = after
            .checked_sub(1)
            .and_then(|index| self.starts.get(index));
        id.issue.0 < self.next_issue && last.is_some_and(|start| start.salt == id.salt)
    }

    /// The random part of lease ids issued now.
    pub(crate) fn salt(&self) -> u64 {
        self.starts.back().map_or(0, |start| start.salt)
    }

    /// The oldest ended ticket, when it is old enough to be forgotten (section 9).
    pub(crate) fn too_old(&self, now: Timestamp) -> Option<RowNo> {
        let ((at, row), ()) = self.finished.first()?;
        now.reached(at.after(FINISHED_FOR)).then_some(*row)
    }

    /// The oldest ended ticket, when there is one too many (section 9).
    pub(crate) fn one_too_many(&self) -> Option<RowNo> {
        let ((_, row), ()) = self.finished.first()?;
        (self.finished.len() > FINISHED_MAX).then_some(*row)
    }

    /// When the next ended ticket is forgotten by age.
    pub(crate) fn forget_at(&self) -> Option<Timestamp> {
        self.finished
            .first()
            .map(|((at, _), ())| at.after(FINISHED_FOR))
    }

    /// Epochs, oldest first; the set was never empty once there is one.
    pub(crate) const fn epochs(&self) -> &VecDeque<EpochEntry> {
        &self.epochs
    }

    /// Starts, oldest first.
    pub(crate) const fn starts(&self) -> &VecDeque<Start> {
        &self.starts
    }

    /// The tickets that `wanted` picks, by row: for copies of everything and for tests of recovery.
    pub(crate) fn tickets(&self, wanted: impl Fn(&Ticket) -> bool) -> Vec<Ticket> {
        let mut found: Vec<&Ticket> = self.tickets.iter().filter(|row| wanted(row)).collect();
        found.sort_unstable_by_key(|ticket| ticket.row);
        found.into_iter().cloned().collect()
    }
}

const fn load_of<'a>(
    loads: &'a mut [LoadSum; Scope::ALL.len()],
    ticket: &Ticket,
) -> &'a mut LoadSum {
    let [train, eval] = loads;
    match &ticket.asked {
        Some(asked) if matches!(asked.terms.scope, Scope::Eval) => eval,
        Some(_) | None => train,
    }
}

fn reservation(ticket: &Ticket) -> Tokens {
    let asked = ticket.asked.as_ref();
    asked.map_or(Tokens::ZERO, |asked| asked.terms.reservation)
}

const fn lease(ticket: &Ticket) -> Option<&Lease> {
    match &ticket.stage {
        Stage::Held(lease) => Some(lease),
        Stage::Waiting { .. } | Stage::Ended(_) => None,
    }
}

fn request_id(ticket: &Ticket) -> Option<&Label> {
    ticket.asked.as_ref()?.terms.request_id.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::EndHow;
    use crate::ticket::Ended;
    use crate::units::Span;

    /// Section 9: what is forgotten leaves nothing behind in any index, and a newer life of the
    /// ticket stays.
    #[test]
    fn a_forgotten_ticket_leaves_nothing_behind() {
        let id = LeaseId {
            issue: Issue(7),
            salt: 1,
        };
        let row = |row| Ticket {
            row: RowNo(row),
            id: TicketId::new("t").unwrap(),
            asked: None,
            stage: Stage::Ended(Ended {
                at: Timestamp::from_millis(row),
                how: EndHow::Expired,
                lease: (row == 1).then_some(id),
                since: None,
                waited: Span::ZERO,
                epoch: Epoch(1),
            }),
        };
        let (mut state, _) = State::restore(Image::default(), 0, Timestamp::default());
        state.put(row(1));
        state.put(row(2));
        state.remove(RowNo(1));
        let newer = state.ticket(&TicketId::new("t").unwrap());
        assert_eq!(newer.map(|ticket| ticket.row), Some(RowNo(2)));
        assert!(state.ended.is_empty());
        state.remove(RowNo(2));
        assert!(state.tickets.iter().next().is_none() && state.finished.is_empty());
        assert!(state.ticket(&TicketId::new("t").unwrap()).is_none());
        assert_eq!((state.next_row, state.next_issue), (3, 8), "numbers go on");
    }
}
