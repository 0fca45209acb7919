//! A scripted gate: the contract over a small queue in memory, and every kind of trouble.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use crate::ALL;

/// Longest time that a test waits for something that must happen.
const SOON: Duration = Duration::from_secs(30);

/// How calls are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Behaviour {
    Normal,
    /// Calls are taken and never answered; nothing comes of them.
    Hang,
    /// Calls have their effect and are never answered.
    Mute,
    /// Calls have their effect after so long, and are answered then.
    Slow(Duration),
    /// The connection ends.
    Cut,
    /// What comes is no HTTP.
    Garbage,
    /// The body is this, with status 200.
    Says(&'static str),
    /// An answer that never ends.
    Endless,
    /// A problem.
    Problem(u16, &'static str),
    /// What a proxy says in words of its own.
    Html(u16),
}

/// A call as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub body: Value,
}

/// What the gate knows and saw.
#[derive(Debug)]
pub struct Book {
    pub capacity: u64,
    pub claim_grace_s: f64,
    pub bypass_in_s: f64,
    /// Waiting calls are told `wait` at once.
    pub never_waits: bool,
    /// Whether usage reports are refused.
    pub refuses_usage: bool,
    /// Only calls whose path begins so misbehave.
    pub only: &'static str,
    pub behaviour: Behaviour,
    /// Tickets that wait, with their tokens, in order.
    pub waiting: Vec<(String, u64)>,
    /// Held leases: id to ticket and tokens.
    pub leases: BTreeMap<String, (String, u64)>,
    /// Tickets in the order of their grants.
    pub granted: Vec<String>,
    pub requests: Vec<Seen>,
    pub local_bypasses: BTreeMap<String, u64>,
    /// Session, mode and reason.
    pub closes: Vec<(String, String, String)>,
    pub usage: Vec<Value>,
    sessions: BTreeMap<String, String>,
    /// Why a ticket is not to start any more.
    ended: BTreeMap<String, &'static str>,
    /// Leases that the gate took back.
    lost: BTreeSet<String>,
}

impl Book {
    pub fn reserved(&self) -> u64 {
        self.leases.values().map(|(_, tokens)| tokens).sum()
    }

    pub fn waiting_tickets(&self) -> Vec<String> {
        self.waiting.iter().map(|(name, _)| name.clone()).collect()
    }

    pub fn bodies(&self, path: &str) -> Vec<Value> {
        let of_path = self.requests.iter().filter(|seen| seen.path == path);
        of_path.map(|seen| seen.body.clone()).collect()
    }

    pub fn count(&self, method: &str, path: &str) -> usize {
        let all = self.requests.iter();
        all.filter(|seen| seen.method == method && seen.path.contains(path))
            .count()
    }

    /// Waiting tickets that have asked in a call that stays open, so that they know of their place.
    pub fn attended(&self) -> BTreeSet<String> {
        let waiting = self.waiting_tickets();
        let open = self
            .requests
            .iter()
            .filter(|seen| seen.body["wait_s"] != 0.0);
        open.flat_map(|seen| {
            let shared = seen.body["ticket_ids"].as_array().cloned();
            shared.unwrap_or_else(|| vec![seen.body["ticket_id"].clone()])
        })
        .filter_map(|ticket| ticket.as_str().map(str::to_owned))
        .filter(|ticket| waiting.contains(ticket))
        .collect()
    }

    /// Forgets a waiting ticket.
    pub fn forget(&mut self, ticket: &str) {
        self.waiting.retain(|(name, _)| name != ticket);
    }

    /// Takes all leases back, as at the end of their life.
    pub fn expire_all(&mut self) {
        let ids: Vec<String> = self.leases.keys().cloned().collect();
        self.leases.clear();
        self.lost.extend(ids);
    }

    fn grant(&mut self) {
        while let Some((ticket, tokens)) = self.waiting.first().cloned() {
            if self.reserved() + tokens > self.capacity {
                return;
            }
            self.waiting.remove(0);
            self.granted.push(ticket.clone());
            let id = format!("{}-fake", self.granted.len());
            self.leases.insert(id, (ticket, tokens));
        }
    }

    /// The decision about a ticket; none while it waits.
    fn decision(&self, ticket: &str) -> Option<Value> {
        let session = self.sessions.get(ticket);
        if let Some(reason) = self.ended.get(ticket) {
            return Some(
                json!({"action": "cancelled", "reason": reason, "ticket_id": ticket, "session_id": session}),
            );
        }
        let (id, (_, tokens)) = self.leases.iter().find(|(_, (held, _))| held == ticket)?;
        Some(json!({
            "action": "admit", "reason": "capacity_available", "ticket_id": ticket, "session_id": session,
            "lease_id": id, "reservation_tokens": tokens, "epoch": 1, "ttl_s": 600.0, "waited_s": 0.25,
            "expires_in_s": 600.0, "expires_at": "2026-01-01T00:00:00.000Z", "repeated": false,
            "session_reopened": false,
        }))
    }

