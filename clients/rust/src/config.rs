//! How a gate is reached, and how patient its callers are.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where a gate is when nothing else is said.
pub const DEFAULT_URL: &str = "http://127.0.0.1:7070";

/// The gate's own bound of `wait_s`.
const WINDOW_MAX: Duration = Duration::from_secs(60);

/// So much of a token file is read: the gate's own may have a thousand lines.
const TOKEN_FILE_BYTES_MAX: u64 = 1 << 20;

/// Longest time of any setting. It keeps sums of times in range.
const TIME_MAX: Duration = Duration::from_secs(365 * 86_400);

/// Settings of a client. The defaults suit a gate on the same host or in the same rack.
#[derive(Clone, Debug)]
pub struct GateConfig {
    /// Base address of the gate; `KVGATE_URL`, else `http://127.0.0.1:7070`.
    pub url: String,
    /// Bearer token; `KVGATE_TOKEN` when it is set.
    pub token: Option<Token>,
    /// File with the token, read when the gate object is made and there is no `token`; `KVGATE_TOKEN_FILE` when it is
    /// set. The token stands on its first line, alone or as in the gate's own file: `name:scope:token`.
    pub token_file: Option<PathBuf>,
    /// A name of this caller for the gate's lists.
    pub client: Option<String>,
    /// Name of the run in step reports; a fresh one for each gate object when not given.
    pub run: Option<String>,
    /// Life of a lease since its grant or last renewal. Held leases are renewed at a third of it. 600 s.
    pub ttl: Duration,
    /// Longest time for an answer that is due at once. It bounds what a dead gate can cost a request. 2 s.
    pub call_timeout: Duration,
    /// How long one waiting call stays open. Below the claim grace, so that a hung gate is noticed in time. 8 s.
    pub window: Duration,
    /// From so many waiting tickets on they share calls of `/v1/wait`. 32.
    pub wait_calls_from: usize,
    /// Failures in a row after which the gate is not asked for a while. 3.
    pub breaker_failures: u32,
    /// How long that while is. 5 s.
    pub breaker_open: Duration,
    /// How long releases, cancels and closes are retried in the background. 10 minutes.
    pub retry_for: Duration,
    /// How long [`Gate::flush`](crate::Gate::flush) waits for what is still to be delivered. 5 s.
    pub flush: Duration,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self {
            url: variable("KVGATE_URL").unwrap_or_else(|| DEFAULT_URL.to_owned()),
            token: variable("KVGATE_TOKEN").map(Token::new),
            token_file: variable("KVGATE_TOKEN_FILE").map(PathBuf::from),
            client: None,
            run: None,
            ttl: Duration::from_secs(600),
            call_timeout: Duration::from_secs(2),
            window: Duration::from_secs(8),
            wait_calls_from: 32,
            breaker_failures: 3,
            breaker_open: Duration::from_secs(5),
            retry_for: Duration::from_secs(600),
            flush: Duration::from_secs(5),
        }
    }
}

impl GateConfig {
    /// The defaults for a gate at this address.
    #[must_use]
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            ..Self::default()
        }
    }

    /// Checks the values, so that a typo fails at the start and never inside a rollout.
    pub(crate) fn checked(mut self) -> Result<Self, GateError> {
        let parsed = reqwest::Url::parse(&self.url);
        let parsed = parsed.map_err(|_| GateError::Url(self.url.clone()))?;
        if !matches!(parsed.scheme(), "http" | "https")
            || parsed.host_str().is_none()
            || parsed.query().is_some()
            || parsed.fragment().is_some()
        {
            return Err(GateError::Url(self.url));
        }
        self.url.truncate(self.url.trim_end_matches('/').len());
        if let (None, Some(path)) = (&self.token, &self.token_file) {
            self.token = Some(Token::read(path)?);
        }
        let above_0 = [
            ("ttl", self.ttl),
            ("call_timeout", self.call_timeout),
            ("window", self.window),
            ("breaker_open", self.breaker_open),
        ];
        if let Some((name, _)) = above_0.iter().find(|(_, value)| value.is_zero()) {
            return Err(GateError::Setting(name, "it must be above 0"));
        }
        let all = above_0
            .into_iter()
            .chain([("retry_for", self.retry_for), ("flush", self.flush)]);
        for (name, value) in all {
            if value > TIME_MAX {
                return Err(GateError::Setting(name, "it must be at most a year"));
            }
        }
        if self.window > WINDOW_MAX {
            return Err(GateError::Setting("window", "the gate takes at most 60 s"));
        }
        if self.breaker_failures == 0 {
            return Err(GateError::Setting(
                "breaker_failures",
                "it must be at least 1",
            ));
        }
        if self.wait_calls_from == 0 {
            return Err(GateError::Setting(
                "wait_calls_from",
                "it must be at least 1",
            ));
        }
        Ok(self)
    }
}

