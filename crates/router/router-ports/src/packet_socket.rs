//! AF_PACKET: frames in by a ring that the kernel writes, out by calls that take many.
//!
//! The kernel sees every frame too. On virtual Ethernet senders leave work to hardware ([`crate::offload`]); the kernel
//! says of each frame what is left, and this port does it: what comes out of it is what a wire would carry.

mod ring;
mod send;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use router::{Packet, Pool, Port, PortLosses};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

use crate::interface::{Interface, InterfaceIndex, is_there};
use crate::offload::{NOTE_BYTES, Note, Pieces, Unusable, put_tag};
use crate::system::{checked, option, set_option};
use ring::{Ring, Slot};

/// TCP's big packets with their headers; bigger ones (BIG TCP) are lost, and counted.
const WHOLE_BYTES_MAX: usize = 72 << 10;
/// What the kernel may hold of big packets.
const QUEUE_BYTES: usize = 16 << 20;

/// A kernel interface as a port.
pub struct PacketSocket {
    interface: InterfaceIndex,
    receiver: OwnedFd,
    ring: Ring,
    sender: OwnedFd,
    /// A frame that was read whole, the note before it.
    whole: Vec<u8>,
    whole_bytes: usize,
    held: Option<Held>,
    unusable: u64,
    refused: u64,
    overflows: Cell<u64>,
    /// It was, once.
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
        // Bound last: no frame is before its ring.
        bind(&receiver, interface.index, libc::ETH_P_ALL as u16)?;
        Ok(PacketSocket {
            interface: interface.index,
            ring,
            receiver,
            sender: send::socket(interface.index)?,
            whole: vec![0; NOTE_BYTES + WHOLE_BYTES_MAX],
            whole_bytes: 0,
            held: None,
            unusable: 0,
            refused: 0,
            overflows: Cell::new(0),
            is_down: false,
            is_gone: false,
        })
    }

    /// Hands on what is held until `into` has `end` packets, or there is no buffer. Whether nothing is held any more.
    fn give_held(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, end: usize) -> bool {
        let Some(mut held) = self.held.take() else { return true };
        let frame = &self.whole[NOTE_BYTES..self.whole_bytes];
        while let Some(bytes) = held.next_bytes(frame) {
            if bytes > pool.bytes_max() {
                self.unusable += 1;
                return true;
            }
            let packet = if into.len() < end { pool.alloc() } else { None };
            let Some(mut packet) = packet else {
                self.held = Some(held);
                return false;
            };
            pool.resize(&mut packet, bytes);
            if held.take(frame, pool.bytes_mut(&packet)).is_err() {
                pool.free(packet);
                self.unusable += 1;
                return true;
            }
            into.push(packet);
        }
        true
    }

    /// Takes the frame in the ring's next slot, one packet or the first step to several. `false` when there is no
    /// buffer for it.
    fn take_slot(&mut self, pool: &mut Pool, into: &mut Vec<Packet>) -> bool {
        let Some(slot) = self.ring.next() else { return true };
        let note = Note::read(slot.note, slot.tag_bytes());
        let taken = match note {
            Err(unusable) => Err(unusable),
            Ok(note) if slot.is_copied || note.is_to_be_cut() => self.hold(),
            Ok(note) => match place(&slot, note, pool) {
                Ok(None) => return false,
                Ok(Some(packet)) => {
                    into.push(packet);
                    Ok(())
                }
                Err(unusable) => Err(unusable),
            },
        };
        self.unusable += u64::from(taken.is_err());
        self.ring.give_back();
        true
    }

    /// The frame in the next slot did not fit, or is to be cut: it is read whole, and held.
    fn hold(&mut self) -> Result<(), Unusable> {
        let slot = self.ring.next().ok_or(Unusable)?;
        let tag = slot.tag;
        let room = tag.map_or(0, |tag| tag.len());
        if slot.is_copied {
            // The tag, if there is one, is put in afterwards: the frame is read with room for it.
            let buffer = &mut self.whole[room..];
            let receiver = &self.receiver;
            let mut receive = || rustix::net::recv(receiver, &mut *buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC);
            // That the interface went down is said before the frame is given, once. A frame that is left here would be
            // taken for the next slot's.
            let mut received = receive();
            if received.is_err() {
                self.is_down = true;
                received = receive();
            }
            let (_, bytes) = received.map_err(|_| Unusable)?;
            self.whole_bytes = bytes + room;
        } else {
            self.whole_bytes = NOTE_BYTES + room + slot.bytes.len();
            if self.whole_bytes > self.whole.len() || slot.is_cut_off {
                return Err(Unusable);
            }
            self.whole[room..room + NOTE_BYTES].copy_from_slice(slot.note);
            self.whole[room + NOTE_BYTES..self.whole_bytes].copy_from_slice(slot.bytes);
        }
        if self.whole_bytes > self.whole.len() || self.whole_bytes < NOTE_BYTES + room {
            return Err(Unusable);
        }
        if let Some(tag) = tag {
            // Note and addresses move to the front, the tag behind them.
            let front = NOTE_BYTES + 12;
            self.whole.copy_within(room..room + front, 0);
            self.whole[front..front + room].copy_from_slice(&tag);
        }
        let (note, frame) = self.whole[..self.whole_bytes].split_first_chunk_mut().ok_or(Unusable)?;
        let note = Note::read(note, room)?;
        self.held = Some(match note.is_to_be_cut() {
            true => Held::Pieces(note.pieces(frame)?),
            false => {
                note.complete(frame)?;
                Held::One
            }
        });
        Ok(())
    }
}

