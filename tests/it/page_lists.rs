//! The list pages and the pages of one thing: what they show is what the API tells, chosen and paged
//! on the server.

use std::collections::BTreeSet;

use kvgate::gate::Phase;
use kvgate_core::command::{Acquire, Command};
use kvgate_core::ids::{SessionId, TicketId};
use kvgate_core::policy::Policy;
use kvgate_core::units::Span;
use serde_json::{Value, json};

use crate::support::app::{Answer, Builder, EngineCalls, SOON, TestApp, asking};
use crate::support::store::{Mood, Switch};

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

async fn ask(app: &TestApp, ticket: &str, session: &str, tokens: u64, more: Value) -> Value {
    let mut body = json!({"ticket_id": ticket, "session_id": session, "reservation_tokens": tokens, "wait_s": 0});
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    let answer = app.post("/v1/leases", &body).await;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.text);
    answer.json()
}

fn encoded(id: &str) -> String {
    percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// As templates write a text.
fn escaped(text: &str) -> String {
    text.replace('&', "&#38;")
        .replace('<', "&#60;")
        .replace('>', "&#62;")
        .replace('"', "&#34;")
        .replace('\'', "&#39;")
}

/// The page, which must be whole.
async fn page(app: &TestApp, path: &str) -> String {
    let mut answer = app.get(path).await;
    // One exact hit of a search leads to its page.
    if answer.status == 303 {
        let place = answer.header("location").unwrap();
        answer = app.get(&format!("/{place}")).await;
    }
    assert_eq!(answer.status, 200, "{path}: {}", answer.text);
    whole(&answer);
    answer.text
}

fn whole(answer: &Answer) {
    assert_eq!(
        answer.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = answer.header("content-security-policy").unwrap();
    assert!(!policy.contains("unsafe"), "{policy}");
    assert!(answer.text.ends_with("</html>"));
    assert!(!answer.text.contains(" style="));
    assert!(!answer.text.contains(" onclick="));
    assert_eq!(answer.text.matches("<h1").count(), 1);
}

/// The part of a page from an id to the end of its section.
fn part<'a>(page: &'a str, id: &str) -> &'a str {
    let from = page
        .find(&format!("id=\"{id}\""))
        .unwrap_or_else(|| panic!("no {id} in {page}"));
    let rest = &page[from..];
    &rest[..rest.find("</section>").unwrap_or(rest.len())]
}

/// The ids of the rows of a part.
fn ids(part: &str) -> Vec<&str> {
    let rows = part.split("data-id=\"").skip(1);
    rows.map(|rest| rest.split('"').next().unwrap()).collect()
}

/// Where the first link with this text leads.
fn link<'a>(page: &'a str, text: &str) -> Option<&'a str> {
    let end = page.find(&format!(">{text}</a>"))?;
    let from = page[..end].rfind("href=\"")? + 6;
    let href = &page[from..];
    Some(&href[..href.find('"')?])
}

fn unescaped(href: &str) -> String {
    href.replace("&#38;", "&")
}

// ---- lists ---------------------------------------------------------------------------------------

