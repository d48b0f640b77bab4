//! Counters.

use std::fmt;

use crate::{NODES_MAX, PORTS_MAX, PortId};

/// Number of packets and bytes. Of a large packet, its segments count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of packets.
    pub packets: u64,
    /// Number of bytes: of frames at ports, of IP packets elsewhere.
    pub bytes: u64,
}

impl Traffic {
    /// Adds packets and their bytes, see [`crate::Packet::on_wire`].
    #[inline]
    pub(crate) fn add(&mut self, (packets, bytes): (usize, usize)) {
        self.packets += packets as u64;
        self.bytes += bytes as u64;
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a packet was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[$doc])* $name,)*
        }

        impl DropReason {
            /// All reasons, in numerical order.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$name,)*];

            /// Returns the reason in words, as displayed with counters.
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
    /// Destination MAC address of another host.
    OtherMac = "to another hardware address",
    /// Unicast IP packet in a broadcast or multicast frame (RFC 1812, section 5.3.4).
    LinkBroadcast = "unicast in a broadcast frame",
    /// Neither IP nor ARP.
    EtherType = "unknown ethertype",
    /// VLAN without a port, or two tags.
    Vlan = "unknown VLAN",
    /// Ingress port is down or does not exist.
    PortDown = "port down",
    /// IP version differs from the EtherType.
    Version = "IP version",
    /// Header length below the minimum, or longer than the packet.
    HeaderLength = "header length",
    /// Total length shorter than the header, or longer than the frame.
    TotalLength = "total length",
    /// Wrong IPv4 header checksum.
    Checksum = "header checksum",
    /// Martian source address (RFC 1812, section 5.3.7).
    MartianSource = "martian source",
    /// Martian destination address.
    MartianDestination = "martian destination",
    /// Source address of this node.
    OwnSource = "source is the router itself",
    /// Multicast, which is not routed.
    Multicast = "multicast",
    /// Directed or limited broadcast (RFC 2644).
    Broadcast = "broadcast",
    /// Link-local source or destination, which must not leave its link.
    LinkLocal = "link-local address",
    /// Malformed IPv4 options.
    Options = "malformed options",
    /// Source route option.
    SourceRoute = "source route",
    /// To an address of this node whose kernel received the frame itself: no loss.
    KernelHasIt = "for the kernel, which has it",
    /// To an address of the router that is tentative or duplicate.
    AddressNotInUse = "own address not in use",
    /// To the router itself, which provides no such service; also counts answered echo requests.
    NoService = "no such service here",
    /// Malformed ARP.
    Arp = "malformed ARP",
    /// Invalid neighbour discovery message (RFC 4861, section 7.1).
    NeighbourDiscovery = "malformed neighbour discovery",
    /// ARP, neighbour discovery or MLD that was processed: no loss.
    Consumed = "neighbour message, noted",
    /// No route.
    NoRoute = "no route",
    /// Route of type *blackhole*.
    Blackhole = "blackhole route",
    /// Route of type *unreachable*.
    Unreachable = "unreachable route",
    /// Route of type *prohibit*.
    Prohibited = "prohibited route",
    /// Time to live or hop limit exceeded.
    TimeExceeded = "time to live exceeded",
    /// Exceeds the MTU of the next link and must not be fragmented.
    TooBig = "too big for the next link",
    /// Egress port is down or does not exist.
    EgressDown = "egress port down",
    /// Egress node is down or does not exist.
    NodeDown = "node down",
    /// Transmit queue of the port is full.
    PortQueue = "port queue full",
    /// Queue to the node is full.
    NodeQueue = "node queue full",
    /// Queue to the node's kernel is full.
    KernelQueue = "kernel queue full",
    /// No buffer for a fragment or a reply.
    NoBuffer = "no buffer",
    /// Queue for the resolution of the neighbour is full.
    NeighbourQueue = "neighbour queue full",
    /// Resolution of the neighbour failed.
    NeighbourFailed = "neighbour does not answer",
    /// Neighbour table is full.
    NeighbourTable = "neighbour table full",
    /// From another node, with a hop that does not belong to this node.
    Hop = "hop is none of this node's",
    /// From the kernel, to which it would return.
    KernelLoop = "back to the kernel that sent it",
    /// Packet filters of the node would be bypassed.
    Filters = "packet filters would be bypassed",
    /// From a port whose frames the kernel receives too, and which it forwards itself: no loss.
    KernelForwards = "forwarded by the kernel",
}

impl DropReason {
    /// Returns whether the packet is lost. Others are left to the kernel, which has received them too.
    pub const fn is_loss(self) -> bool {
        !matches!(self, Self::KernelHasIt | Self::KernelForwards)
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of dropped packets by reason. Of a large packet, its segments count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops([u64; DropReason::ALL.len()]);

impl Default for Drops {
    fn default() -> Drops {
        Drops([0; DropReason::ALL.len()])
    }
}

impl Drops {
    /// Returns the number for a reason.
    pub fn count(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// Iterates over the reasons that occurred and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL.iter().map(|reason| (*reason, self.count(*reason))).filter(|(_, count)| *count > 0)
    }

    /// Returns the total number.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    #[inline]
    pub(crate) fn add(&mut self, reason: DropReason, packets: usize) {
        self.0[reason as usize] += packets as u64;
    }
}

/// The counters of a port. Frames of a VLAN count at its port and at the parent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Received frames.
    pub received: Traffic,
    /// Frames queued for transmission.
    pub sent: Traffic,
    /// Dropped packets that were received here, or that could not be sent here.
    pub drops: Drops,
}

/// The counters of a forwarder, which only grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Counters by port.
    pub ports: Vec<PortCounters>,
    /// Packets sent to other nodes, by node.
    pub to_nodes: Vec<Traffic>,
    /// Packets received from other nodes.
    pub from_nodes: Traffic,
    /// Packets delivered to the node's kernel.
    pub to_kernel: Traffic,
    /// Packets received from the node's kernel.
    pub from_kernel: Traffic,
    /// Dropped packets from the kernel, from other nodes, or from the router itself.
    pub drops: Drops,
    /// ICMP errors sent.
    pub icmp_errors_sent: u64,
    /// ICMP errors suppressed by the rate limit.
    pub icmp_errors_suppressed: u64,
    /// Redirects sent.
    pub redirects_sent: u64,
    /// ARP requests and neighbour solicitations sent.
    pub solicitations_sent: u64,
    /// ARP requests and neighbour solicitations suppressed by the rate limit.
    pub solicitations_suppressed: u64,
    /// Neighbours not learned from their messages, because of the limits of their port.
    pub neighbours_refused: u64,
    /// Messages of other hosts that claim an address of this node.
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
            neighbours_refused: 0,
            address_conflicts: 0,
        }
    }
}

impl Counters {
    /// Gives each port the counters of the port that had this index before; others begin at 0.
    pub(crate) fn renumber_ports(&mut self, former: &[Option<PortId>]) {
        let mut ports = vec![PortCounters::default(); usize::from(PORTS_MAX)];
        for (port, former) in ports.iter_mut().zip(former) {
            *port = former.map(|former| self.ports[usize::from(former.0)].clone()).unwrap_or_default();
        }
        self.ports = ports;
    }

    /// Returns the number of packets dropped for a reason, of all origins.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.count(reason) + self.ports.iter().map(|port| port.drops.count(reason)).sum::<u64>()
    }
}
