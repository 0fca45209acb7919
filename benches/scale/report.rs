//! Tables for people, or one object a line for programs.

use std::time::Duration;

use kvgate::load::Machine;
use serde_json::{Value, json};

/// How long the disk is looked at, for each way to write.
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
        let folder = tempfile::tempdir_in(".").unwrap();
        let machine = Machine::measure(folder.path(), DISK).unwrap();
        if json {
            println!("{}", json!({ "machine": machine }));
        } else {
            println!(
                "{} cores, load {}, fdatasync p50 {:.2} ms, {:.0}/s: {}",
                machine.cores,
                machine.load,
                machine.fdatasync_p50_ms,
                machine.fdatasync_per_s,
                if machine.quiet { "quiet" } else { "noisy" }
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
