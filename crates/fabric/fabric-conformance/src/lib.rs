//! Nothing but tests: fabric's conformance suite, held against every backend and wrapper. They are a package of their
//! own because they are built without optimisation: 578 tests of some lines each are compiled far longer than they run.
