//! Readers of requests whose refusals are problems: bodies, ids in paths, parameters.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt;
use kvgate_api::ProblemCode;
use kvgate_core::ids::{CloseId, IdError, LeaseId, SessionId, TicketId};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_path_to_error::Segment;
use tokio::sync::OwnedSemaphorePermit;
use utoipa::IntoParams;
use utoipa::openapi::Required;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};

use super::problem::{self, Fault};
use super::server::Arrival;

/// Largest body of a call.
pub(super) const BODY_MAX: usize = 1 << 20;
/// Largest body of a batch.
pub(super) const BATCH_BODY_MAX: usize = 4 << 20;
/// Largest form that names many ids: a thousand of the longest kind, percent-encoded.
const FORM_BODY_MAX: usize = 2 << 20;
/// Largest other form of a page.
const FORM_MAX: usize = 64 << 10;
/// Bytes above the bound that are read and thrown away, so that the sender sees the answer instead
/// of a cut connection.
const OVERRUN_MAX: usize = 16 << 20;
/// Bytes of a body that take no room: most calls are smaller, so senders of large bodies cannot keep
/// them out.
const UNCOUNTED: usize = 8 << 10;
/// Longest time for a body.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// A JSON body that must be there.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self, Fault> {
        let bytes = read_json(request, BODY_MAX).await?;
        parse(&bytes).map(Self)
    }
}

/// A JSON body that may be left out; then no content type is needed either.
pub(super) struct OptionalJson<T>(pub(super) T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self, Fault> {
        let headers = request.headers();
        refuse_compressed(headers)?;
        let is_json = require_json(headers);
        let bytes = read_body(request, BODY_MAX).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        is_json?;
        parse(&bytes).map(Self)
    }
}

/// The body of a call that takes no fields.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoFields {}

/// The body of a batch, whose operations are parsed one by one.
pub(super) struct BatchBody(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for BatchBody {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self, Fault> {
        read_json(request, BATCH_BODY_MAX).await.map(Self)
    }
}

/// What a form of a page sends: names and values, bounded as every body is.
#[derive(Debug)]
pub struct Form(Vec<(String, String)>);

impl<S: Send + Sync> FromRequest<S> for Form {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self, Fault> {
        let headers = request.headers();
        refuse_compressed(headers)?;
        require_form(headers)?;
        let bytes = read_body(request, FORM_MAX).await?;
        let pairs = url::form_urlencoded::parse(&bytes).into_owned();
        Ok(Self(pairs.collect()))
    }
}

impl Form {
    /// The first value of this name; an empty one where there is none.
    #[must_use]
    pub fn field(&self, name: &str) -> &str {
        let pair = self.0.iter().find(|(its_name, _)| its_name == name);
        pair.map_or("", |(_, value)| value)
    }
}

async fn read_json(request: Request, bound: usize) -> Result<Bytes, Fault> {
    refuse_compressed(request.headers())?;
    require_json(request.headers())?;
    read_body(request, bound).await
}

/// Fields of a form: those of the body, or of the query where there is no body. A field may stand
/// more than once; the order is kept.
#[derive(Clone, Debug, Default)]
pub struct Fields(Vec<(String, String)>);

impl Fields {
    /// Names and values, in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let fields = self.0.iter();
        fields.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The first field of this name that is not empty.
    #[must_use]
    pub fn get<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.all(name).next()
    }

    /// All fields of this name that are not empty.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let named = self.0.iter().filter(move |(known, _)| known == name);
        named
            .map(|(_, value)| value.as_str())
            .filter(|value| !value.is_empty())
    }
}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self, Fault> {
        let body;
        let query = request.uri().query().unwrap_or_default().to_owned();
        let text = if matches!(*request.method(), Method::GET | Method::HEAD) {
            query.as_str()
        } else {
            refuse_compressed(request.headers())?;
            require_form(request.headers())?;
            body = read_body(request, FORM_BODY_MAX).await?;
            std::str::from_utf8(&body).map_err(|_| not_a_form())?
        };
        let fields = query_pairs(text).map(|(name, value)| Some((name?, value?)));
        let fields: Option<Vec<_>> = fields.collect();
        fields.map(Self).ok_or_else(not_a_form)
    }
}

fn not_a_form() -> Fault {
    Fault::bad_request("The fields are not percent-encoded UTF-8.")
}

fn refuse_compressed(headers: &HeaderMap) -> Result<(), Fault> {
    let plain = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if plain {
        Ok(())
    } else {
        Err(Fault::new(
            ProblemCode::UnsupportedMediaType,
            "A body must not be compressed.",
        ))
    }
}

