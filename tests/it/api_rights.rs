//! Who may do what when tokens are on: tokens, scopes, log-ins of browsers, and ways around them that lead nowhere.

use kvgate::access::TokenSet;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{Answer, Builder, TestApp};

pub const VIEW: &str = "view-token-of-the-wall-1";
pub const CLIENT: &str = "client-token-of-rollout-1";
pub const ADMIN: &str = "admin-token-of-the-head-1";
const TOKENS: &str = "wall:view:view-token-of-the-wall-1\n\
                      rollout:client:client-token-of-rollout-1\n\
                      head:admin:admin-token-of-the-head-1\n";

async fn with_tokens() -> TestApp {
    guarded(false, Vec::new()).await
}

async fn guarded(metrics_auth: bool, allowed_hosts: Vec<&'static str>) -> TestApp {
    Builder {
        tokens: Some(TOKENS),
        metrics_auth,
        allowed_hosts,
        ..Builder::default()
    }
    .start()
    .await
}

/// Method and path of every operation of the contract, with an id where one is asked for.
pub fn operations() -> Vec<(Method, String)> {
    let document: Value = serde_json::from_str(&kvgate::http::openapi()).unwrap();
    let mut operations = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let parts = path
            .split('/')
            .map(|part| if part.starts_with('{') { "x" } else { part });
        let path: Vec<&str> = parts.collect();
        for method in methods.as_object().unwrap().keys() {
            operations.push((method.to_uppercase().parse().unwrap(), path.join("/")));
        }
    }
    assert!(operations.len() > 25, "{operations:?}");
    operations
}

fn ask(app: &TestApp, method: &Method, path: &str) -> RequestBuilder {
    app.client.request(method.clone(), app.url(path))
}

async fn sent(app: &TestApp, method: &Method, path: &str, token: &str) -> Answer {
    app.send(ask(app, method, path).bearer_auth(token)).await
}

/// What the contract says of rights, in its own words and apart from the table of the service.
fn scopes_that_may(method: &Method, path: &str) -> &'static [&'static str] {
    let admin_only = ["/v1/backup", "/v1/leases/x/revoke"];
    if admin_only.contains(&path) || path == "/v1/settings" && *method != Method::GET {
        return &[ADMIN];
    }
    if *method == Method::GET {
        return &[VIEW, CLIENT, ADMIN];
    }
    &[CLIENT, ADMIN]
}

/// X01: every call of the contract needs its right, and the four that need none are these.
#[tokio::test]
async fn each_call_needs_its_scope() {
    let app = with_tokens().await;
    let open = ["/healthz", "/readyz", "/version", "/metrics", "/problems/x"];
    for (method, path) in operations() {
        let what = format!("{method} {path}");
        let without = app.send(ask(&app, &method, &path)).await;
        if open.contains(&path.as_str()) {
            assert!(
                without.status < 500 && ![401, 403].contains(&without.status),
                "{what}"
            );
            let wrong = sent(&app, &method, &path, "no-such-token-anywhere").await;
            assert_eq!(
                wrong.status, without.status,
                "{what}: nobody has to be known here"
            );
            continue;
        }
        without.is_problem(401, "unauthorized");
        let wrong = sent(&app, &method, &path, "no-such-token-anywhere").await;
        wrong.is_problem(401, "unauthorized");
        for token in [VIEW, CLIENT, ADMIN] {
            let answer = sent(&app, &method, &path, token).await;
            if scopes_that_may(&method, &path).contains(&token) {
                assert!(
                    ![401, 403].contains(&answer.status),
                    "{what} {token}: {}",
                    answer.text
                );
            } else {
                let problem = answer.is_problem(403, "forbidden");
                assert!(
                    problem["detail"].as_str().unwrap().contains("scope"),
                    "{problem}"
                );
            }
        }
    }
    assert_eq!(
        sent(&app, &Method::HEAD, "/v1/backup", VIEW).await.status,
        403
    );
}

