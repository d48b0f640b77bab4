//! Drops chosen packets and checks exactly which packets are sent then.

use sim::Time;

use super::pair::{Impairments, Pair};
use crate::nic::{NicProfile, TransportPolicy};
use crate::verbs::{CompletionStatus, SendKind};
use crate::wire::{Header, Operation, QpNumber, Service};

/// Returns a pair whose side 0 drops these of its packets, counted from 0.
pub fn pair_that_drops(profile: NicProfile, drops: &'static [u64]) -> (Pair, [QpNumber; 2]) {
    let mut pair = Pair::new(profile, 1);
    pair.impairments = Impairments::NONE;
    pair.logs = true;
    pair.drops = Box::new(move |side, number, _| side == 0 && drops.contains(&number));
    let qps = pair.connect(Service::Rc);
    (pair, qps)
}

/// Returns the packets that one side sent, as distances from the first PSN.
pub fn sent(pair: &Pair, side: usize, is_wanted: impl Fn(Operation) -> bool) -> Vec<i32> {
    let mine = || pair.log.iter().filter(|logged| logged.from == side && is_wanted(logged.header.operation));
    let first = mine().next().map(|logged| logged.header.psn);
    mine().filter_map(|logged| first.map(|first| logged.header.psn.after(first))).collect()
}

fn is_request(operation: Operation) -> bool {
    operation != Operation::Acknowledge
}

/// Returns the packets that a SEND of 5 packets takes when some are dropped.
fn sent_of_five(policy: TransportPolicy, drops: &'static [u64]) -> Vec<i32> {
    let (mut pair, qps) = pair_that_drops(NicProfile::new(policy), drops);
    pair.receive(1, qps[1], 9, 100_000, 5000);
    pair.send(0, qps[0], 1, SendKind::Send(None), 0, 4096 + 900);
    pair.run();
    assert_eq!(pair.completions[0].len(), 1);
    assert_eq!(pair.completions[0][0].status, CompletionStatus::Success);
    assert_eq!((pair.completions[1].len(), pair.completions[1][0].bytes), (1, 4996));
    sent(&pair, 0, is_request)
}

#[test]
fn go_back_n_retransmits_everything_from_the_lost_packet_on() {
    assert_eq!(sent_of_five(TransportPolicy::GoBackN, &[]), [0, 1, 2, 3, 4]);
    assert_eq!(sent_of_five(TransportPolicy::GoBackN, &[2]), [0, 1, 2, 3, 4, 2, 3, 4]);
    assert_eq!(sent_of_five(TransportPolicy::GoBackN, &[4]), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
}

#[test]
fn selective_repeat_retransmits_only_lost_packets() {
    for policy in [TransportPolicy::Srnic, TransportPolicy::Irn] {
        assert_eq!(sent_of_five(policy, &[]), [0, 1, 2, 3, 4]);
        assert_eq!(sent_of_five(policy, &[2]), [0, 1, 2, 3, 4, 2]);
        assert_eq!(sent_of_five(policy, &[0, 3]), [0, 1, 2, 3, 4, 0, 3]);
        assert_eq!(sent_of_five(policy, &[1, 2, 3]), [0, 1, 2, 3, 4, 1, 2, 3]);
    }
}

/// Nothing but the last packet arrives, farther from the first missing one than an acknowledgement's bitmap reaches.
#[test]
fn losses_farther_apart_than_the_bitmap_of_an_acknowledgement_are_repaired() {
    for policy in [TransportPolicy::Srnic, TransportPolicy::Irn] {
        let mut pair = Pair::new(NicProfile::new(policy), 1);
        pair.impairments = Impairments::NONE;
        pair.drops = Box::new(|side, number, _| side == 0 && number < 199);
        let qps = pair.connect(Service::Rc);
        let to = pair.remote(0, 0);
        pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 200 * 1024);
        pair.run();
        assert_eq!(pair.completions[0].len(), 1, "{policy:?}");
        assert_eq!(pair.completions[0][0].status, CompletionStatus::Success, "{policy:?}");
        assert_eq!(pair.nics[0].counters().retransmitted_packets, 199, "{policy:?}");
    }
}

