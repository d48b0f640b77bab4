//! The live proxy: engines over the partitions of a device, run by one thread per CPU, under a monitor.
//!
//! Threads share the device, the listeners' sockets and the channel to the monitor. Connections, engines and partitions
//! belong to one thread each. The monitor sends the commands ([`control::proxy`]). When the monitor dies, the proxy
//! continues until another monitor adopts it.
//!
//! Modules, from the top down:
//!
//! * `process`: the main thread, which serves the monitor; `successor`: what happens when the monitor dies.
//! * `event_loop`: the loop of a thread that owns engines, over these parts: `engine_table` (its engines), `opening`
//!   (connections between nodes), `acceptor` (programs that connect to remote listeners), `command`, `epoll_set`,
//!   `idle` (when it blocks) and `coarse_clock`.
//! * `link_engine`: an engine over the partitions of a link (`dyn_engine`, `link_partitions`).
//! * `failover`: engines that have lost their link, over kernel TCP.
//! * `awaiting_link`: connections with a span without a link.
//! * `tcp_endpoint`: the proxy's endpoint of a connection, which may have a span of the `span_pool`. Its program has
//!   connected to a `tcp_listener`, or is a server to which `tcp_server` has connected, from one of the `source_ports`;
//!   `connecting`: connects to servers whose queue is full.
//! * `shared`: what all threads share; `engine_plan`, `open_payload`, `monitor_channel`, `wakeup`, `error`.

mod acceptor;
mod awaiting_link;
mod coarse_clock;
mod command;
mod connecting;
mod dyn_engine;
mod engine_plan;
mod engine_table;
mod epoll_set;
mod error;
mod event_loop;
mod failover;
mod idle;
mod link_engine;
mod link_partitions;
mod monitor_channel;
mod open_payload;
mod opening;
mod process;
mod shared;
mod source_ports;
mod span_pool;
mod successor;
mod tcp_endpoint;
mod tcp_listener;
mod tcp_server;
mod wakeup;

pub use error::DriverError;
pub use process::run;
