//! One HTTP exchange with the gate: bounded in time and size, and never an error for its trouble.
//!
//! What came of a call is a [`Reply`]: an answer with its status, or none with the reason. Left to others: what an
//! answer means, and whether to ask again.

use std::fmt;
use std::pin::pin;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Client, Method};
use serde::Serialize;
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};

use crate::answer::text;
use crate::config::{GateConfig, GateError};

/// Largest answer that is read. A full batch stays far below it.
const BODY_BYTES_MAX: usize = 8 << 20;
/// A timer that rings so much too late shows that the runtime was blocked.
pub const LATE: Duration = Duration::from_millis(100);
/// What a call gets on top then, since its answer may lie in the socket already.
const CATCH_UP: Duration = Duration::from_millis(250);
/// Kept connections that nobody uses. The gate keeps its end for longer.
const IDLE: Duration = Duration::from_secs(60);
/// What stands in a path as it is (RFC 3986, unreserved).
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Why there is no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// Nobody takes the connection.
    Refused,
    /// The connection broke, or what came over it is no HTTP.
    Cut,
    /// The time was over.
    Timeout,
    /// The answer is no JSON object, or it is too large.
    Garbage,
}

/// What a call brought.
#[derive(Clone, PartialEq, Debug)]
pub enum Reply {
    Answer { status: u16, body: Value },
    Silent(Trouble),
}

impl Reply {
    pub const fn status(&self) -> Option<u16> {
        match self {
            Self::Answer { status, .. } => Some(*status),
            Self::Silent(_) => None,
        }
    }

    /// The body of a good answer.
    pub fn good(&self) -> Option<&Value> {
        match self {
            Self::Answer { status, body } if (200..300).contains(status) => Some(body),
            _ => None,
        }
    }

    /// No answer, or one that blames the server: the same call may be taken later.
    pub fn fails_over(&self) -> bool {
        self.status()
            .is_none_or(|status| status >= 500 || matches!(status, 408 | 425 | 429))
    }

    /// The gate does not take the call as it is.
    pub fn is_refusal(&self) -> bool {
        self.status()
            .is_some_and(|status| (400..500).contains(&status))
    }

    /// The gate takes the call, or refuses it for good. What refuses a caller as such (a token, a host, a proxy on the
    /// way) says nothing of the call: once that is mended, the same call is taken.
    pub fn is_final(&self) -> bool {
        const OF_CALLER: [&str; 4] = ["", "unauthorized", "forbidden", "host_not_allowed"];
        let is_of_call = self.is_refusal() && !OF_CALLER.contains(&self.code());
        self.good().is_some() || (is_of_call && !self.fails_over())
    }

