//! Acquire and release at Redis, which syncs before it answers: the rival that kvgate is compared with.
//!
//! `cargo bench --bench redis`. The rules are the Lua scripts in `benches/compare`; each round has a
//! Redis of its own. One caller a connection, closed loop, no hold time, client and server on the same
//! machine: as `kvgate bench`, and in the same JSON lines. A caller that has to wait takes its lease from
//! a list of its own with BLPOP.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints its measurements and stops at what should not happen"
)]

mod support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use redis_protocol::resp2::decode::decode_range;
use redis_protocol::resp2::encode::encode_borrowed;
use redis_protocol::resp2::types::{BorrowedFrame, RangeFrame};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use kvgate::load::{Latency, histogram, processor_time};

use support::ticket;

const ACQUIRE: &str = concat!(
    include_str!("compare/gate.lua"),
    include_str!("compare/acquire.lua")
);
const RELEASE: &str = concat!(
    include_str!("compare/gate.lua"),
    include_str!("compare/release.lua")
);
const SWEEP: &str = concat!(
    include_str!("compare/gate.lua"),
    include_str!("compare/sweep.lua")
);

const PROMPT_TOKENS: u64 = 18_432;
const MAX_NEW_TOKENS: u64 = 4_096;
const TOKENS: u64 = PROMPT_TOKENS + MAX_NEW_TOKENS;
/// Leases that fit where callers contend.
const SLOTS: u64 = 16;
/// Seconds that one call waits for its grant.
const WAIT_S: &str = "25";
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Parser)]
struct Arguments {
    /// Connections of each cell
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256, 1_024])]
    connections: Vec<usize>,
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["open", "contended"])]
    scenario: Vec<Scenario>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tcp")]
    transport: Vec<Transport>,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of the first round, in what is printed
    #[arg(long, default_value_t = 1)]
    first_round: usize,
    /// Length of one cell
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// The program
    #[arg(long, env = "REDIS_SERVER", default_value = "redis-server")]
    server: PathBuf,
    /// Folder on the disk that is measured; one in memory would make syncs free
    #[arg(long, default_value = env!("CARGO_TARGET_TMPDIR"))]
    data: PathBuf,
    /// A program and its arguments, split at blanks, that runs the server: such as strace
    #[arg(long, default_value = "")]
    under: String,
    /// Hold the scripts to the rules, over a kill as well, and measure nothing
    #[arg(long)]
    check: bool,
    /// Cargo passes it
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Scenario {
    /// Everything fits
    Open,
    /// 16 leases fit: the others wait in the queue
    Contended,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Transport {
    Tcp,
    Unix,
}

fn main() {
    let arguments = Arguments::parse();
    let found = Command::new(&arguments.server).arg("--version").output();
    if !found.is_ok_and(|done| done.status.success()) {
        eprintln!(
            "{} does not run: install the package redis-server, or name the program with --server",
            arguments.server.display()
        );
        std::process::exit(1);
    }
    // One thread, as the load of `kvgate bench`: the other core is the server's.
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    if arguments.check || !arguments.bench {
        return runtime.block_on(check(&arguments));
    }
    for round in 0..arguments.rounds {
        for &scenario in &arguments.scenario {
            for &transport in &arguments.transport {
                for &connections in &arguments.connections {
                    let server = Server::start(&arguments, transport);
                    let seconds = arguments.seconds;
                    let cell = runtime.block_on(load(&server, scenario, connections, seconds));
                    println!(
                        "{}",
                        line(
                            &cell,
                            transport,
                            scenario,
                            connections,
                            round + arguments.first_round
                        )
                    );
                }
            }
        }
    }
}

fn line(
    cell: &Cell,
    transport: Transport,
    scenario: Scenario,
    connections: usize,
    round: usize,
) -> Value {
    let pairs = cell.pairs as f64;
    json!({
        "system": "redis",
        "transport": format!("{transport:?}").to_lowercase(),
        "scenario": format!("{scenario:?}").to_lowercase(),
        "connections": connections,
        "round": round,
        "seconds": cell.seconds,
        "pairs": cell.pairs,
        "pairs_per_s": pairs / cell.seconds,
        "acquire_ms": cell.acquire,
        "release_ms": cell.release,
        "server_cpu_us_per_pair": cell.cpu_s * 1e6 / pairs,
        "load_cpu_us_per_pair": cell.load_cpu_s * 1e6 / pairs,
        "rss_bytes": cell.rss_bytes,
        "log_bytes_per_pair": cell.log_bytes as f64 / pairs,
    })
}

// ---------------------------------------------------------------------------------------------
// The server
// ---------------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A Redis of its own in a folder of its own. Ended when dropped.
struct Server {
    child: Child,
    address: Address,
    folder: TempDir,
}

impl Server {
    fn start(arguments: &Arguments, transport: Transport) -> Self {
        let folder = tempfile::tempdir_in(&arguments.data).unwrap();
        Self::start_in(arguments, transport, folder)
    }

    fn start_in(arguments: &Arguments, transport: Transport, folder: TempDir) -> Self {
        // Redis cannot choose a port itself. One that is taken in between makes it end: then another.
        for _ in 0..5 {
            let address = match transport {
                Transport::Unix => Address::Unix(folder.path().join("redis.sock")),
                Transport::Tcp => {
                    let probe = TcpListener::bind("127.0.0.1:0").unwrap();
                    Address::Tcp(probe.local_addr().unwrap())
                }
            };
            let mut child = command(arguments, &address, folder.path()).spawn().unwrap();
            if answers(&mut child, &address) {
                return Self {
                    child,
                    address,
                    folder,
                };
            }
        }
        panic!("Redis did not start: see its lines above");
    }

    /// SIGKILL, and the same folder again.
    fn killed_and_started_again(mut self, arguments: &Arguments, transport: Transport) -> Self {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let folder = std::mem::replace(
            &mut self.folder,
            tempfile::tempdir_in(&arguments.data).unwrap(),
        );
        // First, since it ends whoever listens at its address.
        drop(self);
        Self::start_in(arguments, transport, folder)
    }

    async fn connect(&self) -> Connection {
        let stream: Box<dyn Stream> = match &self.address {
            Address::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                Box::new(stream)
            }
        };
        Connection {
            stream,
            sent: Vec::new(),
            got: vec![0; 16 << 10],
            length: 0,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Not a kill: the child may be a program that runs the server, which would live on.
        let _ = exchange(&self.address, b"SHUTDOWN NOSAVE\r\n");
        if !within(PATIENCE, || !matches!(self.child.try_wait(), Ok(None))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Every write is synced before its answer, as with kvgate; nothing else touches the disk: no
/// dumps, and no rewriting of the log, which would slow it down in the middle of a round.
fn command(arguments: &Arguments, address: &Address, folder: &Path) -> Command {
    let mut under = arguments.under.split_whitespace();
    let mut command = match under.next() {
        Some(program) => {
            let mut command = Command::new(program);
            command.args(under).arg(&arguments.server);
            command
        }
        None => Command::new(&arguments.server),
    };
    command
        .args([
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--save",
            "",
        ])
        .args(["--auto-aof-rewrite-percentage", "0", "--daemonize", "no"])
        .args([
            "--bind",
            "127.0.0.1",
            "--maxclients",
            "4096",
            "--tcp-backlog",
            "4096",
        ])
        .args(["--loglevel", "warning", "--dir"])
        .arg(folder);
    match address {
        Address::Tcp(address) => command.arg("--port").arg(address.port().to_string()),
        Address::Unix(path) => command.args(["--port", "0", "--unixsocket"]).arg(path),
    };
    // Its banner and warnings are of no interest in lines of JSON.
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Whether it answers before it ends.
fn answers(child: &mut Child, address: &Address) -> bool {
    let mut ended = false;
    let ready = within(PATIENCE, || {
        ended = !matches!(child.try_wait(), Ok(None));
        ended || exchange(address, b"PING\r\n").is_ok_and(|answer| answer == b"+PONG\r\n")
    });
    ready && !ended
}

fn within(time: Duration, mut look: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + time;
    while Instant::now() < end {
        if look() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// One line to the server, and what it answers at once.
fn exchange(address: &Address, line: &[u8]) -> std::io::Result<Vec<u8>> {
    fn over(mut stream: impl Read + Write, line: &[u8]) -> std::io::Result<Vec<u8>> {
        stream.write_all(line)?;
        let mut answer = vec![0; 64];
        let length = stream.read(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    }
    match address {
        Address::Tcp(address) => over(std::net::TcpStream::connect(address)?, line),
        Address::Unix(path) => over(std::os::unix::net::UnixStream::connect(path)?, line),
    }
}

// ---------------------------------------------------------------------------------------------
// A caller
// ---------------------------------------------------------------------------------------------

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One command at a time over a connection, whose buffers are used again and again.
struct Connection {
    stream: Box<dyn Stream>,
    sent: Vec<u8>,
    got: Vec<u8>,
    length: usize,
}

/// What a script or a list answers.
#[derive(Debug, PartialEq)]
enum Answer<'a> {
    Nothing,
    Number(i64),
    Text(&'a str),
    List(Vec<Answer<'a>>),
}

impl Connection {
    async fn ask(&mut self, words: &[&str]) -> Answer<'_> {
        encode(&mut self.sent, words);
        self.stream.write_all(&self.sent).await.unwrap();
        self.length = 0;
        let frame = loop {
            let read = self
                .stream
                .read(&mut self.got[self.length..])
                .await
                .unwrap();
            assert!(read > 0, "Redis closed the connection");
            self.length += read;
            if let Some((frame, length)) = decode_range(&self.got[..self.length]).unwrap() {
                assert_eq!(length, self.length, "one answer to one command");
                break frame;
            }
            if self.length == self.got.len() {
                self.got.resize(2 * self.length, 0);
            }
        };
        answer(&self.got, frame)
    }

    /// Runs a script by the name that SCRIPT LOAD gave it.
    async fn run(&mut self, script: &str, arguments: &[&str]) -> Answer<'_> {
        let mut words = Vec::with_capacity(arguments.len() + 3);
        words.extend_from_slice(&["EVALSHA", script, "0"]);
        words.extend_from_slice(arguments);
        self.ask(&words).await
    }

    /// Takes the lease that a release has granted to this ticket meanwhile or grants it later.
    async fn granted(&mut self, ticket: &str) -> Option<String> {
        let list = format!("granted:{ticket}");
        match self.ask(&["BLPOP", &list, WAIT_S]).await {
            Answer::List(pair) => match pair.as_slice() {
                [_, Answer::Text(lease)] => Some((*lease).to_owned()),
                other => panic!("{other:?}"),
            },
            Answer::Nothing => None,
            other => panic!("{other:?}"),
        }
    }

    /// The figures of INFO, or the fields of a hash.
    async fn fields(&mut self, words: &[&str]) -> BTreeMap<String, String> {
        match self.ask(words).await {
            Answer::Text(text) => text
                .lines()
                .filter_map(|line| line.split_once(':'))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            Answer::List(fields) => fields
                .chunks(2)
                .map(|pair| match pair {
                    [Answer::Text(name), Answer::Text(value)] => {
                        ((*name).to_owned(), (*value).to_owned())
                    }
                    other => panic!("{other:?}"),
                })
                .collect(),
            other => panic!("{other:?}"),
        }
    }

    async fn number(&mut self, words: &[&str]) -> i64 {
        match self.ask(words).await {
            Answer::Number(number) => number,
            other => panic!("{words:?}: {other:?}"),
        }
    }
}

fn encode(sent: &mut Vec<u8>, words: &[&str]) {
    let words: Vec<BorrowedFrame<'_>> = words
        .iter()
        .map(|word| BorrowedFrame::BulkString(word.as_bytes()))
        .collect();
    let frame = BorrowedFrame::Array(&words);
    sent.resize(frame.encode_len(false), 0);
    encode_borrowed(sent, &frame, false).unwrap();
}

fn answer(got: &[u8], frame: RangeFrame) -> Answer<'_> {
    let text = |range: (usize, usize)| std::str::from_utf8(&got[range.0..range.1]).unwrap();
    match frame {
        RangeFrame::SimpleString(range) | RangeFrame::BulkString(range) => {
            Answer::Text(text(range))
        }
        RangeFrame::Error(range) => panic!("Redis answers {}", text(range)),
        RangeFrame::Integer(number) => Answer::Number(number),
        RangeFrame::Null => Answer::Nothing,
        RangeFrame::Array(frames) => {
            Answer::List(frames.into_iter().map(|frame| answer(got, frame)).collect())
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Load
// ---------------------------------------------------------------------------------------------

struct Cell {
    pairs: u64,
    seconds: f64,
    acquire: Option<Latency>,
    release: Option<Latency>,
    cpu_s: f64,
    load_cpu_s: f64,
    rss_bytes: u64,
    log_bytes: u64,
}

/// What SCRIPT LOAD named the scripts.
#[derive(Clone)]
struct Scripts {
    acquire: String,
    release: String,
    sweep: String,
}

impl Scripts {
    async fn load(connection: &mut Connection) -> Self {
        let mut names = Vec::new();
        for script in [ACQUIRE, RELEASE, SWEEP] {
            match connection.ask(&["SCRIPT", "LOAD", script]).await {
                Answer::Text(name) => names.push(name.to_owned()),
                other => panic!("{other:?}"),
            }
        }
        let [acquire, release, sweep] = names.try_into().unwrap();
        Self {
            acquire,
            release,
            sweep,
        }
    }
}

async fn load(server: &Server, scenario: Scenario, count: usize, seconds: f64) -> Cell {
    let mut control = server.connect().await;
    let scripts = Scripts::load(&mut control).await;
    let ceiling = match scenario {
        Scenario::Open => 1 << 40,
        Scenario::Contended => SLOTS * TOKENS,
    };
    control
        .number(&[
            "HSET",
            "gate",
            "ceiling",
            &ceiling.to_string(),
            "waiting",
            "0",
        ])
        .await;
    let mut callers = Vec::new();
    for _ in 0..count {
        callers.push(server.connect().await);
    }
    let own = || processor_time(std::process::id()).unwrap();
    let (before, own_before) = (Usage::read(&mut control).await, own());
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(seconds);
    let mut running = JoinSet::new();
    for (number, connection) in callers.into_iter().enumerate() {
        running.spawn(caller(connection, scripts.clone(), number, end));
    }
    // Expired leases are reclaimed once a second, as kvgate does it by itself.
    let sweeper = async {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(control.run(&scripts.sweep, &["0"]).await, Answer::Number(0));
        }
    };
    let mut pairs = 0;
    let (mut acquire, mut release) = (histogram(), histogram());
    let all = async {
        while let Some(done) = running.join_next().await {
            let own = done.unwrap();
            pairs += own.0;
            acquire.add(&own.1).unwrap();
            release.add(&own.2).unwrap();
        }
        began.elapsed().as_secs_f64()
    };
    let seconds = tokio::select! {
        seconds = all => seconds,
        never = sweeper => never,
    };
    let load_cpu_s = (own() - own_before).as_secs_f64();
    // The sweep may have been under way.
    let mut control = server.connect().await;
    let after = Usage::read(&mut control).await;
    everything_was_given_back(&mut control, pairs).await;
    Cell {
        pairs,
        seconds,
        acquire: Latency::of(&acquire),
        release: Latency::of(&release),
        cpu_s: after.cpu_s - before.cpu_s,
        load_cpu_s,
        rss_bytes: after.rss_bytes,
        log_bytes: after.log_bytes - before.log_bytes,
    }
}

type Own = (
    u64,
    hdrhistogram::Histogram<u64>,
    hdrhistogram::Histogram<u64>,
);

/// One pair after the other until the time is over.
async fn caller(mut connection: Connection, scripts: Scripts, number: usize, end: Instant) -> Own {
    let session = format!("session-{number:09}");
    let (prompt, new) = (PROMPT_TOKENS.to_string(), MAX_NEW_TOKENS.to_string());
    let (mut acquires, mut releases) = (histogram(), histogram());
    let mut pairs = 0;
    while Instant::now() < end {
        let ticket = ticket();
        let began = Instant::now();
        let ask = [
            &*ticket,
            &session,
            &prompt,
            &new,
            "train",
            "0",
            "600",
            "rid-0123456789",
            "rollout-3",
        ];
        let lease = loop {
            match connection.run(&scripts.acquire, &ask).await {
                Answer::List(words) => match words.as_slice() {
                    [Answer::Text("admit"), Answer::Text(lease), _] => break (*lease).to_owned(),
                    [Answer::Text("wait"), _] => {}
                    other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            }
            if let Some(lease) = connection.granted(&ticket).await {
                break lease;
            }
        };
        let held = Instant::now();
        acquires.saturating_record((held - began).as_nanos() as u64);
        let outcome = connection.run(&scripts.release, &[&ticket, &lease]).await;
        assert_eq!(outcome, Answer::Text("released"));
        releases.saturating_record(held.elapsed().as_nanos() as u64);
        pairs += 1;
    }
    (pairs, acquires, releases)
}

/// After a load the books are empty, and they have counted each pair.
async fn everything_was_given_back(control: &mut Connection, pairs: u64) {
    let gate = control.fields(&["HGETALL", "gate"]).await;
    assert_eq!(gate["issued"], pairs.to_string());
    assert_eq!((&*gate["reserved"], &*gate["waiting"]), ("0", "0"));
    assert_eq!(control.number(&["LLEN", "queue"]).await, 0);
    assert_eq!(control.number(&["ZCARD", "deadlines"]).await, 0);
}

/// What the server has used up since its start.
struct Usage {
    cpu_s: f64,
    rss_bytes: u64,
    log_bytes: u64,
}

impl Usage {
    async fn read(control: &mut Connection) -> Self {
        let info = control.fields(&["INFO", "everything"]).await;
        assert_eq!(info["aof_last_write_status"], "ok");
        let number = |name: &str| info[name].trim().parse::<f64>().unwrap();
        Self {
            cpu_s: number("used_cpu_user") + number("used_cpu_sys"),
            rss_bytes: number("used_memory_rss") as u64,
            log_bytes: number("aof_current_size") as u64,
        }
    }
}

// ---------------------------------------------------------------------------------------------
// The scripts keep the rules
// ---------------------------------------------------------------------------------------------

/// A rival that does less would be faster. What is written here is answered by kvgate in the same way.
async fn check(arguments: &Arguments) {
    let server = Server::start(arguments, Transport::Unix);
    let mut one = server.connect().await;
    let mut two = server.connect().await;
    let scripts = Scripts::load(&mut one).await;
    one.number(&["HSET", "gate", "ceiling", "100"]).await;
    let acquire = async |connection: &mut Connection, ticket: &str, tokens: &str, ttl_s: &str| {
        let ask = [
            ticket, "session", tokens, "0", "train", "0", ttl_s, "rid", "client",
        ];
        words(connection.run(&scripts.acquire, &ask).await)
    };
    let release = async |connection: &mut Connection, ticket: &str, lease: &str| {
        words(connection.run(&scripts.release, &[ticket, lease]).await)
    };
    assert_eq!(acquire(&mut one, "a", "60", "600").await, "admit 1-1 0");
    assert_eq!(
        acquire(&mut one, "a", "60", "600").await,
        "admit 1-1 1",
        "a ticket is charged once"
    );
    assert_eq!(acquire(&mut one, "a", "61", "600").await, "conflict");
    assert_eq!(
        acquire(&mut one, "large", "101", "600").await,
        "bypass oversize"
    );
    assert_eq!(acquire(&mut one, "b", "60", "1").await, "wait 1");
    assert_eq!(
        acquire(&mut one, "c", "10", "600").await,
        "wait 2",
        "c would fit, but b is older"
    );
    assert_eq!(
        acquire(&mut one, "c", "10", "600").await,
        "wait 2",
        "a ticket stands in line once"
    );
    assert_eq!(release(&mut one, "a", "1-7").await, "lease_expired");
    assert_eq!(release(&mut one, "b", "1-2").await, "lease_expired");
    assert_eq!(release(&mut one, "d", "1-2").await, "lease_not_found");
    // A caller that waits is told at once, and the head comes first.
    let waits = tokio::spawn(async move { two.granted("b").await });
    assert_eq!(release(&mut one, "a", "1-1").await, "released");
    assert_eq!(waits.await.unwrap().as_deref(), Some("1-2"));
    assert_eq!(one.granted("c").await.as_deref(), Some("1-3"));
    assert_eq!(release(&mut one, "a", "1-1").await, "already_released");
    assert_eq!(acquire(&mut one, "a", "60", "600").await, "cancelled");
    assert_eq!(acquire(&mut one, "e", "40", "600").await, "wait 1");
    let books = async |connection: &mut Connection| {
        let gate = connection.fields(&["HGETALL", "gate"]).await;
        let session = connection.fields(&["HGETALL", "s:session"]).await;
        let ticket = connection.fields(&["HGETALL", "t:b"]).await;
        (gate, session, ticket)
    };
    let before = books(&mut one).await;
    assert_eq!(
        (
            &*before.0["reserved"],
            &*before.0["issued"],
            &*before.0["waits"]
        ),
        ("70", "3", "3")
    );
    assert_eq!(
        (
            &*before.1["leases"],
            &*before.1["tokens"],
            &*before.1["waiting"]
        ),
        ("2", "70", "1")
    );
    assert_eq!(
        (&*before.2["client"], &*before.2["request_id"]),
        ("client", "rid")
    );
    let server = server.killed_and_started_again(arguments, Transport::Unix);
    let mut one = server.connect().await;
    assert_eq!(
        books(&mut one).await,
        before,
        "what was answered is on disk"
    );
    let scripts = Scripts::load(&mut one).await;
    assert_eq!(one.run(&scripts.sweep, &["0"]).await, Answer::Number(0));
    // The end of b has come, that of c has not; e takes the room.
    assert_eq!(one.run(&scripts.sweep, &["60000"]).await, Answer::Number(1));
    assert_eq!(one.granted("e").await.as_deref(), Some("1-4"));
    for (ticket, lease) in [("c", "1-3"), ("e", "1-4")] {
        let outcome = one.run(&scripts.release, &[ticket, lease]).await;
        assert_eq!(outcome, Answer::Text("released"));
    }
    everything_was_given_back(&mut one, 4).await;
}

fn words(answer: Answer<'_>) -> String {
    match answer {
        Answer::Text(text) => text.to_owned(),
        Answer::Number(number) => number.to_string(),
        Answer::Nothing => String::new(),
        Answer::List(answers) => answers.into_iter().map(words).collect::<Vec<_>>().join(" "),
    }
}
