//! Contexts that are evicted from the chip while a timer is pending.

use sim::Time;

use super::pair::Pair;
use crate::nic::{NicProfile, TransportPolicy};
use crate::verbs::{CompletionStatus, SendKind};
use crate::wire::Service;

/// A sender waits after an RNR NAK. Its context is evicted at the moment at which the wait ends, before its timer is
/// processed.
#[test]
fn a_context_evicted_when_its_wait_ends_is_fetched_to_send() {
    let mut profile = NicProfile::new(TransportPolicy::SrnicPaged);
    if let Some(pool) = &mut profile.pool {
        (pool.contexts, pool.ahead) = (2, 1);
    }
    let mut pair = Pair::new(profile, 1);
    let [waiting, second, third] = [0; 3].map(|_| pair.connect(Service::Rc));
    let remote = pair.remote(0, 1000);
    pair.send(0, waiting[0], 1, SendKind::Send(None), 0, 100);
    pair.run_until(Time::from_ps(4_000_000));
    assert_eq!(pair.nics[1].counters().rnr_naks_sent, 1);
    pair.receive(1, waiting[1], 2, 0, 100);
    pair.send(0, second[0], 3, SendKind::Write(remote, None), 0, 100);
    pair.run_until(Time::from_ps(8_000_000));
    pair.now = pair.nics[0].deadline().unwrap();
    pair.send(0, third[0], 4, SendKind::Write(remote, None), 0, 100);
    let fetched = pair.nics[0].counters().contexts_fetched;
    pair.step(pair.now);
    assert_eq!(pair.nics[0].counters().contexts_fetched, fetched + 1, "the third context takes the first one's place");
    pair.run();
    let done: Vec<_> = pair.completions[0].iter().map(|completion| (completion.id, completion.status)).collect();
    assert_eq!(done, [3, 4, 1].map(|id| (id, CompletionStatus::Success)));
}
