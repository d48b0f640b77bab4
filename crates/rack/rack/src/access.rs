//! Access rules: which nodes may connect to which ports of which nodes.

use std::fmt;

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, de};

use crate::{Access, PortList};

/// Matches every node.
pub(crate) const ANY_NODE: &str = "*";

/// An access rule.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessRule {
    /// Name of the connecting node, or `*`.
    #[serde(default = "any_node")]
    pub from: String,
    /// Name of the listening node, or `*`.
    #[serde(default = "any_node")]
    pub to: String,
    /// Ports of the listener; all ports if absent.
    #[serde(default, deserialize_with = "ports")]
    pub ports: Option<PortList>,
    /// Action for a connection that matches.
    pub action: Access,
}

impl AccessRule {
    /// Returns the name of the connecting node, unless the rule is for any node.
    pub fn from_node(&self) -> Option<&str> {
        (self.from != ANY_NODE).then_some(self.from.as_str())
    }

    /// Returns whether the rule is for connections to node `to`.
    pub fn applies_to(&self, to: &str) -> bool {
        self.to == ANY_NODE || self.to == to
    }

    /// Returns whether the rule matches a connection of node `from` to a port of node `to`.
    pub fn matches(&self, from: &str, to: &str, port: u16) -> bool {
        let has = self.ports.as_ref().is_none_or(|ports| ports.contains(port));
        self.from_node().is_none_or(|node| node == from) && self.applies_to(to) && has
    }
}

fn any_node() -> String {
    ANY_NODE.to_owned()
}

/// Deserializes a port list, or the number of a single port.
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
