//! `kvgate check`: asks router and engines once and says what is to be mended.
//!
//! Every finding has a stable name, and what can be mended says how. Left to others: how it is shown.

use std::collections::BTreeSet;

use kvgate_core::ids::EngineId;
use kvgate_core::reading::{EngineKind, ReadFailure, Reading, Round, RouterAnswer, RouterFailure};
use kvgate_core::units::Timestamp;
use serde::Serialize;

use crate::config::Config;
use crate::fleet::close_support::CloseSupport;
use crate::fleet::poller::{Poller, PollerError, RoundDetails};
use crate::fleet::rows::RouterKind;
use crate::words;

/// How a finding weighs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing to mend for what is turned on.
    Note,
    /// To be mended.
    Mend,
}

/// One thing that was found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// How it weighs.
    pub weight: Weight,
    /// Stable name of what was found.
    pub code: &'static str,
    /// The router or the engine that it is about.
    pub subject: String,
    /// What was found.
    pub text: String,
    /// What to do, where something can be done.
    pub advice: Option<String>,
}

/// Asks router and engines once.
///
/// # Errors
/// When no HTTP client can be made.
pub async fn run(config: &Config) -> Result<Vec<Finding>, PollerError> {
    let mut poller = Poller::new(config.poller.clone())?;
    let (round, details) = poller.round(Timestamp::default()).await;
    Ok(findings(config, &round, &details))
}

fn findings(config: &Config, round: &Round, details: &RoundDetails) -> Vec<Finding> {
    let mut book = Book {
        findings: Vec::new(),
        lifecycle: config.policy.session_lifecycle,
        router_key: config.poller.router_key.is_some(),
        engine_key: config.poller.engine_key.is_some(),
    };
    if round.router.is_none() && round.readings.is_empty() {
        book.mend(
            "no_fleet",
            "fleet",
            "neither a router nor an engine is configured",
            "name a router by --router, or engines by --engine",
        );
    }
    router_findings(&mut book, round, details);
    spelling_findings(&mut book, &config.poller.engines, details);
    for (engine, reading) in &round.readings {
        let subject = engine.as_str();
        match reading {
            Ok(reading) => engine_findings(&mut book, subject, reading),
            Err(failure) => book.unread(subject, *failure),
        }
        let details = details.engines.get(engine);
        let support = details.and_then(|details| details.close_support);
        let key_refused = details.and_then(|details| match details.loads_failure {
            Some(ReadFailure::KeyRefused(status)) if reading.is_ok() => Some(status),
            _ => None,
        });
        if let Some(status) = key_refused {
            let text = format!(
                "asks for a key ({status}) on everything but /metrics: session closes would be refused"
            );
            let advice = book.engine_key_advice();
            book.weigh("engine_key_refused", subject, text, advice);
        }
        let metrics_failure = details.and_then(|details| details.metrics_failure);
        if let Some(failure) = metrics_failure.filter(|_| reading.is_ok()) {
            metrics_findings(&mut book, subject, failure);
        }
        let is_told = reading.is_ok() && key_refused.is_none();
        session_findings(&mut book, subject, support, is_told);
    }
    book.findings
}

fn router_findings(book: &mut Book, round: &Round, details: &RoundDetails) {
    let kind = details.router_kind.map_or("router", |kind| match kind {
        RouterKind::Unknown => "router",
        kind => kind.name(),
    });
    match &round.router {
        None => {}
        Some(RouterAnswer::Failed(failure)) => {
            let (code, advice) = router_advice(*failure, book.router_key);
            book.mend(code, "router", words::router_failure(*failure), advice);
        }
        Some(RouterAnswer::Workers(workers)) if workers.is_empty() => book.mend(
            "router_lists_nothing",
            "router",
            format!("{kind} lists no worker"),
            "register the engines at the router, or name them by --engine",
        ),
        Some(RouterAnswer::Workers(workers)) => {
            let count = workers.len();
            let engines = if count == 1 { "engine" } else { "engines" };
            book.ok(
                "router_lists",
                "router",
                format!("{kind} lists {count} {engines}"),
            );
            for worker in workers.iter().filter(|worker| !worker.healthy) {
                book.mend(
                    "engine_unhealthy",
                    worker.engine.as_str(),
                    "the router calls it unhealthy: it does not count for the ceiling",
                    "see why the router's health check of it fails, or take it off the router's list",
                );
            }
        }
    }
    for bad in &details.bad_entries.shown {
        book.mend(
            "router_bad_entry",
            "router",
            format!("an entry of its list was skipped, {:?}: {}", bad.raw, bad.reason),
            "correct or remove it at the router; an engine's address is http://HOST:PORT, IPv6 in brackets",
        );
    }
    let beyond = details.bad_entries.total.saturating_sub(
        details
            .bad_entries
            .shown
            .len()
            .try_into()
            .unwrap_or(u64::MAX),
    );
    if beyond > 0 {
        book.mend(
            "router_bad_entry",
            "router",
            format!("{beyond} more entries of its list were skipped"),
            "correct those that are shown first",
        );
    }
    if let Some(kind) = details.router_kind.filter(|kind| kind.drops_session_id()) {
        book.weigh(
            "router_drops_session_id",
            "router",
            words::drops_session_id(kind),
            "use smg, or send requests to the engines directly",
        );
    }
}

