//! Fuzz target of the history file: what a file holds is shown as figures or as gaps.

use super::*;
use crate::fuzz::{Inputs, fuzz};

fn summed(body: &[u8]) -> Vec<u8> {
    [body, &crc32fast::hash(body).to_le_bytes()].concat()
}

/// A file of the right shape with these slots in the places of their steps, each with a sum that fits.
fn holds(bytes: &[u8]) {
    let mut rings = Rings::default();
    let mut file = vec![0; rings.bytes()];
    file[..HEAD_BYTES].copy_from_slice(&head());
    let mut steps = Vec::new();
    for body in bytes.chunks(SLOT_BYTES).take(4) {
        let mut slot = body.to_vec();
        slot.resize(SLOT_BYTES - 4, 0);
        let older = summed(&slot[..slot_bytes(SERIES_MIN) - 4]);
        let older = encode(&decode(&older).unwrap());
        assert_eq!(
            older[..slot_bytes(SERIES_MIN) - 4],
            slot[..slot_bytes(SERIES_MIN) - 4]
        );
        slot = summed(&slot);
        let read = decode(&slot).unwrap();
        assert_eq!(encode(&read), slot, "a slot is written as it was read");
        for ring in &mut rings.rings {
            let (_, at) = ring.place(read.step).unwrap();
            file[at..at + SLOT_BYTES].copy_from_slice(&slot);
        }
        steps.push(read.step);
    }
    assert_eq!(rings.read(&file), Some(Series::ALL.len()));
    for step in steps {
        for (step_s, kept) in STEPS {
            let now = Timestamp::from_millis(step.saturating_mul(step_s).saturating_mul(1_000));
            for series in Series::ALL {
                let window = rings.window(series, now, step_s * 10, step_s);
                for point in window.points.into_iter().flatten() {
                    let figures = [point.mean, point.min, point.max];
                    assert!(figures.into_iter().all(f64::is_finite));
                }
            }
            for range_s in [0, u64::MAX] {
                let window = rings.window(Series::Reserved, now, range_s, step_s);
                assert!((1..=kept).contains(&window.points.len()));
            }
        }
    }
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
        bytes.truncate(SLOT_BYTES - 4);
        bytes
    };
    let seeds = [
        slot(1_700_000_000, 1.0),
        slot(170_000_000, 0.5),
        slot(0, -0.0),
        slot(u64::MAX, f64::MAX),
    ];
    let words = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::MIN_POSITIVE,
    ]
    .map(f64::to_le_bytes);
    fuzz!(Inputs::of(seeds).with_words(words), |bytes: &[u8]| {
        holds(bytes);
        // As a whole file it is another shape, whatever it begins with.
        assert_eq!(Rings::default().read(bytes), None);
        // As a slot it is none, or one whose sum happens to fit: it is written with its step again.
        if let Some(slot) = decode(bytes) {
            assert_eq!(encode(&slot)[..8], bytes[..8]);
        }
    });
}
