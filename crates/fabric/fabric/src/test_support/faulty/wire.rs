//! Stores in flight from one node to the other, in virtual time.

use super::super::random::Random;
use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

pub(super) const WORD_BYTES: usize = size_of::<u64>();

/// Words that a core's write-combining buffers hold: twelve lines.
const COMBINING_WORDS_MAX: usize = 12 * 8;

/// A word leaves the buffers with a probability of one in this number per tick. The lower the probability, the more
/// often a tag is seen before its payload.
const LEAK_ONE_IN: usize = 8;

/// Bytes stored into one aligned word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset of the word in the window.
    pub offset: usize,
    /// The word. Only the stored bytes are valid.
    pub bytes: [u8; WORD_BYTES],
    /// Bit `i` is set if byte `i` is stored.
    pub stored: u8,
}

impl Piece {
    pub(super) fn is_whole(&self) -> bool {
        self.stored == u8::MAX
    }

    pub(super) fn has(&self, index: usize) -> bool {
        self.stored >> index & 1 == 1
    }

    /// Merges a later store to the same word.
    fn merge(&mut self, later: &Self) {
        for index in (0..WORD_BYTES).filter(|&index| later.has(index)) {
            self.bytes[index] = later.bytes[index];
        }
        self.stored |= later.stored;
    }
}

/// Divides `bytes` at `offset` into stores to words, in address order.
pub(super) fn pieces(offset: usize, bytes: &[u8]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (index, byte) in bytes.iter().enumerate() {
        let (word, lane) = ((offset + index) / WORD_BYTES * WORD_BYTES, (offset + index) % WORD_BYTES);
        if pieces.last().is_none_or(|last| last.offset != word) {
            pieces.push(Piece { offset: word, bytes: [0; WORD_BYTES], stored: 0 });
        }
        if let Some(piece) = pieces.last_mut() {
            piece.bytes[lane] = *byte;
            piece.stored |= 1 << lane;
        }
    }
    pieces
}

/// An item that arrives at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Item {
    Store(Piece),
    Fence,
    Ring,
}

/// One direction of a link: write-combining buffers, then a queue in order.
#[derive(Debug)]
pub(super) struct Wire {
    is_write_combined: bool,
    delay_ns: RangeInclusive<u64>,
    now_ns: u64,
    combining: BTreeMap<usize, Piece>,
    queue: VecDeque<(u64, Item)>,
    visible_ns_last: u64,
}

