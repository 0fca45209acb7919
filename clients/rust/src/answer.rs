//! What the gate answers, as values. Names are those of the HTTP contract.
//!
//! Readers take what they know and ignore the rest, since answers may grow; an odd value falls back to a plain one.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use kvgate_api::CloseEngine;
use serde_json::Value;

/// Longest time that an answer may name. It keeps sums of times in range.
const TIME_MAX: Duration = Duration::from_secs(365 * 86_400);

/// Leave to start a request, with a lease or without one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// A lease is held.
    Admit,
    /// Go on without a lease.
    Bypass,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admit => "admit",
            Self::Bypass => "bypass",
        })
    }
}

/// Leave to start a request.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// With a lease or without one.
    pub action: Action,
    /// Why, in the gate's words; `unreachable`, `refused` or `breaker` when the client decided by itself.
    pub reason: String,
    /// The ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// The lease of an admit.
    pub lease_id: Option<String>,
    /// Tokens charged, or asked for.
    pub reservation_tokens: u64,
    /// Worker-set generation.
    pub epoch: u64,
    /// Life of the lease since its grant or last renewal.
    pub ttl: Duration,
    /// Time in the gate's queue.
    pub waited: Duration,
    /// This decision was delivered before.
    pub repeated: bool,
    /// The session was closed after its last acquire.
    pub session_reopened: bool,
    /// Decided by the client itself: the gate was silent, or refused the call.
    pub local: bool,
}

/// The gate says: do not start this request. The ticket was cancelled or had ended before, or its session was closed
/// while it waited.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("ticket {ticket_id:?} of session {session_id:?} must not start: {reason}")]
pub struct TicketCancelled {
    /// The ticket.
    pub ticket_id: String,
    /// Its session.
    pub session_id: String,
    /// Why: `cancelled`, `session_closed` or `ticket_finished`.
    pub reason: String,
}

/// How a session close stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Close {
    /// The session.
    pub session_id: String,
    /// How far it has come.
    pub status: CloseStatus,
    /// Its id; none while the gate has not answered.
    pub close_id: Option<String>,
    /// Where its engines stand, as far as this client knows the words.
    pub engines: Vec<CloseEngine>,
}

/// How far a session close has come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum CloseStatus {
    /// It waits for the last lease of the session, or for a first engine.
    Joining,
    /// It goes out to the engines.
    Delivering,
    /// No engine is pending.
    Done,
    /// The lifecycle feature is off: nothing is sent.
    Disabled,
    /// The gate took it, and says of it what this client does not know.
    Taken,
    /// The gate did not answer yet; the client keeps trying in the background.
    Unanswered,
    /// The gate does not take it.
    Refused,
}

/// The `agentic_kv/...` values over the time since the run's previous step.
#[derive(Clone, PartialEq, Debug)]
pub struct StepReport {
    /// The run.
    pub run: String,
    /// The step; none for a look at the step that is under way.
    pub step: Option<u64>,
    /// When the time began, in RFC 3339.
    pub from: Option<String>,
    /// When it ended.
    pub to: Option<String>,
    /// The values by key.
    pub metrics: BTreeMap<String, f64>,
}

/// How long a place lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitTimes {
    /// Until the gate bypasses the ticket for its age.
    pub bypass_in: Duration,
    /// While nobody asks.
    pub claim_grace: Duration,
}

/// What an answer to an acquire says.
#[derive(Clone, PartialEq, Debug)]
pub enum Acquired {
    Decided(Decision),
    Cancelled(TicketCancelled),
    /// Keep asking with the same ticket.
    Wait(WaitTimes),
    /// No answer to an acquire.
    Nothing,
}

impl Acquired {
    /// Reads the body of an answer with a 2xx status.
    pub fn read(body: &Value, ticket_id: &str, session_id: &str, reservation_tokens: u64) -> Self {
        let lease_id = match (text(body, "action"), text(body, "lease_id")) {
            ("admit", "") => return Self::Nothing,
            ("admit", lease_id) => Some(lease_id.to_owned()),
            ("bypass", _) => None,
            ("cancelled", _) => {
                return Self::Cancelled(TicketCancelled {
                    ticket_id: ticket_id.to_owned(),
                    session_id: session_id.to_owned(),
                    reason: text(body, "reason").to_owned(),
                });
            }
            // Without its two times it bounds nothing.
            ("wait", _) => {
                return match (time(body, "bypass_in_s"), time(body, "claim_grace_s")) {
                    (Some(bypass_in), Some(claim_grace)) => Self::Wait(WaitTimes {
                        bypass_in,
                        claim_grace,
                    }),
                    _ => Self::Nothing,
                };
            }
            _ => return Self::Nothing,
        };
        Self::Decided(Decision {
            action: if lease_id.is_some() {
                Action::Admit
            } else {
                Action::Bypass
            },
            reason: text(body, "reason").to_owned(),
            ticket_id: ticket_id.to_owned(),
            session_id: session_id.to_owned(),
            lease_id,
            reservation_tokens: count(body, "reservation_tokens").unwrap_or(reservation_tokens),
            epoch: count(body, "epoch").unwrap_or_default(),
            ttl: time(body, "ttl_s").unwrap_or_default(),
            waited: time(body, "waited_s").unwrap_or_default(),
            repeated: flag(body, "repeated"),
            session_reopened: flag(body, "session_reopened"),
            local: false,
        })
    }
}

