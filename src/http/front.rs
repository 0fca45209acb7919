//! What stands before every route: who may ask at all, what the service can do now, and what every
//! answer carries.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HOST, ORIGIN, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use kvgate_api::{PROBLEM_JSON, ProblemCode};

use tracing::Instrument;

use super::answer::HeldOpen;
use super::app::{App, RequestId};
use super::extract::query_pairs;
use super::listener::Scheme;
use super::problem::{self, Fault};
use crate::access::Caller;
use crate::gate::Phase;
use crate::telemetry::{Repeats, UNMATCHED};

static FOREIGN_HOST: Repeats = Repeats::new("a request under a foreign host name was refused");
static CROSS_SITE: Repeats = Repeats::new("a cross-site write was refused");

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const KVGATE_EPOCH: HeaderName = HeaderName::from_static("kvgate-epoch");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Answered whatever the service is doing.
const ALWAYS: &[&str] = &["/healthz", "/readyz", "/version", "/openapi.json"];
const PROBLEM_PAGES: &str = "/problems/";

/// Around all routes, and around what no route serves.
pub(super) async fn front(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let id = app.next_request_id();
    request.extensions_mut().insert(id.clone());
    request.extensions_mut().insert(Caller::local());
    let is_page = !request.uri().path().starts_with("/v1");
    let began = Instant::now();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = request.method().clone();
    // Whatever the log tells of this request carries its id.
    let span = tracing::error_span!("request", id = id.as_str());
    let answer = async {
        match check(&app, &request) {
            Ok(()) => next.run(request).await,
            Err(fault) => fault.into_response(),
        }
    };
    let response = answer.instrument(span).await;
    let held_open = response.extensions().get::<HeldOpen>().is_some();
    let mut response = rendered(response, &id);
    app.metrics().answered(
        route.as_ref().map_or(UNMATCHED, MatchedPath::as_str),
        method.as_str(),
        response.status().as_u16(),
        (!held_open).then(|| began.elapsed()),
    );
    let headers = response.headers_mut();
    put_common(&app, &id, headers);
    if !is_page || !headers.contains_key(CACHE_CONTROL) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

fn put_common(app: &App, id: &RequestId, headers: &mut HeaderMap) {
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        headers.insert(X_REQUEST_ID, id);
    }
    let epoch = app.gate().view().epoch;
    headers.insert(KVGATE_EPOCH, HeaderValue::from(epoch.0));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// A fault becomes its problem here. An error that some library words by itself becomes one too.
fn rendered(response: Response, id: &RequestId) -> Response {
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
    let kind = response.headers().get(CONTENT_TYPE);
    let ours = kind.is_some_and(|kind| {
        kind == PROBLEM_JSON
            || kind
                .to_str()
                .is_ok_and(|kind| kind.starts_with("text/html"))
    });
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
    app.metrics().answered(UNMATCHED, "", status.as_u16(), None);
    let id = app.next_request_id();
    let fault = Fault::bad_request(detail).with_status(status);
    let body = serde_json::to_vec(&fault.problem(&id)).unwrap_or_default();
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    put_common(app, &id, &mut headers);
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

fn check(app: &App, request: &Request) -> Result<(), Fault> {
    let host = checked_host(app, request)?;
    refuse_tokens_in_query(request)?;
    refuse_cross_site(app, request, host.as_ref())?;
    check_phase(app, request)
}

/// DNS rebinding: a foreign page reaches a loopback port under its own name, which the Host header
/// tells.
fn checked_host(app: &App, request: &Request) -> Result<Option<Authority>, Fault> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Fault::bad_request("The Host header stands twice."));
    }
    let host = match host {
        Some(host) => {
            let text = host.to_str().unwrap_or_default();
            let authority = text.parse::<Authority>();
            Some(authority.map_err(|_| Fault::bad_request("The Host header cannot be read."))?)
        }
        None if request.version() == Version::HTTP_10 => None,
        None => return Err(Fault::bad_request("The Host header is missing.")),
    };
    // An address in the request line takes the place of the header, so both must be allowed.
    for authority in host.iter().chain(request.uri().authority()) {
        if !is_allowed_host(app, authority) {
            if FOREIGN_HOST.is_told() {
                tracing::warn!(host = %authority, "a request under a foreign host name was refused");
            }
            return Err(Fault::new(
                ProblemCode::HostNotAllowed,
                "The Host header names neither the address of this service, nor a loopback name, nor a configured name.",
            ));
        }
    }
    Ok(host)
}

/// Loopback names with any port, since a tunnel changes the port but never the name; the bound
/// address and the configured names with their port or without.
fn is_allowed_host(app: &App, authority: &Authority) -> bool {
    if authority.as_str().contains('@') {
        return false;
    }
    let host = authority.host().to_ascii_lowercase();
    if matches!(
        host.as_str(),
        "localhost" | "localhost." | "127.0.0.1" | "[::1]"
    ) {
        return true;
    }
    let port = authority.port_u16();
    let config = app.config();
    let is_bound = config.bound.iter().any(|bound| {
        let name = match bound {
            std::net::SocketAddr::V4(address) => address.ip().to_string(),
            std::net::SocketAddr::V6(address) => format!("[{}]", address.ip()),
        };
        host == name && port.is_none_or(|port| port == bound.port())
    });
    if is_bound {
        return true;
    }
    config.allowed_hosts.iter().any(|allowed| {
        allowed.parse::<Authority>().is_ok_and(|allowed| {
            allowed.host().eq_ignore_ascii_case(&host)
                && (allowed.port().is_none() || allowed.port_u16() == port)
        })
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

/// X-site writes: a browser sends them with an Origin, or says that they come from elsewhere.
fn refuse_cross_site(app: &App, request: &Request, host: Option<&Authority>) -> Result<(), Fault> {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    let headers = request.headers();
    let origins = headers.get_all(ORIGIN).iter();
    let scheme = request.extensions().get::<Scheme>();
    let scheme = scheme.copied().unwrap_or(Scheme::Http);
    let same_origin = origins
        .map(|origin| origin.to_str().unwrap_or_default())
        .all(|origin| is_own_origin(app, origin, scheme, host));
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

/// The origin of this very address, or that of another allowed name at the bound port.
fn is_own_origin(app: &App, origin: &str, scheme: Scheme, host: Option<&Authority>) -> bool {
    let Some(origin) = origin
        .strip_prefix(scheme.as_str())
        .and_then(|rest| rest.strip_prefix("://"))
        .and_then(|origin| origin.parse::<Authority>().ok())
    else {
        return false;
    };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(scheme.port());
    let same = |host: &Authority| {
        host.host().eq_ignore_ascii_case(origin.host()) && port(host) == port(&origin)
    };
    let at_bound_port = |bound: &std::net::SocketAddr| port(&origin) == bound.port();
    host.is_some_and(same)
        || is_allowed_host(app, &origin) && app.config().bound.iter().any(at_bound_port)
}

/// DUR3, and the orderly stop: reads are answered until its end.
fn check_phase(app: &App, request: &Request) -> Result<(), Fault> {
    let path = request.uri().path();
    if ALWAYS.contains(&path) || path.starts_with(PROBLEM_PAGES) {
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