    fn acquire(&mut self, body: &Value) -> (u16, Value) {
        if let Some(told) = body["local_bypasses"].as_object() {
            for (reason, count) in told {
                *self.local_bypasses.entry(reason.clone()).or_default() += count.as_u64().unwrap();
            }
        }
        let ticket = body["ticket_id"].as_str().unwrap().to_owned();
        if body["protected"] == true {
            return (
                200,
                json!({"action": "bypass", "reason": "protected", "ticket_id": ticket}),
            );
        }
        let is_known = self.waiting.iter().any(|(name, _)| *name == ticket);
        if !is_known && self.decision(&ticket).is_none() {
            let sum = |name: &str| body[name].as_u64().unwrap_or_default();
            let tokens = sum("prompt_tokens") + sum("max_new_tokens") + sum("reservation_tokens");
            let session = body["session_id"].as_str().unwrap().to_owned();
            self.sessions.insert(ticket.clone(), session);
            self.waiting.push((ticket.clone(), tokens));
            self.grant();
        }
        let Some(mut decision) = self.decision(&ticket) else {
            return (202, self.wait());
        };
        if let Some(ttl) = body.get("ttl_s").filter(|_| decision["action"] == "admit") {
            decision["ttl_s"] = ttl.clone();
        }
        (200, decision)
    }

    fn wait(&self) -> Value {
        json!({
            "action": "wait", "reason": "capacity_exhausted", "bypass_in_s": self.bypass_in_s,
            "claim_grace_s": self.claim_grace_s, "poll_after_s": 1.0, "position": 1,
        })
    }

    fn release(&mut self, lease: &str, body: &Value) -> (u16, Value) {
        if self.lost.contains(lease) {
            return (410, json!({"code": "lease_expired"}));
        }
        let usage: serde_json::Map<String, Value> = body.as_object().cloned().unwrap_or_default();
        let usage: serde_json::Map<String, Value> = usage
            .into_iter()
            .filter(|(key, _)| !matches!(key.as_str(), "op" | "lease_id"))
            .collect();
        if self.refuses_usage && !usage.is_empty() {
            return (422, json!({"code": "invalid_request"}));
        }
        self.usage.push(Value::Object(usage));
        match self.leases.remove(lease) {
            Some((ticket, _)) => {
                self.ended.insert(ticket, "ticket_finished");
                self.grant();
                (200, json!({"outcome": "released"}))
            }
            None => (200, json!({"outcome": "already_released"})),
        }
    }

    fn renew(&self, lease: &str, body: &Value) -> (u16, Value) {
        if self.leases.contains_key(lease) {
            (200, json!({"lease_id": lease, "ttl_s": body["ttl_s"]}))
        } else {
            (410, json!({"code": "lease_expired"}))
        }
    }

    fn cancel(&mut self, ticket: &str) -> (u16, Value) {
        self.forget(ticket);
        self.leases.retain(|_, (held, _)| held != ticket);
        self.ended.insert(ticket.to_owned(), "cancelled");
        self.grant();
        (200, json!({"outcome": "withdrawn"}))
    }

    fn close(&mut self, session: &str, body: &Value, waits: bool) -> (u16, Value) {
        let word = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        self.closes
            .push((session.to_owned(), word("mode"), word("reason")));
        for (ticket, _) in self.waiting.clone() {
            if self.sessions[&ticket] == session {
                self.forget(&ticket);
                self.ended.insert(ticket, "session_closed");
            }
        }
        self.grant();
        let engine = json!({
            "url": "http://engine", "state": "pending", "attempts": 0, "last_status": null, "last_error": null,
        });
        let state = if waits { "done" } else { "delivering" };
        (
            202,
            json!({"close_id": "c-1", "session_id": session, "state": state, "engines": [engine]}),
        )
    }

    fn operation(&mut self, body: &Value) -> (u16, Value) {
        let id = |name: &str| body[name].as_str().unwrap().to_owned();
        match body["op"].as_str().unwrap() {
            "acquire" => self.acquire(body),
            "release" => self.release(&id("lease_id"), body),
            "renew" => self.renew(&id("lease_id"), body),
            "cancel" => self.cancel(&id("ticket_id")),
            "close" => self.close(&id("session_id"), body, false),
            other => panic!("no operation {other}"),
        }
    }
}

