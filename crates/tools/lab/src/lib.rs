//! The machine lab: guests that have no network device and share the memory of one device, and scripts that run in
//! them.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! let report = lab::Lab::new().guests(2).program("redis-server").script("echo \"$NODE is up\"").run()?;
//! assert_eq!(report.code(), 0, "{report}");
//! # Ok(())
//! # }
//! ```
//!
//! A guest is a QEMU machine (emulated, so that it runs everywhere in the same way) with Debian's kernel and an image
//! in memory: busybox, the requested programs with their libraries, and `guest/init.sh`, which runs the script.
//! `docs/lab.md` is the manual for scripts.
//!
//! **A lab leaves nothing behind.** The device's memory and the image are memfds. Guests are reached through unnamed
//! sockets. The only folder (for the device server's socket) is removed with the lab. A guest is killed when the thread
//! that started it ends, so that thread must live until the lab has ended.

mod device;
mod event;
pub mod guest_tool;
mod image;
mod kernel;
mod machine;
mod node;
mod options;
mod program;
mod report;
mod running;
mod spec;

pub use device::Device;
pub use node::Node;
pub use options::Options;
pub use report::{GuestReport, LabFailure, Report};
pub use running::RunningLab;
pub use spec::{GUESTS_MAX, Lab};
