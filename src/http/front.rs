//! What stands before every route: under which name it is asked, who asks and what they may do, what the service can do
//! now, and what every answer carries.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::extract::{FromRequestParts, MatchedPath, Request};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY,
    CONTENT_TYPE, COOKIE, HOST, ORIGIN, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
use axum::response::{IntoResponse, Response};
use axum::routing::Route;
use kvgate_api::{PROBLEM_JSON, ProblemCode};
use tower::{Layer, Service};

use super::answer::{HeldOpen, short};
use super::app::App;
use super::extract::query_pairs;
use super::problem::{self, Fault};
use super::rights::{self, Rule};
use super::server::Arrival;
use crate::access::{self, Asked, Caller, Hosts, Right, Scheme};
use crate::gate::Phase;
use crate::telemetry::{Repeats, RequestId, RouteMetrics, UNMATCHED};
use crate::web;

static FOREIGN_HOST: Repeats = Repeats::new("a request under a foreign host name was refused");
static CROSS_SITE: Repeats = Repeats::new("a cross-site write was refused");
static WRONG_TOKEN: Repeats = Repeats::new("a wrong token was refused");
static NO_RIGHT: Repeats = Repeats::new("a call without the right to it was refused");

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const KVGATE_EPOCH: HeaderName = HeaderName::from_static("kvgate-epoch");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Content policy of what is no page: it is never shown as one.
const NO_PAGE: &str = "default-src 'none'; frame-ancestors 'none'";

/// Headers of every answer that keep browsers from using it in ways it is not meant for.
const FOR_BROWSERS: [(HeaderName, &str); 5] = [
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("permissions-policy"),
        "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    ),
];

/// Answered whatever the service is doing.
const ALWAYS: &[&str] = &["/healthz", "/readyz", "/version", "/openapi.json"];
/// What those of them need that are for people, too.
const ALWAYS_BELOW: [&str; 2] = ["/problems/", "/static/"];

/// What is known of a request that has passed the front. It stands beside the request.
#[derive(Clone, Debug)]
pub struct Passed {
    /// Its id.
    pub id: RequestId,
    /// A browser came over TLS, to us or to a proxy that the operator named: then its cookie is for TLS only.
    pub over_tls: bool,
    /// Who asks, as far as that must be known.
    pub caller: Option<Caller>,
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Fault> {
        let passed = parts.extensions.get::<Passed>();
        let caller = passed.and_then(|passed| passed.caller.clone());
        caller.ok_or_else(|| problem::unauthorized(false))
    }
}

/// Puts the front before all routes, and before what no route serves.
#[derive(Clone)]
pub(super) struct Before(pub(super) App);

impl Layer<Route> for Before {
    type Service = Front;

    fn layer(&self, route: Route) -> Front {
        Front {
            own: Arc::new(Own {
                app: self.0.clone(),
                metrics: OnceLock::new(),
            }),
            route,
        }
    }
}

/// A route with the front before it.
#[derive(Clone)]
pub(super) struct Front {
    own: Arc<Own>,
    route: Route,
}

/// What the front of one route has.
struct Own {
    app: App,
    /// From its first request on.
    metrics: OnceLock<RouteMetrics>,
}

impl Service<Request> for Front {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.route, context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        let own = Arc::clone(&self.own);
        let id = own.app.next_request_id();
        let asked = AskedFor::new(&request);
        // Whatever the log tells of this request carries its id.
        let answer = match id.within(|| check(&own.app, &mut request, id, asked.rule())) {
            Ok(()) => Ok(self.route.call(request)),
            Err(refused) => Err(refused),
        };
        Box::pin(id.during(async move {
            let response = match answer {
                Ok(answer) => answer.await?,
                Err(refused) => refused.into_response(),
            };
            Ok(own.finished(id, &asked, response))
        }))
    }
}

/// What an answer is finished by of the request that it is to.
struct AskedFor {
    began: Instant,
    route: Option<MatchedPath>,
    method: Method,
    is_page: bool,
}

