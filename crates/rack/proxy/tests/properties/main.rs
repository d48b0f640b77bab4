//! Random histories of many connections over the partitions of one link, against an oracle: every program reads all
//! bytes that were sent to it, in order, then the end; and a connection that is not read stalls no other one.

mod batches;
mod flood;
mod hostile;
mod losses;
mod program;
mod world;
mod yielding;

use fabric::heap::HeapLink;
use fabric::test_support::faulty::{FaultPlan, FaultyLink};
use fabric::{Link, Outbound, heap, train_both};
use proptest::prelude::*;
use world::{Act, Shape, World, heap_world};

fn any_shape() -> impl Strategy<Value = Shape> {
    let slice = prop_oneof![Just(0), 1..100_u16, 100..5000_u16];
    (any::<bool>(), 0..8_u8, slice, 1..40_u8, any::<[bool; 2]>()).prop_map(
        |(has_classes, ring_shift, slice_bytes, connections_max, [is_failover, is_oversubscribed])| Shape {
            has_classes,
            ring_shift,
            slice_bytes,
            connections_max,
            is_failover,
            is_oversubscribed,
        },
    )
}

fn any_act() -> impl Strategy<Value = Act> {
    let moved = || (any::<u8>(), any::<bool>(), prop_oneof![1..100_u16, 1..20_000_u16]);
    let open = (any::<bool>(), 16..40_000_u16, prop::bool::weighted(0.1), prop::bool::weighted(0.9)).prop_map(
        |(node, input_bytes_max, is_refused, server_reads)| Act::Open {
            node,
            input_bytes_max,
            is_refused,
            server_reads,
        },
    );
    prop_oneof![
        2 => open,
        8 => moved().prop_map(|(connection, node, bytes)| Act::Send { connection, node, bytes }),
        6 => moved().prop_map(|(connection, node, bytes)| Act::Read { connection, node, bytes }),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(connection, node)| Act::Finish { connection, node }),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(connection, node)| Act::Close { connection, node }),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(connection, node)| Act::Kill { connection, node }),
        16 => any::<bool>().prop_map(|node| Act::Poll { node }),
        4 => any::<bool>().prop_map(|node| Act::Sleep { node }),
        4 => (0..3000_u16).prop_map(|ns| Act::Wait { ns }),
        1 => any::<bool>().prop_map(|node| Act::Lose { node }),
    ]
}

/// Creates a world whose stores arrive late and out of order, as a plan of this seed determines.
fn late_world(shape: Shape, seed: u64) -> World<FaultyLink<HeapLink>> {
    let (mut a, mut b) = heap::pair(shape.window_bytes());
    assert!(train_both(&mut a, &mut b));
    let plan = |seed| FaultPlan { delay_ns: 0..=700, ..FaultPlan::write_combined(seed) };
    let links = std::sync::Arc::new([FaultyLink::new(a, plan(seed)), FaultyLink::new(b, plan(!seed))]);
    // Which stores in flight a lost link still delivers is not tested here.
    let mut world = World::new(Shape { is_failover: false, ..shape }, &links[0], &links[1], |_| unreachable!());
    let ticked = links.clone();
    world.on_time = Box::new(move |now_ns| ticked.iter().for_each(|link| link.tick(now_ns)));
    world.on_fence = Box::new(move |node| links[node].outbound().fence());
    // Each flush of a sleeper advances its wire's clock by one delay; the last poll must come after everything in
    // flight.
    world.flush_ns = 10_000;
    world
}

fn cases() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_program_reads_what_was_sent_to_it(shape in any_shape(), acts in prop::collection::vec(any_act(), 0..200)) {
        let (mut world, _links) = heap_world(shape);
        for act in acts {
            world.act(act);
        }
        world.settle();
        prop_assert_eq!(world.violations, 0);
        world.check_settled();
    }

    #[test]
    fn late_and_reordered_stores_change_nothing(
        shape in any_shape(), seed: u64, acts in prop::collection::vec(any_act(), 0..80)
    ) {
        let mut world = late_world(shape, seed);
        for act in acts {
            world.act(act);
        }
        world.settle();
        prop_assert_eq!(world.violations, 0);
        world.check_settled();
    }
}

fn shape() -> Shape {
    Shape {
        has_classes: true,
        ring_shift: 5,
        slice_bytes: 1000,
        connections_max: 40,
        is_failover: false,
        is_oversubscribed: false,
    }
}

#[test]
fn a_connection_that_is_not_read_stalls_no_other() {
    for has_classes in [false, true] {
        let (mut world, _links) = heap_world(Shape { has_classes, ..shape() });
        world.open(0, 1000, false, false);
        world.open(0, 1000, false, true);
        for _ in 0..100 {
            world.act(Act::Send { connection: 0, node: false, bytes: 10_000 });
            world.act(Act::Send { connection: 1, node: false, bytes: 10_000 });
        }
        world.settle();
        world.check_settled();
        assert_eq!((world.conversations[0].streams[0].read, world.conversations[1].streams[0].read), (0, 1_000_000));
        let counters = world.nodes[0].engine.counters();
        assert!(counters.stalls > 0 && counters.bytes_sent < 1_000_000 + 30_000, "{counters:?}");
    }
}

