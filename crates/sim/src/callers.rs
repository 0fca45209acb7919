//! Careful callers, as the contract asks for them: they ask again by the same ticket, release with
//! retries, renew in time, and cancel in the background after they went on without an answer. And
//! what happens to them: they die, stay away, ask twice at once, and use a ticket once more.

use kvgate_core::close::{CloseMode, CloseReason};
use kvgate_core::command::{Acquire, CloseRequest};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Answer, Outcome};
use kvgate_core::ids::{Label, LeaseId, SessionId, TicketId};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Span, Tokens};

use crate::dice::Dice;

/// What a caller sends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    /// Ask for a lease and stay so many milliseconds.
    Acquire(Acquire, u64),
    /// Several acquires in one call that does not wait.
    Watch(Vec<TicketId>, u64),
    Release(LeaseId),
    Renew(LeaseId, Option<Span>),
    Cancel(TicketId),
    Close(CloseRequest),
}

/// What a caller is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Told {
    Answer(Answer),
    Conflict,
    Watched(Vec<(TicketId, Option<Answer>)>),
    /// To a release; gone or not, the lease is not held any more.
    Released,
    Renewed(bool),
    Cancelled,
    /// To a close.
    Closed,
    /// `store_unavailable`, `recovering` or `draining`.
    Unavailable,
    /// The connection broke.
    Broken,
}

/// What a caller wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Wish {
    /// Send it after so many milliseconds.
    Send(Call, u64),
    /// Wake me after so many milliseconds, unless I am somewhere else by then.
    Wake(u64, u64),
    /// I am gone; the other end hears of it, or does not.
    HangUp { heard: bool },
    /// For the report.
    Note(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    Asking,
    /// Holds a lease until the given time.
    Working(LeaseId, u64),
    /// Went on without one.
    Unheld,
    Releasing(LeaseId),
    Gone,
}

/// One caller.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    n: u64,
    phase: Phase,
    /// Which timer counts.
    step: u64,
    attempt: u64,
    asked: Option<Acquire>,
    retries: u64,
    working: u64,
    /// Its present program; each has a session of its own.
    program: u64,
    /// The session of that program was closed.
    closed: bool,
    retiring: bool,
}

/// How the callers of a run are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Largest usual reservation.
    pub(crate) tokens: u64,
    /// Longest work in milliseconds.
    pub(crate) work: u64,
    /// Longest pause between two attempts.
    pub(crate) think: u64,
    /// One in so many attempts ends in the caller's death.
    pub(crate) dies: u64,
}

impl Caller {
    pub(crate) fn new(n: u64) -> Self {
        Self {
            n,
            phase: Phase::Idle,
            step: 0,
            attempt: 0,
            asked: None,
            retries: 0,
            working: 0,
            program: 0,
            closed: false,
            retiring: false,
        }
    }

    /// No new attempts; what is under way is left where it stands.
    pub(crate) fn retire(&mut self) {
        self.retiring = true;
        self.phase = Phase::Gone;
        self.step += 1;
    }

    fn go(&mut self, phase: Phase, after: u64, out: &mut Vec<Wish>) {
        self.phase = phase;
        self.step += 1;
        out.push(Wish::Wake(after, self.step));
    }

    /// A timer rang.
    pub(crate) fn wake(
        &mut self,
        step: u64,
        now: u64,
        manner: Manner,
        dice: &mut Dice,
        out: &mut Vec<Wish>,
    ) {
        if step != self.step || self.retiring {
            return;
        }
        match self.phase {
            Phase::Idle | Phase::Gone => {
                self.begin(manner, dice);
                self.ask(dice, out);
            }
            Phase::Asking => {
                self.retries += 1;
                if self.retries > 4 {
                    self.fail_open(dice, out);
                } else {
                    out.push(Wish::Note("ask again without an answer"));
                    self.ask(dice, out);
                }
            }
            Phase::Working(lease, until) if now >= until => self.release(lease, dice, out),
            Phase::Working(lease, until) => {
                let ttl = dice
                    .one_in(6)
                    .then(|| Span::from_millis(dice.between(1_000, 90_000)));
                out.push(Wish::Send(Call::Renew(lease, ttl), 0));
                let next = self.renew_after(until.saturating_sub(now), dice);
                self.go(Phase::Working(lease, until), next, out);
            }
            Phase::Unheld => self.idle(manner, dice, out),
            Phase::Releasing(lease) => {
                self.retries += 1;
                if self.retries > 8 {
                    out.push(Wish::Note("release given up"));
                    self.idle(manner, dice, out);
                } else {
                    out.push(Wish::Note("release again without an answer"));
                    out.push(Wish::Send(Call::Release(lease), 0));
                    let after = 1_000_u64 << self.retries.min(4);
                    self.go(Phase::Releasing(lease), after, out);
                }
            }
        }
    }

