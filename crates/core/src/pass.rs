//! What a turn does by itself: expiries, the queue pass, forgetting, and the seal.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use crate::batch::Batch;
use crate::decide::{Decision, Request};
use crate::decision::{BypassReason, EndHow};
use crate::decisions::Decided;
use crate::effect::{Answer, Effect, Reply};
use crate::event::QueueEnd;
use crate::ids::{RowNo, Seq, TicketId};
use crate::machine::is_remembered_in_memory_only;
use crate::policy::{DECISIONS_PER_TURN, NOTICE_FOR, TALLY_EVERY};
use crate::presence::Presence;
use crate::record::Record;
use crate::tally::CancelledHow;
use crate::ticket::{Ended, Stage, Ticket};
use crate::turn::{LeavingKind, Turn};
use crate::view::Notice;

impl Turn {
    pub(crate) fn remeasure(&mut self) {
        let judged_at = self.machine.judged_at();
        let machine = &mut *self.machine;
        machine.fleet.remeasure(judged_at, &machine.policy);
    }

    pub(crate) fn remeasure_when_due(&mut self) {
        let judged_at = self.machine.judged_at();
        let due = self.machine.fleet.valid_until();
        if due.is_some_and(|due| judged_at.reached(due)) {
            self.remeasure();
        }
    }

    /// DEC3: expiries, then the queue, within the bound of one turn.
    pub(crate) fn expire_and_pass(&mut self) {
        self.machine.more_due = false;
        let mut left = DECISIONS_PER_TURN;
        self.expire_leases(&mut left);
        self.drop_the_away(&mut left);
        if self.machine.hold.is_none_or(|hold| !hold.starting) {
            self.pass_queue(&mut left);
            self.age_out(&mut left);
        }
        self.pass_closes(&mut left);
        self.machine.more_due = left == 0;
    }

    /// LEA1: never before its end.
    fn expire_leases(&mut self, left: &mut usize) {
        let judged_at = self.machine.judged_at();
        while let Some((end, issue)) = self.machine.state.ledger.first_end() {
            if *left == 0 || !judged_at.reached(end) {
                return;
            }
            *left = left.saturating_sub(1);
            let row = self.machine.state.ledger.row(issue);
            let Some(ticket) = row.and_then(|row| self.machine.state.row(row)).cloned() else {
                return;
            };
            self.next_seq();
            self.end_lease(ticket, EndHow::Expired);
        }
    }

    /// TIC3, TIC4: waiters whose caller stayed away, and grants that nobody claimed.
    fn drop_the_away(&mut self, left: &mut usize) {
        let judged_at = self.machine.judged_at();
        while let Some((deadline, row)) = self.machine.presences.first_deadline() {
            if *left == 0 || !judged_at.reached(deadline) {
                return;
            }
            *left = left.saturating_sub(1);
            let Some(ticket) = self.machine.state.row(row).cloned() else {
                self.machine.presences.clear(row);
                continue;
            };
            let seq = self.next_seq();
            match &ticket.stage {
                Stage::Waiting { .. } => {
                    self.withdraw(ticket, EndHow::Dropped, CancelledHow::Dropped, seq);
                }
                Stage::Held(_) => self.end_lease(ticket, EndHow::TakenBack),
                Stage::Ended(_) => {
                    self.machine.presences.clear(row);
                }
            }
        }
    }

    /// DEC2: the head only, until it stays.
    fn pass_queue(&mut self, left: &mut usize) {
        while *left > 0 {
            let Some(head) = self.machine.state.queue.head() else {
                return;
            };
            let Some(request) = self.request(head) else {
                return;
            };
            let judged_at = self.machine.judged_at();
            let decision = self
                .machine
                .situation(request.reservation)
                .decide_head(request, judged_at);
            match decision {
                Decision::Wait(_) => return,
                Decision::Admit => self.admit_waiter(head),
                Decision::Bypass(reason) => self.bypass_waiter(head, reason),
            }
            *left = left.saturating_sub(1);
        }
    }

