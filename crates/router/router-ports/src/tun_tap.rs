//! TAP and TUN: virtual interfaces whose peer is this process.
//!
//! A TAP connects to this machine's kernel or to a virtual machine, with Ethernet frames, and is a port like others. A
//! TUN connects to this machine's kernel without Ethernet: its packets begin with their IP header.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use router::{Packet, Pool, Port, PortLosses};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::interface::{InterfaceIndex, request};
use crate::system::checked;

/// The reason why a TAP or TUN interface cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum TunTapError {
    /// The name is not valid.
    #[error("interface name '{name}': not 1 to 15 letters, digits, '-', '_' or '.'; choose another")]
    Name {
        /// The name.
        name: String,
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

/// A virtual interface of the kernel whose peer is this process: a TAP or a TUN.
pub struct TunTap {
    fd: OwnedFd,
    index: InterfaceIndex,
    unusable: u64,
    refused: u64,
}

impl TunTap {
    /// Creates a TAP in the calling thread's network namespace, or attaches to a persistent one that is not in use. It
    /// is down, and is removed with the port unless it existed before. Needs `CAP_NET_ADMIN`.
    pub fn open_tap(name: &str) -> Result<TunTap, TunTapError> {
        TunTap::open(name, libc::IFF_TAP)
    }

    /// Creates a TUN, or attaches to it, as [`TunTap::open_tap`] does for a TAP.
    pub fn open_tun(name: &str) -> Result<TunTap, TunTapError> {
        TunTap::open(name, libc::IFF_TUN)
    }

    /// Returns the kernel's index of the interface.
    pub fn interface(&self) -> InterfaceIndex {
        self.index
    }

    fn open(name: &str, kind: i32) -> Result<TunTap, TunTapError> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let is_path = matches!(name, "." | "..");
        if !(1..libc::IFNAMSIZ).contains(&name.len()) || !name.bytes().all(is_allowed) || is_path {
            return Err(TunTapError::Name { name: name.to_string() });
        }
        let refused = |doing| move |source| TunTapError::Refused { name: name.to_string(), doing, source };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty())
            .map_err(io::Error::from)
            .map_err(refused("opening /dev/net/tun"))?;
        let mut request = request(name);
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as i16;
        // SAFETY: `request` is an `ifreq` with a name and flags, which TUNSETIFF reads and writes, and is alive during
        // the call.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
        checked(result).map_err(refused("creating it"))?;
        let index = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .and_then(|socket| rustix::net::netdevice::name_to_index(socket, name))
            .map_err(io::Error::from)
            .map_err(refused("querying its index"))?;
        Ok(TunTap { fd, index: InterfaceIndex(index), unusable: 0, refused: 0 })
    }
}

