//! The protocol between a monitor and its proxy.
//!
//! The proxy, `crosslane proxy`, is a child of the monitor. Its standard input is an endpoint of a channel
//! ([`DESCRIPTOR`]). The messages, in order:
//!
//! ```text
//!   monitor                                                    proxy
//!   Configure, Retained..., device (send_device) ─────────►
//!                                  ◄──────────────────────── Ready
//!   LinkUp{peer, epoch} ──────────────────────────────────►   accepts connections in that epoch
//!   Listen{peer, address} ────────────────────────────────►
//!                                  ◄──────────────────────── Listening{address} or ListenFailed{address, reason}
//!   LinkDown{peer, epoch, policy} ────────────────────────►   connections with that peer are reset, or move to TCP, or
//!                                                             are retained, as `policy` says
//!                                  ◄──────────────────────── Stopped{peer, epoch}: the proxy no longer accesses window
//!                                                             memory that training clears
//!   Gone{peer} ───────────────────────────────────────────►   monitor and proxy of that peer have died
//!                                  ◄──────────────────────── PeerLeft{peer, epoch}: the peer has left the epoch
//!   device again, when a peer's bells have changed ───────►   updates its mapping
//!   Change{nodes, access} ────────────────────────────────►   nodes that have joined, rules for new connections
//!                                  ◄──────────────────────── Deposit{connection}, with descriptors: outlives it
//!                                  ◄──────────────────────── Withdraw{peer, span}: the connection has ended
//!   Stop ─────────────────────────────────────────────────►   ends
//! ```
//!
//! After a link is trained again, nothing of the old epoch may be stored. The monitor therefore waits for `Stopped`,
//! and kills a proxy that does not answer in time. If the proxy ends by itself, the monitor takes all links down,
//! starts another proxy and trains the links again.
//!
//! Connections whose programs store into the windows themselves survive the end of the monitor or the proxy. For each
//! of them the monitor holds duplicates of the proxy's two descriptors, and sends them to the next proxy
//! ([`ToProxy::Retained`]). If the channel closes without a `Stop`, the monitor has died. A proxy with connections that
//! can be retained then continues, and waits at [`Configuration::successor_socket`] for the next monitor:
//!
//! ```text
//!   next monitor                                               proxy
//!                                  ◄──────────────────────── Handover{configuration} of the proxy
//!   Adopt, Change, device ────────────────────────────────►   this channel replaces the previous one
//!                                  ◄──────────────────────── Deposit{connection}..., Ready
//!   or Release ───────────────────────────────────────────►   releases the windows
//!                                  ◄──────────────────────── Handover{connections}..., then the proxy ends
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::channel::DESCRIPTORS_MAX;
use crate::{Channel, ChannelError, counters};

/// Version of the protocol. Monitor and proxy must be of the same release.
pub const VERSION: u32 = 7;
/// The proxy's endpoint of the channel: standard input, a number that needs no agreement with the parent.
pub const DESCRIPTOR: i32 = 0;
/// Maximum number of descriptors of a device: memory, registers, and a bell for each vector of each client.
const DEVICE_DESCRIPTORS_MAX: usize = 16_384;

