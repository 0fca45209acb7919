//! Row shapes: what stands in the values of the tables, translated by hand from and to the core's
//! types, so that wire shapes, rows and core types change apart.
//!
//! A value is one version byte and the row in postcard's encoding. Each shape counts its own versions.
//! A step of migration turns over the rows of a shape that changes, so only the newest version is
//! read here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvgate_core::audit::{AuditAct, AuditEntry};
use kvgate_core::close::{
    CallFailure, CallResult, CloseIntent, CloseMode, CloseReason, CloseStage, Reopened, Target,
    TargetState,
};
use kvgate_core::decision::{BypassReason, EndHow, Scope};
use kvgate_core::effect::CancelOutcome;
use kvgate_core::ids::{
    AuditNo, CloseId, CloseNo, EngineId, Epoch, IdError, Issue, Label, LeaseId, RowNo, RunId, Seq,
    SessionId, StepNo, TicketId,
};
use kvgate_core::policy::AdmissionScope;
use kvgate_core::reading::{Role, StartMark};
use kvgate_core::report::{Standing, StepReport, Window};
use kvgate_core::settings::{Moved, Overrides, Setting, SettingValue};
use kvgate_core::state::{EngineRow, EpochCause, EpochEntry, Start};
use kvgate_core::tally::{ScopeTally, Tally};
use kvgate_core::ticket::{Asked, Ended, Lease, Sent, Stage, Terms, Ticket};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use serde::{Deserialize, Serialize};

/// Version byte of shapes that are as they began.
const FIRST: u8 = 1;
/// Version byte of engines: schema 2 gave them, and the counters, what is known of closes.
const SECOND: u8 = 2;
/// Version byte of the counters: schema 3 gave them what readings told of usage.
const THIRD: u8 = 3;

/// A value that this version cannot read.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// No bytes, or a version byte that is not known.
    #[error("a row has an unknown version")]
    Version,
    /// Not the encoding of a row.
    #[error("a row cannot be decoded: {0}")]
    Encoding(#[from] postcard::Error),
    /// An id that breaks rule ID1.
    #[error("a row has a bad id: {0}")]
    Id(#[from] IdError),
    /// A number outside its range.
    #[error("a row has a number outside its range")]
    Range,
}

/// Encodes into a buffer that is reused.
fn encode(version: u8, row: &impl Serialize, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    buffer.clear();
    buffer.push(version);
    // `to_extend` takes the buffer and gives it back grown.
    *buffer = postcard::to_extend(row, std::mem::take(buffer))?;
    Ok(())
}

fn decode<'a, T: Deserialize<'a>>(version: u8, bytes: &'a [u8]) -> Result<T, RowError> {
    match bytes.split_first() {
        Some((found, row)) if *found == version => Ok(postcard::from_bytes(row)?),
        _ => Err(RowError::Version),
    }
}

fn tokens(count: u64) -> Result<Tokens, RowError> {
    Tokens::new(count).ok_or(RowError::Range)
}

/// What every commit says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Head {
    pub term: u64,
    pub seq: u64,
    pub now: u64,
    pub next_issue: u64,
}

impl Head {
    pub fn encode(&self, buffer: &mut Vec<u8>) -> Result<(), RowError> {
        encode(FIRST, self, buffer)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, RowError> {
        decode(FIRST, bytes)
    }

    pub fn seq(&self) -> Seq {
        Seq(self.seq)
    }

    pub fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.now)
    }
}

#[derive(Serialize, Deserialize)]
struct TicketRow<'a> {
    id: &'a str,
    #[serde(borrow)]
    asked: Option<AskedRow<'a>>,
    stage: StageRow,
}

#[derive(Serialize, Deserialize)]
struct AskedRow<'a> {
    session: &'a str,
    sent: SentRow,
    reservation: u64,
    scope: ScopeRow,
    ttl_ms: u64,
    client: Option<&'a str>,
    request_id: Option<&'a str>,
}

