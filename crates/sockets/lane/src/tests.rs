//! Basic facts about a lane. The oracle, the hostile peer and the model check have their own files in the crate's
//! folder `tests`.

mod elastic;
mod moves;

use crate::layout::Ring;
use crate::record::{Record, slots_of, tag};
use crate::{
    Budget, Consumer, Corrupt, ELASTIC_RINGS, INLINE_BYTES, LargerRings, Layout, MemoryRelease, Producer,
    RECORD_BYTES_MAX, SHORT_BYTES_MAX, SLOT_BYTES, ShortRead,
};
use fabric::{Inbound, MemoryInbound, MemoryOutbound, shm};
use std::cell::Cell;
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::{Arc, Ordering};

const SECRET: u64 = 0x5EC7;

/// An elastic lane at the start of both windows, whose small ring skips positions.
const ELASTIC: Layout = {
    let packed = Layout::packed(128, 0);
    let rings = LargerRings::in_a_row(packed.big_offset, ELASTIC_RINGS as u8);
    Layout { small_slots_used: 115, elastic: Some(rings), ..packed }
};

pub(crate) type Pair = (Producer<MemoryOutbound, MemoryInbound>, Consumer<MemoryInbound, MemoryOutbound>);

pub(crate) fn pair(small_slots: u64, big_slots: u64) -> Pair {
    let layout = Layout::packed(small_slots, big_slots);
    pair_in(layout, &Region::heap(layout.window_bytes()), &Region::heap(layout.window_bytes()))
}

/// Offset of the sender's own state in its memory, behind the blocks of a packed layout.
const SENDER_STATE_OFFSET: usize = Layout::FORWARD_BYTES + Layout::BACK_BYTES;
/// Offset of the receiver's own state in its memory.
const RECEIVER_STATE_OFFSET: usize = SENDER_STATE_OFFSET + Layout::PRODUCER_STATE_BYTES;

fn sender_state(memory: &Region) -> Region {
    memory.sub(SENDER_STATE_OFFSET, Layout::PRODUCER_STATE_BYTES)
}

fn receiver_state(memory: &Region) -> Region {
    memory.sub(RECEIVER_STATE_OFFSET, Layout::CONSUMER_STATE_BYTES)
}

/// Returns a lane in given memory, which also holds the own state of the endpoints, for a test that acts as the peer
/// and stores to the memory itself.
fn pair_in(layout: Layout, senders: &Region, receivers: &Region) -> Pair {
    let outbound = |region: &Region| MemoryOutbound::new(region.clone());
    let inbound = |region: &Region| MemoryInbound::new(region.clone());
    let (sender_state, receiver_state) = (sender_state(senders), receiver_state(receivers));
    let producer = Producer::with_state(outbound(receivers), inbound(senders), sender_state, layout, SECRET);
    (producer, Consumer::with_state(inbound(receivers), outbound(senders), receiver_state, layout, SECRET))
}

#[test]
fn miri_what_is_written_is_read() {
    let (mut producer, mut consumer) = pair(8, 0);
    assert_eq!(producer.write(b"hello, lane"), Ok(11));
    let mut bytes = [0; 32];
    assert_eq!(consumer.read(&mut bytes), Ok(11));
    assert_eq!(&bytes[..11], b"hello, lane");
    assert_eq!(consumer.read(&mut bytes), Ok(0));
}

#[test]
fn miri_a_long_write_moves_to_the_big_ring_in_order() {
    let (mut producer, mut consumer) = pair(8, 64);
    let long: Vec<u8> = (0..1000_u32).map(|index| index as u8).collect();
    assert_eq!(producer.write(b"short"), Ok(5));
    assert_eq!(producer.write(&long), Ok(1000));
    let mut bytes = vec![0; 2000];
    assert_eq!(consumer.read(&mut bytes), Ok(1005));
    assert_eq!(&bytes[..5], b"short");
    assert_eq!(&bytes[5..1005], &long[..]);
}

fn write_short(producer: &mut Producer<MemoryOutbound, MemoryInbound>, bytes: &[u8]) -> bool {
    // SAFETY: a slice is readable for its length, and the windows have their own memory.
    unsafe { producer.write_short_from(bytes.as_ptr(), bytes.len(), false) }
}

fn read_short(consumer: &mut Consumer<MemoryInbound, MemoryOutbound>, bytes: &mut [u8]) -> ShortRead {
    // SAFETY: a mutable slice is writable for its length, and the windows have their own memory.
    unsafe { consumer.read_short_to(bytes.as_mut_ptr(), bytes.len()) }
}

