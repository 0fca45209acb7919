//! Between the wire and the core, by hand, so that the two change apart.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use kvgate_api as wire;
use kvgate_core::close::{
    CallResult, CloseIntent, CloseMode, CloseReason, CloseStage, Target, TargetState,
};
use kvgate_core::command::{Acquire, CloseRequest};
use kvgate_core::decision::{BypassReason, CancelReason, EndHow, Scope, WaitReason};
use kvgate_core::effect::{
    Answer, CancelOutcome, LeaseView, Outcome, ReleaseOutcome, SessionView, TicketView, WaiterView,
};
use kvgate_core::ids::{EngineId, IdError, Label, SessionId, TicketId};
use kvgate_core::policy::ttl_in_range;
use kvgate_core::state::{EpochCause, EpochEntry};
use kvgate_core::tally::{CancelledHow, LeaseEnd, LocalBypass};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Span, TOKENS_MAX, Timestamp, Tokens};

use super::app::{App, HttpConfig, Shown};
use super::problem::Fault;
use crate::{clock, words};

/// Longest and usual time that a call stays open.
const WAIT_MAX_S: f64 = 60.0;
const WAIT_DEFAULT_S: f64 = 25.0;
/// Calls from here on end early, spread by ticket (TIC2).
const SPREAD_FROM: Duration = Duration::from_secs(10);
/// When to ask again after a call that did not wait.
const POLL_AFTER: Span = Span::from_secs(1);

const LOCAL_REASONS_MAX: usize = 16;
const LOCAL_REASON_BYTES_MAX: usize = 32;
const ENGINE_BYTES_MAX: usize = 2_048;

// ---- requests ----------------------------------------------------------------------------------

/// An acquire as it was asked for.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) acquire: Acquire,
    pub(super) wait: Duration,
    pub(super) ttl_clamped: bool,
    pub(super) local_bypasses: Vec<(LocalBypass, u64)>,
}

pub(super) fn asked(request: &wire::AcquireRequest, config: &HttpConfig) -> Result<Asked, Fault> {
    let ticket = ticket("/ticket_id", &request.ticket_id)?;
    let session = session_id("/session_id", &request.session_id)?;
    let (ttl, ttl_clamped) = match request.ttl_s {
        Some(seconds) => ttl(seconds),
        None => (config.default_ttl, false),
    };
    Ok(Asked {
        acquire: Acquire {
            ticket,
            session,
            sent: sent(request)?,
            scope: scope(request.scope),
            protected: request.protected,
            ttl,
            client: label("/client", request.client.as_deref())?,
            request_id: label("/request_id", request.request_id.as_deref())?,
            stays: true,
        },
        wait: wait(request.wait_s)?,
        ttl_clamped,
        local_bypasses: local_bypasses(request.local_bypasses.as_ref())?,
    })
}

/// TOK1: the two parts, or the sum done by the caller.
fn sent(request: &wire::AcquireRequest) -> Result<Sent, Fault> {
    match (
        request.prompt_tokens,
        request.max_new_tokens,
        request.reservation_tokens,
    ) {
        (Some(prompt), Some(max_new), None) => Ok(Sent::Parts {
            prompt: tokens("/prompt_tokens", prompt)?,
            max_new: tokens("/max_new_tokens", max_new)?,
        }),
        (None, None, Some(sum)) => Ok(Sent::Sum(tokens("/reservation_tokens", sum)?)),
        (None, Some(_), None) => Err(Fault::field(
            "/prompt_tokens",
            "missing beside max_new_tokens",
        )),
        (Some(_), None, None) => Err(Fault::field(
            "/max_new_tokens",
            "missing beside prompt_tokens",
        )),
        (None, None, None) => Err(Fault::field(
            "/reservation_tokens",
            "send prompt_tokens and max_new_tokens, or reservation_tokens",
        )),
        (_, _, Some(_)) => Err(Fault::field(
            "/reservation_tokens",
            "send either reservation_tokens, or prompt_tokens and max_new_tokens",
        )),
    }
}

