//! Callers beside many leases and a long line: a tenth of its waiters in open calls at its head, the
//! others in calls that wait for 1,000 tickets each.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use crate::Arguments;
use crate::callers::EAGER;
use crate::process::{cpu, resident};
use crate::report::{Bound, Figure, Report, median, round};
use crate::rig::Rig;
use crate::support::{connect, histogram, millis, post, ticket};

/// Rounds, in which the sizes take turns.
const ROUNDS: usize = 5;
/// How often memory is looked at until it is taken for settled, and the time between two looks.
const LOOKS: usize = 10;
const LOOK: Duration = Duration::from_millis(100);
/// Hand-overs of each round: a release, and the call at the head that it lets in.
const HAND_OVERS: usize = 16;
/// Longest that a call may wait.
const WAIT_S: u64 = 60;
/// Tickets of one call that waits for many.
const WATCHED: usize = 1_000;
const TTL_S: u64 = 3_600;

/// A gate with its line.
struct Line {
    /// Ended before the gate is.
    callers: JoinSet<()>,
    rig: Rig,
    size: usize,
    open: usize,
    leases: Vec<String>,
    /// Moments at which an open call was let in.
    granted: UnboundedReceiver<Instant>,
    bytes_per_lease: f64,
    bytes_per_waiter: f64,
    /// What a waiter takes in addition that a `/v1/wait` of many names.
    bytes_per_watched: f64,
    bytes_per_call: f64,
    seen: Vec<Round>,
}

struct Round {
    pairs_per_s: f64,
    /// Of the service.
    cpu_us: f64,
    p50_ms: f64,
    p99_ms: f64,
    release_ms: f64,
    grant_ms: f64,
    grant_max_ms: f64,
}

pub async fn run(arguments: &Arguments, report: &Report) {
    let sizes = arguments.sizes(&[1_000, 10_000, 100_000], &[200]);
    let seconds = Duration::from_secs(arguments.seconds(1));
    let rounds = if arguments.bench { ROUNDS } else { 1 };
    let mut lines = Vec::new();
    for &size in &sizes {
        lines.push(Line::start(size).await);
    }
    for _ in 0..rounds {
        for line in &mut lines {
            line.round(seconds).await;
        }
    }
    report.table(
        &format!(
            "leases and as many waiters, a tenth in open calls; medians of {rounds} interleaved rounds"
        ),
        &[
            "leases, waiters",
            "acquire and cancel, pairs/s",
            "µs of a processor a pair",
            "acquire p50 / p99 ms",
            "release p50 ms",
            "grant p50 / longest ms",
            "B a lease",
            "B a waiter",
            "B more when watched",
            "KiB an open call",
        ],
    );
    for line in &lines {
        let of = |part: fn(&Round) -> f64| median(line.seen.iter().map(part));
        report.row(&[
            line.size.to_string(),
            format!("{:.0}", of(|round| round.pairs_per_s)),
            format!("{:.0}", of(|round| round.cpu_us)),
            format!(
                "{:.2} / {:.2}",
                of(|round| round.p50_ms),
                of(|round| round.p99_ms)
            ),
            format!("{:.2}", of(|round| round.release_ms)),
            format!(
                "{:.2} / {:.2}",
                of(|round| round.grant_ms),
                of(|round| round.grant_max_ms)
            ),
            format!("{:.0}", line.bytes_per_lease),
            format!("{:.0}", line.bytes_per_waiter),
            format!("{:.0}", line.bytes_per_watched),
            format!("{:.1}", line.bytes_per_call / 1_024.0),
        ]);
    }
    figures(&lines, report);
}

fn figures(lines: &[Line], report: &Report) {
    let (first, last) = (&lines[0], &lines[lines.len() - 1]);
    let curve: Vec<_> = lines.iter().map(Line::detail).collect();
    // Round by round, since the machine is not the same in all of them.
    let ratio = |part: fn(&Round) -> f64| {
        median(
            first
                .seen
                .iter()
                .zip(&last.seen)
                .map(|(few, many)| part(many) / part(few)),
        )
    };
    let both = format!("{} waiters against {}", last.size, first.size);
    report.figure(Figure {
        name: format!("pairs/s beside {both}"),
        value: ratio(|round| round.pairs_per_s),
        unit: "times",
        bound: Some(Bound::AtLeast(0.6, Some(0.9))),
        detail: json!({ "curve": curve }),
    });
    report.figure(Figure {
        name: format!("processor time of a pair beside {both}"),
        value: ratio(|round| round.cpu_us),
        unit: "times",
        bound: None,
        detail: json!({}),
    });
    report.figure(Figure {
        name: format!("grant latency beside {both}"),
        value: ratio(|round| round.grant_ms),
        unit: "times",
        bound: None,
        detail: json!({}),
    });
    for (what, value, must, aim) in [
        ("a held lease", last.bytes_per_lease, 600.0, 400.0),
        ("a parked waiter", last.bytes_per_waiter, 600.0, 400.0),
        (
            "an open waiting call",
            last.bytes_per_call,
            32_768.0,
            16_384.0,
        ),
    ] {
        report.figure(Figure {
            name: format!("memory of {what}"),
            value,
            unit: "bytes",
            bound: Some(Bound::AtMost(must, Some(aim))),
            detail: json!({ "leases": last.size, "waiters": last.size, "open_calls": last.open }),
        });
    }
    report.figure(Figure {
        name: "further memory of a waiter that a call of many watches".to_owned(),
        value: last.bytes_per_watched,
        unit: "bytes",
        bound: None,
        detail: json!({ "tickets_a_call": WATCHED }),
    });
}

