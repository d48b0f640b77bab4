//! The wire format of a message of packets, version 4. Integers are little-endian.
//!
//! ```text
//!   0   magic 0xc5        4   sequence: packets sent before this message, mod 2^32
//!   1   version           8   ack: packets that the sender has received from the receiver, mod 2^32
//!   2   packets, 0 to 64  12  length of the message in bytes
//!   3   flags             16  descriptors of 8 bytes, then the packets, in the same order, without gaps
//!
//!   descriptor:  0  length of the packet, at least 1     3  egress port, 255 for the kernel
//!                2  egress node, part                    4  adjacency there
//!                                                        6  payload of each segment of a large packet; otherwise zero
//! ```
//!
//! Flag 1 requests an acknowledgement. Flag 2 marks a filler without content, which pads a ring up to its end. The
//! upper six bits of the flags state the occupancy of the sender: the batch size that it asks for, minus one.
//! A large packet ([`packet::segmentation`]) that is longer than a message is sent in parts, each of which is a message
//! by itself: bit 7 of the egress node says that the next message continues the packet, and bit 6 that this one does.
//! All lengths are redundant, so that truncated or wrongly assembled messages are detected; the content of packets is
//! validated by their receivers.

use thiserror::Error;

use super::limits::PACKETS_MAX;
use crate::{AdjacencyId, Hop, NODES_MAX, NodeId, PortId};

/// Length of the header, which precedes the descriptors.
pub const HEADER_BYTES: usize = 16;
/// Length of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 8;
/// The supported version.
pub const VERSION: u8 = 4;
/// Maximum of [`Header::occupancy`]: a fully loaded node asks for full messages of [`PACKETS_MAX`], one more than this.
pub const OCCUPANCY_MAX: u8 = PACKETS_MAX as u8 - 1;

const MAGIC: u8 = 0xc5;
const FLAG_ACK_REQUEST: u8 = 1;
const FLAG_FILLER: u8 = 2;
const FLAGS: u8 = FLAG_ACK_REQUEST | FLAG_FILLER;
/// Position of the occupancy in the flags.
const OCCUPANCY_SHIFT: u32 = FLAGS.count_ones();

const PART_CONTINUES: u8 = 0x40;
const PART_IS_CONTINUED: u8 = 0x80;

const _: () = assert!(OCCUPANCY_MAX == u8::MAX >> OCCUPANCY_SHIFT, "every value of these bits is valid");

/// The header fields of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Number of packets sent before this message, mod 2^32.
    pub sequence: u32,
    /// Number of packets that the sender has received from the receiver, mod 2^32.
    pub ack: u32,
    /// Whether the receiver should acknowledge soon.
    pub requests_ack: bool,
    /// Batch size that the sender asks for because of its load, minus one. At most [`OCCUPANCY_MAX`].
    pub occupancy: u8,
}

/// Bytes written by a peer: copied out, then validated.
pub trait Source {
    /// Returns the number of bytes.
    fn bytes(&self) -> usize;

    /// Copies the bytes from `at` on to fill `into`. The range must lie within [`Source::bytes`].
    fn read(&self, at: usize, into: &mut [u8]);
}

impl Source for [u8] {
    fn bytes(&self) -> usize {
        self.len()
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        into.copy_from_slice(&self[at..at + into.len()]);
    }
}

/// A malformed message: the sender is not a node of this cluster, or is defective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "a message with {what} of {value}; all nodes of a cluster must run the same version, \
     and messages of this one are ignored from now on"
)]
pub struct MessageError {
    /// Malformed field.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
}

/// The position of bytes in their packet; by default they are the whole packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Whether they continue the packet of the message before.
    pub continues: bool,
    /// Whether the next message continues their packet.
    pub is_continued: bool,
}

impl Part {
    /// Returns whether this is a whole packet.
    pub fn is_whole(self) -> bool {
        self == Part::default()
    }
}

/// A packet to be sent, or a part of a large one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// Next hop.
    pub hop: Hop,
    /// The bytes, at least 1.
    pub bytes: &'a [u8],
    /// Payload of each segment of a large packet; otherwise 0.
    pub segment_bytes: u16,
    /// Position of the bytes in the packet.
    pub part: Part,
}

impl<'a> Item<'a> {
    /// Returns an ordinary packet.
    pub fn new(hop: Hop, bytes: &'a [u8]) -> Item<'a> {
        Item { hop, bytes, segment_bytes: 0, part: Part::default() }
    }
}

/// A packet in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Next hop.
    pub hop: Hop,
    /// Offset in the message, in bytes.
    pub offset: usize,
    /// Length in bytes, at least 1.
    pub bytes: usize,
    /// Payload of each segment of a large packet; otherwise 0. Not validated.
    pub segment_bytes: u16,
    /// Position of the bytes in the packet.
    pub part: Part,
}

