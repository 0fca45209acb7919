//! What one reading round found: the input of the capacity rules (CAP1 to CAP8).
//!
//! The fleet room makes these values; it has already reduced router rows to base URLs, joined
//! the ranks of each engine and dropped values that are not finite numbers (CAP1, CAP2).

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::ids::EngineId;
use crate::units::{Ppm, Timestamp, Tokens};

/// One reading round: what the router lists and what each engine answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Round {
    /// When the round began; a round that began before a pause does not end it (TIM3).
    pub began_at: Timestamp,
    /// `None` when no router is configured.
    pub router: Option<RouterAnswer>,
    /// One entry for each engine that was asked.
    pub readings: Vec<(EngineId, Result<Reading, ReadFailure>)>,
    /// Start times that `/server_info` told in this round.
    pub start_marks: Vec<(EngineId, StartMark)>,
}

/// What the router said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RouterAnswer {
    /// A good answer; an empty list counts as silence (CAP7).
    Workers(Vec<Worker>),
    /// No good answer.
    Failed(RouterFailure),
}

/// Why the router gave no list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouterFailure {
    /// No answer within the time-out.
    Timeout,
    /// No connection, or a cut one.
    Refused,
    /// 401 or 403: it asks for a key.
    KeyRefused(u16),
    /// Another status.
    Status(u16),
    /// An answer that is no worker list, or one over the size bound.
    Unreadable,
}

/// One engine as the router lists it: all rows of one base URL joined.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Worker {
    /// Normalised base URL.
    pub engine: EngineId,
    /// Its part in a disaggregated fleet.
    pub role: Role,
    /// Healthy when at least one of its rows is (CAP3).
    pub healthy: bool,
    /// The ids of its rows; empty when the router gives none (CAP8).
    pub worker_ids: BTreeSet<Arc<str>>,
}

/// What an engine is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Prefill and decode in one; counts for capacity.
    Regular,
    /// The decode half; counts for capacity.
    Decode,
    /// The prefill half; only closes matter there.
    Prefill,
    /// A kind that has no KV pool of its own to count.
    Other,
}

impl Role {
    /// Whether its pool counts for the ceiling and its usage for pressure (CAP2).
    #[must_use]
    pub const fn counts(self) -> bool {
        matches!(self, Self::Regular | Self::Decode)
    }
}

/// The kind of engine, told by its metric names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineKind {
    /// SGLang.
    Sglang,
    /// vLLM: admission yes, session close not supported.
    Vllm,
}

/// Where the numbers of a reading come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// `GET /v1/loads?include=core`.
    Loads,
    /// `GET /metrics`.
    Metrics,
}

/// One good reading of one engine, its ranks joined (CAP2). Missing values are `None`, not zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reading {
    /// Told by the metric names or the shape of the answer.
    pub kind: EngineKind,
    /// Its part in the fleet as it says itself; the router's word for a listed engine counts more.
    pub role: Option<Role>,
    /// Which endpoint gave capacity and usage.
    pub source: Source,
    /// Sum of the pools of its rank groups. A reading without a capacity is not good: it is [`ReadFailure::Missing`].
    pub capacity: Tokens,
    /// The largest single pool: what one request can occupy at the most (DEC5).
    pub largest_pool: Tokens,
    /// Worst rank group.
    pub usage: Option<Ppm>,
    /// Locked by running work.
    pub used: Option<Tokens>,
    /// Cached and free to evict.
    pub evictable: Option<Tokens>,
    /// Free.
    pub available: Option<Tokens>,
    /// Requests running.
    pub running: Option<u64>,
    /// Requests queued inside the engine.
    pub queued: Option<u64>,
    /// Number of rank groups (DP ranks), at least 1.
    pub ranks: u32,
    /// Prompt and generation tokens since the engine started, when `/metrics` was read.
    pub counters: Option<TokenCounters>,
    /// Rows differed by a label that is not known; the careful values were taken (CAP2).
    pub unknown_label: bool,
}

impl Reading {
    /// A reading of one idle SGLang pool of this size that tells nothing else.
    #[must_use]
    pub const fn idle(capacity: Tokens) -> Self {
        Self {
            kind: EngineKind::Sglang,
            role: None,
            source: Source::Loads,
            capacity,
            largest_pool: capacity,
            usage: None,
            used: None,
            evictable: None,
            available: None,
            running: Some(0),
            queued: Some(0),
            ranks: 1,
            counters: None,
            unknown_label: false,
        }
    }
}

/// Token counters of an engine, which begin again with each incarnation (CAP8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenCounters {
    /// Prompt tokens.
    pub prompt: u64,
    /// Generated tokens.
    pub generation: u64,
}

/// The start time that an engine tells of itself, as an opaque mark: only equality matters (CAP8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StartMark(pub u64);

/// Why an engine gave no good reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadFailure {
    /// No answer within the time-out.
    Timeout,
    /// No connection, or a cut one.
    Refused,
    /// 404: it was started without metrics.
    MetricsOff,
    /// 401 or 403: it asks for a key.
    KeyRefused(u16),
    /// Another status; redirects are not followed.
    Status(u16),
    /// Not an exposition, not JSON of the known shape, or over the size bound.
    Unreadable,
    /// Readable, but without a KV capacity.
    Missing,
    /// Its address is outside the allowed engine networks.
    NotAllowed,
}
