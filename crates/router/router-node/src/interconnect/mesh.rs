//! An interconnect over any carrier: batching, acknowledgements, detours, and counters.

use std::os::fd::BorrowedFd;

use packet::{flow, ipv4, ipv6};
use router::balance::{Balancer, LinkLoad, Thresholds};
use router::batch::message::{self, Header, Message, MessageError, Part, Source};
use router::batch::{BatchTarget, Occupancy, PACKETS_MAX, Parcel, Policy};
use router::{NODES_MAX, NodeId, Pool};
use sim::{Span, Time};

use super::carrier::{Ack, Carrier, CarrierError, FlowLimits, MessageSink};
use super::interface::{
    ConnectionParams, Interconnect, InterconnectError, InterconnectSettings, Offer, PeerCounters, PeerState, random_u64,
};
use super::mesh_peer::{ACK_REQUEST_INTERVAL, Peer, SAMPLES_INITIAL};
use super::parts::{item, receive_entry, send_part};

const NODES: usize = NODES_MAX as usize;
/// An acknowledgement message is sent after this many packets.
const ACK_AFTER_PACKETS: u32 = 16;
/// A delayed acknowledgement is sent after this time (compare RFC 1122, section 4.2.3.2). It is short enough not to
/// stall a sender.
const ACK_DELAY: Span = Span::from_ps(20_000_000);
/// Maximum interval between polls of an acknowledgement word while messages are in flight: the peer may have become
/// busy.
const ACK_POLL_INTERVAL: Span = Span::from_ps(100_000_000);
/// The occupancy that a peer reported is used for this long: a peer that receives nothing does not update it.
const OCCUPANCY_AGE_MAX: Span = Span::from_ps(1_000_000_000);
/// Received bytes after which an acknowledgement is sent even within a poll: a sender with a full window would
/// otherwise wait for the end of the poll, which receives up to a window.
fn unacked_bytes_max(limits: &FlowLimits) -> u64 {
    limits.bytes_max / 4
}

/// Returns whether a new acknowledgement could change the decision to send the waiting packets. `by_peer` is the batch
/// size by the last known acknowledgement; the current one can only lower it. The decision does not change when a full
/// message waits, nor when too few packets wait for the occupancy of either node, which is polled every
/// [`ACK_POLL_INTERVAL`]. Polling is avoided because the word lies in a cache line that two cores share: reading it
/// takes as long as several packets do.
fn depends_on_ack(waiting: usize, by_peer: usize, by_occupancy: usize) -> bool {
    by_peer > by_occupancy && (by_occupancy..PACKETS_MAX).contains(&waiting)
}

/// Receives messages: packets for this node, and those to be relayed.
struct ReceiveContext<'a> {
    own: NodeId,
    now: Time,
    limits: &'a FlowLimits,
    /// A peer that needs an acknowledgement now, because much of its window is in flight.
    ack_now: Option<NodeId>,
    occupancy: &'a mut Occupancy,
    pool: &'a mut Pool,
    peers: &'a mut [Peer; NODES],
    arrived: &'a mut Vec<Parcel>,
    relayed: &'a mut Vec<Parcel>,
}

impl MessageSink for ReceiveContext<'_> {
    fn receive(
        &mut self,
        from: NodeId,
        message: &Message,
        source: &(impl Source + ?Sized),
    ) -> Result<(), MessageError> {
        if message.is_filler() {
            return Ok(());
        }
        let peer = &mut self.peers[usize::from(from.0)];
        if self.limits.acks_in_messages {
            let Header { ack, occupancy, .. } = message.header;
            peer.process_ack(self.now, Ack { number: ack, occupancy })?;
        }
        let has_lost = peer.receive_message(self.now, &message.header, message.packets())?;
        if has_lost && let Some((_, packet)) = peer.partial.take() {
            self.pool.free(packet);
        }
        let mut bytes = 0;
        for entry in message.entries() {
            bytes += entry.bytes;
            let Some(packet) = receive_entry(peer, self.pool, &entry, source)? else { continue };
            let is_own = entry.hop.node == self.own;
            let parcels = if is_own { &mut *self.arrived } else { &mut *self.relayed };
            peer.counters.received_packets += 1;
            peer.counters.relayed_packets += u64::from(!is_own);
            parcels.push((entry.hop, packet));
        }
        peer.unacked_bytes += bytes as u64;
        if message.packets() > 0 {
            self.occupancy.note_received(message.packets(), bytes);
        }
        if self.limits.acks_in_messages && peer.unacked_bytes >= unacked_bytes_max(self.limits) {
            self.ack_now = Some(from);
        }
        Ok(())
    }
}

