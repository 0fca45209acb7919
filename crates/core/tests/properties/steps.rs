//! Random steps of virtual time, and what the reference makes of them.

use std::collections::BTreeSet;
use std::fmt;

use kvgate_core::decision::Scope;
use kvgate_core::ids::{EngineId, Issue, LeaseId, SessionId, TicketId};
use proptest::prelude::*;
use proptest::sample::select;
use proptest_state_machine::ReferenceStateMachine;

use crate::model::{
    Ask, Gauges, Listed, Model, Numbers, Round, Settings, Shown, Turned, Wish, Wishes,
};

pub const T0: u64 = 1_700_000_000_000;
pub const TICKETS: u8 = 12;

/// One transition.
#[derive(Clone, Debug)]
pub enum Step {
    /// Time passes, then one turn of these commands.
    Turn { after: u64, commands: Vec<Command> },
    /// Time passes in turns of half a second, with a good reading round each second.
    Calm { seconds: u64 },
    /// An orderly stop and a start, which may find other settings in its file, or may be told to return
    /// to them.
    Restart {
        after: u64,
        down: u64,
        configured: Option<Settings>,
        resets: bool,
    },
}

#[derive(Clone, Debug)]
pub enum Command {
    Acquire {
        ticket: u8,
        /// Another session or other numbers than this ticket has as a rule.
        odd: Option<u8>,
        eval: bool,
        protected: bool,
        ttl: u64,
        stays: bool,
    },
    Leave(u8),
    Gone(u8),
    Delivered(u8, Which),
    Undelivered(u8, Which),
    DeliverAll,
    Watch(Vec<u8>),
    Release(Which),
    Renew(Which, Option<u64>),
    Revoke(Which),
    Cancel(u8),
    ReadTicket(u8),
    ReadLease(Which),
    Round(RoundPlan),
    Configure(Wishes),
    /// As an operator.
    CancelAs(u8),
    /// Ends a session; aborts with `true`.
    Close(u8, bool),
    CloseAs(u8, bool),
    /// A close of before, counted from the last.
    RetryClose(u8),
    RetryCloseAs(u8),
    /// Open calls come to something, picked by number.
    Called(Vec<(u8, Comes)>),
}

/// What a call to an engine comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Comes {
    Taken,
    Absent,
    Refused,
    Later,
    Silent,
    TooLarge,
}

/// A lease, named so that shrinking does not change its meaning more than it must.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    /// The lease that this ticket holds; none when it holds none.
    Of(u8),
    /// One that was issued, counted from the last.
    Past(u8),
    /// One that was not issued here.
    Never(u64, u64),
    /// No lease at all: a bypass.
    None,
}

#[derive(Clone, Debug)]
pub struct RoundPlan {
    pub old: bool,
    pub router: u8,
    pub engines: [EnginePlan; 3],
}

#[derive(Clone, Copy, Debug)]
pub struct EnginePlan {
    pub listed: bool,
    pub prefill: bool,
    pub healthy: bool,
    pub answers: bool,
    pub capacity: u64,
    pub usage: Option<u32>,
    pub running: Option<u64>,
    pub queued: u64,
    pub counters: Option<u64>,
    pub mark: Option<u64>,
    pub worker: Option<u8>,
}

impl EnginePlan {
    pub const CALM: Self = Self {
        listed: true,
        prefill: false,
        healthy: true,
        answers: true,
        capacity: 500_000,
        usage: Some(500_000),
        running: Some(1),
        queued: 0,
        counters: None,
        mark: None,
        worker: None,
    };
}

/// A command with its names resolved, as the reference and the core are given it.
#[derive(Clone, Debug)]
pub enum Resolved {
    Acquire(Ask),
    Leave(TicketId),
    Gone(TicketId),
    Delivered(TicketId, Option<LeaseId>),
    Undelivered(TicketId, Option<LeaseId>),
    Watch(Vec<TicketId>),
    Release(LeaseId),
    Renew(LeaseId, Option<u64>),
    Revoke(LeaseId),
    Cancel(TicketId),
    ReadTicket(TicketId),
    ReadLease(LeaseId),
    Round(Round),
    Configure(Wishes),
    CancelAs(TicketId),
    CloseAs(SessionId, bool),
    RetryCloseAs(u8),
    Close(SessionId, bool),
    RetryClose(u8),
    Called(Vec<(u8, Comes)>),
}

