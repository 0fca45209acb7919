//! The last decisions and ends of leases, newest first, each with the arithmetic of its moment.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_api::Decisions;
use kvgate_core::decision::{BypassReason, WaitReason};

use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use super::rows::{Asked, Choice, DecisionRow, Field, Filter, ROWS};
use crate::http::{Fault, Query, read};

const FILTERS: &[&str] = &["action", "reason", "q", "ticket_id", "session_id"];

/// What a stream may be narrowed to: name, action, reason.
const KINDS: &[(&str, &str, &str)] = &[
    ("all", "", ""),
    ("admit", "admit", ""),
    ("wait", "wait", ""),
    ("bypass", "bypass", ""),
    ("cancelled", "cancelled", ""),
    ("release", "ended", "released"),
    ("expired", "ended", "expired"),
    ("all ends", "ended", ""),
];

#[derive(Template)]
#[template(path = "decisions.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

/// Decisions under a heading, with nothing to choose.
#[derive(Template)]
#[template(path = "parts/stream.html")]
pub(super) struct Stream {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) note: String,
    pub(super) none: String,
    pub(super) more: Option<String>,
    pub(super) rows: Vec<DecisionRow>,
}

#[derive(Template)]
#[template(path = "parts/kinds.html")]
struct Kinds {
    kinds: Vec<Choice>,
    reasons: Vec<Choice>,
}

#[derive(Template)]
#[template(path = "parts/decisions.html")]
struct List {
    rows: Vec<DecisionRow>,
    none: String,
    newest: Option<String>,
    newer: Option<String>,
    older: Option<String>,
}

/// The decisions that a query names, newest first; none while the store is away.
pub(super) async fn stream(look: &Look, query: Query) -> Result<Vec<DecisionRow>, Fault> {
    match read::decisions(&look.app, query).await {
        Ok(read) => Ok(read.items.iter().rev().map(DecisionRow::new).collect()),
        Err(fault) if fault.status().is_server_error() => Ok(Vec::new()),
        Err(fault) => Err(fault),
    }
}

/// `GET /decisions`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::new("decisions", &look, FILTERS);
    let mut query = asked.to_read()?;
    let after = query.get("after").is_some();
    let before = query.get("before").is_some();
    if !after && !before {
        query.put("before", u64::MAX.to_string());
    }
    let (read, trouble) = match read::decisions(&look.app, query).await {
        Ok(read) => (read, None),
        Err(fault) if fault.status().is_server_error() => {
            let none = Decisions {
                items: Vec::new(),
                next: 0,
                more: false,
            };
            (none, Some(fault.detail().to_owned()))
        }
        Err(fault) => return Err(fault.into()),
    };
    let first = read.items.first().map(|item| item.number.to_string());
    let last = read.items.last().map(|item| item.number.to_string());
    let to_older = |number: String| asked.with(&[("before", &number)]);
    let to_newer = |number: String| asked.with(&[("after", &number)]);
    let mut parts = Parts::default();
    parts.add("p-kinds", &kinds(&asked))?;
    let kept = ["action", "reason", "ticket_id", "session_id"];
    parts.add(
        "p-filter",
        &Filter {
            page: "decisions",
            fields: vec![Field::text(&asked, "q", "Ticket, session or client")],
            kept: kept
                .into_iter()
                .map(|name| (name, asked.value(name)))
                .filter(|(_, value)| !value.is_empty())
                .collect(),
            is_filtered: asked.is_filtered(),
        },
    )?;
    parts.add(
        "p-decisions",
        &List {
            rows: read
                .items
                .iter()
                .rev()
                .take(ROWS)
                .map(DecisionRow::new)
                .collect(),
            none: trouble.unwrap_or_else(|| {
                if asked.is_filtered() || after || before {
                    "No decision that is remembered matches.".to_owned()
                } else {
                    "Nothing was decided since the start.".to_owned()
                }
            }),
            newest: (after || before).then(|| asked.with(&[])),
            newer: last
                .filter(|_| before || (after && read.more))
                .map(to_newer),
            older: first.filter(|_| after || read.more).map(to_older),
        },
    )?;
    Ok(Screen {
        tab: Some(Tab::Decisions),
        title: "Decisions".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

fn kinds(asked: &Asked) -> Kinds {
    let (action, reason) = (asked.value("action"), asked.value("reason"));
    let kinds = KINDS.iter().map(|(name, of, why)| Choice {
        name: (*name).to_owned(),
        href: asked.with(&[("action", of), ("reason", why)]),
        chosen: *of == action && (*why == reason || (action != "ended" && why.is_empty())),
    });
    let reasons: Vec<&'static str> = match action.as_str() {
        "bypass" => BypassReason::ALL.map(read::bypass_word).into(),
        "wait" => WaitReason::ALL.map(read::wait_word).into(),
        _ => Vec::new(),
    };
    let any = reasons.first().map(|_| Choice {
        name: "any reason".to_owned(),
        href: asked.with(&[("reason", "")]),
        chosen: reason.is_empty(),
    });
    let each = reasons.iter().map(|word| Choice {
        name: word.replace('_', " "),
        href: asked.with(&[("reason", word)]),
        chosen: *word == reason,
    });
    Kinds {
        kinds: kinds.collect(),
        reasons: any.into_iter().chain(each).collect(),
    }
}
