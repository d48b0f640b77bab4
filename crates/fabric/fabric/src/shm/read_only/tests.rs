//! What a peer can do with memory that it may only read.

use super::*;
use crate::shm::{SealFlags, create};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::write;
use rustix::mm::{MprotectFlags, mprotect};
use std::sync::Arc;
use volmem::Region;
use volmem::sync::Ordering;

const LEN_BYTES: usize = 4 * 4096;

fn region(mapping: Mapping) -> Region {
    Region::of_mapping(Arc::new(mapping))
}

fn both_ways() -> [OwnMemory; 2] {
    [Protection::Descriptor, Protection::Seal].map(|way| create_protected(LEN_BYTES, way).expect("memory"))
}

#[test]
fn a_peer_reads_what_the_owner_writes_and_can_change_nothing() {
    for OwnMemory { mapping, descriptor, .. } in both_ways() {
        let own = region(mapping);
        let peers = open_readable(&descriptor, |len_bytes| len_bytes == LEN_BYTES).expect("acceptable");
        let base = peers.base();
        let seen = region(peers);
        own.store_u64(LEN_BYTES - 8, 7, Ordering::Release);
        assert_eq!(seen.load_u64(LEN_BYTES - 8, Ordering::Acquire), 7);

        assert!(Mapping::new(descriptor.as_fd(), LEN_BYTES).is_err(), "mapped writable");
        // SAFETY: the range is the mapping of `seen`; only its protection could change.
        let changed = unsafe { mprotect(base.as_ptr().cast(), LEN_BYTES, MprotectFlags::WRITE) };
        assert_eq!(changed, Err(Errno::ACCESS));
        assert!(write(&descriptor, b"x").is_err(), "written");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(fallocate(&descriptor, punch, 0, 4096).is_err(), "a hole was punched");
        for len_bytes in [0, 2 * LEN_BYTES] {
            assert!(ftruncate(&descriptor, len_bytes as u64).is_err(), "made {len_bytes} bytes long");
        }
        assert!(fcntl_add_seals(&descriptor, SealFlags::WRITE).is_err(), "sealed against its owner");
        seen.discard(0, LEN_BYTES);
        assert_eq!(own.load_u64(LEN_BYTES - 8, Ordering::Relaxed), 7, "discarded by the peer");
    }
}

#[test]
fn the_owner_returns_memory_to_the_system_unless_only_a_seal_protects_it() {
    for OwnMemory { mapping, is_releasable, .. } in both_ways() {
        let own = region(mapping);
        own.write(0, &[7; LEN_BYTES]);
        own.discard(4096, 4096);
        assert_eq!(own.load_u64(4096, Ordering::Relaxed) == 0, is_releasable);
    }
    assert!(create_own(LEN_BYTES).expect("memory").is_releasable);
}

#[test]
fn only_sealed_memory_of_a_known_size_is_opened() {
    let is_size = |len_bytes| len_bytes == LEN_BYTES;
    let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
    assert!(matches!(open_readable(&pipe, is_size), Err(ShmError::NotMemfd { .. })));
    let unsealed = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&unsealed, LEN_BYTES as u64).expect("a length");
    assert!(matches!(open_readable(&unsealed, is_size), Err(ShmError::Seals { .. })));
    let other = create_own(LEN_BYTES + 4096).expect("memory").descriptor;
    let error = open_readable(&other, is_size).expect_err("another size");
    assert_eq!(error.to_string(), "segment from the peer has 20480 bytes: no lane has this size");
    let (writable, _) = create(LEN_BYTES).expect("a segment");
    assert!(open_readable(&writable, is_size).is_ok());
}
