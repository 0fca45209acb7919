//! Open calls by ticket: who is told when a ticket is decided.

use std::collections::{BTreeMap, HashMap};

use kvgate_core::command::{Command, Delivery};
use kvgate_core::effect::{Answer, Reply, Watched};
use kvgate_core::ids::{Seq, TicketId};

use tokio::sync::oneshot;

use super::{GateError, Replied, Sender, Taken, Watch, delivery};

/// Number of an open waiting call.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotId(pub(super) u64);

pub(super) type AcquireSender = Sender<Taken>;

#[derive(Debug)]
enum Slot {
    Acquire {
        ticket: TicketId,
        /// Number of the enqueue, for the answer that still says wait.
        seq: Option<Seq>,
        /// Its acquire used a closed session anew: its answer says so, whatever it is (CLO8).
        session_reopened: bool,
        reply: AcquireSender,
        /// The core was told in this turn that the call ends.
        leaving: bool,
    },
    Watch {
        tickets: Vec<TicketId>,
        decided: BTreeMap<TicketId, Option<Answer>>,
        reply: Sender<Watch>,
    },
}

/// The answer to a call that was held open.
const fn parked(seq: Option<Seq>, answer: Answer) -> Taken {
    Taken {
        seq,
        answer: Ok(answer),
        held_open: true,
    }
}

/// All open waiting calls. A part of the writer.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    slots: BTreeMap<SlotId, Slot>,
    by_ticket: HashMap<TicketId, Vec<SlotId>>,
    /// Watches that a decision of this turn touched: answered when the turn is told whole.
    touched: Vec<SlotId>,
    /// What the core must hear in the next turn.
    follow_ups: Vec<Command>,
}

