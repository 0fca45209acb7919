//! Step reports (REP1): what happened since a run's previous step, drained once per step.
//!
//! A window is a copy of the counters as they stood when it began; what happened in it is the
//! difference. Only the highest usage needs a memory of its own.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::ids::{RunId, StepNo};
use crate::policy::{RUNS_MAX, STEPS_MAX};
use crate::tally::Tally;
use crate::units::{Ppm, Timestamp, Tokens};

/// The time since a run's previous step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    /// When it began.
    pub from: Timestamp,
    /// The counters at that moment.
    pub base: Box<Tally>,
    /// Highest usage of an engine in it.
    pub usage_peak: Option<Ppm>,
}

/// How the gate stands when a report is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Session closes are on.
    pub session_lifecycle: bool,
    /// Waiters in line.
    pub waiting: u64,
    /// Admission ceiling.
    pub ceiling: Tokens,
    /// Sum of the held leases.
    pub reserved: Tokens,
    /// Held leases.
    pub leases: u64,
    /// Worker-set generation.
    pub epoch: crate::ids::Epoch,
    /// There is no usable ceiling.
    pub degraded: bool,
}

/// One report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepReport {
    /// Number of the report; `None` for a look at a window that goes on.
    pub number: Option<StepNo>,
    /// The run.
    pub run: RunId,
    /// The step; `None` for a look at a window that goes on.
    pub step: Option<u64>,
    /// Beginning of the window.
    pub from: Timestamp,
    /// Its end.
    pub to: Timestamp,
    /// What was counted in it.
    pub counts: Box<Tally>,
    /// Highest usage of an engine in it.
    pub usage_peak: Option<Ppm>,
    /// How the gate stood at its end.
    pub standing: Standing,
}

/// Windows and reports.
#[derive(Clone, Debug)]
pub(crate) struct Reports {
    /// Since the latest step of any run, else since the first start: where a new run begins.
    pub(crate) latest: Window,
    windows: BTreeMap<RunId, Window>,
    steps: BTreeMap<StepNo, StepReport>,
    by_key: HashMap<(RunId, u64), StepNo, FixedState>,
    next: u64,
}

impl Reports {
    pub(crate) fn new(first_start: Timestamp, seed: u64) -> Self {
        Self {
            latest: Window {
                from: first_start,
                base: Box::default(),
                usage_peak: None,
            },
            windows: BTreeMap::new(),
            steps: BTreeMap::new(),
            by_key: HashMap::with_hasher(FixedState::with_seed(seed)),
            next: 1,
        }
    }

    pub(crate) const fn next(&self) -> StepNo {
        StepNo(self.next)
    }

    pub(crate) fn put_window(&mut self, run: Option<&RunId>, window: Window) {
        match run {
            Some(run) => drop(self.windows.insert(run.clone(), window)),
            None => self.latest = window,
        }
    }

    pub(crate) fn remove_window(&mut self, run: &RunId) {
        self.windows.remove(run);
    }

    pub(crate) fn put_step(&mut self, report: StepReport) {
        let (Some(number), Some(step)) = (report.number, report.step) else {
            return;
        };
        self.next = self.next.max(number.0.saturating_add(1));
        self.by_key.insert((report.run.clone(), step), number);
        self.steps.insert(number, report);
    }

    pub(crate) fn remove_step(&mut self, number: StepNo) {
        if let Some(report) = self.steps.remove(&number)
            && let Some(step) = report.step
        {
            self.by_key.remove(&(report.run, step));
        }
    }

    /// The report that was taken for this step.
    pub(crate) fn taken(&self, run: &RunId, step: u64) -> Option<&StepReport> {
        let number = self.by_key.get(&(run.clone(), step))?;
        self.steps.get(number)
    }

    /// The window of a run; a new one begins at the latest step of any run.
    pub(crate) fn window(&self, run: &RunId) -> &Window {
        self.windows.get(run).unwrap_or(&self.latest)
    }

    /// Newest first, from a number on.
    pub(crate) fn newest_from(&self, highest: StepNo) -> impl Iterator<Item = &StepReport> {
        self.steps.range(..=highest).rev().map(|(_, report)| report)
    }

    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The oldest report, when there is one too many (section 9).
    pub(crate) fn one_too_many(&self) -> Option<StepNo> {
        let (number, _) = self.steps.first_key_value()?;
        (self.steps.len() > STEPS_MAX).then_some(*number)
    }

    /// The run whose last step is longest ago, when there is one too many.
    pub(crate) fn idle_run(&self) -> Option<RunId> {
        if self.windows.len() <= RUNS_MAX {
            return None;
        }
        let oldest = self.windows.iter().min_by_key(|(_, window)| window.from);
        oldest.map(|(run, _)| run.clone())
    }

    /// Takes in the usage of the worst engine; gives the windows whose peak it is.
    pub(crate) fn usage(&mut self, worst: Ppm) -> Vec<Option<RunId>> {
        let mut raised = Vec::new();
        if self.latest.usage_peak < Some(worst) {
            self.latest.usage_peak = Some(worst);
            raised.push(None);
        }
        for (run, window) in &mut self.windows {
            if window.usage_peak < Some(worst) {
                window.usage_peak = Some(worst);
                raised.push(Some(run.clone()));
            }
        }
        raised
    }

    /// Everything that is kept: windows by run, the one of new runs first, and reports by number.
    pub(crate) fn kept(&self) -> (Vec<(Option<RunId>, Window)>, Vec<StepReport>) {
        let latest = core::iter::once((None, self.latest.clone()));
        let runs = self.windows.iter();
        let runs = runs.map(|(run, window)| (Some(run.clone()), window.clone()));
        (
            latest.chain(runs).collect(),
            self.steps.values().cloned().collect(),
        )
    }
}
