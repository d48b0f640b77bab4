//! The reader: what `crosslane stat` shows about the programs of a rack.
//!
//! A page consists of untrusted bytes that its writer continues to change. It is copied and not mapped, because a file
//! that shrinks would kill the reader. Every number is checked before it is used, and invalid slots are left out.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fmt;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;

use crate::file::{self, Fd, Occupant};
use crate::layout::{
    CLOSED_RECORDS, Direction, FLAG_INHERITED, FLAG_REPORTED, HEADER_BYTES, Header, MAGIC, PROGRAM_BYTES, PathTotals,
    SLOT_BYTES, SLOTS, STATE_CLOSED, STATE_OPEN, Slot, VERSION,
};
use crate::rack::STAT_FOLDER;
use crate::terms::{DataPath, FallbackReason, Role};

/// The contents of a rack's pages at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Sorted by pid.
    pub processes: Vec<Process>,
    /// Pages that could not be read, and why.
    pub unreadable: Vec<Unreadable>,
    /// Number of pages of dead processes that were removed.
    pub stale_removed: usize,
}

/// A page that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The file's name.
    pub name: String,
    /// Why it could not be read.
    pub error: PageError,
}

/// The contents of one process's page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The pid in the process's own namespace.
    pub pid: u32,
    /// The program's name.
    pub program: String,
    /// The address of the node that it was started as.
    pub node: Option<IpAddr>,
    /// When the page was created, in nanoseconds since 1970.
    pub started_at_ns: u64,
    /// Open connections that have a slot.
    pub connections: Vec<Connection>,
    /// The connections with a slot that were closed last, [`CLOSED_RECORDS`] at most, the last one first.
    pub closed: Vec<ClosedConnection>,
    /// Totals of the lane path.
    pub lane: Totals,
    /// Totals of the kernel path.
    pub kernel: Totals,
    /// Totals of the window path.
    pub window: Totals,
    /// Number of connections since the start for which no slot was free.
    pub connections_unlisted: u64,
    /// Bytes that its lanes occupy beyond their small rings.
    pub lane_memory_bytes: u64,
    /// The bound on these bytes; 0 as long as there was no lane.
    pub lane_memory_bytes_max: u64,
    /// Fallback reasons that occurred, and how often.
    pub fallbacks: BTreeMap<&'static str, u64>,
}

impl Process {
    /// Returns the totals of a path.
    pub fn totals(&self, path: DataPath) -> &Totals {
        match path {
            DataPath::Lane => &self.lane,
            DataPath::Kernel => &self.kernel,
            DataPath::Window => &self.window,
        }
    }
}

/// The totals of a path for one process, closed connections included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Connections opened by this process.
    pub connections_total: u64,
    /// Connections open now, inherited ones included.
    pub connections_open: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Bytes received.
    pub bytes_received: u64,
}

/// One open connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The program's descriptor.
    pub fd: i32,
    /// Which side this process is.
    pub role: Role,
    /// What carries it.
    pub path: DataPath,
    /// Whether a parent process opened it, before a fork.
    pub inherited: bool,
    /// This side's address.
    pub local: Option<SocketAddr>,
    /// The other side's address.
    pub peer: Option<SocketAddr>,
    /// Why it uses kernel TCP, if it does and the library recorded it.
    pub reason: Option<FallbackReason>,
    /// Whether the other side has reported that reason.
    pub is_reported: bool,
    /// When it was opened, in nanoseconds since 1970.
    pub opened_at_ns: u64,
    /// Bytes sent by this process.
    pub bytes_sent: u64,
    /// Bytes received by this process.
    pub bytes_received: u64,
    /// Number of sends.
    pub messages_sent: u64,
    /// Number of receives.
    pub messages_received: u64,
    /// Number of sleeps of this side.
    pub sleeps: u64,
    /// Number of wakeups sent to the other side.
    pub wakes: u64,
    /// Bytes that this process has sent by kernel TCP, of a connection with a lane; not among `bytes_sent`.
    pub tcp_bytes_sent: u64,
    /// Bytes that this process has received by kernel TCP, of a connection with a lane; not among `bytes_received`.
    pub tcp_bytes_received: u64,
    /// Whether this process sends by kernel TCP at present.
    pub sends_on_tcp: bool,
    /// Whether this process receives by kernel TCP at present.
    pub receives_on_tcp: bool,
}

/// A connection that this process has closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosedConnection {
    /// The connection as it was at its end.
    pub connection: Connection,
    /// When it was closed, in nanoseconds since 1970.
    pub closed_at_ns: u64,
}

