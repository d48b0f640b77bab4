//! What is counted.

use std::fmt;

use crate::{NODES_MAX, PORTS_MAX};

/// Packets and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// How many.
    pub packets: u64,
    /// Their bytes: of frames at ports, of IP packets elsewhere.
    pub bytes: u64,
}

impl Traffic {
    #[inline]
    pub(crate) fn add(&mut self, bytes: usize) {
        self.packets += 1;
        self.bytes += bytes as u64;
    }

    #[inline]
    pub(crate) fn add_many(&mut self, packets: usize, bytes: usize) {
        self.packets += packets as u64;
        self.bytes += bytes as u64;
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a packet went no further.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[$doc])* $name,)*
        }

        impl DropReason {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$name,)*];

            /// In words, as counters are shown.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DropReason::$name => $text,)*
                }
            }
        }
    };
}

reasons! {
    /// Shorter than its headers.
    Truncated = "truncated",
    /// To another hardware address.
    OtherMac = "to another hardware address",
    /// Unicast IP in a frame to everybody (RFC 1812, section 5.3.4).
    LinkBroadcast = "unicast in a broadcast frame",
    /// Neither IP nor ARP.
    EtherType = "unknown ethertype",
    /// Of a VLAN that no port is of, or with two tags.
    Vlan = "unknown VLAN",
    /// Came in at a port that is down or is not there.
    PortDown = "port down",
    /// Another IP version than the frame says.
    Version = "IP version",
    /// A header shorter than can be, or longer than the packet.
    HeaderLength = "header length",
    /// A total length shorter than the header, or longer than the frame.
    TotalLength = "total length",
    /// The IPv4 header's checksum is wrong.
    Checksum = "header checksum",
    /// From where nobody is (RFC 1812, section 5.3.7).
    MartianSource = "martian source",
    /// To where nobody is.
    MartianDestination = "martian destination",
    /// From an address of this node's own.
    OwnSource = "source is the router itself",
    /// To a group: multicast is not routed.
    Multicast = "multicast",
    /// To everybody on a network (RFC 2644).
    Broadcast = "broadcast",
    /// From or to a link-local address, which stays on its link.
    LinkLocal = "link-local address",
    /// Malformed IPv4 options.
    Options = "malformed options",
    /// With a source route.
    SourceRoute = "source route",
    /// To an address of this node's, and its kernel saw the frame by itself: no loss.
    KernelHasIt = "for the kernel, which has it",
    /// To an address that would be the router's own, but is looked for yet, or somebody else's too.
    AddressNotInUse = "own address not in use",
    /// To the router itself, for something that it does not serve.
    NoService = "no such service here",
    /// ARP that does not hold together.
    Arp = "malformed ARP",
    /// Neighbour discovery that does not hold together (RFC 4861, section 7.1).
    NeighbourDiscovery = "malformed neighbour discovery",
    /// ARP or neighbour discovery: taken note of. No loss.
    Consumed = "neighbour message, noted",
    /// No route.
    NoRoute = "no route",
    /// A route that says *blackhole*.
    Blackhole = "blackhole route",
    /// A route that says *unreachable*.
    Unreachable = "unreachable route",
    /// A route that says *prohibit*.
    Prohibited = "prohibited route",
    /// Its time to live, or hop limit, has run out.
    TimeExceeded = "time to live exceeded",
    /// Longer than the next link takes, and not to be fragmented.
    TooBig = "too big for the next link",
    /// The port that it should leave by is down or not there.
    EgressDown = "egress port down",
    /// The node that it should leave by is down or not there.
    NodeDown = "node down",
    /// The port's queue is full.
    PortQueue = "port queue full",
    /// The queue to the node is full.
    NodeQueue = "node queue full",
    /// The queue to the node's own kernel is full.
    KernelQueue = "kernel queue full",
    /// No buffer for a fragment or an answer.
    NoBuffer = "no buffer",
    /// More wait for the neighbour's hardware address than may.
    NeighbourQueue = "neighbour queue full",
    /// The neighbour does not answer.
    NeighbourFailed = "neighbour does not answer",
    /// No room for another neighbour.
    NeighbourTable = "neighbour table full",
    /// From another node, with a hop that is none of this node's.
    Hop = "hop is none of this node's",
    /// Would go back to the kernel that it came from.
    KernelLoop = "back to the kernel that sent it",
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Packets that went no further, by reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops([u64; DropReason::ALL.len()]);

impl Default for Drops {
    fn default() -> Drops {
        Drops([0; DropReason::ALL.len()])
    }
}

impl Drops {
    /// How many for this reason.
    pub fn count(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// Reasons that there were, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL.iter().map(|reason| (*reason, self.count(*reason))).filter(|(_, count)| *count > 0)
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    #[inline]
    pub(crate) fn add(&mut self, reason: DropReason) {
        self.0[reason as usize] += 1;
    }
}

/// Of one port. A VLAN's frames are its port's and its parent's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames that came in.
    pub received: Traffic,
    /// Frames that were given to the port to be sent.
    pub sent: Traffic,
    /// Of those that came in here, what went no further; and what could not leave here.
    pub drops: Drops,
}

/// All counters of a forwarder. They only grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    /// By port.
    pub ports: Vec<PortCounters>,
    /// Given to other nodes, by node.
    pub to_nodes: Vec<Traffic>,
    /// Came from other nodes.
    pub from_nodes: Traffic,
    /// Given to the node's own kernel.
    pub to_kernel: Traffic,
    /// Came from the node's own kernel.
    pub from_kernel: Traffic,
    /// Of what came from the kernel, from other nodes, or from the router itself: what went no further.
    pub drops: Drops,
    /// ICMP errors that were sent.
    pub icmp_errors_sent: u64,
    /// ICMP errors that were not sent, because there were too many.
    pub icmp_errors_suppressed: u64,
    /// Redirects that were sent.
    pub redirects_sent: u64,
    /// ARP requests and neighbour solicitations that were sent.
    pub solicitations_sent: u64,
    /// ARP requests and neighbour solicitations that were not sent, because there were too many.
    pub solicitations_suppressed: u64,
    /// Others that claimed an address of this node's.
    pub address_conflicts: u64,
}

impl Default for Counters {
    fn default() -> Counters {
        Counters {
            ports: vec![PortCounters::default(); usize::from(PORTS_MAX)],
            to_nodes: vec![Traffic::default(); usize::from(NODES_MAX)],
            from_nodes: Traffic::default(),
            to_kernel: Traffic::default(),
            from_kernel: Traffic::default(),
            drops: Drops::default(),
            icmp_errors_sent: 0,
            icmp_errors_suppressed: 0,
            redirects_sent: 0,
            solicitations_sent: 0,
            solicitations_suppressed: 0,
            address_conflicts: 0,
        }
    }
}

impl Counters {
    /// Packets that went no further, for this reason, wherever they came from.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.count(reason) + self.ports.iter().map(|port| port.drops.count(reason)).sum::<u64>()
    }
}
