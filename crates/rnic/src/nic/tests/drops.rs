//! Lists of packets to drop, and exactly which packets are sent then.

use super::wire::{Adversary, Pair};
use crate::nic::{Policy, Profile};
use crate::verbs::{CompletionStatus, SendKind};
use crate::wire::{Operation, QpNumber, Service};

/// A pair whose side 0 drops these of its packets, counted from 0.
pub fn pair_that_drops(profile: Profile, drops: &'static [u64]) -> (Pair, [QpNumber; 2]) {
    let mut pair = Pair::new(profile, 1);
    pair.adversary = Adversary::NONE;
    pair.logs = true;
    pair.drops = Box::new(move |side, number, _| side == 0 && drops.contains(&number));
    let qps = pair.connect(Service::Rc);
    (pair, qps)
}

/// The packets that one side sent, as numbers from the first one on.
pub fn sent(pair: &Pair, side: usize, is_wanted: impl Fn(Operation) -> bool) -> Vec<i32> {
    let mine = || pair.log.iter().filter(|logged| logged.from == side && is_wanted(logged.header.operation));
    let first = mine().next().map(|logged| logged.header.psn);
    mine().filter_map(|logged| first.map(|first| logged.header.psn.after(first))).collect()
}

fn is_request(operation: Operation) -> bool {
    operation != Operation::Acknowledge
}

/// Which packets a SEND of 5 packets takes when some are dropped.
fn sent_of_five(policy: Policy, drops: &'static [u64]) -> Vec<i32> {
    let (mut pair, qps) = pair_that_drops(Profile::new(policy), drops);
    pair.receive(1, qps[1], 9, 100_000, 5000);
    pair.send(0, qps[0], 1, SendKind::Send(None), 0, 4096 + 900);
    pair.run();
    assert_eq!(pair.completions[0].len(), 1);
    assert_eq!(pair.completions[0][0].status, CompletionStatus::Success);
    assert_eq!((pair.completions[1].len(), pair.completions[1][0].bytes), (1, 4996));
    sent(&pair, 0, is_request)
}

#[test]
fn go_back_n_sends_everything_again_from_the_lost_packet_on() {
    assert_eq!(sent_of_five(Policy::GoBackN, &[]), [0, 1, 2, 3, 4]);
    assert_eq!(sent_of_five(Policy::GoBackN, &[2]), [0, 1, 2, 3, 4, 2, 3, 4]);
    assert_eq!(sent_of_five(Policy::GoBackN, &[4]), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
}
