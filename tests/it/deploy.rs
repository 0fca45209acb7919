//! Dashboard, rules, alerts and the page for operators name only what there is: metrics, labels and their
//! values, paragraphs. What Prometheus makes of them is held by `tests/prometheus`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, its helpers too"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use kvgate::http::{EngineDetails, FleetDetails};
use kvgate::telemetry::{ReadingResult, Readings};
use kvgate_core::ids::EngineId;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::units::{Ppm, Tokens};
use serde_json::Value;

use crate::support::app::TestApp;
use crate::support::scrape::{Family, Scrape, parse_series};

const ENGINE: &str = "http://engine-1:30000";

/// What Prometheus adds to every series, and a bucket has.
const ADDED: [&str; 3] = ["job", "instance", "le"];

fn file(path: &str) -> String {
    std::fs::read_to_string(format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Every family with every label that it can have.
async fn everything() -> Scrape {
    let app = TestApp::start().await;
    let mut readings = Readings::default();
    readings.count(ReadingResult::Ok);
    let details = EngineDetails {
        readings,
        ..EngineDetails::default()
    };
    app.fleet.send_replace(Arc::new(FleetDetails {
        engines: BTreeMap::from([(ENGINE.to_owned(), details)]),
        ..FleetDetails::default()
    }));
    let reading = Reading {
        usage: Ppm::new(500_000),
        used: Tokens::new(500),
        evictable: Tokens::new(100),
        ..Reading::idle(Tokens::new(1_000).unwrap())
    };
    let round = Round {
        began_at: app.gate.line().unwrap().now(),
        router: None,
        readings: vec![(EngineId::new(ENGINE), Ok(reading))],
        start_marks: Vec::new(),
    };
    app.gate.round(round).await.unwrap();
    app.acquire("t", 100).await;
    Scrape::read(&app.get("/metrics").await.text)
}

/// Every query of a file: of panels and variables in JSON, of `expr` and `record` in YAML.
fn queries(path: &str) -> Vec<String> {
    let text = file(path);
    if path.ends_with(".json") {
        let mut found = Vec::new();
        collect(&serde_json::from_str(&text).unwrap(), &mut found);
        return found;
    }
    let mut found: Vec<String> = Vec::new();
    let mut inside = false;
    for line in text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
    {
        let trimmed = line.trim_start();
        if let Some(query) = trimmed.strip_prefix("expr: ") {
            found.push(query.trim_start_matches(">-").to_owned());
            inside = true;
        } else if inside && !trimmed.contains(": ") && !trimmed.ends_with(':') {
            let last = found.last_mut().unwrap();
            last.push(' ');
            last.push_str(trimmed);
        } else {
            inside = false;
        }
    }
    found
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match (name.as_str(), field) {
                    ("expr" | "definition", Value::String(query)) => found.push(query.clone()),
                    _ => collect(field, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        _ => {}
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// The metrics that a query names, each with what stands in its braces.
fn selectors(query: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut rest = query;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        let name: String = rest.chars().take_while(|c| is_name(*c)).collect();
        if name.is_empty() || is_name(before) {
            before = c;
            rest = &rest[c.len_utf8()..];
            continue;
        }
        rest = &rest[name.len()..];
        before = 'a';
        if name.starts_with("kvgate_") || name.starts_with("kvgate:") {
            let braces = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
            let inside = braces.map_or("", |(inside, _)| inside);
            found.push((name, inside.to_owned()));
        }
    }
    found
}

/// The labels of `by (...)` and `on (...)`.
fn grouped(query: &str) -> Vec<String> {
    let mut labels = Vec::new();
    for word in ["by (", "on ("] {
        for (at, _) in query.match_indices(word) {
            let inside = query[at + word.len()..].split_once(')').unwrap().0;
            labels.extend(inside.split(',').map(|label| label.trim().to_owned()));
        }
    }
    labels
}

/// Label, and the values that it is compared with where they are plain words.
fn matchers(inside: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = inside;
    while let Some((label, after)) = rest.split_once('"') {
        let (value, tail) = after.split_once('"').unwrap();
        let operator_at = label.find(['=', '!']).unwrap();
        let name = label[..operator_at].trim_matches([',', ' ']).to_owned();
        let is_word = |word: &&str| word.chars().all(|c| is_name(c) || c == '/');
        let words = value.split('|').filter(is_word).map(str::to_owned);
        found.push((name, words.collect()));
        rest = tail;
    }
    found
}

/// Whether a series of this metric has this value of the label.
fn has_value(scrape: &Scrape, name: &str, label: &str, value: &str) -> bool {
    scrape.samples.keys().any(|series| {
        let (of, labels) = parse_series(series);
        of == name && labels.get(label).is_some_and(|found| found == value)
    })
}

/// No panel, rule or alert names a metric, a label or a value that kvgate does not show.
#[tokio::test]
async fn panels_and_rules_name_what_there_is() {
    let scrape = everything().await;
    let records: BTreeSet<String> = file("deploy/prometheus/rules.yml")
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("- record: "))
        .map(str::to_owned)
        .collect();
    let known: BTreeSet<&str> = scrape
        .families
        .values()
        .flat_map(|family| family.labels.iter().map(String::as_str))
        .chain(ADDED)
        .collect();
    let mut faults = String::new();
    let mut used = BTreeSet::new();
    let mut count = 0;
    for path in [
        "deploy/grafana/kvgate.json",
        "deploy/prometheus/rules.yml",
        "deploy/prometheus/alerts.yml",
    ] {
        for query in queries(path) {
            count += 1;
            for label in grouped(&query) {
                if !known.contains(label.as_str()) {
                    writeln!(faults, "{path}: no label {label}: {query}").unwrap();
                }
            }
            for (name, inside) in selectors(&query) {
                if records.contains(&name) {
                    continue;
                }
                let Some(family) = scrape.names.get(&name) else {
                    writeln!(faults, "{path}: no metric {name}: {query}").unwrap();
                    continue;
                };
                used.insert(family.clone());
                let labels = &scrape.families[family].labels;
                for (label, values) in matchers(&inside) {
                    if ADDED.contains(&label.as_str()) {
                        continue;
                    }
                    if !labels.contains(&label) {
                        writeln!(faults, "{path}: {name} has no label {label}").unwrap();
                    }
                    for value in values {
                        if !has_value(&scrape, &name, &label, &value) {
                            writeln!(faults, "{path}: {name} has no {label}={value:?}").unwrap();
                        }
                    }
                }
            }
        }
    }
    assert!(count > 80, "only {count} queries were found");
    let unseen: Vec<&String> = scrape
        .families
        .keys()
        .filter(|family| !used.contains(*family))
        .collect();
    assert!(
        faults.is_empty() && unseen.is_empty(),
        "{faults}not on the dashboard: {unseen:?}"
    );
}

/// Every alert says what it is about and leads to its paragraph, and no paragraph is about none.
#[test]
fn every_alert_has_its_paragraph() {
    let page = file("docs/OPERATIONS.md");
    let paragraphs: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("### Kvgate"))
        .map(|name| format!("Kvgate{name}"))
        .collect();
    let rules = file("deploy/prometheus/alerts.yml");
    let mut alerts = BTreeSet::new();
    for alert in rules.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap().to_owned();
        for field in ["expr:", "severity:", "summary:", "description:"] {
            assert!(alert.contains(field), "{name} has no {field}");
        }
        let runbook = format!("runbook: docs/OPERATIONS.md#{}", name.to_lowercase());
        assert!(
            alert.lines().any(|line| line.trim() == runbook),
            "{name} leads nowhere: {runbook}"
        );
        assert!(alerts.insert(name.clone()), "{name} stands twice");
    }
    assert_eq!(alerts, paragraphs);
}

/// The table of the page is what the service shows.
#[tokio::test]
async fn the_page_lists_every_metric() {
    let scrape = everything().await;
    let row = |(name, family): (&String, &Family)| {
        let suffix = match family.kind.as_str() {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let labels: Vec<String> = family
            .labels
            .iter()
            .map(|label| format!("`{label}`"))
            .collect();
        format!(
            "| `{name}{suffix}` | {} | {} | {} |",
            family.kind,
            labels.join(", "),
            family.help.trim_end_matches('.')
        )
    };
    let expected: Vec<String> = scrape.families.iter().map(row).collect();
    let page = file("docs/OPERATIONS.md");
    let found: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| `kvgate_"))
        .collect();
    assert!(
        found == expected,
        "the table of docs/OPERATIONS.md should be:\n{}\n",
        expected.join("\n")
    );
}

/// Words in quotes on a line, as they stand in code: `"low_space"`.
fn quoted_words(line: &str) -> impl Iterator<Item = &str> {
    line.split('"').skip(1).step_by(2).filter(|word| {
        word.contains('_') && word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    })
}

/// Codes of notices in the sources: what stands in a field `code`, or beside a severity.
fn notice_codes(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            notice_codes(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
            for line in code.lines() {
                if line.contains("code: ") || line.contains("Severity::") {
                    found.extend(quoted_words(line).map(str::to_owned));
                }
            }
        }
    }
}

/// Every notice has its row, which says what to do.
#[test]
fn every_notice_has_its_row() {
    let mut codes = BTreeSet::new();
    notice_codes(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut codes,
    );
    assert!(codes.len() > 13, "{codes:?}");
    let page = file("docs/OPERATIONS.md");
    let table = page.split("\n## Notices\n").nth(1).unwrap();
    let rows: BTreeSet<&str> = table
        .lines()
        .take_while(|line| !line.starts_with("## "))
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect();
    let missing: Vec<_> = codes
        .iter()
        .filter(|code| !rows.contains(code.as_str()))
        .collect();
    assert!(missing.is_empty(), "docs/OPERATIONS.md lacks {missing:?}");
}
