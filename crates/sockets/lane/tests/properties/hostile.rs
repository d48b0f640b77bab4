//! A hostile peer, which stores arbitrary values in every word of both windows, also between two loads of one call.
//!
//! Whatever it does, each call of its victim terminates, stays inside its parts of the windows (the test windows check
//! this), and returns bytes or [`lane::Corrupt`].

use crate::oracle::Shape;
use crate::windows::{
    self, ForgedLoad, GuardedOutbound, LyingInbound, RECEIVER_STATE_OFFSET, SECRET, SENDER_STATE_OFFSET,
};
use fabric::Coherence;
use lane::{Chunk, Consumer, ELASTIC_RINGS, ELASTIC_SLOTS_MIN, Layout, Producer, SHORT_BYTES_MAX, ShortRead};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// One step of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub enum Act {
    /// The peer stores to a word of the victim's window.
    Poke {
        /// Index of the word, modulo the words of the window.
        word: u16,
        /// The value to store.
        forged_load: ForgedLoad,
    },
    /// The peer copies slots of the victim's window over others, to cause replays and torn records.
    Replay {
        /// First word of the source.
        from: u16,
        /// First word of the destination.
        to: u16,
        /// Number of words.
        words: u8,
    },
    /// The peer publishes a record with an arbitrary header at the victim's read position.
    Publish(ForgedLoad),
    /// Values that the next loads of the victim return.
    Script(Vec<ForgedLoad>),
    /// The victim reads.
    Read(u16),
    /// The victim reads a short record.
    ReadShort(u16),
    /// The victim peeks.
    PeekTo {
        /// Bytes skipped first.
        skip_bytes: u16,
        /// Bytes of the buffer.
        len_bytes: u16,
    },
    /// The victim reads in place.
    Peek,
    /// The victim consumes a part of its last peek.
    Consume(u16),
    /// The victim calls every query.
    Ask,
    /// The victim writes.
    Write(u16),
    /// The victim writes a short message.
    WriteShort(u16),
    /// The victim writes in place.
    Reserve(u16),
    /// The victim commits a part of its reservation.
    Commit(u16),
    /// The victim stages a record.
    Stage(u16),
    /// The victim publishes the staged records.
    PublishStaged,
    /// The victim finishes.
    Finish,
    /// The victim announces sleep at both endpoints.
    Sleep,
}

/// Runs a victim with one lane in each direction against a hostile peer.
pub fn check(shape: Shape, coherence: Coherence, acts: &[Act]) {
    let is_coherent = coherence == Coherence::Coherent;
    let layout = if is_coherent { shape.layout() } else { shape.fixed_layout() };
    for has_private_state in [false, true] {
        let mut victim = Victim::new(layout, coherence, has_private_state);
        for act in acts {
            victim.step(act);
            victim.reveal_position();
        }
    }
}

struct Victim {
    layout: Layout,
    own: Region,
    receiver_state: Region,
    script: Arc<Mutex<VecDeque<ForgedLoad>>>,
    producer: Producer<GuardedOutbound, LyingInbound>,
    consumer: Consumer<LyingInbound, GuardedOutbound>,
    peeked_bytes: usize,
    reserved_bytes: usize,
}

impl Victim {
    fn new(layout: Layout, coherence: Coherence, has_private_state: bool) -> Self {
        let own = windows::memory(&layout);
        let script = Arc::new(Mutex::new(VecDeque::new()));
        let outbound = GuardedOutbound::new(windows::memory(&layout), layout, coherence);
        let inbound = LyingInbound::new(own.clone(), layout, script.clone());
        let state = |offset, len_bytes| match has_private_state {
            false => own.sub(offset, len_bytes),
            true => Region::heap(len_bytes),
        };
        let sender_state = state(SENDER_STATE_OFFSET, Layout::PRODUCER_STATE_BYTES);
        let receiver_state = state(RECEIVER_STATE_OFFSET, Layout::CONSUMER_STATE_BYTES);
        let consumers = receiver_state.clone();
        Self {
            layout,
            own,
            receiver_state,
            script,
            producer: Producer::with_state(outbound.clone(), inbound.clone(), sender_state, layout, SECRET),
            consumer: Consumer::with_state(inbound, outbound, consumers, layout, SECRET),
            peeked_bytes: 0,
            reserved_bytes: 0,
        }
    }