/// Runs a WRITE of `packets` full packets over a wire that drops some. Returns the packets sent, and the duration in
/// round trips.
fn write_of(profile: NicProfile, packets: u32, drops: &'static [u64]) -> (Vec<i32>, f64, Pair) {
    let (mut pair, qps) = pair_that_drops(profile, drops);
    let to = pair.remote(0, 0);
    pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, packets * profile.mtu_bytes);
    while pair.completions[0].is_empty() && pair.step(sim::Time::MAX) {}
    assert_eq!(pair.completions[0].len(), 1);
    let round_trip = 2 * (pair.delay.ps() + pair.packet_time.ps());
    let round_trips = pair.now.ps() as f64 / round_trip as f64;
    pair.run();
    (sent(&pair, 0, is_request), round_trips, pair)
}

/// Published simulators fall back to go-back-N after a timeout.
#[test]
fn a_timeout_retransmits_one_packet_and_not_all_later_ones() {
    // The first packet, the end of the message and the first retransmission are lost.
    let (sent, ..) = write_of(NicProfile::new(TransportPolicy::Srnic), 8, &[0, 6, 7, 8]);
    let again = &sent[8..];
    assert!(again.iter().all(|packet| [0, 6, 7].contains(packet)), "only lost packets: {sent:?}");
    assert!(again.len() <= 5, "each once, except one that was lost twice, and a probe: {sent:?}");
    let (sent, ..) = write_of(NicProfile::new(TransportPolicy::Irn), 8, &[0, 6, 7, 8]);
    assert!(sent[8..].iter().all(|packet| [0, 6, 7].contains(packet)), "{sent:?}");
}

/// Published simulators use the highest selectively acknowledged PSN, and ignore gaps below it.
#[test]
fn every_gap_below_the_highest_acknowledged_packet_is_repaired_at_once() {
    const DROPS: &[u64] = &[3, 7, 11, 12, 20, 28];
    for policy in [TransportPolicy::Srnic, TransportPolicy::Irn] {
        let (sent, round_trips, pair) = write_of(NicProfile::new(policy), 32, DROPS);
        assert_eq!(sent[32..], [3, 7, 11, 12, 20, 28], "{policy:?}");
        assert_eq!(pair.nics[0].counters().timeouts, 0);
        // 32 packets leave in 2560 ns, 1.2 round trips; the last retransmission arrives less than two later.
        assert!(round_trips < 4.0, "{policy:?}: {round_trips}");
    }
}

/// Published simulators wait for a timeout of 320 us and more when the end of a message is lost.
#[test]
fn a_lost_end_of_a_message_is_found_by_a_tail_loss_probe() {
    let mut profile = NicProfile::new(TransportPolicy::Srnic);
    profile.ack_packets = 4; // so that a round trip is measured before the end is lost
    let (sent, round_trips, pair) = write_of(profile, 32, &[30, 31]);
    assert_eq!(sent[32..], [31, 30], "the last one is the probe, whose acknowledgement reveals the other");
    assert_eq!(pair.nics[0].counters().probes, 1);
    assert!(round_trips < 12.0, "{round_trips}");
    let (_, irn, _) = write_of(NicProfile { ack_packets: 4, ..NicProfile::new(TransportPolicy::Irn) }, 32, &[30, 31]);
    assert!(irn > 40.0, "IRN waits as published: {irn}");
}

/// Published simulators retransmit the last packet of a message as a full one.
#[test]
fn a_retransmitted_last_packet_keeps_its_length() {
    for policy in [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN] {
        let (mut pair, qps) = pair_that_drops(NicProfile::new(policy), &[2]);
        let to = pair.remote(0, 0);
        pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 2 * 1024 + 5);
        pair.send(0, qps[0], 2, SendKind::Write(to, None), 0, 9);
        pair.run();
        let lengths: Vec<u32> = pair
            .log
            .iter()
            .filter(|logged| logged.from == 0 && logged.header.operation == Operation::WriteLast)
            .map(|logged| logged.header.payload_bytes)
            .collect();
        assert_eq!(lengths, [5, 5], "{policy:?}");
        assert_eq!(pair.completions[0].len(), 2);
    }
}

