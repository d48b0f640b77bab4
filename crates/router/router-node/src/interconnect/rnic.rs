//! Messages over the RDMA transport, as in the published cluster: an unreliable connection to each peer, SEND and RECV,
//! over lanes or UDP.
//!
//! A message occupies a slot of the NIC's memory while it is sent, and a receive request with a slot is posted for each
//! message that may arrive: peers respect a window and acknowledge messages. Lost messages are not retransmitted, as
//! routers do not retransmit.
//!
//! Over UDP, anyone can forge the source address of a datagram. So each message ends with a token: a random number that
//! the receiver has sent to this peer only, over the control session. Other messages are dropped and counted. This
//! stops attackers that cannot read the traffic between the nodes, and no others.

mod queues;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use rnic::nic::{ByteMemory, Nic, NicError, NicEvent, NicProfile, QpInit, TransportPolicy, WINDOW_PACKETS_MAX};
use rnic::verbs::{
    AccessFlags, Completion, CompletionStatus, NicAddress, QpAttributes, QpState, SendKind, SendRequest,
};
use rnic::wire::{Psn, QpNumber, Service};
use rnic_live::{LiveError, LiveNic};
use router::batch::Latency;
use router::batch::message::{self, Header, Message};
use router::{NODES_MAX, NodeId};

use super::carrier::{Ack, Carrier, CarrierError, FlowLimits, MessageSink, Packets};
use super::interface::{ConnectionParams, InterconnectError, Offer, invalid_offer, random_u64};
use super::peer_wire::{Offered, PeerWire};
use queues::{POLL_PACKETS_MAX, Queues, RECEIVES, SENDS, SLOT_BYTES, slots};

/// Maximum number of bytes in flight to one peer: half the capacity of a lane, and of a socket buffer.
const WINDOW_BYTES_MAX: u64 = 96 << 10;
const WINDOW_MESSAGES_MAX: usize = 48;
/// The peer acknowledges every 16 packets, and fewer after a delay; the rest is in transit.
const AHEAD_PACKETS: u32 = 32;
const PSN_MASK: u64 = 0xff_ffff;
const QP_NUMBER_MAX: u32 = 0xff_ffff;

const _: () = assert!(WINDOW_MESSAGES_MAX < POLL_PACKETS_MAX && SENDS <= WINDOW_PACKETS_MAX as usize);

struct Peer {
    qp: QpNumber,
    psn: Psn,
    /// The token that the peer appends to its messages.
    secret: u64,
    /// The token of messages to the peer.
    token: u64,
    /// Number of messages without the token.
    forged: u64,
    address: Option<NicAddress>,
    /// Whether the queue pair is connected.
    is_up: bool,
}

/// A received message: its sender, slot and length.
struct Received {
    from: NodeId,
    slot: u64,
    bytes: usize,
}

/// Queue pairs to all peers.
pub(super) struct RnicCarrier<W> {
    live: LiveNic<W, ByteMemory>,
    queues: Queues,
    peers: [Option<Peer>; NODES_MAX as usize],
    /// Slots without a message to send, and the destinations of the others.
    free: Vec<u64>,
    senders: [Option<NodeId>; SENDS],
    received: VecDeque<Received>,
    /// The peer of a queue pair that failed.
    failed: Option<NodeId>,
}

fn nic(error: NicError) -> InterconnectError {
    LiveError::from(error).into()
}

impl<W: PeerWire> RnicCarrier<W> {
    pub(super) fn new(wire: W) -> Result<Self, InterconnectError> {
        let mut live = LiveNic::new(Self::profile(&wire), slots(), wire, random_u64()?)?;
        let queues = Queues::new(live.nic_mut()).map_err(nic)?;
        Ok(Self {
            live,
            queues,
            peers: std::array::from_fn(|_| None),
            free: (0..SENDS as u64).collect(),
            senders: [None; SENDS],
            received: VecDeque::with_capacity(RECEIVES),
            failed: None,
        })
    }

    /// Returns the profile of standard RoCEv2: unreliable connections need no extension.
    fn profile(wire: &W) -> NicProfile {
        NicProfile { mtu_bytes: wire.mtu().bytes(), ..NicProfile::new(TransportPolicy::GoBackN) }
    }

