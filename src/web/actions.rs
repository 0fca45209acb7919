//! What operators do from a page. `confirm` states the effect in figures and changes nothing; `act`
//! does it in one turn, under the name of who asked, and leads back to the page it came from.
//!
//! The front refuses what other sites send; here the right is checked, and that the way back is a page
//! of our own.

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::{FromRequest, Request, State};
use axum::http::header::{CACHE_CONTROL, LOCATION, REFERER};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use kvgate_api::ProblemCode;
use kvgate_core::audit::AuditAct;
use kvgate_core::close::{CloseIntent, CloseMode};
use kvgate_core::command::{Act, CloseRequest, Command, Operation, SLICE_MAX, Slice};
use kvgate_core::effect::{
    CancelOutcome, CloseReply, LeaseView, Outcome as Decision, Reply, RetryRefused, SessionView,
    TicketView,
};
use kvgate_core::ids::{CloseId, CloseNo, IdError, Label, LeaseId, RowNo, SessionId, TicketId};
use kvgate_core::settings::{Change, Settings, SettingsChange};
use kvgate_core::view::View;

use super::assets;
use super::format::{duration, grouped, percent};
use super::frame;
use super::page::{Outcome, TOLD, Web, caller_of, html};
use super::settings;
use crate::access::{Caller, Right};
use crate::gate::GateError;
use crate::http::{App, Fault, Fields, RequestId, read};
use crate::words;

/// Ids that one form may name.
const IDS_MAX: usize = 1_000;
/// Ids that a confirmation lists; the rest is counted.
const ROWS_SHOWN: usize = 100;
/// Longest address to go back to.
const BACK_MAX: usize = 2_048;

/// Pages that an act may lead back to.
const PAGES: &[&str] = &[
    "",
    ".",
    "./",
    "queue",
    "leases",
    "engines",
    "sessions",
    "closes",
    "decisions",
    "steps",
    "settings",
    "ticket",
    "lease",
    "session",
    "close",
    "search",
];

/// What somebody wishes to do.
enum Wish {
    Pause,
    Resume,
    Set(Box<SettingsChange>),
    Cancel(Vec<TicketId>),
    Revoke(Vec<LeaseId>),
    Close(Vec<SessionId>, CloseMode),
    Retry(Vec<CloseId>),
    RetryFailed,
}

/// What a wish comes to, before it is granted.
#[derive(Default)]
struct Effect {
    title: String,
    sentences: Vec<String>,
    /// What the rows are.
    kind: &'static str,
    /// Each with how it stands.
    rows: Vec<(String, String)>,
    more: Option<String>,
    /// `None` when there is nothing to do.
    button: Option<&'static str>,
    /// Work of others is cut short.
    grave: bool,
    asks_mode: bool,
}

#[derive(Template)]
#[template(path = "confirm.html")]
struct Confirm<'a> {
    assets: &'static str,
    effect: Effect,
    fields: Vec<(&'a str, &'a str)>,
    back: String,
    abort: bool,
}

/// `GET /confirm`, and `POST /confirm` for forms that name too much for an address.
pub(super) async fn confirm(State(web): State<Web>, request: Request) -> Response {
    match confirmed(&web, request).await {
        Ok(response) => response,
        Err(fault) => frame::fault_page(&fault),
    }
}

/// `POST /act`.
pub(super) async fn act(State(web): State<Web>, request: Request) -> Response {
    match acted(&web, request).await {
        Ok(response) => response,
        Err(fault) => frame::fault_page(&fault),
    }
}

async fn confirmed(web: &Web, request: Request) -> Result<Response, Fault> {
    let Asked {
        fields, wish, back, ..
    } = Asked::of(web.app(), request).await?;
    let page = Confirm {
        assets: assets::version(),
        effect: effect(web.app(), &wish).await?,
        fields: fields
            .iter()
            .filter(|(name, _)| !matches!(*name, "back" | "mode"))
            .collect(),
        back,
        abort: matches!(wish, Wish::Close(_, CloseMode::Abort)),
    };
    let Ok(text) = page.render() else {
        return Ok(StatusCode::INTERNAL_SERVER_ERROR.into_response());
    };
    let mut headers = HeaderMap::new();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(html(StatusCode::OK, headers, text))
}

async fn acted(web: &Web, request: Request) -> Result<Response, Fault> {
    let id = request.extensions().get::<RequestId>().cloned();
    let asked = Asked::of(web.app(), request).await?;
    let who = read::who(&asked.caller)?;
    let outcome = carry_out(web.app(), who, &asked.wish).await;
    // What failed half-way may have changed something too.
    web.acted();
    let outcome = outcome?;
    let mut location = asked.back;
    if let Some(id) = id {
        web.keep(id.as_str(), outcome);
        let joint = if location.contains('?') { '&' } else { '?' };
        location.push_str(&format!("{joint}{TOLD}={}", id.as_str()));
    }
    let location = HeaderValue::from_str(&location)
        .map_err(|_| Fault::field("/back", "must be a page of this service"))?;
    let mut headers = HeaderMap::new();
    headers.insert(LOCATION, location);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok((StatusCode::SEE_OTHER, headers).into_response())
}

