//! AF_PACKET ports: frames are received from a ring that the kernel writes, and sent by system calls that take many.
//!
//! The kernel processes every received frame too. On virtual Ethernet, senders leave work to hardware
//! ([`crate::offload`]); the kernel describes for each frame what is left. This port completes checksums, and passes
//! large packets on as they are: the kernel of the egress port segments them if its interface cannot. From a pool
//! without buffers for large packets, the port segments them itself, so that its frames are those that a wire would
//! carry.

mod ring;
mod send;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use packet::segmentation::Segments;
use router::{Packet, Pool, Port, PortLosses};
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvFlags, SocketFlags, SocketType, sockopt};

use crate::interface::{Interface, InterfaceIndex, interface_exists};
use crate::offload::{
    ADDRESSES_BYTES, InvalidOffload, VIRTIO_HEADER_BYTES, VirtioHeader, insert_tag, insert_tag_in_place, link_bytes,
};
use crate::system::{checked, option, set_option};
use ring::{Ring, Slot};
use send::Sender;

/// The longest large packet with its headers; longer ones (BIG TCP) are lost, and counted.
const LARGE_FRAME_BYTES_MAX: usize = 72 << 10;
/// The size of the kernel's queue of large packets.
const QUEUE_BYTES: usize = 16 << 20;

/// A kernel interface as a port.
pub struct PacketSocket {
    interface: InterfaceIndex,
    receiver: OwnedFd,
    ring: Ring,
    sender: Sender,
    /// A frame that did not fit into a ring slot or is segmented.
    large_frame: Vec<u8>,
    pending: Option<PendingFrame>,
    unusable: u64,
    overflows: Cell<u64>,
    /// Whether the interface has been down.
    is_down: bool,
    is_gone: bool,
}

