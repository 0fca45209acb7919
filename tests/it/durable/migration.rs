//! A migration: a copy is kept, what interrupts it does no harm, and a newer store is refused.

use kvgate::store::{FILE_NAME, OpenError, STEPS, Step, look, open, open_on, open_with};
use kvgate_core::memory::MemoryStore;
use redb::{ReadableDatabase, TableDefinition, WriteTransaction};

use super::disk::{Files, SimDisk};
use super::golden::kept_store;
use super::work::{Account, Work, work};

const NEW_TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("of a schema to come");

/// The schema of today, and one step more.
pub const ONE_MORE: &[Step] = &[STEPS[0], STEPS[1], STEPS[2], STEPS[3], fifth];

fn fifth(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction
        .open_table(NEW_TABLE)?
        .insert(3, b"row".as_slice())?;
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
    let opened = open_with(disk.shared(), ONE_MORE).unwrap();
    assert_eq!(opened.image, state.image());
    drop(opened);
    let after = disk.files();
    assert_eq!(
        after[&format!("{FILE_NAME}.before-5")],
        files[FILE_NAME],
        "the copy is not the file of before"
    );
    let file = SimDisk::with(&after);
    let refused = open_on(file.shared()).unwrap_err();
    assert!(
        matches!(
            refused,
            OpenError::Newer {
                found: 5,
                known: 4,
                ..
            }
        ),
        "{refused:?}"
    );
    assert_eq!(file.files(), after, "a refused store was touched");
    // The next start has nothing to migrate, and the copy opens with the program of before.
    let again = open_with(file.shared(), ONE_MORE).unwrap();
    assert_eq!(again.image, state.image());
    let copy = after[&format!("{FILE_NAME}.before-5")].clone();
    let back = SimDisk::with(&Files::from([(FILE_NAME.to_owned(), copy)]));
    assert_eq!(open_on(back.shared()).unwrap().image, state.image());
}

/// DUR5: a row of an older schema that is none is damage, and said as such; the file is not touched.
#[test]
fn a_migration_refuses_a_row_that_it_does_not_know() {
    let rows = [
        (1, "meta", "tally"),
        (1, "engines", "http://a"),
        (2, "meta", "tally"),
    ];
    for (schema, table, key) in rows {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE_NAME);
        std::fs::write(&path, kept_store(schema)).unwrap();
        let database = redb::Database::open(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        let rows: TableDefinition<'_, &str, &[u8]> = TableDefinition::new(table);
        transaction
            .open_table(rows)
            .unwrap()
            .insert(key, [9].as_slice())
            .unwrap();
        transaction.commit().unwrap();
        drop(database);
        let before = std::fs::read(&path).unwrap();
        let refused = open(directory.path()).unwrap_err();
        assert!(matches!(refused, OpenError::Damaged(..)), "{refused:?}");
        let seen = look(directory.path()).unwrap_err();
        assert!(seen.to_string().contains("unknown version"), "{seen}");
        assert!(std::fs::read(&path).unwrap() == before, "{key}: touched");
        let entries = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(entries, 1, "{key}: something was made beside it");
    }
}

/// DUR5: a step that fails leaves the file as it is, which opens with the program of before.
#[test]
fn a_migration_that_fails_changes_nothing() {
    fn broken(transaction: &WriteTransaction) -> Result<(), redb::Error> {
        transaction
            .open_table(NEW_TABLE)?
            .insert(1, b"half".as_slice())?;
        Err(redb::Error::Corrupted("as the test wants it".to_owned()))
    }
    const BROKEN: &[Step] = &[STEPS[0], STEPS[1], STEPS[2], STEPS[3], broken];
    let (files, state) = closed_store();
    let disk = SimDisk::with(&files);
    let error = open_with(disk.shared(), BROKEN).unwrap_err();
    assert!(matches!(error, OpenError::Damaged(..)), "{error:?}");
    assert_eq!(disk.files(), files, "the file was touched");
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
