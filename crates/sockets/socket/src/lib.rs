//! What the library needs of the process that it is loaded in, and of the rack. This crate defines no libc symbols.
//!
//! All code in this crate may run inside any program, at any point of it. It therefore starts no thread, makes system
//! calls directly, falls back to the kernel instead of failing, and prints nothing except lines for the user about the
//! environment and about what `--require-lane` refuses.
//!
//! The modules from the bottom up; each uses only those before it:
//!
//! * [`process`]: system calls, settings, signals, locks; [`descriptor`]: the descriptors that are the library's own.
//! * [`rack`]: the rack directory, and how programs ask for listeners of other nodes.
//! * [`accounting`]: the memory budget and the counters.

// The crate handles raw descriptors, buffers of C callers, and objects that C programs share between threads.
#![allow(unsafe_code)]

pub mod accounting;
pub mod descriptor;
pub mod environment;
pub mod process;
pub mod rack;
