//! A peer that sends anything.

use crate::world::{Act, Conversation, SECRET, Shape, World, heap_world};
use fabric::heap::HeapLink;
use fabric::{Inbound, Link, Outbound};
use lane::Producer;
use std::collections::HashSet;
use volmem::sync::Ordering;

/// What a hostile node does, alongside its programs.
#[derive(Debug, Clone)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub enum Attack {
    /// An ordinary act.
    Act(Act),
    /// A well-formed record with a frame for the connection of this number, with any contents.
    Frame { in_bulk: bool, connection: u8, opened_by_higher: bool, kind: u8, len_bytes: u16, aux: u32, is_bare: bool },
    /// A record of any bytes.
    Record { in_bulk: bool, bytes: Vec<u8> },
    /// A word anywhere in the window.
    Word { at: u32, value: u64 },
    /// The victim is polled.
    Poll,
}

/// Node 1 is hostile. Node 0 must survive, and connections that no attack names must not be affected, unless the whole
/// link is taken down.
pub fn check(shape: Shape, attacks: &[Attack]) {
    let (mut world, links) = heap_world(shape);
    let mut named = HashSet::new();
    for attack in attacks {
        match attack {
            Attack::Act(act) => {
                world.act(*act);
                // Frames may have been sent before the connection that they name was opened.
                mark_attacked(&mut world.attacked, &named, &world.conversations);
            }
            Attack::Poll => {
                world.act(Act::Wait { ns: 400 });
                world.poll(0);
            }
            Attack::Frame { in_bulk, connection, opened_by_higher, kind, len_bytes, aux, is_bare } => {
                let number = u32::from(*connection % 64) | u32::from(*opened_by_higher) << 31;
                named.insert(number);
                mark_attacked(&mut world.attacked, &named, &world.conversations);
                let payload = if *is_bare { 0 } else { usize::from(*len_bytes) % 3000 };
                let mut bytes = vec![0x5A; 16 + payload];
                bytes[..4].copy_from_slice(&number.to_le_bytes());
                bytes[4] = *kind;
                bytes[5..8].fill(0);
                bytes[8..12].copy_from_slice(&(payload as u32).to_le_bytes());
                bytes[12..16].copy_from_slice(&aux.to_le_bytes());
                inject(shape, &world, &links[1], *in_bulk, &bytes);
            }
            Attack::Record { in_bulk, bytes } => {
                world.attacked.fill(true);
                inject(shape, &world, &links[1], *in_bulk, bytes);
            }
            Attack::Word { at, value } => {
                world.attacked.fill(true);
                let window = world.link(1).unwrap_or(&links[1]).outbound();
                window.store_u64(*at as usize % (window.len_bytes() / 8) * 8, *value, Ordering::Relaxed);
            }
        }
    }
    mark_attacked(&mut world.attacked, &named, &world.conversations);
    if attacks.iter().any(|attack| matches!(attack, Attack::Record { .. } | Attack::Word { .. })) {
        for _ in 0..200 {
            world.wait(400);
            world.poll(0);
            world.sleep(0);
            world.poll(1);
        }
    } else {
        world.settle();
        world.check_settled();
    }
    let node = &world.nodes[0].engine;
    assert!(node.connections() <= usize::from(shape.connections_max.clamp(1, 40)));
}

/// Marks the connections that attacks have named. The `n`th connection that a side opens has the number `n`.
fn mark_attacked(attacked: &mut [bool], named: &HashSet<u32>, conversations: &[Conversation]) {
    for number in named {
        let opener = usize::from(number >> 31 != 0);
        let nth = (number & 63) as usize;
        let conversation =
            conversations.iter().enumerate().filter(|(_, conversation)| conversation.opener == opener).nth(nth);
        if let Some((index, _)) = conversation {
            attacked[index] = true;
        }
    }
}

