//! One ticket, one lease, one session, one close: everything that is known of it, and what it is
//! related to.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_api::{BypassReason, CancelReason, Close, EndReason, ProblemCode, TicketAnswer};
use kvgate_core::command::Slice;
use kvgate_core::effect::{SessionView, WaiterView};
use kvgate_core::ids::{CloseId, LeaseId, RowNo, SessionId, TicketId};

use super::decisions::{Stream, stream};
use super::format::{about, counted, duration, grouped, secs};
use super::leases::Leases;
use super::link::{link, to};
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use super::queue::{Waiters, why_of};
use super::rows::{
    CloseRow, LeaseRow, Now, WaiterRow, can_retry, close_class, close_state_word, day_and_time,
    engine_state_class, engine_state_word, or_none, session_state, tokens_of,
};
use super::sessions::Closes;
use super::why::{self, Why};
use crate::http::{Fault, Query, read};

/// Decisions that a page of one thing shows.
const DECISIONS: usize = 25;

/// Rows of each table on a page of one thing.
const RELATED: usize = 50;

#[derive(Template)]
#[template(path = "detail.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

/// What is known of one thing.
#[derive(Template)]
#[template(path = "parts/facts.html")]
struct Facts {
    kind: &'static str,
    name: String,
    word: String,
    class: &'static str,
    facts: Vec<Fact>,
    acts: Vec<Act>,
    note: String,
}

struct Fact {
    label: &'static str,
    value: String,
    href: Option<String>,
    /// Name of the field of the API, where the value is just that.
    field: &'static str,
}

struct Act {
    name: &'static str,
    href: String,
    key: &'static str,
}

#[derive(Template)]
#[template(path = "parts/gone.html")]
struct Gone {
    kind: &'static str,
    name: String,
    text: String,
}

#[derive(Template)]
#[template(path = "parts/waits.html")]
struct Waits {
    why: Why,
    head: Option<(String, String)>,
}

#[derive(Template)]
#[template(path = "parts/targets.html")]
struct Targets {
    rows: Vec<Target>,
    counts: Vec<(&'static str, &'static str, String)>,
    hidden: Option<String>,
    not_aborted: Vec<String>,
}

struct Target {
    url: String,
    href: String,
    state: &'static str,
    class: &'static str,
    attempts: String,
    status: String,
    error: String,
}

fn fact(label: &'static str, value: impl Into<String>) -> Fact {
    Fact {
        label,
        value: value.into(),
        href: None,
        field: "",
    }
}

impl Fact {
    fn leads(self, href: String) -> Self {
        Self {
            href: Some(href),
            ..self
        }
    }

    fn field(self, field: &'static str) -> Self {
        Self { field, ..self }
    }
}

fn tokens(count: u64) -> Fact {
    fact("Tokens", grouped(count)).field("reservation_tokens")
}

fn session_fact(session: &str) -> Fact {
    fact("Session", session)
        .leads(to("session", session))
        .field("session_id")
}

fn screen(tab: Tab, title: &str, parts: Parts) -> Screen {
    Screen {
        tab: Some(tab),
        title: title.to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    }
}

/// The id in the address.
fn id_of(look: &Look) -> Result<String, Fault> {
    let id = look.query.get("id").filter(|id| !id.is_empty());
    id.map(str::to_owned)
        .ok_or_else(|| Fault::field("?id", "must name what is to be shown"))
}

/// Not known, or not known any more: the page says so and keeps looking.
fn gone(kind: &'static str, name: &str, why: &Fault, parts: &mut Parts) -> Result<(), Trouble> {
    if !why.status().is_server_error() {
        parts.missing();
    }
    parts.add(
        "p-facts",
        &Gone {
            kind,
            name: name.to_owned(),
            text: why.detail().to_owned(),
        },
    )
}

/// What was decided about a thing, as far as it is remembered.
async fn decided(
    look: &Look,
    name: &'static str,
    id: &str,
    parts: &mut Parts,
) -> Result<(), Trouble> {
    let query = Query::of([(name, id.to_owned()), ("limit", DECISIONS.to_string())]);
    let rows = stream(look, query).await?;
    parts.add(
        "p-decided",
        &Stream {
            id: "p-decided",
            title: "What happened",
            note: "newest first".to_owned(),
            none: "Nothing of it is among the decisions that are remembered.".to_owned(),
            more: (!rows.is_empty()).then(|| link("decisions", &[(name, id)])),
            rows,
        },
    )
}

// ---- a ticket ----------------------------------------------------------------------------------

/// `GET /ticket?id=`.
pub(super) async fn ticket(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build_ticket).await
}

