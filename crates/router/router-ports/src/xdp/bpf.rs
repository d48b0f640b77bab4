//! The `bpf(2)` commands that a port needs, and the instructions of its XDP program.

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
const PROGRAM_QUERY: c_int = 16;
const LINK_CREATE: c_int = 28;
const MAP_HASH: u32 = 1;
const MAP_SOCKETS: u32 = 17;
const PROGRAM_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
/// The next number is egress.
const ATTACH_TCX_INGRESS: u32 = 46;
/// Offset of the number of programs in the attributes of a query.
const TCX_COUNT_AT: usize = 24;
/// Offset of the kind of attachment in the attributes of loading a program, and the kind of programs without one.
const ATTACH_AT: usize = 68;
const ATTACH_ANY: u32 = 0;
const PASS: i32 = 2;
const HELPER_LOOKUP: i32 = 1;
const HELPER_REDIRECT: i32 = 51;

/// The largest number of addresses of a node, over all its ports.
const ADDRESSES_MAX: u32 = 4096;

/// Where an XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver, before the kernel allocates a packet.
    Driver = 4,
    /// After the driver; every interface supports it.
    Generic = 2,
}

/// The union `bpf_attr`, as far as it is used here.
#[repr(C, align(8))]
pub(super) struct Attributes([u8; 128]);

impl Attributes {
    pub fn new() -> Attributes {
        Attributes([0; 128])
    }

    pub fn word(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    /// Returns what the kernel has written.
    pub fn word_at(&self, at: usize) -> u32 {
        self.0[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    }

    pub fn fd(self, at: usize, fd: impl AsFd) -> Self {
        self.word(at, fd.as_fd().as_raw_fd() as u32)
    }

    fn pointer<T: ?Sized>(mut self, at: usize, to: &T) -> Self {
        let address = std::ptr::from_ref(to).cast::<u8>() as u64;
        self.0[at..at + 8].copy_from_slice(&address.to_ne_bytes());
        self
    }

    /// Like [`Attributes::pointer`], for memory that the kernel writes.
    pub fn pointer_mut<T: ?Sized>(mut self, at: usize, to: &mut T) -> Self {
        let address = std::ptr::from_mut(to).cast::<u8>() as u64;
        self.0[at..at + 8].copy_from_slice(&address.to_ne_bytes());
        self
    }
}

/// # Safety
/// The pointers in `attributes` refer to live memory of the kind and size that the command reads and writes.
pub(super) unsafe fn call(command: c_int, attributes: &mut Attributes) -> io::Result<c_int> {
    let bytes = size_of::<Attributes>();
    // SAFETY: `bytes` is the size of `attributes`, and the caller guarantees that the pointers in it are valid for the
    // command.
    checked(unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, bytes) } as c_int)
}

