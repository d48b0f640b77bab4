//! Addresses as TCP would show them.
//!
//! * [`canonical`]: inside the library, an IPv4 address is always an IPv4 address. The mapped form `::ffff:a.b.c.d`,
//!   which programs with an IPv6 socket see, exists only at the interface to them.
//! * [`sockaddr`]: C socket addresses in the memory of programs.
//! * [`tuple`](mod@tuple): both addresses of a connection, and the name by which its lifeline carries them.
//! * [`ephemeral`]: the ports of connections whose program has not chosen one.
//! * [`route`]: which addresses are this machine's.

mod canonical;
mod ephemeral;
mod route;
mod sockaddr;
mod tuple;

pub use canonical::{Family, canonical, destination, to_family};
pub use ephemeral::{ephemeral_candidates, ephemeral_ports};
pub use route::local_source;
pub(crate) use sockaddr::array;
pub use sockaddr::{encode_sockaddr, read_sockaddr, write_sockaddr};
pub use tuple::{NAME_BYTES_MAX, Opener, Tuple, TupleNameError};
