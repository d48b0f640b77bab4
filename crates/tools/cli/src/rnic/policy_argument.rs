//! The transport policy of a NIC as a command-line argument.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use rnic::nic::TransportPolicy;

/// Returns a parser that accepts policies by name and describes them in help texts.
pub fn parser() -> impl TypedValueParser<Value = TransportPolicy> {
    let value = |policy: TransportPolicy| PossibleValue::new(policy.name()).help(policy.description());
    PossibleValuesParser::new(TransportPolicy::ALL.map(value)).map(|name| {
        let named = |policy: &TransportPolicy| policy.name() == name;
        TransportPolicy::ALL.into_iter().find(named).unwrap_or_default()
    })
}
