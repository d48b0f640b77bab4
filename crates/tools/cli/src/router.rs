//! `crosslane router`: runs and inspects clusters of router nodes.

mod capture;
mod demo;
mod down;
mod example;
mod fib;
mod key;
mod loaded;
mod node;
mod reload;
mod request;
mod status;
mod trace;
mod up;

use anyhow::Result;

/// Subcommands of `crosslane router`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Bring up the nodes of a cluster file on this machine
    Up(up::Options),
    /// Bring down the nodes of a cluster file on this machine
    Down(loaded::NodeOptions),
    /// Make the nodes that are up read the cluster file again and apply its changes
    Reload(loaded::NodeOptions),
    /// Show the state of the nodes of a cluster file: ports, other nodes, neighbours, routes, drops
    Status(status::Options),
    /// Show the forwarding table of a node: all routes, or the one for an address
    Fib(fib::Options),
    /// Trace packets through the nodes, step by step
    Trace(trace::Options),
    /// Capture the frames of a port into a pcapng file
    Capture(capture::Options),
    /// Run three router nodes and their hosts in network namespaces; ping, traceroute, curl and iperf3 cross them
    Demo(demo::Options),
    /// Print a cluster file with nodes a, b, ... in network namespaces of the same names
    Example(example::Options),
    /// Create a key file with which nodes on several machines authenticate each other
    Key(key::Options),
    /// Run one node; 'up' starts it
    #[command(hide = true)]
    Node(node::Options),
}

/// Runs the subcommand.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Up(options) => up::main(options),
        Command::Down(options) => down::main(options),
        Command::Reload(options) => reload::main(options),
        Command::Status(options) => status::main(options),
        Command::Fib(options) => fib::main(options),
        Command::Trace(options) => trace::main(options),
        Command::Capture(options) => capture::main(options),
        Command::Demo(options) => demo::main(options),
        Command::Example(options) => example::main(options),
        Command::Key(options) => key::main(options),
        Command::Node(options) => node::main(options),
    }
}