    fn begin(&mut self, manner: Manner, dice: &mut Dice) {
        self.retries = 0;
        if let Some(asked) = &mut self.asked
            && dice.one_in(25)
        {
            // The same ticket once more, as it was or with other numbers.
            if dice.one_in(3) {
                asked.sent = Sent::Sum(Tokens::clamped(u128::from(dice.between(1, 50))));
            }
            return;
        }
        self.attempt += 1;
        let tokens = match dice.between(1, 40) {
            1 => 0,
            2 => manner.tokens.saturating_mul(50),
            3..=8 => dice.between(1, manner.tokens.saturating_mul(3)),
            _ => dice.between(1, manner.tokens),
        };
        let tokens = Tokens::clamped(u128::from(tokens));
        let sent = if dice.one_in(2) {
            Sent::Sum(tokens)
        } else {
            Sent::Parts {
                prompt: tokens,
                max_new: Tokens::clamped(u128::from(dice.between(0, 400))),
            }
        };
        // The next program has a session of its own; now and then one is used again after its close.
        if std::mem::take(&mut self.closed) && !dice.one_in(5) {
            self.program += 1;
        }
        let (Ok(ticket), Some(session)) = (
            TicketId::new(&format!("c{}-{}", self.n, self.attempt)),
            self.session(dice),
        ) else {
            return;
        };
        // Names that begin other names, and names that do not.
        let request_id = match dice.between(1, 4) {
            1 => None,
            2 => Label::new(&format!("x{}", self.attempt)).ok(),
            _ => Label::new(&format!("r{}-{}-", self.n, self.attempt)).ok(),
        };
        self.working = dice.between(50, manner.work);
        self.asked = Some(Acquire {
            ticket,
            session,
            sent,
            scope: if dice.one_in(8) {
                Scope::Eval
            } else {
                Scope::Train
            },
            protected: dice.one_in(50),
            ttl: Span::from_millis(dice.between(1_000, 90_000)),
            client: None,
            request_id,
            stays: true,
        });
    }

    /// Its own session, or one that several callers use at once.
    fn session(&self, dice: &mut Dice) -> Option<SessionId> {
        let name = if dice.one_in(8) {
            format!("shared-{}", dice.between(0, 2))
        } else {
            format!("s{}-{}", self.n, self.program)
        };
        SessionId::new(&name).ok()
    }

    /// Closes the session of the last attempt: once, twice, or once more when it is done by then.
    fn close(&mut self, how: &'static str, dice: &mut Dice, out: &mut Vec<Wish>) {
        let Some(session) = self.asked.as_ref().map(|asked| asked.session.clone()) else {
            return;
        };
        out.push(Wish::Note(how));
        self.closed = true;
        let request = CloseRequest {
            session,
            mode: if dice.one_in(3) {
                CloseMode::Abort
            } else {
                CloseMode::Join
            },
            reason: match dice.between(1, 3) {
                1 => None,
                2 => Some(CloseReason::Terminal),
                _ => Some(CloseReason::Dropped),
            },
        };
        if dice.one_in(5) {
            out.push(Wish::Note("closed twice"));
            let late = dice.pick(&[0, 400, 3_000, 30_000, 90_000], 0);
            let again = CloseRequest {
                mode: CloseMode::Abort,
                ..request.clone()
            };
            out.push(Wish::Send(Call::Close(again), late));
        }
        out.push(Wish::Send(Call::Close(request), 0));
    }