impl Waiters {
    pub(super) fn take_follow_ups(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.follow_ups)
    }

    /// Something else that the core must hear.
    pub(super) fn follow_up(&mut self, command: Command) {
        self.follow_ups.push(command);
    }

    pub(super) fn has_follow_ups(&self) -> bool {
        !self.follow_ups.is_empty()
    }

    /// An acquire that waits. Its caller may be gone before it could be parked.
    pub(super) fn park(
        &mut self,
        id: SlotId,
        ticket: TicketId,
        seq: Option<Seq>,
        session_reopened: bool,
        reply: AcquireSender,
    ) {
        if reply.is_closed() {
            self.follow_ups.push(Command::Gone(ticket));
            return;
        }
        self.will_tell(&ticket, id);
        let slot = Slot::Acquire {
            ticket,
            seq,
            session_reopened,
            reply,
            leaving: false,
        };
        self.slots.insert(id, slot);
    }

    /// Nearly every ticket has one call, whose list is no longer than it must be.
    fn will_tell(&mut self, ticket: &TicketId, call: SlotId) {
        match self.by_ticket.get_mut(ticket) {
            Some(calls) => calls.push(call),
            None => drop(self.by_ticket.insert(ticket.clone(), vec![call])),
        }
    }

    /// A watch: answered at once when something is decided or unknown already.
    pub(super) fn watch(
        &mut self,
        id: SlotId,
        watched: Vec<(TicketId, Watched)>,
        reply: Sender<Watch>,
    ) {
        if reply.is_closed() {
            return self.watch_of_nobody(watched);
        }
        let mut tickets = Vec::with_capacity(watched.len());
        let mut decided = BTreeMap::new();
        for (ticket, state) in watched {
            match state {
                Watched::Waiting => self.will_tell(&ticket, id),
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
            self.touched.push(id);
        }
        let slot = Slot::Watch {
            tickets,
            decided,
            reply,
        };
        self.slots.insert(id, slot);
    }

    /// A watch whose caller was gone before it could be parked.
    fn watch_of_nobody(&mut self, watched: Vec<(TicketId, Watched)>) {
        for (ticket, state) in watched {
            match state {
                Watched::Waiting => self.follow_ups.push(Command::Gone(ticket)),
                Watched::Decided(answer) => self.undelivered(&answer),
                Watched::Unknown => {}
            }
        }
    }

    /// Tells every call that waits for this ticket. The core may have taken a caller for present
    /// that went away in this very turn; so a decision that nobody was told is undelivered, whether
    /// or not a call was open.
    pub(super) fn decided(&mut self, seq: Option<Seq>, answer: &Answer) {
        let mut told = false;
        for id in self.by_ticket.remove(&answer.ticket).unwrap_or_default() {
            match self.slots.remove(&id) {
                Some(Slot::Acquire {
                    session_reopened,
                    reply,
                    ..
                }) => {
                    let answer = Answer {
                        session_reopened,
                        ..answer.clone()
                    };
                    told |= reply.send(Ok(parked(seq, answer))).is_ok();
                }
                Some(Slot::Watch {
                    tickets,
                    mut decided,
                    reply,
                }) => {
                    told = true;
                    decided.insert(answer.ticket.clone(), Some(answer.clone()));
                    let slot = Slot::Watch {
                        tickets,
                        decided,
                        reply,
                    };
                    self.slots.insert(id, slot);
                    self.touched.push(id);
                }
                None => {}
            }
        }
        if !told {
            self.undelivered(answer);
        }
    }

    /// After all decisions of a turn: watches that were touched end with all that is decided.
    pub(super) fn end_touched_watches(&mut self) {
        for id in std::mem::take(&mut self.touched) {
            self.end_watch(id);
        }
    }

    /// Whether the call is open and parked.
    pub(super) fn has(&self, id: SlotId) -> bool {
        self.slots.contains_key(&id)
    }

    /// The call's own time is over. For an acquire the core is asked where it stands.
    pub(super) fn end_wait(&mut self, id: SlotId) -> Option<Command> {
        match self.slots.get_mut(&id)? {
            Slot::Acquire {
                ticket, leaving, ..
            } => {
                *leaving = true;
                Some(Command::Leave(ticket.clone()))
            }
            Slot::Watch { .. } => {
                self.end_watch(id);
                None
            }
        }
    }

    /// Answers an acquire that still waits; one that was decided meanwhile has its answer.
    pub(super) fn left(&mut self, id: SlotId, answer: Option<Answer>) {
        let Some(answer) = answer else { return };
        if let Some(Slot::Acquire {
            ticket,
            seq,
            session_reopened,
            reply,
            ..
        }) = self.slots.remove(&id)
        {
            let answer = Answer {
                session_reopened,
                ..answer
            };
            self.unlist(&ticket, id);
            // A caller that is gone has left the ticket to the claim grace already.
            let _ = reply.send(Ok(parked(seq, answer)));
        }
    }

    /// The caller went away: what the core must hear in this turn, before its queue moves.
    pub(super) fn gone(&mut self, id: SlotId) -> Vec<Command> {
        match self.slots.remove(&id) {
            Some(Slot::Acquire {
                ticket, leaving, ..
            }) => {
                self.unlist(&ticket, id);
                // A call that ends in this turn leaves but once.
                (!leaving)
                    .then_some(Command::Gone(ticket))
                    .into_iter()
                    .collect()
            }
            Some(Slot::Watch {
                tickets, decided, ..
            }) => self.left_waiting(id, tickets, &decided),
            None => Vec::new(),
        }
    }

    /// Answers every open call with an error; places stay on disk.
    pub(super) fn refuse_all(&mut self, error: GateError) {
        for slot in std::mem::take(&mut self.slots).into_values() {
            match slot {
                Slot::Acquire { reply, .. } => drop(reply.send(Err(error))),
                Slot::Watch { reply, .. } => drop(reply.send(Err(error))),
            }
        }
        self.by_ticket.clear();
        self.touched.clear();
    }

    /// Ends one call with an error.
    pub(super) fn refuse(&mut self, id: SlotId, error: GateError) {
        match self.slots.remove(&id) {
            Some(Slot::Acquire { ticket, reply, .. }) => {
                self.unlist(&ticket, id);
                drop(reply.send(Err(error)));
            }
            Some(Slot::Watch { tickets, reply, .. }) => {
                for ticket in tickets {
                    self.unlist(&ticket, id);
                }
                drop(reply.send(Err(error)));
            }
            None => {}
        }
    }

    /// Ends every call that waits for a ticket with an error.
    pub(super) fn refuse_ticket(&mut self, ticket: &TicketId, error: GateError) {
        for id in self.by_ticket.get(ticket).cloned().unwrap_or_default() {
            self.refuse(id, error);
        }
    }

    /// Tickets that open calls wait for: what a reloaded core must be told of.
    pub(super) fn tickets(&self) -> Vec<TicketId> {
        let mut tickets: Vec<TicketId> = self.by_ticket.keys().cloned().collect();
        tickets.sort_unstable();
        tickets
    }

    /// How a reloaded core stands to a ticket that calls wait for.
    pub(super) fn reloaded(&mut self, ticket: TicketId, state: Watched) {
        match state {
            Watched::Waiting => {
                // One call is counted by the question itself; the others are added.
                let more = self.by_ticket.get(&ticket).map_or(0, Vec::len);
                for _ in 1..more {
                    self.follow_ups.push(Command::Watch(vec![ticket.clone()]));
                }
            }
            Watched::Decided(answer) => self.decided(None, &answer),
            Watched::Unknown => self.refuse_ticket(&ticket, GateError::StoreUnavailable),
        }
    }

    /// Answers the commands of one caller together.
    pub(super) fn answer_group(
        &mut self,
        reply: oneshot::Sender<Vec<Replied>>,
        replies: Vec<Option<Replied>>,
    ) {
        let replies = replies
            .into_iter()
            .map(|reply| reply.unwrap_or(Ok((None, Reply::Done))))
            .collect();
        for unread in reply.send(replies).err().unwrap_or_default() {
            self.unread(unread);
        }
    }

    /// The caller of a command was gone before its answer.
    pub(super) fn unread(&mut self, reply: Replied) {
        if let Ok((_, Reply::Acquire(Ok(answer)))) = reply {
            self.undelivered(&answer);
        }
    }

    fn end_watch(&mut self, id: SlotId) {
        let Some(Slot::Watch {
            tickets,
            decided,
            reply,
        }) = self.slots.remove(&id)
        else {
            return;
        };
        let results: Watch = tickets
            .iter()
            .filter_map(|ticket| {
                let answer = decided.get(ticket)?;
                Some((ticket.clone(), answer.clone()))
            })
            .collect();
        let left = self.left_waiting(id, tickets, &decided);
        self.follow_ups.extend(left);
        if reply.send(Ok(results)).is_err() {
            for answer in decided.into_values().flatten() {
                self.undelivered(&answer);
            }
        }
    }

    /// Takes a watch off the tickets that still wait, and says so for each of them.
    fn left_waiting(
        &mut self,
        id: SlotId,
        tickets: Vec<TicketId>,
        decided: &BTreeMap<TicketId, Option<Answer>>,
    ) -> Vec<Command> {
        let mut left = Vec::new();
        for ticket in tickets {
            if !decided.contains_key(&ticket) {
                self.unlist(&ticket, id);
                left.push(Command::Gone(ticket));
            }
        }
        left
    }

    /// The answer reached nobody.
    pub(super) fn undelivered(&mut self, answer: &Answer) {
        if let Some(delivery) = delivery(answer) {
            let Delivery { ticket, lease } = delivery;
            self.follow_ups
                .push(Command::Undelivered(Delivery { ticket, lease }));
        }
    }

    fn unlist(&mut self, ticket: &TicketId, id: SlotId) {
        if let Some(ids) = self.by_ticket.get_mut(ticket) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_ticket.remove(ticket);
            }
        }
    }
}
