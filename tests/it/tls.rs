//! TLS of the service, with certificates that are made here: what it speaks, whom it waits for, and
//! how its certificate is renewed.

use std::sync::Arc;
use std::time::Duration;

use kvgate::http::{Limits, Tls, TlsError, TlsFiles};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::app::{Answer, Builder, SOON, TestApp, parse_raw, post_bytes};
use crate::support::tls::Identity;

/// The first bytes of a handshake that announces more than it sends.
const HALF_A_HANDSHAKE: &[u8] = &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01];

async fn over_tls(identity: &Identity, limits: Limits) -> (TestApp, Arc<Tls>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let tls = Arc::new(Tls::load(identity.write(directory.path())).unwrap());
    let app = Builder {
        limits,
        tls: Some(Arc::clone(&tls)),
        ..Builder::default()
    }
    .start()
    .await;
    (app, tls, directory)
}

/// What a client that speaks no TLS gets.
async fn in_the_clear(app: &TestApp, request: &[u8]) -> Vec<u8> {
    let mut stream = app.connect().await;
    stream.write_all(request).await.unwrap();
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut bytes))
        .await
        .expect("the connection was left open");
    bytes
}

#[tokio::test]
async fn calls_are_answered_over_tls() {
    let identity = Identity::new();
    let (app, ..) = over_tls(&identity, Limits::default()).await;
    let ask = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 5});
    let admit = identity
        .raw(app.address, &post_bytes("/v1/leases", &ask))
        .await
        .unwrap();
    assert_eq!(admit.json()["action"], "admit");
    // The answer arrived, so the grant is claimed and counted (TIC4).
    app.until(|view| view.leases == 1).await;
    let state = identity.get(app.address, "/v1/state").await.unwrap();
    assert_eq!(state.json()["budget"]["reserved"], 5);
    assert_eq!(
        state.header("strict-transport-security"),
        None,
        "a name is not bound to TLS by a service that may be reached through others"
    );
    let large = identity.get(app.address, "/openapi.json").await.unwrap();
    assert!(large.text.len() > 64 << 10 && large.json().is_object());
}

/// The protocol is HTTP/1.1: agreed on where a client asks, and nothing else is.
#[tokio::test]
async fn the_protocol_is_agreed_on() {
    let identity = Identity::new();
    let (app, ..) = over_tls(&identity, Limits::default()).await;
    let both = identity
        .connect(app.address, &["h2", "http/1.1"])
        .await
        .unwrap();
    let (_, agreed) = both.get_ref();
    assert_eq!(agreed.alpn_protocol(), Some(&b"http/1.1"[..]));
    let none = identity.connect(app.address, &[]).await.unwrap();
    assert_eq!(none.get_ref().1.alpn_protocol(), None);
    assert!(identity.connect(app.address, &["h2"]).await.is_err());
}

/// X03: over TLS the origin of the service's own pages begins with https.
#[tokio::test]
async fn an_origin_has_the_scheme_of_the_port() {
    let identity = Identity::new();
    let (app, ..) = over_tls(&identity, Limits::default()).await;
    for (scheme, status) in [("https", 200), ("http", 403)] {
        let address = app.address;
        let request = format!(
            "DELETE /v1/tickets/t HTTP/1.1\r\nHost: {address}\r\nOrigin: {scheme}://{address}\r\nConnection: close\r\n\r\n"
        );
        let answer = identity.raw(address, request.as_bytes()).await.unwrap();
        assert_eq!(answer.status, status, "{scheme}: {}", answer.text);
    }
}

/// A client that asks in the clear is told so; one that speaks something else is closed.
#[tokio::test]
async fn who_speaks_no_tls_is_told() {
    let identity = Identity::new();
    let (app, ..) = over_tls(&identity, Limits::default()).await;
    let request = b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answer: Answer = parse_raw(&in_the_clear(&app, request).await);
    let problem = answer.is_problem(400, "invalid_request");
    assert!(problem["detail"].as_str().unwrap().contains("https://"));
    // A first byte of a handshake, then nothing of the kind: an alert, and no word of HTTP.
    let garbage = in_the_clear(&app, &[[0x16].as_slice(), &[0xff; 200]].concat()).await;
    assert!(!garbage.starts_with(b"HTTP"), "{garbage:?}");
    assert_eq!(
        identity.get(app.address, "/healthz").await.unwrap().status,
        200
    );
}

