//! epoll over lanes.
//!
//! The program's epoll descriptor stays a kernel epoll instance, in which the program's foreign descriptors are
//! registered as ever. With the first connection of ours it gets an *inner* epoll that the program does not see, with
//! the lifelines of its connections, under data that no program uses. What is ready on lanes is found in memory first;
//! see `ready_list` for how that stays cheap, and `wait` for how a wait goes.
//!
//! What is ready on lanes is reported in the order in which it became ready, and what was reported and stays ready goes
//! to the tail, as in the kernel's ready list; see `ready_time`.
//!
//! Where this differs from the kernel:
//! * A registration whose descriptor was closed while another one of the same connection lives stays, as in the kernel;
//!   but where the set holds all those others too, it is looked at in steps of a millisecond.
//! * A wait that finds lanes ready may leave out foreign descriptors that are ready too, for 20 microseconds at most.
//! * Only what arrives has a time of its own. The end of a stream, an error or room to write counts as of the wait that
//!   finds it, and of several records that an edge-triggered watcher has not read, the first one counts.
//! * Sets nest four deep: the kernel allows five instances on a path, and the last has an inner one.

mod closing;
mod control;
mod conversion;
mod deferred_closes;
mod event_buffer;
mod fork;
mod kernel;
mod ready_list;
mod ready_time;
mod registration;
mod set;
#[cfg(test)]
mod tests;
mod wait;
mod wakeup;

pub(crate) use closing::defer_handlers;
pub use closing::{forget, forget_listener, forget_stream};
pub use control::{control, create};
pub(crate) use conversion::is_in_a_set;
pub use conversion::{
    adopt, adopt_listener, adopt_stream, holds_listener, rewatch_listener, while_replaced, while_unregistered,
};
pub use fork::{after_fork_in_child, after_fork_in_parent, before_fork};
pub use set::EpollSet;
pub(crate) use set::SleepGuard;
pub use wait::wait;
pub(crate) use wait::{LANE_POLLS_PER_POLL, UNWAKEABLE_POLL_NS};
pub use wakeup::wake_sleepers;
