//! One bounded exchange with a running service, for the commands that ask it.
//!
//! Promises: every call has a time-out and its answer a bound; no redirect is followed and no proxy of the
//! environment is used, so that a token goes to the named address and nowhere else; a problem is told as
//! title, detail and code, and whatever else goes wrong in one sentence that says what to do.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, LOCATION};
use reqwest::{Method, Response, redirect};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::Runtime;
use url::Url;

use super::out::plain;
use crate::fleet::secret::{Secret, SecretError};

/// Where a service is when nothing else is said.
const DEFAULT_URL: &str = "http://127.0.0.1:7070";
/// Longest time for a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Longest time for a whole call.
const CALL_WITHIN: Duration = Duration::from_secs(30);
/// Largest answer that is read, after unpacking: a full page of closes of a large fleet has some ten MiB.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Largest token file that is read.
const TOKEN_FILE_BYTES_MAX: u64 = 1 << 20;
/// The variable that clients of the service read their token from.
const TOKEN_VARIABLE: &str = "KVGATE_TOKEN";
/// The variable that names a file with it.
const TOKEN_FILE_VARIABLE: &str = "KVGATE_TOKEN_FILE";

/// Which service is asked, and as whom.
#[derive(Args, Debug)]
#[command(next_help_heading = "Service")]
pub(super) struct Service {
    /// Address of the service: `http://HOST:PORT` or `https://HOST:PORT`, with a path where a proxy
    /// gives it one, or `unix:PATH`
    #[arg(long, value_name = "URL", env = "KVGATE_URL", hide_env_values = true, default_value = DEFAULT_URL)]
    url: String,
    /// File with the token for a service that asks for one: a token on the first line, or the
    /// service's own lines `name:scope:token`, of which the first counts unless `--token-name` names
    /// another. Empty lines and lines that begin with `#` are passed over. Without it the variable
    /// KVGATE_TOKEN is the token, else KVGATE_TOKEN_FILE names the file
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Which line of a file with `name:scope:token` lines
    #[arg(
        long,
        value_name = "NAME",
        env = "KVGATE_TOKEN_NAME",
        hide_env_values = true
    )]
    token_name: Option<String>,
}

/// What the service says when it does not do what it was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub(super) struct Refusal {
    pub(super) code: String,
    #[serde(default)]
    pub(super) status: u16,
    #[serde(default)]
    title: String,
    #[serde(default)]
    pub(super) detail: String,
    #[serde(default)]
    errors: Vec<Fault>,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
struct Fault {
    #[serde(default)]
    pointer: String,
    #[serde(default)]
    detail: String,
}

impl Refusal {
    /// What is wrong, with the places in the request, and what to do where that is about this command.
    pub(super) fn sentence(&self) -> String {
        let place = |fault: &Fault| {
            let place = fault.pointer.trim_start_matches(['/', '?']);
            format!("{place}: {}.", fault.detail.trim_end_matches('.'))
        };
        // The places say more than the sentence that there are some.
        let mut text = match self.errors.as_slice() {
            [] => self.detail.clone(),
            [only] if only.detail == self.detail => self.detail.clone(),
            faults => faults.iter().map(place).collect::<Vec<_>>().join(" "),
        };
        let advice = match self.code.as_str() {
            "unauthorized" => " Name a file with a token by --token-file.",
            "forbidden" => " Name a token with the right for it by --token-file or --token-name.",
            "host_not_allowed" => " Use an address in --url that it was started with.",
            "not_found" => " The service may be of another version than this command.",
            "recovering" | "draining" | "overloaded" | "store_unavailable" => {
                " Try again in a moment."
            }
            _ => "",
        };
        text.push_str(advice);
        plain(text.trim()).into_owned()
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (title, code) = (plain(&self.title), plain(&self.code));
        write!(f, "{title}: {} ({code})", self.sentence())
    }
}

