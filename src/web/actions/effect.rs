//! What a wish comes to, in figures, before it is granted. Nothing is changed here.

use std::collections::BTreeSet;

use kvgate_core::close::CloseIntent;
use kvgate_core::command::{Command, SLICE_MAX, Slice};
use kvgate_core::effect::{LeaseView, Outcome as Decision, Reply, SessionView, TicketView};
use kvgate_core::ids::{CloseId, CloseNo, LeaseId, RowNo, SessionId, TicketId};
use kvgate_core::settings::{Settings, SettingsChange};
use kvgate_core::view::View;

use super::super::format::{duration, grouped, percent};
use super::super::settings;
use super::{IDS_MAX, Wish, batch, capitalised, counted, named, wide};
use crate::http::{App, Fault, read};

/// Ids that a confirmation lists; the rest is counted.
const ROWS_SHOWN: usize = 100;
/// What a wish comes to, before it is granted.
#[derive(Default)]
pub(super) struct Effect {
    pub(super) title: String,
    pub(super) sentences: Vec<String>,
    /// What the rows are.
    pub(super) kind: &'static str,
    /// Each with how it stands.
    pub(super) rows: Vec<(String, String)>,
    pub(super) more: Option<String>,
    /// `None` when there is nothing to do.
    pub(super) button: Option<&'static str>,
    /// Work of others is cut short.
    pub(super) grave: bool,
    pub(super) asks_mode: bool,
}

/// What a wish comes to.
pub(super) async fn effect(app: &App, wish: &Wish) -> Result<Effect, Fault> {
    match wish {
        Wish::Pause => Ok(pausing(app)),
        Wish::Resume => Ok(resuming(app)),
        Wish::Set(change) => setting(app, change),
        Wish::Cancel(tickets) => cancelling(app, tickets).await,
        Wish::Revoke(leases) => revoking(app, leases).await,
        Wish::Close(sessions, _) => closing(app, sessions).await,
        Wish::Retry(closes) => retrying(app, closes).await,
        Wish::RetryFailed => {
            let failed = failed(app).await?;
            retrying(app, &failed).await
        }
    }
}

fn pausing(app: &App) -> Effect {
    let view = app.gate().view();
    let mut effect = Effect {
        title: "Pause the gate".to_owned(),
        ..Effect::default()
    };
    if view.policy.paused {
        effect
            .sentences
            .push("The gate is paused already.".to_owned());
        return effect;
    }
    effect.sentences = vec![
        going_on(&view),
        "New acquires go on without a lease until the gate is resumed.".to_owned(),
        staying(&view),
        "The gate stays paused over a restart.".to_owned(),
    ];
    effect.button = Some("Pause gate");
    effect
}

/// What happens to waiters when admission does not apply any more.
fn going_on(view: &View) -> String {
    match view.waiting {
        0 => "Nobody waits now.".to_owned(),
        1 => format!(
            "The one that waits goes on at once without a lease: {} tokens.",
            grouped(view.waiting_tokens.get())
        ),
        many => format!(
            "The {} that wait go on at once without a lease: {} tokens.",
            grouped(many),
            grouped(view.waiting_tokens.get())
        ),
    }
}

fn staying(view: &View) -> String {
    match view.leases {
        0 => "No lease is held.".to_owned(),
        leases => format!(
            "{} with {} tokens {} until given back or expired.",
            counted(leases, "held lease", "held leases"),
            grouped(view.reserved.get()),
            if leases == 1 { "stays" } else { "stay" },
        ),
    }
}

fn resuming(app: &App) -> Effect {
    let view = app.gate().view();
    let mut effect = Effect {
        title: "Resume the gate".to_owned(),
        ..Effect::default()
    };
    if !view.policy.paused {
        effect.sentences.push("The gate is not paused.".to_owned());
        return effect;
    }
    effect.sentences.push(if view.measure.degraded.is_some() {
        "There is no usable ceiling now: acquires go on without a lease until there is one."
            .to_owned()
    } else {
        format!(
            "New acquires are admitted while they fit: {} of {} tokens are available.",
            grouped(view.available().get()),
            grouped(view.measure.ceiling.get())
        )
    });
    effect.sentences.push(
        "Requests that went on without a lease meanwhile stay so; the ledger does not know of them.".to_owned(),
    );
    effect.button = Some("Resume gate");
    effect
}

