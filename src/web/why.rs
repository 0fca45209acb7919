//! Why work waits: what it needs, what is in its way, who holds it, and when the wait ends.

use std::collections::BTreeMap;

use askama::Template;
use kvgate_core::decision::WaitReason;
use kvgate_core::effect::{LeaseView, WaitStatus, WaiterView};
use kvgate_core::units::{Span, Timestamp};
use kvgate_core::view::View;

use super::format::{
    about, bare, counted, cut, duration, escaped, grouped, percent, percent_of, set, span,
};
use crate::http::App;

/// The leases that holders are looked for in: one slice, so that a look costs the writer little.
pub(super) const HOLDERS_AMONG: usize = 1_000;

/// Holders that are named.
const HOLDERS_SHOWN: usize = 3;

/// The time that the present rate is taken from.
const RATE_OVER: Span = Span::from_secs(120);

/// A rate over less says nothing.
const RATE_OVER_MIN: Span = Span::from_secs(10);

/// What a waiter waits for, in a few words.
pub(super) fn waits_for(status: &WaitStatus, view: &View) -> String {
    match status.reason {
        WaitReason::BehindOlder => "behind #1".to_owned(),
        WaitReason::CapacityExhausted => format!("{} short", grouped(status.short.get())),
        WaitReason::PressureGuard => match pressed(view) {
            Some((engine, usage, _)) => format!("{engine} at {usage}"),
            None => "paced after pressure".to_owned(),
        },
    }
}

/// The engine that is above the threshold, its usage, and the threshold.
fn pressed(view: &View) -> Option<(&str, String, String)> {
    let (worst, engine) = view.measure.pressure.as_ref()?;
    let threshold = view.policy.pressure_threshold;
    (*worst >= threshold).then(|| (bare(engine.as_str()), percent(*worst), percent(threshold)))
}

/// A session and what its leases hold together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Holder {
    pub(super) session: String,
    /// The same where there is little room.
    pub(super) cut: String,
    /// The session as the value of a query.
    pub(super) id: String,
    pub(super) tokens: String,
    /// Of all that is reserved.
    pub(super) share: String,
}

/// The sessions that hold most, among these leases.
pub(super) fn holders(leases: &[LeaseView], view: &View) -> Vec<Holder> {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for lease in leases {
        let sum = sums.entry(lease.session.as_str()).or_default();
        *sum = sum.saturating_add(lease.terms.reservation.get());
    }
    let mut most: Vec<(&str, u64)> = sums.into_iter().collect();
    most.sort_by_key(|(_, tokens)| std::cmp::Reverse(*tokens));
    let most = most.into_iter().take(HOLDERS_SHOWN);
    most.map(|(session, tokens)| Holder {
        session: session.to_owned(),
        cut: cut(session),
        id: escaped(session),
        tokens: grouped(tokens),
        share: percent_of(tokens, view.reserved.get()),
    })
    .collect()
}

/// Grants from the queue a second, at present; `None` when there is no rate to tell by.
pub(super) fn grant_rate(app: &App, view: &View, now: Timestamp) -> Option<f64> {
    let (over, counted) = app.history().counted(&view.tally, now, RATE_OVER)?;
    rate(counted.granted_after_wait, over)
}

fn rate(granted: u64, over: Span) -> Option<f64> {
    let known = over >= RATE_OVER_MIN && granted > 0;
    known.then(|| granted as f64 * 1_000.0 / over.millis() as f64)
}

/// How long until so many were granted at a rate.
pub(super) fn drain(count: u64, rate: Option<f64>) -> Option<Span> {
    rate.map(|rate| span(count as f64 / rate))
}

/// The whole answer for one waiter.
#[derive(Template, PartialEq, Eq, Debug)]
#[template(path = "parts/why.html")]
pub(super) struct Why {
    position: String,
    ahead: String,
    needs: String,
    available: String,
    /// What is in the way, as a sentence.
    blocked: String,
    holders: Vec<Holder>,
    /// How many leases the holders were looked for in, when those are not all.
    among: Option<String>,
    bypass: String,
    expected: String,
}

