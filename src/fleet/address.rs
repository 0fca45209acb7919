//! The base URL rule (CAP1): from what a router row or an operator writes to the one name of an engine.
//!
//! Pure. An address is never guessed: what does not parse is refused with its reason, since guessing
//! where a port starts can hit a stranger. Path, query and user info are not used.

use std::net::IpAddr;

use kvgate_core::ids::EngineId;
use url::{Host, Url};

/// How an engine is spoken to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scheme {
    /// Plain HTTP.
    Http,
    /// HTTP over TLS.
    Https,
    /// gRPC: gauges come from an HTTP side port, session close is not supported (CLO5).
    Grpc,
}

/// Why an entry is no engine address (CAP1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// Nothing but blanks.
    #[error("an empty address")]
    Empty,
    /// Another scheme than the three that are known.
    #[error("not an http, https or grpc address")]
    Scheme,
    /// An IPv6 address without brackets, a bad port, no host, control characters.
    #[error("not a valid address")]
    Invalid,
    /// Longer than [`ADDRESS_BYTES_MAX`].
    #[error("an address longer than {ADDRESS_BYTES_MAX} bytes")]
    TooLong,
}

/// The longest address that is looked at, in bytes: a host has at most 253, the rest is not used.
pub const ADDRESS_BYTES_MAX: usize = 2_048;

/// A normalised base address: scheme, lower-case host, port unless it is the default one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BaseUrl {
    scheme: Scheme,
    host: Host<String>,
    /// Always set: the default of the scheme when none was written.
    port: u16,
    text: String,
}

impl BaseUrl {
    /// Reads one address by the base URL rule: blanks and a trailing slash go, a trailing `@<rank>`
    /// is cut before anything is parsed, a missing scheme means http.
    ///
    /// # Errors
    /// Why it is no engine address.
    pub fn parse(raw: &str) -> Result<Self, AddressError> {
        let text = raw.trim();
        if text.is_empty() {
            return Err(AddressError::Empty);
        }
        if text.len() > ADDRESS_BYTES_MAX {
            return Err(AddressError::TooLong);
        }
        // the URL parser would drop tabs and line ends in silence
        if text.contains(char::is_control) {
            return Err(AddressError::Invalid);
        }
        Self::normalised(without_rank(text)?)
    }

    fn normalised(text: &str) -> Result<Self, AddressError> {
        let (scheme, rest) = with_scheme(text)?;
        let http = match scheme {
            Scheme::Https => "https",
            Scheme::Http | Scheme::Grpc => "http",
        };
        // grpc is parsed as http, since only then hosts and default ports are normalised
        let url = Url::parse(&format!("{http}://{rest}")).map_err(|_| AddressError::Invalid)?;
        let host = url.host().ok_or(AddressError::Invalid)?.to_owned();
        let port = url.port_or_known_default().ok_or(AddressError::Invalid)?;
        let name = match scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
            Scheme::Grpc => "grpc",
        };
        let text = match url.port() {
            Some(port) => format!("{name}://{host}:{port}"),
            None => format!("{name}://{host}"),
        };
        Ok(Self {
            scheme,
            host,
            port,
            text,
        })
    }

    /// The name of the engine: the same for every way to write its address.
    #[must_use]
    pub fn engine(&self) -> EngineId {
        EngineId::new(&self.text)
    }

    /// The base address as text, without a trailing slash.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// How the engine is spoken to.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The address of the host when it is written as a number; names are judged where they are resolved.
    #[must_use]
    pub const fn ip(&self) -> Option<IpAddr> {
        match &self.host {
            Host::Ipv4(ip) => Some(IpAddr::V4(*ip)),
            Host::Ipv6(ip) => Some(IpAddr::V6(*ip)),
            Host::Domain(_) => None,
        }
    }

    /// Address of an HTTP path of the engine; `path` begins with a slash. Of a gRPC engine that is
    /// the side port, one above its own (contracts, "Base URL rule" 5).
    #[must_use]
    pub fn endpoint(&self, path: &str) -> String {
        match self.scheme {
            Scheme::Http | Scheme::Https => format!("{}{path}", self.text),
            Scheme::Grpc => format!("http://{}:{}{path}", self.host, self.port.saturating_add(1)),
        }
    }
}

/// Cuts a trailing `@<digits>`: a router's name for a rank. What stands before must be an address
/// of its own; digits alone are never a host, or `http://x@1` would lead to 0.0.0.1.
fn without_rank(text: &str) -> Result<&str, AddressError> {
    let trimmed = text.trim_end_matches('/');
    match trimmed.rsplit_once('@') {
        Some((before, rank))
            if !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            BaseUrl::normalised(before).map(|_| before)
        }
        _ => Ok(text),
    }
}

