//! Taking step reports, and sampling usage for them (REP1).

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::command::{SLICE_MAX, Slice};
use crate::effect::{Page, Reply, Tag};
use crate::ids::{RunId, StepNo};
use crate::machine::Machine;
use crate::record::Record;
use crate::report::{Standing, StepReport, Window};
use crate::turn::Turn;

impl Turn {
    /// The report of a step; asked again, the same. It begins a new window of its run.
    pub(crate) fn take_step(&mut self, tag: Tag, run: RunId, step: u64) {
        if let Some(taken) = self.machine.state.reports.taken(&run, step) {
            let reply = Reply::Step(Box::new(taken.clone()));
            return self.reply(tag, None, reply);
        }
        let seq = self.next_seq();
        let report = StepReport {
            number: Some(self.machine.state.reports.next()),
            step: Some(step),
            ..self.machine.look_at_window(run.clone())
        };
        let window = Window {
            from: self.now,
            base: Box::new(self.machine.state.tally.clone()),
            usage_peak: None,
        };
        self.record(Record::Step(Box::new(report.clone())));
        for whose in [Some(run), None] {
            self.machine.raised_windows.remove(&whose);
            self.record(Record::Window(whose, window.clone()));
        }
        if let Some(idle) = self.machine.state.reports.idle_run() {
            self.machine.raised_windows.remove(&Some(idle.clone()));
            self.record(Record::WindowForgotten(idle));
        }
        if let Some(oldest) = self.machine.state.reports.one_too_many() {
            self.record(Record::StepForgotten(oldest));
        }
        self.reply(tag, Some(seq), Reply::Step(Box::new(report)));
    }

    /// After a reading round with a good reading: the usages go into the windows.
    pub(crate) fn sample_usage(&mut self) {
        let machine = &mut *self.machine;
        let measure = machine.fleet.measure();
        let (Some(mean), Some(worst)) = (measure.usage_mean, measure.usage_max) else {
            return;
        };
        machine.state.tally.sample_usage(mean);
        let raised = machine.state.reports.usage(worst);
        machine.raised_windows.extend(raised);
    }

    /// Peaks that were raised ride along with the counters.
    pub(crate) fn record_raised_windows(&mut self) {
        for run in core::mem::take(&mut self.machine.raised_windows) {
            let reports = &self.machine.state.reports;
            let window = match &run {
                Some(run) => reports.window(run).clone(),
                None => reports.latest.clone(),
            };
            self.records.push(Record::Window(run, window));
        }
    }
}

impl Machine {
    /// The window of a run as it stands.
    pub(crate) fn look_at_window(&self, run: RunId) -> StepReport {
        let window = self.state.reports.window(&run);
        let measure = self.fleet.measure();
        StepReport {
            number: None,
            step: None,
            from: window.from,
            to: self.last_turn,
            counts: Box::new(self.state.tally.since(&window.base)),
            usage_peak: window.usage_peak,
            standing: Standing {
                session_lifecycle: self.policy.session_lifecycle,
                waiting: self.state.queue.len(),
                ceiling: measure.ceiling,
                reserved: self.state.ledger.reserved(),
                leases: u64::try_from(self.state.ledger.len()).unwrap_or(u64::MAX),
                epoch: self.state.epoch,
                degraded: measure.degraded.is_some(),
            },
            run,
        }
    }

    pub(crate) fn list_steps(&self, slice: Slice<StepNo>) -> Page<StepReport> {
        let mut looked_at = self.state.reports.newest_from(slice.from);
        let items: Vec<StepReport> = looked_at
            .by_ref()
            .take(slice.rows.min(SLICE_MAX))
            .cloned()
            .collect();
        Page::new(items, looked_at.next().is_some(), self.state.reports.len())
    }
}
