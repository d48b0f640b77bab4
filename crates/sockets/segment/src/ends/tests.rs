//! Facts about two ends in one process, each with a read-only mapping of the other's memory.

use super::*;
use crate::{Receiver, Sender};
use lane::{MemoryRelease, RECORD_BYTES_MAX, SLOT_BYTES};
use proptest::prelude::*;
use std::collections::VecDeque;

const CAPACITY_BYTES: usize = 256 << 10;
const SECRETS: [u64; 2] = [0x0A11_F00D, 0x5EC7];

/// An end, and its lanes.
struct End {
    mine: EndMemory,
    peers: PeerMemory,
    own: Region,
    sender: Sender,
    receiver: Receiver,
}

impl End {
    fn new(mine: EndMemory, peers: PeerMemory, secrets: [u64; 2]) -> Self {
        let own = Region::heap(OWN_STATE_BYTES);
        let mut sender = sender(&mine, &peers, &own, secrets[0]);
        sender.set_capacity(CAPACITY_BYTES);
        let receiver = receiver(&mine, &peers, &own, secrets[1]);
        Self { mine, peers, own, sender, receiver }
    }
}

fn pair_with_descriptors() -> ([End; 2], [OwnedFd; 2]) {
    let [(a, for_b), (b, for_a)] = [(); 2].map(|()| EndMemory::create(CAPACITY_BYTES).expect("memory"));
    let [from_a, from_b] = [&for_b, &for_a].map(|fd| PeerMemory::open(fd, CAPACITY_BYTES).expect("acceptable"));
    let [to_b, to_a] = SECRETS;
    ([End::new(a, from_b, [to_b, to_a]), End::new(b, from_a, [to_a, to_b])], [for_b, for_a])
}

fn pair() -> [End; 2] {
    pair_with_descriptors().0
}

/// Two ends in spans of windows.
fn pair_in_windows() -> [End; 2] {
    let [a, b] = [(); 2].map(|()| Region::heap(SPAN_BYTES));
    let [to_b, to_a] = SECRETS;
    [
        End::new(EndMemory::in_window(a.clone()), PeerMemory::in_window(b.clone()), [to_b, to_a]),
        End::new(EndMemory::in_window(b), PeerMemory::in_window(a), [to_a, to_b]),
    ]
}

/// The stream of one direction, as an oracle: bytes that were written and not read.
#[derive(Debug, Default)]
struct Stream {
    unread: VecDeque<u8>,
    written_bytes: u64,
    moves: u64,
}

impl Stream {
    fn write(&mut self, from: &mut End, len_bytes: usize) -> usize {
        let byte = |index: usize| ((self.written_bytes + index as u64) * 5 / 3) as u8;
        let bytes: Vec<u8> = (0..len_bytes).map(byte).collect();
        // SAFETY: a vector is readable for its length, and the lane has its own memory.
        let is_written = unsafe { from.sender.write_short_from(bytes.as_ptr(), len_bytes, false) };
        let written = if is_written { len_bytes } else { from.sender.write(&bytes).expect("an honest receiver") };
        self.unread.extend(&bytes[..written]);
        self.written_bytes += written as u64;
        written
    }

    fn read(&mut self, to: &mut End, len_bytes: usize) -> usize {
        let mut bytes = vec![0; len_bytes];
        let read_bytes = to.receiver.read(&mut bytes).expect("an honest sender");
        assert_eq!(read_bytes, len_bytes.min(self.unread.len()));
        assert!(self.unread.drain(..read_bytes).eq(bytes[..read_bytes].iter().copied()), "other bytes");
        read_bytes
    }

    /// Moves to the lane, as both ends do by their words.
    fn move_up(&mut self, from: &mut End, to: &mut End) {
        self.moves += 1;
        from.mine.publish(Word::Ask, self.moves);
        to.mine.publish(Word::Ok, to.peers.load(Word::Ask));
        assert_eq!(from.peers.load(Word::Ok), self.moves);
        let start = from.sender.restart();
        from.mine.publish_start(self.written_bytes, start);
        from.mine.publish(Word::Up, self.moves);
        assert_eq!([Word::Up, Word::UpAt].map(|word| to.peers.load(word)), [self.moves, self.written_bytes]);
        to.receiver.restart(to.peers.load(Word::Start)).expect("an honest sender");
    }

