//! A router node as a process.