/// A message from the monitor to the proxy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToProxy {
    /// The configuration. It is the first message.
    Configure(Box<Configuration>),
    /// Retained connections of an earlier proxy, with the descriptors of each in the same order. Sent before the
    /// device.
    #[serde(rename = "Kept")]
    Retained(Vec<RetainedConnection>),
    /// Carries some of the descriptors of the device that follows.
    Descriptors,
    /// The device, as `fabric::device::Device::hand_over` describes it: first to map it, later to update the mapping.
    Device {
        /// The description of the device.
        bytes: Vec<u8>,
    },
    /// Changed parts of the configuration.
    Change {
        /// All nodes, by slot. Nodes may have been added at the end.
        nodes: Vec<Node>,
        /// Access rules for connections to programs of this node.
        access: Access,
    },
    /// The link is up.
    LinkUp {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
    },
    /// The link goes down. The proxy resets, retains or moves its connections to kernel TCP, stops accessing its
    /// windows, and answers with [`FromProxy::Stopped`].
    LinkDown {
        /// The peer's slot.
        peer: u8,
        /// The epoch that ends.
        epoch: u32,
        /// What to do with its connections.
        #[serde(rename = "fate")]
        policy: LinkLossPolicy,
    },
    /// Monitor and proxy of a peer have died. Its connections cannot continue in windows.
    Gone {
        /// The peer's slot.
        peer: u8,
    },
    /// From the next monitor, after [`Handover`]: continue as its proxy.
    Adopt,
    /// From the next monitor, after [`Handover`]: hand over retained connections, and end.
    #[serde(rename = "Part")]
    Release,
    /// Listen at an address of another node.
    #[serde(rename = "Mirror")]
    Listen {
        /// The peer's slot.
        peer: u8,
        /// Address of a listener of the peer.
        address: SocketAddr,
    },
    /// Stop listening at an address. Its connections continue.
    #[serde(rename = "Unmirror")]
    StopListening {
        /// The address.
        address: SocketAddr,
    },
    /// Request for [`FromProxy::Report`].
    Report,
    /// End the proxy.
    Stop,
}

/// A message from the proxy to the monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromProxy {
    /// The device is mapped.
    Ready {
        /// [`VERSION`].
        version: u32,
    },
    /// The proxy no longer accesses windows of that epoch.
    Stopped {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
    },
    /// The proxy listens at the address.
    #[serde(rename = "Mirrored")]
    Listening {
        /// The address.
        address: SocketAddr,
    },
    /// The proxy cannot listen at the address.
    #[serde(rename = "NotMirrored")]
    ListenFailed {
        /// The address.
        address: SocketAddr,
        /// The reason.
        reason: String,
    },
    /// The peer refused a connection because its listener is gone. The proxy has closed its own listener too.
    Refused {
        /// The address.
        address: SocketAddr,
    },
    /// The peer has violated the protocol: the link must go down.
    Broken {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
        /// The violation.
        what: String,
    },
    /// The peer has left the epoch, and connections wait for it.
    #[serde(rename = "Left")]
    PeerLeft {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
    },
    /// Counters of the proxy.
    Report(Report),
    /// The monitor is to hold the attached descriptors for the next proxy ([`RetainedDescriptors`]).
    Deposit(RetainedConnection),
    /// Several [`FromProxy::Deposit`], with the descriptors of each in the same order, sent to a new monitor.
    Deposits(Vec<RetainedConnection>),
    /// The monitor is to close the descriptors of a connection.
    Withdraw {
        /// The peer's slot.
        peer: u8,
        /// Span of the connection ([`RetainedConnection::span`]).
        span: u32,
    },
}

/// What a proxy does with the connections of a link that goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LinkLossPolicy {
    /// Reset all: the peer has shut down.
    #[serde(rename = "Over")]
    Reset,
    /// Retain only direct connections: the peer may come back with another proxy.
    #[serde(rename = "DirectWait")]
    RetainDirect,
    /// Retain all: the peer's monitor was replaced, and its proxy may be the same.
    #[serde(rename = "AllWait")]
    RetainAll,
}

/// A connection with a span that outlives a proxy. Together with its [`RetainedDescriptors`], it is all that another
/// proxy needs to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetainedConnection {
    /// The peer's slot.
    pub peer: u8,
    /// Index of the span in the windows.
    pub span: u32,
    /// Number of the connection, which both proxies use.
    pub number: u32,
    /// Ports of the client and of the server, by which programs know the connection.
    pub ports: [u16; 2],
}

/// The descriptors of a retained connection: the TCP socket to the program of this node, and the bell by which both
/// wake each other. While they are open, the connection stays, whatever the proxy does.
#[derive(Clone, Debug)]
pub struct RetainedDescriptors<F = OwnedFd> {
    /// The TCP socket.
    pub socket: F,
    /// The bell.
    pub bell: F,
}

