//! Every table of the store. Keys are bytes or integers, values are bytes with a version byte of
//! our own (`rows.rs`): redb identifies a table by its types, and composite types change their
//! identity between its versions.

use redb::TableDefinition;

/// Tickets by row number: waiters in line, held leases, ended tickets.
pub const TICKETS: TableDefinition<u64, &[u8]> = TableDefinition::new("tickets");
/// Starts of the writer by term.
pub const STARTS: TableDefinition<u64, &[u8]> = TableDefinition::new("starts");
/// Generations of the worker set by epoch.
pub const EPOCHS: TableDefinition<u64, &[u8]> = TableDefinition::new("epochs");
/// Members as last known, by base URL.
pub const ENGINES: TableDefinition<&str, &[u8]> = TableDefinition::new("engines");
/// Close intents by number.
pub const CLOSES: TableDefinition<u64, &[u8]> = TableDefinition::new("closes");
/// Last use of sessions by session id, while idle sessions are closed.
pub const SESSIONS: TableDefinition<&str, &[u8]> = TableDefinition::new("sessions");
/// Windows of step reports by run. A run may have the empty name, so the window of runs that are new
/// stands in the table `meta`.
pub const WINDOWS: TableDefinition<&str, &[u8]> = TableDefinition::new("windows");
/// Step reports by number.
pub const STEPS: TableDefinition<u64, &[u8]> = TableDefinition::new("steps");
/// What operators did, by number.
pub const AUDIT: TableDefinition<u64, &[u8]> = TableDefinition::new("audit");

/// Key in the table `meta`: term, seq, time and next issue number, in every commit.
pub const HEAD: &str = "head";
/// Key in the table `meta`: the counters.
pub const TALLY: &str = "tally";
/// Key in the table `meta`: the window of runs that are new.
pub const WINDOW: &str = "window";
/// Key in the table `meta`: what was set at run time; without it everything is as configured.
pub const SETTINGS: &str = "settings";
/// Key in the table `meta`: one byte, 1 after an orderly stop.
pub const CLEAN: &str = "clean";