#[test]
fn a_stream_moves_to_the_bulk_partition_and_back() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 40_000, false, true);
    for _ in 0..20 {
        world.act(Act::Send { connection: 0, node: false, bytes: 10_000 });
    }
    world.settle();
    assert_eq!(world.nodes[0].engine.counters().moves, 1);
    for _ in 0..10 {
        world.wait(600);
        world.act(Act::Send { connection: 0, node: false, bytes: 10 });
        world.settle();
    }
    world.check_settled();
    assert_eq!(world.nodes[0].engine.counters().moves, 2);
    assert_eq!(world.conversations[0].streams[0].read, 200_100);
}

/// Bytes of a connection that is over wait in the bulk partition, before the `Move` of another connection.
#[test]
fn late_bytes_of_one_connection_do_not_reset_another_one_that_moves() {
    const LATE: u8 = 0;
    const MOVING: u8 = 1;
    const SHORT: u8 = 2;
    let (mut world, _links) = heap_world(Shape { ring_shift: 7, ..shape() });
    let send = |world: &mut World<HeapLink>, connection, bytes| {
        world.act(Act::Send { connection, node: false, bytes });
        world.poll(0);
    };
    (0..3).for_each(|_| world.open(0, 40_000, false, true));
    for connection in [LATE, MOVING] {
        world.act(Act::Send { connection, node: false, bytes: 10_000 });
    }
    world.settle();
    assert_eq!(world.nodes[0].engine.counters().moves, 2, "both connections are streams");
    // More than a node receives from a partition in one poll, so that it polls the other partition before the end.
    (0..40).for_each(|_| send(&mut world, SHORT, 1));
    send(&mut world, LATE, 500);
    while world.nodes[0].engine.counters().moves == 2 {
        world.wait(600);
        send(&mut world, MOVING, 10);
    }
    send(&mut world, MOVING, 10);
    // The other node sends this without having received what has arrived.
    world.act(Act::Kill { connection: LATE, node: true });
    world.act(Act::Sleep { node: true });
    assert_eq!(world.nodes[1].engine.connections(), 2);
    world.settle();
    assert_eq!(world.violations, 0);
    world.check_settled();
}

/// Before it sleeps, a node polls its programs a last time and sends an `Open`, but no bytes, because the partition is
/// full.
#[test]
fn the_peer_is_rung_for_frames_that_are_sent_while_preparing_for_sleep() {
    let shape = Shape {
        has_classes: false,
        ring_shift: 0,
        slice_bytes: 0,
        connections_max: 3,
        is_failover: false,
        is_oversubscribed: true,
    };
    let mut world = late_world(shape, 0);
    let (poll, sleep) = (|node| Act::Poll { node }, |node| Act::Sleep { node });
    let open = |node, input_bytes_max| Act::Open { node, input_bytes_max, is_refused: false, server_reads: true };
    let acts = [
        sleep(false),
        open(false, 16),
        Act::Finish { connection: 0, node: false },
        sleep(false),
        open(true, 16),
        poll(false),
        sleep(false),
        open(false, 384),
        poll(false),
        poll(true),
        Act::Send { connection: 2, node: false, bytes: 769 },
        sleep(false),
        poll(true),
        poll(true),
        poll(false),
        sleep(false),
        open(false, 16),
        sleep(false),
        poll(false),
        poll(true),
        sleep(true),
        sleep(false),
        sleep(false),
    ];
    acts.into_iter().for_each(|act| world.act(act));
    world.settle();
    world.check_settled();
}

#[test]
fn idle_connections_are_not_polled_and_wake_when_they_are_used() {
    let (mut world, _links) = heap_world(shape());
    for _ in 0..20 {
        world.open(0, 1000, false, true);
    }
    world.settle();
    assert!(world.nodes.iter().all(|node| node.is_asleep));
    let parks = world.nodes[0].engine.counters().parks;
    assert_eq!(parks, 20);
    world.act(Act::Send { connection: 7, node: false, bytes: 100 });
    world.settle();
    world.check_settled();
    assert_eq!(world.conversations[7].streams[0].read, 100);
    assert_eq!(world.nodes[0].engine.counters().parks, parks + 1, "only one was woken");
}

#[test]
fn a_closed_endpoint_differs_from_a_half_closed_one() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 1000, false, true);
    world.act(Act::Send { connection: 0, node: false, bytes: 5000 });
    world.act(Act::Finish { connection: 0, node: false });
    world.settle();
    let server = world.conversations[0].endpoints[1].clone().expect("connected");
    assert!(server.lock().input_is_finished && !server.lock().input_is_closed);
    world.act(Act::Send { connection: 0, node: true, bytes: 3000 });
    world.settle();
    assert_eq!(world.conversations[0].streams[1].read, 3000, "the other direction stays open");
    world.act(Act::Close { connection: 0, node: true });
    world.settle();
    world.check_settled();
    assert_eq!(world.nodes.each_ref().map(|node| node.engine.connections()), [0, 0]);
}

