//! What operators do from a page. `confirm` states the effect in figures and changes nothing; `act`
//! does it in one turn, under the name of who asked, and leads back to the page it came from.
//!
//! The front refuses what other sites send; here the right is checked, and that the way back is a page
//! of our own.

mod effect;
mod perform;

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::{FromRequest, Request, State};
use axum::http::header::{CACHE_CONTROL, LOCATION, REFERER};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use kvgate_api::ProblemCode;
use kvgate_core::close::CloseMode;
use kvgate_core::command::Command;
use kvgate_core::effect::Reply;
use kvgate_core::ids::{CloseId, IdError, LeaseId, SessionId, TicketId};
use kvgate_core::settings::SettingsChange;

use self::effect::{Effect, effect};
use self::perform::carry_out;
use super::assets;
use super::format::grouped;
use super::frame;
use super::page::{TOLD, Web, caller_of, html};
use super::settings;
use crate::access::{Caller, Right};
use crate::gate::GateError;
use crate::http::{App, Fault, Fields, Passed, read};

/// Ids that one form may name.
const IDS_MAX: usize = 1_000;
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
    let id = request
        .extensions()
        .get::<Passed>()
        .map(|passed| passed.id.to_string());
    let asked = Asked::of(web.app(), request).await?;
    let who = read::who(&asked.caller)?;
    let outcome = carry_out(web.app(), who, &asked.wish).await;
    // What failed half-way may have changed something too.
    web.acted();
    let outcome = outcome?;
    let mut location = asked.back;
    if let Some(id) = id {
        web.keep(&id, outcome);
        let joint = if location.contains('?') { '&' } else { '?' };
        location.push_str(&format!("{joint}{TOLD}={id}"));
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

// ---- for both --------------------------------------------------------------------------------

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
}