    /// Moves back to TCP once everything is read.
    fn move_down(&mut self, from: &mut End, to: &mut End) {
        let end = from.sender.end_move();
        from.mine.publish(Word::EndsAt, end);
        let end = to.peers.load(Word::EndsAt);
        while !to.receiver.has_reached(end).expect("an honest sender") {
            assert!(self.read(to, 5000) > 0);
        }
        assert!(self.unread.is_empty() && from.sender.is_drained());
    }

    /// Moves back to TCP with what the receiver has left.
    fn freeze(&mut self, from: &mut End, to: &mut End) {
        to.mine.publish_cursor(to.receiver.frozen_cursor());
        let cursor = from.peers.frozen_cursor();
        let mut unread = from.sender.unread_from(from.mine.region(), cursor).expect("an honest receiver");
        let mut bytes = vec![0; unread.len_bytes()];
        assert_eq!(unread.read(&mut bytes), bytes.len());
        assert!(self.unread.drain(..).eq(bytes), "other bytes");
    }
}

impl Stream {
    /// Moves back to TCP with what the sender does not know to be read.
    fn go_back(&mut self, from: &mut End) {
        let cursor = from.sender.credited_cursor(&from.mine.region).expect("an honest receiver");
        let mut unread = from.sender.unread_from(&from.mine.region, cursor).expect("an honest receiver");
        let mut bytes = vec![0; unread.len_bytes()];
        assert_eq!(unread.read(&mut bytes), bytes.len());
        let known_bytes = bytes.len().checked_sub(self.unread.len()).expect("all that is unread");
        assert!(self.unread.drain(..).eq(bytes[known_bytes..].iter().copied()), "other bytes");
    }
}

/// One step of a history: the direction, and what happens there.
#[derive(Debug, Clone, Copy)]
enum Step {
    Write(usize),
    Read(usize),
    Release,
    Move,
    Freeze,
    GoBack,
}

fn step() -> impl Strategy<Value = (bool, Step)> {
    let size = || prop_oneof![4 => 0..64_usize, 2 => 0..5_000_usize, 1 => 0..120_000_usize];
    let step = prop_oneof![
        8 => size().prop_map(Step::Write),
        8 => size().prop_map(Step::Read),
        1 => Just(Step::Release),
        1 => Just(Step::Move),
        1 => Just(Step::Freeze),
        1 => Just(Step::GoBack),
    ];
    (any::<bool>(), step)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn both_directions_carry_their_bytes_through_moves_and_rings(
        is_in_windows in any::<bool>(),
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let mut ends = if is_in_windows { pair_in_windows() } else { pair() };
        let mut streams = [Stream::default(), Stream::default()];
        for (direction, stream) in streams.iter_mut().enumerate() {
            let [from, to] = in_direction(&mut ends, direction);
            stream.move_up(from, to);
        }
        for (direction, step) in steps {
            let stream = &mut streams[usize::from(direction)];
            let [from, to] = in_direction(&mut ends, direction.into());
            match step {
                Step::Write(len_bytes) => _ = stream.write(from, len_bytes),
                Step::Read(len_bytes) => _ = stream.read(to, len_bytes),
                Step::Release => {
                    let is_read = stream.unread.is_empty();
                    prop_assert!(is_read || from.sender.release_memory() != MemoryRelease::Released);
                }
                Step::Move => {
                    stream.move_down(from, to);
                    stream.move_up(from, to);
                }
                Step::Freeze => {
                    stream.freeze(from, to);
                    stream.move_up(from, to);
                }
                Step::GoBack => {
                    stream.go_back(from);
                    stream.move_up(from, to);
                }
            }
        }
        for (direction, stream) in streams.iter_mut().enumerate() {
            let [from, to] = in_direction(&mut ends, direction);
            stream.move_down(from, to);
        }
    }

    /// A hostile end stores anything in its own memory: the victim's calls return bytes or an error.
    #[test]
    fn words_of_a_hostile_end_are_survived(
        is_in_windows in any::<bool>(),
        pokes in prop::collection::vec((0..1200_usize, forged(), 0..7_u8, 0..40_000_usize), 0..150),
    ) {
        let [mut victim, hostile] = if is_in_windows { pair_in_windows() } else { pair() };
        let memory = hostile.mine.region();
        for (word, forged, act, len_bytes) in pokes {
            let own = victim.own.sub(RECEIVER_STATE_OFFSET, 16);
            let head = own.load_u64(0, Ordering::Relaxed);
            memory.store_u64(word * 8, forged.value(head), Ordering::Relaxed);
            if let Forged::Record(_) = forged {
                // The peer knows where the victim reads, and can publish there.
                let slot = 256 + (head % 128) as usize * SLOT_BYTES;
                memory.store_u64(slot + 8, forged.value(head), Ordering::Relaxed);
                memory.store_u64(slot, Forged::Tag(0).value(head), Ordering::Release);
            }
            hostile_step(&mut victim, act, len_bytes);
        }
    }
}

