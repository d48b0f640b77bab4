//! Ports and switches: forwards packets between hosts, and applies what happens to them on the way.

use sim::Time;

use super::{Event, Network};
use crate::endpoint::{ETHERNET_BYTES_MIN, Endpoint};
use crate::impairment::PacketImpairment;
use crate::packet::{PacketFlag, PacketId, TrafficClass};
use crate::topology::{NetworkNode, NextHops, SwitchId};

/// Most control packets sent before a data packet that waits. Without a bound, the headers of trimmed packets fill a
/// link and no whole packet arrives (NDP, SIGCOMM 2017, section 3.1).
const CONTROLS_PER_DATA_MAX: u8 = 10;

impl<E: Endpoint> Network<E> {
    /// Handles a packet's arrival at a port.
    pub(super) fn arrive(&mut self, port: u32, packet: PacketId) {
        match self.owners[port as usize] {
            NetworkNode::Host(host) => self.deliver(host.0, packet),
            NetworkNode::Switch(switch) => {
                if self.arena.frame(packet).has(PacketFlag::Corrupt) {
                    self.counters.corrupt_packets += 1;
                    self.arena.remove(packet);
                    return;
                }
                self.forward(switch, port, packet);
            }
        }
    }

    /// Queues a packet at the port of its next hop, trims it, or drops it.
    fn forward(&mut self, switch_id: SwitchId, ingress: u32, packet: PacketId) {
        let frame = *self.arena.frame(packet);
        let switch = &mut self.switches[switch_id.0 as usize];
        let out = match self.routes.next_hops(switch_id, frame.to()) {
            NextHops::One(port) => port,
            NextHops::Many([only]) => *only,
            NextHops::Many(ports) => ports[switch.select_path(self.config.load_balancing, frame.label, ports.len())],
        };
        let (bytes, port) = (u64::from(frame.bytes), &self.ports[out as usize]);
        let queued = if frame.class == TrafficClass::Control { port.control.bytes } else { port.data.bytes };
        if self.config.pfc.is_some() && frame.class == TrafficClass::Data {
            if self.admit_lossless(switch_id, ingress, bytes) {
                return self.enqueue(ingress, out, packet);
            }
        } else if switch.admits(queued, bytes) {
            switch.allocate(bytes);
            return self.enqueue(ingress, out, packet);
        }
        let trimmed_bytes = self.arena.extra(packet).trimmed_bytes;
        if self.config.trimming && frame.class == TrafficClass::Data && trimmed_bytes < frame.bytes {
            let trimmed = u64::from(trimmed_bytes).max(ETHERNET_BYTES_MIN.into());
            let switch = &mut self.switches[switch_id.0 as usize];
            if switch.admits(self.ports[out as usize].control.bytes, trimmed) {
                switch.allocate(trimmed);
                let frame = self.arena.frame_mut(packet);
                (frame.bytes, frame.class) = (trimmed as u16, TrafficClass::Control);
                frame.set(PacketFlag::Trimmed);
                self.counters.trimmed_packets += 1;
                return self.enqueue(ingress, out, packet);
            }
        }
        self.counters.dropped_packets += 1;
        self.arena.remove(packet);
    }

    /// With PFC: allocates a packet's bytes in the shared buffer, or else in the headroom of its ingress port, which
    /// then pauses its neighbor. The threshold of the egress queue does not apply. Returns whether there was room.
    fn admit_lossless(&mut self, switch: SwitchId, ingress: u32, bytes: u64) -> bool {
        let switch = &mut self.switches[switch.0 as usize];
        let port = &mut self.extras[ingress as usize];
        if port.shared_used + bytes <= switch.pause_threshold(port.pause_alpha) {
            switch.allocate(bytes);
            port.shared_used += bytes;
            return true;
        }
        let has_room = port.headroom_used + bytes <= port.headroom;
        if has_room {
            port.headroom_used += bytes;
        }
        if !port.is_pausing {
            self.counters.pauses += 1;
            port.pauses += 1;
            self.send_pause(ingress, true);
        }
        has_room
    }

    /// Releases the bytes allocated by [`Self::admit_lossless`], those of the headroom first.
    fn release_lossless(&mut self, switch: SwitchId, ingress: u32, bytes: u64) {
        let port = &mut self.extras[ingress as usize];
        let from_headroom = bytes.min(port.headroom_used);
        port.headroom_used -= from_headroom;
        port.shared_used -= bytes - from_headroom;
        self.switches[switch.0 as usize].release(bytes - from_headroom);
        self.resume_if_drained(switch, ingress);
    }

    fn enqueue(&mut self, ingress: u32, out: u32, packet: PacketId) {
        let class = self.arena.frame(packet).class;
        self.arena.set_ingress(packet, ingress);
        let port = &mut self.ports[out as usize];
        match class {
            TrafficClass::Control => port.control.push(&mut self.arena, packet),
            TrafficClass::Data => port.data.push(&mut self.arena, packet),
        }
        port.queued_max = port.queued_max.max((port.data.bytes + port.control.bytes) as u32);
        self.transmit(out);
    }

