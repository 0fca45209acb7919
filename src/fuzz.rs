//! What the fuzz targets share: inputs that begin at real ones and are edited.
//!
//! A target is an ordinary test in a module `fuzz` beside the code that it tries. bolero drives it: half a second
//! in an ordinary test run, longer where `BOLERO_RANDOM_TEST_TIME_MS` says so. Random bytes alone would hardly
//! get past a first byte or brace, so each input is made from a seed by a few edits: bits, numbers, words of the
//! format, pieces that are left out, repeated or taken from another seed.
//!
//! A target that fails prints its edits, shrunken, and `BOLERO_RANDOM_SEED`, with which it fails again.

use std::fs;
use std::path::Path;
use std::time::Duration;

use bolero::TypeGenerator;

/// How long a target runs unless the environment says otherwise.
pub(crate) const TIME: Duration = Duration::from_millis(500);

/// Longest input that is made, so that rounds are many.
const INPUT_BYTES_MAX: usize = 64 << 10;

/// Most edits of one input: with more of them nothing of the seed is left.
const EDITS_MAX: usize = 6;

/// Numbers at which something ends: of JSON, of 2^53, of 64 bits, of a float.
const NUMBERS: &[&str] = &[
    "0",
    "-0",
    "1",
    "-1",
    "0.0000001",
    "1e400",
    "-1e-400",
    "1e15",
    "NaN",
    "+Inf",
    "-Inf",
    "2147483648",
    "4294967296",
    "9007199254740991",
    "9007199254740992",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1.7976931348623157e308",
];

/// How an input is made.
#[derive(Clone, Debug, TypeGenerator)]
pub(crate) struct Plan {
    seed: u16,
    edits: Vec<Edit>,
}

/// One change. Places are taken modulo what is there.
#[derive(Clone, Debug, TypeGenerator)]
enum Edit {
    Bit {
        at: u32,
        bit: u8,
    },
    Byte {
        at: u32,
        byte: u8,
    },
    Number {
        at: u32,
        which: u8,
    },
    Word {
        at: u32,
        which: u16,
    },
    Insert {
        at: u32,
        bytes: [u8; 3],
    },
    Remove {
        at: u32,
        length: u16,
    },
    Repeat {
        at: u32,
        length: u16,
        times: u8,
    },
    Splice {
        at: u32,
        seed: u16,
        from: u32,
        length: u16,
    },
    Cut {
        at: u32,
    },
    Whole {
        bytes: Vec<u8>,
    },
}

/// The seeds of a target and the words of its format.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    seeds: Vec<Vec<u8>>,
    words: Vec<Vec<u8>>,
}

