//! Lines about what operators did: settings that were set at run time, and the audit.

use kvgate_core::audit::{AuditAct, AuditEntry};
use kvgate_core::effect::CancelOutcome;
use kvgate_core::ids::{AuditNo, CloseId, Label, SessionId, TicketId};
use kvgate_core::policy::AdmissionScope;
use kvgate_core::settings::{Moved, Overrides, Setting, SettingValue};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use serde::{Deserialize, Serialize};

use super::RowFault;
use super::shapes::{ModeLine, lease_id, mirror, share, tokens};

mirror!(AdmissionScopeLine is AdmissionScope { Train, All });
mirror!(SettingLine is Setting {
    ProgramAdmission,
    SessionLifecycle,
    Paused,
    Headroom,
    PressureThreshold,
    ExpectedDecodeCap,
    MaxWait,
    Scope,
});
mirror!(CancelLine is CancelOutcome {
    Withdrawn,
    Released,
    Bypassed,
    AlreadyFinished,
    Unknown,
});

/// A bound on tokens, or none: in JSON, an absent value says already that it is as configured.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum CapLine {
    None,
    Tokens(u64),
}

impl CapLine {
    fn of(cap: Option<Tokens>) -> Self {
        cap.map_or(Self::None, |cap| Self::Tokens(cap.get()))
    }

    fn decoded(self) -> Result<Option<Tokens>, RowFault> {
        match self {
            Self::None => Ok(None),
            Self::Tokens(cap) => tokens(cap).map(Some),
        }
    }
}

/// What was set at run time; null is as configured.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SettingsLine {
    program_admission: Option<bool>,
    session_lifecycle: Option<bool>,
    paused: Option<bool>,
    headroom_ppm: Option<u32>,
    pressure_threshold_ppm: Option<u32>,
    expected_decode_cap: Option<CapLine>,
    max_wait_ms: Option<u64>,
    scope: Option<AdmissionScopeLine>,
    changed_at_ms: Option<u64>,
}

impl SettingsLine {
    pub(super) fn of(overrides: &Overrides) -> Self {
        Self {
            program_admission: overrides.program_admission,
            session_lifecycle: overrides.session_lifecycle,
            paused: overrides.paused,
            headroom_ppm: overrides.headroom.map(Ppm::get),
            pressure_threshold_ppm: overrides.pressure_threshold.map(Ppm::get),
            expected_decode_cap: overrides.expected_decode_cap.map(CapLine::of),
            max_wait_ms: overrides.max_wait.map(Span::millis),
            scope: overrides.scope.map(AdmissionScopeLine::from),
            changed_at_ms: overrides.changed_at.map(Timestamp::millis),
        }
    }

    pub(super) fn decoded(&self) -> Result<Overrides, RowFault> {
        let cap = self.expected_decode_cap.map(CapLine::decoded);
        Ok(Overrides {
            program_admission: self.program_admission,
            session_lifecycle: self.session_lifecycle,
            paused: self.paused,
            headroom: self.headroom_ppm.map(share).transpose()?,
            pressure_threshold: self.pressure_threshold_ppm.map(share).transpose()?,
            expected_decode_cap: cap.transpose()?,
            max_wait: self.max_wait_ms.map(Span::from_millis),
            scope: self.scope.map(AdmissionScope::from),
            changed_at: self.changed_at_ms.map(Timestamp::from_millis),
        })
    }
}

