//! Facts about moves of a stream to the lane and back.

use super::*;

/// A lane whose sender can read the memory in which it writes.
struct Moving {
    producer: Producer<MemoryOutbound, MemoryInbound>,
    consumer: Consumer<MemoryInbound, MemoryOutbound>,
    senders: Region,
    receivers: Region,
}

impl Moving {
    fn new() -> Self {
        let layout = ELASTIC;
        let memory = || Region::of_mapping(Arc::new(shm::create(layout.window_bytes()).unwrap().1));
        let (senders, receivers) = (memory(), memory());
        let producer =
            Producer::new(MemoryOutbound::new(senders.clone()), MemoryInbound::new(receivers.clone()), layout, SECRET);
        let consumer =
            Consumer::new(MemoryInbound::new(senders.clone()), MemoryOutbound::new(receivers.clone()), layout, SECRET);
        Self { producer, consumer, senders, receivers }
    }

    fn restart(&mut self) {
        let start = self.producer.restart();
        self.consumer.restart(start).unwrap();
    }

    /// Writes single bytes, which share records. Returns them.
    fn write_in_open_records(&mut self) -> Vec<u8> {
        self.producer.set_capacity(8 << 20);
        self.restart();
        let sent: Vec<u8> = (0..6000_u32).map(|index| index as u8).collect();
        for byte in &sent {
            assert_eq!(self.producer.write(&[*byte]), Ok(1));
        }
        assert!(self.producer.position() < 6000, "no record was shared");
        sent
    }

    fn unread(&mut self) -> Result<Vec<u8>, Corrupt> {
        let cursor = self.consumer.frozen_cursor();
        let mut unread = self.producer.unread_from(&self.senders, cursor)?;
        let mut bytes = vec![0; unread.len_bytes()];
        assert_eq!(unread.read(&mut bytes), bytes.len());
        assert_eq!((unread.len_bytes(), unread.read(&mut [0; 8])), (0, 0));
        Ok(bytes)
    }
}

#[test]
fn a_part_of_a_stream_ends_at_the_position_of_its_sender() {
    let mut lane = Moving::new();
    for round in 0..10_u8 {
        lane.restart();
        assert_eq!(lane.producer.write(&[round; 100]), Ok(100));
        assert_eq!(lane.producer.write(&[round; 7]), Ok(7));
        let end = lane.producer.end_move();
        assert_eq!(lane.consumer.has_reached(end), Ok(false));
        assert_eq!(lane.consumer.read(&mut [0; 50]), Ok(50));
        assert_eq!(lane.consumer.has_reached(end), Ok(false));
        read_all(&mut lane.consumer, &[round; 57]);
        assert_eq!(lane.consumer.has_reached(end), Ok(true));
        assert!(lane.producer.is_drained());
    }
}

#[test]
fn an_end_that_no_record_reaches_or_that_records_follow_is_an_error() {
    let mut lane = Moving::new();
    lane.restart();
    assert_eq!(lane.producer.write(b"part"), Ok(4));
    let end = lane.producer.end_move();
    let wrong = |position| Err(Corrupt { what: "end of a move", value: position });
    assert_eq!(lane.consumer.has_reached(end - 1), wrong(end - 1));
    read_all(&mut lane.consumer, b"part");
    for position in [end + 1, end - 1, 0, u64::MAX] {
        assert_eq!(lane.consumer.has_reached(position), wrong(position));
    }
}

#[test]
fn a_restart_leads_both_endpoints_out_of_a_larger_ring() {
    let mut lane = Moving::new();
    let long: Vec<u8> = (0..100_000_u32).map(|index| (index / 7) as u8).collect();
    for _ in 0..3 {
        lane.restart();
        assert_eq!(lane.producer.write(&long), Ok(long.len()));
        read_all(&mut lane.consumer, &long);
    }
    // A receiver that has not restarted yet does not keep the sender from writing.
    let start = lane.producer.restart();
    assert!(lane.producer.is_drained());
    assert_eq!(lane.producer.write(b"early"), Ok(5));
    assert_eq!((lane.producer.unread_slots(), lane.producer.is_drained()), (Ok(1), false));
    lane.consumer.restart(start).unwrap();
    read_all(&mut lane.consumer, b"early");
    assert!(lane.producer.is_drained());
}

#[test]
fn positions_at_which_a_lane_restarts_only_grow() {
    let mut lane = Moving::new();
    let first = lane.producer.restart();
    lane.consumer.restart(first).unwrap();
    for position in [0, first, first + 1, first + 64, first.wrapping_sub(128), u64::MAX] {
        let wrong = Corrupt { what: "start of a move", value: position };
        assert_eq!(lane.consumer.restart(position), Err(wrong));
    }
    assert_eq!(lane.consumer.restart(first + 128), Ok(()));
}

#[test]
fn a_sender_takes_back_what_its_receiver_has_not_read() {
    let mut lane = Moving::new();
    let mut sent: Vec<u8> = Vec::new();
    lane.restart();
    for len_bytes in [1, 100, 20_000, 5, 3000] {
        let bytes: Vec<u8> = (0..len_bytes).map(|index| (index + sent.len()) as u8).collect();
        assert_eq!(lane.producer.write(&bytes), Ok(bytes.len()));
        sent.extend(bytes);
    }
    let mut read = vec![0; 101 + 30];
    assert_eq!(lane.consumer.read(&mut read), Ok(131));
    assert_eq!(lane.unread(), Ok(sent[131..].to_vec()));
    lane.restart();
    assert_eq!(lane.unread(), Ok(Vec::new()));
    assert_eq!(lane.producer.write(b"next"), Ok(4));
    read_all(&mut lane.consumer, b"next");
}

