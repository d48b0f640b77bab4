//! Listeners of other nodes that programs without the library reach.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

use crate::PortList;

/// The listeners of other nodes at whose own addresses the proxy of a node listens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Publish {
    /// None.
    #[default]
    Nothing,
    /// All.
    All,
    /// Those with these ports.
    Ports(PortList),
}

impl Publish {
    /// Returns whether a listener with this port is published.
    pub fn has(&self, port: u16) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Ports(ports) => ports.contains(port),
        }
    }
}

impl fmt::Display for Publish {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => formatter.write_str("false"),
            Self::All => formatter.write_str("true"),
            Self::Ports(ports) => write!(formatter, "[\"{ports}\"]"),
        }
    }
}

impl<'de> Deserialize<'de> for Publish {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PublishVisitor)
    }
}

struct PublishVisitor;

/// A number of a port, or a text of several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Port(i64),
    Ports(String),
}

impl<'de> Visitor<'de> for PublishVisitor {
    type Value = Publish;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("true, false, or a list of ports as in [6379, \"8000-8010\"]")
    }

    fn visit_bool<E: Error>(self, is_all: bool) -> Result<Publish, E> {
        Ok(if is_all { Publish::All } else { Publish::Nothing })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Publish, A::Error> {
        let mut texts = Vec::new();
        while let Some(entry) = entries.next_element::<Entry>()? {
            texts.push(match entry {
                Entry::Port(port) => port.to_string(),
                Entry::Ports(ports) => ports,
            });
        }
        if texts.is_empty() {
            return Err(A::Error::custom("an empty list publishes nothing; name ports, or write false"));
        }
        texts.join(",").parse().map(Publish::Ports).map_err(A::Error::custom)
    }
}
