//! The seam to the directory that a store lives in, so that tests can cut the power, fill the disk
//! and break it (DUR1, DUR4).

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

/// What stays the same when a file is renamed, and differs from every other file there.
pub type FileId = (u64, u64);

/// What is known of a file without opening it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// Its length in bytes.
    pub len: u64,
    /// Which one it is.
    pub id: FileId,
}

/// An open file, and which one it is.
pub type Open = (Arc<dyn StorageBackend>, FileId);

/// One directory. Names are plain file names in it. Changes of names are atomic, and durable after
/// [`Disk::sync`]; bytes are durable after the file's own sync.
pub trait Disk: Debug + Send + Sync + 'static {
    /// Where a file is, for messages.
    fn path(&self, name: &str) -> PathBuf;

    /// Makes the directory when it is missing, durably.
    ///
    /// # Errors
    /// From the operating system.
    fn prepare(&self) -> io::Result<()>;

    /// Whether something has that name, and what.
    ///
    /// # Errors
    /// From the operating system; that there is nothing is no error.
    fn find(&self, name: &str) -> io::Result<Option<Found>>;

    /// Opens an existing file.
    ///
    /// # Errors
    /// From the operating system; also when it is missing.
    fn open(&self, name: &str) -> io::Result<Open>;

    /// Makes a new, empty file.
    ///
    /// # Errors
    /// From the operating system; also when something has that name.
    fn create(&self, name: &str) -> io::Result<Open>;

    /// Gives a file a second name.
    ///
    /// # Errors
    /// From the operating system: `AlreadyExists` when something has that name, anything else also
    /// where the file system has no second names.
    fn link(&self, name: &str, second: &str) -> io::Result<()>;

    /// Renames a file, in place of what had the new name.
    ///
    /// # Errors
    /// From the operating system.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Takes a name away; nothing happens when there is none.
    ///
    /// # Errors
    /// From the operating system.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all changes of names durable.
    ///
    /// # Errors
    /// From the operating system.
    fn sync(&self) -> io::Result<()>;

    /// Bytes that this process can still write to new files.
    ///
    /// # Errors
    /// From the operating system.
    fn free(&self) -> io::Result<u64>;

    /// Makes a new file that really takes up `len` bytes.
    ///
    /// # Errors
    /// From the operating system; a part of the file may be left.
    fn allocate(&self, name: &str, len: u64) -> io::Result<()>;
}

/// A directory of the operating system.
#[derive(Debug)]
pub struct FsDisk {
    directory: PathBuf,
}

impl FsDisk {
    /// The directory need not exist yet.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_path_buf(),
        }
    }

    fn opened(file: File) -> io::Result<Open> {
        let id = file_id(&file.metadata()?);
        let backend = FileBackend::new(file).map_err(io::Error::other)?;
        Ok((Arc::new(backend), id))
    }
}

impl Disk for FsDisk {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn prepare(&self) -> io::Result<()> {
        let missing: Vec<&Path> = self
            .directory
            .ancestors()
            .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
            .collect();
        fs::create_dir_all(&self.directory)?;
        for folder in missing {
            match folder.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all()?,
                Some(_) => File::open(".")?.sync_all()?,
                None => {}
            }
        }
        Ok(())
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        let path = self.path(name);
        // A link that leads nowhere is something, too.
        match fs::metadata(&path).or_else(|_| fs::symlink_metadata(&path)) {
            Ok(metadata) => Ok(Some(Found {
                len: metadata.len(),
                id: file_id(&metadata),
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn open(&self, name: &str) -> io::Result<Open> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(self.path(name))?;
        Self::opened(file)
    }

    fn create(&self, name: &str) -> io::Result<Open> {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(self.path(name))?;
        Self::opened(file)
    }

    fn link(&self, name: &str, second: &str) -> io::Result<()> {
        fs::hard_link(self.path(name), self.path(second))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path(from), self.path(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// redb does not sync the directory entry of a new file.
    fn sync(&self) -> io::Result<()> {
        File::open(&self.directory)?.sync_all()
    }

    fn free(&self) -> io::Result<u64> {
        let figures = rustix::fs::statvfs(&self.directory)?;
        Ok(figures.f_bavail.saturating_mul(figures.f_frsize))
    }

    fn allocate(&self, name: &str, len: u64) -> io::Result<()> {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .open(self.path(name))?;
        reserve(&mut file, len)?;
        file.sync_all()
    }
}

#[cfg(unix)]
fn file_id(metadata: &fs::Metadata) -> FileId {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn file_id(_metadata: &fs::Metadata) -> FileId {
    (0, 0)
}

/// Takes up room at once where the file system can, else by writing.
fn reserve(file: &mut File, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    match rustix::fs::fallocate(&*file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
        Err(error) => return Err(error.into()),
    }
    // Not zeros: a file system may keep those as a hole.
    let piece = [0xa5; 64 << 10];
    let mut left = len;
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        file.write_all(piece.get(..part).unwrap_or(&piece))?;
        left = left.saturating_sub(part as u64);
    }
    Ok(())
}

/// A file as redb takes it. The locks go to the file itself.
#[derive(Debug)]
pub(super) struct Shared(pub(super) Arc<dyn StorageBackend>);

impl StorageBackend for Shared {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.0.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.query_lock_range(start, end)
    }
}
