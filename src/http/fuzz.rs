//! Fuzz targets of what callers send: bodies, batches, ids in paths, queries. Each is taken within its bounds or
//! refused by a problem that is short, whatever was sent.

use axum::extract::FromRequestParts;
use axum::http::{Request, StatusCode};
use futures_util::FutureExt;
use kvgate_api::{
    AcquireRequest, BatchOperation, CancelOperation, CloseOperation, CloseRequest,
    ReleaseOperation, ReleaseRequest, RenewOperation, RenewRequest, SettingsChange, StepRequest,
    WaitRequest,
};
use kvgate_core::ids::{CloseId, ID_BYTES_MAX, Label, LeaseId, RunId, SessionId, TicketId};
use kvgate_core::policy::ttl_in_range;
use kvgate_core::units::{Span, TOKENS_MAX};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use super::app::HttpConfig;
use super::extract::{Query, SessionPath, TicketPath, parse, percent_decoded, query_pairs};
use super::lists::{Paging, cursor};
use super::problem::Fault;
use super::{STUCK_AFTER, batch, convert, settings};
use crate::access::Access;
use crate::config::Origins;
use crate::fuzz::{Inputs, fuzz};

/// Letters that a refusal may have: it names places and rules, and what was sent only in part.
const FAULT_LETTERS_MAX: usize = 16 << 10;

const WORDS: &[&str] = &[
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "\\u0000",
    "\\ud800",
    "\\u0085",
    "1e400",
    "\".\"",
    "\"..\"",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "{\"a\":",
    "\"ticket_id\":\"t\",",
    "\"session_id\":\"s\",",
    "\"lease_id\":\"1-0\",",
    "\"prompt_tokens\":9007199254740991,",
    "\"max_new_tokens\":1,",
    "\"reservation_tokens\":0,",
    "\"wait_s\":60.1,",
    "\"ttl_s\":-1,",
    "\"scope\":\"eval\",",
    "\"mode\":\"abort\",",
    "\"reason\":\"terminal\",",
    "\"local_bypasses\":{\"a\":1},",
    "\"op\":\"acquire\",",
    "\"op\":\"close\",",
    "\"operations\":[",
    "\"ticket_ids\":[\"a\"],",
    "\"headroom\":0.5,",
    "\"max_wait_s\":null,",
];

fn config() -> HttpConfig {
    HttpConfig {
        bound: Vec::new(),
        allowed_hosts: Vec::new(),
        access: Access::open(),
        metrics_auth: false,
        default_ttl: Span::from_secs(600),
        origins: Origins::default(),
        configured: Vec::new(),
        stuck_after: STUCK_AFTER,
    }
}

/// A refusal is the caller's fault, says so and is short.
fn is_short(fault: &Fault) {
    let refusals = [
        StatusCode::BAD_REQUEST,
        StatusCode::UNPROCESSABLE_ENTITY,
        StatusCode::NOT_FOUND,
    ];
    assert!(refusals.contains(&fault.status()), "{fault:?}");
    assert!(format!("{fault:?}").len() <= FAULT_LETTERS_MAX, "{fault:?}");
}

/// What was read, written and read again. The JSON reader takes the last bit of a fraction as it comes.
fn is_the_same<T: Serialize>(one: &T, other: &T) {
    fn same(one: &Value, other: &Value) -> bool {
        match (one, other) {
            (Value::Object(one), Value::Object(other)) => {
                let pairs = one.iter().zip(other);
                one.len() == other.len() && { pairs }
                    .all(|((key, one), (its, other))| key == its && same(one, other))
            }
            (Value::Number(one), Value::Number(other)) if one.is_f64() && other.is_f64() => {
                let [one, other] = [one, other].map(|number| number.as_f64().unwrap());
                (one - other).abs() <= one.abs() * 1e-14
            }
            (one, other) => one == other,
        }
    }
    let [one, other] = [one, other].map(|body| serde_json::to_value(body).unwrap());
    assert!(same(&one, &other), "{one} and {other}");
}

/// The body, when it is one; it is written as one that is read the same.
fn read<T: DeserializeOwned + Serialize>(body: &[u8]) -> Option<T> {
    match parse::<T>(body) {
        Ok(request) => {
            let written = serde_json::to_vec(&request).unwrap();
            is_the_same(&parse::<T>(&written).unwrap(), &request);
            Some(request)
        }
        Err(fault) => {
            is_short(&fault);
            None
        }
    }
}

