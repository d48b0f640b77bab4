//! The time after which a sender retransmits what is not acknowledged.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use sim::Span;
use thiserror::Error;

use crate::network::NetworkConfig;
use crate::topology::NetworkNode;

/// The unit of a queue pair's ACK timer: 4.096 us x 2^code (InfiniBand Architecture 9.7.6.1.3). Code 0 never expires.
const UNIT: Span = Span::from_ps(4_096_000);
/// Maximum code: 2.4 hours.
const CODE_MAX: u8 = 31;
/// The code of networks that are lossless but for their links: 67 ms, the default of perftest and NCCL. How long pauses
/// delay a packet has no bound that is worth computing.
const LOSSLESS_CODE: u8 = 14;

/// The shortest default. A flow fails after eight timeouts in a row, which must outlast the losses of an incast: with
/// small buffers, whose queues drain in 10 to 60 us, most flows of an incast failed otherwise.
const LEAST: Span = Span::from_ps(1_000_000_000);

/// The longest timeout that can be given, in nanoseconds: 2 hours.
const TIMEOUT_NS_MAX: f64 = 7.2e12;

/// The ACK timeout of queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AckTimeout {
    /// Fits the network: the round trip plus the time in which the longest possible queue drains, at least 1 ms. Never
    /// with priority flow control, unless links lose packets: then 67 ms. `irn` has its published timeouts.
    #[default]
    Auto,
    /// Senders never retransmit without a negative acknowledgement, as in the lossless networks of the literature.
    Off,
    /// The shortest that NICs offer from this on.
    AtLeast(Span),
}

/// A text that is not an ACK timeout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("'{0}' is not an ACK timeout; write auto, off, or a time from 1 us to 2 h as in '67 ms'")]
pub struct AckTimeoutError(String);

impl AckTimeout {
    /// Returns the code of the ACK timer in a network with this round trip; 0 for no timeout.
    pub fn code(self, network: &NetworkConfig, round_trip: Span) -> u8 {
        match self {
            Self::Off => 0,
            Self::AtLeast(span) => code_of(span),
            Self::Auto if network.switches.pfc.is_none() => code_of((round_trip + longest_queue(network)).max(LEAST)),
            Self::Auto if network.impairments.is_empty() => 0,
            Self::Auto => LOSSLESS_CODE,
        }
    }

    /// Returns the time that this code stands for, or `None` if there is no timeout.
    pub fn of_code(code: u8) -> Option<Span> {
        (code > 0).then(|| UNIT * (1 << code))
    }
}

/// Returns the code of the shortest timeout from `span` on.
fn code_of(span: Span) -> u8 {
    (1..CODE_MAX).find(|code| UNIT * (1 << code) >= span).unwrap_or(CODE_MAX)
}

/// Returns the longest time in which a full queue drains: a queue may have `alpha` times the free bytes of its switch's
/// buffer.
fn longest_queue(network: &NetworkConfig) -> Span {
    let alpha = network.switches.alpha;
    let queue_bits = network.switches.buffer_bytes as f64 * 8.0 * alpha / (1.0 + alpha);
    let has_queue = |ends: &[NetworkNode; 2]| ends.iter().any(|end| matches!(end, NetworkNode::Switch(_)));
    let links = network.topology.links().iter().filter(|link| has_queue(&link.ends));
    let longest_ns = links.map(|link| queue_bits / link.rate.gbps()).fold(0.0, f64::max);
    Span::from_ns(longest_ns.min(TIMEOUT_NS_MAX))
}

impl FromStr for AckTimeout {
    type Err = AckTimeoutError;

    fn from_str(text: &str) -> Result<Self, AckTimeoutError> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => {
                let ns = config::parse_nanoseconds(text).filter(|ns| (1e3..=TIMEOUT_NS_MAX).contains(ns));
                ns.map(|ns| Self::AtLeast(Span::from_ns(ns))).ok_or_else(|| AckTimeoutError(text.to_owned()))
            }
        }
    }
}

impl fmt::Display for AckTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::AtLeast(span) => write!(f, "{} ns", span.ns()),
        }
    }
}

impl Serialize for AckTimeout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AckTimeout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Value {
            Number(f64),
            Text(String),
        }
        let text = match Value::deserialize(deserializer)? {
            Value::Number(ns) => ns.to_string(),
            Value::Text(text) => text,
        };
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::impairment::Impairments;
    use crate::switch::{Pfc, SwitchConfig};
    use crate::topology::TopologyPreset;

    fn network(pfc: Option<Pfc>, loss: f64) -> NetworkConfig {
        let mut network = NetworkConfig::new(TopologyPreset::LeafSpine256.topology(), 1);
        network.switches = SwitchConfig { pfc, ..network.switches };
        if loss > 0.0 {
            network.impairments = vec![(0, 0, Impairments::uniform_loss(loss))];
        }
        network
    }

    #[test]
    fn the_default_outlasts_the_longest_queue_and_is_off_in_lossless_networks() {
        let round_trip = Span::from_ns(10_000.0);
        let code = |network: &NetworkConfig| AckTimeout::Auto.code(network, round_trip);
        // Half of 32 MB at the slowest link's rate.
        let lossy = network(None, 0.0);
        let slowest = lossy.topology.links().iter().map(|link| link.rate.transmission_time(16_000_000)).max().unwrap();
        let span = AckTimeout::of_code(code(&lossy)).unwrap();
        assert!(span >= slowest + round_trip && span < (slowest + round_trip) * 2, "{span}");
        assert_eq!(code(&network(Some(Pfc::default()), 0.0)), 0);
        assert_eq!(
            AckTimeout::of_code(code(&network(Some(Pfc::default()), 0.01))),
            Some(Span::from_ps(67_108_864_000))
        );
    }

    #[test]
    fn a_buffer_of_any_size_has_a_timeout_that_is_long_enough() {
        let mut network = network(None, 0.0);
        let mut codes = [32_000_000, 1 << 40, 1 << 63, u64::MAX].map(|bytes| {
            network.switches.buffer_bytes = bytes;
            AckTimeout::Auto.code(&network, Span::ZERO)
        });
        assert!(codes.is_sorted() && codes[3] == CODE_MAX, "{codes:?}");
        network.switches.buffer_bytes = 100_000;
        let span = AckTimeout::of_code(AckTimeout::Auto.code(&network, Span::ZERO)).unwrap();
        assert!(span >= LEAST && span < LEAST * 2, "{span}");
        network.switches.alpha = f64::MAX;
        codes[0] = AckTimeout::Auto.code(&network, Span::ZERO);
        assert_eq!(codes[0], CODE_MAX);
    }

    #[test]
    fn a_timeout_is_rounded_up_to_one_that_nics_offer() {
        let network = network(None, 0.0);
        for (text, us) in [("1 us", 8.192), ("8.2 us", 16.384), ("67 ms", 67_108.864), ("262144", 262.144)] {
            let timeout: AckTimeout = text.parse().unwrap();
            let span = AckTimeout::of_code(timeout.code(&network, Span::ZERO)).unwrap();
            assert_eq!(span, Span::from_ns(us * 1e3), "{text}");
        }
        assert_eq!("off".parse::<AckTimeout>().unwrap().code(&network, Span::ZERO), 0);
    }

    #[test]
    fn other_texts_are_refused_with_the_remedy() {
        for text in ["", "on", "-1 us", "0", "1e30", "nan", "3 h", "999"] {
            let error = text.parse::<AckTimeout>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")) && error.contains("write auto, off"), "{error}");
        }
    }
}
