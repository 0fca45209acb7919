//! The lines of a copy, translated by hand from and to the core's types. They change apart from the
//! rows of the store: a copy is read by every later version.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvgate_core::audit::AuditEntry;
use kvgate_core::close::{
    CallFailure, CallResult, CloseIntent, CloseMode, CloseReason, CloseStage, Reopened, Target,
    TargetState,
};
use kvgate_core::decision::{BypassReason, EndHow, Scope};
use kvgate_core::ids::{
    CloseId, EngineId, Epoch, Issue, Label, LeaseId, RowNo, RunId, Seq, SessionId, StepNo, TicketId,
};
use kvgate_core::reading::{Role, StartMark};
use kvgate_core::report::{Standing, StepReport, Window};
use kvgate_core::settings::Overrides;
use kvgate_core::state::{EngineRow, EpochCause, EpochEntry, Start};
use kvgate_core::store::Image;
use kvgate_core::tally::{ScopeTally, Tally};
use kvgate_core::ticket::{Asked, Ended, Lease, Sent, Stage, Terms, Ticket};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use serde::{Deserialize, Serialize};

use super::operated::{AuditLine, SettingsLine};
use super::{CopyError, FORMAT, FORMAT_VERSION, RowFault, counters, epoch_of};
use crate::store::start::schema_known;

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Header(Header),
    Meta(Meta),
    Tally(TallyLine),
    Start(StartLine),
    Epoch(EpochLine),
    Engine(EngineLine),
    Close(CloseLine),
    Session(SessionLine),
    Window(WindowLine),
    Step(StepLine),
    Settings(SettingsLine),
    Audit(AuditLine),
    Ticket(TicketLine),
    End(End),
}

/// The first line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    format: String,
    version: u32,
    schema: u32,
    pub(super) seq: u64,
    pub(super) epoch: u64,
    pub(super) counts: Counts,
}

/// How many rows of each kind follow.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    pub(super) starts: u64,
    pub(super) epochs: u64,
    pub(super) engines: u64,
    /// Copies of version 1 have neither these nor sessions.
    #[serde(default)]
    pub(super) closes: u64,
    #[serde(default)]
    pub(super) sessions: u64,
    /// Copies of versions 1 and 2 have neither these nor steps.
    #[serde(default)]
    pub(super) windows: u64,
    #[serde(default)]
    pub(super) steps: u64,
    /// Copies of versions 1 to 3 have none, and no settings.
    #[serde(default)]
    pub(super) audit: u64,
    pub(super) tickets: u64,
}

/// The last line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct End {
    /// Lines before this one.
    pub(super) lines: u64,
    /// CRC-32 (ISO-HDLC) of their bytes, line ends included, in hexadecimal.
    pub(super) crc32: String,
}

/// Looks at the first line before anything else is asked of it: a newer form may look otherwise.
pub(super) fn check_header(line: &[u8]) -> Result<(), CopyError> {
    #[derive(Deserialize)]
    struct Any {
        header: Named,
    }
    #[derive(Deserialize)]
    struct Named {
        format: String,
        version: u32,
        schema: u32,
    }
    let Ok(Any { header }) = serde_json::from_slice::<Any>(line) else {
        return Err(CopyError::Foreign);
    };
    if header.format != FORMAT {
        return Err(CopyError::Foreign);
    }
    let newer = |what, found, known| CopyError::Newer { what, found, known };
    if header.version > FORMAT_VERSION {
        return Err(newer("version", header.version, FORMAT_VERSION));
    }
    if header.schema > schema_known() {
        return Err(newer("schema", header.schema, schema_known()));
    }
    Ok(())
}

/// Facts of the store.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Meta {
    term: u64,
    seq: u64,
    now_ms: u64,
    next_issue: u64,
}

impl Meta {
    pub(super) const fn put_into(self, image: &mut Image) {
        image.term = self.term;
        image.seq = Seq(self.seq);
        image.now = Timestamp::from_millis(self.now_ms);
        image.next_issue = self.next_issue;
    }
}

