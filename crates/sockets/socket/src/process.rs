//! The process that the library is loaded in: its settings, its threads, its signals, and the system calls it makes.

pub mod blocking;
pub(crate) mod buffer;
pub(crate) mod callback;
pub mod clock;
pub mod identity;
pub mod limit;
pub mod lock;
pub mod locked;
pub mod memory;
pub mod pool;
pub mod sandbox;
pub mod settings;
pub mod signals;
pub mod syslog;
pub mod system;
pub mod threads;
pub mod warning;
