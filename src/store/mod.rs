//! Durability. Nothing outside this room knows redb.

mod fresh;
mod logical;
#[path = "../../migrations/mod.rs"]
mod migrations;
mod offline;
mod peek;
mod redb;
mod rows;
mod tables;

pub use self::fresh::write_new;
pub use self::logical::{CopyError, CopyPieces, moved_on, read_copy};
pub use self::offline::{Inspection, Look, OfflineError, backup, look, reset, restore};
pub use self::redb::{CommitError, FILE_NAME, OpenError, RedbStore, open};