/// `/metrics` needs a token only where that is set.
#[tokio::test]
async fn metrics_are_open_unless_they_are_set_not_to_be() {
    let app = guarded(true, Vec::new()).await;
    app.get("/metrics").await.is_problem(401, "unauthorized");
    assert_eq!(sent(&app, &Method::GET, "/metrics", VIEW).await.status, 200);
    for path in ["/healthz", "/readyz", "/version"] {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
}

/// Without tokens everybody on the machine has every right, as before.
#[tokio::test]
async fn without_tokens_nothing_is_asked_for() {
    let app = TestApp::start().await;
    assert_eq!(
        sent(&app, &Method::GET, "/v1/backup", "whatever")
            .await
            .status,
        200
    );
    assert_eq!(app.get("/").await.status, 200);
    let login = app.get("/login").await;
    assert_eq!((login.status, login.header("location")), (303, Some("./")));
}

/// Work with a client's token: acquired, renewed, released, as without tokens.
#[tokio::test]
async fn a_client_does_its_work() {
    let app = with_tokens().await;
    let body = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1, "wait_s": 0});
    let post = |path: String, body: &Value| {
        app.client
            .post(app.url(&path))
            .bearer_auth(CLIENT)
            .json(body)
    };
    let lease = app.send(post("/v1/leases".to_owned(), &body)).await.json();
    assert_eq!(lease["action"], "admit");
    let lease = format!("/v1/leases/{}", lease["lease_id"].as_str().unwrap());
    let renewed = app
        .send(post(format!("{lease}/renew"), &json!({"ttl_s": 60})))
        .await;
    assert_eq!(renewed.status, 200, "{}", renewed.text);
    let released = sent(&app, &Method::DELETE, &lease, CLIENT).await;
    assert_eq!(released.json()["outcome"], "released");
}

/// Forms of the header that are no token, or two, are refused; other schemes are nobody.
#[tokio::test]
async fn forms_of_the_header() {
    let app = with_tokens().await;
    let status = async |lines: &str| {
        let request = format!(
            "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n"
        );
        app.raw(request.as_bytes()).await
    };
    let good = format!("Bearer {CLIENT}");
    for value in [
        &good,
        &format!("bearer {CLIENT}"),
        &format!("BEARER   {CLIENT} "),
    ] {
        let answer = status(&format!("Authorization: {value}\r\n")).await;
        assert_eq!(answer.status, 200, "{value}: {}", answer.text);
    }
    let bad = [
        "Authorization: Bearer".to_owned(),
        "Authorization: Bearer ".to_owned(),
        "Authorization:".to_owned(),
        format!("Authorization: {CLIENT}"),
        format!("Authorization: Bearer{CLIENT}"),
        format!("Authorization: Bearer\t{CLIENT}"),
        format!("Authorization: Bearer \"{CLIENT}\""),
        format!("Authorization: Bearer {CLIENT},"),
        format!("Authorization: Bearer {CLIENT} {CLIENT}"),
        format!("Authorization: Bearer {}", &CLIENT[..CLIENT.len() - 1]),
        format!("Authorization: Bearer {CLIENT}0"),
        format!("Authorization: Bearer {}", CLIENT.to_uppercase()),
        format!("Authorization: Bearer rollout:client:{CLIENT}"),
        format!("Authorization: Basic {CLIENT}"),
        format!("Authorization: Token {CLIENT}"),
        format!("Authorization: {good}\r\nAuthorization: {good}"),
        format!("Authorization: {good}\r\nAuthorization: Bearer wrong-token-0123456"),
        format!("Authorization: Bearer wrong-token-0123456\r\nAuthorization: {good}"),
        format!("X-Authorization: {good}"),
        format!("Proxy-Authorization: {good}"),
        format!("Cookie: kvgate_login={CLIENT}"),
        format!("Cookie: token={CLIENT}"),
        "X-Forwarded-User: head".to_owned(),
        "Authorization: Bearer \u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}"
            .to_owned(),
    ];
    for lines in &bad {
        status(&format!("{lines}\r\n"))
            .await
            .is_problem(401, "unauthorized");
    }
    // What a proxy with a password of its own sends on is nobody's token, and disturbs no log-in.
    let cookie = logged_in(&app, VIEW).await;
    let answer = status(&format!(
        "Authorization: Basic dTpw\r\nCookie: {cookie}\r\n"
    ))
    .await;
    assert_eq!(answer.status, 200);
    let answer = status(&format!(
        "Authorization: Bearer wrong-token-0123456\r\nCookie: {cookie}\r\n"
    ))
    .await;
    answer.is_problem(401, "unauthorized");
}

