//! Seeds of the whole simulation.
use kvgate_sim::report::{Summary, run_seed};
use kvgate_sim::run::Plan;

#[test]
fn the_promises_hold_on_every_seed() {
    let seeds: u64 = std::env::var("KVGATE_SIM_SEEDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(300);
    let mut all = Summary::default();
    let begun = std::time::Instant::now();
    for seed in 0..seeds {
        match run_seed(Plan::honest(seed), 60) {
            Ok(summary) => all.add(&summary),
            Err(failure) => panic!("{failure}"),
        }
    }
    println!("{all}{:?}", begun.elapsed());
}
