//! One queue of an interface: an AF_XDP socket with its memory (UMEM).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use router::{Packet, Pool};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING,
    XDP_UMEM_PGOFF_FILL_RING, XdpDesc, XdpDescOptions, XdpOptionsFlags, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::ring::Ring;
use crate::interface::InterfaceIndex;
use crate::mapping::Mapping;
use crate::offload::complete_unannounced;
use crate::system::set_option;

/// The largest numbers of frames in flight for reception and transmission.
const RECEIVE_FRAMES: u32 = 4096;
const SEND_FRAMES: u32 = 2048;
/// `XDP_PACKET_HEADROOM`: the bytes that the kernel leaves free before a received frame.
const HEADROOM_BYTES: u32 = 256;
/// Bytes of the Ethernet header and two VLAN tags.
const HEADER_BYTES: u32 = 22;
/// The sizes of frame buffers, at most a page.
const FRAME_BYTES: [u32; 2] = [2048, 4096];
/// `XDP_MAX_TX_SKB_BUDGET`: the frames that one call sends in copy mode.
const OPTION_BUDGET: i32 = 9;
const BUDGET: i32 = 256;
/// The calls needed to send all pending frames with the smallest budget, 32.
const KICKS_MAX: u32 = SEND_FRAMES / 32 + 1;

/// The longest MTU that a port can have.
pub const MTU_BYTES_MAX: u32 = FRAME_BYTES[1] - HEADROOM_BYTES - HEADER_BYTES;

/// A socket and its memory.
pub struct Queue {
    fd: OwnedFd,
    memory: Mapping,
    frame_bytes: u32,
    fill: Ring<u64>,
    received: Ring<XdpDesc>,
    to_send: Ring<XdpDesc>,
    sent: Ring<u64>,
    /// Buffers for sending that the kernel does not use.
    free: Vec<u64>,
    is_copied: bool,
    pub unusable: u64,
    pub refused: u64,
}

impl Queue {
    /// Opens a socket with rings and memory for one queue. It receives nothing before it is in the program's map.
    pub fn open(interface: InterfaceIndex, mtu_bytes: u32, queue: u32) -> io::Result<Queue> {
        let fits = |bytes: &&u32| mtu_bytes + HEADROOM_BYTES + HEADER_BYTES <= **bytes;
        let frame_bytes = *FRAME_BYTES.iter().find(fits).ok_or(io::ErrorKind::InvalidInput)?;
        let fd = rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        let memory = Mapping::anonymous((RECEIVE_FRAMES + SEND_FRAMES) as usize * frame_bytes as usize)?;
        sockopt::set_xdp_umem_reg(
            &fd,
            XdpUmemReg {
                addr: memory.at(0, 1) as u64,
                len: memory.bytes() as u64,
                chunk_size: frame_bytes,
                headroom: 0,
                flags: XdpUmemRegFlags::empty(),
                tx_metadata_len: 0,
            },
        )?;
        sockopt::set_xdp_umem_fill_ring_size(&fd, RECEIVE_FRAMES)?;
        sockopt::set_xdp_umem_completion_ring_size(&fd, SEND_FRAMES)?;
        sockopt::set_xdp_rx_ring_size(&fd, RECEIVE_FRAMES)?;
        sockopt::set_xdp_tx_ring_size(&fd, SEND_FRAMES)?;
        // Older kernels send 32 frames with a call.
        let _ = set_option(&fd, libc::SOL_XDP, OPTION_BUDGET, &BUDGET);
        let offsets = sockopt::xdp_mmap_offsets(&fd)?;
        let mut fill = Ring::open(&fd, XDP_UMEM_PGOFF_FILL_RING, offsets.fr, RECEIVE_FRAMES)?;
        let sent = Ring::open(&fd, XDP_UMEM_PGOFF_COMPLETION_RING, offsets.cr, SEND_FRAMES)?;
        let received = Ring::open(&fd, XDP_PGOFF_RX_RING, offsets.rx, RECEIVE_FRAMES)?;
        let to_send = Ring::open(&fd, XDP_PGOFF_TX_RING, offsets.tx, SEND_FRAMES)?;
        (0..fill.free_entries()).for_each(|frame| fill.push(u64::from(frame) * u64::from(frame_bytes)));
        fill.publish();
        let free = (RECEIVE_FRAMES..RECEIVE_FRAMES + SEND_FRAMES)
            .map(|frame| u64::from(frame) * u64::from(frame_bytes))
            .collect();
        let flags = SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        rustix::net::bind(&fd, &SocketAddrXdp::new(flags, interface.0, queue))?;
        let is_copied = !sockopt::xdp_options(&fd)?.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
        let (unusable, refused) = (0, 0);
        Ok(Queue { fd, memory, frame_bytes, fill, received, to_send, sent, free, is_copied, unusable, refused })
    }

