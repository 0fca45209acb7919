//! The file stays small however many leases went through it.

use kvgate::store::open;
use kvgate_core::close::{CloseIntent, CloseMode, CloseStage, Target, TargetState};
use kvgate_core::decision::{EndHow, Scope};
use kvgate_core::ids::{
    CloseId, CloseNo, EngineId, Epoch, Issue, LeaseId, RowNo, Seq, SessionId, Term, TicketId,
};
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Store, StoreControl};
use kvgate_core::ticket::{Asked, Ended, Lease, Sent, Stage, Terms, Ticket};
use kvgate_core::units::{Span, Timestamp};

use crate::store::tokens;

/// How many leases go through the store; the nightly run sets a million.
const COUNT: &str = "KVGATE_CHURN";

pub fn ticket(number: u64, held: bool) -> Ticket {
    let at = Timestamp::from_millis(1_000_000 + number);
    let id = LeaseId {
        issue: Issue(number),
        salt: 7,
    };
    Ticket {
        row: RowNo(number),
        id: TicketId::new(&format!("churn-{number:08}-{:016x}", number * 0x9e37_79b9)).unwrap(),
        asked: Some(Asked {
            session: SessionId::new(&format!("session-{}", number % 97)).unwrap(),
            sent: Sent::Sum(tokens(4_000)),
            terms: Terms {
                reservation: tokens(4_000),
                scope: Scope::Train,
                ttl: Span::from_secs(60),
                client: None,
                request_id: None,
            },
        }),
        stage: if held {
            Stage::Held(Lease {
                id,
                epoch: Epoch(1),
                granted_at: at,
                waited: None,
                ttl: Span::from_secs(60),
                ends_at: at.after(Span::from_secs(60)),
                graced: false,
            })
        } else {
            Stage::Ended(Ended {
                at,
                how: EndHow::Released,
                lease: Some(id),
                since: None,
                waited: Span::from_millis(0),
                epoch: Epoch(1),
            })
        },
    }
}

/// A close as it is asked for, while it is delivered and when it is done.
pub fn close(number: u64, stage: CloseStage) -> CloseIntent {
    let state = match stage {
        CloseStage::Joining { .. } | CloseStage::Delivering { .. } => TargetState::Pending,
        CloseStage::Done { .. } => TargetState::Failed,
    };
    CloseIntent {
        id: CloseId {
            number: CloseNo(number),
            salt: 7,
        },
        session: session(number),
        mode: CloseMode::Join,
        reason: None,
        requested_at: Timestamp::from_millis(number),
        stage,
        targets: (0..8)
            .map(|engine| {
                let target = Target {
                    state,
                    ..Target::PENDING
                };
                (
                    EngineId::new(&format!("http://engine-{engine}:30000")),
                    target,
                )
            })
            .collect(),
        counts: [
            0,
            0,
            0,
            0,
            0,
            u32::from(state == TargetState::Failed) * 8,
            0,
        ],
        timed_out: false,
        failure_counted: false,
        reopened: None,
        not_aborted: Default::default(),
    }
}

fn session(number: u64) -> SessionId {
    SessionId::new(&format!("closed-{number:08}")).unwrap()
}

/// What becomes of the closes of one turn: asked for, delivered, done, and forgotten in the end.
fn close_records(number: u64, live: u64, records: &mut Vec<Record>) {
    let at = Timestamp::from_millis(number);
    let stages = [
        CloseStage::Joining { ready_since: None },
        CloseStage::Delivering {
            since: at,
            early: false,
        },
        CloseStage::Done { at },
    ];
    records.push(Record::SessionUsed(session(number), at));
    for (age, stage) in (0..).zip(stages) {
        if let Some(number) = number.checked_sub(age * live / 4) {
            records.push(Record::Close(Box::new(close(number, stage))));
        }
    }
    if let Some(oldest) = number.checked_sub(live) {
        records.push(Record::CloseForgotten(CloseNo(oldest)));
        records.push(Record::SessionForgotten(session(oldest)));
    }
}

/// Leases come, end and are forgotten, `live` of each kind at a time, in turns of `batch`. Every
/// tenth comes with a close.
fn churn(count: u64, live: u64, batch: u64) {
    let directory = tempfile::tempdir().unwrap();
    let mut store = open(directory.path()).unwrap().store;
    let mut largest = 0;
    let mut most_live = 0;
    for turn in 0..count / batch {
        let mut records = Vec::new();
        for number in turn * batch..(turn + 1) * batch {
            records.push(Record::Ticket(ticket(number, true)));
            if let Some(old) = number.checked_sub(live) {
                records.push(Record::Ticket(ticket(old, false)));
            }
            if let Some(older) = number.checked_sub(2 * live) {
                records.push(Record::Forgotten(RowNo(older)));
            }
            if number.is_multiple_of(10) {
                close_records(number / 10, live / 10, &mut records);
            }
        }
        store
            .commit(Commit {
                term: Term(0),
                seq: Seq(turn + 1),
                now: Timestamp::from_millis(1_000_000 + turn),
                next_issue: (turn + 1) * batch,
                records: &records,
            })
            .unwrap();
        largest = largest.max(store.bytes());
        most_live = most_live.max(store.live_bytes());
    }
    println!("churn of {count} leases: {most_live} live bytes, {largest} bytes on disk");
    assert!(
        largest <= 4 * most_live + (2 << 20),
        "{largest} bytes for {most_live} live ones"
    );
    let (bytes, live_bytes) = (store.bytes(), store.live_bytes());
    store.close().unwrap();
    let again = open(directory.path()).unwrap();
    assert_eq!(
        again.store.live_bytes(),
        live_bytes,
        "the live bytes drifted"
    );
    assert!(again.store.bytes() <= bytes);
    assert_eq!(again.image.tickets.len() as u64, (2 * live).min(count));
    assert_eq!(again.image.closes.len() as u64, (live / 10).min(count / 10));
    assert_eq!(again.image.sessions.len(), again.image.closes.len());
}

/// DUR4: however many leases went through it, the file stays within 4 times its live bytes and
/// 2 MiB; 50,000 leases here, a million of them in the nightly run.
#[test]
fn churn_keeps_the_file_small() {
    let count = std::env::var(COUNT).map_or(50_000, |count| count.parse().unwrap());
    churn(count, 500, 100);
    churn(count, count / 20, count / 500);
}

/// A file that has grown far beyond what it holds is written anew at the next start.
#[test]
fn a_bloated_file_is_rewritten_at_the_next_start() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = open(directory.path()).unwrap().store;
    let mut commit = |records: &[Record], seq| {
        store
            .commit(Commit {
                term: Term(0),
                seq: Seq(seq),
                now: Timestamp::from_millis(1),
                next_issue: 0,
                records,
            })
            .unwrap();
        store.bytes()
    };
    let many: Vec<Record> = (0..40_000)
        .map(|number| Record::Ticket(ticket(number, true)))
        .collect();
    commit(&many, 1);
    let none: Vec<Record> = (1..40_000)
        .map(|number| Record::Forgotten(RowNo(number)))
        .collect();
    let bytes = commit(&none, 2);
    assert!(bytes > 3 << 20, "{bytes}");
    store.close().unwrap();
    let opened = open(directory.path()).unwrap();
    assert_eq!(opened.image.tickets, [ticket(0, true)]);
    assert!(opened.store.bytes() < 1 << 20, "{}", opened.store.bytes());
}
