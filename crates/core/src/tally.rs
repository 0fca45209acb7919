//! Counting (CNT1): cumulative, durable, and never drained.

use crate::close::TargetState;
use crate::decision::{BypassReason, Scope, WaitReason};
use crate::units::Span;

/// Why a ticket counted as cancelled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CancelledHow {
    /// A waiter, or a grant not yet claimed, was cancelled by its caller.
    Withdrawn,
    /// A waiter's session was closed.
    SessionClosed,
    /// A waiter's caller stayed away (TIC3).
    Dropped,
    /// A grant was not claimed, or ended before it was (TIC4).
    TakenBack,
}

impl CancelledHow {
    /// All, in the order of their counters.
    pub const ALL: [Self; 4] = [
        Self::Withdrawn,
        Self::SessionClosed,
        Self::Dropped,
        Self::TakenBack,
    ];
}

/// How a counted lease ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LeaseEnd {
    /// Given back.
    Released,
    /// Reclaimed at its end.
    Expired,
    /// Revoked by an operator.
    Revoked,
    /// Its ticket was cancelled.
    Cancelled,
}

impl LeaseEnd {
    /// All, in the order of their counters.
    pub const ALL: [Self; 4] = [
        Self::Released,
        Self::Expired,
        Self::Revoked,
        Self::Cancelled,
    ];
}

/// What callers decided by themselves because the gate gave no answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LocalBypass {
    /// No answer, or none that could be read.
    Unreachable,
    /// The gate refused the call (4xx).
    Refused,
    /// The breaker was open after failures.
    Breaker,
    /// The caller's own bound on the wait was reached.
    Timeout,
    /// Any other reason.
    Other,
}

impl LocalBypass {
    /// All, in the order of their counters.
    pub const ALL: [Self; 5] = [
        Self::Unreachable,
        Self::Refused,
        Self::Breaker,
        Self::Timeout,
        Self::Other,
    ];
}

/// Counters of one scope.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScopeTally {
    /// Grants whose answer was delivered or claimed.
    pub admit: u64,
    /// First enqueues, by [`WaitReason`].
    pub wait: [u64; WaitReason::ALL.len()],
    /// Bypasses, by [`BypassReason`].
    pub bypass: [u64; BypassReason::ALL.len()],
    /// Cancelled tickets, by [`CancelledHow`].
    pub cancelled: [u64; CancelledHow::ALL.len()],
}

/// All counters.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// By [`Scope`].
    pub scopes: [ScopeTally; Scope::ALL.len()],
    /// Ends of counted leases, by [`LeaseEnd`].
    pub leases_ended: [u64; LeaseEnd::ALL.len()],
    /// Requests granted after waiting, and their whole queue time in milliseconds.
    pub granted_after_wait: u64,
    /// Sum for the mean of the queue times.
    pub waited_millis: u64,
    /// Bypasses that callers reported, by [`LocalBypass`].
    pub local_bypasses: [u64; LocalBypass::ALL.len()],
    /// Close intents (CLO9).
    pub closes: u64,
    /// Those that ended with an engine failed or refused.
    pub close_failures: u64,
    /// Engines of close intents by how they ended, in the order of [`TargetState::ENDS`].
    pub close_deliveries: [u64; TargetState::ENDS.len()],
    /// Acquires that used a closed session anew (CLO8).
    pub sessions_reopened: u64,
}

fn bump<const N: usize, K: PartialEq>(counters: &mut [u64; N], all: &[K; N], key: &K, by: u64) {
    for (counter, candidate) in counters.iter_mut().zip(all) {
        if candidate == key {
            *counter = counter.saturating_add(by);
        }
    }
}

fn read<const N: usize, K: PartialEq>(counters: &[u64; N], all: &[K; N], key: &K) -> u64 {
    counters
        .iter()
        .zip(all)
        .find(|(_, candidate)| *candidate == key)
        .map_or(0, |(counter, _)| *counter)
}

impl ScopeTally {
    /// Waits of one reason.
    #[must_use]
    pub fn waits(&self, reason: WaitReason) -> u64 {
        read(&self.wait, &WaitReason::ALL, &reason)
    }

