//! AF_XDP ports: frames pass through rings in the memory of this process and bypass most of the kernel.
//!
//! An XDP program on the interface passes to the kernel what is for this node or is not IP. The kernel keeps its
//! addresses, answers ARP and neighbour discovery, and has its own connections. In addition to the rings, a packet
//! socket receives ARP and neighbour discovery, from which the router learns its neighbours.

mod auxiliary;
mod bpf;
mod netfilter;
mod queue;
mod ring;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use router::{Packet, Pool, Port, PortLosses};
use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

pub(crate) use bpf::tcx_programs;
pub use bpf::{LocalAddresses, Mode};
pub(crate) use netfilter::netfilter_programs;

use crate::interface::{Interface, InterfaceIndex, interface_exists};
use crate::offload::{ADDRESSES_BYTES, TAG_BYTES, insert_tag_in_place};
use crate::packet_socket::{self, FILTER_NEIGHBOURS, gone_error};
use bpf::Sockets;
use queue::Queue;

/// The largest number of queues of an interface.
const QUEUES_MAX: u32 = 16;
/// The packet socket is polled once in this many polls while frames arrive in the rings.
const POLLS_BETWEEN_NEIGHBOURS: u32 = 16;

/// A kernel interface as an AF_XDP port.
pub struct XdpPort {
    interface: InterfaceIndex,
    queues: Vec<Queue>,
    /// The queue that is polled first, which rotates so that none is starved.
    first: usize,
    attached: bpf::Attached,
    neighbours: OwnedFd,
    wakes: OwnedFd,
    polls: u32,
    has_partial_checksums: bool,
    unusable: u64,
    is_gone: bool,
}

/// The reason why an interface cannot be an AF_XDP port.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// A frame must fit into a page.
    #[error("its MTU of {mtu_bytes} B exceeds {} B", queue::MTU_BYTES_MAX)]
    Mtu {
        /// The MTU of the interface.
        mtu_bytes: u32,
    },
    /// All queues must have a socket, or frames are missed.
    #[error("it has {queues} queues, more than {QUEUES_MAX}; `ethtool -L` sets fewer")]
    Queues {
        /// The number of queues of the interface.
        queues: u32,
    },
    /// The kernel refused a request.
    #[error("{doing}: {source}")]
    Refused {
        /// What was attempted.
        doing: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl XdpPort {
    /// Opens a port on the interface. Frames with the tag of one of `vlans` are passed to the router, whatever they
    /// contain; those of other VLANs are passed to the kernel. Needs `CAP_NET_ADMIN`, `CAP_NET_RAW` and `CAP_BPF`.
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
            polls: 0,
            has_partial_checksums: interface.driver == "veth",
            unusable: 0,
            is_gone: false,
        })
    }

    /// Returns where the program runs.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Returns whether the kernel copies frames between the driver and this process.
    pub fn is_copied(&self) -> bool {
        self.queues.iter().any(Queue::is_copied)
    }

    fn receive_neighbour_frames(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, end: usize) {
        while into.len() < end {
            let Some(mut packet) = pool.alloc() else { return };
            pool.resize(&mut packet, pool.bytes_max());
            // The frame is read with room before it, so that the tag that the kernel stores as metadata can be inserted
            // after the addresses. The filter guarantees that the frame has more than these.
            match auxiliary::receive(&self.neighbours, &mut pool.bytes_mut(&packet)[TAG_BYTES..]) {
                Ok((bytes, tag)) if bytes + TAG_BYTES <= packet.len() => {
                    pool.resize(&mut packet, bytes + TAG_BYTES);
                    match tag {
                        Some(tag) => insert_tag_in_place(pool.bytes_mut(&packet), ADDRESSES_BYTES, tag),
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

fn neighbours(interface: InterfaceIndex) -> io::Result<OwnedFd> {
    let socket = packet_socket::socket()?;
    auxiliary::enable(&socket)?;
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
            return Err(gone_error(self.interface));
        }
        let (before, count) = (into.len(), self.queues.len());
        let end = before + packets_max;
        for number in 0..count {
            let queue = &mut self.queues[(self.first + number) % count];
            queue.receive(pool, into, end, self.has_partial_checksums);
        }
        self.first = (self.first + 1) % count;
        self.polls += 1;
        if into.len() == before || self.polls >= POLLS_BETWEEN_NEIGHBOURS {
            self.polls = 0;
            self.receive_neighbour_frames(pool, into, end);
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let sent = self.queues[0].transmit(pool, from);
        sent.map_err(|error| {
            if interface_exists(self.neighbours.as_fd(), self.interface) { error } else { gone_error(self.interface) }
        })
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wakes.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        // Frames that could not be sent because the interface was busy are sent before the port sleeps; while the
        // interface is down, they wait.
        let is_pending = self.queues[0].kick() == Ok(()) && self.queues[0].has_pending();
        for fd in self.queues.iter().map(AsFd::as_fd).chain([self.neighbours.as_fd()]) {
            // An error wakes sleepers until it is read.
            if !matches!(sockopt::socket_error(fd), Ok(Ok(()))) {
                self.is_gone |= !interface_exists(self.neighbours.as_fd(), self.interface);
            }
        }
        let mut polled = [PollFd::new(&self.wakes, PollFlags::IN)];
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        !self.is_gone && !is_pending && matches!(poll(&mut polled, Some(&no_wait)), Ok(0))
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