impl PacketSocket {
    /// Opens a port on the interface. Needs `CAP_NET_RAW`.
    pub fn open(interface: &Interface) -> io::Result<PacketSocket> {
        let receiver = socket()?;
        set_option(&receiver, libc::SOL_PACKET, libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V2 as i32))?;
        for option in [libc::PACKET_VNET_HDR, libc::PACKET_COPY_THRESH, libc::PACKET_IGNORE_OUTGOING] {
            set_option(&receiver, libc::SOL_PACKET, option, &1)?;
        }
        if sockopt::set_socket_recv_buffer_size_force(&receiver, QUEUE_BYTES).is_err() {
            sockopt::set_socket_recv_buffer_size(&receiver, QUEUE_BYTES)?;
        }
        set_filter(&receiver, &FILTER_OURS)?;
        let ring = Ring::open(&receiver, interface.mtu_bytes)?;
        // Bound last, so that no frame arrives before the ring exists.
        bind(&receiver, interface.index, libc::ETH_P_ALL as u16)?;
        Ok(PacketSocket {
            interface: interface.index,
            ring,
            receiver,
            sender: Sender::open(interface.index)?,
            large_frame: Vec::with_capacity(LARGE_FRAME_BYTES_MAX),
            pending: None,
            unusable: 0,
            overflows: Cell::new(0),
            is_down: false,
            is_gone: false,
        })
    }

    /// Delivers the pending frame until `into` has `end` packets or no buffer is free, and returns whether nothing is
    /// pending any more.
    fn deliver_pending(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, end: usize) -> bool {
        let Some(mut pending) = self.pending.take() else { return true };
        let frame = &self.large_frame[..];
        while let Some(bytes) = pending.next_bytes(frame) {
            if bytes > pool.bytes_max() {
                self.unusable += 1;
                return true;
            }
            let packet = if into.len() < end { pool.alloc() } else { None };
            let Some(mut packet) = packet else {
                self.pending = Some(pending);
                return false;
            };
            pool.resize(&mut packet, bytes);
            if pending.write_next(frame, pool.bytes_mut(&packet)).is_err() {
                pool.free(packet);
                self.unusable += 1;
                return true;
            }
            into.push(packet);
        }
        true
    }

    /// Receives the frame in the next slot of the ring, as one packet or as a pending frame. Returns `false` if no
    /// buffer is free.
    fn receive_slot(&mut self, pool: &mut Pool, into: &mut Vec<Packet>) -> bool {
        let Some(slot) = self.ring.next() else { return true };
        let header = VirtioHeader::read(slot.header, slot.tag_bytes());
        let result = match header {
            // A frame in the queue must be read.
            Err(_) if slot.is_copied => self.read_large_frame(),
            Err(unusable) => Err(unusable),
            Ok(header) if header.segment_bytes().is_some() && pool.has_large() => self.receive_large(pool, into),
            Ok(header) if slot.is_copied || header.segment_bytes().is_some() => self.read_large_frame(),
            Ok(header) => match copy_slot(&slot, header, pool) {
                Ok(None) => return false,
                Ok(Some(packet)) => {
                    into.push(packet);
                    Ok(())
                }
                Err(unusable) => Err(unusable),
            },
        };
        self.unusable += u64::from(result.is_err());
        self.ring.release();
        true
    }

    /// Receives a large packet as a whole, or, if no buffer for it is free, as segments.
    fn receive_large(&mut self, pool: &mut Pool, into: &mut Vec<Packet>) -> Result<(), InvalidOffload> {
        let bytes = self.ring.next().map_or(0, |slot| slot.whole_bytes());
        let packet = if bytes <= pool.large_bytes_max() { pool.alloc_large() } else { None };
        let Some(mut packet) = packet else { return self.read_large_frame() };
        pool.resize(&mut packet, bytes);
        let read = self.read_slot(pool.bytes_mut(&packet));
        let declared = read.and_then(|header| {
            let segment_bytes = header.segment_bytes().ok_or(InvalidOffload)?;
            let link_bytes = link_bytes(pool.bytes(&packet)).ok_or(InvalidOffload)?;
            pool.set_large(&mut packet, link_bytes, segment_bytes).then_some(()).ok_or(InvalidOffload)
        });
        match declared {
            Ok(()) => into.push(packet),
            Err(_) => pool.free(packet),
        }
        declared
    }

    /// Reads a frame that did not fit into the slot or must be segmented, and makes it pending.
    fn read_large_frame(&mut self) -> Result<(), InvalidOffload> {
        let bytes = self.ring.next().map_or(0, |slot| slot.whole_bytes());
        let mut frame = std::mem::take(&mut self.large_frame);
        frame.resize(bytes.min(LARGE_FRAME_BYTES_MAX), 0);
        let read = self.read_slot(&mut frame).and_then(|header| {
            Ok(match header.segment_bytes() {
                Some(_) => PendingFrame::Segments(header.segments(&frame)?),
                None => {
                    header.complete(&mut frame)?;
                    PendingFrame::One
                }
            })
        });
        self.large_frame = frame;
        self.pending = Some(read?);
        Ok(())
    }

    /// Reads the whole frame of the next slot, from the queue if it did not fit there, and inserts its tag. `frame` has
    /// the length of both.
    fn read_slot(&mut self, frame: &mut [u8]) -> Result<VirtioHeader, InvalidOffload> {
        let slot = self.ring.next().ok_or(InvalidOffload)?;
        let (tag, tag_bytes) = (slot.tag, slot.tag_bytes());
        let mut header = *slot.header;
        // The frame is read with room for the tag, which is inserted afterwards.
        let room = frame.get_mut(tag_bytes..).ok_or(InvalidOffload)?;
        if slot.is_copied {
            let mut read = read_queued(&self.receiver, &mut header, room);
            // The error for an interface that went down is reported once, before the frame. A frame that is not read
            // here would be mistaken for that of the next slot.
            if read.is_err() {
                self.is_down = true;
                read = read_queued(&self.receiver, &mut header, room);
            }
            if read != Ok(VIRTIO_HEADER_BYTES + room.len()) {
                return Err(InvalidOffload);
            }
        } else if slot.is_cut_off || slot.bytes.len() != room.len() {
            return Err(InvalidOffload);
        } else {
            room.copy_from_slice(slot.bytes);
        }
        if let Some(tag) = tag {
            insert_tag_in_place(frame, ADDRESSES_BYTES, tag);
        }
        VirtioHeader::read(&header, tag_bytes)
    }
}

