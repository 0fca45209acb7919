//! Tables for people, or one object a line for programs.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{histogram, load_average, millis};

/// How long the disk is looked at.
const DISK: Duration = Duration::from_secs(1);

/// Where figures go.
pub struct Report {
    json: bool,
}

/// One figure with what it is held to.
pub struct Figure {
    pub name: String,
    pub value: f64,
    pub unit: &'static str,
    /// `None` where nothing is asked of it.
    pub bound: Option<Bound>,
    pub detail: Value,
}

/// What must be, and what is aimed at.
#[derive(Clone, Copy)]
pub enum Bound {
    AtMost(f64, Option<f64>),
    AtLeast(f64, Option<f64>),
}

impl Report {
    /// Looks at the machine first: every figure is to be read with it.
    pub fn begin(json: bool) -> Self {
        let load = load_average();
        let load_1 = load.split(' ').next().and_then(|load| load.parse().ok());
        let load_1: f64 = load_1.unwrap_or(f64::INFINITY);
        let (p50_ms, per_s) = disk();
        let quiet = p50_ms < 1.0 && load_1 < 3.0;
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        if json {
            let machine = json!({
                "cores": cores, "load": load_1, "fdatasync_p50_ms": round(p50_ms),
                "fdatasync_per_s": round(per_s), "quiet": quiet,
            });
            println!("{}", json!({ "machine": machine }));
        } else {
            println!(
                "{cores} cores, load {load}, fdatasync p50 {p50_ms:.2} ms, {per_s:.0}/s: {}",
                if quiet { "quiet" } else { "noisy" }
            );
        }
        Self { json }
    }

    /// The head of a table.
    pub fn table(&self, title: &str, columns: &[&str]) {
        if !self.json {
            println!("\n{title}\n");
            println!("| {} |", columns.join(" | "));
            println!("|{}", "---|".repeat(columns.len()));
        }
    }

    /// One line of it.
    pub fn row(&self, cells: &[String]) {
        if !self.json {
            println!("| {} |", cells.join(" | "));
        }
    }

    pub fn figure(&self, figure: Figure) {
        let Figure {
            name,
            value,
            unit,
            bound,
            detail,
        } = figure;
        let (sense, must, aim) = match bound {
            Some(Bound::AtMost(must, aim)) => (Some("at_most"), Some(must), aim),
            Some(Bound::AtLeast(must, aim)) => (Some("at_least"), Some(must), aim),
            None => (None, None, None),
        };
        if self.json {
            let line = json!({
                "figure": name, "value": round(value), "unit": unit, "sense": sense,
                "must": must, "aim": aim, "detail": detail,
            });
            println!("{line}");
        } else if let Some(bound) = bound {
            println!("{name}: {} {unit}, {}", round(value), bound.judged(value));
        }
    }
}

impl Bound {
    fn judged(self, value: f64) -> String {
        let (word, must, aim, met, aimed) = match self {
            Self::AtMost(must, aim) => {
                let aimed = aim.is_some_and(|aim| value <= aim);
                ("at most", must, aim, value <= must, aimed)
            }
            Self::AtLeast(must, aim) => {
                let aimed = aim.is_some_and(|aim| value >= aim);
                ("at least", must, aim, value >= must, aimed)
            }
        };
        let aim = aim.map_or_else(String::new, |aim| format!(", aim {aim}"));
        let verdict = match (met, aimed) {
            (_, true) => "aim met",
            (true, false) => "met",
            (false, false) => "missed",
        };
        format!("{word} {must}{aim}: {verdict}")
    }
}

/// What the disk does by itself: p50 in ms of 4 KiB appended and synced, and how many a second.
fn disk() -> (f64, f64) {
    let mut file: File = tempfile::tempfile_in(".").unwrap();
    let mut nanos = histogram();
    let began = Instant::now();
    while began.elapsed() < DISK {
        let one = Instant::now();
        file.write_all(&[7; 4_096]).unwrap();
        file.sync_data().unwrap();
        nanos.saturating_record(one.elapsed().as_nanos() as u64);
    }
    let per_s = nanos.len() as f64 / began.elapsed().as_secs_f64();
    (millis(&nanos, 0.5), per_s)
}

/// Four digits are more than such a figure has.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10_f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// The middle one.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