// ---- what is asked -----------------------------------------------------------------------------

struct Asked {
    caller: Caller,
    fields: Fields,
    wish: Wish,
    /// A relative address of one of our pages.
    back: String,
}

impl Asked {
    async fn of(app: &App, request: Request) -> Result<Self, Fault> {
        let (head, body) = request.into_parts();
        let caller = caller_of(&head);
        if !caller.may(Right::Admin) {
            return Err(Fault::new(
                ProblemCode::Forbidden,
                "This needs the right `admin`. Log in with a token that has it.",
            ));
        }
        let came_from = head.headers.get(REFERER).cloned();
        let fields = Fields::from_request(Request::from_parts(head, body), &()).await?;
        let wish = wish(app, &fields)?;
        let back = match fields.get("back") {
            Some(back) => own_page(back)
                .ok_or_else(|| Fault::field("/back", "must be a page of this service"))?,
            None => came_from
                .as_ref()
                .and_then(|from| own_page(from.to_str().ok()?.rsplit_once('/')?.1))
                .unwrap_or_else(|| home(&wish).to_owned()),
        };
        Ok(Self {
            caller,
            fields,
            wish,
            back,
        })
    }
}

fn wish(app: &App, fields: &Fields) -> Result<Wish, Fault> {
    Ok(match fields.get("do") {
        Some("pause") => Wish::Pause,
        Some("resume") => Wish::Resume,
        Some("set") => Wish::Set(Box::new(settings::change(
            fields,
            &app.gate().view().settings,
        )?)),
        Some("cancel") => Wish::Cancel(ids(fields, "ticket", |text| {
            TicketId::new(text).map_err(|rule| Fault::id("/ticket", rule))
        })?),
        Some("revoke") => Wish::Revoke(ids(fields, "lease", |text| {
            LeaseId::parse(text).ok_or_else(|| {
                Fault::new(
                    ProblemCode::LeaseNotFound,
                    "No lease with this id was ever issued.",
                )
            })
        })?),
        Some("close") => {
            let sessions = ids(fields, "session", |text| {
                SessionId::new(text).map_err(|rule: IdError| Fault::id("/session", rule))
            })?;
            let mode = match fields.get("mode") {
                None | Some("join") => CloseMode::Join,
                Some("abort") => CloseMode::Abort,
                Some(_) => return Err(Fault::field("/mode", "must be join or abort")),
            };
            Wish::Close(sessions, mode)
        }
        Some("retry") if fields.get("all") == Some("failed") || fields.get("failed").is_some() => {
            Wish::RetryFailed
        }
        Some("retry") => Wish::Retry(ids(fields, "close", |text| {
            CloseId::parse(text).ok_or_else(|| {
                Fault::new(
                    ProblemCode::CloseNotFound,
                    "No close with this id is known.",
                )
            })
        })?),
        _ => {
            return Err(Fault::field(
                "/do",
                "must be pause, resume, set, cancel, revoke, close or retry",
            ));
        }
    })
}

/// The ids of a form, each once. `id` stands for the name of its kind.
fn ids<T: Ord + Clone>(
    fields: &Fields,
    name: &str,
    parse: impl Fn(&str) -> Result<T, Fault>,
) -> Result<Vec<T>, Fault> {
    let mut ids = Vec::new();
    let mut seen = BTreeSet::new();
    for text in fields.all(name).chain(fields.all("id")) {
        let id = parse(text)?;
        if seen.insert(id.clone()) {
            ids.push(id);
        }
        if ids.len() > IDS_MAX {
            return Err(Fault::field(
                format!("/{name}"),
                format!("must stand at most {IDS_MAX} times; do the rest after that"),
            ));
        }
    }
    if ids.is_empty() {
        return Err(Fault::field(
            format!("/{name}"),
            "must stand at least once: choose a row first",
        ));
    }
    Ok(ids)
}

/// An address that leads to a page of ours and nowhere else: the name of one, and its query.
fn own_page(text: &str) -> Option<String> {
    let (name, query) = text.split_once('?').unwrap_or((text, ""));
    let harmless =
        |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'<' | b'>' | b'\\');
    let fits = text.len() <= BACK_MAX && query.bytes().all(harmless) && !query.contains('#');
    if !fits || !PAGES.contains(&name) {
        return None;
    }
    let name = if name.is_empty() || name == "." {
        "./"
    } else {
        name
    };
    let told = |pair: &&str| pair.split('=').next() != Some(TOLD);
    let query: Vec<&str> = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .filter(told)
        .collect();
    Some(if query.is_empty() {
        name.to_owned()
    } else {
        format!("{name}?{}", query.join("&"))
    })
}