/// # Safety
/// The requirements of [`call`] hold, and the command returns a new descriptor.
pub(super) unsafe fn call_for_fd(command: c_int, attributes: &mut Attributes) -> io::Result<OwnedFd> {
    // SAFETY: the pointers in `attributes` are valid for the command, and the descriptor that it returns is new, so no
    // other code owns it: both are requirements of this function.
    unsafe { call(command, attributes).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// Returns the number of programs that `tcx` runs for packets that an interface receives, or sends. A kernel without
/// `tcx` has none.
pub fn tcx_programs(interface: InterfaceIndex, is_egress: bool) -> u32 {
    let mut attributes = Attributes::new().word(0, interface.0).word(4, ATTACH_TCX_INGRESS + u32::from(is_egress));
    // SAFETY: the array of program identifiers is absent and its length is 0; there are no other pointers.
    let asked = unsafe { call(PROGRAM_QUERY, &mut attributes) };
    asked.map_or(0, |_| attributes.word_at(TCX_COUNT_AT))
}

fn create_map(kind: u32, key_bytes: u32, value_bytes: u32, entries: u32) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::new().word(0, kind).word(4, key_bytes).word(8, value_bytes).word(12, entries);
    // SAFETY: these attributes contain no pointers, and `MAP_CREATE` returns a new descriptor.
    unsafe { call_for_fd(MAP_CREATE, &mut attributes) }
}

/// Adds or replaces an entry.
///
/// # Safety
/// `K` and `V` have the sizes of the map's keys and values.
unsafe fn update<K, V>(map: impl AsFd, key: &K, value: &V) -> io::Result<()> {
    let mut attributes = Attributes::new().fd(0, map).pointer(8, key).pointer(16, value);
    // SAFETY: key and value are borrowed during the call, and the caller guarantees that they have the sizes that the
    // kernel reads.
    unsafe { call(MAP_UPDATE, &mut attributes) }.map(|_| ())
}

/// The set of addresses of a node; packets to them are passed to its kernel. Clones share the set.
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
    /// Creates an empty set. If the kernel refuses the map, AF_XDP is not available and the set has no effect.
    pub fn new() -> LocalAddresses {
        let map = create_map(MAP_HASH, 16, 1, ADDRESSES_MAX);
        LocalAddresses { map: map.map(Arc::new).map_err(Arc::new) }
    }

    /// Adds an address.
    pub fn insert(&self, address: IpAddr) -> io::Result<()> {
        let Ok(map) = &self.map else { return Ok(()) };
        // SAFETY: the map was created with keys of 16 bytes and values of one byte, as passed here.
        unsafe { update(map.as_ref(), &key(address), &1u8) }
    }

    /// Removes an address; an absent one is ignored.
    pub fn remove(&self, address: IpAddr) -> io::Result<()> {
        let Ok(map) = &self.map else { return Ok(()) };
        let key = key(address);
        let mut attributes = Attributes::new().fd(0, map.as_ref()).pointer(8, &key);
        // SAFETY: the only pointer refers to `key`, which is alive and has the 16 bytes of the map's keys.
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

/// Returns the key of an address; IPv4 addresses are mapped to IPv6.
fn key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The sockets of an interface, by queue number.
pub struct Sockets {
    map: OwnedFd,
}

impl Sockets {
    pub fn new(queues: u32) -> io::Result<Sockets> {
        Ok(Sockets { map: create_map(MAP_SOCKETS, 4, 4, queues)? })
    }

    pub fn set(&self, queue: u32, socket: impl AsFd) -> io::Result<()> {
        // SAFETY: the map was created with keys and values of 4 bytes, the sizes of the `u32` and the descriptor passed
        // here.
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

/// A program under construction, in which jumps go forward to labels.
#[derive(Default)]
struct Assembly {
    instructions: Vec<Instruction>,
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Label {
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
const JUMP_IF_EQUAL: u8 = 0x15;
const JUMP_IF_NOT_EQUAL: u8 = 0x55;
/// `BPF_JMP32`.
const JUMP_IF_WORD_NOT_EQUAL: u8 = 0x56;
const JUMP_IF_GREATER: u8 = 0x2d;
const JUMP: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const LOAD_MAP: u8 = 0x18;

impl Assembly {
    fn emit(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        self.instructions.push(Instruction { code, registers: from << 4 | to, offset, immediate });
    }

    fn jump(&mut self, code: u8, left: u8, right: u8, immediate: i32, label: Label) {
        self.jumps.push((self.instructions.len(), label));
        self.emit(code, left, right, 0, immediate);
    }

    fn map(&mut self, register: u8, map: BorrowedFd) {
        self.emit(LOAD_MAP, register, 1, 0, map.as_raw_fd());
        self.emit(0, 0, 0, 0, 0);
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.instructions.len()));
    }

    /// Jumps to the kernel label unless the frame, from register 2 to register 3, has `bytes` bytes. Uses register 4.
    fn check_length(&mut self, bytes: i32) {
        self.emit(MOVE, 4, 2, 0, 0);
        self.emit(ADD_CONSTANT, 4, 0, 0, bytes);
        self.jump(JUMP_IF_GREATER, 4, 3, 0, Label::Kernel);
    }

    fn finished(mut self) -> Vec<Instruction> {
        for (at, label) in &self.jumps {
            let target = self.labels.iter().find(|(other, _)| other == label).map_or(0, |(_, target)| *target);
            assert!(target > *at, "a jump without a label ahead");
            self.instructions[*at].offset = (target - at - 1) as i16;
        }
        self.instructions
    }
}

/// Returns a 16-bit number in the byte order in which it is loaded from a frame.
fn as_loaded(number: u16) -> i32 {
    i32::from(number.to_be())
}

/// Returns the XDP program. IPv4 and IPv6 frames to `mac` that are not for an address of this node are redirected to
/// the socket of their queue, and so are all frames to `mac` in one of `vlans`, which the kernel does not know. All
/// others go to the kernel (`XDP_PASS`), and frames without a socket get the verdict `otherwise`.
fn program(
    mac: MacAddress,
    vlans: &[u16],
    addresses: BorrowedFd,
    sockets: BorrowedFd,
    otherwise: i32,
) -> Vec<Instruction> {
    let mut assembly = Assembly::default();
    let MacAddress([a, b, c, d, e, f]) = mac;
    assembly.emit(MOVE, 6, 1, 0, 0);
    assembly.emit(LOAD_WORD, 2, 6, 0, 0);
    assembly.emit(LOAD_WORD, 3, 6, 4, 0);
    assembly.check_length(14);
    assembly.emit(LOAD_WORD, 5, 2, 0, 0);
    assembly.jump(JUMP_IF_WORD_NOT_EQUAL, 5, 0, i32::from_ne_bytes([a, b, c, d]), Label::Kernel);
    assembly.emit(LOAD_HALF, 5, 2, 4, 0);
    assembly.jump(JUMP_IF_NOT_EQUAL, 5, 0, i32::from(u16::from_ne_bytes([e, f])), Label::Kernel);
    assembly.emit(LOAD_HALF, 5, 2, 12, 0);
    assembly.jump(JUMP_IF_NOT_EQUAL, 5, 0, as_loaded(0x8100), Label::Type);
    assembly.check_length(18);
    assembly.emit(LOAD_HALF, 5, 2, 14, 0);
    assembly.emit(AND_CONSTANT, 5, 0, 0, as_loaded(0x0fff));
    for id in vlans {
        assembly.jump(JUMP_IF_EQUAL, 5, 0, as_loaded(*id), Label::Socket);
    }
    assembly.jump(JUMP, 0, 0, 0, Label::Kernel);
    assembly.label(Label::Type);
    assembly.jump(JUMP_IF_EQUAL, 5, 0, as_loaded(0x0800), Label::V4);
    assembly.jump(JUMP_IF_EQUAL, 5, 0, as_loaded(0x86dd), Label::V6);
    assembly.jump(JUMP, 0, 0, 0, Label::Kernel);

    // The destination is stored on the stack in the format of the map's keys.
    assembly.label(Label::V4);
    assembly.check_length(34);
    assembly.emit(LOAD_WORD, 5, 2, 30, 0);
    assembly.emit(STORE_DOUBLE_CONSTANT, 10, 0, -16, 0);
    assembly.emit(STORE_WORD_CONSTANT, 10, 0, -8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
    assembly.emit(STORE_WORD, 10, 5, -4, 0);
    assembly.jump(JUMP, 0, 0, 0, Label::LookUp);
    assembly.label(Label::V6);
    assembly.check_length(54);
    // Link-local addresses belong to the hosts of the link only.
    assembly.emit(LOAD_HALF, 5, 2, 38, 0);
    assembly.emit(AND_CONSTANT, 5, 0, 0, as_loaded(0xffc0));
    assembly.jump(JUMP_IF_EQUAL, 5, 0, as_loaded(0xfe80), Label::Kernel);
    assembly.emit(LOAD_DOUBLE, 5, 2, 38, 0);
    assembly.emit(STORE_DOUBLE, 10, 5, -16, 0);
    assembly.emit(LOAD_DOUBLE, 5, 2, 46, 0);
    assembly.emit(STORE_DOUBLE, 10, 5, -8, 0);

    assembly.label(Label::LookUp);
    assembly.map(1, addresses);
    assembly.emit(MOVE, 2, 10, 0, 0);
    assembly.emit(ADD_CONSTANT, 2, 0, 0, -16);
    assembly.emit(CALL, 0, 0, 0, HELPER_LOOKUP);
    assembly.jump(JUMP_IF_NOT_EQUAL, 0, 0, 0, Label::Kernel);
    assembly.label(Label::Socket);
    assembly.map(1, sockets);
    assembly.emit(LOAD_WORD, 2, 6, 16, 0);
    assembly.emit(MOVE_CONSTANT, 3, 0, 0, otherwise);
    assembly.emit(CALL, 0, 0, 0, HELPER_REDIRECT);
    assembly.emit(EXIT, 0, 0, 0, 0);
    assembly.label(Label::Kernel);
    assembly.emit(MOVE_CONSTANT, 0, 0, 0, PASS);
    assembly.emit(EXIT, 0, 0, 0, 0);
    assembly.finished()
}

fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    load_as(PROGRAM_XDP, ATTACH_ANY, instructions)
}

fn load_as(kind: u32, attach: u32, instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let license = c"Apache-2.0";
    let mut attributes = Attributes::new()
        .word(0, kind)
        .word(ATTACH_AT, attach)
        .word(4, instructions.len() as u32)
        .pointer(8, instructions)
        .pointer(16, license);
    // SAFETY: the attributes refer to `instructions` with their number and to a string that ends with a zero; both are
    // alive.
    unsafe { call_for_fd(PROGRAM_LOAD, &mut attributes) }
}

/// A program that is attached to an interface until it is dropped.
pub struct Attached {
    _link: OwnedFd,
    pub mode: Mode,
}

/// Attaches a port's program, in the driver if possible. An interface has at most one program.
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
        // SAFETY: these attributes contain no pointers, and `LINK_CREATE` returns a new descriptor.
        unsafe { call_for_fd(LINK_CREATE, &mut attributes) }.map(|link| Attached { _link: link, mode })
    };
    match attach(Mode::Driver) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(error),
        Err(_) => attach(Mode::Generic),
        attached => attached,
    }
}

/// Loads a program of another kind.
#[cfg(test)]
pub(super) fn load_program_that_returns(value: i32, kind: u32, attach: u32) -> io::Result<OwnedFd> {
    let mut assembly = Assembly { instructions: Vec::new(), jumps: Vec::new(), labels: Vec::new() };
    assembly.emit(MOVE_CONSTANT, 0, 0, 0, value);
    assembly.emit(EXIT, 0, 0, 0, 0);
    load_as(kind, attach, &assembly.finished())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM_RUN: c_int = 10;
    const MAC: MacAddress = MacAddress([2, 0, 0x80, 0xff, 0x90, 7]);
    /// The verdict of the program for redirected frames in these tests: `XDP_DROP`.
    const REDIRECTED: i32 = 1;

    /// Returns the verdict of the program for a frame.
    fn run(program: &OwnedFd, frame: &[u8]) -> i32 {
        let mut attributes =
            Attributes::new().fd(0, program).word(8, frame.len() as u32).pointer(16, frame).word(32, 1);
        // SAFETY: the frame is alive and has the given length; the kernel writes only the attributes themselves.
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
    fn transit_and_vlan_frames_are_redirected_and_others_passed_to_the_kernel() {
        let addresses = LocalAddresses::new();
        if let Err(error) = addresses.map() {
            println!("transit_and_vlan_frames_are_redirected is skipped: no BPF ({error}); run it as root");
            return;
        }
        addresses.insert("10.0.0.1".parse().unwrap()).unwrap();
        addresses.insert("fd00::1".parse().unwrap()).unwrap();
        addresses.insert("10.0.0.3".parse().unwrap()).unwrap();
        addresses.remove("10.0.0.3".parse().unwrap()).unwrap();
        addresses.remove("10.0.0.3".parse().unwrap()).unwrap();
        let sockets = Sockets::new(1).unwrap();
        let vlans = [6, 7];
        let program = load(&program(MAC, &vlans, addresses.map().unwrap(), sockets.map.as_fd(), REDIRECTED)).unwrap();
        // Frames without a tag, in a VLAN of the router, and in another one, which belongs to the kernel.
        for tag in [None, Some(7), Some(8)] {
            let (redirected, passed, other_mac) = match tag {
                None => (REDIRECTED, PASS, PASS),
                Some(7) => (REDIRECTED, REDIRECTED, PASS),
                Some(_) => (PASS, PASS, PASS),
            };
            for (packet, verdict) in [
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 2])), redirected),
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 3])), redirected),
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 1])), passed),
                (frame(MAC, tag, 0x0800, &to_v4([10, 0, 0, 2])[..19]), passed),
                (frame(MAC, tag, 0x86dd, &to_v6("fd00::2")), redirected),
                (frame(MAC, tag, 0x86dd, &to_v6("fd00::1")), passed),
                (frame(MAC, tag, 0x86dd, &to_v6("febf::2")), passed),
                (frame(MAC, tag, 0x86dd, &to_v6("::ffff:10.0.0.2")), redirected),
                (frame(MAC, tag, 0x86dd, &to_v6("fd00::2")[..39]), passed),
                (frame(MAC, tag, 0x0806, &[0; 46]), passed),
                (frame(MAC, tag, 0x88cc, &[0; 46]), passed),
                (frame(OTHER_MAC, tag, 0x0800, &to_v4([10, 0, 0, 2])), other_mac),
                (frame(MacAddress([3, 0, 0x80, 0xff, 0x90, 7]), tag, 0x0800, &to_v4([10, 0, 0, 2])), other_mac),
                (frame(MacAddress::BROADCAST, tag, 0x0800, &to_v4([10, 0, 0, 2])), other_mac),
                (frame(MAC, tag, 0x8100, &[0; 2]), passed),
            ] {
                assert_eq!(run(&program, &packet), verdict, "{packet:02x?}");
            }
        }
    }

    #[test]
    fn programs_of_tcx_are_counted_by_interface_and_direction() {
        const PROGRAM_TC: u32 = 3;
        let name = "programs_of_tcx_are_counted";
        let Some(namespace) = crate::namespace::for_test(name) else { return };
        let test = || {
            let interfaces = [1, 2].map(InterfaceIndex);
            let counts =
                || interfaces.map(|interface| [false, true].map(|is_egress| tcx_programs(interface, is_egress)));
            let program = load_program_that_returns(-1, PROGRAM_TC, ATTACH_ANY).unwrap();
            assert_eq!(counts(), [[0, 0], [0, 0]]);
            for is_egress in [false, true] {
                // The loopback interface has index 1, and there is no other one.
                let kind = ATTACH_TCX_INGRESS + u32::from(is_egress);
                let mut attributes = Attributes::new().fd(0, &program).word(4, 1).word(8, kind);
                // SAFETY: these attributes contain no pointers, and `LINK_CREATE` returns a new descriptor.
                let link = match unsafe { call_for_fd(LINK_CREATE, &mut attributes) } {
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                        return println!("{name} is skipped: the kernel has no tcx");
                    }
                    link => link.unwrap(),
                };
                assert_eq!(counts(), [[u32::from(!is_egress), u32::from(is_egress)], [0, 0]]);
                drop(link);
                // A process that reads all links keeps this one for a moment.
                let begun = std::time::Instant::now();
                while counts() != [[0, 0], [0, 0]] {
                    assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{:?}", counts());
                    std::thread::yield_now();
                }
            }
        };
        namespace.within(test).unwrap();
    }
}
