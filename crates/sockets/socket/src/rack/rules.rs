//! The rules of a shared rack directory: whose clients may reach whose servers, and at which ports.
//!
//! ```text
//! # www-data to redis
//! allow from 33 to 999 ports 6379,7000-7010
//! allow from 33 to 110
//! ```
//!
//! Users are numbers of the machine, not of a user namespace, because a container has other names than the machine.
//! Programs of one user may reach each other at all ports without a rule; nobody else may reach anybody without one.
//! A file with an error allows nothing between users.

use std::fmt;

use crate::process::settings::{PortList, PortListError};

/// The number that stands for every user without a number in a user namespace (`user_namespaces(7)`).
pub const OVERFLOW_UID: u32 = 65534;
/// Longest file that is read.
pub const FILE_BYTES_MAX: usize = 256 << 10;

/// The rules of a rack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    allowed: Vec<Rule>,
}

/// A rule: clients of one user may reach servers of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The user of the clients, which connect.
    pub from: u32,
    /// The user of the servers, which accept.
    pub to: u32,
    /// The ports of the servers; all without a list.
    pub ports: Option<PortList>,
}

/// An error in the rules, with its line, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// The line.
    pub line: usize,
    what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    Form(String),
    User(String),
    Overflow,
    Ports(PortListError),
    Length,
}

impl fmt::Display for RuleError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "line {}: ", self.line)?;
        match &self.what {
            What::Form(text) => {
                write!(formatter, "'{text}': not a rule; write allow from UID to UID, and ports LIST if not all")
            }
            What::User(word) => {
                write!(formatter, "user '{word}': not a number; write the user's number (id -u {word})")
            }
            What::Overflow => {
                write!(formatter, "user {OVERFLOW_UID} stands for every user without a number; name another user")
            }
            What::Ports(error) => write!(formatter, "ports {error}"),
            What::Length => write!(formatter, "the file has more than {FILE_BYTES_MAX} bytes; join rules"),
        }
    }
}

impl std::error::Error for RuleError {}

impl Rules {
    /// Parses the contents of a rules file.
    ///
    /// # Errors
    /// The first line that is not a rule. The rack then allows nothing between users.
    pub fn parse(text: &[u8]) -> Result<Self, RuleError> {
        if text.len() > FILE_BYTES_MAX {
            return Err(RuleError { line: 1, what: What::Length });
        }
        let text = String::from_utf8_lossy(text);
        let mut allowed = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                allowed.push(Rule::parse(line).map_err(|what| RuleError { line: index + 1, what })?);
            }
        }
        Ok(Self { allowed })
    }

    /// Returns whether clients of the user `from` may reach servers of the user `to` at a port.
    pub fn allow(&self, from: u32, to: u32, port: u16) -> bool {
        let is_named = from != OVERFLOW_UID && to != OVERFLOW_UID;
        is_named && (from == to || self.allowed.iter().any(|rule| rule.is_between(from, to) && rule.has_port(port)))
    }

    /// Returns the users whose servers clients of the user `from` may reach at a port: this user first, and each once.
    pub fn servers(&self, from: u32, port: u16) -> Vec<u32> {
        let mut users = vec![from];
        for rule in self.allowed.iter().filter(|rule| rule.from == from && rule.has_port(port)) {
            if !users.contains(&rule.to) {
                users.push(rule.to);
            }
        }
        users.retain(|user| *user != OVERFLOW_UID);
        users
    }

    /// Returns all rules, in the order of the file.
    pub fn all(&self) -> &[Rule] {
        &self.allowed
    }
}

impl Rule {
    fn parse(line: &str) -> Result<Self, What> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (from, to, ports) = match words[..] {
            ["allow", "from", from, "to", to] => (from, to, None),
            ["allow", "from", from, "to", to, "ports", ref ports @ ..] if !ports.is_empty() => {
                (from, to, Some(PortList::parse(&ports.concat()).map_err(What::Ports)?))
            }
            _ => return Err(What::Form(line.chars().take(80).collect())),
        };
        Ok(Self { from: user(from)?, to: user(to)?, ports })
    }

    fn is_between(&self, from: u32, to: u32) -> bool {
        (self.from, self.to) == (from, to)
    }

    fn has_port(&self, port: u16) -> bool {
        self.ports.as_ref().is_none_or(|ports| ports.contains(port))
    }
}

