//! The names that the service is reached by: which Host headers are served, and which origins may write.
//!
//! A page under a foreign name that leads to this machine is told by its Host header (DNS rebinding), a page of another
//! site by its Origin. A name of the network never counts because of what it resolves to.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use url::Url;

/// The scheme of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scheme {
    /// In the clear.
    Http,
    /// Over TLS.
    Https,
}

impl Scheme {
    /// The port that an address without one means.
    #[must_use]
    pub const fn port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }

    fn of(url: &Url) -> Option<Self> {
        match url.scheme() {
            "http" => Some(Self::Http),
            "https" => Some(Self::Https),
            _ => None,
        }
    }
}

/// A name beside the usual ones: `gate.example`, `gate.example:8080`, or with the scheme that browsers use where a proxy
/// ends TLS: `https://gate.example`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AllowedHost {
    scheme: Option<Scheme>,
    /// In lower case; an IPv6 address in brackets.
    host: String,
    /// Always set with a scheme.
    port: Option<u16>,
}

/// The text is no name of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a host name with a port or without, such as gate.example or https://gate.example")]
pub struct NotAHost;

impl FromStr for AllowedHost {
    type Err = NotAHost;

    fn from_str(text: &str) -> Result<Self, NotAHost> {
        let has_scheme = text.contains("://");
        let address = if has_scheme {
            text.to_owned()
        } else {
            format!("http://{text}")
        };
        let url = Url::parse(&address).map_err(|_| NotAHost)?;
        let scheme = Scheme::of(&url).ok_or(NotAHost)?;
        let host = url.host_str().ok_or(NotAHost)?.to_owned();
        let bare = url.username().is_empty()
            && url.password().is_none()
            && url.path() == "/"
            && url.query().is_none()
            && url.fragment().is_none();
        // The reader of addresses is generous with blanks, tabs and wrong slashes; a wildcard would allow every name.
        let odd = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '\\' | '*' | '@');
        if !bare || text.contains(odd) {
            return Err(NotAHost);
        }
        let port = if has_scheme {
            url.port_or_known_default()
        } else {
            // 80 is written out here, and the reader leaves it out.
            url.port().or_else(|| text.ends_with(":80").then_some(80))
        };
        Ok(Self {
            scheme: has_scheme.then_some(scheme),
            host,
            port,
        })
    }
}

/// What a Host header, or the address in a request line, names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// In lower case; an IPv6 address in brackets.
    pub host: String,
    /// As it was written.
    pub port: Option<u16>,
}

/// What names the service has.
#[derive(Clone, Copy, Debug)]
pub struct Hosts<'a> {
    /// Where it listens.
    pub bound: &'a [SocketAddr],
    /// What the operator allows beside.
    pub allowed: &'a [AllowedHost],
}

impl Hosts<'_> {
    /// Whether a request under this name is served. Loopback names go with any port, since a tunnel changes the port but
    /// never the name; the bound address and the configured names with their port or without.
    #[must_use]
    pub fn are_asked(&self, asked: &Asked) -> bool {
        self.in_the_clear(asked) || self.before_a_proxy(asked).is_some()
    }

    /// Whether a browser that asks under this name came over TLS, as far as the operator says.
    #[must_use]
    pub fn are_behind_tls(&self, asked: &Asked) -> bool {
        let allowed = self.before_a_proxy(asked);
        allowed.is_some_and(|allowed| allowed.scheme == Some(Scheme::Https))
    }

    /// Names that stand for the very port of the service.
    fn in_the_clear(&self, asked: &Asked) -> bool {
        let loopback = ["localhost", "localhost.", "127.0.0.1", "[::1]"];
        if loopback.contains(&asked.host.as_str()) {
            return true;
        }
        let address = address(&asked.host);
        let bound = self.bound.iter().any(|bound| {
            // An address in numbers cannot be rebound, and all of the machine's are bound then.
            let named = address.is_some_and(|address| {
                address == bound.ip()
                    || bound.ip().is_unspecified() && address.is_ipv4() == bound.is_ipv4()
            });
            named && asked.port.is_none_or(|port| port == bound.port())
        });
        bound
            || self.allowed.iter().any(|allowed| {
                allowed.scheme.is_none()
                    && allowed.host == asked.host
                    && (allowed.port.is_none() || allowed.port == asked.port)
            })
    }

    /// The configured name with a scheme that this is.
    fn before_a_proxy(&self, asked: &Asked) -> Option<&AllowedHost> {
        self.allowed.iter().find(|allowed| {
            allowed.scheme.is_some()
                && allowed.host == asked.host
                && (asked.port.is_none() || asked.port == allowed.port)
        })
    }

    /// Whether a page of this origin may write: it is one of the service's own. `scheme` is that of the connection and
    /// `asked` what the request names.
    #[must_use]
    pub fn own_origin(&self, origin: &str, scheme: Scheme, asked: Option<&Asked>) -> bool {
        let Some((its_scheme, its)) = parse_origin(origin) else {
            return false;
        };
        let its_port = its.port.unwrap_or(its_scheme.port());
        let configured = self.allowed.iter().any(|allowed| {
            allowed.scheme == Some(its_scheme)
                && allowed.host == its.host
                && allowed.port == Some(its_port)
        });
        if configured {
            return true;
        }
        let as_asked = asked.is_some_and(|asked| {
            asked.host == its.host && asked.port.unwrap_or(scheme.port()) == its_port
        });
        let at_bound_port = self.bound.iter().any(|bound| bound.port() == its_port);
        its_scheme == scheme && self.in_the_clear(&its) && (as_asked || at_bound_port)
    }
}

