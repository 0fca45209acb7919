//! Fuzz targets of rows: whatever stands in a table is read to the same value again, or refused.

use std::fmt::Debug;

use kvgate_core::store::Image;
use kvgate_core::tally::Tally;
use kvgate_core::units::Timestamp;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::logical::tests::image;
use super::migrations::{m0002_closes, m0003_steps};
use super::rows::{self, Head, RowError};
use crate::fuzz::{Inputs, fuzz};

/// Bytes that a row may grow by when it is written again: lists of counters are filled up to their length.
const GROWTH_MAX: usize = 1 << 10;

/// What postcard writes where something ends: the longest number, one too long, a length that no row has.
const WORDS: &[&[u8]] = &[
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
    &[0xff, 0xff, 0xff, 0xff, 0x0f],
    &[0x80, 0x80, 0x04],
    &[0x80, 0x00],
    &[0x00],
    &[0x01],
    &[0x02],
    &[0x03],
];

type Encode<T> = fn(&T, &mut Vec<u8>) -> Result<(), RowError>;

/// A row that is read is written as one that is read the same, and takes no more room than the bytes it came from.
fn is_read_again<T: PartialEq + Debug>(
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, RowError>,
    encode: Encode<T>,
) {
    let Ok(row) = decode(bytes) else { return };
    let mut written = Vec::new();
    encode(&row, &mut written).unwrap();
    assert!(written.len() <= bytes.len() + GROWTH_MAX);
    assert_eq!(decode(&written).unwrap(), row);
}

/// Images that a store may hold, the same ones in each run.
fn images() -> Vec<Image> {
    let mut runner = TestRunner::deterministic();
    (0..12)
        .map(|_| image().new_tree(&mut runner).unwrap().current())
        .collect()
}

/// Seeds: the kind of a row, and the row as it is written.
struct Seeds(Vec<Vec<u8>>);

impl Seeds {
    fn put<T>(&mut self, kind: u8, row: &T, encode: Encode<T>) {
        let mut bytes = Vec::new();
        encode(row, &mut bytes).unwrap();
        bytes.insert(0, kind);
        self.0.push(bytes);
    }

    fn inputs(self) -> Inputs {
        Inputs::of(self.0).with_words(WORDS)
    }
}

/// The kind and the row.
fn parted(bytes: &[u8]) -> (u8, &[u8]) {
    let (kind, row) = bytes.split_first().unwrap_or((&0, &[]));
    (*kind, row)
}

#[test]
fn rows_of_leases() {
    let mut seeds = Seeds(Vec::new());
    for image in images() {
        let head = Head {
            term: image.term,
            seq: image.seq.0,
            now: image.now.millis(),
            next_issue: image.next_issue,
        };
        seeds.put(0, &head, Head::encode);
        for ticket in &image.tickets {
            seeds.put(1, ticket, rows::encode_ticket);
        }
        for start in &image.starts {
            seeds.put(2, start, rows::encode_start);
        }
        for entry in &image.epochs {
            seeds.put(3, entry, rows::encode_epoch);
        }
    }
    fuzz!(seeds.inputs(), |bytes: &[u8]| {
        let (kind, row) = parted(bytes);
        match kind % 4 {
            0 => is_read_again(row, Head::decode, Head::encode),
            1 => is_read_again(row, |row| rows::decode_ticket(7, row), rows::encode_ticket),
            2 => is_read_again(row, rows::decode_start, rows::encode_start),
            _ => is_read_again(row, |row| rows::decode_epoch(7, row), rows::encode_epoch),
        }
    });
}

