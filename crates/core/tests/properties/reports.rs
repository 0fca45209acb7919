//! Step reports next to a slow recount: what each turn counted, added up since a run's last step.

use std::collections::BTreeMap;

use kvgate_core::command::Command;
use kvgate_core::effect::{Effect, Reply};
use kvgate_core::ids::{RunId, Seq};
use kvgate_core::report::StepReport;
use kvgate_core::units::Timestamp;
use proptest::option;
use proptest::prelude::*;

use crate::determinism::Run;
use crate::model::Counter;
use crate::steps::{Reference, Step, T0, step};
use crate::subject::counters;

type Counts = BTreeMap<Counter, u64>;

/// What is asked after a step of time: the report of a run's step, or a look at its window.
#[derive(Clone, Debug)]
enum Asked {
    Take(u8, u64),
    Peek(u8),
}

fn asked() -> impl Strategy<Value = Option<Asked>> {
    let one = prop_oneof![
        3 => (0u8..3, 0u64..9).prop_map(|(run, step)| Asked::Take(run, step)),
        1 => (0u8..4).prop_map(Asked::Peek),
    ];
    option::weighted(0.4, one)
}

/// The run without a name is one of them.
fn run(number: u8) -> RunId {
    let names = ["", "exp", "lauf/ß", "never taken"];
    RunId::new(names[usize::from(number)]).unwrap()
}

/// The plain reference.
#[derive(Default)]
struct Books {
    /// What each turn counted.
    turns: Vec<Counts>,
    /// All of it.
    sum: Counts,
    /// Windows: the turn of the last step, whose own ends and grants are the window's, and its time.
    of_runs: BTreeMap<RunId, (usize, u64)>,
    of_new_runs: (usize, u64),
    taken: BTreeMap<(RunId, u64), StepReport>,
}

impl Books {
    fn turned(&mut self, sum: &Counts) {
        let before = std::mem::replace(&mut self.sum, sum.clone());
        let counted = sum.iter().map(|(counter, count)| {
            let before = before.get(counter).copied().unwrap_or(0);
            (*counter, count - before)
        });
        self.turns.push(counted.collect());
    }

    fn since(&self, turn: usize) -> Counts {
        let mut counts = Counts::new();
        for (counter, count) in self.turns[turn..].iter().flatten() {
            *counts.entry(*counter).or_default() += count;
        }
        counts.retain(|_, count| *count > 0);
        counts
    }

    /// The report is what the turns since the run's last step come to.
    fn check(&self, run: &RunId, report: &StepReport, now: u64) {
        let window = self.of_runs.get(run);
        let (turn, from) = window.copied().unwrap_or(self.of_new_runs);
        assert_eq!(counters(&report.counts), self.since(turn), "{run:?}");
        let window = [from, now].map(Timestamp::from_millis);
        assert_eq!([report.from, report.to], window, "{run:?}");
        assert_eq!(&report.run, run);
    }
}

fn told(effects: Vec<Effect>) -> (Option<Seq>, StepReport) {
    let told = effects.into_iter().find_map(|effect| match effect {
        Effect::Reply {
            seq,
            reply: Reply::Step(report),
            ..
        } => Some((seq, *report)),
        _ => None,
    });
    told.expect("a report is answered")
}

proptest! {
    #![proptest_config(crate::config(150))]

    /// REP1, DUR2: a report holds what was counted since the run's previous step, whatever other runs
    /// do and over restarts; asked again it is the same; a look drains nothing.
    #[test]
    fn rep1_reports_are_what_was_counted_since(
        steps in prop::collection::vec((step(), asked()), 1..60),
    ) {
        let mut gate = Run::new(7);
        let mut books = Books { of_new_runs: (0, T0), ..Books::default() };
        let mut reference = Reference::new();
        let pause = Step::Turn { after: 0, commands: Vec::new() };
        for (step, asked) in &steps {
            reference = reference.step(step);
            for turn in &reference.turns {
                (gate, _) = gate.take(turn);
                books.turned(&turn.after.counters);
            }
            let Some(asked) = asked else { continue };
            reference = reference.step(&pause);
            let now = reference.model.now;
            let effects;
            match asked {
                Asked::Peek(number) => {
                    (gate, effects) = gate.give(now, Command::PeekStep(run(*number)));
                    let (seq, report) = told(effects);
                    assert_eq!((seq, report.step), (None, None));
                    books.check(&run(*number), &report, now);
                }
                Asked::Take(number, step) => {
                    let (run, step) = (run(*number), *step);
                    (gate, effects) = gate.give(now, Command::TakeStep { run: run.clone(), step });
                    let (seq, report) = told(effects);
                    let key = (run.clone(), step);
                    if let Some(before) = books.taken.get(&key) {
                        assert_eq!((seq, &report), (None, before), "the same again");
                    } else {
                        assert!(seq.is_some());
                        assert_eq!(report.step, Some(step));
                        books.check(&run, &report, now);
                        books.of_new_runs = (books.turns.len(), now);
                        books.of_runs.insert(run, books.of_new_runs);
                        books.taken.insert(key, report);
                    }
                }
            }
            books.turned(&reference.model.counters);
        }
    }
}
