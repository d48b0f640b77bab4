//! Facts about elastic lanes: their rings, capacity, budget and open records.

use super::*;
use volmem::sync::AtomicU64;

#[test]
fn a_ring_that_was_left_is_not_used_again_before_the_receiver_has_followed() {
    let (mut producer, mut consumer) = elastic_pair();
    let bulk: Vec<u8> = (0..12_000_u32).map(|index| index as u8).collect();
    assert_eq!(producer.write(&bulk), Ok(12_000));
    read_all(&mut consumer, &bulk);
    assert_eq!(producer.release_memory(), MemoryRelease::Released);
    // Returns to the small ring with a switch that is unread in the ring of 32 KiB, then sends more than that ring
    // holds.
    let mut sent = vec![9_u8; 7];
    assert_eq!(producer.write(&sent), Ok(7));
    for index in 0..100_u8 {
        let more = vec![index; 400];
        assert_eq!(producer.write(&more), Ok(400));
        sent.extend(more);
    }
    read_all(&mut consumer, &sent);
}

#[test]
fn a_lane_holds_its_capacity_for_all_sizes_of_writes() {
    for len_bytes in [1, 48, 100, 1000, 5000, 300_000] {
        let (mut producer, mut consumer) = elastic_pair();
        producer.set_capacity(500_000);
        let message = vec![7; len_bytes];
        let mut sent_bytes = 0;
        while let Ok(bytes @ 1..) = producer.write(&message) {
            sent_bytes += bytes;
        }
        assert!((470_000..=500_000).contains(&sent_bytes), "{sent_bytes} bytes by writes of {len_bytes}");
        assert_eq!(producer.is_writable(), Ok(false));
        read_all(&mut consumer, &vec![7; sent_bytes]);
        assert_eq!((producer.is_drained(), producer.is_writable()), (true, Ok(true)));
        assert_eq!(producer.release_memory(), MemoryRelease::Released);
        assert_eq!(producer.memory_bytes(), 0);
    }
}

#[test]
fn a_sender_that_prefers_waiting_stays_in_a_ring_suitable_for_its_writes() {
    for (len_bytes, ring_bytes) in [(64, 256 << 10), (4096, 256 << 10), (16_384, 4 << 20)] {
        let (mut producer, _consumer) = elastic_pair();
        producer.set_prefers_waiting(true);
        let mut sent_bytes = 0;
        while let Ok(bytes @ 1..) = producer.write(&vec![1; len_bytes]) {
            sent_bytes += bytes;
        }
        // The earlier rings hold bytes too, and each record has a header.
        assert!((ring_bytes / 2..2 * ring_bytes).contains(&sent_bytes), "{sent_bytes} bytes by {len_bytes}");
        assert_eq!((producer.is_ring_writable(), producer.is_writable()), (Ok(false), Ok(true)));
        producer.set_prefers_waiting(false);
        assert!(producer.write(&[2; 100_000]).unwrap() > 0, "now the lane grows");
    }
}

#[test]
fn a_sleeper_is_woken_once_there_is_the_room_it_announced_and_not_before() {
    let (mut producer, mut consumer) = elastic_pair();
    producer.set_capacity(300_000);
    let mut sent_bytes = 0;
    while let Ok(bytes @ 1..) = producer.write(&[3; 10_000]) {
        sent_bytes += bytes;
    }
    producer.announce_sleep();
    assert_eq!(producer.is_writable(), Ok(false));
    let mut read_bytes = 0;
    while !consumer.take_wake_request() {
        assert_eq!(producer.is_writable(), Ok(false), "room after {read_bytes} bytes, and no wake-up");
        read_bytes += consumer.read(&mut [0; 1000]).unwrap();
    }
    assert_eq!(producer.is_writable(), Ok(true), "woken for {read_bytes} bytes");
    assert!((sent_bytes / 8..sent_bytes / 3).contains(&read_bytes), "{read_bytes} of {sent_bytes}");
}

#[test]
fn writes_share_a_record_until_the_receiver_has_caught_up() {
    let (mut producer, mut consumer) = elastic_pair();
    producer.set_capacity(8192);
    let mut sent = Vec::new();
    for byte in 0..100 {
        assert_eq!(producer.write(&[byte]), Ok(1));
        sent.push(byte);
    }
    let slots = producer.unread_slots().unwrap();
    assert!(slots < 10, "{slots} slots for a hundred bytes");
    read_all(&mut consumer, &sent);
    assert!(!consumer.may_have_data());
    assert!(producer.is_drained(), "all of the open record is read");
    // Appended or not, the bytes are read in order.
    for byte in 100..103 {
        assert_eq!(producer.write(&[byte]), Ok(1));
        assert!(consumer.may_have_data());
        read_all(&mut consumer, &[byte]);
    }
    producer.finish();
    assert_eq!(consumer.read(&mut [0]), Ok(0));
    assert!(consumer.is_finished());
}

