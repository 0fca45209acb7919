//! Sessions, and their closes with what each engine answered.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_api::{Close, Closes as Figures};

use super::format::grouped;
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use super::rows::{Asked, Choice, CloseRow, Field, Filter, Now, Pager, ROWS, SessionRow, known};
use crate::http::{Query, read};

/// Closes beside the list of sessions.
const CLOSES: usize = 10;

const SESSION_FILTERS: &[&str] = &["q"];
const CLOSE_FILTERS: &[&str] = &["state", "failed", "session_id", "q"];

#[derive(Template)]
#[template(path = "sessions.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "closes.html")]
struct ClosesLayout<'a> {
    parts: &'a Parts,
}

/// A table of closes.
#[derive(Template)]
#[template(path = "parts/closes.html")]
pub(super) struct Closes {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) total: String,
    pub(super) count: u64,
    /// They are part of the list of all closes.
    pub(super) is_all: bool,
    pub(super) note: String,
    pub(super) rows: Vec<CloseRow>,
    pub(super) pager: Option<Pager>,
    pub(super) more: Option<String>,
    pub(super) none: String,
    /// Some may be sent again.
    pub(super) selects: bool,
    /// Closes that failed, when there are some and they may be sent again.
    pub(super) failed: Option<String>,
}

#[derive(Template)]
#[template(path = "parts/sessions.html")]
struct Sessions {
    total: String,
    count: u64,
    is_all: bool,
    rows: Vec<SessionRow>,
    pager: Pager,
    none: String,
    can_act: bool,
}

#[derive(Template)]
#[template(path = "parts/lifecycle.html")]
struct Lifecycle {
    is_on: bool,
    pending: String,
    failed: String,
    any_failed: bool,
    choices: Vec<Choice>,
}

/// `GET /sessions`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::new("sessions", &look, SESSION_FILTERS);
    let (list, trouble) = known(read::sessions(&look.app, asked.to_read()?).await)?;
    let newest = Query::of([("limit", CLOSES.to_string())]);
    let (closes, no_closes) = known(read::closes(&look.app, newest).await)?;
    let now = Now::of(&look.app.shown());
    let mut parts = Parts::default();
    parts.add("p-lifecycle", &lifecycle(&look, None))?;
    parts.add(
        "p-filter",
        &Filter {
            page: "sessions",
            fields: vec![Field::text(
                &asked,
                "q",
                "Session, ticket, lease, client or close",
            )],
            kept: Vec::new(),
            is_filtered: asked.is_filtered(),
        },
    )?;
    let lifecycle_on = look.state.features.session_lifecycle;
    parts.add(
        "p-sessions",
        &Sessions {
            total: grouped(list.total),
            count: list.total,
            is_all: !asked.is_filtered(),
            rows: list
                .items
                .iter()
                .take(ROWS)
                .map(|session| SessionRow::new(session, &now, lifecycle_on))
                .collect(),
            pager: asked.pager(&list),
            none: trouble.unwrap_or_else(|| {
                if asked.is_filtered() {
                    "No session matches the filter.".to_owned()
                } else {
                    "No session was used yet.".to_owned()
                }
            }),
            can_act: look.can_act,
        },
    )?;
    let rows = closes.items.iter().take(CLOSES);
    let (rows, selects) = Closes::rows(rows, &now, look.can_act);
    parts.add(
        "p-closes",
        &Closes {
            id: "p-closes",
            title: "Newest closes",
            total: grouped(closes.total),
            count: closes.total,
            is_all: true,
            note: "delivered means taken by the engine, not freed".to_owned(),
            rows,
            pager: None,
            more: Some("closes".to_owned()),
            none: no_closes.unwrap_or_else(|| "No session was closed yet.".to_owned()),
            selects,
            failed: failed(&look).filter(|_| look.can_act),
        },
    )?;
    Ok(Screen {
        tab: Some(Tab::Sessions),
        title: "Sessions".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

/// `GET /closes`.
pub(super) async fn show_closes(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build_closes).await
}

async fn build_closes(look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::new("closes", &look, CLOSE_FILTERS);
    let (list, trouble) = known(read::closes(&look.app, asked.to_read()?).await)?;
    let now = Now::of(&look.app.shown());
    let rows = list.items.iter().take(ROWS);
    let (rows, selects) = Closes::rows(rows, &now, look.can_act);
    let mut parts = Parts::default();
    parts.add("p-lifecycle", &lifecycle(&look, Some(&asked)))?;
    let kept = ["state", "failed", "session_id"];
    parts.add(
        "p-filter",
        &Filter {
            page: "closes",
            fields: vec![Field::text(&asked, "q", "Session or close")],
            kept: kept
                .into_iter()
                .map(|name| (name, asked.value(name)))
                .filter(|(_, value)| !value.is_empty())
                .collect(),
            is_filtered: asked.is_filtered(),
        },
    )?;
    parts.add(
        "p-closes",
        &Closes {
            id: "p-closes",
            title: "Session closes",
            total: grouped(list.total),
            count: list.total,
            is_all: !asked.is_filtered(),
            note: "newest first".to_owned(),
            rows,
            pager: Some(asked.pager(&list)),
            more: None,
            none: trouble.unwrap_or_else(|| {
                if asked.is_filtered() {
                    "No close matches the filter.".to_owned()
                } else {
                    "No session was closed yet.".to_owned()
                }
            }),
            selects,
            failed: failed(&look).filter(|_| look.can_act),
        },
    )?;
    Ok(Screen {
        tab: Some(Tab::Sessions),
        title: "Session closes".to_owned(),
        parts,
        layout: |parts| ClosesLayout { parts }.render(),
    })
}

impl Closes {
    /// The rows, and whether the viewer may send some of them again.
    pub(super) fn rows<'a>(
        closes: impl Iterator<Item = &'a Close>,
        now: &Now,
        can_act: bool,
    ) -> (Vec<CloseRow>, bool) {
        let rows: Vec<CloseRow> = closes.map(|close| CloseRow::new(close, now)).collect();
        let selects = can_act && rows.iter().any(|row| row.retry.is_some());
        (rows, selects)
    }
}

fn failed(look: &Look) -> Option<String> {
    let Figures { failed, .. } = look.state.closes;
    (failed > 0 && look.state.features.session_lifecycle).then(|| grouped(failed))
}

/// What closes come to, and the states that a list of them may be narrowed to.
fn lifecycle(look: &Look, asked: Option<&Asked>) -> Lifecycle {
    let figures = look.state.closes;
    let choice = |name: &str, state: &str, failed: &str| {
        let asked = asked?;
        Some(Choice {
            name: name.to_owned(),
            href: asked.with(&[("state", state), ("failed", failed)]),
            chosen: asked.value("state") == state && asked.value("failed") == failed,
        })
    };
    let choices = [
        choice("all", "", ""),
        choice("joining", "joining", ""),
        choice("delivering", "delivering", ""),
        choice("done", "done", ""),
        choice("failed", "", "true"),
    ];
    Lifecycle {
        is_on: look.state.features.session_lifecycle,
        pending: grouped(figures.pending),
        failed: grouped(figures.failed),
        any_failed: figures.failed > 0,
        choices: choices.into_iter().flatten().collect(),
    }
}
