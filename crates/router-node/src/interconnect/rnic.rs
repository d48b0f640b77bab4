//! Messages by the RDMA transport, as the published cluster did it: a queue pair of an unreliable connection to each
//! peer, SEND and RECV. Over lanes, or over UDP.
//!
//! A message lies in a slot of the NIC's memory while it leaves, and another one is there for each that may come: peers
//! keep to a window, and say what they have taken in. What the wire loses is lost: routers do not send again.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use fabric::shm::{ShmParts, create_link, open_link};
use rnic::nic::{ByteMemory, CqNumber, Event, Nic, NicError, Policy, Profile, QpInit, SrqNumber, WINDOW_PACKETS_MAX};
use rnic::verbs::{
    Access, Address, Completion, CompletionStatus, LKey, Mtu, ProtectionDomain, QpAttributes, QpState, Receive,
    Registration, SGES_MAX, Send, SendKind, Sge,
};
use rnic::wire::{Psn, QpNumber, Service};
use rnic_live::{Lanes, Live, LiveError, Udp, WINDOW_BYTES, Wire};
use router::batch::message::{self, DESCRIPTOR_BYTES, HEADER_BYTES, Header, Message};
use router::batch::{Latency, PACKETS_MAX};
use router::{NODES_MAX, NodeId};

use super::carrier::{Carrier, Fault, Intake, Limits, Packets};
use super::{InterconnectError, Offer, Terms, random_u64, wrong_terms};

/// A full batch of the longest packets of Ethernet is one message: 48 KiB.
const SLOT_BYTES: usize = 48 << 10;
const PACKET_BYTES_USUAL: usize = 1518;
const SENDS: usize = 64;
/// Twice what one turn of the NIC takes in.
const RECEIVES: usize = 2 * TURN_PACKETS;
const TURN_PACKETS: usize = 64;
/// Bytes under way to one peer: half of what a lane of the wire holds, and of what a socket is given.
const WINDOW_BYTES_MAX: u64 = 96 << 10;
const WINDOW_MESSAGES_MAX: usize = 48;
/// The peer says what it has taken in for each 16 packets, and takes its time for fewer; and what goes meanwhile.
const AHEAD_PACKETS: u32 = 32;
const PSN_MASK: u64 = 0xff_ffff;
const QP_NUMBER_MAX: u32 = 0xff_ffff;

const _: () = assert!(HEADER_BYTES + PACKETS_MAX * (DESCRIPTOR_BYTES + PACKET_BYTES_USUAL) <= SLOT_BYTES);
const _: () = assert!(WINDOW_MESSAGES_MAX < TURN_PACKETS && SENDS <= WINDOW_PACKETS_MAX as usize);

/// A wire, and how peers meet on it.
pub(super) trait PeerWire: Wire + std::marker::Send {
    /// What the transport's packets hold, at most.
    fn mtu(&self) -> Mtu;

    /// What this end offers: descriptors, and where it is. The peer is known at once where descriptors are shared.
    fn offer(&mut self, secret: u64) -> Result<Offered, InterconnectError>;

    /// Makes a peer known that made an offer.
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<Address, InterconnectError>;

    /// Makes a peer known that accepted an offer, by what it says.
    fn finish(&mut self, node: NodeId, terms: &Terms) -> Result<Address, InterconnectError>;

    /// Where this end is.
    fn local(&self) -> Option<SocketAddr>;

    /// Forgets a peer.
    fn remove(&mut self, address: Address);

    /// See [`super::Interconnect::wakes`].
    fn wakes(&self) -> Vec<BorrowedFd<'_>>;

    /// See [`super::Interconnect::may_sleep`].
    fn may_sleep(&mut self) -> bool;

    /// See [`super::Interconnect::woke`].
    fn woke(&mut self);
}

/// What a wire offers a peer.
pub(super) struct Offered {
    address: Option<Address>,
    descriptors: Vec<OwnedFd>,
}

