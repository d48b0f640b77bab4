//! Contexts on chip, of which there are more than there is room for: the collapse of NICs that keep them in a cache.

use sim::{Random, Span, Time};

use super::counters::NicCounters;
use super::profile::{ContextCacheConfig, NicProfile};

/// No context.
const NONE: u32 = u32::MAX;

/// A cache that gives up a context by chance when it needs room, and the unit that fetches what is missing.
#[derive(Debug)]
pub(super) struct ContextCache {
    /// Which context each place holds.
    slots: Vec<u32>,
    /// Where each context is.
    slot_of: Vec<u32>,
    filled: usize,
    /// When each fetch that may go on at the same time ends.
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

    /// Uses a context: when it is there.
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

    /// When a fetch that is asked for now ends.
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
    fn a_cache_holds_what_fits_and_fetches_the_rest_a_few_at_a_time() {
        let mut profile = NicProfile::modelled(TransportPolicy::ConnectionCache);
        let constants = ContextCacheConfig { contexts: 4, fetches: 2, miss: Span::from_ns(1000.0) };
        profile.cache = Some(constants);
        let (mut cache, mut counters) = (ContextCache::new(&constants, 1), NicCounters::default());
        let at = |ns: f64| Time::ZERO + Span::from_ns(ns);
        let mut touch = |now, context| cache.touch(now, context, &profile, &mut counters);
        let there: Vec<Time> = (0..4).map(|context| touch(Time::ZERO, context)).collect();
        assert_eq!(there, [at(1000.0), at(1000.0), at(2000.0), at(2000.0)]);
        assert_eq!(touch(at(5000.0), 3), at(5000.0), "it is there");
        assert_eq!(touch(at(5000.0), 9), at(6000.0), "it is not");
        let misses = (0..4).filter(|context| touch(at(9000.0), *context) > at(9000.0)).count();
        assert!(misses >= 1, "one of the four had to go");
        assert_eq!(counters.cache_hits + counters.cache_misses, 10);
    }
}
