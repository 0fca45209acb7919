//! `Kvgate-Seq` orders a concurrent run: its changes, taken in that order, are those of one ledger
//! and one line, and every other answer agrees with a state between the changes around its call.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::callers::{Call, Caller, Fact, Load, run, serve_all};
use super::fleet;
use crate::support::process::Kvgate;

const CALLERS: u64 = 16;
const ANSWERS: usize = 4_000;
const CEILING: u64 = 900_000;

/// DUR6, DEC1, DEC2, TIC1: 16 callers at once; all changes sorted by their numbers are explained,
/// without a gap, by a model that grants only what fits, the head first; every repeat, renewal and
/// read agrees with a state between the largest number that was told before its call began and the
/// smallest of the calls that began after it had ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_numbers_of_changes_explain_every_answer() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(
        data.path(),
        &[
            "--router",
            &fleet.router_url(),
            "--program-admission",
            "--admission-max-wait-s",
            "3600",
            "--claim-grace-s",
            "60",
            "--stale-after-s",
            "30",
        ],
    );
    // What stands before these two numbers is the start's; what stands after is the callers'.
    let first = gate.delete("/v1/tickets/first").await.seq.unwrap();
    let mut callers: Vec<Caller> = (0..CALLERS)
        .map(|number| Caller::new(number, Load::Ordered, 7, &gate))
        .collect();
    let gate = run(gate, &mut callers, ANSWERS, Some).await.unwrap();
    serve_all(&gate, &mut callers);
    let last = gate.delete("/v1/tickets/last").await.seq.unwrap();

    let mut tokens = BTreeMap::new();
    let mut calls = Vec::new();
    for caller in &mut callers {
        let entries = caller.entries.iter();
        tokens.extend(entries.map(|(ticket, entry)| (ticket.clone(), entry.tokens)));
        calls.append(&mut caller.calls);
    }
    let run = Told::of(&calls, tokens);
    let changes = run.explain(first + 1..last);
    let told = changes.iter().filter(|(_, _, told)| *told).count();
    assert_eq!(
        told,
        run.changes.len(),
        "all numbers lie between the two around the run"
    );
    let grants = changes.iter().filter_map(|(_, change, _)| match change {
        Change::Grant(ticket) => run.lease.get(ticket),
        _ => None,
    });
    let issues = grants.map(|lease| lease.split_once('-').unwrap().0.parse::<u64>().unwrap());
    assert!(
        issues.is_sorted(),
        "leases are issued in the order of their grants"
    );
    let states = States::of(&changes, first, &run.tokens);
    let others = run.check_others(&calls, &states, first, last);

    // The end of the explanation is what the lists show.
    let leases = gate.list("/v1/leases").await;
    let held: BTreeSet<&str> = leases
        .iter()
        .map(|lease| lease["ticket_id"].as_str().unwrap())
        .collect();
    let queue = gate.list("/v1/queue").await;
    let line: Vec<&str> = queue
        .iter()
        .map(|row| row["ticket_id"].as_str().unwrap())
        .collect();
    let end = states.model(last - 1);
    assert_eq!(held, end.held.iter().map(String::as_str).collect());
    assert_eq!(
        line,
        end.line.iter().map(String::as_str).collect::<Vec<_>>()
    );
    let untold = changes.len() - told;
    println!(
        "{} answers: {} changes in order, {untold} of them told later or to nobody; {others} other answers agree",
        calls.len(),
        changes.len(),
    );
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Change {
    Enqueue(String),
    Grant(String),
    /// Out of line.
    Withdraw(String),
    /// Out of the ledger.
    Free(String),
}

/// One ledger and one line.
#[derive(Clone, Debug, Default)]
struct Model {
    held: BTreeSet<String>,
    line: VecDeque<String>,
    reserved: u64,
}

impl Model {
    fn fits(&self, tokens: u64) -> bool {
        self.reserved + tokens <= CEILING
    }

    /// Applies a change, or says why it cannot come here.
    fn apply(&mut self, change: &Change, tokens: &BTreeMap<String, u64>) -> Result<(), String> {
        let possible = match change {
            Change::Enqueue(ticket) => {
                let blocked = !self.line.is_empty() || !self.fits(tokens[ticket]);
                self.line.push_back(ticket.clone());
                blocked && !self.held.contains(ticket)
            }
            Change::Grant(ticket) => {
                let next = match self.line.pop_front() {
                    Some(head) => head == *ticket,
                    None => true,
                };
                let fits = self.fits(tokens[ticket]);
                self.reserved += tokens[ticket];
                next && fits && self.held.insert(ticket.clone())
            }
            Change::Withdraw(ticket) => {
                let before = self.line.len();
                self.line.retain(|other| other != ticket);
                before == self.line.len() + 1
            }
            Change::Free(ticket) => {
                let held = self.held.remove(ticket);
                if held {
                    self.reserved -= tokens[ticket];
                }
                held
            }
        };
        if possible {
            Ok(())
        } else {
            Err(format!("{change:?} cannot come after {self:?}"))
        }
    }
}

