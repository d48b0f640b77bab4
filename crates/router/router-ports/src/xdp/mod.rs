//! AF_XDP: frames by rings in this process's memory, past most of the kernel.
//!
//! A small program at the interface leaves to the kernel what is for this node, or is no IP: so the kernel keeps its
//! addresses, answers ARP and neighbour discovery, and has its own connections. Beside the rings, a packet socket hears
//! ARP and neighbour discovery, so that the router knows who is there.

mod auxiliary;
mod bpf;
mod queue;
mod ring;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use router::{Packet, Pool, Port, PortLosses};
use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

pub use bpf::LocalAddresses;
pub use bpf::Mode;

use crate::interface::{Interface, InterfaceIndex, is_there};
use crate::packet_socket::{self, FILTER_NEIGHBOURS, gone};
use bpf::Sockets;
use queue::Queue;

/// A VLAN's tag, behind a frame's two addresses.
const TAG_BYTES: usize = packet::vlan::HEADER_BYTES;
const ADDRESSES_BYTES: usize = 12;
/// Queues of one interface.
const QUEUES_MAX: u32 = 16;
/// While frames come by the rings, the packet socket is looked at each so many times.
const LOOKS_BETWEEN: u32 = 16;

/// A kernel interface as a port, past the kernel.
pub struct XdpPort {
    interface: InterfaceIndex,
    queues: Vec<Queue>,
    /// Which queue is looked at first, so that none is starved.
    first: usize,
    attached: bpf::Attached,
    neighbours: OwnedFd,
    wakes: OwnedFd,
    looks: u32,
    has_open_checksums: bool,
    unusable: u64,
    is_gone: bool,
}

/// Why an interface cannot be a port by AF_XDP.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// Frames have a page.
    #[error("its MTU of {mtu_bytes} B is beyond {} B", queue::MTU_BYTES_MAX)]
    Mtu {
        /// The interface's.
        mtu_bytes: u32,
    },
    /// All queues are needed, or frames are missed.
    #[error("it has {queues} queues, more than {QUEUES_MAX}; `ethtool -L` sets fewer")]
    Queues {
        /// The interface's.
        queues: u32,
    },
    /// The kernel refuses.
    #[error("{doing}: {source}")]
    Refused {
        /// What was asked for.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl XdpPort {
    /// Opens a port on the interface. Frames with the tag of one of `vlans` are the router's, whatever they hold; those
    /// of other VLANs are the kernel's. Needs `CAP_NET_ADMIN`, `CAP_NET_RAW` and `CAP_BPF`.
    pub fn open(interface: &Interface, vlans: &[u16], local: &LocalAddresses) -> Result<XdpPort, XdpError> {
        let &Interface { index, mtu_bytes, receive_queues, .. } = interface;
        if mtu_bytes > queue::MTU_BYTES_MAX {
            return Err(XdpError::Mtu { mtu_bytes });
        }
        if receive_queues > QUEUES_MAX {
            return Err(XdpError::Queues { queues: receive_queues });
        }
        let refused = |doing| move |source| XdpError::Refused { doing, source };
        let neighbours = neighbours(index).map_err(refused("a packet socket for ARP and neighbour discovery"))?;
        let sockets = Sockets::new(receive_queues).map_err(refused("a map of sockets"))?;
        let mut queues = Vec::new();
        for number in 0..receive_queues {
            let queue = Queue::open(index, mtu_bytes, number).map_err(refused("an AF_XDP socket"))?;
            sockets.set(number, &queue).map_err(refused("an entry in a map of sockets"))?;
            queues.push(queue);
        }
        let wakes = wakes(&queues, &neighbours).map_err(refused("an epoll"))?;
        let attached =
            bpf::attach(index, interface.mac, vlans, local, &sockets).map_err(refused("attaching a program"))?;
        Ok(XdpPort {
            interface: index,
            queues,
            first: 0,
            attached,
            neighbours,
            wakes,
            looks: 0,
            has_open_checksums: interface.driver == "veth",
            unusable: 0,
            is_gone: false,
        })
    }

    /// Where the program runs.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Whether the kernel copies frames between the driver and this process.
    pub fn is_copied(&self) -> bool {
        self.queues.iter().any(Queue::is_copied)
    }

    fn hear_neighbours(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, end: usize) {
        while into.len() < end {
            let Some(mut packet) = pool.alloc() else { return };
            pool.resize(&mut packet, pool.bytes_max());
            // The tag that the kernel keeps beside a frame goes before it, and behind the addresses then.
            match auxiliary::receive(&self.neighbours, &mut pool.bytes_mut(&packet)[TAG_BYTES..]) {
                Ok((bytes, tag)) if bytes + TAG_BYTES <= packet.len() => {
                    pool.resize(&mut packet, bytes + TAG_BYTES);
                    match tag {
                        Some(tag) => insert_tag(pool.bytes_mut(&packet), tag),
                        None => pool.trim_front(&mut packet, TAG_BYTES as u16),
                    }
                    into.push(packet);
                }
                Ok(_) => {
                    self.unusable += 1;
                    pool.free(packet);
                }
                Err(_) => {
                    pool.free(packet);
                    return;
                }
            }
        }
    }
}

