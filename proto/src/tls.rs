//! TLS from files: a certificate and a key for a server, an authority for a client.
//!
//! With a client authority the server asks every client for a certificate (mutual TLS). Files are
//! read once; a program that should take a new certificate is restarted, which costs a marathon
//! nothing.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

/// Why TLS could not be set up. Every message names the file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read.
    #[error("cannot read the {role} {path}: {source}", path = path.display())]
    Read {
        /// What the file is for.
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The files hold nothing that TLS can use.
    #[error(
        "no usable certificate or key in {files}: {problem}; both must be PEM and belong together"
    )]
    Unusable {
        /// The files, in the order given.
        files: String,
        /// What the TLS library said.
        problem: String,
    },
    /// Only one of certificate and key was given.
    #[error("TLS needs a certificate and its key: give both or neither")]
    Half,
}

/// A certificate chain and its private key, both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// The certificate, followed by its chain.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

impl IdentityFiles {
    /// The pair from two optional settings.
    ///
    /// # Errors
    /// [`TlsError::Half`] when just one is set.
    pub fn from_options(
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> Result<Option<Self>, TlsError> {
        match (cert, key) {
            (Some(cert), Some(key)) => Ok(Some(Self { cert, key })),
            (None, None) => Ok(None),
            _ => Err(TlsError::Half),
        }
    }

    fn names(&self) -> String {
        format!("{} and {}", self.cert.display(), self.key.display())
    }
}

/// What a server presents, and which authority its clients must come from: for HTTP/2, which gRPC is,
/// and HTTP/1.1.
///
/// # Errors
/// [`TlsError`] when a file is unreadable or holds nothing usable.
pub fn server(
    identity: &IdentityFiles,
    client_ca: Option<&Path>,
) -> Result<Arc<rustls::ServerConfig>, TlsError> {
    let mut files = identity.names();
    if let Some(ca) = client_ca {
        files = format!("{files} and {}", ca.display());
    }
    let unusable = |problem: String| TlsError::Unusable {
        files: files.clone(),
        problem,
    };
    let certificates = |pem: &[u8]| {
        CertificateDer::pem_slice_iter(pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| unusable(error.to_string()))
    };
    let chain = certificates(&read("certificate", &identity.cert)?)?;
    let key = PrivateKeyDer::from_pem_slice(&read("private key", &identity.key)?)
        .map_err(|error| unusable(error.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(authority(ca)?.as_ref())? {
                roots
                    .add(certificate)
                    .map_err(|error| unusable(error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unusable(error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| unusable(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// The authority a client trusts.
///
/// # Errors
/// [`TlsError`] when a file is unreadable or holds nothing usable.
pub fn client(ca: &Path) -> Result<ClientTlsConfig, TlsError> {
    let config = ClientTlsConfig::new().ca_certificate(authority(ca)?);
    // Building an endpoint with it is how the PEM gets parsed now, not at the first connection.
    Endpoint::from_static("https://localhost")
        .tls_config(config.clone())
        .map_err(|error| TlsError::Unusable {
            files: ca.display().to_string(),
            problem: innermost(&error),
        })?;
    Ok(config)
}

fn authority(path: &Path) -> Result<Certificate, TlsError> {
    let pem = read("certificate authority", path)?;
    // The TLS library takes an empty bundle for "trust nobody" and fails at the first connection.
    if !String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----") {
        return Err(TlsError::Unusable {
            files: path.display().to_string(),
            problem: "it has no CERTIFICATE block".to_owned(),
        });
    }
    Ok(Certificate::from_pem(pem))
}

fn read(role: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read {
        role,
        path: path.to_owned(),
        source,
    })
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A self-signed certificate for this machine on disk: its authority is itself.
    pub(crate) fn localhost_identity(dir: &TempDir) -> IdentityFiles {
        let names = ["localhost", "127.0.0.1"].map(str::to_owned);
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let files = IdentityFiles {
            cert: dir.path().join("cert.pem"),
            key: dir.path().join("key.pem"),
        };
        fs::write(&files.cert, made.cert.pem()).unwrap();
        fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
        files
    }

    /// A client of rustls alone that trusts the certificate.
    pub(crate) fn trusting(files: &IdentityFiles) -> tokio_rustls::TlsConnector {
        let mut roots = RootCertStore::empty();
        let pem = fs::read(&files.cert).unwrap();
        roots
            .add(CertificateDer::from_pem_slice(&pem).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Arc::new(config).into()
    }

    #[test]
    fn good_files_make_both_sides() {
        let dir = TempDir::new().unwrap();
        let files = localhost_identity(&dir);
        server(&files, Some(&files.cert)).unwrap();
        client(&files.cert).unwrap();
    }

    #[test]
    fn a_missing_file_is_named_with_its_role() {
        let dir = TempDir::new().unwrap();
        let mut files = localhost_identity(&dir);
        files.key = dir.path().join("absent.pem");
        let error = server(&files, None).unwrap_err().to_string();
        assert!(
            error.contains("private key") && error.contains("absent.pem"),
            "{error}"
        );
    }

    #[test]
    fn damaged_files_are_refused_at_start() {
        let dir = TempDir::new().unwrap();
        let files = localhost_identity(&dir);
        let junk = dir.path().join("junk.pem");
        fs::write(&junk, "not a certificate").unwrap();
        let cases = [
            server(
                &IdentityFiles {
                    cert: junk.clone(),
                    ..files.clone()
                },
                None,
            )
            .err(),
            server(
                &IdentityFiles {
                    key: junk.clone(),
                    ..files.clone()
                },
                None,
            )
            .err(),
            server(&files, Some(&junk)).err(),
            client(&junk).err(),
        ];
        for error in cases {
            let error = error.expect("junk must be refused").to_string();
            assert!(error.contains("junk.pem"), "{error}");
        }
    }

    #[test]
    fn half_an_identity_is_refused() {
        let path = || Some(PathBuf::from("x.pem"));
        assert!(IdentityFiles::from_options(path(), None).is_err());
        assert!(IdentityFiles::from_options(None, path()).is_err());
        assert_eq!(IdentityFiles::from_options(None, None).unwrap(), None);
    }
}
