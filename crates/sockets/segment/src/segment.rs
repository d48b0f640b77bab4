//! One endpoint's view of the memory of a connection: how it is created, opened and adopted, and its lanes.

mod state;

use crate::layout::{
    self, ENDPOINT_BYTES, PAGE_BYTES, RECEIVER_STATE_OFFSET, RINGS_OFFSET, SENDER_STATE_OFFSET, Side, TIMED_SHAPE,
    WINDOW_LAYOUT, layout_to,
};
use crate::model::{LinkModel, ModelledLink};
use crate::split_endpoint::{self, LocalPageReceiverOf, LocalPageSenderOf, SplitEndpoint};
use crate::words::{MODEL_OFFSETS, OwnState, PeerStatus, SECRET_TO_ACCEPTOR, SECRET_TO_CONNECTOR};
use fabric::device::DeviceMemory;
use fabric::timed::{SharedConfig, SharedInbound, SharedOutbound, SharedWindows};
use fabric::{Inbound, MemoryInbound, MemoryOutbound, Outbound, shm};
use lane::{Consumer, LargerRings, Layout, Producer};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{Mapping, Region};

/// The sender of the outgoing lane.
pub type Sender = Producer<MemoryOutbound, MemoryInbound>;
/// The receiver of the incoming lane.
pub type Receiver = Consumer<MemoryInbound, MemoryOutbound>;
/// The sender of a lane over a modelled link.
pub type TimedSender = Producer<SharedOutbound, SharedInbound>;
/// The receiver of a lane over a modelled link.
pub type TimedReceiver = Consumer<SharedInbound, SharedOutbound>;
/// The sender of a lane in windows that are not ordinary memory.
pub type LocalPageSender = LocalPageSenderOf<DeviceMemory>;
/// The receiver of a lane in windows that are not ordinary memory.
pub type LocalPageReceiver = LocalPageReceiverOf<DeviceMemory>;

/// The secrets in the tags of both lanes, by which records are distinguished from other bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Secrets {
    /// Of the lane from the connector.
    pub to_acceptor: u64,
    /// Of the lane to the connector.
    pub to_connector: u64,
}

/// One endpoint's view of a connection's memory.
#[derive(Debug)]
pub struct Segment {
    medium: Medium,
    /// This endpoint's words: in the inbound memory, or in the local page.
    own: Region,
    side: Side,
    secrets: Secrets,
    is_adopted: bool,
    is_in_windows: bool,
}

/// The kind of memory through which an endpoint reaches the other one.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "almost every segment is a plain one")]
enum Medium {
    Plain(Plain),
    Modelled(Box<Modelled>),
    Split(Box<SplitEndpoint<DeviceMemory>>),
}

/// Ordinary memory, which both endpoints share.
#[derive(Debug)]
struct Plain {
    /// The memory of the incoming lane, and of the words that the sender of the outgoing lane reads.
    inbound: MemoryInbound,
    outbound: MemoryOutbound,
    /// The other endpoint's words, in the outbound memory.
    peers: Region,
}

/// The windows of an endpoint over a modelled link.
#[derive(Debug)]
struct Modelled {
    windows: SharedWindows,
    model: LinkModel,
    /// The other endpoint's words, in the outbound memory.
    peers: Region,
}

impl Segment {
    /// Size of the memfd in bytes.
    pub const SEGMENT_BYTES: usize = RINGS_OFFSET + 2 * LargerRings::BYTES;
    /// Size in bytes of an endpoint's span in its node's window, a whole number of pages.
    pub const WINDOW_BYTES: usize = layout::WINDOW_BYTES;
    /// The same over a modelled link.
    pub const TIMED_WINDOW_BYTES: usize = layout::TIMED_WINDOW_BYTES;

    /// Size in bytes of the own state that an endpoint keeps in its local page.
    pub const LOCAL_PAGE_BYTES: usize = PAGE_BYTES;

    /// Returns the size in bytes of an endpoint's span over a link of the given kind.
    pub const fn window_bytes(is_modelled: bool) -> usize {
        if is_modelled { Self::TIMED_WINDOW_BYTES } else { Self::WINDOW_BYTES }
    }

