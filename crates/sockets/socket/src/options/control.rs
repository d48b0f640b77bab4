//! Control messages that a receive delivers: the number of unread bytes (`TCP_INQ`), and the time of arrival. The
//! kernel notes that time when it receives a packet; for a lane it is the time of the call.

use crate::process::socket_option::{SO_TIMESTAMP_NEW, SO_TIMESTAMPING_NEW, SO_TIMESTAMPNS_NEW, SocketOption};

/// Bytes of the longest message: three timestamps.
const DATA_BYTES_MAX: usize = 48;
/// The flags of `SO_TIMESTAMPING` for timestamps of sends. Lanes only support software timestamps of receives.
const SENDS_MASK: u32 = libc::SOF_TIMESTAMPING_TX_HARDWARE
    | libc::SOF_TIMESTAMPING_TX_SOFTWARE
    | libc::SOF_TIMESTAMPING_TX_SCHED
    | libc::SOF_TIMESTAMPING_TX_ACK
    | SOF_TIMESTAMPING_TX_COMPLETION;
const SOF_TIMESTAMPING_TX_COMPLETION: u32 = 1 << 18;
const SOF_TIMESTAMPING_OPT_RX_FILTER: u32 = 1 << 17;

/// Returns whether `SO_TIMESTAMPING` with these flags requests timestamps of sends.
pub(crate) fn requests_send_timestamps(flags: u32) -> bool {
    flags & SENDS_MASK != 0
}

/// The control messages that a socket's options request of each receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedControl {
    counts_unread: bool,
    stamp: Option<TimestampUnit>,
    stamps_by_software: bool,
    /// Whether the options with 64-bit times were used, such as `SO_TIMESTAMP_NEW`.
    is_new: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimestampUnit {
    Micros,
    Nanos,
}

impl RequestedControl {
    const COUNTS_UNREAD: u32 = 1;
    const MICROS: u32 = 2;
    const NANOS: u32 = 4;
    const BY_SOFTWARE: u32 = 8;
    const NEW: u32 = 16;

    /// Applies an option that was set. To be called in the order in which the options were set.
    pub(crate) fn note(&mut self, option: SocketOption, value: u32) {
        let is_on = value != 0;
        let mut set_stamp = |unit: TimestampUnit, is_new: bool| {
            self.stamp = is_on.then_some(unit);
            self.is_new = if is_on { is_new } else { self.is_new };
        };
        match (option.level, option.name) {
            (libc::IPPROTO_TCP, libc::TCP_INQ) => self.counts_unread = is_on,
            (libc::SOL_SOCKET, libc::SO_TIMESTAMP) => set_stamp(TimestampUnit::Micros, false),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS) => set_stamp(TimestampUnit::Nanos, false),
            (libc::SOL_SOCKET, SO_TIMESTAMP_NEW) => set_stamp(TimestampUnit::Micros, true),
            (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW) => set_stamp(TimestampUnit::Nanos, true),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPING | SO_TIMESTAMPING_NEW) => {
                let software = libc::SOF_TIMESTAMPING_SOFTWARE;
                let is_for_any = value & SOF_TIMESTAMPING_OPT_RX_FILTER == 0;
                let is_for_received = is_for_any || value & libc::SOF_TIMESTAMPING_RX_SOFTWARE != 0;
                self.stamps_by_software = value & software != 0 && is_for_received;
                self.is_new = option.name == SO_TIMESTAMPING_NEW;
            }
            _ => {}
        }
    }

    /// Encodes the request in a word that every receive reads; 0 if nothing is requested.
    pub(crate) fn to_bits(self) -> u32 {
        let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
        let bits = bit(self.counts_unread, Self::COUNTS_UNREAD)
            | bit(self.stamp == Some(TimestampUnit::Micros), Self::MICROS)
            | bit(self.stamp == Some(TimestampUnit::Nanos), Self::NANOS)
            | bit(self.stamps_by_software, Self::BY_SOFTWARE);
        if bits == 0 { 0 } else { bits | bit(self.is_new, Self::NEW) }
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        let stamp = match bits & (Self::MICROS | Self::NANOS) {
            0 => None,
            Self::MICROS => Some(TimestampUnit::Micros),
            _ => Some(TimestampUnit::Nanos),
        };
        Self {
            counts_unread: bits & Self::COUNTS_UNREAD != 0,
            stamp,
            stamps_by_software: bits & Self::BY_SOFTWARE != 0,
            is_new: bits & Self::NEW != 0,
        }
    }

    /// Returns the messages for a receive of `bytes`, in the kernel's order. `unread` returns the number of bytes left.
    pub fn messages(self, bytes: usize, unread: impl FnOnce() -> i32) -> impl Iterator<Item = ControlMessage> {
        let named = |old, new| if self.is_new { new } else { old };
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let (seconds, nanos) = (now.tv_sec, now.tv_nsec as i64);
        let stamp = self.stamp.map(|unit| match unit {
            TimestampUnit::Micros => {
                ControlMessage::of_socket(named(libc::SO_TIMESTAMP, SO_TIMESTAMP_NEW), &[seconds, nanos / 1000])
            }
            TimestampUnit::Nanos => {
                ControlMessage::of_socket(named(libc::SO_TIMESTAMPNS, SO_TIMESTAMPNS_NEW), &[seconds, nanos])
            }
        });
        let stamps = self.stamps_by_software.then(|| {
            ControlMessage::of_socket(named(libc::SO_TIMESTAMPING, SO_TIMESTAMPING_NEW), &[seconds, nanos, 0, 0, 0, 0])
        });
        let unread = self.counts_unread.then(|| ControlMessage::of_unread(unread()));
        stamp.into_iter().chain(stamps).filter(move |_| bytes > 0).chain(unread)
    }
}

