//! Where the service listens: TCP ports, with TLS or without, and Unix sockets.
//!
//! A Unix socket has mode 0600 from its first moment, takes the place of a socket file that nobody
//! answers on and of nothing else, and goes with its listener.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket as RawSocket, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use super::tls::Tls;
use crate::access::Scheme;

/// Connects that may wait to be accepted: a burst of a fleet of callers.
const BACKLOG: i32 = 4_096;

/// How often an address in use is tried again, and the rest before each time: half a second in all,
/// as for the store. A process that was killed holds both until it is gone.
const TRIES: u32 = 20;
const REST: Duration = Duration::from_millis(25);

/// Who may connect to a Unix socket: its owner.
const SOCKET_MODE: u32 = 0o600;

/// Bits of an IPv6 address that tell sites apart: a host can take any address of its /64.
const SITE: u128 = u128::MAX << 64;

/// Where to listen, or where it is listened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Who is on the other end, as far as the network tells: what bounds for one caller are counted by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Peer {
    /// An IPv4 address, or the site of an IPv6 address.
    Address(IpAddr),
    /// A user of this machine, over a Unix socket.
    User(u32),
}

impl Peer {
    fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(ip) if !ip.is_loopback() => {
                IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & SITE))
            }
            ip => ip,
        })
    }
}

/// A bound address. Connects wait in the backlog until [`super::serve`] is called, which is before
/// the store is opened (DUR3).
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    endpoint: Endpoint,
    tls: Option<Arc<Tls>>,
    /// Of a Unix socket; it is removed with the listener.
    _file: Option<SocketFile>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Binds the address. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        let (socket, endpoint, file) = match endpoint {
            Endpoint::Tcp(address) => {
                let listener = bind_tcp(*address)?;
                let address = listener.local_addr()?;
                (Socket::Tcp(listener), Endpoint::Tcp(address), None)
            }
            Endpoint::Unix(path) => {
                let path = std::path::absolute(path)?;
                let (listener, file) = bind_unix(&path)?;
                (Socket::Unix(listener), Endpoint::Unix(path), Some(file))
            }
        };
        Ok(Self {
            socket,
            endpoint,
            tls: None,
            _file: file,
        })
    }

    /// The same; an address in use is tried again for half a second.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub async fn bind_patiently(endpoint: &Endpoint) -> io::Result<Self> {
        for _ in 0..TRIES {
            match Self::bind(endpoint) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    tokio::time::sleep(REST).await;
                }
                other => return other,
            }
        }
        Self::bind(endpoint)
    }

    /// Speaks TLS from here on. A Unix socket never does: nobody is between its ends.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<Tls>>) -> Self {
        match self.endpoint {
            Endpoint::Tcp(_) => Self { tls, ..self },
            Endpoint::Unix(_) => self,
        }
    }

    /// Where it listens, with the port that was chosen for port 0.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The same, where it is a port.
    #[must_use]
    pub const fn port(&self) -> Option<SocketAddr> {
        match self.endpoint {
            Endpoint::Tcp(address) => Some(address),
            Endpoint::Unix(_) => None,
        }
    }

    /// How callers name it: the address alone means HTTP in the clear.
    #[must_use]
    pub fn name(&self) -> String {
        match self.tls {
            Some(_) => format!("https://{}", self.endpoint),
            None => self.endpoint.to_string(),
        }
    }

    /// The next connection.
    pub(super) async fn accept(&self) -> io::Result<Accepted> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Answers are small and wanted at once. A socket that refuses is gone already.
                let _ = stream.set_nodelay(true);
                let peer = Peer::at(address.ip());
                let stream = match &self.tls {
                    Some(tls) => RawStream::Tls(stream, Arc::clone(tls)),
                    None => RawStream::Plain(Box::new(stream)),
                };
                Ok(Accepted { stream, peer })
            }
            Socket::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = Peer::User(stream.peer_cred()?.uid());
                let stream = RawStream::Plain(Box::new(stream));
                Ok(Accepted { stream, peer })
            }
        }
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = RawSocket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn bind_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    remove_stale(path)?;
    let socket = RawSocket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile::of(path)?;
    // Nobody can connect before it listens, so nobody slips in under the mode of the umask.
    fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))?;
    socket.listen(BACKLOG)?;
    Ok((UnixListener::from_std(socket.into())?, file))
}

