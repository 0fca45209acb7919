//! A Redis that syncs each write before it answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::net::{TcpStream, UnixStream};

use crate::caller::{Connection, Stream};
use crate::{Arguments, Transport};

const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A Redis of its own in a folder of its own. Ended when dropped.
pub struct Server {
    child: Child,
    address: Address,
    folder: TempDir,
}

impl Server {
    pub fn start(arguments: &Arguments, transport: Transport) -> Self {
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
    pub fn killed_and_started_again(mut self, arguments: &Arguments, transport: Transport) -> Self {
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

    pub async fn connect(&self) -> Connection {
        let stream: Box<dyn Stream> = match &self.address {
            Address::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                Box::new(stream)
            }
        };
        Connection::new(stream)
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