fn hostile_step(victim: &mut End, act: u8, len_bytes: usize) {
    let End { mine, peers, sender, receiver, .. } = victim;
    match act {
        0 => _ = receiver.read(&mut vec![0; len_bytes]),
        1 => _ = sender.write(&vec![1; len_bytes]),
        2 => _ = (receiver.may_have_data(), receiver.is_finished(), sender.is_writable(), sender.is_drained()),
        3 => {
            if let Ok(mut unread) = sender.unread_from(mine.region(), peers.frozen_cursor()) {
                let mut bytes = vec![0; unread.len_bytes() + 1];
                assert_eq!(unread.read(&mut bytes), bytes.len() - 1);
            }
        }
        4 => _ = receiver.has_reached(peers.load(Word::EndsAt)),
        5 => _ = receiver.restart(peers.load(Word::Start)),
        _ => {
            sender.announce_sleep();
            receiver.announce_sleep();
            _ = (sender.take_wake_request(), receiver.take_wake_request(), sender.release_memory());
            _ = sender.restart();
        }
    }
}

/// A word that a hostile end stores.
#[derive(Debug, Clone, Copy)]
enum Forged {
    Any(u64),
    Near(u8),
    Tag(u8),
    Record(u64),
}

fn forged() -> impl Strategy<Value = Forged> {
    prop_oneof![
        any::<u64>().prop_map(Forged::Any),
        any::<u8>().prop_map(Forged::Near),
        any::<u8>().prop_map(Forged::Tag),
        (0..=RECORD_BYTES_MAX as u64 + 1, 0..6_u64).prop_map(|(len, kind)| Forged::Record(len | kind << 16)),
    ]
}

impl Forged {
    fn value(self, head: u64) -> u64 {
        match self {
            Forged::Any(value) => value,
            Forged::Near(slots) => head.wrapping_add(slots.into()),
            Forged::Tag(slots) => SECRETS[1] ^ head.wrapping_add(slots.into()).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            Forged::Record(header) => header,
        }
    }
}

/// Returns the sending and the receiving end of a direction.
fn in_direction(ends: &mut [End; 2], direction: usize) -> [&mut End; 2] {
    let [a, b] = ends;
    if direction == 0 { [a, b] } else { [b, a] }
}

#[test]
fn an_end_can_only_read_the_memory_of_the_other() {
    let [a, b] = pair();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let permissions = |memory: &Region| {
        let begin = format!("{:x}-", memory.pointer(0, 1).addr());
        let line = maps.lines().find(|line| line.starts_with(&begin)).expect("a mapping of its own");
        line.split(' ').nth(1).expect("permissions").to_owned()
    };
    for end in [&a, &b] {
        assert_eq!((&*permissions(&end.mine.region), &*permissions(&end.peers.region)), ("rw-s", "r--s"));
    }
}

#[test]
fn a_connection_that_carries_little_touches_one_page_of_each_end() {
    let (mut ends, descriptors) = pair_with_descriptors();
    for direction in 0..2 {
        let mut stream = Stream::default();
        let [from, to] = in_direction(&mut ends, direction);
        stream.move_up(from, to);
        for _ in 0..25 {
            assert_eq!((stream.write(from, 100), stream.read(to, 100)), (100, 100));
        }
        stream.move_down(from, to);
    }
    let pages = descriptors.map(|descriptor| rustix::fs::fstat(&descriptor).unwrap().st_blocks * 512 / 4096);
    assert_eq!(pages, [1, 1]);
}