/// Reads the oldest frame of a socket's queue with its header, and returns the length of both; a longer frame is
/// truncated.
fn read_queued(
    receiver: &OwnedFd,
    header: &mut [u8; VIRTIO_HEADER_BYTES],
    frame: &mut [u8],
) -> Result<usize, rustix::io::Errno> {
    let mut parts = [io::IoSliceMut::new(header), io::IoSliceMut::new(frame)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    rustix::net::recvmsg(receiver, &mut parts, &mut RecvAncillaryBuffer::default(), flags).map(|read| read.bytes)
}

/// The part of a large frame that is not yet delivered.
enum PendingFrame {
    Segments(Segments),
    One,
    Nothing,
}

impl PendingFrame {
    fn next_bytes(&self, frame: &[u8]) -> Option<usize> {
        match self {
            PendingFrame::Segments(segments) => segments.next_bytes(),
            PendingFrame::One => Some(frame.len()),
            PendingFrame::Nothing => None,
        }
    }

    fn write_next(&mut self, frame: &[u8], to: &mut [u8]) -> Result<(), InvalidOffload> {
        match self {
            PendingFrame::Segments(segments) => segments.write_next(frame, to).ok_or(InvalidOffload)?,
            PendingFrame::One => {
                to.copy_from_slice(frame);
                *self = PendingFrame::Nothing;
            }
            PendingFrame::Nothing => {}
        }
        Ok(())
    }
}

/// Copies the frame of a slot to a buffer; `None` if no buffer is free.
fn copy_slot(slot: &Slot, header: VirtioHeader, pool: &mut Pool) -> Result<Option<Packet>, InvalidOffload> {
    let bytes = slot.bytes.len() + slot.tag_bytes();
    if slot.is_cut_off || bytes > pool.bytes_max() {
        return Err(InvalidOffload);
    }
    let Some(mut packet) = pool.alloc() else { return Ok(None) };
    pool.resize(&mut packet, bytes);
    let to = pool.bytes_mut(&packet);
    let copied = match slot.tag {
        Some(tag) => insert_tag(slot.bytes, tag, to),
        None => {
            to.copy_from_slice(slot.bytes);
            Ok(())
        }
    };
    match copied.and_then(|()| header.complete(to)) {
        Ok(()) => Ok(Some(packet)),
        Err(unusable) => {
            pool.free(packet);
            Err(unusable)
        }
    }
}

impl Port for PacketSocket {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        if self.is_gone {
            return Err(gone_error(self.interface));
        }
        let before = into.len();
        let end = before + packets_max;
        while self.deliver_pending(pool, into, end) && into.len() < end && self.ring.next().is_some() {
            if !self.receive_slot(pool, into) {
                break;
            }
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        self.sender.send_all(pool, from).map_err(|error| {
            if interface_exists(self.sender.as_fd(), self.interface) { error } else { gone_error(self.interface) }
        })
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.receiver.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        // An interface that goes down reports an error, which wakes sleepers until it is read. Its later removal is not
        // reported.
        self.is_down |= !matches!(sockopt::socket_error(&self.receiver), Ok(Ok(())));
        self.is_gone |= self.is_down && !interface_exists(self.receiver.as_fd(), self.interface);
        !self.is_gone && self.pending.is_none() && self.ring.next().is_none()
    }

    fn has_kernel(&self) -> bool {
        true
    }

    fn takes_large(&self) -> bool {
        true
    }

    fn losses(&self) -> PortLosses {
        // The counters of packets and drops, which the kernel resets at each query.
        if let Ok([_, drops]) = option::<[u32; 2]>(&self.receiver, libc::SOL_PACKET, libc::PACKET_STATISTICS) {
            self.overflows.set(self.overflows.get() + u64::from(drops));
        }
        PortLosses {
            receive_overflows: self.overflows.get(),
            receive_unusable: self.unusable,
            transmit_refused: self.sender.refused,
        }
    }
}

/// Returns the VLAN tag that the kernel stores as metadata, in the format of a frame, from the status of the frame, the
/// type of the tag and its control information.
pub(crate) fn tag(status: u32, tag_type: u16, control: u16) -> Option<[u8; 4]> {
    if status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let has_type = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    let [a, b] = if has_type { tag_type } else { libc::ETH_P_8021Q as u16 }.to_be_bytes();
    let [c, d] = control.to_be_bytes();
    Some([a, b, c, d])
}

pub(crate) fn gone_error(interface: InterfaceIndex) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("{interface} is gone"))
}

