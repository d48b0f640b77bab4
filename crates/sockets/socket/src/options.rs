//! Socket options of a lane connection, answered as TCP would.
//!
//! Behind the program's descriptor there is an AF_UNIX socket, which knows no TCP options and has other values for
//! many. So what the program sets is recorded, and a question is put to a **template**: a fresh TCP socket of the same
//! family, on which the record is played back, and which is closed at once. The kernel itself then validates, rounds,
//! doubles and cuts, with its own errors. What depends on the connection rather than on the options is
//! [`ConnectionOption`], and answered by whoever has the connection.

#![allow(unsafe_code)] // Values in the memory of C callers go to the kernel as they are.

pub mod control;
pub mod inspect;
mod security;

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use security::SecurityOptions;

use crate::descriptor::hidden::close;
pub use crate::process::socket_option::SocketOption;
use crate::process::socket_option::{SO_TIMESTAMPING_NEW, outcome, set_raw};
use crate::process::system::read_text;
use crate::rendezvous::address::Family;
use control::RequestedControl;

/// Options that one socket's record holds; what comes after is accepted and not remembered.
const RECORDS_MAX: usize = 64;
/// Bytes of a value that is remembered; no option of TCP that can be played back has more.
const VALUE_BYTES_MAX: usize = 256;

impl SocketOption {
    /// The error of an option that a lane cannot honour with this value.
    fn refusal(self, value: &[u8]) -> Option<Errno> {
        // Stamps of what is sent come by the error queue.
        if TIMESTAMPING.contains(&self) {
            let is_refused = parse_u32(value).is_some_and(control::requests_send_timestamps);
            return is_refused.then_some(Errno::OPNOTSUPP);
        }
        let stays_off = self.level == libc::SOL_SOCKET && !self.is_on(value);
        let refused = REFUSED.iter().find(|(refused, _)| *refused == self && !stays_off);
        refused.map(|(_, errno)| *errno)
    }

    /// As [`SocketOption::refusal`], for a value in the memory of a C caller.
    ///
    /// # Safety
    /// `value` is null or readable for `length` bytes.
    pub unsafe fn refusal_c(self, value: *const c_void, length: libc::socklen_t) -> Option<Errno> {
        let mut number = [0_u8; 4];
        if !value.is_null() && length as usize >= number.len() {
            // SAFETY: the caller says that so many bytes are readable.
            number = unsafe { value.cast::<[u8; 4]>().read_unaligned() };
        }
        self.refusal(&number)
    }

    /// The bit of one of [`SHARED`].
    pub fn shared_bit(self) -> Option<u64> {
        SHARED.iter().position(|option| *option == self).map(|index| 1 << index)
    }

    /// Whether every number is a right value.
    pub fn takes_any_number(self) -> bool {
        self == Self::tcp(libc::TCP_NODELAY) || self == Self::tcp(libc::TCP_CORK)
    }

    /// Whether the kernel refuses the option with `EINVAL` once a socket is connected, though a fresh one takes it.
    fn is_refused_when_connected(self, value: &[u8]) -> bool {
        const V6_ONLY: SocketOption = SocketOption { level: libc::IPPROTO_IPV6, name: libc::IPV6_V6ONLY };
        match (self.level, self.name) {
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN | libc::TCP_FASTOPEN_CONNECT | libc::TCP_FASTOPEN_NO_COOKIE) => true,
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => parse_u32(value) == Some(0),
            _ => self == V6_ONLY,
        }
    }

    /// Whether a value turns the option on.
    fn is_on(self, value: &[u8]) -> bool {
        let is_offset = self == Self::socket(libc::SO_PEEK_OFF);
        parse_u32(value).is_some_and(|number| if is_offset { number as i32 >= 0 } else { number != 0 })
    }
}

/// Options that belong to a connection and not to a process: those that hold one end see each other's. Each has the bit
/// of its place.
const SHARED: [SocketOption; 4] = [
    SocketOption::tcp(libc::TCP_CORK),
    SocketOption::socket(libc::SO_OOBINLINE),
    SocketOption::tcp(libc::TCP_NODELAY),
    SocketOption::socket(libc::SO_KEEPALIVE),
];
/// The bit of `TCP_CORK`.
pub const CORKED: u64 = 1;
/// The bit of `SO_OOBINLINE`.
pub const URGENT_INLINE: u64 = 2;
/// The bit of `TCP_NODELAY`.
pub const NO_DELAY: u64 = 4;
const SO_PEERNAME: i32 = 28;
const TIMESTAMPING: [SocketOption; 2] =
    [SocketOption::socket(libc::SO_TIMESTAMPING), SocketOption::socket(SO_TIMESTAMPING_NEW)];
const SO_RCVTIMEO_NEW: i32 = 66;
const SO_SNDTIMEO_NEW: i32 = 67;
const RECEIVE_TIMEOUTS: [SocketOption; 2] =
    [SocketOption::socket(libc::SO_RCVTIMEO), SocketOption::socket(SO_RCVTIMEO_NEW)];
const SEND_TIMEOUTS: [SocketOption; 2] =
    [SocketOption::socket(libc::SO_SNDTIMEO), SocketOption::socket(SO_SNDTIMEO_NEW)];
const SEND_BUFFERS: [SocketOption; 2] =
    [SocketOption::socket(libc::SO_SNDBUF), SocketOption::socket(libc::SO_SNDBUFFORCE)];