/// The frame begins after room for its tag; the filter has seen more than its addresses.
fn insert_tag(frame: &mut [u8], tag: [u8; TAG_BYTES]) {
    frame.copy_within(TAG_BYTES..TAG_BYTES + ADDRESSES_BYTES, 0);
    frame[ADDRESSES_BYTES..ADDRESSES_BYTES + TAG_BYTES].copy_from_slice(&tag);
}

fn neighbours(interface: InterfaceIndex) -> io::Result<OwnedFd> {
    let socket = packet_socket::socket()?;
    auxiliary::ask_for(&socket)?;
    packet_socket::set_filter(&socket, &FILTER_NEIGHBOURS)?;
    packet_socket::bind(&socket, interface, libc::ETH_P_ALL as u16)?;
    Ok(socket)
}

fn wakes(queues: &[Queue], neighbours: &OwnedFd) -> io::Result<OwnedFd> {
    let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (number, fd) in queues.iter().map(AsFd::as_fd).chain([neighbours.as_fd()]).enumerate() {
        epoll::add(&all, fd, epoll::EventData::new_u64(number as u64), epoll::EventFlags::IN)?;
    }
    Ok(all)
}

impl Port for XdpPort {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        if self.is_gone {
            return Err(gone(self.interface));
        }
        let (before, count) = (into.len(), self.queues.len());
        let end = before + packets_max;
        for number in 0..count {
            let queue = &mut self.queues[(self.first + number) % count];
            queue.receive(pool, into, end, self.has_open_checksums);
        }
        self.first = (self.first + 1) % count;
        self.looks += 1;
        if into.len() == before || self.looks >= LOOKS_BETWEEN {
            self.looks = 0;
            self.hear_neighbours(pool, into, end);
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let sent = self.queues[0].transmit(pool, from);
        sent.map_err(
            |error| if is_there(self.neighbours.as_fd(), self.interface) { error } else { gone(self.interface) },
        )
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wakes.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        // What was not sent at once, because the interface was busy, is sent before we sleep; if it is down, it waits.
        let is_pending = self.queues[0].kick() == Ok(()) && self.queues[0].has_pending();
        for fd in self.queues.iter().map(AsFd::as_fd).chain([self.neighbours.as_fd()]) {
            // An error wakes sleepers until it is taken.
            if !matches!(sockopt::socket_error(fd), Ok(Ok(()))) {
                self.is_gone |= !is_there(self.neighbours.as_fd(), self.interface);
            }
        }
        let mut polled = [PollFd::new(&self.wakes, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        !self.is_gone && !is_pending && matches!(poll(&mut polled, Some(&at_once)), Ok(0))
    }

    fn has_kernel(&self) -> bool {
        true
    }

    fn losses(&self) -> PortLosses {
        let sum = |of: fn(&Queue) -> u64| self.queues.iter().map(of).sum::<u64>();
        PortLosses {
            receive_overflows: sum(Queue::overflows),
            receive_unusable: self.unusable + sum(|queue| queue.unusable),
            transmit_refused: sum(|queue| queue.refused),
        }
    }
}

#[cfg(test)]
mod tests;
