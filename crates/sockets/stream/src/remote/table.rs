//! What the proxy's sockets stand for: a file in the rack directory, which the proxy writes and programs map for
//! reading. Each entry is one word, so that a reader sees it whole. The file belongs to the user of the rack, and keeps
//! its size and its place for as long as the directory exists; the next proxy clears it.
//!
//! ```text
//!   header      magic number, the proxy's address, the slot of its node
//!   nodes       by slot: the family and the address of the node
//!   listeners   by a port of the proxy: the slot and the port of the other node's listener that it stands in for
//!   ports       by slot and port of the other node's listener: the proxy's port
//!   clients     by a port from which the proxy has connected: the slot and the port of the client, the server's port
//!   verdicts    by the cookie of a client's socket, modulo their number: the cookie, and the verdict
//! ```

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{Mapping, Region};

/// Name of the file in the rack directory.
pub const FILE_NAME: &str = "proxy.table";
/// The bytes `crosltb` and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"crosltb\x01");
/// The most nodes of a rack.
const NODES_MAX: usize = 32;
const PORTS: usize = 1 << 16;
const WORD_BYTES: usize = size_of::<u64>();
const NODE_BYTES: usize = 3 * WORD_BYTES;

const MAGIC_AT: usize = 0;
const PROXY_AT: usize = WORD_BYTES;
const SLOT_AT: usize = 2 * WORD_BYTES;
const NODES_AT: usize = 64;
const LISTENERS_AT: usize = 4096;
const PORTS_AT: usize = LISTENERS_AT + PORTS * WORD_BYTES;
const CLIENTS_AT: usize = PORTS_AT + NODES_MAX * PORTS * WORD_BYTES;
const VERDICTS_AT: usize = CLIENTS_AT + PORTS * WORD_BYTES;
const TABLE_BYTES: usize = VERDICTS_AT + PORTS * WORD_BYTES;
const _: () = assert!(NODES_AT + NODES_MAX * NODE_BYTES <= LISTENERS_AT);

/// Set in entries that mean something.
const VALID: u64 = 1 << 63;
const COOKIE_SHIFT: u32 = 8;
const ACCEPTED: u8 = 0xff;

/// What the other node has answered to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A server has accepted it.
    Accepted,
    /// It is refused.
    Refused(Errno),
}

impl Verdict {
    fn encode(self) -> u8 {
        match self {
            Self::Accepted => ACCEPTED,
            Self::Refused(errno) => u8::try_from(errno.raw_os_error()).unwrap_or(0).clamp(1, ACCEPTED - 1),
        }
    }

    fn decode(state: u8) -> Option<Self> {
        match state {
            0 => None,
            ACCEPTED => Some(Self::Accepted),
            errno => Some(Self::Refused(Errno::from_raw_os_error(errno.into()))),
        }
    }
}

fn listener_word(slot: u8, port: u16) -> u64 {
    VALID | u64::from(slot) << 16 | u64::from(port)
}

fn verdict_at(cookie: u64) -> usize {
    VERDICTS_AT + (cookie as usize % PORTS) * WORD_BYTES
}

fn port_at(slot: u8, port: u16) -> usize {
    PORTS_AT + (usize::from(slot) * PORTS + usize::from(port)) * WORD_BYTES
}

/// The table as programs see it. What it says is checked before it is used.
#[derive(Debug)]
pub struct ProxyTable {
    region: Region,
}

