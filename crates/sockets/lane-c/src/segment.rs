//! The memfd of a pair: a header page, then the window of side 0, then the window of side 1.

use crate::error::Failure;
use fabric::shm::{self, ShmError};
use fabric::{MemoryInbound, MemoryOutbound};
use lane::{Consumer, Layout, Producer, SLOT_BYTES};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{Mapping, Region};

/// Minimum bytes of each direction's ring.
pub const RING_BYTES_MIN: usize = 512;
/// Maximum bytes of each direction's ring.
pub const RING_BYTES_MAX: usize = 1 << 30;

const PAGE_BYTES: usize = 4096;
/// Bytes of the ring in which a direction starts.
const SMALL_RING_BYTES: usize = PAGE_BYTES;
/// "crslane" and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"crslane\x02");

/// Offsets, in the window of a side, of the own state of its endpoints. Whoever attaches to a side continues with it.
const SENDER_STATE_OFFSET: usize = Layout::FORWARD_BYTES + Layout::BACK_BYTES;
const RECEIVER_STATE_OFFSET: usize = SENDER_STATE_OFFSET + Layout::PRODUCER_STATE_BYTES;
const _: () = assert!(RECEIVER_STATE_OFFSET + Layout::CONSUMER_STATE_BYTES <= Layout::packed(8, 0).small_offset);

const WORD_MAGIC: usize = 0;
const WORD_RING_BYTES: usize = 8;
const WORD_SECRET: usize = 16;

pub type Sender = Producer<MemoryOutbound, MemoryInbound>;
pub type Receiver = Consumer<MemoryInbound, MemoryOutbound>;

/// Creates the memfd of a pair.
pub fn create(ring_bytes: usize) -> Result<OwnedFd, Failure> {
    let layout = layout_of(ring_bytes).ok_or(Failure::INVALID)?;
    let mut secret = [0_u8; size_of::<u64>()];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
    let (memfd, mapping) = shm::create(segment_bytes(&layout)).map_err(failure_of)?;
    let region = Region::of_mapping(Arc::new(mapping));
    region.store_u64(WORD_RING_BYTES, ring_bytes as u64, Ordering::Relaxed);
    // The secret is odd, so it is never 0, the value of untouched memory.
    region.store_u64(WORD_SECRET, u64::from_ne_bytes(secret) | 1, Ordering::Relaxed);
    region.store_u64(WORD_MAGIC, MAGIC, Ordering::Release);
    Ok(memfd)
}

/// Maps a pair and returns both endpoints of one side. The segment's header comes from the process that created it, so
/// it is checked before it is used.
pub fn attach(memfd: BorrowedFd<'_>, side: usize) -> Result<(Sender, Receiver), Failure> {
    let len_bytes = usize::try_from(rustix::fs::fstat(memfd)?.st_size).map_err(|_| Failure::INVALID)?;
    let mapping = shm::open(memfd.as_fd(), len_bytes).map_err(failure_of)?;
    let (layout, secret, region) = read_head(mapping)?;
    let window_bytes = window_bytes(&layout);
    let window = |side: usize| region.sub(PAGE_BYTES + side * window_bytes, window_bytes);
    let (own, peers) = (window(side), window(1 - side));
    let sender_state = own.sub(SENDER_STATE_OFFSET, Layout::PRODUCER_STATE_BYTES);
    let receiver_state = own.sub(RECEIVER_STATE_OFFSET, Layout::CONSUMER_STATE_BYTES);
    let (inbound, outbound) = (MemoryInbound::new(own), MemoryOutbound::new(peers));
    let sender = Producer::with_state(outbound.clone(), inbound.clone(), sender_state, layout, secret);
    Ok((sender, Consumer::with_state(inbound, outbound, receiver_state, layout, secret)))
}

fn read_head(mapping: Mapping) -> Result<(Layout, u64, Region), Failure> {
    let region = Region::of_mapping(Arc::new(mapping));
    if region.len_bytes() < PAGE_BYTES || region.load_u64(WORD_MAGIC, Ordering::Acquire) != MAGIC {
        return Err(Failure::PROTOCOL);
    }
    let ring_bytes = usize::try_from(region.load_u64(WORD_RING_BYTES, Ordering::Relaxed)).ok();
    let layout = ring_bytes.and_then(layout_of).ok_or(Failure::PROTOCOL)?;
    let secret = region.load_u64(WORD_SECRET, Ordering::Relaxed);
    let is_whole = segment_bytes(&layout) == region.len_bytes() && secret != 0;
    if is_whole { Ok((layout, secret, region)) } else { Err(Failure::PROTOCOL) }
}

/// Returns the layout of both directions, or `None` for an invalid ring size. Each window contains the forward part of
/// one direction and the back part of the other.
fn layout_of(ring_bytes: usize) -> Option<Layout> {
    if !ring_bytes.is_power_of_two() || !(RING_BYTES_MIN..=RING_BYTES_MAX).contains(&ring_bytes) {
        return None;
    }
    let slots = |bytes: usize| (bytes / SLOT_BYTES) as u64;
    let has_big_ring = ring_bytes > SMALL_RING_BYTES;
    let big_slots = if has_big_ring { slots(ring_bytes) } else { 0 };
    Some(Layout::packed(slots(ring_bytes.min(SMALL_RING_BYTES)), big_slots))
}

fn window_bytes(layout: &Layout) -> usize {
    layout.window_bytes().next_multiple_of(PAGE_BYTES)
}

fn segment_bytes(layout: &Layout) -> usize {
    PAGE_BYTES + 2 * window_bytes(layout)
}

fn failure_of(error: ShmError) -> Failure {
    match error {
        ShmError::System { error, .. } | ShmError::NotMemfd { error, .. } => {
            error.raw_os_error().map_or(Failure::INVALID, Failure::of_errno)
        }
        _ => Failure::INVALID,
    }
}
