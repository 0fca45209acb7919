//! Reads: bounded, without side effects, and in the same words as the answers to acquires.

use alloc::vec::Vec;

use crate::close::CloseIntent;
use crate::command::{SLICE_MAX, Slice};
use crate::decision::{CancelReason, EndHow};
use crate::decisions::{DecisionEntry, DecisionsWanted, Moment};
use crate::effect::{
    Answer, LeaseGone, LeaseView, Outcome, Page, SessionView, TicketView, WaitStatus, WaiterView,
};
use crate::ids::{CloseNo, Issue, LeaseId, RowNo, SessionId, SessionNo, TicketId};
use crate::machine::Machine;
use crate::presence::Presence;
use crate::sessions::Session;
use crate::ticket::{Stage, Terms, Ticket};
use crate::units::{Span, Timestamp, Tokens};

impl Machine {
    /// What an acquire of a known ticket is told (TIC1). For one that would be decided afresh,
    /// and for a cancelled one, that it is finished.
    pub(crate) fn answer(&self, ticket: &Ticket) -> Answer {
        let asked = ticket.asked.as_ref();
        let reservation = asked.map_or(Tokens::ZERO, |asked| asked.terms.reservation);
        let undelivered = self
            .presences
            .get(ticket.row)
            .is_some_and(|presence| matches!(presence, Presence::Unclaimed(_) | Presence::Untold));
        let (epoch, waited, repeated, outcome) = match &ticket.stage {
            Stage::Waiting { since } => (
                self.state.epoch,
                self.last_turn.since(*since),
                true,
                Outcome::Wait(self.wait_status(ticket.row, reservation, *since)),
            ),
            Stage::Held(lease) => (
                lease.epoch,
                lease.waited.unwrap_or(Span::ZERO),
                !undelivered,
                Outcome::Admit {
                    lease: lease.id,
                    ttl: lease.ttl,
                    ends_at: lease.ends_at,
                },
            ),
            Stage::Ended(ended) => {
                let outcome = match ended.how {
                    EndHow::Bypassed(reason) => Outcome::Bypass(reason),
                    EndHow::SessionClosed => Outcome::Cancelled(CancelReason::SessionClosed),
                    EndHow::Released
                    | EndHow::Cancelled
                    | EndHow::Expired
                    | EndHow::Revoked
                    | EndHow::Dropped
                    | EndHow::TakenBack => Outcome::Cancelled(CancelReason::TicketFinished),
                };
                (ended.epoch, ended.waited, !undelivered, outcome)
            }
        };
        Answer {
            ticket: ticket.id.clone(),
            session: asked.map(|asked| asked.session.clone()),
            reservation,
            epoch,
            waited,
            repeated,
            session_reopened: false,
            outcome,
        }
    }

    /// The same, to the caller whose call brought the decision about.
    pub(crate) fn first_answer(&self, ticket: &Ticket) -> Answer {
        Answer {
            repeated: false,
            ..self.answer(ticket)
        }
    }

    fn wait_status(&self, row: RowNo, reservation: Tokens, since: Timestamp) -> WaitStatus {
        let (ahead, tokens_ahead) = self.state.queue.ahead(row).unwrap_or((0, 0));
        let position = ahead.saturating_add(1);
        let needed = u128::from(self.state.ledger.reserved().get())
            .saturating_add(tokens_ahead)
            .saturating_add(u128::from(reservation.get()));
        let ceiling = u128::from(self.fleet.measure().ceiling.get());
        let bypass_at = since.after(self.policy.max_wait);
        WaitStatus {
            reason: self.wait_reason(reservation, position),
            position,
            tokens_ahead: Tokens::clamped(tokens_ahead),
            short: Tokens::clamped(needed.saturating_sub(ceiling)),
            age: self.last_turn.since(since),
            bypass_in: bypass_at.since(self.last_turn),
        }
    }

    pub(crate) fn unknown_lease(&self, id: LeaseId) -> LeaseGone {
        if self.state.was_issued(id) {
            LeaseGone::Expired
        } else {
            LeaseGone::NotFound
        }
    }

    /// The ticket that holds this lease now.
    pub(crate) fn held(&self, id: LeaseId) -> Result<&Ticket, LeaseGone> {
        let ticket = self.state.lease(id).ok_or_else(|| self.unknown_lease(id))?;
        match &ticket.stage {
            Stage::Held(_) => Ok(ticket),
            Stage::Waiting { .. } => Err(LeaseGone::NotFound),
            Stage::Ended(ended) => Err(match ended.how {
                EndHow::Released | EndHow::Cancelled => LeaseGone::Released,
                EndHow::Bypassed(_)
                | EndHow::SessionClosed
                | EndHow::Expired
                | EndHow::Revoked
                | EndHow::Dropped
                | EndHow::TakenBack => LeaseGone::Expired,
            }),
        }
    }

    pub(crate) fn read_lease(&self, id: LeaseId) -> Result<LeaseView, LeaseGone> {
        let ticket = self.held(id)?;
        lease_view(ticket).ok_or(LeaseGone::NotFound)
    }

