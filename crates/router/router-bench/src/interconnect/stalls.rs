//! Detection of the times when the machine ran something else.
//!
//! Both nodes read the clock in every iteration, and notice when they could not run: an interrupt, another process, or
//! a hypervisor that gave the processor to another guest. On a virtual machine this takes some percent of the time, in
//! pieces of 3 to 60 us, and would determine the 99th percentile alone. Packets that arrived while a node was stalled,
//! or in the time that it takes to catch up, are therefore counted separately. The threshold for a stall grows with the
//! work done in the iteration, by a generous amount for each packet, so that a slow way of sending packets cannot pass
//! for a disturbed machine.

use router_node::interconnect::TransportKind;

/// Time before a stall: packets that are in flight when it begins are affected.
const BEFORE_NS: u64 = 20_000;
/// Time after a stall, in addition to `AFTER_TIMES` its length: at four fifths of the full load, a node catches up
/// within four times the length of a stall.
const AFTER_NS: u64 = 20_000;
const AFTER_TIMES: u64 = 4;

/// A period in which a node did not read the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stall {
    from_ns: u64,
    to_ns: u64,
}

/// The longest times of an iteration by kind of interconnect: about three times the measured ones.
#[derive(Clone, Copy, Debug)]
struct CostsMax {
    idle_ns: u64,
    message_ns: u64,
    packet_ns: u64,
    /// For each 1000 bytes.
    kilobyte_ns: u64,
}

impl CostsMax {
    const fn of(kind: TransportKind) -> CostsMax {
        match kind {
            TransportKind::Lanes => CostsMax { idle_ns: 1500, message_ns: 300, packet_ns: 100, kilobyte_ns: 400 },
            TransportKind::Windows(_) => CostsMax { idle_ns: 2000, message_ns: 650, packet_ns: 120, kilobyte_ns: 600 },
            TransportKind::RnicLanes => CostsMax { idle_ns: 4000, message_ns: 1200, packet_ns: 100, kilobyte_ns: 1500 },
            TransportKind::RnicUdp(_) => {
                CostsMax { idle_ns: 20_000, message_ns: 6000, packet_ns: 300, kilobyte_ns: 3000 }
            }
        }
    }
}

/// Detects stalls of one node.
pub(super) struct StallDetector {
    polled_ns: u64,
    costs: CostsMax,
    packet_ns: u64,
    messages: u64,
    packets: u64,
}

impl StallDetector {
    /// Starts at `now_ns`; packets have `packet_bytes` bytes.
    pub fn new(kind: TransportKind, packet_bytes: usize, now_ns: u64) -> StallDetector {
        let costs = CostsMax::of(kind);
        let packet_ns = costs.packet_ns + costs.kilobyte_ns * packet_bytes as u64 / 1000;
        StallDetector { polled_ns: now_ns, costs, packet_ns, messages: 0, packets: 0 }
    }

    /// Records an iteration with the total numbers of messages and packets so far, and returns the stall that ends now,
    /// if there was one. Must be called at each reading of the clock.
    pub fn check(&mut self, now_ns: u64, messages: u64, packets: u64) -> Option<Stall> {
        let stall = Stall { from_ns: self.polled_ns, to_ns: now_ns };
        let (new_messages, new_packets) = (messages - self.messages, packets - self.packets);
        (self.polled_ns, self.messages, self.packets) = (now_ns, messages, packets);
        let ns_max = self.costs.idle_ns + new_messages * self.costs.message_ns + new_packets * self.packet_ns;
        (now_ns - stall.from_ns > ns_max).then_some(stall)
    }
}

/// The periods in which packets were disturbed.
#[derive(Debug, Default)]
pub(super) struct Stalls(Vec<Stall>);

impl Stalls {
    /// Merges the stalls of both nodes.
    pub fn merged(mut sender: Vec<Stall>, receiver: &[Stall]) -> Stalls {
        sender.extend_from_slice(receiver);
        let disturbed = |Stall { from_ns, to_ns }: Stall| Stall {
            from_ns: from_ns.saturating_sub(BEFORE_NS),
            to_ns: to_ns + AFTER_TIMES * (to_ns - from_ns) + AFTER_NS,
        };
        let mut times: Vec<Stall> = sender.into_iter().map(disturbed).collect();
        times.sort_unstable_by_key(|time| time.from_ns);
        let mut merged: Vec<Stall> = Vec::new();
        for time in times {
            match merged.last_mut().filter(|last| time.from_ns <= last.to_ns) {
                Some(last) => last.to_ns = last.to_ns.max(time.to_ns),
                None => merged.push(time),
            }
        }
        Stalls(merged)
    }

    /// Returns whether a stall may have affected a packet that arrived at this time.
    pub fn has_disturbed(&self, arrival_ns: u64) -> bool {
        let before = self.0.partition_point(|time| time.from_ns <= arrival_ns);
        before > 0 && arrival_ns < self.0[before - 1].to_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_an_iteration_that_took_too_long_for_its_work() {
        let mut detector = StallDetector::new(TransportKind::Lanes, 500, 0);
        assert_eq!(detector.check(1500, 0, 0), None);
        assert_eq!(detector.check(13_000, 2, 32), None, "32 packets in 2 messages may take this long");
        assert_eq!(detector.check(14_501, 2, 32), Some(Stall { from_ns: 13_000, to_ns: 14_501 }));
        assert_eq!(detector.check(17_000, 4, 34), None);
    }

    #[test]
    fn packets_are_disturbed_from_before_a_stall_until_its_backlog_is_gone() {
        let sender = vec![Stall { from_ns: 100_000, to_ns: 110_000 }, Stall { from_ns: 900_000, to_ns: 903_000 }];
        let stalls = Stalls::merged(sender, &[Stall { from_ns: 150_000, to_ns: 152_000 }]);
        let disturbed = [80_000, 169_999, 170_000, 179_999, 900_000, 934_999].map(|ns| stalls.has_disturbed(ns));
        assert_eq!(disturbed, [true; 6]);
        let quiet = [0, 79_999, 180_000, 879_999, 935_000, 5_000_000].map(|ns| stalls.has_disturbed(ns));
        assert_eq!(quiet, [false; 6]);
        assert!(!Stalls::default().has_disturbed(7));
    }
}
