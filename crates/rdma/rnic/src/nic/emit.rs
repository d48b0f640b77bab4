//! Builds packets from staged items, and acknowledgements.

use sim::Time;

use super::engine::{Nic, OutgoingPacket};
use super::host_qp::{PendingResponse, SendEntry};
use super::memory::HostMemory;
use super::pipeline::{StagedItem, StagedPacket};
use super::segmentation::{MESSAGE_MASK, piece_bytes, tick};
use crate::verbs::{CompletionStatus, NicAddress, SendKind};
use crate::wire::{
    Aeth, AtomicEth, Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, Reth, SelectiveAck, Service,
    Syndrome,
};

/// A positive acknowledgement with the credit code "credits are not used" (IBA table 46).
pub(super) const ACK_WITHOUT_CREDITS: Syndrome = Syndrome::Ack { credit_code: 31 };

/// The position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PacketPosition {
    Only,
    First,
    Middle,
    Last,
}

impl PacketPosition {
    fn new(packet: u32, packets: u32) -> Self {
        match (packet == 0, packet + 1 == packets) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    fn of(self, [only, first, middle, last]: [Operation; 4]) -> Operation {
        match self {
            Self::Only => only,
            Self::First => first,
            Self::Middle => middle,
            Self::Last => last,
        }
    }
}

const SEND: [Operation; 4] = [Operation::SendOnly, Operation::SendFirst, Operation::SendMiddle, Operation::SendLast];
const WRITE: [Operation; 4] =
    [Operation::WriteOnly, Operation::WriteFirst, Operation::WriteMiddle, Operation::WriteLast];
const READ_RESPONSE: [Operation; 4] = [
    Operation::ReadResponseOnly,
    Operation::ReadResponseFirst,
    Operation::ReadResponseMiddle,
    Operation::ReadResponseLast,
];

impl<M: HostMemory> Nic<M> {
    /// Returns a header without flags and extended headers.
    pub(super) fn header(&self, i: usize, operation: Operation, psn: Psn) -> Header {
        let context = &self.contexts[i];
        Header::bare(context.service, operation, context.peer_qp, psn)
    }

    /// Queues a positive or negative acknowledgement, which is sent before all data.
    pub(super) fn push_ack(&mut self, i: usize, psn: Psn, syndrome: Syndrome, sack: Option<SelectiveAck>) {
        let mut header = self.header(i, Operation::Acknowledge, psn);
        let context = &mut self.contexts[i];
        header.aeth = Some(Aeth { syndrome, msn: context.msn & MESSAGE_MASK });
        // Without the extension, BECN reports the mark.
        if !self.profile.policy.is_selective() && self.profile.echoes_marks() {
            header.congestion_echo = context.marked > 0;
        }
        header.sack = sack;
        let to = context.peer;
        self.control_packets.push_back((to, header));
    }

    /// Acknowledges all packets that hardware knows to have arrived. `newest` is the packet that requested the
    /// acknowledgement.
    pub(super) fn acknowledge(&mut self, i: usize, newest: Psn) {
        let context = &mut self.contexts[i];
        let expected = context.receiver.cumulative();
        let sack = self.profile.policy.is_selective().then(|| SelectiveAck {
            expected,
            newest,
            arrived: 0,
            marked: std::mem::take(&mut context.marked),
            echo: context.echo,
        });
        self.push_ack(i, expected.previous(), ACK_WITHOUT_CREDITS, sack);
    }

    pub(super) fn push_cnp(&mut self, i: usize, to: NicAddress, qp: QpNumber) {
        let mut header = self.header(i, Operation::CongestionNotification, Psn::new(0));
        header.destination = qp;
        header.congestion_echo = true;
        self.counters.cnps_sent += 1;
        self.control_packets.push_back((to, header));
    }

