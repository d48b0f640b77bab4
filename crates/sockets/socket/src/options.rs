//! Socket options of a lane connection, answered as TCP answers them.
//!
//! The program's descriptor is an AF_UNIX socket, which knows no TCP options and has other defaults for many others.
//! The options that the program sets are therefore recorded, and queries go to a **template**: a new TCP socket of the
//! same family, to which the record is applied, and which is closed after the query. The kernel itself thus validates,
//! rounds, doubles and truncates, and returns its own errors. What depends on the connection rather than on its options
//! is a [`ConnectionOption`] and is answered by the modules that know the connection.

#![allow(unsafe_code)] // Values in the memory of C callers are passed to the kernel unchanged.

pub mod control;
pub mod inspect;
mod security;
mod tcp_info;
#[cfg(test)]
mod tests;
mod values;

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use security::SecurityOptions;

use crate::descriptor::hidden::close;
use crate::process::memory;
pub use crate::process::socket_option::SocketOption;
use crate::process::socket_option::{SO_TIMESTAMPING_NEW, set_raw};
use crate::process::system::{read_text, unit_or_error};
use crate::rendezvous::address::Family;
use control::RequestedControl;
pub use tcp_info::{PACKET_BYTES_MAX, SEGMENT_BYTES_MAX, TCP_INFO_BYTES, TcpInfo, TcpState, tcp_info};
use values::{head_of, parse_linger, parse_u32};
pub use values::{parse_timeval_ns, timeval, write_value};

/// Largest number of options in a record; further ones are accepted but not recorded.
const RECORDS_MAX: usize = 64;
/// Largest recorded value, in bytes; no TCP option that can be replayed has a larger one.
const VALUE_BYTES_MAX: usize = 256;

impl SocketOption {
    /// Returns the error for an option that a lane cannot honour with this value.
    fn refusal(self, value: &[u8]) -> Option<Errno> {
        // Timestamps of sends are delivered by the error queue, which lanes do not have.
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
        if length as usize >= number.len() && memory::is_readable(value.cast::<[u8; 4]>()) {
            // SAFETY: four bytes are readable, as was just checked.
            number = unsafe { value.cast::<[u8; 4]>().read_unaligned() };
        }
        self.refusal(&number)
    }

    /// Returns the bit of one of [`SHARED`].
    pub fn shared_bit(self) -> Option<u64> {
        SHARED.iter().position(|option| *option == self).map(|index| 1 << index)
    }

    /// Returns whether every integer is a valid value.
    pub fn takes_any_number(self) -> bool {
        self == Self::tcp(libc::TCP_NODELAY) || self == Self::tcp(libc::TCP_CORK)
    }

    /// Returns whether the kernel refuses the option with `EINVAL` on a connected socket, although a new one accepts
    /// it.
    fn is_refused_when_connected(self, value: &[u8]) -> bool {
        const V6_ONLY: SocketOption = SocketOption { level: libc::IPPROTO_IPV6, name: libc::IPV6_V6ONLY };
        match (self.level, self.name) {
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN | libc::TCP_FASTOPEN_CONNECT | libc::TCP_FASTOPEN_NO_COOKIE) => true,
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => parse_u32(value) == Some(0),
            _ => self == V6_ONLY,
        }
    }

    /// Returns whether a value turns the option on.
    fn is_on(self, value: &[u8]) -> bool {
        let is_offset = self == Self::socket(libc::SO_PEEK_OFF);
        parse_u32(value).is_some_and(|number| if is_offset { number as i32 >= 0 } else { number != 0 })
    }
}

/// Options that belong to a connection and not to a process: all processes that share the endpoint see them. Each has
/// the bit of its index.
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
const LINGER: [SocketOption; 1] = [SocketOption::socket(libc::SO_LINGER)];
/// The smallest `SO_SNDBUF` in Linux.
const SEND_BUFFER_BYTES_MIN: usize = 4608;
/// The smallest `SO_RCVBUF` in Linux.
const RECEIVE_BUFFER_BYTES_MIN: usize = 2304;
/// `SO_SNDBUF` of an established connection over the loopback interface (`tcp_sndbuf_expand`: ten segments of 64 KiB,
/// twice), unless the maximum of `tcp_wmem` is less.
const SEND_BUFFER_BYTES_ESTABLISHED: usize = 2_626_560;
/// Largest allowance for data in transit, which TCP holds in addition to both buffers, and for the padding of records.
const RECEIVE_MARGIN_BYTES_MAX: usize = 65_536;
const MARGIN_SHARE: usize = 32;