fn require_json(headers: &HeaderMap) -> Result<(), Fault> {
    if is_of_kind(headers, "application/json") {
        Ok(())
    } else {
        Err(Fault::new(
            ProblemCode::UnsupportedMediaType,
            "The body must be sent as `Content-Type: application/json`.",
        ))
    }
}

fn require_form(headers: &HeaderMap) -> Result<(), Fault> {
    if is_of_kind(headers, "application/x-www-form-urlencoded") {
        Ok(())
    } else {
        Err(Fault::new(
            ProblemCode::UnsupportedMediaType,
            "A form must be sent as `Content-Type: application/x-www-form-urlencoded`.",
        ))
    }
}

fn is_of_kind(headers: &HeaderMap, wanted: &str) -> bool {
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let kind = kinds.next().and_then(|kind| kind.to_str().ok());
    let essence = kind.and_then(|kind| kind.split(';').next());
    kinds.next().is_none()
        && essence.is_some_and(|essence| essence.trim().eq_ignore_ascii_case(wanted))
}

async fn read_body(request: Request, bound: usize) -> Result<Bytes, Fault> {
    let announced = request
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > bound.saturating_add(OVERRUN_MAX)) {
        return Err(too_large(bound));
    }
    let arrival = request.extensions().get::<Arc<Arrival>>().cloned();
    let mut room = Room {
        arrival,
        taken: None,
    };
    let mut body = request.into_body();
    match tokio::time::timeout(BODY_WITHIN, collect(&mut body, bound, &mut room)).await {
        Ok(read) => read,
        Err(_) => Err(Fault::bad_request("The body did not arrive in time.")
            .with_status(StatusCode::REQUEST_TIMEOUT)),
    }
}

async fn collect(body: &mut Body, bound: usize, room: &mut Room) -> Result<Bytes, Fault> {
    let mut kept = Pieces::default();
    let mut refused = None;
    let mut read = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| {
            Fault::new(
                ProblemCode::InvalidJson,
                "The body ended before its length.",
            )
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        read = read.saturating_add(data.len());
        if read <= bound && refused.is_none() {
            match room.grow_to(read) {
                Ok(()) => kept.push(data),
                Err(fault) => {
                    refused = Some(fault);
                    kept = Pieces::default();
                    room.taken = None;
                }
            }
        } else if read > bound.saturating_add(OVERRUN_MAX) {
            break;
        }
    }
    match refused {
        _ if read > bound => Err(too_large(bound)),
        Some(fault) => Err(fault),
        None => Ok(kept.whole()),
    }
}

/// A body as it comes in. Most come in one piece, which is not copied.
#[derive(Default)]
struct Pieces {
    first: Bytes,
    /// The whole body, once there was a second piece.
    joined: Vec<u8>,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        if self.first.is_empty() && self.joined.is_empty() {
            self.first = piece;
        } else {
            self.joined
                .extend_from_slice(&std::mem::take(&mut self.first));
            self.joined.extend_from_slice(&piece);
        }
    }

    fn whole(self) -> Bytes {
        if self.joined.is_empty() {
            self.first
        } else {
            self.joined.into()
        }
    }
}

/// What one body takes of the room for all of them, until it was read.
struct Room {
    /// `None`: a call from within the process.
    arrival: Option<Arc<Arrival>>,
    taken: Option<OwnedSemaphorePermit>,
}

impl Room {
    fn grow_to(&mut self, bytes: usize) -> Result<(), Fault> {
        let taken = self.taken.as_ref().map_or(0, |taken| taken.num_permits());
        let more = bytes.saturating_sub(UNCOUNTED).saturating_sub(taken);
        let Some(arrival) = self.arrival.as_ref().filter(|_| more > 0) else {
            return Ok(());
        };
        let more = u32::try_from(more).map_err(|_| problem::too_many_bodies())?;
        let more = Arc::clone(arrival.shares.bodies())
            .try_acquire_many_owned(more)
            .map_err(|_| problem::too_many_bodies())?;
        match &mut self.taken {
            Some(taken) => taken.merge(more),
            None => self.taken = Some(more),
        }
        Ok(())
    }
}

fn too_large(bound: usize) -> Fault {
    Fault::new(
        ProblemCode::BodyTooLarge,
        format!("The body is larger than {bound} bytes."),
    )
}

/// Reads one JSON object. What is no JSON is 400; what is JSON but not what is asked for is 422 with
/// the place (TOK2: numbers out of range and keys that stand twice among them).
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    let text = object(bytes)?;
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(value);
    }
    // Keeping track of the place costs several allocations a field, so only what has a fault is read so.
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let pointer = pointer(error.path());
        unreadable(&pointer, error.inner(), text)
    })?;
    reader.end().map_err(|error| unreadable("", &error, text))?;
    Ok(value)
}

