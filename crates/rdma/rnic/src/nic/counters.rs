//! The counters of a NIC.

use sim::Span;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the NIC was created. Every packet that is dropped is counted under the reason.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NicCounters {
            $($(#[$doc])* pub $name: u64,)*
            /// Time that the slow path's software was busy.
            pub software_busy: Span,
        }

        impl NicCounters {
            /// Returns the names and values of the counters, for tables.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets sent.
    sent_packets,
    /// Payload bytes sent.
    sent_bytes,
    /// Packets retransmitted.
    retransmitted_packets,
    /// Duplicate packets received: retransmitted although the first copy had arrived.
    duplicate_packets,
    /// Packets retransmitted although the first copy was only late, as the sender found out.
    spurious_packets,
    /// Packets received.
    received_packets,
    /// Payload bytes accepted, without duplicates.
    received_bytes,
    /// Packets received without their payload (packet trimming).
    trimmed_packets,
    /// Packets that arrived before one that was sent earlier.
    out_of_order_packets,
    /// Retransmission timeouts.
    timeouts,
    /// Tail loss probes sent.
    probes,
    /// RNR NAKs sent.
    rnr_naks_sent,
    /// Congestion notification packets sent.
    cnps_sent,
    /// Drops: the queue pair does not exist.
    drop_unknown_qp,
    /// Drops: the state of the queue pair does not allow receiving.
    drop_state,
    /// Drops: another transport service, or an operation that the queue pair does not accept.
    drop_service,
    /// Drops: the sender is not the peer.
    drop_source,
    /// Drops: wrong queue key.
    drop_queue_key,
    /// Drops: inconsistent headers.
    drop_malformed,
    /// Drops: a response or acknowledgement that matches no request.
    drop_unsolicited,
    /// Drops: a message of an unreliable service that exceeds its receive request.
    drop_long,
    /// Drops: beyond the receive window.
    drop_beyond_window,
    /// Drops: out of order where order is required.
    drop_out_of_order,
    /// Drops: a READ or atomic request while the maximum number of responses is pending.
    drop_too_many,
    /// Drops: no receive request posted.
    drop_no_receive,
    /// Drops: the control queue was full.
    drop_control_queue,
    /// Headers processed by the slow path's software.
    slow_headers,
    /// Times that the receive side of a queue pair entered the slow path.
    slow_entries,
    /// Times that it returned to hardware.
    slow_returns,
    /// Times that the return was refused, because hardware had queued more packets.
    slow_returns_refused,
    /// Work requests fetched.
    wqes_fetched,
    /// Work requests fetched but not used.
    wqes_dropped,
    /// Drops: no room for a packet whose context is not on chip.
    drop_parking,
    /// Packets that waited in the receive buffer for their context.
    parked_packets,
    /// Contexts read from the host's memory into the pool.
    contexts_fetched,
    /// Contexts written back to the host's memory.
    contexts_written_back,
    /// Accesses to a context that was on chip.
    cache_hits,
    /// Accesses to a context that was not on chip.
    cache_misses,
}
