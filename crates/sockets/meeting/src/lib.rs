//! How the two endpoints of one established kernel TCP connection, in two processes that both load the library, find
//! each other, prove that they are the two endpoints of the same connection, and exchange descriptors of memory.
//!
//! ```text
//! accepting endpoint                                       connecting endpoint
//!   Accepting::announce: listens at name(key, tuple)
//!                                                            Proposal::connect to name(key, reversed tuple)
//!                                                              ECONNREFUSED: nobody; SO_PEERCRED: of which user?
//!                       ◄── proposal: cookies, counts, memory ── Proposal::send
//!   Accepting::advance: verifies, by counts and a look-up
//!   Accepting::accept   ─── yes: cookies, counts, memory ────►
//!            or refuse  ─── no: a numbered reason ───────────►   Proposal::advance: verifies likewise
//!   Met ◄──────────────────────── the bell ─────────────────────► Met
//! ```
//!
//! Nothing enters the TCP stream, and no call blocks: every step that needs the peer says that it waits, and names the
//! descriptor that becomes readable. Each endpoint passes a read-only descriptor of the memory that it writes itself.
//! The AF_UNIX connection of the meeting remains as the connection's [`bell`].
//!
//! # Trust
//!
//! Everything from a peer is hostile until it is checked: messages have one size and are parsed with bounds
//! ([`message`]), descriptors are known to be memory before anything else is done with them ([`receive`](mod@receive),
//! [`memory`]), the peer's user is checked before anything is sent, and [`verify`](mod@verify) compares the kernel's
//! byte counts and cookies. A refusal is a [`Reason`] with a stable number, and the connection stays on TCP.
//!
//! # Cost
//!
//! One meeting takes 72 system calls of both sides together, with both look-ups and without the creation of the
//! memories (62 without look-ups): 7 for each [`Endpoint::of`], 9 for the announcement, 10 for the proposal, 19 to
//! verify it and 4 to accept it, 16 to verify the answer. A process that [hides its descriptors](hide_descriptors)
//! keeps the socket of its look-ups, and makes 2 calls less for each. Measured by `examples/meeting_cost.rs` on two
//! cores with Linux 6.18, both sides in one process: 29 us, 21 us without look-ups, where connecting and accepting a
//! TCP connection takes 8.6 us. A look-up takes 3.5 us, 1.8 us with a socket that was kept, a set of counts 1.5 us, and
//! a connection attempt that finds nobody 2.4 us (medians).

mod accepting;
mod announce;
pub mod bell;
pub mod counts;
pub mod diag;
mod endpoint;
pub mod memory;
pub mod message;
mod met;
mod name;
pub mod place;
pub mod proof;
mod proposal;
mod reason;
pub mod receive;
mod send;
mod system;
mod tuple;
pub mod verify;

pub use accepting::{Accepting, Step};
pub use announce::Announcement;
pub use counts::{Counts, Role};
pub use endpoint::Endpoint;
pub use message::{Memory, Window};
pub use met::Met;
pub use name::{Key, name};
pub use place::Rendezvous;
pub use proof::Prover;
pub use proposal::{Answer, Proposal};
pub use reason::Reason;
pub use send::Offer;
pub use system::{Descriptor, HiddenNumbers, hide_descriptors};
pub use tuple::Tuple;
pub use verify::{Evidence, PeerUser, Policy, UserKey, UserKeys};
