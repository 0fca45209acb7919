//! What a caller asks for, and what it says of its request afterwards.

use std::time::Duration;

use kvgate_api::{AcquireRequest, ReleaseRequest, Scope};
use serde_json::Value;

use crate::config::GateConfig;
use crate::fail_open::Dice;

/// Largest token count that the contract knows.
const TOKENS_MAX: u64 = (1 << 53) - 1;
/// Longest id in bytes.
const ID_BYTES_MAX: usize = 512;
/// So much of the session's name stands in a made ticket, for people who read the gate's lists.
const SESSION_CHARS: usize = 64;
/// Longest address of an engine in bytes.
const ENGINE_BYTES_MAX: usize = 2_048;

/// One acquire: the lease that a request needs.
#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    session_id: String,
    tokens: Asked,
    ticket_id: Option<String>,
    protected: bool,
    scope: Scope,
    ttl: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Parts { prompt: u64, max_new: u64 },
    Sum(u64),
}

impl Ask {
    /// For a request with this prefix and this completion budget.
    pub fn new(session_id: impl Into<String>, prompt_tokens: u64, max_new_tokens: u64) -> Self {
        Self::of(
            session_id.into(),
            Asked::Parts {
                prompt: prompt_tokens,
                max_new: max_new_tokens,
            },
        )
    }

    /// For a sum that the caller did by itself; the gate's expected decode cap does not apply to it.
    pub fn reservation(session_id: impl Into<String>, reservation_tokens: u64) -> Self {
        Self::of(session_id.into(), Asked::Sum(reservation_tokens))
    }

    /// Names the attempt. A ticket is used once; a fresh one is made when none is given.
    #[must_use]
    pub fn ticket_id(mut self, ticket_id: impl Into<String>) -> Self {
        self.ticket_id = Some(ticket_id.into());
        self
    }

    /// Protected work bypasses.
    #[must_use]
    pub const fn protected(mut self, protected: bool) -> Self {
        self.protected = protected;
        self
    }

    /// Training (the default) or evaluation.
    #[must_use]
    pub const fn scope(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    /// Life of this lease, instead of that of the configuration.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    pub(crate) fn of_session(mut self, session_id: &str) -> Self {
        session_id.clone_into(&mut self.session_id);
        self
    }

    fn of(session_id: String, tokens: Asked) -> Self {
        Self {
            session_id,
            tokens,
            ticket_id: None,
            protected: false,
            scope: Scope::Train,
            ttl: None,
        }
    }
}

/// An acquire as it goes out.
#[derive(Clone, PartialEq, Debug)]
pub struct Asking {
    pub request: AcquireRequest,
    /// The `rid` of the engine request.
    pub request_id: String,
    pub reservation_tokens: u64,
}

impl Asking {
    /// Fills in what the caller left out.
    pub fn new(ask: Ask, config: &GateConfig, dice: &Dice) -> Self {
        let ticket_id = ask.ticket_id.unwrap_or_else(|| {
            let session: String = ask.session_id.chars().take(SESSION_CHARS).collect();
            format!("{session}/{}", dice.id())
        });
        let request_id = dice.id();
        let mut request = AcquireRequest {
            ticket_id,
            session_id: ask.session_id,
            scope: ask.scope,
            protected: ask.protected,
            ttl_s: Some(ask.ttl.unwrap_or(config.ttl).as_secs_f64()),
            request_id: Some(request_id.clone()),
            client: config.client.clone(),
            ..AcquireRequest::default()
        };
        let reservation_tokens = match ask.tokens {
            Asked::Parts { prompt, max_new } => {
                request.prompt_tokens = Some(prompt);
                request.max_new_tokens = Some(max_new);
                prompt.saturating_add(max_new)
            }
            Asked::Sum(tokens) => {
                request.reservation_tokens = Some(tokens);
                tokens
            }
        };
        Self {
            request,
            request_id,
            reservation_tokens,
        }
    }

    /// Why the gate would refuse it; then it is not even asked.
    pub fn fault(&self) -> Option<String> {
        let names = [
            ("session_id", self.request.session_id.as_str()),
            ("ticket_id", self.request.ticket_id.as_str()),
        ];
        for (name, id) in names {
            if let Some(fault) = id_fault(id) {
                return Some(format!("{name}: {fault}"));
            }
        }
        let counts = [
            ("prompt_tokens", self.request.prompt_tokens),
            ("max_new_tokens", self.request.max_new_tokens),
            ("reservation_tokens", self.request.reservation_tokens),
        ];
        counts
            .iter()
            .find(|(_, count)| count.is_some_and(|count| count > TOKENS_MAX))
            .map(|(name, _)| format!("{name} is above 2^53 - 1"))
    }
}

