//! The core under test: it takes the turns of the reference and must say the same, and its books
//! must agree with themselves and with the store after every turn.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvgate_core::audit::AuditAct;
use kvgate_core::batch::Committed;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CloseIntent, CloseMode, CloseStage};
use kvgate_core::command::{self, Act, CloseRequest, Delivery, Operation};
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::effect::{self, Effect, Reply};
use kvgate_core::event::{Event, QueueEnd};
use kvgate_core::ids::{Label, LeaseId, RowNo, Seq, SessionId};
use kvgate_core::machine::{Kept, Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{AdmissionScope, Policy};
use kvgate_core::reading::{
    ReadFailure, Reading, Role, RouterAnswer, RouterFailure, StartMark, TokenCounters, Worker,
};
use kvgate_core::settings::{Change, SettingsChange};
use kvgate_core::store::Image;
use kvgate_core::tally::{CancelledHow, LeaseEnd, Tally};
use kvgate_core::ticket::{Sent, Stage, Ticket};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::Load;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};

use crate::closing::Closing;
use crate::model::{self, Counter, Did, Model, Numbers, Said, Settings, Shown, Wish, Wishes};
use crate::steps::{
    Kind, Reference, Resolved, Step, T0, Turn, all_tickets, settings, static_engines,
};
use crate::words::{answer, how, said};

pub fn tokens(count: u64) -> Tokens {
    Tokens::new(count).unwrap()
}

pub fn policy(settings: &Settings) -> Policy {
    Policy {
        program_admission: settings.on,
        session_lifecycle: settings.closes,
        join_timeout: settings.join_timeout.map(Span::from_millis),
        session_idle_close: settings.idle_close.map(Span::from_millis),
        paused: settings.paused,
        headroom: Ppm::new(settings.headroom as u32).unwrap(),
        pressure_threshold: Ppm::new(settings.threshold).unwrap(),
        expected_decode_cap: settings.decode_cap.map(tokens),
        max_wait: Span::from_millis(settings.max_wait),
        scope: if settings.all_scopes {
            AdmissionScope::All
        } else {
            AdmissionScope::Train
        },
        claim_grace: Span::from_millis(settings.grace),
        max_waiting: settings.max_waiting as u64,
        stale_after: Span::from_millis(settings.stale_after),
        ..Policy::default()
    }
    .validated()
    .unwrap()
}

pub fn params(now: u64, salt: u64, seed: u64, configured: &Settings, resets: bool) -> StartParams {
    StartParams {
        now: Timestamp::from_millis(now),
        salt,
        seed,
        policy: policy(configured),
        reset_settings: resets,
        fleet: FleetConfig {
            has_router: true,
            static_engines: static_engines().into_iter().collect(),
        },
    }
}

/// Some tickets name their engine request; some of these begin those of others.
fn request_id(ticket: &str) -> Option<Label> {
    let name = match ticket {
        "t0" => "rid-1",
        "t1" => "rid-11",
        "t2" => "rid-2",
        "t4" => "rid-2",
        "t5" => "rid-12",
        _ => return None,
    };
    Label::new(name).ok()
}

pub fn who() -> Label {
    Label::new("operator").unwrap()
}

fn operate(act: Act) -> command::Command {
    command::Command::Operate(Operation { who: who(), act })
}

fn close(session: &SessionId, abort: bool) -> CloseRequest {
    CloseRequest {
        session: session.clone(),
        mode: if abort {
            CloseMode::Abort
        } else {
            CloseMode::Join
        },
        reason: None,
    }
}

fn change(wishes: &Wishes) -> SettingsChange {
    fn wished<T: Copy, U>(wish: Wish<T>, value: impl Fn(T) -> U) -> Change<U> {
        match wish {
            Wish::Stay => Change::Keep,
            Wish::AsConfigured => Change::Configured,
            Wish::Be(wished) => Change::Value(value(wished)),
        }
    }
    SettingsChange {
        program_admission: wished(wishes.on, |on| on),
        session_lifecycle: wished(wishes.closes, |on| on),
        paused: wished(wishes.paused, |on| on),
        headroom: wished(wishes.headroom, |share| Ppm::new(share as u32).unwrap()),
        pressure_threshold: wished(wishes.threshold, |share| Ppm::new(share).unwrap()),
        expected_decode_cap: wished(wishes.decode_cap, |cap| cap.map(tokens)),
        max_wait: wished(wishes.max_wait, Span::from_millis),
        scope: wished(wishes.all_scopes, |all| {
            if all {
                AdmissionScope::All
            } else {
                AdmissionScope::Train
            }
        }),
    }
}

