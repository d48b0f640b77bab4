//! The descriptors that are the library's own.

pub mod hidden;
