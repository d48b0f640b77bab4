//! Starts real programs over lanes, watches them, and ends them.
//!
//! The tests of this package use Crosslane as a user does: through the built command. Every test has its own rack and
//! its own ports, so any number of runs can be in progress at once. A test ends all processes that it starts, also when
//! it fails.
//!
//! With `CROSSLANE_TEST_BARE=1` every program runs bare and nothing is asserted about lanes: a failure is then not
//! caused by Crosslane.

pub mod c;
pub mod local_nodes;
pub mod netns;
pub mod paths;
pub mod port;
pub mod process;
pub mod rack;
pub mod script;
pub mod shared_rack;
pub mod stat;
pub mod wait;

pub use local_nodes::LocalNodes;
pub use port::{Server, start_server};
pub use process::{Finished, Process};
pub use rack::Rack;
pub use shared_rack::SharedRack;
pub use stat::{Stat, Traffic};
pub use wait::{wait_for, wait_until};

use std::time::Duration;

/// Limit of a wait that should be short: only a hang waits this long.
pub const WAIT_MAX: Duration = Duration::from_secs(30);

/// Whether the test runs as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
