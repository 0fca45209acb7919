use std::collections::BTreeSet;
use std::sync::Arc;

use kvgate_core::audit::AuditAct;
use kvgate_core::close::{
    CallFailure, CallResult, CloseMode, CloseReason, CloseStage, Reopened, Target,
};
use kvgate_core::decision::{BypassReason, EndHow, Scope};
use kvgate_core::effect::CancelOutcome;
use kvgate_core::ids::{
    AuditNo, CloseId, CloseNo, EngineId, Label, LeaseId, RowNo, Seq, SessionId, StepNo, TicketId,
};
use kvgate_core::policy::AdmissionScope;
use kvgate_core::reading::{Role, StartMark};
use kvgate_core::report::Standing;
use kvgate_core::settings::{Moved, Setting, SettingValue};
use kvgate_core::state::{EngineRow, Start};
use kvgate_core::tally::Tally;
use kvgate_core::ticket::{Asked, Ended, Lease, Sent, Terms, Ticket};
use kvgate_core::units::{Ppm, Span, Tokens};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;

use super::*;

fn copy(image: &Image) -> Vec<u8> {
    CopyPieces::new(image.clone()).flatten().collect()
}

fn read(bytes: &[u8]) -> Result<Image, CopyError> {
    read_copy(bytes)
}

fn text() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{1,24}".prop_filter("a path step", |text| text != "." && text != "..")
}

fn at() -> impl Strategy<Value = Timestamp> {
    any::<u64>().prop_map(Timestamp::from_millis)
}

fn span() -> impl Strategy<Value = Span> {
    any::<u64>().prop_map(Span::from_millis)
}

fn tokens() -> impl Strategy<Value = Tokens> {
    (0..=Tokens::MAX.get()).prop_map(|count| Tokens::new(count).unwrap())
}

fn epoch() -> impl Strategy<Value = Epoch> {
    any::<u64>().prop_map(Epoch)
}

fn label() -> impl Strategy<Value = Option<Label>> {
    option::of(text().prop_map(|text| Label::new(&text).unwrap()))
}

fn asked() -> impl Strategy<Value = Asked> {
    let sent = prop_oneof![
        (tokens(), tokens()).prop_map(|(prompt, max_new)| Sent::Parts { prompt, max_new }),
        tokens().prop_map(Sent::Sum),
    ];
    let scope = prop_oneof![Just(Scope::Train), Just(Scope::Eval)];
    (text(), sent, tokens(), scope, span(), label(), label()).prop_map(
        |(session, sent, reservation, scope, ttl, client, request_id)| Asked {
            session: SessionId::new(&session).unwrap(),
            sent,
            terms: Terms {
                reservation,
                scope,
                ttl,
                client,
                request_id,
            },
        },
    )
}

fn how() -> impl Strategy<Value = EndHow> {
    let reason = prop::sample::select(BypassReason::ALL.to_vec());
    prop_oneof![
        Just(EndHow::Released),
        Just(EndHow::Cancelled),
        Just(EndHow::SessionClosed),
        Just(EndHow::Expired),
        Just(EndHow::Revoked),
        Just(EndHow::Dropped),
        Just(EndHow::TakenBack),
        reason.prop_map(EndHow::Bypassed),
    ]
}

fn lease_id() -> impl Strategy<Value = LeaseId> {
    (1..1_u64 << 40, any::<u64>()).prop_map(|(issue, salt)| LeaseId {
        issue: Issue(issue),
        salt,
    })
}

/// A ticket whose row and lease number are put in order later.
fn ticket() -> impl Strategy<Value = Ticket> {
    let waiting = at().prop_map(|since| Stage::Waiting { since });
    let held = (
        lease_id(),
        epoch(),
        at(),
        option::of(span()),
        span(),
        at(),
        any::<bool>(),
    )
        .prop_map(|(id, epoch, granted_at, waited, ttl, ends_at, graced)| {
            Stage::Held(Lease {
                id,
                epoch,
                granted_at,
                waited,
                ttl,
                ends_at,
                graced,
            })
        });
    let ended = (
        at(),
        how(),
        option::of(lease_id()),
        option::of(at()),
        span(),
        epoch(),
    )
        .prop_map(|(at, how, lease, since, waited, epoch)| {
            Stage::Ended(Ended {
                at,
                how,
                lease,
                since,
                waited,
                epoch,
            })
        });
    let stage = prop_oneof![waiting, held, ended];
    (text(), asked(), any::<bool>(), stage).prop_map(|(id, asked, bare, stage)| {
        let bare = bare && matches!(stage, Stage::Ended(_));
        Ticket {
            row: RowNo(0),
            id: TicketId::new(&id).unwrap(),
            asked: (!bare).then_some(asked),
            stage,
        }
    })
}

fn engine() -> impl Strategy<Value = EngineRow> {
    let role = prop::sample::select(vec![
        Role::Regular,
        Role::Decode,
        Role::Prefill,
        Role::Other,
    ]);
    let mark = option::of(any::<u64>().prop_map(StartMark));
    (
        role,
        btree_set(text(), 0..4),
        any::<bool>(),
        option::of(tokens()),
        mark,
        epoch(),
        (any::<u32>(), option::of(at())),
    )
        .prop_map(
            |(role, worker_ids, seen_healthy, capacity, start_mark, joined, closes)| EngineRow {
                id: EngineId::new(""),
                role,
                worker_ids: worker_ids
                    .iter()
                    .map(|id| Arc::from(id.as_str()))
                    .collect::<BTreeSet<_>>(),
                seen_healthy,
                capacity,
                start_mark,
                joined,
                close_refusals: closes.0,
                unsupported_at: closes.1,
            },
        )
}