/// Where an act is seen.
const fn home(wish: &Wish) -> &'static str {
    match wish {
        Wish::Pause | Wish::Resume => "./",
        Wish::Set(_) => "settings",
        Wish::Cancel(_) => "queue",
        Wish::Revoke(_) => "leases",
        Wish::Close(..) => "sessions",
        Wish::Retry(_) | Wish::RetryFailed => "closes",
    }
}

// ---- the effect in figures ---------------------------------------------------------------------

async fn effect(app: &App, wish: &Wish) -> Result<Effect, Fault> {
    match wish {
        Wish::Pause => Ok(pausing(app)),
        Wish::Resume => Ok(resuming(app)),
        Wish::Set(change) => setting(app, change),
        Wish::Cancel(tickets) => cancelling(app, tickets).await,
        Wish::Revoke(leases) => revoking(app, leases).await,
        Wish::Close(sessions, _) => closing(app, sessions).await,
        Wish::Retry(closes) => retrying(app, closes).await,
        Wish::RetryFailed => {
            let failed = failed(app).await?;
            retrying(app, &failed).await
        }
    }
}

fn pausing(app: &App) -> Effect {
    let view = app.gate().view();
    let mut effect = Effect {
        title: "Pause the gate".to_owned(),
        ..Effect::default()
    };
    if view.policy.paused {
        effect
            .sentences
            .push("The gate is paused already.".to_owned());
        return effect;
    }
    effect.sentences = vec![
        going_on(&view),
        "New acquires go on without a lease until the gate is resumed.".to_owned(),
        staying(&view),
        "The gate stays paused over a restart.".to_owned(),
    ];
    effect.button = Some("Pause gate");
    effect
}

/// What happens to waiters when admission does not apply any more.
fn going_on(view: &View) -> String {
    match view.waiting {
        0 => "Nobody waits now.".to_owned(),
        1 => format!(
            "The one that waits goes on at once without a lease: {} tokens.",
            grouped(view.waiting_tokens.get())
        ),
        many => format!(
            "The {} that wait go on at once without a lease: {} tokens.",
            grouped(many),
            grouped(view.waiting_tokens.get())
        ),
    }
}

fn staying(view: &View) -> String {
    match view.leases {
        0 => "No lease is held.".to_owned(),
        leases => format!(
            "{} with {} tokens {} until given back or expired.",
            counted(leases, "held lease", "held leases"),
            grouped(view.reserved.get()),
            if leases == 1 { "stays" } else { "stay" },
        ),
    }
}

fn resuming(app: &App) -> Effect {
    let view = app.gate().view();
    let mut effect = Effect {
        title: "Resume the gate".to_owned(),
        ..Effect::default()
    };
    if !view.policy.paused {
        effect.sentences.push("The gate is not paused.".to_owned());
        return effect;
    }
    effect.sentences.push(if view.measure.degraded.is_some() {
        "There is no usable ceiling now: acquires go on without a lease until there is one."
            .to_owned()
    } else {
        format!(
            "New acquires are admitted while they fit: {} of {} tokens are available.",
            grouped(view.available().get()),
            grouped(view.measure.ceiling.get())
        )
    });
    effect.sentences.push(
        "Requests that went on without a lease meanwhile stay so; the ledger does not know of them.".to_owned(),
    );
    effect.button = Some("Resume gate");
    effect
}

fn setting(app: &App, change: &SettingsChange) -> Result<Effect, Fault> {
    let view = app.gate().view();
    let changed = view
        .settings
        .changed(change)
        .map_err(read::settings_refused)?;
    let moves = view.settings.moves(&changed.overrides);
    let mut effect = Effect {
        title: "Change settings".to_owned(),
        kind: "Setting",
        ..Effect::default()
    };
    if moves.is_empty() {
        effect
            .sentences
            .push("Nothing is to be changed: all values are as they are in force.".to_owned());
        return Ok(effect);
    }
    effect.rows = moves.iter().map(settings::moved).collect();
    effect.sentences = settings_effects(&view, &changed);
    effect
        .sentences
        .push("It holds from now on, over restarts too.".to_owned());
    effect.button = Some("Change settings");
    Ok(effect)
}

