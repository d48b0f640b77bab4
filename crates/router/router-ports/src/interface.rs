//! Kernel interfaces: index, name and properties.

use std::ffi::{c_char, c_ulong};
use std::fmt;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use packet::ethernet::MacAddress;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::system::checked;

/// The kernel's index of an interface, which is not reused within a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceIndex(pub u32);

impl InterfaceIndex {
    /// Returns the kernel's name of the interface in the calling thread's network namespace.
    pub fn name(self) -> Option<String> {
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        rustix::net::netdevice::index_to_name(socket.ok()?, self.0).ok()
    }
}

impl fmt::Display for InterfaceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.0)
    }
}

/// A kernel interface, as it was when it was queried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's index.
    pub index: InterfaceIndex,
    /// The kernel's name.
    pub name: String,
    /// The hardware address.
    pub mac: MacAddress,
    /// The MTU: the longest IP packet that it carries, in bytes.
    pub mtu_bytes: u32,
    /// The name of the driver; empty if the driver does not report it.
    pub driver: String,
    /// The number of receive queues, at least 1.
    pub receive_queues: u32,
}

/// The reason why an interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// There is no such interface.
    #[error("interface '{name}': not in this network namespace; `ip link` lists those that are")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The interface does not carry Ethernet frames.
    #[error("interface '{name}': its hardware type is {kind}, not Ethernet (1); a port needs Ethernet")]
    NotEthernet {
        /// The name.
        name: String,
        /// The kernel's `ARPHRD_` number.
        kind: u16,
    },
    /// The kernel refused a request.
    #[error("interface '{name}': {doing}: {source}")]
    Refused {
        /// The name.
        name: String,
        /// What was attempted.
        doing: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl Interface {
    /// Returns the interface with this name in the calling thread's network namespace.
    pub fn by_name(name: &str) -> Result<Interface, InterfaceError> {
        let query = InterfaceQuery::open(name)?;
        let index = rustix::net::netdevice::name_to_index(&query.socket, name)
            .map_err(|_| InterfaceError::Unknown { name: name.to_string() })?;
        let (kind, mac) = query.hardware_address()?;
        if kind != libc::ARPHRD_ETHER {
            return Err(InterfaceError::NotEthernet { name: name.to_string(), kind });
        }
        Ok(Interface {
            index: InterfaceIndex(index),
            name: name.to_string(),
            mac,
            mtu_bytes: query.mtu_bytes()?,
            driver: query.driver(),
            receive_queues: query.receive_queues(),
        })
    }
}

/// Switches off all offloads of an interface, so that it carries the frames that a wire would carry. Offloads are the
/// work that a network card or its kernel does for senders and receivers: partial checksums, late segmentation, merging
/// of packets, and VLAN tags outside frames.
pub fn disable_offloads(name: &str) -> Result<(), InterfaceError> {
    let query = InterfaceQuery::open(name)?;
    for (command, doing) in OFFLOADS {
        match query.ethtool(&mut Value { command, value: 0 }) {
            // An offload that cannot be switched does not exist.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(source) => return Err(InterfaceError::Refused { name: name.to_string(), doing, source }),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Disables VLAN stripping, so that a network card leaves VLAN tags in received frames, where an XDP program in the
/// driver finds them.
pub(crate) fn disable_vlan_stripping(name: &str) -> Result<(), InterfaceError> {
    let query = InterfaceQuery::open(name)?;
    let refused =
        |source| InterfaceError::Refused { name: name.to_string(), doing: "keeping VLAN tags in frames", source };
    let mut flags = Value { command: ETHTOOL_GFLAGS, value: 0 };
    query.ethtool(&mut flags).map_err(refused)?;
    let mut wanted = Value { command: ETHTOOL_SFLAGS, value: flags.value & !FLAG_RECEIVED_TAGS };
    query.ethtool(&mut wanted).map_err(refused)
}

/// Commands of `linux/ethtool.h`: ETHTOOL_STXCSUM, _SSG, _STSO, _SGSO, _SGRO, and _SFLAGS, which covers LRO and VLAN
/// tags.
const OFFLOADS: [(u32, &str); 6] = [
    (0x17, "disabling transmit checksumming"),
    (0x1f, "disabling TCP segmentation"),
    (0x24, "disabling generic segmentation"),
    (0x2c, "disabling generic receive offload"),
    (ETHTOOL_SFLAGS, "disabling large receive offload and VLAN offload"),
    (0x19, "disabling scatter-gather"),
];

/// The name of an interface, and a socket for queries about it.
struct InterfaceQuery<'a> {
    name: &'a str,
    socket: OwnedFd,
}

#[repr(C)]
struct Value {
    command: u32,
    value: u32,
}

/// `struct ethtool_drvinfo`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    maxima: [u32; 4],
    receive: u32,
    transmit: u32,
    other: u32,
    combined: u32,
}

const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_SFLAGS: u32 = 0x26;
/// `ETH_FLAG_RXVLAN`.
const FLAG_RECEIVED_TAGS: u32 = 1 << 8;
const ETHTOOL_GDRVINFO: u32 = 0x3;
const ETHTOOL_GCHANNELS: u32 = 0x3c;

impl<'a> InterfaceQuery<'a> {
    fn open(name: &'a str) -> Result<InterfaceQuery<'a>, InterfaceError> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ {
            return Err(InterfaceError::Unknown { name: name.to_string() });
        }
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(|source| InterfaceError::Refused {
                name: name.to_string(),
                doing: "opening a socket for queries",
                source: source.into(),
            })?;
        Ok(InterfaceQuery { name, socket })
    }

    fn hardware_address(&self) -> Result<(u16, MacAddress), InterfaceError> {
        let mut request = request(self.name);
        self.control(libc::SIOCGIFHWADDR, &mut request, "querying the hardware address")?;
        // SAFETY: the successful `ioctl` has filled in an address, and every bit pattern is a valid `sockaddr`.
        let address = unsafe { request.ifr_ifru.ifru_hwaddr };
        let mac = std::array::from_fn(|byte| address.sa_data[byte] as u8);
        Ok((address.sa_family, MacAddress(mac)))
    }

    fn mtu_bytes(&self) -> Result<u32, InterfaceError> {
        let mut request = request(self.name);
        self.control(libc::SIOCGIFMTU, &mut request, "querying the MTU")?;
        // SAFETY: the successful `ioctl` has filled in a number, and every bit pattern is a valid integer.
        let bytes = unsafe { request.ifr_ifru.ifru_mtu };
        Ok(bytes.unsigned_abs())
    }

    fn driver(&self) -> String {
        let mut info = DriverInfo { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
        if self.ethtool(&mut info).is_err() {
            return String::new();
        }
        let bytes = info.driver.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }

    fn receive_queues(&self) -> u32 {
        let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
        match self.ethtool(&mut channels) {
            Ok(()) => (channels.receive + channels.combined).max(1),
            Err(_) => 1,
        }
    }

    /// Runs a command. `command` is one of ethtool's structures, whose first word is the command.
    fn ethtool<T>(&self, command: &mut T) -> io::Result<()> {
        let mut request = request(self.name);
        request.ifr_ifru.ifru_data = std::ptr::from_mut(command).cast::<c_char>();
        // SAFETY: `request` is an `ifreq` whose data pointer refers to `command`, the structure that its first word
        // announces; it is exclusively borrowed during the call.
        checked(unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) }).map(|_| ())
    }

    fn control(&self, control: c_ulong, request: &mut libc::ifreq, doing: &'static str) -> Result<(), InterfaceError> {
        // SAFETY: the requests passed to this function read the name and write the union of an `ifreq`, and `request`
        // is one.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), control as _, std::ptr::from_mut(request)) };
        let refused = |source| InterfaceError::Refused { name: self.name.to_string(), doing, source };
        checked(result).map(|_| ()).map_err(refused)
    }
}

/// Returns an `ifreq` with a name that fits into it.
pub(crate) fn request(name: &str) -> libc::ifreq {
    assert!(name.len() < libc::IFNAMSIZ, "interface name '{name}' was not checked");
    // SAFETY: an `ifreq` of zeroes is valid: an empty name and a union of numbers and null pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    request
}

/// Translates names and indexes of the interfaces in the network namespace in which it was opened.
#[derive(Debug)]
pub(crate) struct InterfaceNames(OwnedFd);

impl InterfaceNames {
    pub(crate) fn open() -> io::Result<InterfaceNames> {
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Ok(InterfaceNames(socket))
    }

    pub(crate) fn index_of(&self, name: &str) -> Option<InterfaceIndex> {
        rustix::net::netdevice::name_to_index(&self.0, name).ok().map(InterfaceIndex)
    }

    pub(crate) fn name_of(&self, index: InterfaceIndex) -> Option<String> {
        rustix::net::netdevice::index_to_name(&self.0, index.0).ok()
    }
}

/// Returns whether the interface still exists in the network namespace of `socket`.
pub(crate) fn interface_exists(socket: BorrowedFd, index: InterfaceIndex) -> bool {
    rustix::net::netdevice::index_to_name(socket.as_fd(), index.0).is_ok()
}

const _: () = assert!(size_of::<DriverInfo>() == 196 && size_of::<Channels>() == 36);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace;
    use crate::netlink::{Requests, VethEndpoint};

    #[test]
    fn a_veth_is_known_by_its_driver_and_an_unknown_name_is_reported() {
        let Some(namespace) = namespace::for_test("a_veth_is_known_by_its_driver") else { return };
        let test = || {
            let mac = MacAddress([2, 0, 0, 0, 0, 7]);
            let end = |name| VethEndpoint { name, namespace: None, mac: Some(mac) };
            Requests::open().unwrap().add_veth(end("here"), end("there")).unwrap();
            let interface = Interface::by_name("here").unwrap();
            assert_eq!((interface.driver.as_str(), interface.mac, interface.mtu_bytes), ("veth", mac, 1500));
            assert_eq!(interface.receive_queues, 1);
            disable_offloads("here").unwrap();
            let error = Interface::by_name("gone").unwrap_err().to_string();
            assert!(error.starts_with("interface 'gone': not in this network namespace"), "{error}");
            let error = Interface::by_name("lo").unwrap_err().to_string();
            assert!(error.contains("772"), "{error}");
        };
        namespace.within(test).unwrap();
    }
}
