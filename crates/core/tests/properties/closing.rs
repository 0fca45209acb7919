//! What closes must hold to, checked after every turn from what comes out of the core and from what it
//! keeps. The reference does not know when calls go out; these rules do not depend on it.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_core::close::{
    CallFailure, CallId, CallResult, CallWhat, CloseIntent, CloseStage, EngineCall, TargetState,
};
use kvgate_core::command::Command;
use kvgate_core::effect::{CloseReply, Effect, Reply};
use kvgate_core::ids::{CloseId, CloseNo, EngineId, SessionId};
use kvgate_core::machine::{Kept, Machine};
use kvgate_core::tally::Tally;
use kvgate_core::ticket::Stage;

use crate::steps::Comes;

/// The engines' side of the calls, and a plain record of every intent.
#[derive(Clone, Debug, Default)]
pub struct Closing {
    /// Calls that have not come to an end.
    open: Vec<EngineCall>,
    /// All closes that were answered.
    known: Vec<CloseId>,
    /// Intents as they stood after the last turn.
    before: BTreeMap<CloseNo, CloseIntent>,
    /// Intents so far, failures, and outcomes of engines in intents that are done.
    taken: u64,
    failed: BTreeSet<CloseId>,
    ended: [u64; TargetState::ENDS.len()],
    /// A retry counts outcomes of the same engine again.
    retried: bool,
    /// Transport failures in a row, by engine.
    silent: BTreeMap<EngineId, u32>,
}

fn result(comes: Comes) -> CallResult {
    let code = match comes {
        Comes::Taken => 200,
        Comes::Absent => 404,
        Comes::Refused => 400,
        Comes::Later => 503,
        Comes::Silent => return CallResult::Failed(CallFailure::Timeout),
        Comes::TooLarge => return CallResult::Failed(CallFailure::TooLarge),
    };
    CallResult::Status { code, text: None }
}

impl Closing {
    /// Outcomes of open calls, picked by number.
    pub fn called(&mut self, picks: &[(u8, Comes)]) -> Command {
        let mut results = Vec::new();
        for (pick, comes) in picks {
            if self.open.is_empty() {
                break;
            }
            let call = self.open.remove(usize::from(*pick) % self.open.len());
            results.push(self.comes(call, *comes));
        }
        Command::Called(results)
    }

    fn comes(&mut self, call: EngineCall, comes: Comes) -> (CallId, CallResult) {
        let in_a_row = self.silent.entry(call.engine).or_default();
        match comes {
            Comes::Silent => *in_a_row += 1,
            _ => *in_a_row = 0,
        }
        (call.id, result(comes))
    }

    /// Every open call is taken.
    pub fn all_taken(&mut self) -> Option<Command> {
        let open = std::mem::take(&mut self.open);
        let results: Vec<_> = open
            .into_iter()
            .map(|call| self.comes(call, Comes::Taken))
            .collect();
        (!results.is_empty()).then_some(Command::Called(results))
    }

    /// A close of before, counted from the last.
    pub fn retry(&self, back: u8) -> CloseId {
        let at = self.known.len().checked_sub(1 + usize::from(back));
        let unknown = CloseId {
            number: CloseNo(0),
            salt: 0,
        };
        at.map_or(unknown, |at| self.known[at])
    }

    /// A start forgets the calls of before.
    pub fn started(&mut self) {
        self.open.clear();
        self.silent.clear();
    }

    pub fn take(&mut self, effects: &[Effect]) {
        for effect in effects {
            match effect {
                Effect::Call(call) => self.open.push(call.clone()),
                Effect::Reply {
                    reply: Reply::Close(CloseReply::Taken(close)),
                    ..
                } if !self.known.contains(&close.id) => self.known.push(close.id),
                Effect::Reply {
                    seq: Some(_),
                    reply: Reply::RetryClose(Ok(_)),
                    ..
                } => self.retried = true,
                _ => {}
            }
        }
    }

    /// All rules. The calls of this turn were taken.
    pub fn check(
        &mut self,
        effects: &[Effect],
        machine: &Machine,
        kept: &Kept,
        stored: &[CloseIntent],
    ) {
        let view = machine.view();
        let held: BTreeSet<&SessionId> = kept
            .tickets
            .iter()
            .filter(|ticket| matches!(ticket.stage, Stage::Held(_)))
            .filter_map(|ticket| Some(&ticket.asked.as_ref()?.session))
            .collect();
        self.check_calls(effects, &kept.closes, &held);
        self.check_lanes(effects);
        self.check_intents(effects, &kept.closes, &view.tally);
        check_goes_on(machine, &kept.closes, &held);
        check_stored(&kept.closes, stored);
        // An engine that left begins anew when it comes back, once nothing is asked of it.
        let asked = |engine: &EngineId| {
            let pending = |close: &CloseIntent| {
                let target = close.targets.get(engine);
                matches!(close.stage, CloseStage::Delivering { .. })
                    && target.is_some_and(|target| target.state == TargetState::Pending)
            };
            self.open.iter().any(|call| call.engine == *engine) || kept.closes.iter().any(pending)
        };
        self.silent.retain(|engine, _| {
            view.engines.iter().any(|member| member.id == *engine) || asked(engine)
        });
        let closes = kept.closes.iter().cloned();
        self.before = closes.map(|close| (close.id.number, close)).collect();
    }