/// A control message.
#[derive(Clone, Copy, Debug)]
pub struct ControlMessage {
    /// `cmsg_level` of `cmsghdr`.
    pub level: i32,
    /// `cmsg_type` of `cmsghdr`.
    pub kind: i32,
    data: [u8; DATA_BYTES_MAX],
    data_bytes: usize,
}

impl ControlMessage {
    fn of_socket(kind: i32, words: &[i64]) -> Self {
        let mut data = [0; DATA_BYTES_MAX];
        let places = data.chunks_exact_mut(size_of::<i64>());
        places.zip(words).for_each(|(place, word)| place.copy_from_slice(&word.to_ne_bytes()));
        Self { level: libc::SOL_SOCKET, kind, data, data_bytes: size_of_val(words) }
    }

    fn of_unread(bytes: i32) -> Self {
        let mut data = [0; DATA_BYTES_MAX];
        data[..4].copy_from_slice(&bytes.to_ne_bytes());
        Self { level: libc::IPPROTO_TCP, kind: libc::TCP_INQ, data, data_bytes: 4 }
    }

    /// Returns the data behind the header.
    pub fn data(&self) -> &[u8] {
        &self.data[..self.data_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_its_encoding_and_the_last_name_counts() {
        let socket = |name| SocketOption { level: libc::SOL_SOCKET, name };
        let mut wanted = RequestedControl::default();
        assert_eq!(wanted.to_bits(), 0);
        for (option, value) in [
            (socket(libc::SO_TIMESTAMP), 1),
            (socket(SO_TIMESTAMPNS_NEW), 1),
            (SocketOption { level: libc::IPPROTO_TCP, name: libc::TCP_INQ }, 1),
            (socket(libc::SO_TIMESTAMPING), libc::SOF_TIMESTAMPING_SOFTWARE),
            (socket(libc::SO_TIMESTAMP), 0),
        ] {
            wanted.note(option, value);
            assert_eq!(RequestedControl::from_bits(wanted.to_bits()), wanted);
        }
        assert_eq!((wanted.stamp, wanted.stamps_by_software, wanted.counts_unread), (None, true, true));
        assert!(!wanted.is_new, "the names are those that were set last");
    }
}
