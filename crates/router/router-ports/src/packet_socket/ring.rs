//! The ring that the kernel puts received frames into (`PACKET_RX_RING`, version 2).

use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use super::tag;
use crate::mapping::Mapping;
use crate::offload::NOTE_BYTES;
use crate::system::set_option;

/// Frames that the ring holds: some milliseconds at a million a second.
const SLOTS: usize = 4096;
/// What lies before a frame in its slot: the kernel's header, the address, the note.
const BEFORE_BYTES: usize = 128;
/// Slots are not longer than this; longer frames are read by a call each.
const SLOT_BYTES_MAX: usize = 16 << 10;
const BLOCK_BYTES: usize = 64 << 10;

/// What the kernel has received.
pub struct Ring {
    memory: Mapping,
    slot_bytes: usize,
    at: usize,
}

/// A received frame, still in the ring.
pub struct Slot<'a> {
    pub bytes: &'a [u8],
    /// What is left to be done to it, as the kernel notes it.
    pub note: &'a [u8; NOTE_BYTES],
    /// The VLAN tag that stood in it.
    pub tag: Option<[u8; 4]>,
    /// It did not fit, and is at the socket to be read whole.
    pub is_copied: bool,
    /// It did not fit, and the rest is lost unless it was copied.
    pub is_cut_off: bool,
}

impl Slot<'_> {
    /// What a tag adds.
    pub fn tag_bytes(&self) -> usize {
        self.tag.map_or(0, |tag| tag.len())
    }
}

impl Ring {
    /// Asks for a ring whose slots hold frames of an interface with that MTU.
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
        Ok(Ring { memory, slot_bytes, at: 0 })
    }

    fn slot(&self) -> *mut u8 {
        self.memory.at(self.at * self.slot_bytes, self.slot_bytes)
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: a slot begins with its header, aligned to 2048 at least, which begins with the status; the kernel
        // writes it as a whole word.
        unsafe { AtomicU32::from_ptr(self.slot().add(offset_of!(libc::tpacket2_hdr, tp_status)).cast()) }
    }

    /// The oldest frame that has come and was not given back.
    pub fn next(&self) -> Option<Slot<'_>> {
        let status = self.status().load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: the status says that the slot is ours until it is given back, and `self` is borrowed till then. Its
        // header is plain numbers, aligned as the slot is.
        let header = unsafe { &*self.slot().cast::<libc::tpacket2_hdr>() };
        let slot_bytes = self.slot_bytes;
        let start = usize::from(header.tp_mac).clamp(NOTE_BYTES, slot_bytes);
        let bytes = (header.tp_snaplen as usize).min(slot_bytes - start);
        // SAFETY: both ranges lie in the slot, by the bounds of the two lines above, and are ours as the header is.
        let (note, bytes) = unsafe {
            let note = self.slot().add(start - NOTE_BYTES).cast::<[u8; NOTE_BYTES]>();
            (&*note, std::slice::from_raw_parts(self.slot().add(start), bytes))
        };
        Some(Slot {
            bytes,
            note,
            tag: tag(status, header.tp_vlan_tpid, header.tp_vlan_tci),
            is_copied: status & libc::TP_STATUS_COPY != 0,
            is_cut_off: header.tp_len > header.tp_snaplen,
        })
    }

    /// The slot of [`Ring::next`] is the kernel's again.
    pub fn give_back(&mut self) {
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.at = (self.at + 1) % SLOTS;
    }
}