#[derive(Serialize, Deserialize)]
enum SentRow {
    Parts { prompt: u64, max_new: u64 },
    Sum(u64),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum ScopeRow {
    Train,
    Eval,
}

#[derive(Serialize, Deserialize)]
enum StageRow {
    Waiting {
        since: u64,
    },
    Held {
        issue: u64,
        salt: u64,
        epoch: u64,
        granted_at: u64,
        waited_ms: Option<u64>,
        ttl_ms: u64,
        ends_at: u64,
        graced: bool,
    },
    Ended {
        at: u64,
        how: HowRow,
        lease: Option<(u64, u64)>,
        since: Option<u64>,
        waited_ms: u64,
        epoch: u64,
    },
}

#[derive(Serialize, Deserialize)]
enum HowRow {
    Released,
    Cancelled,
    SessionClosed,
    Expired,
    Revoked,
    Dropped,
    TakenBack,
    Disabled,
    OutOfScope,
    Protected,
    Degraded,
    Oversize,
    QueueFull,
    Aged,
}

/// Encodes a ticket; its row number is the key.
pub fn encode_ticket(ticket: &Ticket, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let asked = ticket.asked.as_ref().map(|asked| AskedRow {
        session: asked.session.as_str(),
        sent: match asked.sent {
            Sent::Parts { prompt, max_new } => SentRow::Parts {
                prompt: prompt.get(),
                max_new: max_new.get(),
            },
            Sent::Sum(tokens) => SentRow::Sum(tokens.get()),
        },
        reservation: asked.terms.reservation.get(),
        scope: match asked.terms.scope {
            Scope::Train => ScopeRow::Train,
            Scope::Eval => ScopeRow::Eval,
        },
        ttl_ms: asked.terms.ttl.millis(),
        client: asked.terms.client.as_ref().map(Label::as_str),
        request_id: asked.terms.request_id.as_ref().map(Label::as_str),
    });
    let row = TicketRow {
        id: ticket.id.as_str(),
        asked,
        stage: encode_stage(&ticket.stage),
    };
    encode(FIRST, &row, buffer)
}

fn encode_stage(stage: &Stage) -> StageRow {
    match stage {
        Stage::Waiting { since } => StageRow::Waiting {
            since: since.millis(),
        },
        Stage::Held(lease) => StageRow::Held {
            issue: lease.id.issue.0,
            salt: lease.id.salt,
            epoch: lease.epoch.0,
            granted_at: lease.granted_at.millis(),
            waited_ms: lease.waited.map(Span::millis),
            ttl_ms: lease.ttl.millis(),
            ends_at: lease.ends_at.millis(),
            graced: lease.graced,
        },
        Stage::Ended(ended) => StageRow::Ended {
            at: ended.at.millis(),
            how: match ended.how {
                EndHow::Released => HowRow::Released,
                EndHow::Cancelled => HowRow::Cancelled,
                EndHow::SessionClosed => HowRow::SessionClosed,
                EndHow::Expired => HowRow::Expired,
                EndHow::Revoked => HowRow::Revoked,
                EndHow::Dropped => HowRow::Dropped,
                EndHow::TakenBack => HowRow::TakenBack,
                EndHow::Bypassed(reason) => match reason {
                    BypassReason::Disabled => HowRow::Disabled,
                    BypassReason::OutOfScope => HowRow::OutOfScope,
                    BypassReason::Protected => HowRow::Protected,
                    BypassReason::Degraded => HowRow::Degraded,
                    BypassReason::Oversize => HowRow::Oversize,
                    BypassReason::QueueFull => HowRow::QueueFull,
                    BypassReason::Aged => HowRow::Aged,
                },
            },
            lease: ended.lease.map(|lease| (lease.issue.0, lease.salt)),
            since: ended.since.map(Timestamp::millis),
            waited_ms: ended.waited.millis(),
            epoch: ended.epoch.0,
        },
    }
}

/// Decodes a ticket that stood under `row`.
pub fn decode_ticket(row: u64, bytes: &[u8]) -> Result<Ticket, RowError> {
    let ticket: TicketRow<'_> = decode(FIRST, bytes)?;
    let asked = match ticket.asked {
        None => None,
        Some(asked) => Some(Asked {
            session: SessionId::new(asked.session)?,
            sent: match asked.sent {
                SentRow::Parts { prompt, max_new } => Sent::Parts {
                    prompt: tokens(prompt)?,
                    max_new: tokens(max_new)?,
                },
                SentRow::Sum(sum) => Sent::Sum(tokens(sum)?),
            },
            terms: Terms {
                reservation: tokens(asked.reservation)?,
                scope: match asked.scope {
                    ScopeRow::Train => Scope::Train,
                    ScopeRow::Eval => Scope::Eval,
                },
                ttl: Span::from_millis(asked.ttl_ms),
                client: asked.client.map(Label::new).transpose()?,
                request_id: asked.request_id.map(Label::new).transpose()?,
            },
        }),
    };
    Ok(Ticket {
        row: RowNo(row),
        id: TicketId::new(ticket.id)?,
        asked,
        stage: decode_stage(ticket.stage),
    })
}

fn decode_stage(stage: StageRow) -> Stage {
    match stage {
        StageRow::Waiting { since } => Stage::Waiting {
            since: Timestamp::from_millis(since),
        },
        StageRow::Held {
            issue,
            salt,
            epoch,
            granted_at,
            waited_ms,
            ttl_ms,
            ends_at,
            graced,
        } => Stage::Held(Lease {
            id: lease_id((issue, salt)),
            epoch: Epoch(epoch),
            granted_at: Timestamp::from_millis(granted_at),
            waited: waited_ms.map(Span::from_millis),
            ttl: Span::from_millis(ttl_ms),
            ends_at: Timestamp::from_millis(ends_at),
            graced,
        }),
        StageRow::Ended {
            at,
            how,
            lease,
            since,
            waited_ms,
            epoch,
        } => Stage::Ended(Ended {
            at: Timestamp::from_millis(at),
            how: match how {
                HowRow::Released => EndHow::Released,
                HowRow::Cancelled => EndHow::Cancelled,
                HowRow::SessionClosed => EndHow::SessionClosed,
                HowRow::Expired => EndHow::Expired,
                HowRow::Revoked => EndHow::Revoked,
                HowRow::Dropped => EndHow::Dropped,
                HowRow::TakenBack => EndHow::TakenBack,
                HowRow::Disabled => EndHow::Bypassed(BypassReason::Disabled),
                HowRow::OutOfScope => EndHow::Bypassed(BypassReason::OutOfScope),
                HowRow::Protected => EndHow::Bypassed(BypassReason::Protected),
                HowRow::Degraded => EndHow::Bypassed(BypassReason::Degraded),
                HowRow::Oversize => EndHow::Bypassed(BypassReason::Oversize),
                HowRow::QueueFull => EndHow::Bypassed(BypassReason::QueueFull),
                HowRow::Aged => EndHow::Bypassed(BypassReason::Aged),
            },
            lease: lease.map(lease_id),
            since: since.map(Timestamp::from_millis),
            waited: Span::from_millis(waited_ms),
            epoch: Epoch(epoch),
        }),
    }
}

const fn lease_id((issue, salt): (u64, u64)) -> LeaseId {
    LeaseId {
        issue: Issue(issue),
        salt,
    }
}

#[derive(Serialize, Deserialize)]
struct StartRow {
    first_issue: u64,
    salt: u64,
    at: u64,
}

pub fn encode_start(start: &Start, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = StartRow {
        first_issue: start.first_issue.0,
        salt: start.salt,
        at: start.at.millis(),
    };
    encode(FIRST, &row, buffer)
}

pub fn decode_start(bytes: &[u8]) -> Result<Start, RowError> {
    let row: StartRow = decode(FIRST, bytes)?;
    Ok(Start {
        first_issue: Issue(row.first_issue),
        salt: row.salt,
        at: Timestamp::from_millis(row.at),
    })
}

#[derive(Serialize, Deserialize)]
struct EpochRow {
    at: u64,
    cause: CauseRow,
}

#[derive(Serialize, Deserialize)]
enum CauseRow {
    First,
    MembersChanged { joined: u32, left: u32 },
    Restarted(String),
    WorkerIdChanged(String),
    Restored,
}

pub fn encode_epoch(entry: &EpochEntry, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = EpochRow {
        at: entry.at.millis(),
        cause: match &entry.cause {
            EpochCause::First => CauseRow::First,
            EpochCause::MembersChanged { joined, left } => CauseRow::MembersChanged {
                joined: *joined,
                left: *left,
            },
            EpochCause::Restarted(engine) => CauseRow::Restarted(engine.as_str().to_owned()),
            EpochCause::WorkerIdChanged(engine) => {
                CauseRow::WorkerIdChanged(engine.as_str().to_owned())
            }
            EpochCause::Restored => CauseRow::Restored,
        },
    };
    encode(FIRST, &row, buffer)
}

pub fn decode_epoch(epoch: u64, bytes: &[u8]) -> Result<EpochEntry, RowError> {
    let row: EpochRow = decode(FIRST, bytes)?;
    Ok(EpochEntry {
        epoch: Epoch(epoch),
        at: Timestamp::from_millis(row.at),
        cause: match row.cause {
            CauseRow::First => EpochCause::First,
            CauseRow::MembersChanged { joined, left } => {
                EpochCause::MembersChanged { joined, left }
            }
            CauseRow::Restarted(engine) => EpochCause::Restarted(EngineId::new(&engine)),
            CauseRow::WorkerIdChanged(engine) => {
                EpochCause::WorkerIdChanged(EngineId::new(&engine))
            }
            CauseRow::Restored => EpochCause::Restored,
        },
    })
}

#[derive(Serialize, Deserialize)]
struct MemberRow {
    role: RoleRow,
    worker_ids: Vec<String>,
    seen_healthy: bool,
    capacity: Option<u64>,
    start_mark: Option<u64>,
    joined: u64,
    close_refusals: u32,
    unsupported_at: Option<u64>,
}

#[derive(Serialize, Deserialize)]
enum RoleRow {
    Regular,
    Decode,
    Prefill,
    Other,
}

pub fn encode_engine(engine: &EngineRow, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = MemberRow {
        role: match engine.role {
            Role::Regular => RoleRow::Regular,
            Role::Decode => RoleRow::Decode,
            Role::Prefill => RoleRow::Prefill,
            Role::Other => RoleRow::Other,
        },
        worker_ids: engine.worker_ids.iter().map(|id| id.to_string()).collect(),
        seen_healthy: engine.seen_healthy,
        capacity: engine.capacity.map(Tokens::get),
        start_mark: engine.start_mark.map(|mark| mark.0),
        joined: engine.joined.0,
        close_refusals: engine.close_refusals,
        unsupported_at: engine.unsupported_at.map(Timestamp::millis),
    };
    encode(SECOND, &row, buffer)
}

pub fn decode_engine(id: &str, bytes: &[u8]) -> Result<EngineRow, RowError> {
    let row: MemberRow = decode(SECOND, bytes)?;
    Ok(EngineRow {
        id: EngineId::new(id),
        role: match row.role {
            RoleRow::Regular => Role::Regular,
            RoleRow::Decode => Role::Decode,
            RoleRow::Prefill => Role::Prefill,
            RoleRow::Other => Role::Other,
        },
        worker_ids: row
            .worker_ids
            .iter()
            .map(|id| Arc::from(id.as_str()))
            .collect::<BTreeSet<_>>(),
        seen_healthy: row.seen_healthy,
        capacity: row.capacity.map(tokens).transpose()?,
        start_mark: row.start_mark.map(StartMark),
        joined: Epoch(row.joined),
        close_refusals: row.close_refusals,
        unsupported_at: row.unsupported_at.map(Timestamp::from_millis),
    })
}

/// A close intent; its number is the key.
#[derive(Serialize, Deserialize)]
struct CloseRow<'a> {
    salt: u64,
    session: &'a str,
    mode: ModeRow,
    reason: Option<WhyRow>,
    requested_at: u64,
    stage: CloseStageRow,
    #[serde(borrow)]
    targets: Vec<TargetRow<'a>>,
    counts: Vec<u32>,
    timed_out: bool,
    failure_counted: bool,
    reopened: Option<(u64, &'a str)>,
    not_aborted: Vec<&'a str>,
}

#[derive(Serialize, Deserialize)]
struct TargetRow<'a> {
    engine: &'a str,
    state: TargetStateRow,
    attempts: u32,
    #[serde(borrow)]
    last: Option<CallRow<'a>>,
}