/// The scripted gate. Dropped, it stops.
pub struct Fake {
    address: SocketAddr,
    world: Arc<World>,
    serving: Option<JoinHandle<()>>,
    /// Bound and never listening: it keeps the port while no gate listens.
    _hold: TcpSocket,
}

struct World {
    book: Mutex<Book>,
    changes: watch::Sender<u64>,
}

impl World {
    fn change<T>(&self, work: impl FnOnce(&mut Book) -> T) -> T {
        let result = work(&mut self.book.lock().unwrap());
        self.changes.send_modify(|number| *number += 1);
        result
    }

    fn look<T>(&self, work: impl FnOnce(&Book) -> T) -> T {
        work(&self.book.lock().unwrap())
    }

    /// Waits until `work` gives something, but not longer than to this time.
    async fn until<T>(&self, ends_at: Instant, work: impl Fn(&Book) -> Option<T>) -> Option<T> {
        let mut changes = self.changes.subscribe();
        loop {
            if let Some(result) = self.look(&work) {
                return Some(result);
            }
            timeout_at(ends_at, changes.changed()).await.ok()?.ok()?;
        }
    }
}

impl Fake {
    pub fn start() -> Self {
        let hold = socket(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let address = hold.local_addr().unwrap();
        let mut fake = Self {
            address,
            world: Arc::new(World {
                book: Mutex::new(Book {
                    capacity: ALL,
                    claim_grace_s: 10.0,
                    bypass_in_s: 600.0,
                    never_waits: false,
                    refuses_usage: false,
                    only: "",
                    behaviour: Behaviour::Normal,
                    waiting: Vec::new(),
                    leases: BTreeMap::new(),
                    granted: Vec::new(),
                    requests: Vec::new(),
                    local_bypasses: BTreeMap::new(),
                    closes: Vec::new(),
                    usage: Vec::new(),
                    sessions: BTreeMap::new(),
                    ended: BTreeMap::new(),
                    lost: BTreeSet::new(),
                }),
                changes: watch::Sender::new(0),
            }),
            serving: None,
            _hold: hold,
        };
        fake.resume();
        fake
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Refuses connections, and cuts those that are there.
    pub async fn stop(&mut self) {
        let serving = self.serving.take().unwrap();
        serving.abort();
        // It is gone, its listener with it.
        assert!(serving.await.unwrap_err().is_cancelled());
    }

    /// Takes connections at the same address again.
    pub fn resume(&mut self) {
        let listener = socket(self.address).listen(1024).unwrap();
        self.serving = Some(tokio::spawn(serve(listener, Arc::clone(&self.world))));
    }

    pub fn behave(&self, behaviour: Behaviour) {
        self.change(|book| book.behaviour = behaviour);
    }

    pub fn change<T>(&self, work: impl FnOnce(&mut Book) -> T) -> T {
        self.world.change(work)
    }

    pub fn look<T>(&self, work: impl FnOnce(&Book) -> T) -> T {
        self.world.look(work)
    }

    /// Waits until this holds.
    #[track_caller]
    pub fn until(
        &self,
        what: &'static str,
        holds: impl Fn(&Book) -> bool,
    ) -> impl Future<Output = ()> {
        let world = Arc::clone(&self.world);
        let place = std::panic::Location::caller();
        async move {
            let found = world.until(Instant::now() + SOON, |book| holds(book).then_some(()));
            if found.await.is_none() {
                let book = world
                    .look(|book| format!("waiting {:?}, leases {:?}", book.waiting, book.leases));
                panic!("{place}: not within {SOON:?}: {what}; {book}");
            }
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

/// Ends loudly when something takes longer than anything here may take.
pub async fn soon<T>(work: impl Future<Output = T>) -> T {
    timeout(SOON, work).await.expect("it ends in time")
}

fn socket(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket
}

async fn serve(listener: TcpListener, world: Arc<World>) {
    // Dropped with this task, so that a stop cuts every connection.
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        connections.spawn(connection(stream, Arc::clone(&world)));
        while connections.try_join_next().is_some() {}
    }
}

/// Answers one call after another. None is the end of the connection.
async fn connection(stream: TcpStream, world: Arc<World>) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let seen = request(&mut stream).await?;
        let behaviour = world.change(|book| {
            book.requests.push(seen.clone());
            if seen.path.starts_with(book.only) {
                book.behaviour
            } else {
                Behaviour::Normal
            }
        });
        let answer = match behaviour {
            Behaviour::Normal => {
                let (status, body) = answer(&world, &seen).await;
                http(status, &body.to_string())
            }
            Behaviour::Mute => {
                answer(&world, &seen).await;
                return std::future::pending().await;
            }
            Behaviour::Slow(time) => {
                let _ = timeout(time, std::future::pending::<()>()).await;
                let (status, body) = answer(&world, &seen).await;
                http(status, &body.to_string())
            }
            Behaviour::Hang => return std::future::pending().await,
            Behaviour::Cut => return None,
            Behaviour::Garbage => "\u{16}\u{3}\u{1} what is this".to_owned(),
            Behaviour::Says(body) => http(200, body),
            Behaviour::Endless => {
                let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n";
                stream.write_all(head.as_bytes()).await.ok()?;
                loop {
                    stream.write_all(&[b' '; 65_536]).await.ok()?;
                }
            }
            Behaviour::Problem(status, code) => {
                http(status, &json!({"code": code, "detail": "no."}).to_string())
            }
            Behaviour::Html(status) => http(status, "<html>no</html>"),
        };
        stream.write_all(answer.as_bytes()).await.ok()?;
        if behaviour == Behaviour::Garbage {
            return None;
        }
    }
}

fn http(status: u16, body: &str) -> String {
    format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn request(stream: &mut BufReader<TcpStream>) -> Option<Seen> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut words = lines[0].split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let length = lines.iter().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.parse::<usize>().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    Some(Seen {
        method: method.to_owned(),
        path: path.to_owned(),
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
    })
}

async fn answer(world: &World, seen: &Seen) -> (u16, Value) {
    let (path, query) = seen.path.split_once('?').unwrap_or((&seen.path, ""));
    let parts: Vec<String> = path
        .split('/')
        .skip(2)
        .map(|part| percent_decode_str(part).decode_utf8().unwrap().into_owned())
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    match (seen.method.as_str(), parts.as_slice()) {
        ("POST", ["leases"]) => acquire(world, &seen.body).await,
        ("POST", ["leases", lease, "release"]) => {
            world.change(|book| book.release(lease, &seen.body))
        }
        ("POST", ["leases", lease, "renew"]) => world.look(|book| book.renew(lease, &seen.body)),
        ("DELETE", ["tickets", ticket]) => world.change(|book| book.cancel(ticket)),
        ("POST", ["wait"]) => wait(world, &seen.body).await,
        ("POST", ["batch"]) => world.change(|book| {
            let operations = seen.body["operations"].as_array().unwrap();
            let results: Vec<Value> = operations
                .iter()
                .map(|operation| {
                    let (status, body) = book.operation(operation);
                    json!({"status": status, "body": body})
                })
                .collect();
            (200, json!({"results": results}))
        }),
        ("POST", ["sessions", session, "close"]) => {
            let waits = query.starts_with("wait_s=");
            world.change(|book| book.close(session, &seen.body, waits))
        }
        ("POST", ["steps"]) => (200, report(&seen.body["step"])),
        ("GET", ["steps", "current"]) if query.starts_with("run=") => (200, report(&Value::Null)),
        _ => (404, json!({"code": "not_found"})),
    }
}

fn report(step: &Value) -> Value {
    json!({
        "run": "r", "step": step, "from": "2026-01-01T00:00:00.000Z", "to": "2026-01-01T00:01:00.000Z",
        "metrics": {"agentic_kv/admits": 3.0, "agentic_kv/odd": "x"},
    })
}

fn ends_at(world: &World, body: &Value) -> Instant {
    let wait_s = body["wait_s"].as_f64().unwrap();
    let wait_s = if world.look(|book| book.never_waits) {
        0.0
    } else {
        wait_s
    };
    Instant::now() + Duration::from_secs_f64(wait_s)
}

async fn acquire(world: &World, body: &Value) -> (u16, Value) {
    let ends_at = ends_at(world, body);
    let (status, answer) = world.change(|book| book.acquire(body));
    if status != 202 {
        return (status, answer);
    }
    let ticket = body["ticket_id"].as_str().unwrap();
    let decided = world.until(ends_at, |book| book.decision(ticket)).await;
    decided.map_or_else(|| (202, world.look(Book::wait)), |decision| (200, decision))
}

async fn wait(world: &World, body: &Value) -> (u16, Value) {
    let tickets: Vec<&str> = body["ticket_ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|ticket| ticket.as_str().unwrap())
        .collect();
    let decided = |book: &Book| {
        let results: Vec<Value> = tickets
            .iter()
            .filter(|ticket| !book.waiting.iter().any(|(name, _)| name == *ticket))
            .map(|ticket| {
                let unknown = json!({"ticket_id": ticket, "action": "unknown"});
                book.decision(ticket).unwrap_or(unknown)
            })
            .collect();
        (!results.is_empty()).then_some(results)
    };
    let results = world.until(ends_at(world, body), decided).await;
    let status = if results.is_some() { 200 } else { 202 };
    (status, json!({"results": results.unwrap_or_default()}))
}