/// Returns the flow hash of a packet; 0 if it cannot be parsed.
fn flow_hash(packet: &[u8], seed: u64) -> u32 {
    match packet.first().map(|first| first >> 4) {
        Some(4) => ipv4::Packet::new_checked(packet).map_or(0, |packet| flow::hash_v4(&packet, seed)),
        Some(6) => ipv6::Packet::new_checked(packet).map_or(0, |packet| flow::hash_v6(&packet, seed)),
        _ => 0,
    }
}

fn balancer(own: NodeId, settings: &InterconnectSettings, flow_seed: u64) -> Balancer {
    let thresholds = Thresholds { hot_packets: settings.queue_packets / 4, flowlet_gap: settings.flowlet_gap };
    Balancer::new(own, thresholds, flow_seed)
}

/// An interconnect over a carrier.
pub(super) struct Mesh<C> {
    own: NodeId,
    settings: InterconnectSettings,
    is_adaptive: bool,
    occupancy: Occupancy,
    carrier: C,
    limits: FlowLimits,
    peers: [Peer; NODES],
    balancer: Balancer,
    flow_seed: u64,
    relayed: Vec<Parcel>,
}

impl<C: Carrier> Mesh<C> {
    pub(super) fn new(own: NodeId, settings: InterconnectSettings, carrier: C) -> Result<Self, InterconnectError> {
        let flow_seed = random_u64()?;
        let limits = carrier.limits();
        Ok(Self {
            own,
            settings,
            is_adaptive: matches!(settings.policy, Policy::Adaptive { .. }),
            occupancy: Occupancy::new(limits.transfer),
            limits,
            carrier,
            peers: std::array::from_fn(|_| Peer::new(&settings, &limits)),
            balancer: balancer(own, &settings, flow_seed),
            flow_seed,
            relayed: Vec::new(),
        })
    }

    fn peer_mut(&mut self, node: NodeId) -> Result<&mut Peer, InterconnectError> {
        let fault = |what, remedy| InterconnectError::Node { node: node.0, what, remedy };
        if node == self.own {
            return Err(fault("is this node itself", "connect to other nodes"));
        }
        let peer = self.peers.get_mut(usize::from(node.0));
        peer.ok_or_else(|| fault("exceeds the maximum number of nodes", "use 0 to 7"))
    }

    fn new_peer(&mut self, node: NodeId) -> Result<(), InterconnectError> {
        let (settings, limits) = (self.settings, self.limits);
        let peer = self.peer_mut(node)?;
        if peer.state != PeerState::Absent {
            let (what, remedy) = ("is connected already", "remove it first");
            return Err(InterconnectError::Node { node: node.0, what, remedy });
        }
        *peer = Peer {
            counters: peer.counters,
            submitted: peer.submitted,
            completed: peer.submitted,
            ..Peer::new(&settings, &limits)
        };
        Ok(())
    }

    /// Ignores a peer from now on, after an error. Other peers are not affected.
    fn fail_peer(&mut self, pool: &mut Pool, node: NodeId) {
        self.carrier.remove_peer(node);
        self.drop_waiting(pool, node);
        self.peers[usize::from(node.0)].state = PeerState::Broken;
    }

    fn drop_waiting(&mut self, pool: &mut Pool, node: NodeId) {
        let peer = &mut self.peers[usize::from(node.0)];
        while let Some(queued) = peer.batcher.pop() {
            pool.free(queued.item.1);
            peer.counters.drop_absent += 1;
        }
        peer.partial.take().into_iter().for_each(|(_, packet)| pool.free(packet));
        peer.is_begun = false;
        peer.completed = peer.submitted;
    }