fn address(host: &str) -> Option<IpAddr> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    match bare {
        Some(v6) => v6.parse().ok().map(IpAddr::V6),
        None => host.parse().ok().map(IpAddr::V4),
    }
}

/// An origin as browsers write it; anything else, `null` too, is none.
fn parse_origin(text: &str) -> Option<(Scheme, Asked)> {
    let url = Url::parse(text).ok()?;
    let scheme = Scheme::of(&url)?;
    if url.origin().ascii_serialization() != text {
        return None;
    }
    let asked = Asked {
        host: url.host_str()?.to_owned(),
        port: url.port(),
    };
    Some((scheme, asked))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(texts: &[&str]) -> Vec<AllowedHost> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn asked(text: &str) -> Asked {
        let at = text.rfind(':').filter(|at| !text[*at..].contains(']'));
        let (host, port) = at.map_or((text, None), |at| {
            (&text[..at], text[at + 1..].parse().ok())
        });
        Asked {
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn what_may_be_allowed() {
        for (text, scheme, host, port) in [
            ("gate.example", None, "gate.example", None),
            ("Gate.Example:8080", None, "gate.example", Some(8080)),
            ("gate.example:80", None, "gate.example", Some(80)),
            ("[FD00::1]:7070", None, "[fd00::1]", Some(7070)),
            ("10.0.0.1", None, "10.0.0.1", None),
            (
                "https://gate.example",
                Some(Scheme::Https),
                "gate.example",
                Some(443),
            ),
            (
                "https://gate.example/",
                Some(Scheme::Https),
                "gate.example",
                Some(443),
            ),
            (
                "http://gate.example:8080",
                Some(Scheme::Http),
                "gate.example",
                Some(8080),
            ),
        ] {
            let host = AllowedHost {
                scheme,
                host: host.to_owned(),
                port,
            };
            assert_eq!(text.parse(), Ok(host), "{text}");
        }
        for text in [
            "",
            "*",
            "*.example",
            "https://*",
            "gate.example/path",
            "gate.example?a",
            "gate.example#a",
            "user@gate.example",
            "ftp://gate.example",
            "gate.example:99999",
            "https://",
            "gate example",
            "gate.example\t",
            "http:\\\\gate.example",
            "https://user:pass@gate.example",
        ] {
            assert_eq!(text.parse::<AllowedHost>(), Err(NotAHost), "{text}");
        }
    }

    /// X02: names that lead here are told from names that mean this service.
    #[test]
    fn names_that_are_served() {
        let bound = [
            "127.0.0.1:7070".parse().unwrap(),
            "10.0.0.5:7071".parse().unwrap(),
        ];
        let allowed = allowed(&[
            "gate.example",
            "other.example:8080",
            "https://tls.example",
            "https://odd.example:8443",
        ]);
        let hosts = Hosts {
            bound: &bound,
            allowed: &allowed,
        };
        for own in [
            "localhost",
            "localhost.:1",
            "127.0.0.1:9",
            "[::1]",
            "10.0.0.5",
            "10.0.0.5:7071",
            "gate.example",
            "gate.example:1",
            "other.example:8080",
            "tls.example",
            "tls.example:443",
            "odd.example:8443",
            "odd.example",
        ] {
            assert!(hosts.are_asked(&asked(own)), "{own}");
        }
        for foreign in [
            "attacker.example",
            "localhost.attacker.example",
            "127.0.0.1.attacker.example",
            "127.0.0.2",
            "10.0.0.5:7070",
            "other.example",
            "other.example:1",
            "tls.example:7070",
            "0.0.0.0",
            "[::]",
            "[::ffff:127.0.0.1]",
            "gate.example.",
            "2130706433",
            "127.1",
            "0x7f.0.0.1",
            "",
        ] {
            assert!(!hosts.are_asked(&asked(foreign)), "{foreign}");
        }
        assert!(hosts.are_behind_tls(&asked("tls.example")));
        assert!(
            !hosts.are_behind_tls(&asked("gate.example"))
                && !hosts.are_behind_tls(&asked("localhost"))
        );
    }

    /// All addresses of the machine are bound: each of them, in numbers, is its own name.
    #[test]
    fn numbers_are_names_where_all_addresses_are_bound() {
        let bound = ["0.0.0.0:7070".parse().unwrap()];
        let hosts = Hosts {
            bound: &bound,
            allowed: &[],
        };
        for own in ["10.1.2.3:7070", "192.168.0.9", "0.0.0.0:7070"] {
            assert!(hosts.are_asked(&asked(own)), "{own}");
        }
        for foreign in [
            "10.1.2.3:80",
            "[fd00::1]:7070",
            "10.1.2.3.attacker.example:7070",
            "attacker.example",
        ] {
            assert!(!hosts.are_asked(&asked(foreign)), "{foreign}");
        }
        assert!(hosts.own_origin(
            "http://10.1.2.3:7070",
            Scheme::Http,
            Some(&asked("10.1.2.3:7070"))
        ));
        assert!(!hosts.own_origin(
            "http://10.1.2.3",
            Scheme::Http,
            Some(&asked("10.1.2.3:7070"))
        ));
    }

    /// X03: an origin counts with its scheme and its port.
    #[test]
    fn origins_that_may_write() {
        let bound = ["127.0.0.1:7070".parse().unwrap()];
        let allowed = allowed(&[
            "gate.example",
            "https://tls.example",
            "http://plain.example:8080",
        ]);
        let hosts = Hosts {
            bound: &bound,
            allowed: &allowed,
        };
        let http = [
            ("http://127.0.0.1:7070", "127.0.0.1:7070"),
            ("http://localhost:7070", "127.0.0.1:7070"),
            ("http://[::1]:7070", "localhost:7070"),
            // Through a tunnel.
            ("http://localhost:9000", "localhost:9000"),
            ("http://localhost", "localhost"),
            // Behind a proxy without TLS that keeps the name.
            ("http://gate.example", "gate.example"),
            ("http://gate.example:7070", "localhost:7070"),
            // Behind a proxy that ends TLS, whatever it makes of the Host header.
            ("https://tls.example", "tls.example"),
            ("https://tls.example", "127.0.0.1:7070"),
            ("http://plain.example:8080", "127.0.0.1:7070"),
        ];
        for (origin, host) in http {
            assert!(
                hosts.own_origin(origin, Scheme::Http, Some(&asked(host))),
                "{origin} at {host}"
            );
        }
        let foreign = [
            ("null", "127.0.0.1:7070"),
            ("", "127.0.0.1:7070"),
            ("file://", "127.0.0.1:7070"),
            ("http://127.0.0.1:7071", "127.0.0.1:7070"),
            ("http://127.0.0.1", "127.0.0.1:7070"),
            ("https://127.0.0.1:7070", "127.0.0.1:7070"),
            ("http://localhost:9000", "127.0.0.1:7070"),
            ("http://localhost:9000", "localhost:9001"),
            ("http://tls.example", "tls.example"),
            ("http://tls.example:443", "tls.example:443"),
            ("https://tls.example:8443", "tls.example"),
            ("http://tls.example:7070", "tls.example"),
            ("https://gate.example", "gate.example"),
            ("https://plain.example:8080", "plain.example:8080"),
            ("http://plain.example", "plain.example"),
            ("http://attacker.example", "attacker.example"),
            ("http://127.0.0.1.attacker.example:7070", "127.0.0.1:7070"),
            ("http://user@127.0.0.1:7070", "127.0.0.1:7070"),
            ("http://127.0.0.1:7070/", "127.0.0.1:7070"),
            (
                "http://127.0.0.1:7070 http://attacker.example",
                "127.0.0.1:7070",
            ),
            ("HTTP://127.0.0.1:7070", "127.0.0.1:7070"),
            ("http://2130706433:7070", "127.0.0.1:7070"),
        ];
        for (origin, host) in foreign {
            assert!(
                !hosts.own_origin(origin, Scheme::Http, Some(&asked(host))),
                "{origin} at {host}"
            );
        }
        let https =
            |origin| hosts.own_origin(origin, Scheme::Https, Some(&asked("localhost:7070")));
        assert!(https("https://localhost:7070") && https("https://tls.example"));
        assert!(!https("http://localhost:7070") && !https("https://localhost"));
        assert!(hosts.own_origin("http://localhost:7070", Scheme::Http, None));
    }
}