#[test]
fn miri_what_fits_one_slot_goes_and_comes_as_one_lap_after_lap() {
    let (mut producer, mut consumer) = pair(8, 0);
    let mut bytes = [0; 64];
    // The first send loads the credit, and finds enough room for the next ones.
    assert_eq!(producer.write(b"first"), Ok(5));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(5));
    for len_bytes in (1..=INLINE_BYTES).chain(1..=INLINE_BYTES) {
        let message: Vec<u8> = (len_bytes as u8..).take(len_bytes).collect();
        assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Empty);
        if !write_short(&mut producer, &message) {
            assert_eq!(producer.write(&message), Ok(len_bytes));
        }
        assert_eq!(read_short(&mut consumer, &mut bytes[..len_bytes]), ShortRead::Read(len_bytes));
        assert_eq!(bytes[..len_bytes], message);
    }
    assert!(producer.is_drained());
}

#[test]
fn miri_a_message_of_two_slots_goes_and_comes_as_one() {
    let (mut producer, mut consumer) = pair(8, 0);
    let mut bytes = [0; 50];
    assert_eq!(producer.write(&[1]), Ok(1));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(1));
    let message: Vec<u8> = (7..).take(INLINE_BYTES + 1).collect();
    assert!(write_short(&mut producer, &message));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(INLINE_BYTES + 1));
    assert_eq!(bytes[..=INLINE_BYTES], message);
}

#[test]
fn what_takes_several_slots_goes_and_comes_as_one_lap_after_lap() {
    let (mut producer, mut consumer) = pair(16, 0);
    let mut bytes = [0; 512];
    // The first send loads the credit.
    assert_eq!(producer.write(b"first"), Ok(5));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(5));
    let mut at_once = 0;
    for len_bytes in [49, 112, 113, 250, 496, 64].into_iter().cycle().take(60) {
        let message: Vec<u8> = (len_bytes as u8..=u8::MAX).cycle().take(len_bytes).collect();
        assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Empty);
        let is_at_once = write_short(&mut producer, &message);
        if !is_at_once {
            // No room is known, or it is not contiguous.
            assert_eq!(producer.write(&message), Ok(len_bytes));
            assert_eq!(consumer.read(&mut bytes[..len_bytes]), Ok(len_bytes));
        } else {
            assert_eq!(read_short(&mut consumer, &mut bytes[..len_bytes]), ShortRead::Read(len_bytes));
        }
        at_once += u32::from(is_at_once);
        assert_eq!(bytes[..len_bytes], message);
    }
    assert!(at_once > 10, "{at_once} of 60 as one");
    assert!(producer.is_drained());
}

#[test]
fn what_is_not_short_is_left_to_the_other_calls() {
    let (mut producer, mut consumer) = pair(256, 512);
    let mut bytes = [0; 2 * SHORT_BYTES_MAX];
    assert!(!write_short(&mut producer, b"room is not known yet"));
    assert_eq!(producer.write(&[1; SHORT_BYTES_MAX + 1]), Ok(SHORT_BYTES_MAX + 1));
    assert!(!write_short(&mut producer, &[]));
    assert!(!write_short(&mut producer, &[2; SHORT_BYTES_MAX + 1]));
    // Longer than a short message; partly read; longer than the buffer.
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::UseReadTo);
    assert_eq!(consumer.read(&mut bytes[..40]), Ok(40));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::UseReadTo);
    assert_eq!(consumer.read(&mut bytes), Ok(SHORT_BYTES_MAX - 39));
    for len_bytes in [48, SHORT_BYTES_MAX] {
        assert!(write_short(&mut producer, &bytes[..len_bytes]), "{len_bytes} bytes");
        assert_eq!(read_short(&mut consumer, &mut bytes[..len_bytes - 1]), ShortRead::UseReadTo);
        assert_eq!(read_short(&mut consumer, &mut bytes[..len_bytes]), ShortRead::Read(len_bytes));
    }
}