/// The queue page shows the rows of the API with their filters, and its head says what it waits for.
#[tokio::test]
async fn the_queue_is_filtered_as_the_api_filters_it() {
    let app = TestApp::start().await;
    ask(&app, "held", "s-0", 700, json!({})).await;
    ask(&app, "head", "s-1", 400, json!({"client": "c-1"})).await;
    ask(&app, "next", "s-2", 1, json!({"client": "c-2"})).await;
    ask(&app, "last", "s-2", 2, json!({"client": "c-2"})).await;
    let all = page(&app, "/queue").await;
    assert_eq!(ids(part(&all, "p-waiters")), ["head", "next", "last"]);
    assert!(all.contains("data-fig=\"queue.waiting\">3<"));
    assert!(all.contains("data-fig=\"queue.tokens\">403<"));
    assert!(part(&all, "p-waiters").contains("data-total=\"3\""));
    assert!(part(&all, "p-waiters").contains("100 short"), "{all}");
    assert!(part(&all, "p-waiters").contains("behind #1"));
    let head = part(&all, "p-head");
    assert!(head.contains("href=\"ticket?id=head\""), "{head}");
    assert!(
        head.contains("It needs 400 tokens and 300 are available: 100 must be given back first.")
    );
    assert!(
        head.contains("href=\"session?id=s-0\">s-0</a> 700"),
        "{head}"
    );
    assert!(part(&all, "p-ages").contains("all 3"));

    for (query, found) in [
        ("?session_id=s-2", vec!["next", "last"]),
        ("?client=c-1", vec!["head"]),
        ("?q=ex", vec!["next"]),
        ("?scope=eval", vec![]),
        // A form sends what is empty as well.
        (
            "?q=&session_id=&client=c-2&scope=train",
            vec!["next", "last"],
        ),
    ] {
        let chosen = page(&app, &format!("/queue{query}")).await;
        let list = part(&chosen, "p-waiters");
        assert_eq!(ids(list), found, "{query}");
        let total = format!("<span class=\"cnt\">{}</span>", found.len());
        assert!(list.contains(&total), "{query}: {list}");
        assert!(chosen.contains("Show all"));
    }
    for query in [
        "?scope=other",
        "?cursor=x",
        "?unknown=1",
        "?limit=9",
        "?q=%ff",
    ] {
        let refused = app.get(&format!("/queue{query}")).await;
        assert!(matches!(refused.status, 400 | 422), "{query}");
        assert!(refused.text.contains("<h1>"), "{query}");
    }
}

/// Lists are paged: links lead through all rows once, and carry the filter along.
#[tokio::test]
async fn lists_are_paged_by_links() {
    let app = TestApp::start().await;
    for number in 0..120 {
        let session = format!("s-{}", number % 2);
        ask(
            &app,
            &format!("t-{number:03}"),
            &session,
            1,
            json!({"client": "some one"}),
        )
        .await;
    }
    for (path, count) in [
        ("/leases", 120_usize),
        ("/leases?client=some%20one&session_id=s-1", 60),
    ] {
        let mut seen = BTreeSet::new();
        let mut next = Some(path.to_owned());
        let mut pages = 0;
        while let Some(path) = next {
            let shown = page(&app, &path).await;
            let rows = part(&shown, "p-leases");
            assert!(ids(rows).len() <= 50);
            assert!(rows.contains(&format!("of {count}")), "{rows}");
            for id in ids(rows) {
                assert!(seen.insert(id.to_owned()), "{id} twice");
            }
            assert_eq!(link(rows, "First page").is_some(), pages > 0);
            next = link(rows, "Next page").map(|href| format!("/{}", unescaped(href)));
            pages += 1;
        }
        assert_eq!((seen.len(), pages), (count, count.div_ceil(50)), "{path}");
    }
    let api = app.get("/v1/leases?limit=7").await.json();
    assert_eq!(
        (&api["total"], api["items"].as_array().unwrap().len()),
        (&json!(120), 7)
    );
    let cursor = api["next"].as_str().unwrap();
    let second = app
        .get(&format!("/v1/leases?limit=7&cursor={cursor}"))
        .await
        .json();
    assert_eq!(second["items"][0]["ticket_id"], "t-007");
}

/// The leases page: holders add up to what is reserved; expired leases are told.
#[tokio::test]
async fn leases_show_holders_and_ends() {
    let app = TestApp::start().await;
    ask(&app, "a", "large", 600, json!({"request_id": "r-1"})).await;
    ask(&app, "b", "small", 100, json!({})).await;
    let short = ask(&app, "c", "small", 50, json!({})).await;
    let all = page(&app, "/leases").await;
    let holders = part(&all, "p-holders");
    assert!(
        holders.contains("data-fig=\"budget.reserved\">750<"),
        "{holders}"
    );
    assert!(holders.contains("large: 600 (80.0 %)"));
    assert!(holders.contains("small: 150 (20.0 %)"));
    assert!(!holders.contains("all others"));
    let rows = part(&all, "p-leases");
    assert_eq!(ids(rows).len(), 3);
    assert!(rows.contains("data-fig=\"leases.count\">3<"));
    assert!(rows.contains("data-col=\"request_id\">r-1<"));
    assert!(part(&all, "p-expired").contains("No lease expired"));

    let id = short["lease_id"].as_str().unwrap();
    app.delete(&format!("/v1/leases/{id}")).await;
    app.until(|view| view.leases == 2).await;
    let all = page(&app, "/decisions?action=ended&reason=released").await;
    let rows = part(&all, "p-decisions");
    assert_eq!(rows.matches("class=\"st release\"").count(), 1);
    assert!(rows.contains("700 of 1,000 stay reserved"), "{rows}");
    let gone = app.get(&format!("/lease?id={id}")).await;
    assert_eq!(gone.status, 404);
    whole(&gone);
    assert!(gone.text.contains("not known now"));
}

