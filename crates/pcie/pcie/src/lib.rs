//! PCI Express, three ways, in one vocabulary:
//!
//! * [`link`]: what a link is: generation, width, payload and request limits.
//! * [`configuration`]: what a device's configuration space says of its link.
//! * [`tlp`]: the packets on it, and what each costs in bytes.
//! * [`model`]: what a link leaves for data, by the protocol's arithmetic alone.
//! * [`parameters`]: files that describe devices and hosts.
//! * [`host`]: a machine with a device in it, simulated.
//! * [`test`] and [`result`]: the five tests of pcie-bench, and what they bring, in one versioned form for models,
//!   simulations, measurements and published data alike.
//!
//! Nothing here reads a clock or touches a device: time and randomness are handed in.
//!
//! Source of the method: Neugebauer et al., "Understanding PCIe performance for end host networking", SIGCOMM 2018.

pub mod configuration;
pub mod fit;
pub mod host;
pub mod link;
pub mod model;
pub mod parameters;
pub mod result;
pub mod test;
pub mod tlp;
