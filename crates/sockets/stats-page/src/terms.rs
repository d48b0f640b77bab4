//! The terms of a page: data path, role, and fallback reason.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

/// Number of counters reserved for fallback reasons; more than there are reasons today.
pub(crate) const FALLBACK_COUNTERS: usize = 32;

/// What carries a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataPath {
    /// Shared memory of the two programs.
    Lane = 0,
    /// Kernel TCP.
    Kernel = 1,
    /// A memory window to another node, through this node's proxy.
    Window = 2,
}

impl DataPath {
    /// The number of paths.
    pub const COUNT: usize = 3;

    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Lane, Self::Kernel, Self::Window].get(usize::from(byte)).copied()
    }

    /// Returns the word that `crosslane stat` prints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lane => "lane",
            Self::Kernel => "kernel",
            Self::Window => "window",
        }
    }
}

/// The side of a connection that this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// It called `connect`.
    Connect = 0,
    /// It called `accept`.
    Accept = 1,
}

impl Role {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Connect, Self::Accept].get(usize::from(byte)).copied()
    }

    /// Returns the word that `crosslane stat` prints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Accept => "accept",
        }
    }
}

macro_rules! fallback_reasons {
    ($($(#[$doc:meta])* $variant:ident => $name:literal, $why:literal, $remedy:literal;)*) => {
        /// Why a connection that could have had a lane uses kernel TCP.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum FallbackReason { $($(#[$doc])* $variant,)* }

        impl FallbackReason {
            /// All reasons, in the order of their counters.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the word used in JSON.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the reason in a few words, for people.
            pub fn explanation(self) -> &'static str {
                match self { $(Self::$variant => $why,)* }
            }

            /// Returns what to do about it, in a few words.
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy,)* }
            }
        }
    };
}

// The position is the index of the counter in the page: with another order, the page has another version.
fallback_reasons! {
    /// The other end has not announced itself: nobody there has the library, or not as this user and in this rack.
    NoAnswer => "no_answer",
        "the other side does not look for a lane: its program runs without crosslane, as another user, in another \
         rack, or on another machine; crosslane explain tells",
        "start both programs with crosslane run and the same --rack";
    /// Nothing listens at the address of the other node.
    NoListener => "no_listener",
        "no program listens at that address of the other node",
        "start the server, or correct the address";
    /// The address does not belong to this machine.
    RemoteAddress => "remote_address",
        "the address is not on this machine, or in another network namespace of it",
        "join the two machines by a rack file, or run both programs in one network namespace";
    /// `--only` or `--except` excludes the port.
    PortRule => "port_rule",
        "the port is excluded by --only or --except",
        "change --only or --except (CROSSLANE_ONLY, CROSSLANE_EXCEPT) of the program that excludes it";
    /// The two libraries have different protocol versions.
    VersionMismatch => "version_mismatch",
        "the other side runs another version of crosslane",
        "restart the program that runs the older library";
    /// The rack directory could not be used.
    RackUnavailable => "rack_unavailable",
        "the rack directory cannot be used; see crosslane doctor",
        "make it a directory of the program's user with mode 0700, on a file system that it can write to";
    /// Memory, descriptors or a table ran out.
    ResourceLimit => "resource_limit",
        "memory, descriptors or /dev/shm ran out",
        "raise ulimit -n or -f, the memory limit of the cgroup, or the size of /dev/shm";
    /// The socket has an option, a filter or a mode that lanes do not have.
    SocketOption => "socket_option",
        "the socket has an option, a filter or a mode that only kernel TCP offers",
        "disable it: docs/troubleshooting.md lists them";
    /// Another process may hold the socket too.
    SharedSocket => "shared_socket",
        "another process may hold the socket too, after a fork or because it was passed on",
        "let only one of the processes keep the connection";
    /// The meeting of both ends was interrupted or invalid.
    HandshakeFailed => "handshake_failed",
        "the handshake of both ends was interrupted or invalid",
        "nothing, unless it persists: then restart the server";
    /// The network namespaces differ.
    NamespaceDiffers => "namespace_differs",
        "the two programs are in different network namespaces",
        "give both a shared rack, run both in one network namespace, or join the namespaces by a rack file";
    /// The link to the other node is not up, or the monitor of this one does not answer.
    LinkDown => "link_down",
        "the link to that node is down; see crosslane status",
        "bring the node up: crosslane up";
    /// A socket connected to its own address.
    ToItself => "to_itself",
        "the socket connected to itself: there is no second program",
        "nothing: such a connection stays in the kernel";
    /// The rack's access rules do not allow this node to connect there.
    AccessDenied => "access_denied",
        "the rack's access rules deny it",
        "allow it in the rack file";
    /// A connection from the program's port to that address of another node still exists.
    PortInUse => "port_in_use",
        "an earlier connection from that port to that address of the other node still exists",
        "close the earlier connection, or do not bind the port before connecting";
    /// `--filters honour`: packet filters of the loopback interface must see the connection.
    PacketFilters => "packet_filters",
        "packet filters are honoured: --filters honour",
        "run the program without --filters honour and without CROSSLANE_FILTERS";
    /// The program at the other side belongs to another user.
    OtherUser => "other_user",
        "the program at the other side belongs to another user",
        "run both programs as one user, or let root make a shared rack: crosslane rack-dir create";
    /// The rack directory does not belong to the current user of the program.
    RackOfOtherUser => "rack_of_other_user",
        "the rack directory belongs to another user; the program may have changed its user",
        "start the program as its final user, or give it a directory of that user with --rack";
    /// The proxy could not listen on behalf of another node's server.
    ProxyCannotListen => "proxy_cannot_listen",
        "the proxy of this node cannot listen for that server; see its log",
        "free the address on this node";
    /// The connection's span of a window could not be mapped.
    WindowUnmapped => "window_unmapped",
        "its span of a window cannot be mapped in one of the two programs",
        "give the program access to the device or the shared memory of the windows";
    /// `crosslane lanes off`.
    SwitchedOff => "switched_off",
        "lanes are switched off in the rack",
        "crosslane lanes on, then connect again";
    /// A system call filter or an address family restriction denies what lanes need.
    Sandbox => "sandbox",
        "a sandbox denies the program what lanes need: AF_UNIX sockets or memory files",
        "allow AF_UNIX and memfd_create";
    /// The address space of this process is limited (`RLIMIT_AS`).
    AddressSpaceLimited => "address_space_limited",
        "the program's address space is limited (ulimit -v, LimitAS=), of which each lane reserves a part",
        "remove the limit, and limit memory by the cgroup instead (MemoryMax=)";
    /// No rule of the shared rack allows it.
    NoRule => "no_rule",
        "no rule of the shared rack lets clients of the one user reach servers of the other at this port",
        "allow it: crosslane rack-dir allow DIR --from USER --to USER";
    /// The addresses of the two ends are not each other's reverse.
    AddressTranslated => "address_translated",
        "the addresses are translated, or a proxy is between the two programs",
        "connect to the address at which the server itself listens";
    /// The peer has not proven to be the other end.
    NoProof => "no_proof",
        "the bytes of the connection did not prove that the program at the other side has its other end",
        "nothing, unless it persists: then see docs/troubleshooting.md";
    /// The kernel does not tell about the peer's socket.
    NoLookUp => "no_look_up",
        "the kernel does not tell about the socket of the other side (inet_diag), which a shared rack needs",
        "allow AF_NETLINK sockets (RestrictAddressFamilies=), and load the kernel module tcp_diag";
    /// A user has no number in the user namespace of the program.
    UnmappedUser => "unmapped_user",
        "a user has no number in the user namespace of the program",
        "run both programs in one user namespace, or without one";
}

