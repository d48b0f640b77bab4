//! Starting real programs over lanes, watching them, and ending them.
//!
//! The tests of this package use Crosslane as a user does: through the built command. Every test has a rack of its own
//! and ports that the kernel chose, so any number of runs can go on at once; whatever a test starts, it ends, also when
//! it fails.
//!
//! With `CROSSLANE_TEST_BARE=1` every program runs bare and nothing is asserted about lanes: a test that fails then
//! fails for reasons of its own.

pub mod c;
pub mod place;
pub mod port;
pub mod process;
pub mod rack;
pub mod script;
pub mod stat;

pub use port::{Server, start_server};
pub use process::{Finished, Process};
pub use rack::Rack;
pub use stat::{Stat, Traffic};

use std::time::Duration;

/// How long anything may take that should take a moment: only a hang ever waits this long.
pub const PATIENCE: Duration = Duration::from_secs(30);