#[derive(Serialize, Deserialize)]
enum CallRow<'a> {
    Status { code: u16, text: Option<&'a str> },
    Failed(FailureRow),
}

#[derive(Serialize, Deserialize)]
enum CloseStageRow {
    Joining { ready_since: Option<u64> },
    Delivering { since: u64, early: bool },
    Done { at: u64 },
}

/// The same words on both sides. A row keeps a word by its place in the list, so that new words come
/// at the end.
macro_rules! mirror {
    ($row:ident is $core:ident { $($word:ident),* $(,)? }) => {
        #[derive(Clone, Copy, Serialize, Deserialize)]
        enum $row {
            $($word,)*
        }

        impl From<$core> for $row {
            fn from(core: $core) -> Self {
                match core {
                    $($core::$word => Self::$word,)*
                }
            }
        }

        impl From<$row> for $core {
            fn from(row: $row) -> Self {
                match row {
                    $($row::$word => Self::$word,)*
                }
            }
        }
    };
}

mirror!(ModeRow is CloseMode { Join, Abort });
mirror!(WhyRow is CloseReason { Terminal, Dropped, Idle });
mirror!(FailureRow is CallFailure { Timeout, Refused, TooLarge, NotAllowed });
mirror!(TargetStateRow is TargetState {
    Pending,
    Delivered,
    Refused,
    Unsupported,
    Restarted,
    Superseded,
    Failed,
    Gone,
});