/// The text of an object. Readers made by serde take a list of the fields' values as well, which
/// nobody means.
pub(super) fn object(bytes: &[u8]) -> Result<&str, Fault> {
    let text = std::str::from_utf8(bytes)
        .map_err(|_| Fault::new(ProblemCode::InvalidJson, "The body is not UTF-8."))?;
    if text.trim_start().starts_with('{') {
        return Ok(text);
    }
    Err(match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => Fault::field("", "must be an object"),
        Err(error) => not_json(&error.to_string()),
    })
}

/// The fault of a JSON reader that stopped at `pointer` in `text`.
pub(super) fn unreadable(pointer: &str, error: &serde_json::Error, text: &str) -> Fault {
    let words = error.to_string();
    // serde_json calls some wrong values errors of syntax (1e400, a number for a word), and stops at
    // a wrong value before it sees that the text is cut. So the text is judged by itself.
    let not_unicode = words.contains("surrogate") || words.contains("hex escape");
    if not_unicode || serde_json::from_str::<IgnoredAny>(text).is_err() {
        return not_json(&words);
    }
    let detail = match without_position(&words) {
        "expected value" => "wrong type",
        detail => detail,
    };
    Fault::field(completed(pointer, &words), detail)
}

fn not_json(words: &str) -> Fault {
    Fault::new(
        ProblemCode::InvalidJson,
        format!("The body cannot be read as JSON: {words}."),
    )
}

/// A missing field has no place of its own to stop at.
fn completed(pointer: &str, text: &str) -> String {
    let named = ["missing field `", "unknown field `", "duplicate field `"]
        .iter()
        .find_map(|start| text.strip_prefix(start)?.split('`').next());
    match named {
        Some(name) => {
            let step = format!("/{}", escaped(name));
            if pointer.ends_with(&step) {
                pointer.to_owned()
            } else {
                format!("{pointer}{step}")
            }
        }
        None => pointer.to_owned(),
    }
}

fn without_position(text: &str) -> &str {
    let end = text.rfind(" at line ").unwrap_or(text.len());
    text.get(..end).unwrap_or(text)
}

/// RFC 6901.
fn pointer(path: &serde_path_to_error::Path) -> String {
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
            Segment::Map { key } => pointer.push_str(&format!("/{}", escaped(key))),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    pointer
}

fn escaped(step: &str) -> String {
    step.replace('~', "~0").replace('/', "~1")
}

/// Decodes percent-encoding exactly once; `None` when it is not one, or not UTF-8.
pub(super) fn percent_decoded(text: &str) -> Option<Cow<'_, str>> {
    let bytes = text.as_bytes();
    let good = bytes.iter().enumerate().all(|(at, byte)| {
        *byte != b'%'
            || bytes
                .get(at + 1..at + 3)
                .is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    });
    if !good {
        return None;
    }
    percent_encoding::percent_decode(bytes).decode_utf8().ok()
}

/// Position of the id among the parts of `/v1/<list>/<id>...`.
const ID_PART: usize = 3;

/// The id in the path, from the raw path: routes are matched on it too, so that no id can reach
/// another route.
fn path_id(parts: &Parts) -> Result<Cow<'_, str>, Fault> {
    let raw = parts.uri.path().split('/').nth(ID_PART).unwrap_or_default();
    percent_decoded(raw).ok_or_else(|| {
        Fault::new(
            ProblemCode::InvalidId,
            "The id in the path is not percent-encoded UTF-8.",
        )
    })
}

/// The id in the path when it is opaque: an unknown one is 404, whatever its bytes (ID2).
fn opaque_id<T>(parts: &Parts, parse: fn(&str) -> Option<T>) -> Option<T> {
    parse(&path_id(parts).ok()?)
}

/// The id in the path when callers choose it (ID1).
fn chosen_id<T>(parts: &Parts, new: fn(&str) -> Result<T, IdError>) -> Result<T, Fault> {
    new(&path_id(parts)?).map_err(|rule| Fault::id("", rule))
}

/// An id in the path as the document describes it.
fn id_parameter(name: &str, description: &str) -> Vec<Parameter> {
    let text = ObjectBuilder::new().schema_type(Type::String).build();
    let parameter = ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some(description))
        .schema(Some(text));
    vec![parameter.build()]
}

