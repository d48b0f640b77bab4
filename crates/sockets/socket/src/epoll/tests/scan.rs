//! Tests of which connections a wait polls, and of the order in which it reports them.

use super::*;

#[test]
fn idle_connections_are_not_polled() {
    let epoll = Epoll::new();
    let pairs: Vec<_> = (0..300).map(|_| own_and_peer()).collect();
    for (index, (own, _)) in pairs.iter().enumerate() {
        epoll.add(own.fd(), IN, index as u64);
    }
    epoll.let_all_sleep();
    assert_eq!(epoll.set().with(|ready_list| ready_list.hot_count()), 0);
    send(pairs[123].1.0, b"x").unwrap();
    assert_eq!(epoll.wait(), [(IN, 123)]);
    assert_eq!(epoll.set().with(|ready_list| ready_list.hot_count()), 1);
    for index in [7, 8, 299] {
        send(pairs[index].1.0, b"x").unwrap();
    }
    read_all(pairs[123].0.0.0);
    assert_eq!(epoll.now(), [(IN, 7), (IN, 8), (IN, 299)]);
}

#[test]
fn a_busy_connection_has_many_idle_ones_parked() {
    let epoll = Epoll::new();
    let pairs: Vec<_> = (0..100).map(|_| own_and_peer()).collect();
    for (index, (own, _)) in pairs.iter().enumerate() {
        epoll.add(own.fd(), IN, index as u64);
    }
    send(pairs[0].1.0, b"x").unwrap();
    for _ in 0..5000 {
        assert_eq!(epoll.wait(), [(IN, 0)]);
    }
    assert!(epoll.set().with(|ready_list| ready_list.hot_count()) < 80);
    send(pairs[1].1.0, b"x").unwrap();
    send(pairs[99].1.0, b"x").unwrap();
    read_all(pairs[0].0.0.0);
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 2 {
        seen.extend(epoll.wait().into_iter().map(|(_, data)| data));
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 99]);
}

#[test]
fn a_wait_polls_the_same_number_however_many_idle_connections_are_fresh() {
    let epoll = Epoll::new();
    let pairs = pairs_of(4 * HOT_BEGIN);
    let hot = || epoll.set().with(|ready_list| ready_list.hot_count());
    for (index, (own, _)) in pairs.iter().enumerate() {
        let polls = polls_of(|| epoll.add(own.fd(), IN, index as u64));
        assert!(polls <= 2, "{polls} polls to add number {index}");
        assert_eq!(hot(), HOT_BEGIN.min(index + 1));
    }
    let last = pairs.len() - 1;
    let (busy, peer) = &pairs[last];
    for round in 0..600 {
        send(peer.0, b"x").unwrap();
        let polls = polls_of(|| assert_eq!(epoll.wait(), [(IN, last as u64)]));
        assert!(polls <= 2 * HOT_BEGIN as u64, "{polls}");
        assert_eq!(read_all(busy.0.0), 1);
        assert!(round > 0 || hot() == HOT_BEGIN, "no wait slept");
    }
    assert!(hot() < 10, "idle connections are parked");
}

#[test]
fn connections_that_are_busy_at_once_are_all_polled() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2 * HOT_BEGIN);
    epoll.add_all(&pairs, IN);
    for _ in 0..6 {
        pairs.iter().for_each(|(_, peer)| send_one(peer.0));
        let mut left = pairs.len();
        while left > 0 {
            for (_, index) in epoll.wait_max(512, Some(HANG_NS)).unwrap() {
                left -= read_all(pairs[index as usize].0.0.0);
            }
        }
        assert_eq!(epoll.now(), []);
    }
    assert_eq!(epoll.set().with(|ready_list| ready_list.hot_count()), pairs.len());
}