fn cause() -> impl Strategy<Value = EpochCause> {
    prop_oneof![
        Just(EpochCause::First),
        Just(EpochCause::Restored),
        (any::<u32>(), any::<u32>())
            .prop_map(|(joined, left)| EpochCause::MembersChanged { joined, left }),
        text().prop_map(|url| EpochCause::Restarted(EngineId::new(&url))),
        text().prop_map(|url| EpochCause::WorkerIdChanged(EngineId::new(&url))),
    ]
}

fn result() -> impl Strategy<Value = CallResult> {
    let failure = prop::sample::select(vec![
        CallFailure::Timeout,
        CallFailure::Refused,
        CallFailure::TooLarge,
        CallFailure::NotAllowed,
    ]);
    // What an engine says is any text: control characters are no reason to lose a copy.
    let said = option::of("(?s).{0,40}".prop_map(|text| Arc::from(text.as_str())));
    prop_oneof![
        (any::<u16>(), said).prop_map(|(code, text)| CallResult::Status { code, text }),
        failure.prop_map(CallResult::Failed),
    ]
}

fn target(states: Vec<TargetState>) -> impl Strategy<Value = Target> {
    let state = prop::sample::select(states);
    (state, any::<u32>(), option::of(result())).prop_map(|(state, attempts, last)| Target {
        state,
        attempts,
        last,
    })
}

/// Any close: an open one has all states, a finished one names and counts what it may.
fn close() -> impl Strategy<Value = CloseIntent> {
    let open_stage = prop_oneof![
        option::of(at()).prop_map(|ready_since| CloseStage::Joining { ready_since }),
        (at(), any::<bool>()).prop_map(|(since, early)| CloseStage::Delivering { since, early }),
    ];
    let all = [&[TargetState::Pending], &TargetState::ENDS[..]].concat();
    let exceptions = TargetState::ENDS[1..].to_vec();
    let open = (open_stage, btree_map(text(), target(all), 0..20));
    let done = (
        at().prop_map(|at| CloseStage::Done { at }),
        btree_map(text(), target(exceptions), 0..=CLOSE_EXCEPTIONS_MAX),
    );
    let stage = prop_oneof![open.boxed(), done.boxed()];
    let mode = prop::sample::select(vec![CloseMode::Join, CloseMode::Abort]);
    let reason = prop::sample::select(vec![
        CloseReason::Terminal,
        CloseReason::Dropped,
        CloseReason::Idle,
    ]);
    let asked = (any::<u64>(), text(), mode, option::of(reason), at());
    let counts = proptest::array::uniform7(16..=u32::MAX);
    let reopened = option::of((at(), text()));
    let spared = btree_set(text(), 0..=CLOSE_EXCEPTIONS_MAX);
    (
        asked,
        stage,
        counts,
        any::<(bool, bool)>(),
        reopened,
        spared,
    )
        .prop_map(
            |(
                (salt, session, mode, reason, requested_at),
                (stage, targets),
                counts,
                facts,
                reopened,
                spared,
            )| {
                CloseIntent {
                    id: CloseId {
                        number: CloseNo(0),
                        salt,
                    },
                    session: SessionId::new(&session).unwrap(),
                    mode,
                    reason,
                    requested_at,
                    stage,
                    targets: targets
                        .into_iter()
                        .map(|(url, target)| (EngineId::new(&url), target))
                        .collect(),
                    counts,
                    timed_out: facts.0,
                    failure_counted: facts.1,
                    reopened: reopened.map(|(at, ticket)| Reopened {
                        at,
                        ticket: TicketId::new(&ticket).unwrap(),
                    }),
                    not_aborted: spared
                        .iter()
                        .map(|label| Label::new(label).unwrap())
                        .collect(),
                }
            },
        )
}

/// Closes by number, at most one of a session, so that any of them may be open.
fn closes() -> impl Strategy<Value = Vec<CloseIntent>> {
    btree_map(1..=NUMBER_MAX, close(), 0..6).prop_map(|closes| {
        let mut sessions = BTreeSet::new();
        closes
            .into_iter()
            .filter(|(_, close)| sessions.insert(close.session.clone()))
            .map(|(number, mut close)| {
                close.id.number = CloseNo(number);
                close
            })
            .collect()
    })
}

fn uses() -> impl Strategy<Value = Vec<(SessionId, Timestamp)>> {
    btree_map(text(), at(), 0..6).prop_map(|uses| {
        uses.into_iter()
            .map(|(session, used)| (SessionId::new(&session).unwrap(), used))
            .collect()
    })
}

fn tally() -> impl Strategy<Value = Tally> {
    any::<[u64; 14]>().prop_map(|numbers| {
        let mut tally = Tally {
            granted_after_wait: numbers[0],
            waited_millis: numbers[1],
            closes: numbers[8],
            close_failures: numbers[9],
            sessions_reopened: numbers[10],
            usage_rounds: numbers[12],
            usage_sum: numbers[13],
            ..Tally::default()
        };
        tally.scopes[0].admit = numbers[2];
        tally.scopes[1].wait[0] = numbers[3];
        tally.scopes[1].bypass[6] = numbers[4];
        tally.scopes[0].cancelled[3] = numbers[5];
        tally.leases_ended[1] = numbers[6];
        tally.local_bypasses[4] = numbers[7];
        tally.close_deliveries[6] = numbers[11];
        tally
    })
}

fn peak() -> impl Strategy<Value = Option<Ppm>> {
    option::of((0..=1_000_000_u32).prop_map(|share| Ppm::new(share).unwrap()))
}

/// A run; the empty name is one as well.
fn run() -> impl Strategy<Value = RunId> {
    prop_oneof![Just(String::new()), text()].prop_map(|run| RunId::new(&run).unwrap())
}