macro_rules! path_id {
    ($(#[$doc:meta])* $name:ident($of:ty), $read:expr, $parameter:literal, $description:literal) => {
        $(#[$doc])*
        pub(super) struct $name(pub(super) $of);

        impl<S: Send + Sync> FromRequestParts<S> for $name {
            type Rejection = Fault;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Fault> {
                let read: fn(&Parts) -> Result<$of, Fault> = $read;
                read(parts).map(Self)
            }
        }

        impl IntoParams for $name {
            fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
                id_parameter($parameter, $description)
            }
        }
    };
}

path_id!(
    /// The lease in the path; `None` for whatever is no lease id.
    LeasePath(Option<LeaseId>),
    |parts| Ok(opaque_id(parts, LeaseId::parse)),
    "lease_id",
    "The fencing token of an admit"
);

path_id!(
    /// The close in the path; `None` for whatever is no close id.
    ClosePath(Option<CloseId>),
    |parts| Ok(opaque_id(parts, CloseId::parse)),
    "close_id",
    "The id of a close"
);

path_id!(
    /// The ticket in the path.
    TicketPath(TicketId),
    |parts| chosen_id(parts, TicketId::new),
    "ticket_id",
    "The caller's idempotency key, percent-encoded"
);

path_id!(
    /// The session in the path.
    SessionPath(SessionId),
    |parts| chosen_id(parts, SessionId::new),
    "session_id",
    "One multi-turn program, percent-encoded"
);

/// Names and values of a query, decoded; `None` for what cannot be decoded.
pub(super) fn query_pairs(
    query: &str,
) -> impl Iterator<Item = (Option<String>, Option<String>)> + '_ {
    let decoded = |text: &str| percent_decoded(&text.replace('+', " ")).map(Cow::into_owned);
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(move |pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(value))
        })
}

/// Parameters of the query, each at most once.
#[derive(Clone, Debug, Default)]
pub struct Query {
    values: BTreeMap<String, String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Fault> {
        let mut values = BTreeMap::new();
        for pair in query_pairs(parts.uri.query().unwrap_or_default()) {
            let (Some(name), Some(value)) = pair else {
                return Err(Fault::bad_request(
                    "The query is not percent-encoded UTF-8.",
                ));
            };
            if values.contains_key(&name) {
                return Err(Fault::field(
                    format!("?{name}"),
                    "the parameter stands twice",
                ));
            }
            values.insert(name, value);
        }
        Ok(Self { values })
    }
}

impl Query {
    /// These parameters.
    #[must_use]
    pub fn of(pairs: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let owned = |(name, value): (&str, String)| (name.to_owned(), value);
        Self {
            values: pairs.into_iter().map(owned).collect(),
        }
    }

    /// Puts a parameter in the place of the one with this name.
    pub fn put(&mut self, name: &str, value: impl Into<String>) {
        self.values.insert(name.to_owned(), value.into());
    }

    /// Leaves out what is empty: a form sends its empty fields as well.
    pub fn drop_empty(&mut self) {
        self.values.retain(|_, value| !value.is_empty());
    }

    /// A parameter, which stays.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// Takes a parameter out.
    pub fn take(&mut self, name: &str) -> Option<String> {
        self.values.remove(name)
    }

    /// Takes out all parameters whose name begins so, and gives the rest of their names.
    pub fn take_named(&mut self, prefix: &str) -> Vec<String> {
        let named = self.values.keys();
        let rests: Vec<String> = named
            .filter_map(|name| name.strip_prefix(prefix).map(str::to_owned))
            .collect();
        self.values.retain(|name, _| !name.starts_with(prefix));
        rests
    }

    /// After all known parameters were taken: what is left is not known.
    ///
    /// # Errors
    /// Names the first of them.
    pub fn done(self) -> Result<(), Fault> {
        match self.values.keys().next() {
            Some(name) => Err(Fault::field(format!("?{name}"), "unknown parameter")),
            None => Ok(()),
        }
    }
}

/// A call that takes no parameters.
pub(super) struct NoQuery;

impl<S: Send + Sync> FromRequestParts<S> for NoQuery {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Fault> {
        let query = Query::from_request_parts(parts, state).await?;
        query.done().map(|()| Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ID1: an id is decoded exactly once, so that no two ids fall together.
    #[test]
    fn id1_percent_encoding_is_decoded_once() {
        let cases = [
            ("a%2Fb", Some("a/b")),
            ("a%252Fb", Some("a%2Fb")),
            ("%E4%BC%9A", Some("会")),
            ("a+b", Some("a+b")),
            ("%zz", None),
            ("%2", None),
            ("%", None),
            ("%ff", None),
        ];
        for (raw, expected) in cases {
            assert_eq!(percent_decoded(raw).as_deref(), expected, "{raw}");
        }
    }

    #[test]
    fn places_are_json_pointers() {
        assert_eq!(completed("", "missing field `a/b`, or"), "/a~1b");
        assert_eq!(completed("/x", "unknown field `x`, expected"), "/x");
        assert_eq!(completed("/x", "invalid type"), "/x");
    }
}
