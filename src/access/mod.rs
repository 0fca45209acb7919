//! Who asks, and what they may do.

use std::sync::Arc;

/// What a caller may do; each includes the one before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Right {
    /// Read everything but a backup.
    View,
    /// Also leases, tickets, waits, batches, closes with their retry, and steps.
    Client,
    /// Everything: settings, revocations and backups among it.
    Admin,
}

/// Who asks. The front puts it beside every request; handlers and pages take it from there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// Name of the token, or [`Caller::LOCAL`] where no tokens are on. It stands in the audit.
    pub name: Arc<str>,
    /// What it may do.
    pub right: Right,
}

impl Caller {
    /// The name of everybody while no tokens are on.
    pub const LOCAL: &'static str = "local";

    /// Everybody while no tokens are on.
    #[must_use]
    pub fn local() -> Self {
        Self {
            name: Self::LOCAL.into(),
            right: Right::Admin,
        }
    }

    /// Whether it may do what needs this right.
    #[must_use]
    pub fn may(&self, needed: Right) -> bool {
        self.right >= needed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_right_includes_the_one_before() {
        let caller = Caller {
            name: "rollout".into(),
            right: Right::Client,
        };
        assert!(caller.may(Right::View));
        assert!(caller.may(Right::Client));
        assert!(!caller.may(Right::Admin));
        assert!(Caller::local().may(Right::Admin));
    }
}
