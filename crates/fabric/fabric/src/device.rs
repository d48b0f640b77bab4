//! One memory that all nodes of a rack share, laid out by itself: a window and a control block for each ordered pair.
//!
//! The memory is a BAR of an ivshmem device ([`Device::open_pci`]), the memory that an ivshmem server hands out
//! ([`Device::connect_server`]), or a file ([`Device::open_file`]). Each node opens it with its own [`Seat`], which
//! comes from the rack file: sizes, offsets and places are computed from that and never read from the memory, whose
//! header is only compared ([`header`]). Links come up in any order, and again after any node was gone
//! ([`Training`](crate::Training)).
//!
//! ```
//! use fabric::device::{Device, Seat, Slot};
//! use fabric::{Link, Outbound, Inbound, train_both};
//!
//! let file = tempfile::NamedTempFile::new()?;
//! file.as_file().set_len(1 << 20)?;
//! let node = |own| Device::open_file(file.path(), &Seat::new(Slot(own), 2));
//! let (a, b) = (node(0)?, node(1)?);
//! let (mut to_b, mut to_a) = (a.link(Slot(1)), b.link(Slot(0)));
//! assert!(train_both(&mut to_b, &mut to_a));
//! to_b.outbound().write(0, b"hello");
//! let mut bytes = [0; 5];
//! to_a.inbound().read(0, &mut bytes);
//! assert_eq!(&bytes, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **What a hostile node can do.** Memory that all nodes map is memory that each of them can spoil; hardware that keeps
//! them apart is not assumed. But whatever a node writes into its own windows, its own control blocks and the header
//! takes down its own links and no other: nothing there is an offset, a length or a pointer to anybody.
//!
//! **Who holds what.** A node's monitor opens the device, trains its links, beats ([`Device::beat`]) and looks
//! ([`Device::look`]). Its proxy, which beats while there is no monitor, takes the device over
//! ([`Device::hand_over`]) and uses windows and bells of an epoch that the monitor names, while
//! [`Device::is_peer_in`] says that the peer is in it too.

mod bell;
mod error;
mod file;
mod hand_over;
mod header;
mod layout;
mod link;
mod memory;
mod pci;
mod server;
mod vfio;

pub use bell::{DeviceDoorbell, Vector, VectorBell};
pub use error::{DeviceError, Problem};
pub use layout::{Layout, NODES_MAX, Slot, VECTORS_MAX, VERSION};
pub use link::DeviceLink;
pub use memory::{Caching, DeviceInbound, DeviceMemory, DeviceOutbound, DeviceScratchpad};
pub use pci::Mode;

use crate::memory_link::{Side, is_window_size};
use crate::{Coherence, Epoch, Memory, Training};
use bell::{Identity, Kicks};
use header::Header;
use memory::Block;
use server::{Client, News};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use volmem::{Alignment, Mapping, Region};

/// What a node knows of the rack before it opens the device.
#[derive(Debug, Clone)]
pub struct Seat {
    /// Its own place.
    pub own: Slot,
    /// Nodes of the rack.
    pub nodes: u8,
    /// Bytes of each window, or as many as there is room for.
    pub window_bytes: Option<usize>,
    /// Bytes at the start of each window that links use and training cleans, or all of it. What lies behind is the
    /// business of those who share it out.
    pub link_bytes: Option<usize>,
    /// Bells that this node must have, where the device has any.
    pub vectors: usize,
    /// Whether who takes the device over also keeps this node's place at the server, where there is one: the node then
    /// counts as gone only when both processes are.
    pub shares_place: bool,
    /// Whether to lay the device out anew whatever it holds. Only when no node of the rack is up.
    pub overwrites: bool,
}

impl Seat {
    /// A place in a rack, windows as large as there is room for, one bell.
    pub fn new(own: Slot, nodes: u8) -> Self {
        Self { own, nodes, window_bytes: None, link_bytes: None, vectors: 1, shares_place: false, overwrites: false }
    }

    fn layout(&self, device_bytes: u64) -> Result<Layout, Problem> {
        let layout = match self.window_bytes {
            Some(window_bytes) => Layout::new(self.nodes, window_bytes)?,
            None => Layout::largest(self.nodes, device_bytes)?,
        };
        if self.own.0 >= self.nodes {
            return Err(Problem::Slot { own: self.own.index(), nodes: self.nodes });
        }
        layout.check_room(device_bytes)?;
        Ok(layout)
    }
}

