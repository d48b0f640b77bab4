//! A device as one node sees it.

use super::config::DeviceConfig;
use super::error::{DeviceError, DeviceProblem};
use super::format::{NodeSlot, PAGE_BYTES, VECTORS_MAX};
use super::header::Header;
use super::interrupts::{Interrupts, PeerId};
use super::layout::DeviceLayout;
use super::memory::{Block, Caching, DeviceInbound, DeviceMemory, DeviceOutbound};
use super::opened::OpenedMemory;
use super::pci::PciAccess;
use super::server_connection::{ServerConnection, ServerEvent};
use super::{backing_file, file, pci, server, vfio};
use crate::memory_link::{Side, is_window_size};
use crate::{Coherence, Epoch, Memory, Training};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use volmem::{Alignment, Mapping, Region};

/// A change of the device, see [`Device::poll`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The server announced or removed doorbells of peers: hand over the device again.
    PeerDoorbells,
    /// A client of the server has disconnected or was killed, and with it the nodes in these slots.
    NodesGone(Vec<NodeSlot>),
    /// The header was damaged, and this node has repaired it.
    HeaderRepaired,
    /// The server has exited, or has violated the protocol: connected nodes go on, new ones cannot connect.
    ServerGone,
}

/// The memory of a rack's windows, as one node sees it. Clones share it.
#[derive(Debug, Clone)]
pub struct Device(Arc<DeviceState>);

#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) name: String,
    pub(super) own_slot: NodeSlot,
    pub(super) layout: DeviceLayout,
    /// Bytes of each window that belong to its link.
    link_bytes: usize,
    pub(super) caching: Caching,
    memory: DeviceMemory,
    pub(super) descriptor: OwnedFd,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    alignment: Option<Alignment>,
    lease_obstacle: Option<String>,
    header: Header,
    /// By slot: the block that the peer writes and the block that this node writes; `None` for this node's own slot.
    blocks: Vec<Option<[Block; 2]>>,
    doorbells: Vec<PeerDoorbells>,
    /// Number of this process's next ring. No ring of another process has had that number.
    next_ring: AtomicU64,
    pub(super) interrupts: Interrupts,
    pub(super) registers: Option<(OwnedFd, u64)>,
    pub(super) server: Option<(Arc<OwnedFd>, Mutex<ServerConnection>)>,
    /// See [`DeviceConfig::shares_connection`].
    pub(super) shares_connection: AtomicBool,
    heartbeats: AtomicU64,
    /// Held for their `Drop`.
    _kept_open: Vec<OwnedFd>,
}

impl Device {
    /// Connects to an ivshmem server at `path` by QEMU's protocol: `crosslane device-server`, which also serves QEMU
    /// guests.
    ///
    /// # Errors
    /// Names the path, what is wrong there, and the remedy.
    pub fn connect_server(path: &Path, config: &DeviceConfig) -> Result<Self, DeviceError> {
        let name = path.display().to_string();
        let opened = server::connect(path, config.vectors);
        opened.and_then(|opened| Self::attach(opened, config)).map_err(|problem| problem.on_device(&name))
    }

    /// Opens the ivshmem device at `address` (`0000:00:04.0`).
    ///
    /// # Errors
    /// Names the device, what is wrong with it, and the remedy.
    pub fn open_pci(address: &str, access: PciAccess, config: &DeviceConfig) -> Result<Self, DeviceError> {
        let opened = match access {
            PciAccess::Sysfs => pci::open(address),
            PciAccess::Vfio => vfio::open(address, config.vectors),
        };
        opened.and_then(|opened| Self::attach(opened, config)).map_err(|problem| problem.on_device(address))
    }

    /// Opens a file that all nodes can map and that is coherent between them: in tmpfs, on huge pages, on a DAX mount,
    /// or a DAX device. It has no interrupts, so waiters poll.
    ///
    /// # Errors
    /// Names the file, what is wrong with it, and the remedy.
    pub fn open_file(path: &Path, config: &DeviceConfig) -> Result<Self, DeviceError> {
        Self::open_dax(path, Coherence::Coherent, config)
    }

