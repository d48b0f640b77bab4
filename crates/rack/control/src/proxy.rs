//! Monitor and proxy.
//!
//! The proxy, `crosslane proxy`, is the monitor's child and has one end of a channel as its standard input
//! ([`DESCRIPTOR`]). What is said, in order:
//!
//! ```text
//!   monitor                                                    proxy
//!   Configure, Kept..., device (send_device) ─────────────►
//!                                  ◄──────────────────────── Ready
//!   LinkUp{peer, epoch} ──────────────────────────────────►   carries connections of that epoch
//!   Mirror{peer, address} ────────────────────────────────►
//!                                  ◄──────────────────────── Mirrored{address} or NotMirrored{address, reason}
//!   LinkDown{peer, epoch, fate} ──────────────────────────►   connections with that peer are reset, or move to TCP, or
//!                                                             wait, as `fate` says
//!                                  ◄──────────────────────── Stopped{peer, epoch}: no window of it is touched any more
//!                                                             that training cleans
//!   Gone{peer} ───────────────────────────────────────────►   monitor and proxy of that peer have died
//!                                  ◄──────────────────────── Left{peer, epoch}: the peer is not in it any more
//!   device again, when a peer's bells have changed ───────►   renews what it has
//!   Change{nodes, access} ────────────────────────────────►   nodes that have joined, rules for new connections
//!                                  ◄──────────────────────── Deposit{kept}, with a descriptor: kept beyond the proxy
//!                                  ◄──────────────────────── Withdraw{peer, span}: not any more
//!   Stop ─────────────────────────────────────────────────►   ends
//! ```
//!
//! Nothing of an old epoch may be stored once the link is trained again, so the monitor waits for `Stopped`; a proxy
//! that does not answer in time is killed. When it dies by itself, the monitor takes all links down, starts another and
//! trains again.
//!
//! Connections whose programs store into the windows themselves outlive either. Of each, the monitor has a duplicate of
//! the lifeline's far end, which it gives to the next proxy ([`ToProxy::Kept`]). When the channel ends without a
//! `Stop`, the monitor is dead. The proxy goes on, as long as it has connections that can, and waits at
//! [`Configuration::heir_socket`] for the next monitor:
//!
//! ```text
//!   next monitor                                               proxy
//!                                  ◄──────────────────────── HandOver{configuration}: what it works by
//!   Adopt, Change, device ────────────────────────────────►   the channel is the one between them from now on
//!                                  ◄──────────────────────── Deposit{kept}..., Ready
//!   or Part ──────────────────────────────────────────────►   lets go of the windows
//!                                  ◄──────────────────────── HandOver{kept}..., and ends
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::channel::DESCRIPTORS_MAX;
use crate::{Channel, ChannelError};

/// The version of these messages: monitor and proxy come from one release.
pub const VERSION: u32 = 5;
/// The proxy's end of the channel: its standard input, which needs no agreement with whoever starts it.
pub const DESCRIPTOR: i32 = 0;
/// Descriptors of a device at most: memory, registers, and a bell for each vector of each client.
const DEVICE_DESCRIPTORS_MAX: usize = 16_384;

/// From monitor to proxy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToProxy {
    /// The first message.
    Configure(Configuration),
    /// Connections of an earlier proxy, each with a descriptor, in the same order. Before the device.
    Kept(Vec<Kept>),
    /// Some of the descriptors of the device that follows.
    Descriptors,
    /// `fabric::device::Device::hand_over`: the first time to take over, later to renew.
    Device {
        /// What the device is.
        bytes: Vec<u8>,
    },
    /// What of the configuration is different now.
    Change {
        /// All nodes, by slot: more may have joined behind the last.
        nodes: Vec<Node>,
        /// Who may connect to programs of this node.
        access: Access,
    },
    /// The link is up in this epoch.
    LinkUp {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
    },
    /// The link is going down: reset its connections, or let them go on over kernel TCP, stop touching its windows, say
    /// [`FromProxy::Stopped`].
    LinkDown {
        /// The peer's slot.
        peer: u8,
        /// The epoch that ends.
        epoch: u32,
        /// What becomes of its connections.
        fate: Fate,
    },
    /// Monitor and proxy of a peer have died: none of its connections goes on by windows.
    Gone {
        /// The peer's slot.
        peer: u8,
    },
    /// From the next monitor, after [`HandOver`]: go on for it.
    Adopt,
    /// From the next monitor, after [`HandOver`]: give what can be kept, and end.
    Part,
    /// Listen in the place of another node, at an address of its.
    Mirror {
        /// The peer's slot.
        peer: u8,
        /// Where a program of it listens.
        address: SocketAddr,
    },
    /// Stop listening there. Connections stay.
    Unmirror {
        /// Where.
        address: SocketAddr,
    },
    /// Answer with [`FromProxy::Report`].
    Report,
    /// End.
    Stop,
}

