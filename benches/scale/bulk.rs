//! Many things at one moment, beside callers at a steady rate: how long until all of it is done, and
//! what others see meanwhile.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::JoinSet;

use crate::Arguments;
use crate::callers::{STEADY, Seen};
use crate::process::{cpu, written};
use crate::report::{Figure, Report, round};
use crate::rig::{BATCH, Rig, batch};
use crate::support::{call, connect, get};
use crate::waiters::{wait_open, waiting};

const SIZES: [usize; 3] = [1_000, 10_000, 100_000];
const QUICK: [usize; 1] = [300];
/// Callers are looked at for so long before.
const CALM: Duration = Duration::from_secs(2);
/// Time between two looks whether all is done.
const LOOK: Duration = Duration::from_millis(5);
/// Life of leases that all end at once: the grace that a restart gives every lease is as long, and
/// from then on they end together.
const LIFE_S: u64 = 20;
const LONG_S: u64 = 3_600;
/// Callers hold at most so many leases and places themselves.
const OWN: usize = 64;
/// Connections that send batches.
const SENDERS: usize = 4;

/// What one size showed.
struct Done {
    size: usize,
    calm: Seen,
    meanwhile: Seen,
    seconds: f64,
    /// Of the service: its seconds on a processor, store transactions and MiB written meanwhile.
    used: Used,
}

impl Done {
    /// Looks at callers until `then`, and beside `work`, which tells how many seconds all of it took.
    async fn of(rig: &Rig, size: usize, then: Instant, work: impl Future<Output = f64>) -> Self {
        let (calm, ()) = STEADY
            .beside(rig.address(), tokio::time::sleep_until(then.into()))
            .await;
        let before = Used::so_far(rig).await;
        let (meanwhile, seconds) = STEADY.beside(rig.address(), work).await;
        Self {
            size,
            calm,
            meanwhile,
            seconds,
            used: Used::so_far(rig).await.since(&before),
        }
    }
}

struct Used {
    cpu_s: f64,
    commits: f64,
    mib: f64,
}

impl Used {
    async fn so_far(rig: &Rig) -> Self {
        Self {
            cpu_s: cpu(rig.pid()),
            commits: rig.commits().await,
            mib: written(rig.pid()) / f64::from(1 << 20),
        }
    }

    fn since(self, before: &Self) -> Self {
        Self {
            cpu_s: self.cpu_s - before.cpu_s,
            commits: self.commits - before.commits,
            mib: self.mib - before.mib,
        }
    }
}

