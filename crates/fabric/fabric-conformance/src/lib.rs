//! Fabric's conformance suite, run against every backend and wrapper: see `tests/conformance.rs`. The tests are a
//! package of their own because they are built without optimization: hundreds of tests of a few lines each take far
//! longer to compile than to run.
