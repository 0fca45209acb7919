//! Problems (RFC 9457).

use serde::{Deserialize, Serialize};

/// Content type of a problem.
pub const PROBLEM_JSON: &str = "application/problem+json";

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)+) => {
        /// Stable names of problems. The same code always means the same.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub enum ProblemCode {
            $($(#[$doc])* #[serde(rename = $text)] $variant,)+
        }

        impl ProblemCode {
            /// All codes.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The code as it is written.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
}

codes! {
    /// 400: the body is no JSON.
    InvalidJson = "invalid_json",
    /// 400: an id breaks a rule.
    InvalidId = "invalid_id",
    /// 400 or 422: fields, parameters or the request itself are not as they should be.
    InvalidRequest = "invalid_request",
    /// 401: the token is missing or wrong.
    Unauthorized = "unauthorized",
    /// 403: no right, or a cross-site write from a browser.
    Forbidden = "forbidden",
    /// 404: nothing is served here.
    NotFound = "not_found",
    /// 404: no lease with this id was ever issued.
    LeaseNotFound = "lease_not_found",
    /// 404: the ticket is not known.
    TicketNotFound = "ticket_not_found",
    /// 404: the session is not known.
    SessionNotFound = "session_not_found",
    /// 404: no close with this id is known.
    CloseNotFound = "close_not_found",
    /// 405: the address does not take this method.
    MethodNotAllowed = "method_not_allowed",
    /// 409: the ticket was used before with another session or other numbers.
    TicketConflict = "ticket_conflict",
    /// 409: the session was used or closed anew since the close that is to be sent again.
    CloseSuperseded = "close_superseded",
    /// 410: the lease expired, was revoked or is forgotten.
    LeaseExpired = "lease_expired",
    /// 410: the lease was released.
    LeaseReleased = "lease_released",
    /// 413: the body is too large.
    BodyTooLarge = "body_too_large",
    /// 415: the body is not `application/json`, or it is compressed.
    UnsupportedMediaType = "unsupported_media_type",
    /// 421: the Host header is not among the allowed ones.
    HostNotAllowed = "host_not_allowed",
    /// 503: not loaded yet.
    Recovering = "recovering",
    /// 503: an orderly stop has begun.
    Draining = "draining",
    /// 503: too many commands are waiting.
    Overloaded = "overloaded",
    /// 503: the store cannot promise durability now.
    StoreUnavailable = "store_unavailable",
}

/// A problem. Further fields may follow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `/problems/<code>`: a page that says what to do.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind of problem in a few words.
    pub title: String,
    /// Status of the answer.
    pub status: u16,
    /// What is wrong with this call.
    pub detail: String,
    /// Stable name.
    pub code: ProblemCode,
    /// The request's id, as in `X-Request-Id`.
    pub instance: String,
    /// Where the request is wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldFault>,
}

/// One fault in a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FieldFault {
    /// JSON pointer into the body, empty for the body itself; `?name` for a query parameter.
    pub pointer: String,
    /// What is wrong there.
    pub detail: String,
}
