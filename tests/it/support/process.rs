//! The real binary as a child process: started, watched through its log, killed.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// Longest time that a child may take for what a test waits for: far beyond what it needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running `kvgate`. Killed when dropped.
pub struct Kvgate {
    child: Child,
    log: mpsc::Receiver<Value>,
    seen: Arc<Mutex<String>>,
    address: SocketAddr,
    pub http: reqwest::Client,
}

/// The binary under test: the one that `KVGATE_BIN` names, such as a release build, else this build's.
pub fn binary() -> PathBuf {
    std::env::var_os("KVGATE_BIN").map_or_else(
        || PathBuf::from(env!("CARGO_BIN_EXE_kvgate")),
        PathBuf::from,
    )
}

/// A command with nothing of this process's environment that could be taken for a setting.
pub fn command(arguments: &[&str]) -> Command {
    command_under(&[], arguments)
}

/// The same through another program that ends by becoming the binary.
pub fn command_under(wrapper: &[&str], arguments: &[&str]) -> Command {
    let mut command = match wrapper {
        [] => Command::new(binary()),
        [program, rest @ ..] => {
            let mut command = Command::new(program);
            command.args(rest).arg(binary());
            command
        }
    };
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVGATE_") {
            command.env_remove(name);
        }
    }
    command.env("RUST_LOG", "info");
    command
}

impl Kvgate {
    /// Starts `kvgate serve` on any free port and waits until it is ready.
    pub fn serve(data: &Path, arguments: &[&str]) -> Self {
        Self::serve_under(&[], data, arguments)
    }

    /// The same through another program, such as `prlimit`, that ends by becoming `kvgate`.
    pub fn serve_under(wrapper: &[&str], data: &Path, arguments: &[&str]) -> Self {
        let mut gate = Self::listening(command_under(wrapper, &serving(data, arguments)));
        gate.wait_for_log("ready");
        gate
    }

    /// Starts `kvgate serve` on any free port and waits until it listens.
    pub fn listen(data: &Path, arguments: &[&str]) -> Self {
        Self::start(&serving(data, arguments))
    }

    /// Starts `kvgate serve` as a supervisor does: ready, or how it ended and what it said.
    pub fn try_serve(data: &Path, arguments: &[&str]) -> Result<Self, (Option<i32>, String)> {
        let mut gate = Self::spawn(command(&serving(data, arguments)));
        while let Ok(line) = gate.log.recv_timeout(PATIENCE) {
            let fields = &line["fields"];
            if fields["message"] == "listening" {
                gate.address = address(&line);
            }
            if fields["message"] == "ready" {
                return Ok(gate);
            }
        }
        let status = gate.child.wait().unwrap();
        Err((status.code(), gate.log_text()))
    }

    /// Starts a command that listens, and waits until it does.
    pub fn start(arguments: &[&str]) -> Self {
        Self::listening(command(arguments))
    }

    /// Runs a command of the test's own making, and waits until it listens.
    pub fn from(command: Command) -> Self {
        Self::listening(command)
    }

    fn listening(command: Command) -> Self {
        let mut gate = Self::spawn(command);
        let listening = gate.wait_for_log("listening");
        gate.address = address(&listening);
        gate
    }

    fn spawn(mut command: Command) -> Self {
        // Every client of the process shares one provider; another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (lines, log) = mpsc::channel();
        let seen = Arc::new(Mutex::new(String::new()));
        let text = Arc::clone(&seen);
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let mut text = text.lock().unwrap();
                text.push_str(&line);
                text.push('\n');
                if let Ok(value) = serde_json::from_str(&line) {
                    // The test may be over already.
                    let _ = lines.send(value);
                }
            }
        });
        Self {
            child,
            log,
            seen,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            http: reqwest::Client::builder().build().unwrap(),
        }
    }

    /// The next line of the log with this message.
    pub fn wait_for_log(&mut self, message: &str) -> Value {
        loop {
            let line = self.log.recv_timeout(PATIENCE).unwrap_or_else(|_| {
                let status = self.child.try_wait();
                let log = self.log_text();
                panic!("no line {message:?} in the log; process: {status:?}; log:\n{log}")
            });
            if line["fields"]["message"] == message {
                return line;
            }
        }
    }

    /// Everything that was logged so far.
    pub fn log_text(&self) -> String {
        self.seen.lock().unwrap().clone()
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL: no chance to write anything more.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM, and how the process ended.
    pub fn terminate(self) -> ExitStatus {
        self.signal("TERM");
        self.ended()
    }

    /// How the process ends by itself.
    pub fn ended(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([format!("-{name}"), self.pid().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
    }

    /// Bytes of memory that it has now, and that it had at most.
    pub fn memory(&self) -> (u64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let of = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            let kib = line.split_whitespace().nth(1).unwrap();
            kib.parse::<u64>().unwrap() << 10
        };
        (of("VmRSS:"), of("VmHWM:"))
    }

    /// SIGSTOP; returns when the process stands still.
    pub fn stand_still(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.pid());
        // The state follows the name, which stands in parentheses.
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            thread::yield_now();
        }
    }

    pub async fn get(&self, path: &str) -> Value {
        let answer = self.http.get(self.url(path)).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        answer.json().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::of(
            self.http
                .post(self.url(path))
                .json(body)
                .send()
                .await
                .unwrap(),
        )
        .await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        let request = self.http.patch(self.url(path)).json(body);
        Answer::of(request.send().await.unwrap()).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        Answer::of(self.http.delete(self.url(path)).send().await.unwrap()).await
    }

    /// Acquires `tokens` for a ticket, without waiting.
    pub async fn acquire(&self, ticket: &str, tokens: u64) -> Answer {
        let body = json!({
            "ticket_id": ticket, "session_id": "s", "reservation_tokens": tokens, "wait_s": 0,
        });
        self.post("/v1/leases", &body).await
    }

    /// All rows of a list, page by page.
    pub async fn list(&self, path: &str) -> Vec<Value> {
        let mut items = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!("{path}?limit=1000{cursor}")).await;
            items.extend(page["items"].as_array().unwrap().iter().cloned());
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => {
                    assert_eq!(page["total"], items.len(), "{path}");
                    return items;
                }
            }
        }
    }
}

fn serving<'a>(data: &'a Path, arguments: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec![
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data",
        data.to_str().unwrap(),
        "--log-format",
        "json",
    ];
    all.extend(arguments);
    all
}

fn address(listening: &Value) -> SocketAddr {
    let address = listening["fields"]["address"].as_str().unwrap();
    let address = address.strip_prefix("https://").unwrap_or(address);
    address.parse().unwrap()
}

impl Drop for Kvgate {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status, body and the number of the change.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub seq: Option<u64>,
    pub body: Value,
}

impl Answer {
    pub async fn of(answer: reqwest::Response) -> Self {
        let seq = answer.headers().get("kvgate-seq");
        Self {
            status: answer.status().as_u16(),
            seq: seq.map(|seq| seq.to_str().unwrap().parse().unwrap()),
            body: answer.json().await.unwrap(),
        }
    }

    pub fn action(&self) -> &str {
        self.body["action"].as_str().unwrap_or("none")
    }

    pub fn lease(&self) -> String {
        self.body["lease_id"].as_str().unwrap().to_owned()
    }
}