/// From proxy to monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromProxy {
    /// The device is mapped.
    Ready {
        /// [`VERSION`].
        version: u32,
    },
    /// No window of that epoch is touched any more.
    Stopped {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
    },
    /// The proxy listens there.
    Mirrored {
        /// Where.
        address: SocketAddr,
    },
    /// It cannot.
    NotMirrored {
        /// Where.
        address: SocketAddr,
        /// Why not.
        reason: String,
    },
    /// The other node refused a connection: its listener is gone, and so is the mirror.
    Refused {
        /// Where.
        address: SocketAddr,
    },
    /// The peer wrote what no peer writes: the link must go down.
    Broken {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
        /// What was found.
        what: String,
    },
    /// The peer is not in the epoch any more, and connections wait for it.
    Left {
        /// The peer's slot.
        peer: u8,
        /// The epoch.
        epoch: u32,
    },
    /// What the proxy has done.
    Report(Report),
    /// Keep the descriptor that comes with this for the next proxy.
    Deposit(Kept),
    /// As [`FromProxy::Deposit`], several, with a descriptor each in the same order: to another monitor.
    Deposits(Vec<Kept>),
    /// Keep it no more.
    Withdraw {
        /// The peer's slot.
        peer: u8,
        /// As in [`Kept::span`].
        span: u32,
    },
}

/// What becomes of the connections of a link that goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Fate {
    /// The peer has left for good: none goes on by windows.
    Over,
    /// The peer's proxy may be another one next time: only what programs have in windows themselves waits for it.
    DirectWait,
    /// The peer's monitor is another one, and its proxy may be the same: all wait for it.
    AllWait,
}

/// A connection whose programs store into the windows themselves: all that another proxy needs to go on with it,
/// besides the far end of the program's lifeline, a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The peer's slot.
    pub peer: u8,
    /// Which span of the windows.
    pub span: u32,
    /// What both proxies call the connection.
    pub number: u32,
}

/// From a proxy whose monitor has died to the next monitor: first what it works by, then, if it is to part, some
/// connections, each with a descriptor, in the same order. The last packet is followed by the end of the channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HandOver {
    /// [`VERSION`].
    pub version: u32,
    /// In the first packet.
    #[serde(default)]
    pub configuration: Option<Box<Configuration>>,
    /// The connections.
    pub kept: Vec<Kept>,
}

/// What a proxy must know before it sees the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    /// [`VERSION`].
    pub version: u32,
    /// This node's slot.
    pub own: u8,
    /// Nodes that there may be at most.
    pub slots: u8,
    /// All nodes, by slot.
    pub nodes: Vec<Node>,
    /// The rack directory of this node's programs.
    pub rack_directory: PathBuf,
    /// Bytes of the control partition, with which each window begins.
    pub control_partition_bytes: u64,
    /// Bytes behind it that the data partitions share.
    pub data_bytes: u64,
    /// The data partitions.
    pub partitions: Vec<Partition>,
    /// Bytes that a connection sends before it is another's turn, where that is not as ever; 0 is without slices.
    pub slice_bytes: Option<u64>,
    /// Where programs get parts of windows, if they do.
    pub spans: Option<Spans>,
    /// How long connections wait for a link that was lost, and this proxy for another monitor.
    pub return_ns: u64,
    /// Where a proxy whose monitor has died waits for the next one; without it, it ends at once.
    pub heir_socket: Option<PathBuf>,
    /// Training leaves the data partitions alone, in all nodes: proxies clean them, and go on over the next link with
    /// what they have there.
    pub keeps_partitions: bool,
    /// Connections of a lost link move to kernel TCP.
    pub is_failover: bool,
    /// Where the proxy's first thread listens for the proxies of other nodes that have lost a link, and the others at
    /// the next ports; any port without it.
    pub failover_port: Option<u16>,
    /// The model that links are slowed down to.
    pub timing: Option<Timing>,
    /// Who may connect to programs of this node.
    pub access: Access,
}

