//! Programs of others as child processes: routers, engines, installers.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// Between two looks at what is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Bytes of a log that a failure shows.
const TAIL_BYTES: u64 = 6_000;

/// A child with its output in a file; it ends with this.
pub struct Process {
    child: Child,
    folder: TempDir,
}

impl Process {
    pub fn start(mut command: Command) -> Self {
        let folder = TempDir::new().unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}"));
        Self { child, folder }
    }

    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// The end of its output.
    pub fn tail(&self) -> String {
        let mut log = File::open(self.folder.path().join("log")).unwrap();
        let length = log.metadata().unwrap().len();
        let from = length.saturating_sub(TAIL_BYTES);
        log.seek(SeekFrom::Start(from)).unwrap();
        let mut tail = Vec::new();
        log.take(TAIL_BYTES).read_to_end(&mut tail).unwrap();
        String::from_utf8_lossy(&tail).into_owned()
    }

    /// Waits for the end; whether it went well.
    pub async fn success(&mut self, patience: Duration) -> bool {
        let began = Instant::now();
        let mut looks = looks();
        while began.elapsed() < patience {
            looks.tick().await;
            if let Some(status) = self.ended() {
                return status.success();
            }
        }
        false
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // fails when it has ended already
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ticks for looking at what is waited for.
pub fn looks() -> Interval {
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks
}

/// Runs a command to its good end.
pub async fn must(command: Command, patience: Duration) {
    let what = format!("{command:?}");
    let mut process = Process::start(command);
    let went_well = process.success(patience).await;
    let ended = process.ended();
    assert!(
        went_well,
        "{what}: {}\n{}",
        ended.map_or("not ended in time".to_owned(), |status| status.to_string()),
        process.tail()
    );
}

/// Ports that were free a moment ago; never the same.
pub fn free_ports() -> [u16; 2] {
    [(); 2]
        .map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
        .map(|listener| listener.local_addr().unwrap().port())
}