/// Why a page could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// It is shorter than a header.
    Short {
        /// Its length.
        bytes: usize,
    },
    /// It is not a page, or not a complete one.
    NotAPage,
    /// Another version of the library created it.
    Version {
        /// The version found.
        found: u32,
    },
    /// The sizes in its header are not those of this layout.
    Layout,
    /// The file could not be read.
    Io(std::num::NonZeroI32),
}

impl fmt::Display for PageError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { bytes } => write!(formatter, "{bytes} bytes, too few for a page"),
            Self::NotAPage => formatter.write_str("not a complete page"),
            Self::Version { found } => write!(formatter, "page version {found}, this command reads {VERSION}"),
            Self::Layout => formatter.write_str("the sizes in the header are not those of this version"),
            Self::Io(number) => write!(formatter, "{}", std::io::Error::from_raw_os_error(number.get())),
        }
    }
}

impl std::error::Error for PageError {}

impl From<Errno> for PageError {
    fn from(error: Errno) -> Self {
        std::num::NonZeroI32::new(error.raw_os_error()).map_or(Self::NotAPage, Self::Io)
    }
}

/// Reads every page of a rack and removes those of dead processes, unless the folder keeps them. A rack that does not
/// exist has no processes.
pub fn read_rack(rack: &Path) -> std::io::Result<Snapshot> {
    read(rack, StalePages::Remove)
}

/// Reads every page of a rack and changes nothing: the directory may belong to a user who has placed links in it.
pub fn read_foreign_rack(rack: &Path) -> std::io::Result<Snapshot> {
    read(rack, StalePages::Keep)
}

/// What to do with the pages of dead processes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StalePages {
    Remove,
    Keep,
}

fn read(rack: &Path, stale: StalePages) -> std::io::Result<Snapshot> {
    let folder = match open_folder(&rack.join(STAT_FOLDER)) {
        Err(Errno::NOENT) => return Ok(Snapshot::default()),
        other => other?,
    };
    let mut snapshot = Snapshot::default();
    for name in page_names(&folder)? {
        match read_page(&folder, &name, stale) {
            Ok(Some(process)) => snapshot.processes.push(process),
            Ok(None) => snapshot.stale_removed += usize::from(stale == StalePages::Remove),
            // The process ended meanwhile.
            Err(PageError::Io(number)) if number.get() == Errno::NOENT.raw_os_error() => {}
            Err(error) => snapshot.unreadable.push(Unreadable { name: name.to_string_lossy().into_owned(), error }),
        }
    }
    snapshot.processes.sort_by_key(|process| process.pid);
    Ok(snapshot)
}

/// Reads the page of one process, whether or not it still runs, and removes nothing.
///
/// # Errors
/// Those of the file and of its contents; `EPERM` if another user owns the file.
pub fn read_file(path: &Path) -> Result<Process, PageError> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    decode(&read_used(&file::open_page(rustix::fs::CWD, &path)?)?)
}

fn open_folder(path: &Path) -> Result<Fd, Errno> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    file::open_folder(rustix::fs::CWD, &path)
}

