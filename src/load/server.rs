//! Services in processes of their own, so that what they cost can be told from what the load costs.
//!
//! Promises: they end with their handle, and so do their files.

use std::io::{BufRead, BufReader, Lines};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::Value;

use super::LoadError;
use super::ask::Head;
use super::figures::Transport;
use super::scenario::Service;
use super::wire::Target;

/// Lines of the log that are told when a service does not start.
const TOLD_LINES: usize = 5;

/// A server that is a child of this process.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    port: SocketAddr,
    socket: PathBuf,
}

impl Server {
    /// This or another build of the program as the service, with its store in `folder`.
    pub fn kvgate(
        program: Option<&Path>,
        folder: &Path,
        socket: PathBuf,
        flags: &[String],
    ) -> Result<Self, LoadError> {
        let mut command = match program {
            Some(program) => bare_of_settings(Command::new(program)),
            None => this_program()?,
        };
        command
            .args(["serve", "--log-format", "json", "--listen", "127.0.0.1:0"])
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()))
            .arg("--data")
            .arg(folder)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut server = Self::spawn(command, socket)?;
        let Some(stderr) = server.child.stderr.take() else {
            return Err(LoadError::Start("it has no log".to_owned()));
        };
        let mut lines = BufReader::new(stderr).lines();
        server.port = ready(&mut lines)?;
        // A log that nobody takes would hold the service up.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Ok(server)
    }

    /// This program as bare handlers.
    pub fn bare(socket: PathBuf) -> Result<Self, LoadError> {
        let mut command = this_program()?;
        command
            .args(["bench", "--bare"])
            .arg(&socket)
            // It ends with this pipe, however this process ends.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut server = Self::spawn(command, socket)?;
        let mut line = String::new();
        if let Some(stdout) = server.child.stdout.take() {
            BufReader::new(stdout)
                .read_line(&mut line)
                .map_err(|error| LoadError::io("the bare handlers cannot be started", error))?;
        }
        let no_port = |_| LoadError::Start("the bare handlers name no port".to_owned());
        server.port = line.trim_end().parse().map_err(no_port)?;
        Ok(server)
    }

    fn spawn(mut command: Command, socket: PathBuf) -> Result<Self, LoadError> {
        let child = command
            .spawn()
            .map_err(|error| LoadError::io("a server cannot be started", error))?;
        Ok(Self {
            child,
            port: SocketAddr::from(([0, 0, 0, 0], 0)),
            socket,
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn service(&self, transport: Transport) -> Service {
        let (target, host) = match transport {
            Transport::Tcp => (Target::Tcp(self.port), "127.0.0.1"),
            Transport::Unix => (Target::Unix(self.socket.clone()), "localhost"),
        };
        Service {
            target,
            head: Head {
                host: host.to_owned(),
                prefix: String::new(),
                authorization: None,
            },
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This very executable.
fn this_program() -> Result<Command, LoadError> {
    let program = std::env::current_exe()
        .map_err(|error| LoadError::io("this program does not find itself", error))?;
    Ok(bare_of_settings(Command::new(program)))
}

/// A command with nothing in its environment that it could take for a setting.
fn bare_of_settings(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVGATE_") {
            command.env_remove(name);
        }
    }
    command.env("RUST_LOG", "info");
    command
}

/// Reads the log until the service is ready; its port.
fn ready(lines: &mut Lines<BufReader<ChildStderr>>) -> Result<SocketAddr, LoadError> {
    let mut port = None;
    let mut told = Vec::new();
    for line in lines.map_while(Result::ok) {
        let fields: Value = serde_json::from_str(&line)
            .ok()
            .and_then(|mut line: Value| Some(line.get_mut("fields")?.take()))
            .unwrap_or_default();
        let word = |name| fields.get(name).and_then(Value::as_str);
        match word("message") {
            Some("listening") => {
                let address = word("address").and_then(|address| address.parse().ok());
                port = port.or(address);
            }
            Some("ready") => {
                return port.ok_or_else(|| LoadError::Start("it names no port".to_owned()));
            }
            _ => {}
        }
        if told.len() == TOLD_LINES {
            told.remove(0);
        }
        told.push(line);
    }
    Err(LoadError::Start(told.join("; ")))
}
