//! Step reports in the book of the judge (REP1), written from what the store kept.
//!
//! | id | what holds |
//! |---|---|
//! | I16 | the reports of a run and its open window add up to the counters, and nobody is told another |

use std::collections::BTreeMap;

use kvgate_core::ids::{RunId, StepNo};
use kvgate_core::record::Record;
use kvgate_core::report::{StepReport, Window};
use kvgate_core::tally::Tally;

use crate::audit::{Held, broken};

/// Windows and reports as they were kept.
#[derive(Debug, Default)]
pub(crate) struct Trackers {
    windows: BTreeMap<Option<RunId>, Window>,
    steps: BTreeMap<StepNo, StepReport>,
    /// The last report of this commit, and the window that it ended.
    last: Option<(StepReport, Window)>,
}

impl Trackers {
    /// One kept record; others are of no interest here.
    pub(crate) fn kept(&mut self, record: &Record) -> Held {
        match record {
            Record::Step(report) => self.step(report),
            Record::Window(run, window) => self.window(run.as_ref(), window),
            Record::StepForgotten(number) => {
                self.steps.remove(number);
                Ok(())
            }
            Record::WindowForgotten(run) => {
                self.windows.remove(&Some(run.clone()));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn step(&mut self, report: &StepReport) -> Held {
        let own = self.windows.get(&Some(report.run.clone()));
        let Some(window) = own.or_else(|| self.windows.get(&None)).cloned() else {
            return broken("I16", format!("a report without a window: {report:?}"));
        };
        let Some(number) = report.number else {
            return broken("I16", format!("a report without a number: {report:?}"));
        };
        let same = |other: &StepReport| (&other.run, other.step) == (&report.run, report.step);
        if self.steps.values().any(same) {
            return broken("I16", format!("a step has two reports: {report:?}"));
        }
        // A peak that was raised may still wait to be kept.
        if report.from != window.from || report.usage_peak < window.usage_peak {
            return broken("I16", format!("{report:?} is not of {window:?}"));
        }
        self.steps.insert(number, report.clone());
        self.last = Some((report.clone(), window));
        Ok(())
    }

    /// A window goes on, or begins where a report ended, with the counters that it ended with.
    fn window(&mut self, run: Option<&RunId>, window: &Window) -> Held {
        let before = self.windows.insert(run.cloned(), window.clone());
        let goes_on = before.as_ref().is_some_and(|before| {
            (before.from, &before.base) == (window.from, &window.base)
                && before.usage_peak <= window.usage_peak
        });
        let follows = self.last.as_ref().is_some_and(|(report, ended)| {
            report.to == window.from
                && window.base.since(&ended.base) == *report.counts
                && ended.base.since(&window.base) == Tally::default()
                && window.usage_peak.is_none()
                && run.is_none_or(|run| *run == report.run)
        });
        let is_first = before.is_none() && run.is_none() && *window.base == Tally::default();
        if goes_on || follows || is_first {
            Ok(())
        } else {
            broken("I16", format!("{window:?} of {run:?} followed {before:?}"))
        }
    }

    /// A commit is whole: no window begins ahead of the counters.
    pub(crate) fn whole(&mut self, tally: &Tally) -> Held {
        self.last = None;
        for (run, window) in &self.windows {
            if window.base.since(tally) != Tally::default() {
                return broken("I16", format!("the window of {run:?} is ahead: {window:?}"));
            }
        }
        Ok(())
    }

    /// A report that was told is the one that is kept.
    pub(crate) fn told(&self, report: &StepReport) -> Held {
        let kept = report.number.and_then(|number| self.steps.get(&number));
        if kept == Some(report) {
            Ok(())
        } else {
            broken("I16", format!("{report:?} was told, kept is {kept:?}"))
        }
    }
}
