//! What the machine gives by itself, so that figures of different machines and hours can be compared.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use redb::{Database, TableDefinition};
use serde::Serialize;

use super::LoadError;
use super::figures::{millis, rounded};
use super::scenario::histogram;

/// What is appended between two syncs.
const BLOCK: [u8; 4_096] = [7; 4_096];
/// One row, as large as that of a ticket with ids of 36 and 17 letters.
const ROW: [u8; 160] = [7; 160];
const ROWS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("rows");

/// Above this a sync says more of others on the disk than of the disk, in milliseconds.
const QUIET_SYNC_MS: f64 = 1.0;
/// Above this others take the processors.
const QUIET_LOAD: f64 = 3.0;

/// What a run stands on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processors.
    pub cores: usize,
    /// Processes that ran or waited to run, as a mean of the last minute.
    pub load: f64,
    /// 4 KiB appended and synced.
    pub fdatasync_p50_ms: f64,
    /// The same.
    pub fdatasync_p99_ms: f64,
    /// The same, one after the other.
    pub fdatasync_per_s: f64,
    /// A transaction of redb with one row, durable.
    pub redb_commit_p50_ms: f64,
    /// The same.
    pub redb_commit_p99_ms: f64,
    /// Whether figures are worth quoting.
    pub quiet: bool,
    /// Version of the program that measures.
    pub version: &'static str,
}

impl Machine {
    /// Measures on the disk of `folder`, for so long each.
    ///
    /// # Errors
    /// When the disk cannot be written.
    pub fn measure(folder: &Path, time: Duration) -> Result<Self, LoadError> {
        let load = load_average();
        let (syncs, took) = syncs(&folder.join("sync"), time)
            .map_err(|error| LoadError::io("the disk cannot be measured", error))?;
        let commits = commits(&folder.join("commit.redb"), time)
            .map_err(|error| LoadError::Disk(error.to_string()))?;
        let fdatasync_p50_ms = millis(&syncs, 0.5);
        Ok(Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load,
            fdatasync_p50_ms,
            fdatasync_p99_ms: millis(&syncs, 0.99),
            fdatasync_per_s: rounded(syncs.len() as f64 / took.as_secs_f64()),
            redb_commit_p50_ms: millis(&commits, 0.5),
            redb_commit_p99_ms: millis(&commits, 0.99),
            quiet: fdatasync_p50_ms < QUIET_SYNC_MS && load < QUIET_LOAD,
            version: env!("CARGO_PKG_VERSION"),
        })
    }
}

fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next();
    first.and_then(|load| load.parse().ok()).unwrap_or_default()
}

fn syncs(path: &Path, time: Duration) -> std::io::Result<(Histogram<u64>, Duration)> {
    let mut file = File::create(path)?;
    let mut nanos = histogram();
    let began = Instant::now();
    while began.elapsed() < time {
        let one = Instant::now();
        file.write_all(&BLOCK)?;
        file.sync_data()?;
        nanos.saturating_record(nanos_of(one));
    }
    let took = began.elapsed();
    fs::remove_file(path)?;
    Ok((nanos, took))
}

fn commits(path: &Path, time: Duration) -> Result<Histogram<u64>, redb::Error> {
    let database = Database::create(path)?;
    let mut nanos = histogram();
    let began = Instant::now();
    for number in 0.. {
        if began.elapsed() >= time {
            break;
        }
        let one = Instant::now();
        let transaction = database.begin_write()?;
        transaction
            .open_table(ROWS)?
            .insert(number, ROW.as_slice())?;
        transaction.commit()?;
        nanos.saturating_record(nanos_of(one));
    }
    drop(database);
    fs::remove_file(path)?;
    Ok(nanos)
}

fn nanos_of(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Processor time of a process so far; `None` when the system does not tell.
#[must_use]
pub fn processor_time(pid: u32) -> Option<Duration> {
    /// Of `/proc`, in which times are told: the same on every Linux.
    const TICKS_PER_S: u64 = 100;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, and ends with the last parenthesis.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let ticks = ticks()?.saturating_add(ticks()?);
    Some(Duration::from_millis(ticks * 1_000 / TICKS_PER_S))
}

/// Memory that a process holds, in bytes; `None` when the system does not tell.
#[must_use]
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_measured_and_nothing_stays() {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::measure(folder.path(), Duration::from_millis(20)).unwrap();
        assert!(machine.fdatasync_per_s > 0.0 && machine.redb_commit_p50_ms > 0.0);
        assert!(machine.cores > 0);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn this_process_has_used_time_and_memory() {
        let own = std::process::id();
        assert!(processor_time(own).is_some());
        assert!(resident_bytes(own).unwrap() > 1 << 20);
        assert_eq!(processor_time(u32::MAX), None);
        assert_eq!(resident_bytes(u32::MAX), None);
    }
}
