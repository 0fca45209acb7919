//! The fleet room over real sockets: what it asks, what it refuses, and what it makes of odd answers.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, its helpers too"
)]

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Request, Response};
use futures_util::stream;
use kvgate::fleet::address::BaseUrl;
use kvgate::fleet::close_support::CloseSupport;
use kvgate::fleet::dialect::Prefix;
use kvgate::fleet::fetch;
use kvgate::fleet::networks::Networks;
use kvgate::fleet::poller::{Poller, PollerConfig, RoundDetails};
use kvgate::fleet::rows::{BadEntryReason, RouterKind};
use kvgate::fleet::scrape::{ABSENT_FOR, METRICS_EVERY, Memory, Outcome, Scraper};
use kvgate::fleet::secret::Secret;
use kvgate_core::ids::EngineId;
use kvgate_core::reading::{ReadFailure, Round, RouterAnswer, RouterFailure, Source};
use kvgate_core::units::Timestamp;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;

const GAUGES: &str = "sglang:max_total_num_tokens 500000\nsglang:token_usage 0.4\n\
    sglang:kv_available_tokens 140000\nsglang:kv_evictable_tokens 350000\n\
    sglang:prompt_tokens_total 70\nsglang:generation_tokens_total 7\n";
const LOADS: &str = r#"{"loads":[{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"num_used_tokens":10,"num_total_tokens":30,"max_total_num_tokens":400000,"token_usage":0.25}]}"#;
const GZIP_33_MIB: &[u8] = include_bytes!("../fixtures/exposition/gzip-33-mib.txt.gz");

