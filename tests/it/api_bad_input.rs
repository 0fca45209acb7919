//! Bad input is refused with a problem, and changes nothing.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::app::TestApp;

fn with(fields: &Value) -> Value {
    let mut body = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1});
    let object = body.as_object_mut().unwrap();
    for (name, value) in fields.as_object().unwrap() {
        match value {
            Value::Null => object.remove(name),
            value => object.insert(name.clone(), value.clone()),
        };
    }
    body
}

/// TOK2, TIC2: fields that are wrong are 422 with their place, and nothing changes.
#[tokio::test]
async fn tok2_wrong_fields_are_named() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let long_name = "a".repeat(33);
    let many: Value = (0..17)
        .map(|number| ("a".repeat(number + 1), json!(1)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let cases = [
        (json!({"reservation_tokens": -1}), "/reservation_tokens"),
        (json!({"reservation_tokens": 1.5}), "/reservation_tokens"),
        (json!({"reservation_tokens": 1.0}), "/reservation_tokens"),
        (json!({"reservation_tokens": "1"}), "/reservation_tokens"),
        (json!({"reservation_tokens": true}), "/reservation_tokens"),
        (json!({"reservation_tokens": [1]}), "/reservation_tokens"),
        (
            json!({"reservation_tokens": 9_007_199_254_740_992_u64}),
            "/reservation_tokens",
        ),
        (
            json!({"reservation_tokens": u64::MAX}),
            "/reservation_tokens",
        ),
        (json!({"reservation_tokens": null}), "/reservation_tokens"),
        (json!({"prompt_tokens": 1}), "/reservation_tokens"),
        (
            json!({"prompt_tokens": 1, "max_new_tokens": 1}),
            "/reservation_tokens",
        ),
        (
            json!({"reservation_tokens": null, "prompt_tokens": 1}),
            "/max_new_tokens",
        ),
        (
            json!({"reservation_tokens": null, "max_new_tokens": 1}),
            "/prompt_tokens",
        ),
        (
            json!({"reservation_tokens": null, "prompt_tokens": 9_007_199_254_740_991_u64, "max_new_tokens": 1}),
            "/max_new_tokens",
        ),
        (json!({"wait_s": -0.1}), "/wait_s"),
        (json!({"wait_s": 60.1}), "/wait_s"),
        (json!({"wait_s": "25"}), "/wait_s"),
        (json!({"ttl_s": "600"}), "/ttl_s"),
        (json!({"scope": "Train"}), "/scope"),
        (json!({"scope": 1}), "/scope"),
        (json!({"protected": "yes"}), "/protected"),
        (json!({"client": 7}), "/client"),
        (json!({"ticket_id": null}), "/ticket_id"),
        (json!({"ticket_id": 7}), "/ticket_id"),
        (json!({"session_id": null}), "/session_id"),
        (json!({"prioritiy": 1}), "/prioritiy"),
        (
            json!({"local_bypasses": {"Unreachable": 1}}),
            "/local_bypasses",
        ),
        (json!({"local_bypasses": {"": 1}}), "/local_bypasses"),
        (
            json!({"local_bypasses": {(long_name): 1}}),
            "/local_bypasses",
        ),
        (json!({"local_bypasses": many}), "/local_bypasses"),
        (
            json!({"local_bypasses": {"refused": -1}}),
            "/local_bypasses/refused",
        ),
        (
            json!({"local_bypasses": {"refused": 9_007_199_254_740_992_u64}}),
            "/local_bypasses/refused",
        ),
        (json!({"local_bypasses": [1]}), "/local_bypasses"),
    ];
    for (fields, pointer) in cases {
        let answer = app.post("/v1/leases", &with(&fields)).await;
        let problem = answer.is_problem(422, "invalid_request");
        assert_eq!(
            problem["errors"][0]["pointer"], pointer,
            "{fields} {problem}"
        );
        assert!(!problem["errors"][0]["detail"].as_str().unwrap().is_empty());
        assert_eq!(answer.seq(), None);
    }
    assert_eq!(app.picture().await, before);
}

/// ID1: an id that breaks a rule is 400, and the answer names the rule and the field.
#[tokio::test]
async fn id1_bad_ids_are_named() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let long = "é".repeat(257);
    let bad = [
        ("", "at least 1 byte"),
        (long.as_str(), "at most 512 bytes"),
        (".", "must not be"),
        ("..", "must not be"),
        ("a\nb", "control characters"),
        ("\u{0}", "control characters"),
        ("a\u{85}", "control characters"),
        ("\u{7f}", "control characters"),
    ];
    for (id, rule) in bad {
        for field in ["ticket_id", "session_id", "client", "request_id"] {
            let answer = app.post("/v1/leases", &with(&json!({field: id}))).await;
            let problem = answer.is_problem(400, "invalid_id");
            assert!(
                problem["detail"].as_str().unwrap().contains(rule),
                "{problem}"
            );
            assert_eq!(problem["errors"][0]["pointer"], format!("/{field}"));
        }
        let wait = app
            .post("/v1/wait", &json!({"ticket_ids": ["good", id]}))
            .await;
        assert_eq!(
            wait.is_problem(400, "invalid_id")["errors"][0]["pointer"],
            "/ticket_ids/1"
        );
    }
    for path in [
        "/v1/tickets/%2e",
        "/v1/tickets/%2e%2e",
        "/v1/tickets/%00",
        "/v1/tickets/%zz",
        "/v1/tickets/%",
        "/v1/tickets/%ff",
    ] {
        // A client would rewrite such a path, so it is sent as it is.
        for method in ["GET", "DELETE"] {
            let request =
                format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            app.raw(request.as_bytes())
                .await
                .is_problem(400, "invalid_id");
        }
    }
    assert_eq!(app.picture().await, before);
}

