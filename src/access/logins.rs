//! Log-ins of browsers: random ids in memory, each for the token that it was made with.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use super::tokens::Fingerprint;

/// Life of a log-in.
pub const LOGIN_LIFE: Duration = Duration::from_secs(12 * 3_600);

/// Log-ins with one token at a time; a further one ends the oldest of them. So nobody can push out the log-ins of others,
/// and a thousand tokens take a few megabytes.
const PER_TOKEN_MAX: usize = 32;

/// Random bytes of a secret.
const SECRET_BYTES: usize = 32;

/// A text that nobody can guess.
///
/// # Errors
/// The operating system gives no random numbers. Nothing takes their place.
pub fn fresh_secret() -> Result<String, getrandom::Error> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The id of a log-in, for its cookie. It is shown to nobody else.
#[derive(Clone, PartialEq, Eq)]
pub struct LoginId(String);

impl LoginId {
    /// As the cookie carries it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for LoginId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoginId(..)")
    }
}

/// The log-ins, under the fingerprints of their ids: how long a look-up takes tells nothing of an id.
#[derive(Debug, Default)]
pub(super) struct Logins(BTreeMap<Fingerprint, Login>);

#[derive(Clone, Copy, Debug)]
struct Login {
    token: Fingerprint,
    ends_at: Instant,
}

impl Logins {
    pub(super) fn begin(
        &mut self,
        token: Fingerprint,
        now: Instant,
    ) -> Result<LoginId, getrandom::Error> {
        let id = LoginId(fresh_secret()?);
        self.0.retain(|_, login| login.ends_at > now);
        let same = || self.0.iter().filter(|(_, login)| login.token == token);
        if same().count() >= PER_TOKEN_MAX {
            let oldest = same()
                .min_by_key(|(_, login)| login.ends_at)
                .map(|(id, _)| *id);
            oldest.and_then(|oldest| self.0.remove(&oldest));
        }
        let ends_at = now + LOGIN_LIFE;
        self.0
            .insert(Fingerprint::of(id.as_str()), Login { token, ends_at });
        Ok(id)
    }

    /// The token that this log-in was made with.
    pub(super) fn token(&self, id: &str, now: Instant) -> Option<Fingerprint> {
        let login = self.0.get(&Fingerprint::of(id))?;
        (login.ends_at > now).then_some(login.token)
    }

    pub(super) fn end(&mut self, id: &str) {
        self.0.remove(&Fingerprint::of(id));
    }

    pub(super) fn keep_those_of(&mut self, known: impl Fn(Fingerprint) -> bool) {
        self.0.retain(|_, login| known(login.token));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_lasts_half_a_day_or_until_it_is_ended() {
        let token = Fingerprint::of("token");
        let mut logins = Logins::default();
        let now = Instant::now();
        let id = logins.begin(token, now).unwrap();
        let last = now + LOGIN_LIFE - Duration::from_millis(1);
        assert_eq!(logins.token(id.as_str(), last), Some(token));
        assert_eq!(logins.token(id.as_str(), now + LOGIN_LIFE), None);
        assert_eq!(logins.token("", now), None);
        logins.end("other");
        assert_eq!(logins.token(id.as_str(), now), Some(token));
        logins.end(id.as_str());
        assert_eq!(logins.token(id.as_str(), now), None);
    }

    #[test]
    fn a_token_has_so_many_logins_and_takes_none_of_others() {
        let (busy, other) = (Fingerprint::of("busy"), Fingerprint::of("other"));
        let mut logins = Logins::default();
        let now = Instant::now();
        let later = |number: usize| now + Duration::from_millis(number as u64);
        let of_other = logins.begin(other, now).unwrap();
        let ids: Vec<LoginId> = (0..=PER_TOKEN_MAX)
            .map(|number| logins.begin(busy, later(number)).unwrap())
            .collect();
        assert_eq!(
            logins.token(ids[0].as_str(), now),
            None,
            "the oldest has ended"
        );
        assert_eq!(logins.token(ids[1].as_str(), now), Some(busy));
        assert_eq!(logins.token(of_other.as_str(), now), Some(other));
        assert_eq!(logins.0.len(), PER_TOKEN_MAX + 1);
        logins
            .begin(busy, later(PER_TOKEN_MAX) + LOGIN_LIFE)
            .unwrap();
        assert_eq!(logins.0.len(), 1, "what has run out is forgotten");
    }

    #[test]
    fn ids_are_random_and_do_not_show_themselves() {
        let (one, two) = (fresh_secret().unwrap(), fresh_secret().unwrap());
        assert_ne!(one, two);
        assert_eq!(one.len(), 2 * SECRET_BYTES);
        let one = LoginId(one);
        assert_eq!(format!("{one:?}"), "LoginId(..)");
        let mut logins = Logins::default();
        let id = logins
            .begin(Fingerprint::of("token"), Instant::now())
            .unwrap();
        assert!(!format!("{logins:?}").contains(id.as_str()));
    }
}