    /// Code of a problem, empty without one.
    pub fn code(&self) -> &str {
        match self {
            Self::Answer { body, .. } => text(body, "code"),
            Self::Silent(_) => "",
        }
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answer { status, body } => {
                write!(f, "status {status} {}", self.code())?;
                match text(body, "detail") {
                    "" => Ok(()),
                    detail => write!(f, ": {detail}"),
                }
            }
            Self::Silent(Trouble::Refused) => f.write_str("no answer (refused)"),
            Self::Silent(Trouble::Cut) => f.write_str("no answer (cut)"),
            Self::Silent(Trouble::Timeout) => f.write_str("no answer (time-out)"),
            Self::Silent(Trouble::Garbage) => f.write_str("no answer (garbage)"),
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Call {
    method: Method,
    path: String,
    body: Option<Vec<u8>>,
}

impl Call {
    pub const fn get(path: String) -> Self {
        Self {
            method: Method::GET,
            path,
            body: None,
        }
    }

    pub const fn delete(path: String) -> Self {
        Self {
            method: Method::DELETE,
            path,
            body: None,
        }
    }

    pub fn post(path: String, body: &impl Serialize) -> Self {
        Self {
            method: Method::POST,
            path,
            // The bodies of this crate always serialise; what would not is sent as none and refused by the gate.
            body: serde_json::to_vec(body).ok(),
        }
    }
}

/// An id as one segment of a path.
pub fn segment(id: &str) -> String {
    utf8_percent_encode(id, UNRESERVED).to_string()
}

/// The connections of one gate object.
#[derive(Debug)]
pub struct Wire {
    http: Client,
    url: String,
}

impl Wire {
    pub fn new(config: &GateConfig) -> Result<Self, GateError> {
        // One provider serves the process; another library may have chosen it already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        if let Some(token) = &config.token {
            let bearer = format!("Bearer {}", token.as_str());
            let mut bearer = HeaderValue::try_from(bearer).map_err(|_| GateError::Token)?;
            bearer.set_sensitive(true);
            headers.insert(AUTHORIZATION, bearer);
        }
        let http = Client::builder()
            .default_headers(headers)
            // Proxies of the environment are for the way out, not for a gate on the same host.
            .no_proxy()
            .redirect(Policy::none())
            .pool_idle_timeout(IDLE)
            .build()
            .map_err(GateError::Http)?;
        Ok(Self {
            http,
            url: config.url.clone(),
        })
    }

    /// One exchange. A connection that breaks is tried once more at once: it may have been a kept one whose gate has
    /// restarted since, and every call of the contract may be repeated.
    pub async fn call(&self, call: &Call, ends_at: Instant) -> Reply {
        let reply = self.call_once(call, ends_at).await;
        if reply == Reply::Silent(Trouble::Cut) && Instant::now() < ends_at {
            return self.call_once(call, ends_at).await;
        }
        reply
    }

    /// One exchange, for a caller that has its own way to ask again.
    pub async fn call_once(&self, call: &Call, ends_at: Instant) -> Reply {
        within(ends_at, self.exchange(call))
            .await
            .unwrap_or(Reply::Silent(Trouble::Timeout))
    }

    async fn exchange(&self, call: &Call) -> Reply {
        let url = format!("{}{}", self.url, call.path);
        let mut request = self.http.request(call.method.clone(), url);
        if let Some(body) = &call.body {
            request = request
                .header(CONTENT_TYPE, "application/json")
                .body(body.clone());
        }
        let mut answer = match request.send().await {
            Ok(answer) => answer,
            Err(error) if error.is_connect() => return Reply::Silent(Trouble::Refused),
            Err(_) => return Reply::Silent(Trouble::Cut),
        };
        let status = answer.status().as_u16();
        let mut bytes = Vec::new();
        loop {
            match answer.chunk().await {
                Ok(Some(piece)) if bytes.len() + piece.len() <= BODY_BYTES_MAX => {
                    bytes.extend_from_slice(&piece);
                }
                Ok(Some(_)) => return Reply::Silent(Trouble::Garbage),
                Ok(None) => return read(status, &bytes),
                Err(_) => return Reply::Silent(Trouble::Cut),
            }
        }
    }
}

/// A proxy on the way may refuse in words of its own; an answer of the gate is a JSON object.
fn read(status: u16, bytes: &[u8]) -> Reply {
    let body = serde_json::from_slice(bytes).ok().filter(Value::is_object);
    match (status, body) {
        (400.., body) => Reply::Answer {
            status,
            body: body.unwrap_or_default(),
        },
        (200..300, Some(body)) => Reply::Answer { status, body },
        _ => Reply::Silent(Trouble::Garbage),
    }
}

/// What `work` gives by this time.
///
/// A rollout may block its runtime for seconds. That time is not held against the gate: when the timer itself comes
/// late, what has arrived meanwhile is read first.
pub async fn within<F: Future>(ends_at: Instant, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    if let Ok(output) = timeout_at(ends_at, work.as_mut()).await {
        return Some(output);
    }
    if ends_at.elapsed() <= LATE {
        return None;
    }
    timeout(CATCH_UP, work).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_one_segment() {
        assert_eq!(segment("a/b%c d?é"), "a%2Fb%25c%20d%3F%C3%A9");
        assert_eq!(segment("A-z_0.9~"), "A-z_0.9~");
    }

    #[test]
    fn what_refuses_the_caller_is_not_final() {
        assert!(read(200, b"{}").is_final());
        assert!(read(410, br#"{"code": "lease_expired"}"#).is_final());
        for (status, body) in [
            (401, r#"{"code": "unauthorized"}"#),
            (403, "<html>"),
            (404, "{}"),
            (421, r#"{"code": "host_not_allowed"}"#),
            (429, r#"{"code": "too_many"}"#),
            (503, r#"{"code": "draining"}"#),
        ] {
            assert!(!read(status, body.as_bytes()).is_final(), "{status} {body}");
        }
        assert!(!Reply::Silent(Trouble::Cut).is_final());
    }

    #[test]
    fn only_an_object_is_a_good_answer() {
        assert!(read(200, b"{}").good().is_some());
        for body in [&b""[..], b"[]", b"null", b"<html>", b"{"] {
            assert_eq!(read(200, body), Reply::Silent(Trouble::Garbage));
            assert_eq!(read(302, body), Reply::Silent(Trouble::Garbage));
            assert!(read(401, body).is_refusal());
            assert!(read(502, body).fails_over());
        }
    }
}
