//! What session closes come to in this fleet (CLO10): notices, and one log line for each change.
//!
//! Fed with every reading round, it remembers the last verdict of each engine, so that an engine
//! that is silent for a while is no news, and nothing is told twice.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_api::Severity;
use kvgate_core::ids::EngineId;
use kvgate_core::units::Timestamp;

use crate::fleet::close_support::CloseSupport;
use crate::fleet::poller::RoundDetails;
use crate::fleet::rows::RouterKind;
use crate::http::ShellNotice;
use crate::words;

/// Engines that a notice names; the others are counted.
const NAMED_MAX: usize = 3;

/// The verdicts as they stand.
#[derive(Debug, Default)]
pub struct Support {
    engines: BTreeMap<EngineId, CloseSupport>,
    router: Option<RouterKind>,
    /// Since when each notice stands, by code.
    since: BTreeMap<&'static str, Timestamp>,
}

impl Support {
    /// Takes in a round. The notices as they now stand, or `None` when they are the same.
    pub fn take(&mut self, round: &RoundDetails, now: Timestamp) -> Option<Vec<ShellNotice>> {
        let before = self.engines.len();
        self.engines
            .retain(|engine, _| round.engines.contains_key(engine));
        let mut changed = self.engines.len() != before;
        for (engine, details) in &round.engines {
            let Some(support) = details.close_support else {
                continue;
            };
            if self.engines.insert(engine.clone(), support) != Some(support) {
                changed = true;
                tell(engine, support);
            }
        }
        let router = round
            .router_kind
            .filter(|kind| *kind != RouterKind::Unknown);
        if router.is_some() && router != self.router {
            changed = true;
            self.router = router;
            if let Some(kind) = self.router.filter(|kind| kind.drops_session_id()) {
                tracing::warn!("{}", words::drops_session_id(kind));
            }
        }
        changed.then(|| self.notices(now))
    }

    /// Engines that answer as routers.
    #[must_use]
    pub fn routers(&self) -> BTreeSet<EngineId> {
        let routers = self.engines.iter();
        routers
            .filter(|(_, support)| **support == CloseSupport::Router)
            .map(|(engine, _)| engine.clone())
            .collect()
    }

