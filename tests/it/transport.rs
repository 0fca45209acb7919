//! Attacks on the transport: what is too much, too slow, too long or no HTTP costs its sender the
//! connection, and nobody else anything.

use std::io::Write;
use std::time::Duration;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use kvgate::http::Limits;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use crate::support::app::{Answer, Builder, SOON, TestApp, parse_raw, post_bytes};

async fn reads_to_the_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut bytes))
        .await
        .expect("the connection was left open");
    bytes
}

/// Sends and reads until the server closes; a server that closes before it has read all may cut its
/// own answer, which then is empty.
async fn sent(app: &TestApp, request: &[u8]) -> Vec<u8> {
    let mut stream = app.connect().await;
    let _ = tokio::time::timeout(SOON, stream.write_all(request))
        .await
        .expect("nobody reads and nobody closes");
    reads_to_the_end(&mut stream).await
}

/// Sends the head, then pieces without an end, until the server has had enough.
async fn floods(mut stream: TcpStream, head: &[u8], piece: &[u8]) {
    let flood = async {
        stream.write_all(head).await?;
        loop {
            stream.write_all(piece).await?;
        }
    };
    let ended: std::io::Result<()> = tokio::time::timeout(SOON, flood)
        .await
        .expect("the flood went on");
    assert!(ended.is_err());
}

/// A caller of the usual kind gets a lease and gives it back.
async fn is_served(app: &TestApp) {
    let ticket = format!("served-{:x}", getrandom::u64().unwrap());
    let admit = app.acquire(&ticket, 1).await;
    let lease = admit["lease_id"].as_str().unwrap();
    assert_eq!(app.delete(&format!("/v1/leases/{lease}")).await.status, 200);
}

fn post(path: &str, headers: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n"
    )
}

/// Bodies in pieces that are none, lengths that contradict each other, and bodies that go on behind
/// their length: 400, and the connection ends, so that nothing of it is taken for a request.
#[tokio::test]
async fn bodies_that_are_no_bodies() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let chunked = "Transfer-Encoding: chunked\r\n";
    let body = r#"{"ticket_id":"t","session_id":"s","reservation_tokens":1}"#;
    for (headers, body) in [
        (chunked, "zz\r\n".to_owned()),
        (chunked, "-5\r\nabcde\r\n0\r\n\r\n".to_owned()),
        (chunked, "fffffffffffffffff\r\n".to_owned()),
        (chunked, format!("1{}\r\n", ";x=y".repeat(20_000))),
        (chunked, "5\r\nabcdefgh\r\n0\r\n\r\n".to_owned()),
        (chunked, format!("0\r\n{}\r\n", "x: y\r\n".repeat(5_000))),
        ("Content-Length: -1\r\n", String::new()),
        ("Content-Length: 99999999999999999999999\r\n", String::new()),
        (
            "Content-Length: 5\r\nContent-Length: 6\r\n",
            body.to_owned(),
        ),
        ("Transfer-Encoding: gzip\r\n", body.to_owned()),
        ("Transfer-Encoding: chunked, gzip\r\n", body.to_owned()),
    ] {
        let request = format!("{}{body}", post("/v1/leases", headers));
        let bytes = sent(&app, request.as_bytes()).await;
        // Of a long one the rest is on its way when the connection ends, which may cut the answer.
        if body.len() < 10_000 || !bytes.is_empty() {
            let answer = parse_raw(&bytes);
            assert_eq!(answer.status, 400, "{headers}{body:.60}: {}", answer.text);
        }
    }
    // What stands behind the announced length is no part of the body, and no request either.
    let longer = format!(
        "{}{body}{body}",
        post("/v1/leases", &format!("Content-Length: {}\r\n", body.len()))
    );
    let text = String::from_utf8(sent(&app, longer.as_bytes()).await).unwrap();
    let statuses: Vec<&str> = text.matches("HTTP/1.1 ").collect();
    assert_eq!(statuses.len(), 2, "{text}");
    assert!(
        text.starts_with("HTTP/1.1 200") && text.contains("HTTP/1.1 400"),
        "{text}"
    );
    app.delete("/v1/tickets/t").await;
    let after = app.picture().await;
    assert_eq!(after["leases"], before["leases"]);
    is_served(&app).await;
}

