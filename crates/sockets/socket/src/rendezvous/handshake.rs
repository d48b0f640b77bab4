//! The handshake: the first bytes on a lifeline, from the connecting endpoint, with a descriptor attached to them: the
//! segment's memfd, or the memory in which the windows of two nodes are.
//!
//! ```text
//!    0  magic            "XLHELLO" and a zero
//!    8  version          of this and of the segment's layout
//!   12  flags            1: the connection is in windows; 2: of a modelled link; 4, 8, 12: the memory is uncached,
//!                        write-combined, not coherent; the second byte: the binary logarithm of the unit in which
//!                        the memory must be mapped, 0: pages
//!   16  segment bytes    the size of the memfd, or of each endpoint's span
//!   24  secret           of the lane to the accepting endpoint
//!   32  secret           of the lane to the connecting endpoint
//!   40  inbound          offset of the receiver's span in the memory, zero with a memfd
//!   48  outbound         offset of the other endpoint's span
//!   56  model            the model of a modelled link
//! ```
//!
//! Numbers are in the byte order of the machine, on which both endpoints run.

use std::fmt;

use fabric::device::Caching;
use volmem::Alignment;

use segment::model::{LinkModel, MODEL_BYTES};
use segment::{LAYOUT_VERSION, Secrets, Segment};

/// Length of a handshake.
pub const HANDSHAKE_BYTES: usize = MODEL_OFFSET + MODEL_BYTES;
const MODEL_OFFSET: usize = 56;

const MAGIC: u64 = u64::from_ne_bytes(*b"XLHELLO\0");
const FLAG_WINDOWS: u32 = 1;
const FLAG_MODEL: u32 = 2;
const CACHING_SHIFT: u32 = 2;
const CACHING_MASK: u32 = 3;
const ALIGNMENT_SHIFT: u32 = 8;
const FLAGS_KNOWN: u32 = FLAG_WINDOWS | FLAG_MODEL | CACHING_MASK << CACHING_SHIFT | 0xff << ALIGNMENT_SHIFT;
/// The kinds of memory, by their number in the flags.
const CACHINGS: [Caching; 4] = [Caching::Cached, Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent];

/// The spans of a connection between two nodes, as the endpoint that reads this sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSpans {
    /// Offset of its own span in the memory.
    pub inbound_offset: u64,
    /// Offset of the other endpoint's span in the memory.
    pub outbound_offset: u64,
    /// The unit in which the memory must be mapped, if larger than a page. It is sent, because programs may not be able
    /// to read where the kernel describes devices.
    pub alignment: Option<Alignment>,
    /// The caching of the memory.
    pub caching: Caching,
    /// The model of the link, if it is a modelled one.
    pub model: Option<LinkModel>,
}

impl WindowSpans {
    /// Returns spans of a link without a model, in ordinary memory that is mapped by pages.
    pub const fn new(inbound_offset: u64, outbound_offset: u64) -> Self {
        Self { inbound_offset, outbound_offset, alignment: None, caching: Caching::Cached, model: None }
    }

    /// Returns whether an endpoint's state is in a local page and not in the memory: on this memory, atomic
    /// read-modify-write operations do not work, or writes to a cache line that another node reads are not visible to
    /// it.
    pub fn has_local_state(&self) -> bool {
        self.caching != Caching::Cached
    }

    /// Returns the length of each span.
    pub const fn span_bytes(&self) -> usize {
        Segment::window_bytes(self.model.is_some())
    }

    /// Returns the number of the kind of memory, for [`WindowSpans::of_kind`]; `None` for spans that only endpoints of
    /// this crate can use: those of a modelled link, and in memory that is not ordinary memory.
    pub fn kind(self) -> Option<u32> {
        let is_ordinary = self.model.is_none() && !self.has_local_state();
        is_ordinary.then(|| Self::flags(Some(self)))
    }

    /// Returns spans in memory of a [kind](WindowSpans::kind); `None` for a number that no such kind has.
    pub fn of_kind(kind: u32, inbound_offset: u64, outbound_offset: u64) -> Option<Self> {
        let alignment = Self::alignment_in(kind);
        let spans = Self { alignment, ..Self::new(inbound_offset, outbound_offset) };
        (spans.kind() == Some(kind)).then_some(spans)
    }

