//! The first schema: the tables of tickets, starts, epochs and engines.

use redb::{TableDefinition, WriteTransaction};

const TICKETS: TableDefinition<u64, &[u8]> = TableDefinition::new("tickets");
const STARTS: TableDefinition<u64, &[u8]> = TableDefinition::new("starts");
const EPOCHS: TableDefinition<u64, &[u8]> = TableDefinition::new("epochs");
const ENGINES: TableDefinition<&str, &[u8]> = TableDefinition::new("engines");

/// Creates the empty tables.
pub(super) fn apply(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction.open_table(TICKETS)?;
    transaction.open_table(STARTS)?;
    transaction.open_table(EPOCHS)?;
    transaction.open_table(ENGINES)?;
    Ok(())
}
