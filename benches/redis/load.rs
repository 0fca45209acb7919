//! Callers in a closed loop, and what they saw.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use kvgate::load::{Latency, histogram, processor_time};

use crate::Scenario;
use crate::caller::{Answer, Connection};
use crate::server::Server;
use crate::support::ticket;

const ACQUIRE: &str = concat!(
    include_str!("../compare/gate.lua"),
    include_str!("../compare/acquire.lua")
);
const RELEASE: &str = concat!(
    include_str!("../compare/gate.lua"),
    include_str!("../compare/release.lua")
);
const SWEEP: &str = concat!(
    include_str!("../compare/gate.lua"),
    include_str!("../compare/sweep.lua")
);

const PROMPT_TOKENS: u64 = 18_432;
const MAX_NEW_TOKENS: u64 = 4_096;
const TOKENS: u64 = PROMPT_TOKENS + MAX_NEW_TOKENS;
/// Leases that fit where callers contend.
const SLOTS: u64 = 16;

pub struct Cell {
    pub pairs: u64,
    pub seconds: f64,
    pub acquire: Option<Latency>,
    pub release: Option<Latency>,
    pub cpu_s: f64,
    pub load_cpu_s: f64,
    pub rss_bytes: u64,
    pub log_bytes: u64,
}

/// What SCRIPT LOAD named the scripts.
#[derive(Clone)]
pub struct Scripts {
    pub acquire: String,
    pub release: String,
    pub sweep: String,
}

impl Scripts {
    pub async fn load(connection: &mut Connection) -> Self {
        let mut names = Vec::new();
        for script in [ACQUIRE, RELEASE, SWEEP] {
            match connection.ask(&["SCRIPT", "LOAD", script]).await {
                Answer::Text(name) => names.push(name.to_owned()),
                other => panic!("{other:?}"),
            }
        }
        let [acquire, release, sweep] = names.try_into().unwrap();
        Self {
            acquire,
            release,
            sweep,
        }
    }
}

pub async fn load(server: &Server, scenario: Scenario, count: usize, seconds: f64) -> Cell {
    let mut control = server.connect().await;
    let scripts = Scripts::load(&mut control).await;
    let ceiling = match scenario {
        Scenario::Open => 1 << 40,
        Scenario::Contended => SLOTS * TOKENS,
    };
    control
        .number(&[
            "HSET",
            "gate",
            "ceiling",
            &ceiling.to_string(),
            "waiting",
            "0",
        ])
        .await;
    let mut callers = Vec::new();
    for _ in 0..count {
        callers.push(server.connect().await);
    }
    let own = || processor_time(std::process::id()).unwrap();
    let (before, own_before) = (Usage::read(&mut control).await, own());
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(seconds);
    let mut running = JoinSet::new();
    for (number, connection) in callers.into_iter().enumerate() {
        running.spawn(caller(connection, scripts.clone(), number, end));
    }
    // Expired leases are reclaimed once a second, as kvgate does it by itself.
    let sweeper = async {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(control.run(&scripts.sweep, &["0"]).await, Answer::Number(0));
        }
    };
    let mut pairs = 0;
    let (mut acquire, mut release) = (histogram(), histogram());
    let all = async {
        while let Some(done) = running.join_next().await {
            let own = done.unwrap();
            pairs += own.0;
            acquire.add(&own.1).unwrap();
            release.add(&own.2).unwrap();
        }
        began.elapsed().as_secs_f64()
    };
    let seconds = tokio::select! {
        seconds = all => seconds,
        never = sweeper => never,
    };
    let load_cpu_s = (own() - own_before).as_secs_f64();
    // The sweep may have been under way.
    let mut control = server.connect().await;
    let after = Usage::read(&mut control).await;
    everything_was_given_back(&mut control, pairs).await;
    Cell {
        pairs,
        seconds,
        acquire: Latency::of(&acquire),
        release: Latency::of(&release),
        cpu_s: after.cpu_s - before.cpu_s,
        load_cpu_s,
        rss_bytes: after.rss_bytes,
        log_bytes: after.log_bytes - before.log_bytes,
    }
}

type Own = (
    u64,
    hdrhistogram::Histogram<u64>,
    hdrhistogram::Histogram<u64>,
);

/// One pair after the other until the time is over.
async fn caller(mut connection: Connection, scripts: Scripts, number: usize, end: Instant) -> Own {
    let session = format!("session-{number:09}");
    let (prompt, new) = (PROMPT_TOKENS.to_string(), MAX_NEW_TOKENS.to_string());
    let (mut acquires, mut releases) = (histogram(), histogram());
    let mut pairs = 0;
    while Instant::now() < end {
        let ticket = ticket();
        let began = Instant::now();
        let ask = [
            &*ticket,
            &session,
            &prompt,
            &new,
            "train",
            "0",
            "600",
            "rid-0123456789",
            "rollout-3",
        ];
        let lease = loop {
            match connection.run(&scripts.acquire, &ask).await {
                Answer::List(words) => match words.as_slice() {
                    [Answer::Text("admit"), Answer::Text(lease), _] => break (*lease).to_owned(),
                    [Answer::Text("wait"), _] => {}
                    other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            }
            if let Some(lease) = connection.granted(&ticket).await {
                break lease;
            }
        };
        let held = Instant::now();
        acquires.saturating_record((held - began).as_nanos() as u64);
        let outcome = connection.run(&scripts.release, &[&ticket, &lease]).await;
        assert_eq!(outcome, Answer::Text("released"));
        releases.saturating_record(held.elapsed().as_nanos() as u64);
        pairs += 1;
    }
    (pairs, acquires, releases)
}

/// After a load the books are empty, and they have counted each pair.
pub async fn everything_was_given_back(control: &mut Connection, pairs: u64) {
    let gate = control.fields(&["HGETALL", "gate"]).await;
    assert_eq!(gate["issued"], pairs.to_string());
    assert_eq!((&*gate["reserved"], &*gate["waiting"]), ("0", "0"));
    assert_eq!(control.number(&["LLEN", "queue"]).await, 0);
    assert_eq!(control.number(&["ZCARD", "deadlines"]).await, 0);
}

/// What the server has used up since its start.
struct Usage {
    cpu_s: f64,
    rss_bytes: u64,
    log_bytes: u64,
}

impl Usage {
    async fn read(control: &mut Connection) -> Self {
        let info = control.fields(&["INFO", "everything"]).await;
        assert_eq!(info["aof_last_write_status"], "ok");
        let number = |name: &str| info[name].trim().parse::<f64>().unwrap();
        Self {
            cpu_s: number("used_cpu_user") + number("used_cpu_sys"),
            rss_bytes: number("used_memory_rss") as u64,
            log_bytes: number("aof_current_size") as u64,
        }
    }
}