    /// Encodes everything but the offsets and the model in a number that is zero only without spans.
    pub(crate) fn flags(spans: Option<Self>) -> u32 {
        let Some(spans) = spans else { return 0 };
        let model = if spans.model.is_some() { FLAG_MODEL } else { 0 };
        let alignment = spans.alignment.map_or(0, |alignment| u32::from(alignment.log2()) << ALIGNMENT_SHIFT);
        let caching = CACHINGS.iter().position(|caching| *caching == spans.caching).unwrap_or(0) as u32;
        FLAG_WINDOWS | model | caching << CACHING_SHIFT | alignment
    }

    /// Returns the caching in the flags of [`WindowSpans::flags`].
    pub(crate) fn caching_in(flags: u32) -> Caching {
        CACHINGS[(flags >> CACHING_SHIFT & CACHING_MASK) as usize]
    }

    /// Returns the unit of mapping in the flags of [`WindowSpans::flags`].
    pub(crate) fn alignment_in(flags: u32) -> Option<Alignment> {
        let [_, log2, ..] = flags.to_le_bytes();
        Alignment::from_log2(log2)
    }
}

/// The contents of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// The secrets by which the records of each lane are distinguished from other bytes.
    pub secrets: Secrets,
    /// The spans of a connection in windows; `None` for one in a memfd.
    pub spans: Option<WindowSpans>,
}

/// The reason why bytes are not a valid handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// A wrong number of bytes.
    Length(usize),
    /// A wrong magic number.
    Magic(u64),
    /// A handshake of another version.
    Version(u32),
    /// Unknown flags.
    Flags(u32),
    /// A segment whose size is not that of this version.
    SegmentBytes(u64),
    /// Spans in windows for a connection in a memfd, a model for a link without one, or a unit of mapping that no
    /// memory has.
    Spans(WindowSpans),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(formatter, "handshake of {bytes} bytes, not {HANDSHAKE_BYTES}"),
            Self::Magic(magic) => write!(formatter, "handshake begins with {magic:#018x}, not {MAGIC:#018x}"),
            Self::Version(version) => write!(formatter, "handshake of version {version}, not {LAYOUT_VERSION}"),
            Self::Flags(flags) => write!(formatter, "handshake with unknown flags {flags:#x}"),
            Self::SegmentBytes(bytes) => write!(
                formatter,
                "segment of {bytes} bytes, neither {} in a memfd nor {} in a window nor {} in one of a modelled link",
                Segment::SEGMENT_BYTES,
                Segment::WINDOW_BYTES,
                Segment::TIMED_WINDOW_BYTES
            ),
            Self::Spans(spans) => write!(
                formatter,
                "spans in windows ({:#x}, {:#x}) of a connection in a memfd, a model of a link that has none, or an \
                 alignment that no memory has",
                spans.inbound_offset, spans.outbound_offset
            ),
        }
    }
}

impl std::error::Error for HandshakeError {}

impl Handshake {
    /// Encodes the handshake.
    pub fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let mut bytes = [0_u8; HANDSHAKE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_ne_bytes());
        bytes[12..16].copy_from_slice(&WindowSpans::flags(self.spans).to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.segment_bytes().to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.secrets.to_acceptor.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.secrets.to_connector.to_ne_bytes());
        let spans = self.spans.unwrap_or(WindowSpans::new(0, 0));
        bytes[40..48].copy_from_slice(&spans.inbound_offset.to_ne_bytes());
        bytes[48..MODEL_OFFSET].copy_from_slice(&spans.outbound_offset.to_ne_bytes());
        bytes[MODEL_OFFSET..].copy_from_slice(&LinkModel::encode(spans.model));
        bytes
    }

    fn segment_bytes(&self) -> u64 {
        self.spans.map_or(Segment::SEGMENT_BYTES, |spans| spans.span_bytes()) as u64
    }

    /// Decodes received bytes, which any process may have sent.
    ///
    /// # Errors
    /// The first error found, in the order of the fields.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let bytes: &[u8; HANDSHAKE_BYTES] = bytes.try_into().map_err(|_| HandshakeError::Length(bytes.len()))?;
        let magic = word(bytes, 0);
        if magic != MAGIC {
            return Err(HandshakeError::Magic(magic));
        }
        let version = half_word(bytes, 8);
        if version != LAYOUT_VERSION {
            return Err(HandshakeError::Version(version));
        }
        let flags = half_word(bytes, 12);
        if flags & !FLAGS_KNOWN != 0 {
            return Err(HandshakeError::Flags(flags));
        }
        let model = bytes.last_chunk().and_then(LinkModel::decode);
        let (alignment, caching) = (WindowSpans::alignment_in(flags), WindowSpans::caching_in(flags));
        let (inbound_offset, outbound_offset) = (word(bytes, 40), word(bytes, 48));
        let spans = WindowSpans { inbound_offset, outbound_offset, alignment, caching, model };
        let handshake = Self {
            secrets: Secrets { to_acceptor: word(bytes, 24), to_connector: word(bytes, 32) },
            spans: (flags & FLAG_WINDOWS != 0).then_some(spans),
        };
        let segment_bytes = word(bytes, 16);
        if segment_bytes != handshake.segment_bytes() {
            return Err(HandshakeError::SegmentBytes(segment_bytes));
        }
        if handshake.encode() != *bytes {
            return Err(HandshakeError::Spans(spans));
        }
        Ok(handshake)
    }
}

