//! State, fleet and operation.

use serde::{Deserialize, Serialize};

use crate::words::{EngineKind, EngineRole, EpochCause, ReadingSource, Severity, StoreState};

/// `GET /v1/state`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct State {
    /// What may be reserved, and what is.
    pub budget: Budget,
    /// Worker-set generation.
    pub epoch: u64,
    /// There is no usable ceiling: requests bypass.
    pub degraded: bool,
    /// `no_fleet`, `router_unreachable`, `no_fresh_reading` or `no_capacity`.
    pub degraded_reason: Option<String>,
    /// How full the engines are.
    pub pressure: Pressure,
    /// The line.
    pub queue: Queue,
    /// The held leases.
    pub leases: Leases,
    /// Session closes.
    pub closes: Closes,
    /// What is switched on.
    pub features: Features,
    /// What an operator should know now.
    pub notices: Vec<Notice>,
    /// The store.
    pub store: StoreFigures,
    /// Version of the program.
    pub version: String,
    /// When this process started.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub started_at: String,
}

/// Tokens that may be reserved, and that are.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Budget {
    /// headroom × capacity of the counted engines.
    pub ceiling: u64,
    /// The same over all members with a known capacity.
    pub full_ceiling: u64,
    /// Capacity of the counted engines.
    pub capacity: u64,
    /// Sum of the held leases.
    pub reserved: u64,
    /// What may still be reserved.
    pub available: u64,
    /// reserved / ceiling, which may exceed 1; null without a ceiling.
    pub reserved_utilization: Option<f64>,
    /// Share of the capacity that may be reserved.
    pub headroom: f64,
}

/// How full the engines are.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Pressure {
    /// Mean usage of the counted engines.
    pub usage_mean: Option<f64>,
    /// Highest usage of a counted engine.
    pub usage_max: Option<f64>,
    /// Usage at which new requests wait.
    pub threshold: f64,
    /// The engine that exerts the fleet's pressure.
    pub engine: Option<String>,
}

/// The line.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Queue {
    /// Waiters.
    pub waiting: u64,
    /// Their reservations together.
    pub tokens: u64,
    /// Time since the first enqueue of the oldest.
    pub oldest_age_s: Option<f64>,
}

/// The held leases.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Leases {
    /// How many.
    pub count: u64,
    /// Time since the grant of the oldest.
    pub oldest_age_s: Option<f64>,
}

/// Session closes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Closes {
    /// Under way.
    pub pending: u64,
    /// Ended with a failure.
    pub failed: u64,
}

/// What is switched on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Features {
    /// Program-aware admission.
    pub program_admission: bool,
    /// Session closes.
    pub session_lifecycle: bool,
    /// Admission is held off by the operator.
    pub paused: bool,
}

/// One thing an operator should know now.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Notice {
    /// Stable name.
    pub code: String,
    /// How serious it is.
    pub severity: Severity,
    /// For people.
    pub text: String,
    /// Since when.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub since: String,
}

/// Figures of the store.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoreFigures {
    /// Bytes on disk.
    pub bytes: u64,
    /// 99th percentile of the last commits; null before the first.
    pub commit_p99_s: Option<f64>,
    /// What the store is doing.
    pub state: StoreState,
}

/// `GET /v1/engines`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Engines {
    /// By address.
    pub items: Vec<Engine>,
    /// What the router says; null when none is configured.
    pub router: Option<Router>,
}

/// The router.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Router {
    /// What software it is, as far as its answers tell.
    pub kind: Option<String>,
    /// Why it gave no list last time.
    pub last_error: Option<String>,
    /// Entries of its list that were skipped.
    pub bad_entries: Vec<BadRouterEntry>,
}

/// An entry of the router's list that was skipped.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BadRouterEntry {
    /// The entry, shortened.
    pub entry: String,
    /// Why it was skipped.
    pub reason: String,
}

/// One engine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Engine {
    /// Base URL.
    pub url: String,
    /// The router lists it, or the operator named it.
    pub member: bool,
    /// It counts for ceiling and pressure now.
    pub counted: bool,
    /// Health as the router says.
    pub healthy: bool,
    /// What it is for.
    pub role: EngineRole,
    /// What software it runs; null before the first reading.
    pub kind: Option<EngineKind>,
    /// Size of its pools in tokens.
    pub capacity: Option<u64>,
    /// Tokens locked by running work.
    pub used: Option<u64>,
    /// Tokens cached and free to evict.
    pub evictable: Option<u64>,
    /// Free tokens.
    pub available: Option<u64>,
    /// Usage of its worst rank.
    pub usage: Option<f64>,
    /// Requests running.
    pub running: Option<u64>,
    /// Requests queued inside.
    pub queued: Option<u64>,
    /// DP ranks.
    pub ranks: Option<u32>,
    /// Where the numbers come from.
    pub source: Option<ReadingSource>,
    /// Age of the last good reading.
    pub age_s: Option<f64>,
    /// Whether that reading is fresh.
    pub fresh: bool,
    /// Last failure, when it is newer than the last good reading.
    pub last_error: Option<String>,
    /// Worker-set generation in which it joined.
    pub joined_epoch: u64,
    /// Whether it takes session closes; null while that is not known.
    pub close_support: Option<bool>,
}

/// One change of the worker set (`GET /v1/epochs`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EpochChange {
    /// The generation that it began.
    pub epoch: u64,
    /// When.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub at: String,
    /// What began it.
    pub cause: EpochCause,
    /// Engines that joined, when members changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined: Option<u32>,
    /// Engines that left, when members changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// The engine, when one alone began it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
}

/// `GET /healthz`, `GET /readyz`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// `ok`, or what is going on.
    pub status: String,
}

/// `GET /version`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Version {
    /// Name of the program.
    pub name: String,
    /// Version of the program.
    pub version: String,
}
