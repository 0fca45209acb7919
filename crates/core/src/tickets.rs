//! The book of tickets: every row once, found by its number and by the caller's id.

use crate::arena::{Arena, Index, Place};
use crate::ids::{RowNo, TicketId};
use crate::ticket::Ticket;

/// All tickets that are remembered.
#[derive(Clone, Debug)]
pub(crate) struct Tickets {
    rows: Arena<Ticket>,
    by_row: Index<Ticket, RowNo>,
    by_id: Index<Ticket, TicketId>,
}

impl Tickets {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rows: Arena::default(),
            by_row: Index::new(seed, |ticket| &ticket.row),
            by_id: Index::new(seed, |ticket| &ticket.id),
        }
    }

    pub(crate) fn get(&self, row: RowNo) -> Option<&Ticket> {
        self.at(self.place(row)?)
    }

    /// The newest row of a ticket.
    pub(crate) fn find(&self, id: &TicketId) -> Option<&Ticket> {
        self.rows.get(self.by_id.find(&self.rows, id)?)
    }

    /// Where a row stands.
    pub(crate) fn place(&self, row: RowNo) -> Option<Place> {
        self.by_row.find(&self.rows, &row)
    }

    pub(crate) fn at(&self, place: Place) -> Option<&Ticket> {
        self.rows.get(place)
    }

    /// A new row.
    pub(crate) fn insert(&mut self, ticket: Ticket) -> Place {
        let place = self.rows.insert(ticket);
        self.by_row.put(&self.rows, place);
        self.by_id.put(&self.rows, place);
        place
    }

    /// Turns a row over, which keeps its number and its id for life; gives back what it was.
    pub(crate) fn replace(&mut self, place: Place, ticket: Ticket) -> Option<Ticket> {
        let row = self.rows.get_mut(place)?;
        Some(core::mem::replace(row, ticket))
    }

    /// Forgets a row. A newer life of the ticket stays.
    pub(crate) fn remove(&mut self, row: RowNo) -> Option<Ticket> {
        let place = self.by_row.find(&self.rows, &row)?;
        let ticket = self.rows.remove(place)?;
        self.by_row.remove(&row, place);
        self.by_id.remove(&ticket.id, place);
        Some(ticket)
    }

    /// All of them, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Ticket> {
        self.rows.iter()
    }
}