async fn build_ticket(look: Look) -> Result<Screen, Trouble> {
    let id = id_of(&look)?;
    let mut parts = Parts::default();
    let ticket = TicketId::new(&id).map_err(|rule| Fault::id("?id", rule))?;
    match read::ticket(&look.app, ticket).await {
        Err(fault) => gone("Ticket", &id, &fault, &mut parts)?,
        Ok(answer) => {
            let session = session_of(&answer);
            let session = match session.and_then(|session| SessionId::new(session).ok()) {
                Some(session) => look.app.gate().read_session(session).await.ok().flatten(),
                None => None,
            };
            let waiting = session.as_ref().map(|session| session.waiting.iter());
            let mut waiting = waiting.into_iter().flatten();
            let waiter = waiting.find(|waiter| waiter.ticket.as_str() == id);
            // What stands in two parts of the page is of one moment.
            let answer = waiter.map_or(answer, |waiter| read::waiting_ticket(&look.app, waiter));
            ticket_facts(&look, &id, &answer, session.as_ref(), &mut parts)?;
            if let Some(waiter) = waiter {
                waits(&look, waiter, &mut parts).await?;
            }
        }
    }
    decided(&look, "ticket_id", &id, &mut parts).await?;
    Ok(screen(Tab::Queue, "Ticket", parts))
}

fn session_of(answer: &TicketAnswer) -> Option<&str> {
    match answer {
        TicketAnswer::Admit(admit) => Some(&admit.session_id),
        TicketAnswer::Bypass(bypass) => Some(&bypass.session_id),
        TicketAnswer::Cancelled(cancelled) => cancelled.session_id.as_deref(),
        TicketAnswer::Wait(wait) => Some(&wait.session_id),
        TicketAnswer::Ended(_) => None,
    }
}

const fn bypass_text(reason: BypassReason) -> &'static str {
    match reason {
        BypassReason::Disabled => "admission is off or paused",
        BypassReason::OutOfScope => "admission does not apply to this kind of work",
        BypassReason::Protected => "the caller marked it as protected",
        BypassReason::Degraded => "there was no usable capacity reading",
        BypassReason::Oversize => "it is larger than the full ceiling: waiting could never help",
        BypassReason::QueueFull => "the queue was full",
        BypassReason::Aged => "it waited as long as a request waits at most",
        BypassReason::StoreUnavailable => "the store could promise nothing",
    }
}

