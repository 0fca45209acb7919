//! The decision, top to bottom (DEC1, DEC2). Reads a situation, writes nothing.

use crate::capacity::Measure;
use crate::decision::{BypassReason, Scope, WaitReason};
use crate::policy::{AdmissionScope, Policy};
use crate::units::{Span, Timestamp, Tokens};

/// Everything a decision reads.
pub(crate) struct Situation<'a> {
    pub(crate) policy: &'a Policy,
    pub(crate) measure: &'a Measure,
    /// Sum of the held leases.
    pub(crate) reserved: Tokens,
    /// Waiters in line.
    pub(crate) waiting: u64,
    /// Whether the pace after pressure lets this request pass (CAP6).
    pub(crate) pace_allows: bool,
}

/// What a decision is about.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) reservation: Tokens,
    pub(crate) scope: Scope,
    pub(crate) protected: bool,
    /// First enqueue, for one that was in line before (TIC3).
    pub(crate) since: Option<Timestamp>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Decision {
    Admit,
    Wait(WaitReason),
    Bypass(BypassReason),
}

impl Situation<'_> {
    /// DEC1: a new ticket.
    pub(crate) fn decide(&self, request: Request, now: Timestamp) -> Decision {
        if let Some(reason) = self.not_applied(request.scope) {
            return Decision::Bypass(reason);
        }
        if request.protected {
            return Decision::Bypass(BypassReason::Protected);
        }
        if let Some(reason) = self.cannot_help(request.reservation) {
            return Decision::Bypass(reason);
        }
        if self.waiting >= self.policy.max_waiting {
            return Decision::Bypass(BypassReason::QueueFull);
        }
        let blocked = if self.waiting > 0 {
            Some(WaitReason::BehindOlder)
        } else {
            self.blocked(request.reservation)
        };
        match blocked {
            None => Decision::Admit,
            Some(_) if self.policy.max_wait == Span::ZERO || self.aged(request.since, now) => {
                Decision::Bypass(BypassReason::Aged)
            }
            Some(reason) => Decision::Wait(reason),
        }
    }

    /// DEC2: the head of the queue.
    pub(crate) fn decide_head(&self, request: Request, now: Timestamp) -> Decision {
        if let Some(reason) = self.leaves(request, now) {
            return Decision::Bypass(reason);
        }
        self.blocked(request.reservation)
            .map_or(Decision::Admit, Decision::Wait)
    }

    /// Why a waiter goes on without a lease, wherever it stands once its time is over.
    pub(crate) fn leaves(&self, request: Request, now: Timestamp) -> Option<BypassReason> {
        if let Some(reason) = self.not_applied(request.scope) {
            return Some(reason);
        }
        if self.aged(request.since, now) {
            return Some(BypassReason::Aged);
        }
        self.cannot_help(request.reservation)
    }

    /// What holds the head up: pressure, pace or room.
    pub(crate) fn blocked(&self, reservation: Tokens) -> Option<WaitReason> {
        let pressed = self
            .measure
            .pressure
            .as_ref()
            .is_some_and(|(worst, _)| *worst >= self.policy.pressure_threshold);
        if pressed || !self.pace_allows {
            return Some(WaitReason::PressureGuard);
        }
        let fits = self
            .reserved
            .checked_add(reservation)
            .is_some_and(|sum| sum <= self.measure.ceiling);
        (!fits).then_some(WaitReason::CapacityExhausted)
    }

    fn not_applied(&self, scope: Scope) -> Option<BypassReason> {
        if !self.policy.program_admission || self.policy.paused {
            return Some(BypassReason::Disabled);
        }
        (scope == Scope::Eval && self.policy.scope == AdmissionScope::Train)
            .then_some(BypassReason::OutOfScope)
    }

    fn cannot_help(&self, reservation: Tokens) -> Option<BypassReason> {
        if self.measure.degraded.is_some() {
            return Some(BypassReason::Degraded);
        }
        (reservation > self.measure.full_ceiling).then_some(BypassReason::Oversize)
    }

    fn aged(&self, since: Option<Timestamp>, now: Timestamp) -> bool {
        since.is_some_and(|since| now.reached(since.after(self.policy.max_wait)))
    }
}
