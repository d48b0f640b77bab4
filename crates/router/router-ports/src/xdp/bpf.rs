//! The few calls of `bpf(2)` that a port needs, and its program's instructions.

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use packet::ethernet::MacAddress;

use crate::interface::InterfaceIndex;
use crate::system::checked;

/// `linux/bpf.h`.
const MAP_CREATE: c_int = 0;
const MAP_UPDATE: c_int = 2;
const MAP_DELETE: c_int = 3;
const PROGRAM_LOAD: c_int = 5;
const LINK_CREATE: c_int = 28;
const MAP_HASH: u32 = 1;
const MAP_SOCKETS: u32 = 17;
const PROGRAM_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const PASS: i32 = 2;
const HELPER_LOOKUP: i32 = 1;
const HELPER_REDIRECT: i32 = 51;

/// Addresses of one node, of all its ports.
const ADDRESSES_MAX: u32 = 4096;

/// Where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver, before the kernel has made a packet of it.
    Driver = 4,
    /// Behind the driver; every interface can.
    Generic = 2,
}

/// The union `bpf_attr`, as far as it is used here.
#[repr(C, align(8))]
struct Attributes([u8; 128]);

impl Attributes {
    fn new() -> Attributes {
        Attributes([0; 128])
    }

    fn word(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn fd(self, at: usize, fd: impl AsFd) -> Self {
        self.word(at, fd.as_fd().as_raw_fd() as u32)
    }

    fn pointer<T: ?Sized>(mut self, at: usize, to: &T) -> Self {
        let address = std::ptr::from_ref(to).cast::<u8>() as u64;
        self.0[at..at + 8].copy_from_slice(&address.to_ne_bytes());
        self
    }
}

/// # Safety
/// The pointers in `attributes` point to what the command reads and writes there, and that is alive.
unsafe fn call(command: c_int, attributes: &mut Attributes) -> io::Result<c_int> {
    let bytes = size_of::<Attributes>();
    // SAFETY: `attributes` is as long as is said, and as its owner promises.
    checked(unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, bytes) } as c_int)
}