/// TOK2.
fn tokens(pointer: &str, count: u64) -> Result<Tokens, Fault> {
    Tokens::new(count).ok_or_else(|| {
        Fault::field(
            pointer,
            format!("must be an integer from 0 to {TOKENS_MAX}"),
        )
    })
}

fn label(pointer: &str, text: Option<&str>) -> Result<Option<Label>, Fault> {
    text.map(|text| Label::new(text).map_err(|rule| Fault::id(pointer, rule)))
        .transpose()
}

/// How long a call that waits for a decision may stay open.
pub(super) fn wait(seconds: Option<f64>) -> Result<Duration, Fault> {
    open_for("/wait_s", seconds.unwrap_or(WAIT_DEFAULT_S))
}

/// How long a call may stay open.
pub(super) fn open_for(place: &str, seconds: f64) -> Result<Duration, Fault> {
    if (0.0..=WAIT_MAX_S).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(Fault::field(place, "must be a number from 0 to 60"))
    }
}

/// TIC2: calls of 10 s and more end up to a fifth early, so that callers that asked together do not
/// ask again together. The same ticket always ends at the same point.
pub(super) fn spread(wait: Duration, ticket: &str) -> Duration {
    if wait < SPREAD_FROM {
        return wait;
    }
    let mut hasher = DefaultHasher::new();
    ticket.hash(&mut hasher);
    let thousandths = u32::try_from(hasher.finish() % 200).unwrap_or(0);
    wait - wait * thousandths / 1_000
}

/// LEA1: brought into range; the second value says whether that changed it.
pub(super) fn ttl(seconds: f64) -> (Span, bool) {
    let millis = Duration::try_from_secs_f64(seconds.max(0.0))
        .ok()
        .and_then(|life| u64::try_from(life.as_millis()).ok())
        .unwrap_or(u64::MAX);
    ttl_in_range(Span::from_millis(millis))
}

/// What the caller decided by itself. Unknown reasons are counted together.
fn local_bypasses(
    counts: Option<&BTreeMap<String, u64>>,
) -> Result<Vec<(LocalBypass, u64)>, Fault> {
    let Some(counts) = counts else {
        return Ok(Vec::new());
    };
    if counts.len() > LOCAL_REASONS_MAX {
        return Err(Fault::field(
            "/local_bypasses",
            format!("at most {LOCAL_REASONS_MAX} reasons"),
        ));
    }
    let mut converted = Vec::with_capacity(counts.len());
    for (name, count) in counts {
        let good = (1..=LOCAL_REASON_BYTES_MAX).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        if !good {
            return Err(Fault::field(
                "/local_bypasses",
                "a reason has 1 to 32 letters a to z and _",
            ));
        }
        if *count > TOKENS_MAX {
            return Err(Fault::field(
                format!("/local_bypasses/{name}"),
                format!("must be an integer from 0 to {TOKENS_MAX}"),
            ));
        }
        converted.push((local_bypass(name), *count));
    }
    Ok(converted)
}

fn local_bypass(name: &str) -> LocalBypass {
    match name {
        "unreachable" => LocalBypass::Unreachable,
        "refused" => LocalBypass::Refused,
        "breaker" => LocalBypass::Breaker,
        "timeout" => LocalBypass::Timeout,
        _ => LocalBypass::Other,
    }
}

/// What a release tells of the work: checked, so that a client that reports nonsense is told now and
/// not when a later version makes use of it.
pub(super) fn check_usage(usage: &wire::ReleaseRequest) -> Result<(), Fault> {
    let counts = [
        ("/prompt_tokens", usage.prompt_tokens),
        ("/completion_tokens", usage.completion_tokens),
        ("/cached_tokens", usage.cached_tokens),
    ];
    for (pointer, count) in counts {
        count.map(|count| tokens(pointer, count)).transpose()?;
    }
    if let Some(engine) = &usage.engine
        && (!(1..=ENGINE_BYTES_MAX).contains(&engine.len()) || engine.chars().any(char::is_control))
    {
        return Err(Fault::field(
            "/engine",
            format!("must have 1 to {ENGINE_BYTES_MAX} bytes without control characters"),
        ));
    }
    Ok(())
}