impl Close {
    /// A close of which the gate said nothing that can be read.
    pub(crate) fn without_answer(session_id: &str, status: CloseStatus) -> Self {
        Self {
            session_id: session_id.to_owned(),
            status,
            close_id: None,
            engines: Vec::new(),
        }
    }

    pub(crate) fn unanswered(session_id: &str) -> Self {
        Self::without_answer(session_id, CloseStatus::Unanswered)
    }

    pub(crate) fn read(body: &Value, session_id: &str) -> Self {
        let status = match text(body, "state") {
            "joining" => CloseStatus::Joining,
            "delivering" => CloseStatus::Delivering,
            "done" => CloseStatus::Done,
            "disabled" => CloseStatus::Disabled,
            _ => CloseStatus::Taken,
        };
        let rows = body.get("engines").and_then(Value::as_array);
        let rows = rows.map(Vec::as_slice).unwrap_or_default();
        Self {
            session_id: session_id.to_owned(),
            status,
            close_id: Some(text(body, "close_id").to_owned()).filter(|id| !id.is_empty()),
            engines: rows
                .iter()
                .filter_map(|row| serde_json::from_value(row.clone()).ok())
                .collect(),
        }
    }
}

impl StepReport {
    pub(crate) fn read(body: &Value, run: &str, step: Option<u64>) -> Option<Self> {
        let metrics = body.get("metrics")?.as_object()?;
        let at = |name| Some(text(body, name).to_owned()).filter(|at| !at.is_empty());
        Some(Self {
            run: run.to_owned(),
            step,
            from: at("from"),
            to: at("to"),
            metrics: metrics
                .iter()
                .filter_map(|(key, value)| Some((key.clone(), value.as_f64()?)))
                .collect(),
        })
    }
}

/// A text field, empty when it is none.
pub fn text<'a>(body: &'a Value, name: &str) -> &'a str {
    body.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// A field of seconds.
pub fn time(body: &Value, name: &str) -> Option<Duration> {
    let seconds = body.get(name)?.as_f64()?;
    let time = Duration::try_from_secs_f64(seconds.min(TIME_MAX.as_secs_f64()));
    time.ok()
}

fn count(body: &Value, name: &str) -> Option<u64> {
    body.get(name)?.as_u64()
}

fn flag(body: &Value, name: &str) -> bool {
    body.get(name).and_then(Value::as_bool).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Acquired {
        Acquired::read(body, "t", "s", 7)
    }

    #[test]
    fn odd_answers_are_no_decisions() {
        for body in [
            json!({}),
            json!([]),
            json!(null),
            json!({"action": "dance"}),
            json!({"action": 1}),
            json!({"action": "admit"}),
            json!({"action": "admit", "lease_id": 7}),
            json!({"action": "wait"}),
            json!({"action": "wait", "bypass_in_s": -1, "claim_grace_s": 10}),
            json!({"action": "wait", "bypass_in_s": "soon", "claim_grace_s": 10}),
        ] {
            assert_eq!(read(&body), Acquired::Nothing, "{body}");
        }
    }

    #[test]
    fn an_admit_with_odd_fields_is_an_admit() {
        let body = json!({"action": "admit", "lease_id": "x", "ttl_s": "long", "waited_s": null, "epoch": -1});
        let Acquired::Decided(decision) = read(&body) else {
            panic!("it is a decision");
        };
        assert_eq!(decision.lease_id.as_deref(), Some("x"));
        assert_eq!(
            (decision.reservation_tokens, decision.ttl),
            (7, Duration::ZERO)
        );
    }

    #[test]
    fn words_that_are_new_are_passed_on() {
        let body = json!({"action": "bypass", "reason": "maintenance", "more": {}});
        let Acquired::Decided(decision) = read(&body) else {
            panic!("it is a decision");
        };
        assert_eq!((decision.action, decision.local), (Action::Bypass, false));
        assert_eq!(decision.reason, "maintenance");
    }

    #[test]
    fn times_beyond_all_reason_are_cut() {
        let body = json!({"action": "wait", "bypass_in_s": 1e300, "claim_grace_s": 10});
        let wait = Acquired::Wait(WaitTimes {
            bypass_in: TIME_MAX,
            claim_grace: Duration::from_secs(10),
        });
        assert_eq!(read(&body), wait);
    }

    #[test]
    fn a_close_is_read_as_far_as_it_is_known() {
        let engine = json!({"url": "http://e", "state": "delivered", "attempts": 1, "last_status": 200, "last_error": null});
        let body =
            json!({"close_id": "c", "state": "delivering", "engines": [engine, {"url": "?"}]});
        let close = Close::read(&body, "s");
        assert_eq!(close.status, CloseStatus::Delivering);
        assert_eq!(close.engines.len(), 1);
        let close = Close::read(&json!({"state": "resting"}), "s");
        assert_eq!((close.status, close.close_id), (CloseStatus::Taken, None));
    }
}
