//! Where the real binary listens: a port that a killed process still holds, Unix sockets, TLS.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::support::app::{Answer, SOON, parse_raw, post_bytes};
use crate::support::process::{Kvgate, command};
use crate::support::tls::Identity;

/// A service that starts in the instant after a kill finds port and store held by the process that
/// dies, and has both a moment later.
#[tokio::test]
async fn a_start_right_after_a_kill_takes_the_same_port() {
    let data = tempfile::tempdir().unwrap();
    let store = data.path().to_str().unwrap();
    let mut gate = Kvgate::serve(data.path(), &[]);
    let address = gate.address().to_string();
    for _ in 0..5 {
        gate.signal("KILL");
        let mut next = Kvgate::start(&[
            "serve",
            "--listen",
            &address,
            "--data",
            store,
            "--log-format",
            "json",
        ]);
        next.wait_for_log("ready");
        assert_eq!(next.address().to_string(), address);
        gate = next;
    }
}

/// Sends bytes over a Unix socket and reads until the server closes.
async fn over(socket: &Path, request: &[u8]) -> Answer {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut bytes = Vec::new();
    tokio::time::timeout(SOON, stream.read_to_end(&mut bytes))
        .await
        .expect("the server did not close the connection")
        .unwrap();
    parse_raw(&bytes)
}

/// A Unix socket beside a port: both answer, both are written down in their order, the socket is its
/// owner's only, a caller that waits on it is answered at a stop, and then it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_beside_a_port() {
    let fleet = super::fleet().await;
    let data = tempfile::tempdir().unwrap();
    let socket = data.path().join("gate.sock");
    let listen = format!("unix:{}", socket.display());
    let router = fleet.router_url();
    let arguments = [
        "--listen",
        &listen,
        "--router",
        &router,
        "--program-admission",
    ];
    let gate = Kvgate::serve(data.path(), &arguments);
    let written = fs::read_to_string(data.path().join("address")).unwrap();
    assert_eq!(written, format!("{}\n{listen}\n", gate.address()));
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);

    let ask = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 900_000});
    let admit = over(&socket, &post_bytes("/v1/leases", &ask)).await;
    assert_eq!(admit.json()["action"], "admit");
    assert_eq!(gate.list("/v1/leases").await.len(), 1);
    for (head, status) in [
        (
            "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            200,
        ),
        ("GET /v1/state HTTP/1.0\r\n\r\n", 200),
        (
            "GET /v1/state HTTP/1.1\r\nHost: attacker.example\r\nConnection: close\r\n\r\n",
            421,
        ),
    ] {
        assert_eq!(
            over(&socket, head.as_bytes()).await.status,
            status,
            "{head}"
        );
    }

    let ask = json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
    let waiting = tokio::spawn({
        let socket = socket.clone();
        async move { over(&socket, &post_bytes("/v1/leases", &ask)).await }
    });
    while gate.get("/v1/state").await["queue"]["waiting"] != 1 {}
    let ended = tokio::task::spawn_blocking(move || gate.terminate());
    waiting.await.unwrap().is_problem(503, "draining");
    assert!(ended.await.unwrap().success());
    assert!(!socket.exists(), "it goes with the service");
}

/// A socket that a killed process left behind is replaced; one that is answered on, and a file that is
/// no socket, are refused with 69 and stay as they are.
#[tokio::test]
async fn a_unix_socket_replaces_a_stale_one_only() {
    let data = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let socket = data.path().join("gate.sock");
    let listen = format!("unix:{}", socket.display());
    Kvgate::serve(data.path(), &["--listen", &listen]).kill();
    assert!(socket.exists());
    let gate = Kvgate::serve(data.path(), &["--listen", &listen]);
    let get = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(over(&socket, get).await.status, 200);

    let refused = |listen: &str| {
        let output = command(&["serve", "--listen", listen, "--data"])
            .arg(other.path())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&listen).contains("in use"));
    assert_eq!(over(&socket, get).await.status, 200, "{}", gate.log_text());
    let file = data.path().join("notes");
    fs::write(&file, "kept").unwrap();
    assert!(refused(&format!("unix:{}", file.display())).contains("no socket"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
}

/// TLS of the real binary: the log and the address file say so, SIGHUP renews the certificate, and
/// files that cannot be used end the start with 2, or change nothing later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_and_a_renewed_certificate() {
    let data = tempfile::tempdir().unwrap();
    let secrets = tempfile::tempdir().unwrap();
    let (first, second) = (Identity::new(), Identity::new());
    let files = first.write(secrets.path());
    let (cert, key) = (
        files.certificate.to_str().unwrap(),
        files.key.to_str().unwrap(),
    );
    let arguments = ["--tls-cert", cert, "--tls-key", key];
    let mut gate = Kvgate::serve(data.path(), &arguments);
    let address = gate.address();
    let written = fs::read_to_string(data.path().join("address")).unwrap();
    assert_eq!(written, format!("https://{address}\n"));
    assert!(gate.log_text().contains("can be read by everybody"));
    let state = first.get(address, "/v1/state").await.unwrap();
    assert!(state.json()["budget"].is_object());

    second.write(secrets.path());
    gate.signal("HUP");
    gate.wait_for_log("the certificate was read anew");
    assert!(first.get(address, "/healthz").await.is_err());
    assert_eq!(second.get(address, "/healthz").await.unwrap().status, 200);

    fs::write(&files.key, "no key").unwrap();
    gate.signal("HUP");
    let line: Value = gate.wait_for_log("the certificate stays as it was");
    assert!(
        line["fields"]["error"]
            .as_str()
            .unwrap()
            .contains("tls_key")
    );
    assert_eq!(second.get(address, "/healthz").await.unwrap().status, 200);
    assert!(gate.terminate().success());

    for arguments in [
        ["--tls-cert", cert, "--tls-key", key].as_slice(),
        &["--tls-cert", cert],
        &["--tls-key", key],
    ] {
        let output = command(&["serve", "--listen", "127.0.0.1:0", "--data"])
            .arg(data.path())
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("tls_key"), "{text}");
    }
}
