//! A fake router: the list of workers in the shape of several real routers, and a `/generate` that
//! goes to the least loaded engine.
//!
//! Promises: its rows are those of the fleet until a test sets others; paths that the real router
//! does not know answer as it does; placement happens here and nowhere else.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, Uri, header};
use axum::routing::{get, post};
use kvgate_sim::fleet::least_loaded;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::engines::FakeEngine;
use super::serve::{Behaviour, Door, RecordedRequest, cut_answer, lock};
use super::shapes::{self, RouterKind, WorkerRow};

/// The router of a fleet.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RouterSetup {
    /// Whose answers it imitates.
    pub kind: RouterKind,
    /// Key that it asks for.
    pub api_key: Option<String>,
}

struct Shared {
    setup: Mutex<RouterSetup>,
    engines: Vec<FakeEngine>,
    /// Rows in place of the fleet's own.
    rows: Mutex<Option<Vec<WorkerRow>>>,
    /// Base addresses that are left out of the list.
    delisted: Mutex<BTreeSet<String>>,
    http: reqwest::Client,
}

impl Shared {
    fn rows(&self) -> Vec<WorkerRow> {
        let mut rows = lock(&self.rows).clone().unwrap_or_else(|| self.own_rows());
        let delisted = lock(&self.delisted);
        rows.retain(|row| !delisted.contains(row.base_url()));
        rows
    }

    fn own_rows(&self) -> Vec<WorkerRow> {
        self.engines
            .iter()
            .zip(1_u64..)
            .map(|(engine, number)| {
                let gauges = engine.gauges();
                let id = format!("01a22867-0000-7000-8000-{number:012x}");
                WorkerRow {
                    load: gauges.running + gauges.queued,
                    ..WorkerRow::new(&id, &engine.url())
                }
            })
            .collect()
    }

    fn kind(&self) -> RouterKind {
        lock(&self.setup).kind
    }

    /// The answer to a call without the key, when the router asks for one.
    fn refused(&self, headers: &HeaderMap) -> Option<Response<Body>> {
        let setup = lock(&self.setup).clone();
        let expected = format!("Bearer {}", setup.api_key?);
        let given = headers.get(header::AUTHORIZATION);
        if given.is_some_and(|given| given.as_bytes() == expected.as_bytes()) {
            return None;
        }
        let refusal = json!({"error": {
            "message": "Missing API key: send it as `Authorization: Bearer <key>`",
            "type": "invalid_request_error",
            "param": null,
            "code": "invalid_api_key",
        }});
        match setup.kind {
            RouterKind::Smg => Some(json_answer(StatusCode::UNAUTHORIZED, &refusal)),
            // Asks nobody for a key here.
            RouterKind::VllmRouter => None,
            RouterKind::SglangRouter | RouterKind::ListWorkersOnly => {
                Some(empty(StatusCode::UNAUTHORIZED))
            }
        }
    }

    /// The answer of a path that the router does not know.
    fn unknown(&self, method: &str, path: &str) -> Response<Body> {
        if self.kind() != RouterKind::Smg {
            return empty(StatusCode::NOT_FOUND);
        }
        let body = json!({"error": {
            "type": "invalid_request_error",
            "code": "unknown_url",
            "message": format!("Invalid URL ({method} {path})"),
            "param": null,
        }});
        let mut answer = json_answer(StatusCode::NOT_FOUND, &body);
        let code = HeaderValue::from_static("unknown_url");
        answer.headers_mut().insert("x-smg-error-code", code);
        answer
    }

    async fn place(&self) -> Option<FakeEngine> {
        let rows = self.rows();
        let mut listed = Vec::new();
        for engine in &self.engines {
            let url = engine.url();
            let healthy = rows.iter().any(|row| row.healthy && row.base_url() == url);
            if healthy && engine.is_up().await {
                listed.push(engine);
            }
        }
        let place = least_loaded(listed.iter().map(|engine| engine.gauges()))?;
        listed.get(place).map(|engine| (*engine).clone())
    }
}

/// The handle of the fake router.
#[derive(Clone)]
pub struct FakeRouter {
    state: Arc<Shared>,
    door: Arc<Door>,
}

impl FakeRouter {
    pub(super) async fn start(
        setup: RouterSetup,
        engines: Vec<FakeEngine>,
        http: reqwest::Client,
        stop: &CancellationToken,
    ) -> io::Result<Self> {
        let state = Arc::new(Shared {
            setup: Mutex::new(setup),
            engines,
            rows: Mutex::new(None),
            delisted: Mutex::default(),
            http,
        });
        let app = Router::new()
            .route("/workers", get(workers))
            .route("/list_workers", get(list_workers))
            .route("/health", get(health))
            .route("/generate", post(generate))
            .fallback(unknown)
            .with_state(Arc::clone(&state));
        let door = Door::open(app, stop.clone()).await?;
        Ok(Self { state, door })
    }

    /// Its base address, `http://127.0.0.1:port`; the same for its whole life.
    #[must_use]
    pub fn url(&self) -> String {
        self.door.url()
    }

