//! Who asks, and what they may do: tokens, log-ins of browsers, and the names that the service is reached by.
//!
//! Promises: no token and no log-in is kept as it is sent, none is shown or logged, and what is not known has no right.
//! Left to others: which call needs which right (the HTTP room) and the form of the log-in (the web room).

mod cookies;
#[cfg(test)]
mod fuzz;
mod hosts;
mod logins;
mod tokens;

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

pub use cookies::{login_cookie, login_ids, no_cookie};
pub use hosts::{AllowedHost, Asked, Hosts, NotAHost, Scheme};
pub use logins::{LOGIN_LIFE, LoginId, fresh_secret};
pub use tokens::{LineFault, TOKENS_MAX, TokenFile, TokenFileError, TokenSet};

use logins::Logins;

/// What a caller may do; each includes the one before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Right {
    /// Read everything but a backup.
    View,
    /// Also leases, tickets, waits, batches, closes with their retry, and steps.
    Client,
    /// Everything: settings, revocations and backups among it.
    Admin,
}

impl Right {
    /// The word that stands in a token file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::View => "view",
            Self::Client => "client",
            Self::Admin => "admin",
        }
    }

    /// The right of this word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        let all = [Self::View, Self::Client, Self::Admin];
        all.into_iter().find(|right| right.word() == word)
    }
}

/// Who asks. The front puts it beside every request; handlers and pages take it from there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// Name of the token, or [`Caller::LOCAL`] where no tokens are on. It stands in the audit.
    pub name: Arc<str>,
    /// What it may do.
    pub right: Right,
}

impl Caller {
    /// The name of everybody while no tokens are on.
    pub const LOCAL: &'static str = "local";

    /// Everybody while no tokens are on.
    #[must_use]
    pub fn local() -> Self {
        static LOCAL: LazyLock<Caller> = LazyLock::new(|| Caller {
            name: Caller::LOCAL.into(),
            right: Right::Admin,
        });
        LOCAL.clone()
    }

    /// Whether it may do what needs this right.
    #[must_use]
    pub fn may(&self, needed: Right) -> bool {
        self.right >= needed
    }
}

/// Who is let in. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// `None` while tokens are off.
    doors: Option<Arc<Doors>>,
}

#[derive(Debug)]
struct Doors {
    tokens: RwLock<TokenSet>,
    logins: Mutex<Logins>,
}

/// A log-in did not come about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoginRefused {
    /// The token is not known.
    #[error("the token is not known")]
    Unknown,
    /// The operating system gives no random numbers.
    #[error("the system gives no random numbers: {0}")]
    NoRandom(getrandom::Error),
}

/// What new tokens changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replaced {
    /// TokenSet that were not known before.
    pub added: usize,
    /// TokenSet that are no longer known. Log-ins with them have ended.
    pub removed: usize,
}

impl Access {
    /// Everybody is let in.
    #[must_use]
    pub fn open() -> Self {
        Self::default()
    }

    /// Who has one of these tokens is let in.
    #[must_use]
    pub fn by(tokens: TokenSet) -> Self {
        Self {
            doors: Some(Arc::new(Doors {
                tokens: RwLock::new(tokens),
                logins: Mutex::default(),
            })),
        }
    }