    /// Opens a file like [`Device::open_file`], with the coherence that the configuration of the rack states: no
    /// program can find out the coherence of memory that other machines map.
    ///
    /// # Errors
    /// Names the file, what is wrong with it, and the remedy.
    pub fn open_dax(path: &Path, coherence: Coherence, config: &DeviceConfig) -> Result<Self, DeviceError> {
        let caching = match coherence {
            Coherence::Coherent => Caching::Cached,
            Coherence::WriteCombined => Caching::WriteCombined,
            Coherence::NonCoherent => Caching::NonCoherent,
        };
        let name = path.display().to_string();
        let opened = file::open(path, caching);
        opened.and_then(|opened| Self::attach(opened, config)).map_err(|problem| problem.on_device(&name))
    }

    fn attach(opened: OpenedMemory, config: &DeviceConfig) -> Result<Self, DeviceProblem> {
        let device = Self::map(opened, config.own_slot, config.link_bytes, |len_bytes| config.layout(len_bytes))?;
        let state = device.state();
        state.shares_connection.store(config.shares_connection, Ordering::Relaxed);
        state.header.settle(config.overwrite)?;
        for peer in state.peers() {
            let [inbound, outbound] = state.blocks_of(peer);
            outbound.publish_training(Training::attach(inbound.training()).word());
            outbound.publish_heartbeat(0);
            outbound.clear_scratchpad();
            outbound.publish_peer_id(state.interrupts.own_id);
        }
        // Pairs with the fence in `DeviceState::ring`: a peer that did not see the ID has published its ring before
        // this node polls its doorbells.
        fence(Ordering::SeqCst);
        Ok(device)
    }

    /// Maps the memory without writing to it.
    pub(super) fn map(
        opened: OpenedMemory,
        own_slot: NodeSlot,
        link_bytes: Option<usize>,
        layout_for: impl FnOnce(u64) -> Result<DeviceLayout, DeviceProblem>,
    ) -> Result<Self, DeviceProblem> {
        let layout = layout_for(opened.len_bytes)?;
        let link_bytes = link_bytes.unwrap_or(layout.window_bytes());
        if !is_window_size(link_bytes) || link_bytes > layout.window_bytes() {
            return Err(DeviceProblem::WindowSize { window_bytes: link_bytes });
        }
        let len_bytes = usize::try_from(opened.len_bytes).unwrap_or(usize::MAX);
        let mapping = Mapping::at(opened.descriptor.as_fd(), opened.offset_bytes, len_bytes)
            .map_err(DeviceProblem::system(format!("mmap of {len_bytes} bytes")))?;
        let memory = DeviceMemory::new(Region::of_mapping(Arc::new(mapping)), opened.caching);
        let memory = memory.ok_or_else(|| {
            let found = "this processor has no instructions that write back cache lines";
            DeviceProblem::unsuitable(
                found,
                "use memory that is coherent between the nodes, and say so in the rack file",
            )
        })?;
        let block = |writer, reader| {
            let span = layout.control(writer, reader);
            Block::new(memory.part(span.start, span.len()))
        };
        let blocks: Vec<_> = layout
            .slots()
            .map(|peer| (peer != own_slot).then(|| [block(peer, own_slot), block(own_slot, peer)]))
            .collect();
        let doorbells =
            blocks.iter().map(|blocks| PeerDoorbells::new(blocks.as_ref().map(|[inbound, _]| inbound))).collect();
        let header = Header::new(memory.part(0, PAGE_BYTES), &layout);
        Ok(Self(Arc::new(DeviceState {
            name: opened.name,
            own_slot,
            layout,
            link_bytes,
            caching: opened.caching,
            alignment: backing_file::alignment(&opened.descriptor),
            descriptor: opened.descriptor,
            offset_bytes: opened.offset_bytes,
            len_bytes: opened.len_bytes,
            lease_obstacle: opened.lease_obstacle,
            header,
            blocks,
            doorbells,
            next_ring: AtomicU64::new(now_ns()),
            memory,
            interrupts: opened.interrupts,
            registers: opened.registers,
            server: opened.server.map(|connection| (connection.stream(), Mutex::new(connection))),
            shares_connection: AtomicBool::new(false),
            heartbeats: AtomicU64::new(0),
            _kept_open: opened.kept_open,
        })))
    }