fn window() -> impl Strategy<Value = Window> {
    (at(), tally(), peak()).prop_map(|(from, base, usage_peak)| Window {
        from,
        base: Box::new(base),
        usage_peak,
    })
}

fn windows() -> impl Strategy<Value = Vec<(Option<RunId>, Window)>> {
    let of_runs = btree_map(run(), window(), 0..4);
    (option::of(window()), of_runs).prop_map(|(new, of_runs)| {
        let new = new.map(|window| (None, window));
        let of_runs = of_runs.into_iter();
        new.into_iter()
            .chain(of_runs.map(|(run, window)| (Some(run), window)))
            .collect()
    })
}

/// Step reports by number, at most one of a step.
fn steps() -> impl Strategy<Value = Vec<StepReport>> {
    let standing = (
        any::<(bool, bool)>(),
        any::<[u64; 2]>(),
        [tokens(), tokens()],
        epoch(),
    )
        .prop_map(|(facts, counts, sums, epoch)| Standing {
            session_lifecycle: facts.0,
            waiting: counts[0],
            ceiling: sums[0],
            reserved: sums[1],
            leases: counts[1],
            epoch,
            degraded: facts.1,
        });
    let report = (
        (run(), 0..=NUMBER_MAX),
        (at(), at()),
        tally(),
        peak(),
        standing,
    )
        .prop_map(
            |((run, step), (from, to), counts, usage_peak, standing)| StepReport {
                number: None,
                run,
                step: Some(step),
                from,
                to,
                counts: Box::new(counts),
                usage_peak,
                standing,
            },
        );
    btree_map(1..=NUMBER_MAX, report, 0..6).prop_map(|reports| {
        let mut taken = BTreeSet::new();
        reports
            .into_iter()
            .filter(|(_, report)| taken.insert((report.run.clone(), report.step)))
            .map(|(number, report)| StepReport {
                number: Some(StepNo(number)),
                ..report
            })
            .collect()
    })
}

fn share() -> impl Strategy<Value = Ppm> {
    (0..=1_000_000_u32).prop_map(|share| Ppm::new(share).unwrap())
}

fn admission_scope() -> impl Strategy<Value = AdmissionScope> {
    prop_oneof![Just(AdmissionScope::Train), Just(AdmissionScope::All)]
}

fn overrides() -> impl Strategy<Value = Overrides> {
    (
        option::of(any::<bool>()),
        option::of(any::<bool>()),
        option::of(any::<bool>()),
        option::of(share()),
        option::of(share()),
        option::of(option::of(tokens())),
        option::of(span()),
        option::of(admission_scope()),
        option::of(at()),
    )
        .prop_map(|set| Overrides {
            program_admission: set.0,
            session_lifecycle: set.1,
            paused: set.2,
            headroom: set.3,
            pressure_threshold: set.4,
            expected_decode_cap: set.5,
            max_wait: set.6,
            scope: set.7,
            changed_at: set.8,
        })
}

fn moves() -> impl Strategy<Value = Vec<Moved>> {
    let value = || {
        prop_oneof![
            any::<bool>().prop_map(SettingValue::Switch),
            share().prop_map(SettingValue::Share),
            option::of(tokens()).prop_map(SettingValue::Cap),
            span().prop_map(SettingValue::Time),
            admission_scope().prop_map(SettingValue::Scope),
        ]
    };
    let setting = prop::sample::select(Setting::ALL);
    let moved = (setting, value(), value(), any::<bool>());
    vec(
        moved.prop_map(|(setting, from, to, is_set)| Moved {
            setting,
            from,
            to,
            is_set,
        }),
        0..4,
    )
}

fn act() -> impl Strategy<Value = AuditAct> {
    let ticket = || text().prop_map(|id| TicketId::new(&id).unwrap());
    let session = || text().prop_map(|id| SessionId::new(&id).unwrap());
    let close = || {
        (1..=NUMBER_MAX, any::<u64>()).prop_map(|(number, salt)| CloseId {
            number: CloseNo(number),
            salt,
        })
    };
    let outcome = prop::sample::select(vec![
        CancelOutcome::Withdrawn,
        CancelOutcome::Released,
        CancelOutcome::Bypassed,
        CancelOutcome::AlreadyFinished,
        CancelOutcome::Unknown,
    ]);
    let mode = prop_oneof![Just(CloseMode::Join), Just(CloseMode::Abort)];
    prop_oneof![
        moves().prop_map(AuditAct::SettingsChanged),
        moves().prop_map(AuditAct::SettingsReset),
        (lease_id(), ticket(), option::of(session()), tokens()).prop_map(
            |(lease, ticket, session, tokens)| AuditAct::LeaseRevoked {
                lease,
                ticket,
                session,
                tokens,
            }
        ),
        (ticket(), option::of(session()), tokens(), outcome).prop_map(
            |(ticket, session, tokens, outcome)| AuditAct::TicketCancelled {
                ticket,
                session,
                tokens,
                outcome,
            }
        ),
        (session(), close(), mode).prop_map(|(session, close, mode)| AuditAct::SessionClosed {
            session,
            close,
            mode,
        }),
        (close(), session(), any::<u64>()).prop_map(|(close, session, engines)| {
            AuditAct::CloseRetried {
                close,
                session,
                engines,
            }
        }),
    ]
}

/// The audit by number.
fn audit() -> impl Strategy<Value = Vec<AuditEntry>> {
    btree_map(1..=NUMBER_MAX, (at(), text(), act()), 0..6).prop_map(|entries| {
        let entry = |(number, (at, who, act)): (u64, (_, String, _))| AuditEntry {
            no: AuditNo(number),
            at,
            who: Label::new(&who).unwrap(),
            act,
        };
        entries.into_iter().map(entry).collect()
    })
}

