//! TLS for etcd: the trusted CA, and the client's certificate.
//!
//! Files are read for each connection, because short-lived certificates are renewed while monitors run.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, Error, RootCertStore};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use crate::etcd_address::TlsFiles;
use crate::printable::printable;

/// Maximum size of a file in bytes; a CA file may contain many certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Returns the TLS configuration, or a description of what is wrong with the files and the remedy.
pub fn config(files: &TlsFiles) -> Result<TlsConfig, String> {
    // Installing fails if the process already has a default provider, which serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (roots, _) = read_pem(&files.ca)?;
    let store = root_store(&files.ca, &roots)?;
    let client = files.client.as_ref().map(|(cert, key)| client_certificate(cert, key, store)).transpose()?;
    Ok(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots)).client_cert(client).build())
}

/// Returns the reason and remedy if a connection has failed because of TLS. If only one side uses TLS, or if etcd
/// rejects the client's certificate, the connection may end without an alert.
pub fn failure_reason(error: &io::Error, is_tls: bool) -> Option<String> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    if let Some(error) = error.get_ref().and_then(|error| error.downcast_ref::<Error>()) {
        return Some(format!("TLS fails: {}; {}", printable(&error.to_string()), remedy(error)));
    }
    let has_ended = matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
    let remedy = if is_tls { KNOWN_CLIENT } else { "write etcds:// if etcd talks TLS there" };
    has_ended.then(|| format!("ends the connection without an answer ({error}); {remedy}"))
}

const KNOWN_CLIENT: &str =
    "see that etcd's CA knows the client's certificate (cert and key), or write etcd:// if it talks no TLS there";

fn remedy(error: &Error) -> &'static str {
    match error {
        Error::InvalidCertificate(_) => "see that ca is the CA of etcd's certificate, which names that host",
        Error::InvalidMessage(_) => "see that etcd talks TLS there, or write etcd://",
        Error::AlertReceived(_) => KNOWN_CLIENT,
        _ => "see that ca, cert and key are for that etcd",
    }
}

fn read_pem(path: &Path) -> Result<(Vec<Certificate<'static>>, Vec<PrivateKey<'static>>), String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}; give a file in PEM", path.display());
    let bytes = read_file(path).map_err(|error| failed(&error))?;
    let (mut certificates, mut keys) = (Vec::new(), Vec::new());
    for item in parse_pem(&bytes) {
        match item.map_err(|error| failed(&error))? {
            PemItem::Certificate(certificate) => certificates.push(certificate),
            PemItem::PrivateKey(key) => keys.push(key),
            _ => {}
        }
    }
    Ok((certificates, keys))
}

/// Reads a regular file. Reading from a pipe or device could block or never end.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    let is_short = bytes.len() as u64 <= FILE_BYTES_MAX;
    if is_short { Ok(bytes) } else { Err(io::Error::other(format!("more than {FILE_BYTES_MAX} bytes"))) }
}

fn root_store(path: &Path, roots: &[Certificate<'static>]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for root in roots {
        let added = store.add(CertificateDer::from(root.der().to_vec()));
        added.map_err(|error| format!("{}: {error}; give the CA's certificate in PEM", path.display()))?;
    }
    if store.is_empty() {
        return Err(format!("{}: no certificate in it; give the CA's certificate in PEM", path.display()));
    }
    Ok(store)
}

/// Returns a client certificate after checking that its key matches and that TLS can use it; ureq would not report
/// that.
fn client_certificate(cert: &Path, key: &Path, store: RootCertStore) -> Result<ClientCert, String> {
    let chain = read_pem(cert)?.0;
    if chain.is_empty() {
        return Err(format!("{}: no certificate in it; give the client's certificate in PEM", cert.display()));
    }
    let private = read_pem(key)?.1.into_iter().next();
    let private = private.ok_or_else(|| format!("{}: no key in it; give the client's key in PEM", key.display()))?;
    let unusable = |error: &dyn std::fmt::Display| {
        format!("{} and {}: {error}; give a certificate and its own key", cert.display(), key.display())
    };
    let certificates = chain.iter().map(|it| CertificateDer::from(it.der().to_vec())).collect();
    let private_der = PrivateKeyDer::try_from(private.der().to_vec()).map_err(|error| unusable(&error))?;
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| unusable(&error))?;
    let config = builder.with_root_certificates(store).with_client_auth_cert(certificates, private_der);
    config.map_err(|error| unusable(&error))?;
    Ok(ClientCert::new_with_certs(&chain, private))
}
