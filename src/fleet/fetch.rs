//! One bounded request: the only way the fleet room speaks to the network.
//!
//! Promises: no redirect is followed and no proxy of the environment is used (an address means that
//! machine, X04); a body is read in pieces and given up when it passes its bound, counted after
//! unpacking; no error quotes a body. Time-outs belong to the caller, which knows how much is left.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvgate_core::policy::CALLS_PER_ENGINE_MAX;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Client, RequestBuilder, Response, StatusCode, redirect};

use super::networks::{GuardedResolver, Networks, NotAllowed};
use super::secret::Secret;

/// Largest body of a reading or a worker list, in bytes after unpacking (CAP2).
pub const BODY_BYTES_MAX: usize = 32 << 20;

/// How long a connection for calls is kept without use. The HTTP server of the engines drops an idle
/// one after 5 s; a call that is written just then is lost, and looks like an engine that is away.
const CALLS_IDLE_FOR: Duration = Duration::from_secs(4);

/// What to ask for.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The whole address.
    pub url: &'a str,
    /// Sent as bearer token.
    pub key: Option<&'a Secret>,
    /// The `Accept` header.
    pub accept: &'static str,
}

/// Why there is no body.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// No connection, or one that was cut before the whole answer had come.
    #[error("no connection, or a cut one")]
    Refused(#[source] reqwest::Error),
    /// A status other than 2xx; a redirect is one.
    #[error("status {status}")]
    Status {
        /// The status.
        status: u16,
        /// The answer carries the error header of the router smg.
        from_smg: bool,
    },
    /// Larger than the bound, or packed in a way that cannot be unpacked.
    #[error("a body that cannot be used")]
    Unreadable,
    /// The name leads outside the allowed networks.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
}

/// A client for engines: names resolve to allowed addresses only. The process must have installed a
/// rustls provider before.
///
/// # Errors
/// When the TLS set-up fails.
pub fn engine_client(networks: Arc<Networks>) -> Result<Client, reqwest::Error> {
    builder().dns_resolver(GuardedResolver(networks)).build()
}

/// A client for calls to engines, with connections of its own: those of the readings stay warm by
/// themselves, and a flood of closes that breaks connections must not take them along. As many are
/// kept for an engine as it may have calls at once, so that a flood opens each of them once.
///
/// # Errors
/// When the TLS set-up fails.
pub fn calls_client(networks: Arc<Networks>) -> Result<Client, reqwest::Error> {
    builder()
        .dns_resolver(GuardedResolver(networks))
        .pool_idle_timeout(CALLS_IDLE_FOR)
        .pool_max_idle_per_host(CALLS_PER_ENGINE_MAX)
        .build()
}

/// A client for the router, whose address is the operator's own word.
///
/// # Errors
/// When the TLS set-up fails.
pub fn router_client() -> Result<Client, reqwest::Error> {
    builder().build()
}

fn builder() -> reqwest::ClientBuilder {
    Client::builder()
        .redirect(redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("kvgate/", env!("CARGO_PKG_VERSION")))
}

/// Asks once and reads the body up to `bytes_max`.
///
/// # Errors
/// Why there is no body.
pub async fn get(client: &Client, ask: Ask<'_>, bytes_max: usize) -> Result<Vec<u8>, FetchError> {
    let request = with_headers(client.get(ask.url), ask);
    let response = request.send().await.map_err(sorted)?;
    if response.status().is_success() {
        return body(response, bytes_max).await;
    }
    Err(FetchError::Status {
        status: StatusCode::as_u16(&response.status()),
        from_smg: response.headers().contains_key("x-smg-error-code"),
    })
}

/// Posts JSON once and reads the body of the answer up to `bytes_max`, whatever its status.
///
/// # Errors
/// Why there is no whole answer; never a status.
pub async fn post(
    client: &Client,
    ask: Ask<'_>,
    json: String,
    bytes_max: usize,
) -> Result<(u16, Vec<u8>), FetchError> {
    let request = with_headers(client.post(ask.url), ask)
        .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
        .body(json);
    let response = request.send().await.map_err(sorted)?;
    let status = response.status().as_u16();
    Ok((status, body(response, bytes_max).await?))
}

fn with_headers(request: RequestBuilder, ask: Ask<'_>) -> RequestBuilder {
    let request = request.header(ACCEPT, ask.accept);
    match ask.key {
        Some(key) => request.header(AUTHORIZATION, key.authorization()),
        None => request,
    }
}

async fn body(mut response: Response, bytes_max: usize) -> Result<Vec<u8>, FetchError> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(sorted)? {
        if body.len().saturating_add(piece.len()) > bytes_max {
            return Err(FetchError::Unreadable);
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// The client wraps every cause in one error type; what matters is found in the chain of sources.
fn sorted(error: reqwest::Error) -> FetchError {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if inner.is::<NotAllowed>() {
            return FetchError::NotAllowed(NotAllowed);
        }
        if inner
            .downcast_ref::<io::Error>()
            .is_some_and(is_bad_packing)
        {
            return FetchError::Unreadable;
        }
        cause = inner.source();
    }
    FetchError::Refused(error)
}

fn is_bad_packing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput
    )
}
