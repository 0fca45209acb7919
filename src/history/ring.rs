//! The rings and their file: slots of fixed size, each addressed by its time, each with a check sum.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kvgate_core::units::Timestamp;

use super::Window;
use super::series::{Sample, Series};

/// Seconds of a step and how many steps are kept: 15 minutes, 6 hours, 7 days.
pub const STEPS: [(u64, usize); 3] = [(1, 900), (10, 2_160), (60, 10_080)];

/// First bytes of the file: a name and the version of the format.
const MAGIC: &[u8; 8] = b"kvgate\x00\x01";
/// Name and number of series.
const HEAD_BYTES: usize = 16;
const SLOT_BYTES: usize = slot_bytes(Series::ALL.len());
/// Series of the first version. A file with fewer is none of ours.
const SERIES_MIN: usize = 21;

/// Time, three figures a series, check sum.
const fn slot_bytes(series: usize) -> usize {
    8 + series * 24 + 4
}

/// Why there is no history file.
#[derive(Debug, thiserror::Error)]
#[error("the history file {} cannot be used: {error}", path.display())]
pub struct HistoryError {
    path: PathBuf,
    error: io::Error,
}

/// What one step of a series comes to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// Mean of the samples.
    pub mean: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Number of the step since the Unix epoch.
    step: u64,
    figures: [Summary; Series::ALL.len()],
}

const NOTHING: Summary = Summary {
    mean: f64::NAN,
    min: f64::NAN,
    max: f64::NAN,
};

#[derive(Debug)]
struct Ring {
    step_s: u64,
    slots: Vec<Option<Slot>>,
    /// Where its first slot stands in the file.
    offset: usize,
}

/// All rings, and the file when there is one.
#[derive(Debug)]
pub struct Rings {
    rings: Vec<Ring>,
    file: Option<File>,
}

impl Default for Rings {
    /// In memory only.
    fn default() -> Self {
        let mut offset = HEAD_BYTES;
        let rings = STEPS.map(|(step_s, kept)| {
            let ring = Ring {
                step_s,
                slots: vec![None; kept],
                offset,
            };
            offset = offset.saturating_add(kept.saturating_mul(SLOT_BYTES));
            ring
        });
        Self {
            rings: rings.into(),
            file: None,
        }
    }
}

impl Rings {
    /// Goes on with a file, or begins one.
    pub(super) fn open(path: &Path) -> Result<Self, HistoryError> {
        Self::try_open(path).map_err(|error| HistoryError {
            path: path.to_owned(),
            error,
        })
    }