#[test]
fn a_lost_retransmission_is_found_by_the_echo_of_later_packets() {
    let mut profile = NicProfile::new(TransportPolicy::Srnic);
    profile.mtu_bytes = 256;
    // Packet 100, its retransmission, and the retransmission of that are lost.
    let (_, first, pair) = write_of(profile, 400, &[100]);
    let repairs =
        pair.log.iter().zip(0_u64..).filter(|(logged, _)| logged.from == 0 && is_request(logged.header.operation));
    let counts: Vec<i32> = repairs.map(|(logged, _)| logged.header.psn.after(pair.log[0].header.psn)).collect();
    let repair = counts.iter().rposition(|packet| *packet == 100).unwrap() as u64;
    assert!(repair < 200, "{repair}");
    let (mut pair, qps) = pair_that_drops(profile, &[100]);
    let mut times = 0;
    pair.drops = Box::new(move |side, _, header| {
        let is_it = side == 0 && header.placement.is_some_and(|place| place.packet == 100);
        times += u32::from(is_it);
        is_it && times <= 3
    });
    let to = pair.remote(0, 0);
    pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 400 * 256);
    while pair.completions[0].is_empty() && pair.step(sim::Time::MAX) {}
    let round_trip = 2 * (pair.delay.ps() + pair.packet_time.ps());
    let third = pair.now.ps() as f64 / round_trip as f64;
    assert_eq!(pair.nics[0].counters().timeouts, 0, "no timeout was needed");
    assert_eq!(pair.nics[0].counters().retransmitted_packets, 3);
    assert!(third < first + 1.0, "all within the duration of the transfer: {first} {third}");
}

/// Packets of one flow over many paths: the reordering window soon prevents spurious retransmissions.
#[test]
fn packet_spraying_widens_the_reordering_window() {
    let mut profile = NicProfile::new(TransportPolicy::Srnic);
    profile.mtu_bytes = 256;
    let mut pair = Pair::new(profile, 3);
    pair.impairments = Impairments { delayed: 0.5, delay_ns_max: 3000.0, ..Impairments::NONE };
    let qps = pair.connect(Service::Rc);
    let to = pair.remote(0, 0);
    let mut again = Vec::new();
    for id in 0..10 {
        let before = pair.nics[0].counters().retransmitted_packets;
        pair.send(0, qps[0], id, SendKind::Write(to, None), 0, 1000 * 256);
        pair.run();
        again.push(pair.nics[0].counters().retransmitted_packets - before);
    }
    let delayed: u64 = again[2..].iter().sum();
    assert!(delayed <= 16, "at most 2 in 1000 once the window is learned: {again:?}");
}

/// Packet trimming: the receiver reports each trimmed packet at once.
#[test]
fn trimmed_packets_are_retransmitted_and_nothing_else() {
    for (policy, seed) in
        [TransportPolicy::Srnic, TransportPolicy::Irn].into_iter().flat_map(|policy| (1..9).map(move |s| (policy, s)))
    {
        let mut pair = Pair::new(NicProfile::new(policy), seed);
        pair.impairments = Impairments { trim: 0.1, ..Impairments::NONE };
        let qps = pair.connect(Service::Rc);
        let to = pair.remote(0, 0);
        pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 400_000);
        pair.run();
        assert_eq!(pair.completions[0][0].status, CompletionStatus::Success, "{policy:?}");
        let [sender, receiver] = [0, 1].map(|side: usize| *pair.nics[side].counters());
        assert!(receiver.trimmed_packets > 10, "{policy:?} {receiver:?}");
        assert_eq!(sender.retransmitted_packets, receiver.trimmed_packets, "{policy:?} {seed}: {sender:?}");
        assert_eq!((sender.timeouts, sender.probes, receiver.duplicate_packets), (0, 0, 0), "{policy:?} {seed}");
    }
}

