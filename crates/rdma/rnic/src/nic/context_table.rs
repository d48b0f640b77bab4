//! The contexts of all queue pairs, and which of them are on chip.

use std::ops::{Index, IndexMut};

use super::context::Context;

/// The contexts of all queue pairs. Access by index to a context that is not on chip is a bug and panics in builds with
/// debug assertions, because hardware has only the contexts that it fetched.
#[derive(Debug, Default)]
pub(super) struct ContextTable {
    pub(super) all: Vec<Context>,
    /// Contexts that are not on chip; empty where all contexts always are.
    nonresident: Vec<bool>,
}

impl ContextTable {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn push(&mut self, context: Context, is_nonresident: bool) {
        self.all.push(context);
        if is_nonresident {
            self.nonresident.push(true);
        }
    }

    /// Returns a context, on chip or not, for the driver.
    pub fn as_driver(&self, i: usize) -> &Context {
        &self.all[i]
    }

    /// Returns a context, on chip or not, if it exists.
    pub fn get(&self, i: usize) -> Option<&Context> {
        self.all.get(i)
    }

    /// Returns all contexts, on chip or not, for the driver.
    pub fn iter(&self) -> impl Iterator<Item = &Context> {
        self.all.iter()
    }

    pub fn is_nonresident(&self, i: usize) -> bool {
        self.nonresident.get(i).copied().unwrap_or(false)
    }

    pub fn set_nonresident(&mut self, i: usize, is_nonresident: bool) {
        if let Some(nonresident) = self.nonresident.get_mut(i) {
            *nonresident = is_nonresident;
        }
    }
}

impl Index<usize> for ContextTable {
    type Output = Context;

    fn index(&self, i: usize) -> &Context {
        debug_assert!(!self.is_nonresident(i), "the context of queue pair {i} is not on chip");
        &self.all[i]
    }
}

impl IndexMut<usize> for ContextTable {
    fn index_mut(&mut self, i: usize) -> &mut Context {
        debug_assert!(!self.is_nonresident(i), "the context of queue pair {i} is not on chip");
        &mut self.all[i]
    }
}