fn setting(app: &App, change: &SettingsChange) -> Result<Effect, Fault> {
    let view = app.gate().view();
    let changed = view
        .settings
        .changed(change)
        .map_err(read::settings_refused)?;
    let moves = view.settings.moves(&changed.overrides);
    let mut effect = Effect {
        title: "Change settings".to_owned(),
        kind: "Setting",
        ..Effect::default()
    };
    if moves.is_empty() {
        effect
            .sentences
            .push("Nothing is to be changed: all values are as they are in force.".to_owned());
        return Ok(effect);
    }
    effect.rows = moves.iter().map(settings::moved).collect();
    effect.sentences = settings_effects(&view, &changed);
    effect
        .sentences
        .push("It holds from now on, over restarts too.".to_owned());
    effect.button = Some("Change settings");
    Ok(effect)
}

fn settings_effects(view: &View, changed: &Settings) -> Vec<String> {
    let mut sentences = Vec::new();
    let (before, after) = (&view.policy, changed.effective());
    let applied = |policy: &kvgate_core::policy::Policy| policy.program_admission && !policy.paused;
    if applied(before) && !applied(&after) {
        sentences.push(going_on(view));
        sentences.push(staying(view));
    }
    if after.headroom != before.headroom {
        let ceiling = view.measure.capacity.share(after.headroom);
        sentences.push(format!(
            "The ceiling goes from {} to {} tokens; {} are reserved.",
            grouped(view.measure.ceiling.get()),
            grouped(ceiling.get()),
            grouped(view.reserved.get())
        ));
        if view.reserved > ceiling {
            sentences.push(format!(
                "That is {} more than the new ceiling: nothing is admitted until leases have ended for so much.",
                grouped(view.reserved.saturating_sub(ceiling).get())
            ));
        }
    }
    if after.pressure_threshold != before.pressure_threshold
        && let Some((worst, engine)) = &view.measure.pressure
    {
        let holds = if *worst >= after.pressure_threshold {
            "new work waits"
        } else {
            "nothing waits for it"
        };
        sentences.push(format!(
            "The worst engine, {}, is at {}: {holds}.",
            engine.as_str(),
            percent(*worst)
        ));
    }
    if after.max_wait != before.max_wait
        && let Some(oldest) = view.oldest_waiter
    {
        let age = view.now.since(oldest);
        sentences.push(format!(
            "The oldest of {} has waited for {}: {}.",
            counted(view.waiting, "waiter", "waiters"),
            duration(age),
            if age >= after.max_wait {
                "it goes on at once without a lease"
            } else {
                "it waits on"
            },
        ));
    }
    if before.session_lifecycle && !after.session_lifecycle {
        sentences.push(format!(
            "New session closes are refused; {} go on to their end.",
            counted(view.closes_pending, "running close", "running closes")
        ));
    }
    sentences
}

