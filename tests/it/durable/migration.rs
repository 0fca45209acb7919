//! A migration: a copy is kept, what interrupts it does no harm, and a newer store is refused.

use kvgate::store::{FILE_NAME, OpenError, STEPS, Step, open_on, open_with};
use kvgate_core::memory::MemoryStore;
use redb::{ReadableDatabase, TableDefinition, WriteTransaction};

use super::disk::{Files, SimDisk};
use super::work::{Account, Work, work};

const NEW_TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("new in schema 2");

/// The schema of today, and one step more.
pub const TWO_STEPS: &[Step] = &[STEPS[0], second];

fn second(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction
        .open_table(NEW_TABLE)?
        .insert(2, b"row".as_slice())?;
    Ok(())
}

fn closed_store() -> (Files, MemoryStore) {
    let disk = SimDisk::default();
    let mut account = Account::new(MemoryStore::default());
    work(&disk, &mut account, Work::default()).unwrap();
    (disk.files(), account.last())
}

/// DUR1, DUR5: a store of an older schema is copied, migrated and rewritten; nothing of it is lost,
/// the copy is the file as it was, and the program of before refuses the new one and leaves it as
/// it is.
#[test]
fn a_migration_keeps_a_copy_and_loses_nothing() {
    let (files, state) = closed_store();
    let disk = SimDisk::with(&files);
    let opened = open_with(disk.shared(), TWO_STEPS).unwrap();
    assert_eq!(opened.image, state.image());
    drop(opened);
    let after = disk.files();
    assert_eq!(
        after[&format!("{FILE_NAME}.before-2")],
        files[FILE_NAME],
        "the copy is not the file of before"
    );
    let file = SimDisk::with(&after);
    let refused = open_on(file.shared()).unwrap_err();
    assert!(
        matches!(
            refused,
            OpenError::Newer {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{refused:?}"
    );
    assert_eq!(file.files(), after, "a refused store was touched");
    // The next start has nothing to migrate, and the copy opens with the program of before.
    let again = open_with(file.shared(), TWO_STEPS).unwrap();
    assert_eq!(again.image, state.image());
    let copy = after[&format!("{FILE_NAME}.before-2")].clone();
    let back = SimDisk::with(&Files::from([(FILE_NAME.to_owned(), copy)]));
    assert_eq!(open_on(back.shared()).unwrap().image, state.image());
}

/// A step that fails leaves the store of before, which opens with the program of before.
#[test]
fn a_migration_that_fails_changes_nothing() {
    fn broken(transaction: &WriteTransaction) -> Result<(), redb::Error> {
        transaction
            .open_table(NEW_TABLE)?
            .insert(1, b"half".as_slice())?;
        Err(redb::Error::Corrupted("as the test wants it".to_owned()))
    }
    const BROKEN: &[Step] = &[STEPS[0], broken];
    let (files, state) = closed_store();
    let disk = SimDisk::with(&files);
    let error = open_with(disk.shared(), BROKEN).unwrap_err();
    assert!(matches!(error, OpenError::Damaged(..)), "{error:?}");
    let opened = open_on(disk.shared()).unwrap();
    assert_eq!(opened.image, state.image());
    drop(opened);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE_NAME);
    std::fs::write(&path, &disk.files()[FILE_NAME]).unwrap();
    let database = redb::Database::open(&path).unwrap();
    let transaction = database.begin_read().unwrap();
    assert!(transaction.open_table(NEW_TABLE).is_err());
}
