//! Why a store cannot be opened or written, and how redb's errors become that.

use std::io;
use std::path::{Path, PathBuf};

use kvgate_core::policy::PolicyError;
use redb::StorageError;

use super::FILE_NAME;
use super::rows::RowError;

/// Why the store cannot be opened; each has its own exit code (DUR5).
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("{} is in use by another process; stop that one, or choose another --data", .0.display())]
    Locked(PathBuf),
    /// Its content is not what was written.
    #[error("{} is damaged ({}); it was left as it is. Restore a backup, or move the file away to start empty", .0.display(), .1)]
    Damaged(PathBuf, String),
    /// It is something else, or an empty file.
    #[error("{} is not a kvgate store; it was left as it is. Choose another --data", .0.display())]
    Foreign(PathBuf),
    /// A newer kvgate wrote it.
    #[error("{} has schema {found}, this kvgate knows up to {known}; use the newer kvgate", .path.display())]
    Newer {
        /// The store.
        path: PathBuf,
        /// Its schema.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// The operating system forbids it.
    #[error("no permission for {}: {}; give the user that runs kvgate access to it", .0.display(), .1)]
    Permission(PathBuf, io::Error),
    /// What was set at run time, together with what is configured now, cannot be.
    #[error(
        "settings that were set at run time do not fit the configuration: {0}; change the configuration, or start once with --reset-settings"
    )]
    Settings(PolicyError),
    /// The disk is full, or another I/O error.
    #[error("cannot use {}: {}; make room or mend the disk", .0.display(), .1)]
    Io(PathBuf, io::Error),
}

impl OpenError {
    /// Whether room on the disk would help.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io(_, error) if is_full(error))
    }
}

/// Why a turn is not durable, or nobody knows.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// redb.
    #[error(transparent)]
    Redb(#[from] redb::Error),
    /// A row that cannot be encoded.
    #[error(transparent)]
    Row(#[from] RowError),
}

impl CommitError {
    /// Whether room on the disk would help.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Redb(redb::Error::Io(error)) if is_full(error))
    }

    pub(super) fn at(self, path: &Path) -> OpenError {
        match self {
            Self::Row(error) => OpenError::Damaged(path.to_path_buf(), error.to_string()),
            Self::Redb(error) => damaged_or_io(path, error),
        }
    }
}

impl From<CommitError> for OpenError {
    fn from(error: CommitError) -> Self {
        let error = match error {
            CommitError::Redb(redb::Error::Io(error)) => error,
            other => io::Error::other(other.to_string()),
        };
        Self::Io(PathBuf::from(FILE_NAME), error)
    }
}

macro_rules! from_redb {
    ($($error:ty),*) => {$(
        impl From<$error> for CommitError {
            fn from(error: $error) -> Self {
                Self::Redb(error.into())
            }
        }
    )*};
}
from_redb!(
    redb::TransactionError,
    redb::TableError,
    redb::CommitError,
    redb::DatabaseError,
    redb::StorageError,
    redb::SetDurabilityError
);

pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

pub(super) fn open_error(path: &Path, error: redb::DatabaseError) -> OpenError {
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => OpenError::Locked(path.to_path_buf()),
        redb::DatabaseError::Storage(StorageError::Io(error)) => io_error(path, error),
        other => damaged_or_io(path, other.into()),
    }
}

pub(super) fn io_error(path: &Path, error: io::Error) -> OpenError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => OpenError::Permission(path.to_path_buf(), error),
        io::ErrorKind::InvalidData => OpenError::Foreign(path.to_path_buf()),
        _ => OpenError::Io(path.to_path_buf(), error),
    }
}

pub(super) fn damaged_or_io(path: &Path, error: redb::Error) -> OpenError {
    match error {
        redb::Error::Io(error) => io_error(path, error),
        // What came after a failed operation; that one's error is lost here.
        redb::Error::PreviousIo => {
            OpenError::Io(path.to_path_buf(), io::Error::other(error.to_string()))
        }
        other => OpenError::Damaged(path.to_path_buf(), other.to_string()),
    }
}