/// TOK1, TOK2, ID1, LEA1.
#[test]
fn bodies() {
    let bodies = [
        "a{\"ticket_id\":\"t\",\"session_id\":\"s\",\"prompt_tokens\":30,\"max_new_tokens\":12,\"scope\":\"eval\",\"wait_s\":0,\"ttl_s\":60}",
        "a{\"ticket_id\":\"会话\",\"session_id\":\"a/b%2F\",\"reservation_tokens\":5,\"protected\":true,\"request_id\":\"r\",\"client\":\"c\",\"local_bypasses\":{\"unreachable\":3}}",
        "b{\"prompt_tokens\":1,\"completion_tokens\":2,\"cached_tokens\":0,\"engine\":\"http://a:1\"}",
        "c{\"ttl_s\":0.5}",
        "d{\"ticket_ids\":[\"a\",\"b\"],\"wait_s\":60}",
        "e{\"mode\":\"abort\",\"reason\":\"dropped\"}",
        "f{\"headroom\":0.9,\"paused\":true,\"max_wait_s\":null,\"expected_decode_cap\":\"none\",\"scope\":\"all\"}",
        "g{\"step\":7,\"run\":\"r\"}",
    ];
    let long_name = format!("c{{\"{}\":1}}", "x".repeat(2 * FAULT_LETTERS_MAX));
    let config = config();
    let inputs = Inputs::of(bodies).and([long_name]).with_words(WORDS);
    fuzz!(inputs, |bytes: &[u8]| {
        let (kind, body) = bytes.split_first().unwrap_or((&0, &[]));
        match kind % 7 {
            // 'a' is 97, which is 6 modulo 7.
            6 => {
                if let Some(request) = read::<AcquireRequest>(body) {
                    acquire_keeps_its_bounds(&request, &config);
                }
            }
            0 => {
                if let Some(request) = read::<ReleaseRequest>(body)
                    && let Err(fault) = convert::check_usage(&request)
                {
                    is_short(&fault);
                }
            }
            1 => {
                if let Some(RenewRequest {
                    ttl_s: Some(seconds),
                }) = read(body)
                {
                    let (ttl, _) = convert::ttl(seconds);
                    assert_eq!(ttl_in_range(ttl), (ttl, false));
                }
            }
            2 => {
                if let Some(request) = read::<WaitRequest>(body) {
                    match convert::wait(request.wait_s) {
                        Ok(wait) => assert!(wait.as_secs_f64() <= 60.0),
                        Err(fault) => is_short(&fault),
                    }
                }
            }
            3 => drop(read::<CloseRequest>(body)),
            4 => {
                if let Some(request) = read::<SettingsChange>(body)
                    && let Err(fault) = settings::change_of(&request)
                {
                    is_short(&fault);
                }
            }
            _ => drop(read::<StepRequest>(body)),
        }
    });
}

fn acquire_keeps_its_bounds(request: &AcquireRequest, config: &HttpConfig) {
    match convert::asked(request, config) {
        Ok(asked) => {
            assert_eq!(asked.acquire.ticket.as_str(), request.ticket_id);
            assert_eq!(asked.acquire.session.as_str(), request.session_id);
            assert!(asked.wait.as_secs_f64() <= 60.0);
            assert_eq!(ttl_in_range(asked.acquire.ttl), (asked.acquire.ttl, false));
            assert!(
                asked
                    .local_bypasses
                    .iter()
                    .all(|(_, count)| *count <= TOKENS_MAX)
            );
        }
        Err(fault) => is_short(&fault),
    }
}

/// An operation that cannot be read spoils no other, and has a problem of its own.
#[test]
fn batches() {
    let batches = [
        "{\"operations\":[{\"op\":\"acquire\",\"ticket_id\":\"t\",\"session_id\":\"s\",\"reservation_tokens\":5},{\"op\":\"renew\",\"lease_id\":\"1-00000000000000ff\",\"ttl_s\":9}]}",
        "{\"operations\":[{\"op\":\"release\",\"lease_id\":\"1-00000000000000ff\",\"engine\":\"e\"},{\"op\":\"cancel\",\"ticket_id\":\"t\"},{\"op\":\"close\",\"session_id\":\"s\",\"mode\":\"join\"}]}",
        "{\"operations\":[]}",
        "{\"operations\":[1,null,\"a\",[],{}]}",
    ];
    let config = config();
    fuzz!(Inputs::of(batches).with_words(WORDS), |body: &[u8]| {
        let operations: Vec<&RawValue> = match batch::operations(body) {
            Ok(operations) => operations,
            Err(fault) => return is_short(&fault),
        };
        assert!(operations.len() <= 1_000);
        for operation in operations {
            let read = match batch::read(operation.get()) {
                Ok(read) => read,
                Err(fault) => {
                    is_short(&fault);
                    continue;
                }
            };
            let written = serde_json::to_string(&read).unwrap();
            is_the_same(&batch::read(&written).unwrap(), &read);
            // The word is read first, and then the fields: what is taken so is what a tagged choice takes.
            is_the_same(&serde_json::from_str(operation.get()).unwrap(), &read);
            if let BatchOperation::Acquire(request) = &read {
                acquire_keeps_its_bounds(request, &config);
            }
        }
        // Operations are bodies too, without the word that says which.
        drop(read::<ReleaseOperation>(body));
        drop(read::<RenewOperation>(body));
        drop(read::<CancelOperation>(body));
        drop(read::<CloseOperation>(body));
    });
}

