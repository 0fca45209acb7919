//! One session of three turns, with a lease for each.
//!
//! `cargo run -p kvgate-client --example quickstart`: with a gate at `KVGATE_URL` (else `http://127.0.0.1:7070`), or
//! without one.

use std::error::Error;

use kvgate_client::{CloseMode, Gate, GateConfig, Usage};
use serde_json::{Value, json};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let gate = Gate::new(GateConfig::default())?;
    let session = gate.session("quickstart");
    for turn in 0..3 {
        let lease = session.acquire(session.ask(18_432, 4_096)).await?;
        let (action, reason) = (lease.action(), lease.reason());
        println!(
            "turn {turn}: {action} ({reason}), waited {:?}",
            lease.waited()
        );
        let fields = lease.engine_fields();
        let request = json!({"input_ids": [], "session_id": fields.session_id, "rid": fields.rid});
        let answer = generate(&request).await;
        lease.release(Usage::from_answer(&answer)).await;
        // Tools run here, without a lease.
    }
    let close = session.close(CloseMode::Join).await;
    println!("close: {:?}", close.status);
    if let Some(report) = gate.report(None, 1).await {
        println!("{:#?}", report.metrics);
    }
    gate.flush().await;
    Ok(())
}

/// Your request to the engine or router.
async fn generate(request: &Value) -> Value {
    let _ = request;
    json!({"meta_info": {"prompt_tokens": 18_432, "completion_tokens": 310, "cached_tokens": 17_920}})
}
