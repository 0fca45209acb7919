//! The book of sessions: who has leases, waiters and closes, and since when a session is idle (CLO1).
//!
//! It follows the rows of tickets and closes; nothing of it is kept but last uses, and those only
//! while idle sessions are closed (CLO11).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::arena::{Arena, Index, Place};
use crate::few::Few;
use crate::ids::{CloseNo, RowNo, SessionId, SessionNo};
use crate::ordered::Ordered;
use crate::policy::{SESSION_USE_EVERY, SESSIONS_FOR, SESSIONS_MAX};
use crate::ticket::{Stage, Ticket};
use crate::units::{Span, Timestamp};

/// What is known of one session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) number: SessionNo,
    /// Its last acquire, or the end of its last lease.
    pub(crate) last_use: Option<Timestamp>,
    /// Its last use or close.
    seen_at: Timestamp,
    pub(crate) waiting: Few<RowNo>,
    pub(crate) held: Few<RowNo>,
    /// Its close intents that are remembered; only the newest can be open.
    pub(crate) closes: Few<CloseNo>,
    /// It was used since its newest close.
    used_since_close: bool,
    /// Its last use as stored.
    stored: Option<Timestamp>,
    /// Its keys in the ordered sets beside this table.
    forget_key: Option<Timestamp>,
    idle_key: Option<Timestamp>,
}

impl Session {
    /// Nothing of it waits or is held.
    fn is_at_rest(&self) -> bool {
        self.waiting.is_empty() && self.held.is_empty()
    }

    fn used(&mut self, at: Timestamp) {
        self.last_use = self.last_use.max(Some(at));
        self.seen_at = self.seen_at.max(at);
        // A use after a close is told by the close itself.
        if self.closes.is_empty() {
            self.used_since_close = true;
        }
    }

    /// Its last use is to be written: at most once a minute (section 9). A use that is not written is
    /// never later than what a start takes for the last one.
    fn is_unsaved(&self) -> bool {
        match (self.stored, self.last_use) {
            (Some(stored), Some(used)) => used.since(stored) > SESSION_USE_EVERY,
            (None, Some(_)) => true,
            (_, None) => false,
        }
    }
}

/// Sessions in the orders in which they are looked for.
#[derive(Clone, Debug)]
struct Order {
    /// By first sight.
    all: Ordered<SessionNo, Place>,
    /// Those without lease, waiter or close, by when they were last seen.
    forgettable: Ordered<(Timestamp, SessionNo)>,
    /// Whether idle sessions are closed: only then the next is looked after, and last uses are stored
    /// (CLO11).
    closes_idle: bool,
    /// Those without lease or waiter that were used since their newest close, by last use.
    idle: Ordered<(Timestamp, SessionNo)>,
}

impl Order {
    /// Follows what became of a session.
    fn settle(&mut self, session: &mut Session) {
        let number = session.number;
        let at_rest = session.is_at_rest();
        let forget = (at_rest && session.closes.is_empty()).then_some(session.seen_at);
        turn_over(
            &mut self.forgettable,
            number,
            &mut session.forget_key,
            forget,
        );
        let is_idle = self.closes_idle && at_rest && session.used_since_close;
        let idle = session.last_use.filter(|_| is_idle);
        turn_over(&mut self.idle, number, &mut session.idle_key, idle);
    }
}

fn turn_over(
    set: &mut Ordered<(Timestamp, SessionNo)>,
    number: SessionNo,
    key: &mut Option<Timestamp>,
    new: Option<Timestamp>,
) {
    if *key == new {
        return;
    }
    if let Some(old) = *key {
        set.remove(&(old, number));
    }
    if let Some(new) = new {
        set.insert((new, number), ());
    }
    *key = new;
}

/// All sessions that are remembered.
#[derive(Clone, Debug)]
pub(crate) struct Sessions {
    rows: Arena<Session>,
    by_id: Index<Session, SessionId>,
    order: Order,
    /// Those whose last use is to be written.
    unsaved: BTreeSet<SessionId>,
    /// Stored last uses that are of no more interest.
    dropped: BTreeSet<SessionId>,
    next: u64,
}