    /// Builds a staged packet, unless it was invalidated in the meantime.
    pub(super) fn emit(
        &mut self,
        now: Time,
        staged: &StagedPacket,
        payload: &mut M::Payload,
    ) -> Option<OutgoingPacket> {
        let i = staged.qp as usize;
        let context = &self.contexts[i];
        if !context.exists || context.generation != staged.generation {
            return None;
        }
        let is_current = context.send_epoch == staged.send_epoch;
        match staged.item {
            StagedItem::Request { .. } | StagedItem::ReRequest { .. } if !is_current => None,
            StagedItem::Request { index, packet, is_retransmission } => {
                self.emit_request(now, i, index, (packet, is_retransmission), payload)
            }
            StagedItem::ReRequest { index, packet, packets } => self.emit_rerequest(now, i, index, packet, packets),
            StagedItem::Response(response) => {
                let outgoing = self.emit_response(now, i, &response, payload);
                if response.packet + 1 == response.packet_first + response.packets {
                    self.responses_sent(now, i);
                }
                outgoing
            }
        }
    }

    fn emit_request(
        &mut self,
        now: Time,
        i: usize,
        index: u32,
        (packet, is_retransmission): (u32, bool),
        payload: &mut M::Payload,
    ) -> Option<OutgoingPacket> {
        let entry = self.entry(i, index)?;
        let psn = if entry.is_read_or_atomic() {
            entry.first.plus(self.received_before(entry))
        } else {
            entry.first.plus(packet)
        };
        let is_reliable = self.contexts[i].service == Service::Rc;
        if is_reliable && is_retransmission && psn.after(self.contexts[i].unacked) < 0 {
            return None; // it was acknowledged in the meantime
        }
        let mut header = self.request_header(now, i, entry, packet, psn)?;
        let (local, offset) = (entry.request.local, packet * self.contexts[i].mtu());
        let to = entry.request.datagram.map_or(self.contexts[i].peer, |datagram| datagram.to);
        let is_last = packet + 1 == entry.packets;
        let domain = self.contexts[i].domain;
        if header.payload_bytes > 0 && self.gather(domain, &local, offset, header.payload_bytes, payload).is_err() {
            self.entry_mut(i, index)?.failed = Some(CompletionStatus::LocalProtection);
            self.fail(now, i, index, CompletionStatus::LocalProtection);
            return None;
        }
        if is_reliable {
            header.ack_request |= is_retransmission || self.wants_ack(i, psn);
            self.packet_sent(now, i, psn, &header, is_retransmission);
        } else if is_last {
            self.unreliable_sent(now, i, index);
        }
        if is_retransmission {
            self.counters.retransmitted_packets += 1;
            self.host_qps[i].retransmitted_packets += 1;
        }
        Some(OutgoingPacket { to, header })
    }

    /// Returns the number of response packets that have arrived: without selective repeat, a READ is requested again
    /// from there on.
    fn received_before(&self, entry: &SendEntry) -> u32 {
        if self.profile.policy.is_selective() { 0 } else { entry.response_packets }
    }

    fn request_header(&self, now: Time, i: usize, entry: &SendEntry, packet: u32, psn: Psn) -> Option<Header> {
        let is_selective = self.profile.policy.is_selective() && self.contexts[i].service == Service::Rc;
        let part = PacketPosition::new(packet, entry.packets);
        let is_end = matches!(part, PacketPosition::Only | PacketPosition::Last);
        let operation = match entry.request.kind {
            SendKind::Send(_) | SendKind::SendWithInvalidate(_) => part.of(SEND),
            SendKind::Write(..) => part.of(WRITE),
            SendKind::Read(_) => Operation::ReadRequest,
            SendKind::CompareSwap { .. } => Operation::CompareSwap,
            SendKind::FetchAdd { .. } => Operation::FetchAdd,
            SendKind::BindWindow { .. } | SendKind::LocalInvalidate(_) => return None,
        };
        let mut header = self.header(i, operation, psn);
        let mtu = self.contexts[i].mtu();
        header.payload_bytes = if entry.is_read_or_atomic() { 0 } else { piece_bytes(entry.bytes, packet, mtu) };
        header.ack_request = is_end;
        header.solicited = is_end && entry.request.solicited;
        if is_selective {
            header.placement = Some(PlacementHeader { message: entry.message & MESSAGE_MASK, packet, sent: tick(now) });
        }
        match entry.request.kind {
            SendKind::Send(Some(data)) if is_end => header.immediate = Some(Immediate::Data(data)),
            SendKind::SendWithInvalidate(key) if is_end => header.immediate = Some(Immediate::Invalidate(key)),
            SendKind::Write(remote, immediate) => {
                header.immediate = immediate.filter(|_| is_end).map(Immediate::Data);
                if packet == 0 || is_selective {
                    let address = remote.address.wrapping_add(u64::from(packet) * u64::from(mtu));
                    header.reth = Some(Reth { address, key: remote.key, bytes: entry.bytes });
                }
            }
            SendKind::Read(remote) => {
                let before = self.received_before(entry) * mtu;
                let address = remote.address.wrapping_add(u64::from(before));
                header.reth = Some(Reth { address, key: remote.key, bytes: entry.bytes - before });
            }
            SendKind::CompareSwap { remote, compare, swap } => {
                let (address, key) = (remote.address, remote.key);
                header.atomic = Some(AtomicEth { address, key, swap_or_add: swap, compare });
            }
            SendKind::FetchAdd { remote, add } => {
                let (address, key) = (remote.address, remote.key);
                header.atomic = Some(AtomicEth { address, key, swap_or_add: add, compare: 0 });
            }
            SendKind::Send(_)
            | SendKind::SendWithInvalidate(_)
            | SendKind::BindWindow { .. }
            | SendKind::LocalInvalidate(_) => {}
        }
        if let Some(datagram) = entry.request.datagram {
            header.destination = datagram.qp;
            header.datagram = Some((datagram.queue_key, self.number(i)));
        }
        Some(header)
    }