/// The kernel's limits for buffers of all sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BufferLimits {
    /// `net.core.wmem_max` and `net.core.rmem_max`: the largest sizes that a program may request.
    send_bytes_max: usize,
    receive_bytes_max: usize,
    /// The last value of `tcp_wmem`: the size to which a send buffer grows automatically.
    send_bytes_grown: usize,
    /// The second value of `tcp_rmem`: the initial size of a receive buffer.
    receive_bytes: usize,
}

impl BufferLimits {
    /// The defaults of Linux.
    const DEFAULT: Self =
        Self { send_bytes_max: 212_992, receive_bytes_max: 212_992, send_bytes_grown: 4 << 20, receive_bytes: 131_072 };

    /// Reads the limits of this kernel, once.
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

/// Options that are not replayed, because their value is a pointer or a descriptor, or they undo such an option.
const NOT_REPLAYABLE: [SocketOption; 7] = [
    SocketOption::socket(libc::SO_ATTACH_FILTER),
    SocketOption::socket(libc::SO_DETACH_FILTER),
    SocketOption::socket(libc::SO_LOCK_FILTER),
    SocketOption::socket(libc::SO_ATTACH_BPF),
    SocketOption::socket(libc::SO_ATTACH_REUSEPORT_CBPF),
    SocketOption::socket(libc::SO_ATTACH_REUSEPORT_EBPF),
    SocketOption::tcp(libc::TCP_REPAIR),
];

/// Options that a template would accept but a lane cannot honour, with an error that makes programs do without them.
/// One that is set before there is a lane keeps the socket on kernel TCP.
const REFUSED: [(SocketOption, Errno); 4] = [
    // Completions would have to be delivered by the error queue.
    (SocketOption::socket(libc::SO_ZEROCOPY), Errno::OPNOTSUPP),
    (SocketOption::socket(libc::SO_PEEK_OFF), Errno::OPNOTSUPP),
    (SocketOption::tcp(libc::TCP_REPAIR), Errno::PERM),
    // The error of Linux if the requested module does not exist.
    (SocketOption::tcp(libc::TCP_ULP), Errno::NOENT),
];

/// Options whose value depends on the connection when it is read.
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
    /// `SO_COOKIE`: the lifeline's own value is used.
    Lifeline,
}

impl ConnectionOption {
    /// Returns the connection option with this level and name.
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

/// The options that a program has set on a socket, each once, the latest last. `SO_LINGER` is also kept as it was when
/// it was last on.
#[derive(Clone, Debug, Default)]
pub struct OptionRecord {
    records: Vec<(SocketOption, Box<[u8]>)>,
    security: SecurityOptions,
    /// Whether the socket was sent to another process before it was connected or listened. Each of the two processes
    /// then sees what the other does with it, which only a kernel socket provides.
    was_sent: bool,
}

impl OptionRecord {
    /// Keeps the socket on kernel TCP, because another process shares it.
    pub fn note_sent(&mut self) {
        self.was_sent = true;
    }

    /// Records an option that the kernel has accepted on the program's TCP socket.
    pub fn note(&mut self, option: SocketOption, value: &[u8]) {
        self.security.note(option, value, value.len());
        if NOT_REPLAYABLE.contains(&option) || value.len() > VALUE_BYTES_MAX {
            return;
        }
        // The time of `SO_LINGER` is kept, and can be read, while the option is off.
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
        // SAFETY: `value` is null or readable for `length` bytes, by the contract of this function.
        self.security.note(option, &unsafe { head_of(value, length) }, length);
        if value.is_null() || length > VALUE_BYTES_MAX {
            return;
        }
        let mut copy = [0_u8; VALUE_BYTES_MAX];
        // SAFETY: `value` is not null, so that it is readable for `length` bytes; `copy` is a local array of at least
        // as many.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), copy.as_mut_ptr(), length) };
        self.note(option, &copy[..length]);
    }