/// Any image that a store may hold.
fn image() -> impl Strategy<Value = Image> {
    let starts = vec((any::<u64>(), any::<u64>(), at()), 0..4);
    let head = (4_u64..1 << 50, any::<u64>(), at());
    (
        head,
        starts,
        btree_map(any::<u64>(), ticket(), 0..12),
        btree_map(any::<u64>(), (at(), cause()), 0..5),
        btree_map(text(), engine(), 0..4),
        (closes(), uses()),
        (windows(), steps()),
        (overrides(), audit()),
        tally(),
    )
        .prop_map(
            |(head, mut starts, tickets, epochs, engines, lifecycle, reports, operated, tally)| {
                let (overrides, audit) = operated;
                let (closes, sessions) = lifecycle;
                let (windows, steps) = reports;
                starts.sort_by_key(|(first_issue, ..)| *first_issue);
                let mut tickets: Vec<Ticket> = tickets
                    .into_iter()
                    .map(|(row, ticket)| Ticket {
                        row: RowNo(row),
                        ..ticket
                    })
                    .collect();
                for (number, ticket) in (1_u64 << 41..).zip(&mut tickets) {
                    if let Stage::Held(lease) = &mut ticket.stage {
                        lease.id.issue = Issue(number);
                    }
                }
                Image {
                    term: head.0,
                    seq: Seq(head.1),
                    now: head.2,
                    next_issue: 1 << 42,
                    starts: starts
                        .into_iter()
                        .map(|(first_issue, salt, at)| Start {
                            first_issue: Issue(first_issue),
                            salt,
                            at,
                        })
                        .collect(),
                    tickets,
                    closes,
                    sessions,
                    windows,
                    steps,
                    overrides,
                    audit,
                    epochs: epochs
                        .into_iter()
                        .map(|(epoch, (at, cause))| EpochEntry {
                            epoch: Epoch(epoch),
                            at,
                            cause,
                        })
                        .collect(),
                    engines: engines
                        .into_iter()
                        .map(|(url, engine)| EngineRow {
                            id: EngineId::new(&url),
                            ..engine
                        })
                        .collect(),
                    tally,
                }
            },
        )
}

proptest! {
    /// DUR2: what a copy is read as is exactly what was written.
    #[test]
    fn a_copy_is_read_back_exactly(image in image()) {
        let bytes = copy(&image);
        prop_assert!(bytes.ends_with(b"\n"));
        prop_assert_eq!(read(&bytes).unwrap(), image);
    }

    /// DUR5: a copy that was cut anywhere is refused, and so is one with any bit turned over.
    #[test]
    fn a_cut_or_garbled_copy_is_refused(
        image in image(),
        cut in any::<prop::sample::Index>(),
        bit in 0..8_u8,
        flipped in any::<prop::sample::Index>(),
    ) {
        let bytes = copy(&image);
        let cut = cut.index(bytes.len());
        let error = read(&bytes[..cut]).unwrap_err();
        prop_assert!(matches!(error, CopyError::Truncated(_) | CopyError::Foreign), "{}", error);
        let mut garbled = bytes.clone();
        garbled[flipped.index(bytes.len())] ^= 1 << bit;
        prop_assert!(read(&garbled).is_err());
    }

    /// ID2, DUR6: a store made from a copy gives out no number that the life before could have given
    /// out, and neither does one that is made from the same copy a second later.
    #[test]
    fn a_restored_image_moves_on(mut image in image(), later in 0..1_000_000_u64) {
        image.seq.0 %= 1 << 50;
        image.now = Timestamp::from_millis(image.now.millis() % (1 << 41));
        image.epochs.retain(|entry| entry.epoch.0 < 1 << 50);
        image.term %= 1 << 50;
        let now = image.now.after(Span::from_millis(later));
        let restored = moved_on(image.clone(), now).unwrap();
        prop_assert!(restored.seq.0 >= image.seq.0 + (1 << 32));
        prop_assert!(restored.next_issue >= image.next_issue + (1 << 32));
        prop_assert!(restored.term >= image.term + 1_000);
        prop_assert!(epoch_of(&restored).0 >= epoch_of(&image).0 + 1_000);
        prop_assert_eq!(&restored.epochs.last().unwrap().cause, &EpochCause::Restored);
        prop_assert_eq!(&restored.tickets, &image.tickets);
        prop_assert_eq!(&restored.closes, &image.closes);
        prop_assert_eq!(&restored.sessions, &image.sessions);
        prop_assert_eq!(&restored.windows, &image.windows);
        prop_assert_eq!(&restored.steps, &image.steps);
        prop_assert_eq!(check(&restored), Ok(()));
        let again = moved_on(image, now.after(Span::from_secs(1))).unwrap();
        prop_assert!(again.seq >= restored.seq);
        if restored.seq.0 == (now.millis() / 1_000) << 20 {
            prop_assert!(again.seq.0 >= restored.seq.0 + (1 << 20));
        }
    }
}

/// A close of a session that failed on one engine, and a newer one that is on its way to it.
fn two_closes() -> Vec<CloseIntent> {
    let failed = Target {
        state: TargetState::Failed,
        attempts: 8,
        last: Some(CallResult::Failed(CallFailure::Timeout)),
    };
    let mut counts = [0; TargetState::ENDS.len()];
    counts[5] = 1;
    let old = CloseIntent {
        id: CloseId {
            number: CloseNo(6),
            salt: 7,
        },
        session: SessionId::new("s").unwrap(),
        mode: CloseMode::Join,
        reason: Some(CloseReason::Terminal),
        requested_at: Timestamp::from_millis(2),
        stage: CloseStage::Done {
            at: Timestamp::from_millis(3),
        },
        targets: [(EngineId::new("http://a"), failed)].into(),
        counts,
        timed_out: false,
        failure_counted: true,
        reopened: None,
        not_aborted: BTreeSet::new(),
    };
    let mut new = old.clone();
    new.id.number = CloseNo(7);
    new.stage = CloseStage::Delivering {
        since: Timestamp::from_millis(4),
        early: false,
    };
    new.targets = [(EngineId::new("http://a"), Target::PENDING)].into();
    new.counts = [0; TargetState::ENDS.len()];
    vec![old, new]
}