/// One turn as both sides take it, and what the reference said.
#[derive(Clone, Debug)]
pub struct Turn {
    pub now: u64,
    pub commands: Vec<Resolved>,
    pub turned: Turned,
    pub kind: Kind,
    /// The reference after the turn.
    pub after: Model,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Ordinary,
    Last,
    Start,
}

/// The reference, and the turns of the last transition.
#[derive(Clone)]
pub struct Reference {
    pub model: Model,
    pub turns: Vec<Turn>,
}

/// The steps of a failing case say enough.
impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reference")
    }
}

pub fn engine(number: usize) -> EngineId {
    EngineId::new(&format!("http://engine-{number}:30000"))
}

pub fn ticket(number: u8) -> TicketId {
    TicketId::new(&format!("t{number}")).unwrap()
}

/// Tickets share a few sessions.
pub fn session(number: u8) -> SessionId {
    SessionId::new(&format!("s{}", number % 4)).unwrap()
}

/// Two engines that the router lists and one that the operator named as well.
pub fn static_engines() -> Vec<EngineId> {
    vec![engine(2)]
}

pub fn settings() -> Settings {
    Settings {
        on: true,
        paused: false,
        headroom: 900_000,
        threshold: 920_000,
        decode_cap: None,
        max_wait: 30_000,
        all_scopes: true,
        grace: 10_000,
        max_waiting: 8,
        stale_after: 6_000,
        closes: true,
        join_timeout: Some(20_000),
        idle_close: None,
    }
}

fn numbers(number: u8) -> Numbers {
    match number % 10 {
        0 => Numbers::Sum(0),
        1 => Numbers::Sum(100_000),
        2 => Numbers::Sum(300_000),
        3 => Numbers::Sum(450_000),
        4 => Numbers::Sum(900_000),
        5 => Numbers::Parts(100_000, 300_000),
        6 => Numbers::Parts(50_000, 1_000_000),
        7 => Numbers::Sum(1_400_000),
        8 => Numbers::Parts((1 << 53) - 1, 1),
        _ => Numbers::Sum(1),
    }
}

impl Reference {
    pub fn new() -> Self {
        Self {
            model: Model::new(T0, settings(), static_engines()),
            turns: Vec::new(),
        }
    }

    fn which(&self, which: Which) -> Option<LeaseId> {
        let issued = &self.model.issued;
        match which {
            Which::Of(number) => self.model.lease_of(&ticket(number)),
            Which::Past(back) => issued
                .len()
                .checked_sub(1 + usize::from(back))
                .map(|index| issued[index]),
            Which::Never(issue, salt) => Some(LeaseId {
                issue: Issue(issue),
                salt,
            }),
            Which::None => None,
        }
    }

    fn lease(&self, which: Which) -> LeaseId {
        self.which(which).unwrap_or(LeaseId {
            issue: Issue(0),
            salt: 0,
        })
    }