/// Counters, in the order of their words.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TallyLine {
    scopes: Vec<ScopeLine>,
    leases_ended: Vec<u64>,
    granted_after_wait: u64,
    waited_ms: u64,
    local_bypasses: Vec<u64>,
    /// Copies of version 1 have neither these nor the next ones.
    #[serde(default)]
    closes: u64,
    #[serde(default)]
    close_failures: u64,
    #[serde(default)]
    close_deliveries: Vec<u64>,
    #[serde(default)]
    sessions_reopened: u64,
    /// Copies of versions 1 and 2 have neither this nor the next one.
    #[serde(default)]
    usage_rounds: u64,
    #[serde(default)]
    usage_sum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScopeLine {
    admit: u64,
    wait: Vec<u64>,
    bypass: Vec<u64>,
    cancelled: Vec<u64>,
}

impl TallyLine {
    fn of(tally: &Tally) -> Self {
        let scope = |scope: &ScopeTally| ScopeLine {
            admit: scope.admit,
            wait: scope.wait.to_vec(),
            bypass: scope.bypass.to_vec(),
            cancelled: scope.cancelled.to_vec(),
        };
        Self {
            scopes: tally.scopes.iter().map(scope).collect(),
            leases_ended: tally.leases_ended.to_vec(),
            granted_after_wait: tally.granted_after_wait,
            waited_ms: tally.waited_millis,
            local_bypasses: tally.local_bypasses.to_vec(),
            closes: tally.closes,
            close_failures: tally.close_failures,
            close_deliveries: tally.close_deliveries.to_vec(),
            sessions_reopened: tally.sessions_reopened,
            usage_rounds: tally.usage_rounds,
            usage_sum: tally.usage_sum,
        }
    }

    pub(super) fn decoded(&self) -> Result<Tally, RowFault> {
        let mut tally = Tally {
            leases_ended: counters(&self.leases_ended)?,
            granted_after_wait: self.granted_after_wait,
            waited_millis: self.waited_ms,
            local_bypasses: counters(&self.local_bypasses)?,
            closes: self.closes,
            close_failures: self.close_failures,
            close_deliveries: counters(&self.close_deliveries)?,
            sessions_reopened: self.sessions_reopened,
            usage_rounds: self.usage_rounds,
            usage_sum: self.usage_sum,
            ..Tally::default()
        };
        if self.scopes.len() > tally.scopes.len() {
            return Err(RowFault::Range("the number of scopes"));
        }
        for (scope, line) in tally.scopes.iter_mut().zip(&self.scopes) {
            *scope = ScopeTally {
                admit: line.admit,
                wait: counters(&line.wait)?,
                bypass: counters(&line.bypass)?,
                cancelled: counters(&line.cancelled)?,
            };
        }
        Ok(tally)
    }
}

/// A random number as text: readers of JSON round integers above 2^53.
fn hex(number: u64) -> String {
    format!("{number:016x}")
}

fn from_hex(text: &str) -> Result<u64, RowFault> {
    let number = u64::from_str_radix(text, 16).map_err(|_| RowFault::Range("a random number"))?;
    // One form only, so that a copy of the copy is the same.
    (hex(number) == text)
        .then_some(number)
        .ok_or(RowFault::Range("a random number"))
}

pub(super) fn tokens(count: u64) -> Result<Tokens, RowFault> {
    Tokens::new(count).ok_or(RowFault::Range("a number of tokens"))
}

pub(super) fn share(millionths: u32) -> Result<Ppm, RowFault> {
    Ppm::new(millionths).ok_or(RowFault::Range("a share"))
}

pub(super) fn lease_id(text: &str) -> Result<LeaseId, RowFault> {
    LeaseId::parse(text).ok_or(RowFault::Range("a lease id"))
}

/// A start of the writer.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StartLine {
    first_issue: u64,
    salt: String,
    at_ms: u64,
}

impl StartLine {
    pub(super) fn decoded(&self) -> Result<Start, RowFault> {
        Ok(Start {
            first_issue: Issue(self.first_issue),
            salt: from_hex(&self.salt)?,
            at: Timestamp::from_millis(self.at_ms),
        })
    }
}

/// A generation of the worker set.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EpochLine {
    epoch: u64,
    at_ms: u64,
    cause: CauseLine,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum CauseLine {
    First,
    MembersChanged { joined: u32, left: u32 },
    Restarted(String),
    WorkerIdChanged(String),
    Restored,
}