    fn enqueue(&mut self, now: Time, pool: &mut Pool, to: NodeId, parcel: Parcel) {
        let bytes = pool.bytes(&parcel.1).len();
        let fits = message::length(1, bytes) <= self.limits.message_bytes_max || parcel.1.is_large();
        let peer = &mut self.peers[usize::from(to.0)];
        if peer.state != PeerState::Up {
            peer.counters.drop_absent += 1;
            return pool.free(parcel.1);
        }
        if !fits || bytes == 0 {
            peer.counters.drop_long += 1;
            return pool.free(parcel.1);
        }
        match peer.batcher.push(now, bytes as u16, parcel) {
            Ok(()) => peer.submitted += 1,
            Err((_, packet)) => {
                peer.counters.drop_full += 1;
                pool.free(packet);
            }
        }
    }

    fn loads(&self) -> [LinkLoad; NODES] {
        std::array::from_fn(|node| {
            let peer = &self.peers[node];
            let (queued, is_up) = (peer.batcher.len(), peer.state == PeerState::Up);
            LinkLoad { is_up, queued, submitted: peer.submitted, completed: peer.completed }
        })
    }

    /// Queues packets for a node whose link is, or was, congested.
    fn enqueue_balanced(&mut self, now: Time, pool: &mut Pool, to: NodeId, parcels: &mut Vec<Parcel>) {
        for parcel in parcels.drain(..) {
            let hash = flow_hash(pool.bytes(&parcel.1), self.flow_seed);
            let loads = self.loads();
            let via = self.balancer.next_node(now, to, hash, &loads);
            self.peers[usize::from(to.0)].counters.detoured_packets += u64::from(via != to);
            self.enqueue(now, pool, via, parcel);
        }
    }

    /// Sends what is due to a peer. Returns whether anything was sent.
    fn dispatch(&mut self, now: Time, pool: &mut Pool, node: NodeId) -> bool {
        match self.send_due(now, pool, node) {
            Ok(true) => {
                self.carrier.flush(node);
                true
            }
            Ok(false) => false,
            Err(_) => {
                self.fail_peer(pool, node);
                true
            }
        }
    }

    fn send_due(&mut self, now: Time, pool: &mut Pool, node: NodeId) -> Result<bool, CarrierError> {
        let mut has_sent = false;
        // Each iteration sends at least one packet.
        for _ in 0..self.settings.queue_packets {
            let batch_target = self.batch_target(now, node)?;
            let due = self.peers[usize::from(node.0)].batcher.due(now, batch_target);
            if due == 0 {
                break;
            }
            let sent = self.send_batch(now, pool, node, due)?;
            has_sent |= sent > 0;
            if sent < due {
                break;
            }
        }
        Ok(has_sent)
    }

    /// Returns this node's occupancy as its messages encode it, see [`Header::occupancy`].
    fn encoded_occupancy(&self) -> u8 {
        (self.occupancy.batch_packets_min() - 1) as u8
    }

    /// Returns the batch size by the packets in flight and by the occupancy of both nodes, and the maximum length.
    fn batch_target(&mut self, now: Time, node: NodeId) -> Result<BatchTarget, CarrierError> {
        if self.should_poll_ack(now, node) {
            self.poll_ack(now, node)?;
        }
        let peer = &self.peers[usize::from(node.0)];
        let by_occupancy = self.by_occupancy(now, peer);
        let by_in_flight = peer.by_in_flight(&self.limits);
        Ok(BatchTarget { by_occupancy, by_in_flight, bytes_max: self.occupancy.message_bytes_max(by_occupancy) })
    }

    /// Returns the batch size by the occupancy of this node, and that of the peer as it reports it.
    fn by_occupancy(&self, now: Time, peer: &Peer) -> usize {
        let is_recent = now.since(peer.occupancy_at) < OCCUPANCY_AGE_MAX;
        let by_peer = if is_recent { 1 + usize::from(peer.occupancy) } else { 1 };
        self.occupancy.batch_packets_min().max(by_peer)
    }

