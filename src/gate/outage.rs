//! What a writer without a store remembers for the time after (DUR4).

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use kvgate_core::batch::Failed;
use kvgate_core::command::Command;
use kvgate_core::ids::{LeaseId, TicketId};
use kvgate_core::machine::Untold;
use kvgate_core::tally::LocalBypass;
use kvgate_core::units::{Span, Timestamp};

/// Releases and cancels that are kept for the recovery. Beyond that their callers' retries serve.
pub const KEPT_MAX: usize = 100_000;

/// Releases and cancels that were told 503 and are still to be applied, in order and once each.
#[derive(Debug, Default)]
pub(super) struct Kept {
    commands: VecDeque<Command>,
    leases: HashSet<LeaseId>,
    tickets: HashSet<TicketId>,
    is_full: bool,
}

impl Kept {
    /// Keeps a release or a cancel; anything else is not applied later.
    pub(super) fn keep(&mut self, command: &Command) {
        let known = match command {
            Command::Release(lease) => self.leases.contains(lease),
            Command::Cancel(ticket) => self.tickets.contains(ticket),
            _ => return,
        };
        if known {
            return;
        }
        if self.commands.len() >= KEPT_MAX {
            if !self.is_full {
                tracing::warn!(
                    kept = KEPT_MAX,
                    "no more releases and cancels are kept for the recovery"
                );
            }
            self.is_full = true;
            return;
        }
        match command {
            Command::Release(lease) => drop(self.leases.insert(*lease)),
            Command::Cancel(ticket) => drop(self.tickets.insert(ticket.clone())),
            _ => {}
        }
        self.commands.push_back(command.clone());
    }

    /// The next of them; they stay until [`Kept::applied`] says that they are durable.
    pub(super) fn next(&self, most: usize) -> Vec<Command> {
        self.commands.iter().take(most).cloned().collect()
    }

    /// The first `count` are durable.
    pub(super) fn applied(&mut self, count: usize) {
        self.commands.drain(..count.min(self.commands.len()));
        if self.commands.is_empty() {
            *self = Self::default();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }
}

/// What is known of callers while the core is away.
#[derive(Debug, Default)]
pub(super) struct Outage {
    /// Grants that may be on disk although nobody was told of them.
    pub(super) untold: Untold,
    /// When the queue time of tickets with open calls is over.
    bypass_at: BTreeSet<(Timestamp, TicketId)>,
    /// What callers decided by themselves and said meanwhile.
    local_bypasses: BTreeMap<LocalBypass, u64>,
}

impl Outage {
    /// Takes over from a core that ran ahead of the store. `waiting` are the tickets that open calls
    /// wait for.
    pub(super) fn begin<E>(&mut self, failed: &Failed<E>, waiting: Vec<TicketId>) {
        self.untold.add(failed.untold());
        self.bypass_at = waiting
            .into_iter()
            .filter_map(|ticket| Some((failed.bypass_at(&ticket)?, ticket)))
            .collect();
    }

    /// The core is there again; what it must count.
    pub(super) fn end(&mut self) -> Option<Command> {
        let counts = std::mem::take(self).local_bypasses;
        (!counts.is_empty()).then(|| Command::LocalBypasses(counts.into_iter().collect()))
    }

    pub(super) fn count(&mut self, counts: Vec<(LocalBypass, u64)>) {
        for (reason, count) in counts {
            let sum = self.local_bypasses.entry(reason).or_default();
            *sum = sum.saturating_add(count);
        }
    }

    /// Time until the next ticket's queue time is over.
    pub(super) fn next_bypass_in(&self, now: Timestamp) -> Option<Span> {
        self.bypass_at.first().map(|(at, _)| at.since(now))
    }

    /// The next ticket whose queue time is over.
    pub(super) fn aged(&mut self, now: Timestamp) -> Option<TicketId> {
        let (at, _) = self.bypass_at.first()?;
        if !now.reached(*at) {
            return None;
        }
        self.bypass_at.pop_first().map(|(_, ticket)| ticket)
    }
}

#[cfg(test)]
mod tests {
    use kvgate_core::ids::Issue;

    use super::*;

    fn release(issue: u64) -> Command {
        Command::Release(LeaseId {
            issue: Issue(issue),
            salt: 1,
        })
    }

    fn cancel(ticket: &str) -> Command {
        Command::Cancel(TicketId::new(ticket).unwrap())
    }

    /// DUR4: releases and cancels are kept in order and once each, and nothing else is.
    #[test]
    fn dur4_releases_and_cancels_are_kept_once_and_in_order() {
        let mut kept = Kept::default();
        let renew = Command::Renew {
            lease: LeaseId {
                issue: Issue(1),
                salt: 1,
            },
            ttl: None,
        };
        for command in [
            release(1),
            renew,
            cancel("t"),
            release(1),
            cancel("t"),
            Command::ListEpochs,
            release(2),
        ] {
            kept.keep(&command);
        }
        assert_eq!(kept.next(10), [release(1), cancel("t"), release(2)]);
        assert_eq!(kept.next(2), [release(1), cancel("t")], "they stay");
        kept.applied(2);
        assert_eq!(kept.next(10), [release(2)]);
        kept.applied(1);
        assert!(kept.is_empty());
        kept.keep(&release(1));
        assert_eq!(kept.next(10), [release(1)], "a later outage keeps it anew");
    }

    /// DUR4: at most 100,000 are kept.
    #[test]
    fn dur4_the_kept_are_bounded() {
        let mut kept = Kept::default();
        for issue in 0..200_000 {
            kept.keep(&release(issue));
        }
        assert_eq!(kept.next(usize::MAX).len(), KEPT_MAX);
    }
}
