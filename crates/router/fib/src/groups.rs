//! Next-hop groups: equal-cost next hops (ECMP), of which the hash of a flow selects one.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::epoch::{COLLECT_THRESHOLD, Domain, Retired};
use crate::memory::AtomicArray;
use crate::wait::wait_for_readers;
use crate::{Error, GROUPS_MAX, GroupId};

/// Maximum number of next hops in a group.
pub const HOPS_MAX: usize = 16;

/// Number of hop arrays: one for each group, and as many again that await the end of a grace period.
const HOP_ARRAYS: usize = 2 * (GROUPS_MAX as usize + 1);

/// A descriptor holds the number of hops in its high byte; below, the hop itself if there is one, or the hop array.
const COUNT_SHIFT: u32 = 56;

/// The groups that readers use. A hop is any type that converts to 32 bits and back.
pub struct Groups<H> {
    descriptors: AtomicArray<AtomicU64>,
    hop_arrays: AtomicArray<AtomicU32>,
    hops: PhantomData<fn() -> H>,
}

impl<H: Copy + From<u32> + Into<u32>> Groups<H> {
    pub(crate) fn new() -> io::Result<Groups<H>> {
        let descriptors = AtomicArray::new(usize::from(GROUPS_MAX) + 1)?;
        Ok(Groups { descriptors, hop_arrays: AtomicArray::new(HOP_ARRAYS * HOPS_MAX)?, hops: PhantomData })
    }

    /// Returns the hop of a group for a flow with this hash, or `None` for a group without hops. The same hash selects
    /// the same hop as long as the group is unchanged.
    #[inline]
    pub fn select(&self, group: GroupId, hash: u32) -> Option<H> {
        self.select_by(group, || hash)
    }

    /// Like [`Groups::select`], but computes the hash only if the group has several hops.
    #[inline]
    pub fn select_by(&self, group: GroupId, hash: impl FnOnce() -> u32) -> Option<H> {
        let descriptor = self.descriptors[usize::from(group.get())].load(Ordering::Acquire);
        let word = descriptor as u32;
        match descriptor >> COUNT_SHIFT {
            0 => None,
            1 => Some(H::from(word)),
            hops => {
                let index = (u64::from(hash()) * hops) >> 32;
                let at = word as usize * HOPS_MAX + index as usize;
                Some(H::from(self.hop_arrays[at].load(Ordering::Relaxed)))
            }
        }
    }

    /// Returns all hops of a group, in their order.
    pub fn hops(&self, group: GroupId) -> Vec<H> {
        let descriptor = self.descriptors[usize::from(group.get())].load(Ordering::Acquire);
        let word = descriptor as u32;
        match (descriptor >> COUNT_SHIFT) as usize {
            0 => Vec::new(),
            1 => vec![H::from(word)],
            hops => {
                let first = word as usize * HOPS_MAX;
                self.hop_arrays[first..first + hops].iter().map(|hop| H::from(hop.load(Ordering::Relaxed))).collect()
            }
        }
    }

    fn set_descriptor(&self, group: GroupId, hops: usize, word: u32) {
        let descriptor = (hops as u64) << COUNT_SHIFT | u64::from(word);
        self.descriptors[usize::from(group.get())].store(descriptor, Ordering::Release);
    }

    fn hop_array_of(&self, group: GroupId) -> Option<u32> {
        let descriptor = self.descriptors[usize::from(group.get())].load(Ordering::Relaxed);
        (descriptor >> COUNT_SHIFT > 1).then_some(descriptor as u32)
    }
}

/// What awaits the end of a grace period.
enum Garbage {
    HopArray(u32),
    Group(GroupId),
}

/// The writer's state.
pub(crate) struct Writer {
    domain: Arc<Domain>,
    retired: Retired<Garbage>,
    hop_arrays_free: Vec<u32>,
    groups_free: Vec<GroupId>,
    /// By number: the number of routes that use the group, or `None` if there is no such group.
    routes: Vec<Option<u32>>,
}

impl Writer {
    pub fn new(domain: Arc<Domain>) -> Writer {
        Writer {
            domain,
            retired: Retired::new(),
            hop_arrays_free: (0..HOP_ARRAYS as u32).rev().collect(),
            groups_free: (1..=GROUPS_MAX).rev().filter_map(GroupId::new).collect(),
            routes: vec![None; usize::from(GROUPS_MAX) + 1],
        }
    }

