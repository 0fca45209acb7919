//! Plots as SVG, drawn on the server: paths on a time axis with marks and the figures of each place.
//!
//! A plot has at most 180 places. What falls into one is its mean, and the least and the greatest
//! are kept beside it, so that a peak is not lost. Places without a sample are gaps.

use std::fmt::Write as _;

use kvgate_core::units::{Span, Timestamp};

use super::format::{short, wall};
use crate::history::{History, Series, Summary};
use crate::http::Shown;

/// Width of the drawing; it is stretched to its place.
pub(super) const WIDTH: f64 = 1_000.0;

/// Marks on a time axis at the most.
const TICKS_MAX: u64 = 8;
/// Seconds between two marks.
const TICKS: [u64; 12] = [
    60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400,
];
const DAY_S: u64 = 86_400;

/// How far a page looks back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub(super) word: &'static str,
    /// In words, after "the last".
    pub(super) name: &'static str,
    pub(super) secs: u64,
    /// Seconds of a step of the ring that it is read from.
    step_s: u64,
    /// Steps in one place of the plot.
    each: u64,
}

/// The ranges to choose from.
pub(super) const RANGES: [Range; 5] = [
    range("15m", "15 minutes", 900, 1, 5),
    range("1h", "hour", 3_600, 10, 2),
    range("6h", "6 hours", 21_600, 10, 12),
    range("24h", "24 hours", 86_400, 60, 8),
    range("7d", "7 days", 604_800, 60, 60),
];

const fn range(word: &'static str, name: &'static str, secs: u64, step_s: u64, each: u64) -> Range {
    Range {
        word,
        name,
        secs,
        step_s,
        each,
    }
}

impl Range {
    pub(super) fn named(word: &str) -> Option<Self> {
        RANGES.into_iter().find(|range| range.word == word)
    }
}

/// The places of a plot. They stand at multiples of their width, so that a place that is past never
/// changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Axis {
    from: Timestamp,
    place: Span,
    places: u64,
}

impl Axis {
    /// The last place is the one of `now`.
    pub(super) fn of(range: Range, now: Timestamp) -> Self {
        let place_ms = range.step_s * range.each * 1_000;
        let places = range.secs * 1_000 / place_ms.max(1);
        let last = now.millis() / place_ms.max(1);
        let first = last.saturating_sub(places.saturating_sub(1));
        Self {
            from: Timestamp::from_millis(first * place_ms),
            place: Span::from_millis(place_ms),
            places,
        }
    }

    /// Begin of a place.
    pub(super) fn at(&self, place: usize) -> Timestamp {
        let place = u64::try_from(place).unwrap_or(u64::MAX);
        let span = self.place.millis().saturating_mul(place);
        self.from.after(Span::from_millis(span))
    }

    pub(super) const fn place(&self) -> Span {
        self.place
    }

    /// Where a point in time stands, 0 to [`WIDTH`].
    pub(super) fn x(&self, at: Timestamp) -> f64 {
        let whole = self.place.millis().saturating_mul(self.places);
        let x = at.since(self.from).millis() as f64 / whole.max(1) as f64 * WIDTH;
        x.clamp(0.0, WIDTH)
    }

    /// The same as a share of the width: `12.3%`.
    pub(super) fn percent(&self, at: Timestamp) -> String {
        format!("{}%", number(self.x(at) / WIDTH * 100.0))
    }

    fn width(&self) -> f64 {
        WIDTH / self.places.max(1) as f64
    }

    fn centre(&self, place: usize) -> f64 {
        (place as f64 + 0.5) * self.width()
    }
}

/// The figures of each place; `None` for a gap.
pub(super) type Points = Vec<Option<Summary>>;

