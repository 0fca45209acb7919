//! The settings of the gate, validated together, and the fixed bounds of its books (section 9).

use crate::units::{Ppm, Span, Tokens};

/// Shortest lease life (LEA1).
pub const TTL_MIN: Span = Span::from_secs(1);
/// Longest lease life (LEA1).
pub const TTL_MAX: Span = Span::from_secs(24 * 3_600);
/// Least time a lease has left after a restart, given once (LEA4).
pub const RESTART_GRACE: Span = Span::from_secs(30);
/// Longest time that a request may be made to wait: a longer one is a slip of a unit.
pub const MAX_WAIT_MAX: Span = Span::from_secs(366 * 24 * 3_600);
/// How long finished tickets are remembered (section 9).
pub const FINISHED_FOR: Span = Span::from_secs(600);
/// How many finished tickets are remembered (section 9).
pub const FINISHED_MAX: usize = 262_144;
/// How many epochs are remembered (section 9).
pub const EPOCHS_MAX: usize = 10_000;
/// How many starts are remembered, to tell an issued lease id from one that never was (ID2).
pub const STARTS_MAX: usize = 10_000;
/// Queue decisions in one turn; the rest comes in the next (DEC3).
pub const DECISIONS_PER_TURN: usize = 1_024;
/// A gap between two turns above this is a pause (TIM3).
pub const PAUSE_AFTER: Span = Span::from_secs(1);
/// Longest hold after a pause (TIM3).
pub const PAUSE_HOLD_MAX: Span = Span::from_secs(10);
/// A pause is granted at most this often (TIM3).
pub const PAUSE_EVERY: Span = Span::from_secs(60);
/// How long a start waits for the first reading round before the queue moves (DUR3).
pub const FIRST_ROUND_WAIT: Span = Span::from_secs(2);
/// Counters alone cause a commit at most this often (section 9).
pub const TALLY_EVERY: Span = Span::from_secs(1);
/// Renewals are written within 5 s (LEA2): they gather for this long,
pub const RENEWALS_EVERY: Span = Span::from_secs(3);
/// then they go with so many turns at most,
pub const RENEWALS_TURNS: usize = 64;
/// so far apart, which leaves a second for the commits themselves,
pub const RENEWALS_PACE: Span = Span::from_millis(10);
/// and so many with one turn at least.
pub const RENEWALS_SHARE_MIN: usize = 1_024;
/// An engine called unhealthy without a break for this long is not counted (CAP3).
pub const UNHEALTHY_AFTER: Span = Span::from_secs(10);
/// How long the last known capacity serves the full ceiling (CAP4).
pub const CAPACITY_KNOWN_FOR: Span = Span::from_secs(60);
/// Signs of a new incarnation within this time are one incarnation (CAP8).
pub const INCARNATION_SIGNS_WITHIN: Span = Span::from_secs(30);
/// Readings in an engine's pressure window (CAP5).
pub const PRESSURE_WINDOW: usize = 3;
/// Readings below the threshold in a row that end pacing (CAP6).
pub const PACE_READINGS: u32 = 10;
/// Runs that have a window of their own for step reports (REP1).
pub const RUNS_MAX: usize = 16;
/// How many step reports are remembered (section 9).
pub const STEPS_MAX: usize = 10_000;
/// How many entries of the audit are remembered (section 9).
pub const AUDIT_MAX: usize = 10_000;
/// How many names of clients are looked for again, so that their tickets share them.
pub const CLIENTS_SHARED_MAX: usize = 1_024;
/// How many decisions are remembered, in memory only (section 9).
pub const DECISIONS_KEPT: usize = 20_000;
/// Close intents that may be open at once; a close beyond that is refused for now.
pub const CLOSES_OPEN_MAX: usize = 100_000;
/// How long finished closes are remembered (section 9).
pub const CLOSES_FOR: Span = Span::from_secs(3_600);
/// How many finished closes are remembered (section 9).
pub const CLOSES_MAX: usize = 50_000;
/// Engines of a finished close that are named, and requests of one that were not aborted (section 9).
pub const CLOSE_EXCEPTIONS_MAX: usize = 16;
/// How long a session without lease, waiter or close is remembered (section 9).
pub const SESSIONS_FOR: Span = Span::from_secs(3_600);
/// How many such sessions are remembered (section 9).
pub const SESSIONS_MAX: usize = 100_000;
/// The last use of a session is written at most this often (section 9).
pub const SESSION_USE_EVERY: Span = Span::from_secs(60);
/// Calls to one engine at once (CLO6).
pub const CALLS_PER_ENGINE_MAX: usize = 16;
/// The pace of calls to one engine: one in this time, after those that may go at once (CLO6).
pub const CALL_EVERY: Span = Span::from_millis(5);
/// Time that an engine without calls saves for those that come at once: 32 calls.
pub const CALLS_SAVED_MAX: Span = Span::from_millis(160);
/// A longer line of calls is worked off within about this time, whatever the pace.
pub const CALLS_WITHIN: Span = Span::from_secs(30);
/// Calls that must wait for their time wait at least so long: a few go together then.
pub const CALLS_WAIT_MIN: Span = Span::from_millis(20);
/// First wait before a call is repeated; doubles up to [`RETRY_MAX`] (CLO6).
pub const RETRY_MIN: Span = Span::from_millis(250);
/// Longest wait before a call is repeated, or an engine that is away is probed (CLO6).
pub const RETRY_MAX: Span = Span::from_secs(15);
/// First wait before an engine that is away is probed; doubles up to [`RETRY_MAX`].
pub const PROBE_MIN: Span = Span::from_secs(1);
/// Transport failures in a row after which an engine is away (CLO6).
pub const AWAY_AFTER: u32 = 5;
/// Answers in a row as of one that has no session close, after which an engine has none (CLO5).
pub const UNSUPPORTED_AFTER: u32 = 3;
/// How often an engine that has no session close is tried again (CLO5).
pub const UNSUPPORTED_TRIED_EVERY: Span = Span::from_secs(300);
/// A session used anew within this time of its close is a notice (CLO8).
pub const REOPENED_WITHIN: Span = Span::from_secs(60);
/// How long that notice stays at the latest (CLO8).
pub const REOPENED_NOTICE_FOR: Span = Span::from_secs(3_600);
/// Sessions used anew that are looked after for that notice.
pub const REOPENED_NOTED_MAX: usize = 1_000;
/// How long a notice of the core stays after its last cause.
pub const NOTICE_FOR: Span = Span::from_secs(600);

