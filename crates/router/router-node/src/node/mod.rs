//! The process of a node: a forwarding thread, and a control thread for other nodes, the kernel and commands. The two
//! share no state and exchange [`messages`].

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
mod route_table;
mod settings;
mod start;
mod state;
mod status;

pub use error::NodeError;
pub use kernel_settings::restore_kernel_settings;
pub use settings::NodeSettings;
pub use state::Node;