/// Reads a series for an axis.
pub(super) fn points(
    history: &History,
    series: Series,
    range: Range,
    axis: &Axis,
    now: Timestamp,
) -> Points {
    // One place more than the range: the last place is not over yet.
    let secs = range.secs + range.step_s * range.each;
    let window = history.window(series, now, secs, range.step_s);
    let mut sums: Vec<Option<(Summary, u32)>> = vec![None; place_count(axis)];
    for (step, point) in (0_u64..).zip(&window.points) {
        let at = window.from.after(Span::from_secs(step * range.step_s));
        if at < axis.from {
            continue;
        }
        let place = at.since(axis.from).millis() / axis.place.millis().max(1);
        let place = usize::try_from(place).ok();
        let (Some(point), Some(sum)) = (point, place.and_then(|place| sums.get_mut(place))) else {
            continue;
        };
        *sum = Some(match *sum {
            None => (*point, 1),
            Some((sum, count)) => (
                Summary {
                    mean: sum.mean + point.mean,
                    min: sum.min.min(point.min),
                    max: sum.max.max(point.max),
                },
                count + 1,
            ),
        });
    }
    let mean = |(sum, count): (Summary, u32)| Summary {
        mean: sum.mean / f64::from(count),
        ..sum
    };
    sums.into_iter().map(|sum| sum.map(mean)).collect()
}

fn place_count(axis: &Axis) -> usize {
    usize::try_from(axis.places).unwrap_or(0)
}

/// The part of a summary that is drawn.
pub(super) type PartOf = fn(&Summary) -> f64;

pub(super) fn mean(summary: &Summary) -> f64 {
    summary.mean
}

pub(super) fn least(summary: &Summary) -> f64 {
    summary.min
}

pub(super) fn greatest(summary: &Summary) -> f64 {
    summary.max
}

/// The greatest figure of some series.
pub(super) fn top(series: &[&Points]) -> f64 {
    let all = series.iter().flat_map(|points| points.iter().flatten());
    all.map(greatest).fold(0.0, f64::max)
}

/// Heights of a drawing: 0 at its foot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The figure at the upper edge.
    pub(super) top: f64,
    /// Of the drawing.
    pub(super) height: f64,
}

impl Scale {
    fn y(&self, value: f64) -> f64 {
        let top = if self.top > 0.0 { self.top } else { 1.0 };
        (self.height - value / top * self.height).clamp(0.0, self.height)
    }
}

/// A mark on the value axis.
#[derive(Debug, PartialEq)]
pub(super) struct Level {
    /// From the top, as a share of the height.
    pub(super) y: String,
    pub(super) text: String,
}

/// Two to five round levels below the upper edge.
pub(super) fn levels(scale: &Scale) -> Vec<Level> {
    if scale.top <= 0.0 {
        return Vec::new();
    }
    let power = 10_f64.powf((scale.top / 4.0).log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| scale.top / step <= 4.5)
        .unwrap_or(scale.top);
    (1..=5)
        .map(|count| f64::from(count) * step)
        .filter(|value| *value <= scale.top * 0.97 && *value >= 1.0)
        .map(|value| Level {
            y: format!("{}%", number((1.0 - value / scale.top) * 100.0)),
            text: short(value as u64),
        })
        .collect()
}

/// A mark on the time axis.
#[derive(Debug, PartialEq)]
pub(super) struct Tick {
    pub(super) x: String,
    pub(super) text: String,
}

/// Round times of the day, in UTC.
pub(super) fn ticks(axis: &Axis, shown: &Shown) -> Vec<Tick> {
    let secs = axis.place.millis().saturating_mul(axis.places) / 1_000;
    let fits = |step: &&u64| secs / **step <= TICKS_MAX;
    let step_s = *TICKS.iter().find(fits).unwrap_or(&DAY_S);
    let form = if step_s == DAY_S { "%b %-d" } else { "%H:%M" };
    let wall_from = shown.line.wall_millis(axis.from);
    let step = step_s * 1_000;
    let first = wall_from.div_ceil(step) * step - wall_from;
    (0..=TICKS_MAX)
        .map(|count| axis.from.after(Span::from_millis(first + count * step)))
        // The text stands around its mark, and must not be cut.
        .filter(|at| (0.02..=0.98).contains(&(axis.x(*at) / WIDTH)))
        .map(|at| Tick {
            x: axis.percent(at),
            text: wall(at, shown, form),
        })
        .collect()
}

