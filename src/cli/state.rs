//! `kvgate state`: one page of figures that add up, with what is wrong on top.

use std::fmt::Write as _;

use clap::Args;
use kvgate_api::{Budget, Severity, State};

use super::client::{Client, Service, typed};
use super::out::{self, BAD, DIM, GOOD, HEAD, WARN, plain, styled};
use super::table::{counted, duration, grouped, percent};
use super::{Ended, Output, word};

/// Options of the command.
#[derive(Args, Debug)]
pub(super) struct Asked {
    /// Form of the answer: `json` is what the API answers
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    service: Service,
}

/// Shows the state.
pub(super) fn run(asked: &Asked) -> Result<(), Ended> {
    let client = Client::new(&asked.service)?;
    let body = client.get(&["v1", "state"], &[])?;
    if asked.output == Output::Json {
        return Ok(out::print_json(&body)?);
    }
    let state: State = typed(&body)?;
    Ok(out::print(&page(&state, client.shown()))?)
}

fn page(state: &State, url: &str) -> String {
    let mut page = String::new();
    let mut line = |text: String| {
        // Writing to a string never fails.
        let _ = writeln!(page, "{text}");
    };
    let about = format!(
        "kvgate {} at {url}, started {}",
        plain(&state.version),
        plain(&state.started_at)
    );
    line(styled(DIM, &about));
    for wrong in wrongs(state) {
        line(wrong);
    }
    line(String::new());
    for (name, text) in figures(state) {
        line(format!("{} {text}", styled(HEAD, &format!("{name:<13}"))));
    }
    page
}

/// What an operator should know first.
fn wrongs(state: &State) -> Vec<String> {
    let mut wrongs = Vec::new();
    if state.degraded {
        let why = state.degraded_reason.as_deref().unwrap_or("unknown");
        let text = "there is no usable capacity reading, and every acquire is a bypass";
        wrongs.push(format!(
            "{}: {} ({})",
            styled(BAD, "degraded"),
            text,
            plain(why)
        ));
    }
    if state.features.paused {
        let text = "an operator holds admission off, and every acquire is a bypass";
        wrongs.push(format!("{}: {text}", styled(WARN, "paused")));
    }
    for notice in &state.notices {
        let style = match notice.severity {
            Severity::Info => DIM,
            Severity::Warning => WARN,
            Severity::Error => BAD,
        };
        wrongs.push(format!(
            "{}: {} ({}, since {})",
            styled(style, &word(&notice.severity)),
            plain(&notice.text),
            plain(&notice.code),
            plain(&notice.since)
        ));
    }
    wrongs
}

fn figures(state: &State) -> Vec<(&'static str, String)> {
    let features = &state.features;
    let switch = |on: bool| {
        if on {
            styled(GOOD, "on")
        } else {
            "off".to_owned()
        }
    };
    let store = &state.store;
    let commit = store.commit_p99_s.map_or_else(String::new, |p99| {
        format!(", commits within {:.1} ms (p99)", p99 * 1e3)
    });
    let mut figures = vec![(
        "features",
        format!(
            "admission {}, session closes {}",
            switch(features.program_admission),
            switch(features.session_lifecycle)
        ),
    )];
    figures.extend(budget(state));
    figures.push(("queue", queue(state)));
    figures.push(("pressure", pressure(state)));
    figures.push((
        "closes",
        format!(
            "{} under way, {} failed",
            grouped(state.closes.pending),
            grouped(state.closes.failed)
        ),
    ));
    figures.push(("epoch", grouped(state.epoch)));
    figures.push((
        "store",
        format!(
            "{}, {} bytes{commit}",
            word(&store.state),
            grouped(store.bytes)
        ),
    ));
    figures
}

/// Reserved and available make the ceiling; what is reserved beyond it is shown as that.
fn budget(state: &State) -> Vec<(&'static str, String)> {
    let budget = &state.budget;
    let numbers = [budget.ceiling, budget.full_ceiling, budget.reserved];
    let width = numbers
        .map(|number| grouped(number).len())
        .into_iter()
        .max();
    let tokens = |count: u64| format!("{:>width$}", grouped(count), width = width.unwrap_or(0));
    // Both shares come from one division, so that they make the whole as the tokens do.
    let tenths = utilization(budget);
    let share = |tenths: Option<u128>| {
        tenths.map_or_else(String::new, |tenths| {
            format!("  {:>5} %", format!("{}.{}", tenths / 10, tenths % 10))
        })
    };
    let held = match state.leases.count {
        0 => "no lease".to_owned(),
        count => {
            let oldest = state.leases.oldest_age_s.map_or_else(String::new, |age| {
                format!(", the oldest {} old", duration(age))
            });
            format!("{}{oldest}", counted(count, "lease", "leases"))
        }
    };
    let mut figures = vec![
        (
            "ceiling",
            format!(
                "{}  tokens: {} of {}",
                tokens(budget.ceiling),
                percent(budget.headroom),
                grouped(budget.capacity)
            ),
        ),
        (
            "reserved",
            format!("{}{}  {held}", tokens(budget.reserved), share(tenths)),
        ),
    ];
    figures.push(match budget.reserved.checked_sub(budget.ceiling) {
        Some(over) if over > 0 => {
            let over = format!(
                "{}{}",
                tokens(over),
                share(tenths.map(|tenths| tenths.saturating_sub(WHOLE)))
            );
            ("overdrawn", styled(WARN, &over))
        }
        _ => (
            "available",
            format!(
                "{}{}",
                tokens(budget.available),
                share(tenths.map(|tenths| WHOLE.saturating_sub(tenths)))
            ),
        ),
    });
    if budget.full_ceiling != budget.ceiling {
        let text = "with all members whose capacity is known";
        figures.push((
            "full ceiling",
            format!("{}  {text}", tokens(budget.full_ceiling)),
        ));
    }
    figures
}