    /// `setsockopt(2)` on a socket that no longer has a TCP socket behind it.
    ///
    /// # Errors
    /// The kernel's errors, from the template, or the error for an option that a lane cannot honour.
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
        // SAFETY: `value` is null or readable, by the contract of this function, which is that of `setsockopt(2)`.
        if let Some(errno) = unsafe { option.refusal_c(value, length) } {
            return Err(errno);
        }
        // The record need not be applied: no replayable option makes another one valid or invalid.
        let template = fresh(family)?;
        let number = template.as_raw_fd();
        // SAFETY: the kernel checks the pointer and returns an error for an invalid one.
        let result = unit_or_error(unsafe {
            crate::process::system::call!(libc::SYS_setsockopt, number, option.level, option.name, value, length)
        });
        close(template);
        result?;
        let mut number = [0_u8; 4];
        if !value.is_null() && length as usize >= number.len() {
            // SAFETY: the kernel has just read at least four bytes there, and the contract says that they are readable.
            number = unsafe { value.cast::<[u8; 4]>().read_unaligned() };
        }
        if option.is_refused_when_connected(&number) {
            return Err(Errno::INVAL);
        }
        // SAFETY: the kernel has just accepted the value, so that by the contract it is readable for `length` bytes.
        if option.restricts(&unsafe { head_of(value, length as usize) }, length as usize) {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the kernel has just accepted the value, so that by the contract it is readable for `length` bytes.
        unsafe { self.note_c(option, value, length) };
        Ok(())
    }

    /// `getsockopt(2)` for an option that is not a [`ConnectionOption`].
    ///
    /// # Errors
    /// The kernel's errors, from the template.
    ///
    /// # Safety
    /// `length_inout` is readable and writable, and `value` is writable for the number of bytes in it, unless the
    /// kernel refuses them.
    pub unsafe fn get_c(
        &self,
        family: Family,
        option: SocketOption,
        value: *mut c_void,
        length_inout: *mut libc::socklen_t,
    ) -> Result<(), Errno> {
        let template = self.template(family)?;
        let number = template.as_raw_fd();
        // SAFETY: the kernel checks both pointers and returns an error for invalid ones.
        let result = unit_or_error(unsafe {
            crate::process::system::call!(libc::SYS_getsockopt, number, option.level, option.name, value, length_inout)
        });
        close(template);
        result
    }

    /// Returns the value that the program has set, unchanged.
    pub fn find(&self, option: SocketOption) -> Option<&[u8]> {
        self.records.iter().find(|(known, _)| *known == option).map(|(_, value)| &value[..])
    }

    /// Returns `SO_RCVTIMEO` in nanoseconds; 0 if there is none.
    pub fn receive_timeout_ns(&self) -> u64 {
        self.latest(&RECEIVE_TIMEOUTS).and_then(parse_timeval_ns).unwrap_or(0)
    }

    /// Returns `SO_SNDTIMEO` in nanoseconds; 0 if there is none.
    pub fn send_timeout_ns(&self) -> u64 {
        self.latest(&SEND_TIMEOUTS).and_then(parse_timeval_ns).unwrap_or(0)
    }

    /// Returns `SO_RCVTIMEO` in milliseconds, rounded up, if there is one.
    pub fn receive_timeout_ms(&self) -> Option<i32> {
        let timeout_ns = self.receive_timeout_ns();
        (timeout_ns > 0).then(|| i32::try_from(timeout_ns.div_ceil(1_000_000)).unwrap_or(i32::MAX))
    }

    /// Returns `SO_RCVLOWAT`; 0 if it was not set.
    pub fn low_water_bytes(&self) -> u32 {
        self.find(SocketOption::socket(libc::SO_RCVLOWAT)).and_then(parse_u32).unwrap_or(0)
    }

    /// Returns how many unread bytes the sending side of a lane should hold: as many as Linux would in its send buffer.
    pub fn send_capacity_bytes(&self) -> usize {
        let limits = BufferLimits::of_kernel();
        let requested = self.requested_bytes(&SEND_BUFFERS, limits.send_bytes_max);
        let bytes = requested.map_or(limits.send_bytes_grown, |bytes| bytes.max(SEND_BUFFER_BYTES_MIN));
        bytes + bytes / MARGIN_SHARE
    }

    /// Returns how many unread bytes the receiving side should hold: as many as Linux would in its receive buffer and
    /// in transit.
    pub fn receive_capacity_bytes(&self) -> usize {
        let bytes = self.receive_buffer_bytes();
        bytes + bytes / MARGIN_SHARE + (bytes / 2).min(RECEIVE_MARGIN_BYTES_MAX)
    }

    /// Returns `SO_SNDBUF` of an established connection, or `None` if the program has set it.
    pub fn send_buffer_bytes_established(&self) -> Option<i32> {
        let bytes = SEND_BUFFER_BYTES_ESTABLISHED.min(BufferLimits::of_kernel().send_bytes_grown);
        self.latest(&SEND_BUFFERS).is_none().then_some(bytes as i32)
    }

    /// Returns `TCP_WINDOW_CLAMP`, half of the receive buffer, or `None` if the program has set it.
    pub fn window_clamp_bytes(&self) -> Option<i32> {
        let bytes = self.receive_buffer_bytes() / 2;
        self.latest(&[SocketOption::tcp(libc::TCP_WINDOW_CLAMP)]).is_none().then_some(bytes as i32)
    }

