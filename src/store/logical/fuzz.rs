//! Fuzz target of logical copies: what is read is whole, keeps every bound and is written as it was read.

use kvgate_core::store::Image;
use kvgate_core::units::Timestamp;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::tests::image;
use super::*;
use crate::fuzz::{Inputs, fuzz};

fn written(image: Image) -> Vec<u8> {
    CopyPieces::new(image).flatten().collect()
}

/// The same lines under an end that fits them, so that edits get past the sum.
fn sealed(copy: &[u8]) -> Vec<u8> {
    let body = copy.strip_suffix(b"\n").unwrap_or(copy);
    let end = body
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    let mut sealed = copy[..end].to_vec();
    let lines = sealed.iter().filter(|byte| **byte == b'\n').count() as u64;
    let line = Line::end(lines, crc32fast::hash(&sealed));
    serde_json::to_writer(&mut sealed, &line).unwrap();
    sealed.push(b'\n');
    sealed
}

fn holds(copy: &[u8]) {
    let Ok(image) = read_copy(copy) else { return };
    assert_eq!(check(&image), Ok(()));
    let again = written(image.clone());
    assert_eq!(read_copy(again.as_slice()).unwrap(), image);
    // A store may be made from it, at any time of day.
    for now in [0, u64::MAX] {
        if let Ok(moved) = moved_on(image.clone(), Timestamp::from_millis(now)) {
            assert!(moved.next_issue >= image.next_issue && moved.seq >= image.seq);
        }
    }
}

/// DUR5.
#[test]
fn copies() {
    let mut runner = TestRunner::deterministic();
    let images = (0..8).map(|_| written(image().new_tree(&mut runner).unwrap().current()));
    let recorded = [
        "stores/schema-1.nd",
        "stores/schema-2.nd",
        "stores/schema-3.nd",
        "stores/schema-4.nd",
    ];
    let words = [
        "null",
        "\"\"",
        "[]",
        "{}",
        "true",
        "\n",
        "\\u0000",
        "{\"end\":",
        "18446744073709551615",
    ];
    fuzz!(
        Inputs::of_fixtures(&recorded).and(images).with_words(words),
        |copy: &[u8]| {
            holds(copy);
            holds(&sealed(copy));
        }
    );
}
