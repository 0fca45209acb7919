//! The wire types of kvgate's HTTP API: requests, answers and problem codes.
//!
//! The same types serve both ends. Requests refuse unknown fields, so that a typo is never silently
//! ignored; answers may grow, so readers of answers take what they know. Tokens are integers, times
//! are RFC 3339 in UTC with milliseconds, durations are seconds in fields named `*_s`.
//!
//! With the feature `openapi` every type also describes itself for the OpenAPI document.

mod answer;
mod batch;
mod lease;
mod problem;
mod report;
mod request;
mod session;
mod settings;
mod status;
mod words;

pub use answer::{
    AcquireAnswer, Admit, Bypass, Cancelled, Ended, TicketAnswer, UnknownTicket, Wait, WaitResult,
    WaitResults,
};
pub use batch::{BatchOperation, BatchRequest, BatchResult, BatchResults};
pub use lease::{CancelResult, Lease, Listing, ReleaseResult, RevokeResult, Waiter};
pub use problem::{FieldFault, PROBLEM_JSON, Problem, ProblemCode};
pub use report::{Decision, Decisions, History, SeriesPoints, StepReport, StepRequest};
pub use request::{
    AcquireRequest, CancelOperation, CloseOperation, CloseRequest, ReleaseOperation,
    ReleaseRequest, RenewOperation, RenewRequest, WaitRequest,
};
pub use session::{Close, CloseAnswer, CloseDisabled, CloseEngine, Session};
pub use settings::{AuditEntry, Change, DecodeCap, Setting, Settings, SettingsChange};
pub use status::{
    BadRouterEntry, Budget, Closes, Engine, Engines, EpochChange, Features, Health, Leases, Notice,
    Pressure, Queue, Router, State, StoreFigures, Version,
};
pub use words::{
    AdmissionScope, AdmitReason, AuditAction, BypassReason, CancelOutcome, CancelReason,
    CloseEngineState, CloseMode, CloseOff, CloseReason, CloseState, DecisionAction, EndReason,
    EndedAs, EngineKind, EngineRole, EpochCause, NoCap, ReadingSource, ReleaseOutcome,
    RevokeOutcome, Scope, SettingOrigin, Severity, StoreState, WaitReason,
};