impl<F> RetainedDescriptors<F> {
    /// Returns the descriptors of connections from those of a message about them.
    pub fn of_message(descriptors: Vec<F>) -> impl Iterator<Item = Self> {
        let mut descriptors = descriptors.into_iter();
        std::iter::from_fn(move || Some(Self { socket: descriptors.next()?, bell: descriptors.next()? }))
    }
}

impl RetainedDescriptors {
    /// Returns duplicates of both.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        Ok(Self { socket: self.socket.try_clone()?, bell: self.bell.try_clone()? })
    }
}

impl<F: AsFd> RetainedDescriptors<F> {
    /// Returns both, in the order of a message.
    pub fn as_fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.socket.as_fd(), self.bell.as_fd()]
    }
}

/// A message from a proxy whose monitor has died to the next monitor. The first one contains the configuration. If the
/// monitor does not adopt the proxy, further ones contain retained connections with the descriptors of each in the same
/// order, until the channel closes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Handover {
    /// [`VERSION`].
    pub version: u32,
    /// The configuration, in the first message.
    #[serde(default)]
    pub configuration: Option<Box<Configuration>>,
    /// Retained connections.
    #[serde(rename = "kept")]
    pub connections: Vec<RetainedConnection>,
}

/// The configuration of a proxy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    /// [`VERSION`].
    pub version: u32,
    /// Slot of this node.
    #[serde(rename = "own")]
    pub own_slot: u8,
    /// Number of slots of the device.
    pub slots: u8,
    /// All nodes, by slot.
    pub nodes: Vec<Node>,
    /// Rack directory of this node's programs.
    pub rack_directory: PathBuf,
    /// Bytes of the control partition at the start of each window.
    pub control_partition_bytes: u64,
    /// Bytes of all data partitions, which follow the control partition.
    pub data_bytes: u64,
    /// The data partitions.
    pub partitions: Vec<Partition>,
    /// Bytes that a connection sends before another is served, if configured; 0 disables slicing.
    pub slice_bytes: Option<u64>,
    /// Spans for direct connections, if programs may write windows.
    pub spans: Option<Spans>,
    /// How long connections wait for a lost link, and a proxy for another monitor, in nanoseconds.
    pub return_ns: u64,
    /// Socket at which a proxy whose monitor has died waits for the next one. Without it the proxy ends at once.
    #[serde(rename = "heir_socket")]
    pub successor_socket: Option<PathBuf>,
    /// On all nodes, training does not clear the data partitions: proxies clear them, and continue with the contents
    /// over the next link.
    pub keeps_partitions: bool,
    /// Whether connections of a lost link move to kernel TCP.
    pub is_failover: bool,
    /// Port at which the proxy's first thread accepts failover connections of other proxies; further threads use the
    /// following ports. Any port if absent.
    pub failover_port: Option<u16>,
    /// The model that links are slowed down to.
    pub timing: Option<Timing>,
    /// Access rules for connections to programs of this node.
    pub access: Access,
    /// The listeners of other nodes that programs of this machine reach without the library.
    #[serde(default)]
    pub publish: Option<Publish>,
}

/// The listeners of other nodes at whose own addresses the proxy listens, for the programs of all users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Publish {
    /// All that other nodes have announced, or that a program has asked for.
    All,
    /// Those with ports of these ranges.
    Ports(Vec<(u16, u16)>),
}

impl Configuration {
    /// Returns whether programs of other users than the rack's take part.
    pub fn is_published(&self) -> bool {
        self.publish.is_some()
    }

    /// Returns whether a proxy with this configuration can continue with `next` after [`ToProxy::Change`].
    pub fn is_compatible_with(&self, next: &Self) -> bool {
        let changed = Self { nodes: next.nodes.clone(), access: next.access.clone(), ..self.clone() };
        changed == *next && next.nodes.starts_with(&self.nodes)
    }
}

