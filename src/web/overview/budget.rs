//! The token budget: one bar and a list that adds up, and what it was lately.

use askama::Template;
use kvgate_core::capacity::EngineView;
use kvgate_core::state::{EpochCause, EpochEntry};
use kvgate_core::units::{Ppm, Timestamp, Tokens};

use super::Moment;
use crate::history::{Series, Summary};
use crate::web::format::{bare, counted, grouped, percent, short, tenths_of, time_of_day, wall};
use crate::web::plot::{
    self, Axis, Column, Level, Points, Scale, Stretch, Tick, WIDTH, greatest, mean, number,
};

/// Epochs that the strip shows; older ones in the range are one stretch.
const EPOCHS_SHOWN: usize = 24;
/// Engines of an epoch that are named.
const NAMED_MAX: usize = 1;
/// Width of a letter of the strip in the units of the plot, on a wide page and on a narrow one.
const LETTER: f64 = 7.4;
const LETTER_NARROW: f64 = 22.0;

#[derive(Template)]
#[template(path = "overview/budget.html")]
pub(super) struct BudgetPart {
    available: String,
    reserved: String,
    reserved_share: String,
    available_share: String,
    /// By how much more is reserved than the ceiling.
    overdraft: Option<String>,
    ceiling: String,
    headroom: String,
    kept: String,
    missing: String,
    missing_engines: u64,
    bar: Vec<Piece>,
    bar_label: String,
    usage_mean: String,
    usage_max: String,
    threshold: String,
}

/// A piece of the bar.
struct Piece {
    class: &'static str,
    x: String,
    width: String,
}

/// KV of engines that should count and do not, and how many they are.
fn missing(engines: &[EngineView]) -> (Tokens, u64) {
    let away = engines
        .iter()
        .filter(|engine| engine.role.counts() && !engine.counted);
    away.fold((Tokens::ZERO, 0), |(sum, count), engine| {
        let last = engine.reading.as_ref();
        let capacity = last.map_or(Tokens::ZERO, |(_, reading)| reading.capacity);
        (sum.saturating_add(capacity), count + 1)
    })
}

impl BudgetPart {
    pub(super) fn new(moment: &Moment) -> Self {
        let budget = &moment.look.state.budget;
        let pressure = &moment.look.state.pressure;
        let (missing, missing_engines) = missing(&moment.shown.view.engines);
        let overdraft = budget.reserved.saturating_sub(budget.ceiling);
        let kept = budget.capacity.saturating_sub(budget.ceiling);
        let reserved = tenths_of(budget.reserved, budget.ceiling);
        let tenths = |tenths: u64| format!("{}.{} %", tenths / 10, tenths % 10);
        let share =
            |share: Option<f64>| share.map_or("–".to_owned(), |share| percent(ppm(share)));
        Self {
            available: grouped(budget.available),
            reserved: grouped(budget.reserved),
            reserved_share: reserved.map_or("–".to_owned(), tenths),
            // What the other leaves, so that both make a whole.
            available_share: reserved.map_or("–".to_owned(), |reserved| {
                tenths(1_000_u64.saturating_sub(reserved))
            }),
            overdraft: (overdraft > 0).then(|| grouped(overdraft)),
            ceiling: grouped(budget.ceiling),
            headroom: format!("{:.2}", budget.headroom),
            kept: grouped(kept),
            missing: if missing_engines > 0 && missing == Tokens::ZERO {
                "never read".to_owned()
            } else {
                grouped(missing.get())
            },
            missing_engines,
            bar: bar(budget, missing.get()),
            bar_label: format!(
                "{} of {} tokens are reserved, {} available, {} kept as headroom, {} at engines that are not counted",
                grouped(budget.reserved),
                grouped(budget.ceiling),
                grouped(budget.available),
                grouped(kept),
                grouped(missing.get())
            ),
            usage_mean: share(pressure.usage_mean),
            usage_max: share(pressure.usage_max),
            threshold: share(Some(pressure.threshold)),
        }
    }
}

fn ppm(share: f64) -> Ppm {
    Ppm::clamped((share * 1e6).round() as u32)
}

