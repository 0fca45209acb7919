//! Acquire and release at Redis, which syncs before it answers: the rival that kvgate is compared with.
//!
//! `cargo bench --bench redis`. The rules are the Lua scripts in `benches/compare`; each round has a
//! Redis of its own. One caller a connection, closed loop, no hold time, client and server on the same
//! machine: as `kvgate bench`, and in the same JSON lines. A caller that has to wait takes its lease from
//! a list of its own with BLPOP.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints its measurements and stops at what should not happen"
)]

#[path = "../support/mod.rs"]
mod support;

mod caller;
mod check;
mod load;
mod server;

use std::path::PathBuf;
use std::process::Command;

use clap::{Parser, ValueEnum};
use serde_json::{Value, json};
use tokio::runtime::Builder;

use check::check;
use load::{Cell, load};
use server::Server;

#[derive(Parser)]
struct Arguments {
    /// Connections of each cell
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256, 1_024])]
    connections: Vec<usize>,
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["open", "contended"])]
    scenario: Vec<Scenario>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tcp")]
    transport: Vec<Transport>,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of the first round, in what is printed
    #[arg(long, default_value_t = 1)]
    first_round: usize,
    /// Length of one cell
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// The program
    #[arg(long, env = "REDIS_SERVER", default_value = "redis-server")]
    server: PathBuf,
    /// Folder on the disk that is measured; one in memory would make syncs free
    #[arg(long, default_value = env!("CARGO_TARGET_TMPDIR"))]
    data: PathBuf,
    /// A program and its arguments, split at blanks, that runs the server: such as strace
    #[arg(long, default_value = "")]
    under: String,
    /// Hold the scripts to the rules, over a kill as well, and measure nothing
    #[arg(long)]
    check: bool,
    /// Cargo passes it
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Scenario {
    /// Everything fits
    Open,
    /// 16 leases fit: the others wait in the queue
    Contended,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Transport {
    Tcp,
    Unix,
}

fn main() {
    let arguments = Arguments::parse();
    let found = Command::new(&arguments.server).arg("--version").output();
    if !found.is_ok_and(|done| done.status.success()) {
        eprintln!(
            "{} does not run: install the package redis-server, or name the program with --server",
            arguments.server.display()
        );
        std::process::exit(1);
    }
    // One thread, as the load of `kvgate bench`: the other core is the server's.
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    if arguments.check || !arguments.bench {
        return runtime.block_on(check(&arguments));
    }
    for round in 0..arguments.rounds {
        for &scenario in &arguments.scenario {
            for &transport in &arguments.transport {
                for &connections in &arguments.connections {
                    let server = Server::start(&arguments, transport);
                    let seconds = arguments.seconds;
                    let cell = runtime.block_on(load(&server, scenario, connections, seconds));
                    println!(
                        "{}",
                        line(
                            &cell,
                            transport,
                            scenario,
                            connections,
                            round + arguments.first_round
                        )
                    );
                }
            }
        }
    }
}

fn line(
    cell: &Cell,
    transport: Transport,
    scenario: Scenario,
    connections: usize,
    round: usize,
) -> Value {
    let pairs = cell.pairs as f64;
    json!({
        "system": "redis",
        "transport": format!("{transport:?}").to_lowercase(),
        "scenario": format!("{scenario:?}").to_lowercase(),
        "connections": connections,
        "round": round,
        "seconds": cell.seconds,
        "pairs": cell.pairs,
        "pairs_per_s": pairs / cell.seconds,
        "acquire_ms": cell.acquire,
        "release_ms": cell.release,
        "server_cpu_us_per_pair": cell.cpu_s * 1e6 / pairs,
        "load_cpu_us_per_pair": cell.load_cpu_s * 1e6 / pairs,
        "rss_bytes": cell.rss_bytes,
        "log_bytes_per_pair": cell.log_bytes as f64 / pairs,
    })
}