const RECEIVE_BUFFERS: [SocketOption; 2] =
    [SocketOption::socket(libc::SO_RCVBUF), SocketOption::socket(libc::SO_RCVBUFFORCE)];
/// The least that Linux makes of `SO_SNDBUF`.
const SEND_BUFFER_BYTES_MIN: usize = 4608;
/// The least that Linux makes of `SO_RCVBUF`.
const RECEIVE_BUFFER_BYTES_MIN: usize = 2304;
/// What `SO_SNDBUF` is on a connection over the loopback interface once it is established (`tcp_sndbuf_expand`: ten
/// segments of 64 KiB, twice), unless the maximum of `tcp_wmem` is less.
const SEND_BUFFER_BYTES_ESTABLISHED: usize = 2_626_560;
/// Beside both buffers TCP has what is on the way; and what a lane holds is counted by lines.
const RECEIVE_MARGIN_BYTES_MAX: usize = 65_536;
const MARGIN_SHARE: usize = 32;

/// What the kernel says of buffers, for all sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BufferLimits {
    /// `net.core.wmem_max` and `net.core.rmem_max`: the most that a program may ask for.
    send_bytes_max: usize,
    receive_bytes_max: usize,
    /// The last of `tcp_wmem`: what a send buffer grows to by itself.
    send_bytes_grown: usize,
    /// The middle of `tcp_rmem`: what a receive buffer begins with.
    receive_bytes: usize,
}

impl BufferLimits {
    /// What Linux has where nobody has changed it.
    const DEFAULT: Self =
        Self { send_bytes_max: 212_992, receive_bytes_max: 212_992, send_bytes_grown: 4 << 20, receive_bytes: 131_072 };

    /// Read once.
    fn of_kernel() -> Self {
        static LIMITS: OnceLock<BufferLimits> = OnceLock::new();
        let number = |path: &std::ffi::CStr, index: usize| {
            let mut text = [0; 128];
            read_text(path, &mut text)?.split_ascii_whitespace().nth(index)?.parse().ok()
        };
        *LIMITS.get_or_init(|| {
            let Self { send_bytes_max, receive_bytes_max, send_bytes_grown, receive_bytes } = Self::DEFAULT;
            Self {
                send_bytes_max: number(c"/proc/sys/net/core/wmem_max", 0).unwrap_or(send_bytes_max),
                receive_bytes_max: number(c"/proc/sys/net/core/rmem_max", 0).unwrap_or(receive_bytes_max),
                send_bytes_grown: number(c"/proc/sys/net/ipv4/tcp_wmem", 2).unwrap_or(send_bytes_grown),
                receive_bytes: number(c"/proc/sys/net/ipv4/tcp_rmem", 1).unwrap_or(receive_bytes),
            }
        })
    }
}
const LINGER: [SocketOption; 1] = [SocketOption::socket(libc::SO_LINGER)];

/// Options whose value is a pointer or a descriptor, or that undo such an option: nothing to play back.
const NOT_REPLAYABLE: [SocketOption; 7] = [
    SocketOption::socket(libc::SO_ATTACH_FILTER),
    SocketOption::socket(libc::SO_DETACH_FILTER),
    SocketOption::socket(libc::SO_LOCK_FILTER),
    SocketOption::socket(libc::SO_ATTACH_BPF),
    SocketOption::socket(libc::SO_ATTACH_REUSEPORT_CBPF),
    SocketOption::socket(libc::SO_ATTACH_REUSEPORT_EBPF),
    SocketOption::tcp(libc::TCP_REPAIR),
];

/// Options that a template would accept and a lane cannot honour, with the error that makes programs do without. What
/// was set before there was a lane keeps the socket with the kernel.
const REFUSED: [(SocketOption, Errno); 4] = [
    // Completions would have to come by the error queue.
    (SocketOption::socket(libc::SO_ZEROCOPY), Errno::OPNOTSUPP),
    (SocketOption::socket(libc::SO_PEEK_OFF), Errno::OPNOTSUPP),
    (SocketOption::tcp(libc::TCP_REPAIR), Errno::PERM),
    // What Linux answers without the module that was asked for.
    (SocketOption::tcp(libc::TCP_ULP), Errno::NOENT),
];

/// Options whose answer depends on the connection, when they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionOption {
    /// `SO_ERROR`: the pending error, which is cleared.
    Error,
    /// `SO_RCVTIMEO`: see [`timeval`].
    ReceiveTimeout,
    /// `SO_SNDTIMEO`: see [`timeval`].
    SendTimeout,
    /// `SO_SNDBUF`: see [`OptionRecord::send_buffer_bytes_established`].
    SendBuffer,
    /// `TCP_WINDOW_CLAMP`: see [`OptionRecord::window_clamp_bytes`].
    WindowClamp,
    /// `TCP_INFO`: see [`tcp_info`].
    TcpInfo,
    /// `TCP_MAXSEG`: [`SEGMENT_BYTES_MAX`].
    MaxSegment,
    /// `IP_MTU`: [`PACKET_BYTES_MAX`].
    MaxPacket,
    /// `SO_PEERNAME`: the peer's address, as `getpeername` gives it.
    PeerName,
    /// `SO_COOKIE`: the lifeline's own answer is right.
    Lifeline,
}