/// Why a call brought nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The address is none.
    #[error(
        "--url must be http://HOST:PORT, https://HOST:PORT or unix:PATH, without user, query and fragment, not {0:?}"
    )]
    Url(String),
    /// The token cannot be read.
    #[error("the token file {0:?} cannot be read: {1}; name another by --token-file")]
    TokenFile(PathBuf, #[source] io::Error),
    /// There is no such token.
    #[error("{0}")]
    Token(String),
    /// The token cannot be sent.
    #[error("the token of {0} cannot be sent: {1}")]
    BadToken(String, #[source] SecretError),
    /// Nothing to call with.
    #[error("the HTTP client cannot be set up: {0}")]
    Client(String),
    /// Nobody takes the connection.
    #[error(
        "cannot connect to {url}: {cause}; start the service there, or name its address by --url or KVGATE_URL"
    )]
    Connect {
        /// The address.
        url: String,
        /// Why.
        cause: String,
    },
    /// The time was over.
    #[error(
        "{0} gives no answer within {seconds} s; see its log, or name another address by --url",
        seconds = CALL_WITHIN.as_secs()
    )]
    Timeout(String),
    /// The connection broke.
    #[error("the connection to {0} broke before its answer was whole; try again, and see its log")]
    Cut(String),
    /// The answer is too large.
    #[error("the answer of {0} is larger than {size} MiB; ask for less, by a smaller --limit", size = BODY_BYTES_MAX >> 20)]
    TooLarge(String),
    /// Somebody else answers.
    #[error(
        "{url} answers (status {status}), but not as kvgate does; check --url and what stands between"
    )]
    Foreign {
        /// The address.
        url: String,
        /// Status of the answer.
        status: u16,
    },
    /// It points elsewhere.
    #[error(
        "{url} redirects to {to:?} (status {status}), which is not followed; name the address of the service itself by --url"
    )]
    Redirect {
        /// The address.
        url: String,
        /// Status of the answer.
        status: u16,
        /// Where to.
        to: String,
    },
    /// It answers in other words.
    #[error(
        "the service answers in a form that this version does not know ({0}); use -o json, or kvgate of its version"
    )]
    Unknown(String),
    /// It refuses.
    #[error(transparent)]
    Refused(#[from] RefusedCall),
}

/// A refusal as an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct RefusedCall(pub(super) Refusal);

impl CallError {
    /// 1 for a refusal, 2 for what the caller said, 69 when no service answers.
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Refused(_) | Self::Unknown(_) => 1,
            Self::Url(_) | Self::TokenFile(..) | Self::Token(_) | Self::BadToken(..) => 2,
            Self::Connect { .. }
            | Self::Timeout(_)
            | Self::Cut(_)
            | Self::TooLarge(_)
            | Self::Foreign { .. }
            | Self::Redirect { .. } => 69,
            Self::Client(_) => 74,
        })
    }
}

/// The connection to one service.
#[derive(Debug)]
pub(super) struct Client {
    runtime: Runtime,
    http: reqwest::Client,
    base: Url,
    /// The address as it is named to people.
    shown: String,
    token: Option<Secret>,
}