    /// Bypasses of one reason.
    #[must_use]
    pub fn bypasses(&self, reason: BypassReason) -> u64 {
        read(&self.bypass, &BypassReason::ALL, &reason)
    }

    /// Cancelled tickets of one kind.
    #[must_use]
    pub fn cancels(&self, how: CancelledHow) -> u64 {
        read(&self.cancelled, &CancelledHow::ALL, &how)
    }
}

impl Tally {
    /// Counters of one scope.
    #[must_use]
    pub const fn scope(&self, scope: Scope) -> &ScopeTally {
        let [train, eval] = &self.scopes;
        match scope {
            Scope::Train => train,
            Scope::Eval => eval,
        }
    }

    const fn scope_mut(&mut self, scope: Scope) -> &mut ScopeTally {
        let [train, eval] = &mut self.scopes;
        match scope {
            Scope::Train => train,
            Scope::Eval => eval,
        }
    }

    /// Ends of counted leases of one kind.
    #[must_use]
    pub fn ends(&self, how: LeaseEnd) -> u64 {
        read(&self.leases_ended, &LeaseEnd::ALL, &how)
    }

    /// Bypasses of one reason that callers reported.
    #[must_use]
    pub fn reported(&self, reason: LocalBypass) -> u64 {
        read(&self.local_bypasses, &LocalBypass::ALL, &reason)
    }

    /// Engines of close intents that ended in one state.
    #[must_use]
    pub fn delivered(&self, state: TargetState) -> u64 {
        read(&self.close_deliveries, &TargetState::ENDS, &state)
    }

    pub(crate) fn close_ended(&mut self, state: TargetState) {
        bump(&mut self.close_deliveries, &TargetState::ENDS, &state, 1);
    }

    pub(crate) fn admit(&mut self, scope: Scope, waited: Option<Span>) {
        let tally = self.scope_mut(scope);
        tally.admit = tally.admit.saturating_add(1);
        if let Some(waited) = waited {
            self.granted_after_wait = self.granted_after_wait.saturating_add(1);
            self.waited_millis = self.waited_millis.saturating_add(waited.millis());
        }
    }

    /// Takes a grant off a tally of grants whose answer is on its way.
    pub(crate) fn unadmit(&mut self, scope: Scope, waited: Option<Span>) {
        let tally = self.scope_mut(scope);
        tally.admit = tally.admit.saturating_sub(1);
        if let Some(waited) = waited {
            self.granted_after_wait = self.granted_after_wait.saturating_sub(1);
            self.waited_millis = self.waited_millis.saturating_sub(waited.millis());
        }
    }

    /// This tally with the admits of `other`.
    pub(crate) fn with_admits_of(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        for (own, more) in sum.scopes.iter_mut().zip(&other.scopes) {
            own.admit = own.admit.saturating_add(more.admit);
        }
        sum.granted_after_wait = sum
            .granted_after_wait
            .saturating_add(other.granted_after_wait);
        sum.waited_millis = sum.waited_millis.saturating_add(other.waited_millis);
        sum
    }

    pub(crate) fn wait(&mut self, scope: Scope, reason: WaitReason) {
        bump(
            &mut self.scope_mut(scope).wait,
            &WaitReason::ALL,
            &reason,
            1,
        );
    }

    pub(crate) fn bypass(&mut self, scope: Scope, reason: BypassReason) {
        let tally = self.scope_mut(scope);
        bump(&mut tally.bypass, &BypassReason::ALL, &reason, 1);
    }

    pub(crate) fn cancelled(&mut self, scope: Scope, how: CancelledHow) {
        let tally = self.scope_mut(scope);
        bump(&mut tally.cancelled, &CancelledHow::ALL, &how, 1);
    }

    pub(crate) fn lease_ended(&mut self, how: LeaseEnd) {
        bump(&mut self.leases_ended, &LeaseEnd::ALL, &how, 1);
    }

    pub(crate) fn local_bypasses(&mut self, reason: LocalBypass, count: u64) {
        bump(&mut self.local_bypasses, &LocalBypass::ALL, &reason, count);
    }
}