    /// Builds a READ request for a part of the original range.
    fn emit_rerequest(&mut self, now: Time, i: usize, index: u32, packet: u32, packets: u32) -> Option<OutgoingPacket> {
        let entry = self.entry(i, index).filter(|entry| !entry.is_done)?;
        let mut header = self.request_header(now, i, entry, 0, entry.first)?;
        let mtu = self.contexts[i].mtu();
        let skipped = packet.checked_mul(mtu)?;
        if let Some(reth) = &mut header.reth {
            reth.address = reth.address.wrapping_add(u64::from(skipped));
            reth.bytes = entry.bytes.saturating_sub(skipped).min(packets.saturating_mul(mtu));
        }
        if let Some(placement) = &mut header.placement {
            placement.packet = packet;
        }
        self.counters.retransmitted_packets += 1;
        self.host_qps[i].retransmitted_packets += 1;
        self.rerequest_sent(now, i, index);
        self.await_response(now, i);
        Some(OutgoingPacket { to: self.contexts[i].peer, header })
    }

    fn emit_response(
        &mut self,
        now: Time,
        i: usize,
        response: &PendingResponse,
        payload: &mut M::Payload,
    ) -> Option<OutgoingPacket> {
        let is_selective = self.profile.policy.is_selective();
        let part = PacketPosition::new(response.packet - response.packet_first, response.packets);
        let operation = if response.value.is_some() { Operation::AtomicAcknowledge } else { part.of(READ_RESPONSE) };
        let offset = response.packet - response.packet_first;
        let psn = if is_selective { response.psn } else { response.psn.plus(offset) };
        let mut header = self.header(i, operation, psn);
        let context = &self.contexts[i];
        if part != PacketPosition::Middle {
            header.aeth = Some(Aeth { syndrome: ACK_WITHOUT_CREDITS, msn: context.msn & MESSAGE_MASK });
        }
        if is_selective {
            header.placement =
                Some(PlacementHeader { message: response.message, packet: response.packet, sent: response.sent });
        }
        if let Some(value) = response.value {
            header.atomic = Some(AtomicEth { address: 0, key: Default::default(), swap_or_add: value, compare: 0 });
            return Some(OutgoingPacket { to: context.peer, header });
        }
        let (mtu, to) = (context.mtu(), context.peer);
        header.payload_bytes = piece_bytes(response.bytes, offset, mtu);
        let address = response.address + u64::from(offset) * u64::from(mtu);
        if header.payload_bytes > 0 && self.memory.gather(address, header.payload_bytes, payload, 0).is_err() {
            self.send_nak(now, i, psn, Syndrome::RemoteOperation);
            return None;
        }
        Some(OutgoingPacket { to, header })
    }
}
