//! Room on the disk: a ballast that can be given away, and when it is time to spare (DUR4).
//!
//! redb copies on write, so that on a full disk even the commit that deletes rows fails. The
//! ballast is room that the store keeps for itself; it is as large as a rewrite of the store needs.

use std::io;
use std::time::{Duration, Instant};

use super::disk::Disk;

/// Name of the ballast, beside the store.
pub const BALLAST_NAME: &str = "kvgate.ballast";

/// The least size of the ballast.
const BALLAST_MIN: u64 = 32 << 20;

/// With less than this free, space is low.
const LOW: u64 = 64 << 20;

/// How long a look at the free space holds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long after a failure, or a look that found too little room, the ballast is tried again.
const LAY_EVERY: Duration = Duration::from_secs(30);

/// What is left on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Bytes that can still be written; nothing when that cannot be found out.
    pub free_bytes: Option<u64>,
    /// Less than 64 MiB of it.
    pub low: bool,
}

pub(super) fn space(disk: &dyn Disk) -> Space {
    let free_bytes = disk.free().ok();
    Space {
        free_bytes,
        low: free_bytes.is_some_and(|free| free < LOW),
    }
}

/// The ballast's size for that many live bytes.
fn ballast_bytes(live: u64) -> u64 {
    BALLAST_MIN.max(live.saturating_add(live / 2))
}

/// Makes a ballast of the right size, where that leaves enough room for everything else. One that
/// is up to four times as large as it should be is left.
pub(super) fn lay(disk: &dyn Disk, live: u64) -> io::Result<()> {
    let wanted = ballast_bytes(live);
    let there = disk.find(BALLAST_NAME)?.map_or(0, |found| found.len);
    if there >= wanted && there / 4 <= wanted {
        return Ok(());
    }
    let room = disk.free()?.saturating_add(there);
    if room < wanted.saturating_add(LOW) {
        return Ok(());
    }
    disk.remove(BALLAST_NAME)?;
    disk.allocate(BALLAST_NAME, wanted).inspect_err(|_| {
        // A part of it would only take room.
        drop(disk.remove(BALLAST_NAME));
    })
}

/// Gives the ballast's room away. Says whether there was one.
pub(super) fn give_way(disk: &dyn Disk) -> bool {
    let there = matches!(disk.find(BALLAST_NAME), Ok(Some(_)));
    there && disk.remove(BALLAST_NAME).is_ok()
}

/// The space as last looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    looked: Instant,
    space: Space,
    laid: Instant,
}

impl Watch {
    pub fn new(disk: &dyn Disk, now: Instant) -> Self {
        Self {
            looked: now,
            space: space(disk),
            laid: now,
        }
    }

    /// The space, at most a second old. Now and then a ballast that was given away, or that the
    /// store has outgrown, is made anew.
    pub fn look(&mut self, disk: &dyn Disk, live: u64, now: Instant) -> Space {
        if now.duration_since(self.looked) >= LOOK_EVERY {
            if now.duration_since(self.laid) >= LAY_EVERY {
                self.laid = now;
                if let Err(error) = lay(disk, live) {
                    tracing::warn!(%error, "no ballast could be laid beside the store");
                }
            }
            self.looked = now;
            self.space = space(disk);
        }
        self.space
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::FsDisk;
    use super::*;

    /// DUR4: the room is looked at once a second, and a ballast that was given away, or that the
    /// store has outgrown, is laid again while the store is open.
    #[test]
    fn the_ballast_comes_back_and_grows() {
        let directory = tempfile::tempdir().unwrap();
        let disk = FsDisk::new(directory.path());
        let begin = Instant::now();
        let mut watch = Watch::new(&disk, begin);
        let size = || disk.find(BALLAST_NAME).unwrap().map(|found| found.len);
        let free = disk.free().unwrap();
        let fits = free > 4 * LOW;
        let first = watch.look(&disk, 0, begin + LOOK_EVERY / 2);
        assert_eq!((first, size()), (watch.space, None));
        watch.look(&disk, 0, begin + LOOK_EVERY);
        assert_eq!(size(), None, "not yet");
        watch.look(&disk, 0, begin + LAY_EVERY);
        assert_eq!(size(), fits.then_some(BALLAST_MIN));
        assert_eq!(give_way(&disk), fits);
        assert!(!give_way(&disk));
        watch.look(&disk, BALLAST_MIN, begin + 2 * LAY_EVERY);
        assert_eq!(size(), fits.then_some(BALLAST_MIN / 2 * 3));
    }

    /// DUR4: 32 MiB at least, and one and a half times the live bytes.
    #[test]
    fn the_ballast_is_as_large_as_a_rewrite_needs() {
        assert_eq!(ballast_bytes(0), 32 << 20);
        assert_eq!(ballast_bytes(20 << 20), 32 << 20);
        assert_eq!(ballast_bytes(40 << 20), 60 << 20);
        assert_eq!(ballast_bytes(u64::MAX), u64::MAX);
    }
}