/// Guessing costs: each wrong token ends its connection, a right one and none at all do not.
#[tokio::test]
async fn each_guess_costs_a_connection() {
    let app = with_tokens().await;
    let ends = |answer: &Answer| answer.header("connection") == Some("close");
    for guess in ["a", "wrong-token-0123456", &CLIENT[1..]] {
        let answer = sent(&app, &Method::GET, "/v1/state", guess).await;
        assert!(answer.status == 401 && ends(&answer), "{guess}");
        let answer = sent(&app, &Method::GET, "/", guess).await;
        assert!(answer.status == 401 && ends(&answer), "{guess}");
        let form = app.form("/login", &[("token", guess)]);
        let answer = app.send(form).await;
        assert!(answer.status == 401 && ends(&answer), "{guess}");
    }
    // Two requests at once on one connection: the one behind a guess is never read.
    let guess = format!(
        "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong-token-0123456\r\n\r\n\
         GET /v1/state HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {CLIENT}\r\n\r\n"
    );
    let answer = app.raw(guess.as_bytes()).await;
    assert_eq!(answer.status, 401);
    assert!(!answer.text.contains("HTTP/1.1"), "{}", answer.text);
    assert!(!ends(&sent(&app, &Method::GET, "/v1/state", CLIENT).await));
    assert!(!ends(&app.get("/v1/state").await), "no token is no guess");
}

/// Who sends much with a wrong token, or to where it may not, sees why it is refused and no broken connection.
#[tokio::test]
async fn a_refusal_arrives_before_a_large_body_is_through() {
    let app = with_tokens().await;
    let large = "x".repeat(3 << 20);
    for (token, status) in [("wrong-token-0123456", 401), (VIEW, 403)] {
        for _ in 0..20 {
            let request = app.client.post(app.url("/v1/batch")).bearer_auth(token);
            let request = request.header("content-type", "application/json");
            assert_eq!(app.send(request.body(large.clone())).await.status, status);
        }
    }
}

/// Ways to write a path: the right that counts is that of the route which would be served.
#[tokio::test]
async fn no_way_to_write_a_path_leads_around_a_right() {
    let app = with_tokens().await;
    let get = async |path: &str, token: Option<&str>| {
        let token = token.map_or_else(String::new, |token| {
            format!("Authorization: Bearer {token}\r\n")
        });
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{token}Connection: close\r\n\r\n");
        app.raw(request.as_bytes()).await
    };
    let to = |target: &str| {
        let bare = target.trim_start_matches('/');
        let (first, rest) = bare.split_once('/').unwrap();
        vec![
            format!("/{target}"),
            format!("//{target}"),
            format!("/{first}//{rest}"),
            format!("/.{target}"),
            format!("/./{bare}"),
            format!("/..{target}"),
            format!("/%2e%2e{target}"),
            format!("/healthz/..{target}"),
            format!("/healthz/%2e%2e{target}"),
            format!("/healthz%2f..{target}"),
            format!("/healthz;{target}"),
            format!("/healthz\\..\\{bare}"),
            format!("/static/..{target}"),
            format!("/static/%2e%2e/{bare}"),
            format!("/static/..%2f..%2f{bare}"),
            format!("/problems/..{target}"),
            format!("/problems/..%2f{bare}"),
            format!("/login/..{target}"),
            format!("/metrics{target}"),
            target.to_uppercase(),
            target.replace('/', "%2F"),
            target.replace('v', "%76"),
            format!("{target}/"),
            format!("{target}/."),
            format!("{target}%00"),
            format!("{target}%20"),
            format!("{target};a=b"),
            format!("{target}.json"),
            format!("http://localhost{target}"),
            format!("http://localhost/{target}"),
            format!("http://localhost/healthz/..{target}"),
        ]
    };
    for path in to("/v1/state") {
        let answer = get(&path, None).await;
        assert!(
            matches!(answer.status, 400 | 401 | 404),
            "{path}: {}",
            answer.text
        );
        assert!(!answer.text.contains("ceiling"), "{path}");
        let wrong = get(&path, Some("wrong-token-0123456")).await;
        assert!(!wrong.text.contains("ceiling"), "{path}");
    }
    for path in to("/v1/backup") {
        let answer = get(&path, Some(CLIENT)).await;
        assert!(
            matches!(answer.status, 400 | 403 | 404),
            "{path}: {}",
            answer.text
        );
    }
    // A path that leads to an id is that id, and needs what its route does.
    get("/v1/leases/..%2Fbackup", Some(VIEW))
        .await
        .is_problem(404, "lease_not_found");
    get("/v1/leases/..%2Fbackup", None)
        .await
        .is_problem(401, "unauthorized");
    // Neither does another spelling of the method.
    for lines in [
        "X-HTTP-Method-Override: DELETE",
        "X-HTTP-Method: DELETE",
        "X-Original-URL: /healthz",
        "X-Rewrite-URL: /healthz",
    ] {
        let request = format!(
            "DELETE /v1/tickets/t HTTP/1.1\r\nHost: localhost\r\n{lines}\r\nAuthorization: Bearer {VIEW}\r\nConnection: close\r\n\r\n"
        );
        app.raw(request.as_bytes())
            .await
            .is_problem(403, "forbidden");
    }
    let request = format!(
        "delete /v1/tickets/t HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {VIEW}\r\nConnection: close\r\n\r\n"
    );
    app.raw(request.as_bytes())
        .await
        .is_problem(403, "forbidden");
}

