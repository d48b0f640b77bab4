//! A peer that keeps writing while its frames are received.

use crate::world::SECRET;
use fabric::heap::{self, HeapLink};
use fabric::{Inbound, Link, Outbound, Slice, train_both};
use lane::{Consumer, Draft, Layout, Producer, Span};
use proxy::frame::{ConnectionNumber, FrameHeader, FrameKind, LinkSide};
use proxy::{Broken, Class, Engine, EngineEvent, EngineSettings, Input, LocalEndpoint, OpenPayload, PartitionLanes};
use std::sync::{Arc, Mutex};

type HeapInbound = <HeapLink as Link>::Inbound;
type HeapOutbound = <HeapLink as Link>::Outbound;
type Victim = Engine<HeapInbound, HeapOutbound, AcceptAll>;

const LAYOUT: Layout = Layout::packed(512, 0);
/// Frames of the flood, and the bound on those that one poll may receive: slightly more than the largest ring has
/// slots.
const FLOOD_FRAMES: u32 = 1 << 17;
const RECEIVED_FRAMES_MAX: u64 = (1 << 14) + 1000;
/// The two connections that the hostile node has opened.
const FLOODING: ConnectionNumber = ConnectionNumber(1 << 31);
const AHEAD: ConnectionNumber = ConnectionNumber(1 << 31 | 1);

/// The hostile end of a partition.
struct HostileSender {
    producer: Producer<HeapOutbound, HeapInbound>,
    sent: u32,
    limit: u32,
}

impl HostileSender {
    fn send(&mut self, connection: ConnectionNumber, kind: FrameKind, aux: u32, payload: &[u8]) -> bool {
        let header = FrameHeader { connection, kind, len_bytes: payload.len(), aux };
        let Ok(Some(mut draft)) = self.producer.draft(16 + payload.len()) else { return false };
        draft.append(&header.encode());
        draft.append(payload);
        draft.publish();
        true
    }

    /// Sends as many frames as there is room for.
    fn flood(&mut self) {
        while self.sent < self.limit && self.send(FLOODING, FrameKind::Data, self.sent, b"x") {
            self.sent += 1;
        }
    }
}

/// A program that accepts everything; with each byte, the hostile node writes more.
struct AcceptAll(Arc<Mutex<HostileSender>>);

impl LocalEndpoint for AcceptAll {
    fn may_have_input(&mut self) -> bool {
        false
    }

    fn input(&mut self) -> Input {
        Input::Nothing
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, _draft: &mut Draft<'_, O, I>, _len_bytes: usize) {}

    fn read_input(&mut self, _skip_bytes: usize, _destination: &mut [u8]) {}

    fn consume(&mut self, _len_bytes: usize) -> Result<(), Broken> {
        Ok(())
    }

    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        self.0.lock().unwrap().flood();
        Ok(bytes.len_bytes())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        Ok(bytes.len())
    }

    fn has_room(&mut self) -> bool {
        true
    }
}

fn partition(
    own: &HeapLink,
    peer: &HeapLink,
    index: usize,
) -> (PartitionLanes<HeapInbound, HeapOutbound>, Arc<Mutex<HostileSender>>) {
    let bytes = LAYOUT.window_bytes();
    let inbound = |link: &HeapLink| link.inbound().slice(index * bytes, bytes);
    let outbound = |link: &HeapLink| link.outbound().slice(index * bytes, bytes);
    let port = PartitionLanes::new(
        Producer::new(outbound(own), inbound(own), LAYOUT, SECRET),
        Consumer::new(inbound(own), outbound(own), LAYOUT, SECRET),
    );
    let producer = Producer::new(outbound(peer), inbound(peer), LAYOUT, SECRET);
    (port, Arc::new(Mutex::new(HostileSender { producer, sent: 0, limit: 0 })))
}

/// Opens a connection to a program that accepts everything, and moves it to the bulk partition.
fn open_and_move(
    victim: &mut Victim,
    number: ConnectionNumber,
    latency: &Mutex<HostileSender>,
    bulk: &Arc<Mutex<HostileSender>>,
) {
    let open_payload = OpenPayload::new(b"from to").expect("a payload");
    assert!(latency.lock().unwrap().send(number, FrameKind::Open, 1000, open_payload.bytes()));
    victim.poll(0).expect("an honest frame");
    let Some(EngineEvent::Open { key, .. }) = victim.next_event() else { panic!("nothing was opened") };
    victim.answer(key, Ok(AcceptAll(Arc::clone(bulk))));
    assert!(latency.lock().unwrap().send(number, FrameKind::Move, Class::Bulk as u32, &[]));
    victim.poll(1).expect("an honest frame");
}

#[test]
fn a_peer_that_keeps_writing_while_a_partition_is_drained_does_not_prolong_the_poll() {
    let (mut own, mut peer) = heap::pair(2 * LAYOUT.window_bytes());
    assert!(train_both(&mut own, &mut peer));
    let [(latency, to_latency), (bulk, to_bulk)] = [0, 1].map(|index| partition(&own, &peer, index));
    let mut victim: Victim = Engine::new(EngineSettings::new(LinkSide::Lower), vec![latency, bulk]);
    for number in [FLOODING, AHEAD] {
        open_and_move(&mut victim, number, &to_latency, &to_bulk);
    }
    to_bulk.lock().unwrap().limit = FLOOD_FRAMES;
    to_bulk.lock().unwrap().flood();
    assert!(
        to_latency.lock().unwrap().send(AHEAD, FrameKind::Data, 0, b"x"),
        "a frame in the partition that it has left"
    );
    let before = victim.counters().frames_received;
    victim.poll(2).expect("frames of connections");
    let received = victim.counters().frames_received - before;
    assert!((1000..RECEIVED_FRAMES_MAX).contains(&received), "{received} frames in one poll");
}
