//! History over a kill: what was sampled is there after the next start.

use std::time::Duration;

use serde_json::Value;
use tokio::time::interval;

use super::fleet;
use crate::support::process::Kvgate;

/// The greatest value of each second of the last five minutes.
async fn ceilings(gate: &Kvgate) -> Vec<Option<f64>> {
    let path = "/v1/history?series=ceiling,admit_rate&range=5m";
    let body = gate.get(path).await;
    assert_eq!(body["step_s"], 1);
    let values = body["series"]["ceiling"]["max"].as_array().unwrap();
    assert_eq!(values.len(), 300);
    values.iter().map(Value::as_f64).collect()
}

/// Section 9: one sample a second; a kill -9 loses none of them, and the next start goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_survives_a_kill() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
    let sampled = |values: &[Option<f64>]| values.iter().flatten().count();
    let mut looks = interval(Duration::from_millis(50));
    while sampled(&ceilings(&gate).await) < 2 {
        looks.tick().await;
    }
    let before = sampled(&ceilings(&gate).await);
    gate.kill();
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
    let after = ceilings(&gate).await;
    assert!(sampled(&after) >= before, "{after:?}");
    let ceilings: Vec<f64> = after.iter().flatten().copied().collect();
    assert!(ceilings.contains(&900_000.0), "{ceilings:?}");
    let minutes = gate.get("/v1/history?series=ceiling&range=7d").await;
    assert_eq!(minutes["step_s"], 60);
    assert_eq!(
        minutes["series"]["ceiling"]["mean"]
            .as_array()
            .unwrap()
            .len(),
        10_080
    );
    assert!(gate.terminate().success());
}