/// Something that happened to the device, see [`Device::look`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The server has new or fewer bells: hand the device over again.
    Bells,
    /// A client of the server is gone, with it the nodes in these places: at once, also when it was killed.
    Gone(Vec<Slot>),
    /// The header was spoiled, and is mended.
    HeaderMended,
    /// The server is gone, or no longer makes sense: nodes that are there stay, others cannot come.
    ServerGone,
}

/// Memory as an opener found it, and what keeps and describes it.
struct Found {
    /// As the user named it.
    name: String,
    caching: Caching,
    descriptor: OwnedFd,
    offset_bytes: u64,
    len_bytes: u64,
    /// Why programs cannot have parts of the memory, where this is known here; a process that takes over is not told.
    lending_obstacle: Option<String>,
    kicks: Kicks,
    /// The file and offset of `kicks.registers`, for another process.
    registers: Option<(OwnedFd, u64)>,
    server: Option<Client>,
    /// Descriptors that must stay open.
    keepers: Vec<OwnedFd>,
}

/// The memory of a rack's windows, as one node sees it. Clones share it.
#[derive(Debug, Clone)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    own: Slot,
    layout: Layout,
    /// Of each window, what is a link's.
    link_bytes: usize,
    caching: Caching,
    memory: DeviceMemory,
    descriptor: OwnedFd,
    offset_bytes: u64,
    len_bytes: u64,
    alignment: Option<Alignment>,
    lending_obstacle: Option<String>,
    header: Header,
    /// By place, none for this node's own: what the peer writes, and what this node writes.
    blocks: Vec<Option<[Block; 2]>>,
    bells: Vec<Bells>,
    /// What the next ring of this process is called: no ring of another process ever had that number.
    ring_next: AtomicU64,
    kicks: Kicks,
    registers: Option<(OwnedFd, u64)>,
    server: Option<(Arc<OwnedFd>, Mutex<Client>)>,
    /// As in [`Seat::shares_place`].
    shares_place: AtomicBool,
    beats: AtomicU64,
    /// Held for their `Drop`.
    _keepers: Vec<OwnedFd>,
}

impl Device {
    /// Connects to an ivshmem server (QEMU's protocol) at `path`: `crosslane device-server`, which QEMU guests can use
    /// too.
    ///
    /// # Errors
    /// Names the path, what is wrong there, and the remedy.
    pub fn connect_server(path: &Path, seat: &Seat) -> Result<Self, DeviceError> {
        let name = path.display().to_string();
        server::connect(path, seat.vectors).and_then(|found| Self::attach(found, seat)).map_err(|it| it.of(&name))
    }

    /// Opens the ivshmem device at `address` (`0000:00:04.0`).
    ///
    /// # Errors
    /// Names the device, what is wrong with it, and the remedy.
    pub fn open_pci(address: &str, mode: Mode, seat: &Seat) -> Result<Self, DeviceError> {
        let found = match mode {
            Mode::Sysfs => pci::open(address),
            Mode::Vfio => vfio::open(address, seat.vectors),
        };
        found.and_then(|found| Self::attach(found, seat)).map_err(|it| it.of(address))
    }

    /// Opens a file that all nodes can map: on shared memory, on huge pages, on a DAX mount, or a DAX device, coherent
    /// between them. Nothing wakes sleepers there: they look now and then.
    ///
    /// # Errors
    /// Names the file, what is wrong with it, and the remedy.
    pub fn open_file(path: &Path, seat: &Seat) -> Result<Self, DeviceError> {
        Self::open_dax(path, Coherence::Coherent, seat)
    }

    /// As [`Device::open_file`], of memory that may be anything but coherent between the nodes: what it is, no program
    /// can find out.
    ///
    /// # Errors
    /// Names the file, what is wrong with it, and the remedy.
    pub fn open_dax(path: &Path, coherence: Coherence, seat: &Seat) -> Result<Self, DeviceError> {
        let caching = match coherence {
            Coherence::Coherent => Caching::Cached,
            Coherence::WriteCombined => Caching::WriteCombined,
            Coherence::NonCoherent => Caching::NonCoherent,
        };
        let name = path.display().to_string();
        file::open(path, caching).and_then(|found| Self::attach(found, seat)).map_err(|it| it.of(&name))
    }

