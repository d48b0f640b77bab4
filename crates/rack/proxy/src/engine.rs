//! The engine: connections over one or two partitions of a link, sans-IO.
//!
//! Modules, from the top down:
//!
//! * `poll`: what a poll does, and in which order.
//! * `receive`: frames from the peer.
//! * `send`: frames to the peer, and which connection sends next.
//! * `parking`: polling local endpoints, parking them, and preparing for sleep.
//! * `resume`: leaving a lost link, and resuming over another transport.
//! * `with_span`: connections whose programs may store into the windows themselves; `suspended`: these beyond the loss
//!   of their link.
//! * `state`: the engine's state, which all of the above extend.
//! * `partition`: lanes, queues and the order of publishing; `yielding`: when to yield the processor; `settings`,
//!   `event`.

mod event;
mod parking;
mod partition;
mod poll;
mod receive;
mod resume;
mod send;
mod settings;
mod state;
mod suspended;
mod with_span;
mod yielding;

pub use event::{EngineEvent, LinkFault, PollOutcome};
pub use partition::PartitionLanes;
pub use resume::DetachedEngine;
pub use settings::EngineSettings;
pub use state::Engine;
pub use suspended::SuspendedConnection;
