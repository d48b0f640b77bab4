//! Forwarding tables.
//!
//! A table maps an address to a [`GroupId`]: a *next-hop group*, the set of equal ways to one destination, which
//! [`Groups`] has. Tables are written by one thread ([`Writer`]) and read by others at the same time ([`Reader`]),
//! which never wait: what a reader is told was true at some moment of its lookup. Whatever a change takes out of a
//! table is used again only after every reader that may hold it has ended its batch.
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

use std::num::NonZeroU16;
use std::time::{Duration, Instant};

mod error;
pub mod generate;
mod grace;
mod groups;
pub mod import;
mod memory;
mod sync;
mod tables;
pub mod v4;
pub mod v6;

pub use error::Error;
pub use groups::{Groups, HOPS_MAX};
pub use tables::{Batch, Bytes, Reader, Tables, Writer, tables};

/// The most groups at a time: a table's entry has 16 bits, one of which says that a longer prefix decides.
pub const GROUPS_MAX: u16 = (1 << 15) - 1;

/// A next-hop group, 1 to [`GROUPS_MAX`]. What it means is its owner's; a table only carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(NonZeroU16);

impl GroupId {
    /// `None` outside of 1 to [`GROUPS_MAX`].
    pub fn new(id: u16) -> Option<GroupId> {
        NonZeroU16::new(id).filter(|id| id.get() <= GROUPS_MAX).map(GroupId)
    }

    /// 1 to [`GROUPS_MAX`].
    pub fn get(self) -> u16 {
        self.0.get()
    }

    /// Of a table's entry, which the writer made of a group, or of none.
    #[inline]
    fn from_entry(entry: u16) -> Option<GroupId> {
        NonZeroU16::new(entry & GROUPS_MAX).map(GroupId)
    }
}

/// For how long a writer waits for readers where it has no other room. A batch lasts microseconds; a reader that was
/// not given a processor in all this time is none that forwards.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks until there is something, for [`PATIENCE`] at most: readers leave their batches meanwhile.
fn patience<T>(mut attempt: impl FnMut() -> Option<T>) -> Result<T, Error> {
    if let Some(found) = attempt() {
        return Ok(found);
    }
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(50));
        if let Some(found) = attempt() {
            return Ok(found);
        }
    }
    Err(Error::ReaderStays { waited_ms: PATIENCE.as_millis() as u64 })
}