const _: () = assert!(FallbackReason::ALL.len() <= FALLBACK_COUNTERS);

impl fmt::Display for FallbackReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Returns the name of a node that is not in a rack file: `a` to `z` for 127.77.0.1 to 127.77.0.26, else the address.
pub fn node_name(address: IpAddr) -> String {
    match address {
        IpAddr::V4(four) if matches!(four.octets(), [127, 77, 0, 1..=26]) => {
            char::from(b'a' + four.octets()[3] - 1).to_string()
        }
        _ => address.to_string(),
    }
}

/// Parses a node given as a letter or as an address in 127.77.0.0/16. Returns `None` for anything else.
pub fn node_address(name: &str) -> Option<Ipv4Addr> {
    if let [letter @ b'a'..=b'z'] = name.as_bytes() {
        return Some(Ipv4Addr::new(127, 77, 0, letter - b'a' + 1));
    }
    let address: Ipv4Addr = name.parse().ok()?;
    let [first, second, third, fourth] = address.octets();
    let usable = (first, second) == (127, 77) && (third, fourth) != (0, 0) && (third, fourth) != (255, 255);
    usable.then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_and_addresses_name_the_same_nodes() {
        for letter in 'a'..='z' {
            let address = node_address(&letter.to_string()).unwrap();
            assert_eq!(node_name(address.into()), letter.to_string());
            assert_eq!(node_address(&address.to_string()), Some(address));
        }
        assert_eq!(node_address("b"), Some(Ipv4Addr::new(127, 77, 0, 2)));
        assert_eq!(node_name([127, 77, 0, 27].into()), "127.77.0.27");
        assert_eq!(node_name(IpAddr::from([0xfd00, 0x77, 0, 0, 0, 0, 0, 1])), "fd00:77::1");
    }

    #[test]
    fn other_names_are_not_nodes() {
        for name in
            ["", "A", "aa", "1", "ä", "127.0.0.1", "127.77.0.0", "127.77.255.255", "127.77.0", "::1", "127.77.0.1 "]
        {
            assert_eq!(node_address(name), None, "{name:?}");
        }
    }

    #[test]
    fn reasons_keep_their_counter_and_have_distinct_names() {
        for (index, reason) in FallbackReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
            assert!(FallbackReason::ALL[..index].iter().all(|other| other.name() != reason.name()));
        }
    }
}
