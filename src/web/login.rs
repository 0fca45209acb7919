//! The log-in of browsers: a form that takes a token and gives a cookie, and the way out.

use std::time::Instant;

use askama::Template;
use axum::Extension;
use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_TYPE, COOKIE, LOCATION, SET_COOKIE, WWW_AUTHENTICATE,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use url::Url;

use super::assets;
use super::page::Web;
use crate::access::{self, Caller, LoginRefused};
use crate::http::{BEARER, Fault, Form, Passed};
use crate::telemetry::Repeats;

static WRONG_TOKEN: Repeats = Repeats::new("a log-in with a wrong token was refused");

/// Longest address that a log-in leads back to.
const BACK_BYTES_MAX: usize = 2_048;

#[derive(Template)]
#[template(path = "login.html")]
struct Page<'a> {
    assets: &'static str,
    /// Who is logged in already.
    who: Option<&'a Caller>,
    /// Why the form comes again.
    trouble: Option<&'a str>,
    /// Where a log-in leads.
    back: &'a str,
}

/// The form in place of a page that needs a log-in; `asked_for` is what the log-in leads back to.
pub(crate) fn form(asked_for: &str) -> Response {
    let page = Page {
        assets: assets::version(),
        who: None,
        trouble: None,
        back: &own_path(asked_for),
    };
    unauthorized(&page)
}

/// `GET /login`.
pub(super) async fn page(State(web): State<Web>, Extension(passed): Extension<Passed>) -> Response {
    if web.app().config().access.is_open() {
        return to("/");
    }
    let page = Page {
        assets: assets::version(),
        who: passed.caller.as_ref(),
        trouble: None,
        back: "/",
    };
    rendered(StatusCode::OK, &page)
}

/// `POST /login`, fields `token` and `back`.
pub(super) async fn log_in(
    State(web): State<Web>,
    Extension(passed): Extension<Passed>,
    headers: HeaderMap,
    form: Form,
) -> Response {
    if web.app().config().access.is_open() {
        return to("/");
    }
    let back = own_path(form.field("back"));
    match web
        .app()
        .config()
        .access
        .log_in(form.field("token").trim(), Instant::now())
    {
        Ok((caller, id)) => {
            end_logins(&web, &headers);
            tracing::info!(
                name = &*caller.name,
                scope = caller.right.word(),
                "a browser logged in"
            );
            with_cookie(to(&back), &access::login_cookie(&id, passed.over_tls))
        }
        Err(LoginRefused::Unknown) => {
            if WRONG_TOKEN.is_told() {
                tracing::warn!("a log-in with a wrong token was refused");
            }
            let page = Page {
                assets: assets::version(),
                who: None,
                trouble: Some("This token is not known."),
                back: &back,
            };
            let mut response = unauthorized(&page);
            // Each guess costs a connection.
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
        Err(error @ LoginRefused::NoRandom(_)) => {
            tracing::error!(%error, "nobody can log in");
            Fault::bad_request("The system gives no random numbers.")
                .with_status(StatusCode::INTERNAL_SERVER_ERROR)
                .into_response()
        }
    }
}

/// `POST /logout`.
pub(super) async fn log_out(
    State(web): State<Web>,
    Extension(passed): Extension<Passed>,
    headers: HeaderMap,
) -> Response {
    end_logins(&web, &headers);
    with_cookie(to("/login"), &access::no_cookie(passed.over_tls))
}

fn end_logins(web: &Web, headers: &HeaderMap) {
    let cookies = headers.get_all(COOKIE).iter();
    for id in access::login_ids(cookies.filter_map(|cookie| cookie.to_str().ok())) {
        web.app().config().access.log_out(&id);
    }
}

/// A path of our own, with its query; `/` for everything else. A browser reads some paths as the address of another host.
fn own_path(text: &str) -> String {
    let own = Url::parse("http://own.invalid").ok();
    let path = own.and_then(|own| {
        let url = own.join(text).ok()?;
        let stays = text.len() <= BACK_BYTES_MAX
            && text.starts_with('/')
            && !text.contains(|c: char| c == '\\' || c.is_control())
            && url.origin() == own.origin()
            && !url.path().starts_with("//");
        let query = url.query().map(|query| format!("?{query}"));
        stays.then(|| format!("{}{}", url.path(), query.unwrap_or_default()))
    });
    path.filter(|path| !["/login", "/logout"].contains(&path.as_str()))
        .unwrap_or_else(|| "/".to_owned())
}

/// Relative, so that it holds under whatever path the service stands behind.
fn to(path: &str) -> Response {
    let place = HeaderValue::from_str(&format!(".{path}"));
    let place = place.unwrap_or(HeaderValue::from_static("./"));
    (StatusCode::SEE_OTHER, [(LOCATION, place)]).into_response()
}

fn with_cookie(mut response: Response, cookie: &str) -> Response {
    if let Ok(mut cookie) = HeaderValue::from_str(cookie) {
        cookie.set_sensitive(true);
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}

fn unauthorized(page: &Page) -> Response {
    let mut response = rendered(StatusCode::UNAUTHORIZED, page);
    let headers = response.headers_mut();
    headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(BEARER));
    response
}

fn rendered(status: StatusCode, page: &Page) -> Response {
    match page.render() {
        Ok(html) => (
            status,
            [
                (CONTENT_TYPE, "text/html; charset=utf-8"),
                (CACHE_CONTROL, "no-store"),
            ],
            html,
        )
            .into_response(),
        Err(error) => {
            tracing::error!(%error, "the log-in form cannot be rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_leads_to_a_path_of_our_own() {
        for (text, path) in [
            ("/", "/"),
            ("/queue?q=a%2Fb&limit=5", "/queue?q=a%2Fb&limit=5"),
            ("/a/../queue", "/queue"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/queue#part", "/queue"),
        ] {
            assert_eq!(own_path(text), path);
        }
        let long = format!("/{}", "a".repeat(BACK_BYTES_MAX));
        for text in [
            "",
            "queue",
            "//attacker.example",
            "///attacker.example",
            "/\\attacker.example",
            "\\\\attacker.example",
            "/\t/attacker.example",
            "/\n/attacker.example",
            "/.//attacker.example",
            "/a/..//attacker.example",
            "http://attacker.example",
            "http:attacker.example",
            "javascript:alert(1)",
            "data:text/html,a",
            " //attacker.example",
            "/login",
            "/logout",
            &long,
        ] {
            assert_eq!(own_path(text), "/", "{text:?}");
        }
    }
}
