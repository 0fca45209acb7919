//! Lists of a running service: filters as flags, one page or all of them, a table or JSON.

use clap::Args;
use kvgate_api::Listing;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::client::{CallError, Client, typed};
use super::table::{Kind, grouped, table};
use super::{Ended, Output, out};

/// Rows of a page that a service gives at most.
const PAGE_MAX: &str = "1000";
/// Rows that `--all` gathers at most: ten times the default bound of the queue.
const ALL_ROWS_MAX: usize = 1_000_000;

/// How much of a list is wanted, and how it is shown.
#[derive(Args, Debug)]
pub(super) struct Shown {
    /// Rows at most, 1 to 1000
    #[arg(long, value_name = "COUNT", default_value_t = 100,
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    /// All rows, page by page
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Form of the answer: `json` is what the API answers
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Which leases or waiters are wanted.
#[derive(Args, Debug)]
pub(super) struct Filters {
    /// Only this session
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Only this scope
    #[arg(long, value_name = "SCOPE", value_parser = ["train", "eval"])]
    scope: Option<String>,
    /// Only this client
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// Only with this text in ticket, session, lease id or client
    #[arg(long, value_name = "TEXT")]
    q: Option<String>,
}

impl Filters {
    /// As the API calls them.
    pub(super) fn query(&self) -> Vec<(&str, &str)> {
        given([
            ("session_id", &self.session),
            ("scope", &self.scope),
            ("client", &self.client),
            ("q", &self.q),
        ])
    }
}

/// Parameters that were said.
pub(super) fn given<'a, const N: usize>(
    parameters: [(&'a str, &'a Option<String>); N],
) -> Vec<(&'a str, &'a str)> {
    let said = |(name, value): (&'a str, &'a Option<String>)| Some((name, value.as_deref()?));
    parameters.into_iter().filter_map(said).collect()
}

/// Reads a list and shows it: in a table one row each, of these columns.
pub(super) fn show<T: DeserializeOwned>(
    client: &Client,
    path: &[&str],
    query: &[(&str, &str)],
    shown: &Shown,
    columns: &[(&str, Kind)],
    row: impl Fn(&T) -> Vec<String>,
) -> Result<(), Ended> {
    let listing = read(client, path, query, shown)?;
    if shown.output == Output::Json {
        return Ok(out::print_json(&listing)?);
    }
    let rows = listing
        .items
        .iter()
        .map(|item| Ok(row(&typed(item)?)))
        .collect::<Result<Vec<_>, CallError>>()?;
    let count = rows.len();
    out::print(&table(columns, rows))?;
    if listing.next.is_some() {
        out::say(&format!(
            "{} of {} rows are shown; --all shows all, filters fewer",
            grouped(u64::try_from(count).unwrap_or(u64::MAX)),
            grouped(listing.total)
        ));
    }
    Ok(())
}

fn read(
    client: &Client,
    path: &[&str],
    query: &[(&str, &str)],
    shown: &Shown,
) -> Result<Listing<Value>, CallError> {
    let limit = match shown.all {
        true => PAGE_MAX.to_owned(),
        false => shown.limit.to_string(),
    };
    let page = |cursor: Option<&str>| {
        let mut query = query.to_vec();
        query.push(("limit", &limit));
        query.extend(cursor.map(|cursor| ("cursor", cursor)));
        typed::<Listing<Value>>(&client.get(path, &query)?)
    };
    let mut listing = page(None)?;
    while shown.all
        && listing.items.len() < ALL_ROWS_MAX
        && let Some(cursor) = &listing.next
    {
        let next = page(Some(cursor))?;
        // A list that stands still would never end.
        let moved = next.next != listing.next;
        listing.items.extend(next.items);
        listing.total = next.total;
        listing.next = next.next.filter(|_| moved);
    }
    Ok(listing)
}