/// What is left to be handed on of a frame that was read whole.
enum Held {
    Pieces(Pieces),
    One,
    Nothing,
}

impl Held {
    fn next_bytes(&self, frame: &[u8]) -> Option<usize> {
        match self {
            Held::Pieces(pieces) => pieces.next_bytes(frame),
            Held::One => Some(frame.len()),
            Held::Nothing => None,
        }
    }

    fn take(&mut self, frame: &[u8], to: &mut [u8]) -> Result<(), Unusable> {
        match self {
            Held::Pieces(pieces) => pieces.take(frame, to)?,
            Held::One => {
                to.copy_from_slice(frame);
                *self = Held::Nothing;
            }
            Held::Nothing => {}
        }
        Ok(())
    }
}

/// The frame of a slot in a buffer; `None` when there is no buffer.
fn place(slot: &Slot, note: Note, pool: &mut Pool) -> Result<Option<Packet>, Unusable> {
    let bytes = slot.bytes.len() + slot.tag_bytes();
    if slot.is_cut_off || bytes > pool.bytes_max() {
        return Err(Unusable);
    }
    let Some(mut packet) = pool.alloc() else { return Ok(None) };
    pool.resize(&mut packet, bytes);
    let to = pool.bytes_mut(&packet);
    let placed = match slot.tag {
        Some(tag) => put_tag(slot.bytes, tag, to),
        None => {
            to.copy_from_slice(slot.bytes);
            Ok(())
        }
    };
    match placed.and_then(|()| note.complete(to)) {
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
            return Err(gone(self.interface));
        }
        let before = into.len();
        let end = before + packets_max;
        while self.give_held(pool, into, end) && into.len() < end && self.ring.next().is_some() {
            if !self.take_slot(pool, into) {
                break;
            }
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let sent = send::all(&self.sender, pool, from, &mut self.refused);
        sent.map_err(|error| if is_there(self.sender.as_fd(), self.interface) { error } else { gone(self.interface) })
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.receiver.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        // An interface that goes down says so by an error, which wakes sleepers until it is taken. That it is removed
        // after that, nobody says.
        self.is_down |= !matches!(sockopt::socket_error(&self.receiver), Ok(Ok(())));
        self.is_gone |= self.is_down && !is_there(self.receiver.as_fd(), self.interface);
        !self.is_gone && self.held.is_none() && self.ring.next().is_none()
    }

    fn has_kernel(&self) -> bool {
        true
    }

    fn losses(&self) -> PortLosses {
        // Packets and drops, from zero again after each question.
        if let Ok([_, drops]) = option::<[u32; 2]>(&self.receiver, libc::SOL_PACKET, libc::PACKET_STATISTICS) {
            self.overflows.set(self.overflows.get() + u64::from(drops));
        }
        PortLosses {
            receive_overflows: self.overflows.get(),
            receive_unusable: self.unusable,
            transmit_refused: self.refused,
        }
    }
}

