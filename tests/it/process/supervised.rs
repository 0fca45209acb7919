//! What the real binary tells systemd, over a socket of the test's own.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use super::fleet;
use crate::support::app::SOON;
use crate::support::process::{Kvgate, command};

struct Supervisor(UnixDatagram);

impl Supervisor {
    /// Reads words until this one comes; all that came before it.
    fn until(&self, word: &str) -> Vec<String> {
        let mut words = Vec::new();
        let mut buffer = [0; 4_096];
        loop {
            let bytes = self
                .0
                .recv(&mut buffer)
                .unwrap_or_else(|error| panic!("no {word} after {words:?}: {error}"));
            let text = std::str::from_utf8(&buffer[..bytes]).unwrap();
            words.extend(text.lines().map(str::to_owned));
            if words.iter().any(|said| said.starts_with(word)) {
                return words;
            }
        }
    }
}

/// A start that takes its time is told to be waited for; then ready, how it stands, alive while the
/// writer makes progress, and stopping.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_is_told() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let path = data.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let supervisor = Supervisor(socket);
    let mut start = command(&["serve", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    start
        .args([
            "--program-admission",
            "--router",
            &fleet.router_url(),
            "--data",
        ])
        .arg(data.path())
        .env("NOTIFY_SOCKET", &path)
        .env(
            "WATCHDOG_USEC",
            Duration::from_millis(100).as_micros().to_string(),
        );
    let gate = Kvgate::from(start);
    let before = supervisor.until("READY=1");
    assert!(
        before
            .iter()
            .any(|word| word == "EXTEND_TIMEOUT_USEC=60000000"),
        "{before:?}"
    );
    assert_eq!(gate.acquire("t", 5).await.action(), "admit");
    supervisor.until("STATUS=1 leases, 0 waiting, 2 engines");
    for _ in 0..3 {
        supervisor.until("WATCHDOG=1");
    }
    // A process that stands still feeds no watchdog.
    gate.stand_still();
    supervisor.0.set_nonblocking(true).unwrap();
    while supervisor.0.recv(&mut [0; 4_096]).is_ok() {}
    supervisor.0.set_nonblocking(false).unwrap();
    supervisor
        .0
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    assert!(supervisor.0.recv(&mut [0; 4_096]).is_err());
    supervisor.0.set_read_timeout(Some(SOON)).unwrap();
    gate.signal("CONT");
    supervisor.until("WATCHDOG=1");
    let ended = tokio::task::spawn_blocking(move || gate.terminate());
    let last = supervisor.until("STOPPING=1");
    assert!(
        last.iter().any(|word| word.starts_with("STATUS=stopping")),
        "{last:?}"
    );
    assert!(ended.await.unwrap().success());
}