    fn step(&mut self, act: &Act) {
        match act {
            Act::Poke { word, forged_load } => {
                let offset = self.word_offset(*word);
                self.own.store_u64(offset, forged_load.value(&self.own, offset), Ordering::Relaxed);
            }
            Act::Replay { from, to, words } => self.replay(*from, *to, *words),
            Act::Publish(header) => self.publish(*header),
            Act::Script(forged_loads) => {
                *self.script.lock().unwrap_or_else(PoisonError::into_inner) = forged_loads.iter().copied().collect();
            }
            Act::Read(len_bytes) => self.read((*len_bytes).into()),
            Act::ReadShort(len_bytes) => self.read_short((*len_bytes).into()),
            Act::PeekTo { skip_bytes, len_bytes } => self.peek_to((*skip_bytes).into(), (*len_bytes).into()),
            Act::Peek => self.peek(),
            Act::Consume(len_bytes) => self.consume((*len_bytes).into()),
            Act::Ask => self.ask(),
            Act::Write(len_bytes) => self.write((*len_bytes).into()),
            Act::WriteShort(len_bytes) => self.write_short((*len_bytes).into()),
            Act::Reserve(len_bytes) => self.reserve((*len_bytes).into()),
            Act::Commit(len_bytes) => self.commit((*len_bytes).into()),
            Act::Stage(len_bytes) => self.stage((*len_bytes).into()),
            Act::PublishStaged => _ = self.producer.publish_staged(),
            Act::Finish => self.producer.finish(),
            Act::Sleep => {
                self.producer.announce_sleep();
                self.consumer.announce_sleep();
            }
        }
    }

    /// Lets the peer know the victim's read position: it can also compute it.
    fn reveal_position(&self) {
        let head = self.receiver_state.load_u64(0, Ordering::Relaxed);
        self.own.store_u64(RECEIVER_STATE_OFFSET, head, Ordering::Relaxed);
    }

    fn word_offset(&self, word: u16) -> usize {
        usize::from(word) % (self.own.len_bytes() / size_of::<u64>()) * size_of::<u64>()
    }

    /// Publishes a record with `header` at the victim's read position, which is computed from its cursor: the lowest
    /// byte of the cursor's second word is the ring's number.
    fn publish(&self, header: ForgedLoad) {
        let head = self.receiver_state.load_u64(0, Ordering::Relaxed);
        let number = self.receiver_state.load_u64(8, Ordering::Relaxed) as u8;
        let (ring, slots) = match (number, &self.layout.elastic) {
            (0, _) => (self.layout.small_offset, self.layout.small_slots),
            (_, Some(rings)) => {
                let index = usize::from(number - 1).min(ELASTIC_RINGS - 1);
                (rings.offset_of(index), ELASTIC_SLOTS_MIN << index)
            }
            (_, None) if self.layout.big_slots == 0 => (self.layout.small_offset, self.layout.small_slots),
            (_, None) => (self.layout.big_offset, self.layout.big_slots),
        };
        let slot = ring + (head % slots) as usize * CACHE_LINE_BYTES;
        self.own.store_u64(slot, ForgedLoad::Tag(0).value(&self.own, slot), Ordering::Relaxed);
        self.own.store_u64(slot + 8, header.value(&self.own, slot + 8), Ordering::Relaxed);
    }