    /// An engine aborted the requests whose names begin so. Whose it was gives its lease back.
    pub(crate) fn aborted(&mut self, begin: &Label, dice: &mut Dice, out: &mut Vec<Wish>) {
        let asked = self.asked.as_ref();
        let hit = asked
            .and_then(|asked| asked.request_id.as_ref())
            .is_some_and(|own| own.as_str().starts_with(begin.as_str()));
        if let (true, Phase::Working(lease, _)) = (hit, self.phase) {
            out.push(Wish::Note("aborted at work"));
            self.release(lease, dice, out);
        }
    }

    fn ask(&mut self, dice: &mut Dice, out: &mut Vec<Wish>) {
        let Some(asked) = &self.asked else { return };
        let mut acquire = asked.clone();
        let wait = dice.pick(&[0, 1_000, 5_000, 25_000], 5_000);
        acquire.stays = wait > 0;
        if self.retries > 0 && dice.one_in(6) {
            let watch = Call::Watch(vec![acquire.ticket.clone()], wait.max(1_000));
            out.push(Wish::Send(watch, 0));
            out.push(Wish::Note("watch"));
        } else {
            if dice.one_in(15) {
                out.push(Wish::Note("duplicate acquire"));
                let late = dice.between(0, 300);
                out.push(Wish::Send(Call::Acquire(acquire.clone(), wait), late));
            }
            out.push(Wish::Send(Call::Acquire(acquire, wait), 0));
        }
        let patience = wait + dice.between(500, 4_000);
        self.go(Phase::Asking, patience, out);
        if dice.one_in(60) {
            out.push(Wish::Note("cancel races with the acquire"));
            let late = dice.between(0, 3_000);
            if let Some(asked) = &self.asked {
                out.push(Wish::Send(Call::Cancel(asked.ticket.clone()), late));
            }
        }
        if dice.one_in(70) {
            self.die(dice, "died while asking", out);
        }
    }

    fn die(&mut self, dice: &mut Dice, how: &'static str, out: &mut Vec<Wish>) {
        out.push(Wish::Note(how));
        out.push(Wish::HangUp {
            heard: !dice.one_in(3),
        });
        // Another process begins with new tickets.
        self.go(Phase::Gone, dice.between(2_000, 60_000), out);
    }

    fn idle(&mut self, manner: Manner, dice: &mut Dice, out: &mut Vec<Wish>) {
        if !self.closed && dice.one_in(4) {
            self.close("closed at the end", dice, out);
        }
        if dice.one_in(80)
            && let Ok(session) = SessionId::new(&format!("never-{}-{}", self.n, self.attempt))
        {
            out.push(Wish::Note("closed an unknown session"));
            let request = CloseRequest {
                session,
                mode: CloseMode::Join,
                reason: None,
            };
            out.push(Wish::Send(Call::Close(request), 0));
        }
        self.go(Phase::Idle, dice.between(10, manner.think), out);
    }

    /// No answer that could be used: go on, and withdraw the ticket behind it.
    fn fail_open(&mut self, dice: &mut Dice, out: &mut Vec<Wish>) {
        out.push(Wish::Note("failed open"));
        if let Some(asked) = &self.asked
            && !dice.one_in(5)
        {
            for late in [10, 2_000, 15_000] {
                let late = late + dice.between(0, 500);
                out.push(Wish::Send(Call::Cancel(asked.ticket.clone()), late));
            }
        }
        self.go(Phase::Unheld, self.working, out);
    }

    fn renew_after(&self, left: u64, dice: &mut Dice) -> u64 {
        let ttl = self
            .asked
            .as_ref()
            .map_or(1_000, |asked| asked.ttl.millis());
        // One that is too busy renews too late.
        let third = if dice.one_in(15) { ttl * 2 } else { ttl / 3 };
        third.max(300).min(left)
    }

    fn release(&mut self, lease: LeaseId, dice: &mut Dice, out: &mut Vec<Wish>) {
        self.retries = 0;
        match dice.between(1, 40) {
            1 => return self.die(dice, "died with a lease", out),
            2 => {
                if let Some(asked) = &self.asked {
                    out.push(Wish::Note("cancel instead of release"));
                    out.push(Wish::Send(Call::Cancel(asked.ticket.clone()), 0));
                }
            }
            3..=6 => {
                out.push(Wish::Note("released twice at once"));
                let late = dice.between(0, 1_500);
                out.push(Wish::Send(Call::Release(lease), late));
            }
            _ => {}
        }
        out.push(Wish::Send(Call::Release(lease), 0));
        self.go(Phase::Releasing(lease), 2_000, out);
    }

