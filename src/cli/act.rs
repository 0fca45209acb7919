//! One act for each of several ids: every outcome is shown, and one that failed ends the command with 1.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::client::{CallError, Client, RefusedCall};
use super::out::{self, plain};
use super::table::{Kind, table};
use super::{Ended, Output};

/// Ids that one command takes: more are a slip, and each is a call of its own.
const IDS_MAX: usize = 10_000;

/// What is acted on.
#[derive(Args, Debug)]
pub(super) struct Ids {
    /// Ids, as the list shows them
    #[arg(value_name = "ID", required = true, num_args = 1..=IDS_MAX)]
    ids: Vec<String>,
    /// Form of the answer
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// How an act went.
struct Outcome {
    word: String,
    refusal: Option<super::client::Refusal>,
}

/// Acts on each id in turn: the verb of a list's rows. `name` is what the ids are called in JSON; `outcome`
/// reads a good answer, or says why it is none after all.
///
/// # Errors
/// When the service is away. What was done before is shown first.
pub(super) fn each(
    client: &Client,
    ids: &Ids,
    name: &str,
    (list, verb): (&str, &str),
    outcome: impl Fn(&Value) -> Result<String, String>,
) -> Result<ExitCode, Ended> {
    let mut rows = Vec::new();
    let mut values = Vec::new();
    let mut failed = 0_usize;
    let mut away = None;
    for id in &ids.ids {
        let done = match client.post(&["v1", list, id, verb]) {
            Ok(body) => match outcome(&body) {
                Ok(word) => Outcome {
                    word,
                    refusal: None,
                },
                Err(word) => {
                    failed += 1;
                    Outcome {
                        word,
                        refusal: None,
                    }
                }
            },
            Err(CallError::Refused(RefusedCall(refusal))) => {
                failed += 1;
                Outcome {
                    word: refusal.code.clone(),
                    refusal: Some(refusal),
                }
            }
            Err(error) => {
                away = Some(error);
                break;
            }
        };
        let detail = done.refusal.as_ref().map(|refusal| refusal.sentence());
        let status = done.refusal.as_ref().map(|refusal| refusal.status);
        rows.push(vec![
            plain(id).into_owned(),
            plain(&done.word).into_owned(),
            detail.clone().unwrap_or_default(),
        ]);
        values.push(json!({
            (name): id,
            "outcome": done.word,
            "status": status,
            "detail": detail,
        }));
    }
    match ids.output {
        Output::Json => out::print_json(&values)?,
        Output::Table => {
            let columns = [
                (name.trim_end_matches("_id"), Kind::Text),
                ("outcome", Kind::Word),
                ("", Kind::Text),
            ];
            out::print(&table(&columns, rows))?;
        }
    }
    if let Some(error) = away {
        return Err(error.into());
    }
    if failed > 0 {
        out::say(&format!(
            "{failed} of {} were not done; the outcome of each says why",
            ids.ids.len()
        ));
    }
    Ok(ExitCode::from(u8::from(failed > 0)))
}