/// A whole in tenths of a percent.
const WHOLE: u128 = 1_000;

/// What is reserved, in tenths of a percent of the ceiling; `None` without a ceiling.
fn utilization(budget: &Budget) -> Option<u128> {
    let ceiling = u128::from(budget.ceiling);
    (ceiling > 0).then(|| u128::from(budget.reserved) * WHOLE / ceiling)
}

fn queue(state: &State) -> String {
    let queue = &state.queue;
    if queue.waiting == 0 {
        return "nobody waits".to_owned();
    }
    let oldest = queue.oldest_age_s.map_or_else(String::new, |age| {
        format!(", the oldest for {}", duration(age))
    });
    format!(
        "{} for {} tokens{oldest}",
        counted(queue.waiting, "waiter", "waiters"),
        grouped(queue.tokens)
    )
}

fn pressure(state: &State) -> String {
    let pressure = &state.pressure;
    let threshold = format!("new requests wait from {}", percent(pressure.threshold));
    let Some(worst) = pressure.usage_max else {
        return format!("no engine tells its usage; {threshold}");
    };
    let mean = pressure
        .usage_mean
        .map_or_else(String::new, |mean| format!(", mean {}", percent(mean)));
    let engine = pressure
        .engine
        .as_deref()
        .map_or_else(String::new, |engine| {
            format!("; pressure from {}", plain(engine))
        });
    format!(
        "highest usage {}{mean}{engine}; {threshold}",
        percent(worst)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn state(ceiling: u64, reserved: u64) -> State {
        let state = json!({
            "budget": {"ceiling": ceiling, "full_ceiling": ceiling.max(900_000), "capacity": 1_000_000,
                "reserved": reserved, "available": ceiling.saturating_sub(reserved),
                "reserved_utilization": null, "headroom": 0.9},
            "epoch": 3, "degraded": ceiling == 0, "degraded_reason": "router_unreachable",
            "pressure": {"usage_mean": null, "usage_max": null, "threshold": 0.92, "engine": null},
            "queue": {"waiting": 2, "tokens": 60_000, "oldest_age_s": 3.0},
            "leases": {"count": 1, "oldest_age_s": 61.0}, "closes": {"pending": 0, "failed": 0},
            "features": {"program_admission": true, "session_lifecycle": false, "paused": true},
            "notices": [{"code": "low_space", "severity": "error", "text": "Full\u{1b}[2J.", "since": "now"}],
            "store": {"bytes": 5, "commit_p99_s": 0.0021, "state": "ok"}, "version": "1", "started_at": "then",
        });
        serde_json::from_value(state).unwrap()
    }

    fn shown(ceiling: u64, reserved: u64) -> String {
        let page = page(&state(ceiling, reserved), "http://h");
        anstream::adapter::strip_str(&page).to_string()
    }

    #[test]
    fn shares_make_the_whole() {
        let page = shown(900_000, 333_333);
        assert!(
            page.contains("reserved      333,333   37.0 %  1 lease, the oldest 1 m 01 s old"),
            "{page}"
        );
        assert!(page.contains("available     566,667   63.0 %"), "{page}");
        assert!(
            page.contains("paused: an operator holds admission off"),
            "{page}"
        );
        assert!(
            page.contains("error: Full\\u{1b}[2J. (low_space, since now)"),
            "{page}"
        );
        assert!(
            page.contains("2 waiters for 60,000 tokens, the oldest for 3.0 s"),
            "{page}"
        );
        assert!(
            !page.contains("degraded") && !page.contains("full ceiling"),
            "{page}"
        );
    }

    #[test]
    fn what_is_reserved_beyond_the_ceiling_is_shown() {
        let page = shown(600_000, 900_000);
        assert!(page.contains("reserved      900,000  150.0 %"), "{page}");
        assert!(page.contains("overdrawn     300,000   50.0 %"), "{page}");
        assert!(!page.contains("available"), "{page}");
        assert!(page.contains("full ceiling  900,000"), "{page}");
    }

    #[test]
    fn degraded_stands_above_the_figures() {
        let page = shown(0, 0);
        let line = page.lines().position(|line| line.starts_with("degraded: "));
        assert_eq!(line, Some(1), "{page}");
        assert!(page.contains("(router_unreachable)"), "{page}");
    }
}
