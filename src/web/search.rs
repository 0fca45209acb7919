//! Search: one exact hit is shown at once; else everything that has the text in it, by kind.

use askama::Template;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::response::{IntoResponse, Response};
use kvgate_core::ids::{CloseId, LeaseId, SessionId, TicketId};

use super::format::grouped;
use super::link::{link, to};
use super::page::{Ask, Look, Parts, Screen, Trouble, Web};
use super::rows::known;
use crate::http::{App, Fault, Query, read};

/// Hits of one kind that are shown; the list of that kind has them all.
const HITS: usize = 8;

#[derive(Template)]
#[template(path = "search.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "parts/found.html")]
struct Found {
    text: String,
    groups: Vec<Group>,
    trouble: Option<String>,
}

struct Group {
    name: &'static str,
    id: &'static str,
    total: String,
    hits: Vec<Hit>,
    more: Option<String>,
}

struct Hit {
    name: String,
    href: String,
    note: String,
}

/// `GET /search?q=`.
pub(super) async fn show(
    State(web): State<Web>,
    query: Result<Query, Fault>,
    ask: Ask,
) -> Response {
    let text = query.ok().and_then(|mut query| query.take("q"));
    if let Some(text) = text.filter(|text| !text.is_empty() && !ask.is_update()) {
        let mut exact = exact(web.app(), &text).await;
        if exact.len() == 1
            && let Some(href) = exact.pop()
        {
            return (StatusCode::SEE_OTHER, [(LOCATION, href)]).into_response();
        }
    }
    web.show(ask, build).await
}

/// The pages of what is called exactly so.
async fn exact(app: &App, text: &str) -> Vec<String> {
    let gate = app.gate();
    let mut found = Vec::new();
    if let Ok(ticket) = TicketId::new(text)
        && gate
            .read_ticket(ticket)
            .await
            .is_ok_and(|view| view.is_some())
    {
        found.push(to("ticket", text));
    }
    if let Ok(session) = SessionId::new(text)
        && gate
            .read_session(session)
            .await
            .is_ok_and(|view| view.is_some())
    {
        found.push(to("session", text));
    }
    if let Some(lease) = LeaseId::parse(text)
        && read::lease(app, lease).await.is_ok()
    {
        found.push(to("lease", text));
    }
    if let Some(close) = CloseId::parse(text)
        && read::close(app, close).await.is_ok()
    {
        found.push(to("close", text));
    }
    let engines = &gate.view().engines;
    let named = |url: &str| url == text || url.strip_prefix("http://") == Some(text);
    if let Some(engine) = engines.iter().find(|engine| named(engine.id.as_str())) {
        found.push(link("engines", &[("q", engine.id.as_str())]));
    }
    found
}

async fn build(look: Look) -> Result<Screen, Trouble> {
    let text = look.query.get("q").unwrap_or_default().to_owned();
    let (groups, trouble) = if text.is_empty() {
        (Vec::new(), None)
    } else {
        groups(&look, &text).await?
    };
    let mut parts = Parts::default();
    parts.add(
        "p-found",
        &Found {
            text,
            groups,
            trouble,
        },
    )?;
    Ok(Screen {
        tab: None,
        title: "Search".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

async fn groups(look: &Look, text: &str) -> Result<(Vec<Group>, Option<String>), Trouble> {
    let app = &look.app;
    let query = || Query::of([("q", text.to_owned()), ("limit", HITS.to_string())]);
    let (queue, trouble) = known(read::queue(app, query()).await)?;
    let (leases, _) = known(read::leases(app, query()).await)?;
    let (sessions, _) = known(read::sessions(app, query()).await)?;
    let (closes, _) = known(read::closes(app, query()).await)?;
    let view = app.gate().view();
    let engines: Vec<&str> = view
        .engines
        .iter()
        .map(|engine| engine.id.as_str())
        .filter(|url| url.contains(text))
        .collect();
    let all = |page: &str, total: u64| {
        let more = usize::try_from(total).is_ok_and(|total| total > HITS);
        more.then(|| link(page, &[("q", text)]))
    };
    let groups = [
        Group {
            name: "Waiting tickets",
            id: "waiting",
            total: grouped(queue.total),
            more: all("queue", queue.total),
            hits: queue
                .items
                .iter()
                .map(|waiter| Hit {
                    name: waiter.ticket_id.clone(),
                    href: to("ticket", &waiter.ticket_id),
                    note: waiter.session_id.clone(),
                })
                .collect(),
        },
        Group {
            name: "Leases",
            id: "leases",
            total: grouped(leases.total),
            more: all("leases", leases.total),
            hits: leases
                .items
                .iter()
                .map(|lease| Hit {
                    name: lease.lease_id.clone(),
                    href: to("lease", &lease.lease_id),
                    note: format!("{} of {}", lease.ticket_id, lease.session_id),
                })
                .collect(),
        },
        Group {
            name: "Sessions",
            id: "sessions",
            total: grouped(sessions.total),
            more: all("sessions", sessions.total),
            hits: sessions
                .items
                .iter()
                .map(|session| Hit {
                    name: session.session_id.clone(),
                    href: to("session", &session.session_id),
                    note: super::rows::session_state(session).0.to_owned(),
                })
                .collect(),
        },
        Group {
            name: "Closes",
            id: "closes",
            total: grouped(closes.total),
            more: all("closes", closes.total),
            hits: closes
                .items
                .iter()
                .map(|close| Hit {
                    name: close.close_id.clone(),
                    href: to("close", &close.close_id),
                    note: close.session_id.clone(),
                })
                .collect(),
        },
        Group {
            name: "Engines",
            id: "engines",
            total: grouped(engines.len() as u64),
            more: all("engines", engines.len() as u64),
            hits: engines
                .iter()
                .take(HITS)
                .map(|url| Hit {
                    name: (*url).to_owned(),
                    href: link("engines", &[("q", url)]),
                    note: String::new(),
                })
                .collect(),
        },
    ];
    let groups = groups.into_iter().filter(|group| !group.hits.is_empty());
    Ok((groups.collect(), trouble))
}