pub fn encode_close(close: &CloseIntent, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = CloseRow {
        salt: close.id.salt,
        session: close.session.as_str(),
        mode: close.mode.into(),
        reason: close.reason.map(WhyRow::from),
        requested_at: close.requested_at.millis(),
        stage: match close.stage {
            CloseStage::Joining { ready_since } => CloseStageRow::Joining {
                ready_since: ready_since.map(Timestamp::millis),
            },
            CloseStage::Delivering { since, early } => CloseStageRow::Delivering {
                since: since.millis(),
                early,
            },
            CloseStage::Done { at } => CloseStageRow::Done { at: at.millis() },
        },
        targets: close
            .targets
            .iter()
            .map(|(engine, target)| TargetRow {
                engine: engine.as_str(),
                state: target.state.into(),
                attempts: target.attempts,
                last: target.last.as_ref().map(encode_call),
            })
            .collect(),
        counts: close.counts.to_vec(),
        timed_out: close.timed_out,
        failure_counted: close.failure_counted,
        reopened: close
            .reopened
            .as_ref()
            .map(|reopened| (reopened.at.millis(), reopened.ticket.as_str())),
        not_aborted: close.not_aborted.iter().map(Label::as_str).collect(),
    };
    encode(FIRST, &row, buffer)
}

