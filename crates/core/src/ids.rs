//! Names: valid by construction, compared byte by byte, never trimmed, folded or cut (ID1).

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::fmt;

use arcstr::ArcStr;

/// The longest caller-chosen id in bytes (ID1).
pub const ID_BYTES_MAX: usize = 512;

/// Why a caller-chosen id is refused (ID1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdError {
    /// No bytes at all.
    #[error("an id must have at least 1 byte")]
    Empty,
    /// More than [`ID_BYTES_MAX`] bytes.
    #[error("an id must have at most {ID_BYTES_MAX} bytes of UTF-8")]
    TooLong,
    /// U+0000 to U+001F or U+007F to U+009F.
    #[error("an id must not contain control characters (U+0000 to U+001F, U+007F to U+009F)")]
    Control,
    /// `.` or `..`, which clients rewrite when they stand in a path.
    #[error("an id must not be `.` or `..`, since clients rewrite such paths")]
    Dots,
}

fn checked(text: &str) -> Result<ArcStr, IdError> {
    if text.is_empty() {
        return Err(IdError::Empty);
    }
    if text.len() > ID_BYTES_MAX {
        return Err(IdError::TooLong);
    }
    if text.chars().any(char::is_control) {
        return Err(IdError::Control);
    }
    if text == "." || text == ".." {
        return Err(IdError::Dots);
    }
    Ok(ArcStr::from(text))
}

fn checked_unless_empty(text: &str) -> Result<ArcStr, IdError> {
    if text.is_empty() {
        return Ok(ArcStr::from(text));
    }
    checked(text)
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident: $check:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(ArcStr);

        impl $name {
            /// Checks the id against ID1.
            ///
            /// # Errors
            /// The rule that `text` breaks.
            pub fn new(text: &str) -> Result<Self, IdError> {
                $check(text).map(Self)
            }

            /// The id as it was given.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

text_id! {
    /// One backend attempt; the idempotency key of an acquire (ID1).
    TicketId: checked
}
text_id! {
    /// One multi-turn program (ID1).
    SessionId: checked
}
text_id! {
    /// A caller's label: the id of the engine request, or the name of the client. Same rules as ID1.
    Label: checked
}

text_id! {
    /// A training run that takes step reports (REP1). Same rules as ID1, but it may be empty.
    RunId: checked_unless_empty
}

/// Number of an entry of the audit, from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AuditNo(pub u64);

/// Number of a step report, from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StepNo(pub u64);

/// A member engine: its normalised base URL (CAP1). The fleet room makes them.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineId(Arc<str>);

impl EngineId {
    /// Takes a base URL that is already normalised.
    #[must_use]
    pub fn new(base_url: &str) -> Self {
        Self(Arc::from(base_url))
    }

    /// The base URL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// It speaks gRPC, where there is no session close (CLO5).
    #[must_use]
    pub fn is_grpc(&self) -> bool {
        self.0.starts_with("grpc://")
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// Generation of the worker set, from 1 (CAP8). Not the [`Term`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Epoch(pub u64);

/// Generation of the writer process: one more at every start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Term(pub u64);

/// Number of a committed change (DUR6). 0 before the first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Seq(pub u64);

/// Number of a ticket's row: its place in line while it waits, and its key in the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RowNo(pub u64);

/// Number of a grant, from 1, without gaps but for those that restored copies leave (ID2).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Issue(pub u64);

/// Number of a close intent, from 1; a later one has a higher number (CLO2).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CloseNo(pub u64);

/// Number of a session in the book, in the order of first sight. Not kept over a restart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionNo(pub u64);

/// Reads `number-salt`; `None` for anything that the text form would not write.
fn parse_numbered(text: &str) -> Option<(u64, u64)> {
    let (number, salt) = text.split_once('-')?;
    let is_number = number == "0" || !number.starts_with(['0', '+']);
    let is_hex = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    let is_salt = salt.len() == SALT_DIGITS && salt.bytes().all(is_hex);
    if !is_number || !is_salt {
        return None;
    }
    Some((number.parse().ok()?, u64::from_str_radix(salt, 16).ok()?))
}

/// Hexadecimal digits of a salt.
const SALT_DIGITS: usize = 16;

macro_rules! salted_id {
    ($(#[$doc:meta])* $name:ident { $(#[$field_doc:meta])* $number:ident: $kind:ident }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name {
            $(#[$field_doc])*
            pub $number: $kind,
            /// Random part, drawn once per start.
            pub salt: u64,
        }

        impl $name {
            /// Reads the text form; `None` for anything that [`fmt::Display`] would not write.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                let (number, salt) = parse_numbered(text)?;
                Some(Self { $number: $kind(number), salt })
            }

            /// The text form.
            #[must_use]
            pub fn to_text(self) -> String {
                format!("{self}")
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}-{:016x}", self.$number.0, self.salt)
            }
        }
    };
}

salted_id! {
    /// The fencing token of a lease: issue number and the random part of the start that issued it,
    /// so that it repeats neither after a restart nor after a restored backup (ID2).
    LeaseId {
        /// Number of the grant.
        issue: Issue
    }
}
salted_id! {
    /// The id of a close intent: its number and the random part of the start that took it. A number
    /// may come again when all higher ones are forgotten, but not in the same start.
    CloseId {
        /// Number of the intent.
        number: CloseNo
    }
}