/// The access rules for connections to this node. The monitor answers queries by them, and the proxy enforces them for
/// peers that connect without a query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The rules; the first that matches decides.
    pub rules: Vec<Rule>,
    /// Whether connections that match no rule are allowed.
    pub allows_others: bool,
}

impl Access {
    /// Returns whether a program of the node in slot `from` may connect to a port of this node.
    pub fn admits(&self, from: u8, port: u16) -> bool {
        let rule = self.rules.iter().find(|rule| rule.matches(from, port));
        rule.map_or(self.allows_others, |rule| rule.allows)
    }
}

/// An access rule for connections to this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Slot of the connecting node; any node if absent.
    pub from: Option<u8>,
    /// First and last ports of ranges; all ports if absent.
    pub ports: Option<Vec<(u16, u16)>>,
    /// Whether the connection is allowed.
    pub allows: bool,
}

impl Rule {
    fn matches(&self, from: u8, port: u16) -> bool {
        let has_port = |ports: &Vec<(u16, u16)>| ports.iter().any(|(first, last)| (*first..=*last).contains(&port));
        self.from.is_none_or(|slot| slot == from) && self.ports.as_ref().is_none_or(has_port)
    }
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// Address of the node.
    pub address: IpAddr,
}

/// Spans of each window for direct connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spans {
    /// Offset of the first span in the window.
    pub offset_bytes: u64,
    /// Bytes of a span.
    pub span_bytes: u64,
    /// Number of spans.
    pub count: u64,
}

/// A data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// Class of the partition.
    pub class: Class,
    /// The core that owns the partition.
    pub core: Option<u16>,
}

/// The class of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    /// Short messages.
    Latency,
    /// Streams.
    Bulk,
}

/// The model that links are slowed down to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Name of the model in the rack file.
    pub name: String,
    /// One-way delay in nanoseconds, if it differs from the model's.
    pub one_way_ns: Option<f64>,
}

/// Counters of a proxy since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Counters of each link, by slot of the peer; those of this node's own slot stay zero.
    pub peers: Vec<PeerReport>,
}

counters! {
    /// Counters of a proxy for one link.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct PeerReport {
        /// Open connections.
        pub connections_open: u64,
        /// Connections since the start.
        pub connections_total: u64,
        /// Payload bytes sent to the peer.
        pub bytes_sent: u64,
        /// Payload bytes received from the peer.
        pub bytes_received: u64,
        /// Connections that moved between partitions.
        pub moves: u64,
        /// Open connections of lost links, which `connections_open` does not include.
        pub failover_open: u64,
        /// Connections that have lost their link.
        pub failover_total: u64,
        /// Of those, connections that were reset because kernel TCP could not connect, or failed.
        pub failover_resets: u64,
        /// Payload bytes sent to the peer over kernel TCP.
        pub failover_bytes_sent: u64,
        /// Payload bytes received from the peer over kernel TCP.
        pub failover_bytes_received: u64,
        /// Bytes copied by the proxy: each payload byte once, and once more if it arrived while its program had no
        /// room.
        pub bytes_copied: u64,
        /// Frames sent in windows.
        pub frames_sent: u64,
        /// Number of times that frames were published to the peer: all frames of a partition that were ready, with at
        /// most one fence.
        pub publishes: u64,
        /// Number of times that the proxy waited until its stores had arrived, before it blocked.
        pub flushes: u64,
        /// Frames received in windows.
        pub frames_received: u64,
        /// Number of times that a connection had bytes to send and its receiver accepted none.
        pub stalls: u64,
        /// Number of times that a partition was full.
        pub partitions_full: u64,
        /// Number of doorbells rung for a peer that was blocked.
        pub rings_peer: u64,
        /// Number of wake-ups of blocked programs.
        pub rings_local: u64,
        /// Number of wake-ups received from programs.
        pub wakes: u64,
        /// Open direct connections. The counts of connections above include them, the counts of bytes do not.
        pub direct_open: u64,
        /// Direct connections since the start.
        pub direct_total: u64,
        /// Connections that were forwarded by the proxies because either endpoint had no free span, or that failed
        /// because a program of this node could not map its span.
        pub direct_missed: u64,
        /// Of `direct_open`, connections that wait for a link, or for the peer to confirm that it retained them.
        pub direct_held: u64,
    }
}

