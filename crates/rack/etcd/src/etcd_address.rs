//! Addresses of racks in etcd.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

const SCHEME: &str = "etcd://";
const SCHEME_TLS: &str = "etcds://";
const FORM: &str = "write etcd://HOST:PORT/PREFIX, as in etcd://127.0.0.1:2379/racks/r1";
const FORM_TLS: &str =
    "write etcds://HOST:PORT/PREFIX?ca=/FILE&cert=/FILE&key=/FILE, the last two where etcd asks for them";
/// Maximum number of members in an address.
const MEMBERS_MAX: usize = 16;
/// Maximum length of an address in bytes.
const BYTES_MAX: usize = 1024;

/// The address of a rack, `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`: members of a cluster, and the prefix of the rack's
/// keys. Over TLS, `etcds://...?ca=FILE[&cert=FILE&key=FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdAddress {
    members: Vec<String>,
    prefix: String,
    tls: Option<TlsFiles>,
}

/// TLS files in PEM. Paths are absolute because monitors have another working directory than commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// CA of etcd's certificates.
    pub ca: PathBuf,
    /// The client's certificate and its private key.
    pub client: Option<(PathBuf, PathBuf)>,
}

impl EtcdAddress {
    /// Returns `HOST:PORT` of each member.
    pub fn members(&self) -> &[String] {
        &self.members
    }

    /// Returns the prefix of all keys, as in `/racks/r1`, with a leading slash and no trailing slash.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the TLS files, if etcd is reached over TLS.
    pub fn tls(&self) -> Option<&TlsFiles> {
        self.tls.as_ref()
    }

    /// Returns the address without TLS files, for error messages.
    pub fn location(&self) -> String {
        let scheme = if self.tls.is_some() { SCHEME_TLS } else { SCHEME };
        format!("{scheme}{}{}", self.members.join(","), self.prefix)
    }

    /// Returns whether a text begins with the scheme of an etcd address.
    pub fn has_scheme(text: &str) -> bool {
        [SCHEME, SCHEME_TLS].iter().any(|scheme| text.starts_with(scheme))
    }
}

impl FromStr for EtcdAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_tls = text.starts_with(SCHEME_TLS);
        let (scheme, form) = if is_tls { (SCHEME_TLS, FORM_TLS) } else { (SCHEME, FORM) };
        let rest = text.strip_prefix(scheme).filter(|_| text.len() <= BYTES_MAX);
        let rest = rest.ok_or_else(|| format!("not an address in etcd; {form}"))?;
        let (rest, files) = if is_tls { rest.split_once('?').unwrap_or((rest, "")) } else { (rest, "") };
        let tls = if is_tls { Some(files.parse()?) } else { None };
        let (members, prefix) = rest.split_once('/').ok_or_else(|| format!("names no prefix of keys; {form}"))?;
        if members.contains('@') {
            let remedy =
                "let etcd know clients by their certificates, or listen where only the rack's machines reach it";
            return Err(format!("users and passwords of etcd are not supported; {remedy}"));
        }
        let members: Vec<String> = members.split(',').map(str::to_owned).collect();
        if let Some(member) = members.iter().find(|member| !is_member(member)) {
            return Err(format!("{member:?} is not HOST:PORT; {form}"));
        }
        if members.len() > MEMBERS_MAX {
            return Err(format!("{} members; name at most {MEMBERS_MAX}", members.len()));
        }
        let prefix = prefix.trim_end_matches('/');
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if !prefix.split('/').all(|segment| !segment.is_empty() && segment.bytes().all(is_letter)) {
            return Err(format!("{prefix:?} is not a prefix; use letters, digits, - _ . and single slashes"));
        }
        Ok(Self { members, prefix: format!("/{prefix}"), tls })
    }
}