fn page_names(folder: &Fd) -> Result<Vec<CString>, Errno> {
    let listing =
        rustix::fs::openat(folder, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = Vec::with_capacity(32 * 1024);
    let mut entries = RawDir::new(listing, buffer.spare_capacity_mut());
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        if file::page_name_pid(entry.file_name().to_bytes()).is_some() {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

/// Reads a page. Returns `None` if it is stale.
fn read_page(folder: &Fd, name: &std::ffi::CStr, stale: StalePages) -> Result<Option<Process>, PageError> {
    let fd = file::open_page(folder.as_fd(), name)?;
    let occupant = match stale {
        StalePages::Remove => file::remove_open_if_stale(folder.as_fd(), name, &fd)?,
        StalePages::Keep => file::occupant(&fd)?,
    };
    match occupant {
        Occupant::Stale => Ok(None),
        Occupant::Live => decode(&read_used(&fd)?).map(Some),
    }
}

/// Reads the header and the slots that by the header were ever used, but at most as many as a page has.
fn read_used(fd: &Fd) -> Result<Vec<u8>, PageError> {
    let mut page = read_at(fd, 0, HEADER_BYTES)?;
    if let Some(header) = Bytes::new(&page, HEADER_BYTES) {
        let used = header.u32(offset_of!(Header, slots_used_max)) as usize;
        page.extend(read_at(fd, HEADER_BYTES, used.min(SLOTS) * SLOT_BYTES)?);
    }
    Ok(page)
}

fn read_at(fd: &Fd, offset: usize, bytes: usize) -> Result<Vec<u8>, PageError> {
    let mut buffer = vec![0; bytes];
    let mut filled = 0;
    while filled < bytes {
        match rustix::io::pread(fd, &mut buffer[filled..], (offset + filled) as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    buffer.truncate(filled);
    Ok(buffer)
}

/// Decodes the bytes of a page: the header and any number of slots behind it.
pub fn decode(page: &[u8]) -> Result<Process, PageError> {
    let header = Bytes::new(page, HEADER_BYTES).ok_or(PageError::Short { bytes: page.len() })?;
    check_header(&header)?;
    let slots_used = (header.u32(offset_of!(Header, slots_used_max)) as usize).min(SLOTS);
    let slots = page[HEADER_BYTES..].chunks_exact(SLOT_BYTES).take(slots_used);
    let connections: Vec<Connection> = slots.filter_map(|slot| decode_connection(&Bytes(slot), STATE_OPEN)).collect();
    let node = decode_address(&header, offset_of!(Header, node_ip), offset_of!(Header, node_family));
    Ok(Process {
        pid: header.u32(offset_of!(Header, pid)),
        program: printable(header.slice(offset_of!(Header, program), PROGRAM_BYTES)),
        node: node.map(|address| address.ip()),
        started_at_ns: header.u64(offset_of!(Header, started_at_ns)),
        lane: decode_totals(&header, DataPath::Lane, &connections),
        kernel: decode_totals(&header, DataPath::Kernel, &connections),
        window: decode_totals(&header, DataPath::Window, &connections),
        connections_unlisted: header.u64(offset_of!(Header, connections_unlisted)),
        lane_memory_bytes: header.u64(offset_of!(Header, lane_memory_bytes)),
        lane_memory_bytes_max: header.u64(offset_of!(Header, lane_memory_bytes_max)),
        fallbacks: decode_fallbacks(&header),
        closed: decode_closed(&header),
        connections,
    })
}

fn check_header(header: &Bytes<'_>) -> Result<(), PageError> {
    if header.u64(offset_of!(Header, magic)) != MAGIC {
        return Err(PageError::NotAPage);
    }
    let found = header.u32(offset_of!(Header, version));
    if found != VERSION {
        return Err(PageError::Version { found });
    }
    let sizes = [
        (offset_of!(Header, header_bytes), HEADER_BYTES),
        (offset_of!(Header, slot_bytes), SLOT_BYTES),
        (offset_of!(Header, slot_count), SLOTS),
    ];
    if sizes.iter().all(|(at, expected)| header.u32(*at) as usize == *expected) {
        Ok(())
    } else {
        Err(PageError::Layout)
    }
}

fn decode_totals(header: &Bytes<'_>, path: DataPath, connections: &[Connection]) -> Totals {
    let totals = offset_of!(Header, totals) + path as usize * size_of::<PathTotals>();
    let unlisted = offset_of!(Header, unlisted) + path as usize * SLOT_BYTES;
    let open = || connections.iter().filter(|connection| connection.path == path);
    // Kernel TCP also carries a part of what connections with lanes transfer.
    let by_tcp = || connections.iter().filter(|_| path == DataPath::Kernel);
    let sent = [
        header.u64(totals + offset_of!(PathTotals, bytes_sent_closed)),
        header.u64(unlisted + offset_of!(Slot, sender) + offset_of!(Direction, bytes)),
    ];
    let received = [
        header.u64(totals + offset_of!(PathTotals, bytes_received_closed)),
        header.u64(unlisted + offset_of!(Slot, receiver) + offset_of!(Direction, bytes)),
    ];
    let sum = |parts: &[u64], open_bytes: &mut dyn Iterator<Item = u64>| {
        parts.iter().copied().chain(open_bytes).fold(0u64, u64::saturating_add)
    };
    // A torn read may show an open counter below zero, which counts as zero.
    let connections_open = header.u64(totals + offset_of!(PathTotals, connections_open));
    Totals {
        connections_total: header.u64(totals + offset_of!(PathTotals, connections_total)),
        connections_open: if connections_open > i64::MAX as u64 { 0 } else { connections_open },
        bytes_sent: sum(
            &sent,
            &mut open().map(|connection| connection.bytes_sent).chain(by_tcp().map(|it| it.tcp_bytes_sent)),
        ),
        bytes_received: sum(
            &received,
            &mut open().map(|connection| connection.bytes_received).chain(by_tcp().map(|it| it.tcp_bytes_received)),
        ),
    }
}

fn decode_fallbacks(header: &Bytes<'_>) -> BTreeMap<&'static str, u64> {
    let count = |reason: FallbackReason| header.u64(offset_of!(Header, fallbacks) + reason as usize * 8);
    FallbackReason::ALL.iter().map(|reason| (reason.name(), count(*reason))).filter(|(_, count)| *count > 0).collect()
}

fn decode_closed(header: &Bytes<'_>) -> Vec<ClosedConnection> {
    let total = header.u64(offset_of!(Header, closed_total));
    let record = |ago: u64| {
        let index = total.wrapping_sub(ago) as usize % CLOSED_RECORDS;
        let record = Bytes(header.slice(offset_of!(Header, closed) + index * SLOT_BYTES, SLOT_BYTES));
        let connection = decode_connection(&record, STATE_CLOSED)?;
        Some(ClosedConnection { connection, closed_at_ns: record.u64(offset_of!(Slot, closed_at_ns)) })
    };
    (1..=CLOSED_RECORDS as u64).filter_map(record).collect()
}

/// Decodes a slot. Returns `None` if it is in another state than `state`, or invalid.
fn decode_connection(slot: &Bytes<'_>, state: u32) -> Option<Connection> {
    if slot.u32(offset_of!(Slot, identity.state)) != state {
        return None;
    }
    let kind = slot.u32(offset_of!(Slot, identity.kind));
    let [path, role, _, reason] = kind.to_le_bytes();
    let sender = offset_of!(Slot, sender);
    let receiver = offset_of!(Slot, receiver);
    Some(Connection {
        fd: i32::from_ne_bytes(slot.array(offset_of!(Slot, identity.fd))),
        role: Role::from_byte(role)?,
        path: DataPath::from_byte(path)?,
        inherited: kind & FLAG_INHERITED != 0,
        local: decode_address(slot, offset_of!(Slot, identity.local_ip), offset_of!(Slot, identity.local_port)),
        peer: decode_address(slot, offset_of!(Slot, identity.peer_ip), offset_of!(Slot, identity.peer_port)),
        reason: usize::from(reason).checked_sub(1).and_then(|index| FallbackReason::ALL.get(index).copied()),
        is_reported: kind & FLAG_REPORTED != 0,
        opened_at_ns: slot.u64(offset_of!(Slot, identity.opened_at_ns)),
        bytes_sent: slot.u64(sender + offset_of!(Direction, bytes)),
        bytes_received: slot.u64(receiver + offset_of!(Direction, bytes)),
        messages_sent: slot.u64(sender + offset_of!(Direction, messages)),
        messages_received: slot.u64(receiver + offset_of!(Direction, messages)),
        sleeps: slot.u64(receiver + offset_of!(Direction, wakes_or_sleeps)),
        wakes: slot.u64(sender + offset_of!(Direction, wakes_or_sleeps)),
        tcp_bytes_sent: slot.u64(sender + offset_of!(Direction, bytes_by_tcp)),
        tcp_bytes_received: slot.u64(receiver + offset_of!(Direction, bytes_by_tcp)),
        sends_on_tcp: path == DataPath::Kernel as u8 || slot.u32(sender + offset_of!(Direction, is_on_tcp)) != 0,
        receives_on_tcp: path == DataPath::Kernel as u8 || slot.u32(receiver + offset_of!(Direction, is_on_tcp)) != 0,
    })
}

fn decode_address(slot: &Bytes<'_>, ip: usize, port: usize) -> Option<SocketAddr> {
    let octets: [u8; 16] = slot.slice(ip, 16).try_into().ok()?;
    let port_and_family = slot.u32(port);
    let ip = match port_and_family >> 16 {
        4 => IpAddr::V4(Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3])),
        6 => IpAddr::V6(Ipv6Addr::from(octets)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port_and_family as u16))
}

/// Decodes a name, replacing control characters, which could manipulate a terminal.
fn printable(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = String::from_utf8_lossy(&bytes[..end]);
    text.chars().map(|character| if character.is_control() { '\u{fffd}' } else { character }).collect()
}

/// Bytes whose fields are read at the offsets of a layout struct; their length has been checked.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn new(page: &'a [u8], bytes: usize) -> Option<Self> {
        page.get(..bytes).map(Self)
    }

    fn slice(&self, at: usize, bytes: usize) -> &'a [u8] {
        &self.0[at..at + bytes]
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(at, N));
        array
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.array(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.array(at))
    }
}
