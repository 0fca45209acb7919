//! Reads the answer of `GET /v1/loads?include=core`: SGLang's own account of its pools (CAP2).
//!
//! Pure. One row for each DP rank, so the rows are the rank groups: tokens and requests are summed,
//! usage is the worst row. The answer has no evictable and available KV and no token counters;
//! those come from `/metrics`.

use std::collections::BTreeMap;

use kvgate_core::reading::{EngineKind, ReadFailure, Reading, Source};
use kvgate_core::units::{Ppm, Tokens};
use serde_json::Value;

use super::dialect::{self, Disaggregation};

/// What the answer says.
#[derive(Clone, PartialEq, Debug)]
pub struct Loads {
    /// Its capacity, usage and queues.
    pub reading: Reading,
    /// Tokens of running and queued requests: what the engine is committed to. May exceed the capacity.
    pub committed: Option<Tokens>,
    /// The mode of a disaggregated fleet, where the answer tells it.
    pub disaggregation: Option<Disaggregation>,
}

/// Reads the body.
///
/// # Errors
/// [`ReadFailure::Unreadable`] for anything but an object with a list `loads`,
/// [`ReadFailure::Missing`] when no row has a capacity, as right after a start.
pub fn read(body: &[u8]) -> Result<Loads, ReadFailure> {
    let answer: Value = serde_json::from_slice(body).map_err(|_| ReadFailure::Unreadable)?;
    let rows = answer
        .get("loads")
        .and_then(Value::as_array)
        .ok_or(ReadFailure::Unreadable)?;
    let mut ranks: BTreeMap<u64, Rank> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.is_object()) {
        let rank = row.get("dp_rank").and_then(Value::as_u64).unwrap_or(0);
        ranks.entry(rank).or_default().join(row);
    }
    joined(&ranks, mode(rows)).ok_or(ReadFailure::Missing)
}

/// One DP rank; two rows of one rank repeat it, so the larger value stands.
#[derive(Default)]
struct Rank {
    capacity: Option<u64>,
    usage: Option<Ppm>,
    used: Option<u64>,
    committed: Option<u64>,
    running: Option<u64>,
    queued: Option<u64>,
}

impl Rank {
    fn join(&mut self, row: &Value) {
        let number = |field| row.get(field).and_then(Value::as_f64);
        let count = |field| number(field).and_then(dialect::count);
        self.capacity = self.capacity.max(count("max_total_num_tokens"));
        self.usage = self
            .usage
            .max(number("token_usage").and_then(dialect::share));
        self.used = self.used.max(count("num_used_tokens"));
        self.committed = self.committed.max(count("num_total_tokens"));
        self.running = self.running.max(count("num_running_reqs"));
        self.queued = self.queued.max(count("num_waiting_reqs"));
    }
}

fn joined(ranks: &BTreeMap<u64, Rank>, disaggregation: Option<Disaggregation>) -> Option<Loads> {
    let sum = |field: fn(&Rank) -> Option<u64>| {
        let mut sum = None;
        for value in ranks.values().filter_map(field) {
            sum = Some(Tokens::new(value)?.checked_add(sum.unwrap_or(Tokens::ZERO))?);
        }
        sum
    };
    let largest = ranks.values().filter_map(|rank| rank.capacity).max()?;
    let pools = ranks
        .values()
        .filter(|rank| rank.capacity.is_some())
        .count();
    Some(Loads {
        reading: Reading {
            kind: EngineKind::Sglang,
            role: None,
            source: Source::Loads,
            capacity: sum(|rank| rank.capacity)?,
            largest_pool: Tokens::new(largest)?,
            usage: ranks.values().filter_map(|rank| rank.usage).max(),
            used: sum(|rank| rank.used),
            evictable: None,
            available: None,
            running: sum(|rank| rank.running).map(Tokens::get),
            queued: sum(|rank| rank.queued).map(Tokens::get),
            ranks: u32::try_from(pools).unwrap_or(u32::MAX),
            counters: None,
            unknown_label: false,
        },
        committed: sum(|rank| rank.committed),
        disaggregation,
    })
}

fn mode(rows: &[Value]) -> Option<Disaggregation> {
    let mut modes = rows.iter().filter_map(|row| {
        let mode = row.get("disaggregation")?.get("mode")?.as_str()?;
        Disaggregation::from_text(mode)
    });
    let first = modes.next()?;
    modes.all(|mode| mode == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CAP2: ranks are summed, the worst usage counts, values of the wrong kind are missing.
    #[test]
    fn cap2_ranks_and_missing_values() {
        let loads = read(
            br#"{"loads":[
                {"dp_rank":0,"max_total_num_tokens":100,"token_usage":1.5,"num_used_tokens":"7","num_running_reqs":2},
                {"dp_rank":1,"max_total_num_tokens":60,"token_usage":-1,"num_running_reqs":null},
                {"dp_rank":1,"max_total_num_tokens":60},
                "odd"
            ]}"#,
        )
        .unwrap();
        assert_eq!(loads.reading.capacity.get(), 160);
        assert_eq!(loads.reading.largest_pool.get(), 100);
        assert_eq!(loads.reading.usage, Some(Ppm::ONE));
        assert_eq!(loads.reading.used, None);
        assert_eq!(loads.reading.running, Some(2));
        assert_eq!(loads.reading.queued, None);
        assert_eq!(loads.reading.ranks, 2);
        assert_eq!(loads.reading.source, Source::Loads);
    }

    /// CAP2: no rows yet is missing; another shape is unreadable.
    #[test]
    fn cap2_answers_without_a_reading() {
        assert_eq!(read(br#"{"loads":[]}"#), Err(ReadFailure::Missing));
        assert_eq!(
            read(br#"{"loads":[{"max_total_num_tokens":-5}]}"#),
            Err(ReadFailure::Missing)
        );
        for body in [
            "",
            "[]",
            "{}",
            "{\"loads\":1}",
            "<html>",
            "{\"loads\":[",
            "null",
        ] {
            assert_eq!(
                read(body.as_bytes()),
                Err(ReadFailure::Unreadable),
                "{body}"
            );
        }
        let deep = "[".repeat(100_000);
        assert_eq!(read(deep.as_bytes()), Err(ReadFailure::Unreadable));
    }
}