#[test]
fn what_does_not_fit_before_the_end_of_the_ring_is_not_sent_as_one() {
    let (mut producer, mut consumer) = pair(8, 0);
    let mut bytes = [0; 512];
    assert_eq!(producer.write(&[1; 48]), Ok(48));
    for _ in 0..4 {
        assert!(write_short(&mut producer, &[1; 48]));
    }
    assert_eq!(consumer.read(&mut bytes), Ok(5 * 48));
    assert!(!write_short(&mut producer, &[2; 240]), "three slots are left before the end, and four are needed");
    assert_eq!(producer.write(&[2; 240]), Ok(240));
    assert_eq!(consumer.read(&mut bytes), Ok(240));
    assert_eq!(bytes[..240], [2; 240]);
}

#[test]
fn a_short_read_is_refused_if_the_next_record_would_fit_too() {
    let (mut producer, mut consumer) = pair(8, 0);
    let mut bytes = [0; 64];
    assert_eq!(producer.write(b"one"), Ok(3));
    assert_eq!(producer.write(b"two"), Ok(3));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::UseReadTo);
    assert_eq!(read_short(&mut consumer, &mut bytes[..3]), ShortRead::Read(3));
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(3));
    assert_eq!(&bytes[..3], b"two");
}

#[test]
fn a_receiver_of_slots_wakes_the_sender_where_it_crosses_a_quarter() {
    let (mut producer, mut consumer) = pair(8, 0);
    let mut bytes = [0; 8];
    while producer.write(&[7; 8]) == Ok(8) {}
    producer.announce_sleep();
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(8));
    assert!(!consumer.take_wake_request());
    assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::Read(8));
    assert!(consumer.take_wake_request());
}

#[test]
fn credit_is_returned_after_wrap() {
    let (mut producer, mut consumer) = pair(8, 16);
    let mut expected = 0_u8;
    let mut sent = 0_u8;
    let rounds = if cfg!(miri) { 10 } else { 10_000 };
    for _ in 0..rounds {
        while producer.write(&[sent; 40]) == Ok(40) {
            sent = sent.wrapping_add(1);
        }
        let mut bytes = [0; 40];
        while consumer.read(&mut bytes) == Ok(40) {
            assert_eq!(bytes, [expected; 40]);
            expected = expected.wrapping_add(1);
        }
        assert_eq!(sent, expected);
    }
}

#[test]
fn miri_slots_are_unread_until_their_credit_is_back() {
    let (mut producer, mut consumer) = pair(8, 0);
    producer.write(&[1; 100]).unwrap();
    producer.write(&[2]).unwrap();
    assert_eq!(producer.unread_slots(), Ok(3));
    consumer.read(&mut [0; 100]).unwrap();
    assert_eq!(producer.unread_slots(), Ok(1));
    consumer.read(&mut [0; 1]).unwrap();
    assert_eq!(producer.unread_slots(), Ok(0));
}

#[test]
fn miri_the_end_comes_after_the_last_byte() {
    let (mut producer, mut consumer) = pair(8, 0);
    producer.write(b"bye").unwrap();
    producer.finish();
    assert!(!consumer.is_finished());
    let mut bytes = [0; 8];
    assert_eq!(consumer.read(&mut bytes), Ok(3));
    assert!(consumer.is_finished());
    assert!(producer.is_drained());
}

/// Plain stores and loads in place: Miri would report a data race if a slot were passed on without order in either
/// direction.
#[test]
fn miri_two_threads_in_place_do_not_race() {
    const MESSAGES: u8 = 40;
    let (mut producer, mut consumer) = pair(8, 16);
    let sender = std::thread::spawn(move || {
        for number in 0..MESSAGES {
            let reservation = loop {
                match producer.reserve(usize::from(number) * 3 + 1).unwrap() {
                    Some(reservation) => break reservation,
                    None => std::thread::yield_now(),
                }
            };
            // SAFETY: the reservation is writable for this length, and no other thread uses it until the commit.
            unsafe { reservation.pointer.as_ptr().write_bytes(number, reservation.len_bytes) };
            producer.commit(reservation.len_bytes).unwrap();
        }
        producer.finish();
    });
    let mut last = 0;
    while !consumer.is_finished() {
        let Some(chunk) = consumer.peek().unwrap() else {
            std::thread::yield_now();
            continue;
        };
        // SAFETY: the chunk is readable for its length, and the sender does not write it until it is consumed.
        let bytes = unsafe { std::slice::from_raw_parts(consumer.pointer(chunk).as_ptr(), chunk.len_bytes) };
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        assert!(bytes[0] == last || bytes[0] == last + 1);
        last = bytes[0];
        consumer.consume(chunk.len_bytes).unwrap();
    }
    assert_eq!(last, MESSAGES - 1);
    sender.join().unwrap();
}