/// The scheme and what follows `://`; without a scheme it is http.
fn with_scheme(text: &str) -> Result<(Scheme, &str), AddressError> {
    let (scheme, rest) = match text.split_once("://") {
        Some(parts) => parts,
        // `file:/etc/x` would else be read as a host with an empty port
        None if text.contains(":/") => return Err(AddressError::Invalid),
        None => return Ok((Scheme::Http, text)),
    };
    match scheme.to_ascii_lowercase().as_str() {
        "http" => Ok((Scheme::Http, rest)),
        "https" => Ok((Scheme::Https, rest)),
        "grpc" => Ok((Scheme::Grpc, rest)),
        _ => Err(AddressError::Scheme),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(raw: &str) -> String {
        BaseUrl::parse(raw).unwrap().as_str().to_owned()
    }

    /// CAP1: one engine, whatever way its address is written.
    #[test]
    fn cap1_one_name_for_every_spelling() {
        for raw in [
            "http://host:30000",
            "http://host:30000/",
            "HTTP://HOST:30000",
            " http://host:30000/ ",
            "host:30000",
            "Host:30000//",
            "http://host:30000@0",
            "http://host:30000/@12",
            "http://host:30000@3/",
            "host:30000@1",
            "http://host:30000/admin/x?y=1",
            "http://user:pw@host:30000",
            "http://user:pw@host:30000@7",
            "http://host:030000",
        ] {
            assert_eq!(base(raw), "http://host:30000", "{raw}");
        }
    }

    /// CAP1: default ports are one spelling.
    #[test]
    fn cap1_default_ports() {
        assert_eq!(base("http://host:80/"), "http://host");
        assert_eq!(base("http://host"), "http://host");
        assert_eq!(base("https://host:443"), "https://host");
        assert_eq!(base("https://host:80"), "https://host:80");
        assert_eq!(
            BaseUrl::parse("host").unwrap().endpoint("/metrics"),
            "http://host/metrics"
        );
    }

    /// CAP1: a rank is cut before the address is parsed; it never becomes a host.
    #[test]
    fn cap1_rank_is_no_host() {
        assert_eq!(base("http://127.0.0.1:31003@1"), "http://127.0.0.1:31003");
        assert_eq!(base("http://[::1]:31003@1"), "http://[::1]:31003");
        assert_eq!(base("http://user@host:1"), "http://host:1");
    }

    /// CAP1: IPv6 with brackets is good, without brackets it is refused and not guessed.
    #[test]
    fn cap1_ipv6() {
        assert_eq!(
            base("http://[2001:DB8::5]:30000"),
            "http://[2001:db8::5]:30000"
        );
        assert!(
            BaseUrl::parse("[::1]:30000")
                .unwrap()
                .ip()
                .unwrap()
                .is_loopback()
        );
        for raw in [
            "http://2001:db8::5:30000",
            "2001:db8::5:30000",
            "http://::1:30000",
            "http://2001:db8::5:30000@0",
        ] {
            assert_eq!(BaseUrl::parse(raw), Err(AddressError::Invalid), "{raw}");
        }
    }

    /// CAP1: only http, https and grpc.
    #[test]
    fn cap1_schemes() {
        for raw in [
            "file:///etc/hostname",
            "ftp://host/",
            "unix:///run/x",
            "gopher://host",
        ] {
            assert_eq!(BaseUrl::parse(raw), Err(AddressError::Scheme), "{raw}");
        }
        assert_eq!(BaseUrl::parse("  "), Err(AddressError::Empty));
        for raw in [
            "http://",
            "http:///",
            "host:99999",
            "ho st:1",
            "http://a\tb:1",
            "@0",
            "file:/etc/hostname",
        ] {
            assert_eq!(BaseUrl::parse(raw), Err(AddressError::Invalid), "{raw:?}");
        }
        assert_eq!(
            BaseUrl::parse(&"a".repeat(3_000)),
            Err(AddressError::TooLong)
        );
        assert_eq!(base("host/x?to=other"), "http://host");
    }

    /// CAP1, CLO5: gRPC engines are noted as such; their gauges are one port above.
    #[test]
    fn cap1_grpc() {
        let engine = BaseUrl::parse("GRPC://Host:20000/").unwrap();
        assert_eq!(engine.as_str(), "grpc://host:20000");
        assert_eq!(engine.scheme(), Scheme::Grpc);
        assert_eq!(engine.endpoint("/metrics"), "http://host:20001/metrics");
    }
}
