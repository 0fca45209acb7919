//! One close intent: the durable promise to release a session's KV on every engine (CLO2). The unit
//! that the store keeps; the book of all of them is `closes.rs`.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::ids::{CloseId, EngineId, Label, SessionId, Term, TicketId};
use crate::policy::CLOSE_EXCEPTIONS_MAX;
use crate::units::Timestamp;

/// How a close treats work that still runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CloseMode {
    /// Wait until every lease of the session has ended.
    Join,
    /// Abort the engine requests of its leases first, then join.
    Abort,
}

/// Why the session ends; it changes nothing but what is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    /// The program came to its end.
    Terminal,
    /// The program was given up.
    Dropped,
    /// It was idle for longer than the operator's limit (CLO11).
    Idle,
}

/// Where one engine stands (CLO5). All but the first are final.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum TargetState {
    /// Not settled yet.
    Pending,
    /// Answered 2xx: delivered, not freed (CLO7).
    Delivered,
    /// Answered with a status that a repetition would not change.
    Refused,
    /// Has no session close.
    Unsupported,
    /// A new incarnation: the KV went with the old one.
    Restarted,
    /// The session was used anew before the close was delivered (CLO8).
    Superseded,
    /// Attempts or time used up.
    Failed,
    /// The same of an engine that left the list.
    Gone,
}

impl TargetState {
    /// The final states, in the order of their counters.
    pub const ENDS: [Self; 7] = [
        Self::Delivered,
        Self::Refused,
        Self::Unsupported,
        Self::Restarted,
        Self::Superseded,
        Self::Failed,
        Self::Gone,
    ];

    /// Whether an intent with such an engine counts as failed (CLO9).
    #[must_use]
    pub const fn is_failure(self) -> bool {
        matches!(self, Self::Refused | Self::Failed)
    }

    /// Whether a retry sends to such an engine again.
    #[must_use]
    pub const fn is_retried(self) -> bool {
        matches!(self, Self::Refused | Self::Failed | Self::Gone)
    }
}

/// What a call to an engine came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallResult {
    /// The engine answered.
    Status {
        /// The HTTP status.
        code: u16,
        /// The beginning of the text of an answer that is not 2xx, at most 200 characters.
        text: Option<Arc<str>>,
    },
    /// It did not, or not so that it can be read.
    Failed(CallFailure),
}

/// Why a call has no status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallFailure {
    /// No answer within the time-out.
    Timeout,
    /// No connection, or a cut one.
    Refused,
    /// An answer over the size bound.
    TooLarge,
    /// The address is outside the allowed engine networks; nothing was sent.
    NotAllowed,
}

/// One engine of a close.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    /// Where it stands.
    pub state: TargetState,
    /// Attempts used up; probes of an engine that is away are none (CLO6).
    pub attempts: u32,
    /// What the last call came to.
    pub last: Option<CallResult>,
}

impl Target {
    /// An engine that was not asked yet.
    pub const PENDING: Self = Self {
        state: TargetState::Pending,
        attempts: 0,
        last: None,
    };
}

/// How far an intent has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseStage {
    /// Waits for the last lease of the session, or for a first member.
    Joining {
        /// Since when only a member is missing.
        ready_since: Option<Timestamp>,
    },
    /// Calls go out.
    Delivering {
        /// Since when: the deadline runs from here.
        since: Timestamp,
        /// Leases are still held: the join time-out brought it about (CLO3).
        early: bool,
    },
    /// No engine is pending.
    Done {
        /// Since when.
        at: Timestamp,
    },
}

/// The acquire that used the session anew (CLO8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reopened {
    /// When.
    pub at: Timestamp,
    /// By which ticket.
    pub ticket: TicketId,
}

/// The durable promise (CLO2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CloseIntent {
    /// Its id. The number is the generation: what is newer ends a newer use of the session.
    pub id: CloseId,
    /// The session.
    pub session: SessionId,
    /// Whether running work is aborted.
    pub mode: CloseMode,
    /// What the caller said of it.
    pub reason: Option<CloseReason>,
    /// When it was asked for.
    pub requested_at: Timestamp,
    /// How far it has come.
    pub stage: CloseStage,
    /// Engines: those known at the request and those that are members when delivery begins. Of a
    /// finished one only those that are not delivered, and not more than a few (section 9).
    pub targets: BTreeMap<EngineId, Target>,
    /// Final states of a finished one, in the order of [`TargetState::ENDS`].
    pub counts: [u32; TargetState::ENDS.len()],
    /// The delivery at the join time-out was begun.
    pub timed_out: bool,
    /// It is in the count of failures; a retry does not count again (CLO9).
    pub failure_counted: bool,
    /// The session was used anew since.
    pub reopened: Option<Reopened>,
    /// Requests that were not aborted, since an engine would have aborted those of another session
    /// with them; the first few (CLO3).
    pub not_aborted: BTreeSet<Label>,
}

impl CloseIntent {
    /// Whether every engine is settled.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self.stage, CloseStage::Done { .. })
    }

    /// How many engines ended in a state.
    #[must_use]
    pub fn count(&self, state: TargetState) -> u32 {
        TargetState::ENDS
            .iter()
            .zip(&self.counts)
            .find(|(candidate, _)| **candidate == state)
            .map_or(0, |(_, count)| *count)
    }

    /// Whether a finished one counts as failed (CLO9). One that never found an engine does too, unless
    /// a newer use of the session made it needless before (CLO2, CLO8).
    #[must_use]
    pub fn has_failed(&self) -> bool {
        let failed = TargetState::ENDS
            .iter()
            .any(|state| state.is_failure() && self.count(*state) > 0);
        let found_none = self.counts.iter().all(|count| *count == 0);
        let needless = self.reopened.is_some() && !self.failure_counted;
        self.is_done() && (failed || (found_none && !needless))
    }

    /// Counts the engines and keeps only the exceptions (section 9).
    pub(crate) fn finish(&mut self, at: Timestamp) {
        for (state, count) in TargetState::ENDS.iter().zip(&mut self.counts) {
            let more = self
                .targets
                .values()
                .filter(|target| target.state == *state)
                .count();
            *count = count.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
        }
        let mut others: Vec<(EngineId, Target)> = core::mem::take(&mut self.targets)
            .into_iter()
            .filter(|(_, target)| target.state != TargetState::Delivered)
            .collect();
        // What a retry would send again is kept first.
        others.sort_by_key(|(_, target)| !target.state.is_retried());
        others.truncate(CLOSE_EXCEPTIONS_MAX);
        self.targets = others.into_iter().collect();
        self.stage = CloseStage::Done { at };
    }
}

/// Names one call, so that its outcome finds its way back. Those of an earlier writer match nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId {
    /// The writer's generation.
    pub term: Term,
    /// Number of the call in it.
    pub number: u64,
}

/// A call that the shell must now make: directly to the engine's base URL, never to a router (CLO4).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineCall {
    /// Its name.
    pub id: CallId,
    /// To whom.
    pub engine: EngineId,
    /// What for.
    pub what: CallWhat,
}

/// What an engine is asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallWhat {
    /// `POST /close_session`: release the KV of a session.
    Close(SessionId),
    /// `POST /abort_request`: end a running request.
    Abort(Label),
}
