//! Bodies of requests.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::words::{CloseMode, EndedAs, Scope};

/// `POST /v1/leases`: ask for a lease.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AcquireRequest {
    /// One backend attempt; the idempotency key. 1 to 512 bytes of UTF-8 without control characters, not `.` or `..`.
    pub ticket_id: String,
    /// One multi-turn program; same rules as `ticket_id`.
    pub session_id: String,
    /// Processor-expanded prefix. With `max_new_tokens`, or `reservation_tokens` instead of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 9_007_199_254_740_991_u64))]
    pub prompt_tokens: Option<u64>,
    /// Remaining completion budget; the expected decode cap applies to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 9_007_199_254_740_991_u64))]
    pub max_new_tokens: Option<u64>,
    /// The sum, done by the caller; no cap applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 9_007_199_254_740_991_u64))]
    pub reservation_tokens: Option<u64>,
    /// Training or evaluation.
    #[serde(default)]
    pub scope: Scope,
    /// Protected work bypasses.
    #[serde(default)]
    pub protected: bool,
    /// Longest time that this call stays open, in seconds; 25 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 60))]
    pub wait_s: Option<f64>,
    /// Life of the lease in seconds; brought into range, then the answer says `ttl_clamped: true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<f64>,
    /// Id of the engine request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// A name of the caller for lists and filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// What the caller decided by itself since its last call that got through: reason to count. At most 16 reasons
    /// of 1 to 32 letters `a` to `z` and `_`.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "counts"
    )]
    pub local_bypasses: Option<BTreeMap<String, u64>>,
}

/// `POST /v1/leases/{lease_id}/release`: what the request really used, and where. All of it is optional.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReleaseRequest {
    /// Prompt tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Generated tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Prompt tokens that were served from the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Base URL of the engine that served it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
}

/// `POST /v1/leases/{lease_id}/renew`: begin the lease's life anew.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RenewRequest {
    /// New life in seconds, brought into range; absent keeps the present one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<f64>,
}

/// `POST /v1/wait`: wait for many tickets of one caller on one connection.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaitRequest {
    /// 1 to 1,000 tickets.
    #[cfg_attr(feature = "openapi", schema(min_items = 1, max_items = 1000))]
    pub ticket_ids: Vec<String>,
    /// Longest time that this call stays open, in seconds; 25 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 60))]
    pub wait_s: Option<f64>,
}

/// `release` in a batch.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReleaseOperation {
    /// The lease.
    pub lease_id: String,
    /// As in [`ReleaseRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// As in [`ReleaseRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// As in [`ReleaseRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// As in [`ReleaseRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
}

/// `renew` in a batch.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RenewOperation {
    /// The lease.
    pub lease_id: String,
    /// As in [`RenewRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<f64>,
}

/// `cancel` in a batch.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CancelOperation {
    /// The ticket.
    pub ticket_id: String,
}

/// `POST /v1/sessions/{session_id}/close`: how the session ends. All of it is optional.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CloseRequest {
    /// What happens to requests that still run.
    #[serde(default)]
    pub mode: CloseMode,
    /// Why the session ends; it changes nothing but what is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndedAs>,
}

/// `close` in a batch.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CloseOperation {
    /// The session.
    pub session_id: String,
    /// As in [`CloseRequest`].
    #[serde(default)]
    pub mode: CloseMode,
    /// As in [`CloseRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndedAs>,
}

/// Counts by name; a name that stands twice is refused, as every key that stands twice is (TOK2).
fn counts<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<BTreeMap<String, u64>>, D::Error> {
    struct Counts;

    impl<'de> Visitor<'de> for Counts {
        type Value = Option<BTreeMap<String, u64>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of counts")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut counts = BTreeMap::new();
            while let Some((name, count)) = map.next_entry::<String, u64>()? {
                if counts.contains_key(&name) {
                    return Err(de::Error::custom(format_args!("duplicate field `{name}`")));
                }
                counts.insert(name, count);
            }
            Ok(Some(counts))
        }
    }

    deserializer.deserialize_any(Counts)
}
