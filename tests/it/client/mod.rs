//! The Rust client against the real binary: whatever the gate does, a rollout ends well, what it costs is bounded, and
//! no lease is left behind. Leases live for 600 s here, so nothing is given back by time. Against a scripted gate it is
//! tested in `clients/rust/tests`.

mod promise;
mod restart;
mod tokens;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use kvgate::demo::{FakeFleet, FleetSpec};
use kvgate_client::{Gate, GateConfig};
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::time::{Instant, timeout};

use crate::support::process::Kvgate;

/// Longest time until nothing is reserved any more, once the last caller has left.
const END: Duration = Duration::from_secs(15);
/// For a machine that has other things to do.
const SLACK: Duration = Duration::from_secs(5);
/// Longest time for anything else that a test waits for.
const SOON: Duration = Duration::from_secs(60);

/// `kvgate serve` at one address over several lives, in front of one engine.
struct Service {
    gate: Option<Kvgate>,
    address: SocketAddr,
    fleet: FakeFleet,
    data: TempDir,
    flags: &'static [&'static str],
    http: reqwest::Client,
    /// Bound and never listening: it keeps the port while no gate listens.
    _hold: TcpSocket,
}

impl Service {
    /// Starts a gate whose ceiling is so many tokens.
    async fn start(ceiling: u64) -> Self {
        Self::start_with(ceiling, &[]).await
    }

    /// The same with more flags.
    async fn start_with(ceiling: u64, flags: &'static [&'static str]) -> Self {
        // Every client of the process shares one provider; another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let hold = TcpSocket::new_v4().unwrap();
        hold.set_reuseaddr(true).unwrap();
        hold.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .unwrap();
        let mut service = Self {
            gate: None,
            address: hold.local_addr().unwrap(),
            fleet: FakeFleet::start(FleetSpec::uniform(1, ceiling))
                .await
                .unwrap(),
            data: tempfile::tempdir().unwrap(),
            flags,
            http: reqwest::Client::new(),
            _hold: hold,
        };
        service.begin().await;
        service
    }

    /// Starts the gate once more, at the same address with the same store; it is ready when this returns.
    async fn begin(&mut self) {
        let arguments = [
            "serve",
            "--listen",
            &self.address.to_string(),
            "--data",
            self.data.path().to_str().unwrap(),
            "--log-format",
            "json",
            "--router",
            &self.fleet.router_url(),
            "--program-admission",
            "--admission-headroom",
            "1.0",
            "--admission-max-wait-s",
            "120",
            "--stale-after-s",
            "30",
        ]
        .map(str::to_owned);
        let flags = self.flags;
        // Waiting for the log blocks a thread; the rollout goes on meanwhile.
        let started = tokio::task::spawn_blocking(move || {
            let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            arguments.extend(flags);
            let mut gate = Kvgate::start(&arguments);
            gate.wait_for_log("ready");
            gate
        });
        self.gate = Some(started.await.unwrap());
        let fresh = |state: &Value| state["degraded"] == false;
        self.until(SOON, "the fleet is read", fresh).await;
    }

    fn gate(&self) -> &Kvgate {
        self.gate.as_ref().unwrap()
    }

    /// `kill -9`.
    fn kill(&mut self) {
        self.gate.take().unwrap().kill();
    }

    /// An orderly stop.
    async fn terminate(&mut self) {
        let gate = self.gate.take().unwrap();
        let ended = tokio::task::spawn_blocking(move || gate.terminate());
        assert!(ended.await.unwrap().success());
    }

    /// A client of it.
    fn client(&self) -> Gate {
        Gate::new(GateConfig {
            token: None,
            token_file: None,
            ..GateConfig::at(format!("http://{}", self.address))
        })
        .unwrap()
    }

    async fn get(&self, path: &str) -> Option<Value> {
        let url = format!("http://{}{path}", self.address);
        self.http.get(url).send().await.ok()?.json().await.ok()
    }

    /// Asks for the state until this holds.
    async fn until(&self, time: Duration, what: &str, holds: impl Fn(&Value) -> bool) {
        let ends_at = Instant::now() + time;
        let mut last = None;
        while Instant::now() < ends_at {
            let state = timeout(time, self.get("/v1/state")).await.ok().flatten();
            if state.as_ref().is_some_and(&holds) {
                return;
            }
            last = state.or(last);
            tokio::task::yield_now().await;
        }
        panic!("not within {time:?}: {what}; state {last:?}");
    }

    /// The promise at the end of a rollout.
    async fn nothing_is_left(&self) {
        self.until(END + SLACK, "nothing is reserved, nobody waits", |state| {
            state["budget"]["reserved"] == 0
                && state["leases"]["count"] == 0
                && state["queue"]["waiting"] == 0
        })
        .await;
    }
}

/// A request to an engine takes a while.
async fn work() {
    let _ = timeout(Duration::from_millis(10), std::future::pending::<()>()).await;
}