#[test]
fn data_that_arrives_while_its_connection_is_parked_is_not_lost() {
    let epoll = Epoll::new();
    let pairs = pairs_of(HOT_BEGIN + 1);
    let peer = pairs[0].1.0;
    WHILE_PARKING.set(Some(Box::new(move || send_one(peer))));
    epoll.add_all(&pairs, IN);
    assert!(WHILE_PARKING.take().is_none(), "one was parked");
    for _ in 0..2 {
        assert_eq!(epoll.wait(), [(IN, 0)]);
    }
    read_all(pairs[0].0.0.0);
    epoll.let_all_sleep();
    send(peer, b"x").unwrap();
    assert_eq!(epoll.wait(), [(IN, 0)]);
}

#[test]
fn data_is_reported_in_the_order_of_its_timestamps() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    for (pair, units) in pairs.iter().zip([30, 10, 20]) {
        send_at(pair, base, units);
    }
    assert_eq!(epoll.order(16), [1, 2, 0]);
}

#[test]
fn data_is_reported_in_the_order_in_which_it_was_sent() {
    let epoll = Epoll::new();
    let pairs = pairs_of(5);
    epoll.add_all(&pairs, IN);
    for order in [[2, 0, 1, 4, 3], [4, 3, 2, 1, 0]] {
        order.iter().for_each(|&index| send_one(pairs[index as usize].1.0));
        assert_eq!(epoll.order(16), order);
        pairs.iter().for_each(|(own, _)| assert_eq!(read_all(own.0.0), 1));
    }
}

#[test]
fn a_reported_connection_moves_behind_those_that_became_ready_since() {
    let epoll = Epoll::new();
    let pairs = pairs_of(4);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    for (pair, units) in pairs.iter().zip([30, 10, 20]) {
        send_at(pair, base, units);
    }
    let take = |count: usize| (0..count).flat_map(|_| epoll.order(1)).collect::<Vec<_>>();
    assert_eq!(take(7), [1, 2, 0, 1, 2, 0, 1]);
    send_at(&pairs[3], stamps_now(), 0);
    assert_eq!(take(7), [2, 0, 1, 3, 2, 0, 1]);
    // A connection that was read and becomes ready again keeps its place in the list if it is still there.
    assert_eq!(read_all(pairs[3].0.0.0), 1);
    send_at(&pairs[3], stamps_now(), 0);
    assert_eq!(take(5), [3, 2, 0, 1, 3]);
    assert_eq!(read_all(pairs[3].0.0.0), 1);
    assert_eq!(take(1), [2]);
    send_at(&pairs[3], stamps_now(), 0);
    assert_eq!(take(4), [0, 1, 2, 3], "it joins the list again");
}

#[test]
fn data_stored_before_a_find_is_found_by_the_same_scan() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    let (before, after) = ((pairs[1].0.fd(), pairs[1].1.0), (pairs[0].0.fd(), pairs[0].1.0));
    // Runs between the poll of the connection that was added last and the poll of the other one.
    BEFORE_POLL.set(Some((
        1,
        Box::new(move || {
            for ((fd, peer), units) in [(before, 10), (after, 20)] {
                set_stamp(fd, base + units);
                send(peer, b"x").unwrap();
            }
        }),
    )));
    assert_eq!(epoll.order(16), [1, 0]);
}

#[test]
fn data_that_arrives_during_a_scan_keeps_its_order() {
    let epoll = Epoll::new();
    let pairs = pairs_of(4);
    epoll.add_all(&pairs, IN);
    send_one(pairs[3].1.0);
    let peers = [1, 2, 0].map(|index: usize| pairs[index].1.0);
    // Runs after the poll of the connection that was added last, which is ready.
    BEFORE_POLL.set(Some((1, Box::new(move || peers.into_iter().for_each(send_one)))));
    assert_eq!(epoll.order(16), [3, 1, 2, 0]);
}

#[test]
fn a_listed_connection_keeps_its_place_when_more_data_arrives() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    pairs.iter().zip([10, 20, 30]).for_each(|(pair, units)| send_at(pair, base, units));
    assert_eq!(epoll.order(1), [0]);
    // As if another thread had read the data.
    assert_eq!(read_all(pairs[1].0.0.0), 1);
    send_at(&pairs[1], base, 40);
    assert_eq!(epoll.order(2), [1, 2]);
}

