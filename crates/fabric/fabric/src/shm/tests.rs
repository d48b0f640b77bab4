//! Which descriptors of a peer are accepted.

use super::*;
use crate::{Inbound, Link, LinkState, MemoryOutbound, Outbound, Slice, train_both};
use rustix::fs::MemfdFlags;
use rustix::io::{fcntl_getfd, read, write};
use rustix::pipe::{PipeFlags, pipe_with};
use volmem::sync::Ordering;

const LEN_BYTES: usize = 8192;

/// A memfd with the given seals.
fn memfd(len_bytes: u64, seals: SealFlags) -> OwnedFd {
    let memfd = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&memfd, len_bytes).expect("a length");
    fcntl_add_seals(&memfd, seals).expect("seals");
    memfd
}

fn region(mapping: Mapping) -> Region {
    Region::of_mapping(Arc::new(mapping))
}

#[test]
fn two_mappings_of_a_segment_share_its_memory() {
    let (memfd, mapping) = create(LEN_BYTES).expect("a segment");
    let (ours, theirs) = (region(mapping), region(open(&memfd, LEN_BYTES).expect("the same segment")));
    drop(memfd);
    ours.store_u64(LEN_BYTES - 8, 7, Ordering::Release);
    assert_eq!(theirs.load_u64(LEN_BYTES - 8, Ordering::Acquire), 7);
    theirs.write(1, b"back");
    let mut bytes = [0; 4];
    ours.read(1, &mut bytes);
    assert_eq!(&bytes, b"back");
}

#[test]
fn pages_that_an_outbound_window_discards_are_freed() {
    let (memfd, mapping) = create(4 * PAGE_BYTES).expect("a segment");
    let outbound = MemoryOutbound::new(region(mapping));
    let theirs = region(open(&memfd, 4 * PAGE_BYTES).expect("the same segment"));
    let taken_bytes = || fstat(&memfd).expect("its blocks").st_blocks as usize * 512;
    outbound.write(0, &[7; 4 * PAGE_BYTES]);
    assert_eq!(taken_bytes(), 4 * PAGE_BYTES);
    // One whole page and parts of two others.
    outbound.discard(PAGE_BYTES / 2, 2 * PAGE_BYTES);
    assert_eq!(taken_bytes(), 3 * PAGE_BYTES);
    let mut bytes = [0; 4 * PAGE_BYTES];
    theirs.read(0, &mut bytes);
    let is_discarded = |offset: usize| (PAGE_BYTES..2 * PAGE_BYTES).contains(&offset);
    assert!(bytes.iter().enumerate().all(|(offset, byte)| *byte == if is_discarded(offset) { 0 } else { 7 }));
    assert_eq!(taken_bytes(), 4 * PAGE_BYTES, "a page that is read is allocated again");
    outbound.slice(2 * PAGE_BYTES, 2 * PAGE_BYTES).discard(PAGE_BYTES, PAGE_BYTES);
    assert_eq!(taken_bytes(), 3 * PAGE_BYTES);
    assert_eq!(theirs.load_u64(3 * PAGE_BYTES, Ordering::Acquire), 0);
}

#[test]
fn an_outbound_window_in_heap_memory_discards_nothing() {
    let memory = Region::heap(4 * PAGE_BYTES);
    let outbound = MemoryOutbound::new(memory.clone());
    outbound.write(0, &[7; 4 * PAGE_BYTES]);
    outbound.discard(0, 4 * PAGE_BYTES);
    assert_eq!(memory.load_u64(PAGE_BYTES, Ordering::Acquire), 0x0707_0707_0707_0707);
}

#[test]
fn two_segments_share_nothing() {
    let (first, second) = (create(LEN_BYTES).expect("a segment"), create(LEN_BYTES).expect("another"));
    region(first.1).store_u64(0, 7, Ordering::Release);
    assert_eq!(region(second.1).load_u64(0, Ordering::Acquire), 0);
}

