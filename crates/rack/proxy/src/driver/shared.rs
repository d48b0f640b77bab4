//! What all threads of a proxy share: the configuration, the access rules, the rack directory and the span pools.

use super::engine_plan::{EnginePlan, engine_plans};
use super::error::DriverError;
use super::link_partitions;
use super::monitor_channel::MonitorChannel;
use super::source_ports::SourcePorts;
use super::span_pool::SpanPool;
use super::wakeup::WakeupFd;
use control::proxy::{Access, Configuration, FromProxy, Node, Publish};
use fabric::device::{Device, NodeSlot};
use fabric::timed::{LinkTiming, Pacer};
use pcie::host::path::Path;
use socket::rack::key::RackKey;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use stream::remote::table::FILE_NAME;
use stream::remote::{TableWriter, proxy_address};

/// Bytes of a packet besides its payload, with a header of 64-bit addresses.
const PACKET_HEADER_BYTES: u64 = 24;

/// State that all threads of the proxy read.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) setup: Configuration,
    /// The nodes' addresses by slot, as far as they are known: nodes join while others run.
    addresses: Vec<OnceLock<IpAddr>>,
    access: RwLock<Access>,
    pub(super) plans: Vec<EnginePlan>,
    /// The model that links are slowed down to.
    pub(super) timing: Option<LinkTiming>,
    /// The pacer that this node's threads share for each link, by peer.
    pacers: Vec<Pacer>,
    key: RackKey,
    pub(super) monitor: Arc<MonitorChannel>,
    /// Spans for programs, by peer; none where programs may not access windows.
    span_pools: Vec<Arc<SpanPool>>,
    /// What the TCP sockets of this proxy stand for.
    pub(super) table: Arc<TableWriter>,
    /// The address of these sockets.
    pub(super) proxy_address: Ipv4Addr,
    pub(super) source_ports: Arc<SourcePorts>,
    /// Set once the node's address is known to be one of this machine.
    pub(super) has_address: OnceLock<()>,
    /// Addresses for which the other node has no listener any more.
    refused: Mutex<Vec<SocketAddr>>,
    /// Readable when `refused` is not empty.
    pub(super) refused_wakeup: WakeupFd,
}

impl Shared {
    pub(super) fn new(setup: Configuration, monitor: Arc<MonitorChannel>) -> Result<Self, DriverError> {
        let timing = setup.timing.as_ref().map(timing_of).transpose()?;
        let slots = setup.nodes.len().max(usize::from(setup.slots));
        let pacers = (0..slots).map(|_| Pacer::new()).collect();
        let known = |slot: usize| setup.nodes.get(slot).map_or_else(OnceLock::new, |node| OnceLock::from(node.address));
        let addresses = (0..slots).map(known).collect();
        let failed = |errno| DriverError::Rack { path: setup.rack_directory.display().to_string(), errno };
        let key = RackKey::of_rack(&setup.rack_directory).map_err(failed)?;
        let plans = engine_plans(&setup);
        let proxy_address = proxy_address(&setup.rack_directory);
        let path = setup.rack_directory.join(FILE_NAME);
        let table = Arc::new(TableWriter::create(&path, setup.own_slot, proxy_address).map_err(failed)?);
        (0..).zip(&setup.nodes).for_each(|(slot, node)| table.set_node(slot, node.address));
        let source_ports = SourcePorts::new(proxy_address);
        let refused_wakeup = WakeupFd::new().map_err(DriverError::Thread)?;
        let span_pools = span_pools(&setup, &monitor);
        let access = RwLock::new(setup.access.clone());
        let refused = Mutex::default();
        Ok(Self {
            setup,
            addresses,
            access,
            plans,
            timing,
            pacers,
            key,
            monitor,
            span_pools,
            table,
            proxy_address,
            source_ports,
            has_address: OnceLock::new(),
            refused,
            refused_wakeup,
        })
    }

    /// Checks that each window of a device has room for all partitions and spans.
    pub(super) fn check_room(&self, device: &Device) -> Result<(), DriverError> {
        let (window_bytes, partitions) = (device.layout().window_bytes(), self.setup.partitions.len());
        let bytes = link_partitions::partition_bytes(window_bytes, &self.setup);
        let holds_model = self.timing.is_none_or(|timing| link_partitions::timed_slots(bytes, timing).is_some());
        let holds_ring = link_partitions::ring_slots(window_bytes, &self.setup).is_some();
        let holds_spans = self.span_pools.iter().all(|pool| pool.fits(window_bytes));
        if !holds_model || !holds_ring || !holds_spans || self.plans.is_empty() {
            return Err(DriverError::Windows { window_bytes, partitions });
        }
        Ok(())
    }

