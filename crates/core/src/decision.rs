//! The words of a decision: admit, wait, bypass, cancelled, and why (section 3).

/// What kind of work asks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Scope {
    /// A training request.
    Train,
    /// An evaluation request.
    Eval,
}

impl Scope {
    /// All scopes, in the order of their counters.
    pub const ALL: [Self; 2] = [Self::Train, Self::Eval];
}

/// Why a request goes ahead without a lease (DEC1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BypassReason {
    /// Admission is off or paused.
    Disabled,
    /// Admission does not apply to this scope.
    OutOfScope,
    /// The caller marked the work as protected.
    Protected,
    /// Capacity signals are missing or stale (CAP7).
    Degraded,
    /// Larger than the full ceiling: waiting could never help.
    Oversize,
    /// The queue is at its bound.
    QueueFull,
    /// The maximum wait is over.
    Aged,
}

impl BypassReason {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 7] = [
        Self::Disabled,
        Self::OutOfScope,
        Self::Protected,
        Self::Degraded,
        Self::Oversize,
        Self::QueueFull,
        Self::Aged,
    ];
}

/// Why a request waits (DEC1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum WaitReason {
    /// An older waiter exists.
    BehindOlder,
    /// The worst engine is at its threshold, or admission is paced after it was (CAP5, CAP6).
    PressureGuard,
    /// It does not fit under the ceiling now.
    CapacityExhausted,
}

impl WaitReason {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 3] = [
        Self::BehindOlder,
        Self::PressureGuard,
        Self::CapacityExhausted,
    ];
}

/// Why a request must not start (TIC1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CancelReason {
    /// Cancelled while its call was open.
    Cancelled,
    /// Its session was closed while it waited.
    SessionClosed,
    /// The ticket was released or cancelled before.
    TicketFinished,
}

/// How a ticket's life ended; what an acquire of it is answered then (TIC1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum EndHow {
    /// It was told to go ahead without a lease.
    Bypassed(BypassReason),
    /// Its lease was given back.
    Released,
    /// It was cancelled, in whatever state, or before it was ever seen.
    Cancelled,
    /// Its session was closed while it waited.
    SessionClosed,
    /// Its lease reached its end; decided afresh.
    Expired,
    /// Its lease was revoked by an operator; decided afresh.
    Revoked,
    /// Its caller stayed away from the queue; decided afresh (TIC3).
    Dropped,
    /// Its grant was not claimed; decided afresh (TIC4).
    TakenBack,
}

impl EndHow {
    /// Whether an acquire of the ticket is decided afresh (TIC1).
    #[must_use]
    pub const fn decided_afresh(self) -> bool {
        matches!(
            self,
            Self::Expired | Self::Revoked | Self::Dropped | Self::TakenBack
        )
    }
}

/// Why there is no usable ceiling (CAP7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DegradedReason {
    /// Neither a router nor engines are configured.
    NoFleet,
    /// The router gave no good non-empty list for longer than a reading stays fresh.
    RouterUnreachable,
    /// No member gave a fresh reading.
    NoFreshReading,
    /// Fresh readings, but no capacity that counts.
    NoCapacity,
}
