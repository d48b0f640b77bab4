//! Unreliable services over a wire that loses, delays, reorders and duplicates packets: a message arrives whole or not
//! at all.

use sim::{Random, Span};

use super::pair::{Impairments, Pair};
use crate::nic::responder_unreliable::{MISSING_MAX, RUN_PACKETS};
use crate::nic::{DATAGRAM_OFFSET_BYTES, NicProfile, TransportPolicy};
use crate::verbs::{CompletionStatus, DatagramDestination, NicAddress, SendKind};
use crate::wire::{Header, Immediate, Service};

const SCHEDULES: u64 = 100;
const MESSAGES: u64 = 20;
const ROOM_BYTES: u32 = 5000;

fn pattern(id: u64, byte: usize) -> u8 {
    (id as usize * 37 + byte * 11 + byte / 256) as u8
}

/// Sends messages of random lengths; returns those that arrived, in order, after checking their content.
fn received(service: Service, profile: NicProfile, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed, "unreliable");
    let mut pair = Pair::new(profile, seed);
    pair.impairments =
        Impairments { loss: 0.03, duplicate: 0.05, delayed: 0.1, delay_ns_max: 5000.0, mark: 0.0, trim: 0.02 };
    let qps = pair.connect(service);
    let bound = if service == Service::Ud { 1000 } else { u64::from(ROOM_BYTES) };
    let lengths: Vec<u32> = (0..MESSAGES).map(|_| random.below(bound) as u32).collect();
    let offset = if service == Service::Ud { DATAGRAM_OFFSET_BYTES } else { 0 };
    for id in 0..MESSAGES {
        let first = id * u64::from(ROOM_BYTES);
        let memory = &mut pair.nics[0].memory_mut().0[first as usize..];
        (0..lengths[id as usize] as usize).for_each(|byte| memory[byte] = pattern(id, byte));
        // Duplicates of datagrams consume receive requests, too.
        pair.receive(1, qps[1], 2 * id, 500_000 + first, ROOM_BYTES);
        pair.receive(1, qps[1], 2 * id + 1, 700_000 + first, ROOM_BYTES);
        let mut request = pair.request(0, id, SendKind::Send(Some(id as u32)), first, lengths[id as usize]);
        if service == Service::Ud {
            request.datagram = Some(DatagramDestination { to: NicAddress(1), qp: qps[1], queue_key: 7 });
        }
        pair.nics[0].post_send(pair.now, qps[0], &request).unwrap();
    }
    pair.run();
    assert_eq!(pair.completions[0].len() as u64, MESSAGES, "sent messages are complete");
    let check = |completion: &crate::verbs::Completion| {
        assert_eq!(completion.status, CompletionStatus::Success);
        let Some(Immediate::Data(id)) = completion.immediate else { panic!("{completion:?}") };
        let base = if completion.id.is_multiple_of(2) { 500_000 } else { 700_000 };
        let first = base + (completion.id / 2) as usize * ROOM_BYTES as usize + offset as usize;
        let bytes = (completion.bytes - offset) as usize;
        assert_eq!(bytes as u32, lengths[id as usize]);
        let memory = &pair.nics[1].memory().0[first..first + bytes];
        assert!(memory.iter().enumerate().all(|(at, byte)| *byte == pattern(id.into(), at)), "message {id} is whole");
        u64::from(id)
    };
    pair.completions[1].iter().map(check).collect()
}

#[test]
fn an_unreliable_connection_delivers_whole_messages_in_order_at_most_once() {
    let mut arrived = 0;
    for seed in 0..SCHEDULES {
        let profile = NicProfile::new(TransportPolicy::ALL[seed as usize % TransportPolicy::ALL.len()]);
        let ids = received(Service::Uc, profile, seed);
        assert!(ids.is_sorted_by(|before, after| before < after), "seed {seed}: {ids:?}");
        arrived += ids.len() as u64;
    }
    let all = SCHEDULES * MESSAGES;
    assert!(arrived > all / 3 && arrived < all * 9 / 10, "{arrived} of {all}");
}

/// Sends 400 messages and forges `forged` packets after the first one, starting `ahead` packets after it. Returns how
/// many messages do not arrive, and whether the last hundred do.
fn lost(ahead: u32, forged: u32) -> (u64, bool) {
    let mut pair = Pair::new(NicProfile::new(TransportPolicy::ALL[0]), 1);
    pair.logs = true;
    let qps = pair.connect(Service::Uc);
    let (mut posted, mut arrived, mut last) = (0, 0, 0);
    let receive = |pair: &mut Pair, posted: &mut usize| {
        while *posted < pair.completions[1].len() + 4 {
            pair.receive(1, qps[1], *posted as u64, 500_000, ROOM_BYTES);
            *posted += 1;
        }
    };
    for id in 0..400 {
        receive(&mut pair, &mut posted);
        let before = pair.completions[1].len();
        pair.send(0, qps[0], id, SendKind::Send(None), 0, 64);
        pair.run();
        let new = (pair.completions[1].len() - before) as u64;
        arrived += new;
        last += if id >= 300 { new } else { 0 };
        if id == 0 {
            let real = pair.log.iter().find(|logged| logged.from == 0).expect("it was sent").header;
            for number in 0..forged {
                receive(&mut pair, &mut posted);
                let header = Header { psn: real.psn.plus(ahead + number), ..real };
                pair.nics[1].receive(pair.now, NicAddress(0), &header, false, &[0; 64]);
                pair.run();
            }
        }
    }
    (400 - arrived, last == 100)
}

#[test]
fn forged_psns_cost_few_packets_and_no_connection() {
    for ahead in [MISSING_MAX as u32 + 2, 1 << 20, (1 << 23) - 1, 1 << 23, (1 << 24) - 1000] {
        assert_eq!(lost(ahead, 1), (0, true), "{ahead} packets ahead");
        assert_eq!(lost(ahead, RUN_PACKETS - 1), (0, true), "{ahead} packets ahead");
    }
    for (ahead, forged) in [(1000, 1), (MISSING_MAX as u32 - 1, 1), (1 << 20, RUN_PACKETS), (1 << 23, RUN_PACKETS)] {
        let (lost, are_last_there) = lost(ahead, forged);
        assert!(lost < RUN_PACKETS.into() && are_last_there, "{forged} packets, {ahead} ahead: {lost} lost");
    }
}

#[test]
fn datagrams_arrive_whole_in_any_order() {
    let mut arrived = 0;
    for seed in 0..SCHEDULES {
        let mut profile = NicProfile::new(TransportPolicy::ALL[seed as usize % TransportPolicy::ALL.len()]);
        profile.costs.dma_write = Span::from_ns(100.0);
        let mut ids = received(Service::Ud, profile, seed);
        ids.sort_unstable();
        ids.dedup();
        arrived += ids.len() as u64;
    }
    let all = SCHEDULES * MESSAGES;
    assert!(arrived > all * 9 / 10 && arrived < all, "{arrived} of {all}: 5% are lost");
}