    /// What the command means now, so that both sides are given the same.
    fn resolve(&self, command: &Command) -> Vec<Resolved> {
        vec![match command {
            Command::Acquire {
                ticket: number,
                odd,
                eval,
                protected,
                ttl,
                stays,
            } => Resolved::Acquire(Ask {
                ticket: ticket(*number),
                session: session(match odd {
                    Some(0) => number.wrapping_add(1),
                    _ => *number,
                }),
                numbers: numbers(match odd {
                    None | Some(0) => *number,
                    Some(odd) => number.wrapping_add(*odd),
                }),
                scope: if *eval { Scope::Eval } else { Scope::Train },
                protected: *protected,
                ttl: *ttl,
                stays: *stays,
            }),
            Command::Leave(number) => Resolved::Leave(ticket(*number)),
            Command::Gone(number) => Resolved::Gone(ticket(*number)),
            Command::Delivered(number, lease) => {
                Resolved::Delivered(ticket(*number), self.which(*lease))
            }
            Command::Undelivered(number, lease) => {
                Resolved::Undelivered(ticket(*number), self.which(*lease))
            }
            Command::DeliverAll => {
                let open = self.model.undelivered().into_iter();
                return open
                    .map(|(ticket, lease)| Resolved::Delivered(ticket, Some(lease)))
                    .collect();
            }
            Command::Watch(numbers) => {
                Resolved::Watch(numbers.iter().map(|number| ticket(*number)).collect())
            }
            Command::Release(which) => Resolved::Release(self.lease(*which)),
            Command::Renew(which, ttl) => Resolved::Renew(self.lease(*which), *ttl),
            Command::Revoke(which) => Resolved::Revoke(self.lease(*which)),
            Command::Cancel(number) => Resolved::Cancel(ticket(*number)),
            Command::ReadTicket(number) => Resolved::ReadTicket(ticket(*number)),
            Command::ReadLease(which) => Resolved::ReadLease(self.lease(*which)),
            Command::Round(plan) => Resolved::Round(self.round(plan)),
            Command::Configure(wishes) => Resolved::Configure(wishes.clone()),
            Command::CancelAs(number) => Resolved::CancelAs(ticket(*number)),
            Command::CloseAs(number, abort) => Resolved::CloseAs(session(*number), *abort),
            Command::RetryCloseAs(back) => Resolved::RetryCloseAs(*back),
            Command::Close(number, abort) => Resolved::Close(session(*number), *abort),
            Command::RetryClose(back) => Resolved::RetryClose(*back),
            Command::Called(picks) => Resolved::Called(picks.clone()),
        }]
    }

    fn round(&self, plan: &RoundPlan) -> Round {
        let now = self.model.now;
        let engines = || (0..).zip(&plan.engines);
        Round {
            began_at: if plan.old { now - 15_000 } else { now },
            router: match plan.router {
                0 => Shown::Silent,
                1 => Shown::Lists(Vec::new()),
                _ => Shown::Lists(
                    engines()
                        .filter(|(_, plan)| plan.listed)
                        .map(|(number, plan)| Listed {
                            engine: engine(number),
                            counts: !plan.prefill,
                            healthy: plan.healthy,
                            ids: plan.worker.iter().map(|id| format!("w{id}")).collect(),
                        })
                        .collect(),
                ),
            },
            readings: engines()
                .map(|(number, plan)| {
                    let gauges = plan.answers.then(|| Gauges {
                        capacity: plan.capacity,
                        usage: plan.usage,
                        idle: plan.running == Some(0) && plan.queued == 0,
                        counters: plan.counters.map(|count| (count, 7)),
                    });
                    (engine(number), gauges)
                })
                .collect(),
            marks: engines()
                .filter_map(|(number, plan)| Some((engine(number), plan.mark?)))
                .collect(),
        }
    }

    fn give(&mut self, command: Resolved) {
        let model = &mut self.model;
        match command {
            Resolved::Acquire(ask) => model.acquire(ask),
            Resolved::Leave(ticket) => model.leave(ticket),
            Resolved::Gone(ticket) => model.gone(&ticket),
            Resolved::Delivered(ticket, lease) => model.delivered(&ticket, lease),
            Resolved::Undelivered(ticket, lease) => model.undelivered_one(&ticket, lease),
            Resolved::Watch(tickets) => model.watch(&tickets),
            Resolved::Release(lease) => model.release(lease),
            Resolved::Renew(lease, ttl) => model.renew(lease, ttl),
            Resolved::Revoke(lease) => model.revoke(lease),
            Resolved::Cancel(ticket) => model.cancel(ticket),
            Resolved::ReadTicket(ticket) => model.read(&ticket),
            Resolved::ReadLease(lease) => model.read_lease(lease),
            Resolved::Round(round) => model.round(round),
            Resolved::Configure(wishes) => model.configure(&wishes),
            Resolved::CancelAs(ticket) => model.cancel_as(ticket),
            Resolved::Close(session, _) | Resolved::CloseAs(session, _) => model.close(session),
            Resolved::RetryClose(_) | Resolved::RetryCloseAs(_) => model.retry(),
            Resolved::Called(_) => model.called(),
        }
    }

