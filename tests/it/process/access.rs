//! Tokens of the real binary: read anew at SIGHUP, and secrets that stand nowhere.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;

use super::fleet;
use crate::api_rights::operations;
use crate::support::process::{Kvgate, command};

const HEAD: &str = "token-of-the-head-0123456789";
const WALL: &str = "token-of-the-wall-0123456789";
const LATER: &str = "token-that-came-later-012345";

/// Writes a token file for its owner only.
fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

async fn status(gate: &Kvgate, token: &str) -> u16 {
    let request = gate.http.get(gate.url("/v1/state")).bearer_auth(token);
    request.send().await.unwrap().status().as_u16()
}

/// Logs in and gives the cookie as a browser sends it back.
async fn logged_in(gate: &Kvgate, token: &str) -> String {
    let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none());
    let request = client.build().unwrap().post(gate.url("/login"));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let answer = request.body(format!("token={token}")).send().await.unwrap();
    assert_eq!(answer.status(), 303);
    let cookie = answer.headers()["set-cookie"].to_str().unwrap();
    cookie.split(';').next().unwrap().to_owned()
}

/// SIGHUP: other tokens count at once, log-ins of removed ones end, a file that cannot be used changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_read_anew_at_sighup() {
    let data = tempfile::tempdir().unwrap();
    let tokens = data.path().join("tokens");
    write(&tokens, &format!("head:admin:{HEAD}\nwall:view:{WALL}\n"));
    let mut gate = Kvgate::serve(data.path(), &["--token-file", tokens.to_str().unwrap()]);
    assert!(!gate.log_text().contains("every user of this machine"));
    assert_eq!(
        (status(&gate, HEAD).await, status(&gate, WALL).await),
        (200, 200)
    );
    let cookie = logged_in(&gate, WALL).await;
    let page = async |gate: &Kvgate| {
        let request = gate.http.get(gate.url("/")).header("cookie", &cookie);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(page(&gate).await, 200);

    write(&tokens, &format!("head:admin:{HEAD}\nlater:view:{LATER}\n"));
    gate.signal("HUP");
    let line = gate.wait_for_log("the token file was read anew");
    assert_eq!(line["fields"]["tokens"], 2);
    assert_eq!(
        (&line["fields"]["added"], &line["fields"]["removed"]),
        (&json!(1), &json!(1))
    );
    assert_eq!((status(&gate, WALL).await, page(&gate).await), (401, 401));
    assert_eq!(
        (status(&gate, HEAD).await, status(&gate, LATER).await),
        (200, 200)
    );

    for bad in [
        format!("head:admin:{HEAD}\nwall:{WALL}:view\n"),
        format!("head:admin:{HEAD}\nwall:view:{HEAD}\n"),
        String::new(),
    ] {
        write(&tokens, &bad);
        gate.signal("HUP");
        gate.wait_for_log("the token file cannot be used; the tokens stay as they were");
        assert_eq!(
            (status(&gate, HEAD).await, status(&gate, LATER).await),
            (200, 200)
        );
    }
    fs::remove_file(&tokens).unwrap();
    gate.signal("HUP");
    gate.wait_for_log("the token file cannot be used; the tokens stay as they were");
    assert_eq!(status(&gate, LATER).await, 200);
    let log = gate.log_text();
    assert!(
        log.contains("line 2: a scope is") && log.contains("holds no token"),
        "{log}"
    );
    for secret in [HEAD, WALL, LATER] {
        assert!(!log.contains(secret), "{log}");
    }
    assert!(gate.terminate().success());
}

/// Without tokens SIGHUP is no reason to end.
#[tokio::test]
async fn sighup_ends_no_service() {
    let data = tempfile::tempdir().unwrap();
    let mut gate = Kvgate::serve(data.path(), &[]);
    gate.signal("HUP");
    gate.wait_for_log("nothing to read anew; other settings need a restart");
    assert_eq!(gate.acquire("t", 1).await.status, 200);
}

