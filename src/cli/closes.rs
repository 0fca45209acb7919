//! `kvgate closes`: how far session closes have come, and another try for those that failed.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use kvgate_api::{Close, CloseEngineState};
use serde_json::Value;

use super::act::{self, Ids};
use super::client::{Client, Service};
use super::list::{self, Shown, given};
use super::table::{Kind, NOTHING, grouped, text};
use super::{Ended, READ_HELP, outcome, word};

/// The command; without a part it lists.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Closes {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    list: List,
}

#[derive(Subcommand, Debug)]
enum Part {
    /// List the closes that are remembered, newest first (what `kvgate closes` does as well)
    #[command(after_help = READ_HELP)]
    List(List),
    /// Send closes once more to the engines where they failed
    #[command(
        after_help = "Needs a token with scope client or admin where the service asks for tokens. The \
        outcome is how far the close has come now: `joining`, `delivering` or `done`.\n\n\
        Exit codes: 0 all sent; 1 at least one was not; 2 usage; 69 no service answers.\n\n\
        Example:\n  kvgate closes retry c-1 c-2"
    )]
    Retry {
        #[command(flatten)]
        ids: Ids,
        #[command(flatten)]
        service: Service,
    },
}

#[derive(Args, Debug)]
struct List {
    /// Only closes in this state
    #[arg(long, value_name = "STATE", value_parser = ["joining", "delivering", "done"])]
    state: Option<String>,
    /// Only closes of this session
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Only with this text in session or close id
    #[arg(long, value_name = "TEXT")]
    q: Option<String>,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    service: Service,
}

const COLUMNS: &[(&str, Kind)] = &[
    ("close", Kind::Word),
    ("session", Kind::Text),
    ("state", Kind::Word),
    ("requested at", Kind::Word),
    ("engines", Kind::Text),
    ("trouble", Kind::Text),
];

/// Runs one part.
pub(super) fn run(closes: &Closes) -> Result<ExitCode, Ended> {
    let list = match &closes.part {
        None => &closes.list,
        Some(Part::List(list)) => list,
        Some(Part::Retry { ids, service }) => {
            let client = Client::new(service)?;
            return act::each(&client, ids, "close_id", ("closes", "retry"), retried);
        }
    };
    let client = Client::new(&list.service)?;
    let query = given([
        ("state", &list.state),
        ("session_id", &list.session),
        ("q", &list.q),
    ]);
    list::show(
        &client,
        &["v1", "closes"],
        &query,
        &list.shown,
        COLUMNS,
        row,
    )?;
    Ok(ExitCode::SUCCESS)
}

/// While the feature is off the service takes the call and sends nothing.
fn retried(body: &Value) -> Result<String, String> {
    match outcome(body, "state") {
        state if state == "disabled" => {
            Err("disabled: session closes are off, nothing was sent".to_owned())
        }
        state => Ok(state),
    }
}

fn row(close: &Close) -> Vec<String> {
    let counts: Vec<String> = close
        .counts
        .iter()
        .map(|(state, count)| format!("{} {}", grouped(u64::from(*count)), word(state)))
        .collect();
    vec![
        text(Some(&close.close_id)),
        text(Some(&close.session_id)),
        word(&close.state),
        text(Some(&close.requested_at)),
        match counts.is_empty() {
            true => NOTHING.to_owned(),
            false => counts.join(", "),
        },
        trouble(close),
    ]
}

/// The first engine that did not take it, and what it said last.
fn trouble(close: &Close) -> String {
    let fails = |state| {
        !matches!(
            state,
            CloseEngineState::Delivered
                | CloseEngineState::Superseded
                | CloseEngineState::Restarted
                | CloseEngineState::Unsupported
        )
    };
    let engine = close.engines.iter().find(|engine| {
        fails(engine.state) && (engine.last_error.is_some() || engine.last_status.is_some())
    });
    let Some(engine) = engine else {
        return NOTHING.to_owned();
    };
    let status = engine.last_status.map(|status| format!("status {status}"));
    let said = [status, engine.last_error.clone()];
    let said: Vec<String> = said.into_iter().flatten().collect();
    text(Some(&format!("{}: {}", engine.url, said.join(", "))))
}