    /// A released or cancelled ticket is shown as an acquire would answer it; one that would be
    /// decided afresh as ended (TIC5).
    pub(crate) fn read_ticket(&self, id: &TicketId) -> Option<TicketView> {
        let ticket = self.state.ticket(id)?;
        Some(match &ticket.stage {
            Stage::Ended(ended) if ended.how.decided_afresh() => TicketView::Ended(ended.how),
            Stage::Waiting { .. } | Stage::Held(_) | Stage::Ended(_) => {
                TicketView::Answer(self.answer(ticket))
            }
        })
    }

    pub(crate) fn list_leases(&self, slice: Slice<Issue>) -> Page<LeaseView> {
        let rows = slice.rows.min(SLICE_MAX);
        let mut looked_at = self.state.ledger.from(slice.from);
        let items = looked_at
            .by_ref()
            .take(rows)
            .filter_map(|(_, row)| lease_view(self.state.row(row)?))
            .collect();
        Page::new(items, looked_at.next().is_some(), self.state.ledger.len())
    }

    pub(crate) fn list_queue(&self, slice: Slice<RowNo>) -> Page<WaiterView> {
        let rows = slice.rows.min(SLICE_MAX);
        let mut looked_at = self.state.queue.from(slice.from);
        let items: Vec<WaiterView> = looked_at
            .by_ref()
            .take(rows)
            .filter_map(|row| self.waiter_view(row))
            .collect();
        Page::new(items, looked_at.next().is_some(), self.state.queue.len())
    }

    pub(crate) fn read_session(&self, id: &SessionId) -> Option<SessionView> {
        let session = self.state.sessions.get(id)?;
        Some(self.session_view(session))
    }

    fn session_view(&self, session: &Session) -> SessionView {
        let leases = session.held.iter().take(SLICE_MAX);
        let waiting = session.waiting.iter().take(SLICE_MAX);
        let closes = session.closes.iter().rev().take(SLICE_MAX);
        SessionView {
            number: session.number,
            id: session.id.clone(),
            last_use: session.last_use,
            leases: leases
                .filter_map(|row| lease_view(self.state.row(row)?))
                .collect(),
            waiting: waiting.filter_map(|row| self.waiter_view(row)).collect(),
            closes: closes
                .filter_map(|close| self.state.closes.get(close).cloned())
                .collect(),
        }
    }

    /// Sessions with what belongs to them: a page ends early when that is much.
    pub(crate) fn list_sessions(&self, slice: Slice<SessionNo>) -> Page<SessionView> {
        let mut looked_at = self.state.sessions.from(slice.from).peekable();
        let mut items: Vec<SessionView> = Vec::new();
        let mut rows: usize = 0;
        while items.len() < slice.rows.min(SLICE_MAX)
            && rows < SLICE_MAX
            && let Some(session) = looked_at.next()
        {
            let view = self.session_view(session);
            for more in [view.leases.len(), view.waiting.len(), view.closes.len()] {
                rows = rows.saturating_add(more);
            }
            items.push(view);
        }
        Page::new(items, looked_at.peek().is_some(), self.state.sessions.len())
    }

    /// The figures that a decision of this moment is made from.
    pub(crate) fn moment(&self) -> Moment {
        let measure = self.fleet.measure();
        Moment {
            reserved: self.state.ledger.reserved(),
            ceiling: measure.ceiling,
            full_ceiling: measure.full_ceiling,
            waiting: self.state.queue.len(),
            pressure: measure.pressure.as_ref().map(|(worst, _)| *worst),
            threshold: self.policy.pressure_threshold,
            paced: self.fleet.paced(),
            epoch: self.state.epoch,
        }
    }

    pub(crate) fn list_decisions(&self, wanted: &DecisionsWanted) -> Page<DecisionEntry> {
        let (items, more) = self.decisions.read(wanted);
        Page::new(items, more, self.decisions.len())
    }

    pub(crate) fn list_closes(&self, slice: Slice<CloseNo>) -> Page<CloseIntent> {
        let mut looked_at = self.state.closes.newest_from(slice.from);
        let items = looked_at
            .by_ref()
            .take(slice.rows.min(SLICE_MAX))
            .cloned()
            .collect();
        Page::new(items, looked_at.next().is_some(), self.state.closes.len())
    }

    fn waiter_view(&self, row: RowNo) -> Option<WaiterView> {
        let ticket = self.state.row(row)?;
        let Stage::Waiting { since } = ticket.stage else {
            return None;
        };
        let asked = ticket.asked.as_ref()?;
        Some(WaiterView {
            ticket: ticket.id.clone(),
            session: asked.session.clone(),
            terms: asked.terms.clone(),
            status: self.wait_status(row, asked.terms.reservation, since),
            row,
        })
    }
}

fn lease_view(ticket: &Ticket) -> Option<LeaseView> {
    let Stage::Held(lease) = &ticket.stage else {
        return None;
    };
    let asked = ticket.asked.as_ref()?;
    Some(LeaseView {
        ticket: ticket.id.clone(),
        session: asked.session.clone(),
        terms: Terms {
            ttl: lease.ttl,
            ..asked.terms.clone()
        },
        lease: lease.clone(),
    })
}