#[test]
fn miri_a_sender_sleeps_only_for_room_that_comes_with_a_wake_up() {
    let (mut producer, mut consumer) = pair(64, 0);
    let mut byte = [0];
    // The first record lies one slot after a quarter's start, so that a quarter is free before the next one is crossed.
    for _ in 0..17 {
        producer.write(&[1]).unwrap();
        consumer.read(&mut byte).unwrap();
    }
    consumer.take_wake_request();
    while producer.write(&[1]) == Ok(1) {}
    producer.announce_sleep();
    for _ in 0..64 {
        assert_eq!(producer.is_writable(), Ok(false));
        consumer.read(&mut byte).unwrap();
        if consumer.take_wake_request() && producer.is_writable() == Ok(true) {
            return;
        }
        producer.announce_sleep();
    }
    panic!("the receiver has read everything without a wake-up");
}

#[test]
fn miri_a_move_to_the_big_ring_without_bytes_does_not_happen() {
    let (mut producer, mut consumer) = pair(8, 16);
    assert!(producer.reserve(RECORD_BYTES_MAX).unwrap().is_some());
    assert_eq!(producer.commit(0), Ok(()));
    assert!(producer.is_drained(), "a close now would leave something unread");
    // The small ring has the same room as before, and the lane can still move to the big one.
    for round in 0..20 {
        assert!(producer.reserve(RECORD_BYTES_MAX).unwrap().is_some());
        assert_eq!(producer.write(&[round]), Ok(1));
        assert_eq!(consumer.read(&mut [0; 8]), Ok(1));
    }
    assert_eq!(producer.write(&[7; 500]), Ok(500));
    let mut bytes = [0; 600];
    assert_eq!(consumer.read(&mut bytes), Ok(500));
    assert!(bytes[..500].iter().all(|byte| *byte == 7));
    producer.finish();
    assert_eq!(consumer.read(&mut [0; 8]), Ok(0));
    assert!(consumer.is_finished());
    assert!(producer.is_drained());
}

#[test]
fn miri_short_messages_fill_the_small_ring_no_further_after_a_reservation_in_the_big_one() {
    let (mut producer, mut consumer) = pair(8, 64);
    assert!(producer.reserve(RECORD_BYTES_MAX).unwrap().is_some());
    let mut sent = Vec::new();
    while producer.write(&[sent.len() as u8]) == Ok(1) {
        sent.push(sent.len() as u8);
    }
    assert!((64..72).contains(&sent.len()), "{} records in 8 and 64 slots", sent.len());
    let mut bytes = [0; 100];
    assert_eq!(consumer.read(&mut bytes), Ok(sent.len()));
    assert_eq!(bytes[..sent.len()], sent, "a record was overwritten");
}

#[test]
fn miri_a_move_to_the_big_ring_is_not_readable_until_bytes_follow() {
    let (mut producer, mut consumer) = pair(8, 64);
    assert!(producer.reserve(1000).unwrap().is_some());
    assert!(!consumer.may_have_data(), "a reader would find no byte");
    assert_eq!(producer.commit(1000), Ok(()));
    assert!(consumer.may_have_data());
    assert_eq!(consumer.read(&mut [0; 2000]), Ok(1000));
    assert!(!consumer.may_have_data());
}

#[test]
fn miri_a_reservation_has_the_size_of_a_record_whatever_is_asked() {
    let (mut producer, _consumer) = pair(8, 1024);
    let reservation = producer.reserve(usize::MAX).unwrap().expect("an empty ring");
    assert_eq!(reservation.len_bytes, RECORD_BYTES_MAX);
}

#[test]
fn a_commit_after_something_else_was_written_is_refused() {
    let (mut producer, consumer) = pair(8, 0);
    assert!(producer.reserve(8).unwrap().is_some());
    assert_eq!(producer.write(b"first"), Ok(5));
    assert_eq!(producer.commit(8), Err(Corrupt { what: "write cursor", value: 1 }));
    assert_eq!(consumer.unread_bytes(), Ok(5));
}

#[test]
#[should_panic(expected = "was not reserved")]
fn a_commit_without_a_reservation_is_a_bug() {
    let _ = pair(8, 0).0.commit(1);
}

#[test]
#[should_panic(expected = "that were peeked")]
fn consuming_what_was_not_peeked_is_a_bug() {
    let (mut producer, mut consumer) = pair(8, 0);
    producer.write(b"ab").unwrap();
    consumer.peek().unwrap();
    consumer.consume(1).unwrap();
    let _ = consumer.consume(2);
}

