//! Stores of every schema so far, opened by today's program.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use kvgate::store::{FILE_NAME, FsDisk, STEPS, open, write_new};
use kvgate_core::decision::{BypassReason, EndHow, Scope};
use kvgate_core::ids::{EngineId, Epoch, Issue, Label, LeaseId, RowNo, TicketId};
use kvgate_core::memory::MemoryStore;
use kvgate_core::reading::{Role, StartMark};
use kvgate_core::state::{EngineRow, EpochCause, EpochEntry};
use kvgate_core::store::Image;
use kvgate_core::ticket::{Ended, Sent, Stage, Ticket};
use kvgate_core::units::{Span, Tokens};

use super::disk::SimDisk;
use super::work::{Account, Work, work};

/// Set to anything: writes the store of today's schema and its description, if they are not there.
const MAKE: &str = "KVGATE_MAKE_STORES";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/stores")
}

/// An image with every kind of row: what a workload leaves, and by hand what it does not reach.
fn rich_image() -> Image {
    let disk = SimDisk::default();
    let mut account = Account::new(MemoryStore::default());
    work(&disk, &mut account, Work::default()).unwrap();
    let job = Work {
        closes: false,
        ..Work::default()
    };
    work(&disk, &mut account, job).unwrap();
    let mut image = account.last().image();
    let mut row = image.tickets.last().unwrap().row.0;
    let lease = LeaseId {
        issue: Issue(1),
        salt: u64::MAX,
    };
    let bypasses = [
        BypassReason::Disabled,
        BypassReason::OutOfScope,
        BypassReason::Protected,
        BypassReason::Degraded,
        BypassReason::Oversize,
        BypassReason::QueueFull,
        BypassReason::Aged,
    ];
    let ends = [
        EndHow::Released,
        EndHow::Cancelled,
        EndHow::SessionClosed,
        EndHow::Expired,
        EndHow::Revoked,
        EndHow::Dropped,
        EndHow::TakenBack,
    ];
    for how in bypasses.map(EndHow::Bypassed).into_iter().chain(ends) {
        row += 1;
        let full = row.is_multiple_of(2);
        let mut asked = image.tickets[0].asked.clone().filter(|_| full);
        if let Some(asked) = asked.as_mut().filter(|_| row.is_multiple_of(4)) {
            asked.sent = Sent::Parts {
                prompt: Tokens::new(row).unwrap(),
                max_new: Tokens::new(60).unwrap(),
            };
            asked.terms.scope = Scope::Eval;
            asked.terms.client = None;
            asked.terms.request_id = Some(Label::new("request-9").unwrap());
        }
        image.tickets.push(Ticket {
            row: RowNo(row),
            id: TicketId::new(&format!("by hand {row}")).unwrap(),
            asked,
            stage: Stage::Ended(Ended {
                at: image.now,
                how,
                lease: full.then_some(lease),
                since: full.then_some(image.now),
                waited: Span::from_millis(row),
                epoch: Epoch(1),
            }),
        });
    }
    let last = image.epochs.last().unwrap().epoch.0;
    let causes = [
        EpochCause::First,
        EpochCause::MembersChanged { joined: 3, left: 2 },
        EpochCause::Restarted(EngineId::new("http://a")),
        EpochCause::WorkerIdChanged(EngineId::new("http://b")),
    ];
    for (number, cause) in (last + 1..).zip(causes) {
        image.epochs.push(EpochEntry {
            epoch: Epoch(number),
            at: image.now,
            cause,
        });
    }
    let roles = [Role::Decode, Role::Prefill, Role::Other];
    for (number, role) in (1..).zip(roles) {
        image.engines.push(EngineRow {
            id: EngineId::new(&format!("http://by-hand-{number}")),
            role,
            worker_ids: ["one".into(), "two".into()].into(),
            seen_healthy: number == 1,
            capacity: (number < 3).then(|| Tokens::new(number * 1_000_000).unwrap()),
            start_mark: (number > 1).then_some(StartMark(number)),
            joined: Epoch(number),
            close_refusals: 0,
            unsupported_at: None,
        });
    }
    image.tally.local_bypasses = [1, 2, 3, 4, 5];
    image
}

