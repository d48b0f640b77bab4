//! Forwarding information bases (FIBs) for IPv4 and IPv6.
//!
//! A table maps an address to the [`GroupId`] of a *next-hop group*: a set of equal-cost next hops, stored in
//! [`Groups`]. One thread writes the tables ([`Writer`]) while others read them ([`Reader`]). Readers never wait, and a
//! lookup returns what was true at some moment of it. Memory that a change removes from a table is reused only after
//! every reader that may hold it has ended its batch (epoch-based reclamation).
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (mut writer, mut reader) = fib::tables::<u32>()?;
//! let group = writer.add_group(&[7])?;
//! writer.insert("192.0.2.0/24".parse()?, group)?;
//! reader.batch(|tables| {
//!     let mut groups = [None; 2];
//!     tables.v4.lookup_batch(&[0xc000_0201, 0x0a00_0001], &mut groups);
//!     assert_eq!(groups, [Some(group), None]);
//!     assert_eq!(tables.groups.select(group, 0x1234_5678), Some(7));
//! });
//! # Ok(())
//! # }
//! ```

mod epoch;
mod error;
pub mod generate;
mod group_id;
mod groups;
pub mod import;
mod memory;
mod sync;
mod tables;
pub mod v4;
pub mod v6;
mod wait;

pub use error::Error;
pub use group_id::{GROUPS_MAX, GroupId};
pub use groups::{Groups, HOPS_MAX};
pub use tables::{MemoryUse, ReadGuard, Reader, Tables, Writer, tables};
