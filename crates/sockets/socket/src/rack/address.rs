//! Addresses as TCP would show them.
//!
//! * [`canonical`]: inside the library, an IPv4 address is always an IPv4 address. The mapped form `::ffff:a.b.c.d`,
//!   which programs with an IPv6 socket see, exists only at the interface to them.
//! * [`sockaddr`]: C socket addresses in the memory of programs.
//! * [`route`]: which addresses are this machine's.

mod canonical;
mod route;
mod sockaddr;

pub use canonical::{Family, canonical, to_family};
pub use route::local_source;
pub use sockaddr::{encode_sockaddr, read_sockaddr, write_sockaddr};
