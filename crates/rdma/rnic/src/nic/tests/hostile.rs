//! Hostile peers: delayed duplicates, unsolicited packets and random headers.

use sim::{Random, Span};

use super::errors::bare;
use super::pair::Pair;
use crate::nic::emit::ACK_WITHOUT_CREDITS;
use crate::nic::{NicProfile, TransportPolicy};
use crate::verbs::{Completion, CompletionKind, CompletionStatus, NicAddress, SendKind};
use crate::wire::{
    Aeth, AtomicEth, Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, RKey, Reth, SelectiveAck, Service,
    Syndrome,
};

/// A copy that was delayed for long arrives when its message is complete and the program reuses the memory.
#[test]
fn a_delayed_duplicate_is_never_placed_over_reused_memory() {
    for policy in TransportPolicy::ALL {
        let mut pair = Pair::new(NicProfile::new(policy), 1);
        pair.logs = true;
        let qps = pair.connect(Service::Rc);
        let to = pair.remote(0, 1000);
        pair.nics[0].memory_mut().0[..100].fill(1);
        pair.send(0, qps[0], 1, SendKind::Write(to, None), 0, 100);
        pair.run();
        let copy = pair.log[0].header;
        pair.nics[1].memory_mut().0[1000..1100].fill(9);
        // Both while hardware and while software owns the receive side.
        pair.nics[1].receive(pair.now, NicAddress(0), &copy, false, &[1; 100]);
        assert_eq!(pair.nics[1].memory().0[1000..1100], [9; 100]);
        let mut ahead = copy;
        ahead.psn = copy.psn.plus(3);
        if let Some(reth) = &mut ahead.reth {
            reth.address = 5000;
        }
        pair.nics[1].receive(pair.now, NicAddress(0), &ahead, false, &[1; 100]);
        assert_eq!(pair.nics[1].query_qp(qps[1]).unwrap().is_slow, policy.is_selective());
        pair.nics[1].receive(pair.now, NicAddress(0), &copy, false, &[1; 100]);
        assert_eq!(pair.nics[1].memory().0[1000..1100], [9; 100], "{policy:?}");
    }
}

#[test]
fn unexpected_packets_are_dropped_and_counted() {
    for policy in TransportPolicy::ALL {
        let mut pair = Pair::new(NicProfile::new(policy), 1);
        let qps = pair.connect(Service::Rc);
        let psn = Psn::new(u32::MAX - 20);
        let now = pair.now;
        let nic = &mut pair.nics[1];
        let mut drop_reason = |source: u32, header: &Header| {
            let before = *nic.counters();
            nic.receive(now, NicAddress(source), header, false, &vec![0; header.payload_bytes as usize]);
            let after = *nic.counters();
            let changed = before
                .named()
                .zip(after.named())
                .find(|(before, after)| before.0.starts_with("drop") && before.1 != after.1);
            changed.map(|(before, _)| before.0)
        };
        let write = bare(Operation::WriteOnly, qps[1], psn);
        assert_eq!(drop_reason(0, &Header { destination: QpNumber(77), ..write }), Some("drop_unknown_qp"));
        assert_eq!(drop_reason(0, &Header { destination: QpNumber(0), ..write }), Some("drop_unknown_qp"));
        assert_eq!(drop_reason(5, &write), Some("drop_source"));
        assert_eq!(drop_reason(0, &Header { service: Service::Uc, ..write }), Some("drop_service"));
        assert_eq!(drop_reason(0, &Header { payload_bytes: 1025, ..write }), Some("drop_malformed"));
        let ack = bare(Operation::Acknowledge, qps[1], psn);
        assert_eq!(drop_reason(0, &ack), Some("drop_malformed"), "an acknowledgement without AETH");
        let ack = Header { aeth: Some(Aeth { syndrome: ACK_WITHOUT_CREDITS, msn: 0 }), psn: psn.plus(1000), ..ack };
        assert_eq!(drop_reason(0, &ack), Some("drop_unsolicited"));
        let newest = psn.plus(5);
        let sack = SelectiveAck { expected: psn.plus(9), newest, arrived: u128::MAX, marked: 0, echo: 0 };
        assert_eq!(drop_reason(0, &Header { sack: Some(sack), ..ack }), Some("drop_unsolicited"));
        let placement = Some(PlacementHeader { message: 0, packet: 0, sent: 0 });
        let answer = Header { placement, ..bare(Operation::ReadResponseOnly, qps[1], psn) };
        assert_eq!(drop_reason(0, &answer), Some("drop_unsolicited"));
    }
}

