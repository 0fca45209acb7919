//! The store's schema, step by step. A step owns frozen copies of the shapes it touches and uses
//! redb and std only. How to add one: `README.md`.

mod m0001_initial;
mod m0002_closes;
mod m0003_steps;
mod m0004_settings;

use redb::{TableDefinition, WriteTransaction};

/// Key-value facts about the store itself; its shape never changes.
pub const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");

/// Key of the schema version in [`META`]: four bytes, little-endian.
pub const SCHEMA: &str = "schema";

/// One step, run in the transaction that also writes its version.
pub type Step = fn(&WriteTransaction) -> Result<(), redb::Error>;

/// All steps; the version of a store is how many of them it has seen.
pub const STEPS: &[Step] = &[
    m0001_initial::apply,
    m0002_closes::apply,
    m0003_steps::apply,
    m0004_settings::apply,
];
