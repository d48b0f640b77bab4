//! All contexts, and which of them are on chip.

use std::ops::{Index, IndexMut};

use super::context::Context;

/// All contexts, in the host's memory or on chip. To look at one that is away is a bug, and in builds with debug
/// assertions a panic: hardware has only what it fetched.
#[derive(Debug, Default)]
pub(super) struct ContextTable {
    pub(super) all: Vec<Context>,
    /// Which are away; empty where all are on chip for ever.
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

    /// As the driver sees it, wherever it lies.
    pub fn as_driver(&self, i: usize) -> &Context {
        &self.all[i]
    }

    /// The same, if there is one.
    pub fn get(&self, i: usize) -> Option<&Context> {
        self.all.get(i)
    }

    /// As the driver sees them, wherever they lie.
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
        debug_assert!(!self.is_nonresident(i), "the context of queue pair {i} is in the host's memory");
        &self.all[i]
    }
}

impl IndexMut<usize> for ContextTable {
    fn index_mut(&mut self, i: usize) -> &mut Context {
        debug_assert!(!self.is_nonresident(i), "the context of queue pair {i} is in the host's memory");
        &mut self.all[i]
    }
}
