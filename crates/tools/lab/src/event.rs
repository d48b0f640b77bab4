//! Events of a running lab.

use crate::node::Node;

/// One boot of one guest. It distinguishes messages of a killed guest from those of its next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The guest.
    pub node: Node,
    /// Number of the boot, from 0.
    pub number: u32,
}

/// An event of a guest or of the device server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A line on the console.
    Line(Boot, String),
    /// A message to the lab.
    Message(Boot, Message),
    /// The console is closed: the machine has ended.
    Ended(Boot),
    /// A machine has connected to the device server.
    DeviceConnected,
}

/// A message from a guest to the lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The guest waits at a barrier.
    Barrier(String),
    /// The guest waits for the host.
    Host(String),
    /// The guest's script has ended.
    Exit(i32),
    /// An invalid message.
    Invalid(String),
}

impl Message {
    /// Parses a line.
    pub fn parse(line: &str) -> Self {
        match line.trim().split_once(' ') {
            Some(("barrier", name)) => Self::Barrier(name.to_owned()),
            Some(("host", name)) => Self::Host(name.to_owned()),
            Some(("exit", code)) => code.parse().map_or_else(|_| Self::Invalid(line.to_owned()), Self::Exit),
            _ => Self::Invalid(line.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_guest_are_parsed() {
        assert_eq!(Message::parse("barrier ready\n"), Message::Barrier("ready".to_owned()));
        assert_eq!(Message::parse("host go"), Message::Host("go".to_owned()));
        assert_eq!(Message::parse("exit 3"), Message::Exit(3));
        for invalid in ["exit x", "barrier", "", "hello there"] {
            assert_eq!(Message::parse(invalid), Message::Invalid(invalid.to_owned()));
        }
    }
}