    /// Resumes the neighbor of a port once its buffered bytes are below the pause threshold by the hysteresis.
    fn resume_if_drained(&mut self, switch: SwitchId, number: u32) {
        let Some(pfc) = &self.config.pfc else { return };
        let port = &self.extras[number as usize];
        let limit = self.switches[switch.0 as usize].pause_threshold(port.pause_alpha);
        let limit = limit.saturating_sub(pfc.hysteresis_bytes);
        if port.is_pausing && port.headroom_used == 0 && (port.shared_used <= limit || port.shared_used == 0) {
            self.send_pause(number, false);
        }
    }

    /// Sends a pause or resume frame. It leaves after the packet in transmission and delays no queued packet.
    fn send_pause(&mut self, number: u32, is_on: bool) {
        self.extras[number as usize].is_pausing = is_on;
        let port = &self.ports[number as usize];
        let begin = port.free_at.max(self.now);
        let at = begin + port.rate.transmission_time(ETHERNET_BYTES_MIN.into()) + port.delay;
        self.queue.schedule(at, Event::Pause { port: number ^ 1, is_on }.into());
    }

    /// Handles a pause or resume frame from the neighbor of a port.
    pub(super) fn pause(&mut self, number: u32, is_on: bool) {
        self.ports[number as usize].is_paused = is_on;
        if !is_on {
            self.resume(number);
        }
    }

    /// Handles the end of a port's transmission.
    pub(super) fn tx_done(&mut self, number: u32) {
        self.ports[number as usize].has_tx_done_event = false;
        self.resume(number);
    }

    /// Lets a port send again.
    fn resume(&mut self, number: u32) {
        match self.owners[number as usize] {
            NetworkNode::Host(host) => self.service_host(host.0),
            NetworkNode::Switch(_) => self.transmit(number),
        }
    }

    /// Sends a switch port's next packet if its link is idle.
    ///
    /// Only a port with more to send schedules an event for the end of the transmission.
    fn transmit(&mut self, number: u32) {
        let port = &mut self.ports[number as usize];
        if port.has_tx_done_event {
            return;
        }
        if port.free_at > self.now {
            return self.schedule_tx_done(number);
        }
        let has_data = !port.is_paused && !port.data.is_empty();
        let must_send_data = has_data && port.controls_since_data >= CONTROLS_PER_DATA_MAX;
        let next = if must_send_data { None } else { port.control.pop(&self.arena) };
        port.controls_since_data = if next.is_some() && has_data { port.controls_since_data + 1 } else { 0 };
        let next = if next.is_none() && has_data { port.data.pop(&self.arena) } else { next };
        let Some(packet) = next else { return };
        let (left, rate) = (port.data.bytes, port.rate);
        let is_more = !port.control.is_empty() || !port.data.is_empty() && !port.is_paused;
        let NetworkNode::Switch(switch) = self.owners[number as usize] else { return };
        let frame = self.arena.frame_mut(packet);
        let (bytes, class) = (u64::from(frame.bytes), frame.class);
        if let (Some(ecn), TrafficClass::Data) = (&self.config.ecn, class)
            && self.switches[switch.0 as usize].should_mark(ecn, rate, left)
        {
            frame.set(PacketFlag::EcnMarked);
            self.counters.marked_packets += 1;
        }
        if self.config.pfc.is_some() && class == TrafficClass::Data {
            self.release_lossless(switch, self.arena.extra(packet).ingress, bytes);
        } else {
            self.switches[switch.0 as usize].release(bytes);
        }
        self.put_on_link(number, packet);
        if is_more {
            self.schedule_tx_done(number);
        }
    }

    /// Schedules the event for the end of a port's transmission.
    pub(super) fn schedule_tx_done(&mut self, number: u32) {
        let port = &mut self.ports[number as usize];
        port.has_tx_done_event = true;
        self.queue.schedule(port.free_at, Event::TxDone { port: number }.into());
    }

    /// Begins to transmit a packet, and schedules its arrival at the other end of the link.
    pub(super) fn put_on_link(&mut self, number: u32, packet: PacketId) {
        let port = &mut self.ports[number as usize];
        let bytes = u64::from(self.arena.frame(packet).bytes);
        port.free_at = self.now + port.rate.transmission_time(bytes);
        self.counters.sent_packets += 1;
        let (arrives, peer) = (port.free_at + port.delay, number ^ 1);
        if !port.is_impaired {
            return self.queue.schedule(arrives, Event::Arrive { port: peer, packet }.into());
        }
        if let Some(impairment) = &mut self.extras[number as usize].impairment {
            let impairment = impairment.next_packet();
            self.schedule_impaired(impairment, arrives, peer, packet);
        }
    }

    fn schedule_impaired(&mut self, impairment: PacketImpairment, arrives: Time, peer: u32, packet: PacketId) {
        if impairment.is_lost {
            self.counters.lost_packets += 1;
            self.arena.remove(packet);
            return;
        }
        if impairment.is_corrupt {
            self.arena.frame_mut(packet).set(PacketFlag::Corrupt);
        }
        if impairment.is_duplicated {
            self.counters.doubled_packets += 1;
            let copy = self.arena.copy(packet);
            self.queue.schedule(arrives, Event::Arrive { port: peer, packet: copy }.into());
        }
        self.counters.late_packets += u64::from(impairment.extra_delay.ps() > 0);
        self.queue.schedule(arrives + impairment.extra_delay, Event::Arrive { port: peer, packet }.into());
    }
}
