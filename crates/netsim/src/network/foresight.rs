//! Looking ahead: a network of a thousand hosts is larger than the fast caches, and an event waits mostly for memory.
//! The next events are known, so what they will touch is touched before: its way into the cache is then gone while
//! others are handled. Nothing is changed by it.

use std::hint::black_box;

use sim::Time;

use super::{Event, Network, Owner, Scheduled};
use crate::endpoint::Endpoint;
use crate::packet::PacketId;
use crate::topology::{Choices, SwitchId};

/// So many events before one, what is found by its port and its packet is looked at;
const FAR_EVENTS: usize = 12;
/// and so many before it, what is found by that.
const NEAR_EVENTS: usize = 5;

impl<E: Endpoint> Network<E> {
    /// The next event.
    pub(super) fn next_event(&mut self) -> Option<(Time, Event)> {
        // The queue brings events in batches.
        let is_first = self.queue.upcoming(0).is_none();
        let (now, event) = self.queue.next_event()?;
        let is_new = |events: usize| if is_first { 0..events } else { events - 1..events };
        let far = is_new(FAR_EVENTS).map_while(|place| self.queue.upcoming(place));
        let far: u64 = far.fold(0, |sum, event| sum.wrapping_add(self.foresee_far(*event)));
        let near = is_new(NEAR_EVENTS).map_while(|place| self.queue.upcoming(place));
        let near: u64 = near.fold(0, |sum, event| sum.wrapping_add(self.foresee_near(*event)));
        black_box(far.wrapping_add(near)); // else nothing would be looked at
        Some((now, event.into()))
    }

    fn foresee_far(&self, event: Scheduled) -> u64 {
        match event.into() {
            Event::Arrive { port, packet } => {
                let end = match self.owners[port as usize] {
                    Owner::Host(host) => {
                        let header = E::foresee_header(self.arena.header(packet));
                        self.endpoints[host as usize].foresee().wrapping_add(header)
                    }
                    Owner::Switch(_) => 0,
                };
                end.wrapping_add(self.arena.foresee(packet))
            }
            Event::Free { port } => match self.owners[port as usize] {
                Owner::Host(host) => self.endpoints[host as usize].foresee(),
                Owner::Switch(_) => self.ports[port as usize].data.bytes,
            },
            Event::Wake { host } => self.endpoints[host as usize].foresee(),
            Event::Start | Event::Pause { .. } | Event::Stop => 0,
        }
    }

    fn foresee_near(&self, event: Scheduled) -> u64 {
        match event.into() {
            Event::Arrive { port, packet } => match self.owners[port as usize] {
                Owner::Host(host) => self.endpoints[host as usize].foresee_packet(Some(self.arena.header(packet))),
                Owner::Switch(switch) => self.foresee_way(switch, packet),
            },
            Event::Free { port } => match self.owners[port as usize] {
                Owner::Host(host) => self.endpoints[host as usize].foresee_packet(None),
                Owner::Switch(_) => self.arena.foresee(self.ports[port as usize].data.head()),
            },
            Event::Wake { host } => self.endpoints[host as usize].foresee_packet(None),
            Event::Start | Event::Pause { .. } | Event::Stop => 0,
        }
    }

    /// One of the ports that a packet may leave a switch by.
    fn foresee_way(&self, switch: u32, packet: PacketId) -> u64 {
        let frame = self.arena.frame(packet);
        let out = match self.routes.towards(SwitchId(switch), frame.to()) {
            Choices::One(port) => port,
            Choices::Many(ports) => ports[self.switches[switch as usize].path_by_flow(frame.label, ports.len())],
        };
        self.ports[out as usize].data.bytes
    }
}
