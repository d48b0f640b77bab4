//! What may be done with memory.

use std::fmt;

use bitflags::bitflags;

bitflags! {
    /// Rights of a region or a window, and of a queue pair's peer (`ibv_access_flags`). Reading by this NIC's own
    /// programs is always allowed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AccessFlags: u8 {
        /// This NIC may store what it receives or reads here.
        const LOCAL_WRITE = 1;
        /// A peer may write.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may read.
        const REMOTE_READ = 1 << 2;
        /// A peer may do atomic operations.
        const REMOTE_ATOMIC = 1 << 3;
        /// Windows may be bound here.
        const WINDOW_BIND = 1 << 4;
    }
}

impl AccessFlags {
    /// Rights that go with a right to store here: a peer must not be able to do what this NIC itself may not.
    pub const REMOTE_STORE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_ATOMIC);
}

impl fmt::Display for AccessFlags {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return formatter.write_str("local read");
        }
        let mut separator = "";
        for (name, _) in self.iter_names() {
            write!(formatter, "{separator}{}", name.to_ascii_lowercase().replace('_', " "))?;
            separator = ", ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_printed_in_words() {
        assert_eq!(AccessFlags::empty().to_string(), "local read");
        assert_eq!((AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ).to_string(), "local write, remote read");
    }
}