impl EpochLine {
    pub(super) fn decoded(self) -> EpochEntry {
        EpochEntry {
            epoch: Epoch(self.epoch),
            at: Timestamp::from_millis(self.at_ms),
            cause: match self.cause {
                CauseLine::First => EpochCause::First,
                CauseLine::MembersChanged { joined, left } => {
                    EpochCause::MembersChanged { joined, left }
                }
                CauseLine::Restarted(engine) => EpochCause::Restarted(EngineId::new(&engine)),
                CauseLine::WorkerIdChanged(engine) => {
                    EpochCause::WorkerIdChanged(EngineId::new(&engine))
                }
                CauseLine::Restored => EpochCause::Restored,
            },
        }
    }
}

/// A member as last known.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EngineLine {
    url: String,
    role: RoleLine,
    worker_ids: Vec<String>,
    seen_healthy: bool,
    capacity: Option<u64>,
    start_mark: Option<String>,
    joined: u64,
    /// Copies of version 1 have neither this nor the next one.
    #[serde(default)]
    close_refusals: u32,
    #[serde(default)]
    unsupported_at_ms: Option<u64>,
}

impl EngineLine {
    pub(super) fn decoded(self) -> Result<EngineRow, RowFault> {
        if !self.worker_ids.is_sorted_by(|one, next| one < next) {
            return Err(RowFault::Order("a worker id stands twice or out of order"));
        }
        Ok(EngineRow {
            id: EngineId::new(&self.url),
            role: self.role.into(),
            worker_ids: self
                .worker_ids
                .iter()
                .map(|id| Arc::from(id.as_str()))
                .collect::<BTreeSet<_>>(),
            seen_healthy: self.seen_healthy,
            capacity: self.capacity.map(tokens).transpose()?,
            start_mark: match self.start_mark {
                Some(mark) => Some(StartMark(from_hex(&mark)?)),
                None => None,
            },
            joined: Epoch(self.joined),
            close_refusals: self.close_refusals,
            unsupported_at: self.unsupported_at_ms.map(Timestamp::from_millis),
        })
    }
}

/// The same words on both sides.
macro_rules! mirror {
    ($line:ident is $core:ident { $($word:ident),* $(,)? }) => {
        #[derive(Clone, Copy, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(super) enum $line {
            $($word,)*
        }

        impl From<$core> for $line {
            fn from(core: $core) -> Self {
                match core {
                    $($core::$word => Self::$word,)*
                }
            }
        }

        impl From<$line> for $core {
            fn from(line: $line) -> Self {
                match line {
                    $($line::$word => Self::$word,)*
                }
            }
        }
    };
}
pub(super) use mirror;

mirror!(RoleLine is Role { Regular, Decode, Prefill, Other });
mirror!(ScopeWord is Scope { Train, Eval });
mirror!(ReasonLine is BypassReason {
    Disabled,
    OutOfScope,
    Protected,
    Degraded,
    Oversize,
    QueueFull,
    Aged,
});
mirror!(ModeLine is CloseMode { Join, Abort });
mirror!(CloseReasonLine is CloseReason { Terminal, Dropped, Idle });
mirror!(FailureLine is CallFailure { Timeout, Refused, TooLarge, NotAllowed });
mirror!(TargetStateLine is TargetState {
    Pending,
    Delivered,
    Refused,
    Unsupported,
    Restarted,
    Superseded,
    Failed,
    Gone,
});