#[test]
fn rows_of_closes() {
    let mut seeds = Seeds(Vec::new());
    for image in images() {
        for engine in &image.engines {
            seeds.put(0, engine, rows::encode_engine);
        }
        for close in &image.closes {
            seeds.put(1, close, rows::encode_close);
        }
        for (_, used) in &image.sessions {
            seeds.put(2, used, |used, buffer| rows::encode_session(*used, buffer));
        }
    }
    fuzz!(seeds.inputs(), |bytes: &[u8]| {
        let (kind, row) = parted(bytes);
        match kind % 3 {
            0 => is_read_again(
                row,
                |row| rows::decode_engine("http://a:1", row),
                rows::encode_engine,
            ),
            1 => is_read_again(row, |row| rows::decode_close(7, row), rows::encode_close),
            _ => {
                let decode = |row: &[u8]| rows::decode_session("s", row).map(|(_, used)| used);
                is_read_again::<Timestamp>(row, decode, |used, buffer| {
                    rows::encode_session(*used, buffer)
                });
            }
        }
        // A key of the table that is no id is refused, whatever the row says.
        if let Ok(key) = std::str::from_utf8(row)
            && let Ok((session, _)) = rows::decode_session(key, &[1, 0])
        {
            assert_eq!(session.as_str(), key);
        }
    });
}

#[test]
fn rows_of_reports_and_settings() {
    let mut seeds = Seeds(Vec::new());
    for image in images() {
        seeds.put(0, &image.tally, rows::encode_tally);
        for (_, window) in &image.windows {
            seeds.put(1, window, rows::encode_window);
        }
        for report in &image.steps {
            seeds.put(2, report, |report, buffer| {
                rows::encode_step(report, buffer).map(|_| ())
            });
        }
        seeds.put(3, &image.overrides, rows::encode_settings);
        for entry in &image.audit {
            seeds.put(4, entry, rows::encode_audit);
        }
    }
    fuzz!(seeds.inputs(), |bytes: &[u8]| {
        let (kind, row) = parted(bytes);
        match kind % 5 {
            0 => is_read_again(row, rows::decode_tally, rows::encode_tally),
            1 => is_read_again(row, rows::decode_window, rows::encode_window),
            2 => is_read_again(
                row,
                |row| rows::decode_step(7, row),
                |report, buffer| rows::encode_step(report, buffer).map(|_| ()),
            ),
            3 => is_read_again(row, rows::decode_settings, rows::encode_settings),
            _ => is_read_again(row, |row| rows::decode_audit(7, row), rows::encode_audit),
        }
    });
}

/// Rows that the steps of migration turn over: what they make of an old row is a row of the next version or no row.
#[test]
fn rows_of_earlier_schemas() {
    let mut seeds = Seeds(Vec::new());
    for mut image in images() {
        for engine in &mut image.engines {
            engine.close_refusals = 0;
            engine.unsupported_at = None;
            seeds.put(0, engine, rows::encode_engine);
        }
        let tally = Tally {
            leases_ended: image.tally.leases_ended,
            granted_after_wait: image.tally.granted_after_wait,
            waited_millis: image.tally.waited_millis,
            ..Tally::default()
        };
        seeds.put(1, &tally, rows::encode_tally);
    }
    // The older shapes are the beginning of the newer ones, under their own version byte: what was gained is a zero
    // byte for each number and the length of each list, and one for each number in it.
    let tally_gained = 6 + Tally::default().close_deliveries.len();
    for seed in &mut seeds.0 {
        seed[1] = 1;
        let gained = if seed[0] == 0 { 2 } else { tally_gained };
        seed.truncate(seed.len() - gained);
    }
    fuzz!(seeds.inputs(), |bytes: &[u8]| {
        let (kind, row) = parted(bytes);
        let is_old = row.first() == Some(&1);
        if kind % 2 == 0 {
            let grown = m0002_closes::grown(row, m0002_closes::ENGINE_GAINS);
            assert_eq!(grown.is_ok(), is_old);
            if let Ok(grown) = grown {
                is_read_again(
                    &grown,
                    |row| rows::decode_engine("http://a:1", row),
                    rows::encode_engine,
                );
            }
        } else {
            let grown = m0002_closes::grown(row, m0002_closes::TALLY_GAINS)
                .and_then(|grown| m0003_steps::grown(&grown));
            assert_eq!(grown.is_ok(), is_old);
            if let Ok(grown) = grown {
                is_read_again(&grown, rows::decode_tally, rows::encode_tally);
            }
        }
    });
}