fn settings_effects(view: &View, changed: &Settings) -> Vec<String> {
    let mut sentences = Vec::new();
    let (before, after) = (&view.policy, changed.effective());
    let applied = |policy: &kvgate_core::policy::Policy| policy.program_admission && !policy.paused;
    if applied(before) && !applied(&after) {
        sentences.push(going_on(view));
        sentences.push(staying(view));
    }
    if after.headroom != before.headroom {
        let ceiling = view.measure.capacity.share(after.headroom);
        sentences.push(format!(
            "The ceiling goes from {} to {} tokens; {} are reserved.",
            grouped(view.measure.ceiling.get()),
            grouped(ceiling.get()),
            grouped(view.reserved.get())
        ));
        if view.reserved > ceiling {
            sentences.push(format!(
                "That is {} more than the new ceiling: nothing is admitted until leases have ended for so much.",
                grouped(view.reserved.saturating_sub(ceiling).get())
            ));
        }
    }
    if after.pressure_threshold != before.pressure_threshold
        && let Some((worst, engine)) = &view.measure.pressure
    {
        let holds = if *worst >= after.pressure_threshold {
            "new work waits"
        } else {
            "nothing waits for it"
        };
        sentences.push(format!(
            "The worst engine, {}, is at {}: {holds}.",
            engine.as_str(),
            percent(*worst)
        ));
    }
    if after.max_wait != before.max_wait
        && let Some(oldest) = view.oldest_waiter
    {
        let age = view.now.since(oldest);
        sentences.push(format!(
            "The oldest of {} has waited for {}: {}.",
            counted(view.waiting, "waiter", "waiters"),
            duration(age),
            if age >= after.max_wait {
                "it goes on at once without a lease"
            } else {
                "it waits on"
            },
        ));
    }
    if before.session_lifecycle && !after.session_lifecycle {
        sentences.push(format!(
            "New session closes are refused; {} go on to their end.",
            counted(view.closes_pending, "running close", "running closes")
        ));
    }
    sentences
}

async fn cancelling(app: &App, tickets: &[TicketId]) -> Result<Effect, Fault> {
    let commands = tickets.iter().cloned().map(Command::ReadTicket);
    let replies = batch(app, commands.collect()).await?;
    let (mut waiting, mut wanted, mut held, mut freed, mut others, mut unknown) =
        (0, 0, 0, 0, 0, 0);
    let mut rows = Vec::new();
    for (ticket, reply) in tickets.iter().zip(replies) {
        let Reply::Ticket(known) = reply? else {
            continue;
        };
        let now = match known {
            Some(TicketView::Answer(answer)) => {
                let tokens = answer.reservation.get();
                match answer.outcome {
                    Decision::Wait(status) => {
                        waiting += 1;
                        wanted += tokens;
                        format!(
                            "waits as #{}, {} tokens",
                            grouped(status.position),
                            grouped(tokens)
                        )
                    }
                    Decision::Admit { .. } => {
                        held += 1;
                        freed += tokens;
                        format!("holds {} tokens", grouped(tokens))
                    }
                    Decision::Bypass(_) => {
                        others += 1;
                        "went on without a lease".to_owned()
                    }
                    Decision::Cancelled(_) => {
                        others += 1;
                        "is finished".to_owned()
                    }
                }
            }
            Some(TicketView::Ended(_)) => {
                others += 1;
                "has ended".to_owned()
            }
            None => {
                unknown += 1;
                "is not known".to_owned()
            }
        };
        rows.push((ticket.as_str().to_owned(), now));
    }
    let mut sentences = Vec::new();
    if waiting > 0 {
        sentences.push(format!(
            "{} withdrawn from the queue: {} tokens wanted less.",
            counted(waiting, "ticket is", "tickets are"),
            grouped(wanted)
        ));
    }
    if held > 0 {
        sentences.push(format!(
            "{} given back: releases {} tokens, while the work itself may run on at its engine.",
            counted(held, "lease is", "leases are"),
            grouped(freed)
        ));
    }
    if waiting + held > 0 {
        sentences.push(next(app, freed, &tickets.iter().collect()).await);
        sentences.push("Their callers are told not to start.".to_owned());
    }
    if others > 0 {
        sentences.push(format!(
            "{} already: a later acquire with the same ticket is refused.",
            counted(
                others,
                "ticket is decided or has ended",
                "tickets are decided or have ended"
            )
        ));
    }
    if unknown > 0 {
        sentences.push(format!(
            "{} not known: a marker stays, so that a late acquire is refused.",
            counted(unknown, "ticket is", "tickets are")
        ));
    }
    Ok(listed(Effect {
        title: named(
            "Cancel ticket",
            tickets.first().map(TicketId::as_str),
            tickets.len(),
            "Cancel",
            "tickets",
        ),
        sentences,
        kind: "Ticket",
        rows,
        button: Some(if tickets.len() == 1 {
            "Cancel ticket"
        } else {
            "Cancel tickets"
        }),
        grave: true,
        ..Effect::default()
    }))
}