/// The command as the core takes it.
pub fn command(resolved: &Resolved, closing: &mut Closing) -> command::Command {
    use command::Command;
    match resolved {
        Resolved::Acquire(ask) => Command::Acquire(command::Acquire {
            ticket: ask.ticket.clone(),
            session: ask.session.clone(),
            sent: match ask.numbers {
                Numbers::Sum(sum) => Sent::Sum(tokens(sum)),
                Numbers::Parts(prompt, new) => Sent::Parts {
                    prompt: tokens(prompt),
                    max_new: tokens(new),
                },
            },
            scope: ask.scope,
            protected: ask.protected,
            ttl: Span::from_millis(ask.ttl),
            client: None,
            request_id: request_id(ask.ticket.as_str()),
            stays: ask.stays,
        }),
        Resolved::Leave(ticket) => Command::Leave(ticket.clone()),
        Resolved::Gone(ticket) => Command::Gone(ticket.clone()),
        Resolved::Delivered(ticket, lease) => Command::Delivered(Delivery {
            ticket: ticket.clone(),
            lease: *lease,
        }),
        Resolved::Undelivered(ticket, lease) => Command::Undelivered(Delivery {
            ticket: ticket.clone(),
            lease: *lease,
        }),
        Resolved::Watch(tickets) => Command::Watch(tickets.clone()),
        Resolved::Release(lease) => Command::Release(*lease),
        Resolved::Renew(lease, ttl) => Command::Renew {
            lease: *lease,
            ttl: ttl.map(Span::from_millis),
        },
        Resolved::Revoke(lease) => operate(Act::Revoke(*lease)),
        Resolved::Cancel(ticket) => Command::Cancel(ticket.clone()),
        Resolved::ReadTicket(ticket) => Command::ReadTicket(ticket.clone()),
        Resolved::ReadLease(lease) => Command::ReadLease(*lease),
        Resolved::Round(round) => Command::Round(kvgate_core::reading::Round {
            began_at: Timestamp::from_millis(round.began_at),
            router: Some(match &round.router {
                Shown::Silent => RouterAnswer::Failed(RouterFailure::Timeout),
                Shown::Lists(rows) => RouterAnswer::Workers(
                    rows.iter()
                        .map(|row| Worker {
                            engine: row.engine.clone(),
                            role: if row.counts {
                                Role::Decode
                            } else {
                                Role::Prefill
                            },
                            healthy: row.healthy,
                            worker_ids: row.ids.iter().map(|id| Arc::from(id.as_str())).collect(),
                        })
                        .collect(),
                ),
            }),
            readings: round
                .readings
                .iter()
                .map(|(engine, gauges)| (engine.clone(), reading(*gauges)))
                .collect(),
            start_marks: round
                .marks
                .iter()
                .map(|(engine, mark)| (engine.clone(), StartMark(*mark)))
                .collect(),
        }),
        Resolved::Configure(wishes) => operate(Act::Configure(change(wishes))),
        Resolved::CancelAs(ticket) => operate(Act::Cancel(ticket.clone())),
        Resolved::Close(session, abort) => Command::Close(close(session, *abort)),
        Resolved::CloseAs(session, abort) => operate(Act::Close(close(session, *abort))),
        Resolved::RetryClose(back) => Command::RetryClose(closing.retry(*back)),
        Resolved::RetryCloseAs(back) => operate(Act::RetryClose(closing.retry(*back))),
        Resolved::Called(picks) => closing.called(picks),
    }
}

fn reading(gauges: Option<model::Gauges>) -> Result<Reading, ReadFailure> {
    let gauges = gauges.ok_or(ReadFailure::Timeout)?;
    Ok(Reading {
        usage: gauges.usage.map(|usage| Ppm::new(usage).unwrap()),
        running: Some(u64::from(!gauges.idle)),
        counters: gauges
            .counters
            .map(|(prompt, generation)| TokenCounters { prompt, generation }),
        ..Reading::idle(tokens(gauges.capacity))
    })
}

