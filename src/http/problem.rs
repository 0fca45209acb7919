//! Problems (RFC 9457): the only place that knows which status a code has and what to do about it.
//!
//! A handler ends with a [`Fault`]. The front of the router turns it into the answer, since only
//! there the request's id is known (`instance`).

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use kvgate_api::{FieldFault, PROBLEM_JSON, Problem, ProblemCode};
use kvgate_core::effect::{AcquireRefused, LeaseGone};
use kvgate_core::ids::IdError;

use crate::gate::GateError;
use crate::telemetry::RequestId;

/// How a caller makes itself known.
pub const BEARER: &str = "Bearer";

/// Letters of a sentence or a place that are kept: both may quote a name that the caller made up, and a body of nothing
/// but such a name is as long as a body may be.
const LETTERS_MAX: usize = 500;

/// Why a request is not served.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{status} {}: {detail}", code.as_str())]
pub struct Fault {
    status: StatusCode,
    code: ProblemCode,
    detail: String,
    errors: Vec<FieldFault>,
}

impl Fault {
    /// A fault with the usual status of its code.
    #[must_use]
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Self {
            status: usual_status(code),
            code,
            detail: shortened(detail.into()),
            errors: Vec::new(),
        }
    }

    /// 422 with the place of the fault: a JSON pointer, or `?name` for a query parameter.
    #[must_use]
    pub fn field(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(
            ProblemCode::InvalidRequest,
            "The request has a field that is not as it should be.",
        )
        .at(pointer, detail)
    }

    /// 400 with the same code as [`Fault::field`]: the request itself is wrong, not a field of it.
    #[must_use]
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(ProblemCode::InvalidRequest, detail).with_status(StatusCode::BAD_REQUEST)
    }

    /// 400: an id breaks a rule, which the detail names.
    #[must_use]
    pub fn id(pointer: impl Into<String>, rule: IdError) -> Self {
        let mut sentence = format!("{rule}.");
        if let Some(first) = sentence.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        Self::new(ProblemCode::InvalidId, sentence.clone()).at(pointer, sentence)
    }

    /// The same with one more place.
    #[must_use]
    pub fn at(mut self, pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        self.errors.push(FieldFault {
            pointer: shortened(pointer.into()),
            detail: shortened(detail.into()),
        });
        self
    }

    /// Each place in the request, by name, and what is wrong there.
    pub fn errors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.errors.iter().map(|error| {
            let place = error.pointer.trim_start_matches('/');
            (place, error.detail.as_str())
        })
    }

    /// The same with a status of its own.
    #[must_use]
    pub fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// Status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Stable name.
    #[must_use]
    pub fn code(&self) -> ProblemCode {
        self.code
    }

    /// What happened, in a few words.
    #[must_use]
    pub fn title(&self) -> &'static str {
        title(self.code)
    }

    /// What is to be done about it.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Too much is under way; come back in a moment.
    #[must_use]
    pub fn overloaded() -> Self {
        Self::new(
            ProblemCode::Overloaded,
            "Too many requests are under way; ask again in a moment.",
        )
    }

    /// Seconds after which a 503 is worth another try.
    fn retry_after(&self) -> Option<&'static str> {
        (self.status == StatusCode::SERVICE_UNAVAILABLE).then_some("1")
    }

    /// The body.
    #[must_use]
    pub fn problem(&self, request: RequestId) -> Problem {
        Problem {
            kind: format!("/problems/{}", self.code.as_str()),
            title: title(self.code).to_owned(),
            status: self.status.as_u16(),
            detail: self.detail.clone(),
            code: self.code,
            instance: request.to_string(),
            errors: self.errors.clone(),
        }
    }

    /// The whole answer.
    pub(super) fn render(&self, request: RequestId) -> Response {
        let body = serde_json::to_vec(&self.problem(request)).unwrap_or_default();
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        if let Some(seconds) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from_static(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(BEARER));
        }
        response
    }
}

fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(LETTERS_MAX) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl IntoResponse for Fault {
    /// Carries the fault to the front, which knows the request's id.
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status;
        response.extensions_mut().insert(self);
        response
    }
}

impl From<GateError> for Fault {
    fn from(error: GateError) -> Self {
        match error {
            GateError::Overloaded => Self::new(
                ProblemCode::Overloaded,
                "More calls are waiting for the writer than it takes. Go on without a lease.",
            ),
            GateError::StoreUnavailable => Self::new(
                ProblemCode::StoreUnavailable,
                "The store cannot promise durability now; it is being opened again.",
            ),
            GateError::Recovering => recovering(),
            GateError::Draining => draining(),
        }
    }
}

impl From<LeaseGone> for Fault {
    fn from(gone: LeaseGone) -> Self {
        match gone {
            LeaseGone::NotFound => Self::new(
                ProblemCode::LeaseNotFound,
                "No lease with this id was ever issued.",
            ),
            LeaseGone::Released => Self::new(ProblemCode::LeaseReleased, "The lease was released."),
            LeaseGone::Expired => Self::new(
                ProblemCode::LeaseExpired,
                "The lease has expired, was revoked, or ended so long ago that it is forgotten.",
            ),
        }
    }
}

