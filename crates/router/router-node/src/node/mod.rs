//! The process of a node: a forwarding thread, a thread that watches the kernel, and a control thread for other nodes
//! and commands. They share no state and exchange [`messages`]. Whatever the control thread does at once is bounded, so
//! that its keepalives are in time.

mod candidate;
mod capture;
mod cgroup_freezer;
mod clients;
mod effect;
mod error;
mod event_loop;
mod fib_query;
mod filters;
mod forwarding;
mod gateways;
mod interconnect_clock;
mod kernel_changes;
mod kernel_settings;
mod kernel_watch;
mod liveness;
mod local_routes;
mod messages;
mod metrics;
mod open_ports;
mod peers;
mod port_state;
mod ports;
mod rejected_routes;
mod reload;
mod renumbering;
mod reports;
mod requests;
mod rescan;
mod route_table;
mod settings;
mod stale_routes;
mod start;
mod state;
mod status;

pub use error::NodeError;
pub use kernel_settings::restore_kernel_settings;
pub use settings::NodeSettings;
pub use state::Node;