impl PeerWire for Lanes {
    fn mtu(&self) -> Mtu {
        Mtu::B4096
    }

    fn offer(&mut self, secret: u64) -> Result<Offered, InterconnectError> {
        let (link, parts) = create_link(WINDOW_BYTES)?;
        let address = self.add_peer(&link, secret).map_err(LiveError::from)?;
        let descriptors = vec![parts.memfd, parts.bell_creator, parts.bell_peer];
        Ok(Offered { address: Some(address), descriptors })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<Address, InterconnectError> {
        let found = offer.descriptors.len();
        let Ok([memfd, bell_creator, bell_peer]) = <[OwnedFd; 3]>::try_from(offer.descriptors) else {
            return Err(wrong_terms(node, "a number of descriptors", found, "3: memory and two doorbells"));
        };
        if offer.terms.secret == 0 {
            return Err(wrong_terms(node, "a secret", 0, "random, and not 0"));
        }
        let link = open_link(ShmParts { memfd, bell_creator, bell_peer }, WINDOW_BYTES)?;
        Ok(self.add_peer(&link, offer.terms.secret).map_err(LiveError::from)?)
    }

    fn finish(&mut self, node: NodeId, _: &Terms) -> Result<Address, InterconnectError> {
        Err(wrong_terms(node, "an acceptance", "another kind", "of what was offered"))
    }

    fn local(&self) -> Option<SocketAddr> {
        None
    }

    fn remove(&mut self, address: Address) {
        self.remove_peer(address);
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        self.wakes().collect()
    }

    fn may_sleep(&mut self) -> bool {
        self.may_sleep()
    }

    fn woke(&mut self) {
        self.woke();
    }
}

impl PeerWire for Udp {
    /// On one machine the longest; between machines what Ethernet carries.
    fn mtu(&self) -> Mtu {
        if self.local().ip().is_loopback() { Mtu::B4096 } else { Mtu::B1024 }
    }

    fn offer(&mut self, _: u64) -> Result<Offered, InterconnectError> {
        Ok(Offered { address: None, descriptors: Vec::new() })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<Address, InterconnectError> {
        self.finish(node, &offer.terms)
    }

    fn finish(&mut self, node: NodeId, terms: &Terms) -> Result<Address, InterconnectError> {
        let Some(address) = terms.address else {
            return Err(wrong_terms(node, "an address", "none", "where it receives UDP"));
        };
        Ok(self.add_peer(address).map_err(LiveError::from)?)
    }

    fn local(&self) -> Option<SocketAddr> {
        Some(self.local())
    }

    fn remove(&mut self, _: Address) {}

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.wakes()]
    }

    fn may_sleep(&mut self) -> bool {
        Udp::may_sleep(self)
    }

    fn woke(&mut self) {}
}

struct Peer {
    qp: QpNumber,
    psn: Psn,
    secret: u64,
    address: Option<Address>,
    /// Packets go and come.
    is_up: bool,
}

/// What came: from whom, in which slot, how long.
struct Received {
    from: NodeId,
    slot: u64,
    bytes: usize,
}

/// Queue pairs to peers.
pub(super) struct RnicCarrier<W> {
    live: Live<W, ByteMemory>,
    key: LKey,
    domain: ProtectionDomain,
    send_cq: CqNumber,
    receive_cq: CqNumber,
    srq: SrqNumber,
    peers: [Option<Peer>; NODES_MAX as usize],
    /// Slots in which no message leaves, and who sends from the others.
    free: Vec<u64>,
    senders: [Option<NodeId>; SENDS],
    received: VecDeque<Received>,
    /// A queue pair failed.
    failed: Option<NodeId>,
}

fn slot_address(slot: u64) -> u64 {
    slot * SLOT_BYTES as u64
}

fn nic(error: NicError) -> InterconnectError {
    LiveError::from(error).into()
}