/// A validated message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Header fields.
    pub header: Header,
    /// Validated descriptors.
    descriptors: [[u8; DESCRIPTOR_BYTES]; PACKETS_MAX],
    packets: usize,
    is_filler: bool,
}

impl Message {
    /// Validates bytes of a peer, each of which is copied once.
    ///
    /// # Errors
    /// The bytes are not exactly one valid message.
    pub fn check(source: &(impl Source + ?Sized)) -> Result<Message, MessageError> {
        let fault = |what, value: usize| Err(MessageError { what, value: value as u64 });
        let bytes = source.bytes();
        if bytes < HEADER_BYTES {
            return fault("a length", bytes);
        }
        let mut head = [0; HEADER_BYTES];
        source.read(0, &mut head);
        let [magic, version, packets, flags, ..] = head;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if magic != MAGIC {
            return fault("a magic", usize::from(magic));
        }
        if version != VERSION {
            return fault("a version", usize::from(version));
        }
        if word(12) as usize != bytes {
            return fault("a stated length", word(12) as usize);
        }
        let header = Header {
            sequence: word(4),
            ack: word(8),
            requests_ack: flags & FLAG_ACK_REQUEST != 0,
            occupancy: flags >> OCCUPANCY_SHIFT,
        };
        let is_filler = flags & FLAG_FILLER != 0;
        let descriptors = [[0; DESCRIPTOR_BYTES]; PACKETS_MAX];
        let mut message = Message { header, descriptors, packets: usize::from(packets), is_filler };
        if message.packets > PACKETS_MAX || is_filler && packets != 0 {
            return fault("a number of packets", message.packets);
        }
        if !is_filler {
            message.read_descriptors(source)?;
        }
        Ok(message)
    }

    fn read_descriptors(&mut self, source: &(impl Source + ?Sized)) -> Result<(), MessageError> {
        let fault = |what, value: usize| Err(MessageError { what, value: value as u64 });
        let bytes = source.bytes();
        let mut offset = HEADER_BYTES + self.packets * DESCRIPTOR_BYTES;
        if offset > bytes {
            return fault("a number of packets", self.packets);
        }
        let descriptors = &mut self.descriptors[..self.packets];
        source.read(HEADER_BYTES, descriptors.as_flattened_mut());
        for descriptor in descriptors {
            let (node, part, segment_bytes) = node_of(descriptor);
            // A part is a message by itself, and only large packets have parts.
            if node >= NODES_MAX || !part.is_whole() && (self.packets != 1 || segment_bytes == 0) {
                return fault("a descriptor", u64::from_le_bytes(*descriptor) as usize);
            }
            let length = length_of(descriptor);
            if length == 0 || length > bytes - offset {
                return fault("a packet's length", length);
            }
            offset += length;
        }
        if offset != bytes {
            return fault("a length without its packets", bytes - offset);
        }
        Ok(())
    }

    /// Returns whether the message is a filler, whose header has no meaning either.
    pub fn is_filler(&self) -> bool {
        self.is_filler
    }

    /// Returns the number of packets.
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Iterates over the packets.
    #[inline]
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let mut offset = HEADER_BYTES + self.packets * DESCRIPTOR_BYTES;
        self.descriptors[..self.packets].iter().map(move |descriptor| {
            let [_, _, _, port, low, high, ..] = *descriptor;
            let (node, part, segment_bytes) = node_of(descriptor);
            let adjacency = AdjacencyId(u16::from_le_bytes([low, high]));
            let hop = Hop { node: NodeId(node), port: PortId(port), adjacency };
            let entry = Entry { hop, offset, bytes: length_of(descriptor), segment_bytes, part };
            offset += entry.bytes;
            entry
        })
    }
}

/// Returns the egress node, the part, and the payload of each segment.
#[inline]
fn node_of(descriptor: &[u8; DESCRIPTOR_BYTES]) -> (u8, Part, u16) {
    let [_, _, node, _, _, _, low, high] = *descriptor;
    let part = Part { continues: node & PART_CONTINUES != 0, is_continued: node & PART_IS_CONTINUED != 0 };
    (node & !(PART_CONTINUES | PART_IS_CONTINUED), part, u16::from_le_bytes([low, high]))
}

#[inline]
fn length_of(descriptor: &[u8; DESCRIPTOR_BYTES]) -> usize {
    usize::from(u16::from_le_bytes([descriptor[0], descriptor[1]]))
}

