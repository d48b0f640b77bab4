//! Packet filters of the node's network namespace, and who forwards because of them: see [`FilterMode`].

use router::TransitPath;
use router_ports::netlink::NetlinkError;
use router_ports::{FilterWatch, Interface, InterfaceIndex};
use tracing::{error, info, warn};

use super::error::NodeError;
use super::messages::Command;
use super::open_ports::{KERNEL_FORWARDS, SLOW_PATH};
use super::state::Node;
use crate::cluster::{FilterMode, Node as NodeConfig, PortKind};
use crate::management::FiltersStatus;

/// Why sessions with other nodes are closed.
const CLOSED: &str = "packet filters would be bypassed";

/// The packet filters of the namespace, and what follows from them.
pub struct Filters {
    watch: FilterWatch,
    /// The filters that would apply to forwarded packets, in words.
    found: Vec<String>,
    /// Those that are polled.
    polled: Vec<String>,
    /// Why the kernel cannot forward, and the remedy.
    obstacle: Option<String>,
    /// Who forwards.
    path: TransitPath,
    /// Filters may have changed.
    is_readable: bool,
    /// The logged error of reading them.
    logged_error: Option<String>,
    /// The logged state.
    logged: Option<String>,
}

impl Filters {
    pub fn open() -> Result<Filters, NetlinkError> {
        Ok(Filters {
            watch: FilterWatch::open()?,
            found: Vec::new(),
            polled: Vec::new(),
            obstacle: None,
            path: TransitPath::Router,
            is_readable: true,
            logged_error: None,
            logged: None,
        })
    }

    /// Returns descriptors that are readable when filters may have changed.
    pub fn wakes(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        self.watch.wakes()
    }

    /// Whether nothing is forwarded.
    pub fn is_closed(&self) -> bool {
        self.path == TransitPath::Closed
    }

    /// Whether the kernel forwards.
    pub fn kernel_forwards(&self) -> bool {
        self.path == TransitPath::Kernel
    }

    /// Lets the filters be read again.
    pub fn note_readable(&mut self) {
        self.is_readable = true;
    }

    /// Returns who forwards with the filters that were found.
    fn wanted_path(&self, mode: FilterMode) -> TransitPath {
        match mode {
            _ if self.found.is_empty() => TransitPath::Router,
            FilterMode::Ignore => TransitPath::Router,
            FilterMode::Honour if self.obstacle.is_none() => TransitPath::Kernel,
            FilterMode::Honour | FilterMode::Refuse => TransitPath::Closed,
        }
    }

    pub fn status(&self, mode: FilterMode) -> FiltersStatus {
        let path = match self.path {
            TransitPath::Router => "router",
            TransitPath::Kernel => "kernel",
            TransitPath::Closed => "closed",
        };
        let obstacle = self.obstacle.clone().filter(|_| mode == FilterMode::Honour && !self.found.is_empty());
        FiltersStatus { mode: mode.as_str().to_owned(), path: path.to_owned(), found: self.found.clone(), obstacle }
    }
}

/// Returns why the kernel cannot forward for the node: it would send packets of static routes by its own interfaces
/// through the router, past filters of these interfaces.
fn obstacle(node: &NodeConfig) -> Option<String> {
    let is_of_kernel = |device: &str| node.port(device).is_some_and(|(_, port)| port.kind.has_kernel());
    let route = node.routes.iter().find(|route| is_of_kernel(&route.port))?;
    let (to, device) = (route.to, &route.port);
    let via = route.via.map_or_else(String::new, |via| format!(" via {via}"));
    Some(format!(
        "the static route to {to} would bypass filters of {device}: remove it from the file, and run 'ip route add \
         {to}{via} dev {device}'"
    ))
}

impl Node {
    /// Finds packet filters before the first packet is forwarded.
    ///
    /// # Errors
    /// There are some, and the node must not start because of them; or they cannot be read.
    pub(super) fn check_filters_at_start(&mut self) -> Result<(), NodeError> {
        self.read_filters()?;
        let mode = self.settings.node().filters;
        if self.filters.wanted_path(mode) == TransitPath::Closed {
            let remedy = "remove them, or set filters = \"honour\" or \"ignore\" in the file".to_owned();
            let remedy = self.filters.obstacle.clone().filter(|_| mode == FilterMode::Honour).unwrap_or(remedy);
            return Err(NodeError::Filters { found: self.filters.status(mode).shown(), remedy });
        }
        self.follow_filters();
        Ok(())
    }

    /// Reads the filters again if they may have changed, and follows them.
    pub(super) fn watch_filters(&mut self) {
        let is_due = std::mem::take(&mut self.filters.is_readable);
        if !is_due {
            return;
        }
        let has_changed = self.filters.watch.has_changed();
        let polled = FilterWatch::find_polled(&self.filtered_interfaces());
        if !has_changed && self.filters.logged_error.is_none() && polled == self.filters.polled {
            return;
        }
        self.update_filters();
    }

    /// Reads the filters, and follows them, also after the settings have changed.
    pub(super) fn update_filters(&mut self) {
        match self.read_filters() {
            Ok(()) => self.filters.logged_error = None,
            Err(error) => {
                // What was found before applies until they can be read.
                let error = error.to_string();
                if self.filters.logged_error.as_ref() != Some(&error) {
                    error!("packet filters cannot be read, and are read again every second: {error}");
                }
                self.filters.logged_error = Some(error);
            }
        }
        self.follow_filters();
    }

