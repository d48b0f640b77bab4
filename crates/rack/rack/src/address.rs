//! Addresses in rack files.

use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// Deserializes an address that a node can have. An IPv4-mapped IPv6 address becomes IPv4.
pub(crate) fn ip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    let refused = || D::Error::custom(format!("'{text}' is not an address; write one as in \"127.77.0.1\""));
    let address: IpAddr = text.parse().map_err(|_| refused())?;
    let address = address.to_canonical();
    let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
    if address.is_unspecified() || address.is_multicast() || is_broadcast {
        let what = format!("'{text}' is not the address of a single node; write one as in \"127.77.0.1\"");
        return Err(D::Error::custom(what));
    }
    if address.is_loopback() && !is_emulated(address) {
        let what = format!(
            "'{text}' is a loopback address, which other nodes cannot reach; write one of 127.77.0.0/16 or \
             fd00:77::/32 for a node of this machine, as in \"127.77.0.1\""
        );
        return Err(D::Error::custom(what));
    }
    if matches!(address, IpAddr::V6(address) if address.is_unicast_link_local()) {
        let what = format!(
            "'{text}' is a link-local address, which depends on the interface; write a unique one, as in \"fd00::1\""
        );
        return Err(D::Error::custom(what));
    }
    Ok(address)
}

/// Returns whether an address belongs to the ranges for several nodes on one machine, 127.77.0.0/16 and fd00:77::/32.
/// Programs treat these addresses as remote even where the machine owns them.
pub(crate) fn is_emulated(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[..2] == [127, 77],
        IpAddr::V6(address) => address.segments()[..2] == [0xfd00, 0x77],
    }
}

/// Deserializes a loopback address with a port.
pub(crate) fn loopback_port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let remedy = "write one as in \"127.0.0.1:9464\"";
    let address: SocketAddr =
        text.parse().map_err(|_| D::Error::custom(format!("'{text}' is not an address with a port; {remedy}")))?;
    if !address.ip().is_loopback() || address.port() == 0 {
        return Err(D::Error::custom(format!("'{text}' is not a port on a loopback address; {remedy}")));
    }
    Ok(Some(address))
}