pub fn counters(tally: &Tally) -> BTreeMap<Counter, u64> {
    let mut counters = BTreeMap::new();
    for scope in Scope::ALL {
        let own = tally.scope(scope);
        counters.insert(Counter::Admit(scope), own.admit);
        for reason in WaitReason::ALL {
            counters.insert(Counter::Wait(scope, reason), own.waits(reason));
        }
        for reason in BypassReason::ALL {
            counters.insert(Counter::Bypass(scope, reason), own.bypasses(reason));
        }
        counters.insert(
            Counter::Withdrawn(scope),
            own.cancels(CancelledHow::Withdrawn),
        );
        counters.insert(Counter::Dropped(scope), own.cancels(CancelledHow::Dropped));
        counters.insert(
            Counter::TakenBack(scope),
            own.cancels(CancelledHow::TakenBack),
        );
        counters.insert(
            Counter::SessionClosed(scope),
            own.cancels(CancelledHow::SessionClosed),
        );
    }
    counters.insert(Counter::Released, tally.ends(LeaseEnd::Released));
    counters.insert(Counter::Expired, tally.ends(LeaseEnd::Expired));
    counters.insert(Counter::Revoked, tally.ends(LeaseEnd::Revoked));
    counters.insert(Counter::Cancelled, tally.ends(LeaseEnd::Cancelled));
    counters.insert(Counter::GrantedAfterWait, tally.granted_after_wait);
    counters.insert(Counter::WaitedMillis, tally.waited_millis);
    counters.retain(|_, count| *count > 0);
    counters
}

// ---- the subject -----------------------------------------------------------------------------

/// The core with its store, and what its books are checked against.
#[derive(Debug)]
pub struct Subject {
    machine: Option<Box<Machine>>,
    store: MemoryStore,
    /// Leases that were ever granted, in the order of their grants.
    granted: Vec<LeaseId>,
    last_seq: Seq,
    /// Since when the store lacks the renewal of a row,
    renewals_lag: BTreeMap<RowNo, u64>,
    /// and counters.
    counters_lag: Option<u64>,
    /// Counters as readers that know no way back saw them last.
    shown: BTreeMap<Counter, u64>,
    shown_closes: Vec<u64>,
    closing: Closing,
    /// Entries of the audit so far, and how many of them should be of closes.
    audited: usize,
    closes_audited: usize,
}

impl Subject {
    fn new() -> Self {
        let mut subject = Self {
            machine: None,
            store: MemoryStore::default(),
            granted: Vec::new(),
            last_seq: Seq(0),
            renewals_lag: BTreeMap::new(),
            counters_lag: None,
            shown: BTreeMap::new(),
            shown_closes: Vec::new(),
            closing: Closing::default(),
            audited: 0,
            closes_audited: 0,
        };
        let batch = Machine::restore(subject.store.image(), params(T0, 1, 1, &settings(), false));
        let Ok(committed) = batch.commit(&mut subject.store);
        subject.machine = Some(committed.machine);
        subject
    }

    fn machine(&self) -> &Machine {
        self.machine.as_ref().unwrap()
    }

    fn take(&mut self, turn: &Turn) {
        let before = self.machine().view().tally;
        let committed = match turn.kind {
            Kind::Start => {
                self.machine = None;
                self.closing.started();
                let after = &turn.after;
                let params = params(
                    turn.now,
                    after.salt,
                    turn.now,
                    &after.configured,
                    after.resets,
                );
                let Ok(committed) =
                    Machine::restore(self.store.image(), params).commit(&mut self.store);
                committed
            }
            Kind::Ordinary | Kind::Last => {
                let machine = self.machine.take().unwrap();
                let mut under_way = machine.turn(Timestamp::from_millis(turn.now));
                for resolved in &turn.commands {
                    under_way.handle(command(resolved, &mut self.closing));
                }
                let batch = if turn.kind == Kind::Last {
                    under_way.finish_last()
                } else {
                    under_way.finish()
                };
                let Ok(committed) = batch.commit(&mut self.store);
                committed
            }
        };
        let Committed {
            machine,
            effects,
            events,
        } = committed;
        self.machine = Some(machine);
        self.closing.take(&effects);
        self.compare_said(turn, &effects);
        self.compare_numbers(&effects);
        self.compare_books(&turn.after);
        self.check_grants(turn, &effects);
        self.check_kept(turn, &effects);
        self.check_audit(turn, &effects, &events);
        self.check_shown();
        if turn.kind != Kind::Start {
            self.check_events(&before, &events);
        }
    }