/// A token file that others may read is told, one that cannot be used ends the start with 2 and the line's number.
#[tokio::test]
async fn a_token_file_is_looked_at_when_it_is_read() {
    let data = tempfile::tempdir().unwrap();
    let tokens = data.path().join("tokens");
    write(&tokens, &format!("head:admin:{HEAD}\n"));
    fs::set_permissions(&tokens, fs::Permissions::from_mode(0o644)).unwrap();
    let arguments = ["--token-file", tokens.to_str().unwrap()];
    let gate = Kvgate::serve(data.path(), &arguments);
    assert!(
        gate.log_text()
            .contains("every user of this machine may read or change the token file")
    );
    drop(gate);
    for (text, expected) in [
        ("# nothing\n".to_owned(), "no token"),
        (format!("\nhead:{HEAD}\n"), "line 2: a line is"),
        (
            format!("head:admin:{HEAD}\nhead:view:{WALL}\n"),
            "line 2: the name stands on line 1",
        ),
        ("head:admin:short\n".to_owned(), "openssl rand"),
    ] {
        write(&tokens, &text);
        let (code, said) = Kvgate::try_serve(data.path(), &arguments).err().unwrap();
        assert_eq!(code, Some(2), "{said}");
        assert!(
            said.contains("token_file") && said.contains(expected),
            "{said}"
        );
        assert!(
            ![HEAD, WALL, "short"]
                .iter()
                .any(|secret| said.contains(secret)),
            "{said}"
        );
    }
}

/// `kvgate demo` with tokens: its agents work, and nobody else without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_runs_with_tokens() {
    let data = tempfile::tempdir().unwrap();
    let tokens = data.path().join("tokens");
    write(&tokens, &format!("wall:view:{WALL}\n"));
    let mut demo = command(&[
        "demo",
        "--listen",
        "127.0.0.1:0",
        "--sessions",
        "20",
        "--data",
        data.path().to_str().unwrap(),
        "--token-file",
        tokens.to_str().unwrap(),
    ]);
    demo.stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    let mut demo = Demo(demo.spawn().unwrap());
    let http = reqwest::Client::new();
    let patience = std::time::Duration::from_secs(60);
    let admitted = async {
        loop {
            tokio::task::yield_now().await;
            assert!(demo.0.try_wait().unwrap().is_none(), "the demo has ended");
            let Ok(address) = fs::read_to_string(data.path().join("address")) else {
                continue;
            };
            let url = format!("http://{}/v1/leases", address.trim());
            let Ok(answer) = http.get(&url).bearer_auth(WALL).send().await else {
                continue;
            };
            let list: serde_json::Value = answer.json().await.unwrap();
            if list["total"].as_u64().is_some_and(|leases| leases > 0) {
                return http.get(&url).send().await.unwrap().status();
            }
        }
    };
    let without = tokio::time::timeout(patience, admitted).await;
    assert_eq!(without.expect("no agent was admitted"), 401);
}

struct Demo(std::process::Child);

impl Drop for Demo {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every file below a directory, as text.
fn files_in(directory: &Path) -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        texts.push((
            path.display().to_string(),
            String::from_utf8_lossy(&bytes).into_owned(),
        ));
    }
    texts
}