    /// Describes the device in one line, for a log.
    pub fn describe(&self) -> String {
        let DeviceState { name, own_slot, layout, caching, len_bytes, .. } = self.state();
        let doorbells = match self.vectors() {
            0 => "no doorbells".to_owned(),
            vectors => format!("{vectors} doorbells"),
        };
        let (nodes, window_bytes) = (layout.nodes(), layout.window_bytes());
        let rack = format!("node {own_slot} of {nodes}, windows of {window_bytes} bytes");
        format!("{name}: {len_bytes} bytes, {caching}, {doorbells}; {rack}")
    }

    /// Slot of this node.
    pub fn own_slot(&self) -> NodeSlot {
        self.state().own_slot
    }

    /// Offsets of windows and control blocks.
    pub fn layout(&self) -> DeviceLayout {
        self.state().layout
    }

    /// How the processor caches the memory.
    pub fn caching(&self) -> Caching {
        self.state().caching
    }

    /// Number of this node's doorbells that have an eventfd. Waiters for other vectors poll.
    pub fn vectors(&self) -> usize {
        self.state().interrupts.own_eventfds.len()
    }

    /// The window that `peer` writes. A process that does not train the link uses it only in an epoch in which the link
    /// is up.
    ///
    /// # Panics
    /// If `peer` is this node, or not a node of the rack.
    pub fn inbound(&self, peer: NodeSlot) -> DeviceInbound {
        DeviceInbound::new(self.state().window(peer, self.own_slot()))
    }

    /// The window that `peer` reads, under the conditions of [`Device::inbound`].
    ///
    /// # Panics
    /// If `peer` is this node, or not a node of the rack.
    pub fn outbound(&self, peer: NodeSlot) -> DeviceOutbound {
        DeviceOutbound::new(self.state().window(self.own_slot(), peer))
    }

    /// The memory's descriptor, for programs of this machine that map a part of it themselves, and the offsets in it of
    /// the windows from `peer` and to `peer`.
    ///
    /// # Panics
    /// If `peer` is this node, or not a node of the rack.
    pub fn windows_in_memory(&self, peer: NodeSlot) -> (BorrowedFd<'_>, [u64; 2]) {
        let state = self.state();
        let begin = |writer, reader| state.offset_bytes + state.layout.window(writer, reader).start as u64;
        (state.descriptor.as_fd(), [begin(peer, state.own_slot), begin(state.own_slot, peer)])
    }

    /// Why programs cannot map parts of that memory, for the process that opened the device (a process that took it
    /// over gets `None`). `None`: only an attempt to map a part can tell.
    pub fn lease_obstacle(&self) -> Option<&str> {
        self.state().lease_obstacle.as_deref()
    }

    /// The alignment of mappings of parts of that memory, where it is more than a page, as with a DAX device.
    pub fn alignment(&self) -> Option<Alignment> {
        self.state().alignment
    }

    /// Offset of the end of that memory.
    pub fn end_in_memory(&self) -> u64 {
        self.state().offset_bytes + self.state().len_bytes
    }