    fn try_open(path: &Path) -> io::Result<Self> {
        let mut rings = Self::default();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path)?;
        let mut bytes = Vec::new();
        // What is longer than ours is not ours.
        let longest = u64::try_from(rings.bytes()).unwrap_or(u64::MAX);
        (&mut file)
            .take(longest.saturating_add(1))
            .read_to_end(&mut bytes)?;
        let series = if bytes.is_empty() {
            Some(0)
        } else {
            rings.read(&bytes)
        };
        match series {
            Some(series) if series == Series::ALL.len() => {
                rings.file = Some(file);
                return Ok(rings);
            }
            Some(0) => {}
            // A file of an older version: it is written anew with the series of this one.
            Some(_) => {
                let temporary = path.with_extension("rings.new");
                fs::write(&temporary, rings.encoded())?;
                fs::rename(&temporary, path)?;
                rings.file = Some(options.open(path)?);
                return Ok(rings);
            }
            None => {
                let aside = path.with_extension("rings.bak");
                tracing::warn!(file = %path.display(), aside = %aside.display(), "the history file is of another shape; it is set aside");
                fs::rename(path, aside)?;
                file = options.open(path)?;
            }
        }
        file.write_all_at(&head(), 0)?;
        file.set_len(longest)?;
        rings.file = Some(file);
        Ok(rings)
    }

    fn slots(&self) -> usize {
        self.rings.iter().map(|ring| ring.slots.len()).sum()
    }

    fn bytes(&self) -> usize {
        HEAD_BYTES.saturating_add(self.slots().saturating_mul(SLOT_BYTES))
    }

    /// How many series the file has; `None` for one of another shape. A slot that was torn is left
    /// out, and so are series that are newer than the file.
    fn read(&mut self, bytes: &[u8]) -> Option<usize> {
        let (name, rest) = bytes.split_at_checked(MAGIC.len())?;
        let (count, rest) = rest.split_first_chunk::<8>()?;
        let series = usize::try_from(u64::from_le_bytes(*count)).ok()?;
        let known = (SERIES_MIN..=Series::ALL.len()).contains(&series);
        if name != MAGIC || !known {
            return None;
        }
        let slot_bytes = slot_bytes(series);
        if rest.len() != self.slots().saturating_mul(slot_bytes) {
            return None;
        }
        let slots = self.rings.iter_mut().flat_map(|ring| &mut ring.slots);
        for (slot, bytes) in slots.zip(rest.chunks_exact(slot_bytes)) {
            *slot = decode(bytes);
        }
        Some(series)
    }

    /// The whole file.
    fn encoded(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes());
        bytes.extend(head());
        for slot in self.rings.iter().flat_map(|ring| &ring.slots) {
            match slot {
                Some(slot) => bytes.extend(encode(slot)),
                None => bytes.extend([0; SLOT_BYTES]),
            }
        }
        bytes
    }

    /// Takes in one sample. The steps that it belongs to are worked out anew from the samples of
    /// their time, so that nothing is lost when the process was away in the middle of one.
    ///
    /// # Errors
    /// When the file cannot be written; the sample is in memory all the same.
    pub(super) fn put(&mut self, now: Timestamp, sample: &Sample) -> io::Result<()> {
        let second = now.millis() / 1_000;
        let figures = sample.map(|value| Summary {
            mean: value,
            min: value,
            max: value,
        });
        let mut slots = Vec::with_capacity(self.rings.len());
        for index in 0..self.rings.len() {
            let Some(step_s) = self.rings.get(index).map(|ring| ring.step_s) else {
                continue;
            };
            let step = second / step_s;
            let figures = if step_s == 1 {
                figures
            } else {
                self.summed(step * step_s, step_s)
            };
            let slot = Slot { step, figures };
            if let Some(ring) = self.rings.get_mut(index)
                && let Some((place, at)) = ring.place(step)
            {
                *place = Some(slot);
                slots.push((at, slot));
            }
        }
        let Some(file) = &self.file else {
            return Ok(());
        };
        slots.iter().try_for_each(|(at, slot)| {
            let at = u64::try_from(*at).unwrap_or(u64::MAX);
            file.write_all_at(&encode(slot), at)
        })
    }

    /// The samples of `length_s` seconds from `first` on as one.
    fn summed(&self, first: u64, length_s: u64) -> [Summary; Series::ALL.len()] {
        let mut sums = [(0.0, 0_u32); Series::ALL.len()];
        let mut figures = [NOTHING; Series::ALL.len()];
        let Some(seconds) = self.rings.first() else {
            return figures;
        };
        for slot in (first..first.saturating_add(length_s)).filter_map(|step| seconds.slot(step)) {
            let all = slot.figures.iter().zip(&mut figures).zip(&mut sums);
            for ((sample, summary), (sum, count)) in all {
                if !sample.mean.is_finite() {
                    continue;
                }
                *sum += sample.mean;
                *count = count.saturating_add(1);
                summary.mean = *sum / f64::from(*count);
                summary.min = sample.min.min(summary.min);
                summary.max = sample.max.max(summary.max);
            }
        }
        figures
    }

    pub(super) fn window(
        &self,
        series: Series,
        now: Timestamp,
        range_s: u64,
        step_s: u64,
    ) -> Window {
        let ring = self.rings.iter().find(|ring| ring.step_s == step_s);
        let last = now.millis() / 1_000 / step_s.max(1);
        let kept = ring.map_or(0, |ring| ring.slots.len());
        let kept = u64::try_from(kept).unwrap_or(u64::MAX);
        let count = range_s.div_ceil(step_s.max(1)).clamp(1, kept.max(1));
        let first = last.saturating_sub(count.saturating_sub(1));
        let place = series.place();
        let points = (first..=last)
            .map(|step| {
                let summary = ring?.slot(step)?.figures.get(place).copied()?;
                summary.mean.is_finite().then_some(summary)
            })
            .collect();
        let from = first.saturating_mul(step_s).saturating_mul(1_000);
        Window {
            step_s,
            from: Timestamp::from_millis(from),
            points,
        }
    }
}