/// One engine under several names is counted once, but whoever reads the lists may count otherwise.
fn spelling_findings(book: &mut Book, configured: &[EngineId], details: &RoundDetails) {
    for (engine, spellings) in &details.spellings {
        let listed: Vec<String> = spellings.iter().map(|text| format!("{text:?}")).collect();
        book.note(
            "engine_spelled_differently",
            engine.as_str(),
            format!(
                "the router lists it as {}; it is counted once",
                listed.join(", ")
            ),
            "register it once at the router",
        );
    }
    let mut seen = BTreeSet::new();
    let mut twice: BTreeSet<&EngineId> = BTreeSet::new();
    twice.extend(configured.iter().filter(|engine| !seen.insert(*engine)));
    for engine in twice {
        book.note(
            "engine_named_twice",
            engine.as_str(),
            "--engine names it more than once; it is counted once",
            "name it once",
        );
    }
}

fn engine_findings(book: &mut Book, subject: &str, reading: &Reading) {
    let kind = match reading.kind {
        EngineKind::Sglang => "SGLang",
        EngineKind::Vllm => "vLLM",
    };
    let usage = reading.usage.map_or_else(
        || "no usage yet".to_owned(),
        |usage| format!("usage {:.2}", f64::from(usage.get()) / 1e6),
    );
    let capacity = reading.capacity.get();
    let ranks = match reading.ranks {
        1 => "1 rank".to_owned(),
        ranks => format!("{ranks} ranks"),
    };
    book.ok(
        "engine_read",
        subject,
        format!("{kind}, capacity {capacity} tokens in {ranks}, {usage}"),
    );
    if reading.unknown_label {
        book.note(
            "engine_unknown_label",
            subject,
            "its gauges differ by an unknown label; the smaller capacity and the larger usage are taken",
            "tell the makers of kvgate which label its /metrics has",
        );
    }
}

/// Capacity is read from `/v1/loads`, but only `/metrics` tells the rest.
fn metrics_findings(book: &mut Book, subject: &str, failure: ReadFailure) {
    let what = match failure {
        ReadFailure::Status(404) => words::read_failure(ReadFailure::MetricsOff),
        failure => words::read_failure(failure),
    };
    book.note(
        "engine_metrics_missing",
        subject,
        format!("{what}: evictable KV and restarts of old versions are not seen"),
        "start it with --enable-metrics",
    );
}

/// What a session close comes to there. While closes are off, only what would spoil them is said.
fn session_findings(book: &mut Book, subject: &str, support: Option<CloseSupport>, is_told: bool) {
    let code = "engine_session_close";
    let Some(support) = support else {
        if book.lifecycle && is_told {
            book.note(
                code,
                subject,
                "/server_info gives nothing: what a session close comes to there is not known",
                "see that nothing between stands in the way of /server_info, and check again",
            );
        }
        return;
    };
    // The words say what it comes to and, behind a colon, what to do about it.
    let words = words::close_support(support);
    let (text, advice) = match words.split_once(": ") {
        Some((text, advice)) => (text, Some(advice)),
        None => (words, None),
    };
    match support {
        CloseSupport::Frees | CloseSupport::Unclear if book.lifecycle => {
            book.ok(code, subject, text);
        }
        CloseSupport::Lowers | CloseSupport::Decode if book.lifecycle => {
            book.add(Weight::Note, code, subject, text.to_owned(), advice);
        }
        CloseSupport::Frees
        | CloseSupport::Unclear
        | CloseSupport::Lowers
        | CloseSupport::Decode => {}
        // Part of a mixed fleet by choice; nothing about it can be mended.
        CloseSupport::Vllm | CloseSupport::Grpc => {
            book.add(Weight::Note, code, subject, text.to_owned(), advice);
        }
        CloseSupport::Odd | CloseSupport::Absent => {
            book.weigh(
                "engine_session_close_absent",
                subject,
                text,
                advice.unwrap_or_default(),
            );
        }
        CloseSupport::CacheOff | CloseSupport::RadixOff => {
            book.weigh(
                "engine_session_cache_off",
                subject,
                text,
                advice.unwrap_or_default(),
            );
        }
        CloseSupport::Router => {
            book.weigh(
                "engine_is_router",
                subject,
                text,
                advice.unwrap_or_default(),
            );
        }
    }
}

