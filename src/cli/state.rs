//! `kvgate state`: one page of figures that add up, with what is wrong on top.

use std::fmt::Write as _;

use clap::Args;
use kvgate_api::{Severity, State};

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
        line(format!("{} {text}", styled(HEAD, &format!("{name:<11}"))));
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
    let share = |part: u64| match budget.ceiling {
        0 => String::new(),
        ceiling => {
            let tenths = u128::from(part) * 1_000 / u128::from(ceiling);
            format!(", {}.{} % of the ceiling", tenths / 10, tenths % 10)
        }
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
                "{} tokens: {} of {}",
                grouped(budget.ceiling),
                percent(budget.headroom),
                grouped(budget.capacity)
            ),
        ),
        (
            "reserved",
            format!(
                "{}{} ({held})",
                grouped(budget.reserved),
                share(budget.reserved)
            ),
        ),
    ];
    figures.push(match budget.reserved.checked_sub(budget.ceiling) {
        Some(over) if over > 0 => (
            "overdrawn",
            styled(WARN, &format!("{}{}", grouped(over), share(over))),
        ),
        _ => (
            "available",
            format!("{}{}", grouped(budget.available), share(budget.available)),
        ),
    });
    if budget.full_ceiling != budget.ceiling {
        let text = "with all members whose capacity is known";
        figures.push(("full", format!("{} {text}", grouped(budget.full_ceiling))));
    }
    figures
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
