//! A picture of the gate for readers: fixed in size but for the list of engines.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::capacity::{EngineView, Measure};
use crate::decision::Scope;
use crate::ids::{EngineId, Epoch, Seq, SessionId, TicketId};
use crate::policy::Policy;
use crate::reading::RouterFailure;
use crate::settings::Settings;
use crate::tally::Tally;
use crate::units::{Timestamp, Tokens};

/// State as of the last committed turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    /// The turn's time.
    pub now: Timestamp,
    /// Number of the last change.
    pub seq: Seq,
    /// Worker-set generation.
    pub epoch: Epoch,
    /// The settings in force.
    pub policy: Arc<Policy>,
    /// What of them is configured, and what was set at run time.
    pub settings: Arc<Settings>,
    /// What the readings come to.
    pub measure: Arc<Measure>,
    /// Admission is paced after pressure (CAP6).
    pub paced: bool,
    /// Why the router gave no list last time.
    pub router_failure: Option<RouterFailure>,
    /// Sum of the held leases.
    pub reserved: Tokens,
    /// Held leases.
    pub leases: u64,
    /// Grant of the oldest held lease.
    pub oldest_lease: Option<Timestamp>,
    /// Waiters in line.
    pub waiting: u64,
    /// Their reservations together.
    pub waiting_tokens: Tokens,
    /// Leases and waiters of each [`Scope`].
    pub loads: [Load; Scope::ALL.len()],
    /// First enqueue of the waiter that came first.
    pub oldest_waiter: Option<Timestamp>,
    /// Close intents that are not done.
    pub closes_pending: u64,
    /// Finished ones that are remembered and failed.
    pub closes_failed: u64,
    /// Members, by address.
    pub engines: Arc<[EngineView]>,
    /// Counters.
    pub tally: Tally,
    /// The same as no restart can set them back, after a kill neither: what is not stored yet is not in
    /// it. A reader that takes a lower value for a new beginning needs these.
    pub durable_tally: Tally,
    /// Notices of the core.
    pub notices: Vec<Notice>,
}

impl View {
    /// Leases and waiters of one scope.
    #[must_use]
    pub const fn load(&self, scope: Scope) -> Load {
        let [train, eval] = self.loads;
        match scope {
            Scope::Train => train,
            Scope::Eval => eval,
        }
    }

    /// Tokens that may still be reserved; 0 while more is reserved than the ceiling (DEC4).
    #[must_use]
    pub fn available(&self) -> Tokens {
        self.measure.ceiling.saturating_sub(self.reserved)
    }
}

/// What one scope holds and waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Held leases.
    pub leases: u64,
    /// Waiters in line.
    pub waiting: u64,
    /// Their reservations together.
    pub waiting_tokens: Tokens,
}

/// Something an operator should know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A reservation was larger than any single pool of the fleet (DEC5).
    LargerThanAnyPool {
        /// First time.
        since: Timestamp,
        /// Last time; the notice goes some time after it.
        last: Timestamp,
        /// The reservation of the last time.
        reservation: Tokens,
        /// The largest pool.
        largest_pool: Tokens,
    },
    /// An engine's rows differ by an unknown label (CAP2).
    UnknownLabel {
        /// First time.
        since: Timestamp,
    },
    /// Sessions were used anew soon after their close, and not closed again (CLO8).
    SessionReopened {
        /// How many.
        count: u64,
        /// The session of the last one.
        session: SessionId,
        /// The ticket that used it.
        ticket: TicketId,
        /// The first of them.
        since: Timestamp,
    },
    /// An engine refuses calls of the session lifecycle.
    CallRefused {
        /// The engine.
        engine: EngineId,
        /// `true` for aborts, `false` for closes.
        abort: bool,
        /// The status it answered with.
        status: u16,
        /// The beginning of its text.
        text: Option<Arc<str>>,
        /// First time.
        since: Timestamp,
        /// Last time; the notice goes some time after it, or with the first call that succeeds.
        last: Timestamp,
    },
}