    /// Creates the memory of a connection. Returns the view of endpoint `side`, and the memfd for the other endpoint.
    /// The caller calls [`Segment::set_up`].
    ///
    /// # Errors
    /// The error of `memfd_create`, `ftruncate`, `fcntl`, `mmap` or `getrandom`.
    pub fn create(side: Side) -> Result<(Self, OwnedFd), Errno> {
        let (memfd, mapping) = shm::create(Self::SEGMENT_BYTES).map_err(|_| Errno::NOMEM)?;
        let mut random = [0_u8; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let secrets = Secrets {
            to_acceptor: u64::from_ne_bytes(random[..8].try_into().expect("eight bytes")),
            to_connector: u64::from_ne_bytes(random[8..].try_into().expect("eight bytes")),
        };
        Ok((Self::view(Arc::new(mapping), side, secrets), memfd))
    }

    /// Opens the acceptor's view of memory that the connector created.
    ///
    /// # Errors
    /// If `memfd` is not a sealed memfd of exactly this size.
    pub fn open(memfd: &OwnedFd, secrets: Secrets) -> Result<Self, Errno> {
        let mapping = shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?;
        let segment = Self::view(Arc::new(mapping), Side::Acceptor, secrets);
        segment.set_up();
        Ok(segment)
    }

    /// Opens the view of endpoint `side` of memory that was received over the lifeline, from the other endpoint, which
    /// created and set it up, or from a process that held this endpoint before.
    ///
    /// # Errors
    /// If `memfd` is not a sealed memfd of exactly this size, or neither endpoint is set up.
    pub fn join(memfd: &OwnedFd, side: Side) -> Result<Self, Errno> {
        let mapping = Arc::new(shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?);
        let own = Self::view(Arc::clone(&mapping), side, Secrets::default());
        if own.load(OwnState::Attached) == 1 {
            return own.adopt_rest();
        }
        let maker = Self::view(Arc::clone(&mapping), side.other(), Secrets::default()).adopt_rest()?;
        let segment = Self::view(mapping, side, maker.secrets);
        segment.set_up();
        Ok(segment)
    }

    /// Opens memory that is in transit to endpoint `side`, without setting that endpoint up.
    ///
    /// # Errors
    /// As [`Segment::join`].
    pub fn peek(memfd: &OwnedFd, side: Side) -> Result<Self, Errno> {
        let mapping = Arc::new(shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?);
        let maker = Self::view(Arc::clone(&mapping), side.other(), Secrets::default()).adopt_rest()?;
        Ok(Self::view(mapping, side, maker.secrets))
    }

    /// Opens the view of an endpoint that another process has set up: after `exec` or `SCM_RIGHTS`.
    ///
    /// # Errors
    /// If `memfd` is not a sealed memfd of exactly this size, or the endpoint is not set up.
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn adopt(memfd: &OwnedFd, side: Side) -> Result<Self, Errno> {
        let mapping = shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?;
        Self::view(Arc::new(mapping), side, Secrets::default()).adopt_rest()
    }

    /// As [`Segment::adopt`], for an endpoint in windows; with `link` for a modelled link, which must match
    /// [`Segment::model`].
    ///
    /// # Errors
    /// If the endpoint is not set up, or as [`Segment::in_modelled_windows`].
    ///
    /// # Panics
    /// As [`Segment::in_windows`].
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn adopt_in_windows(inbound: &Region, outbound: &Region, link: Option<ModelledLink>) -> Result<Self, Errno> {
        let (side, secrets) = (Side::Connector, Secrets::default());
        let segment = match link {
            None => Self::in_windows(inbound, outbound, side, secrets),
            Some(link) => Self::in_modelled_windows(inbound, outbound, link, side, secrets)?,
        };
        segment.adopt_by_side()
    }

    /// As [`Segment::adopt`], for an endpoint whose own state is in a local page.
    ///
    /// # Errors
    /// If the endpoint is not set up.
    ///
    /// # Panics
    /// As [`Segment::with_local_page`].
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn adopt_with_local_page(inbound: DeviceMemory, outbound: DeviceMemory, page: &Region) -> Result<Self, Errno> {
        Self::with_local_page(inbound, outbound, page, Side::Connector, Secrets::default()).adopt_by_side()
    }

    /// Loads the side and the secrets of an endpoint that another process has set up.
    fn adopt_by_side(mut self) -> Result<Self, Errno> {
        self.side = match self.load(OwnState::Side) {
            1 => Side::Connector,
            2 => Side::Acceptor,
            _ => return Err(Errno::NOTCONN),
        };
        self.adopt_rest()
    }

    /// Undoes [`Segment::join`] if the memory is not used after all; otherwise the next `join` would take the endpoint
    /// for one that another process held before.
    pub fn undo_join(&self) {
        if !self.is_adopted {
            self.store(OwnState::Attached, 0);
        }
    }

    /// Loads the secrets that the process which set the endpoint up has left for later holders.
    fn adopt_rest(mut self) -> Result<Self, Errno> {
        self.is_adopted = true;
        self.secrets = Secrets {
            to_acceptor: self.own.load_u64(SECRET_TO_ACCEPTOR, Ordering::Relaxed),
            to_connector: self.own.load_u64(SECRET_TO_CONNECTOR, Ordering::Relaxed),
        };
        if self.load(OwnState::Attached) == 1 { Ok(self) } else { Err(Errno::NOTCONN) }
    }

    /// Returns whether a descriptor is the memory of a connection, judging by its size and seals.
    pub fn is_segment(fd: RawFd) -> bool {
        // SAFETY: the calls below only read, and fail for a closed number.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::fs::fstat(borrowed).is_ok_and(|stat| stat.st_size as usize == Self::SEGMENT_BYTES)
            && rustix::fs::fcntl_get_seals(borrowed).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK))
    }

    /// Returns the secrets in the tags of the connection's records.
    pub fn secrets(&self) -> Secrets {
        self.secrets
    }

    /// Returns whether another process set this endpoint up, or this process before `exec`.
    pub fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// Returns which endpoint this is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns the sender of the outgoing lane.
    ///
    /// # Panics
    /// In windows that are not ordinary memory: see [`Segment::timed_sender`] and [`Segment::local_page_sender`].
    pub fn sender(&self) -> Sender {
        let Plain { inbound, outbound, .. } = self.plain();
        let (own, layout) = (sender_state(&self.own), self.outgoing_layout());
        Producer::with_state(outbound.clone(), inbound.clone(), own, layout, self.outgoing_secret())
    }

    /// Returns the receiver of the incoming lane.
    ///
    /// # Panics
    /// As [`Segment::sender`].
    pub fn receiver(&self) -> Receiver {
        let Plain { inbound, outbound, .. } = self.plain();
        let layout = if self.is_in_windows { WINDOW_LAYOUT } else { layout_to(self.side) };
        let own = receiver_state(&self.own);
        Consumer::with_state(inbound.clone(), outbound.clone(), own, layout, self.incoming_secret())
    }

    fn outgoing_layout(&self) -> Layout {
        if self.is_in_windows { WINDOW_LAYOUT } else { layout_to(self.side.other()) }
    }

    fn plain(&self) -> &Plain {
        match &self.medium {
            Medium::Plain(plain) => plain,
            _ => panic!("a lane that is not in ordinary memory"),
        }
    }

    fn outgoing_secret(&self) -> u64 {
        match self.side {
            Side::Connector => self.secrets.to_acceptor,
            Side::Acceptor => self.secrets.to_connector,
        }
    }

    fn incoming_secret(&self) -> u64 {
        match self.side {
            Side::Connector => self.secrets.to_connector,
            Side::Acceptor => self.secrets.to_acceptor,
        }
    }

    fn view(mapping: Arc<Mapping>, side: Side, secrets: Secrets) -> Self {
        let whole = Region::of_mapping(mapping);
        let first = whole.sub(0, ENDPOINT_BYTES);
        let second = whole.sub(ENDPOINT_BYTES, ENDPOINT_BYTES);
        let (own, peers) = match side {
            Side::Connector => (first, second),
            Side::Acceptor => (second, first),
        };
        let plain = Plain { inbound: MemoryInbound::new(whole.clone()), outbound: MemoryOutbound::new(whole), peers };
        Self::of(Medium::Plain(plain), own, side, secrets)
    }

    fn of(medium: Medium, own: Region, side: Side, secrets: Secrets) -> Self {
        Self { medium, own, side, secrets, is_adopted: false, is_in_windows: false }
    }

    /// Creates the view of an endpoint between nodes: `inbound` is its span of its own node's window, `outbound` the
    /// other endpoint's span of the other node's. Both are coherent memory of [`Segment::WINDOW_BYTES`], and their
    /// endpoints' words are zero. The caller calls [`Segment::set_up`].
    ///
    /// # Panics
    /// If a span is of another size.
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn in_windows(inbound: &Region, outbound: &Region, side: Side, secrets: Secrets) -> Self {
        check_spans([inbound, outbound], Self::WINDOW_BYTES);
        let plain = Plain {
            inbound: MemoryInbound::new(inbound.clone()),
            outbound: MemoryOutbound::new(outbound.clone()),
            peers: outbound.sub(0, ENDPOINT_BYTES),
        };
        let own = inbound.sub(0, ENDPOINT_BYTES);
        Self { is_in_windows: true, ..Self::of(Medium::Plain(plain), own, side, secrets) }
    }

    /// As [`Segment::in_windows`], over a modelled link, with spans of [`Segment::TIMED_WINDOW_BYTES`].
    ///
    /// # Errors
    /// `INVAL` for an impossible model.
    ///
    /// # Panics
    /// If a span is of another size.
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn in_modelled_windows(
        inbound: &Region,
        outbound: &Region,
        link: ModelledLink,
        side: Side,
        secrets: Secrets,
    ) -> Result<Self, Errno> {
        check_spans([inbound, outbound], Self::TIMED_WINDOW_BYTES);
        let ModelledLink { model, pace, peers_pace } = link;
        let setup = SharedConfig { layout: TIMED_SHAPE, timing: model.timing, pacer: pace, peer_pacer: peers_pace };
        let windows = SharedWindows::new(inbound, outbound, setup).map_err(|_| Errno::INVAL)?;
        let modelled = Modelled { windows, model, peers: outbound.sub(0, ENDPOINT_BYTES) };
        let own = inbound.sub(0, ENDPOINT_BYTES);
        Ok(Self { is_in_windows: true, ..Self::of(Medium::Modelled(Box::new(modelled)), own, side, secrets) })
    }

    /// As [`Segment::in_windows`], for windows that are not ordinary memory. `page` is ordinary memory of
    /// [`Segment::LOCAL_PAGE_BYTES`] that the processes which hold this endpoint share; zero for a new endpoint.
    ///
    /// # Panics
    /// If a span, or the local page, is of another size.
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    pub fn with_local_page(
        inbound: DeviceMemory,
        outbound: DeviceMemory,
        page: &Region,
        side: Side,
        secrets: Secrets,
    ) -> Self {
        use fabric::Memory;
        for span in [&inbound, &outbound] {
            assert_eq!(span.len_bytes(), Self::WINDOW_BYTES, "a connection's span of a window");
        }
        let own = page.sub(0, ENDPOINT_BYTES);
        let medium = Medium::Split(Box::new(SplitEndpoint::new(inbound, outbound, own.clone())));
        Self { is_in_windows: true, ..Self::of(medium, own, side, secrets) }
    }

    /// Over a modelled link, waits until everything that the peer has sent so far has arrived: a wakeup is not delayed
    /// by the model and may come before the data.
    pub fn wait_for_arrivals(&self) {
        if let Medium::Modelled(modelled) = &self.medium {
            modelled.windows.wait_for_arrivals();
        }
    }

    /// Returns the model of the link, as recorded for later holders of an endpoint in windows. A peer may have written
    /// it.
    pub fn model(&self) -> Option<LinkModel> {
        LinkModel::from_words(MODEL_OFFSETS.map(|place| self.own.load_u64(place, Ordering::Relaxed)))
    }

    /// Returns the sender of the outgoing lane over a modelled link.
    pub fn timed_sender(&self) -> Option<TimedSender> {
        let Medium::Modelled(modelled) = &self.medium else { return None };
        let (inbound, outbound) = (modelled.windows.inbound(), modelled.windows.outbound());
        let own = sender_state(&self.own);
        Some(Producer::with_state(outbound, inbound, own, WINDOW_LAYOUT, self.outgoing_secret()))
    }

    /// Returns the receiver of the incoming lane over a modelled link.
    pub fn timed_receiver(&self) -> Option<TimedReceiver> {
        let Medium::Modelled(modelled) = &self.medium else { return None };
        let (inbound, outbound) = (modelled.windows.inbound(), modelled.windows.outbound());
        let own = receiver_state(&self.own);
        Some(Consumer::with_state(inbound, outbound, own, WINDOW_LAYOUT, self.incoming_secret()))
    }

    /// Returns the sender of the outgoing lane, if this endpoint has a local page.
    pub fn local_page_sender(&self) -> Option<LocalPageSender> {
        let Medium::Split(split) = &self.medium else { return None };
        Some(split.sender(self.outgoing_secret()))
    }

    /// Returns the receiver of the incoming lane, if this endpoint has a local page.
    pub fn local_page_receiver(&self) -> Option<LocalPageReceiver> {
        let Medium::Split(split) = &self.medium else { return None };
        Some(split.receiver(self.incoming_secret()))
    }

    /// Clears a span of this node's window for a new connection, while no program uses it. Old records in the rings do
    /// no harm, because the next connection has other secrets.
    pub fn clean_span(inbound: &impl Inbound) {
        clean(inbound.len_bytes(), |offset| inbound.store_u64(offset, 0, Ordering::Relaxed));
    }

    /// Clears what this node writes in both spans of a connection with local pages. Each node does so before it
    /// announces that it uses them, while none of its programs does.
    pub fn clean_with_local_page(inbound: &impl Inbound, outbound: &impl Outbound) {
        split_endpoint::clean(inbound, outbound);
    }

    /// As [`Segment::clean_span`], for a span of the other node's window.
    pub fn clean_remote_span(outbound: &impl Outbound) {
        clean(outbound.len_bytes(), |offset| outbound.store_u64(offset, 0, Ordering::Relaxed));
        outbound.flush();
    }

    /// Returns whether the connection is in windows. Its lifeline then ends at this node's proxy, which reports in
    /// memory when the peer's last descriptor is closed; the state of the proxy's end says nothing about the peer.
    #[inline]
    pub fn is_in_windows(&self) -> bool {
        self.is_in_windows
    }

    /// Stores what later holders of this endpoint need, and tells the peer that it is attached.
    pub fn set_up(&self) {
        self.own.store_u64(SECRET_TO_ACCEPTOR, self.secrets.to_acceptor, Ordering::Relaxed);
        self.own.store_u64(SECRET_TO_CONNECTOR, self.secrets.to_connector, Ordering::Relaxed);
        self.store(OwnState::Holders, 1);
        self.store(OwnState::Users, 1);
        self.store(OwnState::Side, self.side as u64 + 1);
        if let Medium::Modelled(modelled) = &self.medium {
            for (place, word) in MODEL_OFFSETS.into_iter().zip(modelled.model.to_words()) {
                self.own.store_u64(place, word, Ordering::Relaxed);
            }
        }
        self.store(OwnState::Attached, 1);
        if let Medium::Split(split) = &self.medium {
            split.attach();
        }
        self.publish(PeerStatus::Attached, 1);
    }
}

/// Returns the state of the sender of an endpoint's outgoing lane, in the endpoint's words.
pub(crate) fn sender_state(endpoint: &Region) -> Region {
    endpoint.sub(SENDER_STATE_OFFSET, Layout::PRODUCER_STATE_BYTES)
}

/// Returns the state of the receiver of an endpoint's incoming lane, in the endpoint's words.
pub(crate) fn receiver_state(endpoint: &Region) -> Region {
    endpoint.sub(RECEIVER_STATE_OFFSET, Layout::CONSUMER_STATE_BYTES)
}

fn check_spans(spans: [&Region; 2], span_bytes: usize) {
    for span in spans {
        assert_eq!(span.len_bytes(), span_bytes, "a connection's span of a window");
    }
}

fn clean(span_bytes: usize, store_zero: impl Fn(usize)) {
    (0..ENDPOINT_BYTES).step_by(size_of::<u64>()).for_each(&store_zero);
    if span_bytes == Segment::TIMED_WINDOW_BYTES {
        TIMED_SHAPE.forget_words(store_zero);
    }
}