impl ProxyTable {
    /// Maps the table of a node.
    ///
    /// # Errors
    /// The error of the kernel; `INVAL` for a file that is no table, `ACCESS` for one of another user.
    pub fn open(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let mapped = (|| {
            let status = rustix::fs::fstat(&file)?;
            if status.st_uid != rustix::process::geteuid().as_raw() {
                return Err(Errno::ACCESS);
            }
            if status.st_size as u64 != TABLE_BYTES as u64 {
                return Err(Errno::INVAL);
            }
            let mapping = Mapping::sparse_read_only(std::os::fd::AsFd::as_fd(&file), TABLE_BYTES);
            let mapping = mapping.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
            Ok(Self { region: Region::of_mapping(Arc::new(mapping)) })
        })();
        // Inside of a program, `close` would be this library's own.
        socket::descriptor::hidden::close(file);
        mapped.and_then(|table| if table.load(MAGIC_AT) == MAGIC { Ok(table) } else { Err(Errno::INVAL) })
    }

    fn load(&self, at: usize) -> u64 {
        self.region.load_u64(at, Ordering::Acquire)
    }

    /// Returns the address of the proxy's sockets.
    pub fn proxy(&self) -> Option<Ipv4Addr> {
        let ip = Ipv4Addr::from(self.load(PROXY_AT) as u32);
        (ip.octets()[..2] == super::PROXY_NET).then_some(ip)
    }

    /// Returns the slot of this node.
    pub fn own_slot(&self) -> u8 {
        self.load(SLOT_AT) as u8
    }

    /// Returns the address of a node.
    pub fn node(&self, slot: u8) -> Option<IpAddr> {
        if usize::from(slot) >= NODES_MAX {
            return None;
        }
        let at = NODES_AT + usize::from(slot) * NODE_BYTES;
        match self.load(at) {
            4 => Some(Ipv4Addr::from(self.load(at + WORD_BYTES) as u32).into()),
            6 => {
                let words = [WORD_BYTES, 2 * WORD_BYTES].map(|offset| u128::from(self.load(at + offset)));
                Some(std::net::Ipv6Addr::from(words[0] << 64 | words[1]).into())
            }
            _ => None,
        }
    }

    /// Returns the slot of the node with an address.
    pub fn slot_of(&self, ip: IpAddr) -> Option<u8> {
        (0..NODES_MAX as u8).take_while(|slot| self.node(*slot).is_some()).find(|slot| self.node(*slot) == Some(ip))
    }

    /// Returns the proxy's port for a listener of another node.
    pub fn proxy_port(&self, slot: u8, port: u16) -> Option<u16> {
        if usize::from(slot) >= NODES_MAX {
            return None;
        }
        let word = self.load(port_at(slot, port));
        (word & VALID != 0).then_some(word as u16)
    }

    /// Returns the listener of another node that a port of the proxy stands in for.
    pub fn remote_listener(&self, proxy_port: u16) -> Option<SocketAddr> {
        let word = self.load(LISTENERS_AT + usize::from(proxy_port) * WORD_BYTES);
        let ip = self.node((word >> 16) as u8).filter(|_| word & VALID != 0)?;
        Some(SocketAddr::new(ip, word as u16))
    }

    /// Returns the client of another node for which the proxy has connected from a port to a server's port.
    pub fn client(&self, source_port: u16, server_port: u16) -> Option<SocketAddr> {
        let word = self.load(CLIENTS_AT + usize::from(source_port) * WORD_BYTES);
        let ip = self.node((word >> 32) as u8).filter(|_| word & VALID != 0 && word as u16 == server_port)?;
        Some(SocketAddr::new(ip, (word >> 16) as u16))
    }

    /// Returns the verdict about a client's connection, or the word to wait at until there is one.
    pub fn verdict(&self, cookie: u64) -> Result<Verdict, VerdictWord<'_>> {
        let at = verdict_at(cookie);
        let word = self.load(at);
        let found = if word >> COOKIE_SHIFT == cookie << COOKIE_SHIFT >> COOKIE_SHIFT { word as u8 } else { 0 };
        Verdict::decode(found).ok_or(VerdictWord { region: &self.region, at, word })
    }
}

/// A word that changes with the next verdict.
#[derive(Debug)]
pub struct VerdictWord<'a> {
    region: &'a Region,
    at: usize,
    word: u64,
}