#[test]
fn a_lost_link_resets_all_its_connections() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 1000, false, true);
    world.open(1, 1000, false, true);
    world.settle();
    world.nodes[0].engine.take_down();
    for conversation in &world.conversations {
        assert!(conversation.endpoints[0].as_ref().expect("connected").lock().input_is_reset);
    }
    assert_eq!(world.nodes[0].engine.connections(), 0);
}

#[test]
fn bytes_sent_while_the_connection_is_parked_are_received() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 1000, false, true);
    let conversation = &mut world.conversations[0];
    let late = (0..10).map(|at| conversation.byte(0, 0, at)).collect();
    conversation.streams[0].sent = 10;
    conversation.endpoints[0].as_ref().expect("connected").lock().late_output = late;
    world.settle();
    world.check_settled();
    assert_eq!(world.conversations[0].streams[0].read, 10);
}

/// The receiver polls the latency partition first, and finds frames there whose connection has older ones in the other
/// partition.
#[test]
fn frames_that_overtake_others_of_their_connection_wait_for_them() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 40_000, false, true);
    world.open(0, 40_000, false, true);
    for connection in [0, 1] {
        world.act(Act::Send { connection, node: false, bytes: 10_000 });
    }
    world.settle();
    assert_eq!(world.nodes[0].engine.counters().moves, 2, "both connections are streams");
    // The receiver is not polled for a while.
    world.act(Act::Send { connection: 1, node: false, bytes: 6000 });
    for _ in 0..10 {
        world.act(Act::Send { connection: 0, node: false, bytes: 10 });
        world.poll(0);
        world.wait(600);
    }
    assert_eq!(world.nodes[0].engine.counters().moves, 3, "one connection is not a stream any more");
    world.settle();
    world.check_settled();
    assert_eq!((world.violations, world.conversations[0].streams[0].read), (0, 10_100));
}

#[test]
fn a_program_that_is_killed_while_it_is_not_read_is_reset_at_the_other_end() {
    let (mut world, _links) = heap_world(shape());
    world.open(0, 1000, false, false);
    for _ in 0..5 {
        world.act(Act::Send { connection: 0, node: false, bytes: 10_000 });
    }
    world.settle();
    assert!(world.nodes[0].engine.counters().stalls > 0, "more was sent than there is credit for");
    world.act(Act::Kill { connection: 0, node: false });
    world.settle();
    assert!(world.conversations[0].endpoints[1].as_ref().expect("connected").lock().input_is_reset);
    assert_eq!(world.nodes.each_ref().map(|node| node.engine.connections()), [0, 0]);
}

/// The receiver polls the other partition before it has received the `Open`, because more frames precede it than one
/// poll receives.
#[test]
fn bytes_that_overtake_the_open_of_their_connection_wait_for_it() {
    let (mut world, _links) = heap_world(Shape { ring_shift: 6, slice_bytes: 0, ..shape() });
    world.open(0, 40_000, false, true);
    world.settle();
    for _ in 0..40 {
        world.act(Act::Send { connection: 0, node: false, bytes: 10 });
        world.poll(0);
    }
    world.open(0, 40_000, false, true);
    for bytes in [10_000, 4000] {
        world.act(Act::Send { connection: 1, node: false, bytes });
        (0..3).for_each(|_| world.poll(0));
    }
    assert_eq!(world.nodes[0].engine.counters().moves, 1, "some bytes are in the other partition");
    world.settle();
    world.check_settled();
    assert_eq!((world.violations, world.conversations[1].streams[0].read), (0, 14_000));
}

/// Slices exist for the sake of other connections: on oversubscribed processors, a connection alone sends everything at
/// once.
#[test]
fn on_oversubscribed_processors_a_sole_connection_sends_more_per_poll_than_one_of_two() {
    let sent_per_poll = |connections: u8, is_oversubscribed: bool| {
        let (mut world, _links) = heap_world(Shape { has_classes: false, is_oversubscribed, ..shape() });
        for connection in 0..connections {
            world.open(0, 40_000, false, true);
            world.act(Act::Send { connection, node: false, bytes: 1 });
        }
        world.settle();
        for connection in 0..connections {
            world.act(Act::Send { connection, node: false, bytes: 8_000 });
        }
        let sent_before = world.nodes[0].engine.counters().bytes_sent;
        world.poll(0);
        world.nodes[0].engine.counters().bytes_sent - sent_before
    };
    assert!(sent_per_poll(1, true) > 1000, "a slice is 1000 bytes");
    assert_eq!([sent_per_poll(2, true), sent_per_poll(1, false)], [1000, 1000]);
}