/// Returns a header of a hostile peer: numbers that are valid, or nearly so, in invalid combinations.
fn hostile(random: &mut Random, pair: &Pair, qp: QpNumber) -> Header {
    use Operation as O;
    let operations = [
        O::SendFirst,
        O::SendMiddle,
        O::SendLast,
        O::SendOnly,
        O::WriteFirst,
        O::WriteMiddle,
        O::WriteLast,
        O::WriteOnly,
        O::ReadRequest,
        O::ReadResponseFirst,
        O::ReadResponseMiddle,
        O::ReadResponseLast,
        O::ReadResponseOnly,
        O::Acknowledge,
        O::AtomicAcknowledge,
        O::CompareSwap,
        O::FetchAdd,
        O::CongestionNotification,
    ];
    let operation = operations[random.below(operations.len() as u64) as usize];
    let near = |random: &mut Random, base: u32| match random.below(4) {
        0 => random.bits() as u32,
        _ => base.wrapping_add(random.below(40) as u32).wrapping_sub(10),
    };
    let psn = |random: &mut Random| Psn::new(near(random, u32::MAX - 20));
    let mut header = bare(operation, qp, psn(random));
    header.service = if random.chance(0.05) { Service::Ud } else { Service::Rc };
    header.ack_request = random.chance(0.5);
    header.payload_bytes = [0, 8, 1024, random.below(4097) as u32][random.below(4) as usize];
    let key = if random.chance(0.8) { pair.keys[1].1 } else { RKey(random.bits() as u32) };
    let address = if random.chance(0.8) { random.below(4096) } else { random.bits() };
    let bytes = [0, 8, 1024, 5000, random.bits() as u32][random.below(5) as usize];
    header.reth = random.chance(0.8).then_some(Reth { address, key, bytes });
    let atomic = AtomicEth { address, key, swap_or_add: random.bits(), compare: 0 };
    header.atomic = random.chance(0.8).then_some(atomic);
    header.immediate = match random.below(4) {
        0 => Some(Immediate::Data(1)),
        1 => Some(Immediate::Invalidate(key)),
        _ => None,
    };
    let syndromes = [
        Syndrome::Ack { credit_code: random.below(32) as u8 },
        Syndrome::ReceiverNotReady { timer_code: random.bits() as u8 },
        Syndrome::SequenceError,
        Syndrome::InvalidRequest,
        Syndrome::RemoteAccess,
        Syndrome::RemoteOperation,
    ];
    let syndrome = syndromes[if random.chance(0.8) { random.below(3) } else { random.below(6) } as usize];
    header.aeth = random.chance(0.9).then_some(Aeth { syndrome, msn: 0 });
    let placement = PlacementHeader { message: near(random, 8), packet: near(random, 8), sent: random.bits() as u16 };
    header.placement = random.chance(0.9).then_some(placement);
    let (expected, newest) = (psn(random), psn(random));
    let arrived = u128::from(random.bits()) << random.below(65);
    let sack = SelectiveAck { expected, newest, arrived, marked: random.bits() as u16, echo: random.bits() as u16 };
    header.sack = random.chance(0.5).then_some(sack);
    header
}

fn attack(policy: TransportPolicy, seed: u64) {
    let mut random = Random::new(seed, "hostile");
    let profile = if random.chance(0.5) { NicProfile::new(policy) } else { NicProfile::modelled(policy) };
    let mut pair = Pair::new(profile, seed);
    let victims = pair.connect(Service::Rc);
    let others = pair.connect(Service::Rc);
    pair.receive(1, others[1], 1, 500_000, 20_000);
    for id in 0..4 {
        pair.receive(1, victims[1], id, 0, 2000);
        let remote = pair.remote(1, 0);
        pair.send(1, victims[1], 10 + id, SendKind::Read(remote), 4096, 3000);
        pair.send(1, victims[1], 20 + id, SendKind::Write(remote, None), 4096, 3000);
    }
    pair.nics[0].memory_mut().0[600_000..620_000].fill(6);
    pair.send(0, others[0], 1, SendKind::Send(None), 600_000, 20_000);
    for _ in 0..60 {
        let header = hostile(&mut random, &pair, victims[1]);
        let payload = vec![0xAA; header.payload_bytes as usize];
        pair.nics[1].receive(pair.now, NicAddress(0), &header, random.chance(0.1), &payload);
        if random.chance(0.3) {
            pair.run_until(pair.now + Span::from_ns(random.unit() * 3000.0));
        }
    }
    pair.run();
    let is_other = |completion: &&Completion| completion.qp == others[1];
    let received: Vec<_> = pair.completions[1].iter().filter(is_other).collect();
    assert_eq!((received.len(), received[0].kind), (1, CompletionKind::Receive));
    assert_eq!((received[0].bytes, received[0].status), (20_000, CompletionStatus::Success));
    assert!(pair.nics[1].memory().0[500_000..520_000].iter().all(|byte| *byte == 6), "another connection was affected");
    let memory = &pair.nics[1].memory().0[16_384..500_000];
    assert!(memory.iter().all(|byte| *byte == 0), "memory without a key was written");
}

#[test]
fn a_hostile_peer_harms_only_its_own_connection() {
    for policy in TransportPolicy::ALL {
        for seed in 0..100 {
            attack(policy, seed);
        }
    }
    // Regression: a peer that took back acknowledgements and answered each probe was probed for ever.
    for (policy, seed) in
        [(TransportPolicy::Srnic, 14_846), (TransportPolicy::SrnicPaged, 14_846), (TransportPolicy::SrnicPaged, 16_225)]
    {
        attack(policy, seed);
    }
}

#[test]
#[ignore = "100,000 attacks, minutes; in ./x exam"]
fn many_attacks_of_a_hostile_peer_harm_only_its_own_connection() {
    for policy in TransportPolicy::ALL {
        for seed in 0..25_000 {
            attack(policy, seed);
        }
    }
}