/// All KV of the fleet from left to right; an overdraft covers what lies behind the ceiling.
fn bar(budget: &kvgate_api::Budget, missing: u64) -> Vec<Piece> {
    let kept = budget.capacity.saturating_sub(budget.ceiling);
    let whole = budget.capacity.saturating_add(missing).max(1);
    let held = budget.reserved.min(budget.ceiling);
    let pieces = [
        ("s-res", held),
        ("s-av", budget.ceiling.saturating_sub(held)),
        ("s-hd", kept),
        ("s-ex", missing),
    ];
    let share = |tokens: u64| tokens as f64 / whole as f64 * 100.0;
    let mut at = 0.0;
    let mut bar: Vec<Piece> = Vec::new();
    for (class, tokens) in pieces {
        let width = share(tokens);
        bar.push(Piece {
            class,
            x: format!("{at:.2}"),
            width: format!("{width:.2}"),
        });
        at += width;
    }
    let over = budget.reserved.saturating_sub(budget.ceiling);
    if over > 0 {
        bar.push(Piece {
            class: "s-over",
            x: format!("{:.2}", share(budget.ceiling)),
            width: format!("{:.2}", share(over.min(kept.saturating_add(missing)))),
        });
    }
    bar.retain(|piece| piece.width != "0.00");
    bar
}

#[derive(Template)]
#[template(path = "overview/plot.html")]
pub(super) struct PlotPart {
    label: String,
    waits_label: String,
    levels: Vec<Level>,
    ticks: Vec<Tick>,
    gaps: Vec<Stretch>,
    degraded: Vec<Stretch>,
    area: String,
    band: String,
    capacity: String,
    ceiling: String,
    usage: String,
    reserved: String,
    waits: String,
    waits_top: Option<String>,
    epochs: Vec<EpochBox>,
    columns: Vec<Column>,
}

/// One worker set on the strip.
struct EpochBox {
    x: String,
    width: String,
    text: String,
    title: String,
    /// It begins inside the range: a mark in the plot.
    mark: bool,
    class: String,
    fits: &'static str,
}

/// The series of the plot.
struct Drawn {
    reserved: Points,
    usage: Points,
    ceiling: Points,
    capacity: Points,
    waiting: Points,
    degraded: Points,
}

impl Drawn {
    fn read(moment: &Moment) -> Self {
        let history = moment.look.app.history();
        let (range, axis, now) = (moment.range, &moment.axis, moment.shown.now);
        let read = |series| plot::points(history, series, range, axis, now);
        let capacity = read(Series::Capacity);
        let mut usage = read(Series::Used);
        // Engines that tell no tokens in use tell their share of use.
        if usage.iter().all(Option::is_none) {
            let shares = read(Series::UsageMean);
            for ((point, share), capacity) in usage.iter_mut().zip(shares).zip(&capacity) {
                *point = share.zip(*capacity).map(|(share, capacity)| Summary {
                    mean: share.mean * capacity.mean,
                    min: share.min * capacity.mean,
                    max: share.max * capacity.mean,
                });
            }
        }
        Self {
            reserved: read(Series::Reserved),
            usage,
            ceiling: read(Series::Ceiling),
            capacity,
            waiting: read(Series::Waiting),
            degraded: read(Series::Degraded),
        }
    }

    /// What the columns tell.
    fn told(&self, place: usize, moment: &Moment) -> Option<String> {
        let figure = |points: &Points| points.get(place).copied().flatten();
        let reserved = figure(&self.reserved)?;
        let at = moment.axis.at(place);
        let until = at.after(moment.axis.place());
        let tokens = |point: Option<Summary>| {
            point.map_or("–".to_owned(), |point| grouped(point.mean.round() as u64))
        };
        let form = if moment.range.secs > 86_400 {
            "%b %-d %H:%M"
        } else {
            "%H:%M:%S"
        };
        Some(format!(
            "{} to {} UTC\nreserved {}, at most {}\nKV use {}\nceiling {}\nengine capacity {}\nwaiting {}",
            wall(at, &moment.shown, form),
            time_of_day(until, &moment.shown),
            grouped(reserved.mean.round() as u64),
            grouped(reserved.max.round() as u64),
            tokens(figure(&self.usage)),
            tokens(figure(&self.ceiling)),
            tokens(figure(&self.capacity)),
            figure(&self.waiting).map_or("–".to_owned(), |point| grouped(point.max as u64)),
        ))
    }
}

