//! How a page is made: parts that are rendered once for everybody who looks, and sent again only
//! when they changed.
//!
//! A page is complete HTML. A page that is open asks for itself again each second and says which
//! parts it has (`Kvgate-Parts`); the answer holds the others. It is a plain request, not a stream:
//! a browser has six connections to an address, and the seventh tab must work as the first.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use askama::Template;
use axum::extract::FromRequestParts;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH, RETRY_AFTER, VARY};
use axum::http::request::Parts as Head;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use kvgate_api::State;

use super::assets;
use super::frame;
use super::overview;
use crate::access::{Caller, Right};
use crate::http::{App, Fault, Passed, Query, read};

/// A page that was rendered is shown to others for this long: an open page asks once a second.
const FRESH: Duration = Duration::from_millis(900);

/// A page that was costly is shown for so many times the time that it took, so that open pages never
/// take more than a tenth of the service's time.
const COSTLY: u32 = 10;

/// Pages that are kept, each with its own query. Those beyond are rendered for one viewer.
const KEPT_MAX: usize = 64;

/// Pages of one query that are longer are not kept.
const KEY_MAX: usize = 1_024;

/// Pages that are rendered at the same time. Readers beyond that are told to come back.
const RENDERED_AT_ONCE: usize = 8;

/// Outcomes of acts that are kept for the pages that tell them.
const OUTCOMES_MAX: usize = 256;
/// How long a page tells the outcome of an act.
const TOLD_FOR: Duration = Duration::from_secs(600);
/// The query parameter that names the outcome to tell.
pub(super) const TOLD: &str = "told";

/// Set by a page that is open: the parts it has.
const KVGATE_PARTS: HeaderName = HeaderName::from_static("kvgate-parts");
/// Version of the assets: a page with others loads itself anew.
const KVGATE_ASSETS: HeaderName = HeaderName::from_static("kvgate-assets");

/// Where a page stands in the navigation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Tab {
    Overview,
    Queue,
    Leases,
    Engines,
    Sessions,
    Decisions,
    Steps,
    Settings,
}

impl Tab {
    pub(super) const ALL: [Self; 8] = [
        Self::Overview,
        Self::Queue,
        Self::Leases,
        Self::Engines,
        Self::Sessions,
        Self::Decisions,
        Self::Steps,
        Self::Settings,
    ];
}

/// One region of a page, rendered.
struct Part {
    id: &'static str,
    html: String,
    /// Differs when the region does.
    mark: u32,
}

/// The regions of a page. The id of each is the id of its root element.
#[derive(Default)]
pub(super) struct Parts {
    parts: Vec<Part>,
    missing: bool,
}

impl Parts {
    /// Renders one more region.
    pub(super) fn add(
        &mut self,
        id: &'static str,
        template: &impl Template,
    ) -> Result<(), Trouble> {
        let html = template.render()?;
        let mark = crc32fast::hash(html.as_bytes());
        self.parts.push(Part { id, html, mark });
        Ok(())
    }

    /// What the page is about is not known now: it says so, and goes on looking.
    pub(super) const fn missing(&mut self) {
        self.missing = true;
    }

    /// The HTML of a region; nothing for one that this page does not have.
    pub(super) fn html(&self, id: &str) -> &str {
        let part = self.parts.iter().find(|part| part.id == id);
        part.map_or("", |part| part.html.as_str())
    }

    fn marks(&self) -> String {
        let mut marks = String::new();
        for part in &self.parts {
            let _ = write!(marks, "{}={:08x} ", part.id, part.mark);
        }
        marks.truncate(marks.trim_end().len());
        marks
    }
}

/// A page before it is put into the frame.
pub(super) struct Screen {
    /// `None` for a page that belongs to none.
    pub(super) tab: Option<Tab>,
    pub(super) title: String,
    pub(super) parts: Parts,
    /// Puts the regions in their places.
    pub(super) layout: fn(&Parts) -> askama::Result<String>,
}