    fn attach(found: Found, seat: &Seat) -> Result<Self, Problem> {
        let device = Self::map(found, seat.own, seat.link_bytes, |len_bytes| seat.layout(len_bytes))?;
        device.inner().shares_place.store(seat.shares_place, Ordering::Relaxed);
        let inner = device.inner();
        inner.header.settle(seat.overwrites)?;
        for peer in inner.peers() {
            let [inbound, outbound] = inner.blocks_of(peer);
            outbound.publish_training(Training::attach(inbound.training()).word());
            outbound.publish_beat(0);
            outbound.clear_scratchpad();
            outbound.publish_identity(inner.kicks.identity);
        }
        fence(Ordering::SeqCst); // As in `Inner::ring`.
        Ok(device)
    }

    /// Maps the memory, and writes nothing into it.
    fn map(
        found: Found,
        own: Slot,
        link_bytes: Option<usize>,
        layout_of: impl FnOnce(u64) -> Result<Layout, Problem>,
    ) -> Result<Self, Problem> {
        let layout = layout_of(found.len_bytes)?;
        let link_bytes = link_bytes.unwrap_or(layout.window_bytes());
        if !is_window_size(link_bytes) || link_bytes > layout.window_bytes() {
            return Err(Problem::WindowSize { window_bytes: link_bytes });
        }
        let len_bytes = usize::try_from(found.len_bytes).unwrap_or(usize::MAX);
        let mapping = Mapping::at(found.descriptor.as_fd(), found.offset_bytes, len_bytes)
            .map_err(Problem::system(format!("mmap of {len_bytes} bytes")))?;
        let memory = DeviceMemory::new(Region::of_mapping(Arc::new(mapping)), found.caching);
        let memory = memory.ok_or_else(|| {
            let found = "this processor lets no program write cache lines back";
            Problem::unfit(found, "use memory that is coherent between the nodes, and say so in the rack file")
        })?;
        let block = |writer, reader| {
            let span = layout.control(writer, reader);
            Block::new(memory.part(span.start, span.len()))
        };
        let blocks: Vec<_> =
            layout.slots().map(|peer| (peer != own).then(|| [block(peer, own), block(own, peer)])).collect();
        let bells = blocks.iter().map(|blocks| Bells::silent(blocks.as_ref().map(|[inbound, _]| inbound))).collect();
        let header = Header::new(memory.part(0, layout::PAGE_BYTES), &layout);
        Ok(Self(Arc::new(Inner {
            name: found.name,
            own,
            layout,
            link_bytes,
            caching: found.caching,
            alignment: file::alignment(&found.descriptor),
            descriptor: found.descriptor,
            offset_bytes: found.offset_bytes,
            len_bytes: found.len_bytes,
            lending_obstacle: found.lending_obstacle,
            header,
            blocks,
            bells,
            ring_next: AtomicU64::new(now_ns()),
            memory,
            kicks: found.kicks,
            registers: found.registers,
            server: found.server.map(|client| (client.stream(), Mutex::new(client))),
            shares_place: AtomicBool::new(false),
            beats: AtomicU64::new(0),
            _keepers: found.keepers,
        })))
    }

    /// What it is, for a log.
    pub fn describe(&self) -> String {
        let Inner { name, own, layout, caching, len_bytes, .. } = self.inner();
        let bells = match self.vectors() {
            0 => "no bells".to_owned(),
            vectors => format!("{vectors} bells"),
        };
        let (nodes, window_bytes) = (layout.nodes(), layout.window_bytes());
        format!("{name}: {len_bytes} bytes, {caching}, {bells}; node {own} of {nodes}, windows of {window_bytes} bytes")
    }

    /// This node's place.
    pub fn own(&self) -> Slot {
        self.inner().own
    }

    /// Where things lie.
    pub fn layout(&self) -> Layout {
        self.inner().layout
    }

    /// How the processor reaches the memory.
    pub fn caching(&self) -> Caching {
        self.inner().caching
    }

    /// Bells of this node that wake by themselves; those beyond are looked at now and then.
    pub fn vectors(&self) -> usize {
        self.inner().kicks.own.len()
    }

    /// This node's end of its link with `peer`, down. There is one at a time: another call takes the link from whoever
    /// has it.
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack.
    pub fn link(&self, peer: Slot) -> DeviceLink {
        DeviceLink::attach(self.clone(), peer)
    }

    /// The window that `peer` writes. For who does not train the link: only in an epoch in which it is up.
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack.
    pub fn inbound(&self, peer: Slot) -> DeviceInbound {
        DeviceInbound::new(self.inner().window(peer, self.own()))
    }

    /// The window that `peer` reads, as [`Device::inbound`].
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack.
    pub fn outbound(&self, peer: Slot) -> DeviceOutbound {
        DeviceOutbound::new(self.inner().window(self.own(), peer))
    }

