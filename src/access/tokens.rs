//! TokenSet of callers: lines `name:scope:token` in a file.
//!
//! Promises: a token is kept as its SHA-256 only and stands in no error; which of them a text fits is found in a time
//! that depends on their number alone.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::{Caller, Right};

/// Largest token file: all lines at their longest stay far below it, comments included.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Most tokens: each one is compared with what every call sends.
pub const TOKENS_MAX: usize = 1_000;

/// Longest name: it stands in logs and in the audit.
const NAME_BYTES_MAX: usize = 64;

/// Fewest characters of a token. Guessing has no chance from 64 random bits on, which 16 hexadecimal digits hold.
const TOKEN_BYTES_MIN: usize = 16;

/// Most characters of a token.
const TOKEN_BYTES_MAX: usize = 512;

/// Bits of a file's mode with which users other than the owner and its group may read or change it.
const OTHERS: u32 = 0o006;

/// The SHA-256 of a secret. It does not show itself either.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fingerprint([u8; 32]);

impl Fingerprint {
    pub(super) fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.as_bytes()).into())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprint(..)")
    }
}

/// The tokens that are known. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSet(Arc<[Token]>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    caller: Caller,
    fingerprint: Fingerprint,
}

impl TokenSet {
    /// Reads the text of a token file.
    ///
    /// # Errors
    /// The first line that cannot be used; no part of it stands in the error.
    pub fn parse(text: &str) -> Result<Self, TokenFileError> {
        let mut tokens = Vec::new();
        let mut names = BTreeMap::new();
        let mut fingerprints = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let fault = |fault| TokenFileError::Line {
                line: line_number,
                fault,
            };
            let token = Token::parse(line).map_err(fault)?;
            if let Some(first) = names.insert(Arc::clone(&token.caller.name), line_number) {
                return Err(fault(LineFault::NameTwice(first)));
            }
            if let Some(first) = fingerprints.insert(token.fingerprint, line_number) {
                return Err(fault(LineFault::TokenTwice(first)));
            }
            if tokens.len() == TOKENS_MAX {
                return Err(TokenFileError::TooMany);
            }
            tokens.push(token);
        }
        if tokens.is_empty() {
            return Err(TokenFileError::NoToken);
        }
        Ok(Self(tokens.into()))
    }

    /// The same and one more, which takes the place of one with its name.
    #[must_use]
    pub fn with(&self, caller: Caller, token: &str) -> Self {
        let others = self
            .0
            .iter()
            .filter(|other| other.caller.name != caller.name);
        let mut tokens: Vec<Token> = others.cloned().collect();
        tokens.push(Token {
            caller,
            fingerprint: Fingerprint::of(token),
        });
        Self(tokens.into())
    }

    /// Names and rights, in the order of the file.
    pub fn callers(&self) -> impl Iterator<Item = &Caller> {
        self.0.iter().map(|token| &token.caller)
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whose token this is. All of them are compared, whichever it is.
    pub(super) fn find(&self, token: &str) -> Option<(Caller, Fingerprint)> {
        let asked = Fingerprint::of(token);
        let mut found = u64::MAX;
        for (index, known) in (0_u64..).zip(self.0.iter()) {
            let same = known.fingerprint.0.ct_eq(&asked.0);
            found.conditional_assign(&index, same);
        }
        let known = self.0.get(usize::try_from(found).ok()?)?;
        Some((known.caller.clone(), asked))
    }

    /// Whose token has this fingerprint, which no caller can choose.
    pub(super) fn owner(&self, fingerprint: Fingerprint) -> Option<Caller> {
        let known = self
            .0
            .iter()
            .find(|known| known.fingerprint == fingerprint)?;
        Some(known.caller.clone())
    }

    /// How many of these are not among `others`.
    pub(super) fn beside(&self, others: &Self) -> usize {
        let new = |token: &&Token| others.owner(token.fingerprint).is_none();
        self.0.iter().filter(new).count()
    }
}

