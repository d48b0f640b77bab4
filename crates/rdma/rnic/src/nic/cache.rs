//! A cache of contexts on chip: reproduces the performance collapse of NICs with more contexts than the cache holds.

use sim::{Random, Span, Time};

use super::counters::NicCounters;
use super::profile::{ContextCacheConfig, NicProfile};

/// No context.
const NONE: u32 = u32::MAX;

/// A cache with random replacement, and the unit that fetches missing contexts.
#[derive(Debug)]
pub(super) struct ContextCache {
    /// The context in each slot.
    slots: Vec<u32>,
    /// The slot of each context.
    slot_of: Vec<u32>,
    filled: usize,
    /// When each of the parallel fetches ends.
    fetches: Vec<Time>,
    random: Random,
}

impl ContextCache {
    pub fn new(constants: &ContextCacheConfig, seed: u64) -> Self {
        Self {
            slots: vec![NONE; constants.contexts as usize],
            slot_of: Vec::new(),
            filled: 0,
            fetches: vec![Time::ZERO; constants.fetches as usize],
            random: Random::new(seed, "context cache"),
        }
    }

    /// Accesses a context; returns when it is on chip.
    pub fn touch(&mut self, now: Time, context: u32, profile: &NicProfile, counters: &mut NicCounters) -> Time {
        if self.slot_of.len() <= context as usize {
            self.slot_of.resize(context as usize + 1, NONE);
        }
        if self.slot_of[context as usize] != NONE {
            counters.cache_hits += 1;
            return now;
        }
        counters.cache_misses += 1;
        self.insert(context);
        let miss = profile.cache.map_or(Span::ZERO, |cache| cache.miss);
        self.fetch(now, if profile.costs.dma_read > Span::ZERO { miss } else { Span::ZERO })
    }

    fn insert(&mut self, context: u32) {
        let slot = if self.filled < self.slots.len() {
            self.filled += 1;
            self.filled - 1
        } else {
            self.random.below(self.slots.len() as u64) as usize
        };
        let before = std::mem::replace(&mut self.slots[slot], context);
        if before != NONE {
            self.slot_of[before as usize] = NONE;
        }
        self.slot_of[context as usize] = slot as u32;
    }

    /// Starts a fetch; returns when it ends.
    fn fetch(&mut self, now: Time, takes: Span) -> Time {
        let Some(free) = self.fetches.iter_mut().min() else { return now };
        *free = (*free).max(now) + takes;
        *free
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::TransportPolicy;

    #[test]
    fn misses_are_fetched_a_few_at_a_time() {
        let mut profile = NicProfile::modelled(TransportPolicy::ConnectionCache);
        let constants = ContextCacheConfig { contexts: 4, fetches: 2, miss: Span::from_ns(1000.0) };
        profile.cache = Some(constants);
        let (mut cache, mut counters) = (ContextCache::new(&constants, 1), NicCounters::default());
        let at = |ns: f64| Time::ZERO + Span::from_ns(ns);
        let mut touch = |now, context| cache.touch(now, context, &profile, &mut counters);
        let there: Vec<Time> = (0..4).map(|context| touch(Time::ZERO, context)).collect();
        assert_eq!(there, [at(1000.0), at(1000.0), at(2000.0), at(2000.0)]);
        assert_eq!(touch(at(5000.0), 3), at(5000.0), "a hit");
        assert_eq!(touch(at(5000.0), 9), at(6000.0), "a miss");
        let misses = (0..4).filter(|context| touch(at(9000.0), *context) > at(9000.0)).count();
        assert!(misses >= 1, "one of the four was replaced");
        assert_eq!(counters.cache_hits + counters.cache_misses, 10);
    }
}
