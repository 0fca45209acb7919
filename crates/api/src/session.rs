//! Sessions and their closes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::answer::is_false;
use crate::lease::{Lease, Waiter};
use crate::words::{CloseEngineState, CloseMode, CloseOff, CloseReason, CloseState};

/// To a close or its retry.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum CloseAnswer {
    /// The close as it stands: promised, on disk, and under way.
    Taken(Close),
    /// The lifecycle feature is off.
    Disabled(CloseDisabled),
}

/// One close: the durable promise to release the KV of a session on every engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Close {
    /// Its id.
    pub close_id: String,
    /// The session.
    pub session_id: String,
    /// What happens to requests that still run.
    pub mode: CloseMode,
    /// Why the session ends, if that was said.
    pub reason: Option<CloseReason>,
    /// How far it has come.
    pub state: CloseState,
    /// When it was asked for.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub requested_at: String,
    /// Every engine while it runs; of a finished one those that are not `delivered`, at most 16.
    pub engines: Vec<CloseEngine>,
    /// How many engines stand in a state; those that are not listed are counted too.
    pub counts: BTreeMap<CloseEngineState, u32>,
    /// It is done, and engines refused it or were never reached; present when `true`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub failed: bool,
    /// Engine requests that were not aborted, since an engine would have aborted those of another session with them;
    /// present when there are some, at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_aborted: Vec<String>,
}

/// One engine of a close.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CloseEngine {
    /// Base URL.
    pub url: String,
    /// Where it stands.
    pub state: CloseEngineState,
    /// Attempts used up.
    pub attempts: u32,
    /// Status of the last answer; null when the last call got none.
    pub last_status: Option<u16>,
    /// Why the last call got no answer, or the beginning of the engine's own words about a failure.
    pub last_error: Option<String>,
}

/// The lifecycle feature is off: nothing is kept and nothing is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CloseDisabled {
    /// Always `disabled`.
    pub state: CloseOff,
}

/// One session.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Session {
    /// Its id.
    pub session_id: String,
    /// Its last acquire, or the end of its last lease; null when it was only closed.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub last_use_at: Option<String>,
    /// Its held leases, at most 1,000.
    pub leases: Vec<Lease>,
    /// Its waiters from the head, at most 1,000.
    pub waiting: Vec<Waiter>,
    /// Its closes that are remembered, newest first, at most 1,000.
    pub closes: Vec<Close>,
}
