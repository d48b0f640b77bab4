//! Bytes on their way: kept until the peer is known to have them, so that they can be sent again another way.

use std::collections::VecDeque;

/// The last bytes of a stream.
#[derive(Debug, Default)]
pub(crate) struct Retained {
    bytes: VecDeque<u8>,
    /// The position of the first.
    start: u64,
}

impl Retained {
    /// The position behind the last.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Appends `len_bytes` that `fill` puts in place, from so many bytes on.
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

    /// The `len_bytes` from a position on, in two pieces.
    pub(crate) fn from(&self, position: u64, len_bytes: usize) -> [&[u8]; 2] {
        let skip = (position - self.start) as usize;
        let (first, second) = self.bytes.as_slices();
        let cut = |piece: std::ops::Range<usize>| piece.start.min(piece.end)..piece.end;
        let end = skip + len_bytes;
        let in_first = cut(skip..end.min(first.len()));
        let in_second = cut(skip.saturating_sub(first.len())..end.saturating_sub(first.len()));
        [&first[in_first], &second[in_second]]
    }

    /// The peer has everything before a position.
    pub(crate) fn forget_before(&mut self, position: u64) {
        let bytes = usize::try_from(position.saturating_sub(self.start)).unwrap_or(usize::MAX).min(self.bytes.len());
        self.bytes.drain(..bytes);
        self.start += bytes as u64;
        // What a burst needed is not kept by a connection that has gone quiet.
        if self.bytes.is_empty() {
            self.bytes = VecDeque::new();
        }
    }

    /// A position by its low half, where it is one that these bytes can be sent again from.
    pub(crate) fn position(&self, low: u32) -> Option<u64> {
        let ahead = u64::from(low.wrapping_sub(self.start as u32));
        (ahead <= self.bytes.len() as u64).then(|| self.start + ahead)
    }

    /// Nothing of it will be sent any more, where so much was.
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
        fn what_is_not_forgotten_is_found_at_its_position(
            steps in prop::collection::vec((0..300_usize, 0..300_u64), 1..40)
        ) {
            let mut retained = Retained::default();
            for (more, forgotten) in steps {
                let end = retained.end();
                retained.extend(more, |skip, piece| {
                    piece.iter_mut().enumerate().for_each(|(at, it)| *it = byte(end + (skip + at) as u64));
                });
                prop_assert_eq!(retained.end(), end + more as u64);
                retained.forget_before(retained.start + forgotten);
                for position in [retained.start, (retained.start + retained.end()) / 2, retained.end()] {
                    let len_bytes = (retained.end() - position) as usize;
                    let found = retained.from(position, len_bytes).concat();
                    let expected: Vec<u8> = (position..retained.end()).map(byte).collect();
                    prop_assert_eq!(found, expected);
                    prop_assert_eq!(retained.position(position as u32), Some(position));
                }
                prop_assert_eq!(retained.position(retained.end() as u32 + 1), None);
                prop_assert_eq!(retained.position((retained.start as u32).wrapping_sub(1)), None);
            }
        }
    }
}