impl Wire {
    pub(super) fn new(is_write_combined: bool, delay_ns: RangeInclusive<u64>) -> Self {
        let (combining, queue) = (BTreeMap::new(), VecDeque::new());
        Self { is_write_combined, delay_ns, now_ns: 0, combining, queue, visible_ns_last: 0 }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Number of stores not yet visible to the peer.
    pub(super) fn stores_in_flight(&self) -> usize {
        let queued = self.queue.iter().filter(|(_, item)| matches!(item, Item::Store(_))).count();
        self.combining.len() + queued
    }

    /// Drops everything in flight. Returns the number of dropped stores.
    pub(super) fn clear(&mut self) -> usize {
        let lost = self.stores_in_flight();
        self.combining.clear();
        self.queue.clear();
        lost
    }

    /// Sends a store. Write-combined stores leave the buffers at random times.
    pub(super) fn store(&mut self, piece: Piece, random: &mut Random) {
        if !self.is_write_combined {
            self.send(Item::Store(piece), random);
            return;
        }
        self.combining.entry(piece.offset).and_modify(|earlier| earlier.merge(&piece)).or_insert(piece);
        while self.combining.len() > COMBINING_WORDS_MAX || (!self.combining.is_empty() && random.below(4) == 0) {
            self.evict_one(random);
        }
    }

    /// Orders everything stored before ahead of everything stored after. Combined stores between two fences have no
    /// order.
    pub(super) fn fence(&mut self, random: &mut Random) {
        while !self.combining.is_empty() {
            self.evict_one(random);
        }
        self.send(Item::Fence, random);
    }

    /// Sends a ring. It overtakes stores in the buffers, but no stores that have left them.
    pub(super) fn ring(&mut self, random: &mut Random) {
        self.send(Item::Ring, random);
    }

    /// Advances time, never backward. Buffers that are not fenced leak over time.
    pub(super) fn tick(&mut self, now_ns: u64, random: &mut Random) {
        self.now_ns = self.now_ns.max(now_ns);
        let leaks = (0..self.combining.len()).filter(|_| random.below(LEAK_ONE_IN) == 0).count();
        (0..leaks).for_each(|_| self.evict_one(random));
    }

    /// Advances time until everything in flight has arrived.
    pub(super) fn wait_for_all(&mut self) {
        self.now_ns = self.now_ns.max(self.visible_ns_last);
    }

    /// Returns the next item that is due.
    pub(super) fn arrival(&mut self) -> Option<Item> {
        let (visible_ns, item) = *self.queue.front()?;
        if visible_ns > self.now_ns {
            return None;
        }
        self.queue.pop_front();
        Some(item)
    }

    fn evict_one(&mut self, random: &mut Random) {
        let choice = random.below(self.combining.len());
        let offset = *self.combining.keys().nth(choice).expect("the choice is below the count");
        let piece = self.combining.remove(&offset).expect("the key was just seen");
        self.send(Item::Store(piece), random);
    }

    /// Items keep their order: a delayed item delays those behind it.
    fn send(&mut self, item: Item, random: &mut Random) {
        let visible_ns = self.now_ns.saturating_add(random.within(&self.delay_ns)).max(self.visible_ns_last);
        self.visible_ns_last = visible_ns;
        self.queue.push_back((visible_ns, item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrived(wire: &mut Wire) -> Vec<Item> {
        std::iter::from_fn(|| wire.arrival()).collect()
    }

    fn word(offset: usize, value: u64) -> Piece {
        Piece { offset, bytes: value.to_ne_bytes(), stored: u8::MAX }
    }

    #[test]
    fn bytes_are_divided_at_words() {
        let cut = pieces(6, &[1, 2, 3]);
        assert_eq!(cut.iter().map(|piece| (piece.offset, piece.stored)).collect::<Vec<_>>(), [(0, 0xc0), (8, 1)]);
        assert_eq!((cut[0].bytes[6], cut[0].bytes[7], cut[1].bytes[0]), (1, 2, 3));
        assert!(pieces(8, &[7; 8])[0].is_whole());
        assert!(pieces(3, &[]).is_empty());
    }

    #[test]
    fn without_delay_a_store_arrives_immediately() {
        let (mut wire, mut random) = (Wire::new(false, 0..=0), Random::new(1));
        wire.store(word(0, 1), &mut random);
        assert_eq!(arrived(&mut wire), [Item::Store(word(0, 1))]);
    }

    #[test]
    fn delayed_stores_arrive_later_and_in_order() {
        let (mut wire, mut random) = (Wire::new(false, 10..=90), Random::new(3));
        let sent: Vec<Item> = (0..20).map(|index| Item::Store(word(index * 8, index as u64))).collect();
        (0..20).for_each(|index| wire.store(word(index * 8, index as u64), &mut random));
        wire.tick(9, &mut random);
        assert_eq!(arrived(&mut wire), []);
        let mut seen = Vec::new();
        for now_ns in 10..=90 {
            wire.tick(now_ns, &mut random);
            seen.extend(arrived(&mut wire));
        }
        assert_eq!(seen, sent);
    }

    #[test]
    fn only_a_fence_keeps_later_stores_from_overtaking() {
        let mut overtaken = 0;
        for seed in 0..200 {
            for is_fenced in [true, false] {
                let (mut wire, mut random) = (Wire::new(true, 0..=0), Random::new(seed));
                (0..4).for_each(|index| wire.store(word(index * 8, 1), &mut random));
                if is_fenced {
                    wire.fence(&mut random);
                }
                wire.store(word(64, 1), &mut random);
                wire.fence(&mut random);
                let stores: Vec<Item> =
                    arrived(&mut wire).into_iter().filter(|item| matches!(item, Item::Store(_))).collect();
                let is_last = stores.last() == Some(&Item::Store(word(64, 1)));
                assert_eq!(stores.len(), 5, "seed {seed}");
                assert!(is_last || !is_fenced, "seed {seed}: a store overtook a fence");
                overtaken += usize::from(!is_last);
            }
        }
        assert!(overtaken > 100, "only {overtaken} of 200 unfenced tags overtook their payload");
    }

    #[test]
    fn stores_to_one_word_combine_and_the_last_wins() {
        for seed in 0..50 {
            let (mut wire, mut random) = (Wire::new(true, 0..=0), Random::new(seed));
            (1..=9).for_each(|value| wire.store(word(8, value), &mut random));
            wire.fence(&mut random);
            let last = arrived(&mut wire).into_iter().rfind(|item| matches!(item, Item::Store(_)));
            assert_eq!(last, Some(Item::Store(word(8, 9))), "seed {seed}");
        }
    }

    #[test]
    fn stores_that_are_not_fenced_leak_over_time() {
        let (mut wire, mut random) = (Wire::new(true, 0..=0), Random::new(5));
        (0..50).for_each(|index| wire.store(word(index * 8, 1), &mut random));
        (0..500).for_each(|now_ns| wire.tick(now_ns, &mut random));
        assert_eq!(arrived(&mut wire).len(), 50);
    }
}