/// Opens a packet socket that receives nothing until it is bound.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?)
}

/// Binds a packet socket to an interface, and to frames of a type (in host byte order; 0 for none).
pub(crate) fn bind(socket: impl AsFd, interface: InterfaceIndex, ethertype: u16) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: a `sockaddr_ll` consists of integers, for which zeroes are valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ethertype.to_be();
    address.sll_ifindex = interface.0 as i32;
    let bytes = size_of_val(&address) as libc::socklen_t;
    // SAFETY: `address` is a local `sockaddr_ll`, and `bytes` is its size.
    let result = unsafe { libc::bind(socket.as_fd().as_raw_fd(), (&raw const address).cast(), bytes) };
    checked(result).map(|_| ())
}

/// Returns an instruction of the classic packet filter (cBPF).
const fn filter(code: u16, then: u8, otherwise: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: then, jf: otherwise, k }
}

/// `BPF_LD | BPF_B | BPF_ABS`, `_H`; `BPF_JMP | BPF_JEQ`, `_JGE`, `_JGT`; `BPF_RET`.
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const JUMP_IF_GREATER: u16 = 0x25;
const RETURN: u16 = 0x06;
/// `SKF_AD_OFF + SKF_AD_PKTTYPE`.
const PACKET_TYPE: u32 = 0xffff_f004;
const ACCEPT_ALL: u32 = u32::MAX;

/// Accepts all frames except those for other stations.
const FILTER_OURS: [libc::sock_filter; 4] = [
    filter(LOAD_BYTE, 0, 0, PACKET_TYPE),
    filter(JUMP_IF_EQUAL, 1, 0, libc::PACKET_OTHERHOST as u32),
    filter(RETURN, 0, 0, ACCEPT_ALL),
    filter(RETURN, 0, 0, 0),
];

/// Accepts ARP; ICMPv6 of types 133 to 137, which are router and neighbour solicitations and advertisements and
/// redirects; and type 130, multicast listener queries, after a hop-by-hop header of 8 bytes. Frames have at most one
/// VLAN tag.
pub(crate) const FILTER_NEIGHBOURS: [libc::sock_filter; 18] = [
    filter(LOAD_BYTE, 0, 0, PACKET_TYPE),
    filter(JUMP_IF_EQUAL, 15, 0, libc::PACKET_OTHERHOST as u32),
    filter(JUMP_IF_EQUAL, 14, 0, libc::PACKET_OUTGOING as u32),
    filter(LOAD_HALF, 0, 0, 12),
    filter(JUMP_IF_EQUAL, 11, 0, 0x0806),
    filter(JUMP_IF_EQUAL, 0, 11, 0x86dd),
    filter(LOAD_BYTE, 0, 0, 20),
    filter(JUMP_IF_EQUAL, 5, 0, 58),
    filter(JUMP_IF_EQUAL, 0, 8, 0),
    filter(LOAD_HALF, 0, 0, 54),
    filter(JUMP_IF_EQUAL, 0, 6, 58 << 8),
    filter(LOAD_BYTE, 0, 0, 62),
    filter(JUMP_IF_EQUAL, 3, 4, 130),
    filter(LOAD_BYTE, 0, 0, 54),
    filter(JUMP_IF_AT_LEAST, 0, 2, 133),
    filter(JUMP_IF_GREATER, 1, 0, 137),
    filter(RETURN, 0, 0, ACCEPT_ALL),
    filter(RETURN, 0, 0, 0),
];

pub(crate) fn set_filter(socket: impl AsFd, instructions: &'static [libc::sock_filter]) -> io::Result<()> {
    // The kernel only reads the instructions during the call, and they are `'static`.
    let program = libc::sock_fprog { len: instructions.len() as u16, filter: instructions.as_ptr().cast_mut() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

#[cfg(test)]
mod tests;
