//! The service in this process: a real store in a temporary directory, a real port, readings by hand.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvgate::access::{Access, TokenSet};
use kvgate::clock::Clock;
use kvgate::config::Origins;
use kvgate::gate::{self, Gate, GateError, Phase, WriterConfig};
use kvgate::history::History;
use kvgate::http::{
    self, App, Endpoint, FleetDetails, HttpConfig, Limits, Listener, ShellNotice, Tls,
};
use kvgate::store;
use kvgate::web;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallResult, EngineCall};
use kvgate_core::command::Acquire;
use kvgate_core::decision::Scope;
use kvgate_core::ids::{EngineId, SessionId, TicketId};
use kvgate_core::policy::Policy;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::store::{Opened, StoreControl};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Span, Tokens};
use kvgate_core::view::View;
use reqwest::header::HeaderMap;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Longest time that a test waits for something that must happen.
pub const SOON: Duration = Duration::from_secs(30);

/// What the service is started with.
pub struct Builder {
    pub policy: Policy,
    pub engines: Vec<(&'static str, u64)>,
    pub limits: Limits,
    pub allowed_hosts: Vec<&'static str>,
    /// Text of a token file; everybody is let in without.
    pub tokens: Option<&'static str>,
    pub metrics_auth: bool,
    /// Without progress of the writer for longer, `/healthz` fails.
    pub stuck_after: Span,
    /// Where configured settings come from.
    pub origins: Origins,
    /// The port speaks TLS.
    pub tls: Option<Arc<Tls>>,
    /// The start returns what was set at run time to what is configured.
    pub resets: bool,
    /// Feed the first round, so that the service is ready when it is handed out.
    pub ready: bool,
}

/// An acquire as a caller in process makes it, of session `s` in scope train.
pub fn asking(ticket: &str, tokens: u64, stays: bool) -> Acquire {
    Acquire {
        ticket: TicketId::new(ticket).unwrap(),
        session: SessionId::new("s").unwrap(),
        sent: Sent::Sum(Tokens::new(tokens).unwrap()),
        scope: Scope::Train,
        protected: false,
        ttl: Span::from_secs(600),
        client: None,
        request_id: None,
        stays,
    }
}

/// A request to post JSON, byte by byte, for a connection of its own.
pub fn post_bytes(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

impl Default for Builder {
    /// Admission on, all of one engine with 1,000 tokens may be reserved, and readings stay fresh.
    fn default() -> Self {
        Self {
            policy: Policy {
                program_admission: true,
                headroom: Ppm::ONE,
                max_wait: Span::from_secs(600),
                stale_after: Span::from_secs(3_600),
                ..Policy::default()
            },
            engines: vec![("http://engine-1:30000", 1_000)],
            limits: Limits::default(),
            allowed_hosts: Vec::new(),
            tokens: None,
            metrics_auth: false,
            stuck_after: http::STUCK_AFTER,
            origins: Origins::default(),
            tls: None,
            resets: false,
            ready: true,
        }
    }
}

/// The running service. Dropped, it stops.
pub struct TestApp {
    pub gate: Gate,
    pub access: Access,
    pub address: SocketAddr,
    pub client: reqwest::Client,
    pub fleet: watch::Sender<Arc<FleetDetails>>,
    pub notices: watch::Sender<Vec<ShellNotice>>,
    /// Nothing is sampled unless a test asks for it.
    pub history: History,
    pub stop: CancellationToken,
    pub server: Option<JoinHandle<()>>,
    /// Ends when the store was opened for the first time.
    store_is_open: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    _directory: Option<tempfile::TempDir>,
}

/// An answer that was read whole.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub async fn of(response: reqwest::Response) -> Self {
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let text = response.text().await.unwrap();
        Self {
            status,
            headers,
            text,
        }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub fn seq(&self) -> Option<u64> {
        self.header("kvgate-seq").map(|seq| seq.parse().unwrap())
    }

    /// Asserts that this is a problem in the form of RFC 9457 with this status and code.
    #[track_caller]
    pub fn is_problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json"),
            "{}",
            self.text
        );
        let problem = self.json();
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["status"], status, "{problem}");
        assert_eq!(problem["type"], format!("/problems/{code}"));
        assert!(
            !problem["title"].as_str().unwrap().is_empty()
                && !problem["detail"].as_str().unwrap().is_empty()
        );
        assert_eq!(problem["instance"].as_str(), self.header("x-request-id"));
        assert_eq!(status == 503, self.header("retry-after").is_some());
        assert_eq!(
            status == 401,
            self.header("www-authenticate") == Some("Bearer")
        );
        problem
    }
}

/// A client that shows every answer as it came.
fn client() -> reqwest::Client {
    let client = reqwest::Client::builder().no_proxy();
    let client = client.redirect(reqwest::redirect::Policy::none());
    client.build().unwrap()
}

fn salt() -> u64 {
    getrandom::u64().unwrap()
}

impl Builder {
    /// On a real store in a temporary directory.
    pub async fn start(self) -> TestApp {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let mut app = self.start_on(move || store::open(&path)).await;
        app._directory = Some(directory);
        app
    }