/// The window of new runs, and the one of a run.
fn two_windows() -> Vec<(Option<RunId>, Window)> {
    let window = Window {
        from: Timestamp::from_millis(3),
        base: Box::default(),
        usage_peak: Ppm::new(500_000),
    };
    vec![
        (None, window.clone()),
        (Some(RunId::new("r").unwrap()), window),
    ]
}

/// Two steps of a run.
fn two_steps() -> Vec<StepReport> {
    (2..=3)
        .map(|number| StepReport {
            number: Some(StepNo(number)),
            run: RunId::new("r").unwrap(),
            step: Some(number + 5),
            from: Timestamp::from_millis(2),
            to: Timestamp::from_millis(3),
            counts: Box::default(),
            usage_peak: None,
            standing: Standing {
                session_lifecycle: false,
                waiting: 1,
                ceiling: Tokens::ZERO,
                reserved: Tokens::ZERO,
                leases: 1,
                epoch: Epoch(1),
                degraded: true,
            },
        })
        .collect()
}

/// Two entries of the audit.
fn two_acts() -> Vec<AuditEntry> {
    let ticket = TicketId::new("t").unwrap();
    let acts = [
        AuditAct::SettingsChanged(vec![Moved {
            setting: Setting::Headroom,
            from: SettingValue::Share(Ppm::ONE),
            to: SettingValue::Share(Ppm::TENTH),
            is_set: true,
        }]),
        AuditAct::TicketCancelled {
            ticket,
            session: None,
            tokens: Tokens::ZERO,
            outcome: CancelOutcome::Unknown,
        },
    ];
    let entry = |(number, act)| AuditEntry {
        no: AuditNo(number),
        at: Timestamp::from_millis(3),
        who: Label::new("anna").unwrap(),
        act,
    };
    (4..).zip(acts).map(entry).collect()
}

/// A small image with a row of almost each kind.
fn small() -> Image {
    let id = LeaseId {
        issue: Issue(4),
        salt: 7,
    };
    let ticket = |row, stage| Ticket {
        row: RowNo(row),
        id: TicketId::new(&format!("t-{row}")).unwrap(),
        asked: Some(Asked {
            session: SessionId::new("s").unwrap(),
            sent: Sent::Sum(Tokens::ZERO),
            terms: Terms {
                reservation: Tokens::ZERO,
                scope: Scope::Train,
                ttl: Span::from_secs(1),
                client: None,
                request_id: None,
            },
        }),
        stage,
    };
    Image {
        term: 1,
        seq: Seq(9),
        now: Timestamp::from_millis(5),
        next_issue: 5,
        starts: vec![Start {
            first_issue: Issue(1),
            salt: 7,
            at: Timestamp::from_millis(1),
        }],
        closes: two_closes(),
        sessions: vec![(SessionId::new("s").unwrap(), Timestamp::from_millis(3))],
        windows: two_windows(),
        steps: two_steps(),
        overrides: Overrides {
            paused: Some(true),
            expected_decode_cap: Some(None),
            ..Overrides::default()
        },
        audit: two_acts(),
        tickets: vec![
            ticket(
                3,
                Stage::Held(Lease {
                    id,
                    epoch: Epoch(1),
                    granted_at: Timestamp::from_millis(2),
                    waited: None,
                    ttl: Span::from_secs(1),
                    ends_at: Timestamp::from_millis(1_002),
                    graced: false,
                }),
            ),
            ticket(
                4,
                Stage::Waiting {
                    since: Timestamp::from_millis(3),
                },
            ),
        ],
        epochs: vec![EpochEntry {
            epoch: Epoch(1),
            at: Timestamp::from_millis(1),
            cause: EpochCause::First,
        }],
        engines: Vec::new(),
        tally: Tally::default(),
    }
}

/// The lines of a copy after a change, with a sum that fits them again.
fn sealed(lines: &[String]) -> Vec<u8> {
    let mut bytes: Vec<u8> = lines
        .iter()
        .flat_map(|line| format!("{line}\n").into_bytes())
        .collect();
    let mut sum = Hasher::new();
    sum.update(&bytes);
    let end = Line::end(lines.len() as u64, sum.finalize());
    bytes.extend(serde_json::to_vec(&end).unwrap());
    bytes.push(b'\n');
    bytes
}

