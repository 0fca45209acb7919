//! `kvgate leases`: who holds how much, and an operator's way to end a lease.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use kvgate_api::Lease;
use serde_json::Value;

use super::act::{self, Ids};
use super::client::{Client, Service};
use super::list::{self, Filters, Shown};
use super::table::{Kind, duration, grouped, text};
use super::{Ended, READ_HELP, outcome};

/// The command; without a part it lists.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Leases {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    list: List,
}

#[derive(Subcommand, Debug)]
enum Part {
    /// List the held leases, in the order of their grants (what `kvgate leases` does as well)
    #[command(after_help = READ_HELP)]
    List(List),
    /// End leases at once: their tokens are free for others, and what runs is not touched
    #[command(
        after_help = "Needs a token with scope admin where the service asks for tokens. A lease that has \
        ended already is an outcome `lease_expired` or `lease_released`.\n\n\
        Exit codes: 0 all revoked; 1 at least one was not; 2 usage; 69 no service answers.\n\n\
        Example:\n  kvgate leases --client rollout-3 --all -o json | jq -r '.items[].lease_id' | xargs kvgate leases revoke"
    )]
    Revoke {
        #[command(flatten)]
        ids: Ids,
        #[command(flatten)]
        service: Service,
    },
}

#[derive(Args, Debug)]
struct List {
    #[command(flatten)]
    filters: Filters,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    service: Service,
}

const COLUMNS: &[(&str, Kind)] = &[
    ("lease", Kind::Word),
    ("ticket", Kind::Text),
    ("session", Kind::Text),
    ("tokens", Kind::Number),
    ("granted at", Kind::Word),
    ("expires in", Kind::Number),
    ("client", Kind::Text),
];

/// Runs one part.
pub(super) fn run(leases: &Leases) -> Result<ExitCode, Ended> {
    let list = match &leases.part {
        None => &leases.list,
        Some(Part::List(list)) => list,
        Some(Part::Revoke { ids, service }) => {
            let client = Client::new(service)?;
            let done = |body: &Value| Ok(outcome(body, "outcome"));
            return act::each(&client, ids, "lease_id", ("leases", "revoke"), done);
        }
    };
    let client = Client::new(&list.service)?;
    let query = list.filters.query();
    list::show(
        &client,
        &["v1", "leases"],
        &query,
        &list.shown,
        COLUMNS,
        row,
    )?;
    Ok(ExitCode::SUCCESS)
}

fn row(lease: &Lease) -> Vec<String> {
    vec![
        text(Some(&lease.lease_id)),
        text(Some(&lease.ticket_id)),
        text(Some(&lease.session_id)),
        grouped(lease.reservation_tokens),
        text(Some(&lease.granted_at)),
        duration(lease.expires_in_s),
        text(lease.client.as_deref()),
    ]
}