/// A ticket in a body.
pub(super) fn ticket(pointer: &str, text: &str) -> Result<TicketId, Fault> {
    TicketId::new(text).map_err(|rule: IdError| Fault::id(pointer, rule))
}

/// A session in a body.
pub(super) fn session_id(pointer: &str, text: &str) -> Result<SessionId, Fault> {
    SessionId::new(text).map_err(|rule: IdError| Fault::id(pointer, rule))
}

/// A close as it was asked for.
pub(super) const fn close_request(session: SessionId, request: wire::CloseRequest) -> CloseRequest {
    CloseRequest {
        session,
        mode: match request.mode {
            wire::CloseMode::Join => CloseMode::Join,
            wire::CloseMode::Abort => CloseMode::Abort,
        },
        reason: match request.reason {
            None => None,
            Some(wire::EndedAs::Terminal) => Some(CloseReason::Terminal),
            Some(wire::EndedAs::Dropped) => Some(CloseReason::Dropped),
        },
    }
}

pub(super) const fn scope(scope: wire::Scope) -> Scope {
    match scope {
        wire::Scope::Train => Scope::Train,
        wire::Scope::Eval => Scope::Eval,
    }
}

// ---- answers -----------------------------------------------------------------------------------

/// What is true of the call besides the decision.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallFacts {
    pub(super) ttl_clamped: bool,
    /// The call waited its own time out, so that it may ask again at once.
    pub(super) waited_out: bool,
}

pub(super) fn acquire_answer(
    answer: Answer,
    facts: CallFacts,
    shown: &Shown,
) -> wire::AcquireAnswer {
    let ticket_id = answer.ticket.as_str().to_owned();
    // Only a bare cancel marker has no session.
    let session = answer.session.map(|session| session.as_str().to_owned());
    let reservation_tokens = answer.reservation.get();
    let epoch = answer.epoch.0;
    let ttl_clamped = facts.ttl_clamped;
    let waited_s = seconds(answer.waited);
    let repeated = answer.repeated;
    let session_reopened = answer.session_reopened;
    match answer.outcome {
        Outcome::Admit {
            lease,
            ttl,
            ends_at,
        } => wire::AcquireAnswer::Admit(wire::Admit {
            reason: wire::AdmitReason::CapacityAvailable,
            ticket_id,
            session_id: session.unwrap_or_default(),
            lease_id: lease.to_text(),
            reservation_tokens,
            epoch,
            ttl_s: seconds(ttl),
            ttl_clamped,
            expires_at: time(ends_at, shown),
            expires_in_s: seconds(ends_at.since(shown.now)),
            waited_s,
            repeated,
            session_reopened,
        }),
        Outcome::Bypass(reason) => wire::AcquireAnswer::Bypass(wire::Bypass {
            reason: bypass_reason(reason),
            ticket_id,
            session_id: session.unwrap_or_default(),
            reservation_tokens,
            epoch,
            ttl_clamped,
            waited_s,
            repeated,
            session_reopened,
        }),
        Outcome::Cancelled(reason) => wire::AcquireAnswer::Cancelled(wire::Cancelled {
            reason: cancel_reason(reason),
            ticket_id,
            session_id: session,
            reservation_tokens,
            epoch,
            ttl_clamped,
            waited_s,
            repeated,
            session_reopened,
        }),
        Outcome::Wait(status) => wire::AcquireAnswer::Wait(wire::Wait {
            reason: wait_reason(status.reason),
            ticket_id,
            session_id: session.unwrap_or_default(),
            reservation_tokens,
            epoch,
            ttl_clamped,
            position: status.position,
            tokens_ahead: status.tokens_ahead.get(),
            short_tokens: status.short.get(),
            age_s: seconds(status.age),
            bypass_in_s: seconds(status.bypass_in),
            poll_after_s: if facts.waited_out {
                0.0
            } else {
                seconds(POLL_AFTER.min(status.bypass_in))
            },
            claim_grace_s: seconds(shown.view.policy.claim_grace),
            session_reopened,
        }),
    }
}