impl Sessions {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rows: Arena::default(),
            by_id: Index::new(seed, |session| &session.id),
            order: Order {
                all: Ordered::default(),
                forgettable: Ordered::default(),
                // Until a start says otherwise, so that it knows what is stored.
                closes_idle: true,
                idle: Ordered::default(),
            },
            unsaved: BTreeSet::new(),
            dropped: BTreeSet::new(),
            next: 1,
        }
    }

    pub(crate) fn get(&self, id: &SessionId) -> Option<&Session> {
        self.rows.get(self.by_id.find(&self.rows, id)?)
    }

    fn get_mut(&mut self, id: &SessionId) -> Option<&mut Session> {
        self.rows.get_mut(self.by_id.find(&self.rows, id)?)
    }

    /// All that are remembered.
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// From `first` on, in the order of first sight.
    pub(crate) fn from(&self, first: SessionNo) -> impl Iterator<Item = &Session> {
        let places = self.order.all.from(first);
        places.filter_map(|(_, place)| self.rows.get(*place))
    }

    /// Changes a session, new or known, and brings the ordered sets in line with it.
    fn change(&mut self, id: &SessionId, at: Timestamp, change: impl FnOnce(&mut Session)) {
        let known = self.by_id.find(&self.rows, id);
        let place = known.unwrap_or_else(|| self.first_sight(id, at));
        if let Some(session) = self.rows.get_mut(place) {
            change(session);
            self.order.settle(session);
        }
    }

    fn first_sight(&mut self, id: &SessionId, at: Timestamp) -> Place {
        let number = SessionNo(self.next);
        self.next = self.next.saturating_add(1);
        let place = self.rows.insert(Session {
            id: id.clone(),
            number,
            last_use: None,
            seen_at: at,
            waiting: Few::None,
            held: Few::None,
            closes: Few::None,
            used_since_close: false,
            stored: None,
            forget_key: None,
            idle_key: None,
        });
        self.by_id.put(&self.rows, place);
        self.order.all.insert(number, place);
        place
    }

    /// A ticket's row came from one stage to another; `None` for a row that was not there.
    pub(crate) fn ticket_put(&mut self, former: Option<&Ticket>, ticket: &Ticket) {
        let Some(asked) = &ticket.asked else { return };
        let at = match &ticket.stage {
            Stage::Waiting { since } => *since,
            Stage::Held(lease) => lease.granted_at,
            Stage::Ended(ended) => ended.at,
        };
        self.change(&asked.session, at, |session| {
            match (former.map(|former| &former.stage), &ticket.stage) {
                (Some(Stage::Waiting { .. }), Stage::Waiting { .. })
                | (Some(Stage::Held(_)), Stage::Held(_))
                | (Some(Stage::Ended(_)) | None, _) => {}
                (Some(Stage::Waiting { .. }), _) => session.waiting.remove(ticket.row),
                (Some(Stage::Held(_)), _) => session.held.remove(ticket.row),
            }
            match &ticket.stage {
                Stage::Waiting { .. } => session.waiting.insert(ticket.row),
                Stage::Held(_) => session.held.insert(ticket.row),
                Stage::Ended(_) => {}
            }
            session.used(at);
        });
        self.note_unsaved(&asked.session);
    }

    /// A ticket's row was forgotten.
    pub(crate) fn ticket_left(&mut self, ticket: &Ticket) {
        let Some(asked) = &ticket.asked else { return };
        let place = self.by_id.find(&self.rows, &asked.session);
        let Some(session) = place.and_then(|place| self.rows.get_mut(place)) else {
            return;
        };
        if !session.is_at_rest() {
            session.waiting.remove(ticket.row);
            session.held.remove(ticket.row);
            self.order.settle(session);
        }
    }

    /// A close intent was put; `used_since` says whether the session was used anew since.
    pub(crate) fn close_put(
        &mut self,
        id: &SessionId,
        close: CloseNo,
        at: Timestamp,
        used_since: bool,
    ) {
        self.change(id, at, |session| {
            session.closes.insert(close);
            session.seen_at = session.seen_at.max(at);
            if session.closes.last() == Some(close) {
                session.used_since_close = used_since;
            }
        });
    }

    /// A close intent was forgotten. A session that was not used since is over.
    pub(crate) fn close_left(&mut self, id: &SessionId, close: CloseNo) {
        let place = self.by_id.find(&self.rows, id);
        let Some(session) = place.and_then(|place| self.rows.get_mut(place)) else {
            return;
        };
        session.closes.remove(close);
        let is_over = session.closes.is_empty() && !session.used_since_close;
        let number = session.number;
        if is_over && session.is_at_rest() {
            self.forget(number);
        } else {
            self.order.settle(session);
        }
    }

    /// The last use of a session as stored. Uses within a minute of it were not written, so the
    /// session may have been used up to a minute later, but not after `latest`.
    pub(crate) fn restore_use(&mut self, id: &SessionId, at: Timestamp, latest: Timestamp) {
        let used_at = at.after(SESSION_USE_EVERY).min(latest).max(at);
        self.change(id, at, |session| {
            session.stored = Some(at);
            session.used(used_at);
        });
    }

    fn note_unsaved(&mut self, id: &SessionId) {
        if self.order.closes_idle && self.get(id).is_some_and(Session::is_unsaved) {
            self.unsaved.insert(id.clone());
        }
    }

    /// Idle sessions are closed from now on, or not any more (CLO11).
    pub(crate) fn close_idle(&mut self, wanted: bool) {
        if self.order.closes_idle == wanted {
            return;
        }
        self.order.closes_idle = wanted;
        self.unsaved.clear();
        let places: Vec<Place> = self.order.all.iter().map(|(_, place)| *place).collect();
        for place in places {
            let Some(session) = self.rows.get_mut(place) else {
                continue;
            };
            if wanted {
                if session.is_unsaved() {
                    self.unsaved.insert(session.id.clone());
                }
            } else if session.stored.take().is_some() {
                self.dropped.insert(session.id.clone());
            }
            self.order.settle(session);
        }
    }

    /// The session that is idle for longest, and since when (CLO11).
    pub(crate) fn longest_idle(&self) -> Option<(Timestamp, &SessionId)> {
        let ((since, number), ()) = self.order.idle.first()?;
        let place = self.order.all.get(number)?;
        Some((*since, &self.rows.get(*place)?.id))
    }

    /// Forgets one session that is too old, or one too many (section 9). Those that wait for their
    /// idle close are remembered for longer than that takes.
    pub(crate) fn forget_one(&mut self, now: Timestamp, idle_close: Option<Span>) -> bool {
        let Some(((since, number), ())) = self.order.forgettable.first().copied() else {
            return false;
        };
        if self.order.forgettable.len() <= SESSIONS_MAX
            && !now.reached(forgotten_at(since, idle_close))
        {
            return false;
        }
        self.forget(number);
        true
    }

    fn forget(&mut self, number: SessionNo) {
        let Some(place) = self.order.all.remove(&number) else {
            return;
        };
        let Some(id) = self.rows.get(place).map(|session| session.id.clone()) else {
            return;
        };
        self.by_id.remove(&id, place);
        self.unsaved.remove(&id);
        let Some(session) = self.rows.remove(place) else {
            return;
        };
        if let Some(since) = session.forget_key {
            self.order.forgettable.remove(&(since, number));
        }
        if let Some(since) = session.idle_key {
            self.order.idle.remove(&(since, number));
        }
        if session.stored.is_some() {
            self.dropped.insert(id);
        }
    }

    /// When the next session is forgotten by age.
    pub(crate) fn forget_at(&self, idle_close: Option<Span>) -> Option<Timestamp> {
        let ((since, _), ()) = self.order.forgettable.first()?;
        Some(forgotten_at(*since, idle_close))
    }

    /// Whether last uses are to be written or removed.
    pub(crate) fn has_unsaved(&self) -> bool {
        !self.dropped.is_empty() || !self.unsaved.is_empty()
    }

    /// Last uses that are to be written now.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(SessionId, Timestamp)> {
        let mut uses = Vec::new();
        for id in core::mem::take(&mut self.unsaved) {
            if let Some(session) = self.get_mut(&id)
                && let Some(used) = session.last_use
            {
                session.stored = Some(used);
                uses.push((id, used));
            }
        }
        uses
    }

    /// Sessions whose stored last use is to be removed. Those that were used again since may be
    /// written in the same batch: after this.
    pub(crate) fn take_dropped(&mut self) -> BTreeSet<SessionId> {
        core::mem::take(&mut self.dropped)
    }

    /// Last uses as stored, by session.
    pub(crate) fn stored(&self) -> Vec<(SessionId, Timestamp)> {
        let mut stored: Vec<(SessionId, Timestamp)> = self
            .from(SessionNo(0))
            .filter_map(|session| Some((session.id.clone(), session.stored?)))
            .collect();
        stored.sort();
        stored
    }
}

fn forgotten_at(since: Timestamp, idle_close: Option<Span>) -> Timestamp {
    idle_close
        .map_or(since, |limit| since.after(limit))
        .after(SESSIONS_FOR)
}
