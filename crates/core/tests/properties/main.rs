//! Random command sequences, compared step by step with a plain reference, and the invariants of
//! the core after every step.
#![cfg(test)]
#![allow(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::wildcard_enum_match_arm,
    missing_docs,
    reason = "a test that overflows or meets an unexpected answer shall fail loudly"
)]

mod closing;
mod determinism;
mod model;
mod steps;
mod subject;
mod words;

use proptest::test_runner::Config;
use proptest_state_machine::prop_state_machine;

use crate::subject::Subject;

/// `PROPTEST_CASES` raises the number of cases.
fn config(cases: u32) -> Config {
    let asked = std::env::var("PROPTEST_CASES").ok();
    Config {
        cases: asked.and_then(|cases| cases.parse().ok()).unwrap_or(cases),
        max_shrink_iters: 20_000,
        ..Config::default()
    }
}

prop_state_machine! {
    #![proptest_config(config(600))]

    /// DEC1 to DEC4, TIC1 to TIC6, LEA1 to LEA4, CAP3 to CAP8, TIM2, TIM3, CNT1, DUR2, DUR6, ID2,
    /// CLO2 to CLO6, CLO8, CLO9.
    #[test]
    fn the_core_does_what_the_rules_say(sequential 1..60 => Subject);
}
