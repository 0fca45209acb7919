//! Requests as bytes, made once: between two of them only the digits of their ids change.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvgate_api::{
    AcquireRequest, BatchOperation, BatchRequest, CloseRequest, ReleaseOperation, ReleaseRequest,
    RenewRequest, Scope,
};
use serde::Serialize;

/// Shortest ids that still tell all tickets of a run apart.
pub const ID_CHARS_MIN: usize = 20;
/// Longest ids that the service takes, in bytes.
pub const ID_CHARS_MAX: usize = 512;
/// The same of sessions, of which a run has fewer.
pub const SESSION_CHARS_MIN: usize = 16;

/// Decode tokens of an acquire that does not say its whole reservation.
const NEW_TOKENS: u64 = 4_096;

/// What acquires look like.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Letters of a ticket id.
    pub ticket_chars: usize,
    /// Letters of a session id.
    pub session_chars: usize,
    /// Every field of an acquire instead of those that must be there.
    pub all_fields: bool,
    /// Longest time that an acquire waits at the service, in seconds.
    pub wait_s: u32,
}

impl Default for Shape {
    /// Ids as they are in training frameworks: a UUID, and a short name.
    fn default() -> Self {
        Self {
            ticket_chars: 36,
            session_chars: 17,
            all_fields: true,
            wait_s: 25,
        }
    }
}

/// Numbers that are used once in a run, after a beginning that is used in one run only.
#[derive(Clone, Debug)]
pub struct Ids {
    run: u32,
    tickets: Arc<AtomicU64>,
    sessions: Arc<AtomicU64>,
}

impl Ids {
    /// Those of the run of this random number.
    #[must_use]
    pub fn new(run: u32) -> Self {
        Self {
            run,
            tickets: Arc::default(),
            sessions: Arc::default(),
        }
    }

    fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    fn session(&self) -> u64 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// An id of so many letters: kind, run, and room for digits.
    fn blank(&self, kind: char, chars: usize) -> String {
        let head = format!("{kind}{:06x}-", self.run & 0xff_ff_ff);
        let room = chars.saturating_sub(head.len());
        head + &"0".repeat(room)
    }
}

/// Letters of an id before its digits.
const ID_HEAD: usize = 8;

/// What stands above every request to one service.
#[derive(Clone, PartialEq, Eq)]
pub struct Head {
    /// Name of the service in `Host`.
    pub host: String,
    /// Path before that of the call, such as a proxy asks for; empty or with a leading `/`.
    pub prefix: String,
    /// Value of `Authorization`; it is never shown.
    pub authorization: Option<String>,
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, prefix, .. } = self;
        write!(f, "Head({host}{prefix})")
    }
}

impl Head {
    /// A request without a body.
    #[must_use]
    pub fn get(&self, path: &str) -> Vec<u8> {
        let mut request = self.start("GET", path);
        request.push_str("\r\n");
        request.into_bytes()
    }