async fn revoking(app: &App, leases: &[LeaseId]) -> Result<Effect, Fault> {
    let commands = leases.iter().copied().map(Command::ReadLease);
    let replies = batch(app, commands.collect()).await?;
    let (mut held, mut freed, mut gone) = (0, 0, 0);
    let mut rows = Vec::new();
    for (lease, reply) in leases.iter().zip(replies) {
        let Reply::Lease(known) = reply? else {
            continue;
        };
        let now = match known {
            Ok(view) => {
                held += 1;
                freed += view.terms.reservation.get();
                lease_in_words(&view)
            }
            Err(why) => {
                gone += 1;
                why.to_string()
            }
        };
        rows.push((lease.to_text(), now));
    }
    let view = app.gate().view();
    let mut sentences = Vec::new();
    if held > 0 {
        sentences.push(format!(
            "Releases {} of {} reserved tokens.",
            grouped(freed),
            grouped(view.reserved.get())
        ));
        sentences.push(next(app, freed, &BTreeSet::new()).await);
        sentences.push(
            "The work itself is not stopped: until it ends, its engine holds tokens that nobody has reserved.".to_owned(),
        );
    }
    if gone > 0 {
        sentences.push(format!(
            "{} held any more.",
            counted(gone, "lease is not", "leases are not")
        ));
    }
    let one = rows.first().map(|(id, _)| id.clone());
    Ok(listed(Effect {
        title: named(
            "Revoke lease",
            one.as_deref(),
            leases.len(),
            "Revoke",
            "leases",
        ),
        sentences,
        kind: "Lease",
        rows,
        button: (held > 0).then_some(if leases.len() == 1 {
            "Revoke lease"
        } else {
            "Revoke leases"
        }),
        grave: true,
        ..Effect::default()
    }))
}

fn lease_in_words(view: &LeaseView) -> String {
    format!(
        "{} tokens of ticket {} in session {}",
        grouped(view.terms.reservation.get()),
        view.ticket.as_str(),
        view.session.as_str()
    )
}

async fn closing(app: &App, sessions: &[SessionId]) -> Result<Effect, Fault> {
    let view = app.gate().view();
    let title = named(
        "Close session",
        sessions.first().map(SessionId::as_str),
        sessions.len(),
        "Close",
        "sessions",
    );
    if !view.policy.session_lifecycle {
        return Ok(Effect {
            title,
            sentences: vec![
                "Session closes are off: nothing would be kept, and no engine would be told."
                    .to_owned(),
            ],
            ..Effect::default()
        });
    }
    let commands = sessions.iter().cloned().map(Command::ReadSession);
    let replies = batch(app, commands.collect()).await?;
    let (mut leases, mut tokens, mut waiting, mut wanted, mut open) = (0, 0, 0, 0, 0);
    let mut rows = Vec::new();
    for (session, reply) in sessions.iter().zip(replies) {
        let Reply::Session(known) = reply? else {
            continue;
        };
        let Some(known) = known else {
            rows.push((session.as_str().to_owned(), "is not known".to_owned()));
            continue;
        };
        let held = sum(
            &known,
            |view| &view.leases,
            |lease| lease.terms.reservation.get(),
        );
        let queued = sum(
            &known,
            |view| &view.waiting,
            |waiter| waiter.terms.reservation.get(),
        );
        leases += known.leases.len();
        tokens += held;
        waiting += known.waiting.len();
        wanted += queued;
        open += known.closes.iter().filter(|close| !close.is_done()).count();
        rows.push((
            session.as_str().to_owned(),
            format!(
                "{} with {} tokens, {} waiting",
                counted(known.leases.len(), "lease", "leases"),
                grouped(held),
                known.waiting.len()
            ),
        ));
    }
    let mut sentences = Vec::new();
    if waiting > 0 {
        sentences.push(format!(
            "{} withdrawn from the queue: {} tokens wanted less.",
            counted(waiting, "waiter is", "waiters are"),
            grouped(wanted)
        ));
    }
    sentences.push(if leases > 0 {
        format!(
            "{} with {} tokens {} held: the engines are told when the last one has ended.",
            counted(leases, "lease", "leases"),
            grouped(tokens),
            if leases == 1 { "is" } else { "are" }
        )
    } else {
        "No lease is held: the engines are told at once.".to_owned()
    });
    sentences.push(format!(
        "{} told to release the KV; what they free at once depends on their version.",
        counted(view.engines.len(), "engine is", "engines are")
    ));
    if open > 0 {
        sentences.push(format!(
            "{} already: it is joined.",
            counted(open, "close runs", "closes run")
        ));
    }
    Ok(listed(Effect {
        title,
        sentences,
        kind: "Session",
        rows,
        button: Some(if sessions.len() == 1 {
            "Close session"
        } else {
            "Close sessions"
        }),
        grave: true,
        asks_mode: leases > 0,
        ..Effect::default()
    }))
}

