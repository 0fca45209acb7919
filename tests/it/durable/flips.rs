//! Single flipped bits in a closed file.

use kvgate::store::{FILE_NAME, OpenError, open_on, write_new};
use kvgate_core::memory::MemoryStore;

use super::disk::{Dice, SimDisk};
use super::work::{Account, Work, work};

/// DUR5: a store with one flipped bit is refused and left as it is, or the bit lies where nothing
/// is kept: never a wrong image, never a panic.
#[test]
fn a_flipped_bit_is_refused_or_harmless() {
    let disk = SimDisk::default();
    let mut account = Account::new(MemoryStore::default());
    let job = Work {
        turns: 60,
        ..Work::default()
    };
    work(&disk, &mut account, job).unwrap();
    // Written anew, so that few bytes of the file are left over from turns before.
    let disk = SimDisk::default();
    write_new(&disk, &account.last().image()).unwrap();
    let files = disk.files();
    let bits = files[FILE_NAME].len() * 8;
    let written: Vec<usize> = (0..bits / 8)
        .filter(|at| files[FILE_NAME][*at] != 0)
        .collect();
    let image = account.last().image();
    let mut dice = Dice(1);
    let (mut refused, mut harmless) = (0, 0);
    for number in 0..300 {
        // Some in the header, where redb finds everything else with; most where something stands.
        let bit = match number % 6 {
            0 => dice.below(512 * 8),
            1 => dice.below(bits),
            _ => written[dice.below(written.len())] * 8 + dice.below(8),
        };
        let mut files = files.clone();
        files.get_mut(FILE_NAME).unwrap()[bit / 8] ^= 1 << (bit % 8);
        let disk = SimDisk::with(&files);
        match open_on(disk.shared()) {
            Ok(opened) => {
                assert!(opened.image == image, "bit {bit}: a wrong image");
                harmless += 1;
            }
            Err(error) => {
                assert!(
                    matches!(error, OpenError::Damaged(..) | OpenError::Foreign(_)),
                    "bit {bit}: {error:?}"
                );
                assert!(disk.files() == files, "bit {bit}: the file was touched");
                refused += 1;
            }
        }
    }
    println!("flipped bits: {refused} refused, {harmless} harmless");
    assert!(refused > 50 && harmless > 0, "{refused} / {harmless}");
}