fn user(word: &str) -> Result<u32, What> {
    let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
    match word.parse() {
        Ok(OVERFLOW_UID | u32::MAX) => Err(What::Overflow),
        Ok(number) if is_number => Ok(number),
        _ => Err(What::User(word.chars().take(80).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rules(text: &str) -> Rules {
        Rules::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_rule_allows_clients_of_one_user_to_reach_servers_of_another() {
        let rules =
            rules("# www-data to redis\nallow from 33 to 999 ports 6379, 7000-7010\n\nallow from 33 to 110 # all\n");
        assert!(rules.allow(33, 999, 6379) && rules.allow(33, 999, 7005) && rules.allow(33, 110, 1));
        assert!(!rules.allow(33, 999, 6380), "another port");
        assert!(!rules.allow(999, 33, 6379), "the other direction");
        assert!(!rules.allow(0, 999, 6379), "root has no more rights than others");
        assert!(rules.allow(5, 5, 6379), "one user");
        assert_eq!(rules.servers(33, 6379), [33, 999, 110]);
        assert_eq!(rules.servers(999, 6379), [999]);
    }

    #[test]
    fn users_without_a_number_are_never_allowed() {
        let rules = rules("");
        assert!(!rules.allow(OVERFLOW_UID, OVERFLOW_UID, 1));
        assert_eq!(rules.servers(OVERFLOW_UID, 1), []);
        for text in ["allow from 65534 to 1", "allow from 1 to 65534", "allow from 4294967295 to 1"] {
            let error = Rules::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("line 1: user 65534 stands for every user without a number"), "{error}");
        }
    }

    #[test]
    fn errors_name_the_line_the_value_and_the_remedy() {
        for (text, expected) in [
            ("\nallow 1 2", "line 2: 'allow 1 2': not a rule; write allow from UID to UID, and ports LIST if not all"),
            ("deny from 1 to 2", "line 1: 'deny from 1 to 2': not a rule"),
            ("allow from 1 to 2 ports", "line 1: 'allow from 1 to 2 ports': not a rule"),
            ("allow from redis to 2", "line 1: user 'redis': not a number; write the user's number (id -u redis)"),
            ("allow from -1 to 2", "line 1: user '-1'"),
            ("allow from +1 to 2", "line 1: user '+1'"),
            ("allow from 1 to 99999999999", "line 1: user '99999999999'"),
            ("allow from 1 to 2 ports 0", "line 1: ports '0': not a port"),
            ("#\n#\nallow from 1 to 2 ports 5-4", "line 3: ports '5-4': the range ends before it starts"),
        ] {
            let error = Rules::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        let long = vec![b'\n'; FILE_BYTES_MAX + 1];
        assert!(Rules::parse(&long).unwrap_err().to_string().contains("more than 262144 bytes"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_rules_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(rules) = Rules::parse(&bytes) {
                prop_assert!(!rules.allow(1, OVERFLOW_UID, 1));
            }
        }

        #[test]
        fn servers_are_those_who_are_allowed(
            rules in prop::collection::vec((0_u32..4, 0_u32..4, 1_u16..4), 0..8),
            from in 0_u32..4,
            port in 1_u16..4,
        ) {
            let text: String =
                rules.iter().map(|(from, to, port)| format!("allow from {from} to {to} ports {port}\n")).collect();
            let rules = Rules::parse(text.as_bytes()).unwrap();
            let servers = rules.servers(from, port);
            for to in 0..4 {
                prop_assert_eq!(servers.contains(&to), rules.allow(from, to, port));
            }
        }
    }
}
