//! What went wrong with a reading or a call, what closes come to and what operators did, in the words
//! that pages, API, logs and commands show.

use kvgate_core::audit::AuditAct;
use kvgate_core::close::{CallFailure, CloseMode, TargetState};
use kvgate_core::decision::DegradedReason;
use kvgate_core::effect::CancelOutcome;
use kvgate_core::ids::SessionId;
use kvgate_core::policy::AdmissionScope;
use kvgate_core::reading::{ReadFailure, RouterFailure};
use kvgate_core::settings::{Hidden, Moved, Setting, SettingValue};
use kvgate_core::units::{Ppm, Tokens};

use crate::config::Origin;
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

/// Name of a setting that can be changed at run time, as the API has it.
#[must_use]
pub const fn setting(setting: Setting) -> &'static str {
    match setting {
        Setting::ProgramAdmission => "program_admission",
        Setting::SessionLifecycle => "session_lifecycle",
        Setting::Paused => "paused",
        Setting::Headroom => "headroom",
        Setting::PressureThreshold => "pressure_threshold",
        Setting::ExpectedDecodeCap => "expected_decode_cap",
        Setting::MaxWait => "max_wait_s",
        Setting::Scope => "scope",
    }
}

/// Value of a setting.
#[must_use]
pub fn setting_value(value: SettingValue) -> String {
    match value {
        SettingValue::Switch(true) => "on".to_owned(),
        SettingValue::Switch(false) => "off".to_owned(),
        SettingValue::Share(share) => {
            format!("{}", f64::from(share.get()) / f64::from(Ppm::ONE.get()))
        }
        SettingValue::Cap(Some(cap)) => cap.get().to_string(),
        SettingValue::Cap(None) => "none".to_owned(),
        SettingValue::Time(time) => {
            let (seconds, millis) = (time.millis() / 1_000, time.millis() % 1_000);
            let text = format!("{seconds}.{millis:03}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        SettingValue::Scope(AdmissionScope::Train) => "train".to_owned(),
        SettingValue::Scope(AdmissionScope::All) => "all".to_owned(),
    }
}

/// A configured value that is not in force.
#[must_use]
pub fn hidden_setting(hidden: &Hidden, origin: Origin) -> String {
    format!(
        "{} is {} ({}: {})",
        setting(hidden.setting),
        setting_value(hidden.in_force),
        origin.word(),
        setting_value(hidden.configured)
    )
}

/// What an operator did, in one sentence with its figures.
#[must_use]
pub fn audit_detail(act: &AuditAct) -> String {
    match act {
        AuditAct::SettingsChanged(moves) => format!("Set {}.", moved(moves)),
        AuditAct::SettingsReset(moves) => {
            format!("Returned to what is configured: {}.", moved(moves))
        }
        AuditAct::LeaseRevoked {
            lease,
            ticket,
            session,
            tokens,
        } => format!(
            "Revoked lease {lease} of {} tokens, held by ticket {:?}{}.",
            tokens.get(),
            ticket.as_str(),
            of_session(session.as_ref())
        ),
        AuditAct::TicketCancelled {
            ticket,
            session,
            tokens,
            outcome,
        } => format!(
            "Cancelled ticket {:?}{}, {}.",
            ticket.as_str(),
            of_session(session.as_ref()),
            cancelled(*outcome, *tokens)
        ),
        AuditAct::SessionClosed {
            session,
            close,
            mode,
        } => {
            let running = match mode {
                CloseMode::Join => "waiting for what still runs",
                CloseMode::Abort => "aborting what still runs",
            };
            format!(
                "Closed session {:?} with close {close}, {running}.",
                session.as_str()
            )
        }
        AuditAct::CloseRetried {
            close,
            session,
            engines,
        } => format!(
            "Sent close {close} of session {:?} once more, to {engines} {}.",
            session.as_str(),
            if *engines == 1 { "engine" } else { "engines" }
        ),
    }
}

fn moved(moves: &[Moved]) -> String {
    let one = |moved: &Moved| {
        let (name, from, to) = (
            setting(moved.setting),
            setting_value(moved.from),
            setting_value(moved.to),
        );
        match (moved.from == moved.to, moved.is_set) {
            (false, true) => format!("{name} from {from} to {to}"),
            (false, false) => format!("{name} from {from} back to the configured {to}"),
            (true, true) => format!("{name} to {to}, as it was, whatever is configured"),
            (true, false) => format!("{name} back to the configured {to}, as it was"),
        }
    };
    let moves: Vec<String> = moves.iter().map(one).collect();
    moves.join("; ")
}

fn of_session(session: Option<&SessionId>) -> String {
    session.map_or_else(String::new, |session| {
        format!(" of session {:?}", session.as_str())
    })
}

fn cancelled(outcome: CancelOutcome, tokens: Tokens) -> String {
    let tokens = tokens.get();
    match outcome {
        CancelOutcome::Withdrawn => format!("which waited for {tokens} tokens"),
        CancelOutcome::Released => format!("which held a lease of {tokens} tokens"),
        CancelOutcome::Bypassed => "which had bypassed".to_owned(),
        CancelOutcome::AlreadyFinished => "which had ended".to_owned(),
        CancelOutcome::Unknown => "which was not seen yet".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use kvgate_core::ids::{CloseId, CloseNo, TicketId};
    use kvgate_core::units::Span;

    use super::*;

    /// SET3: figures read as they were set.
    #[test]
    fn set3_values_read_as_they_were_set() {
        let share = |millionths| SettingValue::Share(Ppm::clamped(millionths));
        let time = |millis| SettingValue::Time(Span::from_millis(millis));
        for (value, expected) in [
            (share(850_000), "0.85"),
            (share(1), "0.000001"),
            (share(1_000_000), "1"),
            (time(0), "0"),
            (time(12_500), "12.5"),
            (time(30_000), "30"),
            (time(1), "0.001"),
            (SettingValue::Cap(None), "none"),
            (SettingValue::Cap(Tokens::new(4_096)), "4096"),
            (SettingValue::Switch(false), "off"),
            (SettingValue::Scope(AdmissionScope::All), "all"),
        ] {
            assert_eq!(setting_value(value), expected);
        }
    }

    /// SET3: each act is one sentence.
    #[test]
    fn set3_acts_are_told_in_a_sentence() {
        let close = CloseId {
            number: CloseNo(7),
            salt: 1,
        };
        let session = || SessionId::new("s").unwrap();
        let moved = |is_set| Moved {
            setting: Setting::Headroom,
            from: SettingValue::Share(Ppm::ONE),
            to: SettingValue::Share(Ppm::ONE),
            is_set,
        };
        let cancelled = |outcome| AuditAct::TicketCancelled {
            ticket: TicketId::new("t").unwrap(),
            session: Some(session()),
            tokens: Tokens::ZERO,
            outcome,
        };
        for (act, expected) in [
            (
                AuditAct::SettingsChanged(vec![moved(true), moved(false)]),
                "Set headroom to 1, as it was, whatever is configured; headroom back to the configured 1, as it was.",
            ),
            (
                cancelled(CancelOutcome::Bypassed),
                "Cancelled ticket \"t\" of session \"s\", which had bypassed.",
            ),
            (
                cancelled(CancelOutcome::AlreadyFinished),
                "Cancelled ticket \"t\" of session \"s\", which had ended.",
            ),
            (
                AuditAct::SessionClosed {
                    session: session(),
                    close,
                    mode: CloseMode::Abort,
                },
                "Closed session \"s\" with close 7-0000000000000001, aborting what still runs.",
            ),
            (
                AuditAct::CloseRetried {
                    close,
                    session: session(),
                    engines: 1,
                },
                "Sent close 7-0000000000000001 of session \"s\" once more, to 1 engine.",
            ),
        ] {
            assert_eq!(audit_detail(&act), expected);
        }
    }
}