    /// Returns whether to read the acknowledgement word of a peer.
    fn should_poll_ack(&self, now: Time, node: NodeId) -> bool {
        let peer = &self.peers[usize::from(node.0)];
        if self.limits.acks_in_messages || peer.in_flight.is_empty() {
            return false;
        }
        let is_half_full = peer.in_flight.len() >= self.limits.messages_max / 2;
        if !self.is_adaptive || is_half_full {
            return is_half_full;
        }
        let own_min = self.occupancy.batch_packets_min();
        if own_min == PACKETS_MAX {
            // This node sends only full messages, whatever the peer reports.
            return false;
        }
        // A busy node does not spend time on measurements.
        let learns = peer.timed.is_some() || peer.samples < SAMPLES_INITIAL;
        learns && own_min == 1
            || now.since(peer.ack_requested_at) >= ACK_POLL_INTERVAL
            || depends_on_ack(peer.batcher.len(), peer.by_in_flight(&self.limits), self.by_occupancy(now, peer))
    }

    /// Sends the `due` oldest packets in as many messages as needed. Returns the number of packets sent.
    fn send_batch(&mut self, now: Time, pool: &mut Pool, node: NodeId, due: usize) -> Result<usize, CarrierError> {
        let occupancy = self.encoded_occupancy();
        let may_time = self.is_adaptive && self.occupancy.batch_packets_min() == 1;
        let peer = &mut self.peers[usize::from(node.0)];
        let mut done = 0;
        while done < due && peer.has_window(&self.limits) {
            let header = Header { sequence: peer.sent, ack: peer.received, requests_ack: false, occupancy };
            let oldest_bytes = peer.batcher.waiting().next().map_or(0, |queued| usize::from(queued.bytes));
            if peer.is_begun || message::length(1, oldest_bytes) > self.limits.message_bytes_max {
                match send_part(&mut self.carrier, peer, pool, (now, node), &header)? {
                    Some(bytes) => self.occupancy.note_sent(1, bytes),
                    None => break,
                }
                done += usize::from(!peer.is_begun);
                continue;
            }
            let waiting = peer.batcher.waiting().take(due - done);
            let packets = waiting.map(|queued| item(pool, &queued.item, Part::default()));
            let sent = self.carrier.send(node, &header, packets)?;
            if sent == 0 {
                break;
            }
            peer.note_acked();
            let mut bytes = 0;
            for queued in std::iter::from_fn(|| peer.batcher.pop()).take(sent) {
                bytes += usize::from(queued.bytes);
                pool.free(queued.item.1);
            }
            peer.note_sent(now, (sent, sent), bytes, may_time);
            self.occupancy.note_sent(sent, bytes);
            done += sent;
        }
        Ok(done)
    }

    /// Sends an acknowledgement, and requests one, if due. Returns whether a message was sent.
    fn send_ack(&mut self, now: Time, node: NodeId) -> Result<bool, CarrierError> {
        let occupancy = self.encoded_occupancy();
        let peer = &mut self.peers[usize::from(node.0)];
        let unacked = peer.received.wrapping_sub(peer.acked_to_peer);
        let requests_ack = peer.ack_request_due().is_some_and(|at| at <= now);
        if !self.limits.acks_in_messages {
            if unacked > 0 {
                self.carrier.write_ack(node, Ack { number: peer.received, occupancy });
                peer.note_acked();
            }
            if requests_ack {
                self.poll_ack(now, node)?;
            }
            return Ok(false);
        }
        let is_late = peer.unacked_since.is_some_and(|since| now.since(since) >= ACK_DELAY);
        let is_much = unacked >= ACK_AFTER_PACKETS || peer.unacked_bytes >= unacked_bytes_max(&self.limits);
        if !is_much && !is_late && !peer.is_ack_requested && !requests_ack {
            return Ok(false);
        }
        if requests_ack {
            peer.ack_requested_at = now;
            peer.requests_unanswered += u64::from(!peer.in_flight.is_empty());
        }
        let header = Header { sequence: peer.sent, ack: peer.received, requests_ack, occupancy };
        if !self.carrier.send_ack(node, &header)? {
            return Ok(false);
        }
        peer.note_acked();
        peer.is_ack_requested = false;
        Ok(true)
    }