impl Token {
    fn parse(line: &str) -> Result<Self, LineFault> {
        let mut parts = line.splitn(3, ':').map(str::trim);
        let (Some(name), Some(scope), Some(token)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(LineFault::Form);
        };
        let of_a_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._@".contains(&byte);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(of_a_name) {
            return Err(LineFault::Name);
        }
        if name == Caller::LOCAL {
            return Err(LineFault::Reserved);
        }
        let right = Right::parse(scope).ok_or(LineFault::Scope)?;
        if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len()) {
            return Err(LineFault::Length);
        }
        // What RFC 6750 lets stand after `Bearer`.
        let of_a_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
        if !token.bytes().all(of_a_token) {
            return Err(LineFault::Characters);
        }
        Ok(Self {
            caller: Caller {
                name: name.into(),
                right,
            },
            fingerprint: Fingerprint::of(token),
        })
    }
}

/// A token file as it was read.
#[derive(Clone, Debug)]
pub struct TokenFile {
    /// Where it is.
    pub path: PathBuf,
    /// What stands in it.
    pub tokens: TokenSet,
    /// Every user of the machine may read or change it.
    pub is_open_to_others: bool,
}

impl TokenFile {
    /// Reads a token file.
    ///
    /// # Errors
    /// It cannot be read, or what stands in it cannot be used.
    pub fn read(path: &Path) -> Result<Self, TokenFileError> {
        let file = File::open(path).map_err(TokenFileError::Read)?;
        let mode = file.metadata().map_err(TokenFileError::Read)?.permissions();
        let mut text = String::new();
        let mut bounded = file.take(FILE_BYTES_MAX + 1);
        let read = bounded
            .read_to_string(&mut text)
            .map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => TokenFileError::NotText,
                _ => TokenFileError::Read(error),
            });
        if bounded.limit() == 0 {
            return Err(TokenFileError::TooLarge);
        }
        read?;
        Ok(Self {
            path: path.to_path_buf(),
            tokens: TokenSet::parse(&text)?,
            is_open_to_others: mode.mode() & OTHERS != 0,
        })
    }
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileError {
    /// The system does not give it.
    #[error("it cannot be read: {0}")]
    Read(#[source] io::Error),
    /// No UTF-8.
    #[error("it is not text")]
    NotText,
    /// Above the bound.
    #[error("it is larger than {FILE_BYTES_MAX} bytes")]
    TooLarge,
    /// Comments at the most.
    #[error("it holds no token: write lines `name:scope:token`")]
    NoToken,
    /// Above the bound.
    #[error("it holds more than {TOKENS_MAX} tokens")]
    TooMany,
    /// One line.
    #[error("line {line}: {fault}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        fault: LineFault,
    },
}

