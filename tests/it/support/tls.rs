//! Certificates that are made when they are needed, and clients that trust one of them only.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use kvgate::http::TlsFiles;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::app::{Answer, SOON, parse_raw};

/// A certificate for loopback and its key.
pub struct Identity {
    pub certificate: String,
    pub key: String,
    der: CertificateDer<'static>,
}

impl Identity {
    pub fn new() -> Self {
        let names = ["localhost", "127.0.0.1"].map(str::to_owned);
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        Self {
            certificate: made.cert.pem(),
            key: made.signing_key.serialize_pem(),
            der: made.cert.der().clone(),
        }
    }

    /// Writes both into files, over those of another one.
    pub fn write(&self, directory: &Path) -> TlsFiles {
        let files = TlsFiles {
            certificate: directory.join("cert.pem"),
            key: directory.join("key.pem"),
        };
        std::fs::write(&files.certificate, &self.certificate).unwrap();
        std::fs::write(&files.key, &self.key).unwrap();
        files
    }

    /// Connects to a service that must have this certificate.
    pub async fn connect(
        &self,
        address: SocketAddr,
        protocols: &[&str],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        let mut config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols
            .iter()
            .map(|name| name.as_bytes().into())
            .collect();
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        tokio::time::timeout(SOON, connecting)
            .await
            .expect("TLS hung")
    }

    /// Sends bytes as they are over TLS, and reads until the server closes.
    pub async fn raw(&self, address: SocketAddr, request: &[u8]) -> std::io::Result<Answer> {
        let mut stream = self.connect(address, &["http/1.1"]).await?;
        stream.write_all(request).await?;
        let mut bytes = Vec::new();
        tokio::time::timeout(SOON, stream.read_to_end(&mut bytes))
            .await
            .expect("the server did not close the connection")?;
        Ok(parse_raw(&bytes))
    }

    pub async fn get(&self, address: SocketAddr, path: &str) -> std::io::Result<Answer> {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        self.raw(address, request.as_bytes()).await
    }
}