async fn cancelling(app: &App, tickets: &[TicketId]) -> Result<Effect, Fault> {
    let commands = tickets.iter().cloned().map(Command::ReadTicket);
    let replies = batch(app, commands.collect()).await?;
    let (mut waiting, mut wanted, mut held, mut freed, mut others, mut unknown) =
        (0, 0, 0, 0, 0, 0);
    let mut rows = Vec::new();
    for (ticket, reply) in tickets.iter().zip(replies) {
        let Reply::Ticket(known) = reply? else {
            continue;
        };
        let now = match known {
            Some(TicketView::Answer(answer)) => {
                let tokens = answer.reservation.get();
                match answer.outcome {
                    Decision::Wait(status) => {
                        waiting += 1;
                        wanted += tokens;
                        format!(
                            "waits as #{}, {} tokens",
                            grouped(status.position),
                            grouped(tokens)
                        )
                    }
                    Decision::Admit { .. } => {
                        held += 1;
                        freed += tokens;
                        format!("holds {} tokens", grouped(tokens))
                    }
                    Decision::Bypass(_) => {
                        others += 1;
                        "went on without a lease".to_owned()
                    }
                    Decision::Cancelled(_) => {
                        others += 1;
                        "is finished".to_owned()
                    }
                }
            }
            Some(TicketView::Ended(_)) => {
                others += 1;
                "has ended".to_owned()
            }
            None => {
                unknown += 1;
                "is not known".to_owned()
            }
        };
        rows.push((ticket.as_str().to_owned(), now));
    }
    let mut sentences = Vec::new();
    if waiting > 0 {
        sentences.push(format!(
            "{} withdrawn from the queue: {} tokens wanted less.",
            counted(waiting, "ticket is", "tickets are"),
            grouped(wanted)
        ));
    }
    if held > 0 {
        sentences.push(format!(
            "{} given back: releases {} tokens, while the work itself may run on at its engine.",
            counted(held, "lease is", "leases are"),
            grouped(freed)
        ));
    }
    if waiting + held > 0 {
        sentences.push(next(app, freed, &tickets.iter().collect()).await);
        let callers = if waiting + held == 1 {
            "Its caller is"
        } else {
            "Their callers are"
        };
        sentences.push(format!("{callers} told not to start."));
    }
    if others > 0 {
        sentences.push(format!(
            "{} already: a later acquire with the same ticket is refused.",
            counted(
                others,
                "ticket is decided or has ended",
                "tickets are decided or have ended"
            )
        ));
    }
    if unknown > 0 {
        sentences.push(format!(
            "{} not known: a marker stays, so that a late acquire is refused.",
            counted(unknown, "ticket is", "tickets are")
        ));
    }
    Ok(listed(Effect {
        title: named(
            "Cancel ticket",
            tickets.first().map(TicketId::as_str),
            tickets.len(),
            "Cancel",
            "tickets",
        ),
        sentences,
        kind: "Ticket",
        rows,
        button: Some(if tickets.len() == 1 {
            "Cancel ticket"
        } else {
            "Cancel tickets"
        }),
        grave: true,
        ..Effect::default()
    }))
}

async fn revoking(app: &App, leases: &[LeaseId]) -> Result<Effect, Fault> {
    let commands = leases.iter().copied().map(Command::ReadLease);
    let replies = batch(app, commands.collect()).await?;
    let (mut held, mut freed, mut gone) = (0, 0, 0);
    let mut rows = Vec::new();
    for (lease, reply) in leases.iter().zip(replies) {
        let Reply::Lease(known) = reply? else {
            continue;
        };
        let now = match known {
            Ok(view) => {
                held += 1;
                freed += view.terms.reservation.get();
                lease_in_words(&view)
            }
            Err(why) => {
                gone += 1;
                why.to_string()
            }
        };
        rows.push((lease.to_text(), now));
    }
    let view = app.gate().view();
    let mut sentences = Vec::new();
    if held > 0 {
        sentences.push(format!(
            "Releases {} of {} reserved tokens.",
            grouped(freed),
            grouped(view.reserved.get())
        ));
        sentences.push(next(app, freed, &BTreeSet::new()).await);
        sentences.push(
            "The work itself is not stopped: until it ends, its engine holds tokens that nobody has reserved.".to_owned(),
        );
    }
    if gone > 0 {
        sentences.push(format!(
            "{} held any more.",
            counted(gone, "lease is not", "leases are not")
        ));
    }
    let one = rows.first().map(|(id, _)| id.clone());
    Ok(listed(Effect {
        title: named(
            "Revoke lease",
            one.as_deref(),
            leases.len(),
            "Revoke",
            "leases",
        ),
        sentences,
        kind: "Lease",
        rows,
        button: (held > 0).then_some(if leases.len() == 1 {
            "Revoke lease"
        } else {
            "Revoke leases"
        }),
        grave: true,
        ..Effect::default()
    }))
}

fn lease_in_words(view: &LeaseView) -> String {
    format!(
        "{} tokens of ticket {} in session {}",
        grouped(view.terms.reservation.get()),
        view.ticket.as_str(),
        view.session.as_str()
    )
}