#[test]
fn an_end_that_is_not_where_the_bytes_end_is_corrupt() {
    let layout = Layout::packed(8, 0);
    let receivers = Region::heap(layout.window_bytes());
    let (mut producer, mut consumer) = pair_in(layout, &Region::heap(layout.window_bytes()), &receivers);
    producer.write(b"bytes").unwrap();
    for fin in [1, 3, u64::MAX] {
        receivers.store_u64(layout.fin(), fin, Ordering::Release);
        assert_eq!(consumer.read(&mut [0; 5]).unwrap_or(0) % 5, 0);
        let corrupt = Corrupt { what: "end of stream", value: fin };
        assert_eq!(consumer.read(&mut [0; 5]), Err(corrupt));
        assert_eq!(consumer.peek().map(|_| ()), Err(corrupt));
    }
}

#[test]
fn valid_bytes_before_an_invalid_record_are_delivered_and_the_record_is_found_again() {
    let layout = Layout::packed(8, 0);
    let receivers = Region::heap(layout.window_bytes());
    let (mut producer, mut consumer) = pair_in(layout, &Region::heap(layout.window_bytes()), &receivers);
    producer.write(b"good").unwrap();
    producer.write(b"bad").unwrap();
    receivers.store_u64(layout.small_offset + 64 + 8, u64::MAX, Ordering::Relaxed);
    let mut bytes = [0; 16];
    assert_eq!(consumer.read(&mut bytes), Ok(4));
    for _ in 0..2 {
        assert_eq!(consumer.read(&mut bytes), Err(Corrupt { what: "record header", value: u64::MAX }));
    }
    assert!(producer.is_writable().is_ok());
}

#[test]
fn a_header_of_an_unknown_kind_or_with_a_bit_above_the_kind_is_corrupt() {
    const HEADERS: [u64; 8] = [
        5,
        1 | 4 << 16,
        5 | 1 << 16 | 1 << 20,
        5 | 1 << 16 | 1 << 63,
        60 | 1 << 16 | 1 << 32,
        5_000 | 1 << 16 | 1 << 20,
        1 | 2 << 16 | 1 << 20,
        5 | 3 << 16 | 1 << 40,
    ];
    let [senders, receivers] = [(), ()].map(|()| Region::heap(ELASTIC.window_bytes()));
    for header in HEADERS {
        let (_, mut consumer) = pair_in(ELASTIC, &senders, &receivers);
        receivers.store_u64(ELASTIC.small_offset + 8, header, Ordering::Relaxed);
        receivers.store_u64(ELASTIC.small_offset, tag(SECRET, 0), Ordering::Release);
        let corrupt = Corrupt { what: "record header", value: header };
        let mut bytes = vec![0; 6000];
        assert_eq!(read_short(&mut consumer, &mut bytes), ShortRead::UseReadTo);
        assert_eq!(consumer.read(&mut bytes), Err(corrupt));
        assert_eq!(consumer.peek().map(|_| ()), Err(corrupt));
        assert_eq!((consumer.unread_bytes(), consumer.arrivals(0)), (Err(corrupt), Err(corrupt)));
        // SAFETY: a vector is writable for its length, and the windows have their own memory.
        assert_eq!(unsafe { consumer.peek_to(0, bytes.as_mut_ptr(), bytes.len()) }, Err(corrupt));
    }
}

/// A window whose peer endlessly publishes a record wherever its reader polls next.
struct Endless {
    memory: Region,
    layout: Layout,
    position: Cell<u64>,
    loads_left: Cell<usize>,
}

impl Inbound for Endless {
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        let loads_left = self.loads_left.get().checked_sub(1).expect("the scan terminates");
        self.loads_left.set(loads_left);
        let position = self.position.get();
        match offset.checked_sub(self.layout.small_offset) {
            None => self.memory.load_u64(offset, order),
            Some(in_ring) if in_ring % 64 == 0 => tag(SECRET, position),
            Some(_) => {
                // Two slots, except for the ring's last record, so that no record ends exactly at the scan's limit.
                let payload_bytes = if position % 8 == 7 { 1 } else { 100 };
                self.position.set(position + slots_of(payload_bytes));
                Record::Data(payload_bytes).encode()
            }
        }
    }

    fn store_u64(&self, offset: usize, _value: u64, _order: Ordering) {
        panic!("a store to {offset} of the peer's memory");
    }

    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: `destination` is writable for `len_bytes` and outside the window, by the contract of the trait's
        // method, which is the same.
        unsafe { self.memory.read_to(offset, destination, len_bytes) };
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.memory.pointer(offset, len_bytes)
    }
}