/// Why there is no page.
pub(super) enum Trouble {
    /// What was asked for cannot be shown.
    Fault(Fault),
    /// A template failed.
    Template(askama::Error),
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<askama::Error> for Trouble {
    fn from(error: askama::Error) -> Self {
        Self::Template(error)
    }
}

/// What a page is made from.
pub(super) struct Look {
    pub(super) app: App,
    /// Filters, page and range, as in the address.
    pub(super) query: Query,
    /// The viewer may press the buttons.
    pub(super) can_act: bool,
    /// The whole picture, as `GET /v1/state` tells it at this moment.
    pub(super) state: State,
}

/// A request for a page.
pub(super) struct Ask {
    path: String,
    query_text: String,
    query: Result<Query, Fault>,
    caller: Caller,
    /// The parts that an open page has; `None` when the whole page is wanted.
    has: Option<String>,
    etag: Option<HeaderValue>,
}

impl<S: Send + Sync> FromRequestParts<S> for Ask {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(head: &mut Head, state: &S) -> Result<Self, Self::Rejection> {
        let query = Query::from_request_parts(head, state).await;
        let text = |name| head.headers.get(name)?.to_str().ok().map(str::to_owned);
        Ok(Self {
            path: head.uri.path().to_owned(),
            query_text: head.uri.query().unwrap_or_default().to_owned(),
            query,
            caller: caller_of(head),
            has: text(KVGATE_PARTS),
            etag: head.headers.get(IF_NONE_MATCH).cloned(),
        })
    }
}

impl Ask {
    /// A page that is open asks for what changed.
    pub(super) const fn is_update(&self) -> bool {
        self.has.is_some()
    }
}

/// Who asks, as the front told; nobody who may act when it did not.
pub(super) fn caller_of(head: &Head) -> Caller {
    let passed = head.extensions.get::<Passed>();
    let caller = passed.and_then(|passed| passed.caller.clone());
    caller.unwrap_or_else(|| Caller {
        name: "nobody".into(),
        right: Right::View,
    })
}

/// What an act came to, in a sentence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Outcome {
    pub(super) text: String,
    /// Something of what was asked for was not done.
    pub(super) bad: bool,
}

/// The outcome that a page tells.
pub(super) struct Told {
    pub(super) outcome: Outcome,
    /// The same page without it.
    pub(super) without: String,
}

/// A page that is done.
struct Rendered {
    html: String,
    parts: Parts,
    marks: String,
    etag: String,
}

/// A page that others may be shown.
struct Shared {
    until: Instant,
    /// Number of the last act that it may know of.
    acts: u64,
    page: Arc<Rendered>,
}

type Slot = Arc<tokio::sync::Mutex<Option<Shared>>>;

/// What all pages share. Cheap to clone.
#[derive(Clone)]
pub(super) struct Web {
    inner: Arc<Inner>,
}

struct Inner {
    app: App,
    kept: Mutex<HashMap<(String, bool), (Instant, Slot)>>,
    rendering: tokio::sync::Semaphore,
    /// Moves on with each action, so that nobody is shown what was before it.
    acts: AtomicU64,
    /// By the id of the request that acted.
    outcomes: Mutex<VecDeque<(String, Instant, Outcome)>>,
    overview: overview::Kept,
}

impl Web {
    pub(super) fn new(app: App) -> Self {
        Self {
            inner: Arc::new(Inner {
                app,
                kept: Mutex::default(),
                rendering: tokio::sync::Semaphore::new(RENDERED_AT_ONCE),
                acts: AtomicU64::new(0),
                outcomes: Mutex::default(),
                overview: overview::Kept::default(),
            }),
        }
    }

    pub(super) fn app(&self) -> &App {
        &self.inner.app
    }

    /// The rows that the overview read last.
    pub(super) fn overview(&self) -> &overview::Kept {
        &self.inner.overview
    }

    /// Something was changed from a page: what was rendered before is shown to nobody.
    pub(super) fn acted(&self) {
        self.inner.acts.fetch_add(1, Ordering::Relaxed);
    }

    /// Keeps what a request came to for the page that is shown next.
    pub(super) fn keep(&self, request: &str, outcome: Outcome) {
        let mut outcomes = self.outcomes();
        outcomes.push_back((request.to_owned(), Instant::now(), outcome));
        while outcomes.len() > OUTCOMES_MAX {
            outcomes.pop_front();
        }
    }

    fn outcomes(&self) -> std::sync::MutexGuard<'_, VecDeque<(String, Instant, Outcome)>> {
        let outcomes = self.inner.outcomes.lock();
        outcomes.unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome that the address names; nothing for one that is not known or long ago.
    fn told(&self, query: &mut Query, query_text: &str) -> Option<Told> {
        let request = query.take(TOLD)?;
        let outcomes = self.outcomes();
        let known = outcomes.iter().find(|(id, ..)| *id == request);
        let (_, _, outcome) = known.filter(|(_, at, _)| at.elapsed() < TOLD_FOR)?;
        let others = query_text.split('&').filter(|pair| {
            let name = pair.split_once('=').map_or(*pair, |(name, _)| name);
            name != TOLD
        });
        Some(Told {
            outcome: outcome.clone(),
            without: format!("?{}", others.collect::<Vec<_>>().join("&")),
        })
    }