const _: () = assert!(cfg!(target_endian = "little"), "the first half of a word has its lowest bytes");

impl VerdictWord<'_> {
    /// Waits until the word changes, for at most this time.
    ///
    /// # Errors
    /// `INTR` if a signal handler has run.
    pub fn wait(&self, limit_ns: u64) -> Result<(), Errno> {
        const FUTEX_WAIT: usize = 0;
        let limit = libc::timespec {
            tv_sec: (limit_ns / 1_000_000_000) as libc::time_t,
            tv_nsec: (limit_ns % 1_000_000_000) as libc::c_long,
        };
        let address = self.region.pointer(self.at, WORD_BYTES).as_ptr().expose_provenance();
        let arguments = [address, FUTEX_WAIT, self.word as u32 as usize, (&raw const limit).expose_provenance(), 0, 0];
        // SAFETY: the word is mapped, and the time is a local.
        let result = unsafe { socket::process::system::raw_syscall(libc::SYS_futex, arguments) };
        if result == -(libc::EINTR as isize) { Err(Errno::INTR) } else { Ok(()) }
    }
}

/// The table as the proxy writes it.
#[derive(Debug)]
pub struct TableWriter {
    region: Region,
}

impl TableWriter {
    /// Creates the table of a node, or clears that of an earlier proxy.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn create(path: &Path, own_slot: u8, proxy: Ipv4Addr) -> Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, TABLE_BYTES as u64)?;
        let mapping = Mapping::sparse(std::os::fd::AsFd::as_fd(&file), TABLE_BYTES);
        let mapping = mapping.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
        let table = Self { region: Region::of_mapping(Arc::new(mapping)) };
        // Pages that programs have mapped are cleared in place.
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let begin = LISTENERS_AT as u64;
        if rustix::fs::fallocate(&file, punch, begin, TABLE_BYTES as u64 - begin).is_err() {
            (LISTENERS_AT..TABLE_BYTES).step_by(WORD_BYTES).for_each(|at| table.store(at, 0));
        }
        table.store(PROXY_AT, u32::from(proxy).into());
        table.store(SLOT_AT, own_slot.into());
        table.store(MAGIC_AT, MAGIC);
        Ok(table)
    }

    fn store(&self, at: usize, word: u64) {
        self.region.store_u64(at, word, Ordering::Release);
    }

    /// Sets the address of a node.
    pub fn set_node(&self, slot: u8, ip: IpAddr) {
        let at = NODES_AT + usize::from(slot) * NODE_BYTES;
        if usize::from(slot) >= NODES_MAX {
            return;
        }
        match ip {
            IpAddr::V4(v4) => {
                self.store(at + WORD_BYTES, u32::from(v4).into());
                self.store(at, 4);
            }
            IpAddr::V6(v6) => {
                self.store(at + WORD_BYTES, (u128::from(v6) >> 64) as u64);
                self.store(at + 2 * WORD_BYTES, u128::from(v6) as u64);
                self.store(at, 6);
            }
        }
    }

    /// Notes that a port of the proxy stands in for a listener of another node.
    pub fn set_listener(&self, proxy_port: u16, slot: u8, port: u16) {
        if usize::from(slot) < NODES_MAX {
            self.set_stands_for(proxy_port, slot, port);
            self.store(port_at(slot, port), VALID | u64::from(proxy_port));
        }
    }

    /// Notes that connections to a port of the proxy are connections to a listener of another node, though nobody can
    /// connect there any more.
    pub fn set_stands_for(&self, proxy_port: u16, slot: u8, port: u16) {
        self.store(LISTENERS_AT + usize::from(proxy_port) * WORD_BYTES, listener_word(slot, port));
    }

    /// Notes that nobody can connect to a listener of another node any more. What its connections stand for stays.
    pub fn clear_listener(&self, slot: u8, port: u16) {
        if usize::from(slot) < NODES_MAX {
            self.store(port_at(slot, port), 0);
        }
    }

    /// Notes the client for which the proxy connects from a port to a server of this node.
    pub fn set_client(&self, source_port: u16, slot: u8, client_port: u16, server_port: u16) {
        let word = VALID | u64::from(slot) << 32 | u64::from(client_port) << 16 | u64::from(server_port);
        self.store(CLIENTS_AT + usize::from(source_port) * WORD_BYTES, word);
    }

    /// Publishes the verdict about a client's connection, and wakes the client.
    pub fn publish_verdict(&self, cookie: u64, verdict: Verdict) {
        const FUTEX_WAKE: usize = 1;
        let at = verdict_at(cookie);
        self.store(at, cookie << COOKIE_SHIFT | u64::from(verdict.encode()));
        let address = self.region.pointer(at, WORD_BYTES).as_ptr().expose_provenance();
        // SAFETY: the word is mapped.
        let _ = unsafe {
            socket::process::system::raw_syscall(libc::SYS_futex, [address, FUTEX_WAKE, i32::MAX as usize, 0, 0, 0])
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_read_what_the_proxy_has_written_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("table-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(FILE_NAME);
        assert_eq!(ProxyTable::open(&path).unwrap_err(), Errno::NOENT);
        std::fs::write(&path, "no table").unwrap();
        assert_eq!(ProxyTable::open(&path).unwrap_err(), Errno::INVAL);
        let writer = TableWriter::create(&path, 1, Ipv4Addr::new(127, 78, 3, 4)).unwrap();
        let nodes: [IpAddr; 2] = [[127, 77, 0, 1].into(), "fd00:77::2".parse().unwrap()];
        (0..).zip(nodes).for_each(|(slot, ip)| writer.set_node(slot, ip));
        let table = ProxyTable::open(&path).unwrap();
        assert_eq!((table.proxy(), table.own_slot()), (Some(Ipv4Addr::new(127, 78, 3, 4)), 1));
        assert_eq!(
            [table.node(0), table.node(1), table.node(2), table.node(99)],
            [Some(nodes[0]), Some(nodes[1]), None, None]
        );
        assert_eq!((table.slot_of(nodes[1]), table.slot_of([10, 0, 0, 1].into())), (Some(1), None));

        assert_eq!((table.proxy_port(0, 80), table.remote_listener(5000)), (None, None));
        writer.set_listener(5000, 0, 80);
        assert_eq!((table.proxy_port(0, 80), table.proxy_port(99, 80)), (Some(5000), None));
        assert_eq!(table.remote_listener(5000), Some(SocketAddr::new(nodes[0], 80)));
        writer.clear_listener(0, 80);
        assert_eq!((table.proxy_port(0, 80), table.remote_listener(5000).is_some()), (None, true));

        writer.set_client(6000, 0, 40000, 80);
        assert_eq!(table.client(6000, 80), Some(SocketAddr::new(nodes[0], 40000)));
        assert_eq!((table.client(6000, 81), table.client(6001, 80)), (None, None));
        // A hostile slot.
        writer.set_client(6000, 200, 40000, 80);
        assert_eq!(table.client(6000, 80), None);

        assert!(table.verdict(7).is_err());
        writer.publish_verdict(7, Verdict::Refused(Errno::CONNREFUSED));
        assert_eq!(table.verdict(7).ok(), Some(Verdict::Refused(Errno::CONNREFUSED)));
        assert!(table.verdict(7 + PORTS as u64).is_err(), "another cookie with the same place");
        writer.publish_verdict(7 + PORTS as u64, Verdict::Accepted);
        assert_eq!(table.verdict(7 + PORTS as u64).ok(), Some(Verdict::Accepted));
        drop(TableWriter::create(&path, 1, Ipv4Addr::new(127, 78, 3, 4)).unwrap());
        assert!(table.verdict(7 + PORTS as u64).is_err(), "the next proxy clears the table in place");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