/// Which requests admission applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdmissionScope {
    /// Training requests only; evaluation passes by.
    Train,
    /// Training and evaluation.
    All,
}

/// Everything the decisions depend on besides state. Build one, then [`Policy::validated`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Program-aware admission on.
    pub program_admission: bool,
    /// Session closes on.
    pub session_lifecycle: bool,
    /// Admission held off for a while by the operator: everything bypasses.
    pub paused: bool,
    /// Share of the fleet's capacity that may be reserved, above 0 (CAP4).
    pub headroom: Ppm,
    /// Worst engine usage at which new requests wait, above 0 (CAP5).
    pub pressure_threshold: Ppm,
    /// Upper bound on the completion part of a reservation, above 0 (TOK1).
    pub expected_decode_cap: Option<Tokens>,
    /// Longest wait before the aging bypass; 0 means that nothing queues (DEC1).
    pub max_wait: Span,
    /// Which requests admission applies to.
    pub scope: AdmissionScope,
    /// How long a place or a fresh grant is kept for a caller that is away (TIC3, TIC4).
    pub claim_grace: Span,
    /// Bound of the queue, above 0.
    pub max_waiting: u64,
    /// Age at which a reading is no longer fresh (CAP3).
    pub stale_after: Span,
    /// Attempts of one close at one engine, above 0 (CLO6).
    pub close_attempts: u32,
    /// Time for the delivery of one close, above 0 (CLO6).
    pub close_deadline: Span,
    /// Longest wait for the leases of a closing session; `None` for no limit (CLO3).
    pub join_timeout: Option<Span>,
    /// Sessions idle for longer are closed, above 0; `None` for never (CLO11).
    pub session_idle_close: Option<Span>,
}