async fn closing(app: &App, sessions: &[SessionId]) -> Result<Effect, Fault> {
    let view = app.gate().view();
    let title = named(
        "Close session",
        sessions.first().map(SessionId::as_str),
        sessions.len(),
        "Close",
        "sessions",
    );
    if !view.policy.session_lifecycle {
        return Ok(Effect {
            title,
            sentences: vec![
                "Session closes are off: nothing would be kept, and no engine would be told."
                    .to_owned(),
            ],
            ..Effect::default()
        });
    }
    let commands = sessions.iter().cloned().map(Command::ReadSession);
    let replies = batch(app, commands.collect()).await?;
    let (mut leases, mut tokens, mut waiting, mut wanted, mut open) = (0, 0, 0, 0, 0);
    let mut rows = Vec::new();
    for (session, reply) in sessions.iter().zip(replies) {
        let Reply::Session(known) = reply? else {
            continue;
        };
        let Some(known) = known else {
            rows.push((session.as_str().to_owned(), "is not known".to_owned()));
            continue;
        };
        let held = sum(
            &known,
            |view| &view.leases,
            |lease| lease.terms.reservation.get(),
        );
        let queued = sum(
            &known,
            |view| &view.waiting,
            |waiter| waiter.terms.reservation.get(),
        );
        leases += known.leases.len();
        tokens += held;
        waiting += known.waiting.len();
        wanted += queued;
        open += known.closes.iter().filter(|close| !close.is_done()).count();
        rows.push((
            session.as_str().to_owned(),
            format!(
                "{} with {} tokens, {} waiting",
                counted(known.leases.len(), "lease", "leases"),
                grouped(held),
                known.waiting.len()
            ),
        ));
    }
    let mut sentences = Vec::new();
    if waiting > 0 {
        sentences.push(format!(
            "{} withdrawn from the queue: {} tokens wanted less.",
            counted(waiting, "waiter is", "waiters are"),
            grouped(wanted)
        ));
    }
    sentences.push(if leases > 0 {
        format!(
            "{} with {} tokens {} held: the engines are told when the last one has ended.",
            counted(leases, "lease", "leases"),
            grouped(tokens),
            if leases == 1 { "is" } else { "are" }
        )
    } else {
        "No lease is held: the engines are told at once.".to_owned()
    });
    sentences.push(format!(
        "{} told to release the KV; what they free at once depends on their version.",
        counted(view.engines.len(), "engine is", "engines are")
    ));
    if open > 0 {
        sentences.push(format!(
            "{} already: it is joined.",
            counted(open, "close runs", "closes run")
        ));
    }
    Ok(listed(Effect {
        title,
        sentences,
        kind: "Session",
        rows,
        button: Some(if sessions.len() == 1 {
            "Close session"
        } else {
            "Close sessions"
        }),
        grave: true,
        asks_mode: leases > 0,
        ..Effect::default()
    }))
}

fn sum<T>(
    view: &SessionView,
    of: impl Fn(&SessionView) -> &Vec<T>,
    tokens: impl Fn(&T) -> u64,
) -> u64 {
    of(view).iter().map(tokens).fold(0, u64::saturating_add)
}