    /// A ticket that came back to the tail keeps its clock (TIC3), so its time can be over before
    /// that of those who stand before it. It leaves then; nothing is overtaken by that.
    fn age_out(&mut self, left: &mut usize) {
        let judged_at = self.machine.judged_at();
        while let Some(((since, row), ())) = self.machine.state.clocks.first().copied() {
            if *left == 0 || !judged_at.reached(since.after(self.machine.policy.max_wait)) {
                return;
            }
            let reason = self.request(row).and_then(|request| {
                self.machine
                    .situation(request.reservation)
                    .leaves(request, judged_at)
            });
            self.bypass_waiter(row, reason.unwrap_or(BypassReason::Aged));
            *left = left.saturating_sub(1);
        }
    }

    fn request(&self, row: RowNo) -> Option<Request> {
        let ticket = self.machine.state.row(row)?;
        let Stage::Waiting { since } = ticket.stage else {
            return None;
        };
        let terms = &ticket.asked.as_ref()?.terms;
        Some(Request {
            reservation: terms.reservation,
            scope: terms.scope,
            protected: false,
            since: Some(since),
        })
    }

    fn admit_waiter(&mut self, row: RowNo) {
        let Some(ticket) = self.machine.state.row(row).cloned() else {
            return;
        };
        let Stage::Waiting { since } = ticket.stage else {
            return;
        };
        let seq = self.next_seq();
        let moment = self.machine.moment();
        self.note_decision(&ticket, self.now.since(since), Decided::Admit, moment);
        let granted = self.grant(ticket, Some(since));
        // A grant in a gap keeps the time at which its caller has been away too long.
        let presence = match self.machine.presences.get(row) {
            Some(Presence::Away(until)) => Presence::Unclaimed(until),
            Some(
                Presence::Calls(_) | Presence::InFlight | Presence::Unclaimed(_) | Presence::Untold,
            )
            | None => Presence::InFlight,
        };
        self.machine.presences.set(row, presence);
        let answer = self.machine.first_answer(&granted);
        self.effects.push(Effect::Decided { seq, answer });
    }

    fn bypass_waiter(&mut self, row: RowNo, reason: BypassReason) {
        let Some(ticket) = self.machine.state.row(row).cloned() else {
            return;
        };
        let Stage::Waiting { since } = ticket.stage else {
            return;
        };
        let seq = self.next_seq();
        if let Some(asked) = &ticket.asked {
            self.machine.state.tally.bypass(asked.terms.scope, reason);
        }
        let moment = self.machine.moment();
        let waited = self.now.since(since);
        self.left_queue(QueueEnd::Bypass, Some(waited));
        self.note_decision(&ticket, waited, Decided::Bypass(reason), moment);
        let presence = match self.machine.presences.get(row) {
            Some(Presence::Calls(_)) => Presence::InFlight,
            Some(
                Presence::Away(_) | Presence::InFlight | Presence::Unclaimed(_) | Presence::Untold,
            )
            | None => Presence::Untold,
        };
        self.machine.presences.set(row, presence);
        let bypassed = Ticket {
            stage: Stage::Ended(Ended {
                at: self.now,
                how: EndHow::Bypassed(reason),
                lease: None,
                since: Some(since),
                waited,
                epoch: self.machine.state.epoch,
            }),
            ..ticket
        };
        let answer = self.machine.first_answer(&bypassed);
        self.turn_over(bypassed);
        self.effects.push(Effect::Decided { seq, answer });
    }

