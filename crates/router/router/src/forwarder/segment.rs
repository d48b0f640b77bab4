//! Segmentation of large packets that cannot leave as they are.

use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::{PORTS_MAX, Packet, PortId};

impl Forwarder {
    /// Returns whether the device of a port takes large packets.
    pub(super) fn takes_large(&self, port: PortId) -> bool {
        let state = &self.ports[usize::from(port.0 % PORTS_MAX)];
        state.config.as_ref().is_some_and(|config| config.takes_large)
    }

    /// Passes each segment of a large packet, from its IP header on, to `each`. Without a buffer the rest is dropped:
    /// its sender retransmits it.
    pub(super) fn segment(
        &mut self,
        ctx: &mut Context<'_>,
        packet: Packet,
        origin: Origin,
        mut each: impl FnMut(&mut Forwarder, &mut Context<'_>, Packet),
    ) {
        let Some(mut segments) = ctx.pool.segments(&packet, 0) else {
            return self.discard(ctx, packet, origin, DropReason::TotalLength);
        };
        while let Some(bytes) = segments.next_bytes() {
            match ctx.pool.alloc_segment(&packet, &mut segments, bytes) {
                Some(segment) => each(self, ctx, segment),
                None => return self.discard(ctx, packet, origin, DropReason::NoBuffer),
            }
        }
        ctx.pool.free(packet);
    }
}
