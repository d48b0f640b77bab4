//! Bytes in flight, retained until the peer has acknowledged them, so that they can be sent again over another
//! transport.

use std::collections::VecDeque;

/// The last bytes of a stream.
#[derive(Debug, Default)]
pub(crate) struct RetransmitBuffer {
    bytes: VecDeque<u8>,
    /// The position of the first byte.
    start: u64,
}

impl RetransmitBuffer {
    /// Returns the position after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Appends `len_bytes`. `fill` is called with an offset among them and a piece of the buffer to fill.
    pub(crate) fn extend(&mut self, len_bytes: usize, mut fill: impl FnMut(usize, &mut [u8])) {
        let before = self.bytes.len();
        self.bytes.resize(before + len_bytes, 0);
        let (first, second) = self.bytes.as_mut_slices();
        let first_bytes = first.len();
        if before < first_bytes {
            fill(0, &mut first[before..]);
        }
        if !second.is_empty() {
            let skip = before.saturating_sub(first_bytes);
            fill((first_bytes + skip) - before, &mut second[skip..]);
        }
    }

    /// Returns the `len_bytes` from a position on, in two pieces.
    pub(crate) fn from(&self, position: u64, len_bytes: usize) -> [&[u8]; 2] {
        let skip = (position - self.start) as usize;
        let (first, second) = self.bytes.as_slices();
        let cut = |piece: std::ops::Range<usize>| piece.start.min(piece.end)..piece.end;
        let end = skip + len_bytes;
        let in_first = cut(skip..end.min(first.len()));
        let in_second = cut(skip.saturating_sub(first.len())..end.saturating_sub(first.len()));
        [&first[in_first], &second[in_second]]
    }

    /// Discards the bytes before a position, which the peer has acknowledged.
    pub(crate) fn forget_before(&mut self, position: u64) {
        let bytes = usize::try_from(position.saturating_sub(self.start)).unwrap_or(usize::MAX).min(self.bytes.len());
        self.bytes.drain(..bytes);
        self.start += bytes as u64;
        // An idle connection does not keep the memory that a burst needed.
        if self.bytes.is_empty() {
            self.bytes = VecDeque::new();
        }
    }

    /// Extends the low half of a position; returns `None` if these bytes cannot be sent again from there.
    pub(crate) fn position(&self, low: u32) -> Option<u64> {
        let ahead = u64::from(low.wrapping_sub(self.start as u32));
        (ahead <= self.bytes.len() as u64).then(|| self.start + ahead)
    }

    /// Discards all bytes: nothing will be sent again. `sent` is the position that was reached.
    pub(crate) fn clear(&mut self, sent: u64) {
        *self = Self { bytes: VecDeque::new(), start: sent };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn byte(position: u64) -> u8 {
        ((position * 31) >> 2) as u8
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn retained_bytes_are_found_at_their_positions(
            steps in prop::collection::vec((0..300_usize, 0..300_u64), 1..40)
        ) {
            let mut retransmit = RetransmitBuffer::default();
            for (more, forgotten) in steps {
                let end = retransmit.end();
                retransmit.extend(more, |skip, piece| {
                    piece.iter_mut().enumerate().for_each(|(at, it)| *it = byte(end + (skip + at) as u64));
                });
                prop_assert_eq!(retransmit.end(), end + more as u64);
                retransmit.forget_before(retransmit.start + forgotten);
                for position in [retransmit.start, (retransmit.start + retransmit.end()) / 2, retransmit.end()] {
                    let len_bytes = (retransmit.end() - position) as usize;
                    let found = retransmit.from(position, len_bytes).concat();
                    let expected: Vec<u8> = (position..retransmit.end()).map(byte).collect();
                    prop_assert_eq!(found, expected);
                    prop_assert_eq!(retransmit.position(position as u32), Some(position));
                }
                prop_assert_eq!(retransmit.position(retransmit.end() as u32 + 1), None);
                prop_assert_eq!(retransmit.position((retransmit.start as u32).wrapping_sub(1)), None);
            }
        }
    }
}