#[test]
fn a_scan_ends_although_the_peer_publishes_endlessly() {
    let layout = Layout::packed(8, 0);
    let memory = Region::heap(layout.window_bytes());
    receiver_state(&memory).store_u64(0, 7, Ordering::Relaxed);
    let scan = |check: fn(&Consumer<Endless, MemoryOutbound>)| {
        let inbound = Endless { memory: memory.clone(), layout, position: 7.into(), loads_left: 1000.into() };
        let outbound = MemoryOutbound::new(Region::heap(layout.window_bytes()));
        check(&Consumer::with_state(inbound, outbound, receiver_state(&memory), layout, SECRET));
    };
    scan(|consumer| assert_eq!(consumer.unread_bytes(), Ok(401)));
    scan(|consumer| assert_eq!(consumer.arrivals(0), Ok(16 * SLOT_BYTES as u64)));
    scan(|consumer| {
        let mut byte = 0;
        // SAFETY: `byte` is one writable byte of this test's stack.
        assert_eq!(unsafe { consumer.peek_to(usize::MAX, &raw mut byte, 1) }, Ok(0));
    });
}

#[test]
#[should_panic(expected = "overlap")]
fn a_layout_whose_rings_overlap_is_a_bug() {
    let layout = Layout { big_offset: 512, ..Layout::packed(8, 16) };
    layout.check(1 << 20, 1 << 20);
}

#[test]
#[should_panic(expected = "in a window of")]
fn a_layout_that_only_overflowing_would_fit_is_a_bug() {
    let layout = Layout { big_slots: 1 << 58, ..Layout::packed(8, 0) };
    layout.check(1 << 20, 1 << 20);
}

#[test]
fn the_slots_of_a_lane_are_those_of_all_its_rings() {
    let with_rings = |count| Layout { elastic: Some(LargerRings::in_a_row(1 << 14, count)), ..ELASTIC };
    let elastic = (1..=ELASTIC_RINGS as u8).map(with_rings);
    for layout in elastic.chain([Layout::packed(8, 0), Layout::packed(8, 64)]) {
        let rings = (0..=layout.rings_larger()).map(|ring| Ring::of(&layout, ring as u8).slots);
        assert_eq!(layout.slots_total(), rings.sum(), "{layout:?}");
        layout.check(layout.window_bytes(), layout.window_bytes());
    }
}

fn elastic_pair() -> Pair {
    // Released memory must read as zero, and mapped memory need not be cleared: it has 64 MiB.
    let memory = || Region::of_mapping(Arc::new(shm::create(ELASTIC.window_bytes()).unwrap().1));
    pair_in(ELASTIC, &memory(), &memory())
}

#[test]
fn an_end_of_the_stream_behind_an_open_record_is_an_error() {
    let [senders, receivers] = [(), ()].map(|()| Region::heap(ELASTIC.window_bytes()));
    let (_, mut consumer) = pair_in(ELASTIC, &senders, &receivers);
    let slot = ELASTIC.small_offset;
    receivers.store_u64(slot + 8, Record::Open(5).encode(), Ordering::Relaxed);
    receivers.store_u64(slot, tag(SECRET, 0), Ordering::Release);
    assert_eq!(consumer.read(&mut [0; 16]), Ok(5));
    assert_eq!(consumer.read(&mut [0; 16]), Ok(0));
    for fin in [1, 2, 12_345] {
        receivers.store_u64(ELASTIC.fin(), fin, Ordering::Release);
        let end = Err(Corrupt { what: "end of stream", value: fin });
        assert_eq!(
            (consumer.read(&mut [0; 16]), consumer.peek().map(|chunk| chunk.is_some())),
            (end, end.map(|_| false))
        );
    }
}

/// Reads all unread bytes, and compares them with what was sent.
fn read_all(consumer: &mut Consumer<MemoryInbound, MemoryOutbound>, sent: &[u8]) {
    let mut bytes = vec![0; sent.len() + 1];
    assert_eq!(consumer.read(&mut bytes), Ok(sent.len()));
    assert!(bytes[..sent.len()] == *sent, "the bytes differ from those sent");
}
