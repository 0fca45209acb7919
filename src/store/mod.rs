//! Durability. Nothing outside this room knows redb.

#[path = "../../migrations/mod.rs"]
mod migrations;
mod redb;
mod rows;
mod tables;

pub use self::redb::{CommitError, FILE_NAME, OpenError, RedbStore, open};