    /// Creates an unconnected queue pair for a peer.
    fn create(&mut self, node: NodeId, secret: u64) -> Result<&mut Peer, InterconnectError> {
        let init = QpInit {
            service: Service::Uc,
            domain: self.queues.domain,
            send_cq: self.queues.send_cq,
            receive_cq: self.queues.receive_cq,
            srq: Some(self.queues.srq),
            sends_max: SENDS as u32,
            receives_max: 1,
            signals_all: true,
        };
        let qp = self.live.nic_mut().create_qp(&init).map_err(nic)?;
        let psn = Psn::new((random_u64()? & PSN_MASK) as u32);
        Ok(self.peers[usize::from(node.0)].insert(Peer {
            qp,
            psn,
            secret,
            token: 0,
            forged: 0,
            address: None,
            is_up: false,
        }))
    }

    fn params(&self, node: NodeId) -> Option<ConnectionParams> {
        let peer = self.peers[usize::from(node.0)].as_ref()?;
        Some(ConnectionParams {
            secret: peer.secret,
            queue_pair: peer.qp.0,
            packet_sequence: peer.psn.get(),
            address: self.live.io().local(),
        })
    }

    /// Moves a queue pair from reset to ready-to-send.
    fn connect(
        &mut self,
        node: NodeId,
        address: NicAddress,
        params: &ConnectionParams,
    ) -> Result<(), InterconnectError> {
        if params.queue_pair > QP_NUMBER_MAX {
            return Err(invalid_offer(node, "a queue pair", params.queue_pair, "a number of 24 bits"));
        }
        if u64::from(params.packet_sequence) > PSN_MASK {
            return Err(invalid_offer(node, "a packet sequence", params.packet_sequence, "a number of 24 bits"));
        }
        if W::TOKEN_BYTES > 0 && params.secret == 0 {
            return Err(invalid_offer(node, "a secret", 0, "random, and not 0"));
        }
        let (now, mtu) = (self.live.now(), self.live.io().mtu());
        let Some(peer) = &mut self.peers[usize::from(node.0)] else {
            return Err(invalid_offer(node, "a queue pair", "none", "offered before"));
        };
        let init = QpAttributes {
            partition_index: Some(0),
            port: Some(1),
            access: Some(AccessFlags::empty()),
            ..QpAttributes::default()
        };
        let receive = QpAttributes {
            path: Some(address),
            mtu: Some(mtu),
            destination: Some(QpNumber(params.queue_pair)),
            receive_psn: Some(Psn::new(params.packet_sequence)),
            ..QpAttributes::default()
        };
        let send = QpAttributes { send_psn: Some(peer.psn), ..QpAttributes::default() };
        let steps = [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)];
        for (state, attributes) in steps {
            self.live.nic_mut().modify_qp(now, peer.qp, state, &attributes).map_err(nic)?;
        }
        (peer.address, peer.token, peer.is_up) = (Some(address), params.secret, true);
        Ok(())
    }

    fn node_of(&self, qp: QpNumber) -> Option<NodeId> {
        let is_its = |peer: &Option<Peer>| peer.as_ref().is_some_and(|peer| peer.qp == qp);
        self.peers.iter().position(is_its).map(|node| NodeId(node as u8))
    }

    /// Frees the slots of messages that were sent.
    fn reap_sends(&mut self) {
        let mut done = [Completion::default(); SENDS];
        let count = self.live.nic_mut().poll_cq(self.queues.send_cq, &mut done).unwrap_or(0);
        for completion in &done[..count] {
            if self.senders[completion.id as usize].take().is_some() {
                self.free.push(completion.id);
            }
        }
    }

    /// Queues messages that have arrived.
    fn reap_receives(&mut self) {
        let mut done = [Completion::default(); POLL_PACKETS_MAX];
        loop {
            let count = self.live.nic_mut().poll_cq(self.queues.receive_cq, &mut done).unwrap_or(0);
            for Completion { id: slot, qp, status, bytes, .. } in &done[..count] {
                match self.node_of(*qp).filter(|_| *status == CompletionStatus::Success) {
                    Some(from) => self.received.push_back(Received { from, slot: *slot, bytes: *bytes as usize }),
                    None => self.repost_receive(*slot),
                }
            }
            if count < done.len() {
                return;
            }
        }
    }

    /// Posts a receive request with the slot.
    fn repost_receive(&mut self, slot: u64) {
        let (srq, request) = (self.queues.srq, self.queues.receive(slot));
        let posted = self.live.nic_mut().post_srq_recv(srq, &request);
        posted.expect("the queue has room for every slot");
    }

    fn reap_events(&mut self) {
        while let Some(event) = self.live.nic_mut().poll_event() {
            if let NicEvent::QpError(qp) = event {
                self.failed = self.failed.or_else(|| self.node_of(qp));
            }
        }
    }

    fn nic_mut(&mut self) -> &mut Nic<ByteMemory> {
        self.live.nic_mut()
    }

    /// Appends the token to a message. Returns the total length.
    fn put_token(&mut self, to: NodeId, slot: u64, bytes: usize) -> usize {
        let token = self.peers[usize::from(to.0)].as_ref().map_or(0, |peer| peer.token).to_le_bytes();
        self.slot_mut(slot)[bytes..][..W::TOKEN_BYTES].copy_from_slice(&token[..W::TOKEN_BYTES]);
        bytes + W::TOKEN_BYTES
    }

    /// Returns the message without its token, or `None` if the token is wrong.
    fn message(&self, from: NodeId, slot: u64, bytes: usize) -> Option<&[u8]> {
        let memory = &self.live.nic().memory().0[slot as usize * SLOT_BYTES..][..bytes];
        let (message, token) = memory.split_at_checked(bytes.checked_sub(W::TOKEN_BYTES)?)?;
        let secret = self.peers[usize::from(from.0)].as_ref()?.secret.to_le_bytes();
        (token == &secret[..W::TOKEN_BYTES]).then_some(message)
    }

    /// Posts a send request for the message in a slot.
    fn post(&mut self, to: NodeId, slot: u64, bytes: usize) -> Result<(), CarrierError> {
        let Some(peer) = &self.peers[usize::from(to.0)] else { return Ok(()) };
        let qp = peer.qp;
        let request = SendRequest {
            id: slot,
            kind: SendKind::Send(None),
            local: self.queues.local(slot, bytes),
            signalled: true,
            fence: false,
            solicited: false,
            datagram: None,
        };
        let now = self.live.now();
        self.senders[slot as usize] = Some(to);
        self.nic_mut().post_send(now, qp, &request).map_err(|error| CarrierError::Transport(error.to_string()))
    }

    /// Allocates a slot for a message to a connected peer.
    fn allocate_slot(&mut self, to: NodeId) -> Option<u64> {
        self.peers[usize::from(to.0)].as_ref().filter(|peer| peer.is_up)?;
        if self.free.is_empty() {
            self.reap_sends();
        }
        self.free.pop()
    }

    fn slot_mut(&mut self, slot: u64) -> &mut [u8] {
        &mut self.nic_mut().memory_mut().0[slot as usize * SLOT_BYTES..][..SLOT_BYTES]
    }
}

