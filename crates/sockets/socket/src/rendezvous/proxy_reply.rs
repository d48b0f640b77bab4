//! The reply of a proxy to a program that connects to a listener of another node.
//!
//! ```text
//!    0  magic            "XLREPLY" and a zero
//!    8  version          of this and of the segment's layout
//!   12  error            0, or the error number that refuses the connection
//!   16  flags            as in a handshake; 1: the connection is in the memory whose descriptor is attached
//!   24  inbound          offset of the connecting endpoint's span
//!   32  outbound         offset of the accepting endpoint's span
//!   40  model            the model of a modelled link
//! ```

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use segment::LAYOUT_VERSION;
use segment::model::{LinkModel, MODEL_BYTES};

use super::handshake::WindowSpans;
use super::local::send_with_descriptor;

pub(super) const REPLY_BYTES: usize = MODEL_OFFSET + MODEL_BYTES;
const MODEL_OFFSET: usize = 40;
const MAGIC: u64 = u64::from_ne_bytes(*b"XLREPLY\0");

/// The result of a connection to another node, from the proxy to the program that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyReply {
    /// The listener has accepted the connection: its spans, if it is not in the memory that the program has created.
    Accepted(Option<WindowSpans>),
    /// The connection was refused, with the error that TCP would have returned.
    Refused(Errno),
}

impl ProxyReply {
    fn encode(self) -> [u8; REPLY_BYTES] {
        let (error, spans) = match self {
            Self::Accepted(spans) => (0, spans),
            Self::Refused(errno) => (errno.raw_os_error(), None),
        };
        let flags = u64::from(WindowSpans::flags(spans));
        let spans = spans.unwrap_or(WindowSpans::new(0, 0));
        let mut bytes = [0_u8; REPLY_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_ne_bytes());
        bytes[12..16].copy_from_slice(&error.to_ne_bytes());
        bytes[16..24].copy_from_slice(&flags.to_ne_bytes());
        bytes[24..32].copy_from_slice(&spans.inbound_offset.to_ne_bytes());
        bytes[32..MODEL_OFFSET].copy_from_slice(&spans.outbound_offset.to_ne_bytes());
        bytes[MODEL_OFFSET..].copy_from_slice(&LinkModel::encode(spans.model));
        bytes
    }

    /// Decodes a reply; `None` for any bytes that [`ProxyReply::encode`] does not write.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
        let error = i32::from_ne_bytes(bytes.get(12..16)?.try_into().ok()?);
        let model = bytes.get(MODEL_OFFSET..)?.first_chunk().and_then(LinkModel::decode);
        let flags = u32::try_from(word(16)?).ok()?;
        let (alignment, caching) = (WindowSpans::alignment_in(flags), WindowSpans::caching_in(flags));
        let spans = WindowSpans { inbound_offset: word(24)?, outbound_offset: word(32)?, alignment, caching, model };
        let reply = match error {
            0 => Self::Accepted((flags != 0).then_some(spans)),
            1..=4095 => Self::Refused(Errno::from_raw_os_error(error)),
            _ => return None,
        };
        (reply.encode() == bytes).then_some(reply)
    }
}

/// Sends the reply to a program that has connected to another node's listener. `memory` is the memory of the windows,
/// if the connection is in them.
///
/// # Errors
/// Those of sendmsg; `PIPE` if the program has gone.
pub fn send_reply(lifeline: BorrowedFd<'_>, reply: ProxyReply, memory: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    send_with_descriptor(lifeline, &reply.encode(), memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use volmem::Alignment;

    proptest! {
        #[test]
        fn other_bytes_are_not_replies(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            prop_assert_eq!(ProxyReply::decode(&bytes), None);
        }

        #[test]
        fn replies_survive_encoding(inbound_offset: u64, outbound_offset: u64, errno in 1..4096_i32) {
            let spans = WindowSpans::new(inbound_offset, outbound_offset);
            let aligned = WindowSpans { alignment: Alignment::new(1 << 30), ..spans };
            let refused = ProxyReply::Refused(Errno::from_raw_os_error(errno));
            let accepted = [None, Some(spans), Some(aligned)].map(ProxyReply::Accepted);
            for reply in accepted.into_iter().chain([refused]) {
                prop_assert_eq!(ProxyReply::decode(&reply.encode()), Some(reply));
            }
        }
    }
}
