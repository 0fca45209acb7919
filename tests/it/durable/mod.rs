//! Nothing lost: the store under power cuts, I/O errors, flipped bits, a full disk and migrations.

mod churn;
mod disk;
mod faults;
mod flips;
mod golden;
mod migration;
mod power;
mod start;
mod work;

pub use self::churn::close;

use kvgate_core::ids::Term;
use kvgate_core::memory::MemoryStore;
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Image, Store};

/// A reference store that holds this image.
fn reference(image: &Image) -> MemoryStore {
    let mut store = MemoryStore::default();
    if *image == Image::default() {
        return store;
    }
    let starts = image.starts.iter().cloned();
    let records: Vec<Record> = starts
        .map(|start| Record::Started(Term(image.term), start))
        .chain(image.tickets.iter().cloned().map(Record::Ticket))
        .chain(image.epochs.iter().cloned().map(Record::Epoch))
        .chain(image.engines.iter().cloned().map(Record::Engine))
        .chain(
            image
                .closes
                .iter()
                .cloned()
                .map(Box::new)
                .map(Record::Close),
        )
        .chain(
            image
                .sessions
                .iter()
                .map(|(session, used)| Record::SessionUsed(session.clone(), *used)),
        )
        .chain(
            image
                .windows
                .iter()
                .map(|(run, window)| Record::Window(run.clone(), window.clone())),
        )
        .chain(image.steps.iter().cloned().map(Box::new).map(Record::Step))
        .chain(image.audit.iter().cloned().map(Box::new).map(Record::Audit))
        .chain([
            Record::Settings(Box::new(image.overrides.clone())),
            Record::Tally(Box::new(image.tally.clone())),
        ])
        .collect();
    let Ok(()) = store.commit(Commit {
        term: Term(image.term),
        seq: image.seq,
        now: image.now,
        next_issue: image.next_issue,
        records: &records,
    });
    assert_eq!(store.image(), *image);
    store
}
