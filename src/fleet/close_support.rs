//! What a session close comes to at an engine, by what the engine says of itself (CLO10).
//!
//! Pure: a verdict from the named fields of `/server_info` and the kind of the engine. What is said
//! about it to people stands in `words.rs`.

use super::dialect::Disaggregation;
use super::server_info::ServerInfo;

/// The first version with session close.
const FIRST: Version = Version(0, 5, 15);
/// The first version in which a close does not free KV by itself.
const FIRST_THAT_LOWERS: Version = Version(0, 5, 17);

/// What a session close comes to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CloseSupport {
    /// It frees the KV that only this session holds: 0.5.15 and 0.5.16.
    Frees,
    /// It lowers the priority of the session's KV, which eviction frees: 0.5.17 and later.
    Lowers,
    /// It has an effect; the version is not told in a way that says which.
    Unclear,
    /// It frees, but the eviction policy is one with which such an engine does not even start.
    Odd,
    /// The version has no session close.
    Absent,
    /// Its session cache is off: a close does nothing.
    CacheOff,
    /// Its prefix cache is off: a close does nothing.
    RadixOff,
    /// It decodes for other engines and keeps no session's KV: a close does nothing, and need not.
    Decode,
    /// vLLM has no session close.
    Vllm,
    /// Engines that are spoken to over gRPC have none.
    Grpc,
    /// The address is a router's: calls would reach one of its engines at most.
    Router,
}

impl CloseSupport {
    /// By the flags and the version.
    #[must_use]
    pub fn of(server: &ServerInfo) -> Self {
        let version = server.version.as_deref().and_then(Version::parse);
        let enabled = match server.enable_session_radix_cache {
            Some(enabled) if version.is_none_or(|version| version >= FIRST) => enabled,
            Some(_) | None => return Self::Absent,
        };
        let radix_off = server.disable_radix_cache == Some(true);
        if radix_off || !enabled {
            return match server.disaggregation {
                Some(Disaggregation::Decode) => Self::Decode,
                _ if enabled => Self::RadixOff,
                _ => Self::CacheOff,
            };
        }
        let policy = server.radix_eviction_policy.as_deref();
        match version {
            None => Self::Unclear,
            Some(version) if version >= FIRST_THAT_LOWERS => Self::Lowers,
            Some(_) if policy.is_some_and(|policy| policy != "priority") => Self::Odd,
            Some(_) => Self::Frees,
        }
    }

    /// Whether a close has an effect.
    #[must_use]
    pub const fn has_effect(self) -> bool {
        match self {
            Self::Frees | Self::Lowers | Self::Unclear | Self::Odd => true,
            Self::Absent
            | Self::CacheOff
            | Self::RadixOff
            | Self::Decode
            | Self::Vllm
            | Self::Grpc
            | Self::Router => false,
        }
    }
}

/// The three numbers of a version; what follows them (`.post1`, `rc2`) changes nothing here.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Version(u32, u32, u32);

impl Version {
    /// `None` also for 0.0.0, which a build without a version calls itself.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let mut parts = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        let rest = parts.next()?;
        let end = rest
            .find(|letter: char| !letter.is_ascii_digit())
            .unwrap_or(rest.len());
        let patch = rest.get(..end)?.parse().ok()?;
        let version = Self(major, minor, patch);
        (version != Self(0, 0, 0)).then_some(version)
    }
}

#[cfg(test)]
mod tests {
    use super::super::server_info;
    use super::*;

    fn of(fields: &str) -> CloseSupport {
        CloseSupport::of(&server_info::read(fields.as_bytes()).unwrap())
    }

    /// CLO10: the meaning of a close by version and flags.
    #[test]
    fn clo10_by_version_and_flags() {
        use CloseSupport as S;
        let on = |version: &str| {
            format!(
                r#"{{"version":"{version}","enable_session_radix_cache":true,"radix_eviction_policy":"priority"}}"#
            )
        };
        for (version, expected) in [
            ("0.5.14", S::Absent),
            ("0.5.15", S::Frees),
            ("0.5.15.post1", S::Frees),
            ("0.5.16", S::Frees),
            ("0.5.17", S::Lowers),
            ("0.5.17rc1", S::Lowers),
            ("v0.5.23", S::Lowers),
            ("0.6.0", S::Lowers),
            ("1.0.0", S::Lowers),
            ("0.4.99", S::Absent),
            ("0.0.0.dev0", S::Unclear),
            ("main", S::Unclear),
            ("0.5", S::Unclear),
        ] {
            assert_eq!(of(&on(version)), expected, "{version}");
        }
        for (fields, expected) in [
            ("{}", S::Absent),
            (r#"{"version":"0.5.23"}"#, S::Absent),
            (
                r#"{"version":"0.5.23","enable_session_radix_cache":false}"#,
                S::CacheOff,
            ),
            (
                r#"{"version":"0.5.23","enable_session_radix_cache":true,"disable_radix_cache":true}"#,
                S::RadixOff,
            ),
            (
                r#"{"version":"0.5.16","enable_session_radix_cache":true,"radix_eviction_policy":"lru"}"#,
                S::Odd,
            ),
            (
                r#"{"version":"0.5.16","enable_session_radix_cache":true}"#,
                S::Frees,
            ),
            (
                r#"{"version":"0.5.17","enable_session_radix_cache":true,"radix_eviction_policy":"lru"}"#,
                S::Lowers,
            ),
            (r#"{"enable_session_radix_cache":true}"#, S::Unclear),
            (
                r#"{"version":"0.5.23","enable_session_radix_cache":true,"disable_radix_cache":true,"disaggregation_mode":"decode"}"#,
                S::Decode,
            ),
            (
                r#"{"version":"0.5.23","enable_session_radix_cache":false,"disaggregation_mode":"prefill"}"#,
                S::CacheOff,
            ),
        ] {
            assert_eq!(of(fields), expected, "{fields}");
        }
    }

    /// CLO10: the recorded answers of the two version families.
    #[test]
    fn clo10_recorded_answers() {
        let old =
            include_str!("../../tests/fixtures/server-info/server_info-0.5.15.post1-subset.json");
        let new = include_str!("../../tests/fixtures/server-info/server_info-0.5.23-subset.json");
        assert_eq!(of(old), CloseSupport::Frees);
        assert_eq!(of(new), CloseSupport::Lowers);
        assert!(CloseSupport::Frees.has_effect() && CloseSupport::Lowers.has_effect());
        assert!(!CloseSupport::CacheOff.has_effect() && !CloseSupport::Vllm.has_effect());
    }
}