/// The VLAN tag that the kernel keeps beside a frame, as it stands in one: by the frame's status, the tag's type and
/// what is in it.
pub(crate) fn tag(status: u32, tag_type: u16, control: u16) -> Option<[u8; 4]> {
    if status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let has_type = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    let [a, b] = if has_type { tag_type } else { libc::ETH_P_8021Q as u16 }.to_be_bytes();
    let [c, d] = control.to_be_bytes();
    Some([a, b, c, d])
}

pub(crate) fn gone(interface: InterfaceIndex) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("{interface} is gone"))
}

/// A packet socket that hears nothing until it is bound.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?)
}

/// Binds a packet socket to an interface, and to frames of a type (in the host's order; 0 for none).
pub(crate) fn bind(socket: impl AsFd, interface: InterfaceIndex, ethertype: u16) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: zeroes are a `sockaddr_ll`.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ethertype.to_be();
    address.sll_ifindex = interface.0 as i32;
    let bytes = size_of_val(&address) as libc::socklen_t;
    // SAFETY: `address` is a socket address of that length.
    let result = unsafe { libc::bind(socket.as_fd().as_raw_fd(), (&raw const address).cast(), bytes) };
    checked(result).map(|_| ())
}

/// An instruction of the classic packet filter.
const fn filter(code: u16, then: u8, otherwise: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: then, jf: otherwise, k }
}

/// `BPF_LD | BPF_B | BPF_ABS`, `_H`; `BPF_JMP | BPF_JEQ`, `_JGE`, `_JGT`; `BPF_RET`.
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const IF_MORE: u16 = 0x25;
const RETURN: u16 = 0x06;
/// `SKF_AD_OFF + SKF_AD_PKTTYPE`.
const PACKET_TYPE: u32 = 0xffff_f004;
const WHOLE: u32 = u32::MAX;

/// All but frames for other stations.
const FILTER_OURS: [libc::sock_filter; 4] = [
    filter(LOAD_BYTE, 0, 0, PACKET_TYPE),
    filter(IF_EQUAL, 1, 0, libc::PACKET_OTHERHOST as u32),
    filter(RETURN, 0, 0, WHOLE),
    filter(RETURN, 0, 0, 0),
];

/// ARP; ICMPv6 of types 133 to 137: router and neighbour solicitations and advertisements, redirects; and of type 130
/// behind a hop-by-hop header of 8 bytes: who asks for listeners. Behind one VLAN tag or none.
pub(crate) const FILTER_NEIGHBOURS: [libc::sock_filter; 18] = [
    filter(LOAD_BYTE, 0, 0, PACKET_TYPE),
    filter(IF_EQUAL, 15, 0, libc::PACKET_OTHERHOST as u32),
    filter(IF_EQUAL, 14, 0, libc::PACKET_OUTGOING as u32),
    filter(LOAD_HALF, 0, 0, 12),
    filter(IF_EQUAL, 11, 0, 0x0806),
    filter(IF_EQUAL, 0, 11, 0x86dd),
    filter(LOAD_BYTE, 0, 0, 20),
    filter(IF_EQUAL, 5, 0, 58),
    filter(IF_EQUAL, 0, 8, 0),
    filter(LOAD_HALF, 0, 0, 54),
    filter(IF_EQUAL, 0, 6, 58 << 8),
    filter(LOAD_BYTE, 0, 0, 62),
    filter(IF_EQUAL, 3, 4, 130),
    filter(LOAD_BYTE, 0, 0, 54),
    filter(IF_AT_LEAST, 0, 2, 133),
    filter(IF_MORE, 1, 0, 137),
    filter(RETURN, 0, 0, WHOLE),
    filter(RETURN, 0, 0, 0),
];

pub(crate) fn set_filter(socket: impl AsFd, instructions: &'static [libc::sock_filter]) -> io::Result<()> {
    // The kernel reads the instructions during the call and changes nothing; they are `'static`.
    let program = libc::sock_fprog { len: instructions.len() as u16, filter: instructions.as_ptr().cast_mut() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

#[cfg(test)]
mod tests;
