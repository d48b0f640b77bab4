//! Values that many routes share, each stored once: a full table has a handful of different sets of next hops.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// Identifies a value of an [`Interner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InternedId(u32);

impl InternedId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Values with the number of their users. A value without users is removed.
#[derive(Debug)]
pub struct Interner<T: ?Sized> {
    values: Vec<Option<Arc<T>>>,
    users: Vec<u32>,
    free: Vec<InternedId>,
    ids: HashMap<Arc<T>, InternedId>,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { values: Vec::new(), users: Vec::new(), free: Vec::new(), ids: HashMap::new() }
    }
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// Adds a user of a value, which `share` copies if it is new. Returns the value's number, and whether it is new.
    pub fn add(&mut self, value: &T, share: impl FnOnce(&T) -> Arc<T>) -> (InternedId, bool) {
        if let Some(id) = self.ids.get(value) {
            self.users[id.index()] += 1;
            return (*id, false);
        }
        let value = share(value);
        let id = match self.free.pop() {
            Some(id) => {
                self.values[id.index()] = Some(value.clone());
                self.users[id.index()] = 1;
                id
            }
            None => {
                self.values.push(Some(value.clone()));
                self.users.push(1);
                InternedId(self.values.len() as u32 - 1)
            }
        };
        self.ids.insert(value, id);
        (id, true)
    }

    /// Removes a user of a value. Returns the value if that was the last one.
    ///
    /// # Panics
    /// If it has no users.
    pub fn release(&mut self, id: InternedId) -> Option<Arc<T>> {
        let users = &mut self.users[id.index()];
        *users = users.checked_sub(1).expect("a value with users");
        if *users > 0 {
            return None;
        }
        let value = self.values[id.index()].take()?;
        self.ids.remove(&*value);
        self.free.push(id);
        Some(value)
    }

    /// Returns a value.
    ///
    /// # Panics
    /// If it has no users.
    pub fn get(&self, id: InternedId) -> &T {
        self.values[id.index()].as_deref().expect("a value with users")
    }

    /// Iterates over the values.
    pub fn iter(&self) -> impl Iterator<Item = (InternedId, &T)> {
        let values = self.values.iter().enumerate();
        values.filter_map(|(index, value)| Some((InternedId(index as u32), value.as_deref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_stored_once_and_removed_with_their_last_user() {
        let mut words: Interner<str> = Interner::default();
        let (one, is_new) = words.add("one", |word| Arc::from(word));
        assert!(is_new);
        assert_eq!(words.add("one", |word| Arc::from(word)), (one, false));
        let (two, _) = words.add("two", |word| Arc::from(word));
        assert_ne!(one, two);
        assert_eq!(words.iter().count(), 2);
        assert_eq!(words.release(one), None);
        assert_eq!(words.get(one), "one");
        assert_eq!(words.release(one).as_deref(), Some("one"));
        assert_eq!(words.iter().map(|(_, word)| word).collect::<Vec<_>>(), ["two"]);
        // Its number is used again.
        assert_eq!(words.add("three", |word| Arc::from(word)), (one, true));
    }
}