fn word(bytes: &[u8; HANDSHAKE_BYTES], at: usize) -> u64 {
    let mut copy = [0; 8];
    copy.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(copy)
}

fn half_word(bytes: &[u8; HANDSHAKE_BYTES], at: usize) -> u32 {
    let mut copy = [0; 4];
    copy.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric::timed::LinkTiming;
    use proptest::prelude::*;

    fn handshake(to_acceptor: u64, to_connector: u64) -> Handshake {
        Handshake { secrets: Secrets { to_acceptor, to_connector }, spans: None }
    }

    proptest! {
        #[test]
        fn a_handshake_survives_encoding(to_acceptor: u64, to_connector: u64) {
            let handshake = handshake(to_acceptor, to_connector);
            prop_assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
            let spans = WindowSpans::new(to_connector, to_acceptor);
            let timing = LinkTiming { one_way_ns: to_acceptor, bytes_per_us: 1, header_bytes: 2, payload_bytes_max: 3 };
            let model = Some(LinkModel { timing, inbound_pace_offset: to_connector, outbound_pace_offset: 4 });
            let alignment = Alignment::new(2 << 20);
            let of = |caching| WindowSpans { caching, ..spans };
            let apart = [of(Caching::Uncached), of(Caching::WriteCombined), of(Caching::NonCoherent)];
            let cached = [spans, WindowSpans { model, ..spans }, WindowSpans { alignment, ..spans }];
            for spans in cached.into_iter().chain(apart) {
                let handshake = Handshake { spans: Some(spans), ..handshake };
                prop_assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
            }
        }

        #[test]
        fn a_handshake_with_a_changed_byte_before_its_secrets_is_refused(at in 0..24_usize, change in 1..=255_u8) {
            let mut bytes = handshake(1, 2).encode();
            bytes[at] ^= change;
            prop_assert!(Handshake::decode(&bytes).is_err());
        }

        #[test]
        fn hostile_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..150)) {
            prop_assert!(Handshake::decode(&bytes).is_err());
        }

        #[test]
        fn a_handshake_cut_or_prolonged_is_refused(length in 0..150_usize) {
            let mut bytes = handshake(3, 4).encode().to_vec();
            bytes.resize(length, 0);
            prop_assert_eq!(Handshake::decode(&bytes).is_ok(), length == HANDSHAKE_BYTES);
        }
    }

    #[test]
    fn a_refusal_carries_what_was_found() {
        let changed = |at: usize| {
            let mut bytes = handshake(1, 2).encode();
            bytes[at] ^= 0x40;
            Handshake::decode(&bytes).unwrap_err()
        };
        assert_eq!(changed(0), HandshakeError::Magic(MAGIC ^ u64::from_ne_bytes([0x40, 0, 0, 0, 0, 0, 0, 0])));
        assert_eq!(changed(8), HandshakeError::Version(LAYOUT_VERSION ^ u32::from_ne_bytes([0x40, 0, 0, 0])));
        assert_eq!(changed(12), HandshakeError::Flags(u32::from_ne_bytes([0x40, 0, 0, 0])));
        assert_eq!(changed(40), HandshakeError::Spans(WindowSpans::new(0x40, 0)));
        assert_eq!(changed(13), HandshakeError::Spans(WindowSpans::new(0, 0)), "no memory has 2^64 bytes");
        assert!(matches!(changed(56), HandshakeError::Spans(WindowSpans { model: Some(_), .. })));
        assert!(matches!(changed(16), HandshakeError::SegmentBytes(_)));
        assert!(changed(8).to_string().contains("version"));
    }
}
