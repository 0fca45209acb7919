//! `kvgate check`: asks router and engines once and says what is to be mended.

use std::io::Write;

use kvgate_core::reading::{EngineKind, ReadFailure, Reading, Round, RouterAnswer};
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

/// One line of the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// How it weighs.
    pub weight: Weight,
    /// The router or the engine that it is about.
    pub subject: String,
    /// What was found, and what to do.
    pub text: String,
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

/// Writes the findings as a table or as JSON.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(findings: &[Finding], json: bool, out: &mut impl Write) -> std::io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, findings)?;
        return writeln!(out);
    }
    for finding in findings {
        let word = match finding.weight {
            Weight::Ok => "ok",
            Weight::Note => "note",
            Weight::Mend => "MEND",
        };
        // Addresses come from the router: shown as Rust would quote them, so that none can
        // move the cursor.
        let subject = finding.subject.escape_debug();
        writeln!(out, "{word:<5} {subject}: {}", finding.text)?;
    }
    Ok(())
}

fn findings(config: &Config, round: &Round, details: &RoundDetails) -> Vec<Finding> {
    let lifecycle = config.policy.session_lifecycle;
    let mut book = Book::default();
    router_findings(&mut book, lifecycle, round, details);
    if round.router.is_none() && round.readings.is_empty() {
        book.mend(
            "fleet",
            "neither a router nor an engine is configured: say --router or --engine",
        );
    }
    for (engine, reading) in &round.readings {
        let subject = engine.as_str();
        match reading {
            Ok(reading) => engine_findings(&mut book, subject, reading),
            Err(failure) => book.mend(subject, failure_advice(*failure)),
        }
        let details = details.engines.get(engine);
        let support = details.and_then(|details| details.close_support);
        session_findings(&mut book, subject, lifecycle, support, reading.is_ok());
        if let Some(failure) = details.and_then(|details| details.metrics_failure) {
            book.note(
                subject,
                format!(
                    "/metrics gives nothing ({}): evictable KV and restarts of old versions are not seen; start it with --enable-metrics",
                    words::read_failure(failure)
                ),
            );
        }
    }
    book.findings
}

fn router_findings(book: &mut Book, lifecycle: bool, round: &Round, details: &RoundDetails) {
    let kind = details.router_kind.map_or("router", RouterKind::name);
    match &round.router {
        None => {}
        Some(RouterAnswer::Failed(failure)) => book.mend(
            "router",
            format!(
                "{}: check its address, and --router-key-file if it has a key",
                words::router_failure(*failure)
            ),
        ),
        Some(RouterAnswer::Workers(workers)) if workers.is_empty() => {
            book.mend("router", format!("{kind} lists no worker"));
        }
        Some(RouterAnswer::Workers(workers)) => {
            book.ok("router", format!("{kind} lists {} engines", workers.len()));
            for worker in workers.iter().filter(|worker| !worker.healthy) {
                book.mend(
                    worker.engine.as_str(),
                    "the router calls it unhealthy: it does not count for the ceiling",
                );
            }
        }
    }
    for bad in &details.bad_entries.shown {
        book.mend(
            "router",
            format!("an entry was skipped, {:?}: {}", bad.raw, bad.reason),
        );
    }
    if let Some(kind) = details.router_kind.filter(|kind| kind.drops_session_id()) {
        book.weigh(lifecycle, "router", words::drops_session_id(kind));
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
    book.ok(
        subject,
        format!(
            "{kind}, capacity {capacity} tokens in {} ranks, {usage}",
            reading.ranks
        ),
    );
    if reading.unknown_label {
        book.note(
            subject,
            "its rows differ by an unknown label; the smaller capacity and the larger usage are taken",
        );
    }
}

/// What a session close comes to there. While closes are off, only what would spoil them is said.
fn session_findings(
    book: &mut Book,
    subject: &str,
    lifecycle: bool,
    support: Option<CloseSupport>,
    is_read: bool,
) {
    let Some(support) = support else {
        if lifecycle && is_read {
            let text =
                "/server_info gives nothing: what a session close comes to there is not known";
            book.note(subject, text);
        }
        return;
    };
    let text = words::close_support(support);
    match support {
        CloseSupport::Frees | CloseSupport::Unclear if lifecycle => book.ok(subject, text),
        CloseSupport::Lowers | CloseSupport::Decode if lifecycle => book.note(subject, text),
        CloseSupport::Frees
        | CloseSupport::Unclear
        | CloseSupport::Lowers
        | CloseSupport::Decode => {}
        // Part of a mixed fleet by choice; nothing about it can be mended.
        CloseSupport::Vllm | CloseSupport::Grpc => book.note(subject, text),
        CloseSupport::Odd
        | CloseSupport::Absent
        | CloseSupport::CacheOff
        | CloseSupport::RadixOff
        | CloseSupport::Router => book.weigh(lifecycle, subject, text),
    }
}

fn failure_advice(failure: ReadFailure) -> String {
    let what = words::read_failure(failure);
    let advice = match failure {
        ReadFailure::KeyRefused(_) => "give its key by --engine-key-file",
        ReadFailure::MetricsOff | ReadFailure::Missing => {
            "start it with --enable-metrics, or use a version with /v1/loads"
        }
        ReadFailure::NotAllowed => "name its network by --engine-network",
        ReadFailure::Timeout
        | ReadFailure::Refused
        | ReadFailure::Status(_)
        | ReadFailure::Unreadable => "check that it is an engine and that it is up",
    };
    format!("no capacity reading, {what}: {advice}")
}

#[derive(Default)]
struct Book {
    findings: Vec<Finding>,
}

impl Book {
    fn add(&mut self, weight: Weight, subject: &str, text: impl Into<String>) {
        self.findings.push(Finding {
            weight,
            subject: subject.to_owned(),
            text: text.into(),
        });
    }

    fn ok(&mut self, subject: &str, text: impl Into<String>) {
        self.add(Weight::Ok, subject, text);
    }

    fn note(&mut self, subject: &str, text: impl Into<String>) {
        self.add(Weight::Note, subject, text);
    }

    fn mend(&mut self, subject: &str, text: impl Into<String>) {
        self.add(Weight::Mend, subject, text);
    }

    /// To be mended only when the feature that it spoils is on.
    fn weigh(&mut self, feature_on: bool, subject: &str, text: impl Into<String>) {
        let weight = if feature_on {
            Weight::Mend
        } else {
            Weight::Note
        };
        self.add(weight, subject, text);
    }
}
