//! Why two endpoints do not meet, with numbers that stay the same in all releases.

use std::fmt;

use rustix::io::Errno;

macro_rules! reasons {
    ($($number:literal $name:ident $text:literal)*) => {
        /// The reason why the two endpoints of a connection do not meet. The connection stays on TCP.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Reason {
            $(#[doc = concat!("Number ", $number, ": ", $text, ".")] $name,)*
            /// A number that this release does not know: the peer is of another release.
            Other(u16),
        }

        impl Reason {
            /// The reasons that this release knows.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the number, which is part of the messages and never changes its meaning.
            pub const fn number(self) -> u16 {
                match self {
                    $(Self::$name => $number,)*
                    Self::Other(number) => number,
                }
            }

            /// Returns the reason with a number.
            pub const fn from_number(number: u16) -> Self {
                match number {
                    $($number => Self::$name,)*
                    _ => Self::Other(number),
                }
            }

            fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Other(_) => "a reason of another release",
                }
            }
        }
    };
}

reasons! {
    // The socket is not fit for it, whatever the peer says.
    1 NotTcp "the socket is not a TCP socket"
    2 State "the connection is not established, or its end was reached"
    3 Urgent "an urgent byte is pending"
    4 Busy "the kernel's counts changed during each attempt to read them"
    5 Repair "the socket is in TCP_REPAIR mode"
    6 Ulp "the socket has an upper layer protocol such as kernel TLS"
    7 SelfConnected "the socket is connected to itself"
    // Nobody to meet.
    16 Nobody "the peer has not announced itself"
    17 Full "too many callers wait for the peer"
    18 NameTaken "another socket has the name"
    19 Gone "the peer has hung up"
    // The peer is not the other endpoint, or not one that this process trusts.
    32 User "the peer is of another user"
    33 Role "both endpoints have connected, or both have accepted"
    34 Counts "the byte counts are not those of the other endpoint"
    35 Cookie "the peer's cookie is not that of the other endpoint"
    36 Namespace "the peer's TCP socket is in another network namespace"
    37 NoRule "no rule of the rack allows it"
    38 OtherTuple "the addresses are translated, or a proxy is between the two programs"
    39 NoProof "the bytes of the connection do not prove that the peer is its other endpoint"
    40 NoLookUp "the kernel does not tell about the peer's socket"
    41 Unmapped "the peer's user has no number in this user namespace"
    // The message.
    48 Version "the peer is of a release with other messages"
    49 Malformed "the message is malformed"
    50 Descriptors "the message has no descriptor, more than one, or one that could not be received"
    51 Memory "the descriptor is not sealed memory of the stated size"
    52 Window "the span of a window cannot be used"
    // What an endpoint may decide for itself.
    64 Off "lanes are off"
    65 Shared "another process may hold the socket as well"
    66 NoMemory "no memory for lanes"
    67 NoDescriptors "no descriptors for lanes"
    68 System "a system call failed"
    69 Options "the socket has options that lanes do not have"
    70 Sandbox "a sandbox denies what lanes need"
    71 AddressSpace "the address space of this process is limited"
    72 Rack "the rack directory cannot be used"
    73 RackUser "the rack directory belongs to another user"
    74 Rules "the rules of the rack cannot be read"
}

impl Reason {
    /// Returns the reason for an unexpected error of a system call.
    pub fn of_errno(errno: Errno) -> Self {
        match errno {
            Errno::MFILE | Errno::NFILE | Errno::TOOMANYREFS => Self::NoDescriptors,
            Errno::NOMEM | Errno::NOBUFS => Self::NoMemory,
            Errno::PIPE | Errno::CONNRESET => Self::Gone,
            Errno::PERM | Errno::ACCESS | Errno::AFNOSUPPORT | Errno::NOSYS => Self::Sandbox,
            _ => Self::System,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({})", self.text(), self.number())
    }
}

impl std::error::Error for Reason {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_one_reason() {
        for number in 0..=u16::MAX {
            assert_eq!(Reason::from_number(number).number(), number);
        }
        assert!(Reason::ALL.iter().all(|reason| !matches!(Reason::from_number(reason.number()), Reason::Other(_))));
        assert_eq!(Reason::from_number(0), Reason::Other(0));
        assert_eq!(Reason::Version.to_string(), "the peer is of a release with other messages (48)");
    }
}