    /// Whether tokens are off.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.doors.is_none()
    }

    /// Who has a token; nobody while tokens are off.
    #[must_use]
    pub fn callers(&self) -> Vec<Caller> {
        let doors = self.doors.iter();
        doors
            .flat_map(|doors| doors.tokens().callers().cloned().collect::<Vec<_>>())
            .collect()
    }

    /// Whose token this is.
    #[must_use]
    pub fn with_token(&self, token: &str) -> Option<Caller> {
        let found = self.doors.as_ref()?.tokens().find(token)?;
        Some(found.0)
    }

    /// Whose log-in this is: it has the right that its token has now.
    #[must_use]
    pub fn with_login(&self, id: &str, now: Instant) -> Option<Caller> {
        let doors = self.doors.as_ref()?;
        let token = doors.logins().token(id, now)?;
        doors.tokens().owner(token)
    }

    /// Logs a browser in.
    ///
    /// # Errors
    /// When the token is not known.
    pub fn log_in(&self, token: &str, now: Instant) -> Result<(Caller, LoginId), LoginRefused> {
        let doors = self.doors.as_ref().ok_or(LoginRefused::Unknown)?;
        let found = doors.tokens().find(token);
        let (caller, token) = found.ok_or(LoginRefused::Unknown)?;
        let id = doors.logins().begin(token, now);
        Ok((caller, id.map_err(LoginRefused::NoRandom)?))
    }

    /// Ends a log-in, if it is one.
    pub fn log_out(&self, id: &str) {
        if let Some(doors) = &self.doors {
            doors.logins().end(id);
        }
    }

    /// Lets in by other tokens from now on. Nothing changes while tokens are off: that is chosen at the start.
    pub fn replace(&self, tokens: TokenSet) -> Replaced {
        let Some(doors) = &self.doors else {
            return Replaced {
                added: 0,
                removed: 0,
            };
        };
        let old = {
            let mut kept = doors.tokens.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *kept, tokens.clone())
        };
        doors
            .logins()
            .keep_those_of(|token| tokens.owner(token).is_some());
        Replaced {
            added: tokens.beside(&old),
            removed: old.beside(&tokens),
        }
    }
}

impl Doors {
    fn tokens(&self) -> TokenSet {
        self.tokens
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn logins(&self) -> MutexGuard<'_, Logins> {
        self.logins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(text: &str) -> TokenSet {
        TokenSet::parse(text).unwrap()
    }

    const WALL: &str = "wall:view:token-of-the-wall";
    const OPS: &str = "ops:admin:token-of-the-operator";

    #[test]
    fn logins_follow_their_token() {
        let access = Access::by(by(&format!("{WALL}\n{OPS}")));
        let now = Instant::now();
        assert_eq!(
            access.log_in("token-of-nobody-at-all", now),
            Err(LoginRefused::Unknown)
        );
        let (caller, wall) = access.log_in("token-of-the-wall", now).unwrap();
        assert_eq!((&*caller.name, caller.right), ("wall", Right::View));
        let (_, ops) = access.log_in("token-of-the-operator", now).unwrap();
        assert_eq!(access.with_token(wall.as_str()), None, "an id is no token");
        let changed = access.replace(by(
            "wall-2:client:token-of-the-wall\nnew:view:token-of-another",
        ));
        assert_eq!(
            changed,
            Replaced {
                added: 1,
                removed: 1
            }
        );
        let caller = access.with_login(wall.as_str(), now).unwrap();
        assert_eq!((&*caller.name, caller.right), ("wall-2", Right::Client));
        assert_eq!(access.with_login(ops.as_str(), now), None);
        assert_eq!(access.with_token("token-of-the-operator"), None);
        access.replace(by(OPS));
        assert!(access.with_token("token-of-the-operator").is_some());
        assert_eq!(
            access.with_login(ops.as_str(), now),
            None,
            "a log-in does not come back with its token"
        );
    }

    #[test]
    fn without_tokens_nobody_is_known() {
        let access = Access::open();
        assert!(access.is_open());
        assert_eq!(access.with_token("token-of-the-wall"), None);
        assert_eq!(
            access.log_in("token-of-the-wall", Instant::now()),
            Err(LoginRefused::Unknown)
        );
        access.replace(by(OPS));
        assert!(access.is_open());
    }

    #[test]
    fn each_right_includes_the_one_before() {
        let caller = Caller {
            name: "rollout".into(),
            right: Right::Client,
        };
        assert!(caller.may(Right::View));
        assert!(caller.may(Right::Client));
        assert!(!caller.may(Right::Admin));
        assert!(Caller::local().may(Right::Admin));
    }
}
