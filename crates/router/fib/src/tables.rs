//! All tables of a router, their writer and their readers.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::epoch::{Domain, Guard, Participant};
use crate::groups::Groups;
use crate::{Error, GROUPS_MAX, GroupId, groups, v4, v6};

/// The tables that readers use.
pub struct Tables<H> {
    /// IPv4 table.
    pub v4: v4::Table,
    /// IPv6 table.
    pub v6: v6::Table,
    /// Next-hop groups.
    pub groups: Groups<H>,
}

/// Creates empty tables: 32 MiB that are written at once, and about 350 MiB of address space that takes memory when it
/// is used.
///
/// # Errors
/// The kernel cannot map the memory.
pub fn tables<H: Copy + From<u32> + Into<u32>>() -> io::Result<(Writer<H>, Reader<H>)> {
    let tables = Arc::new(Tables { v4: v4::Table::new()?, v6: v6::Table::new()?, groups: Groups::new()? });
    let domain = Arc::new(Domain::new());
    let reader = Reader { tables: tables.clone(), participant: Domain::register(&domain) };
    let writer = Writer {
        tables,
        v4: v4::Writer::new(domain.clone()),
        v6: v6::Writer::new(domain.clone()),
        groups: groups::Writer::new(domain),
    };
    Ok((writer, reader))
}

/// A reader of the tables. Each thread has its own; clones are independent readers.
pub struct Reader<H> {
    tables: Arc<Tables<H>>,
    participant: Participant,
}

impl<H> Reader<H> {
    /// Runs `read` pinned: what it finds, including groups, is not reused until it returns.
    #[inline]
    pub fn batch<R>(&mut self, read: impl FnOnce(&Tables<H>) -> R) -> R {
        read(&self.pin())
    }

    /// Pins the reader until the guard is dropped, like [`Reader::batch`] for the duration of its closure.
    #[inline]
    pub fn pin(&mut self) -> ReadGuard<'_, H> {
        ReadGuard { _guard: self.participant.pin(), tables: &self.tables }
    }
}

impl<H> Clone for Reader<H> {
    fn clone(&self) -> Self {
        Reader { tables: self.tables.clone(), participant: Domain::register(self.participant.domain()) }
    }
}

/// A pinned reader. Hold it briefly: the writer cannot reuse what the reader may hold.
pub struct ReadGuard<'a, H> {
    tables: &'a Tables<H>,
    _guard: Guard<'a>,
}

impl<H> Deref for ReadGuard<'_, H> {
    type Target = Tables<H>;

    #[inline]
    fn deref(&self) -> &Tables<H> {
        self.tables
    }
}

/// The writer of the tables.
pub struct Writer<H> {
    tables: Arc<Tables<H>>,
    v4: v4::Writer,
    v6: v6::Writer,
    groups: groups::Writer,
}

/// Memory use of tables, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// IPv4 table: `tbl24`, and the blocks in use.
    pub v4: usize,
    /// IPv6 table: the root, and the nodes and leaves in use.
    pub v6: usize,
    /// State of the writer, without the routes.
    pub writer: usize,
}

impl<H: Copy + From<u32> + Into<u32>> Writer<H> {
    /// Adds a group of these next hops, at most [`crate::HOPS_MAX`]. Packets to a group without hops are dropped.
    ///
    /// # Errors
    /// Too many hops, or no group number is left.
    pub fn add_group(&mut self, hops: &[H]) -> Result<GroupId, Error> {
        self.groups.add(&self.tables.groups, hops)
    }

    /// Replaces the hops of a group, atomically for all routes that use it.
    ///
    /// # Errors
    /// Too many hops, or no such group.
    pub fn set_group(&mut self, group: GroupId, hops: &[H]) -> Result<(), Error> {
        self.groups.set(&self.tables.groups, group, hops)
    }

    /// Removes a group that no route uses.
    ///
    /// # Errors
    /// Routes use it, or there is no such group.
    pub fn remove_group(&mut self, group: GroupId) -> Result<(), Error> {
        self.groups.remove(&self.tables.groups, group)
    }

