//! The receive ring that the kernel writes (`PACKET_RX_RING`, version 2).

use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use super::tag;
use crate::mapping::Mapping;
use crate::offload::VIRTIO_HEADER_BYTES;
use crate::system::set_option;

/// The capacity of the ring in frames: some milliseconds at a million a second.
const SLOTS: usize = 4096;
/// Bytes before a frame in its slot: the kernel's header, the address, the virtio header.
const BEFORE_BYTES: usize = 128;
/// The largest slot; longer frames are read by a system call each.
const SLOT_BYTES_MAX: usize = 16 << 10;
const BLOCK_BYTES: usize = 64 << 10;

/// The receive ring of a packet socket.
pub struct Ring {
    memory: Mapping,
    slot_bytes: usize,
    next_slot: usize,
}

/// A received frame in the ring.
pub struct Slot<'a> {
    pub bytes: &'a [u8],
    /// The length of the frame, of which `bytes` may be only the front.
    pub frame_bytes: usize,
    /// The kernel's description of the remaining offloads.
    pub header: &'a [u8; VIRTIO_HEADER_BYTES],
    /// The VLAN tag that was removed from the frame.
    pub tag: Option<[u8; 4]>,
    /// Whether the frame did not fit and is queued at the socket as a whole.
    pub is_copied: bool,
    /// Whether the frame was truncated; the rest is lost unless it was also copied.
    pub is_cut_off: bool,
}

impl Slot<'_> {
    /// Returns the bytes that the tag adds.
    pub fn tag_bytes(&self) -> usize {
        self.tag.map_or(0, |tag| tag.len())
    }

    /// Returns the length of the frame with its tag.
    pub fn whole_bytes(&self) -> usize {
        self.frame_bytes + self.tag_bytes()
    }
}

impl Ring {
    /// Creates a ring whose slots hold frames of an interface with this MTU.
    pub fn open(socket: impl AsFd, mtu_bytes: u32) -> io::Result<Ring> {
        let slot_bytes = (mtu_bytes as usize + BEFORE_BYTES + 32).next_power_of_two().clamp(2048, SLOT_BYTES_MAX);
        let blocks = SLOTS * slot_bytes / BLOCK_BYTES;
        let request = libc::tpacket_req {
            tp_block_size: BLOCK_BYTES as u32,
            tp_block_nr: blocks as u32,
            tp_frame_size: slot_bytes as u32,
            tp_frame_nr: SLOTS as u32,
        };
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let memory = Mapping::of_socket(socket, 0, SLOTS * slot_bytes)?;
        Ok(Ring { memory, slot_bytes, next_slot: 0 })
    }

    fn slot(&self) -> *mut u8 {
        self.memory.at(self.next_slot * self.slot_bytes, self.slot_bytes)
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: `slot` points to a slot within the mapping, which begins with its header, whose first field is the
        // status; slots are aligned to at least 2048 bytes, and the kernel accesses the status as one word.
        unsafe { AtomicU32::from_ptr(self.slot().add(offset_of!(libc::tpacket2_hdr, tp_status)).cast()) }
    }

    /// Returns the oldest received frame that was not released.
    pub fn next(&self) -> Option<Slot<'_>> {
        let status = self.status().load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: the status says that this process owns the slot until [`Ring::release`], which needs `self`
        // exclusively and so cannot be called during this borrow. The header consists of integers, and is aligned as
        // the slot is.
        let tpacket_header = unsafe { &*self.slot().cast::<libc::tpacket2_hdr>() };
        let slot_bytes = self.slot_bytes;
        let start = usize::from(tpacket_header.tp_mac).clamp(VIRTIO_HEADER_BYTES, slot_bytes);
        let bytes = (tpacket_header.tp_snaplen as usize).min(slot_bytes - start);
        // SAFETY: both ranges lie in the slot: `start` is at least `VIRTIO_HEADER_BYTES`, and `start + bytes` at most
        // `slot_bytes`. This process owns the slot, as the status says, while `self` is borrowed.
        let (virtio_header, bytes) = unsafe {
            let virtio_header = self.slot().add(start - VIRTIO_HEADER_BYTES).cast::<[u8; VIRTIO_HEADER_BYTES]>();
            (&*virtio_header, std::slice::from_raw_parts(self.slot().add(start), bytes))
        };
        Some(Slot {
            bytes,
            frame_bytes: tpacket_header.tp_len as usize,
            header: virtio_header,
            tag: tag(status, tpacket_header.tp_vlan_tpid, tpacket_header.tp_vlan_tci),
            is_copied: status & libc::TP_STATUS_COPY != 0,
            is_cut_off: tpacket_header.tp_len > tpacket_header.tp_snaplen,
        })
    }

    /// Returns the slot of [`Ring::next`] to the kernel.
    pub fn release(&mut self) {
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.next_slot = (self.next_slot + 1) % SLOTS;
    }
}
