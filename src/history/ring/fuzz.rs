//! Fuzz target of the history file: what a file holds is shown as figures or as gaps.

use std::sync::{Mutex, PoisonError};

use super::*;
use crate::fuzz::{Inputs, fuzz};

/// Bytes of a slot under its sum, in this version and in the first.
const BODY: usize = SLOT_BYTES - 4;
const OLDEST_BODY: usize = slot_bytes(SERIES_MIN) - 4;

fn summed(body: &[u8]) -> Vec<u8> {
    [body, &crc32fast::hash(body).to_le_bytes()].concat()
}

/// Slots with these bytes, each under a sum that fits.
fn slots(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    bytes.chunks(BODY).take(4).map(|body| {
        let mut body = body.to_vec();
        body.resize(BODY, 0);
        summed(&body)
    })
}

/// Whatever stands in the places of its step, a point has three numbers, and no window is longer than its ring.
fn is_shown(rings: &Rings, step: u64) {
    for (step_s, kept) in STEPS {
        let now = Timestamp::from_millis(step.saturating_mul(step_s).saturating_mul(1_000));
        for series in Series::ALL {
            let window = rings.window(series, now, step_s, step_s);
            for point in window.points.into_iter().flatten() {
                let figures = [point.mean, point.min, point.max];
                assert!(figures.into_iter().all(f64::is_finite));
            }
        }
        let window = rings.window(Series::Reserved, now, step_s * 10, step_s);
        assert!((1..=kept).contains(&window.points.len()));
    }
}

/// The file as it would be with these slots.
fn is_read_as_a_file(bytes: &[u8]) {
    let mut rings = Rings::default();
    let mut file = vec![0; rings.bytes()];
    file[..HEAD_BYTES].copy_from_slice(&head());
    for slot in slots(bytes) {
        let step = decode(&slot).unwrap().step;
        for ring in &mut rings.rings {
            let (_, at) = ring.place(step).unwrap();
            file[at..at + SLOT_BYTES].copy_from_slice(&slot);
        }
    }
    assert_eq!(rings.read(&file), Some(Series::ALL.len()));
    assert!(rings.encoded() == file, "it is written as it was read");
    let forever = rings.window(
        Series::Reserved,
        Timestamp::from_millis(u64::MAX),
        u64::MAX,
        1,
    );
    assert_eq!(forever.points.len(), STEPS[0].1);
}

#[test]
fn history_files() {
    let slot = |step: u64, figure: f64| {
        let summary = Summary {
            mean: figure,
            min: figure,
            max: figure,
        };
        let mut bytes = encode(&Slot {
            step,
            figures: [summary; Series::ALL.len()],
        });
        bytes.truncate(BODY);
        bytes
    };
    let seeds = [
        slot(1_700_000_000, 1.0),
        slot(170_000_000, 0.5),
        slot(0, -0.0),
        slot(u64::MAX, f64::MAX),
        [slot(9, f64::NAN), slot(8, f64::INFINITY)].concat(),
    ];
    for seed in &seeds {
        is_read_as_a_file(seed);
    }
    let words = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::MIN_POSITIVE,
    ]
    .map(f64::to_le_bytes);
    // Making all slots anew would take most of the time.
    let rings = Mutex::new(Rings::default());
    fuzz!(Inputs::of(seeds).with_words(words), |bytes: &[u8]| {
        let mut rings = rings.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in slots(bytes) {
            let older = encode(&decode(&summed(&slot[..OLDEST_BODY])).unwrap());
            assert_eq!(older[..OLDEST_BODY], slot[..OLDEST_BODY]);
            let read = decode(&slot).unwrap();
            assert_eq!(encode(&read), slot, "a slot is written as it was read");
            for ring in &mut rings.rings {
                *ring.place(read.step).unwrap().0 = Some(read);
            }
            is_shown(&rings, read.step);
        }
        // As a whole file it is another shape, whatever it begins with.
        assert_eq!(rings.read(bytes), None);
        // As a slot it is none, or one whose sum happens to fit: it is written with its step again.
        if let Some(slot) = decode(bytes) {
            assert_eq!(encode(&slot)[..8], bytes[..8]);
        }
    });
}