impl Client {
    /// Checks address and token; nothing is sent yet.
    pub(super) fn new(service: &Service) -> Result<Self, CallError> {
        let url = match service.url.as_str() {
            "" => DEFAULT_URL,
            url => url,
        };
        let (base, socket) = address(url)?;
        let token = token(service.token_file.as_deref(), service.token_name.as_deref())?;
        // Fails only when a provider is installed already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut http = reqwest::Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            .connect_timeout(CONNECT_WITHIN)
            .user_agent(concat!("kvgate/", env!("CARGO_PKG_VERSION")));
        if let Some(socket) = socket {
            http = http.unix_socket(socket);
        }
        let http = http
            .build()
            .map_err(|error| CallError::Client(error.to_string()))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| CallError::Client(error.to_string()))?;
        Ok(Self {
            runtime,
            http,
            base,
            shown: plain(url.trim_end_matches('/')).into_owned(),
            token,
        })
    }

    /// The address as it is named to people.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// Reads.
    pub(super) fn get(&self, path: &[&str], query: &[(&str, &str)]) -> Result<Value, CallError> {
        self.call(Method::GET, path, query, None)
    }

    /// Acts.
    pub(super) fn post(&self, path: &[&str]) -> Result<Value, CallError> {
        self.call(Method::POST, path, &[], None)
    }

    /// Changes.
    pub(super) fn patch(&self, path: &[&str], body: &Value) -> Result<Value, CallError> {
        self.call(Method::PATCH, path, &[], Some(body))
    }

    fn call(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Value, CallError> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = self
            .http
            .request(method, url)
            .header(ACCEPT, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token.authorization());
        }
        if let Some(body) = body {
            request = request
                .header(CONTENT_TYPE, "application/json")
                .body(body.to_string());
        }
        let exchange = async {
            let answer = request.send().await.map_err(|error| self.failed(error))?;
            self.read(answer).await
        };
        self.runtime
            .block_on(async { tokio::time::timeout(CALL_WITHIN, exchange).await })
            .map_err(|_| CallError::Timeout(self.shown.clone()))?
    }

    fn failed(&self, error: reqwest::Error) -> CallError {
        let url = self.shown.clone();
        if error.is_timeout() && !error.is_connect() {
            return CallError::Timeout(url);
        }
        if error.is_connect() {
            let cause = cause(&error);
            return CallError::Connect { url, cause };
        }
        CallError::Cut(url)
    }

    async fn read(&self, mut answer: Response) -> Result<Value, CallError> {
        let status = answer.status();
        let url = self.shown.clone();
        if status.is_redirection() {
            let to = answer.headers().get(LOCATION);
            let to = to.map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
            return Err(CallError::Redirect {
                url,
                status: status.as_u16(),
                to: to.unwrap_or_default(),
            });
        }
        let mut bytes = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(|error| self.failed(error))? {
            if bytes.len().saturating_add(piece.len()) > BODY_BYTES_MAX {
                return Err(CallError::TooLarge(url));
            }
            bytes.extend_from_slice(&piece);
        }
        let foreign = CallError::Foreign {
            url,
            status: status.as_u16(),
        };
        let body: Option<Value> = serde_json::from_slice(&bytes).ok();
        let Some(body) = body.filter(Value::is_object) else {
            return Err(foreign);
        };
        if status.is_success() {
            return Ok(body);
        }
        match Refusal::deserialize(body) {
            Ok(refusal) => Err(RefusedCall(Refusal {
                status: status.as_u16(),
                ..refusal
            })
            .into()),
            Err(_) => Err(foreign),
        }
    }
}

/// A body in the words of this version.
pub(super) fn typed<T: DeserializeOwned>(body: &Value) -> Result<T, CallError> {
    T::deserialize(body).map_err(|error| CallError::Unknown(plain(&error.to_string()).into_owned()))
}

/// The innermost cause is what a person can act on: `connection refused`, an unknown name, a certificate.
fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    plain(&cause.to_string()).into_owned()
}

/// The address to call, and the socket to reach it by.
fn address(text: &str) -> Result<(Url, Option<&Path>), CallError> {
    let bad = || CallError::Url(crate::config::masked(text).into_owned());
    if let Some(path) = text.strip_prefix("unix:") {
        // The name is only what stands in the Host header.
        let base = Url::parse("http://localhost").map_err(|_| bad())?;
        return match path {
            "" => Err(bad()),
            path => Ok((base, Some(Path::new(path)))),
        };
    }
    let url = Url::parse(text).map_err(|_| bad())?;
    let is_plain = matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    match is_plain {
        true => Ok((url, None)),
        false => Err(bad()),
    }
}

