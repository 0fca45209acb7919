//! `GET /v1/history`: the data behind each plot.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{History, Problem, SeriesPoints};

use super::answer::json;
use super::app::App;
use super::convert;
use super::extract::Query;
use super::problem::Fault;
use crate::history::{STEPS, Series, Summary};

/// Range of a call that names none: 15 minutes.
const RANGE_DEFAULT_S: u64 = 900;
/// The longest range: 7 days.
const RANGE_MAX_S: u64 = 7 * 24 * 3_600;

/// Figures over time, in steps of one second, ten seconds or a minute.
#[utoipa::path(
    get,
    path = "/v1/history",
    tag = "reports",
    params(
        ("series" = Option<String>, Query, description = "Names, separated by commas; all when absent"),
        ("range" = Option<String>, Query, description = "Until now: seconds, or a number with `m`, `h` or `d`; 15m when absent, at most 7d"),
        ("step" = Option<u32>, Query, description = "1, 10 or 60 seconds; the finest that is kept for the range when absent"),
    ),
    responses(
        (status = 200, description = "For each series one value a step; null where nothing was sampled", body = History),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn history(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let body = read_history(&app, query)?;
    Ok(json(StatusCode::OK, &body))
}

/// The figures over time that the query names.
pub fn read_history(app: &App, mut query: Query) -> Result<History, Fault> {
    let wanted = match query.take("series") {
        None => Series::ALL.to_vec(),
        Some(names) => names
            .split(',')
            .map(|name| Series::named(name).ok_or_else(unknown_series))
            .collect::<Result<_, _>>()?,
    };
    let range_s = match query.take("range") {
        None => RANGE_DEFAULT_S,
        Some(text) => range(&text).ok_or_else(|| {
            Fault::field(
                "?range",
                "must be seconds, or a number with m, h or d, at most 7d",
            )
        })?,
    };
    let step_s = match query.take("step") {
        None => finest(range_s),
        Some(text) => STEPS
            .iter()
            .map(|(step_s, _)| *step_s)
            .find(|step_s| step_s.to_string() == text)
            .ok_or_else(|| Fault::field("?step", "must be 1, 10 or 60"))?,
    };
    query.done()?;
    let shown = app.shown();
    let mut body = History {
        step_s,
        from: String::new(),
        series: BTreeMap::new(),
    };
    for series in wanted {
        let window = app.history().window(series, shown.now, range_s, step_s);
        body.from = convert::time(window.from, &shown);
        let part =
            |part: fn(Summary) -> f64| window.points.iter().map(move |point| point.map(part));
        let points = SeriesPoints {
            mean: part(|summary| summary.mean).collect(),
            min: part(|summary| summary.min).collect(),
            max: part(|summary| summary.max).collect(),
        };
        body.series.insert(series.word().to_owned(), points);
    }
    Ok(body)
}

fn unknown_series() -> Fault {
    let names: Vec<&str> = Series::ALL.iter().map(|series| series.word()).collect();
    Fault::field("?series", format!("must be among {}", names.join(", ")))
}

fn range(text: &str) -> Option<u64> {
    let (number, unit) = match text.char_indices().last()? {
        (at, 'm') => (text.get(..at)?, 60),
        (at, 'h') => (text.get(..at)?, 3_600),
        (at, 'd') => (text.get(..at)?, 24 * 3_600),
        _ => (text, 1),
    };
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = number.parse::<u64>().ok()?.checked_mul(unit)?;
    (digits && (1..=RANGE_MAX_S).contains(&seconds)).then_some(seconds)
}

/// The finest step whose ring covers the range.
fn finest(range_s: u64) -> u64 {
    let covers = |(step_s, kept): &&(u64, usize)| {
        u64::try_from(*kept).is_ok_and(|kept| kept.saturating_mul(*step_s) >= range_s)
    };
    let step = STEPS.iter().find(covers).or(STEPS.last());
    step.map_or(1, |(step_s, _)| *step_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_their_steps() {
        for (text, seconds) in [
            ("90", Some(90)),
            ("15m", Some(900)),
            ("6h", Some(21_600)),
            ("7d", Some(604_800)),
            ("8d", None),
            ("0", None),
            ("+5", None),
            ("m", None),
            ("", None),
            ("5µ", None),
        ] {
            assert_eq!(range(text), seconds, "{text}");
        }
        assert_eq!([900, 901, 21_600, 21_601].map(finest), [1, 10, 10, 60]);
    }
}