    /// SET3: one entry for each act that changed something, in its turn, and none for any other.
    fn check_audit(&mut self, turn: &Turn, effects: &[Effect], events: &[Event]) {
        let audit = self.machine().kept().audit;
        let numbers: Vec<u64> = audit.iter().map(|entry| entry.no.0).collect();
        assert!(numbers.iter().copied().eq(1..=audit.len() as u64));
        let mut of_closes = 0;
        for effect in effects {
            if let Effect::Reply {
                tag, seq: Some(_), ..
            } = effect
                && let Some(Resolved::CloseAs(..) | Resolved::RetryCloseAs(_)) =
                    turn.commands.get(tag.0)
            {
                of_closes += 1;
            }
        }
        self.closes_audited += of_closes;
        let mut dids = Vec::new();
        let mut closes = 0;
        for entry in &audit {
            let did = match &entry.act {
                AuditAct::SettingsChanged(moves) => {
                    assert!(!moves.is_empty());
                    Did::Set
                }
                AuditAct::SettingsReset(moves) => {
                    assert!(!moves.is_empty());
                    Did::Reset
                }
                AuditAct::LeaseRevoked { lease, .. } => Did::Revoked(*lease),
                AuditAct::TicketCancelled {
                    ticket, outcome, ..
                } => Did::Cancelled(ticket.clone(), how(*outcome)),
                AuditAct::SessionClosed { .. } | AuditAct::CloseRetried { .. } => {
                    closes += 1;
                    continue;
                }
            };
            let by = if did == Did::Reset {
                "kvgate"
            } else {
                "operator"
            };
            assert_eq!(entry.who.as_str(), by);
            dids.push((entry.at.millis(), did));
        }
        assert_eq!(dids, turn.after.audit, "the audit");
        assert_eq!(closes, self.closes_audited, "closes in the audit");
        let told = events.iter().filter_map(|event| match event {
            Event::Operated(entry) => Some(&**entry),
            _ => None,
        });
        let new = audit.iter().skip(self.audited);
        assert!(told.eq(new), "the log is told of the same");
        self.audited = audit.len();
    }

    /// DUR2: what readers were shown of the counters never goes back, over a crash neither.
    fn check_shown(&mut self) {
        let now = counters(&self.machine().view().durable_tally);
        for (counter, before) in &self.shown {
            if !matches!(counter, Counter::GrantedAfterWait | Counter::WaitedMillis) {
                let after = now.get(counter).copied().unwrap_or(0);
                assert!(
                    *before <= after,
                    "{counter:?} went from {before} to {after}"
                );
            }
        }
        self.shown = now;
        let closes = |tally: &Tally| {
            let mut counts = vec![tally.closes, tally.close_failures, tally.sessions_reopened];
            counts.extend(tally.close_deliveries);
            counts
        };
        let now = closes(&self.machine().view().durable_tally);
        let mut pairs = self.shown_closes.iter().zip(&now);
        assert!(pairs.all(|(before, after)| before <= after), "{now:?}");
        self.shown_closes = now;
    }

    /// CNT1: what is measured agrees with what is counted.
    fn check_events(&self, before: &Tally, events: &[Event]) {
        let after = self.machine().view().tally;
        let mut admits = (0, 0);
        let mut ends = [0; LeaseEnd::ALL.len()];
        let mut expired = 0;
        for event in events {
            match event {
                Event::LeftQueue {
                    outcome: QueueEnd::Admit,
                    waited,
                } => admits = (admits.0 + 1, admits.1 + waited.millis()),
                Event::LeaseEnded { how, .. } => ends[*how as usize] += 1,
                Event::Expired { .. } => expired += 1,
                Event::Asked { .. } | Event::LeftQueue { .. } | Event::Operated(_) => {}
            }
        }
        let counted = (
            after.granted_after_wait - before.granted_after_wait,
            after.waited_millis - before.waited_millis,
        );
        assert_eq!(admits, counted, "grants after waiting");
        for how in LeaseEnd::ALL {
            let counted = after.ends(how) - before.ends(how);
            assert_eq!(ends[how as usize], counted, "{how:?}");
        }
        assert_eq!(
            expired,
            after.ends(LeaseEnd::Expired) - before.ends(LeaseEnd::Expired)
        );
    }

