//! Settings that change while the gate runs, and the audit.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::words::{AdmissionScope, AuditAction, NoCap, SettingOrigin};

/// `PATCH /v1/settings`: fields that are left out stay as they are, null returns one to its configured
/// value.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SettingsChange {
    /// Program-aware admission on.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>))]
    pub program_admission: Change<bool>,
    /// Session closes on.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>))]
    pub session_lifecycle: Change<bool>,
    /// Everything bypasses for a while.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>))]
    pub paused: Change<bool>,
    /// Share of the fleet's capacity that may be reserved, above 0 and at most 1.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>, exclusive_minimum = 0, maximum = 1))]
    pub headroom: Change<f64>,
    /// Worst engine usage at which new requests wait, above 0 and at most 1.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>, exclusive_minimum = 0, maximum = 1))]
    pub pressure_threshold: Change<f64>,
    /// Upper bound on the completion part of a reservation, in tokens above 0, or `none`.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<DecodeCap>))]
    pub expected_decode_cap: Change<DecodeCap>,
    /// Longest wait before the aging bypass, in seconds; with 0 nothing queues.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>, minimum = 0))]
    pub max_wait_s: Change<f64>,
    /// Which requests admission applies to.
    #[serde(skip_serializing_if = "Change::is_keep")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<AdmissionScope>))]
    pub scope: Change<AdmissionScope>,
}

/// What becomes of one setting: absent, null, or a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Change<T> {
    /// It stays as it is.
    #[default]
    Keep,
    /// It is as configured again.
    Configured,
    /// It has this value.
    Value(T),
}

impl<T> Change<T> {
    const fn is_keep(&self) -> bool {
        matches!(self, Self::Keep)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Change<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Option::deserialize(deserializer)?;
        Ok(value.map_or(Self::Configured, Self::Value))
    }
}

impl<T: Serialize> Serialize for Change<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            // One that stays is left out by whoever holds it.
            Self::Keep | Self::Configured => serializer.serialize_none(),
            Self::Value(value) => value.serialize(serializer),
        }
    }
}

/// A bound on the completion part of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "must be an integer of tokens, or \"none\"")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum DecodeCap {
    /// So many tokens.
    Tokens(u64),
    /// No bound.
    None(NoCap),
}

/// `GET /v1/settings`, and to a change: every setting that can be changed while the gate runs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Settings {
    /// Program-aware admission on.
    pub program_admission: Setting<bool>,
    /// Session closes on.
    pub session_lifecycle: Setting<bool>,
    /// Everything bypasses for a while.
    pub paused: Setting<bool>,
    /// Share of the fleet's capacity that may be reserved.
    pub headroom: Setting<f64>,
    /// Worst engine usage at which new requests wait.
    pub pressure_threshold: Setting<f64>,
    /// Upper bound on the completion part of a reservation, in tokens, or `none`.
    pub expected_decode_cap: Setting<DecodeCap>,
    /// Longest wait before the aging bypass, in seconds.
    pub max_wait_s: Setting<f64>,
    /// Which requests admission applies to.
    pub scope: Setting<AdmissionScope>,
}

/// One setting.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Setting<T> {
    /// What is in force.
    pub value: T,
    /// Who set it.
    pub origin: SettingOrigin,
}

/// One thing that an operator did (`GET /v1/audit`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AuditEntry {
    /// When.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub at: String,
    /// Who did it: the name of a token, `local` where no tokens are on, or `kvgate` for a start.
    pub who: String,
    /// What it was.
    pub action: AuditAction,
    /// The same for people, with its figures.
    pub detail: String,
}
