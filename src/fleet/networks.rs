//! Which addresses of engines may be contacted.
//!
//! kvgate posts to every address a router lists, so a router that lists the cloud's metadata service
//! would be obeyed: link-local addresses are refused unless the operator names them. Addresses
//! written as numbers are judged before a connection is made, names when they are resolved.

use std::error::Error;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// The allowed engine networks. The default is any address but link-local ones.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Networks {
    /// Empty: any but link-local.
    only: Vec<Network>,
}

impl Networks {
    /// Only these networks; with an empty list any but link-local.
    #[must_use]
    pub const fn only(networks: Vec<Network>) -> Self {
        Self { only: networks }
    }

    /// Whether an engine at `ip` may be contacted. An IPv4 address in IPv6 clothes is judged as IPv4.
    #[must_use]
    pub fn allow(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        if self.only.is_empty() {
            return !is_link_local(ip);
        }
        self.only.iter().any(|network| network.contains(ip))
    }
}

const fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// A network in the form `10.0.0.0/8`; an address alone is the network of that address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    /// With the bits behind the prefix cleared.
    base: u128,
    mask: u128,
    is_v4: bool,
}

/// The text is no network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a network in the form 10.0.0.0/8 or fd00::/8")]
pub struct NetworkError;

impl Network {
    fn contains(self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.is_v4 && bits(ip) & self.mask == self.base
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (ip, prefix) = match text.split_once('/') {
            Some((ip, prefix)) => (ip, Some(prefix)),
            None => (text, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| NetworkError)?;
        let width = if ip.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => prefix.parse().map_err(|_| NetworkError)?,
            None => width,
        };
        let host_bits = u32::checked_sub(width, prefix).ok_or(NetworkError)?;
        let mask = u128::MAX.checked_shl(host_bits).unwrap_or(0);
        Ok(Self {
            base: bits(ip) & mask,
            mask,
            is_v4: ip.is_ipv4(),
        })
    }
}

fn bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(u32::from(ip)),
        IpAddr::V6(ip) => Ipv6Addr::to_bits(ip),
    }
}

/// A name resolves to no address that may be contacted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the address is outside the allowed engine networks")]
pub struct NotAllowed;

/// Resolves names and drops the addresses that may not be contacted. Since the client connects to
/// what this returns, a name cannot change its mind between check and use.
pub struct GuardedResolver(pub Arc<Networks>);

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let networks = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let addresses: Addrs = Box::new(judged(&networks, found)?.into_iter());
            Ok(addresses)
        })
    }
}

/// Of the addresses of a name those that may be contacted.
fn judged(
    networks: &Networks,
    found: Vec<SocketAddr>,
) -> Result<Vec<SocketAddr>, Box<dyn Error + Send + Sync>> {
    if found.is_empty() {
        return Err(io::Error::from(io::ErrorKind::NotFound).into());
    }
    let mut allowed = found;
    allowed.retain(|address| networks.allow(address.ip()));
    match allowed.is_empty() {
        true => Err(NotAllowed.into()),
        false => Ok(allowed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// CAP1: by default any address may be contacted but link-local ones.
    #[test]
    fn cap1_link_local_is_refused() {
        let any = Networks::default();
        for refused in [
            "169.254.169.254",
            "169.254.0.1",
            "fe80::1",
            "febf::1",
            "::ffff:169.254.169.254",
        ] {
            assert!(!any.allow(ip(refused)), "{refused}");
        }
        for allowed in [
            "127.0.0.1",
            "::1",
            "10.1.2.3",
            "8.8.8.8",
            "fd00::1",
            "fec0::1",
        ] {
            assert!(any.allow(ip(allowed)), "{allowed}");
        }
    }

    /// CAP1: with networks given, only those.
    #[test]
    fn cap1_only_the_given_networks() {
        let only = Networks::only(vec![
            "10.0.0.0/8".parse().unwrap(),
            "fd00::/8".parse().unwrap(),
            "192.168.1.7".parse().unwrap(),
        ]);
        for allowed in ["10.255.0.1", "fd12::1", "192.168.1.7", "::ffff:10.0.0.1"] {
            assert!(only.allow(ip(allowed)), "{allowed}");
        }
        for refused in ["11.0.0.1", "fe00::1", "192.168.1.8", "::a00:1"] {
            assert!(!only.allow(ip(refused)), "{refused}");
        }
        assert!(
            "0.0.0.0/0"
                .parse::<Network>()
                .unwrap()
                .contains(ip("1.2.3.4"))
        );
        assert!("::/0".parse::<Network>().unwrap().contains(ip("::1")));
        for bad in [
            "",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "host/8",
            "10.0.0.0/",
            "::/129",
        ] {
            assert_eq!(bad.parse::<Network>(), Err(NetworkError), "{bad}");
        }
    }

    /// CAP1, X04: a name is where it leads: to link-local addresses alone it is refused, as an
    /// address is; of several only the allowed ones are tried.
    #[test]
    fn cap1_names_are_judged_by_their_addresses() {
        let lead = |networks: &Networks, found: &[&str]| {
            let found = found.iter().map(|text| (ip(text), 0).into()).collect();
            judged(networks, found)
                .map(|allowed| {
                    allowed
                        .iter()
                        .map(|address| address.ip().to_string())
                        .collect()
                })
                .map_err(|error| error.is::<NotAllowed>())
        };
        let any = Networks::default();
        for forbidden in [
            &["169.254.169.254"][..],
            &["fe80::1", "169.254.0.1"],
            &["::ffff:169.254.169.254"],
        ] {
            let refused: Result<Vec<String>, bool> = lead(&any, forbidden);
            assert_eq!(refused, Err(true), "{forbidden:?}");
        }
        let mixed = lead(&any, &["169.254.169.254", "10.0.0.1", "fe80::1"]);
        assert_eq!(mixed, Ok(vec!["10.0.0.1".to_owned()]));
        assert_eq!(lead(&any, &[]), Err(false), "no such name");
        let only = Networks::only(vec!["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(lead(&only, &["127.0.0.1", "8.8.8.8"]), Err(true));
    }
}
