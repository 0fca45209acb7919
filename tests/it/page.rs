//! The overview as it is served.

use std::collections::BTreeMap;

use kvgate::http::ShellNotice;
use kvgate_api::Severity;
use kvgate_core::policy::Policy;
use kvgate_core::units::{Ppm, Timestamp};
use serde_json::{Value, json};

use crate::support::app::{Builder, SOON, TestApp};
use crate::support::store::{Mood, Switch};

async fn with_policy(change: impl FnOnce(Policy) -> Policy) -> TestApp {
    let builder = Builder::default();
    let policy = change(builder.policy.clone());
    Builder { policy, ..builder }.start().await
}

async fn with_closes() -> TestApp {
    with_policy(|policy| Policy {
        session_lifecycle: true,
        ..policy
    })
    .await
}

/// The page at an address of its own: an address that was asked for a moment ago is answered with what
/// was rendered then.
async fn page(app: &TestApp, range: &str) -> String {
    let page = app.get(&format!("/?range={range}")).await;
    assert_eq!(page.status, 200, "{}", page.text);
    page.text
}

/// One region of a page.
fn part<'a>(page: &'a str, id: &str) -> &'a str {
    let from = page.find(&format!("id=\"{id}\"")).expect(id);
    let rest = &page[from..];
    let to = rest.find("</section>").unwrap_or(rest.len());
    &rest[..to]
}

/// The figures that say which figure of the state they are.
fn figures(page: &str) -> BTreeMap<String, String> {
    let marks = page.split("data-fig=\"").skip(1);
    marks
        .map(|mark| {
            let (name, rest) = mark.split_once("\">").unwrap();
            let (figure, _) = rest.split_once('<').unwrap();
            (name.to_owned(), figure.replace(',', ""))
        })
        .collect()
}

/// Every figure that names its place in the state is the one that stands there.
async fn figures_are_those_of_the_state(app: &TestApp, page: &str) {
    let state = app.get("/v1/state").await.json();
    let figures = figures(page);
    assert!(figures.len() >= 6, "{figures:?}");
    for (name, figure) in figures {
        let path = format!("/{}", name.replace('.', "/"));
        assert_eq!(state.pointer(&path).unwrap().to_string(), figure, "{name}");
    }
}

/// DEC4: what is reserved and what is available make the ceiling; an overdraft is told as such.
#[tokio::test]
async fn dec4_the_budget_adds_up() {
    let app = with_closes().await;
    app.acquire("t", 600).await;
    let first = page(&app, "15m").await;
    figures_are_those_of_the_state(&app, &first).await;
    let budget = part(&first, "p-budget");
    for figure in [">600<", ">400<", ">1,000<", "60.0 %", "40.0 %", "× 1.00"] {
        assert!(budget.contains(figure), "{figure} in {budget}");
    }
    assert!(!budget.contains("data-overdraft"));

    app.feed(&[("http://engine-1:30000", 450)]).await;
    app.until(|view| view.measure.ceiling.get() == 450).await;
    let page = page(&app, "1h").await;
    figures_are_those_of_the_state(&app, &page).await;
    let budget = part(&page, "p-budget");
    assert!(
        budget.contains("<span data-overdraft>150</span>"),
        "{budget}"
    );
    assert!(part(&page, "p-checks").contains("150 more than the ceiling"));
}

/// The first in line says what it needs and who holds it, those behind it that they stand behind it;
/// every row leads to its ticket and its session.
#[tokio::test]
async fn the_queue_says_why_it_waits() {
    let app = TestApp::start().await;
    app.acquire("a", 900).await;
    app.acquire("b/&\"c", 300).await;
    app.acquire("d", 50).await;
    let page = page(&app, "15m").await;
    figures_are_those_of_the_state(&app, &page).await;
    let queue = part(&page, "p-queue");
    for text in [
        "It needs 300 tokens and 100 are available: 200 must be given back first.",
        "Held by <a href=\"session?id=s\" title=\"s\">s</a> 100.0 %",
        "200 short",
        "behind #1",
        "href=\"ticket?id=b%2F%26%22c\"",
        "href=\"confirm?do=cancel&amp;ticket=b%2F%26%22c\"",
        "All shown",
    ] {
        assert!(queue.contains(text), "{text} in {queue}");
    }
    assert!(!queue.contains("b/&\"c"), "escaped");
}