    /// The memory, for programs of this machine that are to map a part of it themselves, and where in it the windows
    /// to this node and to `peer` begin.
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack.
    pub fn windows_in_memory(&self, peer: Slot) -> (BorrowedFd<'_>, [u64; 2]) {
        let inner = self.inner();
        let begin = |writer, reader| inner.offset_bytes + inner.layout.window(writer, reader).start as u64;
        (inner.descriptor.as_fd(), [begin(peer, inner.own), begin(inner.own, peer)])
    }

    /// Why programs cannot have parts of that memory, for who has opened the device and not taken it over; `None`: only
    /// the memory itself can tell.
    pub fn lending_obstacle(&self) -> Option<&str> {
        self.inner().lending_obstacle.as_deref()
    }

    /// What a part of that memory has to be mapped by whole multiples of where pages do not do, as with a DAX device.
    pub fn alignment(&self) -> Option<Alignment> {
        self.inner().alignment
    }

    /// Where that memory ends.
    pub fn end_in_memory(&self) -> u64 {
        self.inner().offset_bytes + self.inner().len_bytes
    }

    /// The bells of one vector between this node and `peer`.
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack, or if there is no such vector.
    pub fn doorbell(&self, peer: Slot, vector: Vector) -> DeviceDoorbell {
        self.inner().blocks_of(peer);
        DeviceDoorbell::new(self.clone(), peer, self.checked(vector))
    }

    /// This node's bell of one vector, whichever peer rings it.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn bell(&self, vector: Vector) -> VectorBell {
        VectorBell::new(self.clone(), self.checked(vector))
    }

    fn checked(&self, vector: Vector) -> Vector {
        assert!(vector.index() < VECTORS_MAX, "bell {} of {VECTORS_MAX}", vector.0);
        vector
    }

    /// Whether `peer` says that it stores and reads in `epoch`: once it does not, the link of that epoch is down. Costs
    /// a load of this node's own window.
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack.
    pub fn is_peer_in(&self, peer: Slot, epoch: Epoch) -> bool {
        Training::is_ready(self.inner().block_in(peer).training(), epoch)
    }

    /// Tells all peers that this node is alive.
    pub fn beat(&self) {
        self.publish_beat(0);
    }

    /// Tells all peers that nobody trains this node's links just now, and that its windows are used as ever.
    pub fn beat_alone(&self) {
        self.publish_beat(ALONE);
    }

    fn publish_beat(&self, mark: u64) {
        let inner = self.inner();
        let beat = inner.beats.fetch_add(1, Ordering::Relaxed) + 1;
        inner.peers().for_each(|peer| inner.block_out(peer).publish_beat(beat | mark));
    }

    /// A number that changes with each [`Device::beat`] of `peer`, and whether it was a [`Device::beat_alone`].
    ///
    /// # Panics
    /// If `peer` is this node, or none of the rack.
    pub fn beat_of(&self, peer: Slot) -> (u64, bool) {
        let beat = self.inner().block_in(peer).beat();
        (beat & !ALONE, beat & ALONE != 0)
    }

    /// Polls readable when there is something new to [`Device::look`] at, where there is a server. After
    /// [`Change::ServerGone`] it says no more.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner().server.as_ref().map(|(stream, _)| stream.as_fd())
    }

    /// Hears the server, checks the header and the size. Never blocks. Call it when [`Device::descriptor`] is readable,
    /// and every second or so.
    ///
    /// # Errors
    /// The memory has become smaller: touching it may kill.
    pub fn look(&self) -> Result<Vec<Change>, DeviceError> {
        let inner = self.inner();
        file::check_size(&inner.descriptor, inner.offset_bytes + inner.len_bytes).map_err(|it| it.of(&inner.name))?;
        let mut changes = Vec::new();
        if let Some((_, server)) = &inner.server {
            let news = server.lock().unwrap_or_else(PoisonError::into_inner).hear(&inner.kicks);
            changes.extend(news.into_iter().map(|news| inner.change(news)));
            changes.dedup();
        }
        if inner.header.mend() {
            changes.push(Change::HeaderMended);
        }
        Ok(changes)
    }

    fn inner(&self) -> &Inner {
        &self.0
    }
}

/// What this process remembers of the bells between this node and one peer.
#[derive(Debug)]
struct Bells {
    /// The number of the last ring that was taken, by vector.
    taken: [AtomicU64; VECTORS_MAX],
    /// Vectors rung while there was no way to kick the peer, a bit each.
    owed: AtomicU32,
}

