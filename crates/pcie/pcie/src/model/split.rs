//! Division of transfers into packets: at the limits for payloads and requests and at the read completion boundary, and
//! therefore also at 4 KB.

use crate::tlp::DW_BYTES;

/// Consecutive bytes of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl Span {
    /// Returns the address after the last byte.
    pub fn end(self) -> u64 {
        self.address + self.bytes
    }

    /// Returns the size of the double words that it touches, which a packet carries.
    pub fn dw_bytes(self) -> u64 {
        let dw_bytes = u64::from(DW_BYTES);
        self.end().next_multiple_of(dw_bytes) - self.address / dw_bytes * dw_bytes
    }

    /// Returns whether both its ends are aligned to double words.
    pub fn is_dw_aligned(self) -> bool {
        self.dw_bytes() == self.bytes
    }

    /// Divides it at every multiple of `boundary_bytes`.
    pub fn split(self, boundary_bytes: u32) -> impl Iterator<Item = Self> {
        self.pieces(move |address| (address / u64::from(boundary_bytes) + 1) * u64::from(boundary_bytes))
    }

    /// Divides it into the completions of a read request. If it is not aligned to the read completion boundary, the
    /// first completion ends there, so that all others are aligned; these have the largest payload.
    pub fn completions(self, rcb_bytes: u32, mps_bytes: u32) -> impl Iterator<Item = Self> {
        let rcb_bytes = u64::from(rcb_bytes);
        self.pieces(move |address| match address % rcb_bytes {
            0 => address + u64::from(mps_bytes),
            inside => address - inside + rcb_bytes,
        })
    }

    /// Divides it into pieces: the piece that starts at an address ends at `end_of` that address.
    fn pieces(self, end_of: impl Fn(u64) -> u64) -> impl Iterator<Item = Self> {
        let mut address = self.address;
        std::iter::from_fn(move || {
            let piece = Self { address, bytes: end_of(address).min(self.end()) - address };
            address = piece.end();
            (piece.bytes > 0).then_some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(address: u64, bytes: u64, boundary_bytes: u32) -> Vec<(u64, u64)> {
        Span { address, bytes }.split(boundary_bytes).map(|piece| (piece.address, piece.bytes)).collect()
    }

    fn completions(address: u64, bytes: u64) -> Vec<(u64, u64)> {
        Span { address, bytes }.completions(64, 256).map(|piece| (piece.address, piece.bytes)).collect()
    }

    #[test]
    fn misaligned_transfers_are_split_at_boundaries() {
        assert_eq!(split(0, 512, 256), [(0, 256), (256, 256)]);
        assert_eq!(split(1, 512, 256), [(1, 255), (256, 256), (512, 1)]);
        assert_eq!(split(4000, 200, 4096), [(4000, 96), (4096, 104)]);
        assert_eq!(split(0, 0, 256), []);
    }

    #[test]
    fn the_first_completion_of_a_misaligned_read_ends_at_the_boundary() {
        assert_eq!(completions(0, 512), [(0, 256), (256, 256)]);
        assert_eq!(completions(32, 512), [(32, 32), (64, 256), (320, 224)]);
        assert_eq!(completions(32, 16), [(32, 16)]);
        assert_eq!(completions(64, 300), [(64, 256), (320, 44)]);
    }

    #[test]
    fn packets_carry_whole_double_words() {
        for (address, bytes, expected) in [(0, 64, 64), (0, 1, 4), (3, 2, 8), (2, 2, 4), (1, 64, 68)] {
            assert_eq!(Span { address, bytes }.dw_bytes(), expected, "{address} {bytes}");
        }
    }

    proptest! {
        #[test]
        fn pieces_cover_the_span_and_keep_their_limits(
            address in 0..10_000_u64, bytes in 1..20_000_u64, rcb in prop::sample::select(vec![64, 128]),
            mps in prop::sample::select(vec![128, 256, 512, 1024, 2048, 4096])
        ) {
            let span = Span { address, bytes };
            let mut at = address;
            for piece in span.split(mps) {
                prop_assert_eq!(piece.address, at);
                prop_assert_eq!(piece.address / u64::from(mps), (piece.end() - 1) / u64::from(mps));
                at = piece.end();
            }
            prop_assert_eq!(at, span.end());
            let mut at = address;
            for piece in span.completions(rcb, mps) {
                prop_assert_eq!(piece.address, at);
                prop_assert!(piece.bytes <= u64::from(mps));
                at = piece.end();
                prop_assert!(at == span.end() || at % u64::from(rcb) == 0);
            }
            prop_assert_eq!(at, span.end());
        }
    }
}