impl PeerReport {
    /// Copies that this node makes of each byte sent: from the program into the connection's memory, and by the proxy
    /// into the window.
    pub const COPIES_PER_BYTE_SENT: f64 = 2.0;

    /// Returns the mean number of copies that this node makes of each byte received: by the proxy, more than one where
    /// a program had no room, and by the program. `None` before the first byte.
    pub fn copies_per_byte_received(&self) -> Option<f64> {
        let copied = self.bytes_copied.checked_sub(self.bytes_sent)?;
        (self.bytes_received > 0).then(|| 1.0 + copied as f64 / self.bytes_received as f64)
    }

    /// Returns the mean number of frames per publish. `None` before the first publish.
    pub fn frames_per_publish(&self) -> Option<f64> {
        (self.publishes > 0).then(|| self.frames_sent as f64 / self.publishes as f64)
    }
}

/// Sends a device, in several packets if it has more descriptors than one packet can carry.
///
/// # Errors
/// As [`Channel::send`].
pub fn send_device(channel: &Channel, bytes: Vec<u8>, descriptors: &[OwnedFd]) -> Result<(), ChannelError> {
    for some in descriptors.chunks(DESCRIPTORS_MAX) {
        let some: Vec<BorrowedFd<'_>> = some.iter().map(AsFd::as_fd).collect();
        channel.send(&ToProxy::Descriptors, &some)?;
    }
    channel.send(&ToProxy::Device { bytes }, &[])
}

/// Sends connections with their descriptors in as many packets as needed; `message_of` makes the message of each
/// packet.
///
/// # Errors
/// As [`Channel::send`].
pub fn send_retained<M: Serialize>(
    channel: &Channel,
    connections: &[(RetainedConnection, [BorrowedFd<'_>; 2])],
    message_of: impl Fn(Vec<RetainedConnection>) -> M,
) -> Result<(), ChannelError> {
    for some in connections.chunks(DESCRIPTORS_MAX / 2) {
        let (batch, descriptors): (Vec<RetainedConnection>, Vec<[BorrowedFd<'_>; 2]>) = some.iter().copied().unzip();
        channel.send(&message_of(batch), descriptors.as_flattened())?;
    }
    Ok(())
}

/// Collects the parts of a device that arrive at the proxy.
#[derive(Debug, Default)]
pub struct DeviceParts {
    descriptors: Vec<OwnedFd>,
}

impl DeviceParts {
    /// Stores descriptors of [`ToProxy::Descriptors`]. Those above the maximum of a device are dropped, after which the
    /// device is refused.
    pub fn add(&mut self, some: Vec<OwnedFd>) {
        let room = DEVICE_DESCRIPTORS_MAX - self.descriptors.len();
        self.descriptors.extend(some.into_iter().take(room));
    }

    /// Removes and returns all descriptors that came before [`ToProxy::Device`].
    pub fn take(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Received;

    #[test]
    fn a_device_with_many_descriptors_arrives_in_order() {
        let (monitor, proxy) = Channel::pair().unwrap();
        let files: Vec<OwnedFd> = (0..450)
            .map(|index| {
                let file = tempfile::tempfile().unwrap();
                file.set_len(index).unwrap();
                file.into()
            })
            .collect();
        send_device(&monitor, vec![1, 2, 3], &files).unwrap();
        let mut parts = DeviceParts::default();
        loop {
            match proxy.receive().unwrap() {
                Received::Message(ToProxy::Descriptors, some) => parts.add(some),
                Received::Message(ToProxy::Device { bytes }, _) => break assert_eq!(bytes, [1, 2, 3]),
                other => panic!("{other:?}"),
            }
        }
        let lengths = parts.take().into_iter().map(|file| std::fs::File::from(file).metadata().unwrap().len());
        assert!(lengths.eq(0..450));
    }
}
