//! Leases that are renewed all the time, each by a call of its own or many by one, beside callers at a
//! steady rate.

use std::time::{Duration, Instant};

use hyper::Method;
use kvgate_core::policy::FINISHED_MAX;
use serde_json::json;
use tokio::task::JoinSet;

use crate::Arguments;
use crate::callers::STEADY;
use crate::process::{cpu, written};
use crate::report::{Bound, Figure, Report, round};
use crate::rig::{BATCH, Rig, batch};
use crate::support::{Connection, call, connect};

/// A lease is renewed after a third of its life.
const EVERY: Duration = Duration::from_secs(7);
const TTL_S: u64 = 21;
const SECONDS: u64 = 30;
/// Connections over which single leases are renewed.
const RENEWERS: usize = 64;
/// Time between two looks at the size of the store.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Call,
    Batch,
}

/// What one run showed.
struct Seen {
    renewals_per_s: f64,
    expired: f64,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    commits_per_s: f64,
    kib_per_s: f64,
    cpu: f64,
    /// MiB of the store in the first and in the second half at most.
    store_mib: (f64, f64),
}

pub async fn run(arguments: &Arguments, report: &Report) {
    let count = arguments.sizes(&[60_000], &[500])[0];
    let remembered = arguments.usual_or_quick(FINISHED_MAX, 500);
    let time = Duration::from_secs(arguments.seconds(SECONDS));
    report.table(
        &format!(
            "{count} leases renewed every {} s for {} s, beside 1,000 pairs/s",
            EVERY.as_secs(),
            time.as_secs()
        ),
        &[
            "renewed by",
            "renewals/s",
            "expired",
            "acquire p50 / p99 / longest ms",
            "store transactions/s",
            "KiB written/s",
            "share of one core",
            "store MiB, first and second half",
        ],
    );
    for (by, name) in [(By::Call, "single calls"), (By::Batch, "batches")] {
        let seen = renewed(count, remembered, by, time).await;
        report.row(&[
            name.to_owned(),
            format!("{:.0}", seen.renewals_per_s),
            format!("{}", seen.expired),
            format!(
                "{:.2} / {:.2} / {:.2}",
                seen.p50_ms, seen.p99_ms, seen.max_ms
            ),
            format!("{:.0}", seen.commits_per_s),
            format!("{:.0}", seen.kib_per_s),
            format!("{:.0} %", seen.cpu * 100.0),
            format!("{:.1}, {:.1}", seen.store_mib.0, seen.store_mib.1),
        ]);
        let detail = json!({
            "leases": count, "remembered": remembered, "every_s": EVERY.as_secs(), "seconds": time.as_secs(),
            "renewals_per_s": round(seen.renewals_per_s),
            "acquire_ms": {
                "p50": round(seen.p50_ms), "p99": round(seen.p99_ms), "max": round(seen.max_ms),
            },
            "commits_per_s": round(seen.commits_per_s), "kib_written_per_s": round(seen.kib_per_s),
            "share_of_core": round(seen.cpu),
            "store_mib": [round(seen.store_mib.0), round(seen.store_mib.1)],
        });
        let what = format!("{count} leases renewed by {name}");
        for (name, value, unit, must) in [
            ("expired", seen.expired, "leases", 0.0),
            ("acquire p99 beside", seen.p99_ms, "ms", 50.0),
            (
                "growth of the store from the first half to the second",
                seen.store_mib.1 / seen.store_mib.0,
                "times",
                1.05,
            ),
        ] {
            report.figure(Figure {
                name: format!("{what}: {name}"),
                value,
                unit,
                bound: Some(Bound::AtMost(must, None)),
                detail: detail.clone(),
            });
        }
    }
}

async fn renewed(count: usize, remembered: usize, by: By, time: Duration) -> Seen {
    // Half of the pool is left for the callers beside.
    let rig = Rig::start(1, count * 2, &[]).await;
    // The callers beside leave finished tickets and sessions behind, which are remembered up to a number: below it
    // the store grows by them.
    rig.remember(remembered).await;
    let leases = rig.fill(count, TTL_S, "admit").await.leases;
    let began = Instant::now();
    let over = began + time;
    let mut renewers = JoinSet::new();
    for renewer in 0..RENEWERS {
        let mut connection = connect(rig.address()).await;
        let own: Vec<String> = leases
            .iter()
            .skip(renewer)
            .step_by(RENEWERS)
            .cloned()
            .collect();
        renewers.spawn(async move {
            let at_once = if by == By::Batch { BATCH } else { 1 };
            let mut renewals = 0;
            // In the order of their ends; each again when its time comes round.
            for turn in 0.. {
                for (number, some) in own.chunks(at_once).enumerate() {
                    let place = (number * RENEWERS + renewer) as f64
                        / (own.len().div_ceil(at_once) * RENEWERS) as f64;
                    let due = began + EVERY * turn + EVERY.mul_f64(place);
                    if due >= over {
                        return renewals;
                    }
                    tokio::time::sleep_until(due.into()).await;
                    renew(&mut connection, some).await;
                    renewals += some.len();
                }
            }
            renewals
        });
    }
    let before = (
        rig.commits().await,
        written(rig.pid()),
        cpu(rig.pid()),
        Instant::now(),
    );
    let sizes = async {
        let mut sizes = Vec::new();
        while Instant::now() + LOOK < over {
            sizes.push(rig.store_bytes() as f64 / f64::from(1 << 20));
            tokio::time::sleep(LOOK.min(over - Instant::now())).await;
        }
        sizes.push(rig.store_bytes() as f64 / f64::from(1 << 20));
        sizes
    };
    let (seen, sizes) = STEADY.beside(rig.address(), sizes).await;
    let mut renewals = 0;
    while let Some(own) = renewers.join_next().await {
        renewals += own.unwrap();
    }
    let seconds = before.3.elapsed().as_secs_f64();
    let (first, second) = sizes.split_at(sizes.len() / 2);
    let most = |sizes: &[f64]| sizes.iter().copied().fold(0.0, f64::max);
    let second = most(second);
    Seen {
        renewals_per_s: renewals as f64 / began.elapsed().as_secs_f64(),
        expired: rig
            .figure("kvgate_leases_ended_total{how=\"expired\"}")
            .await,
        p50_ms: seen.ms(0.5),
        p99_ms: seen.ms(0.99),
        max_ms: seen.ms(1.0),
        commits_per_s: (rig.commits().await - before.0) / seconds,
        kib_per_s: (written(rig.pid()) - before.1) / 1_024.0 / seconds,
        cpu: (cpu(rig.pid()) - before.2) / seconds,
        store_mib: (
            if first.is_empty() {
                second
            } else {
                most(first)
            },
            second,
        ),
    }
}

/// Renews by one call. A lease that is gone is counted by the service.
async fn renew(connection: &mut Connection, leases: &[String]) {
    if let [lease] = leases {
        let path = format!("/v1/leases/{lease}/renew");
        call(connection, Method::POST, &path, String::new()).await;
        return;
    }
    let operations = leases
        .iter()
        .map(|lease| json!({"op": "renew", "lease_id": lease}))
        .collect();
    batch(connection, operations).await;
}
