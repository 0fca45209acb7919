//! The book of sessions: who has leases, waiters and closes, and since when a session is idle (CLO1).
//!
//! It follows the rows of tickets and closes; nothing of it is kept but last uses, and those only
//! while idle sessions are closed (CLO11).

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::ids::{CloseNo, RowNo, SessionId, SessionNo};
use crate::policy::{SESSION_USE_EVERY, SESSIONS_FOR, SESSIONS_MAX};
use crate::ticket::{Stage, Ticket};
use crate::units::{Span, Timestamp};

/// What is known of one session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    /// Its last acquire, or the end of its last lease.
    pub(crate) last_use: Option<Timestamp>,
    /// Its last use or close.
    seen_at: Timestamp,
    pub(crate) waiting: BTreeSet<RowNo>,
    pub(crate) held: BTreeSet<RowNo>,
    /// Its close intents that are remembered; only the newest can be open.
    pub(crate) closes: BTreeSet<CloseNo>,
    /// It was used since its newest close.
    used_since_close: bool,
    /// Its last use as stored.
    stored: Option<Timestamp>,
    /// Its keys in the ordered sets beside this table.
    forget_key: Option<Timestamp>,
    idle_key: Option<Timestamp>,
}

/// All sessions that are remembered.
#[derive(Clone, Debug)]
pub(crate) struct Sessions {
    numbers: HashMap<SessionId, SessionNo, FixedState>,
    rows: BTreeMap<SessionNo, Session>,
    /// Those without lease, waiter or close, by when they were last seen.
    forgettable: BTreeSet<(Timestamp, SessionNo)>,
    /// Those without lease or waiter that were used since their newest close, by last use.
    idle: BTreeSet<(Timestamp, SessionNo)>,
    /// Those whose last use is to be written, while that is wanted.
    unsaved: BTreeSet<SessionNo>,
    /// Stored last uses of sessions that were forgotten.
    dropped: Vec<SessionId>,
    next: u64,
}