/// X05: handshakes that stall or are cut hold nothing up, and have no longer than a head has.
#[tokio::test]
async fn handshakes_that_lead_nowhere_end() {
    let identity = Identity::new();
    let limits = Limits {
        head: Duration::from_millis(300),
        ..Limits::default()
    };
    let (app, ..) = over_tls(&identity, limits).await;
    for _ in 0..20 {
        let mut cut = app.connect().await;
        cut.write_all(HALF_A_HANDSHAKE).await.unwrap();
    }
    assert_eq!(in_the_clear(&app, HALF_A_HANDSHAKE).await, b"");
    let mut silent = app.connect().await;
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(SOON, silent.read_to_end(&mut rest))
        .await
        .expect("a connection without a handshake was left open");
    // Agreed on, and silent since.
    let mut idle = identity.connect(app.address, &[]).await.unwrap();
    let _ = tokio::time::timeout(SOON, idle.read_to_end(&mut rest))
        .await
        .expect("a connection without a request was left open");
    assert!(rest.is_empty());
    assert_eq!(
        identity.get(app.address, "/healthz").await.unwrap().status,
        200
    );
}

/// X05: at the bound of connections, one whose handshake never ends is shed.
#[tokio::test]
async fn an_unfinished_handshake_is_shed_first() {
    let identity = Identity::new();
    let limits = Limits {
        connections: 3,
        ..Limits::default()
    };
    let (app, ..) = over_tls(&identity, limits).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stalled = app.connect().await;
        stalled.write_all(HALF_A_HANDSHAKE).await.unwrap();
        held.push(stalled);
    }
    for _ in 0..4 {
        let answer = identity.get(app.address, "/v1/state").await.unwrap();
        assert_eq!(answer.status, 200);
    }
}

/// A renewed certificate is taken at a reload, by new connections; files that cannot be used change
/// nothing, and a connection keeps what it began with.
#[tokio::test]
async fn the_certificate_is_read_again() {
    let (first, second) = (Identity::new(), Identity::new());
    let (app, tls, directory) = over_tls(&first, Limits::default()).await;
    let mut kept = first.connect(app.address, &[]).await.unwrap();
    assert!(second.get(app.address, "/healthz").await.is_err());

    let files = second.write(directory.path());
    tls.reload().unwrap();
    assert!(first.get(app.address, "/healthz").await.is_err());
    assert_eq!(
        second.get(app.address, "/healthz").await.unwrap().status,
        200
    );

    std::fs::write(&files.key, &first.key).unwrap();
    assert!(matches!(tls.reload(), Err(TlsError::Pair(_))));
    std::fs::write(&files.certificate, "-----BEGIN CERTIFICATE-----\n").unwrap();
    assert!(tls.reload().is_err());
    std::fs::remove_file(&files.key).unwrap();
    assert!(tls.reload().is_err());
    assert_eq!(
        second.get(app.address, "/healthz").await.unwrap().status,
        200
    );

    kept.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut bytes = Vec::new();
    kept.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(parse_raw(&bytes).status, 200);
}

/// Each file that cannot be used is named with what it should hold.
#[test]
fn files_that_cannot_be_used_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (Identity::new(), Identity::new());
    let write = |certificate: &str, key: &str| -> String {
        let files = one.write(directory.path());
        std::fs::write(&files.certificate, certificate).unwrap();
        std::fs::write(&files.key, key).unwrap();
        Tls::load(files).unwrap_err().to_string()
    };
    let encrypted =
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let no_der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (text, name) in [
        (write("", &one.key), "tls_cert"),
        (write(&one.key, &one.key), "holds no certificate"),
        (write("-----BEGIN CERTIFICATE-----\n", &one.key), "tls_cert"),
        (write(no_der, &one.key), "cannot be used together"),
        (write(&one.certificate, ""), "tls_key"),
        (write(&one.certificate, &one.certificate), "tls_key"),
        (write(&one.certificate, encrypted), "unencrypted"),
        (write(&one.certificate, &other.key), "the key that belongs"),
    ] {
        assert!(text.contains(name), "{name}: {text}");
        assert!(!text.contains("PRIVATE KEY-----"), "{text}");
    }
    let absent = TlsFiles {
        certificate: directory.path().join("absent"),
        key: directory.path().join("absent"),
    };
    assert!(
        Tls::load(absent)
            .unwrap_err()
            .to_string()
            .contains("absent")
    );
}
