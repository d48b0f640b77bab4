//! A stream that moves to the lane and away from it, against an oracle. Each endpoint writes only its own memory.

use crate::oracle::ELASTIC;
use crate::windows::{self, SECRET};
use fabric::{MemoryInbound, MemoryOutbound};
use lane::{Consumer, Producer, SHORT_BYTES_MAX, ShortRead};
use std::collections::VecDeque;
use volmem::Region;

/// One step of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Write this number of bytes.
    Write(u16),
    /// Write this number of bytes with the short path, if they are short and there is room.
    WriteShort(u16),
    /// Read into a buffer of this number of bytes.
    Read(u16),
    /// Read a short record into a buffer of this number of bytes.
    ReadShort(u16),
    /// The sender sets whether it prefers waiting to using more memory.
    Patience(bool),
    /// The sender sets the capacity.
    SetCapacity(u16),
    /// The memory of larger rings is released if everything is read.
    Release,
    /// The part in the lane ends, the receiver reads up to the end, and the next part begins.
    Move {
        /// Bytes that the sender writes before the receiver has restarted the lane.
        early_bytes: u16,
    },
    /// The receiver freezes, the sender takes back what is unread, and the next part begins.
    Freeze,
    /// The sender is given a wrong cursor.
    ForgedFreeze {
        /// Slots to add to the receiver's position.
        slots: i8,
        /// Word with the ring and the offset in the record.
        place: u64,
    },
}

/// Runs the steps; panics if a byte differs from those of the oracle.
pub fn check(steps: &[Step]) {
    let mut history = History::new();
    for step in steps {
        history.step(*step);
    }
    history.move_away();
}

struct History {
    senders: Region,
    producer: Producer<MemoryOutbound, MemoryInbound>,
    consumer: Consumer<MemoryInbound, MemoryOutbound>,
    /// Bytes that are written and not read.
    unread: VecDeque<u8>,
    written_bytes: u64,
}

impl History {
    fn new() -> Self {
        let layout = ELASTIC;
        let (senders, receivers) = (windows::memory(&layout), windows::memory(&layout));
        let [outbound, back] = [&senders, &receivers].map(|memory| MemoryOutbound::new(memory.clone()));
        let [inbound, forward] = [&receivers, &senders].map(|memory| MemoryInbound::new(memory.clone()));
        Self {
            producer: Producer::new(outbound, inbound, layout, SECRET),
            consumer: Consumer::new(forward, back, layout, SECRET),
            senders,
            unread: VecDeque::new(),
            written_bytes: 0,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write(len_bytes) => self.write(len_bytes.into()),
            Step::WriteShort(len_bytes) => self.write_short(len_bytes.into()),
            Step::Read(len_bytes) => self.read(len_bytes.into()),
            Step::ReadShort(len_bytes) => self.read_short(len_bytes.into()),
            Step::Patience(prefers_waiting) => self.producer.set_prefers_waiting(prefers_waiting),
            Step::SetCapacity(bytes) => self.producer.set_capacity(bytes.into()),
            Step::Release => _ = self.producer.release_memory(),
            Step::Move { early_bytes } => {
                self.move_away();
                let start = self.producer.restart();
                self.write(early_bytes.into());
                self.consumer.restart(start).expect("an honest sender");
            }
            Step::Freeze => self.freeze(),
            Step::ForgedFreeze { slots, place } => self.forge_cursor(slots, place),
        }
        assert_eq!(self.consumer.unread_bytes(), Ok(self.unread.len()));
    }

    fn next_bytes(&self, len_bytes: usize) -> Vec<u8> {
        (0..len_bytes).map(|index| ((self.written_bytes + index as u64) * 7 / 5) as u8).collect()
    }

    fn written(&mut self, bytes: &[u8]) {
        self.unread.extend(bytes);
        self.written_bytes += bytes.len() as u64;
    }

    fn write(&mut self, len_bytes: usize) {
        let bytes = self.next_bytes(len_bytes);
        let written = self.producer.write(&bytes).expect("an honest receiver");
        self.written(&bytes[..written]);
    }

    fn write_short(&mut self, len_bytes: usize) {
        let bytes = self.next_bytes(len_bytes);
        if len_bytes > SHORT_BYTES_MAX {
            return;
        }
        // SAFETY: a vector is readable for its length, and the lane has its own memory.
        if unsafe { self.producer.write_short_from(bytes.as_ptr(), len_bytes, false) } {
            self.written(&bytes);
        }
    }

    fn read(&mut self, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        let read_bytes = self.consumer.read(&mut bytes).expect("an honest sender");
        assert_eq!(read_bytes, len_bytes.min(self.unread.len()));
        self.has_read(&bytes[..read_bytes]);
    }

    fn read_short(&mut self, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: a vector is writable for its length, and the lane has its own memory.
        match unsafe { self.consumer.read_short_to(bytes.as_mut_ptr(), len_bytes) } {
            ShortRead::Read(read_bytes) => self.has_read(&bytes[..read_bytes]),
            ShortRead::Empty => assert!(self.unread.is_empty(), "a record was not found"),
            ShortRead::UseReadTo => {}
        }
    }

    fn has_read(&mut self, bytes: &[u8]) {
        assert!(self.unread.drain(..bytes.len()).eq(bytes.iter().copied()), "other bytes than those written");
    }

    /// The sender ends the part, and the receiver reads all of it.
    fn move_away(&mut self) {
        let end = self.producer.end_move();
        while !self.consumer.has_reached(end).expect("an honest sender") {
            assert!(!self.unread.is_empty(), "the end is not reached although everything is read");
            self.read(777);
        }
        assert!(self.unread.is_empty(), "the end is reached although something is unread");
        assert!(self.producer.is_drained());
    }

    fn freeze(&mut self) {
        let cursor = self.consumer.frozen_cursor();
        let mut unread = self.producer.unread_from(&self.senders, cursor).expect("an honest receiver");
        let mut bytes = vec![0; unread.len_bytes() + 1];
        let read_bytes = unread.read(&mut bytes);
        assert!(self.unread.drain(..).eq(bytes[..read_bytes].iter().copied()), "other bytes than those written");
        let start = self.producer.restart();
        self.consumer.restart(start).expect("an honest sender");
    }

    fn forge_cursor(&mut self, slots: i8, place: u64) {
        let [head, _] = self.consumer.frozen_cursor();
        let forged = [head.wrapping_add_signed(slots.into()), place];
        if let Ok(mut unread) = self.producer.unread_from(&self.senders, forged) {
            let mut bytes = vec![0; unread.len_bytes() + 1];
            assert_eq!(unread.read(&mut bytes), bytes.len() - 1);
        }
    }
}