/// What the callers were told, by number and by ticket.
struct Told {
    tokens: BTreeMap<String, u64>,
    changes: BTreeMap<u64, Change>,
    /// Grants whose place in line was not told, because it was left in the same turn.
    passed: BTreeMap<u64, String>,
    /// Tickets whose grant has a number that was told, or that were withdrawn instead.
    decided: BTreeSet<String>,
    lease: BTreeMap<String, String>,
    /// End of a call and the largest number told until then; in order.
    until: Vec<(u64, u64)>,
    /// Begin of a call and the smallest number told to calls from then on; in order.
    from: Vec<(u64, u64)>,
}

impl Told {
    fn of(calls: &[Call], tokens: BTreeMap<String, u64>) -> Self {
        let mut told = Self {
            tokens,
            changes: BTreeMap::new(),
            passed: BTreeMap::new(),
            decided: BTreeSet::new(),
            lease: BTreeMap::new(),
            until: Vec::new(),
            from: Vec::new(),
        };
        for call in calls {
            for (seq, fact) in &call.facts {
                told.take_in(*seq, fact);
                if let Some(seq) = seq {
                    told.until.push((call.ended, *seq));
                    told.from.push((call.begun, *seq));
                }
            }
        }
        told.until.sort_unstable();
        told.from.sort_unstable();
        let mut largest = 0;
        for (_, seq) in &mut told.until {
            largest = largest.max(*seq);
            *seq = largest;
        }
        let mut smallest = u64::MAX;
        for (_, seq) in told.from.iter_mut().rev() {
            smallest = smallest.min(*seq);
            *seq = smallest;
        }
        let changes = told.changes.values();
        let enqueued: BTreeSet<&String> = changes
            .filter_map(|change| match change {
                Change::Enqueue(ticket) => Some(ticket),
                _ => None,
            })
            .collect();
        for (seq, change) in &told.changes {
            if let Change::Grant(ticket) | Change::Withdraw(ticket) = change {
                told.decided.insert(ticket.clone());
            }
            if let Change::Grant(ticket) = change
                && !enqueued.contains(ticket)
            {
                told.passed.insert(*seq, ticket.clone());
            }
        }
        told
    }

    fn take_in(&mut self, seq: Option<u64>, fact: &Fact) {
        let change = match fact {
            Fact::Admitted { ticket, lease } => {
                let known = self.lease.insert(ticket.clone(), lease.clone());
                assert!(
                    known.is_none_or(|known| known == *lease),
                    "{ticket} was granted twice"
                );
                Change::Grant(ticket.clone())
            }
            Fact::Waits { ticket, .. } => Change::Enqueue(ticket.clone()),
            Fact::Released { ticket } | Fact::TakenBack { ticket } => Change::Free(ticket.clone()),
            Fact::Withdrawn { ticket } => Change::Withdraw(ticket.clone()),
            Fact::Renewed { .. } | Fact::Ended { .. } | Fact::State { .. } => {
                assert_eq!(seq, None, "{fact:?} changed nothing");
                return;
            }
        };
        let Some(seq) = seq else {
            assert!(
                matches!(change, Change::Enqueue(_) | Change::Grant(_)),
                "{change:?} has no number"
            );
            return;
        };
        if let Some(other) = self.changes.insert(seq, change.clone()) {
            assert_eq!(other, change, "{seq} was told for two changes");
        }
    }

    /// The changes of these numbers, one for each. A number that nobody was told is a grant to the
    /// head, told later by an answer without a number or to nobody yet, or the place of a ticket that left the line
    /// in the same turn. Where both can be, the second is tried when the first leads nowhere.
    fn explain(&self, numbers: std::ops::Range<u64>) -> Vec<(u64, Change, bool)> {
        let mut model = Model::default();
        let mut changes: Vec<(u64, Change, bool)> = Vec::new();
        let mut others: Vec<(usize, Model, Change)> = Vec::new();
        let mut furthest = (0, String::new());
        let mut tried = 0_u64;
        let mut number = numbers.start;
        while number < numbers.end {
            let told = self.changes.get(&number);
            let mut choices = match told {
                Some(change) => vec![change.clone()],
                None => self.untold(number, &model),
            };
            let mut applied = Err(format!(
                "nothing can have happened at {number} after {model:?}"
            ));
            if choices.len() > 1 {
                let other = choices.remove(1);
                others.push((changes.len(), model.clone(), other));
            }
            if let Some(change) = choices.pop() {
                applied = model.apply(&change, &self.tokens);
                changes.push((number, change, told.is_some()));
            }
            if let Err(fault) = applied {
                tried += 1;
                if furthest.0 <= number {
                    furthest = (number, fault);
                }
                let Some((length, before, other)) = others.pop().filter(|_| tried < 100_000) else {
                    panic!("no order explains {}: {}", furthest.0, furthest.1);
                };
                changes.truncate(length);
                model = before;
                number = numbers.start + u64::try_from(length).unwrap();
                model.apply(&other, &self.tokens).unwrap();
                changes.push((number, other, false));
            }
            number += 1;
        }
        changes
    }