/// Under pressure the engine and its use are named.
#[tokio::test]
async fn cap5_pressure_names_the_engine() {
    let app = with_policy(|policy| Policy {
        pressure_threshold: Ppm::clamped(500_000),
        ..policy
    })
    .await;
    app.feed_usage("http://engine-1:30000", 1_000, 930_000)
        .await;
    app.acquire("a", 10).await;
    let page = page(&app, "15m").await;
    let queue = part(&page, "p-queue");
    assert!(queue.contains("engine-1:30000 at 93.0 %"), "{queue}");
    assert!(queue.contains("new work waits from 50.0 %"));
    let engines = part(&page, "p-engines");
    assert!(
        engines.contains("93.0 % locked, 0.0 % cached, 7.0 % free"),
        "{engines}"
    );
}

/// CLO7: the page tells how far closes are and what engines answered, and claims no freed tokens.
#[tokio::test]
async fn clo7_the_page_shows_closes() {
    let app = with_closes().await;
    let lease = app.acquire("t", 100).await;
    app.post("/v1/sessions/s/close", &json!({})).await;
    let first = page(&app, "15m").await;
    let closes = part(&first, "p-closes");
    assert!(closes.contains(">joining<"), "{closes}");
    assert!(closes.contains("waits for its leases to end"), "{closes}");
    let lease = lease["lease_id"].as_str().unwrap();
    app.delete(&format!("/v1/leases/{lease}")).await;
    let page = page(&app, "1h").await;
    let closes = part(&page, "p-closes");
    assert!(closes.contains(">delivering<"), "{closes}");
    assert!(closes.contains("aria-label=\"1 pending\""), "{closes}");
    assert!(closes.contains("0 of 1"), "{closes}");
    assert!(!page.contains("freed tokens"));
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

/// What clients decided by themselves is a check of its own once they reported it.
#[tokio::test]
async fn the_page_shows_what_clients_decided_by_themselves() {
    let app = TestApp::start().await;
    let sampler = app.history.sample(app.gate.clone()).unwrap();
    let sampled = async {
        loop {
            let history = app.get("/v1/history?series=reserved&range=60").await.json();
            let points = history["series"]["reserved"]["mean"].as_array().unwrap();
            if points.iter().any(Value::is_number) {
                break;
            }
        }
    };
    tokio::time::timeout(SOON, sampled).await.unwrap();
    let first = page(&app, "15m").await;
    assert!(!first.contains("by clients"));
    let body = json!({
        "ticket_id": "t", "session_id": "s", "reservation_tokens": 1, "wait_s": 0,
        "local_bypasses": {"unreachable": 3, "breaker": 4},
    });
    app.post("/v1/leases", &body).await;
    app.until(|view| view.tally.local_bypasses.iter().sum::<u64>() == 7)
        .await;
    let page = page(&app, "1h").await;
    let checks = part(&page, "p-checks");
    assert!(checks.contains("7 by clients without the gate"), "{checks}");
    assert!(checks.contains("3 unreachable, 4 breaker."), "{checks}");
    drop(sampler);
}

/// Without the feature the page claims nothing of closes, and offers none.
#[tokio::test]
async fn the_page_says_that_closes_are_off() {
    let app = TestApp::start().await;
    let page = page(&app, "15m").await;
    let closes = part(&page, "p-closes");
    assert!(closes.contains("Session closes are off."), "{closes}");
    assert!(!closes.contains("data-fig"));
}

/// An engine that should count and does not is the first thing to know.
#[tokio::test]
async fn cap3_an_engine_that_is_not_counted_is_an_alert() {
    let builder = Builder {
        engines: vec![
            ("http://engine-1:30000", 1_000),
            ("http://engine-2:30000", 1_000),
        ],
        ready: false,
        ..Builder::default()
    };
    let mut app = builder.start().await;
    app.make_ready(&[("http://engine-1:30000", 1_000)]).await;
    let page = page(&app, "15m").await;
    let alert = part(&page, "p-alert");
    assert!(
        alert.contains("<b>not counted</b> engine-2:30000"),
        "{alert}"
    );
    let checks = part(&page, "p-checks");
    assert!(checks.contains("1 of 2 engines"), "{checks}");
    assert!(
        checks.contains("engine-2:30000: no fresh reading."),
        "{checks}"
    );
    assert!(part(&page, "p-budget").contains("1 not counted"));
    assert!(part(&page, "p-engines").contains("1 of 2"));
}

/// Every notice is told by the checks, and the alert leads there.
#[tokio::test]
async fn notices_are_told_by_the_checks() {
    let app = TestApp::start().await;
    let notice = |code: &str, severity| ShellNotice {
        code: code.to_owned(),
        severity,
        text: format!("Text of {code}."),
        since: Timestamp::from_millis(0),
    };
    app.notices.send_replace(vec![
        notice("router_drops_session_id", Severity::Warning),
        notice("network_file_system", Severity::Error),
    ]);
    let page = page(&app, "15m").await;
    let checks = part(&page, "p-checks");
    for code in ["router_drops_session_id", "network_file_system"] {
        assert!(checks.contains(&format!("Text of {code}.")), "{checks}");
    }
    assert!(checks.contains("2 of 15 need a look"), "{checks}");
    let alert = part(&page, "p-alert");
    assert!(alert.contains("<b>network_file_system</b>"), "{alert}");
    assert!(alert.contains("href=\"./#p-checks\">1 more"), "{alert}");
}

/// DUR4: while the store is away the page shows the last good state and rows, and says so.
#[tokio::test]
async fn dur4_the_page_goes_on_while_the_store_is_away() {
    let store = Switch::default();
    let open = store.clone();
    let app = Builder::default().start_on(move || open.open()).await;
    app.acquire("held", 900).await;
    app.acquire("waiting", 300).await;
    let before = page(&app, "15m").await;
    assert!(part(&before, "p-queue").contains("ticket?id=waiting"));
    store.set(Mood::Failing);
    app.acquire("new", 10).await;
    let page = page(&app, "1h").await;
    assert!(part(&page, "p-alert").contains("store_unavailable"));
    let queue = part(&page, "p-queue");
    assert!(queue.contains("ticket?id=waiting"), "{queue}");
    assert!(queue.contains("rows as they were read last"), "{queue}");
    assert!(part(&page, "p-budget").contains(">900<"));
}

/// The range is a query parameter, and what is none is told.
#[tokio::test]
async fn ranges_are_links() {
    let app = TestApp::start().await;
    for range in ["15m", "1h", "6h", "24h", "7d"] {
        let page = page(&app, range).await;
        let current = format!("<a href=\"./?range={range}\" aria-current=\"true\">");
        assert!(page.contains(&current), "{range}");
        assert_eq!(page.matches("aria-current=\"true\"").count(), 1);
    }
    let page = app.get("/").await;
    assert!(
        page.text.contains("range=15m\" aria-current"),
        "no history yet"
    );
    for wrong in ["/?range=2h", "/?page=2"] {
        let page = app.get(wrong).await;
        assert_eq!(page.status, 422, "{wrong}");
        assert!(page.text.contains("invalid_request"), "{}", page.text);
    }
}

/// An open page that asks again is sent the parts that changed, and no others.
#[tokio::test]
async fn only_changed_parts_are_sent() {
    let app = TestApp::start().await;
    let ask = |range: &str, parts: &str| {
        let url = app.url(&format!("/?range={range}"));
        app.send(app.client.get(url).header("kvgate-parts", parts))
    };
    let all = ask("15m", "").await;
    let parts = all.header("kvgate-parts").unwrap().to_owned();
    assert_eq!(
        all.text.matches("<hx-partial").count(),
        parts.split(' ').count()
    );
    app.acquire("t", 600).await;
    let changed = ask("1h", &parts).await;
    let sent = |id: &str| changed.text.contains(&format!("hx-target=\"#{id}\""));
    assert!(sent("p-budget") && sent("p-decisions"));
    assert!(!sent("p-closes") && !sent("p-queue"), "{}", changed.text);
}

/// A browser takes over what such an answer says of what it has kept, which came with a policy of its own.
#[tokio::test]
async fn an_answer_that_nothing_changed_brings_no_policy() {
    let app = TestApp::start().await;
    let whole = app.get("/static/icon.svg").await;
    let etag = whole.header("etag").unwrap();
    let again = app.client.get(app.url("/static/icon.svg"));
    let again = app.send(again.header("if-none-match", etag)).await;
    assert_eq!(again.status, 304);
    for name in ["content-security-policy", "referrer-policy"] {
        assert!(whole.header(name).is_some());
        assert_eq!(again.header(name), None);
    }
}
