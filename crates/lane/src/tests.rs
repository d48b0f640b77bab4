//! First facts about a lane; the oracle, the hostile peer and the model check have files of their own.

use crate::{Consumer, Layout, Producer};
use fabric::{MemoryInbound, MemoryOutbound};
use volmem::Region;

type Pair = (Producer<MemoryOutbound, MemoryInbound>, Consumer<MemoryInbound, MemoryOutbound>);

fn pair(small_slots: u64, big_slots: u64) -> Pair {
    let layout = Layout::packed(small_slots, big_slots);
    let senders = Region::heap(layout.window_bytes());
    let receivers = Region::heap(layout.window_bytes());
    let producer =
        Producer::new(MemoryOutbound::new(receivers.clone()), MemoryInbound::new(senders.clone()), layout, 0x5EC7);
    let consumer = Consumer::new(MemoryInbound::new(receivers), MemoryOutbound::new(senders), layout, 0x5EC7);
    (producer, consumer)
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

#[test]
fn credit_is_returned_after_wrap() {
    let (mut producer, mut consumer) = pair(8, 16);
    let mut expected = 0_u8;
    let mut sent = 0_u8;
    for _ in 0..10_000 {
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