    /// Whether `peer` says that it has finished training for `epoch` and has not left it. If not, the link of that
    /// epoch is down. Costs a load of this node's own memory.
    ///
    /// # Panics
    /// If `peer` is this node, or not a node of the rack.
    pub fn is_peer_ready(&self, peer: NodeSlot, epoch: Epoch) -> bool {
        Training::is_ready(self.state().inbound_block(peer).training(), epoch)
    }

    /// Tells all peers that this node is alive.
    pub fn heartbeat(&self) {
        self.publish_heartbeat(0);
    }

    /// Tells all peers that this node's proxy is alive and uses its windows, and that no monitor trains its links.
    pub fn heartbeat_without_monitor(&self) {
        self.publish_heartbeat(WITHOUT_MONITOR);
    }

    fn publish_heartbeat(&self, flag: u64) {
        let state = self.state();
        let number = state.heartbeats.fetch_add(1, Ordering::Relaxed) + 1;
        state.peers().for_each(|peer| state.outbound_block(peer).publish_heartbeat(number | flag));
    }

    /// Number of the last heartbeat of `peer`, and whether it was sent by [`Device::heartbeat_without_monitor`].
    ///
    /// # Panics
    /// If `peer` is this node, or not a node of the rack.
    pub fn heartbeat_of(&self, peer: NodeSlot) -> (u64, bool) {
        let heartbeat = self.state().inbound_block(peer).heartbeat();
        (heartbeat & !WITHOUT_MONITOR, heartbeat & WITHOUT_MONITOR != 0)
    }

    /// A descriptor that polls readable when [`Device::poll`] has something to do, where there is a server. After
    /// [`DeviceEvent::ServerGone`] its state means nothing.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.state().server.as_ref().map(|(stream, _)| stream.as_fd())
    }

    /// Reads the server's messages, and checks the header and the size of the memory. Never blocks. Call it when
    /// [`Device::descriptor`] is readable, and about once a second.
    ///
    /// # Errors
    /// The memory has become smaller: an access may kill the process.
    pub fn poll(&self) -> Result<Vec<DeviceEvent>, DeviceError> {
        let state = self.state();
        backing_file::check_size(&state.descriptor, state.offset_bytes + state.len_bytes)
            .map_err(|problem| problem.on_device(&state.name))?;
        let mut events = Vec::new();
        if let Some((_, server)) = &state.server {
            let from_server = server.lock().unwrap_or_else(PoisonError::into_inner).poll(&state.interrupts);
            events.extend(from_server.into_iter().map(|event| state.handle(event)));
            events.dedup();
        }
        if state.header.repair() {
            events.push(DeviceEvent::HeaderRepaired);
        }
        Ok(events)
    }

    pub(super) fn state(&self) -> &DeviceState {
        &self.0
    }
}

/// State of the doorbells between this node and one peer, in this process.
#[derive(Debug)]
struct PeerDoorbells {
    /// Number of the last ring that was taken, by vector.
    taken: [AtomicU64; VECTORS_MAX],
    /// Vectors that were rung while there was no way to interrupt the peer, as a bit mask.
    pending: AtomicU32,
}

const _: () = assert!(VECTORS_MAX <= u32::BITS as usize);

impl PeerDoorbells {
    /// Takes all rings so far: they were meant for an earlier process of this node.
    fn new(inbound: Option<&Block>) -> Self {
        let last = |vector| inbound.map_or(0, |block| block.last_ring(vector));
        Self { taken: std::array::from_fn(|vector| AtomicU64::new(last(vector))), pending: AtomicU32::new(0) }
    }
}

/// Flag of a heartbeat that is sent while no monitor trains the node's links.
const WITHOUT_MONITOR: u64 = 1 << 63;

/// Nanoseconds of the wall clock.
fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.as_nanos() as u64)
}