/// Heads of many headers, of an endless one, and requests without a line end.
#[tokio::test]
async fn heads_that_have_no_end() {
    let app = TestApp::start().await;
    let many = format!(
        "GET /v1/state HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        "a: b\r\n".repeat(4_000)
    );
    let many = sent(&app, many.as_bytes()).await;
    parse_raw(&many).is_problem(431, "invalid_request");
    for head in ["GET /v1/state HTTP/1.1\r\nHost: localhost\r\n", "GET /", ""] {
        floods(app.connect().await, head.as_bytes(), &[b'a'; 4_096]).await;
        floods(
            app.connect().await,
            head.as_bytes(),
            &b"a: b\r\n".repeat(700),
        )
        .await;
    }
    floods(app.connect().await, b"", &[0; 4_096]).await;
    is_served(&app).await;
}

/// Bodies without an end are read up to a bound, on calls that take a body and on those that take none.
#[tokio::test]
async fn bodies_that_have_no_end() {
    let app = TestApp::start().await;
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x1_0000], b"\r\n"].concat();
    for head in [
        post("/v1/leases", "Transfer-Encoding: chunked\r\n"),
        post("/v1/batch", "Transfer-Encoding: chunked\r\n"),
        post("/nothing", "Transfer-Encoding: chunked\r\n"),
        "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            .to_owned(),
    ] {
        floods(app.connect().await, head.as_bytes(), &chunk).await;
    }
    let announced = post("/v1/leases", "Content-Length: 1000000000000\r\n");
    let answer = parse_raw(&sent(&app, announced.as_bytes()).await);
    answer.is_problem(413, "body_too_large");
    is_served(&app).await;
}

/// Compressed bodies are refused by their header, before a byte of them is unpacked.
#[tokio::test]
async fn compressed_bodies_are_refused() {
    let app = TestApp::start().await;
    let zeros = vec![b' '; 1 << 20];
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    let mut deflate = ZlibEncoder::new(Vec::new(), Compression::best());
    for _ in 0..16 {
        gzip.write_all(&zeros).unwrap();
        deflate.write_all(&zeros).unwrap();
    }
    let gzip = gzip.finish().unwrap();
    let deflate = deflate.finish().unwrap();
    for (encoding, body) in [
        ("gzip", &gzip),
        ("x-gzip", &gzip),
        ("GZIP", &gzip),
        ("deflate", &deflate),
        ("br", &gzip),
        ("zstd", &gzip),
        ("identity, gzip", &gzip),
        ("", &gzip),
    ] {
        for path in ["/v1/leases", "/v1/batch", "/v1/wait", "/v1/steps"] {
            let request = app
                .client
                .post(app.url(path))
                .header("content-type", "application/json")
                .header("content-encoding", encoding)
                .body(body.clone());
            app.send(request)
                .await
                .is_problem(415, "unsupported_media_type");
        }
    }
    let twice = app
        .client
        .post(app.url("/v1/leases"))
        .header("content-type", "application/json")
        .header("content-encoding", "identity")
        .header("content-encoding", "gzip")
        .body(gzip);
    app.send(twice)
        .await
        .is_problem(415, "unsupported_media_type");
}