    fn collect(&mut self) {
        let (hop_arrays, groups) = (&mut self.hop_arrays_free, &mut self.groups_free);
        self.retired.collect(&self.domain, |garbage| match garbage {
            Garbage::HopArray(hop_array) => hop_arrays.push(hop_array),
            Garbage::Group(group) => groups.push(group),
        });
    }

    pub fn add<H: Copy + From<u32> + Into<u32>>(&mut self, groups: &Groups<H>, hops: &[H]) -> Result<GroupId, Error> {
        check_hops(hops.len())?;
        let group = wait_for_readers(|| {
            if self.groups_free.is_empty() || self.retired.len() >= COLLECT_THRESHOLD {
                self.collect();
            }
            let full = Err(Error::GroupsFull { groups_max: GROUPS_MAX });
            self.groups_free.pop().map(Ok).or_else(|| self.retired.is_empty().then_some(full))
        })??;
        if let Err(error) = self.publish(groups, group, hops) {
            self.groups_free.push(group);
            return Err(error);
        }
        self.routes[usize::from(group.get())] = Some(0);
        Ok(group)
    }

    pub fn set<H: Copy + From<u32> + Into<u32>>(
        &mut self,
        groups: &Groups<H>,
        group: GroupId,
        hops: &[H],
    ) -> Result<(), Error> {
        check_hops(hops.len())?;
        self.routes(group)?;
        let before = groups.hop_array_of(group);
        self.publish(groups, group, hops)?;
        if let Some(hop_array) = before {
            self.retired.push(&self.domain, Garbage::HopArray(hop_array));
        }
        Ok(())
    }

    /// Replaces the hops of a group by one store.
    fn publish<H: Copy + From<u32> + Into<u32>>(
        &mut self,
        groups: &Groups<H>,
        group: GroupId,
        hops: &[H],
    ) -> Result<(), Error> {
        let word = match hops {
            [] => 0,
            [hop] => (*hop).into(),
            _ => {
                let hop_array = wait_for_readers(|| {
                    if self.hop_arrays_free.is_empty() || self.retired.len() >= COLLECT_THRESHOLD {
                        self.collect();
                    }
                    self.hop_arrays_free.pop()
                })?;
                let first = hop_array as usize * HOPS_MAX;
                for (at, hop) in groups.hop_arrays[first..].iter().zip(hops) {
                    at.store((*hop).into(), Ordering::Relaxed);
                }
                hop_array
            }
        };
        groups.set_descriptor(group, hops.len(), word);
        Ok(())
    }

    pub fn remove<H: Copy + From<u32> + Into<u32>>(&mut self, groups: &Groups<H>, group: GroupId) -> Result<(), Error> {
        let routes = self.routes(group)?;
        if routes > 0 {
            return Err(Error::GroupInUse { group, routes });
        }
        self.routes[usize::from(group.get())] = None;
        // The descriptor stays for readers that still have the number; the next group with this number overwrites it.
        // The hop array becomes free at the same time as the number.
        if let Some(hop_array) = groups.hop_array_of(group) {
            self.retired.push(&self.domain, Garbage::HopArray(hop_array));
        }
        self.retired.push(&self.domain, Garbage::Group(group));
        Ok(())
    }

    /// Returns the number of routes that use a group.
    pub fn routes(&self, group: GroupId) -> Result<u32, Error> {
        self.routes[usize::from(group.get())].ok_or(Error::GroupUnknown { group })
    }

    /// Counts a route that changes from group `before` to group `after`; both groups exist.
    pub fn count_route(&mut self, before: Option<GroupId>, after: Option<GroupId>) {
        if let Some(routes) = after.and_then(|group| self.routes[usize::from(group.get())].as_mut()) {
            *routes += 1;
        }
        if let Some(routes) = before.and_then(|group| self.routes[usize::from(group.get())].as_mut()) {
            *routes -= 1;
        }
    }

    /// Returns the number of groups.
    pub fn len(&self) -> usize {
        self.routes.iter().flatten().count()
    }
}

fn check_hops(hops: usize) -> Result<(), Error> {
    if hops > HOPS_MAX {
        return Err(Error::TooManyHops { hops, hops_max: HOPS_MAX });
    }
    Ok(())
}
