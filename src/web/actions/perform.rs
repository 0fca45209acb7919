//! The act: one turn under the name of who asked, and what it came to in a sentence.

use kvgate_core::audit::AuditAct;
use kvgate_core::command::{Act, CloseRequest, Command, Operation};
use kvgate_core::effect::{CancelOutcome, CloseReply, Reply, RetryRefused};
use kvgate_core::ids::{CloseId, Label};
use kvgate_core::settings::{Change, SettingsChange};

use super::super::page::Outcome;
use super::effect::failed;
use super::{Wish, batch, counted};
use crate::gate::GateError;
use crate::http::{App, Fault, read};
use crate::words;

/// Grants a wish.
pub(super) async fn carry_out(app: &App, who: Label, wish: &Wish) -> Result<Outcome, Fault> {
    match wish {
        Wish::Pause => {
            let change = SettingsChange {
                paused: Change::Value(true),
                ..SettingsChange::default()
            };
            configure(app, who, change).await
        }
        Wish::Resume => {
            let change = SettingsChange {
                paused: if app.gate().view().settings.configured.paused {
                    Change::Value(false)
                } else {
                    Change::Configured
                },
                ..SettingsChange::default()
            };
            configure(app, who, change).await
        }
        Wish::Set(change) => configure(app, who, (**change).clone()).await,
        Wish::Cancel(tickets) => {
            let acts = tickets.iter().cloned().map(Act::Cancel);
            let replies = operate(app, who, acts).await?;
            Ok(told(replies, |reply| match reply {
                Reply::Cancel(outcome) => cancelled(outcome),
                _ => UNEXPECTED,
            }))
        }
        Wish::Revoke(leases) => {
            let acts = leases.iter().copied().map(Act::Revoke);
            let replies = operate(app, who, acts).await?;
            Ok(told(replies, |reply| match reply {
                Reply::Revoke(Ok(())) => ("lease revoked", "leases revoked", false),
                Reply::Revoke(Err(_)) => (
                    "lease was not held any more",
                    "leases were not held any more",
                    true,
                ),
                _ => UNEXPECTED,
            }))
        }
        Wish::Close(sessions, mode) => {
            let acts = sessions.iter().cloned().map(|session| {
                Act::Close(CloseRequest {
                    session,
                    mode: *mode,
                    reason: None,
                })
            });
            let replies = operate(app, who, acts).await?;
            Ok(told(replies, |reply| match reply {
                Reply::Close(CloseReply::Taken(_)) => {
                    ("session is closed", "sessions are closed", false)
                }
                Reply::Close(CloseReply::Full) => (
                    "session not closed: too many closes are open",
                    "sessions not closed: too many closes are open",
                    true,
                ),
                Reply::Close(CloseReply::Disabled) => (
                    "session not closed: session closes are off",
                    "sessions not closed: session closes are off",
                    true,
                ),
                _ => UNEXPECTED,
            }))
        }
        Wish::Retry(closes) => retry(app, who, closes).await,
        Wish::RetryFailed => {
            let failed = failed(app).await?;
            retry(app, who, &failed).await
        }
    }
}

async fn configure(app: &App, who: Label, change: SettingsChange) -> Result<Outcome, Fault> {
    let before = app.gate().view();
    let answered = app.gate().configure(who, change).await?;
    let after = answered.value.map_err(read::settings_refused)?;
    let moves = before.settings.moves(&after.overrides);
    Ok(Outcome {
        text: if moves.is_empty() {
            "Nothing was changed: all values were as wished.".to_owned()
        } else {
            words::audit_detail(&AuditAct::SettingsChanged(moves))
        },
        bad: false,
    })
}

async fn retry(app: &App, who: Label, closes: &[CloseId]) -> Result<Outcome, Fault> {
    let acts = closes.iter().copied().map(Act::RetryClose);
    let replies = operate(app, who, acts).await?;
    Ok(told(replies, |reply| match reply {
        Reply::RetryClose(Ok(_)) => (
            "close is sent once more",
            "closes are sent once more",
            false,
        ),
        Reply::RetryClose(Err(RetryRefused::NotFound)) => (
            "close was not known any more",
            "closes were not known any more",
            true,
        ),
        Reply::RetryClose(Err(RetryRefused::Superseded)) => (
            "close left alone: its session was used anew",
            "closes left alone: their sessions were used anew",
            true,
        ),
        Reply::RetryClose(Err(RetryRefused::Disabled)) => (
            "close not sent: session closes are off",
            "closes not sent: session closes are off",
            true,
        ),
        _ => UNEXPECTED,
    }))
}

/// One of them, many of them, and whether that is not what was wished.
type Said = (&'static str, &'static str, bool);

const UNEXPECTED: Said = ("had no answer", "had no answer", true);

const fn cancelled(outcome: CancelOutcome) -> Said {
    match outcome {
        CancelOutcome::Withdrawn => ("ticket withdrawn", "tickets withdrawn", false),
        CancelOutcome::Released => ("lease given back", "leases given back", false),
        CancelOutcome::Bypassed => (
            "had gone on without a lease",
            "had gone on without a lease",
            true,
        ),
        CancelOutcome::AlreadyFinished => ("had ended already", "had ended already", true),
        CancelOutcome::Unknown => (
            "was not known; a late acquire is refused",
            "were not known; a late acquire is refused",
            true,
        ),
    }
}

/// What many acts came to, each kind once, in the order of its first.
fn told(replies: Vec<Result<Reply, GateError>>, said: impl Fn(Reply) -> Said) -> Outcome {
    let mut kinds: Vec<(Said, u64)> = Vec::new();
    for reply in replies {
        let kind = match reply {
            Ok(reply) => said(reply),
            Err(GateError::StoreUnavailable) => (
                "not done: the store is not available",
                "not done: the store is not available",
                true,
            ),
            Err(_) => (
                "not done: the service is busy or stops",
                "not done: the service is busy or stops",
                true,
            ),
        };
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let parts: Vec<String> = kinds
        .iter()
        .map(|((one, many, _), count)| counted(*count, one, many))
        .collect();
    Outcome {
        text: if parts.is_empty() {
            "There was nothing to do.".to_owned()
        } else {
            format!("{}.", parts.join(", "))
        },
        bad: kinds.iter().any(|((.., bad), _)| *bad),
    }
}

/// All in one turn, so that either all are durable or none.
async fn operate(
    app: &App,
    who: Label,
    acts: impl Iterator<Item = Act>,
) -> Result<Vec<Result<Reply, GateError>>, Fault> {
    let commands = acts.map(|act| {
        Command::Operate(Operation {
            who: who.clone(),
            act,
        })
    });
    batch(app, commands.collect()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_many_acts_came_to() {
        let replies = [
            CancelOutcome::Withdrawn,
            CancelOutcome::Unknown,
            CancelOutcome::Withdrawn,
        ];
        let replies = replies.map(|outcome| Ok(Reply::Cancel(outcome)));
        let outcome = told(replies.into(), |reply| match reply {
            Reply::Cancel(outcome) => cancelled(outcome),
            _ => UNEXPECTED,
        });
        assert_eq!(
            outcome.text,
            "2 tickets withdrawn, 1 was not known; a late acquire is refused."
        );
        assert!(outcome.bad);
        let none = told(vec![Err(GateError::StoreUnavailable)], |_| UNEXPECTED);
        assert_eq!(none.text, "1 not done: the store is not available.");
    }
}