    fn notices(&mut self, now: Timestamp) -> Vec<ShellNotice> {
        let mut by_support: BTreeMap<CloseSupport, Vec<&EngineId>> = BTreeMap::new();
        for (engine, support) in &self.engines {
            by_support.entry(*support).or_default().push(engine);
        }
        let mut told: Vec<(&'static str, Severity, String)> = Vec::new();
        for (support, engines) in by_support {
            if let Some((code, severity)) = notice(support) {
                let text = format!("{}: {}.", named(&engines), words::close_support(support));
                told.push((code, severity, text));
            }
        }
        if let Some(kind) = self.router.filter(|kind| kind.drops_session_id()) {
            let text = format!("{}.", words::drops_session_id(kind));
            told.push(("router_drops_session_id", Severity::Warning, text));
        }
        self.since
            .retain(|code, _| told.iter().any(|(told, ..)| told == code));
        let mut notices = Vec::new();
        for (code, severity, text) in told {
            notices.push(ShellNotice {
                code: code.to_owned(),
                severity,
                text,
                since: *self.since.entry(code).or_insert(now),
            });
        }
        notices
    }
}

/// Code and severity of what an operator should know; `None` when closes do what they should.
const fn notice(support: CloseSupport) -> Option<(&'static str, Severity)> {
    match support {
        CloseSupport::Frees | CloseSupport::Unclear | CloseSupport::Decode => None,
        CloseSupport::Lowers => Some(("close_lowers_priority", Severity::Info)),
        CloseSupport::Odd => Some(("close_eviction_policy", Severity::Warning)),
        CloseSupport::Absent => Some(("close_absent", Severity::Warning)),
        CloseSupport::CacheOff => Some(("close_session_cache_off", Severity::Warning)),
        CloseSupport::RadixOff => Some(("close_radix_cache_off", Severity::Warning)),
        CloseSupport::Vllm => Some(("close_vllm", Severity::Warning)),
        CloseSupport::Grpc => Some(("close_grpc", Severity::Warning)),
        CloseSupport::Router => Some(("engine_is_router", Severity::Error)),
    }
}

fn tell(engine: &EngineId, support: CloseSupport) {
    let engine = engine.as_str();
    let meaning = words::close_support(support);
    match notice(support) {
        Some((_, Severity::Warning | Severity::Error)) => {
            tracing::warn!(engine, meaning, "session closes at an engine");
        }
        Some((_, Severity::Info)) | None => {
            tracing::info!(engine, meaning, "session closes at an engine");
        }
    }
}

fn named(engines: &[&EngineId]) -> String {
    let shown: Vec<&str> = engines
        .iter()
        .take(NAMED_MAX)
        .map(|engine| engine.as_str())
        .collect();
    let more = engines.len().saturating_sub(shown.len());
    let mut text = shown.join(", ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::scrape::EngineDetails;

    fn round(router: Option<RouterKind>, engines: &[(&str, Option<CloseSupport>)]) -> RoundDetails {
        let details = |support: &Option<CloseSupport>| EngineDetails {
            close_support: *support,
            ..EngineDetails::default()
        };
        RoundDetails {
            router_kind: router,
            engines: engines
                .iter()
                .map(|(engine, support)| (EngineId::new(engine), details(support)))
                .collect(),
            ..RoundDetails::default()
        }
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    /// CLO10: a notice for each kind of trouble, told when it changes and not with every round.
    #[test]
    fn clo10_notices_follow_the_verdicts() {
        use CloseSupport as S;
        let mut support = Support::default();
        let mixed = round(
            Some(RouterKind::SglangRouter),
            &[
                ("http://a:1", Some(S::CacheOff)),
                ("http://b:1", Some(S::Frees)),
                ("http://c:1", Some(S::Vllm)),
                ("http://d:1", None),
                ("http://e:1", Some(S::Router)),
            ],
        );
        let notices = support.take(&mixed, at(5)).unwrap();
        let codes: Vec<&str> = notices.iter().map(|notice| notice.code.as_str()).collect();
        assert_eq!(
            codes,
            [
                "close_session_cache_off",
                "close_vllm",
                "engine_is_router",
                "router_drops_session_id"
            ]
        );
        assert_eq!(
            notices[0].text,
            "http://a:1: a session close does nothing: start it with --enable-session-radix-cache \
             (before 0.5.17 also with --radix-eviction-policy priority)."
        );
        assert_eq!(
            support.routers(),
            BTreeSet::from([EngineId::new("http://e:1")])
        );
        assert_eq!(support.take(&mixed, at(6)), None);
        // A silent engine and a router that does not tell its kind keep what was known of them.
        let silent = round(
            Some(RouterKind::Unknown),
            &[
                ("http://a:1", None),
                ("http://b:1", None),
                ("http://c:1", None),
                ("http://d:1", None),
                ("http://e:1", None),
            ],
        );
        assert_eq!(support.take(&silent, at(7)), None);
        // One that left is forgotten; what stays keeps its time.
        let fewer = round(
            Some(RouterKind::Smg),
            &[
                ("http://a:1", Some(S::CacheOff)),
                ("http://b:1", Some(S::Lowers)),
            ],
        );
        let notices = support.take(&fewer, at(8)).unwrap();
        let told: Vec<(&str, u64)> = notices
            .iter()
            .map(|notice| (notice.code.as_str(), notice.since.millis()))
            .collect();
        assert_eq!(
            told,
            [("close_lowers_priority", 8), ("close_session_cache_off", 5)]
        );
        assert_eq!(notices[0].severity, Severity::Info);
        assert!(support.routers().is_empty());
    }

    /// CLO10: a notice names a few engines and counts the others.
    #[test]
    fn clo10_many_engines_are_one_notice() {
        let names: Vec<String> = (0..40)
            .map(|number| format!("http://e{number:02}:1"))
            .collect();
        let engines: Vec<(&str, Option<CloseSupport>)> = names
            .iter()
            .map(|name| (name.as_str(), Some(CloseSupport::Absent)))
            .collect();
        let notices = Support::default()
            .take(&round(None, &engines), at(1))
            .unwrap();
        assert_eq!(notices.len(), 1);
        let text = &notices[0].text;
        assert!(
            text.starts_with("http://e00:1, http://e01:1, http://e02:1 and 37 more: it has no"),
            "{text}"
        );
    }
}