/// DUR4: the store cannot promise anything, so the caller goes on without it. The core never hears of
/// it, so it is counted here.
pub(super) fn store_unavailable(asked: &Asked, app: &App) -> wire::AcquireAnswer {
    let acquire = &asked.acquire;
    let metrics = app.gate().stats().metrics();
    metrics.bypassed_without_store(acquire.scope);
    let view = app.gate().view();
    let reservation = acquire
        .sent
        .reservation(view.policy.expected_decode_cap)
        .unwrap_or(Tokens::MAX);
    wire::AcquireAnswer::Bypass(wire::Bypass {
        reason: wire::BypassReason::StoreUnavailable,
        ticket_id: acquire.ticket.as_str().to_owned(),
        session_id: acquire.session.as_str().to_owned(),
        reservation_tokens: reservation.get(),
        epoch: view.epoch.0,
        ttl_clamped: asked.ttl_clamped,
        waited_s: 0.0,
        repeated: false,
        session_reopened: false,
    })
}

pub(super) fn ticket_answer(
    ticket: &TicketId,
    view: TicketView,
    shown: &Shown,
) -> wire::TicketAnswer {
    let answer = match view {
        TicketView::Answer(answer) => acquire_answer(answer, CallFacts::default(), shown),
        TicketView::Ended(how) => {
            return wire::TicketAnswer::Ended(wire::Ended {
                reason: end_reason(how),
                ticket_id: ticket.as_str().to_owned(),
            });
        }
    };
    match answer {
        wire::AcquireAnswer::Admit(admit) => wire::TicketAnswer::Admit(admit),
        wire::AcquireAnswer::Bypass(bypass) => wire::TicketAnswer::Bypass(bypass),
        wire::AcquireAnswer::Cancelled(cancelled) => wire::TicketAnswer::Cancelled(cancelled),
        wire::AcquireAnswer::Wait(wait) => wire::TicketAnswer::Wait(wait),
    }
}

/// One ticket of a wait; `None` for one that still waits, which is left out.
pub(super) fn wait_result(answer: Answer, shown: &Shown) -> Option<wire::WaitResult> {
    match acquire_answer(answer, CallFacts::default(), shown) {
        wire::AcquireAnswer::Admit(admit) => Some(wire::WaitResult::Admit(admit)),
        wire::AcquireAnswer::Bypass(bypass) => Some(wire::WaitResult::Bypass(bypass)),
        wire::AcquireAnswer::Cancelled(cancelled) => Some(wire::WaitResult::Cancelled(cancelled)),
        wire::AcquireAnswer::Wait(_) => None,
    }
}

pub(super) fn lease(view: &LeaseView, ttl_clamped: bool, shown: &Shown) -> wire::Lease {
    let LeaseView {
        ticket,
        session,
        terms,
        lease,
    } = view;
    wire::Lease {
        lease_id: lease.id.to_text(),
        ticket_id: ticket.as_str().to_owned(),
        session_id: session.as_str().to_owned(),
        reservation_tokens: terms.reservation.get(),
        epoch: lease.epoch.0,
        ttl_s: seconds(lease.ttl),
        ttl_clamped,
        granted_at: time(lease.granted_at, shown),
        expires_at: time(lease.ends_at, shown),
        expires_in_s: seconds(lease.ends_at.since(shown.now)),
        scope: wire_scope(terms.scope),
        client: terms.client.as_ref().map(text),
        request_id: terms.request_id.as_ref().map(text),
    }
}

pub(super) fn waiter(view: &WaiterView) -> wire::Waiter {
    wire::Waiter {
        ticket_id: view.ticket.as_str().to_owned(),
        session_id: view.session.as_str().to_owned(),
        reservation_tokens: view.terms.reservation.get(),
        position: view.status.position,
        reason: wait_reason(view.status.reason),
        age_s: seconds(view.status.age),
        bypass_in_s: seconds(view.status.bypass_in),
        scope: wire_scope(view.terms.scope),
        client: view.terms.client.as_ref().map(text),
    }
}