fn encode_call(result: &CallResult) -> CallRow<'_> {
    match result {
        CallResult::Status { code, text } => CallRow::Status {
            code: *code,
            text: text.as_deref(),
        },
        CallResult::Failed(failure) => CallRow::Failed((*failure).into()),
    }
}

/// Decodes a close intent that stood under `number`.
pub fn decode_close(number: u64, bytes: &[u8]) -> Result<CloseIntent, RowError> {
    let row: CloseRow<'_> = decode(FIRST, bytes)?;
    let reopened = match row.reopened {
        Some((at, ticket)) => Some(Reopened {
            at: Timestamp::from_millis(at),
            ticket: TicketId::new(ticket)?,
        }),
        None => None,
    };
    let labels = row.not_aborted.into_iter().map(Label::new);
    Ok(CloseIntent {
        id: CloseId {
            number: CloseNo(number),
            salt: row.salt,
        },
        session: SessionId::new(row.session)?,
        mode: row.mode.into(),
        reason: row.reason.map(CloseReason::from),
        requested_at: Timestamp::from_millis(row.requested_at),
        stage: match row.stage {
            CloseStageRow::Joining { ready_since } => CloseStage::Joining {
                ready_since: ready_since.map(Timestamp::from_millis),
            },
            CloseStageRow::Delivering { since, early } => CloseStage::Delivering {
                since: Timestamp::from_millis(since),
                early,
            },
            CloseStageRow::Done { at } => CloseStage::Done {
                at: Timestamp::from_millis(at),
            },
        },
        targets: row
            .targets
            .into_iter()
            .map(decode_target)
            .collect::<BTreeMap<_, _>>(),
        counts: counters(&row.counts),
        timed_out: row.timed_out,
        failure_counted: row.failure_counted,
        reopened,
        not_aborted: labels.collect::<Result<BTreeSet<_>, _>>()?,
    })
}

fn decode_target(row: TargetRow<'_>) -> (EngineId, Target) {
    let target = Target {
        state: row.state.into(),
        attempts: row.attempts,
        last: row.last.map(|last| match last {
            CallRow::Status { code, text } => CallResult::Status {
                code,
                text: text.map(Arc::from),
            },
            CallRow::Failed(failure) => CallResult::Failed(failure.into()),
        }),
    };
    (EngineId::new(row.engine), target)
}

/// Encodes the last use of a session; the session's id is the key.
pub fn encode_session(used: Timestamp, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    encode(FIRST, &used.millis(), buffer)
}

/// Decodes the last use of the session that it stood under.
pub fn decode_session(id: &str, bytes: &[u8]) -> Result<(SessionId, Timestamp), RowError> {
    let used: u64 = decode(FIRST, bytes)?;
    Ok((SessionId::new(id)?, Timestamp::from_millis(used)))
}

/// Counters as plain lists, so that a later version can append.
#[derive(Serialize, Deserialize)]
struct TallyRow {
    scopes: Vec<ScopeTallyRow>,
    leases_ended: Vec<u64>,
    granted_after_wait: u64,
    waited_millis: u64,
    local_bypasses: Vec<u64>,
    closes: u64,
    close_failures: u64,
    close_deliveries: Vec<u64>,
    sessions_reopened: u64,
    usage_rounds: u64,
    usage_sum: u64,
}

#[derive(Serialize, Deserialize)]
struct ScopeTallyRow {
    admit: u64,
    wait: Vec<u64>,
    bypass: Vec<u64>,
    cancelled: Vec<u64>,
}

pub fn encode_tally(tally: &Tally, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    encode(THIRD, &tally_row(tally), buffer)
}

fn tally_row(tally: &Tally) -> TallyRow {
    TallyRow {
        scopes: tally
            .scopes
            .iter()
            .map(|scope| ScopeTallyRow {
                admit: scope.admit,
                wait: scope.wait.to_vec(),
                bypass: scope.bypass.to_vec(),
                cancelled: scope.cancelled.to_vec(),
            })
            .collect(),
        leases_ended: tally.leases_ended.to_vec(),
        granted_after_wait: tally.granted_after_wait,
        waited_millis: tally.waited_millis,
        local_bypasses: tally.local_bypasses.to_vec(),
        closes: tally.closes,
        close_failures: tally.close_failures,
        close_deliveries: tally.close_deliveries.to_vec(),
        sessions_reopened: tally.sessions_reopened,
        usage_rounds: tally.usage_rounds,
        usage_sum: tally.usage_sum,
    }
}