/// Returns the length of a message of `packets` packets with a total of `packet_bytes` bytes.
pub const fn length(packets: usize, packet_bytes: usize) -> usize {
    HEADER_BYTES + packets * DESCRIPTOR_BYTES + packet_bytes
}

/// Returns how many of the packets with these lengths, from the first one on, fit in a message of at most `bytes_max`,
/// and the length of that message.
pub fn fit(bytes_max: usize, lengths: impl Iterator<Item = usize>) -> (usize, usize) {
    let (mut packets, mut bytes) = (0, HEADER_BYTES);
    for length in lengths.take(PACKETS_MAX) {
        let grown = bytes + DESCRIPTOR_BYTES + length;
        if grown > bytes_max {
            break;
        }
        (packets, bytes) = (packets + 1, grown);
    }
    (packets, bytes)
}

/// Writes a message of at most [`PACKETS_MAX`] packets to the front of `into`, and returns its length, as [`fit`] does.
///
/// # Panics
/// There are more packets, or `into` is too short.
pub fn put<'a>(into: &mut [u8], header: &Header, packets: impl ExactSizeIterator<Item = Item<'a>> + Clone) -> usize {
    let mut bytes = put_front(into, header, packets.clone());
    for packet in packets {
        into[bytes..bytes + packet.bytes.len()].copy_from_slice(packet.bytes);
        bytes += packet.bytes.len();
    }
    bytes
}

/// Writes the header and the descriptors of such a message, for callers that transfer the packets themselves in another
/// way, and returns their length.
///
/// # Panics
/// There are more than [`PACKETS_MAX`] packets, or `into` is too short.
pub fn put_front<'a>(into: &mut [u8], header: &Header, packets: impl ExactSizeIterator<Item = Item<'a>>) -> usize {
    let count = packets.len();
    assert!(count <= PACKETS_MAX, "a message of {count} packets");
    assert!(header.occupancy <= OCCUPANCY_MAX, "{header:?}");
    let flags = if header.requests_ack { FLAG_ACK_REQUEST } else { 0 } | header.occupancy << OCCUPANCY_SHIFT;
    let (head, descriptors) = into.split_at_mut(HEADER_BYTES);
    let (descriptors, _) = descriptors[..count * DESCRIPTOR_BYTES].as_chunks_mut::<DESCRIPTOR_BYTES>();
    let front_bytes = HEADER_BYTES + count * DESCRIPTOR_BYTES;
    let mut bytes = front_bytes;
    for (descriptor, Item { hop, bytes: packet, segment_bytes, part }) in descriptors.iter_mut().zip(packets) {
        let [low, high] = (packet.len() as u16).to_le_bytes();
        let [adjacency_low, adjacency_high] = hop.adjacency.0.to_le_bytes();
        let [segment_low, segment_high] = segment_bytes.to_le_bytes();
        let continues = if part.continues { PART_CONTINUES } else { 0 };
        let node = hop.node.0 | continues | if part.is_continued { PART_IS_CONTINUED } else { 0 };
        *descriptor = [low, high, node, hop.port.0, adjacency_low, adjacency_high, segment_low, segment_high];
        bytes += packet.len();
    }
    put_head(head, [MAGIC, VERSION, count as u8, flags], header, bytes);
    front_bytes
}

/// Fills `into`, at least as long as a header, with a filler.
pub fn put_filler(into: &mut [u8]) {
    let bytes = into.len();
    let (head, rest) = into.split_at_mut(HEADER_BYTES);
    put_head(head, [MAGIC, VERSION, 0, FLAG_FILLER], &Header::default(), bytes);
    rest.fill(0);
}

