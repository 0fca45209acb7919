//! Settings and audit in the book of the judge (SET2, SET3), written from what the store kept.
//!
//! | id | what holds |
//! |---|---|
//! | I17 | settings and audit are those of the last kept commit, and each act is kept with its entry |

use std::collections::BTreeMap;

use kvgate_core::audit::{AuditAct, AuditEntry};
use kvgate_core::decision::EndHow;
use kvgate_core::ids::AuditNo;
use kvgate_core::machine::Kept;
use kvgate_core::record::Record;
use kvgate_core::settings::Overrides;
use kvgate_core::ticket::Stage;

use crate::audit::{Held, broken};

/// What was set, and what operators did, as it was kept.
#[derive(Debug, Default)]
pub(crate) struct Operators {
    overrides: Overrides,
    audit: BTreeMap<AuditNo, AuditEntry>,
    last: u64,
    /// Acts of this commit less their entries: settings, and revocations.
    unnamed: (i64, i64),
}

impl Operators {
    /// One kept record; others are of no interest here.
    pub(crate) fn kept(&mut self, record: &Record) -> Held {
        match record {
            Record::Settings(overrides) => {
                self.overrides = (**overrides).clone();
                self.unnamed.0 += 1;
            }
            Record::Ticket(ticket) => {
                let revoked =
                    matches!(&ticket.stage, Stage::Ended(ended) if ended.how == EndHow::Revoked);
                self.unnamed.1 += i64::from(revoked);
            }
            Record::Audit(entry) => return self.entry(entry),
            Record::AuditForgotten(no) => {
                self.audit.remove(no);
            }
            _ => {}
        }
        Ok(())
    }

    fn entry(&mut self, entry: &AuditEntry) -> Held {
        if entry.no.0 != self.last + 1 {
            return broken("I17", format!("{entry:?} after {}", self.last));
        }
        self.last = entry.no.0;
        match entry.act {
            AuditAct::SettingsChanged(_) | AuditAct::SettingsReset(_) => self.unnamed.0 -= 1,
            AuditAct::LeaseRevoked { .. } => self.unnamed.1 -= 1,
            _ => {}
        }
        self.audit.insert(entry.no, entry.clone());
        Ok(())
    }

    /// After a whole commit.
    pub(crate) fn whole(&self) -> Held {
        if self.unnamed == (0, 0) {
            Ok(())
        } else {
            broken("I17", format!("acts without entries: {:?}", self.unnamed))
        }
    }

    /// A machine that took over.
    pub(crate) fn same(&self, kept: &Kept) -> Held {
        if kept.overrides != self.overrides {
            return broken(
                "I17",
                format!(
                    "{:?} after a start, not {:?}",
                    kept.overrides, self.overrides
                ),
            );
        }
        if kept.audit.iter().eq(self.audit.values()) {
            Ok(())
        } else {
            broken("I17", "another audit after a start".to_owned())
        }
    }
}