/// What a fake answers on one path.
#[derive(Clone)]
enum Reply {
    Text(u16, String),
    With(u16, &'static str, String),
    Gzip(&'static [u8]),
    /// No answer, ever.
    Hang,
    /// Half an answer, then the connection breaks.
    Cut,
    /// A body without an end.
    Endless,
}

fn ok(body: &str) -> Reply {
    Reply::Text(200, body.to_owned())
}

#[derive(Default)]
struct Book {
    replies: HashMap<&'static str, Reply>,
    asked: Vec<String>,
    headers: Vec<(String, String)>,
}

/// A fake router or engine on loopback; unknown paths are 404.
struct Fake {
    address: SocketAddr,
    book: Arc<Mutex<Book>>,
    task: JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    async fn start(replies: &[(&'static str, Reply)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let book = Arc::new(Mutex::new(Book::default()));
        book.lock().unwrap().replies.extend(replies.iter().cloned());
        let app = Router::new().fallback(answer).with_state(Arc::clone(&book));
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self {
            address,
            book,
            task,
        }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn engine(&self) -> EngineId {
        BaseUrl::parse(&self.url()).unwrap().engine()
    }

    fn set(&self, path: &'static str, reply: Reply) {
        self.book.lock().unwrap().replies.insert(path, reply);
    }

    /// The paths asked since the last call.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.book.lock().unwrap().asked)
    }

    fn header(&self, name: &str) -> Vec<String> {
        let book = self.book.lock().unwrap();
        book.headers
            .iter()
            .filter(|(key, _)| key == name)
            .map(|(_, value)| value.clone())
            .collect()
    }
}

async fn answer(State(book): State<Arc<Mutex<Book>>>, request: Request<Body>) -> Response<Body> {
    let reply = {
        let mut book = book.lock().unwrap();
        let asked = request.uri().path_and_query().unwrap().as_str();
        book.asked.push(asked.to_owned());
        for (name, value) in request.headers() {
            let value = value.to_str().unwrap().to_owned();
            book.headers.push((name.as_str().to_owned(), value));
        }
        book.replies.get(request.uri().path()).cloned()
    };
    let text = |status: u16| Response::builder().status(status);
    match reply {
        None => text(404).body(Body::empty()).unwrap(),
        Some(Reply::Text(status, body)) => text(status).body(body.into()).unwrap(),
        Some(Reply::With(status, name, value)) => text(status)
            .header(name, value)
            .body(Body::empty())
            .unwrap(),
        Some(Reply::Gzip(body)) => text(200)
            .header("content-encoding", "gzip")
            .body(body.into())
            .unwrap(),
        Some(Reply::Hang) => std::future::pending().await,
        Some(Reply::Cut) => {
            let pieces = [
                Ok(Bytes::from_static(b"sglang:max_total_num_tokens 5")),
                Err("cut"),
            ];
            text(200)
                .body(Body::from_stream(stream::iter(pieces)))
                .unwrap()
        }
        Some(Reply::Endless) => {
            let piece = Bytes::from(vec![b'\n'; 1 << 20]);
            let pieces = stream::repeat_with(move || Ok::<_, Infallible>(piece.clone()));
            text(200).body(Body::from_stream(pieces)).unwrap()
        }
    }
}

fn install_tls() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// Long enough for any answer that comes at all.
const PATIENT: Duration = Duration::from_secs(60);
/// For answers that never come.
const SHORT: Duration = Duration::from_millis(100);

fn scraper(timeout: Duration) -> Scraper {
    install_tls();
    let networks = Arc::new(Networks::default());
    Scraper {
        client: fetch::engine_client(Arc::clone(&networks)).unwrap(),
        networks,
        key: None,
        timeout,
        looks_for_routers: false,
    }
}

async fn read_once(engine: &Fake) -> Outcome {
    scraper(PATIENT)
        .read(&engine.engine(), &mut Memory::default(), Instant::now())
        .await
}

async fn metrics_failure(reply: Reply) -> ReadFailure {
    let engine = Fake::start(&[("/metrics", reply)]).await;
    read_once(&engine).await.reading.unwrap_err()
}

fn poller(config: PollerConfig) -> Poller {
    install_tls();
    Poller::new(PollerConfig {
        timeout: PATIENT,
        ..config
    })
    .unwrap()
}

fn behind(router: &Fake) -> PollerConfig {
    PollerConfig {
        router: Some(router.url().parse().unwrap()),
        ..PollerConfig::default()
    }
}

async fn round(poller: &mut Poller) -> (Round, RoundDetails) {
    poller.round(Timestamp::from_millis(7)).await
}

fn capacities(round: &Round) -> Vec<(EngineId, Option<u64>)> {
    let capacity = |reading: &Result<_, _>| {
        reading
            .as_ref()
            .ok()
            .map(|reading: &kvgate_core::reading::Reading| reading.capacity.get())
    };
    round
        .readings
        .iter()
        .map(|(engine, reading)| (engine.clone(), capacity(reading)))
        .collect()
}

/// CAP2: loads first; `/metrics` beside it gives what only it has, then every 10 s.
#[tokio::test]
async fn cap2_loads_with_metrics_beside() {
    let engine = Fake::start(&[("/v1/loads", ok(LOADS)), ("/metrics", ok(GAUGES))]).await;
    let (scraper, mut memory, start) = (scraper(PATIENT), Memory::default(), Instant::now());
    let first = scraper.read(&engine.engine(), &mut memory, start).await;
    let reading = first.reading.unwrap();
    assert_eq!(reading.source, Source::Loads);
    assert_eq!(
        (reading.capacity.get(), reading.running, reading.queued),
        (400_000, Some(2), Some(1))
    );
    assert_eq!(reading.evictable.map(|tokens| tokens.get()), Some(350_000));
    assert_eq!(reading.available.map(|tokens| tokens.get()), Some(140_000));
    assert_eq!(reading.counters.map(|counters| counters.prompt), Some(70));
    assert_eq!(first.details.committed.map(|tokens| tokens.get()), Some(30));
    assert_eq!(first.details.prefix, Some(Prefix::Colon));
    let mut asked = engine.asked();
    asked.sort();
    assert_eq!(
        asked,
        ["/metrics", "/server_info", "/v1/loads?include=core"]
    );

    let second = scraper
        .read(&engine.engine(), &mut memory, start + METRICS_EVERY / 2)
        .await
        .reading
        .unwrap();
    assert_eq!(engine.asked(), ["/v1/loads?include=core"]);
    assert_eq!(second.evictable.map(|tokens| tokens.get()), Some(350_000));
    assert_eq!(
        second.counters, None,
        "counters of an earlier round would hide that they stand still"
    );

    let third = scraper
        .read(&engine.engine(), &mut memory, start + METRICS_EVERY)
        .await
        .reading
        .unwrap();
    assert_eq!(engine.asked(), ["/v1/loads?include=core", "/metrics"]);
    assert!(third.counters.is_some());
}

/// CAP2: an engine without `/v1/loads` is read through `/metrics` and asked for loads only now and then.
#[tokio::test]
async fn cap2_metrics_alone() {
    let engine = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    let (scraper, mut memory, start) = (scraper(PATIENT), Memory::default(), Instant::now());
    let first = scraper.read(&engine.engine(), &mut memory, start).await;
    assert_eq!(first.reading.unwrap().source, Source::Metrics);
    assert_eq!(first.details.loads_failure, Some(ReadFailure::Status(404)));
    assert_eq!(
        engine.asked(),
        ["/v1/loads?include=core", "/metrics", "/server_info"]
    );
    let later = scraper
        .read(&engine.engine(), &mut memory, start + ABSENT_FOR / 2)
        .await;
    assert!(later.reading.unwrap().counters.is_some());
    assert_eq!(engine.asked(), ["/metrics"]);
    engine.set("/v1/loads", ok(LOADS));
    let again = scraper
        .read(&engine.engine(), &mut memory, start + ABSENT_FOR)
        .await;
    assert_eq!(again.reading.unwrap().source, Source::Loads);
}

/// CAP2: plain text is asked for, the key is sent as a bearer token, and no path begins with `//`.
#[tokio::test]
async fn cap2_what_is_sent() {
    let engine = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    let mut scraper = scraper(PATIENT);
    scraper.key = Some(Secret::new("key-1").unwrap());
    scraper
        .read(&engine.engine(), &mut Memory::default(), Instant::now())
        .await
        .reading
        .unwrap();
    assert!(engine.header("accept").contains(&"text/plain".to_owned()));
    assert_eq!(engine.header("authorization"), ["Bearer key-1"; 3]);
    assert!(engine.asked().iter().all(|path| !path.starts_with("//")));
}

/// CAP2: field case M08 and its like: each failure is told apart.
#[tokio::test]
async fn cap2_failures() {
    assert_eq!(
        metrics_failure(Reply::Text(404, String::new())).await,
        ReadFailure::MetricsOff
    );
    assert_eq!(
        metrics_failure(Reply::Text(401, String::new())).await,
        ReadFailure::KeyRefused(401)
    );
    assert_eq!(
        metrics_failure(Reply::Text(403, String::new())).await,
        ReadFailure::KeyRefused(403)
    );
    assert_eq!(
        metrics_failure(Reply::Text(503, String::new())).await,
        ReadFailure::Status(503)
    );
    assert_eq!(
        metrics_failure(ok("<html>\n<p>502</p>\n</html>\n")).await,
        ReadFailure::Unreadable
    );
    assert_eq!(metrics_failure(ok("")).await, ReadFailure::Missing);
    assert_eq!(metrics_failure(Reply::Cut).await, ReadFailure::Refused);
}

/// CAP2: what loads says counts where `/metrics` is unknown; a key that only loads wants costs nothing.
#[tokio::test]
async fn cap2_key_for_loads_only() {
    let engine = Fake::start(&[("/v1/loads", Reply::Text(401, String::new()))]).await;
    assert_eq!(
        read_once(&engine).await.reading,
        Err(ReadFailure::KeyRefused(401))
    );
    engine.set("/metrics", ok(GAUGES));
    let outcome = read_once(&engine).await;
    assert_eq!(outcome.reading.unwrap().capacity.get(), 500_000);
    assert_eq!(
        outcome.details.loads_failure,
        Some(ReadFailure::KeyRefused(401))
    );
}

/// CAP2: bodies are bounded, counted after unpacking.
#[tokio::test]
async fn cap2_bodies_are_bounded() {
    assert_eq!(
        metrics_failure(Reply::Endless).await,
        ReadFailure::Unreadable
    );
    assert_eq!(
        metrics_failure(Reply::Gzip(GZIP_33_MIB)).await,
        ReadFailure::Unreadable
    );
    assert_eq!(
        metrics_failure(Reply::Gzip(b"no gzip at all")).await,
        ReadFailure::Unreadable
    );
    let engine = Fake::start(&[("/v1/loads", Reply::Endless), ("/metrics", ok(GAUGES))]).await;
    assert_eq!(
        read_once(&engine).await.reading.unwrap().source,
        Source::Metrics
    );
    for info in [Reply::Endless, Reply::Gzip(GZIP_33_MIB)] {
        let engine = Fake::start(&[("/metrics", ok(GAUGES)), ("/server_info", info)]).await;
        let outcome = read_once(&engine).await;
        assert!(outcome.reading.is_ok() && outcome.details.server.is_none());
    }
    for (path, list) in [
        ("/workers", Reply::Endless),
        ("/workers", Reply::Gzip(GZIP_33_MIB)),
        ("/list_workers", Reply::Endless),
        ("/list_workers", Reply::Gzip(GZIP_33_MIB)),
    ] {
        let router = Fake::start(&[(path, list)]).await;
        let (found, _) = round(&mut poller(behind(&router))).await;
        let unreadable = RouterAnswer::Failed(RouterFailure::Unreadable);
        assert_eq!(found.router, Some(unreadable), "{path}");
    }
}

/// CAP2: an engine that hangs is a time-out, whatever path hangs; one that is not there is refused.
#[tokio::test]
async fn cap2_hang_and_no_listener() {
    for path in ["/v1/loads", "/metrics"] {
        let engine = Fake::start(&[(path, Reply::Hang)]).await;
        let outcome = scraper(SHORT)
            .read(&engine.engine(), &mut Memory::default(), Instant::now())
            .await;
        assert_eq!(outcome.reading, Err(ReadFailure::Timeout), "{path}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = EngineId::new(&format!("http://{}", listener.local_addr().unwrap()));
    drop(listener);
    let outcome = scraper(PATIENT)
        .read(&gone, &mut Memory::default(), Instant::now())
        .await;
    assert_eq!(outcome.reading, Err(ReadFailure::Refused));
}

/// CAP2: a `/server_info` that hangs does not spoil the reading.
#[tokio::test]
async fn cap2_optional_answers_spoil_nothing() {
    let engine = Fake::start(&[
        ("/v1/loads", ok(LOADS)),
        ("/metrics", Reply::Cut),
        ("/server_info", Reply::Hang),
    ])
    .await;
    let scraper = scraper(Duration::from_secs(2));
    let outcome = scraper
        .read(&engine.engine(), &mut Memory::default(), Instant::now())
        .await;
    assert_eq!(outcome.reading.unwrap().evictable, None);
    assert_eq!(outcome.details.metrics_failure, Some(ReadFailure::Refused));
    assert_eq!(outcome.start_mark, None);
}

/// CAP8: `/server_info` at least every 10 s, and at once when an engine answers again.
#[tokio::test]
async fn cap8_server_info_after_an_absence() {
    let info = |time: u32| {
        ok(&format!(
            r#"{{"startup_time":{time},"version":"0.5.23","api_key":"SECRET"}}"#
        ))
    };
    let engine = Fake::start(&[
        ("/v1/loads", ok(LOADS)),
        ("/metrics", ok(GAUGES)),
        ("/server_info", info(1)),
    ])
    .await;
    let (scraper, mut memory, start) = (scraper(PATIENT), Memory::default(), Instant::now());
    let first = scraper.read(&engine.engine(), &mut memory, start).await;
    assert!(first.start_mark.is_some());
    assert_eq!(
        first
            .details
            .server
            .as_ref()
            .and_then(|server| server.version.as_deref()),
        Some("0.5.23")
    );
    assert!(!format!("{first:?} {memory:?}").contains("SECRET"));
    let quiet = scraper.read(&engine.engine(), &mut memory, start).await;
    assert_eq!(quiet.start_mark, None);
    assert!(quiet.details.server.is_some());

    engine.set("/v1/loads", Reply::Text(503, String::new()));
    engine.set("/metrics", Reply::Text(503, String::new()));
    assert_eq!(
        scraper
            .read(&engine.engine(), &mut memory, start)
            .await
            .reading,
        Err(ReadFailure::Status(503))
    );
    engine.set("/v1/loads", ok(LOADS));
    engine.set("/metrics", ok(GAUGES));
    engine.set("/server_info", info(2));
    let back = scraper.read(&engine.engine(), &mut memory, start).await;
    assert!(back.start_mark.is_some());
    assert_ne!(back.start_mark, first.start_mark);
    assert!(back.reading.unwrap().counters.is_some());
}

/// CAP1, CAP2: field case X04: a redirect is a failed reading and is not followed.
#[tokio::test]
async fn cap1_redirects_are_not_followed() {
    let trap = Fake::start(&[("/latest/meta-data", ok(GAUGES))]).await;
    let to_trap = Reply::With(302, "location", format!("{}/latest/meta-data", trap.url()));
    assert_eq!(
        metrics_failure(to_trap.clone()).await,
        ReadFailure::Status(302)
    );
    let router = Fake::start(&[("/workers", to_trap)]).await;
    let (round, _) = round(&mut poller(behind(&router))).await;
    assert_eq!(
        round.router,
        Some(RouterAnswer::Failed(RouterFailure::Status(302)))
    );
    assert!(trap.asked().is_empty());
}

/// CAP1: link-local engines are listed and not contacted, as numbers and as names.
#[tokio::test]
async fn cap1_link_local_is_not_contacted() {
    let scraper = scraper(PATIENT);
    for engine in [
        "http://169.254.169.254",
        "http://[fe80::1]:30000",
        "http://[::ffff:169.254.169.254]",
    ] {
        let outcome = scraper
            .read(
                &EngineId::new(engine),
                &mut Memory::default(),
                Instant::now(),
            )
            .await;
        assert_eq!(outcome.reading, Err(ReadFailure::NotAllowed), "{engine}");
    }
}

/// CAP1: with engine networks given, a name that leads outside is not contacted either.
#[tokio::test]
async fn cap1_names_are_judged_where_they_lead() {
    let engine = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    let by_name = EngineId::new(&format!("http://localhost:{}", engine.address.port()));
    let poller_of = |network: &str| {
        poller(PollerConfig {
            engines: vec![by_name.clone()],
            networks: Networks::only(vec![network.parse().unwrap()]),
            ..PollerConfig::default()
        })
    };
    let (outside, _) = round(&mut poller_of("10.0.0.0/8")).await;
    assert_eq!(
        outside.readings,
        [(by_name.clone(), Err(ReadFailure::NotAllowed))]
    );
    assert!(engine.asked().is_empty());
    let (inside, _) = round(&mut poller_of("127.0.0.0/8")).await;
    assert_eq!(capacities(&inside), [(by_name.clone(), Some(500_000))]);
}

/// CAP1, CAP2: newcomers are read in the round that lists them; a rank is one engine.
#[tokio::test]
async fn cap1_newcomers_in_the_same_round() {
    let engine = Fake::start(&[("/v1/loads", ok(LOADS))]).await;
    let fixed = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    let list = format!(
        r#"{{"workers":[{{"id":"x","url":"{0}@0"}},{{"id":"y","url":"{0}@1"}},{{"url":"ftp://h"}}]}}"#,
        engine.url()
    );
    let router = Fake::start(&[("/workers", ok(&list))]).await;
    let mut poller = poller(PollerConfig {
        engines: vec![fixed.engine()],
        ..behind(&router)
    });
    let (first, details) = round(&mut poller).await;
    let mut expected = vec![
        (engine.engine(), Some(400_000)),
        (fixed.engine(), Some(500_000)),
    ];
    expected.sort();
    assert_eq!(capacities(&first), expected);
    assert_eq!(first.began_at, Timestamp::from_millis(7));
    assert_eq!(details.bad_entries.total, 1);
    assert_eq!(details.engines.len(), 2);
    assert_eq!(
        engine
            .asked()
            .iter()
            .filter(|path| path.starts_with("/v1/loads"))
            .count(),
        1
    );
    let Some(RouterAnswer::Workers(workers)) = first.router else {
        panic!("no workers")
    };
    assert_eq!((workers.len(), workers[0].worker_ids.len()), (1, 2));
}

/// CAP7: while the router is silent or its list is empty, the last known engines are still read.
#[tokio::test]
async fn cap7_silent_router_keeps_the_members() {
    let engine = Fake::start(&[("/v1/loads", ok(LOADS))]).await;
    let list = format!(r#"{{"workers":["{}"]}}"#, engine.url());
    let router = Fake::start(&[("/workers", ok(&list))]).await;
    let mut poller = poller(behind(&router));
    let known = [(engine.engine(), Some(400_000))];
    assert_eq!(capacities(&round(&mut poller).await.0), known);
    for (reply, expected) in [
        (
            Reply::Text(503, String::new()),
            RouterAnswer::Failed(RouterFailure::Status(503)),
        ),
        (
            ok(r#"{"workers":[],"total":0}"#),
            RouterAnswer::Workers(vec![]),
        ),
        (
            ok("<html>"),
            RouterAnswer::Failed(RouterFailure::Unreadable),
        ),
        (Reply::Cut, RouterAnswer::Failed(RouterFailure::Refused)),
        (
            Reply::Endless,
            RouterAnswer::Failed(RouterFailure::Unreadable),
        ),
    ] {
        router.set("/workers", reply);
        let (silent, _) = round(&mut poller).await;
        assert_eq!(silent.router, Some(expected));
        assert_eq!(capacities(&silent), known);
    }
    // an engine that left a good list is not read any more
    let other = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    router.set("/workers", ok(&format!(r#"["{}"]"#, other.url())));
    round(&mut poller).await;
    engine.asked();
    assert_eq!(
        capacities(&round(&mut poller).await.0),
        [(other.engine(), Some(500_000))]
    );
    assert!(engine.asked().is_empty());
}

/// CAP7: after a restart the stored members are read although the router does not answer in time.
#[tokio::test]
async fn cap7_stored_members_are_read() {
    let engine = Fake::start(&[
        ("/v1/loads", ok(LOADS)),
        ("/metrics", ok(GAUGES)),
        ("/server_info", ok("{}")),
    ])
    .await;
    let router = Fake::start(&[("/workers", Reply::Hang)]).await;
    install_tls();
    let config = PollerConfig {
        known: vec![engine.engine()],
        timeout: Duration::from_secs(2),
        ..behind(&router)
    };
    let (first, details) = round(&mut Poller::new(config).unwrap()).await;
    assert_eq!(
        first.router,
        Some(RouterAnswer::Failed(RouterFailure::Timeout))
    );
    assert_eq!(capacities(&first), [(engine.engine(), Some(400_000))]);
    assert_eq!(details.router_kind, Some(RouterKind::Unknown));
}

/// CLO10: the router's kind, by its rows, else by how `/list_workers` is missing.
#[tokio::test]
async fn clo10_router_kind() {
    let rows = |row: &str| ok(&format!("[{row}]"));
    let sglang = rows(r#"{"url":"ftp://x","connection_mode":"HTTP","metadata":{}}"#);
    let plain = rows("");
    let smg_404 = Reply::With(404, "x-smg-error-code", "unknown_url".to_owned());
    for (workers, list_workers, expected) in [
        (sglang, None, RouterKind::SglangRouter),
        (plain.clone(), Some(smg_404.clone()), RouterKind::Smg),
        (
            plain.clone(),
            Some(ok(r#"{"urls":[]}"#)),
            RouterKind::VllmRouter,
        ),
        (plain, None, RouterKind::Unknown),
    ] {
        let router = Fake::start(&[("/workers", workers)]).await;
        if let Some(reply) = list_workers {
            router.set("/list_workers", reply);
        }
        let mut poller = poller(behind(&router));
        assert_eq!(round(&mut poller).await.1.router_kind, Some(expected));
        // it is not asked for again at once, and what was told stands
        router.asked();
        assert_eq!(round(&mut poller).await.1.router_kind, Some(expected));
        assert_eq!(router.asked(), ["/workers"]);
    }
    // a router that is not up yet is asked with its first list, not a minute later
    let router = Fake::start(&[("/list_workers", smg_404)]).await;
    router.set("/workers", Reply::Text(503, String::new()));
    let mut poller = self::poller(behind(&router));
    let unknown = Some(RouterKind::Unknown);
    assert_eq!(round(&mut poller).await.1.router_kind, unknown);
    router.set("/workers", ok("[]"));
    let kind = round(&mut poller).await.1.router_kind;
    assert_eq!(kind, Some(RouterKind::Smg));
    // stored members of an earlier router are of no use without one
    let config = PollerConfig {
        known: vec![EngineId::new("http://127.0.0.1:9")],
        ..PollerConfig::default()
    };
    let (no_router, details) = round(&mut self::poller(config)).await;
    assert_eq!((no_router.router, details.router_kind), (None, None));
    assert!(no_router.readings.is_empty());
}

/// CLO10: an engine with a list of workers is a router. It is asked once, and again after an absence;
/// without session closes nobody asks.
#[tokio::test]
async fn clo10_an_engine_that_is_a_router() {
    let server = ok(r#"{"version":"0.5.23","enable_session_radix_cache":true}"#);
    let engine = Fake::start(&[
        ("/v1/loads", ok(LOADS)),
        ("/metrics", ok(GAUGES)),
        ("/server_info", server),
    ])
    .await;
    let asked = |engine: &Fake| {
        let asked = engine.asked();
        asked.iter().filter(|path| *path == "/workers").count()
    };
    let mut scraper = scraper(PATIENT);
    let (mut memory, start) = (Memory::default(), Instant::now());
    let support = scraper.read(&engine.engine(), &mut memory, start).await;
    assert_eq!(support.details.close_support, Some(CloseSupport::Lowers));
    assert_eq!(asked(&engine), 0);

    scraper.looks_for_routers = true;
    let mut memory = Memory::default();
    for times in [1, 0] {
        let outcome = scraper.read(&engine.engine(), &mut memory, start).await;
        assert_eq!(outcome.details.close_support, Some(CloseSupport::Lowers));
        assert_eq!(asked(&engine), times);
    }
    // An absence, and a router in its place, which passes everything else on to an engine.
    engine.set("/v1/loads", Reply::Text(503, String::new()));
    engine.set("/metrics", Reply::Text(503, String::new()));
    scraper.read(&engine.engine(), &mut memory, start).await;
    engine.set("/v1/loads", ok(LOADS));
    engine.set("/metrics", ok(GAUGES));
    let list = include_str!("../fixtures/router/vllm-router-0.1.17-workers-regular.json");
    engine.set("/workers", ok(list));
    let outcome = scraper.read(&engine.engine(), &mut memory, start).await;
    assert_eq!(outcome.details.close_support, Some(CloseSupport::Router));
    // One that does not say what it is has no verdict yet.
    engine.set("/workers", Reply::Cut);
    let outcome = scraper
        .read(&engine.engine(), &mut Memory::default(), start)
        .await;
    assert_eq!(outcome.details.close_support, None);
}

/// CLO10: the kinds of engines that have no session close at all.
#[tokio::test]
async fn clo10_kinds_without_session_close() {
    let vllm = include_str!("../fixtures/exposition/vllm-0.33.0-shape-single.txt");
    let engine = Fake::start(&[("/metrics", ok(vllm))]).await;
    let outcome = read_once(&engine).await;
    assert_eq!(outcome.details.close_support, Some(CloseSupport::Vllm));
    let side = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    let engine = EngineId::new(&format!("grpc://127.0.0.1:{}", side.address.port() - 1));
    let outcome = scraper(PATIENT)
        .read(&engine, &mut Memory::default(), Instant::now())
        .await;
    assert_eq!(outcome.details.close_support, Some(CloseSupport::Grpc));
}

/// CAP1, CLO4: a router that lists itself is no engine.
#[tokio::test]
async fn clo4_a_router_that_lists_itself() {
    let engine = Fake::start(&[("/v1/loads", ok(LOADS))]).await;
    let router = Fake::start(&[]).await;
    let list = format!(r#"["{}@0","{}"]"#, router.url(), engine.url());
    router.set("/workers", ok(&list));
    let mut poller = poller(PollerConfig {
        known: vec![router.engine()],
        ..behind(&router)
    });
    let (round, details) = round(&mut poller).await;
    assert_eq!(capacities(&round), [(engine.engine(), Some(400_000))]);
    let Some(RouterAnswer::Workers(workers)) = round.router else {
        panic!("no workers")
    };
    assert_eq!(workers.len(), 1);
    assert_eq!(details.bad_entries.total, 1);
    let bad = &details.bad_entries.shown[0];
    assert_eq!(
        (bad.raw.as_str(), bad.reason),
        (router.url().as_str(), BadEntryReason::RouterItself)
    );
    assert_eq!(
        router
            .asked()
            .iter()
            .filter(|path| path.starts_with("/v1"))
            .count(),
        0
    );
}

/// CAP2: gRPC engines show their gauges one port above their own.
#[tokio::test]
async fn cap2_grpc_side_port() {
    let side = Fake::start(&[("/metrics", ok(GAUGES))]).await;
    let engine = EngineId::new(&format!("grpc://127.0.0.1:{}", side.address.port() - 1));
    let outcome = scraper(PATIENT)
        .read(&engine, &mut Memory::default(), Instant::now())
        .await;
    assert_eq!(outcome.reading.unwrap().capacity.get(), 500_000);
    assert_eq!(side.asked(), ["/metrics"]);
}

/// CAP1: an engine behind a bracketed IPv6 address is read.
#[tokio::test]
async fn cap1_ipv6_engine() {
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        return; // this machine has no IPv6
    };
    let engine = EngineId::new(&format!("http://{}", listener.local_addr().unwrap()));
    let app = Router::new().fallback(|| async { GAUGES });
    let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let outcome = scraper(PATIENT)
        .read(&engine, &mut Memory::default(), Instant::now())
        .await;
    assert_eq!(outcome.reading.unwrap().capacity.get(), 500_000);
    task.abort();
}
