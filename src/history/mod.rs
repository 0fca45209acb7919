//! History: figures of the gate over time, in rings of fixed size (section 9).
//!
//! A thread of its own takes one sample a second from the published view, so that neither the writer
//! nor the lease transaction knows of it. Samples are kept for 15 minutes one by one, for 6 hours by
//! 10 s, and for 7 days by the minute, each with mean, least and greatest. The file beside the store
//! is written without sync: a kill of the process loses nothing, a power cut some seconds, and what
//! it tore is left out.
//!
//! Beside the rings it remembers, in memory only, the counters of the last minutes, so that a reader
//! can tell what was counted in them to the digit, since when each engine's figures stand still, and
//! the past hour of each engine.

mod engines;
mod lately;
mod ring;
mod series;

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use kvgate_core::ids::EngineId;
use kvgate_core::tally::Tally;
use kvgate_core::units::{Span, Timestamp};
use kvgate_core::view::View;

use crate::gate::Gate;

use engines::EngineRings;
use lately::{Counters, Standing};

pub use engines::{ENGINE_STEP_S, ENGINE_STEPS, EngineStep};
pub use ring::{HistoryError, Rings, STEPS, Summary};
pub use series::Series;

/// Name of the file in the data directory.
pub const FILE_NAME: &str = "history.rings";

/// Time between two samples.
const EVERY: Duration = Duration::from_secs(1);

/// The figures of a range: one summary, or none, for each step of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Window {
    /// Seconds between two points.
    pub step_s: u64,
    /// The beginning of the first step.
    pub from: Timestamp,
    /// For each step one summary; `None` where nothing was sampled.
    pub points: Vec<Option<Summary>>,
}

/// The handle for readers. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct History {
    rings: Arc<RwLock<Rings>>,
    lately: Arc<RwLock<Lately>>,
}

#[derive(Debug, Default)]
struct Lately {
    counters: Counters,
    standing: Standing,
    engines: EngineRings,
}

impl History {
    /// Goes on with the file in a directory, or begins one; until then samples are in memory only. A
    /// file that is none of ours, or of another shape, is set aside.
    ///
    /// # Errors
    /// When the file cannot be made; samples stay in memory then.
    pub fn keep_in(&self, directory: &Path) -> Result<(), HistoryError> {
        let rings = Rings::open(&directory.join(FILE_NAME))?;
        *self.rings.write().unwrap_or_else(PoisonError::into_inner) = rings;
        Ok(())
    }

    /// One series over the last `range_s` seconds until `now`, in steps of `step_s` seconds, which
    /// must be one of [`STEPS`].
    #[must_use]
    pub fn window(&self, series: Series, now: Timestamp, range_s: u64, step_s: u64) -> Window {
        let rings = self.rings.read().unwrap_or_else(PoisonError::into_inner);
        rings.window(series, now, range_s, step_s)
    }

    /// What was counted in about the last `span` until `now`, and in how long a time: less after a
    /// start, at most 15 minutes. `None` before the first sample.
    #[must_use]
    pub fn counted(&self, tally: &Tally, now: Timestamp, span: Span) -> Option<(Span, Tally)> {
        let lately = self.lately.read().unwrap_or_else(PoisonError::into_inner);
        let (at, before) = lately.counters.before(now, span)?;
        Some((now.since(at), tally.since(before)))
    }

    /// The past hour of an engine until `now`, in steps of [`ENGINE_STEP_S`] seconds.
    #[must_use]
    pub fn engine(&self, engine: &EngineId, now: Timestamp) -> Vec<Option<EngineStep>> {
        let lately = self.lately.read().unwrap_or_else(PoisonError::into_inner);
        lately.engines.window(engine, now)
    }

    /// Since when the figures of an engine are the same in every reading.
    #[must_use]
    pub fn stands_since(&self, engine: &EngineId) -> Option<Timestamp> {
        let lately = self.lately.read().unwrap_or_else(PoisonError::into_inner);
        lately.standing.since(engine)
    }

    /// Takes samples of the gate until the returned guard is dropped.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn sample(&self, gate: Gate) -> std::io::Result<Sampler> {
        let (stop, stopped) = mpsc::channel::<()>();
        let history = self.clone();
        let thread = thread::Builder::new()
            .name("kvgate-history".to_owned())
            .spawn(move || history.run(&gate, &stopped))?;
        Ok(Sampler {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    fn look(&self, view: &View, now: Timestamp) {
        let mut lately = self.lately.write().unwrap_or_else(PoisonError::into_inner);
        lately.counters.take(now, &view.tally);
        lately.standing.look(&view.engines, now);
        lately.engines.put(now, &view.engines);
    }

    fn run(&self, gate: &Gate, stopped: &mpsc::Receiver<()>) {
        let mut before: Option<(Timestamp, Tally)> = None;
        let mut failed = false;
        while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
            let Some(line) = gate.line() else { continue };
            let now = line.now();
            let view = gate.view();
            let waits = gate.stats().waits();
            let sample = series::sample(&view, waits, before.as_ref(), now);
            before = Some((now, view.tally.clone()));
            self.look(&view, now);
            let mut rings = self.rings.write().unwrap_or_else(PoisonError::into_inner);
            let written = rings.put(now, &sample);
            drop(rings);
            match written {
                Err(error) if !failed => {
                    tracing::warn!(%error, "history cannot be written; it goes on in memory");
                    failed = true;
                }
                Err(_) => {}
                Ok(()) => failed = false,
            }
        }
    }
}

/// Keeps sampling until it is dropped.
#[derive(Debug)]
pub struct Sampler {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for Sampler {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ended by a fault of its own, which the panic hook has told.
            let _ = thread.join();
        }
    }
}
