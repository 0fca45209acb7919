//! What the core says, in the words of the reference.

use kvgate_core::effect::{self, Reply};

use super::model::{self, How, Said, Watched, Why};

/// A decision of the core.
pub fn answer(answer: &effect::Answer) -> model::Answer {
    use effect::Outcome;
    model::Answer {
        ticket: answer.ticket.clone(),
        session: answer.session.clone(),
        reservation: answer.reservation.get(),
        epoch: answer.epoch.0,
        waited: answer.waited.millis(),
        // No rule says whether a wait is a repeated one.
        repeated: answer.repeated && !matches!(answer.outcome, Outcome::Wait(_)),
        outcome: match &answer.outcome {
            Outcome::Admit {
                lease,
                ttl,
                ends_at,
            } => model::Outcome::Admit {
                lease: *lease,
                ttl: ttl.millis(),
                ends: ends_at.millis(),
            },
            Outcome::Bypass(reason) => model::Outcome::Bypass(*reason),
            Outcome::Cancelled(reason) => model::Outcome::Cancelled(*reason),
            Outcome::Wait(status) => model::Outcome::Wait(model::Place {
                reason: status.reason,
                position: status.position,
                tokens_ahead: status.tokens_ahead.get(),
                short: status.short.get(),
                age: status.age.millis(),
                bypass_in: status.bypass_in.millis(),
            }),
        },
    }
}

fn gone(gone: effect::LeaseGone) -> Why {
    use effect::LeaseGone;
    match gone {
        LeaseGone::NotFound => Why::NeverIssued,
        LeaseGone::Released => Why::Released,
        LeaseGone::Expired => Why::Expired,
    }
}

/// What a cancel met, in the words of the reference.
pub fn how(outcome: effect::CancelOutcome) -> How {
    match outcome {
        effect::CancelOutcome::Withdrawn => How::Withdrawn,
        effect::CancelOutcome::Released => How::Released,
        effect::CancelOutcome::Bypassed => How::Bypassed,
        effect::CancelOutcome::AlreadyFinished => How::AlreadyFinished,
        effect::CancelOutcome::Unknown => How::Unknown,
    }
}

/// An answer of the core.
pub fn said(reply: &Reply) -> Said {
    use effect::{AcquireRefused, CloseReply, ReleaseOutcome, TicketView};
    match reply {
        Reply::Acquire(Ok(told)) => Said::Answer(answer(told)),
        Reply::Acquire(Err(AcquireRefused::TicketConflict)) => Said::Conflict,
        Reply::Acquire(Err(AcquireRefused::TooManyTokens)) => Said::TooManyTokens,
        Reply::Watch(watched) => Said::Watch(
            watched
                .iter()
                .map(|(_, watched)| match watched {
                    effect::Watched::Waiting => Watched::Waiting,
                    effect::Watched::Unknown => Watched::Unknown,
                    effect::Watched::Decided(told) => Watched::Decided(answer(told)),
                })
                .collect(),
        ),
        Reply::Left(told) => Said::Left(told.as_ref().map(answer)),
        Reply::Release(Ok(ReleaseOutcome::Released)) => Said::Released,
        Reply::Release(Ok(ReleaseOutcome::AlreadyReleased)) => Said::AlreadyReleased,
        Reply::Release(Err(why)) | Reply::Lease(Err(why)) | Reply::Revoke(Err(why)) => {
            Said::Gone(gone(*why))
        }
        Reply::Lease(Ok(view)) => Said::Lease {
            ends: view.lease.ends_at.millis(),
            ttl: view.lease.ttl.millis(),
            epoch: view.lease.epoch.0,
        },
        Reply::Revoke(Ok(())) => Said::Revoked,
        Reply::Cancel(outcome) => Said::Cancel(how(*outcome)),
        Reply::Ticket(view) => Said::Ticket(view.as_ref().map(|view| match view {
            TicketView::Answer(told) => Ok(answer(told)),
            TicketView::Ended(how) => Err(*how),
        })),
        Reply::Done => Said::Done,
        Reply::Close(CloseReply::Disabled) => Said::ClosesOff,
        Reply::Close(CloseReply::Taken(_)) => Said::Closed,
        Reply::RetryClose(_) => Said::Retried,
        Reply::Settings(Ok(_)) => Said::Settings,
        Reply::Settings(Err(_)) => Said::SettingsRefused,
        Reply::Leases(_)
        | Reply::Queue(_)
        | Reply::Epochs(_)
        | Reply::Image(_)
        | Reply::Close(CloseReply::Full)
        | Reply::ReadClose(_)
        | Reply::Session(_)
        | Reply::Sessions(_)
        | Reply::Closes(_)
        | Reply::Step(_)
        | Reply::Steps(_)
        | Reply::Decisions(_)
        | Reply::Audit(_) => {
            panic!("nobody asked for {reply:?}")
        }
    }
}