impl<W: PeerWire> RnicCarrier<W> {
    pub(super) fn new(wire: W) -> Result<Self, InterconnectError> {
        let slots = SENDS + RECEIVES;
        let bytes = slots * SLOT_BYTES;
        // Standard RoCEv2: unreliable connections need nothing of what the others add.
        let profile = Profile { mtu_bytes: wire.mtu().bytes(), ..Profile::new(Policy::GoBackN) };
        let mut live = Live::new(profile, ByteMemory::new(bytes), wire, random_u64()?)?;
        let on = live.nic_mut();
        let domain = on.allocate_domain().map_err(nic)?;
        let access = Access::LOCAL_WRITE;
        let registration = Registration { domain, host_address: 0, address: 0, bytes: bytes as u64, access };
        let key = on.register(&registration).map_err(nic)?.local;
        let send_cq = on.create_cq(SENDS * usize::from(NODES_MAX)).map_err(nic)?;
        let receive_cq = on.create_cq(2 * RECEIVES).map_err(nic)?;
        let srq = on.create_srq(RECEIVES).map_err(nic)?;
        let mut carrier = Self {
            live,
            key,
            domain,
            send_cq,
            receive_cq,
            srq,
            peers: std::array::from_fn(|_| None),
            free: (0..SENDS as u64).collect(),
            senders: [None; SENDS],
            received: VecDeque::with_capacity(RECEIVES),
            failed: None,
        };
        for slot in SENDS as u64..slots as u64 {
            carrier.post_receive(slot).map_err(nic)?;
        }
        Ok(carrier)
    }