/// Runs of places that have a figure.
fn runs(points: &Points) -> impl Iterator<Item = Vec<(usize, &Summary)>> {
    let mut places = points.iter().enumerate().peekable();
    std::iter::from_fn(move || {
        while places.next_if(|(_, point)| point.is_none()).is_some() {}
        places.peek()?;
        let mut run = Vec::new();
        while let Some((place, Some(point))) = places.next_if(|(_, point)| point.is_some()) {
            run.push((place, point));
        }
        Some(run)
    })
}

/// A line through the centres of the places.
pub(super) fn line(points: &Points, axis: &Axis, scale: &Scale, part: PartOf) -> String {
    let mut path = String::new();
    for run in runs(points) {
        let one = run.len() == 1;
        for (at, (place, point)) in run.into_iter().enumerate() {
            path.push_str(if at == 0 { "M" } else { " " });
            step_to(&mut path, axis.centre(place), scale.y(part(point)));
        }
        if one {
            // A lone point has no length, and would not be seen.
            path.push_str("h2");
        }
    }
    path
}

/// The area below such a line.
pub(super) fn area(points: &Points, axis: &Axis, scale: &Scale) -> String {
    let mut path = String::new();
    let foot = number(scale.height);
    for run in runs(points) {
        let ends = run.first().zip(run.last());
        let Some(((first, _), (last, _))) = ends else {
            continue;
        };
        let (first, last) = (axis.centre(*first), axis.centre(*last));
        let _ = write!(path, "M{} {foot}L", number(first));
        for (at, (place, point)) in run.into_iter().enumerate() {
            if at > 0 {
                path.push(' ');
            }
            step_to(&mut path, axis.centre(place), scale.y(point.mean));
        }
        let _ = write!(path, "L{} {foot}z", number(last));
    }
    path
}

/// Between the least and the greatest figure of each place.
pub(super) fn band(points: &Points, axis: &Axis, scale: &Scale) -> String {
    let mut path = String::new();
    for run in runs(points) {
        path.push('M');
        for (at, (place, point)) in run.iter().enumerate() {
            if at > 0 {
                path.push(' ');
            }
            step_to(&mut path, axis.centre(*place), scale.y(point.max));
        }
        for (place, point) in run.iter().rev() {
            path.push(' ');
            step_to(&mut path, axis.centre(*place), scale.y(point.min));
        }
        path.push('z');
    }
    path
}

/// A line that stays until it changes, as settings and capacities do.
pub(super) fn steps(points: &Points, axis: &Axis, scale: &Scale) -> String {
    let mut path = String::new();
    let mut ends: Option<(usize, f64)> = None;
    for (place, point) in points.iter().enumerate() {
        let Some(point) = point else {
            if let Some((place, _)) = ends.take() {
                let _ = write!(path, "H{}", number(edge(axis, place)));
            }
            continue;
        };
        let y = scale.y(point.mean);
        match ends {
            None => {
                path.push('M');
                step_to(&mut path, place as f64 * axis.width(), y);
            }
            Some((_, before)) if number(before) != number(y) => {
                let x = number(place as f64 * axis.width());
                let _ = write!(path, "H{x}V{}", number(y));
            }
            Some(_) => {}
        }
        ends = Some((place, y));
    }
    if let Some((place, _)) = ends {
        let _ = write!(path, "H{}", number(edge(axis, place)));
    }
    path
}

/// Right edge of a place.
fn edge(axis: &Axis, place: usize) -> f64 {
    (place as f64 + 1.0) * axis.width()
}

/// A bar for the greatest figure of each place.
pub(super) fn bars(points: &Points, axis: &Axis, scale: &Scale) -> String {
    let mut path = String::new();
    let width = axis.width();
    for (place, point) in points.iter().enumerate() {
        let Some(point) = point.filter(|point| point.max > 0.0) else {
            continue;
        };
        // What is not nothing is seen.
        let y = scale.y(point.max).min(scale.height - 1.0);
        let _ = write!(
            path,
            "M{} {foot}V{}h{}V{foot}z",
            number(place as f64 * width + width * 0.12),
            number(y),
            number(width * 0.76),
            foot = number(scale.height)
        );
    }
    path
}

