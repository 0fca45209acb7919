//! What the log tells of the gate: one line for each change that somebody wants to read later.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvgate_core::capacity::EngineView;
use kvgate_core::close::{CloseIntent, TargetState};
use kvgate_core::decision::DegradedReason;
use kvgate_core::event::Event;
use kvgate_core::ids::{EngineId, Epoch};
use kvgate_core::policy::Policy;
use kvgate_core::view::View;

use crate::telemetry::Repeats;
use crate::words;

/// Leases of one turn whose expiry is told by name. When a whole fleet of callers dies, the others
/// are told together.
const EXPIRIES_BY_NAME: usize = 16;

/// The same for what operators do to many things at once.
const OPERATIONS_BY_NAME: usize = 16;

static CLOSE_FAILED: Repeats = Repeats::new("a close ended with engines failed or refused");

/// What was told last.
#[derive(Debug, Default)]
pub(super) struct News {
    policy: Option<Arc<Policy>>,
    epoch: Option<Epoch>,
    degraded: Option<DegradedReason>,
    engines: Option<Arc<[EngineView]>>,
    /// Members that give no fresh reading.
    silent: BTreeSet<EngineId>,
}

impl News {
    /// The picture after a durable turn. While nothing was read yet there is nothing to tell of the
    /// fleet.
    pub(super) fn tell(&mut self, view: &View, starting: bool) {
        self.tell_settings(view);
        let told = self.epoch.replace(view.epoch);
        if told.is_some_and(|told| told != view.epoch) {
            tracing::info!(
                epoch = view.epoch.0,
                engines = view.engines.len(),
                "the worker set changed"
            );
        }
        if starting {
            return;
        }
        self.tell_degraded(view);
        let same = |told: &Arc<[EngineView]>| Arc::ptr_eq(told, &view.engines);
        if !self.engines.as_ref().is_some_and(same) {
            self.tell_engines(&view.engines);
            self.engines = Some(Arc::clone(&view.engines));
        }
    }

    fn tell_settings(&mut self, view: &View) {
        let same = |told: &Arc<Policy>| Arc::ptr_eq(told, &view.policy);
        if self.policy.as_ref().is_some_and(same) {
            return;
        }
        let switches = |policy: &Policy| {
            [
                policy.program_admission,
                policy.session_lifecycle,
                policy.paused,
            ]
        };
        let told = self.policy.replace(Arc::clone(&view.policy));
        if told.is_none_or(|told| switches(&told) != switches(&view.policy)) {
            tracing::info!(
                program_admission = view.policy.program_admission,
                session_lifecycle = view.policy.session_lifecycle,
                paused = view.policy.paused,
                "features"
            );
        }
    }

    fn tell_degraded(&mut self, view: &View) {
        let degraded = view.measure.degraded;
        if std::mem::replace(&mut self.degraded, degraded) == degraded {
            return;
        }
        match degraded {
            Some(reason) => {
                let reason = words::degraded_reason(reason);
                tracing::warn!(reason, "degraded: everything bypasses");
            }
            None => {
                let ceiling = view.measure.ceiling.get();
                tracing::info!(ceiling, "no longer degraded");
            }
        }
    }

    fn tell_engines(&mut self, engines: &[EngineView]) {
        let mut silent = BTreeSet::new();
        for engine in engines {
            let was_silent = self.silent.contains(&engine.id);
            if !engine.fresh {
                silent.insert(engine.id.clone());
            }
            match (was_silent, engine.fresh) {
                (false, false) => {
                    let why = engine.failure.map(words::read_failure);
                    let why = why.as_deref().unwrap_or("not read yet");
                    tracing::warn!(
                        engine = engine.id.as_str(),
                        why,
                        "an engine gives no reading"
                    );
                }
                (true, true) => {
                    tracing::info!(engine = engine.id.as_str(), "an engine is read again");
                }
                (false, true) | (true, false) => {}
            }
        }
        self.silent = silent;
    }
}

/// Expiries of a turn, each in one line only (LEA1).
pub(super) fn tell_expiries(events: &[Event]) {
    let mut others = 0_u64;
    let mut other_tokens = 0_u64;
    let mut named = 0;
    for event in events {
        let Event::Expired {
            lease,
            ticket,
            session,
            reservation,
        } = event
        else {
            continue;
        };
        if named == EXPIRIES_BY_NAME {
            others += 1;
            other_tokens = other_tokens.saturating_add(reservation.get());
            continue;
        }
        named += 1;
        tracing::info!(
            %lease,
            ticket = ticket.as_str(),
            session = session.as_ref().map(|session| session.as_str()),
            tokens = reservation.get(),
            "a lease expired"
        );
    }
    if others > 0 {
        tracing::info!(
            leases = others,
            tokens = other_tokens,
            "more leases expired"
        );
    }
}

/// What operators did in a turn; of many acts at once the first are told (SET3).
pub(super) fn tell_operations(events: &[Event]) {
    let operated = || {
        events.iter().filter_map(|event| match event {
            Event::Operated(entry) => Some(entry),
            _ => None,
        })
    };
    for entry in operated().take(OPERATIONS_BY_NAME) {
        tracing::info!(
            who = entry.who.as_str(),
            what = words::audit_detail(&entry.act),
            "an operator acted"
        );
    }
    let others = operated().skip(OPERATIONS_BY_NAME).count();
    if others > 0 {
        tracing::info!(others, "operators acted; the audit names them all");
    }
}

/// A close that is done: told when it failed.
pub(super) fn tell_close(close: &CloseIntent) {
    if close.has_failed() && CLOSE_FAILED.is_told() {
        tracing::warn!(
            close = %close.id,
            session = close.session.as_str(),
            failed = close.count(TargetState::Failed),
            refused = close.count(TargetState::Refused),
            delivered = close.count(TargetState::Delivered),
            "a close ended with engines failed or refused"
        );
    }
}
