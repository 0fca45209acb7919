//! Settings that were set at run time, and the audit.
//!
//! The settings are a row of the table `meta`; without it everything is as configured.

use redb::{TableDefinition, WriteTransaction};

const AUDIT: TableDefinition<u64, &[u8]> = TableDefinition::new("audit");

/// Creates the empty table.
pub(super) fn apply(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction.open_table(AUDIT)?;
    Ok(())
}