const _: () = assert!(VECTORS_MAX <= u32::BITS as usize);

impl Bells {
    /// Rings for an earlier holder of this end are not this one's.
    fn silent(inbound: Option<&Block>) -> Self {
        let last = |vector| inbound.map_or(0, |block| block.ring_last(vector));
        Self { taken: std::array::from_fn(|vector| AtomicU64::new(last(vector))), owed: AtomicU32::new(0) }
    }
}

/// In a beat: of who uses windows while nobody trains them.
const ALONE: u64 = 1 << 63;

/// Nanoseconds of the clock on the wall.
fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.as_nanos() as u64)
}

impl Inner {
    /// All nodes but this one.
    fn peers(&self) -> impl Iterator<Item = Slot> + use<> {
        let own = self.own;
        self.layout.slots().filter(move |peer| *peer != own)
    }

    /// The control block that `peer` writes, and the one that it reads.
    fn blocks_of(&self, peer: Slot) -> &[Block; 2] {
        match self.blocks.get(peer.index()) {
            Some(Some(blocks)) => blocks,
            _ => panic!("node {} has no link with node {peer}", self.own),
        }
    }

    fn block_in(&self, peer: Slot) -> &Block {
        &self.blocks_of(peer)[0]
    }

    fn block_out(&self, peer: Slot) -> &Block {
        &self.blocks_of(peer)[1]
    }

    fn own_bell(&self, vector: Vector) -> Option<&OwnedFd> {
        self.kicks.own.get(vector.index())
    }

    fn window(&self, writer: Slot, reader: Slot) -> DeviceMemory {
        let span = self.layout.window(writer, reader);
        self.memory.part(span.start, span.len())
    }

    /// What this node owns of its link with `peer`, and what the peer does.
    fn sides_of(&self, peer: Slot) -> [Side<DeviceMemory>; 2] {
        let [inbound, outbound] = self.blocks_of(peer);
        let part = |writer, reader| self.window(writer, reader).part(0, self.link_bytes);
        [
            Side { window: part(peer, self.own), control: inbound.control() },
            Side { window: part(self.own, peer), control: outbound.control() },
        ]
    }

    /// Writes a new number, then wakes who may sleep behind it. A peer that has not published its identity has not
    /// looked at its bells since either: the fence keeps both ends from missing each other.
    fn ring(&self, peer: Slot, vector: usize) {
        let [inbound, outbound] = self.blocks_of(peer);
        outbound.ring(vector, self.ring_next.fetch_add(1, Ordering::Relaxed));
        fence(Ordering::SeqCst);
        let Some(identity) = inbound.identity() else { return };
        if !self.kicks.kick(identity, vector) {
            self.bells[peer.index()].owed.fetch_or(1 << vector, Ordering::SeqCst);
            self.kicks.kick(identity, vector); // Its bells may have come just now.
        }
    }

    /// Wakes a client whose bells have just become known for what was rung before.
    fn catch_up(&self, identity: Identity) {
        for peer in self.slots_of(identity) {
            let owed = self.bells[peer.index()].owed.swap(0, Ordering::SeqCst);
            (0..VECTORS_MAX).filter(|vector| owed >> vector & 1 == 1).for_each(|vector| {
                self.kicks.kick(identity, vector);
            });
        }
    }

    /// Whether `peer` has rung since this process took its last ring.
    fn is_rung(&self, peer: Slot, vector: usize) -> bool {
        self.block_in(peer).ring_last(vector) != self.bells[peer.index()].taken[vector].load(Ordering::Relaxed)
    }

    /// Takes the rings of `peer`, and says whether there were any.
    fn silence(&self, peer: Slot, vector: usize) -> bool {
        let number = self.block_in(peer).ring_last(vector);
        self.bells[peer.index()].taken[vector].swap(number, Ordering::Relaxed) != number
    }

    fn change(&self, news: News) -> Change {
        match news {
            News::Bells(identity) => {
                self.catch_up(identity);
                Change::Bells
            }
            News::Gone(identity) => Change::Gone(self.slots_of(identity)),
            News::ServerGone => Change::ServerGone,
        }
    }

    /// The places whose nodes say that they have this number at the server: one, unless a node lies.
    fn slots_of(&self, identity: Identity) -> Vec<Slot> {
        self.peers().filter(|peer| self.block_in(*peer).identity() == Some(identity)).collect()
    }
}