/// # Safety
/// As [`call`], and the command makes a descriptor.
unsafe fn call_for_fd(command: c_int, attributes: &mut Attributes) -> io::Result<OwnedFd> {
    // SAFETY: as our caller promises; the descriptor is new, and nobody else's.
    unsafe { call(command, attributes).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

fn create_map(kind: u32, key_bytes: u32, value_bytes: u32, entries: u32) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::new().word(0, kind).word(4, key_bytes).word(8, value_bytes).word(12, entries);
    // SAFETY: there are no pointers in it.
    unsafe { call_for_fd(MAP_CREATE, &mut attributes) }
}

/// Puts or replaces an entry. `K` and `V` are as long as the map's keys and values.
///
/// # Safety
/// They are.
unsafe fn update<K, V>(map: impl AsFd, key: &K, value: &V) -> io::Result<()> {
    let mut attributes = Attributes::new().fd(0, map).pointer(8, key).pointer(16, value);
    // SAFETY: key and value are alive, and as long as the kernel reads.
    unsafe { call(MAP_UPDATE, &mut attributes) }.map(|_| ())
}

/// The addresses of a node, which its kernel answers to: what is for them is left to it. Clones are the same set.
#[derive(Clone, Debug)]
pub struct LocalAddresses {
    map: Result<Arc<OwnedFd>, Arc<io::Error>>,
}

impl Default for LocalAddresses {
    fn default() -> Self {
        LocalAddresses::new()
    }
}

impl LocalAddresses {
    /// None yet. Where the kernel refuses a map, there is no AF_XDP, and nothing to be kept.
    pub fn new() -> LocalAddresses {
        let map = create_map(MAP_HASH, 16, 1, ADDRESSES_MAX);
        LocalAddresses { map: map.map(Arc::new).map_err(Arc::new) }
    }

    /// Adds an address.
    pub fn insert(&self, address: IpAddr) -> io::Result<()> {
        let Ok(map) = &self.map else { return Ok(()) };
        // SAFETY: the map was made with keys of 16 bytes and values of one.
        unsafe { update(map.as_ref(), &key(address), &1u8) }
    }

    /// Takes an address away; one that is not there already is.
    pub fn remove(&self, address: IpAddr) -> io::Result<()> {
        let Ok(map) = &self.map else { return Ok(()) };
        let key = key(address);
        let mut attributes = Attributes::new().fd(0, map.as_ref()).pointer(8, &key);
        // SAFETY: the key is alive and has 16 bytes, as the map's have.
        match unsafe { call(MAP_DELETE, &mut attributes) } {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) fn map(&self) -> io::Result<BorrowedFd<'_>> {
        match &self.map {
            Ok(map) => Ok(map.as_fd()),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        }
    }
}

/// IPv4 addresses as IPv6 has them.
fn key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Sockets of an interface, by its queues.
pub struct Sockets {
    map: OwnedFd,
}

impl Sockets {
    pub fn new(queues: u32) -> io::Result<Sockets> {
        Ok(Sockets { map: create_map(MAP_SOCKETS, 4, 4, queues)? })
    }

    pub fn set(&self, queue: u32, socket: impl AsFd) -> io::Result<()> {
        // SAFETY: the map was made with keys and values of 4 bytes.
        unsafe { update(&self.map, &queue, &socket.as_fd().as_raw_fd()) }
    }
}

/// One instruction: `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// A program as it is written: jumps go forward to one of few places.
#[derive(Default)]
struct Assembly {
    instructions: Vec<Instruction>,
    jumps: Vec<(usize, Place)>,
    places: Vec<(Place, usize)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Type,
    V4,
    V6,
    LookUp,
    Socket,
    Kernel,
}

/// `BPF_MEM` of `BPF_W`, `_H`, `_DW`.
const LOAD_WORD: u8 = 0x61;
const LOAD_HALF: u8 = 0x69;
const LOAD_DOUBLE: u8 = 0x79;
const STORE_WORD: u8 = 0x63;
const STORE_DOUBLE: u8 = 0x7b;
const STORE_WORD_CONSTANT: u8 = 0x62;
const STORE_DOUBLE_CONSTANT: u8 = 0x7a;
const MOVE: u8 = 0xbf;
const MOVE_CONSTANT: u8 = 0xb7;
const ADD_CONSTANT: u8 = 0x07;
const AND_CONSTANT: u8 = 0x57;
const IF_EQUAL: u8 = 0x15;
const IF_OTHER: u8 = 0x55;
/// `BPF_JMP32`.
const IF_OTHER_WORD: u8 = 0x56;
const IF_BEYOND: u8 = 0x2d;
const GO: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const LOAD_MAP: u8 = 0x18;

impl Assembly {
    fn put(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        self.instructions.push(Instruction { code, registers: from << 4 | to, offset, immediate });
    }

    fn jump(&mut self, code: u8, left: u8, right: u8, immediate: i32, place: Place) {
        self.jumps.push((self.instructions.len(), place));
        self.put(code, left, right, 0, immediate);
    }

    fn map(&mut self, register: u8, map: BorrowedFd) {
        self.put(LOAD_MAP, register, 1, 0, map.as_raw_fd());
        self.put(0, 0, 0, 0, 0);
    }

    fn here(&mut self, place: Place) {
        self.places.push((place, self.instructions.len()));
    }

    /// Register 2 is the frame's start, 3 its end: to the kernel when it has not `bytes`. Register 4 is used.
    fn need(&mut self, bytes: i32) {
        self.put(MOVE, 4, 2, 0, 0);
        self.put(ADD_CONSTANT, 4, 0, 0, bytes);
        self.jump(IF_BEYOND, 4, 3, 0, Place::Kernel);
    }

    fn finished(mut self) -> Vec<Instruction> {
        for (at, place) in &self.jumps {
            let target = self.places.iter().find(|(other, _)| other == place).map_or(0, |(_, target)| *target);
            assert!(target > *at, "a jump forward to nowhere");
            self.instructions[*at].offset = (target - at - 1) as i16;
        }
        self.instructions
    }
}

/// A number of 16 bits as a load from a frame gives it.
fn as_loaded(number: u16) -> i32 {
    i32::from(number.to_be())
}

/// IPv4 and IPv6 frames to `mac` that are not for an address of this node go to the socket of their queue, and so does
/// everything to `mac` in one of `vlans`, of which the kernel knows nothing; all else, and what has no socket, goes to
/// the kernel: `XDP_PASS`, or `otherwise`.
fn program(
    mac: MacAddress,
    vlans: &[u16],
    addresses: BorrowedFd,
    sockets: BorrowedFd,
    otherwise: i32,
) -> Vec<Instruction> {
    let mut it = Assembly::default();
    let MacAddress([a, b, c, d, e, f]) = mac;
    it.put(MOVE, 6, 1, 0, 0);
    it.put(LOAD_WORD, 2, 6, 0, 0);
    it.put(LOAD_WORD, 3, 6, 4, 0);
    it.need(14);
    it.put(LOAD_WORD, 5, 2, 0, 0);
    it.jump(IF_OTHER_WORD, 5, 0, i32::from_ne_bytes([a, b, c, d]), Place::Kernel);
    it.put(LOAD_HALF, 5, 2, 4, 0);
    it.jump(IF_OTHER, 5, 0, i32::from(u16::from_ne_bytes([e, f])), Place::Kernel);
    it.put(LOAD_HALF, 5, 2, 12, 0);
    it.jump(IF_OTHER, 5, 0, as_loaded(0x8100), Place::Type);
    it.need(18);
    it.put(LOAD_HALF, 5, 2, 14, 0);
    it.put(AND_CONSTANT, 5, 0, 0, as_loaded(0x0fff));
    for id in vlans {
        it.jump(IF_EQUAL, 5, 0, as_loaded(*id), Place::Socket);
    }
    it.jump(GO, 0, 0, 0, Place::Kernel);
    it.here(Place::Type);
    it.jump(IF_EQUAL, 5, 0, as_loaded(0x0800), Place::V4);
    it.jump(IF_EQUAL, 5, 0, as_loaded(0x86dd), Place::V6);
    it.jump(GO, 0, 0, 0, Place::Kernel);

    // The destination goes to the stack, as the map has it.
    it.here(Place::V4);
    it.need(34);
    it.put(LOAD_WORD, 5, 2, 30, 0);
    it.put(STORE_DOUBLE_CONSTANT, 10, 0, -16, 0);
    it.put(STORE_WORD_CONSTANT, 10, 0, -8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
    it.put(STORE_WORD, 10, 5, -4, 0);
    it.jump(GO, 0, 0, 0, Place::LookUp);
    it.here(Place::V6);
    it.need(54);
    // Addresses of one link are nobody's but its hosts'.
    it.put(LOAD_HALF, 5, 2, 38, 0);
    it.put(AND_CONSTANT, 5, 0, 0, as_loaded(0xffc0));
    it.jump(IF_EQUAL, 5, 0, as_loaded(0xfe80), Place::Kernel);
    it.put(LOAD_DOUBLE, 5, 2, 38, 0);
    it.put(STORE_DOUBLE, 10, 5, -16, 0);
    it.put(LOAD_DOUBLE, 5, 2, 46, 0);
    it.put(STORE_DOUBLE, 10, 5, -8, 0);

    it.here(Place::LookUp);
    it.map(1, addresses);
    it.put(MOVE, 2, 10, 0, 0);
    it.put(ADD_CONSTANT, 2, 0, 0, -16);
    it.put(CALL, 0, 0, 0, HELPER_LOOKUP);
    it.jump(IF_OTHER, 0, 0, 0, Place::Kernel);
    it.here(Place::Socket);
    it.map(1, sockets);
    it.put(LOAD_WORD, 2, 6, 16, 0);
    it.put(MOVE_CONSTANT, 3, 0, 0, otherwise);
    it.put(CALL, 0, 0, 0, HELPER_REDIRECT);
    it.put(EXIT, 0, 0, 0, 0);
    it.here(Place::Kernel);
    it.put(MOVE_CONSTANT, 0, 0, 0, PASS);
    it.put(EXIT, 0, 0, 0, 0);
    it.finished()
}

fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let license = c"Apache-2.0";
    let mut attributes = Attributes::new()
        .word(0, PROGRAM_XDP)
        .word(4, instructions.len() as u32)
        .pointer(8, instructions)
        .pointer(16, license);
    // SAFETY: as many instructions as are said, and a string that ends with a zero; both are alive.
    unsafe { call_for_fd(PROGRAM_LOAD, &mut attributes) }
}

/// A program at an interface, until it is dropped.
pub struct Attached {
    _link: OwnedFd,
    pub mode: Mode,
}

/// Attaches a port's program, in the driver where that can. An interface has at most one.
pub fn attach(
    interface: InterfaceIndex,
    mac: MacAddress,
    vlans: &[u16],
    addresses: &LocalAddresses,
    sockets: &Sockets,
) -> io::Result<Attached> {
    let program = load(&program(mac, vlans, addresses.map()?, sockets.map.as_fd(), PASS))?;
    let attach = |mode: Mode| {
        let mut attributes =
            Attributes::new().fd(0, &program).word(4, interface.0).word(8, ATTACH_XDP).word(12, mode as u32);
        // SAFETY: there are no pointers in it.
        unsafe { call_for_fd(LINK_CREATE, &mut attributes) }.map(|link| Attached { _link: link, mode })
    };
    match attach(Mode::Driver) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(error),
        Err(_) => attach(Mode::Generic),
        attached => attached,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM_RUN: c_int = 10;
    const MAC: MacAddress = MacAddress([2, 0, 0x80, 0xff, 0x90, 7]);
    /// What the program says instead of handing a frame to a socket, in these tests: `XDP_DROP`.
    const TAKEN: i32 = 1;

    /// What the kernel makes of a frame, by the number that the program returns.
    fn run(program: &OwnedFd, frame: &[u8]) -> i32 {
        let mut attributes =
            Attributes::new().fd(0, program).word(8, frame.len() as u32).pointer(16, frame).word(32, 1);
        // SAFETY: the frame is alive and as long as is said; nothing is written back but the attributes themselves.
        unsafe { call(PROGRAM_RUN, &mut attributes) }.unwrap();
        i32::from_ne_bytes(*attributes.0[4..].first_chunk().unwrap())
    }

    fn frame(mac: MacAddress, tag: Option<u8>, ethertype: u16, packet: &[u8]) -> Vec<u8> {
        let mut frame = [&mac.0[..], &[2, 0, 0, 0, 0, 1]].concat();
        frame.extend(tag.map_or(Vec::new(), |id| vec![0x81, 0, 0xb0, id]));
        frame.extend(ethertype.to_be_bytes());
        frame.extend(packet);
        frame
    }

    fn to_v4(address: [u8; 4]) -> Vec<u8> {
        [&[0x45; 16][..], &address].concat()
    }

    fn to_v6(address: &str) -> Vec<u8> {
        let address: std::net::Ipv6Addr = address.parse().unwrap();
        [&[0x60; 24][..], &address.octets()].concat()
    }

    const OTHER_MAC: MacAddress = MacAddress([2, 0, 0x80, 0xff, 0x90, 8]);

    #[test]
    fn transit_is_taken_and_all_else_left_to_the_kernel_but_what_is_of_a_vlan() {
        let addresses = LocalAddresses::new();
        if let Err(error) = addresses.map() {
            println!("transit_is_taken_and_all_else_left is skipped: no BPF ({error}); run it as root");
            return;
        }
        addresses.insert("10.0.0.1".parse().unwrap()).unwrap();
        addresses.insert("fd00::1".parse().unwrap()).unwrap();
        addresses.insert("10.0.0.3".parse().unwrap()).unwrap();
        addresses.remove("10.0.0.3".parse().unwrap()).unwrap();
        addresses.remove("10.0.0.3".parse().unwrap()).unwrap();
        let sockets = Sockets::new(1).unwrap();
        let vlans = [6, 7];
        let program = load(&program(MAC, &vlans, addresses.map().unwrap(), sockets.map.as_fd(), TAKEN)).unwrap();
        // Without a tag; in a VLAN of the router's; in another one, which is the kernel's whatever it holds.
        for tag in [None, Some(7), Some(8)] {
            let (taken, passed, elsewhere) = match tag {
                None => (TAKEN, PASS, PASS),
                Some(7) => (TAKEN, TAKEN, PASS),
                Some(_) => (PASS, PASS, PASS),
            };
            for (packet, verdict) in [
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 2])), taken),
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 3])), taken),
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 1])), passed),
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 2])[..19]), passed),
                (frame(MAC, tag, 0x86dd, &to_v6("fd00::2")), taken),
                (frame(MAC, tag, 0x86dd, &to_v6("fd00::1")), passed),
                (frame(MAC, tag, 0x86dd, &to_v6("febf::2")), passed),
                (frame(MAC, tag, 0x86dd, &to_v6("::ffff:10.0.0.2")), taken),
                (frame(MAC, tag, 0x86dd, &to_v6("fd00::2")[..39]), passed),
                (frame(MAC, tag, 0x0806, &[0; 46]), passed),
                (frame(MAC, tag, 0x88cc, &[0; 46]), passed),
                (frame(OTHER_MAC, tag, 0x0800, &to_v4([10, 0, 0, 2])), elsewhere),
                (frame(MacAddress([3, 0, 0x80, 0xff, 0x90, 7]), tag, 0x0800, &to_v4([10, 0, 0, 2])), elsewhere),
                (frame(MacAddress::BROADCAST, tag, 0x0800, &to_v4([10, 0, 0, 2])), elsewhere),
                (frame(MAC, tag, 0x8100, &[0; 2]), passed),
            ] {
                assert_eq!(run(&program, &packet), verdict, "{packet:02x?}");
            }
        }
    }
}
