//! The gate around the core as a run has it: open calls by ticket, and what the core must hear of
//! them. The service has the same in its writer, with channels in place of numbers.

use std::collections::BTreeMap;

use kvgate_core::command::{Command, Delivery};
use kvgate_core::effect::{Answer, Outcome, Watched};
use kvgate_core::ids::TicketId;

use crate::callers::Told;

/// Number of a call.
pub(crate) type CallNo = u64;

#[derive(Clone, Debug)]
enum Slot {
    Acquire {
        ticket: TicketId,
        leaving: bool,
    },
    Watch {
        tickets: Vec<TicketId>,
        decided: BTreeMap<TicketId, Option<Answer>>,
    },
}

/// All open waiting calls of one process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shell {
    slots: BTreeMap<CallNo, Slot>,
    by_ticket: BTreeMap<TicketId, Vec<CallNo>>,
    touched: Vec<CallNo>,
    /// What the core must hear in the next turn.
    pub(crate) follow_ups: Vec<Command>,
    /// Answers that are ready to be written.
    pub(crate) ready: Vec<(CallNo, Told)>,
}

/// What a delivery of this answer would be told of (TIC4).
pub(crate) fn delivery(answer: &Answer) -> Option<Delivery> {
    let lease = match &answer.outcome {
        Outcome::Admit { lease, .. } => Some(*lease),
        Outcome::Bypass(_) => None,
        Outcome::Cancelled(_) | Outcome::Wait(_) => return None,
    };
    Some(Delivery {
        ticket: answer.ticket.clone(),
        lease,
    })
}

impl Shell {
    pub(crate) fn has(&self, call: CallNo) -> bool {
        self.slots.contains_key(&call)
    }

    pub(crate) fn has_ticket(&self, ticket: &TicketId) -> bool {
        self.by_ticket.contains_key(ticket)
    }

    /// The open calls that wait for the ticket.
    pub(crate) fn calls_of(&self, ticket: &TicketId) -> impl Iterator<Item = CallNo> {
        self.by_ticket.get(ticket).into_iter().flatten().copied()
    }

    pub(crate) fn tickets(&self) -> Vec<TicketId> {
        self.by_ticket.keys().cloned().collect()
    }

    pub(crate) fn undelivered(&mut self, answer: &Answer) {
        if let Some(delivery) = delivery(answer) {
            self.follow_ups.push(Command::Undelivered(delivery));
        }
    }

    pub(crate) fn park(&mut self, call: CallNo, ticket: TicketId, open: bool) {
        if !open {
            self.follow_ups.push(Command::Gone(ticket));
            return;
        }
        self.by_ticket.entry(ticket.clone()).or_default().push(call);
        let slot = Slot::Acquire {
            ticket,
            leaving: false,
        };
        self.slots.insert(call, slot);
    }

    pub(crate) fn watch(&mut self, call: CallNo, watched: Vec<(TicketId, Watched)>, open: bool) {
        if !open {
            for (ticket, state) in watched {
                match state {
                    Watched::Waiting => self.follow_ups.push(Command::Gone(ticket)),
                    Watched::Decided(answer) => self.undelivered(&answer),
                    Watched::Unknown => {}
                }
            }
            return;
        }
        let mut tickets = Vec::new();
        let mut decided = BTreeMap::new();
        for (ticket, state) in watched {
            match state {
                Watched::Waiting => {
                    self.by_ticket.entry(ticket.clone()).or_default().push(call);
                }
                Watched::Decided(answer) => {
                    decided.insert(ticket.clone(), Some(answer));
                }
                Watched::Unknown => {
                    decided.insert(ticket.clone(), None);
                }
            }
            tickets.push(ticket);
        }
        if !decided.is_empty() {
            self.touched.push(call);
        }
        self.slots.insert(call, Slot::Watch { tickets, decided });
    }

