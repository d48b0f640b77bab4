//! Connections that outlive lost links: no byte is lost or repeated.

use crate::world::{Act, Shape, heap_world};
use proptest::prelude::*;

fn shape() -> Shape {
    Shape { is_failover: true, ..crate::shape() }
}

fn failover_shape() -> impl Strategy<Value = Shape> {
    crate::any_shape().prop_map(|shape| Shape { is_failover: true, ..shape })
}

fn acts_with_more_losses() -> impl Strategy<Value = Act> {
    prop_oneof![12 => crate::any_act(), 1 => any::<bool>().prop_map(|node| Act::Lose { node })]
}

/// Executes these acts, and then everything that can still happen.
fn run(shape: Shape, acts: impl IntoIterator<Item = Act>) {
    let (mut world, _links) = heap_world(shape);
    acts.into_iter().for_each(|act| world.act(act));
    world.settle();
    assert_eq!(world.violations, 0);
    world.check_settled();
    world.check_forgotten();
}

#[test]
fn connections_that_the_peer_does_not_resume_in_time_are_reset() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 1000, false, true);
    world.open(1, 1000, false, true);
    world.settle();
    assert!(world.nodes[0].engine.is_resumed());
    world.act(Act::Lose { node: false });
    assert!(!world.nodes[0].engine.is_resumed());
    assert_eq!(world.nodes[0].engine.reset_unresumed(), 2);
    assert_eq!(world.nodes[0].engine.connections(), 0);
    for conversation in &world.conversations {
        assert!(conversation.endpoints[0].as_ref().expect("connected").lock().input_is_reset);
    }
    // The other node resets them once it has lost the link too.
    world.settle();
    for conversation in &world.conversations {
        assert!(conversation.endpoints[1].as_ref().expect("connected").lock().input_is_reset);
    }
}

#[test]
fn bytes_received_before_the_peer_was_lost_are_still_delivered() {
    let (mut world, _links) = heap_world(shape());
    for node in [0, 1] {
        world.open(0, 16, false, node == 1);
    }
    world.conversations[1].reads = [false; 2];
    for connection in [0, 1] {
        world.conversations[usize::from(connection)].reads = [false; 2];
        world.act(Act::Send { connection, node: false, bytes: 100 });
    }
    world.act(Act::Close { connection: 0, node: false });
    world.settle();
    assert_eq!(world.nodes[0].engine.connections(), 1, "the node that closed a connection has forgotten it");
    assert_eq!(world.nodes[1].engine.lose_peer(), 1);
    let endpoints = [0, 1].map(|index: usize| world.conversations[index].endpoints[1].clone().expect("connected"));
    assert!(endpoints[1].lock().input_is_reset && !endpoints[0].lock().input_is_reset);
    world.conversations[0].reads = [true; 2];
    world.settle();
    assert_eq!(world.conversations[0].streams[0].read, 100);
    assert!(endpoints[0].lock().input_is_closed);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..crate::cases() })]

    /// The link is lost at every point of a history: by one node, and by the other one after some further acts.
    #[test]
    fn a_link_may_be_lost_at_any_moment(
        shape in failover_shape(),
        acts in prop::collection::vec(crate::any_act(), 0..60),
        node: bool,
        later in 0..6_usize
    ) {
        for at in 0..=acts.len() {
            let then = (at + later).min(acts.len());
            let lose = |node| [Act::Lose { node }];
            let history = [&acts[..at], &lose(node), &acts[at..then], &lose(!node), &acts[then..]].concat();
            run(shape, history);
        }
    }
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn several_links_may_be_lost(
        shape in failover_shape(), acts in prop::collection::vec(acts_with_more_losses(), 0..200)
    ) {
        run(shape, acts);
    }
}
