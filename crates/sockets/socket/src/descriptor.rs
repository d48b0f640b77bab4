//! The descriptors that are the library's own, and those that a message brings.

pub mod hidden;
pub mod received;