#[test]
fn memory_that_a_lane_has_released_is_returned_to_the_system() {
    let (mut ends, descriptors) = pair_with_descriptors();
    let pages = || rustix::fs::fstat(&descriptors[0]).unwrap().st_blocks * 512 / 4096;
    let mut stream = Stream::default();
    let [from, to] = in_direction(&mut ends, 0);
    assert!(from.mine.is_releasable());
    stream.move_up(from, to);
    assert_eq!((stream.write(from, 100_000), stream.read(to, 100_000)), (100_000, 100_000));
    assert!(pages() > 20);
    assert_eq!(from.sender.release_memory(), MemoryRelease::Released);
    assert!(pages() <= 3);
    stream.move_down(from, to);
    stream.move_up(from, to);
    assert_eq!((stream.write(from, 100_000), stream.read(to, 50_000)), (100_000, 50_000));
    stream.freeze(from, to);
    from.sender.restart();
    assert!(pages() <= 3, "a restart releases the larger rings");
}

#[test]
fn memory_is_as_large_as_its_capacity_needs_and_other_sizes_are_refused() {
    const KIB: usize = 1 << 10;
    for (capacity_bytes, bytes) in [
        (0, 8 * KIB + 32 * KIB),
        (32 * KIB, 8 * KIB + 32 * KIB),
        (32 * KIB + 1, 8 * KIB + 96 * KIB),
        (256 * KIB, 8 * KIB + 480 * KIB),
        (CAPACITY_BYTES_MAX, 8 * KIB + (32 << 20) - 32 * KIB),
        (usize::MAX, 8 * KIB + (32 << 20) - 32 * KIB),
    ] {
        assert_eq!(bytes_for(capacity_bytes), bytes, "{capacity_bytes}");
    }
    let (_, descriptor) = EndMemory::create(256 * KIB).expect("memory");
    assert!(PeerMemory::open(&descriptor, 256 * KIB).is_ok());
    assert!(matches!(PeerMemory::open(&descriptor, 255 << 9), Err(ShmError::UnknownSize { .. })));
    let (other, _) = shm::create(12 * KIB).expect("a segment");
    assert!(matches!(PeerMemory::open(&other, CAPACITY_BYTES_MAX), Err(ShmError::UnknownSize { .. })));
}

#[test]
fn a_lane_fills_up_to_its_largest_ring_and_the_capacity_beyond_it_is_not_used() {
    for capacity_bytes in [32 << 10, 128 << 10, 1 << 20] {
        let [(a, for_b), (b, for_a)] = [(); 2].map(|()| EndMemory::create(capacity_bytes).expect("memory"));
        let [from_a, from_b] = [&for_b, &for_a].map(|fd| PeerMemory::open(fd, capacity_bytes).expect("acceptable"));
        let (mut a, mut b) = (End::new(a, from_b, SECRETS), End::new(b, from_a, [SECRETS[1], SECRETS[0]]));
        a.sender.set_capacity(usize::MAX / 2);
        let mut stream = Stream::default();
        while stream.write(&mut a, 16_000) > 0 {}
        let held_bytes = stream.unread.len();
        assert!(
            (capacity_bytes * 3 / 4..=2 * capacity_bytes).contains(&held_bytes),
            "{held_bytes} of {capacity_bytes}"
        );
        assert_eq!(a.sender.is_writable(), Ok(false));
        while stream.read(&mut b, 16_000) > 0 {}
        assert_eq!(a.sender.is_writable(), Ok(true));
        assert_eq!(stream.write(&mut a, 1), 1);
    }
}

#[test]
fn processes_that_share_the_own_state_share_the_end() {
    let [mut a, mut b] = pair();
    let mut stream = Stream::default();
    stream.move_up(&mut a, &mut b);
    for _ in 0..200 {
        stream.write(&mut a, 10);
        a.sender = sender(&a.mine, &a.peers, &a.own, SECRETS[0]);
        stream.read(&mut b, 7);
        b.receiver = receiver(&b.mine, &b.peers, &b.own, SECRETS[0]);
    }
    stream.move_down(&mut a, &mut b);
}

#[test]
fn what_an_end_polls_lies_in_the_lines_that_it_loads_anyway() {
    let line = |word: Word| word as usize / 64;
    assert_eq!(
        [Word::Down, Word::Ended, Word::EndsAt, Word::Withdrawn].map(line),
        [0; 4],
        "beside the end of the stream"
    );
    assert_eq!([Word::Ask, Word::Up, Word::UpAt, Word::Start].map(line), [1; 4]);
    assert_eq!([Word::Frozen, Word::FrozenHead, Word::FrozenPlace, Word::Closed].map(line), [3; 4], "beside the sleep");
}