fn put_head(head: &mut [u8], first: [u8; 4], header: &Header, bytes: usize) {
    head[..4].copy_from_slice(&first);
    head[4..8].copy_from_slice(&header.sequence.to_le_bytes());
    head[8..12].copy_from_slice(&header.ack.to_le_bytes());
    head[12..16].copy_from_slice(&(bytes as u32).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hop(node: u8, port: u8, adjacency: u16) -> Hop {
        Hop { node: NodeId(node), port: PortId(port), adjacency: AdjacencyId(adjacency) }
    }

    fn three() -> Vec<u8> {
        let packets: [(Hop, &[u8]); 3] =
            [(hop(1, 2, 3), &[7; 46]), (hop(7, 255, 0xffff), &[8]), (hop(0, 0, 0), &[9; 1500])];
        let mut bytes = vec![0; 2000];
        let length = put(
            &mut bytes,
            &Header { sequence: 5, ack: 6, requests_ack: true, occupancy: OCCUPANCY_MAX },
            packets.into_iter().map(|(hop, bytes)| Item::new(hop, bytes)),
        );
        assert_eq!(fit(length, packets.iter().map(|(_, packet)| packet.len())), (3, length));
        bytes.truncate(length);
        bytes
    }

    #[test]
    fn a_message_round_trips() {
        let bytes = three();
        let message = Message::check(bytes.as_slice()).unwrap();
        assert_eq!(message.header, Header { sequence: 5, ack: 6, requests_ack: true, occupancy: OCCUPANCY_MAX });
        let found: Vec<(Hop, &[u8])> =
            message.entries().map(|entry| (entry.hop, &bytes[entry.offset..][..entry.bytes])).collect();
        assert_eq!(found, [(hop(1, 2, 3), &[7; 46][..]), (hop(7, 255, 0xffff), &[8]), (hop(0, 0, 0), &[9; 1500])]);
    }

    #[test]
    fn a_part_of_a_large_packet_round_trips_by_itself_only() {
        for (continues, is_continued, segment_bytes) in [(false, true, 1448), (true, true, 1), (true, false, u16::MAX)]
        {
            let part = Part { continues, is_continued };
            let item = Item { hop: hop(7, 1, 2), bytes: &[5; 100], segment_bytes, part };
            let mut bytes = vec![0; 500];
            let length = put(&mut bytes, &Header::default(), [item].into_iter());
            let message = Message::check(&bytes[..length]).unwrap();
            let found: Vec<Entry> = message.entries().collect();
            assert_eq!(found, [Entry { hop: item.hop, offset: 24, bytes: 100, segment_bytes, part }]);
            let length = put(&mut bytes, &Header::default(), [item, item].into_iter());
            assert_eq!(Message::check(&bytes[..length]).unwrap_err().what, "a descriptor");
        }
    }

    #[test]
    fn a_filler_is_a_message_without_packets() {
        for bytes in [HEADER_BYTES, 48, 5000] {
            let mut filler = vec![1; bytes];
            put_filler(&mut filler);
            let message = Message::check(filler.as_slice()).unwrap();
            assert!(message.is_filler() && message.entries().next().is_none());
        }
    }

    #[test]
    fn packets_fit_in_a_message_up_to_its_limits() {
        assert_eq!(fit(15, [1].into_iter()), (0, 16));
        assert_eq!(fit(16 + 8 + 46, [46, 46].into_iter()), (1, 70));
        assert_eq!(fit(100_000, [46; 70].into_iter()), (64, 16 + 64 * 54));
    }

    #[test]
    fn every_invalid_byte_of_a_header_is_detected() {
        for (at, value, what) in [
            (0, 0, "a magic"),
            (1, 1, "a version"),
            (2, 65, "a number of packets"),
            (2, 2, "a length without its packets"),
            (3, 2, "a number of packets"),
            (12, 0, "a stated length"),
            (16, 47, "a packet's length"),
            (18, 8, "a descriptor"),
            (18, 0x41, "a descriptor"),
            (18, 0x81, "a descriptor"),
        ] {
            let mut bytes = three();
            bytes[at] = value;
            let found = Message::check(bytes.as_slice());
            let found = found.map_err(|error| error.what);
            // One more byte of the first packet shifts the others: the last one is truncated.
            assert_eq!(found, Err(what), "byte {at} of {value}");
        }
    }

    proptest! {
        #[test]
        fn packets_of_an_arbitrary_message_lie_within_it(mut bytes in three_corrupted()) {
            let length = bytes.len() as u32;
            if bytes.len() >= HEADER_BYTES && bytes[3] & 4 == 0 {
                bytes[12..16].copy_from_slice(&length.to_le_bytes());
            }
            if let Ok(message) = Message::check(bytes.as_slice()) {
                let end = message.entries().map(|entry| entry.offset + entry.bytes).max().unwrap_or(0);
                prop_assert!(end <= bytes.len());
                prop_assert!(message.entries().all(|entry| entry.bytes > 0 && entry.hop.node.0 < NODES_MAX));
            }
        }
    }

    fn three_corrupted() -> impl Strategy<Value = Vec<u8>> {
        let changes = proptest::collection::vec((0_usize..60, any::<u8>()), 0..4);
        (changes, 0_usize..2000).prop_map(|(changes, length)| {
            let mut bytes = three();
            for (at, value) in changes {
                bytes[at] = value;
            }
            bytes.truncate(length);
            bytes
        })
    }
}