    fn untold(&self, number: u64, model: &Model) -> Vec<Change> {
        let mut choices = Vec::new();
        if let Some(head) = model.line.front()
            && !self.decided.contains(head)
            && model.fits(self.tokens[head])
        {
            choices.push(Change::Grant(head.clone()));
        }
        // They leave in the order in which they came.
        let next = self.passed.range(number..).map(|(_, ticket)| ticket);
        if let Some(next) = next.into_iter().find(|ticket| !model.line.contains(ticket))
            && (!model.line.is_empty() || !model.fits(self.tokens[next]))
        {
            choices.push(Change::Enqueue(next.clone()));
        }
        choices
    }

    /// Answers that made no change, and places in line, which are told as of the end of the turn.
    fn check_others(&self, calls: &[Call], states: &States, first: u64, last: u64) -> usize {
        let mut checked = 0;
        for call in calls {
            let before = self.until.partition_point(|(ended, _)| *ended < call.begun);
            let lowest = before.checked_sub(1).map_or(first, |at| self.until[at].1);
            let after = self.from.partition_point(|(begun, _)| *begun <= call.ended);
            let highest = self.from.get(after).map_or(last, |(_, seq)| *seq);
            for (seq, fact) in &call.facts {
                if seq.is_some() && !matches!(fact, Fact::Waits { .. }) {
                    continue;
                }
                checked += 1;
                let lowest = lowest.max(seq.unwrap_or(lowest));
                assert!(
                    (lowest..highest).any(|number| states.agree(number, fact)),
                    "{fact:?} agrees with no state from {lowest} to {}: {:#?}",
                    highest - 1,
                    (lowest..highest)
                        .map(|number| states.summary(number))
                        .collect::<Vec<_>>()
                );
            }
        }
        checked
    }
}

/// The model after each change.
struct States<'a> {
    first: u64,
    models: Vec<Model>,
    ended: BTreeMap<String, u64>,
    tokens: &'a BTreeMap<String, u64>,
}

impl<'a> States<'a> {
    fn of(changes: &[(u64, Change, bool)], first: u64, tokens: &'a BTreeMap<String, u64>) -> Self {
        let mut models = vec![Model::default()];
        let mut ended = BTreeMap::new();
        for (number, change, _) in changes {
            let mut model = models.last().unwrap().clone();
            model.apply(change, tokens).unwrap();
            models.push(model);
            if let Change::Free(ticket) | Change::Withdraw(ticket) = change {
                ended.insert(ticket.clone(), *number);
            }
        }
        Self {
            first,
            models,
            ended,
            tokens,
        }
    }

    fn model(&self, number: u64) -> &Model {
        &self.models[usize::try_from(number - self.first).unwrap()]
    }

    fn agree(&self, number: u64, fact: &Fact) -> bool {
        let model = self.model(number);
        match fact {
            Fact::Admitted { ticket, .. } | Fact::Renewed { ticket } => model.held.contains(ticket),
            Fact::Waits {
                ticket,
                position,
                ahead,
            } => {
                let place = model.line.iter().position(|other| other == ticket);
                place.is_some_and(|place| {
                    let before = model.line.iter().take(place);
                    let tokens: u64 = before.map(|other| self.tokens[other]).sum();
                    u64::try_from(place + 1).unwrap() == *position && tokens == *ahead
                })
            }
            Fact::Ended { ticket } => self.ended.get(ticket).is_some_and(|end| *end <= number),
            Fact::State {
                reserved,
                held,
                waiting,
            } => self.sums(number) == (*reserved, *held, *waiting),
            Fact::Released { .. } | Fact::Withdrawn { .. } | Fact::TakenBack { .. } => false,
        }
    }

    fn sums(&self, number: u64) -> (u64, u64, u64) {
        let model = self.model(number);
        let count = |count: usize| u64::try_from(count).unwrap();
        (
            model.reserved,
            count(model.held.len()),
            count(model.line.len()),
        )
    }

    fn summary(&self, number: u64) -> (u64, (u64, u64, u64)) {
        (number, self.sums(number))
    }
}
