//! Two engines over plain memory, for measuring the cost of their work.

use crate::program::{Program, Role};
use crate::{Plan, SECRET};
use fabric::heap::{self, HeapLink};
use fabric::{Link, train_both};
use lane::{Consumer, Producer};
use proxy::frame::LinkSide;
use proxy::{ConnectionKey, Engine, EngineCounters, EngineEvent, OpenPayload, PartitionLanes};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Lets one engine send messages of `message_bytes` to another, polled in turn by this thread, until `frames` have
/// arrived. Returns the sum of their counters. Each engine copies every byte once.
pub fn work(message_bytes: usize, frames: u64) -> EngineCounters {
    let plan = Plan { slots: 4096, has_classes: false, slice_bytes: 4096, backlog_bytes: usize::MAX };
    let (mut low, mut high) = heap::pair(plan.layout().window_bytes());
    assert!(train_both(&mut low, &mut high), "two ends in one process come up");
    let port = |link: &HeapLink| {
        let (inbound, outbound) = (link.inbound(), link.outbound());
        let to = Producer::new(outbound.clone(), inbound.clone(), plan.layout(), SECRET);
        vec![PartitionLanes::new(to, Consumer::new(inbound, outbound, plan.layout(), SECRET))]
    };
    let mut from = Engine::new(plan.settings(LinkSide::Lower), port(&low));
    let mut to = Engine::new(plan.settings(LinkSide::Higher), port(&high));
    let clock_ns = Arc::new(AtomicU64::new(0));
    let source = Program::new(Role::Source(message_bytes), 0, 0).end(&clock_ns);
    from.open(OpenPayload::new(&[1]).expect("a byte"), |_: ConnectionKey| source).expect("room for a connection");
    while to.counters().frames_received < frames {
        for engine in [&mut from, &mut to] {
            engine.poll(0).expect("the peer is honest");
            while let Some(EngineEvent::Open { key, .. }) = engine.next_event() {
                engine.answer(key, Ok(Program::new(Role::Sink, 0, 0).end(&clock_ns)));
            }
        }
    }
    let mut both = *from.counters();
    both += *to.counters();
    both
}
