//! Access rules: who may connect to which ports of whom.

use std::fmt;

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, de};

use crate::{Access, PortList};

/// Stands for every node.
pub(crate) const ANY_NODE: &str = "*";

/// Who may, or may not, connect to what.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessRule {
    /// The node that connects, or `*`.
    #[serde(default = "any_node")]
    pub from: String,
    /// The node that listens, or `*`.
    #[serde(default = "any_node")]
    pub to: String,
    /// The ports that it listens at; all without it.
    #[serde(default, deserialize_with = "ports")]
    pub ports: Option<PortList>,
    /// What happens to such a connection.
    pub action: Access,
}

impl AccessRule {
    /// The node that connects, if it is a certain one.
    pub fn from_node(&self) -> Option<&str> {
        (self.from != ANY_NODE).then_some(self.from.as_str())
    }

    /// Whether it speaks of connections to a node.
    pub fn concerns(&self, to: &str) -> bool {
        self.to == ANY_NODE || self.to == to
    }

    /// Whether it speaks of a connection of node `from` to a port of node `to`.
    pub fn matches(&self, from: &str, to: &str, port: u16) -> bool {
        let has = self.ports.as_ref().is_none_or(|ports| ports.contains(port));
        self.from_node().is_none_or(|node| node == from) && self.concerns(to) && has
    }
}

fn any_node() -> String {
    ANY_NODE.to_owned()
}

/// A port list, or the number of a single port.
fn ports<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PortList>, D::Error> {
    deserializer.deserialize_any(PortsVisitor).map(Some)
}

struct PortsVisitor;

impl Visitor<'_> for PortsVisitor {
    type Value = PortList;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ports as in 6379 or \"80,443,6000-6100\"")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<PortList, E> {
        self.visit_str(&value.to_string())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PortList, E> {
        text.parse().map_err(de::Error::custom)
    }
}