impl AskedFor {
    fn new(request: &Request) -> Self {
        Self {
            began: Instant::now(),
            route: request.extensions().get::<MatchedPath>().cloned(),
            method: request.method().clone(),
            is_page: !request.uri().path().starts_with("/v1"),
        }
    }

    fn rule(&self) -> Rule {
        rights::needed(&self.method, self.route.as_ref().map(MatchedPath::as_str))
    }
}

impl Own {
    /// The answer as it is sent: counted, and with what every answer carries.
    fn finished(&self, id: RequestId, asked: &AskedFor, response: Response) -> Response {
        let held_open = response.extensions().get::<HeldOpen>().is_some();
        let mut response = rendered(response, id);
        let metrics = self.metrics.get_or_init(|| {
            let route = asked.route.as_ref().map_or(UNMATCHED, MatchedPath::as_str);
            self.app.metrics().of_route(route)
        });
        let status = response.status();
        let took = (!held_open).then(|| asked.began.elapsed());
        metrics.answered(asked.method.as_str(), status.as_u16(), took);
        let headers = response.headers_mut();
        put_common(&self.app, id, headers);
        if status == StatusCode::NOT_MODIFIED {
            // A browser takes them over into what it has kept, which came with its own: a page would lose its files.
            headers.remove(CONTENT_SECURITY_POLICY);
            headers.remove(REFERRER_POLICY);
        }
        if !asked.is_page || !headers.contains_key(CACHE_CONTROL) {
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        response
    }
}

fn put_common(app: &App, id: RequestId, headers: &mut HeaderMap) {
    let epoch = app.gate().epoch().0;
    let own = [(X_REQUEST_ID, short(id)), (KVGATE_EPOCH, short(epoch))];
    for (name, value) in own {
        headers.extend(value.map(|value| (name, value)));
    }
    for (name, value) in FOR_BROWSERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let (policy, referrer) = if is_html(headers) {
        (web::CONTENT_POLICY, "same-origin")
    } else {
        (NO_PAGE, "no-referrer")
    };
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static(referrer));
}

fn is_html(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/html"))
}

/// A fault becomes its problem here. An error that some library words by itself becomes one too.
fn rendered(response: Response, id: RequestId) -> Response {
    let status = response.status();
    let fault = match response.extensions().get::<Fault>() {
        Some(fault) => fault.clone(),
        None if is_foreign_error(&response) => by_status(status),
        None => return response,
    };
    let mut rendered = fault.render(id);
    for (name, value) in response.headers() {
        if name != CONTENT_TYPE && name != CONTENT_LENGTH && !rendered.headers().contains_key(name)
        {
            rendered.headers_mut().insert(name, value.clone());
        }
    }
    rendered
}

fn is_foreign_error(response: &Response) -> bool {
    let status = response.status();
    let headers = response.headers();
    let is_problem = |kind: &HeaderValue| kind == PROBLEM_JSON;
    let ours = is_html(headers) || headers.get(CONTENT_TYPE).is_some_and(is_problem);
    (status.is_client_error() || status.is_server_error()) && !ours
}

fn by_status(status: StatusCode) -> Fault {
    match status {
        StatusCode::METHOD_NOT_ALLOWED => problem::method_not_allowed(),
        StatusCode::NOT_FOUND => problem::not_found(),
        status => Fault::bad_request("The request could not be read.").with_status(status),
    }
}

/// The whole answer to a request that hyper could not read: `head` is what hyper would say.
pub(super) fn refusal(app: &App, head: &[u8]) -> Vec<u8> {
    let status = head
        .get(9..12)
        .and_then(|digits| StatusCode::from_bytes(digits).ok())
        .unwrap_or(StatusCode::BAD_REQUEST);
    let detail = match status {
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => "The head of the request is too large.",
        StatusCode::URI_TOO_LONG => "The address is too long.",
        _ => "This is not a request of HTTP/1.1.",
    };
    refused(app, status, detail)
}

