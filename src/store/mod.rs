//! Durability. Nothing outside this room knows redb.

#[path = "../../migrations/mod.rs"]
mod migrations;
mod mounts;
mod peek;
mod redb;
mod rows;
mod tables;

pub use self::mounts::network_file_system;
pub use self::redb::{CommitError, FILE_NAME, OpenError, RedbStore, open};