/// Logs in and gives the cookie as a browser sends it back.
async fn logged_in(app: &TestApp, token: &str) -> String {
    let form = app.form("/login", &[("token", token)]);
    let answer = app.send(form).await;
    assert_eq!(answer.status, 303, "{}", answer.text);
    let cookie = answer.header("set-cookie").unwrap();
    cookie.split(';').next().unwrap().to_owned()
}

/// A browser gets the form, logs in with a token, comes back to what it asked for, and logs out.
#[tokio::test]
async fn a_browser_logs_in_and_out() {
    let app = with_tokens().await;
    let page = app.get("/?a=%22%3E%3Cscript%3E").await;
    assert_eq!(page.status, 401);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    assert_eq!(page.header("www-authenticate"), Some("Bearer"));
    assert_eq!(page.header("cache-control"), Some("no-store"));
    assert!(
        page.text
            .contains("<form method=\"post\" action=\"login\">"),
        "{}",
        page.text
    );
    assert!(
        page.text
            .contains("name=\"back\" value=\"/?a=%22%3E%3Cscript%3E\""),
        "{}",
        page.text
    );
    assert!(
        !page.text.contains("ceiling"),
        "nothing of the page is shown"
    );
    let form = [("token", VIEW), ("back", "/?a=1")];
    let answer = app.send(app.form("/login", &form)).await;
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, Some("./?a=1"))
    );
    let set = answer.header("set-cookie").unwrap();
    for part in [
        "; HttpOnly",
        "; SameSite=Strict",
        "; Path=/",
        "; Max-Age=43200",
    ] {
        assert!(set.contains(part), "{set}");
    }
    assert!(
        !set.contains("Secure"),
        "the browser came in the clear: {set}"
    );
    assert!(!set.contains(VIEW), "the cookie is not the token");
    let cookie = set.split(';').next().unwrap().to_owned();
    let get = async |path: &str| {
        app.send(app.client.get(app.url(path)).header("cookie", &cookie))
            .await
    };
    assert!(get("/").await.text.contains("ceiling"));
    assert_eq!(get("/v1/state").await.status, 200, "pages read the API");
    get("/v1/backup").await.is_problem(403, "forbidden");
    let page = get("/login").await;
    assert!(
        page.status == 200 && page.text.contains("<b>wall</b>"),
        "{}",
        page.text
    );
    let leave = app
        .client
        .post(app.url("/logout"))
        .header("cookie", &cookie);
    let answer = app.send(leave).await;
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, Some("./login"))
    );
    assert!(answer.header("set-cookie").unwrap().contains("Max-Age=0"));
    assert_eq!(get("/").await.status, 401);
    get("/v1/state").await.is_problem(401, "unauthorized");
}

/// A log-in leads to a path of our own, whatever the form says.
#[tokio::test]
async fn a_login_leads_to_no_other_host() {
    let app = with_tokens().await;
    for back in [
        "//attacker.example",
        "/\\attacker.example",
        "http://attacker.example",
        "",
        "/\r\nSet-Cookie: a=b",
    ] {
        let form = [("token", VIEW), ("back", back)];
        let answer = app.send(app.form("/login", &form)).await;
        assert_eq!(
            (answer.status, answer.header("location")),
            (303, Some("./")),
            "{back:?}"
        );
        assert_eq!(answer.headers.get_all("set-cookie").iter().count(), 1);
    }
    let asked = b"GET //attacker.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert!(!app.raw(asked).await.text.contains("attacker"));
}