/// Sends a record from node 1, on its newest link. A second producer continues where the engine's is, because both have
/// the same state.
fn inject(shape: Shape, world: &World<HeapLink>, first_link: &HeapLink, in_bulk: bool, bytes: &[u8]) {
    let index = usize::from(in_bulk && shape.has_classes);
    let (inbound, outbound) = shape.slices(world.link(1).unwrap_or(first_link), index);
    assert!(inbound.len_bytes() == outbound.len_bytes());
    let state = world.sender_states[1][index].clone();
    let mut producer = Producer::with_state(outbound, inbound, state, shape.layout(), SECRET);
    if bytes.is_empty() {
        return;
    }
    if let Ok(Some(mut draft)) = producer.draft(bytes.len()) {
        let room = draft.room_bytes().min(bytes.len());
        draft.append(&bytes[..room]);
        draft.publish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_frame() -> impl Strategy<Value = Attack> {
        let aux = prop_oneof![Just(0), 0..20_000_u32, any::<u32>()];
        (any::<bool>(), 0..8_u8, any::<bool>(), 0..15_u8, 0..100_u16, aux, any::<bool>()).prop_map(
            |(in_bulk, connection, opened_by_higher, kind, len_bytes, aux, is_bare)| Attack::Frame {
                in_bulk,
                connection,
                opened_by_higher,
                kind,
                len_bytes,
                aux,
                is_bare,
            },
        )
    }

    fn any_attack() -> impl Strategy<Value = Attack> {
        let record = (any::<bool>(), prop::collection::vec(any::<u8>(), 1..60));
        let word = (any::<u32>(), prop_oneof![0..100_u64, any::<u64>()]);
        prop_oneof![
            13 => frames_and_life(),
            1 => record.prop_map(|(in_bulk, bytes)| Attack::Record { in_bulk, bytes }),
            1 => word.prop_map(|(at, value)| Attack::Word { at, value }),
        ]
    }

    fn frames_and_life() -> impl Strategy<Value = Attack> {
        prop_oneof![6 => crate::any_act().prop_map(Attack::Act), 4 => any_frame(), 3 => Just(Attack::Poll)]
    }

    fn frame(number: u32, kind: u8, aux: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(aux.to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// Creates a world in which node 0 has one connection that is not read, and returns its counts after these frames
    /// for it.
    fn after_frames(frames: &[Vec<u8>]) -> (usize, bool, u64) {
        let shape = Shape {
            has_classes: true,
            ring_shift: 5,
            slice_bytes: 0,
            connections_max: 4,
            is_failover: false,
            is_oversubscribed: false,
        };
        let (mut world, links) = heap_world(shape);
        world.open(0, 100, false, true);
        world.conversations[0].reads = [false; 2];
        world.settle();
        for bytes in frames {
            inject(shape, &world, &links[1], false, bytes);
            world.nodes[0].is_rung = true;
            world.poll(0);
        }
        let is_reset = world.conversations[0].endpoints[0].as_ref().expect("connected").lock().input_is_reset;
        (world.violations, is_reset, world.nodes[0].engine.counters().bytes_buffered)
    }

    #[test]
    fn bytes_beyond_the_credit_reset_the_connection_and_are_not_kept() {
        let frames: Vec<_> = (0..30).map(|at| frame(0, 4, at * 1000, &[1; 1000])).collect();
        let (violations, is_reset, bytes_buffered) = after_frames(&frames);
        assert_eq!((violations, is_reset), (1, true));
        assert!(bytes_buffered <= 20_000, "{bytes_buffered}");
    }

    #[test]
    fn protocol_violations_reset_the_connection() {
        let bytes_at_0 = frame(0, 4, 0, &[1; 10]);
        let frames = [
            ("bytes of another position", vec![frame(0, 4, 5, &[1; 10])]),
            ("bytes again", vec![bytes_at_0.clone(), bytes_at_0.clone()]),
            ("an end at another position", vec![frame(0, 6, 1, &[])]),
            ("two ends", vec![frame(0, 6, 0, &[]), frame(0, 6, 0, &[])]),
            ("bytes after the end", vec![frame(0, 6, 0, &[]), bytes_at_0]),
            ("credit beyond the maximum", vec![frame(0, 5, u32::MAX / 2, &[])]),
            ("reduced credit", vec![frame(0, 5, 1, &[])]),
            ("a second answer", vec![frame(0, 2, 30_000, &[])]),
            ("a late refusal", vec![frame(0, 3, 111, &[])]),
            ("a move to no partition", vec![frame(0, 9, 2, &[])]),
            ("a move to its own partition", vec![frame(0, 9, 0, &[])]),
            ("a frame in the partition that it has left", vec![frame(0, 9, 1, &[]), frame(0, 5, 40_000, &[])]),
        ];
        for (what, frames) in frames {
            assert_eq!(after_frames(&frames).0, 1, "{what}");
            assert!(after_frames(&frames).1, "{what}");
        }
    }

    #[test]
    fn a_frame_may_arrive_before_the_connection_that_it_names() {
        let shape = Shape {
            has_classes: true,
            ring_shift: 0,
            slice_bytes: 0,
            connections_max: 1,
            is_failover: false,
            is_oversubscribed: false,
        };
        let frame = Attack::Frame {
            in_bulk: false,
            connection: 0,
            opened_by_higher: false,
            kind: 4,
            len_bytes: 1,
            aux: 0,
            is_bare: false,
        };
        let open = Act::Open { node: false, input_bytes_max: 16, is_refused: false, server_reads: false };
        let read = Act::Read { connection: 0, node: false, bytes: 1 };
        check(shape, &[frame, Attack::Act(open), Attack::Poll, Attack::Act(read)]);
    }

    proptest! {
        #![proptest_config(crate::cases())]

        #[test]
        fn the_engine_survives_a_peer_that_sends_anything(
            shape in crate::any_shape(), attacks in prop::collection::vec(any_attack(), 0..150)
        ) {
            check(shape, &attacks);
        }

        #[test]
        fn frames_for_one_connection_do_not_affect_others(
            shape in crate::any_shape(), attacks in prop::collection::vec(frames_and_life(), 0..150)
        ) {
            check(shape, &attacks);
        }
    }
}