fn ticket_facts(
    look: &Look,
    id: &str,
    answer: &TicketAnswer,
    session: Option<&SessionView>,
    parts: &mut Parts,
) -> Result<(), Trouble> {
    let cancel = |name| Act {
        name,
        href: link("confirm", &[("do", "cancel"), ("ticket", id)]),
        key: "c",
    };
    let mut acts = Vec::new();
    let mut facts = Vec::new();
    let mut note = String::new();
    let (word, class) = match answer {
        TicketAnswer::Wait(wait) => {
            acts.push(cancel("Cancel ticket"));
            facts.push(fact("Position", grouped(wait.position)).field("position"));
            facts.push(fact("Tokens before it", grouped(wait.tokens_ahead)).field("tokens_ahead"));
            facts.push(tokens(wait.reservation_tokens));
            facts.push(fact("Short by", grouped(wait.short_tokens)).field("short_tokens"));
            facts.push(fact("Waiting for", secs(wait.age_s)).field("age_s"));
            facts.push(fact("Bypasses in", secs(wait.bypass_in_s)).field("bypass_in_s"));
            facts.push(session_fact(&wait.session_id));
            facts.push(fact("Epoch", grouped(wait.epoch)).field("epoch"));
            ("waits".to_owned(), "wait")
        }
        TicketAnswer::Admit(admit) => {
            acts.push(cancel("Cancel ticket"));
            let lease = &admit.lease_id;
            facts.push(
                fact("Lease", lease.clone())
                    .leads(to("lease", lease))
                    .field("lease_id"),
            );
            facts.push(tokens(admit.reservation_tokens));
            facts.push(fact("Waited", secs(admit.waited_s)).field("waited_s"));
            facts.push(fact("Lease ends in", secs(admit.expires_in_s)).field("expires_in_s"));
            facts.push(session_fact(&admit.session_id));
            facts.push(fact("Epoch", grouped(admit.epoch)).field("epoch"));
            ("holds a lease".to_owned(), "admit")
        }
        TicketAnswer::Bypass(bypass) => {
            facts.push(tokens(bypass.reservation_tokens));
            facts.push(fact("Why", bypass_text(bypass.reason)));
            facts.push(fact("Waited", secs(bypass.waited_s)).field("waited_s"));
            facts.push(session_fact(&bypass.session_id));
            facts.push(fact("Epoch", grouped(bypass.epoch)).field("epoch"));
            note = "It goes on without a lease.".to_owned();
            ("bypassed".to_owned(), "aged")
        }
        TicketAnswer::Cancelled(cancelled) => {
            facts.push(fact(
                "Why",
                match cancelled.reason {
                    CancelReason::Cancelled => "it was cancelled while its call was open",
                    CancelReason::SessionClosed => "its session was closed while it waited",
                    CancelReason::TicketFinished => "it was released or cancelled",
                },
            ));
            facts.push(tokens(cancelled.reservation_tokens));
            if let Some(session) = &cancelled.session_id {
                facts.push(session_fact(session));
            }
            facts.push(fact("Waited", secs(cancelled.waited_s)).field("waited_s"));
            note = "An acquire with this ticket is refused.".to_owned();
            ("finished".to_owned(), "closed")
        }
        TicketAnswer::Ended(ended) => {
            facts.push(fact(
                "Why",
                match ended.reason {
                    EndReason::Expired => "its lease was reclaimed at its end",
                    EndReason::Revoked => "an operator took its lease away",
                    EndReason::Dropped => "its caller stayed away for longer than the claim grace",
                    EndReason::TakenBack => "its grant was not claimed within the claim grace",
                },
            ));
            note = "An acquire with this ticket is decided afresh.".to_owned();
            ("ended".to_owned(), "expired")
        }
    };
    let terms = session.and_then(|session| {
        let waiting = session.waiting.iter();
        let waiting = waiting.filter(|waiter| waiter.ticket.as_str() == id);
        let held = session.leases.iter();
        let held = held.filter(|lease| lease.ticket.as_str() == id);
        let mut terms = waiting.map(|waiter| &waiter.terms);
        terms.next().or(held.map(|lease| &lease.terms).next())
    });
    if let Some(terms) = terms {
        let text = |label: &Option<kvgate_core::ids::Label>| {
            or_none(label.as_ref().map(kvgate_core::ids::Label::as_str))
        };
        facts.push(fact("Client", text(&terms.client)));
        facts.push(fact("Request", text(&terms.request_id)));
        facts.push(fact("Life of its lease", duration(terms.ttl)));
    }
    let is_paused = look.state.features.paused || !look.state.features.program_admission;
    if is_paused && class == "wait" {
        note = "Admission is off or paused: who waits bypasses with the next turn.".to_owned();
    }
    parts.add(
        "p-facts",
        &Facts {
            kind: "Ticket",
            name: id.to_owned(),
            word,
            class,
            facts,
            acts: if look.can_act { acts } else { Vec::new() },
            note,
        },
    )
}

/// The first in line.
async fn head_of(look: &Look) -> Option<WaiterView> {
    let slice = Slice {
        from: RowNo(0),
        rows: 1,
    };
    let page = look.app.gate().list_queue(slice).await.ok()?;
    page.items.into_iter().next()
}

async fn waits(look: &Look, waiter: &WaiterView, parts: &mut Parts) -> Result<(), Trouble> {
    let head = head_of(look).await;
    let why = why_of(look, waiter, head.as_ref()).await;
    let head = head.filter(|head| head.ticket != waiter.ticket);
    parts.add(
        "p-waits",
        &Waits {
            why,
            head: head.map(|head| {
                let ticket = head.ticket.as_str();
                (ticket.to_owned(), to("ticket", ticket))
            }),
        },
    )
}

// ---- a lease -----------------------------------------------------------------------------------

/// `GET /lease?id=`.
pub(super) async fn lease(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build_lease).await
}

