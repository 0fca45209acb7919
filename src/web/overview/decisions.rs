//! The last decisions, newest first.

use askama::Template;
use kvgate_api::{Decision, DecisionAction};

use super::Moment;
use crate::web::format::{clock_part, escaped, grouped, secs};
use crate::web::rows::bypass_class;

#[derive(Template)]
#[template(path = "overview/decisions.html")]
pub(super) struct DecisionsPart {
    rows: Vec<Row>,
}

struct Row {
    number: u64,
    at: String,
    time: String,
    word: String,
    class: &'static str,
    name: String,
    href: String,
    tokens: String,
    note: String,
    explanation: String,
}

impl DecisionsPart {
    pub(super) fn new(moment: &Moment) -> Self {
        Self {
            rows: moment.rows.decisions.iter().map(Row::new).collect(),
        }
    }
}

impl Row {
    fn new(decision: &Decision) -> Self {
        let waited = if decision.waited_s > 0.0 {
            format!("waited {}", secs(decision.waited_s))
        } else {
            "at once".to_owned()
        };
        let reason = decision.reason.replace('_', " ");
        let (class, word, note) = match decision.action {
            DecisionAction::Admit => ("admit", "admit".to_owned(), waited),
            DecisionAction::Wait => (
                "wait",
                "wait".to_owned(),
                if decision.reason == "behind_older" {
                    format!("{} before it", grouped(decision.waiting))
                } else {
                    reason
                },
            ),
            DecisionAction::Bypass if decision.reason == "aged" => ("aged", reason, waited),
            DecisionAction::Bypass => (bypass_class(&decision.reason), "bypass".to_owned(), reason),
            DecisionAction::Cancelled => ("cancelled", "cancelled".to_owned(), reason),
            DecisionAction::Ended => {
                let held = format!("held {}", secs(decision.held_s.unwrap_or(0.0)));
                match decision.reason.as_str() {
                    "released" => ("release", "release".to_owned(), held),
                    _ => ("expired", reason, held),
                }
            }
        };
        let (name, href) = match &decision.session_id {
            Some(session) => (session.clone(), format!("session?id={}", escaped(session))),
            None => (
                decision.ticket_id.clone(),
                format!("ticket?id={}", escaped(&decision.ticket_id)),
            ),
        };
        Self {
            number: decision.number,
            at: decision.at.clone(),
            time: clock_part(&decision.at).to_owned(),
            word,
            class,
            name,
            href,
            tokens: grouped(decision.reservation_tokens),
            note,
            explanation: decision.explanation.clone(),
        }
    }
}
