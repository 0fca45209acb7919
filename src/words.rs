//! What went wrong with a reading or a call, in the words that pages, API and commands show.

use kvgate_core::close::CallFailure;
use kvgate_core::decision::DegradedReason;
use kvgate_core::reading::{ReadFailure, RouterFailure};

/// Why an engine gave no good reading.
#[must_use]
pub fn read_failure(failure: ReadFailure) -> String {
    match failure {
        ReadFailure::Timeout => "no answer within the time-out".to_owned(),
        ReadFailure::Refused => "no connection".to_owned(),
        ReadFailure::MetricsOff => "metrics off (404)".to_owned(),
        ReadFailure::KeyRefused(status) => format!("needs a key ({status})"),
        ReadFailure::Status(status) => format!("status {status}"),
        ReadFailure::Unreadable => "an answer that cannot be read".to_owned(),
        ReadFailure::Missing => "an answer without a KV capacity".to_owned(),
        ReadFailure::NotAllowed => "outside the allowed engine networks".to_owned(),
    }
}

/// Why there is no usable ceiling.
#[must_use]
pub const fn degraded_reason(why: DegradedReason) -> &'static str {
    match why {
        DegradedReason::NoFleet => "no_fleet",
        DegradedReason::RouterUnreachable => "router_unreachable",
        DegradedReason::NoFreshReading => "no_fresh_reading",
        DegradedReason::NoCapacity => "no_capacity",
    }
}

/// Why the router gave no list.
#[must_use]
pub fn router_failure(failure: RouterFailure) -> String {
    match failure {
        RouterFailure::Timeout => "router gives no answer within the time-out".to_owned(),
        RouterFailure::Refused => "router takes no connection".to_owned(),
        RouterFailure::KeyRefused(status) => format!("router asks for a key ({status})"),
        RouterFailure::Status(status) => format!("router answers status {status}"),
        RouterFailure::Unreadable => "router answers no list of workers".to_owned(),
    }
}

/// Why a call to an engine has no status.
#[must_use]
pub const fn call_failure(failure: CallFailure) -> &'static str {
    match failure {
        CallFailure::Timeout => "no answer within the time-out",
        CallFailure::Refused => "no connection",
        CallFailure::TooLarge => "an answer that is too large",
        CallFailure::NotAllowed => "outside the allowed engine networks",
    }
}

/// What to do about an engine that refuses calls of the session lifecycle.
#[must_use]
pub const fn refusal_advice(abort: bool, status: u16) -> &'static str {
    match (abort, status) {
        (false, 401 | 403) => "Give its key with --engine-key-file.",
        (true, 401 | 403) => "Give its admin key with --engine-admin-key-file.",
        (_, 404 | 405 | 501) => "It has no such call.",
        _ => "Its log may tell why.",
    }
}