fn sum<T>(
    view: &SessionView,
    of: impl Fn(&SessionView) -> &Vec<T>,
    tokens: impl Fn(&T) -> u64,
) -> u64 {
    of(view).iter().map(tokens).fold(0, u64::saturating_add)
}

async fn retrying(app: &App, closes: &[CloseId]) -> Result<Effect, Fault> {
    let title = match closes {
        [one] => format!("Retry close {}", one.to_text()),
        many => format!("Retry {}", counted(many.len(), "close", "closes")),
    };
    if closes.is_empty() {
        return Ok(Effect {
            title,
            sentences: vec!["No close that is remembered has failed.".to_owned()],
            ..Effect::default()
        });
    }
    let commands = closes.iter().copied().map(Command::ReadClose);
    let replies = batch(app, commands.collect()).await?;
    let (mut again, mut engines, mut superseded) = (0, 0, 0);
    let mut rows = Vec::new();
    for (close, reply) in closes.iter().zip(replies) {
        let Reply::ReadClose(known) = reply? else {
            continue;
        };
        let now = match known {
            None => "is not known any more".to_owned(),
            Some(close) if close.reopened.is_some() => {
                superseded += 1;
                format!("session {} was used anew since", close.session.as_str())
            }
            Some(close) => {
                let retried = retried(&close);
                again += usize::from(retried > 0);
                engines += retried;
                format!(
                    "session {}, {} to be told",
                    close.session.as_str(),
                    counted(retried, "engine", "engines")
                )
            }
        };
        rows.push((close.to_text(), now));
    }
    let mut sentences = vec![format!(
        "{} sent once more, to {}.",
        counted(again, "close is", "closes are"),
        counted(engines, "engine in all", "engines in all")
    )];
    if superseded > 0 {
        sentences.push(format!(
            "{} left alone: a late close would hit the newer use of the session.",
            counted(superseded, "close is", "closes are")
        ));
    }
    if !app.gate().view().policy.session_lifecycle {
        sentences = vec!["Session closes are off: nothing is sent.".to_owned()];
        again = 0;
    }
    Ok(listed(Effect {
        title,
        sentences,
        kind: "Close",
        rows,
        button: (again > 0).then_some(if closes.len() == 1 {
            "Retry close"
        } else {
            "Retry closes"
        }),
        ..Effect::default()
    }))
}

/// Engines that a retry sends to, as far as they are named.
fn retried(close: &CloseIntent) -> usize {
    let targets = close.targets.values();
    targets.filter(|target| target.state.is_retried()).count()
}

/// Failed closes that can be sent again, newest first, as many as one form may name.
async fn failed(app: &App) -> Result<Vec<CloseId>, Fault> {
    let mut failed = Vec::new();
    let mut from = CloseNo(u64::MAX);
    loop {
        let slice = Slice {
            from,
            rows: SLICE_MAX,
        };
        let page = app.gate().list_closes(slice).await?;
        let matching = page
            .items
            .iter()
            .filter(|close| close.has_failed() && close.reopened.is_none());
        failed.extend(matching.map(|close| close.id));
        let last = page
            .items
            .last()
            .filter(|_| page.more && failed.len() < IDS_MAX);
        match last.and_then(|close| close.id.number.0.checked_sub(1)) {
            Some(next) => from = CloseNo(next),
            None => break,
        }
        tokio::task::yield_now().await;
    }
    failed.truncate(IDS_MAX);
    Ok(failed)
}

/// Who is next when so many tokens are given back and these tickets are gone, and whether it fits.
async fn next(app: &App, freed: u64, gone: &BTreeSet<&TicketId>) -> String {
    let slice = Slice {
        from: RowNo(0),
        rows: SLICE_MAX,
    };
    let Ok(queue) = app.gate().list_queue(slice).await else {
        return "The queue cannot be read now.".to_owned();
    };
    let Some(next) = queue
        .items
        .iter()
        .find(|waiter| !gone.contains(&waiter.ticket))
    else {
        return if queue.more {
            "Others wait behind them.".to_owned()
        } else {
            "Nobody waits for the tokens.".to_owned()
        };
    };
    let view = app.gate().view();
    let ticket = next.ticket.as_str();
    let reserved = view.reserved.get().saturating_sub(freed);
    let needed = reserved.saturating_add(next.terms.reservation.get());
    let ceiling = view.measure.ceiling.get();
    let pressed = view
        .measure
        .pressure
        .as_ref()
        .is_some_and(|(worst, _)| *worst >= view.policy.pressure_threshold);
    if needed > ceiling {
        format!(
            "Ticket {ticket} is next and is {} tokens short then.",
            grouped(needed - ceiling)
        )
    } else if pressed || view.paced {
        format!("Ticket {ticket} is next and fits, but waits for the pressure to fall.")
    } else {
        format!("Ticket {ticket} is next and fits.")
    }
}