impl Sessions {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            numbers: HashMap::with_hasher(FixedState::with_seed(seed)),
            rows: BTreeMap::new(),
            forgettable: BTreeSet::new(),
            idle: BTreeSet::new(),
            unsaved: BTreeSet::new(),
            dropped: Vec::new(),
            next: 1,
        }
    }

    pub(crate) fn get(&self, id: &SessionId) -> Option<(SessionNo, &Session)> {
        let number = *self.numbers.get(id)?;
        Some((number, self.rows.get(&number)?))
    }

    /// From `first` on, in the order of first sight.
    pub(crate) fn from(&self, first: SessionNo) -> impl Iterator<Item = (SessionNo, &Session)> {
        self.rows.range(first..).map(|(number, row)| (*number, row))
    }

    fn number(&mut self, id: &SessionId, at: Timestamp) -> SessionNo {
        if let Some(number) = self.numbers.get(id) {
            return *number;
        }
        let number = SessionNo(self.next);
        self.next = self.next.saturating_add(1);
        self.numbers.insert(id.clone(), number);
        let session = Session {
            id: id.clone(),
            last_use: None,
            seen_at: at,
            waiting: BTreeSet::new(),
            held: BTreeSet::new(),
            closes: BTreeSet::new(),
            used_since_close: false,
            stored: None,
            forget_key: None,
            idle_key: None,
        };
        self.rows.insert(number, session);
        number
    }

    /// A ticket's row came to a new stage.
    pub(crate) fn ticket_put(&mut self, ticket: &Ticket) {
        let Some(asked) = &ticket.asked else { return };
        let at = match &ticket.stage {
            Stage::Waiting { since } => *since,
            Stage::Held(lease) => lease.granted_at,
            Stage::Ended(ended) => ended.at,
        };
        let number = self.number(&asked.session, at);
        let Some(session) = self.rows.get_mut(&number) else {
            return;
        };
        match &ticket.stage {
            Stage::Waiting { .. } => drop(session.waiting.insert(ticket.row)),
            Stage::Held(_) => drop(session.held.insert(ticket.row)),
            Stage::Ended(_) => {}
        }
        session.last_use = session.last_use.max(Some(at));
        session.seen_at = session.seen_at.max(at);
        if session.closes.is_empty() {
            session.used_since_close = true;
        }
        self.settle(number);
    }

    /// A ticket's row left a stage.
    pub(crate) fn ticket_left(&mut self, ticket: &Ticket) {
        let Some(asked) = &ticket.asked else { return };
        let Some(number) = self.numbers.get(&asked.session).copied() else {
            return;
        };
        if let Some(session) = self.rows.get_mut(&number) {
            session.waiting.remove(&ticket.row);
            session.held.remove(&ticket.row);
        }
        self.settle(number);
    }

    /// A close intent was put; `used_since` says whether the session was used anew since.
    pub(crate) fn close_put(
        &mut self,
        id: &SessionId,
        close: CloseNo,
        at: Timestamp,
        used_since: bool,
    ) {
        let number = self.number(id, at);
        if let Some(session) = self.rows.get_mut(&number) {
            session.closes.insert(close);
            session.seen_at = session.seen_at.max(at);
            if session.closes.last() == Some(&close) {
                session.used_since_close = used_since;
            }
        }
        self.settle(number);
    }

    /// A close intent was forgotten.
    pub(crate) fn close_left(&mut self, id: &SessionId, close: CloseNo) {
        let Some(number) = self.numbers.get(id).copied() else {
            return;
        };
        if let Some(session) = self.rows.get_mut(&number) {
            session.closes.remove(&close);
        }
        self.settle(number);
    }

    /// The last use of a session as stored.
    pub(crate) fn restore_use(&mut self, id: &SessionId, at: Timestamp) {
        let number = self.number(id, at);
        if let Some(session) = self.rows.get_mut(&number) {
            session.stored = Some(at);
            session.last_use = session.last_use.max(Some(at));
            session.seen_at = session.seen_at.max(at);
            if session.closes.is_empty() {
                session.used_since_close = true;
            }
        }
        self.settle(number);
    }

    /// Brings the ordered sets in line with one row.
    fn settle(&mut self, number: SessionNo) {
        let Some(session) = self.rows.get_mut(&number) else {
            return;
        };
        let at_rest = session.waiting.is_empty() && session.held.is_empty();
        let forget = (at_rest && session.closes.is_empty()).then_some(session.seen_at);
        if session.forget_key != forget {
            if let Some(old) = session.forget_key {
                self.forgettable.remove(&(old, number));
            }
            if let Some(new) = forget {
                self.forgettable.insert((new, number));
            }
            session.forget_key = forget;
        }
        let idle = if at_rest && session.used_since_close {
            session.last_use
        } else {
            None
        };
        if session.idle_key != idle {
            if let Some(old) = session.idle_key {
                self.idle.remove(&(old, number));
            }
            if let Some(new) = idle {
                self.idle.insert((new, number));
            }
            session.idle_key = idle;
        }
        let is_old = match (session.stored, session.last_use) {
            (Some(stored), Some(used)) => used.since(stored) >= SESSION_USE_EVERY,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        if is_old {
            self.unsaved.insert(number);
        }
    }

    /// The session that is idle for longest, and since when (CLO11).
    pub(crate) fn longest_idle(&self) -> Option<(Timestamp, &SessionId)> {
        let (since, number) = self.idle.first()?;
        Some((*since, &self.rows.get(number)?.id))
    }

    /// Forgets one session that is too old, or one too many (section 9). Those that wait for their
    /// idle close are remembered at least as long as that takes.
    pub(crate) fn forget_one(&mut self, now: Timestamp, idle_close: Option<Span>) -> bool {
        let Some((since, number)) = self.forgettable.first().copied() else {
            return false;
        };
        let kept_for = idle_close.map_or(SESSIONS_FOR, |limit| limit.max(SESSIONS_FOR));
        if self.forgettable.len() <= SESSIONS_MAX && !now.reached(since.after(kept_for)) {
            return false;
        }
        self.forgettable.remove(&(since, number));
        self.unsaved.remove(&number);
        if let Some(session) = self.rows.remove(&number) {
            if let Some(since) = session.idle_key {
                self.idle.remove(&(since, number));
            }
            self.numbers.remove(&session.id);
            if session.stored.is_some() {
                self.dropped.push(session.id);
            }
        }
        true
    }

    /// When the next session is forgotten by age.
    pub(crate) fn forget_at(&self, idle_close: Option<Span>) -> Option<Timestamp> {
        let kept_for = idle_close.map_or(SESSIONS_FOR, |limit| limit.max(SESSIONS_FOR));
        self.forgettable
            .first()
            .map(|(since, _)| since.after(kept_for))
    }

    /// Whether last uses are to be written or removed.
    pub(crate) fn has_unsaved(&self, wanted: bool) -> bool {
        !self.dropped.is_empty() || (wanted && !self.unsaved.is_empty())
    }

    /// Last uses that are to be written now.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(SessionId, Timestamp)> {
        let mut uses = Vec::new();
        for number in core::mem::take(&mut self.unsaved) {
            if let Some(session) = self.rows.get_mut(&number)
                && let Some(used) = session.last_use
            {
                session.stored = Some(used);
                uses.push((session.id.clone(), used));
            }
        }
        uses
    }

    /// Sessions whose stored last use is to be removed.
    pub(crate) fn take_dropped(&mut self) -> Vec<SessionId> {
        core::mem::take(&mut self.dropped)
    }

    /// No last use is wanted any more.
    pub(crate) fn drop_stored(&mut self) {
        for session in self.rows.values_mut() {
            if session.stored.take().is_some() {
                self.dropped.push(session.id.clone());
            }
        }
    }

    /// Last uses as stored, by session.
    pub(crate) fn stored(&self) -> Vec<(SessionId, Timestamp)> {
        let mut stored: Vec<(SessionId, Timestamp)> = self
            .rows
            .values()
            .filter_map(|session| Some((session.id.clone(), session.stored?)))
            .collect();
        stored.sort();
        stored
    }
}
