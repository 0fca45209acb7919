//! Many agents at once, each a session of some turns, with a tool between them. Stop and start the gate meanwhile: the
//! rollout goes on.
//!
//! `cargo run -p kvgate-client --example rollout -- [SESSIONS] [TURNS]`

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use kvgate_client::{CloseMode, Gate, GateConfig, TicketCancelled, Usage};
use tokio::task::JoinSet;
use tokio::time::sleep;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (sessions, turns) = (number(64)?, number(8)?);

    let gate = Gate::new(GateConfig {
        client: Some("rollout-example".to_owned()),
        ..GateConfig::default()
    })?;
    let mut agents = JoinSet::new();
    for session in 0..sessions {
        agents.spawn(agent(gate.clone(), session, turns));
    }
    let mut told: BTreeMap<String, u64> = BTreeMap::new();
    while let Some(agent) = agents.join_next().await {
        match agent? {
            Ok(actions) => {
                for action in actions {
                    *told.entry(action).or_default() += 1;
                }
            }
            // A decision of the gate: this session was closed elsewhere.
            Err(cancelled) => println!("{cancelled}"),
        }
    }
    println!("{told:#?}");
    if !gate.flush().await {
        println!("some releases could not be delivered; they are left to the TTL");
    }
    Ok(())
}

/// One multi-turn program: its context grows with each turn.
async fn agent(gate: Gate, number: u64, turns: u64) -> Result<Vec<String>, TicketCancelled> {
    let session = gate.session(format!("agent-{number}"));
    let mut actions = Vec::new();
    for turn in 0..turns {
        let (prompt, completion) = (4_096 + turn * 2_048, 512);
        let lease = session.acquire(session.ask(prompt, completion)).await?;
        actions.push(format!("{} {}", lease.action(), lease.reason()));
        // The request goes to the engine here, with `lease.engine_fields()`.
        sleep(Duration::from_millis(50)).await;
        lease
            .release(Usage {
                prompt_tokens: Some(prompt),
                completion_tokens: Some(completion / 2),
                ..Usage::default()
            })
            .await;
        // The tool, without a lease.
        sleep(Duration::from_millis(20)).await;
    }
    session.close(CloseMode::Join).await;
    Ok(actions)
}
