//! Engines that are read every second: what that takes of one core.

use std::time::Duration;

use kvgate::demo::Behaviour;
use serde_json::json;

use crate::Arguments;
use crate::process::{cpu, cpu_by_thread, written};
use crate::report::{Bound, Figure, Report, round};
use crate::rig::Rig;

/// What a busy engine prints: the fakes print their gauges only.
const METRICS: &[u8] =
    include_bytes!("../../tests/fixtures/exposition/metrics-sglang-0.5.23-tp1_busy.txt");
/// Until the first readings are over, and what is asked only once.
const SETTLED: Duration = Duration::from_secs(3);
/// Twice the time after which `/metrics` and `/server_info` are read again.
const SECONDS: u64 = 20;

pub async fn run(arguments: &Arguments, report: &Report) {
    let sizes = arguments.sizes(&[16, 64, 256], &[4]);
    let time = Duration::from_secs(arguments.seconds(SECONDS));
    report.table(
        &format!("engines read every second, over {} s", time.as_secs()),
        &[
            "engines",
            "share of one core",
            "µs a reading",
            "requests/s",
            "store transactions/s",
            "KiB written/s",
        ],
    );
    let mut share = 0.0;
    let mut curve = Vec::new();
    for &size in &sizes {
        let rig = Rig::start(size, size * 400_000, &["--poll-interval-s", "1"]).await;
        for engine in rig.fleet().engines() {
            engine.behave("/metrics", Behaviour::Raw(METRICS.to_vec()));
        }
        tokio::time::sleep(SETTLED).await;
        let requests = || {
            let engines = rig.fleet().engines().iter();
            engines
                .filter_map(|engine| engine.requests().last().map(|last| last.number))
                .sum::<u64>()
        };
        let before = (requests(), cpu(rig.pid()), written(rig.pid()));
        let threads = cpu_by_thread(rig.pid());
        let commits = rig.commits().await;
        tokio::time::sleep(time).await;
        let seconds = time.as_secs_f64();
        let used = cpu(rig.pid()) - before.1;
        let asked = (requests() - before.0) as f64 / seconds;
        let kib = (written(rig.pid()) - before.2) / 1_024.0 / seconds;
        let commits = (rig.commits().await - commits) / seconds;
        share = used / seconds;
        let reading_us = share / size as f64 * 1e6;
        report.row(&[
            size.to_string(),
            format!("{:.1} %", share * 100.0),
            format!("{reading_us:.0}"),
            format!("{asked:.0}"),
            format!("{commits:.1}"),
            format!("{kib:.0}"),
        ]);
        let mut by_thread = cpu_by_thread(rig.pid());
        for (name, seconds) in &mut by_thread {
            *seconds -= threads.get(name).copied().unwrap_or(0.0);
            *seconds = round(*seconds / time.as_secs_f64());
        }
        curve.push(json!({
            "engines": size, "share_of_core": round(share), "us_per_reading": round(reading_us),
            "requests_per_s": round(asked), "commits_per_s": round(commits),
            "kib_written_per_s": round(kib), "by_thread": by_thread,
        }));
    }
    report.figure(Figure {
        name: format!("{} engines read every second", sizes[sizes.len() - 1]),
        value: share,
        unit: "of one core",
        bound: Some(Bound::AtMost(0.1, Some(0.05))),
        detail: json!({ "curve": curve }),
    });
}
