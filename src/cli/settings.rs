//! `kvgate settings` and `kvgate audit`: what can be changed while the service runs, and who changed what.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::client::{CallError, Client, Service, typed};
use super::list::{self, Shown};
use super::table::{Kind, table, text};
use super::{Ended, Output, READ_HELP, out};

/// The command; without a part it shows.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Settings {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    show: Show,
}

#[derive(Subcommand, Debug)]
enum Part {
    /// Show the settings with their origin (what `kvgate settings` does as well)
    #[command(after_help = READ_HELP)]
    Show(Show),
    /// Change settings, durably: they win over flags, environment and file until they are reset
    #[command(
        after_help = "All values are checked together, and all are taken or none. Needs a token with scope \
        admin where the service asks for tokens.\n\n\
        Exit codes: 0 changed; 1 refused; 2 usage; 69 no service answers.\n\n\
        Examples:\n  kvgate settings set paused=on\n  kvgate settings set headroom=0.85 max_wait_s=60\n  \
        kvgate settings set expected_decode_cap=none"
    )]
    Set {
        /// Names as `kvgate settings` shows them; shares above 0 and at most 1, times in seconds,
        /// switches `on` or `off`
        #[arg(value_name = "NAME=VALUE", required = true, value_parser = assignment)]
        values: Vec<(String, Value)>,
        #[command(flatten)]
        shown: Form,
    },
    /// Take settings back to what flags, environment and file say
    #[command(
        after_help = "Exit codes: 0 done; 1 refused; 2 usage; 69 no service answers.\n\n\
        Example:\n  kvgate settings reset headroom paused"
    )]
    Reset {
        /// Names as `kvgate settings` shows them
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        #[command(flatten)]
        shown: Form,
    },
}

#[derive(Args, Debug)]
struct Show {
    #[command(flatten)]
    shown: Form,
}

#[derive(Args, Debug)]
struct Form {
    /// Form of the answer: `json` is what the API answers
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    service: Service,
}

/// A value and who set it.
#[derive(Deserialize)]
struct Setting {
    value: Value,
    origin: String,
}

/// `on` and `off` are switches; what is no JSON is a word.
fn assignment(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or("must be NAME=VALUE, such as headroom=0.85")?;
    let value = match value {
        "on" => Value::Bool(true),
        "off" => Value::Bool(false),
        value => serde_json::from_str(value).unwrap_or_else(|_| value.into()),
    };
    match value {
        Value::Null => Err("`kvgate settings reset NAME` takes a setting back".to_owned()),
        Value::Array(_) | Value::Object(_) => Err("no setting takes a list".to_owned()),
        value => Ok((name.replace('-', "_"), value)),
    }
}

/// Runs one part.
pub(super) fn run(settings: Settings) -> Result<(), Ended> {
    let (shown, change) = match settings.part {
        None => (settings.show.shown, None),
        Some(Part::Show(show)) => (show.shown, None),
        Some(Part::Set { values, shown }) => (shown, Some(values)),
        Some(Part::Reset { names, shown }) => {
            let named = names
                .into_iter()
                .map(|name| (name.replace('-', "_"), Value::Null));
            (shown, Some(named.collect()))
        }
    };
    let client = Client::new(&shown.service)?;
    let path = ["v1", "settings"];
    let body = match change {
        None => client.get(&path, &[])?,
        Some(values) => client.patch(&path, &Value::Object(Map::from_iter(values)))?,
    };
    if shown.output == Output::Json {
        return Ok(out::print_json(&body)?);
    }
    let rows = rows(&body)?;
    let columns = [
        ("setting", Kind::Word),
        ("value", Kind::Text),
        ("origin", Kind::Word),
    ];
    Ok(out::print(&table(&columns, rows))?)
}

fn rows(body: &Value) -> Result<Vec<Vec<String>>, CallError> {
    let settings: BTreeMap<String, Setting> = typed(body)?;
    let row = |(name, setting): (String, Setting)| {
        let value = match setting.value {
            Value::Null => "none".to_owned(),
            Value::Bool(on) => if on { "on" } else { "off" }.to_owned(),
            value => flat(&value),
        };
        vec![
            text(Some(&name)),
            text(Some(&value)),
            text(Some(&setting.origin)),
        ]
    };
    Ok(settings.into_iter().map(row).collect())
}

/// A word as it is, everything else as JSON on one line.
fn flat(value: &Value) -> String {
    match value {
        Value::String(word) => word.clone(),
        value => value.to_string(),
    }
}

/// Options of `kvgate audit`.
#[derive(Args, Debug)]
pub(super) struct Audit {
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    service: Service,
}

/// One thing that an operator did.
#[derive(Deserialize)]
struct Entry {
    at: String,
    who: String,
    action: String,
    #[serde(default)]
    detail: Value,
}

const AUDIT_COLUMNS: &[(&str, Kind)] = &[
    ("at", Kind::Word),
    ("who", Kind::Text),
    ("action", Kind::Word),
    ("detail", Kind::Text),
];

/// Shows what operators did.
pub(super) fn audit(audit: &Audit) -> Result<(), Ended> {
    let client = Client::new(&audit.service)?;
    let path = ["v1", "audit"];
    list::show(
        &client,
        &path,
        &[],
        &audit.shown,
        AUDIT_COLUMNS,
        |entry: &Entry| {
            vec![
                text(Some(&entry.at)),
                text(Some(&entry.who)),
                text(Some(&entry.action)),
                text(Some(&flat(&entry.detail))),
            ]
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_read_as_people_write_them() {
        for (text, value) in [
            ("headroom=0.85", json!(0.85)),
            ("max-wait-s=60", json!(60)),
            ("paused=on", json!(true)),
            ("paused=false", json!(false)),
            ("scope=all", json!("all")),
            ("expected_decode_cap=none", json!("none")),
        ] {
            let (name, read) = assignment(text).unwrap();
            assert_eq!(read, value, "{text}");
            assert!(!name.contains('-'));
        }
        for text in ["headroom", "=1", "headroom=null", "headroom=[1]"] {
            assert!(assignment(text).is_err(), "{text}");
        }
    }
}