    fn local(&self, slot: u64, bytes: usize) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address: slot_address(slot), bytes: bytes as u32, key: self.key };
        local
    }

    fn post_receive(&mut self, slot: u64) -> Result<(), NicError> {
        let request = Receive { id: slot, local: self.local(slot, SLOT_BYTES) };
        self.live.nic_mut().post_srq_recv(self.srq, &request)
    }

    /// A queue pair for a peer, not yet connected.
    fn create(&mut self, node: NodeId, secret: u64) -> Result<&mut Peer, InterconnectError> {
        let init = QpInit {
            service: Service::Uc,
            domain: self.domain,
            send_cq: self.send_cq,
            receive_cq: self.receive_cq,
            shared_receive: Some(self.srq),
            sends_max: SENDS as u32,
            receives_max: 1,
            signals_all: true,
        };
        let qp = self.live.nic_mut().create_qp(&init).map_err(nic)?;
        let psn = Psn::new((random_u64()? & PSN_MASK) as u32);
        Ok(self.peers[usize::from(node.0)].insert(Peer { qp, psn, secret, address: None, is_up: false }))
    }

    fn terms(&self, node: NodeId) -> Option<Terms> {
        let peer = self.peers[usize::from(node.0)].as_ref()?;
        Some(Terms {
            secret: peer.secret,
            queue_pair: peer.qp.0,
            packet_sequence: peer.psn.get(),
            address: self.live.wire().local(),
        })
    }

    /// Takes a queue pair from reset to ready-to-send.
    fn connect(&mut self, node: NodeId, address: Address, terms: &Terms) -> Result<(), InterconnectError> {
        if terms.queue_pair > QP_NUMBER_MAX {
            return Err(wrong_terms(node, "a queue pair", terms.queue_pair, "a number of 24 bits"));
        }
        if u64::from(terms.packet_sequence) > PSN_MASK {
            return Err(wrong_terms(node, "a packet sequence", terms.packet_sequence, "a number of 24 bits"));
        }
        let (now, mtu) = (self.live.now(), self.live.wire().mtu());
        let Some(peer) = &mut self.peers[usize::from(node.0)] else {
            return Err(wrong_terms(node, "a queue pair", "none", "offered before"));
        };
        let init = QpAttributes {
            partition_index: Some(0),
            port: Some(1),
            access: Some(Access::empty()),
            ..QpAttributes::default()
        };
        let receive = QpAttributes {
            path: Some(address),
            mtu: Some(mtu),
            destination: Some(QpNumber(terms.queue_pair)),
            receive_psn: Some(Psn::new(terms.packet_sequence)),
            ..QpAttributes::default()
        };
        let send = QpAttributes { send_psn: Some(peer.psn), ..QpAttributes::default() };
        let steps = [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)];
        for (state, attributes) in steps {
            self.live.nic_mut().modify_qp(now, peer.qp, state, &attributes).map_err(nic)?;
        }
        (peer.address, peer.is_up) = (Some(address), true);
        Ok(())
    }

    fn node_of(&self, qp: QpNumber) -> Option<NodeId> {
        let is_its = |peer: &Option<Peer>| peer.as_ref().is_some_and(|peer| peer.qp == qp);
        self.peers.iter().position(is_its).map(|node| NodeId(node as u8))
    }

    /// Gives the slots of messages that left back.
    fn reap_sends(&mut self) {
        let mut done = [Completion::default(); SENDS];
        let count = self.live.nic_mut().poll_cq(self.send_cq, &mut done).unwrap_or(0);
        for completion in &done[..count] {
            if self.senders[completion.id as usize].take().is_some() {
                self.free.push(completion.id);
            }
        }
    }

    /// Notes what came.
    fn reap_receives(&mut self) {
        let mut done = [Completion::default(); TURN_PACKETS];
        loop {
            let count = self.live.nic_mut().poll_cq(self.receive_cq, &mut done).unwrap_or(0);
            for Completion { id: slot, qp, status, bytes, .. } in &done[..count] {
                match self.node_of(*qp).filter(|_| *status == CompletionStatus::Success) {
                    Some(from) => self.received.push_back(Received { from, slot: *slot, bytes: *bytes as usize }),
                    None => self.give_back(*slot),
                }
            }
            if count < done.len() {
                return;
            }
        }
    }

    /// Lets the next message come into a slot.
    fn give_back(&mut self, slot: u64) {
        self.post_receive(slot).expect("the queue has room for each slot that there is");
    }

    fn reap_events(&mut self) {
        while let Some(event) = self.live.nic_mut().poll_event() {
            if let Event::QpError(qp) = event {
                self.failed = self.failed.or_else(|| self.node_of(qp));
            }
        }
    }

    fn nic_mut(&mut self) -> &mut Nic<ByteMemory> {
        self.live.nic_mut()
    }

    /// Posts the message that lies in a slot.
    fn post(&mut self, to: NodeId, slot: u64, bytes: usize) -> Result<(), Fault> {
        let Some(peer) = &self.peers[usize::from(to.0)] else { return Ok(()) };
        let qp = peer.qp;
        let request = Send {
            id: slot,
            kind: SendKind::Send(None),
            local: self.local(slot, bytes),
            signalled: true,
            fence: false,
            solicited: false,
            datagram: None,
        };
        let now = self.live.now();
        self.senders[slot as usize] = Some(to);
        self.nic_mut().post_send(now, qp, &request).map_err(|error| Fault::Transport(error.to_string()))
    }

    /// A slot for a message to a peer that can be reached.
    fn take_slot(&mut self, to: NodeId) -> Option<u64> {
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

impl<W: PeerWire> Carrier for RnicCarrier<W> {
    fn limits(&self) -> Limits {
        Limits {
            message_bytes_max: SLOT_BYTES,
            ahead_packets: AHEAD_PACKETS,
            messages_max: WINDOW_MESSAGES_MAX,
            latency_ns: Latency::PUBLISHED,
            bytes_max: WINDOW_BYTES_MAX,
            tells_by_messages: true,
        }
    }

    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError> {
        let secret = random_u64()?;
        let Offered { address, descriptors } = self.live.wire_mut().offer(secret)?;
        self.create(node, secret)?.address = address;
        let terms = self.terms(node).expect("it was created just now");
        Ok(Offer { terms, descriptors })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<Terms, InterconnectError> {
        let terms = offer.terms;
        let address = self.live.wire_mut().accept(node, offer)?;
        self.create(node, 0)?.address = Some(address);
        self.connect(node, address, &terms).inspect_err(|_| self.leave(node))?;
        Ok(self.terms(node).expect("it was created just now"))
    }

    fn finish(&mut self, node: NodeId, terms: &Terms) -> Result<(), InterconnectError> {
        let known = self.peers[usize::from(node.0)].as_ref().and_then(|peer| peer.address);
        let address = known.map_or_else(|| self.live.wire_mut().finish(node, terms), Ok)?;
        self.connect(node, address, terms)
    }

    fn leave(&mut self, node: NodeId) {
        let Some(peer) = self.peers[usize::from(node.0)].take() else { return };
        // There is one: it is destroyed here alone.
        let _ = self.nic_mut().destroy_qp(peer.qp);
        if let Some(address) = peer.address {
            self.live.wire_mut().remove(address);
        }
        for slot in 0..SENDS {
            if self.senders[slot].take_if(|sender| *sender == node).is_some() {
                self.free.push(slot as u64);
            }
        }
        for Received { from, slot, bytes } in std::mem::take(&mut self.received) {
            if from == node { self.give_back(slot) } else { self.received.push_back(Received { from, slot, bytes }) }
        }
        self.failed.take_if(|failed| *failed == node);
    }

    fn turn(&mut self) -> bool {
        // Each message that a turn may bring finds a slot.
        let turned =
            if self.received.len() + TURN_PACKETS <= RECEIVES { self.live.turn() } else { self.live.transmit() };
        self.reap_sends();
        self.reap_receives();
        self.reap_events();
        // A wire that failed once is looked at again: a socket's errors pass.
        turned.unwrap_or(false)
    }

    fn send<'a>(&mut self, to: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, Fault> {
        let (count, _) = message::fit(SLOT_BYTES, packets.clone().map(|(_, bytes)| bytes.len()));
        let Some(slot) = self.take_slot(to) else { return Ok(0) };
        let bytes = message::put(self.slot_mut(slot), header, packets.take(count));
        self.post(to, slot, bytes)?;
        Ok(count)
    }

    fn tell(&mut self, to: NodeId, header: &Header) -> Result<bool, Fault> {
        let Some(slot) = self.take_slot(to) else { return Ok(false) };
        let bytes = message::put(self.slot_mut(slot), header, [].into_iter());
        self.post(to, slot, bytes)?;
        Ok(true)
    }

    fn flush(&mut self, _: NodeId) {
        // An error shows in the next turn too.
        let _ = self.live.transmit();
    }

    fn receive(&mut self, intake: &mut impl Intake) -> Result<bool, (NodeId, Fault)> {
        if let Some(node) = self.failed.take() {
            return Err((node, Fault::Transport(format!("the queue pair of node {} failed", node.0))));
        }
        let Some(Received { from, slot, bytes }) = self.received.pop_front() else { return Ok(false) };
        let memory = &self.live.nic().memory().0[slot as usize * SLOT_BYTES..][..bytes];
        let taken = Message::check(memory).and_then(|message| intake.take(from, &message, memory));
        self.give_back(slot);
        taken.map_err(|error| (from, error.into()))?;
        Ok(true)
    }

    fn taken(&mut self, _: NodeId) -> Option<u32> {
        None
    }

    fn say_taken(&mut self, _: NodeId, _: u32) {}

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        self.live.wire().wakes()
    }

    fn may_sleep(&mut self) -> bool {
        self.live.wire_mut().may_sleep() && self.received.is_empty()
    }

    fn woke(&mut self) {
        self.live.wire_mut().woke();
    }
}