    /// The same answers, in the same order, to the same commands.
    fn compare_said(&self, turn: &Turn, effects: &[Effect]) {
        let mut told: Vec<Option<(Said, bool, bool)>> = vec![None; turn.commands.len()];
        let mut decided = Vec::new();
        for effect in effects {
            let (tag, one) = match effect {
                Effect::Reply { tag, seq, reply } => {
                    let reopened =
                        matches!(reply, Reply::Acquire(Ok(told)) if told.session_reopened);
                    (tag, (said(reply), seq.is_some(), reopened))
                }
                Effect::Parked {
                    tag,
                    seq,
                    session_reopened,
                } => (tag, (Said::Parked, seq.is_some(), *session_reopened)),
                Effect::Decided { answer: told, .. } => {
                    assert!(!told.session_reopened, "the call that reopened says so");
                    decided.push(answer(told));
                    continue;
                }
                Effect::Call(_) | Effect::CloseDone(_) => continue,
            };
            assert!(told[tag.0].is_none(), "answered twice: {effect:?}");
            told[tag.0] = Some(one);
        }
        for (index, resolved) in turn.commands.iter().enumerate() {
            let (said, changed, reopened) = told[index].clone().expect("every command is answered");
            assert_eq!(said, turn.turned.said[index], "answer to {resolved:?}");
            let expected = turn.turned.reopened[index];
            assert_eq!(reopened, expected.unwrap_or(reopened), "{resolved:?}");
            // A round is numbered when it changed what is kept of the fleet, and what is asked of closes
            // when it changed one.
            let by_what_is_kept = matches!(
                resolved,
                Resolved::Round(_)
                    | Resolved::Close(..)
                    | Resolved::CloseAs(..)
                    | Resolved::RetryClose(_)
                    | Resolved::RetryCloseAs(_)
                    | Resolved::Called(_)
            );
            if !by_what_is_kept && expected.is_some() {
                assert_eq!(
                    changed, turn.turned.changed[index],
                    "number of {resolved:?}"
                );
            }
        }
        assert_eq!(decided, turn.turned.decided, "decisions of the queue");
    }

    /// DUR6: numbers rise strictly; the answer of a call that ends may bear that of its decision.
    fn compare_numbers(&mut self, effects: &[Effect]) {
        let mut numbers = BTreeSet::new();
        for effect in effects {
            match effect {
                Effect::Decided { seq, .. } => assert!(numbers.insert(*seq), "{effect:?}"),
                Effect::Parked { seq, .. } => {
                    assert!(seq.is_none_or(|seq| numbers.insert(seq)), "{effect:?}");
                }
                Effect::Reply { .. } | Effect::Call(_) | Effect::CloseDone(_) => {}
            }
        }
        let of_decisions = numbers.clone();
        for effect in effects {
            if let Effect::Reply { seq: Some(seq), .. } = effect
                && !of_decisions.contains(seq)
            {
                assert!(numbers.insert(*seq), "{effect:?}");
            }
        }
        assert!(numbers.iter().all(|seq| *seq > self.last_seq));
        let seq = self.machine().view().seq;
        assert!(numbers.iter().all(|number| *number <= seq));
        assert!(seq >= self.last_seq);
        self.last_seq = seq;
    }

    /// The same books as the reference, as a reader sees them.
    fn compare_books(&self, model: &Model) {
        let view = self.machine().view();
        assert_eq!(view.now.millis(), model.now);
        assert_eq!(view.reserved.get(), model.reserved(), "reserved");
        assert_eq!(view.leases, model.leases() as u64);
        assert_eq!(view.waiting, model.line().len() as u64);
        assert_eq!(view.epoch.0, model.epoch, "epoch");
        let measure = &view.measure;
        assert_eq!(measure.ceiling.get(), model.ceiling(), "ceiling");
        assert_eq!(
            measure.full_ceiling.get(),
            model.full_ceiling(),
            "full ceiling"
        );
        assert_eq!(
            measure.degraded.is_some(),
            model.degraded(),
            "{:?}",
            measure.degraded
        );
        let pressure = measure.pressure.as_ref().map(|(worst, _)| worst.get());
        assert_eq!(pressure, model.pressure(), "pressure");
        assert_eq!(view.paced, model.paced(), "pace");
        assert_eq!(counters(&view.tally), model.counters, "counters");
        // CNT1: every acquire that was decided is an admit, a bypass or cancelled, waits, or is on its way.
        let accounted: u64 = view
            .tally
            .scopes
            .iter()
            .map(|scope| {
                scope.admit + scope.bypass.iter().sum::<u64>() + scope.cancelled.iter().sum::<u64>()
            })
            .sum();
        let open = view.waiting + model.on_their_way() as u64;
        assert_eq!(
            accounted + open,
            model.acquires,
            "every acquire is accounted for"
        );
    }