/// The whole answer to a client that asks in the clear where TLS is spoken.
pub(super) fn plain_on_tls(app: &App) -> Vec<u8> {
    let detail = "This port speaks TLS: use an address that begins with https://.";
    refused(app, StatusCode::BAD_REQUEST, detail)
}

fn refused(app: &App, status: StatusCode, detail: &'static str) -> Vec<u8> {
    app.metrics()
        .of_route(UNMATCHED)
        .answered("", status.as_u16(), None);
    let id = app.next_request_id();
    let fault = Fault::bad_request(detail).with_status(status);
    let body = serde_json::to_vec(&fault.problem(id)).unwrap_or_default();
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    put_common(app, id, &mut headers);
    let mut answer = format!("HTTP/1.1 {status}\r\nconnection: close\r\n").into_bytes();
    for (name, value) in &headers {
        answer.extend_from_slice(name.as_str().as_bytes());
        answer.extend_from_slice(b": ");
        answer.extend_from_slice(value.as_bytes());
        answer.extend_from_slice(b"\r\n");
    }
    answer.extend_from_slice(b"\r\n");
    answer.extend_from_slice(&body);
    answer
}

/// Why a request goes no further.
enum Refused {
    Fault(Fault),
    /// The same for people.
    Page(Fault),
    /// The caller is not known. People get the form, and come back to what they asked for.
    Unknown {
        is_wrong: bool,
        form_for: Option<String>,
    },
}

