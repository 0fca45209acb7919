//! Durability. Nothing outside this room knows redb.

mod disk;
mod error;
#[path = "../../migrations/mod.rs"]
mod migrations;
mod peek;
mod redb;
mod rows;
mod space;
mod start;
mod tables;

pub use self::disk::{Disk, FileId, Found, FsDisk, Open};
pub use self::error::{CommitError, OpenError};
pub use self::migrations::{STEPS, Step};
pub use self::redb::RedbStore;
pub use self::space::{BALLAST_NAME, Space};
pub use self::start::{FILE_NAME, open, open_on, open_with, write_new};