    /// Returns whether the kernel copies frames between the driver and this socket.
    pub fn is_copied(&self) -> bool {
        self.is_copied
    }

    /// Receives frames until `into` has `end`. `has_partial_checksums` says that senders leave checksums to hardware.
    pub fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, end: usize, has_partial_checksums: bool) {
        // There is an entry in the fill ring for each received frame, so it never lacks room.
        let mut free_entries = self.fill.free_entries();
        while into.len() < end && free_entries > 0 {
            let Some(frame) = self.received.peek() else { break };
            if frame.len as usize > pool.bytes_max() {
                self.unusable += 1;
            } else {
                let Some(mut packet) = pool.alloc() else { break };
                pool.resize(&mut packet, frame.len as usize);
                let at = self.memory.at(frame.addr as usize, frame.len as usize);
                // SAFETY: `at` has checked that the frame lies in the mapping, and the kernel has passed it to this
                // process: it writes there again only after the address is in the fill ring.
                let bytes = unsafe { std::slice::from_raw_parts(at, frame.len as usize) };
                let to = pool.bytes_mut(&packet);
                to.copy_from_slice(bytes);
                if has_partial_checksums {
                    complete_unannounced(to);
                }
                into.push(packet);
            }
            self.received.consume();
            self.fill.push(frame.addr & !u64::from(self.frame_bytes - 1));
            free_entries -= 1;
        }
        self.received.release();
        self.fill.publish();
        if self.fill.needs_wakeup() {
            // The call only wakes the driver; an error shows in the next poll.
            let _ = rustix::net::recv(&self.fd, &mut [0u8; 0][..], RecvFlags::DONTWAIT);
        }
    }

    /// Sends from the front of `from` as many frames as the ring has room for.
    pub fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let before = from.len();
        let mut sent = self.kick();
        while !from.is_empty() && sent.is_ok() {
            self.reclaim();
            let free_entries = self.to_send.free_entries().min(self.free.len() as u32).min(from.len() as u32);
            if free_entries == 0 {
                break;
            }
            for packet in from.drain(..free_entries as usize) {
                self.enqueue(pool, &packet);
                pool.free(packet);
            }
            self.to_send.publish();
            sent = self.kick();
        }
        match sent {
            Ok(()) => Ok(before - from.len()),
            // The interface is down: frames are dropped instead of waiting for an unbounded time.
            Err(Errno::NETDOWN) => {
                self.refused += from.len() as u64;
                from.drain(..).for_each(|packet| pool.free(packet));
                Ok(before)
            }
            Err(errno) => Err(errno.into()),
        }
    }

    fn enqueue(&mut self, pool: &Pool, packet: &Packet) {
        let bytes = pool.bytes(packet);
        if bytes.len() > self.frame_bytes as usize {
            self.refused += 1;
            return;
        }
        let Some(addr) = self.free.pop() else { return };
        let at = self.memory.at(addr as usize, bytes.len());
        // SAFETY: `at` has checked that the buffer lies in the mapping; it is free, so the kernel does not access it.
        unsafe { std::slice::from_raw_parts_mut(at, bytes.len()) }.copy_from_slice(bytes);
        self.to_send.push(XdpDesc { addr, len: bytes.len() as u32, options: XdpDescOptions::empty() });
    }

    fn reclaim(&mut self) {
        while let Some(addr) = self.sent.peek() {
            self.free.push(addr);
            self.sent.consume();
        }
        self.sent.release();
    }

    /// Makes the kernel send pending frames, as many as it accepts now.
    pub fn kick(&mut self) -> Result<(), Errno> {
        for _ in 0..KICKS_MAX {
            if self.to_send.pending() == 0 || !self.to_send.needs_wakeup() {
                break;
            }
            let before = self.to_send.pending();
            match rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT) {
                // A frame that the interface refused is lost; the next one may be accepted.
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::BUSY) => self.refused += 1,
                // The kernel has no memory for more frames at present.
                Err(Errno::NOBUFS) => break,
                Err(errno) => return Err(errno),
            }
            self.reclaim();
            if self.to_send.pending() == before {
                break;
            }
        }
        Ok(())
    }

    /// Returns whether frames are pending that the kernel has not accepted.
    pub fn has_pending(&mut self) -> bool {
        self.to_send.pending() > 0
    }

    /// Returns the number of frames that the kernel lost because its rings or those of the socket were full.
    pub fn overflows(&self) -> u64 {
        let statistics = sockopt::xdp_statistics(&self.fd);
        statistics.map_or(0, |lost| {
            lost.rx_dropped + lost.rx_ring_full.unwrap_or(0) + lost.rx_fill_ring_empty_descs.unwrap_or(0)
        })
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
