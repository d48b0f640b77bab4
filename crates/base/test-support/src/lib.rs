//! Helpers for tests of several crates. The crate is only a dev-dependency: no product code uses it.

#![forbid(unsafe_code)]

pub mod spawn;
