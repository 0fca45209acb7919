//! What systemd is told: ready, a line on how it stands, that the service is alive, and that it stops.
//!
//! Nothing is said where nobody listens: without `NOTIFY_SOCKET` each word goes nowhere. The watchdog
//! is fed under the judgement of `/healthz`, and by a task beside those that serve, so that neither a
//! writer nor a runtime that stands still looks alive.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::{MissedTickBehavior, interval};

use crate::gate::{Gate, Phase};
use crate::http::App;
use crate::telemetry::Repeats;

static NOT_TOLD: Repeats = Repeats::new("the supervisor could not be told");

/// Time between two looks without a watchdog: as often as the line on how it stands may change.
const LOOKS: Duration = Duration::from_secs(5);

/// A start may take this much longer after each look: as long as the store is being opened, and
/// nothing says that it is not, a start is not too long.
const LONGER: Duration = Duration::from_secs(60);

/// A watchdog of less than this is no watchdog.
const LEAST: Duration = Duration::from_millis(10);

/// Tells the supervisor how the service stands, until the process ends.
pub async fn attend(app: App) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let mut said = Said::default();
    let mut phases = app.gate().phases();
    // Half of the time that systemd waits, as it advises.
    let watchdog = sd_notify::watchdog_enabled().map(|limit| limit / 2);
    let mut looks = interval(watchdog.map_or(LOOKS, |half| half.min(LOOKS)).max(LEAST));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        said.look(&app, watchdog.is_some());
        tokio::select! {
            _ = looks.tick() => {}
            changed = phases.changed() => if changed.is_err() { return },
        }
    }
}

/// An orderly stop has begun. Said at once, since the process may be gone before the next look.
pub fn stopping() {
    tell(&[
        NotifyState::Stopping,
        NotifyState::Status("stopping: waiting callers are told to come back"),
    ]);
}

/// What was told last, so that it is told once.
#[derive(Debug, Default)]
struct Said {
    ready: bool,
    status: Option<String>,
}

impl Said {
    fn look(&mut self, app: &App, watchdog: bool) {
        let phase = app.gate().phase();
        let status = status(app.gate(), phase);
        let mut words = Vec::new();
        match phase {
            Phase::Ready if !std::mem::replace(&mut self.ready, true) => {
                words.push(NotifyState::Ready);
            }
            Phase::Starting | Phase::Unavailable if !self.ready => {
                let longer = u32::try_from(LONGER.as_micros()).unwrap_or(u32::MAX);
                words.push(NotifyState::ExtendTimeoutUsec(longer));
            }
            Phase::Starting | Phase::Ready | Phase::Unavailable | Phase::Draining => {}
        }
        if let Some(status) = &status
            && self.status.as_ref() != Some(status)
        {
            words.push(NotifyState::Status(status));
        }
        if watchdog && !app.is_stuck() {
            words.push(NotifyState::Watchdog);
        }
        tell(&words);
        self.status = status;
    }
}

fn tell(words: &[NotifyState<'_>]) {
    if words.is_empty() {
        return;
    }
    if let Err(error) = sd_notify::notify(words)
        && NOT_TOLD.is_told()
    {
        tracing::warn!(%error, "the supervisor could not be told");
    }
}

/// A line for people; `None` where another one was said already.
fn status(gate: &Gate, phase: Phase) -> Option<String> {
    Some(match phase {
        Phase::Starting => "opening the store and reading the fleet".to_owned(),
        Phase::Unavailable => "the store does not answer: callers go on without leases".to_owned(),
        Phase::Draining => return None,
        Phase::Ready => {
            let view = gate.view();
            let degraded = match view.measure.degraded {
                Some(_) => ", degraded: no fresh reading of the fleet",
                None => "",
            };
            format!(
                "{} leases, {} waiting, {} engines{degraded}",
                view.leases,
                view.waiting,
                view.engines.len()
            )
        }
    })
}
