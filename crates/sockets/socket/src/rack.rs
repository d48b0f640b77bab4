//! The rack that this process belongs to.
//!
//! * [`location`]: where its directory is; [`key`]: by which its processes recognize each other.
//! * [`monitor`]: how programs ask for listeners of other nodes; [`address`]: addresses as TCP would show them.

pub mod address;
pub mod key;
pub mod location;
pub mod monitor;
mod private;