/// Returns a lane with an open record of which everything is read. The receiver polls for more only if it has a reason.
fn pair_with_open_record_read(larger_ring: bool) -> Pair {
    let (mut producer, mut consumer) = elastic_pair();
    producer.set_capacity(100_000);
    let first = vec![1; if larger_ring { 20_000 } else { 4_000 }];
    assert_eq!(producer.write(&first), Ok(first.len()));
    let position = producer.position();
    assert_eq!(producer.write(&[2]), Ok(1));
    assert_eq!(producer.position(), position, "the record is not open");
    read_all(&mut consumer, &[&first[..], &[2]].concat());
    (producer, consumer)
}

#[test]
fn a_lane_stays_drained_when_an_open_record_that_was_read_is_closed() {
    let (mut producer, mut consumer) = pair_with_open_record_read(false);
    assert!(producer.is_drained());
    producer.finish();
    assert!(producer.is_drained(), "the receiver has not polled since");
    assert_eq!(consumer.read(&mut [0]), Ok(0));
    assert!(producer.is_drained() && consumer.is_finished());
    let (mut producer, mut consumer) = pair_with_open_record_read(false);
    assert_eq!(producer.write(&[3]), Ok(1));
    assert!(!producer.is_drained(), "something follows");
    read_all(&mut consumer, &[3]);
    assert!(producer.is_drained());
}

#[test]
fn a_peek_sees_the_end_of_a_stream_behind_an_open_record() {
    let (mut producer, consumer) = pair_with_open_record_read(false);
    assert!(!consumer.is_finished());
    producer.finish();
    let mut byte = 0_u8;
    // SAFETY: `byte` is one writable byte of this test's stack.
    let seen = unsafe { consumer.peek_to(0, &raw mut byte, 1) };
    assert_eq!(seen, Ok(0));
    assert!(consumer.is_finished());
}

#[test]
fn memory_is_released_although_the_receiver_is_in_an_open_record() {
    for is_closed in [false, true] {
        let (mut producer, mut consumer) = pair_with_open_record_read(true);
        if is_closed {
            assert!(producer.reserve(1).unwrap().is_some(), "the reservation closes the open record, and is dropped");
        }
        let whole = producer.memory_bytes();
        assert!(whole > 0);
        assert_eq!(producer.release_memory(), MemoryRelease::Released);
        assert_eq!((producer.release_memory(), producer.memory_bytes()), (MemoryRelease::NothingUsed, 0));
        assert!(!consumer.may_have_data());
        for lap in 0..300_u16 {
            let bytes = [lap as u8; 100];
            assert_eq!(producer.write(&bytes), Ok(bytes.len()));
            read_all(&mut consumer, &bytes);
        }
        assert_eq!(producer.memory_bytes(), 0, "the lane continues in the small ring");
        assert_eq!(producer.release_memory(), MemoryRelease::Released, "the switch out of the larger ring used memory");
    }
}

/// Sends single bytes behind `lead` records that are read, until a record is open, and then until it has `open_bytes`
/// or is full. Returns the number of its bytes.
fn fill_open_record((producer, consumer): &mut Pair, lead: usize, open_bytes: usize) -> usize {
    for _ in 0..lead {
        assert_eq!(producer.write(&[0]), Ok(1));
        read_all(consumer, &[0]);
    }
    let mut position = producer.position();
    loop {
        assert_eq!(producer.write(&[0]), Ok(1));
        if std::mem::replace(&mut position, producer.position()) == producer.position() {
            break;
        }
    }
    let mut sent_bytes = 1;
    while sent_bytes < open_bytes && producer.write(&[0]) == Ok(1) && producer.position() == position {
        sent_bytes += 1;
    }
    sent_bytes
}

#[test]
fn a_record_that_was_read_while_it_was_open_does_not_keep_a_lane_from_being_writable() {
    for (capacity_bytes, has_budget) in [(1, true), (5_000, true), (7_000, true), (10_000, true), (100_000, false)] {
        for lead in [0, 1, 15, 27, 28, 29, 30, 31] {
            let make = || {
                let mut pair = elastic_pair();
                pair.0.set_capacity(capacity_bytes);
                pair.0.set_budget(Bytes::new(if has_budget { usize::MAX } else { 0 }));
                pair
            };
            let full_bytes = fill_open_record(&mut make(), lead, usize::MAX);
            let mut pair = make();
            assert_eq!(fill_open_record(&mut pair, lead, full_bytes), full_bytes);
            let (mut producer, mut consumer) = pair;
            let mut unread_bytes = consumer.unread_bytes().unwrap();
            while unread_bytes > 0 {
                unread_bytes -= consumer.read(&mut vec![0; unread_bytes]).unwrap(); // No call polls for more.
            }
            let _ = producer.reserve(1).unwrap(); // Closes the open record; nothing follows.
            assert_eq!(producer.is_writable(), Ok(true), "{capacity_bytes} bytes, {lead} records before");
        }
    }
}

