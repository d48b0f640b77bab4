//! Where in which etcd a rack lies.

use std::fmt;
use std::str::FromStr;

const SCHEME: &str = "etcd://";
/// Members that an address names, at most.
const MEMBERS_MAX: usize = 16;
/// Bytes of an address, at most.
const BYTES_MAX: usize = 1024;

/// `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`: some members of a cluster, and what the rack's keys begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    members: Vec<String>,
    prefix: String,
}

impl Address {
    /// `HOST:PORT` of each member.
    pub fn members(&self) -> &[String] {
        &self.members
    }

    /// What keys begin with, as in `/racks/r1`: a slash at its begin, none at its end.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether a text is meant to be one.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(SCHEME)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write etcd://HOST:PORT/PREFIX, as in etcd://127.0.0.1:2379/racks/r1";
        let rest = text.strip_prefix(SCHEME).filter(|_| text.len() <= BYTES_MAX);
        let rest = rest.ok_or_else(|| format!("no address in etcd; {form}"))?;
        let (members, prefix) = rest.split_once('/').ok_or_else(|| format!("names no prefix of keys; {form}"))?;
        if members.contains('@') {
            let remedy = "let etcd listen on a loopback or private address, and trust who reaches it";
            return Err(format!("users and passwords of etcd are not supported; {remedy}"));
        }
        let members: Vec<String> = members.split(',').map(str::to_owned).collect();
        if let Some(member) = members.iter().find(|member| !is_member(member)) {
            return Err(format!("{member:?} is no HOST:PORT; {form}"));
        }
        if members.len() > MEMBERS_MAX {
            return Err(format!("{} members; name at most {MEMBERS_MAX}", members.len()));
        }
        let prefix = prefix.trim_end_matches('/');
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if !prefix.split('/').all(|segment| !segment.is_empty() && segment.bytes().all(is_letter)) {
            return Err(format!("{prefix:?} is no prefix; use letters, digits, - _ . and single slashes"));
        }
        Ok(Self { members, prefix: format!("/{prefix}") })
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

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}{}", self.members.join(","), self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_alike() {
        for text in ["etcd://h:1/r", "etcd://127.0.0.1:2379,host-2.x:65535,[::1]:2379/racks/a_b.c-1"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        let address: Address = "etcd://h:1,g:2/r/x//".parse().unwrap();
        assert_eq!((address.prefix(), address.members().len()), ("/r/x", 2));
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_would_be_one() {
        for (text, word) in [
            ("http://h:1/r", "write etcd://"),
            ("etcd://h:1", "names no prefix"),
            ("etcd://h:1/", "is no prefix"),
            ("etcd://h:1/a//b", "is no prefix"),
            ("etcd://h:1/a b", "is no prefix"),
            ("etcd:///r", "\"\" is no HOST:PORT"),
            ("etcd://h/r", "\"h\" is no HOST:PORT"),
            ("etcd://h:0/r", "\"h:0\""),
            ("etcd://h:+1/r", "\"h:+1\""),
            ("etcd://h:1,,g:1/r", "\"\" is no"),
            ("etcd://[::g]:1/r", "\"[::g]:1\""),
            ("etcd://h:99999/r", "\"h:99999\""),
            ("etcd://user:secret@h:1/r", "passwords of etcd are not supported"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(word) && error.contains(';') && !error.contains("secret"), "{text}: {error}");
        }
        assert!(format!("etcd://h:1/{}", "r".repeat(2000)).parse::<Address>().is_err());
    }
}
