//! The step reports: the last ones as a table with one column a key, lines over the steps, the window
//! that is still open, and all of them as files.

use std::collections::BTreeSet;
use std::convert::Infallible;

use askama::Template;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use kvgate_api::StepReport;
use kvgate_core::command::SLICE_MAX;

use super::format::{duration, grouped, moment};
use super::frame;
use super::line;
use super::link::link;
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use crate::http::{App, Fault, Query, read};

/// Reports of one page.
const ROWS: usize = 50;
/// Reports that are looked at for a page without a filter, for its runs and its lines.
const RECENT: usize = 200;
/// Steps of a line.
const POINTS: usize = 60;
/// Size of a line.
const PLOT: (f64, f64) = (240.0, 56.0);
/// What all keys begin with.
const PREFIX: &str = "agentic_kv/";
/// Reports of one piece of a file.
const PIECE: usize = 100;

/// Keys that are shown unless others are chosen.
const MAIN: &[&str] = &[
    "session/close",
    "session/close_failure",
    "admission/admit",
    "admission/wait",
    "admission/bypass",
    "admission/defer_rate",
    "admission/wait_seconds_mean",
    "budget/reserved_utilization",
    "budget/kv_token_usage_mean",
    "budget/kv_token_usage_max",
    "budget/lease_expired",
    "budget/epoch",
];

/// Keys that are drawn.
const DRAWN: &[&str] = &[
    "admission/admit",
    "admission/bypass",
    "admission/defer_rate",
    "admission/wait_seconds_mean",
    "budget/reserved_utilization",
    "budget/kv_token_usage_mean",
    "budget/kv_token_usage_max",
    "session/close",
];

/// Of the drawn keys those that count: a report without them counted none (REP1).
const COUNTS: &[&str] = &["admission/admit", "admission/bypass", "session/close"];

const GROUPS: [(&str, &str); 5] = [
    ("Main", ""),
    ("Admission", "admission"),
    ("Budget", "budget"),
    ("Session", "session"),
    ("All", "all"),
];

#[derive(Template)]
#[template(path = "steps.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "parts/steps-plots.html")]
struct PlotsPart {
    run: Option<String>,
    range: String,
    plots: Vec<Plot>,
}

struct Plot {
    key: &'static str,
    last: String,
    least: String,
    most: String,
    told: String,
    path: String,
    width: String,
    points: Vec<Point>,
}

struct Point {
    x: String,
    told: String,
}

#[derive(Template)]
#[template(path = "parts/steps-table.html")]
struct TablePart<'a> {
    total: Option<String>,
    runs: Vec<String>,
    chosen_run: &'a str,
    columns: String,
    csv: String,
    json: String,
    groups: Vec<(&'static str, String, bool)>,
    keys: Vec<(String, bool)>,
    spans: Vec<(String, usize)>,
    shown_keys: Vec<Key>,
    rows: Vec<Row>,
    newest: Option<String>,
    next: Option<String>,
}

struct Key {
    full: String,
    /// Its name in the group, where it may be broken.
    pieces: Vec<String>,
}

struct Row {
    id: String,
    run: String,
    step: String,
    to: String,
    when: String,
    took: String,
    open: bool,
    figures: Vec<String>,
}

/// What the address asks for.
struct Asked {
    run: Option<String>,
    before: Option<u64>,
    /// A group, or keys with commas between them.
    columns: String,
}

