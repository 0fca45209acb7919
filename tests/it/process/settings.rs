//! Settings and audit over kill -9, and what a start makes of them.

use serde_json::{Value, json};

use super::fleet;
use crate::support::app::SOON;
use crate::support::process::Kvgate;

async fn settings(gate: &Kvgate) -> Value {
    gate.get("/v1/settings").await
}

/// Who did what, newest first. Times are shown by the present clock (TIM1), which may round to the next
/// millisecond.
async fn audit(gate: &Kvgate) -> Vec<Value> {
    let mut entries = gate.list("/v1/audit").await;
    for entry in &mut entries {
        entry["at"] = Value::Null;
    }
    entries
}

/// SET2, SET3, DUR1: what was answered is in force after kill -9, and the audit has it. A start says what
/// it hides; `--reset-settings` returns to what is configured.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn set2_settings_survive_a_kill() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let configured = [
        "--router",
        &router,
        "--program-admission",
        "--admission-headroom",
        "0.8",
    ];
    let gate = Kvgate::serve(data.path(), &configured);
    let before = settings(&gate).await;
    let lease = gate.acquire("t", 10).await.lease();
    let change = json!({"headroom": 0.5, "paused": true, "expected_decode_cap": 7});
    assert_eq!(gate.patch("/v1/settings", &change).await.status, 200);
    let revoked = gate
        .post(&format!("/v1/leases/{lease}/revoke"), &json!({}))
        .await;
    assert_eq!(revoked.status, 200);
    let set = settings(&gate).await;
    let done = audit(&gate).await;
    assert_eq!(done.len(), 2);
    gate.kill();

    let mut gate = Kvgate::listen(data.path(), &configured);
    let told = gate.wait_for_log(
        "a setting that was set at run time hides a configured one; --reset-settings drops it",
    );
    assert_eq!(told["fields"]["setting"], "headroom");
    assert_eq!(told["fields"]["in_force"], "0.5");
    assert_eq!(told["fields"]["configured"], "0.8");
    gate.wait_for_log("ready");
    assert_eq!(settings(&gate).await, set);
    assert_eq!(audit(&gate).await, done);
    assert_eq!(gate.acquire("u", 10).await.body["reason"], "disabled");
    gate.terminate();

    let reset = [&configured[..], &["--reset-settings"]].concat();
    let mut gate = Kvgate::listen(data.path(), &reset);
    let told = gate.wait_for_log("an operator acted");
    assert_eq!(told["fields"]["who"], "kvgate");
    gate.wait_for_log("ready");
    assert_eq!(settings(&gate).await, before);
    let entry = &audit(&gate).await[0];
    assert_eq!(
        (&entry["who"], &entry["action"]),
        (&json!("kvgate"), &json!("settings_reset"))
    );
    assert_eq!(
        entry["detail"],
        "Returned to what is configured: paused from on back to the configured off; headroom from 0.5 back to the \
         configured 0.8; expected_decode_cap from 7 back to the configured none."
    );
    gate.kill();
    let gate = Kvgate::serve(data.path(), &reset);
    assert_eq!(audit(&gate).await.len(), 3, "there was nothing to return");
}

/// SET1: what was set at run time must fit what is configured now; a start that it does not fit is refused,
/// and says what to do.
#[tokio::test]
async fn set1_a_start_refuses_what_does_not_fit() {
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(data.path(), &[]);
    let on = json!({"program_admission": true});
    assert_eq!(gate.patch("/v1/settings", &on).await.status, 200);
    gate.terminate();
    let misfit = ["--admission-headroom", "7"];
    let (code, log) = Kvgate::try_serve(data.path(), &misfit).err().unwrap();
    assert_eq!(code, Some(2), "{log}");
    assert!(
        log.contains("--reset-settings") && log.contains("headroom"),
        "{log}"
    );
    let gate = Kvgate::try_serve(
        data.path(),
        &["--admission-headroom", "7", "--reset-settings"],
    );
    let gate = gate.map_err(|(_, log)| log).unwrap();
    assert_eq!(
        settings(&gate).await["program_admission"],
        json!({"value": false, "origin": "default"})
    );
}

/// Waits until there is a notice, or none.
async fn until_told(gate: &Kvgate, wanted: bool) {
    let told = async { while (gate.get("/v1/state").await["notices"] != json!([])) != wanted {} };
    tokio::time::timeout(SOON, told)
        .await
        .expect("the notices never came to this");
}

/// SET4, CLO10: what closes come to is told while closes are on, which may begin and end at run time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn set4_notices_of_closes_follow_the_setting() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let mut gate = Kvgate::serve(data.path(), &["--router", &fleet.router_url()]);
    until_told(&gate, false).await;
    let lifecycle = |on: bool| json!({"session_lifecycle": on});
    gate.patch("/v1/settings", &lifecycle(true)).await;
    gate.wait_for_log("session closes at an engine");
    until_told(&gate, true).await;
    let closed = gate
        .post("/v1/sessions/s/close?wait_s=20", &json!({}))
        .await;
    assert_eq!(
        (closed.status, &closed.body["state"]),
        (202, &json!("done"))
    );
    gate.patch("/v1/settings", &lifecycle(false)).await;
    until_told(&gate, false).await;
    let refused = gate.post("/v1/sessions/s/close", &json!({})).await;
    assert_eq!(refused.body, json!({"state": "disabled"}));
    gate.patch("/v1/settings", &lifecycle(true)).await;
    gate.wait_for_log("session closes at an engine");
}
