//! Session closes: those that need a look first, with one cell for each engine.

use askama::Template;
use kvgate_core::close::{CallResult, CloseIntent, CloseStage, Target, TargetState};

use super::Moment;
use crate::web::format::{bare, cut, duration, escaped, grouped, precise};
use crate::words;

/// Closes that the overview shows.
const ROWS: usize = 16;
/// With more engines than this the cells are a bar.
const CELLS_MAX: usize = 16;

#[derive(Template)]
#[template(path = "overview/closes.html")]
pub(super) struct ClosesPart {
    on: bool,
    pending: String,
    failed: String,
    has_failed: bool,
    rows: Vec<Row>,
    can_act: bool,
}

struct Row {
    id: String,
    session: String,
    session_cut: String,
    session_id: String,
    state: &'static str,
    class: &'static str,
    /// One letter for each engine: the class of its cell.
    cells: Vec<&'static str>,
    /// Delivered, failed and pending in percent, in place of too many cells.
    bar: Option<[String; 3]>,
    label: String,
    done: String,
    note: String,
    age: String,
    failed: bool,
}

impl ClosesPart {
    pub(super) fn new(moment: &Moment) -> Self {
        let closes = &moment.look.state.closes;
        let mut rows: Vec<&CloseIntent> = moment.rows.closes.iter().collect();
        rows.sort_by_key(|close| match (close.has_failed(), close.is_done()) {
            (true, _) => 0,
            (false, false) => 1,
            (false, true) => 2,
        });
        let rows = rows.into_iter().take(ROWS);
        Self {
            on: moment.look.state.features.session_lifecycle,
            pending: grouped(closes.pending),
            failed: grouped(closes.failed),
            has_failed: closes.failed > 0,
            rows: rows.map(|close| Row::new(close, moment)).collect(),
            can_act: moment.look.can_act,
        }
    }
}

/// States of its engines with how many are in each.
fn states(close: &CloseIntent) -> Vec<(TargetState, usize)> {
    let all = [
        TargetState::Delivered,
        TargetState::Pending,
        TargetState::Failed,
        TargetState::Refused,
        TargetState::Unsupported,
        TargetState::Restarted,
        TargetState::Superseded,
        TargetState::Gone,
    ];
    let count = |state: TargetState| {
        let ended = usize::try_from(close.count(state)).unwrap_or(usize::MAX);
        let listed = close.targets.values();
        let listed = listed.filter(|target| target.state == state).count();
        // Those of a finished one are counted, and only the exceptions are listed.
        if close.is_done() {
            ended
        } else {
            ended + listed
        }
    };
    all.into_iter()
        .map(|state| (state, count(state)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

const fn cell(state: TargetState) -> &'static str {
    match state {
        TargetState::Delivered => "g",
        TargetState::Pending => "p",
        TargetState::Failed | TargetState::Refused => "b",
        TargetState::Unsupported
        | TargetState::Restarted
        | TargetState::Superseded
        | TargetState::Gone => "n",
    }
}

impl Row {
    fn new(close: &CloseIntent, moment: &Moment) -> Self {
        let states = states(close);
        let all: usize = states.iter().map(|(_, count)| count).sum();
        let of = |class: &str| -> usize {
            let matching = states.iter().filter(|(state, _)| cell(*state) == class);
            matching.map(|(_, count)| count).sum()
        };
        let cells = states
            .iter()
            .flat_map(|(state, count)| std::iter::repeat_n(cell(*state), *count));
        let many = all > CELLS_MAX;
        let share = |count: usize| format!("{:.1}", count as f64 / all.max(1) as f64 * 100.0);
        let parts: Vec<String> = states
            .iter()
            .map(|(state, count)| format!("{count} {}", words::target(*state)))
            .collect();
        let (state, class) = match close.stage {
            CloseStage::Joining { .. } => ("joining", "wait"),
            CloseStage::Delivering { .. } => ("delivering", "closing"),
            CloseStage::Done { .. } if close.has_failed() => ("failed", "failed"),
            CloseStage::Done { .. } => ("done", "closed"),
        };
        Self {
            id: close.id.to_text(),
            session: close.session.as_str().to_owned(),
            session_cut: cut(close.session.as_str()),
            session_id: escaped(close.session.as_str()),
            state,
            class,
            cells: if many { Vec::new() } else { cells.collect() },
            bar: many.then(|| {
                let delivered = of("g");
                [
                    share(delivered),
                    share(delivered + of("b")),
                    share(delivered + of("b") + of("p")),
                ]
            }),
            label: if parts.is_empty() {
                "no engine yet".to_owned()
            } else {
                parts.join(", ")
            },
            done: format!("{} of {all}", of("g")),
            note: note(close),
            age: duration(moment.shown.now.since(close.requested_at)),
            failed: close.has_failed(),
        }
    }
}

/// What it waits for, or what came in its way.
fn note(close: &CloseIntent) -> String {
    let worst = |so: fn(&Target) -> bool| {
        let matching = close.targets.iter().filter(move |(_, target)| so(target));
        matching.max_by_key(|(_, target)| target.attempts)
    };
    match close.stage {
        CloseStage::Joining { ready_since: None } => "waits for its leases to end".to_owned(),
        CloseStage::Joining {
            ready_since: Some(_),
        } => "waits for an engine".to_owned(),
        CloseStage::Delivering { .. } => {
            match worst(|target| target.state == TargetState::Pending && target.attempts > 0) {
                Some((engine, target)) => format!(
                    "{}: attempt {}, {}",
                    bare(engine.as_str()),
                    target.attempts,
                    said(target)
                ),
                None => "in flight".to_owned(),
            }
        }
        CloseStage::Done { at } => match worst(|target| target.state.is_failure()) {
            Some((engine, target)) => format!("{}: {}", bare(engine.as_str()), said(target)),
            None if close.has_failed() => "found no engine".to_owned(),
            None => precise(at.since(close.requested_at)),
        },
    }
}

fn said(target: &Target) -> String {
    match &target.last {
        None => "no answer yet".to_owned(),
        Some(CallResult::Status { code, .. }) => format!("status {code}"),
        Some(CallResult::Failed(failure)) => words::call_failure(*failure).to_owned(),
    }
}
