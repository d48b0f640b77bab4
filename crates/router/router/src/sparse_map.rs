//! Hash maps that have lost nearly all of their entries, as when a full table is withdrawn.

use std::collections::HashMap;
use std::hash::Hash;

/// Returns memory of a map that has lost nearly all of its entries. Called after each removal, this takes constant time
/// on average.
pub fn shrink_if_sparse<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    const ENTRIES_FEW: usize = 1 << 16;
    if map.capacity() > ENTRIES_FEW && map.len() < map.capacity() / 8 {
        map.shrink_to(map.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_that_is_nearly_empty_is_small() {
        let mut map: HashMap<u32, u32> = (0..1 << 18).map(|number| (number, number)).collect();
        for number in 0..1 << 18 {
            map.remove(&number);
            shrink_if_sparse(&mut map);
            assert!(map.capacity() <= (map.len() * 17).max(1 << 17), "{} of {}", map.len(), map.capacity());
        }
    }
}
