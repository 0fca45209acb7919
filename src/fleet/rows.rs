//! From a router's answer to the set of engines it lists (CAP1, CAP3).
//!
//! Pure. Entries are read one by one: a bad one is skipped and reported, it never spoils the rest.
//! The rows of one base URL are joined, so that an engine is one engine whatever the number of its
//! ranks; the order of rows changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvgate_core::ids::EngineId;
use kvgate_core::reading::{Role, Worker};
use serde_json::Value;

use super::address::{AddressError, BaseUrl};

/// Rows of one answer that are read; the rest is counted as bad entries.
pub const ROWS_MAX: usize = 16_384;
/// Bad entries of one answer that are kept with their text.
pub const BAD_ENTRIES_MAX: usize = 16;
/// Letters of a bad entry that are kept.
pub const BAD_ENTRY_LETTERS_MAX: usize = 200;
/// Engines of one answer whose different spellings are kept, and spellings of one of them.
pub const SPELLINGS_MAX: usize = 16;
/// Longest worker id that is kept, in bytes; a longer one counts as absent.
const WORKER_ID_BYTES_MAX: usize = 256;

/// Which program the router is; some lose the session id on the way (CLO10).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouterKind {
    /// sglang-router 0.3: drops `session_id` on `/generate` and chat.
    SglangRouter,
    /// smg: keeps it.
    Smg,
    /// vllm-router: drops it on `/generate`.
    VllmRouter,
    /// Not told by its answers so far.
    Unknown,
}

impl RouterKind {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SglangRouter => "sglang-router",
            Self::Smg => "smg",
            Self::VllmRouter => "vllm-router",
            Self::Unknown => "unknown",
        }
    }

    /// Whether requests lose their `session_id` on the way (CLO10).
    #[must_use]
    pub const fn drops_session_id(self) -> bool {
        match self {
            Self::SglangRouter | Self::VllmRouter => true,
            Self::Smg | Self::Unknown => false,
        }
    }
}

/// An entry that names no engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadEntry {
    /// Its address as it was written, at most [`BAD_ENTRY_LETTERS_MAX`] letters; not escaped.
    /// Empty for a row without an address.
    pub raw: String,
    /// What is wrong with it.
    pub reason: BadEntryReason,
}

/// What is wrong with an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadEntryReason {
    /// The address is none.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Neither text nor a row with an address.
    #[error("a row without an address")]
    NoAddress,
    /// A router is no engine: closes never go there (CLO4).
    #[error("the router's own address")]
    RouterItself,
}

/// The entries that were skipped.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct BadEntries {
    /// The first [`BAD_ENTRIES_MAX`] of them.
    pub shown: Vec<BadEntry>,
    /// All of them, and rows over [`ROWS_MAX`].
    pub total: u64,
}

impl BadEntries {
    fn add(&mut self, raw: &str, reason: BadEntryReason) {
        self.total = self.total.saturating_add(1);
        if self.shown.len() < BAD_ENTRIES_MAX {
            self.shown.push(BadEntry {
                raw: raw.chars().take(BAD_ENTRY_LETTERS_MAX).collect(),
                reason,
            });
        }
    }
}

/// What one answer lists.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Listed {
    /// One entry for each engine, in the order of their names.
    pub workers: Vec<Worker>,
    /// Entries that were skipped.
    pub bad: BadEntries,
    /// Engines that are written in several ways.
    pub spellings: Spellings,
    /// Told by the shape of the rows; `None` when they do not tell.
    pub kind: Option<RouterKind>,
}

/// The addresses of engines that are written in several ways, without ranks, at most
/// [`BAD_ENTRY_LETTERS_MAX`] letters of each; not escaped.
pub type Spellings = BTreeMap<EngineId, BTreeSet<String>>;

impl Listed {
    /// Skips the router itself.
    pub fn without_router(mut self, router: &EngineId) -> Self {
        let workers = self.workers.len();
        self.workers.retain(|worker| worker.engine != *router);
        if self.workers.len() < workers {
            self.bad.add(router.as_str(), BadEntryReason::RouterItself);
        }
        self
    }
}

/// The body is no worker list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a worker list")]
pub struct NotAList;

/// Reads the body of `/workers` or `/list_workers`: a list, or an object with a list `workers` or
/// `urls`; entries are texts or rows.
///
/// # Errors
/// When it is neither.
pub fn read(body: &[u8]) -> Result<Listed, NotAList> {
    let answer: Value = serde_json::from_slice(body).map_err(|_| NotAList)?;
    let rows = match &answer {
        Value::Array(rows) => rows,
        _ => ["workers", "urls"]
            .iter()
            .find_map(|field| answer.get(field)?.as_array())
            .ok_or(NotAList)?,
    };
    let mut bad = BadEntries::default();
    let mut engines: BTreeMap<EngineId, Worker> = BTreeMap::new();
    let mut written: BTreeMap<EngineId, &str> = BTreeMap::new();
    let mut spellings = Spellings::new();
    for row in rows.iter().take(ROWS_MAX) {
        match worker(row) {
            Ok((raw, found)) => {
                let raw = without_rank(raw);
                let first = *written.entry(found.engine.clone()).or_insert(raw);
                if first != raw {
                    add_spelling(&mut spellings, &found.engine, [first, raw]);
                }
                join(&mut engines, found);
            }
            Err((raw, reason)) => bad.add(raw, reason),
        }
    }
    let beyond = u64::try_from(rows.len().saturating_sub(ROWS_MAX)).unwrap_or(u64::MAX);
    bad.total = bad.total.saturating_add(beyond);
    Ok(Listed {
        workers: engines.into_values().collect(),
        bad,
        spellings,
        kind: rows.iter().find_map(kind),
    })
}

