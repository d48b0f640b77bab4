//! Test doubles and the conformance suite, for the tests of crates that use or implement links.
//!
//! Nothing here is part of the product. The module exists only with the feature `test-support`, which only
//! dev-dependencies, test crates and fuzz targets enable.
//!
//! | module | what |
//! |---|---|
//! | [`faulty`] | a link whose stores are late, reordered, corrupted or lost, by a seeded plan |
//! | [`non_coherent`] | memory shared by two nodes with caches that are not coherent, simulated |
//! | [`counting`] | memory that counts barriers and flushes, and runs a hook after each store |
//! | `conformance` | the tests that every backend passes (feature `conformance`, which needs proptest) |

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod counting;
pub mod faulty;
pub mod non_coherent;
mod random;