impl Default for Policy {
    /// The defaults of the command line, with both features off.
    fn default() -> Self {
        Self {
            program_admission: false,
            session_lifecycle: false,
            paused: false,
            headroom: Ppm::clamped(900_000),
            pressure_threshold: Ppm::clamped(920_000),
            expected_decode_cap: None,
            max_wait: Span::from_secs(30),
            scope: AdmissionScope::Train,
            claim_grace: Span::from_secs(10),
            max_waiting: 100_000,
            stale_after: Span::from_secs(6),
            close_attempts: 8,
            close_deadline: Span::from_secs(120),
            join_timeout: None,
            session_idle_close: None,
        }
    }
}

/// A setting outside its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PolicyError {
    /// Headroom of 0.
    #[error("the admission headroom must be above 0 and at most 1")]
    Headroom,
    /// Threshold of 0.
    #[error("the admission pressure threshold must be above 0 and at most 1")]
    PressureThreshold,
    /// Cap of 0.
    #[error("the expected decode cap must be above 0")]
    DecodeCap,
    /// A wait of more than a year.
    #[error("the longest wait must be at least 0 and at most a year")]
    MaxWait,
    /// Grace outside 1 s to 60 s.
    #[error("the claim grace must be 1 to 60 seconds")]
    ClaimGrace,
    /// A queue of no length.
    #[error("the bound of the queue must be above 0")]
    MaxWaiting,
    /// Readings that are never fresh.
    #[error("the age at which a reading is stale must be above 0")]
    StaleAfter,
    /// Closes that are never sent.
    #[error("the attempts of a close must be above 0")]
    CloseAttempts,
    /// Closes that end before they begin.
    #[error("the time for the delivery of a close must be above 0")]
    CloseDeadline,
    /// Sessions that are idle at once.
    #[error("the time after which an idle session is closed must be above 0")]
    SessionIdleClose,
}

impl Policy {
    /// Checks all values together. The numeric admission constraints hold only while admission is on.
    ///
    /// # Errors
    /// The first constraint that does not hold.
    pub fn validated(self) -> Result<Self, PolicyError> {
        if self.program_admission {
            if self.headroom.get() == 0 {
                return Err(PolicyError::Headroom);
            }
            if self.pressure_threshold.get() == 0 {
                return Err(PolicyError::PressureThreshold);
            }
            if self.expected_decode_cap == Some(Tokens::ZERO) {
                return Err(PolicyError::DecodeCap);
            }
            if self.max_wait > MAX_WAIT_MAX {
                return Err(PolicyError::MaxWait);
            }
        }
        if self.claim_grace < Span::from_secs(1) || self.claim_grace > Span::from_secs(60) {
            return Err(PolicyError::ClaimGrace);
        }
        if self.max_waiting == 0 {
            return Err(PolicyError::MaxWaiting);
        }
        if self.stale_after == Span::ZERO {
            return Err(PolicyError::StaleAfter);
        }
        if self.close_attempts == 0 {
            return Err(PolicyError::CloseAttempts);
        }
        if self.close_deadline == Span::ZERO {
            return Err(PolicyError::CloseDeadline);
        }
        if self.session_idle_close == Some(Span::ZERO) {
            return Err(PolicyError::SessionIdleClose);
        }
        Ok(self)
    }
}

/// Brings a lease life into range; the second value says whether that changed it (LEA1).
#[must_use]
pub fn ttl_in_range(ttl: Span) -> (Span, bool) {
    let inside = ttl.clamp(TTL_MIN, TTL_MAX);
    (inside, inside != ttl)
}
