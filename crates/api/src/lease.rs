//! Leases, waiters and lists of them.

use serde::{Deserialize, Serialize};

use crate::answer::is_false;
use crate::words::{CancelOutcome, ReleaseOutcome, RevokeOutcome, Scope, WaitReason};

/// A held lease.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Lease {
    /// The fencing token.
    pub lease_id: String,
    /// Its ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// Tokens charged.
    pub reservation_tokens: u64,
    /// Worker-set generation of the grant.
    pub epoch: u64,
    /// Life since the grant or the last renewal.
    pub ttl_s: f64,
    /// Present and true when a renewal asked for a life that was brought into range.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ttl_clamped: bool,
    /// When it was granted.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub granted_at: String,
    /// When it is reclaimed unless it is renewed.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub expires_at: String,
    /// The same as seconds from now.
    pub expires_in_s: f64,
    /// Training or evaluation.
    pub scope: Scope,
    /// Name of the caller.
    pub client: Option<String>,
    /// Id of the engine request.
    pub request_id: Option<String>,
}

/// A waiter in line.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Waiter {
    /// Its ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// Tokens asked for.
    pub reservation_tokens: u64,
    /// 1 for the head.
    pub position: u64,
    /// What holds it up now.
    pub reason: WaitReason,
    /// Time since its first enqueue.
    pub age_s: f64,
    /// Time until it is bypassed for its age.
    pub bypass_in_s: f64,
    /// Training or evaluation.
    pub scope: Scope,
    /// Name of the caller.
    pub client: Option<String>,
}

/// One page of a list.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Listing<T> {
    /// The rows of this page.
    pub items: Vec<T>,
    /// What to send as `cursor` for the next page; null on the last one.
    pub next: Option<String>,
    /// Rows that match, on all pages.
    pub total: u64,
}

/// To a release.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReleaseResult {
    /// What it did.
    pub outcome: ReleaseOutcome,
}

/// To a revocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RevokeResult {
    /// What it did.
    pub outcome: RevokeOutcome,
}

/// To a cancel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CancelResult {
    /// What it met.
    pub outcome: CancelOutcome,
}
