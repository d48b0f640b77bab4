//! Options that restrict who may communicate with a socket, or select the path of its packets. Keys, filters, marks and
//! devices apply to packets, which a lane does not have; a socket with such an option stays on kernel TCP.

use super::SocketOption;

/// The value that disables an option.
#[derive(Clone, Copy)]
enum DisabledBy {
    /// The number 0.
    Zero,
    /// An empty value or name.
    Empty,
    /// None: one value cannot say that no key or filter is left.
    Never,
}

// Constants of the kernel's headers that libc does not define.
const SO_BINDTOIFINDEX: i32 = 62;
const IP_OPTIONS: i32 = 4;
const IP_IPSEC_POLICY: i32 = 16;
const IP_XFRM_POLICY: i32 = 17;
const IP_UNICAST_IF: i32 = 50;
const IPV6_2292PKTOPTIONS: i32 = 6;
const IPV6_IPSEC_POLICY: i32 = 34;
const IPV6_XFRM_POLICY: i32 = 35;
const IPV6_HOPOPTS: i32 = 54;
const IPV6_RTHDRDSTOPTS: i32 = 55;
const IPV6_RTHDR: i32 = 57;
const IPV6_DSTOPTS: i32 = 59;
const IPV6_MINHOPCOUNT: i32 = 73;
const IPV6_UNICAST_IF: i32 = 76;
const TCP_MD5SIG_EXT: i32 = 32;
const TCP_AO_ADD_KEY: i32 = 38;
const TCP_AO_INFO: i32 = 40;
const TCP_AO_REPAIR: i32 = 42;

const SOCKET: i32 = libc::SOL_SOCKET;
const IP: i32 = libc::IPPROTO_IP;
const IPV6: i32 = libc::IPPROTO_IPV6;
const TCP: i32 = libc::IPPROTO_TCP;

const SECURITY_OPTIONS: [(i32, i32, DisabledBy); 28] = [
    (SOCKET, libc::SO_ATTACH_FILTER, DisabledBy::Never),
    (SOCKET, libc::SO_ATTACH_BPF, DisabledBy::Never),
    (SOCKET, libc::SO_LOCK_FILTER, DisabledBy::Zero),
    (SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, DisabledBy::Never),
    (SOCKET, libc::SO_ATTACH_REUSEPORT_EBPF, DisabledBy::Never),
    (SOCKET, libc::SO_MARK, DisabledBy::Zero),
    (SOCKET, libc::SO_BINDTODEVICE, DisabledBy::Empty),
    (SOCKET, SO_BINDTOIFINDEX, DisabledBy::Zero),
    (IP, IP_OPTIONS, DisabledBy::Empty),
    (IP, IP_IPSEC_POLICY, DisabledBy::Never),
    (IP, IP_XFRM_POLICY, DisabledBy::Never),
    (IP, libc::IP_TRANSPARENT, DisabledBy::Zero),
    (IP, libc::IP_MINTTL, DisabledBy::Zero),
    (IP, IP_UNICAST_IF, DisabledBy::Zero),
    (IPV6, IPV6_2292PKTOPTIONS, DisabledBy::Empty),
    (IPV6, IPV6_IPSEC_POLICY, DisabledBy::Never),
    (IPV6, IPV6_XFRM_POLICY, DisabledBy::Never),
    (IPV6, IPV6_HOPOPTS, DisabledBy::Empty),
    (IPV6, IPV6_RTHDRDSTOPTS, DisabledBy::Empty),
    (IPV6, IPV6_RTHDR, DisabledBy::Empty),
    (IPV6, IPV6_DSTOPTS, DisabledBy::Empty),
    (IPV6, IPV6_MINHOPCOUNT, DisabledBy::Zero),
    (IPV6, libc::IPV6_TRANSPARENT, DisabledBy::Zero),
    (IPV6, IPV6_UNICAST_IF, DisabledBy::Zero),
    (TCP, libc::TCP_MD5SIG, DisabledBy::Never),
    (TCP, TCP_MD5SIG_EXT, DisabledBy::Never),
    (TCP, TCP_AO_ADD_KEY, DisabledBy::Never),
    (TCP, TCP_AO_INFO, DisabledBy::Never),
];
const DETACH_FILTER: SocketOption = SocketOption::socket(libc::SO_DETACH_FILTER);
/// The bits of the filters that `SO_DETACH_FILTER` removes: the first two.
const FILTERS: u32 = 0b11;
const _: () = assert!(SECURITY_OPTIONS.len() <= u32::BITS as usize);

/// The security options that are set on a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SecurityOptions(u32);

impl SecurityOptions {
    /// Applies an option that the kernel has accepted; `head` is the beginning of its value of `len_bytes`.
    pub(super) fn note(&mut self, option: SocketOption, head: &[u8], len_bytes: usize) {
        if option == DETACH_FILTER {
            self.0 &= !FILTERS;
        } else if let Some(index) = index_of(option) {
            let bit = 1 << index;
            self.0 = if is_on(SECURITY_OPTIONS[index].2, head, len_bytes) { self.0 | bit } else { self.0 & !bit };
        }
    }

    pub(super) fn is_any(self) -> bool {
        self.0 != 0
    }
}

impl SocketOption {
    /// Returns whether a value keeps a socket on kernel TCP; `head` is the beginning of a value of `len_bytes`.
    pub(super) fn restricts(self, head: &[u8], len_bytes: usize) -> bool {
        (TCP, TCP_AO_REPAIR) == (self.level, self.name)
            || index_of(self).is_some_and(|index| is_on(SECURITY_OPTIONS[index].2, head, len_bytes))
    }
}

fn index_of(option: SocketOption) -> Option<usize> {
    SECURITY_OPTIONS.iter().position(|(level, name, _)| (*level, *name) == (option.level, option.name))
}

fn is_on(disabled_by: DisabledBy, head: &[u8], len_bytes: usize) -> bool {
    match disabled_by {
        DisabledBy::Never => true,
        DisabledBy::Zero => head.iter().take(4).any(|byte| *byte != 0),
        DisabledBy::Empty => len_bytes > 0 && head.first().is_some_and(|byte| *byte != 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disabled_options_no_longer_count() {
        let mut security = SecurityOptions::default();
        let mark = SocketOption::socket(libc::SO_MARK);
        let device = SocketOption::socket(libc::SO_BINDTODEVICE);
        security.note(mark, &7_u32.to_ne_bytes(), 4);
        security.note(device, b"lo", 2);
        security.note(mark, &[0; 4], 4);
        assert!(security.is_any());
        security.note(device, b"", 0);
        assert!(!security.is_any());
        security.note(SocketOption::socket(libc::SO_ATTACH_FILTER), &[], 16);
        assert!(security.is_any());
        security.note(DETACH_FILTER, &[0; 4], 4);
        assert!(!security.is_any());
    }

    #[test]
    fn a_key_is_never_considered_removed() {
        let mut security = SecurityOptions::default();
        security.note(SocketOption::tcp(libc::TCP_MD5SIG), &[0; 8], 216);
        security.note(SocketOption::tcp(libc::TCP_MD5SIG), &[0; 8], 216);
        assert!(security.is_any());
    }

    #[test]
    fn other_options_are_not_security_options() {
        let mut security = SecurityOptions::default();
        for option in [SocketOption::tcp(libc::TCP_NODELAY), SocketOption::socket(libc::SO_RCVBUF)] {
            security.note(option, &1_u32.to_ne_bytes(), 4);
            assert!(!option.restricts(&1_u32.to_ne_bytes(), 4));
        }
        assert!(!security.is_any());
    }
}
