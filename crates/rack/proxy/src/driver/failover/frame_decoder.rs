//! Frames in a byte stream, one after another, each as long as its header says. The stream is hostile.

use crate::frame::{FrameError, FrameHeader, FrameKind, HEADER_BYTES};
use fabric::{Inbound, Outbound};
use lane::{Corrupt, Producer};
use thiserror::Error;

/// Bytes that are received from a stream at once.
const CHUNK_BYTES: usize = 64 << 10;

/// Why a stream cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum StreamError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// An error of this process's own lane.
    #[error("own lane: {0}")]
    Lane(#[from] Corrupt),
}

/// Decodes a stream into the records of a lane. Payload of `Data` frames is passed on in pieces; other frames are
/// short.
#[derive(Debug, Default)]
pub(super) struct FrameDecoder {
    bytes: Vec<u8>,
    /// Bytes that are decoded already.
    consumed: usize,
    /// The remainder of a `Data` frame that has not arrived.
    partial: Option<FrameHeader>,
}

impl FrameDecoder {
    /// Receives more of the stream: `receive` fills a buffer and returns the number of bytes.
    pub(super) fn fill<E>(&mut self, receive: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<usize, E> {
        self.bytes.drain(..self.consumed);
        self.consumed = 0;
        let before = self.bytes.len();
        self.bytes.resize(before + CHUNK_BYTES, 0);
        let received = receive(&mut self.bytes[before..]);
        self.bytes.truncate(before + received.as_ref().copied().unwrap_or(0));
        received
    }

    /// Publishes complete frames until the lane is full. Returns whether there were any.
    pub(super) fn decode<O: Outbound, I: Inbound>(&mut self, to: &mut Producer<O, I>) -> Result<bool, StreamError> {
        let mut progressed = false;
        while self.decode_one(to)? {
            progressed = true;
        }
        Ok(progressed)
    }

    /// Returns whether bytes are left that a further [`FrameDecoder::decode`] may publish.
    pub(super) fn has_pending(&self) -> bool {
        let left_bytes = self.bytes.len() - self.consumed;
        left_bytes >= HEADER_BYTES || (self.partial.is_some() && left_bytes > 0)
    }

    fn decode_one<O: Outbound, I: Inbound>(&mut self, to: &mut Producer<O, I>) -> Result<bool, StreamError> {
        let left = &self.bytes[self.consumed..];
        if let Some(partial) = &mut self.partial {
            let wanted_bytes = partial.len_bytes.min(left.len());
            let draft = if wanted_bytes > 0 { to.draft(HEADER_BYTES + wanted_bytes)? } else { None };
            let Some(mut draft) = draft.filter(|draft| draft.room_bytes() > HEADER_BYTES) else { return Ok(false) };
            let len_bytes = draft.room_bytes() - HEADER_BYTES;
            draft.append(&FrameHeader { len_bytes, ..*partial }.encode());
            draft.append(&left[..len_bytes]);
            draft.publish();
            self.consumed += len_bytes;
            partial.len_bytes -= len_bytes;
            partial.aux = partial.aux.wrapping_add(len_bytes as u32);
            if partial.len_bytes == 0 {
                self.partial = None;
            }
            return Ok(true);
        }
        let Some((bytes, payload)) = left.split_first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let header = FrameHeader::decode_alone(bytes)?;
        if header.kind == FrameKind::Data {
            self.partial = Some(header);
            self.consumed += HEADER_BYTES;
            return Ok(true);
        }
        let record_bytes = HEADER_BYTES + header.len_bytes;
        if payload.len() < header.len_bytes {
            return Ok(false);
        }
        // A short record fits wherever there is any room.
        let Some(mut draft) = to.draft(record_bytes)? else { return Ok(false) };
        draft.append(&left[..record_bytes]);
        draft.publish();
        self.consumed += record_bytes;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::ConnectionNumber;
    use fabric::heap::{self, HeapLink};
    use fabric::{Link, train_both};
    use lane::{Consumer, Layout};
    use proptest::prelude::*;

    type LaneEnds<L> =
        (Producer<<L as Link>::Outbound, <L as Link>::Inbound>, Consumer<<L as Link>::Inbound, <L as Link>::Outbound>);

    /// Returns both ends of a lane of 8 slots.
    fn lane() -> LaneEnds<HeapLink> {
        let layout = Layout::packed(8, 0);
        let (mut a, mut b) = heap::pair(layout.window_bytes().next_multiple_of(64));
        assert!(train_both(&mut a, &mut b));
        let to = Producer::new(a.outbound(), a.inbound(), layout, 7);
        (to, Consumer::new(b.inbound(), b.outbound(), layout, 7))
    }

    /// Passes a stream through a decoder in pieces. Returns the records, one after another.
    fn through(stream: &[u8], piece_bytes: usize) -> Result<Vec<u8>, StreamError> {
        let (mut to, mut from) = lane();
        let (mut decoder, mut out) = (FrameDecoder::default(), Vec::new());
        for piece in stream.chunks(piece_bytes) {
            let filled: Result<usize, ()> = decoder.fill(|room| {
                room[..piece.len()].copy_from_slice(piece);
                Ok(piece.len())
            });
            assert_eq!(filled, Ok(piece.len()));
            while decoder.decode(&mut to)? {
                while let Some(chunk) = from.peek().expect("this process's lane") {
                    let mut record = vec![0; chunk.len_bytes];
                    from.span(chunk).read(&mut record);
                    from.consume(chunk.len_bytes).expect("this process's lane");
                    out.extend(record);
                }
            }
        }
        Ok(out)
    }

    /// Returns frames as (connection, kind, position, bytes), with adjacent bytes of one stream joined.
    fn joined(mut records: &[u8]) -> Vec<(u32, FrameKind, u32, Vec<u8>)> {
        let mut frames: Vec<(u32, FrameKind, u32, Vec<u8>)> = Vec::new();
        while let Some((header, rest)) = records.split_first_chunk::<HEADER_BYTES>() {
            let header = FrameHeader::decode_alone(header).expect("a frame");
            let (payload, rest) = rest.split_at(header.len_bytes);
            records = rest;
            match frames.last_mut() {
                Some((connection, FrameKind::Data, at, bytes))
                    if header.kind == FrameKind::Data
                        && *connection == header.connection.0
                        && at.wrapping_add(bytes.len() as u32) == header.aux =>
                {
                    bytes.extend(payload);
                }
                _ => frames.push((header.connection.0, header.kind, header.aux, payload.to_vec())),
            }
        }
        frames
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn frames_are_decoded_alike_however_the_stream_is_split(
            frames in prop::collection::vec((0..3_u32, any::<bool>(), any::<u32>(), 1..3000_usize), 0..30),
            piece in 1..5000_usize,
        ) {
            let mut stream = Vec::new();
            for (connection, is_data, aux, len_bytes) in frames {
                let (kind, len_bytes) =
                    if is_data { (FrameKind::Data, len_bytes) } else { (FrameKind::Open, 1 + len_bytes % 32) };
                stream.extend(FrameHeader { connection: ConnectionNumber(connection), kind, len_bytes, aux }.encode());
                stream.extend((0..len_bytes).map(|at| at as u8));
            }
            let out = through(&stream, piece).expect("good frames");
            prop_assert_eq!(joined(&out), joined(&stream));
        }

        #[test]
        fn a_stream_of_any_bytes_gives_frames_or_an_error(
            stream in prop::collection::vec(any::<u8>(), 0..300), piece in 1..50_usize
        ) {
            if let Ok(out) = through(&stream, piece) {
                joined(&out);
            }
        }
    }

    #[test]
    fn an_invalid_stream_is_an_error() {
        let mut header = FrameHeader::control(ConnectionNumber(1), FrameKind::Credit, 2).encode();
        header[4] = 77;
        assert_eq!(through(&header, 16), Err(StreamError::Frame(FrameError::Kind(77))));
        let mut header =
            FrameHeader { connection: ConnectionNumber(1), kind: FrameKind::Data, len_bytes: 9, aux: 0 }.encode();
        header[11] = 0xFF;
        assert!(matches!(through(&header, 16), Err(StreamError::Frame(FrameError::Payload { .. }))));
    }
}