const fn router_advice(failure: RouterFailure, has_key: bool) -> (&'static str, &'static str) {
    match failure {
        RouterFailure::KeyRefused(_) if has_key => (
            "router_key_refused",
            "the key of --router-key-file is not its key: put the right one into the file",
        ),
        RouterFailure::KeyRefused(_) => ("router_key_refused", "give its key by --router-key-file"),
        RouterFailure::Status(300..=399) => (
            "router_redirects",
            "redirects are not followed: name by --router the address that it leads to",
        ),
        RouterFailure::Timeout | RouterFailure::Refused => (
            "router_unreachable",
            "start it, or correct the address of --router",
        ),
        RouterFailure::Status(_) | RouterFailure::Unreadable => (
            "router_unreadable",
            "check that --router names a router and not something else, and see its log",
        ),
    }
}

#[derive(Debug)]
struct Book {
    findings: Vec<Finding>,
    /// Session closes are on.
    lifecycle: bool,
    /// A key of the router is configured.
    router_key: bool,
    /// A key of the engines is configured.
    engine_key: bool,
}

impl Book {
    fn add(
        &mut self,
        weight: Weight,
        code: &'static str,
        subject: &str,
        text: impl Into<String>,
        advice: Option<&str>,
    ) {
        self.findings.push(Finding {
            weight,
            code,
            subject: subject.to_owned(),
            text: text.into(),
            advice: advice.map(str::to_owned),
        });
    }

    fn ok(&mut self, code: &'static str, subject: &str, text: impl Into<String>) {
        self.add(Weight::Ok, code, subject, text, None);
    }

    fn note(&mut self, code: &'static str, subject: &str, text: impl Into<String>, advice: &str) {
        self.add(Weight::Note, code, subject, text, Some(advice));
    }

    fn mend(&mut self, code: &'static str, subject: &str, text: impl Into<String>, advice: &str) {
        self.add(Weight::Mend, code, subject, text, Some(advice));
    }

    /// To be mended only while session closes are on.
    fn weigh(&mut self, code: &'static str, subject: &str, text: impl Into<String>, advice: &str) {
        let weight = match self.lifecycle {
            true => Weight::Mend,
            false => Weight::Note,
        };
        self.add(weight, code, subject, text, Some(advice));
    }

    /// An engine that gave no capacity.
    fn unread(&mut self, subject: &str, failure: ReadFailure) {
        let (code, advice) = match failure {
            ReadFailure::KeyRefused(_) => ("engine_key_refused", self.engine_key_advice()),
            ReadFailure::MetricsOff => (
                "engine_metrics_off",
                "start it with --enable-metrics, or use a version with /v1/loads",
            ),
            ReadFailure::Missing => (
                "engine_no_capacity",
                "see its /metrics and /v1/loads: an engine that is up tells max_total_num_tokens there",
            ),
            ReadFailure::NotAllowed => (
                "engine_outside_networks",
                "name its network by --engine-network, or take it off the list",
            ),
            ReadFailure::Status(300..=399) => (
                "engine_redirects",
                "redirects are not followed: name the engine by the address that it leads to",
            ),
            ReadFailure::Timeout | ReadFailure::Refused => (
                "engine_unreachable",
                "see that it is up and can be reached from this machine",
            ),
            ReadFailure::Status(_) | ReadFailure::Unreadable => (
                "engine_unreadable",
                "see that this is the address of an engine, and its log",
            ),
        };
        let text = format!("no capacity reading: {}", words::read_failure(failure));
        self.mend(code, subject, text, advice);
    }

    const fn engine_key_advice(&self) -> &'static str {
        match self.engine_key {
            true => "the key of --engine-key-file is not its key: put the right one into the file",
            false => "give its key by --engine-key-file",
        }
    }
}
