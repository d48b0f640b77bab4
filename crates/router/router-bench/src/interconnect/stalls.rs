//! When the machine did something else.
//!
//! Both nodes look at the clock all the time, and see when they could not: an interrupt, another process, a hypervisor
//! that gave the processor to somebody else. On a virtual machine that is some percent of the time, in pieces of 3 to
//! 60 us: 99% of latencies would tell of that and of nothing else. So packets that came while a node stood still, or in
//! the time that it takes to catch up, are told apart. What counts as a stall grows with the work that was done
//! meanwhile, by a generous amount a packet: no way of sending packets can pass off its own slowness as the machine's.

use router_node::interconnect::TransportKind;

/// Before a stall: packets that are under way when it begins.
const BEFORE_NS: u64 = 20_000;
/// After it: what came meanwhile is made up for, at a load of four fifths, within four times its length.
const AFTER_NS: u64 = 20_000;
const AFTER_TIMES: u64 = 4;

/// A time in which a node did not look at the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stall {
    from_ns: u64,
    to_ns: u64,
}

/// What a look takes at most: some three times what it was measured to take, by kind.
#[derive(Clone, Copy, Debug)]
struct Costs {
    idle_ns: u64,
    message_ns: u64,
    packet_ns: u64,
    /// Of 1000 bytes.
    kilobyte_ns: u64,
}

impl Costs {
    const fn of(kind: TransportKind) -> Costs {
        match kind {
            TransportKind::Lanes => Costs { idle_ns: 1500, message_ns: 300, packet_ns: 100, kilobyte_ns: 400 },
            TransportKind::Windows(_) => Costs { idle_ns: 2000, message_ns: 650, packet_ns: 120, kilobyte_ns: 600 },
            TransportKind::RnicLanes => Costs { idle_ns: 4000, message_ns: 1200, packet_ns: 100, kilobyte_ns: 1500 },
            TransportKind::RnicUdp(_) => Costs { idle_ns: 20_000, message_ns: 6000, packet_ns: 300, kilobyte_ns: 3000 },
        }
    }
}

/// Looks for stalls of one node.
pub(super) struct Watch {
    looked_ns: u64,
    costs: Costs,
    packet_ns: u64,
    messages: u64,
    packets: u64,
}

impl Watch {
    /// Begins at a look. Packets have so many bytes.
    pub fn new(kind: TransportKind, packet_bytes: usize, now_ns: u64) -> Watch {
        let costs = Costs::of(kind);
        let packet_ns = costs.packet_ns + costs.kilobyte_ns * packet_bytes as u64 / 1000;
        Watch { looked_ns: now_ns, costs, packet_ns, messages: 0, packets: 0 }
    }

    /// To be called with each look at the clock, and with all the messages and packets so far: the stall that this look
    /// ends, if there was one.
    pub fn look(&mut self, now_ns: u64, messages: u64, packets: u64) -> Option<Stall> {
        let stall = Stall { from_ns: self.looked_ns, to_ns: now_ns };
        let (done_messages, done_packets) = (messages - self.messages, packets - self.packets);
        (self.looked_ns, self.messages, self.packets) = (now_ns, messages, packets);
        let ns_max = self.costs.idle_ns + done_messages * self.costs.message_ns + done_packets * self.packet_ns;
        (now_ns - stall.from_ns > ns_max).then_some(stall)
    }
}

/// When packets were disturbed.
#[derive(Debug, Default)]
pub(super) struct Stalls(Vec<Stall>);

impl Stalls {
    /// Of both nodes.
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

    /// Whether a stall may have had to do with a packet that came then.
    pub fn has_disturbed(&self, came_ns: u64) -> bool {
        let before = self.0.partition_point(|time| time.from_ns <= came_ns);
        before > 0 && came_ns < self.0[before - 1].to_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_a_look_that_took_too_long_for_what_was_done() {
        let mut watch = Watch::new(TransportKind::Lanes, 500, 0);
        assert_eq!(watch.look(1500, 0, 0), None);
        assert_eq!(watch.look(13_000, 2, 32), None, "32 packets in 2 messages may take this long");
        assert_eq!(watch.look(14_501, 2, 32), Some(Stall { from_ns: 13_000, to_ns: 14_501 }));
        assert_eq!(watch.look(17_000, 4, 34), None);
    }

    #[test]
    fn packets_are_disturbed_from_before_a_stall_until_it_is_made_up_for() {
        let sender = vec![Stall { from_ns: 100_000, to_ns: 110_000 }, Stall { from_ns: 900_000, to_ns: 903_000 }];
        let stalls = Stalls::merged(sender, &[Stall { from_ns: 150_000, to_ns: 152_000 }]);
        let disturbed = [80_000, 169_999, 170_000, 179_999, 900_000, 934_999].map(|ns| stalls.has_disturbed(ns));
        assert_eq!(disturbed, [true; 6]);
        let quiet = [0, 79_999, 180_000, 879_999, 935_000, 5_000_000].map(|ns| stalls.has_disturbed(ns));
        assert_eq!(quiet, [false; 6]);
        assert!(!Stalls::default().has_disturbed(7));
    }
}
