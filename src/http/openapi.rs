//! The OpenAPI 3.1 document: generated from the handlers, completed with what every call shares.

use std::sync::OnceLock;

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ContentBuilder, Header, InfoBuilder, LicenseBuilder, OpenApi, Ref, RefOr, Response as Answer,
    ResponseBuilder,
};

use super::rights;
use crate::access::Right;

/// Name of the way to be known.
const TOKEN: &str = "token";

const DESCRIPTION: &str = "A durable admission gate in front of SGLang fleets: leases on KV tokens, one FIFO queue, and \
                           closes of sessions that reach every engine. Every error is a problem (RFC 9457), every 503 carries Retry-After, and a caller that gets \
                           no answer goes on without a lease.";

/// The document as JSON.
#[must_use]
pub fn openapi() -> String {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    DOCUMENT
        .get_or_init(|| {
            let (_, document) = super::routes().split_for_parts();
            completed(document).to_pretty_json().unwrap_or_default()
        })
        .clone()
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "operation",
    responses((status = 200, description = "OpenAPI 3.1", content_type = "application/json", body = Object))
)]
pub(super) async fn document() -> Response {
    let kind = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (kind, openapi()).into_response()
}

/// With headers, problems and a title.
fn completed(mut document: OpenApi) -> OpenApi {
    document.info = InfoBuilder::new()
        .title("kvgate")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(DESCRIPTION))
        .license(Some(
            LicenseBuilder::new()
                .name("Apache-2.0")
                .identifier(Some("Apache-2.0"))
                .build(),
        ))
        .build();
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    document
        .components
        .get_or_insert_default()
        .add_security_scheme(TOKEN, scheme);
    for (path, item) in &mut document.paths.paths {
        let versioned = path.starts_with("/v1/");
        for (method, operation) in operations(item) {
            if let Some(right) = rights::needed(&method, Some(path)).right {
                ask_for(operation, right);
            }
            complete(operation, versioned);
        }
    }
    document
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    [
        (Method::GET, &mut item.get),
        (Method::POST, &mut item.post),
        (Method::PUT, &mut item.put),
        (Method::DELETE, &mut item.delete),
        (Method::PATCH, &mut item.patch),
    ]
    .into_iter()
    .filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// A token, or none where the service asks for none.
fn ask_for(operation: &mut Operation, right: Right) {
    let token = SecurityRequirement::new(TOKEN, [] as [&str; 0]);
    operation.security = Some(vec![token, SecurityRequirement::default()]);
    let forbidden = format!(
        "`forbidden`: needs a token with the scope `{}`",
        right.word()
    );
    let responses = &mut operation.responses.responses;
    for (status, description) in [("401", "`unauthorized`".to_owned()), ("403", forbidden)] {
        let response = ResponseBuilder::new().description(description).build();
        responses.insert(status.to_owned(), RefOr::T(response));
    }
}

fn complete(operation: &mut Operation, versioned: bool) {
    let responses = &mut operation.responses.responses;
    let mut problems = vec![("default", "Any other problem, by `code`")];
    if versioned {
        problems.push((
            "503",
            "`recovering`, `draining`, `overloaded` or `store_unavailable`",
        ));
    }
    if operation.request_body.is_some() {
        problems.extend([
            ("400", "`invalid_json` or `invalid_id`"),
            ("413", "`body_too_large`"),
            ("415", "`unsupported_media_type`"),
            ("422", "`invalid_request`, with `errors`"),
        ]);
    }
    for (status, description) in problems {
        responses
            .entry(status.to_owned())
            .or_insert_with(|| RefOr::T(ResponseBuilder::new().description(description).build()));
    }
    for (status, response) in responses {
        let RefOr::T(response) = response else {
            continue;
        };
        if status.starts_with(['4', '5', 'd']) {
            as_problem(response);
        }
        add_headers(response, status);
    }
}

fn as_problem(response: &mut Answer) {
    let schema = Ref::from_schema_name("Problem");
    response.content.clear();
    response.content.insert(
        kvgate_api::PROBLEM_JSON.to_owned(),
        RefOr::T(ContentBuilder::new().schema(Some(schema)).build()),
    );
}

fn add_headers(response: &mut Answer, status: &str) {
    let headers = &mut response.headers;
    let text = |text: &str| header(Type::String, text);
    headers.insert(
        "X-Request-Id".to_owned(),
        text("kvgate's own id of the request; `instance` of a problem"),
    );
    headers.insert(
        "Kvgate-Epoch".to_owned(),
        header(Type::Integer, "Generation of the worker set"),
    );
    if status == "200" || status == "202" {
        headers.insert(
            "Kvgate-Seq".to_owned(),
            header(
                Type::Integer,
                "Number of the committed change; only when the call changed state",
            ),
        );
    }
    if status == "401" {
        headers.insert("WWW-Authenticate".to_owned(), text("`Bearer`"));
    }
    if status == "503" {
        headers.insert(
            "Retry-After".to_owned(),
            header(Type::Integer, "Seconds after which another try is worth it"),
        );
    }
}

fn header(kind: Type, description: &str) -> RefOr<Header> {
    RefOr::T(
        HeaderBuilder::new()
            .schema(Some(ObjectBuilder::new().schema_type(kind).build()))
            .description(Some(description))
            .build(),
    )
}
