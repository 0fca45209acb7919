//! A gate beside fake engines, and what fills it.

use std::net::SocketAddr;
use std::path::Path;

use kvgate::demo::{FakeFleet, FleetSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Connection, Server, connect, get, get_text, post, ticket};

/// Operations of one batch: as many as it may have.
pub const BATCH: usize = 1_000;
/// Counts store transactions.
pub const COMMITS: &str = "kvgate_store_commit_seconds_count";
/// Connections that fill a gate.
const FILLERS: usize = 4;

/// A service with its engines and its files; all end with it.
pub struct Rig {
    pub gate: Server,
    fleet: FakeFleet,
    data: TempDir,
    arguments: Vec<String>,
}

impl Rig {
    /// A fleet whose pool is so many tokens together, all of which may be reserved.
    pub async fn start(engines: usize, tokens: usize, arguments: &[&str]) -> Self {
        let pool = (tokens as u64).div_ceil(engines as u64);
        let fleet = FakeFleet::start(FleetSpec::uniform(engines, pool))
            .await
            .unwrap();
        let data = tempfile::tempdir_in(".").unwrap();
        let router = fleet.router_url();
        let mut all = vec!["--program-admission", "--admission-headroom", "1"];
        all.extend(["--router", &router, "--max-waiting", "200000"]);
        all.extend(arguments);
        let gate = Server::kvgate(data.path(), &all);
        let arguments = all.into_iter().map(str::to_owned).collect();
        Self {
            gate,
            fleet,
            data,
            arguments,
        }
    }

    /// The same store under a new process, after SIGKILL.
    pub fn killed_and_started(self) -> Self {
        self.gate.kill();
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let gate = Server::kvgate(self.data.path(), &arguments);
        Self { gate, ..self }
    }

    pub const fn address(&self) -> SocketAddr {
        self.gate.address
    }

    pub fn pid(&self) -> u32 {
        self.gate.pid()
    }

    /// Bytes of the store.
    pub fn store_bytes(&self) -> u64 {
        let store: &Path = self.data.path();
        std::fs::metadata(store.join("kvgate.redb")).unwrap().len()
    }

    /// Tickets of one token each, all of which must meet `action`: their ids, and their leases if they
    /// have any.
    pub async fn fill(&self, count: usize, ttl_s: u64, action: &str) -> Filled {
        let fillers = self.in_batches(count, async |connection, length| {
            let mut filled = Filled::default();
            filled.batch(connection, length, ttl_s, action).await;
            filled
        });
        let mut all = Filled::default();
        for filled in fillers.await {
            all.tickets.extend(filled.tickets);
            all.leases.extend(filled.leases);
        }
        all
    }

    /// So many requests of a session each that are over: what is remembered of them is in the store.
    pub async fn remember(&self, count: usize) {
        self.in_batches(count, async |connection, length| {
            let acquires = (0..length).map(|_| {
                let id = ticket();
                json!({
                    "op": "acquire", "ticket_id": id, "session_id": format!("of-{id}"),
                    "reservation_tokens": 1, "request_id": id, "client": "rollout-3",
                })
            });
            let admitted = batch(connection, acquires.collect()).await;
            let releases = admitted
                .iter()
                .map(|admit| json!({"op": "release", "lease_id": admit["body"]["lease_id"]}));
            for released in batch(connection, releases.collect()).await {
                assert_eq!(released["body"]["outcome"], "released", "{released}");
            }
        })
        .await;
    }

    /// Does `work` with batches of so many operations together, over a few connections.
    async fn in_batches<T>(
        &self,
        count: usize,
        work: impl AsyncFn(&mut Connection, usize) -> T,
    ) -> Vec<T> {
        let work = &work;
        let fillers = (0..FILLERS).map(|number| async move {
            let mut connection = connect(self.address()).await;
            let own = count / FILLERS + usize::from(number < count % FILLERS);
            let mut done = Vec::new();
            for first in (0..own).step_by(BATCH) {
                done.push(work(&mut connection, BATCH.min(own - first)).await);
            }
            done
        });
        let done = futures_util::future::join_all(fillers).await;
        done.into_iter().flatten().collect()
    }

    /// The published figures.
    pub async fn state(&self) -> Value {
        get(&mut connect(self.address()).await, "/v1/state").await
    }

    /// A figure of its `/metrics`.
    pub async fn figure(&self, name: &str) -> f64 {
        figure(&self.gate, name).await
    }

    /// Store transactions so far.
    pub async fn commits(&self) -> f64 {
        self.figure(COMMITS).await
    }

    /// Engines of the fleet, for those who want to know how often they were asked.
    pub const fn fleet(&self) -> &FakeFleet {
        &self.fleet
    }
}

/// A figure of the `/metrics` of a gate.
pub async fn figure(gate: &Server, name: &str) -> f64 {
    let text = get_text(&mut connect(gate.address).await, "/metrics").await;
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in /metrics"))
}

/// What a gate was filled with.
#[derive(Default)]
pub struct Filled {
    pub tickets: Vec<String>,
    pub leases: Vec<String>,
}

impl Filled {
    async fn batch(&mut self, connection: &mut Connection, length: usize, ttl: u64, action: &str) {
        let mut operations = Vec::with_capacity(length);
        for number in 0..length {
            let id = ticket();
            operations.push(json!({
                "op": "acquire", "ticket_id": id, "session_id": format!("session-{:09}", number / 8),
                "reservation_tokens": 1, "request_id": id, "client": "rollout-3", "ttl_s": ttl,
            }));
            self.tickets.push(id);
        }
        let results = batch(connection, operations).await;
        for result in results {
            assert_eq!(result["body"]["action"], action, "{result}");
            if let Some(lease) = result["body"]["lease_id"].as_str() {
                self.leases.push(lease.to_owned());
            }
        }
    }
}

/// The results of a batch.
pub async fn batch(connection: &mut Connection, operations: Vec<Value>) -> Vec<Value> {
    let body = json!({ "operations": operations }).to_string();
    let mut answer = post(connection, "/v1/batch", body).await;
    match answer["results"].take() {
        Value::Array(results) => results,
        other => panic!("a batch is answered by a list, not {other}"),
    }
}
