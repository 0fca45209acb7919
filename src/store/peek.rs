//! A look into a store that leaves the file as it is (DUR5).
//!
//! redb repairs a file while it opens it, and marks it as open. So the look goes through a backend
//! that keeps every write in memory: whatever is found out, damage, a newer schema or a database of
//! another program, the file keeps its bytes. Locks go to the real file, so that the look never
//! reads what another process is writing; they are kept when the look ends, for the opening that
//! follows.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, Database, DatabaseError, StorageBackend};

/// Writes are kept in pieces of this many bytes.
const PIECE: usize = 4_096;

/// Where redb's header has its flags, after the magic number, and the one that stands while the
/// file is open for writing.
const FLAGS_AT: u64 = 9;
const NOT_CLOSED: u8 = 2;

/// Whether redb closed the file in order, as it says itself. Asked under the lock.
pub(super) fn was_closed(file: &Arc<dyn StorageBackend>) -> io::Result<bool> {
    let mut flags = [NOT_CLOSED];
    file.read(FLAGS_AT, &mut flags)?;
    Ok(flags.iter().all(|flags| flags & NOT_CLOSED == 0))
}

/// Opens the file with its integrity checked, without a write to it.
pub(super) fn peek(
    file: &Arc<dyn StorageBackend>,
    cache_bytes: usize,
) -> Result<Database, DatabaseError> {
    let len = file
        .len()
        .map_err(|error| DatabaseError::Storage(error.into()))?;
    redb::Builder::new()
        .set_cache_size(cache_bytes)
        .set_check_integrity_on_open(true)
        .create_with_backend(Overlay {
            inner: Arc::clone(file),
            written: Mutex::new(Written {
                len,
                file_len: len,
                pieces: BTreeMap::new(),
            }),
        })
}

#[derive(Debug)]
struct Overlay {
    inner: Arc<dyn StorageBackend>,
    written: Mutex<Written>,
}

#[derive(Debug)]
struct Written {
    len: u64,
    /// How much of the file still shows through.
    file_len: u64,
    pieces: BTreeMap<u64, Box<[u8; PIECE]>>,
}

impl Overlay {
    fn written(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes as the file has them, zero beyond what shows through.
    fn read_file(&self, file_len: u64, offset: u64, out: &mut [u8]) -> io::Result<()> {
        out.fill(0);
        let left = usize::try_from(file_len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let there = out.len().min(left);
        match out.get_mut(..there) {
            Some(there) if !there.is_empty() => self.inner.read(offset, there),
            _ => Ok(()),
        }
    }

    /// Calls `each` with every piece that the range touches: its number, where in it and in the
    /// range the overlap begins, and how long it is.
    fn pieces(
        offset: u64,
        len: usize,
        mut each: impl FnMut(u64, usize, usize, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let number = at / PIECE as u64;
            let inside = usize::try_from(at % PIECE as u64).unwrap_or_default();
            let part = (PIECE - inside).min(len - done);
            each(number, inside, done, part)?;
            done += part;
        }
        Ok(())
    }
}

fn out_of_range() -> io::Error {
    io::Error::from(io::ErrorKind::UnexpectedEof)
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.written().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let written = self.written();
        if offset.saturating_add(out.len() as u64) > written.len {
            return Err(out_of_range());
        }
        self.read_file(written.file_len, offset, out)?;
        Self::pieces(offset, out.len(), |number, inside, done, part| {
            if let Some(piece) = written.pieces.get(&number) {
                let from = piece.get(inside..inside + part);
                let to = out.get_mut(done..done + part);
                to.zip(from)
                    .ok_or_else(out_of_range)
                    .map(|(to, from)| to.copy_from_slice(from))?;
            }
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut written = self.written();
        // What was cut off comes back as zeros.
        written.file_len = written.file_len.min(len);
        let whole = len / PIECE as u64;
        let inside = usize::try_from(len % PIECE as u64).unwrap_or_default();
        drop(written.pieces.split_off(&(whole + u64::from(inside > 0))));
        if let Some(rest) = written
            .pieces
            .get_mut(&whole)
            .and_then(|piece| piece.get_mut(inside..))
        {
            rest.fill(0);
        }
        written.len = len;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut written = self.written();
        if offset.saturating_add(data.len() as u64) > written.len {
            return Err(out_of_range());
        }
        Self::pieces(offset, data.len(), |number, inside, done, part| {
            if !written.pieces.contains_key(&number) {
                let mut piece = Box::new([0; PIECE]);
                self.read_file(written.file_len, number * PIECE as u64, &mut piece[..])?;
                written.pieces.insert(number, piece);
            }
            let piece = written.pieces.get_mut(&number);
            let to = piece.and_then(|piece| piece.get_mut(inside..inside + part));
            to.zip(data.get(done..done + part))
                .ok_or_else(out_of_range)
                .map(|(to, from)| to.copy_from_slice(from))
        })
    }

    /// The file stays open, and locked, for what comes after the look.
    fn close(&self) -> io::Result<()> {
        Ok(())
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.inner.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.query_lock_range(start, end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redb::backends::FileBackend;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, Vec<u8>),
        SetLen(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (
                0u64..20_000,
                proptest::collection::vec(any::<u8>(), 1..9_000)
            )
                .prop_map(|(offset, data)| Step::Write(offset, data)),
            (0u64..30_000).prop_map(Step::SetLen),
        ];
        proptest::collection::vec(step, 1..20)
    }

    proptest! {
        /// What was written is read back as from plain bytes, and the file keeps its own.
        #[test]
        fn reads_as_plain_bytes_do(steps in steps(), file_len in 1usize..20_000) {
            let file = tempfile::NamedTempFile::new().unwrap();
            let original: Vec<u8> = (0..file_len).map(|at| (at % 251) as u8).collect();
            std::fs::write(file.path(), &original).unwrap();
            let overlay = Overlay {
                inner: Arc::new(FileBackend::new(file.reopen().unwrap()).unwrap()),
                written: Mutex::new(Written {
                    len: file_len as u64,
                    file_len: file_len as u64,
                    pieces: BTreeMap::new(),
                }),
            };
            let mut plain = original.clone();
            for step in steps {
                match step {
                    Step::SetLen(len) => {
                        overlay.set_len(len).unwrap();
                        plain.resize(len as usize, 0);
                    }
                    Step::Write(offset, data) => {
                        let range = offset as usize..offset as usize + data.len();
                        let expected = plain.get_mut(range).map(|to| to.copy_from_slice(&data));
                        prop_assert_eq!(overlay.write(offset, &data).is_ok(), expected.is_some());
                    }
                }
                let mut out = vec![0; plain.len()];
                overlay.read(0, &mut out).unwrap();
                prop_assert_eq!(&out, &plain);
                prop_assert_eq!(overlay.len().unwrap(), plain.len() as u64);
                prop_assert!(overlay.read(plain.len() as u64, &mut [0]).is_err());
            }
            prop_assert_eq!(std::fs::read(file.path()).unwrap(), original);
        }
    }
}