    /// Lists these workers in place of the fleet's own; an empty list is an empty fleet.
    pub fn set_rows(&self, rows: Vec<WorkerRow>) {
        *lock(&self.state.rows) = Some(rows);
    }

    /// Lists the fleet's own engines again.
    pub fn unset_rows(&self) {
        *lock(&self.state.rows) = None;
    }

    /// Leaves the engine at `url` out of the list from now on, as a router whose worker was removed.
    pub fn delist(&self, url: &str) {
        lock(&self.state.delisted).insert(url.to_owned());
    }

    /// Lists the engine at `url` again.
    pub fn enlist(&self, url: &str) {
        lock(&self.state.delisted).remove(url);
    }

    /// The rows as they are listed now.
    #[must_use]
    pub fn rows(&self) -> Vec<WorkerRow> {
        self.state.rows()
    }

    /// Imitates another router from now on.
    pub fn set_kind(&self, kind: RouterKind) {
        lock(&self.state.setup).kind = kind;
    }

    /// Asks for this key from now on, or for none.
    pub fn set_api_key(&self, api_key: Option<&str>) {
        lock(&self.state.setup).api_key = api_key.map(str::to_owned);
    }

    /// From now on `path` behaves so (`*`: every path without a rule of its own).
    pub fn behave(&self, path: &str, behaviour: Behaviour) {
        self.door.behave(path, behaviour, None);
    }

    /// The next `times` requests to `path` behave so, then it is normal again.
    pub fn behave_times(&self, path: &str, times: u64, behaviour: Behaviour) {
        self.door.behave(path, behaviour, Some(times));
    }

    /// The next requests to `path` meet one behaviour each, in this order; then it is normal again.
    pub fn behave_in_turn(&self, path: &str, behaviours: Vec<Behaviour>) {
        self.door.behave_in_turn(path, behaviours);
    }

    /// Stops listening and cuts every connection: refused from now on.
    pub async fn stop(&self) {
        self.door.shut().await;
    }

    /// Listens at the same address again.
    ///
    /// # Errors
    /// The address cannot be taken again.
    pub async fn start_again(&self) -> io::Result<()> {
        self.door.start().await
    }

    /// The requests so far, the oldest first (the last 16,384).
    #[must_use]
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.door.requests()
    }

    /// Waits until the recorded requests meet `condition`, and returns them. Never times out.
    pub async fn wait_for(
        &self,
        condition: impl FnMut(&[RecordedRequest]) -> bool,
    ) -> Vec<RecordedRequest> {
        self.door.wait_for(condition).await
    }
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = status;
    answer
}

fn json_answer(status: StatusCode, value: &Value) -> Response<Body> {
    let mut answer = Response::new(Body::from(value.to_string()));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

async fn health() -> &'static str {
    "OK"
}

async fn workers(State(state): State<Arc<Shared>>, headers: HeaderMap) -> Response<Body> {
    if let Some(refusal) = state.refused(&headers) {
        return refusal;
    }
    match state.kind() {
        RouterKind::ListWorkersOnly => state.unknown("GET", "/workers"),
        kind => json_answer(StatusCode::OK, &shapes::workers(kind, &state.rows())),
    }
}

async fn list_workers(State(state): State<Arc<Shared>>, headers: HeaderMap) -> Response<Body> {
    if let Some(refusal) = state.refused(&headers) {
        return refusal;
    }
    match state.kind() {
        RouterKind::Smg | RouterKind::SglangRouter => state.unknown("GET", "/list_workers"),
        RouterKind::VllmRouter | RouterKind::ListWorkersOnly => {
            let urls: Vec<String> = state.rows().into_iter().map(|row| row.url).collect();
            json_answer(StatusCode::OK, &json!({"urls": urls}))
        }
    }
}

async fn unknown(
    State(state): State<Arc<Shared>>,
    method: axum::http::Method,
    uri: Uri,
) -> Response<Body> {
    state.unknown(method.as_str(), uri.path())
}

