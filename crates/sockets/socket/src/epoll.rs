//! epoll over lanes.
//!
//! The program's epoll descriptor stays a kernel epoll instance, in which descriptors that the library does not serve
//! are registered as usual. When the program registers the first connection, the instance gets an *inner* epoll
//! instance, which the program does not see. It holds the lifelines of the connections and is registered under data
//! that no program uses. Lanes are polled in memory first; `ready_list` describes how their number stays small, and
//! `wait` describes a wait.
//!
//! A set may hold other sets, which is why `set`, `ready_list` and `registration` refer to each other.
//!
//! Lanes are reported in the order in which they became ready; one that stays ready moves to the tail when it is
//! reported, as in the kernel's ready list; see `ready_time`.
//!
//! Differences from the kernel:
//! * As in the kernel, a registration stays after its descriptor was closed, as long as the connection has another
//!   descriptor. Where the set holds all the other descriptors as well, the registration is polled once a millisecond.
//! * A wait that finds ready lanes may omit other ready descriptors for at most 20 microseconds.
//! * Only received data carries a timestamp. The end of a stream, an error and room to write count from the wait that
//!   finds them, and of several records that an edge-triggered watcher has not read, the first one counts.
//! * Sets nest four deep, because the kernel allows five nested instances and the innermost set has an inner one.

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