    /// An answer came in; it may be old.
    pub(crate) fn told(
        &mut self,
        told: &Told,
        now: u64,
        manner: Manner,
        dice: &mut Dice,
        out: &mut Vec<Wish>,
    ) {
        match told {
            Told::Answer(answer) => self.answered(answer, now, manner, dice, out),
            Told::Watched(results) => {
                for (ticket, answer) in results {
                    match answer {
                        Some(answer) => self.answered(answer, now, manner, dice, out),
                        None if self.asks(ticket) => self.ask(dice, out),
                        None => {}
                    }
                }
                if results.is_empty() && self.phase == Phase::Asking {
                    self.ask(dice, out);
                }
            }
            Told::Conflict | Told::Cancelled => {
                if self.phase == Phase::Asking {
                    self.idle(manner, dice, out);
                }
            }
            Told::Released => {
                if matches!(self.phase, Phase::Releasing(_)) {
                    self.idle(manner, dice, out);
                }
            }
            Told::Renewed(true) | Told::Closed => {}
            Told::Renewed(false) => {
                if let Phase::Working(..) = self.phase {
                    out.push(Wish::Note("lease lost while working"));
                    self.go(Phase::Unheld, self.working / 2, out);
                }
            }
            Told::Unavailable => match self.phase {
                Phase::Asking => self.fail_open(dice, out),
                Phase::Releasing(lease) => {
                    self.go(Phase::Releasing(lease), dice.between(500, 3_000), out);
                }
                _ => {}
            },
            Told::Broken => match self.phase {
                Phase::Asking => self.go(Phase::Asking, dice.between(20, 2_000), out),
                Phase::Releasing(lease) => {
                    self.go(Phase::Releasing(lease), dice.between(200, 3_000), out);
                }
                _ => {}
            },
        }
    }

    fn asks(&self, ticket: &TicketId) -> bool {
        self.phase == Phase::Asking
            && self
                .asked
                .as_ref()
                .is_some_and(|asked| asked.ticket == *ticket)
    }

    fn answered(
        &mut self,
        answer: &Answer,
        now: u64,
        manner: Manner,
        dice: &mut Dice,
        out: &mut Vec<Wish>,
    ) {
        if !self.asks(&answer.ticket) {
            // An admit that came too late is given back.
            if let (Outcome::Admit { lease, .. }, false) = (&answer.outcome, self.retiring)
                && !matches!(self.phase, Phase::Gone)
                && !matches!(self.phase, Phase::Working(own, _) | Phase::Releasing(own) if own == *lease)
            {
                out.push(Wish::Note("admit after failing open"));
                out.push(Wish::Send(Call::Release(*lease), 10));
            }
            return;
        }
        match &answer.outcome {
            Outcome::Admit { lease, .. } => {
                if dice.one_in(manner.dies) {
                    return self.die(dice, "vanished at the grant", out);
                }
                if dice.one_in(14) {
                    self.close("closed too early", dice, out);
                }
                let until = now + self.working;
                let next = self.renew_after(self.working, dice);
                self.go(Phase::Working(*lease, until), next, out);
            }
            Outcome::Bypass(_) => self.go(Phase::Unheld, self.working, out),
            Outcome::Cancelled(_) => self.idle(manner, dice, out),
            Outcome::Wait(_) => {
                self.retries = 1;
                match dice.between(1, 40) {
                    1 | 2 => {
                        out.push(Wish::Note("stayed away from the line"));
                        self.go(Phase::Asking, dice.between(8_000, 30_000), out);
                    }
                    4 => {
                        self.close("closed while waiting", dice, out);
                        self.go(Phase::Asking, dice.between(5, 1_500), out);
                    }
                    3 => {
                        if let Some(asked) = &self.asked {
                            out.push(Wish::Note("gave up waiting"));
                            out.push(Wish::Send(Call::Cancel(asked.ticket.clone()), 0));
                        }
                        self.idle(manner, dice, out);
                    }
                    _ => self.go(Phase::Asking, dice.between(5, 1_500), out),
                }
            }
        }
    }
}