impl ConnectionOption {
    /// The special option behind a level and a name.
    pub fn of(option: SocketOption) -> Option<Self> {
        match (option.level, option.name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => Some(Self::Error),
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW) => Some(Self::ReceiveTimeout),
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO | SO_SNDTIMEO_NEW) => Some(Self::SendTimeout),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => Some(Self::SendBuffer),
            (libc::SOL_SOCKET, SO_PEERNAME) => Some(Self::PeerName),
            (libc::SOL_SOCKET, libc::SO_COOKIE) => Some(Self::Lifeline),
            (libc::IPPROTO_TCP, libc::TCP_INFO) => Some(Self::TcpInfo),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => Some(Self::MaxSegment),
            (libc::IPPROTO_IP, libc::IP_MTU) => Some(Self::MaxPacket),
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => Some(Self::WindowClamp),
            _ => None,
        }
    }
}

/// The options a program has set on a socket, the latest last, each once; `SO_LINGER` also as it was last on.
#[derive(Clone, Debug, Default)]
pub struct OptionRecord {
    records: Vec<(SocketOption, Box<[u8]>)>,
    security: SecurityOptions,
    /// It was sent to another process before it was connected or listened: what one of them does with it, the other
    /// sees, as only the kernel's socket can show it.
    was_sent: bool,
}

impl OptionRecord {
    /// Keeps the socket to kernel TCP, because another process has it too.
    pub fn note_sent(&mut self) {
        self.was_sent = true;
    }

    /// Remembers an option that the kernel has accepted on the program's TCP socket.
    pub fn note(&mut self, option: SocketOption, value: &[u8]) {
        self.security.note(option, value, value.len());
        if NOT_REPLAYABLE.contains(&option) || value.len() > VALUE_BYTES_MAX {
            return;
        }
        // The time of `SO_LINGER` stays when it is turned off, and can be read.
        let keeps_time = LINGER.contains(&option) && parse_linger(value) == Some(None);
        let is_time = |known: &[u8]| keeps_time && !matches!(parse_linger(known), Some(None));
        self.records.retain(|(known, value)| *known != option || is_time(value));
        if self.records.len() < RECORDS_MAX {
            self.records.push((option, value.into()));
        }
    }

    /// As [`OptionRecord::note`], for a value in the memory of a C caller.
    ///
    /// # Safety
    /// `value` is null or readable for `length` bytes: the kernel has accepted it.
    pub unsafe fn note_c(&mut self, option: SocketOption, value: *const c_void, length: libc::socklen_t) {
        let length = length as usize;
        // SAFETY: our caller says that `value` is null or readable for `length` bytes.
        self.security.note(option, &unsafe { head_of(value, length) }, length);
        if value.is_null() || length > VALUE_BYTES_MAX {
            return;
        }
        let mut copy = [0_u8; VALUE_BYTES_MAX];
        // SAFETY: the caller says that many bytes are readable; `copy` has room for them, and is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), copy.as_mut_ptr(), length) };
        self.note(option, &copy[..length]);
    }

