//! Views and builders of what a router meets on Ethernet.
#![forbid(unsafe_code)]