#[test]
fn data_newer_than_all_finds_is_left_to_the_next_wait() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    send_at(&pairs[0], base, 10);
    let (fd, peer) = (pairs[1].0.fd(), pairs[1].1.0);
    BEFORE_POLL.set(Some((
        1,
        Box::new(move || {
            set_stamp(fd, base + 20);
            send(peer, b"x").unwrap();
        }),
    )));
    assert_eq!(epoll.order(16), [0], "something else may have come before the newer one");
    assert_eq!(read_all(pairs[0].0.0.0), 1);
    assert_eq!(epoll.order(16), [1]);
}

#[test]
fn a_parked_connection_that_sent_a_wakeup_is_reported_before_later_data() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2);
    epoll.add_all(&pairs, IN);
    for _ in 0..50 {
        epoll.let_all_sleep();
        send_at(&pairs[0], stamps_now(), 0);
        assert_eq!(epoll.wait(), [(IN, 0)]);
        assert_eq!(read_all(pairs[0].0.0.0), 1);
        // One of the connections is hot, the other one is not.
        let base = stamps_now();
        send_at(&pairs[1], base, 1);
        send_at(&pairs[0], base, 2);
        assert_eq!(epoll.order(16), [1, 0]);
        pairs.iter().for_each(|(own, _)| assert_eq!(read_all(own.0.0), 1));
    }
}

#[test]
fn more_ready_connections_than_may_be_hot_are_reported_in_order_and_in_turn() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3 * HOT_BEGIN);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    let count = pairs.len() as u64;
    // The last connection has the earliest timestamp.
    pairs.iter().enumerate().for_each(|(index, pair)| send_at(pair, base, count - index as u64));
    let all: Vec<u64> = (0..count).rev().collect();
    for round in 0..3 {
        let mut reported = Vec::new();
        while reported.len() < pairs.len() {
            let polls = polls_of(|| reported.extend(epoll.order(8)));
            // The first round also polls the connections that have sent wakeups.
            assert!(round == 0 || polls <= 3 * HOT_BEGIN as u64, "{polls}");
        }
        assert_eq!(reported, all, "round {round}");
    }
}

#[test]
fn a_lifeline_reported_after_a_sleep_keeps_its_place_among_lanes() {
    let epoll = Epoll::new();
    let lanes = pairs_of(2);
    epoll.add_all(&lanes, IN);
    let on_lifeline = [(); 2].map(|()| own_and_peer_on_lifeline());
    (2..).zip(&on_lifeline).for_each(|(data, (own, _))| epoll.add(own.fd(), IN, data));
    epoll.let_all_sleep();
    for order in [[0, 2, 1, 3], [2, 0, 3, 1], [3, 2, 1, 0]] {
        epoll.set().with(|ready_list| {
            ready_list.asleep_since = Some(ReadyTime::now());
            assert!(ready_list.park_all(&mut Vec::new(), HeldRecords::Kept));
        });
        for data in order {
            match lanes.get(data as usize) {
                Some((_, peer)) => send_one(peer.0),
                None => send_one(on_lifeline[data as usize - 2].1.0),
            }
        }
        // The sleeping thread runs late.
        std::thread::sleep(Duration::from_millis(1));
        epoll.set().with(ReadyList::collect_events);
        assert_eq!(epoll.order(16), order);
        lanes.iter().chain(&on_lifeline).for_each(|(own, _)| assert_eq!(read_all(own.0.0), 1));
        epoll.let_all_sleep();
    }
}

