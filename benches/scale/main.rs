//! What the service costs as it grows: each part is a figure with its curve.
//!
//! `cargo bench --bench scale -- [PART].. [--json]`. The real binary is driven over loopback, beside
//! the fake engines of the demo in this process; all share the machine, so figures are to be read as
//! ratios between the sizes of one run, and times of processors as they are.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a program that prints its measurements and stops at what should not happen"
)]

#[path = "../support/mod.rs"]
mod support;

mod bulk;
mod callers;
mod closes;
mod engines;
mod process;
mod renewals;
mod report;
mod rig;
mod waiters;

use clap::{Parser, ValueEnum};
use tokio::runtime::Runtime;

use report::Report;

/// Open connections of this process and of the service: 10,000 waiting calls and some more.
const DESCRIPTORS: u64 = 20_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Callers beside 1,000 to 100,000 leases, and as many waiters.
    Waiters,
    /// 60,000 leases that are renewed every 7 s.
    Renewals,
    /// 16 to 256 engines that are read every second.
    Engines,
    /// 1,000 to 100,000 leases that end at one moment.
    Expiry,
    /// 1,000 to 100,000 waiters whose time is over at one moment.
    Aging,
    /// 1,000 to 100,000 waiters that are cancelled.
    Cancel,
    /// The end of a step: 500 to 5,000 closes on 16 engines.
    Closes,
}

/// What the service costs as it grows.
#[derive(Parser, Debug)]
struct Arguments {
    /// Parts to run; all of them without one.
    parts: Vec<Part>,
    /// One object a line in place of tables.
    #[arg(long)]
    json: bool,
    /// Leases, waiters, engines or sessions of the curve, in place of a part's own.
    #[arg(long, value_delimiter = ',')]
    sizes: Option<Vec<usize>>,
    /// Seconds of a measurement: of `renewals`, and of `engines` for each size.
    #[arg(long)]
    seconds: Option<u64>,
    /// `cargo bench` says so; without it a look whether it works is enough.
    #[arg(long, hide = true)]
    bench: bool,
    /// Bare engines for `closes`, in a process of their own.
    #[arg(long, hide = true)]
    serve_engines: Option<usize>,
}

impl Arguments {
    fn sizes(&self, usual: &[usize], quick: &[usize]) -> Vec<usize> {
        let own = if self.bench { usual } else { quick };
        self.sizes.clone().unwrap_or_else(|| own.to_vec())
    }

    fn usual_or_quick(&self, usual: usize, quick: usize) -> usize {
        if self.bench { usual } else { quick }
    }

    fn seconds(&self, usual: u64) -> u64 {
        self.seconds.unwrap_or(if self.bench { usual } else { 1 })
    }
}

fn main() {
    let arguments = Arguments::parse();
    let runtime = Runtime::new().unwrap();
    if let Some(count) = arguments.serve_engines {
        return runtime.block_on(closes::serve_engines(count));
    }
    rustls::crypto::ring::default_provider()
        .install_default()
        .unwrap();
    rlimit::increase_nofile_limit(DESCRIPTORS).unwrap();
    runtime.block_on(run(&arguments));
}

async fn run(arguments: &Arguments) {
    let report = Report::begin(arguments.json);
    let all = Part::value_variants().to_vec();
    let parts = if arguments.parts.is_empty() {
        all
    } else {
        arguments.parts.clone()
    };
    for part in parts {
        match part {
            Part::Waiters => waiters::run(arguments, &report).await,
            Part::Renewals => renewals::run(arguments, &report).await,
            Part::Engines => engines::run(arguments, &report).await,
            Part::Expiry => bulk::expiry(arguments, &report).await,
            Part::Aging => bulk::aging(arguments, &report).await,
            Part::Cancel => bulk::cancel(arguments, &report).await,
            Part::Closes => closes::run(arguments, &report).await,
        }
    }
}