#[test]
fn a_trimmed_last_packet_needs_no_timeout_with_any_policy() {
    for policy in [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN] {
        let mut pair = Pair::new(NicProfile::new(policy), 1);
        let qps = pair.connect(Service::Rc);
        let to = pair.remote(0, 0);
        pair.impairments.trim = 1.0;
        pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 8);
        while pair.nics[1].counters().trimmed_packets == 0 {
            assert!(pair.step(Time::MAX), "{policy:?}");
        }
        pair.impairments.trim = 0.0;
        pair.run();
        assert_eq!(pair.completions[0][0].status, CompletionStatus::Success, "{policy:?}");
        let sender = *pair.nics[0].counters();
        assert_eq!((sender.retransmitted_packets, sender.timeouts, sender.probes), (1, 0, 0), "{policy:?}");
    }
}

/// Runs a READ of 5 packets of which some are trimmed. Returns the packets of the response that are requested again,
/// and the duration in round trips.
fn rerequested_when_trimmed(policy: TransportPolicy, trimmed: &'static [u64]) -> (Vec<u32>, f64) {
    let (mut pair, qps) = pair_that_drops(NicProfile::new(policy), &[]);
    pair.trims = Box::new(move |side, number, _| side == 1 && trimmed.contains(&number));
    pair.nics[1].memory_mut().0[..5000].fill(7);
    let from = pair.remote(0, 0);
    pair.send(0, qps[0], 1, SendKind::Read(from), 100_000, 4096 + 900);
    while pair.completions[0].is_empty() && pair.step(Time::MAX) {}
    assert_eq!(pair.completions[0][0].status, CompletionStatus::Success);
    assert!(pair.nics[0].memory().0[100_000..104_996].iter().all(|byte| *byte == 7));
    assert_eq!(pair.nics[0].counters().timeouts, 0, "{policy:?} {trimmed:?}");
    let round_trips = pair.now.ps() as f64 / (2 * (pair.delay.ps() + pair.packet_time.ps())) as f64;
    let requests = pair.log.iter().filter(|logged| logged.from == 0).skip(1);
    let first = pair.log[0].header.psn;
    let packet = |header: &Header| match header.placement {
        Some(place) => place.packet,
        None => header.psn.after(first).cast_unsigned(),
    };
    (requests.map(|logged| packet(&logged.header)).collect(), round_trips)
}

#[test]
fn a_trimmed_response_packet_is_requested_again_at_once_and_alone() {
    for policy in [TransportPolicy::Srnic, TransportPolicy::SrnicPaged, TransportPolicy::Irn] {
        for trimmed in [&[][..], &[0], &[2], &[4], &[1, 2], &[0, 3, 4], &[0, 1, 2, 3, 4], &[2, 5], &[4, 5, 6]] {
            let (asked, round_trips) = rerequested_when_trimmed(policy, trimmed);
            let expected: Vec<u32> = match trimmed {
                [2, 5] => vec![2, 2],
                [4, 5, 6] => vec![4, 4, 4],
                _ => trimmed.iter().map(|packet| *packet as u32).collect(),
            };
            assert_eq!(asked, expected, "{policy:?}");
            let rounds = 1 + usize::from(!trimmed.is_empty()) + trimmed.iter().filter(|number| **number >= 5).count();
            assert!(round_trips < rounds as f64 + 0.5, "{policy:?} {trimmed:?}: {round_trips}");
        }
    }
    // In order, everything from there on is requested again.
    assert_eq!(rerequested_when_trimmed(TransportPolicy::GoBackN, &[2]).0, [2]);
    let (asked, round_trips) = rerequested_when_trimmed(TransportPolicy::GoBackN, &[4]);
    assert!(asked == [4] && round_trips < 2.5, "{asked:?} {round_trips}");
}