/// `GET /steps`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(mut look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::take(&mut look)?;
    let from = match asked.before {
        Some(before) => before.saturating_sub(1),
        None => u64::MAX,
    };
    // While the store is away there is nothing to show but the page.
    let (found, more) = match &asked.run {
        None => read::step_slice(&look.app, from, RECENT).await,
        Some(run) => of_run(&look.app, run, from).await,
    }
    .unwrap_or_default();
    let newest_run = found.first().map(|(_, report)| report.run.clone());
    let run = asked.run.clone().or(newest_run).unwrap_or_default();
    let open = match asked.before {
        None => read::current_step(&look.app, &run).await.ok(),
        Some(_) => None,
    };
    let mut parts = Parts::default();
    parts.add("p-plots", &plots(&found, &run))?;
    parts.add("p-steps", &table(&asked, &found, open.as_ref(), more))?;
    Ok(Screen {
        tab: Some(Tab::Steps),
        title: "Reports".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

/// The last reports of a run, and whether there are more.
async fn of_run(app: &App, run: &str, from: u64) -> Result<(Vec<(u64, StepReport)>, bool), Fault> {
    let mut found = Vec::new();
    let mut from = Some(from);
    while let Some(first) = from.take() {
        let (slice, more) = read::step_slice(app, first, SLICE_MAX).await?;
        let last = slice.last().map(|(number, _)| *number);
        found.extend(slice.into_iter().filter(|(_, report)| report.run == run));
        if found.len() > RECENT {
            found.truncate(RECENT);
            return Ok((found, true));
        }
        if more {
            from = last.and_then(|last| last.checked_sub(1));
            tokio::task::yield_now().await;
        }
    }
    Ok((found, false))
}

impl Asked {
    fn take(look: &mut Look) -> Result<Self, Fault> {
        let mut query = std::mem::take(&mut look.query);
        let before = query.take("before").map(|text| text.parse::<u64>());
        let before = before
            .transpose()
            .map_err(|_| Fault::field("?before", "must be the number of a report"))?;
        let chosen = query.take_named("c.");
        let columns = query.take("columns").unwrap_or_default();
        let run = query.take("run").filter(|run| !run.is_empty());
        query.done()?;
        Ok(Self {
            run,
            before,
            columns: if chosen.is_empty() {
                columns
            } else {
                chosen.join(",")
            },
        })
    }

    fn takes(&self, key: &str) -> bool {
        match self.columns.as_str() {
            "" => MAIN.contains(&key),
            "all" => true,
            columns => columns
                .split(',')
                .any(|column| column == key || key.split('/').next() == Some(column)),
        }
    }

    fn page(&self, columns: &str, before: &str) -> String {
        let run = self.run.as_deref().unwrap_or_default();
        link(
            "steps",
            &[("run", run), ("columns", columns), ("before", before)],
        )
    }
}

// ---- the table ---------------------------------------------------------------------------------

fn table<'a>(
    asked: &'a Asked,
    found: &[(u64, StepReport)],
    open: Option<&StepReport>,
    more: bool,
) -> TablePart<'a> {
    let page = || found.iter().take(ROWS);
    let all = page().map(|(_, report)| report).chain(open);
    let known: BTreeSet<&str> = all
        .flat_map(|report| report.metrics.keys())
        .map(|key| bare(key))
        .collect();
    let keys: Vec<&str> = known
        .iter()
        .copied()
        .filter(|key| asked.takes(key))
        .collect();
    let rows = open
        .map(|report| row("st-open".to_owned(), report, &keys))
        .into_iter()
        .chain(page().map(|(number, report)| row(format!("st-{number}"), report, &keys)))
        .collect();
    let runs: BTreeSet<&str> = found
        .iter()
        .map(|(_, report)| report.run.as_str())
        .chain(asked.run.as_deref())
        .filter(|run| !run.is_empty())
        .collect();
    let run = asked.run.as_deref().unwrap_or_default();
    let beyond = more || found.len() > ROWS;
    let last = page().next_back().filter(|_| beyond);
    TablePart {
        // The oldest ones are forgotten first, so that the numbers tell how many there are.
        total: match (found.first(), &asked.run, asked.before) {
            (Some((newest, _)), None, None) => {
                let most = u64::try_from(kvgate_core::policy::STEPS_MAX).unwrap_or(u64::MAX);
                Some(grouped((*newest).min(most)))
            }
            _ => None,
        },
        runs: runs.into_iter().map(str::to_owned).collect(),
        chosen_run: run,
        columns: asked.columns.clone(),
        csv: link("steps.csv", &[("run", run)]),
        json: link("steps.json", &[("run", run)]),
        groups: GROUPS
            .iter()
            .map(|(name, columns)| (*name, asked.page(columns, ""), asked.columns == *columns))
            .collect(),
        keys: known
            .iter()
            .map(|key| ((*key).to_owned(), asked.takes(key)))
            .collect(),
        spans: spans(&keys),
        shown_keys: keys
            .iter()
            .map(|key| Key {
                full: (*key).to_owned(),
                pieces: key
                    .split_once('/')
                    .map_or(*key, |(_, name)| name)
                    .split_inclusive('_')
                    .map(str::to_owned)
                    .collect(),
            })
            .collect(),
        rows,
        newest: asked.before.map(|_| asked.page(&asked.columns, "")),
        next: last.map(|(number, _)| asked.page(&asked.columns, &number.to_string())),
    }
}

/// Groups of neighbouring columns, each with its width.
fn spans(keys: &[&str]) -> Vec<(String, usize)> {
    let mut spans: Vec<(String, usize)> = Vec::new();
    for key in keys {
        let group = key.split('/').next().unwrap_or_default();
        match spans.last_mut() {
            Some((last, width)) if last == group => *width += 1,
            _ => spans.push((group.to_owned(), 1)),
        }
    }
    spans
}

fn bare(key: &str) -> &str {
    key.strip_prefix(PREFIX).unwrap_or(key)
}

