//! What an acquire is answered, and the reads that answer in the same words.

use serde::{Deserialize, Serialize};

use crate::words::{AdmitReason, BypassReason, CancelReason, EndReason, WaitReason};

/// To an acquire: 200, or 202 for [`Wait`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum AcquireAnswer {
    /// Hold the lease until the backend attempt ends.
    Admit(Admit),
    /// Go on without a lease.
    Bypass(Bypass),
    /// Do not start this request.
    Cancelled(Cancelled),
    /// Ask again with the same body.
    Wait(Wait),
}

/// To a read of a ticket.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TicketAnswer {
    /// It holds a lease.
    Admit(Admit),
    /// It was bypassed.
    Bypass(Bypass),
    /// It was released or cancelled.
    Cancelled(Cancelled),
    /// It waits.
    Wait(Wait),
    /// It would be decided afresh.
    Ended(Ended),
}

/// One ticket of `POST /v1/wait`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum WaitResult {
    /// It holds a lease.
    Admit(Admit),
    /// It was bypassed.
    Bypass(Bypass),
    /// It was released or cancelled.
    Cancelled(Cancelled),
    /// It is not known, or would be decided afresh.
    Unknown(UnknownTicket),
}

/// To `POST /v1/wait`: all that are decided, in the order asked. Empty (202) when the time was over.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaitResults {
    /// The decided tickets.
    pub results: Vec<WaitResult>,
}

/// A lease was granted.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Admit {
    /// Why.
    pub reason: AdmitReason,
    /// The ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// The fencing token: release and renewal go by it.
    pub lease_id: String,
    /// Tokens charged.
    pub reservation_tokens: u64,
    /// Worker-set generation of the grant.
    pub epoch: u64,
    /// Life since the grant or the last renewal.
    pub ttl_s: f64,
    /// Present and true when the asked life was brought into range.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ttl_clamped: bool,
    /// When the lease is reclaimed unless it is renewed.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub expires_at: String,
    /// The same as seconds from now.
    pub expires_in_s: f64,
    /// Whole time in the queue.
    pub waited_s: f64,
    /// This decision was delivered before.
    pub repeated: bool,
    /// The session was closed after its last acquire.
    pub session_reopened: bool,
}

/// Go on without a lease.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bypass {
    /// Why.
    pub reason: BypassReason,
    /// The ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// Tokens asked for; nothing is charged.
    pub reservation_tokens: u64,
    /// Worker-set generation.
    pub epoch: u64,
    /// Present and true when the asked life was brought into range.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ttl_clamped: bool,
    /// Whole time in the queue.
    pub waited_s: f64,
    /// This decision was delivered before.
    pub repeated: bool,
    /// The session was closed after its last acquire.
    pub session_reopened: bool,
}

/// Do not start this request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cancelled {
    /// Why.
    pub reason: CancelReason,
    /// The ticket.
    pub ticket_id: String,
    /// Its session; null for a ticket that was cancelled before it was ever seen.
    pub session_id: Option<String>,
    /// Tokens asked for.
    pub reservation_tokens: u64,
    /// Worker-set generation.
    pub epoch: u64,
    /// Present and true when the asked life was brought into range.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ttl_clamped: bool,
    /// Whole time in the queue.
    pub waited_s: f64,
    /// This answer was given before.
    pub repeated: bool,
    /// The session was closed after its last acquire.
    pub session_reopened: bool,
}

/// The ticket keeps its place: ask again with the same body.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Wait {
    /// What holds it up now.
    pub reason: WaitReason,
    /// The ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// Tokens asked for.
    pub reservation_tokens: u64,
    /// Worker-set generation.
    pub epoch: u64,
    /// Present and true when the asked life was brought into range.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ttl_clamped: bool,
    /// 1 for the head.
    pub position: u64,
    /// Reservations before it.
    pub tokens_ahead: u64,
    /// Tokens that must be given back before it fits.
    pub short_tokens: u64,
    /// Time since its first enqueue.
    pub age_s: f64,
    /// Time until it is bypassed for its age.
    pub bypass_in_s: f64,
    /// When to ask again; 0 means at once.
    pub poll_after_s: f64,
    /// How long the place is kept while nobody asks.
    pub claim_grace_s: f64,
    /// The session was closed after its last acquire.
    pub session_reopened: bool,
}

/// The ticket ended; an acquire would be decided afresh.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Ended {
    /// How.
    pub reason: EndReason,
    /// The ticket.
    pub ticket_id: String,
}

/// The ticket is not known.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnknownTicket {
    /// The ticket.
    pub ticket_id: String,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands out references"
)]
pub(crate) const fn is_false(value: &bool) -> bool {
    !*value
}