pub fn decode_tally(bytes: &[u8]) -> Result<Tally, RowError> {
    Ok(tally_of(&decode(THIRD, bytes)?))
}

fn tally_of(row: &TallyRow) -> Tally {
    let mut tally = Tally {
        leases_ended: counters(&row.leases_ended),
        granted_after_wait: row.granted_after_wait,
        waited_millis: row.waited_millis,
        local_bypasses: counters(&row.local_bypasses),
        closes: row.closes,
        close_failures: row.close_failures,
        close_deliveries: counters(&row.close_deliveries),
        sessions_reopened: row.sessions_reopened,
        usage_rounds: row.usage_rounds,
        usage_sum: row.usage_sum,
        ..Tally::default()
    };
    for (scope, stored) in tally.scopes.iter_mut().zip(&row.scopes) {
        *scope = ScopeTally {
            admit: stored.admit,
            wait: counters(&stored.wait),
            bypass: counters(&stored.bypass),
            cancelled: counters(&stored.cancelled),
        };
    }
    tally
}

/// The window of a run; the run is the key. The counters stand last, so that they can grow as their
/// own row does.
#[derive(Serialize, Deserialize)]
struct WindowRow {
    from: u64,
    usage_peak: Option<u32>,
    base: TallyRow,
}

pub fn encode_window(window: &Window, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = WindowRow {
        from: window.from.millis(),
        usage_peak: window.usage_peak.map(Ppm::get),
        base: tally_row(&window.base),
    };
    encode(FIRST, &row, buffer)
}

/// Decodes the window of runs that are new.
pub fn decode_window(bytes: &[u8]) -> Result<Window, RowError> {
    let row: WindowRow = decode(FIRST, bytes)?;
    Ok(Window {
        from: Timestamp::from_millis(row.from),
        base: Box::new(tally_of(&row.base)),
        usage_peak: row.usage_peak.map(share).transpose()?,
    })
}

/// Decodes the window of the run that it stood under.
pub fn decode_window_of(run: &str, bytes: &[u8]) -> Result<(RunId, Window), RowError> {
    Ok((RunId::new(run)?, decode_window(bytes)?))
}

fn share(millionths: u32) -> Result<Ppm, RowError> {
    Ppm::new(millionths).ok_or(RowError::Range)
}

/// A step report; its number is the key. The counters stand last here too.
#[derive(Serialize, Deserialize)]
struct StepRow<'a> {
    run: &'a str,
    step: u64,
    from: u64,
    to: u64,
    usage_peak: Option<u32>,
    session_lifecycle: bool,
    waiting: u64,
    ceiling: u64,
    reserved: u64,
    leases: u64,
    epoch: u64,
    degraded: bool,
    counts: TallyRow,
}

/// Encodes a report and gives its key. A look at a window that goes on has neither number nor step,
/// and is no row.
pub fn encode_step(report: &StepReport, buffer: &mut Vec<u8>) -> Result<StepNo, RowError> {
    let (Some(number), Some(step)) = (report.number, report.step) else {
        return Err(RowError::Range);
    };
    let standing = &report.standing;
    let row = StepRow {
        run: report.run.as_str(),
        step,
        from: report.from.millis(),
        to: report.to.millis(),
        usage_peak: report.usage_peak.map(Ppm::get),
        session_lifecycle: standing.session_lifecycle,
        waiting: standing.waiting,
        ceiling: standing.ceiling.get(),
        reserved: standing.reserved.get(),
        leases: standing.leases,
        epoch: standing.epoch.0,
        degraded: standing.degraded,
        counts: tally_row(&report.counts),
    };
    encode(FIRST, &row, buffer)?;
    Ok(number)
}

/// Decodes a report that stood under `number`.
pub fn decode_step(number: u64, bytes: &[u8]) -> Result<StepReport, RowError> {
    let row: StepRow<'_> = decode(FIRST, bytes)?;
    Ok(StepReport {
        number: Some(StepNo(number)),
        run: RunId::new(row.run)?,
        step: Some(row.step),
        from: Timestamp::from_millis(row.from),
        to: Timestamp::from_millis(row.to),
        counts: Box::new(tally_of(&row.counts)),
        usage_peak: row.usage_peak.map(share).transpose()?,
        standing: Standing {
            session_lifecycle: row.session_lifecycle,
            waiting: row.waiting,
            ceiling: tokens(row.ceiling)?,
            reserved: tokens(row.reserved)?,
            leases: row.leases,
            epoch: Epoch(row.epoch),
            degraded: row.degraded,
        },
    })
}