fn listed(mut effect: Effect) -> Effect {
    let beyond = effect.rows.len().saturating_sub(ROWS_SHOWN);
    // One id stands in the title already.
    if effect.rows.len() == 1
        && let Some((_, now)) = effect.rows.pop()
    {
        effect
            .sentences
            .insert(0, format!("{}.", capitalised(&now)));
    }
    effect.rows.truncate(ROWS_SHOWN);
    effect.more = (beyond > 0).then(|| format!("and {} more", grouped(wide(beyond))));
    effect
}

// ---- the act -----------------------------------------------------------------------------------

async fn carry_out(app: &App, who: Label, wish: &Wish) -> Result<Outcome, Fault> {
    match wish {
        Wish::Pause => {
            let change = SettingsChange {
                paused: Change::Value(true),
                ..SettingsChange::default()
            };
            configure(app, who, change).await
        }
        Wish::Resume => {
            let change = SettingsChange {
                paused: if app.gate().view().settings.configured.paused {
                    Change::Value(false)
                } else {
                    Change::Configured
                },
                ..SettingsChange::default()
            };
            configure(app, who, change).await
        }
        Wish::Set(change) => configure(app, who, (**change).clone()).await,
        Wish::Cancel(tickets) => {
            let acts = tickets.iter().cloned().map(Act::Cancel);
            let replies = operate(app, who, acts).await?;
            Ok(told(replies, |reply| match reply {
                Reply::Cancel(outcome) => cancelled(outcome),
                _ => UNEXPECTED,
            }))
        }
        Wish::Revoke(leases) => {
            let acts = leases.iter().copied().map(Act::Revoke);
            let replies = operate(app, who, acts).await?;
            Ok(told(replies, |reply| match reply {
                Reply::Revoke(Ok(())) => ("lease revoked", "leases revoked", false),
                Reply::Revoke(Err(_)) => (
                    "lease was not held any more",
                    "leases were not held any more",
                    true,
                ),
                _ => UNEXPECTED,
            }))
        }
        Wish::Close(sessions, mode) => {
            let acts = sessions.iter().cloned().map(|session| {
                Act::Close(CloseRequest {
                    session,
                    mode: *mode,
                    reason: None,
                })
            });
            let replies = operate(app, who, acts).await?;
            Ok(told(replies, |reply| match reply {
                Reply::Close(CloseReply::Taken(_)) => {
                    ("session is closed", "sessions are closed", false)
                }
                Reply::Close(CloseReply::Full) => (
                    "session not closed: too many closes are open",
                    "sessions not closed: too many closes are open",
                    true,
                ),
                Reply::Close(CloseReply::Disabled) => (
                    "session not closed: session closes are off",
                    "sessions not closed: session closes are off",
                    true,
                ),
                _ => UNEXPECTED,
            }))
        }
        Wish::Retry(closes) => retry(app, who, closes).await,
        Wish::RetryFailed => {
            let failed = failed(app).await?;
            retry(app, who, &failed).await
        }
    }
}

async fn configure(app: &App, who: Label, change: SettingsChange) -> Result<Outcome, Fault> {
    let before = app.gate().view();
    let answered = app.gate().configure(who, change).await?;
    let after = answered.value.map_err(read::settings_refused)?;
    let moves = before.settings.moves(&after.overrides);
    Ok(Outcome {
        text: if moves.is_empty() {
            "Nothing was changed: all values were as wished.".to_owned()
        } else {
            words::audit_detail(&AuditAct::SettingsChanged(moves))
        },
        bad: false,
    })
}

async fn retry(app: &App, who: Label, closes: &[CloseId]) -> Result<Outcome, Fault> {
    let acts = closes.iter().copied().map(Act::RetryClose);
    let replies = operate(app, who, acts).await?;
    Ok(told(replies, |reply| match reply {
        Reply::RetryClose(Ok(_)) => (
            "close is sent once more",
            "closes are sent once more",
            false,
        ),
        Reply::RetryClose(Err(RetryRefused::NotFound)) => (
            "close was not known any more",
            "closes were not known any more",
            true,
        ),
        Reply::RetryClose(Err(RetryRefused::Superseded)) => (
            "close left alone: its session was used anew",
            "closes left alone: their sessions were used anew",
            true,
        ),
        Reply::RetryClose(Err(RetryRefused::Disabled)) => (
            "close not sent: session closes are off",
            "closes not sent: session closes are off",
            true,
        ),
        _ => UNEXPECTED,
    }))
}

/// One of them, many of them, and whether that is not what was wished.
type Said = (&'static str, &'static str, bool);

const UNEXPECTED: Said = ("had no answer", "had no answer", true);

