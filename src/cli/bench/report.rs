//! What people read at the end of a run: medians of all rounds.

use crate::cli::out;
use crate::cli::table::{self, Kind, NOTHING};
use crate::load::{Figures, LoadError, Machine, Proof, Scenario, System, Told, Transport, median};

/// Everything that was told so far.
#[derive(Default)]
pub(super) struct Report {
    machine: Option<Machine>,
    figures: Vec<Figures>,
    proof: Option<Proof>,
}

/// The same measurement in all rounds.
struct Row<'a> {
    gate: Vec<&'a Figures>,
    against: Vec<&'a Figures>,
    bare: Vec<&'a Figures>,
}

/// A column and what stands in it.
type Column = (&'static str, fn(&Row<'_>) -> Option<String>);

/// One of the figures of a measurement, where it has it.
type Value = fn(&Figures) -> Option<f64>;

const PAIRS_PER_S: Value = |figures| Some(figures.pairs_per_s);
const SERVER_CPU: Value = |figures| figures.server_cpu_us_per_pair;

const PAIRS: &[Column] = &[
    ("pairs/s", |row| whole(&row.gate, PAIRS_PER_S)),
    ("acquire p50 ms", |row| {
        fine(&row.gate, |figures| Some(figures.acquire_ms?.p50))
    }),
    ("p99", |row| {
        fine(&row.gate, |figures| Some(figures.acquire_ms?.p99))
    }),
    ("p99.9", |row| {
        fine(&row.gate, |figures| Some(figures.acquire_ms?.p999))
    }),
    ("release p50 ms", |row| {
        fine(&row.gate, |figures| Some(figures.release_ms?.p50))
    }),
    ("p99", |row| {
        fine(&row.gate, |figures| Some(figures.release_ms?.p99))
    }),
];

const SERVER: &[Column] = &[
    ("commits/s", |row| {
        whole(&row.gate, |figures| figures.commits_per_s)
    }),
    ("ops/commit", |row| {
        fine(&row.gate, |figures| figures.operations_per_commit)
    }),
    ("commit ms", |row| {
        fine(&row.gate, |figures| figures.commit_mean_ms)
    }),
    ("CPU µs/pair", |row| fine(&row.gate, SERVER_CPU)),
    ("load's CPU", |row| {
        fine(&row.gate, |figures| figures.load_cpu_us_per_pair)
    }),
    ("RSS MiB", |row| {
        fine(&row.gate, |figures| {
            Some(figures.rss_bytes? as f64 / f64::from(1 << 20))
        })
    }),
];

const AGAINST: &[Column] = &[
    ("other build pairs/s", |row| {
        whole(&row.against, PAIRS_PER_S)
    }),
    ("its p99 ms", |row| {
        fine(&row.against, |figures| Some(figures.acquire_ms?.p99))
    }),
    ("its CPU", |row| fine(&row.against, SERVER_CPU)),
    ("ratio to it", |row| ratio(&row.gate, &row.against)),
];

const BARE: &[Column] = &[
    ("bare axum pairs/s", |row| whole(&row.bare, PAIRS_PER_S)),
    ("its p50 ms", |row| {
        fine(&row.bare, |figures| Some(figures.acquire_ms?.p50))
    }),
    ("its CPU", |row| fine(&row.bare, SERVER_CPU)),
];

const SHARE: &[Column] = &[("share of it", |row| ratio(&row.gate, &row.bare))];

const GRANTS: &[Column] = &[
    ("grant p50 ms", |row| {
        fine(&row.gate, |figures| Some(figures.grant_ms?.p50))
    }),
    ("p99", |row| {
        fine(&row.gate, |figures| Some(figures.grant_ms?.p99))
    }),
    ("in commits p50", |row| {
        fine(&row.gate, |figures| Some(figures.grant_commits?.p50))
    }),
    ("p99", |row| {
        fine(&row.gate, |figures| Some(figures.grant_commits?.p99))
    }),
    ("after the answer p99", |row| {
        fine(&row.gate, |figures| Some(figures.grant_after_commits?.p99))
    }),
];

const RENEWALS: &[Column] = &[
    ("renewals/s", |row| whole(&row.gate, PAIRS_PER_S)),
    ("renewal p50 ms", |row| {
        fine(&row.gate, |figures| Some(figures.act_ms?.p50))
    }),
    ("p99", |row| {
        fine(&row.gate, |figures| Some(figures.act_ms?.p99))
    }),
    ("p99.9", |row| {
        fine(&row.gate, |figures| Some(figures.act_ms?.p999))
    }),
];

const CLOSES: &[Column] = &[
    ("close p50 ms", |row| {
        fine(&row.gate, |figures| Some(figures.act_ms?.p50))
    }),
    ("p99", |row| {
        fine(&row.gate, |figures| Some(figures.act_ms?.p99))
    }),
    ("pending at the end", |row| {
        whole(&row.gate, |figures| Some(figures.closes_pending? as f64))
    }),
];

const ARRIVALS: &[Column] = &[
    ("begun late p99 ms", |row| {
        fine(&row.gate, |figures| Some(figures.start_lag_ms?.p99))
    }),
    ("not begun", |row| {
        whole(&row.gate, |figures| Some(figures.not_begun as f64))
    }),
];

