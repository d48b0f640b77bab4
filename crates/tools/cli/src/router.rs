//! `crosslane router`: clusters of router nodes.

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

/// What to do.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Bring up the nodes of a cluster file on this machine
    Up(up::Options),
    /// Bring down the nodes of a cluster file on this machine
    Down(loaded::NodeOptions),
    /// Have the nodes that are up read the cluster file again, and become what it says
    Reload(loaded::NodeOptions),
    /// How the nodes of a cluster file are: ports, other nodes, neighbours, routes, drops
    Status(status::Options),
    /// What a node forwards where: all its routes, or the one of an address
    Fib(fib::Options),
    /// Follow packets through the nodes, step by step
    Trace(trace::Options),
    /// Three router nodes in network namespaces with hosts around them: ping, traceroute, curl and iperf3 cross them
    Demo(demo::Options),
    /// Print a cluster file with nodes a, b, ... in network namespaces of their names
    Example(example::Options),
    /// Make the key by which nodes of several machines know each other, in a new file
    Key(key::Options),
    /// One node's process, which 'up' starts
    #[command(hide = true)]
    Node(node::Options),
}

/// Does it.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Up(options) => up::main(options),
        Command::Down(options) => down::main(options),
        Command::Reload(options) => reload::main(options),
        Command::Status(options) => status::main(options),
        Command::Fib(options) => fib::main(options),
        Command::Trace(options) => trace::main(options),
        Command::Demo(options) => demo::main(options),
        Command::Example(options) => example::main(options),
        Command::Key(options) => key::main(options),
        Command::Node(options) => node::main(options),
    }
}
