//! The client and a gate that asks for tokens.

use std::fs;

use kvgate_client::{Ask, Gate, GateConfig};

use crate::support::process::Kvgate;

/// A token file is enough, the gate's own serves as well; without a token the work goes on, unguarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_sends_its_token() {
    let data = tempfile::tempdir().unwrap();
    let tokens = data.path().join("tokens");
    fs::write(&tokens, "rollout:client:token-of-the-rollout-1\n").unwrap();
    let arguments = [
        "--program-admission",
        "--token-file",
        tokens.to_str().unwrap(),
    ];
    let gate = Kvgate::serve(data.path(), &arguments);
    let config = || GateConfig {
        token: None,
        token_file: None,
        ..GateConfig::at(gate.url(""))
    };
    let with = GateConfig {
        token_file: Some(tokens.clone()),
        ..config()
    };
    for (config, reason) in [(with, "degraded"), (config(), "refused")] {
        let client = Gate::new(config).unwrap();
        let lease = client.acquire(Ask::new("s", 10, 10)).await.unwrap();
        assert_eq!(lease.reason(), reason);
    }
}