/// A bearer token, which is never printed.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A token as it stands in its file.
    pub fn new(token: impl Into<String>) -> Self {
        Self(token.into())
    }

    /// The token of the first line that is neither empty nor a comment.
    fn read(path: &Path) -> Result<Self, GateError> {
        let unreadable = |error| GateError::TokenFile(path.to_path_buf(), error);
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(TOKEN_FILE_BYTES_MAX).read_to_string(&mut text))
            .map_err(unreadable)?;
        let lines = text.lines().map(str::trim);
        let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let token = lines
            .next()
            .and_then(|line| line.splitn(3, ':').last())
            .map(str::trim);
        match token {
            Some(token) if !token.is_empty() => Ok(Self::new(token)),
            _ => Err(unreadable(io::Error::other("it holds no token"))),
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Why a [`Gate`](crate::Gate) cannot be made. All of it is found at the start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// The address is none.
    #[error("the gate's url must be http://HOST:PORT or https://HOST:PORT, not {0:?}")]
    Url(String),
    /// A setting is out of its range.
    #[error("{0}: {1}")]
    Setting(&'static str, &'static str),
    /// The token cannot stand in a header.
    #[error("the token has characters that no header takes")]
    Token,
    /// The file with the token gives none.
    #[error("the token file {0:?} cannot be used: {1}")]
    TokenFile(PathBuf, #[source] io::Error),
    /// There is no runtime to work in.
    #[error("a gate is made inside a tokio runtime, which then does its work")]
    NoRuntime,
    /// The HTTP client cannot be set up.
    #[error("the HTTP client cannot be set up")]
    Http(#[source] reqwest::Error),
    /// The system gives no random numbers.
    #[error("the system gives no random numbers")]
    Random(#[source] getrandom::Error),
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_fails_at_the_start() {
        let wrong = [
            GateConfig::at("127.0.0.1:7070"),
            GateConfig::at("ftp://host"),
            GateConfig::at("http://host/?token=x"),
            GateConfig {
                call_timeout: Duration::ZERO,
                ..GateConfig::default()
            },
            GateConfig {
                retry_for: Duration::MAX,
                ..GateConfig::default()
            },
            GateConfig {
                window: Duration::from_secs(61),
                ..GateConfig::default()
            },
            GateConfig {
                breaker_failures: 0,
                ..GateConfig::default()
            },
            GateConfig {
                wait_calls_from: 0,
                ..GateConfig::default()
            },
        ];
        for config in wrong {
            assert!(config.clone().checked().is_err(), "{config:?}");
        }
        let right = GateConfig::at("http://[::1]:7070/").checked().unwrap();
        assert_eq!(right.url, "http://[::1]:7070");
    }

    #[test]
    fn a_token_stands_on_the_first_line_of_its_file() {
        let path = std::env::temp_dir().join(format!("kvgate-token-{}", std::process::id()));
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let config = GateConfig {
                token: None,
                token_file: Some(path.clone()),
                ..GateConfig::default()
            };
            config.checked()
        };
        for text in [
            "secret-1",
            "# a comment\n\n secret-1 \r\nsecret-2\n",
            "name:client:secret-1\nother:admin:secret-2\n",
            "name : client : secret-1",
        ] {
            let config = read(text).unwrap();
            assert_eq!(config.token.unwrap().as_str(), "secret-1", "{text}");
        }
        for text in [
            "",
            "# nothing\n",
            "name:client:",
            "name:client: \nsecret-1:a:b",
        ] {
            let error = read(text).unwrap_err();
            assert!(matches!(error, GateError::TokenFile(..)), "{text}");
            assert!(!format!("{error} {error:?}").contains("secret"));
        }
        let both = GateConfig {
            token: Some(Token::new("secret-3")),
            token_file: Some(path.clone()),
            ..GateConfig::default()
        };
        assert_eq!(both.checked().unwrap().token.unwrap().as_str(), "secret-3");
        std::fs::remove_file(&path).unwrap();
        let missing = GateConfig {
            token: None,
            token_file: Some(path),
            ..GateConfig::default()
        };
        assert!(matches!(missing.checked(), Err(GateError::TokenFile(..))));
    }

    #[test]
    fn a_token_is_never_printed() {
        let config = GateConfig {
            token: Some(Token::new("secret")),
            ..GateConfig::default()
        };
        assert!(!format!("{config:?}").contains("secret"));
    }
}