    fn turn(&mut self, after: u64, commands: &[Command], kind: Kind) {
        let now = self.model.now + after;
        self.model.begin(now);
        let mut given = Vec::new();
        for command in commands {
            for resolved in self.resolve(command) {
                self.give(resolved.clone());
                given.push(resolved);
            }
        }
        let turned = match kind {
            Kind::Ordinary | Kind::Start => self.model.finish(),
            Kind::Last => self.model.finish_last(),
        };
        self.turns.push(Turn {
            now,
            commands: given,
            turned,
            kind,
            after: self.model.clone(),
        });
    }

    /// The step applied, with the turns that it made.
    pub fn step(mut self, step: &Step) -> Self {
        self.turns.clear();
        match step {
            Step::Turn { after, commands } => self.turn(*after, commands, Kind::Ordinary),
            Step::Calm { seconds } => {
                let calm = Command::Round(RoundPlan {
                    old: false,
                    router: 2,
                    engines: [EnginePlan::CALM; 3],
                });
                for _ in 0..*seconds {
                    self.turn(500, &[], Kind::Ordinary);
                    self.turn(500, std::slice::from_ref(&calm), Kind::Ordinary);
                }
            }
            Step::Restart {
                after,
                down,
                configured,
                resets,
            } => {
                self.turn(*after, &[], Kind::Last);
                let now = self.model.now + *down;
                let turned = self.model.start(now, configured.clone(), *resets);
                self.turns.push(Turn {
                    now,
                    commands: Vec::new(),
                    turned,
                    kind: Kind::Start,
                    after: self.model.clone(),
                });
            }
        }
        self
    }
}

// ---- strategies ------------------------------------------------------------------------------

fn number() -> impl Strategy<Value = u8> {
    0..TICKETS
}

fn which() -> impl Strategy<Value = Which> {
    prop_oneof![
        8 => number().prop_map(Which::Of),
        4 => (0u8..12).prop_map(Which::Past),
        1 => (0u64..20, 0u64..6).prop_map(|(issue, salt)| Which::Never(issue, salt)),
    ]
}

fn delivered() -> impl Strategy<Value = (u8, Which)> {
    number().prop_flat_map(|number| {
        (
            Just(number),
            prop_oneof![6 => Just(Which::Of(number)), 3 => Just(Which::None), 1 => which()],
        )
    })
}

fn life() -> impl Strategy<Value = u64> {
    select(vec![1_000, 5_000, 20_000, 60_000, 600_000])
}

fn acquire() -> impl Strategy<Value = Command> {
    (
        number(),
        prop_oneof![14 => Just(None), 1 => (0u8..10).prop_map(Some)],
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.05),
        life(),
        prop::bool::weighted(0.6),
    )
        .prop_map(
            |(ticket, odd, eval, protected, ttl, stays)| Command::Acquire {
                ticket,
                odd,
                eval,
                protected,
                ttl,
                stays,
            },
        )
}