    /// Grants: never the same lease twice, in the order of the line, and only where they fit.
    fn check_grants(&mut self, turn: &Turn, effects: &[Effect]) {
        let mut from_the_line = Vec::new();
        let mut any = false;
        for effect in effects {
            let told = match effect {
                Effect::Reply {
                    seq: Some(_),
                    reply: Reply::Acquire(Ok(told)),
                    ..
                } => told,
                Effect::Decided { answer, .. } => answer,
                _ => continue,
            };
            if let effect::Outcome::Admit { lease, .. } = told.outcome {
                any = true;
                if self.granted.last() != Some(&lease) && !from_the_line.contains(&lease) {
                    assert!(!self.granted.contains(&lease), "granted twice: {lease}");
                    let next = self.granted.last().map_or(1, |last| last.issue.0 + 1);
                    assert_eq!(lease.issue.0, next, "no gaps");
                    self.granted.push(lease);
                }
                if matches!(effect, Effect::Decided { .. }) {
                    from_the_line.push(lease);
                }
            }
        }
        // Queue order: whoever was granted stood before whoever waits.
        let kept = self.machine().kept();
        let row_of = |lease: &LeaseId| {
            kept.tickets
                .iter()
                .find(|ticket| ticket.issue() == Some(lease.issue))
                .map(|ticket| ticket.row)
        };
        let rows: Vec<RowNo> = from_the_line.iter().filter_map(row_of).collect();
        assert!(rows.is_sorted(), "grants in the order of the line");
        if let (Some(last), Some(head)) = (rows.last(), kept.queue.first()) {
            assert!(last < head, "nobody was overtaken");
        }
        let moved = turn
            .commands
            .iter()
            .any(|resolved| matches!(resolved, Resolved::Round(_) | Resolved::Configure(_)));
        if any && !moved {
            let view = self.machine().view();
            assert!(view.reserved <= view.measure.ceiling, "a grant fits");
            let pressure = view.measure.pressure.as_ref().map(|(worst, _)| *worst);
            assert!(pressure.is_none_or(|worst| worst < view.policy.pressure_threshold));
        }
    }

