//! Access rights to memory.

use std::fmt;

use bitflags::bitflags;

bitflags! {
    /// Access rights of a memory region or window, and of a queue pair's peer (`ibv_access_flags`). Local reads are
    /// always allowed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AccessFlags: u8 {
        /// The NIC may store received data and READ responses here.
        const LOCAL_WRITE = 1;
        /// A peer may WRITE here.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ here.
        const REMOTE_READ = 1 << 2;
        /// A peer may execute atomic operations here.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound here.
        const WINDOW_BIND = 1 << 4;
    }
}

impl AccessFlags {
    /// Remote rights that require [`Self::LOCAL_WRITE`]: a peer must not be able to do what this NIC may not do itself.
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
    fn rights_are_printed_by_name() {
        assert_eq!(AccessFlags::empty().to_string(), "local read");
        assert_eq!((AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ).to_string(), "local write, remote read");
    }
}