    /// Returns `SO_RCVBUF` as Linux would have set it.
    fn receive_buffer_bytes(&self) -> usize {
        let limits = BufferLimits::of_kernel();
        let requested = self.requested_bytes(&RECEIVE_BUFFERS, limits.receive_bytes_max);
        requested.map_or(limits.receive_bytes, |bytes| bytes.max(RECEIVE_BUFFER_BYTES_MIN))
    }

    /// Returns the buffer size that Linux makes of the requested one: capped, unless the privileged option was used,
    /// and doubled.
    fn requested_bytes(&self, options: &[SocketOption; 2], bytes_max: usize) -> Option<usize> {
        let known = self.records.iter().rev().find(|(known, _)| options.contains(known));
        known.and_then(|(option, value)| {
            let bytes = parse_u32(value)? as usize;
            let is_forced = *option == options[1];
            Some(doubled(if is_forced { bytes } else { bytes.min(bytes_max) }))
        })
    }

    /// Returns `SO_LINGER` in seconds, if it is on.
    pub fn linger_seconds(&self) -> Option<u32> {
        self.latest(&LINGER).and_then(parse_linger).flatten()
    }

    /// Returns whether closing resets the connection: `SO_LINGER` is on with a time of 0.
    pub fn resets_on_close(&self) -> bool {
        self.linger_seconds() == Some(0)
    }

    /// Returns `SO_REUSEADDR`.
    pub fn shares_address(&self) -> bool {
        self.is_on(SocketOption::socket(libc::SO_REUSEADDR))
    }

    /// Returns `SO_REUSEPORT`.
    pub fn shares_port(&self) -> bool {
        self.is_on(SocketOption::socket(libc::SO_REUSEPORT))
    }

    /// Returns whether the program has set an option that a lane cannot honour.
    pub fn needs_kernel_tcp(&self) -> bool {
        self.was_sent
            || self.security.is_any()
            || self.records.iter().any(|(option, value)| option.refusal(value).is_some() && option.is_on(value))
    }

    /// Returns the bits of the [`SHARED`] options that are on.
    pub fn shared_bits(&self) -> u64 {
        let bit_of = |option: &SocketOption| option.shared_bit().filter(|_| self.is_on(*option));
        SHARED.iter().filter_map(bit_of).sum()
    }

    /// Updates the record of one of [`SHARED`], which another process may have set.
    pub fn note_shared(&mut self, option: SocketOption, is_on: bool) {
        if self.is_on(option) != is_on {
            self.note(option, &u32::from(is_on).to_ne_bytes());
        }
    }

    /// Returns whether an option is set and on.
    pub fn is_on(&self, option: SocketOption) -> bool {
        self.find(option).is_some_and(|value| option.is_on(value))
    }

    /// Returns which control messages receives must deliver.
    pub fn requested_control(&self) -> RequestedControl {
        let mut wanted = RequestedControl::default();
        self.records.iter().for_each(|(option, value)| wanted.note(*option, parse_u32(value).unwrap_or(0)));
        wanted
    }

    fn latest(&self, options: &[SocketOption]) -> Option<&[u8]> {
        self.records.iter().rev().find(|(known, _)| options.contains(known)).map(|(_, value)| &value[..])
    }

    /// Returns a new TCP socket with the recorded options. Errors are ignored: the reasons for which a new socket may
    /// refuse an option do not apply to an established connection.
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

fn fresh(family: Family) -> Result<OwnedFd, Errno> {
    let family = AddressFamily::from_raw(family.raw() as u16);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// Runs an `ioctl(2)` on a new TCP socket, for requests that depend only on the network namespace and the protocol,
/// such as the addresses of an interface. The AF_UNIX socket of a connection does not support them.
///
/// # Errors
/// The kernel's errors.
///
/// # Safety
/// `argument` is valid for the request, unless the kernel refuses it.
pub unsafe fn ioctl_of_template(family: Family, request: u64, argument: usize) -> Result<i32, Errno> {
    let template = fresh(family)?;
    let number = template.as_raw_fd();
    // SAFETY: `argument` is valid by the contract of this function; the kernel returns an error for invalid pointers.
    let value = unsafe { crate::process::system::call!(libc::SYS_ioctl, number, request, argument) };
    close(template);
    unit_or_error(value).map(|()| value as i32)
}

/// Returns twice the requested size, as Linux does.
fn doubled(bytes: usize) -> usize {
    bytes.min(i32::MAX as usize / 2) * 2
}
