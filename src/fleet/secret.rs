//! A bearer key that does not show itself.
//!
//! Promises: neither `Debug` nor an error message contains the key; as a header it is marked
//! sensitive, so that the HTTP client does not log it either.

use std::fmt;

use reqwest::header::HeaderValue;

/// A bearer key for a router or for engines.
#[derive(Clone)]
pub struct Secret(HeaderValue);

/// The key cannot be sent in a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecretError {
    /// Nothing but blanks.
    #[error("the key is empty")]
    Empty,
    /// Line ends or other bytes that a header cannot carry.
    #[error("the key contains characters that a header cannot carry")]
    Characters,
}

impl Secret {
    /// Takes a key; blanks and line ends around it go, since key files end with one.
    ///
    /// # Errors
    /// When it is empty or cannot be sent in a header.
    pub fn new(key: &str) -> Result<Self, SecretError> {
        let key = key.trim();
        if key.is_empty() {
            return Err(SecretError::Empty);
        }
        let mut header =
            HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| SecretError::Characters)?;
        header.set_sensitive(true);
        Ok(Self(header))
    }

    /// The value of the `Authorization` header.
    #[must_use]
    pub fn authorization(&self) -> HeaderValue {
        self.0.clone()
    }

    /// A text with the key taken out: some servers quote a key that they refuse.
    #[must_use]
    pub fn taken_out_of(&self, text: &str) -> String {
        let header = String::from_utf8_lossy(self.0.as_bytes());
        let key = header.strip_prefix("Bearer ").unwrap_or(&header);
        text.replace(key, "***")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CAP7: a key is sent as a bearer token and never shown.
    #[test]
    fn cap7_key_is_not_shown() {
        let secret = Secret::new(" key-123\n").unwrap();
        assert_eq!(secret.authorization(), "Bearer key-123");
        assert_eq!(format!("{secret:?}"), "Secret");
        assert!(!format!("{:?}", secret.authorization()).contains("123"));
        assert_eq!(
            secret.taken_out_of("no such key: key-123."),
            "no such key: ***."
        );
        assert_eq!(Secret::new(" ").err(), Some(SecretError::Empty));
        assert_eq!(Secret::new("a\nb").err(), Some(SecretError::Characters));
    }
}