/// CLO7: what is told is what engines answered; nothing is said of freed tokens.
pub(super) fn close(intent: &CloseIntent, shown: &Shown) -> wire::Close {
    let engines = intent.targets.iter();
    wire::Close {
        close_id: intent.id.to_text(),
        session_id: intent.session.as_str().to_owned(),
        mode: match intent.mode {
            CloseMode::Join => wire::CloseMode::Join,
            CloseMode::Abort => wire::CloseMode::Abort,
        },
        reason: intent.reason.map(close_reason),
        state: close_state(intent),
        requested_at: time(intent.requested_at, shown),
        engines: engines
            .map(|(engine, target)| close_engine(engine, target))
            .collect(),
        counts: close_counts(intent),
        failed: intent.has_failed(),
        not_aborted: intent.not_aborted.iter().map(text).collect(),
    }
}

fn close_engine(engine: &EngineId, target: &Target) -> wire::CloseEngine {
    let (last_status, last_error) = match &target.last {
        None => (None, None),
        Some(CallResult::Status { code, text }) => {
            (Some(*code), text.as_ref().map(|text| (**text).to_owned()))
        }
        Some(CallResult::Failed(failure)) => (None, Some(words::call_failure(*failure).to_owned())),
    };
    wire::CloseEngine {
        url: engine.as_str().to_owned(),
        state: close_engine_state(target.state),
        attempts: target.attempts,
        last_status,
        last_error,
    }
}

/// Of a finished close the core has counted all engines. While one runs, those that are listed come
/// to what an earlier delivery left: a retry takes up only the engines where it failed.
fn close_counts(intent: &CloseIntent) -> BTreeMap<wire::CloseEngineState, u32> {
    let ended = TargetState::ENDS.map(|state| (state, intent.count(state)));
    let listed = intent.targets.values().map(|target| (target.state, 1));
    let listed = listed.filter(|_| !intent.is_done());
    let mut counts = BTreeMap::new();
    for (state, count) in ended.into_iter().chain(listed) {
        if count > 0 {
            let sum: &mut u32 = counts.entry(close_engine_state(state)).or_default();
            *sum = sum.saturating_add(count);
        }
    }
    counts
}

pub(super) const fn close_state(intent: &CloseIntent) -> wire::CloseState {
    match intent.stage {
        CloseStage::Joining { .. } => wire::CloseState::Joining,
        CloseStage::Delivering { .. } => wire::CloseState::Delivering,
        CloseStage::Done { .. } => wire::CloseState::Done,
    }
}

const fn close_reason(reason: CloseReason) -> wire::CloseReason {
    match reason {
        CloseReason::Terminal => wire::CloseReason::Terminal,
        CloseReason::Dropped => wire::CloseReason::Dropped,
        CloseReason::Idle => wire::CloseReason::Idle,
    }
}

const fn close_engine_state(state: TargetState) -> wire::CloseEngineState {
    match state {
        TargetState::Pending => wire::CloseEngineState::Pending,
        TargetState::Delivered => wire::CloseEngineState::Delivered,
        TargetState::Refused => wire::CloseEngineState::Refused,
        TargetState::Unsupported => wire::CloseEngineState::Unsupported,
        TargetState::Restarted => wire::CloseEngineState::Restarted,
        TargetState::Superseded => wire::CloseEngineState::Superseded,
        TargetState::Failed => wire::CloseEngineState::Failed,
        TargetState::Gone => wire::CloseEngineState::Gone,
    }
}

/// The lifecycle feature is off.
pub(super) const CLOSE_DISABLED: wire::CloseDisabled = wire::CloseDisabled {
    state: wire::CloseOff::Disabled,
};

pub(super) fn session(view: &SessionView, shown: &Shown) -> wire::Session {
    let leases = view.leases.iter();
    let closes = view.closes.iter();
    wire::Session {
        session_id: view.id.as_str().to_owned(),
        last_use_at: view.last_use.map(|at| time(at, shown)),
        leases: leases.map(|view| lease(view, false, shown)).collect(),
        waiting: view.waiting.iter().map(waiter).collect(),
        closes: closes.map(|intent| close(intent, shown)).collect(),
    }
}

