//! The rack that this process belongs to.
//!
//! * [`location`]: where its directory is; [`key`]: by which its processes recognize each other.
//! * [`shared`]: a directory that several users share; [`rules`]: who of them may reach whom; [`users`]: their numbers.
//! * [`monitor`]: how programs ask for listeners of other nodes; [`address`]: addresses as TCP would show them.

pub mod address;
pub mod key;
pub mod location;
pub mod monitor;
mod private;
pub mod rules;
pub mod shared;
pub mod users;