/// Returns the flow control limits of the RDMA transport over this packet I/O.
pub(super) fn limits<W: PeerWire>() -> FlowLimits {
    FlowLimits {
        message_bytes_max: SLOT_BYTES - W::TOKEN_BYTES,
        ahead_packets: AHEAD_PACKETS,
        messages_max: WINDOW_MESSAGES_MAX,
        transfer: W::TRANSFER,
        latency_ns: Latency::PUBLISHED,
        bytes_max: WINDOW_BYTES_MAX,
        acks_in_messages: true,
    }
}

impl<W: PeerWire> Carrier for RnicCarrier<W> {
    fn limits(&self) -> FlowLimits {
        limits::<W>()
    }

    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError> {
        let secret = random_u64()?;
        let Offered { address, descriptors } = self.live.io_mut().offer(secret)?;
        self.create(node, secret)?.address = address;
        let params = self.params(node).expect("the peer was created above");
        Ok(Offer { params, descriptors })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError> {
        let params = offer.params;
        let address = self.live.io_mut().accept(node, offer)?;
        let secret = if W::TOKEN_BYTES > 0 { random_u64()? } else { 0 };
        self.create(node, secret)?.address = Some(address);
        self.connect(node, address, &params).inspect_err(|_| self.remove_peer(node))?;
        Ok(self.params(node).expect("the peer was created above"))
    }

    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<(), InterconnectError> {
        let known = self.peers[usize::from(node.0)].as_ref().and_then(|peer| peer.address);
        let address = known.map_or_else(|| self.live.io_mut().finish(node, params), Ok)?;
        self.connect(node, address, params)
    }

    fn remove_peer(&mut self, node: NodeId) {
        let Some(peer) = self.peers[usize::from(node.0)].take() else { return };
        let now = self.live.now();
        // The queue pair exists, as only this method destroys it. The error state also returns the slot of a partly
        // received message.
        let _ = self.nic_mut().modify_qp(now, peer.qp, QpState::Error, &QpAttributes::default());
        self.reap_receives();
        let _ = self.nic_mut().destroy_qp(peer.qp);
        if let Some(address) = peer.address {
            self.live.io_mut().remove(address);
        }
        for slot in 0..SENDS {
            if self.senders[slot].take_if(|sender| *sender == node).is_some() {
                self.free.push(slot as u64);
            }
        }
        for Received { from, slot, bytes } in std::mem::take(&mut self.received) {
            if from == node {
                self.repost_receive(slot)
            } else {
                self.received.push_back(Received { from, slot, bytes })
            }
        }
        self.failed.take_if(|failed| *failed == node);
    }

    fn restart(&mut self) -> Result<(), InterconnectError> {
        let profile = Self::profile(self.live.io());
        self.live.replace_nic(profile, slots(), random_u64()?)?;
        self.queues = Queues::new(self.live.nic_mut()).map_err(nic)?;
        self.peers.fill_with(|| None);
        (self.free, self.senders, self.failed) = ((0..SENDS as u64).collect(), [None; SENDS], None);
        self.received.clear();
        Ok(())
    }

    fn poll(&mut self) -> bool {
        // A free slot must be left for each message that the poll may receive.
        let polled =
            if self.received.len() + POLL_PACKETS_MAX <= RECEIVES { self.live.poll() } else { self.live.transmit() };
        self.reap_sends();
        self.reap_receives();
        self.reap_events();
        // I/O errors of a socket are transient: it is polled again.
        polled.unwrap_or(false)
    }

    fn send<'a>(&mut self, to: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, CarrierError> {
        let (count, _) = message::fit(SLOT_BYTES - W::TOKEN_BYTES, packets.clone().map(|packet| packet.bytes.len()));
        let Some(slot) = self.allocate_slot(to) else { return Ok(0) };
        let bytes = message::put(self.slot_mut(slot), header, packets.take(count));
        let bytes = self.put_token(to, slot, bytes);
        self.post(to, slot, bytes)?;
        Ok(count)
    }