pub(super) fn epoch(entry: &EpochEntry, shown: &Shown) -> wire::EpochChange {
    let (cause, joined, left, engine) = match &entry.cause {
        EpochCause::First => (wire::EpochCause::First, None, None, None),
        EpochCause::MembersChanged { joined, left } => (
            wire::EpochCause::MembersChanged,
            Some(*joined),
            Some(*left),
            None,
        ),
        EpochCause::Restarted(engine) => (wire::EpochCause::Restarted, None, None, Some(engine)),
        EpochCause::WorkerIdChanged(engine) => {
            (wire::EpochCause::WorkerIdChanged, None, None, Some(engine))
        }
        EpochCause::Restored => (wire::EpochCause::Restored, None, None, None),
    };
    wire::EpochChange {
        epoch: entry.epoch.0,
        at: time(entry.at, shown),
        cause,
        joined,
        left,
        engine: engine.map(|engine| engine.as_str().to_owned()),
    }
}

fn text(label: &Label) -> String {
    label.as_str().to_owned()
}

/// A length of time in seconds.
pub(super) fn seconds(span: Span) -> f64 {
    Duration::from_millis(span.millis()).as_secs_f64()
}

/// A point of the line as it is shown: RFC 3339 in UTC with milliseconds (TIM1).
pub(super) fn time(at: Timestamp, shown: &Shown) -> String {
    clock::text(Timestamp::from_millis(shown.line.wall_millis(at)))
}

/// Parts per million as a ratio.
pub(super) fn ratio(share: Ppm) -> f64 {
    f64::from(share.get()) / f64::from(Ppm::ONE.get())
}

pub(super) const fn wire_scope(scope: Scope) -> wire::Scope {
    match scope {
        Scope::Train => wire::Scope::Train,
        Scope::Eval => wire::Scope::Eval,
    }
}

/// Why a request goes ahead without a lease, in the word of the answer.
#[must_use]
pub const fn bypass_word(reason: BypassReason) -> &'static str {
    match reason {
        BypassReason::Disabled => "disabled",
        BypassReason::OutOfScope => "out_of_scope",
        BypassReason::Protected => "protected",
        BypassReason::Degraded => "degraded",
        BypassReason::Oversize => "oversize",
        BypassReason::QueueFull => "queue_full",
        BypassReason::Aged => "aged",
    }
}

/// Why a request waits, in the word of the answer.
#[must_use]
pub const fn wait_word(reason: WaitReason) -> &'static str {
    match reason {
        WaitReason::BehindOlder => "behind_older",
        WaitReason::PressureGuard => "pressure_guard",
        WaitReason::CapacityExhausted => "capacity_exhausted",
    }
}

/// Why a ticket counts as cancelled.
pub(super) const fn cancelled_word(how: CancelledHow) -> &'static str {
    match how {
        CancelledHow::Withdrawn => "withdrawn",
        CancelledHow::SessionClosed => "session_closed",
        CancelledHow::Dropped => "dropped",
        CancelledHow::TakenBack => "taken_back",
    }
}

/// How a held lease ended.
pub(super) const fn lease_end_word(how: LeaseEnd) -> &'static str {
    match how {
        LeaseEnd::Released => "released",
        LeaseEnd::Expired => "expired",
        LeaseEnd::Revoked => "revoked",
        LeaseEnd::Cancelled => "cancelled",
    }
}

const fn bypass_reason(reason: BypassReason) -> wire::BypassReason {
    match reason {
        BypassReason::Disabled => wire::BypassReason::Disabled,
        BypassReason::OutOfScope => wire::BypassReason::OutOfScope,
        BypassReason::Protected => wire::BypassReason::Protected,
        BypassReason::Degraded => wire::BypassReason::Degraded,
        BypassReason::Oversize => wire::BypassReason::Oversize,
        BypassReason::QueueFull => wire::BypassReason::QueueFull,
        BypassReason::Aged => wire::BypassReason::Aged,
    }
}