    /// On whatever store `open` gives.
    pub async fn start_on<S, O>(self, open: O) -> TestApp
    where
        S: StoreControl + Send + 'static,
        S::Error: std::fmt::Display,
        S::OpenError: std::fmt::Debug,
        O: FnMut() -> Result<Opened<S>, S::OpenError> + Send + 'static,
    {
        // Every client of the process shares one provider; another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let endpoint = Endpoint::Tcp((Ipv4Addr::LOCALHOST, 0).into());
        let listener = Listener::bind(&endpoint).unwrap().with_tls(self.tls);
        let address = listener.port().unwrap();
        let config = WriterConfig {
            policy: self.policy.validated().unwrap(),
            reset_settings: self.resets,
            fleet: FleetConfig {
                has_router: false,
                static_engines: self
                    .engines
                    .iter()
                    .map(|(engine, _)| EngineId::new(engine))
                    .collect::<BTreeSet<_>>(),
            },
            salts: salt,
            recorder: None,
        };
        let (gate, opened) = gate::spawn::<S, O>(config, Clock::start(), open).unwrap();
        let (fleet, fleet_receiver) = watch::channel(Arc::new(FleetDetails::default()));
        let (notices, notices_receiver) = watch::channel(Vec::new());
        let access = match self.tokens {
            Some(text) => Access::by(TokenSet::parse(text).unwrap()),
            None => Access::open(),
        };
        let allowed_hosts = self.allowed_hosts.iter();
        let config = HttpConfig {
            bound: vec![address],
            allowed_hosts: allowed_hosts.map(|host| host.parse().unwrap()).collect(),
            access: access.clone(),
            metrics_auth: self.metrics_auth,
            default_ttl: Span::from_secs(600),
            configured: Vec::new(),
            stuck_after: self.stuck_after,
            origins: self.origins,
        };
        let history = History::default();
        let app = App::new(
            gate.clone(),
            config,
            fleet_receiver,
            notices_receiver,
            history.clone(),
            salt(),
        );
        let stop = CancellationToken::new();
        let router = http::router(app.clone(), web::routes(app.clone()));
        let server = tokio::spawn(http::serve(
            vec![listener],
            app,
            router,
            self.limits,
            stop.clone(),
        ));
        let mut app = TestApp {
            gate,
            access,
            address,
            client: client(),
            fleet,
            notices,
            history,
            stop,
            server: Some(server),
            store_is_open: Some(Box::pin(async { opened.await.unwrap().unwrap() })),
            _directory: None,
        };
        if self.ready {
            app.make_ready(&self.engines).await;
        }
        app
    }
}

impl TestApp {
    pub async fn start() -> Self {
        Builder::default().start().await
    }

    /// Waits until the store is open, and feeds the first round.
    pub async fn make_ready(&mut self, engines: &[(&str, u64)]) {
        self.store_is_open.take().unwrap().await;
        self.feed(engines).await;
        let mut phases = self.gate.phases();
        let ready = phases.wait_for(|phase| *phase == Phase::Ready);
        tokio::time::timeout(SOON, ready).await.unwrap().unwrap();
    }

    /// Hands in a reading round in which every engine has this capacity and does nothing.
    pub async fn feed(&self, engines: &[(&str, u64)]) {
        self.try_feed(engines).await.unwrap();
    }

    /// The same where the store may be away.
    pub async fn try_feed(&self, engines: &[(&str, u64)]) -> Result<(), GateError> {
        let readings = engines
            .iter()
            .map(|(engine, capacity)| (EngineId::new(engine), Ok(reading(*capacity))))
            .collect();
        let round = Round {
            began_at: self.gate.line().unwrap().now(),
            router: None,
            readings,
            start_marks: Vec::new(),
        };
        self.gate.round(round).await
    }

    /// Hands in a round in which an engine works and uses so many millionths of its capacity.
    pub async fn feed_usage(&self, engine: &str, capacity: u64, millionths: u32) {
        let usage = Ppm::clamped(millionths);
        let capacity = Tokens::new(capacity).unwrap();
        let reading = Reading {
            usage: Some(usage),
            used: Some(capacity.share(usage)),
            running: Some(1),
            ..Reading::idle(capacity)
        };
        let round = Round {
            began_at: self.gate.line().unwrap().now(),
            router: None,
            readings: vec![(EngineId::new(engine), Ok(reading))],
            start_marks: Vec::new(),
        };
        self.gate.round(round).await.unwrap();
    }