async fn generate(
    State(state): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    if let Some(refusal) = state.refused(&headers) {
        return refusal;
    }
    let Some(engine) = state.place().await else {
        let body = json!({"error": {"message": "No available workers", "code": 503}});
        return json_answer(StatusCode::SERVICE_UNAVAILABLE, &body);
    };
    let url = engine.url();
    let sent = state
        .http
        .post(format!("{url}/generate"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(without_session(state.kind(), body))
        .send()
        .await;
    let Ok(answer) = sent else {
        return cut_answer();
    };
    let status = answer.status();
    let Ok(bytes) = answer.bytes().await else {
        return cut_answer();
    };
    let mut relayed = Response::new(Body::from(bytes));
    *relayed.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    relayed.headers_mut().insert(header::CONTENT_TYPE, kind);
    // A header of ours, for the usage report of the demo's agents.
    if let Ok(url) = HeaderValue::from_str(&url) {
        relayed.headers_mut().insert("x-demo-engine", url);
    }
    relayed
}

/// sglang-router 0.3.2 and vllm-router 0.1.17 drop `session_id` on this path.
fn without_session(kind: RouterKind, body: Bytes) -> Bytes {
    if kind == RouterKind::Smg {
        return body;
    }
    match serde_json::from_slice::<Value>(&body) {
        Ok(Value::Object(mut fields)) => {
            fields.remove("session_id");
            Bytes::from(Value::Object(fields).to_string())
        }
        _ => body,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{FakeFleet, FleetSpec, http_client};
    use super::*;

    async fn fleet() -> FakeFleet {
        let mut spec = FleetSpec::uniform(2, 100_000);
        spec.speed = 1_000.0;
        FakeFleet::start(spec).await.unwrap()
    }

    async fn get(url: String) -> (u16, HeaderMap, Value) {
        let answer = http_client().unwrap().get(url).send().await.unwrap();
        let status = answer.status().as_u16();
        let headers = answer.headers().clone();
        let body = answer.bytes().await.unwrap();
        (
            status,
            headers,
            serde_json::from_slice(&body).unwrap_or_default(),
        )
    }

    #[tokio::test]
    async fn lists_the_fleet_in_the_shape_of_each_router() {
        let fleet = fleet().await;
        let router = fleet.router();
        let workers = format!("{}/workers", router.url());
        let list = format!("{}/list_workers", router.url());
        let (status, _, body) = get(workers.clone()).await;
        assert_eq!(status, 200);
        assert_eq!(body["total"], 2);
        assert_eq!(body["workers"][1]["url"], fleet.engine_url(1));
        let (status, headers, _) = get(list.clone()).await;
        assert_eq!(status, 404);
        assert_eq!(headers["x-smg-error-code"], "unknown_url");

        router.set_kind(RouterKind::SglangRouter);
        let (_, _, body) = get(workers.clone()).await;
        assert!(body["workers"][0]["metadata"].is_object());
        let (status, headers, body) = get(list.clone()).await;
        assert_eq!((status, body), (404, Value::Null));
        assert!(headers.get("x-smg-error-code").is_none());

        router.set_kind(RouterKind::ListWorkersOnly);
        assert_eq!(get(workers.clone()).await.0, 404);
        let (_, _, body) = get(list).await;
        let urls = json!({"urls": [fleet.engine_url(0), fleet.engine_url(1)]});
        assert_eq!(body, urls);

        router.set_kind(RouterKind::Smg);
        router.set_rows(Vec::new());
        let (status, _, body) = get(workers.clone()).await;
        assert_eq!((status, &body["total"]), (200, &json!(0)));
        let mut rows = WorkerRow::dp_ranks("a", &fleet.engine_url(0), 2);
        rows.push(WorkerRow::new("b", &fleet.engine_url(1)).unhealthy());
        router.set_rows(rows);
        let (_, _, body) = get(workers).await;
        let url = fleet.engine_url(0);
        assert_eq!(body["workers"][1]["url"], format!("{url}@1"));
        assert_eq!(body["workers"][1]["dp_base_url"], url);
        assert_eq!(body["workers"][2]["is_healthy"], false);
        assert_eq!(body["workers"][2]["status"], "not_ready");
        router.unset_rows();
        assert_eq!(router.rows().len(), 2);
        router.delist(&url);
        let urls: Vec<String> = router.rows().into_iter().map(|row| row.url).collect();
        assert_eq!(urls, [fleet.engine_url(1)]);
        router.enlist(&url);
        assert_eq!(router.rows().len(), 2);
    }

    #[tokio::test]
    async fn asks_for_its_key_as_recorded() {
        let fleet = fleet().await;
        let router = fleet.router();
        router.set_api_key(Some("key"));
        let workers = format!("{}/workers", router.url());
        let (status, _, body) = get(workers.clone()).await;
        assert_eq!(
            (status, &body["error"]["code"]),
            (401, &json!("invalid_api_key"))
        );
        router.set_kind(RouterKind::SglangRouter);
        let (status, _, body) = get(workers.clone()).await;
        assert_eq!((status, body), (401, Value::Null));
        let http = http_client().unwrap();
        let answer = http.get(workers).bearer_auth("key").send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }

    #[tokio::test]
    async fn generate_goes_to_an_engine_that_is_listed_and_up() {
        let fleet = fleet().await;
        let router = fleet.router();
        let http = http_client().unwrap();
        let turn = |rid: &str| {
            let body = json!({
                "rid": rid, "session_id": "s1", "prompt_tokens": 500,
                "sampling_params": {"max_new_tokens": 5},
            });
            http.post(format!("{}/generate", router.url()))
                .json(&body)
                .send()
        };
        fleet.engine(0).stop().await;
        let answer = turn("r1").await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["x-demo-engine"], fleet.engine_url(1));
        assert_eq!(fleet.requests(1)[0].json()["session_id"], "s1");

        router.set_kind(RouterKind::SglangRouter);
        turn("r2").await.unwrap();
        let seen = fleet.requests(1)[1].json();
        assert_eq!(seen["rid"], "r2");
        assert!(seen.get("session_id").is_none(), "this router drops it");

        router.set_rows(Vec::new());
        assert_eq!(turn("r3").await.unwrap().status(), 503);
    }
}