    fn replay(&self, from: u16, to: u16, words: u8) {
        for index in 0..u16::from(words) {
            let from = self.word_offset(from.wrapping_add(index));
            let to = self.word_offset(to.wrapping_add(index));
            self.own.store_u64(to, self.own.load_u64(from, Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn read(&mut self, len_bytes: usize) {
        self.peeked_bytes = 0;
        if let Ok(read_bytes) = self.consumer.read(&mut vec![0; len_bytes]) {
            assert!(read_bytes <= len_bytes);
        }
    }

    fn read_short(&mut self, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: a vector is writable for its length, and the windows have their own memory.
        if let ShortRead::Read(read_bytes) = unsafe { self.consumer.read_short_to(bytes.as_mut_ptr(), len_bytes) } {
            assert!((1..=len_bytes).contains(&read_bytes));
        }
    }

    fn peek_to(&self, skip_bytes: usize, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: a vector is writable for its length, and the windows have their own memory.
        let peeked = unsafe { self.consumer.peek_to(skip_bytes, bytes.as_mut_ptr(), len_bytes) };
        if let Ok(peeked_bytes) = peeked {
            assert!(peeked_bytes <= len_bytes);
        }
    }

    fn peek(&mut self) {
        self.peeked_bytes = 0;
        if let Ok(Some(chunk)) = self.consumer.peek() {
            self.look_at(chunk);
            self.peeked_bytes = chunk.len_bytes;
        }
    }

    fn look_at(&self, chunk: Chunk) {
        assert!(chunk.len_bytes > 0);
        let pointer = self.consumer.pointer(chunk);
        let mut bytes = vec![0_u8; chunk.len_bytes];
        // SAFETY: the lane guarantees that a chunk is readable for its length; a sanitizer checks that guarantee here.
        unsafe { std::ptr::copy_nonoverlapping(pointer.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn consume(&mut self, len_bytes: usize) {
        let len_bytes = len_bytes.min(self.peeked_bytes);
        self.peeked_bytes -= len_bytes;
        if self.consumer.consume(len_bytes).is_err() {
            self.peeked_bytes = 0;
        }
    }

    fn ask(&mut self) {
        let window_bytes = self.layout.window_bytes();
        if let Ok(unread_bytes) = self.consumer.unread_bytes() {
            assert!(unread_bytes <= 2 * window_bytes, "{unread_bytes} unread bytes in {window_bytes}");
        }
        if let Ok(arrivals) = self.consumer.arrivals(7) {
            assert!(arrivals >= 7);
        }
        // Any result is accepted; a call that does not terminate is the failure.
        let _ = self.consumer.may_have_data();
        let _ = self.consumer.is_finished();
        let _ = self.consumer.take_wake_request();
        self.consumer.cancel_sleep();
        let _ = self.producer.is_writable();
        let _ = self.producer.is_ring_writable();
        let _ = self.producer.release_memory();
        let _ = self.producer.is_drained();
        let _ = self.producer.position();
        self.producer.publish_staged();
        let _ = self.producer.take_wake_request();
        self.producer.cancel_sleep();
    }

    fn write(&mut self, len_bytes: usize) {
        if let Ok(sent_bytes) = self.producer.write(&vec![0x5A; len_bytes]) {
            assert!(sent_bytes <= len_bytes);
        }
    }

    fn write_short(&mut self, len_bytes: usize) {
        let bytes = vec![0x5A; len_bytes];
        // SAFETY: a vector is readable for its length, and the windows have their own memory.
        let is_sent = unsafe { self.producer.write_short_from(bytes.as_ptr(), len_bytes, true) };
        assert!(!is_sent || (1..=SHORT_BYTES_MAX).contains(&len_bytes));
    }

    fn reserve(&mut self, len_bytes: usize) {
        self.reserved_bytes = 0;
        if let Ok(Some(reservation)) = self.producer.reserve(len_bytes) {
            assert!(reservation.len_bytes <= len_bytes);
            // SAFETY: the lane guarantees that a reservation is writable for its length; a sanitizer checks that
            // guarantee here.
            unsafe { reservation.pointer.as_ptr().write_bytes(0xA5, reservation.len_bytes) };
            self.reserved_bytes = reservation.len_bytes;
        }
    }

    fn commit(&mut self, len_bytes: usize) {
        let len_bytes = len_bytes.min(self.reserved_bytes);
        self.reserved_bytes = 0;
        let _ = self.producer.commit(len_bytes);
    }

    fn stage(&mut self, len_bytes: usize) {
        self.reserved_bytes = 0;
        if let Ok(Some(mut draft)) = self.producer.draft(len_bytes) {
            let room_bytes = draft.room_bytes();
            assert!(room_bytes <= len_bytes);
            draft.append(&vec![0xC3; room_bytes / 2]);
            draft.append(&vec![0xC4; room_bytes - room_bytes / 2]);
            draft.stage();
        }
    }
}