fn without_rank(raw: &str) -> &str {
    match raw.rsplit_once('@') {
        Some((base, rank)) if rank.bytes().all(|byte| byte.is_ascii_digit()) => base,
        Some(_) | None => raw,
    }
}

fn add_spelling(spellings: &mut Spellings, engine: &EngineId, written: [&str; 2]) {
    if spellings.len() >= SPELLINGS_MAX && !spellings.contains_key(engine) {
        return;
    }
    let known = spellings.entry(engine.clone()).or_default();
    for raw in written {
        if known.len() < SPELLINGS_MAX {
            known.insert(raw.chars().take(BAD_ENTRY_LETTERS_MAX).collect());
        }
    }
}

/// The address as it is written, and what the row says.
fn worker(row: &Value) -> Result<(&str, Worker), (&str, BadEntryReason)> {
    let raw = address(row).ok_or(("", BadEntryReason::NoAddress))?;
    let base = BaseUrl::parse(raw).map_err(|error| (raw, error.into()))?;
    let worker = Worker {
        engine: base.engine(),
        role: role(row.get("worker_type")),
        // absent means healthy
        healthy: ["is_healthy", "healthy"]
            .iter()
            .find_map(|field| row.get(field)?.as_bool())
            .unwrap_or(true),
        worker_ids: ["id", "worker_id"]
            .iter()
            .find_map(|field| worker_id(row.get(field)?))
            .into_iter()
            .collect(),
    };
    Ok((raw, worker))
}

/// The text itself, or the base address before the address of the row, which may carry a rank.
fn address(row: &Value) -> Option<&str> {
    if let Value::String(text) = row {
        return Some(text);
    }
    ["dp_base_url", "base_url", "url"].iter().find_map(|field| {
        let text = row.get(field)?.as_str()?;
        (!text.trim().is_empty()).then_some(text)
    })
}

fn role(worker_type: Option<&Value>) -> Role {
    match worker_type.and_then(Value::as_str) {
        None => Role::Regular,
        Some(text) => match text.to_ascii_lowercase().as_str() {
            "regular" => Role::Regular,
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            _ => Role::Other,
        },
    }
}

fn worker_id(value: &Value) -> Option<Arc<str>> {
    let id = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    (!id.is_empty() && id.len() <= WORKER_ID_BYTES_MAX).then(|| Arc::from(id))
}

fn join(engines: &mut BTreeMap<EngineId, Worker>, found: Worker) {
    let Some(known) = engines.get_mut(&found.engine) else {
        engines.insert(found.engine.clone(), found);
        return;
    };
    known.healthy |= found.healthy;
    known.worker_ids.extend(found.worker_ids);
    // rows of one engine agree; should they not, the order of rows must not matter
    if rank_of(found.role) < rank_of(known.role) {
        known.role = found.role;
    }
}

const fn rank_of(role: Role) -> u8 {
    match role {
        Role::Regular => 0,
        Role::Decode => 1,
        Role::Prefill => 2,
        Role::Other => 3,
    }
}

