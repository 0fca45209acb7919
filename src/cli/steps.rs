//! `kvgate steps`: step reports as they were taken, and the window that goes on. Nothing is drained here.

use clap::{Args, Subcommand};
use kvgate_api::StepReport;

use super::client::{Client, Service, typed};
use super::list::{self, Shown, given};
use super::out::{self, DIM, plain, styled};
use super::table::{Kind, NOTHING, duration, grouped, percent, table, text};
use super::{Ended, Output, READ_HELP};

/// The command; without a part it lists.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Steps {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    list: List,
}

#[derive(Subcommand, Debug)]
enum Part {
    /// List the step reports, newest first (what `kvgate steps` does as well)
    #[command(after_help = READ_HELP)]
    List(List),
    /// Look at the window that goes on, without taking its report
    #[command(after_help = READ_HELP)]
    Current(Current),
}

#[derive(Args, Debug)]
struct List {
    /// Only reports of this run; an empty name is the run without one
    #[arg(long, value_name = "NAME")]
    run: Option<String>,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    service: Service,
}

#[derive(Args, Debug)]
struct Current {
    /// The run
    #[arg(long, value_name = "NAME", default_value = "")]
    run: String,
    /// Form of the answer: `json` is what the API answers
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    service: Service,
}

const COLUMNS: &[(&str, Kind)] = &[
    ("run", Kind::Text),
    ("step", Kind::Number),
    ("until", Kind::Word),
    ("admit", Kind::Number),
    ("wait", Kind::Number),
    ("bypass", Kind::Number),
    ("mean wait", Kind::Number),
    ("reserved", Kind::Number),
    ("expired", Kind::Number),
    ("closes failed", Kind::Number),
];

/// Runs one part.
pub(super) fn run(steps: &Steps) -> Result<(), Ended> {
    let list = match &steps.part {
        None => &steps.list,
        Some(Part::List(list)) => list,
        Some(Part::Current(asked)) => return current(asked),
    };
    let client = Client::new(&list.service)?;
    let query = given([("run", &list.run)]);
    list::show(&client, &["v1", "steps"], &query, &list.shown, COLUMNS, row)
}

/// A key is absent when it has nothing to say.
fn row(report: &StepReport) -> Vec<String> {
    let value = |key: &str, show: fn(f64) -> String| {
        let found = report.metrics.get(&format!("agentic_kv/{key}"));
        found.map_or_else(|| NOTHING.to_owned(), |value| show(*value))
    };
    vec![
        match report.run.as_str() {
            "" => NOTHING.to_owned(),
            run => text(Some(run)),
        },
        report.step.map_or_else(|| NOTHING.to_owned(), grouped),
        text(Some(&report.to)),
        value("admission/admit", whole),
        value("admission/wait", whole),
        value("admission/bypass", whole),
        value("admission/wait_seconds_mean", duration),
        value("budget/reserved_utilization", percent),
        value("budget/lease_expired", whole),
        value("session/close_failure", whole),
    ]
}

fn whole(value: f64) -> String {
    format!("{value:.0}")
        .parse()
        .map_or_else(|_| value.to_string(), grouped)
}

fn current(asked: &Current) -> Result<(), Ended> {
    let client = Client::new(&asked.service)?;
    let query = [("run", asked.run.as_str())];
    let body = client.get(&["v1", "steps", "current"], &query)?;
    if asked.output == Output::Json {
        return Ok(out::print_json(&body)?);
    }
    let report: StepReport = typed(&body)?;
    let rows = report
        .metrics
        .iter()
        .map(|(key, value)| vec![plain(key).into_owned(), value.to_string()])
        .collect();
    let window = format!("from {} to {}", plain(&report.from), plain(&report.to));
    let columns = [("key", Kind::Text), ("value", Kind::Number)];
    Ok(out::print(&format!(
        "{}\n{}",
        styled(DIM, &window),
        table(&columns, rows)
    ))?)
}