/// A close intent and how far it has come.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CloseLine {
    id: String,
    session: String,
    mode: ModeLine,
    reason: Option<CloseReasonLine>,
    requested_at_ms: u64,
    stage: CloseStageLine,
    targets: Vec<TargetLine>,
    /// Ended engines of a finished one, in the order of their words.
    counts: Vec<u32>,
    timed_out: bool,
    failure_counted: bool,
    reopened: Option<ReopenedLine>,
    not_aborted: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum CloseStageLine {
    Joining { ready_since_ms: Option<u64> },
    Delivering { since_ms: u64, early: bool },
    Done { at_ms: u64 },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetLine {
    url: String,
    state: TargetStateLine,
    attempts: u32,
    last: Option<CallLine>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum CallLine {
    Status { code: u16, text: Option<String> },
    Failed(FailureLine),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReopenedLine {
    at_ms: u64,
    ticket: String,
}

impl CloseLine {
    pub(super) fn decoded(self) -> Result<CloseIntent, RowFault> {
        if !self.targets.is_sorted_by(|one, next| one.url < next.url) {
            return Err(RowFault::Order(
                "an engine of a close stands twice or out of order",
            ));
        }
        if !self.not_aborted.is_sorted_by(|one, next| one < next) {
            return Err(RowFault::Order(
                "a request of a close stands twice or out of order",
            ));
        }
        let reopened = match self.reopened {
            Some(reopened) => Some(Reopened {
                at: Timestamp::from_millis(reopened.at_ms),
                ticket: TicketId::new(&reopened.ticket)?,
            }),
            None => None,
        };
        let labels = self.not_aborted.iter().map(|label| Label::new(label));
        Ok(CloseIntent {
            id: CloseId::parse(&self.id).ok_or(RowFault::Range("a close id"))?,
            session: SessionId::new(&self.session)?,
            mode: self.mode.into(),
            reason: self.reason.map(CloseReason::from),
            requested_at: Timestamp::from_millis(self.requested_at_ms),
            stage: match self.stage {
                CloseStageLine::Joining { ready_since_ms } => CloseStage::Joining {
                    ready_since: ready_since_ms.map(Timestamp::from_millis),
                },
                CloseStageLine::Delivering { since_ms, early } => CloseStage::Delivering {
                    since: Timestamp::from_millis(since_ms),
                    early,
                },
                CloseStageLine::Done { at_ms } => CloseStage::Done {
                    at: Timestamp::from_millis(at_ms),
                },
            },
            targets: self
                .targets
                .into_iter()
                .map(|target| (EngineId::new(&target.url), target.decoded()))
                .collect(),
            counts: counters(&self.counts)?,
            timed_out: self.timed_out,
            failure_counted: self.failure_counted,
            reopened,
            not_aborted: labels.collect::<Result<BTreeSet<_>, _>>()?,
        })
    }
}

impl TargetLine {
    fn of(engine: &EngineId, target: &Target) -> Self {
        Self {
            url: engine.as_str().to_owned(),
            state: target.state.into(),
            attempts: target.attempts,
            last: target.last.as_ref().map(|last| match last {
                CallResult::Status { code, text } => CallLine::Status {
                    code: *code,
                    text: text.as_ref().map(|text| text.to_string()),
                },
                CallResult::Failed(failure) => CallLine::Failed((*failure).into()),
            }),
        }
    }

    fn decoded(self) -> Target {
        Target {
            state: self.state.into(),
            attempts: self.attempts,
            last: self.last.map(|last| match last {
                CallLine::Status { code, text } => CallResult::Status {
                    code,
                    text: text.map(Arc::from),
                },
                CallLine::Failed(failure) => CallResult::Failed(failure.into()),
            }),
        }
    }
}

/// The last use of a session.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SessionLine {
    id: String,
    used_at_ms: u64,
}

impl SessionLine {
    pub(super) fn decoded(&self) -> Result<(SessionId, Timestamp), RowFault> {
        let id = SessionId::new(&self.id)?;
        Ok((id, Timestamp::from_millis(self.used_at_ms)))
    }
}

/// The window of a run; without a run, the one of runs that are new.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WindowLine {
    run: Option<String>,
    from_ms: u64,
    usage_peak_ppm: Option<u32>,
    /// The counters at its beginning.
    base: TallyLine,
}

impl WindowLine {
    pub(super) fn decoded(&self) -> Result<(Option<RunId>, Window), RowFault> {
        let run = self.run.as_deref().map(RunId::new).transpose()?;
        let window = Window {
            from: Timestamp::from_millis(self.from_ms),
            base: Box::new(self.base.decoded()?),
            usage_peak: self.usage_peak_ppm.map(share).transpose()?,
        };
        Ok((run, window))
    }
}

/// A step report.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepLine {
    number: u64,
    run: String,
    step: u64,
    from_ms: u64,
    to_ms: u64,
    usage_peak_ppm: Option<u32>,
    standing: StandingLine,
    /// What was counted in its window.
    counts: TallyLine,
}