/// Removes the file of a socket that nobody answers on.
fn remove_stale(path: &Path) -> io::Result<()> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "a file that is no socket stands there",
        ));
    }
    let probe = RawSocket::new(Domain::UNIX, Type::STREAM, None)?;
    // One whose backlog is full answers as well, and must not hold the start up.
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(()) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(io::ErrorKind::AddrInUse.into())
        }
        Err(error) => Err(error),
    }
}

/// The file of a bound Unix socket. It goes with its listener, unless another one stands in its place.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode));
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the socket file is left behind");
        }
    }
}

/// A connection as it was accepted.
pub(super) struct Accepted {
    pub(super) stream: RawStream,
    pub(super) peer: Peer,
}

/// What is to be done before requests can be read.
pub(super) enum RawStream {
    /// Nothing.
    Plain(Box<dyn Stream>),
    /// TLS has to be agreed on.
    Tls(TcpStream, Arc<Tls>),
}

impl RawStream {
    pub(super) const fn scheme(&self) -> Scheme {
        match self {
            Self::Plain(_) => Scheme::Http,
            Self::Tls(..) => Scheme::Https,
        }
    }
}

/// What requests are read from, whatever is below.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_told_apart_by_address_and_site() {
        let peer = |text: &str| Peer::at(text.parse().unwrap());
        assert_eq!(peer("10.0.0.1"), peer("::ffff:10.0.0.1"));
        assert_ne!(peer("10.0.0.1"), peer("10.0.0.2"));
        assert_eq!(peer("2001:db8:1:2::1"), peer("2001:db8:1:2:ffff::9"));
        assert_ne!(peer("2001:db8:1:2::1"), peer("2001:db8:1:3::1"));
        assert_ne!(peer("::1"), peer("::2"));
    }

    /// A socket file is replaced when nobody answers on it, and nothing else ever is.
    #[tokio::test]
    async fn a_socket_replaces_a_stale_one_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.sock");
        let endpoint = Endpoint::Unix(path.clone());
        let first = Listener::bind(&endpoint).unwrap();
        let mode = fs::metadata(&path).unwrap().mode() & 0o777;
        assert_eq!(mode, SOCKET_MODE);
        assert_eq!(
            Listener::bind(&endpoint).unwrap_err().kind(),
            io::ErrorKind::AddrInUse,
            "somebody answers on it"
        );
        drop(first);
        assert!(!path.exists(), "it goes with its listener");

        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a process that was killed leaves it behind");
        let second = Listener::bind(&endpoint).unwrap();
        // Another one took the place: it is not ours to remove.
        fs::remove_file(&path).unwrap();
        let _third = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(second);
        assert!(path.exists());

        let file = directory.path().join("notes");
        fs::write(&file, "kept").unwrap();
        let link = directory.path().join("link.sock");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for taken in [&file, &link, &directory.path().to_owned()] {
            let error = Listener::bind(&Endpoint::Unix(taken.clone())).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{taken:?}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    }

    /// An address that is let go while it is tried again is taken.
    #[tokio::test]
    async fn an_address_in_use_is_tried_again() {
        let held = Listener::bind(&Endpoint::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let endpoint = held.endpoint().clone();
        let again = Listener::bind_patiently(&endpoint);
        tokio::pin!(again);
        assert!(futures_util::poll!(&mut again).is_pending());
        drop(held);
        assert_eq!(again.await.unwrap().endpoint(), &endpoint);

        let held = Listener::bind(&endpoint);
        let error = Listener::bind_patiently(&endpoint).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(held);
    }
}