/// Secrets are searched for everywhere that somebody else may look: none is found. The log is at its most talkative.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_stand_nowhere() {
    let fleet = fleet().await;
    let secrets_directory = tempfile::tempdir().unwrap();
    let data = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = secrets_directory.path().join(name);
        write(&path, text);
        path.to_str().unwrap().to_owned()
    };
    const CLIENT: &str = "token-of-a-client-0123456789";
    const WRONG: &str = "token-of-nobody-at-all-01234";
    const KEYS: [&str; 3] = [
        "key-of-the-router-01",
        "key-of-the-engines-01",
        "key-of-their-admin-01",
    ];
    let token_file = file(
        "tokens",
        &format!("head:admin:{HEAD}\nwall:view:{WALL}\nrollout:client:{CLIENT}\n"),
    );
    let [router_key, engine_key, admin_key] =
        [0, 1, 2].map(|number| file(&format!("key-{number}"), KEYS[number]));
    let router = fleet.router_url();
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--session-lifecycle",
        "--metrics-auth",
        "--token-file",
        &token_file,
        "--router-key-file",
        &router_key,
        "--engine-key-file",
        &engine_key,
        "--engine-admin-key-file",
        &admin_key,
    ];
    let gate = Kvgate::serve_under(&["env", "RUST_LOG=trace"], data.path(), &arguments);
    let mut seen = Vec::new();

    // Calls of all kinds, good ones and slips.
    let cookie = logged_in(&gate, HEAD).await;
    let client = |method: reqwest::Method, path: &str| gate.http.request(method, gate.url(path));
    for (method, path) in operations() {
        for request in [
            client(method.clone(), &path),
            client(method.clone(), &path).bearer_auth(WRONG),
            client(method.clone(), &path).bearer_auth(CLIENT),
            client(method.clone(), &path).header("cookie", &cookie),
            client(method.clone(), &path).header("cookie", format!("kvgate_login={WRONG}")),
            client(method.clone(), &path).basic_auth("user", Some(WRONG)),
            client(method.clone(), &format!("{path}?token={CLIENT}")),
            client(method.clone(), &path)
                .bearer_auth(HEAD)
                .header("origin", "http://attacker.example"),
            client(method.clone(), &path)
                .bearer_auth(HEAD)
                .json(&json!({"unknown": 1})),
        ] {
            let answer = request.send().await.unwrap();
            seen.push((format!("{method} {path}"), answer.text().await.unwrap()));
        }
    }
    let acquire =
        json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 10, "wait_s": 0});
    let granted = client(reqwest::Method::POST, "/v1/leases")
        .bearer_auth(CLIENT)
        .json(&acquire);
    assert_eq!(granted.send().await.unwrap().status(), 200);
    let closed = client(reqwest::Method::POST, "/v1/sessions/s/close").bearer_auth(CLIENT);
    let closed = closed.json(&json!({"mode": "abort"})).send().await.unwrap();
    assert_eq!(closed.status(), 202);
    let wrong = client(reqwest::Method::POST, "/login")
        .header("content-type", "application/x-www-form-urlencoded");
    let wrong = wrong
        .body(format!("token={WRONG}&back=/"))
        .send()
        .await
        .unwrap();
    assert_eq!(wrong.status(), 401);
    seen.push(("the log-in form".to_owned(), wrong.text().await.unwrap()));

    // What an operator with every right is shown.
    let pages = [
        "/",
        "/login",
        "/queue",
        "/leases",
        "/engines",
        "/sessions",
        "/closes",
        "/decisions",
        "/steps",
        "/settings",
        "/metrics",
    ];
    let reads = operations()
        .into_iter()
        .filter(|(method, _)| *method == reqwest::Method::GET);
    for path in reads.map(|(_, path)| path).chain(pages.map(str::to_owned)) {
        for request in [
            client(reqwest::Method::GET, &path).bearer_auth(HEAD),
            client(reqwest::Method::GET, &path).header("cookie", &cookie),
        ] {
            let answer = request.send().await.unwrap();
            seen.push((format!("GET {path}"), answer.text().await.unwrap()));
        }
    }
    assert!(
        seen.iter()
            .any(|(_, text)| text.contains("kvgate-backup") || text.contains("\"header\"")),
        "a backup is among it"
    );
    for extra in [&["serve", "--print-config"][..], &["check"]] {
        let mut all = extra.to_vec();
        all.extend(arguments);
        let output = command(&all).env("RUST_LOG", "trace").output().unwrap();
        seen.push((
            format!("{extra:?}"),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        ));
        seen.push((
            format!("{extra:?}"),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ));
    }
    let log = gate.log_text();
    assert!(
        log.contains("\"TRACE\""),
        "the log is at its most talkative"
    );
    seen.push(("the log".to_owned(), log));
    assert!(gate.terminate().success());
    seen.extend(files_in(data.path()));

    let id = cookie.split_once('=').unwrap().1;
    let secrets = [HEAD, WALL, CLIENT, WRONG, id].into_iter().chain(KEYS);
    for secret in secrets {
        for (place, text) in &seen {
            let at = text.find(secret);
            let shown = at.map(|at| &text[at.saturating_sub(200)..(at + 100).min(text.len())]);
            assert_eq!(shown, None, "{secret} in {place}");
        }
    }
}