/// How the gate stood when a report was taken.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StandingLine {
    session_lifecycle: bool,
    waiting: u64,
    ceiling: u64,
    reserved: u64,
    leases: u64,
    epoch: u64,
    degraded: bool,
}

impl StepLine {
    pub(super) fn decoded(&self) -> Result<StepReport, RowFault> {
        let standing = &self.standing;
        Ok(StepReport {
            number: Some(StepNo(self.number)),
            run: RunId::new(&self.run)?,
            step: Some(self.step),
            from: Timestamp::from_millis(self.from_ms),
            to: Timestamp::from_millis(self.to_ms),
            counts: Box::new(self.counts.decoded()?),
            usage_peak: self.usage_peak_ppm.map(share).transpose()?,
            standing: Standing {
                session_lifecycle: standing.session_lifecycle,
                waiting: standing.waiting,
                ceiling: tokens(standing.ceiling)?,
                reserved: tokens(standing.reserved)?,
                leases: standing.leases,
                epoch: Epoch(standing.epoch),
                degraded: standing.degraded,
            },
        })
    }
}

/// A ticket and how far it has come.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TicketLine {
    row: u64,
    id: String,
    asked: Option<AskedLine>,
    stage: StageLine,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedLine {
    session: String,
    sent: SentLine,
    reservation: u64,
    scope: ScopeWord,
    ttl_ms: u64,
    client: Option<String>,
    request_id: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum SentLine {
    Parts { prompt: u64, max_new: u64 },
    Sum(u64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum StageLine {
    Waiting {
        since_ms: u64,
    },
    Held {
        lease: String,
        epoch: u64,
        granted_at_ms: u64,
        waited_ms: Option<u64>,
        ttl_ms: u64,
        ends_at_ms: u64,
        graced: bool,
    },
    Ended {
        at_ms: u64,
        how: HowLine,
        lease: Option<String>,
        since_ms: Option<u64>,
        waited_ms: u64,
        epoch: u64,
    },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HowLine {
    Released,
    Cancelled,
    SessionClosed,
    Expired,
    Revoked,
    Dropped,
    TakenBack,
    Bypassed(ReasonLine),
}

impl From<EndHow> for HowLine {
    fn from(how: EndHow) -> Self {
        match how {
            EndHow::Released => Self::Released,
            EndHow::Cancelled => Self::Cancelled,
            EndHow::SessionClosed => Self::SessionClosed,
            EndHow::Expired => Self::Expired,
            EndHow::Revoked => Self::Revoked,
            EndHow::Dropped => Self::Dropped,
            EndHow::TakenBack => Self::TakenBack,
            EndHow::Bypassed(reason) => Self::Bypassed(reason.into()),
        }
    }
}

impl From<HowLine> for EndHow {
    fn from(how: HowLine) -> Self {
        match how {
            HowLine::Released => Self::Released,
            HowLine::Cancelled => Self::Cancelled,
            HowLine::SessionClosed => Self::SessionClosed,
            HowLine::Expired => Self::Expired,
            HowLine::Revoked => Self::Revoked,
            HowLine::Dropped => Self::Dropped,
            HowLine::TakenBack => Self::TakenBack,
            HowLine::Bypassed(reason) => Self::Bypassed(reason.into()),
        }
    }
}

impl TicketLine {
    pub(super) fn decoded(self) -> Result<Ticket, RowFault> {
        Ok(Ticket {
            row: RowNo(self.row),
            id: TicketId::new(&self.id)?,
            asked: self.asked.map(AskedLine::decoded).transpose()?,
            stage: self.stage.decoded()?,
        })
    }
}

impl AskedLine {
    fn decoded(self) -> Result<Asked, RowFault> {
        let label = |text: Option<String>| text.map(|text| Label::new(&text)).transpose();
        Ok(Asked {
            session: SessionId::new(&self.session)?,
            sent: match self.sent {
                SentLine::Parts { prompt, max_new } => Sent::Parts {
                    prompt: tokens(prompt)?,
                    max_new: tokens(max_new)?,
                },
                SentLine::Sum(sum) => Sent::Sum(tokens(sum)?),
            },
            terms: Terms {
                reservation: tokens(self.reservation)?,
                scope: self.scope.into(),
                ttl: Span::from_millis(self.ttl_ms),
                client: label(self.client)?,
                request_id: label(self.request_id)?,
            },
        })
    }
}

impl StageLine {
    fn of(stage: &Stage) -> Self {
        match stage {
            Stage::Waiting { since } => Self::Waiting {
                since_ms: since.millis(),
            },
            Stage::Held(lease) => Self::Held {
                lease: lease.id.to_text(),
                epoch: lease.epoch.0,
                granted_at_ms: lease.granted_at.millis(),
                waited_ms: lease.waited.map(Span::millis),
                ttl_ms: lease.ttl.millis(),
                ends_at_ms: lease.ends_at.millis(),
                graced: lease.graced,
            },
            Stage::Ended(ended) => Self::Ended {
                at_ms: ended.at.millis(),
                how: ended.how.into(),
                lease: ended.lease.map(LeaseId::to_text),
                since_ms: ended.since.map(Timestamp::millis),
                waited_ms: ended.waited.millis(),
                epoch: ended.epoch.0,
            },
        }
    }

    fn decoded(self) -> Result<Stage, RowFault> {
        Ok(match self {
            Self::Waiting { since_ms } => Stage::Waiting {
                since: Timestamp::from_millis(since_ms),
            },
            Self::Held {
                lease,
                epoch,
                granted_at_ms,
                waited_ms,
                ttl_ms,
                ends_at_ms,
                graced,
            } => Stage::Held(Lease {
                id: lease_id(&lease)?,
                epoch: Epoch(epoch),
                granted_at: Timestamp::from_millis(granted_at_ms),
                waited: waited_ms.map(Span::from_millis),
                ttl: Span::from_millis(ttl_ms),
                ends_at: Timestamp::from_millis(ends_at_ms),
                graced,
            }),
            Self::Ended {
                at_ms,
                how,
                lease,
                since_ms,
                waited_ms,
                epoch,
            } => Stage::Ended(Ended {
                at: Timestamp::from_millis(at_ms),
                how: how.into(),
                lease: lease.as_deref().map(lease_id).transpose()?,
                since: since_ms.map(Timestamp::from_millis),
                waited: Span::from_millis(waited_ms),
                epoch: Epoch(epoch),
            }),
        })
    }
}

impl Line {
    pub(super) fn header(image: &Image, counts: Counts) -> Self {
        Self::Header(Header {
            format: FORMAT.to_owned(),
            version: FORMAT_VERSION,
            schema: schema_known(),
            seq: image.seq.0,
            epoch: epoch_of(image).0,
            counts,
        })
    }

    pub(super) const fn meta(image: &Image) -> Self {
        Self::Meta(Meta {
            term: image.term,
            seq: image.seq.0,
            now_ms: image.now.millis(),
            next_issue: image.next_issue,
        })
    }

    pub(super) fn tally(tally: &Tally) -> Self {
        Self::Tally(TallyLine::of(tally))
    }

    pub(super) fn start(start: &Start) -> Self {
        Self::Start(StartLine {
            first_issue: start.first_issue.0,
            salt: hex(start.salt),
            at_ms: start.at.millis(),
        })
    }

    pub(super) fn epoch(entry: &EpochEntry) -> Self {
        Self::Epoch(EpochLine {
            epoch: entry.epoch.0,
            at_ms: entry.at.millis(),
            cause: match &entry.cause {
                EpochCause::First => CauseLine::First,
                EpochCause::MembersChanged { joined, left } => CauseLine::MembersChanged {
                    joined: *joined,
                    left: *left,
                },
                EpochCause::Restarted(engine) => CauseLine::Restarted(engine.as_str().to_owned()),
                EpochCause::WorkerIdChanged(engine) => {
                    CauseLine::WorkerIdChanged(engine.as_str().to_owned())
                }
                EpochCause::Restored => CauseLine::Restored,
            },
        })
    }

    pub(super) fn engine(engine: &EngineRow) -> Self {
        Self::Engine(EngineLine {
            url: engine.id.as_str().to_owned(),
            role: engine.role.into(),
            worker_ids: engine.worker_ids.iter().map(|id| id.to_string()).collect(),
            seen_healthy: engine.seen_healthy,
            capacity: engine.capacity.map(Tokens::get),
            start_mark: engine.start_mark.map(|mark| hex(mark.0)),
            joined: engine.joined.0,
            close_refusals: engine.close_refusals,
            unsupported_at_ms: engine.unsupported_at.map(Timestamp::millis),
        })
    }

    pub(super) fn close(close: &CloseIntent) -> Self {
        Self::Close(CloseLine {
            id: close.id.to_text(),
            session: close.session.as_str().to_owned(),
            mode: close.mode.into(),
            reason: close.reason.map(CloseReasonLine::from),
            requested_at_ms: close.requested_at.millis(),
            stage: match close.stage {
                CloseStage::Joining { ready_since } => CloseStageLine::Joining {
                    ready_since_ms: ready_since.map(Timestamp::millis),
                },
                CloseStage::Delivering { since, early } => CloseStageLine::Delivering {
                    since_ms: since.millis(),
                    early,
                },
                CloseStage::Done { at } => CloseStageLine::Done { at_ms: at.millis() },
            },
            targets: close
                .targets
                .iter()
                .map(|(engine, target)| TargetLine::of(engine, target))
                .collect(),
            counts: close.counts.to_vec(),
            timed_out: close.timed_out,
            failure_counted: close.failure_counted,
            reopened: close.reopened.as_ref().map(|reopened| ReopenedLine {
                at_ms: reopened.at.millis(),
                ticket: reopened.ticket.as_str().to_owned(),
            }),
            not_aborted: close
                .not_aborted
                .iter()
                .map(|label| label.as_str().to_owned())
                .collect(),
        })
    }

    pub(super) fn session(session: &SessionId, used: Timestamp) -> Self {
        Self::Session(SessionLine {
            id: session.as_str().to_owned(),
            used_at_ms: used.millis(),
        })
    }

    pub(super) fn window(run: Option<&RunId>, window: &Window) -> Self {
        Self::Window(WindowLine {
            run: run.map(|run| run.as_str().to_owned()),
            from_ms: window.from.millis(),
            usage_peak_ppm: window.usage_peak.map(Ppm::get),
            base: TallyLine::of(&window.base),
        })
    }

    /// A report that is kept has a number and a step.
    pub(super) fn step(report: &StepReport) -> Self {
        let standing = &report.standing;
        Self::Step(StepLine {
            number: report.number.map_or(0, |number| number.0),
            run: report.run.as_str().to_owned(),
            step: report.step.unwrap_or(0),
            from_ms: report.from.millis(),
            to_ms: report.to.millis(),
            usage_peak_ppm: report.usage_peak.map(Ppm::get),
            standing: StandingLine {
                session_lifecycle: standing.session_lifecycle,
                waiting: standing.waiting,
                ceiling: standing.ceiling.get(),
                reserved: standing.reserved.get(),
                leases: standing.leases,
                epoch: standing.epoch.0,
                degraded: standing.degraded,
            },
            counts: TallyLine::of(&report.counts),
        })
    }

    pub(super) fn settings(overrides: &Overrides) -> Self {
        Self::Settings(SettingsLine::of(overrides))
    }

    pub(super) fn audit(entry: &AuditEntry) -> Self {
        Self::Audit(AuditLine::of(entry))
    }

    pub(super) fn ticket(ticket: &Ticket) -> Self {
        let label = |label: &Option<Label>| label.as_ref().map(|label| label.as_str().to_owned());
        Self::Ticket(TicketLine {
            row: ticket.row.0,
            id: ticket.id.as_str().to_owned(),
            asked: ticket.asked.as_ref().map(|asked| AskedLine {
                session: asked.session.as_str().to_owned(),
                sent: match asked.sent {
                    Sent::Parts { prompt, max_new } => SentLine::Parts {
                        prompt: prompt.get(),
                        max_new: max_new.get(),
                    },
                    Sent::Sum(sum) => SentLine::Sum(sum.get()),
                },
                reservation: asked.terms.reservation.get(),
                scope: asked.terms.scope.into(),
                ttl_ms: asked.terms.ttl.millis(),
                client: label(&asked.terms.client),
                request_id: label(&asked.terms.request_id),
            }),
            stage: StageLine::of(&ticket.stage),
        })
    }

    pub(super) fn end(lines: u64, sum: u32) -> Self {
        Self::End(End {
            lines,
            crc32: format!("{sum:08x}"),
        })
    }
}
