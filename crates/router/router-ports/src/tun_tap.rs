//! TAP and TUN: virtual interfaces whose peer is this process.
//!
//! A TAP connects to this machine's kernel or to a virtual machine, with Ethernet frames, and is a port like others. A
//! TUN connects to this machine's kernel without Ethernet: its packets begin with their IP header.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use router::{Packet, Pool, Port, PortLosses};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::interface::{InterfaceIndex, request};
use crate::offload::{VIRTIO_HEADER_BYTES, VirtioHeader, describe_large, link_bytes};
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

/// Room for the rest of the longest packet, of 64 KiB, that does not fit into an ordinary buffer.
const REST_BYTES: usize = 64 << 10;
/// `TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN`: the kernel leaves checksums and large TCP packets to this
/// process.
const OFFLOADS: libc::c_ulong = 1 | 2 | 4 | 8;

/// How long an interface that another process has open is tried again, and how often: a process that was killed closes
/// it only when the kernel has freed the process's memory.
const BUSY_MAX: Duration = Duration::from_millis(500);
const BUSY_RETRY: Duration = Duration::from_millis(10);

/// Calls of [`Port::receive`] without a read after a read that found nothing: a read is a system call, which takes
/// longer than all else in an idle iteration of a node.
const SKIPS: u8 = 15;

/// A virtual interface of the kernel whose peer is this process: a TAP or a TUN.
pub struct TunTap {
    fd: OwnedFd,
    index: InterfaceIndex,
    /// Bytes before the IP header; `None` for those of each frame.
    link_bytes: Option<usize>,
    /// The rest of a packet that does not fit into an ordinary buffer.
    rest: Box<[u8]>,
    /// Calls of [`Port::receive`] that do not read.
    skips: u8,
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
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
        let begin = Instant::now();
        loop {
            // SAFETY: `request` is an `ifreq` with a name and flags, which TUNSETIFF reads and writes, and is alive
            // during the call.
            let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
            match checked(result) {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && begin.elapsed() < BUSY_MAX => {
                    thread::sleep(BUSY_RETRY);
                }
                Err(error) => return Err(refused("creating it")(error)),
            }
        }
        // SAFETY: TUNSETOFFLOAD takes flags, and no pointer.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD as _, OFFLOADS) };
        checked(result).map_err(refused("setting its offloads"))?;
        let index = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .and_then(|socket| rustix::net::netdevice::name_to_index(socket, name))
            .map_err(io::Error::from)
            .map_err(refused("querying its index"))?;
        let link_bytes = if kind == libc::IFF_TUN { Some(0) } else { None };
        let rest = vec![0; REST_BYTES].into_boxed_slice();
        Ok(TunTap { fd, index: InterfaceIndex(index), link_bytes, rest, skips: 0, unusable: 0, refused: 0 })
    }
}

impl TunTap {
    /// Reads the next packet into a buffer, or a larger one that replaces it. Returns whether the packet is usable.
    fn read(&mut self, pool: &mut Pool, packet: &mut Packet) -> Result<bool, Errno> {
        let mut header = [0; VIRTIO_HEADER_BYTES];
        let (room, rest) = (IoSliceMut::new(pool.bytes_mut(packet)), IoSliceMut::new(&mut self.rest));
        let bytes = rustix::io::readv(&self.fd, &mut [IoSliceMut::new(&mut header), room, rest])?;
        let bytes = bytes.saturating_sub(VIRTIO_HEADER_BYTES);
        if bytes <= packet.len() {
            pool.resize(packet, bytes);
        } else {
            // Longer than an ordinary buffer.
            let large = if bytes <= pool.large_bytes_max() { pool.alloc_large() } else { None };
            let Some(mut large) = large else { return Ok(false) };
            pool.resize(&mut large, bytes);
            let (front, to) = pool.bytes_pair(packet, &large);
            let (to_front, to_rest) = to.split_at_mut(front.len());
            to_front.copy_from_slice(front);
            to_rest.copy_from_slice(&self.rest[..to_rest.len()]);
            pool.free(std::mem::replace(packet, large));
        }
        let Ok(header) = VirtioHeader::read(&header, 0) else { return Ok(false) };
        Ok(match header.segment_bytes() {
            None => header.complete(pool.bytes_mut(packet)).is_ok(),
            Some(segment_bytes) => {
                let link_bytes = self.link_bytes.or_else(|| link_bytes(pool.bytes(packet)));
                link_bytes.is_some_and(|link_bytes| pool.set_large(packet, link_bytes, segment_bytes))
            }
        })
    }

    /// Writes a packet. Returns `None` if its headers are not consistent.
    fn write(&self, pool: &mut Pool, packet: &Packet) -> Option<Result<usize, Errno>> {
        let mut header = [0; VIRTIO_HEADER_BYTES];
        if packet.is_large() {
            let frame = pool.bytes_mut(packet);
            let link_bytes = self.link_bytes.or_else(|| link_bytes(frame))?;
            (header, _) = describe_large(frame, link_bytes, packet.segment_bytes()).ok()?;
        }
        Some(rustix::io::writev(&self.fd, &[IoSlice::new(&header), IoSlice::new(pool.bytes(packet))]))
    }
}

