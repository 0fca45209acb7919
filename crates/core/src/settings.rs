//! Settings that an operator may change while the gate runs: what is configured, what was set over it,
//! and what is in force (SET1, SET2).

use alloc::vec::Vec;

use crate::policy::{AdmissionScope, Policy, PolicyError};
use crate::units::{Ppm, Span, Timestamp, Tokens};

/// What becomes of one setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Change<T> {
    /// It stays as it is.
    #[default]
    Keep,
    /// It is as configured again.
    Configured,
    /// It has this value from now on, whatever is configured.
    Value(T),
}

/// A value of any of these settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SettingValue {
    /// On or off.
    Switch(bool),
    /// A share of something.
    Share(Ppm),
    /// A number of tokens; `None` for no bound.
    Cap(Option<Tokens>),
    /// A time.
    Time(Span),
    /// Which requests.
    Scope(AdmissionScope),
}

macro_rules! value_of {
    ($($kind:ty => $variant:ident),* $(,)?) => {$(
        impl From<$kind> for SettingValue {
            fn from(value: $kind) -> Self {
                Self::$variant(value)
            }
        }
    )*};
}
value_of!(
    bool => Switch,
    Ppm => Share,
    Option<Tokens> => Cap,
    Span => Time,
    AdmissionScope => Scope,
);

/// One list of the settings makes the three types that hold one entry for each.
macro_rules! run_time_settings {
    ($($(#[$doc:meta])* $name:ident: $kind:ty, $setting:ident;)*) => {
        /// Names of the settings that can be changed while the gate runs.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Setting {
            $($(#[$doc])* $setting,)*
        }

        impl Setting {
            /// All, in the order in which they are shown.
            pub const ALL: &'static [Self] = &[$(Self::$setting,)*];

            /// Its value in a policy.
            #[must_use]
            pub fn value(self, policy: &Policy) -> SettingValue {
                match self {
                    $(Self::$setting => policy.$name.into(),)*
                }
            }
        }

        /// What was set at run time; `None` is as configured. This is what is kept.
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct Overrides {
            $($(#[$doc])* pub $name: Option<$kind>,)*
            /// When any of them was changed last; `None` when none ever was.
            pub changed_at: Option<Timestamp>,
        }

        /// A wish for other settings.
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct SettingsChange {
            $($(#[$doc])* pub $name: Change<$kind>,)*
        }

        impl Overrides {
            /// Whether a setting was set at run time.
            #[must_use]
            pub const fn has(&self, setting: Setting) -> bool {
                match setting {
                    $(Setting::$setting => self.$name.is_some(),)*
                }
            }

            fn over(&self, configured: &Policy) -> Policy {
                let mut policy = configured.clone();
                $(
                    if let Some(value) = self.$name {
                        policy.$name = value;
                    }
                )*
                policy
            }

            fn with(&self, change: &SettingsChange) -> Self {
                Self {
                    $(
                        $name: match change.$name {
                            Change::Keep => self.$name,
                            Change::Configured => None,
                            Change::Value(value) => Some(value),
                        },
                    )*
                    changed_at: self.changed_at,
                }
            }
        }

        impl SettingsChange {
            /// Everything as configured again.
            #[must_use]
            pub const fn reset() -> Self {
                Self {
                    $($name: Change::Configured,)*
                }
            }
        }
    };
}

run_time_settings! {
    /// Program-aware admission on.
    program_admission: bool, ProgramAdmission;
    /// Session closes on.
    session_lifecycle: bool, SessionLifecycle;
    /// Admission held off for a while by the operator.
    paused: bool, Paused;
    /// Share of the fleet's capacity that may be reserved.
    headroom: Ppm, Headroom;
    /// Worst engine usage at which new requests wait.
    pressure_threshold: Ppm, PressureThreshold;
    /// Upper bound on the completion part of a reservation; `None` for no bound.
    expected_decode_cap: Option<Tokens>, ExpectedDecodeCap;
    /// Longest wait before the aging bypass.
    max_wait: Span, MaxWait;
    /// Which requests admission applies to.
    scope: AdmissionScope, Scope;
}

/// One setting that moved, as the audit keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Which.
    pub setting: Setting,
    /// What was in force before.
    pub from: SettingValue,
    /// What is in force now. It may be the same value: what is set stays, whatever is configured.
    pub to: SettingValue,
    /// Whether it is set at run time now; otherwise it is as configured again.
    pub is_set: bool,
}

/// A setting whose configured value is not in force.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hidden {
    /// Which.
    pub setting: Setting,
    /// What is configured.
    pub configured: SettingValue,
    /// What is in force.
    pub in_force: SettingValue,
}

/// What is configured, and what was set over it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Flags, environment, file and defaults.
    pub configured: Policy,
    /// Set at run time.
    pub overrides: Overrides,
}

impl Settings {
    /// What is in force.
    #[must_use]
    pub fn effective(&self) -> Policy {
        self.overrides.over(&self.configured)
    }

    /// The same, all values checked together.
    ///
    /// # Errors
    /// The first constraint that does not hold.
    pub fn validated(&self) -> Result<Policy, PolicyError> {
        self.effective().validated()
    }

    /// The settings after a change, all values checked together.
    ///
    /// # Errors
    /// The first constraint that would not hold.
    pub fn changed(&self, change: &SettingsChange) -> Result<Self, PolicyError> {
        let changed = Self {
            configured: self.configured.clone(),
            overrides: self.overrides.with(change),
        };
        changed.validated()?;
        Ok(changed)
    }

    /// What a change to `overrides` moves, in the order in which settings are shown.
    #[must_use]
    pub fn moves(&self, overrides: &Overrides) -> Vec<Moved> {
        let before = self.effective();
        let after = overrides.over(&self.configured);
        let moved = |&setting: &Setting| {
            let (from, to) = (setting.value(&before), setting.value(&after));
            let is_set = overrides.has(setting);
            (from != to || is_set != self.overrides.has(setting)).then_some(Moved {
                setting,
                from,
                to,
                is_set,
            })
        };
        Setting::ALL.iter().filter_map(moved).collect()
    }

    /// Settings whose configured value is hidden by another one.
    #[must_use]
    pub fn hidden(&self) -> Vec<Hidden> {
        let effective = self.effective();
        let hidden = |&setting: &Setting| {
            let configured = setting.value(&self.configured);
            let in_force = setting.value(&effective);
            (configured != in_force).then_some(Hidden {
                setting,
                configured,
                in_force,
            })
        };
        Setting::ALL.iter().filter_map(hidden).collect()
    }
}