impl From<AcquireRefused> for Fault {
    fn from(refused: AcquireRefused) -> Self {
        match refused {
            AcquireRefused::TicketConflict => Self::new(
                ProblemCode::TicketConflict,
                "The ticket was sent before with another session or other numbers. Use a new ticket for a new attempt.",
            ),
            AcquireRefused::TooManyTokens => Self::field(
                "/max_new_tokens",
                "prompt_tokens + max_new_tokens is above 2^53-1",
            ),
        }
    }
}

/// No close with this id is remembered.
pub(super) fn close_not_found() -> Fault {
    Fault::new(
        ProblemCode::CloseNotFound,
        "No close with this id is known.",
    )
}

/// More closes are open than are kept.
pub(super) fn too_many_closes() -> Fault {
    Fault::new(
        ProblemCode::Overloaded,
        "Too many closes are under way. Nothing was changed: send this one again later.",
    )
}

/// Bodies that are on their way fill what is kept for them.
pub(super) fn too_many_bodies() -> Fault {
    Fault::new(
        ProblemCode::Overloaded,
        "Too many large bodies are on their way. Nothing was changed: go on without a lease, or send it again later.",
    )
}

/// CLO8: a close that comes late would hit a newer use of the session.
pub(super) fn close_superseded() -> Fault {
    Fault::new(
        ProblemCode::CloseSuperseded,
        "The session was used or closed anew since. To end it now, close the session.",
    )
}

/// DUR3: not loaded yet.
pub(super) fn recovering() -> Fault {
    Fault::new(
        ProblemCode::Recovering,
        "The store is being loaded, or the fleet was not read yet.",
    )
}

/// An orderly stop has begun.
pub(super) fn draining() -> Fault {
    Fault::new(
        ProblemCode::Draining,
        "The service is stopping. Places in line and leases are kept: ask again with the same ticket.",
    )
}

/// Nobody is known by what was sent, or nothing was.
pub(super) fn unauthorized(is_wrong: bool) -> Fault {
    Fault::new(
        ProblemCode::Unauthorized,
        if is_wrong {
            "The token in `Authorization: Bearer` is not known."
        } else {
            "This call needs a token, in the header `Authorization: Bearer`."
        },
    )
}

/// Nothing is served at this address.
pub(super) fn not_found() -> Fault {
    Fault::new(ProblemCode::NotFound, "Nothing is served at this address.")
}

/// The address does not take this method.
pub(super) fn method_not_allowed() -> Fault {
    Fault::new(
        ProblemCode::MethodNotAllowed,
        "This address does not take this method; `Allow` lists those it takes.",
    )
}

const fn usual_status(code: ProblemCode) -> StatusCode {
    match code {
        ProblemCode::InvalidJson | ProblemCode::InvalidId => StatusCode::BAD_REQUEST,
        ProblemCode::InvalidRequest => StatusCode::UNPROCESSABLE_ENTITY,
        ProblemCode::Unauthorized => StatusCode::UNAUTHORIZED,
        ProblemCode::Forbidden => StatusCode::FORBIDDEN,
        ProblemCode::NotFound
        | ProblemCode::LeaseNotFound
        | ProblemCode::TicketNotFound
        | ProblemCode::SessionNotFound
        | ProblemCode::CloseNotFound => StatusCode::NOT_FOUND,
        ProblemCode::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        ProblemCode::TicketConflict | ProblemCode::CloseSuperseded => StatusCode::CONFLICT,
        ProblemCode::LeaseExpired | ProblemCode::LeaseReleased => StatusCode::GONE,
        ProblemCode::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ProblemCode::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ProblemCode::HostNotAllowed => StatusCode::MISDIRECTED_REQUEST,
        ProblemCode::Recovering
        | ProblemCode::Draining
        | ProblemCode::Overloaded
        | ProblemCode::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// The kind of problem in a few words.
#[must_use]
pub const fn title(code: ProblemCode) -> &'static str {
    match code {
        ProblemCode::InvalidJson => "The body is not JSON",
        ProblemCode::InvalidId => "An id breaks a rule",
        ProblemCode::InvalidRequest => "The request is not as it should be",
        ProblemCode::Unauthorized => "The token is missing or wrong",
        ProblemCode::Forbidden => "Not allowed",
        ProblemCode::NotFound => "Nothing here",
        ProblemCode::LeaseNotFound => "No such lease",
        ProblemCode::TicketNotFound => "No such ticket",
        ProblemCode::SessionNotFound => "No such session",
        ProblemCode::CloseNotFound => "No such close",
        ProblemCode::MethodNotAllowed => "Wrong method",
        ProblemCode::TicketConflict => "The ticket was used for something else",
        ProblemCode::CloseSuperseded => "The session was used or closed anew",
        ProblemCode::LeaseExpired => "The lease has expired",
        ProblemCode::LeaseReleased => "The lease was released",
        ProblemCode::BodyTooLarge => "The body is too large",
        ProblemCode::UnsupportedMediaType => "The body is not plain JSON",
        ProblemCode::HostNotAllowed => "The host name is not allowed",
        ProblemCode::Recovering => "Starting",
        ProblemCode::Draining => "Stopping",
        ProblemCode::Overloaded => "Too many calls",
        ProblemCode::StoreUnavailable => "The store is not available",
    }
}