    /// `setsockopt(2)` on a socket that has no TCP socket behind it any more.
    ///
    /// # Errors
    /// The kernel's own, from the template; or what makes programs do without an option that a lane cannot honour.
    ///
    /// # Safety
    /// `value` is readable for `length` bytes when the kernel accepts it for this option.
    pub unsafe fn set_c(
        &mut self,
        family: Family,
        option: SocketOption,
        value: *const c_void,
        length: libc::socklen_t,
    ) -> Result<(), Errno> {
        // SAFETY: the caller says that the value is readable where the kernel takes it; where it is not, the kernel is
        // not asked before either.
        if let Some(errno) = unsafe { option.refusal_c(value, length) } {
            return Err(errno);
        }
        // Without the record: no option that can be played back makes another one valid or invalid.
        let template = fresh(family)?;
        let number = template.as_raw_fd();
        // SAFETY: the kernel checks the pointer and answers a bad one with an error.
        let answer = unsafe {
            crate::process::system::call!(libc::SYS_setsockopt, number, option.level, option.name, value, length)
        };
        let result = outcome(answer);
        close(template);
        result?;
        let mut number = [0_u8; 4];
        if !value.is_null() && length as usize >= number.len() {
            // SAFETY: the kernel has read as many bytes, and the caller says they are readable.
            number = unsafe { value.cast::<[u8; 4]>().read_unaligned() };
        }
        if option.is_refused_when_connected(&number) {
            return Err(Errno::INVAL);
        }
        // SAFETY: the kernel has read the value, and the caller says it is readable to its end.
        if option.restricts(&unsafe { head_of(value, length as usize) }, length as usize) {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the kernel has read the value, and the caller says it is readable to its end.
        unsafe { self.note_c(option, value, length) };
        Ok(())
    }

    /// `getsockopt(2)` for an option that is not [`ConnectionOption`].
    ///
    /// # Errors
    /// The kernel's own, from the template.
    ///
    /// # Safety
    /// `value` is writable for as many bytes as `length_inout` says, which is readable and writable, or the kernel
    /// refuses them.
    pub unsafe fn get_c(
        &self,
        family: Family,
        option: SocketOption,
        value: *mut c_void,
        length_inout: *mut libc::socklen_t,
    ) -> Result<(), Errno> {
        let template = self.template(family)?;
        let number = template.as_raw_fd();
        // SAFETY: the kernel checks both pointers and answers bad ones with an error.
        let answer = unsafe {
            crate::process::system::call!(libc::SYS_getsockopt, number, option.level, option.name, value, length_inout)
        };
        let result = outcome(answer);
        close(template);
        result
    }

    /// The value a program set, as it set it.
    pub fn find(&self, option: SocketOption) -> Option<&[u8]> {
        self.records.iter().find(|(known, _)| *known == option).map(|(_, value)| &value[..])
    }

    /// `SO_RCVTIMEO` in nanoseconds, 0 for none.
    pub fn receive_timeout_ns(&self) -> u64 {
        self.latest(&RECEIVE_TIMEOUTS).and_then(parse_timeval_ns).unwrap_or(0)
    }

    /// `SO_SNDTIMEO` in nanoseconds, 0 for none.
    pub fn send_timeout_ns(&self) -> u64 {
        self.latest(&SEND_TIMEOUTS).and_then(parse_timeval_ns).unwrap_or(0)
    }

    /// `SO_RCVTIMEO` in milliseconds, rounded up, if there is one.
    pub fn receive_timeout_ms(&self) -> Option<i32> {
        let timeout_ns = self.receive_timeout_ns();
        (timeout_ns > 0).then(|| i32::try_from(timeout_ns.div_ceil(1_000_000)).unwrap_or(i32::MAX))
    }

    /// `SO_RCVLOWAT`, 0 when it was not set.
    pub fn low_water_bytes(&self) -> u32 {
        self.find(SocketOption::socket(libc::SO_RCVLOWAT)).and_then(parse_u32).unwrap_or(0)
    }

    /// Unread bytes that the sending end of a lane should hold, as Linux would in its send buffer.
    pub fn send_capacity_bytes(&self) -> usize {
        let limits = BufferLimits::of_kernel();
        let asked = self.asked_bytes(&SEND_BUFFERS, limits.send_bytes_max);
        let bytes = asked.map_or(limits.send_bytes_grown, |bytes| bytes.max(SEND_BUFFER_BYTES_MIN));
        bytes + bytes / MARGIN_SHARE
    }

    /// Unread bytes that the receiving end should hold, as Linux would in its receive buffer and on the way there.
    pub fn receive_capacity_bytes(&self) -> usize {
        let limits = BufferLimits::of_kernel();
        let asked = self.asked_bytes(&RECEIVE_BUFFERS, limits.receive_bytes_max);
        let bytes = asked.map_or(limits.receive_bytes, |bytes| bytes.max(RECEIVE_BUFFER_BYTES_MIN));
        bytes + bytes / MARGIN_SHARE + (bytes / 2).min(RECEIVE_MARGIN_BYTES_MAX)
    }

    /// `SO_SNDBUF` of an established connection that the program has not set; `None`: it has.
    pub fn send_buffer_bytes_established(&self) -> Option<i32> {
        let bytes = SEND_BUFFER_BYTES_ESTABLISHED.min(BufferLimits::of_kernel().send_bytes_grown);
        self.latest(&SEND_BUFFERS).is_none().then_some(bytes as i32)
    }

    /// `TCP_WINDOW_CLAMP` of a connection whose program has not set it: half of the receive buffer. `None`: it has.
    pub fn window_clamp_bytes(&self) -> Option<i32> {
        let limits = BufferLimits::of_kernel();
        let asked = self.asked_bytes(&RECEIVE_BUFFERS, limits.receive_bytes_max);
        let bytes = asked.map_or(limits.receive_bytes, |bytes| bytes.max(RECEIVE_BUFFER_BYTES_MIN)) / 2;
        self.latest(&[SocketOption::tcp(libc::TCP_WINDOW_CLAMP)]).is_none().then_some(bytes as i32)
    }

    /// What Linux makes of the size that the program has asked for: all of it only with the privileged option.
    fn asked_bytes(&self, options: &[SocketOption; 2], bytes_max: usize) -> Option<usize> {
        let known = self.records.iter().rev().find(|(known, _)| options.contains(known));
        known.and_then(|(option, value)| {
            let bytes = parse_u32(value)? as usize;
            let is_forced = *option == options[1];
            Some(doubled(if is_forced { bytes } else { bytes.min(bytes_max) }))
        })
    }

    /// `SO_LINGER` in seconds, when it is on.
    pub fn linger_seconds(&self) -> Option<u32> {
        self.latest(&LINGER).and_then(parse_linger).flatten()
    }

    /// Whether closing resets the connection: `SO_LINGER` is on, with no time.
    pub fn resets_on_close(&self) -> bool {
        self.linger_seconds() == Some(0)
    }

    /// `SO_REUSEADDR`.
    pub fn shares_address(&self) -> bool {
        let option = SocketOption::socket(libc::SO_REUSEADDR);
        self.find(option).is_some_and(|value| option.is_on(value))
    }

    /// `SO_REUSEPORT`.
    pub fn shares_port(&self) -> bool {
        let option = SocketOption::socket(libc::SO_REUSEPORT);
        self.find(option).is_some_and(|value| option.is_on(value))
    }

    /// Whether the program has asked for something that a lane cannot give.
    pub fn needs_kernel_tcp(&self) -> bool {
        self.was_sent
            || self.security.is_any()
            || self.records.iter().any(|(option, value)| option.refusal(value).is_some() && option.is_on(value))
    }

    /// Those of [`SHARED`] that are on, a bit each.
    pub fn shared_bits(&self) -> u64 {
        let bit_of = |option: &SocketOption| option.shared_bit().filter(|_| self.is_on(*option));
        SHARED.iter().filter_map(bit_of).sum()
    }

    /// Corrects the record of one of [`SHARED`], which another process may have set.
    pub fn note_shared(&mut self, option: SocketOption, is_on: bool) {
        if self.is_on(option) != is_on {
            self.note(option, &u32::from(is_on).to_ne_bytes());
        }
    }

    /// Whether an option is set, and on.
    pub fn is_on(&self, option: SocketOption) -> bool {
        self.find(option).is_some_and(|value| option.is_on(value))
    }

    /// What receives are to bring beside the bytes.
    pub fn requested_control(&self) -> RequestedControl {
        let mut wanted = RequestedControl::default();
        self.records.iter().for_each(|(option, value)| wanted.note(*option, parse_u32(value).unwrap_or(0)));
        wanted
    }

    fn latest(&self, options: &[SocketOption]) -> Option<&[u8]> {
        self.records.iter().rev().find(|(known, _)| options.contains(known)).map(|(_, value)| &value[..])
    }

    /// A fresh TCP socket with the recorded options. What the kernel refuses now, it refuses for a reason that a
    /// connection has not.
    ///
    /// # Errors
    /// As `socket(2)`.
    pub fn template(&self, family: Family) -> Result<OwnedFd, Errno> {
        let socket = fresh(family)?;
        for (option, value) in &self.records {
            let _ = set_raw(socket.as_fd(), *option, value);
        }
        Ok(socket)
    }
}

/// The first bytes of a value in the memory of a C caller, with zeros behind it where it is shorter.
///
/// # Safety
/// `value` is null or readable for `length` bytes.
unsafe fn head_of(value: *const c_void, length: usize) -> [u8; 4] {
    let mut head = [0; 4];
    if !value.is_null() {
        // SAFETY: the caller says that `length` bytes are readable, and there is room for four.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), head.as_mut_ptr(), length.min(head.len())) };
    }
    head
}

fn fresh(family: Family) -> Result<OwnedFd, Errno> {
    let family = AddressFamily::from_raw(family.raw() as u16);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// `ioctl(2)` of a fresh TCP socket, for what depends on the network namespace and the protocol alone, such as the
/// addresses of an interface: the AF_UNIX socket behind a connection knows nothing of IP.
///
/// # Errors
/// The kernel's own.
///
/// # Safety
/// `argument` is what the request wants, or the kernel refuses it.
pub unsafe fn ioctl_of_template(family: Family, request: u64, argument: usize) -> Result<i32, Errno> {
    let template = fresh(family)?;
    let number = template.as_raw_fd();
    // SAFETY: the kernel checks pointers and answers bad ones with an error; the caller says the rest is right.
    let answer = unsafe { crate::process::system::call!(libc::SYS_ioctl, number, request, argument) };
    let result = outcome(answer);
    close(template);
    result.map(|()| answer as i32)
}

/// Writes an answer as `getsockopt` does: cut to the caller's length, which then says how much was written.
///
/// # Errors
/// `FAULT` for null pointers, `INVAL` for a negative length.
///
/// # Safety
/// `length_inout` is null or readable and writable; `value` is null or writable for as many bytes as it says.
pub unsafe fn answer(bytes: &[u8], value: *mut c_void, length_inout: *mut libc::socklen_t) -> Result<(), Errno> {
    if length_inout.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: not null, and the caller says it is readable.
    let room = unsafe { length_inout.read_unaligned() };
    let written = (i32::try_from(room).map_err(|_| Errno::INVAL)? as usize).min(bytes.len());
    if value.is_null() && written > 0 {
        return Err(Errno::FAULT);
    }
    if written > 0 {
        // SAFETY: `written` is at most what the caller says is writable, and at most the length of `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), written) };
    }
    // SAFETY: not null, and the caller says it is writable.
    unsafe { length_inout.write_unaligned(written as libc::socklen_t) };
    Ok(())
}

fn parse_u32(value: &[u8]) -> Option<u32> {
    value.get(..4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Linux doubles what a program asks for.
fn doubled(bytes: usize) -> usize {
    bytes.min(i32::MAX as usize / 2) * 2
}

/// The bytes of a `struct timeval` for a time-out, 0 for none.
pub fn timeval(timeout_ns: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(timeout_ns / 1_000_000_000).to_ne_bytes());
    bytes[8..].copy_from_slice(&(timeout_ns % 1_000_000_000 / 1000).to_ne_bytes());
    bytes
}

/// The time-out in a `struct timeval`, 0 for none; `None` for bytes that are none.
pub fn parse_timeval_ns(value: &[u8]) -> Option<u64> {
    let word = |at: usize| value.get(at..at + 8)?.try_into().ok().map(i64::from_ne_bytes);
    let (seconds, micros) = (word(0)?, word(8)?);
    if !(0..1_000_000).contains(&micros) {
        return None;
    }
    match u64::try_from(seconds) {
        Ok(seconds) => Some(seconds.saturating_mul(1_000_000_000).saturating_add(micros as u64 * 1000)),
        // Linux takes a time before now for no time at all, which is not the same as none.
        Err(_) => Some(1),
    }
}

/// The bytes of a `struct linger`.
#[cfg(test)]
fn linger(seconds: Option<u32>) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&i32::from(seconds.is_some()).to_ne_bytes());
    bytes[4..].copy_from_slice(&seconds.unwrap_or(0).to_ne_bytes());
    bytes
}

/// The time in a `struct linger`, if it is on; `None` for bytes that are none.
fn parse_linger(value: &[u8]) -> Option<Option<u32>> {
    let word = |at: usize| value.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes);
    let (on, seconds) = (word(0)?, word(4)?);
    Some((on != 0).then(|| u32::try_from(seconds).unwrap_or(u32::MAX)))
}

