//! Step reports and the windows of runs; the counters say what readings told of usage.
//!
//! As in the step before, the counters gain fields at the end of their row, and all of them begin at
//! nothing: a zero byte each.

use redb::{ReadableTable, TableDefinition, WriteTransaction};

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const WINDOWS: TableDefinition<&str, &[u8]> = TableDefinition::new("windows");
const STEPS: TableDefinition<u64, &[u8]> = TableDefinition::new("steps");

/// Key of the counters in the table `meta`.
const TALLY: &str = "tally";

/// Version bytes of the counters, before and after.
const BEFORE: u8 = 2;
const AFTER: u8 = 3;

/// What the counters gain: rounds that told a usage, and the sum of their means.
const TALLY_GAINS: &[u8] = &[0, 0];

/// Creates the empty tables and turns the counters over.
pub(super) fn apply(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction.open_table(WINDOWS)?;
    transaction.open_table(STEPS)?;
    let mut meta = transaction.open_table(META)?;
    let tally = match meta.get(TALLY)? {
        Some(value) => Some(grown(value.value())?),
        None => None,
    };
    if let Some(row) = tally {
        meta.insert(TALLY, row.as_slice())?;
    }
    Ok(())
}

/// A row in its next version.
pub(in crate::store) fn grown(row: &[u8]) -> Result<Vec<u8>, redb::Error> {
    match row.split_first() {
        Some((&BEFORE, fields)) => Ok([&[AFTER], fields, TALLY_GAINS].concat()),
        _ => Err(redb::Error::Corrupted(
            "a row has an unknown version".to_owned(),
        )),
    }
}