/// ID1, ID2: an id that is taken is the text that was sent, byte by byte, wherever it stood.
#[test]
fn ids() {
    let ids = [
        "1-00000000000000ff",
        "18446744073709551615-ffffffffffffffff",
        "01-00000000000000ff",
        "1-0000000000000FF",
        "1-ff",
        "task/42/try 1",
        "a%2Fb",
        "a/b",
        "../../etc",
        "会话-七",
        "x y+z&q=1?#frag",
        "\u{202e}abc",
        "{\"k\":1}",
        "%00",
        ".",
        "..",
        "",
    ];
    let long = ["é".repeat(256), "é".repeat(257)];
    let words = [
        "%", "%2F", "%252F", "%00", "%7f", "%C2%85", "/", ".", "-", "+", "0", "é", "\u{85}",
        "\u{feff}", "#", "?", "\0", "\n",
    ];
    fuzz!(
        Inputs::of(ids).and(long).with_words(words),
        |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes);
            assert!(LeaseId::parse(&text).is_none_or(|id| id.to_text() == *text));
            assert!(CloseId::parse(&text).is_none_or(|id| id.to_text() == *text));
            let ticket = TicketId::new(&text);
            if let Ok(id) = &ticket {
                assert_eq!(id.as_str(), &*text);
                assert!((1..=ID_BYTES_MAX).contains(&text.len()));
                assert!(!text.contains(char::is_control));
            }
            assert_eq!(SessionId::new(&text).is_ok(), ticket.is_ok());
            assert_eq!(Label::new(&text).is_ok(), ticket.is_ok());
            assert_eq!(RunId::new(&text).is_ok(), ticket.is_ok() || text.is_empty());

            // In a path it is decoded exactly once, and stays in its part of the path. Longer ones are no request line.
            if text.len() > 8 << 10 {
                return;
            }
            let encoded = utf8_percent_encode(&text, NON_ALPHANUMERIC);
            let path = format!("/v1/tickets/{encoded}/cancel");
            let (mut parts, ()) = Request::get(path).body(()).unwrap().into_parts();
            let found = TicketPath::from_request_parts(&mut parts, &())
                .now_or_never()
                .unwrap();
            match (found, ticket) {
                (Ok(TicketPath(found)), Ok(ticket)) => assert_eq!(found, ticket),
                (Err(fault), Err(_)) => is_short(&fault),
                (found, ticket) => panic!("{:?} and {ticket:?}", found.map(|path| path.0)),
            }
            // As it is, it may be no path at all.
            if let Ok(request) = Request::get(format!("/v1/sessions/{text}")).body(()) {
                let (mut parts, ()) = request.into_parts();
                match SessionPath::from_request_parts(&mut parts, &())
                    .now_or_never()
                    .unwrap()
                {
                    Ok(SessionPath(session)) => {
                        let part = parts.uri.path().split('/').nth(3).unwrap();
                        assert_eq!(percent_decoded(part).as_deref(), Some(session.as_str()));
                    }
                    Err(fault) => is_short(&fault),
                }
            }
        }
    );
}

/// Cursors and parameters.
#[test]
fn queries() {
    let queries = [
        "limit=1&cursor=c1z141z3",
        "limit=1000",
        "limit=1001",
        "cursor=c3w5e11264sgsf",
        "cursor=c3w5e11264sgsg",
        "session=a%2Fb&limit=5",
        "a=1&a=2",
        "&&=&=a&b",
        "cursor=c-1",
        "cursor=c+1",
        "limit=%31",
    ];
    let words = [
        "&", "=", "%", "%26", "%3D", "+", "limit=", "cursor=c", "cursor=", "c", "-", "%ff",
        "%C3%A9",
    ];
    fuzz!(Inputs::of(queries).with_words(words), |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        assert!(query_pairs(&text).count() <= text.matches('&').count() + 1);
        let Ok(request) = Request::get(format!("/v1/queue?{text}")).body(()) else {
            return;
        };
        let (mut parts, ()) = request.into_parts();
        let query = Query::from_request_parts(&mut parts, &())
            .now_or_never()
            .unwrap();
        let paging = query.and_then(|mut query| {
            let paging = Paging::read(&mut query)?;
            query.done().map(|()| paging)
        });
        match paging {
            Ok(paging) => {
                assert!((1..=1_000).contains(&paging.limit));
                if let Some(from) = paging.from {
                    let next = Request::get(format!("/v1/queue?cursor={}", cursor(from)))
                        .body(())
                        .unwrap();
                    let (mut parts, ()) = next.into_parts();
                    let mut query = Query::from_request_parts(&mut parts, &())
                        .now_or_never()
                        .unwrap()
                        .unwrap();
                    assert_eq!(Paging::read(&mut query).unwrap().from, Some(from));
                }
            }
            Err(fault) => is_short(&fault),
        }
    });
}