    /// Returns the interfaces by which the kernel would forward.
    fn filtered_interfaces(&self) -> Vec<(InterfaceIndex, String)> {
        let node = self.settings.node();
        let index = |device: &String| Interface::by_name(device).ok().map(|found| (found.index, device.clone()));
        let ports = node.ports.iter().filter(|port| port.kind.has_kernel());
        let mut interfaces: Vec<(InterfaceIndex, String)> = ports.filter_map(|port| index(&port.device)).collect();
        interfaces.push((self.slow_path, SLOW_PATH.to_owned()));
        interfaces
    }

    fn read_filters(&mut self) -> Result<(), NetlinkError> {
        let interfaces = self.filtered_interfaces();
        self.filters.obstacle = obstacle(self.settings.node());
        self.filters.polled = FilterWatch::find_polled(&interfaces);
        self.filters.found = self.filters.watch.find(&interfaces)?;
        Ok(())
    }

    /// Makes the router, the kernel or nobody forward, as the filters require, and logs it.
    fn follow_filters(&mut self) {
        let mode = self.settings.node().filters;
        let (former, path) = (self.filters.path, self.filters.wanted_path(mode));
        self.filters.path = path;
        let line = self.filters.status(mode).line();
        if self.filters.logged != line {
            match &line {
                Some(line) if path == TransitPath::Closed => error!("{line}"),
                Some(line) => warn!("{line}"),
                None => info!("no packet filter applies to forwarded packets any more: the router forwards"),
            }
            self.filters.logged = line;
        }
        if path == former {
            return;
        }
        if former == TransitPath::Kernel {
            // Before the router forwards: no packet is forwarded twice.
            self.set_kernel_forwarding(false);
        }
        self.table.set_kernel_forwards(path == TransitPath::Kernel);
        self.set_stale_routes();
        self.command(Command::SetTransit(path));
        let now_ns = self.now_ns();
        if path == TransitPath::Closed {
            self.peers.hold(CLOSED, now_ns);
        } else if former == TransitPath::Closed && self.hang.hung_ns(now_ns).is_none() {
            self.peers.release();
        }
        self.reopen_for_path();
    }

    /// The forwarding thread leaves transit packets to this path from now on.
    pub(super) fn transit_set(&mut self, path: TransitPath) {
        if path == TransitPath::Kernel && self.filters.kernel_forwards() {
            self.set_kernel_forwarding(true);
        }
    }

    fn set_kernel_forwarding(&mut self, forwards: bool) {
        let node = self.settings.node();
        let is_port = |kind: PortKind| kind.has_kernel();
        let ports: Vec<&str> =
            node.ports.iter().filter(|port| is_port(port.kind)).map(|port| port.device.as_str()).collect();
        if let Err(error) = self.sysctls.set_forwarding(forwards, &ports, SLOW_PATH, node.redirects) {
            error!("the kernel's forwarding cannot be changed, so that packets are lost or forwarded twice: {error}");
        }
    }

    /// Reopens ports whose AF_XDP program would keep packets from the kernel, and those that may use AF_XDP again.
    fn reopen_for_path(&mut self) {
        let kernel_forwards = self.filters.kernel_forwards();
        for index in 0..self.ports.len() {
            let state = &self.ports[index];
            let is_wrong = match kernel_forwards {
                true => state.kind == PortKind::AfXdp.as_str(),
                false => state.fallback.as_deref() == Some(KERNEL_FORWARDS),
            };
            if is_wrong {
                self.close_to_reopen(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterFile;

    const FILE: &str = "version = 1\n[[nodes]]\nname = \"a\"\nnamespace = \"a\"\n[[nodes.ports]]\ndevice = \"eth0\"\n\
        [[nodes.ports]]\ndevice = \"tap0\"\nkind = \"tap\"\naddresses = [\"10.9.0.1/24\"]\nROUTE\n[[nodes]]\n\
        name = \"b\"\nnamespace = \"b\"\n[[nodes.ports]]\ndevice = \"eth0\"\n";

    #[test]
    fn static_routes_by_kernel_interfaces_are_an_obstacle() {
        let of = |route: &str| {
            let folder = tempfile::TempDir::new().unwrap();
            let path = folder.path().join("c.toml");
            std::fs::write(&path, FILE.replace("ROUTE", route)).unwrap();
            obstacle(&ClusterFile::read(&path).unwrap().cluster.nodes[0])
        };
        assert_eq!(of(""), None);
        let by_tap = "[[nodes.routes]]\nto = \"10.8.0.0/16\"\nvia = \"10.9.0.2\"\nport = \"tap0\"";
        assert_eq!(of(by_tap), None, "the kernel sends these packets through the router");
        let by_kernel_port = "[[nodes.routes]]\nto = \"10.8.0.0/16\"\nvia = \"10.1.0.2\"\nport = \"eth0\"";
        assert!(of(by_kernel_port).unwrap().ends_with("'ip route add 10.8.0.0/16 via 10.1.0.2 dev eth0'"));
    }

    #[test]
    fn the_line_names_mode_path_and_filters() {
        let found = vec!["nftables ip table t, chain c, hook forward".to_owned(); 5];
        let status = |mode: &str, path: &str, found: &[String]| FiltersStatus {
            mode: mode.to_owned(),
            path: path.to_owned(),
            found: found.to_vec(),
            obstacle: None,
        };
        assert_eq!(status("honour", "router", &[]).line(), None);
        assert!(status("ignore", "router", &[]).line().unwrap().contains("there are none"));
        for (mode, path, words) in [
            ("ignore", "router", "do not apply to forwarded packets"),
            ("honour", "kernel", "the kernel forwards"),
            ("refuse", "closed", "nothing is forwarded"),
        ] {
            let line = status(mode, path, &found).line().unwrap();
            assert!(line.starts_with(&format!("filters = \"{mode}\"")), "{line}");
            assert!(line.contains(words) && line.contains("hook forward") && line.contains("and 2 more"), "{line}");
        }
    }
}