/// A stretch of the time axis.
#[derive(Debug, PartialEq)]
pub(super) struct Stretch {
    pub(super) x: String,
    pub(super) width: String,
}

/// Stretches of places that are so; those at the edges are left out when `inner` is set, since before
/// the first sample there is no gap, and the place of this moment may have none yet.
pub(super) fn stretches(
    points: &Points,
    axis: &Axis,
    inner: bool,
    so: impl Fn(&Option<Summary>) -> bool,
) -> Vec<Stretch> {
    let first = points.iter().position(Option::is_some).unwrap_or(0);
    let begin = if inner { first } else { 0 };
    let ends = match points.split_last() {
        Some((None, before)) if inner => before.len(),
        _ => points.len(),
    };
    let mut stretches = Vec::new();
    let mut open: Option<usize> = None;
    let all = points.iter().map(&so).chain([false]).enumerate();
    for (place, is_so) in all.skip(begin) {
        match (open, is_so && place < ends) {
            (None, true) => open = Some(place),
            (Some(from), false) => {
                stretches.push(Stretch {
                    x: number(from as f64 * axis.width()),
                    width: number((place - from) as f64 * axis.width()),
                });
                open = None;
            }
            (None, false) | (Some(_), true) => {}
        }
    }
    stretches
}

/// A place of a plot that tells its figures.
#[derive(Debug, PartialEq)]
pub(super) struct Column {
    pub(super) x: String,
    pub(super) width: String,
    pub(super) text: String,
}

/// One column a place, with what `text` says of it; none where it says nothing.
pub(super) fn columns(axis: &Axis, text: impl Fn(usize) -> Option<String>) -> Vec<Column> {
    (0..place_count(axis))
        .filter_map(|place| {
            Some(Column {
                x: number(place as f64 * axis.width()),
                width: number(axis.width()),
                text: text(place)?,
            })
        })
        .collect()
}

/// A small plot without axes.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Spark {
    pub(super) line: String,
    pub(super) area: String,
}

/// Places of a small plot: as many as there is room for.
const SPARK_EACH: usize = 4;
/// Its height, with room for the width of its line.
pub(super) const SPARK_HEIGHT: f64 = 24.0;

/// The same figures over the same time, drawn coarser.
pub(super) fn spark(points: &Points, axis: &Axis) -> Spark {
    let coarse: Points = points
        .chunks(SPARK_EACH)
        .map(|chunk| {
            let some: Vec<&Summary> = chunk.iter().flatten().collect();
            let count = some.len() as f64;
            (!some.is_empty()).then(|| Summary {
                mean: some.iter().map(|point| point.mean).sum::<f64>() / count,
                min: some.iter().map(|point| point.min).fold(f64::MAX, f64::min),
                max: some.iter().map(|point| point.max).fold(0.0, f64::max),
            })
        })
        .collect();
    let axis = Axis {
        place: Span::from_millis(axis.place.millis() * SPARK_EACH as u64),
        places: axis.places.div_ceil(SPARK_EACH as u64),
        ..*axis
    };
    let highest = coarse.iter().flatten().map(mean).fold(0.0, f64::max);
    let scale = Scale {
        // A line at the upper edge would be cut.
        top: highest * 1.15,
        height: SPARK_HEIGHT - 1.0,
    };
    Spark {
        line: line(&coarse, &axis, &scale, mean),
        area: area(&coarse, &axis, &scale),
    }
}

fn step_to(path: &mut String, x: f64, y: f64) {
    let _ = write!(path, "{} {}", number(x), number(y));
}