    /// Returns the hops of a group.
    ///
    /// # Errors
    /// There is no such group.
    pub fn hops(&self, group: GroupId) -> Result<Vec<H>, Error> {
        self.groups.routes(group)?;
        Ok(self.tables.groups.hops(group))
    }

    /// Returns the number of groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Inserts a route, or replaces that of the prefix and returns its former group. Bits beyond the prefix length are
    /// ignored.
    ///
    /// # Errors
    /// The tables are full, or there is no such group; the tables are unchanged.
    pub fn insert(&mut self, prefix: IpNet, group: GroupId) -> Result<Option<GroupId>, Error> {
        match prefix {
            IpNet::V4(prefix) => self.insert_v4(prefix, group),
            IpNet::V6(prefix) => self.insert_v6(prefix, group),
        }
    }

    /// [`Writer::insert`] for IPv4.
    ///
    /// # Errors
    /// Those of [`Writer::insert`].
    pub fn insert_v4(&mut self, prefix: Ipv4Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        self.groups.routes(group)?;
        let before = self.v4.insert(&self.tables.v4, prefix.trunc(), group)?;
        self.groups.count_route(before, Some(group));
        Ok(before)
    }

    /// [`Writer::insert`] for IPv6.
    ///
    /// # Errors
    /// Those of [`Writer::insert`].
    pub fn insert_v6(&mut self, prefix: Ipv6Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        self.groups.routes(group)?;
        let before = self.v6.insert(&self.tables.v6, prefix.trunc(), group)?;
        self.groups.count_route(before, Some(group));
        Ok(before)
    }

    /// Removes a route and returns its group, or `None` if there was no such route.
    ///
    /// # Errors
    /// No memory is left for the change, because a reader does not end its batch.
    pub fn remove(&mut self, prefix: IpNet) -> Result<Option<GroupId>, Error> {
        let before = match prefix {
            IpNet::V4(prefix) => self.v4.remove(&self.tables.v4, prefix.trunc()),
            IpNet::V6(prefix) => self.v6.remove(&self.tables.v6, prefix.trunc())?,
        };
        self.groups.count_route(before, None);
        Ok(before)
    }

    /// Returns the group of exactly this prefix.
    pub fn get(&self, prefix: IpNet) -> Option<GroupId> {
        match prefix {
            IpNet::V4(prefix) => self.v4.rib().get(&prefix.trunc()).copied(),
            IpNet::V6(prefix) => self.v6.rib().get(&prefix.trunc()).copied(),
        }
    }

    /// Returns the longest route that contains this prefix, and its group.
    pub fn lookup(&self, prefix: IpNet) -> Option<(IpNet, GroupId)> {
        match prefix {
            IpNet::V4(prefix) => self.v4.rib().get_lpm(&prefix).map(|(found, group)| (found.into(), *group)),
            IpNet::V6(prefix) => self.v6.rib().get_lpm(&prefix).map(|(found, group)| (found.into(), *group)),
        }
    }

    /// Iterates over the IPv4 routes in the order of their prefixes.
    pub fn routes_v4(&self) -> impl Iterator<Item = (Ipv4Net, GroupId)> + '_ {
        self.v4.rib().iter().map(|(prefix, group)| (prefix, *group))
    }

    /// Iterates over the IPv6 routes in the order of their prefixes.
    pub fn routes_v6(&self) -> impl Iterator<Item = (Ipv6Net, GroupId)> + '_ {
        self.v6.rib().iter().map(|(prefix, group)| (prefix, *group))
    }

    /// Returns the number of IPv4 routes and of IPv6 routes.
    pub fn routes(&self) -> (usize, usize) {
        (self.v4.rib().len(), self.v6.rib().len())
    }

    /// Returns the memory use of the tables.
    pub fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            v4: (1 << 24) * 2 + self.v4.blocks_used() * 512,
            v6: (1 << 20) * 4 + self.v6.reader_bytes(),
            writer: self.v4.writer_bytes() + self.v6.writer_bytes() + usize::from(GROUPS_MAX) * 8,
        }
    }
}