impl PlotPart {
    pub(super) fn new(moment: &Moment) -> Self {
        let drawn = Drawn::read(moment);
        let axis = &moment.axis;
        let top = plot::top(&[&drawn.reserved, &drawn.capacity, &drawn.ceiling]);
        let scale = Scale {
            // Room for the highest line, which else would be cut.
            top: top * 1.06,
            height: 200.0,
        };
        let most_waited = plot::top(&[&drawn.waiting]);
        let waits = Scale {
            top: most_waited,
            height: 30.0,
        };
        Self {
            label: label(&drawn, moment),
            waits_label: format!(
                "Waiting tickets over the last {}: at most {}, now {}",
                moment.range.name,
                grouped(most_waited as u64),
                grouped(moment.look.state.queue.waiting)
            ),
            levels: plot::levels(&scale),
            ticks: plot::ticks(axis, &moment.shown),
            gaps: plot::stretches(&drawn.reserved, axis, true, Option::is_none),
            degraded: plot::stretches(&drawn.degraded, axis, false, |point| {
                point.is_some_and(|point| point.max > 0.0)
            }),
            area: plot::area(&drawn.reserved, axis, &scale),
            band: plot::band(&drawn.reserved, axis, &scale),
            capacity: plot::steps(&drawn.capacity, axis, &scale),
            ceiling: plot::steps(&drawn.ceiling, axis, &scale),
            usage: plot::line(&drawn.usage, axis, &scale, mean),
            reserved: plot::line(&drawn.reserved, axis, &scale, mean),
            waits: plot::bars(&drawn.waiting, axis, &waits),
            waits_top: (most_waited >= 1.0).then(|| short(most_waited as u64)),
            epochs: epochs(
                &moment.rows.epochs.1,
                axis,
                &moment.shown.view.engines,
                moment,
            ),
            columns: plot::columns(axis, |place| drawn.told(place, moment)),
        }
    }
}

/// The plot in words.
fn label(drawn: &Drawn, moment: &Moment) -> String {
    let budget = &moment.look.state.budget;
    let low = drawn.reserved.iter().flatten().map(plot::least);
    let low = low.fold(f64::MAX, f64::min);
    let high = drawn.reserved.iter().flatten().map(greatest);
    let high = high.fold(0.0, f64::max);
    let between = if low <= high {
        format!(
            ", between {} and {}",
            grouped(low.round() as u64),
            grouped(high.round() as u64)
        )
    } else {
        String::new()
    };
    format!(
        "Tokens over the last {}: {} reserved now{between}. The ceiling is {} of {} in the engines.",
        moment.range.name,
        grouped(budget.reserved),
        grouped(budget.ceiling),
        grouped(budget.capacity)
    )
}

/// The worker sets of the range, oldest first.
fn epochs(
    entries: &[EpochEntry],
    axis: &Axis,
    engines: &[EngineView],
    moment: &Moment,
) -> Vec<EpochBox> {
    let mut boxes = Vec::new();
    let mut right = WIDTH;
    for (place, entry) in entries.iter().take(EPOCHS_SHOWN).enumerate() {
        let left = axis.x(entry.at);
        // A sliver is left between two.
        let width = (right - left - 2.0).max(1.0);
        let text = format!("epoch {}{}", grouped(entry.epoch.0), suffix(entry, engines));
        let letters = text.chars().count() as f64 + 2.0;
        let fits = if letters * LETTER_NARROW <= width {
            "wide"
        } else if letters * LETTER <= width {
            "fits"
        } else {
            ""
        };
        let lost = matches!(
            entry.cause,
            EpochCause::MembersChanged { left: 1.., .. } | EpochCause::Restarted(_)
        );
        boxes.push(EpochBox {
            x: number(left / WIDTH * 100.0),
            width: number(width / WIDTH * 100.0),
            title: format!("{text}, since {}", began(entry.at, moment)),
            text,
            mark: left > 0.0,
            class: match (place, lost) {
                (0, true) => "cur lost".to_owned(),
                (0, false) => "cur".to_owned(),
                _ => String::new(),
            },
            fits,
        });
        right = left;
        if left <= 0.0 {
            break;
        }
    }
    boxes.reverse();
    boxes
}

fn began(at: Timestamp, moment: &Moment) -> String {
    wall(at, &moment.shown, "%b %-d %H:%M:%S UTC")
}

/// What began an epoch. Those who joined are known by name while they are members.
fn suffix(entry: &EpochEntry, engines: &[EngineView]) -> String {
    match &entry.cause {
        EpochCause::First => String::new(),
        EpochCause::MembersChanged { joined, left } => {
            let named: Vec<&str> = engines
                .iter()
                .filter(|engine| engine.joined == entry.epoch)
                .map(|engine| bare(engine.id.as_str()))
                .collect();
            let joined = match (joined, named.as_slice()) {
                (0, _) => None,
                (1, [engine]) if named.len() <= NAMED_MAX => Some(format!("{engine} joined")),
                (count, _) => Some(format!("{} joined", counted(u64::from(*count), "engine"))),
            };
            let left = (*left > 0).then(|| format!("{} left", counted(u64::from(*left), "engine")));
            let parts: Vec<String> = joined.into_iter().chain(left).collect();
            format!(" · {}", parts.join(", "))
        }
        EpochCause::Restarted(engine) => format!(" · {} restarted", bare(engine.as_str())),
        EpochCause::WorkerIdChanged(engine) => {
            format!(" · {} has new ids", bare(engine.as_str()))
        }
        EpochCause::Restored => " · store restored".to_owned(),
    }
}