    /// The books agree with themselves, with the store, and with what a start would make of the store.
    fn check_kept(&mut self, turn: &Turn, effects: &[Effect]) {
        let live = self.machine().kept();
        let held = |ticket: &&Ticket| matches!(ticket.stage, Stage::Held(_));
        let reserved: u64 = live.tickets.iter().filter(held).map(reservation).sum();
        assert_eq!(
            live.reserved.get(),
            reserved,
            "reserved is the sum of the leases"
        );
        let waiting: Vec<RowNo> = live
            .tickets
            .iter()
            .filter(|ticket| matches!(ticket.stage, Stage::Waiting { .. }))
            .map(|ticket| ticket.row)
            .collect();
        assert_eq!(
            live.queue, waiting,
            "the line is the waiting tickets in their order"
        );
        let view = self.machine().view();
        for scope in Scope::ALL {
            let mut load = Load::default();
            let of = |ticket: &&Ticket| {
                let asked = ticket.asked.as_ref();
                asked.is_some_and(|asked| asked.terms.scope == scope)
            };
            for ticket in live.tickets.iter().filter(of) {
                match ticket.stage {
                    Stage::Waiting { .. } => {
                        load.waiting += 1;
                        load.waiting_tokens =
                            tokens(load.waiting_tokens.get() + reservation(ticket));
                    }
                    Stage::Held(_) => load.leases += 1,
                    Stage::Ended(_) => {}
                }
            }
            assert_eq!(view.load(scope), load, "{scope:?}");
        }
        let names: BTreeSet<_> = live.tickets.iter().map(|ticket| &ticket.id).collect();
        assert_eq!(names.len(), live.tickets.len(), "no ticket in two places");
        assert!(names.iter().all(|name| all_tickets().contains(*name)));

        let now = turn.now;
        let image = self.store.image();
        assert_eq!(image.seq, live.seq);
        assert_eq!(image.next_issue.max(1), live.next_issue);
        let stored: BTreeMap<RowNo, &Ticket> = image
            .tickets
            .iter()
            .map(|ticket| (ticket.row, ticket))
            .collect();
        let mut renewals_lag = BTreeMap::new();
        for ticket in &live.tickets {
            let stored = stored
                .get(&ticket.row)
                .expect("what was promised is stored");
            if *stored != ticket {
                let (Stage::Held(ours), Stage::Held(theirs)) = (&ticket.stage, &stored.stage)
                else {
                    panic!("{ticket:?} is stored as {stored:?}");
                };
                assert_eq!(ours.id, theirs.id, "only a renewal may lag");
                assert_eq!(ours.granted_at, theirs.granted_at);
                let since = self.renewals_lag.get(&ticket.row);
                renewals_lag.insert(ticket.row, since.copied().unwrap_or(now));
            }
        }
        let rows: BTreeSet<RowNo> = live.tickets.iter().map(|ticket| ticket.row).collect();
        let forgotten: Vec<_> = image
            .tickets
            .iter()
            .filter(|ticket| !rows.contains(&ticket.row))
            .collect();
        assert!(
            forgotten
                .iter()
                .all(|ticket| matches!(ticket.stage, Stage::Ended(_))),
            "what is stored besides was forgotten: {forgotten:?}"
        );
        // LEA2: renewals within 5 s; section 9: counters and forgotten rows within a second.
        let counters_lag = image.tally != live.tally || !forgotten.is_empty();
        self.renewals_lag = renewals_lag;
        self.counters_lag = counters_lag.then(|| self.counters_lag.unwrap_or(now));
        assert!(
            self.renewals_lag.values().all(|since| now - since < 5_000),
            "renewals are written"
        );
        assert!(
            self.counters_lag.is_none_or(|since| now - since < 1_000),
            "counters are written"
        );
        if turn.kind != Kind::Ordinary {
            assert!(
                self.renewals_lag.is_empty() && !counters_lag,
                "an orderly stop writes everything"
            );
            let mut copy = self.machine().image();
            // Its time is that of the last turn, which may have had nothing to write.
            copy.now = image.now;
            assert_eq!(copy, image, "a copy is what the store holds");
        }
        let machine = self.machine.as_ref().unwrap();
        self.closing.check(effects, machine, &live, &image.closes);
        self.check_restart(turn, &live, image);
    }

    /// DUR2, LEA4: a start from this very store brings the same back.
    fn check_restart(&self, turn: &Turn, live: &Kept, image: Image) {
        let now = turn.now;
        let again = params(now, 999, 3, &turn.after.configured, false);
        let Ok(restored) = Machine::restore(image.clone(), again).commit(&mut self.store.clone());
        let kept = restored.machine.kept();
        assert_eq!(kept.queue, live.queue, "the same line");
        assert_eq!(kept.epoch, live.epoch);
        assert_eq!(kept.next_issue, live.next_issue);
        assert_eq!(kept.overrides, live.overrides, "the same settings");
        assert_eq!(kept.audit, live.audit, "the same audit");
        assert_eq!(restored.machine.view().policy, self.machine().view().policy);
        assert!(kept.seq >= live.seq);
        let expected: BTreeMap<RowNo, (u64, bool)> = image
            .tickets
            .iter()
            .filter_map(|ticket| {
                let Stage::Held(lease) = &ticket.stage else {
                    return None;
                };
                let (ttl, ends) = (lease.ttl.millis(), lease.ends_at.millis());
                let least = now + ttl.min(30_000);
                let grace = ends < least && !lease.graced;
                let ends = if grace { least } else { ends.min(now + ttl) };
                (ends > now).then_some((ticket.row, (ends, grace || lease.graced)))
            })
            .collect();
        let held: BTreeMap<RowNo, (u64, bool)> = kept
            .tickets
            .iter()
            .filter_map(|ticket| match &ticket.stage {
                Stage::Held(lease) => Some((ticket.row, (lease.ends_at.millis(), lease.graced))),
                _ => None,
            })
            .collect();
        assert_eq!(held, expected, "the same leases, with their grace");
        if held.len() as u64 == self.machine().view().leases {
            assert_eq!(kept.reserved, live.reserved, "the same reserved total");
            // A start that sees that an engine has no session close may end a close by it.
            let counted = |tally: &Tally| Tally {
                close_deliveries: Default::default(),
                close_failures: 0,
                ..tally.clone()
            };
            assert!(kept.tally.close_failures >= image.tally.close_failures);
            assert_eq!(
                counted(&kept.tally),
                counted(&image.tally),
                "the same counters"
            );
        }
        // What a start does to closes at once is to see which engines have none.
        let promises = |closes: &[CloseIntent]| -> Vec<_> {
            let of = |close: &CloseIntent| (close.id, close.mode, close.reopened.clone());
            closes.iter().map(of).collect()
        };
        assert_eq!(
            promises(&kept.closes),
            promises(&live.closes),
            "the same closes"
        );
    }