/// Memory once the work that brought it there is over: what was freed goes back a little later, when there is
/// something to do.
async fn settled(rig: &Rig) -> f64 {
    let mut least = resident(rig.pid());
    for _ in 0..LOOKS {
        tokio::time::sleep(LOOK).await;
        rig.state().await;
        least = least.min(resident(rig.pid()));
    }
    least
}

impl Line {
    async fn start(size: usize) -> Self {
        let open = size / 10;
        let rig = Rig::start(
            1,
            size,
            &["--admission-max-wait-s", "3600", "--claim-grace-s", "60"],
        )
        .await;
        let empty = settled(&rig).await;
        let leases = rig.fill(size, TTL_S, "admit").await.leases;
        let with_leases = settled(&rig).await;
        let (told, granted) = unbounded_channel();
        let mut callers = JoinSet::new();
        for _ in 0..open {
            let connection = connect(rig.address()).await;
            callers.spawn(wait_open(connection, told.clone()));
        }
        waiting(&rig, open).await;
        let with_calls = settled(&rig).await;
        let others = size - open;
        let tickets = rig.fill(others, TTL_S, "wait").await.tickets;
        let with_waiters = settled(&rig).await;
        // One after the other: what stands in the inbox is bounded, and a ticket counts as a call there.
        for (number, watched) in tickets.chunks(WATCHED).enumerate() {
            let connection = connect(rig.address()).await;
            callers.spawn(watch(connection, watched.to_vec()));
            while rig.figure("kvgate_http_waiting_calls").await < (open + number + 1) as f64 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let all = settled(&rig).await;
        let bytes_per_waiter = (with_waiters - with_calls) / others as f64;
        Self {
            size,
            open,
            leases,
            granted,
            callers,
            bytes_per_lease: (with_leases - empty) / size as f64,
            bytes_per_waiter,
            bytes_per_watched: (all - with_waiters) / others as f64,
            bytes_per_call: (with_calls - with_leases) / open as f64 - bytes_per_waiter,
            seen: Vec::new(),
            rig,
        }
    }

    async fn round(&mut self, time: Duration) {
        let before = cpu(self.rig.pid());
        let load = EAGER.beside(self.rig.address(), tokio::time::sleep(time));
        let (seen, ()) = load.await;
        let used = cpu(self.rig.pid()) - before;
        let mut connection = connect(self.rig.address()).await;
        let (mut releases, mut grants) = (histogram(), histogram());
        for _ in 0..HAND_OVERS.min(self.open) {
            let lease = self.leases.pop().expect("more leases than hand-overs");
            let path = format!("/v1/leases/{lease}/release");
            let began = Instant::now();
            post(&mut connection, &path, "{}".to_owned()).await;
            releases.saturating_record(began.elapsed().as_nanos() as u64);
            let granted = self.granted.recv().await.unwrap();
            grants.saturating_record(granted.duration_since(began).as_nanos() as u64);
        }
        self.seen.push(Round {
            pairs_per_s: seen.pairs_per_s(),
            cpu_us: used / seen.acquires.len() as f64 * 1e6,
            p50_ms: seen.ms(0.5),
            p99_ms: seen.ms(0.99),
            release_ms: millis(&releases, 0.5),
            grant_ms: millis(&grants, 0.5),
            grant_max_ms: millis(&grants, 1.0),
        });
        assert!(self.callers.try_join_next().is_none_or(|done| done.is_ok()));
    }

    fn detail(&self) -> serde_json::Value {
        let of = |part: fn(&Round) -> f64| round(median(self.seen.iter().map(part)));
        json!({
            "leases": self.size, "waiters": self.size, "open_calls": self.open,
            "pairs_per_s": of(|round| round.pairs_per_s), "cpu_us_per_pair": of(|round| round.cpu_us),
            "acquire_ms": {"p50": of(|round| round.p50_ms), "p99": of(|round| round.p99_ms)},
            "release_ms": {"p50": of(|round| round.release_ms)},
            "grant_ms": {"p50": of(|round| round.grant_ms), "max": of(|round| round.grant_max_ms)},
            "bytes_per_lease": round(self.bytes_per_lease),
            "bytes_per_waiter": round(self.bytes_per_waiter),
            "bytes_per_watched": round(self.bytes_per_watched),
            "bytes_per_open_call": round(self.bytes_per_call),
        })
    }
}

/// Until so many stand in line.
pub async fn waiting(rig: &Rig, count: usize) {
    while rig.state().await["queue"]["waiting"] != count {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// One caller that stays until it is let in, and tells when.
pub async fn wait_open(mut connection: crate::support::Connection, told: UnboundedSender<Instant>) {
    let id = ticket();
    let body = json!({
        "ticket_id": id, "session_id": format!("of-{id}"), "reservation_tokens": 1,
        "wait_s": WAIT_S, "ttl_s": TTL_S, "request_id": id, "client": "rollout-3",
    })
    .to_string();
    loop {
        let answer = post(&mut connection, "/v1/leases", body.clone()).await;
        if answer["action"] != "wait" {
            // The measurement may be over.
            let _ = told.send(Instant::now());
            return;
        }
    }
}

/// One process that waits for many tickets.
async fn watch(mut connection: crate::support::Connection, tickets: Vec<String>) {
    let body = json!({ "ticket_ids": tickets, "wait_s": WAIT_S }).to_string();
    loop {
        post(&mut connection, "/v1/wait", body.clone()).await;
    }
}