    /// CLO3, CLO4, CLO8: a close goes out for an engine that is pending in an open intent of a session
    /// that was not used since, and while a lease is held only by the join time-out.
    fn check_calls(&self, effects: &[Effect], closes: &[CloseIntent], held: &BTreeSet<&SessionId>) {
        for effect in effects {
            let Effect::Call(EngineCall { engine, what, .. }) = effect else {
                continue;
            };
            let CallWhat::Close(session) = what else {
                continue;
            };
            let wanted = |close: &&CloseIntent| close.session == *session && !close.is_done();
            let close = closes.iter().find(wanted).expect("an open intent");
            assert!(close.reopened.is_none());
            let CloseStage::Delivering { early, .. } = close.stage else {
                panic!("{close:?} is not delivered");
            };
            assert_eq!(close.targets[engine].state, TargetState::Pending);
            assert_eq!(early, held.contains(session), "{close:?}");
            assert!(!early || close.timed_out);
        }
    }

    /// CLO6: at most 16 calls at once per engine, none twice, and one to an engine that is away.
    fn check_lanes(&self, effects: &[Effect]) {
        let sent: BTreeSet<&EngineId> = effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Call(call) => Some(&call.engine),
                _ => None,
            })
            .collect();
        for engine in sent {
            let open: Vec<&EngineCall> = self
                .open
                .iter()
                .filter(|call| call.engine == *engine)
                .collect();
            assert!(open.len() <= 16, "{engine:?}");
            if self.silent.get(engine).is_some_and(|times| *times >= 5) {
                assert_eq!(open.len(), 1, "one probe of {engine:?}");
            }
        }
    }

    /// CLO2, CLO5, CLO9: what is final stays so, and counters are those of the intents.
    fn check_intents(&mut self, effects: &[Effect], closes: &[CloseIntent], tally: &Tally) {
        for effect in effects {
            if let Effect::CloseDone(close) = effect {
                assert!(close.is_done());
                assert!(!close.has_failed() || close.failure_counted);
                for (sum, count) in self.ended.iter_mut().zip(close.counts) {
                    *sum += u64::from(count);
                }
            }
        }
        let mut open: BTreeMap<&SessionId, CloseNo> = BTreeMap::new();
        let mut ended = self.ended;
        for close in closes {
            let number = close.id.number;
            if !self.before.contains_key(&number) {
                self.taken += 1;
            }
            if close.failure_counted {
                self.failed.insert(close.id);
            }
            match (self.before.get(&number), close.stage) {
                (Some(before), stage) if before.stage == stage && !self.retried => {
                    for (engine, target) in &before.targets {
                        let settled = target.state != TargetState::Pending;
                        assert!(!settled || close.targets[engine] == *target, "{close:?}");
                    }
                }
                (Some(_) | None, _) => {}
            }
            if let CloseStage::Done { .. } = close.stage {
                assert!(
                    close
                        .targets
                        .values()
                        .all(|target| target.state != TargetState::Pending
                            && target.state != TargetState::Delivered)
                );
                continue;
            }
            let other = open.insert(&close.session, number);
            assert_eq!(other, None, "one open intent of a session");
            if let CloseStage::Delivering { early: false, .. } = close.stage {
                for target in close.targets.values() {
                    let at = TargetState::ENDS
                        .iter()
                        .position(|end| *end == target.state);
                    if let Some(at) = at {
                        ended[at] += 1;
                    }
                }
            }
        }
        assert_eq!(tally.closes, self.taken, "closes");
        assert_eq!(tally.close_failures, self.failed.len() as u64, "failures");
        if !self.retried {
            assert_eq!(tally.close_deliveries, ended, "outcomes");
        }
    }
}

/// Every open intent has a lease that is held, or a time at which it goes on.
fn check_goes_on(machine: &Machine, closes: &[CloseIntent], held: &BTreeSet<&SessionId>) {
    for close in closes.iter().filter(|close| !close.is_done()) {
        assert!(
            held.contains(&close.session) || machine.next_deadline().is_some(),
            "{close:?} is left alone"
        );
    }
}

/// Intents are stored as they stand; what is stored besides is done and was forgotten.
fn check_stored(closes: &[CloseIntent], stored: &[CloseIntent]) {
    let live: BTreeMap<CloseNo, &CloseIntent> = closes
        .iter()
        .map(|close| (close.id.number, close))
        .collect();
    for close in stored {
        match live.get(&close.id.number) {
            Some(live) => assert_eq!(*live, close, "a close as stored"),
            None => assert!(close.is_done()),
        }
    }
    assert!(live.len() <= stored.len(), "every close is stored");
}