    /// Answers with the page, or with those parts of it that the viewer has not.
    pub(super) async fn show<F, B>(&self, ask: Ask, build: B) -> Response
    where
        B: FnOnce(Look) -> F,
        F: Future<Output = Result<Screen, Trouble>>,
    {
        let can_act = ask.caller.may(Right::Admin);
        let key = (format!("{}?{}", ask.path, ask.query_text), can_act);
        let mut query = match ask.query {
            Ok(query) => query,
            Err(fault) => return frame::fault_page(&fault),
        };
        let told = self.told(&mut query, &ask.query_text);
        let render = async {
            let Ok(_permit) = self.inner.rendering.try_acquire() else {
                return Err(Trouble::Fault(Fault::overloaded()));
            };
            let look = Look {
                app: self.inner.app.clone(),
                query,
                can_act,
                state: read::state(&self.inner.app),
            };
            rendered(build, look, told.as_ref()).await
        };
        let page = match self.slot(key) {
            None => render.await,
            Some(slot) => {
                // One renders, the others wait for it.
                let mut slot = slot.lock().await;
                let acts = self.inner.acts.load(Ordering::Relaxed);
                let began = Instant::now();
                match &*slot {
                    Some(shared) if began < shared.until && shared.acts == acts => {
                        Ok(Arc::clone(&shared.page))
                    }
                    _ => {
                        let page = render.await;
                        if let Ok(page) = &page {
                            let took = began.elapsed().saturating_mul(COSTLY);
                            *slot = Some(Shared {
                                until: began + took.max(FRESH),
                                acts,
                                page: Arc::clone(page),
                            });
                        }
                        page
                    }
                }
            }
        };
        match page {
            Ok(page) => answer(&page, ask.has.as_deref(), ask.etag.as_ref()),
            Err(Trouble::Fault(fault)) if ask.has.is_some() => fault.into_response(),
            Err(Trouble::Fault(fault)) => frame::fault_page(&fault),
            Err(Trouble::Template(error)) => {
                tracing::error!(%error, path = ask.path, "a page cannot be rendered");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }

    /// The place of a page that others may share.
    fn slot(&self, key: (String, bool)) -> Option<Slot> {
        if key.0.len() > KEY_MAX {
            return None;
        }
        let mut kept = self
            .inner
            .kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !kept.contains_key(&key) && kept.len() >= KEPT_MAX {
            kept.retain(|_, (used, _)| used.elapsed() < FRESH);
        }
        if !kept.contains_key(&key) && kept.len() >= KEPT_MAX {
            return None;
        }
        let (used, slot) = kept
            .entry(key)
            .or_insert_with(|| (Instant::now(), Slot::default()));
        *used = Instant::now();
        Some(Arc::clone(slot))
    }
}

async fn rendered<F, B>(build: B, look: Look, told: Option<&Told>) -> Result<Arc<Rendered>, Trouble>
where
    B: FnOnce(Look) -> F,
    F: Future<Output = Result<Screen, Trouble>>,
{
    let app = look.app.clone();
    let state = look.state.clone();
    let can_act = look.can_act;
    let mut screen = build(look).await?;
    frame::add(&mut screen, &app, &state, can_act)?;
    frame::tell(&mut screen, told)?;
    let body = (screen.layout)(&screen.parts)?;
    let marks = screen.parts.marks();
    let html = frame::page(&screen, &body, &marks)?;
    let etag = format!(
        "\"{:08x}-{}\"",
        crc32fast::hash(html.as_bytes()),
        assets::version()
    );
    Ok(Arc::new(Rendered {
        html,
        parts: screen.parts,
        marks,
        etag,
    }))
}

fn answer(page: &Rendered, has: Option<&str>, etag: Option<&HeaderValue>) -> Response {
    let mut headers = HeaderMap::new();
    headers.insert(
        VARY,
        HeaderValue::from_static("kvgate-parts, cookie, authorization"),
    );
    headers.insert(KVGATE_ASSETS, header(assets::version()));
    let Some(has) = has else {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        headers.insert(ETAG, header(&page.etag));
        if etag.is_some_and(|etag| etag.as_bytes() == page.etag.as_bytes()) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        let status = if page.parts.missing {
            StatusCode::NOT_FOUND
        } else {
            StatusCode::OK
        };
        return html(status, headers, page.html.clone());
    };
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(KVGATE_PARTS, header(&page.marks));
    let mut changed = String::new();
    for part in &page.parts.parts {
        let mark = format!("{}={:08x}", part.id, part.mark);
        if !has.split(' ').any(|has| has == mark) {
            let _ = write!(
                changed,
                "<hx-partial hx-target=\"#{}\" hx-swap=\"outerMorph\">{}</hx-partial>",
                part.id, part.html
            );
        }
    }
    if changed.is_empty() {
        return (StatusCode::NO_CONTENT, headers).into_response();
    }
    html(StatusCode::OK, headers, changed)
}

fn header(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

/// HTML with what every page carries.
pub(super) fn html(status: StatusCode, mut headers: HeaderMap, html: String) -> Response {
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    if status == StatusCode::SERVICE_UNAVAILABLE {
        headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    (status, headers, html).into_response()
}