    fn send_ack(&mut self, to: NodeId, header: &Header) -> Result<bool, CarrierError> {
        let Some(slot) = self.allocate_slot(to) else { return Ok(false) };
        let bytes = message::put(self.slot_mut(slot), header, [].into_iter());
        let bytes = self.put_token(to, slot, bytes);
        self.post(to, slot, bytes)?;
        Ok(true)
    }

    fn flush(&mut self, _: NodeId) {
        // The next poll reports the error again.
        let _ = self.live.transmit();
    }

    fn receive(&mut self, sink: &mut impl MessageSink) -> Result<bool, (NodeId, CarrierError)> {
        if let Some(node) = self.failed.take() {
            return Err((node, CarrierError::Transport(format!("the queue pair of node {} failed", node.0))));
        }
        let Some(Received { from, slot, bytes }) = self.received.pop_front() else { return Ok(false) };
        let Some(memory) = self.message(from, slot, bytes) else {
            if let Some(peer) = &mut self.peers[usize::from(from.0)] {
                peer.forged += 1;
            }
            self.repost_receive(slot);
            return Ok(true);
        };
        let processed = Message::check(memory).and_then(|message| sink.receive(from, &message, memory));
        self.repost_receive(slot);
        processed.map_err(|error| (from, error.into()))?;
        Ok(true)
    }

    fn forged(&self, node: NodeId) -> u64 {
        let Some(peer) = &self.peers[usize::from(node.0)] else { return 0 };
        // No honest peer sends more than a slot holds.
        peer.forged + self.live.nic().query_qp(peer.qp).map_or(0, |status| status.dropped_long)
    }

    fn poll_ack(&mut self, _: NodeId) -> Option<Ack> {
        None
    }