impl Port for TunTap {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        if self.skips > 0 {
            self.skips -= 1;
            return Ok(0);
        }
        let before = into.len();
        while into.len() - before < packets_max {
            let Some(mut packet) = pool.alloc() else { break };
            pool.resize(&mut packet, pool.bytes_max());
            match self.read(pool, &mut packet) {
                Ok(true) => into.push(packet),
                Ok(false) => {
                    pool.free(packet);
                    self.unusable += 1;
                }
                Err(errno) => {
                    pool.free(packet);
                    match errno {
                        Errno::AGAIN => self.skips = SKIPS,
                        Errno::INTR => {}
                        errno => return Err(errno.into()),
                    }
                    break;
                }
            }
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let before = from.len();
        while let Some(packet) = from.pop_front() {
            let written = self.write(pool, &packet);
            if matches!(written, Some(Err(Errno::AGAIN | Errno::INTR))) {
                from.push_front(packet);
                break;
            }
            pool.free(packet);
            match written {
                Some(Ok(_)) => {}
                Some(Err(Errno::BADFD)) => return Err(Errno::BADFD.into()),
                // The interface is down, or the kernel does not accept the packet.
                Some(Err(_)) | None => self.refused += 1,
            }
        }
        Ok(before - from.len())
    }

    fn takes_large(&self) -> bool {
        true
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        self.skips = 0;
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
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::sync::atomic::{AtomicBool, Ordering};
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
    fn a_packet_is_read_at_once_after_a_sleep_and_after_few_calls_otherwise() {
        let name = "a_packet_is_read_at_once_after_a_sleep_and_after_few_calls_otherwise";
        let Some(namespace) = namespace::for_test(name) else { return };
        let test = || {
            let mut tun = TunTap::open_tun("crosslane0").unwrap();
            let (mut requests, mut pool) = (Requests::open().unwrap(), Pool::new(4, 2048, 64));
            requests.set_up(tun.interface()).unwrap();
            requests.add_address(tun.interface(), "10.3.0.1/16".parse().unwrap()).unwrap();
            let socket = UdpSocket::bind("10.3.0.1:9").unwrap();
            let mut calls_until_read = |sleeps: bool| {
                // Reads the packets that the kernel sends by itself, until there is none.
                let mut into = Vec::new();
                while tun.skips == 0 {
                    tun.receive(&mut pool, &mut into, 1).unwrap();
                    into.drain(..).for_each(|packet| pool.free(packet));
                }
                socket.send_to(b"out", "10.3.0.9:9").unwrap();
                assert!(!sleeps || !tun.may_sleep(), "a packet waits");
                (1..).find(|_| tun.receive(&mut pool, &mut into, 1).unwrap() == 1).unwrap()
            };
            assert_eq!([calls_until_read(false), calls_until_read(true)], [usize::from(SKIPS) + 1, 1]);
        };
        namespace.within(test).unwrap();
    }

    /// Two kernels whose TUNs are joined by this process.
    #[test]
    fn large_packets_cross_whole_between_two_tuns() {
        let Some(one) = namespace::for_test("large_packets_cross_whole_between_two_tuns") else { return };
        let other = namespace::Namespace::new().unwrap();
        let open = |own: &str, peers: &str| {
            let tun = TunTap::open_tun("crosslane0").unwrap();
            let (mut requests, interface) = (Requests::open().unwrap(), tun.interface());
            requests.set_up(interface).unwrap();
            requests.add_address(interface, own.parse().unwrap()).unwrap();
            let prefix = peers.parse().unwrap();
            requests.install_routes(&[RouteRequest { prefix, metric: 5, interface, gateway: None }]).unwrap();
            tun
        };
        let first = one.within(|| open("10.3.0.1/32", "10.4.0.0/16")).unwrap();
        let mut tuns = [first, other.within(|| open("10.4.0.1/32", "10.3.0.0/16")).unwrap()];
        let listener = other.within(|| TcpListener::bind("10.4.0.1:7").unwrap()).unwrap();
        let sent: Vec<u8> = (0..3_000_000).map(|n: usize| (n * 31 + n / 251) as u8).collect();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let mut client = one.within(|| TcpStream::connect("10.4.0.1:7").unwrap()).unwrap();
                client.write_all(&sent).unwrap();
            });
            let receiving = scope.spawn(|| {
                let mut received = Vec::new();
                listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
                is_over.store(true, Ordering::Relaxed);
                received
            });
            let (mut pool, mut burst, mut large) = (Pool::with_large(256, 2048, 64, 16), Vec::new(), 0);
            while !is_over.load(Ordering::Relaxed) {
                for side in [0, 1] {
                    tuns[side].receive(&mut pool, &mut burst, 64).unwrap();
                    large += burst.iter().filter(|packet| packet.is_large()).count();
                    let mut queue: VecDeque<Packet> = burst.drain(..).collect();
                    tuns[1 - side].transmit(&mut pool, &mut queue).unwrap();
                    queue.drain(..).for_each(|packet| pool.free(packet));
                }
            }
            sending.join().unwrap();
            assert!(receiving.join().unwrap() == sent, "bytes were changed in transit");
            assert!(large > 0, "none was whole");
            assert_eq!((pool.available(), pool.large_available()), (256, 16));
        });
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
            let error = TunTap::open_tap("tap7").err().unwrap().to_string();
            assert!(error.contains("busy"), "{error}");
            // The process that has it open ends meanwhile.
            let (opening, is_opening) = std::sync::mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(move || {
                    is_opening.recv().unwrap();
                    thread::sleep(BUSY_RETRY);
                    drop(tap);
                });
                opening.send(()).unwrap();
                TunTap::open_tap("tap7").unwrap();
            });
        };
        namespace.within(test).unwrap();
    }
}