fn columns(scenario: Scenario) -> Vec<&'static Column> {
    let parts: &[&[Column]] = match scenario {
        Scenario::Open => &[PAIRS, SERVER, BARE, SHARE],
        Scenario::Contended => &[PAIRS, GRANTS, SERVER],
        Scenario::Renewals => &[RENEWALS, SERVER],
        Scenario::Closes => &[PAIRS, CLOSES, SERVER],
        Scenario::Batch => &[PAIRS, SERVER],
        Scenario::Arrivals => &[PAIRS, ARRIVALS, SERVER, BARE],
    };
    parts.iter().copied().flatten().collect()
}

/// The median of the ratios of rounds: both sides of one met the same hour.
fn ratio(these: &[&Figures], those: &[&Figures]) -> Option<String> {
    let rounds = these.iter().zip(those);
    median(rounds.map(|(this, that)| this.pairs_per_s / that.pairs_per_s))
        .map(|ratio| format!("{ratio:.2}"))
}

/// The median of a count or a rate, which are never below 0.
fn whole(rounds: &[&Figures], value: Value) -> Option<String> {
    of(rounds, value).map(|value| table::grouped(value.round() as u64))
}

fn fine(rounds: &[&Figures], value: Value) -> Option<String> {
    of(rounds, value).map(|value| format!("{value:.2}"))
}

fn of(rounds: &[&Figures], value: Value) -> Option<f64> {
    median(rounds.iter().filter_map(|figures| value(figures)))
}

impl Report {
    /// Takes in what is told, and says on stderr how far the run is.
    pub(super) fn take(&mut self, told: Told<'_>, rounds: usize) -> Result<(), LoadError> {
        match told {
            Told::Machine(machine) => self.machine = Some(machine.clone()),
            Told::Proof(proof) => self.proof = Some(*proof),
            Told::Figures(figures) => {
                out::say(&format!(
                    "round {} of {rounds}: {} {} {} with {}: {:.0} pairs/s",
                    figures.round,
                    figures.system.name(),
                    figures.transport.name(),
                    figures.scenario.name(),
                    figures.connections,
                    figures.pairs_per_s,
                ));
                if let Some(refusal) = &figures.first_refusal {
                    let refusal = out::plain(refusal);
                    out::say(&format!("{} were refused: {refusal}", figures.refused));
                }
                self.figures.push(figures.clone());
            }
        }
        Ok(())
    }

    /// Everything, as text.
    pub(super) fn text(&self) -> String {
        let mut text = self.machine.as_ref().map(machine).unwrap_or_default();
        for scenario in Scenario::ALL {
            text.push_str(&self.scenario(scenario));
        }
        if let Some(proof) = &self.proof {
            text.push_str(&format!(
                "\n{} leases granted and {} given back, as callers and service count them; nothing is reserved\n",
                table::grouped(proof.granted_by_service),
                table::grouped(proof.released_by_service),
            ));
        }
        text
    }

    /// One row for each transport and number of callers; empty for what was not measured.
    fn scenario(&self, scenario: Scenario) -> String {
        let mut keys: Vec<(Transport, usize)> = Vec::new();
        for figures in self.of(scenario) {
            let key = (figures.transport, figures.connections);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        if keys.is_empty() {
            return String::new();
        }
        let mut columns = columns(scenario);
        if self
            .of(scenario)
            .any(|figures| figures.system == System::Against)
        {
            columns.extend(AGAINST);
        }
        let row = |(transport, connections): (Transport, usize)| {
            let rounds = |system| {
                let all = self.of(scenario).filter(|figures| {
                    figures.system == system
                        && figures.transport == transport
                        && figures.connections == connections
                });
                all.collect()
            };
            let row = Row {
                gate: rounds(System::Kvgate),
                against: rounds(System::Against),
                bare: rounds(System::Axum),
            };
            let mut cells = vec![transport.name().to_owned(), connections.to_string()];
            let nothing = || NOTHING.to_owned();
            cells.extend(
                columns
                    .iter()
                    .map(|(_, cell)| cell(&row).unwrap_or_else(nothing)),
            );
            cells
        };
        let rows = keys.into_iter().map(row).collect();
        let mut names = vec![("over", Kind::Word), ("callers", Kind::Number)];
        names.extend(columns.iter().map(|(name, _)| (*name, Kind::Number)));
        let name = out::styled(out::HEAD, scenario.name());
        format!("\n{name}\n{}", table::table(&names, rows))
    }

    fn of(&self, scenario: Scenario) -> impl Iterator<Item = &Figures> {
        let all = self.figures.iter();
        all.filter(move |figures| figures.scenario == scenario)
    }
}

fn machine(machine: &Machine) -> String {
    let quiet = match machine.quiet {
        true => out::styled(out::GOOD, "quiet"),
        false => out::styled(out::WARN, "noisy"),
    };
    format!(
        "{quiet}: {} cores, load {:.2}\n\
         disk: {:.0} syncs/s of 4 KiB appended, p50 {:.3} ms, p99 {:.3} ms\n\
         redb: one row in a durable transaction, p50 {:.3} ms, p99 {:.3} ms\n",
        machine.cores,
        machine.load,
        machine.fdatasync_per_s,
        machine.fdatasync_p50_ms,
        machine.fdatasync_p99_ms,
        machine.redb_commit_p50_ms,
        machine.redb_commit_p99_ms,
    )
}