impl Why {
    /// `head` is the first in line, when it is known; `among` how many leases `holders` comes from.
    pub(super) fn of(
        waiter: &WaiterView,
        head: Option<&WaiterView>,
        view: &View,
        holders: Vec<Holder>,
        among: usize,
        rate: Option<f64>,
    ) -> Self {
        let status = &waiter.status;
        let full = among >= HOLDERS_AMONG;
        let among = u64::try_from(among).unwrap_or(u64::MAX);
        Self {
            position: format!("{} of {}", grouped(status.position), grouped(view.waiting)),
            ahead: format!(
                "{} in {}",
                counted(status.tokens_ahead.get(), "token"),
                counted(status.position.saturating_sub(1), "ticket")
            ),
            needs: grouped(waiter.terms.reservation.get()),
            available: grouped(view.available().get()),
            blocked: blocked(waiter, head, view),
            holders,
            among: (full && among < view.leases).then(|| grouped(among)),
            bypass: format!(
                "in {}, after {} in line",
                duration(status.bypass_in),
                set(view.policy.max_wait)
            ),
            expected: expected(status, rate),
        }
    }
}

/// What keeps a waiter from its grant.
pub(super) fn blocked(waiter: &WaiterView, head: Option<&WaiterView>, view: &View) -> String {
    let needs = grouped(waiter.terms.reservation.get());
    let short = grouped(waiter.status.short.get());
    let overdraft = view.reserved.saturating_sub(view.measure.ceiling).get();
    match waiter.status.reason {
        WaitReason::CapacityExhausted if overdraft > 0 => format!(
            "It needs {needs} tokens, and {} more are reserved than the ceiling allows: {short} must be given back \
             first.",
            grouped(overdraft)
        ),
        WaitReason::CapacityExhausted => format!(
            "It needs {needs} tokens and {} are available: {short} must be given back first.",
            grouped(view.available().get())
        ),
        WaitReason::PressureGuard => match pressed(view) {
            Some((engine, usage, threshold)) => {
                format!("{engine} uses {usage} of its KV, and new work waits from {threshold}.")
            }
            None => "Engines were under pressure a moment ago: admission is paced until ten readings in a row are \
                     below the threshold."
                .to_owned(),
        },
        WaitReason::BehindOlder => {
            match head.filter(|head| head.status.reason != WaitReason::BehindOlder) {
                Some(head) => format!(
                    "The first in line is not granted yet. {}",
                    blocked(head, None, view)
                ),
                None => "Older work stands before it: first in, first out.".to_owned(),
            }
        }
    }
}

/// When its turn comes, as far as the present rate tells.
fn expected(status: &WaitStatus, rate: Option<f64>) -> String {
    let over = about(RATE_OVER);
    let Some((rate, wait)) = rate.zip(drain(status.position, rate)) else {
        return format!("no grant from the queue in the last {over} to tell it by");
    };
    let pace = format!("at {rate:.1} grants a second in the last {over}");
    if wait > status.bypass_in {
        format!("it bypasses before its turn, {pace}")
    } else {
        format!("in ≈ {}, {pace}", duration(wait))
    }
}

#[cfg(test)]
mod tests {
    use kvgate_core::units::Tokens;

    use super::*;

    fn status(position: u64, bypass_in: u64) -> WaitStatus {
        WaitStatus {
            reason: WaitReason::BehindOlder,
            position,
            tokens_ahead: Tokens::ZERO,
            short: Tokens::ZERO,
            age: Span::ZERO,
            bypass_in: Span::from_secs(bypass_in),
        }
    }

    /// Without a rate nothing is promised; with one, never more than the time to the bypass.
    #[test]
    fn a_wait_is_told_by_the_present_rate() {
        assert_eq!(rate(0, RATE_OVER), None);
        assert_eq!(rate(5, Span::from_secs(9)), None);
        assert_eq!(rate(240, RATE_OVER), Some(2.0));
        assert_eq!(drain(34, Some(2.0)), Some(Span::from_secs(17)));
        assert!(expected(&status(34, 20), None).starts_with("no grant"));
        let soon = expected(&status(34, 20), Some(2.0));
        assert_eq!(
            soon,
            "in ≈ 17.0 s, at 2.0 grants a second in the last 2 min"
        );
        assert!(expected(&status(34, 16), Some(2.0)).starts_with("it bypasses before"));
    }
}