async fn build_lease(look: Look) -> Result<Screen, Trouble> {
    let id = id_of(&look)?;
    let mut parts = Parts::default();
    let read = match LeaseId::parse(&id) {
        Some(lease) => read::lease(&look.app, lease).await,
        None => Err(Fault::new(
            ProblemCode::LeaseNotFound,
            "No lease with this id was ever issued.",
        )),
    };
    match read {
        Err(fault) => gone("Lease", &id, &fault, &mut parts)?,
        Ok(lease) => {
            let now = Now::of(&look.app.shown());
            let row = LeaseRow::new(&lease, &now);
            let facts = vec![
                tokens(lease.reservation_tokens),
                fact("Held for", row.held),
                fact("Granted", row.granted_at),
                fact("Ends in", row.left).field("expires_in_s"),
                fact("Ends", day_and_time(&lease.expires_at)),
                fact("Life", secs(lease.ttl_s)).field("ttl_s"),
                fact("Ticket", row.ticket)
                    .leads(row.ticket_href)
                    .field("ticket_id"),
                session_fact(&lease.session_id),
                fact("Epoch", grouped(lease.epoch)).field("epoch"),
                fact("Scope", row.scope).field("scope"),
                fact("Client", row.client).field("client"),
                fact("Request", row.request).field("request_id"),
            ];
            let revoke = Act {
                name: "Revoke lease",
                href: row.revoke,
                key: "c",
            };
            let near = row.is_near;
            parts.add(
                "p-facts",
                &Facts {
                    kind: "Lease",
                    name: id.clone(),
                    word: if near { "near its end" } else { "held" }.to_owned(),
                    class: if near { "wait" } else { "admit" },
                    facts,
                    acts: look.can_act.then_some(revoke).into_iter().collect(),
                    note:
                        "It ends when its holder gives it back, or when nobody renews it in time."
                            .to_owned(),
                },
            )?;
            decided(&look, "ticket_id", &lease.ticket_id, &mut parts).await?;
        }
    }
    Ok(screen(Tab::Leases, "Lease", parts))
}

// ---- a session ---------------------------------------------------------------------------------

/// `GET /session?id=`.
pub(super) async fn session(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build_session).await
}

async fn build_session(look: Look) -> Result<Screen, Trouble> {
    let id = id_of(&look)?;
    let mut parts = Parts::default();
    let session = SessionId::new(&id).map_err(|rule| Fault::id("?id", rule))?;
    match read::session(&look.app, session).await {
        Err(fault) => gone("Session", &id, &fault, &mut parts)?,
        Ok(session) => session_parts(&look, &id, &session, &mut parts).await?,
    }
    decided(&look, "session_id", &id, &mut parts).await?;
    Ok(screen(Tab::Sessions, "Session", parts))
}

async fn session_parts(
    look: &Look,
    id: &str,
    session: &kvgate_api::Session,
    parts: &mut Parts,
) -> Result<(), Trouble> {
    let shown = look.app.shown();
    let now = Now::of(&shown);
    let (word, class) = session_state(session);
    let lifecycle = look.state.features.session_lifecycle;
    let wanted = session
        .waiting
        .iter()
        .map(|waiter| waiter.reservation_tokens)
        .fold(0, u64::saturating_add);
    let facts = vec![
        fact("Tokens held", grouped(tokens_of(&session.leases))),
        fact("Tokens wanted", grouped(wanted)),
        fact("Leases", grouped(session.leases.len() as u64)),
        fact("Waiting", grouped(session.waiting.len() as u64)),
        fact("Closes", grouped(session.closes.len() as u64)),
        fact(
            "Last use",
            session.last_use_at.as_deref().map_or_else(
                || "only closed".to_owned(),
                |at| format!("{} ago, {}", now.age(at), day_and_time(at)),
            ),
        ),
    ];
    let mut acts = Vec::new();
    if lifecycle && word != "closing" {
        acts.push(Act {
            name: "Close session",
            href: link("confirm", &[("do", "close"), ("session", id)]),
            key: "c",
        });
    }
    let retried = session.closes.first().filter(|close| can_retry(close));
    if let Some(close) = retried {
        acts.push(retry(close));
    }
    parts.add(
        "p-facts",
        &Facts {
            kind: "Session",
            name: id.to_owned(),
            word: word.to_owned(),
            class,
            facts,
            acts: if look.can_act { acts } else { Vec::new() },
            note: if lifecycle {
                String::new()
            } else {
                "Session closes are off.".to_owned()
            },
        },
    )?;
    let head = head_of(look).await;
    let head = head.map(|head| why::waits_for(&head.status, &shown.view));
    let of = |shown: usize, all: usize| match all.checked_sub(shown) {
        Some(0) | None => String::new(),
        Some(_) => format!("the first {}", grouped(shown as u64)),
    };
    if !session.waiting.is_empty() {
        let rows: Vec<WaiterRow> = session
            .waiting
            .iter()
            .take(RELATED)
            .map(|waiter| WaiterRow::new(waiter, head.as_deref()))
            .collect();
        parts.add(
            "p-waiters",
            &Waiters {
                id: "p-waiters",
                title: "Waiting",
                total: grouped(session.waiting.len() as u64),
                count: session.waiting.len() as u64,
                is_queue: false,
                tokens: None,
                max_wait: about(shown.view.policy.max_wait),
                rows,
                pager: None,
                none: String::new(),
                can_act: look.can_act,
            },
        )?;
    }
    if !session.leases.is_empty() {
        let rows: Vec<LeaseRow> = session
            .leases
            .iter()
            .take(RELATED)
            .map(|lease| LeaseRow::new(lease, &now))
            .collect();
        parts.add(
            "p-leases",
            &Leases {
                id: "p-leases",
                title: "Leases",
                total: grouped(session.leases.len() as u64),
                count: session.leases.len() as u64,
                is_all: false,
                note: of(rows.len(), session.leases.len()),
                rows,
                pager: None,
                none: String::new(),
                can_act: look.can_act,
            },
        )?;
    }
    if !session.closes.is_empty() {
        let rows = session.closes.iter().take(RELATED);
        let (rows, selects) = Closes::rows(rows, &now, look.can_act);
        parts.add(
            "p-closes",
            &Closes {
                id: "p-closes",
                title: "Closes",
                total: grouped(session.closes.len() as u64),
                count: session.closes.len() as u64,
                is_all: false,
                note: "newest first · delivered means taken by the engine, not freed".to_owned(),
                rows,
                pager: None,
                more: None,
                none: String::new(),
                selects,
                failed: None,
            },
        )?;
    }
    Ok(())
}