/// What an operator did.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AuditLine {
    number: u64,
    at_ms: u64,
    who: String,
    act: ActLine,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum ActLine {
    SettingsChanged(Vec<MovedLine>),
    SettingsReset(Vec<MovedLine>),
    LeaseRevoked {
        lease: String,
        ticket: String,
        session: Option<String>,
        tokens: u64,
    },
    TicketCancelled {
        ticket: String,
        session: Option<String>,
        tokens: u64,
        outcome: CancelLine,
    },
    SessionClosed {
        session: String,
        close: String,
        mode: ModeLine,
    },
    CloseRetried {
        close: String,
        session: String,
        engines: u64,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MovedLine {
    setting: SettingLine,
    from: ValueLine,
    to: ValueLine,
    is_set: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ValueLine {
    Switch(bool),
    SharePpm(u32),
    Cap(CapLine),
    TimeMs(u64),
    Scope(AdmissionScopeLine),
}

impl AuditLine {
    pub(super) fn of(entry: &AuditEntry) -> Self {
        Self {
            number: entry.no.0,
            at_ms: entry.at.millis(),
            who: entry.who.as_str().to_owned(),
            act: ActLine::of(&entry.act),
        }
    }

    pub(super) fn decoded(&self) -> Result<AuditEntry, RowFault> {
        Ok(AuditEntry {
            no: AuditNo(self.number),
            at: Timestamp::from_millis(self.at_ms),
            who: Label::new(&self.who)?,
            act: self.act.decoded()?,
        })
    }
}

impl ActLine {
    fn of(act: &AuditAct) -> Self {
        let text = |session: &Option<SessionId>| {
            session.as_ref().map(|session| session.as_str().to_owned())
        };
        match act {
            AuditAct::SettingsChanged(moves) => Self::SettingsChanged(moved(moves)),
            AuditAct::SettingsReset(moves) => Self::SettingsReset(moved(moves)),
            AuditAct::LeaseRevoked {
                lease,
                ticket,
                session,
                tokens,
            } => Self::LeaseRevoked {
                lease: lease.to_text(),
                ticket: ticket.as_str().to_owned(),
                session: text(session),
                tokens: tokens.get(),
            },
            AuditAct::TicketCancelled {
                ticket,
                session,
                tokens,
                outcome,
            } => Self::TicketCancelled {
                ticket: ticket.as_str().to_owned(),
                session: text(session),
                tokens: tokens.get(),
                outcome: (*outcome).into(),
            },
            AuditAct::SessionClosed {
                session,
                close,
                mode,
            } => Self::SessionClosed {
                session: session.as_str().to_owned(),
                close: close.to_text(),
                mode: (*mode).into(),
            },
            AuditAct::CloseRetried {
                close,
                session,
                engines,
            } => Self::CloseRetried {
                close: close.to_text(),
                session: session.as_str().to_owned(),
                engines: *engines,
            },
        }
    }

    fn decoded(&self) -> Result<AuditAct, RowFault> {
        let session_of = |session: &Option<String>| session.as_deref().map(SessionId::new);
        Ok(match self {
            Self::SettingsChanged(moves) => AuditAct::SettingsChanged(decoded_moves(moves)?),
            Self::SettingsReset(moves) => AuditAct::SettingsReset(decoded_moves(moves)?),
            Self::LeaseRevoked {
                lease,
                ticket,
                session,
                tokens: reserved,
            } => AuditAct::LeaseRevoked {
                lease: lease_id(lease)?,
                ticket: TicketId::new(ticket)?,
                session: session_of(session).transpose()?,
                tokens: tokens(*reserved)?,
            },
            Self::TicketCancelled {
                ticket,
                session,
                tokens: asked,
                outcome,
            } => AuditAct::TicketCancelled {
                ticket: TicketId::new(ticket)?,
                session: session_of(session).transpose()?,
                tokens: tokens(*asked)?,
                outcome: (*outcome).into(),
            },
            Self::SessionClosed {
                session,
                close,
                mode,
            } => AuditAct::SessionClosed {
                session: SessionId::new(session)?,
                close: close_id(close)?,
                mode: (*mode).into(),
            },
            Self::CloseRetried {
                close,
                session,
                engines,
            } => AuditAct::CloseRetried {
                close: close_id(close)?,
                session: SessionId::new(session)?,
                engines: *engines,
            },
        })
    }
}

fn close_id(text: &str) -> Result<CloseId, RowFault> {
    CloseId::parse(text).ok_or(RowFault::Range("a close id"))
}

fn moved(moves: &[Moved]) -> Vec<MovedLine> {
    let line = |moved: &Moved| MovedLine {
        setting: moved.setting.into(),
        from: ValueLine::of(moved.from),
        to: ValueLine::of(moved.to),
        is_set: moved.is_set,
    };
    moves.iter().map(line).collect()
}

fn decoded_moves(lines: &[MovedLine]) -> Result<Vec<Moved>, RowFault> {
    let moved = |line: &MovedLine| {
        Ok(Moved {
            setting: line.setting.into(),
            from: line.from.decoded()?,
            to: line.to.decoded()?,
            is_set: line.is_set,
        })
    };
    lines.iter().map(moved).collect()
}

impl ValueLine {
    fn of(value: SettingValue) -> Self {
        match value {
            SettingValue::Switch(on) => Self::Switch(on),
            SettingValue::Share(share) => Self::SharePpm(share.get()),
            SettingValue::Cap(cap) => Self::Cap(CapLine::of(cap)),
            SettingValue::Time(time) => Self::TimeMs(time.millis()),
            SettingValue::Scope(scope) => Self::Scope(scope.into()),
        }
    }

    fn decoded(&self) -> Result<SettingValue, RowFault> {
        Ok(match self {
            Self::Switch(on) => SettingValue::Switch(*on),
            Self::SharePpm(millionths) => SettingValue::Share(share(*millionths)?),
            Self::Cap(cap) => SettingValue::Cap(cap.decoded()?),
            Self::TimeMs(millis) => SettingValue::Time(Span::from_millis(*millis)),
            Self::Scope(scope) => SettingValue::Scope((*scope).into()),
        })
    }
}
