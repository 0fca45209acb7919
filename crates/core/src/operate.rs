//! What operators do (SET2, SET3): settings, and the commands that leave an entry in the audit.
//!
//! An operation is handled and answered as the plain command is. When it changed something, an entry
//! is kept in the same turn; what was refused or changed nothing leaves none.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::audit::{AuditAct, AuditEntry};
use crate::close::TargetState;
use crate::command::{Act, CloseRequest, Operation, SLICE_MAX, Slice};
use crate::decision::EndHow;
use crate::effect::{CloseReply, LeaseGone, Page, Reply, Tag};
use crate::event::Event;
use crate::ids::{AuditNo, CloseId, Label, LeaseId, Seq, SessionId, TicketId};
use crate::machine::Machine;
use crate::policy::PolicyError;
use crate::record::Record;
use crate::settings::{Overrides, Settings, SettingsChange};
use crate::ticket::Ticket;
use crate::turn::Turn;
use crate::units::Tokens;

/// Who a start acts as.
const OF_THE_START: &str = "kvgate";

impl Turn {
    pub(crate) fn operate(&mut self, tag: Tag, operation: Operation) {
        let Operation { who, act } = operation;
        let (seq, reply) = match act {
            Act::Configure(change) => {
                let (seq, settings) = self.configure(who, &change);
                (seq, Reply::Settings(settings))
            }
            Act::Revoke(lease) => {
                let (seq, outcome) = self.revoke(who, lease);
                (seq, Reply::Revoke(outcome))
            }
            Act::Cancel(ticket) => self.cancel_as(who, ticket),
            Act::Close(request) => self.close_as(who, request),
            Act::RetryClose(close) => self.retry_close_as(who, close),
        };
        self.reply(tag, seq, reply);
    }

    /// Keeps an entry, and forgets the oldest one when there is one too many.
    fn audit(&mut self, who: Label, act: AuditAct) {
        let entry = AuditEntry {
            no: self.machine.state.audit.next(),
            at: self.now,
            who,
            act,
        };
        let entry = Box::new(entry);
        self.record(Record::Audit(entry.clone()));
        self.events.push(Event::Operated(entry));
        if let Some(oldest) = self.machine.state.audit.one_too_many() {
            self.record(Record::AuditForgotten(oldest));
        }
    }

    // ---- settings ------------------------------------------------------------------------

    /// All values are checked together; a change that is refused changes none (SET1).
    fn configure(
        &mut self,
        who: Label,
        change: &SettingsChange,
    ) -> (Option<Seq>, Result<Arc<Settings>, PolicyError>) {
        let settings = Arc::clone(&self.machine.settings);
        let changed = match settings.changed(change) {
            Ok(changed) => changed,
            Err(why) => return (None, Err(why)),
        };
        if changed == *settings {
            return (None, Ok(settings));
        }
        let seq = self.next_seq();
        let moves = settings.moves(&changed.overrides);
        self.take_overrides(changed.overrides);
        self.audit(who, AuditAct::SettingsChanged(moves));
        (Some(seq), Ok(Arc::clone(&self.machine.settings)))
    }

    /// The wish of a start: whatever was set at run time is as configured again.
    pub(crate) fn reset_settings(&mut self) {
        let moves = self.machine.settings.moves(&Overrides::default());
        let Ok(who) = Label::new(OF_THE_START) else {
            return;
        };
        if moves.is_empty() {
            return;
        }
        self.next_seq();
        self.take_overrides(Overrides::default());
        self.audit(who, AuditAct::SettingsReset(moves));
    }

    fn take_overrides(&mut self, overrides: Overrides) {
        let overrides = Overrides {
            changed_at: Some(self.now),
            ..overrides
        };
        self.record(Record::Settings(Box::new(overrides)));
        self.machine.settings_changed();
        self.remeasure();
        self.closes_configured();
    }

    // ---- leases, tickets, closes -----------------------------------------------------------

    fn revoke(&mut self, who: Label, id: LeaseId) -> (Option<Seq>, Result<(), LeaseGone>) {
        let ticket = match self.machine.held(id) {
            Ok(ticket) => ticket.clone(),
            Err(gone) => return (None, Err(gone)),
        };
        let (session, tokens) = asked_for(Some(&ticket));
        let act = AuditAct::LeaseRevoked {
            lease: id,
            ticket: ticket.id.clone(),
            session,
            tokens,
        };
        let seq = self.next_seq();
        self.end_lease(ticket, EndHow::Revoked);
        self.audit(who, act);
        (Some(seq), Ok(()))
    }

    fn cancel_as(&mut self, who: Label, ticket: TicketId) -> (Option<Seq>, Reply) {
        let (session, tokens) = asked_for(self.machine.state.ticket(&ticket));
        let (seq, outcome) = self.cancel(ticket.clone());
        if seq.is_some() {
            let act = AuditAct::TicketCancelled {
                ticket,
                session,
                tokens,
                outcome,
            };
            self.audit(who, act);
        }
        (seq, Reply::Cancel(outcome))
    }

    fn close_as(&mut self, who: Label, request: CloseRequest) -> (Option<Seq>, Reply) {
        let (seq, reply) = self.close(request);
        if let (Some(_), CloseReply::Taken(close)) = (seq, &reply) {
            let act = AuditAct::SessionClosed {
                session: close.session.clone(),
                close: close.id,
                mode: close.mode,
            };
            self.audit(who, act);
        }
        (seq, Reply::Close(reply))
    }

    fn retry_close_as(&mut self, who: Label, id: CloseId) -> (Option<Seq>, Reply) {
        let (seq, outcome) = self.retry_close(id);
        if let (Some(_), Ok(close)) = (seq, &outcome) {
            let targets = close.targets.values();
            let sent_to = targets.filter(|target| target.state == TargetState::Pending);
            let act = AuditAct::CloseRetried {
                close: id,
                session: close.session.clone(),
                engines: u64::try_from(sent_to.count()).unwrap_or(u64::MAX),
            };
            self.audit(who, act);
        }
        (seq, Reply::RetryClose(outcome))
    }
}

impl Machine {
    /// What was kept of the settings is in force from here on.
    pub(crate) fn settings_changed(&mut self) {
        let settings = Settings {
            configured: self.settings.configured.clone(),
            overrides: self.state.overrides.clone(),
        };
        self.policy = Arc::new(settings.effective());
        self.settings = Arc::new(settings);
    }

    pub(crate) fn list_audit(&self, slice: Slice<AuditNo>) -> Page<AuditEntry> {
        let mut looked_at = self.state.audit.newest_from(slice.from);
        let items: Vec<AuditEntry> = looked_at
            .by_ref()
            .take(slice.rows.min(SLICE_MAX))
            .cloned()
            .collect();
        Page::new(items, looked_at.next().is_some(), self.state.audit.len())
    }
}

/// Session and reservation of a ticket.
fn asked_for(ticket: Option<&Ticket>) -> (Option<SessionId>, Tokens) {
    let asked = ticket.and_then(|ticket| ticket.asked.as_ref());
    asked.map_or((None, Tokens::ZERO), |asked| {
        (Some(asked.session.clone()), asked.terms.reservation)
    })
}