impl Configuration {
    /// Whether a proxy that works by this one can go on by `next`, once it is told of [`ToProxy::Change`].
    pub fn can_become(&self, next: &Self) -> bool {
        let changed = Self { nodes: next.nodes.clone(), access: next.access.clone(), ..self.clone() };
        changed == *next && next.nodes.starts_with(&self.nodes)
    }
}

/// The access rules that speak of this node. The monitor answers questions by them; the proxy holds peers to them that
/// connect without having asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The first one that matches decides.
    pub rules: Vec<Rule>,
    /// What happens where none does.
    pub allows_others: bool,
}

impl Access {
    /// Whether a program of the node in slot `from` may connect to a port of this one.
    pub fn admits(&self, from: u8, port: u16) -> bool {
        let rule = self.rules.iter().find(|rule| rule.matches(from, port));
        rule.map_or(self.allows_others, |rule| rule.allows)
    }
}

/// Who may, or may not, connect to which ports of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// The slot of the node that connects; every node's without it.
    pub from: Option<u8>,
    /// First and last ports of ranges; all ports without it.
    pub ports: Option<Vec<(u16, u16)>>,
    /// Whether it may.
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
    /// Its name.
    pub name: String,
    /// Its address.
    pub address: IpAddr,
}

/// Parts of each window for connections whose programs store into it themselves. Where the link is slowed down to a
/// model, all who write into the window share its rate by the page before the first of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spans {
    /// Where in the window the first begins.
    pub offset_bytes: u64,
    /// Bytes of each.
    pub span_bytes: u64,
    /// How many there are.
    pub count: u64,
}

/// A data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// What it is for.
    pub class: Class,
    /// The core that owns it.
    pub core: Option<u16>,
}

/// What a partition is for.
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
    /// Its name in the rack file.
    pub name: String,
    /// Another delay one way.
    pub one_way_ns: Option<f64>,
}

/// What a proxy has done since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// By slot of the peer; this node's own stays zero.
    pub peers: Vec<PeerReport>,
}

/// What a proxy has done on one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerReport {
    /// Connections now.
    pub connections_open: u64,
    /// Connections since the start.
    pub connections_total: u64,
    /// Bytes of programs, to the peer.
    pub bytes_sent: u64,
    /// Bytes of programs, from the peer.
    pub bytes_received: u64,
    /// Connections that moved between partitions.
    pub moves: u64,
    /// Connections of lost links now, which are no more among `connections_open`.
    pub failover_open: u64,
    /// Connections that have lost their link.
    pub failover_total: u64,
    /// Of those, connections that were reset, because there was no way by kernel TCP or because it broke.
    pub failover_resets: u64,
    /// Bytes of programs, to the peer, over kernel TCP.
    pub failover_bytes_sent: u64,
    /// Bytes of programs, from the peer, over kernel TCP.
    pub failover_bytes_received: u64,
    /// Copies of programs' bytes that the proxy made, in bytes: one of each that it sends or receives, and another of
    /// each that came when its program had no room.
    pub bytes_copied: u64,
    /// Records in windows, to the peer.
    pub frames_sent: u64,
    /// Times that records were shown to the peer, all of a partition that were ready: each a fence at most.
    pub publishes: u64,
    /// Waits of the proxy until its stores had arrived: before it sleeps.
    pub flushes: u64,
    /// Records in windows, from the peer.
    pub frames_received: u64,
    /// Times that a connection had bytes to send and its receiver took none.
    pub stalls: u64,
    /// Times that a partition was full.
    pub partitions_full: u64,
    /// Times that the peer slept and its doorbell was rung.
    pub rings_peer: u64,
    /// Times that a program slept and was woken.
    pub rings_local: u64,
    /// Times that a program's ring was heard.
    pub wakes: u64,
    /// Connections whose programs store into the windows themselves, now; those above count them too, but no bytes of
    /// theirs.
    #[serde(default)]
    pub direct_open: u64,
    /// Such connections since the start.
    #[serde(default)]
    pub direct_total: u64,
    /// Connections that were to be such, and went by the proxies for want of a span at either end; or failed, because
    /// a program of this node could not map its span.
    #[serde(default)]
    pub direct_missed: u64,
    /// Of `direct_open`, those that wait for a link, or for the peer's word that it still has them.
    #[serde(default)]
    pub direct_held: u64,
}