fn lines(image: &Image) -> Vec<String> {
    let text = String::from_utf8(copy(image)).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(lines.pop().unwrap().starts_with(r#"{"end":"#));
    lines
}

/// The refusal of a copy whose lines were changed and sealed again.
fn refusal(change: impl FnOnce(&mut Vec<String>)) -> String {
    let mut changed = lines(&small());
    change(&mut changed);
    read(&sealed(&changed)).unwrap_err().to_string()
}

/// DUR5: what a copy must not hold, by the sentence that refuses it.
#[test]
fn rows_that_no_store_holds_are_refused() {
    assert_eq!(read(&sealed(&lines(&small()))).unwrap(), small());
    let row = |lines: &[String], kind: &str| {
        let begins = format!("{{\"{kind}\":");
        lines
            .iter()
            .position(|line| line.starts_with(&begins))
            .unwrap()
    };
    let more = |lines: &mut Vec<String>, kind: &str, from: u32, to: u32| {
        lines[0] = lines[0].replace(&format!("\"{kind}\":{from}"), &format!("\"{kind}\":{to}"));
    };
    let twice = |kind: &'static str| {
        move |lines: &mut Vec<String>| {
            let at = row(lines, kind);
            lines.insert(at, lines[at].clone());
        }
    };
    let cases = [
        (
            refusal(|lines| {
                twice("ticket")(lines);
                more(lines, "tickets", 2, 3);
            }),
            "a ticket's row stands twice",
        ),
        (
            refusal(|lines| {
                twice("epoch")(lines);
                more(lines, "epochs", 1, 2);
            }),
            "an epoch stands twice",
        ),
        (
            refusal(twice("ticket")),
            "more rows than the first line says",
        ),
        (refusal(twice("meta")), "does not stand here"),
        (refusal(twice("header")), "does not stand here"),
        (
            refusal(|lines| {
                lines.pop();
            }),
            "fewer rows than the first line says",
        ),
        (
            refusal(|lines| {
                let at = row(lines, "tally");
                lines.remove(at);
            }),
            "does not stand here",
        ),
        (
            refusal(|lines| lines.push(r#"{"report":{}}"#.to_owned())),
            "unknown variant `report`",
        ),
        (
            refusal(|lines| {
                let at = row(lines, "ticket");
                lines[at] = lines[at].replace(r#""row""#, r#""hue":1,"row""#);
            }),
            "unknown field `hue`",
        ),
        (
            refusal(|lines| {
                let at = row(lines, "meta");
                lines[at] = lines[at].replace(r#""next_issue":5"#, r#""next_issue":4"#);
            }),
            "still to be given",
        ),
        (
            refusal(|lines| {
                let at = row(lines, "ticket");
                lines[at] = lines[at].replace("t-3", &"x".repeat(513));
            }),
            "an id is refused",
        ),
        (
            refusal(|lines| {
                let at = row(lines, "start");
                lines.insert(at, "x".repeat(65 << 20));
            }),
            "longer than any line",
        ),
        (
            refusal(|lines| lines[0] = lines[0].replace(r#""seq":9"#, r#""seq":8"#)),
            "another seq or epoch",
        ),
    ];
    for (said, expected) in cases {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

/// DUR5, CLO2: the same for closes and last uses of sessions.
#[test]
fn closes_that_no_store_holds_are_refused() {
    // Both closes stand in lines of their own: the finished one first.
    let changed = |number: usize, from: &str, to: &str| {
        refusal(|lines| {
            let mut found = lines
                .iter_mut()
                .filter(|line| line.starts_with(r#"{"close":"#));
            let line = found.nth(number).unwrap();
            assert!(line.contains(from), "{line}");
            *line = line.replace(from, to);
        })
    };
    let twice = |kind: &str, counts: (&str, &str)| {
        refusal(|lines| {
            let begins = format!("{{\"{kind}\":");
            let at = lines.iter().rposition(|line| line.starts_with(&begins));
            lines.insert(at.unwrap(), lines[at.unwrap()].clone());
            assert!(lines[0].contains(counts.0), "{}", lines[0]);
            lines[0] = lines[0].replace(counts.0, counts.1);
        })
    };
    let target = r#"{"url":"http://a","state":"pending","attempts":0,"last":null}"#;
    let cases = [
        (
            twice("close", (r#""closes":2"#, r#""closes":3"#)),
            "a close stands twice or out of order",
        ),
        (
            twice("session", (r#""sessions":1"#, r#""sessions":2"#)),
            "the last use of a session stands twice",
        ),
        (
            changed(1, r#""7-"#, r#""5-"#),
            "a close stands twice or out of order",
        ),
        (
            changed(0, r#""6-"#, r#""0-"#),
            "a close has a number outside its range",
        ),
        (
            changed(0, r#""6-0"#, r#""6-x"#),
            "a close id is outside its range",
        ),
        (
            changed(
                0,
                r#"{"done":{"at_ms":3}}"#,
                r#"{"joining":{"ready_since_ms":null}}"#,
            ),
            "has a newer one",
        ),
        (
            changed(0, r#""state":"failed""#, r#""state":"pending""#),
            "pending or delivered",
        ),
        (
            changed(0, r#""state":"failed""#, r#""state":"gone""#),
            "does not count",
        ),
        (
            changed(0, r#""state":"failed""#, r#""state":"lost""#),
            "unknown variant `lost`",
        ),
        (
            changed(0, "[0,0,0,0,0,1,0]", "[0,0,0,0,0,1,0,0]"),
            "the number of counters",
        ),
        (
            changed(1, target, &[target, target].join(",")),
            "an engine of a close stands twice",
        ),
        (
            changed(1, r#""not_aborted":[]"#, r#""not_aborted":["r","r"]"#),
            "a request of a close stands twice",
        ),
        (
            changed(1, r#""session":"s""#, r#""session":"..""#),
            "an id is refused",
        ),
        (
            changed(
                1,
                r#""reopened":null"#,
                r#""reopened":{"at_ms":1,"ticket":""}"#,
            ),
            "an id is refused",
        ),
    ];
    for (said, expected) in cases {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let mut many = small();
    let named = many.closes[0].targets.values().next().unwrap().clone();
    many.closes[0].counts[5] = 17;
    many.closes[0].targets = (0..17)
        .map(|number| (EngineId::new(&format!("http://{number:02}")), named.clone()))
        .collect();
    let said = read(&copy(&many)).unwrap_err().to_string();
    assert!(said.contains("names more engines"), "{said}");
    let mut many = small();
    many.closes[1].not_aborted = (0..17)
        .map(|number| Label::new(&format!("r-{number}")).unwrap())
        .collect();
    let said = read(&copy(&many)).unwrap_err().to_string();
    assert!(said.contains("names more requests"), "{said}");
}

/// DUR5, SET3: the same for settings and the audit.
#[test]
fn settings_that_no_store_holds_are_refused() {
    let changed = |kind: &str, from: &str, to: &str| {
        refusal(|lines| {
            let begins = format!("{{\"{kind}\":");
            let mut found = lines.iter_mut().filter(|line| line.starts_with(&begins));
            let line = found.next().unwrap();
            assert!(line.contains(from), "{line}");
            *line = line.replace(from, to);
        })
    };
    let cases = [
        (
            changed("audit", r#""number":4"#, r#""number":5"#),
            "an entry of the audit stands twice or out of order",
        ),
        (
            changed("audit", r#""number":4"#, r#""number":0"#),
            "a number outside its range",
        ),
        (
            changed("audit", r#""share_ppm":100000"#, r#""share_ppm":1000001"#),
            "a share is outside its range",
        ),
        (
            changed("audit", r#""setting":"headroom""#, r#""setting":"room""#),
            "unknown variant `room`",
        ),
        (
            changed("audit", r#""who":"anna""#, r#""who":"""#),
            "an id is refused",
        ),
        (
            changed(
                "settings",
                r#""headroom_ppm":null"#,
                r#""headroom_ppm":1000001"#,
            ),
            "a share is outside its range",
        ),
        (
            changed(
                "settings",
                r#""expected_decode_cap":"none""#,
                r#""expected_decode_cap":"no""#,
            ),
            "unknown variant `no`",
        ),
        (
            refusal(|lines| {
                let at = lines
                    .iter()
                    .position(|line| line.starts_with("{\"settings\":"));
                lines.insert(at.unwrap(), lines[at.unwrap()].clone());
            }),
            "does not stand here",
        ),
    ];
    for (said, expected) in cases {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let mut many = small();
    let entry = many.audit.remove(0);
    many.audit = (1..=AUDIT_MAX as u64 + 1)
        .map(|number| AuditEntry {
            no: AuditNo(number),
            ..entry.clone()
        })
        .collect();
    let said = read(&copy(&many)).unwrap_err().to_string();
    assert!(said.contains("more entries of the audit"), "{said}");
}

/// Takes out of the lines of a copy what its version does not say.
fn taken_out(lines: &mut [String], taken: &[(usize, &str, &str)]) {
    for (number, from, to) in taken {
        let line = &mut lines[*number];
        assert!(line.contains(from), "{line}");
        *line = line.replace(from, to);
    }
}

/// DUR5: what a copy of version 3, 2 or 1 does not say begins at nothing, and nothing else of it changes.
#[test]
fn a_copy_of_an_older_version_is_read() {
    let mut image = small();
    image.overrides = Overrides::default();
    image.audit.clear();
    let of_fourth = [
        (0, r#""version":4,"schema":4"#, r#""version":3,"schema":3"#),
        (0, r#""audit":0,"#, ""),
    ];
    let mut third = lines(&image);
    taken_out(&mut third, &of_fourth);
    assert_eq!(read(&sealed(&third)).unwrap(), image);

    image.windows.clear();
    image.steps.clear();
    let mut second = lines(&image);
    taken_out(&mut second, &of_fourth);
    let taken = [
        (0, r#""version":3,"schema":3"#, r#""version":2,"schema":2"#),
        (0, r#""windows":0,"steps":0,"#, ""),
        (2, r#","usage_rounds":0,"usage_sum":0"#, ""),
    ];
    taken_out(&mut second, &taken);
    assert_eq!(read(&sealed(&second)).unwrap(), image);

    image.closes.clear();
    image.sessions.clear();
    let mut first = lines(&image);
    taken_out(&mut first, &of_fourth);
    taken_out(&mut first, &taken);
    let taken = [
        (0, r#""version":2,"schema":2"#, r#""version":1,"schema":1"#),
        (0, r#""closes":0,"sessions":0,"#, ""),
        (
            2,
            r#","closes":0,"close_failures":0,"close_deliveries":[0,0,0,0,0,0,0],"sessions_reopened":0"#,
            "",
        ),
    ];
    taken_out(&mut first, &taken);
    assert_eq!(read(&sealed(&first)).unwrap(), image);
}

/// DUR5: what is no copy, and what a newer kvgate wrote, is told apart from damage.
#[test]
fn foreign_and_newer_copies_are_told_apart() {
    for bytes in [
        &b""[..],
        b"notes\n",
        b"{}\n",
        br#"{"header":{"format":"other","version":1,"schema":1}}"#,
    ] {
        let error = read(bytes).unwrap_err();
        assert!(matches!(error, CopyError::Foreign), "{error}");
    }
    for (from, to, what) in [
        (r#""version":4"#, r#""version":5"#, "version 5"),
        (r#""schema":4"#, r#""schema":99,"more":true"#, "schema 99"),
    ] {
        let mut newer = lines(&small());
        newer[0] = newer[0].replace(from, to);
        let error = read(&sealed(&newer)).unwrap_err();
        assert!(matches!(error, CopyError::Newer { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    let mut after = copy(&small());
    after.extend(b"more\n");
    assert!(read(&after).is_err(), "nothing follows the end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A whole store that is written in one go holds exactly the image.
    #[test]
    fn a_store_written_in_one_go_holds_the_image(image in image()) {
        let directory = tempfile::tempdir().unwrap();
        crate::store::write_new(&crate::store::FsDisk::new(directory.path()), &image).unwrap();
        let look = crate::store::look(directory.path()).unwrap();
        prop_assert_eq!(look.image(), &image);
        prop_assert!(look.clean());
        let entries = std::fs::read_dir(directory.path()).unwrap().count();
        prop_assert_eq!(entries, 1, "nothing is left beside it");
    }
}

/// What a backup of 100,000 waiting tickets costs, printed: `cargo test --release -- --nocapture
/// cost_of_a_backup`. The bound only catches a cost that grows with the square.
#[test]
fn cost_of_a_backup() {
    use std::time::Instant;
    let mut image = small();
    let model = image.tickets.pop().unwrap();
    for row in 4..100_000 {
        image.tickets.push(Ticket {
            row: RowNo(row),
            id: TicketId::new(&format!("step-12/session-{row}/attempt-1")).unwrap(),
            ..model.clone()
        });
    }
    let params = kvgate_core::machine::StartParams {
        now: image.now,
        salt: 0,
        seed: 0,
        policy: Default::default(),
        reset_settings: false,
        fleet: kvgate_core::capacity::FleetConfig {
            has_router: true,
            static_engines: Default::default(),
        },
    };
    let mut memory = kvgate_core::memory::MemoryStore::default();
    let Ok(started) = kvgate_core::machine::Machine::restore(image, params).commit(&mut memory);
    let began = Instant::now();
    let taken = started.machine.image();
    let clone = began.elapsed();
    let began = Instant::now();
    let bytes = copy(&taken);
    let write = began.elapsed();
    let began = Instant::now();
    assert_eq!(read(&bytes).unwrap(), taken);
    let read = began.elapsed();
    println!(
        "{} tickets, {} bytes: picture {clone:?}, text {write:?}, reading {read:?}",
        taken.tickets.len(),
        bytes.len()
    );
    assert!(clone.as_secs() < 20 && write.as_secs() < 20 && read.as_secs() < 20);
}

/// DUR5, REP1: the same for windows and step reports.
#[test]
fn reports_that_no_store_holds_are_refused() {
    let changed = |kind: &str, number: usize, from: &str, to: &str| {
        refusal(|lines| {
            let begins = format!("{{\"{kind}\":");
            let mut found = lines.iter_mut().filter(|line| line.starts_with(&begins));
            let line = found.nth(number).unwrap();
            assert!(line.contains(from), "{line}");
            *line = line.replacen(from, to, 1);
        })
    };
    let more = |kind: &str, copies: u64, change: &dyn Fn(u64, String) -> String| {
        refusal(|lines| {
            let begins = format!("{{\"{kind}\":");
            let at = lines.iter().rposition(|line| line.starts_with(&begins));
            let line = lines[at.unwrap()].clone();
            let new = (0..copies).map(|number| change(number, line.clone()));
            let after = at.unwrap() + 1;
            lines.splice(after..after, new);
            let counted = format!("\"{kind}s\":2");
            assert!(lines[0].contains(&counted), "{}", lines[0]);
            lines[0] = lines[0].replace(&counted, &format!("\"{kind}s\":{}", copies + 2));
        })
    };
    let same = |_, line: String| line;
    let next_run = |number: u64, line: String| {
        let run = format!(r#""run":"r{number:02}""#);
        line.replace(r#""run":"r""#, &run)
    };
    let next_number = |number: u64, line: String| {
        line.replace(r#""number":3"#, &format!("\"number\":{}", number + 4))
            .replace(r#""step":8"#, &format!("\"step\":{}", number + 9))
    };
    let cases = [
        (
            more("window", 1, &same),
            "the window of a run stands twice or out of order",
        ),
        (
            changed("window", 1, r#""run":"r""#, r#""run":null"#),
            "the window of a run stands twice or out of order",
        ),
        (
            more("window", 16, &next_run),
            "more runs or step reports than a store keeps",
        ),
        (
            more("step", 1, &same),
            "a step report stands twice or out of order",
        ),
        (
            changed("step", 0, r#""number":2"#, r#""number":4"#),
            "a step report stands twice or out of order",
        ),
        (
            more("step", 10_000, &next_number),
            "more runs or step reports than a store keeps",
        ),
        (
            changed("step", 0, r#""number":2"#, r#""number":0"#),
            "a step report has a number outside its range",
        ),
        (
            changed("step", 0, r#""step":7"#, r#""step":9007199254740992"#),
            "a step report has a number outside its range",
        ),
        (
            changed("step", 0, r#""step":7"#, r#""step":8"#),
            "a step has two reports",
        ),
        (
            changed("step", 0, r#""step":7"#, r#""step":null"#),
            "invalid type: null",
        ),
        (
            changed("window", 1, r#""run":"r""#, r#""run":".""#),
            "an id is refused",
        ),
        (
            changed(
                "window",
                0,
                r#""usage_peak_ppm":500000"#,
                r#""usage_peak_ppm":1000001"#,
            ),
            "a share is outside its range",
        ),
        (
            changed("step", 1, r#""ceiling":0"#, r#""ceiling":9007199254740992"#),
            "a number of tokens is outside its range",
        ),
        (
            changed("step", 1, r#""usage_sum":0"#, r#""usage_mean":0"#),
            "unknown field `usage_mean`",
        ),
    ];
    for (said, expected) in cases {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // As many as a store keeps are taken.
    let mut full = small();
    let run = |number: usize| Some(RunId::new(&format!("r{number:02}")).unwrap());
    let window = full.windows[1].1.clone();
    full.windows.truncate(1);
    let runs = (0..RUNS_MAX).map(|number| (run(number), window.clone()));
    full.windows.extend(runs);
    assert_eq!(read(&copy(&full)).unwrap(), full);
}
