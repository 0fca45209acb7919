//! Step reports and decisions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::words::{DecisionAction, Scope};

/// `POST /v1/steps`: take the report of a step.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StepRequest {
    /// The run; each has a window of its own. At most 512 bytes of UTF-8 without control characters.
    #[serde(default)]
    pub run: String,
    /// The step; the same run and step again give the same report.
    #[cfg_attr(feature = "openapi", schema(maximum = 9_007_199_254_740_991_u64))]
    pub step: u64,
}

/// What happened since a run's previous step.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StepReport {
    /// The run.
    pub run: String,
    /// The step; null for a look at a window that goes on.
    pub step: Option<u64>,
    /// Beginning of the window.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub from: String,
    /// Its end.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub to: String,
    /// Values by key, all under `agentic_kv/`. A key is absent when it has nothing to say.
    pub metrics: BTreeMap<String, f64>,
}

/// `GET /v1/decisions`: what was decided, and how leases ended, oldest first.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Decisions {
    /// The decisions.
    pub items: Vec<Decision>,
    /// `after` of the next call: what comes then.
    pub next: u64,
    /// More are there already; after a call with `before`, older ones.
    pub more: bool,
}

/// One decision with the figures of its moment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Decision {
    /// Rises with each decision, over restarts too.
    pub number: u64,
    /// When.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub at: String,
    /// About which ticket.
    pub ticket_id: String,
    /// Of which session; null for a cancel of a ticket that was never seen.
    pub session_id: Option<String>,
    /// Who asked.
    pub client: Option<String>,
    /// What kind of work.
    pub scope: Scope,
    /// What was decided.
    pub action: DecisionAction,
    /// Why, in the words of an acquire's answer; for a cancelled ticket `withdrawn`, `session_closed`, `dropped` or
    /// `taken_back`; for a lease that ended `released`, `expired`, `revoked` or `cancelled`.
    pub reason: String,
    /// Tokens asked for.
    pub reservation_tokens: u64,
    /// Time in line until then.
    pub waited_s: f64,
    /// How long the lease was held that ended; absent for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_s: Option<f64>,
    /// Worker-set generation.
    pub epoch: u64,
    /// Reserved before the decision.
    pub reserved: u64,
    /// Ceiling then.
    pub ceiling: u64,
    /// Ceiling over all members then.
    pub full_ceiling: u64,
    /// Waiters then.
    pub waiting: u64,
    /// Fleet pressure then; null while no busy engine tells its usage.
    pub pressure: Option<f64>,
    /// Its threshold.
    pub pressure_threshold: f64,
    /// Admission was paced after pressure.
    pub paced: bool,
    /// The arithmetic in one sentence.
    pub explanation: String,
}

/// `GET /v1/history`: figures over time.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct History {
    /// Seconds from one value to the next.
    pub step_s: u64,
    /// The beginning of the first step.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub from: String,
    /// Values by series; all have the same length.
    pub series: BTreeMap<String, SeriesPoints>,
}

/// One value a step; null where nothing was sampled.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SeriesPoints {
    /// Means of the samples.
    pub mean: Vec<Option<f64>>,
    /// The least.
    pub min: Vec<Option<f64>>,
    /// The greatest.
    pub max: Vec<Option<f64>>,
}