/// TOK2: texts that are no JSON are 400; JSON with numbers out of range or keys that stand twice is 422.
#[tokio::test]
async fn unreadable_bodies_are_told_from_wrong_ones() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let deep = "[".repeat(10_000);
    let cases: &[(&[u8], u16, &str)] = &[
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"{\"ticket_id\": \"t\"", 400, "invalid_json"),
        (b"{'ticket_id': 't'}", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"{\"ticket_id\": \"\xff\", \"session_id\": \"s\", \"reservation_tokens\": 1}", 400, "invalid_json"),
        (b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": NaN}", 400, "invalid_json"),
        (b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 1} x", 400, "invalid_json"),
        (b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 1}{}", 400, "invalid_json"),
        (b"{\"ticket_id\": \"\\ud800\", \"session_id\": \"s\", \"reservation_tokens\": 1}", 400, "invalid_json"),
        (deep.as_bytes(), 400, "invalid_json"),
        (b"[]", 422, "invalid_request"),
        (b" [\"t\", \"s\", 1, 1]", 422, "invalid_request"),
        (b"null", 422, "invalid_request"),
        (b"\"t\"", 422, "invalid_request"),
        (b"{}", 422, "invalid_request"),
        (b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 1e400}", 422, "invalid_request"),
        (b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 1, \"wait_s\": 1e400}", 422, "invalid_request"),
        (b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 99999999999999999999999}", 422, "invalid_request"),
        (b"{\"ticket_id\": \"t\", \"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 1}", 422, "invalid_request"),
        (
            b"{\"ticket_id\": \"t\", \"session_id\": \"s\", \"reservation_tokens\": 1, \"local_bypasses\": {\"a\": 1, \"a\": 2}}",
            422,
            "invalid_request",
        ),
    ];
    for (body, status, code) in cases {
        let answer = app.post_text("/v1/leases", body.to_vec()).await;
        let problem = answer.is_problem(*status, code);
        assert_eq!(*status == 422, problem.get("errors").is_some(), "{problem}");
    }
    let batch: &[(&[u8], u16, &str)] = &[
        (b"", 400, "invalid_json"),
        (b"{\"operations\": [{]}", 400, "invalid_json"),
        (b"{\"operations\": {}}", 422, "invalid_request"),
        (
            b"{\"operations\": [], \"operations\": []}",
            422,
            "invalid_request",
        ),
        (b"{\"operations\": [], \"mode\": 1}", 422, "invalid_request"),
        (b"{}", 422, "invalid_request"),
    ];
    for (body, status, code) in batch {
        app.post_text("/v1/batch", body.to_vec())
            .await
            .is_problem(*status, code);
    }
    let inside = b"{\"operations\": [{\"op\": \"cancel\", \"ticket_id\": \"t\", \"ticket_id\": \"u\"},
                                     {\"op\": \"renew\", \"lease_id\": \"x\", \"ttl_s\": 1e400},
                                     {\"op\": \"cancel\", \"op\": \"cancel\", \"ticket_id\": \"t\"}]}";
    let results = app.post_text("/v1/batch", inside.to_vec()).await.json();
    for result in results["results"].as_array().unwrap() {
        assert_eq!(result["status"], 422, "{result}");
    }
    assert_eq!(app.picture().await, before);
}

/// Content types, compressed bodies and sizes.
#[tokio::test]
async fn bodies_must_be_plain_json_of_a_bounded_size() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let good = with(&json!({})).to_string();
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "multipart/form-data; boundary=x",
    ] {
        let request = app
            .client
            .post(app.url("/v1/leases"))
            .header("content-type", kind)
            .body(good.clone());
        app.send(request)
            .await
            .is_problem(415, "unsupported_media_type");
    }
    let none = app.client.post(app.url("/v1/leases")).body(good.clone());
    app.send(none)
        .await
        .is_problem(415, "unsupported_media_type");
    let form = app
        .client
        .post(app.url("/v1/leases/1-0000000000000000/release"))
        .header("content-type", "text/plain")
        .body("{}");
    app.send(form)
        .await
        .is_problem(415, "unsupported_media_type");
    let zipped = app
        .client
        .post(app.url("/v1/leases"))
        .header("content-type", "application/json")
        .header("content-encoding", "gzip")
        .body(good.clone());
    app.send(zipped)
        .await
        .is_problem(415, "unsupported_media_type");
    let space = |bytes: usize| " ".repeat(bytes);
    let mut large = good.clone() + &space((1 << 20) + 1 - good.len());
    app.post_text("/v1/leases", large.clone())
        .await
        .is_problem(413, "body_too_large");
    app.post_text("/v1/wait", space(3 << 20))
        .await
        .is_problem(413, "body_too_large");
    app.post_text("/v1/batch", space((4 << 20) + 1))
        .await
        .is_problem(413, "body_too_large");
    // Chunked, so that no length announces it.
    let chunks = (0..40).map(move |_| Ok::<_, std::io::Error>(space(100_000)));
    let stream = reqwest::Body::wrap_stream(futures_util::stream::iter(chunks));
    app.post_text("/v1/leases", stream)
        .await
        .is_problem(413, "body_too_large");
    assert_eq!(app.picture().await, before);
    large.pop();
    let request = app
        .client
        .post(app.url("/v1/leases"))
        .header("content-type", "Application/JSON; charset=utf-8")
        .body(large);
    assert_eq!(
        app.send(request).await.status,
        200,
        "a body of the bound is read"
    );
    let operations = format!("{{\"operations\": []}}{}", space(2 << 20));
    assert_eq!(app.post_text("/v1/batch", operations).await.status, 200);
}