    fn write_ack(&mut self, _: NodeId, _: Ack) {}

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.live.io().wait_fds()
    }

    fn prepare_wait(&mut self) -> bool {
        self.live.io_mut().prepare_wait() && self.received.is_empty()
    }

    fn finish_wait(&mut self) {
        self.live.io_mut().finish_wait();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rnic::verbs::Mtu;
    use rnic_live::UdpIo;
    use router::batch::message::{MessageError, Source};
    use router::{AdjacencyId, Hop, PortId};

    use super::*;

    /// Counts packets.
    struct Count(usize);

    impl MessageSink for Count {
        fn receive(&mut self, _: NodeId, message: &Message, _: &(impl Source + ?Sized)) -> Result<(), MessageError> {
            self.0 += message.packets();
            Ok(())
        }
    }

    fn carrier() -> RnicCarrier<UdpIo> {
        RnicCarrier::new(UdpIo::bind("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap()
    }

    fn send(carrier: &mut RnicCarrier<UdpIo>) {
        let hop = Hop { node: NodeId(1), port: PortId(0), adjacency: AdjacencyId(0) };
        let packets = [message::Item::new(hop, &[7; 60])];
        assert_eq!(carrier.send(NodeId(1), &Header::default(), packets.into_iter()).unwrap(), 1);
        carrier.flush(NodeId(1));
    }

    /// Returns the number of packets in the next message.
    fn next(carrier: &mut RnicCarrier<UdpIo>) -> usize {
        let (mut count, began) = (Count(0), Instant::now());
        while began.elapsed() < Duration::from_secs(30) {
            carrier.poll();
            if carrier.receive(&mut count).unwrap() {
                return count.0;
            }
        }
        panic!("no message arrived");
    }

    #[test]
    fn a_message_without_the_token_is_dropped_without_effect() {
        let (mut one, mut other) = (carrier(), carrier());
        let offer = one.offer(NodeId(1)).unwrap();
        let secret = offer.params.secret;
        let params = other.accept(NodeId(0), offer).unwrap();
        one.finish(NodeId(1), &params).unwrap();
        assert!(params.secret != 0 && params.secret != secret, "each direction has its own token");
        send(&mut one);
        assert_eq!((next(&mut other), other.forged(NodeId(0))), (1, 0));
        let token = |carrier: &mut RnicCarrier<UdpIo>, token| carrier.peers[1].as_mut().unwrap().token = token;
        token(&mut one, params.secret ^ 1 << 63);
        send(&mut one);
        assert_eq!((next(&mut other), other.forged(NodeId(0))), (0, 1));
        token(&mut one, params.secret);
        send(&mut one);
        assert_eq!((next(&mut other), other.forged(NodeId(0))), (1, 1));
    }

    /// Nodes 0 and 1, connected.
    fn joined() -> [RnicCarrier<UdpIo>; 2] {
        let (mut one, mut other) = (carrier(), carrier());
        let offer = one.offer(NodeId(1)).unwrap();
        let params = other.accept(NodeId(0), offer).unwrap();
        one.finish(NodeId(1), &params).unwrap();
        [one, other]
    }

    /// Sends a message of this length, as an attacker that forges this node's address would.
    fn forge(carrier: &mut RnicCarrier<UdpIo>, bytes: usize) {
        carrier.post(NodeId(1), 0, bytes).unwrap();
        carrier.flush(NodeId(1));
    }

    /// Delivers only the first packet of a message.
    fn begin_message(one: &mut RnicCarrier<UdpIo>, other: &mut RnicCarrier<UdpIo>) {
        one.post(NodeId(1), 0, SLOT_BYTES).unwrap();
        let (now, mut payload) = (one.live.now(), vec![0; Mtu::B4096.bytes() as usize]);
        let first = one.nic_mut().transmit(now, &mut payload[..]).unwrap().header;
        let (now, from) = (other.live.now(), other.peers[0].as_ref().unwrap().address.unwrap());
        other.nic_mut().receive(now, from, &first, false, &payload[..]);
    }

    #[test]
    fn a_message_that_is_too_long_is_dropped_and_the_session_stays_up() {
        let [mut one, mut other] = joined();
        forge(&mut one, SLOT_BYTES + 1);
        send(&mut one);
        assert_eq!((next(&mut other), other.forged(NodeId(0))), (1, 1));
    }

    #[test]
    fn a_partly_received_message_of_a_removed_peer_leaks_no_slot() {
        let [mut one, mut other] = joined();
        for _ in 0..=RECEIVES {
            begin_message(&mut one, &mut other);
            one.remove_peer(NodeId(1));
            other.remove_peer(NodeId(0));
            let offer = one.offer(NodeId(1)).unwrap();
            let params = other.accept(NodeId(0), offer).unwrap();
            one.finish(NodeId(1), &params).unwrap();
        }
        send(&mut one);
        assert_eq!(next(&mut other), 1);
    }

    #[test]
    fn an_offer_without_a_token_is_refused() {
        let (mut one, mut other) = (carrier(), carrier());
        let mut offer = one.offer(NodeId(1)).unwrap();
        offer.params.secret = 0;
        let error = other.accept(NodeId(0), offer).unwrap_err().to_string();
        assert!(error.contains("a secret of 0"), "{error}");
    }
}