    /// Waits until the picture of the gate is so.
    pub async fn until(&self, so: impl FnMut(&View) -> bool) {
        let mut views = self.gate.views();
        let mut so = so;
        let seen = views.wait_for(|view| so(view));
        tokio::time::timeout(SOON, seen)
            .await
            .expect("the gate never came into this state")
            .unwrap();
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        Answer::of(request.timeout(SOON).send().await.unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.client.get(self.url(path))).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.client.delete(self.url(path))).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.client.post(self.url(path)).json(body)).await
    }

    /// A form as a page of the service sends it.
    pub fn form(&self, path: &str, fields: &[(&str, &str)]) -> reqwest::RequestBuilder {
        let mut body = url::form_urlencoded::Serializer::new(String::new());
        let body = body.extend_pairs(fields).finish();
        let kind = "application/x-www-form-urlencoded";
        let request = self.client.post(self.url(path));
        request.header("content-type", kind).body(body)
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        self.send(self.client.patch(self.url(path)).json(body))
            .await
    }

    /// Posts a text as JSON, whatever it is.
    pub async fn post_text(&self, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        let request = self
            .client
            .post(self.url(path))
            .header("content-type", "application/json")
            .body(body);
        self.send(request).await
    }

    /// Acquires at once and gives back the body.
    pub async fn acquire(&self, ticket: &str, tokens: u64) -> Value {
        let answer = self
            .post(
                "/v1/leases",
                &serde_json::json!({"ticket_id": ticket, "session_id": "s", "reservation_tokens": tokens, "wait_s": 0}),
            )
            .await;
        assert!(matches!(answer.status, 200 | 202), "{}", answer.text);
        answer.json()
    }

    /// Everything that a refused request must leave as it is.
    pub async fn picture(&self) -> Value {
        let mut state = self.get("/v1/state").await.json();
        for moving in [
            "/store/bytes",
            "/store/commit_p99_s",
            "/queue/oldest_age_s",
            "/leases/oldest_age_s",
            "/started_at",
        ] {
            *state.pointer_mut(moving).unwrap() = Value::Null;
        }
        for notice in state["notices"].as_array_mut().unwrap() {
            // Shown by the present clock (TIM1), which may round to the next millisecond.
            notice["since"] = Value::Null;
        }
        let names = |list: Value, name: &str| -> Vec<Value> {
            let items = list["items"].as_array().unwrap();
            items.iter().map(|item| item[name].clone()).collect()
        };
        let leases = names(self.get("/v1/leases").await.json(), "lease_id");
        let queue = names(self.get("/v1/queue").await.json(), "ticket_id");
        let sessions = names(self.get("/v1/sessions").await.json(), "session_id");
        let closes = names(self.get("/v1/closes").await.json(), "close_id");
        serde_json::json!({
            "state": state, "leases": leases, "queue": queue, "sessions": sessions, "closes": closes,
            "seq": self.gate.view().seq.0, "tally": format!("{:?}", self.gate.view().tally)
        })
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends bytes as they are, on a connection of their own, and reads until the server closes.
    pub async fn raw(&self, request: &[u8]) -> Answer {
        let mut stream = self.connect().await;
        stream.write_all(request).await.unwrap();
        let mut bytes = Vec::new();
        tokio::time::timeout(SOON, stream.read_to_end(&mut bytes))
            .await
            .expect("the server did not close the connection")
            .unwrap();
        parse_raw(&bytes)
    }
}

impl Drop for TestApp {
    fn drop(&mut self) {
        self.gate.begin_drain();
        self.stop.cancel();
        if let Some(server) = &self.server {
            server.abort();
        }
    }
}

/// A stand-in for the engines: it takes what they are asked, and says what they answer.
pub struct EngineCalls {
    gate: Gate,
    calls: UnboundedReceiver<EngineCall>,
}

impl EngineCalls {
    pub fn of(app: &TestApp) -> Self {
        Self {
            gate: app.gate.clone(),
            calls: app.gate.take_calls().unwrap(),
        }
    }

    pub async fn next(&mut self) -> EngineCall {
        tokio::time::timeout(SOON, self.calls.recv())
            .await
            .expect("no engine was called")
            .unwrap()
    }

    /// Nothing was asked that was not taken.
    pub fn are_none(&mut self) -> bool {
        self.calls.try_recv().is_err()
    }

    pub fn answer(&self, call: &EngineCall, result: CallResult) {
        self.gate.called(vec![(call.id, result)]);
    }

    /// Takes the next call and answers it with a status.
    pub async fn answer_next(&mut self, code: u16, text: Option<&str>) -> EngineCall {
        let call = self.next().await;
        let text = text.map(Arc::from);
        self.answer(&call, CallResult::Status { code, text });
        call
    }

    /// Answers every call with 200 from here on.
    pub fn accept_all(mut self) {
        tokio::spawn(async move {
            while let Some(call) = self.calls.recv().await {
                let done = CallResult::Status {
                    code: 200,
                    text: None,
                };
                self.gate.called(vec![(call.id, done)]);
            }
        });
    }
}

fn reading(capacity: u64) -> Reading {
    Reading {
        usage: Some(Ppm::clamped(0)),
        used: Some(Tokens::ZERO),
        ..Reading::idle(Tokens::new(capacity).unwrap())
    }
}

/// One answer from the bytes of a connection that the server closed.
pub fn parse_raw(bytes: &[u8]) -> Answer {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text.as_str(), ""));
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap().split(' ').nth(1);
    let mut headers = HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap();
        headers.append(
            name.parse::<reqwest::header::HeaderName>().unwrap(),
            value.parse().unwrap(),
        );
    }
    Answer {
        status: status.unwrap_or("0").parse().unwrap(),
        headers,
        text: body.to_owned(),
    }
}