/// X05: at the bound of connections, bodies that stall are shed like heads that stall.
#[tokio::test]
async fn stalled_bodies_are_shed() {
    let app = Builder {
        limits: Limits {
            connections: 3,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let mut stalled = Vec::new();
    for _ in 0..3 {
        let head = post("/v1/leases", "Content-Length: 100\r\n");
        stalled.push(stalls(&app, &head, 1).await);
    }
    let get = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    for _ in 0..6 {
        assert_eq!(app.raw(get).await.status, 200);
    }
    assert_eq!(reads_to_the_end(&mut stalled[0]).await, b"");
}

/// A sender of a head and of a part of the body that it tells of.
async fn stalls(app: &TestApp, head: &str, bytes: usize) -> TcpStream {
    let mut stream = app.connect().await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![b' '; bytes]).await.unwrap();
    stream
}

/// Large bodies on their way fill the room for them: the next one is told to go on, calls of the usual
/// size are served, and there is room again when senders give up.
#[tokio::test]
async fn large_bodies_on_their_way_have_a_bound() {
    const ROOM: usize = 5 << 20;
    const BATCH: usize = 1 << 20;
    let app = Builder {
        limits: Limits {
            body_bytes: ROOM,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let head = post("/v1/batch", &format!("Content-Length: {BATCH}\r\n"));
    let operations = json!({"operations": [{"op": "cancel", "ticket_id": "t"}]}).to_string();
    let large = format!("{operations}{}", " ".repeat(BATCH - operations.len()));
    let mut stalled = Vec::new();
    // What was written is read soon, not at once: a call that was served meanwhile may have taken the room
    // of a stalled one, so that another takes its place.
    let refused = async {
        loop {
            while stalled.len() < ROOM / BATCH {
                stalled.push(stalls(&app, &head, BATCH - 1).await);
            }
            let answer = app.post_text("/v1/batch", large.clone()).await;
            if answer.status != 200 {
                return answer;
            }
            stalled.push(stalls(&app, &head, BATCH - 1).await);
        }
    };
    let refused: Answer = tokio::time::timeout(SOON, refused).await.unwrap();
    refused.is_problem(503, "overloaded");
    is_served(&app).await;
    drop(stalled);
    let served = async { while app.post_text("/v1/batch", large.clone()).await.status != 200 {} };
    tokio::time::timeout(SOON, served).await.unwrap();
}

/// A client that takes little, so that answers stay with the server.
async fn small_reader(app: &TestApp) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    socket.connect(app.address).await.unwrap()
}

const LARGE: &[u8] = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Requests one after the other without a look at the answers: the connection ends when nothing was
/// taken for a while, and others are served meanwhile.
#[tokio::test]
async fn readers_that_stall_are_cut() {
    let app = Builder {
        limits: Limits {
            stalled: Duration::from_millis(300),
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let mut floodings = JoinSet::new();
    for _ in 0..10 {
        floodings.spawn(floods(small_reader(&app).await, b"", LARGE));
    }
    is_served(&app).await;
    while let Some(ended) = floodings.join_next().await {
        ended.unwrap();
    }
    is_served(&app).await;
}

/// Answers that are not taken have a bound in all: those that take longest are cut, however patient
/// the server is with each of them, and only as many as needed.
#[tokio::test]
async fn answers_on_their_way_have_a_bound() {
    let size = TestApp::start().await.get("/openapi.json").await.text.len();
    let app = Builder {
        limits: Limits {
            stalled: Duration::from_secs(3_600),
            answer_bytes: size as u64 * 2,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let mut floodings = JoinSet::new();
    for _ in 0..5 {
        let stream = small_reader(&app).await;
        floodings.spawn(floods(stream, b"", LARGE));
    }
    for _ in 0..3 {
        tokio::time::timeout(SOON, floodings.join_next())
            .await
            .expect("nobody was cut")
            .unwrap()
            .unwrap();
    }
    is_served(&app).await;
    assert_eq!(floodings.len(), 2, "two answers fit");
}

fn waits(ticket: &str) -> Value {
    json!({"ticket_id": ticket, "session_id": "s", "reservation_tokens": 1, "wait_s": 60})
}

/// Section 9: a peer has its share of the waiting calls; beyond that each kind of call is answered at
/// once, the ticket has its place, and a call that ends gives its place back.
#[tokio::test]
async fn waiting_calls_of_a_peer_have_a_bound() {
    let app = Builder {
        limits: Limits {
            waiting_per_peer: 2,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    app.acquire("held", 1_000).await;
    let mut calls = Vec::new();
    for number in 0..2_u64 {
        let mut call = app.connect().await;
        let body = waits(&format!("t-{number}"));
        call.write_all(&post_bytes("/v1/leases", &body))
            .await
            .unwrap();
        app.until(|view| view.waiting == number + 1).await;
        calls.push(call);
    }
    let told = app.post("/v1/leases", &waits("t-2")).await;
    assert_eq!((told.status, &told.json()["position"]), (202, &json!(3)));
    assert!(
        told.json()["poll_after_s"].as_f64().unwrap() > 0.0,
        "it is not to ask again at once"
    );
    let many = json!({"ticket_ids": ["t-2"], "wait_s": 60});
    let told = app.post("/v1/wait", &many).await;
    assert_eq!((told.status, &told.json()["results"]), (202, &json!([])));

    app.delete("/v1/tickets/t-0").await;
    let cancelled = parse_raw(&reads_to_the_end(&mut calls[0]).await);
    assert_eq!(cancelled.json()["reason"], "cancelled");
    let mut waiting = app.connect().await;
    waiting
        .write_all(&post_bytes("/v1/wait", &many))
        .await
        .unwrap();
    while app.gate.waiting_calls() < 2 {
        tokio::task::yield_now().await;
    }
    app.delete("/v1/tickets/held").await;
    let decided = parse_raw(&reads_to_the_end(&mut waiting).await);
    assert_eq!(decided.json()["results"][0]["action"], "admit");
}
