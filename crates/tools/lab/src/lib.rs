//! The machine lab: guests that have no network device and share one device's memory, and scripts that run in them.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! let report = lab::Lab::new().guests(2).program("redis-server").script("echo \"$NODE is up\"").run()?;
//! assert_eq!(report.code(), 0, "{report}");
//! # Ok(())
//! # }
//! ```
//!
//! A guest is QEMU (emulated, so that it runs everywhere and the same), Debian's kernel and an image in memory:
//! busybox, the programs asked for with the libraries they name, and `guest/init.sh`, which runs the script.
//! `docs/lab.md` is the manual of scripts.
//!
//! **Nothing is left behind.** The device's memory and the image are memfds; guests are reached through sockets that
//! have no names; the one folder there is (for the device server's socket) goes with the lab; a guest dies with the
//! thread that started it, so keep that thread until the lab has ended.

mod device;
mod event;
mod guest;
mod image;
mod kernel;
mod options;
mod program;
mod report;
mod running;
mod spec;

pub use device::Device;
pub use options::Options;
pub use report::{GuestReport, Report, Trouble};
pub use running::Running;
pub use spec::{GUESTS_MAX, Lab, Node};