/// What was set at run time. A share is in millionths, a time in milliseconds.
#[derive(Serialize, Deserialize)]
struct SettingsRow {
    program_admission: Option<bool>,
    session_lifecycle: Option<bool>,
    paused: Option<bool>,
    headroom: Option<u32>,
    pressure_threshold: Option<u32>,
    expected_decode_cap: Option<Option<u64>>,
    max_wait_ms: Option<u64>,
    scope: Option<AdmissionScopeRow>,
    changed_at: Option<u64>,
}

mirror!(AdmissionScopeRow is AdmissionScope { Train, All });

pub fn encode_settings(overrides: &Overrides, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = SettingsRow {
        program_admission: overrides.program_admission,
        session_lifecycle: overrides.session_lifecycle,
        paused: overrides.paused,
        headroom: overrides.headroom.map(Ppm::get),
        pressure_threshold: overrides.pressure_threshold.map(Ppm::get),
        expected_decode_cap: overrides
            .expected_decode_cap
            .map(|cap| cap.map(Tokens::get)),
        max_wait_ms: overrides.max_wait.map(Span::millis),
        scope: overrides.scope.map(AdmissionScopeRow::from),
        changed_at: overrides.changed_at.map(Timestamp::millis),
    };
    encode(FIRST, &row, buffer)
}

pub fn decode_settings(bytes: &[u8]) -> Result<Overrides, RowError> {
    let row: SettingsRow = decode(FIRST, bytes)?;
    let expected_decode_cap = match row.expected_decode_cap {
        Some(cap) => Some(cap.map(tokens).transpose()?),
        None => None,
    };
    Ok(Overrides {
        program_admission: row.program_admission,
        session_lifecycle: row.session_lifecycle,
        paused: row.paused,
        headroom: row.headroom.map(share).transpose()?,
        pressure_threshold: row.pressure_threshold.map(share).transpose()?,
        expected_decode_cap,
        max_wait: row.max_wait_ms.map(Span::from_millis),
        scope: row.scope.map(AdmissionScope::from),
        changed_at: row.changed_at.map(Timestamp::from_millis),
    })
}

/// An entry of the audit; its number is the key.
#[derive(Serialize, Deserialize)]
struct AuditRow<'a> {
    at: u64,
    who: &'a str,
    #[serde(borrow)]
    act: ActRow<'a>,
}

#[derive(Serialize, Deserialize)]
enum ActRow<'a> {
    SettingsChanged(Vec<MovedRow>),
    SettingsReset(Vec<MovedRow>),
    LeaseRevoked {
        lease: (u64, u64),
        ticket: &'a str,
        session: Option<&'a str>,
        tokens: u64,
    },
    TicketCancelled {
        ticket: &'a str,
        session: Option<&'a str>,
        tokens: u64,
        outcome: CancelRow,
    },
    SessionClosed {
        session: &'a str,
        close: (u64, u64),
        mode: ModeRow,
    },
    CloseRetried {
        close: (u64, u64),
        session: &'a str,
        engines: u64,
    },
}

#[derive(Serialize, Deserialize)]
struct MovedRow {
    setting: SettingRow,
    from: ValueRow,
    to: ValueRow,
    is_set: bool,
}

#[derive(Serialize, Deserialize)]
enum ValueRow {
    Switch(bool),
    Share(u32),
    Cap(Option<u64>),
    TimeMs(u64),
    Scope(AdmissionScopeRow),
}

mirror!(SettingRow is Setting {
    ProgramAdmission,
    SessionLifecycle,
    Paused,
    Headroom,
    PressureThreshold,
    ExpectedDecodeCap,
    MaxWait,
    Scope,
});
mirror!(CancelRow is CancelOutcome {
    Withdrawn,
    Released,
    Bypassed,
    AlreadyFinished,
    Unknown,
});

pub fn encode_audit(entry: &AuditEntry, buffer: &mut Vec<u8>) -> Result<(), RowError> {
    let row = AuditRow {
        at: entry.at.millis(),
        who: entry.who.as_str(),
        act: act_row(&entry.act),
    };
    encode(FIRST, &row, buffer)
}