/// What is wrong with a ticket or session id; the gate refuses the same ids.
pub fn id_fault(id: &str) -> Option<&'static str> {
    if id.is_empty() || id.len() > ID_BYTES_MAX {
        return Some("it has not 1 to 512 bytes");
    }
    if matches!(id, "." | "..") || id.chars().any(char::is_control) {
        return Some("it is `.` or `..`, or has control characters");
    }
    None
}

/// What a request really used, and where. It goes to the gate with the release; all of it is optional.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: Option<u64>,
    /// Generated tokens.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens that were served from the cache.
    pub cached_tokens: Option<u64>,
    /// Base URL of the engine that served it.
    pub engine: Option<String>,
}

impl Usage {
    /// From the body of an engine's answer: SGLang's `meta_info`, or `usage` of the OpenAI form. What is not there is
    /// left out.
    #[must_use]
    pub fn from_answer(answer: &Value) -> Self {
        if let Some(meta) = answer.get("meta_info").filter(|meta| meta.is_object()) {
            return Self::counts(meta, meta.get("cached_tokens"));
        }
        let usage = answer.get("usage").unwrap_or(&Value::Null);
        let cached = usage.pointer("/prompt_tokens_details/cached_tokens");
        Self::counts(usage, cached)
    }

    fn counts(body: &Value, cached: Option<&Value>) -> Self {
        let count = |name| body.get(name).and_then(Value::as_u64);
        Self {
            prompt_tokens: count("prompt_tokens"),
            completion_tokens: count("completion_tokens"),
            cached_tokens: cached.and_then(Value::as_u64),
            engine: None,
        }
    }

    /// As it goes out. What the gate would refuse is left out.
    pub(crate) fn into_request(self) -> ReleaseRequest {
        let known = |count: Option<u64>| count.filter(|count| *count <= TOKENS_MAX);
        ReleaseRequest {
            prompt_tokens: known(self.prompt_tokens),
            completion_tokens: known(self.completion_tokens),
            cached_tokens: known(self.cached_tokens),
            engine: self.engine.filter(|engine| {
                (1..=ENGINE_BYTES_MAX).contains(&engine.len())
                    && !engine.chars().any(char::is_control)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asking(ask: Ask) -> Asking {
        Asking::new(ask, &GateConfig::default(), &Dice::new().unwrap())
    }

    #[test]
    fn a_ticket_is_made_when_none_is_given() {
        let made = asking(Ask::new("s-7", 3, 4));
        assert!(made.request.ticket_id.starts_with("s-7/"));
        assert_eq!(made.reservation_tokens, 7);
        assert_eq!(made.fault(), None);
        let long = asking(Ask::new("ü".repeat(256), 3, 4));
        assert_eq!(long.fault(), None);
        let named = asking(Ask::reservation("s-7", 5).ticket_id("t"));
        assert_eq!(named.request.ticket_id, "t");
        assert_eq!(named.request.reservation_tokens, Some(5));
    }

    #[test]
    fn what_the_gate_would_refuse_is_found() {
        for ask in [
            Ask::new("", 1, 1),
            Ask::new("..", 1, 1),
            Ask::new("a\u{85}b", 1, 1),
            Ask::new("x".repeat(513), 1, 1),
            Ask::new("s", 1, 1).ticket_id("a\nb"),
            Ask::new("s", 1 << 53, 1),
            Ask::reservation("s", u64::MAX),
        ] {
            assert!(asking(ask.clone()).fault().is_some(), "{ask:?}");
        }
    }

    #[test]
    fn usage_is_read_from_both_forms_of_answers() {
        let usage = Usage {
            prompt_tokens: Some(9),
            completion_tokens: Some(2),
            cached_tokens: Some(8),
            engine: None,
        };
        let sglang =
            json!({"meta_info": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 8}});
        assert_eq!(Usage::from_answer(&sglang), usage);
        let openai = json!({"usage": {
            "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8},
        }});
        assert_eq!(Usage::from_answer(&openai), usage);
        for odd in [
            json!(null),
            json!([]),
            json!({"usage": null}),
            json!({"meta_info": {"prompt_tokens": -1}}),
        ] {
            assert_eq!(Usage::from_answer(&odd), Usage::default(), "{odd}");
        }
    }

    #[test]
    fn usage_that_the_gate_would_refuse_is_left_out() {
        let usage = Usage {
            prompt_tokens: Some(u64::MAX),
            completion_tokens: Some(1),
            engine: Some("a\nb".to_owned()),
            ..Usage::default()
        };
        let sent = usage.into_request();
        assert_eq!(
            (sent.prompt_tokens, sent.completion_tokens),
            (None, Some(1))
        );
        assert_eq!(sent.engine, None);
    }
}