fn row(id: String, report: &StepReport, keys: &[&str]) -> Row {
    let figure = |key: &&str| {
        let value = report.metrics.get(&format!("{PREFIX}{key}"));
        value.map_or_else(|| "–".to_owned(), |value| figure(*value))
    };
    Row {
        id,
        run: if report.run.is_empty() {
            "(no name)".to_owned()
        } else {
            report.run.clone()
        },
        step: report.step.map_or_else(|| "open".to_owned(), grouped),
        to: report.to.clone(),
        when: moment(&report.to),
        took: took(report),
        open: report.step.is_none(),
        figures: keys.iter().map(figure).collect(),
    }
}

fn took(report: &StepReport) -> String {
    let read = |text: &str| text.parse::<jiff::Timestamp>().ok();
    let millis = read(&report.from)
        .zip(read(&report.to))
        .and_then(|(from, to)| u64::try_from(to.as_millisecond() - from.as_millisecond()).ok());
    millis.map_or_else(
        || "–".to_owned(),
        |millis| duration(kvgate_core::units::Span::from_millis(millis)),
    )
}

/// Counts whole, the rest with the digits that a plot could show.
fn figure(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        let whole = format!("{value:.0}");
        whole.parse().map_or(whole, grouped)
    } else if value.abs() < 10.0 {
        format!("{value:.4}")
    } else {
        format!("{value:.1}")
    }
}

// ---- lines -------------------------------------------------------------------------------------

fn plots(found: &[(u64, StepReport)], run: &str) -> PlotsPart {
    let mut steps: Vec<&StepReport> = found
        .iter()
        .map(|(_, report)| report)
        .filter(|report| report.run == run)
        .take(POINTS)
        .collect();
    steps.reverse();
    let ends = steps.first().zip(steps.last()).filter(|_| steps.len() > 1);
    let step = |report: &StepReport| report.step.map(grouped).unwrap_or_default();
    PlotsPart {
        run: (!run.is_empty()).then(|| run.to_owned()),
        range: ends.map_or_else(
            || "no line yet".to_owned(),
            |(first, last)| format!("steps {} to {}", step(first), step(last)),
        ),
        plots: if ends.is_some() {
            DRAWN.iter().filter_map(|key| plot(key, &steps)).collect()
        } else {
            Vec::new()
        },
    }
}

/// `None` for a key without a value.
fn plot(key: &'static str, steps: &[&StepReport]) -> Option<Plot> {
    let values: Vec<Option<f64>> = steps
        .iter()
        .map(|report| {
            let value = report.metrics.get(&format!("{PREFIX}{key}")).copied();
            value.or_else(|| COUNTS.contains(&key).then_some(0.0))
        })
        .collect();
    let known = || values.iter().flatten().copied();
    let last = known().next_back()?;
    let (least, most) = (
        known().fold(f64::INFINITY, f64::min),
        line::greatest(&values),
    );
    let width = PLOT.0 / f64::from(u32::try_from(steps.len()).unwrap_or(u32::MAX));
    let points = steps.iter().zip(&values).enumerate();
    Some(Plot {
        key,
        last: figure(last),
        least: format!("least {}", figure(least)),
        most: format!("most {}", figure(most)),
        told: format!(
            "{key} over {} steps: least {}, most {}, last {}",
            steps.len(),
            figure(least),
            figure(most),
            figure(last)
        ),
        path: line::path(&values, most * 1.05, PLOT.0, PLOT.1),
        width: format!("{width:.1}"),
        points: points
            .filter_map(|(place, (report, value))| {
                let x = line::x_of(place, steps.len(), PLOT.0) - width / 2.0;
                Some(Point {
                    x: format!("{x:.1}"),
                    told: format!("step {}: {}", grouped(report.step?), figure((*value)?)),
                })
            })
            .collect(),
    })
}

// ---- files -------------------------------------------------------------------------------------

/// `GET /steps.csv`: all reports, or those of a run, with one column a key.
pub(super) async fn csv(State(web): State<Web>, query: Result<Query, Fault>) -> Response {
    let answer = async {
        let run = run_of(query?)?;
        let keys = keys(web.app(), run.as_deref()).await?;
        let head = csv_line(
            ["run", "step", "from", "to"]
                .into_iter()
                .chain(keys.iter().map(String::as_str)),
        );
        let rows = reports(web.app().clone(), run).map(move |reports| {
            let lines = reports.iter().map(|report| csv_row(report, &keys));
            lines.collect::<String>()
        });
        let pieces = stream::iter([head]).chain(rows);
        Ok(file(
            "text/csv; charset=utf-8; header=present",
            "kvgate-steps.csv",
            pieces,
        ))
    };
    answer
        .await
        .unwrap_or_else(|fault: Fault| frame::fault_page(&fault))
}

