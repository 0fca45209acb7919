//! One HTTP/1.1 connection that costs the machine as little as it can: a request is one buffer that was
//! made before, an answer is read into one that is used again, and no task stands between the two.
//!
//! Promises: one exchange at a time; an answer of another form than the services measured here give
//! (with `Content-Length`, not chunked) is refused and never misread.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use httparse::{EMPTY_HEADER, Response, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Headers of an answer that are read.
const HEADERS_MAX: usize = 32;
/// Room for an answer before more is asked for; those of single calls fit.
const READ_BYTES: usize = 4 << 10;
/// Largest answer, in bytes: a batch of 1,000 operations has less than 1 MiB, a scrape less than 8.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Where a service listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why an exchange brought no answer.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It was closed within an answer, or before it.
    #[error("the service closed the connection")]
    Closed,
    /// What came is no answer of HTTP/1.1.
    #[error("the answer is not HTTP: {0}")]
    Http(#[from] httparse::Error),
    /// It is one of a form that is not read here.
    #[error("the answer has no length, or is larger than 16 MiB")]
    Length,
}

/// An answer, until the next exchange of its connection.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Status.
    pub status: u16,
    /// Body.
    pub body: &'a [u8],
}

#[cfg(test)]
impl<'a> Answer<'a> {
    /// As if it had come.
    pub(super) const fn of(status: u16, body: &'a str) -> Self {
        let body = body.as_bytes();
        Self { status, body }
    }
}

/// An open connection.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    received: Vec<u8>,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody takes the connection.
    pub async fn open(target: &Target) -> io::Result<Self> {
        let stream = match target {
            Target::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Stream::Tcp(stream)
            }
            Target::Unix(path) => Stream::Unix(UnixStream::connect(path).await?),
        };
        Ok(Self {
            stream,
            received: Vec::with_capacity(READ_BYTES),
        })
    }

    /// Sends a whole request and reads its answer.
    ///
    /// # Errors
    /// When there is no whole answer. The connection is of no use then.
    pub async fn call(&mut self, request: &[u8]) -> Result<Answer<'_>, WireError> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.write_all(request).await?,
            Stream::Unix(stream) => stream.write_all(request).await?,
        }
        self.received.clear();
        let head = loop {
            self.read().await?;
            if let Some(head) = Head::parse(&self.received)? {
                break head;
            }
        };
        let whole = head.bytes.saturating_add(head.body_bytes);
        self.received
            .reserve(whole.saturating_sub(self.received.len()));
        while self.received.len() < whole {
            self.read().await?;
        }
        let body = self.received.get(head.bytes..whole);
        Ok(Answer {
            status: head.status,
            body: body.ok_or(WireError::Length)?,
        })
    }

    async fn read(&mut self) -> Result<(), WireError> {
        if self.received.len() > ANSWER_BYTES_MAX {
            return Err(WireError::Length);
        }
        let read = match &mut self.stream {
            Stream::Tcp(stream) => stream.read_buf(&mut self.received).await?,
            Stream::Unix(stream) => stream.read_buf(&mut self.received).await?,
        };
        match read {
            0 => Err(WireError::Closed),
            _ => Ok(()),
        }
    }
}

/// What is to be known of an answer before its body.
struct Head {
    status: u16,
    /// Its own length, and that of the body.
    bytes: usize,
    body_bytes: usize,
}

impl Head {
    /// `None` when more must be read.
    fn parse(received: &[u8]) -> Result<Option<Self>, WireError> {
        let mut headers = [EMPTY_HEADER; HEADERS_MAX];
        let mut response = Response::new(&mut headers);
        let Status::Complete(bytes) = response.parse(received)? else {
            return Ok(None);
        };
        let length = response
            .headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case("content-length"))
            .and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok())
            .filter(|length| *length <= ANSWER_BYTES_MAX);
        Ok(Some(Self {
            status: response.code.unwrap_or_default(),
            bytes,
            body_bytes: length.ok_or(WireError::Length)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_when_it_is_whole() {
        let text =
            b"HTTP/1.1 202 Accepted\r\nx: y\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n";
        for cut in 0..50 {
            assert!(Head::parse(&text[..cut]).unwrap().is_none(), "{cut}");
        }
        let head = Head::parse(text).unwrap().unwrap();
        assert_eq!((head.status, head.bytes, head.body_bytes), (202, 50, 2));
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        assert!(matches!(Head::parse(chunked), Err(WireError::Length)));
        let huge = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n";
        assert!(matches!(Head::parse(huge), Err(WireError::Length)));
        assert!(matches!(
            Head::parse(b"SSH-2.0-x\r\n"),
            Err(WireError::Http(_))
        ));
    }
}