fn act_row(act: &AuditAct) -> ActRow<'_> {
    match act {
        AuditAct::SettingsChanged(moves) => ActRow::SettingsChanged(moved_rows(moves)),
        AuditAct::SettingsReset(moves) => ActRow::SettingsReset(moved_rows(moves)),
        AuditAct::LeaseRevoked {
            lease,
            ticket,
            session,
            tokens,
        } => ActRow::LeaseRevoked {
            lease: (lease.issue.0, lease.salt),
            ticket: ticket.as_str(),
            session: session.as_ref().map(SessionId::as_str),
            tokens: tokens.get(),
        },
        AuditAct::TicketCancelled {
            ticket,
            session,
            tokens,
            outcome,
        } => ActRow::TicketCancelled {
            ticket: ticket.as_str(),
            session: session.as_ref().map(SessionId::as_str),
            tokens: tokens.get(),
            outcome: (*outcome).into(),
        },
        AuditAct::SessionClosed {
            session,
            close,
            mode,
        } => ActRow::SessionClosed {
            session: session.as_str(),
            close: (close.number.0, close.salt),
            mode: (*mode).into(),
        },
        AuditAct::CloseRetried {
            close,
            session,
            engines,
        } => ActRow::CloseRetried {
            close: (close.number.0, close.salt),
            session: session.as_str(),
            engines: *engines,
        },
    }
}

fn moved_rows(moves: &[Moved]) -> Vec<MovedRow> {
    let row = |moved: &Moved| MovedRow {
        setting: moved.setting.into(),
        from: value_row(moved.from),
        to: value_row(moved.to),
        is_set: moved.is_set,
    };
    moves.iter().map(row).collect()
}

fn value_row(value: SettingValue) -> ValueRow {
    match value {
        SettingValue::Switch(on) => ValueRow::Switch(on),
        SettingValue::Share(share) => ValueRow::Share(share.get()),
        SettingValue::Cap(cap) => ValueRow::Cap(cap.map(Tokens::get)),
        SettingValue::Time(time) => ValueRow::TimeMs(time.millis()),
        SettingValue::Scope(scope) => ValueRow::Scope(scope.into()),
    }
}

/// Decodes an entry that stood under `number`.
pub fn decode_audit(number: u64, bytes: &[u8]) -> Result<AuditEntry, RowError> {
    let row: AuditRow<'_> = decode(FIRST, bytes)?;
    Ok(AuditEntry {
        no: AuditNo(number),
        at: Timestamp::from_millis(row.at),
        who: Label::new(row.who)?,
        act: decode_act(row.act)?,
    })
}

fn decode_act(row: ActRow<'_>) -> Result<AuditAct, RowError> {
    let close_id = |(number, salt)| CloseId {
        number: CloseNo(number),
        salt,
    };
    Ok(match row {
        ActRow::SettingsChanged(moves) => AuditAct::SettingsChanged(decode_moves(moves)?),
        ActRow::SettingsReset(moves) => AuditAct::SettingsReset(decode_moves(moves)?),
        ActRow::LeaseRevoked {
            lease,
            ticket,
            session,
            tokens: reserved,
        } => AuditAct::LeaseRevoked {
            lease: lease_id(lease),
            ticket: TicketId::new(ticket)?,
            session: session.map(SessionId::new).transpose()?,
            tokens: tokens(reserved)?,
        },
        ActRow::TicketCancelled {
            ticket,
            session,
            tokens: asked,
            outcome,
        } => AuditAct::TicketCancelled {
            ticket: TicketId::new(ticket)?,
            session: session.map(SessionId::new).transpose()?,
            tokens: tokens(asked)?,
            outcome: outcome.into(),
        },
        ActRow::SessionClosed {
            session,
            close,
            mode,
        } => AuditAct::SessionClosed {
            session: SessionId::new(session)?,
            close: close_id(close),
            mode: mode.into(),
        },
        ActRow::CloseRetried {
            close,
            session,
            engines,
        } => AuditAct::CloseRetried {
            close: close_id(close),
            session: SessionId::new(session)?,
            engines,
        },
    })
}

fn decode_moves(rows: Vec<MovedRow>) -> Result<Vec<Moved>, RowError> {
    let moved = |row: MovedRow| {
        Ok(Moved {
            setting: row.setting.into(),
            from: decode_value(row.from)?,
            to: decode_value(row.to)?,
            is_set: row.is_set,
        })
    };
    rows.into_iter().map(moved).collect()
}

fn decode_value(row: ValueRow) -> Result<SettingValue, RowError> {
    Ok(match row {
        ValueRow::Switch(on) => SettingValue::Switch(on),
        ValueRow::Share(millionths) => SettingValue::Share(share(millionths)?),
        ValueRow::Cap(cap) => SettingValue::Cap(cap.map(tokens).transpose()?),
        ValueRow::TimeMs(millis) => SettingValue::Time(Span::from_millis(millis)),
        ValueRow::Scope(scope) => SettingValue::Scope(scope.into()),
    })
}

/// Stored counters in their order; those that a later version added begin at 0.
fn counters<C: Copy + Default, const N: usize>(stored: &[C]) -> [C; N] {
    let mut counters = [C::default(); N];
    for (counter, value) in counters.iter_mut().zip(stored) {
        *counter = *value;
    }
    counters
}
