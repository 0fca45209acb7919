//! What went wrong with a reading or a call and what closes come to, in the words that pages, API,
//! logs and commands show.

use kvgate_core::close::{CallFailure, TargetState};
use kvgate_core::reading::{ReadFailure, RouterFailure};

use crate::fleet::close_support::CloseSupport;
use crate::fleet::rows::RouterKind;

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

/// What a session close comes to at an engine, and what to do about it.
#[must_use]
pub const fn close_support(support: CloseSupport) -> &'static str {
    match support {
        CloseSupport::Frees => "a session close frees the KV of the session",
        CloseSupport::Lowers => {
            "a session close lowers the priority of the session's KV; its memory is freed by eviction"
        }
        CloseSupport::Unclear => {
            "a session close has an effect; the version does not tell whether it frees KV at once"
        }
        CloseSupport::Odd => {
            "a session close may do nothing: this version needs --radix-eviction-policy priority, but \
             it names another policy"
        }
        CloseSupport::Absent => "it has no session close: use SGLang 0.5.15 or newer",
        CloseSupport::CacheOff => {
            "a session close does nothing: start it with --enable-session-radix-cache (before 0.5.17 \
             also with --radix-eviction-policy priority)"
        }
        CloseSupport::RadixOff => {
            "a session close does nothing: its prefix cache is off, start it without \
             --disable-radix-cache"
        }
        CloseSupport::Decode => {
            "a session close does nothing and need not: it only decodes, and the KV of sessions is \
             kept where their prompts are computed"
        }
        CloseSupport::Vllm => "vLLM has no session close; closes skip it",
        CloseSupport::Grpc => "engines that speak gRPC have no session close; closes skip it",
        CloseSupport::Router => {
            "it answers as a router, and closes are not sent there: name the engines behind it, or \
             name it by --router"
        }
    }
}

/// What a router does to sessions that loses their name on the way.
#[must_use]
pub fn drops_session_id(kind: RouterKind) -> String {
    format!(
        "The router is {}, which drops session_id on /generate: engines behind it cannot tell whose KV \
         they hold, and closes free nothing",
        kind.name()
    )
}

/// Where an engine stands in a close.
#[must_use]
pub const fn target(state: TargetState) -> &'static str {
    match state {
        TargetState::Pending => "pending",
        TargetState::Delivered => "delivered",
        TargetState::Refused => "refused",
        TargetState::Unsupported => "unsupported",
        TargetState::Restarted => "restarted",
        TargetState::Superseded => "superseded",
        TargetState::Failed => "failed",
        TargetState::Gone => "gone",
    }
}
