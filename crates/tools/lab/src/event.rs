//! What the lab hears.

use crate::Node;

/// One boot of one guest: what a killed guest still says is not its successor's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The guest.
    pub node: Node,
    /// Which of its boots, from 0.
    pub number: u32,
}

/// Something that a guest or the device server did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A line on the console.
    Line(Boot, String),
    /// A line to the lab.
    Word(Boot, Word),
    /// The console is closed: the machine is gone.
    Ended(Boot),
    /// A machine has the device.
    DeviceTaken,
}

/// What a guest says to the lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// It waits until all the others have come here.
    Barrier(String),
    /// It waits for the host.
    Host(String),
    /// Its script has ended.
    Exit(i32),
    /// Something that no guest of ours says.
    Nonsense(String),
}

impl Word {
    /// One line.
    pub fn parse(line: &str) -> Self {
        match line.trim().split_once(' ') {
            Some(("barrier", name)) => Self::Barrier(name.to_owned()),
            Some(("host", name)) => Self::Host(name.to_owned()),
            Some(("exit", code)) => code.parse().map_or_else(|_| Self::Nonsense(line.to_owned()), Self::Exit),
            _ => Self::Nonsense(line.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_guest_are_told_apart() {
        assert_eq!(Word::parse("barrier ready\n"), Word::Barrier("ready".to_owned()));
        assert_eq!(Word::parse("host go"), Word::Host("go".to_owned()));
        assert_eq!(Word::parse("exit 3"), Word::Exit(3));
        for nonsense in ["exit x", "barrier", "", "hello there"] {
            assert_eq!(Word::parse(nonsense), Word::Nonsense(nonsense.to_owned()));
        }
    }
}
