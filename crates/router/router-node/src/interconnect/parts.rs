//! Packets as entries of messages, and large packets that are sent in parts, each of which is a message.

use router::batch::Parcel;
use router::batch::message::{self, Entry, Header, Item, MessageError, Part, Source};
use router::{NodeId, Packet, Pool};
use sim::Time;

use super::carrier::{Carrier, CarrierError};
use super::mesh_peer::Peer;

/// Returns a queued packet as an entry of a message.
pub(super) fn item<'a>(pool: &'a Pool, (hop, packet): &Parcel, part: Part) -> Item<'a> {
    Item { hop: *hop, bytes: pool.bytes(packet), segment_bytes: packet.segment_bytes(), part }
}

/// Sends a part of the oldest packet, a large one that is longer than a message: as much as fits. Returns its length;
/// `None` if there is no room now.
pub(super) fn send_part<C: Carrier>(
    carrier: &mut C,
    peer: &mut Peer,
    pool: &mut Pool,
    (now, node): (Time, NodeId),
    header: &Header,
) -> Result<Option<usize>, CarrierError> {
    let Some(oldest) = peer.batcher.waiting().next() else { return Ok(None) };
    let whole = item(pool, &oldest.item, Part { continues: peer.is_begun, is_continued: false });
    let bytes = whole.bytes.len().min(carrier.part_bytes_max(node) - message::length(1, 0));
    let is_continued = bytes < whole.bytes.len();
    let part = Part { is_continued, ..whole.part };
    let part = Item { bytes: &whole.bytes[..bytes], part, ..whole };
    if carrier.send(node, header, std::iter::once(part))? == 0 {
        return Ok(None);
    }
    if is_continued && let Some((_, packet)) = peer.batcher.shorten_oldest(bytes as u16) {
        pool.trim_front(packet, bytes as u16);
    } else if let Some(sent) = peer.batcher.pop() {
        pool.free(sent.item.1);
    }
    peer.note_acked();
    peer.is_begun = is_continued;
    peer.note_sent(now, (1, usize::from(!is_continued)), bytes, false);
    Ok(Some(bytes))
}

/// Copies a packet, or a part of one, out of a message, and returns the packet once it is complete. Without a buffer,
/// and after the loss of a part, the packet is dropped.
pub(super) fn receive_entry(
    peer: &mut Peer,
    pool: &mut Pool,
    entry: &Entry,
    source: &(impl Source + ?Sized),
) -> Result<Option<Packet>, MessageError> {
    let mut packet = match (peer.partial.take(), entry.part.continues) {
        // A part after a lost one.
        (None, true) => return Ok(None),
        (Some((_, packet)), true) => packet,
        (partial, false) => {
            partial.into_iter().for_each(|(_, packet)| pool.free(packet));
            let is_short = entry.part.is_whole() && entry.bytes <= pool.bytes_max();
            let Some(packet) = (if is_short { pool.alloc() } else { pool.alloc_large() }) else {
                peer.counters.drop_no_buffer += 1;
                return Ok(None);
            };
            packet
        }
    };
    let (begin, end) = (packet.len(), packet.len() + entry.bytes);
    if end > pool.large_bytes_max().max(pool.bytes_max()) {
        pool.free(packet);
        return Err(MessageError { what: "a packet's length", value: end as u64 });
    }
    pool.resize(&mut packet, end);
    source.read(entry.offset, &mut pool.bytes_mut(&packet)[begin..]);
    if entry.part.is_continued {
        peer.partial = Some((entry.hop, packet));
        return Ok(None);
    }
    if entry.segment_bytes != 0 && !pool.set_large(&mut packet, 0, entry.segment_bytes) {
        pool.free(packet);
        return Err(MessageError { what: "segments", value: u64::from(entry.segment_bytes) });
    }
    Ok(Some(packet))
}
