//! Kernel interfaces: their numbers, names, and what they are.

use std::ffi::{c_char, c_ulong};
use std::fmt;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use packet::ethernet::MacAddress;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::system::checked;

/// The kernel's number of an interface; it never means another interface in the same network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceIndex(pub u32);

impl fmt::Display for InterfaceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.0)
    }
}

/// A kernel interface, as it was when it was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number.
    pub index: InterfaceIndex,
    /// The kernel's name.
    pub name: String,
    /// Its own hardware address.
    pub mac: MacAddress,
    /// The longest IP packet that it carries.
    pub mtu_bytes: u32,
    /// The driver's name; empty where the driver does not say.
    pub driver: String,
    /// Queues that frames come in by, at least 1.
    pub receive_queues: u32,
}

/// What can be wrong with an interface.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// No such interface.
    #[error("interface '{name}': not in this network namespace; `ip link` lists those that are")]
    Unknown {
        /// The name.
        name: String,
    },
    /// An interface without Ethernet frames.
    #[error("interface '{name}': its hardware type is {kind}, not Ethernet (1); a port needs Ethernet")]
    NotEthernet {
        /// The name.
        name: String,
        /// The kernel's `ARPHRD_` number.
        kind: u16,
    },
    /// The kernel does not answer.
    #[error("interface '{name}': {doing}: {source}")]
    Refused {
        /// The name.
        name: String,
        /// What was asked for.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Interface {
    /// The interface of that name in the calling thread's network namespace.
    pub fn by_name(name: &str) -> Result<Interface, InterfaceError> {
        let asked = Asked::open(name)?;
        let index = rustix::net::netdevice::name_to_index(&asked.socket, name)
            .map_err(|_| InterfaceError::Unknown { name: name.to_string() })?;
        let (kind, mac) = asked.hardware_address()?;
        if kind != libc::ARPHRD_ETHER {
            return Err(InterfaceError::NotEthernet { name: name.to_string(), kind });
        }
        Ok(Interface {
            index: InterfaceIndex(index),
            name: name.to_string(),
            mac,
            mtu_bytes: asked.mtu_bytes()?,
            driver: asked.driver(),
            receive_queues: asked.receive_queues(),
        })
    }
}

