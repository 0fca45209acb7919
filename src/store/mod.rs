//! Durability. Nothing outside this room knows redb.

mod disk;
mod error;
#[cfg(test)]
mod fuzz;
mod logical;
#[path = "../../migrations/mod.rs"]
mod migrations;
mod mounts;
mod offline;
mod peek;
mod redb;
mod rows;
mod space;
mod start;
mod tables;

pub use self::disk::{Disk, FileId, Found, FsDisk, Open};
pub use self::error::{CommitError, OpenError};
pub use self::logical::{CopyError, CopyPieces, moved_on, read_copy};
pub use self::migrations::{STEPS, Step};
pub use self::mounts::network_file_system;
pub use self::offline::{Inspection, Look, OfflineError, backup, look, reset, restore};
pub use self::redb::RedbStore;
pub use self::space::{BALLAST_NAME, Space};
pub use self::start::{FILE_NAME, open, open_on, open_with, write_new};