const fn cancelled(outcome: CancelOutcome) -> Said {
    match outcome {
        CancelOutcome::Withdrawn => ("ticket withdrawn", "tickets withdrawn", false),
        CancelOutcome::Released => ("lease given back", "leases given back", false),
        CancelOutcome::Bypassed => (
            "had gone on without a lease",
            "had gone on without a lease",
            true,
        ),
        CancelOutcome::AlreadyFinished => ("had ended already", "had ended already", true),
        CancelOutcome::Unknown => (
            "was not known; a late acquire is refused",
            "were not known; a late acquire is refused",
            true,
        ),
    }
}

/// What many acts came to, each kind once, in the order of its first.
fn told(replies: Vec<Result<Reply, GateError>>, said: impl Fn(Reply) -> Said) -> Outcome {
    let mut kinds: Vec<(Said, u64)> = Vec::new();
    for reply in replies {
        let kind = match reply {
            Ok(reply) => said(reply),
            Err(GateError::StoreUnavailable) => (
                "not done: the store is not available",
                "not done: the store is not available",
                true,
            ),
            Err(_) => (
                "not done: the service is busy or stops",
                "not done: the service is busy or stops",
                true,
            ),
        };
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let parts: Vec<String> = kinds
        .iter()
        .map(|((one, many, _), count)| counted(*count, one, many))
        .collect();
    Outcome {
        text: if parts.is_empty() {
            "There was nothing to do.".to_owned()
        } else {
            format!("{}.", parts.join(", "))
        },
        bad: kinds.iter().any(|((.., bad), _)| *bad),
    }
}

/// All in one turn, so that either all are durable or none.
async fn operate(
    app: &App,
    who: Label,
    acts: impl Iterator<Item = Act>,
) -> Result<Vec<Result<Reply, GateError>>, Fault> {
    let commands = acts.map(|act| {
        Command::Operate(Operation {
            who: who.clone(),
            act,
        })
    });
    batch(app, commands.collect()).await
}

async fn batch(app: &App, commands: Vec<Command>) -> Result<Vec<Result<Reply, GateError>>, Fault> {
    if commands.is_empty() {
        return Ok(Vec::new());
    }
    let replies = app.gate().batch(commands).await?;
    Ok(replies
        .into_iter()
        .map(|reply| reply.map(|(_, reply)| reply))
        .collect())
}

// ---- words -------------------------------------------------------------------------------------

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// `1 lease`, `3 leases`.
fn counted<N: TryInto<u64>>(count: N, one: &str, many: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    format!("{} {}", grouped(count), if count == 1 { one } else { many })
}

fn named(one: &str, id: Option<&str>, count: usize, many: &str, kind: &str) -> String {
    match id {
        Some(id) if count == 1 => format!("{one} {id}"),
        _ => format!("{many} {} {kind}", grouped(wide(count))),
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters
        .next()
        .map(|first| first.to_uppercase().collect::<String>());
    first.unwrap_or_default() + letters.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The way back leads to pages of this service and nowhere else.
    #[test]
    fn the_way_back_stays_here() {
        for (text, page) in [
            ("queue", Some("queue")),
            ("", Some("./")),
            ("./", Some("./")),
            ("?range=1h", Some("./?range=1h")),
            ("ticket?id=a%2Fb&told=x", Some("ticket?id=a%2Fb")),
            ("queue?told=x", Some("queue")),
            ("//elsewhere.example", None),
            ("/queue", None),
            ("https://elsewhere.example/queue", None),
            ("javascript:alert(1)", None),
            ("queue\\..\\x", None),
            ("queue?a=\"b", None),
            ("queue?a b", None),
            ("queue?a\r\nSet-Cookie: x", None),
            ("act", None),
            ("logout", None),
            ("../queue", None),
        ] {
            assert_eq!(own_page(text).as_deref(), page, "{text}");
        }
        assert_eq!(own_page(&format!("queue?{}", "a".repeat(BACK_MAX))), None);
    }

    #[test]
    fn what_many_acts_came_to() {
        let replies = [
            CancelOutcome::Withdrawn,
            CancelOutcome::Unknown,
            CancelOutcome::Withdrawn,
        ];
        let replies = replies.map(|outcome| Ok(Reply::Cancel(outcome)));
        let outcome = told(replies.into(), |reply| match reply {
            Reply::Cancel(outcome) => cancelled(outcome),
            _ => UNEXPECTED,
        });
        assert_eq!(
            outcome.text,
            "2 tickets withdrawn, 1 was not known; a late acquire is refused."
        );
        assert!(outcome.bad);
        let none = told(vec![Err(GateError::StoreUnavailable)], |_| UNEXPECTED);
        assert_eq!(none.text, "1 not done: the store is not available.");
    }
}