/// Contracts, "Router kind detection": the spelling of `connection_mode` and the fields beside it.
fn kind(row: &Value) -> Option<RouterKind> {
    let mode = row.get("connection_mode")?.as_str()?;
    match mode {
        "HTTP" if row.get("metadata").is_some() => Some(RouterKind::SglangRouter),
        "Http" if row.get("id").is_none() => Some(RouterKind::VllmRouter),
        "http" | "grpc" if row.get("runtime_type").is_some() => Some(RouterKind::Smg),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engines(body: &str) -> Vec<String> {
        read(body.as_bytes())
            .unwrap()
            .workers
            .iter()
            .map(|worker| worker.engine.as_str().to_owned())
            .collect()
    }

    /// CAP1: the shapes in which routers list their engines.
    #[test]
    fn cap1_shapes() {
        let two = ["http://a:1", "http://b:1"];
        for body in [
            r#"{"workers":[{"url":"http://a:1"},{"url":"http://b:1"}]}"#,
            r#"{"workers":["http://a:1","b:1"]}"#,
            r#"[{"url":"http://b:1"},"http://a:1/"]"#,
            r#"{"urls":["http://a:1@0","http://a:1@1","http://b:1"]}"#,
            r#"{"workers":[{"url":"http://x:9@0","dp_base_url":"http://a:1"},{"url":"http://x:9","base_url":"http://b:1"}]}"#,
        ] {
            assert_eq!(engines(body), two, "{body}");
        }
        assert!(engines(r#"{"workers":[],"total":0}"#).is_empty());
        for body in [
            "",
            "{}",
            "7",
            "null",
            r#"{"workers":{}}"#,
            "<html>",
            r#"{"error":"x"}"#,
        ] {
            assert_eq!(read(body.as_bytes()), Err(NotAList), "{body}");
        }
    }

    /// CAP1: a bad entry is skipped and shown with its text, the rest stands.
    #[test]
    fn cap1_bad_entries() {
        let listed = read(
            br#"{"workers":[{"url":"http://2001:db8::5:30000"},{"url":"ftp://h/"},7,null,{"id":"x"},{"url":5},{"url":" "},{"url":"http://a:1"}]}"#,
        )
        .unwrap();
        assert_eq!(listed.workers.len(), 1);
        assert_eq!(listed.bad.total, 7);
        assert_eq!(listed.bad.shown[0].raw, "http://2001:db8::5:30000");
        assert_eq!(
            listed.bad.shown[0].reason.to_string(),
            "not a valid address"
        );
        assert_eq!(
            listed.bad.shown[1].reason,
            BadEntryReason::Address(AddressError::Scheme)
        );
        assert_eq!(listed.bad.shown[2].reason, BadEntryReason::NoAddress);
    }

    /// CAP1: one engine that is written in several ways is one engine, and is told; ranks are no spelling.
    #[test]
    fn cap1_spellings() {
        let listed = read(
            br#"["http://a:1/","HTTP://A:1","http://a:1/","http://b:1@0","http://b:1@1",{"url":"http://x:9@0","dp_base_url":"http://b:1"}]"#,
        )
        .unwrap();
        assert_eq!(listed.workers.len(), 2);
        let told: Vec<(&str, Vec<&str>)> = listed
            .spellings
            .iter()
            .map(|(engine, texts)| (engine.as_str(), texts.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(told, [("http://a:1", vec!["HTTP://A:1", "http://a:1/"])]);
        let many: Vec<String> = (0..100)
            .map(|number| format!("\"http://a:1/{number}\""))
            .collect();
        let listed = read(format!("[{}]", many.join(",")).as_bytes()).unwrap();
        let told = listed.spellings.values().next().unwrap();
        assert_eq!(told.len(), SPELLINGS_MAX);
    }

    /// CAP1: bad entries are bounded in number and length.
    #[test]
    fn cap1_bad_entries_are_bounded() {
        let long = format!("\"file://{}\"", "ä".repeat(500));
        let body = format!("[{}]", vec![long; 40].join(","));
        let bad = read(body.as_bytes()).unwrap().bad;
        assert_eq!((bad.total, bad.shown.len()), (40, BAD_ENTRIES_MAX));
        assert_eq!(bad.shown[0].raw.chars().count(), BAD_ENTRY_LETTERS_MAX);
        let many = format!("[{}]", vec!["\"a:1\""; ROWS_MAX + 3].join(","));
        assert_eq!(read(many.as_bytes()).unwrap().bad.total, 3);
    }

    /// CAP3: `is_healthy` or `healthy`, absent means healthy; an engine is healthy when one row is.
    #[test]
    fn cap3_health() {
        let listed = read(
            br#"[{"url":"a:1","is_healthy":false},{"url":"b:1","healthy":false},{"url":"c:1"},
                 {"url":"d:1@0","is_healthy":false},{"url":"d:1@1","is_healthy":true},{"url":"e:1","is_healthy":null,"healthy":false}]"#,
        )
        .unwrap();
        let healthy: Vec<bool> = listed.workers.iter().map(|worker| worker.healthy).collect();
        assert_eq!(healthy, [false, false, true, true, false]);
    }

    /// CAP8: the worker ids of an engine are the set over its rows, whatever their order.
    #[test]
    fn cap8_worker_ids() {
        let one =
            read(br#"[{"url":"a:1@0","id":"x"},{"url":"a:1@1","id":"y"},{"url":"b:1","id":7}]"#)
                .unwrap();
        let other =
            read(br#"[{"url":"b:1/","id":7},{"url":"A:1@1","id":"y"},{"url":"a:1@0","id":"x"}]"#)
                .unwrap();
        assert_eq!(one.workers, other.workers);
        assert_eq!(one.workers[0].worker_ids.len(), 2);
        assert!(
            read(br#"["a:1"]"#).unwrap().workers[0]
                .worker_ids
                .is_empty()
        );
    }

    /// CAP2: the worker type says which pools count.
    #[test]
    fn cap2_roles() {
        let listed = read(
            br#"[{"url":"a:1","worker_type":"regular"},{"url":"b:1","worker_type":"Prefill"},{"url":"c:1","worker_type":"decode"},
                 {"url":"d:1","worker_type":"encode"},{"url":"e:1"}]"#,
        )
        .unwrap();
        let roles: Vec<Role> = listed.workers.iter().map(|worker| worker.role).collect();
        assert_eq!(
            roles,
            [
                Role::Regular,
                Role::Prefill,
                Role::Decode,
                Role::Other,
                Role::Regular
            ]
        );
    }
}