#[test]
fn a_call_that_reads_the_switch_to_lanes_does_not_hide_the_data_behind_it() {
    let _no_child = test_support::spawn::forbid();
    let calls: [fn(&'static Connection); 4] = [
        |connection| assert_ne!(connection.readiness_for_all(libc::POLLIN), 0),
        |connection| assert_eq!(connection.take_error(), 0),
        |connection| assert_eq!(connection.tcp_state(), crate::options::TcpState::Established),
        |connection| assert_eq!(receive(connection, &mut [0; 10]), Ok(10)),
    ];
    for call in calls {
        let epoll = Epoll::new();
        let (own, peer) = own_and_peer_on_lifeline();
        epoll.add(own.fd(), IN, 1);
        epoll.let_all_sleep();
        peer.0.prepare_to_be_sent();
        assert_eq!(send(peer.0, &[7; 100]), Ok(100));
        call(own.0.0);
        assert_eq!(epoll.wait(), [(IN, 1)]);
        assert!(read_all(own.0.0) >= 90);
        epoll.let_all_sleep();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| epoll.wait());
            epoll.until_asleep();
            send_one(peer.0);
            assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
        });
    }
}

#[test]
fn an_edge_is_not_mistaken_for_the_message_before_it() {
    let _no_child = test_support::spawn::forbid();
    let edges: [fn(&OpenEndpoint); 2] =
        [|peer| peer.0.shutdown(crate::connection::SHUTDOWN_WRITE).unwrap(), |peer| send_one(peer.0)];
    for edge in edges {
        let epoll = Epoll::new();
        let (own, peer) = own_and_peer_on_lifeline();
        epoll.add(own.fd(), IN | EDGE, 1);
        epoll.let_all_sleep();
        send_one(peer.0);
        peer.0.prepare_to_be_sent();
        assert_eq!(epoll.wait(), [(IN, 1)]);
        assert_eq!(read_all(own.0.0), 1);
        edge(&peer);
        assert_eq!(epoll.wait().len(), 1);
    }
}

#[test]
fn a_queued_connection_can_be_modified_read_and_removed() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3 * HOT_BEGIN);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    pairs.iter().enumerate().for_each(|(index, pair)| send_at(pair, base, index as u64));
    assert_eq!(epoll.order(2), [0, 1]);
    epoll.control(EPOLL_CTL_DEL, pairs[2].0.fd(), 0, 0).unwrap();
    epoll.control(EPOLL_CTL_MOD, pairs[3].0.fd(), IN | ONESHOT, 1003).unwrap();
    read_all(pairs[4].0.0.0);
    epoll.control(EPOLL_CTL_MOD, pairs[5].0.fd(), IN | EDGE, 1005).unwrap();
    assert_eq!(epoll.order(3), [1003, 1005, 6]);
    let count = pairs.len() as u64;
    for _ in 0..2 {
        assert_eq!(epoll.order(512), (7..count).chain([0, 1, 6]).collect::<Vec<_>>());
    }
    for (own, _) in &pairs {
        read_all(own.0.0);
    }
    epoll.let_all_sleep();
    send(pairs[5].1.0, b"x").unwrap();
    assert_eq!(epoll.order(512), [1005]);
}

#[test]
fn each_scan_polls_a_few_of_the_connections_whose_peers_are_gone() {
    let _no_child = test_support::spawn::forbid();
    let epoll = Epoll::new();
    let (owns, peers): (Vec<_>, Vec<_>) = pairs_of(100).into_iter().unzip();
    owns.iter().enumerate().for_each(|(index, own)| epoll.add(own.fd(), IN | EDGE, index as u64));
    drop(peers);
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < owns.len() {
        seen.extend(epoll.wait().into_iter().map(|(_, data)| data));
    }
    // During the first sleep the kernel may still report hang-ups, after which connections are polled once more.
    epoll.let_all_sleep();
    epoll.let_all_sleep();
    let polls = polls_of(|| assert_eq!(epoll.now(), []));
    assert!(polls < 20, "{polls}");
    owns[77].0.0.shutdown(crate::connection::SHUTDOWN_WRITE).unwrap();
    let found = (0..owns.len()).find_map(|_| epoll.now().first().copied());
    assert_eq!(found, Some((IN | HUP, 77)));
}
