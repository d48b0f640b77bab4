//! Facts about held records.

use super::*;

fn hold(producer: &mut Producer<MemoryOutbound, MemoryInbound>, now_ms: u32, bytes: &[u8]) {
    producer.begin_hold(now_ms);
    assert_eq!(producer.write(bytes), Ok(bytes.len()));
    producer.end_hold(true, 1000);
}

#[test]
fn held_records_become_visible_together_once_published() {
    let (mut producer, mut consumer) = elastic_pair();
    hold(&mut producer, 5, b"head");
    hold(&mut producer, 6, b"er,");
    assert!(!consumer.may_have_data());
    assert_eq!((consumer.unread_bytes(), consumer.held_since_ms()), (Ok(0), Some(5)));
    assert_eq!(producer.held_bytes(), 7);
    assert!(!write_short(&mut producer, b"body"), "the short path would leave the records held");
    assert_eq!(producer.write(b"body"), Ok(4));
    producer.end_hold(false, 1000);
    let mut bytes = [0; 32];
    assert_eq!(consumer.read(&mut bytes), Ok(11));
    assert_eq!(&bytes[..11], b"header,body");
    assert_eq!((consumer.held_since_ms(), producer.held_bytes()), (None, 0));
    assert!(!producer.publish_held());
}

#[test]
fn held_records_are_published_at_the_end_of_the_stream_or_from_a_number_of_bytes_on() {
    let (mut producer, consumer) = elastic_pair();
    hold(&mut producer, 5, &[1; 999]);
    assert_eq!(consumer.unread_bytes(), Ok(0));
    hold(&mut producer, 6, &[1]);
    assert_eq!(consumer.unread_bytes(), Ok(1000));
    hold(&mut producer, 7, &[1]);
    assert_eq!(consumer.unread_bytes(), Ok(1000));
    producer.finish();
    assert_eq!(consumer.unread_bytes(), Ok(1001));
}

#[test]
fn a_receiver_publishes_held_records_itself_and_the_sender_continues() {
    let (mut producer, mut consumer) = elastic_pair();
    let mut bytes = [0; 32];
    assert!(!consumer.publish_held());
    for round in 0..300_u32 {
        hold(&mut producer, round, b"left");
        assert_eq!(consumer.held_since_ms(), Some(round), "records that were read are not held any more");
        assert!(consumer.publish_held());
        assert_eq!(consumer.read(&mut bytes), Ok(4));
        assert!(!consumer.publish_held());
        if round % 3 == 0 {
            assert_eq!(producer.write(b"behind"), Ok(6));
            producer.end_hold(false, 1000);
            assert_eq!(consumer.read(&mut bytes), Ok(6));
        }
    }
}

#[test]
fn records_held_for_the_maximum_time_are_published_before_more_are_held() {
    let (mut producer, mut consumer) = elastic_pair();
    hold(&mut producer, u32::MAX, b"old");
    hold(&mut producer, crate::HELD_MS_MAX - 2, b"er");
    assert_eq!(consumer.unread_bytes(), Ok(0));
    hold(&mut producer, crate::HELD_MS_MAX - 1, b"new");
    read_all(&mut consumer, b"older");
    assert_eq!((consumer.unread_bytes(), consumer.held_since_ms()), (Ok(0), Some(crate::HELD_MS_MAX - 1)));
}

#[test]
fn held_records_stay_held_when_the_lane_moves_to_another_ring() {
    for moves_first in [true, false] {
        let (mut producer, mut consumer) = elastic_pair();
        let mut sent = vec![7; if moves_first { 0 } else { 100 }];
        if !moves_first {
            hold(&mut producer, 1, &sent);
        }
        producer.begin_hold(1);
        assert_eq!(producer.write(&[8; 20_000]), Ok(20_000));
        producer.end_hold(true, 100_000);
        sent.extend([8; 20_000]);
        assert_eq!((consumer.unread_bytes(), consumer.held_since_ms()), (Ok(0), Some(1)));
        assert!(if moves_first { producer.publish_held() } else { consumer.publish_held() });
        read_all(&mut consumer, &sent);
    }
}

#[test]
fn an_open_record_is_closed_before_something_is_held_behind_it() {
    let (mut producer, mut consumer) = elastic_pair();
    producer.set_capacity(8 << 20);
    let mut sent = Vec::new();
    for _ in 0..5000 {
        assert_eq!(producer.write(b"x"), Ok(1));
        sent.push(b'x');
    }
    assert!(producer.position() < 5000, "no record was shared");
    hold(&mut producer, 1, b"held");
    assert_eq!(consumer.unread_bytes(), Ok(sent.len()));
    assert!(producer.publish_held());
    sent.extend(b"held");
    read_all(&mut consumer, &sent);
}

#[test]
fn forged_words_of_held_records_cause_no_access_outside_the_lane() {
    let layout = Layout::packed_elastic(128, 115);
    let memory = || Region::of_mapping(Arc::new(shm::create(layout.window_bytes()).unwrap().1));
    let (senders, receivers) = (memory(), memory());
    for forged in [1, 4, u64::MAX, u64::MAX << 32 | 1, 0x00ff_ffff_ffff_ff05] {
        let (mut producer, mut consumer) = pair_in(layout, &senders, &receivers);
        hold(&mut producer, 1, b"held");
        for word in (0..WORDS_BYTES).step_by(8) {
            for memory in [&senders, &receivers] {
                memory.store_u64(word, forged, Ordering::Relaxed);
            }
        }
        producer.begin_hold(2);
        let _ = producer.write(b"more");
        producer.end_hold(true, 1000);
        producer.publish_held();
        let _ = (producer.held_bytes(), consumer.held_since_ms(), consumer.publish_held());
    }
}
