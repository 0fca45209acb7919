//! What operators do from a page: the effect that is stated, what is done, the audit, and who may.

use kvgate_core::policy::Policy;
use kvgate_core::units::Span;
use serde_json::{Value, json};

use crate::support::app::{Answer, Builder, EngineCalls, TestApp};

type Field<'a> = (&'a str, &'a str);

/// Admission and session closes are on; one engine of 1,000 tokens, all of which may be reserved.
async fn start() -> TestApp {
    let Builder { policy, .. } = Builder::default();
    let policy = Policy {
        session_lifecycle: true,
        claim_grace: Span::from_secs(60),
        ..policy
    };
    Builder {
        policy,
        ..Builder::default()
    }
    .start()
    .await
}

/// Sends a form as a browser does, without following what it leads to.
async fn send(app: &TestApp, path: &str, fields: &[Field<'_>]) -> Answer {
    let request = app
        .form(path, fields)
        .header("origin", app.url(""))
        .header("sec-fetch-site", "same-origin");
    app.send(request).await
}

/// Acts, and gives back the page that it leads to.
async fn act(app: &TestApp, fields: &[Field<'_>]) -> Answer {
    let mut fields = fields.to_vec();
    fields.push(("back", "settings?q=x"));
    let answer = send(app, "/act", &fields).await;
    assert_eq!(answer.status, 303, "{}", answer.text);
    let location = answer.header("location").unwrap();
    assert!(
        !location.starts_with('/') && !location.contains("//"),
        "{location}"
    );
    app.get(&format!("/{}", location.trim_start_matches("./")))
        .await
}

async fn confirm(app: &TestApp, query: &str) -> Answer {
    let page = app.get(&format!("/confirm?{query}")).await;
    assert_eq!(page.status, 200, "{}", page.text);
    page
}

#[track_caller]
fn says(page: &Answer, sentence: &str) {
    assert!(
        page.text.contains(sentence),
        "no {sentence:?} in {}",
        page.text
    );
}

async fn audit(app: &TestApp) -> Vec<Value> {
    app.get("/v1/audit").await.json()["items"]
        .as_array()
        .unwrap()
        .clone()
}

/// Who, what and the figures of the newest entry.
async fn last_entry(app: &TestApp) -> (String, String, String) {
    let entry = audit(app).await.remove(0);
    let text = |name: &str| entry[name].as_str().unwrap().to_owned();
    (text("who"), text("action"), text("detail"))
}

/// SET3: pausing lets everybody go on who waits, and is in the audit under the name of who did it.
#[tokio::test]
async fn set3_the_gate_is_paused_and_resumed() {
    let app = start().await;
    app.acquire("held", 900).await;
    app.acquire("waits", 300).await;
    let page = confirm(&app, "do=pause").await;
    says(
        &page,
        "The one that waits goes on at once without a lease: 300 tokens.",
    );
    says(
        &page,
        "1 held lease with 900 tokens stays until given back or expired.",
    );
    says(&page, "Pause gate");
    let page = act(&app, &[("do", "pause")]).await;
    assert_eq!(page.status, 200);
    says(&page, "Set paused from off to on.");
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["features"]["paused"], true);
    assert_eq!(state["queue"]["waiting"], 0);
    let (who, action, detail) = last_entry(&app).await;
    assert_eq!(
        (who.as_str(), action.as_str()),
        ("local", "settings_changed")
    );
    assert!(detail.contains("paused"), "{detail}");

    let page = confirm(&app, "do=pause").await;
    says(&page, "The gate is paused already.");
    assert!(
        !page.text.contains("type=\"submit\""),
        "nothing is left to do"
    );
    let page = confirm(&app, "do=resume").await;
    says(
        &page,
        "New acquires are admitted while they fit: 100 of 1,000 tokens are available.",
    );
    act(&app, &[("do", "resume")]).await;
    let settings = app.get("/v1/settings").await.json();
    assert_eq!(
        settings["paused"],
        json!({"value": false, "origin": "default"})
    );
    assert_eq!(audit(&app).await.len(), 2);
}

/// SET1, SET2: a form changes what was edited in it and nothing else, all of it or none.
#[tokio::test]
async fn set1_settings_are_changed_together() {
    let app = start().await;
    app.acquire("held", 900).await;
    let edited = [
        ("do", "set"),
        ("was.headroom", "1"),
        ("headroom", "0.8"),
        ("was.max_wait_s", "600"),
        ("max_wait_s", "600"),
        ("was.scope", "train"),
        ("scope", "all"),
    ];
    let page = send(&app, "/confirm", &edited).await;
    assert_eq!(page.status, 200, "{}", page.text);
    says(
        &page,
        "The ceiling goes from 1,000 to 800 tokens; 900 are reserved.",
    );
    says(&page, "That is 100 more than the new ceiling");
    says(&page, "1 → 0.8");
    assert!(
        !page.text.contains("<td>max_wait_s</td>"),
        "it was not edited"
    );
    assert_eq!(
        app.get("/v1/settings").await.json()["headroom"]["value"],
        1.0
    );

    let page = act(&app, &edited).await;
    says(&page, "headroom from 1 to 0.8");
    let settings = app.get("/v1/settings").await.json();
    assert_eq!(
        settings["headroom"],
        json!({"value": 0.8, "origin": "run_time"})
    );
    assert_eq!(settings["scope"]["value"], "all");
    assert_eq!(settings["max_wait_s"]["origin"], "default");
    says(&page, "2 set at run time");

    for (name, value) in [
        ("headroom", "1.5"),
        ("headroom", "much"),
        ("expected_decode_cap", "0"),
        ("max_wait_s", "-1"),
        ("scope", "eval"),
        ("paused", "perhaps"),
    ] {
        let fields = [("do", "set"), (name, value), ("program_admission", "off")];
        let page = send(&app, "/act", &fields).await;
        assert_eq!(page.status, 422, "{name} {value}: {}", page.text);
        says(&page, &format!("<li>{name}: "));
        assert!(
            page.header("content-type")
                .unwrap()
                .starts_with("text/html")
        );
    }
    let after = app.get("/v1/settings").await.json();
    assert_eq!(after, settings, "a change that is refused changes none");

    let fields = [
        ("do", "set"),
        ("headroom", "0.8"),
        ("configured.headroom", "on"),
    ];
    act(&app, &fields).await;
    let settings = app.get("/v1/settings").await.json();
    assert_eq!(
        settings["headroom"],
        json!({"value": 1.0, "origin": "default"})
    );
}

/// A page that was rendered a moment ago is shared; after an act nobody is shown it again.
#[tokio::test]
async fn nobody_sees_what_was_before_an_act() {
    let app = start().await;
    app.acquire("held", 900).await;
    app.acquire("waits", 200).await;
    let row = "data-id=\"waits\"";
    assert!(app.get("/queue").await.text.contains(row));
    act(&app, &[("do", "cancel"), ("ticket", "waits")]).await;
    assert!(!app.get("/queue").await.text.contains(row));
}

/// Tickets are cancelled one by one and many at once; what becomes of each is told before and after.
#[tokio::test]
async fn tickets_are_cancelled() {
    let app = start().await;
    app.acquire("held", 900).await;
    for ticket in ["a", "b/%?&", "c"] {
        app.acquire(ticket, 200).await;
    }
    let page = confirm(&app, "do=cancel&ticket=a").await;
    says(&page, "Waits as #1, 200 tokens.");
    says(
        &page,
        "1 ticket is withdrawn from the queue: 200 tokens wanted less.",
    );
    says(
        &page,
        "Ticket b/%?&#38; is next and is 100 tokens short then.",
    );
    let page = confirm(&app, "do=cancel&id=held").await;
    says(&page, "1 lease is given back: releases 900 tokens");
    says(&page, "Ticket a is next and fits.");

    let many = [
        ("do", "cancel"),
        ("ticket", "a"),
        ("ticket", "b/%?&"),
        ("ticket", "held"),
        ("ticket", "never"),
        ("ticket", "a"),
    ];
    let page = send(&app, "/confirm", &many).await;
    says(&page, "Cancel 4 tickets");
    says(
        &page,
        "2 tickets are withdrawn from the queue: 400 tokens wanted less.",
    );
    says(&page, "Ticket c is next and fits.");
    says(&page, "1 ticket is not known");
    assert_eq!(audit(&app).await.len(), 0, "a confirmation changes nothing");
    let page = act(&app, &many).await;
    says(
        &page,
        "2 tickets withdrawn, 1 lease given back, 1 was not known",
    );
    let state = app.get("/v1/state").await.json();
    assert_eq!(
        (&state["budget"]["reserved"], &state["queue"]["waiting"]),
        (&json!(200), &json!(0))
    );
    let entries = audit(&app).await;
    assert_eq!(entries.len(), 4);
    assert!(
        entries
            .iter()
            .all(|entry| entry["action"] == "ticket_cancelled")
    );
}

/// A revoked lease gives its tokens to who is next.
#[tokio::test]
async fn leases_are_revoked() {
    let app = start().await;
    let lease = app.acquire("held", 900).await["lease_id"]
        .as_str()
        .unwrap()
        .to_owned();
    app.acquire("next", 200).await;
    let page = confirm(&app, &format!("do=revoke&lease={lease}")).await;
    says(&page, "Releases 900 of 900 reserved tokens.");
    says(&page, "Ticket next is next and fits.");
    let page = act(&app, &[("do", "revoke"), ("lease", &lease)]).await;
    says(&page, "1 lease revoked.");
    assert_eq!(app.get(&format!("/v1/leases/{lease}")).await.status, 410);
    assert_eq!(app.get("/v1/state").await.json()["budget"]["reserved"], 200);
    let (_, action, detail) = last_entry(&app).await;
    assert_eq!(action, "lease_revoked");
    assert!(
        detail.contains("900") && detail.contains("held"),
        "{detail}"
    );
    let page = confirm(&app, &format!("do=revoke&lease={lease}")).await;
    says(&page, "1 lease is not held any more.");
    assert!(!page.text.contains("type=\"submit\""));
    let page = act(&app, &[("do", "revoke"), ("lease", &lease)]).await;
    says(&page, "1 lease was not held any more.");
    assert_eq!(
        audit(&app).await.len(),
        1,
        "what changed nothing is not in the audit"
    );
    let page = confirm(&app, "do=revoke&lease=1-0000000000000000").await;
    says(&page, "No lease with this id was ever issued.");
    assert_eq!(
        app.get("/confirm?do=revoke&lease=nonsense").await.status,
        404
    );
}

/// A session is closed as its form says; a close that failed is sent once more, one or all.
#[tokio::test]
async fn sessions_are_closed_and_closes_retried() {
    let app = start().await;
    let mut calls = EngineCalls::of(&app);
    app.acquire("held", 900).await;
    app.acquire("waits", 300).await;
    let page = confirm(&app, "do=close&session=s").await;
    says(
        &page,
        "1 waiter is withdrawn from the queue: 300 tokens wanted less.",
    );
    says(
        &page,
        "1 lease with 900 tokens is held: the engines are told when the last one has ended.",
    );
    says(&page, "name=\"mode\"");
    let page = act(&app, &[("do", "close"), ("session", "s"), ("mode", "join")]).await;
    says(&page, "1 session is closed.");
    let (_, action, _) = last_entry(&app).await;
    assert_eq!(action, "session_closed");
    app.delete("/v1/tickets/held").await;
    calls.answer_next(400, Some("no such session")).await;
    app.until(|view| view.closes_failed == 1).await;

    let close = app.get("/v1/closes").await.json()["items"][0]["close_id"]
        .as_str()
        .unwrap()
        .to_owned();
    for query in [
        format!("do=retry&close={close}"),
        "do=retry&all=failed".to_owned(),
    ] {
        let page = confirm(&app, &query).await;
        says(&page, "1 close is sent once more, to 1 engine in all.");
    }
    let page = act(&app, &[("do", "retry"), ("all", "failed")]).await;
    says(&page, "1 close is sent once more.");
    calls.answer_next(200, None).await;
    app.until(|view| view.closes_failed == 0).await;
    let (_, action, _) = last_entry(&app).await;
    assert_eq!(action, "close_retried");
    let page = confirm(&app, "do=retry&all=failed").await;
    says(&page, "No close that is remembered has failed.");
}

/// A GET never changes anything, whatever it asks for.
#[tokio::test]
async fn a_get_changes_nothing() {
    let app = start().await;
    let lease = app.acquire("held", 900).await["lease_id"]
        .as_str()
        .unwrap()
        .to_owned();
    app.acquire("waits", 300).await;
    let before = app.picture().await;
    for query in [
        "do=pause".to_owned(),
        "do=set&headroom=0.5".to_owned(),
        "do=cancel&ticket=waits".to_owned(),
        format!("do=revoke&lease={lease}"),
        "do=close&session=s&mode=abort".to_owned(),
        "do=retry&all=failed".to_owned(),
    ] {
        assert_eq!(
            app.get(&format!("/confirm?{query}")).await.status,
            200,
            "{query}"
        );
        assert_eq!(
            app.get(&format!("/act?{query}")).await.status,
            405,
            "{query}"
        );
    }
    for page in [
        "/",
        "/engines",
        "/steps",
        "/settings",
        "/steps.csv",
        "/steps.json",
    ] {
        assert_eq!(app.get(page).await.status, 200, "{page}");
    }
    assert_eq!(app.picture().await, before);
    assert!(audit(&app).await.is_empty());
}

/// An act leads back to a page of this service, or is not done at all.
#[tokio::test]
async fn a_foreign_way_back_is_refused() {
    let app = start().await;
    for back in [
        "https://elsewhere.example/",
        "//elsewhere.example/queue",
        "/queue",
        "javascript:alert(1)",
        "queue\r\nset-cookie: a=b",
        "logout",
    ] {
        let answer = send(&app, "/act", &[("do", "pause"), ("back", back)]).await;
        assert_eq!(answer.status, 422, "{back}: {}", answer.text);
        assert!(answer.header("location").is_none() && answer.header("set-cookie").is_none());
    }
    assert_eq!(
        app.get("/v1/state").await.json()["features"]["paused"],
        false
    );
    // Where it came from serves when the form does not say.
    let request = app.client.get(app.url("/confirm?do=pause")).header(
        "referer",
        "https://behind.example/some/prefix/leases?q=a%26b",
    );
    let page = app.send(request).await;
    says(&page, "name=\"back\" value=\"leases?q=a%26b\"");
}

/// What is no form of ours is refused: other types, other sites, too many ids, none at all.
#[tokio::test]
async fn other_forms_are_refused() {
    let app = start().await;
    let post = |kind: &str, body: String| {
        let request = app
            .client
            .post(app.url("/act"))
            .header("content-type", kind)
            .body(body);
        app.send(request)
    };
    assert_eq!(
        post("application/json", "{\"do\":\"pause\"}".into())
            .await
            .status,
        415
    );
    assert_eq!(post("text/plain", "do=pause".into()).await.status, 415);
    assert_eq!(
        post("multipart/form-data", "do=pause".into()).await.status,
        415
    );
    let form = "application/x-www-form-urlencoded";
    assert_eq!(post(form, "do=%ff".into()).await.status, 400);
    assert_eq!(post(form, "do=explode".into()).await.status, 422);
    assert_eq!(post(form, String::new()).await.status, 422);
    assert_eq!(post(form, "do=cancel".into()).await.status, 422);
    let many: Vec<String> = (0..1_001)
        .map(|number| format!("&ticket=t{number}"))
        .collect();
    assert_eq!(
        post(form, format!("do=cancel{}", many.concat()))
            .await
            .status,
        422
    );
    let long = format!("do=cancel&ticket={}", "x".repeat(3 << 20));
    assert_eq!(post(form, long).await.status, 413);
    for (name, value) in [
        ("sec-fetch-site", "cross-site"),
        ("origin", "https://elsewhere.example"),
    ] {
        let request = app
            .client
            .post(app.url("/act"))
            .header("content-type", form)
            .header(name, value)
            .body("do=pause");
        assert_eq!(app.send(request).await.status, 403);
    }
    assert_eq!(
        app.get("/v1/state").await.json()["features"]["paused"],
        false
    );
    assert!(audit(&app).await.is_empty());
}

/// Ids are data on a confirmation too, and a thousand of them fit into one form.
#[tokio::test]
async fn many_ids_and_markup_in_them() {
    let app = start().await;
    app.acquire("held", 1_000).await;
    let mut fields = vec![("do", "cancel")];
    let tickets: Vec<String> = (0..1_000)
        .map(|number| format!("<b>\"{number}&'"))
        .collect();
    for ticket in &tickets {
        app.acquire(ticket, 1).await;
        fields.push(("ticket", ticket));
    }
    let page = send(&app, "/confirm", &fields).await;
    assert_eq!(page.status, 200);
    says(
        &page,
        "1,000 tickets are withdrawn from the queue: 1,000 tokens wanted less.",
    );
    says(&page, "and 900 more");
    assert!(!page.text.contains("<b>"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    let page = act(&app, &fields).await;
    says(&page, "1,000 tickets withdrawn.");
    assert_eq!(app.get("/v1/state").await.json()["queue"]["waiting"], 0);
}

/// A waiter that would be over time is told of before a shorter wait is set.
#[tokio::test]
async fn a_shorter_wait_says_what_it_does() {
    let app = start().await;
    app.acquire("held", 1_000).await;
    app.acquire("waits", 300).await;
    let page = confirm(&app, "do=set&max_wait_s=0").await;
    says(&page, "1 waiter has waited for");
    says(&page, "it goes on at once without a lease");
    act(&app, &[("do", "set"), ("max_wait_s", "0")]).await;
    app.until(|view| view.waiting == 0 && view.policy.max_wait == Span::ZERO)
        .await;
}

/// Who may only look sees no button, is told so in a page, and changes nothing; the audit has the name
/// of the token, and no page has a token.
#[tokio::test]
async fn acts_need_the_right_and_carry_its_name() {
    const VIEW: &str = "view-0123456789abcdef0123456789";
    const ADMIN: &str = "admin-0123456789abcdef012345678";
    let app = Builder {
        tokens: Some(
            "wall:view:view-0123456789abcdef0123456789\nzoe:admin:admin-0123456789abcdef012345678\n",
        ),
        ..Builder::default()
    }
    .start()
    .await;
    let ask = async |token: &str, request: reqwest::RequestBuilder| {
        app.send(request.bearer_auth(token)).await
    };
    let page = ask(VIEW, app.client.get(app.url("/settings"))).await;
    assert_eq!(page.status, 200, "{}", page.text);
    assert!(!page.text.contains("confirm"), "no way to act is shown");
    assert!(page.text.contains("wall") && page.text.contains("zoe"));
    assert!(!page.text.contains(VIEW) && !page.text.contains(ADMIN));
    let pause = [("do", "pause"), ("back", "settings")];
    for request in [
        app.client.get(app.url("/confirm?do=pause")),
        app.form("/confirm", &pause),
        app.form("/act", &pause),
    ] {
        let page = ask(VIEW, request).await;
        assert_eq!(page.status, 403, "{}", page.text);
        assert!(
            page.header("content-type")
                .unwrap()
                .starts_with("text/html")
        );
        assert!(page.text.contains("forbidden"), "{}", page.text);
    }
    assert!(!app.gate.view().policy.paused);

    let page = ask(ADMIN, app.client.get(app.url("/settings"))).await;
    assert!(page.text.contains("action=\"confirm\""));
    let answer = ask(ADMIN, app.form("/act", &pause)).await;
    assert_eq!(answer.status, 303, "{}", answer.text);
    assert!(app.gate.view().policy.paused);
    let audit = ask(VIEW, app.client.get(app.url("/v1/audit"))).await.json();
    assert_eq!(audit["items"][0]["who"], "zoe");
}