/// The token that is shown to a service, from a named file or the environment.
pub(super) fn token(file: Option<&Path>, name: Option<&str>) -> Result<Option<Secret>, CallError> {
    let name = name.filter(|name| !name.is_empty());
    let variable = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    // As in the clients: what is said on the command line, then the token itself, then a file, which may
    // be the one that the service of the same environment reads.
    let path = match file.filter(|path| !path.as_os_str().is_empty()) {
        Some(path) => path.to_owned(),
        None if name.is_some() => match variable(TOKEN_FILE_VARIABLE) {
            Some(path) => path.into(),
            None => {
                let text =
                    "--token-name names a line of a token file: name the file by --token-file";
                return Err(CallError::Token(text.to_owned()));
            }
        },
        None => match (variable(TOKEN_VARIABLE), variable(TOKEN_FILE_VARIABLE)) {
            (Some(token), _) => return secret(TOKEN_VARIABLE, &token).map(Some),
            (None, Some(path)) => path.into(),
            (None, None) => return Ok(None),
        },
    };
    let path = path.as_path();
    let text = text(path).map_err(|error| CallError::TokenFile(path.to_path_buf(), error))?;
    let shown = format!("{path:?}");
    match chosen(&text, name) {
        Ok(token) => secret(&shown, token).map(Some),
        Err(why) => Err(CallError::Token(format!("the token file {shown} {why}"))),
    }
}

fn secret(of: &str, token: &str) -> Result<Secret, CallError> {
    Secret::new(token).map_err(|error| CallError::BadToken(of.to_owned(), error))
}

fn text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(TOKEN_FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// The token of a file, or what the file lacks.
fn chosen<'a>(text: &'a str, name: Option<&str>) -> Result<&'a str, String> {
    let lines = text.lines().map(str::trim);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let Some(name) = name else {
        let first = lines.next().ok_or("holds no token")?;
        return Ok(named(first).map_or(first, |(_, token)| token));
    };
    let found = lines.filter_map(named).find(|(found, _)| *found == name);
    found
        .map(|(_, token)| token)
        .ok_or_else(|| format!("has no line {name:?}:scope:token; say another --token-name"))
}

/// Name and token of a line `name:scope:token`.
fn named(line: &str) -> Option<(&str, &str)> {
    let mut parts = line.splitn(3, ':');
    let (name, scope, token) = (parts.next()?, parts.next()?, parts.next()?);
    matches!(scope, "client" | "admin" | "view").then_some((name, token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_the_first_or_the_named_one() {
        let bare = "\n# for the night shift\n  s3cret \nother\n";
        assert_eq!(chosen(bare, None), Ok("s3cret"));
        assert!(
            chosen(bare, Some("night"))
                .unwrap_err()
                .contains("\"night\"")
        );
        let lines = "rollout:client:aa:bb\nops:admin:cc\n";
        assert_eq!(chosen(lines, None), Ok("aa:bb"));
        assert_eq!(chosen(lines, Some("ops")), Ok("cc"));
        assert_eq!(chosen("a:b:c", None), Ok("a:b:c"), "b is no scope");
        assert!(chosen("# nothing\n", None).is_err());
    }

    #[test]
    fn addresses() {
        for good in [
            "http://127.0.0.1:7070",
            "https://gate.example/kv/",
            "http://[::1]:7070",
            "unix:/run/kvgate.sock",
        ] {
            assert!(address(good).is_ok(), "{good}");
        }
        for bad in [
            "127.0.0.1:7070",
            "localhost",
            "ftp://h",
            "http://h/?a=1",
            "http://h/#x",
            "unix:",
        ] {
            assert!(address(bad).is_err(), "{bad}");
        }
        let error = address("http://me:hidden@h").unwrap_err().to_string();
        assert!(!error.contains("hidden"), "{error}");
    }

    #[test]
    fn a_refusal_says_where_and_what_to_do() {
        let refusal = Refusal::deserialize(serde_json::json!({
            "type": "/problems/invalid_request", "title": "The request is not valid", "status": 422,
            "code": "invalid_request", "detail": "The request has a field that is not as it should be.",
            "errors": [{"pointer": "/headroom", "detail": "must be above 0"}], "new": 1,
        }));
        assert_eq!(
            refusal.unwrap().to_string(),
            "The request is not valid: headroom: must be above 0. (invalid_request)"
        );
        let refusal = Refusal::deserialize(serde_json::json!({"code": "unauthorized"})).unwrap();
        assert!(refusal.to_string().contains("--token-file"));
        assert!(Refusal::deserialize(serde_json::json!({"error": "no"})).is_err());
    }
}