/// Sessions and closes with what each engine answered; failed ones are found, and may be retried.
#[tokio::test]
async fn closes_show_what_engines_answered() {
    let app = with_closes().await;
    let mut calls = EngineCalls::of(&app);
    ask(&app, "t", "joins", 10, json!({})).await;
    app.post("/v1/sessions/joins/close", &json!({})).await;
    app.post("/v1/sessions/fails/close", &json!({})).await;
    calls.answer_next(400, Some("<b>no such session</b>")).await;
    app.until(|view| view.closes_failed == 1).await;

    let closes = page(&app, "/closes").await;
    let rows = part(&closes, "p-closes");
    let listed = app.get("/v1/closes").await.json();
    let known: Vec<&str> = listed["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["close_id"].as_str().unwrap())
        .collect();
    assert_eq!(ids(rows), known);
    assert!(closes.contains("data-fig=\"closes.failed\">1<"));
    assert!(closes.contains("data-fig=\"closes.pending\">1<"));
    assert!(rows.contains("HTTP 400 · 1 attempt"), "{rows}");
    assert!(rows.contains("Retry all 1 failed"));
    assert!(!closes.contains("freed tokens are told</"));

    let failed = page(&app, "/closes?failed=true").await;
    let rows = part(&failed, "p-closes");
    assert_eq!(ids(rows).len(), 1);
    let id = ids(rows)[0];
    assert!(
        rows.contains(&format!("confirm?do=retry&#38;close={id}")),
        "{rows}"
    );
    let api = app.get("/v1/closes?failed=true").await.json();
    assert_eq!(
        (
            &api["total"],
            &api["items"][0]["close_id"],
            &api["items"][0]["failed"]
        ),
        (&json!(1), &json!(id), &json!(true))
    );
    let others = app.get("/v1/closes?failed=false").await.json();
    assert_eq!(
        (&others["total"], &others["items"][0].get("failed")),
        (&json!(1), &None)
    );
    app.get("/v1/closes?failed=1")
        .await
        .is_problem(422, "invalid_request");

    let one = page(&app, &format!("/close?id={id}")).await;
    let targets = part(&one, "p-targets");
    assert!(targets.contains("data-col=\"attempts\">1<"), "{targets}");
    assert!(targets.contains("&#60;b&#62;no such session"), "{targets}");
    let session = page(&app, "/session?id=joins").await;
    assert!(part(&session, "p-facts").contains("closing"));
    assert_eq!(ids(part(&session, "p-leases")).len(), 1);
    assert_eq!(ids(part(&session, "p-closes")).len(), 1);
    let sessions = page(&app, "/sessions").await;
    assert_eq!(ids(part(&sessions, "p-sessions")), ["joins", "fails"]);
    let chosen = page(&app, "/sessions?q=fail").await;
    assert_eq!(ids(part(&chosen, "p-sessions")), ["fails"]);
}

/// Decisions are narrowed and paged by number, back and forth, without a gap.
#[tokio::test]
async fn decisions_are_narrowed_and_paged() {
    let app = TestApp::start().await;
    for number in 0..70 {
        ask(&app, &format!("t-{number}"), "many", 1, json!({})).await;
    }
    ask(&app, "large", "other", 5_000, json!({"client": "c"})).await;
    ask(&app, "waits", "other", 950, json!({})).await;
    let api = app.get("/v1/decisions?limit=1000").await.json();
    let mut known: Vec<String> = api["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["number"].to_string())
        .collect();
    known.reverse();
    let first = page(&app, "/decisions").await;
    let rows = part(&first, "p-decisions");
    assert_eq!(ids(rows), known[..50]);
    assert_eq!(link(rows, "Newer"), None);
    assert!(rows.contains("950 + 70 reserved is 20 more than the ceiling of 1,000."));
    let older = link(rows, "Older").unwrap();
    let second = page(&app, &format!("/{older}")).await;
    let rows = part(&second, "p-decisions");
    assert_eq!(ids(rows), known[50..]);
    assert_eq!(link(rows, "Older"), None);
    let newer = link(rows, "Newer").unwrap();
    let back = page(&app, &format!("/{newer}")).await;
    assert_eq!(ids(part(&back, "p-decisions")), known[..50]);

    for (query, found) in [
        ("action=bypass", 1),
        ("action=bypass&reason=oversize", 1),
        ("action=bypass&reason=aged", 0),
        ("action=wait", 1),
        ("session_id=other", 2),
        ("ticket_id=large", 1),
        ("q=arg", 1),
        ("q=many&action=wait", 0),
        ("ticket_id=%00", 0),
    ] {
        let chosen = page(&app, &format!("/decisions?{query}")).await;
        assert_eq!(ids(part(&chosen, "p-decisions")).len(), found, "{query}");
        let api = app.get(&format!("/v1/decisions?{query}")).await.json();
        assert_eq!(api["items"].as_array().unwrap().len(), found, "{query}");
    }
    for query in [
        "action=other",
        "reason=other",
        "action=wait&reason=aged",
        "before=x",
        "after=1&before=9",
    ] {
        let answer = app.get(&format!("/v1/decisions?{query}")).await;
        answer.is_problem(422, "invalid_request");
        assert_eq!(app.get(&format!("/decisions?{query}")).await.status, 422);
    }
    let part_of = app
        .get(&format!("/v1/decisions?limit=2&before={}", known[3]))
        .await
        .json();
    assert_eq!(
        (part_of["items"][0]["number"].to_string(), &part_of["more"]),
        (known[5].clone(), &json!(true))
    );
}

// ---- one thing -----------------------------------------------------------------------------------

/// The answer to "why is my work waiting" for one ticket, and what became of it afterwards.
#[tokio::test]
async fn a_ticket_tells_why_it_waits() {
    let app = TestApp::start().await;
    let held = ask(&app, "held", "s-0", 900, json!({})).await;
    ask(&app, "head", "s-1", 400, json!({})).await;
    ask(
        &app,
        "mine",
        "s-2",
        50,
        json!({"client": "c-9", "request_id": "r-9"}),
    )
    .await;
    let mine = page(&app, "/ticket?id=mine").await;
    let facts = part(&mine, "p-facts");
    for told in [
        "data-col=\"position\">2<",
        "data-col=\"tokens_ahead\">400<",
        "data-col=\"short_tokens\">350<",
        "data-col=\"reservation_tokens\">50<",
        ">c-9<",
        ">r-9<",
        "confirm?do=cancel&#38;ticket=mine",
    ] {
        assert!(facts.contains(told), "{told} in {facts}");
    }
    let waits = part(&mine, "p-waits");
    assert!(waits.contains("2 of 2"), "{waits}");
    assert!(
        waits.contains("It needs 400 tokens and 100 are available: 300 must be given back first.")
    );
    assert!(waits.contains("href=\"ticket?id=head\""));
    assert_eq!(
        part(&mine, "p-decided")
            .matches("class=\"st wait\"")
            .count(),
        1
    );

    app.delete(&format!(
        "/v1/leases/{}",
        held["lease_id"].as_str().unwrap()
    ))
    .await;
    app.until(|view| view.waiting == 0).await;
    // Another address, since the page of a moment ago is shown for a moment.
    let mine = page(&app, "/ticket?id=mine&now").await;
    assert!(part(&mine, "p-facts").contains("holds a lease"));
    assert!(!mine.contains("p-waits\""));
    assert_eq!(part(&mine, "p-decided").matches("data-id=").count(), 2);
    let lease = app.get("/v1/tickets/mine").await.json()["lease_id"].clone();
    let lease = page(&app, &format!("/lease?id={}", lease.as_str().unwrap())).await;
    assert!(part(&lease, "p-facts").contains("href=\"ticket?id=mine\""));
    let first = page(&app, "/ticket?id=held").await;
    assert!(part(&first, "p-facts").contains("finished"));
    assert!(part(&first, "p-decided").contains("class=\"st release\""));
}

/// Both parts of a ticket's page tell of one moment, however fast the line moves.
#[tokio::test]
async fn a_ticket_stands_in_one_place() {
    let app = TestApp::start().await;
    ask(&app, "held", "s-0", 900, json!({})).await;
    for ahead in 0..100 {
        ask(&app, &format!("ahead-{ahead}"), "s-1", 400, json!({})).await;
    }
    ask(&app, "mine", "s-2", 50, json!({})).await;
    let line_moves = async {
        for ahead in 0..100 {
            app.delete(&format!("/v1/tickets/ahead-{ahead}")).await;
        }
    };
    let looks = async {
        for look in 0..30 {
            let mine = page(&app, &format!("/ticket?id=mine&look={look}")).await;
            let Some((_, rest)) = mine.split_once("data-col=\"position\">") else {
                panic!("{mine}");
            };
            let (position, _) = rest.split_once('<').unwrap();
            let place = format!(">{position} of ");
            assert!(part(&mine, "p-waits").contains(&place), "{place} in {mine}");
        }
    };
    tokio::join!(line_moves, looks);
}

/// A list tells how many rows there are at the moment of its rows, however fast the line moves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_counts_the_rows_that_it_shows() {
    let app = TestApp::start().await;
    ask(&app, "held", "s-0", 900, json!({})).await;
    for number in 0..320 {
        ask(&app, &format!("waits-{number}"), "s-1", 400, json!({})).await;
    }
    let line_moves = futures_util::future::join_all((0..8).map(|caller| {
        let app = &app;
        async move {
            for number in (caller..320).step_by(8) {
                app.delete(&format!("/v1/tickets/waits-{number}")).await;
            }
        }
    }));
    let looks = async {
        for _ in 0..60 {
            let list = app.get("/v1/queue?limit=1000").await.json();
            assert_eq!(list["total"], list["items"].as_array().unwrap().len());
        }
    };
    tokio::join!(line_moves, looks);
}

/// What is not known is a page that says so, and stays one when it asks for what changed.
#[tokio::test]
async fn what_is_not_known_is_told() {
    let app = TestApp::start().await;
    for path in [
        "/ticket?id=x",
        "/session?id=x",
        "/lease?id=x",
        "/close?id=x",
        "/lease?id=1-0000000000000000",
    ] {
        let answer = app.get(path).await;
        assert_eq!(answer.status, 404, "{path}");
        whole(&answer);
        let update = app
            .client
            .get(app.url(path))
            .header("kvgate-parts", "p-facts=0");
        assert_eq!(app.send(update).await.status, 200, "{path}");
    }
    for path in ["/ticket", "/lease?id=", "/session"] {
        assert_eq!(app.get(path).await.status, 422, "{path}");
    }
    assert_eq!(app.get("/ticket?id=a%0Ab").await.status, 400);
}

/// Search: one exact hit is shown at once, else what has the text in its name.
#[tokio::test]
async fn search_finds_by_kind() {
    let app = TestApp::start().await;
    let held = ask(&app, "ticket-1", "session-1", 900, json!({})).await;
    ask(&app, "ticket/2", "session-2", 400, json!({})).await;
    ask(&app, "twice", "twice", 400, json!({})).await;
    let client = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .unwrap();
    let lease = held["lease_id"].as_str().unwrap();
    for (text, to) in [
        ("ticket-1", "ticket?id=ticket-1".to_owned()),
        ("ticket/2", "ticket?id=ticket%2F2".to_owned()),
        ("session-2", "session?id=session-2".to_owned()),
        (lease, format!("lease?id={lease}")),
        (
            "engine-1:30000",
            "engines?q=http%3A%2F%2Fengine-1%3A30000".to_owned(),
        ),
    ] {
        let answer = app
            .send(client.get(app.url(&format!("/search?q={}", encoded(text)))))
            .await;
        assert_eq!(
            (answer.status, answer.header("location")),
            (303, Some(to.as_str())),
            "{text}"
        );
    }
    let both = page(&app, "/search?q=twice").await;
    assert!(
        both.contains("href=\"ticket?id=twice\"") && both.contains("href=\"session?id=twice\"")
    );
    let parts = page(&app, "/search?q=ession-").await;
    let found = &parts[parts.find("p-found").unwrap()..];
    assert!(found.contains("Leases <span class=\"cnt\">1<"), "{found}");
    assert!(found.contains("Waiting tickets <span class=\"cnt\">1<"));
    assert!(found.contains("Sessions <span class=\"cnt\">2<"));
    assert!(
        page(&app, "/search?q=nowhere")
            .await
            .contains("Nothing that is known now")
    );
    page(&app, "/search").await;
}

// ---- trouble -------------------------------------------------------------------------------------

/// While the store is away pages show the last good state and say what they cannot show.
#[tokio::test]
async fn lists_without_a_store_are_no_blank_pages() {
    let store = Switch::default();
    let open = store.clone();
    let mut app = Builder {
        ready: false,
        ..Builder::default()
    }
    .start_on(move || open.open())
    .await;
    app.make_ready(&[("http://engine-1:30000", 1_000)]).await;
    ask(&app, "held", "s", 100, json!({})).await;
    store.set(Mood::Failing);
    app.acquire("new", 10).await;
    let mut phases = app.gate.phases();
    phases
        .wait_for(|phase| *phase == Phase::Unavailable)
        .await
        .unwrap();
    let leases = page(&app, "/leases").await;
    assert!(leases.contains("data-fig=\"budget.reserved\">100<"));
    for path in [
        "/queue",
        "/sessions",
        "/closes",
        "/decisions",
        "/search?q=held",
        "/ticket?id=held",
        "/session?id=s",
    ] {
        page(&app, path).await;
    }
}

/// U02: markup in ids is text wherever it is shown, and breaks neither a tag nor an attribute.
#[tokio::test]
async fn u02_markup_in_ids_is_text_on_every_page() {
    let texts: Vec<String> =
        serde_json::from_str(include_str!("../fixtures/cases/U02-ids.json")).unwrap();
    let (ids, refused): (Vec<_>, Vec<_>) = texts
        .into_iter()
        .partition(|id| !id.contains(char::is_control));
    assert_eq!((ids.len(), refused.len()), (8, 2));
    let harmless: Vec<String> = (0..ids.len())
        .map(|number| format!("id-{number}"))
        .collect();
    let plain = pages_with(&harmless).await;
    let marked = pages_with(&ids).await;
    assert_eq!(plain.len(), marked.len());
    for ((path, plain), (marked_path, marked)) in plain.iter().zip(&marked) {
        for sign in ["<", ">", "\"", "data-id="] {
            assert_eq!(
                plain.matches(sign).count(),
                marked.matches(sign).count(),
                "{sign} in {path} and {marked_path}"
            );
        }
        for id in &ids {
            assert!(
                !marked.contains(id.as_str()) || escaped(id) == *id,
                "{id} in {marked_path}"
            );
        }
        assert!(!marked.contains("href=\"javascript"), "{marked_path}");
    }
    for list in ["/queue", "/leases", "/sessions", "/closes", "/decisions"] {
        let (_, text) = marked.iter().find(|(path, _)| path == list).unwrap();
        for id in &ids {
            assert!(text.contains(&escaped(id)), "{id} is not on {list}");
        }
    }
    let app = TestApp::start().await;
    for id in refused {
        let body = json!({"ticket_id": id, "session_id": "s", "reservation_tokens": 1});
        app.post("/v1/leases", &body)
            .await
            .is_problem(400, "invalid_id");
        let page = app.get(&format!("/queue?q={}", encoded(&id))).await;
        assert_eq!(page.status, 200);
    }
}

/// Every page while each id holds a lease, waits, and is closed.
async fn pages_with(ids: &[String]) -> Vec<(String, String)> {
    let app = with_closes().await;
    let calls = EngineCalls::of(&app);
    for id in ids {
        let closed = encoded(&format!("closed {id}"));
        app.post(&format!("/v1/sessions/{closed}/close"), &json!({}))
            .await;
        let labels = json!({"client": id, "request_id": id});
        ask(&app, &format!("held {id}"), id, 10, labels.clone()).await;
    }
    for id in ids {
        let labels = json!({"client": id, "request_id": id});
        ask(&app, id, id, 1_000, labels).await;
    }
    drop(calls);
    let mut paths: Vec<String> = ["/queue", "/leases", "/sessions", "/closes", "/decisions"]
        .map(str::to_owned)
        .into();
    let leases = app.get("/v1/leases").await.json();
    let closes = app.get("/v1/closes").await.json();
    for (id, (lease, close)) in ids.iter().zip(
        leases["items"]
            .as_array()
            .unwrap()
            .iter()
            .zip(closes["items"].as_array().unwrap()),
    ) {
        let id = encoded(id);
        for list in ["queue", "leases", "sessions", "closes", "decisions"] {
            paths.push(format!("/{list}?q={id}"));
        }
        paths.push(format!("/ticket?id={id}"));
        paths.push(format!("/session?id={id}"));
        paths.push(format!("/search?q=held%20{id}"));
        paths.push(format!("/lease?id={}", lease["lease_id"].as_str().unwrap()));
        paths.push(format!("/close?id={}", close["close_id"].as_str().unwrap()));
    }
    let mut pages = Vec::new();
    for path in paths {
        let text = page(&app, &path).await;
        pages.push((path, text));
    }
    pages
}

/// U03: ten thousand waiters, five thousand leases and two hundred engines make no page large, and
/// each list shows its first rows and the total.
#[tokio::test]
async fn u03_pages_stay_small() {
    const PAGE_MAX: usize = 300 << 10;
    let engines: Vec<(&'static str, u64)> = (0..200)
        .map(|number| {
            let url: &'static str = format!("http://engine-{number}:30000").leak();
            (url, 25_000)
        })
        .collect();
    let policy = Builder::default().policy;
    let app = Builder {
        policy: Policy {
            max_wait: Span::from_secs(3_600),
            session_lifecycle: true,
            ..policy
        },
        engines,
        ..Builder::default()
    }
    .start()
    .await;
    let ticket =
        |number: u64| TicketId::new(&format!("ticket-of-an-agent-{number:06}/turn-1#0")).unwrap();
    let acquire = |number: u64| {
        Command::Acquire(Acquire {
            ticket: ticket(number),
            session: SessionId::new(&format!("session-of-an-agent-{number:06}")).unwrap(),
            ..asking("t", 1_000, false)
        })
    };
    for thousand in 0..15 {
        let commands = (thousand * 1_000..(thousand + 1) * 1_000).map(acquire);
        app.gate.batch(commands.collect()).await.unwrap();
        // Their callers stay, so that they keep their places.
        let numbers = thousand * 1_000..(thousand + 1) * 1_000;
        let tickets = numbers.map(ticket).collect();
        let gate = app.gate.clone();
        tokio::spawn(async move { gate.watch(tickets, SOON * 20).await });
    }
    for number in 0..60 {
        let path = format!("/v1/sessions/closed-{number}/close");
        app.post(&path, &json!({})).await;
    }
    app.until(|view| view.waiting == 10_000 && view.leases == 5_000)
        .await;
    for (path, told) in [
        ("/queue", "50 of 10,000"),
        ("/queue?client=&q=agent-0149", "50 of 100"),
        ("/leases", "50 of 5,000"),
        ("/sessions", "50 of 15,060"),
        ("/closes", "50 of 60"),
        ("/decisions", "the last 20,000 are remembered"),
        ("/search?q=agent", "All 10,000"),
        (
            "/ticket?id=ticket-of-an-agent-014999%2Fturn-1%230",
            "10,000 of 10,000",
        ),
    ] {
        let text = page(&app, path).await;
        assert!(text.len() < PAGE_MAX, "{path}: {} bytes", text.len());
        assert!(text.contains(told), "{told} on {path}");
        assert!(text.matches("data-row=").count() <= 60, "{path}");
    }
    let exact = page(&app, "/search?q=session-of-an-agent-000007").await;
    assert!(exact.contains("<h1>Session</h1>"));
}