    /// Every wait ends: without any input all waiters leave by their deadline.
    fn drain(mut self, model: &Model) {
        // A hold lasts 10 s at most.
        let end = model.now + model.settings.max_wait + 10_000;
        let mut turns = 0;
        while let Some(deadline) = self
            .machine()
            .next_deadline()
            .filter(|at| at.millis() <= end)
        {
            let now = deadline.max(self.machine().view().now);
            let Ok(committed) = self
                .machine
                .take()
                .unwrap()
                .turn(now)
                .finish()
                .commit(&mut self.store);
            self.machine = Some(committed.machine);
            turns += 1;
            assert!(
                turns < 1_000,
                "the machine names a deadline that it does not serve"
            );
        }
        assert_eq!(
            self.machine().view().waiting,
            0,
            "every waiter left by its deadline"
        );
        self.drain_closes();
    }

    /// Every close ends: with engines that answer, all are done but those that a lease holds up.
    fn drain_closes(mut self) {
        let began = self.machine().view().now.millis();
        for turns in 0.. {
            assert!(
                turns < 5_000,
                "the machine names a deadline that it does not serve"
            );
            let last = self.machine().view().now;
            let called = self.closing.all_taken();
            let mut now = last;
            if called.is_none() {
                let done = self.machine().view().closes_pending == 0;
                if done || last.millis() > began + 200_000 {
                    break;
                }
                let second = last.after(Span::from_secs(1));
                let due = self.machine().next_deadline().unwrap_or(second);
                now = due.min(second).max(last);
            }
            let mut turn = self.machine.take().unwrap().turn(now);
            called.map(|called| turn.handle(called));
            let Ok(committed) = turn.finish().commit(&mut self.store);
            self.closing.take(&committed.effects);
            self.machine = Some(committed.machine);
        }
        let kept = self.machine().kept();
        for close in kept.closes.iter().filter(|close| !close.is_done()) {
            let joins = matches!(close.stage, CloseStage::Joining { ready_since: None });
            let is_held = kept.tickets.iter().any(|ticket| {
                let asked = ticket.asked.as_ref();
                matches!(ticket.stage, Stage::Held(_))
                    && asked.is_some_and(|asked| asked.session == close.session)
            });
            // One that was begun for an idle session just now may wait for a member still.
            let is_new = close.requested_at.millis() > began + 70_000;
            assert!(is_new || (joins && is_held), "{close:?}");
        }
    }
}

fn reservation(ticket: &Ticket) -> u64 {
    let asked = ticket.asked.as_ref().unwrap();
    asked.terms.reservation.get()
}

impl StateMachineTest for Subject {
    type SystemUnderTest = Self;
    type Reference = Reference;

    fn init_test(reference: &<Self::Reference as ReferenceStateMachine>::State) -> Self {
        let mut subject = Self::new();
        for turn in &reference.turns {
            subject.take(turn);
        }
        subject
    }

    fn apply(mut state: Self, reference: &Reference, _: Step) -> Self {
        for turn in &reference.turns {
            state.take(turn);
        }
        state
    }

    fn teardown(state: Self, reference: Reference) {
        state.drain(&reference.model);
    }
}