/// Lists, waits, batches and releases have bounds and known parameters only.
#[tokio::test]
async fn parameters_and_bounds_are_checked() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let cases = [
        ("/v1/leases?limit=0", "?limit"),
        ("/v1/leases?limit=1001", "?limit"),
        ("/v1/queue?limit=-1", "?limit"),
        ("/v1/queue?limit=many", "?limit"),
        ("/v1/queue?limit=", "?limit"),
        ("/v1/epochs?limit=0", "?limit"),
        ("/v1/leases?cursor=x", "?cursor"),
        ("/v1/epochs?cursor=", "?cursor"),
        ("/v1/queue?scope=both", "?scope"),
        ("/v1/leases?session=s", "?session"),
        ("/v1/leases?q=a&q=b", "?q"),
        ("/v1/state?verbose=1", "?verbose"),
        ("/v1/engines?x", "?x"),
        ("/v1/tickets/t?wait_s=1", "?wait_s"),
        ("/v1/leases/1-0000000000000000?x=1", "?x"),
    ];
    for (path, pointer) in cases {
        let problem = app.get(path).await.is_problem(422, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{path}");
    }
    app.get("/v1/leases?q=%zz")
        .await
        .is_problem(400, "invalid_request");
    let many: Vec<String> = (0..1_001).map(|number| number.to_string()).collect();
    let operations: Vec<Value> = many
        .iter()
        .map(|id| json!({"op": "cancel", "ticket_id": id}))
        .collect();
    let posts = [
        ("/v1/wait", json!({"ticket_ids": []}), "/ticket_ids"),
        ("/v1/wait", json!({"ticket_ids": many}), "/ticket_ids"),
        (
            "/v1/wait",
            json!({"ticket_ids": ["t"], "wait_s": 61}),
            "/wait_s",
        ),
        ("/v1/wait", json!({"ticket_ids": ["t", 7]}), "/ticket_ids/1"),
        ("/v1/wait", json!({"ticket_ids": ["t"], "wait": 1}), "/wait"),
        ("/v1/wait", json!({}), "/ticket_ids"),
        (
            "/v1/batch",
            json!({"operations": operations}),
            "/operations",
        ),
        (
            "/v1/leases/1-0000000000000000/release",
            json!({"prompt_tokens": -1}),
            "/prompt_tokens",
        ),
        (
            "/v1/leases/1-0000000000000000/release",
            json!({"cached_tokens": 9_007_199_254_740_992_u64}),
            "/cached_tokens",
        ),
        (
            "/v1/leases/1-0000000000000000/release",
            json!({"engine": ""}),
            "/engine",
        ),
        (
            "/v1/leases/1-0000000000000000/release",
            json!({"tokens": 1}),
            "/tokens",
        ),
        (
            "/v1/leases/1-0000000000000000/renew",
            json!({"ttl_s": []}),
            "/ttl_s",
        ),
    ];
    for (path, body, pointer) in posts {
        let problem = app
            .post(path, &body)
            .await
            .is_problem(422, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{path}");
    }
    assert_eq!(app.picture().await, before);
}

/// What is not served is a problem too: addresses, methods, and calls of later versions.
#[tokio::test]
async fn what_is_not_served_is_a_problem() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    for path in [
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/v1/leases/",
        "/v1/tickets/",
        "/v1/tickets/a/b",
        "/v1/sessions/",
        "/v1/sessions/a/b",
        "/v1/closes/",
        "/v1/settings/headroom",
        "/v1/audit/1",
        "/v1/steps/7",
        "/nothing",
        "//v1/state",
        "/v1/state/",
        "/V1/state",
    ] {
        app.get(path).await.is_problem(404, "not_found");
    }
    app.post("/v1/sessions/a/b/close", &json!({}))
        .await
        .is_problem(404, "not_found");
    let wrong = app.delete("/v1/state").await;
    wrong.is_problem(405, "method_not_allowed");
    assert_eq!(wrong.header("allow"), Some("GET,HEAD"));
    for method in ["OPTIONS", "PUT", "PATCH", "TRACE", "BREW"] {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let request = app.client.request(method, app.url("/v1/leases"));
        app.send(request)
            .await
            .is_problem(405, "method_not_allowed");
    }
    let head = app.send(app.client.head(app.url("/v1/state"))).await;
    assert_eq!((head.status, head.text.as_str()), (200, ""));
    assert_eq!(app.picture().await, before);
}