impl Ring {
    /// Its place in the ring, and where it stands in the file.
    fn place(&mut self, step: u64) -> Option<(&mut Option<Slot>, usize)> {
        let kept = u64::try_from(self.slots.len()).ok()?;
        let place = usize::try_from(step.checked_rem(kept)?).ok()?;
        let at = self.offset.saturating_add(place.saturating_mul(SLOT_BYTES));
        Some((self.slots.get_mut(place)?, at))
    }

    /// What was kept for a step, unless a later one has taken its place.
    fn slot(&self, step: u64) -> Option<&Slot> {
        let kept = u64::try_from(self.slots.len()).ok()?;
        let place = usize::try_from(step.checked_rem(kept)?).ok()?;
        let slot = self.slots.get(place)?.as_ref()?;
        (slot.step == step).then_some(slot)
    }
}

fn head() -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    let count = u64::try_from(Series::ALL.len()).unwrap_or(u64::MAX);
    let (name, number) = head.split_at_mut(MAGIC.len());
    name.copy_from_slice(MAGIC);
    number.copy_from_slice(&count.to_le_bytes());
    head
}

fn encode(slot: &Slot) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(SLOT_BYTES);
    bytes.extend(slot.step.to_le_bytes());
    for Summary { mean, min, max } in &slot.figures {
        for figure in [mean, min, max] {
            bytes.extend(figure.to_le_bytes());
        }
    }
    let sum = crc32fast::hash(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// `None` for a slot that was never written, or torn.
fn decode(bytes: &[u8]) -> Option<Slot> {
    let (body, sum) = bytes.split_last_chunk::<4>()?;
    if crc32fast::hash(body).to_le_bytes() != *sum {
        return None;
    }
    let (step, rest) = body.split_first_chunk::<8>()?;
    let mut figures = [NOTHING; Series::ALL.len()];
    let mut numbers = rest
        .as_chunks::<8>()
        .0
        .iter()
        .map(|bytes| f64::from_le_bytes(*bytes));
    for summary in &mut figures {
        // An older file ends here: the series that came later have no figures in it.
        let Some(mean) = numbers.next() else { break };
        *summary = Summary {
            mean,
            min: numbers.next()?,
            max: numbers.next()?,
        };
    }
    Some(Slot {
        step: u64::from_le_bytes(*step),
        figures,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(value: f64) -> Sample {
        [value; Series::ALL.len()]
    }

    fn at(second: u64) -> Timestamp {
        Timestamp::from_millis(1_700_000_000_000 + second * 1_000)
    }

    fn means(rings: &Rings, now: u64, range_s: u64, step_s: u64) -> Vec<Option<f64>> {
        rings
            .window(Series::Reserved, at(now), range_s, step_s)
            .points
            .iter()
            .map(|point| point.map(|summary| summary.mean))
            .collect()
    }

    /// Steps are summed from their seconds; seconds without a sample are gaps.
    #[test]
    fn samples_and_their_steps() {
        let mut rings = Rings::default();
        for second in (0..30).filter(|second| *second != 5) {
            rings.put(at(second), &sample(second as f64)).unwrap();
        }
        assert_eq!(means(&rings, 6, 3, 1), [Some(4.0), None, Some(6.0)]);
        let window = rings.window(Series::Reserved, at(29), 30, 10);
        assert_eq!(window.from, at(0));
        assert_eq!(
            window.points[0].unwrap(),
            Summary {
                mean: 40.0 / 9.0,
                min: 0.0,
                max: 9.0
            }
        );
        assert_eq!(window.points[2].unwrap().mean, 24.5);
    }

    /// A ring keeps so much and no more, and a range is never longer than its ring.
    #[test]
    fn rings_are_bounded() {
        let mut rings = Rings::default();
        for second in 0..1_000 {
            rings.put(at(second), &sample(1.0)).unwrap();
        }
        assert_eq!(means(&rings, 99, 1, 1), [None], "overwritten");
        assert_eq!(means(&rings, 100, 1, 1), [Some(1.0)]);
        assert_eq!(means(&rings, 999, 100_000, 1).len(), 900);
        assert_eq!(means(&rings, 999, 0, 60).len(), 1);
    }

    /// The file brings everything back; a torn slot is a gap; the size never changes.
    #[test]
    fn a_file_brings_the_samples_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("h");
        let mut rings = Rings::open(&path).unwrap();
        let size = fs::metadata(&path).unwrap().len();
        for second in 0..20 {
            let value = if second == 3 { f64::NAN } else { second as f64 };
            rings.put(at(second), &sample(value)).unwrap();
        }
        let (_, torn) = rings.rings[0].place(at(7).millis() / 1_000).unwrap();
        drop(rings);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0xff; 3], torn as u64 + 20).unwrap();
        let mut rings = Rings::open(&path).unwrap();
        let seconds = means(&rings, 9, 10, 1);
        let gaps: Vec<usize> = (0..10).filter(|place| seconds[*place].is_none()).collect();
        assert_eq!(gaps, [3, 7]);
        assert_eq!(means(&rings, 9, 10, 10), [Some((45.0 - 3.0) / 9.0)]);
        rings.put(at(20), &sample(1.0)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), size);
    }

    /// A file of a version that knew fewer series goes on, and is as long as ours then.
    #[test]
    fn an_older_file_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("h");
        let mut rings = Rings::default();
        for second in 0..20 {
            rings.put(at(second), &sample(second as f64)).unwrap();
        }
        let mut old = MAGIC.to_vec();
        old.extend((SERIES_MIN as u64).to_le_bytes());
        for slot in rings.rings.iter().flat_map(|ring| &ring.slots) {
            match slot {
                Some(slot) => {
                    let mut bytes = encode(slot);
                    bytes.truncate(slot_bytes(SERIES_MIN) - 4);
                    let sum = crc32fast::hash(&bytes);
                    bytes.extend(sum.to_le_bytes());
                    old.extend(bytes);
                }
                None => old.extend([0; slot_bytes(SERIES_MIN)]),
            }
        }
        fs::write(&path, &old).unwrap();
        for _ in 0..2 {
            let rings = Rings::open(&path).unwrap();
            assert_eq!(means(&rings, 9, 10, 1)[9], Some(9.0));
            assert_eq!(means(&rings, 9, 10, 10), [Some(4.5)]);
            let newer = rings.window(Series::WaitP95, at(9), 10, 1);
            assert!(newer.points.iter().all(Option::is_none));
            assert_eq!(fs::metadata(&path).unwrap().len(), rings.bytes() as u64);
        }
        assert!(!path.with_extension("rings.bak").exists());
    }

    /// A file of another shape is set aside, never written over.
    #[test]
    fn another_file_is_set_aside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("h");
        fs::write(&path, b"something else").unwrap();
        let mut rings = Rings::open(&path).unwrap();
        rings.put(at(1), &sample(1.0)).unwrap();
        let aside = path.with_extension("rings.bak");
        assert_eq!(fs::read(aside).unwrap(), b"something else");
    }
}
