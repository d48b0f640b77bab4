//! The connections of an engine, by key and by number.

use crate::frame::ConnectionNumber;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

/// Identifies a connection in its engine: valid until the connection ends, and never reused for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    index: u32,
    generation: u32,
}

impl ConnectionKey {
    /// Returns the key as one word, for the user data of an epoll registration.
    pub fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Restores a key from a word.
    pub fn from_word(word: u64) -> Self {
        Self { index: word as u32, generation: (word >> 32) as u32 }
    }
}

#[derive(Debug)]
struct Entry<C> {
    generation: u32,
    content: Option<(ConnectionNumber, C)>,
}

#[derive(Debug)]
pub(crate) struct Table<C> {
    entries: Vec<Entry<C>>,
    free: Vec<u32>,
    by_number: HashMap<u32, u32, FoldedMultiply>,
    connections_max: usize,
}

impl<C> Table<C> {
    /// Creates a table. `secret` keeps a peer from choosing numbers that collide in the hash table.
    pub(crate) fn new(connections_max: usize, secret: u64) -> Self {
        let by_number = HashMap::with_hasher(FoldedMultiply { secret });
        Self { entries: Vec::new(), free: Vec::new(), by_number, connections_max }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_number.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.connections_max
    }

    /// Inserts a connection whose number is not in the table yet.
    pub(crate) fn insert(&mut self, number: ConnectionNumber, content: C) -> ConnectionKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, content: None });
            u32::try_from(self.entries.len() - 1).expect("the number of connections is bounded")
        });
        let was = self.by_number.insert(number.0, index);
        assert!(was.is_none(), "{number:?} is inserted twice");
        let entry = &mut self.entries[index as usize];
        entry.content = Some((number, content));
        ConnectionKey { index, generation: entry.generation }
    }

    #[inline]
    pub(crate) fn find(&self, number: ConnectionNumber) -> Option<ConnectionKey> {
        let index = *self.by_number.get(&number.0)?;
        Some(ConnectionKey { index, generation: self.entries[index as usize].generation })
    }

    #[inline]
    pub(crate) fn get(&mut self, key: ConnectionKey) -> Option<&mut C> {
        let entry = self.entries.get_mut(key.index as usize).filter(|entry| entry.generation == key.generation)?;
        entry.content.as_mut().map(|(_, content)| content)
    }

    pub(crate) fn remove(&mut self, key: ConnectionKey) -> Option<C> {
        let entry = self.entries.get_mut(key.index as usize).filter(|entry| entry.generation == key.generation)?;
        let (number, content) = entry.content.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.by_number.remove(&number.0);
        self.free.push(key.index);
        Some(content)
    }

    /// Returns the keys of all connections.
    pub(crate) fn keys(&self) -> Vec<ConnectionKey> {
        let taken = self.entries.iter().enumerate().filter(|(_, entry)| entry.content.is_some());
        taken.map(|(index, entry)| ConnectionKey { index: index as u32, generation: entry.generation }).collect()
    }

    /// Removes all connections.
    pub(crate) fn drain(&mut self) -> Vec<C> {
        self.keys().into_iter().filter_map(|key| self.remove(key)).collect()
    }
}

/// Hashes one word by a folded multiplication.
#[derive(Debug, Clone)]
struct FoldedMultiply {
    secret: u64,
}

struct FoldedMultiplyHasher {
    secret: u64,
    hash: u64,
}

impl BuildHasher for FoldedMultiply {
    type Hasher = FoldedMultiplyHasher;

    fn build_hasher(&self) -> FoldedMultiplyHasher {
        FoldedMultiplyHasher { secret: self.secret, hash: 0 }
    }
}

impl Hasher for FoldedMultiplyHasher {
    fn finish(&self) -> u64 {
        self.hash
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, word: u32) {
        let product = u128::from(self.hash ^ self.secret ^ u64::from(word)) * 0x9E37_79B9_7F4A_7C15;
        self.hash = (product >> 64) as u64 ^ product as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_reused() {
        let mut table = Table::new(10, 1);
        let first = table.insert(ConnectionNumber(7), 'a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert(ConnectionNumber(7), 'b');
        assert_ne!(first, second);
        assert_eq!(table.get(first), None);
        assert_eq!(table.get(second), Some(&mut 'b'));
        assert_eq!(table.remove(first), None);
        assert_eq!(ConnectionKey::from_word(second.to_word()), second);
    }

    #[test]
    fn connections_are_found_by_number_as_long_as_they_are_there() {
        let mut table = Table::new(1000, 0x1234_5678_9ABC_DEF0);
        let keys: Vec<ConnectionKey> =
            (0..1000).map(|number| table.insert(ConnectionNumber(number << 20 | number), number)).collect();
        assert!(table.is_full());
        for (number, key) in (0..1000).zip(&keys).step_by(2) {
            assert_eq!(table.remove(*key), Some(number));
        }
        for number in 0..1000 {
            assert_eq!(table.find(ConnectionNumber(number << 20 | number)).is_some(), number % 2 == 1);
        }
        assert_eq!(table.drain().len(), 500);
        assert_eq!(table.len(), 0);
    }
}