impl Inputs {
    /// Every file below `tests/fixtures/` whose path starts like this, but for those that are packed or long.
    pub(crate) fn of_fixtures(starts: &[&str]) -> Self {
        let mut inputs = Self::default();
        for start in starts {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("tests/fixtures")
                .join(start);
            let (folder, first) = match path.is_dir() {
                true => (path.as_path(), ""),
                false => (
                    path.parent().unwrap(),
                    path.file_name().unwrap().to_str().unwrap(),
                ),
            };
            let mut files: Vec<_> = fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|file| {
                    file.file_name()
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .starts_with(first)
                })
                .collect();
            files.sort();
            for file in files {
                let bytes = fs::read(&file).unwrap();
                if bytes.len() <= INPUT_BYTES_MAX && !file.to_str().unwrap().ends_with(".gz") {
                    inputs.seeds.push(bytes);
                }
            }
        }
        assert!(
            !inputs.seeds.is_empty(),
            "no fixture starts like {starts:?}"
        );
        inputs
    }

    /// These inputs.
    pub(crate) fn of<T: AsRef<[u8]>>(seeds: impl IntoIterator<Item = T>) -> Self {
        Self::default().and(seeds)
    }

    /// The same and these inputs.
    pub(crate) fn and<T: AsRef<[u8]>>(mut self, seeds: impl IntoIterator<Item = T>) -> Self {
        let seeds = seeds.into_iter().map(|seed| seed.as_ref().to_vec());
        self.seeds.extend(seeds);
        self
    }

    /// The same with words that edits put in.
    pub(crate) fn with_words<T: AsRef<[u8]>>(mut self, words: impl IntoIterator<Item = T>) -> Self {
        let words = words.into_iter().map(|word| word.as_ref().to_vec());
        self.words.extend(words);
        self
    }

    pub(crate) fn seeds(&self) -> impl Iterator<Item = &[u8]> {
        self.seeds.iter().map(Vec::as_slice)
    }

    /// The input of a plan.
    pub(crate) fn made(&self, plan: &Plan) -> Vec<u8> {
        let mut bytes = self.seed(plan.seed).to_vec();
        for edit in plan.edits.iter().take(EDITS_MAX) {
            self.apply(edit, &mut bytes);
        }
        bytes.truncate(INPUT_BYTES_MAX);
        bytes
    }

    fn seed(&self, which: u16) -> &[u8] {
        &self.seeds[usize::from(which) % self.seeds.len()]
    }

    fn apply(&self, edit: &Edit, bytes: &mut Vec<u8>) {
        let length = bytes.len();
        let place = |at: u32| at as usize % (length + 1);
        match edit {
            Edit::Bit { at, bit } => {
                if let Some(byte) = bytes.get_mut(place(*at)) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            Edit::Byte { at, byte } => {
                if let Some(old) = bytes.get_mut(place(*at)) {
                    *old = *byte;
                }
            }
            Edit::Number { at, which } => {
                let number = NUMBERS[usize::from(*which) % NUMBERS.len()];
                let is_part = |byte: &u8| byte.is_ascii_digit() || *byte == b'.';
                let from = place(*at);
                let from = from
                    + bytes[from..]
                        .iter()
                        .take_while(|byte| !is_part(byte))
                        .count();
                let until = from
                    + bytes[from..]
                        .iter()
                        .take_while(|byte| is_part(byte))
                        .count();
                bytes.splice(from..until, number.bytes());
            }
            Edit::Word { at, which } => {
                let at = place(*at);
                if !self.words.is_empty() {
                    let word = &self.words[usize::from(*which) % self.words.len()];
                    bytes.splice(at..at, word.iter().copied());
                }
            }
            Edit::Insert { at, bytes: new } => {
                let at = place(*at);
                bytes.splice(at..at, new.iter().copied());
            }
            Edit::Remove { at, length } => {
                let from = place(*at);
                let until = bytes.len().min(from + usize::from(length % 64));
                bytes.drain(from..until);
            }
            Edit::Repeat { at, length, times } => {
                let from = place(*at);
                let until = bytes.len().min(from + usize::from(*length));
                let piece = bytes[from..until].repeat(usize::from(times % 8));
                bytes.splice(until..until, piece);
            }
            Edit::Splice {
                at,
                seed,
                from,
                length,
            } => {
                let at = place(*at);
                let other = self.seed(*seed);
                let from = *from as usize % (other.len() + 1);
                let until = other.len().min(from + usize::from(*length));
                bytes.splice(at..at, other[from..until].iter().copied());
            }
            Edit::Cut { at } => bytes.truncate(place(*at)),
            Edit::Whole { bytes: new } => bytes.clone_from(new),
        }
    }
}

/// Runs a target: what must hold, for each seed as it is, then for inputs that are made from them.
macro_rules! fuzz {
    ($inputs:expr, $holds:expr) => {{
        let inputs: $crate::fuzz::Inputs = $inputs;
        let holds = $holds;
        for seed in inputs.seeds() {
            holds(seed);
        }
        bolero::check!()
            .with_test_time($crate::fuzz::TIME)
            .with_type::<$crate::fuzz::Plan>()
            .for_each(|plan| holds(&inputs.made(plan)));
    }};
}
pub(crate) use fuzz;

/// The edits reach every kind of change: a target whose inputs were all seeds would find nothing.
#[test]
fn edits_change_what_they_say() {
    let inputs = Inputs::of(["{\"a\":12}", "other"]).with_words(["word"]);
    let made = |edit: Edit| {
        let edits = vec![edit];
        String::from_utf8(inputs.made(&Plan { seed: 0, edits })).unwrap()
    };
    assert_eq!(made(Edit::Bit { at: 2, bit: 1 }), "{\"c\":12}");
    assert_eq!(made(Edit::Byte { at: 2, byte: b'z' }), "{\"z\":12}");
    assert_eq!(made(Edit::Number { at: 1, which: 3 }), "{\"a\":-1}");
    assert_eq!(made(Edit::Word { at: 9, which: 5 }), "word{\"a\":12}");
    let bytes = *b"xyz";
    assert_eq!(made(Edit::Insert { at: 1, bytes }), "{xyz\"a\":12}");
    assert_eq!(made(Edit::Remove { at: 1, length: 4 }), "{12}");
    let (length, times) = (2, 2);
    assert_eq!(
        made(Edit::Repeat {
            at: 5,
            length,
            times
        }),
        "{\"a\":121212}"
    );
    let (seed, from) = (1, 1);
    assert_eq!(
        made(Edit::Splice {
            at: 0,
            seed,
            from,
            length
        }),
        "th{\"a\":12}"
    );
    assert_eq!(made(Edit::Cut { at: 4 }), "{\"a\"");
    let bytes = b"raw".to_vec();
    assert_eq!(made(Edit::Whole { bytes }), "raw");
}
