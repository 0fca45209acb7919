//! Settings that change while the gate runs (SET1, SET2).

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api as wire;
use kvgate_api::{Problem, Settings, SettingsChange};
use kvgate_core::policy::{AdmissionScope, PolicyError};
use kvgate_core::settings::{self, Change, Setting};
use kvgate_core::units::{TOKENS_MAX, Tokens};

use super::answer::{json, with_seq};
use super::app::App;
use super::audit::named;
use super::convert::{ratio, seconds};
use super::extract::{JsonBody, NoQuery};
use super::problem::Fault;
use crate::access::Caller;
use crate::config::{self, Origin, Origins};

/// The settings that can be changed while the gate runs, each with who set it.
#[utoipa::path(
    get,
    path = "/v1/settings",
    tag = "operation",
    operation_id = "settings",
    responses((status = 200, description = "As they are in force", body = Settings))
)]
pub(super) async fn read(State(app): State<App>, _: NoQuery) -> Response {
    let settings = &app.gate().view().settings;
    json(StatusCode::OK, &shown(settings, &app.config().origins))
}

/// Change settings: all values are checked together, and all change or none.
#[utoipa::path(
    patch,
    path = "/v1/settings",
    tag = "operation",
    operation_id = "change_settings",
    request_body = SettingsChange,
    responses(
        (status = 200, description = "As they are in force from now on, over restarts too", body = Settings),
        (status = 422, description = "`invalid_request`; nothing changed", body = Problem),
    )
)]
pub(super) async fn change(
    State(app): State<App>,
    caller: Caller,
    _: NoQuery,
    JsonBody(request): JsonBody<SettingsChange>,
) -> Result<Response, Fault> {
    let wanted = change_of(&request)?;
    let answered = app.gate().configure(named(&caller)?, wanted).await?;
    let settings = answered.value.map_err(refused)?;
    let body = shown(&settings, &app.config().origins);
    Ok(with_seq(json(StatusCode::OK, &body), answered.seq))
}

/// Every value that cannot be is named, not the first one only.
pub fn change_of(request: &SettingsChange) -> Result<settings::SettingsChange, Fault> {
    let mut faults = Vec::new();
    let share = |share| config::millionths(share).ok_or("must be above 0 and at most 1");
    let cap = |cap| match cap {
        wire::DecodeCap::None(_) => Ok(None),
        wire::DecodeCap::Tokens(tokens) => Tokens::new(tokens)
            .filter(|tokens| *tokens != Tokens::ZERO)
            .map(Some)
            .ok_or_else(|| format!("must be an integer from 1 to {TOKENS_MAX}, or \"none\"")),
    };
    let wait = |seconds| {
        config::max_wait("max_wait_s", seconds)
            .map_err(|_| "must be at least 0 and at most a year, in seconds")
    };
    let change = settings::SettingsChange {
        program_admission: same(request.program_admission),
        session_lifecycle: same(request.session_lifecycle),
        paused: same(request.paused),
        headroom: checked("/headroom", request.headroom, share, &mut faults),
        pressure_threshold: checked(
            "/pressure_threshold",
            request.pressure_threshold,
            share,
            &mut faults,
        ),
        expected_decode_cap: checked(
            "/expected_decode_cap",
            request.expected_decode_cap,
            cap,
            &mut faults,
        ),
        max_wait: checked("/max_wait_s", request.max_wait_s, wait, &mut faults),
        scope: match request.scope {
            wire::Change::Keep => Change::Keep,
            wire::Change::Configured => Change::Configured,
            wire::Change::Value(wire::AdmissionScope::Train) => {
                Change::Value(AdmissionScope::Train)
            }
            wire::Change::Value(wire::AdmissionScope::All) => Change::Value(AdmissionScope::All),
        },
    };
    let mut faults = faults.into_iter();
    match faults.next() {
        None => Ok(change),
        Some((pointer, detail)) => {
            let first = Fault::field(pointer, detail);
            Err(faults.fold(first, |fault, (pointer, detail)| fault.at(pointer, detail)))
        }
    }
}

const fn same<T: Copy>(change: wire::Change<T>) -> Change<T> {
    match change {
        wire::Change::Keep => Change::Keep,
        wire::Change::Configured => Change::Configured,
        wire::Change::Value(value) => Change::Value(value),
    }
}

fn checked<T: Copy, U, E: Into<String>>(
    pointer: &'static str,
    change: wire::Change<T>,
    check: impl Fn(T) -> Result<U, E>,
    faults: &mut Vec<(&'static str, String)>,
) -> Change<U> {
    match change {
        wire::Change::Keep => Change::Keep,
        wire::Change::Configured => Change::Configured,
        wire::Change::Value(value) => match check(value) {
            Ok(value) => Change::Value(value),
            Err(detail) => {
                faults.push((pointer, detail.into()));
                Change::Keep
            }
        },
    }
}

/// What does not fit together: admission is on, or would be, with a number that cannot be used.
#[must_use]
pub fn refused(error: PolicyError) -> Fault {
    let pointer = match error {
        PolicyError::Headroom => "/headroom",
        PolicyError::PressureThreshold => "/pressure_threshold",
        PolicyError::DecodeCap => "/expected_decode_cap",
        PolicyError::MaxWait => "/max_wait_s",
        // None of these can be changed while the gate runs.
        PolicyError::ClaimGrace
        | PolicyError::MaxWaiting
        | PolicyError::StaleAfter
        | PolicyError::CloseAttempts
        | PolicyError::CloseDeadline
        | PolicyError::SessionIdleClose => "",
    };
    Fault::field(pointer, error.to_string())
}

/// The settings in force, each with who set it.
#[must_use]
pub fn shown(settings: &settings::Settings, origins: &Origins) -> Settings {
    let policy = settings.effective();
    let origin = |setting: Setting| {
        if settings.overrides.has(setting) {
            return wire::SettingOrigin::RunTime;
        }
        match origins.of(setting) {
            Origin::Default => wire::SettingOrigin::Default,
            Origin::File => wire::SettingOrigin::File,
            Origin::Env => wire::SettingOrigin::Env,
            Origin::Flag => wire::SettingOrigin::Flag,
        }
    };
    Settings {
        program_admission: wire::Setting {
            value: policy.program_admission,
            origin: origin(Setting::ProgramAdmission),
        },
        session_lifecycle: wire::Setting {
            value: policy.session_lifecycle,
            origin: origin(Setting::SessionLifecycle),
        },
        paused: wire::Setting {
            value: policy.paused,
            origin: origin(Setting::Paused),
        },
        headroom: wire::Setting {
            value: ratio(policy.headroom),
            origin: origin(Setting::Headroom),
        },
        pressure_threshold: wire::Setting {
            value: ratio(policy.pressure_threshold),
            origin: origin(Setting::PressureThreshold),
        },
        expected_decode_cap: wire::Setting {
            value: policy
                .expected_decode_cap
                .map_or(wire::DecodeCap::None(wire::NoCap::None), |cap| {
                    wire::DecodeCap::Tokens(cap.get())
                }),
            origin: origin(Setting::ExpectedDecodeCap),
        },
        max_wait_s: wire::Setting {
            value: seconds(policy.max_wait),
            origin: origin(Setting::MaxWait),
        },
        scope: wire::Setting {
            value: match policy.scope {
                AdmissionScope::Train => wire::AdmissionScope::Train,
                AdmissionScope::All => wire::AdmissionScope::All,
            },
            origin: origin(Setting::Scope),
        },
    }
}