impl From<Fault> for Refused {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (is_wrong, form_for) = match self {
            Self::Fault(fault) => return fault.into_response(),
            Self::Page(fault) => return web::fault_page(&fault),
            Self::Unknown { is_wrong, form_for } => (is_wrong, form_for),
        };
        let mut response = match form_for {
            Some(path) => web::login_form(&path),
            None => problem::unauthorized(is_wrong).into_response(),
        };
        if is_wrong {
            // Each guess costs a connection.
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// What a request passes before it is served. What it is known by from here on stands beside it.
fn check(app: &App, request: &mut Request, id: RequestId, rule: Rule) -> Result<(), Refused> {
    let asked = checked_host(app, request)?;
    refuse_tokens_in_query(request)?;
    let scheme = scheme(request);
    refuse_cross_site(app, request, scheme, asked.as_ref())?;
    let caller = let_in(app, request, rule)?;
    check_phase(app, request).map_err(|fault| refused_as(fault, rule))?;
    let behind_tls = |asked: &Asked| hosts(app).are_behind_tls(asked);
    let over_tls = scheme == Scheme::Https || asked.as_ref().is_some_and(behind_tls);
    request.extensions_mut().insert(Passed {
        id,
        over_tls,
        caller,
    });
    Ok(())
}

/// How the connection was made. The accept loop says so where it is TLS.
fn scheme(request: &Request) -> Scheme {
    let arrival = request.extensions().get::<Arc<Arrival>>();
    arrival.map_or(Scheme::Http, |arrival| arrival.scheme)
}

fn hosts(app: &App) -> Hosts<'_> {
    let config = app.config();
    Hosts {
        bound: &config.bound,
        allowed: &config.allowed_hosts,
    }
}

/// DNS rebinding: a foreign page reaches a loopback port under its own name, which the Host header
/// tells.
fn checked_host(app: &App, request: &Request) -> Result<Option<Asked>, Fault> {
    let mut headers = request.headers().get_all(HOST).iter();
    let header = headers.next();
    if headers.next().is_some() {
        return Err(Fault::bad_request("The Host header stands twice."));
    }
    let unreadable = || Fault::bad_request("The Host header cannot be read.");
    let host = match header {
        Some(header) => {
            let text = header.to_str().unwrap_or_default();
            let authority = text.parse::<Authority>().map_err(|_| unreadable())?;
            Some(asked(&authority).ok_or_else(unreadable)?)
        }
        None if request.version() == Version::HTTP_10 => None,
        None => return Err(Fault::bad_request("The Host header is missing.")),
    };
    // An address in the request line takes the place of the header, so both must be allowed.
    let in_line = match request.uri().authority() {
        Some(authority) => Some(asked(authority).ok_or_else(unreadable)?),
        None => None,
    };
    for asked in host.iter().chain(&in_line) {
        if !hosts(app).are_asked(asked) {
            if FOREIGN_HOST.is_told() {
                tracing::warn!(host = %asked.host, "a request under a foreign host name was refused");
            }
            return Err(Fault::new(
                ProblemCode::HostNotAllowed,
                "The Host header names neither the address of this service, nor a loopback name, nor a configured name.",
            ));
        }
    }
    Ok(in_line.or(host))
}

/// Name and port; `None` for something that is no port. User information makes a name that is nobody's.
fn asked(authority: &Authority) -> Option<Asked> {
    let text = authority.as_str();
    let (host, rest) = match text.strip_prefix(authority.host()) {
        Some(rest) if !text.contains('@') => (authority.host(), rest),
        _ => (text, ""),
    };
    let port = rest.strip_prefix(':').filter(|port| !port.is_empty());
    Some(Asked {
        host: host.to_ascii_lowercase(),
        port: port.map(str::parse).transpose().ok()?,
    })
}

/// Addresses end up in logs and histories, so a token in one is refused, also beside a good header.
fn refuse_tokens_in_query(request: &Request) -> Result<(), Fault> {
    let query = request.uri().query().unwrap_or_default();
    let named = query_pairs(query)
        .any(|(name, _)| matches!(name.as_deref(), Some("token" | "access_token")));
    if named {
        return Err(Fault::bad_request(
            "A token must not stand in the address, where logs keep it. Send it in the header `Authorization`.",
        ));
    }
    Ok(())
}

/// Cross-site writes: a browser sends them with an Origin, or says that they come from elsewhere.
fn refuse_cross_site(
    app: &App,
    request: &Request,
    scheme: Scheme,
    asked: Option<&Asked>,
) -> Result<(), Fault> {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    let headers = request.headers();
    let origins = headers.get_all(ORIGIN).iter();
    let same_origin = origins
        .map(|origin| origin.to_str().unwrap_or_default())
        .all(|origin| hosts(app).own_origin(origin, scheme, asked));
    let same_site = headers
        .get_all(SEC_FETCH_SITE)
        .iter()
        .all(|site| site == "same-origin" || site == "none");
    if same_origin && same_site {
        return Ok(());
    }
    if CROSS_SITE.is_told() {
        tracing::warn!(
            path = request.uri().path(),
            "a cross-site write was refused"
        );
    }
    Err(Fault::new(
        ProblemCode::Forbidden,
        "A web page of another origin must not write here.",
    ))
}

/// Who asks, by what a request carries.
enum Asker {
    Nobody,
    WrongToken,
    Known(Caller),
}

/// Who asks, when they may. Where nobody has to be known, whoever is known is still told to the handler.
fn let_in(app: &App, request: &Request, rule: Rule) -> Result<Option<Caller>, Refused> {
    let config = app.config();
    if config.access.is_open() {
        return Ok(Some(Caller::local()));
    }
    let asker = asker(app, request.headers());
    let is_open_metrics = route(request) == Some(rights::METRICS) && !config.metrics_auth;
    let needed = rule.right.filter(|_| !is_open_metrics);
    match (needed, asker) {
        (None, Asker::Known(caller)) => Ok(Some(caller)),
        (None, Asker::Nobody | Asker::WrongToken) => Ok(None),
        (Some(needed), Asker::Known(caller)) if caller.may(needed) => Ok(Some(caller)),
        (Some(needed), Asker::Known(caller)) => {
            if NO_RIGHT.is_told() {
                let (name, route) = (&*caller.name, route(request).unwrap_or(UNMATCHED));
                tracing::warn!(name, route, "a call without the right to it was refused");
            }
            let fault = forbidden(&caller, needed);
            Err(refused_as(fault, rule))
        }
        (Some(_), asker) => {
            let is_wrong = matches!(asker, Asker::WrongToken);
            if is_wrong && WRONG_TOKEN.is_told() {
                let route = route(request).unwrap_or(UNMATCHED);
                tracing::warn!(route, "a wrong token was refused");
            }
            Err(Refused::Unknown {
                is_wrong,
                form_for: rule.is_page.then(|| asked_for(request)),
            })
        }
    }
}

/// People get a page, programs a problem.
fn refused_as(fault: Fault, rule: Rule) -> Refused {
    if rule.is_page {
        Refused::Page(fault)
    } else {
        Refused::Fault(fault)
    }
}

fn route(request: &Request) -> Option<&str> {
    let route = request.extensions().get::<MatchedPath>();
    route.map(MatchedPath::as_str)
}

/// Where a log-in leads back to.
fn asked_for(request: &Request) -> String {
    let path = request.uri().path_and_query();
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    path.filter(|_| is_read)
        .map_or_else(|| "/".to_owned(), ToString::to_string)
}

fn forbidden(caller: &Caller, needed: Right) -> Fault {
    Fault::new(
        ProblemCode::Forbidden,
        format!(
            "The token has the scope `{}`, and this call needs `{}`.",
            caller.right.word(),
            needed.word()
        ),
    )
}

/// A token in the header goes before a log-in: who sends a wrong one is not let in by a cookie.
fn asker(app: &App, headers: &HeaderMap) -> Asker {
    let access = &app.config().access;
    match bearer(headers) {
        Bearer::Token(token) => access
            .with_token(token)
            .map_or(Asker::WrongToken, Asker::Known),
        Bearer::Unreadable => Asker::WrongToken,
        Bearer::None => {
            let cookies = headers.get_all(COOKIE).iter();
            let now = Instant::now();
            access::login_ids(cookies.filter_map(|cookie| cookie.to_str().ok()))
                .find_map(|id| access.with_login(&id, now))
                .map_or(Asker::Nobody, Asker::Known)
        }
    }
}

enum Bearer<'a> {
    None,
    Unreadable,
    Token(&'a str),
}

/// The token of `Authorization: Bearer`. Other schemes are for others: a proxy with a password of its own sends its on.
fn bearer(headers: &HeaderMap) -> Bearer<'_> {
    let mut tokens = headers.get_all(AUTHORIZATION).iter().filter_map(|value| {
        let bytes = value.as_bytes();
        let (scheme, token) = bytes.split_at_checked("bearer".len())?;
        let ends = token.first().is_none_or(|byte| *byte == b' ');
        (scheme.eq_ignore_ascii_case(b"bearer") && ends).then_some(token)
    });
    match (tokens.next(), tokens.next()) {
        (None, _) => Bearer::None,
        (Some(token), None) => match std::str::from_utf8(token.trim_ascii()) {
            Ok(token) if !token.is_empty() => Bearer::Token(token),
            _ => Bearer::Unreadable,
        },
        (Some(_), Some(_)) => Bearer::Unreadable,
    }
}

/// DUR3, and the orderly stop: reads are answered until its end.
fn check_phase(app: &App, request: &Request) -> Result<(), Fault> {
    let path = request.uri().path();
    if ALWAYS.contains(&path) || ALWAYS_BELOW.iter().any(|below| path.starts_with(below)) {
        return Ok(());
    }
    match app.gate().phase() {
        Phase::Starting => Err(problem::recovering()),
        Phase::Draining if !matches!(*request.method(), Method::GET | Method::HEAD) => {
            Err(problem::draining())
        }
        Phase::Draining | Phase::Ready | Phase::Unavailable => Ok(()),
    }
}
