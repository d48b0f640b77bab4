//! Starts real programs over lanes, watches them, and ends them.
//!
//! The tests of this package use Crosslane as a user does: through the built command. Every test has its own rack and
//! its own ports, so any number of runs can be in progress at once. A test ends all processes that it starts, also when
//! it fails.
//!
//! With `CROSSLANE_TEST_BARE=1` every program runs bare and nothing is asserted about lanes: a failure is then not
//! caused by Crosslane.

pub mod c;
pub mod paths;
pub mod port;
pub mod process;
pub mod rack;
pub mod rack_file;
pub mod script;
pub mod stat;

pub use port::{Server, start_server};
pub use process::{Finished, Process};
pub use rack::Rack;
pub use stat::{Stat, Traffic};

use std::time::Duration;

/// Limit of a wait that should be short: only a hang waits this long.
pub const WAIT_MAX: Duration = Duration::from_secs(30);