// ---- a close -----------------------------------------------------------------------------------

fn retry(close: &Close) -> Act {
    Act {
        name: "Retry close",
        href: link("confirm", &[("do", "retry"), ("close", &close.close_id)]),
        key: "r",
    }
}

/// `GET /close?id=`.
pub(super) async fn close(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build_close).await
}

async fn build_close(look: Look) -> Result<Screen, Trouble> {
    let id = id_of(&look)?;
    let mut parts = Parts::default();
    let read = match CloseId::parse(&id) {
        Some(close) => read::close(&look.app, close).await,
        None => Err(Fault::new(
            ProblemCode::CloseNotFound,
            "No close with this id is known.",
        )),
    };
    match read {
        Err(fault) => gone("Close", &id, &fault, &mut parts)?,
        Ok(close) => close_parts(&look, &close, &mut parts)?,
    }
    Ok(screen(Tab::Sessions, "Close", parts))
}

fn close_parts(look: &Look, close: &Close, parts: &mut Parts) -> Result<(), Trouble> {
    let now = Now::of(&look.app.shown());
    let row = CloseRow::new(close, &now);
    let mode = match close.mode {
        kvgate_api::CloseMode::Join => "join: waits for the last lease of the session",
        kvgate_api::CloseMode::Abort => "abort: running requests are aborted first",
    };
    let reason = close.reason.map(|reason| match reason {
        kvgate_api::CloseReason::Terminal => "the program came to its end",
        kvgate_api::CloseReason::Dropped => "the program was given up",
        kvgate_api::CloseReason::Idle => "it was idle for longer than the limit",
    });
    let facts = vec![
        session_fact(&close.session_id),
        fact(
            "Asked for",
            format!("{} ago, {}", row.age, row.requested_at),
        ),
        fact("Engines settled", row.settled),
        fact("Mode", mode),
        fact("Reason", or_none(reason)),
    ];
    let retry = can_retry(close).then(|| retry(close));
    parts.add(
        "p-facts",
        &Facts {
            kind: "Close",
            name: close.close_id.clone(),
            word: if close.failed {
                "failed"
            } else {
                close_state_word(close.state)
            }
            .to_owned(),
            class: close_class(close),
            facts,
            acts: retry.filter(|_| look.can_act).into_iter().collect(),
            note: "Delivered means that the engine took the close; when its KV is free the engine alone knows."
                .to_owned(),
        },
    )?;
    let rows: Vec<Target> = close
        .engines
        .iter()
        .map(|engine| Target {
            url: engine.url.clone(),
            href: link("engines", &[("q", &engine.url)]),
            state: engine_state_word(engine.state),
            class: engine_state_class(engine.state),
            attempts: grouped(u64::from(engine.attempts)),
            status: engine
                .last_status
                .map_or_else(|| or_none(None), |status| status.to_string()),
            error: or_none(engine.last_error.as_deref()),
        })
        .collect();
    let counted_all: u64 = close.counts.values().map(|count| u64::from(*count)).sum();
    let hidden = counted_all.saturating_sub(rows.len() as u64);
    parts.add(
        "p-targets",
        &Targets {
            rows,
            counts: close
                .counts
                .iter()
                .map(|(state, count)| {
                    (
                        engine_state_class(*state),
                        engine_state_word(*state),
                        grouped(u64::from(*count)),
                    )
                })
                .collect(),
            hidden: (hidden > 0).then(|| counted(hidden, "more engine")),
            not_aborted: close.not_aborted.clone(),
        },
    )
}
