//! What a NIC counts.

use sim::Span;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a NIC counted since it began. Drops say why; nothing that a peer sends goes uncounted.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NicCounters {
            $($(#[$doc])* pub $name: u64,)*
            /// Time that the slow path's software worked.
            pub software_busy: Span,
        }

        impl NicCounters {
            /// Names and values of the counts, for tables.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets sent, of any kind.
    sent_packets,
    /// Bytes of payload sent.
    sent_bytes,
    /// Packets sent again.
    sent_again_packets,
    /// Packets that were sent again though the first one arrived, as the receiver found.
    duplicate_packets,
    /// Packets sent again though the first one was only late, as the sender found.
    spurious_packets,
    /// Packets received, of any kind.
    received_packets,
    /// Bytes of payload taken in, once each.
    received_bytes,
    /// Packets received without the payload that they left with.
    trimmed_packets,
    /// Packets that came before one that was sent earlier.
    out_of_order_packets,
    /// Times that a sender lost patience.
    timeouts,
    /// Probes sent to learn what arrived.
    probes,
    /// Receivers that were not ready.
    not_ready,
    /// Congestion notifications sent.
    notifications,
    /// Drops: no such queue pair.
    drop_unknown_qp,
    /// Drops: a queue pair in a state that does not receive.
    drop_state,
    /// Drops: of another service, or no packet for this queue pair's kind.
    drop_service,
    /// Drops: not from the peer.
    drop_source,
    /// Drops: the wrong queue key.
    drop_queue_key,
    /// Drops: headers that make no sense together.
    drop_malformed,
    /// Drops: an answer to nothing that was asked.
    drop_unasked,
    /// Drops: a message of an unreliable service that is longer than its receive request.
    drop_long,
    /// Drops: too far ahead of what is expected.
    drop_beyond_window,
    /// Drops: out of order, where order is needed.
    drop_out_of_order,
    /// Drops: a request that waits for a request before it, of which there are too many.
    drop_too_many,
    /// Drops: no receive request posted.
    drop_no_receive,
    /// Drops: the control queue was full.
    drop_control_queue,
    /// Headers that the slow path's software looked at.
    slow_headers,
    /// Times that a queue pair's receiving went to the slow path.
    slow_entries,
    /// Times that it came back.
    slow_returns,
    /// Times that it could not come back yet: hardware had seen more.
    slow_returns_refused,
    /// Work requests fetched.
    wqes_fetched,
    /// Work requests fetched in vain.
    wqes_dropped,
    /// Drops: no room for a packet whose context is away.
    drop_parking,
    /// Packets that waited for their context in the receive buffer.
    parked_packets,
    /// Contexts read from the host's memory into the pool.
    contexts_fetched,
    /// Contexts written back to the host's memory.
    contexts_written_back,
    /// Uses of a context that lay on chip.
    cache_hits,
    /// Uses of a context that did not.
    cache_misses,
}