/// What is wrong with a line of a token file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LineFault {
    /// Fewer than three parts.
    #[error("a line is `name:scope:token`")]
    Form,
    /// Empty, too long, or with other characters.
    #[error("a name has 1 to {NAME_BYTES_MAX} letters, digits and any of - . _ @")]
    Name,
    /// The name of calls without a token.
    #[error(
        "the name `{}` is taken: it means calls while no tokens are on",
        Caller::LOCAL
    )]
    Reserved,
    /// Another word.
    #[error("a scope is `client`, `admin` or `view`")]
    Scope,
    /// Too short to withstand guessing, or too long.
    #[error(
        "a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} characters; `openssl rand -hex 32` makes a good one"
    )]
    Length,
    /// A header cannot carry it as a token.
    #[error("a token has letters, digits and any of - . _ ~ + / =")]
    Characters,
    /// The name stands on an earlier line.
    #[error("the name stands on line {0} already")]
    NameTwice(usize),
    /// The token stands on an earlier line.
    #[error("the token stands on line {0} already")]
    TokenTwice(usize),
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    const LONG: &str = "0123456789abcdef";

    fn tokens(text: &str) -> TokenSet {
        TokenSet::parse(text).unwrap()
    }

    #[test]
    fn names_and_scopes_of_a_file() {
        let tokens = tokens(
            "# callers\n\n rollout : client : client-token-000001 \r\nops@head.1:admin:admin-token-00000+/=~\nwall:view:view-token-0000000\n",
        );
        assert_eq!(tokens.count(), 3);
        for (token, name, right) in [
            ("client-token-000001", "rollout", Right::Client),
            ("admin-token-00000+/=~", "ops@head.1", Right::Admin),
            ("view-token-0000000", "wall", Right::View),
        ] {
            let (caller, fingerprint) = tokens.find(token).unwrap();
            assert_eq!((&*caller.name, caller.right), (name, right));
            assert_eq!(tokens.owner(fingerprint), Some(caller));
        }
        for unknown in [
            "",
            "client-token-00000",
            "client-token-0000011",
            "rollout",
            " client-token-000001",
        ] {
            assert_eq!(tokens.find(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn bad_lines_are_refused_by_number_and_tell_nothing() {
        let many: String = (0..=TOKENS_MAX)
            .map(|number| format!("n{number}:view:0123456789abcdef{number}\n"))
            .collect();
        let cases = [
            ("".to_owned(), "no token"),
            ("# only a comment\n".to_owned(), "no token"),
            ("SECRET-SECRET-SECRET".to_owned(), "line 1: a line is"),
            ("\n\na:SECRET-SECRET-SECRET".to_owned(), "line 3: a line is"),
            (format!(":client:{LONG}"), "line 1: a name"),
            (format!("a b:client:{LONG}"), "line 1: a name"),
            (
                format!("{}:client:{LONG}", "a".repeat(65)),
                "line 1: a name",
            ),
            (format!("local:client:{LONG}"), "line 1: the name `local`"),
            (
                "a:SECRET-SECRET-SECRET:client".to_owned(),
                "line 1: a scope",
            ),
            (format!("a:Admin:{LONG}"), "line 1: a scope"),
            (
                "a:client:SECRET-SECRET".to_owned(),
                "line 1: a token has 16",
            ),
            (
                format!("a:client:SECRET{}", "a".repeat(507)),
                "line 1: a token has 16",
            ),
            (
                "a:client:SECRET SECRET SECRET".to_owned(),
                "line 1: a token has letters",
            ),
            (
                "a:client:SECRET:SECRET:SECRET".to_owned(),
                "line 1: a token has letters",
            ),
            (
                "a:client:SECRET-SECRET-é".to_owned(),
                "line 1: a token has letters",
            ),
            (
                format!("a:client:{LONG}\na:view:{LONG}0"),
                "line 2: the name stands on line 1",
            ),
            (
                format!("a:client:{LONG}\n#\nb:view:{LONG}"),
                "line 3: the token stands on line 1",
            ),
            (many, "more than 1000"),
        ];
        for (text, expected) in cases {
            let error = TokenSet::parse(&text).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(said.contains(expected), "{text:.40}: {said}");
            assert!(!said.contains("SECRET") && !said.contains(LONG), "{said}");
        }
    }

    #[test]
    fn one_more_token_beside_those_of_the_file() {
        let file = tokens(&format!("demo:view:{LONG}\nother:client:{LONG}0"));
        let caller = Caller {
            name: "demo".into(),
            right: Right::Client,
        };
        let both = file.with(caller.clone(), "made-for-this-run");
        assert_eq!(both.count(), 2);
        assert_eq!(
            both.find("made-for-this-run").map(|(caller, _)| caller),
            Some(caller)
        );
        assert_eq!(both.find(LONG), None);
        assert_eq!((both.beside(&file), file.beside(&both)), (1, 1));
    }

    #[test]
    fn a_file_is_bounded_and_its_mode_is_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, format!("a:client:{LONG}")).unwrap();
        for (mode, open) in [(0o600, false), (0o640, false), (0o644, true), (0o602, true)] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(
                TokenFile::read(&path).unwrap().is_open_to_others,
                open,
                "{mode:o}"
            );
        }
        std::fs::write(&path, vec![b'#'; 1 << 21]).unwrap();
        assert!(matches!(
            TokenFile::read(&path),
            Err(TokenFileError::TooLarge)
        ));
        std::fs::write(&path, b"a:client:\xff\xff").unwrap();
        assert!(matches!(
            TokenFile::read(&path),
            Err(TokenFileError::NotText)
        ));
        let missing = directory.path().join("missing");
        assert!(matches!(
            TokenFile::read(&missing),
            Err(TokenFileError::Read(_))
        ));
        assert!(matches!(
            TokenFile::read(directory.path()),
            Err(TokenFileError::Read(_))
        ));
    }

    #[test]
    fn tokens_do_not_show_themselves() {
        let tokens = tokens(&format!("a:client:{LONG}"));
        let shown = format!("{tokens:?}");
        assert!(shown.contains("\"a\"") && !shown.contains(LONG), "{shown}");
        assert!(shown.contains("Fingerprint(..)"), "{shown}");
    }
}