async fn retrying(app: &App, closes: &[CloseId]) -> Result<Effect, Fault> {
    let title = match closes {
        [one] => format!("Retry close {}", one.to_text()),
        many => format!("Retry {}", counted(many.len(), "close", "closes")),
    };
    if closes.is_empty() {
        return Ok(Effect {
            title,
            sentences: vec!["No close that is remembered has failed.".to_owned()],
            ..Effect::default()
        });
    }
    let commands = closes.iter().copied().map(Command::ReadClose);
    let replies = batch(app, commands.collect()).await?;
    let (mut again, mut engines, mut superseded) = (0, 0, 0);
    let mut rows = Vec::new();
    for (close, reply) in closes.iter().zip(replies) {
        let Reply::ReadClose(known) = reply? else {
            continue;
        };
        let now = match known {
            None => "is not known any more".to_owned(),
            Some(close) if close.reopened.is_some() => {
                superseded += 1;
                format!("session {} was used anew since", close.session.as_str())
            }
            Some(close) => {
                let retried = retried(&close);
                again += usize::from(retried > 0);
                engines += retried;
                format!(
                    "session {}, {} to be told",
                    close.session.as_str(),
                    counted(retried, "engine", "engines")
                )
            }
        };
        rows.push((close.to_text(), now));
    }
    let mut sentences = vec![format!(
        "{} sent once more, to {}.",
        counted(again, "close is", "closes are"),
        counted(engines, "engine in all", "engines in all")
    )];
    if superseded > 0 {
        sentences.push(format!(
            "{} left alone: a late close would hit the newer use of the session.",
            counted(superseded, "close is", "closes are")
        ));
    }
    if !app.gate().view().policy.session_lifecycle {
        sentences = vec!["Session closes are off: nothing is sent.".to_owned()];
        again = 0;
    }
    Ok(listed(Effect {
        title,
        sentences,
        kind: "Close",
        rows,
        button: (again > 0).then_some(if closes.len() == 1 {
            "Retry close"
        } else {
            "Retry closes"
        }),
        ..Effect::default()
    }))
}

/// Engines that a retry sends to, as far as they are named.
fn retried(close: &CloseIntent) -> usize {
    let targets = close.targets.values();
    targets.filter(|target| target.state.is_retried()).count()
}

/// Failed closes that can be sent again, newest first, as many as one form may name.
pub(super) async fn failed(app: &App) -> Result<Vec<CloseId>, Fault> {
    let mut failed = Vec::new();
    let mut from = CloseNo(u64::MAX);
    loop {
        let slice = Slice {
            from,
            rows: SLICE_MAX,
        };
        let page = app.gate().list_closes(slice).await?;
        let matching = page
            .items
            .iter()
            .filter(|close| close.has_failed() && close.reopened.is_none());
        failed.extend(matching.map(|close| close.id));
        let last = page
            .items
            .last()
            .filter(|_| page.more && failed.len() < IDS_MAX);
        match last.and_then(|close| close.id.number.0.checked_sub(1)) {
            Some(next) => from = CloseNo(next),
            None => break,
        }
        tokio::task::yield_now().await;
    }
    failed.truncate(IDS_MAX);
    Ok(failed)
}

/// Who is next when so many tokens are given back and these tickets are gone, and whether it fits.
async fn next(app: &App, freed: u64, gone: &BTreeSet<&TicketId>) -> String {
    let slice = Slice {
        from: RowNo(0),
        rows: SLICE_MAX,
    };
    let Ok(queue) = app.gate().list_queue(slice).await else {
        return "The queue cannot be read now.".to_owned();
    };
    let Some(next) = queue
        .items
        .iter()
        .find(|waiter| !gone.contains(&waiter.ticket))
    else {
        return if queue.more {
            "Others wait behind them.".to_owned()
        } else {
            "Nobody waits for the tokens.".to_owned()
        };
    };
    let view = app.gate().view();
    let ticket = next.ticket.as_str();
    let reserved = view.reserved.get().saturating_sub(freed);
    let needed = reserved.saturating_add(next.terms.reservation.get());
    let ceiling = view.measure.ceiling.get();
    let pressed = view
        .measure
        .pressure
        .as_ref()
        .is_some_and(|(worst, _)| *worst >= view.policy.pressure_threshold);
    if needed > ceiling {
        format!(
            "Ticket {ticket} is next and is {} tokens short then.",
            grouped(needed - ceiling)
        )
    } else if pressed || view.paced {
        format!("Ticket {ticket} is next and fits, but waits for the pressure to fall.")
    } else {
        format!("Ticket {ticket} is next and fits.")
    }
}

fn listed(mut effect: Effect) -> Effect {
    let beyond = effect.rows.len().saturating_sub(ROWS_SHOWN);
    // One id stands in the title already.
    if effect.rows.len() == 1
        && let Some((_, now)) = effect.rows.pop()
    {
        effect
            .sentences
            .insert(0, format!("{}.", capitalised(&now)));
    }
    effect.rows.truncate(ROWS_SHOWN);
    effect.more = (beyond > 0).then(|| format!("and {} more", grouped(wide(beyond))));
    effect
}