    /// Ignores a peer that has left too many requests unanswered. They are at least an interval apart, so they count
    /// only time in which this node has run.
    fn check_answers(&mut self, pool: &mut Pool, node: NodeId) {
        let Some(unanswered_max) = self.settings.unanswered_max else { return };
        let requests_max = unanswered_max.ps().div_ceil(ACK_REQUEST_INTERVAL.ps());
        if self.peers[usize::from(node.0)].requests_unanswered > requests_max {
            self.fail_peer(pool, node);
            self.peers[usize::from(node.0)].state = PeerState::Unanswered;
        }
    }

    /// Sends an acknowledgement if due, and transmits it.
    fn send_ack_and_flush(&mut self, now: Time, pool: &mut Pool, node: NodeId) {
        match self.send_ack(now, node) {
            Ok(false) => {}
            Ok(true) => self.carrier.flush(node),
            Err(_) => self.fail_peer(pool, node),
        }
        self.check_answers(pool, node);
    }

    /// Reads and processes the acknowledgement word of a peer.
    fn poll_ack(&mut self, now: Time, node: NodeId) -> Result<(), CarrierError> {
        let Some(ack) = self.carrier.poll_ack(node) else { return Ok(()) };
        let peer = &mut self.peers[usize::from(node.0)];
        peer.ack_requested_at = now;
        peer.process_ack(now, ack)?;
        if let Some(timed) = &mut peer.timed {
            timed.polled = now;
        }
        Ok(())
    }

    fn each_up(&self) -> impl Iterator<Item = NodeId> + use<C> {
        let up: [bool; NODES] = std::array::from_fn(|node| self.peers[node].state == PeerState::Up);
        (0..NODES_MAX).map(NodeId).filter(move |node| up[usize::from(node.0)])
    }
}