const fn cancel_reason(reason: CancelReason) -> wire::CancelReason {
    match reason {
        CancelReason::Cancelled => wire::CancelReason::Cancelled,
        CancelReason::SessionClosed => wire::CancelReason::SessionClosed,
        CancelReason::TicketFinished => wire::CancelReason::TicketFinished,
    }
}

const fn wait_reason(reason: WaitReason) -> wire::WaitReason {
    match reason {
        WaitReason::BehindOlder => wire::WaitReason::BehindOlder,
        WaitReason::PressureGuard => wire::WaitReason::PressureGuard,
        WaitReason::CapacityExhausted => wire::WaitReason::CapacityExhausted,
    }
}

/// Only ends that are decided afresh are shown as ended (TIC5); the others answer in their own words.
const fn end_reason(how: EndHow) -> wire::EndReason {
    match how {
        EndHow::Revoked => wire::EndReason::Revoked,
        EndHow::Dropped => wire::EndReason::Dropped,
        EndHow::TakenBack => wire::EndReason::TakenBack,
        EndHow::Expired
        | EndHow::Bypassed(_)
        | EndHow::Released
        | EndHow::Cancelled
        | EndHow::SessionClosed => wire::EndReason::Expired,
    }
}

pub(super) const fn release_outcome(outcome: ReleaseOutcome) -> wire::ReleaseOutcome {
    match outcome {
        ReleaseOutcome::Released => wire::ReleaseOutcome::Released,
        ReleaseOutcome::AlreadyReleased => wire::ReleaseOutcome::AlreadyReleased,
    }
}

pub(super) const fn cancel_outcome(outcome: CancelOutcome) -> wire::CancelOutcome {
    match outcome {
        CancelOutcome::Withdrawn => wire::CancelOutcome::Withdrawn,
        CancelOutcome::Released => wire::CancelOutcome::Released,
        CancelOutcome::Bypassed => wire::CancelOutcome::Bypassed,
        CancelOutcome::AlreadyFinished => wire::CancelOutcome::AlreadyFinished,
        CancelOutcome::Unknown => wire::CancelOutcome::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TIC2: calls of 10 s and more end up to 20 % early, the same ticket always at the same point.
    #[test]
    fn tic2_long_calls_are_spread_by_ticket() {
        let short = Duration::from_millis(9_999);
        assert_eq!(spread(short, "t"), short);
        let long = Duration::from_secs(25);
        let ends: std::collections::BTreeSet<Duration> = (0..100)
            .map(|number| spread(long, &format!("t-{number}")))
            .collect();
        assert!(ends.iter().all(|end| *end <= long && *end >= long * 4 / 5));
        assert!(ends.len() > 20, "spread over {} points", ends.len());
        assert_eq!(spread(long, "t-1"), spread(long, "t-1"));
    }

    /// CLO5: the words of the wire are those of the rules.
    #[test]
    fn clo5_states_are_said_in_the_same_words() {
        let states = TargetState::ENDS.into_iter().chain([TargetState::Pending]);
        for state in states {
            let word = serde_json::to_value(close_engine_state(state)).unwrap();
            assert_eq!(word, format!("{state:?}").to_lowercase());
        }
    }

    /// LEA1: 1 s to 24 h; other numbers are brought into range, and the answer says so.
    #[test]
    fn lea1_lives_are_brought_into_range() {
        let cases = [
            (600.0, 600_000, false),
            (1.0, 1_000, false),
            (0.999, 1_000, true),
            (0.0, 1_000, true),
            (-5.0, 1_000, true),
            (86_400.0, 86_400_000, false),
            (86_401.0, 86_400_000, true),
            (1e300, 86_400_000, true),
        ];
        for (seconds, millis, clamped) in cases {
            assert_eq!(
                ttl(seconds),
                (Span::from_millis(millis), clamped),
                "{seconds}"
            );
        }
    }
}
