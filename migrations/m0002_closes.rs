//! Close intents and last uses of sessions; engines and counters say what became of closes.
//!
//! A row is a version byte and postcard's encoding of its fields one after the other, so a field
//! that a shape gains at its end is bytes at the end of the row. All of them begin at nothing, which
//! is a zero byte each: no number, an absent value, an empty list.

use redb::{ReadableTable, TableDefinition, WriteTransaction};

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const ENGINES: TableDefinition<&str, &[u8]> = TableDefinition::new("engines");
const CLOSES: TableDefinition<u64, &[u8]> = TableDefinition::new("closes");
const SESSIONS: TableDefinition<&str, &[u8]> = TableDefinition::new("sessions");

/// Key of the counters in the table `meta`.
const TALLY: &str = "tally";

/// Version bytes of the two shapes, before and after.
const BEFORE: u8 = 1;
const AFTER: u8 = 2;

/// What an engine gains: its refusals in a row, and since when it has no session close.
pub(in crate::store) const ENGINE_GAINS: &[u8] = &[0, 0];
/// What the counters gain: closes, failed ones, the list of how engines ended, reopened sessions.
pub(in crate::store) const TALLY_GAINS: &[u8] = &[0, 0, 0, 0];

/// Creates the empty tables and turns the rows over whose shape has grown.
pub(super) fn apply(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction.open_table(CLOSES)?;
    transaction.open_table(SESSIONS)?;
    let mut engines = transaction.open_table(ENGINES)?;
    let mut grown_rows = Vec::new();
    for row in engines.iter()? {
        let (url, value) = row?;
        grown_rows.push((url.value().to_owned(), grown(value.value(), ENGINE_GAINS)?));
    }
    for (url, row) in &grown_rows {
        engines.insert(url.as_str(), row.as_slice())?;
    }
    let mut meta = transaction.open_table(META)?;
    let tally = match meta.get(TALLY)? {
        Some(value) => Some(grown(value.value(), TALLY_GAINS)?),
        None => None,
    };
    if let Some(row) = tally {
        meta.insert(TALLY, row.as_slice())?;
    }
    Ok(())
}

/// A row in its next version.
pub(in crate::store) fn grown(row: &[u8], gains: &[u8]) -> Result<Vec<u8>, redb::Error> {
    match row.split_first() {
        Some((&BEFORE, fields)) => Ok([&[AFTER], fields, gains].concat()),
        _ => Err(redb::Error::Corrupted(
            "a row has an unknown version".to_owned(),
        )),
    }
}