    /// TIC2: a call that ends with the turn is told where its ticket stands; its caller is away from
    /// now on. When the turn decided the ticket, it is told that, with the number of the decision.
    pub(crate) fn answer_leaving(&mut self) {
        let leaving = core::mem::take(&mut self.leaving);
        if leaving.is_empty() {
            return;
        }
        let grace = self.machine.policy.claim_grace;
        let decided: BTreeMap<TicketId, (Seq, Answer)> = self
            .effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Decided { seq, answer } => {
                    Some((answer.ticket.clone(), (*seq, answer.clone())))
                }
                Effect::Reply { .. }
                | Effect::Parked { .. }
                | Effect::Call(_)
                | Effect::CloseDone(_) => None,
            })
            .collect();
        for leaving in leaving {
            let Some(ticket) = self.machine.state.row(leaving.row).cloned() else {
                continue;
            };
            let waits = matches!(ticket.stage, Stage::Waiting { .. });
            if waits {
                self.machine.presences.leave(ticket.row, self.now, grace);
            }
            let (seq, mut answer) = decided.get(&ticket.id).map_or_else(
                || (leaving.seq, self.machine.first_answer(&ticket)),
                |(seq, answer)| (Some(*seq), answer.clone()),
            );
            answer.session_reopened = leaving.session_reopened;
            let reply = match leaving.kind {
                LeavingKind::Acquire => Reply::Acquire(Ok(answer)),
                LeavingKind::Leave => Reply::Left(waits.then_some(answer)),
            };
            self.reply(leaving.tag, seq, reply);
        }
    }

    /// Section 9: ended tickets are remembered for a while. Their rows go with a later batch.
    pub(crate) fn forget_finished(&mut self) {
        let judged_at = self.machine.judged_at();
        for _ in 0..DECISIONS_PER_TURN {
            let Some(row) = self.machine.state.too_old(judged_at) else {
                break;
            };
            self.forget(row);
        }
        // No more than this turn has ended.
        while let Some(row) = self.machine.state.one_too_many() {
            self.forget(row);
        }
        let now = self.now;
        self.machine.notices.retain(|notice| match notice {
            Notice::LargerThanAnyPool { last, .. } => !now.reached(last.after(NOTICE_FOR)),
            Notice::UnknownLabel { .. }
            | Notice::SessionReopened { .. }
            | Notice::CallRefused { .. } => true,
        });
    }

    fn forget(&mut self, row: RowNo) {
        let kept = self
            .machine
            .state
            .row(row)
            .is_some_and(|ticket| !is_remembered_in_memory_only(ticket));
        self.machine.presences.clear(row);
        self.machine.state.remove(row);
        if kept {
            self.machine.forgotten.push(row);
        }
    }

    /// Adds what rides along: renewals, forgotten rows, counters. Alone they cause a commit only
    /// when they have waited long enough.
    pub(crate) fn seal(mut self, last: bool) -> Batch {
        let machine = &mut *self.machine;
        let tally = machine.tally_to_store();
        let tally_dirty = tally != machine.stored_tally || machine.has_riders();
        let tally_due =
            tally_dirty && (last || self.now.reached(machine.tally_stored_at.after(TALLY_EVERY)));
        for row in machine.renewals.take(self.now, last) {
            let renewed = machine.state.row(row).cloned();
            self.records.extend(renewed.map(Record::Ticket));
        }
        if !self.records.is_empty() || tally_due {
            let forgotten = core::mem::take(&mut machine.forgotten);
            self.records
                .extend(forgotten.into_iter().map(Record::Forgotten));
            let forgotten = core::mem::take(&mut machine.forgotten_closes);
            self.records
                .extend(forgotten.into_iter().map(Record::CloseForgotten));
            let dropped = machine.state.sessions.take_dropped().into_iter();
            self.records.extend(dropped.map(Record::SessionForgotten));
            let uses = machine.state.sessions.take_unsaved().into_iter();
            self.records
                .extend(uses.map(|(session, used)| Record::SessionUsed(session, used)));
            self.record_raised_windows();
            let machine = &mut *self.machine;
            if tally != machine.stored_tally {
                machine.stored_tally = tally.clone();
                self.records.push(Record::Tally(Box::new(tally)));
            }
            machine.tally_stored_at = self.now;
        }
        Batch {
            machine: self.machine,
            records: self.records,
            effects: self.effects,
            events: self.events,
            claimed: self.claimed,
        }
    }
}