/// The largest segment TCP has on the loopback interface, which is what a lane would be compared with.
pub const SEGMENT_BYTES_MAX: i32 = 65_483;

/// The largest IPv4 packet on the loopback interface.
pub const PACKET_BYTES_MAX: i32 = 65_535;

/// The states of TCP that a lane connection can show, with Linux's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TcpState {
    /// Both directions open.
    Established = 1,
    /// We have shut down, the peer has not.
    FinWait = 5,
    /// Over.
    Close = 7,
    /// The peer has shut down, we have not.
    CloseWait = 8,
}

/// What is known of a connection for `TCP_INFO`.
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo {
    /// Its state.
    pub state: TcpState,
    /// The last round trip known, or an estimate.
    pub rtt_us: u32,
    /// Bytes the peer has taken.
    pub bytes_acked: u64,
    /// Bytes we have received.
    pub bytes_received: u64,
    /// Bytes sent and not taken yet.
    pub bytes_unsent: u32,
}

/// Bytes of `struct tcp_info` in Linux 6.
pub const TCP_INFO_BYTES: usize = 248;

/// The bytes of a `struct tcp_info` for a lane connection. Older programs know a shorter structure and read its
/// beginning.
pub fn tcp_info(facts: &TcpInfo) -> [u8; TCP_INFO_BYTES] {
    let mut bytes = [0; TCP_INFO_BYTES];
    let segment = SEGMENT_BYTES_MAX as u32;
    bytes[0] = facts.state as u8;
    bytes[5] = 7; // Timestamps, selective acknowledgements and window scaling.
    bytes[6] = 7 << 4 | 7; // Both window scales.
    let words = [
        (8, 200_000),              // tcpi_rto, in microseconds like the round trips
        (12, 40_000),              // tcpi_ato
        (16, segment),             // tcpi_snd_mss
        (20, segment),             // tcpi_rcv_mss
        (60, 65_535),              // tcpi_pmtu
        (64, 65_535),              // tcpi_rcv_ssthresh
        (68, facts.rtt_us),        // tcpi_rtt
        (72, facts.rtt_us / 2),    // tcpi_rttvar
        (76, 0x7fff_ffff),         // tcpi_snd_ssthresh
        (80, 10),                  // tcpi_snd_cwnd
        (84, segment),             // tcpi_advmss
        (88, 3),                   // tcpi_reordering
        (96, 65_535),              // tcpi_rcv_space
        (144, facts.bytes_unsent), // tcpi_notsent_bytes
        (148, facts.rtt_us),       // tcpi_min_rtt
    ];
    for (at, word) in words {
        bytes[at..at + 4].copy_from_slice(&u32::to_ne_bytes(word));
    }
    let counters = [(112, u64::MAX), (120, facts.bytes_acked), (128, facts.bytes_received)];
    for (at, counter) in counters {
        bytes[at..at + 8].copy_from_slice(&counter.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::socket_option::get_raw;
    use proptest::prelude::*;

    fn set(record: &mut OptionRecord, option: SocketOption, value: &[u8]) -> Result<(), Errno> {
        // SAFETY: the pointer and length are a slice's.
        unsafe { record.set_c(Family::V4, option, value.as_ptr().cast(), value.len() as u32) }
    }

    fn get(record: &OptionRecord, family: Family, option: SocketOption, room: usize) -> Result<Vec<u8>, Errno> {
        let mut value = vec![0xaa_u8; room];
        let mut length = room as u32;
        // SAFETY: the pointer and length are a vector's.
        unsafe { record.get_c(family, option, value.as_mut_ptr().cast(), &raw mut length) }?;
        value.truncate(length as usize);
        Ok(value)
    }

    fn int(value: i32) -> [u8; 4] {
        value.to_ne_bytes()
    }

    /// The kernel's answer to the same steps on a TCP socket of its own.
    fn kernel(steps: &[(SocketOption, &[u8])], ask: SocketOption, room: usize) -> Result<Vec<u8>, Errno> {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        for (option, value) in steps {
            set_raw(socket.as_fd(), *option, value)?;
        }
        let mut value = vec![0xaa_u8; room];
        let length = get_raw(socket.as_fd(), ask, &mut value)?;
        value.truncate(length);
        Ok(value)
    }

    const NODELAY: SocketOption = SocketOption::tcp(libc::TCP_NODELAY);
    const RCVBUF: SocketOption = SocketOption::socket(libc::SO_RCVBUF);
    const TOS: SocketOption = SocketOption { level: libc::IPPROTO_IP, name: libc::IP_TOS };
    const PRIORITY: SocketOption = SocketOption::socket(libc::SO_PRIORITY);
    const KEEPIDLE: SocketOption = SocketOption::tcp(libc::TCP_KEEPIDLE);

    #[test]
    fn what_is_set_is_answered_as_the_kernel_reports_it() {
        let steps: [(SocketOption, &[u8]); 5] = [
            (NODELAY, &int(7)),
            (RCVBUF, &int(50_000)),
            (TOS, &int(0x10)),
            (KEEPIDLE, &int(33)),
            (RCVBUF, &int(60_000)),
        ];
        let mut record = OptionRecord::default();
        for (option, value) in steps {
            set(&mut record, option, value).unwrap();
        }
        for option in [NODELAY, RCVBUF, TOS, KEEPIDLE, PRIORITY, SocketOption::socket(libc::SO_TYPE)] {
            for room in [0, 1, 2, 4, 8] {
                assert_eq!(get(&record, Family::V4, option, room), kernel(&steps, option, room), "{option:?} {room}");
            }
        }
        assert_eq!(get(&record, Family::V4, RCVBUF, 4).unwrap(), int(120_000), "Linux doubles buffers");
        assert_eq!(record.find(RCVBUF), Some(&int(60_000)[..]));
    }

    #[test]
    fn the_template_has_the_family_of_the_socket() {
        let record = OptionRecord::default();
        let domain = SocketOption::socket(libc::SO_DOMAIN);
        assert_eq!(get(&record, Family::V4, domain, 4).unwrap(), int(libc::AF_INET));
        assert_eq!(get(&record, Family::V6, domain, 4).unwrap(), int(libc::AF_INET6));
        let v6only = SocketOption { level: libc::IPPROTO_IPV6, name: libc::IPV6_V6ONLY };
        assert!(get(&record, Family::V6, v6only, 4).is_ok());
    }

    #[test]
    fn errors_are_the_kernels_and_leave_no_record() {
        let mut record = OptionRecord::default();
        for (option, value) in [
            (SocketOption::tcp(9999), &int(1)[..]),
            (SocketOption { level: 9999, name: 1 }, &int(1)),
            (NODELAY, &int(1)[..2]),
            (KEEPIDLE, &int(-1)),
            (SocketOption::socket(libc::SO_TYPE), &int(1)),
        ] {
            let expected = kernel(&[(option, value)], NODELAY, 4).unwrap_err();
            assert_eq!(set(&mut record, option, value), Err(expected), "{option:?}");
            assert_eq!(record.find(option), None);
        }
        // SAFETY: a null pointer is the kernel's to refuse.
        let null = unsafe { record.set_c(Family::V4, NODELAY, std::ptr::null(), 4) };
        assert_eq!(null, Err(Errno::FAULT));
        assert!(get(&record, Family::V4, SocketOption::tcp(9999), 4).is_err());
    }

    #[test]
    fn what_a_lane_cannot_honour_is_refused() {
        let mut record = OptionRecord::default();
        assert_eq!(set(&mut record, SocketOption::socket(libc::SO_ZEROCOPY), &int(1)), Err(Errno::OPNOTSUPP));
        assert_eq!(set(&mut record, SocketOption::socket(libc::SO_ZEROCOPY), &int(0)), Ok(()));
        assert_eq!(set(&mut record, SocketOption::socket(libc::SO_PEEK_OFF), &int(0)), Err(Errno::OPNOTSUPP));
        assert_eq!(set(&mut record, SocketOption::socket(libc::SO_PEEK_OFF), &int(-1)), Ok(()));
        assert_eq!(set(&mut record, SocketOption::tcp(libc::TCP_ULP), b"tls"), Err(Errno::NOENT));
    }

    #[test]
    fn a_record_is_bounded_and_holds_each_option_once() {
        let mut record = OptionRecord::default();
        for round in 0..3 {
            for name in 0..2 * RECORDS_MAX as i32 {
                record.note(SocketOption::tcp(100 + name), &int(round));
            }
        }
        assert_eq!(record.records.len(), RECORDS_MAX);
        record.note(NODELAY, &[0; VALUE_BYTES_MAX + 1]);
        assert_eq!(record.find(NODELAY), None);
    }

    #[test]
    fn filters_are_not_played_back() {
        let mut record = OptionRecord::default();
        record.note(SocketOption::socket(libc::SO_ATTACH_FILTER), &[0; 16]);
        assert!(record.records.is_empty());
    }

    #[test]
    fn time_outs_and_linger_are_understood() {
        let mut record = OptionRecord::default();
        assert_eq!(
            (record.receive_timeout_ns(), record.receive_timeout_ms(), record.resets_on_close()),
            (0, None, false)
        );
        set(&mut record, SocketOption::socket(libc::SO_RCVTIMEO), &timeval(1_500_001_000)).unwrap();
        set(&mut record, SocketOption::socket(libc::SO_SNDTIMEO), &timeval(2_000)).unwrap();
        assert_eq!((record.receive_timeout_ns(), record.receive_timeout_ms()), (1_500_001_000, Some(1501)));
        assert_eq!(record.send_timeout_ns(), 2_000);
        set(&mut record, LINGER[0], &linger(Some(5))).unwrap();
        assert_eq!((record.linger_seconds(), record.resets_on_close()), (Some(5), false));
        set(&mut record, LINGER[0], &linger(Some(0))).unwrap();
        assert!(record.resets_on_close());
        set(&mut record, LINGER[0], &linger(None)).unwrap();
        assert_eq!((record.linger_seconds(), record.resets_on_close()), (None, false));
    }

    #[test]
    fn a_lane_holds_what_both_buffers_of_tcp_would() {
        let limits = BufferLimits::of_kernel();
        let mut record = OptionRecord::default();
        assert_eq!(record.send_capacity_bytes(), limits.send_bytes_grown + limits.send_bytes_grown / MARGIN_SHARE);
        assert!(record.receive_capacity_bytes() > limits.receive_bytes);
        assert!(record.send_buffer_bytes_established().is_some_and(|bytes| bytes > 0));
        record.note(RECEIVE_BUFFERS[0], &int(4096));
        assert_eq!(record.receive_capacity_bytes(), 8192 + 8192 / MARGIN_SHARE + 4096);
        record.note(SEND_BUFFERS[0], &int(i32::MAX));
        assert_eq!(record.send_capacity_bytes(), 2 * limits.send_bytes_max * (MARGIN_SHARE + 1) / MARGIN_SHARE);
        assert_eq!(record.send_buffer_bytes_established(), None);
    }

    #[test]
    fn the_later_of_two_names_for_a_time_out_counts() {
        let mut record = OptionRecord::default();
        record.note(SEND_BUFFERS[0], &int(8192));
        record.note(SEND_BUFFERS[1], &int(100_000));
        assert_eq!(record.send_capacity_bytes(), 200_000 + 200_000 / MARGIN_SHARE);
        record.note(SEND_BUFFERS[0], &int(1));
        assert_eq!(record.send_capacity_bytes(), SEND_BUFFER_BYTES_MIN + SEND_BUFFER_BYTES_MIN / MARGIN_SHARE);
        record.note(RECEIVE_TIMEOUTS[1], &timeval(5_000_000));
        record.note(RECEIVE_TIMEOUTS[0], &timeval(7_000_000));
        assert_eq!(record.receive_timeout_ns(), 7_000_000);
        record.note(RECEIVE_TIMEOUTS[1], &timeval(9_000_000));
        assert_eq!(record.receive_timeout_ns(), 9_000_000);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_time_out_or_none(value in prop::collection::vec(any::<u8>(), 0..20)) {
            let parsed = parse_timeval_ns(&value);
            prop_assert!(value.len() >= 16 || parsed.is_none());
            let _ = parse_linger(&value);
        }

        #[test]
        fn a_time_out_survives_its_structure(micros in 0..u64::MAX / 1000) {
            prop_assert_eq!(parse_timeval_ns(&timeval(micros * 1000)), Some(micros * 1000));
        }

        #[test]
        fn a_linger_survives_its_structure(seconds in prop::option::of(0..i32::MAX as u32)) {
            prop_assert_eq!(parse_linger(&linger(seconds)), Some(seconds));
        }
    }

    #[test]
    fn a_time_before_now_is_no_time_and_not_none() {
        let mut value = timeval(0);
        value[..8].copy_from_slice(&(-1_i64).to_ne_bytes());
        assert_eq!(parse_timeval_ns(&value), Some(1));
    }

    #[test]
    fn answers_are_cut_to_the_callers_length() {
        for room in 0..8_u32 {
            let mut value = [0xaa_u8; 8];
            let mut length = room;
            // SAFETY: the array has eight bytes.
            unsafe { answer(&[1, 2, 3, 4], value.as_mut_ptr().cast(), &raw mut length) }.unwrap();
            let written = room.min(4) as usize;
            assert_eq!((length as usize, &value[..written]), (written, &[1, 2, 3, 4][..written]));
            assert!(value[written..].iter().all(|byte| *byte == 0xaa));
        }
        let mut length = u32::MAX;
        // SAFETY: a negative length and null pointers are refused before anything is written.
        unsafe {
            assert_eq!(answer(&[1], std::ptr::dangling_mut(), &raw mut length), Err(Errno::INVAL));
            assert_eq!(answer(&[1], std::ptr::null_mut(), std::ptr::null_mut()), Err(Errno::FAULT));
            length = 1;
            assert_eq!(answer(&[1], std::ptr::null_mut(), &raw mut length), Err(Errno::FAULT));
        }
    }

    #[test]
    fn tcp_info_has_its_fields_where_c_programs_look() {
        let facts =
            TcpInfo { state: TcpState::Established, rtt_us: 3, bytes_acked: 11, bytes_received: 12, bytes_unsent: 13 };
        let bytes = tcp_info(&facts);
        // SAFETY: `tcp_info` of libc is plain numbers, and shorter than the bytes.
        let info: libc::tcp_info = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        assert_eq!((info.tcpi_state, info.tcpi_snd_mss, info.tcpi_rtt), (1, 65_483, 3));
        assert_eq!((info.tcpi_advmss, info.tcpi_rcv_mss, info.tcpi_snd_cwnd), (65_483, 65_483, 10));
        let kernels = kernel(&[], SocketOption::tcp(libc::TCP_INFO), 512).unwrap();
        assert!(kernels.len() >= 104 && TCP_INFO_BYTES >= 104);
    }

    #[test]
    fn what_lanes_lack_is_known_from_what_was_asked_before() {
        let asks = |option: SocketOption, value: i32| {
            let mut record = OptionRecord::default();
            record.note(option, &int(value));
            record.needs_kernel_tcp()
        };
        for option in [SocketOption::socket(libc::SO_ZEROCOPY), TIMESTAMPING[0], TIMESTAMPING[1]] {
            assert!(asks(option, 1));
            assert!(!asks(option, 0));
        }
        assert!(!asks(TIMESTAMPING[0], libc::SOF_TIMESTAMPING_RX_SOFTWARE as i32));
        assert!(!asks(SocketOption::tcp(libc::TCP_INQ), 1));
        assert!(asks(SocketOption::socket(libc::SO_PEEK_OFF), 0));
        assert!(!asks(SocketOption::socket(libc::SO_PEEK_OFF), -1));
        assert!(!asks(SocketOption::socket(libc::SO_KEEPALIVE), 1));
    }
}
