//! The closed sets of words that stand in requests and answers.

use serde::{Deserialize, Serialize};

macro_rules! words {
    ($($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }
    )+};
}

words! {
    /// What kind of work asks.
    #[derive(Default)]
    Scope {
        /// A training request.
        #[default]
        Train,
        /// An evaluation request.
        Eval,
    }
    /// What was decided about a request, or that its lease ended.
    DecisionAction {
        /// A lease was granted.
        Admit,
        /// It was put in line.
        Wait,
        /// It goes ahead without a lease.
        Bypass,
        /// It was withdrawn, or its grant was taken back.
        Cancelled,
        /// Its lease ended, after it was claimed.
        Ended,
    }
    /// Why a request was admitted.
    AdmitReason {
        /// It fits under the ceiling.
        CapacityAvailable,
    }
    /// Why a request goes ahead without a lease.
    BypassReason {
        /// Admission is off or paused.
        Disabled,
        /// Admission does not apply to this scope.
        OutOfScope,
        /// The caller marked the work as protected.
        Protected,
        /// Capacity signals are missing or stale.
        Degraded,
        /// Larger than the full ceiling.
        Oversize,
        /// The queue is at its bound.
        QueueFull,
        /// The maximum wait is over.
        Aged,
        /// The store cannot promise durability now.
        StoreUnavailable,
    }
    /// Why a request must not start.
    CancelReason {
        /// It was cancelled while its call was open.
        Cancelled,
        /// Its session was closed while it waited.
        SessionClosed,
        /// The ticket was released or cancelled before.
        TicketFinished,
    }
    /// Why a request waits.
    WaitReason {
        /// An older waiter exists.
        BehindOlder,
        /// The worst engine is at its threshold, or admission is paced after it was.
        PressureGuard,
        /// It does not fit under the ceiling now.
        CapacityExhausted,
    }
    /// How a ticket ended that would be decided afresh.
    EndReason {
        /// Its lease reached its end.
        Expired,
        /// Its lease was revoked by an operator.
        Revoked,
        /// Its caller stayed away from the queue.
        Dropped,
        /// Its grant was not claimed.
        TakenBack,
    }
    /// What a release did.
    ReleaseOutcome {
        /// The lease ended now.
        Released,
        /// It was given back before.
        AlreadyReleased,
    }
    /// What a revocation did.
    RevokeOutcome {
        /// The lease ended now.
        Revoked,
    }
    /// Which requests admission applies to.
    AdmissionScope {
        /// Training requests only.
        Train,
        /// Training and evaluation requests.
        All,
    }
    /// No bound.
    NoCap {
        /// No bound.
        None,
    }
    /// Who set a setting.
    SettingOrigin {
        /// Nobody.
        Default,
        /// The configuration file.
        File,
        /// An environment variable.
        Env,
        /// The command line.
        Flag,
        /// An operator, while the gate ran.
        RunTime,
    }
    /// What an operator did.
    AuditAction {
        /// Settings were changed.
        SettingsChanged,
        /// A start returned all settings to what is configured.
        SettingsReset,
        /// A lease was revoked.
        LeaseRevoked,
        /// A ticket was cancelled.
        TicketCancelled,
        /// A session was closed.
        SessionClosed,
        /// A close was sent once more.
        CloseRetried,
    }
    /// What a cancel met.
    CancelOutcome {
        /// The ticket waited.
        Withdrawn,
        /// It held a lease.
        Released,
        /// It was bypassed.
        Bypassed,
        /// It had ended by itself or was finished before.
        AlreadyFinished,
        /// It was never seen; a later acquire gets `cancelled`.
        Unknown,
    }
    /// How a close treats work that still runs.
    #[derive(Default)]
    CloseMode {
        /// Wait until every lease of the session has ended.
        #[default]
        Join,
        /// Abort the engine requests of its leases first, then join.
        Abort,
    }
    /// What a caller says of the end of a session.
    EndedAs {
        /// The program came to its end.
        Terminal,
        /// The program was given up.
        Dropped,
    }
    /// Why a session was closed.
    CloseReason {
        /// The program came to its end.
        Terminal,
        /// The program was given up.
        Dropped,
        /// It was idle for longer than the operator's limit.
        Idle,
    }
    /// How far a close has come.
    CloseState {
        /// It waits for the last lease of the session, or for a first engine.
        Joining,
        /// It goes out to the engines.
        Delivering,
        /// No engine is pending.
        Done,
    }
    /// Where one engine of a close stands. All but the first are final.
    CloseEngineState {
        /// Not settled yet.
        Pending,
        /// The engine took it; that says nothing of freed tokens.
        Delivered,
        /// The engine refused it for good.
        Refused,
        /// The engine has no session close.
        Unsupported,
        /// The engine started anew: the KV went with its former life.
        Restarted,
        /// The session was used anew before.
        Superseded,
        /// Attempts or time used up.
        Failed,
        /// The same of an engine that left the fleet.
        Gone,
    }
    /// What a close does while the lifecycle feature is off.
    CloseOff {
        /// Nothing is kept and nothing is sent.
        Disabled,
    }
    /// How serious a notice is.
    Severity {
        /// Good to know.
        Info,
        /// Should be looked at.
        Warning,
        /// Needs action.
        Error,
    }
    /// What the store is doing.
    StoreState {
        /// Durable.
        Ok,
        /// Being opened.
        Recovering,
        /// Failed; it is being opened again.
        Unavailable,
        /// Nearly out of space.
        LowSpace,
    }
    /// What an engine is for.
    EngineRole {
        /// Prefill and decode in one.
        Regular,
        /// The decode half of a disaggregated fleet.
        Decode,
        /// The prefill half.
        Prefill,
        /// Another kind, without a pool that counts.
        Other,
    }
    /// What software an engine runs.
    EngineKind {
        /// SGLang.
        Sglang,
        /// vLLM.
        Vllm,
    }
    /// Where the numbers of a reading come from.
    ReadingSource {
        /// `GET /v1/loads?include=core`.
        Loads,
        /// `GET /metrics`.
        Metrics,
    }
    /// What began an epoch.
    EpochCause {
        /// The first worker set.
        First,
        /// Engines joined or left.
        MembersChanged,
        /// An engine is a new incarnation.
        Restarted,
        /// The router gave an engine another id.
        WorkerIdChanged,
        /// The store was made from a backup.
        Restored,
    }
}
