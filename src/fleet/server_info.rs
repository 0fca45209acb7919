//! Reads the named fields of `GET /server_info` and nothing else (CLO10).
//!
//! Pure. The body can contain keys in clear: it is neither kept nor logged nor shown, and the
//! errors here do not quote it.

use kvgate_core::reading::StartMark;
use serde::Deserialize;
use serde_json::Value;

use super::dialect::Disaggregation;

/// Longest text of a field that is kept, in bytes; a longer one counts as absent.
const TEXT_BYTES_MAX: usize = 128;

/// What an engine says of itself. `None`: the field is absent or of another kind.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ServerInfo {
    /// When this incarnation started, as an opaque mark (CAP8); absent before 0.5.23.
    pub start_mark: Option<StartMark>,
    /// Version of the engine.
    pub version: Option<String>,
    /// Whether session closes have an effect; absent before 0.5.15.
    pub enable_session_radix_cache: Option<bool>,
    /// How cached KV is evicted.
    pub radix_eviction_policy: Option<String>,
    /// Whether the prefix cache is off, so that a close does nothing.
    pub disable_radix_cache: Option<bool>,
    /// Whether `/metrics` is served.
    pub enable_metrics: Option<bool>,
    /// Its part in a disaggregated fleet.
    pub disaggregation: Option<Disaggregation>,
}

/// The body is no JSON object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the answer of /server_info is not readable")]
pub struct Unreadable;

/// Only these fields leave the parser; each may be of any kind without spoiling the others.
#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    startup_time: Value,
    #[serde(default)]
    version: Value,
    #[serde(default)]
    enable_session_radix_cache: Value,
    #[serde(default)]
    radix_eviction_policy: Value,
    #[serde(default)]
    disable_radix_cache: Value,
    #[serde(default)]
    enable_metrics: Value,
    #[serde(default)]
    disaggregation_mode: Value,
}

/// Reads the body.
///
/// # Errors
/// When it is no JSON object; the error does not quote it.
pub fn read(body: &[u8]) -> Result<ServerInfo, Unreadable> {
    let fields: Fields = serde_json::from_slice(body).map_err(|_| Unreadable)?;
    Ok(ServerInfo {
        start_mark: start_mark(&fields.startup_time),
        version: text(&fields.version),
        enable_session_radix_cache: fields.enable_session_radix_cache.as_bool(),
        radix_eviction_policy: text(&fields.radix_eviction_policy),
        disable_radix_cache: fields.disable_radix_cache.as_bool(),
        enable_metrics: fields.enable_metrics.as_bool(),
        disaggregation: fields
            .disaggregation_mode
            .as_str()
            .and_then(Disaggregation::from_text),
    })
}

fn text(value: &Value) -> Option<String> {
    let text = value.as_str()?;
    (text.len() <= TEXT_BYTES_MAX).then(|| text.to_owned())
}

/// The bits of a number, a hash of a text: only equality matters.
fn start_mark(value: &Value) -> Option<StartMark> {
    match value {
        Value::Number(number) => number.as_f64().map(|time| StartMark(time.to_bits())),
        Value::String(text) if !text.is_empty() => Some(StartMark(fnv1a(text))),
        _ => None,
    }
}

/// FNV-1a, since the mark is stored and must be the same in every build.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CAP8: the same start time is the same mark, another one is another.
    #[test]
    fn cap8_start_mark() {
        let mark = |body: &str| read(body.as_bytes()).unwrap().start_mark;
        let number = mark(r#"{"startup_time":1795976069.31}"#);
        assert!(number.is_some());
        assert_eq!(number, mark(r#"{"x":1,"startup_time":1795976069.310}"#));
        assert_ne!(number, mark(r#"{"startup_time":1795976069.32}"#));
        assert_eq!(
            mark(r#"{"startup_time":"a"}"#),
            Some(StartMark(0xaf63_dc4c_8601_ec8c))
        );
        for body in [
            "{}",
            r#"{"startup_time":null}"#,
            r#"{"startup_time":""}"#,
            r#"{"startup_time":[1]}"#,
        ] {
            assert_eq!(mark(body), None, "{body}");
        }
    }

    /// CLO10: named fields only; a field of the wrong kind is absent and spoils nothing.
    #[test]
    fn clo10_named_fields() {
        let info = read(br#"{"api_key":"SECRET","version":5,"enable_session_radix_cache":true,"disaggregation_mode":"decode"}"#).unwrap();
        assert_eq!(info.version, None);
        assert_eq!(info.enable_session_radix_cache, Some(true));
        assert_eq!(info.disaggregation, Some(Disaggregation::Decode));
        assert!(!format!("{info:?}").contains("SECRET"));
        assert_eq!(read(b"SECRET"), Err(Unreadable));
        assert_eq!(read(b"{\"version\":"), Err(Unreadable));
    }
}