/// `GET /steps.json`: the same as a list of the reports of the API.
pub(super) async fn json(State(web): State<Web>, query: Result<Query, Fault>) -> Response {
    let run = match query.and_then(run_of) {
        Ok(run) => run,
        Err(fault) => return frame::fault_page(&fault),
    };
    let mut joint = "";
    let rows = reports(web.app().clone(), run).map(move |reports| {
        let mut text = String::new();
        for report in &reports {
            text.push_str(joint);
            text.push_str(&serde_json::to_string(report).unwrap_or_default());
            joint = ",\n";
        }
        text
    });
    let pieces = stream::iter(["[\n".to_owned()])
        .chain(rows)
        .chain(stream::iter(["\n]\n".to_owned()]));
    file("application/json", "kvgate-steps.json", pieces)
}

fn run_of(mut query: Query) -> Result<Option<String>, Fault> {
    let run = query.take("run").filter(|run| !run.is_empty());
    query.done()?;
    Ok(run)
}

/// Every key that one of the reports has.
async fn keys(app: &App, run: Option<&str>) -> Result<Vec<String>, Fault> {
    let mut keys = BTreeSet::new();
    let mut reports = std::pin::pin!(reports(app.clone(), run.map(str::to_owned)));
    while let Some(piece) = reports.next().await {
        keys.extend(
            piece
                .into_iter()
                .flat_map(|report| report.metrics.into_keys()),
        );
    }
    Ok(keys.into_iter().collect())
}

/// The reports, newest first, piece by piece. It ends early when the gate does not answer any more.
fn reports(app: App, run: Option<String>) -> impl Stream<Item = Vec<StepReport>> + Send {
    stream::unfold(Some(u64::MAX), move |from| {
        let (app, run) = (app.clone(), run.clone());
        async move {
            let (slice, more) = read::step_slice(&app, from?, PIECE).await.ok()?;
            let next = slice.last().filter(|_| more);
            let next = next.and_then(|(number, _)| number.checked_sub(1));
            let wanted = slice.into_iter().map(|(_, report)| report);
            let wanted = wanted.filter(|report| run.as_ref().is_none_or(|run| *run == report.run));
            Some((wanted.collect(), next))
        }
    })
    .fuse()
}

fn file(
    kind: &'static str,
    name: &str,
    pieces: impl Stream<Item = String> + Send + 'static,
) -> Response {
    let body = Body::from_stream(pieces.map(|piece| Ok::<_, Infallible>(Bytes::from(piece))));
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Ok(name) = HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")) {
        headers.insert(CONTENT_DISPOSITION, name);
    }
    (headers, body).into_response()
}

fn csv_row(report: &StepReport, keys: &[String]) -> String {
    let step = report.step.map(|step| step.to_string()).unwrap_or_default();
    let figures: Vec<String> = keys
        .iter()
        .map(|key| {
            report
                .metrics
                .get(key)
                .map(f64::to_string)
                .unwrap_or_default()
        })
        .collect();
    let run = harmless(&report.run);
    let names = [run.as_str(), &step, &report.from, &report.to];
    csv_line(names.into_iter().chain(figures.iter().map(String::as_str)))
}

fn csv_line<'a>(fields: impl Iterator<Item = &'a str>) -> String {
    let mut line = ::csv::WriterBuilder::new()
        .terminator(::csv::Terminator::CRLF)
        .from_writer(Vec::new());
    // Neither can fail: a line is written to memory.
    let _ = line.write_record(fields);
    let bytes = line.into_inner().unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A name that a spreadsheet would take for a formula gets a quote before it.
fn harmless(name: &str) -> String {
    if name.starts_with(['=', '+', '-', '@', '\t', '\r']) {
        format!("'{name}")
    } else {
        name.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file holds names as data: neither a separator nor a formula.
    #[test]
    fn names_in_a_file_are_data() {
        let report = |run: &str| StepReport {
            run: run.to_owned(),
            step: Some(3),
            from: "a".to_owned(),
            to: "b".to_owned(),
            metrics: [("agentic_kv/x".to_owned(), 0.5)].into(),
        };
        let keys = ["agentic_kv/x".to_owned(), "agentic_kv/y".to_owned()];
        for (run, line) in [
            ("exp-7", "exp-7,3,a,b,0.5,\r\n"),
            ("=1+1", "'=1+1,3,a,b,0.5,\r\n"),
            ("@x", "'@x,3,a,b,0.5,\r\n"),
            ("-1", "'-1,3,a,b,0.5,\r\n"),
            ("a,\"b\"", "\"a,\"\"b\"\"\",3,a,b,0.5,\r\n"),
        ] {
            assert_eq!(csv_row(&report(run), &keys), line);
        }
    }

    #[test]
    fn figures_and_groups_of_columns() {
        assert_eq!(figure(1_432_800.0), "1,432,800");
        assert_eq!(figure(0.976_54), "0.9765");
        assert_eq!(figure(12.34), "12.3");
        assert_eq!(
            spans(&["admission/admit", "admission/wait", "budget/epoch"]),
            [("admission".to_owned(), 2), ("budget".to_owned(), 1)]
        );
    }
}