#[test]
fn an_open_record_is_taken_back_from_where_it_was_read() {
    let mut lane = Moving::new();
    let sent = lane.write_in_open_records();
    let mut bytes = vec![0; 5990];
    assert_eq!(lane.consumer.read(&mut bytes), Ok(5990));
    assert_eq!(lane.unread(), Ok(sent[5990..].to_vec()));
    // All of the open record is read, but the receiver has not seen that it is closed.
    assert_eq!(lane.consumer.read(&mut bytes), Ok(10));
    assert_eq!(lane.unread(), Ok(Vec::new()));
}

#[test]
fn a_cursor_that_is_no_record_of_the_sender_is_an_error() {
    let mut lane = Moving::new();
    lane.restart();
    assert_eq!(lane.producer.write(&[1; 500]), Ok(500));
    assert_eq!(lane.consumer.read(&mut [0; 500]), Ok(500));
    assert_eq!(lane.producer.unread_slots(), Ok(0), "the credit is seen");
    assert_eq!(lane.producer.write(&[2; 500]), Ok(500));
    assert_eq!(lane.producer.write(&[3; 500]), Ok(500));
    let [head, place] = lane.consumer.frozen_cursor();
    let end = lane.producer.position();
    for cursor in [
        [head + 1, place],
        [head - 1, place],
        [end + 1, place],
        [0, place],
        [u64::MAX, place],
        [head, 1],
        [head, 11],
        [head, 255],
        [head, 501 << 8],
        [head, u64::MAX << 8],
        [end, 1 << 8],
        [end, 1],
    ] {
        let wrong = Corrupt { what: "frozen cursor", value: cursor[0] };
        assert_eq!(lane.producer.unread_from(&lane.senders, cursor).map(|_| ()), Err(wrong), "{cursor:x?}");
    }
    assert_eq!(lane.producer.unread_from(&lane.senders, [head, 499 << 8]).unwrap().len_bytes(), 501);
    assert_eq!(lane.producer.unread_from(&lane.senders, [head, 500 << 8]).unwrap().len_bytes(), 500);
    assert_eq!(lane.producer.unread_from(&lane.senders, [end, 0]).unwrap().len_bytes(), 0);
}

/// Returns what the sender takes back without the receiver's help.
fn uncredited(lane: &mut Moving) -> Vec<u8> {
    let cursor = lane.producer.credited_cursor(&lane.senders).unwrap();
    let mut unread = lane.producer.unread_from(&lane.senders, cursor).unwrap();
    let mut bytes = vec![0; unread.len_bytes()];
    unread.read(&mut bytes);
    bytes
}

#[test]
fn a_sender_takes_back_all_records_that_are_not_credited() {
    let mut lane = Moving::new();
    lane.producer.set_capacity(8 << 20);
    // Not entered by the receiver.
    let start = lane.producer.restart();
    assert_eq!(lane.producer.write(b"early"), Ok(5));
    assert_eq!(uncredited(&mut lane), b"early");
    assert!(!lane.producer.has_restarted());
    lane.consumer.restart(start).unwrap();
    assert!(lane.producer.has_restarted());
    read_all(&mut lane.consumer, b"early");
    assert_eq!(uncredited(&mut lane), b"");
    // Through several rings, all unread, then read in pieces.
    let sent: Vec<u8> = (0..400_000_u32).map(|index| (index * 7 / 5) as u8).collect();
    let mut written = 0;
    for len_bytes in [100, 9000, 60_000, 330_900] {
        assert_eq!(lane.producer.write(&sent[written..written + len_bytes]), Ok(len_bytes));
        written += len_bytes;
        assert_eq!(uncredited(&mut lane), sent[..written]);
    }
    let mut read = 0;
    while read < sent.len() {
        read += lane.consumer.read(&mut [0; 7777]).unwrap();
        let rest = uncredited(&mut lane);
        let repeated = rest.len() - (sent.len() - read);
        assert!(sent.ends_with(&rest) && repeated <= RECORD_BYTES_MAX, "{repeated} of {read} bytes again");
    }
    assert_eq!(uncredited(&mut lane), b"");
}

#[test]
fn a_record_that_was_read_while_it_was_open_is_not_taken_back() {
    let mut lane = Moving::new();
    let sent = lane.write_in_open_records();
    read_all(&mut lane.consumer, &sent);
    assert_eq!(uncredited(&mut lane), b"");
}

#[test]
fn impossible_credit_is_an_error() {
    let mut lane = Moving::new();
    lane.restart();
    assert_eq!(lane.producer.write(&[1; 500]), Ok(500));
    let credit = ELASTIC.credit();
    let receivers = lane.receivers.clone();
    for forged in [1, lane.producer.position() - 1, lane.producer.position() + 1, u64::MAX] {
        receivers.store_u64(credit, forged, Ordering::Release);
        let result = lane.producer.credited_cursor(&lane.senders);
        // Credit of before the restart counts as that of its beginning.
        assert_eq!(result.is_err(), forged != 1, "{forged}");
    }
}