    /// A request with a JSON body.
    #[must_use]
    pub fn post(&self, path: &str, body: &str) -> Vec<u8> {
        let mut request = self.start("POST", path);
        request.push_str(&format!(
            "content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        request.into_bytes()
    }

    fn start(&self, method: &str, path: &str) -> String {
        let Self { host, prefix, .. } = self;
        let mut head = format!("{method} {prefix}{path} HTTP/1.1\r\nhost: {host}\r\n");
        if let Some(authorization) = &self.authorization {
            head.push_str(&format!("authorization: {authorization}\r\n"));
        }
        head
    }
}

/// Acquires of one caller.
#[derive(Clone, Debug)]
pub struct Acquires {
    ids: Ids,
    request: Vec<u8>,
    ticket: Range<usize>,
    session: Range<usize>,
    session_id: String,
}

impl Acquires {
    /// Those of one session, for `tokens` each.
    #[must_use]
    pub fn new(head: &Head, shape: &Shape, ids: &Ids, tokens: u64) -> Self {
        let body = acquire(shape, ids, tokens);
        let (ticket_id, session_id) = (body.ticket_id.clone(), body.session_id.clone());
        let request = head.post("/v1/leases", &json(&body));
        let place = |id: &str| {
            let found = find(&request, id.as_bytes());
            found.map_or(0..0, |at| {
                at.saturating_add(ID_HEAD)..at.saturating_add(id.len())
            })
        };
        let mut acquires = Self {
            ids: ids.clone(),
            ticket: place(&ticket_id),
            session: place(&session_id),
            request,
            session_id,
        };
        acquires.next_session();
        acquires
    }

    /// From here on a session that was never used before.
    pub fn next_session(&mut self) {
        let number = self.ids.session();
        if let Some(digits) = self.request.get_mut(self.session.clone()) {
            write_digits(digits, number);
        }
        let mut id = std::mem::take(&mut self.session_id).into_bytes();
        if let Some(digits) = id.get_mut(ID_HEAD..) {
            write_digits(digits, number);
        }
        self.session_id = String::from_utf8(id).unwrap_or_default();
    }

    /// The session of the next acquires.
    #[must_use]
    pub fn session_id(&self) -> &str {
        &self.session_id
    }

    /// The request of a ticket that was never used before.
    pub fn next_ticket(&mut self) -> &[u8] {
        if let Some(digits) = self.request.get_mut(self.ticket.clone()) {
            write_digits(digits, self.ids.ticket());
        }
        &self.request
    }

    /// The request of the same ticket once more.
    #[must_use]
    pub fn same_ticket(&self) -> &[u8] {
        &self.request
    }
}

/// Calls with an id in their path, whose body is always the same.
#[derive(Clone, Debug)]
pub struct Acts {
    before: Vec<u8>,
    after: Vec<u8>,
    request: Vec<u8>,
}

impl Acts {
    /// Releases of leases.
    #[must_use]
    pub fn releases(head: &Head) -> Self {
        Self::new(head, "/v1/leases/", "/release", &ReleaseRequest::default())
    }

    /// Renewals of leases.
    #[must_use]
    pub fn renewals(head: &Head) -> Self {
        Self::new(head, "/v1/leases/", "/renew", &RenewRequest::default())
    }

    /// Closes of sessions.
    #[must_use]
    pub fn closes(head: &Head) -> Self {
        Self::new(head, "/v1/sessions/", "/close", &CloseRequest::default())
    }

    fn new(head: &Head, before: &str, after: &str, body: &impl Serialize) -> Self {
        const ID: &str = "\u{1}";
        let request = head.post(&format!("{before}{ID}{after}"), &json(body));
        let at = find(&request, ID.as_bytes()).unwrap_or(request.len());
        let (before, rest) = request.split_at(at);
        Self {
            before: before.to_vec(),
            after: rest.get(ID.len()..).unwrap_or_default().to_vec(),
            request: Vec::new(),
        }
    }

    /// The request for this id.
    pub fn of(&mut self, id: &str) -> &[u8] {
        self.request.clear();
        self.request.extend_from_slice(&self.before);
        self.request.extend_from_slice(id.as_bytes());
        self.request.extend_from_slice(&self.after);
        &self.request
    }
}

/// Batches of acquires, and batches of their releases.
#[derive(Clone, Debug)]
pub struct Batches {
    head: Head,
    ids: Ids,
    acquires: Vec<u8>,
    tickets: Vec<Range<usize>>,
}

impl Batches {
    /// Batches of so many acquires of one session, for `tokens` each.
    #[must_use]
    pub fn new(head: &Head, shape: &Shape, ids: &Ids, tokens: u64, size: usize) -> Self {
        let one = acquire(shape, ids, tokens);
        let ticket_id = one.ticket_id.clone();
        let operation = BatchOperation::Acquire(Box::new(one));
        let body = json(&BatchRequest {
            operations: vec![operation; size],
        });
        let acquires = head.post("/v1/batch", &body);
        let mut tickets = Vec::with_capacity(size);
        let mut from = 0;
        while let Some(at) = acquires
            .get(from..)
            .and_then(|rest| find(rest, ticket_id.as_bytes()))
        {
            let start = from.saturating_add(at);
            from = start.saturating_add(ticket_id.len());
            tickets.push(start.saturating_add(ID_HEAD)..from);
        }
        Self {
            head: head.clone(),
            ids: ids.clone(),
            acquires,
            tickets,
        }
    }

    /// Acquires of tickets that were never used before.
    pub fn next_acquires(&mut self) -> &[u8] {
        for ticket in &self.tickets {
            if let Some(digits) = self.acquires.get_mut(ticket.clone()) {
                write_digits(digits, self.ids.ticket());
            }
        }
        &self.acquires
    }

    /// Releases of these leases.
    #[must_use]
    pub fn releases(&self, leases: &[String]) -> Vec<u8> {
        let release = |lease: &String| {
            BatchOperation::Release(ReleaseOperation {
                lease_id: lease.clone(),
                ..ReleaseOperation::default()
            })
        };
        let operations = leases.iter().map(release).collect();
        self.head
            .post("/v1/batch", &json(&BatchRequest { operations }))
    }
}

fn acquire(shape: &Shape, ids: &Ids, tokens: u64) -> AcquireRequest {
    let least = AcquireRequest {
        ticket_id: ids.blank('t', shape.ticket_chars),
        session_id: ids.blank('s', shape.session_chars),
        wait_s: Some(shape.wait_s.into()),
        ..AcquireRequest::default()
    };
    if !shape.all_fields {
        return AcquireRequest {
            reservation_tokens: Some(tokens),
            ..least
        };
    }
    let new_tokens = NEW_TOKENS.min(tokens / 2);
    AcquireRequest {
        prompt_tokens: Some(tokens.saturating_sub(new_tokens)),
        max_new_tokens: Some(new_tokens),
        scope: Scope::Train,
        ttl_s: Some(600.0),
        request_id: Some("rid-0123456789".to_owned()),
        client: Some("rollout-3".to_owned()),
        ..least
    }
}

/// Wire types always become JSON: their keys are names.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

/// The number in decimal, with zeros before it; its last digits where there is no room for all.
fn write_digits(room: &mut [u8], mut number: u64) {
    for digit in room.iter_mut().rev() {
        // Below 10, so that it is a digit.
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        Head {
            host: "localhost".to_owned(),
            prefix: String::new(),
            authorization: Some("Bearer x".to_owned()),
        }
    }

    fn body(request: &[u8]) -> serde_json::Value {
        let text = std::str::from_utf8(request).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let length = format!("content-length: {}", body.len());
        assert!(head.contains(&length), "{head}");
        assert!(head.contains("authorization: Bearer x"), "{head}");
        serde_json::from_str(body).unwrap()
    }

    #[test]
    fn a_token_is_not_shown() {
        assert_eq!(format!("{:?}", head()), "Head(localhost)");
    }

    #[test]
    fn acquires_have_ids_of_the_wanted_length_that_never_repeat() {
        let ids = Ids::new(0xabc);
        let mut acquires = Acquires::new(&head(), &Shape::default(), &ids, 22_528);
        let mut other = Acquires::new(&head(), &Shape::default(), &ids, 22_528);
        let first = body(acquires.next_ticket());
        assert_eq!(body(acquires.same_ticket()), first);
        let second = body(acquires.next_ticket());
        let third = body(other.next_ticket());
        let tickets = [&first, &second, &third].map(|body| body["ticket_id"].as_str().unwrap());
        assert_eq!(
            tickets,
            [0, 1, 2].map(|number| format!("t000abc-{number:028}"))
        );
        assert_eq!(first["session_id"], "s000abc-000000000");
        assert_eq!(acquires.session_id(), "s000abc-000000000");
        assert_eq!(third["session_id"], "s000abc-000000001");
        acquires.next_session();
        assert_eq!(
            body(acquires.next_ticket())["session_id"],
            acquires.session_id()
        );
        assert_eq!(acquires.session_id(), "s000abc-000000002");
        assert_eq!(
            (&first["prompt_tokens"], &first["max_new_tokens"]),
            (&18_432.into(), &4_096.into())
        );
        let request: AcquireRequest = serde_json::from_value(first).unwrap();
        assert!(request.client.is_some() && request.request_id.is_some());
    }

    #[test]
    fn the_least_of_an_acquire() {
        let shape = Shape {
            ticket_chars: 20,
            all_fields: false,
            ..Shape::default()
        };
        let mut acquires = Acquires::new(&head(), &shape, &Ids::new(1), 7);
        let body = body(acquires.next_ticket());
        assert_eq!(body["ticket_id"].as_str().unwrap().len(), 20);
        assert_eq!(body["reservation_tokens"], 7);
        assert!(body.get("client").is_none());
    }

    #[test]
    fn acts_name_their_id_in_the_path() {
        let mut acts = Acts::renewals(&head());
        for lease in ["1-ab", "12-ab"] {
            let request = acts.of(lease).to_vec();
            let start = format!("POST /v1/leases/{lease}/renew HTTP/1.1\r\n");
            assert!(request.starts_with(start.as_bytes()));
            assert_eq!(body(&request), serde_json::json!({}));
        }
    }

    #[test]
    fn batches_have_tickets_that_never_repeat_and_release_what_they_got() {
        let ids = Ids::new(1);
        let mut batches = Batches::new(&head(), &Shape::default(), &ids, 10, 3);
        let mut tickets = Vec::new();
        for _ in 0..2 {
            let body = body(batches.next_acquires());
            let operations: BatchRequest = serde_json::from_value(body).unwrap();
            for operation in operations.operations {
                let BatchOperation::Acquire(request) = operation else {
                    panic!("{operation:?}");
                };
                tickets.push(request.ticket_id);
            }
        }
        tickets.sort();
        tickets.dedup();
        assert_eq!(tickets.len(), 6);
        let releases = body(&batches.releases(&["a".to_owned(), "b".to_owned()]));
        assert_eq!(releases["operations"][1]["lease_id"], "b");
        assert_eq!(releases["operations"][0]["op"], "release");
    }
}