    /// Records that the other node has no listener at an address.
    pub(super) fn note_refused(&self, address: SocketAddr) {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        self.refused_wakeup.notify();
    }

    /// Returns the addresses of [`Shared::note_refused`] since the last call.
    pub(super) fn take_refused(&self) -> Vec<SocketAddr> {
        self.refused_wakeup.clear();
        std::mem::take(&mut self.refused.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of slots of nodes.
    pub(super) fn slots(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the span pools, each with the peer of its link.
    pub(super) fn span_pools_of_peers(&self) -> impl Iterator<Item = (usize, &Arc<SpanPool>)> {
        let own = usize::from(self.setup.own_slot);
        self.span_pools.iter().enumerate().filter(move |(peer, _)| *peer != own)
    }

    pub(super) fn span_pool(&self, peer: u8) -> Option<&Arc<SpanPool>> {
        self.span_pools.get(usize::from(peer))
    }

    /// Returns the pacer that all senders over the link to a peer share.
    pub(super) fn pacer(&self, peer: u8) -> Pacer {
        self.pacers[usize::from(peer)].clone()
    }

    /// Returns the address of a node, if it has joined.
    pub(super) fn address(&self, slot: u8) -> Option<IpAddr> {
        self.addresses.get(usize::from(slot))?.get().copied()
    }

    /// Returns whether programs of this machine reach a listener of another node without the library.
    pub(super) fn publishes(&self, port: u16) -> bool {
        match &self.setup.publish {
            None => false,
            Some(Publish::All) => true,
            Some(Publish::Ports(ranges)) => ranges.iter().any(|(first, last)| (*first..=*last).contains(&port)),
        }
    }

    /// Returns the slot of the node with an address.
    pub(super) fn slot_of(&self, ip: IpAddr) -> Option<u8> {
        (0..self.slots()).map(|slot| slot as u8).find(|slot| self.address(*slot) == Some(ip))
    }

    /// Returns the key under which the proxy meets programs.
    pub(super) fn meeting_key(&self) -> meeting::Key {
        meeting::Key::from(self.key.to_bytes())
    }

    /// Returns the access rules, which decide which peers may connect to which ports.
    pub(super) fn access(&self) -> RwLockReadGuard<'_, Access> {
        self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change of the rack. A node that is known already keeps its address.
    pub(super) fn change(&self, nodes: &[Node], access: Access) {
        for (address, node) in self.addresses.iter().zip(nodes) {
            let _ = address.set(node.address);
        }
        (0..).zip(nodes).for_each(|(slot, node)| self.table.set_node(slot, node.address));
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
    }

    /// Returns where a thread listens for the proxies of other nodes that have lost a link; `None` without failover.
    pub(super) fn failover_address(&self, thread: usize) -> Option<SocketAddr> {
        let ip = self.address(self.setup.own_slot).filter(|_| self.setup.is_failover)?;
        let port = self.setup.failover_port.map_or(Some(0), |first| first.checked_add(thread as u16));
        Some(SocketAddr::new(ip, port?))
    }

    /// Sends a message to the monitor. A failure is ignored: the thread that reads from the monitor notices its end.
    pub(super) fn notify_monitor(&self, message: &FromProxy) {
        let _ = self.monitor.send(message, &[]);
    }
}

/// Creates the span pools of all links, including those to nodes that have not joined yet.
fn span_pools(setup: &Configuration, monitor: &Arc<MonitorChannel>) -> Vec<Arc<SpanPool>> {
    // Connections with a span cannot move to another transport.
    let Some(spans) = setup.spans.filter(|_| !setup.is_failover) else { return Vec::new() };
    let pool = |peer| {
        let nodes = (NodeSlot(peer as u8), NodeSlot(setup.own_slot));
        Arc::new(SpanPool::new(nodes, spans, Arc::clone(monitor)))
    };
    (0..setup.nodes.len().max(usize::from(setup.slots))).map(pool).collect()
}

/// Looks up the model of a link by its name in the rack file.
fn timing_of(timing: &control::proxy::Timing) -> Result<LinkTiming, DriverError> {
    let path = Path::named(&timing.name).map_err(|_| DriverError::Order("an unknown name of a link model"))?;
    let payload_bytes_max = u64::from(path.link().mps_bytes.bytes());
    Ok(LinkTiming {
        one_way_ns: timing.one_way_ns.unwrap_or_else(|| path.write(0).ns()).round() as u64,
        bytes_per_us: (path.packet_gbps() * 125.0).round() as u64,
        header_bytes: PACKET_HEADER_BYTES,
        payload_bytes_max,
    })
}
