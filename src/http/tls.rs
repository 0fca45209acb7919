//! TLS of the service: a certificate and its key from PEM files, read again on demand.
//!
//! A connection keeps what it began with. New files that cannot be used change nothing.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Where certificate and key are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// The certificate, then those that lead to the root.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

/// The files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate file.
    #[error("tls_cert {file:?} cannot be used: {0}; it must hold PEM certificates, the service's own first", file = .1)]
    Certificate(#[source] pem::Error, PathBuf),
    /// A file without any certificate.
    #[error(
        "tls_cert {0:?} holds no certificate; it must hold PEM certificates, the service's own first"
    )]
    NoCertificate(PathBuf),
    /// The key file.
    #[error("tls_key {file:?} cannot be used: {0}; it must hold one unencrypted PEM private key", file = .1)]
    Key(#[source] pem::Error, PathBuf),
    /// They do not go together.
    #[error(
        "tls_cert and tls_key cannot be used together: {0}; name the key that belongs to the certificate"
    )]
    Pair(#[source] rustls::Error),
}

/// What TLS connections begin with.
pub struct Tls {
    files: TlsFiles,
    now: Mutex<Arc<ServerConfig>>,
}

impl fmt::Debug for Tls {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// One sentence that names the setting and what it takes.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let now = Mutex::new(Arc::new(read(&files)?));
        Ok(Self { files, now })
    }

    /// Reads the files again; connections that begin from here on see what is in them.
    ///
    /// # Errors
    /// The same. The certificate stays as it was then.
    pub fn reload(&self) -> Result<(), TlsError> {
        let fresh = Arc::new(read(&self.files)?);
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        TlsAcceptor::from(Arc::clone(&now))
    }
}

fn read(files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let of_certificate = |error| TlsError::Certificate(error, files.certificate.clone());
    let chain = CertificateDer::pem_file_iter(&files.certificate)
        .map_err(of_certificate)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(of_certificate)?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate(files.certificate.clone()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| TlsError::Key(error, files.key.clone()))?;
    warn_of_readers(&files.key);
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Pair)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(TlsError::Pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// A key that everybody on the machine can read is no secret. A group may share one.
fn warn_of_readers(key: &Path) {
    let mode = std::fs::metadata(key).map_or(0, |metadata| metadata.permissions().mode());
    if mode & 0o007 != 0 {
        tracing::warn!(
            key = %key.display(),
            mode = format!("{:o}", mode & 0o777),
            "the key of the certificate can be read by everybody on this machine; give it mode 600"
        );
    }
}