#[test]
fn a_segment_can_neither_shrink_nor_grow_nor_lose_its_seals_and_is_not_inherited() {
    let (memfd, _mapping) = create(LEN_BYTES).expect("a segment");
    assert_eq!(ftruncate(&memfd, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&memfd, 2 * LEN_BYTES as u64), Err(Errno::PERM));
    assert_eq!(fcntl_add_seals(&memfd, SealFlags::WRITE), Err(Errno::PERM));
    assert!(fcntl_getfd(&memfd).expect("its flags").contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn a_length_of_zero_or_beyond_the_address_space_is_refused() {
    let (memfd, _mapping) = create(LEN_BYTES).expect("a segment");
    for len_bytes in [0, usize::MAX] {
        assert!(matches!(create(len_bytes), Err(ShmError::Length { len_bytes: found }) if found == len_bytes));
        assert!(matches!(open(&memfd, len_bytes), Err(ShmError::Length { len_bytes: found }) if found == len_bytes));
    }
}

#[test]
fn more_than_the_machine_can_map_is_an_error_that_names_the_size() {
    let len_bytes = isize::MAX as usize & !0xfff;
    let error = create(len_bytes).expect_err("no machine has that much");
    assert!(error.to_string().contains(&len_bytes.to_string()), "{error}");
}

#[test]
fn a_segment_of_another_size_is_refused_with_both_sizes() {
    let (memfd, _mapping) = create(LEN_BYTES).expect("a segment");
    for expected_bytes in [LEN_BYTES - 1, LEN_BYTES + 1, 2 * LEN_BYTES, 1] {
        let error = open(&memfd, expected_bytes).expect_err("another size");
        assert!(
            matches!(error, ShmError::Size { found_bytes: 8192, expected_bytes: named } if named == expected_bytes)
        );
        assert_eq!(error.to_string(), format!("segment from the peer has 8192 bytes: {expected_bytes} were agreed"));
    }
}

#[test]
fn a_memfd_whose_seals_are_missing_or_forbid_writing_is_refused() {
    let required = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let insufficient = [
        SealFlags::empty(),
        required - SealFlags::SHRINK,
        required - SealFlags::GROW,
        required - SealFlags::SEAL,
        required | SealFlags::WRITE,
        required | SealFlags::FUTURE_WRITE,
    ];
    for seals in insufficient {
        let error = open(memfd(LEN_BYTES as u64, seals), LEN_BYTES).expect_err("other seals");
        assert!(matches!(error, ShmError::Seals { found, .. } if found == seals.bits()), "{seals:?}: {error}");
    }
    open(memfd(LEN_BYTES as u64, required), LEN_BYTES).expect("just the seals required");
}

#[test]
fn descriptors_other_than_memfds_are_refused() {
    let (pipe, _writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    let directory = rustix::fs::open("/proc", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).expect("/proc");
    for other in [pipe, new_eventfd().expect("an eventfd"), directory] {
        let number = other.as_raw_fd();
        let error = open(&other, LEN_BYTES).expect_err("no memfd");
        assert!(matches!(error, ShmError::NotMemfd { descriptor, .. } if descriptor == number), "{error}");
        assert!(std::error::Error::source(&error).is_some());
    }
}

#[test]
fn a_memfd_of_huge_pages_is_refused() {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let memfd = match memfd_create("test", flags) {
        Ok(memfd) => memfd,
        Err(Errno::NOSYS | Errno::NOENT | Errno::NODEV | Errno::INVAL) => {
            return eprintln!("no huge pages in this kernel: nobody can send a memfd of them");
        }
        Err(errno) => panic!("memfd_create: {errno}"),
    };
    fcntl_add_seals(&memfd, SEALS_REQUIRED).expect("seals");
    let error = open(&memfd, LEN_BYTES).expect_err("huge pages");
    assert!(matches!(error, ShmError::FileSystem { .. }), "{error}");
}

#[test]
fn a_memfd_opened_for_reading_only_is_refused() {
    let (memfd, _mapping) = create(LEN_BYTES).expect("a segment");
    let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
    let read_only =
        rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).expect("opened again");
    let error = open(&read_only, LEN_BYTES).expect_err("cannot be written");
    assert!(matches!(error, ShmError::System { call: "mmap", len_bytes: LEN_BYTES, .. }), "{error}");
}

#[test]
fn a_segment_takes_memory_only_for_pages_that_were_touched() {
    const BIG_BYTES: usize = 64 << 20;
    let (memfd, mapping) = create(BIG_BYTES).expect("a segment");
    let touched_bytes = || fstat(&memfd).expect("its size").st_blocks as usize * 512;
    assert_eq!(touched_bytes(), 0);
    region(mapping).store_u64(BIG_BYTES / 2, 1, Ordering::Relaxed);
    assert!((1..=2 << 20).contains(&touched_bytes()), "{} bytes", touched_bytes());
}

#[test]
fn a_link_of_another_window_size_is_refused() {
    let (_creator, parts) = create_link(LEN_BYTES).expect("a link");
    assert!(matches!(open_link(parts, 2 * LEN_BYTES), Err(ShmError::Size { .. })));
}

#[test]
fn a_window_size_that_is_not_a_multiple_of_the_line_is_refused() {
    for window_bytes in [0, 1, 63, 65, usize::MAX, isize::MAX as usize & !63] {
        let error = create_link(window_bytes).expect_err("no window");
        assert!(matches!(error, ShmError::WindowSize { window_bytes: found } if found == window_bytes), "{error}");
    }
}

#[test]
fn a_doorbell_that_is_not_an_eventfd_is_refused_with_its_name() {
    for spoil in [0, 1] {
        let (_creator, mut parts) = create_link(64).expect("a link");
        let (_reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        *if spoil == 0 { &mut parts.doorbell_creator } else { &mut parts.doorbell_peer } = writer;
        let error = open_link(parts, 64).expect_err("a pipe is not an eventfd");
        assert!(matches!(&error, ShmError::NotEventfd { found } if found.starts_with("pipe:")), "{error}");
    }
}

#[test]
fn windows_and_control_blocks_do_not_overlap() {
    let (mut creator, parts) = create_link(64).expect("a link");
    let mut peer = open_link(parts, 64).expect("the peer");
    assert!(train_both(&mut creator, &mut peer));
    creator.outbound().write(0, &[0xff; 64]);
    peer.outbound().write(0, &[0xee; 64]);
    assert_eq!((creator.state(), peer.state()), (LinkState::Up, LinkState::Up));
    assert_eq!(creator.inbound().load_u64(56, Ordering::Relaxed), u64::from_ne_bytes([0xee; 8]));
    assert_eq!(peer.inbound().load_u64(56, Ordering::Relaxed), u64::from_ne_bytes([0xff; 8]));
}

#[test]
fn an_endpoint_that_is_attached_again_is_down_until_both_train_for_a_newer_epoch() {
    let (mut creator, parts) = create_link(64).expect("a link");
    let again = || ShmDescriptors {
        memfd: duplicate(&parts.memfd).expect("a copy"),
        doorbell_creator: duplicate(&parts.doorbell_creator).expect("a copy"),
        doorbell_peer: duplicate(&parts.doorbell_peer).expect("a copy"),
    };
    let mut peer = open_link(again(), 64).expect("the peer");
    assert!(train_both(&mut creator, &mut peer));
    let epoch = creator.epoch();
    creator.outbound().write(0, b"old");
    drop(peer);
    let mut successor = open_link(again(), 64).expect("the peer again");
    assert_eq!((creator.state(), successor.state()), (LinkState::Down, LinkState::Down));
    assert!(train_both(&mut creator, &mut successor));
    assert!(successor.epoch() > epoch && creator.epoch() == successor.epoch());
    assert_eq!(successor.inbound().load_u64(0, Ordering::Relaxed), 0);
}

#[test]
fn a_peer_that_fills_the_counter_and_makes_the_eventfd_blocking_blocks_nothing() {
    let (creator, parts) = create_link(64).expect("a link");
    let doorbell = creator.doorbell();
    for shared in [&parts.doorbell_peer, &parts.doorbell_creator] {
        rustix::fs::fcntl_setfl(shared, rustix::fs::OFlags::empty()).expect("blocking");
    }
    assert_eq!(doorbell.wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
    write(&parts.doorbell_peer, &(u64::MAX - 1).to_ne_bytes()).expect("the counter is full");
    (0..3).for_each(|_| doorbell.ring());
    let mut counter = [0; 8];
    assert_eq!(read(&parts.doorbell_peer, &mut counter), Ok(8));
    assert_eq!(u64::from_ne_bytes(counter), u64::MAX - 1);
}

#[test]
fn every_error_is_one_line_with_its_values() {
    let refused = ShmError::Seals { found: 2, required: 7, refused: 0x18 };
    assert_eq!(refused.to_string(), "segment from the peer has seals 0x2: needs all of 0x7 and none of 0x18");
    let system = ShmError::System { call: "mmap", len_bytes: 4096, error: Errno::NOMEM.into() };
    assert!(system.to_string().starts_with("mmap for a shared segment of 4096 bytes: "), "{system}");
    let bell = ShmError::System { call: "eventfd", len_bytes: 0, error: Errno::MFILE.into() };
    assert!(bell.to_string().starts_with("eventfd: "), "{bell}");
}