#[test]
fn a_lane_does_not_grow_beyond_its_budget() {
    #[derive(Debug)]
    struct Nothing;
    impl Budget for Nothing {
        fn charge(&self, _bytes: usize) -> bool {
            false
        }
        fn has_room(&self, _bytes: usize) -> bool {
            false
        }
        fn release(&self, _bytes: usize) {
            unreachable!("nothing was charged");
        }
    }
    let (mut producer, mut consumer) = elastic_pair();
    producer.set_budget(&Nothing);
    let bytes = vec![5; 20_000];
    let sent = producer.write(&bytes).unwrap();
    assert!((7000..7400).contains(&sent), "{sent} bytes in the small ring");
    assert_eq!(producer.is_writable(), Ok(false), "the room is that of the ring");
    producer.announce_sleep();
    read_all(&mut consumer, &bytes[..sent]);
    assert!(consumer.take_wake_request());
    assert_eq!((producer.is_writable(), producer.memory_bytes()), (Ok(true), 0));
}

/// A budget of a number of bytes.
#[derive(Debug)]
struct Bytes(AtomicU64);

impl Bytes {
    fn new(bytes: usize) -> &'static Self {
        Box::leak(Box::new(Self(AtomicU64::new(bytes as u64))))
    }
}

impl Budget for Bytes {
    fn charge(&self, bytes: usize) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes as u64)).is_ok()
    }
    fn has_room(&self, bytes: usize) -> bool {
        self.0.load(Ordering::Relaxed) >= bytes as u64
    }
    fn release(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

const BUDGETS: [usize; 6] = [0, 32 << 10, 64 << 10, 100 << 10, 224 << 10, 700 << 10];
const WRITES: [usize; 4] = [1, 300, 5000, 100_000];

#[test]
fn a_lane_is_writable_exactly_if_a_write_finds_room_whatever_its_budget() {
    for (budget_bytes, len_bytes) in BUDGETS.into_iter().flat_map(|budget| WRITES.map(|len| (budget, len))) {
        let (mut producer, mut consumer) = elastic_pair();
        producer.set_budget(Bytes::new(budget_bytes));
        let message = vec![6; len_bytes];
        for round in 0..10 {
            let at = format!("round {round} with {budget_bytes} bytes by {len_bytes}");
            while producer.write(&message).unwrap() > 0 {}
            assert_eq!(producer.is_writable(), Ok(false), "{at}");
            producer.announce_sleep();
            assert_eq!(producer.is_writable(), Ok(false), "{at}");
            while !consumer.take_wake_request() {
                assert!(consumer.read(&mut [0; 1000]).unwrap() > 0, "all is read, and the sender sleeps: {at}");
            }
            assert_eq!(producer.is_writable(), Ok(true), "woken: {at}");
            assert!(producer.write(&message).unwrap() > 0, "{at}");
        }
    }
}

#[test]
fn a_lane_goes_on_without_the_memory_that_others_have_taken() {
    for (budget_bytes, len_bytes) in BUDGETS.into_iter().flat_map(|budget| WRITES.map(|len| (budget, len))) {
        let budget = Bytes::new(budget_bytes);
        let (mut producer, mut consumer) = elastic_pair();
        producer.set_budget(budget);
        let mut sent_bytes = 0;
        let mut others_bytes = 0;
        for round in 0..200_usize {
            // Others take all that is left, and return it.
            match round % 7 {
                3 => others_bytes += budget.0.swap(0, Ordering::Relaxed) as usize,
                6 => budget.release(std::mem::take(&mut others_bytes)),
                _ => {}
            }
            let is_writable = producer.is_writable().unwrap();
            let message: Vec<u8> = (0..len_bytes).map(|index| ((sent_bytes + index) % 251) as u8).collect();
            let written = producer.write(&message).unwrap();
            assert!(!is_writable || written > 0, "round {round} with {budget_bytes} bytes by {len_bytes}");
            let mut room = vec![0; (written + round % 5 * 100).min(150_000)];
            let read_bytes = consumer.read(&mut room).unwrap();
            let read_before = sent_bytes + written - consumer.unread_bytes().unwrap() - read_bytes;
            assert!(room[..read_bytes].iter().zip(read_before..).all(|(byte, place)| *byte == (place % 251) as u8));
            sent_bytes += written;
        }
        assert!(sent_bytes > 0 && producer.memory_bytes() <= budget_bytes);
    }
}