/// The content in plain lines, in words that later versions keep.
fn describe(image: &Image) -> String {
    let mut text = String::new();
    let mut line = |content: String| writeln!(text, "{content}").unwrap();
    line(format!(
        "head: term {} seq {} now {} next issue {}",
        image.term,
        image.seq.0,
        image.now.millis(),
        image.next_issue
    ));
    for start in &image.starts {
        line(format!(
            "start: first issue {} salt {} at {}",
            start.first_issue.0,
            start.salt,
            start.at.millis()
        ));
    }
    for epoch in &image.epochs {
        line(format!(
            "epoch {}: at {} {:?}",
            epoch.epoch.0,
            epoch.at.millis(),
            epoch.cause
        ));
    }
    for engine in &image.engines {
        line(format!(
            "engine {}: {:?} workers {:?} healthy {} capacity {:?} mark {:?} joined {}",
            engine.id.as_str(),
            engine.role,
            engine.worker_ids,
            engine.seen_healthy,
            engine.capacity.map(Tokens::get),
            engine.start_mark.map(|mark| mark.0),
            engine.joined.0
        ));
    }
    for ticket in &image.tickets {
        line(describe_ticket(ticket));
    }
    for scope in &image.tally.scopes {
        line(format!(
            "scope: admit {} wait {:?} bypass {:?} cancelled {:?}",
            scope.admit, scope.wait, scope.bypass, scope.cancelled
        ));
    }
    line(format!(
        "tally: ended {:?} after wait {} waited {} local {:?}",
        image.tally.leases_ended,
        image.tally.granted_after_wait,
        image.tally.waited_millis,
        image.tally.local_bypasses
    ));
    text
}

fn describe_ticket(ticket: &Ticket) -> String {
    let asked = ticket.asked.as_ref().map_or_else(
        || "nothing".to_owned(),
        |asked| {
            let sent = match asked.sent {
                Sent::Parts { prompt, max_new } => format!("{}+{}", prompt.get(), max_new.get()),
                Sent::Sum(sum) => sum.get().to_string(),
            };
            format!(
                "{:?} sent {sent} reserves {} {:?} ttl {} client {:?} request {:?}",
                asked.session.as_str(),
                asked.terms.reservation.get(),
                asked.terms.scope,
                asked.terms.ttl.millis(),
                asked.terms.client.as_ref().map(|label| label.as_str()),
                asked.terms.request_id.as_ref().map(|label| label.as_str()),
            )
        },
    );
    let stage = match &ticket.stage {
        Stage::Waiting { since } => format!("waits since {}", since.millis()),
        Stage::Held(lease) => format!(
            "holds {} epoch {} granted {} waited {:?} ttl {} ends {} graced {}",
            lease.id,
            lease.epoch.0,
            lease.granted_at.millis(),
            lease.waited.map(Span::millis),
            lease.ttl.millis(),
            lease.ends_at.millis(),
            lease.graced
        ),
        Stage::Ended(ended) => format!(
            "ended {} {:?} lease {:?} since {:?} waited {} epoch {}",
            ended.at.millis(),
            ended.how,
            ended.lease.map(|lease| lease.to_string()),
            ended.since.map(|since| since.millis()),
            ended.waited.millis(),
            ended.epoch.0
        ),
    };
    format!(
        "ticket {}: {:?} asked {asked}; {stage}",
        ticket.row.0,
        ticket.id.as_str()
    )
}

/// DUR5: a store of every schema that there ever was opens, and holds what was frozen beside it.
#[test]
fn stores_of_every_schema_open() {
    let newest = folder().join(format!("schema-{}.redb", STEPS.len()));
    if std::env::var_os(MAKE).is_some() && !newest.exists() {
        let directory = tempfile::tempdir().unwrap();
        let image = rich_image();
        write_new(&FsDisk::new(directory.path()), &image).unwrap();
        fs::copy(directory.path().join(FILE_NAME), &newest).unwrap();
        fs::write(newest.with_extension("txt"), describe(&image)).unwrap();
    }
    for schema in 1..=STEPS.len() {
        let kept = folder().join(format!("schema-{schema}.redb"));
        let frozen = fs::read_to_string(kept.with_extension("txt")).unwrap_or_default();
        assert!(
            kept.exists() && !frozen.is_empty(),
            "{} or its description is missing; run this test once with {MAKE}=1",
            kept.display()
        );
        let directory = tempfile::tempdir().unwrap();
        fs::copy(&kept, directory.path().join(FILE_NAME)).unwrap();
        let opened = open(directory.path()).unwrap();
        assert_eq!(describe(&opened.image), frozen, "schema {schema}");
    }
}