    /// Tells every open call of the ticket; `open` says which of them still have a connection.
    pub(crate) fn decided(&mut self, answer: &Answer, open: &dyn Fn(CallNo) -> bool) {
        let mut told = false;
        for call in self.by_ticket.remove(&answer.ticket).unwrap_or_default() {
            match self.slots.get_mut(&call) {
                Some(Slot::Acquire { .. }) => {
                    self.slots.remove(&call);
                    if open(call) {
                        told = true;
                        self.ready.push((call, Told::Answer(answer.clone())));
                    }
                }
                Some(Slot::Watch { decided, .. }) => {
                    told = true;
                    decided.insert(answer.ticket.clone(), Some(answer.clone()));
                    self.touched.push(call);
                }
                None => {}
            }
        }
        if !told {
            self.undelivered(answer);
        }
    }

    pub(crate) fn end_touched(&mut self) {
        for call in std::mem::take(&mut self.touched) {
            self.end_watch(call);
        }
    }

    fn end_watch(&mut self, call: CallNo) {
        let Some(Slot::Watch { tickets, decided }) = self.slots.remove(&call) else {
            return;
        };
        for ticket in tickets {
            if !decided.contains_key(&ticket) {
                self.unlist(&ticket, call);
                self.follow_ups.push(Command::Gone(ticket));
            }
        }
        let results = decided.into_iter().collect();
        self.ready.push((call, Told::Watched(results)));
    }

    /// The call's own time is over.
    pub(crate) fn end_wait(&mut self, call: CallNo) -> Option<Command> {
        match self.slots.get_mut(&call)? {
            Slot::Acquire { ticket, leaving } => {
                *leaving = true;
                Some(Command::Leave(ticket.clone()))
            }
            Slot::Watch { .. } => {
                self.end_watch(call);
                None
            }
        }
    }

    pub(crate) fn left(&mut self, call: CallNo, answer: Option<Answer>) {
        let Some(answer) = answer else { return };
        if let Some(Slot::Acquire { ticket, .. }) = self.slots.remove(&call) {
            self.unlist(&ticket, call);
            self.ready.push((call, Told::Answer(answer)));
        }
    }

    /// The caller went away.
    pub(crate) fn gone(&mut self, call: CallNo) -> Vec<Command> {
        match self.slots.remove(&call) {
            Some(Slot::Acquire { ticket, leaving }) => {
                self.unlist(&ticket, call);
                if leaving {
                    Vec::new()
                } else {
                    vec![Command::Gone(ticket)]
                }
            }
            Some(Slot::Watch { tickets, decided }) => {
                let mut left = Vec::new();
                for ticket in tickets {
                    if !decided.contains_key(&ticket) {
                        self.unlist(&ticket, call);
                        left.push(Command::Gone(ticket));
                    }
                }
                left
            }
            None => Vec::new(),
        }
    }

    /// Ends a call without an answer of the core.
    pub(crate) fn refuse(&mut self, call: CallNo) {
        match self.slots.remove(&call) {
            Some(Slot::Acquire { ticket, .. }) => self.unlist(&ticket, call),
            Some(Slot::Watch { tickets, .. }) => {
                for ticket in tickets {
                    self.unlist(&ticket, call);
                }
            }
            None => return,
        }
        self.ready.push((call, Told::Unavailable));
    }

    pub(crate) fn refuse_all(&mut self) {
        let calls: Vec<CallNo> = self.slots.keys().copied().collect();
        for call in calls {
            self.refuse(call);
        }
        self.touched.clear();
    }

    /// How a reloaded core stands to a ticket that calls wait for.
    pub(crate) fn reloaded(
        &mut self,
        ticket: TicketId,
        state: &Watched,
        open: &dyn Fn(CallNo) -> bool,
    ) {
        match state {
            Watched::Waiting => {
                let more = self.by_ticket.get(&ticket).map_or(0, Vec::len);
                for _ in 1..more {
                    self.follow_ups.push(Command::Watch(vec![ticket.clone()]));
                }
            }
            Watched::Decided(answer) => self.decided(answer, open),
            Watched::Unknown => {
                for call in self.by_ticket.get(&ticket).cloned().unwrap_or_default() {
                    self.refuse(call);
                }
            }
        }
    }

    fn unlist(&mut self, ticket: &TicketId, call: CallNo) {
        if let Some(calls) = self.by_ticket.get_mut(ticket) {
            calls.retain(|other| *other != call);
            if calls.is_empty() {
                self.by_ticket.remove(ticket);
            }
        }
    }
}