impl Port for TunTap {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        let before = into.len();
        while into.len() - before < packets_max {
            let Some(mut packet) = pool.alloc() else { break };
            pool.resize(&mut packet, pool.bytes_max());
            match rustix::io::read(&self.fd, pool.bytes_mut(&packet)) {
                Ok(bytes) if bytes <= packet.len() => {
                    pool.resize(&mut packet, bytes);
                    into.push(packet);
                }
                // The packet is longer than the buffer and was truncated.
                Ok(_) => {
                    pool.free(packet);
                    self.unusable += 1;
                }
                Err(errno) => {
                    pool.free(packet);
                    return match errno {
                        Errno::AGAIN | Errno::INTR => break,
                        errno => Err(errno.into()),
                    };
                }
            }
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let before = from.len();
        while let Some(packet) = from.pop_front() {
            let written = rustix::io::write(&self.fd, pool.bytes(&packet));
            if written == Err(Errno::AGAIN) || written == Err(Errno::INTR) {
                from.push_front(packet);
                break;
            }
            pool.free(packet);
            match written {
                Ok(_) => {}
                Err(Errno::BADFD) => return Err(Errno::BADFD.into()),
                // The interface is down, or the kernel does not accept the packet.
                Err(_) => self.refused += 1,
            }
        }
        Ok(before - from.len())
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut polled, Some(&no_wait)), Ok(0))
    }

    fn losses(&self) -> PortLosses {
        PortLosses { receive_overflows: 0, receive_unusable: self.unusable, transmit_refused: self.refused }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;
    use crate::namespace;
    use crate::netlink::{Requests, RouteRequest};

    /// Returns a UDP packet to 10.3.0.1, port 9, with the payload "hi", which the kernel is to receive.
    fn datagram() -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 30, 0, 0, 0, 0, 64, 17, 0, 0, 10, 4, 0, 9, 10, 3, 0, 1];
        bytes.extend([0, 9, 0, 9, 0, 10, 0, 0, b'h', b'i']);
        packet::ipv4::Packet::new_checked(&mut bytes[..]).unwrap().fill_checksum();
        bytes
    }

    /// Returns the next packet that satisfies `is_it`; the kernel also sends its own IPv6 packets.
    fn next(port: &mut impl Port, pool: &mut Pool, is_it: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        for _ in 0..100 {
            let mut into = Vec::new();
            port.receive(pool, &mut into, 1).unwrap();
            if let Some(packet) = into.pop() {
                let bytes = pool.bytes(&packet).to_vec();
                pool.free(packet);
                if is_it(&bytes) {
                    return bytes;
                }
            } else if port.may_sleep() {
                let mut wakes = [PollFd::from_borrowed_fd(port.wakes().unwrap(), PollFlags::IN)];
                let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
                assert_eq!(poll(&mut wakes, Some(&limit)), Ok(1), "nothing arrived");
            }
        }
        panic!("only other packets arrived");
    }

    #[test]
    fn packets_cross_between_the_kernel_and_a_tun() {
        let Some(namespace) = namespace::for_test("packets_cross_between_the_kernel_and_a_tun") else { return };
        let test = || {
            let mut tun = TunTap::open_tun("crosslane0").unwrap();
            let (mut requests, mut pool) = (Requests::open().unwrap(), Pool::new(4, 2048, 64));
            requests.set_up(tun.interface()).unwrap();
            requests.add_address(tun.interface(), "10.3.0.1/32".parse().unwrap()).unwrap();
            let prefix = "10.4.0.0/16".parse().unwrap();
            let interface = tun.interface();
            requests.install_routes(&[RouteRequest { prefix, metric: 5, interface, gateway: None }]).unwrap();
            let socket = UdpSocket::bind("10.3.0.1:9").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();

            socket.send_to(b"out", "10.4.0.9:9").unwrap();
            let bytes = next(&mut tun, &mut pool, |packet| packet[0] == 0x45);
            let packet = packet::ipv4::Packet::new_checked(&bytes[..]).unwrap();
            assert!(packet.verify_checksum() && packet.payload().ends_with(b"out"));

            let mut queue = VecDeque::from([pool.alloc_copy(&datagram()).unwrap()]);
            assert_eq!(tun.transmit(&mut pool, &mut queue).unwrap(), 1);
            let mut received = [0; 9];
            let (length, from) = socket.recv_from(&mut received).unwrap();
            assert_eq!((&received[..length], from.to_string().as_str()), (&b"hi"[..], "10.4.0.9:9"));
            assert_eq!((pool.available(), tun.losses()), (4, PortLosses::default()));

            requests.set_down(interface).unwrap();
            queue.push_back(pool.alloc_copy(&datagram()).unwrap());
            assert_eq!(tun.transmit(&mut pool, &mut queue).unwrap(), 1);
            assert_eq!(tun.losses().transmit_refused, 1);
        };
        namespace.within(test).unwrap();
    }

    #[test]
    fn a_tap_carries_frames_and_bad_names_are_refused() {
        let Some(namespace) = namespace::for_test("a_tap_carries_frames") else { return };
        let test = || {
            let mut tap = TunTap::open_tap("tap7").unwrap();
            let (mut requests, mut pool) = (Requests::open().unwrap(), Pool::new(4, 2048, 64));
            requests.set_up(tap.interface()).unwrap();
            requests.add_address(tap.interface(), "10.3.0.1/24".parse().unwrap()).unwrap();
            // The kernel sends an ARP request for the neighbour's address.
            UdpSocket::bind("10.3.0.1:9").unwrap().send_to(b"out", "10.3.0.9:9").unwrap();
            let frame = next(&mut tap, &mut pool, |frame| frame[12..14] == [0x08, 0x06]);
            assert!(frame.ends_with(&[10, 3, 0, 9]), "{frame:02x?}");
            for name in ["", "tap%d", "a/b", "..", "sixteen-letters-"] {
                let error = TunTap::open_tap(name).err().unwrap().to_string();
                assert!(error.starts_with(&format!("interface name '{name}': not 1 to 15")), "{error}");
            }
            let error = TunTap::open_tun("tap7").err().unwrap().to_string();
            assert!(error.starts_with("interface 'tap7': creating it: "), "{error}");
        };
        namespace.within(test).unwrap();
    }
}