impl PeerReport {
    /// Copies of each byte to the peer that this node makes: its program's into the connection's memory, and the
    /// proxy's into the window.
    pub const COPIES_PER_BYTE_SENT: f64 = 2.0;

    /// Copies of each byte from the peer that this node makes: the proxy's, more than one where a program had no room,
    /// and the program's. `None` before the first.
    pub fn copies_per_byte_received(&self) -> Option<f64> {
        let copied = self.bytes_copied.checked_sub(self.bytes_sent)?;
        (self.bytes_received > 0).then(|| 1.0 + copied as f64 / self.bytes_received as f64)
    }

    /// Records that the peer was shown at once. `None` before the first.
    pub fn frames_per_publish(&self) -> Option<f64> {
        (self.publishes > 0).then(|| self.frames_sent as f64 / self.publishes as f64)
    }
}

impl std::ops::AddAssign for PeerReport {
    fn add_assign(&mut self, more: Self) {
        self.connections_open += more.connections_open;
        self.connections_total += more.connections_total;
        self.bytes_sent += more.bytes_sent;
        self.bytes_received += more.bytes_received;
        self.moves += more.moves;
        self.bytes_copied += more.bytes_copied;
        self.frames_sent += more.frames_sent;
        self.publishes += more.publishes;
        self.flushes += more.flushes;
        self.frames_received += more.frames_received;
        self.stalls += more.stalls;
        self.partitions_full += more.partitions_full;
        self.rings_peer += more.rings_peer;
        self.rings_local += more.rings_local;
        self.wakes += more.wakes;
        self.failover_open += more.failover_open;
        self.failover_total += more.failover_total;
        self.failover_resets += more.failover_resets;
        self.failover_bytes_sent += more.failover_bytes_sent;
        self.failover_bytes_received += more.failover_bytes_received;
        self.direct_open += more.direct_open;
        self.direct_total += more.direct_total;
        self.direct_missed += more.direct_missed;
        self.direct_held += more.direct_held;
    }
}

/// Sends a device, with more descriptors than one packet carries if need be.
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

/// Sends connections with their descriptors, as many packets as that takes; `say` makes the message of each.
///
/// # Errors
/// As [`Channel::send`].
pub fn send_kept<M: Serialize>(
    channel: &Channel,
    kept: &[(Kept, BorrowedFd<'_>)],
    say: impl Fn(Vec<Kept>) -> M,
) -> Result<(), ChannelError> {
    for some in kept.chunks(DESCRIPTORS_MAX) {
        let (some, descriptors): (Vec<Kept>, Vec<BorrowedFd<'_>>) = some.iter().copied().unzip();
        channel.send(&say(some), &descriptors)?;
    }
    Ok(())
}

/// Puts a device together at the proxy's end.
#[derive(Debug, Default)]
pub struct DeviceParts {
    descriptors: Vec<OwnedFd>,
}

impl DeviceParts {
    /// Keeps what came with [`ToProxy::Descriptors`]. More than any device has is dropped; it is then refused.
    pub fn add(&mut self, some: Vec<OwnedFd>) {
        let room = DEVICE_DESCRIPTORS_MAX - self.descriptors.len();
        self.descriptors.extend(some.into_iter().take(room));
    }

    /// All that came before [`ToProxy::Device`].
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