/// What a network card or its kernel does for the sender of a packet and the receiver of several: checksums left open,
/// packets cut late or put together, VLAN tags kept beside the frame. Switches all of it off at the interface of that
/// name, so that what crosses it is what a wire carries.
pub fn offloads_off(name: &str) -> Result<(), InterfaceError> {
    let asked = Asked::open(name)?;
    for (command, doing) in OFFLOADS {
        match asked.ethtool(&mut Value { command, value: 0 }) {
            // Whatever cannot be switched is not there.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(source) => return Err(InterfaceError::Refused { name: name.to_string(), doing, source }),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Has a network card leave VLAN tags in received frames, where a program at the driver finds them.
pub(crate) fn tags_in_frames(name: &str) -> Result<(), InterfaceError> {
    let asked = Asked::open(name)?;
    let refused = |source| InterfaceError::Refused { name: name.to_string(), doing: "keeping VLAN tags", source };
    let mut flags = Value { command: ETHTOOL_GFLAGS, value: 0 };
    asked.ethtool(&mut flags).map_err(refused)?;
    let mut wanted = Value { command: ETHTOOL_SFLAGS, value: flags.value & !FLAG_RECEIVED_TAGS };
    asked.ethtool(&mut wanted).map_err(refused)
}

/// `linux/ethtool.h`: ETHTOOL_STXCSUM, _SSG, _STSO, _SGSO, _SGRO, and _SFLAGS, which has LRO and VLAN tags.
const OFFLOADS: [(u32, &str); 6] = [
    (0x17, "switching checksums of what is sent off"),
    (0x1f, "switching TCP segmentation off"),
    (0x24, "switching segmentation off"),
    (0x2c, "switching merging of received packets off"),
    (ETHTOOL_SFLAGS, "switching merging by the card and VLAN tags off"),
    (0x19, "switching scattered frames off"),
];

/// A name, and a socket to ask about it.
pub(crate) struct Asked<'a> {
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

impl<'a> Asked<'a> {
    pub fn open(name: &'a str) -> Result<Asked<'a>, InterfaceError> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ {
            return Err(InterfaceError::Unknown { name: name.to_string() });
        }
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(|source| InterfaceError::Refused {
                name: name.to_string(),
                doing: "a socket to ask by",
                source: source.into(),
            })?;
        Ok(Asked { name, socket })
    }

    fn hardware_address(&self) -> Result<(u16, MacAddress), InterfaceError> {
        let mut request = request(self.name);
        self.control(libc::SIOCGIFHWADDR, &mut request, "asking for the hardware address")?;
        // SAFETY: the kernel has filled in an address, and every pattern of bits is one.
        let address = unsafe { request.ifr_ifru.ifru_hwaddr };
        let mac = std::array::from_fn(|byte| address.sa_data[byte] as u8);
        Ok((address.sa_family, MacAddress(mac)))
    }

    fn mtu_bytes(&self) -> Result<u32, InterfaceError> {
        let mut request = request(self.name);
        self.control(libc::SIOCGIFMTU, &mut request, "asking for the MTU")?;
        // SAFETY: the kernel has filled in a number.
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

    /// `command` is one of ethtool's structures; its first word says which.
    fn ethtool<T>(&self, command: &mut T) -> io::Result<()> {
        let mut request = request(self.name);
        request.ifr_ifru.ifru_data = std::ptr::from_mut(command).cast::<c_char>();
        // SAFETY: `request` is an `ifreq` whose data is the structure that its first word says, alive and writable.
        checked(unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) }).map(|_| ())
    }

    fn control(&self, control: c_ulong, request: &mut libc::ifreq, doing: &'static str) -> Result<(), InterfaceError> {
        // SAFETY: the controls used here read the name and write the union of an `ifreq`.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), control as _, std::ptr::from_mut(request)) };
        let refused = |source| InterfaceError::Refused { name: self.name.to_string(), doing, source };
        checked(result).map(|_| ()).map_err(refused)
    }
}

/// An `ifreq` of a name, which is shorter than the room for it.
pub(crate) fn request(name: &str) -> libc::ifreq {
    assert!(name.len() < libc::IFNAMSIZ, "interface name '{name}' was not checked");
    // SAFETY: zeroes are a name without letters and a union of numbers and null pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    request
}

/// Whether the interface is still there. `socket` decides in which network namespace.
pub(crate) fn is_there(socket: BorrowedFd, index: InterfaceIndex) -> bool {
    rustix::net::netdevice::index_to_name(socket.as_fd(), index.0).is_ok()
}

const _: () = assert!(size_of::<DriverInfo>() == 196 && size_of::<Channels>() == 36);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace;
    use crate::netlink::{Requests, VethEnd};

    #[test]
    fn a_veth_is_known_by_its_driver_and_an_unknown_name_is_said() {
        let Some(namespace) = namespace::for_test("a_veth_is_known_by_its_driver") else { return };
        let test = || {
            let mac = MacAddress([2, 0, 0, 0, 0, 7]);
            let end = |name| VethEnd { name, namespace: None, mac: Some(mac) };
            Requests::open().unwrap().add_veth(end("here"), end("there")).unwrap();
            let interface = Interface::by_name("here").unwrap();
            assert_eq!((interface.driver.as_str(), interface.mac, interface.mtu_bytes), ("veth", mac, 1500));
            assert_eq!(interface.receive_queues, 1);
            offloads_off("here").unwrap();
            let error = Interface::by_name("gone").unwrap_err().to_string();
            assert!(error.starts_with("interface 'gone': not in this network namespace"), "{error}");
            let error = Interface::by_name("lo").unwrap_err().to_string();
            assert!(error.contains("772"), "{error}");
        };
        namespace.within(test).unwrap();
    }
}
