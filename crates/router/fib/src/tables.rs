//! All tables of a router, one side that writes them and others that read them.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::epoch::{Domain, Guard, Participant};
use crate::groups::Groups;
use crate::{Error, GROUPS_MAX, GroupId, groups, v4, v6};

/// What a reader looks into.
pub struct Tables<H> {
    /// IPv4.
    pub v4: v4::Table,
    /// IPv6.
    pub v6: v6::Table,
    /// What groups are.
    pub groups: Groups<H>,
}

/// Empty tables, in 32 MiB that are written to at once and about 350 MiB of addresses that take memory when they are
/// needed.
///
/// # Errors
/// When the kernel has no such memory to give.
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

/// One of those that read. Each thread has its own.
pub struct Reader<H> {
    tables: Arc<Tables<H>>,
    participant: Participant,
}

impl<H> Reader<H> {
    /// Reads: what is found within one batch stays what it was until its end, groups too.
    #[inline]
    pub fn batch<R>(&mut self, read: impl FnOnce(&Tables<H>) -> R) -> R {
        read(&self.pin())
    }

    /// [`Reader::batch`] until what it gives is dropped.
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

/// A reader inside of the tables. The writer uses nothing again that it may hold, so it should not last.
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

/// The one that writes.
pub struct Writer<H> {
    tables: Arc<Tables<H>>,
    v4: v4::Writer,
    v6: v6::Writer,
    groups: groups::Writer,
}

/// How much memory tables take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// What readers of IPv4 look into: the first level, and blocks that are in use.
    pub v4: usize,
    /// What readers of IPv6 look into: the root, and nodes and leaves that are in use.
    pub v6: usize,
    /// What the writer needs besides, without the routes themselves.
    pub writer: usize,
}

impl<H: Copy + From<u32> + Into<u32>> Writer<H> {
    /// A new group of these hops, at most [`crate::HOPS_MAX`]. One without hops is a way to nowhere.
    ///
    /// # Errors
    /// Too many hops, or no number left.
    pub fn add_group(&mut self, hops: &[H]) -> Result<GroupId, Error> {
        self.groups.add(&self.tables.groups, hops)
    }

    /// Other hops for a group, at one moment for all routes that lead to it.
    ///
    /// # Errors
    /// Too many hops, or no such group.
    pub fn set_group(&mut self, group: GroupId, hops: &[H]) -> Result<(), Error> {
        self.groups.set(&self.tables.groups, group, hops)
    }

    /// Gives a group's number back, to which no route leads any more.
    ///
    /// # Errors
    /// Routes lead to it, or there is no such group.
    pub fn remove_group(&mut self, group: GroupId) -> Result<(), Error> {
        self.groups.remove(&self.tables.groups, group)
    }

    /// The hops of a group.
    ///
    /// # Errors
    /// There is no such group.
    pub fn hops(&self, group: GroupId) -> Result<Vec<H>, Error> {
        self.groups.routes(group)?;
        Ok(self.tables.groups.hops(group))
    }

    /// Groups that there are.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// A route, in place of one that the prefix had, whose group is given back. Bits beyond the prefix's length do not
    /// count.
    ///
    /// # Errors
    /// No room in the tables, or no such group; then they are as they were.
    pub fn insert(&mut self, prefix: IpNet, group: GroupId) -> Result<Option<GroupId>, Error> {
        match prefix {
            IpNet::V4(prefix) => self.insert_v4(prefix, group),
            IpNet::V6(prefix) => self.insert_v6(prefix, group),
        }
    }

    /// [`Writer::insert`] of IPv4.
    ///
    /// # Errors
    /// As there.
    pub fn insert_v4(&mut self, prefix: Ipv4Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        self.groups.routes(group)?;
        let before = self.v4.insert(&self.tables.v4, prefix.trunc(), group)?;
        self.groups.count_route(before, Some(group));
        Ok(before)
    }

    /// [`Writer::insert`] of IPv6.
    ///
    /// # Errors
    /// As there.
    pub fn insert_v6(&mut self, prefix: Ipv6Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        self.groups.routes(group)?;
        let before = self.v6.insert(&self.tables.v6, prefix.trunc(), group)?;
        self.groups.count_route(before, Some(group));
        Ok(before)
    }

    /// Takes a route out, and says where it led; `None` where there was none.
    ///
    /// # Errors
    /// A reader stays in one batch, and without its room there is none for the change.
    pub fn remove(&mut self, prefix: IpNet) -> Result<Option<GroupId>, Error> {
        let before = match prefix {
            IpNet::V4(prefix) => self.v4.remove(&self.tables.v4, prefix.trunc()),
            IpNet::V6(prefix) => self.v6.remove(&self.tables.v6, prefix.trunc())?,
        };
        self.groups.count_route(before, None);
        Ok(before)
    }

    /// Where exactly this prefix leads.
    pub fn get(&self, prefix: IpNet) -> Option<GroupId> {
        match prefix {
            IpNet::V4(prefix) => self.v4.rib().get(&prefix.trunc()).copied(),
            IpNet::V6(prefix) => self.v6.rib().get(&prefix.trunc()).copied(),
        }
    }

    /// The longest prefix that covers all of this one, and where it leads.
    pub fn lookup(&self, prefix: IpNet) -> Option<(IpNet, GroupId)> {
        match prefix {
            IpNet::V4(prefix) => self.v4.rib().get_lpm(&prefix).map(|(found, group)| (found.into(), *group)),
            IpNet::V6(prefix) => self.v6.rib().get_lpm(&prefix).map(|(found, group)| (found.into(), *group)),
        }
    }

    /// Routes of IPv4, in the order of their prefixes.
    pub fn routes_v4(&self) -> impl Iterator<Item = (Ipv4Net, GroupId)> + '_ {
        self.v4.rib().iter().map(|(prefix, group)| (prefix, *group))
    }

    /// Routes of IPv6, in the order of their prefixes.
    pub fn routes_v6(&self) -> impl Iterator<Item = (Ipv6Net, GroupId)> + '_ {
        self.v6.rib().iter().map(|(prefix, group)| (prefix, *group))
    }

    /// How many routes of IPv4, and how many of IPv6.
    pub fn routes(&self) -> (usize, usize) {
        (self.v4.rib().len(), self.v6.rib().len())
    }

    /// How much memory the tables take.
    pub fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            v4: (1 << 24) * 2 + self.v4.blocks_used() * 512,
            v6: (1 << 20) * 4 + self.v6.reader_bytes(),
            writer: self.v4.writer_bytes() + self.v6.writer_bytes() + usize::from(GROUPS_MAX) * 8,
        }
    }
}
