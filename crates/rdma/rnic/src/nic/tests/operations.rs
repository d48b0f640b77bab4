//! The operations of each service over a perfect wire.

use super::pair::Pair;
use crate::nic::{DATAGRAM_OFFSET_BYTES, NicProfile, TransportPolicy};
use crate::verbs::{Completion, CompletionKind, CompletionStatus, DatagramDestination, NicAddress, SendKind};
use crate::wire::{Immediate, Service};

/// Each policy, without latencies and with modelled ones.
pub fn profiles() -> impl Iterator<Item = NicProfile> {
    TransportPolicy::ALL.into_iter().flat_map(|policy| [NicProfile::new(policy), NicProfile::modelled(policy)])
}

fn fill(pair: &mut Pair, side: usize, address: usize, bytes: usize) -> Vec<u8> {
    let pattern: Vec<u8> = (0..bytes).map(|byte| (byte * 7 + address / 64 + side) as u8).collect();
    pair.nics[side].memory_mut().0[address..address + bytes].copy_from_slice(&pattern);
    pattern
}

fn ids(completions: &[Completion]) -> Vec<(u64, CompletionKind, CompletionStatus)> {
    completions.iter().map(|completion| (completion.id, completion.kind, completion.status)).collect()
}

#[test]
fn every_operation_of_a_reliable_connection_works() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        let sent = fill(&mut pair, 0, 0, 5000);
        let read = fill(&mut pair, 1, 100_000, 3333);
        pair.nics[1].memory_mut().0[200_000..200_008].copy_from_slice(&40_u64.to_ne_bytes());
        pair.receive(1, qps[1], 100, 300_000, 8000);
        pair.receive(1, qps[1], 101, 310_000, 8000);
        let (write, atomic) = (pair.remote(0, 320_000), pair.remote(0, 200_000));
        let from = pair.remote(0, 100_000);
        pair.send(0, qps[0], 1, SendKind::Send(Some(77)), 0, 5000);
        pair.send(0, qps[0], 2, SendKind::Write(write, None), 0, 5000);
        pair.send(0, qps[0], 3, SendKind::Read(from), 400_000, 3333);
        pair.send(0, qps[0], 4, SendKind::FetchAdd { remote: atomic, add: 2 }, 410_000, 8);
        pair.send(0, qps[0], 5, SendKind::CompareSwap { remote: atomic, compare: 42, swap: 9 }, 410_008, 8);
        pair.send(0, qps[0], 6, SendKind::Write(write, Some(78)), 0, 10);
        pair.run();
        use CompletionKind::{CompareSwap, FetchAdd, Read, Send, Write};
        let ok = CompletionStatus::Success;
        let expected =
            [(1, Send, ok), (2, Write, ok), (3, Read, ok), (4, FetchAdd, ok), (5, CompareSwap, ok), (6, Write, ok)];
        assert_eq!(ids(&pair.completions[0]), expected, "{profile:?}");
        let [message, immediate] = pair.completions[1][..] else { panic!("{:?}", pair.completions[1]) };
        assert_eq!((message.id, message.bytes, message.immediate), (100, 5000, Some(Immediate::Data(77))));
        assert_eq!((immediate.kind, immediate.bytes), (CompletionKind::ReceiveWriteImmediate, 10));
        assert_eq!((immediate.id, immediate.immediate), (101, Some(Immediate::Data(78))));
        let memory = &pair.nics[1].memory().0;
        assert_eq!(memory[300_000..305_000], sent);
        assert_eq!(memory[320_000..325_000], sent);
        assert_eq!(memory[200_000..200_008], 9_u64.to_ne_bytes());
        let memory = &pair.nics[0].memory().0;
        assert_eq!(memory[400_000..403_333], read);
        assert_eq!(memory[410_000..410_008], 40_u64.to_ne_bytes());
        assert_eq!(memory[410_008..410_016], 42_u64.to_ne_bytes());
        assert_eq!(pair.nics[0].counters().retransmitted_packets, 0, "{profile:?}");
    }
}

#[test]
fn a_message_of_no_bytes_is_delivered() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Rc);
        pair.receive(1, qps[1], 100, 0, 0);
        let nowhere = pair.remote(0, u64::MAX);
        pair.send(0, qps[0], 1, SendKind::Send(None), 0, 0);
        pair.send(0, qps[0], 2, SendKind::Write(nowhere, None), 0, 0);
        pair.send(0, qps[0], 3, SendKind::Read(nowhere), 0, 0);
        pair.run();
        assert_eq!(pair.completions[0].len(), 3);
        assert!(pair.completions[0].iter().all(|completion| completion.status == CompletionStatus::Success));
        assert_eq!((pair.completions[1][0].id, pair.completions[1][0].bytes), (100, 0));
    }
}

#[test]
fn an_unreliable_connection_completes_messages_when_they_are_sent() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Uc);
        let sent = fill(&mut pair, 0, 0, 5000);
        pair.receive(1, qps[1], 100, 300_000, 8000);
        let write = pair.remote(0, 320_000);
        pair.send(0, qps[0], 1, SendKind::Send(None), 0, 5000);
        pair.send(0, qps[0], 2, SendKind::Write(write, None), 0, 5000);
        pair.run();
        assert_eq!(pair.completions[0].len(), 2);
        assert_eq!(pair.completions[1].len(), 1);
        let memory = &pair.nics[1].memory().0;
        assert_eq!((&memory[300_000..305_000], &memory[320_000..325_000]), (&sent[..], &sent[..]));
    }
}

#[test]
fn a_datagram_reports_its_sender() {
    for profile in profiles() {
        let mut pair = Pair::new(profile, 1);
        let qps = pair.connect(Service::Ud);
        let sent = fill(&mut pair, 0, 0, 900);
        pair.receive(1, qps[1], 100, 300_000, 1000);
        for queue_key in [8, 7] {
            let mut request = pair.request(0, 1, SendKind::Send(None), 0, 900);
            request.datagram = Some(DatagramDestination { to: NicAddress(1), qp: qps[1], queue_key });
            pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
        }
        pair.run();
        assert_eq!(pair.completions[0].len(), 2);
        assert_eq!(pair.nics[1].counters().drop_queue_key, 1);
        let [received] = pair.completions[1][..] else { panic!("{:?}", pair.completions[1]) };
        assert_eq!(received.source, Some((NicAddress(0), qps[0])));
        assert_eq!(received.bytes, DATAGRAM_OFFSET_BYTES + 900);
        let first = 300_000 + DATAGRAM_OFFSET_BYTES as usize;
        assert_eq!(pair.nics[1].memory().0[first..first + 900], sent);
    }
}