/// A coordinate with one digit, and no more letters than it needs.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: u64) -> Timestamp {
        Timestamp::from_millis(second * 1_000)
    }

    fn some(value: f64) -> Option<Summary> {
        Some(Summary {
            mean: value,
            min: value - 1.0,
            max: value + 1.0,
        })
    }

    /// Four places of 250 units.
    const AXIS: Axis = Axis {
        from: Timestamp::from_millis(0),
        place: Span::from_secs(10),
        places: 4,
    };
    const SCALE: Scale = Scale {
        top: 10.0,
        height: 100.0,
    };

    /// All ranges have at most 180 places, which stand still while time goes on inside one.
    #[test]
    fn places_stand_still() {
        for range in RANGES {
            let axis = Axis::of(range, at(1_000_000_007));
            assert!((168..=180).contains(&axis.places), "{range:?}");
            let place_s = axis.place.millis() / 1_000;
            assert_eq!(axis.from.millis() % axis.place.millis(), 0);
            let begin = 1_000_000_007 / place_s * place_s;
            assert_eq!(Axis::of(range, at(begin)), axis);
            assert_eq!(Axis::of(range, at(begin + place_s - 1)), axis);
            let next = Axis::of(range, at(begin + place_s));
            assert_eq!(next.from, axis.from.after(axis.place));
            assert_eq!(Range::named(range.word), Some(range));
        }
        assert_eq!(Range::named("2h"), None);
    }

    /// Gaps are gaps: nothing is drawn across them, and a lone point is seen.
    #[test]
    fn lines_end_at_gaps() {
        let points = vec![some(5.0), some(10.0), None, some(0.0)];
        assert_eq!(
            line(&points, &AXIS, &SCALE, mean),
            "M125 50 375 0M875 100h2"
        );
        assert_eq!(
            area(&points, &AXIS, &SCALE),
            "M125 100L125 50 375 0L375 100zM875 100L875 100L875 100z"
        );
        assert_eq!(
            band(&points, &AXIS, &SCALE),
            "M125 40 375 0 375 10 125 60zM875 90 875 100z"
        );
        let steps = steps(&points, &AXIS, &SCALE);
        assert_eq!(steps, "M0 50H250V0H500M750 100H1000");
        assert_eq!(line(&Vec::new(), &AXIS, &SCALE, mean), "");
    }

    /// Bars show the greatest figure; what is not nothing is seen, and nothing is not.
    #[test]
    fn bars_show_peaks() {
        let nothing = Some(Summary {
            mean: 0.0,
            min: 0.0,
            max: 0.0,
        });
        let points = vec![some(4.0), nothing, None, some(-0.99)];
        assert_eq!(
            bars(&points, &AXIS, &SCALE),
            "M30 100V50h190V100zM780 100V99h190V100z"
        );
    }

    #[test]
    fn gaps_and_other_stretches() {
        let points = vec![None, some(1.0), None, None];
        let fresh = vec![None, some(1.0), some(1.0), None];
        assert!(stretches(&fresh, &AXIS, true, Option::is_none).is_empty());
        let gaps = stretches(&points, &AXIS, true, Option::is_none);
        let edges: Vec<[&str; 2]> = gaps
            .iter()
            .map(|gap| [gap.x.as_str(), gap.width.as_str()])
            .collect();
        assert_eq!(edges, [["500", "250"]], "before the first sample is no gap");
        let all = stretches(&points, &AXIS, false, Option::is_none);
        assert_eq!(all.len(), 2);
        assert!(stretches(&vec![None; 4], &AXIS, false, Option::is_some).is_empty());
    }

    #[test]
    fn levels_are_round() {
        let texts = |top: f64| {
            let scale = Scale { top, height: 1.0 };
            let levels = levels(&scale).into_iter();
            levels.map(|level| level.text).collect::<Vec<_>>()
        };
        assert_eq!(texts(3_600_000.0), ["1M", "2M", "3M"]);
        assert_eq!(texts(1_060.0), ["250", "500", "750", "1k"]);
        assert_eq!(texts(1.0), Vec::<String>::new());
        assert_eq!(texts(0.0), Vec::<String>::new());
        let half = levels(&Scale {
            top: 4.0,
            height: 1.0,
        });
        assert_eq!(half[1].y, "50%");
    }

    /// A small plot has the peaks of the means, at zero it lies at the foot.
    #[test]
    fn sparks() {
        let zero = spark(&vec![some(0.0); 8], &Axis { places: 8, ..AXIS });
        assert_eq!(zero.line, "M250 23 750 23");
        let none = spark(&vec![None; 8], &AXIS);
        assert_eq!(none, Spark::default());
    }
}
