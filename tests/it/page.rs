//! The overview as it is served.

use kvgate_core::policy::Policy;
use serde_json::json;

use crate::support::app::{Builder, TestApp};

async fn with_closes() -> TestApp {
    let Builder { policy, .. } = Builder::default();
    let policy = Policy {
        session_lifecycle: true,
        ..policy
    };
    Builder {
        policy,
        ..Builder::default()
    }
    .start()
    .await
}

/// CLO7: the page tells how far closes are and what engines answered, and claims no freed tokens.
#[tokio::test]
async fn clo7_the_page_shows_closes() {
    let app = with_closes().await;
    let lease = app.acquire("t", 100).await;
    app.post("/v1/sessions/s/close", &json!({})).await;
    let page = app.get("/").await;
    assert_eq!(page.status, 200);
    assert!(page.text.contains("joining its leases"), "{}", page.text);
    assert!(page.text.contains("1 pending"), "{}", page.text);
    let lease = lease["lease_id"].as_str().unwrap();
    app.delete(&format!("/v1/leases/{lease}")).await;
    let page = app.get("/").await;
    assert!(page.text.contains("<td>delivering</td>"), "{}", page.text);
    assert!(!page.text.contains("freed tokens"));
}

/// Ids are data: markup in them is shown as text, and the page allows no script.
#[tokio::test]
async fn markup_in_session_ids_is_text() {
    let app = with_closes().await;
    app.post(
        "/v1/sessions/%3Cimg%20src=x%20onerror=alert(1)%3E/close",
        &json!({}),
    )
    .await;
    let page = app.get("/").await;
    assert!(!page.text.contains("<img src=x"));
    assert!(page.text.contains("img src=x onerror=alert(1)"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
}

/// What clients decided by themselves is on the page once they reported it.
#[tokio::test]
async fn the_page_shows_what_clients_decided_by_themselves() {
    let app = TestApp::start().await;
    let page = app.get("/").await;
    assert!(!page.text.contains("by clients"));
    let body = json!({
        "ticket_id": "t", "session_id": "s", "reservation_tokens": 1, "wait_s": 0,
        "local_bypasses": {"unreachable": 3, "breaker": 4},
    });
    app.post("/v1/leases", &body).await;
    app.until(|view| view.tally.local_bypasses.iter().sum::<u64>() == 7)
        .await;
    let page = app.get("/").await;
    assert!(page.text.contains("7 by clients without the gate"));
}

/// Without the feature the page says nothing of closes.
#[tokio::test]
async fn the_page_is_silent_about_a_feature_that_is_off() {
    let app = TestApp::start().await;
    let page = app.get("/").await;
    assert!(!page.text.contains("Session closes"));
}