fn engine_plan() -> impl Strategy<Value = EnginePlan> {
    let mostly = |share| prop::bool::weighted(share);
    let size = select(vec![0, 1, 300_000, 500_000, 500_000, 500_000, 1_000_000]);
    let usage = select(vec![
        None,
        Some(100_000),
        Some(500_000),
        Some(919_999),
        Some(920_000),
        Some(1_000_000),
    ]);
    let running = select(vec![None, Some(0), Some(3), Some(3)]);
    (
        (mostly(0.85), mostly(0.05), mostly(0.85), mostly(0.8)),
        (size, usage, running, 0u64..2),
        (
            prop_oneof![2 => Just(None), 1 => (0u64..4).prop_map(Some)],
            prop_oneof![3 => Just(None), 1 => (0u64..2).prop_map(Some)],
            prop_oneof![3 => Just(None), 1 => (0u8..2).prop_map(Some)],
        ),
    )
        .prop_map(
            |((listed, prefill, healthy, answers), (capacity, usage, running, queued), signs)| {
                let (counters, mark, worker) = signs;
                EnginePlan {
                    listed,
                    prefill,
                    healthy,
                    answers,
                    capacity,
                    usage,
                    running,
                    queued,
                    counters,
                    mark,
                    worker,
                }
            },
        )
}

fn round() -> impl Strategy<Value = Command> {
    let engines = prop_oneof![
        3 => Just([EnginePlan::CALM; 3]),
        2 => [engine_plan(), engine_plan(), engine_plan()],
    ];
    (
        prop::bool::weighted(0.1),
        select(vec![0, 1, 2, 2, 2, 2, 2, 2, 2, 2]),
        engines,
    )
        .prop_map(|(old, router, engines)| {
            Command::Round(RoundPlan {
                old,
                router,
                engines,
            })
        })
}

fn wish<T: std::fmt::Debug + Clone>(
    value: impl Strategy<Value = T>,
) -> impl Strategy<Value = Wish<T>> {
    prop_oneof![
        6 => Just(Wish::Stay),
        1 => Just(Wish::AsConfigured),
        2 => value.prop_map(Wish::Be),
    ]
}

/// Some wishes cannot be while admission is on.
fn wishes() -> impl Strategy<Value = Wishes> {
    (
        wish(prop::bool::weighted(0.9)),
        wish(prop::bool::weighted(0.5)),
        wish(select(vec![0, 1, 450_000, 900_000, 1_000_000])),
        wish(select(vec![0, 500_000, 920_000, 920_000, 1_000_000])),
        wish(select(vec![None, Some(0), Some(1), Some(200_000)])),
        wish(select(vec![0, 5_000, 30_000, 120_000])),
        wish(any::<bool>()),
        wish(prop::bool::weighted(0.7)),
    )
        .prop_map(
            |(on, paused, headroom, threshold, decode_cap, max_wait, all_scopes, closes)| Wishes {
                on,
                paused,
                headroom,
                threshold,
                decode_cap,
                max_wait,
                all_scopes,
                closes,
            },
        )
}

fn configure() -> impl Strategy<Value = Command> {
    let nothing = Wishes {
        on: Wish::AsConfigured,
        paused: Wish::AsConfigured,
        headroom: Wish::AsConfigured,
        threshold: Wish::AsConfigured,
        decode_cap: Wish::AsConfigured,
        max_wait: Wish::AsConfigured,
        all_scopes: Wish::AsConfigured,
        closes: Wish::AsConfigured,
    };
    prop_oneof![2 => wishes(), 1 => Just(nothing)].prop_map(Command::Configure)
}

/// What a start may find in its file.
fn configured() -> impl Strategy<Value = Settings> {
    let changed = (
        prop::bool::weighted(0.9),
        Just(false),
        select(vec![1, 450_000, 900_000, 900_000, 1_000_000]),
        select(vec![500_000, 920_000, 920_000, 1_000_000]),
        select(vec![None, None, Some(1), Some(200_000)]),
        select(vec![0, 5_000, 30_000, 30_000, 120_000]),
        prop::bool::weighted(0.8),
        select(vec![1_000, 10_000, 10_000, 60_000]),
        select(vec![1, 3, 8, 8]),
        select(vec![1_000, 6_000, 6_000, 30_000]),
        prop::bool::weighted(0.8),
        (
            select(vec![None, Some(0), Some(5_000), Some(60_000)]),
            select(vec![None, None, Some(5_000), Some(90_000)]),
        ),
    )
        .prop_map(
            |(
                on,
                paused,
                headroom,
                threshold,
                decode_cap,
                max_wait,
                all_scopes,
                grace,
                max_waiting,
                stale_after,
                closes,
                (join_timeout, idle_close),
            )| {
                Settings {
                    on,
                    paused,
                    headroom,
                    threshold,
                    decode_cap,
                    max_wait,
                    all_scopes,
                    grace,
                    max_waiting,
                    stale_after,
                    closes,
                    join_timeout,
                    idle_close,
                }
            },
        );
    prop_oneof![1 => changed, 1 => Just(settings())]
}