impl<C: Carrier> Interconnect for Mesh<C> {
    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError> {
        self.new_peer(node)?;
        let offer = self.carrier.offer(node)?;
        self.peer_mut(node)?.state = PeerState::Offered;
        Ok(offer)
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError> {
        self.new_peer(node)?;
        let params = self.carrier.accept(node, offer)?;
        self.peer_mut(node)?.state = PeerState::Up;
        Ok(params)
    }

    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<(), InterconnectError> {
        if self.peer_mut(node)?.state != PeerState::Offered {
            let (what, remedy) = ("accepts an offer that was not made", "make an offer first");
            return Err(InterconnectError::Node { node: node.0, what, remedy });
        }
        self.carrier.finish(node, params)?;
        self.peer_mut(node)?.state = PeerState::Up;
        Ok(())
    }

    fn remove_peer(&mut self, pool: &mut Pool, node: NodeId) {
        if self.peer_mut(node).is_ok() {
            self.fail_peer(pool, node);
            self.peers[usize::from(node.0)].state = PeerState::Absent;
        }
    }

    fn restart(&mut self, pool: &mut Pool) -> Result<(), InterconnectError> {
        (0..NODES_MAX).for_each(|node| self.remove_peer(pool, NodeId(node)));
        self.balancer = balancer(self.own, &self.settings, self.flow_seed);
        self.occupancy = Occupancy::new(self.limits.transfer);
        self.carrier.restart()
    }

    fn has_answered(&self, node: NodeId) -> bool {
        let peer = self.peers.get(usize::from(node.0));
        peer.is_some_and(|peer| peer.state == PeerState::Up && peer.has_answered)
    }

    fn set_policy(&mut self, policy: Policy) {
        self.settings.policy = policy;
        self.is_adaptive = matches!(policy, Policy::Adaptive { .. });
        self.peers.iter_mut().for_each(|peer| peer.batcher.set_policy(policy));
    }

    fn state(&self, node: NodeId) -> PeerState {
        self.peers.get(usize::from(node.0)).map_or(PeerState::Absent, |peer| peer.state)
    }

    fn begin_iteration(&mut self, now: Time, was_busy: bool) {
        self.occupancy.begin_iteration(now, was_busy);
    }

    fn send(&mut self, now: Time, pool: &mut Pool, to: NodeId, parcels: &mut Vec<Parcel>) {
        if usize::from(to.0) >= NODES {
            return parcels.drain(..).for_each(|(_, packet)| pool.free(packet));
        }
        if !self.settings.balances || self.balancer.is_direct(now, to, &self.loads()) {
            for parcel in parcels.drain(..) {
                self.enqueue(now, pool, to, parcel);
            }
            self.dispatch(now, pool, to);
            return;
        }
        self.enqueue_balanced(now, pool, to, parcels);
        for node in self.each_up() {
            self.dispatch(now, pool, node);
        }
    }

    fn poll(&mut self, now: Time, pool: &mut Pool, arrived: &mut Vec<Parcel>, packets_max: usize) -> bool {
        let mut is_busy = self.carrier.poll();
        let mut relayed = std::mem::take(&mut self.relayed);
        let before = arrived.len();
        while arrived.len() - before + relayed.len() < packets_max {
            let Self { own, peers, carrier, limits, occupancy, .. } = self;
            let (own, arrived, relayed) = (*own, &mut *arrived, &mut relayed);
            let mut context = ReceiveContext {
                own,
                now,
                limits,
                ack_now: None,
                occupancy,
                pool: &mut *pool,
                peers,
                arrived,
                relayed,
            };
            let received = carrier.receive(&mut context);
            match (context.ack_now, received) {
                (ack_now, Ok(true)) => {
                    is_busy = true;
                    ack_now.into_iter().for_each(|node| self.send_ack_and_flush(now, pool, node));
                }
                (_, Ok(false)) => break,
                (_, Err((node, _))) => {
                    self.fail_peer(pool, node);
                    is_busy = true;
                }
            }
        }
        for parcel in relayed.drain(..) {
            let to = parcel.0.node;
            self.enqueue(now, pool, to, parcel);
        }
        self.relayed = relayed;
        for node in self.each_up() {
            self.send_ack_and_flush(now, pool, node);
            is_busy |= self.dispatch(now, pool, node);
        }
        is_busy
    }

    fn deadline(&self) -> Option<Time> {
        let up = self.peers.iter().filter(|peer| peer.state == PeerState::Up);
        let of = |peer: &Peer| {
            let acks_in_messages = self.limits.acks_in_messages;
            let ack_due = peer.unacked_since.map(|since| since + ACK_DELAY);
            let request_due = peer.ack_request_due();
            [peer.batcher.deadline(), ack_due.filter(|_| acks_in_messages), request_due.filter(|_| acks_in_messages)]
                .into_iter()
                .flatten()
                .min()
        };
        up.filter_map(of).min()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.carrier.wait_fds()
    }

    fn prepare_wait(&mut self) -> bool {
        self.carrier.prepare_wait()
    }

    fn finish_wait(&mut self) {
        self.occupancy.note_sleep();
        self.carrier.finish_wait();
    }

    fn counters(&self, node: NodeId) -> PeerCounters {
        let Some(peer) = self.peers.get(usize::from(node.0)) else { return PeerCounters::default() };
        PeerCounters { forged_messages: self.carrier.forged(node), ..peer.counters }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The decision of [`Batcher::due`] while no packet is late.
    fn is_sent(waiting: usize, least: usize) -> bool {
        waiting > 0 && waiting >= least.min(PACKETS_MAX)
    }

    #[test]
    fn acks_are_polled_if_they_can_release_packets_and_never_for_a_full_message() {
        for (waiting, by_peer, by_occupancy) in
            (0..40).flat_map(|waiting| (0..40).flat_map(move |peer| [1, 2, 8, 32].map(|own| (waiting, peer, own))))
        {
            let may_send = |by_peer: usize| is_sent(waiting, by_peer.max(by_occupancy));
            let ack_matters = (0..=by_peer).any(|by_peer_now| may_send(by_peer_now) != may_send(by_peer));
            let polls = depends_on_ack(waiting, by_peer, by_occupancy);
            assert!(polls || !ack_matters, "{waiting} wait, {by_peer} by the peer, {by_occupancy} by this node");
            assert!(!polls || waiting < PACKETS_MAX, "{waiting} wait, which is a full message");
        }
    }
}