impl FromStr for TlsFiles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [mut ca, mut cert, mut key] = [const { None }; 3];
        for part in text.split('&').filter(|part| !part.is_empty()) {
            let (name, path) = part.split_once('=').unwrap_or((part, ""));
            let slot = match name {
                "ca" => &mut ca,
                "cert" => &mut cert,
                "key" => &mut key,
                _ => return Err(format!("{name:?} is none of ca, cert and key; {FORM_TLS}")),
            };
            if !path.starts_with('/') || path.contains(char::is_control) {
                return Err(format!("{name}={path:?} is not an absolute path; {FORM_TLS}"));
            }
            if slot.replace(PathBuf::from(path)).is_some() {
                return Err(format!("{name} is given twice; {FORM_TLS}"));
            }
        }
        let ca = ca.ok_or_else(|| format!("names no CA of etcd's certificate; {FORM_TLS}"))?;
        match (cert, key) {
            (None, None) => Ok(Self { ca, client: None }),
            (Some(cert), Some(key)) => Ok(Self { ca, client: Some((cert, key)) }),
            _ => Err(format!("a client's certificate and its key go together; {FORM_TLS}")),
        }
    }
}

fn is_member(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = match inner {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte)),
    };
    let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
    is_host && is_number && port.parse::<u16>().is_ok_and(|port| port > 0)
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.location())?;
        let Some(TlsFiles { ca, client }) = &self.tls else { return Ok(()) };
        write!(f, "?ca={}", ca.display())?;
        client.as_ref().map_or(Ok(()), |(cert, key)| write!(f, "&cert={}&key={}", cert.display(), key.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_back_from_its_text() {
        for text in [
            "etcd://h:1/r",
            "etcd://127.0.0.1:2379,host-2.x:65535,[::1]:2379/racks/a_b.c-1",
            "etcds://h:1,g:2/r?ca=/etc/a b.pem",
            "etcds://h:1/r?ca=/ca&cert=/c=1&key=/k",
        ] {
            assert_eq!(text.parse::<EtcdAddress>().unwrap().to_string(), text);
        }
        let address: EtcdAddress = "etcds://h:1/r/?key=/k&cert=/c&&ca=/ca".parse().unwrap();
        assert_eq!(address.to_string(), "etcds://h:1/r?ca=/ca&cert=/c&key=/k");
        assert_eq!(address.location(), "etcds://h:1/r");
        let address: EtcdAddress = "etcd://h:1,g:2/r/x//".parse().unwrap();
        assert_eq!((address.prefix(), address.members().len()), ("/r/x", 2));
    }

    #[test]
    fn an_invalid_address_is_refused_with_the_remedy() {
        for (text, word) in [
            ("http://h:1/r", "write etcd://"),
            ("etcd://h:1", "names no prefix"),
            ("etcd://h:1/", "is not a prefix"),
            ("etcd://h:1/a//b", "is not a prefix"),
            ("etcd://h:1/a b", "is not a prefix"),
            ("etcd:///r", "\"\" is not HOST:PORT"),
            ("etcd://h/r", "\"h\" is not HOST:PORT"),
            ("etcd://h:0/r", "\"h:0\""),
            ("etcd://h:+1/r", "\"h:+1\""),
            ("etcd://h:1,,g:1/r", "\"\" is not HOST:PORT"),
            ("etcd://[::g]:1/r", "\"[::g]:1\""),
            ("etcd://h:99999/r", "\"h:99999\""),
            ("etcd://user:secret@h:1/r", "passwords of etcd are not supported"),
            ("etcds://user:secret@h:1/r?ca=/ca", "passwords of etcd are not supported"),
            ("etcd://h:1/r?ca=/ca", "is not a prefix"),
            ("etcds://h:1/r", "names no CA"),
            ("etcds://h:1?ca=/ca", "names no prefix"),
            ("etcds://h:1/r?ca=ca.pem", "not an absolute path"),
            ("etcds://h:1/r?ca", "not an absolute path"),
            ("etcds://h:1/r?ca=/ca&ca=/cb", "given twice"),
            ("etcds://h:1/r?ca=/ca&cert=/c", "go together"),
            ("etcds://h:1/r?ca=/ca&verify=/no", "none of ca"),
        ] {
            let error = text.parse::<EtcdAddress>().unwrap_err();
            assert!(error.contains(word) && error.contains(';') && !error.contains("secret"), "{text}: {error}");
        }
        assert!(format!("etcd://h:1/{}", "r".repeat(2000)).parse::<EtcdAddress>().is_err());
    }
}