/// What is no form, a wrong token and markup in it.
#[tokio::test]
async fn bad_logins_are_refused() {
    let app = with_tokens().await;
    let post = |kind: &'static str, body: String| {
        app.client
            .post(app.url("/login"))
            .header("content-type", kind)
            .body(body)
    };
    const FORM: &str = "application/x-www-form-urlencoded";
    for body in [
        "token=wrong-token-0123456",
        "token=",
        "",
        "Token=x",
        "%ff=%ff&&=",
        "token=%3Cscript%3E",
    ] {
        let answer = app.send(post(FORM, body.to_owned())).await;
        assert_eq!(answer.status, 401, "{body}");
        assert!(
            answer.text.contains("not known") && !answer.text.contains("<script"),
            "{}",
            answer.text
        );
        assert_eq!(answer.header("set-cookie"), None);
    }
    for kind in [
        "application/json",
        "text/plain",
        "multipart/form-data; boundary=a",
    ] {
        let answer = app.send(post(kind, format!("token={VIEW}"))).await;
        answer.is_problem(415, "unsupported_media_type");
    }
    let large = app
        .send(post(FORM, format!("token={}", "a".repeat(65 << 10))))
        .await;
    large.is_problem(413, "body_too_large");
    let in_address = app.client.post(app.url(&format!("/login?token={VIEW}")));
    app.send(in_address)
        .await
        .is_problem(400, "invalid_request");
    // A log-in that another site asks for would put its own identity onto the browser.
    let foreign = app.form("/login", &[("token", VIEW)]);
    let foreign = foreign.header("origin", "http://attacker.example");
    app.send(foreign).await.is_problem(403, "forbidden");
}

/// X03: a cookie gives no right to pages of other origins, and none that its token has not.
#[tokio::test]
async fn a_cookie_is_no_way_around() {
    let app = with_tokens().await;
    let cookie = logged_in(&app, CLIENT).await;
    let cancel = |origin: Option<&str>| {
        let request = app
            .client
            .delete(app.url("/v1/tickets/t"))
            .header("cookie", &cookie);
        match origin {
            Some(origin) => request.header("origin", origin),
            None => request,
        }
    };
    for origin in ["http://attacker.example", "null", "http://127.0.0.1:1"] {
        app.send(cancel(Some(origin)))
            .await
            .is_problem(403, "forbidden");
    }
    let own = format!("http://{}", app.address);
    for origin in [None, Some(own.as_str())] {
        assert_eq!(app.send(cancel(origin)).await.status, 200);
    }
    let viewer = logged_in(&app, VIEW).await;
    let write = app
        .client
        .delete(app.url("/v1/tickets/t"))
        .header("cookie", viewer);
    app.send(write.header("origin", &own))
        .await
        .is_problem(403, "forbidden");
}

/// Behind a proxy that ends TLS the cookie goes over TLS only, and the origin of the proxy may write.
#[tokio::test]
async fn cookies_of_a_proxy_with_tls_are_for_tls() {
    let app = guarded(false, vec!["https://gate.example"]).await;
    let log_in = |origin: &'static str| {
        let form = app.form("/login", &[("token", VIEW)]);
        form.header("host", "gate.example").header("origin", origin)
    };
    let answer = app.send(log_in("https://gate.example")).await;
    assert_eq!(answer.status, 303, "{}", answer.text);
    assert!(answer.header("set-cookie").unwrap().contains("; Secure"));
    for origin in [
        "http://gate.example",
        "https://gate.example:8443",
        "https://other.gate.example",
    ] {
        app.send(log_in(origin)).await.is_problem(403, "forbidden");
    }
}

/// TokenSet that are replaced while the service runs: log-ins with a removed one end.
#[tokio::test]
async fn replaced_tokens_count_at_once() {
    let app = with_tokens().await;
    let (wall, head) = (logged_in(&app, VIEW).await, logged_in(&app, ADMIN).await);
    let with = async |cookie: &str| {
        let request = app
            .client
            .get(app.url("/v1/state"))
            .header("cookie", cookie);
        app.send(request).await.status
    };
    assert_eq!((with(&wall).await, with(&head).await), (200, 200));
    let fewer = format!("head:admin:{ADMIN}\nnew:view:token-of-a-new-reader");
    app.access.replace(TokenSet::parse(&fewer).unwrap());
    assert_eq!((with(&wall).await, with(&head).await), (401, 200));
    assert_eq!(
        sent(&app, &Method::GET, "/v1/state", VIEW).await.status,
        401
    );
    assert_eq!(
        sent(&app, &Method::GET, "/v1/state", "token-of-a-new-reader")
            .await
            .status,
        200
    );
}

/// While the service starts, who is not known is told that, and nothing of its state.
#[tokio::test]
async fn rights_come_before_the_state_of_the_service() {
    let app = Builder {
        tokens: Some(TOKENS),
        ready: false,
        ..Builder::default()
    }
    .start()
    .await;
    app.get("/v1/state").await.is_problem(401, "unauthorized");
    sent(&app, &Method::GET, "/v1/state", VIEW)
        .await
        .is_problem(503, "recovering");
    assert_eq!(app.get("/healthz").await.status, 200);
}