fn comes() -> impl Strategy<Value = Comes> {
    prop_oneof![
        4 => Just(Comes::Taken),
        1 => Just(Comes::Absent),
        1 => Just(Comes::Refused),
        2 => Just(Comes::Later),
        4 => Just(Comes::Silent),
        1 => Just(Comes::TooLarge),
    ]
}

/// Outcomes of calls; at times whatever is open goes unanswered.
fn called() -> impl Strategy<Value = Command> {
    let silent = (any::<u8>(), Just(Comes::Silent));
    prop_oneof![
        2 => prop::collection::vec((any::<u8>(), comes()), 1..8),
        1 => prop::collection::vec(silent, 4..24),
    ]
    .prop_map(Command::Called)
}

fn command() -> impl Strategy<Value = Command> {
    prop_oneof![
        24 => acquire(),
        3 => number().prop_map(Command::Leave),
        4 => number().prop_map(Command::Gone),
        4 => delivered().prop_map(|(number, which)| Command::Delivered(number, which)),
        5 => delivered().prop_map(|(number, which)| Command::Undelivered(number, which)),
        3 => Just(Command::DeliverAll),
        3 => prop::collection::vec(number(), 1..4).prop_map(Command::Watch),
        7 => which().prop_map(Command::Release),
        4 => (which(), prop::option::of(life())).prop_map(|(which, ttl)| Command::Renew(which, ttl)),
        1 => which().prop_map(Command::Revoke),
        4 => number().prop_map(Command::Cancel),
        1 => number().prop_map(Command::CancelAs),
        1 => (0u8..4, any::<bool>()).prop_map(|(number, abort)| Command::CloseAs(number, abort)),
        1 => (0u8..6).prop_map(Command::RetryCloseAs),
        3 => number().prop_map(Command::ReadTicket),
        1 => which().prop_map(Command::ReadLease),
        8 => round(),
        2 => configure(),
        6 => (0u8..4, prop::bool::weighted(0.3)).prop_map(|(number, abort)| Command::Close(number, abort)),
        1 => (0u8..6).prop_map(Command::RetryClose),
        7 => called(),
    ]
}

fn after() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => Just(0),
        6 => 1u64..=1_000,
        1 => 1_001u64..20_000,
        1 => select(vec![1_000, 1_001, 6_000, 10_000, 30_000, 60_000, 600_000]),
    ]
}

pub fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        14 => (after(), prop::collection::vec(command(), 0..6))
            .prop_map(|(after, commands)| Step::Turn { after, commands }),
        3 => (1u64..12).prop_map(|seconds| Step::Calm { seconds }),
        1 => (
            0u64..2_000,
            prop_oneof![4 => 0u64..5_000, 2 => 5_000u64..100_000, 1 => Just(700_000)],
            prop::option::of(configured()),
            prop::bool::weighted(0.1),
        )
            .prop_map(|(after, down, configured, resets)| Step::Restart {
                after,
                down,
                configured,
                resets,
            }),
    ]
}

impl ReferenceStateMachine for Reference {
    type State = Self;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Self> {
        // One good round first, so that most sequences begin with a fleet.
        Just(Self::new().step(&Step::Calm { seconds: 1 })).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Step> {
        step().boxed()
    }

    fn apply(state: Self, step: &Step) -> Self {
        state.step(step)
    }
}

/// All tickets that a sequence can name.
pub fn all_tickets() -> BTreeSet<TicketId> {
    (0..TICKETS).map(ticket).collect()
}