impl DeviceState {
    /// All nodes but this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = NodeSlot> + use<> {
        let own_slot = self.own_slot;
        self.layout.slots().filter(move |peer| *peer != own_slot)
    }

    /// The control block that `peer` writes, and the one that `peer` reads.
    pub(super) fn blocks_of(&self, peer: NodeSlot) -> &[Block; 2] {
        match self.blocks.get(peer.index()) {
            Some(Some(blocks)) => blocks,
            _ => panic!("node {} has no link with node {peer}", self.own_slot),
        }
    }

    fn inbound_block(&self, peer: NodeSlot) -> &Block {
        &self.blocks_of(peer)[0]
    }

    fn outbound_block(&self, peer: NodeSlot) -> &Block {
        &self.blocks_of(peer)[1]
    }

    fn window(&self, writer: NodeSlot, reader: NodeSlot) -> DeviceMemory {
        let span = self.layout.window(writer, reader);
        self.memory.part(span.start, span.len())
    }

    /// This node's side of its link with `peer`, and the peer's side.
    pub(super) fn sides_of(&self, peer: NodeSlot) -> [Side<DeviceMemory>; 2] {
        let [inbound, outbound] = self.blocks_of(peer);
        let part = |writer, reader| self.window(writer, reader).part(0, self.link_bytes);
        [
            Side { window: part(peer, self.own_slot), control: inbound.control() },
            Side { window: part(self.own_slot, peer), control: outbound.control() },
        ]
    }

    /// Publishes a new ring number, then interrupts the peer. The fence pairs with the one in `Device::attach`: a peer
    /// whose ID is not visible yet has not polled its doorbells either, so it finds the number.
    pub(super) fn ring(&self, peer: NodeSlot, vector: usize) {
        let [inbound, outbound] = self.blocks_of(peer);
        outbound.ring(vector, self.next_ring.fetch_add(1, Ordering::Relaxed));
        fence(Ordering::SeqCst);
        let Some(peer_id) = inbound.peer_id() else { return };
        if !self.interrupts.interrupt(peer_id, vector) {
            self.doorbells[peer.index()].pending.fetch_or(1 << vector, Ordering::SeqCst);
            self.interrupts.interrupt(peer_id, vector); // The peer's eventfds may have become known just now.
        }
    }

    /// Interrupts a peer, whose eventfds have just become known, for the doorbells that were rung before.
    pub(super) fn interrupt_pending(&self, peer_id: PeerId) {
        for peer in self.slots_of(peer_id) {
            let pending = self.doorbells[peer.index()].pending.swap(0, Ordering::SeqCst);
            (0..VECTORS_MAX).filter(|vector| pending >> vector & 1 == 1).for_each(|vector| {
                self.interrupts.interrupt(peer_id, vector);
            });
        }
    }

    /// Whether `peer` has rung since this process last took its rings.
    pub(super) fn is_rung(&self, peer: NodeSlot, vector: usize) -> bool {
        let taken = self.doorbells[peer.index()].taken[vector].load(Ordering::Relaxed);
        self.inbound_block(peer).last_ring(vector) != taken
    }

    /// Takes the rings of `peer`. Returns whether there were any.
    pub(super) fn take_rings(&self, peer: NodeSlot, vector: usize) -> bool {
        let number = self.inbound_block(peer).last_ring(vector);
        self.doorbells[peer.index()].taken[vector].swap(number, Ordering::Relaxed) != number
    }

    fn handle(&self, event: ServerEvent) -> DeviceEvent {
        match event {
            ServerEvent::PeerDoorbell(peer_id) => {
                self.interrupt_pending(peer_id);
                DeviceEvent::PeerDoorbells
            }
            ServerEvent::PeerGone(peer_id) => DeviceEvent::NodesGone(self.slots_of(peer_id)),
            ServerEvent::ServerGone => DeviceEvent::ServerGone,
        }
    }

    /// The slots whose nodes have published this server ID: one, unless a node lies.
    fn slots_of(&self, peer_id: PeerId) -> Vec<NodeSlot> {
        self.peers().filter(|peer| self.inbound_block(*peer).peer_id() == Some(peer_id)).collect()
    }
}