/// Requests that are no HTTP, or whose head is too large, get a problem as well.
#[tokio::test]
async fn unreadable_requests_get_a_problem() {
    let app = TestApp::start().await;
    let long = "a".repeat(40_000);
    let cases = [
        ("nonsense\r\n\r\n".to_owned(), 400),
        ("GET /v1/state HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n".to_owned(), 400),
        (format!("GET /v1/state HTTP/1.1\r\nHost: localhost\r\nX-Pad: {long}\r\n\r\n"), 431),
        ("GET /v1/state HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(), 400),
        ("GET /v1/state HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_owned(), 400),
        ("GET /v1/state HTTP/1.1\r\nHost: a b\r\nConnection: close\r\n\r\n".to_owned(), 400),
    ];
    for (request, status) in cases {
        let answer = app.raw(request.as_bytes()).await;
        answer.is_problem(status, "invalid_request");
        assert_eq!(answer.header("kvgate-epoch"), Some("1"));
    }
    let old = app.raw(b"GET /v1/state HTTP/1.0\r\n\r\n").await;
    assert_eq!(old.status, 200, "HTTP/1.0 knows no Host header");
}

/// S04, ID1: ids with slashes, percent signs and any script are decoded exactly once and stay apart.
#[tokio::test]
async fn id1_ids_in_paths_are_decoded_once() {
    let app = TestApp::start().await;
    let ids = [
        "task/42/try 1",
        "a%2Fb",
        "a/b",
        "../../etc",
        "会话-七",
        "naïve",
        "x y+z&q=1?#frag",
        "\u{202e}abc",
        "'; DROP",
        "{\"k\":1}",
        "%00",
        "release",
        "a/release",
        "/",
        "%",
        "%25",
        "...",
        " ",
        "~",
    ];
    let encoded = |id: &str| {
        percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC).to_string()
    };
    let mut leases = BTreeSet::new();
    for id in ids {
        let body =
            json!({"ticket_id": id, "session_id": id, "reservation_tokens": 1, "client": id});
        let admit = app.post("/v1/leases", &body).await.json();
        assert_eq!(admit["ticket_id"], id);
        assert_eq!(admit["session_id"], id);
        assert!(
            leases.insert(admit["lease_id"].as_str().unwrap().to_owned()),
            "{id} fell together with another"
        );
    }
    for id in ids {
        let read = app.get(&format!("/v1/tickets/{}", encoded(id))).await;
        assert_eq!(
            (read.status, &read.json()["ticket_id"]),
            (200, &json!(id)),
            "{id}"
        );
        let list = app
            .get(&format!("/v1/leases?session_id={}", encoded(id)))
            .await
            .json();
        assert_eq!(
            (&list["total"], &list["items"][0]["ticket_id"]),
            (&json!(1), &json!(id))
        );
    }
    for id in ids {
        let cancel = app.delete(&format!("/v1/tickets/{}", encoded(id))).await;
        assert_eq!(cancel.json()["outcome"], "released", "{id}");
    }
    assert_eq!(app.gate.view().leases, 0);
    app.get("/v1/tickets/a%2fb%2Frelease")
        .await
        .is_problem(404, "ticket_not_found");
}