/// Leases that end at one moment: a service that was killed, and owners that never come back.
pub async fn expiry(arguments: &Arguments, report: &Report) {
    let mut curve = Vec::new();
    for size in arguments.sizes(&SIZES, &QUICK) {
        let rig = Rig::start(1, size * 2, &[]).await;
        let leases = rig.fill(size, LIFE_S, "admit").await.leases;
        let rig = rig.killed_and_started();
        let path = format!("/v1/leases/{}", leases[0]);
        let lease = get(&mut connect(rig.address()).await, &path).await;
        let left = Duration::from_secs_f64(lease["expires_in_s"].as_f64().unwrap());
        let over = Instant::now() + left - CALM / 2;
        tokio::time::sleep_until((over - CALM).into()).await;
        let all_ended = async {
            let mut connection = connect(rig.address()).await;
            let mut began = Instant::now();
            let held = rig.state().await["leases"]["count"].as_u64();
            assert!(
                held >= Some(size as u64),
                "no lease has ended yet: {held:?}"
            );
            loop {
                let state = get(&mut connection, "/v1/state").await;
                let left = state["leases"]["count"].as_u64().unwrap() as usize;
                if left >= size {
                    began = Instant::now();
                }
                if left <= OWN {
                    return began.elapsed().as_secs_f64();
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        curve.push(Done::of(&rig, size, over, all_ended).await);
    }
    tell(report, "leases that end at one moment", "expired", &curve);
}

/// Waiters whose time is over at one moment: the longest wait is changed. A tenth are in open calls.
pub async fn aging(arguments: &Arguments, report: &Report) {
    let mut curve = Vec::new();
    for size in arguments.sizes(&SIZES, &QUICK) {
        let rig = line(size).await;
        let open = size / 10;
        let (told, mut let_in) = unbounded_channel();
        let mut callers = JoinSet::new();
        for _ in 0..open {
            callers.spawn(wait_open(connect(rig.address()).await, told.clone()));
        }
        waiting(&rig, open).await;
        rig.fill(size - open, LONG_S, "wait").await;
        let all_aged = async {
            let mut connection = connect(rig.address()).await;
            let began = Instant::now();
            let change = json!({"max_wait_s": 1}).to_string();
            let path = "/v1/settings";
            let (status, answer) = call(&mut connection, Method::PATCH, path, change).await;
            assert!(status.is_success(), "{status} {answer:?}");
            for _ in 0..open {
                let_in.recv().await.unwrap();
            }
            emptied(&rig).await;
            began.elapsed().as_secs_f64()
        };
        curve.push(Done::of(&rig, size, Instant::now() + CALM, all_aged).await);
    }
    let what = "waiters whose time is over at one moment, a tenth in open calls";
    tell(report, what, "aged", &curve);
}

/// Waiters that are cancelled by batches of 1,000, as a run does that is given up.
pub async fn cancel(arguments: &Arguments, report: &Report) {
    let mut curve = Vec::new();
    for size in arguments.sizes(&SIZES, &QUICK) {
        let rig = line(size).await;
        let tickets = rig.fill(size, LONG_S, "wait").await.tickets;
        let all_cancelled = async {
            let began = Instant::now();
            let mut senders = JoinSet::new();
            let batches: Vec<Vec<String>> = tickets.chunks(BATCH).map(<[_]>::to_vec).collect();
            for sender in 0..SENDERS {
                let mut connection = connect(rig.address()).await;
                let own: Vec<_> = batches
                    .iter()
                    .skip(sender)
                    .step_by(SENDERS)
                    .cloned()
                    .collect();
                senders.spawn(async move {
                    for tickets in own {
                        let operations = tickets
                            .iter()
                            .map(|ticket| json!({"op": "cancel", "ticket_id": ticket}))
                            .collect();
                        for result in batch(&mut connection, operations).await {
                            assert_eq!(result["body"]["outcome"], "withdrawn", "{result}");
                        }
                    }
                });
            }
            while let Some(done) = senders.join_next().await {
                done.unwrap();
            }
            let seconds = began.elapsed().as_secs_f64();
            emptied(&rig).await;
            seconds
        };
        curve.push(Done::of(&rig, size, Instant::now() + CALM, all_cancelled).await);
    }
    let what = "waiters cancelled by batches of 1,000";
    tell(report, what, "cancelled", &curve);
}

/// A gate in which nothing fits any more.
async fn line(size: usize) -> Rig {
    let leases = size.div_ceil(10);
    let arguments = ["--admission-max-wait-s", "3600", "--claim-grace-s", "60"];
    let rig = Rig::start(1, leases, &arguments).await;
    rig.fill(leases, LONG_S, "admit").await;
    rig
}

/// Until nobody but the callers beside may stand in line.
async fn emptied(rig: &Rig) {
    let mut connection = connect(rig.address()).await;
    loop {
        let state = get(&mut connection, "/v1/state").await;
        if state["queue"]["waiting"].as_u64().unwrap() <= OWN as u64 {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn tell(report: &Report, what: &str, word: &str, curve: &[Done]) {
    report.table(
        &format!("{what}, beside 1,000 pairs/s"),
        &[
            "count",
            "all done after s",
            "µs of a processor each",
            "acquire p50 / p99 ms before",
            "p50 / p99 / longest ms meanwhile",
            "store transactions",
            "MiB written",
        ],
    );
    for done in curve {
        report.row(&[
            done.size.to_string(),
            format!("{:.2}", done.seconds),
            format!("{:.1}", done.used.cpu_s / done.size as f64 * 1e6),
            format!("{:.2} / {:.2}", done.calm.ms(0.5), done.calm.ms(0.99)),
            format!(
                "{:.2} / {:.2} / {:.2}",
                done.meanwhile.ms(0.5),
                done.meanwhile.ms(0.99),
                done.meanwhile.ms(1.0)
            ),
            format!("{:.0}", done.used.commits),
            format!("{:.1}", done.used.mib),
        ]);
    }
    let detail: Vec<_> = curve
        .iter()
        .map(|done| {
            json!({
                "count": done.size, "seconds": round(done.seconds), "commits": done.used.commits,
                "cpu_us_each": round(done.used.cpu_s / done.size as f64 * 1e6),
                "mib_written": round(done.used.mib),
                "acquire_ms_before": {"p50": round(done.calm.ms(0.5)), "p99": round(done.calm.ms(0.99))},
                "acquire_ms": {
                    "p50": round(done.meanwhile.ms(0.5)), "p99": round(done.meanwhile.ms(0.99)),
                    "max": round(done.meanwhile.ms(1.0)),
                },
            })
        })
        .collect();
    let last = &curve[curve.len() - 1];
    report.figure(Figure {
        name: format!("{} {word} at one moment: all done", last.size),
        value: last.seconds,
        unit: "s",
        bound: None,
        detail: json!({ "curve": detail }),
    });
    report.figure(Figure {
        name: format!("{} {word} at one moment: acquire p99 of others", last.size),
        value: last.meanwhile.ms(0.99),
        unit: "ms",
        bound: None,
        detail: json!({ "curve": detail }),
    });
}
